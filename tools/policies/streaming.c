/* SPDX-License-Identifier: MIT */
/*
 * streaming: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (ICLR 2024).
 *
 * Kept are the first `sink` tokens and the most recent ones, together `budget` tokens, the same for
 * every layer and head; when a step ends, the oldest of the others are evicted. As published,
 * positions are those in the cache, not those in the text: keys are stored before RoPE, and at a
 * step the kept token number j, sinks first, stands at position j and the new ones behind the last.
 * The prompt is attended exactly, then evicted from, as the authors' chat demonstration does.
 *
 *     budget = recent + sink, or with S the tokens of the first step round(ratio S), at least
 *     sink + 1
 *
 * Bytes, with T' = min(T, budget): layers kv_heads T' 2 d b.
 *
 * Deviations: the paper fixes the budget, to 2,048 tokens for instance, whatever the text. Here it
 * is by default a share of the prompt, so that policies compare at equal storage; `recent` fixes
 * it.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../runner/rope.h"
#include "dense_rows.h"
#include "policy.h"
#include "rounding.h"

enum { SINK, RECENT, RATIO };

static const struct policy_key keys[] = {
    [SINK] = {.name = "sink", .preset = "4", .most = 1000000},
    [RECENT] = {.name = "recent", .least = 1, .most = 1000000000},
    [RATIO] = {.name = "ratio", .kind = POLICY_REAL, .preset = "0.6", .most = 1, .positive = true},
};

/*
 * Rows of `dense` are tokens by their position in the text. Keys of recent tokens are as far from a
 * query in the cache as in the text, so they are kept turned; sinks are kept as they were before
 * RoPE, and are put, turned by as many positions as tokens are evicted, into the rows right before
 * the recent tokens, whose own tokens are evicted.
 */
struct streaming {
    struct dense_store dense;
    size_t sink, recent; /* recent 0: from the ratio */
    double ratio;
    float *sink_k; /* [layers, kv_heads, sink, head_dim], before RoPE, rounded */
    float *sink_v; /* the same */
    size_t budget; /* 0 before the first step */
    size_t first;  /* of the recent tokens; evicted are those from sink to here */
};

static struct streaming *from_store(struct kv_store *store)
{
    return (struct streaming *)store;
}

/* `recent` stands for the ratio. */
static bool check(struct kv_spec *spec, const char *text, struct error *error)
{
    if (spec->values[RECENT].typed && spec->values[RATIO].typed)
        return error_set(error, "--kv %.80s: recent and ratio both set the budget; give one", text);
    if (spec->values[RECENT].typed)
        spec->values[RATIO].there = false;
    return true;
}

static size_t budget_of(size_t sink, size_t recent, double ratio, size_t prompt)
{
    size_t budget = recent > 0 ? sink + recent : (size_t)round(ratio * (double)prompt);

    return budget > sink ? budget : sink + 1;
}

static void close_streaming(struct kv_store *store)
{
    struct streaming *s = from_store(store);

    free(s->sink_k);
    free(s->sink_v);
    dense_store_close(store);
}

static size_t sink_element(const struct streaming *s, size_t layer, size_t kv_head)
{
    const struct model *m = s->dense.rows.model;

    return (layer * m->kv_heads + kv_head) * s->sink * m->head_dim;
}

/* Keeps those of the new tokens that are sinks. */
static void keep_sinks(struct streaming *s, const struct kv_layer *io)
{
    const struct model *m = s->dense.rows.model;
    size_t d = m->head_dim;

    for (size_t i = 0; i < io->count && io->position + i < s->sink; i++) {
        for (size_t h = 0; h < m->kv_heads; h++) {
            size_t to = sink_element(s, io->layer, h) + (io->position + i) * d;
            size_t from = (i * m->kv_heads + h) * d;

            rounding_row(s->dense.rows.dtype, io->plain_k + from, s->sink_k + to, d);
            rounding_row(s->dense.rows.dtype, io->v + from, s->sink_v + to, d);
        }
    }
}

