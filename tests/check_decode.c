/* SPDX-License-Identifier: MIT */
/* gpu/decode.cu: the kernel with tensor cores against the CPU's in plain C; and that its bits are
 * an item's alone. */
#include "cache.h"
#include "cuda_host/control.h"
#include "cuda_host/operands.h"

#include "tests.h" /* after message.h: see there */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KV_HEADS = 2, GROUP = 8, DIM = 128, PAGE = 32, ROWS = 40, SEQUENCES = 4 };

/*
 * What is in storage is multiplied exactly. Queries, products with one factor and weights are split
 * into two numbers of 16 bits, which leaves 2^-17 of them with bf16: 3e-5 of a score of 4, and as
 * much of an output.
 */
#define TOLERANCE 5e-5

struct shape {
    pkv_dtype dtype;
    size_t group, d, rank_k, rank_v;
    pkv_factors k, v;
};

/* 16 shapes: both types, both d, native and INT4 factors in all pairs; odd, even and small ranks.
 */
static struct shape shape_of(int i)
{
    static const size_t groups[] = {1, 8, 3, 4, 5, 2, 7, 6};
    static const size_t ranks[][2] = {{16, 14}, {13, 7}, {1, 16}, {9, 15}, {8, 2}, {12, 11}};
    static const pkv_factors forms[] = {PKV_FACTORS_NATIVE, PKV_FACTORS_INT4};

    return (struct shape){.dtype = i & 1 ? PKV_F16 : PKV_BF16,
                          .group = groups[i / 2],
                          .d = i & 2 ? 64 : 128,
                          .rank_k = ranks[i % 6][0],
                          .rank_v = ranks[i % 6][1],
                          .k = forms[i >> 2 & 1],
                          .v = forms[i >> 3 & 1]};
}

struct rows {
    float q[ROWS * KV_HEADS * GROUP * DIM];
    float k[ROWS * KV_HEADS * DIM];
    float v[ROWS * KV_HEADS * DIM];
    float out[ROWS * KV_HEADS * GROUP * DIM];
    float lse[ROWS * KV_HEADS * GROUP];
};

/* `stream` NULL: one of its own. */
static pkv_cache *open_cache_on(const struct shape *shape, size_t tokens, bool on_cpu, void *stream)
{
    pkv_config config;
    pkv_cache *cache;

    pkv_config_init(&config, sizeof config);
    config.layers = 1;
    config.query_heads = KV_HEADS * shape->group;
    config.kv_heads = KV_HEADS;
    config.head_dim = shape->d;
    config.rank_k = shape->rank_k;
    config.rank_v = shape->rank_v;
    config.factors_k = shape->k;
    config.factors_v = shape->v;
    config.dtype = shape->dtype;
    config.max_sequences = SEQUENCES;
    config.max_tokens = tokens;
    config.max_step_tokens = ROWS;
    config.threads = 1;
    config.stream = stream;
    config.isa = on_cpu ? "generic" : NULL; /* computes in f32 */
    tests_backend = on_cpu ? &backend_cpu : &backend_cuda;
    cache = tests_open_cache(&config);
    tests_backend = &backend_cpu;
    return cache;
}

static pkv_cache *open_cache(const struct shape *shape, size_t tokens, bool on_cpu)
{
    return open_cache_on(shape, tokens, on_cpu, NULL);
}

/* Row `row` of a sequence that is told from others by `seed`. */
static void fill_row(struct rows *rows, size_t at, const struct shape *shape, uint64_t seed,
                     size_t row)
{
    const size_t heads = KV_HEADS * shape->group;

    tests_seed(1000 * seed + row);
    for (size_t i = 0; i < KV_HEADS * shape->d; i++) {
        rows->k[at * KV_HEADS * shape->d + i] = 2 * tests_random_float();
        rows->v[at * KV_HEADS * shape->d + i] = 2 * tests_random_float();
    }
    for (size_t i = 0; i < heads * shape->d; i++)
        rows->q[at * heads * shape->d + i] = 3 * tests_random_float();
}

struct part {
    pkv_seq *seq;
    uint64_t seed;
    size_t tokens;
};

