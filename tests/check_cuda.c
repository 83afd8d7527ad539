/* SPDX-License-Identifier: MIT */
/* The CUDA backend against the CPU's: the same bits are stored whatever happens to sequences. And
 * what a device has of its own: memory that runs out, streams, faults that come late. */
#include "cache.h"
#include "cuda_host/control.h"
#include "cuda_host/operands.h"
#include "numeric.h"

#include "tests.h" /* after message.h: see there */

#include <math.h>
#include <stdio.h>
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
    pkv_config config;
    pkv_cache *caches[BOTH];
    pkv_seq *sequences[BOTH][4];
    size_t n;
    float *q, *k, *v, *out[BOTH];  /* of MOST_ROWS */
    uint16_t *k_halves, *v_halves; /* one more: rows as they are stored */
};

enum { PLAIN_WALKS = 12, WALKS = PLAIN_WALKS + 9 };

/* The first ones for the plain kernels: all types and factors. The others for those with tensor
 * cores, then for what is these's but for its type, group or rank. */
static pkv_config config_of_walk(int i)
{
    static const pkv_factors forms[] = {PKV_FACTORS_NATIVE, PKV_FACTORS_INT4};
    static const struct {
        pkv_dtype dtype;
        size_t group, d, rank_k, rank_v;
        int k, v;
    } tuned[] = {{PKV_BF16, 4, 128, 16, 14, 0, 0}, {PKV_F16, 3, 64, 16, 14, 0, 0},
                 {PKV_BF16, 8, 64, 13, 16, 1, 1},  {PKV_F16, 5, 128, 9, 7, 1, 1},
                 {PKV_BF16, 1, 128, 8, 15, 0, 1},  {PKV_F16, 7, 64, 15, 3, 1, 0},
                 {PKV_F32, 2, 64, 16, 14, 0, 1},   {PKV_BF16, 9, 64, 16, 14, 0, 0},
                 {PKV_F16, 2, 64, 17, 14, 1, 0}};
    pkv_config config = make_config((pkv_dtype)(i % 3), forms[i / 3 % 2], forms[i / 6 % 2]);

    if (i < PLAIN_WALKS)
        return config;
    i -= PLAIN_WALKS;
    config.layers = 1;
    config.dtype = tuned[i].dtype;
    config.query_heads = KV_HEADS * tuned[i].group;
    config.head_dim = tuned[i].d;
    config.page_tokens = 32;
    config.rank_k = tuned[i].rank_k;
    config.rank_v = tuned[i].rank_v;
    config.factors_k = forms[tuned[i].k];
    config.factors_v = forms[tuned[i].v];
    return config;
}

static void compare(struct walk *walk)
{
    uint64_t digests[BOTH];

    for (size_t i = 0; i < BOTH; i++)
        ck_assert_int_eq(pkv_cache_digest(walk->caches[i], &digests[i]), PKV_OK);
    ck_assert_uint_eq(digests[0], digests[1]);
}

/* Rows of f32 caches agree to rounding of f32. */
static void compare_outputs(const struct walk *walk, size_t rows)
{
    double most = 0.0, error = 0.0;

    for (size_t i = 0; i < rows * walk->config.query_heads * walk->config.head_dim; i++) {
        most = fmax(most, fabs((double)walk->out[0][i]));
        error = fmax(error, tests_difference(walk->out[0][i], walk->out[1][i]));
    }
    if (walk->config.dtype == PKV_F32)
        require_msg(error <= 2e-5 * most, "outputs differ by %g of %g", error, most);
    else /* the CPU may compute in packed bf16 */
        require_msg(error <= 1e-2 * most, "outputs differ by %g of %g", error, most);
}

/* K or V of a layer: in f32 or, for an odd number of rows, as they are stored, every other time
 * where they can be loaded 16 bytes at a time. */
static pkv_input input_of_walk(const struct walk *walk, size_t rows, const float *x,
                               uint16_t *halves)
{
    const pkv_dtype dtype = walk->config.dtype;

    if (dtype == PKV_F32 || rows % 2 == 0)
        return (pkv_input){x, PKV_F32, 0, 0};
    halves += rows % 4 == 1;
    for (size_t i = 0; i < rows * KV_HEADS * walk->config.head_dim; i++)
        halves[i] = dtype == PKV_F16 ? f16_from_f32(x[i]) : bf16_from_f32(x[i]);
    return (pkv_input){halves, dtype, 0, 0};
}