/* Puts the sinks before the recent tokens. */
static void place_sinks(struct streaming *s, size_t layer, float *cosine, float *sine)
{
    const struct model *m = s->dense.rows.model;
    size_t d = m->head_dim, to = s->first - s->sink;

    for (size_t j = 0; j < s->sink; j++) {
        rope_angles(m, to + j, cosine, sine);
        for (size_t h = 0; h < m->kv_heads; h++) {
            size_t from = sink_element(s, layer, h) + j * d;
            float *k = dense_rows_k(&s->dense.rows, layer, h) + (to + j) * d;

            memcpy(k, s->sink_k + from, d * sizeof *k);
            rope_rotate(m, k, cosine, sine);
            memcpy(dense_rows_v(&s->dense.rows, layer, h) + (to + j) * d, s->sink_v + from,
                   d * sizeof *k);
        }
    }
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct streaming *s = from_store(store);
    size_t pairs = s->dense.rows.model->head_dim / 2;
    float *angles;

    if (!dense_rows_append(&s->dense.rows, io, store->tokens, error))
        return false;
    keep_sinks(s, io);
    if (io->out == NULL)
        return true;
    if (s->first == s->sink)
        return dense_rows_attend(&s->dense.rows, io, 0, store->tokens, error);
    angles = malloc(2 * pairs * sizeof *angles);
    if (angles == NULL)
        return error_set(error, "out of memory for attention");
    place_sinks(s, io->layer, angles, angles + pairs);
    free(angles);
    return dense_rows_attend(&s->dense.rows, io, s->first - s->sink, store->tokens, error);
}

static bool end(struct kv_store *store, struct error *error)
{
    struct streaming *s = from_store(store);
    size_t tokens = store->tokens + store->step;

    (void)error;
    if (store->tokens == 0)
        s->budget = budget_of(s->sink, s->recent, s->ratio, store->step);
    if (tokens > s->budget && tokens - s->budget + s->sink > s->first)
        s->first = tokens - s->budget + s->sink;
    return true;
}

/* What has been evicted does not come back. */
static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    struct streaming *s = from_store(store);

    (void)error;
    if (s->first > s->sink)
        *tokens = 0;
    if (*tokens == 0)
        s->first = s->sink;
    return true;
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct streaming *s = from_store(store);

    (void)error;
    stats->payload_bytes = policy_raw_bytes(s->dense.rows.model, s->dense.rows.dtype,
                                            store->tokens - (s->first - s->sink));
    stats->reserved_bytes =
        s->dense.rows.bytes +
        2 * sizeof *s->sink_k * sink_element(s, s->dense.rows.model->layer_count, 0);
    return true;
}

static size_t retained(const struct kv_store *store, size_t layer, size_t kv_head,
                       size_t *positions)
{
    const struct streaming *s = (const struct streaming *)store;
    size_t count = 0;

    (void)layer;
    (void)kv_head;
    for (size_t i = 0; i < store->tokens; i++) {
        if (i < s->sink || i >= s->first)
            positions[count++] = i;
    }
    return count;
}

static const struct kv_store_operations operations = {
    .reads_plain_k = true,
    .close = close_streaming,
    .layer = layer,
    .end = end,
    .rewind = rewind_to,
    .stats = read_stats,
    .retained = retained,
};

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    size_t recent = spec->values[RECENT].there ? kv_spec_count(spec, RECENT) : 0;
    size_t budget =
        budget_of(kv_spec_count(spec, SINK), recent, spec->values[RATIO].number, size->prompt);

    (void)error;
    *bytes =
        policy_raw_bytes(size->model, size->dtype, size->tokens < budget ? size->tokens : budget);
    return true;
}

static bool open_streaming(const struct kv_spec *spec, const struct kv_store_options *options,
                           struct kv_store **store, struct error *error)
{
    struct streaming *s = dense_store_open(sizeof *s, &operations, options, error);
    size_t count;

    if (s == NULL)
        return false;
    s->sink = kv_spec_count(spec, SINK);
    s->recent = spec->values[RECENT].there ? kv_spec_count(spec, RECENT) : 0;
    s->ratio = spec->values[RATIO].number;
    if (s->sink > options->max_tokens)
        s->sink = options->max_tokens;
    s->first = s->sink;
    count = sink_element(s, options->model->layer_count, 0);
    s->sink_k = calloc(count + 1, sizeof *s->sink_k);
    s->sink_v = calloc(count + 1, sizeof *s->sink_v);
    if (s->sink_k == NULL || s->sink_v == NULL) {
        close_streaming(&s->dense.store);
        return error_set(error, "out of memory for the cache");
    }
    *store = &s->dense.store;
    return true;
}

const struct policy policy_streaming = {
    .name = "streaming",
    .summary = "StreamingLLM: the first tokens, and the last by recent or ratio",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .check = check,
    .bytes = count_bytes,
    .open = open_streaming,
};
