/* SPDX-License-Identifier: MIT */
/* The layers of a transformer on the CPU. */
#include "forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"
#include "rms_norm.h"
#include "rope.h"

#define BLOCK PRODUCTS_BLOCK_ROWS

/* The matrices of a layer. */
enum { Q, K, V, O, GATE, UP, DOWN, LAYER_MATRICES };

struct forward {
    const struct model *model;
    struct forward_cpu_options options;
    struct products *products;
    struct matrix *matrices; /* [layer_count, LAYER_MATRICES], then the output's */
    void *packed;            /* what they are laid out in */

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

    float *logits; /* [vocabulary], once a token was asked for without them */
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

/* Those of the layers in order, then the output's. */
static const struct weight *find_weight(const struct model *m, size_t i)
{
    if (i == m->layer_count * LAYER_MATRICES)
        return &m->output;

    const struct model_layer *l = &m->layers[i / LAYER_MATRICES];
    const struct weight *weights[] = {
        [Q] = &l->q,       [K] = &l->k,   [V] = &l->v,       [O] = &l->o,
        [GATE] = &l->gate, [UP] = &l->up, [DOWN] = &l->down,
    };

    return weights[i % LAYER_MATRICES];
}

size_t forward_cpu_bytes(const struct model *m, const char *isa, size_t tokens)
{
    /* What reserve() allocates for any store, and the weights that are laid out anew. */
    const struct products_kernels *kernels = products_find_kernels(isa, NULL);
    const size_t row = m->hidden + (2 * m->query_heads + 2 * m->kv_heads + 1) * m->head_dim;
    size_t count, bytes;

    if (__builtin_mul_overflow(tokens, row, &count) ||
        __builtin_mul_overflow(count, sizeof(float), &bytes))
        return SIZE_MAX;
    for (size_t i = 0; m->has_weights && i < m->layer_count * LAYER_MATRICES + 1; i++) {
        if (__builtin_add_overflow(bytes, products_packed_bytes(kernels, find_weight(m, i)),
                                   &bytes))
            return SIZE_MAX;
    }
    return bytes;
}

static bool reserve(struct forward *f, size_t tokens, bool plain_k, bool hidden,
                    struct error *error)
{
    const struct model *m = f->model;
    size_t kv = m->kv_heads * m->head_dim;
    size_t query = m->query_heads * m->head_dim;

