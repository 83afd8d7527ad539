/* SPDX-License-Identifier: MIT */
/* Pools, the plan of a step on the device, and everything that moves K and V. */
#ifndef PUZZLEKV_GPU_STORE_H
#define PUZZLEKV_GPU_STORE_H

#include "gpu.h"

/* Whether the current device can run the kernels of the module. */
cudaError_t store_find_kernel(void);

/* Reserves the pools, or sets the message. store_close takes them back, also after a failure. */
pkv_status store_open(struct backend *backend);
void store_close(struct backend *backend);

struct layer_view store_layer(const struct backend *backend, size_t layer);

/* Queues: the plan of the open step to the device; an empty report. */
pkv_status store_step_begin(struct backend *backend);

/* Queues: the step's report to the host. */
pkv_status store_fetch_report(struct backend *backend);

/* Queues: a look for the first element of K and V that is not finite once rounded, then what the
 * dense jobs say. */
pkv_status store_run(struct backend *backend, size_t layer, const pkv_step_io *io);

/* The message of a layer's value fault in a step of that plan. */
pkv_status store_fault(struct backend *backend, const struct backend_plan *plan, size_t layer,
                       unsigned long long fault);

/* See struct backend_ops. */
pkv_status store_rebuild(struct backend *backend, uint32_t factor_slot, uint32_t dense_slot);
pkv_status store_read(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                      size_t tokens, enum page_part part, void *out);
pkv_status store_write(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                       size_t tokens, enum page_part part, const void *in);

#endif
