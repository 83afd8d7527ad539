/* SPDX-License-Identifier: MIT */
/* K and V of every token in f32, what most policies attend: exact, or as they would be read back.
 */
#include "dense_rows.h"

#include <math.h>
#include <stdlib.h>

#include "dense_attention.h"
#include "rounding.h"

bool dense_rows_open(struct dense_rows *rows, const struct kv_store_options *options,
                     struct error *error)
{
    const struct model *m = options->model;
    size_t count;

    *rows = (struct dense_rows){.model = m,
                                .dtype = options->dtype,
                                .threads = options->threads,
                                .capacity = options->max_tokens};
    if (__builtin_mul_overflow(m->layer_count * m->kv_heads * m->head_dim, rows->capacity,
                               &count) ||
        __builtin_mul_overflow(count, 2 * sizeof *rows->k, &rows->bytes))
        return error_set(error, "the cache: %zu tokens are too many", rows->capacity);
    rows->k = malloc(rows->bytes / 2);
    rows->v = malloc(rows->bytes / 2);
    if (rows->k == NULL || rows->v == NULL) {
        dense_rows_close(rows);
        return error_set(error, "the cache of %zu tokens: out of memory", options->max_tokens);
    }
    return true;
}

void dense_rows_close(struct dense_rows *rows)
{
    free(rows->k);
    free(rows->v);
    rows->k = rows->v = NULL;
}

static size_t first_element(const struct dense_rows *rows, size_t layer, size_t kv_head)
{
    return (layer * rows->model->kv_heads + kv_head) * rows->capacity * rows->model->head_dim;
}

float *dense_rows_k(const struct dense_rows *rows, size_t layer, size_t kv_head)
{
    return rows->k + first_element(rows, layer, kv_head);
}

float *dense_rows_v(const struct dense_rows *rows, size_t layer, size_t kv_head)
{
    return rows->v + first_element(rows, layer, kv_head);
}

/* Rounds one head of one token. */
static bool write_head(const struct dense_rows *rows, const float *from, float *to)
{
    bool finite = true;

    rounding_row(rows->dtype, from, to, rows->model->head_dim);
    for (size_t i = 0; i < rows->model->head_dim; i++)
        finite = finite && isfinite(to[i]);
    return finite;
}

bool dense_rows_append(struct dense_rows *rows, const struct kv_layer *io, size_t at,
                       struct error *error)
{
    size_t heads = rows->model->kv_heads, d = rows->model->head_dim;

    for (size_t i = 0; i < io->count; i++) {
        for (size_t h = 0; h < heads; h++) {
            bool k = write_head(rows, io->k + (i * heads + h) * d,
                                dense_rows_k(rows, io->layer, h) + (at + i) * d);
            bool v = write_head(rows, io->v + (i * heads + h) * d,
                                dense_rows_v(rows, io->layer, h) + (at + i) * d);

            if (!k || !v)
                return error_set(error,
                                 "KV cache: layer %zu, KV head %zu, token %zu: %s is not finite in "
                                 "the storage type",
                                 io->layer, h, io->position + i, k ? "V" : "K");
        }
    }
    return true;
}

/* masses: NULL, or as dense_rows_attend_masses() has it. */
static bool attend(const struct dense_rows *rows, const struct kv_layer *io, size_t first,
                   size_t cached, float *masses, size_t from, struct error *error)
{
    size_t heads = rows->model->kv_heads;
    struct dense_attention attention = {.model = rows->model,
                                        .threads = rows->threads,
                                        .count = io->count,
                                        .q = io->q,
                                        .out = io->out,
                                        .mass_from = from};
    const float **k = calloc(heads, sizeof *k);
    const float **v = calloc(heads, sizeof *v);
    float **mass = calloc(heads, sizeof *mass);
    size_t *counts = calloc(heads, sizeof *counts);
    bool done = k != NULL && v != NULL && mass != NULL && counts != NULL;

    if (!done)
        error_set(error, "out of memory for attention");
    for (size_t h = 0; h < heads && done; h++) {
        k[h] = dense_rows_k(rows, io->layer, h) + first * rows->model->head_dim;
        v[h] = dense_rows_v(rows, io->layer, h) + first * rows->model->head_dim;
        if (masses != NULL)
            mass[h] = masses + h * rows->capacity;
        counts[h] = cached - first + io->count;
    }
    attention.k = k;
    attention.v = v;
    attention.mass = masses != NULL ? mass : NULL;
    attention.rows = counts;
    done = done && dense_attention(&attention, error);
    free(counts);
    free(mass);
    free(v);
    free(k);
    return done;
}

bool dense_rows_attend(const struct dense_rows *rows, const struct kv_layer *io, size_t first,
                       size_t cached, struct error *error)
{
    return io->out == NULL || attend(rows, io, first, cached, NULL, 0, error);
}

bool dense_rows_attend_masses(const struct dense_rows *rows, const struct kv_layer *io,
                              size_t cached, float *masses, size_t from, struct error *error)
{
    return attend(rows, io, 0, cached, masses, from, error);
}

void *dense_store_open(size_t size, const struct kv_store_operations *operations,
                       const struct kv_store_options *options, struct error *error)
{
    struct dense_store *dense = calloc(1, size);

    if (dense == NULL) {
        error_set(error, "out of memory for the cache");
        return NULL;
    }
    dense->store.operations = operations;
    if (!dense_rows_open(&dense->rows, options, error)) {
        free(dense);
        return NULL;
    }
    return dense;
}

void dense_store_close(struct kv_store *store)
{
    dense_rows_close(&((struct dense_store *)store)->rows);
    free(store);
}

bool dense_store_layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct dense_rows *rows = &((struct dense_store *)store)->rows;

    return dense_rows_append(rows, io, store->tokens, error) &&
           dense_rows_attend(rows, io, 0, store->tokens, error);
}
