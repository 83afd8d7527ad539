/* SPDX-License-Identifier: MIT */
/*
 * palu: Chang et al., "Palu: KV-Cache Compression with Low-Rank Projection" (ICLR 2025), the
 * variant G-LRD with ranks by Fisher information, as the PuzzleKV paper compares it (Section 4.2,
 * Appendix A.3).
 *
 * The projections of keys and values are cut into groups of 4 KV heads; the last group takes what
 * is left. With W [4 d, hidden] the rows of a group and C = E[h h^T] the second moment of their
 * input h, measured by `puzzlekv-eval calibrate`, the rank-r product that is nearest to W on that
 * input is
 *     W ~ B A,  B: the r leading eigenvectors of W C W^T (4 d x r),  A = B^T W (r x hidden).
 * That is Palu's whitened decomposition: with any S such that S S^T = C, B are the leading left
 * singular vectors of W S, and U_r S_r V_r^T S^-1 = U_r U_r^T W S S^-1 = B B^T W; neither S nor its
 * inverse, which a singular C does not have, has to be computed.
 *
 * What is cached of a token is the latent z = A h of each group, rounded to the storage type. Keys
 * and values are B z, and what the model does to a key behind its projection (bias, norm, RoPE)
 * comes after it. So they are approximations from the first token on, and the prompt is not
 * attended exactly.
 *
 * Ranks: with p one of the 2 layers projections, f_p its Fisher information and D = kv_heads d,
 *     R = round(ratio 2 layers D),  r_p = min(D, floor(R f_p / sum f)),
 * then one more for each projection below D in turn, those first that lack least, until the sum is
 * R. A projection's rank is shared among its groups by their heads, and each group's is rounded to
 * a multiple of `align`, but not to 0. f_p is the mean over the weights of the root of the mean
 * squared gradient of the loss, which tools/fisher.py adds to the calibration; without it all f_p
 * are equal.
 *
 * Bytes: T b sum over all groups of r. A and B replace the weights of the projections, and are
 * counted as weights, not as cache.
 *
 * Deviations: the official code has align=32, for its kernels; here it is 1, so that the ratio is
 * what is asked for also with small heads. It splits the singular values between A and B, which
 * scales the elements of a latent but not their relative rounding.
 */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../calibration.h"
#include "../runner/rms_norm.h"
#include "../runner/rope.h"
#include "dense_rows.h"
#include "low_rank.h"
#include "policy.h"
#include "rounding.h"

enum { CALIBRATION, RATIO, RANKS, ALIGN };

enum { RANKS_FISHER, RANKS_UNIFORM };

static const struct policy_key keys[] = {
    [CALIBRATION] = {.name = "calibration", .kind = POLICY_FILE},
    [RATIO] = {.name = "ratio", .kind = POLICY_REAL, .preset = "0.6", .most = 1, .positive = true},
    [RANKS] = {.name = "ranks", .kind = POLICY_CHOICE, .choices = "fisher|uniform"},
    [ALIGN] = {.name = "align", .preset = "1", .least = 1, .most = 512},
};

#define GROUP_HEADS 4

/* Rows that are multiplied at once: of fixed size, for the same bits with any number of threads. */
#define BLOCK 64

/* A group of one layer's keys or values. */
struct factors {
    size_t first, width, rank; /* columns of K or V, and of the latents */
    float *down;               /* A [rank, hidden] */
    float *up;                 /* B^T [rank, width] */
};

struct palu {
    struct kv_store store;
    struct factors *factors; /* [layers, 2, groups], keys first */
    size_t groups, most_rank;
    struct dense_rows rows; /* as they are read back, in f32 */
};

static struct palu *from_store(struct kv_store *store)
{
    return (struct palu *)store;
}

/* ---- Ranks ----------------------------------------------------------------------------------- */

static size_t group_count(const struct model *m)
{
    return (m->kv_heads + GROUP_HEADS - 1) / GROUP_HEADS;
}

/* What one projection lacks of its share. */
struct lack {
    size_t projection;
    double rank;
};

static int compare_lacks(const void *a, const void *b)
{
    const struct lack *x = a, *y = b;

    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->projection > y->projection) - (x->projection < y->projection);
}

