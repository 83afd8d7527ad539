/* SPDX-License-Identifier: MIT */
/* The contract between the library and a backend, which only stores, moves and computes. */
#ifndef PUZZLEKV_LIB_BACKEND_H
#define PUZZLEKV_LIB_BACKEND_H

#include "memory.h"
#include "message.h"
#include "pages.h"
#include "parts.h"

/* A validated configuration as a backend needs it; lives as long as the cache. */
struct geometry {
    size_t layers;
    size_t query_heads;
    size_t kv_heads;
    size_t head_dim; /* d */
    struct page_policy policy;
    const size_t *rank_k;  /* [layers]; 0 without factors */
    const size_t *rank_v;  /* [layers] */
    pkv_factors factors_k; /* how K of a factorized page is stored */
    pkv_factors factors_v;
    pkv_solver solver;
    pkv_dtype dtype;
    size_t element_bytes; /* of dtype */
    float softmax_scale;  /* never 0 */
};

/* What a cache has declared, and the slots that follow. */
struct capacity {
    size_t max_sequences;
    size_t max_tokens; /* of all sequences together, what forks share counted once */
    size_t max_step_tokens;
    size_t dense_slots;
    size_t factor_slots;
};

/* Where a cache is to be and how it is to run there, as in pkv_config. */
struct placement {
    const char *isa;
    unsigned threads;
    int device;
    void *stream;
};

/* What a step did, beside storing. */
struct step_report {
    double factorize_seconds; /* wall seconds spent on factorizing */
    /* Pages of one layer and KV head, K and V apart, that it left at the solver's sweep cap. */
    uint64_t capped_pages;
};

/* One sequence's part of a step. Everything is as at begin and stays valid until step_close. */
struct backend_item {
    const struct page *table; /* pages_count(tokens) entries */
    size_t tokens;            /* T at begin */
    size_t new_tokens;
    size_t first_row; /* its first row in q, k, v, out and lse */
    const struct page_change *changes;
    size_t n_changes;
};

/*
 * A step as decided by the library. For each change, layer by layer, the backend
 *   to DENSE:  copies cached_tokens from from.slot when to.slot differs, then appends the new rows;
 *   to FACTOR: factorizes the P tokens, the cached ones from from.slot (always SLOT_DENSE where
 *              cached_tokens > 0), the new ones straight from the caller's rounded rows.
 * It never writes a committed token of a slot that appears in a table, so that dropping a step
 * needs no undo. Attention reads the tables and the new rows, never the `to` slots.
 */
struct backend_plan {
    const struct backend_item *items;
    size_t n_items;
    size_t rows; /* new tokens of all items */
};

/* Steps that may be submitted and not yet settled. */
#define MAX_SUBMITTED 4

struct backend; /* one cache's instance; each backend defines it as it likes */

struct backend_ops {
    const char *name;

    /*
     * Reserves pools of `capacity`'s slots, counted in `memory`. `geometry`, `memory` and `message`
     * outlive the instance. On failure nothing stays allocated and `message` says why.
     */
    pkv_status (*open)(const struct geometry *geometry, const struct capacity *capacity,
                       const struct placement *placement, struct memory *memory,
                       struct message *message, struct backend **backend);
    void (*close)(struct backend *backend);

    const char *(*isa)(const struct backend *backend);
    /* Bytes of the pools as allocated. */
    size_t (*reserved_bytes)(const struct backend *backend);

    /* Allocates the scratch of one step; step_layer allocates nothing. */
    pkv_status (*step_begin)(struct backend *backend, const struct backend_plan *plan);
    /*
     * Checks and rounds K and V, attends, stores. Strides in `io` are already resolved (never 0),
     * pointers checked. On PKV_ERROR_VALUE or PKV_ERROR_SOLVER `message` names layer, KV head,
     * page and K or V of the first fault in layer, item, page, head order. Pages without new
     * tokens may be factorized, and fail, for all layers with the first. A backend that computes
     * beside its caller may leave that to step_end.
     */
    pkv_status (*step_layer)(struct backend *backend, size_t layer, const pkv_step_io *io);
    /* After the last layer: waits until everything is computed. Fails where a layer should have. */
    pkv_status (*step_end)(struct backend *backend, struct step_report *report);
    /* Frees the scratch, after commit and abort alike. */
    void (*step_close)(struct backend *backend);

    /* These three are NULL where everything is done when a call returns. */

    /* In place of all layers: the caller has a graph of them, captured in another step, compute
     * them. After a failure they may still come one by one. */
    pkv_status (*step_replay)(struct backend *backend);
    /* In place of step_end and step_close, without waiting. What the plan points to stays valid
     * until the step is settled. After a failure the step is still open. */
    pkv_status (*step_submit)(struct backend *backend);
    /* Returns and reports what step_end would have, of the oldest step that was submitted, and
     * forgets it. Without `wait` *done is false, and nothing happens, while it is under way. */
    pkv_status (*step_settle)(struct backend *backend, bool wait, bool *done,
                              struct step_report *report);

    /* Rebuilds a factorized page into a dense slot, all layers and heads: X = L R in f32,
     * rounded to the storage type. */
    pkv_status (*rebuild)(struct backend *backend, uint32_t factor_slot, uint32_t dense_slot);

    /* A part in the canonical form of parts.h. It must exist in a slot of the page's kind. */
    pkv_status (*read)(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                       size_t tokens, enum page_part part, void *out);
    /* The inverse, into a slot that is in no table. `in` is valid in the sense of parts_valid(). */
    pkv_status (*write)(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                        size_t tokens, enum page_part part, const void *in);
};

/* What a backend's module exports as `puzzlekv_module`. */
struct backend_module {
    const char *version; /* PKV_VERSION; another one may not know this header */
    const struct backend_ops *ops;
};

/* The CPU backend, in cpu/, and the CUDA backend, in gpu/, which is in a module of its own. */
extern const struct backend_ops backend_cpu;
extern const struct backend_ops backend_cuda;

#endif
