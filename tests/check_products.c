/* SPDX-License-Identifier: MIT */
/* tools/runner/products.c: every weight type against sums in double precision. */
#include <math.h>
#include <stdlib.h>

#include <puzzlekv.h>

#include "gguf_writer.h"
#include "products.h"
#include "tests.h"

/* What this machine runs, as the library finds it. */
static const char *isas[TESTS_ISAS];
static size_t isa_count;

/* The caller frees the data. */
static void fill_weight(struct weight *w, enum quant_type type, size_t rows, size_t columns)
{
    struct gguf_writer writer;

    gguf_writer_start(&writer);
    writer.random += tests_random();
    *w = (struct weight){.type = type, .rows = rows, .columns = columns};
    ck_assert(quant_row_bytes(type, columns, &w->row_bytes));
    gguf_writer_random(&writer, quant_info(type)->gguf_type, rows * columns, 0);
    w->data = writer.data.data;
}

static float *random_rows(size_t count)
{
    float *x = malloc(count * sizeof *x);

    ck_assert_ptr_nonnull(x);
    for (size_t i = 0; i < count; i++)
        x[i] = tests_random_float();
    return x;
}

/* An f32 sum of n terms errs by at most about n * 2^-24 of the sum of their magnitudes; sums in
 * lanes and panels stay far below it. */
static void compare(const struct weight *w, const float *x, size_t x_stride, size_t rows,
                    const float *y, size_t y_stride, float offset)
{
    float *row = malloc(w->columns * sizeof *row);

    ck_assert_ptr_nonnull(row);
    for (size_t j = 0; j < w->rows; j++) {
        quant_info(w->type)->dequantise((const char *)w->data + j * w->row_bytes, w->columns, row);
        for (size_t r = 0; r < rows; r++) {
            double sum = offset, magnitude = fabs((double)offset);

            for (size_t i = 0; i < w->columns; i++) {
                sum += (double)row[i] * x[r * x_stride + i];
                magnitude += fabs((double)row[i] * x[r * x_stride + i]);
            }
            ck_assert_double_le(fabs(y[r * y_stride + j] - sum), 4e-6 * magnitude);
        }
    }
    free(row);
}

static const size_t row_counts[] = {1, 2, 8, 9, 40, PRODUCTS_BLOCK_ROWS};

START_TEST(test_values)
{
    enum quant_type type = (enum quant_type)(_i % QUANT_TYPES);
    struct error error;
    struct products *products;

    tests_seed(1 + (uint64_t)_i);
    ck_assert(products_open(2, isas[_i / QUANT_TYPES], &products, &error));
    for (size_t n = 0; n < sizeof row_counts / sizeof *row_counts; n++) {
        size_t rows = row_counts[n], x_stride;
        size_t columns =
            quant_info(type)->block_elements == 256 ? 256 * (1 + n % 3) : 32 * (1 + n % 3 * 3);
        struct weight first, second;

        x_stride = columns + 5;
        fill_weight(&first, type, 131, columns);
        fill_weight(&second, type, 1, columns);
        float *x = random_rows(rows * x_stride);
        float *y = random_rows(rows * 140);
        float *z = random_rows(rows);
        struct product list[] = {{&first, y, 140, false}, {&second, z, 1, true}};

        for (size_t r = 0; r < rows; r++)
            z[r] = 0.5f;
        y[131] = 7; /* behind the row: must stay */
        ck_assert(products_multiply(products, x, x_stride, rows, list, 2, &error));
        compare(&first, x, x_stride, rows, y, 140, 0);
        compare(&second, x, x_stride, rows, z, 1, 0.5f);
        ck_assert_float_eq(y[131], 7);
        free((void *)first.data);
        free((void *)second.data);
        free(x);
        free(y);
        free(z);
    }
    products_close(products);
}
END_TEST