static void walk_step(struct walk *walk, bool aborted)
{
    const size_t d = walk->config.head_dim;
    pkv_step_item items[BOTH][4];
    size_t first = tests_random() % walk->n;
    size_t n = 1 + tests_random() % walk->n;
    size_t rows = 0;
    pkv_step *steps[BOTH];
    size_t layers = aborted ? tests_random() % (walk->config.layers + 1) : walk->config.layers;

    for (size_t i = 0; i < n; i++) {
        size_t tokens = tests_random() % 3
                            ? 1 + tests_random() % 3
                            : 1 + tests_random() % (3 * walk->config.page_tokens / 2);

        if (tokens > MOST_ROWS - rows - (n - 1 - i))
            tokens = MOST_ROWS - rows - (n - 1 - i);

        for (size_t j = 0; j < BOTH; j++)
            items[j][i] = (pkv_step_item){walk->sequences[j][(first + i) % walk->n], tokens};
        rows += tokens;
    }
    for (size_t j = 0; j < BOTH; j++)
        ck_assert_int_eq(pkv_step_begin(walk->caches[j], items[j], n, &steps[j]), PKV_OK);
    for (size_t layer = 0; layer < layers; layer++) {
        fill(walk->q, rows * walk->config.query_heads * d);
        fill(walk->k, rows * KV_HEADS * d);
        fill(walk->v, rows * KV_HEADS * d);
        for (size_t j = 0; j < BOTH; j++) {
            pkv_step_io io = {.struct_size = sizeof io,
                              .q = {walk->q, PKV_F32, 0, 0},
                              .k = input_of_walk(walk, rows, walk->k, walk->k_halves),
                              .v = input_of_walk(walk, rows, walk->v, walk->v_halves),
                              .out = {walk->out[j], PKV_F32, 0, 0}};

            ck_assert_int_eq(tests_step_layer(steps[j], layer, &io), PKV_OK);
        }
        compare_outputs(walk, rows);
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

START_TEST(same_bits_on_a_walk)
{
    struct walk *walk = tests_allocate(1, sizeof *walk);
    pkv_config *config = &walk->config;
    uint64_t factorized[BOTH];

    *config = config_of_walk(_i);
    tests_seed((uint64_t)_i);
    walk->q = tests_allocate(MOST_ROWS * config->query_heads * config->head_dim, sizeof *walk->q);
    walk->k = tests_allocate(MOST_ROWS * KV_HEADS * config->head_dim, sizeof *walk->k);
    walk->v = tests_allocate(MOST_ROWS * KV_HEADS * config->head_dim, sizeof *walk->v);
    walk->k_halves = tests_allocate(MOST_ROWS * KV_HEADS * config->head_dim + 1, sizeof(uint16_t));
    walk->v_halves = tests_allocate(MOST_ROWS * KV_HEADS * config->head_dim + 1, sizeof(uint16_t));
    for (size_t j = 0; j < BOTH; j++) {
        tests_backend = j == 0 ? &backend_cpu : &backend_cuda;
        walk->out[j] =
            tests_allocate(MOST_ROWS * config->query_heads * config->head_dim, sizeof *walk->q);
        walk->caches[j] = tests_open_cache(config);
        ck_assert_int_eq(pkv_seq_open(walk->caches[j], &walk->sequences[j][0]), PKV_OK);
    }
    walk->n = 1;
    for (size_t i = 0; i < (_i < PLAIN_WALKS ? 70 : 50); i++) {
        size_t choice = tests_random() % 12;

        if (choice == 0 && walk->n < 4)
            walk_fork(walk);
        else if (choice == 1 && walk->n > 1)
            walk_close(walk);
        else if (choice == 2)
            walk_truncate(walk);
        else if (cache_tokens(walk->caches[0]) + MOST_ROWS < config->max_tokens)
            walk_step(walk, choice == 3);
        compare(walk);
    }
    for (size_t j = 0; j < BOTH; j++) {
        pkv_stats stats = {.struct_size = sizeof stats};

        ck_assert_int_eq(pkv_cache_stats(walk->caches[j], &stats), PKV_OK);
        factorized[j] = stats.factorized_pages;
        pkv_cache_close(walk->caches[j]);
        free(walk->out[j]);
    }
    ck_assert_uint_gt(factorized[0], 0);
    ck_assert_uint_eq(factorized[0], factorized[1]);
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(walk->q);
    free(walk->k);
    free(walk->v);
    free(walk->k_halves);
    free(walk->v_halves);
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
    config.stream = cuda_host_open_stream(0);
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

/* ---- Steps that nobody waits for ---- */

/* Operands of what is queued: they stay until it has run. */
struct queued {
    struct operands *operands[64];
    size_t n;
};

static void close_queued(struct queued *queued)
{
    while (queued->n > 0)
        operands_close(queued->operands[--queued->n]);
}

/* A step of a cache with a stream of the caller's, or of one on the CPU. V of token `bad` of the
 * step is none in the last layer. */
static pkv_status queue_step(pkv_cache *cache, pkv_seq *seq, size_t tokens, uint64_t seed,
                             size_t bad, struct queued *queued)
{
    struct rows *rows = tests_allocate(1, sizeof *rows);
    pkv_step_item item = {seq, tokens};
    pkv_step *step;
    pkv_status status = pkv_step_begin(cache, &item, 1, &step);

    tests_seed(seed);
    for (size_t layer = 0; layer < LAYERS && status == PKV_OK; layer++) {
        pkv_step_io io = io_of(rows, 0), on_device = io;

        fill_rows(rows);
        if (bad < tokens && layer + 1 == LAYERS)
            rows->v[bad * KV_HEADS * DIM + 3] = NAN;
        if (cache->ops == &backend_cuda) {
            ck_assert_uint_lt(queued->n, 64);
            queued->operands[queued->n++] =
                operands_upload(&io, tokens, QUERY_HEADS, KV_HEADS, DIM, &on_device);
        }
        status = pkv_step_layer(step, layer, &on_device);
    }
    if (status == PKV_OK)
        status = pkv_step_end(step);
    if (status != PKV_OK)
        pkv_step_abort(step);
    free(rows);
    return status;
}

#define GOOD SIZE_MAX /* no token is bad */

static uint64_t digest_of(pkv_seq *seq)
{
    uint64_t digest;

    ck_assert_int_eq(pkv_seq_digest(seq, &digest), PKV_OK);
    return digest;
}

/* The same cache on the CPU, 0, or the device, 1. */
static pkv_cache *open_on(size_t j, const pkv_config *config)
{
    tests_backend = j == 0 ? &backend_cpu : &backend_cuda;
    return tests_open_cache(config);
}

static pkv_seq *open_seq(pkv_cache *cache)
{
    pkv_seq *seq;

    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    return seq;
}

static int write_nothing(void *opaque, const void *data, size_t bytes)
{
    (void)opaque;
    (void)data;
    (void)bytes;
    ck_abort_msg("a sequence that has failed is written");
}

/* That a sequence that has failed accepts nothing but what it should. */
static void check_refusals(pkv_cache *cache, pkv_seq *seq, size_t good, struct queued *queued)
{
    const pkv_session session = {sizeof session, NULL, NULL, 0};
    const pkv_writer writer = {write_nothing, NULL};
    float k[PAGE * DIM];
    char expected[100];
    uint64_t digest;
    pkv_seq *fork;

    snprintf(expected, sizeof expected,
             "sequence: a step has failed; truncate it to %zu tokens or close it", good);
    ck_assert_int_eq(pkv_seq_digest(seq, &digest), PKV_ERROR_VALUE);
    ck_assert_str_eq(pkv_cache_message(cache), expected);
    ck_assert_int_eq(pkv_cache_digest(cache, &digest), PKV_ERROR_VALUE);
    ck_assert_int_eq(pkv_seq_read_page(seq, 0, 0, 0, k, NULL), PKV_ERROR_VALUE);
    ck_assert_int_eq(pkv_seq_fork(seq, &fork), PKV_ERROR_VALUE);
    ck_assert_ptr_null(fork);
    ck_assert_int_eq(pkv_seq_save(seq, &session, &writer), PKV_ERROR_VALUE);
    ck_assert_int_eq(queue_step(cache, seq, 1, 0, GOOD, queued), PKV_ERROR_VALUE);
    ck_assert_str_eq(pkv_cache_message(cache), expected);
    for (size_t tokens = good - 1; tokens <= good + 1; tokens += 2)
        ck_assert_int_eq(pkv_seq_truncate(seq, tokens), PKV_ERROR_VALUE);
}

/* Steps run on while an earlier one's fault is not known yet. */
START_TEST(faults_come_later)
{
    pkv_config config = make_config(PKV_BF16, PKV_FACTORS_NATIVE, PKV_FACTORS_INT4);
    pkv_cache *caches[BOTH];
    pkv_seq *bad[BOTH], *good[BOTH];
    struct queued queued = {.n = 0};
    uint64_t digest;

    config.step_flags = PKV_STEP_ASYNC;
    config.stream = cuda_host_open_stream(0); /* which the CPU does not look at */
    for (size_t j = 0; j < BOTH; j++) {
        caches[j] = open_on(j, &config);
        bad[j] = open_seq(caches[j]);
        good[j] = open_seq(caches[j]);
        ck_assert_int_eq(queue_step(caches[j], bad[j], 40, 1, GOOD, &queued), PKV_OK);
        ck_assert_int_eq(queue_step(caches[j], good[j], 70, 2, GOOD, &queued), PKV_OK);
    }
    ck_assert_uint_eq(caches[1]->n_submitted, 2);
    ck_assert_uint_eq(pkv_seq_tokens(bad[1]), 40);
    ck_assert_uint_eq(digest_of(bad[1]), digest_of(bad[0]));
    ck_assert_uint_eq(caches[1]->n_submitted, 0);

    /* The third one is bad, and tokens follow; the page that it completes leaves the window. */
    ck_assert_int_eq(queue_step(caches[1], bad[1], 30, 3, 2, &queued), PKV_OK);
    ck_assert_int_eq(queue_step(caches[1], bad[1], 30, 4, GOOD, &queued), PKV_OK);
    ck_assert_int_eq(queue_step(caches[1], good[1], 5, 5, GOOD, &queued), PKV_OK);
    ck_assert_int_eq(queue_step(caches[0], good[0], 5, 5, GOOD, &queued), PKV_OK);
    ck_assert_uint_eq(caches[1]->n_submitted, 3);
    ck_assert_uint_eq(pkv_seq_tokens(bad[1]), 100);
    ck_assert_int_eq(pkv_seq_digest(good[1], &digest), PKV_ERROR_VALUE);
    ck_assert_str_eq(pkv_cache_message(caches[1]),
                     "layer 1, KV head 0, page 2 (token 42): V is not finite");
    ck_assert_uint_eq(caches[1]->n_submitted, 0);
    ck_assert_uint_eq(digest_of(good[1]), digest_of(good[0]));

    /* Of 40 tokens 32 are left: page 2 became factors of good and bad ones. */
    check_refusals(caches[1], bad[1], 32, &queued);
    ck_assert_int_eq(pkv_seq_truncate(bad[1], 32), PKV_OK);
    ck_assert_int_eq(pkv_seq_truncate(bad[0], 32), PKV_OK);
    for (size_t j = 0; j < BOTH; j++)
        ck_assert_int_eq(queue_step(caches[j], bad[j], 50, 6, GOOD, &queued), PKV_OK);
    ck_assert_uint_eq(digest_of(bad[1]), digest_of(bad[0]));

    /* A page that is still dense keeps its tokens. */
    ck_assert_int_eq(queue_step(caches[1], bad[1], 3, 7, 0, &queued), PKV_OK);
    ck_assert_int_eq(pkv_seq_truncate(bad[1], 82), PKV_ERROR_VALUE);
    check_refusals(caches[1], bad[1], 82, &queued);
    ck_assert_int_eq(pkv_seq_truncate(bad[1], 82), PKV_OK);
    ck_assert_uint_eq(digest_of(bad[1]), digest_of(bad[0]));

    /* One that is found while another step is open, in which it is. */
    ck_assert_int_eq(queue_step(caches[1], bad[1], 3, 7, 0, &queued), PKV_OK);
    for (size_t end = 0; end < 2; end++) {
        pkv_step_item item = {bad[1], 1};
        pkv_step *step;

        if (end == 0) {
            ck_assert_int_eq(pkv_step_begin(caches[1], &item, 1, &step), PKV_OK);
            ck_assert_int_eq(pkv_seq_digest(good[1], &digest), PKV_ERROR_VALUE);
            ck_assert_int_eq(pkv_step_end(step), PKV_ERROR_ARGUMENT);
            pkv_step_abort(step);
        } else {
            ck_assert_int_eq(pkv_step_begin(caches[1], &item, 1, &step), PKV_ERROR_VALUE);
        }
    }

    /* Closing closes, whatever was under way. */
    ck_assert_int_eq(pkv_seq_truncate(bad[1], 82), PKV_OK);
    ck_assert_int_eq(queue_step(caches[1], bad[1], 3, 7, 0, &queued), PKV_OK);
    ck_assert_int_eq(pkv_seq_close(bad[1]), PKV_OK);
    ck_assert_uint_eq(digest_of(good[1]), digest_of(good[0]));
    ck_assert_int_eq(queue_step(caches[1], good[1], 3, 7, 0, &queued), PKV_OK);
    for (size_t j = 0; j < BOTH; j++)
        pkv_cache_close(caches[j]);
    close_queued(&queued);
    cuda_host_close_stream(config.stream);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}
END_TEST

/* A step is settled while another stream's graph is captured, in global mode. */
START_TEST(settled_while_capturing)
{
    pkv_config config = make_config(PKV_BF16, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    void *other = cuda_host_open_stream(0);
    struct queued queued = {.n = 0};
    uint64_t digests[BOTH];

    config.step_flags = PKV_STEP_ASYNC;
    config.stream = cuda_host_open_stream(0);
    for (size_t j = 0; j < BOTH; j++) {
        pkv_cache *cache = open_on(j, &config);
        pkv_seq *seq = open_seq(cache);

        ck_assert_int_eq(queue_step(cache, seq, 40, 1, GOOD, &queued), PKV_OK);
        if (j == 1) {
            ck_assert_uint_eq(cache->n_submitted, 1);
            cuda_host_begin_capture(other);
        }
        digests[j] = digest_of(seq);
        if (j == 1) {
            ck_assert_uint_eq(cache->n_submitted, 0);
            ck_assert_int_eq(cuda_host_capture_mode(), 0);
            cuda_host_close_graph(cuda_host_end_capture(other));
        }
        pkv_cache_close(cache);
    }
    ck_assert_uint_eq(digests[1], digests[0]);
    close_queued(&queued);
    cuda_host_close_stream(config.stream);
    cuda_host_close_stream(other);
}
END_TEST

/* More steps than may be under way: the oldest one is waited for. */
START_TEST(many_steps_under_way)
{
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    struct queued queued = {.n = 0};
    uint64_t digests[BOTH];

    config.step_flags = PKV_STEP_ASYNC;
    config.stream = cuda_host_open_stream(0);
    for (size_t j = 0; j < BOTH; j++) {
        pkv_cache *cache = open_on(j, &config);
        pkv_seq *seq = open_seq(cache);

        for (size_t i = 0; i < 20; i++) {
            ck_assert_int_eq(queue_step(cache, seq, 1 + i, i, GOOD, &queued), PKV_OK);
            ck_assert_uint_le(cache->n_submitted, MAX_SUBMITTED);
        }
        digests[j] = digest_of(seq);
        pkv_cache_close(cache);
    }
    ck_assert_uint_eq(digests[0], digests[1]);
    close_queued(&queued);
    cuda_host_close_stream(config.stream);
}
END_TEST

/* Blocks of several warps, in all kernels. */
START_TEST(several_warps)
{
    enum { D = 64, P = 64, HEADS = 2, PROMPT = 3 * P + 5 };
    static float q[PROMPT * HEADS * D], k[PROMPT * D], v[PROMPT * D], out[BOTH][PROMPT * HEADS * D];
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_INT4);
    uint64_t digests[BOTH];
    double error = 0.0;

    config.layers = config.kv_heads = 1;
    config.query_heads = HEADS;
    config.head_dim = D;
    config.page_tokens = P;
    config.max_step_tokens = PROMPT;
    tests_seed(1);
    fill(q, PROMPT * HEADS * D);
    fill(k, PROMPT * D);
    fill(v, PROMPT * D);
    for (size_t j = 0; j < BOTH; j++) {
        pkv_cache *cache = open_on(j, &config);
        pkv_seq *seq = open_seq(cache);

        /* The last one attends to factors. */
        for (size_t i = 0; i < 3; i++) {
            const pkv_step_item item = {seq, i == 0 ? PROMPT : 2};
            const pkv_step_io io = {.struct_size = sizeof io,
                                    .q = {q, PKV_F32, 0, 0},
                                    .k = {k, PKV_F32, 0, 0},
                                    .v = {v, PKV_F32, 0, 0},
                                    .out = {i == 1 ? NULL : out[j], PKV_F32, 0, 0}};
            pkv_step *step;

            ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &step), PKV_OK);
            ck_assert_int_eq(tests_step_layer(step, 0, &io), PKV_OK);
            ck_assert_int_eq(pkv_step_end(step), PKV_OK);
        }
        digests[j] = digest_of(seq);
        /* A cut inside of what is factors. */
        ck_assert_int_eq(pkv_seq_truncate(seq, P + 7), PKV_OK);
        digests[j] ^= digest_of(seq) << 1;
        pkv_cache_close(cache);
    }
    ck_assert_uint_eq(digests[0], digests[1]);
    for (size_t i = 0; i < PROMPT * HEADS * D; i++)
        error = fmax(error, tests_difference(out[0][i], out[1][i]));
    require_msg(error <= 2e-4, "outputs differ by %g", error);
}
END_TEST

/* ---- Graphs ---- */

enum { GRAPH_SEQUENCES = 2, GRAPH_STEPS = 1000 / GRAPH_SEQUENCES };

/* Two sequences on both backends, one token each a step; on the device by one graph. */
struct decoding {
    pkv_cache *caches[BOTH];
    pkv_step_item items[BOTH][GRAPH_SEQUENCES];
    void *stream;
    void *graph; /* NULL: not yet captured */
    struct rows *rows[LAYERS];
    struct operands *operands[LAYERS];
    pkv_step_io on_device[LAYERS];
};

static void open_decoding(struct decoding *decoding, pkv_config *config)
{
    decoding->stream = config->stream = cuda_host_open_stream(0);
    config->max_tokens = GRAPH_SEQUENCES * (GRAPH_STEPS + 60);
    for (size_t j = 0; j < BOTH; j++) {
        decoding->caches[j] = open_on(j, config);
        for (size_t i = 0; i < GRAPH_SEQUENCES; i++)
            decoding->items[j][i] = (pkv_step_item){open_seq(decoding->caches[j]), 1};
    }
    for (size_t layer = 0; layer < LAYERS; layer++) {
        pkv_step_io io;

        decoding->rows[layer] = tests_allocate(1, sizeof *decoding->rows[layer]);
        io = io_of(decoding->rows[layer], 1);
        decoding->operands[layer] = operands_upload(&io, GRAPH_SEQUENCES, QUERY_HEADS, KV_HEADS,
                                                    DIM, &decoding->on_device[layer]);
    }
}

static void close_decoding(struct decoding *decoding)
{
    for (size_t j = 0; j < BOTH; j++)
        pkv_cache_close(decoding->caches[j]);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        operands_close(decoding->operands[layer]);
        free(decoding->rows[layer]);
    }
    if (decoding->graph)
        cuda_host_close_graph(decoding->graph);
    cuda_host_close_stream(decoding->stream);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}