    if (tokens <= f->capacity && plain_k <= f->has_plain_k && hidden <= f->has_hidden)
        return true;
    tokens = tokens > f->capacity ? tokens : f->capacity;
    f->capacity = 0;
    f->has_plain_k = f->has_plain_k || plain_k;
    f->has_hidden = f->has_hidden || hidden;
    if (!allocate(&f->x, tokens, m->hidden) || !allocate(&f->q, tokens, query) ||
        !allocate(&f->k, tokens, kv) || !allocate(&f->v, tokens, kv) ||
        !allocate(&f->out, tokens, query) || !allocate(&f->cosine, tokens, m->head_dim / 2) ||
        !allocate(&f->sine, tokens, m->head_dim / 2) ||
        (f->has_plain_k && !allocate(&f->plain_k, tokens, kv)) ||
        (f->has_hidden && !allocate(&f->hidden, tokens, m->hidden)))
        return error_set(error, "out of memory for a step of %zu tokens", tokens);
    f->capacity = tokens;
    return true;
}

/* The end of the block of rows that begins at row `first` of a step whose row 0 is token
 * `position`: blocks end at multiples of BLOCK tokens of the sequence. */
static size_t block_end(size_t position, size_t first, size_t count)
{
    size_t end = first + BLOCK - (position + first) % BLOCK;

    return end < count ? end : count;
}

static void embed(struct forward *f, const int32_t *tokens, size_t count, size_t position)
{
    const struct model *m = f->model;
    const struct weight *w = &m->token_embedding;
    size_t pairs = m->head_dim / 2;

#pragma omp parallel for num_threads(f->options.threads) if (count > 8)
    for (size_t row = 0; row < count; row++) {
        quant_info(w->type)->dequantise((const char *)w->data + (size_t)tokens[row] * w->row_bytes,
                                        m->hidden, f->x + row * m->hidden);
        rope_angles(m, position + row, f->cosine + row * pairs, f->sine + row * pairs);
    }
}

static void norm_rows(struct forward *f, size_t first, size_t rows, const float *weight)
{
    size_t hidden = f->model->hidden;

#pragma omp parallel for num_threads(f->options.threads) if (rows > 8)
    for (size_t row = 0; row < rows; row++)
        rms_norm(f->x + (first + row) * hidden, weight, hidden, f->model->rms_epsilon,
                 f->normed + row * hidden);
}

static void add_bias(float *x, const float *bias, size_t n)
{
    for (size_t i = 0; bias != NULL && i < n; i++)
        x[i] += bias[i];
}

/* Biases and QK-norm where the model has them, then RoPE. */
static void finish_heads(struct forward *f, size_t first, size_t rows,
                         const struct model_layer *layer, bool plain_k)
{
    const struct model *m = f->model;
    size_t d = m->head_dim, pairs = d / 2;
    size_t query = m->query_heads * d, kv = m->kv_heads * d;

#pragma omp parallel for num_threads(f->options.threads) if (rows > 8)
    for (size_t row = first; row < first + rows; row++) {
        add_bias(f->q + row * query, layer->q_bias, query);
        add_bias(f->k + row * kv, layer->k_bias, kv);
        add_bias(f->v + row * kv, layer->v_bias, kv);
        for (size_t h = 0; h < m->query_heads + m->kv_heads; h++) {
            bool is_query = h < m->query_heads;
            float *head = is_query ? f->q + (row * m->query_heads + h) * d
                                   : f->k + (row * m->kv_heads + h - m->query_heads) * d;
            const float *norm = is_query ? layer->q_norm : layer->k_norm;

            if (norm != NULL)
                rms_norm(head, norm, d, m->rms_epsilon, head);
            if (plain_k && !is_query)
                memcpy(f->plain_k + (head - f->k), head, d * sizeof *head);
            rope_rotate(m, head, f->cosine + row * pairs, f->sine + row * pairs);
        }
    }
}

static bool before(struct forward *f, const struct kv_layer *io, struct error *error)
{
    const struct model *m = f->model;
    const struct model_layer *layer = &m->layers[io->layer];
    const struct matrix *matrices = f->matrices + io->layer * LAYER_MATRICES;
    size_t position = io->position, count = io->count;
    size_t query = m->query_heads * m->head_dim, kv = m->kv_heads * m->head_dim;

    for (size_t first = 0, end; first < count; first = end) {
        end = block_end(position, first, count);
        norm_rows(f, first, end - first, layer->attention_norm);
        if (io->hidden != NULL)
            memcpy(f->hidden + first * m->hidden, f->normed,
                   (end - first) * m->hidden * sizeof *f->normed);
        struct product list[] = {
            {&matrices[Q], f->q + first * query, query, false},
            {&matrices[K], f->k + first * kv, kv, false},
            {&matrices[V], f->v + first * kv, kv, false},
        };
        if (!products_multiply(f->products, f->normed, m->hidden, end - first, list, 3, error))
            return false;
        finish_heads(f, first, end - first, layer, io->plain_k != NULL);
    }
    return true;
}

static bool after(struct forward *f, const struct kv_layer *io, struct error *error)
{
    const struct model *m = f->model;
    const struct model_layer *layer = &m->layers[io->layer];
    const struct matrix *matrices = f->matrices + io->layer * LAYER_MATRICES;
    size_t query = m->query_heads * m->head_dim, wide = m->intermediate;
    /* Behind the last layer's attention only the last row matters. */
    size_t first = io->layer + 1 < m->layer_count ? 0 : io->count - 1;

    for (size_t end; first < io->count; first = end) {
        end = block_end(io->position, first, io->count);
        size_t rows = end - first;
        float *x = f->x + first * m->hidden;
        struct product output = {&matrices[O], x, m->hidden, true};
        struct product inner[] = {
            {&matrices[GATE], f->gate, wide, false},
            {&matrices[UP], f->up, wide, false},
        };
        struct product down = {&matrices[DOWN], x, m->hidden, true};

        if (!products_multiply(f->products, f->out + first * query, query, rows, &output, 1, error))
            return false;
        norm_rows(f, first, rows, layer->ffn_norm);
        if (!products_multiply(f->products, f->normed, m->hidden, rows, inner, 2, error))
            return false;
#pragma omp parallel for num_threads(f->options.threads) if (rows > 8)
        for (size_t row = 0; row < rows; row++)
            products_swiglu(f->products, f->gate + row * wide, f->up + row * wide, wide);
        if (!products_multiply(f->products, f->gate, wide, rows, &down, 1, error))
            return false;
    }
    return true;
}

static bool begin(struct forward *f, const int32_t *tokens, bool plain_k, bool hidden,
                  struct kv_layer *io, struct error *error)
{
    if (!reserve(f, io->count, plain_k, hidden, error))
        return false;
    io->q = f->q;
    io->k = f->k;
    io->v = f->v;
    io->plain_k = plain_k ? f->plain_k : NULL;
    io->hidden = hidden ? f->hidden : NULL;
    io->out = f->out;
    embed(f, tokens, io->count, io->position);
    return true;
}

static int32_t likeliest(const float *logits, size_t count)
{
    size_t best = 0;

    for (size_t i = 0; i < count; i++) {
        if (isnan(logits[i]))
            return -1;
        if (logits[i] > logits[best])
            best = i;
    }
    return (int32_t)best;
}

static bool predict(struct forward *f, const struct kv_layer *io, float *logits, int32_t *token,
                    struct error *error)
{
    const struct model *m = f->model;
    struct product output = {f->matrices + m->layer_count * LAYER_MATRICES, logits, m->vocabulary,
                             false};

