/* SPDX-License-Identifier: MIT */
/* The inner loops over panels of weights and tiles of activations in bytes, for AVX-512 with VNNI;
 * included by products_body.h. A lane is a weight row; four codes of a row, a quad, lie together.
 *
 * A panel is a sequence of blocks, of as many columns as the type's blocks. First in a block are
 * the codes, a strip of 32 columns after the other: in each the planes that code_quad() puts
 * together. Behind them, for types with one group a block, scales and minima in f16; for the
 * superblocks scales and minima of the groups in bytes, then what these are multiplied by, in f32.
 */
#ifndef PUZZLEKV_TOOLS_RUNNER_PRODUCTS_PANELS_H
#define PUZZLEKV_TOOLS_RUNNER_PRODUCTS_PANELS_H

#define TILE  PRODUCTS_TILE_ROWS
#define PANEL PRODUCTS_PANEL_ROWS
#define QUADS 8 /* of a strip */

/* Bytes ahead that are fetched: two pages of memory, as the hardware's prefetcher stops at their
 * ends. */
#define PANEL_AHEAD 8192

/* Bits of a code in a panel, and what was added to the code to make it one without sign. */
enum {
    BITS_q4_0 = 4,
    BITS_q4_1 = 4,
    BITS_q5_0 = 5,
    BITS_q5_1 = 5,
    BITS_q8_0 = 8,
    BITS_q2_k = 2,
    BITS_q3_k = 3,
    BITS_q4_k = 4,
    BITS_q5_k = 5,
    BITS_q6_k = 6,
    BITS_iq4_nl = 4,
    BITS_iq4_xs = 4,

    LOG_OFFSET_q4_0 = 3,
    LOG_OFFSET_q4_1 = 0, /* none */
    LOG_OFFSET_q5_0 = 4,
    LOG_OFFSET_q5_1 = 0,
    LOG_OFFSET_q8_0 = 7,
    LOG_OFFSET_q2_k = 0,
    LOG_OFFSET_q3_k = 2,
    LOG_OFFSET_q4_k = 0,
    LOG_OFFSET_q5_k = 0,
    LOG_OFFSET_q6_k = 5,
    LOG_OFFSET_iq4_nl = 7, /* of the levels */
    LOG_OFFSET_iq4_xs = 7,
};

/* What a type's panels are like; constants wherever it is used. */
struct panel_layout {
    size_t elements, bytes; /* of a block of weights */
    size_t group;           /* columns that share a scale, 16 or 32 */
    size_t bits, log_offset;
    bool has_minima;
};

static inline bool has_levels(struct panel_layout l)
{
    return l.bits == 4 && l.log_offset == 7;
}

static inline size_t strip_bytes(struct panel_layout l)
{
    return l.bits * 4 * PANEL;
}

#define PANEL_BLOCK_BYTES(ELEMENTS, GROUP, BITS, HAS_MINIMA)                                       \
    ((ELEMENTS) / 8 * (BITS)*PANEL +                                                               \
     ((HAS_MINIMA) ? 2 : 1) * PANEL * ((ELEMENTS) == 32 ? 2 : (ELEMENTS) / (GROUP) + 4))

/* Where things lie in a tile of so many rows. */
struct tile {
    int8_t *codes;                      /* [columns / 4, rows, 4] */
    float *scales;                      /* [columns / 32, rows] */
    float *sums_16, *sums_32;           /* [columns / 16, rows] and [columns / 32, rows] */
    int32_t *negative_16, *negative_32; /* the sums of the codes, negative */
};

static inline struct tile find_tile(const unsigned char *bytes, size_t rows, size_t columns)
{
    struct tile t = {.codes = (int8_t *)bytes};

    t.scales = (float *)(t.codes + rows * columns);
    t.sums_16 = t.scales + rows * (columns / 32);
    t.sums_32 = t.sums_16 + rows * (columns / 16);
    t.negative_16 = (int32_t *)(t.sums_32 + rows * (columns / 32));
    t.negative_32 = t.negative_16 + rows * (columns / 16);
    return t;
}

/* To 32 codes, -127 .. 127, and the sums of both halves; returns their scale. */
static inline float round_strip(const float *x, int8_t codes[32], int32_t sums[2])
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    const __m512i larger = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                                            _mm512_and_si512(_mm512_castps_si512(high), magnitude));
    const float largest = quant_bits_f32((uint32_t)_mm512_reduce_max_epi32(larger));
    const __m512 inverse = _mm512_set1_ps(largest > SMALLEST_MAGNITUDE ? 127 / largest : 0);
    /* Not so of what is no number: the scale alone tells of it. */
    const __mmask16 finite = largest <= FLT_MAX ? 0xffff : 0;
    const __m512i low_codes = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(low, inverse));
    const __m512i high_codes = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(high, inverse));

    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(low_codes));
    _mm_storeu_si128((__m128i *)(codes + 16), _mm512_cvtepi32_epi8(high_codes));
    sums[0] = _mm512_reduce_add_epi32(low_codes);
    sums[1] = _mm512_reduce_add_epi32(high_codes);
    return largest / 127;
}

