/* SPDX-License-Identifier: MIT */
/*
 * The kernels, written once with vectors of LANES floats. A file that includes this one, and ends
 * with a table that is {KERNELS_TABLE(its name)}, defines
 *     LANES            floats in a vector: 4, 8 or 16 (KERNELS_PAD)
 *     PANEL_VECTORS    vectors in a row of a panel: 2 or 4
 *     TILE_ROWS        rows of a product kept in registers with 3 or 4 vectors each, 4 to 12
 *     TILE_MOST        the same with 1 or 2 vectors each
 *     OWN_BF16         only if it has an arithmetic of bf16 of its own: its initialisers
 * after typedefs of the vectors and these operations on them:
 *     vector_fma(a, b, c)  a * b + c; written out, so that no flag decides what is fused
 *     vector_max(a, b)     a > b ? a : b
 *     vector_from_f16(const uint16_t *), vector_from_bf16(const uint16_t *)
 *     vector_to_f16(vector_f32, uint16_t *)
 */
#include "numeric.h"
#include "kernels.h"

#include <math.h>
#include <stdbool.h>

#define PANEL (PANEL_VECTORS * LANES)

typedef uint8_t vector_lane_u8 __attribute__((vector_size(LANES)));
typedef uint16_t vector_lane_u16 __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll_count(16)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE vector_f32 splat(float x)
{
    return x - (vector_f32){0}; /* x itself, for a zero of either sign too */
}

INLINE vector_f32 load(const float *p)
{
    vector_f32 v;

    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void save(float *p, vector_f32 v)
{
    memcpy(p, &v, sizeof v);
}

/* How the right operand of a product is stored: a pkv_dtype, or a tall matrix of codes. */
enum form { F32 = PKV_F32, F16 = PKV_F16, BF16 = PKV_BF16, TALL };

INLINE vector_u32 load_pairs(const char *row, size_t i)
{
    vector_u32 v;

    memcpy(&v, row + i * sizeof v, sizeof v);
    return v;
}

/* Vector number i of a stored row, or of the first or second row of two that lie interleaved;
 * `form` is constant wherever this is inlined. */
INLINE vector_f32 load_as(enum form form, const char *row, size_t i, bool second)
{
    switch (form) {
    case BF16:
        return (vector_f32)(second ? load_pairs(row, i) & 0xffff0000u : load_pairs(row, i) << 16);
    case F16:
        return vector_from_f16((const uint16_t *)(const void *)row + i * LANES);
    default:
        return load((const float *)(const void *)row + i * LANES);
    }
}

/* Rows that lie interleaved. */
INLINE size_t interleave_of(enum form form)
{
    return form == BF16 ? 2 : 1;
}

/* Half by half: one fixed order. */
#define REDUCE(lane, combine)                                                                      \
    do {                                                                                           \
        for (int i = 0; i < 8 && LANES > 8; i++)                                                   \
            lane[i] = combine(lane[i], lane[i + LANES / 2]);                                       \
        for (int i = 0; i < 4 && LANES > 4; i++)                                                   \
            lane[i] = combine(lane[i], lane[i + 4]);                                               \
        for (int i = 0; i < 2; i++)                                                                \
            lane[i] = combine(lane[i], lane[i + 2]);                                               \
        lane[0] = combine(lane[0], lane[1]);                                                       \
    } while (0)
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define SUM(a, b)    ((a) + (b))

INLINE float reduce_max(vector_f32 v)
{
    float lane[LANES];

    save(lane, v);
    REDUCE(lane, LARGER);
    return lane[0];
}

INLINE float reduce_add(vector_f32 v)
{
    float lane[LANES];

    save(lane, v);
    REDUCE(lane, SUM);
    return lane[0];
}

/*
 * exp(x) for x <= 0 within 2 ulp; 0 below 2^-126, so that a flush-to-zero mode changes nothing; NaN
 * stays NaN. x = n ln 2 + r, exp(r) = 1 + r + r^2 p(r), p fitted on |r| <= 0.3475.
 */
INLINE vector_f32 exponential(vector_f32 x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23 leaves n in the low bits */
    vector_f32 shifted = vector_fma(x, splat(0x1.715476p+0f), splat(round));
    vector_f32 n = shifted - round;
    vector_f32 r = vector_fma(n, splat(-0x1.63p-1f), x); /* exact: 9 bits of ln 2 */
    vector_f32 p = splat(0x1.6a21a8p-10f);

    r = vector_fma(n, splat(0x1.bd0106p-13f), r);
    p = vector_fma(p, r, splat(0x1.123b6ap-7f));
    p = vector_fma(p, r, splat(0x1.5558fcp-5f));
    p = vector_fma(p, r, splat(0x1.555490p-3f));
    p = vector_fma(p, r, splat(0x1.fffffcp-2f));
    p = vector_fma(vector_fma(p, r, splat(1.0f)), r, splat(1.0f));
    p *= (vector_f32)(((vector_u32)shifted << 23) + 0x3f800000u);
    return (vector_f32)((vector_i32)p & ~(vector_i32)(x < splat(-0x1.5d589ep+6f)));
}

/* ---- Products ---- */

/* One row of b, of two that lie interleaved the first or second. */
INLINE void multiply_row(size_t rows, size_t vectors, enum form form, bool second, const float *a,
                         size_t lda, const char *b, vector_f32 sum[TILE_MOST][PANEL_VECTORS])
{
    vector_f32 value[PANEL_VECTORS];

    UNROLL
    for (size_t j = 0; j < vectors; j++)
        value[j] = load_as(form, b, j, second);
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        vector_f32 x = splat(a[i * lda]);

        UNROLL
        for (size_t j = 0; j < vectors; j++)
            sum[i][j] = vector_fma(x, value[j], sum[i][j]);
    }
}

