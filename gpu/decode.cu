/* SPDX-License-Identifier: MIT */
/*
 * Decoding over pages of 32 tokens with d 64 or 128, at most 8 query heads a KV head, and a storage
 * type of 16 bits. What is stored is the matrix A of mma.m16n8k16, as it lies in memory (order.h);
 * the query heads are the 8 columns of B and C:
 *
 *     dense page      s = K q,                     o += V^T p
 *     factor page     s = L_K (R_K q),             o += R_V^T (L_V^T p)
 *
 * The tensor cores multiply exactly and add in f32, so B alone has to be rounded: each B is split
 * into two numbers of 16 bits, what is left of it being below 2^-16 of it. For f16 q is scaled to
 * [1, 2), the products with a factor to [2^14, 2^15), and p = exp(s - m) by 2^14. Codes become
 * bf16, which is exact; scales along the inner dimension go to B, those of rows to C.
 *
 * A warp attends WARP_PAGES pages one after the other; a block's warps follow each other in the
 * sequence. Their states are merged in that order, and the blocks' by the one that ends last: what
 * makes a run of pages depends on their numbers alone.
 */
#include "decode.h"

#include "fragments.h"
#include "store.h"

#define WARPS       4
#define THREADS     (32 * WARPS)
#define WARP_PAGES  8
#define BLOCK_PAGES (WARPS * WARP_PAGES)
#define LENGTH      32 /* P */
#define HEADS       8  /* columns of B and C */

/* Blocks that a multiprocessor is to hold, which bounds registers: 168 for 3, of which ptxas spills
 * a few from sm_100 on. There 2 have enough loads under way. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define BLOCKS_AT_ONCE 2
#else
#define BLOCKS_AT_ONCE 3
#endif

/* States whose weights are worked out at once. */
#define MERGED_AT_ONCE 32

#define CACHE_LINE 128 /* bytes */

#define LOG2_E 1.44269504f
#define LN_2   0.693147181f

struct decode_views {
    struct layer_view layer;
    struct launch_plan plan;
    pkv_input q, k, v;
    pkv_output out;
    float *lse;
    float *states;               /* of this launch's blocks; see state_of */
    unsigned *arrivals;          /* [items][KV heads], 0 between launches */
    size_t first_item, end_item; /* of the launch */
};

/* ---- B ---- */

/* Rows k 16 .. k 16 + 15 of B. */
struct split_b {
    unsigned upper[2], lower[2];
};

/* To two sums, which do not wait for each other if they are not the same one. */
template <pkv_dtype DTYPE>
__device__ static inline void multiply(float upper[4], float lower[4], const unsigned a[4],
                                       const struct split_b *b)
{
    if (DTYPE == PKV_F16) {
        warp_mma_f16(upper, a, b->upper);
        warp_mma_f16(lower, a, b->lower);
    } else {
        warp_mma_bf16(upper, a, b->upper);
        warp_mma_bf16(lower, a, b->lower);
    }
}

/* Two sums to the first one. */
__device__ static inline void join(float c[2][4])
{
    UNROLL
    for (unsigned n = 0; n < 4; n++)
        c[0][n] += c[1][n];
}

/* 16 rows of C as 16 rows of B. */
template <pkv_dtype DTYPE> __device__ static inline void turn(const float c[4], struct split_b *b)
{
    for (unsigned h = 0; h < 2; h++) {
        split<DTYPE>(c[2 * h], c[2 * h + 1], &b->upper[h], &b->lower[h]);
        b->upper[h] = warp_transpose(b->upper[h]);
        b->lower[h] = warp_transpose(b->lower[h]);
    }
}

/* ---- One page ---- */

/* State of a warp, m as exponent of 2; l of the lane's own rows. */
template <unsigned D> struct warp_state {
    float m[2], l[2];
    float o[D / TILE][4];
};

