/* SPDX-License-Identifier: MIT */
/* Reads JSON Lines: one object a line, one line at a time. */
#ifndef PUZZLEKV_TOOLS_JSONL_H
#define PUZZLEKV_TOOLS_JSONL_H

#include <jansson.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "error.h"

/* The longest line; more than the text of any model's context. */
#define JSONL_MAX_LINE ((size_t)16 << 20)

/* Memory follows the longest line so far, not the file. */
struct jsonl {
    const char *path;
    FILE *file;
    size_t line; /* of the row that jsonl_next gave last; the first is 1 */
    json_t *row; /* valid until the next call */
    /* That line without its newline, valid until the next call, and where in the file it and the
     * next line begin. */
    const char *text;
    size_t length;
    uint64_t offset, next_offset;
    bool whole; /* false: the file ends before a newline does */

    char *buffer;
    size_t begin, end, capacity; /* what is read and not yet given out: buffer[begin .. end - 1] */
};

/* Opens a regular file; `path` lasts as long as the reader. On failure nothing is left open. */
bool jsonl_open(const char *path, struct jsonl *jsonl, struct error *error);

/* Accepts one that is all zero. */
void jsonl_close(struct jsonl *jsonl);

/* Reads the next row; lines of white space alone are none. *found tells whether there was one. The
 * error names file and line: one that is too long, has a byte of value 0, is not UTF-8, is not
 * JSON or not an object, has a key twice or is mostly brackets. */
bool jsonl_next(struct jsonl *jsonl, bool *found, struct error *error);

/* "FILE: line N: " and the text; returns false. */
bool jsonl_error(const struct jsonl *jsonl, struct error *error, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Members of the row, or of an object in it; the error names the line, the key and what is
 * expected. A string has no byte of value 0. An optional one that is not there is NULL. */
bool jsonl_string(const struct jsonl *jsonl, const json_t *object, const char *key, bool optional,
                  const char **string, struct error *error);
bool jsonl_integer(const struct jsonl *jsonl, const json_t *object, const char *key,
                   int64_t *integer, struct error *error);
bool jsonl_number(const struct jsonl *jsonl, const json_t *object, const char *key, double *number,
                  struct error *error);
bool jsonl_array(const struct jsonl *jsonl, const json_t *object, const char *key,
                 const json_t **array, struct error *error);

#endif
