/* SPDX-License-Identifier: MIT */
/*
 * Page codecs: how K, and how V, of a factorized page is stored. A codec knows all that there is to
 * know of its form, for one page of one KV head: its bytes, how factors are put into it, how it is
 * attended and how it is read back. Nothing else looks into it. P tokens a page, d elements a head,
 * r the layer's rank of K or V:
 *
 *     K   R_K^T [d, r], then L_K^T [r, P]
 *     V   L_V [P, r], then R_V [r, d]
 *
 * so that each factor of Eq. 4 is the right operand of a product over its rows. Every part is
 * aligned to float and readable KERNELS_PAD floats past its end.
 */
#ifndef PUZZLEKV_CPU_CODEC_H
#define PUZZLEKV_CPU_CODEC_H

#include "cpu.h"

/* A thread's queries, and room for what a page makes of them. Rows of all but q are padded. */
struct codec_queries {
    const struct backend *backend;
    const struct arithmetic *arithmetic; /* of the storage type */
    size_t rows;
    float *q;      /* [rows, d], scaled */
    float *q_left; /* the same as left operands of `arithmetic` */
    float *scores; /* [rows, score_stride] */
    float *inner;  /* [rows, inner_stride]: q R_K^T, then exp(s) L_V */
    float *wide;   /* [rows, output_stride] */
    size_t score_stride;
    size_t inner_stride;
    size_t output_stride;
};

struct codec {
    size_t (*bytes)(const struct geometry *geometry, bool is_key, size_t rank);

    /* Stores L [P, r] and R^T [d, r], padded rows of ld elements, both of which it may overwrite.
     * False where something overflows: `overflow` says what. */
    bool (*put)(const struct backend *backend, bool is_key, size_t rank, float *left, float *right,
                size_t ld, unsigned char *page);
    const char *overflow;

    /* Whether it accumulates by left operands of the storage type's arithmetic, not by f32. */
    bool left_operands;

    /* scores = (q R_K^T) L_K^T */
    void (*score)(const struct codec_queries *queries, size_t rank, const unsigned char *page);
    /* o = (scale ? scale o : 0) + (scores L_V) R_V, one scale a row; may overwrite the scores */
    void (*accumulate)(const struct codec_queries *queries, size_t rank, const unsigned char *page,
                       const float *scale, float *o);

    /* n whole pages of K and V of this codec, one after the other, into states, where the
     * whole-page kernels fit; KERNELS_AHEAD more pages follow that may be fetched; see kernels.h.
     */
    void (*attend)(const struct codec_queries *queries, size_t rank_k, size_t rank_v, size_t n,
                   const struct factor_page *pages, float *m, float *l, float *o);

    /* Row i of a part in f32, as the parts are laid out above. */
    void (*row)(const struct backend *backend, enum page_part part, size_t rank,
                const unsigned char *page, size_t i, float *out);
    /* A part as struct backend_ops has it. */
    void (*read)(const struct backend *backend, enum page_part part, size_t rank,
                 const unsigned char *page, void *out);
    void (*write)(const struct backend *backend, enum page_part part, size_t rank, const void *in,
                  unsigned char *page);
};

/* In the storage type. */
extern const struct codec codec_native;
extern const struct codec codec_int4;

#endif