/* C of R_K q in f32, or of K q. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void score_native(const struct layer_view *layer,
                                           const unsigned char *page, const struct split_b *q,
                                           float s[2][4])
{
    const struct chunk_view right = view_chunks<false, 1>(layer, page, 1);
    const struct chunk_view left = view_chunks<false, 0>(layer, page, 1);
    float inner[2][4] = {};
    float scale = 1.0f;
    uint4 chunks[D / TILE], left_chunks[2];
    struct split_b b;
    unsigned a[4];

    UNROLL
    for (unsigned j = 0; j < D / TILE; j++)
        chunks[j] = load_chunk_of_many(&right, j);
    UNROLL
    for (unsigned i = 0; i < 2; i++)
        left_chunks[i] = load_chunk_of_many(&left, i);
    UNROLL
    for (unsigned j = 0; j < D / TILE; j++) {
        tile_of<true>(chunks[j], a);
        multiply<DTYPE>(inner[0], inner[1], a, &q[j]);
    }
    join(inner);
    if (DTYPE == PKV_F16)
        scale = fit_f16<4>(inner[0]);
    turn<DTYPE>(inner[0], &b);
    UNROLL
    for (unsigned i = 0; i < 2; i++) {
        tile_of<false>(left_chunks[i], a);
        multiply<DTYPE>(s[i], s[i], a, &b);
        for (unsigned n = 0; n < 4 && DTYPE == PKV_F16; n++)
            s[i][n] *= scale;
    }
}

/* Of codes: the scales of R_K go to q, those of L_K to the columns of C before. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void score_codes(const struct layer_view *layer, const unsigned char *page,
                                          const struct split_b *q, float s[2][4])
{
    const unsigned lane = threadIdx.x % 32;
    const struct part_place *parts = layer->parts;
    const struct chunk_view right = view_chunks<true, 1>(layer, page, 4);
    const struct chunk_view left = view_chunks<true, 0>(layer, page, 2);
    const unsigned char *right_scales = page + parts[1].scales + lane % 4 * (D / 2);
    const uint16_t *left_scales = (const uint16_t *)(const void *)(page + parts[0].scales);
    float inner[2][4] = {};
    uint4 chunks[D / 64], scales[D / 32];
    struct split_b b;
    unsigned a[4];
    uint2 left_chunk;
    unsigned left_scale[2];

    UNROLL
    for (unsigned j = 0; j < D / 64; j++)
        chunks[j] = load_chunk_of_many(&right, j);
    UNROLL
    for (unsigned j = 0; j < D / 32; j++)
        scales[j] = load_16(right_scales + 16 * j);
    left_chunk = load_small_chunk(&left);
    UNROLL
    for (unsigned h = 0; h < 2; h++)
        left_scale[h] = lane / 4 + 8 * h < layer->rank_k ? left_scales[lane / 4 + 8 * h] : 0;
    UNROLL
    for (unsigned j = 0; j < D / TILE; j++) {
        const uint4 &chunk = chunks[j / 4];
        const uint4 &scale = scales[j / 2];
        struct split_b scaled;

        for (unsigned h = 0; h < 2; h++) {
            const unsigned two = j % 2 ? (h ? scale.w : scale.z) : (h ? scale.y : scale.x);
            const unsigned upper = made_anew(q[j].upper[h]);
            const unsigned lower = made_anew(q[j].lower[h]);
            const float x = low<DTYPE>(upper) + low<DTYPE>(lower);
            const float y = high<DTYPE>(upper) + high<DTYPE>(lower);

            split<PKV_BF16>(x * low_f16(two), y * high_f16(two), &scaled.upper[h],
                            &scaled.lower[h]);
        }
        tile_of_codes<true>(j % 4 < 2 ? chunk.x : chunk.y, j % 4 < 2 ? chunk.z : chunk.w, j % 2, a);
        multiply<PKV_BF16>(inner[0], inner[1], a, &scaled);
    }
    join(inner);
    for (unsigned n = 0; n < 4; n++)
        inner[0][n] *= low_f16(left_scale[n / 2]);
    turn<PKV_BF16>(inner[0], &b);
    UNROLL
    for (unsigned i = 0; i < 2; i++) {
        tile_of_codes<false>(left_chunk.x, left_chunk.y, i, a);
        multiply<PKV_BF16>(s[i], s[i], a, &b);
    }
}

template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void score_dense(const unsigned char *page, const struct split_b *q,
                                          float s[2][4])
{
    unsigned a[4];

    UNROLL
    for (unsigned j = 0; j < D / TILE; j++) {
        UNROLL
        for (unsigned i = 0; i < 2; i++) {
            tile_of<false>(load_16(dense_chunk(page, 2 * j + i)), a);
            multiply<DTYPE>(s[i], s[i], a, &q[j]);
        }
    }
}

/* Scores to p of the first `tokens` rows; rescales the state. Times its head's factor a score is an
 * exponent of 2. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void softmax(const float *factors, unsigned tokens, float s[2][4],
                                      struct warp_state<D> *state)
{
    const float bias = DTYPE == PKV_F16 ? 14.0f : 0.0f;
    const unsigned g = threadIdx.x % 32 / 4;
    const float *factor = factors + threadIdx.x % 4 * 2; /* of the lane's columns of C */
    float most[2];
    bool grows;

    most[0] = state->m[0];
    most[1] = state->m[1];
    UNROLL
    for (unsigned i = 0; i < 2; i++) {
        UNROLL
        for (unsigned n = 0; n < 4; n++) {
            s[i][n] = TILE * i + n / 2 * 8 + g < tokens ? s[i][n] * factor[n % 2] : -INFINITY;
            most[n % 2] = fmaxf(most[n % 2], s[i][n]);
        }
    }
    UNROLL
    for (unsigned i = 4; i < 32; i *= 2) {
        most[0] = fmaxf(most[0], __shfl_xor_sync(0xffffffffu, most[0], i));
        most[1] = fmaxf(most[1], __shfl_xor_sync(0xffffffffu, most[1], i));
    }
    grows = most[0] != state->m[0] || most[1] != state->m[1];
    if (__any_sync(0xffffffffu, grows)) {
        UNROLL
        for (unsigned n = 0; n < 2; n++) {
            const float scale = exp2f(state->m[n] - most[n]);

            state->m[n] = most[n];
            state->l[n] *= scale;
            UNROLL
            for (unsigned i = 0; i < D / TILE; i++) {
                state->o[i][n] *= scale;
                state->o[i][n + 2] *= scale;
            }
        }
    }
    UNROLL
    for (unsigned i = 0; i < 2; i++) {
        UNROLL
        for (unsigned n = 0; n < 4; n++) {
            s[i][n] = exp2f(s[i][n] - (most[n % 2] - bias));
            state->l[n % 2] += s[i][n];
        }
    }
}

