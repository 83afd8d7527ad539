/* SPDX-License-Identifier: MIT */
/* gpu/prefill.cu: steps of several tokens, whose attention has tensor cores, against the CPU's
 * kernels in plain C; and that the bits are an item's alone. */
#include "cuda_host/control.h"
#include "cuda_steps.h"

#include "numeric.h"
#include "tests.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TOKENS = 1200 };

/* P is rounded once, by half a unit in the last place, and so an output by as much of the largest
 * value, the logarithm of the sum by as much. */
static double rounding_of(pkv_dtype dtype)
{
    return dtype == PKV_BF16 ? 0x1p-9 : 0x1p-12;
}

/* Operands in all forms. Where they are f32, q may be such that f16 holds none of it. */
static struct shape shape_in_form(int i)
{
    struct shape shape = shape_of(i);

    shape.form = (enum form)(i % FORMS);
    if (shape.form == PLAIN && shape.dtype == PKV_F16)
        shape.q_scale = 1e5f;
    return shape;
}

static void compare(const struct shape *shape, const struct rows *got, const struct rows *expected,
                    size_t cached, size_t tokens)
{
    const bool coded = shape->k == PKV_FACTORS_INT4 || shape->v == PKV_FACTORS_INT4;
    const double rounding = rounding_of(shape->dtype);
    double most, error, lse_error;

    steps_errors(shape, got, expected, tokens, &most, &error, &lse_error);
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
    const struct shape shape = shape_in_form(_i);
    struct rows *got = tests_allocate(1, sizeof *got);
    struct rows *expected = tests_allocate(1, sizeof *expected);

    cuda_host_seed((uint64_t)_i);
    for (size_t i = 0; i < LENGTHS; i++) {
        struct part part = {.seed = (uint64_t)_i, .tokens = lengths[i][1]};
        pkv_cache *cache, *other;

        if (i % 3 != (size_t)_i % 3 && _i != 0)
            continue; /* which take their time */
        cache = steps_open_cache(&shape, MOST_TOKENS, false, NULL);
        other = steps_open_cache(&shape, MOST_TOKENS, true, NULL);
        part.seq = steps_fill_sequence(cache, &shape, part.seed, lengths[i][0], got);
        steps_take(cache, &shape, &part, 1, true, false, got);
        part.seq = steps_fill_sequence(other, &shape, part.seed, lengths[i][0], expected);
        steps_take(other, &shape, &part, 1, true, false, expected);
        compare(&shape, got, expected, lengths[i][0], lengths[i][1]);
        pkv_cache_close(cache);
        pkv_cache_close(other);
    }
    ck_assert_uint_eq(cuda_host_memory(), 0);
    free(got);
    free(expected);
}
END_TEST

/* An item's bits are the same alone, among others in any place, beside one of one token, and for
 * any order of threads and blocks. With groups of 8 all warps of a block have rows. */
