/* SPDX-License-Identifier: MIT */
/* puzzlekv-bench factorize: the time that solvers take to make factors of pages, side by side. */
#include "bench.h"

#include <cblas.h>
#include <float.h>
#include <lapacke.h>
#include <math.h>
#include <stdlib.h>

#include "options.h"
#include "random_pages.h"
#include "runner/products.h"

/* Pages of tokens that differ from each other and go into one step, at most; a device is busy with
 * those of a prompt of 32K tokens. */
#define STEP_PAGES        ((size_t)64)
#define DEVICE_STEP_PAGES ((size_t)1024)

enum { COLUMN_TIME, COLUMN_TIME_LOW, COLUMN_TIME_HIGH, COLUMN_EXCESS, COLUMN_SPEEDUP, COLUMNS };

static const struct bench_column columns[COLUMNS] = {
    {"us_per_page", 3}, {"us_low", 3}, {"us_high", 3}, {"excess_error", BENCH_EXPONENT},
    {"speedup", 3},
};

const struct bench_solver bench_solvers[BENCH_SOLVER_COUNT] = {
    {"batched", false, 0, PKV_SOLVER_BATCHED, true, true},
    {"lapack", false, 0, PKV_SOLVER_LAPACK, false, true},
    {"ssyevd", true, PEER_SSYEVD, 0, false, true},
    {"ssyevr", true, PEER_SSYEVR, 0, false, true},
    {"cusolver", false, 0, PKV_SOLVER_CUSOLVER, true, false},
};

/* What all solvers are given: the same K and V again and again, for all layers. */
struct material {
    size_t length, dim, heads; /* of a page, and KV heads */
    size_t rank_k, rank_v;
    size_t step_pages; /* the most of a step */
    float *k, *v;      /* [step_pages * length, heads, dim] */
    size_t pages;      /* of tokens */
    size_t layers;
    void *step_k, *step_v; /* the same for steps of the library */
};

/* K or V of one head of one page of tokens. */
struct problem {
    size_t page, head, rank;
    bool is_key;
    const float *x; /* [length, dim], with rows heads * dim apart */
};

static struct problem problem_at(const struct material *m, size_t number)
{
    struct problem p = {
        .page = number / (2 * m->heads), .head = number / 2 % m->heads, .is_key = number % 2 == 0};

    p.rank = p.is_key ? m->rank_k : m->rank_v;
    p.x = (p.is_key ? m->k : m->v) + (p.page * m->length * m->heads + p.head) * m->dim;
    return p;
}

/* Of one layer. */
static size_t problems_of(const struct material *m, size_t pages)
{
    return pages * m->heads * 2;
}

static size_t all_problems(const struct material *m)
{
    return problems_of(m, m->pages) * m->layers;
}

struct contestant {
    const struct bench_solver *solver;
    double *seconds; /* [repeats], of all pages */
    /* One of the library's. */
    pkv_cache *cache;
    /* A peer. */
    struct peer *peer;
    float *left, *right; /* of the last page; [length, length], [length, dim] */
};

static bool cache_failed(const struct contestant *c, struct error *error)
{
    return error_set(error, "--solver %s: %s", c->solver->name, pkv_cache_message(c->cache));
}

/* ---- The library's --------------------------------------------------------------------------- */

static pkv_config configure(const struct bench_arguments *arguments, const struct material *m,
                            const struct bench_solver *solver, pkv_dtype dtype, size_t layers,
                            size_t pages)
{
    pkv_config config;

    pkv_config_init(&config, sizeof config);
    config.layers = layers;
    config.query_heads = config.kv_heads = m->heads;
    config.head_dim = m->dim;
    config.page_tokens = m->length;
    config.sink_pages = config.window_pages = 0;
    config.rank_k = m->rank_k;
    config.rank_v = m->rank_v;
    config.solver = solver->library;
    config.dtype = dtype;
    config.max_tokens = pages * m->length;
    config.max_step_tokens = (pages < m->step_pages ? pages : m->step_pages) * m->length;
    config.threads = arguments->threads;
    device_configure(arguments->device, &config);
    return config;
}

static bool cache_open(const pkv_config *config, const struct bench_solver *solver,
                       pkv_cache **cache, struct error *error)
{
    char message[PKV_MESSAGE_BYTES];

    return pkv_cache_open(config, cache, message) == PKV_OK ||
           error_set(error, "--solver %s: %s", solver->name, message);
}

/* Of all caches, which are open at the same time. */
static bool check_memory(const struct bench_arguments *arguments, const struct material *m,
                         struct error *error)
{
    pkv_config *configs = calloc(arguments->solver_count, sizeof *configs);
    size_t count = 0;
    bool done = configs != NULL || error_set(error, "out of memory");

