/* SPDX-License-Identifier: MIT */
/* The best approximation of a tall matrix by one of low rank. */
#ifndef PUZZLEKV_TOOLS_POLICIES_LOW_RANK_H
#define PUZZLEKV_TOOLS_POLICIES_LOW_RANK_H

#include <stdbool.h>
#include <stddef.h>

/*
 * basis [rank, n]: the eigenvectors of a symmetric matrix [n, n] with the largest eigenvalues,
 * descending, as orthonormal rows. Of the matrix the lower triangle is read, and nothing is left.
 * 1 <= rank <= n. Thread-safe; LAPACK must run on one thread. False: out of memory, or no
 * convergence.
 */
bool low_rank_eigenvectors(double *matrix, size_t n, size_t rank, double *basis);

/*
 * basis [rank, columns], f64: the eigenvectors of X^T X with the largest eigenvalues, descending,
 * as orthonormal rows, so that X basis^T basis is the best approximation of X [rows, columns].
 * 1 <= rank <= columns. Thread-safe; BLAS and LAPACK must run on one thread. False: out of memory,
 * or no convergence.
 */
bool low_rank_basis(const float *x, size_t rows, size_t columns, size_t rank, double *basis);

#endif