/* A step of several sequences' next rows, which are rows of `rows` in this order. */
static void step(pkv_cache *cache, const struct shape *shape, const struct part *parts, size_t n,
                 bool attends, bool stays, struct rows *rows)
{
    pkv_step_io io = {.struct_size = sizeof io,
                      .q = {rows->q, PKV_F32, 0, 0},
                      .k = {rows->k, PKV_F32, 0, 0},
                      .v = {rows->v, PKV_F32, 0, 0}};
    pkv_step_item items[SEQUENCES];
    pkv_step *open;
    size_t at = 0;

    if (attends) {
        io.out = (pkv_output){rows->out, PKV_F32, 0, 0};
        io.lse = rows->lse;
    }
    for (size_t i = 0; i < n; i++) {
        items[i] = (pkv_step_item){parts[i].seq, parts[i].tokens};
        for (size_t t = 0; t < parts[i].tokens; t++)
            fill_row(rows, at++, shape, parts[i].seed, pkv_seq_tokens(parts[i].seq) + t);
    }
    ck_assert_int_eq(pkv_step_begin(cache, items, n, &open), PKV_OK);
    ck_assert_int_eq(tests_step_layer(open, 0, &io), PKV_OK);
    if (stays)
        ck_assert_int_eq(pkv_step_end(open), PKV_OK);
    else
        pkv_step_abort(open);
}

static pkv_seq *fill_sequence(pkv_cache *cache, const struct shape *shape, uint64_t seed,
                              size_t tokens, struct rows *rows)
{
    struct part part = {NULL, seed, 0};

    ck_assert_int_eq(pkv_seq_open(cache, &part.seq), PKV_OK);
    while (pkv_seq_tokens(part.seq) < tokens) {
        part.tokens = tokens - pkv_seq_tokens(part.seq);
        part.tokens = part.tokens < ROWS ? part.tokens : ROWS;
        step(cache, shape, &part, 1, false, true, rows);
    }
    return part.seq;
}

static void compare(const struct shape *shape, const struct rows *got, const struct rows *expected,
                    size_t tokens)
{
    const size_t heads = KV_HEADS * shape->group;
    double most = 0, error = 0, lse_error = 0;

    for (size_t i = 0; i < heads * shape->d; i++) {
        require(isfinite(got->out[i]));
        most = fmax(most, fabs((double)expected->out[i]));
        error = fmax(error, fabs((double)got->out[i] - (double)expected->out[i]));
    }
    for (size_t i = 0; i < heads; i++)
        lse_error = fmax(lse_error, fabs((double)got->lse[i] - (double)expected->lse[i]));
    printf("%zu tokens: error %.2g, of lse %.2g\n", tokens, error / most, lse_error);
    require_msg(error <= TOLERANCE * most && lse_error <= TOLERANCE,
                "type %d, group %zu, d %zu, ranks %zu %zu, codes %d %d, %zu tokens: error %g, "
                "of lse %g",
                shape->dtype, shape->group, shape->d, shape->rank_k, shape->rank_v, shape->k,
                shape->v, tokens, error / most, lse_error);
}

/* Before any page, within the first, in the window, with factors, in a second block. */
static const size_t lengths[] = {0, 1, 31, 64, 205, 1100};

#define LENGTHS (sizeof lengths / sizeof *lengths)

START_TEST(as_the_cpu)
{
    const struct shape shape = shape_of(_i);
    struct rows *tuned = tests_allocate(1, sizeof *tuned);
    struct rows *on_cpu = tests_allocate(1, sizeof *on_cpu);

    cuda_host_seed((uint64_t)_i);
    for (size_t i = 0; i < LENGTHS; i++) {
        struct part part = {.seed = (uint64_t)_i};
        pkv_cache *cache, *other;
        uint64_t digests[2];

        if (lengths[i] > 300 && _i % 5 != 0)
            continue; /* which take their time */
        cache = open_cache(&shape, 1200, false);
        other = open_cache(&shape, 1200, true);
        part.seq = fill_sequence(cache, &shape, part.seed, lengths[i], tuned);
        part.tokens = 1;
        step(cache, &shape, &part, 1, true, false, tuned);
        ck_assert_int_eq(pkv_seq_digest(part.seq, &digests[0]), PKV_OK);
        part.seq = fill_sequence(other, &shape, part.seed, lengths[i], on_cpu);
        step(other, &shape, &part, 1, true, false, on_cpu);
        ck_assert_int_eq(pkv_seq_digest(part.seq, &digests[1]), PKV_OK);
        ck_assert_uint_eq(digests[0], digests[1]);
        compare(&shape, tuned, on_cpu, lengths[i]);
        pkv_cache_close(cache);
        pkv_cache_close(other);
    }
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(tuned);
    free(on_cpu);
}
END_TEST

