/* SPDX-License-Identifier: MIT */
/* What the files of the module that runs models on a CUDA device share. */
#ifndef PUZZLEKV_TOOLS_RUNNER_CUDA_RUNNER_H
#define PUZZLEKV_TOOLS_RUNNER_CUDA_RUNNER_H

/* Before what is in C below. */
#include "blas.h"
#include "device.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern "C" {
#include "../cuda_device.h"
}

/* What is seen of the module. */
#define MODULE_EXPORT __attribute__((visibility("default")))

/* The device as the program sees it, and what the module has of it. Calls of the module make it the
 * thread's current one. */
struct cuda_device {
    struct device base;
    cudaStream_t stream;
    cublasHandle_t blas;
    void *workspace; /* of cuBLAS */
};

/* device.cu */
extern const struct device_operations runner_operations;

/* All of these return false with the error. */
bool runner_fail(struct error *error, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
bool runner_check(const struct cuda_device *device, cudaError_t result, const char *what,
                  struct error *error);
bool runner_check_launch(const struct cuda_device *device, const char *what, struct error *error);
bool runner_enter(const struct cuda_device *device, struct error *error);
/* Device memory, and pinned memory of the host; both are NULL on failure. */
bool runner_allocate(const struct cuda_device *device, size_t bytes, const char *what,
                     void **pointer, struct error *error);
bool runner_allocate_pinned(const struct cuda_device *device, size_t bytes, void **pointer,
                            struct error *error);
bool runner_wait(const struct cuda_device *device, const char *what, struct error *error);
/* As of struct device_operations. */
bool runner_capture_begin(struct device *device, struct error *error);
bool runner_capture_end(struct device *device, void **graph, struct error *error);
bool runner_launch(struct device *device, void *graph, struct error *error);
void runner_free_graph(struct device *device, void *graph);

/* y[rows, n] (+)= x[rows, k] W[n, k]^T, row-major; x and W of one type, y_stride from one row of y
 * to the next; sums in f32. */
struct matrix_product {
    pkv_dtype dtype; /* PKV_F32 or PKV_BF16 */
    const void *weight, *x;
    size_t rows, n, k;
    void *y;
    pkv_dtype y_dtype;
    bool add; /* to y, which is f32 */
};

bool runner_multiply(const struct cuda_device *device, const struct matrix_product *product,
                     struct error *error);

/* forward.cu */
bool runner_open_forward(struct device *device, const struct model *model,
                         const struct device_model_options *options, struct forward **forward,
                         struct error *error);
extern const struct forward_operations runner_forward;

#endif
