/* SPDX-License-Identifier: MIT */
/* What computes the layers of a transformer but for their attention, which is the stores': the CPU,
 * or a device by way of a module. */
#ifndef PUZZLEKV_TOOLS_RUNNER_FORWARD_H
#define PUZZLEKV_TOOLS_RUNNER_FORWARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "../policies/policy.h"
#include "model.h"

/* One calling thread at a time. Its size follows the longest step taken, not the context. */
struct forward;

/* Of one step these are called in their order, the two in the middle for each layer. A device only
 * queues what they do: what failed there shows when a store's step ends. */
struct forward_operations {
    void (*close)(struct forward *forward);

    /* Takes io->count tokens, all in the vocabulary, at io->position, and sets the operands of
     * `io`: `plain_k` and `hidden` if stores read them, which those on a device do not. */
    bool (*begin)(struct forward *forward, const int32_t *tokens, bool plain_k, bool hidden,
                  struct kv_layer *io, struct error *error);

    /* Fills the operands of layer io->layer; takes the output of its attention. */
    bool (*before)(struct forward *forward, const struct kv_layer *io, struct error *error);
    bool (*after)(struct forward *forward, const struct kv_layer *io, struct error *error);

    /* What follows the last token: the logits [vocabulary], and the token with the largest of them,
     * the lowest id on ties, -1 if one is NaN; either may be NULL. */
    bool (*predict)(struct forward *forward, const struct kv_layer *io, float *logits,
                    int32_t *token, struct error *error);

    /* NULL, or what a device adds. */
    const struct forward_queue *queue;
};

/* A device queues: what predict() is to give is on its way from fetch() on, which is called after
 * it, and there when wait() returns. */
struct forward_queue {
    bool (*fetch)(struct forward *forward, float *logits, int32_t *token, struct error *error);
    bool (*wait)(struct forward *forward, struct error *error);

    /* What is queued in between, from the first layer to predict(), which then makes logits and
     * token whatever it is asked for, is kept in a graph and not done. It serves steps of the same
     * stores and length, after begin(), until a step is longer than all before. When it fails, and
     * with `graph` NULL, nothing is kept. */
    bool (*capture_begin)(struct forward *forward, struct error *error);
    bool (*capture_end)(struct forward *forward, void **graph, struct error *error);
    bool (*launch)(struct forward *forward, void *graph, struct error *error);
    void (*free_graph)(struct forward *forward, void *graph);
};

struct forward_cpu_options {
    unsigned threads; /* >= 1 */
    const char *isa;  /* of the matrix products: what machine_isa() says */
    bool exact;       /* activations stay f32, see products_multiply() */
};

/* `model` was opened with weights and outlives it. */
bool forward_cpu_open(const struct model *model, const struct forward_cpu_options *options,
                      struct forward **forward, struct error *error);
extern const struct forward_operations forward_cpu;

/* Bytes that it grows to, chiefly, with steps of up to `tokens`; SIZE_MAX if that overflows. Those
 * of weights that are laid out anew are counted if the model has weights. */
size_t forward_cpu_bytes(const struct model *model, const char *isa, size_t tokens);

#endif
