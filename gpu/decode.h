/* SPDX-License-Identifier: MIT */
/* Attention of an item's one new token, with tensor cores, over pages in fragment order. */
#ifndef PUZZLEKV_GPU_DECODE_H
#define PUZZLEKV_GPU_DECODE_H

#include "gpu.h"

/* Asks for scratch where a layer has fragments, or sets the message. decode_close follows, also
 * after a failure. */
pkv_status decode_open(struct backend *backend);
void decode_close(struct backend *backend);

/* Whether one launch has room for the open step, whose items may share pages: a graph's has to. */
bool decode_fits(const struct backend *backend);

/* Queues the attention of a layer with fragments for the items of one new token alone. While the
 * stream is captured, of any tokens that they may have; the step must fit. */
pkv_status decode_run(struct backend *backend, size_t layer, const pkv_step_io *io);

#endif
