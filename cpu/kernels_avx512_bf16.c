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
 * pages of 32 tokens, ranks of up to 16 and a d that is made of whole panels. Two factorized pages
 * are computed side by side, as one waits for its own results most of the time. Every load fetches
 * what lies at the same place in a page to come, into the second-level cache, which has room for
 * more requests on their way: the hardware's prefetcher is too late for what other caches hold.
 */
#define FEW_ROWS  8 /* more than this many wait for each other less */
#define FEW       4 /* at a time */
#define FEW_PAGE  (2 * LANES)
#define FEW_PAIRS (FEW_PAGE / 2)
#define FEW_PAGES 2 /* at a time */

typedef vector_f32 few_sums[FEW][PANEL_VECTORS];
typedef float few_packed[FEW][LANES];

/* The same matrix of some pages. */
struct few_matrix {
    size_t row_bytes; /* of a pair of rows */
    struct {
        const char *data;
        ptrdiff_t ahead; /* to the page that is fetched */
    } page[FEW_PAGES];
};

INLINE void few_zero(size_t rows, size_t vectors, few_sums sum)
{
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            sum[i][j] = splat(0.0f);
    }
}

INLINE vector_u32 few_load(const struct few_matrix *b, size_t page, size_t p, size_t j)
{
    const char *pairs = b->page[page].data + p * b->row_bytes;

    _mm_prefetch(pairs + j * LANES * sizeof(uint32_t) + b->page[page].ahead, _MM_HINT_T1);
    return load_pairs(pairs, j);
}

/* Adds a b of a page, a pair of rows; `terms` as in tile_pairs(). */
INLINE void few_add(size_t rows, size_t terms, const float *a, size_t lda, vector_u32 b, size_t j,
                    few_sums sum)
{
    UNROLL
    for (size_t i = 0; i < rows; i++)
        sum[i][j] = vector_dot(sum[i][j], a + i * lda, b);
    UNROLL
    for (size_t i = 0; i < rows && terms == 2; i++)
        sum[i][j] = vector_dot(sum[i][j], a + lda / 2 + i * lda, b);
}

/* sum[page] = a[page] b of each page, in two vectors a row. */
INLINE void few_score(size_t rows, size_t pages, size_t pairs, const float *const a[FEW_PAGES],
                      size_t lda, const struct few_matrix *b, few_sums sum[FEW_PAGES])
{
    UNROLL
    for (size_t page = 0; page < pages; page++)
        few_zero(rows, 2, sum[page]);
    for (size_t p = 0; p < pairs; p++) {
        UNROLL
        for (size_t page = 0; page < pages; page++) {
            UNROLL
            for (size_t j = 0; j < 2; j++)
                few_add(rows, 2, a[page] + p, lda, few_load(b, page, p, j), j, sum[page]);
        }
    }
}

/* The same in one vector a row: as two sums, even and odd pairs, for their latency. */
INLINE void few_narrow(size_t rows, size_t pages, size_t terms, size_t pairs,
                       const float *const a[FEW_PAGES], size_t lda, const struct few_matrix *b,
                       few_sums sum[FEW_PAGES])
{
    few_sums odd[FEW_PAGES];
    size_t p = 0;

    UNROLL
    for (size_t page = 0; page < pages; page++) {
        few_zero(rows, 1, sum[page]);
        few_zero(rows, 1, odd[page]);
    }
    for (; p + 2 <= pairs; p += 2) {
        UNROLL
        for (size_t page = 0; page < pages; page++) {
            few_add(rows, terms, a[page] + p, lda, few_load(b, page, p, 0), 0, sum[page]);
            few_add(rows, terms, a[page] + p + 1, lda, few_load(b, page, p + 1, 0), 0, odd[page]);
        }
    }
    UNROLL
    for (size_t page = 0; page < pages; page++) {
        if (p < pairs)
            few_add(rows, terms, a[page] + p, lda, few_load(b, page, p, 0), 0, sum[page]);
        UNROLL
        for (size_t i = 0; i < rows; i++)
            sum[page][i][0] += odd[page][i][0];
    }
}

/* Rows of up to 16 elements in the first vector of sums. */
INLINE void few_pack(size_t rows, size_t terms, size_t n, few_sums sum, few_packed out)
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

/* Scores of a row in two vectors for each page. */
INLINE __m512 few_largest(size_t pages, size_t row, few_sums score[FEW_PAGES])
{
    __m512 top = _mm512_max_ps((__m512)score[0][row][0], (__m512)score[0][row][1]);

    UNROLL
    for (size_t page = 1; page < pages; page++)
        top = _mm512_max_ps(
            top, _mm512_max_ps((__m512)score[page][row][0], (__m512)score[page][row][1]));
    return top;
}

