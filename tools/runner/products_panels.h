/* SPDX-License-Identifier: MIT */
/* The inner loops over panels of weights and tiles of activations in bytes, for AVX-512 with VNNI;
 * included by products_body.h. A lane is a weight row; four codes of a row lie together. */
#ifndef PUZZLEKV_TOOLS_RUNNER_PRODUCTS_PANELS_H
#define PUZZLEKV_TOOLS_RUNNER_PRODUCTS_PANELS_H

#define TILE  PRODUCTS_TILE_ROWS
#define PANEL PRODUCTS_PANEL_ROWS

/* Where things lie in a tile. */
struct tile {
    int8_t *codes;                  /* [columns / 4, TILE, 4] */
    float *scales;                  /* [columns / 32, TILE] */
    float *sums_16, *sums_32;       /* [columns / 16, TILE] and [columns / 32, TILE] */
    int32_t *biases_16, *biases_32; /* -128 times the sum of the codes */
};

static inline struct tile find_tile(const unsigned char *bytes, size_t columns)
{
    struct tile t = {.codes = (int8_t *)bytes};

    t.scales = (float *)(t.codes + TILE * columns);
    t.sums_16 = t.scales + TILE * (columns / 32);
    t.sums_32 = t.sums_16 + TILE * (columns / 16);
    t.biases_16 = (int32_t *)(t.sums_32 + TILE * (columns / 32));
    t.biases_32 = t.biases_16 + TILE * (columns / 16);
    return t;
}

static void round_tile(const float *x, size_t x_stride, size_t rows, size_t columns,
                       unsigned char *bytes)
{
    static const float zeros[32];
    const struct tile t = find_tile(bytes, columns);

    for (size_t b = 0; b < columns / 32; b++) {
        for (size_t r = 0; r < TILE; r++) {
            int8_t codes[32];
            const float scale = round_block(r < rows ? x + r * x_stride + 32 * b : zeros, codes);
            const int32_t low = sum_16(codes), high = sum_16(codes + 16);

            for (size_t k = 0; k < 8; k++)
                memcpy(t.codes + 4 * ((8 * b + k) * TILE + r), codes + 4 * k, 4);
            t.scales[b * TILE + r] = scale;
            t.sums_16[2 * b * TILE + r] = scale * (float)low;
            t.sums_16[(2 * b + 1) * TILE + r] = scale * (float)high;
            t.sums_32[b * TILE + r] = scale * (float)(low + high);
            t.biases_16[2 * b * TILE + r] = -128 * low;
            t.biases_16[(2 * b + 1) * TILE + r] = -128 * high;
            t.biases_32[b * TILE + r] = -128 * (low + high);
        }
    }
}

/* [columns / 4, PANEL, 4] codes, without sign, then [columns / group, PANEL] scales and minima. */
static inline __attribute__((always_inline)) void
fill_panel(const unsigned char *weights, size_t row_bytes, size_t weight_rows, size_t columns,
           unpack_block *unpack, size_t elements, size_t bytes, size_t group, bool has_minima,
           unsigned char *panel)
{
    const size_t groups = elements / group;
    unsigned char *codes = panel;
    float *scales = (float *)(panel + PANEL * columns);
    float *minima = scales + PANEL * (columns / group);
    struct quant_block unpacked;

    for (size_t block = 0; block < columns / elements; block++) {
        for (size_t lane = 0; lane < PANEL; lane++) {
            /* Lanes without a row repeat the last one. */
            const size_t row = lane < weight_rows ? lane : weight_rows - 1;

            /* The next panel mostly lies behind this one. */
            __builtin_prefetch(weights + (lane + PANEL) * row_bytes + block * bytes);
            unpack(weights + row * row_bytes + block * bytes, &unpacked);
            for (size_t k = 0; k < elements / 4; k++) {
                uint32_t four = quant_u32((const unsigned char *)unpacked.codes + 4 * k);

                four ^= has_minima ? 0 : 0x80808080;
                memcpy(codes + 4 * (k * PANEL + lane), &four, 4);
            }
            for (size_t g = 0; g < groups; g++) {
                scales[g * PANEL + lane] = unpacked.scales[g];
                if (has_minima)
                    minima[g * PANEL + lane] = unpacked.minima[g];
            }
        }
        codes += PANEL * elements;
        scales += PANEL * groups;
        minima += PANEL * groups;
    }
}

