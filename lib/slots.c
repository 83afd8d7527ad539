/* SPDX-License-Identifier: MIT */
/* A pool of slot numbers with reference counts. */
#include "slots.h"

#include <string.h>

#define WORD_BITS 64

pkv_status slots_open(struct slots *slots, struct memory *memory, uint32_t count)
{
    size_t words[SLOTS_LEVELS] = {0};
    size_t total = 0;
    size_t bits = count;

    *slots = (struct slots){.count = count, .n_free = count};
    do {
        words[slots->n_levels] = bits / WORD_BITS + (bits % WORD_BITS != 0 || bits == 0);
        bits = words[slots->n_levels];
        total += bits;
        slots->n_levels++;
    } while (bits > 1);

    slots->references = memory_allocate(memory, count, sizeof *slots->references);
    slots->levels[0] = memory_allocate(memory, total, sizeof *slots->levels[0]);
    if (slots->references == NULL || slots->levels[0] == NULL) {
        slots_close(slots, memory);
        return PKV_ERROR_MEMORY;
    }
    memset(slots->references, 0, count * sizeof *slots->references);
    memset(slots->levels[0], 0, total * sizeof *slots->levels[0]);

    bits = count;
    for (unsigned level = 0; level < slots->n_levels; level++) {
        if (level > 0)
            slots->levels[level] = slots->levels[level - 1] + words[level - 1];
        for (size_t i = 0; i < bits / WORD_BITS; i++)
            slots->levels[level][i] = UINT64_MAX;
        if (bits % WORD_BITS)
            slots->levels[level][bits / WORD_BITS] = (UINT64_C(1) << bits % WORD_BITS) - 1;
        bits = count == 0 ? 0 : words[level];
    }
    return PKV_OK;
}

void slots_close(struct slots *slots, struct memory *memory)
{
    memory_release(memory, slots->levels[0]);
    memory_release(memory, slots->references);
    *slots = (struct slots){0};
}

bool slots_acquire(struct slots *slots, uint32_t *slot)
{
    size_t i = 0;

    if (slots->n_free == 0)
        return false;
    for (unsigned level = slots->n_levels; level-- > 0;)
        i = i * WORD_BITS + (size_t)__builtin_ctzll(slots->levels[level][i]);
    *slot = (uint32_t)i;

    for (unsigned level = 0; level < slots->n_levels; level++) {
        uint64_t *word = &slots->levels[level][i / WORD_BITS];

        *word &= ~(UINT64_C(1) << i % WORD_BITS);
        if (*word != 0)
            break;
        i /= WORD_BITS;
    }
    slots->references[*slot] = 1;
    slots->n_free--;
    return true;
}

void slots_retain(struct slots *slots, uint32_t slot)
{
    slots->references[slot]++;
}

void slots_release(struct slots *slots, uint32_t slot)
{
    size_t i = slot;

    if (--slots->references[slot] > 0)
        return;
    slots->n_free++;
    for (unsigned level = 0; level < slots->n_levels; level++) {
        uint64_t *word = &slots->levels[level][i / WORD_BITS];
        bool was_empty = *word == 0;

        *word |= UINT64_C(1) << i % WORD_BITS;
        if (!was_empty)
            break;
        i /= WORD_BITS;
    }
}
