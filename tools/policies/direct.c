/* SPDX-License-Identifier: MIT */
/*
 * int4, int3: direct quantisation of old pages, the baselines of Section 4.3 of the PuzzleKV paper,
 * which names KIVI's axes: keys per channel, values per token.
 *
 * A page of P tokens that is complete, not a sink and not in the window is quantised when the step
 * ends, with n = 4 or 3 bits, asymmetrically (quantise.h):
 *     K: for each of the d channels one group, its P tokens;
 *     V: for each of the P tokens one group, its d channels.
 * Everything else, the first pages, the last and the incomplete one, is dense.
 *
 * Bytes of a quantised page, per layer and KV head: 2 P d n / 8 of codes, 4 (d + P) of f16 scales
 * and zeros; other tokens 2 d b each. At 16,384 tokens and d = 128 this is a share of 0.2918 and
 * 0.2296.
 *
 * Deviation: the paper reports 0.283 and 0.223 with a layout that it does not state.
 */
#include "../options.h"
#include "dense_pages.h"
#include "dense_rows.h"
#include "policy.h"
#include "quantise.h"

struct direct {
    struct dense_store dense;
    struct dense_pages pages;
    unsigned bits;
    size_t end; /* tokens from the sink's end to here are quantised; the sink's end: none */
    double seconds;
};

static unsigned bits_of(const struct policy *policy)
{
    return policy == &policy_int4 ? 4 : 3;
}

static struct direct *from_store(struct kv_store *store)
{
    return (struct direct *)store;
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    return quantise_check(store, io, error) && dense_store_layer(store, io, error);
}

static void quantise_page(struct direct *s, size_t layer, size_t kv_head, size_t token)
{
    size_t d = s->dense.rows.model->head_dim, page = s->pages.page_tokens;
    float *k = dense_rows_k(&s->dense.rows, layer, kv_head) + token * d;
    float *v = dense_rows_v(&s->dense.rows, layer, kv_head) + token * d;

    for (size_t i = 0; i < d; i++)
        quantise_group(k + i, page, d, s->bits);
    for (size_t i = 0; i < page; i++)
        quantise_group(v + i * d, d, 1, s->bits);
}

static bool end(struct kv_store *store, struct error *error)
{
    struct direct *s = from_store(store);
    const struct model *m = s->dense.rows.model;
    size_t first, end = dense_pages_range(&s->pages, store->tokens + store->step, &first);
    size_t heads = m->layer_count * m->kv_heads;
    double began = machine_seconds();

    (void)error;
    if (end <= s->end)
        return true;
#pragma omp parallel for num_threads(store->options.threads)
    for (size_t i = 0; i < heads; i++) {
        for (size_t token = s->end; token < end; token += s->pages.page_tokens)
            quantise_page(s, i / m->kv_heads, i % m->kv_heads, token);
    }
    s->end = end;
    s->seconds += machine_seconds() - began;
    return true;
}

/* Codes of a page are kept whole or not at all. */
static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    struct direct *s = from_store(store);
    size_t page = s->pages.page_tokens, sink = s->pages.sink * page;

    (void)error;
    if (*tokens >= sink && *tokens < s->end) {
        *tokens -= *tokens % page;
        s->end = *tokens;
    } else if (*tokens < sink) {
        s->end = sink;
    }
    return true;
}

static size_t bytes_of(const struct model *m, pkv_dtype dtype, unsigned bits, size_t page,
                       size_t tokens, size_t quantised)
{
    size_t d = m->head_dim;
    size_t page_bytes = 2 * page * d * bits / 8 + QUANTISE_GROUP_BYTES * (d + page);

    return m->layer_count * m->kv_heads * (quantised / page * page_bytes) +
           policy_raw_bytes(m, dtype, tokens - quantised);
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct direct *s = from_store(store);
    size_t page = s->pages.page_tokens;

    (void)error;
    stats->payload_bytes = bytes_of(s->dense.rows.model, s->dense.rows.dtype, s->bits, page,
                                    store->tokens, s->end - s->pages.sink * page);
    stats->reserved_bytes = s->dense.rows.bytes;
    stats->factorize_seconds = s->seconds;
    return true;
}

static const struct kv_store_operations operations = {
    .close = dense_store_close,
    .layer = layer,
    .end = end,
    .rewind = rewind_to,
    .stats = read_stats,
};

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    struct dense_pages pages = dense_pages_of(spec);
    size_t first, end = dense_pages_range(&pages, size->tokens, &first);

    (void)error;
    *bytes = bytes_of(size->model, size->dtype, bits_of(spec->policy), pages.page_tokens,
                      size->tokens, end - first);
    return true;
}

static bool open_direct(const struct kv_spec *spec, const struct kv_store_options *options,
                        struct kv_store **store, struct error *error)
{
    struct direct *s = dense_store_open(sizeof *s, &operations, options, error);

    if (s == NULL)
        return false;
    s->pages = dense_pages_of(spec);
    s->bits = bits_of(spec->policy);
    s->end = s->pages.sink * s->pages.page_tokens;
    *store = &s->dense.store;
    return true;
}

static const struct policy_key keys[] = {DENSE_PAGES_ROWS};

const struct policy policy_int4 = {
    .name = "int4",
    .summary = "old pages in 4 bits: keys by channel, values by token",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .bytes = count_bytes,
    .open = open_direct,
};

const struct policy policy_int3 = {
    .name = "int3",
    .summary = "the same in 3 bits",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .bytes = count_bytes,
    .open = open_direct,
};
