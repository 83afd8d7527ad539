/* SPDX-License-Identifier: MIT */
/*
 * Pages to factors: G = X X^T, its leading eigenvectors L, R = L^T X (Section 3.3 of the paper).
 * Everything is in f64 until L and R are rounded to the storage type.
 */
#ifndef PUZZLEKV_CPU_FACTORIZE_H
#define PUZZLEKV_CPU_FACTORIZE_H

#include "cpu.h"

/* Allocates what the open step's factor jobs need but scratch, and sets factorize_threads and
 * factorize_bytes. factorize_step_close takes it back, also after a failure. */
pkv_status factorize_step_begin(struct backend *backend);
void factorize_step_close(struct backend *backend);

/* Factorizes the open step's factor jobs, once K and V are rounded. PKV_ERROR_SOLVER or
 * PKV_ERROR_VALUE names the first page, head, K or V that failed. */
pkv_status factorize_run(struct backend *backend, size_t layer);

#endif
