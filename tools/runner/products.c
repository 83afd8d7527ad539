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

/* Up to here rows read the weights one by one; beyond, expanding them to f32 for BLAS pays. */
#define FEW_ROWS 8
/* Weight rows of one task when there are few rows; PRODUCTS_PANEL_ROWS divides it. */
#define STRIP_ROWS 16
/* Weight rows of one task, and of one call of BLAS, when there are more; the same divides it. */
#define WIDE_ROWS  64
#define BLAS_BYTES (WIDE_ROWS * sizeof(float))
/* Of byte_activations, for each two columns: codes, scales and both sums. */
#define ROW_BYTES 4

/* What a thread takes of such tasks at once is this part of its share: alone they are too short,
 * and memory is read best in one direction. */
#define CHUNKS 4

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

enum method { DOT, BYTE_DOT, BLAS, PANELS, METHODS };

/* A table that grows with the number of columns. */
struct scratch {
    unsigned char *data;
    size_t columns;
};

struct products {
    unsigned threads;
    bool exact;
    const struct products_kernels *kernels;
    struct scratch blas;  /* [threads, BLAS_BYTES, columns] */
    struct scratch tiles; /* [PRODUCTS_BLOCK_ROWS, PRODUCTS_ROW_BYTES] */
    struct scratch sums;  /* of the rows in `few`: [FEW_ROWS, 2, columns / 16] floats */
    struct scratch bytes; /* of those in `few_bytes`: [FEW_ROWS, ROW_BYTES, columns / 2] */
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
    free(products->blas.data);
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
    if (product->matrix->panels != NULL)
        return PANELS;
    if (rows > FEW_ROWS)
        return BLAS;
    return p->exact || p->kernels->byte_dot[product->matrix->weight.type] == NULL ? DOT : BYTE_DOT;
}

static size_t count_panels(const struct weight *w)
{
    return w->rows / PRODUCTS_PANEL_ROWS + (w->rows % PRODUCTS_PANEL_ROWS != 0);
}

/* Of a panel, in whole lines of the cache; for weights whose size did not overflow. */
static size_t panel_bytes(const struct products_kernels *kernels, const struct weight *w)
{
    const size_t blocks = w->columns / quant_info(w->type)->block_elements;

    return (blocks * kernels->panels[w->type].block_bytes + 63) / 64 * 64;
}

size_t products_packed_bytes(const struct products_kernels *kernels, const struct weight *weight)
{
    const size_t blocks = weight->columns / quant_info(weight->type)->block_elements;
    size_t bytes;

    if (__builtin_mul_overflow(blocks, kernels->panels[weight->type].block_bytes, &bytes) ||
        bytes > SIZE_MAX - 63 ||
        __builtin_mul_overflow(panel_bytes(kernels, weight), count_panels(weight), &bytes))
        return SIZE_MAX;
    return bytes;
}

static void pack(const struct products *p, const struct weight *w, unsigned char *panels)
{
    const size_t count = count_panels(w), bytes = panel_bytes(p->kernels, w);

#pragma omp parallel for num_threads(p->threads) schedule(static) if (count > 1)
    for (size_t i = 0; i < count; i++) {
        const size_t first = i * PRODUCTS_PANEL_ROWS, rest = w->rows - first;

        p->kernels->panels[w->type].pack((const char *)w->data + first * w->row_bytes, w->row_bytes,
                                         rest < PRODUCTS_PANEL_ROWS ? rest : PRODUCTS_PANEL_ROWS,
                                         w->columns, panels + i * bytes);
    }
}

bool products_pack(const struct products *products, struct matrix *matrices, size_t count,
                   void **memory, struct error *error)
{
    unsigned char *next;
    size_t total = 0;

    *memory = NULL;
    for (size_t i = 0; i < count; i++) {
        matrices[i].panels = NULL;
        if (__builtin_add_overflow(
                total, products_packed_bytes(products->kernels, &matrices[i].weight), &total) ||
            total > SIZE_MAX - HUGE_PAGE_BYTES)
            return error_set(error, "matrix products: more weights than memory can hold");
    }
    if (products->exact || total == 0)
        return true;
    total = (total + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    *memory = next = aligned_alloc(HUGE_PAGE_BYTES, total);
    if (next == NULL)
        return error_set(error, "matrix products: out of memory for %zu MiB of weights",
                         total >> 20);
#ifdef MADV_HUGEPAGE
    madvise(next, total, MADV_HUGEPAGE);
#endif
    for (size_t i = 0; i < count; i++) {
        const size_t bytes = products_packed_bytes(products->kernels, &matrices[i].weight);

        if (bytes == 0)
            continue;
        pack(products, &matrices[i].weight, next);
        matrices[i].panels = next;
        next += bytes;
    }
    return true;
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
        p->kernels->round_row(job->x + r * job->x_stride, columns, row);
    }
}

