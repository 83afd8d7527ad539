/* SPDX-License-Identifier: MIT */
/*
 * INT4 factors (lib/int4.h): packed codes, then f16 scales.
 *
 *     K   R~_K^T [d, r], L~_K^T [r, P], d scales, r scales
 *     V   L~_V [P, r], R~_V [r, d], P scales, d scales
 *
 * The first matrix of each is tall, the second wide (kernels.h): P and d are multiples of 8.
 * Attention multiplies codes: the scales go into q and q R~_K^T for K, into the probabilities and
 * the page's output for V.
 */
#include "codec.h"

#include "int4.h"

static bool is_tall(enum page_part part)
{
    return part == PART_K_RIGHT || part == PART_V_LEFT;
}

/* A scale belongs to each row, or of R~_V to each column. */
static bool has_row_scales(enum page_part part)
{
    return part != PART_V_RIGHT;
}

static struct coded coded_of(const struct geometry *geometry, enum page_part part, size_t rank)
{
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    const size_t codes = rank * (length + d) / 2;

    switch (part) {
    case PART_K_RIGHT:
        return (struct coded){0, codes, d, rank};
    case PART_K_LEFT:
        return (struct coded){d * rank / 2, codes + 2 * d, rank, length};
    case PART_V_LEFT:
        return (struct coded){0, codes, length, rank};
    default:
        return (struct coded){length * rank / 2, codes + 2 * length, rank, d};
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

/* Rows that lie in lanes together, from one on: at most STRIP. */
#define STRIP 8

static size_t strip_rows(enum page_part part, size_t rows, size_t row)
{
    return is_tall(part) ? 8 : cpu_min(rows - row, 4);
}

typedef int8_t strip_codes[STRIP][MAX_HEAD_DIM];

/* The codes of a strip of n rows to its lanes; returns what lies behind them. */
static unsigned char *put_strip(enum page_part part, size_t n, size_t columns, strip_codes code,
                                unsigned char *to)
{
    const size_t half = columns / 2;
    size_t row = 0;

    if (is_tall(part)) {
        for (size_t j = 0; j < columns; j++, to += sizeof(uint32_t)) {
            uint32_t lane = 0;

            for (size_t i = 0; i < 8; i++)
                lane |= (uint32_t)(code[i][j] & 15) << (i % 2 * 16 + i / 2 * 4);
            memcpy(to, &lane, sizeof lane);
        }
        return to;
    }
    if (n == 4) {
        for (size_t j = 0; j < half; j++, to += sizeof(uint32_t)) {
            uint32_t lane = 0;

            for (size_t i = 0; i < 4; i++)
                lane |= (uint32_t)int4_pack(code[i][j], code[i][j + half])
                        << (i % 2 * 16 + i / 2 * 8);
            memcpy(to, &lane, sizeof lane);
        }
        return to;
    }
    for (size_t j = 0; j < half && n >= 2; j++, to += sizeof(uint16_t)) {
        uint16_t lane = (uint16_t)(int4_pack(code[0][j], code[0][j + half]) |
                                   int4_pack(code[1][j], code[1][j + half]) << 8);

        memcpy(to, &lane, sizeof lane);
        row = 2;
    }
    for (size_t j = 0; j < half && row < n; j++)
        *to++ = int4_pack(code[row][j], code[row][j + half]);
    return to;
}

/* Codes of from[i * row_stride + j * stride] and their scales. */
static bool put_part(const struct backend *backend, enum page_part part, size_t rank,
                     const float *from, size_t row_stride, size_t stride, unsigned char *page)
{
    const struct coded to = coded_of(backend->geometry, part, rank);
    const bool row_scales = has_row_scales(part);
    const size_t n_scales = row_scales ? to.rows : to.columns;
    uint16_t stored[MAX_HEAD_DIM];
    float scale[MAX_HEAD_DIM];
    unsigned char *codes = page + to.codes;
    strip_codes strip;

    for (size_t i = 0; i < n_scales; i++) {
        stored[i] = row_scales ? scale_of(to.columns, from + i * row_stride, stride)
                               : scale_of(to.rows, from + i * stride, row_stride);
        scale[i] = f16_to_f32(stored[i]);
        if (scale[i] == INFINITY)
            return false;
    }
    memcpy(page + to.scales, stored, n_scales * sizeof *stored);
    for (size_t row = 0, n; row < to.rows; row += n) {
        n = strip_rows(part, to.rows, row);
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < to.columns; j++)
                strip[i][j] = (int8_t)int4_code(from[(row + i) * row_stride + j * stride],
                                                scale[row_scales ? row + i : j]);
        codes = put_strip(part, n, to.columns, strip, codes);
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
static void widen_scales(const struct backend *backend, const struct coded *coded, size_t n,
                         const unsigned char *page, float *scale)
{
    backend->kernels->to_f32[PKV_F16](n, page + coded->scales, scale);
}

/* to[i][j] = from[i][j] * scale[j] */
static void scale_columns(size_t rows, size_t n, const float *scale, const float *from,
                          size_t from_stride, float *to, size_t to_stride)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < n; j++)
            to[i * to_stride + j] = from[i * from_stride + j] * scale[j];
}

static void int4_score(const struct codec_queries *queries, size_t rank, const unsigned char *page)
{
    const struct backend *backend = queries->backend;
    const struct coded right = coded_of(backend->geometry, PART_K_RIGHT, rank);
    const struct coded left = coded_of(backend->geometry, PART_K_LEFT, rank);
    float scale[MAX_HEAD_DIM];

    widen_scales(backend, &right, right.rows, page, scale);
    scale_columns(queries->rows, right.rows, scale, queries->q, right.rows, queries->wide,
                  right.rows);
    backend->kernels->product_tall(queries->rows, right.rows, rank, queries->wide, right.rows,
                                   page + right.codes, queries->inner, queries->inner_stride);
    widen_scales(backend, &left, rank, page, scale);
    scale_columns(queries->rows, rank, scale, queries->inner, queries->inner_stride, queries->inner,
                  queries->inner_stride);
    backend->kernels->product_wide(queries->rows, rank, left.columns, queries->inner,
                                   queries->inner_stride, page + left.codes, queries->scores,
                                   queries->score_stride);
}

static void int4_accumulate(const struct codec_queries *queries, size_t rank,
                            const unsigned char *page, const float *scale, float *o)
{
    const struct backend *backend = queries->backend;
    const struct coded left = coded_of(backend->geometry, PART_V_LEFT, rank);
    const struct coded right = coded_of(backend->geometry, PART_V_RIGHT, rank);
    const size_t d = right.columns;
    const size_t stride = queries->output_stride;
    float column[MAX_HEAD_DIM];

    widen_scales(backend, &left, left.rows, page, column);
    scale_columns(queries->rows, left.rows, column, queries->scores, queries->score_stride,
                  queries->scores, queries->score_stride);
    backend->kernels->product_tall(queries->rows, left.rows, rank, queries->scores,
                                   queries->score_stride, page + left.codes, queries->inner,
                                   queries->inner_stride);
    backend->kernels->product_wide(queries->rows, rank, d, queries->inner, queries->inner_stride,
                                   page + right.codes, queries->wide, stride);
    widen_scales(backend, &right, d, page, column);
    for (size_t i = 0; i < queries->rows; i++) {
        const float *page_output = queries->wide + i * stride;
        float *row = o + i * stride;

        for (size_t j = 0; j < d; j++)
            row[j] = (scale ? scale[i] * row[j] : 0.0f) + page_output[j] * column[j];
    }
}

static void int4_attend(const struct codec_queries *queries, size_t rank_k, size_t rank_v, size_t n,
                        const struct factor_page *pages, float *m, float *l, float *o)
{
    const struct geometry *geometry = queries->backend->geometry;
    const struct coded keys[2] = {coded_of(geometry, PART_K_RIGHT, rank_k),
                                  coded_of(geometry, PART_K_LEFT, rank_k)};
    const struct coded values[2] = {coded_of(geometry, PART_V_LEFT, rank_v),
                                    coded_of(geometry, PART_V_RIGHT, rank_v)};

    queries->arithmetic->whole_pages.attend_codes(queries->rows, queries->q, keys, values, n, pages,
                                                  m, l, o, queries->output_stride);
}

/* ---- Reading back, and in ---- */

static int code_at(enum page_part part, const struct coded *coded, const unsigned char *page,
                   size_t row, size_t column)
{
    const unsigned char *codes = page + coded->codes;
    const size_t half = coded->columns / 2;
    const size_t whole = coded->rows / 4 * 4; /* rows of a wide matrix in lanes of 32 bits */
    const bool two = coded->rows - whole >= 2;
    const bool high = column >= half;
    uint32_t lane;
    uint16_t lane_of_two;

    if (is_tall(part)) {
        memcpy(&lane, codes + (row / 8 * coded->columns + column) * sizeof lane, sizeof lane);
        return int4_unpack((uint8_t)(lane >> (row % 2 * 16 + row / 2 % 4 * 4)), false);
    }
    column -= high ? half : 0;
    if (row < whole) {
        memcpy(&lane, codes + (row / 4 * half + column) * sizeof lane, sizeof lane);
        return int4_unpack((uint8_t)(lane >> (row % 2 * 16 + row / 2 % 2 * 8)), high);
    }
    codes += whole * half;
    if (two && row < whole + 2) {
        memcpy(&lane_of_two, codes + column * sizeof lane_of_two, sizeof lane_of_two);
        return int4_unpack((uint8_t)(lane_of_two >> (row - whole) * 8), high);
    }
    return int4_unpack(codes[(two ? 2 * half : 0) + column], high);
}

static void int4_row(const struct backend *backend, enum page_part part, size_t rank,
                     const unsigned char *page, size_t i, float *out)
{
    const struct coded coded = coded_of(backend->geometry, part, rank);
    const unsigned char *scales = page + coded.scales;

    for (size_t j = 0; j < coded.columns; j++) {
        uint16_t scale;

        memcpy(&scale, scales + sizeof scale * (has_row_scales(part) ? i : j), sizeof scale);
        out[j] = (float)code_at(part, &coded, page, i, j) * f16_to_f32(scale);
    }
}

/* Canonical parts of K are transposed here. */
static bool is_transposed(enum page_part part)
{
    return part == PART_K_LEFT || part == PART_K_RIGHT;
}

static void int4_read(const struct backend *backend, enum page_part part, size_t rank,
                      const unsigned char *page, void *out)
{
    const struct coded coded = coded_of(backend->geometry, part, rank);
    const size_t elements = coded.rows * coded.columns;
    const size_t columns = is_transposed(part) ? coded.rows : coded.columns;
    uint8_t *codes = out;

    for (size_t i = 0; i < elements; i += 2) {
        int code[2];

        for (size_t k = 0; k < 2; k++) {
            size_t row = (i + k) / columns;
            size_t column = (i + k) % columns;

            code[k] = is_transposed(part) ? code_at(part, &coded, page, column, row)
                                          : code_at(part, &coded, page, row, column);
        }
        *codes++ = int4_pack(code[0], code[1]);
    }
    memcpy(codes, page + coded.scales,
           sizeof(uint16_t) * (has_row_scales(part) ? coded.rows : coded.columns));
}

static void int4_write(const struct backend *backend, enum page_part part, size_t rank,
                       const void *in, unsigned char *page)
{
    const struct coded coded = coded_of(backend->geometry, part, rank);
    const size_t row_stride = is_transposed(part) ? 1 : coded.columns;
    const size_t stride = is_transposed(part) ? coded.rows : 1;
    const uint8_t *from = in;
    unsigned char *codes = page + coded.codes;
    strip_codes strip;

    for (size_t row = 0, n; row < coded.rows; row += n) {
        n = strip_rows(part, coded.rows, row);
        for (size_t i = 0; i < n; i++) {
            for (size_t j = 0; j < coded.columns; j++) {
                size_t at = (row + i) * row_stride + j * stride;

                strip[i][j] = (int8_t)int4_unpack(from[at / 2], at % 2);
            }
        }
        codes = put_strip(part, n, coded.columns, strip, codes);
    }
    memcpy(page + coded.scales, from + coded.rows * coded.columns / 2,
           sizeof(uint16_t) * (has_row_scales(part) ? coded.rows : coded.columns));
}

const struct codec codec_int4 = {
    .bytes = int4_bytes,
    .put = int4_put,
    .overflow = "its INT4 scales overflow f16",
    .score = int4_score,
    .accumulate = int4_accumulate,
    .attend = int4_attend,
    .row = int4_row,
    .read = int4_read,
    .write = int4_write,
};
