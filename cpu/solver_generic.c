/* SPDX-License-Identifier: MIT */
/* The solver in what every machine offers, one page at a time. */
#define SOLVER      solver_generic
#define SOLVER_NAME "generic"
#define LANES       1
#define TILE_ROWS   4

typedef float vector_f32;
typedef int vector_mask;

static inline vector_f32 vector_set(float x)
{
    return x;
}

/* libm's is exact where the machine has no such instruction. */
static inline vector_f32 vector_fma(vector_f32 a, vector_f32 b, vector_f32 c)
{
    return __builtin_fmaf(a, b, c);
}

static inline vector_f32 vector_sqrt(vector_f32 a)
{
    return __builtin_sqrtf(a);
}

static inline vector_mask vector_less(vector_f32 a, vector_f32 b)
{
    return a < b;
}

static inline vector_mask vector_both(vector_mask a, vector_mask b)
{
    return a && b;
}

static inline vector_f32 vector_select(vector_mask mask, vector_f32 a, vector_f32 b)
{
    return mask ? a : b;
}

static inline vector_f32 vector_abs(vector_f32 a)
{
    return __builtin_fabsf(a);
}

static inline vector_f32 vector_with_sign(vector_f32 a, vector_f32 b)
{
    return __builtin_copysignf(a, b);
}

#include "solver_body.h"
