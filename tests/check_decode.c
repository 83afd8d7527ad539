/* SPDX-License-Identifier: MIT */
/* gpu/decode.cu: the kernel with tensor cores against the CPU's in plain C; and that its bits are
 * an item's alone. */
#include "cuda_host/control.h"
#include "cuda_host/operands.h"
#include "cuda_steps.h"

#include "tests.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void compare(const struct shape *shape, const struct rows *got, const struct rows *expected,
                    size_t tokens)
{
    double most, error, lse_error;

    steps_errors(shape, got, expected, 1, &most, &error, &lse_error);
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
        cache = steps_open_cache(&shape, 1200, false, NULL);
        other = steps_open_cache(&shape, 1200, true, NULL);
        part.seq = steps_fill_sequence(cache, &shape, part.seed, lengths[i], tuned);
        part.tokens = 1;
        steps_take(cache, &shape, &part, 1, true, false, tuned);
        ck_assert_int_eq(pkv_seq_digest(part.seq, &digests[0]), PKV_OK);
        part.seq = steps_fill_sequence(other, &shape, part.seed, lengths[i], on_cpu);
        steps_take(other, &shape, &part, 1, true, false, on_cpu);
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

/* An item's bits are the same alone, among others in any place, beside one of several tokens, and
 * for any order of threads and blocks. */
START_TEST(alone_and_among_others)
{
    const struct shape shape = shape_of(_i ? 5 : 2); /* groups of 3 and of 8 */
    pkv_cache *cache = steps_open_cache(&shape, 1500, false, NULL);
    struct rows *alone[SEQUENCES];
    struct rows *together = tests_allocate(1, sizeof *together);
    static const size_t tokens[SEQUENCES] = {70, 1060, 0, 161};
    struct part parts[SEQUENCES], turned[SEQUENCES];

    for (size_t i = 0; i < SEQUENCES; i++) {
        alone[i] = tests_allocate(1, sizeof *alone[i]);
        parts[i] = (struct part){steps_fill_sequence(cache, &shape, i, tokens[i], together), i, 1};
        cuda_host_seed(i);
        steps_take(cache, &shape, &parts[i], 1, true, false, alone[i]);
    }
    for (size_t seed = 0; seed < 3; seed++) {
        cuda_host_seed(100 + seed);
        for (size_t i = 0; i < SEQUENCES; i++)
            turned[i] = parts[(i + seed) % SEQUENCES];
        steps_take(cache, &shape, turned, SEQUENCES, true, false, together);
        for (size_t i = 0; i < SEQUENCES; i++)
            steps_require_same(&shape, alone[(i + seed) % SEQUENCES], 0, together, i, 1);
    }
    parts[2].tokens = 3;
    steps_take(cache, &shape, parts, SEQUENCES, true, false, together);
    steps_require_same(&shape, alone[0], 0, together, 0, 1);
    steps_require_same(&shape, alone[1], 0, together, 1, 1);
    steps_require_same(&shape, alone[3], 0, together, 5, 1);
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
    pkv_cache *cache = steps_open_cache(&shape, 1100, false, NULL);
    struct rows *alone = tests_allocate(1, sizeof *alone);
    struct rows *together = tests_allocate(1, sizeof *together);
    struct part parts[SEQUENCES];

    parts[0] = (struct part){steps_fill_sequence(cache, &shape, 7, 1060, alone), 7, 1};
    steps_take(cache, &shape, parts, 1, true, false, alone);
    for (size_t i = 1; i < SEQUENCES; i++) {
        parts[i] = parts[0];
        ck_assert_int_eq(pkv_seq_fork(parts[0].seq, &parts[i].seq), PKV_OK);
    }
    steps_take(cache, &shape, parts, SEQUENCES, true, false, together);
    for (size_t i = 0; i < SEQUENCES; i++)
        steps_require_same(&shape, alone, 0, together, i, 1);
    free(alone);
    free(together);
    pkv_cache_close(cache);
}
END_TEST

/* ---- A graph ---- */

enum { GRAPH_STEPS = 40, GRAPH_ITEMS = 2 };

/* A sequence whose steps have operands on the device. */
static pkv_seq *fill_on_stream(pkv_cache *cache, const struct shape *shape, uint64_t seed,
                               size_t tokens, struct rows *rows)
{
    const pkv_step_io io = steps_io(rows, shape, false);
    pkv_seq *seq;

    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    for (size_t done = 0, some; done < tokens; done += some) {
        struct operands *operands;
        pkv_step_io on_device;
        pkv_step *step;

        some = tokens - done < ROWS ? tokens - done : ROWS;
        for (size_t t = 0; t < some; t++)
            steps_fill_row(rows, t, shape, seed, done + t);
        operands =
            operands_upload(&io, some, KV_HEADS * shape->group, KV_HEADS, shape->d, &on_device);
        ck_assert_int_eq(pkv_step_begin(cache, &(pkv_step_item){seq, some}, 1, &step), PKV_OK);
        ck_assert_int_eq(pkv_step_layer(step, 0, &on_device), PKV_OK);
        ck_assert_int_eq(pkv_step_end(step), PKV_OK);
        operands_close(operands);
    }
    return seq;
}

/* The next token of sequences by a graph, which is captured first where there is none. */
static void step_by_graph(pkv_cache *cache, const struct shape *shape, const struct part *parts,
                          void *stream, void **graph, struct operands *operands,
                          const pkv_step_io *on_device, struct rows *rows)
{
    const pkv_step_io io = steps_io(rows, shape, true);
    pkv_step_item items[GRAPH_ITEMS];
    pkv_step *step;

    for (size_t i = 0; i < GRAPH_ITEMS; i++) {
        items[i] = (pkv_step_item){parts[i].seq, 1};
        steps_fill_row(rows, i, shape, parts[i].seed, pkv_seq_tokens(parts[i].seq));
    }
    operands_refresh(operands, &io, stream);
    ck_assert_int_eq(pkv_step_begin(cache, items, GRAPH_ITEMS, &step), PKV_OK);
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

/* One graph decodes while pages are completed, become factors, and a second block begins, of which
 * the next sequence's blocks come later. */
START_TEST(by_a_graph)
{
    static const size_t tokens[GRAPH_ITEMS] = {985, 20};
    const struct shape shape = shape_of(_i ? 5 : 2);
    void *stream = cuda_host_open_stream(0);
    pkv_cache *cache = steps_open_cache(&shape, 1200, false, NULL);
    pkv_cache *other = steps_open_cache(&shape, 1200, false, stream);
    struct rows *rows = tests_allocate(1, sizeof *rows);
    struct rows *by_graph = tests_allocate(1, sizeof *by_graph);
    struct part parts[GRAPH_ITEMS], same[GRAPH_ITEMS];
    const pkv_step_io io = steps_io(by_graph, &shape, true);
    pkv_step_io on_device;
    struct operands *operands =
        operands_upload(&io, GRAPH_ITEMS, KV_HEADS * shape.group, KV_HEADS, shape.d, &on_device);
    void *graph = NULL;

    for (size_t i = 0; i < GRAPH_ITEMS; i++) {
        parts[i] =
            (struct part){steps_fill_sequence(cache, &shape, 5 + i, tokens[i], rows), 5 + i, 1};
        same[i] =
            (struct part){fill_on_stream(other, &shape, 5 + i, tokens[i], by_graph), 5 + i, 1};
    }
    for (size_t i = 0; i < GRAPH_STEPS; i++) {
        steps_take(cache, &shape, parts, GRAPH_ITEMS, true, true, rows);
        step_by_graph(other, &shape, same, stream, &graph, operands, &on_device, by_graph);
        steps_require_same(&shape, rows, 0, by_graph, 0, GRAPH_ITEMS);
    }
    for (size_t i = 0; i < GRAPH_ITEMS; i++) {
        uint64_t digests[2];

        ck_assert_int_eq(pkv_seq_digest(parts[i].seq, &digests[0]), PKV_OK);
        ck_assert_int_eq(pkv_seq_digest(same[i].seq, &digests[1]), PKV_OK);
        ck_assert_uint_eq(digests[0], digests[1]);
    }
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
    pkv_cache *cache = steps_open_cache(&shape, 1100, false, stream);
    struct rows *rows = tests_allocate(1, sizeof *rows);
    struct rows *again = tests_allocate(1, sizeof *again);
    pkv_step_io io = steps_io(rows, &shape, true);
    const size_t heads = KV_HEADS * shape.group;
    pkv_step_item items[2] = {{NULL, 1}, {NULL, 1}};
    pkv_step_io on_device;
    struct operands *operands;
    uint64_t before, after;
    pkv_step *step;
    void *graph;

    for (size_t i = 0; i < 2; i++)
        items[i].seq = fill_on_stream(cache, &shape, 1 + i, TOKENS, rows);
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
    tcase_add_loop_test(shapes, as_the_cpu, 0, SHAPES);
    tcase_add_loop_test(graphs, by_a_graph, 0, 2);
    tcase_add_loop_test(graphs, graph_of_other_items, 0, 4);
    suite_add_tcase(suite, blocks);
    suite_add_tcase(suite, shapes);
    suite_add_tcase(suite, graphs);
    return tests_run(suite);
}
