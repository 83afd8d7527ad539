/* SPDX-License-Identifier: MIT */
/*
 * ojakv: Zhu et al., "OjaKV: Context-Aware Online Low-Rank KV Cache Compression" (Findings of the
 * ACL 2026), the variant OjaKV-PF, full attention to the prompt and a compressed cache behind it,
 * as the PuzzleKV paper reproduces it (Appendix A.3 and C).
 *
 * Each layer and KV head has a basis for keys (after RoPE) and one for values, U (d x r) with
 * orthonormal columns, r = round(ratio d), at first the r leading eigenvectors of the second moment
 * of such keys or values in the calibration, that is the right singular vectors of what it saw. The
 * first `sink` tokens and the last `recent` ones stay dense. The tokens between are kept as latents
 *     z = U^T x,  read back as U z,
 * rounded to the storage type: those of the prompt at its end, later ones `update` at a time, once
 * so many have left the recent ones; until then they are dense. Before they are compressed, at most
 * `rows` of them, spread evenly, X (n x d), move the basis by Oja's rule:
 *     U <- orthonormalised (U + rate X^T X U / |X|^2)  (Gram-Schmidt, columns in order),
 * and the latents that are there are taken into the new basis: z <- U_new^T U_old z.
 *
 * Bytes, per layer and KV head, of T tokens, N of them compressed:
 *     2 N r b + 2 (T - N) d b, and 2 d r 4 for the bases in f32, if N > 0
 * (before, they are the calibration's).
 *
 * Deviations: how many tokens stay dense, how often and how fast the basis moves, and what becomes
 * of older latents then, is not stated where the PuzzleKV paper describes the variant. Taking them
 * into the new basis is the least change to what they are read back as; the step is relative to
 * the energy of X, so that one rate serves all heads. The paper's calibration has another seed than
 * Palu's; here both share one.
 */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "../calibration.h"
#include "../options.h"
#include "dense_rows.h"
#include "low_rank.h"
#include "policy.h"
#include "rounding.h"

enum { CALIBRATION, RATIO, SINK, RECENT, UPDATE, ROWS, RATE };

static const struct policy_key keys[] = {
    [CALIBRATION] = {.name = "calibration", .kind = POLICY_FILE},
    [RATIO] = {.name = "ratio", .kind = POLICY_REAL, .preset = "0.6", .most = 1, .positive = true},
    [SINK] = {.name = "sink", .preset = "32", .most = 1000000},
    [RECENT] = {.name = "recent", .preset = "32", .most = 1000000},
    [UPDATE] = {.name = "update", .preset = "32", .least = 1, .most = 1000000},
    [ROWS] = {.name = "rows", .preset = "256", .least = 1, .most = 4096},
    [RATE] = {.name = "rate", .kind = POLICY_REAL, .preset = "10", .most = 1000},
};

/* Tokens that are taken into a basis at once. */
#define BLOCK 64

struct shape {
    size_t rank, sink, recent, update, rows;
    double rate;
};

/* What one thread moves a basis with. */
struct workspace {
    double *x;      /* X [rows, head_dim] */
    double *image;  /* X U [rows, rank] */
    double *basis;  /* U^T [rank, head_dim] */
    float *latents; /* [BLOCK, rank] */
};

struct ojakv {
    struct kv_store store;
    struct shape shape;
    struct dense_rows rows; /* as they are read back */
    float *initial;         /* U^T of the calibration [layers, kv_heads, 2, rank, head_dim] */
    float *bases;           /* as they are now */
    size_t basis_count;
    size_t compressed;            /* tokens from shape.sink on */
    struct workspace *workspaces; /* [threads] */
    double seconds;
};

static struct ojakv *from_store(struct kv_store *store)
{
    return (struct ojakv *)store;
}

static struct shape shape_of(const struct kv_spec *spec, const struct model *m)
{
    const double rank = floor(spec->values[RATIO].number * (double)m->head_dim + 0.5);

