/* SPDX-License-Identifier: MIT */
/* The inner loops of products.c, compiled once per instruction set. The including file defines
 * PRODUCTS_TABLE and PRODUCTS_NAME. Vectors are as wide as the instruction set's registers, 8 lanes
 * at least; the compiler splits what is wider than a register. */
#include "products_kernels.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

#define VECTOR(TYPE) __attribute__((vector_size(LANES * sizeof(TYPE)))) TYPE

typedef VECTOR(float) vector_f32;
typedef VECTOR(int32_t) vector_i32;
typedef VECTOR(uint32_t) vector_u32;
typedef VECTOR(uint16_t) vector_u16;
typedef VECTOR(uint8_t) vector_u8;

static inline vector_f32 load_f32(const float *p)
{
    vector_f32 v;

    memcpy(&v, p, sizeof v);
    return v;
}

static inline vector_f32 load_bf16(const uint16_t *p)
{
    vector_u16 h;

    memcpy(&h, p, sizeof h);
    return (vector_f32)(__builtin_convertvector(h, vector_u32) << 16);
}

/* Finite values: exponent and mantissa in place, then the bias corrected by a product, which also
 * normalises subnormals. */
static inline vector_f32 load_f16(const uint16_t *p)
{
    vector_u16 h;

    memcpy(&h, p, sizeof h);
    vector_u32 wide = __builtin_convertvector(h, vector_u32);
    vector_f32 magnitude = (vector_f32)((wide & 0x7fff) << 13) * 0x1p112f;

    return (vector_f32)((vector_u32)magnitude | (wide & 0x8000) << 16);
}

/* Bytes to f32. Where there is an instruction for it compilers miss it; without one they need the
 * step through 16 bits, or they turn to scalar code. */
static inline vector_f32 from_u8(vector_u8 v)
{
#if defined __AVX512F__
    return (vector_f32)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)v));
#elif defined __AVX2__
    __m128i bytes = {0};

    memcpy(&bytes, &v, sizeof v);
    return (vector_f32)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
    vector_u16 half = __builtin_convertvector(v, vector_u16);

    return __builtin_convertvector(__builtin_convertvector(half, vector_i32), vector_f32);
#endif
}

/* x ^ 0x80 is x + 128 without a sign. */
static inline vector_f32 from_i8(vector_u8 v)
{
    return from_u8(v ^ 0x80) - 128;
}

static inline vector_u8 load_u8(const unsigned char *p)
{
    vector_u8 v;

    memcpy(&v, p, sizeof v);
    return v;
}

static inline float f16_scale(const unsigned char *p)
{
    uint16_t h;

    memcpy(&h, p, sizeof h);
#ifdef __F16C__
    return _cvtsh_ss(h);
#else
    return quant_f16_f32(h);
#endif
}

/* A fixed tree: halves are added until four lanes are left. */
static inline float sum_lanes(vector_f32 v)
{
    typedef float quarter __attribute__((vector_size(16)));
    quarter part[LANES / 4];

    memcpy(part, &v, sizeof v);
    for (size_t width = LANES / 8; width > 0; width /= 2) {
        for (size_t i = 0; i < width; i++)
            part[i] += part[i + width];
    }
    return (part[0][0] + part[0][2]) + (part[0][1] + part[0][3]);
}

#define FLOAT_DOT(NAME, LOAD, TYPE, SCALAR)                                                        \
    static float NAME(const void *row, const struct activations *a, size_t columns)                \
    {                                                                                              \
        const TYPE *w = row;                                                                       \
        vector_f32 s0 = {0}, s1 = {0};                                                             \
        size_t i = 0;                                                                              \
                                                                                                   \
        for (; i + 2 * LANES <= columns; i += 2 * LANES) {                                         \
            s0 += LOAD(w + i) * load_f32(a->x + i);                                                \
            s1 += LOAD(w + i + LANES) * load_f32(a->x + i + LANES);                                \
        }                                                                                          \
        float s = sum_lanes(s0 + s1);                                                              \
        for (; i < columns; i++)                                                                   \
            s += SCALAR(w[i]) * a->x[i];                                                           \
        return s;                                                                                  \
    }

#define SAME(x) (x)
FLOAT_DOT(dot_f32, load_f32, float, SAME)
FLOAT_DOT(dot_f16, load_f16, uint16_t, quant_f16_f32)
FLOAT_DOT(dot_bf16, load_bf16, uint16_t, quant_bf16_f32)

