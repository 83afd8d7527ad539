/* SPDX-License-Identifier: MIT */
/*
 * Attention of many new tokens over pages of 32 tokens with d 64 or 128 and a storage type of 16
 * bits, and causally over each other. A row is one query head of one token; the query heads of a KV
 * head follow each other, then come the next token's. A block has ROWS rows of an item and KV head,
 * a warp WARP_ROWS of them, which are the matrix A of mma.m16n8k16; what is stored is B, for whose
 * fragments the order of decode.cu's A does as well (fragments.h):
 *
 *     dense page, new tokens   S = Q K^T,                O += P V
 *     factor page              S = (Q R_K^T) L_K^T,      O += (P L_V) R_V
 *
 * A block walks through its item's pages and then, in tiles of as many, through the new tokens up
 * to its own last one. While it works on a tile the next one is copied to shared memory: dense
 * pages as they are, new tokens row by row, whose pieces of 16 bytes are exchanged so that ldmatrix
 * finds any 8 rows in different banks. Factors are small and read by each warp.
 *
 * Sums are f32. P, in (0, 1], is rounded to the storage type, 2^-9 of it with bf16, and so are its
 * sums that divide O. Products with a factor are split into two numbers, and so is q where it is of
 * another type than the storage; as in decode.cu q is then scaled to [1, 2) for f16, which P times
 * 2^14 is for. What a row gets depends on its item alone, since other rows and what is masked leave
 * its bits as they are.
 *
 * A warp loads 48 fragments of 512 bytes from shared memory for the 128 mma of a tile with d 128,
 * 0.5 MFLOP: 21 FLOP a byte. Of 128 bytes a cycle that makes 2,700 FLOP a cycle and multiprocessor,
 * and 632 TFLOP/s of the 132 of an H200 at 1.755 GHz: the bound, of what has not been measured.
 */
#include "prefill.h"

#include "fragments.h"
#include "store.h"

#define WARPS     4
#define THREADS   (32 * WARPS)
#define WARP_ROWS 32
#define ROWS      (WARPS * WARP_ROWS)
#define M         (WARP_ROWS / TILE) /* of a warp's tiles of A */
#define LENGTH    32                 /* tokens of a tile: P */
#define N         (LENGTH / 8)       /* of its tiles of C */

/* Blocks that a multiprocessor is to hold, which bounds registers: 255. */
#define BLOCKS_AT_ONCE 2

#define MAX_ITEMS 65535 /* of a launch */

#define LOG2_E 1.44269504f
#define LN_2   0.693147181f

struct prefill_views {
    struct layer_view layer;
    struct launch_plan plan;
    pkv_input q, k, v;
    pkv_output out;
    float *lse;
    size_t first_item;
    unsigned q_parts; /* 1; 2: q is of another type than the storage */
    bool copied;      /* new K and V can be copied 16 bytes at a time */
    bool out_in_pieces;
};

/* Shared memory of a block, in bytes. At the end O is where Q and the tiles were. */
template <unsigned D> struct shared_places {
    static const unsigned row = 2 * D;              /* of Q, K and V */
    static const unsigned half = LENGTH * row;      /* K or V of a tile */
    static const unsigned factor = 0;               /* float [ROWS], of scores */
    static const unsigned tiles = 4 * ROWS;         /* two of K and V */
    static const unsigned q = tiles + 2 * 2 * half; /* [parts][ROWS] */
    static const unsigned out = tiles;              /* float [ROWS][D] */
    static const unsigned bytes = q + ROWS * row;   /* with one part */
    static const unsigned more_bytes = q + 2 * ROWS * row;
};

/* What a block has to do; copied from where the plan is, since copies to shared memory would have
 * it loaded anew. Tokens are counted from the item's first new one; the queries of 2^32 would take
 * half a terabyte. */
struct prompt_part {
    const struct page *table;
    unsigned step_row;    /* of token 0, among the step's */
    unsigned cached;      /* tiles of stored pages */
    unsigned last_tokens; /* of the last one of these */
    unsigned tiles;       /* and of new tokens */
    unsigned new_tokens;
    unsigned kv_head;
    unsigned group;
    unsigned rows; /* of the block */
    unsigned first_token;
    unsigned first_head; /* of the group's: row 0 is one of token first_token */
};

/* Of a row of the block. */
__device__ static inline unsigned token_of(const struct prompt_part *part, unsigned row)
{
    return part->first_token + (part->first_head + row) / part->group;
}

__device__ static inline unsigned query_head_of(const struct prompt_part *part, unsigned row)
{
    return part->kv_head * part->group + (part->first_head + row) % part->group;
}

/* The rows of a warp, from `first` of the block on. */
struct warp_rows {
    unsigned first, first_token, last_token;
};

/* A thread's pieces of 16 bytes of a tile: of K and of V the same one of every `step`-th row. */
template <unsigned D> struct thread_pieces {
    static const unsigned of_row = D / 8;
    static const unsigned step = THREADS / of_row;
};