static void fill_decoding(struct decoding *decoding)
{
    for (size_t layer = 0; layer < LAYERS; layer++) {
        struct rows *rows = decoding->rows[layer];
        const pkv_step_io io = io_of(rows, 1);

        fill(rows->q, GRAPH_SEQUENCES * QUERY_HEADS * DIM);
        fill(rows->k, GRAPH_SEQUENCES * KV_HEADS * DIM);
        fill(rows->v, GRAPH_SEQUENCES * KV_HEADS * DIM);
        operands_refresh(decoding->operands[layer], &io, decoding->stream);
    }
}

/* The layers of a step on the device, captured once. */
static void replay(struct decoding *decoding, pkv_step *step)
{
    if (decoding->graph) {
        ck_assert_int_eq(pkv_step_replay(step), PKV_OK);
        return;
    }
    ck_assert_int_eq(pkv_step_replay(step), PKV_ERROR_ARGUMENT); /* of what? */
    cuda_host_begin_capture(decoding->stream);
    for (size_t layer = 0; layer < LAYERS; layer++)
        ck_assert_int_eq(pkv_step_layer(step, layer, &decoding->on_device[layer]), PKV_OK);
    decoding->graph = cuda_host_end_capture(decoding->stream);
}

static void decode(struct decoding *decoding)
{
    for (size_t j = 0; j < BOTH; j++) {
        pkv_step *step;

        ck_assert_int_eq(
            pkv_step_begin(decoding->caches[j], decoding->items[j], GRAPH_SEQUENCES, &step),
            PKV_OK);
        if (j == 0) {
            for (size_t layer = 0; layer < LAYERS; layer++) {
                const pkv_step_io io = io_of(decoding->rows[layer], 0);

                ck_assert_int_eq(pkv_step_layer(step, layer, &io), PKV_OK);
            }
        } else {
            replay(decoding, step);
            cuda_host_launch_graph(decoding->graph, decoding->stream);
        }
        ck_assert_int_eq(pkv_step_end(step), PKV_OK);
    }
}

