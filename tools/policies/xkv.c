/* SPDX-License-Identifier: MIT */
/*
 * xkv: Chang et al., "xKV: Cross-Layer KV-Cache Compression via Aligned Singular Vector Extraction"
 * (ICML 2026; first "xKV: Cross-Layer SVD for KV-Cache Compression", 2025).
 *
 * Layers are taken in groups of `group` adjacent ones, the last group what is left. The prompt, the
 * first step, of S tokens, is attended exactly. When it ends, K before RoPE, of all KV heads of a
 * group's g layers side by side, S rows of C = g kv_heads d columns, and V likewise, are each
 * replaced by
 *     X = [X_1 ... X_g] ~ L [R_1 ... R_g],  L = U_r D^(1/2) (S x r),  R = D^(1/2) V_r^T (r x C)
 * with the r largest singular values D of X and their vectors: L, one row for each token, is shared
 * by the layers, and R_l is layer l's. Both are rounded to the storage type. K is turned by RoPE
 * when it is read back. Later tokens are dense.
 *
 *     r = floor(ratio 2 S C / (S + C)) for K and V together, r_K = round(2 r / 5), r_V = r - r_K,
 *     each at least 1 and at most min(S, C)
 *
 * Bytes, the sum over groups: (r_K + r_V) (S + C) b + 2 C (T - S) b.
 *
 * Deviations: the authors fix the ranks, to 384 and 576 for 4 layers of Llama 3.1 8B, whatever the
 * prompt; here they follow from it, in the same proportion, so that policies compare at equal
 * storage. Selective reconstruction (xKV-SR), which is about speed, is left out: all of the prompt
 * is attended.
 */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../options.h"
#include "../runner/rope.h"
#include "dense_rows.h"
#include "low_rank.h"
#include "policy.h"
#include "rounding.h"

/* LAPACK counts the 1 + 6 n + 2 n^2 elements of its workspace in 32 bits. */
#define MOST_CHANNELS 32766

enum { GROUP, RATIO };

static const struct policy_key keys[] = {
    [GROUP] = {.name = "group", .preset = "4", .least = 1, .most = 1000000},
    [RATIO] = {.name = "ratio", .kind = POLICY_REAL, .preset = "0.6", .most = 1, .positive = true},
};

struct shape {
    size_t group;
    double ratio;
};

struct xkv {
    struct dense_store dense; /* in the first step keys before RoPE, once they were attended */
    struct shape shape;
    size_t prompt; /* its tokens are factors; 0: there is none yet */
    double seconds;
};

/* The layers from `first` on, and what becomes of their K and V. */
struct group {
    size_t first, layers;
    size_t channels; /* C */
    size_t rank[2];  /* of K, V */
};

static struct xkv *from_store(struct kv_store *store)
{
    return (struct xkv *)store;
}

static struct shape shape_of(const struct kv_spec *spec)
{
    return (struct shape){kv_spec_count(spec, GROUP), spec->values[RATIO].number};
}

static size_t group_count(const struct shape *shape, const struct model *m)
{
    return (m->layer_count + shape->group - 1) / shape->group;
}

static size_t clamp_rank(size_t rank, size_t most)
{
    return rank < 1 ? 1 : rank > most ? most : rank;
}

static struct group group_of(const struct shape *shape, const struct model *m, size_t index,
                             size_t prompt)
{
    struct group group = {.first = index * shape->group, .layers = shape->group};
    double s = (double)prompt, c;
    size_t most, rank, rank_k;

    if (group.layers > m->layer_count - group.first)
        group.layers = m->layer_count - group.first;
    group.channels = group.layers * m->kv_heads * m->head_dim;
    c = (double)group.channels;
    most = prompt < group.channels ? prompt : group.channels;
    rank = (size_t)floor(shape->ratio * 2 * s * c / (s + c));
    rank_k = (size_t)round((double)rank * 2 / 5);
    group.rank[0] = clamp_rank(rank_k, most);
    group.rank[1] = clamp_rank(rank - rank_k, most);
    return group;
}

static bool resolve(struct kv_spec *spec, const struct model *m, struct error *error)
{
    const struct shape shape = shape_of(spec);
    const struct group group = group_of(&shape, m, 0, 1);

    return group.channels <= MOST_CHANNELS ||
           error_set(error,
                     "--kv xkv: %zu layers of %zu KV heads with head dimension %zu have %zu "
                     "channels, more than the %d whose vectors LAPACK finds at once; a smaller "
                     "group has fewer",
                     group.layers, m->kv_heads, m->head_dim, group.channels, MOST_CHANNELS);
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct kv_layer plain = *io;

    if (!dense_store_layer(store, io, error))
        return false;
    plain.k = io->plain_k;
    return store->tokens > 0 || dense_rows_append(&from_store(store)->dense.rows, &plain, 0, error);
}

/* K (kind 0) or V (1) of the group, a row for each token. */
static float *rows_of(const struct xkv *s, const struct group *group, size_t head, int kind)
{
    size_t l = group->first + head / s->dense.rows.model->kv_heads,
           h = head % s->dense.rows.model->kv_heads;

    return kind == 0 ? dense_rows_k(&s->dense.rows, l, h) : dense_rows_v(&s->dense.rows, l, h);
}

/* Copies between the rows of the heads and x [prompt, channels], or if `turned` its transpose. */
static void copy_group(const struct xkv *s, const struct group *group, int kind, bool turned,
                       bool back, float *x)
{
    const size_t d = s->dense.rows.model->head_dim, tokens = s->prompt;

    for (size_t head = 0; head < group->channels / d; head++) {
        float *rows = rows_of(s, group, head, kind);

        for (size_t t = 0; t < tokens; t++) {
            for (size_t c = 0; c < d; c++) {
                size_t channel = head * d + c;
                float *element =
                    x + (turned ? channel * tokens + t : t * group->channels + channel);

                if (back)
                    rows[t * d + c] = *element;
                else
                    *element = rows[t * d + c];
            }
        }
    }
}

