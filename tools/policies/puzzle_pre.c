/* SPDX-License-Identifier: MIT */
/*
 * puzzle:rope=pre: PuzzleKV with keys factorized before RoPE, the ablation of the paper's Appendix
 * D.3.
 *
 * libpuzzlekv keeps the keys as they are before RoPE, and the values: the same pages, factors and
 * bytes as with rope=post. What is attended is each page as it is read back, its keys turned by
 * their tokens' positions then; so keys are rounded to the storage type before they are turned.
 */
#include <stdlib.h>

#include "../runner/rope.h"
#include "dense_rows.h"
#include "pages.h"
#include "rounding.h"

struct puzzle_pre {
    struct kv_store store;
    size_t page_tokens;
    pkv_cache *cache; /* of keys before RoPE */
    pkv_seq *seq;
    pkv_step *step;
    size_t read_pages;      /* pages before are read back, if they are factors */
    struct dense_rows rows; /* what is attended */
    float *cosine, *sine;   /* [max_tokens, head_dim / 2] */
    size_t angles;          /* positions that they are there for */
};

static struct puzzle_pre *from_store(struct kv_store *store)
{
    return (struct puzzle_pre *)store;
}

static void close_puzzle_pre(struct kv_store *store)
{
    struct puzzle_pre *s = from_store(store);

    pkv_cache_close(s->cache);
    dense_rows_close(&s->rows);
    free(s->cosine);
    free(s->sine);
    free(s);
}

static bool begin(struct kv_store *store, size_t count, struct error *error)
{
    struct puzzle_pre *s = from_store(store);
    const pkv_step_item item = {s->seq, count};
    size_t pairs = s->rows.model->head_dim / 2;

    for (; s->angles < store->tokens + count; s->angles++)
        rope_angles(s->rows.model, s->angles, s->cosine + s->angles * pairs,
                    s->sine + s->angles * pairs);
    return pages_check(s->cache, pkv_step_begin(s->cache, &item, 1, &s->step), error);
}

static void turn(const struct puzzle_pre *s, float *head, size_t position)
{
    size_t pairs = s->rows.model->head_dim / 2;

    rope_rotate(s->rows.model, head, s->cosine + position * pairs, s->sine + position * pairs);
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct puzzle_pre *s = from_store(store);
    const struct model *m = s->rows.model;
    const pkv_step_io step = {
        .struct_size = sizeof step, .k = {io->plain_k, PKV_F32, 0, 0}, .v = {io->v, PKV_F32, 0, 0}};
    size_t d = m->head_dim;

    if (!pages_check(s->cache, pkv_step_layer(s->step, io->layer, &step), error) ||
        !dense_rows_append(&s->rows, io, store->tokens, error))
        return false;
#pragma omp parallel for num_threads(store->options.threads) if (io->count > 8)
    for (size_t i = 0; i < io->count; i++) {
        for (size_t h = 0; h < m->kv_heads; h++) {
            float *k = dense_rows_k(&s->rows, io->layer, h) + (store->tokens + i) * d;

            rounding_row(s->rows.dtype, io->plain_k + (i * m->kv_heads + h) * d, k, d);
            turn(s, k, io->position + i);
        }
    }
    return dense_rows_attend(&s->rows, io, 0, store->tokens, error);
}

/* Reads a page of factors back. */
static bool read_page(struct puzzle_pre *s, size_t page, struct error *error)
{
    const struct model *m = s->rows.model;
    size_t d = m->head_dim, token = page * s->page_tokens;

    for (size_t i = 0; i < m->layer_count * m->kv_heads; i++) {
        size_t l = i / m->kv_heads, h = i % m->kv_heads;
        float *k = dense_rows_k(&s->rows, l, h) + token * d;
        float *v = dense_rows_v(&s->rows, l, h) + token * d;

        if (!pages_check(s->cache, pkv_seq_read_page(s->seq, l, h, page, k, v), error))
            return false;
        for (size_t t = 0; t < s->page_tokens; t++)
            turn(s, k + t * d, token + t);
    }
    return true;
}

/* Pages become factors in ascending order, so those to be read begin where the last step's ended.
 */
static bool end(struct kv_store *store, struct error *error)
{
    struct puzzle_pre *s = from_store(store);
    pkv_page_info info = {.struct_size = sizeof info};
    size_t pages = (store->tokens + store->step) / s->page_tokens, read = s->read_pages;

    if (!pages_check(s->cache, pkv_step_end(s->step), error))
        return false;
    s->step = NULL;
    for (size_t page = read; page < pages; page++) {
        if (!pages_check(s->cache, pkv_seq_page(s->seq, page, &info), error))
            return false;
        if (info.state != PKV_PAGE_FACTORIZED)
            continue;
        if (!read_page(s, page, error))
            return false;
        s->read_pages = page + 1;
    }
    return true;
}

static void abort_step(struct kv_store *store)
{
    struct puzzle_pre *s = from_store(store);

    pkv_step_abort(s->step);
    s->step = NULL;
}

static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    struct puzzle_pre *s = from_store(store);

    if (!pages_cut(s->cache, s->seq, s->page_tokens, tokens, error))
        return false;
    if (s->read_pages > *tokens / s->page_tokens)
        s->read_pages = *tokens / s->page_tokens;
    return true;
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    struct puzzle_pre *s = from_store(store);

    if (!pages_stats(s->cache, stats, error))
        return false;
    stats->reserved_bytes += s->rows.bytes;
    return true;
}

static const struct kv_store_operations operations = {
    .reads_plain_k = true,
    .close = close_puzzle_pre,
    .begin = begin,
    .layer = layer,
    .end = end,
    .abort = abort_step,
    .rewind = rewind_to,
    .stats = read_stats,
};

bool puzzle_pre_open(const struct kv_spec *spec, const struct kv_store_options *options,
                     struct kv_store **store, struct error *error)
{
    struct puzzle_pre *s = calloc(1, sizeof *s);
    size_t pairs = options->model->head_dim / 2;

    if (s == NULL)
        return error_set(error, "out of memory for the cache");
    s->store.operations = &operations;
    s->page_tokens = (size_t)kv_spec_find(spec, "page")->number;
    if (!dense_rows_open(&s->rows, options, error) ||
        !pages_open_cache(spec, options, &s->cache, &s->seq, error))
        goto fail;
    s->cosine = calloc(options->max_tokens, pairs * sizeof *s->cosine);
    s->sine = calloc(options->max_tokens, pairs * sizeof *s->sine);
    if (s->cosine == NULL || s->sine == NULL) {
        error_set(error, "out of memory for the cache");
        goto fail;
    }
    *store = &s->store;
    return true;
fail:
    close_puzzle_pre(&s->store);
    return false;
}
