/* SPDX-License-Identifier: MIT */
/* Operands of a step that lie in the host's memory, for a cache that wants them on the device. */
#ifndef PUZZLEKV_TESTS_CUDA_HOST_OPERANDS_H
#define PUZZLEKV_TESTS_CUDA_HOST_OPERANDS_H

#include "puzzlekv.h"

#ifdef __cplusplus
extern "C" {
#endif

struct operands;

/* Copies to the device and fills `on_device`. NULL where `io` is invalid in a way that leaves
 * nothing to copy: the library is to see it as it is. */
struct operands *operands_upload(const pkv_step_io *io, size_t rows, size_t query_heads,
                                 size_t kv_heads, size_t head_dim, pkv_step_io *on_device);

/* Queues other rows to the same places on the stream of the steps that read them, so behind those
 * that are queued there. `io` may change when it returns. */
void operands_refresh(struct operands *operands, const pkv_step_io *io, void *stream);

/* Copies what the layer has put out to where `io` wants it. */
void operands_fetch(struct operands *operands, const pkv_step_io *io);
void operands_close(struct operands *operands);

/* Both. */
void operands_download(struct operands *operands, const pkv_step_io *io);

#ifdef __cplusplus
}
#endif

#endif
