/* SPDX-License-Identifier: MIT */
/* cpu/factorize.c: real and awkward pages against the optimum, and the form of the factors. */
#include "backend.h"
#include "numeric.h"

#include "tests.h" /* after message.h: see there */

#include <fenv.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

/* ---- A page through the backend ---- */

/* Pages as KV heads of one layer; every one gets factors. */
struct pages {
    size_t n, length, d, rank_k, rank_v;
    pkv_dtype dtype;
    const float *k; /* [n, length, d] */
    const float *v;
    pkv_solver solver;
    unsigned threads; /* 0: two */
    const char *isa;
    bool int4;               /* the factors come out as `coded`, else in f32 */
    unsigned char *coded[4]; /* by enum page_part from PART_K_LEFT on: [n, coded_bytes()] */
    float *k_left;           /* [n, length, rank_k] */
    float *k_right;          /* [n, rank_k, d] */
    float *v_left;
    float *v_right;
    char message[PKV_MESSAGE_BYTES];
};

static void widen(pkv_dtype dtype, size_t n, const void *from, float *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = dtype == PKV_F32   ? ((const float *)from)[i]
                : dtype == PKV_F16 ? f16_to_f32(((const uint16_t *)from)[i])
                                   : bf16_to_f32(((const uint16_t *)from)[i]);
}

/* [n, length, d] to the rows [length, n, d] of a step. */
static float *rows_of(const struct pages *pages, const float *x)
{
    float *rows = tests_allocate(pages->n * pages->length * pages->d, sizeof *rows);

    for (size_t i = 0; i < pages->n; i++)
        for (size_t t = 0; t < pages->length; t++)
            memcpy(rows + (t * pages->n + i) * pages->d, x + (i * pages->length + t) * pages->d,
                   pages->d * sizeof *rows);
    return rows;
}

static float *read_parts(struct backend *backend, const struct pages *pages, enum page_part part,
                         size_t elements)
{
    float *out = tests_allocate(pages->n * elements, sizeof *out);
    float *stored = tests_allocate(elements, sizeof *stored);
    struct page page = {0, SLOT_FACTOR};

    for (size_t i = 0; i < pages->n; i++) {
        ck_assert_int_eq(tests_backend->read(backend, page, 0, i, pages->length, part, stored),
                         PKV_OK);
        widen(pages->dtype, elements, stored, out + i * elements);
    }
    free(stored);
    return out;
}

/* Codes of a part, and how many scales come after them. */
static size_t codes_of(const struct pages *pages, enum page_part part)
{
    bool is_key = part == PART_K_LEFT || part == PART_K_RIGHT;
    bool is_left = part == PART_K_LEFT || part == PART_V_LEFT;

    return (is_key ? pages->rank_k : pages->rank_v) * (is_left ? pages->length : pages->d);
}

static size_t scales_of(const struct pages *pages, enum page_part part)
{
    return part == PART_K_LEFT ? pages->rank_k : part == PART_V_LEFT ? pages->length : pages->d;
}

static size_t coded_bytes(const struct pages *pages, enum page_part part)
{
    return codes_of(pages, part) / 2 + 2 * scales_of(pages, part);
}

static void read_coded(struct backend *backend, struct pages *pages)
{
    struct page page = {0, SLOT_FACTOR};

    for (int part = PART_K_LEFT; part <= PART_V_RIGHT; part++) {
        size_t bytes = coded_bytes(pages, (enum page_part)part);
        unsigned char *out = tests_allocate(pages->n, bytes);

        for (size_t i = 0; i < pages->n; i++)
            ck_assert_int_eq(tests_backend->read(backend, page, 0, i, pages->length,
                                                 (enum page_part)part, out + i * bytes),
                             PKV_OK);
        pages->coded[part - PART_K_LEFT] = out;
    }
}

