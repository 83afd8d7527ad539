/* SPDX-License-Identifier: MIT */
/* f32 values rounded to a storage type: to nearest even, subnormals kept, overflow to infinity. */
#ifndef PUZZLEKV_TOOLS_POLICIES_ROUNDING_H
#define PUZZLEKV_TOOLS_POLICIES_ROUNDING_H

#include <puzzlekv.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Drops the last `bits` bits of a finite number. */
static inline float rounding_drop_bits(float x, unsigned bits)
{
    uint32_t u;

    memcpy(&u, &x, sizeof u);
    u += (1u << (bits - 1)) - 1 + (u >> bits & 1);
    u &= ~((1u << bits) - 1);
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float rounding_bf16(float x)
{
    return isfinite(x) ? rounding_drop_bits(x, 16) : x;
}

static inline float rounding_f16(float x)
{
    float magnitude = fabsf(x);

    if (!(magnitude < 65520))
        return isnan(x) ? x : copysignf(INFINITY, x);
    /* Below 2^-14 the numbers of f16 are multiples of 2^-24, as those of f32 in 0.5 .. 1 are. */
    if (magnitude < 0x1p-14f) {
        float shifted = magnitude + 0.5f;

        return copysignf(shifted - 0.5f, x);
    }
    return rounding_drop_bits(x, 13);
}

static inline float rounding_to(pkv_dtype dtype, float x)
{
    return dtype == PKV_F32 ? x : dtype == PKV_F16 ? rounding_f16(x) : rounding_bf16(x);
}

static inline void rounding_row(pkv_dtype dtype, const float *from, float *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = rounding_to(dtype, from[i]);
}

#endif