/* V's factors, which are on their way while scores become p. */
template <unsigned D> struct native_values {
    uint4 left[2], right[D / TILE];
};

template <unsigned D>
__device__ static inline void load_native(const struct layer_view *layer, const unsigned char *page,
                                          struct native_values<D> *values)
{
    const struct chunk_view left = view_chunks<false, 2>(layer, page, 1);
    const struct chunk_view right = view_chunks<false, 3>(layer, page, 1);

    UNROLL
    for (unsigned k = 0; k < 2; k++)
        values->left[k] = load_chunk_of_many(&left, k);
    UNROLL
    for (unsigned i = 0; i < D / TILE; i++)
        values->right[i] = load_chunk_of_many(&right, i);
}

template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void accumulate_native(const struct native_values<D> *values,
                                                const float p[2][4], struct warp_state<D> *state)
{
    float inner[2][4] = {};
    float scale = 1.0f;
    struct split_b b;
    unsigned a[4];

    UNROLL
    for (unsigned k = 0; k < 2; k++) {
        turn<DTYPE>(p[k], &b);
        tile_of<true>(values->left[k], a);
        multiply<DTYPE>(inner[0], inner[1], a, &b);
    }
    join(inner);
    if (DTYPE == PKV_F16)
        scale = fit_f16<4>(inner[0]);
    turn<DTYPE>(inner[0], &b);
    UNROLL
    for (unsigned i = 0; i < D / TILE; i++) {
        tile_of<false>(values->right[i], a);
        if (DTYPE == PKV_F16) {
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};

            multiply<DTYPE>(c, c, a, &b);
            for (unsigned n = 0; n < 4; n++)
                state->o[i][n] = __fmaf_rn(c[n], scale, state->o[i][n]);
        } else {
            multiply<DTYPE>(state->o[i], state->o[i], a, &b);
        }
    }
}

template <unsigned D> struct coded_values {
    uint2 left, left_scales;
    uint4 right[D / 64], right_scales[D / 64];
};

template <unsigned D>
__device__ static inline void load_codes(const struct layer_view *layer, const unsigned char *page,
                                         struct coded_values<D> *values)
{
    const unsigned g = threadIdx.x % 32 / 4;
    const struct part_place *parts = layer->parts;
    const struct chunk_view left = view_chunks<true, 2>(layer, page, 2);
    const struct chunk_view right = view_chunks<true, 3>(layer, page, 4);

    values->left = load_small_chunk(&left);
    values->left_scales = load_8(page + parts[2].scales + 8 * g);
    UNROLL
    for (unsigned i = 0; i < D / 64; i++) {
        values->right[i] = load_chunk_of_many(&right, i);
        values->right_scales[i] = load_16(page + parts[3].scales + g * (D / 4) + 16 * i);
    }
}

template <unsigned D>
__device__ static inline void accumulate_codes(const struct coded_values<D> *values,
                                               const float p[2][4], struct warp_state<D> *state)
{
    float inner[2][4] = {};
    struct split_b b;
    unsigned a[4];

    UNROLL
    for (unsigned k = 0; k < 2; k++) {
        const unsigned scale = k ? values->left_scales.y : values->left_scales.x;
        const float scaled[4] = {p[k][0] * low_f16(scale), p[k][1] * low_f16(scale),
                                 p[k][2] * high_f16(scale), p[k][3] * high_f16(scale)};

        turn<PKV_BF16>(scaled, &b);
        tile_of_codes<true>(values->left.x, values->left.y, k, a);
        multiply<PKV_BF16>(inner[0], inner[1], a, &b);
    }
    join(inner);
    turn<PKV_BF16>(inner[0], &b);
    UNROLL
    for (unsigned i = 0; i < D / TILE; i++) {
        const uint4 &chunk = values->right[i / 4];
        const uint4 &four = values->right_scales[i / 4];
        const unsigned scale = i % 4 < 2 ? (i % 2 ? four.y : four.x) : (i % 2 ? four.w : four.z);
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};

        tile_of_codes<false>(i % 4 < 2 ? chunk.x : chunk.y, i % 4 < 2 ? chunk.z : chunk.w, i % 2,
                             a);
        multiply<PKV_BF16>(c, c, a, &b);
        for (unsigned n = 0; n < 4; n++)
            state->o[i][n] =
                __fmaf_rn(c[n], n < 2 ? low_f16(scale) : high_f16(scale), state->o[i][n]);
    }
}

