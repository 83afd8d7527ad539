/* SPDX-License-Identifier: MIT */
/* The steps of a decoder-only transformer whose KV cache a policy holds. */
#include "transformer.h"

#include <stdlib.h>

#include "forward.h"

/* What decodes the tokens of one store on a device. */
struct decoder {
    const struct kv_store *store;
    void *graph; /* NULL: its first token was computed without */
};

struct transformer {
    const struct model *model;
    struct transformer_options options;
    const struct forward_operations *operations;
    struct forward *forward;
    size_t longest; /* step so far */
    struct decoder *decoders;
    size_t decoder_count;
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

static void forget_graph(struct transformer *t, struct decoder *decoder)
{
    if (decoder->graph != NULL)
        t->operations->queue->free_graph(t->forward, decoder->graph);
    decoder->graph = NULL;
}

static void forget_graphs(struct transformer *t)
{
    for (size_t i = 0; i < t->decoder_count; i++)
        forget_graph(t, &t->decoders[i]);
}

void transformer_close(struct transformer *transformer)
{
    if (transformer == NULL)
        return;
    forget_graphs(transformer);
    free(transformer->decoders);
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

/* The store's, or NULL with *decoder NULL if this is its first token. A store that has been closed
 * leaves its decoder to the next one in its place: that one's step refuses the graph. */
static bool find_decoder(struct transformer *t, const struct kv_store *store,
                         struct decoder **decoder, struct error *error)
{
    struct decoder *more;

    for (size_t i = 0; i < t->decoder_count; i++) {
        if (t->decoders[i].store == store) {
            *decoder = &t->decoders[i];
            return true;
        }
    }
    *decoder = NULL;
    more = realloc(t->decoders, (t->decoder_count + 1) * sizeof *more);
    if (more == NULL)
        return error_set(error, "out of memory for a decoder");
    more[t->decoder_count++] = (struct decoder){store, NULL};
    t->decoders = more;
    return true;
}

static bool capture(struct transformer *t, struct kv_store *store, struct kv_layer *io,
                    void **graph, struct error *error)
{
    const struct forward_queue *queue = t->operations->queue;

    if (!queue->capture_begin(t->forward, error))
        return false;
    if (run_layers(t, &store, 1, io, error) &&
        t->operations->predict(t->forward, io, NULL, NULL, error))
        return queue->capture_end(t->forward, graph, error);
    queue->capture_end(t->forward, NULL, NULL);
    return false;
}

/* All layers and the prediction of the open step. One token of one store on a device is a graph
 * from the second one on: the first has everything loaded that cannot be while one is captured. */
static bool compute(struct transformer *t, struct kv_store *const *stores, size_t store_count,
                    struct kv_layer *io, float *logits, int32_t *token, struct error *error)
{
    struct decoder *decoder = NULL;

    if (t->operations->queue != NULL && io->count == 1 && store_count == 1 &&
        !find_decoder(t, stores[0], &decoder, error))
        return false;
    if (decoder == NULL)
        return run_layers(t, stores, store_count, io, error) &&
               t->operations->predict(t->forward, io, logits, token, error);
    if (decoder->graph == NULL || !kv_store_replay(stores[0])) {
        forget_graph(t, decoder);
        if (!capture(t, stores[0], io, &decoder->graph, error))
            return false;
    } else if (t->options.layer_done != NULL &&
               !t->options.layer_done(t->options.opaque, t->model->layer_count,
                                      t->model->layer_count)) {
        return error_set(error, "interrupted");
    }
    return t->operations->queue->launch(t->forward, decoder->graph, error);
}

/* `logits` and `token` are what predict() takes. */
static bool step(struct transformer *t, struct kv_store *const *stores, size_t store_count,
                 const int32_t *tokens, size_t count, float *logits, int32_t *token,
                 struct error *error)
{
    const struct model *m = t->model;
    const struct forward_queue *queue = t->operations->queue;
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
    if (count > t->longest)
        forget_graphs(t);
    t->longest = count > t->longest ? count : t->longest;
    if (!t->operations->begin(t->forward, tokens, plain_k, hidden, &io, error)) {
        /* It may have freed what graphs know, and got no more. */
        forget_graphs(t);
        t->longest = 0;
        goto out;
    }
    if (!compute(t, stores, store_count, &io, logits, token, error) ||
        (queue != NULL && !queue->fetch(t->forward, logits, token, error)))
        goto out;
    done = true;
    for (size_t i = 0; i < store_count && done; i++)
        done = kv_store_end(stores[i], error);
    if (done && queue != NULL)
        done = queue->wait(t->forward, error);
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