INLINE void sums_begin(size_t rows, size_t vectors, const float *scale, const float *c, size_t ldc,
                       vector_f32 (*sum)[PANEL_VECTORS])
{
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            sum[i][j] = scale ? load(c + i * ldc + j * LANES) * scale[i] : splat(0.0f);
    }
}

INLINE void sums_end(size_t rows, size_t vectors, vector_f32 (*sum)[PANEL_VECTORS], float *c,
                     size_t ldc)
{
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            save(c + i * ldc + j * LANES, sum[i][j]);
    }
}

/* `rows` and `vectors` are constants; the sums stay in registers. */
INLINE void tile(size_t rows, size_t vectors, enum form form, size_t k, const float *a, size_t lda,
                 const char *b, size_t ldb_bytes, const float *scale, float *c, size_t ldc)
{
    vector_f32 sum[TILE_MOST][PANEL_VECTORS];
    size_t p = 0;

    sums_begin(rows, vectors, scale, c, ldc, sum);
    if (interleave_of(form) == 2) {
        for (; p + 2 <= k; p += 2, b += ldb_bytes) {
            multiply_row(rows, vectors, form, false, a + p, lda, b, sum);
            multiply_row(rows, vectors, form, true, a + p + 1, lda, b, sum);
        }
        if (p < k)
            multiply_row(rows, vectors, form, false, a + p, lda, b, sum);
    } else {
        for (; p < k; p++, b += ldb_bytes)
            multiply_row(rows, vectors, form, false, a + p, lda, b, sum);
    }
    sums_end(rows, vectors, sum, c, ldc);
}

typedef void tile_function(size_t rows, size_t vectors, enum form form, size_t k, const float *a,
                           size_t lda, const char *b, size_t ldb_bytes, const float *scale,
                           float *c, size_t ldc);

/* All rows of `vectors` columns, as many at a time as registers allow. */
INLINE void panel(tile_function *multiply, size_t vectors, enum form form, size_t rows, size_t k,
                  const float *a, size_t lda, const char *b, size_t ldb_bytes, const float *scale,
                  float *c, size_t ldc)
{
    const size_t most = vectors > 2 ? TILE_ROWS : TILE_MOST;

#define TAKE(n)                                                                                    \
    do {                                                                                           \
        multiply(n, vectors, form, k, a, lda, b, ldb_bytes, scale, c, ldc);                        \
        rows -= n;                                                                                 \
        a += n * lda;                                                                              \
        c += n * ldc;                                                                              \
        scale = scale ? scale + n : NULL;                                                          \
    } while (0)
    while (rows >= most)
        TAKE(most);
    if (most > 8 && rows >= 8)
        TAKE(8);
    if (most > 4 && rows >= 4)
        TAKE(4);
    if (rows == 3)
        TAKE(3);
    else if (rows == 2)
        TAKE(2);
    else if (rows == 1)
        TAKE(1);
#undef TAKE
}

