/* SPDX-License-Identifier: MIT */
/* The inner loops of products.c, compiled once per instruction set. The including file defines
 * PRODUCTS_TABLE, PRODUCTS_NAME and PRODUCTS_ISA. Vectors are as wide as the instruction set's
 * registers, 8 lanes at least; the compiler splits what is wider than a register. */
#include <float.h>

#include "products_kernels.h"
#include "quant_blocks.h"

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

#if defined __AVX512F__
static inline vector_f32 load_f16(const uint16_t *p)
{
    return (vector_f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
#elif defined __F16C__
static inline vector_f32 load_f16(const uint16_t *p)
{
    return (vector_f32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
#else
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
#endif

/* Signed bytes to f32. Where there is an instruction for it compilers miss it; without one they
 * need the step through 16 bits, or they turn to scalar code. */
static inline vector_f32 from_i8(vector_u8 v)
{
#if defined __AVX512F__
    return (vector_f32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)v));
#elif defined __AVX2__
    __m128i bytes = {0};

    memcpy(&bytes, &v, sizeof v);
    return (vector_f32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    /* x ^ 0x80 is x + 128 without a sign. */
    vector_u16 half = __builtin_convertvector(v ^ 0x80, vector_u16);

    return __builtin_convertvector(__builtin_convertvector(half, vector_i32), vector_f32) - 128;
#endif
}

static inline vector_u8 load_u8(const unsigned char *p)
{
    vector_u8 v;

    memcpy(&v, p, sizeof v);
    return v;
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

/* The product of one group, without its minimum. */
static inline vector_f32 group_dot(const struct quant_block *block, const float *x, size_t g,
                                   size_t group)
{
    const unsigned char *codes = (const unsigned char *)block->codes + g * group;
    vector_f32 sum = {0};

    for (size_t i = 0; i < group; i += LANES)
        sum += from_i8(load_u8(codes + i)) * load_f32(x + g * group + i);
    return sum * block->scales[g];
}

/* Bytes ahead; the next rows follow in memory, and past the end of the last one it does no harm. */
#define PREFETCH 2048

typedef void unpack_block(const unsigned char *block, struct quant_block *unpacked);

/* sum (d q + m) x = d sum q x + m sum x. Two sums, or the additions would wait for each other. */
static inline __attribute__((always_inline)) float
packed_dot(const unsigned char *block, const struct activations *a, size_t columns,
           unpack_block *unpack, size_t elements, size_t bytes, size_t group, bool has_minima)
{
    const size_t groups = elements / group;
    const float *sums = group == 16 ? a->sums_16 : a->sums_32;
    struct quant_block unpacked;
    vector_f32 s0 = {0}, s1 = {0};
    float minima[QUANT_MAX_GROUPS] = {0};

    for (const float *x = a->x; x < a->x + columns; x += elements, block += bytes) {
        for (size_t line = 0; line < bytes; line += 64)
            __builtin_prefetch(block + PREFETCH + line);
        unpack(block, &unpacked);
#pragma GCC unroll 2
        for (size_t g = 0; g < groups; g += 2) {
            s0 += group_dot(&unpacked, x, g, group);
            if (groups > 1)
                s1 += group_dot(&unpacked, x, g + 1, group);
        }
        if (has_minima) {
            for (size_t g = 0; g < groups; g++)
                minima[g] += unpacked.minima[g] * sums[g];
            sums += groups;
        }
    }
    for (size_t g = 1; has_minima && g < groups; g++)
        minima[0] += minima[g];
    return sum_lanes(s0 + s1) + minima[0];
}

#define PACKED_DOT(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                         \
    static float dot_##NAME(const void *row, const struct activations *a, size_t columns)          \
    {                                                                                              \
        return packed_dot(row, a, columns, quant_unpack_##NAME, ELEMENTS, BYTES, GROUP,            \
                          HAS_MINIMA);                                                             \
    }
QUANT_PACKED_TYPES(PACKED_DOT)

/* Below this a block counts as zeros: the reciprocal of its scale could overflow. */
#define SMALLEST_MAGNITUDE 1e-30f

#ifdef __AVX512VNNI__
#include "products_panels.h"
#else
#include "products_bytes.h"
#endif

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

#define DOT_ENTRY(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                          \
    [QUANT_##TYPE] = dot_##NAME,
#define DOT_ENTRIES                                                                                \
    [QUANT_F32] = dot_f32, [QUANT_F16] = dot_f16, [QUANT_BF16] = dot_bf16,                         \
    QUANT_PACKED_TYPES(DOT_ENTRY)

const struct products_kernels PRODUCTS_TABLE = {
    .name = PRODUCTS_NAME,
    .isa = PRODUCTS_ISA,
    .dot = {DOT_ENTRIES},
    .dequantise = {QUANT_DEQUANTISE_ENTRIES},
#ifdef __AVX512VNNI__
    .panels = {QUANT_PACKED_TYPES(PANEL_ENTRY)},
    .round_tile = round_tile,
#else
    .byte_dot = {QUANT_PACKED_TYPES(BYTE_DOT_ENTRY)},
    .round_row = round_row,
#endif
    .swiglu = swiglu,
};
