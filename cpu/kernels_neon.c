/* SPDX-License-Identifier: MIT */
/* The kernels for aarch64, which always has NEON with fused multiply-add and f16 conversions. */
#include "dispatch.h"

#include <arm_neon.h>

#define LANES         4
#define PANEL_VECTORS 4
#define TILE_ROWS     6
#define TILE_MOST     12

typedef float vector_f32 __attribute__((vector_size(16)));
typedef int32_t vector_i32 __attribute__((vector_size(16)));
typedef uint32_t vector_u32 __attribute__((vector_size(16)));

static inline vector_f32 vector_fma(vector_f32 a, vector_f32 b, vector_f32 c)
{
    return (vector_f32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

static inline vector_f32 vector_max(vector_f32 a, vector_f32 b)
{
    return (vector_f32)vbslq_f32((uint32x4_t)(a > b), (float32x4_t)a, (float32x4_t)b);
}

static inline vector_f32 vector_from_bf16(const uint16_t *from)
{
    return (vector_f32)vshll_n_u16(vld1_u16(from), 16);
}

static inline vector_f32 vector_from_f16(const uint16_t *from)
{
    return (vector_f32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

static inline void vector_to_f16(vector_f32 v, uint16_t *to)
{
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}

#include "kernels_body.h"

const struct kernels kernels_neon = {KERNELS_TABLE("neon")};
