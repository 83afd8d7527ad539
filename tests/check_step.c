/* SPDX-License-Identifier: MIT */
/* Steps, forks and truncation through the public interface, on every backend. */
#include "config.h"

#include "fake_backend.h"
#include "numeric.h"

#include "tests.h" /* after message.h: see there */

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const struct backend_ops *const backends[] = {
    &backend_fake,
    &backend_cpu,
#ifdef HAVE_CUDA_HOST
    &backend_cuda,
#endif
};

#define BACKENDS (int)(sizeof backends / sizeof *backends)
#define FAKE     0
#define CPU      1

enum { LAYERS = 2, QUERY_HEADS = 4, KV_HEADS = 2, DIM = 16, PAGE = 8, MAX_TOKENS = 400 };

/* A cache and what its sequences are fed with: token t of stream s is always the same. */
struct world {
    int backend;
    pkv_config config;
    pkv_cache *cache;
    struct counting_allocator counting;
};

static struct world *world_new(int backend)
{
    struct world *world = calloc(1, sizeof *world);
    pkv_config *config = &world->config;

    world->backend = backend;
    pkv_config_init(config, sizeof *config);
    config->layers = LAYERS;
    config->query_heads = QUERY_HEADS;
    config->kv_heads = KV_HEADS;
    config->head_dim = DIM;
    config->page_tokens = PAGE;
    config->rank_k = 5;
    config->rank_v = 3;
    config->dtype = PKV_F32;
    config->max_sequences = 4;
    config->max_tokens = MAX_TOKENS;
    config->threads = 1;
    config->allocator = counting_allocator(&world->counting);
    return world;
}

static void world_open(struct world *world)
{
    char message[PKV_MESSAGE_BYTES];

    ck_assert_msg(
        cache_open_with(backends[world->backend], &world->config, &world->cache, message) == PKV_OK,
        "%s: %s", backends[world->backend]->name, message);
}

static struct world *world_opened(int backend)
{
    struct world *world = world_new(backend);

    world_open(world);
    return world;
}

static void world_close(struct world *world)
{
    if (world->backend == FAKE)
        ck_assert_str_eq(world->cache->backend->violation, "");
    pkv_cache_close(world->cache);
    ck_assert_uint_eq(world->counting.live, 0);
    free(world);
}

static pkv_seq *open_seq(struct world *world)
{
    pkv_seq *seq;

    ck_assert_int_eq(pkv_seq_open(world->cache, &seq), PKV_OK);
    return seq;
}

