/* SPDX-License-Identifier: MIT */
/* The table of inner loops that exists once for every instruction set. */
#ifndef PUZZLEKV_CPU_KERNELS_H
#define PUZZLEKV_CPU_KERNELS_H

#include "puzzlekv.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Kernels work in whole vectors of up to KERNELS_PAD elements. Where a contract says "padded", the
 * array has room for its count rounded up to KERNELS_PAD; what lies past the count is read or
 * overwritten but never changes a result.
 */
#define KERNELS_PAD 16

static inline size_t kernels_padded(size_t n)
{
    return (n + KERNELS_PAD - 1) / KERNELS_PAD * KERNELS_PAD;
}

/*
 * A stored matrix [rows, columns]: one panel of `panel` columns (a table's) after the other, the
 * last one as wide as what is left. Within a panel of w columns bf16 lies in pairs of rows, element
 * (i, j) at (i / 2 * w + j) * 2 + i % 2, where an odd last row is paired with finite values; f32
 * and f16 lie row by row. So whoever multiplies by a matrix reads it in address order, which keeps
 * the hardware's prefetcher with it. Readable KERNELS_PAD floats past its end.
 */
struct matrix {
    unsigned char *data;
    size_t rows;
    size_t columns;
};

/* Rows that lie interleaved. */
static inline size_t kernels_interleave(pkv_dtype dtype)
{
    return dtype == PKV_BF16 ? 2 : 1;
}

/* Rows that a matrix of `rows` rows takes room for. */
static inline size_t kernels_stored_rows(pkv_dtype dtype, size_t rows)
{
    size_t interleave = kernels_interleave(dtype);

    return (rows + interleave - 1) / interleave * interleave;
}

/*
 * Left operands are rows of f32, or of bf16 in the room of f32, which `split` and `pack` make in
 * place. A split row of n elements, for keys, is n elements of bf16 and, from lda / 2 on, what
 * rounding left of each, in bf16 too; a packed one, for values, is n elements. Where n is odd one
 * more is read, which is 0. Strides count f32 elements either way.
 */
typedef void kernel_pack(size_t rows, size_t n, float *a, size_t lda);

/*
 * c[i][j] = (scale ? scale[i] * c[i][j] : 0) + sum over p < k of a[i][p] * b[p][j], for i < rows,
 * j < n; k <= b.rows, n <= b.columns. The order of the sum is fixed: the bits of a row depend
 * neither on the other rows nor on n. It is one multiply-add chain, p ascending, where left
 * operands are f32. Rows of c are padded.
 */
typedef void kernel_product(size_t rows, size_t k, size_t n, const float *a, size_t lda,
                            struct matrix b, const float *scale, float *c, size_t ldc);

/* c = (scale ? scale c : 0) + (a b1) b2 as two products; all of b1 and b2 counts. Leaves a b1 as a
 * left operand in `inner`, whose rows are padded. */
typedef void kernel_chain(size_t rows, const float *a, size_t lda, struct matrix b1,
                          struct matrix b2, float *inner, size_t ldi, const float *scale, float *c,
                          size_t ldc);

/*
 * One page into running softmax states. Row i of `s` holds scores in its first
 * c = valid ? valid[i] : n columns (1 <= c <= n). With a new m' that is at least m[i] and no more
 * than KERNELS_SLACK below the largest of m[i] and the scores:
 *     scale[i] = exp(m[i] - m'),  s[i][j] = exp(s[i][j] - m') for j < c, 0 for c <= j < n,
 *     l[i] = scale[i] l[i] + sum of row i,  m[i] = m'.
 * Row i is then a left operand for values, and its sum is that of its elements as rounded. A new
 * state is m = -inf, l = 0. Rows of s and the arrays m, l and scale are padded. What would be below
 * 2^-126 is 0.
 */
#define KERNELS_SLACK 8.0f
typedef void kernel_softmax(size_t rows, size_t n, const uint32_t *valid, float *s, size_t lds,
                            float *m, float *l, float *scale);

/* Merges the states (m, l, o)[i] of Eq. 4 with (m2, l2, o2)[i] as Eq. 5 does, without dividing.
 * o and o2 are [rows, n] with padded rows of ldo elements; m and l are not padded. */
typedef void kernel_merge(size_t rows, size_t n, float *m, float *l, float *o, const float *m2,
                          const float *l2, const float *o2, size_t ldo);

/* Conversions of n elements, nothing beyond touched; to storage as in numeric.h. */
typedef void kernel_to_f32(size_t n, const void *from, float *to);
typedef void kernel_from_f32(size_t n, const float *from, void *to);

/*
 * The same of `rows` rows of n columns of a stored matrix of bf16, in pairs; nothing beyond
 * touched. Strides are between rows of f32 and between pairs of rows, in pairs of elements. An odd
 * last row is paired with 0, and widened alone. False where an element is not finite in bf16; what
 * is stored is undefined then.
 */
typedef bool kernel_pairs_from_f32(size_t rows, size_t n, const float *from, size_t from_stride,
                                   void *to, size_t to_stride);
typedef void kernel_pairs_to_f32(size_t rows, size_t n, const void *from, size_t from_stride,
                                 float *to, size_t to_stride);