static void round_tile(const float *x, size_t x_stride, size_t rows, size_t tile_rows,
                       size_t columns, unsigned char *bytes)
{
    static const float zeros[32];
    const struct tile t = find_tile(bytes, tile_rows, columns);

    for (size_t b = 0; b < columns / 32; b++) {
        for (size_t r = 0; r < tile_rows; r++) {
            int8_t codes[32];
            int32_t sums[2];
            const float scale =
                round_strip(r < rows ? x + r * x_stride + 32 * b : zeros, codes, sums);

            for (size_t k = 0; k < QUADS; k++)
                memcpy(t.codes + 4 * ((QUADS * b + k) * tile_rows + r), codes + 4 * k, 4);
            t.scales[b * tile_rows + r] = scale;
            t.sums_16[2 * b * tile_rows + r] = scale * (float)sums[0];
            t.sums_16[(2 * b + 1) * tile_rows + r] = scale * (float)sums[1];
            t.sums_32[b * tile_rows + r] = scale * (float)(sums[0] + sums[1]);
            t.negative_16[2 * b * tile_rows + r] = -sums[0];
            t.negative_16[(2 * b + 1) * tile_rows + r] = -sums[1];
            t.negative_32[b * tile_rows + r] = -(sums[0] + sums[1]);
        }
    }
}

/* ---- Packing ---- */

/* The codes of one row's strip, without sign, four to a word. */
static inline void strip_quads(const int8_t *codes, struct panel_layout l, uint32_t quads[QUADS])
{
    if (has_levels(l)) {
        unsigned char nibbles[32] = {0};

        for (unsigned char level = 1; level < 16; level++) {
            for (size_t i = 0; i < 32; i++)
                nibbles[i] = codes[i] == quant_level[level] ? level : nibbles[i];
        }
        memcpy(quads, nibbles, sizeof nibbles);
        return;
    }

    unsigned char sum[32];

    for (size_t i = 0; i < 32; i++)
        sum[i] = (unsigned char)(codes[i] + (l.log_offset > 0 ? 1 << l.log_offset : 0));
    memcpy(quads, sum, sizeof sum);
}

/* What code_quad() takes apart. */
static inline void pack_strip(const uint32_t quads[QUADS], struct panel_layout l, size_t lane,
                              unsigned char *strip)
{
    uint32_t words[QUADS] = {0};

    for (size_t k = 0; k < QUADS; k++) {
        if (l.bits == 8)
            words[k] = quads[k];
        else if (l.bits >= 4)
            words[k % 4] |= (quads[k] & 0x0f0f0f0f) << k / 4 * 4;
        else
            words[k % 2] |= (quads[k] & 0x03030303) << k / 2 * 2;
        if (l.bits == 3)
            words[2] |= (quads[k] >> 2 & 0x01010101) << k;
        if (l.bits == 5)
            words[4] |= (quads[k] >> 4 & 0x01010101) << k;
        if (l.bits == 6)
            words[4 + k % 2] |= (quads[k] >> 4 & 0x03030303) << k / 2 * 2;
    }
    for (size_t i = 0; i < l.bits; i++)
        memcpy(strip + 4 * (PANEL * i + lane), &words[i], 4);
}

static inline void store_f16(const unsigned char *f16, size_t lane, unsigned char *out)
{
    memcpy(out + 2 * lane, f16, 2);
}

static inline __attribute__((always_inline)) void
pack_panel(const unsigned char *weights, size_t row_bytes, size_t weight_rows, size_t columns,
           unpack_block *unpack, struct panel_layout l, size_t block_bytes, unsigned char *panel)
{
    const size_t strips = l.elements / 32, groups = l.elements / l.group;
    struct quant_block unpacked;

    for (size_t block = 0; block < columns / l.elements; block++, panel += block_bytes) {
        unsigned char *behind = panel + strips * strip_bytes(l);

        for (size_t lane = 0; lane < PANEL; lane++) {
            /* Lanes without a row repeat the last one. */
            const size_t row = lane < weight_rows ? lane : weight_rows - 1;
            const unsigned char *packed = weights + row * row_bytes + block * l.bytes;

            unpack(packed, &unpacked);
            for (size_t s = 0; s < strips; s++) {
                uint32_t quads[QUADS];

                strip_quads(unpacked.codes + 32 * s, l, quads);
                pack_strip(quads, l, lane, panel + s * strip_bytes(l));
            }
            if (groups == 1) {
                store_f16(packed, lane, behind);
                if (l.has_minima)
                    store_f16(packed + 2, lane, behind + 2 * PANEL);
                continue;
            }
            for (size_t m = 0; m < (l.has_minima ? 2 : 1); m++) {
                unsigned char *factors = behind + (l.has_minima ? 2 : 1) * groups * PANEL;

                for (size_t g = 0; g < groups; g++)
                    behind[(m * groups + g) * PANEL + lane] =
                        (unsigned char)unpacked.integers[m][g];
                memcpy(factors + 4 * (m * PANEL + lane), &unpacked.factors[m], 4);
            }
        }
    }
}

