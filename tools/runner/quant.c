/* SPDX-License-Identifier: MIT */
/* Element types of weights: sizes and conversion to f32. */
#include "quant.h"

#include "quant_blocks.h"

/* Weights are used as they lie in the file, and the files are little-endian. */
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the model readers need a little-endian machine"
#endif

#define INFO(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                               \
    [QUANT_##TYPE] = {#TYPE, NUMBER, ELEMENTS, BYTES, dequantise_##NAME},

static const struct quant_info table[QUANT_TYPES] = {
    [QUANT_F32] = {"F32", 0, 1, sizeof(float), dequantise_f32},
    [QUANT_F16] = {"F16", 1, 1, sizeof(uint16_t), dequantise_f16},
    [QUANT_BF16] = {"BF16", 30, 1, sizeof(uint16_t), dequantise_bf16},
    QUANT_PACKED_TYPES(INFO)};

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
