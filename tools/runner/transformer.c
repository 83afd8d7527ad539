/* SPDX-License-Identifier: MIT */
/* The steps of a decoder-only transformer whose KV cache a policy holds. */
#include "transformer.h"

#include <stdlib.h>

#include "forward.h"

struct transformer {
    const struct model *model;
    struct transformer_options options;
    const struct forward_operations *operations;
    struct forward *forward;
};

bool transformer_open(const struct model *model, const struct transformer_options *options,
                      struct transformer **transformer, struct error *error)
{
    const struct forward_cpu_options on_cpu = {options->threads, options->isa, options->exact};
    struct transformer *t = calloc(1, sizeof *t);
    bool done;

    *transformer = NULL;
    if (t == NULL)
        return error_set(error, "out of memory for the transformer");
    t->model = model;
    t->options = *options;
    if (options->device != NULL) {
        t->operations = options->device->operations->forward;
        done = device_open_forward(options->device, model, options->threads, options->exact,
                                   &t->forward, error);
    } else {
        t->operations = &forward_cpu;
        done = forward_cpu_open(model, &on_cpu, &t->forward, error);
    }
    if (!done) {
        free(t);
        return false;
    }
    *transformer = t;
    return true;
}

void transformer_close(struct transformer *transformer)
{
    if (transformer == NULL)
        return;
    transformer->operations->close(transformer->forward);
    free(transformer);
}

/* One layer's attention: the first store's output, if it is wanted, and every store's K and V. */
static bool store_layer(struct kv_store *const *stores, size_t store_count,
                        const struct kv_layer *io, struct error *error)
{
    struct kv_layer others = *io;
    pkv_step_io on_device;

    others.out = NULL;
    if (io->on_device != NULL) {
        on_device = *io->on_device;
        on_device.out = (pkv_output){NULL, PKV_F32, 0, 0};
        others.on_device = &on_device;
    }
    for (size_t i = 0; i < store_count; i++) {
        if (!kv_store_layer(stores[i], i == 0 ? io : &others, error))
            return false;
    }
    return true;
}

static bool run_layers(struct transformer *t, struct kv_store *const *stores, size_t store_count,
                       struct kv_layer *io, struct error *error)
{
    const size_t layers = t->model->layer_count;

    for (io->layer = 0; io->layer < layers; io->layer++) {
        if (!t->operations->before(t->forward, io, error) ||
            !store_layer(stores, store_count, io, error) ||
            !t->operations->after(t->forward, io, error))
            return false;
        if (t->options.layer_done != NULL &&
            !t->options.layer_done(t->options.opaque, io->layer + 1, layers))
            return error_set(error, "interrupted");
    }
    return true;
}

/* `logits` and `token` are what predict() takes. */
static bool step(struct transformer *t, struct kv_store *const *stores, size_t store_count,
                 const int32_t *tokens, size_t count, float *logits, int32_t *token,
                 struct error *error)
{
    const struct model *m = t->model;
    struct kv_layer io = {.position = kv_store_tokens(stores[0]), .count = count};
    bool plain_k = false, hidden = false, done = false;

    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || (size_t)tokens[i] >= m->vocabulary)
            return error_set(error, "token %zu: id %ld is not in the vocabulary of %zu", i,
                             (long)tokens[i], m->vocabulary);
    }
    for (size_t i = 0; i < store_count; i++) {
        plain_k = plain_k || stores[i]->operations->reads_plain_k;
        hidden = hidden || stores[i]->operations->reads_hidden;
    }
    for (size_t i = 0; i < store_count; i++) {
        if (!kv_store_begin(stores[i], count, error))
            goto out;
    }
    if (!t->operations->begin(t->forward, tokens, plain_k, hidden, &io, error) ||
        !run_layers(t, stores, store_count, &io, error) ||
        !t->operations->predict(t->forward, &io, logits, token, error))
        goto out;
    done = true;
    for (size_t i = 0; i < store_count && done; i++)
        done = kv_store_end(stores[i], error);
    if (done && t->operations->finish != NULL)
        done = t->operations->finish(t->forward, error);
out:
    for (size_t i = 0; i < store_count; i++)
        kv_store_abort(stores[i]);
    return done;
}

bool transformer_step_shared(struct transformer *t, struct kv_store *const *stores,
                             size_t store_count, const int32_t *tokens, size_t count, float *logits,
                             struct error *error)
{
    return step(t, stores, store_count, tokens, count, logits, NULL, error);
}

bool transformer_step(struct transformer *t, struct kv_store *store, const int32_t *tokens,
                      size_t count, float *logits, struct error *error)
{
    return step(t, &store, 1, tokens, count, logits, NULL, error);
}

bool transformer_next(struct transformer *t, struct kv_store *store, const int32_t *tokens,
                      size_t count, int32_t *next, struct error *error)
{
    return step(t, &store, 1, tokens, count, NULL, next, error) &&
           (*next >= 0 || error_set(error, "a logit is not a number"));
}