/* ranks [count] of the projections, from their weights, of which one is not 0. */
static void share_ranks(const double *weights, struct lack *lacks, size_t count, size_t total,
                        size_t most, size_t least, size_t *ranks)
{
    size_t left = total;
    double sum = 0;

    for (size_t i = 0; i < count; i++)
        sum += weights[i];
    for (size_t i = 0; i < count; i++) {
        const double share = (double)total * (weights[i] / sum);

        ranks[i] = share < (double)most ? (size_t)share : most;
        ranks[i] = ranks[i] < left ? ranks[i] : left;
        left -= ranks[i];
        lacks[i] = (struct lack){i, share - (double)ranks[i]};
    }
    qsort(lacks, count, sizeof *lacks, compare_lacks);
    while (left > 0) {
        for (size_t i = 0; i < count && left > 0; i++) {
            if (ranks[lacks[i].projection] < most) {
                ranks[lacks[i].projection]++;
                left--;
            }
        }
    }
    for (size_t i = 0; i < count; i++)
        ranks[i] = ranks[i] > least ? ranks[i] : least;
}

/* The first head of a group; kv_heads behind the last. */
static size_t group_head(const struct model *m, size_t group)
{
    const size_t head = group * GROUP_HEADS;

    return head < m->kv_heads ? head : m->kv_heads;
}

/* Of a projection's rank that of a group. */
static size_t group_rank(const struct model *m, size_t rank, size_t group, size_t align)
{
    const size_t first = group_head(m, group), end = group_head(m, group + 1);
    const size_t own = rank * end / m->kv_heads - rank * first / m->kv_heads;
    const size_t multiples = (own + align / 2) / align;
    const size_t rounded = (multiples > 0 ? multiples : 1) * align;
    const size_t width = (end - first) * m->head_dim;

    return rounded < width ? rounded : width;
}

/* ranks [layers, 2, groups], keys first. */
static bool find_ranks(const struct kv_spec *spec, const struct model *m,
                       const struct calibration *calibration, size_t *ranks, struct error *error)
{
    const size_t count = 2 * m->layer_count, most = m->kv_heads * m->head_dim;
    const size_t total = (size_t)floor(spec->values[RATIO].number * (double)(count * most) + 0.5);
    const size_t groups = group_count(m);
    size_t *projections = calloc(count, sizeof *projections);
    double *weights = calloc(2 * count, sizeof *weights);
    struct lack *lacks = calloc(count, sizeof *lacks);
    bool done = projections != NULL && weights != NULL && lacks != NULL;

    if (!done)
        error_set(error, "out of memory for the ranks");
    if (done && kv_spec_count(spec, RANKS) == RANKS_FISHER) {
        double *parts = weights + count;

        done = calibration_fisher(calibration, CALIBRATION_K, parts, error) &&
               calibration_fisher(calibration, CALIBRATION_V, parts + m->layer_count, error);
        for (size_t i = 0; i < count; i++)
            weights[i] = parts[i % 2 * m->layer_count + i / 2];
    } else {
        for (size_t i = 0; i < count && done; i++)
            weights[i] = 1;
    }
    if (done)
        share_ranks(weights, lacks, count, total, most, groups, projections);
    for (size_t i = 0; i < count * groups && done; i++)
        ranks[i] = group_rank(m, projections[i / groups], i % groups, kv_spec_count(spec, ALIGN));
    free(lacks);
    free(weights);
    free(projections);
    return done;
}

/* ---- Factors --------------------------------------------------------------------------------- */

/* What factors are computed with, of one projection. */
struct workspace {
    double *moment; /* C [hidden, hidden] */
    double *weight; /* W [kv_heads head_dim, hidden] */
    double *image;  /* W C, likewise */
    double *gram;   /* W C W^T of a group [width, width] */
    double *basis;  /* [width, width] */
    double *down;   /* B^T W [width, hidden] */
    float *row;     /* [hidden] */
};

static bool open_workspace(struct workspace *w, const struct model *m)
{
    const size_t rows = m->kv_heads * m->head_dim, width = GROUP_HEADS * m->head_dim;

    *w = (struct workspace){.moment = calloc(m->hidden, m->hidden * sizeof *w->moment),
                            .weight = calloc(rows, m->hidden * sizeof *w->weight),
                            .image = calloc(rows, m->hidden * sizeof *w->image),
                            .gram = calloc(width, width * sizeof *w->gram),
                            .basis = calloc(width, width * sizeof *w->basis),
                            .down = calloc(width, m->hidden * sizeof *w->down),
                            .row = calloc(m->hidden, sizeof *w->row)};
    return w->moment != NULL && w->weight != NULL && w->image != NULL && w->gram != NULL &&
           w->basis != NULL && w->down != NULL && w->row != NULL;
}

