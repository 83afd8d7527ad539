/* SPDX-License-Identifier: MIT */
/*
 * Whole pages of INT4 factors for few queries, with VNNI's dot products of pairs of 16 bits: codes
 * are looked up, four 16-bit vectors to a vector of them; left operands are 16-bit words, of q and
 * of what passes between the products alike, each row with a scale of its own, so that no rounding
 * is more than 2^-15 of the row's largest.
 *
 * A page is a chain of five short products that wait for each other, so BLOCK pages go through
 * every stage side by side, while the next ones are fetched: the hardware's prefetcher follows one
 * page after the other only. For FEW_PAGE tokens a page, ranks of up to LANES and a d of whole
 * panels.
 */
#include <float.h>
#include <math.h>

#define BLOCK      KERNELS_AHEAD
#define CACHE_LINE 64
#define WORD_MOST  32767.0f
#define LOG2_E     0x1.715476p+0f

/* Rows of words in pairs: one vector of each two rows side by side, 4 words of each in turn. */
typedef int16_t narrow_words[FEW][LANES] __attribute__((aligned(64)));

/* What the stages of a page leave for the next ones. A vector "of rows" has row i in every element
 * that is i modulo FEW. */
struct page_work {
    __m512 inner[FEW];    /* q R_K^T, then p L_V */
    __m512 score[FEW][2]; /* log2(e) times the score */
    __m512 top;           /* of rows: the largest score */
    __m512 weight;        /* of rows: 2^(top - m) */
    float key_scale;      /* the largest of those of R_K */
    float value_scale;    /* the largest of those of L_V */
    _Alignas(64) int16_t p[FEW][FEW_PAGE];
};

/* Queries and running states of the rows. */
struct codes_rows {
    _Alignas(64) int16_t q[FEW * MAX_SPLIT];
    __m512 q_scale; /* of rows; times log2(e) */
    __m512 m;       /* of rows, times log2(e) */
    __m512 l[FEW];  /* in parts */
};

/* ---- Vectors ---- */

INLINE __m512i load_bits(const void *from)
{
    return _mm512_loadu_si512(from);
}

INLINE __m512 load_scales(const unsigned char *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

/* The codes in bits 4 i .. 4 i + 3 of each 16, as words: a look-up ignores the bits above. */
INLINE __m512i codes_at(__m512i lanes, unsigned i)
{
    const __m512i table = _mm512_set_epi16(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0,
                                           -1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0);

    return _mm512_permutexvar_epi16(_mm512_srli_epi16(lanes, 4 * i), table);
}

/* sum += the pair of words at `pair` times every pair of codes. */
INLINE __m512i dot_words(__m512i sum, __m512i codes, const int16_t *pair)
{
    int32_t x;

    memcpy(&x, pair, sizeof x);
    return _mm512_dpwssd_epi32(sum, codes, _mm512_set1_epi32(x));
}

/* Where pair i of 32 words lies that were packed from two vectors: 4 of each in turn. */
INLINE size_t packed_pair(size_t i)
{
    return 2 * (i % 8 / 2 * 4 + i / 8 * 2 + i % 2);
}

/* The same row of a vector of rows everywhere. */
INLINE __m512 of_row(__m512 rows, size_t i)
{
    switch (i) {
    case 0:
        return _mm512_permute_ps(rows, 0x00);
    case 1:
        return _mm512_permute_ps(rows, 0x55);
    case 2:
        return _mm512_permute_ps(rows, 0xaa);
    default:
        return _mm512_permute_ps(rows, 0xff);
    }
}

/* The largest element of each of FEW vectors, of rows; NaN if all of a vector are. */
INLINE __m512 largest_of_rows(const __m512 x[FEW])
{
    __m512 low = _mm512_max_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    __m512 high = _mm512_max_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    __m512 all =
        _mm512_max_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));

    all = _mm512_max_ps(all, _mm512_shuffle_f32x4(all, all, 0x4e));
    return _mm512_max_ps(all, _mm512_shuffle_f32x4(all, all, 0xb1));
}

/* The largest of 32 f16, none negative, which are ordered like their bits; not 0. */
INLINE float largest_scale(__m512i f16)
{
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(f16), _mm512_extracti64x4_epi64(f16, 1));
    __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
    __m128i largest = _mm_max_epu16(_mm_xor_si128(least, _mm_set1_epi16(-1)), _mm_set1_epi16(1));

    return _mm_cvtss_f32(_mm_cvtph_ps(largest));
}

