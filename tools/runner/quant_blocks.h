/* SPDX-License-Identifier: MIT */
/* The packed weight types, block by block; internal to quant.c and the inner loops of products.c.
 * Compiled for each instruction set: everything is static and inline. */
#ifndef PUZZLEKV_TOOLS_RUNNER_QUANT_BLOCKS_H
#define PUZZLEKV_TOOLS_RUNNER_QUANT_BLOCKS_H

#include "quant.h"

#if defined __F16C__ || defined __SSSE3__
#include <immintrin.h>
#endif

#define QUANT_MAX_ELEMENTS 256 /* of a block */
#define QUANT_MAX_GROUPS   16

/* One block taken apart: element i is scales[g] codes[i] + minima[g], g = i / the type's group.
 * Minima are written for the types that have them, and what follows for those with more than one
 * group: scales[g] is factors[0] * integers[0][g], and minima[g] factors[1] * integers[1][g]. */
struct quant_block {
    int8_t codes[QUANT_MAX_ELEMENTS];
    float scales[QUANT_MAX_GROUPS];
    float minima[QUANT_MAX_GROUPS];
    float factors[2];
    int8_t integers[2][QUANT_MAX_GROUPS];
};

typedef uint8_t quant_half __attribute__((vector_size(16)));
typedef uint8_t quant_bytes __attribute__((vector_size(32)));
typedef uint64_t quant_words __attribute__((vector_size(32)));

/* Eight bytes that are all `byte`. */
#define QUANT_ALL(byte) (UINT64_C(0x0101010101010101) * (byte))

static inline float quant_f16(const unsigned char *p)
{
    uint16_t h;

    memcpy(&h, p, sizeof h);
#ifdef __F16C__
    return _cvtsh_ss(h);
#else
    return quant_f16_f32(h);
#endif
}

static inline uint32_t quant_u32(const unsigned char *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof v);
    return v;
}

/* At once where it can be, or the processor would wait to load them as one. */
static inline void quant_store_halves(quant_half low, quant_half high, void *codes)
{
#ifdef __AVX2__
    _mm256_storeu_si256((__m256i *)codes, _mm256_set_m128i((__m128i)high, (__m128i)low));
#else
    memcpy(codes, &low, sizeof low);
    memcpy((char *)codes + sizeof low, &high, sizeof high);
#endif
}

/* The low nibbles of 16 bytes are elements 0 to 15, the high ones 16 to 31; fifth bits are added
 * and `offset` is subtracted. */
static inline void quant_nibbles(const unsigned char *nibbles, quant_half low_fifth,
                                 quant_half high_fifth, unsigned char offset, void *codes)
{
    quant_half bytes, low, high;

    memcpy(&bytes, nibbles, sizeof bytes);
    low = ((bytes & 15) | low_fifth) - offset;
    high = ((bytes >> 4) | high_fifth) - offset;
    quant_store_halves(low, high, codes);
}

static inline void quant_four_bits(const unsigned char *nibbles, unsigned char offset, void *codes)
{
    const quant_half none = {0};

    quant_nibbles(nibbles, none, none, offset, codes);
}

/* 0x10 for every one of 16 bits that is set. */
static inline quant_half quant_spread(const unsigned char *bits)
{
    const uint64_t own __attribute__((vector_size(16))) = {UINT64_C(0x8040201008040201),
                                                           UINT64_C(0x8040201008040201)};
#ifdef __SSSE3__
    const __m128i copy = {0, QUANT_ALL(1)};
    const __m128i copies = _mm_shuffle_epi8(_mm_set1_epi16((short)(bits[0] | bits[1] << 8)), copy);

    return (quant_half)_mm_cmpeq_epi8(_mm_and_si128(copies, (__m128i)own), (__m128i)own) & 0x10;
#else
    const uint64_t copies
        __attribute__((vector_size(16))) = {QUANT_ALL(bits[0]), QUANT_ALL(bits[1])};

    /* The sum is at least 0x80 in the bytes whose own bit is set. */
    return (quant_half)(((copies & own) + QUANT_ALL(0x7f)) >> 3 & QUANT_ALL(0x10));
#endif
}

/* 32 fifth bits, then nibbles. */
static inline void quant_five_bits(const unsigned char *block, unsigned char offset, void *codes)
{
    quant_nibbles(block + 4, quant_spread(block), quant_spread(block + 2), offset, codes);
}