/* Scores to packed rows; rescales o where a maximum has risen. */
INLINE void few_softmax(size_t rows, size_t pages, few_sums score[FEW_PAGES], float *m, float *l,
                        size_t d, float *o, size_t ldo, few_packed packed[FEW_PAGES])
{
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    __mmask16 above = 0;

    UNROLL
    for (size_t i = 0; i < rows; i++)
        above |= _mm512_cmp_ps_mask(few_largest(pages, i, score),
                                    _mm512_set1_ps(m[i] + KERNELS_SLACK), _CMP_GT_OQ);
    if (__builtin_expect(above != 0, 0)) {
        for (size_t i = 0; i < rows; i++) {
            float largest = _mm512_reduce_max_ps(few_largest(pages, i, score));
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
        const __m512 top = _mm512_set1_ps(m[i]);
        __m512 sum = _mm512_setzero_ps();

        UNROLL
        for (size_t page = 0; page < pages; page++) {
            __m512 p = exponential_bf16(_mm512_sub_ps((__m512)score[page][i][0], top));
            __m512 q = exponential_bf16(_mm512_sub_ps((__m512)score[page][i][1], top));
            __m512bh both = _mm512_cvtne2ps_pbh(q, p);

            memcpy(packed[page][i], &both, sizeof both);
            sum = _mm512_dpbf16_ps(sum, both, ones);
        }
        l[i] += _mm512_reduce_add_ps(sum);
    }
}

/* o += a b for b [2 pairs, d], page after page. */
INLINE void few_accumulate(size_t rows, size_t pages, size_t pairs, few_packed a[FEW_PAGES],
                           struct few_matrix b, size_t d, float *o, size_t ldo)
{
    for (size_t j = 0; j < d; j += PANEL) {
        few_sums sum;

        UNROLL
        for (size_t i = 0; i < rows; i++) {
            UNROLL
            for (size_t v = 0; v < PANEL_VECTORS; v++)
                sum[i][v] = load(o + i * ldo + j + v * LANES);
        }
        UNROLL
        for (size_t page = 0; page < pages; page++) {
            for (size_t p = 0; p < pairs; p++) {
                UNROLL
                for (size_t v = 0; v < PANEL_VECTORS; v++)
                    few_add(rows, 1, a[page][0] + p, LANES, few_load(&b, page, p, v), v, sum);
            }
            b.page[page].data += pairs * b.row_bytes;
        }
        sums_end(rows, PANEL_VECTORS, sum, o + j, ldo);
    }
}

INLINE void few_dense(size_t rows, const float *q, struct matrix k, struct matrix v, ptrdiff_t next,
                      float *m, float *l, float *o, size_t ldo)
{
    const size_t d = k.rows;
    const struct few_matrix keys = {FEW_PAGE * sizeof(uint32_t), {{(const char *)k.data, next}}};
    const struct few_matrix values = {PANEL * sizeof(uint32_t), {{(const char *)v.data, next}}};
    const float *const queries[FEW_PAGES] = {q};
    few_packed packed[FEW_PAGES];
    few_sums sum[FEW_PAGES];

    few_score(rows, 1, d / 2, queries, d, &keys, sum);
    few_softmax(rows, 1, sum, m, l, d, o, ldo, packed);
    few_accumulate(rows, 1, FEW_PAIRS, packed, values, d, o, ldo);
}

/* `offset` bytes into the K of some pages, or their V. */
INLINE struct few_matrix few_part(size_t pages, const struct factor_page *page, bool is_key,
                                  size_t offset, size_t row_bytes)
{
    struct few_matrix part = {.row_bytes = row_bytes};

    UNROLL
    for (size_t i = 0; i < pages; i++) {
        const char *data = (const char *)(is_key ? page[i].k : page[i].v);
        const char *ahead = (const char *)(is_key ? page[i + FEW_PAGES].k : page[i + FEW_PAGES].v);

        part.page[i].data = data + offset;
        part.page[i].ahead = ahead - data;
    }
    return part;
}

INLINE void few_factors(size_t rows, size_t pages, const float *q, const struct matrix *k,
                        const struct matrix *v, const struct factor_page *page, float *m, float *l,
                        float *o, size_t ldo)
{
    const size_t d = k[0].rows;
    const size_t rank_k = k[0].columns;
    const size_t rank_v = v[0].columns;
    const size_t pair = sizeof(uint32_t);
    const struct few_matrix key_right = few_part(pages, page, true, 0, rank_k * pair);
    const struct few_matrix key_left =
        few_part(pages, page, true, (size_t)(k[1].data - k[0].data), FEW_PAGE * pair);
    const struct few_matrix value_left = few_part(pages, page, false, 0, rank_v * pair);
    const struct few_matrix value_right =
        few_part(pages, page, false, (size_t)(v[1].data - v[0].data), PANEL * pair);
    few_packed packed[FEW_PAGES];
    const float *const queries[FEW_PAGES] = {q, q};
    const float *const inner[FEW_PAGES] = {packed[0][0], packed[1][0]};
    few_sums sum[FEW_PAGES];

    few_narrow(rows, pages, 2, d / 2, queries, d, &key_right, sum);
    UNROLL
    for (size_t i = 0; i < pages; i++)
        few_pack(rows, 2, rank_k, sum[i], packed[i]);
    few_score(rows, pages, (rank_k + 1) / 2, inner, LANES, &key_left, sum);
    few_softmax(rows, pages, sum, m, l, d, o, ldo, packed);
    few_narrow(rows, pages, 1, FEW_PAIRS, inner, LANES, &value_left, sum);
    UNROLL
    for (size_t i = 0; i < pages; i++)
        few_pack(rows, 1, rank_v, sum[i], packed[i]);
    few_accumulate(rows, pages, (rank_v + 1) / 2, packed, value_right, d, o, ldo);
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
                              ptrdiff_t next, float *m, float *l, float *o, size_t ldo)
{
    const size_t d = k.rows;

#define DENSE(n) few_dense(n, q, k, v, next, m, l, o, ldo)
    EACH_FEW(DENSE);
#undef DENSE
}

static void attend_factors_bf16(size_t rows, const float *q, const struct matrix k[2],
                                const struct matrix v[2], size_t n, const struct factor_page *pages,
                                float *m, float *l, float *o, size_t ldo)
{
    const size_t d = k[0].rows;

#define FACTORS(few)                                                                               \
    do {                                                                                           \
        size_t i = 0;                                                                              \
                                                                                                   \
        for (; i + FEW_PAGES <= n; i += FEW_PAGES)                                                 \
            few_factors(few, FEW_PAGES, q, k, v, pages + i, m, l, o, ldo);                         \
        if (i < n)                                                                                 \
            few_factors(few, 1, q, k, v, pages + i, m, l, o, ldo);                                 \
    } while (0)
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
