/* SPDX-License-Identifier: MIT */
/* Pages in the order of order.h as a warp takes them: tiles of 16 x 16 elements, a lane's part of
 * one being the four registers of A in mma.m16n8k16. The same registers are B, transposed: 0 and 2
 * of the tile's first 8 rows, 1 and 3 of the others. */
#ifndef PUZZLEKV_GPU_FRAGMENTS_H
#define PUZZLEKV_GPU_FRAGMENTS_H

#include "gpu.h"

/* ---- Pairs of a storage type ---- */

template <pkv_dtype DTYPE> __device__ static inline unsigned pair(float low, float high)
{
    return DTYPE == PKV_F16 ? pair_f16(low, high) : pair_bf16(low, high);
}

template <pkv_dtype DTYPE> __device__ static inline float low(unsigned pair)
{
    return DTYPE == PKV_F16 ? low_f16(pair) : f32_from_bits(pair << 16);
}

template <pkv_dtype DTYPE> __device__ static inline float high(unsigned pair)
{
    return DTYPE == PKV_F16 ? high_f16(pair) : f32_from_bits(pair & 0xffff0000u);
}

/* A pair of elements of B in two parts. */
template <pkv_dtype DTYPE>
__device__ static inline void split(float x, float y, unsigned *upper, unsigned *lower)
{
    *upper = pair<DTYPE>(x, y);
    *lower = pair<DTYPE>(x - low<DTYPE>(*upper), y - high<DTYPE>(*upper));
}

/* Scales C of the warp, COUNT elements of a lane, by a power of two so that f16 holds it. Returns
 * the inverse. */
template <unsigned COUNT> __device__ static inline float fit_f16(float *c)
{
    float most = 0.0f;
    unsigned exponent;
    float scale;

    UNROLL
    for (unsigned n = 0; n < COUNT; n++)
        most = fmaxf(most, fabsf(c[n]));
    exponent = __reduce_max_sync(0xffffffffu, f32_bits(most)) >> 23;
    exponent = exponent < 15 ? 15 : exponent;
    scale = f32_from_bits((268 - exponent) << 23);
    UNROLL
    for (unsigned n = 0; n < COUNT; n++)
        c[n] *= scale;
    return f32_from_bits((exponent - 14) << 23);
}

/* ---- What is in memory ---- */

/* A lane's chunk of tile `number` of K or V of a dense page, a tile with `false` below. */
__device__ static inline const unsigned char *dense_chunk(const unsigned char *data,
                                                          unsigned number)
{
    return data + (number * 32 + threadIdx.x % 32) * 16;
}

/* A lane's chunks of a factor. Where only half of one is there, what is loaded has it at one end.
 */
struct chunk_view {
    const unsigned char *data; /* the first one */
    unsigned halves;
    unsigned group; /* bytes from one chunk to the next one */
    bool behind;    /* the only half is the second of what is loaded */
};

/* Of parts[PART], so that the compiler knows which. */
template <bool CODED, unsigned PART>
__device__ static inline struct chunk_view view_chunks(const struct layer_view *layer,
                                                       const unsigned char *page, unsigned tiles)
{
    const unsigned lane = threadIdx.x % 32;
    const bool is_key = PART < 2, is_left = PART % 2 == 0, rank_is_row = is_key != is_left;
    const unsigned rank = is_key ? layer->rank_k : layer->rank_v;
    const struct chunk_place place = chunk_place_of(rank, rank_is_row, tiles, lane / 4, lane % 4);
    const unsigned bytes = CODED ? 4 * tiles : 16 * tiles; /* of a chunk */
    const unsigned at = CODED ? place.at / 2 : 2 * place.at;
    struct chunk_view view;

    view.data = page + layer->parts[PART].offset + at / bytes * bytes;
    view.halves = place.halves;
    view.group = CODED ? chunk_group(rank, rank_is_row, tiles) / 2
                       : 2 * chunk_group(rank, rank_is_row, tiles);
    view.behind = at % bytes != 0;
    return view;
}

/* Both halves of a chunk of 16 bytes, 0 where there is none. For many at once: by one load and no
 * branch, since of two to the same registers the second one waits for the first. */
__device__ static inline uint4 load_chunk_of_many(const struct chunk_view *view, unsigned number)
{
    uint4 chunk = {0, 0, 0, 0};

    if (view->halves > 0)
        chunk = load_16(view->data + number * view->group);
    if (view->halves == 1) {
        chunk.x = view->behind ? chunk.z : chunk.x;
        chunk.y = view->behind ? chunk.w : chunk.y;
        chunk.z = chunk.w = 0;
    }
    return chunk;
}

/* The same with few registers. */
__device__ static inline uint4 load_chunk(const struct chunk_view *view, unsigned number)
{
    uint4 chunk = {0, 0, 0, 0};

    if (view->halves == 2) {
        chunk = load_16(view->data + number * view->group);
    } else if (view->halves == 1) {
        const uint2 half = load_8(view->data + number * view->group + 8 * view->behind);

        chunk.x = half.x;
        chunk.y = half.y;
    }
    return chunk;
}

/* The same of 8 bytes. */
__device__ static inline uint2 load_small_chunk(const struct chunk_view *view)
{
    uint2 chunk = {0, 0};

    if (view->halves > 0)
        chunk = load_8(view->data);
    if (view->halves == 1) {
        chunk.x = view->behind ? chunk.y : chunk.x;
        chunk.y = 0;
    }
    return chunk;
}

/* A tile of elements: c is a row of it, or a column. */
template <bool RANK_IS_ROW> __device__ static inline void tile_of(const uint4 &chunk, unsigned a[4])
{
    a[0] = chunk.x;
    a[1] = RANK_IS_ROW ? chunk.z : chunk.y;
    a[2] = RANK_IS_ROW ? chunk.y : chunk.z;
    a[3] = chunk.w;
}

/* Codes p and p + 4 of a word as a pair: 0x43 is in the bits of 128 to 255, 136 is 128 + 8. */
__device__ static inline unsigned pair_of_codes(unsigned word, unsigned p)
{
    return add_bf16(((word >> 4 * p) & 0x000f000fu) ^ 0x43084308u, 0xc308c308u);
}

/* A tile of codes, of the even tile of a pair of them or the odd one; words of both halves. */
template <bool RANK_IS_ROW>
__device__ static inline void tile_of_codes(unsigned first, unsigned second, unsigned odd,
                                            unsigned a[4])
{
    a[0] = pair_of_codes(first, 2 * odd);
    a[RANK_IS_ROW ? 2 : 1] = pair_of_codes(first, 2 * odd + 1);
    a[RANK_IS_ROW ? 1 : 2] = pair_of_codes(second, 2 * odd);
    a[3] = pair_of_codes(second, 2 * odd + 1);
}

/* What lies behind the first `tokens` columns of V^T may be anything. */
__device__ static inline void mask_columns(unsigned first, unsigned tokens, unsigned a[4])
{
    const unsigned k = first + threadIdx.x % 4 * 2;

    for (unsigned n = 0; n < 4; n++) {
        const unsigned column = k + n / 2 * 8;

        a[n] &= (column < tokens ? 0x0000ffffu : 0) | (column + 1 < tokens ? 0xffff0000u : 0);
    }
}

#endif
