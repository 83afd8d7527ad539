/* SPDX-License-Identifier: MIT */
/* The kernels for x86-64 with AVX2, FMA and F16C. */
#include "dispatch.h"

#include <immintrin.h>

#define LANES         8
#define PANEL_VECTORS 2
#define TILE_ROWS     4
#define TILE_MOST     6

typedef float vector_f32 __attribute__((vector_size(32)));
typedef int32_t vector_i32 __attribute__((vector_size(32)));
typedef uint32_t vector_u32 __attribute__((vector_size(32)));

static inline vector_f32 vector_fma(vector_f32 a, vector_f32 b, vector_f32 c)
{
    return (vector_f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static inline vector_f32 vector_max(vector_f32 a, vector_f32 b)
{
    return (vector_f32)_mm256_max_ps((__m256)a, (__m256)b);
}

static inline vector_f32 vector_from_bf16(const uint16_t *from)
{
    __m128i h = _mm_loadu_si128((const __m128i *)(const void *)from);

    return (vector_f32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
}

static inline vector_f32 vector_from_f16(const uint16_t *from)
{
    return (vector_f32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}

static inline void vector_to_f16(vector_f32 v, uint16_t *to)
{
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

#include "kernels_body.h"

const struct kernels kernels_avx2 = {KERNELS_TABLE("avx2")};