/* 2^x within 2^-13 for x <= 0; 2^-60 for what is below, so that nothing underflows, which is slow.
 */
INLINE __m512 power_low(__m512 x)
{
    __m512 above = _mm512_max_ps(_mm512_set1_ps(-60.0f), x); /* NaN stays NaN */
    __m512 n = _mm512_roundscale_ps(above, 8);
    __m512 r = _mm512_sub_ps(above, n);
    __m512 p = _mm512_set1_ps(0x1.c6b08ep-5f);

    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ebfbe0p-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.62e430p-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Rows as narrow words; returns, of rows, what one of a word stands for. */
INLINE __m512 narrow(size_t rows, const __m512 x[FEW], narrow_words words)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 magnitude[FEW];
    __m512i word[FEW];
    __m512 exponent, up;

    UNROLL
    for (size_t i = 0; i < FEW; i++)
        magnitude[i] = i < rows ? _mm512_abs_ps(x[i]) : _mm512_setzero_ps();
    exponent =
        _mm512_getexp_ps(_mm512_max_ps(largest_of_rows(magnitude), _mm512_set1_ps(0x1p-100f)));
    exponent = _mm512_sub_ps(exponent, _mm512_set1_ps(14.0f));
    up = _mm512_scalef_ps(one, _mm512_sub_ps(_mm512_setzero_ps(), exponent));
    UNROLL
    for (size_t i = 0; i < FEW; i++)
        word[i] = i < rows ? _mm512_cvtps_epi32(_mm512_mul_ps(x[i], of_row(up, i)))
                           : _mm512_setzero_si512();
    UNROLL
    for (size_t i = 0; i < rows; i += 2)
        _mm512_storeu_si512(words[i], _mm512_packs_epi32(word[i], word[i + 1]));
    return _mm512_scalef_ps(one, exponent);
}

/* Part number i of n of a page's bytes into the second-level cache. */
INLINE void prefetch(const unsigned char *page, size_t bytes, size_t i, size_t n)
{
    const size_t lines = (bytes + n * CACHE_LINE - 1) / (n * CACHE_LINE);

    for (size_t j = 0; j < lines; j++)
        _mm_prefetch((const char *)page + (i * lines + j) * CACHE_LINE, _MM_HINT_T1);
}

INLINE void codes_zero(size_t rows, __m512i sum[FEW][2])
{
    UNROLL
    for (size_t i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_si512();
}

/* ---- Products ---- */

/* sum += the pair of words at `pair` of each row times bits 4 n .. of lanes; the second part if n
 * is odd. Rows are narrow ones, side by side, or lie ldw words apart. */
INLINE void add_codes(size_t rows, __m512i lanes, unsigned n, const int16_t *pair, bool narrow,
                      size_t ldw, __m512i sum[FEW][2])
{
    __m512i b = codes_at(lanes, n);

    /* Written out: clang leaves a loop here as it is. */
#define ADD(i)                                                                                     \
    if (i < rows)                                                                                  \
    sum[i][n % 2] =                                                                                \
        dot_words(sum[i][n % 2], b, pair + (narrow ? i / 2 * 2 * LANES + i % 2 * 4 : i * ldw))
    ADD(0);
    ADD(1);
    ADD(2);
    ADD(3);
#undef ADD
}

/* Adds the products of 32 packed words by as many rows of a tall matrix of up to 16 columns. */
INLINE void add_tall(size_t rows, size_t columns, const unsigned char *codes, const int16_t *words,
                     size_t ldw, __m512i sum[FEW][2])
{
    UNROLL
    for (size_t g = 0; g < 4; g++) {
        __m512i lanes = load_bits(codes + g * columns * sizeof(uint32_t));

        add_codes(rows, lanes, 0, words + packed_pair(4 * g), false, ldw, sum);
        add_codes(rows, lanes, 1, words + packed_pair(4 * g + 1), false, ldw, sum);
        add_codes(rows, lanes, 2, words + packed_pair(4 * g + 2), false, ldw, sum);
        add_codes(rows, lanes, 3, words + packed_pair(4 * g + 3), false, ldw, sum);
    }
}

/* Products of narrow words by 16 columns of each half of a wide matrix, from column j on. */
INLINE void multiply_wide(size_t rows, size_t k, size_t half, size_t j, const unsigned char *codes,
                          narrow_words words, __m512i sum[FEW][2])
{
    const size_t fours = k / 4;
    const unsigned char *tail = codes + fours * half * sizeof(uint32_t);

    codes_zero(rows, sum);
    for (size_t g = 0; g < fours; g++) {
        __m512i lanes = load_bits(codes + (g * half + j) * sizeof(uint32_t));

        add_codes(rows, lanes, 0, words[0] + 8 * g, true, 0, sum);
        add_codes(rows, lanes, 1, words[0] + 8 * g, true, 0, sum);
        add_codes(rows, lanes, 2, words[0] + 8 * g + 2, true, 0, sum);
        add_codes(rows, lanes, 3, words[0] + 8 * g + 2, true, 0, sum);
    }
    if (k & 2) {
        __m512i lanes = _mm512_cvtepu8_epi16(
            _mm256_loadu_si256((const __m256i *)(const void *)(tail + j * sizeof(uint16_t))));

        add_codes(rows, lanes, 0, words[0] + 8 * fours, true, 0, sum);
        add_codes(rows, lanes, 1, words[0] + 8 * fours, true, 0, sum);
        tail += half * sizeof(uint16_t);
    }
    if (k & 1) {
        const size_t pair = 8 * fours + (k & 2);
        __m512i lanes =
            _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(tail + j)));

        add_codes(rows, lanes, 0, words[0] + pair, true, 0, sum);
        add_codes(rows, lanes, 1, words[0] + pair, true, 0, sum);
    }
}