/* m is the largest sum Q K^T; each column of l is the sum of P. */
template <unsigned D> struct warp_state {
    float m[M][2];
    float l[M][4];
    float o[M][D / 8][4];
};

/* ---- Products ---- */

template <pkv_dtype DTYPE>
__device__ static inline void multiply(float c[4], const unsigned a[4], unsigned b0, unsigned b1)
{
    const unsigned b[2] = {b0, b1};

    if (DTYPE == PKV_F16)
        warp_mma_f16(c, a, b);
    else
        warp_mma_bf16(c, a, b);
}

/* Of both halves of a tile. */
template <pkv_dtype DTYPE>
__device__ static inline void multiply_tile(float c[2][4], const unsigned a[4],
                                            const unsigned tile[4])
{
    multiply<DTYPE>(c[0], a, tile[0], tile[2]);
    multiply<DTYPE>(c[1], a, tile[1], tile[3]);
}

/* 16 columns of C as 16 columns of A. */
template <pkv_dtype DTYPE> __device__ static inline void turn(const float c[2][4], unsigned a[4])
{
    UNROLL
    for (unsigned n = 0; n < 4; n++)
        a[n] = pair<DTYPE>(c[n / 2][n % 2 * 2], c[n / 2][n % 2 * 2 + 1]);
}

struct split_a {
    unsigned upper[4], lower[4];
};

template <pkv_dtype DTYPE>
__device__ static inline void turn_split(const float c[2][4], struct split_a *a)
{
    UNROLL
    for (unsigned n = 0; n < 4; n++)
        split<DTYPE>(c[n / 2][n % 2 * 2], c[n / 2][n % 2 * 2 + 1], &a->upper[n], &a->lower[n]);
}

template <pkv_dtype DTYPE>
__device__ static inline void multiply_split(float c[2][4], const struct split_a *a,
                                             const unsigned tile[4])
{
    multiply_tile<DTYPE>(c, a->upper, tile);
    multiply_tile<DTYPE>(c, a->lower, tile);
}

/* ---- Rows in shared memory ---- */

/* Where 16 bytes of a row are, counted from its beginning. */
__device__ static inline unsigned piece_at(unsigned row, unsigned piece)
{
    return (piece ^ row % 8) * 16;
}

/* Rows 16 i and columns 16 j of rows in shared memory. */
template <unsigned D>
__device__ static inline void load_tile(const unsigned char *rows, unsigned i, unsigned j,
                                        unsigned a[4])
{
    const unsigned lane = threadIdx.x % 32;

    warp_load(a, rows + (TILE * i + lane % 16) * shared_places<D>::row +
                     piece_at(lane, 2 * j + lane / 16));
}

/* Its transpose: columns 16 i and rows 16 j. */
template <unsigned D>
__device__ static inline void load_tile_transposed(const unsigned char *rows, unsigned i,
                                                   unsigned j, unsigned a[4])
{
    const unsigned lane = threadIdx.x % 32;

    warp_load_transposed(a, rows + (TILE * j + lane % 8 + lane / 16 * 8) * shared_places<D>::row +
                                piece_at(lane, 2 * i + lane / 8 % 2));
}

/* Queries to shared memory, by a warp a row, and what a score has to be multiplied by. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static void load_queries(const struct prefill_views *a, const struct prompt_part *part,
                                    unsigned char *shared)
{
    const unsigned each = D / 32; /* elements of a lane */
    const unsigned first = threadIdx.x % 32 * each;
    float *factor = (float *)(void *)(shared + shared_places<D>::factor);

    for (unsigned r = threadIdx.x / 32; r < ROWS; r += WARPS) {
        unsigned *to =
            (unsigned *)(void *)(shared + shared_places<D>::q + r * shared_places<D>::row +
                                 piece_at(r, first / 8) + first % 8 * 2);
        float x[each] = {};
        unsigned most = 0;

        if (r < part->rows) {
            const unsigned row = part->step_row + token_of(part, r);
            const unsigned head = query_head_of(part, r);

            UNROLL
            for (unsigned i = 0; i < each; i++)
                x[i] = input_element(&a->q, row, head, first + i);
        }
        UNROLL
        for (unsigned i = 0; i < each; i++) {
            const unsigned bits = f32_bits(x[i]) & 0x7fffffffu;

            most = bits > most ? bits : most;
        }
        most = __reduce_max_sync(0xffffffffu, most) >> 23;
        most = DTYPE != PKV_F16 || a->q_parts == 1 ? 127 : most < 1 ? 1 : most > 253 ? 253 : most;
        if (threadIdx.x % 32 == 0)
            factor[r] = a->layer.softmax_scale * LOG2_E * f32_from_bits(most << 23);
        UNROLL
        for (unsigned i = 0; i < each; i += 2) {
            const float scale = f32_from_bits((254 - most) << 23);
            unsigned upper, lower;

            split<DTYPE>(x[i] * scale, x[i + 1] * scale, &upper, &lower);
            to[i / 2] = upper;
            if (a->q_parts == 2)
                to[ROWS * D / 2 + i / 2] = lower;
        }
    }
}