static pkv_status factorize(struct pages *pages)
{
    struct memory memory;
    struct message message = {""};
    struct geometry geometry = {
        .layers = 1,
        .query_heads = pages->n,
        .kv_heads = pages->n,
        .head_dim = pages->d,
        .policy = {pages->length, 0, 0, true},
        .rank_k = &pages->rank_k,
        .rank_v = &pages->rank_v,
        .factors_k = pages->int4 ? PKV_FACTORS_INT4 : PKV_FACTORS_NATIVE,
        .factors_v = pages->int4 ? PKV_FACTORS_INT4 : PKV_FACTORS_NATIVE,
        .solver = tests_on_cpu() || pages->solver == PKV_SOLVER_CUSOLVER ? pages->solver
                                                                         : PKV_SOLVER_BATCHED,
        .dtype = pages->dtype,
        .element_bytes = pages->dtype == PKV_F32 ? 4 : 2,
        .softmax_scale = 1,
    };
    const struct capacity capacity = {.max_sequences = 1,
                                      .max_tokens = pages->length,
                                      .max_step_tokens = pages->length,
                                      .dense_slots = 1,
                                      .factor_slots = 1};
    const struct placement placement = {.isa = pages->isa,
                                        .threads = pages->threads ? pages->threads : 2};
    struct page_change change = {.to = {0, SLOT_FACTOR}, .new_tokens = pages->length};
    struct backend_item item = {.new_tokens = pages->length, .changes = &change, .n_changes = 1};
    struct backend_plan plan = {&item, 1, pages->length};
    float *k = rows_of(pages, pages->k);
    float *v = rows_of(pages, pages->v);
    pkv_input input = {k, PKV_F32, pages->n * pages->d, pages->d};
    pkv_step_io io = {.struct_size = sizeof io, .k = input, .v = input};
    pkv_allocator standard = {0};
    struct backend *backend;
    pkv_status status;

    io.v.data = v;
    memory_init(&memory, &standard);
    ck_assert_int_eq(
        tests_backend->open(&geometry, &capacity, &placement, &memory, &message, &backend), PKV_OK);
    ck_assert_int_eq(tests_backend->step_begin(backend, &plan), PKV_OK);
    status = tests_backend_layer(backend, &geometry, pages->length, 0, &io);
    if (status == PKV_OK && pages->int4) {
        read_coded(backend, pages);
    } else if (status == PKV_OK) {
        size_t length = pages->length;

        pages->k_left = read_parts(backend, pages, PART_K_LEFT, length * pages->rank_k);
        pages->k_right = read_parts(backend, pages, PART_K_RIGHT, pages->rank_k * pages->d);
        pages->v_left = read_parts(backend, pages, PART_V_LEFT, length * pages->rank_v);
        pages->v_right = read_parts(backend, pages, PART_V_RIGHT, pages->rank_v * pages->d);
    }
    tests_backend->step_close(backend);
    tests_backend->close(backend);
    ck_assert_uint_eq(memory.bytes, 0);
    memcpy(pages->message, message.text, sizeof pages->message);
    free(k);
    free(v);
    return status;
}

static void free_factors(struct pages *pages)
{
    free(pages->k_left);
    free(pages->k_right);
    free(pages->v_left);
    free(pages->v_right);
    for (int i = 0; i < 4; i++)
        free(pages->coded[i]);
}

/* ---- What factors must be ---- */

static double squared_norm(size_t n, const float *x)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sum;
}

static double squared_error(size_t length, size_t d, size_t rank, const float *x, const float *left,
                            const float *right)
{
    double error = 0;

    for (size_t t = 0; t < length; t++) {
        for (size_t i = 0; i < d; i++) {
            double y = x[t * d + i];

            for (size_t c = 0; c < rank; c++)
                y -= (double)left[t * rank + c] * right[c * d + i];
            error += y * y;
        }
    }
    return error;
}

static double bound(double optimum, double norm)
{
    return fmax(1.0001 * optimum, optimum + 1e-6 * norm);
}

struct tested_solver {
    pkv_solver solver;
    double limit; /* of columns' products */
    double noise; /* squared, of rows that are to be 0, of the page's norm */
};

/*
 * Columns of L orthonormal within the limit and signed, R = L^T X with descending norms, its rows 0
 * from `carrying` on.
 */
static void check_form(const struct tested_solver *solver, size_t length, size_t d, size_t rank,
                       size_t carrying, const float *x, const float *left, const float *right)
{
    double norm = sqrt(squared_norm(length * d, x));
    double previous = INFINITY;

    for (size_t a = 0; a < rank; a++) {
        double row = squared_norm(d, right + a * d);
        double positive = 0;
        double negative = 0;

        for (size_t b = 0; b <= a; b++) {
            double dot = 0;

            for (size_t t = 0; t < length; t++)
                dot += (double)left[t * rank + a] * left[t * rank + b];
            require(fabs(dot - (a == b)) <= solver->limit);
        }
        /* A tie may be one after rounding alone. */
        for (size_t t = 0; t < length; t++) {
            positive = fmax(positive, left[t * rank + a]);
            negative = fmax(negative, -left[t * rank + a]);
        }
        require(positive >= negative * (1 - 1e-6));
        if (a >= carrying) {
            require(row <= solver->noise * norm * norm);
            continue;
        }
        require(row > 0);
        require(sqrt(row) <= previous + 1e-6 * norm);
        previous = sqrt(row);
        for (size_t i = 0; i < d; i++) {
            double dot = 0;

            for (size_t t = 0; t < length; t++)
                dot += (double)left[t * rank + a] * x[t * d + i];
            require(fabs(dot - right[a * d + i]) <= 1e-6 * norm);
        }
    }
}

/* ---- Real pages ---- */

enum { REAL_PAGES = 36, REAL_LENGTH = 32, REAL_DIM = 64 };

