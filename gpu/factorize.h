/* SPDX-License-Identifier: MIT */
/* Pages to factors. */
#ifndef PUZZLEKV_GPU_FACTORIZE_H
#define PUZZLEKV_GPU_FACTORIZE_H

#include "gpu.h"

/* Asks for scratch, or sets the message. factorize_close follows, also after a failure. */
pkv_status factorize_open(struct backend *backend);
void factorize_close(struct backend *backend);

/* More scratch for a step that takes several tokens an item, where it has use for it, which stays
 * until a step has none; others do with the backend's, and can be captured. */
pkv_status factorize_step_begin(struct backend *backend);

/* Queues the factor jobs of a layer. */
pkv_status factorize_run(struct backend *backend, size_t layer, const pkv_step_io *io);

/* The message of a layer's factor fault in a step of that plan. */
pkv_status factorize_fault(struct backend *backend, const struct backend_plan *plan, size_t layer,
                           unsigned long long fault);

/* Once the open step's work is done: the wall seconds of it, 0 where a graph did it. */
double factorize_seconds(const struct backend *backend);

#endif
