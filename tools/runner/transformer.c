/* SPDX-License-Identifier: MIT */
/* The forward pass of a decoder-only transformer whose KV cache a policy holds. */
#include "transformer.h"

#include <stdlib.h>
#include <string.h>

#include "products.h"
#include "rms_norm.h"
#include "rope.h"

#define BLOCK PRODUCTS_BLOCK_ROWS

struct transformer {
    const struct model *model;
    struct transformer_options options;
    struct products *products;

    /* For every token of a step. */
    size_t capacity;
    bool has_plain_k, has_hidden; /* the last two below are there */
    float *x;                     /* the residual stream [capacity, hidden] */
    float *q;                     /* [capacity, query_heads, head_dim] */
    float *k, *v;                 /* [capacity, kv_heads, head_dim] */
    float *plain_k;               /* k before RoPE, if a store reads it */
    float *hidden;                /* all rows of normed, if a store reads them */
    float *out;                   /* of attention, as q */
    float *cosine;                /* of RoPE [capacity, head_dim / 2] */
    float *sine;

    /* For one block of tokens. */
    float *normed;    /* [BLOCK, hidden] */
    float *gate, *up; /* [BLOCK, intermediate] */
};

static bool allocate(float **pointer, size_t rows, size_t columns)
{
    size_t count, bytes;

    free(*pointer);
    *pointer = NULL;
    if (__builtin_mul_overflow(rows, columns, &count) ||
        __builtin_mul_overflow(count, sizeof **pointer, &bytes))
        return false;
    *pointer = malloc(bytes);
    return *pointer != NULL;
}

static bool reserve(struct transformer *t, size_t tokens, bool plain_k, bool hidden,
                    struct error *error)
{
    const struct model *m = t->model;
    size_t kv = m->kv_heads * m->head_dim;
    size_t query = m->query_heads * m->head_dim;

    if (tokens <= t->capacity && plain_k <= t->has_plain_k && hidden <= t->has_hidden)
        return true;
    tokens = tokens > t->capacity ? tokens : t->capacity;
    t->capacity = 0;
    t->has_plain_k = t->has_plain_k || plain_k;
    t->has_hidden = t->has_hidden || hidden;
    if (!allocate(&t->x, tokens, m->hidden) || !allocate(&t->q, tokens, query) ||
        !allocate(&t->k, tokens, kv) || !allocate(&t->v, tokens, kv) ||
        !allocate(&t->out, tokens, query) || !allocate(&t->cosine, tokens, m->head_dim / 2) ||
        !allocate(&t->sine, tokens, m->head_dim / 2) ||
        (t->has_plain_k && !allocate(&t->plain_k, tokens, kv)) ||
        (t->has_hidden && !allocate(&t->hidden, tokens, m->hidden)))
        return error_set(error, "out of memory for a step of %zu tokens", tokens);
    t->capacity = tokens;
    return true;
}

bool transformer_open(const struct model *model, const struct transformer_options *options,
                      struct transformer **transformer, struct error *error)
{
    struct transformer *t = calloc(1, sizeof *t);

    *transformer = NULL;
    if (t == NULL)
        return error_set(error, "out of memory for the transformer");
    t->model = model;
    t->options = *options;
    if (!products_open(options->threads, products_find_kernels(options->isa, NULL), options->exact,
                       &t->products, error))
        goto fail;
    if (!allocate(&t->normed, BLOCK, model->hidden) ||
        !allocate(&t->gate, BLOCK, model->intermediate) ||
        !allocate(&t->up, BLOCK, model->intermediate)) {
        error_set(error, "out of memory for the transformer");
        goto fail;
    }
    *transformer = t;
    return true;
fail:
    transformer_close(t);
    return false;
}

void transformer_close(struct transformer *transformer)
{
    if (transformer == NULL)
        return;
    products_close(transformer->products);
    free(transformer->x);
    free(transformer->q);
    free(transformer->k);
    free(transformer->v);
    free(transformer->plain_k);
    free(transformer->hidden);
    free(transformer->out);
    free(transformer->cosine);
    free(transformer->sine);
    free(transformer->normed);
    free(transformer->gate);
    free(transformer->up);
    free(transformer);
}