/* The listed optima by kind ("keys", "values"), rank and page. */
static double optimum_of(const json_t *json, const char *kind, const char *rank, size_t page)
{
    const json_t *list = json_object_get(
        json_object_get(json_object_get(json, "optimal_squared_error"), kind), rank);

    ck_assert_uint_eq(json_array_size(list), REAL_PAGES);
    return json_real_value(json_array_get(list, page));
}

static double norm_of(const json_t *json, const char *kind, size_t page)
{
    return json_real_value(
        json_array_get(json_object_get(json_object_get(json, "squared_norm"), kind), page));
}

enum { SOLVERS = 2 };

/* Those of tests_backend. LAPACK's factors are rounded to f32 once; the others compute in it, and
 * cuSOLVER's eigenvectors are mixed with each other where eigenvalues are about 2^-24 of the
 * largest. */
static const struct tested_solver *solver_at(int i)
{
    static const struct tested_solver on_cpu[SOLVERS] = {{PKV_SOLVER_BATCHED, 3e-6, 0},
                                                         {PKV_SOLVER_LAPACK, 1e-6, 0}};
    static const struct tested_solver on_device[SOLVERS] = {{PKV_SOLVER_BATCHED, 3e-6, 0},
                                                            {PKV_SOLVER_CUSOLVER, 1e-5, 1e-6}};

    return tests_on_cpu() ? &on_cpu[i] : &on_device[i];
}

START_TEST(real_pages)
{
    json_t *json = tests_json(tests_path("pages/expected.json"));
    json_t *ranks = json_object_get(json_object_get(json, "optimal_squared_error"), "keys");
    const size_t page_elements = REAL_LENGTH * REAL_DIM;
    float *k = tests_read_f32(tests_path("pages/keys.f32"), REAL_PAGES * page_elements);
    float *v = tests_read_f32(tests_path("pages/values.f32"), REAL_PAGES * page_elements);
    size_t n_ranks = 0;
    const char *name;
    json_t *unused;

    json_object_foreach(ranks, name, unused)
    {
        size_t rank = (size_t)strtoul(name, NULL, 10);
        struct pages pages = {REAL_PAGES, REAL_LENGTH, REAL_DIM,
                              rank,       rank,        PKV_F32,
                              .k = k,     .v = v,      .solver = solver_at(_i)->solver};

        n_ranks++;
        ck_assert_int_eq(factorize(&pages), PKV_OK);
        for (size_t i = 0; i < REAL_PAGES; i++) {
            const float *x = k + i * page_elements;
            const float *y = v + i * page_elements;
            const float *left = pages.k_left + i * REAL_LENGTH * rank;
            const float *right = pages.k_right + i * rank * REAL_DIM;
            double error = squared_error(REAL_LENGTH, REAL_DIM, rank, x, left, right);

            require(error <= bound(optimum_of(json, "keys", name, i), norm_of(json, "keys", i)));
            check_form(solver_at(_i), REAL_LENGTH, REAL_DIM, rank, rank, x, left, right);

            left = pages.v_left + i * REAL_LENGTH * rank;
            right = pages.v_right + i * rank * REAL_DIM;
            error = squared_error(REAL_LENGTH, REAL_DIM, rank, y, left, right);
            require(error <=
                    bound(optimum_of(json, "values", name, i), norm_of(json, "values", i)));
        }
        free_factors(&pages);
    }
    ck_assert_uint_eq(n_ranks, 6);
    free(k);
    free(v);
    json_decref(json);
}
END_TEST

/* ---- Made-up pages ---- */

/* Eigenvalues of X X^T by cyclic Jacobi rotations, descending: slow, and nothing of LAPACK. */
static void eigenvalues(size_t length, size_t d, const float *x, double *values)
{
    double *g = tests_allocate(length * length, sizeof *g);

    for (size_t i = 0; i < length; i++)
        for (size_t j = 0; j < length; j++)
            for (size_t p = 0; p < d; p++)
                g[i * length + j] += (double)x[i * d + p] * x[j * d + p];
    for (int sweep = 0; sweep < 10; sweep++) {
        for (size_t p = 0; p < length; p++) {
            for (size_t q = p + 1; q < length; q++) {
                double theta =
                    0.5 * atan2(2 * g[p * length + q], g[q * length + q] - g[p * length + p]);
                double c = cos(theta);
                double s = sin(theta);

                for (size_t i = 0; i < length; i++) {
                    double a = g[i * length + p];
                    double b = g[i * length + q];

                    g[i * length + p] = c * a - s * b;
                    g[i * length + q] = s * a + c * b;
                }
                for (size_t i = 0; i < length; i++) {
                    double a = g[p * length + i];
                    double b = g[q * length + i];

                    g[p * length + i] = c * a - s * b;
                    g[q * length + i] = s * a + c * b;
                }
            }
        }
    }
    for (size_t i = 0; i < length; i++) {
        double value = g[i * length + i];
        size_t at = i;

        for (; at > 0 && values[at - 1] < value; at--)
            values[at] = values[at - 1];
        values[at] = value;
    }
    free(g);
}