static void close_workspace(struct workspace *w)
{
    free(w->row);
    free(w->down);
    free(w->basis);
    free(w->gram);
    free(w->image);
    free(w->weight);
    free(w->moment);
}

static void read_weight(const struct weight *weight, float *row, double *to)
{
    for (size_t i = 0; i < weight->rows; i++) {
        quant_info(weight->type)
            ->dequantise((const char *)weight->data + i * weight->row_bytes, weight->columns, row);
        for (size_t j = 0; j < weight->columns; j++)
            to[i * weight->columns + j] = row[j];
    }
}

/* The factors of one group; w's moment, weight and image are there. */
static bool factorize(struct factors *f, size_t hidden, struct workspace *w, struct error *error)
{
    const double *weight = w->weight + f->first * hidden, *image = w->image + f->first * hidden;
    const blasint width = (blasint)f->width, rank = (blasint)f->rank, n = (blasint)hidden;

    f->down = malloc(f->rank * hidden * sizeof *f->down);
    f->up = malloc(f->rank * f->width * sizeof *f->up);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, width, width, n, 1, image, n, weight, n, 0,
                w->gram, width);
    if (f->down == NULL || f->up == NULL ||
        !low_rank_eigenvectors(w->gram, f->width, f->rank, w->basis))
        return error_set(error, "palu: out of memory, or no convergence");
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rank, n, width, 1, w->basis, width,
                weight, n, 0, w->down, n);
    for (size_t i = 0; i < f->rank * hidden; i++)
        f->down[i] = (float)w->down[i];
    for (size_t i = 0; i < f->rank * f->width; i++)
        f->up[i] = (float)w->basis[i];
    return true;
}

/* Those of one projection of a layer, the groups of which begin at `factors`. */
static bool factorize_projection(const struct palu *s, const struct calibration *calibration,
                                 size_t layer, enum calibration_part part, struct factors *factors,
                                 struct error *error)
{
    const struct model *m = s->rows.model;
    const struct model_layer *l = &m->layers[layer];
    const size_t rows = m->kv_heads * m->head_dim;
    struct workspace w;
    bool done = open_workspace(&w, m);

    if (!done)
        error_set(error, "palu: out of memory");
    done = done && calibration_hidden(calibration, layer, w.moment, error);
    if (done) {
        read_weight(part == CALIBRATION_K ? &l->k : &l->v, w.row, w.weight);
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)rows, (blasint)m->hidden,
                    (blasint)m->hidden, 1, w.weight, (blasint)m->hidden, w.moment,
                    (blasint)m->hidden, 0, w.image, (blasint)m->hidden);
    }
    for (size_t g = 0; g < s->groups && done; g++)
        done = factorize(&factors[g], m->hidden, &w, error);
    close_workspace(&w);
    return done;
}

static bool factorize_all(struct palu *s, const struct kv_spec *spec,
                          const struct kv_store_options *options,
                          const struct calibration *calibration, struct error *error)
{
    const struct model *m = options->model;
    const size_t projections = 2 * m->layer_count;
    size_t *ranks = calloc(projections * s->groups, sizeof *ranks);
    bool done = ranks != NULL && find_ranks(spec, m, calibration, ranks, error);
    size_t failures = 0;

    if (ranks == NULL)
        error_set(error, "palu: out of memory");
    for (size_t i = 0; i < projections * s->groups && done; i++) {
        const size_t first = group_head(m, i % s->groups);
        struct factors *f = &s->factors[i];

        f->first = first * m->head_dim;
        f->width = (group_head(m, i % s->groups + 1) - first) * m->head_dim;
        f->rank = ranks[i];
        s->most_rank = f->rank > s->most_rank ? f->rank : s->most_rank;
    }
    free(ranks);
    if (!done)
        return false;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures) num_threads(options->threads)
    for (size_t i = 0; i < projections; i++) {
        struct error own;

        if (!factorize_projection(s, calibration, i / 2, (enum calibration_part)(i % 2),
                                  s->factors + i * s->groups, &own)) {
#pragma omp critical(palu_error)
            if (failures++ == 0)
                error_set(error, "%s", own.text);
        }
    }
    return failures == 0;
}