    for (size_t i = 0; i < arguments->solver_count && done; i++) {
        if (!arguments->solvers[i]->is_peer)
            configs[count++] = configure(arguments, m, arguments->solvers[i], arguments->dtype,
                                         m->layers, m->pages);
    }
    done = done && bench_check_memory(configs, count, 0, error);
    free(configs);
    return done;
}

/* Fails with the cache's message, or with none if interrupted. */
static bool store_layers(const struct material *m, pkv_step *step, size_t layers)
{
    const pkv_step_io io = {
        .struct_size = sizeof io, .k = {m->step_k, PKV_F32, 0, 0}, .v = {m->step_v, PKV_F32, 0, 0}};

    for (size_t layer = 0; layer < layers; layer++)
        if (interrupt_seen() || pkv_step_layer(step, layer, &io) != PKV_OK)
            return false;
    return true;
}

/* Takes `pages` pages of tokens as a prompt. */
static bool store(const struct contestant *c, const struct material *m, pkv_cache *cache,
                  pkv_seq *seq, size_t layers, size_t pages, struct error *error)
{
    for (size_t done = 0, some; done < pages; done += some) {
        pkv_step *step;

        some = pages - done < m->step_pages ? pages - done : m->step_pages;
        if (pkv_step_begin(cache, &(pkv_step_item){seq, some * m->length}, 1, &step) != PKV_OK)
            return error_set(error, "--solver %s: %s", c->solver->name, pkv_cache_message(cache));
        if (!store_layers(m, step, layers) || pkv_step_end(step) != PKV_OK) {
            if (interrupt_seen())
                error_set(error, "interrupted");
            else
                error_set(error, "--solver %s: %s", c->solver->name, pkv_cache_message(cache));
            pkv_step_abort(step);
            return false;
        }
    }
    return true;
}

static bool library_run(const struct contestant *c, const struct material *m, double *seconds,
                        struct error *error)
{
    double start;
    pkv_seq *seq;

    if (pkv_seq_open(c->cache, &seq) != PKV_OK)
        return cache_failed(c, error);
    start = machine_seconds();
    if (!store(c, m, c->cache, seq, m->layers, m->pages, error))
        return false;
    *seconds = machine_seconds() - start;
    return pkv_seq_close(seq) == PKV_OK || cache_failed(c, error);
}

/* ---- Peers ----------------------------------------------------------------------------------- */

static bool peer_run(const struct contestant *c, const struct material *m, double *seconds,
                     struct error *error)
{
    double start = machine_seconds();

    for (size_t done = 0, some; done < m->pages; done += some) {
        some = m->pages - done < m->step_pages ? m->pages - done : m->step_pages;
        for (size_t i = 0; i < problems_of(m, some) * m->layers; i++) {
            struct problem p = problem_at(m, i % problems_of(m, some));

            if (interrupt_seen())
                return error_set(error, "interrupted");
            if (!peer_factorize(c->peer, p.x, m->heads * m->dim, m->dim, p.rank, c->left, c->right,
                                error))
                return false;
        }
    }
    *seconds = machine_seconds() - start;
    return true;
}

static bool run(const struct contestant *c, const struct material *m, double *seconds,
                struct error *error)
{
    return (c->peer != NULL ? peer_run : library_run)(c, m, seconds, error);
}

/* ---- Errors ---------------------------------------------------------------------------------- */

/* The smallest squared error that factors of a rank can have, which is what is left of the
 * eigenvalues of the Gram matrix, and the squared norm, in double precision. */
static bool find_optimum(const struct material *m, struct problem p, double *optimum, double *norm,
                         struct error *error)
{
    size_t n = m->length, d = m->dim;
    double *x = calloc(n * d, sizeof *x);
    double *gram = calloc(n * n, sizeof *gram);
    double *values = calloc(n, sizeof *values);
    bool done = false;

    if (x == NULL || gram == NULL || values == NULL) {
        error_set(error, "out of memory");
        goto out;
    }
    for (size_t i = 0; i < n * d; i++)
        x[i] = (double)p.x[i / d * m->heads * d + i % d];
    cblas_dsyrk(CblasRowMajor, CblasLower, CblasNoTrans, (int)n, (int)d, 1, x, (int)d, 0, gram,
                (int)n);
    if (LAPACKE_dsyevd(LAPACK_COL_MAJOR, 'N', 'U', (lapack_int)n, gram, (lapack_int)n, values) !=
        0) {
        error_set(error, "LAPACK: dsyevd failed");
        goto out;
    }
    *optimum = *norm = 0;
    for (size_t i = 0; i < n; i++) {
        *norm += values[i];
        *optimum += i < n - p.rank ? fmax(0, values[i]) : 0;
    }
    done = true;
out:
    free(x);
    free(gram);
    free(values);
    return done;
}

