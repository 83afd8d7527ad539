/* SPDX-License-Identifier: MIT */
/* Matrix products of activations with mapped, possibly quantised weights. */
#include "products.h"

#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <cblas.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "products_kernels.h"

/* Up to here rows read the packed weights one by one; beyond, expanding a panel pays. Panels of
 * bytes pay earlier. */
#define FEW_ROWS      8
#define FEW_BYTE_ROWS 2
/* Weight rows of one task when there are few rows. */
#define STRIP_ROWS 16
/* Weight rows of one task, and of one call of BLAS, when there are more; PRODUCTS_PANEL_ROWS
 * divides it. */
#define PANEL_ROWS  64
#define PANEL_BYTES (PANEL_ROWS * sizeof(float))
/* Of byte_activations, for each two columns: codes, scales, both sums and biases. */
#define ROW_BYTES 5

#define BLOCK_TILES (PRODUCTS_BLOCK_ROWS / PRODUCTS_TILE_ROWS)

enum method { DOT, BYTE_DOT, BLAS, BYTE_PANEL, METHODS };

/* A table that grows with the number of columns. */
struct scratch {
    unsigned char *data;
    size_t columns;
};

struct products {
    unsigned threads;
    bool exact;
    const struct products_kernels *kernels;
    struct scratch panels; /* [threads, PANEL_BYTES, columns] */
    struct scratch tiles;  /* [BLOCK_TILES, PRODUCTS_TILE_BYTES, columns] */
    struct scratch sums;   /* of the rows in `few`: [FEW_ROWS, 2, columns / 16] floats */
    struct scratch bytes;  /* of those in `few_bytes`: [FEW_ROWS, ROW_BYTES, columns / 2] */
    struct activations few[FEW_ROWS];
    struct byte_activations few_bytes[FEW_ROWS];
    void *blas_room; /* held for OpenBLAS until the first product; MAP_FAILED afterwards */
    size_t blas_bytes;
};

/* What one call multiplies. */
struct job {
    const float *x;
    size_t x_stride, rows;
    const struct product *list;
    size_t count;
};

#ifdef HAVE_AVX512VNNI_KERNELS
static bool has_vnni(void)
{
    return __builtin_cpu_supports("avx512vnni") != 0;
}
#endif

/* The library has already checked that the machine runs what it names, but for what it has no name
 * for. */
const struct products_kernels *products_find_kernels(const char *isa,
                                                     const struct products_kernels *after)
{
    static const struct {
        const struct products_kernels *kernels;
        bool (*runs)(void); /* or NULL */
    } tables[] = {
#ifdef HAVE_AVX512VNNI_KERNELS
        {&products_avx512vnni, has_vnni},
#endif
#ifdef HAVE_AVX512_KERNELS
        {&products_avx512, NULL},
#endif
#ifdef HAVE_AVX2_KERNELS
        {&products_avx2, NULL},
#endif
        {&products_generic, NULL},
    };
    bool behind = after == NULL;

    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (behind && strcmp(tables[i].kernels->isa, isa) == 0 &&
            (tables[i].runs == NULL || tables[i].runs()))
            return tables[i].kernels;
        behind = behind || tables[i].kernels == after;
    }
    return after == NULL ? &products_generic : NULL;
}

