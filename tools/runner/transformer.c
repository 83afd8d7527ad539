/* SPDX-License-Identifier: MIT */
/* The forward pass of a decoder-only transformer whose KV cache is a pkv_cache. */
#include "transformer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

#define BLOCK PRODUCTS_BLOCK_ROWS

struct transformer {
    const struct model *model;
    struct transformer_options options;
    struct products *products;

    /* For every token of a step. */
    size_t capacity;
    float *x;      /* the residual stream [capacity, hidden] */
    float *q;      /* [capacity, query_heads, head_dim] */
    float *k, *v;  /* [capacity, kv_heads, head_dim] */
    float *out;    /* of attention, as q */
    float *cosine; /* of RoPE [capacity, head_dim / 2] */
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

static bool reserve(struct transformer *t, size_t tokens, struct error *error)
{
    const struct model *m = t->model;
    size_t kv = m->kv_heads * m->head_dim;
    size_t query = m->query_heads * m->head_dim;

    if (tokens <= t->capacity)
        return true;
    t->capacity = 0;
    if (!allocate(&t->x, tokens, m->hidden) || !allocate(&t->q, tokens, query) ||
        !allocate(&t->k, tokens, kv) || !allocate(&t->v, tokens, kv) ||
        !allocate(&t->out, tokens, query) || !allocate(&t->cosine, tokens, m->head_dim / 2) ||
        !allocate(&t->sine, tokens, m->head_dim / 2))
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
    if (!products_open(options->threads, options->isa, &t->products, error))
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
    free(transformer->out);
    free(transformer->cosine);
    free(transformer->sine);
    free(transformer->normed);
    free(transformer->gate);
    free(transformer->up);
    free(transformer);
}

void transformer_describe(const struct model *model, pkv_config *config)
{
    config->layers = model->layer_count;
    config->query_heads = model->query_heads;
    config->kv_heads = model->kv_heads;
    config->head_dim = model->head_dim;
}

/* The end of the block of rows that begins at row `first` of a step whose row 0 is token
 * `position`: blocks end at multiples of BLOCK tokens of the sequence. */
static size_t block_end(size_t position, size_t first, size_t count)
{
    size_t end = first + BLOCK - (position + first) % BLOCK;

    return end < count ? end : count;
}

/* The sum runs in 16 lanes, so that it vectorises without being reordered. */
static void rms_norm(const float *x, const float *weight, size_t n, float epsilon, float *out)
{
    float lanes[16] = {0}, sum = 0;
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        for (size_t lane = 0; lane < 16; lane++)
            lanes[lane] += x[i + lane] * x[i + lane];
    }
    for (; i < n; i++)
        sum += x[i] * x[i];
    for (size_t lane = 0; lane < 16; lane++)
        sum += lanes[lane];

    float scale = 1 / sqrtf(sum / (float)n + epsilon);

    for (i = 0; i < n; i++)
        out[i] = x[i] * scale * weight[i];
}

static void rotate(float *head, const float *cosine, const float *sine, size_t pairs,
                   bool interleaved)
{
    for (size_t i = 0; i < pairs; i++) {
        float *a = interleaved ? &head[2 * i] : &head[i];
        float *b = interleaved ? &head[2 * i + 1] : &head[i + pairs];
        float u = *a, w = *b;

        *a = u * cosine[i] - w * sine[i];
        *b = w * cosine[i] + u * sine[i];
    }
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
        for (size_t i = 0; i < pairs; i++) {
            double angle = (double)(position + row) * m->rope_inverse_frequencies[i];

            t->cosine[row * pairs + i] = (float)cos(angle) * m->rope_magnitude;
            t->sine[row * pairs + i] = (float)sin(angle) * m->rope_magnitude;
        }
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
                         const struct model_layer *layer)
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
            rotate(head, t->cosine + row * pairs, t->sine + row * pairs, pairs,
                   m->rope_interleaved);
        }
    }
}

static bool project_heads(struct transformer *t, const struct model_layer *layer, size_t position,
                          size_t count, struct error *error)
{
    const struct model *m = t->model;
    size_t query = m->query_heads * m->head_dim, kv = m->kv_heads * m->head_dim;

    for (size_t first = 0, end; first < count; first = end) {
        end = block_end(position, first, count);
        norm_rows(t, first, end - first, layer->attention_norm);
        struct product list[] = {
            {&layer->q, t->q + first * query, query, false},
            {&layer->k, t->k + first * kv, kv, false},
            {&layer->v, t->v + first * kv, kv, false},
        };
        if (!products_multiply(t->products, t->normed, m->hidden, end - first, list, 3, error))
            return false;
        finish_heads(t, first, end - first, layer);
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

static bool cache_failed(pkv_cache *cache, pkv_status status, struct error *error)
{
    return error_set(error, "KV cache: %s: %s", pkv_strerror(status), pkv_cache_message(cache));
}

bool transformer_step(struct transformer *t, pkv_cache *cache, pkv_seq *seq, const int32_t *tokens,
                      size_t count, float *logits, struct error *error)
{
    const struct model *m = t->model;
    size_t position = pkv_seq_tokens(seq);
    const pkv_step_item item = {seq, count};
    pkv_step_io io = {.struct_size = sizeof io};
    pkv_step *step = NULL;
    pkv_status status;
    bool done = false;

    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || (size_t)tokens[i] >= m->vocabulary)
            return error_set(error, "token %zu: id %ld is not in the vocabulary of %zu", i,
                             (long)tokens[i], m->vocabulary);
    }
    if (!reserve(t, count, error))
        return false;
    status = pkv_step_begin(cache, &item, 1, &step);
    if (status != PKV_OK)
        return cache_failed(cache, status, error);

    io.q = (pkv_input){t->q, PKV_F32, 0, 0};
    io.k = (pkv_input){t->k, PKV_F32, 0, 0};
    io.v = (pkv_input){t->v, PKV_F32, 0, 0};
    io.out = (pkv_output){t->out, PKV_F32, 0, 0};
    embed(t, tokens, count, position);
    for (size_t l = 0; l < m->layer_count; l++) {
        const struct model_layer *layer = &m->layers[l];

        if (!project_heads(t, layer, position, count, error))
            goto out;
        status = pkv_step_layer(step, l, &io);
        if (status != PKV_OK) {
            cache_failed(cache, status, error);
            goto out;
        }
        /* Behind the last layer's attention only the last row matters. */
        size_t first = l + 1 < m->layer_count ? 0 : count - 1;

        if (!feed_forward(t, layer, position, first, count, error))
            goto out;
        if (t->options.layer_done != NULL &&
            !t->options.layer_done(t->options.opaque, l + 1, m->layer_count)) {
            error_set(error, "interrupted");
            goto out;
        }
    }
    if (logits != NULL) {
        struct product output = {&m->output, logits, m->vocabulary, false};

        norm_rows(t, count - 1, 1, m->output_norm);
        if (!products_multiply(t->products, t->normed, m->hidden, 1, &output, 1, error))
            goto out;
    }
    status = pkv_step_end(step);
    if (status != PKV_OK) {
        cache_failed(cache, status, error);
        goto out;
    }
    step = NULL;
    done = true;
out:
    pkv_step_abort(step);
    return done;
}