/* The product [length, dim] of one problem's factors, as the contestant makes them in f32. */
static bool rebuild(const struct contestant *c, const struct material *m, pkv_seq *seq,
                    struct problem p, float *product, struct error *error)
{
    if (c->peer == NULL)
        return pkv_seq_read_page(seq, 0, p.head, p.page, p.is_key ? product : NULL,
                                 p.is_key ? NULL : product) == PKV_OK ||
               error_set(error, "--solver %s: a page cannot be read", c->solver->name);
    if (!peer_factorize(c->peer, p.x, m->heads * m->dim, m->dim, p.rank, c->left, c->right, error))
        return false;
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)m->length, (int)m->dim, (int)p.rank,
                1, c->left, (int)m->length, c->right, (int)m->dim, 0, product, (int)m->dim);
    return true;
}

/* The largest (squared error - optimum) / squared norm of all pages that differ, before rounding to
 * the storage type: the library stores f32 here. */
static bool find_excess(const struct bench_arguments *arguments, const struct contestant *c,
                        const struct material *m, double *excess, struct error *error)
{
    size_t pages = m->pages < m->step_pages ? m->pages : m->step_pages;
    float *product = calloc(m->length * m->dim, sizeof *product);
    pkv_cache *cache = NULL;
    pkv_seq *seq = NULL;
    bool done = false;

    *excess = -DBL_MAX;
    if (product == NULL) {
        error_set(error, "out of memory");
        goto out;
    }
    if (c->peer == NULL) {
        const pkv_config config = configure(arguments, m, c->solver, PKV_F32, 1, pages);

        if (!cache_open(&config, c->solver, &cache, error))
            goto out;
        if (pkv_seq_open(cache, &seq) != PKV_OK) {
            error_set(error, "--solver %s: %s", c->solver->name, pkv_cache_message(cache));
            goto out;
        }
        if (!store(c, m, cache, seq, 1, pages, error))
            goto out;
    }
    for (size_t i = 0; i < problems_of(m, pages); i++) {
        struct problem p = problem_at(m, i);
        double optimum, norm, sum = 0;

        if (!find_optimum(m, p, &optimum, &norm, error) || !rebuild(c, m, seq, p, product, error))
            goto out;
        for (size_t j = 0; j < m->length * m->dim; j++) {
            double difference =
                (double)p.x[j / m->dim * m->heads * m->dim + j % m->dim] - (double)product[j];

            sum += difference * difference;
        }
        *excess = fmax(*excess, (sum - optimum) / norm);
    }
    done = true;
out:
    pkv_cache_close(cache);
    free(product);
    return done;
}

/* ---- The command ----------------------------------------------------------------------------- */

static bool contestant_open(const struct bench_arguments *arguments, const struct material *m,
                            const struct bench_solver *solver, struct contestant *c,
                            struct error *error)
{
    c->solver = solver;
    c->seconds = calloc(arguments->repeats, sizeof *c->seconds);
    if (c->seconds == NULL)
        return error_set(error, "out of memory");
    if (!solver->is_peer) {
        const pkv_config config =
            configure(arguments, m, solver, arguments->dtype, m->layers, m->pages);

        return cache_open(&config, solver, &c->cache, error);
    }
    c->left = calloc(m->length * m->length, sizeof *c->left);
    c->right = calloc(m->length * m->dim, sizeof *c->right);
    if (c->left == NULL || c->right == NULL)
        return error_set(error, "out of memory");
    return peer_open(solver->peer, m->length, &c->peer, error);
}

static void contestant_close(struct contestant *c)
{
    pkv_cache_close(c->cache);
    peer_close(c->peer);
    free(c->left);
    free(c->right);
    free(c->seconds);
}

static bool measure(const struct bench_arguments *arguments, struct contestant *contestants,
                    const struct material *m, struct error *error)
{
    double seconds;

    for (size_t round = 0; round <= arguments->repeats; round++) {
        progress_show("round %zu of %zu", round, arguments->repeats);
        for (size_t i = 0; i < arguments->solver_count; i++) {
            /* Round 0 warms up. */
            if (!run(&contestants[i], m, round == 0 ? &seconds : &contestants[i].seconds[round - 1],
                     error))
                return false;
        }
    }
    return true;
}

