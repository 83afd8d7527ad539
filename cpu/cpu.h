/* SPDX-License-Identifier: MIT */
/* What the files of the CPU backend share. */
#ifndef PUZZLEKV_CPU_CPU_H
#define PUZZLEKV_CPU_CPU_H

#include "backend.h"
#include "kernels.h"
#include "numeric.h"
#include "solver.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* New tokens, counted from an item's first, whose K and V lie together in a step's scratch and
 * whose queries are attended together. */
#define BLOCK_TOKENS 32

/* Largest d of puzzlekv.h, and P. */
#define MAX_HEAD_DIM    1024
#define MAX_PAGE_TOKENS 256

/* One query block of one item. */
struct attention_unit {
    const struct backend_item *item;
    size_t block;       /* tokens block * BLOCK_TOKENS and on, of the item's new ones */
    size_t tokens;      /* 1 .. BLOCK_TOKENS */
    size_t runs;        /* fixed runs of pages and blocks that it attends */
    size_t first_state; /* split steps: its first state, counted in states of one KV head */
};

/* One page that a step stores. */
struct page_job {
    const struct backend_item *item;
    const struct page_change *change;
};

/* Offsets in floats into a thread's scratch; see attention.c. */
struct attention_layout {
    size_t q, q_left, scores, inner, wide, scale, valid; /* one page or block */
    size_t run, merged;                                  /* states: m, l, o */
    size_t floats;
};

/* The open step. Scratch belongs to it; all of it is allocated by begin. */
struct cpu_step {
    struct backend_plan plan;
    unsigned threads;

    /* The step's K and V of one layer, rounded: [kv_head][rows * d]; see store.h. */
    unsigned char *new_k;
    unsigned char *new_v;

    struct page_job *jobs; /* those that end dense, then those that are factorized */
    size_t n_dense;
    size_t n_factor;

    struct attention_unit *units;
    size_t n_units;
    struct attention_layout layout;
    float *states;       /* where runs are spread over threads, else NULL */
    size_t n_states;     /* of one KV head */
    size_t state_floats; /* of one */
    double multiplies;   /* of one layer's attention, about */

    size_t factorize_layers; /* whose problems are solved at once, at the first one's turn */
    size_t chunk;  /* problems that are factorized together, by one thread unless with LAPACK */
    double *gram;  /* LAPACK: [chunk][P, P], then eigenvectors */
    double *eigen; /* [chunk][P] */
    double *work;  /* LAPACK's; iwork of lapack_int */
    void *iwork;
    unsigned char *overflow; /* [of these layers]: the factors do not fit the storage type */
    double factorize_seconds;
    uint64_t capped_pages;

    /* [threads][scratch_bytes] for attention, [factorize_threads][factorize_bytes] for factorizing
     */
    unsigned char *scratch;
    size_t scratch_bytes;
    unsigned factorize_threads;
    size_t factorize_bytes;
};

struct codec; /* codec.h */

/* Where the factor pages of a layer lie, in bytes. */
struct factor_layout {
    size_t offset; /* of its first, from `factor` of the backend */
    size_t page;   /* from one to the next */
    size_t k;      /* of K, behind which V lies */
};

struct backend {
    const struct geometry *geometry;
    struct memory *memory;
    struct message *message;
    const struct kernels *kernels;
    const struct solver *solver;
    const struct codec *codec_k; /* NULL without factors */
    const struct codec *codec_v;
    unsigned threads; /* as configured */

    /* Pools in the order layer, KV head, slot; see store.h. */
    size_t dense_slots;
    size_t factor_slots;
    unsigned char *dense;
    unsigned char *factor;
    size_t reserved_bytes;
    struct factor_layout *factors; /* [layers] */

    struct cpu_step step;
};

/* Threads of the calling thread's next parallel region. */
static inline unsigned cpu_threads(unsigned configured)
{
#ifdef _OPENMP
    return configured ? configured : (unsigned)omp_get_max_threads();
#else
    (void)configured;
    return 1;
#endif
}

static inline unsigned cpu_thread(void)
{
#ifdef _OPENMP
    return (unsigned)omp_get_thread_num();
#else
    return 0;
#endif
}

static inline size_t cpu_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t cpu_max(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Tokens of block `block` of an item's new ones. */
static inline size_t cpu_block_tokens(const struct backend_item *item, size_t block)
{
    return cpu_min(BLOCK_TOKENS, item->new_tokens - block * BLOCK_TOKENS);
}

/* Query heads that read one KV head. */
static inline size_t cpu_group(const struct geometry *geometry)
{
    return geometry->query_heads / geometry->kv_heads;
}

#endif
