/* SPDX-License-Identifier: MIT */
/*
 * What is used of cuSOLVER, which is no part of the module: it is opened when it is asked for, and
 * so its binary interface is declared here instead of its header's being included. There is another
 * file of this name, tests/cuda_host/solver.h.
 */
#ifndef PUZZLEKV_GPU_TOOLKIT_SOLVER_H
#define PUZZLEKV_GPU_TOOLKIT_SOLVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime.h>

#define CUSOLVER_EIG_MODE_VECTOR 1
#define CUSOLVER_FILL_MODE_LOWER 0

/* Functions return 0 when all is well. */
struct cusolver_library {
    void *module;
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, cudaStream_t stream);
    int (*create_params)(void **params);
    int (*destroy_params)(void *params);
    int (*buffer_size)(void *handle, void *params, int mode, int fill, int64_t n,
                       cudaDataType matrix_type, const void *matrices, int64_t stride,
                       cudaDataType value_type, const void *values, cudaDataType compute_type,
                       size_t *device_bytes, size_t *host_bytes, int64_t count);
    int (*solve)(void *handle, void *params, int mode, int fill, int64_t n,
                 cudaDataType matrix_type, void *matrices, int64_t stride, cudaDataType value_type,
                 void *values, cudaDataType compute_type, void *device_work, size_t device_bytes,
                 void *host_work, size_t host_bytes, int *info, int64_t count);
};

static inline bool cusolver_symbol(const struct cusolver_library *library, const char *name,
                                   void *function)
{
    void *found = dlsym(library->module, name);

    *(void **)function = found;
    return found != NULL;
}

static inline void cusolver_unload(struct cusolver_library *library)
{
    if (library->module)
        dlclose(library->module);
    library->module = NULL;
}

/* CUDA 13's, then CUDA 12's. NULL, or why not, which lasts until the next call. Once there it stays
 * in memory, as the driver may know its kernels for as long as the device is in use. */
static inline const char *cusolver_load(struct cusolver_library *library)
{
    const int flags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;

    library->module = dlopen("libcusolver.so.12", flags);
    if (!library->module)
        library->module = dlopen("libcusolver.so.11", flags);
    if (!library->module)
        return dlerror();
    if (cusolver_symbol(library, "cusolverDnCreate", &library->create) &&
        cusolver_symbol(library, "cusolverDnDestroy", &library->destroy) &&
        cusolver_symbol(library, "cusolverDnSetStream", &library->set_stream) &&
        cusolver_symbol(library, "cusolverDnCreateParams", &library->create_params) &&
        cusolver_symbol(library, "cusolverDnDestroyParams", &library->destroy_params) &&
        cusolver_symbol(library, "cusolverDnXsyevBatched_bufferSize", &library->buffer_size) &&
        cusolver_symbol(library, "cusolverDnXsyevBatched", &library->solve))
        return NULL;
    cusolver_unload(library);
    return "it has no cusolverDnXsyevBatched, which came with CUDA 12.6";
}

#endif