/* 16 bytes of a new token's K or V, as they are stored. */
template <pkv_dtype DTYPE>
__device__ static void round_piece(const pkv_input *input, size_t row, unsigned head,
                                   unsigned first, bool there, unsigned char *to)
{
    for (unsigned i = 0; i < 8; i++)
        store_element(DTYPE, to, i, there ? input_element(input, row, head, first + i) : 0.0f);
}

/* K or V of a tile of new tokens, from token `first` on; `left` of them are there. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void fetch_rows(const pkv_input *input, bool copied,
                                         const struct prompt_part *part, unsigned first,
                                         unsigned left, unsigned char *to)
{
    const unsigned step = thread_pieces<D>::step;
    const unsigned t = threadIdx.x / thread_pieces<D>::of_row;
    const unsigned i = threadIdx.x % thread_pieces<D>::of_row;
    const unsigned row = part->step_row + first;

    static_assert(step % 8 == 0, "so that the thread's pieces are at the same place in each row");
    to += piece_at(t, i);
    if (copied) {
        const uint16_t *from = (const uint16_t *)input->data +
                               (size_t)(row + t) * input->token_stride +
                               part->kv_head * input->head_stride + 8 * i;

        to += t * shared_places<D>::row;
        UNROLL
        for (unsigned n = 0; n < LENGTH / step; n++)
            copy_16(to + n * step * shared_places<D>::row, from + n * step * input->token_stride,
                    t + n * step < left);
    } else {
        for (unsigned r = t; r < LENGTH; r += step)
            round_piece<DTYPE>(input, row + r, part->kv_head, 8 * i, r < left,
                               to + r * shared_places<D>::row);
    }
}

/* Tile `number` on its way to shared memory. Behind the last new token there are zeros. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void fetch_tile(const struct prefill_views *a,
                                         const struct prompt_part *part, unsigned number,
                                         unsigned char *shared)
{
    unsigned char *to = shared + shared_places<D>::tiles + number % 2 * 2 * shared_places<D>::half;

    if (number < part->cached) {
        const struct page page = part->table[number];
        const unsigned char *from =
            dense_page(&a->layer, page.slot, part->kv_head) + 16 * threadIdx.x;

        if (page.kind == SLOT_FACTOR)
            return;
        UNROLL
        for (unsigned n = 0; n < 2 * LENGTH / thread_pieces<D>::step; n++)
            copy_16(to + 16 * threadIdx.x + 16 * THREADS * n, from + 16 * THREADS * n, true);
    } else {
        const unsigned first = (number - part->cached) * LENGTH;
        const unsigned left = part->new_tokens - first;

        fetch_rows<D, DTYPE>(&a->k, a->copied, part, first, left, to);
        fetch_rows<D, DTYPE>(&a->v, a->copied, part, first, left, to + shared_places<D>::half);
    }
}

/* ---- Scores ---- */

/* `q`: the warp's rows, `parts` times. */
template <unsigned D, pkv_dtype DTYPE, bool NEW>
__device__ static inline void score_dense(const unsigned char *keys, const unsigned char *q,
                                          unsigned parts, float s[M][N][4])
{
    for (unsigned part = 0; part < parts; part++) {
        UNROLL
        for (unsigned j = 0; j < D / TILE; j++) {
            unsigned rows[M][4], tile[4];

            UNROLL
            for (unsigned m = 0; m < M; m++)
                load_tile<D>(q + part * ROWS * shared_places<D>::row, m, j, rows[m]);
            UNROLL
            for (unsigned i = 0; i < 2; i++) {
                if (NEW)
                    load_tile<D>(keys, i, j, tile);
                else
                    tile_of<false>(shared_16(dense_chunk(keys, 2 * j + i)), tile);
                UNROLL
                for (unsigned m = 0; m < M; m++)
                    multiply_tile<DTYPE>(s[m] + 2 * i, rows[m], tile);
            }
        }
    }
}

/* C += inner F, F being parts[PART] of 16 ranks and TILES times 16 columns; of f16 inner is
 * scaled. */
template <unsigned PART, unsigned TILES, pkv_dtype DTYPE>
__device__ static inline void multiply_factor(const struct layer_view *layer,
                                              const unsigned char *page, float inner[M][2][4],
                                              float c[M][2 * TILES][4])
{
    const struct chunk_view factor = view_chunks<false, PART>(layer, page, 1);
    const float scale = DTYPE == PKV_F16 ? fit_f16<M * 8>(&inner[0][0][0]) : 1.0f;
    struct split_a rows[M];
    unsigned tile[4];

    UNROLL
    for (unsigned m = 0; m < M; m++)
        turn_split<DTYPE>(inner[m], &rows[m]);
    UNROLL
    for (unsigned i = 0; i < TILES; i++) {
        tile_of<false>(load_chunk(&factor, i), tile);
        UNROLL
        for (unsigned m = 0; m < M; m++) {
            float(*sum)[4] = c[m] + 2 * i;

            if (DTYPE == PKV_F16) {
                float product[2][4] = {};

                multiply_split<DTYPE>(product, &rows[m], tile);
                UNROLL
                for (unsigned n = 0; n < 8; n++)
                    sum[n / 4][n % 4] = __fmaf_rn(product[n / 4][n % 4], scale, sum[n / 4][n % 4]);
            } else {
                multiply_split<DTYPE>(sum, &rows[m], tile);
            }
        }
    }
}

