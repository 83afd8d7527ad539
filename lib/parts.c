/* SPDX-License-Identifier: MIT */
/* The parts of a page in canonical form: their shapes, bytes and values. */
#include "parts.h"

#include "int4.h"

struct part_form parts_form(enum page_part part, pkv_factors factors, size_t tokens,
                            size_t head_dim, size_t rank)
{
    bool coded = factors == PKV_FACTORS_INT4;

    switch (part) {
    case PART_K_LEFT:
        return (struct part_form){coded, tokens, rank, false};
    case PART_V_LEFT:
        return (struct part_form){coded, tokens, rank, true};
    case PART_K_RIGHT:
    case PART_V_RIGHT:
        return (struct part_form){coded, rank, head_dim, false};
    default:
        return (struct part_form){false, tokens, head_dim, false};
    }
}

static size_t code_bytes(const struct part_form *part)
{
    return part->rows * part->columns / 2;
}

size_t parts_bytes(const struct part_form *part, size_t element_bytes)
{
    if (!part->coded)
        return part->rows * part->columns * element_bytes;
    return code_bytes(part) + sizeof(uint16_t) * (part->row_scales ? part->rows : part->columns);
}

float parts_element(const struct part_form *part, pkv_dtype dtype, const void *data, size_t row,
                    size_t column)
{
    size_t i = row * part->columns + column;

    if (part->coded) {
        uint16_t scale;

        memcpy(&scale,
               (const char *)data + code_bytes(part) +
                   sizeof scale * (part->row_scales ? row : column),
               sizeof scale);
        return (float)int4_unpack(((const uint8_t *)data)[i / 2], i % 2) * f16_to_f32(scale);
    }
    switch (dtype) {
    case PKV_F16:
        return f16_to_f32(((const uint16_t *)data)[i]);
    case PKV_BF16:
        return bf16_to_f32(((const uint16_t *)data)[i]);
    default:
        return ((const float *)data)[i];
    }
}