template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void accumulate_dense(const unsigned char *page, unsigned tokens,
                                               const float p[2][4], struct warp_state<D> *state)
{
    struct split_b b[2];
    unsigned a[4];

    turn<DTYPE>(p[0], &b[0]);
    turn<DTYPE>(p[1], &b[1]);
    UNROLL
    for (unsigned i = 0; i < D / TILE; i++) {
        UNROLL
        for (unsigned k = 0; k < 2; k++) {
            tile_of<false>(load_16(dense_chunk(page, 2 * i + k)), a);
            if (tokens < LENGTH)
                mask_columns(TILE * k, tokens, a);
            multiply<DTYPE>(state->o[i], state->o[i], a, &b[k]);
        }
    }
}

/* ---- A warp's pages ---- */

/* Lane n has the warp's page n: nothing waits for the table. */
__device__ static inline struct page page_of_lane(struct page mine, unsigned n)
{
    mine.slot = __shfl_sync(0xffffffffu, mine.slot, n);
    mine.kind = __shfl_sync(0xffffffffu, mine.kind, n);
    return mine;
}

/* While a page is attended the next one comes from memory: registers have no room for it. */
__device__ static inline void prefetch_page(const struct layer_view *layer, struct page page,
                                            unsigned kv_head)
{
    const bool is_factor = page.kind == SLOT_FACTOR;
    const size_t bytes = is_factor ? layer->factor_bytes : layer->dense_bytes;
    const unsigned char *data =
        is_factor ? factor_page(layer, page.slot, kv_head) : dense_page(layer, page.slot, kv_head);

    for (size_t at = threadIdx.x % 32 * CACHE_LINE; at < bytes; at += 32 * CACHE_LINE)
        prefetch(data + at);
}

template <unsigned D, pkv_dtype DTYPE, bool CODED_K, bool CODED_V>
__device__ static inline void attend_page(const struct layer_view *layer, struct page page,
                                          unsigned tokens, unsigned kv_head, const float *factors,
                                          const struct split_b *q, struct warp_state<D> *state)
{
    float s[2][4] = {};

    if (page.kind == SLOT_FACTOR) {
        const unsigned char *data = factor_page(layer, page.slot, kv_head);
        struct native_values<D> native;
        struct coded_values<D> coded;

        if (CODED_K)
            score_codes<D, DTYPE>(layer, data, q, s);
        else
            score_native<D, DTYPE>(layer, data, q, s);
        if (CODED_V)
            load_codes<D>(layer, data, &coded);
        else
            load_native<D>(layer, data, &native);
        softmax<D, DTYPE>(factors, LENGTH, s, state);
        if (CODED_V)
            accumulate_codes<D>(&coded, s, state);
        else
            accumulate_native<D, DTYPE>(&native, s, state);
    } else {
        const unsigned char *data = dense_page(layer, page.slot, kv_head);

        score_dense<D, DTYPE>(data, q, s);
        softmax<D, DTYPE>(factors, tokens, s, state);
        accumulate_dense<D, DTYPE>(data + LENGTH * D * 2, tokens, s, state);
    }
}

/* Shared memory of a block, in floats. */
template <unsigned D> struct shared_places {
    static const unsigned q = 0;                          /* [HEADS][D] */
    static const unsigned scale = q + HEADS * D;          /* [HEADS], of q in B */
    static const unsigned factor = scale + HEADS;         /* [HEADS], of scores */
    static const unsigned state = factor + HEADS;         /* [WARPS]: m, l [HEADS], o [HEADS][D] */
    static const unsigned state_floats = HEADS * (D + 2); /* of one */
    static const unsigned merged = state;                 /* the block's, of the group's heads */
    static const unsigned weight = state + state_floats;  /* [MERGED_AT_ONCE][HEADS] */
    static const unsigned part = weight + MERGED_AT_ONCE * HEADS; /* the same */
    static const unsigned most = part + MERGED_AT_ONCE * HEADS;   /* [HEADS] */
    static const unsigned sum = most + HEADS;
    static const unsigned score = sum + HEADS; /* of the new token */
    static const unsigned last = score + HEADS;
    static const unsigned floats = state + WARPS * state_floats;
};

