/* SPDX-License-Identifier: MIT */
/* A backend that stores one number a token and checks every plan, and an allocator that counts and
 * fails on demand: they test the library without arithmetic. */
#ifndef PUZZLEKV_TESTS_FAKE_BACKEND_H
#define PUZZLEKV_TESTS_FAKE_BACKEND_H

#include "cache.h"

/* ---- Allocator ---- */

struct counting_allocator {
    size_t live;       /* blocks */
    size_t calls;      /* of allocate, since it was last set to 0 */
    size_t fail_at;    /* this call, counted from 1, returns NULL; 0: none does */
    bool fail_forever; /* and so does every later one */
};

pkv_allocator counting_allocator(struct counting_allocator *counting);

/* ---- Backend ---- */

/*
 * f32 storage and inputs alone. All d elements of a row must be the same whole number: that of
 * fake_number(). A factor slot keeps the same numbers, read back as L = (number, 0, ...),
 * R = (1 ... 1; 0 ...), so that L R is exact; as INT4, for which d must be at least P, as codes and
 * scales that hold the token's id, so that digests tell pages apart. Both may be written again.
 *
 * A query reads the tokens that it sees, in order, into a checksum, fake_mix(), which fills its row
 * of `out`; lse is the number of these tokens.
 */
struct backend {
    const struct geometry *geometry;
    struct memory *memory;
    struct message *message;
    size_t dense_slots;
    size_t factor_slots;
    float *dense;  /* [slot, layer, KV head, K and V, P] */
    float *factor; /* the same */
    const struct backend_plan *plan;
    void *scratch[2];

    /* What the submitted steps come to, the oldest first. */
    pkv_status submitted[MAX_SUBMITTED];
    size_t n_submitted;
    bool slow; /* none is done before somebody waits */

    /* What to fail with, and the layer that fails. */
    pkv_status fail_begin;
    pkv_status fail_layer;
    size_t failing_layer;
    pkv_status fail_end;
    pkv_status fail_rebuild;
    pkv_status fail_submitted; /* the next step that is submitted, once it is settled */

    char violation[200]; /* the first breach of the contract in backend.h by the library; "" */
};

extern const struct backend_ops backend_fake;

/* The number of a token's K or V row: unlike that of any other row. id < 2^17. */
float fake_number(size_t id, size_t layer, size_t kv_head, bool value);

/* The id of token `t` in a page, or SIZE_MAX if K or V of any layer or head says otherwise. */
size_t fake_token(const struct backend *backend, struct page page, size_t t);

/* Adds a token's K or V number to a checksum that starts with 0. */
uint32_t fake_mix(uint32_t sum, float number);

#endif
