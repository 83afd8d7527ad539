/* SPDX-License-Identifier: MIT */
/* GGUF files (versions 2 and 3, little-endian), whole or split: metadata and tensors, read in
 * place. */
#ifndef PUZZLEKV_TOOLS_RUNNER_GGUF_H
#define PUZZLEKV_TOOLS_RUNNER_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "file_map.h"
#include "quant.h"

/* An open file: immutable after gguf_open, so every function but gguf_close is thread-safe. */
struct gguf;

/* Bytes inside the mapped file, not terminated; valid until gguf_close. Keys and names are UTF-8,
 * other strings any bytes. */
struct gguf_string {
    const char *data;
    size_t size;
};

/* Whether the string is `text`. */
bool gguf_string_is(struct gguf_string string, const char *text);

#define GGUF_MAX_DIMENSIONS 4

struct gguf_tensor {
    struct gguf_string name;
    uint32_t gguf_type; /* element type number as the file has it */
    bool known;         /* whether it is one of quant.h's; if not, data is NULL and size 0 */
    enum quant_type type;
    size_t dimension_count; /* 1 .. GGUF_MAX_DIMENSIONS */
    /* dimensions[0] is contiguous: a matrix [rows, columns] has dimensions {columns, rows}. Each
     * is at least 1; those past dimension_count are 1. */
    size_t dimensions[GGUF_MAX_DIMENSIONS];
    const void *data; /* aligned to 8 bytes or more; all `size` bytes lie inside the file */
    size_t size;
    const struct file_map *file; /* where it lies */
};

/* Maps the file and checks all of its structure: every length, count, type, name and offset. A file
 * without tensors (vocabulary only) is fine. Tensor contents are not read. On failure *gguf is NULL
 * and the error names the file and the field.
 *
 * Of a split model `path` is the first part, NAME-00001-of-0000N.gguf. The other parts are opened
 * and checked with it, and their tensors join its own; the metadata are the first part's. */
bool gguf_open(const char *path, struct gguf **gguf, struct error *error);

/* Accepts NULL. */
void gguf_close(struct gguf *gguf);

/* As given to gguf_open. */
const char *gguf_path(const struct gguf *gguf);

/* Tells the kernel that all tensors are about to be read. */
void gguf_prefetch(const struct gguf *gguf);

/* Whether the metadata has `key`, of whatever type. */
bool gguf_has(const struct gguf *gguf, const char *key);

/* Each getter fails, with an error that names file, key and both types, if `key` is absent or its
 * value is of another kind. So an optional value is `gguf_has(..) ? gguf_get_..(..) : default`. */

/* Any integer type; 0 or more and below 2^63. */
bool gguf_get_uint(const struct gguf *gguf, const char *key, uint64_t *value, struct error *error);

/* FLOAT32 or FLOAT64, finite. */
bool gguf_get_float(const struct gguf *gguf, const char *key, double *value, struct error *error);

/* BOOL, stored as 0 or 1. */
bool gguf_get_bool(const struct gguf *gguf, const char *key, bool *value, struct error *error);

bool gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *value,
                     struct error *error);

/* Arrays: *values is allocated (never NULL on success, even when *count is 0) and the caller frees
 * it; NULL on failure. The bytes of strings stay in the file. */
bool gguf_get_strings(const struct gguf *gguf, const char *key, struct gguf_string **values,
                      size_t *count, struct error *error);

/* Elements of any integer type that fit int64_t. */
bool gguf_get_ints(const struct gguf *gguf, const char *key, int64_t **values, size_t *count,
                   struct error *error);

/* FLOAT32 elements. */
bool gguf_get_floats(const struct gguf *gguf, const char *key, float **values, size_t *count,
                     struct error *error);

size_t gguf_tensor_count(const struct gguf *gguf);

/* NULL if there is none of that name. The result lives until gguf_close. */
const struct gguf_tensor *gguf_tensor(const struct gguf *gguf, const char *name);

#endif
