/* SPDX-License-Identifier: MIT */
/* Pages to factors, by the solver of the instruction set or by LAPACK. */
#include "factorize.h"

#include "codec.h"
#include "store.h"

#include <lapacke.h>
#include <math.h>
#include <string.h>
#include <time.h>

/* Gram matrices held at once: this many bytes, but one for each thread at least. */
#define CHUNK_BYTES ((size_t)1 << 19)

/* Pages up to this length are solved in two vectors at a time: each hides the other's latency.
 * Beyond, the log of rotations grows too large. */
#define PAIR_LENGTH 64

/* What batches of all threads may take in any case. */
#define BATCHES_BYTES ((size_t)1 << 21)

/* Below this many problems a parallel region costs more than it saves beside LAPACK's own time. */
#define PARALLEL_PROBLEMS 32

/* Eigenvalues up to this part of the largest are noise of an f32 page: their rows of R are 0. */
#define NOISE 0x1p-24

/* A tile of the f64 products; P, d and padded ranks are multiples of it. */
#define TILE 4

typedef double vector_f64 __attribute__((vector_size(2 * sizeof(double))));

/* As LAPACK's tiles need it. */
static size_t padded_rank(size_t rank)
{
    return (rank + TILE - 1) / TILE * TILE;
}

/* One eigenvalue problem: K or V of one layer and KV head of one job. */
struct problem {
    const struct page_job *job;
    size_t layer;
    size_t kv_head;
    bool is_key;
    size_t rank;
};

/* Problems of one layer. */
static size_t layer_problems(const struct backend *backend)
{
    return backend->step.n_factor * backend->geometry->kv_heads * 2;
}

/* Number `number` from those of `layer` on, in the order in which faults are reported: layer, item,
 * page, head, K before V. */
static struct problem problem_at(const struct backend *backend, size_t layer, size_t number)
{
    const struct geometry *geometry = backend->geometry;
    const struct cpu_step *step = &backend->step;
    const size_t of_layer = number % layer_problems(backend);
    struct problem problem;

    problem.job = &step->jobs[step->n_dense + of_layer / (2 * geometry->kv_heads)];
    problem.layer = layer + number / layer_problems(backend);
    problem.kv_head = of_layer / 2 % geometry->kv_heads;
    problem.is_key = of_layer % 2 == 0;
    problem.rank =
        problem.is_key ? geometry->rank_k[problem.layer] : geometry->rank_v[problem.layer];
    return problem;
}

/* Problems of the layers that are solved at once. Sizes do not wrap: each layer has slots for its
 * pages. */
static size_t count_problems(const struct backend *backend)
{
    return backend->step.factorize_layers * layer_problems(backend);
}

/* ---- Steps ---- */

static size_t work_length(size_t length)
{
    return 1 + 6 * length + 2 * length * length;
}

static size_t iwork_length(size_t length)
{
    return 3 + 5 * length;
}

/* Whether the pages are in the cache already, as while decoding: then there are few problems of a
 * layer, and those of all layers fill the solver's batches together. */
static bool all_layers_at_once(const struct backend *backend)
{
    const struct cpu_step *step = &backend->step;

    for (size_t i = 0; i < step->n_factor; i++)
        if (step->jobs[step->n_dense + i].change->new_tokens > 0)
            return false;
    return true;
}

static size_t largest_rank(const struct geometry *geometry)
{
    size_t rank = 0;

    for (size_t layer = 0; layer < geometry->layers; layer++)
        rank = cpu_max(rank, cpu_max(geometry->rank_k[layer], geometry->rank_v[layer]));
    return rank;
}

/* X^T [d, P], L [P, r], R^T [d, r] in f64; then in f32 X^T, or L and R^T with padded rows. */
static size_t lapack_bytes(const struct geometry *geometry)
{
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    const size_t rank = padded_rank(largest_rank(geometry));

    return (d * length + (length + d) * rank) * sizeof(double) +
           cpu_max(d * length, (length + d) * rank + KERNELS_PAD) * sizeof(float);
}

/* X^T [pages][d, P], R^T [d, r] and the batch; to be aligned. */
static size_t batch_bytes(const struct backend *backend, size_t pages)
{
    const struct geometry *geometry = backend->geometry;
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    const size_t rank = largest_rank(geometry);

    return 64 + (pages * d * length + d * solver_padded(rank)) * sizeof(float) +
           backend->solver->bytes(length, rank, pages);
}

/*
 * Full batches of two vectors of pages; fewer pages where there would be fewer batches than threads
 * or more memory than BATCHES_BYTES and what the step's K and V take; fewer threads then where one
 * vector still takes more.
 */
