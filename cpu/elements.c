/* SPDX-License-Identifier: MIT */
/* Elements of the storage type that are moved or looked at, not computed with. */
#include "elements.h"

#include "numeric.h"

bool elements_finite(pkv_dtype dtype, size_t n, const void *elements)
{
    bool bad = false;

    if (dtype == PKV_F32) {
        const float *x = elements;

        for (size_t i = 0; i < n; i++)
            bad |= (f32_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    } else {
        const uint16_t *x = elements;
        const uint16_t exponent = dtype == PKV_F16 ? 0x7c00 : 0x7f80;

        for (size_t i = 0; i < n; i++)
            bad |= (x[i] & exponent) == exponent;
    }
    return !bad;
}

void elements_copy(size_t size, size_t n, const void *from, size_t from_stride, void *to,
                   size_t to_stride)
{
    if (size == 4) {
        const uint32_t *a = from;
        uint32_t *b = to;

        for (size_t i = 0; i < n; i++)
            b[i * to_stride] = a[i * from_stride];
    } else {
        const uint16_t *a = from;
        uint16_t *b = to;

        for (size_t i = 0; i < n; i++)
            b[i * to_stride] = a[i * from_stride];
    }
}

void elements_transpose(size_t size, size_t rows, size_t columns, size_t ld, const void *from,
                        void *to)
{
    for (size_t j = 0; j < columns; j++)
        elements_copy(size, rows, (const char *)from + j * size, ld, (char *)to + j * rows * size,
                      1);
}