/* A product with a unit vector is an element, to the bit, whichever way it is computed. */
START_TEST(test_units)
{
    enum { ROWS = 70, COLUMNS = 256 };
    enum quant_type type = (enum quant_type)(_i % QUANT_TYPES);
    struct error error;
    struct products *products;
    struct weight w;

    tests_seed(3 + (uint64_t)_i);
    ck_assert(products_open(2, isas[_i / QUANT_TYPES], &products, &error));
    fill_weight(&w, type, ROWS, COLUMNS);
    float *units = tests_allocate(COLUMNS * COLUMNS, sizeof *units);
    float *expected = random_rows(ROWS * COLUMNS), *y = random_rows(COLUMNS * ROWS);

    quant_info(type)->dequantise(w.data, ROWS * COLUMNS, expected);
    for (size_t i = 0; i < COLUMNS; i++)
        units[i * COLUMNS + i] = 1;
    for (size_t at_once = 1; at_once <= COLUMNS; at_once *= 16) {
        for (size_t i = 0; i < COLUMNS; i += at_once) {
            struct product product = {&w, y + i * ROWS, ROWS, false};

            ck_assert(products_multiply(products, units + i * COLUMNS, COLUMNS, at_once, &product,
                                        1, &error));
        }
        for (size_t i = 0; i < COLUMNS; i++) {
            for (size_t j = 0; j < ROWS; j++)
                require_msg(y[i * ROWS + j] == expected[j * COLUMNS + i],
                            "%s: row %zu, column %zu: %a, expected %a", quant_info(type)->name, j,
                            i, (double)y[i * ROWS + j], (double)expected[j * COLUMNS + i]);
        }
    }
    products_close(products);
    free((void *)w.data);
    free(units);
    free(expected);
    free(y);
}
END_TEST

START_TEST(test_odd_columns)
{
    static const enum quant_type types[] = {QUANT_F32, QUANT_F16, QUANT_BF16};
    struct error error;
    struct products *products;

    tests_seed(5);
    ck_assert(products_open(1, isas[_i], &products, &error));
    for (size_t t = 0; t < 3; t++) {
        for (size_t columns = 1; columns < 70; columns += 4) {
            struct weight w;

            fill_weight(&w, types[t], 3, columns);
            float *x = random_rows(9 * columns), y[9 * 3];
            struct product product = {&w, y, 3, false};

            ck_assert(products_multiply(products, x, columns, 1, &product, 1, &error));
            compare(&w, x, columns, 1, y, 3, 0);
            ck_assert(products_multiply(products, x, columns, 9, &product, 1, &error));
            compare(&w, x, columns, 9, y, 3, 0);
            free((void *)w.data);
            free(x);
        }
    }
    products_close(products);
}
END_TEST

START_TEST(test_threads)
{
    static const unsigned threads[] = {1, 2, 5};
    struct error error;
    struct weight w;

    tests_seed(9);
    fill_weight(&w, QUANT_Q4_1, 333, 576);
    float *x = random_rows(100 * 576), *expected = random_rows(100 * 333);
    float *y = random_rows(100 * 333);

    for (size_t rows = 1; rows <= 100; rows += 99) {
        for (size_t t = 0; t < 3; t++) {
            struct product product = {&w, t == 0 ? expected : y, 333, false};
            struct products *products;

            ck_assert(products_open(threads[t], isas[_i], &products, &error));
            ck_assert(products_multiply(products, x, 576, rows, &product, 1, &error));
            products_close(products);
            if (t > 0)
                ck_assert_mem_eq(y, expected, rows * 333 * sizeof *y);
        }
    }
    free((void *)w.data);
    free(x);
    free(expected);
    free(y);
}
END_TEST

START_TEST(test_swiglu)
{
    struct error error;
    struct products *products;
    float gate[301], up[301], before[301];

    ck_assert(products_open(1, isas[_i], &products, &error));
    for (int i = 0; i < 301; i++) {
        before[i] = gate[i] = (float)(i - 150) * (i % 2 ? 0.9f : 0.03f);
        up[i] = 1 + (float)i / 300;
    }
    products_swiglu(products, gate, up, 301);
    for (int i = 0; i < 301; i++) {
        double expected = up[i] * (double)before[i] / (1 + exp(-(double)before[i]));

        /* exp is clamped where its result no longer matters: below e^-87 a product is noise. */
        ck_assert_double_le(fabs(gate[i] - expected), 1e-6 * fabs(expected) + 1e-35);
    }
    products_close(products);
}
END_TEST

int main(void)
{
    isa_count = tests_find_isas(isas);

    Suite *suite = suite_create("products");
    TCase *tests = tcase_create("products");

    tcase_add_loop_test(tests, test_values, 0, (int)(isa_count * QUANT_TYPES));
    tcase_add_loop_test(tests, test_units, 0, (int)(isa_count * QUANT_TYPES));
    tcase_add_loop_test(tests, test_odd_columns, 0, (int)isa_count);
    tcase_add_loop_test(tests, test_threads, 0, (int)isa_count);
    tcase_add_loop_test(tests, test_swiglu, 0, (int)isa_count);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
