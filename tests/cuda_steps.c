/* SPDX-License-Identifier: MIT */
#include "cuda_steps.h"

#include "cache.h"
#include "cuda_host/control.h"

#include "numeric.h"
#include "tests.h" /* after message.h: see there */

#include <math.h>
#include <string.h>

struct shape shape_of(int i)
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
                          .form = PLAIN,
                          .q_scale = 1.0f};
}

pkv_cache *steps_open_cache(const struct shape *shape, size_t tokens, bool on_cpu, void *stream)
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

static uint16_t half_of(pkv_dtype dtype, float x)
{
    return dtype == PKV_BF16 ? bf16_from_f32(x) : f16_from_f32(x);
}

void steps_fill_row(struct rows *rows, size_t at, const struct shape *shape, uint64_t seed,
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

pkv_step_io steps_io(struct rows *rows, const struct shape *shape, bool attends)
{
    const size_t query = KV_HEADS * shape->group * shape->d, kv = KV_HEADS * shape->d;
    const size_t stride = query + 2 * kv + (shape->form == ODD);
    pkv_step_io io = {.struct_size = sizeof io};

    if (shape->form == PLAIN) {
        io.q = (pkv_input){rows->q, PKV_F32, 0, 0};
        io.k = (pkv_input){rows->k, PKV_F32, 0, 0};
        io.v = (pkv_input){rows->v, PKV_F32, 0, 0};
    } else {
        io.q = (pkv_input){rows->fused, shape->dtype, stride, shape->d};
        io.k = (pkv_input){rows->fused + query, shape->dtype, stride, shape->d};
        io.v = (pkv_input){rows->fused + query + kv, shape->dtype, stride, shape->d};
    }
    if (attends) {
        io.out = (pkv_output){rows->out, PKV_F32, 0, 0};
        io.lse = rows->lse;
    }
    return io;
}

void steps_take(pkv_cache *cache, const struct shape *shape, const struct part *parts, size_t n,
                bool attends, bool stays, struct rows *rows)
{
    const pkv_step_io io = steps_io(rows, shape, attends);
    pkv_step_item items[SEQUENCES];
    pkv_step *open;
    size_t at = 0;

    for (size_t i = 0; i < n; i++) {
        items[i] = (pkv_step_item){parts[i].seq, parts[i].tokens};
        for (size_t t = 0; t < parts[i].tokens; t++)
            steps_fill_row(rows, at++, shape, parts[i].seed, pkv_seq_tokens(parts[i].seq) + t);
    }
    ck_assert_int_eq(pkv_step_begin(cache, items, n, &open), PKV_OK);
    ck_assert_int_eq(tests_step_layer(open, 0, &io), PKV_OK);
    if (stays)
        ck_assert_int_eq(pkv_step_end(open), PKV_OK);
    else
        pkv_step_abort(open);
}

pkv_seq *steps_fill_sequence(pkv_cache *cache, const struct shape *shape, uint64_t seed,
                             size_t tokens, struct rows *rows)
{
    struct part part = {NULL, seed, 0};

    ck_assert_int_eq(pkv_seq_open(cache, &part.seq), PKV_OK);
    while (pkv_seq_tokens(part.seq) < tokens) {
        part.tokens = tokens - pkv_seq_tokens(part.seq);
        part.tokens = part.tokens < ROWS ? part.tokens : ROWS;
        steps_take(cache, shape, &part, 1, false, true, rows);
    }
    return part.seq;
}

void steps_errors(const struct shape *shape, const struct rows *got, const struct rows *expected,
                  size_t n, double *most, double *error, double *lse_error)
{
    const size_t heads = n * KV_HEADS * shape->group;

    *most = *error = *lse_error = 0;
    for (size_t i = 0; i < heads * shape->d; i++) {
        *most = fmax(*most, fabs((double)expected->out[i]));
        *error = fmax(*error, tests_difference(got->out[i], expected->out[i]));
    }
    for (size_t i = 0; i < heads; i++)
        *lse_error = fmax(*lse_error, tests_difference(got->lse[i], expected->lse[i]));
}

void steps_require_same(const struct shape *shape, const struct rows *a, size_t row_a,
                        const struct rows *b, size_t row_b, size_t n)
{
    const size_t heads = KV_HEADS * shape->group;

    ck_assert_int_eq(memcmp(a->out + row_a * heads * shape->d, b->out + row_b * heads * shape->d,
                            n * heads * shape->d * sizeof(float)),
                     0);
    ck_assert_int_eq(
        memcmp(a->lse + row_a * heads, b->lse + row_b * heads, n * heads * sizeof(float)), 0);
}
