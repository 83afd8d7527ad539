/* SPDX-License-Identifier: MIT */
/* The table of inner loops that exists once for every instruction set. */
#ifndef PUZZLEKV_CPU_KERNELS_H
#define PUZZLEKV_CPU_KERNELS_H

#include "puzzlekv.h"

#include <stdint.h>

/*
 * Kernels work in whole vectors of up to KERNELS_PAD elements. Where a contract says "padded", the
 * array has room for its count rounded up to KERNELS_PAD; what lies past the count is read or
 * overwritten but never changes a result.
 */
#define KERNELS_PAD 16

static inline size_t kernels_padded(size_t n)
{
    return (n + KERNELS_PAD - 1) / KERNELS_PAD * KERNELS_PAD;
}

/*
 * c[i][j] = (scale ? scale[i] * c[i][j] : 0) + sum over p < k, ascending, of a[i][p] * b[p][j],
 * for i < rows, j < n; one multiply-add chain per element, so that the bits of a row depend
 * neither on the other rows nor on how b's values are stored. `b` has the type that the entry is
 * indexed by; its rows, the last one too, are readable up to n padded. Rows of c are padded.
 */
typedef void kernel_product(size_t rows, size_t k, size_t n, const float *a, size_t lda,
                            const void *b, size_t ldb, const float *scale, float *c, size_t ldc);

/*
 * One page into running softmax states. Row i of `s` holds scores in its first
 * c = valid ? valid[i] : n columns (1 <= c <= n). With m' = max(m[i], max of them):
 *     scale[i] = exp(m[i] - m'),  s[i][j] = exp(s[i][j] - m') for j < c, 0 for c <= j < n,
 *     l[i] = scale[i] l[i] + sum of row i,  m[i] = m'.
 * A new state is m = -inf, l = 0. Rows of s and the arrays m, l and scale are padded. What would
 * be below 2^-126 is 0.
 */
typedef void kernel_softmax(size_t rows, size_t n, const uint32_t *valid, float *s, size_t lds,
                            float *m, float *l, float *scale);

/* Merges the states (m, l, o)[i] of Eq. 4 with (m2, l2, o2)[i] as Eq. 5 does, without dividing.
 * o and o2 are [rows, n] with padded rows of ldo elements; m and l are not padded. */
typedef void kernel_merge(size_t rows, size_t n, float *m, float *l, float *o, const float *m2,
                          const float *l2, const float *o2, size_t ldo);

/* Conversions of n elements, nothing beyond touched; to storage as in numeric.h. */
typedef void kernel_to_f32(size_t n, const void *from, float *to);
typedef void kernel_from_f32(size_t n, const float *from, void *to);

struct kernels {
    const char *name;
    kernel_product *product[3]; /* by pkv_dtype of b */
    kernel_softmax *softmax;
    kernel_merge *merge;
    kernel_to_f32 *to_f32[3];     /* by pkv_dtype of `from` */
    kernel_from_f32 *from_f32[3]; /* by pkv_dtype of `to` */
};

#endif
