/* SPDX-License-Identifier: MIT */
/* Element types of weights: sizes and conversion to f32. */
#ifndef PUZZLEKV_TOOLS_RUNNER_QUANT_H
#define PUZZLEKV_TOOLS_RUNNER_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A row is a sequence of blocks of `block_elements` elements in `block_bytes` bytes; quant_blocks.h
 * says how the packed ones are made up. */
enum quant_type {
    QUANT_F32,
    QUANT_F16,
    QUANT_BF16,
    QUANT_Q4_0,
    QUANT_Q4_1,
    QUANT_Q5_0,
    QUANT_Q5_1,
    QUANT_Q8_0,
    QUANT_Q2_K,
    QUANT_Q3_K,
    QUANT_Q4_K,
    QUANT_Q5_K,
    QUANT_Q6_K,
    QUANT_IQ4_NL,
    QUANT_IQ4_XS,
    QUANT_TYPES /* how many there are */
};

/* Converts `elements` (a multiple of block_elements) elements; exact but for the single rounding of
 * the addition in types with minima. `blocks` needs no alignment beyond that of its elements: 4
 * bytes for F32, 2 for F16 and BF16. Thread-safe. */
typedef void quant_dequantise(const void *blocks, size_t elements, float *out);

struct quant_info {
    const char *name;   /* as GGUF spells it, e.g. "Q4_1" */
    uint32_t gguf_type; /* its number in a GGUF file */
    size_t block_elements;
    size_t block_bytes;
    quant_dequantise *dequantise;
};

/* The table's entry; `type` is below QUANT_TYPES. */
const struct quant_info *quant_info(enum quant_type type);

/* Finds the type with this number in GGUF files; false if it is not one of the above. */
bool quant_from_gguf(uint32_t number, enum quant_type *type);

/* The name of a GGUF element type, also of those not in the table, for messages; "unknown" for a
 * number that names none. */
const char *quant_gguf_name(uint32_t number);

/* The names of all types in the table, for messages. */
#define QUANT_SUPPORTED                                                                            \
    "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS"

/* Bytes of a row; false if `elements` is not a multiple of the block or the size overflows. */
bool quant_row_bytes(enum quant_type type, size_t elements, size_t *bytes);

static inline float quant_bits_f32(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float quant_bf16_f32(uint16_t bf16)
{
    return quant_bits_f32((uint32_t)bf16 << 16);
}

/* Exact, subnormals, infinities and NaNs included. Masks instead of branches, and no f32
 * subnormals, so that loops over it vectorise on every instruction set. */
static inline float quant_f16_f32(uint16_t f16)
{
    const uint32_t sign = (uint32_t)(f16 & 0x8000) << 16;
    const uint32_t magnitude = (uint32_t)(f16 & 0x7fff) << 13;
    const uint32_t if_subnormal = -(uint32_t)(magnitude < 1u << 23);
    const uint32_t if_infinite = -(uint32_t)(magnitude >= 31u << 23);
    const uint32_t rebias = 112u << 23;
    const float subnormal = quant_bits_f32(0x3f000000u + (f16 & 0x3ffu)) - 0.5f;
    uint32_t small;

    memcpy(&small, &subnormal, sizeof small);
    return quant_bits_f32(sign | (if_subnormal & small) |
                          (~if_subnormal & (magnitude + rebias + (if_infinite & rebias))));
}

#endif