template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void score_native(const struct layer_view *layer,
                                           const unsigned char *page, const unsigned char *q,
                                           unsigned parts, float s[M][N][4])
{
    const struct chunk_view right = view_chunks<false, 1>(layer, page, 1);
    float inner[M][2][4] = {};
    unsigned tile[4];

    for (unsigned part = 0; part < parts; part++) {
        UNROLL
        for (unsigned j = 0; j < D / TILE; j++) {
            tile_of<true>(load_chunk(&right, j), tile);
            UNROLL
            for (unsigned m = 0; m < M; m++) {
                unsigned a[4];

                load_tile<D>(q + part * ROWS * shared_places<D>::row, m, j, a);
                multiply_tile<DTYPE>(inner[m], a, tile);
            }
        }
    }
    multiply_factor<0, 2, DTYPE>(layer, page, inner, s);
}

/* A of the storage type as bf16. */
template <pkv_dtype DTYPE>
__device__ static inline void as_bf16(const unsigned a[4], struct split_a *rows)
{
    UNROLL
    for (unsigned n = 0; n < 4; n++)
        split<PKV_BF16>(low<DTYPE>(a[n]), high<DTYPE>(a[n]), &rows->upper[n], &rows->lower[n]);
}

/* Of codes: with its scale one of R_K takes 15 bits, which two parts hold; the scales of L_K go to
 * the columns of C before. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void score_codes(const struct layer_view *layer, const unsigned char *page,
                                          const unsigned char *q, unsigned parts, float s[M][N][4])
{
    const unsigned t = threadIdx.x % 4;
    const struct part_place *places = layer->parts;
    const struct chunk_view right = view_chunks<true, 1>(layer, page, 4);
    const struct chunk_view left = view_chunks<true, 0>(layer, page, 2);
    const unsigned char *right_scales = page + places[1].scales + t * (D / 2);
    const uint16_t *left_scales = (const uint16_t *)(const void *)(page + places[0].scales);
    const uint2 left_chunk = load_small_chunk(&left);
    float inner[M][2][4] = {};
    struct split_a rows[M];
    unsigned tile[4];

    UNROLL
    for (unsigned j = 0; j < D / TILE; j++) {
        const uint4 chunk = load_chunk(&right, j / 4);
        const uint2 scales = load_8(right_scales + 8 * j);
        struct split_a factor;

        tile_of_codes<true>(j % 4 < 2 ? chunk.x : chunk.y, j % 4 < 2 ? chunk.z : chunk.w, j % 2,
                            tile);
        UNROLL
        for (unsigned n = 0; n < 4; n++) {
            const unsigned scale = n < 2 ? scales.x : scales.y;

            split<PKV_BF16>(low<PKV_BF16>(tile[n]) * low_f16(scale),
                            high<PKV_BF16>(tile[n]) * high_f16(scale), &factor.upper[n],
                            &factor.lower[n]);
        }
        for (unsigned part = 0; part < parts; part++) {
            UNROLL
            for (unsigned m = 0; m < M; m++) {
                unsigned a[4];

                load_tile<D>(q + part * ROWS * shared_places<D>::row, m, j, a);
                if (DTYPE == PKV_F16) {
                    as_bf16<DTYPE>(a, &rows[m]);
                    multiply_split<PKV_BF16>(inner[m], &rows[m], factor.upper);
                    multiply_tile<PKV_BF16>(inner[m], rows[m].upper, factor.lower);
                } else {
                    multiply_tile<PKV_BF16>(inner[m], a, factor.upper);
                    multiply_tile<PKV_BF16>(inner[m], a, factor.lower);
                }
            }
        }
    }
    UNROLL
    for (unsigned n = 0; n < 4; n++) {
        const unsigned column = n / 2 * 8 + 2 * t + n % 2;
        const float scale = column < layer->rank_k ? f16_to_f32(left_scales[column]) : 0.0f;

        UNROLL
        for (unsigned m = 0; m < M; m++) {
            inner[m][n / 2][n % 2] *= scale;
            inner[m][n / 2][n % 2 + 2] *= scale;
        }
    }
    UNROLL
    for (unsigned m = 0; m < M; m++)
        turn_split<PKV_BF16>(inner[m], &rows[m]);
    UNROLL
    for (unsigned i = 0; i < 2; i++) {
        tile_of_codes<false>(left_chunk.x, left_chunk.y, i, tile);
        UNROLL
        for (unsigned m = 0; m < M; m++)
            multiply_split<PKV_BF16>(s[m] + 2 * i, &rows[m], tile);
    }
}

/* ---- Weights ---- */

