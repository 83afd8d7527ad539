/* SPDX-License-Identifier: MIT */
/*
 * snapkv: Li et al., "SnapKV: LLM Knows What You Are Looking For Before Generation" (NeurIPS 2024).
 *
 * The prompt, the first step, of S tokens, is attended exactly. If it is longer than `capacity`,
 * each layer and KV head keeps `capacity` tokens of it: the last `window`, and of those before the
 * capacity - window with the largest scores, of equal ones the later. Votes for a token are the
 * attention of the window's queries, after softmax and summed over the query heads that read the KV
 * head; its score is the mean, or the maximum, of the votes around it:
 *     vote_t = sum over queries i >= S - window, over query heads g of p_{g,i,t},  t < S - window
 *     score_t = (vote_{t-n} + ... + vote_{t+n}) / kernel,  or their maximum,  n = (kernel - 1) / 2
 * with no votes outside. All later tokens are kept.
 *
 *     capacity as given, or round(ratio S), at least window + 1
 *
 * Bytes, with S' = min(S, capacity): layers kv_heads (S' + T - S) 2 d b; scores are not kept, and
 * positions need not be, for keys are kept after RoPE.
 *
 * The defaults of window, kernel and pool are those of the authors' code; their LongBench runs have
 * kernel=7, pool=max and a capacity of 1,024 to 4,096.
 *
 * Deviations: the capacity is by default a share of the prompt, so that policies compare at equal
 * storage. The authors select, and keep K and V, for each query head; here the query heads of a KV
 * head vote together, for keeping their own would cost what sharing saves.
 */
#include <math.h>
#include <stdlib.h>

#include "kept_rows.h"
#include "policy.h"

enum { WINDOW, KERNEL, POOL, CAPACITY, RATIO };

static const struct policy_key keys[] = {
    [WINDOW] = {.name = "window", .preset = "32", .least = 1, .most = 1000000},
    [KERNEL] = {.name = "kernel", .preset = "5", .least = 1, .most = 255},
    [POOL] = {.name = "pool", .kind = POLICY_CHOICE, .preset = "avg", .choices = "avg|max"},
    [CAPACITY] = {.name = "capacity", .least = 2, .most = 1000000000},
    [RATIO] = {.name = "ratio", .kind = POLICY_REAL, .preset = "0.6", .most = 1, .positive = true},
};

struct shape {
    size_t window, kernel, capacity; /* capacity 0: from the ratio */
    bool largest;
    double ratio;
};

struct snapkv {
    struct kv_store store;
    struct kept_rows kept;
    struct shape shape;
    size_t prompt; /* tokens of the first step */
};

static struct snapkv *from_store(struct kv_store *store)
{
    return (struct snapkv *)store;
}

static struct shape shape_of(const struct kv_spec *spec)
{
    return (struct shape){.window = kv_spec_count(spec, WINDOW),
                          .kernel = kv_spec_count(spec, KERNEL),
                          .capacity =
                              spec->values[CAPACITY].there ? kv_spec_count(spec, CAPACITY) : 0,
                          .largest = kv_spec_count(spec, POOL) == 1,
                          .ratio = spec->values[RATIO].number};
}

/* `capacity` stands for the ratio. */
static bool check(struct kv_spec *spec, const char *text, struct error *error)
{
    const struct shape shape = shape_of(spec);

    if (spec->values[CAPACITY].typed && spec->values[RATIO].typed)
        return error_set(error, "--kv %.80s: capacity and ratio both set the budget; give one",
                         text);
    if (shape.capacity > 0 && shape.capacity <= shape.window)
        return error_set(error,
                         "--kv %.80s: capacity=%zu has no room beside the window's %zu tokens",
                         text, shape.capacity, shape.window);
    if (shape.kernel % 2 == 0)
        return error_set(error, "--kv %.80s: kernel=%zu is not odd, so it has no middle", text,
                         shape.kernel);
    if (spec->values[CAPACITY].typed)
        spec->values[RATIO].there = false;
    return true;
}

/* How many of the prompt's tokens are kept. */
static size_t kept_of(const struct shape *shape, size_t prompt)
{
    size_t capacity =
        shape->capacity > 0 ? shape->capacity : (size_t)round(shape->ratio * (double)prompt);

    if (capacity <= shape->window)
        capacity = shape->window + 1;
    return prompt < capacity ? prompt : capacity;
}