static void prepare_tiles(struct products *p, const struct job *job, size_t columns)
{
    const size_t tile_rows = job->rows == 1 ? 1 : PRODUCTS_TILE_ROWS;
    const size_t tiles = (job->rows + tile_rows - 1) / tile_rows;

#pragma omp parallel for num_threads(p->threads) schedule(static) if (tiles > 1)
    for (size_t i = 0; i < tiles; i++) {
        const size_t first = i * tile_rows, rest = job->rows - first;

        p->kernels->round_tile(job->x + first * job->x_stride, job->x_stride,
                               rest < tile_rows ? rest : tile_rows, tile_rows, columns,
                               p->tiles.data + first * PRODUCTS_ROW_BYTES(columns));
    }
}

static bool prepare(struct products *p, const struct job *job)
{
    const size_t columns = job->list[0].matrix->weight.columns;
    bool used[METHODS] = {false};

    for (size_t i = 0; i < job->count; i++)
        used[choose(p, &job->list[i], job->rows)] = true;
    if (used[BLAS] && columns > INT_MAX)
        return false;
    if (used[BLAS] && !reserve(&p->blas, columns, p->threads * BLAS_BYTES))
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
    if (used[PANELS]) {
        if (!reserve(&p->tiles, columns, PRODUCTS_BLOCK_ROWS * PRODUCTS_ROW_BYTES(8) / 8))
            return false;
        prepare_tiles(p, job, columns);
    }
    return true;
}

static void multiply_few(const struct products *p, const struct job *job,
                         const struct product *product, bool bytes, size_t first, size_t end)
{
    const struct weight *w = &product->matrix->weight;

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
    const struct weight *w = &product->matrix->weight;

    for (size_t j = first; j < end; j++)
        p->kernels->dequantise[w->type]((const char *)w->data + j * w->row_bytes, w->columns,
                                        panel + (j - first) * w->columns);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)job->rows, (int)(end - first),
                (int)w->columns, 1, job->x, (int)job->x_stride, panel, (int)w->columns,
                product->add ? 1 : 0, product->y + first, (int)product->y_stride);
}

static void multiply_panels(const struct products *p, const struct job *job,
                            const struct product *product, size_t first, size_t end)
{
    const struct weight *w = &product->matrix->weight;
    const size_t bytes = panel_bytes(p->kernels, w);

    for (size_t j = first; j < end; j += PRODUCTS_PANEL_ROWS) {
        const size_t rows = end - j < PRODUCTS_PANEL_ROWS ? end - j : PRODUCTS_PANEL_ROWS;

        p->kernels->panels[w->type].multiply(
            product->matrix->panels + j / PRODUCTS_PANEL_ROWS * bytes, rows, w->columns,
            p->tiles.data, job->rows, product->y + j, product->y_stride, product->add);
    }
}

/* A task is a strip of some weight rows of one matrix. */
static size_t task_rows(enum method method, size_t rows)
{
    return method == BLAS || (method == PANELS && rows > FEW_ROWS) ? WIDE_ROWS : STRIP_ROWS;
}

static size_t count_tasks(const struct products *p, const struct job *job,
                          const struct product *product)
{
    const size_t rows = task_rows(choose(p, product, job->rows), job->rows);

    return (product->matrix->weight.rows + rows - 1) / rows;
}

static void run_task(const struct products *p, const struct job *job, size_t task)
{
    const struct product *product = job->list;
    size_t thread = 0;

    for (size_t tasks; task >= (tasks = count_tasks(p, job, product)); product++)
        task -= tasks;

    const enum method method = choose(p, product, job->rows);
    const size_t most = task_rows(method, job->rows);
    const size_t first = task * most, rest = product->matrix->weight.rows - first;
    const size_t end = first + (rest < most ? rest : most);

#ifdef _OPENMP
    thread = (size_t)omp_get_thread_num();
#endif
    if (method == PANELS)
        multiply_panels(p, job, product, first, end);
    else if (method == BLAS)
        multiply_blas(p, job, product, first, end,
                      (float *)(p->blas.data + thread * BLAS_BYTES * p->blas.columns));
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
                         list[0].matrix->weight.columns);
    give_room_to_blas(products);
    for (size_t i = 0; i < count; i++)
        tasks += count_tasks(products, &job, &list[i]);

#pragma omp parallel for num_threads(products->threads) if (tasks > 1)                             \
    schedule(dynamic, rows > FEW_ROWS ? 1 : tasks / products->threads / CHUNKS + 1)
    for (size_t task = 0; task < tasks; task++)
        run_task(products, &job, task);
    return true;
}
