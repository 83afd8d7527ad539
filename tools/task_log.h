/* SPDX-License-Identifier: MIT */
/* The file of predictions that `puzzlekv-eval tasks` writes row by row, and continues. */
#ifndef PUZZLEKV_TOOLS_TASK_LOG_H
#define PUZZLEKV_TOOLS_TASK_LOG_H

#include <jansson.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "error.h"
#include "jsonl.h"

/* JSON Lines: the settings, then one object a row. Each line is written as soon as it is there, so
 * that an interrupted run can be continued; a line that was cut off is written anew. */
struct task_log {
    const char *path;
    FILE *file; /* where rows are written to */
    /* The rows of the run that is continued; not open after the last. */
    struct jsonl earlier;
    bool reading;
};

/* Opens `path`, which outlives the log. Without `resume` it must not hold anything. With it, what
 * is there must have been made with equal settings; an empty or absent file is begun. The settings
 * are an object with "puzzlekv": "tasks". On failure nothing is left open. */
bool task_log_open(const char *path, bool resume, json_t *settings, struct task_log *log,
                   struct error *error);

/* Accepts one that is all zero. */
void task_log_close(struct task_log *log);

/* The object of row `row` (counted from 0, asked for in order) if the earlier run wrote it, valid
 * until the next call, and a row of `earlier`; else NULL, and so from then on. */
bool task_log_read(struct task_log *log, size_t row, const json_t **object, struct error *error);

/* Writes a row's object, once task_log_read() has given NULL. */
bool task_log_write(struct task_log *log, const json_t *object, struct error *error);

#endif