/* The first n columns of a panel. */
INLINE void columns(tile_function *multiply, size_t n, enum form form, size_t rows, size_t k,
                    const float *a, size_t lda, const char *b, size_t ldb_bytes, const float *scale,
                    float *c, size_t ldc)
{
#define VECTORS(v)                                                                                 \
    case v:                                                                                        \
        if (v <= PANEL_VECTORS)                                                                    \
            panel(multiply, v, form, rows, k, a, lda, b, ldb_bytes, scale, c, ldc);                \
        break;
    switch ((n + LANES - 1) / LANES) {
        VECTORS(1)
        VECTORS(2)
        VECTORS(3)
        VECTORS(4)
    }
#undef VECTORS
}

INLINE void product(tile_function *multiply, enum form form, size_t rows, size_t k, size_t n,
                    const float *a, size_t lda, struct matrix b, const float *scale, float *c,
                    size_t ldc)
{
    const size_t bytes = form == F32 ? 4 : 2;
    const size_t interleave = interleave_of(form);
    const size_t stored = (b.rows + interleave - 1) / interleave * interleave;
    const char *data = (const char *)b.data;

    for (size_t j = 0; j < n; j += PANEL) {
        size_t width = b.columns - j < PANEL ? b.columns - j : PANEL;
        size_t used = n - j < width ? n - j : width;

        columns(multiply, used, form, rows, k, a, lda, data, width * interleave * bytes, scale,
                c + j, ldc);
        data += stored * width * bytes;
    }
}

#define PRODUCT(name, form)                                                                        \
    static void product_##name(size_t rows, size_t k, size_t n, const float *a, size_t lda,        \
                               struct matrix b, const float *scale, float *c, size_t ldc)          \
    {                                                                                              \
        product(tile, form, rows, k, n, a, lda, b, scale, c, ldc);                                 \
    }

#define CHAIN(name)                                                                                \
    static void chain_##name(size_t rows, const float *a, size_t lda, struct matrix b1,            \
                             struct matrix b2, float *inner, size_t ldi, const float *scale,       \
                             float *c, size_t ldc)                                                 \
    {                                                                                              \
        product_##name(rows, b1.rows, b1.columns, a, lda, b1, NULL, inner, ldi);                   \
        product_##name(rows, b2.rows, b2.columns, inner, ldi, b2, scale, c, ldc);                  \
    }

PRODUCT(f32, F32)
PRODUCT(f16, F16)
CHAIN(f32)
CHAIN(f16)
#ifndef OWN_BF16
PRODUCT(bf16, BF16)
CHAIN(bf16)
#endif

/* ---- Products by codes ---- */

/* sum += a b, `rows` and `vectors` constants, for one row of codes that end before bit `end`. */
INLINE void multiply_codes(size_t rows, size_t vectors, const vector_u32 *lanes, int end,
                           const float *a, size_t lda, vector_f32 (*sum)[PANEL_VECTORS])
{
    vector_f32 value[PANEL_VECTORS];

    UNROLL
    for (size_t j = 0; j < vectors; j++)
        value[j] = __builtin_convertvector((vector_i32)(lanes[j] << (32 - end)) >> 28, vector_f32);
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        vector_f32 x = splat(a[i * lda]);

        UNROLL
        for (size_t j = 0; j < vectors; j++)
            sum[i][j] = vector_fma(x, value[j], sum[i][j]);
    }
}

INLINE void tile_tall(size_t rows, size_t vectors, enum form form, size_t k, const float *a,
                      size_t lda, const char *b, size_t ldb_bytes, const float *scale, float *c,
                      size_t ldc)
{
    vector_f32 sum[TILE_MOST][PANEL_VECTORS];

    (void)form;
    sums_begin(rows, vectors, scale, c, ldc, sum);
    for (size_t p = 0; p < k; p += 8, b += ldb_bytes) {
        vector_u32 lanes[PANEL_VECTORS];

        UNROLL
        for (size_t j = 0; j < vectors; j++)
            lanes[j] = load_pairs(b, j);
        UNROLL
        for (size_t i = 0; i < 8; i++)
            multiply_codes(rows, vectors, lanes, (int)(i % 2 * 16 + i / 2 * 4 + 4), a + p + i, lda,
                           sum);
    }
    sums_end(rows, vectors, sum, c, ldc);
}

static void product_tall(size_t rows, size_t k, size_t n, const float *a, size_t lda,
                         const unsigned char *b, float *c, size_t ldc)
{
    for (size_t j = 0; j < n; j += PANEL)
        columns(tile_tall, n - j < PANEL ? n - j : PANEL, TALL, rows, k, a, lda,
                (const char *)b + 4 * j, 4 * n, NULL, c + j, ldc);
}

