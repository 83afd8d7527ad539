/* SPDX-License-Identifier: MIT */
/*
 * Makes test rows in RULER's format: a prompt of an exact length with something to be found in it.
 *
 * The tasks are RULER's in kind; their wording and their text are this program's own. A row depends
 * on the task, the seed, its index, its length and how tokens are counted, on nothing else: rows 0
 * to 9 are the same whether 10 or 50 are made, on any machine. Random numbers are SplitMix64's.
 */
#ifndef PUZZLEKV_TOOLS_TASK_ROWS_H
#define PUZZLEKV_TOOLS_TASK_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

/*
 * s1                 one number, in a paragraph that is repeated
 * multi-key          one number among as many others as there is room for
 * uuid               one UUID, in prose
 * multi-query        four numbers of four names, in prose
 * multi-value        four numbers of one name, in prose
 * variable-tracking  five names with the same number, each (but the first, which has it) said to
 *                    have that of the one before: four hops; in a paragraph that is repeated
 * common-words       the ten words of a numbered list that occur more often than the others: each
 *                    makes 4 % of it, every other at most a quarter of that
 * frequent-words     the three most frequent made-up words of a text in which the k-th word is
 *                    1 / k^2 as frequent as the first
 */
enum task {
    TASK_S1,
    TASK_MULTI_KEY,
    TASK_UUID,
    TASK_MULTI_QUERY,
    TASK_MULTI_VALUE,
    TASK_VARIABLE_TRACKING,
    TASK_COMMON_WORDS,
    TASK_FREQUENT_WORDS,
    TASKS
};

#define TASK_NAMES                                                                                 \
    "s1, multi-key, uuid, multi-query, multi-value, variable-tracking,\ncommon-words, "            \
    "frequent-words"

/* Fails with an unknown name. */
bool task_parse(const char *what, const char *name, enum task *task, struct error *error);

#define TASK_MOST_OUTPUTS 10

struct task_row {
    char *input;
    char *gen_prefix;                 /* what the answer begins with */
    char *outputs[TASK_MOST_OUTPUTS]; /* what it has to contain */
    size_t output_count;
};

/* Frees what the row holds; accepts one that is all zero. */
void task_row_free(struct task_row *row);

/* How many tokens a row's prompt has. */
struct task_counter {
    bool (*count)(void *opaque, const char *input, const char *gen_prefix, size_t *tokens,
                  struct error *error);
    void *opaque;
};

/* Makes a row of exactly `length` tokens. On failure the row is all zero. */
bool task_row_make(enum task task, uint64_t seed, size_t index, size_t length,
                   const struct task_counter *counter, struct task_row *row, struct error *error);

#endif