/* ---- Multiplying ---- */

/* Quad k of each lane. */
static inline __m512i code_quad(const unsigned char *strip, struct panel_layout l, size_t k)
{
    const size_t low = l.bits == 8 ? k : l.bits >= 4 ? k % 4 : k % 2;
    __m512i codes = _mm512_loadu_si512(strip + 4 * PANEL * low);

    if (l.bits == 8)
        return codes;
    if (l.bits >= 4)
        codes = _mm512_and_si512(k < 4 ? codes : _mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15));
    else
        codes =
            _mm512_and_si512(_mm512_srli_epi16(codes, (unsigned)(k / 2 * 2)), _mm512_set1_epi8(3));
    if (has_levels(l)) {
        const __m128i levels = _mm_loadu_si128((const __m128i *)quant_level);
        const __m512i table = _mm512_broadcast_i32x4(_mm_xor_si128(levels, _mm_set1_epi8(-128)));

        return _mm512_shuffle_epi8(table, codes);
    }
    if (l.bits == 3 || l.bits == 5) {
        const size_t to = l.bits - 1;
        const __m512i plane = _mm512_loadu_si512(strip + 4 * PANEL * to);
        const __m512i moved = k < to ? _mm512_slli_epi16(plane, (unsigned)(to - k))
                                     : _mm512_srli_epi16(plane, (unsigned)(k - to));

        codes = _mm512_or_si512(codes, _mm512_and_si512(moved, _mm512_set1_epi8((char)(1 << to))));
    }
    if (l.bits == 6) {
        const size_t from = k / 2 * 2;
        const __m512i plane = _mm512_loadu_si512(strip + 4 * PANEL * (4 + k % 2));
        const __m512i moved = from < 4 ? _mm512_slli_epi16(plane, (unsigned)(4 - from))
                                       : _mm512_srli_epi16(plane, (unsigned)(from - 4));

        codes = _mm512_or_si512(codes, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)));
    }
    return codes;
}

static inline __m512 load_f16_lanes(const unsigned char *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline __m512 load_i8_lanes(const unsigned char *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* A row's sums run over the groups in order, whatever the number of rows. */
static inline __attribute__((always_inline)) void
multiply_tile(const unsigned char *panel, const struct tile *t, size_t rows, size_t columns,
              struct panel_layout l, size_t block_bytes, __m512 *sums)
{
    const size_t strips = l.elements / 32, groups = l.elements / l.group;
    const size_t strip_groups = 32 / l.group, kinds = l.has_minima ? 2 : 1;
    const float *x_scales = t->scales, *x_sums = l.group == 16 ? t->sums_16 : t->sums_32;
    const int32_t *negative = l.group == 16 ? t->negative_16 : t->negative_32;
    const int8_t *x_codes = t->codes;

    for (size_t r = 0; r < rows; r++)
        sums[r] = _mm512_setzero_ps();
    for (size_t block = 0; block < columns / l.elements; block++, panel += block_bytes) {
        const unsigned char *behind = panel + strips * strip_bytes(l);
        const float *factors = (const float *)(behind + kinds * groups * PANEL);
        const __m512 d = groups > 1 ? _mm512_loadu_ps(factors) : _mm512_setzero_ps();
        const __m512 d_minimum =
            groups > 1 && l.has_minima ? _mm512_loadu_ps(factors + PANEL) : _mm512_setzero_ps();

        for (size_t s = 0; s < strips; s++) {
            const unsigned char *strip = panel + s * strip_bytes(l);

#pragma GCC unroll 2
            for (size_t g = 0; g < strip_groups; g++) {
                const size_t group = s * strip_groups + g;
                __m512i dots[TILE];
                __m512 scale, minimum = _mm512_setzero_ps();

                for (size_t line = 0; line < block_bytes / groups; line += 64)
                    _mm_prefetch((const char *)strip + PANEL_AHEAD + line, _MM_HINT_T0);
#pragma GCC unroll 8
                for (size_t r = 0; r < rows; r++)
                    dots[r] = l.log_offset == 0 ? _mm512_setzero_si512()
                                                : _mm512_slli_epi32(_mm512_set1_epi32(negative[r]),
                                                                    (unsigned)l.log_offset);
#pragma GCC unroll 8
                for (size_t k = 0; k < l.group / 4; k++) {
                    const __m512i w = code_quad(strip, l, g * l.group / 4 + k);

#pragma GCC unroll 8
                    for (size_t r = 0; r < rows; r++) {
                        int32_t four;

                        memcpy(&four, x_codes + 4 * r, 4);
                        dots[r] = _mm512_dpbusd_epi32(dots[r], w, _mm512_set1_epi32(four));
                    }
                    x_codes += 4 * rows;
                }
                if (groups == 1) {
                    scale = load_f16_lanes(behind);
                    if (l.has_minima)
                        minimum = load_f16_lanes(behind + 2 * PANEL);
                } else {
                    scale = _mm512_mul_ps(d, load_i8_lanes(behind + group * PANEL));
                    if (l.has_minima)
                        minimum = _mm512_mul_ps(d_minimum,
                                                load_i8_lanes(behind + (groups + group) * PANEL));
                }
#pragma GCC unroll 8
                for (size_t r = 0; r < rows; r++) {
                    const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r]));

                    sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), factor, sums[r]);
                    if (l.has_minima)
                        sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x_sums[r]), sums[r]);
                }
                x_sums += rows;
                negative += rows;
            }
            x_scales += rows;
        }
    }
}