/* q and its scales. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static void load_queries(const struct decode_views *a, size_t row, unsigned kv_head,
                                    float *shared)
{
    const unsigned group = a->layer.query_heads / a->layer.kv_heads;
    const unsigned lane = threadIdx.x % 32;

    for (unsigned n = threadIdx.x; n < HEADS * D; n += THREADS)
        shared[shared_places<D>::q + n] =
            n / D < group ? input_element(&a->q, row, kv_head * group + n / D, n % D) : 0.0f;
    __syncthreads();
    for (unsigned h = threadIdx.x / 32; h < HEADS; h += WARPS) {
        unsigned most = 0;

        for (unsigned i = lane; i < D; i += 32) {
            const unsigned bits = f32_bits(shared[shared_places<D>::q + h * D + i]) & 0x7fffffffu;

            most = bits > most ? bits : most;
        }
        most = __reduce_max_sync(0xffffffffu, most) >> 23;
        most = DTYPE != PKV_F16 ? 127 : most < 1 ? 1 : most > 253 ? 253 : most;
        if (lane == 0) {
            shared[shared_places<D>::scale + h] = f32_from_bits((254 - most) << 23);
            shared[shared_places<D>::factor + h] =
                a->layer.softmax_scale * LOG2_E * f32_from_bits(most << 23);
        }
    }
    __syncthreads();
}

template <unsigned D, pkv_dtype DTYPE, bool CODED_K, bool CODED_V>
__device__ static void attend_warp(const struct decode_views *a, const struct device_item *item,
                                   const struct page *table, size_t block, unsigned kv_head,
                                   float *shared)
{
    const unsigned lane = threadIdx.x % 32;
    const unsigned g = lane / 4, t = lane % 4;
    const size_t first = block * BLOCK_PAGES + threadIdx.x / 32 * WARP_PAGES;
    const float scale = shared[shared_places<D>::scale + g];
    unsigned tokens = 0; /* of the warp's pages */
    struct page mine = {};
    struct split_b q[D / TILE];
    struct warp_state<D> state;
    float *out =
        shared + shared_places<D>::state + threadIdx.x / 32 * shared_places<D>::state_floats;

    UNROLL
    for (unsigned j = 0; j < D / TILE; j++) {
        for (unsigned h = 0; h < 2; h++) {
            const float *x = shared + shared_places<D>::q + g * D + TILE * j + 8 * h + 2 * t;

            split<DTYPE>(x[0] * scale, x[1] * scale, &q[j].upper[h], &q[j].lower[h]);
        }
    }
    for (unsigned n = 0; n < 2; n++) {
        state.m[n] = -INFINITY;
        state.l[n] = 0.0f;
    }
    UNROLL
    for (unsigned i = 0; i < D / TILE; i++)
        for (unsigned n = 0; n < 4; n++)
            state.o[i][n] = 0.0f;
    if (first * LENGTH < item->tokens)
        tokens = (unsigned)min_size(item->tokens - first * LENGTH, WARP_PAGES * LENGTH);
    if (lane * LENGTH < tokens)
        mine = table[first + lane];
    for (unsigned i = 0; i * LENGTH < tokens; i++) {
        const unsigned left = tokens - i * LENGTH;

        if (left > LENGTH)
            prefetch_page(&a->layer, page_of_lane(mine, i + 1), kv_head);
        attend_page<D, DTYPE, CODED_K, CODED_V>(&a->layer, page_of_lane(mine, i),
                                                left < LENGTH ? left : LENGTH, kv_head,
                                                shared + shared_places<D>::factor, q, &state);
    }
    UNROLL
    for (unsigned i = 4; i < 32; i *= 2) {
        state.l[0] += __shfl_xor_sync(0xffffffffu, state.l[0], i);
        state.l[1] += __shfl_xor_sync(0xffffffffu, state.l[1], i);
    }
    for (unsigned n = 0; n < 2; n++) {
        if (g == 0) {
            out[2 * t + n] = state.m[n];
            out[HEADS + 2 * t + n] = state.l[n];
        }
    }
    UNROLL
    for (unsigned i = 0; i < D / TILE; i++)
        for (unsigned n = 0; n < 4; n++)
            out[2 * HEADS + (2 * t + n % 2) * D + TILE * i + n / 2 * 8 + g] = state.o[i][n];
}

/* ---- Merging ---- */

__device__ static inline float weight_of(float m, float most)
{
    return m == -INFINITY ? 0.0f : exp2f(m - most);
}