/* ---- The store ------------------------------------------------------------------------------- */

static void close_palu(struct kv_store *store)
{
    struct palu *s = from_store(store);

    for (size_t i = 0; s->factors != NULL && i < 2 * s->rows.model->layer_count * s->groups; i++) {
        free(s->factors[i].down);
        free(s->factors[i].up);
    }
    free(s->factors);
    dense_rows_close(&s->rows);
    free(s);
}

/* One layer's buffers for the tokens of a step. */
struct step {
    float *latents; /* [count, most_rank] of one group at a time */
    float *k, *v;   /* [count, kv_heads, head_dim] */
};

/* What comes after the projection of one token: bias, norm and RoPE. */
static void finish_token(const struct model *m, size_t layer, size_t position, float *k, float *v)
{
    const struct model_layer *l = &m->layers[layer];
    const size_t d = m->head_dim, width = m->kv_heads * d;
    float cosine[256], sine[256];

    rope_angles(m, position, cosine, sine);
    for (size_t i = 0; i < width; i++) {
        k[i] += l->k_bias != NULL ? l->k_bias[i] : 0;
        v[i] += l->v_bias != NULL ? l->v_bias[i] : 0;
    }
    for (size_t h = 0; h < m->kv_heads; h++) {
        if (l->k_norm != NULL)
            rms_norm(k + h * d, l->k_norm, d, m->rms_epsilon, k + h * d);
        rope_rotate(m, k + h * d, cosine, sine);
    }
}

/* Rows first .. first + count - 1 of the step. False if a latent does not fit the storage type. */
static bool read_back(const struct palu *s, const struct kv_layer *io, size_t first, size_t count,
                      const struct step *step)
{
    const struct model *m = s->rows.model;
    const size_t width = m->kv_heads * m->head_dim;
    float *latents = step->latents + first * s->most_rank;
    bool finite = true;

    for (size_t i = 0; i < 2 * s->groups; i++) {
        const struct factors *f = &s->factors[io->layer * 2 * s->groups + i];
        float *x = (i < s->groups ? step->k : step->v) + first * width + f->first;

        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)count, (blasint)f->rank,
                    (blasint)m->hidden, 1, io->hidden + first * m->hidden, (blasint)m->hidden,
                    f->down, (blasint)m->hidden, 0, latents, (blasint)f->rank);
        rounding_row(s->store.options.dtype, latents, latents, count * f->rank);
        for (size_t j = 0; j < count * f->rank; j++)
            finite = finite && isfinite(latents[j]);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)count, (blasint)f->width,
                    (blasint)f->rank, 1, latents, (blasint)f->rank, f->up, (blasint)f->width, 0, x,
                    (blasint)width);
    }
    for (size_t row = first; row < first + count; row++)
        finish_token(m, io->layer, io->position + row, step->k + row * width,
                     step->v + row * width);
    return finite;
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct palu *s = from_store(store);
    const size_t width = s->rows.model->kv_heads * s->rows.model->head_dim;
    const size_t blocks = (io->count + BLOCK - 1) / BLOCK;
    struct step step = {calloc(io->count, s->most_rank * sizeof *step.latents),
                        calloc(io->count, width * sizeof *step.k),
                        calloc(io->count, width * sizeof *step.v)};
    struct kv_layer own = *io;
    size_t failures = 0;
    bool done = false;

    if (step.latents == NULL || step.k == NULL || step.v == NULL) {
        error_set(error, "out of memory for a step of %zu tokens", io->count);
        goto out;
    }
#pragma omp parallel for reduction(+ : failures) num_threads(store->options.threads) if (blocks > 1)
    for (size_t i = 0; i < blocks; i++)
        failures += !read_back(
            s, io, i * BLOCK, io->count - i * BLOCK < BLOCK ? io->count - i * BLOCK : BLOCK, &step);
    if (failures > 0) {
        error_set(error,
                  "KV cache: layer %zu, tokens from %zu on: a latent of K or V is not finite in "
                  "the storage type",
                  io->layer, io->position);
        goto out;
    }
    own.k = step.k;
    own.v = step.v;
    done = dense_rows_append(&s->rows, &own, store->tokens, error) &&
           dense_rows_attend(&s->rows, &own, 0, store->tokens, error);
