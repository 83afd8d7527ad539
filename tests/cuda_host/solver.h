/* SPDX-License-Identifier: MIT */
/* What gpu/toolkit/solver.h offers, by LAPACK. */
#ifndef PUZZLEKV_TESTS_CUDA_HOST_SOLVER_H
#define PUZZLEKV_TESTS_CUDA_HOST_SOLVER_H

#include "device.h"

#ifndef PUZZLEKV_TESTS_CUDA_HOST_BLAS_H
enum cuda_host_data_type { CUDA_R_32F = 0 };
#endif

#define CUSOLVER_EIG_MODE_VECTOR 1
#define CUSOLVER_FILL_MODE_LOWER 0

struct cusolver_library {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, cudaStream_t stream);
    int (*create_params)(void **params);
    int (*destroy_params)(void *params);
    int (*buffer_size)(void *handle, void *params, int mode, int fill, int64_t n, int matrix_type,
                       const void *matrices, int64_t stride, int value_type, const void *values,
                       int compute_type, size_t *device_bytes, size_t *host_bytes, int64_t count);
    /* More than 16,384 matrices, too little work space and a NULL handle are errors. */
    int (*solve)(void *handle, void *params, int mode, int fill, int64_t n, int matrix_type,
                 void *matrices, int64_t stride, int value_type, void *values, int compute_type,
                 void *device_work, size_t device_bytes, void *host_work, size_t host_bytes,
                 int *info, int64_t count);
};

const char *cusolver_load(struct cusolver_library *library);
void cusolver_unload(struct cusolver_library *library);

#endif