static void compare_decoding(const struct decoding *decoding)
{
    uint64_t digests[BOTH];

    for (size_t j = 0; j < BOTH; j++)
        ck_assert_int_eq(pkv_cache_digest(decoding->caches[j], &digests[j]), PKV_OK);
    ck_assert_uint_eq(digests[0], digests[1]);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        struct rows *rows = decoding->rows[layer];
        const pkv_step_io io = io_of(rows, 1);
        double most = 0.0, error = 0.0;

        operands_fetch(decoding->operands[layer], &io);
        for (size_t i = 0; i < GRAPH_SEQUENCES * QUERY_HEADS * DIM; i++) {
            most = fmax(most, fabs((double)rows->out[0][i]));
            error = fmax(error, tests_difference(rows->out[0][i], rows->out[1][i]));
        }
        require_msg(error <= 2e-5 * most, "outputs differ by %g of %g", error, most);
    }
}

/* 0: with factors, a prompt before; 1: waiting for nothing, INT4 without a window, so that the page
 * that a token completes becomes factors at once; 2: without factors. */
START_TEST(one_graph_for_all_tokens)
{
    static const pkv_factors forms[] = {PKV_FACTORS_NATIVE, PKV_FACTORS_INT4, PKV_FACTORS_NONE};
    const size_t steps = _i == 0 ? GRAPH_STEPS : 100;
    pkv_config config = make_config(PKV_F32, forms[_i], forms[_i]);
    struct decoding decoding = {.graph = NULL};
    pkv_stats stats = {.struct_size = sizeof stats};
    struct queued queued = {.n = 0};

    config.window_pages = _i == 1 ? 0 : 1;
    config.step_flags = _i == 1 ? PKV_STEP_ASYNC : 0;
    open_decoding(&decoding, &config);
    for (size_t j = 0; j < BOTH && _i == 0; j++)
        ck_assert_int_eq(
            queue_step(decoding.caches[j], decoding.items[j][1].seq, 37, 1, GOOD, &queued), PKV_OK);
    for (size_t i = 0; i < steps; i++) {
        fill_decoding(&decoding);
        decode(&decoding);
        if (i % 99 == 0 || i + 1 == steps)
            compare_decoding(&decoding);
    }
    ck_assert_int_eq(pkv_cache_stats(decoding.caches[1], &stats), PKV_OK);
    ck_assert_uint_eq(stats.pages[PKV_PAGE_FACTORIZED] >= steps / 10, _i != 2);
    close_queued(&queued);
    close_decoding(&decoding);
}
END_TEST

