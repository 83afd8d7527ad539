/* SPDX-License-Identifier: MIT */
/* The CUDA backend against the CPU's: the same bits are stored whatever happens to sequences. And
 * what a device has of its own: memory that runs out, streams, faults that come late. */
#include "cache.h"
#include "cuda_host/control.h"
#include "cuda_host/operands.h"

#include "tests.h" /* after message.h: see there */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, QUERY_HEADS = 4, KV_HEADS = 2, DIM = 16, PAGE = 16, MOST_ROWS = 96, BOTH = 2 };

static pkv_config make_config(pkv_dtype dtype, pkv_factors k, pkv_factors v)
{
    pkv_config config;

    pkv_config_init(&config, sizeof config);
    config.layers = LAYERS;
    config.query_heads = QUERY_HEADS;
    config.kv_heads = KV_HEADS;
    config.head_dim = DIM;
    config.page_tokens = PAGE;
    config.rank_k = 6;
    config.rank_v = 5;
    config.factors_k = k;
    config.factors_v = v;
    config.dtype = dtype;
    config.max_sequences = 4;
    config.max_tokens = 1200;
    config.max_step_tokens = MOST_ROWS;
    config.threads = 1;
    return config;
}

/* The rows of a step, of any sequence: what is stored depends on them alone. */
struct rows {
    float q[MOST_ROWS * QUERY_HEADS * DIM];
    float k[MOST_ROWS * KV_HEADS * DIM];
    float v[MOST_ROWS * KV_HEADS * DIM];
    float out[BOTH][MOST_ROWS * QUERY_HEADS * DIM];
};

static void fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = 3 * tests_random_float();
}

static void fill_rows(struct rows *rows)
{
    fill(rows->q, MOST_ROWS * QUERY_HEADS * DIM);
    fill(rows->k, MOST_ROWS * KV_HEADS * DIM);
    fill(rows->v, MOST_ROWS * KV_HEADS * DIM);
}

static pkv_step_io io_of(struct rows *rows, size_t which)
{
    return (pkv_step_io){.struct_size = sizeof(pkv_step_io),
                         .q = {rows->q, PKV_F32, 0, 0},
                         .k = {rows->k, PKV_F32, 0, 0},
                         .v = {rows->v, PKV_F32, 0, 0},
                         .out = {rows->out[which], PKV_F32, 0, 0}};
}

/* ---- The same walk on both ---- */

struct walk {
    pkv_cache *caches[BOTH];
    pkv_seq *sequences[BOTH][4];
    size_t n;
    struct rows rows;
};

static void compare(struct walk *walk)
{
    uint64_t digests[BOTH];

    for (size_t i = 0; i < BOTH; i++)
        ck_assert_int_eq(pkv_cache_digest(walk->caches[i], &digests[i]), PKV_OK);
    ck_assert_uint_eq(digests[0], digests[1]);
}

/* Rows of f32 caches agree to rounding of f32. */
static void compare_outputs(const struct walk *walk, size_t rows, pkv_dtype dtype)
{
    double most = 0.0, error = 0.0;

    for (size_t i = 0; i < rows * QUERY_HEADS * DIM; i++) {
        most = fmax(most, fabs((double)walk->rows.out[0][i]));
        error = fmax(error, fabs((double)walk->rows.out[0][i] - (double)walk->rows.out[1][i]));
    }
    if (dtype == PKV_F32)
        require_msg(error <= 2e-5 * most, "outputs differ by %g of %g", error, most);
    else /* the CPU may compute in packed bf16 */
        require_msg(error <= 1e-2 * most, "outputs differ by %g of %g", error, most);
}