/* Address space for so many threads in OpenBLAS; MAP_FAILED with an error. */
static void *take_blas_room(unsigned threads, struct error *error)
{
    void *room = mmap(NULL, threads * PRODUCTS_BLAS_BYTES, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (room == MAP_FAILED)
        error_set(error,
                  "matrix products: %u threads need %zu MiB of address space for OpenBLAS, more "
                  "than the process may have (ulimit -v)",
                  threads, threads * PRODUCTS_BLAS_BYTES >> 20);
    return room;
}

bool products_check_blas(unsigned threads, struct error *error)
{
    void *room = take_blas_room(threads, error);

    return room != MAP_FAILED && munmap(room, threads * PRODUCTS_BLAS_BYTES) == 0;
}

bool products_open(unsigned threads, const struct products_kernels *kernels, bool exact,
                   struct products **products, struct error *error)
{
    struct products *p = calloc(1, sizeof *p);

    *products = NULL;
    if (p == NULL)
        return error_set(error, "matrix products: out of memory");
    p->threads = threads;
    p->kernels = kernels;
    p->exact = exact;
    p->blas_bytes = threads * PRODUCTS_BLAS_BYTES;
    p->blas_room = take_blas_room(threads, error);
    if (p->blas_room == MAP_FAILED) {
        products_close(p);
        return false;
    }
    *products = p;
    return true;
}

static void give_room_to_blas(struct products *products)
{
    if (products->blas_room != MAP_FAILED)
        munmap(products->blas_room, products->blas_bytes);
    products->blas_room = MAP_FAILED;
}

void products_close(struct products *products)
{
    if (products == NULL)
        return;
    give_room_to_blas(products);
    free(products->panels.data);
    free(products->tiles.data);
    free(products->sums.data);
    free(products->bytes.data);
    free(products);
}

void products_swiglu(const struct products *products, float *gate, const float *up, size_t n)
{
    products->kernels->swiglu(gate, up, n);
}

static bool reserve(struct scratch *scratch, size_t columns, size_t bytes_per_column)
{
    size_t bytes;

    if (columns <= scratch->columns)
        return true;
    free(scratch->data);
    *scratch = (struct scratch){0};
    if (__builtin_mul_overflow(columns, bytes_per_column, &bytes) || bytes > SIZE_MAX - 64)
        return false;
    scratch->data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (scratch->data == NULL)
        return false;
    scratch->columns = columns;
    return true;
}

static enum method choose(const struct products *p, const struct product *product, size_t rows)
{
    const enum quant_type type = product->weight->type;

    if (!p->exact && p->kernels->panel[type] != NULL && rows > FEW_BYTE_ROWS)
        return BYTE_PANEL;
    if (rows > FEW_ROWS)
        return BLAS;
    return p->exact || p->kernels->byte_dot[type] == NULL ? DOT : BYTE_DOT;
}

static void prepare_few(struct products *p, const struct job *job, size_t columns)
{
    const size_t count = columns / 16;

    for (size_t r = 0; r < job->rows; r++) {
        const float *x = job->x + r * job->x_stride;
        float *sums_16 = (float *)p->sums.data + 2 * r * count, *sums_32 = sums_16 + count;

        p->few[r] = (struct activations){x, sums_16, sums_32};
        for (size_t b = 0; b < count; b++) {
            sums_16[b] = 0;
            for (size_t i = 0; i < 16; i++)
                sums_16[b] += x[16 * b + i];
        }
        for (size_t b = 0; b < count / 2; b++)
            sums_32[b] = sums_16[2 * b] + sums_16[2 * b + 1];
    }
}

static void prepare_few_bytes(struct products *p, const struct job *job, size_t columns)
{
    for (size_t r = 0; r < job->rows; r++) {
        struct byte_activations *row = &p->few_bytes[r];

        row->codes = (int8_t *)p->bytes.data + r * (columns / 2) * ROW_BYTES;
        row->scales = (float *)(row->codes + columns);
        row->sums_16 = row->scales + columns / 32;
        row->sums_32 = row->sums_16 + columns / 16;
        row->biases = (int32_t *)(row->sums_32 + columns / 32);
        p->kernels->round_row(job->x + r * job->x_stride, columns, row);
    }
}

static void prepare_tiles(struct products *p, const struct job *job, size_t columns)
{
    const size_t tiles = (job->rows + PRODUCTS_TILE_ROWS - 1) / PRODUCTS_TILE_ROWS;

#pragma omp parallel for num_threads(p->threads) schedule(static) if (tiles > 1)
    for (size_t i = 0; i < tiles; i++) {
        const size_t first = i * PRODUCTS_TILE_ROWS;
        const size_t rows =
            job->rows - first < PRODUCTS_TILE_ROWS ? job->rows - first : PRODUCTS_TILE_ROWS;

        p->kernels->round_tile(job->x + first * job->x_stride, job->x_stride, rows, columns,
                               p->tiles.data + i * PRODUCTS_TILE_BYTES * columns);
    }
}

static bool prepare(struct products *p, const struct job *job)
{
    const size_t columns = job->list[0].weight->columns;
    bool used[METHODS] = {false};

    for (size_t i = 0; i < job->count; i++)
        used[choose(p, &job->list[i], job->rows)] = true;
    if (used[BLAS] && columns > INT_MAX)
        return false;
    if ((used[BLAS] || used[BYTE_PANEL]) && !reserve(&p->panels, columns, p->threads * PANEL_BYTES))
        return false;
    if (used[DOT]) {
        if (!reserve(&p->sums, columns, FEW_ROWS * 2 * sizeof(float) / 16))
            return false;
        prepare_few(p, job, columns);
    }
    if (used[BYTE_DOT]) {
        if (!reserve(&p->bytes, columns, FEW_ROWS * ROW_BYTES / 2))
            return false;
        prepare_few_bytes(p, job, columns);
    }
    if (used[BYTE_PANEL]) {
        if (!reserve(&p->tiles, columns, BLOCK_TILES * PRODUCTS_TILE_BYTES))
            return false;
        prepare_tiles(p, job, columns);
    }
    return true;
}

static void multiply_few(const struct products *p, const struct job *job,
                         const struct product *product, bool bytes, size_t first, size_t end)
{
    const struct weight *w = product->weight;

    for (size_t j = first; j < end; j++) {
        const void *row = (const char *)w->data + j * w->row_bytes;

        for (size_t r = 0; r < job->rows; r++) {
            float *y = product->y + r * product->y_stride + j;
            float value = bytes ? p->kernels->byte_dot[w->type](row, &p->few_bytes[r], w->columns)
                                : p->kernels->dot[w->type](row, &p->few[r], w->columns);

            *y = product->add ? *y + value : value;
        }
    }
}

/* BLAS runs on one thread here (the programs see to that), so parallel calls do not meet. */
static void multiply_blas(const struct products *p, const struct job *job,
                          const struct product *product, size_t first, size_t end, float *panel)
{
    const struct weight *w = product->weight;

    for (size_t j = first; j < end; j++)
        p->kernels->dequantise[w->type]((const char *)w->data + j * w->row_bytes, w->columns,
                                        panel + (j - first) * w->columns);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)job->rows, (int)(end - first),
                (int)w->columns, 1, job->x, (int)job->x_stride, panel, (int)w->columns,
                product->add ? 1 : 0, product->y + first, (int)product->y_stride);
}

