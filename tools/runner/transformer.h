/* SPDX-License-Identifier: MIT */
/* The forward pass of a decoder-only transformer whose KV cache is a pkv_cache. */
#ifndef PUZZLEKV_TOOLS_RUNNER_TRANSFORMER_H
#define PUZZLEKV_TOOLS_RUNNER_TRANSFORMER_H

#include <puzzlekv.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "model.h"

struct transformer_options {
    unsigned threads; /* >= 1 */
    const char *isa;  /* of the matrix products: what pkv_cache_isa() says */
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

/* Sets the fields of `config` that the model decides: layers, heads, head_dim. */
void transformer_describe(const struct model *model, pkv_config *config);

/*
 * Feeds `count` (>= 1) tokens to the sequence `seq` of `cache`, which was opened with what
 * transformer_describe() set, as one step, and computes the logits [vocabulary] that follow the
 * last of them; `logits` may be NULL. Positions continue from pkv_seq_tokens(). A failure leaves
 * the sequence as it was.
 */
bool transformer_step(struct transformer *transformer, pkv_cache *cache, pkv_seq *seq,
                      const int32_t *tokens, size_t count, float *logits, struct error *error);

#endif
