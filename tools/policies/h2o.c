/* SPDX-License-Identifier: MIT */
/*
 * h2o: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
 * Models" (NeurIPS 2023), configured as in the PuzzleKV paper (Section 4.1, Appendix A.3).
 *
 * Of a prompt of S tokens, the first step, every layer and KV head keeps
 *     n_heavy = round(heavy S),  n_recent = round(recent S), at least 1
 * tokens. The mass of token t is all the attention it has been given, after softmax and summed over
 * the query heads that read the KV head:
 *     mass_t = sum over queries i >= t, over query heads g of p_{g,i,t}.
 * The prompt is attended exactly. When a step ends, the last n_recent tokens stay, and of the
 * others the n_heavy with the largest mass; of equal ones the later. What is evicted neither counts
 * nor comes back. While decoding that evicts one token for each new one, the lightest of those that
 * are not recent.
 *
 * Bytes, with T' = min(T, n_heavy + n_recent): layers kv_heads T' (2 d b + 4), 4 of them for the
 * mass, in f32. Keys are kept after RoPE, so positions need not be.
 *
 * Deviations: a step of several tokens behind the prompt evicts when it ends, so while it lasts
 * there are more than the budget. H2O's models have a KV head for each query head; the sum over
 * query heads is the PuzzleKV paper's.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kept_rows.h"
#include "policy.h"

enum { HEAVY, RECENT };

static const struct policy_key keys[] = {
    [HEAVY] = {.name = "heavy", .kind = POLICY_REAL, .preset = "0.3", .most = 1},
    [RECENT] =
        {.name = "recent", .kind = POLICY_REAL, .preset = "0.3", .most = 1, .positive = true},
};

struct budget {
    size_t heavy, recent; /* tokens */
};

struct h2o {
    struct kv_store store;
    struct kept_rows kept;
    double heavy, recent;
    struct budget budget; /* set by the first step */
    float *masses;        /* [layers, kv_heads, capacity], of the kept rows */
    float *step_masses;   /* the same, with those of the open step */
};

static struct h2o *from_store(struct kv_store *store)
{
    return (struct h2o *)store;
}

static struct budget budget_of(double heavy, double recent, size_t prompt)
{
    struct budget budget = {(size_t)round(heavy * (double)prompt),
                            (size_t)round(recent * (double)prompt)};

    if (budget.recent == 0)
        budget.recent = 1;
    return budget;
}

static void close_h2o(struct kv_store *store)
{
    struct h2o *h = from_store(store);

    free(h->step_masses);
    free(h->masses);
    kept_rows_close(&h->kept);
    free(h);
}

static size_t first_mass(const struct h2o *h, size_t layer, size_t kv_head)
{
    return (layer * h->kept.rows.model->kv_heads + kv_head) * h->kept.rows.capacity;
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct h2o *h = from_store(store);
    size_t cached = h->kept.count;

    if (!kept_rows_append(&h->kept, io, error))
        return false;
    for (size_t i = 0; i < h->kept.rows.model->kv_heads; i++) {
        size_t first = first_mass(h, io->layer, i);

        memcpy(h->step_masses + first, h->masses + first, cached * sizeof *h->masses);
        memset(h->step_masses + first + cached, 0, io->count * sizeof *h->masses);
    }
    return dense_rows_attend_masses(&h->kept.rows, io, cached,
                                    h->step_masses + first_mass(h, io->layer, 0), 0, error);
}

static bool end(struct kv_store *store, struct error *error)
{
    struct h2o *h = from_store(store);
    const struct model *m = h->kept.rows.model;
    size_t rows = h->kept.count + store->step, left = rows;

    (void)error;
    if (store->tokens == 0)
        h->budget = budget_of(h->heavy, h->recent, store->step);
    if (left > h->budget.heavy + h->budget.recent)
        left = h->budget.heavy + h->budget.recent;
    for (size_t i = 0; i < m->layer_count * m->kv_heads; i++) {
        size_t l = i / m->kv_heads, head = i % m->kv_heads;
        float *masses = h->step_masses + first_mass(h, l, head);

        if (left < rows)
            kept_rows_evict(&h->kept, l, head, rows, rows - h->budget.recent, h->budget.heavy,
                            masses);
        memcpy(h->masses + first_mass(h, l, head), masses, left * sizeof *masses);
    }
    h->kept.count = left;
    return true;
}

/* What tokens that are forgotten have added to the masses stays there, so nothing is kept. */
static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    (void)error;
    from_store(store)->kept.count = 0;
    *tokens = 0;
    return true;
}

static size_t bytes_of(const struct model *m, pkv_dtype dtype, size_t kept)
{
    return policy_raw_bytes(m, dtype, kept) + m->layer_count * m->kv_heads * kept * sizeof(float);
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct h2o *h = from_store(store);
    const struct model *m = h->kept.rows.model;

    (void)error;
    stats->payload_bytes = bytes_of(m, h->kept.rows.dtype, h->kept.count);
    stats->reserved_bytes =
        h->kept.bytes + 2 * first_mass(h, m->layer_count, 0) * sizeof *h->masses;
    return true;
}

static size_t retained(const struct kv_store *store, size_t layer, size_t kv_head,
                       size_t *positions)
{
    return kept_rows_retained(&((const struct h2o *)store)->kept, layer, kv_head, positions);
}

static const struct kv_store_operations operations = {
    .close = close_h2o,
    .layer = layer,
    .end = end,
    .rewind = rewind_to,
    .stats = read_stats,
    .retained = retained,
};

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    struct budget budget =
        budget_of(spec->values[HEAVY].number, spec->values[RECENT].number, size->prompt);
    size_t most = budget.heavy + budget.recent;

    (void)error;
    *bytes = bytes_of(size->model, size->dtype, size->tokens < most ? size->tokens : most);
    return true;
}

static bool open_h2o(const struct kv_spec *spec, const struct kv_store_options *options,
                     struct kv_store **store, struct error *error)
{
    struct h2o *h = calloc(1, sizeof *h);
    size_t count;

    if (h == NULL)
        return error_set(error, "out of memory for the cache");
    h->store.operations = &operations;
    h->heavy = spec->values[HEAVY].number;
    h->recent = spec->values[RECENT].number;
    if (!kept_rows_open(&h->kept, options, error)) {
        free(h);
        return false;
    }
    /* No more than the rows take, which fit. */
    count = first_mass(h, options->model->layer_count, 0);
    h->masses = malloc(count * sizeof *h->masses);
    h->step_masses = malloc(count * sizeof *h->step_masses);
    if (h->masses == NULL || h->step_masses == NULL) {
        close_h2o(&h->store);
        return error_set(error, "out of memory for the cache");
    }
    *store = &h->store;
    return true;
}

const struct policy policy_h2o = {
    .name = "h2o",
    .summary = "H2O: the most attended tokens, and the last",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .bytes = count_bytes,
    .open = open_h2o,
};
