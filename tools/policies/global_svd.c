/* SPDX-License-Identifier: MIT */
/*
 * global-svd: one basis per layer and KV head for all of the prompt, the controlled baseline of the
 * PuzzleKV paper (Section 4.2, Appendix A.3).
 *
 * The prompt is the first step, of S tokens. When it ends, K (after RoPE) and V of its compressible
 * region, N tokens, the whole pages between sink and window as puzzle would factorize them, are
 * each replaced by
 *     X ~ L R,  R: the r leading right singular vectors of X (r x d),  L = X R^T (N x r),
 * both rounded to the storage type, with
 *     r = floor(ratio S d / (S + d)), at least 1 and at most min(N, d).
 * Later tokens stay dense, and so does a prompt without such a region.
 *
 * Bytes, per layer and KV head: 2 r (N + d) b for the region, 2 d b for every other token.
 *
 * Deviation: the paper says that the rank accounts for the dense regions too, but not how; this is
 * the rank of its Section 4.2, which gives the 76 that it reports for 16K and d = 128.
 */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../options.h"
#include "dense_pages.h"
#include "dense_rows.h"
#include "low_rank.h"
#include "policy.h"
#include "rounding.h"

enum { RATIO = DENSE_PAGES_KEYS };

static const struct policy_key keys[] = {
    DENSE_PAGES_ROWS,
    [RATIO] = {.name = "ratio", .kind = POLICY_REAL, .preset = "0.6", .most = 1, .positive = true},
};

struct region {
    size_t first, count, rank; /* tokens; 0: nothing is compressed */
};

struct global_svd {
    struct dense_store dense;
    struct dense_pages pages;
    double ratio;
    struct region region;
    double seconds;
};

static struct global_svd *from_store(struct kv_store *store)
{
    return (struct global_svd *)store;
}

static struct region region_of(const struct dense_pages *pages, double ratio, size_t prompt,
                               size_t head_dim)
{
    const double s = (double)prompt, d = (double)head_dim;
    struct region region;

    region.count = dense_pages_range(pages, prompt, &region.first) - region.first;
    region.rank = (size_t)floor(ratio * s * d / (s + d));
    if (region.rank < 1)
        region.rank = 1;
    if (region.rank > head_dim)
        region.rank = head_dim;
    if (region.rank > region.count)
        region.rank = region.count;
    return region;
}

/* Replaces x [count, d] by what its factors give back. */
static bool factorize(const struct region *region, pkv_dtype dtype, float *x, size_t d)
{
    size_t n = region->count, rank = region->rank;
    double *basis = malloc(rank * d * sizeof *basis);
    float *right = malloc(rank * d * sizeof *right);
    float *left = malloc(n * rank * sizeof *left);
    bool done =
        basis != NULL && right != NULL && left != NULL && low_rank_basis(x, n, d, rank, basis);

    if (done) {
        for (size_t i = 0; i < rank * d; i++)
            right[i] = (float)basis[i];
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)n, (blasint)rank, (blasint)d,
                    1, x, (blasint)d, right, (blasint)d, 0, left, (blasint)rank);
        rounding_row(dtype, left, left, n * rank);
        rounding_row(dtype, right, right, rank * d);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)n, (blasint)d,
                    (blasint)rank, 1, left, (blasint)rank, right, (blasint)d, 0, x, (blasint)d);
    }
    free(left);
    free(right);
    free(basis);
    return done;
}

static bool end(struct kv_store *store, struct error *error)
{
    struct global_svd *s = from_store(store);
    const struct model *m = s->dense.rows.model;
    size_t heads = m->layer_count * m->kv_heads, d = m->head_dim, failures = 0;
    double began = machine_seconds();
    struct region region;

    if (store->tokens > 0)
        return true;
    region = region_of(&s->pages, s->ratio, store->step, d);
    if (region.count == 0)
        return true;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)                             \
    num_threads(store->options.threads)
    for (size_t i = 0; i < 2 * heads; i++) {
        size_t l = i / 2 / m->kv_heads, h = i / 2 % m->kv_heads;
        float *x =
            i % 2 == 0 ? dense_rows_k(&s->dense.rows, l, h) : dense_rows_v(&s->dense.rows, l, h);

        failures += !factorize(&region, s->dense.rows.dtype, x + region.first * d, d);
    }
    if (failures > 0)
        return error_set(error, "KV cache: global-svd: out of memory, or no convergence");
    s->region = region;
    s->seconds += machine_seconds() - began;
    return true;
}

/* The factors are kept whole or not at all. */
static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    struct global_svd *s = from_store(store);

    (void)error;
    if (*tokens < s->region.first + s->region.count)
        *tokens = 0;
    if (*tokens == 0)
        s->region = (struct region){0};
    return true;
}

static size_t bytes_of(const struct model *m, pkv_dtype dtype, const struct region *region,
                       size_t tokens)
{
    size_t factors = 2 * region->rank * (region->count + m->head_dim) * policy_element_bytes(dtype);

    return (region->count > 0 ? m->layer_count * m->kv_heads * factors : 0) +
           policy_raw_bytes(m, dtype, tokens - region->count);
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct global_svd *s = from_store(store);

    (void)error;
    stats->payload_bytes =
        bytes_of(s->dense.rows.model, s->dense.rows.dtype, &s->region, store->tokens);
    stats->reserved_bytes = s->dense.rows.bytes;
    stats->factorize_seconds = s->seconds;
    return true;
}

static const struct kv_store_operations operations = {
    .close = dense_store_close,
    .layer = dense_store_layer,
    .end = end,
    .rewind = rewind_to,
    .stats = read_stats,
};

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    struct dense_pages pages = dense_pages_of(spec);
    struct region region =
        region_of(&pages, spec->values[RATIO].number, size->prompt, size->model->head_dim);

    (void)error;
    *bytes = bytes_of(size->model, size->dtype, &region, size->tokens);
    return true;
}

static bool open_global_svd(const struct kv_spec *spec, const struct kv_store_options *options,
                            struct kv_store **store, struct error *error)
{
    struct global_svd *s = dense_store_open(sizeof *s, &operations, options, error);

    if (s == NULL)
        return false;
    s->pages = dense_pages_of(spec);
    s->ratio = spec->values[RATIO].number;
    *store = &s->dense.store;
    return true;
}

const struct policy policy_global_svd = {
    .name = "global-svd",
    .summary = "one low-rank basis for all of the prompt",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .bytes = count_bytes,
    .open = open_global_svd,
};