out:
    free(step.v);
    free(step.k);
    free(step.latents);
    return done;
}

static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    (void)store;
    (void)tokens;
    (void)error;
    return true;
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    const struct palu *s = from_store(store);
    size_t rank = 0;

    (void)error;
    for (size_t i = 0; i < 2 * s->rows.model->layer_count * s->groups; i++)
        rank += s->factors[i].rank;
    stats->payload_bytes = store->tokens * rank * policy_element_bytes(store->options.dtype);
    stats->reserved_bytes = s->rows.bytes;
    return true;
}

static const struct kv_store_operations operations = {
    .reads_hidden = true,
    .close = close_palu,
    .layer = layer,
    .rewind = rewind_to,
    .stats = read_stats,
};

/* ---- The policy ------------------------------------------------------------------------------ */

static bool check(struct kv_spec *spec, const char *text, struct error *error)
{
    return calibration_check(&spec->values[CALIBRATION], text, error);
}

/* Without Fisher information the ranks are equal. */
static bool resolve(struct kv_spec *spec, const struct model *model, struct error *error)
{
    struct kv_value *ranks = &spec->values[RANKS];
    struct calibration *calibration;
    bool fisher, done = true;

    if (!calibration_open(&spec->values[CALIBRATION], model, &calibration, error))
        return false;
    fisher = calibration_has_fisher(calibration);
    if (ranks->typed && (size_t)ranks->number == RANKS_FISHER && !fisher) {
        done = error_set(error, "--kv palu: ranks=fisher: the calibration has no Fisher "
                                "information; tools/fisher.py adds it");
    } else if (!ranks->typed) {
        *ranks = (struct kv_value){.there = true, .number = fisher ? RANKS_FISHER : RANKS_UNIFORM};
        if (!fisher)
            spec->note = "the calibration has no Fisher information, so the ranks are uniform";
    }
    calibration_close(calibration);
    return done;
}

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    const size_t count = 2 * size->model->layer_count * group_count(size->model);
    size_t *ranks = calloc(count, sizeof *ranks);
    struct calibration *calibration = NULL;
    size_t rank = 0;
    bool done;

    if (ranks == NULL)
        return error_set(error, "out of memory for the ranks");
    done = calibration_open(&spec->values[CALIBRATION], size->model, &calibration, error) &&
           find_ranks(spec, size->model, calibration, ranks, error);
    for (size_t i = 0; i < count; i++)
        rank += ranks[i];
    *bytes = size->tokens * rank * policy_element_bytes(size->dtype);
    calibration_close(calibration);
    free(ranks);
    return done;
}

static bool open_palu(const struct kv_spec *spec, const struct kv_store_options *options,
                      struct kv_store **store, struct error *error)
{
    const struct model *m = options->model;
    struct kv_store_options as_read = *options;
    struct calibration *calibration = NULL;
    struct palu *s = calloc(1, sizeof *s);
    bool done = false;

    if (s == NULL)
        return error_set(error, "out of memory for the cache");
    s->store.operations = &operations;
    s->groups = group_count(m);
    as_read.dtype = PKV_F32;
    if (!dense_rows_open(&s->rows, &as_read, error))
        goto out;
    s->factors = calloc(2 * m->layer_count * s->groups, sizeof *s->factors);
    if (s->factors == NULL)
        error_set(error, "out of memory for the cache");
    else
        done = calibration_open(&spec->values[CALIBRATION], m, &calibration, error) &&
               factorize_all(s, spec, options, calibration, error);
out:
    calibration_close(calibration);
    if (!done) {
        s->rows.model = m;
        close_palu(&s->store);
        return false;
    }
    *store = &s->store;
    return true;
}

const struct policy policy_palu = {
    .name = "palu",
    .summary = "Palu G-LRD: low-rank projections of K and V",
    .keys = keys,
    .key_count = sizeof keys / sizeof *keys,
    .own_prefill = true,
    .check = check,
    .resolve = resolve,
    .bytes = count_bytes,
    .open = open_palu,
};
