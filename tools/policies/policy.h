/* SPDX-License-Identifier: MIT */
/*
 * What holds the KV cache during a run: a policy, and the store that it opens for one sequence.
 *
 * A policy is one file, tools/policies/NAME.c, that defines `const struct policy policy_NAME`, and
 * one line in the table of policy.c. The transformer hands a store each layer's keys and values and
 * takes the output of attention from it:
 *
 *     kv_store_begin(store, n)                  n new tokens
 *     for each layer, ascending, once:
 *         kv_store_layer(store, &io)            attend, then take this layer's keys and values
 *     kv_store_end(store)  |  kv_store_abort(store)
 *
 * What is attended at a step: the tokens of earlier steps as the policy keeps them, and the new
 * ones, as rounded to the storage type, causally. A policy compresses at the end of a step, so the
 * first step, the prompt, is attended exactly, unless the policy says `own_prefill`.
 *
 * A store may compute with an f32 copy of what it would read back from what it stores; its
 * statistics count what it stores.
 */
#ifndef PUZZLEKV_TOOLS_POLICIES_POLICY_H
#define PUZZLEKV_TOOLS_POLICIES_POLICY_H

#include <puzzlekv.h>

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"
#include "../kv_spec.h"
#include "../runner/model.h"

struct kv_store;
struct device;

/* ---- What a policy declares ------------------------------------------------------------------ */

enum policy_key_kind {
    POLICY_COUNT,  /* a whole number from `least` to `most`, a multiple of `multiple` */
    POLICY_REAL,   /* a number from `least` to `most`; not 0 if `positive` */
    POLICY_CHOICE, /* one of `choices` */
    POLICY_FILE    /* the name of a file, without commas */
};

struct policy_key {
    const char *name;
    enum policy_key_kind kind;
    const char *preset; /* the default, as it would be typed; NULL: there is none */
    double least, most;
    size_t multiple; /* 0: of any */
    bool positive;
    const char *choices; /* "one|two" */
};

/* What a store is opened for. */
struct kv_store_options {
    const struct model *model; /* with weights; it outlives the store */
    pkv_dtype dtype;           /* what is stored dense is rounded to it */
    size_t max_tokens;
    size_t max_step_tokens; /* 0: max_tokens */
    unsigned threads;       /* >= 1 */
    /* NULL: the CPU. Else the device that it is on, which outlives the store: for specs that
     * pages_serve(). */
    const struct device *device;
};

/* A question that `bytes` answers: what a sequence of `tokens` tokens takes whose first step had
 * `prompt` of them and the others one each. Of the model only the geometry counts. */
struct policy_size {
    const struct model *model;
    pkv_dtype dtype;
    size_t prompt, tokens;
};

struct policy {
    const char *name;
    const char *summary;           /* half a line, for --help */
    const struct policy_key *keys; /* [key_count], in the order of the canonical text */
    size_t key_count;              /* at most KV_SPEC_KEYS */

    /* The policy's prompt is not attended exactly: it takes no part in a shared first step. */
    bool own_prefill;

    /* NULL, or checks what the keys' own ranges cannot, and drops defaults for which a typed key
     * stands; `text` is the spec, for messages, which begin with "--kv TEXT: ". */
    bool (*check)(struct kv_spec *spec, const char *text, struct error *error);
    /* NULL, or fits the spec to a model: sets values that follow from its geometry. Fails, and says
     * why, with a geometry that it cannot serve. Reads no weights. */
    bool (*resolve)(struct kv_spec *spec, const struct model *model, struct error *error);
    /* The closed form of the stored bytes. The spec is resolved. */
    bool (*bytes)(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                  struct error *error);
    /* Opens a store that begins with struct kv_store and sets its `operations`; the rest of that is
     * kv_store_open()'s. */
    bool (*open)(const struct kv_spec *spec, const struct kv_store_options *options,
                 struct kv_store **store, struct error *error);
};

extern const struct policy policy_puzzle;
extern const struct policy policy_puzzle_int4;
extern const struct policy policy_raw;
extern const struct policy policy_static;
extern const struct policy policy_int4;
extern const struct policy policy_int3;
extern const struct policy policy_global_svd;
extern const struct policy policy_xkv;
extern const struct policy policy_h2o;
extern const struct policy policy_streaming;
extern const struct policy policy_snapkv;
extern const struct policy policy_kivi;
extern const struct policy policy_palu;
extern const struct policy policy_ojakv;

/* All of them, in the order in which they are listed. */
extern const struct policy *const policies[];
extern const size_t policy_count;

/* ---- Stores ---------------------------------------------------------------------------------- */

