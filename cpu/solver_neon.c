/* SPDX-License-Identifier: MIT */
/* The solver for aarch64. */
#include <arm_neon.h>

#define SOLVER      solver_neon
#define SOLVER_NAME "neon"
#define LANES       4
#define TILE_ROWS   4

typedef float vector_f32 __attribute__((vector_size(16)));
typedef uint32x4_t vector_mask;

static inline vector_f32 vector_set(float x)
{
    return (vector_f32)vdupq_n_f32(x);
}

static inline vector_f32 vector_fma(vector_f32 a, vector_f32 b, vector_f32 c)
{
    return (vector_f32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

static inline vector_f32 vector_sqrt(vector_f32 a)
{
    return (vector_f32)vsqrtq_f32((float32x4_t)a);
}

static inline vector_mask vector_less(vector_f32 a, vector_f32 b)
{
    return vcltq_f32((float32x4_t)a, (float32x4_t)b);
}

static inline vector_mask vector_both(vector_mask a, vector_mask b)
{
    return vandq_u32(a, b);
}

static inline vector_f32 vector_select(vector_mask mask, vector_f32 a, vector_f32 b)
{
    return (vector_f32)vbslq_f32(mask, (float32x4_t)a, (float32x4_t)b);
}

static inline vector_f32 vector_abs(vector_f32 a)
{
    return (vector_f32)vabsq_f32((float32x4_t)a);
}

static inline vector_f32 vector_with_sign(vector_f32 a, vector_f32 b)
{
    return (vector_f32)vbslq_f32(vdupq_n_u32(0x80000000u), (float32x4_t)b, (float32x4_t)a);
}

#include "solver_body.h"
