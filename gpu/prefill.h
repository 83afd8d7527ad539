/* SPDX-License-Identifier: MIT */
/* Attention of an item's new tokens, two or more, with tensor cores, over pages in fragment order.
 */
#ifndef PUZZLEKV_GPU_PREFILL_H
#define PUZZLEKV_GPU_PREFILL_H

#include "gpu.h"

/* Queues the attention of a layer with fragments for the items of several new tokens alone. */
pkv_status prefill_run(struct backend *backend, size_t layer, const pkv_step_io *io);

#endif
