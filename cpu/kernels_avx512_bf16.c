/* SPDX-License-Identifier: MIT */
/* The kernels for x86-64 with AVX-512 F, BW, VL, DQ, VNNI and BF16: those of AVX-512, but with
 * bf16's dot products of pairs, two elements a lane, whose left operands are bf16 too. */
#include "dispatch.h"

#define OWN_BF16                                                                                   \
    split_bf16, pack_bf16, score_bf16, score_chain_bf16, accumulate_bf16, accumulate_chain_bf16,   \
        softmax_bf16,                                                                              \
    {                                                                                              \
        FEW_ROWS, few_fit, attend_dense_bf16, attend_factors_bf16, attend_codes                    \
    }

#include "kernels_avx512.h"

/* Elements of the longest row that is split: the largest d. */
#define MAX_SPLIT 1024

/* ---- Products ---- */

/* c + the pair of bf16 at `a` times every pair in b. */
static inline vector_f32 vector_dot(vector_f32 c, const float *a, vector_u32 b)
{
    uint32_t pair;

    memcpy(&pair, a, sizeof pair);
    return (vector_f32)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)pair),
                                        (__m512bh)b);
}

/*
 * `terms` is 1, or 2 where rows are split. In panels of one vector there are too few sums to hide
 * the latency, so every one is kept as two; whether it is does not depend on how many columns are
 * used.
 */
INLINE void tile_pairs(size_t rows, size_t vectors, size_t terms, size_t k, const float *a,
                       size_t lda, const char *b, size_t ldb_bytes, const float *scale, float *c,
                       size_t ldc)
{
    const float *low = a + lda / 2;
    vector_f32 sum[TILE_MOST][PANEL_VECTORS];
    size_t pairs = (k + 1) / 2;
    size_t p = 0;

    sums_begin(rows, vectors, scale, c, ldc, sum);
    if (vectors == 1 && ldb_bytes <= LANES * sizeof(uint32_t)) {
        vector_f32 odd[TILE_MOST];

        UNROLL
        for (size_t i = 0; i < rows; i++)
            odd[i] = splat(0.0f);
        for (; p + 2 <= pairs; p += 2, b += 2 * ldb_bytes) {
            vector_u32 x = load_pairs(b, 0);
            vector_u32 y = load_pairs(b + ldb_bytes, 0);

            UNROLL
            for (size_t i = 0; i < rows; i++) {
                sum[i][0] = vector_dot(sum[i][0], a + i * lda + p, x);
                odd[i] = vector_dot(odd[i], a + i * lda + p + 1, y);
            }
            UNROLL
            for (size_t i = 0; i < rows && terms == 2; i++) {
                sum[i][0] = vector_dot(sum[i][0], low + i * lda + p, x);
                odd[i] = vector_dot(odd[i], low + i * lda + p + 1, y);
            }
        }
        UNROLL
        for (size_t i = 0; i < rows; i++)
            sum[i][0] += odd[i];
    }
    for (; p < pairs; p++, b += ldb_bytes) {
        vector_u32 x[PANEL_VECTORS];

        UNROLL
        for (size_t j = 0; j < vectors; j++)
            x[j] = load_pairs(b, j);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            UNROLL
            for (size_t j = 0; j < vectors; j++)
                sum[i][j] = vector_dot(sum[i][j], a + i * lda + p, x[j]);
        }
        UNROLL
        for (size_t i = 0; i < rows && terms == 2; i++) {
            UNROLL
            for (size_t j = 0; j < vectors; j++)
                sum[i][j] = vector_dot(sum[i][j], low + i * lda + p, x[j]);
        }
    }
    sums_end(rows, vectors, sum, c, ldc);
}

INLINE void tile_split(size_t rows, size_t vectors, enum form form, size_t k, const float *a,
                       size_t lda, const char *b, size_t ldb_bytes, const float *scale, float *c,
                       size_t ldc)
{
    (void)form;
    tile_pairs(rows, vectors, 2, k, a, lda, b, ldb_bytes, scale, c, ldc);
}

