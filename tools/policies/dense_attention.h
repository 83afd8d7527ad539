/* SPDX-License-Identifier: MIT */
/* Exact attention over K and V in f32, for policies that are not libpuzzlekv's. */
#ifndef PUZZLEKV_TOOLS_POLICIES_DENSE_ATTENTION_H
#define PUZZLEKV_TOOLS_POLICIES_DENSE_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"
#include "../runner/model.h"

/*
 * KV head h has rows[h] rows of K and V: those kept, then the `count` new ones; row i is
 * k[h] + i head_dim, and v[h] + i head_dim. New query i attends all but the last count - 1 - i of
 * them. Query head g reads KV head g / (query_heads / kv_heads); the scale is 1/sqrt(head_dim).
 */
struct dense_attention {
    const struct model *model; /* its heads and head_dim are read */
    unsigned threads;
    size_t count;
    const float *q;        /* [count, query_heads, head_dim] */
    const float *const *k; /* [kv_heads] */
    const float *const *v;
    const size_t *rows; /* [kv_heads], each >= count */
    float *out;         /* [count, query_heads, head_dim]; NULL: not wanted */

    /* NULL, or [kv_heads]: for each head [rows[h]] sums, to which the probabilities of the new
     * queries from number `mass_from` on are added, summed over the query heads that read it. */
    float *const *mass;
    size_t mass_from;
};

/* The result does not depend on the number of threads. Fails without memory. */
bool dense_attention(const struct dense_attention *attention, struct error *error);

#endif
