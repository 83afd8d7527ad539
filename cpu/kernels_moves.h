/* SPDX-License-Identifier: MIT */
/* The kernels that only move and round elements: a part of kernels_body.h, which includes it. */

#include "interleave.h"

#define QUADS (LANES / 4)

typedef float quad_f32 __attribute__((vector_size(16)));
typedef float octet_f32 __attribute__((vector_size(32)));

INLINE quad_f32 load_quad(const float *p)
{
    quad_f32 v;

    memcpy(&v, p, sizeof v);
    return v;
}

INLINE octet_f32 load_octet(const float *p, const float *q)
{
    return __builtin_shufflevector(load_quad(p), load_quad(q), 0, 1, 2, 3, 4, 5, 6, 7);
}

/* A vector of QUADS quads that lie anywhere. */
INLINE vector_f32 load_quads(const float *const p[QUADS])
{
#if LANES == 4
    return load_quad(p[0]);
#elif LANES == 8
    return load_octet(p[0], p[1]);
#else
    return __builtin_shufflevector(load_octet(p[0], p[1]), load_octet(p[2], p[3]), 0, 1, 2, 3, 4, 5,
                                   6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#endif
}

/* Elements i, j, k, l of each quad of a, or LANES more of each quad of b. */
#if LANES == 4
#define IN_QUADS(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#elif LANES == 8
#define IN_QUADS(a, b, i, j, k, l)                                                                 \
    __builtin_shufflevector(a, b, i, j, k, l, i + 4, j + 4, k + 4, l + 4)
#else
#define IN_QUADS(a, b, i, j, k, l)                                                                 \
    __builtin_shufflevector(a, b, i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8,     \
                            l + 8, i + 12, j + 12, k + 12, l + 12)
#endif

/* LANES rows, four columns: each column a vector. */
INLINE void turn(const float *from, size_t stride, vector_f32 column[4])
{
    vector_f32 row[4], even[2], odd[2];

    UNROLL
    for (size_t i = 0; i < 4; i++) {
        const float *p[QUADS];

        UNROLL
        for (size_t q = 0; q < QUADS; q++)
            p[q] = from + (4 * q + i) * stride;
        row[i] = load_quads(p);
    }
    even[0] = IN_QUADS(row[0], row[1], 0, LANES, 1, LANES + 1);
    even[1] = IN_QUADS(row[2], row[3], 0, LANES, 1, LANES + 1);
    odd[0] = IN_QUADS(row[0], row[1], 2, LANES + 2, 3, LANES + 3);
    odd[1] = IN_QUADS(row[2], row[3], 2, LANES + 2, 3, LANES + 3);
    column[0] = IN_QUADS(even[0], even[1], 0, 1, LANES, LANES + 1);
    column[1] = IN_QUADS(even[0], even[1], 2, 3, LANES + 2, LANES + 3);
    column[2] = IN_QUADS(odd[0], odd[1], 0, 1, LANES, LANES + 1);
    column[3] = IN_QUADS(odd[0], odd[1], 2, 3, LANES + 2, LANES + 3);
}

INLINE void transpose_tile(const float *from, size_t from_stride, float *to, size_t to_stride)
{
    vector_f32 column[4];

    turn(from, from_stride, column);
    UNROLL
    for (size_t j = 0; j < 4; j++)
        save(to + j * to_stride, column[j]);
}

/* Tiles at the edges take what their neighbours have taken already. */
static void transpose(size_t rows, size_t columns, const float *from, size_t from_stride, float *to,
                      size_t to_stride)
{
    if (rows < LANES || columns < 4) {
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < columns; j++)
                to[j * to_stride + i] = from[i * from_stride + j];
        return;
    }
    for (size_t at = 0; at < rows; at += LANES) {
        size_t i = at + LANES <= rows ? at : rows - LANES;
        size_t j = 0;

        for (; j + 4 <= columns; j += 4)
            transpose_tile(from + i * from_stride + j, from_stride, to + j * to_stride + i,
                           to_stride);
        if (j < columns) {
            j = columns - 4;
            transpose_tile(from + i * from_stride + j, from_stride, to + j * to_stride + i,
                           to_stride);
        }
    }
}

/* The upper half of each lane is x in bf16. A lane of `bad` gets its sign where that is not finite:
 * from 0x7f7f8000 on magnitudes round to infinity. */
INLINE vector_u32 round_to_bf16(vector_f32 x, vector_u32 *bad)
{
    vector_u32 bits = (vector_u32)x;

    *bad |= (bits & 0x7fffffffu) + 0x00808000u;
    return bits + 0x7fffu + (bits >> 16 & 1);
}

INLINE vector_f32 pair_up(vector_f32 even, vector_f32 odd, vector_u32 *bad)
{
    vector_u32 low = round_to_bf16(even, bad) >> 16;

    return (vector_f32)(low | (round_to_bf16(odd, bad) & 0xffff0000u));
}

/* One pair of rows. What is left of them, less than a vector, is in quads that overlap. */
INLINE void pair_rows(size_t n, const float *even, const float *odd, char *to, vector_u32 *bad)
{
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        vector_f32 pair = pair_up(load(even + i), load(odd + i), bad);

        memcpy(to + 4 * i, &pair, sizeof pair);
    }
    if (i < n && n >= 4) {
        const float *p[QUADS], *q[QUADS];
        vector_f32 pair;

        UNROLL
        for (size_t t = 0; t < QUADS; t++) {
            size_t at = i + 4 * t + 4 <= n ? i + 4 * t : n - 4;

            p[t] = even + at;
            q[t] = odd + at;
        }
        pair = pair_up(load_quads(p), load_quads(q), bad);
        UNROLL
        for (size_t t = 0; t < QUADS; t++)
            memcpy(to + 4 * (p[t] - even), (char *)&pair + 16 * t, 16);
        i = n;
    }
    for (; i < n; i++) {
        vector_f32 pair = pair_up(splat(even[i]), splat(odd[i]), bad);

        memcpy(to + 4 * i, &pair, 4);
    }
}

