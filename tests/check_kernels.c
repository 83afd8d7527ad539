/* SPDX-License-Identifier: MIT */
/* cpu/kernels_*.c: every instruction set of this machine against f64 and against generic. */
#include "dispatch.h"
#include "numeric.h"

#include "tests.h" /* after message.h: see there */

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static const struct kernels *available[DISPATCH_MAX];
static size_t n_available;

#define require_kernels(condition, kernels)                                                        \
    require_msg(condition, "%s: %s", (kernels)->name, #condition)

static size_t pick(const size_t *values, size_t n)
{
    return values[tests_random() % n];
}

#define PICK(values) pick(values, sizeof(values) / sizeof *(values))

static size_t type_bytes(pkv_dtype dtype)
{
    return dtype == PKV_F32 ? 4 : 2;
}

static void put(void *array, pkv_dtype dtype, size_t i, float x)
{
    if (dtype == PKV_F32)
        ((float *)array)[i] = x;
    else
        ((uint16_t *)array)[i] = dtype == PKV_F16 ? f16_from_f32(x) : bf16_from_f32(x);
}

static float get(const void *array, pkv_dtype dtype, size_t i)
{
    if (dtype == PKV_F32)
        return ((const float *)array)[i];
    return dtype == PKV_F16 ? f16_to_f32(((const uint16_t *)array)[i])
                            : bf16_to_f32(((const uint16_t *)array)[i]);
}

static void *allocate(size_t bytes)
{
    void *p = malloc(bytes);

    ck_assert_ptr_nonnull(p);
    return p;
}

/* ---- Left operands ---- */

static const struct arithmetic *arithmetic_of(const struct kernels *kernels, pkv_dtype dtype)
{
    return &kernels->arithmetic[dtype];
}

/* Element p of a left operand's row: for values, or for keys. */
static float packed_element(const struct arithmetic *arithmetic, const float *row, size_t p)
{
    return arithmetic->pack ? get(row, PKV_BF16, p) : row[p];
}

static double split_element(const struct arithmetic *arithmetic, const float *row, size_t lda,
                            size_t p)
{
    if (!arithmetic->split)
        return row[p];
    return (double)get(row, PKV_BF16, p) + get(row + lda / 2, PKV_BF16, p);
}

/* ---- Product ---- */

struct product_case {
    pkv_dtype dtype;
    bool is_key; /* a score, else an accumulation */
    size_t panel;
    size_t rows, k, n, lda, ldc;
    float *a; /* left operand; its rows are padded */
    struct matrix b;
    float *scale;  /* or NULL */
    float *before; /* c before the product */
};

/* As kernels.h has it. */
static size_t stored_index(pkv_dtype dtype, size_t panel, struct matrix b, size_t i, size_t j)
{
    size_t interleave = dtype == PKV_BF16 ? 2 : 1;
    size_t rows = (b.rows + interleave - 1) / interleave * interleave;
    size_t first = j / panel * panel;
    size_t width = b.columns - first < panel ? b.columns - first : panel;

    return first * rows + (i / interleave * width + j - first) * interleave + i % interleave;
}

/* Random where it counts; what else a product may read must not matter, but is finite where a row
 * is paired with one that counts. Reads end exactly where the contract says. */
static struct matrix make_matrix(pkv_dtype dtype, size_t panel, size_t rows, size_t columns,
                                 size_t k, size_t n)
{
    struct matrix b = {NULL, rows, columns};
    size_t stored = dtype == PKV_BF16 ? (rows + 1) / 2 * 2 : rows;
    size_t counting = dtype == PKV_BF16 ? (k + 1) / 2 * 2 : k;
    size_t elements = stored * columns + KERNELS_PAD * sizeof(float) / type_bytes(dtype);

    b.data = allocate(elements * type_bytes(dtype));
    for (size_t i = 0; i < elements; i++)
        put(b.data, dtype, i, NAN);
    for (size_t i = 0; i < counting; i++)
        for (size_t j = 0; j < n; j++)
            put(b.data, dtype, stored_index(dtype, panel, b, i, j), tests_random_float());
    return b;
}

static float *random_left(const struct arithmetic *arithmetic, bool is_key, size_t rows, size_t k,
                          size_t lda)
{
    kernel_pack *pack = is_key ? arithmetic->split : arithmetic->pack;
    float *a = allocate(rows * lda * sizeof *a);

    for (size_t i = 0; i < rows * lda; i++)
        a[i] = i % lda < k ? tests_random_float() : NAN;
    if (pack)
        pack(rows, k, a, lda);
    return a;
}

static float *random_scale(size_t rows)
{
    float *scale = NULL;

    if (tests_random() % 2) {
        scale = allocate(rows * sizeof *scale);
        for (size_t i = 0; i < rows; i++)
            scale[i] = tests_random_float();
    }
    return scale;
}

static struct product_case make_product(const struct kernels *kernels, pkv_dtype dtype)
{
    static const size_t rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 24, 33};
    static const size_t depths[] = {1, 2, 5, 8, 14, 16, 32, 61, 64, 128, 256};
    static const size_t columns[] = {1, 3, 8, 9, 13, 14, 16, 17, 24, 31, 32, 40, 64, 72, 128, 136};
    struct product_case x = {.dtype = dtype, .panel = kernels->panel};

    x.rows = PICK(rows);
    x.k = PICK(depths);
    x.n = PICK(columns);
    x.is_key = tests_random() % 2;
    x.lda = kernels_padded(x.k) + tests_random() % 3 * 2;
    x.ldc = kernels_padded(x.n) + tests_random() % 3;
    x.a = random_left(arithmetic_of(kernels, dtype), x.is_key, x.rows, x.k, x.lda);
    x.b = make_matrix(dtype, x.panel, x.k + tests_random() % 3, x.n + tests_random() % 3, x.k, x.n);
    x.scale = random_scale(x.rows);
    x.before = allocate(x.rows * x.ldc * sizeof *x.before);
    for (size_t i = 0; i < x.rows * x.ldc; i++)
        x.before[i] = tests_random_float();
    return x;
}

