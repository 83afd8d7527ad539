/* SPDX-License-Identifier: MIT */
/* What the runner uses of cuBLAS, by OpenBLAS. */
#include "blas.h"
#include "block.h"

#include <cblas.h>
#include <vector>

struct cuda_host_blas {
    cudaStream_t stream;
    void *workspace;
};

cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    *handle = new cuda_host_blas();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

/* Takes the workspace away, as cuBLAS does. */
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    handle->workspace = NULL;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t)
{
    handle->workspace = workspace;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusString(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "the requested functionality is not supported";
    default:
        return "an invalid value";
    }
}

/* `columns` columns of `rows` elements, one after the other, in f32. */
static std::vector<float> expand(const void *data, cudaDataType_t type, int rows, int columns,
                                 int stride)
{
    std::vector<float> expanded((size_t)rows * (size_t)columns);

    for (size_t j = 0; j < (size_t)columns; j++) {
        for (size_t i = 0; i < (size_t)rows; i++) {
            const size_t from = j * (size_t)stride + i;
            uint32_t bits;

            if (type == CUDA_R_32F)
                memcpy(&bits, (const float *)data + from, sizeof bits);
            else
                bits = (uint32_t)((const uint16_t *)data)[from] << 16;
            memcpy(&expanded[j * (size_t)rows + i], &bits, sizeof bits);
        }
    }
    return expanded;
}

static uint16_t round_bf16(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    if (std::isnan(x))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Elements of the last column end the matrix. */
static void *view(const void *data, cudaDataType_t type, int rows, int columns, int stride)
{
    const size_t elements = (size_t)(columns - 1) * (size_t)stride + (size_t)rows;

    return cuda_host_view(data, elements * (type == CUDA_R_32F ? 4 : 2));
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a_operation,
                            cublasOperation_t b_operation, int m, int n, int k, const void *alpha,
                            const void *a, cudaDataType_t a_type, int a_stride, const void *b,
                            cudaDataType_t b_type, int b_stride, const void *beta, void *c,
                            cudaDataType_t c_type, int c_stride, cublasComputeType_t compute,
                            cublasGemmAlgo_t)
{
    const float one = *(const float *)alpha, more = *(const float *)beta;

    if (handle->workspace == NULL || m <= 0 || n <= 0 || k <= 0 || a_stride < k || b_stride < k ||
        c_stride < m)
        return CUBLAS_STATUS_INVALID_VALUE;
    /* What cuBLAS's table of types has, as far as it is of use here. */
    if (a_operation != CUBLAS_OP_T || b_operation != CUBLAS_OP_N || compute != CUBLAS_COMPUTE_32F ||
        a_type != b_type || (a_type == CUDA_R_32F && c_type != CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;

    const void *a_view = view(a, a_type, k, m, a_stride);
    const void *b_view = view(b, b_type, k, n, b_stride);
    void *c_view = view(c, c_type, m, n, c_stride);

    cuda_host_queue(handle->stream, [=]() {
        const std::vector<float> left = expand(a_view, a_type, k, m, a_stride);
        const std::vector<float> right = expand(b_view, b_type, k, n, b_stride);
        std::vector<float> sums = expand(c_view, c_type, m, n, c_stride);

        cblas_sgemm(CblasColMajor, CblasTrans, CblasNoTrans, m, n, k, one, left.data(), k,
                    right.data(), k, more, sums.data(), m);
        for (size_t j = 0; j < (size_t)n; j++) {
            for (size_t i = 0; i < (size_t)m; i++) {
                const size_t to = j * (size_t)c_stride + i;
                const float sum = sums[j * (size_t)m + i];

                if (c_type == CUDA_R_32F)
                    ((float *)c_view)[to] = sum;
                else
                    ((uint16_t *)c_view)[to] = round_bf16(sum);
            }
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}
