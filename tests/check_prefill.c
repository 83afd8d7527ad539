/* SPDX-License-Identifier: MIT */
/* gpu/prefill.cu: steps of several tokens, whose attention has tensor cores, against the CPU's
 * kernels in plain C; and that the bits are an item's alone. */
#include "cache.h"
#include "cuda_host/control.h"

#include "numeric.h"
#include "tests.h" /* after message.h: see there */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KV_HEADS = 2, GROUP = 8, DIM = 128, ROWS = 96, SEQUENCES = 4, MOST_TOKENS = 1200 };

/* Largest magnitude of an element of K and V. */
#define LARGEST 2.0f

/*
 * What is stored is multiplied exactly; queries of another type and products with a factor are
 * split into two numbers, which leaves 2^-17 of them with bf16: see check_decode.c. P is rounded
 * once, by half a unit in the last place, and so an output by as much of the largest value, the
 * logarithm of the sum by as much.
 */
#define TOLERANCE 5e-5

static double rounding_of(pkv_dtype dtype)
{
    return dtype == PKV_BF16 ? 0x1p-9 : 0x1p-12;
}

/* How the step's operands are: all f32, each by itself; of the storage type, in rows of q, k and v;
 * the same in rows of an odd length, of which no 16 bytes are aligned. */
enum form { PLAIN, FUSED, ODD, FORMS };

struct shape {
    pkv_dtype dtype;
    size_t group, d, rank_k, rank_v;
    pkv_factors k, v;
    enum form form;
    float q_scale; /* of q beyond that of others, whose inverse goes to the softmax */
};

/* 16 shapes: both types, both d, native and INT4 factors in all pairs; odd, even and small ranks.
 */
static struct shape shape_of(int i)
{
    static const size_t groups[] = {1, 8, 3, 4, 5, 2, 7, 6};
    static const size_t ranks[][2] = {{16, 14}, {13, 7}, {1, 16}, {9, 15}, {8, 2}, {12, 11}};
    static const pkv_factors factors[] = {PKV_FACTORS_NATIVE, PKV_FACTORS_INT4};

    return (struct shape){.dtype = i & 1 ? PKV_F16 : PKV_BF16,
                          .group = groups[i / 2],
                          .d = i & 2 ? 64 : 128,
                          .rank_k = ranks[i % 6][0],
                          .rank_v = ranks[i % 6][1],
                          .k = factors[i >> 2 & 1],
                          .v = factors[i >> 3 & 1],
                          .form = (enum form)(i % FORMS),
                          /* f16 holds none of these */
                          .q_scale = i % FORMS == PLAIN && i & 1 ? 1e5f : 1.0f};
}

/* In f32, and in the form that the step takes. */
struct rows {
    float q[ROWS * KV_HEADS * GROUP * DIM];
    float k[ROWS * KV_HEADS * DIM];
    float v[ROWS * KV_HEADS * DIM];
    uint16_t fused[ROWS * (KV_HEADS * (GROUP + 2) * DIM + 1)];
    float out[ROWS * KV_HEADS * GROUP * DIM];
    float lse[ROWS * KV_HEADS * GROUP];
};

static pkv_cache *open_cache(const struct shape *shape, bool on_cpu)
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
    config.softmax_scale = 1.0f / sqrtf((float)shape->d) / shape->q_scale;
    config.max_sequences = SEQUENCES;
    config.max_tokens = MOST_TOKENS;
    config.max_step_tokens = ROWS;
    config.threads = 1;
    config.isa = on_cpu ? "generic" : NULL; /* computes in f32 */
    tests_backend = on_cpu ? &backend_cpu : &backend_cuda;
    cache = tests_open_cache(&config);
    tests_backend = &backend_cpu;
    return cache;
}

static uint16_t half_of(pkv_dtype dtype, float x)
{
    return dtype == PKV_BF16 ? bf16_from_f32(x) : f16_from_f32(x);
}