/* The states of the block's warps to one, of `group` heads. */
template <unsigned D> __device__ static void merge_warps(unsigned group, float *to, float *shared)
{
    const float *states = shared + shared_places<D>::state;
    const unsigned stride = shared_places<D>::state_floats;
    float o[HEADS * D / THREADS], m = -INFINITY, l = 0.0f;

    UNROLL
    for (unsigned e = 0; e < HEADS * D / THREADS; e++) {
        const unsigned n = e * THREADS + threadIdx.x;
        float most = -INFINITY;

        for (unsigned w = 0; w < WARPS; w++)
            most = fmaxf(most, states[w * stride + n / D]);
        o[e] = 0.0f;
        for (unsigned w = 0; w < WARPS; w++)
            o[e] = __fmaf_rn(states[w * stride + 2 * HEADS + n],
                             weight_of(states[w * stride + n / D], most), o[e]);
    }
    if (threadIdx.x < group) {
        for (unsigned w = 0; w < WARPS; w++)
            m = fmaxf(m, states[w * stride + threadIdx.x]);
        for (unsigned w = 0; w < WARPS; w++)
            l = __fmaf_rn(states[w * stride + HEADS + threadIdx.x],
                          weight_of(states[w * stride + threadIdx.x], m), l);
    }
    __syncthreads(); /* `to` may be where they are */
    if (threadIdx.x < group) {
        to[threadIdx.x] = m;
        to[group + threadIdx.x] = l;
    }
    UNROLL
    for (unsigned e = 0; e < HEADS * D / THREADS; e++) {
        const unsigned n = e * THREADS + threadIdx.x;

        if (n < group * D)
            to[2 * group + n] = o[e];
    }
}

/* The new token's score, by a warp a head, and the largest of all. */
template <unsigned D>
__device__ static void find_most(const struct decode_views *a, const struct device_item *item,
                                 unsigned kv_head, const float *states, size_t n_states,
                                 float *shared)
{
    const unsigned group = a->layer.query_heads / a->layer.kv_heads;
    const unsigned stride = group * (D + 2);
    const unsigned lane = threadIdx.x % 32;

    for (unsigned h = threadIdx.x / 32; h < group; h += WARPS) {
        float score = 0.0f;
        float most = -INFINITY;

        for (unsigned i = lane; i < D; i += 32)
            score = __fmaf_rn(
                shared[shared_places<D>::q + h * D + i],
                rounded_element(a->layer.dtype, input_element(&a->k, item->first_row, kv_head, i)),
                score);
        for (size_t c = lane; c < n_states; c += 32)
            most = fmaxf(most, states[c * stride + h]);
        for (unsigned i = 16; i > 0; i /= 2) {
            score += __shfl_xor_sync(0xffffffffu, score, i);
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
        }
        score *= a->layer.softmax_scale * LOG2_E;
        if (lane == 0) {
            shared[shared_places<D>::score + h] = score;
            shared[shared_places<D>::most + h] = fmaxf(most, score);
            shared[shared_places<D>::sum + h] = 0.0f;
        }
    }
    __syncthreads();
}

/* All states of an item and KV head, then the new token, to the output. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static void finish(const struct decode_views *a, const struct device_item *item,
                              unsigned kv_head, const float *states, size_t n_states, float *shared)
{
    const unsigned group = a->layer.query_heads / a->layer.kv_heads;
    const unsigned stride = group * (D + 2);
    const float bias = DTYPE == PKV_F16 ? 14.0f : 0.0f;
    float *weight = shared + shared_places<D>::weight;
    float *part = shared + shared_places<D>::part;
    float *sum = shared + shared_places<D>::sum;
    const float *most = shared + shared_places<D>::most;
    float o[HEADS * D / THREADS];

    find_most<D>(a, item, kv_head, states, n_states, shared);
    UNROLL
    for (unsigned e = 0; e < HEADS * D / THREADS; e++)
        o[e] = 0.0f;
    for (size_t first = 0; first < n_states; first += MERGED_AT_ONCE) {
        const size_t left = n_states - first;
        const unsigned n = left < MERGED_AT_ONCE ? (unsigned)left : MERGED_AT_ONCE;

        for (unsigned i = threadIdx.x; i < n * group; i += THREADS) {
            const float *state = states + (first + i / group) * stride + i % group;

            weight[i] = weight_of(state[0], most[i % group]);
            part[i] = weight[i] * state[group];
        }
        __syncthreads();
        for (unsigned c = 0; c < n; c++) {
            const float *state = states + (first + c) * stride + 2 * group;

            UNROLL
            for (unsigned e = 0; e < HEADS * D / THREADS; e++) {
                const unsigned i = e * THREADS + threadIdx.x;

                if (i < group * D)
                    o[e] = __fmaf_rn(state[i], weight[c * group + i / D], o[e]);
            }
        }
        if (threadIdx.x < group)
            for (unsigned c = 0; c < n; c++)
                sum[threadIdx.x] += part[c * group + threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.x < group) {
        const float p =
            exp2f(shared[shared_places<D>::score + threadIdx.x] - (most[threadIdx.x] - bias));

        weight[threadIdx.x] = p;
        sum[threadIdx.x] += p;
        if (a->lse)
            a->lse[item->first_row * a->layer.query_heads + kv_head * group + threadIdx.x] =
                __fmaf_rn(most[threadIdx.x] - bias, LN_2, logf(sum[threadIdx.x]));
    }
    __syncthreads();
    UNROLL
    for (unsigned e = 0; e < HEADS * D / THREADS; e++) {
        const unsigned i = e * THREADS + threadIdx.x;

        if (i >= group * D)
            continue;
        o[e] =
            __fmaf_rn(rounded_element(DTYPE, input_element(&a->v, item->first_row, kv_head, i % D)),
                      weight[i / D], o[e]);
        store_element(a->out.dtype, a->out.data,
                      item->first_row * a->out.token_stride +
                          (kv_head * group + i / D) * a->out.head_stride + i % D,
                      o[e] * (1.0f / sum[i / D]));
    }
}

/* ---- The kernel ---- */

