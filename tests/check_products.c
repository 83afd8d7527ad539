/* SPDX-License-Identifier: MIT */
/* tools/runner/products.c: every weight type against sums in double precision. */
#include <math.h>
#include <stdlib.h>

#include <puzzlekv.h>

#include "gguf_writer.h"
#include "products.h"
#include "products_kernels.h"
#include "tests.h"

/* What this machine runs of the instruction sets that the library finds. */
static const struct products_kernels *tables[8];
static size_t table_count;

/* A random matrix, and what lies in memory for it. */
struct random_matrix {
    struct matrix matrix;
    void *data, *packed;
};

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

static struct products *open_products(const struct products_kernels *kernels, unsigned threads,
                                      bool exact)
{
    struct products *products;
    struct error error;

    ck_assert_msg(products_open(threads, kernels, exact, &products, &error), "%s", error.text);
    return products;
}

static struct random_matrix open_matrix(const struct products *products, enum quant_type type,
                                        size_t rows, size_t columns)
{
    struct random_matrix m = {0};
    struct error error;

    fill_weight(&m.matrix.weight, type, rows, columns);
    m.data = (void *)m.matrix.weight.data;
    ck_assert_msg(products_pack(products, &m.matrix, 1, &m.packed, &error), "%s", error.text);
    return m;
}