static uint32_t hash(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* Element i of a row; exact in f16 and bf16 but for the fake backend's numbers. */
static float row_element(const struct world *world, size_t stream, size_t token, size_t layer,
                         size_t head, bool value, size_t i)
{
    uint32_t key = (uint32_t)((((stream * 1000 + token) * 8 + layer) * 8 + head) * 2 + value);

    if (world->backend == FAKE)
        return fake_number(stream * 1000 + token, layer, head, value);
    return (float)((int)(hash(hash(key) + (uint32_t)i) % 255) - 127) / 64;
}

/* One sequence's part of a step. */
struct part {
    pkv_seq *seq;
    size_t stream;
    size_t tokens;
};

struct rows {
    size_t n;
    float q[MAX_TOKENS * QUERY_HEADS * DIM];
    float k[MAX_TOKENS * KV_HEADS * DIM];
    float v[MAX_TOKENS * KV_HEADS * DIM];
    float out[MAX_TOKENS * QUERY_HEADS * DIM];
    float lse[MAX_TOKENS * QUERY_HEADS];
};

/* Packed rows of one layer. */
static void fill_rows(const struct world *world, const struct part *parts, size_t n_parts,
                      size_t layer, struct rows *rows)
{
    rows->n = 0;
    for (size_t p = 0; p < n_parts; p++) {
        for (size_t t = 0; t < parts[p].tokens; t++, rows->n++) {
            size_t token = pkv_seq_tokens(parts[p].seq) + t;

            for (size_t i = 0; i < KV_HEADS * DIM; i++) {
                rows->k[rows->n * KV_HEADS * DIM + i] =
                    row_element(world, parts[p].stream, token, layer, i / DIM, false, i % DIM);
                rows->v[rows->n * KV_HEADS * DIM + i] =
                    row_element(world, parts[p].stream, token, layer, i / DIM, true, i % DIM);
            }
            for (size_t i = 0; i < QUERY_HEADS * DIM; i++)
                rows->q[rows->n * QUERY_HEADS * DIM + i] =
                    (float)((int)(hash((uint32_t)(token * 1000 + i + layer)) % 255) - 127) / 64;
        }
    }
}

static pkv_step_io packed_io(struct rows *rows)
{
    return (pkv_step_io){.struct_size = sizeof(pkv_step_io),
                         .q = {.data = rows->q},
                         .k = {.data = rows->k},
                         .v = {.data = rows->v},
                         .out = {.data = rows->out},
                         .lse = rows->lse};
}

static pkv_status begin(struct world *world, const struct part *parts, size_t n_parts,
                        pkv_step **step)
{
    pkv_step_item items[4];

    for (size_t p = 0; p < n_parts; p++)
        items[p] = (pkv_step_item){parts[p].seq, parts[p].tokens};
    return pkv_step_begin(world->cache, items, n_parts, step);
}

/* One step; after a failure it is aborted. `rows` is scratch, and holds the last layer's outputs.
 */
static pkv_status try_step(struct world *world, const struct part *parts, size_t n_parts,
                           struct rows *rows)
{
    pkv_step *step;
    pkv_status status = begin(world, parts, n_parts, &step);

    for (size_t layer = 0; layer < world->config.layers && status == PKV_OK; layer++) {
        pkv_step_io io = packed_io(rows);

        fill_rows(world, parts, n_parts, layer, rows);
        status = tests_step_layer(step, layer, &io);
    }
    if (status == PKV_OK)
        status = pkv_step_end(step);
    if (status != PKV_OK)
        pkv_step_abort(step);
    return status;
}

static void feed(struct world *world, pkv_seq *seq, size_t stream, size_t tokens)
{
    struct rows *rows = malloc(sizeof *rows);
    struct part part = {seq, stream, tokens};

    ck_assert_int_eq(try_step(world, &part, 1, rows), PKV_OK);
    free(rows);
}

static uint64_t digest_of(pkv_seq *seq)
{
    uint64_t digest;

    ck_assert_int_eq(pkv_seq_digest(seq, &digest), PKV_OK);
    return digest;
}

/* The digest of a sequence fed in one step and alone. */
static uint64_t plain_digest(const struct world *world, size_t stream, size_t tokens)
{
    struct world *plain = world_new(world->backend);
    uint64_t digest;

    plain->config.dtype = world->config.dtype;
    plain->config.layers = world->config.layers;
    world_open(plain);

    pkv_seq *seq = open_seq(plain);

    feed(plain, seq, stream, tokens);
    digest = digest_of(seq);
    world_close(plain);
    return digest;
}

/* Everything that a failure must leave alone. */
struct snapshot {
    pkv_stats stats;
    uint64_t digest;
    uint32_t dense_free;
    uint32_t factor_free;
};

static struct snapshot take_snapshot(struct world *world)
{
    struct snapshot snapshot = {.stats = {.struct_size = sizeof snapshot.stats}};

    ck_assert_int_eq(pkv_cache_stats(world->cache, &snapshot.stats), PKV_OK);
    ck_assert_int_eq(pkv_cache_digest(world->cache, &snapshot.digest), PKV_OK);
    snapshot.dense_free = world->cache->dense.n_free;
    snapshot.factor_free = world->cache->factor.n_free;
    return snapshot;
}

static void check_unchanged(struct world *world, const struct snapshot *before)
{
    struct snapshot now = take_snapshot(world);

    ck_assert_uint_eq(now.digest, before->digest);
    ck_assert_uint_eq(now.dense_free, before->dense_free);
    ck_assert_uint_eq(now.factor_free, before->factor_free);
    ck_assert_uint_eq(now.stats.sequences, before->stats.sequences);
    ck_assert_uint_eq(now.stats.tokens, before->stats.tokens);
    ck_assert_mem_eq(now.stats.pages, before->stats.pages, sizeof now.stats.pages);
    ck_assert_mem_eq(now.stats.bytes, before->stats.bytes, sizeof now.stats.bytes);
    ck_assert_uint_eq(now.stats.payload_bytes, before->stats.payload_bytes);
    ck_assert_uint_eq(now.stats.raw_bytes, before->stats.raw_bytes);
    ck_assert_uint_eq(now.stats.reserved_bytes, before->stats.reserved_bytes);
    ck_assert_uint_eq(now.stats.transient_peak_bytes, before->stats.transient_peak_bytes);
    ck_assert_uint_eq(now.stats.factorized_pages, before->stats.factorized_pages);
    ck_assert(now.stats.factorize_seconds == before->stats.factorize_seconds);
}

static void check_message(const struct world *world, const char *part)
{
    ck_assert_msg(strstr(pkv_cache_message(world->cache), part) != NULL, "\"%s\" in \"%s\"", part,
                  pkv_cache_message(world->cache));
}

/* ---- Order ---- */

START_TEST(layers_in_order)
{
    struct world *world = world_opened(_i);
    struct rows *rows = malloc(sizeof *rows);
    pkv_seq *seq = open_seq(world);
    struct part part = {seq, 0, 3};
    pkv_step_io io = packed_io(rows);
    pkv_step *step, *stale;

    feed(world, seq, 0, 21);

    struct snapshot before = take_snapshot(world);

    fill_rows(world, &part, 1, 0, rows);
    for (size_t wrong = 0; wrong < 3; wrong++) {
        ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
        if (wrong == 0) { /* the second layer first */
            ck_assert_int_eq(tests_step_layer(step, 1, &io), PKV_ERROR_ARGUMENT);
            check_message(world, "layer: 1");
        } else {
            ck_assert_int_eq(tests_step_layer(step, 0, &io), PKV_OK);
            if (wrong == 2) { /* one too many */
                ck_assert_int_eq(tests_step_layer(step, 1, &io), PKV_OK);
                ck_assert_int_eq(tests_step_layer(step, 2, &io), PKV_ERROR_ARGUMENT);
            } else { /* the same again */
                ck_assert_int_eq(tests_step_layer(step, 0, &io), PKV_ERROR_ARGUMENT);
            }
        }
        /* It has failed: nothing but abort. */
        ck_assert_int_eq(tests_step_layer(step, wrong, &io), PKV_ERROR_ARGUMENT);
        check_message(world, "abort");
        ck_assert_int_eq(pkv_step_end(step), PKV_ERROR_ARGUMENT);
        check_message(world, "abort");
        pkv_step_abort(step);
        check_unchanged(world, &before);
    }

    /* A missing layer is no failure of the step. */
    ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
    ck_assert_int_eq(pkv_step_end(step), PKV_ERROR_ARGUMENT);
    check_message(world, "layer 0 of 2 is missing");
    for (size_t layer = 0; layer < LAYERS; layer++) {
        fill_rows(world, &part, 1, layer, rows);
        ck_assert_int_eq(tests_step_layer(step, layer, &io), PKV_OK);
    }
    ck_assert_int_eq(pkv_step_end(step), PKV_OK);
    ck_assert_uint_eq(digest_of(seq), plain_digest(world, 0, 24));

    stale = step;
    ck_assert_int_eq(tests_step_layer(stale, 0, &io), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_step_end(stale), PKV_ERROR_ARGUMENT);
    pkv_step_abort(stale);
    pkv_step_abort(NULL);
    ck_assert_uint_eq(digest_of(seq), plain_digest(world, 0, 24));
    free(rows);
    world_close(world);
}
END_TEST

START_TEST(busy)
{
    struct world *world = world_opened(_i);
    pkv_seq *seq = open_seq(world), *other = open_seq(world), *fork;
    struct part part = {seq, 0, 3};
    pkv_step *step, *second;

    feed(world, seq, 0, 21);
    feed(world, other, 1, 50);

    struct snapshot before = take_snapshot(world);

    ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
    ck_assert_int_eq(begin(world, &part, 1, &second), PKV_ERROR_BUSY);
    ck_assert_ptr_null(second);
    check_message(world, "step");
    ck_assert_int_eq(pkv_seq_fork(seq, &fork), PKV_ERROR_BUSY);
    ck_assert_ptr_null(fork);
    ck_assert_int_eq(pkv_seq_truncate(seq, 1), PKV_ERROR_BUSY);
    ck_assert_int_eq(pkv_seq_truncate(seq, 21), PKV_ERROR_BUSY);
    ck_assert_int_eq(pkv_seq_close(seq), PKV_ERROR_BUSY);
    check_message(world, "sequence");
    check_unchanged(world,
                    &(struct snapshot){before.stats, before.digest, world->cache->dense.n_free,
                                       world->cache->factor.n_free});

    /* The others go on as they like. */
    ck_assert_int_eq(pkv_seq_fork(other, &fork), PKV_OK);
    ck_assert_int_eq(pkv_seq_truncate(fork, 20), PKV_OK);
    ck_assert_int_eq(pkv_seq_close(fork), PKV_OK);
    pkv_step_abort(step);
    check_unchanged(world, &before);
    ck_assert_int_eq(pkv_seq_close(NULL), PKV_OK);
    world_close(world);
}
END_TEST

/* A cache is closed with a step open. */
START_TEST(close_with_open_step)
{
    struct world *world = world_opened(_i);
    struct part part = {open_seq(world), 0, 100};
    pkv_step *step;

    ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
    world_close(world);
}
END_TEST

START_TEST(bad_items)
{
    struct world *world = world_new(_i), *foreign = world_opened(_i);
    pkv_step *step;

    world->config.max_step_tokens = 30;
    world_open(world);

    pkv_seq *a = open_seq(world), *b = open_seq(world), *stranger = open_seq(foreign);
    const struct {
        pkv_step_item items[3];
        size_t n;
        const char *message;
    } cases[] = {
        {{{a, 1}}, 0, "items"},
        {{{a, 1}, {b, 0}}, 2, "items[1].tokens"},
        {{{a, 1}, {b, 1}, {a, 1}}, 3, "items[2].seq"},
        {{{a, 1}, {NULL, 1}}, 2, "items[1].seq"},
        {{{a, 1}, {stranger, 1}}, 2, "items[1].seq"},
        {{{a, 31}}, 1, "max_step_tokens"},
        {{{a, 15}, {b, 16}}, 2, "max_step_tokens"},
        {{{a, SIZE_MAX}, {b, 2}}, 2, "max_step_tokens"},
    };

    feed(world, a, 0, 11);

    struct snapshot before = take_snapshot(world);

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        step = (pkv_step *)world;
        ck_assert_int_eq(pkv_step_begin(world->cache, cases[i].items, cases[i].n, &step),
                         PKV_ERROR_ARGUMENT);
        ck_assert_ptr_null(step);
        check_message(world, cases[i].message);
        check_unchanged(world, &before);
    }
    ck_assert_int_eq(pkv_step_begin(world->cache, NULL, 1, &step), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_step_begin(world->cache, cases[0].items, 1, NULL), PKV_ERROR_ARGUMENT);

    /* None of them left a mark. */
    ck_assert_int_eq(pkv_step_begin(world->cache, (pkv_step_item[]){{a, 15}, {b, 15}}, 2, &step),
                     PKV_OK);
    pkv_step_abort(step);
    world_close(world);
    world_close(foreign);
}
END_TEST

