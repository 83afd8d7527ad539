/* SPDX-License-Identifier: MIT */
/* Factors of pages by LAPACK and BLAS in single precision, to compare the library's solvers with.
 */
#include "bench_peers.h"

#include <cblas.h>
#include <lapacke.h>
#include <stdlib.h>
#include <string.h>

struct peer {
    enum peer_kind kind;
    lapack_int length;
    float *gram, *values, *work;
    lapack_int *iwork, *support;
    lapack_int work_length, iwork_length;
};

/* With lengths of -1 LAPACK tells how much work space it likes best. BLAS's row-major lower
 * triangle is LAPACK's upper one. */
static lapack_int solve(struct peer *p, lapack_int rank, float *vectors)
{
    lapack_int n = p->length, found;

    if (p->kind == PEER_SSYEVD)
        return LAPACKE_ssyevd_work(LAPACK_COL_MAJOR, 'V', 'U', n, p->gram, n, p->values, p->work,
                                   p->work_length, p->iwork, p->iwork_length);
    return LAPACKE_ssyevr_work(LAPACK_COL_MAJOR, 'V', 'I', 'U', n, p->gram, n, 0, 0, n - rank + 1,
                               n, 0, &found, p->values, vectors, n, p->support, p->work,
                               p->work_length, p->iwork, p->iwork_length);
}

bool peer_open(enum peer_kind kind, size_t length, struct peer **peer, struct error *error)
{
    struct peer *p = calloc(1, sizeof *p);
    float work_length;
    lapack_int iwork_length;

    *peer = NULL;
    if (p == NULL)
        return error_set(error, "out of memory");
    p->kind = kind;
    p->length = (lapack_int)length;
    p->gram = malloc(length * length * sizeof *p->gram);
    p->values = malloc(length * sizeof *p->values);
    p->support = malloc(2 * length * sizeof *p->support);
    p->work_length = p->iwork_length = -1;
    p->work = &work_length;
    p->iwork = &iwork_length;
    if (p->gram == NULL || p->values == NULL || p->support == NULL ||
        solve(p, p->length, p->gram) != 0) {
        p->work = NULL;
        p->iwork = NULL;
        goto fail;
    }
    p->work_length = (lapack_int)work_length;
    p->iwork_length = iwork_length;
    p->work = malloc((size_t)p->work_length * sizeof *p->work);
    p->iwork = malloc((size_t)iwork_length * sizeof *p->iwork);
    if (p->work == NULL || p->iwork == NULL)
        goto fail;
    *peer = p;
    return true;
fail:
    peer_close(p);
    return error_set(error, "out of memory for LAPACK");
}

void peer_close(struct peer *peer)
{
    if (peer == NULL)
        return;
    free(peer->gram);
    free(peer->values);
    free(peer->support);
    free(peer->work);
    free(peer->iwork);
    free(peer);
}

bool peer_factorize(struct peer *p, const float *x, size_t stride, size_t dim, size_t rank,
                    float *left, float *right, struct error *error)
{
    size_t length = (size_t)p->length;
    lapack_int info;

    cblas_ssyrk(CblasRowMajor, CblasLower, CblasNoTrans, p->length, (int)dim, 1, x, (int)stride, 0,
                p->gram, p->length);
    info = solve(p, (lapack_int)rank, left);
    if (info != 0)
        return error_set(error, "LAPACK: the solver failed with code %d", (int)info);
    if (p->kind == PEER_SSYEVD)
        memcpy(left, p->gram + (length - rank) * length, rank * length * sizeof *left);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rank, (int)dim, p->length, 1, left,
                p->length, x, (int)stride, 0, right, (int)dim);
    return true;
}