    return (struct shape){.rank = rank < 1 ? 1 : (size_t)rank,
                          .sink = kv_spec_count(spec, SINK),
                          .recent = kv_spec_count(spec, RECENT),
                          .update = kv_spec_count(spec, UPDATE),
                          .rows = kv_spec_count(spec, ROWS),
                          .rate = spec->values[RATE].number};
}

/* Tokens that are compressed once there are `tokens`, where `compressed` are already; of the first
 * step, the prompt, all that may be. */
static size_t compressed_after(const struct shape *shape, size_t compressed, size_t tokens,
                               bool first_step)
{
    const size_t dense = shape->sink + shape->recent + compressed;
    const size_t ready = tokens > dense ? tokens - dense : 0;

    return compressed + (first_step ? ready : ready - ready % shape->update);
}

static size_t bytes_of(const struct model *m, pkv_dtype dtype, const struct shape *shape,
                       size_t compressed, size_t tokens)
{
    const size_t heads = m->layer_count * m->kv_heads;
    const size_t latents = heads * 2 * compressed * shape->rank * policy_element_bytes(dtype);
    const size_t bases = heads * 2 * m->head_dim * shape->rank * sizeof(float);

    return (compressed > 0 ? latents + bases : 0) + policy_raw_bytes(m, dtype, tokens - compressed);
}

/* ---- Bases ----------------------------------------------------------------------------------- */

static float *basis_of(const struct ojakv *s, float *bases, size_t i)
{
    return bases + i * s->shape.rank * s->rows.model->head_dim;
}

/* Makes rows orthonormal, in order; each is cleared of those before it twice, for accuracy. */
static void orthonormalise(double *rows, size_t count, size_t n)
{
    for (size_t i = 0; i < count; i++) {
        double *row = rows + i * n;

        for (size_t j = 0; j < 2 * i; j++) {
            const double *other = rows + j % i * n;

            cblas_daxpy((blasint)n, -cblas_ddot((blasint)n, row, 1, other, 1), other, 1, row, 1);
        }
        cblas_dscal((blasint)n, 1 / cblas_dnrm2((blasint)n, row, 1), row, 1);
    }
}

/* Moves a basis by Oja's rule, on `count` tokens at x. */
static void move_basis(const struct shape *shape, size_t d, const float *x, size_t count,
                       float *basis, struct workspace *w)
{
    const size_t rows = count < shape->rows ? count : shape->rows, r = shape->rank;
    double energy = 0;

    for (size_t i = 0; i < rows; i++) {
        for (size_t c = 0; c < d; c++) {
            const double value = x[i * count / rows * d + c];

            w->x[i * d + c] = value;
            energy += value * value;
        }
    }
    if (energy == 0)
        return;
    for (size_t i = 0; i < r * d; i++)
        w->basis[i] = basis[i];
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)rows, (blasint)r, (blasint)d, 1,
                w->x, (blasint)d, w->basis, (blasint)d, 0, w->image, (blasint)r);
    cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (blasint)r, (blasint)d, (blasint)rows,
                shape->rate / energy, w->image, (blasint)r, w->x, (blasint)d, 1, w->basis,
                (blasint)d);
    orthonormalise(w->basis, r, d);
    for (size_t i = 0; i < r * d; i++)
        basis[i] = (float)w->basis[i];
}

/* Replaces tokens by what their latents give back. */
static void compress(const struct ojakv *s, const float *basis, float *x, size_t count,
                     struct workspace *w)
{
    const blasint d = (blasint)s->rows.model->head_dim, r = (blasint)s->shape.rank;

    for (size_t first = 0; first < count; first += BLOCK) {
        const size_t rows = count - first < BLOCK ? count - first : BLOCK;
        float *block = x + first * (size_t)d;

        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)rows, r, d, 1, block, d,
                    basis, d, 0, w->latents, r);
        rounding_row(s->rows.dtype, w->latents, w->latents, rows * s->shape.rank);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)rows, d, r, 1, w->latents,
                    r, basis, d, 0, block, d);
    }
}

/* ---- The store ------------------------------------------------------------------------------- */

