/* SPDX-License-Identifier: MIT */
/*
 * Walks over open, step, abort, fork, truncate, close, save and load. A naive model keeps, for
 * every sequence, the list of its tokens and of its pages; a page is an object with an identity,
 * which two sequences share or do not. After every operation everything that the library says is
 * compared with it, and so is everything that lies in the slots.
 */
#ifndef PUZZLEKV_TESTS_WALK_H
#define PUZZLEKV_TESTS_WALK_H

#include <stddef.h>
#include <stdint.h>

/* Who walks. */
struct walk_host {
    uint32_t (*below)(void *opaque, uint32_t limit); /* any number 0 .. limit - 1 */
    /* The library is not as the model is. Does not return. */
    void (*fail)(void *opaque, const char *file, int line, const char *what);
    void *opaque;
};

/* How often what happened. */
struct walk_counts {
    uint64_t factorized; /* pages, by committed steps */
    size_t committed, aborted, refused, forks, cuts, rebuilt, copied, saved, loaded, damaged,
        starved, late;
};

struct walk;

/* Opens a cache of any settings, on the fake backend or on the CPU. The host stays where it is. */
struct walk *walk_open(const struct walk_host *host);

/* One operation, and the comparison. */
void walk_on(struct walk *walk);

/* Adds what happened to the counts. */
void walk_close(struct walk *walk, struct walk_counts *counts);

#endif