static void walk_step(struct walk *walk, pkv_dtype dtype, bool aborted)
{
    pkv_step_item items[BOTH][4];
    size_t first = tests_random() % walk->n;
    size_t n = 1 + tests_random() % walk->n;
    size_t rows = 0;
    pkv_step *steps[BOTH];
    size_t layers = aborted ? tests_random() % (LAYERS + 1) : LAYERS;

    for (size_t i = 0; i < n; i++) {
        size_t tokens = tests_random() % 3 ? 1 + tests_random() % 3 : 1 + tests_random() % 24;

        for (size_t j = 0; j < BOTH; j++)
            items[j][i] = (pkv_step_item){walk->sequences[j][(first + i) % walk->n], tokens};
        rows += tokens;
    }
    for (size_t j = 0; j < BOTH; j++)
        ck_assert_int_eq(pkv_step_begin(walk->caches[j], items[j], n, &steps[j]), PKV_OK);
    for (size_t layer = 0; layer < layers; layer++) {
        fill_rows(&walk->rows);
        for (size_t j = 0; j < BOTH; j++) {
            pkv_step_io io = io_of(&walk->rows, j);

            ck_assert_int_eq(tests_step_layer(steps[j], layer, &io), PKV_OK);
        }
        compare_outputs(walk, rows, dtype);
    }
    for (size_t j = 0; j < BOTH; j++) {
        if (aborted)
            pkv_step_abort(steps[j]);
        else
            ck_assert_int_eq(pkv_step_end(steps[j]), PKV_OK);
    }
}

static void walk_fork(struct walk *walk)
{
    size_t from = tests_random() % walk->n;

    for (size_t j = 0; j < BOTH; j++)
        ck_assert_int_eq(pkv_seq_fork(walk->sequences[j][from], &walk->sequences[j][walk->n]),
                         PKV_OK);
    walk->n++;
}

static void walk_close(struct walk *walk)
{
    size_t which = tests_random() % walk->n;

    walk->n--;
    for (size_t j = 0; j < BOTH; j++) {
        pkv_seq_close(walk->sequences[j][which]);
        walk->sequences[j][which] = walk->sequences[j][walk->n];
    }
}

static void walk_truncate(struct walk *walk)
{
    size_t which = tests_random() % walk->n;
    size_t tokens = pkv_seq_tokens(walk->sequences[0][which]);

    tokens -= tests_random() % (tokens + 1) / (1 + tests_random() % 8);
    for (size_t j = 0; j < BOTH; j++)
        ck_assert_int_eq(pkv_seq_truncate(walk->sequences[j][which], tokens), PKV_OK);
}

/* 12 kinds of caches, as many walks. */
START_TEST(same_bits_on_a_walk)
{
    static const pkv_factors forms[] = {PKV_FACTORS_NATIVE, PKV_FACTORS_INT4};
    const pkv_dtype dtype = (pkv_dtype)(_i % 3);
    pkv_config config = make_config(dtype, forms[_i / 3 % 2], forms[_i / 6 % 2]);
    struct walk *walk = tests_allocate(1, sizeof *walk);
    uint64_t factorized[BOTH];

    tests_seed((uint64_t)_i);
    cuda_host_seed((uint64_t)_i);
    for (size_t j = 0; j < BOTH; j++) {
        tests_backend = j == 0 ? &backend_cpu : &backend_cuda;
        walk->caches[j] = tests_open_cache(&config);
        ck_assert_int_eq(pkv_seq_open(walk->caches[j], &walk->sequences[j][0]), PKV_OK);
    }
    walk->n = 1;
    for (size_t i = 0; i < 70; i++) {
        size_t choice = tests_random() % 12;

        if (choice == 0 && walk->n < 4)
            walk_fork(walk);
        else if (choice == 1 && walk->n > 1)
            walk_close(walk);
        else if (choice == 2)
            walk_truncate(walk);
        else if (cache_tokens(walk->caches[0]) + MOST_ROWS < config.max_tokens)
            walk_step(walk, dtype, choice == 3);
        compare(walk);
    }
    for (size_t j = 0; j < BOTH; j++) {
        pkv_stats stats = {.struct_size = sizeof stats};

        ck_assert_int_eq(pkv_cache_stats(walk->caches[j], &stats), PKV_OK);
        factorized[j] = stats.factorized_pages;
        pkv_cache_close(walk->caches[j]);
    }
    ck_assert_uint_gt(factorized[0], 0);
    ck_assert_uint_eq(factorized[0], factorized[1]);
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(walk);
}
END_TEST

/* ---- Streams ---- */