/* What the nibbles of IQ4_NL and IQ4_XS stand for. */
static const int8_t quant_level[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                       1,    13,   25,  38,  53,  69,  89,  113};

/* The levels in place of the nibbles of 32 elements. */
static inline void quant_levels(const unsigned char *nibbles, int8_t *codes)
{
#ifdef __SSSE3__
    const __m128i table = _mm_loadu_si128((const __m128i *)quant_level);
    const __m128i bytes = _mm_loadu_si128((const __m128i *)nibbles);
    const __m128i mask = _mm_set1_epi8(15);
    __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(bytes, mask));
    __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));

    quant_store_halves((quant_half)low, (quant_half)high, codes);
#else
    for (size_t i = 0; i < 16; i++) {
        codes[i] = quant_level[nibbles[i] & 15];
        codes[16 + i] = quant_level[nibbles[i] >> 4];
    }
#endif
}

/* The scales, or with `kind` 1 the minima, of so many groups. */
static inline void quant_scale(float d, const void *integers, size_t count, struct quant_block *out,
                               size_t kind)
{
    float *scales = kind == 0 ? out->scales : out->minima;

    out->factors[kind] = d;
    memcpy(out->integers[kind], integers, count);
    for (size_t g = 0; g < count; g += 8) {
        int8_t bytes __attribute__((vector_size(8)));
        float scaled __attribute__((vector_size(32)));

        memcpy(&bytes, (const int8_t *)integers + g, sizeof bytes);
#ifdef __AVX2__
        const __m128i low = {(long long)bytes};

        scaled = d * _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
#else
        /* In steps that compilers have instructions for. */
        int16_t half __attribute__((vector_size(16)));
        int32_t full __attribute__((vector_size(32)));

        half = __builtin_convertvector(bytes, __typeof__(half));
        full = __builtin_convertvector(half, __typeof__(full));
        scaled = d * __builtin_convertvector(full, __typeof__(scaled));
#endif
        memcpy(scales + g, &scaled, sizeof scaled);
    }
}

/* f16 d, nibbles */
static inline void quant_unpack_q4_0(const unsigned char *block, struct quant_block *out)
{
    out->scales[0] = quant_f16(block);
    quant_four_bits(block + 2, 8, out->codes);
}

/* f16 d, f16 m, nibbles */
static inline void quant_unpack_q4_1(const unsigned char *block, struct quant_block *out)
{
    out->scales[0] = quant_f16(block);
    out->minima[0] = quant_f16(block + 2);
    quant_four_bits(block + 4, 0, out->codes);
}

/* f16 d, 32 fifth bits, nibbles */
static inline void quant_unpack_q5_0(const unsigned char *block, struct quant_block *out)
{
    out->scales[0] = quant_f16(block);
    quant_five_bits(block + 2, 16, out->codes);
}

/* f16 d, f16 m, 32 fifth bits, nibbles */
static inline void quant_unpack_q5_1(const unsigned char *block, struct quant_block *out)
{
    out->scales[0] = quant_f16(block);
    out->minima[0] = quant_f16(block + 2);
    quant_five_bits(block + 4, 0, out->codes);
}

/* f16 d, signed bytes */
static inline void quant_unpack_q8_0(const unsigned char *block, struct quant_block *out)
{
    out->scales[0] = quant_f16(block);
    quant_half low, high;

    memcpy(&low, block + 2, sizeof low);
    memcpy(&high, block + 18, sizeof high);
    quant_store_halves(low, high, out->codes);
}

/* f16 d, levels */
static inline void quant_unpack_iq4_nl(const unsigned char *block, struct quant_block *out)
{
    out->scales[0] = quant_f16(block);
    quant_levels(block + 2, out->codes);
}

/* The others are superblocks: 256 elements in 8 strips of 32. Their bits lie in 32 bytes, byte i
 * for element i of a strip; this moves the bits under `mask` from `bit` on to `to`. */
static inline quant_words quant_strip(const unsigned char *bytes, size_t bit, unsigned char mask,
                                      size_t to)
{
    quant_words words;

    memcpy(&words, bytes, sizeof words);
    return (bit < to ? words << (to - bit) : words >> (bit - to)) & QUANT_ALL(mask << to);
}

/* Each code less `offset`. */
static inline void quant_store_strip(quant_words codes, unsigned char offset,
                                     struct quant_block *out, size_t strip)
{
    const quant_bytes bytes = (quant_bytes)codes - offset;

