/* SPDX-License-Identifier: MIT */
/* The best approximation of a tall matrix by one of low rank. */
#include "low_rank.h"

#include <cblas.h>
#include <lapacke.h>
#include <stdlib.h>
#include <string.h>

/* Rows that are converted to f64 at once. */
#define BLOCK 256

bool low_rank_eigenvectors(double *matrix, size_t n, size_t rank, double *basis)
{
    double *values = malloc(n * sizeof *values);
    /* Column-major LAPACK sees the lower triangle of row-major storage as the upper one, and leaves
     * eigenvector i, ascending, in row i. */
    const bool done = values != NULL && LAPACKE_dsyevd(LAPACK_COL_MAJOR, 'V', 'U', (lapack_int)n,
                                                       matrix, (lapack_int)n, values) == 0;

    for (size_t i = 0; i < rank && done; i++)
        memcpy(basis + i * n, matrix + (n - 1 - i) * n, n * sizeof *basis);
    free(values);
    return done;
}

bool low_rank_basis(const float *x, size_t rows, size_t columns, size_t rank, double *basis)
{
    const blasint n = (blasint)columns;
    double *gram = calloc(columns * columns, sizeof *gram);
    double *block = malloc(BLOCK * columns * sizeof *block);
    bool done = gram != NULL && block != NULL;

    for (size_t row = 0; row < rows && done; row += BLOCK) {
        size_t count = rows - row < BLOCK ? rows - row : BLOCK;

        for (size_t i = 0; i < count * columns; i++)
            block[i] = x[row * columns + i];
        cblas_dsyrk(CblasRowMajor, CblasLower, CblasTrans, n, (blasint)count, 1, block, n, 1, gram,
                    n);
    }
    done = done && low_rank_eigenvectors(gram, columns, rank, basis);
    free(block);
    free(gram);
    return done;
}
