/* SPDX-License-Identifier: MIT */
/* Random pages: the spectrum that their header promises, which is that of the real ones. */
#include "random_pages.h"

#include "tests.h"

#include <cblas.h>
#include <lapacke.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PAGE   RANDOM_PAGE_TOKENS
#define BLOCKS ((size_t)3)
#define HEADS  ((size_t)2)
#define REAL   36 /* pages in the file, [PAGE, 64] each */

/* The eigenvalues of X X^T as shares of their sum, descending; rows of x are `stride` apart. */
static double find_shares(const float *x, size_t stride, size_t dim, double shares[PAGE])
{
    double *wide = tests_allocate(PAGE * dim, sizeof *wide);
    double gram[PAGE * PAGE], values[PAGE], sum = 0;

    for (size_t i = 0; i < PAGE * dim; i++)
        wide[i] = (double)x[i / dim * stride + i % dim];
    cblas_dsyrk(CblasRowMajor, CblasLower, CblasNoTrans, PAGE, (int)dim, 1, wide, (int)dim, 0, gram,
                PAGE);
    ck_assert_int_eq(LAPACKE_dsyevd(LAPACK_COL_MAJOR, 'N', 'U', PAGE, gram, PAGE, values), 0);
    free(wide);
    for (size_t i = 0; i < PAGE; i++)
        sum += values[i];
    for (size_t i = 0; i < PAGE; i++)
        shares[i] = values[PAGE - 1 - i] / sum;
    return sum;
}

static int compare_numbers(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Real shares, each the median over the pages of a file. */
static void find_medians(const char *path, double medians[PAGE])
{
    float *pages = tests_read_f32(path, REAL * PAGE * 64);
    double shares[REAL][PAGE], one[REAL];

    for (size_t page = 0; page < REAL; page++)
        find_shares(pages + page * PAGE * 64, 64, 64, shares[page]);
    for (size_t i = 0; i < PAGE; i++) {
        for (size_t page = 0; page < REAL; page++)
            one[page] = shares[page][i];
        qsort(one, REAL, sizeof *one, compare_numbers);
        medians[i] = (one[REAL / 2 - 1] + one[REAL / 2]) / 2;
    }
    free(pages);
}

static void check_spectrum(const float *x, size_t dim, double first, double fall,
                           const double real[PAGE])
{
    for (size_t i = 0; i < BLOCKS * HEADS; i++) {
        const float *block = x + (i / HEADS * PAGE * HEADS + i % HEADS) * dim;
        double shares[PAGE];

        ck_assert_double_eq_tol(find_shares(block, HEADS * dim, dim, shares) / (double)(PAGE * dim),
                                1, 1e-4);
        ck_assert_double_eq_tol(shares[0], first, 1e-4);
        for (size_t n = 2; n < PAGE; n++)
            ck_assert_double_eq_tol(log(shares[n - 1] / shares[n]), fall, 1e-2);
        for (size_t n = 0; n + 2 < PAGE; n++)
            require_msg(shares[n] < 1.36 * real[n] && shares[n] > 0.74 * real[n],
                        "share %zu is %g, of real pages %g", n, shares[n], real[n]);
    }
}

static const size_t dims[] = {64, 128};

START_TEST(spectrum_of_real_pages)
{
    size_t dim = dims[_i], count = BLOCKS * PAGE * HEADS * dim;
    float *k = tests_allocate(count, sizeof *k), *v = tests_allocate(count, sizeof *v);
    double real[PAGE];

    ck_assert(random_pages(7, BLOCKS, HEADS, dim, 2, k, v, NULL));
    find_medians(tests_path("pages/keys.f32"), real);
    check_spectrum(k, dim, 0.73, 0.19, real);
    find_medians(tests_path("pages/values.f32"), real);
    check_spectrum(v, dim, 0.37, 0.16, real);
    /* Pages differ. */
    ck_assert(memcmp(k, k + PAGE * HEADS * dim, dim * sizeof *k) != 0);
    ck_assert(memcmp(k, k + dim, dim * sizeof *k) != 0);
    free(k);
    free(v);
}
END_TEST

START_TEST(same_for_any_number_of_threads)
{
    size_t count = BLOCKS * PAGE * HEADS * 8;
    float *x[4];

    for (size_t i = 0; i < 4; i++)
        x[i] = tests_allocate(count, sizeof **x);
    ck_assert(random_pages(7, BLOCKS, HEADS, 8, 1, x[0], x[1], NULL));
    ck_assert(random_pages(7, BLOCKS, HEADS, 8, 3, x[2], x[3], NULL));
    ck_assert(memcmp(x[0], x[2], count * sizeof **x) == 0);
    ck_assert(memcmp(x[1], x[3], count * sizeof **x) == 0);
    ck_assert(random_pages(8, BLOCKS, HEADS, 8, 1, x[2], x[3], NULL));
    ck_assert(memcmp(x[0], x[2], count * sizeof **x) != 0);
    for (size_t i = 0; i < 4; i++)
        free(x[i]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("random_pages");
    TCase *test = tcase_create("random_pages");

    tcase_add_loop_test(test, spectrum_of_real_pages, 0, sizeof dims / sizeof *dims);
    tcase_add_test(test, same_for_any_number_of_threads);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