static bool evaluate(const struct bench_arguments *arguments, const struct contestant *contestants,
                     const struct material *m, struct bench_row *rows, struct error *error)
{
    size_t repeats = arguments->repeats;
    double *scratch = calloc(repeats, sizeof *scratch);

    if (scratch == NULL)
        return error_set(error, "out of memory");
    for (size_t i = 0; i < arguments->solver_count; i++) {
        const struct contestant *c = &contestants[i];
        double *values = rows[i].values;
        struct bench_summary time;

        progress_show("errors of %s", c->solver->name);
        if (!find_excess(arguments, c, m, &values[COLUMN_EXCESS], error)) {
            free(scratch);
            return false;
        }
        rows[i].name = c->solver->name;
        values[COLUMN_SPEEDUP] =
            bench_median_ratio(contestants[0].seconds, c->seconds, repeats, scratch);
        for (size_t j = 0; j < repeats; j++)
            scratch[j] = c->seconds[j] / (double)all_problems(m) * 1e6;
        time = bench_summarise(scratch, repeats);
        values[COLUMN_TIME] = time.median;
        values[COLUMN_TIME_LOW] = time.low;
        values[COLUMN_TIME_HIGH] = time.high;
    }
    free(scratch);
    return true;
}

static bool open_material(const struct bench_arguments *arguments, struct material *m,
                          struct error *error)
{
    pkv_config config;
    size_t count, layers, most;

    pkv_config_init(&config, sizeof config);
    *m = (struct material){.length = RANDOM_PAGE_TOKENS,
                           .dim = arguments->model.head_dim,
                           .heads = arguments->model.kv_heads,
                           .rank_k = config.rank_k,
                           .rank_v = config.rank_v};
    most = arguments->device == NULL ? STEP_PAGES : DEVICE_STEP_PAGES;
    m->step_pages = (arguments->pages + problems_of(m, 1) - 1) / problems_of(m, 1);
    m->step_pages = m->step_pages < most ? m->step_pages : most;
    /* Whole steps of as many layers as there are of pages, at most the model's. */
    layers = arguments->pages / problems_of(m, m->step_pages);
    m->layers = layers < 1                              ? 1
                : layers < arguments->model.layer_count ? layers
                                                        : arguments->model.layer_count;
    m->pages = (arguments->pages + problems_of(m, m->layers) - 1) / problems_of(m, m->layers);
    count = m->step_pages * m->length * m->heads * m->dim;
    m->k = calloc(count, sizeof *m->k);
    m->v = calloc(count, sizeof *m->v);
    if (m->k == NULL || m->v == NULL)
        return error_set(error, "out of memory");
    return random_pages(42, m->step_pages, m->heads, m->dim, arguments->threads, m->k, m->v,
                        error) &&
           bench_operand(arguments, m->k, count * sizeof *m->k, &m->step_k, error) &&
           bench_operand(arguments, m->v, count * sizeof *m->v, &m->step_v, error);
}

bool bench_factorize(const struct bench_arguments *arguments, struct error *error)
{
    size_t count = arguments->solver_count;
    struct contestant *contestants = calloc(count, sizeof *contestants);
    struct bench_row *rows = calloc(count, sizeof *rows);
    const struct bench_results results = {"solver", columns, COLUMNS, rows, count};
    struct material m = {.k = NULL};
    bool done = false;

    if (contestants == NULL || rows == NULL) {
        error_set(error, "out of memory");
        goto out;
    }
    if (!open_material(arguments, &m, error) ||
        (arguments->device == NULL && !check_memory(arguments, &m, error)))
        goto out;
    for (size_t i = 0; i < count; i++) {
        if (!contestant_open(arguments, &m, arguments->solvers[i], &contestants[i], error))
            goto out;
    }
    if (!products_check_blas(arguments->threads, error) ||
        !measure(arguments, contestants, &m, error) ||
        !evaluate(arguments, contestants, &m, rows, error))
        goto out;
    progress_clear();
    done = bench_report(arguments,
                        json_pack("{s:s, s:s, s:I, s:I}", "dtype", dtype_name(arguments->dtype),
                                  "shape", arguments->shape, "pages", (json_int_t)all_problems(&m),
                                  "repeats", (json_int_t)arguments->repeats),
                        &results, error);
out:
    for (size_t i = 0; contestants != NULL && i < count; i++)
        contestant_close(&contestants[i]);
    free(contestants);
    free(rows);
    bench_operand_free(arguments, m.step_k);
    bench_operand_free(arguments, m.step_v);
    free(m.k);
    free(m.v);
    return done;
}