/*
 * The same, transposed: row j of f32 is column j of the stored matrix, which has `rows` rows and n
 * columns. What is rounded has padded rows; what is widened has an even number of rows, at least
 * 2 KERNELS_PAD, and at least 4 columns.
 */
typedef bool kernel_pairs_from_columns(size_t rows, size_t n, const float *from, size_t from_stride,
                                       void *to, size_t to_stride);
typedef void kernel_pairs_to_columns(size_t rows, size_t n, const void *from, size_t from_stride,
                                     float *to, size_t to_stride);

/* to[j * to_stride + i] = from[i * from_stride + j], i < rows, j < columns. */
typedef void kernel_transpose(size_t rows, size_t columns, const float *from, size_t from_stride,
                              float *to, size_t to_stride);

/* K and V of a factorized page, as a codec has them (codec.h). */
struct factor_page {
    unsigned char *k;
    unsigned char *v;
};

/* Pages behind the last one whose addresses a kernel for factors is given. */
#define KERNELS_AHEAD 4

/*
 * Whole pages into states (m, l, o) of few rows: scores, softmax as above, o = o exp(m - m') +
 * p V. q is split; o of a new state is 0. A dense page is K^T [d, P] and V [P, d]; `next` bytes
 * from both is what may be fetched for the page that comes next. Of n factorized pages, one after
 * the other, the first is k[0] k[1] and v[0] v[1], at its beginning; the others are alike, and
 * pages[n] .. pages[n + KERNELS_AHEAD - 1] may be fetched for what comes next.
 */
typedef void kernel_attend_dense(size_t rows, const float *q, struct matrix k, struct matrix v,
                                 ptrdiff_t next, float *m, float *l, float *o, size_t ldo);
typedef void kernel_attend_factors(size_t rows, const float *q, const struct matrix k[2],
                                   const struct matrix v[2], size_t n,
                                   const struct factor_page *pages, float *m, float *l, float *o,
                                   size_t ldo);

/*
 * A matrix of INT4 codes, -7 .. 7 as 4-bit two's complement, in 32-bit lanes of the machine's byte
 * order, without panels:
 *
 *     tall  [rows, n], rows a multiple of 8: lane g * n + j holds rows 8 g .. 8 g + 7 of column j,
 *           row 8 g + 2 i + k in the four bits from 16 k + 4 i on
 *     wide  [rows, 2 h]: lane g * h + j holds rows 4 g .. 4 g + 3 of columns j and j + h,
 *           row 4 g + 2 i + k in the bits from 16 k + 8 i, and from 16 k + 8 i + 4; then, of
 *           rows % 4, h lanes of 16 bits with two rows, row k in the bits from 8 k, 8 k + 4,
 *           and h of 8 bits with the last one
 *
 * so that a mask or a look-up of 16 bits gives pairs of rows, which lie side by side. Readable
 * KERNELS_PAD floats past its end.
 */

/* c = a b as above for a matrix b of codes, all of which counts; a is f32. */
typedef void kernel_product_codes(size_t rows, size_t k, size_t n, const float *a, size_t lda,
                                  const unsigned char *b, float *c, size_t ldc);

/* Where the codes of a matrix lie in a page of K or of V, and f16 scales: of a tall one those of
 * its rows, of R_V those of its columns, of L_K^T those of its rows. */
struct coded {
    size_t codes;
    size_t scales;
    size_t rows;
    size_t columns;
};

/* The same of n pages of INT4 factors; q is f32. A page is k[0] (tall) k[1] (wide) and v[0] (tall)
 * v[1] (wide), with their scales. */
typedef void kernel_attend_codes(size_t rows, const float *q, const struct coded k[2],
                                 const struct coded v[2], size_t n, const struct factor_page *pages,
                                 float *m, float *l, float *o, size_t ldo);

/* Kernels for whole pages, and up to how many rows they are the faster ones. */
struct whole_pages {
    size_t rows; /* 0: there are none */
    bool (*fit)(size_t page_tokens, size_t d, size_t rank);
    kernel_attend_dense *attend_dense;
    kernel_attend_factors *attend_factors;
    kernel_attend_codes *attend_codes;
};

/* What computes with matrices of one type. */
struct arithmetic {
    kernel_pack *split; /* both NULL: left operands are f32 */
    kernel_pack *pack;
    kernel_product *score; /* of split rows */
    kernel_chain *score_chain;
    kernel_product *accumulate; /* of packed rows */
    kernel_chain *accumulate_chain;
    kernel_softmax *softmax;
    struct whole_pages whole_pages;
};

struct kernels {
    const char *name;
    size_t panel;
    struct arithmetic arithmetic[3]; /* by pkv_dtype of b */
    kernel_softmax *softmax;         /* leaves f32 */
    kernel_product_codes *product_tall;
    kernel_product_codes *product_wide;
    kernel_merge *merge;
    kernel_to_f32 *to_f32[3];     /* by pkv_dtype of `from` */
    kernel_from_f32 *from_f32[3]; /* by pkv_dtype of `to` */
    kernel_pairs_from_f32 *pairs_from_f32;
    kernel_pairs_to_f32 *pairs_to_f32;
    kernel_pairs_from_columns *pairs_from_columns;
    kernel_pairs_to_columns *pairs_to_columns;
    kernel_transpose *transpose;
};

#endif
