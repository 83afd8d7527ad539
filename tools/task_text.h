/* SPDX-License-Identifier: MIT */
/* The words and sentences that test rows are made of. */
#ifndef PUZZLEKV_TOOLS_TASK_TEXT_H
#define PUZZLEKV_TOOLS_TASK_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include <stdbool.h>

/* A text that grows. */
struct writing {
    char *text; /* terminated; NULL while empty */
    size_t length, capacity;
    bool failed; /* memory ran out, and the text is of no use */
};

void writing_add(struct writing *writing, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* SplitMix64 (Steele, Lea and Flood, 2014): the same numbers everywhere. */
uint64_t random_next(uint64_t *state);

/* 0 .. count - 1. */
size_t random_below(uint64_t *state, size_t count);

/* Both counts are products of twos and threes, so that every odd number that is not a multiple of
 * three steps through all pairs. */
#define TASK_ADJECTIVES 48
#define TASK_NOUNS      192

extern const char *const task_adjectives[TASK_ADJECTIVES];
/* No noun is part of another one. */
extern const char *const task_nouns[TASK_NOUNS];

/* The sentences of one short paragraph. */
#define TASK_REFRAIN 4
extern const char *const task_refrain[TASK_REFRAIN];

/* A sentence of plain prose; there are 663,552. */
void task_prose(struct writing *writing, uint64_t *random);

#endif
