/* SPDX-License-Identifier: MIT */
/* Checked configurations, and the bytes and slots that follow from them. */
#ifndef PUZZLEKV_LIB_STORAGE_H
#define PUZZLEKV_LIB_STORAGE_H

#include "message.h"
#include "pages.h"

/* Bytes cover all layers and KV heads, K and V. Every product of a count of slots or tokens up to
 * the configured capacity with these fits ptrdiff_t. */
struct storage {
    size_t token_bytes;  /* of one token in a dense page */
    size_t factor_bytes; /* of one factorized page; 0 without factors */
    size_t dense_slots;  /* at most UINT32_MAX, as factor_slots */
    size_t factor_slots;
};

bool storage_dtype_valid(pkv_dtype dtype);

struct page_policy storage_policy(const pkv_config *config);

/* r_K and r_V of one layer; 0 without factors. */
size_t storage_rank_k(const pkv_config *config, size_t layer);
size_t storage_rank_v(const pkv_config *config, size_t layer);

/* A copy of the caller's configuration, of whatever version. `config` is not NULL; `theirs` may be.
 * Errors: PKV_ERROR_ARGUMENT. */
pkv_status storage_read_config(const pkv_config *theirs, pkv_config *config,
                               struct message *message);

/* Checks every field but `backend` and `isa`. On PKV_ERROR_ARGUMENT `message` begins with the name
 * of the field. */
pkv_status storage_of(const pkv_config *config, struct storage *storage, struct message *message);

/* Payload of a page with `tokens` valid tokens in a slot of `kind`. */
size_t storage_page_bytes(const struct storage *storage, enum slot_kind kind, size_t tokens);

#endif
