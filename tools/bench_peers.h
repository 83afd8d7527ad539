/* SPDX-License-Identifier: MIT */
/* Factors of pages by LAPACK and BLAS in single precision, to compare the library's solvers with.
 */
#ifndef PUZZLEKV_TOOLS_BENCH_PEERS_H
#define PUZZLEKV_TOOLS_BENCH_PEERS_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

enum peer_kind {
    PEER_SSYEVD, /* divide and conquer: all eigenvectors */
    PEER_SSYEVR  /* relatively robust representations: those wanted */
};

/* One thread at a time. */
struct peer;

/* For pages of `length` tokens. */
bool peer_open(enum peer_kind kind, size_t length, struct peer **peer, struct error *error);

/* Accepts NULL. */
void peer_close(struct peer *peer);

/*
 * x [length, dim], whose rows lie `stride` apart: left [rank, length] are the eigenvectors of
 * G = X X^T for its largest eigenvalues, ascending, and right [rank, dim] = left X. Gram matrix and
 * projection are BLAS's; what the library does beyond it (rounding, order, signs) is left out.
 */
bool peer_factorize(struct peer *peer, const float *x, size_t stride, size_t dim, size_t rank,
                    float *left, float *right, struct error *error);

#endif
