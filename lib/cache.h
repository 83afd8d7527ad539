/* SPDX-License-Identifier: MIT */
/* Caches, sequences and steps as the library sees them. */
#ifndef PUZZLEKV_LIB_CACHE_H
#define PUZZLEKV_LIB_CACHE_H

#include "backend.h"
#include "slots.h"
#include "storage.h"

struct pkv_seq {
    struct pkv_cache *cache;
    struct pkv_seq *previous; /* in creation order */
    struct pkv_seq *next;
    struct page *table; /* pages_count(tokens) entries are in use */
    size_t table_capacity;
    size_t tokens; /* T */
    bool in_step;
    /* Not PKV_OK: what a submitted step failed with, before which it had good_tokens. */
    pkv_status failed;
    size_t good_tokens;
};

/* Embedded in its cache; closed: zeroed but for `cache`. */
struct pkv_step {
    struct pkv_cache *cache;
    bool open;
    bool failed;
    size_t next_layer;
    size_t bytes_before;         /* allocated before begin */
    struct pkv_seq **sequences;  /* [plan.n_items] */
    struct backend_item *items;  /* [plan.n_items] */
    struct page_change *changes; /* of all items, one after the other */
    size_t n_changes;
    struct backend_plan plan;
};

struct pkv_cache {
    struct memory memory;
    struct message message;
    struct geometry geometry;
    size_t *ranks; /* rank_k, then rank_v of the geometry */
    struct storage storage;
    size_t max_sequences;
    size_t max_tokens;
    size_t max_step_tokens;
    size_t stored_most; /* no less than cache_stored_tokens(), without its walk over all pages */

    const struct backend_ops *ops;
    struct backend *backend;
    struct slots dense;
    struct slots factor;
    /* Per slot, for statistics: most tokens that a sequence has in it. 0 between calls. */
    uint16_t *dense_tokens;
    uint16_t *factor_tokens;
    void *page_scratch; /* a dense part of a page, or both factors of one */

    struct pkv_seq *first;
    struct pkv_seq *last;
    size_t n_sequences;
    struct pkv_step step;

    bool submits;                             /* steps are committed before they are computed */
    struct pkv_step submitted[MAX_SUBMITTED]; /* and not settled; the oldest first */
    size_t n_submitted;

    size_t transient_peak_bytes;
    uint64_t factorized_pages;
    double factorize_seconds;
    uint64_t capped_pages;
};

/* pkv_cache_open() with the backend given; config->backend is NULL or its name. */
pkv_status cache_open_with(const struct backend_ops *ops, const pkv_config *config,
                           pkv_cache **cache, char *message);

/* The pool of a kind other than SLOT_NONE. */
struct slots *cache_pool(struct pkv_cache *cache, uint32_t kind);

/* The form of a part of a page of a layer. */
struct part_form cache_part(const struct pkv_cache *cache, size_t layer, size_t tokens,
                            enum page_part part);

/* Drops one reference to a page's slot; nothing for SLOT_NONE. */
void cache_release_page(struct pkv_cache *cache, struct page page);

/* Tokens of all sequences; those in shared slots count once for each sequence. */
size_t cache_tokens(const struct pkv_cache *cache);

/* The same, but those in a shared slot count once. */
size_t cache_stored_tokens(struct pkv_cache *cache);

/*
 * Settles the submitted steps that are done; with `wait` all of them. Where one has failed its
 * sequences have, and all are settled. Returns the first failure, with its message.
 */
pkv_status cache_settle(struct pkv_cache *cache, bool wait);

/* Settles all steps. PKV_OK where none has failed and the sequence had not before, else a status
 * with the message. */
pkv_status sequence_settle(struct pkv_seq *seq);

/* PKV_OK, or for a sequence that has failed the status with a message. */
pkv_status sequence_check(const struct pkv_seq *seq);

/* Makes room for `pages` entries in the table. Errors: PKV_ERROR_MEMORY, without a message. */
pkv_status sequence_reserve(struct pkv_seq *seq, size_t pages);

#endif