/* Blocks of an item: at least one, for the new token. */
EVERYWHERE size_t blocks_of_item(uint64_t tokens)
{
    const size_t blocks = (tokens + BLOCK_PAGES * LENGTH - 1) / (BLOCK_PAGES * LENGTH);

    return blocks > 0 ? blocks : 1;
}

/* The first block of an item, counted from the first one of the step: blocks of items before it are
 * no more than that. So are those of a launch, which lets blocks that no item has leave. */
EVERYWHERE size_t first_block(size_t item, uint64_t first_page)
{
    return first_page / BLOCK_PAGES + item;
}

/* A block of the launch. */
struct item_block {
    size_t item, number; /* the step's item, and the block's number in it */
    size_t first;        /* block of the launch that is the item's first one */
};

__device__ static inline struct item_block find_block(const struct decode_views *a,
                                                      const struct device_item *items)
{
    const size_t from = first_block(a->first_item, items[a->first_item].first_page);
    size_t end = a->end_item;
    struct item_block block = {a->first_item, 0, 0};

    while (end - block.item > 1) {
        const size_t middle = block.item + (end - block.item) / 2;

        if (first_block(middle, items[middle].first_page) - from <= blockIdx.x)
            block.item = middle;
        else
            end = middle;
    }
    block.first = first_block(block.item, items[block.item].first_page) - from;
    block.number = blockIdx.x - block.first;
    return block;
}

/* One block a run of BLOCK_PAGES of an item, and KV head. */
template <unsigned D, pkv_dtype DTYPE, bool CODED_K, bool CODED_V>
__global__ static void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    attend_decode(struct decode_views a)
{
    PKV_SHARED(float, shared);
    const struct plan_view *plan = plan_of(&a.plan);
    const unsigned kv_head = blockIdx.y;
    const unsigned group = a.layer.query_heads / a.layer.kv_heads;
    const size_t stride = group * (D + 2);
    unsigned *last = (unsigned *)(void *)(shared + shared_places<D>::last);
    const struct device_item *item;
    struct item_block block;
    size_t blocks;
    float *states;

    if (!plan)
        return;
    block = find_block(&a, plan->items);
    item = &plan->items[block.item];
    if (item->new_tokens != 1 || block.number >= blocks_of_item(item->tokens))
        return;
    load_queries<D, DTYPE>(&a, item->first_row, kv_head, shared);
    attend_warp<D, DTYPE, CODED_K, CODED_V>(&a, item, plan->tables + item->first_page, block.number,
                                            kv_head, shared);
    __syncthreads();
    /* Again, so that it takes no registers before. */
    block = find_block(&a, plan->items);
    blocks = blocks_of_item(item->tokens);
    states = a.states + (block.first * a.layer.kv_heads + kv_head * blocks) * stride;
    if (blocks == 1) {
        states = shared + shared_places<D>::merged;
        merge_warps<D>(group, states, shared);
        __syncthreads();
    } else {
        merge_warps<D>(group, states + block.number * stride, shared);
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned *arrivals = &a.arrivals[block.item * a.layer.kv_heads + kv_head];
            const unsigned others = (unsigned)blocks - 1;

            __threadfence(); /* the block's state comes before its arrival */
            *last = atomicInc(arrivals, others) == others; /* which leaves 0 */
            __threadfence(); /* and the others' states behind theirs */
        }
        __syncthreads();
        if (!*last)
            return;
    }
    finish<D, DTYPE>(&a, item, kv_head, states, blocks, shared);
}

/* ---- The host's side ---- */

static size_t state_bytes(const struct geometry *geometry)
{
    return geometry->query_heads * (geometry->head_dim + 2) * sizeof(float);
}

static size_t most_items(const struct backend *backend)
{
    return min_size(backend->capacity.max_sequences, backend->capacity.max_step_tokens);
}

/* Room for the blocks of sequences that share nothing; others take several launches, of which each
 * has room for one item at least. */
