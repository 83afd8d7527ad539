/* SPDX-License-Identifier: MIT */
/*
 * The kernels, written once with vectors of LANES floats. A file that includes this one defines
 *     KERNELS          the name of its table, KERNELS_NAME its name as a string
 *     LANES            floats in a vector: 4, 8 or 16 (KERNELS_PAD)
 *     TILE_ROWS        rows of a product kept in registers with 2 vectors each, at most 8
 *     WIDE_ROWS        the same with 4 vectors each
 * after typedefs of the vectors and these operations on them:
 *     vector_fma(a, b, c)  a * b + c; written out, so that no flag decides what is fused
 *     vector_max(a, b)     a > b ? a : b
 *     vector_from_bf16(const uint16_t *), vector_from_f16(const uint16_t *)
 *     vector_to_f16(vector_f32, uint16_t *)
 */
#include "numeric.h"
#include "kernels.h"

#include <math.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
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

/* Vector number i of a row of elements of `dtype`, which is constant wherever this is inlined. */
INLINE vector_f32 load_as(pkv_dtype dtype, const char *row, size_t i)
{
    switch (dtype) {
    case PKV_F16:
        return vector_from_f16((const uint16_t *)(const void *)row + i * LANES);
    case PKV_BF16:
        return vector_from_bf16((const uint16_t *)(const void *)row + i * LANES);
    default:
        return load((const float *)(const void *)row + i * LANES);
    }
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

/* `rows` and `vectors` are constants; the accumulators stay in registers. */
INLINE void tile(size_t rows, size_t vectors, pkv_dtype dtype, size_t k, const float *a, size_t lda,
                 const char *b, size_t ldb_bytes, const float *scale, float *c, size_t ldc)
{
    vector_f32 sum[8][4];
    vector_f32 value[4];

    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            sum[i][j] = scale ? load(c + i * ldc + j * LANES) * scale[i] : splat(0.0f);
    }
    for (size_t p = 0; p < k; p++, b += ldb_bytes) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            value[j] = load_as(dtype, b, j);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            vector_f32 x = splat(a[i * lda + p]);

            UNROLL
            for (size_t j = 0; j < vectors; j++)
                sum[i][j] = vector_fma(x, value[j], sum[i][j]);
        }
    }
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < vectors; j++)
            save(c + i * ldc + j * LANES, sum[i][j]);
    }
}

/* All rows of `vectors` columns; at most `tile_rows` (a constant) rows at a time. */
INLINE void panel(size_t tile_rows, size_t vectors, pkv_dtype dtype, size_t rows, size_t k,
                  const float *a, size_t lda, const char *b, size_t ldb_bytes, const float *scale,
                  float *c, size_t ldc)
{
    while (rows >= tile_rows) {
        tile(tile_rows, vectors, dtype, k, a, lda, b, ldb_bytes, scale, c, ldc);
        rows -= tile_rows;
        a += tile_rows * lda;
        c += tile_rows * ldc;
        scale = scale ? scale + tile_rows : NULL;
    }
#define REST(n)                                                                                    \
    case n:                                                                                        \
        if (n < tile_rows)                                                                         \
            tile(n, vectors, dtype, k, a, lda, b, ldb_bytes, scale, c, ldc);                       \
        break;
    switch (rows) {
        REST(1)
        REST(2)
        REST(3)
        REST(4)
        REST(5)
        REST(6)
        REST(7)
    }
#undef REST
}

INLINE void product(pkv_dtype dtype, size_t rows, size_t k, size_t n, const float *a, size_t lda,
                    const void *b, size_t ldb, const float *scale, float *c, size_t ldc)
{
    const size_t width = dtype == PKV_F32 ? 4 : 2;
    const char *column = b;
    size_t vectors = (n + LANES - 1) / LANES;
    size_t step;

    for (; vectors > 0; vectors -= step, column += step * LANES * width, c += step * LANES) {
        /* Few rows: more columns at a time, to load long runs and to hide the latency of fma. */
        if (rows <= WIDE_ROWS && vectors >= 4) {
            step = 4;
            panel(WIDE_ROWS, 4, dtype, rows, k, a, lda, column, ldb * width, scale, c, ldc);
        } else if (vectors >= 2) {
            step = 2;
            panel(TILE_ROWS, 2, dtype, rows, k, a, lda, column, ldb * width, scale, c, ldc);
        } else {
            step = 1;
            panel(TILE_ROWS, 1, dtype, rows, k, a, lda, column, ldb * width, scale, c, ldc);
        }
    }
}

static void product_f32(size_t rows, size_t k, size_t n, const float *a, size_t lda, const void *b,
                        size_t ldb, const float *scale, float *c, size_t ldc)
{
    product(PKV_F32, rows, k, n, a, lda, b, ldb, scale, c, ldc);
}

static void product_f16(size_t rows, size_t k, size_t n, const float *a, size_t lda, const void *b,
                        size_t ldb, const float *scale, float *c, size_t ldc)
{
    product(PKV_F16, rows, k, n, a, lda, b, ldb, scale, c, ldc);
}

static void product_bf16(size_t rows, size_t k, size_t n, const float *a, size_t lda, const void *b,
                         size_t ldb, const float *scale, float *c, size_t ldc)
{
    product(PKV_BF16, rows, k, n, a, lda, b, ldb, scale, c, ldc);
}

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

const struct kernels KERNELS = {
    .name = KERNELS_NAME,
    .product = {product_f32, product_f16, product_bf16},
    .softmax = softmax,
    .merge = merge,
    .to_f32 = {f32_to_f32, f16_to_f32s, bf16_to_f32s},
    .from_f32 = {f32_from_f32, f16s_from_f32, bf16s_from_f32},
};