/* Rows see that many tokens of the tile. */
__device__ static inline void mask_scores(const unsigned seen[M][2], float s[M][N][4])
{
    const unsigned t = threadIdx.x % 4;

    UNROLL
    for (unsigned n = 0; n < M * N * 4; n++)
        if (n / 4 % N * 8 + 2 * t + n % 2 >= seen[n / (4 * N)][n % 4 / 2])
            s[n / (4 * N)][n / 4 % N][n % 4] = -INFINITY;
}

/* Scores to P, as A; rescales the state. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void softmax(const float *factors, float s[M][N][4],
                                      struct warp_state<D> *state, unsigned p[M][2][4])
{
    const float bias = DTYPE == PKV_F16 ? 14.0f : 0.0f;
    const unsigned one = DTYPE == PKV_F16 ? 0x3c003c00u : 0x3f803f80u;
    const unsigned g = threadIdx.x % 32 / 4;
    float most[M][2], factor[M][2];
    bool grows = false;

    UNROLL
    for (unsigned r = 0; r < 2 * M; r++) {
        const unsigned m = r / 2, h = r % 2;

        factor[m][h] = factors[TILE * m + 8 * h + g];
        most[m][h] = state->m[m][h];
        UNROLL
        for (unsigned n = 0; n < 2 * N; n++)
            most[m][h] = fmaxf(most[m][h], s[m][n / 2][2 * h + n % 2]);
        most[m][h] = fmaxf(most[m][h], __shfl_xor_sync(0xffffffffu, most[m][h], 1));
        most[m][h] = fmaxf(most[m][h], __shfl_xor_sync(0xffffffffu, most[m][h], 2));
        grows = grows || most[m][h] != state->m[m][h];
    }
    if (__any_sync(0xffffffffu, grows)) {
        UNROLL
        for (unsigned r = 0; r < 2 * M; r++) {
            const unsigned m = r / 2, h = r % 2;
            const float scale = power_of_2((state->m[m][h] - most[m][h]) * factor[m][h]);

            state->m[m][h] = most[m][h];
            UNROLL
            for (unsigned n = 0; n < 2; n++) {
                state->l[m][2 * h + n] *= scale;
                UNROLL
                for (unsigned i = 0; i < D / 8; i++)
                    state->o[m][i][2 * h + n] *= scale;
            }
        }
    }
    UNROLL
    for (unsigned m = 0; m < M; m++) {
        UNROLL
        for (unsigned n = 0; n < N * 4; n++) {
            float *score = &s[m][n / 4][n % 4];
            const unsigned h = n % 4 / 2;

            *score = power_of_2(
                __fmaf_rn(*score, factor[m][h], __fmaf_rn(-most[m][h], factor[m][h], bias)));
        }
        UNROLL
        for (unsigned k = 0; k < 2; k++) {
            turn<DTYPE>(s[m] + 2 * k, p[m][k]);
            multiply<DTYPE>(state->l[m], p[m][k], one, one);
        }
    }
}

/* ---- Values ---- */

template <unsigned D, pkv_dtype DTYPE, bool NEW>
__device__ static inline void accumulate_dense(const unsigned char *values, unsigned tokens,
                                               const unsigned p[M][2][4],
                                               struct warp_state<D> *state)
{
    unsigned tile[4];

    UNROLL
    for (unsigned i = 0; i < D / TILE; i++) {
        UNROLL
        for (unsigned k = 0; k < 2; k++) {
            if (NEW) {
                load_tile_transposed<D>(values, i, k, tile);
            } else {
                tile_of<false>(shared_16(dense_chunk(values, 2 * i + k)), tile);
                if (tokens < LENGTH)
                    mask_columns(TILE * k, tokens, tile);
            }
            UNROLL
            for (unsigned m = 0; m < M; m++)
                multiply_tile<DTYPE>(state->o[m] + 2 * i, p[m][k], tile);
        }
    }
}

template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void
accumulate_native(const struct layer_view *layer, const unsigned char *page,
                  const unsigned p[M][2][4], struct warp_state<D> *state)
{
    const struct chunk_view left = view_chunks<false, 2>(layer, page, 1);
    float inner[M][2][4] = {};
    unsigned tile[4];

    UNROLL
    for (unsigned k = 0; k < 2; k++) {
        tile_of<true>(load_chunk(&left, k), tile);
        UNROLL
        for (unsigned m = 0; m < M; m++)
            multiply_tile<DTYPE>(inner[m], p[m][k], tile);
    }
    multiply_factor<3, D / TILE, DTYPE>(layer, page, inner, state->o);
}