INLINE void tile_packed(size_t rows, size_t vectors, enum form form, size_t k, const float *a,
                        size_t lda, const char *b, size_t ldb_bytes, const float *scale, float *c,
                        size_t ldc)
{
    (void)form;
    tile_pairs(rows, vectors, 1, k, a, lda, b, ldb_bytes, scale, c, ldc);
}

/* 16 elements of a row from column j on; those past n, which pairs may be made of, as 0. */
INLINE __m512 load_padded(size_t n, const float *row, size_t j)
{
    return _mm512_maskz_loadu_ps((__mmask16)(n - j < LANES ? (1u << (n - j)) - 1 : 0xffffu),
                                 row + j);
}

static void pack_bf16(size_t rows, size_t n, float *a, size_t lda)
{
    for (size_t i = 0; i < rows; i++) {
        float *row = a + i * lda;

        for (size_t j = 0; j < n; j += LANES) {
            __m256bh packed = _mm512_cvtneps_pbh(load_padded(n, row, j));

            memcpy(row + j / 2, &packed, sizeof packed);
        }
    }
}

static void split_bf16(size_t rows, size_t n, float *a, size_t lda)
{
    for (size_t i = 0; i < rows; i++) {
        __m256bh low[MAX_SPLIT / LANES];
        float *row = a + i * lda;

        for (size_t j = 0; j < n; j += LANES) {
            __m512 x = load_padded(n, row, j);
            __m256bh high = _mm512_cvtneps_pbh(x);

            low[j / LANES] = _mm512_cvtneps_pbh(_mm512_sub_ps(x, _mm512_cvtpbh_ps(high)));
            memcpy(row + j / 2, &high, sizeof high);
        }
        memcpy(row + lda / 2, low, (n + 1) / 2 * sizeof *row);
    }
}

static void score_bf16(size_t rows, size_t k, size_t n, const float *a, size_t lda, struct matrix b,
                       const float *scale, float *c, size_t ldc)
{
    product(tile_split, BF16, rows, k, n, a, lda, b, scale, c, ldc);
}

static void accumulate_bf16(size_t rows, size_t k, size_t n, const float *a, size_t lda,
                            struct matrix b, const float *scale, float *c, size_t ldc)
{
    product(tile_packed, BF16, rows, k, n, a, lda, b, scale, c, ldc);
}

static void score_chain_bf16(size_t rows, const float *a, size_t lda, struct matrix b1,
                             struct matrix b2, float *inner, size_t ldi, const float *scale,
                             float *c, size_t ldc)
{
    score_bf16(rows, b1.rows, b1.columns, a, lda, b1, NULL, inner, ldi);
    split_bf16(rows, b1.columns, inner, ldi);
    score_bf16(rows, b2.rows, b2.columns, inner, ldi, b2, scale, c, ldc);
}

static void accumulate_chain_bf16(size_t rows, const float *a, size_t lda, struct matrix b1,
                                  struct matrix b2, float *inner, size_t ldi, const float *scale,
                                  float *c, size_t ldc)
{
    accumulate_bf16(rows, b1.rows, b1.columns, a, lda, b1, NULL, inner, ldi);
    pack_bf16(rows, b1.columns, inner, ldi);
    accumulate_bf16(rows, b2.rows, b2.columns, inner, ldi, b2, scale, c, ldc);
}

/* ---- Softmax ---- */

/* exp(x) for x <= KERNELS_SLACK within 2^-16, which is much less than what rounding to bf16 adds;
 * 0 below about 2^-126. */
INLINE __m512 exponential_bf16(__m512 x)
{
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)), 8);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0x1.62e43p-1f), x);
    __m512 p = _mm512_set1_ps(0x1.5558fcp-5f);
    __mmask16 large = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-0x1.5d589ep+6f), _CMP_NLT_UQ);

    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555490p-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.fffffcp-2f));
    p = _mm512_fmadd_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f)), r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(large, p, n);
}

/* The lanes of the 16 from column j on that are among `count`. */
INLINE __mmask16 lanes(size_t j, size_t count)
{
    return (__mmask16)(j + LANES <= count ? 0xffffu : j < count ? (1u << (count - j)) - 1 : 0);
}

