/* SPDX-License-Identifier: MIT */
/* Bytes after real appends: the library's statistics, its pool, and the process's memory. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "puzzlekv.h"
#include "tests.h"

#define LAYERS   4
#define KV_HEADS 2
#define D        128
#define TOKENS   ((size_t)16384)
#define STEP     ((size_t)1024)
#define ROW      ((size_t)KV_HEADS * D)

/* AddressSanitizer asks for its options here. It holds freed memory back, more than is measured. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "quarantine_size_mb=1";
}

static size_t resident_bytes(void)
{
    unsigned long total, resident;
    FILE *stream = fopen("/proc/self/statm", "r");

    ck_assert_ptr_nonnull(stream);
    ck_assert_int_eq(fscanf(stream, "%lu %lu", &total, &resident), 2);
    fclose(stream);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

struct result {
    pkv_stats stats;
    size_t grown_bytes; /* resident memory, from before the cache to after the last step */
};

static void fill_cache(pkv_factors factors, struct result *result)
{
    pkv_config config;
    pkv_cache *cache;
    pkv_seq *seq;
    float *k = tests_allocate(STEP * ROW, sizeof *k);
    float *v = tests_allocate(STEP * ROW, sizeof *v);

    tests_seed(1);
    for (size_t i = 0; i < STEP * ROW; i++) {
        k[i] = tests_random_float();
        v[i] = tests_random_float();
    }
    pkv_config_init(&config, sizeof config);
    config.layers = LAYERS;
    config.query_heads = config.kv_heads = KV_HEADS;
    config.head_dim = D;
    config.factors_k = config.factors_v = factors;
    config.max_tokens = TOKENS;
    config.max_step_tokens = STEP;

    size_t before = resident_bytes();

    cache = tests_open_cache(&config);
    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    for (size_t t = 0; t < TOKENS; t += STEP) {
        const pkv_step_item item = {seq, STEP};
        const pkv_step_io io = {
            .struct_size = sizeof io, .k = {k, PKV_F32, 0, 0}, .v = {v, PKV_F32, 0, 0}};
        pkv_step *step;

        ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &step), PKV_OK);
        for (size_t layer = 0; layer < LAYERS; layer++)
            ck_assert_int_eq(tests_step_layer(step, layer, &io), PKV_OK);
        ck_assert_int_eq(pkv_step_end(step), PKV_OK);
    }
    result->grown_bytes = resident_bytes() - before;
    result->stats.struct_size = sizeof result->stats;
    ck_assert_int_eq(pkv_cache_stats(cache, &result->stats), PKV_OK);
    pkv_cache_close(cache);
    free(k);
    free(v);
}

/* In a process of its own, so that what one cache leaves behind is not counted for another. */
static struct result measure(pkv_factors factors)
{
    struct result result;
    int ends[2], status;
    pid_t child;

    ck_assert_int_eq(pipe(ends), 0);
    child = fork();
    ck_assert_int_ne(child, -1);
    if (child == 0) {
        fill_cache(factors, &result);
        _exit(write(ends[1], &result, sizeof result) == sizeof result ? 0 : 1);
    }
    close(ends[1]);
    ck_assert_int_eq(read(ends[0], &result, sizeof result), sizeof result);
    close(ends[0]);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return result;
}

START_TEST(test_footprint)
{
    struct result raw = measure(PKV_FACTORS_NONE);
    struct result puzzle = measure(PKV_FACTORS_NATIVE);
    struct result int4 = measure(PKV_FACTORS_INT4);
    size_t pages = TOKENS / 32, pair = (size_t)LAYERS * KV_HEADS * 2;

    /* Per layer and KV head: 2 P d b dense, (r_K + r_V)(P + d) b factorized, b = 2; as INT4
     * (r_K + r_V)(P + d) / 2 + 2 (r_K + d + P + d). */
    ck_assert_uint_eq(raw.stats.payload_bytes, pair * TOKENS * D * 2);
    ck_assert_uint_eq(raw.stats.raw_bytes, raw.stats.payload_bytes);
    ck_assert_uint_eq(puzzle.stats.raw_bytes, raw.stats.payload_bytes);
    ck_assert_uint_eq(puzzle.stats.pages[PKV_PAGE_SINK], 1);
    ck_assert_uint_eq(puzzle.stats.pages[PKV_PAGE_WINDOW], 1);
    ck_assert_uint_eq(puzzle.stats.pages[PKV_PAGE_FACTORIZED], pages - 2);
    ck_assert_uint_eq(puzzle.stats.payload_bytes,
                      pair * 2 * 32 * D * 2 + (pages - 2) * pair / 2 * 30 * (32 + D) * 2);

    double ratio = (double)puzzle.stats.payload_bytes / (double)puzzle.stats.raw_bytes;

    ck_assert_double_eq_tol(ratio, 0.58755, 0.000005);
    ck_assert_uint_eq(int4.stats.raw_bytes, raw.stats.payload_bytes);
    ck_assert_uint_eq(int4.stats.payload_bytes,
                      pair * 2 * 32 * D * 2 +
                          (pages - 2) * pair / 2 * (30 * (32 + D) / 2 + 2 * (16 + D + 32 + D)));
    ck_assert_double_eq_tol((double)int4.stats.payload_bytes / (double)int4.stats.raw_bytes,
                            0.18678, 0.000005);
    ck_assert_double_le((double)int4.stats.reserved_bytes, 0.20 * (double)raw.stats.reserved_bytes);
    ck_assert_double_le((double)puzzle.stats.reserved_bytes,
                        0.60 * (double)raw.stats.reserved_bytes);

    size_t claimed = raw.stats.payload_bytes - puzzle.stats.payload_bytes;

    ck_assert_uint_gt(raw.grown_bytes, puzzle.grown_bytes);
    ck_assert_double_ge((double)(raw.grown_bytes - puzzle.grown_bytes), 0.8 * (double)claimed);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("footprint");
    TCase *tests = tcase_create("footprint");

    tcase_add_test(tests, test_footprint);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
