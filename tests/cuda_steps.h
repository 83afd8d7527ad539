/* SPDX-License-Identifier: MIT */
/* What the suites of the kernels with tensor cores share: caches of many shapes, on the device and
 * on the CPU in plain C, and steps of rows that a seed and a position tell. */
#ifndef PUZZLEKV_TESTS_CUDA_STEPS_H
#define PUZZLEKV_TESTS_CUDA_STEPS_H

#include "puzzlekv.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KV_HEADS = 2, GROUP = 8, DIM = 128, PAGE = 32, ROWS = 96, SEQUENCES = 4 };

/* Largest magnitude of an element of K and V. */
#define LARGEST 2.0f

/*
 * What is stored is multiplied exactly. Queries of another type, products with one factor and
 * weights that are not rounded to one number are split into two of 16 bits, which leaves 2^-17 of
 * them with bf16: 3e-5 of a score of 4, and as much of an output.
 */
#define TOLERANCE 5e-5

/* How a step's operands are: all f32, each by itself; of the storage type, in rows of q, k and v;
 * the same in rows of an odd length, of which no 16 bytes are aligned. */
enum form { PLAIN, FUSED, ODD, FORMS };

struct shape {
    pkv_dtype dtype;
    size_t group, d, rank_k, rank_v;
    pkv_factors k, v;
    enum form form;
    float q_scale; /* of q beyond that of others, whose inverse goes to the softmax */
};

/* 16 shapes: both types, both d, native and INT4 factors in all pairs; odd, even and small ranks;
 * operands that are plain. */
#define SHAPES 16
struct shape shape_of(int i);

/* In f32, and in the form that the step takes. */
struct rows {
    float q[ROWS * KV_HEADS * GROUP * DIM];
    float k[ROWS * KV_HEADS * DIM];
    float v[ROWS * KV_HEADS * DIM];
    uint16_t fused[ROWS * (KV_HEADS * (GROUP + 2) * DIM + 1)];
    float out[ROWS * KV_HEADS * GROUP * DIM];
    float lse[ROWS * KV_HEADS * GROUP];
};

/* A cache of one layer for `tokens` tokens; `stream` NULL: one of its own. */
pkv_cache *steps_open_cache(const struct shape *shape, size_t tokens, bool on_cpu, void *stream);

/* Row `at`: row `row` of a sequence that is told from others by `seed`. */
void steps_fill_row(struct rows *rows, size_t at, const struct shape *shape, uint64_t seed,
                    size_t row);

/* A step's operands. */
pkv_step_io steps_io(struct rows *rows, const struct shape *shape, bool attends);

struct part {
    pkv_seq *seq;
    uint64_t seed;
    size_t tokens;
};

/* A step of several sequences' next rows, which are rows of `rows` in this order. */
void steps_take(pkv_cache *cache, const struct shape *shape, const struct part *parts, size_t n,
                bool attends, bool stays, struct rows *rows);

pkv_seq *steps_fill_sequence(pkv_cache *cache, const struct shape *shape, uint64_t seed,
                             size_t tokens, struct rows *rows);

/* The largest error of `n` rows of output, in parts of the largest magnitude, and of their lse. */
void steps_errors(const struct shape *shape, const struct rows *got, const struct rows *expected,
                  size_t n, double *most, double *error, double *lse_error);

/* Bit by bit, n rows of each. */
void steps_require_same(const struct shape *shape, const struct rows *a, size_t row_a,
                        const struct rows *b, size_t row_b, size_t n);

#endif