/* The scales of L_V go to the columns of P, those of R_V to the columns of C. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void accumulate_codes(const struct layer_view *layer,
                                               const unsigned char *page, const unsigned p[M][2][4],
                                               struct warp_state<D> *state)
{
    const unsigned t = threadIdx.x % 4;
    const struct part_place *places = layer->parts;
    const struct chunk_view left = view_chunks<true, 2>(layer, page, 2);
    const struct chunk_view right = view_chunks<true, 3>(layer, page, 4);
    const uint2 left_chunk = load_small_chunk(&left);
    /* Of columns 2 t and 2 t + 1 of each 8. */
    const unsigned char *left_scales = page + places[2].scales + 2 * t * (LENGTH / 4);
    const unsigned char *right_scales = page + places[3].scales + 2 * t * (D / 4);
    const uint2 even = load_8(left_scales), odd = load_8(left_scales + LENGTH / 4);
    float inner[M][2][4] = {};
    struct split_a rows[M];
    unsigned tile[4];

    UNROLL
    for (unsigned k = 0; k < 2; k++) {
        const unsigned evens = k ? even.y : even.x, odds = k ? odd.y : odd.x;

        tile_of_codes<true>(left_chunk.x, left_chunk.y, k, tile);
        UNROLL
        for (unsigned m = 0; m < M; m++) {
            UNROLL
            for (unsigned n = 0; n < 4; n++)
                split<PKV_BF16>(low<DTYPE>(p[m][k][n]) * (n < 2 ? low_f16(evens) : high_f16(evens)),
                                high<DTYPE>(p[m][k][n]) * (n < 2 ? low_f16(odds) : high_f16(odds)),
                                &rows[m].upper[n], &rows[m].lower[n]);
            multiply_split<PKV_BF16>(inner[m], &rows[m], tile);
        }
    }
    UNROLL
    for (unsigned m = 0; m < M; m++)
        turn_split<PKV_BF16>(inner[m], &rows[m]);
    UNROLL
    for (unsigned i = 0; i < D / TILE; i++) {
        const uint4 chunk = load_chunk(&right, i / 4);
        const unsigned scales[2] = {load_4(right_scales + 4 * i),
                                    load_4(right_scales + D / 4 + 4 * i)};

        tile_of_codes<false>(i % 4 < 2 ? chunk.x : chunk.y, i % 4 < 2 ? chunk.z : chunk.w, i % 2,
                             tile);
        UNROLL
        for (unsigned m = 0; m < M; m++) {
            float(*o)[4] = state->o[m] + 2 * i;
            float c[2][4] = {};

            multiply_split<PKV_BF16>(c, &rows[m], tile);
            UNROLL
            for (unsigned n = 0; n < 8; n++)
                o[n / 4][n % 4] = __fmaf_rn(
                    c[n / 4][n % 4], n < 4 ? low_f16(scales[n % 2]) : high_f16(scales[n % 2]),
                    o[n / 4][n % 4]);
        }
    }
}

/* ---- One tile ---- */

template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void attend_page(const struct prefill_views *a,
                                          const struct prompt_part *part, unsigned number,
                                          const unsigned char *tile, const unsigned char *q,
                                          const float *factors, struct warp_state<D> *state)
{
    const struct page page = part->table[number];
    const struct layer_view *layer = &a->layer;
    float s[M][N][4] = {};
    unsigned p[M][2][4];

    if (page.kind == SLOT_FACTOR) {
        const unsigned char *data = factor_page(layer, page.slot, part->kv_head);

        if (layer->factors_k == PKV_FACTORS_INT4)
            score_codes<D, DTYPE>(layer, data, q, a->q_parts, s);
        else
            score_native<D, DTYPE>(layer, data, q, a->q_parts, s);
        softmax<D, DTYPE>(factors, s, state, p);
        if (layer->factors_v == PKV_FACTORS_INT4)
            accumulate_codes<D, DTYPE>(layer, data, p, state);
        else
            accumulate_native<D, DTYPE>(layer, data, p, state);
    } else {
        const unsigned tokens = number + 1 < part->cached ? LENGTH : part->last_tokens;
        const unsigned seen[M][2] = {{tokens, tokens}, {tokens, tokens}};

        score_dense<D, DTYPE, false>(tile, q, a->q_parts, s);
        if (tokens < LENGTH)
            mask_scores(seen, s);
        softmax<D, DTYPE>(factors, s, state, p);
        accumulate_dense<D, DTYPE, false>(tile + shared_places<D>::half, tokens, p, state);
    }
}

