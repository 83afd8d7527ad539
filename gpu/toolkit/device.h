/* SPDX-License-Identifier: MIT */
/* The CUDA toolkit, and what the sources of gpu/ say in other words than its own. There is another
 * file of this name, tests/cuda_host/device.h, with which the same sources run without a GPU. */
#ifndef PUZZLEKV_GPU_TOOLKIT_DEVICE_H
#define PUZZLEKV_GPU_TOOLKIT_DEVICE_H

#include <cuda_runtime.h>

#define BACKEND_NAME "cuda"

/* The only way to launch a kernel. */
#define PKV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                 \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)

/* The only shared memory there is: what the launch asked for, aligned to 16 bytes. */
#define PKV_SHARED(type, name)                                                                     \
    extern __shared__ __align__(16) unsigned char device_shared[];                                 \
    type *const name = (type *)(void *)device_shared

#endif