static void close_matrix(struct random_matrix *m)
{
    free(m->packed);
    free(m->data);
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
#define SUM_ERROR 4e-6

/* y against sums in double precision. Rounding activations to bytes moves each by up to half a
 * step, a step being 1/127 of the largest in its block of 32, and by a rounding error or two of
 * f32. */
static void compare(const struct weight *w, const float *x, size_t x_stride, size_t rows,
                    const float *y, size_t y_stride, float offset, bool rounded)
{
    float *row = tests_allocate(w->columns, sizeof *row);
    float *halves = tests_allocate(rows * w->columns, sizeof *halves);

    for (size_t i = 0; rounded && i < rows * w->columns; i += 32) {
        const float *block = x + i / w->columns * x_stride + i % w->columns;
        float largest = 0;

        for (size_t k = 0; k < 32; k++)
            largest = fmaxf(largest, fabsf(block[k]));
        for (size_t k = 0; k < 32; k++)
            halves[i + k] = largest / 254;
    }
    for (size_t j = 0; j < w->rows; j++) {
        quant_info(w->type)->dequantise((const char *)w->data + j * w->row_bytes, w->columns, row);
        for (size_t r = 0; r < rows; r++) {
            double sum = offset, magnitude = fabs((double)offset), moved = 0;

            for (size_t i = 0; i < w->columns; i++) {
                sum += (double)row[i] * x[r * x_stride + i];
                magnitude += fabs((double)row[i] * x[r * x_stride + i]);
                moved += fabs((double)row[i]) * halves[r * w->columns + i];
            }
            require_msg(fabs(y[r * y_stride + j] - sum) <=
                            SUM_ERROR * (magnitude + moved) + moved * 1.00001,
                        "%s, %zu rows, row %zu, weight row %zu: %g, expected %g of %g, moved %g",
                        quant_info(w->type)->name, rows, r, j, (double)y[r * y_stride + j], sum,
                        magnitude, moved);
        }
    }
    free(halves);
    free(row);
}

static const size_t row_counts[] = {1, 2, 3, 8, 9, 40, PRODUCTS_BLOCK_ROWS};

static bool is_packed(enum quant_type type)
{
    return quant_info(type)->block_elements > 1;
}

/* Two matrices at once, rows that lie apart, products that are added; by `fill` activations for
 * which there is a tighter bound than for others. */
static void check_values(int index, bool exact, float *fill(size_t count), bool rounded)
{
    enum quant_type type = (enum quant_type)(index % QUANT_TYPES);
    struct products *products = open_products(tables[index / QUANT_TYPES], 2, exact);
    struct error error;

    tests_seed(1 + (uint64_t)index);
    for (size_t n = 0; n < sizeof row_counts / sizeof *row_counts; n++) {
        size_t rows = row_counts[n], x_stride;
        size_t columns =
            quant_info(type)->block_elements == 256 ? 256 * (1 + n % 3) : 32 * (1 + n % 3 * 3);
        struct random_matrix first = open_matrix(products, type, 131, columns);
        struct random_matrix second = open_matrix(products, type, 1, columns);

        x_stride = columns + 32;
        float *x = fill(rows * x_stride);
        float *y = random_rows(rows * 140);
        float *z = random_rows(rows);
        struct product list[] = {{&first.matrix, y, 140, false}, {&second.matrix, z, 1, true}};

        for (size_t r = 0; r < rows; r++)
            z[r] = 0.5f;
        y[131] = 7; /* behind the row: must stay */
        ck_assert(products_multiply(products, x, x_stride, rows, list, 2, &error));
        compare(&first.matrix.weight, x, x_stride, rows, y, 140, 0, rounded && is_packed(type));
        compare(&second.matrix.weight, x, x_stride, rows, z, 1, 0.5f, rounded && is_packed(type));
        ck_assert_float_eq(y[131], 7);
        close_matrix(&first);
        close_matrix(&second);
        free(x);
        free(y);
        free(z);
    }
    products_close(products);
}

START_TEST(test_exact)
{
    check_values(_i, true, random_rows, false);
}
END_TEST

START_TEST(test_rounded)
{
    check_values(_i, false, random_rows, true);
}
END_TEST

/* Multiples of a power of two that differs from block to block, up to 127 of it in each block, and
 * not evenly about zero: they fit into bytes as they are. */
static float *byte_rows(size_t count)
{
    float *x = random_rows(count);

    for (size_t i = 0; i < count; i++) {
        float step = ldexpf(1, (int)(i / 32 * 7 % 11) - 5);

        x[i] = i % 32 == i / 32 % 32 ? (i / 32 % 2 ? 127 : -127) : rintf(x[i] * 80 + 40);
        x[i] = fmaxf(-127, fminf(x[i], 127)) * step;
    }
    return x;
}

START_TEST(test_bytes)
{
    check_values(_i, false, byte_rows, false);
}
END_TEST

/* A NaN or an infinity in an activation is not lost in bytes, wherever it is; zeros and what is
 * next to nothing do no harm. */
START_TEST(test_special_values)
{
    enum { ROWS = 11, COLUMNS = 512 };
    static const enum quant_type types[] = {QUANT_Q4_0, QUANT_Q4_1, QUANT_Q6_K, QUANT_Q2_K};
    static const float values[] = {NAN, -NAN, INFINITY, -INFINITY, 0, -0.0f, 1e-40f, 3e-31f};
    struct products *products = open_products(tables[_i], 2, false);
    struct error error;

    tests_seed(17);
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        struct random_matrix w = open_matrix(products, types[t], 20, COLUMNS);

        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            const size_t special = v * 67 % COLUMNS;
            float x[ROWS * COLUMNS], y[ROWS * 20];
            struct product product = {&w.matrix, y, 20, false};

            for (size_t i = 0; i < COLUMNS; i++) {
                for (size_t r = 0; r < ROWS; r++)
                    x[r * COLUMNS + i] = isfinite(values[v]) ? values[v] : (float)(i % 9) - 4;
            }
            x[special] = x[5 * COLUMNS + special] = values[v];
            for (size_t rows = 1; rows <= ROWS; rows += 10) {
                ck_assert(products_multiply(products, x, COLUMNS, rows, &product, 1, &error));
                for (size_t r = 0; r < rows; r++) {
                    for (size_t j = 0; j < 20; j++) {
                        bool finite = isfinite(values[v]) || (r != 0 && r != 5);

                        require_msg((isfinite(y[r * 20 + j]) != 0) == finite,
                                    "%s, value %g: row %zu is %g", quant_info(types[t])->name,
                                    (double)values[v], r, (double)y[r * 20 + j]);
                        if (isfinite(values[v]))
                            ck_assert_float_le(fabsf(y[r * 20 + j]), 1e-26f);
                    }
                }
            }
        }
        close_matrix(&w);
    }
    products_close(products);
}
END_TEST