/* New tokens from `first` on; nothing where they follow the warp's rows. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void
attend_new(const struct prefill_views *a, const struct prompt_part *part, unsigned first,
           const struct warp_rows *rows, const unsigned char *tile, const unsigned char *q,
           const float *factors, struct warp_state<D> *state)
{
    float s[M][N][4] = {};
    unsigned p[M][2][4];

    if (first > rows->last_token)
        return;
    score_dense<D, DTYPE, true>(tile, q, a->q_parts, s);
    if (first + LENGTH - 1 > rows->first_token) {
        unsigned seen[M][2];

        UNROLL
        for (unsigned r = 0; r < 2 * M; r++) {
            unsigned token = token_of(part, rows->first + 8 * r + threadIdx.x % 32 / 4);

            token = token < rows->last_token ? token : rows->last_token;
            seen[r / 2][r % 2] = token < first ? 0 : token - first + 1;
        }
        mask_scores(seen, s);
    }
    softmax<D, DTYPE>(factors, s, state, p);
    accumulate_dense<D, DTYPE, true>(tile + shared_places<D>::half, LENGTH, p, state);
}

/* ---- The kernel ---- */

/* What a warp has, to shared memory; the logarithms of sums to where they belong. */
template <unsigned D, pkv_dtype DTYPE>
__device__ static inline void
leave_state(const struct prefill_views *a, const struct prompt_part *part, unsigned first_row,
            const struct warp_state<D> *state, const float *factors, float *out)
{
    const float bias = DTYPE == PKV_F16 ? 14.0f : 0.0f;
    const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

    UNROLL
    for (unsigned r = 0; r < 2 * M; r++) {
        const unsigned m = r / 2, h = r % 2;
        const unsigned row = first_row + 8 * r + g;
        const float l = state->l[m][2 * h];
        const float inverse = 1.0f / l;

        UNROLL
        for (unsigned i = 0; i < D / 8; i++) {
            out[(8 * r + g) * D + 8 * i + 2 * t] = state->o[m][i][2 * h] * inverse;
            out[(8 * r + g) * D + 8 * i + 2 * t + 1] = state->o[m][i][2 * h + 1] * inverse;
        }
        if (a->lse && t == 0 && row < part->rows)
            a->lse[(size_t)(part->step_row + token_of(part, row)) * a->layer.query_heads +
                   query_head_of(part, row)] =
                __fmaf_rn(__fmaf_rn(state->m[m][h], factors[8 * r + g], -bias), LN_2, logf(l));
    }
}

__device__ static inline unsigned pair_of(pkv_dtype dtype, unsigned low, unsigned high)
{
    return dtype == PKV_F16 ? pair_f16(f32_from_bits(low), f32_from_bits(high))
                            : pair_bf16(f32_from_bits(low), f32_from_bits(high));
}

/* 8 elements, of which 16 bytes are aligned. */
__device__ static inline void store_8_elements(const pkv_output *out, size_t at, const float *x)
{
    const uint4 first = shared_16(x), second = shared_16(x + 4);
    uint4 halves;

    if (out->dtype == PKV_F32) {
        store_16((float *)out->data + at, first);
        store_16((float *)out->data + at + 4, second);
        return;
    }
    halves.x = pair_of(out->dtype, first.x, first.y);
    halves.y = pair_of(out->dtype, first.z, first.w);
    halves.z = pair_of(out->dtype, second.x, second.y);
    halves.w = pair_of(out->dtype, second.z, second.w);
    store_16((uint16_t *)out->data + at, halves);
}

template <unsigned D>
__device__ static void write_outputs(const struct prefill_views *a, const struct prompt_part *part,
                                     const float *out)
{
    const unsigned first = threadIdx.x % thread_pieces<D>::of_row * 8;

    for (unsigned r = threadIdx.x / thread_pieces<D>::of_row; r < part->rows;
         r += thread_pieces<D>::step) {
        const size_t at = (size_t)(part->step_row + token_of(part, r)) * a->out.token_stride +
                          query_head_of(part, r) * a->out.head_stride + first;
        const float *x = out + r * D + first;

        if (a->out_in_pieces)
            store_8_elements(&a->out, at, x);
        else
            for (unsigned i = 0; i < 8; i++)
                store_element(a->out.dtype, a->out.data, at + i, x[i]);
    }
}