START_TEST(capacity)
{
    struct world *world = world_new(_i);
    pkv_step *step;
    pkv_seq *a, *b, *fork;

    world->config.max_tokens = 100;
    world_open(world);
    a = open_seq(world);
    b = open_seq(world);
    feed(world, a, 0, 60);

    struct snapshot before = take_snapshot(world);

    ck_assert_int_eq(begin(world, &(struct part){a, 0, 41}, 1, &step), PKV_ERROR_CAPACITY);
    check_message(world, "max_tokens");
    ck_assert_int_eq(begin(world, &(struct part){b, 1, 41}, 1, &step), PKV_ERROR_CAPACITY);
    check_message(world, "max_tokens");
    check_unchanged(world, &before);
    feed(world, b, 1, 40);

    /* What a fork shares takes no room; what it adds does. */
    ck_assert_int_eq(pkv_seq_truncate(b, 10), PKV_OK);
    ck_assert_int_eq(pkv_seq_fork(a, &fork), PKV_OK);
    feed(world, fork, 0, 10);
    before = take_snapshot(world);
    ck_assert_int_eq(begin(world, &(struct part){fork, 0, 30}, 1, &step), PKV_ERROR_CAPACITY);
    check_message(world, "max_tokens");
    check_unchanged(world, &before);
    ck_assert_uint_eq(digest_of(fork), plain_digest(world, 0, 70));

    ck_assert_int_eq(pkv_seq_open(world->cache, &fork), PKV_OK);
    ck_assert_int_eq(pkv_seq_open(world->cache, &fork), PKV_ERROR_CAPACITY);
    ck_assert_ptr_null(fork);
    check_message(world, "max_sequences");
    ck_assert_int_eq(pkv_seq_fork(a, &fork), PKV_ERROR_CAPACITY);
    ck_assert_ptr_null(fork);
    world_close(world);
}
END_TEST

/* Beyond the promise a step may fail for want of a slot, and then names them. */
START_TEST(no_free_slot)
{
    struct world *world = world_opened(_i);
    pkv_seq *seq = open_seq(world);
    uint32_t slot;
    pkv_step *step;

    feed(world, seq, 0, 48);
    while (world->cache->dense.n_free > 0)
        slots_acquire(&world->cache->dense, &slot);

    struct snapshot before = take_snapshot(world);

    ck_assert_int_eq(begin(world, &(struct part){seq, 0, 1}, 1, &step), PKV_ERROR_CAPACITY);
    check_message(world, "slots");
    ck_assert_int_eq(pkv_seq_truncate(seq, 20), PKV_ERROR_CAPACITY);
    check_message(world, "page 2");
    check_unchanged(world, &before);
    ck_assert_int_eq(pkv_seq_truncate(seq, 24), PKV_OK);
    slots_release(&world->cache->dense, slot);
    feed(world, seq, 0, 1);
    world_close(world);
}
END_TEST

/* All sequences copy, complete and begin a page at once, and one is cut beside them. */
START_TEST(tightest_step)
{
    for (size_t choice = 0; choice < 4 * 3 * 3; choice++) {
        struct world *world = world_new(FAKE);
        size_t n = 1 + choice % 4;
        struct part parts[4];
        struct rows *rows = malloc(sizeof *rows);

        world->config.sink_pages = choice / 4 % 3;
        world->config.window_pages = choice / 12;
        world->config.max_sequences = n;
        world->config.max_step_tokens = 2 * n;
        world_open(world);
        for (size_t i = 0; i < n; i++) {
            parts[i] = (struct part){open_seq(world), i, 1};
            while (pkv_seq_tokens(parts[i].seq) < 6 * PAGE - 1)
                ck_assert_int_eq(try_step(world, &parts[i], 1, rows), PKV_OK);
            parts[i].tokens = 2;
        }
        ck_assert_int_eq(try_step(world, parts, n, rows), PKV_OK);
        for (size_t i = 0; i < n; i++)
            ck_assert_int_eq(pkv_seq_truncate(parts[i].seq, 3 * PAGE + 1), PKV_OK);
        free(rows);
        world_close(world);
    }
}
END_TEST

/* ---- Operands ---- */

START_TEST(bad_operands)
{
    struct world *world = world_opened(_i);
    struct rows *rows = malloc(sizeof *rows);
    pkv_seq *seq = open_seq(world);
    struct part part = {seq, 0, 3};
    struct snapshot before;
    pkv_step *step;

    feed(world, seq, 0, 21);
    fill_rows(world, &part, 1, 0, rows);
    before = take_snapshot(world);

    struct {
        pkv_step_io io;
        const char *message;
    } cases[26];
    size_t n = 0;

#define CASE(assignment, text)                                                                     \
    do {                                                                                           \
        pkv_step_io io = packed_io(rows);                                                          \
        assignment;                                                                                \
        cases[n].io = io;                                                                          \
        cases[n++].message = text;                                                                 \
    } while (0)
    CASE(io.struct_size--, "struct_size:");
    CASE(io.k.data = NULL, "k.data:");
    CASE(io.v.data = NULL, "v.data:");
    CASE(io.q.data = NULL, "q.data:");
    CASE(io.out.data = NULL, "lse:");
    CASE(io.k.dtype = (pkv_dtype)3, "k.dtype:");
    CASE(io.v.dtype = (pkv_dtype)-1, "v.dtype:");
    CASE(io.q.dtype = (pkv_dtype)3, "q.dtype:");
    CASE(io.out.dtype = (pkv_dtype)3, "out.dtype:");
    CASE(io.k.data = (const char *)io.k.data + 1, "k.data:");
    CASE(io.v.data = (const char *)io.v.data + 2, "v.data:");
    CASE((io.q.dtype = PKV_F16, io.q.data = (const char *)io.q.data + 1), "q.data:");
    CASE(io.out.data = (char *)io.out.data + 3, "out.data:");
    CASE(io.lse = (float *)(void *)((char *)io.lse + 2), "lse:");
    CASE(io.k.head_stride = DIM - 1, "k: strides");
    CASE(io.v.token_stride = DIM - 1, "v: strides");
    CASE(io.q.head_stride = 1, "q: strides");
    CASE(io.out.token_stride = 1, "out: strides");
    CASE(io.k.head_stride = SIZE_MAX, "k: strides");
    CASE(io.v.token_stride = SIZE_MAX / 2, "v: strides");
    CASE(io.q.token_stride = SIZE_MAX / 4, "q: strides");
    CASE(io.out.head_stride = SIZE_MAX / 4, "out: strides");
    CASE(io.k.head_stride = DIM + 1, "k: rows overlap");
    CASE(io.k.token_stride = 2 * DIM - 1, "k: rows overlap");
    CASE(io.out.token_stride = 4 * DIM - 1, "out: rows overlap");
    CASE((io.v.token_stride = DIM, io.v.head_stride = 3 * DIM - 1), "v: rows overlap");
#undef CASE
    ck_assert_uint_eq(n, sizeof cases / sizeof *cases);

    for (size_t i = 0; i < n; i++) {
        ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
        ck_assert_int_eq(tests_step_layer(step, 0, &cases[i].io), PKV_ERROR_ARGUMENT);
        check_message(world, cases[i].message);
        pkv_step_abort(step);
        check_unchanged(world, &before);
    }
    ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
    ck_assert_int_eq(tests_step_layer(step, 0, NULL), PKV_ERROR_ARGUMENT);
    check_message(world, "io:");
    pkv_step_abort(step);
    free(rows);
    world_close(world);
}
END_TEST

