/* SPDX-License-Identifier: MIT */
/* Operands of a step that lie in the host's memory, for a cache that wants them on the device. */
#include "operands.h"

#include "device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

/* No test has more in one operand. */
#define MOST_BYTES ((size_t)1 << 28)

struct operand {
    unsigned char *block;
    size_t shift; /* as far from alignment as on the host */
    size_t bytes;
};

struct operands {
    cudaStream_t stream;
    struct operand q, k, v, out, lse;
};

static void require(cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "operands: %s\n", cudaGetErrorString(error));
    abort();
}

/* Bytes from the first element to the last one, or 0. Callers may give what is no type, which C++
 * must not load as one. */
static size_t extent(const pkv_dtype &dtype, size_t rows, size_t heads, size_t d,
                     size_t token_stride, size_t head_stride)
{
    const pkv_dtype f32 = PKV_F32;
    const size_t size = memcmp(&dtype, &f32, sizeof dtype) == 0 ? 4 : 2;
    size_t row_span, head_span, bytes;

    if (head_stride == 0)
        head_stride = d;
    if (token_stride == 0)
        token_stride = heads * d;
    if (__builtin_mul_overflow(rows - 1, token_stride, &row_span) ||
        __builtin_mul_overflow(heads - 1, head_stride, &head_span) ||
        __builtin_add_overflow(row_span, head_span, &bytes) ||
        __builtin_add_overflow(bytes, d, &bytes) || __builtin_mul_overflow(bytes, size, &bytes))
        return 0;
    return bytes > MOST_BYTES ? 0 : bytes;
}

static void *upload(struct operands *operands, struct operand *operand, const void *data,
                    size_t bytes)
{
    operand->bytes = bytes;
    operand->shift = (uintptr_t)data % 16;
    require(cudaMalloc((void **)&operand->block, bytes + operand->shift));
    require(cudaMemcpyAsync(operand->block + operand->shift, data, bytes, cudaMemcpyHostToDevice,
                            operands->stream));
    return operand->block + operand->shift;
}

static void download(struct operands *operands, struct operand *operand, void *data)
{
    if (operand->block && data)
        require(cudaMemcpyAsync(data, operand->block + operand->shift, operand->bytes,
                                cudaMemcpyDeviceToHost, operands->stream));
}

extern "C" struct operands *operands_upload(const pkv_step_io *io, size_t rows, size_t query_heads,
                                            size_t kv_heads, size_t d, pkv_step_io *on_device)
{
    const size_t k = extent(io->k.dtype, rows, kv_heads, d, io->k.token_stride, io->k.head_stride);
    const size_t v = extent(io->v.dtype, rows, kv_heads, d, io->v.token_stride, io->v.head_stride);
    const size_t q =
        extent(io->q.dtype, rows, query_heads, d, io->q.token_stride, io->q.head_stride);
    const size_t out =
        extent(io->out.dtype, rows, query_heads, d, io->out.token_stride, io->out.head_stride);
    const bool attends = io->out.data != NULL;
    struct operands *operands;

    *on_device = *io;
    if (!io->k.data || !io->v.data || k == 0 || v == 0 ||
        (attends && (!io->q.data || q == 0 || out == 0)) || (io->lse && !attends))
        return NULL;
    operands = new struct operands();
    require(cudaStreamCreateWithFlags(&operands->stream, cudaStreamNonBlocking));
    on_device->k.data = upload(operands, &operands->k, io->k.data, k);
    on_device->v.data = upload(operands, &operands->v, io->v.data, v);
    if (attends) {
        on_device->q.data = upload(operands, &operands->q, io->q.data, q);
        on_device->out.data = upload(operands, &operands->out, io->out.data, out);
    }
    if (io->lse)
        on_device->lse = (float *)upload(operands, &operands->lse, io->lse,
                                         rows * query_heads * sizeof *io->lse);
    require(cudaStreamSynchronize(operands->stream));
    return operands;
}

static void refresh(struct operand *operand, const void *data, cudaStream_t stream)
{
    if (operand->block)
        require(cudaMemcpyAsync(operand->block + operand->shift, data, operand->bytes,
                                cudaMemcpyHostToDevice, stream));
}

extern "C" void operands_refresh(struct operands *operands, const pkv_step_io *io, void *stream)
{
    refresh(&operands->q, io->q.data, (cudaStream_t)stream);
    refresh(&operands->k, io->k.data, (cudaStream_t)stream);
    refresh(&operands->v, io->v.data, (cudaStream_t)stream);
}

extern "C" void operands_fetch(struct operands *operands, const pkv_step_io *io)
{
    download(operands, &operands->out, io->out.data);
    download(operands, &operands->lse, io->lse);
    require(cudaStreamSynchronize(operands->stream));
}

/* The device may have failed since. */
extern "C" void operands_close(struct operands *operands)
{
    for (struct operand *operand :
         {&operands->q, &operands->k, &operands->v, &operands->out, &operands->lse})
        cudaFree(operand->block);
    cudaStreamDestroy(operands->stream);
    delete operands;
}

extern "C" void operands_download(struct operands *operands, const pkv_step_io *io)
{
    operands_fetch(operands, io);
    operands_close(operands);
}