static inline __attribute__((always_inline)) void multiply_tile(const unsigned char *panel,
                                                                const struct tile *t,
                                                                size_t columns, size_t group,
                                                                bool has_minima, __m512 sums[TILE])
{
    const float *scales = (const float *)(panel + PANEL * columns);
    const float *minima = scales + PANEL * (columns / group);
    const float *x_sums = group == 16 ? t->sums_16 : t->sums_32;
    const int32_t *biases = group == 16 ? t->biases_16 : t->biases_32;
    const unsigned char *weights = panel;
    const int8_t *codes = t->codes;

    for (size_t r = 0; r < TILE; r++)
        sums[r] = _mm512_setzero_ps();
    for (size_t g = 0; g < columns / group; g++) {
        __m512i dots[TILE];

#pragma GCC unroll 8
        for (size_t r = 0; r < TILE; r++)
            dots[r] = has_minima ? _mm512_setzero_si512() : _mm512_set1_epi32(biases[g * TILE + r]);
#pragma GCC unroll 8
        for (size_t k = 0; k < group / 4; k++) {
            const __m512i w = _mm512_load_si512(weights);

#pragma GCC unroll 8
            for (size_t r = 0; r < TILE; r++) {
                int32_t four;

                memcpy(&four, codes + 4 * r, 4);
                dots[r] = _mm512_dpbusd_epi32(dots[r], w, _mm512_set1_epi32(four));
            }
            weights += 4 * PANEL;
            codes += 4 * TILE;
        }

        const __m512 scale = _mm512_load_ps(scales + g * PANEL);
        const __m512 minimum = has_minima ? _mm512_load_ps(minima + g * PANEL) : scale;
        const float *x_scales = t->scales + g * group / 32 * TILE;

#pragma GCC unroll 8
        for (size_t r = 0; r < TILE; r++) {
            const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r]));

            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), factor, sums[r]);
            if (has_minima)
                sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x_sums[g * TILE + r]), sums[r]);
        }
    }
}

static inline __attribute__((always_inline)) void
multiply_panel(const unsigned char *panel, size_t weight_rows, size_t columns,
               const unsigned char *tiles, size_t rows, size_t group, bool has_minima, float *y,
               size_t y_stride, bool add)
{
    const __mmask16 mask = (__mmask16)((1u << weight_rows) - 1);

    for (size_t first = 0; first < rows; first += TILE) {
        const struct tile t =
            find_tile(tiles + first * (PRODUCTS_TILE_BYTES * columns / TILE), columns);
        __m512 sums[TILE];

        multiply_tile(panel, &t, columns, group, has_minima, sums);
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
    static void panel_##NAME(const void *weights, size_t row_bytes, size_t weight_rows,            \
                             size_t columns, const unsigned char *tiles, size_t rows,              \
                             unsigned char *panel, float *y, size_t y_stride, bool add)            \
    {                                                                                              \
        fill_panel(weights, row_bytes, weight_rows, columns, quant_unpack_##NAME, ELEMENTS, BYTES, \
                   GROUP, HAS_MINIMA, panel);                                                      \
        multiply_panel(panel, weight_rows, columns, tiles, rows, GROUP, HAS_MINIMA, y, y_stride,   \
                       add);                                                                       \
    }
QUANT_PACKED_TYPES(PANEL_PRODUCT)

#define PANEL_ENTRY(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                        \
    [QUANT_##TYPE] = panel_##NAME,

#endif