/* Row `row` of a sequence that is told from others by `seed`. */
static void fill_row(struct rows *rows, size_t at, const struct shape *shape, uint64_t seed,
                     size_t row)
{
    const size_t query = KV_HEADS * shape->group * shape->d, kv = KV_HEADS * shape->d;
    uint16_t *fused = rows->fused + at * (query + 2 * kv + (shape->form == ODD));

    tests_seed(1000 * seed + row);
    for (size_t i = 0; i < kv; i++) {
        rows->k[at * kv + i] = LARGEST * tests_random_float();
        rows->v[at * kv + i] = LARGEST * tests_random_float();
        fused[query + i] = half_of(shape->dtype, rows->k[at * kv + i]);
        fused[query + kv + i] = half_of(shape->dtype, rows->v[at * kv + i]);
    }
    for (size_t i = 0; i < query; i++) {
        rows->q[at * query + i] = 3 * shape->q_scale * tests_random_float();
        fused[i] = half_of(shape->dtype, rows->q[at * query + i]);
    }
}

static pkv_step_io io_of(struct rows *rows, const struct shape *shape)
{
    const size_t query = KV_HEADS * shape->group * shape->d, kv = KV_HEADS * shape->d;
    const size_t stride = query + 2 * kv + (shape->form == ODD);

    if (shape->form == PLAIN)
        return (pkv_step_io){.struct_size = sizeof(pkv_step_io),
                             .q = {rows->q, PKV_F32, 0, 0},
                             .k = {rows->k, PKV_F32, 0, 0},
                             .v = {rows->v, PKV_F32, 0, 0}};
    return (pkv_step_io){.struct_size = sizeof(pkv_step_io),
                         .q = {rows->fused, shape->dtype, stride, shape->d},
                         .k = {rows->fused + query, shape->dtype, stride, shape->d},
                         .v = {rows->fused + query + kv, shape->dtype, stride, shape->d}};
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
    pkv_step_io io = io_of(rows, shape);
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
                    size_t cached, size_t tokens)
{
    const size_t heads = tokens * KV_HEADS * shape->group;
    const bool coded = shape->k == PKV_FACTORS_INT4 || shape->v == PKV_FACTORS_INT4;
    const double rounding = rounding_of(shape->dtype);
    double most = 0, error = 0, lse_error = 0;

    for (size_t i = 0; i < heads * shape->d; i++) {
        require(isfinite(got->out[i]));
        most = fmax(most, fabs((double)expected->out[i]));
        error = fmax(error, fabs((double)got->out[i] - (double)expected->out[i]));
    }
    for (size_t i = 0; i < heads; i++)
        lse_error = fmax(lse_error, fabs((double)got->lse[i] - (double)expected->lse[i]));
    printf("%zu + %zu tokens: error %.2g, of lse %.2g\n", cached, tokens, error / most, lse_error);
    require_msg(error <= (coded ? 1e-2 : 5e-3) * most &&
                    error <= TOLERANCE * most + rounding * (double)LARGEST &&
                    lse_error <= TOLERANCE + rounding,
                "type %d, group %zu, d %zu, ranks %zu %zu, codes %d %d, form %d, %zu + %zu tokens: "
                "error %g, of lse %g",
                shape->dtype, shape->group, shape->d, shape->rank_k, shape->rank_v, shape->k,
                shape->v, shape->form, cached, tokens, error / most, lse_error);
}

/* Tokens before and in a step: within one tile and warp; up to and across the ends of tiles, warps
 * and blocks; before any page, within the first one, in the window, with factors. */
static const size_t lengths[][2] = {{0, 2},   {0, 37},  {1, 3},    {31, 64}, {32, 33},
                                    {64, 96}, {205, 2}, {205, 70}, {1100, 5}};

#define LENGTHS (sizeof lengths / sizeof *lengths)

START_TEST(as_the_cpu)
{
    const struct shape shape = shape_of(_i);
    struct rows *got = tests_allocate(1, sizeof *got);
    struct rows *expected = tests_allocate(1, sizeof *expected);

    cuda_host_seed((uint64_t)_i);
    for (size_t i = 0; i < LENGTHS; i++) {
        struct part part = {.seed = (uint64_t)_i, .tokens = lengths[i][1]};
        pkv_cache *cache, *other;

        if (i % 3 != (size_t)_i % 3 && _i != 0)
            continue; /* which take their time */
        cache = open_cache(&shape, false);
        other = open_cache(&shape, true);
        part.seq = fill_sequence(cache, &shape, part.seed, lengths[i][0], got);
        step(cache, &shape, &part, 1, true, false, got);
        part.seq = fill_sequence(other, &shape, part.seed, lengths[i][0], expected);
        step(other, &shape, &part, 1, true, false, expected);
        compare(&shape, got, expected, lengths[i][0], lengths[i][1]);
        pkv_cache_close(cache);
        pkv_cache_close(other);
    }
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(got);
    free(expected);
}
END_TEST

