/* SPDX-License-Identifier: MIT */
/* The forward pass of a decoder-only transformer whose KV cache a policy holds. */
#ifndef PUZZLEKV_TOOLS_RUNNER_TRANSFORMER_H
#define PUZZLEKV_TOOLS_RUNNER_TRANSFORMER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "../policies/policy.h"
#include "cuda_device.h"
#include "model.h"

struct transformer_options {
    unsigned threads; /* >= 1 */
    const char *isa;  /* of the CPU's matrix products: what machine_isa() says */
    /* Activations stay f32, see products_multiply(); on a device weights too, which without it are
     * rounded to bf16, as activations are between layers' parts. */
    bool exact;
    /* NULL: the CPU. Else the stores are on it as well; it outlives the transformer. */
    struct device *device;
    /* NULL, or called after each layer of a step with the number of layers done; when it returns
     * false the step is aborted and transformer_step fails with the text "interrupted". */
    bool (*layer_done)(void *opaque, size_t done, size_t layers);
    void *opaque;
};

/* One calling thread at a time. Its size follows the longest step taken, not the context. */
struct transformer;

/* `model` was opened with weights and outlives the transformer. */
bool transformer_open(const struct model *model, const struct transformer_options *options,
                      struct transformer **transformer, struct error *error);

/* Accepts NULL. */
void transformer_close(struct transformer *transformer);

/*
 * Feeds `count` (>= 1) tokens to the store as one step, and computes the logits [vocabulary] that
 * follow the last of them; `logits` may be NULL. Positions continue from kv_store_tokens(). A
 * failure leaves the store as it was.
 */
bool transformer_step(struct transformer *transformer, struct kv_store *store,
                      const int32_t *tokens, size_t count, float *logits, struct error *error);

/* The same, and the token with the largest logit, the lowest id on ties; fails if a logit is NaN,
 * when the tokens are in the store all the same. */
bool transformer_next(struct transformer *transformer, struct kv_store *store,
                      const int32_t *tokens, size_t count, int32_t *next, struct error *error);

/*
 * The same for several stores (>= 1) with one forward pass: stores[0] attends, the others take its
 * keys, values and queries. They hold equally many tokens; with more than one store that is none,
 * and no policy has its `own_prefill`. So after the first step, which is attended exactly, each
 * holds what it would hold had it been fed alone. A failure leaves the stores as they were, but
 * for one at the very end, in a store's own kv_store_end(): then they are fit to be closed only.
 */
bool transformer_step_shared(struct transformer *transformer, struct kv_store *const *stores,
                             size_t store_count, const int32_t *tokens, size_t count, float *logits,
                             struct error *error);

#endif