enum kind {
    RANDOM,
    ZERO,
    CONSTANT,
    DEFICIENT,
    DUPLICATE,
    GRADED,
    CLUSTERED,
    ONE_ROW,
    CHAIN,
    KINDS
};

/* Returns the page's rank where that follows from its kind, else 0: for eigenvalues() to find. */
static size_t make_page(enum kind kind, size_t length, size_t d, float scale, float *x)
{
    for (size_t i = 0; i < length * d; i++)
        x[i] = scale * tests_random_float();
    switch (kind) {
    case ZERO:
        memset(x, 0, length * d * sizeof *x);
        break;
    case CONSTANT:
        for (size_t i = 0; i < length * d; i++)
            x[i] = scale;
        return 1;
    case DEFICIENT: /* exact sums of three rows, with small integers */
        for (size_t i = 0; i < 3 * d; i++)
            x[i] = scale * rintf(8 * tests_random_float());
        for (size_t t = 3; t < length; t++) {
            float a = rintf(4 * tests_random_float());
            float b = rintf(4 * tests_random_float());

            for (size_t i = 0; i < d; i++)
                x[t * d + i] = a * x[i] + b * x[d + i] + x[2 * d + i];
        }
        return 3;
    case DUPLICATE:
        for (size_t t = 1; t < length; t += 2)
            memcpy(x + t * d, x + (t - 1) * d, d * sizeof *x);
        break;
    case GRADED:
        for (size_t t = 0; t < length; t++)
            for (size_t i = 0; i < d; i++)
                x[t * d + i] *= powf(0.75f, (float)(t % 16));
        break;
    case CLUSTERED: /* rows that are all but orthogonal, of three lengths */
        for (size_t t = 0; t < length; t++)
            for (size_t i = 0; i < d; i++)
                x[t * d + i] =
                    1e-4f * x[t * d + i] + (i == t % d ? scale * (float)(1 + t % 3) : 0.0f);
        break;
    case ONE_ROW:
        memset(x, 0, length * d * sizeof *x);
        for (size_t i = 0; i < d; i++)
            x[(length - 1) * d + i] = -scale;
        return 1;
    case CHAIN: /* of which many rotations in turn make less than 2^-149 */
        memset(x, 0, length * d * sizeof *x);
        for (size_t t = 0; t < length; t++) {
            x[t * d + t % d] = scale * (1 + (float)t / 32);
            x[t * d + (t + 1) % d] += scale * (t % 3 == 0 ? -0x1p-20f : 0x1p-20f);
        }
        break;
    default:
        break;
    }
    return 0;
}

static void check_made_up(int with, enum kind kind, size_t length, size_t d, size_t rank,
                          float scale)
{
    float *x = tests_allocate(length * d, sizeof *x);
    double *values = tests_allocate(length, sizeof *values);
    size_t carrying = make_page(kind, length, d, scale, x);
    struct pages pages = {
        1, length, d, rank, rank, PKV_F32, .k = x, .v = x, .solver = solver_at(with)->solver};
    double norm = squared_norm(length * d, x);
    double optimum = 0;
    double error;

    if (carrying == 0 || carrying > rank) {
        eigenvalues(length, d, x, values);
        for (size_t i = rank; i < length; i++)
            optimum += fmax(values[i], 0);
        while (carrying < rank && values[carrying] > 0x1p-24 * values[0])
            carrying++;
    }
    ck_assert_int_eq(factorize(&pages), PKV_OK);
    error = squared_error(length, d, rank, x, pages.k_left, pages.k_right);
    if (!(error <= bound(optimum, norm)))
        ck_abort_msg("kind %d, P %zu, d %zu, rank %zu, scale %g: error %g, optimum %g of %g", kind,
                     length, d, rank, scale, error, optimum, norm);
    check_form(solver_at(with), length, d, rank, carrying < rank ? carrying : rank, x, pages.k_left,
               pages.k_right);
    /* The same page as values: the same bits, in another layout. */
    require(memcmp(pages.k_left, pages.v_left, length * rank * sizeof *x) == 0);
    require(memcmp(pages.k_right, pages.v_right, rank * d * sizeof *x) == 0);
    free_factors(&pages);
    free(values);
    free(x);
}

START_TEST(made_up_pages)
{
    static const size_t shapes[][3] = {{8, 8, 1},    {8, 8, 8},     {8, 64, 5},
                                       {16, 8, 8},   {32, 128, 16}, {32, 128, 14},
                                       {40, 24, 24}, {64, 72, 33},  {64, 64, 64}};
    static const float scales[] = {1, 1e-15f, 1e15f, 1e-30f, 1e30f};

    tests_seed((uint64_t)_i % KINDS);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t j = 0; j < sizeof scales / sizeof *scales; j++)
            check_made_up(_i / KINDS, (enum kind)(_i % KINDS), shapes[i][0], shapes[i][1],
                          shapes[i][2], scales[j]);
}
END_TEST

