/* SPDX-License-Identifier: MIT */
/* Random keys and values whose pages have the spectrum of real ones. */
#ifndef PUZZLEKV_TOOLS_RANDOM_PAGES_H
#define PUZZLEKV_TOOLS_RANDOM_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

/* Tokens of a block: what has the spectrum. */
#define RANDOM_PAGE_TOKENS 32

/* The next of a sequence of 64 random bits (SplitMix64). */
uint64_t random_bits(uint64_t *state);

/* Fills x[count] with normal deviates. */
void random_normals(uint64_t *state, float *x, size_t count);

/*
 * Fills k and v [blocks * RANDOM_PAGE_TOKENS, heads, dim] (dim <= 1024). Each block of a head is
 * U S V^T with random orthonormal U and V, and has mean square 1. The squares of S, as shares of
 * their sum, are
 *     0.73 for keys, 0.37 for values, then what is left, falling as exp(-0.19 i) and exp(-0.16 i).
 * That is the median over 36 real pages each of SmolLM2-135M-Instruct (the library's test data),
 * share by share within 36 % but for the last two. The same seed gives the same numbers for any
 * number of threads.
 */
bool random_pages(uint64_t seed, size_t blocks, size_t heads, size_t dim, unsigned threads,
                  float *k, float *v, struct error *error);

#endif