/* The maximum stays as it is until scores exceed it by KERNELS_SLACK: there is nothing to rescale
 * then. The sum is that of the rounded elements, each times one. */
static void softmax_bf16(size_t rows, size_t n, const uint32_t *valid, float *s, size_t lds,
                         float *m, float *l, float *scale)
{
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);

    for (size_t i = 0; i < rows; i++) {
        float *row = s + i * lds;
        size_t count = valid ? valid[i] : n;
        __m512 top = _mm512_set1_ps(m[i] + KERNELS_SLACK);
        __m512 sum = _mm512_setzero_ps();
        __mmask16 above = 0;

        for (size_t j = 0; j < count; j += LANES)
            above |=
                _mm512_mask_cmp_ps_mask(lanes(j, count), _mm512_loadu_ps(row + j), top, _CMP_GT_OQ);
        scale[i] = 1.0f;
        if (above) {
            float largest;

            for (size_t j = 0; j < count; j += LANES)
                top = _mm512_mask_max_ps(top, lanes(j, count), top, _mm512_loadu_ps(row + j));
            largest = _mm512_reduce_max_ps(top);
            scale[i] = exponential(splat(m[i] - largest))[0];
            m[i] = largest;
        }
        top = _mm512_set1_ps(m[i]);
        for (size_t j = 0; j < n; j += 2 * LANES) {
            __mmask16 low = lanes(j, count);
            __mmask16 high = lanes(j + LANES, count);
            __m512 p = exponential_bf16(_mm512_sub_ps(_mm512_maskz_loadu_ps(low, row + j), top));
            __m512 q = _mm512_setzero_ps();
            __m512bh packed;

            if (j + LANES < n)
                q = exponential_bf16(
                    _mm512_sub_ps(_mm512_maskz_loadu_ps(high, row + j + LANES), top));
            packed = _mm512_cvtne2ps_pbh(_mm512_maskz_mov_ps(high, q), _mm512_maskz_mov_ps(low, p));
            sum = _mm512_dpbf16_ps(sum, packed, ones);
            memcpy(row + j / 2, &packed, sizeof packed);
        }
        l[i] = l[i] * scale[i] + _mm512_reduce_add_ps(sum);
    }
}

/* ---- Whole pages for few queries ---- */

/*
 * What the functions above do one after the other, with what passes between them kept in
 * registers: few rows would spend more time on their beginnings and ends than on products. For
 * pages of 32 tokens, ranks of up to 16 and a d that is made of whole panels.
 */
#define FEW_ROWS  8 /* more than this many wait for each other less */
#define FEW       4 /* at a time */
#define FEW_PAGE  (2 * LANES)
#define FEW_PAIRS (FEW_PAGE / 2)

typedef vector_f32 few_sums[FEW][PANEL_VECTORS];

INLINE void few_zero(size_t rows, size_t vectors, few_sums sum)
{
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            sum[i][j] = splat(0.0f);
    }
}

/* Adds a b, pairs of rows p, p + step, ..; `terms` as in tile_pairs(). */
INLINE void few_multiply(size_t rows, size_t vectors, size_t terms, size_t p, size_t step,
                         size_t pairs, const float *a, size_t lda, const char *b, size_t ldb_bytes,
                         few_sums sum)
{
    const float *low = a + lda / 2;

    for (; p < pairs; p += step) {
        UNROLL
        for (size_t j = 0; j < vectors; j++) {
            vector_u32 x = load_pairs(b + p * ldb_bytes, j);

            UNROLL
            for (size_t i = 0; i < rows; i++)
                sum[i][j] = vector_dot(sum[i][j], a + i * lda + p, x);
            UNROLL
            for (size_t i = 0; i < rows && terms == 2; i++)
                sum[i][j] = vector_dot(sum[i][j], low + i * lda + p, x);
        }
    }
}

