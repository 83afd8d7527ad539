/* SPDX-License-Identifier: MIT */
/* Counted allocation through the caller's allocator. */
#include "memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define ALIGNMENT 64

/* Lies directly before what memory_allocate returns. */
struct header {
    void *block; /* as the allocator returned it */
    size_t bytes;
};

/* Large blocks lie on huge pages where the system offers them: walks through pools would spend
 * half their time on address translation. */
#define HUGE_PAGE_BYTES ((size_t)2 << 20)

static void *default_allocate(void *opaque, size_t bytes)
{
    void *block = NULL;

    (void)opaque;
    if (bytes < 2 * HUGE_PAGE_BYTES || posix_memalign(&block, HUGE_PAGE_BYTES, bytes) != 0)
        return malloc(bytes);
#ifdef MADV_HUGEPAGE
    madvise(block, bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE);
#endif
    return block;
}

static void default_release(void *opaque, void *pointer)
{
    (void)opaque;
    free(pointer);
}

void memory_init(struct memory *memory, const pkv_allocator *allocator)
{
    *memory = (struct memory){.allocator = *allocator};
    if (allocator->allocate == NULL)
        memory->allocator = (pkv_allocator){default_allocate, default_release, NULL};
}

void memory_hold(struct memory *memory, size_t bytes)
{
    memory->bytes += bytes;
    if (memory->peak_bytes < memory->bytes)
        memory->peak_bytes = memory->bytes;
}

void memory_drop(struct memory *memory, size_t bytes)
{
    memory->bytes -= bytes;
}

void *memory_allocate(struct memory *memory, size_t count, size_t size)
{
    size_t bytes, total, held;

    if (__builtin_mul_overflow(count, size, &bytes))
        return NULL;
    if (bytes == 0)
        bytes = 1;
    if (__builtin_add_overflow(bytes, sizeof(struct header) + ALIGNMENT - 1, &total) ||
        __builtin_add_overflow(memory->bytes, bytes, &held))
        return NULL;

    void *block = memory->allocator.allocate(memory->allocator.opaque, total);

    if (block == NULL)
        return NULL;

    uintptr_t address = (uintptr_t)block + sizeof(struct header);
    size_t padding = (size_t)(-address % ALIGNMENT);
    char *pointer = (char *)block + sizeof(struct header) + padding;
    struct header *header = (struct header *)(void *)pointer - 1;

    header->block = block;
    header->bytes = bytes;
    memory_hold(memory, bytes);
    return pointer;
}

void memory_release(struct memory *memory, void *pointer)
{
    if (pointer == NULL)
        return;

    struct header *header = (struct header *)pointer - 1;

    memory_drop(memory, header->bytes);
    memory->allocator.release(memory->allocator.opaque, header->block);
}