/* Copies packed rows into another layout. */
static void *lay_out(const float *packed, size_t rows, size_t heads, size_t token_stride,
                     size_t head_stride, pkv_dtype dtype)
{
    size_t n = rows * token_stride + heads * head_stride;
    float *f32 = calloc(n, sizeof *f32);
    uint16_t *u16 = calloc(n, sizeof *u16);

    for (size_t i = 0; i < rows * heads * DIM; i++) {
        size_t at = i / DIM / heads * token_stride + i / DIM % heads * head_stride + i % DIM;

        f32[at] = packed[i];
        u16[at] = dtype == PKV_F16 ? f16_from_f32(packed[i]) : bf16_from_f32(packed[i]);
    }
    free(dtype == PKV_F32 ? (void *)u16 : (void *)f32);
    return dtype == PKV_F32 ? (void *)f32 : (void *)u16;
}

START_TEST(layouts_and_types)
{
    const pkv_dtype types[] = {PKV_F32, PKV_F16, PKV_BF16};
    struct rows *rows = malloc(sizeof *rows), *expected = malloc(sizeof *expected);
    size_t n_types = _i == FAKE ? 1 : 3;

    for (size_t choice = 0; choice < n_types * 3; choice++) {
        struct world *world = world_opened(_i), *plain = world_opened(_i);
        pkv_seq *seq = open_seq(world), *plain_seq = open_seq(plain);
        struct part part = {seq, 0, 33};
        pkv_dtype dtype = types[choice / 3];
        size_t fused = (QUERY_HEADS + 2 * KV_HEADS) * DIM;
        /* Token-major with gaps, fused, head-major. */
        size_t token_stride = choice % 3 == 2 ? DIM : fused;
        size_t head_stride = choice % 3 == 2 ? 40 * DIM : choice % 3 == 1 ? DIM : DIM + 3;
        pkv_step *step;

        feed(world, seq, 0, 21);
        feed(plain, plain_seq, 0, 21);
        ck_assert_int_eq(try_step(plain, &(struct part){plain_seq, 0, 33}, 1, expected), PKV_OK);
        ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
        for (size_t layer = 0; layer < LAYERS; layer++) {
            fill_rows(world, &part, 1, layer, rows);

            void *k = lay_out(rows->k, 33, KV_HEADS, token_stride, head_stride, dtype);
            void *v = lay_out(rows->v, 33, KV_HEADS, token_stride, head_stride, dtype);
            void *q = lay_out(rows->q, 33, QUERY_HEADS, token_stride, head_stride, dtype);
            float *out = lay_out(rows->q, 33, QUERY_HEADS, token_stride, head_stride, PKV_F32);
            pkv_step_io io = {.struct_size = sizeof io,
                              .q = {q, dtype, token_stride, head_stride},
                              .k = {k, dtype, token_stride, head_stride},
                              .v = {v, dtype, token_stride, head_stride},
                              .out = {out, PKV_F32, token_stride, head_stride}};

            ck_assert_int_eq(tests_step_layer(step, layer, &io), PKV_OK);
            for (size_t i = 0; layer == LAYERS - 1 && i < 33 * QUERY_HEADS * DIM; i++) {
                size_t at = i / DIM / QUERY_HEADS * token_stride +
                            i / DIM % QUERY_HEADS * head_stride + i % DIM;

                if (out[at] != expected->out[i])
                    ck_abort_msg("choice %zu, element %zu", choice, i);
            }
            free(k);
            free(v);
            free(q);
            free(out);
        }
        ck_assert_int_eq(pkv_step_end(step), PKV_OK);
        ck_assert_uint_eq(digest_of(seq), digest_of(plain_seq));
        world_close(plain);
        world_close(world);
    }
    free(expected);
    free(rows);
}
END_TEST

/* Without `out` the same is stored, and q is not looked at. */
START_TEST(store_without_attending)
{
    struct world *world = world_opened(_i);
    struct rows *rows = malloc(sizeof *rows);
    struct part part = {open_seq(world), 0, 77};
    pkv_step *step;

    ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        pkv_step_io io = {.struct_size = sizeof io, .k = {.data = rows->k}, .v = {.data = rows->v}};

        io.q.dtype = (pkv_dtype)77;
        fill_rows(world, &part, 1, layer, rows);
        ck_assert_int_eq(tests_step_layer(step, layer, &io), PKV_OK);
    }
    ck_assert_int_eq(pkv_step_end(step), PKV_OK);
    ck_assert_uint_eq(digest_of(part.seq), plain_digest(world, 0, 77));
    free(rows);
    world_close(world);
}
END_TEST

/* ---- Nothing happens half ---- */

/* Two sequences of which one shares its tail with a third: in place, copied, window and new pages
 * that are factorized. */
static void prepare(struct world *world, struct part parts[2])
{
    pkv_seq *fork;

    parts[0] = (struct part){open_seq(world), 0, 30};
    parts[1] = (struct part){open_seq(world), 1, 4};
    feed(world, parts[0].seq, 0, 29);
    feed(world, parts[1].seq, 1, 45);
    ck_assert_int_eq(pkv_seq_fork(parts[1].seq, &fork), PKV_OK);
}

static void check_committed(struct world *world, const struct part parts[2])
{
    ck_assert_uint_eq(digest_of(parts[0].seq), plain_digest(world, 0, 59));
    ck_assert_uint_eq(digest_of(parts[1].seq), plain_digest(world, 1, 49));
    ck_assert_uint_eq(digest_of(world->cache->last), plain_digest(world, 1, 45));
}

START_TEST(abort_anywhere)
{
    for (size_t layers = 0; layers <= LAYERS; layers++) {
        struct world *world = world_opened(_i);
        struct rows *rows = malloc(sizeof *rows);
        struct part parts[2];
        pkv_step *step;

        prepare(world, parts);

        struct snapshot before = take_snapshot(world);

        ck_assert_int_eq(begin(world, parts, 2, &step), PKV_OK);
        for (size_t layer = 0; layer < layers; layer++) {
            pkv_step_io io = packed_io(rows);

            fill_rows(world, parts, 2, layer, rows);
            /* Other values than those of the second try. */
            for (size_t i = 0; i < 34 * KV_HEADS * DIM; i++)
                rows->k[i] = rows->v[i] = 7;
            ck_assert_int_eq(tests_step_layer(step, layer, &io), PKV_OK);
        }
        pkv_step_abort(step);
        check_unchanged(world, &before);
        ck_assert_int_eq(try_step(world, parts, 2, rows), PKV_OK);
        check_committed(world, parts);
        free(rows);
        world_close(world);
    }
}
END_TEST