/* A product of one vector a row: as two sums, even and odd pairs, for their latency. */
INLINE void few_narrow(size_t rows, size_t terms, size_t pairs, const float *a, size_t lda,
                       const char *b, size_t ldb_bytes, few_sums sum)
{
    const float *low = a + lda / 2;
    few_sums odd;
    size_t p = 0;

    few_zero(rows, 1, sum);
    few_zero(rows, 1, odd);
    for (; p + 2 <= pairs; p += 2) {
        vector_u32 x = load_pairs(b + p * ldb_bytes, 0);
        vector_u32 y = load_pairs(b + (p + 1) * ldb_bytes, 0);

        UNROLL
        for (size_t i = 0; i < rows; i++) {
            sum[i][0] = vector_dot(sum[i][0], a + i * lda + p, x);
            odd[i][0] = vector_dot(odd[i][0], a + i * lda + p + 1, y);
        }
        UNROLL
        for (size_t i = 0; i < rows && terms == 2; i++) {
            sum[i][0] = vector_dot(sum[i][0], low + i * lda + p, x);
            odd[i][0] = vector_dot(odd[i][0], low + i * lda + p + 1, y);
        }
    }
    few_multiply(rows, 1, terms, p, 1, pairs, a, lda, b, ldb_bytes, sum);
    UNROLL
    for (size_t i = 0; i < rows; i++)
        sum[i][0] += odd[i][0];
}

/* Rows of up to 16 elements in the first vector of sums. */
INLINE void few_pack(size_t rows, size_t terms, size_t n, few_sums sum, float out[FEW][LANES])
{
    const __mmask16 counts = lanes(0, n);

    UNROLL
    for (size_t i = 0; i < rows; i++) {
        __m512 x = _mm512_maskz_mov_ps(counts, (__m512)sum[i][0]);
        __m256bh high = _mm512_cvtneps_pbh(x);

        memcpy(out[i], &high, sizeof high);
        if (terms == 2) {
            __m256bh low = _mm512_cvtneps_pbh(_mm512_sub_ps(x, _mm512_cvtpbh_ps(high)));

            memcpy(out[i] + LANES / 2, &low, sizeof low);
        }
    }
}

/* Scores in two vectors a row to packed rows; rescales o where a maximum has risen. */
INLINE void few_softmax(size_t rows, few_sums score, float *m, float *l, size_t d, float *o,
                        size_t ldo, float packed[FEW][LANES])
{
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    __mmask16 above = 0;

    UNROLL
    for (size_t i = 0; i < rows; i++) {
        __m512 top = _mm512_set1_ps(m[i] + KERNELS_SLACK);

        above |= _mm512_cmp_ps_mask((__m512)score[i][0], top, _CMP_GT_OQ) |
                 _mm512_cmp_ps_mask((__m512)score[i][1], top, _CMP_GT_OQ);
    }
    if (__builtin_expect(above != 0, 0)) {
        for (size_t i = 0; i < rows; i++) {
            float largest =
                _mm512_reduce_max_ps(_mm512_max_ps((__m512)score[i][0], (__m512)score[i][1]));
            vector_f32 scale;

            if (!(largest > m[i] + KERNELS_SLACK))
                continue;
            scale = exponential(splat(m[i] - largest));
            for (size_t j = 0; j < d; j += LANES)
                save(o + i * ldo + j, load(o + i * ldo + j) * scale);
            l[i] *= scale[0];
            m[i] = largest;
        }
    }
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        __m512 top = _mm512_set1_ps(m[i]);
        __m512 p = exponential_bf16(_mm512_sub_ps((__m512)score[i][0], top));
        __m512 q = exponential_bf16(_mm512_sub_ps((__m512)score[i][1], top));
        __m512bh both = _mm512_cvtne2ps_pbh(q, p);

        memcpy(packed[i], &both, sizeof both);
        l[i] += _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), both, ones));
    }
}

/* o += a b for b [2 pairs, d]. */
INLINE void few_accumulate(size_t rows, size_t pairs, float a[FEW][LANES], const char *b, size_t d,
                           float *o, size_t ldo)
{
    const size_t row_bytes = PANEL * sizeof(uint32_t);

    for (size_t j = 0; j < d; j += PANEL, b += pairs * row_bytes) {
        few_sums sum;

        UNROLL
        for (size_t i = 0; i < rows; i++) {
            UNROLL
            for (size_t v = 0; v < PANEL_VECTORS; v++)
                sum[i][v] = load(o + i * ldo + j + v * LANES);
        }
        few_multiply(rows, PANEL_VECTORS, 1, 0, 1, pairs, a[0], LANES, b, row_bytes, sum);
        sums_end(rows, PANEL_VECTORS, sum, o + j, ldo);
    }
}

