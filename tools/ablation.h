/* SPDX-License-Identifier: MIT */
/* The policies that the paper's ablations compare, by name. */
#ifndef PUZZLEKV_TOOLS_ABLATION_H
#define PUZZLEKV_TOOLS_ABLATION_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

#define ABLATION_NAMES "ranks, pages, rope, precision"

/* Fails with an unknown name. */
bool ablation_check(const char *name, struct error *error);

#define ABLATION_MOST       26
#define ABLATION_TEXT_BYTES 48

/*
 * Writes what could be typed after --kv, the dense cache first, and returns how many there are:
 *
 * ranks      r_K and r_V from 12 to 20 in steps of 2, ordered by their sum (Table 13)
 * pages      pages of 16, 32 and 64 tokens, r_K = r_V, with the ratio that 32 tokens have with
 *            rank 16 (Table 12)
 * rope       keys factorized before and after RoPE, ranks (16, 16) (Table 14)
 * precision  direct quantisation, factors, and quantised factors (Table 3)
 */
size_t ablation_policies(const char *name, size_t head_dim,
                         char texts[ABLATION_MOST][ABLATION_TEXT_BYTES]);

#endif
