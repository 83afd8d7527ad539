/* SPDX-License-Identifier: MIT */
/* What the library and every backend compute alike: the floating-point modes, sizes, and
 * conversions between f32 and the storage types: round to nearest even, subnormals kept, overflow
 * to infinity. */
#ifndef PUZZLEKV_LIB_NUMERIC_H
#define PUZZLEKV_LIB_NUMERIC_H

#include "puzzlekv.h"

#include <fenv.h>
#include <stdint.h>
#include <string.h>

/* What stands before a function that runs wherever a page is: with nvcc on the device too. */
#ifdef __CUDACC__
#define EVERYWHERE static inline __host__ __device__
#else
#define EVERYWHERE static inline
#endif

/*
 * Every thread computes between these two in the default floating-point environment, and leaves
 * its own as it was: neither the caller's flush-to-zero or rounding modes nor those that a worker
 * thread once inherited reach a result, and what lies past the end of a row traps nobody.
 */
static inline void modes_set(fenv_t *saved)
{
    fegetenv(saved);
    fesetenv(FE_DFL_ENV);
}

static inline void modes_restore(const fenv_t *saved)
{
    fesetenv(saved);
}

EVERYWHERE size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* a + b and a * b, or SIZE_MAX where they do not fit. */
static inline size_t size_add(size_t a, size_t b)
{
    size_t sum;

    return __builtin_add_overflow(a, b, &sum) ? SIZE_MAX : sum;
}

static inline size_t size_multiply(size_t a, size_t b)
{
    size_t product;

    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

/* Bytes of one element of a valid type. */
EVERYWHERE size_t storage_element_bytes(pkv_dtype dtype)
{
    return dtype == PKV_F32 ? 4 : 2;
}

EVERYWHERE uint32_t f32_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

EVERYWHERE float f32_from_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

EVERYWHERE float bf16_to_f32(uint16_t h)
{
    return f32_from_bits((uint32_t)h << 16);
}

EVERYWHERE uint16_t bf16_from_f32(float x)
{
    uint32_t bits = f32_bits(x);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40); /* a NaN stays one */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* Integer arithmetic alone, so that a flush-to-zero mode of the caller changes nothing. */
EVERYWHERE float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = h >> 10 & 0x1fu;
    uint32_t mantissa = h & 0x3ffu;

    if (exponent == 0x1f)
        return f32_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        if (mantissa == 0)
            return f32_from_bits(sign);
        exponent = 1;
        while ((mantissa & 0x400u) == 0) {
            mantissa <<= 1;
            exponent--;
        }
        mantissa &= 0x3ffu;
    }
    return f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

EVERYWHERE uint16_t f16_from_f32(float x)
{
    uint32_t bits = f32_bits(x);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    uint32_t magnitude = bits & 0x7fffffffu;

    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) { /* below 2^-14: subnormal in units of 2^-24 */
        uint32_t exponent = magnitude >> 23;
        uint32_t shift = 126 - exponent;
        uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;

        if (exponent < 102) /* below 2^-25 */
            return sign;
        uint32_t value = mantissa >> shift;
        uint32_t rest = mantissa & ((1u << shift) - 1);
        uint32_t half = 1u << (shift - 1);

        return (uint16_t)(sign | (value + (rest > half || (rest == half && (value & 1)))));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13));
}

#endif
