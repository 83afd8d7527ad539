/* SPDX-License-Identifier: MIT */
/* Activations in bytes; included by products_body.h. */
#ifndef PUZZLEKV_TOOLS_RUNNER_PRODUCTS_BYTES_H
#define PUZZLEKV_TOOLS_RUNNER_PRODUCTS_BYTES_H

/* Below this a block counts as zeros: the reciprocal of its scale could overflow. */
#define SMALLEST_MAGNITUDE 1e-30f

/* Adding it rounds to an integer, which is then the low bits. */
#define ROUNDING_MAGIC 0x1.8p23f

/* To 32 codes, -127 .. 127; returns their scale. */
static inline float round_block(const float *x, int8_t *codes)
{
    const float magic = ROUNDING_MAGIC;
    vector_i32 largest = {0};
    int32_t magnitude_bits = 0, magic_bits;

    /* Without the sign order of bits is order of magnitude, with infinities and NaNs on top. */
    for (size_t i = 0; i < 32; i += LANES) {
        const vector_i32 bits = (vector_i32)load_f32(x + i) & 0x7fffffff;
        const vector_i32 larger = bits > largest;

        largest = (bits & larger) | (largest & ~larger);
    }
    for (size_t i = 0; i < LANES; i++)
        magnitude_bits = largest[i] > magnitude_bits ? largest[i] : magnitude_bits;

    const float magnitude = quant_bits_f32((uint32_t)magnitude_bits);
    const float inverse = magnitude > SMALLEST_MAGNITUDE ? 127 / magnitude : 0;

    memcpy(&magic_bits, &magic, sizeof magic_bits);
    for (size_t i = 0; i < 32; i += LANES) {
        const vector_i32 rounded = (vector_i32)(load_f32(x + i) * inverse + magic) - magic_bits;
        const vector_u8 bytes = __builtin_convertvector(rounded, vector_u8);

        memcpy(codes + i, &bytes, sizeof bytes);
    }
    return magnitude / 127;
}

/* Plain loops: compilers know the idiom. */
static inline int32_t sum_16(const int8_t *codes)
{
    int32_t sum = 0;

    for (size_t i = 0; i < 16; i++)
        sum += codes[i];
    return sum;
}

#endif