static void require_same_row(const struct shape *shape, const struct rows *a, size_t row_a,
                             const struct rows *b, size_t row_b)
{
    const size_t heads = KV_HEADS * shape->group;

    ck_assert_int_eq(memcmp(a->out + row_a * heads * shape->d, b->out + row_b * heads * shape->d,
                            heads * shape->d * sizeof(float)),
                     0);
    ck_assert_int_eq(memcmp(a->lse + row_a * heads, b->lse + row_b * heads, heads * sizeof(float)),
                     0);
}

/* An item's bits are the same alone, among others in any place, beside one of several tokens, and
 * for any order of threads and blocks. */
START_TEST(alone_and_among_others)
{
    const struct shape shape = shape_of(_i ? 5 : 2); /* groups of 3 and of 8 */
    pkv_cache *cache = open_cache(&shape, 1500, false);
    struct rows *alone[SEQUENCES];
    struct rows *together = tests_allocate(1, sizeof *together);
    static const size_t tokens[SEQUENCES] = {70, 1060, 0, 161};
    struct part parts[SEQUENCES], turned[SEQUENCES];

    for (size_t i = 0; i < SEQUENCES; i++) {
        alone[i] = tests_allocate(1, sizeof *alone[i]);
        parts[i] = (struct part){fill_sequence(cache, &shape, i, tokens[i], together), i, 1};
        cuda_host_seed(i);
        step(cache, &shape, &parts[i], 1, true, false, alone[i]);
    }
    for (size_t seed = 0; seed < 3; seed++) {
        cuda_host_seed(100 + seed);
        for (size_t i = 0; i < SEQUENCES; i++)
            turned[i] = parts[(i + seed) % SEQUENCES];
        step(cache, &shape, turned, SEQUENCES, true, false, together);
        for (size_t i = 0; i < SEQUENCES; i++)
            require_same_row(&shape, alone[(i + seed) % SEQUENCES], 0, together, i);
    }
    parts[2].tokens = 3;
    step(cache, &shape, parts, SEQUENCES, true, false, together);
    require_same_row(&shape, alone[0], 0, together, 0);
    require_same_row(&shape, alone[1], 0, together, 1);
    require_same_row(&shape, alone[3], 0, together, 5);
    for (size_t i = 0; i < SEQUENCES; i++)
        free(alone[i]);
    free(together);
    pkv_cache_close(cache);
}
END_TEST

/* Sequences that share what is stored have more pages together than the cache has room for, and
 * states of attention too. */
START_TEST(forks_beyond_the_room)
{
    const struct shape shape = shape_of(0);
    pkv_cache *cache = open_cache(&shape, 1100, false);
    struct rows *alone = tests_allocate(1, sizeof *alone);
    struct rows *together = tests_allocate(1, sizeof *together);
    struct part parts[SEQUENCES];

    parts[0] = (struct part){fill_sequence(cache, &shape, 7, 1060, alone), 7, 1};
    step(cache, &shape, parts, 1, true, false, alone);
    for (size_t i = 1; i < SEQUENCES; i++) {
        parts[i] = parts[0];
        ck_assert_int_eq(pkv_seq_fork(parts[0].seq, &parts[i].seq), PKV_OK);
    }
    step(cache, &shape, parts, SEQUENCES, true, false, together);
    for (size_t i = 0; i < SEQUENCES; i++)
        require_same_row(&shape, alone, 0, together, i);
    free(alone);
    free(together);
    pkv_cache_close(cache);
}
END_TEST

/* ---- A graph ---- */

enum { GRAPH_STEPS = 40 };

