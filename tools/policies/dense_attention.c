/* SPDX-License-Identifier: MIT */
/* Exact attention over K and V in f32, for policies that are not libpuzzlekv's. */
#include "dense_attention.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* Queries of one task: those of all query heads that read one KV head. BLAS runs on one thread, so
 * tasks of fixed size give the same bits for any number of threads. */
#define BLOCK 64

struct task {
    size_t head, first, count; /* KV head and new queries */
};

/* Turns scores into probabilities times the sum that is returned; 0 where the query does not look.
 */
static float softmax(float *scores, size_t seen, size_t columns, float scale)
{
    float largest = -INFINITY, sums[16] = {0}, sum = 0;

    for (size_t i = 0; i < seen; i++)
        largest = scores[i] > largest ? scores[i] : largest;
    for (size_t i = 0; i < seen; i++)
        scores[i] = expf(scale * (scores[i] - largest));
    for (size_t i = 0; i < seen; i++)
        sums[i % 16] += scores[i];
    for (size_t i = 0; i < 16; i++)
        sum += sums[i];
    for (size_t i = seen; i < columns; i++)
        scores[i] = 0;
    return sum;
}

/* `scratch` [group * task->count, rows + 2 head_dim]; `mass`, if wanted, is this block's own
 * [rows].
 */
static void attend_block(const struct dense_attention *a, const struct task *task, float *scratch,
                         float *mass)
{
    const struct model *m = a->model;
    const size_t d = m->head_dim, group = m->query_heads / m->kv_heads, h = task->head;
    const size_t rows = a->rows[h], columns = rows - (a->count - task->first - task->count);
    const size_t lines = group * task->count;
    const float scale = 1 / sqrtf((float)d);
    float *scores = scratch;
    float *q = scratch + lines * columns;
    float *o = q + lines * d;

    for (size_t i = 0; i < task->count; i++) {
        for (size_t g = 0; g < group; g++)
            memcpy(q + (i * group + g) * d,
                   a->q + ((task->first + i) * m->query_heads + h * group + g) * d, d * sizeof *q);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)lines, (blasint)columns,
                (blasint)d, 1, q, (blasint)d, a->k[h], (blasint)d, 0, scores, (blasint)columns);
    for (size_t line = 0; line < lines; line++) {
        size_t query = task->first + line / group;
        float *row = scores + line * columns;
        float sum = softmax(row, rows - (a->count - 1 - query), columns, scale);

        for (size_t i = 0; i < columns; i++)
            row[i] /= sum;
        for (size_t i = 0; mass != NULL && query >= a->mass_from && i < columns; i++)
            mass[i] += row[i];
    }
    if (a->out == NULL)
        return;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)lines, (blasint)d,
                (blasint)columns, 1, scores, (blasint)columns, a->v[h], (blasint)d, 0, o,
                (blasint)d);
    for (size_t i = 0; i < task->count; i++) {
        for (size_t g = 0; g < group; g++)
            memcpy(a->out + ((task->first + i) * m->query_heads + h * group + g) * d,
                   o + (i * group + g) * d, d * sizeof *o);
    }
}

bool dense_attention(const struct dense_attention *a, struct error *error)
{
    const struct model *m = a->model;
    const size_t group = m->query_heads / m->kv_heads;
    const size_t blocks = (a->count + BLOCK - 1) / BLOCK, tasks = blocks * m->kv_heads;
    size_t most_rows = 0, size;
    float *scratch, *masses = NULL;
    bool done = false;

    for (size_t h = 0; h < m->kv_heads; h++)
        most_rows = a->rows[h] > most_rows ? a->rows[h] : most_rows;
    size = group * (a->count < BLOCK ? a->count : BLOCK) * (most_rows + 2 * m->head_dim);
    scratch = malloc(a->threads * size * sizeof *scratch);
    if (a->mass != NULL)
        masses = calloc(tasks, most_rows * sizeof *masses);
    if (scratch == NULL || (a->mass != NULL && masses == NULL)) {
        error_set(error, "out of memory for attention");
        goto out;
    }

    /* The longest first, so that no thread is left with it at the end. */
#pragma omp parallel for schedule(dynamic, 1) num_threads(a->threads) if (tasks > 1)
    for (size_t n = 0; n < tasks; n++) {
        size_t t = tasks - 1 - n, first = t / m->kv_heads * BLOCK;
        struct task task = {t % m->kv_heads, first,
                            a->count - first < BLOCK ? a->count - first : BLOCK};
#ifdef _OPENMP
        size_t thread = (size_t)omp_get_thread_num();
#else
        size_t thread = 0;
#endif

        attend_block(a, &task, scratch + thread * size,
                     masses != NULL ? masses + t * most_rows : NULL);
    }
    for (size_t t = 0; t < tasks && a->mass != NULL; t++) {
        size_t h = t % m->kv_heads;

        for (size_t i = 0; i < a->rows[h]; i++)
            a->mass[h][i] += masses[t * most_rows + i];
    }
    done = true;
out:
    free(masses);
    free(scratch);
    return done;
}
