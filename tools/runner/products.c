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

/* Up to here rows read the packed weights one by one; beyond, expanding a panel pays. */
#define FEW_ROWS 8
/* Weight rows that are expanded and handed to BLAS at once. */
#define PANEL_ROWS 64
/* Weight rows of one task when there are few rows. */
#define STRIP_ROWS 16

struct products {
    unsigned threads;
    const struct products_kernels *kernels;
    float *panels; /* [threads, PANEL_ROWS, panel_columns] */
    size_t panel_columns;
    float *sums; /* [FEW_ROWS, 2, sums_columns / 16], of 16 and, half as many, of 32 elements */
    size_t sums_columns;
    void *blas_room; /* held for OpenBLAS until the first product; MAP_FAILED afterwards */
    size_t blas_bytes;
};

/* The library has already checked that the machine runs what it names. */
static const struct products_kernels *find_kernels(const char *isa)
{
    static const struct products_kernels *const tables[] = {
#ifdef HAVE_AVX512_KERNELS
        &products_avx512,
#endif
#ifdef HAVE_AVX2_KERNELS
        &products_avx2,
#endif
        &products_generic,
    };

    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (strcmp(tables[i]->name, isa) == 0)
            return tables[i];
    }
    return &products_generic;
}

bool products_open(unsigned threads, const char *isa, struct products **products,
                   struct error *error)
{
    struct products *p = calloc(1, sizeof *p);

    *products = NULL;
    if (p == NULL)
        return error_set(error, "matrix products: out of memory");
    p->threads = threads;
    p->kernels = find_kernels(isa);
    p->blas_bytes = threads * PRODUCTS_BLAS_BYTES;
    p->blas_room =
        mmap(NULL, p->blas_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p->blas_room == MAP_FAILED) {
        products_close(p);
        return error_set(error,
                         "matrix products: %u threads need %zu MiB of address space for OpenBLAS, "
                         "more than the process may have (ulimit -v)",
                         threads, threads * PRODUCTS_BLAS_BYTES >> 20);
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
    free(products->panels);
    free(products->sums);
    free(products);
}

void products_swiglu(const struct products *products, float *gate, const float *up, size_t n)
{
    products->kernels->swiglu(gate, up, n);
}

static bool resize(void *pointer, size_t count, size_t size)
{
    void **slot = pointer;
    size_t bytes;

    free(*slot);
    *slot = NULL;
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - 64)
        return false;
    *slot = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    return *slot != NULL;
}

static bool prepare(struct products *p, const float *x, size_t x_stride, size_t rows,
                    size_t columns, struct activations *out)
{
    size_t count = columns / 16;

    if (columns > p->sums_columns) {
        p->sums_columns = 0;
        if (!resize(&p->sums, count, 2 * FEW_ROWS * sizeof *p->sums))
            return false;
        p->sums_columns = columns;
    }
    for (size_t r = 0; r < rows; r++) {
        float *sums_16 = p->sums + 2 * r * count, *sums_32 = sums_16 + count;

        out[r] = (struct activations){x + r * x_stride, sums_16, sums_32};
        for (size_t b = 0; b < count; b++) {
            sums_16[b] = 0;
            for (size_t i = 0; i < 16; i++)
                sums_16[b] += out[r].x[16 * b + i];
        }
        for (size_t b = 0; b < count / 2; b++)
            sums_32[b] = sums_16[2 * b] + sums_16[2 * b + 1];
    }
    return true;
}

/* A task is a strip of some weight rows of one matrix: which matrix, and its first row. */
static const struct product *find_task(const struct product *list, size_t task, size_t task_rows,
                                       size_t *first)
{
    for (;; list++) {
        size_t tasks = (list->weight->rows + task_rows - 1) / task_rows;

        if (task < tasks) {
            *first = task * task_rows;
            return list;
        }
        task -= tasks;
    }
}

static size_t count_tasks(const struct product *list, size_t count, size_t task_rows)
{
    size_t tasks = 0;

    for (size_t i = 0; i < count; i++)
        tasks += (list[i].weight->rows + task_rows - 1) / task_rows;
    return tasks;
}

static size_t task_end(const struct weight *w, size_t first, size_t task_rows)
{
    return w->rows - first < task_rows ? w->rows : first + task_rows;
}

static void multiply_few(const struct products *p, const struct activations *rows, size_t n_rows,
                         const struct product *list, size_t count)
{
    size_t tasks = count_tasks(list, count, STRIP_ROWS);

#pragma omp parallel for num_threads(p->threads) schedule(static) if (tasks > 1)
    for (size_t task = 0; task < tasks; task++) {
        size_t first;
        const struct product *product = find_task(list, task, STRIP_ROWS, &first);
        const struct weight *w = product->weight;
        products_dot *dot = p->kernels->dot[w->type];

        for (size_t j = first; j < task_end(w, first, STRIP_ROWS); j++) {
            const void *row = (const char *)w->data + j * w->row_bytes;

            for (size_t r = 0; r < n_rows; r++) {
                float *y = product->y + r * product->y_stride + j;
                float value = dot(row, &rows[r], w->columns);

                *y = product->add ? *y + value : value;
            }
        }
    }
}

/* BLAS runs on one thread here (the programs see to that), so parallel calls do not meet. */
static void multiply_panels(const struct products *p, const float *x, size_t x_stride, size_t rows,
                            const struct product *list, size_t count)
{
    size_t tasks = count_tasks(list, count, PANEL_ROWS);

#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
    for (size_t task = 0; task < tasks; task++) {
        size_t first;
        const struct product *product = find_task(list, task, PANEL_ROWS, &first);
        const struct weight *w = product->weight;
        size_t end = task_end(w, first, PANEL_ROWS);
        size_t thread = 0;
#ifdef _OPENMP
        thread = (size_t)omp_get_thread_num();
#endif
        quant_dequantise *dequantise = p->kernels->dequantise[w->type];
        float *panel = p->panels + thread * PANEL_ROWS * p->panel_columns;

        for (size_t j = first; j < end; j++)
            dequantise((const char *)w->data + j * w->row_bytes, w->columns,
                       panel + (j - first) * w->columns);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)(end - first),
                    (int)w->columns, 1, x, (int)x_stride, panel, (int)w->columns,
                    product->add ? 1 : 0, product->y + first, (int)product->y_stride);
    }
}

bool products_multiply(struct products *products, const float *x, size_t x_stride, size_t rows,
                       const struct product *list, size_t count, struct error *error)
{
    size_t columns = list[0].weight->columns;

    if (rows <= FEW_ROWS) {
        struct activations prepared[FEW_ROWS];

        if (!prepare(products, x, x_stride, rows, columns, prepared))
            return error_set(error, "matrix products: out of memory for %zu columns", columns);
        give_room_to_blas(products);
        multiply_few(products, prepared, rows, list, count);
        return true;
    }
    if (columns > products->panel_columns) {
        size_t panel;

        products->panel_columns = 0;
        if (columns > INT_MAX ||
            __builtin_mul_overflow((size_t)products->threads * PANEL_ROWS, columns, &panel) ||
            !resize(&products->panels, panel, sizeof *products->panels))
            return error_set(error, "matrix products: out of memory for %zu columns", columns);
        products->panel_columns = columns;
    }
    give_room_to_blas(products);
    multiply_panels(products, x, x_stride, rows, list, count);
    return true;
}