/* ---- Stages ---- */

/* q R_K^T times the scales of L_K^T. The scales of R_K go into q first, as words. */
INLINE void stage_right_keys(size_t rows, const struct codes_rows *state, const struct coded k[2],
                             const unsigned char *page, const unsigned char *ahead,
                             struct page_work *work)
{
    const size_t d = k[0].rows;
    const size_t bytes = k[1].scales + k[1].rows * sizeof(uint16_t);
    const size_t rank = k[0].columns;
    const unsigned char *scales = page + k[0].scales;
    __m512i top = load_bits(scales);
    _Alignas(64) int16_t q[FEW * MAX_SPLIT];
    __m512i sum[FEW][2];
    __m512 up, left;

    for (size_t j = FEW_PAGE; j < d; j += FEW_PAGE)
        top = _mm512_max_epu16(top, load_bits(scales + j * sizeof(uint16_t)));
    work->key_scale = largest_scale(top);
    up = _mm512_set1_ps(WORD_MOST / work->key_scale);
    for (size_t j = 0; j < d; j += FEW_PAGE) {
        const unsigned char *at = scales + j * sizeof(uint16_t);
        __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(load_scales(at), up));
        __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(load_scales(at + FEW_PAGE), up));
        __m512i both = _mm512_packs_epi32(low, high);

        UNROLL
        for (size_t i = 0; i < rows; i++)
            _mm512_storeu_si512(q + i * d + j,
                                _mm512_mulhrs_epi16(both, load_bits(state->q + i * d + j)));
    }
    codes_zero(rows, sum);
    for (size_t j = 0; j < d; j += FEW_PAGE) {
        prefetch(ahead, bytes, j / FEW_PAGE, d / FEW_PAGE);
        add_tall(rows, rank, page + k[0].codes + j * rank / 2, q + j, d, sum);
    }
    left = _mm512_maskz_mov_ps(lanes(0, rank), load_scales(page + k[1].scales));
    UNROLL
    for (size_t i = 0; i < rows; i++)
        work->inner[i] =
            _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sum[i][0], sum[i][1])), left);
}