    memcpy(out->codes + 32 * strip, &bytes, sizeof bytes);
}

/* 16 bytes with a scale in the low and a minimum in the high nibble, codes (32 bytes for each four
 * strips, from the lowest bits on), f16 d, f16 dmin. */
static inline void quant_unpack_q2_k(const unsigned char *block, struct quant_block *out)
{
    int8_t integers[32];

    quant_four_bits(block, 0, integers);
    quant_scale(quant_f16(block + 80), integers, 16, out, 0);
    quant_scale(-quant_f16(block + 82), integers + 16, 16, out, 1);
#pragma GCC unroll 8
    for (size_t s = 0; s < 8; s++)
        quant_store_strip(quant_strip(block + 16 + s / 4 * 32, s % 4 * 2, 3, 0), 0, out, s);
}

/* 32 bytes of third bits, bit s for strip s, codes as in Q2_K, 16 scales of 6 bits (the nibbles of
 * 8 bytes, then 4 bytes of upper bits), f16 d. */
static inline void quant_unpack_q3_k(const unsigned char *block, struct quant_block *out)
{
    const uint32_t upper = quant_u32(block + 104);
    int8_t integers[16];

    for (size_t g = 0; g < 4; g++) {
        uint32_t low = quant_u32(block + 96 + g % 2 * 4) >> g / 2 * 4 & 0x0f0f0f0f;
        uint32_t six = low | (upper >> 2 * g & 0x03030303) << 4;

        for (size_t i = 0; i < 4; i++)
            integers[4 * g + i] = (int8_t)((int)(six >> 8 * i & 63) - 32);
    }
    quant_scale(quant_f16(block + 108), integers, 16, out, 0);
#pragma GCC unroll 8
    for (size_t s = 0; s < 8; s++) {
        const quant_words low = quant_strip(block + 32 + s / 4 * 32, s % 4 * 2, 3, 0);

        quant_store_strip(low | quant_strip(block, s, 1, 2), 4, out, s);
    }
}

/* What Q4_K and Q5_K begin with: f16 d, f16 dmin, 8 scales and 8 minima of 6 bits: four and four,
 * then the nibbles of the others, whose upper bits lie above the first ones. */
static inline void quant_unpack_scales(const unsigned char *block, struct quant_block *out)
{
    const uint32_t a = quant_u32(block + 4), b = quant_u32(block + 8), c = quant_u32(block + 12);
    const uint32_t integers[] = {
        a & 0x3f3f3f3f,
        (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030),
        b & 0x3f3f3f3f,
        (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030),
    };

    quant_scale(quant_f16(block), integers, 8, out, 0);
    quant_scale(-quant_f16(block + 2), integers + 2, 8, out, 1);
}

/* Behind the scales codes, 32 bytes for each two strips. */
static inline void quant_unpack_q4_k(const unsigned char *block, struct quant_block *out)
{
    quant_unpack_scales(block, out);
#pragma GCC unroll 8
    for (size_t s = 0; s < 8; s++)
        quant_store_strip(quant_strip(block + 16 + s / 2 * 32, s % 2 * 4, 15, 0), 0, out, s);
}

/* Behind the scales 32 bytes of fifth bits, bit s for strip s, then as Q4_K. */
static inline void quant_unpack_q5_k(const unsigned char *block, struct quant_block *out)
{
    quant_unpack_scales(block, out);
#pragma GCC unroll 8
    for (size_t s = 0; s < 8; s++) {
        const quant_words low = quant_strip(block + 48 + s / 2 * 32, s % 2 * 4, 15, 0);

        quant_store_strip(low | quant_strip(block + 16, s, 1, 4), 0, out, s);
    }
}

/* Nibbles (64 bytes for each four strips, the low ones first), upper two bits that lie as the codes
 * of Q2_K, 16 signed bytes of scales, f16 d. */
static inline void quant_unpack_q6_k(const unsigned char *block, struct quant_block *out)
{
    quant_scale(quant_f16(block + 208), block + 192, 16, out, 0);
#pragma GCC unroll 8
    for (size_t s = 0; s < 8; s++) {
        const quant_words low = quant_strip(block + s / 4 * 64 + s % 2 * 32, s / 2 % 2 * 4, 15, 0);
        const quant_words upper = quant_strip(block + 128 + s / 4 * 32, s % 4 * 2, 3, 4);

        quant_store_strip(low | upper, 32, out, s);
    }
}