INLINE bool any_sign(vector_u32 v)
{
    uint32_t any = 0;

    for (size_t t = 0; t < LANES; t++)
        any |= v[t];
    return any >> 31 != 0;
}

static bool pairs_from_f32(size_t rows, size_t n, const float *from, size_t from_stride, void *to,
                           size_t to_stride)
{
    static const float zeros[PANEL];
    vector_u32 bad = {0};
    size_t i = 0;

    for (; i + 2 <= rows; i += 2)
        pair_rows(n, from + i * from_stride, from + (i + 1) * from_stride,
                  (char *)to + i / 2 * to_stride * 4, &bad);
    if (i < rows)
        pair_rows(n, from + i * from_stride, zeros, (char *)to + i / 2 * to_stride * 4, &bad);
    return !any_sign(bad);
}

/* Every other element of a, then of b. */
#if LANES == 4
#define EVERY_OTHER(a, b, first)                                                                   \
    __builtin_shufflevector(a, b, first, 2 + first, 4 + first, 6 + first)
#elif LANES == 8
#define EVERY_OTHER(a, b, first)                                                                   \
    __builtin_shufflevector(a, b, first, 2 + first, 4 + first, 6 + first, 8 + first, 10 + first,   \
                            12 + first, 14 + first)
#else
#define EVERY_OTHER(a, b, first)                                                                   \
    __builtin_shufflevector(a, b, first, 2 + first, 4 + first, 6 + first, 8 + first, 10 + first,   \
                            12 + first, 14 + first, 16 + first, 18 + first, 20 + first,            \
                            22 + first, 24 + first, 26 + first, 28 + first, 30 + first)
#endif

/* Ones, then zeros: what counts of a row that ends after n lanes is where ones begin 2 LANES - n
 * from the front. */
static const uint32_t end_of_row[4 * LANES] = {[0 ... 2 * LANES - 1] = UINT32_MAX};

INLINE vector_f32 load_masked(const float *p, vector_u32 mask)
{
    return (vector_f32)((vector_u32)load(p) & mask);
}

/* Elements of a row that become pairs lie side by side, and so pairs are what is transposed. */
static bool pairs_from_columns(size_t rows, size_t n, const float *from, size_t from_stride,
                               void *to, size_t to_stride)
{
    const size_t width = n < LANES ? n : LANES;
    float tile[LANES * LANES];
    vector_u32 bad = {0};

    for (size_t i = 0; i < rows; i += 2 * LANES) {
        const size_t some = rows - i < 2 * LANES ? rows - i : 2 * LANES;
        const size_t second = some > LANES ? LANES : 0;
        const vector_u32 mask = load_pairs((const char *)(end_of_row + 2 * LANES - some), 0);
        const vector_u32 mask_second = load_pairs((const char *)(end_of_row + 3 * LANES - some), 0);

        for (size_t at = 0; at < n; at += LANES) {
            const size_t j = at + width <= n ? at : n - width;
            const float *row = from + j * from_stride + i;

            for (size_t t = 0; t < width; t++, row += from_stride) {
                vector_f32 a = load_masked(row, mask);
                vector_f32 b = load_masked(row + second, mask_second);

                save(tile + t * LANES, pair_up(EVERY_OTHER(a, b, 0), EVERY_OTHER(a, b, 1), &bad));
            }
            transpose(width, (some + 1) / 2, tile, LANES, (float *)to + i / 2 * to_stride + j,
                      to_stride);
        }
    }
    return !any_sign(bad);
}

/* The elements of one row, which lie in the lower halves of pairs, or the upper ones. */
INLINE void widen_row(size_t n, const char *from, bool upper, float *to)
{
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        vector_u32 pair;

        memcpy(&pair, from + 4 * i, sizeof pair);
        save(to + i, (vector_f32)(upper ? pair & 0xffff0000u : pair << 16));
    }
    for (; i < n; i++) {
        uint32_t pair;

        memcpy(&pair, from + 4 * i, sizeof pair);
        to[i] = f32_from_bits(upper ? pair & 0xffff0000u : pair << 16);
    }
}

static void pairs_to_f32(size_t rows, size_t n, const void *from, size_t from_stride, float *to,
                         size_t to_stride)
{
    for (size_t i = 0; i < rows; i++)
        widen_row(n, (const char *)from + i / 2 * from_stride * 4, i % 2 == 1, to + i * to_stride);
}

/* A column of pairs is a row of the result. */
INLINE void widen_column(vector_f32 pairs, float *to)
{
    vector_f32 first = (vector_f32)((vector_u32)pairs << 16);
    vector_f32 second = (vector_f32)((vector_u32)pairs & 0xffff0000u);

    save(to, INTERLEAVED(first, second, 0));
    save(to + LANES, INTERLEAVED(first, second, LANES / 2));
}

static void pairs_to_columns(size_t rows, size_t n, const void *from, size_t from_stride, float *to,
                             size_t to_stride)
{
    const float *pairs = from;

    for (size_t at = 0; at < rows; at += 2 * LANES) {
        const size_t i = at + 2 * LANES <= rows ? at : rows - 2 * LANES;

        for (size_t next = 0; next < n; next += 4) {
            const size_t j = next + 4 <= n ? next : n - 4;
            vector_f32 column[4];

            turn(pairs + i / 2 * from_stride + j, from_stride, column);
            UNROLL
            for (size_t t = 0; t < 4; t++)
                widen_column(column[t], to + (j + t) * to_stride + i);
        }
    }
}