static void free_product(struct product_case *x)
{
    free(x->a);
    free(x->b.data);
    free(x->scale);
    free(x->before);
}

static float *run_product(const struct kernels *kernels, const struct product_case *x)
{
    const struct arithmetic *arithmetic = arithmetic_of(kernels, x->dtype);
    kernel_product *product = x->is_key ? arithmetic->score : arithmetic->accumulate;
    size_t bytes = x->rows * x->ldc * sizeof *x->before;
    float *c = allocate(bytes);

    memcpy(c, x->before, bytes);
    product(x->rows, x->k, x->n, x->a, x->lda, x->b, x->scale, c, x->ldc);
    return c;
}

/* Against f64: each of the k + 1 roundings is at most 2^-24 of a partial sum, which is at most the
 * sum of magnitudes. */
static void check_product(const struct kernels *kernels, const struct product_case *x,
                          const float *c)
{
    const struct arithmetic *arithmetic = arithmetic_of(kernels, x->dtype);

    for (size_t i = 0; i < x->rows; i++) {
        for (size_t j = 0; j < x->n; j++) {
            double sum = x->scale ? (double)x->scale[i] * x->before[i * x->ldc + j] : 0;
            double magnitude = fabs(sum);

            for (size_t p = 0; p < x->k; p++) {
                const float *row = x->a + i * x->lda;
                double term =
                    (x->is_key ? split_element(arithmetic, row, x->lda, p)
                               : (double)packed_element(arithmetic, row, p)) *
                    get(x->b.data, x->dtype, stored_index(x->dtype, x->panel, x->b, p, j));

                sum += term;
                magnitude += fabs(term);
            }
            require_kernels(fabs(c[i * x->ldc + j] - sum) <=
                                (double)(4 * x->k + 2) * 0x1p-24 * magnitude,
                            kernels);
        }
    }
}

/* A row's bits depend neither on the rows beside it nor on how many columns there are. */
static void check_rows(const struct kernels *kernels, const struct product_case *x, const float *c)
{
    for (size_t i = 0; i < x->rows; i++) {
        struct product_case one = *x;
        float *row;

        one.rows = 1;
        one.n = 1 + tests_random() % x->n;
        one.a += i * x->lda;
        one.before += i * x->ldc;
        one.scale = x->scale ? x->scale + i : NULL;
        row = run_product(kernels, &one);
        require_kernels(memcmp(row, c + i * x->ldc, one.n * sizeof *c) == 0, kernels);
        free(row);
    }
}

/* Of f32 operands a product has the same bits for every type that b may be stored in. */
static void check_types(const struct kernels *kernels, const struct product_case *x, const float *c)
{
    struct product_case wide = *x;
    float *same;

    if (arithmetic_of(kernels, x->dtype)->pack)
        return;
    wide.dtype = PKV_F32;
    wide.b = make_matrix(PKV_F32, x->panel, x->b.rows, x->b.columns, x->k, x->n);
    for (size_t i = 0; i < x->k; i++)
        for (size_t j = 0; j < x->n; j++)
            put(wide.b.data, PKV_F32, stored_index(PKV_F32, x->panel, wide.b, i, j),
                get(x->b.data, x->dtype, stored_index(x->dtype, x->panel, x->b, i, j)));
    same = run_product(kernels, &wide);
    for (size_t i = 0; i < x->rows; i++)
        require_kernels(memcmp(same + i * x->ldc, c + i * x->ldc, x->n * sizeof *c) == 0, kernels);
    free(same);
    free(wide.b.data);
}

START_TEST(products)
{
    const struct kernels *kernels = available[_i / 3];

    tests_seed((uint64_t)_i);
    for (int repeat = 0; repeat < 300; repeat++) {
        struct product_case x = make_product(kernels, (pkv_dtype)(_i % 3));
        float *c = run_product(kernels, &x);

        check_product(kernels, &x, c);
        check_rows(kernels, &x, c);
        check_types(kernels, &x, c);
        free(c);
        free_product(&x);
    }
}
END_TEST

/* A chain has the bits of its two products. */
START_TEST(chains)
{
    static const size_t rows[] = {1, 3, 4, 8, 21};
    static const size_t ranks[] = {1, 3, 8, 14, 16, 17, 40};
    static const size_t columns[] = {8, 16, 24, 32, 64, 72, 128};
    const struct kernels *kernels = available[_i / 3];
    const pkv_dtype dtype = (pkv_dtype)(_i % 3);
    const struct arithmetic *arithmetic = arithmetic_of(kernels, dtype);

    tests_seed((uint64_t)_i);
    for (int repeat = 0; repeat < 100; repeat++) {
        size_t m = PICK(rows), k = PICK(columns), r = PICK(ranks), n = PICK(columns);
        size_t ldi = kernels_padded(r), ldc = kernels_padded(n);
        bool is_key = tests_random() % 2;
        kernel_pack *pack = is_key ? arithmetic->split : arithmetic->pack;
        kernel_product *product = is_key ? arithmetic->score : arithmetic->accumulate;
        kernel_chain *chain = is_key ? arithmetic->score_chain : arithmetic->accumulate_chain;
        float *a = random_left(arithmetic, is_key, m, k, kernels_padded(k));
        struct matrix b1 = make_matrix(dtype, kernels->panel, k, r, k, r);
        struct matrix b2 = make_matrix(dtype, kernels->panel, r, n, r, n);
        float *scale = random_scale(m);
        float *inner = allocate(2 * m * ldi * sizeof *inner);
        float *c = allocate(2 * m * ldc * sizeof *c);

        for (size_t i = 0; i < m * ldc; i++)
            c[i] = c[m * ldc + i] = tests_random_float();
        chain(m, a, kernels_padded(k), b1, b2, inner, ldi, scale, c, ldc);
        inner += m * ldi;
        product(m, k, r, a, kernels_padded(k), b1, NULL, inner, ldi);
        if (pack)
            pack(m, r, inner, ldi);
        product(m, r, n, inner, ldi, b2, scale, c + m * ldc, ldc);
        for (size_t i = 0; i < m; i++)
            require_kernels(memcmp(c + i * ldc, c + (m + i) * ldc, n * sizeof *c) == 0, kernels);
        free(inner - m * ldi);
        free(c);
        free(scale);
        free(b1.data);
        free(b2.data);
        free(a);
    }
}
END_TEST