/* One block ROWS rows, those that see most first; KV head; item. */
template <unsigned D, pkv_dtype DTYPE>
__global__ static void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    attend_prompt(struct prefill_views a)
{
    PKV_SHARED(unsigned char, shared);
    const unsigned warp = threadIdx.x / 32;
    const float *factors =
        (const float *)(const void *)(shared + shared_places<D>::factor) + warp * WARP_ROWS;
    const unsigned char *q =
        shared + shared_places<D>::q + warp * WARP_ROWS * shared_places<D>::row;
    float *out = (float *)(void *)(shared + shared_places<D>::out);
    const struct plan_view *plan = a.plan.on_device; /* no graph has this kernel */
    const struct device_item *item = &plan->items[a.first_item + blockIdx.z];
    const size_t first_row = (size_t)(gridDim.x - 1 - blockIdx.x) * ROWS;
    struct warp_state<D> state = warp_state<D>();
    struct warp_rows rows = {};
    struct prompt_part part;
    bool idle;

    part.group = a.layer.query_heads / a.layer.kv_heads;
    if (item->new_tokens == 1 || first_row >= item->new_tokens * part.group)
        return;
    part.table = plan->tables + item->first_page;
    part.step_row = (unsigned)item->first_row;
    part.cached = (unsigned)((item->tokens + LENGTH - 1) / LENGTH);
    part.last_tokens = (unsigned)(item->tokens - (part.cached - 1) * (size_t)LENGTH);
    part.new_tokens = (unsigned)item->new_tokens;
    part.kv_head = blockIdx.y;
    part.rows = (unsigned)min_size(item->new_tokens * part.group - first_row, ROWS);
    part.first_token = (unsigned)(first_row / part.group);
    part.first_head = (unsigned)(first_row % part.group);
    part.tiles = part.cached + token_of(&part, part.rows - 1) / LENGTH + 1;
    rows.first = warp * WARP_ROWS;
    rows.first_token = token_of(&part, rows.first);
    rows.last_token = token_of(&part, (unsigned)min_size(rows.first + WARP_ROWS, part.rows) - 1);
    idle = rows.first >= part.rows;
    UNROLL
    for (unsigned r = 0; r < 2 * M; r++)
        state.m[r / 2][r % 2] = -INFINITY;

    load_queries<D, DTYPE>(&a, &part, shared);
    fetch_tile<D, DTYPE>(&a, &part, 0, shared);
    for (unsigned number = 0; number < part.tiles; number++) {
        const unsigned char *tile =
            shared + shared_places<D>::tiles + number % 2 * 2 * shared_places<D>::half;

        wait_for_copies();
        __syncthreads(); /* this tile is there, and the other one's place free */
        if (number + 1 < part.tiles)
            fetch_tile<D, DTYPE>(&a, &part, number + 1, shared);
        if (idle)
            continue;
        if (number < part.cached)
            attend_page<D, DTYPE>(&a, &part, number, tile, q, factors, &state);
        else
            attend_new<D, DTYPE>(&a, &part, (number - part.cached) * LENGTH, &rows, tile, q,
                                 factors, &state);
    }
    __syncthreads();
    if (!idle)
        leave_state<D, DTYPE>(&a, &part, rows.first, &state, factors,
                              out + (size_t)warp * WARP_ROWS * D);
    __syncthreads();
    write_outputs<D>(&a, &part, out);
}

/* ---- The host's side ---- */

template <unsigned D, pkv_dtype DTYPE>
static pkv_status launch(struct backend *backend, const struct prefill_views *a, dim3 grid)
{
    const unsigned bytes = a->q_parts == 2 ? shared_places<D>::more_bytes : shared_places<D>::bytes;
    const pkv_status status =
        gpu_check(backend,
                  cudaFuncSetAttribute(attend_prompt<D, DTYPE>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                  "cannot have shared memory for attention");

    if (status == PKV_OK)
        PKV_LAUNCH((attend_prompt<D, DTYPE>), grid, THREADS, bytes, backend->stream, *a);
    return status;
}

static bool can_copy(const pkv_input *input, pkv_dtype dtype)
{
    return input->dtype == dtype && input_aligned(input);
}

pkv_status prefill_run(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct backend_plan *plan = &backend->step.plan;
    pkv_status status = PKV_OK;
    struct prefill_views a = {};

    a.layer = store_layer(backend, layer);
    a.plan = gpu_plan(backend);
    a.q = io->q;
    a.k = io->k;
    a.v = io->v;
    a.out = io->out;
    a.lse = io->lse;
    a.q_parts = io->q.dtype == a.layer.dtype ? 1 : 2;
    a.copied = can_copy(&io->k, a.layer.dtype) && can_copy(&io->v, a.layer.dtype);
    a.out_in_pieces =
        heads_aligned(io->out.dtype, io->out.data, io->out.token_stride, io->out.head_stride);
    for (size_t end; a.first_item < plan->n_items && status == PKV_OK; a.first_item = end) {
        size_t rows = 0;
        dim3 grid;

        end = min_size(a.first_item + MAX_ITEMS, plan->n_items);
        for (size_t i = a.first_item; i < end; i++)
            if (rows < plan->items[i].new_tokens * gpu_group(backend->geometry))
                rows = plan->items[i].new_tokens * gpu_group(backend->geometry);
        grid = dim3((unsigned)((rows + ROWS - 1) / ROWS), a.layer.kv_heads,
                    (unsigned)(end - a.first_item));
        if (a.layer.d == 64 && a.layer.dtype == PKV_F16)
            status = launch<64, PKV_F16>(backend, &a, grid);
        else if (a.layer.d == 64)
            status = launch<64, PKV_BF16>(backend, &a, grid);
        else if (a.layer.dtype == PKV_F16)
            status = launch<128, PKV_F16>(backend, &a, grid);
        else
            status = launch<128, PKV_BF16>(backend, &a, grid);
    }
    return status == PKV_OK ? gpu_check_launch(backend, "cannot attend") : status;
}
