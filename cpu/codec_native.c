/* SPDX-License-Identifier: MIT */
/* Factors in the storage type. */
#include "codec.h"

#include "elements.h"

/* A part of K, or of V, in the page's memory. */
static struct matrix part_of(const struct geometry *geometry, enum page_part part, size_t rank,
                             const unsigned char *page)
{
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    unsigned char *data = (unsigned char *)page;

    switch (part) {
    case PART_K_RIGHT:
        return (struct matrix){data, d, rank};
    case PART_K_LEFT:
        return (struct matrix){data + elements_bytes(geometry, d, rank), rank, length};
    case PART_V_LEFT:
        return (struct matrix){data, length, rank};
    default:
        return (struct matrix){data + elements_bytes(geometry, length, rank), rank, d};
    }
}

static size_t native_bytes(const struct geometry *geometry, bool is_key, size_t rank)
{
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;

    return is_key ? elements_bytes(geometry, d, rank) + elements_bytes(geometry, rank, length)
                  : elements_bytes(geometry, length, rank) + elements_bytes(geometry, rank, d);
}

static struct region whole(const struct geometry *geometry, enum page_part part, size_t rank,
                           const unsigned char *page)
{
    const struct matrix matrix = part_of(geometry, part, rank, page);

    return (struct region){matrix, 0, matrix.rows, 0, matrix.columns};
}

static bool native_put(const struct backend *backend, bool is_key, size_t rank, float *left,
                       float *right, size_t ld, unsigned char *page)
{
    const struct geometry *geometry = backend->geometry;

    if (is_key)
        return elements_round_transposed(backend, whole(geometry, PART_K_LEFT, rank, page), left,
                                         ld) &&
               elements_round(backend, whole(geometry, PART_K_RIGHT, rank, page), right, ld);
    return elements_round(backend, whole(geometry, PART_V_LEFT, rank, page), left, ld) &&
           elements_round_transposed(backend, whole(geometry, PART_V_RIGHT, rank, page), right, ld);
}

static void native_score(const struct codec_queries *queries, size_t rank,
                         const unsigned char *page)
{
    const struct geometry *geometry = queries->backend->geometry;

    queries->arithmetic->score_chain(
        queries->rows, queries->q_left, geometry->head_dim,
        part_of(geometry, PART_K_RIGHT, rank, page), part_of(geometry, PART_K_LEFT, rank, page),
        queries->inner, queries->inner_stride, NULL, queries->scores, queries->score_stride);
}

static void native_accumulate(const struct codec_queries *queries, size_t rank,
                              const unsigned char *page, const float *scale, float *o)
{
    const struct geometry *geometry = queries->backend->geometry;

    queries->arithmetic->accumulate_chain(
        queries->rows, queries->scores, queries->score_stride,
        part_of(geometry, PART_V_LEFT, rank, page), part_of(geometry, PART_V_RIGHT, rank, page),
        queries->inner, queries->inner_stride, scale, o, queries->output_stride);
}

static void native_attend(const struct codec_queries *queries, size_t rank_k, size_t rank_v,
                          size_t n, const struct factor_page *pages, float *m, float *l, float *o)
{
    const struct geometry *geometry = queries->backend->geometry;

    const struct matrix keys[2] = {part_of(geometry, PART_K_RIGHT, rank_k, pages[0].k),
                                   part_of(geometry, PART_K_LEFT, rank_k, pages[0].k)};
    const struct matrix values[2] = {part_of(geometry, PART_V_LEFT, rank_v, pages[0].v),
                                     part_of(geometry, PART_V_RIGHT, rank_v, pages[0].v)};

    queries->arithmetic->whole_pages.attend_factors(queries->rows, queries->q_left, keys, values, n,
                                                    pages, m, l, o, queries->output_stride);
}

static void native_row(const struct backend *backend, enum page_part part, size_t rank,
                       const unsigned char *page, size_t i, float *out)
{
    const struct geometry *geometry = backend->geometry;
    const struct matrix from = part_of(geometry, part, rank, page);
    uint32_t row[MAX_HEAD_DIM];

    elements_get_row(backend, from, i, row);
    backend->kernels->to_f32[geometry->dtype](from.columns, row, out);
}

static void native_read(const struct backend *backend, enum page_part part, size_t rank,
                        const unsigned char *page, void *out)
{
    const struct geometry *geometry = backend->geometry;
    const struct matrix from = part_of(geometry, part, rank, page);
    char *to = out;

    if (part == PART_K_LEFT || part == PART_K_RIGHT) {
        for (size_t j = 0; j < from.columns; j++)
            elements_get_column(backend, from, j, to + j * from.rows * geometry->element_bytes);
    } else {
        for (size_t i = 0; i < from.rows; i++)
            elements_get_row(backend, from, i, to + i * from.columns * geometry->element_bytes);
    }
}

static void native_write(const struct backend *backend, enum page_part part, size_t rank,
                         const void *in, unsigned char *page)
{
    const struct geometry *geometry = backend->geometry;
    const struct matrix to = part_of(geometry, part, rank, page);
    const char *from = in;

    if (part == PART_K_LEFT || part == PART_K_RIGHT) {
        for (size_t j = 0; j < to.columns; j++)
            elements_put_column(backend, to, j, from + j * to.rows * geometry->element_bytes);
    } else {
        for (size_t i = 0; i < to.rows; i++)
            elements_put_row(backend, to, i, from + i * to.columns * geometry->element_bytes);
    }
    elements_end_rows(backend, to, to.rows);
}

const struct codec codec_native = {
    .left_operands = true,
    .bytes = native_bytes,
    .put = native_put,
    .overflow = "its factors overflow the storage type",
    .score = native_score,
    .accumulate = native_accumulate,
    .attend = native_attend,
    .row = native_row,
    .read = native_read,
    .write = native_write,
};