static void plan_batches(struct backend *backend, size_t total)
{
    const struct geometry *geometry = backend->geometry;
    const size_t lanes = backend->solver->lanes;
    struct cpu_step *step = &backend->step;
    const size_t bytes = cpu_max(BATCHES_BYTES, 2 * step->plan.rows * geometry->kv_heads *
                                                    geometry->head_dim * geometry->element_bytes);
    size_t pages = cpu_min(2 * lanes, (total + step->threads - 1) / step->threads);

    if (geometry->policy.page_tokens > PAIR_LENGTH ||
        step->threads * batch_bytes(backend, pages) > bytes)
        pages = cpu_min(pages, lanes);
    step->chunk = pages;
    step->factorize_bytes = (batch_bytes(backend, pages) + 63) / 64 * 64;
    step->factorize_threads = (unsigned)cpu_min(cpu_min(step->threads, (total + pages - 1) / pages),
                                                cpu_max(1, bytes / step->factorize_bytes));
}

static pkv_status allocate_lapack(struct backend *backend, size_t total)
{
    const size_t length = backend->geometry->policy.page_tokens;
    struct cpu_step *step = &backend->step;
    struct memory *memory = backend->memory;

    step->chunk = cpu_max(CHUNK_BYTES / (length * length * sizeof *step->gram), step->threads);
    step->chunk = cpu_min(step->chunk, total);
    step->gram = memory_allocate(memory, step->chunk, length * length * sizeof *step->gram);
    step->eigen = memory_allocate(memory, step->chunk, length * sizeof *step->eigen);
    step->work = memory_allocate(memory, work_length(length), sizeof *step->work);
    step->iwork = memory_allocate(memory, iwork_length(length), sizeof(lapack_int));
    step->factorize_threads = step->threads;
    step->factorize_bytes = (lapack_bytes(backend->geometry) + 63) / 64 * 64;
    if (!step->gram || !step->eigen || !step->work || !step->iwork)
        return fail(backend->message, PKV_ERROR_MEMORY,
                    "cannot allocate %zu Gram matrices of %zu x %zu", step->chunk, length, length);
    return PKV_OK;
}

pkv_status factorize_step_begin(struct backend *backend)
{
    struct cpu_step *step = &backend->step;
    size_t total;

    if (step->n_factor == 0)
        return PKV_OK;
    step->factorize_layers = all_layers_at_once(backend) ? backend->geometry->layers : 1;
    total = count_problems(backend);
    step->overflow = memory_allocate(backend->memory, total, 1);
    if (!step->overflow)
        return fail(backend->message, PKV_ERROR_MEMORY, "cannot allocate the state of %zu pages",
                    total);
    if (backend->geometry->solver == PKV_SOLVER_LAPACK)
        return allocate_lapack(backend, total);
    plan_batches(backend, total);
    return PKV_OK;
}

void factorize_step_close(struct backend *backend)
{
    memory_release(backend->memory, backend->step.overflow);
    memory_release(backend->memory, backend->step.iwork);
    memory_release(backend->memory, backend->step.work);
    memory_release(backend->memory, backend->step.eigen);
    memory_release(backend->memory, backend->step.gram);
}

/* ---- One problem, with LAPACK ---- */

/* c [TILE, TILE] = sum over p < k, ascending, of a[i * ai + p * ap] * b[p * ldb + j]. */
static void multiply_tile(size_t k, const double *a, size_t ai, size_t ap, const double *b,
                          size_t ldb, double *c, size_t ldc)
{
    vector_f64 sum[TILE][TILE / 2] = {{{0}}};

    for (size_t p = 0; p < k; p++) {
        vector_f64 value[TILE / 2];

        memcpy(value, b + p * ldb, sizeof value);
#pragma GCC unroll 4
        for (size_t i = 0; i < TILE; i++) {
            double x = a[i * ai + p * ap];

            sum[i][0] += x * value[0];
            sum[i][1] += x * value[1];
        }
    }
    for (size_t i = 0; i < TILE; i++)
        memcpy(c + i * ldc, sum[i], sizeof sum[i]);
}

/* The lower triangle of G = X X^T, in whole tiles. Products of f32 values are exact in f64. */
static void gram_matrix(size_t length, size_t d, const double *transposed, double *gram)
{
    for (size_t i = 0; i < length; i += TILE)
        for (size_t j = 0; j <= i; j += TILE)
            multiply_tile(d, transposed + i, 1, length, transposed + j, length,
                          gram + i * length + j, length);
}

/* The entry of largest magnitude, lowest index on ties, decides the sign. */
static double column_sign(size_t length, const double *vector)
{
    size_t largest = 0;

    for (size_t i = 1; i < length; i++)
        if (fabs(vector[i]) > fabs(vector[largest]))
            largest = i;
    return vector[largest] < 0.0 ? -1.0 : 1.0;
}