static void close_ojakv(struct kv_store *store)
{
    struct ojakv *s = from_store(store);

    for (unsigned i = 0; s->workspaces != NULL && i < store->options.threads; i++) {
        free(s->workspaces[i].x);
        free(s->workspaces[i].image);
        free(s->workspaces[i].basis);
        free(s->workspaces[i].latents);
    }
    free(s->workspaces);
    free(s->bases);
    free(s->initial);
    dense_rows_close(&s->rows);
    free(s);
}

/* A latent's element is at most as long as what it stands for, which must be in the type's range,
 * with a margin for rounding. */
static bool check_lengths(const struct ojakv *s, const struct kv_layer *io, const float *x,
                          const char *what, struct error *error)
{
    const size_t heads = s->rows.model->kv_heads, d = s->rows.model->head_dim;

    for (size_t i = 0; i < io->count * heads; i++) {
        double square = 0;

        for (size_t c = 0; c < d; c++)
            square += (double)x[i * d + c] * x[i * d + c];
        if (!isfinite(rounding_to(s->rows.dtype, (float)(1.01 * sqrt(square)))))
            return error_set(error,
                             "KV cache: layer %zu, KV head %zu, token %zu: %s is too long for "
                             "latents in the storage type",
                             io->layer, i % heads, io->position + i / heads, what);
    }
    return true;
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct ojakv *s = from_store(store);

    return dense_rows_append(&s->rows, io, store->tokens, error) &&
           check_lengths(s, io, io->k, "K", error) && check_lengths(s, io, io->v, "V", error) &&
           dense_rows_attend(&s->rows, io, 0, store->tokens, error);
}

/* Nothing here can fail, so a step either compresses all or has not come to an end. */
static bool end(struct kv_store *store, struct error *error)
{
    struct ojakv *s = from_store(store);
    const struct model *m = s->rows.model;
    const size_t d = m->head_dim, old = s->compressed;
    const size_t compressed =
        compressed_after(&s->shape, old, store->tokens + store->step, store->tokens == 0);
    const double began = machine_seconds();

    (void)error;
    if (compressed == old)
        return true;
#pragma omp parallel for schedule(dynamic, 1) num_threads(store->options.threads)
    for (size_t i = 0; i < s->basis_count; i++) {
        const size_t l = i / 2 / m->kv_heads, h = i / 2 % m->kv_heads;
        float *x = (i % 2 == 0 ? dense_rows_k : dense_rows_v)(&s->rows, l, h) + s->shape.sink * d;
        float *basis = basis_of(s, s->bases, i);
#ifdef _OPENMP
        struct workspace *w = &s->workspaces[omp_get_thread_num()];
#else
        struct workspace *w = s->workspaces;
#endif

        move_basis(&s->shape, d, x + old * d, compressed - old, basis, w);
        compress(s, basis, x, compressed, w);
    }
    s->compressed = compressed;
    s->seconds += machine_seconds() - began;
    return true;
}

/* A basis does not go back. */
static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    struct ojakv *s = from_store(store);

    (void)error;
    if (s->compressed > 0 && *tokens < s->shape.sink + s->compressed)
        *tokens = 0;
    if (*tokens == 0) {
        s->compressed = 0;
        memcpy(s->bases, s->initial,
               s->basis_count * s->shape.rank * s->rows.model->head_dim * sizeof *s->bases);
    }
    return true;
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct ojakv *s = from_store(store);

    (void)error;
    stats->payload_bytes =
        bytes_of(s->rows.model, s->rows.dtype, &s->shape, s->compressed, store->tokens);
    stats->reserved_bytes =
        s->rows.bytes + s->basis_count * s->shape.rank * s->rows.model->head_dim * sizeof *s->bases;
    stats->factorize_seconds = s->seconds;
    return true;
}

static const struct kv_store_operations operations = {
    .close = close_ojakv,
    .layer = layer,
    .end = end,
    .rewind = rewind_to,
    .stats = read_stats,
};

/* ---- The policy ------------------------------------------------------------------------------ */

static bool check(struct kv_spec *spec, const char *text, struct error *error)
{
    return calibration_check(&spec->values[CALIBRATION], text, error);
}