/* The end of the block of rows that begins at row `first` of a step whose row 0 is token
 * `position`: blocks end at multiples of BLOCK tokens of the sequence. */
static size_t block_end(size_t position, size_t first, size_t count)
{
    size_t end = first + BLOCK - (position + first) % BLOCK;

    return end < count ? end : count;
}

static void embed(struct transformer *t, const int32_t *tokens, size_t count, size_t position)
{
    const struct model *m = t->model;
    const struct weight *w = &m->token_embedding;
    size_t pairs = m->head_dim / 2;

#pragma omp parallel for num_threads(t->options.threads) if (count > 8)
    for (size_t row = 0; row < count; row++) {
        quant_info(w->type)->dequantise((const char *)w->data + (size_t)tokens[row] * w->row_bytes,
                                        m->hidden, t->x + row * m->hidden);
        rope_angles(m, position + row, t->cosine + row * pairs, t->sine + row * pairs);
    }
}

static void norm_rows(struct transformer *t, size_t first, size_t rows, const float *weight)
{
    size_t hidden = t->model->hidden;

#pragma omp parallel for num_threads(t->options.threads) if (rows > 8)
    for (size_t row = 0; row < rows; row++)
        rms_norm(t->x + (first + row) * hidden, weight, hidden, t->model->rms_epsilon,
                 t->normed + row * hidden);
}

static void add_bias(float *x, const float *bias, size_t n)
{
    for (size_t i = 0; bias != NULL && i < n; i++)
        x[i] += bias[i];
}

/* Biases and QK-norm where the model has them, then RoPE. */
static void finish_heads(struct transformer *t, size_t first, size_t rows,
                         const struct model_layer *layer, bool plain_k)
{
    const struct model *m = t->model;
    size_t d = m->head_dim, pairs = d / 2;
    size_t query = m->query_heads * d, kv = m->kv_heads * d;

#pragma omp parallel for num_threads(t->options.threads) if (rows > 8)
    for (size_t row = first; row < first + rows; row++) {
        add_bias(t->q + row * query, layer->q_bias, query);
        add_bias(t->k + row * kv, layer->k_bias, kv);
        add_bias(t->v + row * kv, layer->v_bias, kv);
        for (size_t h = 0; h < m->query_heads + m->kv_heads; h++) {
            bool is_query = h < m->query_heads;
            float *head = is_query ? t->q + (row * m->query_heads + h) * d
                                   : t->k + (row * m->kv_heads + h - m->query_heads) * d;
            const float *norm = is_query ? layer->q_norm : layer->k_norm;

            if (norm != NULL)
                rms_norm(head, norm, d, m->rms_epsilon, head);
            if (plain_k && !is_query)
                memcpy(t->plain_k + (head - t->k), head, d * sizeof *head);
            rope_rotate(m, head, t->cosine + row * pairs, t->sine + row * pairs);
        }
    }
}

/* Fills the buffers that `io` names. */
static bool project_heads(struct transformer *t, const struct model_layer *layer,
                          const struct kv_layer *io, struct error *error)
{
    const struct model *m = t->model;
    size_t position = io->position, count = io->count;
    size_t query = m->query_heads * m->head_dim, kv = m->kv_heads * m->head_dim;

    for (size_t first = 0, end; first < count; first = end) {
        end = block_end(position, first, count);
        norm_rows(t, first, end - first, layer->attention_norm);
        if (io->hidden != NULL)
            memcpy(t->hidden + first * m->hidden, t->normed,
                   (end - first) * m->hidden * sizeof *t->normed);
        struct product list[] = {
            {&layer->q, t->q + first * query, query, false},
            {&layer->k, t->k + first * kv, kv, false},
            {&layer->v, t->v + first * kv, kv, false},
        };
        if (!products_multiply(t->products, t->normed, m->hidden, end - first, list, 3, error))
            return false;
        finish_heads(t, first, end - first, layer, io->plain_k != NULL);
    }
    return true;
}

