/* SPDX-License-Identifier: MIT */
/* The device: its stream, its memory, cuBLAS, and the module's one export. */
#include "runner.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* What cuBLAS is advised to have on the largest devices. Its own would be allocated while a graph
 * is captured, which is not allowed. */
#define WORKSPACE_BYTES ((size_t)32 << 20)

/* Of copies to be timed, after one to warm up. */
#define COPIES 5

/* ---- Errors ---- */

bool runner_fail(struct error *error, const char *format, ...)
{
    va_list arguments;

    if (error != NULL) {
        va_start(arguments, format);
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
    }
    return false;
}

bool runner_check(const struct cuda_device *device, cudaError_t result, const char *what,
                  struct error *error)
{
    if (result == cudaSuccess)
        return true;
    cudaGetLastError(); /* or it would be the next call's */
    return runner_fail(error, "CUDA device %d: %s: %s", device->base.ordinal, what,
                       cudaGetErrorString(result));
}

bool runner_check_launch(const struct cuda_device *device, const char *what, struct error *error)
{
    return runner_check(device, cudaGetLastError(), what, error);
}

static bool check_blas(const struct cuda_device *device, cublasStatus_t status, const char *what,
                       struct error *error)
{
    return status == CUBLAS_STATUS_SUCCESS ||
           runner_fail(error, "CUDA device %d: cuBLAS: %s: %s", device->base.ordinal, what,
                       cublasGetStatusString(status));
}

bool runner_enter(const struct cuda_device *device, struct error *error)
{
    return runner_check(device, cudaSetDevice(device->base.ordinal), "cannot be used", error);
}

bool runner_wait(const struct cuda_device *device, const char *what, struct error *error)
{
    return runner_check(device, cudaStreamSynchronize(device->stream), what, error);
}

/* ---- Memory ---- */

static bool allocated(const struct cuda_device *device, cudaError_t result, size_t bytes,
                      const char *what, void **pointer, struct error *error)
{
    if (result == cudaSuccess)
        return true;
    *pointer = NULL;
    cudaGetLastError();
    return runner_fail(error, "CUDA device %d: cannot allocate %zu bytes for %s: %s",
                       device->base.ordinal, bytes, what, cudaGetErrorString(result));
}

bool runner_allocate(const struct cuda_device *device, size_t bytes, const char *what,
                     void **pointer, struct error *error)
{
    return allocated(device, cudaMalloc(pointer, bytes), bytes, what, pointer, error);
}

bool runner_allocate_pinned(const struct cuda_device *device, size_t bytes, void **pointer,
                            struct error *error)
{
    return allocated(device, cudaMallocHost(pointer, bytes), bytes, "the host", pointer, error);
}

/* ---- Matrix products ---- */

static cudaDataType_t data_type(pkv_dtype dtype)
{
    return dtype == PKV_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

/* cuBLAS counts by columns: to it these matrices are transposed. */
bool runner_multiply(const struct cuda_device *device, const struct matrix_product *p,
                     struct error *error)
{
    const float one = 1, more = p->add ? 1 : 0;
    const int n = (int)p->n, rows = (int)p->rows, k = (int)p->k;

    return check_blas(device,
                      cublasGemmEx(device->blas, CUBLAS_OP_T, CUBLAS_OP_N, n, rows, k, &one,
                                   p->weight, data_type(p->dtype), k, p->x, data_type(p->dtype), k,
                                   &more, p->y, data_type(p->y_dtype), n, CUBLAS_COMPUTE_32F,
                                   CUBLAS_GEMM_DEFAULT),
                      "a matrix product", error);
}

/* ---- The device ---- */

static struct cuda_device *from_base(struct device *device)
{
    return (struct cuda_device *)device;
}

static void close_device(struct device *base)
{
    struct cuda_device *device = from_base(base);

    cudaSetDevice(base->ordinal);
    if (device->blas)
        cublasDestroy(device->blas);
    cudaFree(device->workspace);
    if (device->stream)
        cudaStreamDestroy(device->stream);
    free(device);
}

static bool find_device(struct cuda_device *device, struct error *error)
{
    struct cudaDeviceProp properties;
    int count = 0;
    cudaError_t result = cudaGetDeviceCount(&count);

    if (result != cudaSuccess || count == 0) {
        cudaGetLastError();
        return runner_fail(error, "--backend cuda: no CUDA device: %s",
                           result == cudaSuccess ? "none is there" : cudaGetErrorString(result));
    }
    if (!runner_enter(device, error) ||
        !runner_check(device, cudaGetDeviceProperties(&properties, device->base.ordinal),
                      "no properties", error))
        return false;
    snprintf(device->base.isa, sizeof device->base.isa, "sm_%d%d", properties.major,
             properties.minor);
    return true;
}

static bool open_blas(struct cuda_device *device, struct error *error)
{
    return check_blas(device, cublasCreate(&device->blas), "cannot be opened", error) &&
           check_blas(device, cublasSetStream(device->blas, device->stream), "stream", error) &&
           check_blas(device, cublasSetWorkspace(device->blas, device->workspace, WORKSPACE_BYTES),
                      "workspace", error) &&
           check_blas(
               device,
               cublasSetMathMode(device->blas, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
               "math mode", error);
}

static bool open_device(int ordinal, struct device **opened, struct error *error)
{
    struct cuda_device *device = (struct cuda_device *)calloc(1, sizeof *device);

    *opened = NULL;
    if (device == NULL)
        return runner_fail(error, "out of memory for the CUDA device");
    device->base.operations = &runner_operations;
    device->base.ordinal = ordinal;
    if (!find_device(device, error) ||
        !runner_check(device, cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking),
                      "cannot create a stream", error) ||
        !runner_allocate(device, WORKSPACE_BYTES, "cuBLAS", &device->workspace, error) ||
        !open_blas(device, error)) {
        close_device(&device->base);
        return false;
    }
    device->base.stream = device->stream;
    *opened = &device->base;
    return true;
}

/* ---- Graphs ---- */

bool runner_capture_begin(struct device *base, struct error *error)
{
    struct cuda_device *device = from_base(base);

    return runner_enter(device, error) &&
           runner_check(device,
                        cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal),
                        "cannot begin a graph", error);
}