START_TEST(alone_and_among_others)
{
    static const size_t cached[SEQUENCES] = {70, 0, 161, 224};
    static const size_t tokens[SEQUENCES] = {3, 40, 1, 19};
    const struct shape shape = shape_in_form(2 + _i);
    pkv_cache *cache = steps_open_cache(&shape, MOST_TOKENS, false, NULL);
    struct rows *alone[SEQUENCES];
    struct rows *together = tests_allocate(1, sizeof *together);
    struct part parts[SEQUENCES], turned[SEQUENCES];

    for (size_t i = 0; i < SEQUENCES; i++) {
        alone[i] = tests_allocate(1, sizeof *alone[i]);
        parts[i] =
            (struct part){steps_fill_sequence(cache, &shape, i, cached[i], together), i, tokens[i]};
        cuda_host_seed(i);
        steps_take(cache, &shape, &parts[i], 1, true, false, alone[i]);
    }
    for (size_t turn = 0; turn < SEQUENCES; turn++) {
        size_t row = 0;

        cuda_host_seed(100 + turn);
        for (size_t i = 0; i < SEQUENCES; i++)
            turned[i] = parts[(i + turn) % SEQUENCES];
        steps_take(cache, &shape, turned, SEQUENCES, true, false, together);
        for (size_t i = 0; i < SEQUENCES; i++) {
            steps_require_same(&shape, alone[turned[i].seed], 0, together, row, turned[i].tokens);
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
    const struct shape shape = shape_in_form(_i);
    pkv_cache *cache = steps_open_cache(&shape, MOST_TOKENS, false, NULL);
    struct rows *few = tests_allocate(1, sizeof *few);
    struct rows *many = tests_allocate(1, sizeof *many);
    struct part part = {.seed = 3};

    part.seq = steps_fill_sequence(cache, &shape, part.seed, 100, many);
    part.tokens = 80;
    steps_take(cache, &shape, &part, 1, true, false, many);
    for (part.tokens = 2; part.tokens < 80; part.tokens = 2 * part.tokens + 1) {
        steps_take(cache, &shape, &part, 1, true, false, few);
        steps_require_same(&shape, few, 0, many, 0, part.tokens);
    }
    free(few);
    free(many);
    pkv_cache_close(cache);
}
END_TEST

/* Outputs of each type in rows of which 16 bytes are aligned, and with gaps of which none are:
 * those of f32, rounded, and nothing beside them. */
START_TEST(types_of_outputs)
{
    enum { TOKENS = 37 };
    const struct shape shape = shape_in_form(_i / 6 ? 5 : 2);
    const pkv_dtype type = (pkv_dtype)(_i % 3);
    const size_t heads = KV_HEADS * shape.group, gap = _i / 3 % 2 ? 3 : 8;
    const size_t head_stride = shape.d + gap, token_stride = heads * head_stride + gap;
    const size_t bytes = type == PKV_F32 ? sizeof(float) : sizeof(uint16_t);
    pkv_cache *cache = steps_open_cache(&shape, MOST_TOKENS, false, NULL);
    struct rows *rows = tests_allocate(1, sizeof *rows);
    struct part part = {.seed = 9, .tokens = TOKENS};
    pkv_step_io io = steps_io(rows, &shape, false);
    char *out = tests_allocate(TOKENS * token_stride, bytes);
    char *expected = tests_allocate(TOKENS * token_stride, bytes);
    pkv_step *step;

    part.seq = steps_fill_sequence(cache, &shape, part.seed, 70, rows);
    steps_take(cache, &shape, &part, 1, true, false, rows);
    memset(out, 0x5a, TOKENS * token_stride * bytes);
    memset(expected, 0x5a, TOKENS * token_stride * bytes);
    for (size_t i = 0; i < TOKENS * heads * shape.d; i++) {
        const float x = rows->out[i];
        const size_t at =
            i / (heads * shape.d) * token_stride + i / shape.d % heads * head_stride + i % shape.d;
        const uint16_t half = type == PKV_F16 ? f16_from_f32(x) : bf16_from_f32(x);

        memcpy(expected + at * bytes, type == PKV_F32 ? (const void *)&x : &half, bytes);
    }
    io.out = (pkv_output){out, type, token_stride, head_stride};
    ck_assert_int_eq(pkv_step_begin(cache, &(pkv_step_item){part.seq, TOKENS}, 1, &step), PKV_OK);
    ck_assert_int_eq(tests_step_layer(step, 0, &io), PKV_OK);
    pkv_step_abort(step);
    require(memcmp(out, expected, TOKENS * token_stride * bytes) == 0);
    free(out);
    free(expected);
    free(rows);
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
    tcase_add_loop_test(shapes, as_the_cpu, 0, SHAPES);
    tcase_add_loop_test(shapes, rows_see_none_behind, 0, 2);
    tcase_add_loop_test(shapes, types_of_outputs, 0, 12);
    suite_add_tcase(suite, blocks);
    suite_add_tcase(suite, shapes);
    return tests_run(suite);
}
