/* SPDX-License-Identifier: MIT */
/* K and V of the tokens that are left, of each head its own, for policies that evict by scores. */
#include "kept_rows.h"

#include <stdlib.h>
#include <string.h>

bool kept_rows_open(struct kept_rows *kept, const struct kv_store_options *options,
                    struct error *error)
{
    const struct model *m = options->model;
    size_t positions, order;

    *kept = (struct kept_rows){.count = 0};
    if (!dense_rows_open(&kept->rows, options, error))
        return false;
    if (__builtin_mul_overflow(m->layer_count * m->kv_heads * sizeof *kept->positions,
                               options->max_tokens, &positions) ||
        __builtin_mul_overflow(sizeof *kept->order, options->max_tokens, &order) ||
        options->max_tokens > UINT32_MAX) {
        kept_rows_close(kept);
        return error_set(error, "the cache: %zu tokens are too many", options->max_tokens);
    }
    kept->positions = malloc(positions);
    kept->order = malloc(order);
    kept->bytes = kept->rows.bytes + positions + order;
    if (kept->positions == NULL || kept->order == NULL) {
        kept_rows_close(kept);
        return error_set(error, "the cache of %zu tokens: out of memory", options->max_tokens);
    }
    return true;
}

void kept_rows_close(struct kept_rows *kept)
{
    free(kept->order);
    free(kept->positions);
    dense_rows_close(&kept->rows);
    *kept = (struct kept_rows){.count = 0};
}

static size_t *positions_of(const struct kept_rows *kept, size_t layer, size_t kv_head)
{
    return kept->positions + (layer * kept->rows.model->kv_heads + kv_head) * kept->rows.capacity;
}

bool kept_rows_append(struct kept_rows *kept, const struct kv_layer *io, struct error *error)
{
    for (size_t h = 0; h < kept->rows.model->kv_heads; h++) {
        for (size_t i = 0; i < io->count; i++)
            positions_of(kept, io->layer, h)[kept->count + i] = io->position + i;
    }
    return dense_rows_append(&kept->rows, io, kept->count, error);
}

/* Numbers that are in the order of scores, then of rows: the bits of floats that are not negative
 * are in their order, and that of a NaN, where floats have none. */
static uint64_t rank_of(float score, size_t row)
{
    uint32_t bits;

    memcpy(&bits, &score, sizeof bits);
    return (uint64_t)bits << 32 | row;
}

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

void kept_rows_evict(struct kept_rows *kept, size_t layer, size_t kv_head, size_t rows,
                     size_t candidates, size_t most, float *scores)
{
    const size_t d = kept->rows.model->head_dim;
    float *k = dense_rows_k(&kept->rows, layer, kv_head);
    float *v = dense_rows_v(&kept->rows, layer, kv_head);
    size_t *positions = positions_of(kept, layer, kv_head);
    uint64_t least = UINT64_MAX;

    if (most > 0) {
        for (size_t i = 0; i < candidates; i++)
            kept->order[i] = rank_of(scores[i], i);
        qsort(kept->order, candidates, sizeof *kept->order, compare);
        least = kept->order[candidates - most];
    }
    for (size_t i = 0, to = 0; i < rows; i++) {
        if (i < candidates && rank_of(scores[i], i) < least)
            continue;
        if (to < i) {
            memcpy(k + to * d, k + i * d, d * sizeof *k);
            memcpy(v + to * d, v + i * d, d * sizeof *v);
            positions[to] = positions[i];
            scores[to] = scores[i];
        }
        to++;
    }
}

size_t kept_rows_retained(const struct kept_rows *kept, size_t layer, size_t kv_head,
                          size_t *positions)
{
    memcpy(positions, positions_of(kept, layer, kv_head), kept->count * sizeof *positions);
    return kept->count;
}
