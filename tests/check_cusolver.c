/* SPDX-License-Identifier: MIT */
/* gpu/cusolver.cu: what becomes of its faults, and batches larger than it takes. How good its
 * factors are check_factorize tests. */
#include "cache.h"
#include "cuda_host/control.h"

#include "tests.h" /* after message.h: see there */

#include <stdlib.h>
#include <string.h>

enum { HEADS = 64, LENGTH = 8, DIM = 8, PAGES = 130, ROWS = PAGES * LENGTH };

static float rows[ROWS * HEADS * DIM];

static pkv_config make_config(void)
{
    pkv_config config;

    pkv_config_init(&config, sizeof config);
    config.layers = 1;
    config.query_heads = config.kv_heads = HEADS;
    config.head_dim = DIM;
    config.page_tokens = LENGTH;
    config.rank_k = 3;
    config.rank_v = 2;
    config.sink_pages = config.window_pages = 0;
    config.solver = PKV_SOLVER_CUSOLVER;
    config.dtype = PKV_F32;
    config.max_tokens = config.max_step_tokens = ROWS;
    return config;
}

static void fill(void)
{
    tests_seed(1);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        rows[i] = tests_random_float();
}

static pkv_status step(pkv_cache *cache, pkv_seq *seq, size_t tokens)
{
    const pkv_step_item item = {seq, tokens};
    const pkv_step_io io = {
        .struct_size = sizeof io, .k = {rows, PKV_F32, 0, 0}, .v = {rows, PKV_F32, 0, 0}};
    pkv_status status;
    pkv_step *open;

    ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &open), PKV_OK);
    status = tests_step_layer(open, 0, &io);
    if (status == PKV_OK)
        return pkv_step_end(open);
    pkv_step_abort(open);
    return status;
}

/* More matrices than one call takes. */
START_TEST(many_matrices)
{
    const pkv_config config = make_config();
    pkv_stats stats = {.struct_size = sizeof stats};
    pkv_cache *cache = tests_open_cache(&config);
    pkv_seq *seq;

    fill();
    ck_assert_int_gt(PAGES * HEADS * 2, 16384);
    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    ck_assert_int_eq(step(cache, seq, ROWS), PKV_OK);
    ck_assert_int_eq(pkv_cache_stats(cache, &stats), PKV_OK);
    ck_assert_uint_eq(stats.factorized_pages, PAGES);
    pkv_cache_close(cache);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}
END_TEST

/* The page is named, nothing changes, and the next step goes well. */
START_TEST(not_converged)
{
    const pkv_config config = make_config();
    pkv_cache *cache = tests_open_cache(&config);
    uint64_t before, after;
    pkv_seq *seq;

    fill();
    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    ck_assert_int_eq(step(cache, seq, 2 * LENGTH + 3), PKV_OK);
    ck_assert_int_eq(pkv_seq_digest(seq, &before), PKV_OK);
    cuda_host_set_solver(1, 2 * HEADS + 2 * 5 + 1);
    ck_assert_int_eq(step(cache, seq, 2 * LENGTH), PKV_ERROR_SOLVER);
    ck_assert_str_eq(pkv_cache_message(cache),
                     "layer 0, KV head 5, page 3: V: cuSOLVER did not converge");
    ck_assert_int_eq(pkv_seq_digest(seq, &after), PKV_OK);
    ck_assert_uint_eq(before, after);
    cuda_host_set_solver(1, -1);
    ck_assert_int_eq(step(cache, seq, 2 * LENGTH), PKV_OK);
    pkv_cache_close(cache);
}
END_TEST

/* Where it is not, and on the CPU, a cache with it is refused, and others open. */
START_TEST(not_there)
{
    pkv_config config = make_config();
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;

    cuda_host_set_solver(0, -1);
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message),
                     PKV_ERROR_UNSUPPORTED);
    ck_assert_str_eq(message, "solver: no cuSOLVER: libcusolver.so: there is none");
    ck_assert_uint_eq(cuda_host_memory(), 0);
    ck_assert_int_eq(cache_open_with(&backend_cpu, &config, &cache, message),
                     PKV_ERROR_UNSUPPORTED);
    ck_assert_str_eq(message, "solver: the CPU backend has no PKV_SOLVER_CUSOLVER");
    config.solver = PKV_SOLVER_BATCHED;
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message), PKV_OK);
    pkv_cache_close(cache);
    cuda_host_set_solver(1, -1);
}
END_TEST

/* A graph would do work that the host decides. */
START_TEST(not_captured)
{
    pkv_config config = make_config();
    void *stream = cuda_host_open_stream(0);
    pkv_step_item item = {.tokens = 1};
    const pkv_step_io io = {
        .struct_size = sizeof io, .k = {rows, PKV_F32, 0, 0}, .v = {rows, PKV_F32, 0, 0}};
    pkv_cache *cache;
    pkv_step *open;

    config.stream = stream;
    cache = tests_open_cache(&config);
    ck_assert_int_eq(pkv_seq_open(cache, &item.seq), PKV_OK);
    ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &open), PKV_OK);
    cuda_host_begin_capture(stream);
    ck_assert_int_eq(pkv_step_layer(open, 0, &io), PKV_ERROR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(pkv_cache_message(cache), "PKV_SOLVER_CUSOLVER cannot be"));
    cuda_host_close_graph(cuda_host_end_capture(stream));
    pkv_step_abort(open);
    pkv_cache_close(cache);
    cuda_host_close_stream(stream);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("cusolver");
    TCase *many = tcase_create("many");
    TCase *faults = tcase_create("faults"); /* apart for tests/cuda_races.sh */

    tests_backend = &backend_cuda;
    tcase_add_test(many, many_matrices);
    tcase_add_test(faults, not_converged);
    tcase_add_test(faults, not_there);
    tcase_add_test(faults, not_captured);
    suite_add_tcase(suite, many);
    suite_add_tcase(suite, faults);
    return tests_run(suite);
}