/* A product with a unit vector is an element, to the bit, whichever way it is computed. */
START_TEST(test_units)
{
    enum { ROWS = 70, COLUMNS = 256 };
    enum quant_type type = (enum quant_type)(_i % QUANT_TYPES);
    struct products *products = open_products(tables[_i / QUANT_TYPES], 2, true);
    struct error error;

    tests_seed(3 + (uint64_t)_i);
    struct random_matrix w = open_matrix(products, type, ROWS, COLUMNS);
    float *units = tests_allocate(COLUMNS * COLUMNS, sizeof *units);
    float *expected = random_rows(ROWS * COLUMNS), *y = random_rows(COLUMNS * ROWS);

    quant_info(type)->dequantise(w.data, ROWS * COLUMNS, expected);
    for (size_t i = 0; i < COLUMNS; i++)
        units[i * COLUMNS + i] = 1;
    for (size_t at_once = 1; at_once <= COLUMNS; at_once *= 16) {
        for (size_t i = 0; i < COLUMNS; i += at_once) {
            struct product product = {&w.matrix, y + i * ROWS, ROWS, false};

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
    close_matrix(&w);
    free(units);
    free(expected);
    free(y);
}
END_TEST

START_TEST(test_odd_columns)
{
    static const enum quant_type types[] = {QUANT_F32, QUANT_F16, QUANT_BF16};
    struct products *products = open_products(tables[_i], 1, false);
    struct error error;

    tests_seed(5);
    for (size_t t = 0; t < 3; t++) {
        for (size_t columns = 1; columns < 70; columns += 4) {
            struct random_matrix w = open_matrix(products, types[t], 3, columns);
            float *x = random_rows(9 * columns), y[9 * 3];
            struct product product = {&w.matrix, y, 3, false};

            ck_assert(products_multiply(products, x, columns, 1, &product, 1, &error));
            compare(&w.matrix.weight, x, columns, 1, y, 3, 0, false);
            ck_assert(products_multiply(products, x, columns, 9, &product, 1, &error));
            compare(&w.matrix.weight, x, columns, 9, y, 3, 0, false);
            close_matrix(&w);
            free(x);
        }
    }
    products_close(products);
}
END_TEST

/* Products of one call take different ways: their scratch and their tasks do not mix. */
START_TEST(test_mixed_types)
{
    enum { COLUMNS = 512, MOST_ROWS = 9 };
    struct products *products = open_products(tables[_i], 2, false);
    struct error error;
    float *x, *y[3];

    tests_seed(7);
    struct random_matrix w[3] = {
        open_matrix(products, QUANT_Q4_K, 100, COLUMNS),
        open_matrix(products, QUANT_BF16, 70, COLUMNS),
        open_matrix(products, QUANT_Q6_K, 33, COLUMNS),
    };
    x = byte_rows(MOST_ROWS * COLUMNS);
    for (size_t i = 0; i < 3; i++)
        y[i] = random_rows(MOST_ROWS * 100);
    for (size_t rows = 1; rows <= MOST_ROWS; rows++) {
        struct product list[3];

        for (size_t i = 0; i < 3; i++)
            list[i] = (struct product){&w[i].matrix, y[i], 100, false};
        ck_assert(products_multiply(products, x, COLUMNS, rows, list, 3, &error));
        for (size_t i = 0; i < 3; i++)
            compare(&w[i].matrix.weight, x, COLUMNS, rows, y[i], 100, 0, false);
    }
    for (size_t i = 0; i < 3; i++) {
        close_matrix(&w[i]);
        free(y[i]);
    }
    free(x);
    products_close(products);
}
END_TEST

START_TEST(test_threads)
{
    static const enum quant_type types[] = {QUANT_Q4_1, QUANT_Q8_0, QUANT_F32};
    static const unsigned threads[] = {1, 2, 5};
    static const size_t counts[] = {1, 5, 100};
    struct error error;

    tests_seed(9);
    float *x = random_rows(100 * 576), *expected = random_rows(100 * 333);
    float *y = random_rows(100 * 333);

    for (size_t i = 0; i < 3 * 3 * 2; i++) {
        const size_t rows = counts[i / 3 % 3];
        struct weight weight;

        fill_weight(&weight, types[i % 3], 333, 576);
        for (size_t t = 0; t < 3; t++) {
            struct products *products = open_products(tables[_i], threads[t], i / 9 == 0);
            struct matrix w = {weight, NULL};
            struct product product = {&w, t == 0 ? expected : y, 333, false};
            void *packed;

            ck_assert(products_pack(products, &w, 1, &packed, &error));
            ck_assert(products_multiply(products, x, 576, rows, &product, 1, &error));
            products_close(products);
            free(packed);
            if (t > 0)
                ck_assert_mem_eq(y, expected, rows * 333 * sizeof *y);
        }
        free((void *)weight.data);
    }
    free(x);
    free(expected);
    free(y);
}
END_TEST

/* Where weights are laid out anew, rows by themselves give the bits that they give together. */
START_TEST(test_single_rows)
{
    enum { ROWS = 11, COLUMNS = 512, WEIGHT_ROWS = 37 };
    struct products *products = open_products(tables[_i], 2, false);
    struct error error;

    tests_seed(11);
    float *x = random_rows(ROWS * COLUMNS);
    float *together = random_rows(ROWS * WEIGHT_ROWS), *alone = random_rows(ROWS * WEIGHT_ROWS);

    for (size_t type = 0; type < QUANT_TYPES; type++) {
        struct random_matrix w = open_matrix(products, (enum quant_type)type, WEIGHT_ROWS, COLUMNS);
        struct product product = {&w.matrix, together, WEIGHT_ROWS, false};

        if (w.matrix.panels != NULL) {
            ck_assert(products_multiply(products, x, COLUMNS, ROWS, &product, 1, &error));
            for (size_t r = 0; r < ROWS; r++) {
                product.y = alone + r * WEIGHT_ROWS;
                ck_assert(
                    products_multiply(products, x + r * COLUMNS, COLUMNS, 1, &product, 1, &error));
            }
            require_msg(memcmp(alone, together, ROWS * WEIGHT_ROWS * sizeof *alone) == 0, "%s",
                        quant_info((enum quant_type)type)->name);
        }
        close_matrix(&w);
    }
    free(x);
    free(together);
    free(alone);
    products_close(products);
}
END_TEST

/* Weights stay where they are for exact products, and where none is laid out anew. */
START_TEST(test_nothing_packed)
{
    struct products *products = open_products(tables[_i], 1, true);
    struct random_matrix w = open_matrix(products, QUANT_Q4_1, 20, 64);

    ck_assert_ptr_null(w.packed);
    ck_assert_ptr_null(w.matrix.panels);
    close_matrix(&w);
    products_close(products);

    products = open_products(tables[_i], 1, false);
    w = open_matrix(products, QUANT_BF16, 20, 64);
    ck_assert_ptr_null(w.packed);
    close_matrix(&w);
    products_close(products);
}
END_TEST

START_TEST(test_swiglu)
{
    struct products *products = open_products(tables[_i], 1, false);
    float gate[301], up[301], before[301];

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
    const char *isas[TESTS_ISAS];
    const size_t isa_count = tests_find_isas(isas);

    for (size_t i = 0; i < isa_count; i++) {
        const struct products_kernels *table = products_find_kernels(isas[i], NULL);

        for (; table != NULL && table_count < sizeof tables / sizeof *tables;
             table = products_find_kernels(isas[i], table))
            tables[table_count++] = table;
    }

    Suite *suite = suite_create("products");
    TCase *tests = tcase_create("products");

    tcase_add_loop_test(tests, test_exact, 0, (int)(table_count * QUANT_TYPES));
    tcase_add_loop_test(tests, test_rounded, 0, (int)(table_count * QUANT_TYPES));
    tcase_add_loop_test(tests, test_bytes, 0, (int)(table_count * QUANT_TYPES));
    tcase_add_loop_test(tests, test_special_values, 0, (int)table_count);
    tcase_add_loop_test(tests, test_units, 0, (int)(table_count * QUANT_TYPES));
    tcase_add_loop_test(tests, test_odd_columns, 0, (int)table_count);
    tcase_add_loop_test(tests, test_mixed_types, 0, (int)table_count);
    tcase_add_loop_test(tests, test_threads, 0, (int)table_count);
    tcase_add_loop_test(tests, test_single_rows, 0, (int)table_count);
    tcase_add_loop_test(tests, test_nothing_packed, 0, (int)table_count);
    tcase_add_loop_test(tests, test_swiglu, 0, (int)table_count);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
