/* SPDX-License-Identifier: MIT */
/* Counted allocation through the caller's allocator. */
#ifndef PUZZLEKV_LIB_MEMORY_H
#define PUZZLEKV_LIB_MEMORY_H

#include "puzzlekv.h"

/* Not shared between threads; never used inside a parallel region. */
struct memory {
    pkv_allocator allocator; /* both functions set */
    size_t bytes;            /* allocated now, as asked for */
    size_t peak_bytes;       /* most since the owner last lowered it */
};

/* Takes over `allocator`, or malloc and free where it is all zero. */
void memory_init(struct memory *memory, const pkv_allocator *allocator);

/* `count` elements of `size` bytes, 64-byte aligned, uninitialised. NULL when the product wraps or
 * the allocator fails; a product of 0 counts as 1 byte. */
void *memory_allocate(struct memory *memory, size_t count, size_t size);

/* Gives back what memory_allocate returned; NULL is allowed. */
void memory_release(struct memory *memory, void *pointer);

/* Counts `bytes` that come from elsewhere, a device's memory for instance, and no longer do. */
void memory_hold(struct memory *memory, size_t bytes);
void memory_drop(struct memory *memory, size_t bytes);

#endif
