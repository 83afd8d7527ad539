/* SPDX-License-Identifier: MIT */
/* The solver for x86-64 with AVX2 and FMA. */
#include <immintrin.h>

#define SOLVER      solver_avx2
#define SOLVER_NAME "avx2"
#define LANES       8
#define TILE_ROWS   4

typedef float vector_f32 __attribute__((vector_size(32)));
typedef __m256 vector_mask;

static inline vector_f32 vector_set(float x)
{
    return (vector_f32)_mm256_set1_ps(x);
}

static inline vector_f32 vector_fma(vector_f32 a, vector_f32 b, vector_f32 c)
{
    return (vector_f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static inline vector_f32 vector_sqrt(vector_f32 a)
{
    return (vector_f32)_mm256_sqrt_ps((__m256)a);
}

static inline vector_mask vector_less(vector_f32 a, vector_f32 b)
{
    return _mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ);
}

static inline vector_mask vector_both(vector_mask a, vector_mask b)
{
    return _mm256_and_ps(a, b);
}

static inline vector_f32 vector_select(vector_mask mask, vector_f32 a, vector_f32 b)
{
    return (vector_f32)_mm256_blendv_ps((__m256)b, (__m256)a, mask);
}

static inline vector_f32 vector_abs(vector_f32 a)
{
    return (vector_f32)_mm256_andnot_ps(_mm256_set1_ps(-0.0f), (__m256)a);
}

static inline vector_f32 vector_with_sign(vector_f32 a, vector_f32 b)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);

    return (vector_f32)_mm256_or_ps(_mm256_andnot_ps(sign, (__m256)a),
                                    _mm256_and_ps(sign, (__m256)b));
}

#include "solver_body.h"
