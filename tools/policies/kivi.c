/* SPDX-License-Identifier: MIT */
/*
 * kivi: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (ICML 2024),
 * Algorithm 1.
 *
 * With G = group and R = residual, asymmetric quantisation in n = bits bits (quantise.h):
 *     K: of T tokens the first T - T mod R, for each channel in groups of G tokens;
 *     V: of T tokens the first T - R, for each token in groups of G channels.
 * The rest is dense: fewer than R keys, which are quantised together once there are R, and R
 * values, of which the oldest is quantised as one comes. The prompt is attended exactly.
 *
 * Bytes, per layer and KV head, with T_K and T_V the quantised tokens, each (d n / 8 of codes, and
 * f16 scales and zeros):
 *     K: T_K d n / 8 + 4 d T_K / G + (T - T_K) d b
 *     V: T_V d n / 8 + 4 (d / G) T_V + (T - T_V) d b
 *
 * Deviations: none but that a step of several tokens quantises when it ends.
 */
#include "../options.h"
#include "dense_rows.h"
#include "policy.h"
#include "quantise.h"

enum { BITS, GROUP, RESIDUAL };

static const struct policy_key keys[] = {
    [BITS] = {.name = "bits", .kind = POLICY_CHOICE, .preset = "2", .choices = "2|4"},
    [GROUP] = {.name = "group", .preset = "32", .least = 8, .most = 1024, .multiple = 8},
    [RESIDUAL] = {.name = "residual", .preset = "128", .least = 8, .most = 1000000, .multiple = 8},
};

struct shape {
    unsigned bits;
    size_t group, residual;
};

struct kivi {
    struct dense_store dense;
    struct shape shape;
    size_t k_end, v_end; /* the tokens before are quantised */
    double seconds;
};

static struct kivi *from_store(struct kv_store *store)
{
    return (struct kivi *)store;
}

static struct shape shape_of(const struct kv_spec *spec)
{
    return (struct shape){kv_spec_count(spec, BITS) == 0 ? 2 : 4, kv_spec_count(spec, GROUP),
                          kv_spec_count(spec, RESIDUAL)};
}

static bool check(struct kv_spec *spec, const char *text, struct error *error)
{
    const struct shape shape = shape_of(spec);

    return shape.residual % shape.group == 0 ||
           error_set(error, "--kv %.80s: residual=%zu is not a multiple of group=%zu", text,
                     shape.residual, shape.group);
}

static bool resolve(struct kv_spec *spec, const struct model *model, struct error *error)
{
    size_t group = shape_of(spec).group;

    return model->head_dim % group == 0 ||
           error_set(
               error,
               "--kv kivi: values are quantised in groups of group=%zu channels, of which the "
               "head dimension, %zu, is no multiple",
               group, model->head_dim);
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    return quantise_check(store, io, error) && dense_store_layer(store, io, error);
}

static size_t end_of_keys(const struct shape *shape, size_t from, size_t tokens)
{
    return from + (tokens - from) / shape->residual * shape->residual;
}

static size_t end_of_values(const struct shape *shape, size_t from, size_t tokens)
{
    return tokens > from + shape->residual ? tokens - shape->residual : from;
}

static void quantise_head(struct kivi *s, size_t layer, size_t kv_head, size_t k_end, size_t v_end)
{
    const struct shape *shape = &s->shape;
    size_t d = s->dense.rows.model->head_dim;
    float *k = dense_rows_k(&s->dense.rows, layer, kv_head);
    float *v = dense_rows_v(&s->dense.rows, layer, kv_head);

    for (size_t token = s->k_end; token < k_end; token += shape->group) {
        for (size_t i = 0; i < d; i++)
            quantise_group(k + token * d + i, shape->group, d, shape->bits);
    }
    for (size_t token = s->v_end; token < v_end; token++) {
        for (size_t i = 0; i < d; i += shape->group)
            quantise_group(v + token * d + i, shape->group, 1, shape->bits);
    }
}

static bool end(struct kv_store *store, struct error *error)
{
    struct kivi *s = from_store(store);
    const struct model *m = s->dense.rows.model;
    size_t heads = m->layer_count * m->kv_heads, tokens = store->tokens + store->step;
    size_t k_end = end_of_keys(&s->shape, s->k_end, tokens);
    size_t v_end = end_of_values(&s->shape, s->v_end, tokens);
    double began = machine_seconds();

    (void)error;
    if (k_end == s->k_end && v_end == s->v_end)
        return true;
#pragma omp parallel for num_threads(store->options.threads)
    for (size_t i = 0; i < heads; i++)
        quantise_head(s, i / m->kv_heads, i % m->kv_heads, k_end, v_end);
    s->k_end = k_end;
    s->v_end = v_end;
    s->seconds += machine_seconds() - began;
    return true;
}

/* A group of keys is kept whole or not at all. */
static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    struct kivi *s = from_store(store);

    (void)error;
    if (*tokens < s->k_end) {
        *tokens -= *tokens % s->shape.group;
        s->k_end = *tokens;
    }
    if (*tokens < s->v_end)
        s->v_end = *tokens;
    return true;
}

static size_t bytes_of(const struct model *m, pkv_dtype dtype, const struct shape *shape,
                       size_t tokens, size_t k_end, size_t v_end)
{
    size_t d = m->head_dim, codes = (k_end + v_end) * d * shape->bits / 8;
    size_t groups = d * (k_end / shape->group) + d / shape->group * v_end;
    size_t dense = (2 * tokens - k_end - v_end) * d * policy_element_bytes(dtype);

    return m->layer_count * m->kv_heads * (codes + QUANTISE_GROUP_BYTES * groups + dense);
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct kivi *s = from_store(store);

    (void)error;
    stats->payload_bytes = bytes_of(s->dense.rows.model, s->dense.rows.dtype, &s->shape,
                                    store->tokens, s->k_end, s->v_end);
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
    const struct shape shape = shape_of(spec);

    (void)error;
    *bytes = bytes_of(size->model, size->dtype, &shape, size->tokens,
                      end_of_keys(&shape, 0, size->tokens), end_of_values(&shape, 0, size->tokens));
    return true;
}

static bool open_kivi(const struct kv_spec *spec, const struct kv_store_options *options,
                      struct kv_store **store, struct error *error)
{
    struct kivi *s = dense_store_open(sizeof *s, &operations, options, error);

    if (s == NULL)
        return false;
    s->shape = shape_of(spec);
    *store = &s->dense.store;
    return true;
}

const struct policy policy_kivi = {
    .name = "kivi",
    .summary = "KIVI: old tokens in 2 or 4 bits, by groups",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .check = check,
    .resolve = resolve,
    .bytes = count_bytes,
    .open = open_kivi,
};
