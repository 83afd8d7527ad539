/* SPDX-License-Identifier: MIT */
/*
 * INT4 factors (lib/int4.h): packed codes, then f16 scales.
 *
 *     K   R~_K^T [d, r] in pairs of rows, L~_K^T [r, P] in pairs of columns, d scales, r scales
 *     V   L~_V [P, r] in pairs of rows, R~_V [r, d] in pairs of columns, P scales, d scales
 *
 * The pairs (kernels.h) lie along P and d, which are even. Attention multiplies codes: the scales
 * go into q and q R~_K^T for K, into the probabilities and the page's output for V.
 */
#include "codec.h"

#include "int4.h"

/* Where a part of a page lies, and its rows and columns as above; a scale belongs to each of its
 * rows or of its columns. */
struct layout {
    size_t codes;
    size_t scales;
    size_t rows;
    size_t columns;
    bool row_pairs;
    bool row_scales;
};

static struct layout layout_of(const struct geometry *geometry, enum page_part part, size_t rank)
{
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    const size_t codes = rank * (length + d) / 2;

    switch (part) {
    case PART_K_RIGHT:
        return (struct layout){0, codes, d, rank, true, true};
    case PART_K_LEFT:
        return (struct layout){d * rank / 2, codes + 2 * d, rank, length, false, true};
    case PART_V_LEFT:
        return (struct layout){0, codes, length, rank, true, true};
    default:
        return (struct layout){length * rank / 2, codes + 2 * length, rank, d, false, false};
    }
}

static size_t int4_bytes(const struct geometry *geometry, bool is_key, size_t rank)
{
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;

    return rank * (length + d) / 2 + 2 * (d + (is_key ? rank : length));
}

/* ---- Into codes ---- */

/* To L~ and R~^T. */
static void balance(size_t length, size_t d, size_t rank, float *left, float *right, size_t ld)
{
    for (size_t c = 0; c < rank; c++) {
        double squares = 0.0;
        float root;

        for (size_t i = 0; i < d; i++)
            squares += (double)right[i * ld + c] * (double)right[i * ld + c];
        root = int4_root(squares);
        for (size_t t = 0; t < length; t++)
            left[t * ld + c] *= root;
        for (size_t i = 0; i < d; i++)
            right[i * ld + c] = int4_balance_right(right[i * ld + c], root);
    }
}

/* The scale of n spaced values. */
static uint16_t scale_of(size_t n, const float *x, size_t stride)
{
    float largest = 0.0f;

    for (size_t i = 0; i < n; i++) {
        float magnitude = fabsf(x[i * stride]);

        largest = magnitude > largest ? magnitude : largest;
    }
    return int4_scale(largest);
}

/* Codes of from[i * row_stride + j * stride] and their scales. */
static bool put_part(const struct backend *backend, enum page_part part, size_t rank,
                     const float *from, size_t row_stride, size_t stride, unsigned char *page)
{
    const struct layout to = layout_of(backend->geometry, part, rank);
    const size_t n_scales = to.row_scales ? to.rows : to.columns;
    uint16_t stored[MAX_HEAD_DIM];
    float scale[MAX_HEAD_DIM];
    uint8_t *codes = page + to.codes;

    for (size_t i = 0; i < n_scales; i++) {
        stored[i] = to.row_scales ? scale_of(to.columns, from + i * row_stride, stride)
                                  : scale_of(to.rows, from + i * stride, row_stride);
        scale[i] = f16_to_f32(stored[i]);
        if (scale[i] == INFINITY)
            return false;
    }
    memcpy(page + to.scales, stored, n_scales * sizeof *stored);
    for (size_t i = 0; i < to.rows; i += to.row_pairs ? 2 : 1) {
        for (size_t j = 0; j < to.columns; j += to.row_pairs ? 1 : 2) {
            size_t i2 = to.row_pairs ? i + 1 : i;
            size_t j2 = to.row_pairs ? j : j + 1;

            *codes++ = int4_pack(
                int4_code(from[i * row_stride + j * stride], scale[to.row_scales ? i : j]),
                int4_code(from[i2 * row_stride + j2 * stride], scale[to.row_scales ? i2 : j2]));
        }
    }
    return true;
}

static bool int4_put(const struct backend *backend, bool is_key, size_t rank, float *left,
                     float *right, size_t ld, unsigned char *page)
{
    balance(backend->geometry->policy.page_tokens, backend->geometry->head_dim, rank, left, right,
            ld);
    if (is_key)
        return put_part(backend, PART_K_LEFT, rank, left, 1, ld, page) &&
               put_part(backend, PART_K_RIGHT, rank, right, ld, 1, page);
    return put_part(backend, PART_V_LEFT, rank, left, ld, 1, page) &&
           put_part(backend, PART_V_RIGHT, rank, right, 1, ld, page);
}

/* ---- Attention ---- */

/* The scales of a part in f32. */
static void widen_scales(const struct backend *backend, const struct layout *layout,
                         const unsigned char *page, float *scale)
{
    backend->kernels->to_f32[PKV_F16](layout->row_scales ? layout->rows : layout->columns,
                                      page + layout->scales, scale);
}

/* to[i][j] = from[i][j] * scale[j] */
static void scale_columns(size_t rows, size_t n, const float *scale, const float *from,
                          size_t from_stride, float *to, size_t to_stride)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < n; j++)
            to[i * to_stride + j] = from[i * from_stride + j] * scale[j];
}

static struct matrix matrix_of(const struct layout *layout, const unsigned char *page)
{
    return (struct matrix){(unsigned char *)page + layout->codes, layout->rows, layout->columns};
}

