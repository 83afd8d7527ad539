/* SPDX-License-Identifier: MIT */
/* The solver for x86-64 with AVX-512 F, BW, VL and DQ. */
#include <immintrin.h>

#define SOLVER      solver_avx512
#define SOLVER_NAME "avx512"
#define LANES       16
#define TILE_ROWS   16

typedef float vector_f32 __attribute__((vector_size(64)));
typedef __mmask16 vector_mask;

static inline vector_f32 vector_set(float x)
{
    return (vector_f32)_mm512_set1_ps(x);
}

static inline vector_f32 vector_fma(vector_f32 a, vector_f32 b, vector_f32 c)
{
    return (vector_f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static inline vector_f32 vector_sqrt(vector_f32 a)
{
    return (vector_f32)_mm512_sqrt_ps((__m512)a);
}

static inline vector_mask vector_less(vector_f32 a, vector_f32 b)
{
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ);
}

static inline vector_mask vector_both(vector_mask a, vector_mask b)
{
    return (vector_mask)(a & b);
}

static inline vector_f32 vector_select(vector_mask mask, vector_f32 a, vector_f32 b)
{
    return (vector_f32)_mm512_mask_blend_ps(mask, (__m512)b, (__m512)a);
}

static inline vector_f32 vector_abs(vector_f32 a)
{
    return (vector_f32)_mm512_abs_ps((__m512)a);
}

static inline vector_f32 vector_with_sign(vector_f32 a, vector_f32 b)
{
    const __m512 sign = _mm512_set1_ps(-0.0f);

    return (vector_f32)_mm512_or_ps(_mm512_andnot_ps(sign, (__m512)a),
                                    _mm512_and_ps(sign, (__m512)b));
}

#include "solver_body.h"