/* L [P, ld] from the eigenvectors of the `rank` largest eigenvalues, which come last; the columns
 * up to ld are 0. Returns how many carry more than noise: the leading ones. */
static size_t leading_columns(size_t length, size_t rank, size_t ld, const double *vectors,
                              const double *eigen, double *left)
{
    size_t carrying = 0;

    for (size_t c = 0; c < ld; c++) {
        const double *vector = vectors + (length - 1 - cpu_min(c, length - 1)) * length;
        double sign = c < rank ? column_sign(length, vector) : 0.0;

        for (size_t i = 0; i < length; i++)
            left[i * ld + c] = c < rank ? sign * vector[i] : 0.0;
        if (c < rank && eigen[length - 1 - c] > NOISE * eigen[length - 1])
            carrying = c + 1;
    }
    return carrying;
}

/* R^T [d, ld] = X^T L, but 0 from column `carrying` on. */
static void project(size_t length, size_t d, size_t carrying, size_t ld, const double *transposed,
                    const double *left, double *right)
{
    for (size_t i = 0; i < d; i += TILE)
        for (size_t c = 0; c < ld; c += TILE)
            multiply_tile(length, transposed + i * length, length, 1, left + c, ld,
                          right + i * ld + c, ld);
    for (size_t i = 0; i < d; i++)
        for (size_t c = carrying; c < ld; c++)
            right[i * ld + c] = 0.0;
}

static double *thread_scratch(const struct backend *backend)
{
    const struct cpu_step *step = &backend->step;

    return (double *)(void *)(step->scratch + cpu_thread() * step->factorize_bytes);
}

static void gather_wide(const struct backend *backend, struct problem problem, float *narrow,
                        double *transposed)
{
    const size_t n = backend->geometry->head_dim * backend->geometry->policy.page_tokens;

    store_gather(backend, problem.layer, problem.kv_head, problem.job, problem.is_key, narrow);
    for (size_t i = 0; i < n; i++)
        transposed[i] = narrow[i];
}

/* Problem first + i, the chunk's number i: its Gram matrix. */
static void prepare(const struct backend *backend, size_t layer, size_t first, size_t i)
{
    const size_t d = backend->geometry->head_dim;
    const size_t length = backend->geometry->policy.page_tokens;
    struct problem problem = problem_at(backend, layer, first + i);
    double *transposed = thread_scratch(backend);

    gather_wide(backend, problem, (float *)(void *)(transposed + d * length), transposed);
    gram_matrix(length, d, transposed, backend->step.gram + i * length * length);
}

/* The same, once it is solved: its factors, and whether they overflow the storage type. */
static void finish(const struct backend *backend, size_t layer, size_t first, size_t i)
{
    const struct cpu_step *step = &backend->step;
    const size_t d = backend->geometry->head_dim;
    const size_t length = backend->geometry->policy.page_tokens;
    struct problem problem = problem_at(backend, layer, first + i);
    size_t ld = padded_rank(problem.rank);
    double *transposed = thread_scratch(backend);
    double *left = transposed + d * length;
    double *right = left + length * ld;
    float *narrow = (float *)(void *)(right + d * ld);
    size_t carrying = leading_columns(length, problem.rank, ld, step->gram + i * length * length,
                                      step->eigen + i * length, left);

    gather_wide(backend, problem, narrow, transposed);
    project(length, d, carrying, ld, transposed, left, right);
    for (size_t j = 0; j < (length + d) * ld; j++)
        narrow[j] = (float)left[j];
    step->overflow[first + i] =
        !store_put_factors(backend, problem.layer, problem.kv_head, problem.job->change->to.slot,
                           problem.is_key, narrow, narrow + length * ld, ld);
}

/* ---- All problems ---- */

static pkv_status fail_at(struct backend *backend, pkv_status status, size_t layer, size_t number,
                          const char *what)
{
    struct problem problem = problem_at(backend, layer, number);

    return fail(backend->message, status, "layer %zu, KV head %zu, page %zu: %s: %s", problem.layer,
                problem.kv_head, problem.job->change->page, problem.is_key ? "K" : "V", what);
}

/* Problems first .. first + n - 1, spread over threads. */
static void for_chunk(const struct backend *backend, size_t layer, size_t first, size_t n,
                      void (*one)(const struct backend *, size_t, size_t, size_t))
{
#pragma omp parallel num_threads(backend->step.threads) if (n >= PARALLEL_PROBLEMS)
    {
        fenv_t modes;

        modes_set(&modes);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < n; i++)
            one(backend, layer, first, i);
        modes_restore(&modes);
    }
}

