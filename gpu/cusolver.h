/* SPDX-License-Identifier: MIT */
/* Eigenvectors of many symmetric matrices by cuSOLVER, for PKV_SOLVER_CUSOLVER. */
#ifndef PUZZLEKV_GPU_CUSOLVER_H
#define PUZZLEKV_GPU_CUSOLVER_H

#include "gpu.h"

/* Matrices of one call at most: beyond some 32,000 cuSOLVER fails, which it does not document. */
#define CUSOLVER_MATRICES ((size_t)16384)

/* Opens cuSOLVER for up to `count` matrices of n x n at once, or sets the message. cusolver_close
 * takes it back, also after a failure. */
pkv_status cusolver_open(struct backend *backend, size_t n, size_t count);
void cusolver_close(struct backend *backend);

/* Queues: `matrices` [count, n, n], in both triangles, become their eigenvectors, one after the
 * other, in the order of ascending `values` [count, n]; `info` [count] is 0 where that has worked.
 */
pkv_status cusolver_run(struct backend *backend, float *matrices, float *values, int *info,
                        size_t count);

#endif