/* What a graph does not serve is told, and so is one that nobody has launched. */
START_TEST(graphs_refused)
{
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    struct decoding decoding = {.graph = NULL};
    pkv_step *step;
    pkv_step_item items[GRAPH_SEQUENCES];

    open_decoding(&decoding, &config);
    fill_decoding(&decoding);
    decode(&decoding);

    /* Not launched, or of more items. */
    for (size_t n = 1; n <= 2; n++) {
        ck_assert_int_eq(pkv_step_begin(decoding.caches[1], decoding.items[1], n, &step), PKV_OK);
        ck_assert_int_eq(pkv_step_replay(step), PKV_OK);
        ck_assert_int_eq(pkv_step_replay(step), PKV_ERROR_ARGUMENT);
        if (n == 1)
            cuda_host_launch_graph(decoding.graph, decoding.stream);
        ck_assert_int_eq(pkv_step_end(step), PKV_ERROR_ARGUMENT);
        ck_assert_ptr_nonnull(
            strstr(pkv_cache_message(decoding.caches[1]), "layers were computed"));
        pkv_step_abort(step);
    }
    compare_decoding(&decoding);

    /* Several tokens of an item. */
    memcpy(items, decoding.items[1], sizeof items);
    items[1].tokens = 2;
    ck_assert_int_eq(pkv_step_begin(decoding.caches[1], items, 2, &step), PKV_OK);
    ck_assert_int_eq(pkv_step_replay(step), PKV_ERROR_ARGUMENT);
    cuda_host_begin_capture(decoding.stream);
    ck_assert_int_eq(pkv_step_layer(step, 0, &decoding.on_device[0]), PKV_ERROR_ARGUMENT);
    cuda_host_close_graph(cuda_host_end_capture(decoding.stream));
    pkv_step_abort(step);

    /* Begin and end while something is captured. */
    cuda_host_begin_capture(decoding.stream);
    ck_assert_int_eq(pkv_step_begin(decoding.caches[1], decoding.items[1], 2, &step),
                     PKV_ERROR_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(pkv_cache_message(decoding.caches[1]), "captured"));
    cuda_host_close_graph(cuda_host_end_capture(decoding.stream));

    /* The CPU has no graphs. */
    ck_assert_int_eq(pkv_step_begin(decoding.caches[0], decoding.items[0], 2, &step), PKV_OK);
    ck_assert_int_eq(pkv_step_replay(step), PKV_ERROR_UNSUPPORTED);
    pkv_step_abort(step);

    fill_decoding(&decoding);
    decode(&decoding);
    compare_decoding(&decoding);
    close_decoding(&decoding);
}
END_TEST

/* A graph of one item, in a step of two, of which the other one's page is to become factors:
 * nothing is read that the graph has no operands for, and nothing written. */