START_TEST(largest_pages)
{
    tests_seed(7);
    check_made_up(_i, DEFICIENT, 256, 256, 14, 1);
    check_made_up(_i, CONSTANT, 256, 1024, 256, 1);
    check_made_up(_i, DEFICIENT, 248, 8, 8, 1e-30f);
}
END_TEST

/* ---- Storage types, modes, faults ---- */

static float *random_page(size_t length, size_t d)
{
    float *x = tests_allocate(length * d, sizeof *x);

    tests_seed(11);
    make_page(RANDOM, length, d, 1, x);
    for (size_t i = 0; i < length * d; i++)
        x[i] = bf16_to_f32(bf16_from_f32(x[i]));
    return x;
}

/* What f16 and bf16 caches hold are an f32 cache's factors, rounded once. */
START_TEST(rounded_factors)
{
    enum { LENGTH = 32, DIM = 40, RANK_K = 9, RANK_V = 7 };
    float *x = random_page(LENGTH, DIM);

    for (int type = PKV_F16; type <= PKV_BF16; type++) {
        float y[LENGTH * DIM];
        struct pages stored = {1,      LENGTH, DIM,
                               RANK_K, RANK_V, (pkv_dtype)type,
                               .k = y, .v = y, .solver = solver_at(_i)->solver};
        struct pages wide = {1,      LENGTH, DIM,
                             RANK_K, RANK_V, PKV_F32,
                             .k = y, .v = y, .solver = solver_at(_i)->solver};

        /* The page itself is rounded before it is factorized. */
        for (size_t i = 0; i < LENGTH * DIM; i++)
            y[i] = type == PKV_F16 ? f16_to_f32(f16_from_f32(x[i])) : x[i];
        ck_assert_int_eq(factorize(&wide), PKV_OK);
        ck_assert_int_eq(factorize(&stored), PKV_OK);
        for (size_t i = 0; i < LENGTH * RANK_K; i++) {
            float a = wide.k_left[i];

            a = type == PKV_F16 ? f16_to_f32(f16_from_f32(a)) : bf16_to_f32(bf16_from_f32(a));
            require(stored.k_left[i] == a);
        }
        for (size_t i = 0; i < RANK_V * DIM; i++) {
            float a = wide.v_right[i];

            a = type == PKV_F16 ? f16_to_f32(f16_from_f32(a)) : bf16_to_f32(bf16_from_f32(a));
            require(stored.v_right[i] == a);
        }
        free_factors(&stored);
        free_factors(&wide);
    }
    free(x);
}
END_TEST

/* Threads and batches change no bit, nor does the instruction set or the backend: n pages at once,
 * on `threads`, against the CPU's plain solver. */
START_TEST(same_bits)
{
    enum { MOST = 71, WAYS = 6 };
    static const struct {
        size_t n;
        unsigned threads;
    } ways[WAYS] = {{MOST, 1}, {MOST, 2}, {MOST, 5}, {1, 1}, {3, 2}, {17, 1}};
    /* Of the last two CUDA has kernels of their own. */
    static const struct {
        size_t length, d, rank;
        pkv_dtype dtype;
    } shapes[] = {{24, 32, 5, PKV_F32}, {32, 64, 13, PKV_BF16}, {32, 128, 16, PKV_F16}};
    const size_t length = shapes[_i / WAYS].length;
    const size_t d = shapes[_i / WAYS].d;
    const size_t rank = shapes[_i / WAYS].rank;
    const pkv_dtype dtype = shapes[_i / WAYS].dtype;
    const struct backend_ops *tested = tests_backend;
    const char *isas[TESTS_ISAS];
    size_t n_isas = tests_find_isas(isas);
    float *x = tests_allocate(MOST * length * d, sizeof *x);
    struct pages all = {MOST,
                        length,
                        d,
                        rank,
                        rank,
                        dtype,
                        .k = x,
                        .v = x,
                        .solver = PKV_SOLVER_BATCHED,
                        .threads = 1,
                        .isa = "generic"};

    tests_seed(5);
    for (size_t i = 0; i < MOST; i++)
        make_page((enum kind)(i % KINDS), length, d,
                  dtype == PKV_F16     ? 1.0f
                  : i / KINDS % 3 == 0 ? 1.0f
                  : i / KINDS % 3 == 1 ? 1e-30f
                                       : 1e30f,
                  x + i * length * d);
    tests_backend = &backend_cpu;
    ck_assert_int_eq(factorize(&all), PKV_OK);
    tests_backend = tested;
    for (size_t i = 0; i < n_isas; i++) {
        size_t n = ways[_i % WAYS].n;
        size_t first = MOST - n;
        struct pages some = all;

        some.n = n;
        some.k = some.v = x + first * length * d;
        some.threads = ways[_i % WAYS].threads;
        some.isa = isas[i];
        ck_assert_int_eq(factorize(&some), PKV_OK);
        require(memcmp(some.k_left, all.k_left + first * length * rank,
                       n * length * rank * sizeof *x) == 0);
        require(memcmp(some.k_right, all.k_right + first * rank * d, n * rank * d * sizeof *x) ==
                0);
        require(memcmp(some.v_left, some.k_left, n * length * rank * sizeof *x) == 0);
        require(memcmp(some.v_right, some.k_right, n * rank * d * sizeof *x) == 0);
        free_factors(&some);
    }
    free_factors(&all);
    free(x);
}
END_TEST