static uint32_t get_bits(const uint8_t *from, size_t bytes)
{
    uint32_t lane = 0;
    uint16_t two;

    if (bytes == 4)
        memcpy(&lane, from, 4);
    else if (bytes == 2)
        memcpy(&two, from, 2), lane = two;
    else
        lane = *from;
    return lane;
}

static void put_bits(uint8_t *to, size_t bytes, uint32_t lane)
{
    uint16_t two = (uint16_t)lane;

    if (bytes == 4)
        memcpy(to, &lane, 4);
    else if (bytes == 2)
        memcpy(to, &two, 2);
    else
        *to = (uint8_t)lane;
}

/* As kernels.h has it; the code's bits must be 0 before. */
static void put_code(uint8_t *codes, bool tall, size_t rows, size_t columns, size_t i, size_t j,
                     int code)
{
    size_t half = tall ? columns : columns / 2;
    size_t whole = rows / 4 * 4;
    size_t bytes = 4;
    size_t bit = i % 2 * 16 + i / 2 * 8 % 16 + j / half * 4;
    uint8_t *lane = codes + (i / 4 * half + j % half) * 4;

    if (tall) {
        lane = codes + (i / 8 * columns + j) * 4;
        bit = i % 2 * 16 + i / 2 % 4 * 4;
    } else if (i >= whole && rows - whole >= 2 && i < whole + 2) {
        bytes = 2;
        lane = codes + whole * half + j % half * 2;
        bit = (i - whole) * 8 + j / half * 4;
    } else if (i >= whole) {
        bytes = 1;
        lane = codes + (rows - 1) * half + j % half;
        bit = j / half * 4;
    }
    put_bits(lane, bytes, get_bits(lane, bytes) | (uint32_t)(code & 15) << bit);
}

/* Codes of tall and of wide matrices: the bits of the product with the same numbers in f32. */
START_TEST(products_of_codes)
{
    static const size_t rows[] = {1, 2, 3, 4, 5, 7, 8, 9, 13, 33};
    static const size_t eights[] = {8, 16, 24, 32, 40, 64, 72, 128, 136, 256};
    static const size_t any[] = {1, 2, 3, 4, 5, 7, 8, 13, 14, 16, 17, 31, 32, 33, 40, 71, 128};
    const struct kernels *kernels = available[_i / 2];
    const bool tall = _i % 2;

    tests_seed((uint64_t)_i);
    for (int repeat = 0; repeat < 300; repeat++) {
        size_t k = tall ? PICK(eights) : PICK(any);
        size_t n = tall ? PICK(any) : PICK(eights);
        size_t padded = kernels_padded(n);
        /* The codes end exactly where the contract says that reads end. */
        size_t bytes = k * n / 2 + KERNELS_PAD * sizeof(float);
        struct product_case x = {.dtype = PKV_F32,
                                 .panel = kernels->panel,
                                 .rows = PICK(rows),
                                 .k = k,
                                 .n = n,
                                 .lda = k,
                                 .ldc = padded};
        uint8_t *codes = allocate(bytes);

        x.a = random_left(&kernels->arithmetic[PKV_F32], true, x.rows, k, k);
        x.b = make_matrix(PKV_F32, kernels->panel, k, n, k, n);
        x.before = allocate(x.rows * padded * sizeof *x.before);
        for (size_t i = 0; i < x.rows * padded; i++)
            x.before[i] = tests_random_float();
        memset(codes, 0x88, bytes); /* what lies past the end: -8, which is no code */
        memset(codes, 0, k * n / 2);
        for (size_t i = 0; i < k; i++) {
            for (size_t j = 0; j < n; j++) {
                int code = (int)(tests_random() % 15) - 7;

                put_code(codes, tall, k, n, i, j, code);
                put(x.b.data, PKV_F32, stored_index(PKV_F32, x.panel, x.b, i, j), (float)code);
            }
        }

        size_t size = x.rows * padded * sizeof *x.before;
        float *expected = run_product(kernels, &x);
        float *c = allocate(size);

        memcpy(c, x.before, size);
        (tall ? kernels->product_tall : kernels->product_wide)(x.rows, k, n, x.a, k, codes, c,
                                                               padded);
        for (size_t i = 0; i < x.rows; i++)
            require_kernels(memcmp(c + i * padded, expected + i * padded, n * sizeof *c) == 0,
                            kernels);
        free(c);
        free(expected);
        free(codes);
        free_product(&x);
    }
}
END_TEST

/* ---- Softmax and merge ---- */

#define SOFTMAX_ROWS 21
#define SOFTMAX_PAD  32

