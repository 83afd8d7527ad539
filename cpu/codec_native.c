/* SPDX-License-Identifier: MIT */
/* Factors in the storage type. */
#include "codec.h"

#include "elements.h"

/* From this many rows on a matrix is widened to f32 once instead of in every tile of rows. */
#define WIDEN_ROWS 16

static size_t native_bytes(const struct geometry *geometry, bool is_key, size_t rank)
{
    (void)is_key;
    return rank * (geometry->policy.page_tokens + geometry->head_dim) * geometry->element_bytes;
}

/* Where a part of a page lies, and its rows and columns. */
struct part {
    size_t offset;
    size_t rows;
    size_t columns;
};

static struct part part_of(const struct geometry *geometry, enum page_part part, size_t rank)
{
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    const size_t size = geometry->element_bytes;

    switch (part) {
    case PART_K_RIGHT:
        return (struct part){0, d, rank};
    case PART_K_LEFT:
        return (struct part){d * rank * size, rank, length};
    case PART_V_LEFT:
        return (struct part){0, length, rank};
    default:
        return (struct part){length * rank * size, rank, d};
    }
}

/* Rounds from[i * row_stride + j * stride] to a part's row i, column j. */
static bool put_part(const struct backend *backend, enum page_part part, size_t rank,
                     const float *from, size_t row_stride, size_t stride, unsigned char *page)
{
    const struct geometry *geometry = backend->geometry;
    const struct part to = part_of(geometry, part, rank);
    float x[MAX_HEAD_DIM];
    bool good = true;

    for (size_t i = 0; i < to.rows; i++) {
        unsigned char *row = page + to.offset + i * to.columns * geometry->element_bytes;

        for (size_t j = 0; j < to.columns; j++)
            x[j] = from[i * row_stride + j * stride];
        backend->kernels->from_f32[geometry->dtype](to.columns, x, row);
        good = elements_finite(geometry->dtype, to.columns, row) && good;
    }
    return good;
}

static bool native_put(const struct backend *backend, bool is_key, size_t rank, float *left,
                       float *right, size_t ld, unsigned char *page)
{
    if (is_key)
        return put_part(backend, PART_K_LEFT, rank, left, 1, ld, page) &&
               put_part(backend, PART_K_RIGHT, rank, right, ld, 1, page);
    return put_part(backend, PART_V_LEFT, rank, left, ld, 1, page) &&
           put_part(backend, PART_V_RIGHT, rank, right, 1, ld, page);
}

void codec_multiply(const struct codec_queries *queries, size_t k, size_t n, const float *a,
                    size_t lda, const unsigned char *b, size_t ldb, const float *scale, float *c,
                    size_t ldc)
{
    const struct kernels *kernels = queries->backend->kernels;
    pkv_dtype dtype = queries->backend->geometry->dtype;
    const void *right = b;

    if (queries->rows >= WIDEN_ROWS && dtype != PKV_F32) {
        kernels->to_f32[dtype](k * ldb, b, queries->wide);
        right = queries->wide;
        dtype = PKV_F32;
    }
    kernels->product[dtype](queries->rows, k, n, a, lda, right, ldb, scale, c, ldc);
}

static void native_score(const struct codec_queries *queries, size_t rank,
                         const unsigned char *page)
{
    const struct geometry *geometry = queries->backend->geometry;
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    const unsigned char *left = page + part_of(geometry, PART_K_LEFT, rank).offset;

    codec_multiply(queries, d, rank, queries->q, d, page, rank, NULL, queries->inner,
                   queries->inner_stride);
    codec_multiply(queries, rank, length, queries->inner, queries->inner_stride, left, length, NULL,
                   queries->scores, queries->score_stride);
}

static void native_accumulate(const struct codec_queries *queries, size_t rank,
                              const unsigned char *page, const float *scale, float *o)
{
    const struct geometry *geometry = queries->backend->geometry;
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    const unsigned char *right = page + part_of(geometry, PART_V_RIGHT, rank).offset;

    codec_multiply(queries, length, rank, queries->scores, queries->score_stride, page, rank, NULL,
                   queries->inner, queries->inner_stride);
    codec_multiply(queries, rank, d, queries->inner, queries->inner_stride, right, d, scale, o,
                   queries->output_stride);
}

static void native_row(const struct backend *backend, enum page_part part, size_t rank,
                       const unsigned char *page, size_t i, float *out)
{
    const struct geometry *geometry = backend->geometry;
    const struct part from = part_of(geometry, part, rank);

    backend->kernels->to_f32[geometry->dtype](
        from.columns, page + from.offset + i * from.columns * geometry->element_bytes, out);
}

static void native_read(const struct backend *backend, enum page_part part, size_t rank,
                        const unsigned char *page, void *out)
{
    const struct geometry *geometry = backend->geometry;
    const struct part from = part_of(geometry, part, rank);

    if (part == PART_K_LEFT || part == PART_K_RIGHT)
        elements_transpose(geometry->element_bytes, from.rows, from.columns, from.columns,
                           page + from.offset, out);
    else
        memcpy(out, page + from.offset, from.rows * from.columns * geometry->element_bytes);
}

const struct codec codec_native = {
    .bytes = native_bytes,
    .put = native_put,
    .overflow = "its factors overflow the storage type",
    .score = native_score,
    .accumulate = native_accumulate,
    .row = native_row,
    .read = native_read,
};