static inline __attribute__((always_inline)) void
multiply_panel(const unsigned char *panel, size_t weight_rows, size_t columns,
               const unsigned char *tiles, size_t rows, struct panel_layout l, size_t block_bytes,
               float *y, size_t y_stride, bool add)
{
    const __mmask16 mask = (__mmask16)((1u << weight_rows) - 1);
    __m512 sums[TILE];

    if (rows == 1) {
        const struct tile t = find_tile(tiles, 1, columns);

        multiply_tile(panel, &t, 1, columns, l, block_bytes, sums);
        if (add)
            sums[0] = _mm512_add_ps(sums[0], _mm512_maskz_loadu_ps(mask, y));
        _mm512_mask_storeu_ps(y, mask, sums[0]);
        return;
    }
    for (size_t first = 0; first < rows; first += TILE) {
        const struct tile t = find_tile(tiles + first * PRODUCTS_ROW_BYTES(columns), TILE, columns);

        multiply_tile(panel, &t, TILE, columns, l, block_bytes, sums);
#pragma GCC unroll 8
        for (size_t r = 0; r < TILE; r++) {
            float *out = y + (first + r) * y_stride;

            if (first + r < rows) {
                if (add)
                    sums[r] = _mm512_add_ps(sums[r], _mm512_maskz_loadu_ps(mask, out));
                _mm512_mask_storeu_ps(out, mask, sums[r]);
            }
        }
    }
}

#define PANEL_PRODUCT(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                      \
    static const struct panel_layout layout_##NAME = {                                             \
        ELEMENTS, BYTES, GROUP, BITS_##NAME, LOG_OFFSET_##NAME, HAS_MINIMA};                       \
                                                                                                   \
    static void pack_panel_##NAME(const void *weights, size_t row_bytes, size_t weight_rows,       \
                                  size_t columns, unsigned char *panel)                            \
    {                                                                                              \
        pack_panel(weights, row_bytes, weight_rows, columns, quant_unpack_##NAME, layout_##NAME,   \
                   PANEL_BLOCK_BYTES(ELEMENTS, GROUP, BITS_##NAME, HAS_MINIMA), panel);            \
    }                                                                                              \
                                                                                                   \
    static void multiply_panel_##NAME(const unsigned char *panel, size_t weight_rows,              \
                                      size_t columns, const unsigned char *tiles, size_t rows,     \
                                      float *y, size_t y_stride, bool add)                         \
    {                                                                                              \
        multiply_panel(panel, weight_rows, columns, tiles, rows, layout_##NAME,                    \
                       PANEL_BLOCK_BYTES(ELEMENTS, GROUP, BITS_##NAME, HAS_MINIMA), y, y_stride,   \
                       add);                                                                       \
    }
QUANT_PACKED_TYPES(PANEL_PRODUCT)

#define PANEL_ENTRY(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                        \
    [QUANT_##TYPE] = {PANEL_BLOCK_BYTES(ELEMENTS, GROUP, BITS_##NAME, HAS_MINIMA),                 \
                      pack_panel_##NAME, multiply_panel_##NAME},

#endif