/* How many problems of the chunk are solved: all, or those before the first that fails. */
static size_t solve_chunk(const struct backend *backend, size_t n)
{
    const struct cpu_step *step = &backend->step;
    const size_t length = backend->geometry->policy.page_tokens;
    const lapack_int order = (lapack_int)length;
    size_t solved = 0;
    fenv_t modes;

    modes_set(&modes);
    while (solved < n) {
        /* A lower triangle in rows is LAPACK's upper one in columns. */
        lapack_int info = LAPACKE_dsyevd_work(
            LAPACK_COL_MAJOR, 'V', 'U', order, step->gram + solved * length * length, order,
            step->eigen + solved * length, step->work, (lapack_int)work_length(length), step->iwork,
            (lapack_int)iwork_length(length));

        if (info != 0)
            break;
        solved++;
    }
    modes_restore(&modes);
    return solved;
}

/* Whether the factors of all of the problems first .. first + n - 1 fit their form. */
static pkv_status check_factors(struct backend *backend, size_t layer, size_t first, size_t n)
{
    for (size_t i = first; i < first + n; i++)
        if (backend->step.overflow[i])
            return fail_at(backend, PKV_ERROR_VALUE, layer, i,
                           i % 2 == 0 ? backend->codec_k->overflow : backend->codec_v->overflow);
    return PKV_OK;
}

static pkv_status factorize_with_lapack(struct backend *backend, size_t layer)
{
    const struct cpu_step *step = &backend->step;
    const size_t total = count_problems(backend);

    for (size_t first = 0; first < total; first += step->chunk) {
        size_t n = cpu_min(step->chunk, total - first);
        size_t solved;
        pkv_status status;

        for_chunk(backend, layer, first, n, prepare);
        solved = solve_chunk(backend, n);
        for_chunk(backend, layer, first, solved, finish);
        status = check_factors(backend, layer, first, solved);
        if (status != PKV_OK)
            return status;
        if (solved < n)
            return fail_at(backend, PKV_ERROR_SOLVER, layer, first + solved,
                           "LAPACK's dsyevd did not converge");
    }
    return PKV_OK;
}

/* ---- Batches ---- */

/* Problems first .. first + n - 1. Returns how many of them the solver left at its sweep cap. */
static size_t factorize_batch(const struct backend *backend, size_t layer, size_t first, size_t n)
{
    const struct solver *solver = backend->solver;
    const struct geometry *geometry = backend->geometry;
    const struct cpu_step *step = &backend->step;
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    const size_t rank = largest_rank(geometry);
    unsigned char *scratch = step->scratch + cpu_thread() * step->factorize_bytes;
    float *transposed = (float *)(void *)(scratch + (-(uintptr_t)scratch & 63));
    float *right = transposed + step->chunk * d * length;
    struct solver_batch batch;

    solver->begin(&batch, length, rank, n, right + d * solver_padded(rank));
    for (size_t i = 0; i < n; i++) {
        struct problem problem = problem_at(backend, layer, first + i);
        float *page = transposed + i * d * length;

        store_gather(backend, problem.layer, problem.kv_head, problem.job, problem.is_key, page);
        solver->add(&batch, i, problem.rank, d, page);
    }
    solver->solve(&batch);
    for (size_t i = 0; i < n; i++) {
        struct problem problem = problem_at(backend, layer, first + i);

        solver->project(&batch, i, d, transposed + i * d * length, right);
        step->overflow[first + i] = !store_put_factors(
            backend, problem.layer, problem.kv_head, problem.job->change->to.slot, problem.is_key,
            solver_left(&batch, i), right, solver_padded(problem.rank));
    }
    return batch.capped;
}

static pkv_status factorize_in_batches(struct backend *backend, size_t layer)
{
    const struct cpu_step *step = &backend->step;
    const size_t total = count_problems(backend);
    uint64_t capped = 0;

#pragma omp parallel num_threads(step->factorize_threads) reduction(+ : capped) if (total > step->chunk)
    {
        fenv_t modes;

        modes_set(&modes);
#pragma omp for schedule(dynamic)
        for (size_t first = 0; first < total; first += step->chunk)
            capped += factorize_batch(backend, layer, first, cpu_min(step->chunk, total - first));
        modes_restore(&modes);
    }
    backend->step.capped_pages += capped;
    return check_factors(backend, layer, 0, total);
}

static double wall_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

pkv_status factorize_run(struct backend *backend, size_t layer)
{
    double begin;
    pkv_status status;

    if (backend->step.n_factor == 0 || layer % backend->step.factorize_layers > 0)
        return PKV_OK;
    begin = wall_seconds();
    status = backend->geometry->solver == PKV_SOLVER_LAPACK ? factorize_with_lapack(backend, layer)
                                                            : factorize_in_batches(backend, layer);
    backend->step.factorize_seconds += wall_seconds() - begin;
    return status;
}
