/* SPDX-License-Identifier: MIT */
/* K and V of the tokens that are left, of each head its own, for policies that evict by scores. */
#ifndef PUZZLEKV_TOOLS_POLICIES_KEPT_ROWS_H
#define PUZZLEKV_TOOLS_POLICIES_KEPT_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dense_rows.h"

struct kept_rows {
    struct dense_rows rows; /* row i of a head: its kept token number i, by position */
    size_t count;           /* rows of every head; those of an open step come behind them */
    size_t *positions;      /* [layers, kv_heads, capacity], of the rows' tokens */
    uint64_t *order;        /* [capacity], scratch */
    size_t bytes;           /* allocated */
};

/* For options->max_tokens rows of each head, fewer than 2^32. */
bool kept_rows_open(struct kept_rows *kept, const struct kv_store_options *options,
                    struct error *error);

/* Accepts one that is all zero. */
void kept_rows_close(struct kept_rows *kept);

/* Appends the layer's new tokens, as dense_rows_append(). */
bool kept_rows_append(struct kept_rows *kept, const struct kv_layer *io, struct error *error);

/* Evicts, of the first `candidates` of a head's `rows` rows, all but the `most` with the largest
 * scores; of equal ones the later stay. What stays moves up, and so do its scores [rows]; none is
 * negative. `most` <= `candidates`. */
void kept_rows_evict(struct kept_rows *kept, size_t layer, size_t kv_head, size_t rows,
                     size_t candidates, size_t most, float *scores);

/* As kv_store_retained(). */
size_t kept_rows_retained(const struct kept_rows *kept, size_t layer, size_t kv_head,
                          size_t *positions);

#endif