/* Everything behind the attention, for rows `first` .. count - 1. */
static bool feed_forward(struct transformer *t, const struct model_layer *layer, size_t position,
                         size_t first, size_t count, struct error *error)
{
    const struct model *m = t->model;
    size_t query = m->query_heads * m->head_dim, wide = m->intermediate;

    for (size_t end; first < count; first = end) {
        end = block_end(position, first, count);
        size_t rows = end - first;
        float *x = t->x + first * m->hidden;
        struct product output = {&layer->o, x, m->hidden, true};
        struct product inner[] = {
            {&layer->gate, t->gate, wide, false},
            {&layer->up, t->up, wide, false},
        };
        struct product down = {&layer->down, x, m->hidden, true};

        if (!products_multiply(t->products, t->out + first * query, query, rows, &output, 1, error))
            return false;
        norm_rows(t, first, rows, layer->ffn_norm);
        if (!products_multiply(t->products, t->normed, m->hidden, rows, inner, 2, error))
            return false;
#pragma omp parallel for num_threads(t->options.threads) if (rows > 8)
        for (size_t row = 0; row < rows; row++)
            products_swiglu(t->products, t->gate + row * wide, t->up + row * wide, wide);
        if (!products_multiply(t->products, t->gate, wide, rows, &down, 1, error))
            return false;
    }
    return true;
}

/* One layer's attention: the first store's output, if it is wanted, and every store's K and V. */
static bool store_layer(struct kv_store *const *stores, size_t store_count,
                        const struct kv_layer *io, struct error *error)
{
    struct kv_layer others = *io;

    others.out = NULL;
    for (size_t i = 0; i < store_count; i++) {
        if (!kv_store_layer(stores[i], i == 0 ? io : &others, error))
            return false;
    }
    return true;
}

static bool run_layers(struct transformer *t, struct kv_store *const *stores, size_t store_count,
                       struct kv_layer *io, struct error *error)
{
    const struct model *m = t->model;

    for (size_t l = 0; l < m->layer_count; l++) {
        const struct model_layer *layer = &m->layers[l];

        io->layer = l;
        if (!project_heads(t, layer, io, error) || !store_layer(stores, store_count, io, error))
            return false;
        /* Behind the last layer's attention only the last row matters. */
        size_t first = l + 1 < m->layer_count ? 0 : io->count - 1;

        if (!feed_forward(t, layer, io->position, first, io->count, error))
            return false;
        if (t->options.layer_done != NULL &&
            !t->options.layer_done(t->options.opaque, l + 1, m->layer_count))
            return error_set(error, "interrupted");
    }
    return true;
}

bool transformer_step_shared(struct transformer *t, struct kv_store *const *stores,
                             size_t store_count, const int32_t *tokens, size_t count, float *logits,
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
    if (!reserve(t, count, plain_k, hidden, error))
        return false;
    for (size_t i = 0; i < store_count; i++) {
        if (!kv_store_begin(stores[i], count, error))
            goto out;
    }

    io.q = t->q;
    io.k = t->k;
    io.v = t->v;
    io.plain_k = plain_k ? t->plain_k : NULL;
    io.hidden = hidden ? t->hidden : NULL;
    io.out = t->out;
    embed(t, tokens, count, io.position);
    if (!run_layers(t, stores, store_count, &io, error))
        goto out;
    if (logits != NULL) {
        struct product output = {&m->output, logits, m->vocabulary, false};

        norm_rows(t, count - 1, 1, m->output_norm);
        if (!products_multiply(t->products, t->normed, m->hidden, 1, &output, 1, error))
            goto out;
    }
    done = true;
    for (size_t i = 0; i < store_count && done; i++)
        done = kv_store_end(stores[i], error);
out:
    for (size_t i = 0; i < store_count; i++)
        kv_store_abort(stores[i]);
    return done;
}

bool transformer_step(struct transformer *t, struct kv_store *store, const int32_t *tokens,
                      size_t count, float *logits, struct error *error)
{
    return transformer_step_shared(t, &store, 1, tokens, count, logits, error);
}