/* 4-bit codes: sum (d q + m) x = d sum q x + m sum x; Q4_0 is the case m = -8 d. */
static inline float dot_q4(const unsigned char *w, const struct activations *a, size_t columns,
                           bool has_minimum)
{
    size_t header = has_minimum ? 4 : 2;
    vector_f32 sum = {0};
    float minima = 0;

    for (size_t b = 0; b < columns / 32; b++, w += header + 16) {
        const float *x = a->x + 32 * b;
        float d = f16_scale(w);
        float m = has_minimum ? f16_scale(w + 2) : -8 * d;
        vector_f32 block = {0};

        for (size_t i = 0; i < 16; i += LANES) {
            vector_u8 codes = load_u8(w + header + i);

            block += from_u8(codes & 15) * load_f32(x + i);
            block += from_u8(codes >> 4) * load_f32(x + 16 + i);
        }
        sum += block * d;
        minima += m * a->sums[b];
    }
    return sum_lanes(sum) + minima;
}

static float dot_q4_0(const void *row, const struct activations *a, size_t columns)
{
    return dot_q4(row, a, columns, false);
}

static float dot_q4_1(const void *row, const struct activations *a, size_t columns)
{
    return dot_q4(row, a, columns, true);
}

static float dot_q8_0(const void *row, const struct activations *a, size_t columns)
{
    const unsigned char *w = row;
    vector_f32 sum = {0};

    for (size_t b = 0; b < columns / 32; b++, w += 34) {
        vector_f32 block = {0};

        for (size_t i = 0; i < 32; i += LANES)
            block += from_i8(load_u8(w + 2 + i)) * load_f32(a->x + 32 * b + i);
        sum += block * f16_scale(w);
    }
    return sum_lanes(sum);
}

/* exp by 2^k * 2^f with |f| <= 1/2 and a polynomial of degree 6: relative error under 1e-7. */
static inline vector_f32 exp_f32(vector_f32 x)
{
    vector_f32 upper = {0}, lower = {0};

    upper += 88.0f;
    lower -= 87.0f;
    vector_i32 above = x > upper;
    x = (vector_f32)(((vector_i32)upper & above) | ((vector_i32)x & ~above));
    vector_i32 below = x < lower;
    x = (vector_f32)(((vector_i32)lower & below) | ((vector_i32)x & ~below));

    vector_f32 magic = x * 0x1.715476p0f + 0x1.8p23f; /* log2(e); rounds to an integer */
    vector_f32 k = magic - 0x1.8p23f;
    vector_f32 r = (x - k * 0x1.62e4p-1f) - k * 0x1.7f7d1cp-20f; /* ln 2 in two parts */
    vector_f32 p = r * 0x1.6c16c2p-10f + 0x1.111112p-7f;

    p = p * r + 0x1.555556p-5f;
    p = p * r + 0x1.555556p-3f;
    p = p * r + 0x1p-1f;
    p = p * r * r + r + 1;
    return (vector_f32)((vector_i32)p + ((vector_i32)magic << 23));
}

static inline vector_f32 swish_product(vector_f32 gate, vector_f32 up)
{
    return up * gate / (1 + exp_f32(-gate));
}

static void swiglu(float *gate, const float *up, size_t n)
{
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        vector_f32 y = swish_product(load_f32(gate + i), load_f32(up + i));

        memcpy(gate + i, &y, sizeof y);
    }
    if (i < n) {
        float g[LANES] = {0}, u[LANES] = {0};

        memcpy(g, gate + i, (n - i) * sizeof *g);
        memcpy(u, up + i, (n - i) * sizeof *u);
        vector_f32 y = swish_product(load_f32(g), load_f32(u));

        memcpy(gate + i, &y, (n - i) * sizeof *g);
    }
}

const struct products_kernels PRODUCTS_TABLE = {
    .name = PRODUCTS_NAME,
    .dot =
        {
            [QUANT_F32] = dot_f32,
            [QUANT_F16] = dot_f16,
            [QUANT_BF16] = dot_bf16,
            [QUANT_Q4_0] = dot_q4_0,
            [QUANT_Q4_1] = dot_q4_1,
            [QUANT_Q8_0] = dot_q8_0,
        },
    .swiglu = swiglu,
};