INLINE void few_dense(size_t rows, const float *q, struct matrix k, struct matrix v, float *m,
                      float *l, float *o, size_t ldo)
{
    const size_t d = k.rows;
    float packed[FEW][LANES];
    few_sums sum;

    few_zero(rows, 2, sum);
    few_multiply(rows, 2, 2, 0, 1, d / 2, q, d, (const char *)k.data, FEW_PAGE * sizeof(uint32_t),
                 sum);
    few_softmax(rows, sum, m, l, d, o, ldo, packed);
    few_accumulate(rows, FEW_PAIRS, packed, (const char *)v.data, d, o, ldo);
}

INLINE void few_factors(size_t rows, const float *q, const struct matrix *k, const struct matrix *v,
                        float *m, float *l, float *o, size_t ldo)
{
    const size_t d = k[0].rows;
    const size_t rank_k = k[0].columns;
    const size_t rank_v = v[0].columns;
    float packed[FEW][LANES];
    few_sums sum;

    few_narrow(rows, 2, d / 2, q, d, (const char *)k[0].data, rank_k * sizeof(uint32_t), sum);
    few_pack(rows, 2, rank_k, sum, packed);
    few_zero(rows, 2, sum);
    few_multiply(rows, 2, 2, 0, 1, (rank_k + 1) / 2, packed[0], LANES, (const char *)k[1].data,
                 FEW_PAGE * sizeof(uint32_t), sum);
    few_softmax(rows, sum, m, l, d, o, ldo, packed);
    few_narrow(rows, 1, FEW_PAIRS, packed[0], LANES, (const char *)v[0].data,
               rank_v * sizeof(uint32_t), sum);
    few_pack(rows, 1, rank_v, sum, packed);
    few_accumulate(rows, (rank_v + 1) / 2, packed, (const char *)v[1].data, d, o, ldo);
}

#include "kernels_avx512_codes.h"

#define EACH_FEW(call)                                                                             \
    for (; rows >= FEW; rows -= FEW, q += FEW * d, m += FEW, l += FEW, o += FEW * ldo)             \
        call(FEW);                                                                                 \
    if (rows == 3)                                                                                 \
        call(3);                                                                                   \
    else if (rows == 2)                                                                            \
        call(2);                                                                                   \
    else if (rows == 1)                                                                            \
    call(1)

static bool few_fit(size_t page_tokens, size_t d, size_t rank)
{
    return page_tokens == FEW_PAGE && d % PANEL == 0 && rank <= LANES;
}

static void attend_dense_bf16(size_t rows, const float *q, struct matrix k, struct matrix v,
                              float *m, float *l, float *o, size_t ldo)
{
    const size_t d = k.rows;

#define DENSE(n) few_dense(n, q, k, v, m, l, o, ldo)
    EACH_FEW(DENSE);
#undef DENSE
}

static void attend_factors_bf16(size_t rows, const float *q, const struct matrix k[2],
                                const struct matrix v[2], float *m, float *l, float *o, size_t ldo)
{
    const size_t d = k[0].rows;

#define FACTORS(n) few_factors(n, q, k, v, m, l, o, ldo)
    EACH_FEW(FACTORS);
#undef FACTORS
}

static void attend_codes(size_t rows, const float *q, const struct coded k[2],
                         const struct coded v[2], size_t n, const struct factor_page *pages,
                         float *m, float *l, float *o, size_t ldo)
{
    const size_t d = k[0].rows;

#define CODES(few) few_codes(few, q, k, v, n, pages, m, l, o, ldo)
    EACH_FEW(CODES);
#undef CODES
}

const struct kernels kernels_avx512_bf16 = {KERNELS_TABLE("avx512")};
