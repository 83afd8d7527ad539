/* SPDX-License-Identifier: MIT */
/* Elements of the storage type that are moved or looked at, not computed with. */
#ifndef PUZZLEKV_CPU_ELEMENTS_H
#define PUZZLEKV_CPU_ELEMENTS_H

#include "cpu.h"

#include <stdbool.h>

/* Whether all n are finite. */
bool elements_finite(pkv_dtype dtype, size_t n, const void *elements);

/* Bytes of a stored matrix (kernels.h) of the storage type. */
size_t elements_bytes(const struct geometry *geometry, size_t rows, size_t columns);

/* Row i, or column j, of a stored matrix to or from an array of the storage type. */
void elements_put_row(const struct backend *backend, struct matrix matrix, size_t i,
                      const void *row);
void elements_get_row(const struct backend *backend, struct matrix matrix, size_t i, void *row);
void elements_put_column(const struct backend *backend, struct matrix matrix, size_t j,
                         const void *column);
void elements_get_column(const struct backend *backend, struct matrix matrix, size_t j,
                         void *column);

/* Rows row .. row + rows - 1, columns column .. column + columns - 1 of a stored matrix. */
struct region {
    struct matrix matrix;
    size_t row;
    size_t rows;
    size_t column;
    size_t columns;
};

/*
 * f32, rows `stride` apart, to a region as numeric.h rounds; `transposed` takes the region's
 * columns from rows, which are padded then (kernels.h). Where rows lie interleaved it begins with
 * an even one, and what an odd last one is paired with becomes 0. False where an element is not
 * finite then; what is stored is undefined.
 */
bool elements_round(const struct backend *backend, struct region to, const float *from,
                    size_t stride);
bool elements_round_transposed(const struct backend *backend, struct region to, const float *from,
                               size_t stride);

/* A region in f32, and its transpose. */
void elements_widen(const struct backend *backend, struct region from, float *to, size_t stride);
void elements_widen_transposed(const struct backend *backend, struct region from, float *to,
                               size_t stride);

/* Makes what row rows - 1 is paired with, if it is the last of its pair, finite: 0. */
void elements_end_rows(const struct backend *backend, struct matrix matrix, size_t rows);

#endif
