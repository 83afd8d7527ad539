/* SPDX-License-Identifier: MIT */
/* Matrix products of activations with mapped, possibly quantised weights. */
#ifndef PUZZLEKV_TOOLS_RUNNER_PRODUCTS_H
#define PUZZLEKV_TOOLS_RUNNER_PRODUCTS_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"
#include "model.h"

/* Rows of activations that are multiplied at once. Callers cut a sequence at multiples of it,
 * counted from the sequence's first token, so that the blocks, and with them the bits, do not
 * depend on how the work is spread over threads. */
#define PRODUCTS_BLOCK_ROWS 256

/* A weight matrix, and where products_pack() laid it out anew. */
struct matrix {
    struct weight weight;
    const unsigned char *panels; /* or NULL */
};

/* y = x W^T for one matrix: y[rows, matrix->weight.rows]. */
struct product {
    const struct matrix *matrix;
    float *y;
    size_t y_stride; /* from one row to the next */
    bool add;        /* y += x W^T */
};

/* OpenBLAS takes this much address space for each of its own threads and for each thread that is in
 * it at once. Where it cannot get it, it tries for ever. */
#define PRODUCTS_BLAS_BYTES (((size_t)128 << 20) + 4096)

/* Fails unless so many threads could be in OpenBLAS at once now. */
bool products_check_blas(unsigned threads, struct error *error);

/* One calling thread at a time; the products themselves use `threads` threads. */
struct products;

/* Inner loops of one instruction set. */
struct products_kernels;

/* `isa` is what pkv_cache_isa() says. Where this machine offers several tables for it: the fastest,
 * or with `after` the next slower one, NULL when that was the last. An instruction set for which
 * there are none here means the generic one. */
const struct products_kernels *products_find_kernels(const char *isa,
                                                     const struct products_kernels *after);

/* Holds the address space that BLAS will take until the first product, and fails if there is too
 * little. `threads` >= 1. */
bool products_open(unsigned threads, const struct products_kernels *kernels, bool exact,
                   struct products **products, struct error *error);

/* Accepts NULL. */
void products_close(struct products *products);

/* What a matrix takes when it is laid out anew; 0 if it stays as it is, SIZE_MAX on overflow. */
size_t products_packed_bytes(const struct products_kernels *kernels, const struct weight *weight);

/* Lays out anew the matrices that are multiplied faster so, in about as many bytes as before, which
 * is what every product will read then; sets `panels` of all. The memory, NULL if there is nothing
 * to do, is the caller's to free() when the matrices are no longer multiplied. */
bool products_pack(const struct products *products, struct matrix *matrices, size_t count,
                   void **memory, struct error *error);

/*
 * Multiplies the same `rows` (<= PRODUCTS_BLOCK_ROWS) rows x[rows, columns], x_stride apart, with
 * `count` matrices of equal `columns`. Few rows read the weights as they are; more rows go through
 * panels of them, expanded to f32 for BLAS. Unless `exact`, activations that meet packed weights
 * may be rounded to bytes, in blocks of 32 by at most 1/254 of the block's largest magnitude; sums
 * over a block are exact then. The result does not depend on the number of threads.
 */
bool products_multiply(struct products *products, const float *x, size_t x_stride, size_t rows,
                       const struct product *list, size_t count, struct error *error);

/* gate[i] = up[i] * silu(gate[i]), silu(z) = z / (1 + exp(-z)); thread-safe. */
void products_swiglu(const struct products *products, float *gate, const float *up, size_t n);

#endif