/* The next token of a sequence by a graph, which is captured first where there is none. */
static void step_by_graph(pkv_cache *cache, const struct shape *shape, const struct part *part,
                          void *stream, void **graph, struct operands *operands,
                          const pkv_step_io *on_device, struct rows *rows)
{
    const pkv_step_item item = {part->seq, 1};
    const pkv_step_io io = {.struct_size = sizeof io,
                            .q = {rows->q, PKV_F32, 0, 0},
                            .k = {rows->k, PKV_F32, 0, 0},
                            .v = {rows->v, PKV_F32, 0, 0},
                            .out = {rows->out, PKV_F32, 0, 0},
                            .lse = rows->lse};
    pkv_step *step;

    fill_row(rows, 0, shape, part->seed, pkv_seq_tokens(part->seq));
    operands_refresh(operands, &io, stream);
    ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &step), PKV_OK);
    if (*graph) {
        ck_assert_int_eq(pkv_step_replay(step), PKV_OK);
    } else {
        cuda_host_begin_capture(stream);
        ck_assert_int_eq(pkv_step_layer(step, 0, on_device), PKV_OK);
        *graph = cuda_host_end_capture(stream);
    }
    cuda_host_launch_graph(*graph, stream);
    ck_assert_int_eq(pkv_step_end(step), PKV_OK);
    operands_fetch(operands, &io);
}

/* One graph decodes while pages are completed, become factors, and a second block begins. */
START_TEST(by_a_graph)
{
    const struct shape shape = shape_of(_i ? 5 : 2);
    void *stream = cuda_host_open_stream(0);
    pkv_cache *cache = open_cache(&shape, 1100, false);
    pkv_cache *other = open_cache_on(&shape, 1100, false, stream);
    struct rows *rows = tests_allocate(1, sizeof *rows);
    struct rows *by_graph = tests_allocate(1, sizeof *by_graph);
    struct part part = {.seed = 5, .tokens = 1}, same = part;
    const pkv_step_io io = {.struct_size = sizeof io,
                            .q = {by_graph->q, PKV_F32, 0, 0},
                            .k = {by_graph->k, PKV_F32, 0, 0},
                            .v = {by_graph->v, PKV_F32, 0, 0},
                            .out = {by_graph->out, PKV_F32, 0, 0},
                            .lse = by_graph->lse};
    pkv_step_io on_device;
    struct operands *operands =
        operands_upload(&io, 1, KV_HEADS * shape.group, KV_HEADS, shape.d, &on_device);
    uint64_t digests[2];
    void *graph = NULL;

    part.seq = fill_sequence(cache, &shape, part.seed, 1000, rows);
    ck_assert_int_eq(pkv_seq_open(other, &same.seq), PKV_OK);
    while (pkv_seq_tokens(same.seq) < 1000) {
        const pkv_step_item item = {same.seq, ROWS};
        struct operands *prompt;
        pkv_step_io prompt_io = io;
        pkv_step *step;

        for (size_t t = 0; t < ROWS; t++)
            fill_row(by_graph, t, &shape, same.seed, pkv_seq_tokens(same.seq) + t);
        prompt = operands_upload(&io, ROWS, KV_HEADS * shape.group, KV_HEADS, shape.d, &prompt_io);
        prompt_io.out.data = NULL;
        prompt_io.lse = NULL;
        ck_assert_int_eq(pkv_step_begin(other, &item, 1, &step), PKV_OK);
        ck_assert_int_eq(pkv_step_layer(step, 0, &prompt_io), PKV_OK);
        ck_assert_int_eq(pkv_step_end(step), PKV_OK);
        operands_close(prompt);
    }
    for (size_t i = 0; i < GRAPH_STEPS; i++) {
        step(cache, &shape, &part, 1, true, true, rows);
        step_by_graph(other, &shape, &same, stream, &graph, operands, &on_device, by_graph);
        require_same_row(&shape, rows, 0, by_graph, 0);
    }
    ck_assert_int_eq(pkv_seq_digest(part.seq, &digests[0]), PKV_OK);
    ck_assert_int_eq(pkv_seq_digest(same.seq, &digests[1]), PKV_OK);
    ck_assert_uint_eq(digests[0], digests[1]);
    pkv_cache_close(cache);
    pkv_cache_close(other);
    operands_close(operands);
    cuda_host_close_graph(graph);
    cuda_host_close_stream(stream);
    free(rows);
    free(by_graph);
}
END_TEST

/* A graph of one item in a step of two, and the other way round: nothing is written. The other
 * one's page is to become factors. */
