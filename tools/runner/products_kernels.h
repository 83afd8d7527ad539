/* SPDX-License-Identifier: MIT */
/* Inner loops of products.c: one table per instruction set. */
#ifndef PUZZLEKV_TOOLS_RUNNER_PRODUCTS_KERNELS_H
#define PUZZLEKV_TOOLS_RUNNER_PRODUCTS_KERNELS_H

#include "quant.h"

/* One row of activations, prepared once for all the weight rows that it meets. */
struct activations {
    const float *x;       /* [columns] */
    const float *sums_16; /* [columns / 16], of 16 elements each */
    const float *sums_32; /* [columns / 32] */
};

/* One row of activations in bytes: element i is scales[i / 32] * codes[i], at most scales[i / 32] /
 * 2 off. A block of 32 with a NaN or an infinity has such a scale. */
struct byte_activations {
    int8_t *codes;  /* [columns], -127 .. 127 */
    float *scales;  /* [columns / 32], the largest magnitude / 127 */
    float *sums_16; /* [columns / 16], of 16 elements in bytes */
    float *sums_32; /* [columns / 32] */
};

/* The product of one weight row and one activation row; columns is a multiple of the type's block.
 * Sums run in a fixed order of lanes and blocks. Thread-safe. */
typedef float products_dot(const void *row, const struct activations *a, size_t columns);
typedef float products_byte_dot(const void *row, const struct byte_activations *a, size_t columns);

/* Activation rows of a tile, and weight rows of a panel. */
#define PRODUCTS_TILE_ROWS  8
#define PRODUCTS_PANEL_ROWS 16

/* Bytes of a row in a tile. */
#define PRODUCTS_ROW_BYTES(columns) ((columns) / 8 * 15)

/* Weight rows, laid out anew so that each is a lane. */
struct products_panels {
    size_t block_bytes; /* of a panel, for each of the type's blocks in a row; 0: there is none */
    /* From `rows` weight rows, 1 .. PRODUCTS_PANEL_ROWS. Thread-safe. */
    void (*pack)(const void *weights, size_t row_bytes, size_t rows, size_t columns,
                 unsigned char *panel);
    /* y[i, j], or what is added to it, is the product of activation row i < rows, which lie in
     * `tiles`, and weight row j < weight_rows. One row alone is a tile of its own; more are in
     * tiles of PRODUCTS_TILE_ROWS. The bits do not depend on which of the two. Thread-safe. */
    void (*multiply)(const unsigned char *panel, size_t weight_rows, size_t columns,
                     const unsigned char *tiles, size_t rows, float *y, size_t y_stride, bool add);
};

struct products_kernels {
    const char *name;
    const char *isa; /* the library's name for it */
    products_dot *dot[QUANT_TYPES];
    quant_dequantise *dequantise[QUANT_TYPES]; /* as that of quant_info, to the bit */
    /* For the packed types, either rows in bytes by themselves: */
    products_byte_dot *byte_dot[QUANT_TYPES];
    void (*round_row)(const float *x, size_t columns, const struct byte_activations *row);
    /* Or panels. The rows of the tile behind `rows` are zeros. */
    struct products_panels panels[QUANT_TYPES];
    void (*round_tile)(const float *x, size_t x_stride, size_t rows, size_t tile_rows,
                       size_t columns, unsigned char *tile);
    void (*swiglu)(float *gate, const float *up,
                   size_t n); /* gate = up * gate / (1 + exp(-gate)) */
};

extern const struct products_kernels products_generic;
extern const struct products_kernels products_avx2;       /* x86-64 builds only */
extern const struct products_kernels products_avx512;     /* x86-64 builds only */
extern const struct products_kernels products_avx512vnni; /* x86-64 builds only */

#endif
