/* SPDX-License-Identifier: MIT */
/* A pool of slot numbers with reference counts. */
#ifndef PUZZLEKV_LIB_SLOTS_H
#define PUZZLEKV_LIB_SLOTS_H

#include "memory.h"

#include <stdbool.h>

/* 64^6 > 2^32 */
#define SLOTS_LEVELS 6

/* Zeroed is a closed pool. */
struct slots {
    uint32_t count;
    uint32_t n_free;
    uint32_t *references; /* [count], 0 where free */
    /* Bit i of level 0: slot i is free. Bit i of level k: word i of level k - 1 is not 0. */
    uint64_t *levels[SLOTS_LEVELS];
    unsigned n_levels;
};

/* `count` free slots, 0 .. count - 1; 0 is allowed. Everything is allocated here. Errors:
 * PKV_ERROR_MEMORY, and then nothing stays allocated. */
pkv_status slots_open(struct slots *slots, struct memory *memory, uint32_t count);

/* Frees the pool; a zeroed one is allowed. */
void slots_close(struct slots *slots, struct memory *memory);

/* The lowest free slot, from now on with one reference: pages that are stored one after the other
 * then lie in ascending order. False when none is free. */
bool slots_acquire(struct slots *slots, uint32_t *slot);

/* One more, one fewer reference to a slot in use; without any it is free. */
void slots_retain(struct slots *slots, uint32_t slot);
void slots_release(struct slots *slots, uint32_t slot);

#endif
