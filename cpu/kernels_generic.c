/* SPDX-License-Identifier: MIT */
/* The kernels in what every machine offers: the reference of the other instruction sets. */
#include "dispatch.h"

#define LANES         4
#define PANEL_VECTORS 2
#define TILE_ROWS     4
#define TILE_MOST     4

typedef float vector_f32 __attribute__((vector_size(16)));
typedef int32_t vector_i32 __attribute__((vector_size(16)));
typedef uint32_t vector_u32 __attribute__((vector_size(16)));
typedef uint16_t vector_u16 __attribute__((vector_size(8)));

#include "numeric.h"

static inline vector_f32 vector_fma(vector_f32 a, vector_f32 b, vector_f32 c)
{
    return a * b + c;
}

static inline vector_f32 vector_max(vector_f32 a, vector_f32 b)
{
    vector_i32 greater = a > b;

    return (vector_f32)((greater & (vector_i32)a) | (~greater & (vector_i32)b));
}

static inline vector_f32 vector_from_bf16(const uint16_t *from)
{
    vector_u16 h;

    memcpy(&h, from, sizeof h);
    return (vector_f32)(__builtin_convertvector(h, vector_u32) << 16);
}

/* No branches, and no subnormal f32 on the way. */
static inline vector_f32 vector_from_f16(const uint16_t *from)
{
    vector_u16 h;

    memcpy(&h, from, sizeof h);

    vector_u32 bits = __builtin_convertvector(h, vector_u32);
    vector_u32 magnitude = (bits & 0x7fffu) << 13;
    vector_i32 small = (vector_i32)magnitude < 0x00800000;
    vector_i32 special = (vector_i32)magnitude >= 0x0f800000;
    vector_u32 value = magnitude + 0x38000000u + ((vector_u32)special & 0x38000000u);
    vector_f32 subnormal = (vector_f32)(magnitude + 0x38800000u) - 0x1p-14f;

    value = (value & ~(vector_u32)small) | ((vector_u32)subnormal & (vector_u32)small);
    return (vector_f32)(value | (bits & 0x8000u) << 16);
}

static inline void vector_to_f16(vector_f32 v, uint16_t *to)
{
    for (int i = 0; i < LANES; i++)
        to[i] = f16_from_f32(v[i]);
}

#include "kernels_body.h"

const struct kernels kernels_generic = {KERNELS_TABLE("generic")};
