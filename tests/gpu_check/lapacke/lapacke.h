/* SPDX-License-Identifier: MIT */
/* For a machine without LAPACK, where nobody asks for PKV_SOLVER_LAPACK. */
#ifndef PUZZLEKV_TESTS_GPU_CHECK_LAPACKE_H
#define PUZZLEKV_TESTS_GPU_CHECK_LAPACKE_H

typedef int lapack_int;
#define LAPACK_COL_MAJOR 102

static inline lapack_int LAPACKE_dsyevd_work(int layout, char job, char uplo, lapack_int n,
                                             double *a, lapack_int lda, double *w, double *work,
                                             lapack_int lwork, lapack_int *iwork, lapack_int liwork)
{
    (void)layout, (void)job, (void)uplo, (void)n, (void)a, (void)lda, (void)w, (void)work;
    (void)lwork, (void)iwork, (void)liwork;
    return 1; /* it never converges */
}

#endif