static void multiply_bytes(const struct products *p, const struct job *job,
                           const struct product *product, size_t first, size_t end,
                           unsigned char *panel)
{
    const struct weight *w = product->weight;

    for (size_t j = first; j < end; j += PRODUCTS_PANEL_ROWS) {
        const size_t weight_rows = end - j < PRODUCTS_PANEL_ROWS ? end - j : PRODUCTS_PANEL_ROWS;

        p->kernels->panel[w->type]((const char *)w->data + j * w->row_bytes, w->row_bytes,
                                   weight_rows, w->columns, p->tiles.data, job->rows, panel,
                                   product->y + j, product->y_stride, product->add);
    }
}

/* A task is a strip of some weight rows of one matrix. */
static size_t task_rows(enum method method)
{
    return method == DOT || method == BYTE_DOT ? STRIP_ROWS : PANEL_ROWS;
}

static size_t count_tasks(const struct products *p, const struct job *job,
                          const struct product *product)
{
    const size_t rows = task_rows(choose(p, product, job->rows));

    return (product->weight->rows + rows - 1) / rows;
}

static void run_task(const struct products *p, const struct job *job, size_t task)
{
    const struct product *product = job->list;
    size_t thread = 0;

    for (size_t tasks; task >= (tasks = count_tasks(p, job, product)); product++)
        task -= tasks;

    const enum method method = choose(p, product, job->rows);
    const size_t first = task * task_rows(method), rest = product->weight->rows - first;
    const size_t end = first + (rest < task_rows(method) ? rest : task_rows(method));

#ifdef _OPENMP
    thread = (size_t)omp_get_thread_num();
#endif
    unsigned char *panel = p->panels.data + thread * PANEL_BYTES * p->panels.columns;

    if (method == BYTE_PANEL)
        multiply_bytes(p, job, product, first, end, panel);
    else if (method == BLAS)
        multiply_blas(p, job, product, first, end, (float *)panel);
    else
        multiply_few(p, job, product, method == BYTE_DOT, first, end);
}

bool products_multiply(struct products *products, const float *x, size_t x_stride, size_t rows,
                       const struct product *list, size_t count, struct error *error)
{
    const struct job job = {x, x_stride, rows, list, count};
    size_t tasks = 0;

    if (!prepare(products, &job))
        return error_set(error, "matrix products: out of memory for %zu columns",
                         list[0].weight->columns);
    give_room_to_blas(products);
    for (size_t i = 0; i < count; i++)
        tasks += count_tasks(products, &job, &list[i]);
#pragma omp parallel for num_threads(products->threads) schedule(dynamic) if (tasks > 1)
    for (size_t task = 0; task < tasks; task++)
        run_task(products, &job, task);
    return true;
}
