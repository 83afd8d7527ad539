/* SPDX-License-Identifier: MIT */
/* Safetensors files: tensors by name, read in place. */
#ifndef PUZZLEKV_TOOLS_RUNNER_SAFETENSORS_H
#define PUZZLEKV_TOOLS_RUNNER_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"
#include "file_map.h"
#include "quant.h"

/* An open file: immutable after safetensors_open, so lookups are thread-safe. */
struct safetensors;

#define SAFETENSORS_MAX_DIMENSIONS 4

struct safetensors_tensor {
    const char *name;
    const char *dtype; /* as the file has it, e.g. "BF16" */
    bool known;        /* whether it is F32, F16 or BF16; if not, data is NULL */
    enum quant_type type;
    size_t dimension_count; /* 0 .. SAFETENSORS_MAX_DIMENSIONS */
    /* Row-major, outermost first: a matrix has {rows, columns}. Those past the count are 1. */
    size_t dimensions[SAFETENSORS_MAX_DIMENSIONS];
    const void *data; /* aligned to its element; all elements lie inside the file */
};

/* Maps the file and checks its whole header: every type, shape and offset. Tensor contents are not
 * read. On failure *file is NULL and the error names the path and the tensor. */
bool safetensors_open(const char *path, struct safetensors **file, struct error *error);

/* Accepts NULL. */
void safetensors_close(struct safetensors *file);

/* The mapped file, for its path, size and prefetching. */
const struct file_map *safetensors_file(const struct safetensors *file);

size_t safetensors_count(const struct safetensors *file);

/* NULL if there is none of that name. The result lives until safetensors_close. */
const struct safetensors_tensor *safetensors_tensor(const struct safetensors *file,
                                                    const char *name);

#endif
