/* SPDX-License-Identifier: MIT */
/* Element types of weights: sizes and conversion to f32. */
#include "quant.h"

/* Weights are used as they lie in the file, and the files are little-endian. */
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the model readers need a little-endian machine"
#endif

/* Every product below is exact in f32 (an 11-bit scale times a code of at most 8 bits), so results
 * do not depend on whether the compiler contracts a product and a sum. */

#define BLOCK 32

/* gcc would unroll these short loops before it vectorises, and then vectorise them badly. */
#define KEEP_LOOP _Pragma("GCC unroll 1")

struct block_q4_0 {
    uint16_t scale;
    uint8_t codes[BLOCK / 2];
};

struct block_q4_1 {
    uint16_t scale;
    uint16_t minimum;
    uint8_t codes[BLOCK / 2];
};

struct block_q8_0 {
    uint16_t scale;
    int8_t codes[BLOCK];
};

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

static void dequantise_q4_0(const void *blocks, size_t elements, float *restrict out)
{
    const struct block_q4_0 *restrict block = blocks;

    for (size_t i = 0; i < elements; i += BLOCK, block++) {
        const float scale = quant_f16_f32(block->scale);

        KEEP_LOOP
        for (size_t j = 0; j < BLOCK / 2; j++)
            out[i + j] = scale * (float)((block->codes[j] & 15) - 8);
        KEEP_LOOP
        for (size_t j = 0; j < BLOCK / 2; j++)
            out[i + BLOCK / 2 + j] = scale * (float)((block->codes[j] >> 4) - 8);
    }
}

static void dequantise_q4_1(const void *blocks, size_t elements, float *restrict out)
{
    const struct block_q4_1 *restrict block = blocks;

    for (size_t i = 0; i < elements; i += BLOCK, block++) {
        const float scale = quant_f16_f32(block->scale);
        const float minimum = quant_f16_f32(block->minimum);

        KEEP_LOOP
        for (size_t j = 0; j < BLOCK / 2; j++)
            out[i + j] = scale * (float)(block->codes[j] & 15) + minimum;
        KEEP_LOOP
        for (size_t j = 0; j < BLOCK / 2; j++)
            out[i + BLOCK / 2 + j] = scale * (float)(block->codes[j] >> 4) + minimum;
    }
}

static void dequantise_q8_0(const void *blocks, size_t elements, float *restrict out)
{
    const struct block_q8_0 *restrict block = blocks;

    for (size_t i = 0; i < elements; i += BLOCK, block++) {
        const float scale = quant_f16_f32(block->scale);

        KEEP_LOOP
        for (size_t j = 0; j < BLOCK; j++)
            out[i + j] = scale * (float)block->codes[j];
    }
}

static const struct quant_info table[QUANT_TYPES] = {
    [QUANT_F32] = {"F32", 0, 1, sizeof(float), dequantise_f32},
    [QUANT_F16] = {"F16", 1, 1, sizeof(uint16_t), dequantise_f16},
    [QUANT_BF16] = {"BF16", 30, 1, sizeof(uint16_t), dequantise_bf16},
    [QUANT_Q4_0] = {"Q4_0", 2, BLOCK, sizeof(struct block_q4_0), dequantise_q4_0},
    [QUANT_Q4_1] = {"Q4_1", 3, BLOCK, sizeof(struct block_q4_1), dequantise_q4_1},
    [QUANT_Q8_0] = {"Q8_0", 8, BLOCK, sizeof(struct block_q8_0), dequantise_q8_0},
};

/* clang-format off */
static const char *const gguf_names[] = {
    [0] = "F32", [1] = "F16", [2] = "Q4_0", [3] = "Q4_1", [6] = "Q5_0", [7] = "Q5_1",
    [8] = "Q8_0", [9] = "Q8_1", [10] = "Q2_K", [11] = "Q3_K", [12] = "Q4_K", [13] = "Q5_K",
    [14] = "Q6_K", [15] = "Q8_K", [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS",
    [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S", [22] = "IQ2_S", [23] = "IQ4_XS", [24] = "I8",
    [25] = "I16", [26] = "I32", [27] = "I64", [28] = "F64", [29] = "IQ1_M", [30] = "BF16",
    [34] = "TQ1_0", [35] = "TQ2_0", [39] = "MXFP4", [40] = "NVFP4",
};
/* clang-format on */

const struct quant_info *quant_info(enum quant_type type)
{
    return &table[type];
}

bool quant_from_gguf(uint32_t number, enum quant_type *type)
{
    for (size_t i = 0; i < QUANT_TYPES; i++) {
        if (table[i].gguf_type == number) {
            *type = (enum quant_type)i;
            return true;
        }
    }
    return false;
}

const char *quant_gguf_name(uint32_t number)
{
    const size_t count = sizeof gguf_names / sizeof gguf_names[0];

    return number < count && gguf_names[number] != NULL ? gguf_names[number] : "unknown";
}

bool quant_row_bytes(enum quant_type type, size_t elements, size_t *bytes)
{
    const struct quant_info *info = &table[type];

    return elements % info->block_elements == 0 &&
           !__builtin_mul_overflow(elements / info->block_elements, info->block_bytes, bytes);
}