    if (logits == NULL && token == NULL)
        return true;
    if (logits == NULL) {
        if (f->logits == NULL && !allocate(&f->logits, 1, m->vocabulary))
            return error_set(error, "out of memory for the logits");
        output.y = f->logits;
    }
    norm_rows(f, io->count - 1, 1, m->output_norm);
    if (!products_multiply(f->products, f->normed, m->hidden, 1, &output, 1, error))
        return false;
    if (token != NULL)
        *token = likeliest(output.y, m->vocabulary);
    return true;
}

static void close_forward(struct forward *f)
{
    products_close(f->products);
    free(f->packed);
    free(f->matrices);
    free(f->x);
    free(f->q);
    free(f->k);
    free(f->v);
    free(f->plain_k);
    free(f->hidden);
    free(f->out);
    free(f->cosine);
    free(f->sine);
    free(f->normed);
    free(f->gate);
    free(f->up);
    free(f->logits);
    free(f);
}

static bool pack(struct forward *f, struct error *error)
{
    const size_t count = f->model->layer_count * LAYER_MATRICES + 1;

    f->matrices = calloc(count, sizeof *f->matrices);
    if (f->matrices == NULL)
        return error_set(error, "out of memory for the transformer");
    for (size_t i = 0; i < count; i++)
        f->matrices[i].weight = *find_weight(f->model, i);
    return products_pack(f->products, f->matrices, count, &f->packed, error);
}

bool forward_cpu_open(const struct model *model, const struct forward_cpu_options *options,
                      struct forward **forward, struct error *error)
{
    struct forward *f = calloc(1, sizeof *f);

    *forward = NULL;
    if (f == NULL)
        return error_set(error, "out of memory for the transformer");
    f->model = model;
    f->options = *options;
    if (!products_open(options->threads, products_find_kernels(options->isa, NULL), options->exact,
                       &f->products, error) ||
        !pack(f, error))
        goto fail;
    if (!allocate(&f->normed, BLOCK, model->hidden) ||
        !allocate(&f->gate, BLOCK, model->intermediate) ||
        !allocate(&f->up, BLOCK, model->intermediate)) {
        error_set(error, "out of memory for the transformer");
        goto fail;
    }
    *forward = f;
    return true;
fail:
    close_forward(f);
    return false;
}

const struct forward_operations forward_cpu = {
    .close = close_forward,
    .begin = begin,
    .before = before,
    .after = after,
    .predict = predict,
};