pkv_status decode_open(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    const size_t pages = backend->capacity.max_tokens / LENGTH;
    size_t arrivals_bytes, bytes;
    bool any = false;
    pkv_status status;

    for (size_t layer = 0; layer < geometry->layers; layer++)
        any = any || store_layer(backend, layer).fragments;
    if (!any)
        return PKV_OK;
    if (__builtin_add_overflow(pages, most_items(backend), &backend->decode_blocks) ||
        __builtin_add_overflow(backend->decode_blocks / BLOCK_PAGES + 1, most_items(backend),
                               &backend->decode_blocks) ||
        __builtin_mul_overflow(backend->decode_blocks, state_bytes(geometry), &bytes) ||
        __builtin_mul_overflow(most_items(backend), geometry->kv_heads * sizeof(unsigned),
                               &arrivals_bytes))
        return fail(backend->message, PKV_ERROR_MEMORY,
                    "attention states are more than memory can hold");
    gpu_need_scratch(backend, bytes);
    status = gpu_allocate(backend, arrivals_bytes, "attention states",
                          (void **)&backend->decode_arrivals);
    if (status == PKV_OK)
        status = gpu_check(
            backend, cudaMemsetAsync(backend->decode_arrivals, 0, arrivals_bytes, backend->stream),
            "cannot clear attention states");
    return status;
}

void decode_close(struct backend *backend)
{
    gpu_release(backend, most_items(backend) * backend->geometry->kv_heads * sizeof(unsigned),
                backend->decode_arrivals);
}

template <unsigned D, pkv_dtype DTYPE>
static void launch(const struct decode_views *a, dim3 grid, cudaStream_t stream)
{
    const size_t bytes = shared_places<D>::floats * sizeof(float);
    const bool coded_k = a->layer.factors_k == PKV_FACTORS_INT4;
    const bool coded_v = a->layer.factors_v == PKV_FACTORS_INT4;

    if (coded_k && coded_v)
        PKV_LAUNCH((attend_decode<D, DTYPE, true, true>), grid, THREADS, bytes, stream, *a);
    else if (coded_k)
        PKV_LAUNCH((attend_decode<D, DTYPE, true, false>), grid, THREADS, bytes, stream, *a);
    else if (coded_v)
        PKV_LAUNCH((attend_decode<D, DTYPE, false, true>), grid, THREADS, bytes, stream, *a);
    else
        PKV_LAUNCH((attend_decode<D, DTYPE, false, false>), grid, THREADS, bytes, stream, *a);
}

static size_t pages_of_item(const struct backend *backend, size_t item)
{
    return pages_count(&backend->geometry->policy, backend->step.plan.items[item].tokens);
}

bool decode_fits(const struct backend *backend)
{
    const struct backend_plan *plan = &backend->step.plan;
    size_t pages = 0;

    for (size_t i = 0; i < plan->n_items; i++)
        pages += pages_of_item(backend, i);
    return !backend->decode_arrivals || first_block(plan->n_items, pages) <= backend->decode_blocks;
}

pkv_status decode_run(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct backend_plan *plan = &backend->step.plan;
    struct decode_views a = {};
    size_t pages = 0; /* of the items before end_item */

    a.layer = store_layer(backend, layer);
    a.plan = gpu_plan(backend);
    a.q = io->q;
    a.k = io->k;
    a.v = io->v;
    a.out = io->out;
    a.lse = io->lse;
    a.states = backend->scratch;
    a.arrivals = backend->decode_arrivals;
    if (backend->step.capturing && !decode_fits(backend))
        return fail(backend->message, PKV_ERROR_ARGUMENT,
                    "stream: it is being captured; items that share pages have too many together");
    while (a.end_item < plan->n_items) {
        const size_t from = first_block(a.end_item, pages);
        size_t blocks;
        dim3 grid;

        a.first_item = a.end_item;
        do
            pages += pages_of_item(backend, a.end_item++);
        while (a.end_item < plan->n_items &&
               first_block(a.end_item + 1, pages + pages_of_item(backend, a.end_item)) - from <=
                   backend->decode_blocks);
        blocks = backend->step.capturing ? backend->decode_blocks
                                         : first_block(a.end_item, pages) - from;
        grid = dim3((unsigned)blocks, a.layer.kv_heads);
        if (a.layer.d == 64 && a.layer.dtype == PKV_F16)
            launch<64, PKV_F16>(&a, grid, backend->stream);
        else if (a.layer.d == 64)
            launch<64, PKV_BF16>(&a, grid, backend->stream);
        else if (a.layer.dtype == PKV_F16)
            launch<128, PKV_F16>(&a, grid, backend->stream);
        else
            launch<128, PKV_BF16>(&a, grid, backend->stream);
    }
    return gpu_check_launch(backend, "cannot attend");
}