/* Scores and their largest. A product of the words of q and of scales lost its 15 low bits. */
INLINE void stage_left_keys(size_t rows, const struct codes_rows *state, const struct coded k[2],
                            const unsigned char *page, struct page_work *work)
{
    const __m512 undo = _mm512_set1_ps(work->key_scale * (32768.0f / WORD_MOST));
    narrow_words words;
    __m512i sum[FEW][2];
    __m512 largest[FEW];
    __m512 scale;

    scale = _mm512_mul_ps(_mm512_mul_ps(narrow(rows, work->inner, words), state->q_scale), undo);
    multiply_wide(rows, k[1].rows, LANES, 0, page + k[1].codes, words, sum);
    UNROLL
    for (size_t i = 0; i < FEW; i++) {
        largest[i] = _mm512_setzero_ps();
        if (i < rows) {
            __m512 of = of_row(scale, i);

            work->score[i][0] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[i][0]), of);
            work->score[i][1] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[i][1]), of);
            largest[i] = _mm512_max_ps(work->score[i][0], work->score[i][1]);
        }
    }
    work->top = largest_of_rows(largest);
}

/* The maxima stay as they are until one is exceeded by KERNELS_SLACK, or is NaN. */
INLINE void raise_maxima(size_t rows, __m512 top, size_t d, struct codes_rows *state, float *o,
                         size_t ldo)
{
    const __m512 slack = _mm512_set1_ps(KERNELS_SLACK);
    __mmask16 above = _mm512_cmp_ps_mask(top, _mm512_add_ps(state->m, slack), _CMP_NLE_UQ);

    if (__builtin_expect(above != 0, 0)) {
        const __m512 before = state->m;
        float scale[LANES];

        state->m = _mm512_mask_mov_ps(before, above, top);
        _mm512_storeu_ps(scale, power_low(_mm512_sub_ps(before, state->m)));
        for (size_t i = 0; i < rows; i++) {
            vector_f32 factor = splat(above >> i & 1 ? scale[i] : 1.0f);

            state->l[i] = _mm512_mul_ps(state->l[i], (__m512)factor);
            for (size_t j = 0; j < d; j += LANES)
                save(o + i * ldo + j, load(o + i * ldo + j) * factor);
        }
    }
}

/* Probabilities relative to the page's largest, times the scales of L_V, as packed words. */
INLINE void stage_softmax(size_t rows, struct codes_rows *state, const struct coded v[2],
                          const unsigned char *page, struct page_work *work)
{
    const unsigned char *scales = page + v[0].scales;
    __m512 up, low, high;

    work->value_scale = largest_scale(load_bits(scales));
    work->weight = power_low(_mm512_sub_ps(work->top, state->m));
    up = _mm512_set1_ps(WORD_MOST / work->value_scale);
    low = _mm512_mul_ps(load_scales(scales), up);
    high = _mm512_mul_ps(load_scales(scales + LANES * sizeof(uint16_t)), up);
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        __m512 top = of_row(work->top, i);
        __m512 p = power_low(_mm512_sub_ps(work->score[i][0], top));
        __m512 p2 = power_low(_mm512_sub_ps(work->score[i][1], top));

        state->l[i] = _mm512_fmadd_ps(_mm512_add_ps(p, p2), of_row(work->weight, i), state->l[i]);
        _mm512_storeu_si512(work->p[i],
                            _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(p, low)),
                                               _mm512_cvtps_epi32(_mm512_mul_ps(p2, high))));
    }
}

INLINE void stage_left_values(size_t rows, const struct coded v[2], const unsigned char *page,
                              struct page_work *work)
{
    const __mmask16 counts = lanes(0, v[0].columns);
    __m512i sum[FEW][2];

    codes_zero(rows, sum);
    add_tall(rows, v[0].columns, page + v[0].codes, work->p[0], FEW_PAGE, sum);
    UNROLL
    for (size_t i = 0; i < rows; i++)
        work->inner[i] = _mm512_maskz_cvtepi32_ps(counts, _mm512_add_epi32(sum[i][0], sum[i][1]));
}

