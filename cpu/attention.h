/* SPDX-License-Identifier: MIT */
/*
 * Attention of a step's new tokens over mixed pages and, causally, over each other.
 *
 * The query heads of one KV head and the tokens of one query block are the rows of every product.
 * What a block attends is cut into fixed runs: RUN_PAGES cached pages each, then RUN_PAGES blocks
 * of new tokens each. A run's state (m, l, o) of Eq. 4 is computed from nothing, and the states
 * are merged in ascending order (Eq. 5), whether one thread does all runs of a block or each run
 * falls to another thread: the bits are the same.
 */
#ifndef PUZZLEKV_CPU_ATTENTION_H
#define PUZZLEKV_CPU_ATTENTION_H

#include "cpu.h"

/* Cuts the open step into units and lays out and allocates what belongs to it but the threads'
 * scratch, whose size is then layout.floats. attention_step_close takes it back, also after a
 * failure. */
pkv_status attention_step_begin(struct backend *backend);
void attention_step_close(struct backend *backend);

/* Attends with the queries of `io`, once K and V are rounded. */
void attention_run(struct backend *backend, size_t layer, const pkv_step_io *io);

#endif
