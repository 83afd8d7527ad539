/* SPDX-License-Identifier: MIT */
/* Attention of a step's new tokens over mixed pages and, causally, over each other. */
#ifndef PUZZLEKV_GPU_ATTENTION_H
#define PUZZLEKV_GPU_ATTENTION_H

#include "gpu.h"

/* Asks for scratch, or sets the message. attention_close follows, also after a failure. */
pkv_status attention_open(struct backend *backend);
void attention_close(struct backend *backend);

/* Queues a layer's attention. */
pkv_status attention_run(struct backend *backend, size_t layer, const pkv_step_io *io);

#endif