START_TEST(memory_fails_anywhere)
{
    size_t failures = 0;
    pkv_status status;

    do {
        struct world *world = world_opened(_i);
        struct rows *rows = malloc(sizeof *rows);
        struct part parts[2];

        prepare(world, parts);

        struct snapshot before = take_snapshot(world);

        world->counting.calls = 0;
        world->counting.fail_at = failures + 1;
        world->counting.fail_forever = failures % 2 == 0;
        status = try_step(world, parts, 2, rows);
        if (status != PKV_OK) {
            ck_assert_int_eq(status, PKV_ERROR_MEMORY);
            ck_assert_str_ne(pkv_cache_message(world->cache), "");
            check_unchanged(world, &before);
            world->counting.fail_at = 0;
            ck_assert_int_eq(try_step(world, parts, 2, rows), PKV_OK);
            failures++;
        }
        check_committed(world, parts);
        free(rows);
        world_close(world);
    } while (status != PKV_OK);
    /* The plan's three arrays; but for a device, tables and the backend's scratch. */
    ck_assert_uint_ge(failures, strcmp(backends[_i]->name, "cuda-host") == 0 ? 3 : 5);
}
END_TEST

START_TEST(backend_fails)
{
    struct world *world = world_opened(FAKE);
    struct rows *rows = malloc(sizeof *rows);
    struct backend *backend = world->cache->backend;
    struct part parts[2];

    prepare(world, parts);

    struct snapshot before = take_snapshot(world);

    backend->fail_begin = PKV_ERROR_DEVICE;
    ck_assert_int_eq(try_step(world, parts, 2, rows), PKV_ERROR_DEVICE);
    check_message(world, "on demand");
    check_unchanged(world, &before);
    backend->fail_begin = PKV_OK;
    for (size_t layer = 0; layer < LAYERS; layer++) {
        backend->fail_layer = PKV_ERROR_SOLVER;
        backend->failing_layer = layer;
        ck_assert_int_eq(try_step(world, parts, 2, rows), PKV_ERROR_SOLVER);
        check_message(world, "on demand");
        check_unchanged(world, &before);
    }
    backend->fail_layer = PKV_OK;
    backend->fail_end = PKV_ERROR_DEVICE;
    ck_assert_int_eq(try_step(world, parts, 2, rows), PKV_ERROR_DEVICE);
    check_message(world, "on demand");
    check_unchanged(world, &before);
    backend->fail_end = PKV_OK;
    backend->fail_rebuild = PKV_ERROR_DEVICE;
    ck_assert_int_eq(pkv_seq_truncate(parts[1].seq, 10), PKV_ERROR_DEVICE);
    check_message(world, "on demand");
    check_unchanged(world, &before);
    ck_assert_int_eq(try_step(world, parts, 2, rows), PKV_OK);
    check_committed(world, parts);
    free(rows);
    world_close(world);
}
END_TEST

START_TEST(values_that_are_not_finite)
{
    const float faults[] = {NAN, INFINITY, -INFINITY, 3.4e38f};

    for (size_t choice = 0; choice < 4 * 2 * 2 * 2; choice++) {
        struct world *world = world_new(_i);
        struct rows *rows = malloc(sizeof *rows);
        struct part parts[2];
        size_t kind = choice % 4, layer = choice / 4 % 2;
        bool value = choice / 8 % 2, second = choice / 16 % 2;
        pkv_step *step;

        if (kind == 3) { /* finite, but more than the storage type has */
            if (_i == FAKE) {
                free(rows);
                free(world);
                continue;
            }
            world->config.dtype = choice % 8 == 3 ? PKV_F16 : PKV_BF16;
        }
        world_open(world);
        prepare(world, parts);

        struct snapshot before = take_snapshot(world);

        ck_assert_int_eq(begin(world, parts, 2, &step), PKV_OK);
        for (size_t l = 0; l <= layer; l++) {
            pkv_step_io io = packed_io(rows);
            /* Token 50 of the first sequence or 46 of the second: pages 6 and 5; head 1. */
            size_t row = second ? 30 + 1 : 21;
            size_t at = row * KV_HEADS * DIM + DIM + 9;

            fill_rows(world, parts, 2, l, rows);
            if (l == layer)
                (value ? rows->v : rows->k)[at] = faults[kind];
            ck_assert_int_eq(tests_step_layer(step, l, &io), l == layer ? PKV_ERROR_VALUE : PKV_OK);
        }
        check_message(world, layer ? "layer 1" : "layer 0");
        check_message(world, "head 1");
        check_message(world, second ? "page 5" : "page 6");
        check_message(world, value ? "V" : "K ");
        ck_assert_int_eq(pkv_step_end(step), PKV_ERROR_ARGUMENT);
        pkv_step_abort(step);
        check_unchanged(world, &before);
        ck_assert_int_eq(try_step(world, parts, 2, rows), PKV_OK);
        check_committed(world, parts);
        free(rows);
        world_close(world);
    }
}
END_TEST

/* A page that was in range when it came, and whose factors are not when it leaves the window: the
 * message names its layer, whenever that is found, and the sequence stays as it was. */
START_TEST(factors_overflow_while_decoding)
{
    struct world *world = world_new(_i);
    struct rows *rows = malloc(sizeof *rows);
    struct part part = {NULL, 3, 1};
    pkv_status status = PKV_OK;

    world->config.dtype = PKV_F16;
    world_open(world);
    part.seq = open_seq(world);
    while (status == PKV_OK) {
        struct snapshot before = take_snapshot(world);
        size_t token = pkv_seq_tokens(part.seq);
        pkv_step *step;

        ck_assert_uint_lt(token, 10 * PAGE);
        ck_assert_int_eq(begin(world, &part, 1, &step), PKV_OK);
        for (size_t layer = 0; layer < LAYERS && status == PKV_OK; layer++) {
            pkv_step_io io = packed_io(rows);

            fill_rows(world, &part, 1, layer, rows);
            for (size_t i = DIM; i < 2 * DIM && layer == 1 && token / PAGE == 2; i++)
                rows->k[i] = 40000;
            status = tests_step_layer(step, layer, &io);
        }
        if (status == PKV_OK)
            status = pkv_step_end(step);
        if (status == PKV_OK)
            continue;
        ck_assert_int_eq(status, PKV_ERROR_VALUE);
        check_message(world, "layer 1, KV head 1, page 2: K: its factors overflow");
        pkv_step_abort(step);
        check_unchanged(world, &before);
    }
    free(rows);
    world_close(world);
}
END_TEST

/* ---- One content, one digest ---- */

static size_t next_step(uint32_t *random, size_t left)
{
    static const size_t limits[] = {1, 3, 9, 20, 64};
    size_t limit = limits[(*random = hash(*random + 1)) % 5];
    size_t tokens = 1 + (*random >> 8) % limit;

    return tokens < left ? tokens : left;
}

START_TEST(any_split)
{
    struct world *reference = world_new(_i);
    size_t tokens = 107;
    unsigned seeds = _i == FAKE ? 60 : 12;

    for (unsigned seed = 0; seed < seeds; seed++) {
        struct world *world = world_new(_i);
        uint32_t random = seed;
        pkv_seq *seq;

        world->config.dtype = _i == FAKE ? PKV_F32 : (pkv_dtype)(seed % 3);
        world->config.threads = (unsigned[]){1, 2, 5}[seed / 3 % 3];
        reference->config.dtype = world->config.dtype;
        world_open(world);
        seq = open_seq(world);
        while (pkv_seq_tokens(seq) < tokens)
            feed(world, seq, 5, seed < 3 ? 1 : next_step(&random, tokens - pkv_seq_tokens(seq)));
        ck_assert_uint_eq(digest_of(seq), plain_digest(reference, 5, tokens));
        world_close(world);
    }
    free(reference);
}
END_TEST

