/* SPDX-License-Identifier: MIT */
/* K and V of every token in f32, what most policies attend: exact, or as they would be read back.
 */
#ifndef PUZZLEKV_TOOLS_POLICIES_DENSE_ROWS_H
#define PUZZLEKV_TOOLS_POLICIES_DENSE_ROWS_H

#include <stdbool.h>
#include <stddef.h>

#include "policy.h"

struct dense_rows {
    const struct model *model;
    pkv_dtype dtype;
    unsigned threads;
    size_t capacity; /* rows of each head */
    size_t bytes;    /* allocated */
    float *k, *v;    /* [layers, kv_heads, capacity, head_dim] */
};

/* For options->max_tokens tokens; memory is taken as they are written. */
bool dense_rows_open(struct dense_rows *rows, const struct kv_store_options *options,
                     struct error *error);

/* Accepts one that is all zero. */
void dense_rows_close(struct dense_rows *rows);

/* Row 0 of a head. */
float *dense_rows_k(const struct dense_rows *rows, size_t layer, size_t kv_head);
float *dense_rows_v(const struct dense_rows *rows, size_t layer, size_t kv_head);

/* Writes the layer's k and v, rounded to the storage type, from row `at` on, where there is room.
 * Fails if one of them is not finite or overflows the type. */
bool dense_rows_append(struct dense_rows *rows, const struct kv_layer *io, size_t at,
                       struct error *error);

/* Attends the rows from `first` to below `cached` and the new ones, which have been appended at
 * `cached`, if the layer's out is wanted. */
bool dense_rows_attend(const struct dense_rows *rows, const struct kv_layer *io, size_t first,
                       size_t cached, struct error *error);

/* As dense_rows_attend() from row 0 on, and adds to masses [kv_heads, capacity] what the new
 * queries from number `from` on give to each row, as struct dense_attention has it; also if out is
 * not wanted. */
bool dense_rows_attend_masses(const struct dense_rows *rows, const struct kv_layer *io,
                              size_t cached, float *masses, size_t from, struct error *error);

/* What a policy's store begins with that keeps every token so. */
struct dense_store {
    struct kv_store store;
    struct dense_rows rows;
};

/* A store of `size` bytes, the rest of them zero; NULL with an error. */
void *dense_store_open(size_t size, const struct kv_store_operations *operations,
                       const struct kv_store_options *options, struct error *error);

/* Operations: closes a store that owns nothing else; appends and attends all rows. */
void dense_store_close(struct kv_store *store);
bool dense_store_layer(struct kv_store *store, const struct kv_layer *io, struct error *error);

#endif