START_TEST(graph_of_other_items)
{
    enum { TOKENS = 3 * PAGE - 1 };
    const struct shape shape = shape_of(_i / 2 ? 5 : 2);
    const size_t captured = 1 + _i % 2, launched = 3 - captured;
    void *stream = cuda_host_open_stream(0);
    pkv_cache *cache = open_cache_on(&shape, 1100, false, stream);
    struct rows *rows = tests_allocate(1, sizeof *rows);
    struct rows *again = tests_allocate(1, sizeof *again);
    pkv_step_io io = {.struct_size = sizeof io,
                      .q = {rows->q, PKV_F32, 0, 0},
                      .k = {rows->k, PKV_F32, 0, 0},
                      .v = {rows->v, PKV_F32, 0, 0},
                      .out = {rows->out, PKV_F32, 0, 0},
                      .lse = rows->lse};
    const size_t heads = KV_HEADS * shape.group;
    pkv_step_item items[2] = {{NULL, 1}, {NULL, 1}};
    struct operands *prompts[8];
    size_t n_prompts = 0;
    pkv_step_io on_device;
    struct operands *operands;
    uint64_t before, after;
    pkv_step *step;
    void *graph;

    for (size_t i = 0; i < 2; i++) {
        ck_assert_int_eq(pkv_seq_open(cache, &items[i].seq), PKV_OK);
        while (pkv_seq_tokens(items[i].seq) < TOKENS) {
            const size_t left = TOKENS - pkv_seq_tokens(items[i].seq);
            const pkv_step_item item = {items[i].seq, left < ROWS ? left : ROWS};

            for (size_t t = 0; t < item.tokens; t++)
                fill_row(rows, t, &shape, 1 + i, pkv_seq_tokens(item.seq) + t);
            prompts[n_prompts++] =
                operands_upload(&io, item.tokens, heads, KV_HEADS, shape.d, &on_device);
            ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &step), PKV_OK);
            ck_assert_int_eq(pkv_step_layer(step, 0, &on_device), PKV_OK);
            ck_assert_int_eq(pkv_step_end(step), PKV_OK);
        }
    }
    operands = operands_upload(&io, captured, heads, KV_HEADS, shape.d, &on_device);
    ck_assert_int_eq(pkv_seq_digest(items[1].seq, &before), PKV_OK);
    ck_assert_int_eq(pkv_step_begin(cache, items, captured, &step), PKV_OK);
    cuda_host_begin_capture(stream);
    ck_assert_int_eq(pkv_step_layer(step, 0, &on_device), PKV_OK);
    graph = cuda_host_end_capture(stream);
    pkv_step_abort(step);

    ck_assert_int_eq(pkv_step_begin(cache, items, launched, &step), PKV_OK);
    ck_assert_int_eq(pkv_step_replay(step), PKV_OK);
    cuda_host_launch_graph(graph, stream);
    ck_assert_int_eq(pkv_step_end(step), PKV_ERROR_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(pkv_cache_message(cache), "step: 0 of 1 layers were computed"));
    pkv_step_abort(step);
    ck_assert_int_eq(pkv_seq_digest(items[1].seq, &after), PKV_OK);
    ck_assert_uint_eq(before, after);
    io.out.data = again->out;
    io.lse = again->lse;
    operands_fetch(operands, &io);
    ck_assert_int_eq(memcmp(again->out, rows->out, captured * heads * shape.d * sizeof *rows->out),
                     0);
    ck_assert_int_eq(memcmp(again->lse, rows->lse, captured * heads * sizeof *rows->lse), 0);
    operands_close(operands);
    while (n_prompts > 0)
        operands_close(prompts[--n_prompts]);
    pkv_cache_close(cache);
    cuda_host_close_graph(graph);
    cuda_host_close_stream(stream);
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(rows);
    free(again);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("decode");
    /* Apart for tests/cuda_races.sh. */
    TCase *blocks = tcase_create("blocks");
    TCase *shapes = tcase_create("shapes");
    TCase *graphs = tcase_create("graphs");

    tcase_add_loop_test(blocks, alone_and_among_others, 0, 2);
    tcase_add_test(blocks, forks_beyond_the_room);
    tcase_add_loop_test(shapes, as_the_cpu, 0, 16);
    tcase_add_loop_test(graphs, by_a_graph, 0, 2);
    tcase_add_loop_test(graphs, graph_of_other_items, 0, 4);
    suite_add_tcase(suite, blocks);
    suite_add_tcase(suite, shapes);
    suite_add_tcase(suite, graphs);
    return tests_run(suite);
}