/* Beside two other sequences, in their steps and between them: the same content, and the same
 * outputs for the same steps. */
START_TEST(beside_others)
{
    const unsigned threads[] = {1, 2, 5};
    struct rows *rows = malloc(sizeof *rows), *alone_rows = malloc(sizeof *alone_rows);

    for (unsigned seed = 0; seed < 6; seed++) {
        struct world *world = world_new(_i), *alone = world_opened(_i);
        pkv_seq *alone_seq = open_seq(alone);
        struct part parts[3];
        uint32_t random = seed + 1000;

        world->config.threads = threads[seed % 3];
        world_open(world);
        for (size_t i = 0; i < 3; i++)
            parts[i] = (struct part){open_seq(world), i, 0};
        while (pkv_seq_tokens(parts[1].seq) < 90) {
            size_t n = random % 3 == 0 ? 3 : 2;

            for (size_t i = 0; i < 3; i++)
                parts[i].tokens =
                    next_step(&random, i == 1 ? 90 - pkv_seq_tokens(parts[1].seq) : 4);
            ck_assert_int_eq(try_step(world, parts, n, rows), PKV_OK);
            ck_assert_int_eq(
                try_step(alone, &(struct part){alone_seq, 1, parts[1].tokens}, 1, alone_rows),
                PKV_OK);
            ck_assert_mem_eq(rows->out + parts[0].tokens * QUERY_HEADS * DIM, alone_rows->out,
                             parts[1].tokens * QUERY_HEADS * DIM * sizeof(float));
            ck_assert_mem_eq(rows->lse + parts[0].tokens * QUERY_HEADS, alone_rows->lse,
                             parts[1].tokens * QUERY_HEADS * sizeof(float));
        }
        ck_assert_uint_eq(digest_of(parts[1].seq), plain_digest(world, 1, 90));
        ck_assert_uint_eq(digest_of(parts[0].seq),
                          plain_digest(world, 0, pkv_seq_tokens(parts[0].seq)));
        world_close(world);
        world_close(alone);
    }
    free(rows);
    free(alone_rows);
}
END_TEST

struct runner {
    pthread_t thread;
    int backend;
    uint64_t digest;
};

static uint64_t run_two_sequences(int backend)
{
    struct world *world = world_new(backend);
    struct rows *rows = malloc(sizeof *rows);
    struct part parts[2];
    uint64_t digest = 0;
    uint32_t random = 7;
    bool good = true;

    world->config.threads = 2;
    good = cache_open_with(backends[backend], &world->config, &world->cache, NULL) == PKV_OK;
    for (size_t i = 0; i < 2 && good; i++) {
        parts[i].stream = i;
        good = pkv_seq_open(world->cache, &parts[i].seq) == PKV_OK;
    }
    while (good && pkv_seq_tokens(parts[0].seq) < 50) {
        for (size_t i = 0; i < 2; i++)
            parts[i].tokens = next_step(&random, 30);
        good = try_step(world, parts, 2, rows) == PKV_OK;
    }
    if (good)
        good = pkv_cache_digest(world->cache, &digest) == PKV_OK;
    pkv_cache_close(world->cache);
    free(rows);
    free(world);
    return good ? digest : 0;
}

static void *run_in_thread(void *opaque)
{
    struct runner *runner = opaque;

    runner->digest = run_two_sequences(runner->backend);
    return NULL;
}

START_TEST(eight_caches_in_eight_threads)
{
    struct runner runners[8];
    uint64_t digest = run_two_sequences(_i);

    ck_assert_uint_ne(digest, 0);
    for (size_t i = 0; i < 8; i++) {
        runners[i].backend = _i;
        ck_assert_int_eq(pthread_create(&runners[i].thread, NULL, run_in_thread, &runners[i]), 0);
    }
    for (size_t i = 0; i < 8; i++) {
        pthread_join(runners[i].thread, NULL);
        ck_assert_uint_eq(runners[i].digest, digest);
    }
}
END_TEST

START_TEST(digests_tell_apart)
{
    struct world *world = world_opened(_i), *other = world_new(_i);
    pkv_seq *seq = open_seq(world), *second;
    uint64_t one, two, empty, digest;

    empty = digest_of(seq);
    feed(world, seq, 0, 40);
    one = digest_of(seq);
    ck_assert_uint_ne(one, empty);
    ck_assert_uint_ne(one, plain_digest(world, 1, 40));
    ck_assert_uint_ne(one, plain_digest(world, 0, 41));

    /* The same tokens and page states under another geometry. */
    other->config.window_pages = 2;
    other->config.sink_pages = 0;
    world_open(other);
    second = open_seq(other);
    ck_assert_uint_ne(digest_of(second), empty);
    world_close(other);

    /* A cache's covers its sequences, in order. */
    ck_assert_int_eq(pkv_cache_digest(world->cache, &digest), PKV_OK);
    ck_assert_uint_eq(digest, one);
    second = open_seq(world);
    feed(world, second, 1, 40);
    ck_assert_int_eq(pkv_cache_digest(world->cache, &two), PKV_OK);
    ck_assert_uint_ne(two, one);
    ck_assert_int_eq(pkv_seq_close(seq), PKV_OK);
    seq = open_seq(world);
    feed(world, seq, 0, 40);
    ck_assert_uint_eq(digest_of(seq), one);
    ck_assert_int_eq(pkv_cache_digest(world->cache, &digest), PKV_OK);
    ck_assert_uint_ne(digest, two);
    ck_assert_int_eq(pkv_seq_digest(seq, NULL), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_cache_digest(world->cache, NULL), PKV_ERROR_ARGUMENT);
    world_close(world);
}
END_TEST

/* ---- Forks and cuts ---- */

static pkv_page_info page_of(pkv_seq *seq, size_t page)
{
    pkv_page_info info = {.struct_size = sizeof info};

    ck_assert_int_eq(pkv_seq_page(seq, page, &info), PKV_OK);
    return info;
}

