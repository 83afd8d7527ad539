/* SPDX-License-Identifier: MIT */
/*
 * The solver `batched`: factors of several pages at once, in f32, with one page a lane where pages
 * go through the same steps. Every instruction set does the same operations in the same order, so
 * that factors have the same bits everywhere, whichever pages share a batch:
 *
 *     X scaled so that max|x| is in [1, 2) (solver_steps.h)
 *     G = X X^T                one ascending fma chain per element
 *     G = Q T Q^T              Householder reflections, from the last row up
 *     T = Y D Y^T              implicit QL on the diagonals alone; each rotation is logged
 *     L = Q Y                  of the r largest eigenvalues only: the log, last rotation first,
 * then the reflections R = L^T X                one ascending fma chain per element
 *
 * A sum of squares or a scalar product of two columns is in four chains over k mod 4, each from +0
 * in ascending order, then (s0 + s1) + (s2 + s3).
 */
#ifndef PUZZLEKV_CPU_SOLVER_H
#define PUZZLEKV_CPU_SOLVER_H

#include <stddef.h>

/* Most pages of a batch, over all instruction sets. */
#define SOLVER_PAGES 32

/* Rows of L and R^T are padded to a multiple of it. */
#define SOLVER_PANEL 16

static inline size_t solver_padded(size_t n)
{
    return (n + SOLVER_PANEL - 1) / SOLVER_PANEL * SOLVER_PANEL;
}

/* A batch; the memory is the caller's. */
struct solver_batch {
    size_t length;   /* P */
    size_t rank_max; /* of all pages */
    size_t pages;
    size_t groups; /* vectors of pages */

    size_t rank[SOLVER_PAGES];
    int exponent[SOLVER_PAGES];
    size_t sweeps[SOLVER_PAGES]; /* of QL; what the page took */
    size_t capped;               /* pages that were left at the sweep cap */

    float *gram;       /* [groups][P (P + 1) / 2][lanes] lower triangles, then reflections */
    float *inverse;    /* [groups][P][lanes] of the reflections */
    float *diagonal;   /* [P][groups][lanes] */
    float *off;        /* [P][groups][lanes] */
    float *order;      /* [P][groups][lanes]: how many eigenvalues come before this one */
    float *row;        /* [2 P][lanes], or one page's Gram matrix [P][padded] */
    float *log;        /* rotations c and s: [2][groups][lanes] each; first the pages' triangles */
    size_t *log_first; /* [cap]: of a sweep the first rotation's number less its row */
    unsigned short *log_begin; /* [cap][groups][lanes]: rows l .. m of a sweep */
    unsigned short *log_end;
    float *left; /* [pages][P][padded rank_max] */
};

struct solver {
    const char *name;
    size_t lanes;

    /* Bytes of memory of a batch, to be aligned to 64. */
    size_t (*bytes)(size_t length, size_t rank_max, size_t pages);
    void (*begin)(struct solver_batch *batch, size_t length, size_t rank_max, size_t pages,
                  void *memory);
    /* Page 0 .. pages - 1, in any order: its Gram matrix, from X^T [d, P], which is scaled in
     * place; readable SOLVER_PANEL elements past its end. */
    void (*add)(struct solver_batch *batch, size_t page, size_t rank, size_t d, float *transposed);
    /* Once all are added: L [P, rank padded] of every page, at solver_left(). */
    void (*solve)(struct solver_batch *batch);
    /* Then for each page R^T [d, rank padded], from X^T as add left it. */
    void (*project)(const struct solver_batch *batch, size_t page, size_t d,
                    const float *transposed, float *right);
};

static inline float *solver_left(const struct solver_batch *batch, size_t page)
{
    return batch->left + page * batch->length * solver_padded(batch->rank_max);
}

extern const struct solver solver_generic;
extern const struct solver solver_avx2;
extern const struct solver solver_avx512;
extern const struct solver solver_neon;

#endif