/* Running states over several pages against f64 on all scores at once. */
START_TEST(softmax_states)
{
    static const size_t columns[] = {1, 7, 8, 15, 16, 24, 32, 33, 64, 256};
    const struct kernels *kernels = available[_i / 3];
    const struct arithmetic *arithmetic = arithmetic_of(kernels, (pkv_dtype)(_i % 3));
    /* Half a unit in the last place of bf16, or the argument's rounding to 2^-19 before exp. */
    const double tolerance = arithmetic->pack ? 0x1.02p-8 : 4e-6;
    float m[SOFTMAX_PAD], l[SOFTMAX_PAD], scale[SOFTMAX_PAD];
    double reference_l[SOFTMAX_ROWS];

    tests_seed((uint64_t)_i);
    for (size_t i = 0; i < SOFTMAX_ROWS; i++) {
        m[i] = -INFINITY;
        l[i] = 0;
        reference_l[i] = 0;
    }
    for (int page = 0; page < 200; page++) {
        size_t n = PICK(columns);
        size_t lds = kernels_padded(n) + tests_random() % 3;
        size_t bytes = ((SOFTMAX_ROWS - 1) * lds + kernels_padded(n)) * sizeof(float);
        float *s = allocate(bytes);
        float *before = allocate(bytes);
        uint32_t valid[SOFTMAX_ROWS];
        bool masked = tests_random() % 2;

        for (size_t i = 0; i < bytes / sizeof *s; i++)
            s[i] = NAN;
        for (size_t i = 0; i < SOFTMAX_ROWS; i++) {
            valid[i] = masked ? 1 + tests_random() % (uint32_t)n : (uint32_t)n;
            for (size_t j = 0; j < n; j++)
                s[i * lds + j] = 20 * tests_random_float() + 0.05f * (float)page;
            for (size_t j = valid[i]; j < n; j++)
                s[i * lds + j] = 1e30f; /* unseen */
        }
        memcpy(before, s, bytes);
        arithmetic->softmax(SOFTMAX_ROWS, n, masked ? valid : NULL, s, lds, m, l, scale);
        for (size_t i = 0; i < SOFTMAX_ROWS; i++) {
            double largest = -INFINITY;
            double sum = 0;

            for (size_t j = 0; j < valid[i]; j++)
                largest = fmax(largest, before[i * lds + j]);
            require_kernels(m[i] >= largest - KERNELS_SLACK, kernels);
            require_kernels(page > 0 || m[i] == largest, kernels);
            for (size_t j = 0; j < n; j++) {
                double p = j < valid[i] ? exp((double)before[i * lds + j] - m[i]) : 0;

                require_kernels(
                    fabs(packed_element(arithmetic, s + i * lds, j) - p) <= tolerance * p, kernels);
                sum += packed_element(arithmetic, s + i * lds, j);
            }
            reference_l[i] = reference_l[i] * scale[i] + sum;
            require_kernels(fabs(l[i] - reference_l[i]) <= 1e-5 * reference_l[i], kernels);
        }
        free(s);
        free(before);
    }
}
END_TEST

/* The scale is that between the maxima, which never fall. */
START_TEST(softmax_scales)
{
    const struct kernels *kernels = available[_i / 3];
    const struct arithmetic *arithmetic = arithmetic_of(kernels, (pkv_dtype)(_i % 3));
    float m[16] = {-INFINITY}, l[16] = {0}, scale[16];

    tests_seed((uint64_t)_i);
    for (int page = 0; page < 2000; page++) {
        float before = m[0];
        float s[16] = {50 * tests_random_float() + 0.01f * (float)page};

        arithmetic->softmax(1, 1, NULL, s, 16, m, l, scale);
        require_kernels(m[0] >= before, kernels);
        require_kernels(fabs(scale[0] - exp((double)before - m[0])) <= 3e-7, kernels);
    }
}
END_TEST

/* exp(x) through a row (0, x): x - m is exact, so what is left is exp's own error. */
START_TEST(exponential)
{
    const struct kernels *kernels = available[_i / 3];
    const struct arithmetic *arithmetic = arithmetic_of(kernels, (pkv_dtype)(_i % 3));
    const double tolerance = arithmetic->pack ? 0x1.02p-8 : 0x1p-22;
    const int steps = 200000;
    int zeros = 0;

    for (int i = 0; i < steps; i++) {
        float s[16] = {0, -120.0f * (float)i / (float)steps};
        float m[16] = {-INFINITY}, l[16] = {0}, scale[16];
        double exact = exp((double)s[1]);

        float p;

        arithmetic->softmax(1, 2, NULL, s, 16, m, l, scale);
        require_kernels(packed_element(arithmetic, s, 0) == 1.0f, kernels);
        p = packed_element(arithmetic, s, 1);
        if (exact < 0x1.0001p-126) {
            require_kernels(p == 0.0f || exact > 0x1.fffep-127, kernels);
            zeros += p == 0.0f;
        } else {
            require_kernels(fabs(p - exact) <= tolerance * exact, kernels);
        }
    }
    ck_assert_int_gt(zeros, 0);
}
END_TEST

START_TEST(merged_states)
{
    const struct kernels *kernels = available[_i];
    enum { ROWS = 5, LDO = 144 };
    static const size_t columns[] = {1, 8, 16, 24, 64, 136};
    float o[ROWS * LDO], o2[ROWS * LDO], before[ROWS * LDO];

    tests_seed((uint64_t)_i);
    for (int repeat = 0; repeat < 100; repeat++) {
        size_t n = PICK(columns);
        float m[ROWS], l[ROWS], m2[ROWS], l2[ROWS], m1[ROWS], l1[ROWS];

        for (size_t i = 0; i < ROWS * LDO; i++) {
            before[i] = o[i] = tests_random_float();
            o2[i] = tests_random_float();
        }
        for (size_t i = 0; i < ROWS; i++) {
            m1[i] = m[i] = 10 * tests_random_float();
            l1[i] = l[i] = 1 + fabsf(tests_random_float());
            m2[i] = i == 0 ? m[i] : 10 * tests_random_float();
            l2[i] = 1 + fabsf(tests_random_float());
        }
        kernels->merge(ROWS, n, m, l, o, m2, l2, o2, LDO);
        for (size_t i = 0; i < ROWS; i++) {
            double largest = fmax(m1[i], m2[i]);
            double a = exp(m1[i] - largest);
            double b = exp(m2[i] - largest);

            require_kernels(m[i] == largest, kernels);
            require_kernels(fabs(l[i] - (a * l1[i] + b * l2[i])) <= 4e-6 * l[i], kernels);
            for (size_t j = 0; j < n; j++) {
                double exact = a * before[i * LDO + j] + b * o2[i * LDO + j];

                require_kernels(fabs(o[i * LDO + j] - exact) <= 4e-6, kernels);
            }
        }
    }
}
END_TEST

/* ---- Whole pages of codes ---- */

enum { CODED_PAGES = 11, CODED_TOKENS = 32, CODED_MOST = 256, CODED_ROWS = 11 };

/* Pages of INT4 factors and what they are in f64. */
struct coded_case {
    size_t d, rank_k, rank_v, pages;
    struct coded k[2], v[2];
    unsigned char *memory;
    struct factor_page page[CODED_PAGES + KERNELS_AHEAD];
    double *keys, *values; /* [pages * CODED_TOKENS, d] */
};

