/* SPDX-License-Identifier: MIT */
/* The best approximation of a tall matrix by one of low rank. */
#include "low_rank.h"

#include <cblas.h>
#include <lapacke.h>
#include <stdlib.h>
#include <string.h>

/* Rows that are converted to f64 at once. */
#define BLOCK 256

bool low_rank_basis(const float *x, size_t rows, size_t columns, size_t rank, double *basis)
{
    const lapack_int n = (lapack_int)columns;
    double *gram = calloc(columns * columns, sizeof *gram);
    double *values = malloc(columns * sizeof *values);
    double *block = malloc(BLOCK * columns * sizeof *block);
    bool done = false;

    if (gram == NULL || values == NULL || block == NULL)
        goto out;
    for (size_t row = 0; row < rows; row += BLOCK) {
        size_t count = rows - row < BLOCK ? rows - row : BLOCK;

        for (size_t i = 0; i < count * columns; i++)
            block[i] = x[row * columns + i];
        cblas_dsyrk(CblasRowMajor, CblasLower, CblasTrans, n, (lapack_int)count, 1, block, n, 1,
                    gram, n);
    }
    /* Column-major LAPACK sees the lower triangle of row-major storage as the upper one, and leaves
     * eigenvector i, ascending, in row i. */
    if (LAPACKE_dsyevd(LAPACK_COL_MAJOR, 'V', 'U', n, gram, n, values) != 0)
        goto out;
    for (size_t i = 0; i < rank; i++)
        memcpy(basis + i * columns, gram + (columns - 1 - i) * columns, columns * sizeof *basis);
    done = true;
out:
    free(block);
    free(values);
    free(gram);
    return done;
}