static void int4_score(const struct codec_queries *queries, size_t rank, const unsigned char *page)
{
    const struct backend *backend = queries->backend;
    const struct layout right = layout_of(backend->geometry, PART_K_RIGHT, rank);
    const struct layout left = layout_of(backend->geometry, PART_K_LEFT, rank);
    float scale[MAX_HEAD_DIM];

    widen_scales(backend, &right, page, scale);
    scale_columns(queries->rows, right.rows, scale, queries->q, right.rows, queries->wide,
                  right.rows);
    backend->kernels->product_row_pairs(queries->rows, right.rows, rank, queries->wide, right.rows,
                                        matrix_of(&right, page), NULL, queries->inner,
                                        queries->inner_stride);
    widen_scales(backend, &left, page, scale);
    scale_columns(queries->rows, rank, scale, queries->inner, queries->inner_stride, queries->inner,
                  queries->inner_stride);
    backend->kernels->product_column_pairs(queries->rows, rank, left.columns, queries->inner,
                                           queries->inner_stride, matrix_of(&left, page), NULL,
                                           queries->scores, queries->score_stride);
}

static void int4_accumulate(const struct codec_queries *queries, size_t rank,
                            const unsigned char *page, const float *scale, float *o)
{
    const struct backend *backend = queries->backend;
    const struct layout left = layout_of(backend->geometry, PART_V_LEFT, rank);
    const struct layout right = layout_of(backend->geometry, PART_V_RIGHT, rank);
    const size_t d = right.columns;
    const size_t stride = queries->output_stride;
    float column[MAX_HEAD_DIM];

    widen_scales(backend, &left, page, column);
    scale_columns(queries->rows, left.rows, column, queries->scores, queries->score_stride,
                  queries->scores, queries->score_stride);
    backend->kernels->product_row_pairs(queries->rows, left.rows, rank, queries->scores,
                                        queries->score_stride, matrix_of(&left, page), NULL,
                                        queries->inner, queries->inner_stride);
    backend->kernels->product_column_pairs(queries->rows, rank, d, queries->inner,
                                           queries->inner_stride, matrix_of(&right, page), NULL,
                                           queries->wide, stride);
    widen_scales(backend, &right, page, column);
    for (size_t i = 0; i < queries->rows; i++) {
        const float *page_output = queries->wide + i * stride;
        float *row = o + i * stride;

        for (size_t j = 0; j < d; j++)
            row[j] = (scale ? scale[i] * row[j] : 0.0f) + page_output[j] * column[j];
    }
}

/* ---- Reading back, and in ---- */

static int code_at(const struct layout *layout, const unsigned char *page, size_t row,
                   size_t column)
{
    const uint8_t *codes = page + layout->codes;

    if (layout->row_pairs)
        return int4_unpack(codes[row / 2 * layout->columns + column], row % 2);
    return int4_unpack(codes[(row * layout->columns + column) / 2], column % 2);
}

static void int4_row(const struct backend *backend, enum page_part part, size_t rank,
                     const unsigned char *page, size_t i, float *out)
{
    const struct layout layout = layout_of(backend->geometry, part, rank);
    const unsigned char *scales = page + layout.scales;

    for (size_t j = 0; j < layout.columns; j++) {
        uint16_t scale;

        memcpy(&scale, scales + sizeof scale * (layout.row_scales ? i : j), sizeof scale);
        out[j] = (float)code_at(&layout, page, i, j) * f16_to_f32(scale);
    }
}

static void int4_read(const struct backend *backend, enum page_part part, size_t rank,
                      const unsigned char *page, void *out)
{
    const struct layout layout = layout_of(backend->geometry, part, rank);
    const bool transposed = part == PART_K_LEFT || part == PART_K_RIGHT;
    const size_t elements = layout.rows * layout.columns;
    const size_t columns = transposed ? layout.rows : layout.columns;
    uint8_t *codes = out;

    for (size_t i = 0; i < elements; i += 2) {
        int code[2];

        for (size_t k = 0; k < 2; k++) {
            size_t row = (i + k) / columns;
            size_t column = (i + k) % columns;

            code[k] = transposed ? code_at(&layout, page, column, row)
                                 : code_at(&layout, page, row, column);
        }
        *codes++ = int4_pack(code[0], code[1]);
    }
    memcpy(codes, page + layout.scales,
           sizeof(uint16_t) * (layout.row_scales ? layout.rows : layout.columns));
}

static void int4_write(const struct backend *backend, enum page_part part, size_t rank,
                       const void *in, unsigned char *page)
{
    const struct layout layout = layout_of(backend->geometry, part, rank);
    const bool transposed = part == PART_K_LEFT || part == PART_K_RIGHT;
    const size_t elements = layout.rows * layout.columns;
    const size_t row_stride = transposed ? 1 : layout.columns;
    const size_t stride = transposed ? layout.rows : 1;
    const uint8_t *from = in;
    uint8_t *codes = page + layout.codes;

    for (size_t i = 0; i < layout.rows; i += layout.row_pairs ? 2 : 1) {
        for (size_t j = 0; j < layout.columns; j += layout.row_pairs ? 1 : 2) {
            size_t even = i * row_stride + j * stride;
            size_t odd = even + (layout.row_pairs ? row_stride : stride);

            *codes++ = int4_pack(int4_unpack(from[even / 2], even % 2),
                                 int4_unpack(from[odd / 2], odd % 2));
        }
    }
    memcpy(page + layout.scales, from + elements / 2,
           sizeof(uint16_t) * (layout.row_scales ? layout.rows : layout.columns));
}

const struct codec codec_int4 = {
    .bytes = int4_bytes,
    .put = int4_put,
    .overflow = "its INT4 scales overflow f16",
    .score = int4_score,
    .accumulate = int4_accumulate,
    .row = int4_row,
    .read = int4_read,
    .write = int4_write,
};
