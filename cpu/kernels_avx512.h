/* SPDX-License-Identifier: MIT */
/* Vectors of AVX-512, and the kernels made of them. */
#include <immintrin.h>

#define LANES         16
#define PANEL_VECTORS 4
#define TILE_ROWS     6
#define TILE_MOST     12

typedef float vector_f32 __attribute__((vector_size(64)));
typedef int32_t vector_i32 __attribute__((vector_size(64)));
typedef uint32_t vector_u32 __attribute__((vector_size(64)));

static inline vector_f32 vector_fma(vector_f32 a, vector_f32 b, vector_f32 c)
{
    return (vector_f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

static inline vector_f32 vector_max(vector_f32 a, vector_f32 b)
{
    return (vector_f32)_mm512_max_ps((__m512)a, (__m512)b);
}

static inline vector_f32 vector_from_bf16(const uint16_t *from)
{
    __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)from);

    return (vector_f32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}

static inline vector_f32 vector_from_f16(const uint16_t *from)
{
    return (vector_f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

static inline void vector_to_f16(vector_f32 v, uint16_t *to)
{
    _mm256_storeu_si256((__m256i *)(void *)to,
                        _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

#include "kernels_body.h"