INLINE void stage_right_values(size_t rows, const struct coded v[2], const unsigned char *page,
                               const unsigned char *ahead, const struct page_work *work, float *o,
                               size_t ldo)
{
    const size_t bytes = v[1].scales + v[1].columns * sizeof(uint16_t);
    const __m512 undo = _mm512_set1_ps(work->value_scale / WORD_MOST);
    const size_t half = v[1].columns / 2;
    narrow_words words;
    __m512 scale =
        _mm512_mul_ps(_mm512_mul_ps(narrow(rows, work->inner, words), work->weight), undo);

    for (size_t j = 0; j < half; j += LANES) {
        const unsigned char *scales = page + v[1].scales + j * sizeof(uint16_t);
        __m512 column[2] = {load_scales(scales), load_scales(scales + half * sizeof(uint16_t))};
        __m512i sum[FEW][2];

        prefetch(ahead, bytes, j / LANES, half / LANES);
        multiply_wide(rows, v[1].rows, half, j, page + v[1].codes, words, sum);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            UNROLL
            for (size_t n = 0; n < 2; n++) {
                float *to = o + i * ldo + n * half + j;
                __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[i][n]), of_row(scale, i));

                save(to, (vector_f32)_mm512_fmadd_ps(x, column[n], (__m512)load(to)));
            }
        }
    }
}

/* ---- Rows ---- */

/* Words of q, and states times log2(e); a q that is not finite makes its scale NaN. */
INLINE void rows_begin(size_t rows, const float *q, size_t d, const float *m, const float *l,
                       struct codes_rows *state)
{
    float scale[LANES] = {0};
    float maximum[LANES] = {0};

    for (size_t i = 0; i < rows; i++) {
        __m512i top = _mm512_setzero_si512();
        float largest;
        __m512 up;

        for (size_t j = 0; j < d; j += LANES)
            top = _mm512_max_epi32(
                top, _mm512_and_si512(load_bits(q + i * d + j), _mm512_set1_epi32(0x7fffffff)));
        largest = f32_from_bits((uint32_t)_mm512_reduce_max_epi32(top));
        largest = largest < 0x1p-100f ? 0x1p-100f : largest;
        up = _mm512_set1_ps(WORD_MOST / largest);
        for (size_t j = 0; j < d; j += FEW_PAGE) {
            const float *from = q + i * d + j;
            __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load(from), up));
            __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load(from + LANES), up));

            _mm512_storeu_si512(state->q + i * d + j, _mm512_packs_epi32(low, high));
        }
        for (size_t j = i; j < LANES; j += FEW) {
            scale[j] = largest <= FLT_MAX ? largest / WORD_MOST * LOG2_E : NAN;
            maximum[j] = m[i] * LOG2_E;
        }
    }
    for (size_t i = 0; i < rows; i++)
        state->l[i] = _mm512_maskz_mov_ps(1, _mm512_set1_ps(l[i]));
    state->q_scale = (__m512)load(scale);
    state->m = (__m512)load(maximum);
}

/* A maximum that has not risen keeps its bits. */
INLINE void rows_end(size_t rows, const struct codes_rows *state, float *m, float *l)
{
    float maximum[LANES];

    save(maximum, (vector_f32)state->m);
    for (size_t i = 0; i < rows; i++) {
        if (maximum[i] != m[i] * LOG2_E)
            m[i] = maximum[i] * 0x1.62e430p-1f;
        l[i] = _mm512_reduce_add_ps(state->l[i]);
    }
}

INLINE void few_codes(size_t rows, const float *q, const struct coded k[2], const struct coded v[2],
                      size_t n, const struct factor_page *pages, float *m, float *l, float *o,
                      size_t ldo)
{
    const size_t d = k[0].rows;
    struct codes_rows state;
    struct page_work work[BLOCK];

    rows_begin(rows, q, d, m, l, &state);
    for (size_t block; n > 0; n -= block, pages += block) {
        __m512 top;

        block = n < BLOCK ? n : BLOCK;
        for (size_t i = 0; i < block; i++)
            stage_right_keys(rows, &state, k, pages[i].k, pages[block + i].k, &work[i]);
        for (size_t i = 0; i < block; i++)
            stage_left_keys(rows, &state, k, pages[i].k, &work[i]);
        top = work[0].top;
        for (size_t i = 1; i < block; i++)
            top = _mm512_max_ps(top, work[i].top);
        raise_maxima(rows, top, d, &state, o, ldo);
        for (size_t i = 0; i < block; i++)
            stage_softmax(rows, &state, v, pages[i].v, &work[i]);
        for (size_t i = 0; i < block; i++)
            stage_left_values(rows, v, pages[i].v, &work[i]);
        for (size_t i = 0; i < block; i++)
            stage_right_values(rows, v, pages[i].v, pages[block + i].v, &work[i], o, ldo);
    }
    rows_end(rows, &state, m, l);
}