/* The caller's rounding mode and flush-to-zero change no bit and are left as they were. */
START_TEST(modes_of_the_caller)
{
    enum { LENGTH = 16, DIM = 24, RANK = 6 };
    float *x = random_page(LENGTH, DIM);
    struct pages plain = {
        1, LENGTH, DIM, RANK, RANK, PKV_F32, .k = x, .v = x, .solver = solver_at(_i)->solver};
    struct pages changed = plain;

    for (size_t i = 0; i < LENGTH * DIM; i++)
        x[i] *= 0x1p-127f; /* subnormal pages and factors */
    ck_assert_int_eq(factorize(&plain), PKV_OK);
    require(squared_norm(RANK * DIM, plain.k_right) > 0);
    fesetround(FE_UPWARD);
#ifdef __SSE__
    _mm_setcsr(_mm_getcsr() | 0x8040); /* flush results, take subnormal operands as 0 */
    unsigned modes = _mm_getcsr() & 0xffc0u;
#endif
    pkv_status status = factorize(&changed);
#ifdef __SSE__
    unsigned after = _mm_getcsr() & 0xffc0u;
    _mm_setcsr(_mm_getcsr() & ~0x8040u);
    ck_assert_uint_eq(after, modes);
#endif
    ck_assert_int_eq(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
    ck_assert_int_eq(status, PKV_OK);
    require(memcmp(plain.k_left, changed.k_left, LENGTH * RANK * sizeof *x) == 0);
    require(memcmp(plain.k_right, changed.k_right, RANK * DIM * sizeof *x) == 0);
    require(memcmp(plain.v_left, changed.v_left, LENGTH * RANK * sizeof *x) == 0);
    require(memcmp(plain.v_right, changed.v_right, RANK * DIM * sizeof *x) == 0);
    free_factors(&plain);
    free_factors(&changed);
    free(x);
}
END_TEST

/* A page in range whose factor is not: the first such head is named, K before V. */
START_TEST(factors_overflow)
{
    enum { HEADS = 3, LENGTH = 16, DIM = 8 };
    float k[HEADS * LENGTH * DIM], v[HEADS * LENGTH * DIM];
    struct pages pages = {HEADS, LENGTH, DIM, 2, 2, PKV_F16, .k = k, .v = v};

    for (size_t i = 0; i < HEADS * LENGTH * DIM; i++) {
        k[i] = i / (LENGTH * DIM) == 2 ? 40000 : 1;
        v[i] = i / (LENGTH * DIM) == 1 ? 40000 : 1;
    }
    ck_assert_int_eq(factorize(&pages), PKV_ERROR_VALUE);
    ck_assert_ptr_nonnull(strstr(pages.message, "layer 0, KV head 1, page 0: V"));
    for (size_t i = 0; i < HEADS * LENGTH * DIM; i++)
        k[i] = i / (LENGTH * DIM) == 1 ? 40000 : 1;
    ck_assert_int_eq(factorize(&pages), PKV_ERROR_VALUE);
    ck_assert_ptr_nonnull(strstr(pages.message, "layer 0, KV head 1, page 0: K"));
    pages.dtype = PKV_BF16;
    ck_assert_int_eq(factorize(&pages), PKV_OK);
    free_factors(&pages);
}
END_TEST

/* ---- INT4 ---- */

/* A part of page `page`, as the format says. */
static int code_of(const struct pages *pages, enum page_part part, size_t page, size_t i)
{
    const unsigned char *coded = pages->coded[part - PART_K_LEFT] + page * coded_bytes(pages, part);
    int code = i % 2 == 0 ? coded[i / 2] & 15 : coded[i / 2] >> 4;

    return code < 8 ? code : code - 16;
}

static double scale_of(const struct pages *pages, enum page_part part, size_t page, size_t i)
{
    uint16_t scale;

    memcpy(&scale,
           pages->coded[part - PART_K_LEFT] + page * coded_bytes(pages, part) +
               codes_of(pages, part) / 2 + 2 * i,
           sizeof scale);
    return f16_to_f32(scale);
}

/* Element [t, i] of L~ R~. */
static double int4_element(const struct pages *pages, bool is_key, size_t page, size_t t, size_t i)
{
    enum page_part left = is_key ? PART_K_LEFT : PART_V_LEFT;
    enum page_part right = is_key ? PART_K_RIGHT : PART_V_RIGHT;
    size_t rank = is_key ? pages->rank_k : pages->rank_v;
    double sum = 0;

    for (size_t c = 0; c < rank; c++)
        sum += code_of(pages, left, page, t * rank + c) *
               scale_of(pages, left, page, is_key ? c : t) *
               code_of(pages, right, page, c * pages->d + i) * scale_of(pages, right, page, i);
    return sum;
}

/* An f32 eigenvector can flip a rounding: a few elements may differ by a code. */
static void check_int4_pages(const struct pages *pages, bool is_key, const float *expected)
{
    const size_t elements = pages->length * pages->d;

    for (size_t page = 0; page < pages->n; page++) {
        const float *x = expected + page * elements;
        double difference = 0;
        double largest = 0;
        size_t close = 0;

        for (size_t i = 0; i < elements; i++)
            largest = fmax(largest, fabs((double)x[i]));
        for (size_t i = 0; i < elements; i++) {
            double y = int4_element(pages, is_key, page, i / pages->d, i % pages->d);

            difference += (y - x[i]) * (y - x[i]);
            close += fabs(y - x[i]) <= 1e-5 * largest;
        }
        require(sqrt(difference) < 2e-3 * sqrt(squared_norm(elements, x)));
        require((double)close >= 0.97 * (double)elements);
    }
}

/* Other backends have PKV_SOLVER_BATCHED alone, and its bits. */
static void check_int4_bits(struct pages *pages)
{
    const struct backend_ops *tested = tests_backend;
    struct pages expected = *pages;

    expected.solver = PKV_SOLVER_BATCHED;
    tests_backend = &backend_cpu;
    ck_assert_int_eq(factorize(&expected), PKV_OK);
    tests_backend = tested;
    for (int part = PART_K_LEFT; part <= PART_V_RIGHT; part++)
        require(memcmp(pages->coded[part - PART_K_LEFT], expected.coded[part - PART_K_LEFT],
                       pages->n * coded_bytes(pages, (enum page_part)part)) == 0);
    free_factors(&expected);
}

START_TEST(real_int4_pages)
{
    const size_t elements = REAL_PAGES * REAL_LENGTH * REAL_DIM;
    float *k = tests_read_f32(tests_path("pages/keys.f32"), elements);
    float *v = tests_read_f32(tests_path("pages/values.f32"), elements);
    float *k_int4 = tests_read_f32(tests_path("pages/keys_int4_r16.f32"), elements);
    float *v_int4 = tests_read_f32(tests_path("pages/values_int4_r14.f32"), elements);

    for (int type = 0; type < 3; type++) {
        struct pages pages = {REAL_PAGES,      REAL_LENGTH, REAL_DIM, 16,          14,
                              (pkv_dtype)type, .k = k,      .v = v,   .int4 = true};

        if (type == PKV_F16) /* which the pages are not exact in */
            continue;
        ck_assert_int_eq(factorize(&pages), PKV_OK);
        if (tests_on_cpu()) {
            check_int4_pages(&pages, true, k_int4);
            check_int4_pages(&pages, false, v_int4);
        } else {
            check_int4_bits(&pages);
        }
        free_factors(&pages);
    }
    free(k);
    free(v);
    free(k_int4);
    free(v_int4);
}
END_TEST

/* Codes and scales of x [rows, columns], one scale a row or one a column. */
static void check_codes(const struct pages *pages, enum page_part part, size_t rows, size_t columns,
                        bool by_row, const double *x)
{
    for (size_t s = 0; s < (by_row ? rows : columns); s++) {
        double scale = scale_of(pages, part, 0, s);
        double exact = 0;

        for (size_t i = 0; i < (by_row ? columns : rows); i++)
            exact = fmax(exact, fabs(x[by_row ? s * columns + i : i * columns + s]) / 7);
        /* Half a unit of the last place of f16, or of its subnormals, and f32's own roundings. */
        require(fabs(scale - exact) <= fmax(0x1p-11 * exact, 0x1p-25) + 1e-6 * exact);
    }
    for (size_t i = 0; i < rows * columns; i++) {
        double scale = scale_of(pages, part, 0, by_row ? i / columns : i % columns);
        int code = code_of(pages, part, 0, i);
        double exact = scale > 0 ? x[i] / scale : 0;

        require(code >= -7 && code <= 7);
        require(fabs(code - fmax(fmin(exact, 7), -7)) <= 0.5 + 1e-5);
    }
}

/* What the format makes of an f32 cache's own factors. */
static void check_int4(enum kind kind, size_t length, size_t d, size_t rank_k, size_t rank_v,
                       float scale)
{
    float *x = tests_allocate(length * d, sizeof *x);

    make_page(kind, length, d, scale, x);

    struct pages native = {1, length, d, rank_k, rank_v, PKV_F32, .k = x, .v = x};
    struct pages int4 = {1, length, d, rank_k, rank_v, PKV_F32, .k = x, .v = x, .int4 = true};

    ck_assert_int_eq(factorize(&native), PKV_OK);
    ck_assert_int_eq(factorize(&int4), PKV_OK);
    for (int value = 0; value < 2; value++) {
        size_t rank = value ? rank_v : rank_k;
        const float *stored_left = value ? native.v_left : native.k_left;
        const float *stored_right = value ? native.v_right : native.k_right;
        double *left = tests_allocate(length * rank, sizeof *left);
        double *right = tests_allocate(rank * d, sizeof *right);

        for (size_t c = 0; c < rank; c++) {
            double root = sqrt(sqrt(squared_norm(d, stored_right + c * d)));

            for (size_t t = 0; t < length; t++)
                left[t * rank + c] = root * stored_left[t * rank + c];
            for (size_t i = 0; i < d; i++)
                right[c * d + i] = root > 0 ? stored_right[c * d + i] / root : 0;
        }
        check_codes(&int4, value ? PART_V_LEFT : PART_K_LEFT, length, rank, value, left);
        check_codes(&int4, value ? PART_V_RIGHT : PART_K_RIGHT, rank, d, false, right);
        free(left);
        free(right);
    }
    free_factors(&native);
    free_factors(&int4);
    free(x);
}

START_TEST(made_up_int4_pages)
{
    static const size_t shapes[][4] = {{8, 8, 1, 8},      {8, 64, 5, 3},    {16, 8, 8, 7},
                                       {32, 128, 16, 14}, {40, 24, 23, 24}, {64, 72, 33, 2},
                                       {256, 16, 15, 1},  {8, 1024, 1, 7}};
    /* Scales from f16's subnormals, and 0, to near its end. */
    static const float scales[] = {1, 1e-9f, 1e-11f, 1e-15f, 1e5f, 1e7f};

    tests_seed((uint64_t)_i);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t j = 0; j < sizeof scales / sizeof *scales; j++)
            check_int4((enum kind)_i, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3],
                       scales[j]);
}
END_TEST