/* Lanes of two rows, or of one, as those of four have them. */
INLINE vector_u32 load_two(const unsigned char *from)
{
    vector_lane_u16 lanes;
    vector_u32 x;

    memcpy(&lanes, from, sizeof lanes);
    x = __builtin_convertvector(lanes, vector_u32);
    return (x & 0xff) | (x & 0xff00) << 8;
}

INLINE vector_u32 load_one(const unsigned char *from)
{
    vector_lane_u8 lanes;

    memcpy(&lanes, from, sizeof lanes);
    return __builtin_convertvector(lanes, vector_u32);
}

/* `used` columns from column j on, in `vectors` vectors, of the half whose codes lie `shift` bits
 * up; nothing beyond them is written. */
INLINE void tile_wide(size_t rows, size_t vectors, size_t k, size_t half, unsigned shift, size_t j,
                      size_t used, const float *a, size_t lda, const unsigned char *b, float *c,
                      size_t ldc)
{
    const unsigned char *tail = b + k / 4 * half * 4;
    vector_f32 sum[TILE_ROWS][PANEL_VECTORS];
    vector_u32 lanes[PANEL_VECTORS];
    size_t p = 0;

    sums_begin(rows, vectors, NULL, c, ldc, sum);
    for (; p + 4 <= k; p += 4) {
        UNROLL
        for (size_t v = 0; v < vectors; v++)
            lanes[v] = load_pairs((const char *)b + p * half + 4 * j, v) >> shift;
        UNROLL
        for (size_t i = 0; i < 4; i++)
            multiply_codes(rows, vectors, lanes, (int)(i % 2 * 16 + i / 2 * 8 + 4), a + p + i, lda,
                           sum);
    }
    if (k - p >= 2) {
        UNROLL
        for (size_t v = 0; v < vectors; v++)
            lanes[v] = load_two(tail + 2 * (j + v * LANES)) >> shift;
        multiply_codes(rows, vectors, lanes, 4, a + p, lda, sum);
        multiply_codes(rows, vectors, lanes, 20, a + p + 1, lda, sum);
        p += 2;
        tail += 2 * half;
    }
    if (p < k) {
        UNROLL
        for (size_t v = 0; v < vectors; v++)
            lanes[v] = load_one(tail + j + v * LANES) >> shift;
        multiply_codes(rows, vectors, lanes, 4, a + p, lda, sum);
    }
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t v = 0; v < vectors; v++) {
            if (used - v * LANES >= LANES)
                save(c + i * ldc + v * LANES, sum[i][v]);
            else
                memcpy(c + i * ldc + v * LANES, &sum[i][v], (used - v * LANES) * sizeof *c);
        }
    }
}

static void product_wide(size_t rows, size_t k, size_t n, const float *a, size_t lda,
                         const unsigned char *b, float *c, size_t ldc)
{
    const size_t half = n / 2;

    for (size_t i = 0; i < rows;) {
        const size_t taken = rows - i >= TILE_ROWS ? TILE_ROWS : rows - i >= 2 ? 2 : 1;

        for (size_t j = 0; j < n;) {
            const size_t column = j % half;
            const size_t used = half - column < PANEL ? half - column : PANEL;
            const unsigned shift = j < half ? 0 : 4;

#define WIDE(r, v)                                                                                 \
    tile_wide(r, v, k, half, shift, column, used, a + i * lda, lda, b, c + i * ldc + j, ldc)
#define VECTORS(v)                                                                                 \
    case v:                                                                                        \
        if (v <= PANEL_VECTORS && taken == TILE_ROWS)                                              \
            WIDE(TILE_ROWS, v);                                                                    \
        else if (v <= PANEL_VECTORS && taken == 2)                                                 \
            WIDE(2, v);                                                                            \
        else if (v <= PANEL_VECTORS)                                                               \
            WIDE(1, v);                                                                            \
        break;
            switch ((used + LANES - 1) / LANES) {
                VECTORS(1)
                VECTORS(2)
                VECTORS(3)
                VECTORS(4)
            }
#undef VECTORS
#undef WIDE
            j += used;
        }
        i += taken;
    }
}

/* ---- Softmax ---- */

