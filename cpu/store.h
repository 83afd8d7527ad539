/* SPDX-License-Identifier: MIT */
/*
 * Where K and V lie. P tokens a page, d elements a head; matrices are row-major and follow each
 * other without gaps:
 *
 *     dense page    K^T [d, P], V [P, d]
 *     factor page   K, V, each as its codec stores it (codec.h)
 *     new tokens    per KV head the blocks of all items one after the other; of one block of n
 *                   tokens K^T [d, n] in new_k, V [n, d] in new_v
 *
 * so that each is the right operand of a product over its rows, and one head's pages follow each
 * other in address order. Pools and scratch are readable KERNELS_PAD floats past
 * their end.
 */
#ifndef PUZZLEKV_CPU_STORE_H
#define PUZZLEKV_CPU_STORE_H

#include "cpu.h"

/* The parts of one page of one layer and KV head. */
struct dense_page {
    struct matrix k; /* K^T */
    struct matrix v;
};

/* Reserves the pools, or sets the message. store_close takes them back, also after a failure. */
pkv_status store_open(struct backend *backend);
void store_close(struct backend *backend);

struct dense_page store_dense(const struct backend *backend, size_t layer, size_t kv_head,
                              uint32_t slot);
struct factor_page store_factors(const struct backend *backend, size_t layer, size_t kv_head,
                                 uint32_t slot);
/* The open step's block that begins with new token block * BLOCK_TOKENS of the item. */
struct dense_page store_block(const struct backend *backend, const struct backend_item *item,
                              size_t kv_head, size_t block);

/* Scratch of the open step; store_step_close takes it back, also after a failure. */
pkv_status store_step_begin(struct backend *backend);
void store_step_close(struct backend *backend);

/* Rounds K and V of `io` to the storage type into the open step's blocks. PKV_ERROR_VALUE names
 * the first element that is not finite then. */
pkv_status store_round(struct backend *backend, size_t layer, const pkv_step_io *io);

/* Copies and appends what the open step's dense jobs say. */
void store_append(struct backend *backend, size_t layer);

/* K^T or V^T [d, P] of a page that the open step factorizes. */
void store_gather(const struct backend *backend, size_t layer, size_t kv_head,
                  const struct page_job *job, bool is_key, float *transposed);

/* Stores L [P, r] and R^T [d, r], rows of ld elements, of K or V of the page in `slot`; overwrites
 * them. False where the codec's form overflows. */
bool store_put_factors(const struct backend *backend, size_t layer, size_t kv_head, uint32_t slot,
                       bool is_key, float *left, float *right, size_t ld);

/* See struct backend_ops. */
void store_rebuild(const struct backend *backend, uint32_t factor_slot, uint32_t dense_slot);
void store_read(const struct backend *backend, struct page page, size_t layer, size_t kv_head,
                size_t tokens, enum page_part part, void *out);
void store_write(const struct backend *backend, struct page page, size_t layer, size_t kv_head,
                 size_t tokens, enum page_part part, const void *in);

#endif