START_TEST(graph_of_fewer_items)
{
    enum { TOKENS = 2 * PAGE - 1 };
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    struct decoding decoding = {.graph = NULL};
    struct queued queued = {.n = 0};
    uint64_t before, after;
    pkv_step *step;

    config.window_pages = 0;
    open_decoding(&decoding, &config);
    ck_assert_int_eq(
        queue_step(decoding.caches[1], decoding.items[1][1].seq, TOKENS, 1, GOOD, &queued), PKV_OK);
    fill_decoding(&decoding);
    ck_assert_int_eq(pkv_step_begin(decoding.caches[1], decoding.items[1], 1, &step), PKV_OK);
    replay(&decoding, step);
    cuda_host_launch_graph(decoding.graph, decoding.stream);
    ck_assert_int_eq(pkv_step_end(step), PKV_OK);
    ck_assert_int_eq(pkv_cache_digest(decoding.caches[1], &before), PKV_OK);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        const pkv_step_io io = io_of(decoding.rows[layer], 0);

        operands_fetch(decoding.operands[layer], &io);
    }

    fill_decoding(&decoding);
    ck_assert_int_eq(pkv_step_begin(decoding.caches[1], decoding.items[1], 2, &step), PKV_OK);
    ck_assert_uint_eq(decoding.caches[1]->step.items[1].n_changes, 1);
    ck_assert_int_eq(decoding.caches[1]->step.items[1].changes[0].to.kind, SLOT_FACTOR);
    replay(&decoding, step);
    cuda_host_launch_graph(decoding.graph, decoding.stream);
    ck_assert_int_eq(pkv_step_end(step), PKV_ERROR_ARGUMENT);
    ck_assert_str_eq(pkv_cache_message(decoding.caches[1]),
                     "step: 0 of 2 layers were computed; a graph of 2 items was to do it");
    pkv_step_abort(step);
    ck_assert_int_eq(pkv_cache_digest(decoding.caches[1], &after), PKV_OK);
    ck_assert_uint_eq(before, after);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        struct rows *rows = decoding.rows[layer];
        const pkv_step_io io = io_of(rows, 1);

        operands_fetch(decoding.operands[layer], &io);
        ck_assert_int_eq(
            memcmp(rows->out[0], rows->out[1], GRAPH_SEQUENCES * QUERY_HEADS * DIM * sizeof(float)),
            0);
    }
    close_queued(&queued);
    close_decoding(&decoding);
}
END_TEST

/* ---- A device that fails ---- */

/* An error that stays ends every cache of the device, and no other. */
START_TEST(broken_device)
{
    enum { FIRST, SECOND, ELSEWHERE, ON_CPU, CACHES };
    pkv_config config = make_config(PKV_BF16, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    struct queued queued = {.n = 0};
    char message[PKV_MESSAGE_BYTES];
    void *streams[CACHES];
    pkv_cache *caches[CACHES];
    pkv_seq *sequences[CACHES];
    pkv_cache *cache;
    uint64_t digest;

    cuda_host_set_devices(2);
    config.step_flags = _i == 1 ? PKV_STEP_ASYNC : 0;
    for (size_t i = 0; i < CACHES; i++) {
        tests_backend = i == ON_CPU ? &backend_cpu : &backend_cuda;
        config.device = i == ELSEWHERE;
        config.stream = streams[i] = cuda_host_open_stream(config.device);
        caches[i] = tests_open_cache(&config);
        sequences[i] = open_seq(caches[i]);
        ck_assert_int_eq(queue_step(caches[i], sequences[i], 40, 1, GOOD, &queued), PKV_OK);
        digest_of(sequences[i]);
        ck_assert_int_eq(cuda_host_device(), 0);
    }

    /* Some kernel of the next step. */
    cuda_host_break(0, 3);
    if (_i == 0) {
        ck_assert_int_eq(queue_step(caches[FIRST], sequences[FIRST], 9, 2, GOOD, &queued),
                         PKV_ERROR_DEVICE);
    } else {
        ck_assert_int_eq(queue_step(caches[FIRST], sequences[FIRST], 9, 2, GOOD, &queued), PKV_OK);
        ck_assert_int_eq(pkv_seq_digest(sequences[FIRST], &digest), PKV_ERROR_DEVICE);
    }
    ck_assert_ptr_nonnull(strstr(pkv_cache_message(caches[FIRST]), "CUDA device 0: "));
    ck_assert_ptr_nonnull(strstr(pkv_cache_message(caches[FIRST]), "illegal memory access"));
    if (_i == 1)
        ck_assert_int_eq(pkv_seq_truncate(sequences[FIRST], 40), PKV_OK);
    for (size_t i = FIRST; i <= SECOND; i++) {
        pkv_step_item item = {sequences[i], 1};
        pkv_step *step;
        float k[PAGE * DIM];

        ck_assert_uint_eq(pkv_seq_tokens(sequences[i]), 40);
        ck_assert_int_eq(pkv_step_begin(caches[i], &item, 1, &step), PKV_ERROR_DEVICE);
        ck_assert_int_eq(pkv_seq_digest(sequences[i], &digest), PKV_ERROR_DEVICE);
        ck_assert_int_eq(pkv_seq_read_page(sequences[i], 0, 0, 0, k, NULL), PKV_ERROR_DEVICE);
        ck_assert_uint_eq(pkv_seq_tokens(sequences[i]), 40);
    }
    config.device = 0;
    config.stream = NULL;
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message), PKV_ERROR_DEVICE);
    ck_assert_ptr_nonnull(strstr(message, "illegal memory access"));

    cuda_host_use_device(1);
    for (size_t i = ELSEWHERE; i < CACHES; i++)
        require_msg(queue_step(caches[i], sequences[i], 9, 2, GOOD, &queued) == PKV_OK, "%s",
                    pkv_cache_message(caches[i]));
    ck_assert_uint_eq(digest_of(sequences[ELSEWHERE]), digest_of(sequences[ON_CPU]));
    for (size_t i = 0; i < CACHES; i++) {
        pkv_cache_close(caches[i]);
        cuda_host_close_stream(streams[i]);
    }
    close_queued(&queued);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}
END_TEST

/* ---- Memory ---- */

enum { MiB = 1 << 20 };

/* Stores the next rows of sequences, of the only layer, the same whatever the backend. */
static void store_rows(pkv_cache *cache, const pkv_step_item *items, size_t n, const float *rows,
                       struct queued *queued)
{
    const struct geometry *geometry = &cache->geometry;
    const pkv_step_io io = {
        .struct_size = sizeof io, .k = {rows, PKV_F32, 0, 0}, .v = {rows + 1, PKV_F32, 0, 0}};
    pkv_step_io on_device = io;
    pkv_step *step;

    require_msg(pkv_step_begin(cache, items, n, &step) == PKV_OK, "%s", pkv_cache_message(cache));
    if (cache->ops == &backend_cuda)
        queued->operands[queued->n++] =
            operands_upload(&io, step->plan.rows, geometry->query_heads, geometry->kv_heads,
                            geometry->head_dim, &on_device);
    ck_assert_int_eq(pkv_step_layer(step, 0, &on_device), PKV_OK);
    require_msg(pkv_step_end(step) == PKV_OK, "%s", pkv_cache_message(cache));
}