bool runner_capture_end(struct device *base, void **executable, struct error *error)
{
    struct cuda_device *device = from_base(base);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t made = NULL;
    bool done = runner_check(device, cudaStreamEndCapture(device->stream, &graph),
                             "cannot end a graph", error);

    if (done && executable != NULL) {
        done = runner_check(device, cudaGraphInstantiate(&made, graph, 0), "cannot make a graph",
                            error);
        *executable = done ? (void *)made : NULL;
    }
    if (graph)
        cudaGraphDestroy(graph);
    return done;
}

bool runner_launch(struct device *base, void *executable, struct error *error)
{
    struct cuda_device *device = from_base(base);

    return runner_check(device, cudaGraphLaunch((cudaGraphExec_t)executable, device->stream),
                        "cannot launch a graph", error);
}

static bool wait_for_all(struct device *base, struct error *error)
{
    return runner_wait(from_base(base), "the device failed", error);
}

void runner_free_graph(struct device *base, void *executable)
{
    cudaSetDevice(base->ordinal);
    cudaGraphExecDestroy((cudaGraphExec_t)executable);
}

/* ---- For benchmarks ---- */

static bool upload(struct device *base, const void *data, size_t bytes, void **copy,
                   struct error *error)
{
    struct cuda_device *device = from_base(base);

    *copy = NULL;
    if (!runner_enter(device, error) || !runner_allocate(device, bytes, "operands", copy, error))
        return false;
    if (data == NULL ||
        (runner_check(device,
                      cudaMemcpyAsync(*copy, data, bytes, cudaMemcpyHostToDevice, device->stream),
                      "cannot copy operands", error) &&
         runner_wait(device, "cannot copy operands", error)))
        return true;
    cudaFree(*copy);
    *copy = NULL;
    return false;
}

static void release(struct device *base, void *pointer)
{
    cudaSetDevice(base->ordinal);
    cudaFree(pointer);
}

static bool time_copy(struct cuda_device *device, unsigned char *block, size_t bytes,
                      cudaEvent_t begin, cudaEvent_t end, float *milliseconds, struct error *error)
{
    return runner_check(device, cudaEventRecord(begin, device->stream), "cannot time", error) &&
           runner_check(device,
                        cudaMemcpyAsync(block + bytes, block, bytes, cudaMemcpyDeviceToDevice,
                                        device->stream),
                        "cannot copy", error) &&
           runner_check(device, cudaEventRecord(end, device->stream), "cannot time", error) &&
           runner_wait(device, "cannot copy", error) &&
           runner_check(device, cudaEventElapsedTime(milliseconds, begin, end), "cannot time",
                        error);
}

static bool copy_speed(struct device *base, size_t bytes, double *bytes_per_second,
                       struct error *error)
{
    struct cuda_device *device = from_base(base);
    cudaEvent_t begin = NULL, end = NULL;
    void *block = NULL;
    float best = INFINITY;
    bool done = runner_enter(device, error) &&
                runner_allocate(device, 2 * bytes, "a copy", &block, error) &&
                runner_check(device, cudaEventCreate(&begin), "cannot time", error) &&
                runner_check(device, cudaEventCreate(&end), "cannot time", error);

    for (int i = 0; i <= COPIES && done; i++) {
        float milliseconds;

        done = time_copy(device, (unsigned char *)block, bytes, begin, end, &milliseconds, error);
        if (done && i > 0 && milliseconds < best)
            best = milliseconds;
    }
    if (begin)
        cudaEventDestroy(begin);
    if (end)
        cudaEventDestroy(end);
    cudaFree(block);
    *bytes_per_second = 2e3 * (double)bytes / (double)best;
    return done;
}

const struct device_operations runner_operations = {
    .open = open_device,
    .close = close_device,
    .open_forward = runner_open_forward,
    .forward = &runner_forward,
    .upload = upload,
    .release = release,
    .copy_speed = copy_speed,
    .capture_begin = runner_capture_begin,
    .capture_end = runner_capture_end,
    .launch = runner_launch,
    .wait = wait_for_all,
    .free_graph = runner_free_graph,
};

/* Declared first, or C++ would keep it to itself. */
extern "C" MODULE_EXPORT const struct device_module puzzlekv_runner_module;
extern "C" const struct device_module puzzlekv_runner_module = {.version = PKV_VERSION,
                                                                .operations = &runner_operations};
