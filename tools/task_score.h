/* SPDX-License-Identifier: MIT */
/* How well an answer does: which references it contains, and what a mean over rows is worth. */
#ifndef PUZZLEKV_TOOLS_TASK_SCORE_H
#define PUZZLEKV_TOOLS_TASK_SCORE_H

#include <jansson.h>

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

enum task_metric {
    TASK_METRIC_ALL, /* the share of the references that the answer contains */
    TASK_METRIC_PART /* 1 if it contains any of them, else 0 */
};

/* "all" or "part". */
bool task_metric_parse(const char *text, enum task_metric *metric, struct error *error);
const char *task_metric_name(enum task_metric metric);

/* The references of a row, in lower case. */
struct task_references {
    char **texts; /* [count], none empty */
    size_t count;
};

/* Takes the strings of a row's `outputs`, an array. */
bool task_references_open(const json_t *outputs, struct task_references *references,
                          struct error *error);

/* Accepts one that is all zero. */
void task_references_close(struct task_references *references);

/* 0 .. 1: what the answer [length] contains, whatever the case of letters, which is that of single
 * characters: Unicode's simple mapping. Both are UTF-8. More text never makes it smaller. */
bool task_score(const struct task_references *references, enum task_metric metric,
                const char *answer, size_t length, double *score, struct error *error);

/* Wilson's interval that holds the true mean of scores from 0 to 1 with a probability of 95 %, of
 * which `count` have the mean `mean`. It is made for scores of 0 or 1; others vary less, and so
 * does their mean. */
void task_interval(double mean, size_t count, double *low, double *high);

#endif