/* One layer of a step: rows are the new tokens, in order. */
struct kv_layer {
    size_t layer;
    size_t position;      /* of row 0; row i is at position + i */
    size_t count;         /* rows */
    const float *hidden;  /* [count, hidden], the normed input of the projections; may be NULL */
    const float *q;       /* [count, query_heads, head_dim], after RoPE */
    const float *plain_k; /* [count, kv_heads, head_dim], k before RoPE; may be NULL */
    const float *k;       /* [count, kv_heads, head_dim], after RoPE */
    const float *v;       /* [count, kv_heads, head_dim] */
    float *out;           /* [count, query_heads, head_dim]; NULL: store without attending */
    /* NULL, or for a store on a device instead of all these: its operands there. */
    const pkv_step_io *on_device;
};

struct kv_stats {
    size_t tokens;
    size_t payload_bytes;  /* what is stored, exactly: bases, scales and accumulators included */
    size_t raw_bytes;      /* the same tokens dense: layers kv_heads tokens 2 head_dim b */
    size_t reserved_bytes; /* what the store has allocated to keep it */
    size_t transient_peak_bytes;   /* what a step held beyond that, at most */
    double factorize_seconds;      /* wall time of compression */
    bool has_pages;                /* libpuzzlekv's: there are */
    size_t pages[PKV_PAGE_STATES]; /* this many in each state */
};

/* What a store implements. */
struct kv_store_operations {
    /* It reads these members of struct kv_layer, which may be NULL where no store does. */
    bool reads_hidden, reads_plain_k;

    void (*close)(struct kv_store *store);
    /* NULL: there is nothing to do. `count` is within the store's capacity. */
    bool (*begin)(struct kv_store *store, size_t count, struct error *error);
    bool (*layer)(struct kv_store *store, const struct kv_layer *io, struct error *error);
    /* NULL: never. Whether a graph in which the layers of another step of one token were captured
     * may stand for those of this one: see pkv_step_replay(). */
    bool (*replay)(struct kv_store *store);
    /* NULL: there is nothing to do. On failure abort follows. */
    bool (*end)(struct kv_store *store, struct error *error);
    /* NULL: there is nothing to do. Leaves what the store holds as before begin. */
    void (*abort)(struct kv_store *store);
    /* Keeps the first *tokens (fewer than there are) tokens, or as many of them as it can without
     * changing them, be it none, and sets *tokens to their number. */
    bool (*rewind)(struct kv_store *store, size_t *tokens, struct error *error);
    /* Fills payload_bytes and what else is not 0 but tokens and raw_bytes, which are filled. */
    bool (*stats)(struct kv_store *store, struct kv_stats *stats, struct error *error);
    /* NULL: it keeps every token. As kv_store_retained(). */
    size_t (*retained)(const struct kv_store *store, size_t layer, size_t kv_head,
                       size_t *positions);
};

/* One calling thread at a time. The same input gives the same bits for any number of threads. */
struct kv_store {
    const struct kv_store_operations *operations;
    const struct policy *policy;
    struct kv_store_options options; /* max_step_tokens is not 0 */
    size_t tokens;                   /* committed */
    size_t step;                     /* new tokens of the open step; 0: none is open */
};

/* `spec` has been resolved for the model; it need not outlive the store. */
bool kv_store_open(const struct kv_spec *spec, const struct kv_store_options *options,
                   struct kv_store **store, struct error *error);

/* Accepts NULL. */
void kv_store_close(struct kv_store *store);

/* Fails if there is no room for `count` (>= 1) more tokens. */
bool kv_store_begin(struct kv_store *store, size_t count, struct error *error);
bool kv_store_layer(struct kv_store *store, const struct kv_layer *io, struct error *error);

/* Whether a graph stands for the open step's layers from now on. */
bool kv_store_replay(struct kv_store *store);

/* On failure the store is as it was before begin. */
bool kv_store_end(struct kv_store *store, struct error *error);

/* Leaves the store as before begin; does nothing if no step is open. */
void kv_store_abort(struct kv_store *store);

/* Makes the store forget what comes after the first `tokens` tokens, and of these too what it
 * cannot keep unchanged: kv_store_tokens() tells how many are left, and the caller feeds the others
 * again. 0 makes it as new. */
bool kv_store_rewind(struct kv_store *store, size_t tokens, struct error *error);

size_t kv_store_tokens(const struct kv_store *store);

bool kv_store_stats(struct kv_store *store, struct kv_stats *stats, struct error *error);

/* The positions, ascending, of the tokens that one head of a layer has not evicted, in
 * positions[kv_store_tokens()]. Returns how many there are. No step is open. */
size_t kv_store_retained(const struct kv_store *store, size_t layer, size_t kv_head,
                         size_t *positions);

/* ---- What policies share --------------------------------------------------------------------- */

/* Bytes of an element of the storage type. */
size_t policy_element_bytes(pkv_dtype dtype);

/* layers kv_heads tokens 2 head_dim b */
size_t policy_raw_bytes(const struct model *model, pkv_dtype dtype, size_t tokens);

#endif
