/* SPDX-License-Identifier: MIT */
/* The parts of a page in canonical form: their shapes, bytes and values. */
#include "parts.h"

#include <endian.h>

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

static size_t scales(const struct part_form *part)
{
    return part->row_scales ? part->rows : part->columns;
}

size_t parts_bytes(const struct part_form *part, size_t element_bytes)
{
    if (!part->coded)
        return part->rows * part->columns * element_bytes;
    return code_bytes(part) + sizeof(uint16_t) * scales(part);
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

static bool codes_valid(size_t bytes, const uint8_t *codes)
{
    bool bad = false;

    for (size_t i = 0; i < bytes; i++)
        bad |= (codes[i] & 15) == 8 || codes[i] >> 4 == 8;
    return !bad;
}

/* No element has all bits of `exponent`, nor any of `forbidden`. */
static bool halves_valid(size_t n, const char *data, uint16_t exponent, uint16_t forbidden)
{
    bool bad = false;

    for (size_t i = 0; i < n; i++) {
        uint16_t x;

        memcpy(&x, data + i * sizeof x, sizeof x);
        bad |= (x & exponent) == exponent || (x & forbidden) != 0;
    }
    return !bad;
}

static bool floats_valid(size_t n, const float *x)
{
    bool bad = false;

    for (size_t i = 0; i < n; i++)
        bad |= (f32_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    return !bad;
}

bool parts_valid(const struct part_form *part, pkv_dtype dtype, const void *data)
{
    const size_t elements = part->rows * part->columns;

    if (part->coded)
        return codes_valid(code_bytes(part), data) &&
               halves_valid(scales(part), (const char *)data + code_bytes(part), 0x7c00, 0x8000);
    if (dtype == PKV_F32)
        return floats_valid(elements, data);
    return halves_valid(elements, data, dtype == PKV_F16 ? 0x7c00 : 0x7f80, 0);
}

static void swap_halves(size_t n, char *data)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t x;

        memcpy(&x, data + i * sizeof x, sizeof x);
        x = htole16(x);
        memcpy(data + i * sizeof x, &x, sizeof x);
    }
}

void parts_swap(const struct part_form *part, size_t element_bytes, void *data)
{
    const size_t elements = part->rows * part->columns;
    uint32_t *x = data;

    if (part->coded)
        swap_halves(scales(part), (char *)data + code_bytes(part));
    else if (element_bytes == sizeof(uint16_t))
        swap_halves(elements, data);
    else
        for (size_t i = 0; i < elements; i++)
            x[i] = htole32(x[i]);
}
