/* SPDX-License-Identifier: MIT */
/* cuSOLVER, which alone is 860 MB with what it needs, only for those who ask for it. */
#include "cusolver.h"

#include "solver.h"

struct cusolver {
    struct cusolver_library library;
    void *handle, *params;
    size_t n;
    void *device_work, *host_work;
    size_t device_bytes, host_bytes;
};

static pkv_status check(struct backend *backend, int result, const char *what)
{
    return result == 0
               ? PKV_OK
               : fail(backend->message, PKV_ERROR_DEVICE, "CUDA device %d: cuSOLVER: %s: status %d",
                      backend->device, what, result);
}

static pkv_status find_sizes(struct backend *backend, float *matrices, float *values, size_t count,
                             size_t *device_bytes, size_t *host_bytes)
{
    struct cusolver *own = backend->cusolver;

    return check(backend,
                 own->library.buffer_size(own->handle, own->params, CUSOLVER_EIG_MODE_VECTOR,
                                          CUSOLVER_FILL_MODE_LOWER, (int64_t)own->n, CUDA_R_32F,
                                          matrices, (int64_t)own->n, CUDA_R_32F, values, CUDA_R_32F,
                                          device_bytes, host_bytes, (int64_t)count),
                 "cannot tell the size of its work space");
}

static pkv_status open_handle(struct backend *backend)
{
    struct cusolver *own = backend->cusolver;
    pkv_status status = check(backend, own->library.create(&own->handle), "cannot be opened");

    if (status == PKV_OK)
        status = check(backend, own->library.set_stream(own->handle, backend->stream),
                       "does not take the stream");
    if (status == PKV_OK)
        status = check(backend, own->library.create_params(&own->params), "has no parameters");
    return status;
}

pkv_status cusolver_open(struct backend *backend, size_t n, size_t count)
{
    struct cusolver *own = (struct cusolver *)memory_allocate(backend->memory, 1, sizeof *own);
    const char *why;
    pkv_status status;

    backend->cusolver = own;
    if (!own)
        return fail(backend->message, PKV_ERROR_MEMORY, "cannot allocate a handle of cuSOLVER");
    memset(own, 0, sizeof *own);
    own->n = n;
    why = cusolver_load(&own->library);
    if (why)
        return fail(backend->message, PKV_ERROR_UNSUPPORTED, "solver: no cuSOLVER: %s", why);
    status = open_handle(backend);
    if (status == PKV_OK)
        status = find_sizes(backend, NULL, NULL, count, &own->device_bytes, &own->host_bytes);
    if (status == PKV_OK)
        status =
            gpu_allocate(backend, own->device_bytes, "cuSOLVER's work space", &own->device_work);
    if (status != PKV_OK)
        return status;
    own->host_work = memory_allocate(backend->memory, own->host_bytes ? own->host_bytes : 1, 1);
    return own->host_work ? PKV_OK
                          : fail(backend->message, PKV_ERROR_MEMORY,
                                 "cannot allocate %zu bytes for cuSOLVER", own->host_bytes);
}

void cusolver_close(struct backend *backend)
{
    struct cusolver *own = backend->cusolver;

    if (!own)
        return;
    if (own->params)
        own->library.destroy_params(own->params);
    if (own->handle)
        own->library.destroy(own->handle);
    cusolver_unload(&own->library);
    gpu_release(backend, own->device_bytes, own->device_work);
    memory_release(backend->memory, own->host_work);
    memory_release(backend->memory, own);
    backend->cusolver = NULL;
}

pkv_status cusolver_run(struct backend *backend, float *matrices, float *values, int *info,
                        size_t count)
{
    struct cusolver *own = backend->cusolver;
    size_t device_bytes = 0, host_bytes = 0;
    pkv_status status = find_sizes(backend, matrices, values, count, &device_bytes, &host_bytes);

    if (status == PKV_OK && (device_bytes > own->device_bytes || host_bytes > own->host_bytes))
        status = fail(backend->message, PKV_ERROR_DEVICE,
                      "CUDA device %d: cuSOLVER: %zu matrices want %zu and %zu bytes, more than "
                      "the most did",
                      backend->device, count, device_bytes, host_bytes);
    if (status == PKV_OK)
        status = check(backend,
                       own->library.solve(own->handle, own->params, CUSOLVER_EIG_MODE_VECTOR,
                                          CUSOLVER_FILL_MODE_LOWER, (int64_t)own->n, CUDA_R_32F,
                                          matrices, (int64_t)own->n, CUDA_R_32F, values, CUDA_R_32F,
                                          own->device_work, own->device_bytes, own->host_work,
                                          own->host_bytes, info, (int64_t)count),
                       "cannot find eigenvectors");
    return status;
}
