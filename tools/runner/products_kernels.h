/* SPDX-License-Identifier: MIT */
/* Inner loops of products.c: one table per instruction set. */
#ifndef PUZZLEKV_TOOLS_RUNNER_PRODUCTS_KERNELS_H
#define PUZZLEKV_TOOLS_RUNNER_PRODUCTS_KERNELS_H

#include "quant.h"

/* One row of activations, prepared once for all the weight rows that it meets. */
struct activations {
    const float *x;       /* [columns] */
    const float *sums_16; /* [columns / 16], of 16 elements each */
    const float *sums_32; /* [columns / 32] */
};

/* The product of one weight row and one activation row; columns is a multiple of the type's block.
 * Sums run in a fixed order of lanes and blocks. Thread-safe. */
typedef float products_dot(const void *row, const struct activations *a, size_t columns);

struct products_kernels {
    const char *name;
    products_dot *dot[QUANT_TYPES];
    quant_dequantise *dequantise[QUANT_TYPES]; /* as that of quant_info, to the bit */
    void (*swiglu)(float *gate, const float *up,
                   size_t n); /* gate = up * gate / (1 + exp(-gate)) */
};

extern const struct products_kernels products_generic;
extern const struct products_kernels products_avx2;   /* x86-64 builds only */
extern const struct products_kernels products_avx512; /* x86-64 builds only */

#endif