/* Fills a part with random codes and scales of around `scale`, graded over a factor of 30 or zero
 * here and there; adds to `product` [rows, columns], if it is the right one, left times this. */
static void put_coded(unsigned char *page, struct coded part, bool tall, bool row_scales,
                      float scale, double *values)
{
    size_t n_scales = row_scales ? part.rows : part.columns;
    uint16_t *scales = allocate(n_scales * sizeof *scales);

    memset(page + part.codes, 0, part.rows * part.columns / 2);
    for (size_t i = 0; i < n_scales; i++)
        scales[i] =
            tests_random() % 16 == 0 ? 0 : f16_from_f32(scale * expf(1.7f * tests_random_float()));
    memcpy(page + part.scales, scales, n_scales * sizeof *scales);
    for (size_t i = 0; i < part.rows; i++) {
        for (size_t j = 0; j < part.columns; j++) {
            int code = (int)(tests_random() % 15) - 7;

            put_code(page + part.codes, tall, part.rows, part.columns, i, j, code);
            values[i * part.columns + j] = code * (double)f16_to_f32(scales[row_scales ? i : j]);
        }
    }
    free(scales);
}

static void multiply_f64(size_t rows, size_t k, size_t n, const double *a, const double *b,
                         double *c)
{
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < n; j++) {
            c[i * n + j] = 0;
            for (size_t p = 0; p < k; p++)
                c[i * n + j] += a[i * k + p] * b[p * n + j];
        }
    }
}

static struct coded_case make_coded(size_t d, size_t rank_k, size_t rank_v, size_t pages,
                                    float k_scale, float v_scale)
{
    struct coded_case x = {.d = d, .rank_k = rank_k, .rank_v = rank_v, .pages = pages};
    size_t k_codes = rank_k * (d + CODED_TOKENS) / 2;
    size_t v_codes = rank_v * (d + CODED_TOKENS) / 2;
    size_t k_bytes = (k_codes + 2 * (d + rank_k) + 3) / 4 * 4;
    size_t v_bytes = v_codes + 2 * (d + CODED_TOKENS);
    size_t page_bytes = k_bytes + (v_bytes + 3) / 4 * 4;
    double *left = allocate(CODED_MOST * CODED_TOKENS * sizeof *left);
    double *right = allocate(CODED_MOST * CODED_TOKENS * sizeof *right);
    double *transposed = allocate(CODED_MOST * CODED_TOKENS * sizeof *transposed);

    x.k[0] = (struct coded){0, k_codes, d, rank_k};
    x.k[1] = (struct coded){d * rank_k / 2, k_codes + 2 * d, rank_k, CODED_TOKENS};
    x.v[0] = (struct coded){0, v_codes, CODED_TOKENS, rank_v};
    x.v[1] = (struct coded){CODED_TOKENS * rank_v / 2, v_codes + 2 * CODED_TOKENS, rank_v, d};
    /* Pages end exactly where the contract says that reads end. */
    x.memory = allocate(pages * page_bytes + KERNELS_PAD * sizeof(float));
    memset(x.memory, 0x88, pages * page_bytes + KERNELS_PAD * sizeof(float));
    x.keys = allocate(pages * CODED_TOKENS * d * sizeof *x.keys);
    x.values = allocate(pages * CODED_TOKENS * d * sizeof *x.values);
    for (size_t i = 0; i < pages + KERNELS_AHEAD; i++) {
        size_t at = (i < pages ? i : pages - 1) * page_bytes;

        x.page[i] = (struct factor_page){x.memory + at, x.memory + at + k_bytes};
    }
    for (size_t i = 0; i < pages; i++) {
        put_coded(x.page[i].k, x.k[0], true, true, k_scale, left);
        put_coded(x.page[i].k, x.k[1], false, true, 1 / k_scale / 30, right);
        multiply_f64(d, rank_k, CODED_TOKENS, left, right, transposed);
        for (size_t t = 0; t < CODED_TOKENS; t++)
            for (size_t j = 0; j < d; j++)
                x.keys[(i * CODED_TOKENS + t) * d + j] = transposed[j * CODED_TOKENS + t];
        put_coded(x.page[i].v, x.v[0], true, true, v_scale, left);
        put_coded(x.page[i].v, x.v[1], false, false, v_scale, right);
        multiply_f64(CODED_TOKENS, rank_v, d, left, right, x.values + i * CODED_TOKENS * d);
    }
    free(left);
    free(right);
    free(transposed);
    return x;
}

static void free_coded(struct coded_case *x)
{
    free(x->memory);
    free(x->keys);
    free(x->values);
}

/* Largest error of o / l, relative to the largest output, and of m + ln(l), relative to 4 or the
 * largest score. */
static void coded_errors(const struct coded_case *x, size_t rows, const float *q, const float *m,
                         const float *l, const float *o, double *error, double *lse_error)
{
    const size_t tokens = x->pages * CODED_TOKENS;
    double p[CODED_PAGES * CODED_TOKENS];
    double largest = 0;

    *error = *lse_error = 0;
    for (size_t i = 0; i < rows; i++) {
        double top = -INFINITY;
        double sum = 0;

        for (size_t t = 0; t < tokens; t++) {
            p[t] = 0;
            for (size_t j = 0; j < x->d; j++)
                p[t] += (double)q[i * x->d + j] * x->keys[t * x->d + j];
        }
        for (size_t t = 0; t < tokens; t++)
            top = fmax(top, p[t]);
        for (size_t t = 0; t < tokens; t++)
            sum += p[t] = exp(p[t] - top);
        *lse_error = fmax(*lse_error,
                          tests_difference(top + log(sum), m[i] + log(l[i])) / fmax(4, fabs(top)));
        for (size_t j = 0; j < x->d; j++) {
            double exact = 0;

            for (size_t t = 0; t < tokens; t++)
                exact += p[t] * x->values[t * x->d + j] / sum;
            largest = fmax(largest, fabs(exact));
            *error = fmax(*error, tests_difference(exact, o[i * x->d + j] / l[i]));
        }
    }
    *error /= largest;
}