START_TEST(zeros_as_int4)
{
    static const float x[16 * 8];
    struct pages pages = {1, 16, 8, 3, 5, PKV_BF16, .k = x, .v = x, .int4 = true};

    ck_assert_int_eq(factorize(&pages), PKV_OK);
    for (int part = PART_K_LEFT; part <= PART_V_RIGHT; part++)
        for (size_t i = 0; i < coded_bytes(&pages, (enum page_part)part); i++)
            require(pages.coded[part - PART_K_LEFT][i] == 0);
    free_factors(&pages);
}
END_TEST

START_TEST(int4_scales_overflow)
{
    enum { HEADS = 3, LENGTH = 16, DIM = 8 };
    static const float values[] = {1e13f, 1e30f, 3e38f}; /* s_i exceeds f32 in the last */
    float k[HEADS * LENGTH * DIM], v[HEADS * LENGTH * DIM];
    struct pages pages = {HEADS, LENGTH, DIM, 2, 2, PKV_F32, .k = k, .v = v, .int4 = true};

    for (size_t value = 0; value < sizeof values / sizeof *values; value++) {
        for (size_t i = 0; i < HEADS * LENGTH * DIM; i++) {
            k[i] = i / (LENGTH * DIM) == 2 ? values[value] : 1;
            v[i] = i / (LENGTH * DIM) == 1 ? values[value] : 1;
        }
        ck_assert_int_eq(factorize(&pages), PKV_ERROR_VALUE);
        ck_assert_str_eq(pages.message,
                         "layer 0, KV head 1, page 0: V: its INT4 scales overflow f16");
        for (size_t i = 0; i < HEADS * LENGTH * DIM; i++)
            k[i] = i / (LENGTH * DIM) == 1 ? values[value] : 1;
        ck_assert_int_eq(factorize(&pages), PKV_ERROR_VALUE);
        ck_assert_str_eq(pages.message,
                         "layer 0, KV head 1, page 0: K: its INT4 scales overflow f16");
    }
}
END_TEST

static Suite *make_suite(void)
{
    Suite *suite = suite_create("factorize");
    TCase *test = tcase_create("factorize");

    tcase_add_loop_test(test, real_pages, 0, SOLVERS);
    tcase_add_loop_test(test, made_up_pages, 0, SOLVERS * KINDS);
    tcase_add_loop_test(test, largest_pages, 0, SOLVERS);
    tcase_add_loop_test(test, rounded_factors, 0, SOLVERS);
    tcase_add_loop_test(test, same_bits, 0, 18);
    tcase_add_loop_test(test, modes_of_the_caller, 0, SOLVERS);
    tcase_add_test(test, factors_overflow);
    tcase_add_test(test, real_int4_pages);
    tcase_add_loop_test(test, made_up_int4_pages, 0, KINDS);
    tcase_add_test(test, zeros_as_int4);
    tcase_add_test(test, int4_scales_overflow);
    suite_add_tcase(suite, test);
    return suite;
}

int main(void)
{
    return tests_run_on_backends(make_suite);
}