static void softmax(size_t rows, size_t n, const uint32_t *valid, float *s, size_t lds, float *m,
                    float *l, float *scale)
{
    for (size_t i = 0; i < rows; i++) {
        float *row = s + i * lds;
        size_t count = valid ? valid[i] : n;
        size_t j = 0;
        vector_f32 top = splat(-INFINITY);
        float largest;

        for (; j + LANES <= count; j += LANES)
            top = vector_max(load(row + j), top);
        if (j < count) {
            for (size_t masked = count; masked < j + LANES; masked++)
                row[masked] = -INFINITY;
            top = vector_max(load(row + j), top);
        }
        largest = reduce_max(top);
        largest = largest > m[i] ? largest : m[i];
        scale[i] = m[i] - largest;
        m[i] = largest;
    }
    for (size_t i = 0; i < rows; i += LANES)
        save(scale + i, exponential(load(scale + i)));
    for (size_t i = 0; i < rows; i++) {
        float *row = s + i * lds;
        size_t count = valid ? valid[i] : n;
        size_t j = 0;
        vector_f32 sum = splat(0.0f);

        for (; j < count; j += LANES) {
            vector_f32 p = exponential(load(row + j) - m[i]);

            save(row + j, p);
            sum += p;
        }
        for (; j < n; j += LANES)
            save(row + j, splat(0.0f));
        l[i] = l[i] * scale[i] + reduce_add(sum);
    }
}

static void merge(size_t rows, size_t n, float *m, float *l, float *o, const float *m2,
                  const float *l2, const float *o2, size_t ldo)
{
    for (size_t i = 0; i < rows; i++) {
        float largest = m[i] > m2[i] ? m[i] : m2[i];
        vector_f32 scale = exponential(splat(m[i] - largest));
        vector_f32 scale2 = exponential(splat(m2[i] - largest));

        for (size_t j = 0; j < n; j += LANES) {
            float *p = o + i * ldo + j;

            save(p, vector_fma(load(o2 + i * ldo + j), scale2, load(p) * scale));
        }
        l[i] = vector_fma(splat(l2[i]), scale2, splat(l[i]) * scale)[0];
        m[i] = largest;
    }
}

static void f32_to_f32(size_t n, const void *from, float *to)
{
    memcpy(to, from, n * sizeof *to);
}

static void f16_to_f32s(size_t n, const void *from, float *to)
{
    const uint16_t *h = from;
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        save(to + i, vector_from_f16(h + i));
    for (; i < n; i++)
        to[i] = f16_to_f32(h[i]);
}

static void bf16_to_f32s(size_t n, const void *from, float *to)
{
    const uint16_t *h = from;
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        save(to + i, vector_from_bf16(h + i));
    for (; i < n; i++)
        to[i] = bf16_to_f32(h[i]);
}

static void f32_from_f32(size_t n, const float *from, void *to)
{
    memcpy(to, from, n * sizeof *from);
}

static void f16s_from_f32(size_t n, const float *from, void *to)
{
    uint16_t *h = to;
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        vector_to_f16(load(from + i), h + i);
    for (; i < n; i++)
        h[i] = f16_from_f32(from[i]);
}

static void bf16s_from_f32(size_t n, const float *from, void *to)
{
    uint16_t *h = to;

    for (size_t i = 0; i < n; i++)
        h[i] = bf16_from_f32(from[i]);
}

#include "kernels_moves.h"

#define F32_OPERANDS(name)                                                                         \
    NULL, NULL, product_##name, chain_##name, product_##name, chain_##name, softmax,               \
    {                                                                                              \
        .rows = 0                                                                                  \
    }

#ifndef OWN_BF16
#define OWN_BF16 F32_OPERANDS(bf16)
#endif

/* What a file's table is initialised with. */
#define KERNELS_TABLE(isa)                                                                         \
    .name = (isa), .panel = PANEL,                                                                 \
    .arithmetic = {{F32_OPERANDS(f32)}, {F32_OPERANDS(f16)}, {OWN_BF16}}, .softmax = softmax,      \
    .product_tall = product_tall, .product_wide = product_wide, .merge = merge,                    \
    .to_f32 = {f32_to_f32, f16_to_f32s, bf16_to_f32s},                                             \
    .from_f32 = {f32_from_f32, f16s_from_f32, bf16s_from_f32}, .pairs_from_f32 = pairs_from_f32,   \
    .pairs_to_f32 = pairs_to_f32, .pairs_from_columns = pairs_from_columns,                        \
    .pairs_to_columns = pairs_to_columns, .transpose = transpose