/* Against f64, and a row's bits do not depend on the rows beside it. Left operands are words of 15
 * bits of the largest, q of the largest in the row times the largest scale of the page, which with
 * these scales leaves some 9 bits of a typical one; their roundings are independent. */
START_TEST(pages_of_codes)
{
    static const size_t dims[] = {64, 128, 192, 256};
    const struct kernels *kernels = available[_i];
    const struct whole_pages *whole = &kernels->arithmetic[PKV_BF16].whole_pages;

    if (whole->rows == 0 || !whole->attend_codes)
        return;
    tests_seed((uint64_t)_i);
    for (int repeat = 0; repeat < 60; repeat++) {
        /* A wide range of scales: subnormal ones of f16 too. */
        struct coded_case x =
            make_coded(PICK(dims), 1 + tests_random() % 16, 1 + tests_random() % 16,
                       1 + tests_random() % CODED_PAGES, repeat % 3 == 0 ? 3e-5f : 0.05f,
                       repeat % 4 == 0 ? 3e-5f : 0.2f);
        size_t rows = 1 + tests_random() % CODED_ROWS;
        float *q = allocate(rows * x.d * sizeof *q);
        float *o = allocate(rows * x.d * sizeof *o);
        float *one = allocate(x.d * sizeof *one);
        float m[CODED_ROWS], l[CODED_ROWS];
        double error, lse_error;

        for (size_t i = 0; i < rows; i++) {
            m[i] = -INFINITY;
            l[i] = 0;
        }
        for (size_t i = 0; i < rows * x.d; i++) {
            q[i] = tests_random_float() * (i % x.d == 7 ? 6.0f : 1.5f) / sqrtf((float)x.d) *
                   (i < x.d ? 1e-3f : 1.0f);
            o[i] = 0;
        }
        /* In two calls: states go on. */
        size_t first = x.pages / 3;

        if (first > 0)
            whole->attend_codes(rows, q, x.k, x.v, first, x.page, m, l, o, x.d);
        whole->attend_codes(rows, q, x.k, x.v, x.pages - first, x.page + first, m, l, o, x.d);
        coded_errors(&x, rows, q, m, l, o, &error, &lse_error);
        require_kernels(error <= 3e-3, kernels);
        require_kernels(lse_error <= 0x1p-11, kernels);
        for (size_t i = 0; i < rows; i++) {
            float m1 = -INFINITY, l1 = 0;

            memset(one, 0, x.d * sizeof *one);
            if (first > 0)
                whole->attend_codes(1, q + i * x.d, x.k, x.v, first, x.page, &m1, &l1, one, x.d);
            whole->attend_codes(1, q + i * x.d, x.k, x.v, x.pages - first, x.page + first, &m1, &l1,
                                one, x.d);
            require_kernels(m1 == m[i] && l1 == l[i], kernels);
            require_kernels(memcmp(one, o + i * x.d, x.d * sizeof *one) == 0, kernels);
        }
        free(one);
        free(o);
        free(q);
        free_coded(&x);
    }
}
END_TEST

/* Pages of nothing but zeros, queries of zeros, and one that is not finite beside one that is. */
START_TEST(odd_pages_of_codes)
{
    const struct kernels *kernels = available[_i];
    const struct whole_pages *whole = &kernels->arithmetic[PKV_BF16].whole_pages;
    enum { ROWS = 3, D = 128 };

    if (whole->rows == 0 || !whole->attend_codes)
        return;
    tests_seed((uint64_t)_i);
    for (int zeros = 0; zeros < 2; zeros++) {
        struct coded_case x = make_coded(D, 16, 14, 5, 0.05f, 0.2f);
        float m[ROWS] = {-INFINITY, -INFINITY, -INFINITY}, l[ROWS] = {0};
        float q[ROWS * D] = {0}, o[ROWS * D] = {0};

        if (zeros)
            memset(x.memory, 0, (size_t)(x.page[4].v - x.memory) + x.v[1].scales + 2 * D);
        q[2 * D + 5] = _i % 2 ? NAN : INFINITY;
        whole->attend_codes(ROWS, q, x.k, x.v, 5, x.page, m, l, o, D);
        for (size_t i = 0; i < 2; i++) {
            require_kernels(m[i] == 0, kernels);
            require_kernels(fabs(l[i] - 160) <= 1e-3, kernels);
            for (size_t j = 0; j < D; j++) {
                double sum = 0;

                for (size_t t = 0; t < 160 && !zeros; t++)
                    sum += x.values[t * D + j];
                require_kernels(fabs(o[i * D + j] - sum) <= 0.2, kernels);
            }
        }
        for (size_t j = 0; j < D; j++)
            require_kernels(isnan(o[2 * D + j] / l[2]), kernels);
        free_coded(&x);
    }
}
END_TEST

/* ---- Conversions ---- */

/* The value of a 16-bit float from its definition. */
static double value_of(uint16_t h, int mantissa_bits, int bias)
{
    int exponent = (h & 0x7fff) >> mantissa_bits;
    int mantissa = h & ((1 << mantissa_bits) - 1);
    int most = 0x7fff >> mantissa_bits;
    double value = exponent == most ? (mantissa ? NAN : INFINITY)
                   : exponent == 0
                       ? ldexp(mantissa, 1 - bias - mantissa_bits)
                       : ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);

    return h & 0x8000 ? -value : value;
}

START_TEST(all_values_widen)
{
    const struct kernels *kernels = available[_i];
    static const size_t counts[] = {1, 2, 3, 5, 8, 13, 17, 31, 64, 100};

    for (int type = PKV_F16; type <= PKV_BF16; type++) {
        size_t n;

        tests_seed(1);
        for (size_t first = 0; first < 65536; first += n) {
            uint16_t *h;
            float x[101];

            n = PICK(counts);
            n = n < 65536 - first ? n : 65536 - first;
            h = allocate(n * sizeof *h);
            for (size_t i = 0; i < n; i++)
                h[i] = (uint16_t)(first + i);
            x[n] = 42;
            kernels->to_f32[type](n, h, x);
            require_kernels(x[n] == 42, kernels);
            for (size_t i = 0; i < n; i++) {
                double value = type == PKV_F16 ? value_of(h[i], 10, 15) : value_of(h[i], 7, 127);

                require_kernels(isnan(value) ? isnan(x[i])
                                             : x[i] == value && !signbit(x[i]) == !signbit(value),
                                kernels);
            }
            free(h);
        }
    }
}
END_TEST

