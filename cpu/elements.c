/* SPDX-License-Identifier: MIT */
/* Elements of the storage type that are moved or looked at, not computed with. */
#include "elements.h"

#include "numeric.h"

#include <string.h>

/* The flags are as wide as the elements, so that compilers vectorise the loops. */
bool elements_finite(pkv_dtype dtype, size_t n, const void *elements)
{
    if (dtype == PKV_F32) {
        const float *x = elements;
        uint32_t bad = 0;

        for (size_t i = 0; i < n; i++)
            bad |= (f32_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
        return bad == 0;
    }

    const uint16_t *x = elements;
    const uint16_t exponent = dtype == PKV_F16 ? 0x7c00 : 0x7f80;
    uint16_t bad = 0;

    for (size_t i = 0; i < n; i++)
        bad |= (uint16_t)((x[i] & exponent) == exponent);
    return bad == 0;
}

/* n elements of `size` bytes, spaced; inlined, so that compilers know the usual distances. A pair
 * of bf16 is moved as one element and may be aligned to bf16 alone. */
static inline __attribute__((always_inline)) void
copy_spaced(size_t size, size_t n, const void *from, size_t from_stride, void *to, size_t to_stride)
{
    const char *a = from;
    char *b = to;

    if (size == 4) {
        for (size_t i = 0; i < n; i++)
            memcpy(b + i * to_stride * 4, a + i * from_stride * 4, 4);
    } else {
        for (size_t i = 0; i < n; i++)
            memcpy(b + i * to_stride * 2, a + i * from_stride * 2, 2);
    }
}

static void copy(size_t size, size_t n, const void *from, size_t from_stride, void *to,
                 size_t to_stride)
{
    if (size == 2 && from_stride == 2 && to_stride == 1)
        copy_spaced(2, n, from, 2, to, 1);
    else if (size == 2 && from_stride == 1 && to_stride == 2)
        copy_spaced(2, n, from, 1, to, 2);
    else
        copy_spaced(size, n, from, from_stride, to, to_stride);
}

size_t elements_bytes(const struct geometry *geometry, size_t rows, size_t columns)
{
    return kernels_stored_rows(geometry->dtype, rows) * columns * geometry->element_bytes;
}

/* The panel that column j is in: where it begins, and its columns. */
static unsigned char *panel_of(const struct backend *backend, struct matrix matrix, size_t j,
                               size_t *first, size_t *width)
{
    *first = j / backend->kernels->panel * backend->kernels->panel;
    *width = cpu_min(backend->kernels->panel, matrix.columns - *first);
    return matrix.data + elements_bytes(backend->geometry, matrix.rows, *first);
}

/* Element (i, first) of a panel of `width` columns; the next column's is `interleave` further. */
static unsigned char *in_panel(const struct geometry *geometry, unsigned char *panel, size_t width,
                               size_t i)
{
    const size_t interleave = kernels_interleave(geometry->dtype);

    return panel + (i / interleave * width * interleave + i % interleave) * geometry->element_bytes;
}

void elements_put_row(const struct backend *backend, struct matrix matrix, size_t i,
                      const void *row)
{
    const struct geometry *geometry = backend->geometry;
    const size_t size = geometry->element_bytes;
    size_t first, width;

    for (size_t j = 0; j < matrix.columns; j += width) {
        unsigned char *panel = panel_of(backend, matrix, j, &first, &width);

        copy(size, width, (const char *)row + j * size, 1, in_panel(geometry, panel, width, i),
             kernels_interleave(geometry->dtype));
    }
}

void elements_get_row(const struct backend *backend, struct matrix matrix, size_t i, void *row)
{
    const struct geometry *geometry = backend->geometry;
    const size_t size = geometry->element_bytes;
    size_t first, width;

    for (size_t j = 0; j < matrix.columns; j += width) {
        unsigned char *panel = panel_of(backend, matrix, j, &first, &width);

        copy(size, width, in_panel(geometry, panel, width, i), kernels_interleave(geometry->dtype),
             (char *)row + j * size, 1);
    }
}

/* Rows that lie interleaved are moved together, but for an odd last one. */
void elements_put_column(const struct backend *backend, struct matrix matrix, size_t j,
                         const void *column)
{
    const struct geometry *geometry = backend->geometry;
    const size_t interleave = kernels_interleave(geometry->dtype);
    const size_t size = geometry->element_bytes * interleave;
    const size_t whole = matrix.rows / interleave;
    size_t first, width;
    unsigned char *to = panel_of(backend, matrix, j, &first, &width) + (j - first) * size;

    copy(size, whole, column, 1, to, width);
    if (matrix.rows % interleave)
        memcpy(to + whole * width * size, (const char *)column + whole * size, size / interleave);
}

void elements_get_column(const struct backend *backend, struct matrix matrix, size_t j,
                         void *column)
{
    const struct geometry *geometry = backend->geometry;
    const size_t interleave = kernels_interleave(geometry->dtype);
    const size_t size = geometry->element_bytes * interleave;
    const size_t whole = matrix.rows / interleave;
    size_t first, width;
    const unsigned char *from = panel_of(backend, matrix, j, &first, &width) + (j - first) * size;

    copy(size, whole, from, width, column, 1);
    if (matrix.rows % interleave)
        memcpy((char *)column + whole * size, from + whole * width * size, size / interleave);
}

void elements_end_rows(const struct backend *backend, struct matrix matrix, size_t rows)
{
    static const uint32_t zeros[MAX_HEAD_DIM];

    if (rows % kernels_interleave(backend->geometry->dtype))
        elements_put_row(backend, matrix, rows, zeros);
}

/* ---- Regions ---- */

/* Rows that are transposed together, and columns at most. */
#define TILE_ROWS    16
#define TILE_COLUMNS 64

/* What of a region lies in one panel, or in as many columns of it as a tile has. */
struct piece {
    unsigned char *panel;
    size_t width; /* of the panel */
    size_t first; /* column of the panel */
    size_t columns;
};

/* The piece after `done` columns of the region. */
static struct piece piece_at(const struct backend *backend, const struct region *region,
                             size_t done)
{
    struct piece piece;
    size_t first;

    piece.panel = panel_of(backend, region->matrix, region->column + done, &first, &piece.width);
    piece.first = region->column + done - first;
    piece.columns =
        cpu_min(cpu_min(region->columns - done, piece.width - piece.first), TILE_COLUMNS);
    return piece;
}

/* Where row i of a piece lies, or its pair of rows. */
static unsigned char *row_of(const struct geometry *geometry, struct piece piece, size_t i)
{
    const size_t interleave = kernels_interleave(geometry->dtype);

    return piece.panel +
           (i / interleave * piece.width + piece.first) * interleave * geometry->element_bytes;
}

/* Rows row .. row + rows - 1 of a piece. */
static bool round_rows(const struct backend *backend, struct piece piece, size_t row, size_t rows,
                       const float *from, size_t stride)
{
    const struct kernels *kernels = backend->kernels;
    const pkv_dtype dtype = backend->geometry->dtype;
    bool good = true;

    if (dtype == PKV_BF16)
        return kernels->pairs_from_f32(rows, piece.columns, from, stride,
                                       row_of(backend->geometry, piece, row), piece.width);
    for (size_t i = 0; i < rows; i++) {
        unsigned char *to = row_of(backend->geometry, piece, row + i);

        kernels->from_f32[dtype](piece.columns, from + i * stride, to);
        good = elements_finite(dtype, piece.columns, to) && good;
    }
    return good;
}

static void widen_rows(const struct backend *backend, struct piece piece, size_t row, size_t rows,
                       float *to, size_t stride)
{
    const struct kernels *kernels = backend->kernels;
    const pkv_dtype dtype = backend->geometry->dtype;
    size_t i = 0;

    if (dtype == PKV_BF16 && row % 2 == 1 && rows > 0) {
        float pair[2 * TILE_COLUMNS];

        kernels->pairs_to_f32(2, piece.columns, row_of(backend->geometry, piece, row), piece.width,
                              pair, TILE_COLUMNS);
        memcpy(to, pair + TILE_COLUMNS, piece.columns * sizeof *to);
        i = 1;
    }
    if (dtype == PKV_BF16) {
        kernels->pairs_to_f32(rows - i, piece.columns, row_of(backend->geometry, piece, row + i),
                              piece.width, to + i * stride, stride);
        return;
    }
    for (; i < rows; i++)
        kernels->to_f32[dtype](piece.columns, row_of(backend->geometry, piece, row + i),
                               to + i * stride);
}

bool elements_round(const struct backend *backend, struct region to, const float *from,
                    size_t stride)
{
    struct piece piece;
    bool good = true;

    for (size_t done = 0; done < to.columns; done += piece.columns) {
        piece = piece_at(backend, &to, done);
        good = round_rows(backend, piece, to.row, to.rows, from + done, stride) && good;
    }
    return good;
}

bool elements_round_transposed(const struct backend *backend, struct region to, const float *from,
                               size_t stride)
{
    float tile[TILE_ROWS * TILE_COLUMNS];
    struct piece piece;
    bool good = true;

    for (size_t done = 0; done < to.columns; done += piece.columns) {
        piece = piece_at(backend, &to, done);
        if (backend->geometry->dtype == PKV_BF16) {
            good = backend->kernels->pairs_from_columns(
                       to.rows, piece.columns, from + done * stride, stride,
                       row_of(backend->geometry, piece, to.row), piece.width) &&
                   good;
            continue;
        }
        for (size_t i = 0; i < to.rows; i += TILE_ROWS) {
            size_t rows = cpu_min(TILE_ROWS, to.rows - i);

            backend->kernels->transpose(piece.columns, rows, from + done * stride + i, stride, tile,
                                        TILE_COLUMNS);
            good = round_rows(backend, piece, to.row + i, rows, tile, TILE_COLUMNS) && good;
        }
    }
    return good;
}

void elements_widen(const struct backend *backend, struct region from, float *to, size_t stride)
{
    struct piece piece;

    for (size_t done = 0; done < from.columns; done += piece.columns) {
        piece = piece_at(backend, &from, done);
        widen_rows(backend, piece, from.row, from.rows, to + done, stride);
    }
}

void elements_widen_transposed(const struct backend *backend, struct region from, float *to,
                               size_t stride)
{
    const bool in_pairs = backend->geometry->dtype == PKV_BF16 && from.row % 2 == 0 &&
                          from.rows % 2 == 0 && from.rows >= 2 * KERNELS_PAD;
    float tile[TILE_ROWS * TILE_COLUMNS];
    struct piece piece;

    for (size_t done = 0; done < from.columns; done += piece.columns) {
        piece = piece_at(backend, &from, done);
        if (in_pairs && piece.columns >= 4) {
            backend->kernels->pairs_to_columns(from.rows, piece.columns,
                                               row_of(backend->geometry, piece, from.row),
                                               piece.width, to + done * stride, stride);
            continue;
        }
        for (size_t i = 0; i < from.rows; i += TILE_ROWS) {
            size_t rows = cpu_min(TILE_ROWS, from.rows - i);

            widen_rows(backend, piece, from.row + i, rows, tile, TILE_COLUMNS);
            backend->kernels->transpose(rows, piece.columns, tile, TILE_COLUMNS,
                                        to + done * stride + i, stride);
        }
    }
}
