/* SPDX-License-Identifier: MIT */
/* What the CUDA backend uses of cuSOLVER, by LAPACK. */
#include "solver.h"
#include "block.h"
#include "control.h"

#include <cfenv>
#include <lapacke.h>

/* What is undocumented begins at some 32,000. */
#define MOST_MATRICES 16384

#define FAILED 7

struct cuda_host_solver {
    cudaStream_t stream;
};

static bool available = true;
static int64_t failing = -1;

void cuda_host_set_solver(int is_there, int64_t matrix)
{
    available = is_there;
    failing = matrix;
}

static int create(void **handle)
{
    *handle = new cuda_host_solver();
    return 0;
}

static int destroy(void *handle)
{
    delete (struct cuda_host_solver *)handle;
    return 0;
}

static int set_stream(void *handle, cudaStream_t stream)
{
    ((struct cuda_host_solver *)handle)->stream = stream;
    return 0;
}

static int create_params(void **params)
{
    *params = new char;
    return 0;
}

static int destroy_params(void *params)
{
    delete (char *)params;
    return 0;
}

static int buffer_size(void *handle, void *params, int, int, int64_t n, int, const void *, int64_t,
                       int, const void *, int, size_t *device_bytes, size_t *host_bytes,
                       int64_t count)
{
    if (!handle || !params || n < 1 || count < 1)
        return FAILED;
    *device_bytes = (size_t)(n * count) * sizeof(float);
    *host_bytes = (size_t)count;
    return 0;
}

/* The lower triangle alone is read, in f32 whatever the caller's modes are. */
static int solve(void *handle, void *params, int mode, int fill, int64_t n, int matrix_type,
                 void *matrices, int64_t stride, int value_type, void *values, int compute_type,
                 void *device_work, size_t device_bytes, void *host_work, size_t host_bytes,
                 int *info, int64_t count)
{
    const size_t length = (size_t)n, batch = (size_t)count;

    if (!handle || !params || mode != CUSOLVER_EIG_MODE_VECTOR ||
        fill != CUSOLVER_FILL_MODE_LOWER || stride != n || matrix_type != CUDA_R_32F ||
        value_type != CUDA_R_32F || compute_type != CUDA_R_32F || !host_work ||
        device_bytes < length * batch * sizeof(float) || host_bytes < batch || n < 1 || count < 1 ||
        count > MOST_MATRICES)
        return FAILED;
    cuda_host_view(device_work, device_bytes);

    float *a = (float *)cuda_host_view(matrices, batch * length * length * sizeof(float));
    float *w = (float *)cuda_host_view(values, batch * length * sizeof(float));
    int *out = (int *)cuda_host_view(info, batch * sizeof(int));
    const int64_t fails = failing;

    cuda_host_queue(((struct cuda_host_solver *)handle)->stream, [=]() {
        fenv_t modes;

        feholdexcept(&modes);
        fesetenv(FE_DFL_ENV);
        for (size_t i = 0; i < batch; i++)
            out[i] = (int64_t)i == fails
                         ? (int)n
                         : LAPACKE_ssyevd(LAPACK_COL_MAJOR, 'V', 'L', (lapack_int)n,
                                          a + i * length * length, (lapack_int)n, w + i * length);
        fesetenv(&modes);
    });
    return 0;
}

const char *cusolver_load(struct cusolver_library *library)
{
    if (!available)
        return "libcusolver.so: there is none";
    *library = {create, destroy, set_stream, create_params, destroy_params, buffer_size, solve};
    return NULL;
}

void cusolver_unload(struct cusolver_library *)
{
}