/* The nearest of the two neighbours, the even one on a tie; as IEEE 754 says overflow begins half
 * a unit above the largest finite value. */
static bool is_nearest(float x, uint16_t h, int mantissa_bits, int bias)
{
    uint16_t infinity = (uint16_t)(0x8000 - (1 << mantissa_bits));
    uint16_t magnitude = h & 0x7fff;
    double value = fabs((double)x);
    double unit = ldexp(1, (0x7fff >> mantissa_bits) - 1 - bias - mantissa_bits);
    double limit = ldexp(1, (0x7fff >> mantissa_bits) - bias) - unit / 2;

    if (isnan(x))
        return magnitude > infinity;
    if (!signbit(x) != !(h & 0x8000))
        return false;
    if (value >= limit)
        return magnitude == infinity;
    if (magnitude >= infinity)
        return false;

    double error = fabs(value_of(magnitude, mantissa_bits, bias) - value);
    double above = magnitude + 1 < infinity
                       ? value_of((uint16_t)(magnitude + 1), mantissa_bits, bias) - value
                       : INFINITY;
    double below =
        magnitude > 0 ? value - value_of((uint16_t)(magnitude - 1), mantissa_bits, bias) : INFINITY;

    return error <= above && error <= below &&
           (magnitude % 2 == 0 || (error < above && error < below));
}

START_TEST(narrowing_rounds_to_nearest_even)
{
    const struct kernels *kernels = available[_i];
    float x[67];
    uint16_t h[68];

    tests_seed((uint64_t)_i);
    for (int repeat = 0; repeat < 20000; repeat++) {
        size_t n = 1 + tests_random() % 67;

        for (size_t i = 0; i < n; i++) {
            uint32_t bits = tests_random();

            /* Any value; halfway between two of a type or next to it; an f16's range. */
            if (repeat % 4 == 1)
                bits = (bits & 0xffff0000u) | (0x7fffu + tests_random() % 3);
            else if (repeat % 4 == 2)
                bits = (bits & 0xffffe000u) | (0x0fffu + tests_random() % 3);
            if (repeat % 2 == 0)
                bits = (bits & 0x87ffffffu) + 0x32000000u + (tests_random() % 3 << 27);
            x[i] = f32_from_bits(bits);
        }
        for (int type = PKV_F16; type <= PKV_BF16; type++) {
            h[n] = 0x1234;
            kernels->from_f32[type](n, x, h);
            require_kernels(h[n] == 0x1234, kernels);
            for (size_t i = 0; i < n; i++)
                require_kernels(type == PKV_F16 ? is_nearest(x[i], h[i], 10, 15)
                                                : is_nearest(x[i], h[i], 7, 127),
                                kernels);
        }
    }
}
END_TEST

/* ---- Dispatch ---- */

START_TEST(choice)
{
    const struct kernels *kernels;
    struct message message;

    ck_assert_str_eq(available[0]->name, "generic");
    unsetenv("PUZZLEKV_ISA");
    ck_assert_int_eq(dispatch_choose(NULL, &kernels, &message), PKV_OK);
    ck_assert_ptr_eq(kernels, available[n_available - 1]);
    setenv("PUZZLEKV_ISA", "", 1);
    ck_assert_int_eq(dispatch_choose(NULL, &kernels, &message), PKV_OK);
    ck_assert_ptr_eq(kernels, available[n_available - 1]);
    for (size_t i = 0; i < n_available; i++) {
        size_t last = i;

        while (last + 1 < n_available && strcmp(available[last + 1]->name, available[i]->name) == 0)
            last++;
        setenv("PUZZLEKV_ISA", available[i]->name, 1);
        ck_assert_int_eq(dispatch_choose(NULL, &kernels, &message), PKV_OK);
        ck_assert_ptr_eq(kernels, available[last]);
        ck_assert_int_eq(dispatch_choose("generic", &kernels, &message), PKV_OK);
        ck_assert_ptr_eq(kernels, available[0]);
    }
    setenv("PUZZLEKV_ISA", "mmx", 1);
    ck_assert_int_eq(dispatch_choose(NULL, &kernels, &message), PKV_ERROR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(message.text, "PUZZLEKV_ISA"));
    ck_assert_int_eq(dispatch_choose("vax", &kernels, &message), PKV_ERROR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(message.text, "vax"));
    for (size_t i = 0; i < n_available; i++)
        ck_assert_ptr_nonnull(strstr(message.text, available[i]->name));
    ck_assert_int_eq(dispatch_choose("", &kernels, &message), PKV_ERROR_UNSUPPORTED);
}
END_TEST