START_TEST(forks_share_until_they_write)
{
    struct world *world = world_opened(_i);
    pkv_seq *seq = open_seq(world), *fork;
    uint64_t at_21 = 0;

    feed(world, seq, 0, 21);
    at_21 = digest_of(seq);

    struct snapshot before = take_snapshot(world);

    ck_assert_int_eq(pkv_seq_fork(seq, &fork), PKV_OK);
    ck_assert_uint_eq(digest_of(fork), at_21);
    for (size_t p = 0; p < 3; p++)
        ck_assert_uint_eq(page_of(seq, p).sharers, 2);

    struct snapshot shared = take_snapshot(world);

    ck_assert_uint_eq(shared.stats.tokens, 42);
    ck_assert_uint_eq(shared.stats.payload_bytes, before.stats.payload_bytes);
    ck_assert_uint_eq(shared.dense_free, before.dense_free);

    /* The fork's own tail; the pages before it stay shared. */
    feed(world, fork, 0, 1);
    ck_assert_uint_eq(digest_of(seq), at_21);
    ck_assert_uint_eq(digest_of(fork), plain_digest(world, 0, 22));
    ck_assert_uint_eq(page_of(seq, 2).sharers, 1);
    ck_assert_uint_eq(page_of(fork, 1).sharers, 2);
    ck_assert_uint_eq(take_snapshot(world).dense_free, before.dense_free - 1);

    /* Both leave the window with page 1: two factor pages, the same bits. */
    feed(world, fork, 0, 30);
    ck_assert_int_eq(page_of(seq, 1).state, PKV_PAGE_WINDOW);
    ck_assert_int_eq(page_of(fork, 1).state, PKV_PAGE_FACTORIZED);
    ck_assert_uint_eq(page_of(seq, 1).sharers, 1);
    ck_assert_uint_eq(digest_of(seq), at_21);
    feed(world, seq, 0, 31);
    ck_assert_int_eq(page_of(seq, 1).state, PKV_PAGE_FACTORIZED);
    ck_assert_uint_eq(page_of(seq, 1).sharers, 1);
    ck_assert_uint_eq(page_of(seq, 0).sharers, 2);
    ck_assert_uint_eq(digest_of(seq), digest_of(fork));
    ck_assert_uint_eq(digest_of(seq), plain_digest(world, 0, 52));

    /* A fork outlives what it came from. */
    ck_assert_int_eq(pkv_seq_close(seq), PKV_OK);
    ck_assert_uint_eq(page_of(fork, 0).sharers, 1);
    ck_assert_uint_eq(digest_of(fork), plain_digest(world, 0, 52));
    ck_assert_int_eq(pkv_seq_fork(fork, NULL), PKV_ERROR_ARGUMENT);
    world_close(world);
}
END_TEST

START_TEST(cuts_in_dense_pages)
{
    struct world *world = world_opened(_i);
    pkv_seq *seq = open_seq(world), *fork;
    uint64_t at_37;

    feed(world, seq, 0, 37);
    at_37 = digest_of(seq);
    ck_assert_int_eq(pkv_seq_truncate(seq, 38), PKV_ERROR_ARGUMENT);
    check_message(world, "tokens:");
    ck_assert_int_eq(pkv_seq_truncate(seq, SIZE_MAX), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_truncate(seq, 37), PKV_OK);
    ck_assert_uint_eq(digest_of(seq), at_37);

    /* Inside the tail, inside the window page, both shared. */
    ck_assert_int_eq(pkv_seq_fork(seq, &fork), PKV_OK);
    ck_assert_int_eq(pkv_seq_truncate(fork, 34), PKV_OK);
    ck_assert_uint_eq(pkv_seq_tokens(fork), 34);
    ck_assert_uint_eq(digest_of(fork), plain_digest(world, 0, 34));
    ck_assert_int_eq(pkv_seq_truncate(fork, 27), PKV_OK);
    ck_assert_int_eq(page_of(fork, 3).state, PKV_PAGE_FILLING);
    ck_assert_int_eq(page_of(fork, 4).state, PKV_PAGE_EMPTY);
    ck_assert_uint_eq(page_of(fork, 3).tokens, 3);
    /* Pages 1 and 2 were factorized already, as they are behind a window of one. */
    ck_assert_int_eq(page_of(fork, 2).state, PKV_PAGE_FACTORIZED);

    /* Other tokens then: the first sequence does not see them. */
    feed(world, fork, 3, 20);
    ck_assert_uint_eq(digest_of(seq), at_37);

    /* At a page start and to nothing. */
    ck_assert_int_eq(pkv_seq_truncate(fork, 8), PKV_OK);
    ck_assert_uint_eq(digest_of(fork), plain_digest(world, 0, 8));
    ck_assert_int_eq(pkv_seq_truncate(fork, 3), PKV_OK);
    ck_assert_int_eq(page_of(fork, 0).state, PKV_PAGE_FILLING);
    ck_assert_int_eq(pkv_seq_truncate(fork, 0), PKV_OK);
    ck_assert_int_eq(page_of(fork, 0).state, PKV_PAGE_EMPTY);
    feed(world, fork, 0, 37);
    ck_assert_uint_eq(digest_of(fork), at_37);
    ck_assert_uint_eq(digest_of(seq), at_37);
    world_close(world);
}
END_TEST

START_TEST(cuts_in_factorized_pages)
{
    struct world *world = world_opened(_i);
    pkv_seq *seq = open_seq(world), *fork;
    float before[2][PAGE * DIM], after[2][PAGE * DIM];
    uint64_t at_60;

    feed(world, seq, 0, 60);
    at_60 = digest_of(seq);
    ck_assert_int_eq(pkv_seq_fork(seq, &fork), PKV_OK);
    ck_assert_int_eq(page_of(fork, 3).state, PKV_PAGE_FACTORIZED);
    ck_assert_int_eq(pkv_seq_read_page(fork, 1, 1, 3, before[0], before[1]), PKV_OK);

    uint32_t dense_free = world->cache->dense.n_free;

    ck_assert_int_eq(pkv_seq_truncate(fork, 29), PKV_OK);
    ck_assert_int_eq(page_of(fork, 3).state, PKV_PAGE_FILLING);
    ck_assert_int_eq(page_of(fork, 2).state, PKV_PAGE_FACTORIZED);
    ck_assert_uint_eq(page_of(fork, 3).tokens, 5);
    ck_assert_uint_eq(page_of(fork, 3).sharers, 1);
    ck_assert_uint_eq(page_of(seq, 3).sharers, 1);
    ck_assert_uint_eq(world->cache->dense.n_free, dense_free - 1);
    ck_assert_int_eq(pkv_seq_read_page(fork, 1, 1, 3, after[0], after[1]), PKV_OK);
    for (size_t i = 0; i < 5 * DIM; i++) {
        ck_assert_double_eq_tol(after[0][i], before[0][i], 1e-5);
        ck_assert_double_eq_tol(after[1][i], before[1][i], 1e-5);
    }
    ck_assert_uint_eq(digest_of(seq), at_60);

    /* It leaves the window again. */
    feed(world, fork, 0, 31);
    ck_assert_int_eq(page_of(fork, 3).state, PKV_PAGE_FACTORIZED);
    ck_assert_int_eq(page_of(fork, 6).state, PKV_PAGE_WINDOW);
    ck_assert_uint_eq(digest_of(seq), at_60);
    if (_i == FAKE) /* whose factors are exact */
        ck_assert_uint_eq(digest_of(fork), at_60);

    /* At the end of a factorized page nothing is rebuilt. */
    ck_assert_int_eq(pkv_seq_truncate(fork, 24), PKV_OK);
    ck_assert_int_eq(page_of(fork, 2).state, PKV_PAGE_FACTORIZED);
    ck_assert_int_eq(pkv_seq_truncate(fork, 24), PKV_OK);
    ck_assert_int_eq(page_of(fork, 2).state, PKV_PAGE_FACTORIZED);
    world_close(world);
}
END_TEST

/* ---- Inspection ---- */