/* On a stream of the caller's nothing happens before the end, and faults come with it. */
START_TEST(faults_at_the_end)
{
    pkv_config config = make_config(PKV_BF16, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    struct rows *rows = tests_allocate(1, sizeof *rows);
    pkv_step_item item = {.tokens = 40};
    struct operands *operands[LAYERS];
    uint64_t before, after;
    pkv_cache *cache;
    pkv_step *step;

    tests_backend = &backend_cuda;
    config.stream = cuda_host_open_stream();
    cache = tests_open_cache(&config);
    ck_assert_int_eq(pkv_seq_open(cache, &item.seq), PKV_OK);
    ck_assert_int_eq(pkv_cache_digest(cache, &before), PKV_OK);
    for (int faulty = 1; faulty >= 0; faulty--) {
        ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &step), PKV_OK);
        for (size_t layer = 0; layer < LAYERS; layer++) {
            pkv_step_io io = io_of(rows, 0), on_device;

            fill_rows(rows);
            if (faulty && layer == 1)
                rows->v[(20 * KV_HEADS + 1) * DIM + 3] = NAN;
            operands[layer] =
                operands_upload(&io, item.tokens, QUERY_HEADS, KV_HEADS, DIM, &on_device);
            ck_assert_int_eq(pkv_step_layer(step, layer, &on_device), PKV_OK);
        }
        ck_assert_int_eq(pkv_step_end(step), faulty ? PKV_ERROR_VALUE : PKV_OK);
        if (faulty) {
            ck_assert_str_eq(pkv_cache_message(cache),
                             "layer 1, KV head 1, page 1 (token 20): V is not finite");
            ck_assert_int_eq(pkv_step_end(step), PKV_ERROR_ARGUMENT);
            pkv_step_abort(step);
            ck_assert_int_eq(pkv_cache_digest(cache, &after), PKV_OK);
            ck_assert_uint_eq(after, before);
        }
        for (size_t layer = 0; layer < LAYERS; layer++) {
            pkv_step_io io = io_of(rows, 0);

            operands_download(operands[layer], &io);
        }
    }
    ck_assert_uint_eq(pkv_seq_tokens(item.seq), 40);
    pkv_cache_close(cache);
    cuda_host_close_stream(config.stream);
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(rows);
}
END_TEST

/* ---- Memory ---- */

START_TEST(device_memory_runs_out)
{
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_INT4);
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;
    size_t bytes = 0;
    size_t failures = 0;
    pkv_status status;

    do {
        cuda_host_set_memory(bytes);
        status = cache_open_with(&backend_cuda, &config, &cache, message);
        if (status != PKV_OK) {
            ck_assert_int_eq(status, PKV_ERROR_MEMORY);
            ck_assert_ptr_nonnull(strstr(message, "CUDA device 0"));
            ck_assert_ptr_nonnull(strstr(message, "out of memory"));
            ck_assert_ptr_null(cache);
            ck_assert_uint_eq(cuda_host_memory(), 0);
            failures++;
        }
        bytes = bytes * 5 / 4 + 1000;
    } while (status != PKV_OK);
    ck_assert_uint_gt(failures, 5);
    pkv_cache_close(cache);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}
END_TEST

START_TEST(refused)
{
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;

    config.device = 1;
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message), PKV_ERROR_ARGUMENT);
    ck_assert_str_eq(message, "device: 1 is not one of the 1 CUDA devices");
    config.device = 0;
    config.isa = "generic";
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message),
                     PKV_ERROR_UNSUPPORTED);
    ck_assert_int_eq(strncmp(message, "isa: ", 5), 0);
    config.isa = NULL;
    config.solver = PKV_SOLVER_LAPACK;
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message),
                     PKV_ERROR_UNSUPPORTED);
    ck_assert_int_eq(strncmp(message, "solver: ", 8), 0);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("cuda");
    TCase *test = tcase_create("cuda");

    tcase_add_loop_test(test, same_bits_on_a_walk, 0, 12);
    tcase_add_test(test, faults_at_the_end);
    tcase_add_test(test, device_memory_runs_out);
    tcase_add_test(test, refused);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