/* Shares the singular values, the lengths of left's columns [rows, rank], with right [rank,
 * columns]. */
static void share_values(float *left, float *right, size_t rows, size_t columns, size_t rank)
{
    for (size_t r = 0; r < rank; r++) {
        float length = cblas_snrm2((blasint)rows, left + r, (blasint)rank);

        if (length > 0) {
            cblas_sscal((blasint)rows, 1 / sqrtf(length), left + r, (blasint)rank);
            cblas_sscal((blasint)columns, sqrtf(length), right + r * columns, 1);
        }
    }
}

/* Replaces x [rows, columns], rows >= columns, by what its factors give back. */
static bool factorize(float *x, size_t rows, size_t columns, size_t rank, pkv_dtype dtype)
{
    double *basis = malloc(rank * columns * sizeof *basis);
    float *right = malloc(rank * columns * sizeof *right);
    float *left = malloc(rows * rank * sizeof *left);
    bool done = basis != NULL && right != NULL && left != NULL &&
                low_rank_basis(x, rows, columns, rank, basis);

    if (done) {
        for (size_t i = 0; i < rank * columns; i++)
            right[i] = (float)basis[i];
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)rows, (blasint)rank,
                    (blasint)columns, 1, x, (blasint)columns, right, (blasint)columns, 0, left,
                    (blasint)rank);
        share_values(left, right, rows, columns, rank);
        rounding_row(dtype, left, left, rows * rank);
        rounding_row(dtype, right, right, rank * columns);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)rows, (blasint)columns,
                    (blasint)rank, 1, left, (blasint)rank, right, (blasint)columns, 0, x,
                    (blasint)columns);
    }
    free(left);
    free(right);
    free(basis);
    return done;
}

static void turn_keys(const struct xkv *s, const struct group *group, float *angles)
{
    const struct model *m = s->dense.rows.model;
    const size_t d = m->head_dim;

    for (size_t t = 0; t < s->prompt; t++) {
        rope_angles(m, t, angles, angles + d / 2);
        for (size_t head = 0; head < group->channels / d; head++)
            rope_rotate(m, rows_of(s, group, head, 0) + t * d, angles, angles + d / 2);
    }
}

/* Works on the side with fewer vectors, of tokens or of channels. */
static bool compress(const struct xkv *s, const struct group *group, int kind)
{
    size_t tokens = s->prompt, channels = group->channels;
    bool turned = tokens < channels;
    float *x = malloc(tokens * channels * sizeof *x);
    float *angles = malloc(s->dense.rows.model->head_dim * sizeof *angles);
    bool done = x != NULL && angles != NULL;

    if (done) {
        copy_group(s, group, kind, turned, false, x);
        done = factorize(x, turned ? channels : tokens, turned ? tokens : channels,
                         group->rank[kind], s->dense.rows.dtype);
    }
    if (done) {
        copy_group(s, group, kind, turned, true, x);
        if (kind == 0)
            turn_keys(s, group, angles);
    }
    free(angles);
    free(x);
    return done;
}

static bool end(struct kv_store *store, struct error *error)
{
    struct xkv *s = from_store(store);
    const struct model *m = s->dense.rows.model;
    size_t failures = 0;
    double began = machine_seconds();

    if (store->tokens > 0)
        return true;
    s->prompt = store->step;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)                             \
    num_threads(store->options.threads)
    for (size_t i = 0; i < 2 * group_count(&s->shape, m); i++) {
        struct group group = group_of(&s->shape, m, i / 2, s->prompt);

        failures += !compress(s, &group, (int)(i % 2));
    }
    s->seconds += machine_seconds() - began;
    return failures == 0 || error_set(error, "KV cache: xkv: out of memory, or no convergence");
}

/* The factors are kept whole or not at all. */
static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    (void)error;
    if (*tokens < from_store(store)->prompt)
        *tokens = 0;
    return true;
}

static size_t bytes_of(const struct shape *shape, const struct model *m, pkv_dtype dtype,
                       size_t prompt, size_t tokens)
{
    size_t elements = 0;

    if (tokens == 0)
        return 0;
    for (size_t i = 0; i < group_count(shape, m); i++) {
        struct group group = group_of(shape, m, i, prompt);

        elements += (group.rank[0] + group.rank[1]) * (prompt + group.channels);
    }
    return elements * policy_element_bytes(dtype) + policy_raw_bytes(m, dtype, tokens - prompt);
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct xkv *s = from_store(store);

    (void)error;
    stats->payload_bytes =
        bytes_of(&s->shape, s->dense.rows.model, s->dense.rows.dtype, s->prompt, store->tokens);
    stats->reserved_bytes = s->dense.rows.bytes;
    stats->factorize_seconds = s->seconds;
    return true;
}

static const struct kv_store_operations operations = {
    .reads_plain_k = true,
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
    *bytes = bytes_of(&shape, size->model, size->dtype, size->prompt, size->tokens);
    return true;
}

static bool open_xkv(const struct kv_spec *spec, const struct kv_store_options *options,
                     struct kv_store **store, struct error *error)
{
    struct xkv *s = dense_store_open(sizeof *s, &operations, options, error);

    if (s == NULL)
        return false;
    s->shape = shape_of(spec);
    *store = &s->dense.store;
    return true;
}

const struct policy policy_xkv = {
    .name = "xkv",
    .summary = "xKV: low-rank factors of the prompt, shared by adjacent layers",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .resolve = resolve,
    .bytes = count_bytes,
    .open = open_xkv,
};
