/* SPDX-License-Identifier: MIT */
/* Asymmetric quantisation of groups of values with an f16 scale and an f16 zero each. */
#ifndef PUZZLEKV_TOOLS_POLICIES_QUANTISE_H
#define PUZZLEKV_TOOLS_POLICIES_QUANTISE_H

#include <stdbool.h>
#include <stddef.h>

#include "policy.h"

/* A scale and a zero. */
#define QUANTISE_GROUP_BYTES 4

/*
 * Replaces `count` values, `stride` apart, by what their codes of `bits` bits give back:
 *     zero = f16(min x),  scale = f16((max x - min x) / (2^bits - 1)),
 *     code = round-half-even((x - zero) / scale) in 0 .. 2^bits - 1,  x' = code scale + zero.
 * They have passed quantise_check().
 */
void quantise_group(float *x, size_t count, size_t stride, unsigned bits);

/* Fails if a K or V of the layer has a magnitude that f16 does not reach. */
bool quantise_check(const struct kv_store *store, const struct kv_layer *io, struct error *error);

#endif