START_TEST(pages_as_described)
{
    struct world *world = world_opened(_i);
    pkv_seq *seq = open_seq(world);
    size_t token_bytes = LAYERS * KV_HEADS * 2 * DIM * 4;
    size_t factor_bytes = LAYERS * KV_HEADS * (5 + 3) * (PAGE + DIM) * 4;
    const pkv_page_state states[] = {PKV_PAGE_SINK,   PKV_PAGE_FACTORIZED, PKV_PAGE_FACTORIZED,
                                     PKV_PAGE_WINDOW, PKV_PAGE_FILLING,    PKV_PAGE_EMPTY};
    pkv_page_info info = {.struct_size = sizeof info};
    pkv_stats stats = {.struct_size = sizeof stats};

    ck_assert_int_eq(page_of(seq, 0).state, PKV_PAGE_EMPTY);
    feed(world, seq, 0, 4);
    ck_assert_int_eq(page_of(seq, 0).state, PKV_PAGE_FILLING);
    feed(world, seq, 0, 31);
    for (size_t p = 0; p < 6; p++) {
        info = page_of(seq, p);
        ck_assert_int_eq(info.state, states[p]);
        ck_assert_uint_eq(info.first_token, p * PAGE);
        ck_assert_uint_eq(info.tokens, p < 4 ? PAGE : p == 4 ? 3 : 0);
        ck_assert_uint_eq(info.bytes, states[p] == PKV_PAGE_FACTORIZED ? factor_bytes
                                                                       : info.tokens * token_bytes);
        ck_assert_uint_eq(info.sharers, p < 5 ? 1 : 0);
    }
    ck_assert_int_eq(page_of(seq, SIZE_MAX / PAGE).state, PKV_PAGE_EMPTY);
    ck_assert_int_eq(pkv_seq_page(seq, SIZE_MAX / PAGE + 1, &info), PKV_ERROR_ARGUMENT);
    check_message(world, "page:");

    ck_assert_int_eq(pkv_cache_stats(world->cache, &stats), PKV_OK);
    ck_assert_uint_eq(stats.factorized_pages, 2);
    ck_assert_uint_eq(stats.payload_bytes, 2 * factor_bytes + 19 * token_bytes);
    ck_assert_uint_eq(stats.raw_bytes, 35 * token_bytes);
    if (_i == FAKE) /* its scratch, and the plan: one item, five changes */
        ck_assert_uint_eq(stats.transient_peak_bytes, 2 * 31 * 64 + sizeof(struct backend_item) +
                                                          sizeof(pkv_seq *) +
                                                          5 * sizeof(struct page_change));
    ck_assert_uint_gt(stats.transient_peak_bytes, 0);
    ck_assert_uint_gt(stats.reserved_bytes, stats.payload_bytes);
    ck_assert_double_gt(stats.factorize_seconds, 0);
    ck_assert_int_eq(pkv_seq_stats(seq, &stats), PKV_OK);
    ck_assert_uint_eq(stats.factorized_pages, 2);
    ck_assert_uint_eq(stats.reserved_bytes, 0);
    ck_assert_uint_eq(stats.transient_peak_bytes, 0);
    ck_assert(stats.factorize_seconds == 0);

    /* What was factorized stays counted when it is dropped. */
    ck_assert_int_eq(pkv_seq_truncate(seq, 0), PKV_OK);
    ck_assert_int_eq(pkv_cache_stats(world->cache, &stats), PKV_OK);
    ck_assert_uint_eq(stats.factorized_pages, 2);
    ck_assert_uint_eq(stats.payload_bytes, 0);
    world_close(world);
}
END_TEST

START_TEST(pages_as_read)
{
    const pkv_dtype types[] = {PKV_F32, PKV_F16, PKV_BF16};

    for (size_t type = 0; type < (_i == FAKE ? 1 : 3); type++) {
        struct world *world = world_new(_i);
        float k[PAGE * DIM], v[PAGE * DIM];
        double tolerance = (double[]){1e-5, 1e-2, 8e-2}[type];
        pkv_seq *seq;

        /* Of full rank: the product gives the page back. */
        world->config.rank_k = PAGE;
        world->config.rank_v = PAGE;
        world->config.dtype = types[type];
        world_open(world);
        seq = open_seq(world);
        feed(world, seq, 2, 44);
        for (size_t page = 0; page < 6; page++) {
            size_t tokens = page_of(seq, page).tokens;
            bool exact = page_of(seq, page).state != PKV_PAGE_FACTORIZED;
            double limit = exact ? 0 : tolerance;

            ck_assert(exact == (page == 0 || page > 3));
            memset(k, 0, sizeof k);
            memset(v, 0, sizeof v);
            ck_assert_int_eq(pkv_seq_read_page(seq, 1, 1, page, k, NULL), PKV_OK);
            ck_assert_int_eq(pkv_seq_read_page(seq, 1, 1, page, NULL, v), PKV_OK);
            for (size_t i = 0; i < tokens * DIM; i++) {
                size_t token = page * PAGE + i / DIM;

                ck_assert_double_le(fabs(k[i] - row_element(world, 2, token, 1, 1, false, i % DIM)),
                                    limit);
                ck_assert_double_le(fabs(v[i] - row_element(world, 2, token, 1, 1, true, i % DIM)),
                                    limit);
            }
            /* Nothing behind the tokens is written. */
            for (size_t i = tokens * DIM; i < PAGE * DIM; i++)
                ck_assert(k[i] == 0 && v[i] == 0);
        }
        ck_assert_int_eq(pkv_seq_read_page(seq, LAYERS, 0, 0, k, v), PKV_ERROR_ARGUMENT);
        check_message(world, "layer:");
        ck_assert_int_eq(pkv_seq_read_page(seq, 0, KV_HEADS, 0, k, v), PKV_ERROR_ARGUMENT);
        check_message(world, "kv_head:");
        ck_assert_int_eq(pkv_seq_read_page(seq, 0, 0, 6, k, v), PKV_ERROR_ARGUMENT);
        check_message(world, "page:");
        world_close(world);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("step");
    TCase *test = tcase_create("step");

    tcase_add_loop_test(test, layers_in_order, 0, BACKENDS);
    tcase_add_loop_test(test, busy, 0, BACKENDS);
    tcase_add_loop_test(test, close_with_open_step, 0, BACKENDS);
    tcase_add_loop_test(test, bad_items, 0, BACKENDS);
    tcase_add_loop_test(test, capacity, 0, BACKENDS);
    tcase_add_loop_test(test, no_free_slot, 0, BACKENDS);
    tcase_add_test(test, tightest_step);
    tcase_add_loop_test(test, bad_operands, 0, BACKENDS);
    tcase_add_loop_test(test, layouts_and_types, 0, BACKENDS);
    tcase_add_loop_test(test, store_without_attending, 0, BACKENDS);
    tcase_add_loop_test(test, abort_anywhere, 0, BACKENDS);
    tcase_add_loop_test(test, memory_fails_anywhere, 0, BACKENDS);
    tcase_add_test(test, backend_fails);
    tcase_add_loop_test(test, values_that_are_not_finite, 0, BACKENDS);
    tcase_add_loop_test(test, factors_overflow_while_decoding, CPU, BACKENDS);
    tcase_add_loop_test(test, any_split, 0, BACKENDS);
    tcase_add_loop_test(test, beside_others, 0, BACKENDS);
    tcase_add_loop_test(test, eight_caches_in_eight_threads, 0, BACKENDS);
    tcase_add_loop_test(test, digests_tell_apart, 0, BACKENDS);
    tcase_add_loop_test(test, forks_share_until_they_write, 0, BACKENDS);
    tcase_add_loop_test(test, cuts_in_dense_pages, 0, BACKENDS);
    tcase_add_loop_test(test, cuts_in_factorized_pages, 0, BACKENDS);
    tcase_add_loop_test(test, pages_as_described, 0, BACKENDS);
    tcase_add_loop_test(test, pages_as_read, 0, BACKENDS);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