static void close_snapkv(struct kv_store *store)
{
    kept_rows_close(&from_store(store)->kept);
    free(store);
}

static void pool(const struct shape *shape, const float *votes, size_t count, float *scores)
{
    size_t reach = shape->kernel / 2;

    for (size_t t = 0; t < count; t++) {
        size_t end = count - t > reach ? t + reach + 1 : count;
        float sum = 0, largest = 0;

        for (size_t i = t > reach ? t - reach : 0; i < end; i++) {
            sum += votes[i];
            largest = votes[i] > largest ? votes[i] : largest;
        }
        scores[t] = shape->largest ? largest : sum / (float)shape->kernel;
    }
}

/* The prompt, of which `most` tokens are kept. */
static bool select_prompt(struct snapkv *s, const struct kv_layer *io, size_t most,
                          struct error *error)
{
    size_t heads = s->kept.rows.model->kv_heads, before = io->count - s->shape.window;
    float *votes = calloc(heads * s->kept.rows.capacity, sizeof *votes);
    float *scores = malloc(io->count * sizeof *scores);
    bool done = votes != NULL && scores != NULL;

    if (!done)
        error_set(error, "out of memory for attention");
    done = done && dense_rows_attend_masses(&s->kept.rows, io, 0, votes, before, error);
    for (size_t h = 0; h < heads && done; h++) {
        pool(&s->shape, votes + h * s->kept.rows.capacity, before, scores);
        kept_rows_evict(&s->kept, io->layer, h, io->count, before, most - s->shape.window, scores);
    }
    free(scores);
    free(votes);
    return done;
}

/* The prompt's rows can be moved at once: nothing is kept before it that an abort would leave. */
static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct snapkv *s = from_store(store);

    if (!kept_rows_append(&s->kept, io, error))
        return false;
    if (store->tokens == 0) {
        size_t most = kept_of(&s->shape, io->count);

        if (most < io->count)
            return select_prompt(s, io, most, error);
    }
    return dense_rows_attend(&s->kept.rows, io, 0, s->kept.count, error);
}

static bool end(struct kv_store *store, struct error *error)
{
    struct snapkv *s = from_store(store);

    (void)error;
    if (store->tokens == 0) {
        s->prompt = store->step;
        s->kept.count = kept_of(&s->shape, store->step);
    } else {
        s->kept.count += store->step;
    }
    return true;
}

/* What has been evicted does not come back. */
static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    struct snapkv *s = from_store(store);
    size_t evicted = store->tokens - s->kept.count;

    (void)error;
    if (evicted > 0 && *tokens < s->prompt)
        *tokens = evicted = 0;
    s->kept.count = *tokens - evicted;
    return true;
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct snapkv *s = from_store(store);

    (void)error;
    stats->payload_bytes = policy_raw_bytes(s->kept.rows.model, s->kept.rows.dtype, s->kept.count);
    stats->reserved_bytes = s->kept.bytes;
    return true;
}

static size_t retained(const struct kv_store *store, size_t layer, size_t kv_head,
                       size_t *positions)
{
    return kept_rows_retained(&((const struct snapkv *)store)->kept, layer, kv_head, positions);
}

static const struct kv_store_operations operations = {
    .close = close_snapkv,
    .layer = layer,
    .end = end,
    .rewind = rewind_to,
    .stats = read_stats,
    .retained = retained,
};

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    const struct shape shape = shape_of(spec);

    (void)error;
    *bytes = policy_raw_bytes(size->model, size->dtype,
                              kept_of(&shape, size->prompt) + size->tokens - size->prompt);
    return true;
}

static bool open_snapkv(const struct kv_spec *spec, const struct kv_store_options *options,
                        struct kv_store **store, struct error *error)
{
    struct snapkv *s = calloc(1, sizeof *s);

    if (s == NULL)
        return error_set(error, "out of memory for the cache");
    s->store.operations = &operations;
    s->shape = shape_of(spec);
    if (!kept_rows_open(&s->kept, options, error)) {
        free(s);
        return false;
    }
    *store = &s->store;
    return true;
}

const struct policy policy_snapkv = {
    .name = "snapkv",
    .summary = "SnapKV: the prompt's tokens that its end attends to, by ratio or capacity",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .check = check,
    .bytes = count_bytes,
    .open = open_snapkv,
};