static bool resolve(struct kv_spec *spec, const struct model *model, struct error *error)
{
    struct calibration *calibration;

    if (!calibration_open(&spec->values[CALIBRATION], model, &calibration, error))
        return false;
    calibration_close(calibration);
    return true;
}

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    const struct shape shape = shape_of(spec, size->model);
    const size_t prompt = compressed_after(&shape, 0, size->prompt, true);

    (void)error;
    *bytes = bytes_of(size->model, size->dtype, &shape,
                      compressed_after(&shape, prompt, size->tokens, false), size->tokens);
    return true;
}

/* The bases that the calibration gives. */
static bool read_bases(struct ojakv *s, const struct calibration *calibration, struct error *error)
{
    const struct model *m = s->rows.model;
    const size_t d = m->head_dim, size = s->shape.rank * d;
    double *moment = calloc(d, d * sizeof *moment);
    double *basis = calloc(size, sizeof *basis);
    bool done = moment != NULL && basis != NULL;

    if (!done)
        error_set(error, "out of memory for the cache");
    for (size_t i = 0; i < s->basis_count && done; i++) {
        float *to = basis_of(s, s->initial, i);

        done = calibration_head(calibration, (enum calibration_part)(i % 2), i / 2 / m->kv_heads,
                                i / 2 % m->kv_heads, moment, error);
        if (done && !low_rank_eigenvectors(moment, d, s->shape.rank, basis))
            done = error_set(error, "ojakv: out of memory, or no convergence");
        for (size_t j = 0; j < size && done; j++)
            to[j] = (float)basis[j];
    }
    free(basis);
    free(moment);
    if (done)
        memcpy(s->bases, s->initial, s->basis_count * size * sizeof *s->bases);
    return done;
}

static bool open_workspaces(struct ojakv *s, unsigned threads)
{
    const size_t d = s->rows.model->head_dim, rank = s->shape.rank, rows = s->shape.rows;
    bool done = true;

    s->workspaces = calloc(threads, sizeof *s->workspaces);
    for (unsigned i = 0; s->workspaces != NULL && i < threads; i++) {
        struct workspace *w = &s->workspaces[i];

        w->x = calloc(rows, d * sizeof *w->x);
        w->image = calloc(rows, rank * sizeof *w->image);
        w->basis = calloc(rank, d * sizeof *w->basis);
        w->latents = calloc(BLOCK, rank * sizeof *w->latents);
        done = done && w->x != NULL && w->image != NULL && w->basis != NULL && w->latents != NULL;
    }
    return s->workspaces != NULL && done;
}

static bool open_ojakv(const struct kv_spec *spec, const struct kv_store_options *options,
                       struct kv_store **store, struct error *error)
{
    const struct model *m = options->model;
    struct calibration *calibration = NULL;
    struct ojakv *s = calloc(1, sizeof *s);
    size_t size;
    bool done = false;

    if (s == NULL)
        return error_set(error, "out of memory for the cache");
    s->store.operations = &operations;
    s->store.options.threads = options->threads;
    s->shape = shape_of(spec, m);
    s->basis_count = 2 * m->layer_count * m->kv_heads;
    size = s->shape.rank * m->head_dim * sizeof *s->bases;
    if (!dense_rows_open(&s->rows, options, error))
        goto out;
    s->initial = calloc(s->basis_count, size);
    s->bases = calloc(s->basis_count, size);
    if (s->initial == NULL || s->bases == NULL || !open_workspaces(s, options->threads)) {
        error_set(error, "out of memory for the cache");
        goto out;
    }
    done = calibration_open(&spec->values[CALIBRATION], m, &calibration, error) &&
           read_bases(s, calibration, error);
out:
    calibration_close(calibration);
    if (!done) {
        close_ojakv(&s->store);
        return false;
    }
    *store = &s->store;
    return true;
}

const struct policy policy_ojakv = {
    .name = "ojakv",
    .summary = "OjaKV-PF: a basis for each head, moved while decoding",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .check = check,
    .resolve = resolve,
    .bytes = count_bytes,
    .open = open_ojakv,
};
