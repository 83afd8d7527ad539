/* SPDX-License-Identifier: MIT */
/* cuBLAS. There is another file of this name, tests/cuda_host/blas.h. */
#ifndef PUZZLEKV_GPU_TOOLKIT_BLAS_H
#define PUZZLEKV_GPU_TOOLKIT_BLAS_H

#include <cublas_v2.h>

#endif