/* Rows in pairs are rounded as single elements are, tell what is not finite, and widen again. */
START_TEST(pairs)
{
    const struct kernels *kernels = available[_i];
    enum { ROWS = 5, COLUMNS = 64, STRIDE = COLUMNS + 1 };
    float x[ROWS * STRIDE], widened[ROWS * STRIDE];
    uint16_t h[(ROWS + 1) * STRIDE];

    tests_seed((uint64_t)_i);
    for (int repeat = 0; repeat < 10000; repeat++) {
        /* As wide as a panel at most. */
        size_t n = 1 + tests_random() % kernels->panel;
        size_t rows = 1 + tests_random() % ROWS;
        bool finite = repeat % 2 == 0;

        for (size_t i = 0; i < ROWS * STRIDE; i++) {
            uint32_t bits = tests_random();

            if (repeat % 3 == 1)
                bits = (bits & 0xffff0000u) | (0x7fffu + tests_random() % 3);
            x[i] = f32_from_bits(bits);
            if (!isfinite(bf16_to_f32(bf16_from_f32(x[i]))))
                x[i] = 1;
            widened[i] = 42;
        }
        for (size_t i = 0; i < (ROWS + 1) * STRIDE; i++)
            h[i] = 0x1234;
        /* Alone: an infinity, a NaN or what is rounded to infinity. */
        if (!finite)
            x[tests_random() % rows * STRIDE + tests_random() % n] =
                f32_from_bits(repeat % 3 == 0   ? 0xff800000u
                              : repeat % 3 == 1 ? 0x7fffffffu
                                                : 0x7f7f8000u);
        require_kernels(kernels->pairs_from_f32(rows, n, x, STRIDE, h, STRIDE) == finite, kernels);
        kernels->pairs_to_f32(rows, n, h, STRIDE, widened, STRIDE);
        for (size_t i = 0; i < ROWS + ROWS % 2; i++) {
            for (size_t j = 0; j < STRIDE; j++) {
                uint16_t stored = h[(i / 2 * STRIDE + j) * 2 + i % 2];
                uint16_t value = i < rows ? bf16_from_f32(x[i * STRIDE + j]) : 0;

                if (j >= n || i >= rows + rows % 2)
                    require_kernels(stored == 0x1234, kernels);
                else if (finite)
                    require_kernels(stored == value, kernels);
                if (i < ROWS && (j >= n || i >= rows))
                    require_kernels(widened[i * STRIDE + j] == 42, kernels);
                else if (i < ROWS && finite)
                    require_kernels(f32_bits(widened[i * STRIDE + j]) == (uint32_t)value << 16,
                                    kernels);
            }
        }
    }
}
END_TEST

/* From and to columns, pairs have the bits that they have from and to rows. */
START_TEST(pairs_of_columns)
{
    const struct kernels *kernels = available[_i];
    enum { MOST = 70, STRIDE = 96, PAIRS = (MOST + 1) / 2 };
    static float x[STRIDE * STRIDE], turned[STRIDE * STRIDE], widened[STRIDE * STRIDE];
    static uint32_t pairs[PAIRS * STRIDE], expected[PAIRS * STRIDE];

    tests_seed((uint64_t)_i);
    for (int repeat = 0; repeat < 3000; repeat++) {
        size_t rows = 1 + tests_random() % MOST;
        size_t n = 1 + tests_random() % kernels->panel;
        bool finite = repeat % 2 == 0;

        for (size_t i = 0; i < STRIDE * STRIDE; i++) {
            turned[i] = (float)NAN; /* what pads rows counts for nothing */
            widened[i] = 42;
        }
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < n; j++)
                turned[j * STRIDE + i] =
                    ldexpf(tests_random_float(), (int)(tests_random() % 200) - 100);
        if (!finite)
            turned[tests_random() % n * STRIDE + tests_random() % rows] =
                f32_from_bits(repeat % 3 == 0 ? 0xff800000u : 0x7f7f8000u);
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < n; j++)
                x[i * STRIDE + j] = turned[j * STRIDE + i];
        for (size_t i = 0; i < PAIRS * STRIDE; i++)
            pairs[i] = expected[i] = 0x12345678;
        require_kernels(
            kernels->pairs_from_columns(rows, n, turned, STRIDE, pairs, STRIDE) == finite, kernels);
        if (!finite)
            continue;
        ck_assert(kernels->pairs_from_f32(rows, n, x, STRIDE, expected, STRIDE));
        require_kernels(memcmp(pairs, expected, sizeof pairs) == 0, kernels);
        if (rows % 2 == 1 || rows < 2 * KERNELS_PAD || n < 4)
            continue;
        kernels->pairs_to_columns(rows, n, pairs, STRIDE, widened, STRIDE);
        for (size_t j = 0; j < STRIDE; j++)
            for (size_t i = 0; i < STRIDE; i++)
                require_kernels(widened[j * STRIDE + i] ==
                                    (i < rows && j < n
                                         ? bf16_to_f32(bf16_from_f32(turned[j * STRIDE + i]))
                                         : 42),
                                kernels);
    }
}
END_TEST

/* Every shape that tiles may meet, between margins that stay. */
START_TEST(transposes)
{
    const struct kernels *kernels = available[_i];
    enum { MOST = 40, STRIDE = MOST + 1 };
    static float from[MOST * STRIDE], to[MOST * STRIDE];

    for (size_t i = 0; i < MOST * STRIDE; i++)
        from[i] = (float)(i + 1);
    for (size_t rows = 1; rows < MOST; rows++) {
        for (size_t columns = 1; columns < MOST; columns++) {
            memset(to, 0, sizeof to);
            kernels->transpose(rows, columns, from, STRIDE, to, STRIDE);
            for (size_t j = 0; j < MOST; j++)
                for (size_t i = 0; i < STRIDE; i++)
                    require_kernels(to[j * STRIDE + i] ==
                                        (i < rows && j < columns ? from[i * STRIDE + j] : 0),
                                    kernels);
        }
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("kernels");
    TCase *test = tcase_create("kernels");
    int n;

    n_available = dispatch_available(available);
    n = (int)n_available;
    tcase_add_loop_test(test, products, 0, 3 * n);
    tcase_add_loop_test(test, products_of_codes, 0, 2 * n);
    tcase_add_loop_test(test, chains, 0, 3 * n);
    tcase_add_loop_test(test, softmax_states, 0, 3 * n);
    tcase_add_loop_test(test, softmax_scales, 0, 3 * n);
    tcase_add_loop_test(test, exponential, 0, 3 * n);
    tcase_add_loop_test(test, merged_states, 0, n);
    tcase_add_loop_test(test, pages_of_codes, 0, n);
    tcase_add_loop_test(test, odd_pages_of_codes, 0, n);
    tcase_add_loop_test(test, all_values_widen, 0, n);
    tcase_add_loop_test(test, narrowing_rounds_to_nearest_even, 0, n);
    tcase_add_loop_test(test, pairs, 0, n);
    tcase_add_loop_test(test, pairs_of_columns, 0, n);
    tcase_add_loop_test(test, transposes, 0, n);
    tcase_add_test(test, choice);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