/* Bit by bit, `n` rows of each. */
static void require_same_rows(const struct shape *shape, const struct rows *a, size_t row_a,
                              const struct rows *b, size_t row_b, size_t n)
{
    const size_t heads = KV_HEADS * shape->group;

    ck_assert_int_eq(memcmp(a->out + row_a * heads * shape->d, b->out + row_b * heads * shape->d,
                            n * heads * shape->d * sizeof(float)),
                     0);
    ck_assert_int_eq(
        memcmp(a->lse + row_a * heads, b->lse + row_b * heads, n * heads * sizeof(float)), 0);
}

/* An item's bits are the same alone, among others in any place, beside one of one token, and for
 * any order of threads and blocks. With groups of 8 all warps of a block have rows. */
START_TEST(alone_and_among_others)
{
    static const size_t cached[SEQUENCES] = {70, 0, 161, 224};
    static const size_t tokens[SEQUENCES] = {3, 40, 1, 19};
    const struct shape shape = shape_of(2 + _i);
    pkv_cache *cache = open_cache(&shape, false);
    struct rows *alone[SEQUENCES];
    struct rows *together = tests_allocate(1, sizeof *together);
    struct part parts[SEQUENCES], turned[SEQUENCES];

    for (size_t i = 0; i < SEQUENCES; i++) {
        alone[i] = tests_allocate(1, sizeof *alone[i]);
        parts[i] =
            (struct part){fill_sequence(cache, &shape, i, cached[i], together), i, tokens[i]};
        cuda_host_seed(i);
        step(cache, &shape, &parts[i], 1, true, false, alone[i]);
    }
    for (size_t turn = 0; turn < SEQUENCES; turn++) {
        size_t row = 0;

        cuda_host_seed(100 + turn);
        for (size_t i = 0; i < SEQUENCES; i++)
            turned[i] = parts[(i + turn) % SEQUENCES];
        step(cache, &shape, turned, SEQUENCES, true, false, together);
        for (size_t i = 0; i < SEQUENCES; i++) {
            require_same_rows(&shape, alone[turned[i].seed], 0, together, row, turned[i].tokens);
            row += turned[i].tokens;
        }
    }
    for (size_t i = 0; i < SEQUENCES; i++)
        free(alone[i]);
    free(together);
    pkv_cache_close(cache);
}
END_TEST

/* A row does not see those behind it: its bits are the same with and without them. */
START_TEST(rows_see_none_behind)
{
    const struct shape shape = shape_of(_i);
    pkv_cache *cache = open_cache(&shape, false);
    struct rows *few = tests_allocate(1, sizeof *few);
    struct rows *many = tests_allocate(1, sizeof *many);
    struct part part = {.seed = 3};

    part.seq = fill_sequence(cache, &shape, part.seed, 100, many);
    part.tokens = 80;
    step(cache, &shape, &part, 1, true, false, many);
    for (part.tokens = 2; part.tokens < 80; part.tokens = 2 * part.tokens + 1) {
        step(cache, &shape, &part, 1, true, false, few);
        require_same_rows(&shape, few, 0, many, 0, part.tokens);
    }
    free(few);
    free(many);
    pkv_cache_close(cache);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("prefill");
    /* Apart for tests/cuda_races.sh. */
    TCase *blocks = tcase_create("blocks");
    TCase *shapes = tcase_create("shapes");

    tcase_add_loop_test(blocks, alone_and_among_others, 0, 2);
    tcase_add_loop_test(shapes, as_the_cpu, 0, 16);
    tcase_add_loop_test(shapes, rows_see_none_behind, 0, 2);
    suite_add_tcase(suite, blocks);
    suite_add_tcase(suite, shapes);
    return tests_run(suite);
}
