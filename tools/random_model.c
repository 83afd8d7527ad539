/* SPDX-License-Identifier: MIT */
/* A model with random weights, to time where there is no file. */
#include "random_model.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "random_pages.h"

/* A row in Q8_0 is blocks of an f16 scale and 32 signed bytes. */
#define BLOCK_ELEMENTS 32
#define BLOCK_BYTES    34

/* The matrices of one layer, and the embedding and the output behind the last. */
#define LAYER_WEIGHTS 7

struct matrix {
    struct weight *weight;
    size_t rows, columns;
};

static void list_layer(const struct model *m, struct model_layer *layer,
                       struct matrix list[LAYER_WEIGHTS])
{
    size_t query = m->query_heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    const struct matrix matrices[LAYER_WEIGHTS] = {
        {&layer->q, query, m->hidden},
        {&layer->k, kv, m->hidden},
        {&layer->v, kv, m->hidden},
        {&layer->o, m->hidden, query},
        {&layer->gate, m->intermediate, m->hidden},
        {&layer->up, m->intermediate, m->hidden},
        {&layer->down, m->hidden, m->intermediate},
    };

    memcpy(list, matrices, sizeof matrices);
}

static size_t row_bytes(size_t columns)
{
    return columns / BLOCK_ELEMENTS * BLOCK_BYTES;
}

size_t random_model_bytes(const struct model *shape)
{
    struct matrix list[LAYER_WEIGHTS];
    struct model_layer layer;
    size_t bytes = 0;

    list_layer(shape, &layer, list);
    for (size_t i = 0; i < LAYER_WEIGHTS; i++)
        bytes += list[i].rows * row_bytes(list[i].columns);
    return shape->layer_count * bytes +
           (shape->tied_output ? 1 : 2) * shape->vocabulary * row_bytes(shape->hidden);
}

/* Bytes are uniform from -128 to 127: their standard deviation is 74. The scale is a power of two.
 */
static void fill(struct weight *weight, uint64_t seed, unsigned threads)
{
    int exponent = (int)lround(log2(74 * sqrt((double)weight->columns)));
    uint16_t scale = (uint16_t)((15 - exponent) << 10);
    unsigned char *data = (unsigned char *)weight->data;

    (void)threads; /* unused without OpenMP */
#pragma omp parallel for num_threads(threads)
    for (size_t row = 0; row < weight->rows; row++) {
        unsigned char *block = data + row * weight->row_bytes;
        uint64_t state = seed + (row << 24);

        for (size_t n = 0; n < weight->columns; n += BLOCK_ELEMENTS, block += BLOCK_BYTES) {
            block[0] = (unsigned char)(scale & 0xff);
            block[1] = (unsigned char)(scale >> 8);
            for (size_t i = 2; i < BLOCK_BYTES; i += sizeof state) {
                uint64_t bits = random_bits(&state);

                memcpy(block + i, &bits, sizeof bits);
            }
        }
    }
}

/* Its data is NULL. */
static void describe(const struct matrix *matrix)
{
    *matrix->weight = (struct weight){.type = QUANT_Q8_0,
                                      .rows = matrix->rows,
                                      .columns = matrix->columns,
                                      .row_bytes = row_bytes(matrix->columns)};
}

bool random_model_open(const struct model *shape, struct model *model, struct error *error)
{
    size_t most = shape->hidden > shape->head_dim ? shape->hidden : shape->head_dim;
    float *ones = malloc(most * sizeof *ones);

    *model = *shape;
    model->output_norm = ones;
    model->layers = calloc(shape->layer_count, sizeof *model->layers);
    model->rope_inverse_frequencies =
        calloc(shape->head_dim / 2, sizeof *model->rope_inverse_frequencies);
    if (ones == NULL || model->layers == NULL || model->rope_inverse_frequencies == NULL)
        return error_set(error, "out of memory for the model");
    for (size_t i = 0; i < most; i++)
        ones[i] = 1;
    for (size_t i = 0; i < shape->head_dim / 2; i++)
        model->rope_inverse_frequencies[i] =
            (float)pow(shape->rope_theta, -2.0 * (double)i / (double)shape->head_dim);
    model->rope_magnitude = 1;
    describe(&(struct matrix){&model->token_embedding, shape->vocabulary, shape->hidden});
    describe(&(struct matrix){&model->output, shape->vocabulary, shape->hidden});
    for (size_t l = 0; l < shape->layer_count; l++) {
        struct model_layer *layer = &model->layers[l];
        struct matrix list[LAYER_WEIGHTS];

        layer->attention_norm = layer->ffn_norm = ones;
        if (shape->architecture == MODEL_QWEN3)
            layer->q_norm = layer->k_norm = ones;
        list_layer(shape, layer, list);
        for (size_t i = 0; i < LAYER_WEIGHTS; i++)
            describe(&list[i]);
    }
    model->has_weights = true;
    return true;
}

/* Fills a matrix in memory that has room from *at on. */
static bool place(struct weight *weight, char **at, uint64_t seed, unsigned threads,
                  struct error *error)
{
    if (interrupt_seen())
        return error_set(error, "interrupted");
    weight->data = *at;
    fill(weight, seed << 48, threads);
    *at += weight->rows * weight->row_bytes;
    return true;
}

bool random_model_fill(struct model *model, unsigned threads, struct error *error)
{
    char *at = malloc(random_model_bytes(model));
    uint64_t seed = 1;

    model->token_embedding.data = at;
    if (at == NULL)
        return error_set(error, "out of memory for the weights");
    if (!place(&model->token_embedding, &at, seed++, threads, error))
        return false;
    if (model->tied_output)
        model->output = model->token_embedding;
    else if (!place(&model->output, &at, seed++, threads, error))
        return false;
    for (size_t l = 0; l < model->layer_count; l++) {
        struct matrix list[LAYER_WEIGHTS];

        list_layer(model, &model->layers[l], list);
        for (size_t i = 0; i < LAYER_WEIGHTS; i++) {
            if (!place(list[i].weight, &at, seed++, threads, error))
                return false;
        }
    }
    return true;
}

void random_model_close(struct model *model)
{
    free((void *)model->token_embedding.data);
    free((void *)model->output_norm);
    free(model->layers);
    free(model->rope_inverse_frequencies);
    *model = (struct model){.layers = NULL};
}