/* f16 d, the upper two bits of 8 scales, their nibbles, then the levels of each strip. */
static inline void quant_unpack_iq4_xs(const unsigned char *block, struct quant_block *out)
{
    const uint32_t upper = quant_u32(block) >> 16, low = quant_u32(block + 4);
    int8_t integers[8];

#pragma GCC unroll 8
    for (size_t s = 0; s < 8; s++) {
        integers[s] = (int8_t)((int)((low >> 4 * s & 15) | (upper >> 2 * s & 3) << 4) - 32);
        quant_levels(block + 8 + 16 * s, out->codes + 32 * s);
    }
    quant_scale(quant_f16(block), integers, 8, out, 0);
}

/* X(type, function, GGUF number, elements and bytes of a block, elements of a group, has minima) */
#define QUANT_PACKED_TYPES(X)                                                                      \
    X(Q4_0, q4_0, 2, 32, 18, 32, false)                                                            \
    X(Q4_1, q4_1, 3, 32, 20, 32, true)                                                             \
    X(Q5_0, q5_0, 6, 32, 22, 32, false)                                                            \
    X(Q5_1, q5_1, 7, 32, 24, 32, true)                                                             \
    X(Q8_0, q8_0, 8, 32, 34, 32, false)                                                            \
    X(Q2_K, q2_k, 10, 256, 84, 16, true)                                                           \
    X(Q3_K, q3_k, 11, 256, 110, 16, false)                                                         \
    X(Q4_K, q4_k, 12, 256, 144, 32, true)                                                          \
    X(Q5_K, q5_k, 13, 256, 176, 32, true)                                                          \
    X(Q6_K, q6_k, 14, 256, 210, 16, false)                                                         \
    X(IQ4_NL, iq4_nl, 20, 32, 18, 32, false)                                                       \
    X(IQ4_XS, iq4_xs, 23, 256, 136, 32, false)

static void dequantise_f32(const void *blocks, size_t elements, float *out)
{
    memcpy(out, blocks, elements * sizeof *out);
}

static void dequantise_f16(const void *blocks, size_t elements, float *restrict out)
{
    const uint16_t *restrict in = blocks;

    for (size_t i = 0; i < elements; i++)
        out[i] = quant_f16_f32(in[i]);
}

static void dequantise_bf16(const void *blocks, size_t elements, float *restrict out)
{
    const uint16_t *restrict in = blocks;

    for (size_t i = 0; i < elements; i++)
        out[i] = quant_bf16_f32(in[i]);
}

/* Conversions for quant_info and for the panels of products.c. Every product is exact in f32 (11
 * bits of an f16 times at most 12 of a group's integer and a code), so results do not depend on
 * whether the compiler contracts a product and a sum. */
#define QUANT_DEQUANTISE(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                   \
    static void dequantise_##NAME(const void *blocks, size_t elements, float *restrict out)        \
    {                                                                                              \
        const unsigned char *block = blocks;                                                       \
        struct quant_block unpacked;                                                               \
                                                                                                   \
        for (size_t i = 0; i < elements; i += (ELEMENTS), block += (BYTES)) {                      \
            quant_unpack_##NAME(block, &unpacked);                                                 \
            for (size_t j = 0; j < (ELEMENTS); j += 16) {                                          \
                const float scale = unpacked.scales[j / (GROUP)];                                  \
                const float minimum = (HAS_MINIMA) ? unpacked.minima[j / (GROUP)] : 0;             \
                                                                                                   \
                /* gcc would unroll it before it vectorises, and then vectorise it badly. */       \
                _Pragma("GCC unroll 1") for (size_t k = 0; k < 16; k++)                            \
                {                                                                                  \
                    float value = scale * (float)unpacked.codes[j + k];                            \
                                                                                                   \
                    out[i + j + k] = (HAS_MINIMA) ? value + minimum : value;                       \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }
QUANT_PACKED_TYPES(QUANT_DEQUANTISE)

#define QUANT_DEQUANTISE_ENTRY(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)             \
    [QUANT_##TYPE] = dequantise_##NAME,
#define QUANT_DEQUANTISE_ENTRIES                                                                   \
    [QUANT_F32] = dequantise_f32, [QUANT_F16] = dequantise_f16, [QUANT_BF16] = dequantise_bf16,    \
    QUANT_PACKED_TYPES(QUANT_DEQUANTISE_ENTRY)

#endif