/* What a cache of the shape llama-3.1-8b holds of the device beside its pools, however many layers
 * it has: while 16 sequences decode, all of which convert a page at once; for a prompt of 32K. */
START_TEST(scratch)
{
    enum { SEQUENCES = 16, HEADS = 8, D = 128, PROMPT = 32768, TOKENS = 96 };
    pkv_config config = make_config(PKV_BF16, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    float *rows = tests_allocate(SEQUENCES * HEADS * D + 1, sizeof *rows);
    pkv_stats stats = {.struct_size = sizeof stats};
    pkv_step_item items[SEQUENCES], prompt;
    struct queued queued = {.n = 0};
    uint64_t before, after;
    size_t idle;
    pkv_cache *cache;
    pkv_step *step;

    config.layers = 1;
    config.kv_heads = HEADS;
    config.query_heads = 4 * HEADS;
    config.head_dim = D;
    config.page_tokens = 32;
    config.rank_k = 16;
    config.rank_v = 14;
    config.max_sequences = SEQUENCES;
    config.max_tokens = PROMPT + SEQUENCES * (TOKENS + 1);
    config.max_step_tokens = PROMPT;
    tests_backend = &backend_cuda;
    cache = tests_open_cache(&config);
    for (size_t i = 0; i < SEQUENCES; i++)
        items[i] = (pkv_step_item){open_seq(cache), 1};
    fill(rows, SEQUENCES * HEADS * D + 1);
    for (size_t i = 0; i < TOKENS; i++) {
        store_rows(cache, items, SEQUENCES, rows, &queued);
        close_queued(&queued);
    }
    ck_assert_int_eq(pkv_cache_stats(cache, &stats), PKV_OK);
    ck_assert_uint_eq(stats.pages[PKV_PAGE_FACTORIZED], SEQUENCES);
    idle = cuda_host_memory() - stats.reserved_bytes;
    printf("decoding: %zu bytes of the device, %zu counted\n", idle, stats.transient_peak_bytes);
    ck_assert_uint_le(idle, 8 * MiB + MiB / 4); /* that for plans */
    ck_assert_uint_ge(stats.transient_peak_bytes, idle);
    ck_assert_uint_le(stats.transient_peak_bytes, 8 * MiB + MiB); /* these in the host's memory */

    prompt = (pkv_step_item){items[0].seq, PROMPT};
    ck_assert_int_eq(pkv_step_begin(cache, &prompt, 1, &step), PKV_OK);
    printf("a prompt: %zu bytes\n", cuda_host_memory() - stats.reserved_bytes);
    ck_assert_uint_gt(cuda_host_memory() - stats.reserved_bytes, idle + 64 * MiB);
    ck_assert_uint_le(cuda_host_memory() - stats.reserved_bytes, 192 * MiB);
    pkv_step_abort(step);
    /* It stays for the next piece, until there is none. */
    ck_assert_uint_gt(cuda_host_memory() - stats.reserved_bytes, idle + 64 * MiB);
    ck_assert_int_eq(pkv_step_begin(cache, &prompt, 1, &step), PKV_OK);
    ck_assert_uint_le(cuda_host_memory() - stats.reserved_bytes, 192 * MiB);
    pkv_step_abort(step);
    store_rows(cache, items, SEQUENCES, rows, &queued);
    close_queued(&queued);
    ck_assert_uint_eq(cuda_host_memory() - stats.reserved_bytes, idle);

    /* None of it is there. */
    ck_assert_int_eq(pkv_cache_digest(cache, &before), PKV_OK);
    cuda_host_set_memory(cuda_host_memory() + 64 * MiB);
    ck_assert_int_eq(pkv_step_begin(cache, &prompt, 1, &step), PKV_ERROR_MEMORY);
    ck_assert_ptr_nonnull(
        strstr(pkv_cache_message(cache), "out of memory: scratch to factorize in: "));
    ck_assert_uint_eq(cuda_host_memory() - stats.reserved_bytes, idle);
    ck_assert_int_eq(pkv_cache_digest(cache, &after), PKV_OK);
    ck_assert_uint_eq(before, after);
    cuda_host_set_memory((size_t)1 << 30);
    store_rows(cache, items, SEQUENCES, rows, &queued);
    pkv_cache_close(cache);
    close_queued(&queued);
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(rows);
}
END_TEST

/* More problems in a step than there is scratch for: of one token of many sequences; then twice of
 * a prompt, whose scratch is wanted again while the first is under way. */
START_TEST(many_problems)
{
    enum { SEQUENCES = 40, HEADS = 8, D = 64, PROMPT = 40 * 32, FIRST = 31 };
    pkv_config config = make_config(PKV_BF16, PKV_FACTORS_NATIVE, PKV_FACTORS_INT4);
    float *rows = tests_allocate(PROMPT * HEADS * D + 1, sizeof *rows);
    struct queued queued = {.n = 0};
    uint64_t digests[BOTH];

    config.layers = 1;
    config.kv_heads = config.query_heads = HEADS;
    config.head_dim = D;
    config.page_tokens = 32;
    config.sink_pages = config.window_pages = 0;
    config.max_sequences = SEQUENCES;
    config.max_tokens = SEQUENCES * 64 + 2 * PROMPT;
    config.max_step_tokens = PROMPT;
    config.step_flags = PKV_STEP_ASYNC;
    config.stream = cuda_host_open_stream(0);
    tests_seed(1);
    fill(rows, PROMPT * HEADS * D + 1);
    for (size_t j = 0; j < BOTH; j++) {
        pkv_step_item items[SEQUENCES];
        pkv_cache *cache;

        cache = open_on(j, &config);
        for (size_t i = 0; i < SEQUENCES; i++)
            items[i] = (pkv_step_item){open_seq(cache), FIRST};
        store_rows(cache, items, SEQUENCES, rows, &queued);
        for (size_t i = 0; i < SEQUENCES; i++)
            items[i].tokens = 1;
        store_rows(cache, items, SEQUENCES, rows, &queued);
        items[0].tokens = PROMPT;
        for (size_t i = 0; i < 2; i++)
            store_rows(cache, items, 1, rows, &queued);
        ck_assert_uint_eq(cache->n_submitted, j == 0 ? 0 : 4);
        ck_assert_int_eq(pkv_cache_digest(cache, &digests[j]), PKV_OK);
        pkv_cache_close(cache);
    }
    ck_assert_uint_eq(digests[0], digests[1]);
    close_queued(&queued);
    cuda_host_close_stream(config.stream);
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(rows);
}
END_TEST

/* More forks than the plan has room for, and no memory for a larger one. */
START_TEST(no_memory_for_the_plan)
{
    enum { FORKS = 10 };
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    struct queued queued = {.n = 0};
    pkv_step_item items[FORKS];
    uint64_t before, after;
    size_t free_slots;
    pkv_cache *cache;
    pkv_step *step;

    tests_backend = &backend_cuda;
    config.max_sequences = FORKS;
    config.max_tokens = 400;
    config.stream = cuda_host_open_stream(0);
    cache = tests_open_cache(&config);
    items[0] = (pkv_step_item){open_seq(cache), 1};
    for (size_t i = 0; i < 4; i++)
        ck_assert_int_eq(queue_step(cache, items[0].seq, 90, i, GOOD, &queued), PKV_OK);
    for (size_t i = 1; i < FORKS; i++) {
        items[i].tokens = 1;
        ck_assert_int_eq(pkv_seq_fork(items[0].seq, &items[i].seq), PKV_OK);
    }
    ck_assert_int_eq(pkv_cache_digest(cache, &before), PKV_OK);
    free_slots = cache->dense.n_free;
    cuda_host_set_memory(cuda_host_memory());
    ck_assert_int_eq(pkv_step_begin(cache, items, FORKS, &step), PKV_ERROR_MEMORY);
    ck_assert_ptr_nonnull(strstr(pkv_cache_message(cache), "out of memory: a step's plan: "));
    ck_assert_uint_eq(cache->dense.n_free, free_slots);
    ck_assert_int_eq(pkv_cache_digest(cache, &after), PKV_OK);
    ck_assert_uint_eq(before, after);
    cuda_host_set_memory((size_t)1 << 30);
    ck_assert_int_eq(pkv_step_begin(cache, items, FORKS, &step), PKV_OK);
    pkv_step_abort(step);
    ck_assert_int_eq(queue_step(cache, items[3].seq, 1, 1, GOOD, &queued), PKV_OK);
    pkv_cache_close(cache);
    close_queued(&queued);
    cuda_host_close_stream(config.stream);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}
END_TEST

START_TEST(pool_larger_than_the_card)
{
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;

    config.max_tokens = (size_t)1 << 24;
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message), PKV_ERROR_MEMORY);
    ck_assert_ptr_nonnull(strstr(message, "CUDA device 0: out of memory: "));
    ck_assert_ptr_nonnull(strstr(message, " of 1073741824 are free"));
    ck_assert_ptr_null(cache);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}
