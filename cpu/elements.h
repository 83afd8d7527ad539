/* SPDX-License-Identifier: MIT */
/* Elements of the storage type that are moved or looked at, not computed with. */
#ifndef PUZZLEKV_CPU_ELEMENTS_H
#define PUZZLEKV_CPU_ELEMENTS_H

#include "puzzlekv.h"

#include <stdbool.h>

/* Whether all n are finite. */
bool elements_finite(pkv_dtype dtype, size_t n, const void *elements);

/* n elements of `size` bytes, spaced. */
void elements_copy(size_t size, size_t n, const void *from, size_t from_stride, void *to,
                   size_t to_stride);

/* The first `columns` columns of a matrix [rows, ld] as the rows of `to`. */
void elements_transpose(size_t size, size_t rows, size_t columns, size_t ld, const void *from,
                        void *to);

#endif
