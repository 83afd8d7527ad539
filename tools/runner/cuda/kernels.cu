/* SPDX-License-Identifier: MIT */
/* The kernels between a transformer's matrix products. */
#include "kernels.h"

#include <math.h>

#define ALL_LANES     0xffffffffu
#define WARP          32
#define ROW_THREADS   256 /* of a block that has a row */
#define HEAD_WARPS    4   /* of a block that has so many heads */
#define FLAT_THREADS  256 /* of a block that has its part of everything */
#define FLAT_BLOCKS   1024
#define BIG_THREADS   1024
#define SWIGLU_COLUMN 1024 /* columns of a block */

/* ---- Elements ---- */

__device__ static inline float load(pkv_dtype dtype, const void *data, size_t i)
{
    uint32_t bits;
    float x;

    if (dtype == PKV_F32)
        return ((const float *)data)[i];
    bits = (uint32_t)((const uint16_t *)data)[i] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

__device__ static inline void store(pkv_dtype dtype, void *data, size_t i, float x)
{
    uint32_t bits;

    if (dtype == PKV_F32) {
        ((float *)data)[i] = x;
        return;
    }
    memcpy(&bits, &x, sizeof bits);
    ((uint16_t *)data)[i] = (bits & 0x7fffffffu) > 0x7f800000u
                                ? (uint16_t)(bits >> 16 | 0x40) /* a NaN stays one */
                                : (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* The same for all lanes. */
__device__ static inline float warp_sum(float x)
{
    for (int i = WARP / 2; i > 0; i /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, i);
    return x;
}

/* Blocks for `count` elements, with a loop for what is more. */
static unsigned flat_blocks(size_t count)
{
    const size_t blocks = (count + FLAT_THREADS - 1) / FLAT_THREADS;

    return (unsigned)(blocks < FLAT_BLOCKS ? blocks : FLAT_BLOCKS);
}

/* ---- Tokens and positions ---- */

__global__ static void embed(pkv_dtype dtype, const void *table, size_t columns,
                             const int32_t *tokens, float *x)
{
    const size_t row = blockIdx.x;
    const size_t from = (size_t)tokens[row] * columns;

    for (size_t i = threadIdx.x; i < columns; i += blockDim.x)
        x[row * columns + i] = load(dtype, table, from + i);
}

void kernels_embed(cudaStream_t stream, pkv_dtype dtype, const void *table, size_t columns,
                   const int32_t *tokens, size_t rows, float *x)
{
    PKV_LAUNCH(embed, (unsigned)rows, ROW_THREADS, 0, stream, dtype, table, columns, tokens, x);
}

/* As rope_angles(): an angle in f32 would be off by whole degrees at long contexts. */
__global__ static void angles(const uint64_t *position, const float *inverse, float magnitude,
                              unsigned pairs, float *cosine, float *sine)
{
    const size_t row = blockIdx.x;

    for (unsigned i = threadIdx.x; i < pairs; i += blockDim.x) {
        const double angle = (double)(*position + row) * (double)inverse[i];

        cosine[row * pairs + i] = (float)cos(angle) * magnitude;
        sine[row * pairs + i] = (float)sin(angle) * magnitude;
    }
}

void kernels_angles(cudaStream_t stream, const uint64_t *position, const float *inverse,
                    float magnitude, size_t pairs, size_t rows, float *cosine, float *sine)
{
    PKV_LAUNCH(angles, (unsigned)rows, 2 * WARP, 0, stream, position, inverse, magnitude,
               (unsigned)pairs, cosine, sine);
}

/* ---- Norms and heads ---- */

__global__ static void rms_norm(const float *x, const float *weight, float epsilon, size_t columns,
                                pkv_dtype dtype, void *out)
{
    PKV_SHARED(float, sums); /* [warps] */
    const size_t row = blockIdx.x;
    float sum = 0, scale;

    x += row * columns;
    for (size_t i = threadIdx.x; i < columns; i += blockDim.x)
        sum += x[i] * x[i];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / WARP; warp++)
        sum += sums[warp];
    scale = 1 / sqrtf(sum / (float)columns + epsilon);
    for (size_t i = threadIdx.x; i < columns; i += blockDim.x)
        store(dtype, out, row * columns + i, x[i] * scale * weight[i]);
}

void kernels_rms_norm(cudaStream_t stream, const float *x, const float *weight, float epsilon,
                      size_t columns, size_t rows, pkv_dtype dtype, void *out)
{
    PKV_LAUNCH(rms_norm, (unsigned)rows, ROW_THREADS, ROW_THREADS / WARP * sizeof(float), stream, x,
               weight, epsilon, columns, dtype, out);
}

/* A warp has a head of a row, a lane whole pairs of it, so that nothing is read that another lane
 * writes. */
__global__ static void finish_heads(struct kernels_heads heads)
{
    const unsigned all = heads.query_heads + 2 * heads.kv_heads;
    const unsigned head = blockIdx.y * HEAD_WARPS + threadIdx.x / WARP;
    const unsigned lane = threadIdx.x % WARP;
    const unsigned d = heads.head_dim, pairs = d / 2;
    const unsigned step = heads.interleaved ? 2 : 1, partner = heads.interleaved ? 1 : pairs;
    const bool turned = head < heads.query_heads + heads.kv_heads;
    const float *norm = head < heads.query_heads ? heads.q_norm : turned ? heads.k_norm : NULL;
    const float *bias = heads.bias ? heads.bias + (size_t)head * d : NULL;
    const size_t at = ((size_t)blockIdx.x * all + head) * d;
    float sum = 0, scale = 1;

    if (head >= all)
        return;
    for (unsigned i = lane; norm && i < pairs; i += WARP) {
        const unsigned first = i * step, second = first + partner;
        const float a = load(heads.dtype, heads.data, at + first) + (bias ? bias[first] : 0);
        const float b = load(heads.dtype, heads.data, at + second) + (bias ? bias[second] : 0);

        sum += a * a + b * b;
    }
    if (norm)
        scale = 1 / sqrtf(warp_sum(sum) / (float)d + heads.epsilon);
    for (unsigned i = lane; i < pairs; i += WARP) {
        const unsigned first = i * step, second = first + partner;
        float a = load(heads.dtype, heads.data, at + first) + (bias ? bias[first] : 0);
        float b = load(heads.dtype, heads.data, at + second) + (bias ? bias[second] : 0);

        if (norm) {
            a = a * scale * norm[first];
            b = b * scale * norm[second];
        }
        if (turned) {
            const float cosine = heads.cosine[(size_t)blockIdx.x * pairs + i];
            const float sine = heads.sine[(size_t)blockIdx.x * pairs + i];
            const float unturned = a;

            a = unturned * cosine - b * sine;
            b = b * cosine + unturned * sine;
        }
        store(heads.dtype, heads.data, at + first, a);
        store(heads.dtype, heads.data, at + second, b);
    }
}

void kernels_finish_heads(cudaStream_t stream, const struct kernels_heads *heads, size_t rows)
{
    /* Without biases nothing happens to v. */
    const unsigned count = heads->query_heads + (heads->bias ? 2 : 1) * heads->kv_heads;

    PKV_LAUNCH(finish_heads, dim3((unsigned)rows, (count + HEAD_WARPS - 1) / HEAD_WARPS),
               HEAD_WARPS * WARP, 0, stream, *heads);
}

/* ---- The feed-forward part ---- */

__global__ static void swiglu(pkv_dtype dtype, const void *gate_up, size_t columns, void *out)
{
    const size_t row = blockIdx.y;
    const size_t first = (size_t)blockIdx.x * SWIGLU_COLUMN;
    const size_t end = first + SWIGLU_COLUMN < columns ? first + SWIGLU_COLUMN : columns;

    for (size_t i = first + threadIdx.x; i < end; i += blockDim.x) {
        const float gate = load(dtype, gate_up, row * 2 * columns + i);
        const float up = load(dtype, gate_up, (row * 2 + 1) * columns + i);

        store(dtype, out, row * columns + i, up * (gate / (1 + expf(-gate))));
    }
}

void kernels_swiglu(cudaStream_t stream, pkv_dtype dtype, const void *gate_up, size_t columns,
                    size_t rows, void *out)
{
    const unsigned blocks = (unsigned)((columns + SWIGLU_COLUMN - 1) / SWIGLU_COLUMN);

    PKV_LAUNCH(swiglu, dim3(blocks, (unsigned)rows), ROW_THREADS, 0, stream, dtype, gate_up,
               columns, out);
}

/* ---- The next token ---- */

/* Ordered as the logits are, and lower indices before higher; a NaN is above everything. */
__device__ static inline uint64_t rank_key(float logit, uint32_t index)
{
    uint32_t bits;

    logit += 0.0f; /* -0 is 0 */
    memcpy(&bits, &logit, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        bits = 0xffffffffu;
    else
        bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - index);
}

__device__ static inline uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

__device__ static inline uint64_t warp_largest(uint64_t key)
{
    for (int i = WARP / 2; i > 0; i /= 2)
        key = larger(key, __shfl_xor_sync(ALL_LANES, key, i));
    return key;
}

__global__ static void likeliest(const float *logits, uint32_t count, int32_t *token)
{
    PKV_SHARED(uint64_t, keys); /* [warps] */
    uint64_t key = 0;

    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
        key = larger(key, rank_key(logits[i], i));
    key = warp_largest(key);
    if (threadIdx.x % WARP == 0)
        keys[threadIdx.x / WARP] = key;
    __syncthreads();
    if (threadIdx.x >= WARP)
        return;
    key = warp_largest(threadIdx.x < blockDim.x / WARP ? keys[threadIdx.x] : 0);
    if (threadIdx.x == 0)
        *token = key >> 32 == 0xffffffffu ? -1 : (int32_t)(0xffffffffu - (uint32_t)key);
}

void kernels_likeliest(cudaStream_t stream, const float *logits, size_t count, int32_t *token)
{
    PKV_LAUNCH(likeliest, 1, BIG_THREADS, BIG_THREADS / WARP * sizeof(uint64_t), stream, logits,
               (uint32_t)count, token);
}

/* ---- Weights ---- */

__global__ static void convert(const float *from, size_t count, pkv_dtype dtype, void *to)
{
    const size_t step = (size_t)gridDim.x * blockDim.x;

    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        store(dtype, to, i, from[i]);
}

void kernels_convert(cudaStream_t stream, const float *from, size_t count, pkv_dtype dtype,
                     void *to)
{
    PKV_LAUNCH(convert, flat_blocks(count), FLAT_THREADS, 0, stream, from, count, dtype, to);
}

/* splitmix64 (Vigna) of the index. */
__global__ static void make_up(uint64_t seed, float scale, size_t count, pkv_dtype dtype, void *to)
{
    const size_t step = (size_t)gridDim.x * blockDim.x;

    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;

        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        store(dtype, to, i, ((float)(z >> 40) * 0x1p-24f - 0.5f) * scale);
    }
}

void kernels_make_up(cudaStream_t stream, uint64_t seed, size_t columns, size_t count,
                     pkv_dtype dtype, void *to)
{
    /* The variance of what is uniform in [-1/2, 1/2) is 1/12. */
    const float scale = (float)sqrt(12 / (double)columns);

    PKV_LAUNCH(make_up, flat_blocks(count), FLAT_THREADS, 0, stream, seed, scale, count, dtype, to);
}
