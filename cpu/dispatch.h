/* SPDX-License-Identifier: MIT */
/* Which instruction set a cache uses. */
#ifndef PUZZLEKV_CPU_DISPATCH_H
#define PUZZLEKV_CPU_DISPATCH_H

#include "message.h"
#include "kernels.h"
#include "solver.h"

extern const struct kernels kernels_generic;
extern const struct kernels kernels_avx2;
extern const struct kernels kernels_avx512;
extern const struct kernels kernels_avx512_bf16; /* "avx512" too */
extern const struct kernels kernels_neon;

/* Most tables that one build can have. */
#define DISPATCH_MAX 4

/* The tables that this build has and this machine can run, "generic" first, the widest last.
 * Returns their number, at least 1. */
size_t dispatch_available(const struct kernels *available[DISPATCH_MAX]);

/* The last table named `isa`; NULL stands for the environment variable PUZZLEKV_ISA, and where that
 * is unset or empty for the widest. PKV_ERROR_UNSUPPORTED with a message that lists what there is.
 */
pkv_status dispatch_choose(const char *isa, const struct kernels **kernels,
                           struct message *message);

/* The solver of the same instruction set. */
const struct solver *dispatch_solver(const struct kernels *kernels);

#endif