END_TEST

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

/* With "auto" the CPU serves where an answer is PKV_ERROR_UNSUPPORTED. */
START_TEST(refused)
{
    enum { ILLEGAL_ADDRESS = 700 }; /* of cudaError_t, as are these */
    static const int not_built[] = {98, 209, 221, 222, 223};
    static const int absent[] = {3, 34, 35, 100, 802, 803, 804, 999};
    pkv_config config = make_config(PKV_F32, PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE);
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;

    config.device = 1;
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message), PKV_ERROR_ARGUMENT);
    ck_assert_str_eq(message, "device: 1 is not one of the 1 CUDA devices");
    cuda_host_set_devices(2);
    config.device = 0;
    config.stream = cuda_host_open_stream(1);
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message), PKV_ERROR_ARGUMENT);
    ck_assert_str_eq(message, "stream: it is of CUDA device 1, the cache of device 0");
    cuda_host_close_stream(config.stream);
    config.stream = NULL;
    config.isa = "generic";
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message),
                     PKV_ERROR_UNSUPPORTED);
    ck_assert_int_eq(strncmp(message, "isa: ", 5), 0);
    config.isa = NULL;
    config.solver = PKV_SOLVER_LAPACK;
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message),
                     PKV_ERROR_UNSUPPORTED);
    ck_assert_int_eq(strncmp(message, "solver: ", 8), 0);
    config.solver = PKV_SOLVER_BATCHED;
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        cuda_host_set_errors(absent[i], 0);
        ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message),
                         PKV_ERROR_UNSUPPORTED);
        ck_assert_int_eq(strncmp(message, "backend: no CUDA device: ", 25), 0);
    }
    cuda_host_set_errors(ILLEGAL_ADDRESS, 0);
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message), PKV_ERROR_DEVICE);
    for (size_t i = 0; i < sizeof not_built / sizeof *not_built; i++) {
        cuda_host_set_errors(0, not_built[i]);
        ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message),
                         PKV_ERROR_UNSUPPORTED);
        ck_assert_ptr_nonnull(
            strstr(message, "device 0 is of sm_90, for which the module was not built: "));
    }
    cuda_host_set_errors(0, ILLEGAL_ADDRESS);
    ck_assert_int_eq(cache_open_with(&backend_cuda, &config, &cache, message), PKV_ERROR_DEVICE);
    ck_assert_uint_eq(cuda_host_memory(), 0);
}
END_TEST

static TCase *add_case(Suite *suite, const char *name)
{
    TCase *test = tcase_create(name);

    suite_add_tcase(suite, test);
    return test;
}

int main(void)
{
    Suite *suite = suite_create("cuda");
    TCase *steps = add_case(suite, "steps");
    TCase *walk = add_case(suite, "walk");
    TCase *tensor = add_case(suite, "tensor");
    TCase *graphs = add_case(suite, "graphs");
    TCase *memory = add_case(suite, "memory");
    TCase *errors = add_case(suite, "errors");

    tcase_add_test(steps, several_warps);
    tcase_add_test(steps, faults_at_the_end);
    tcase_add_test(steps, faults_come_later);
    tcase_add_test(steps, settled_while_capturing);
    tcase_add_test(steps, many_steps_under_way);
    tcase_add_loop_test(walk, same_bits_on_a_walk, 0, PLAIN_WALKS);
    tcase_add_loop_test(tensor, same_bits_on_a_walk, PLAIN_WALKS, WALKS);
    tcase_add_loop_test(graphs, one_graph_for_all_tokens, 0, 3);
    tcase_add_test(graphs, graphs_refused);
    tcase_add_test(graphs, graph_of_fewer_items);
    tcase_add_loop_test(errors, broken_device, 0, 2);
    tcase_add_test(memory, scratch);
    tcase_add_test(memory, many_problems);
    tcase_add_test(errors, no_memory_for_the_plan);
    tcase_add_test(errors, pool_larger_than_the_card);
    tcase_add_test(errors, device_memory_runs_out);
    tcase_add_test(errors, refused);
    return tests_run(suite);
}
