/* SPDX-License-Identifier: MIT */
/* Safetensors files, alone or several with an index: tensors by name, read in place. */
#ifndef PUZZLEKV_TOOLS_RUNNER_SAFETENSORS_H
#define PUZZLEKV_TOOLS_RUNNER_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"
#include "file_map.h"
#include "quant.h"

/* Open files: immutable, so lookups are thread-safe. */
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
    const void *data; /* all elements lie inside the file; aligned to them if `aligned` */
    bool aligned;     /* false in files of older writers, which did not pad their headers */
    const struct file_map *file; /* where it lies */
};

/* Maps the file and checks its whole header: every type, shape and offset. Tensor contents are not
 * read. On failure *file is NULL and the error names the path and the tensor. */
bool safetensors_open(const char *path, struct safetensors **file, struct error *error);

/* The same for all files that an index (model.safetensors.index.json) names; they lie beside it.
 * Each tensor that it lists must be in the file that it says; others do not count. */
bool safetensors_open_index(const char *path, struct safetensors **files, struct error *error);

/* Accepts NULL. */
void safetensors_close(struct safetensors *file);

/* As given to the function that opened it. */
const char *safetensors_path(const struct safetensors *file);

/* Tells the kernel that all tensors are about to be read. */
void safetensors_prefetch(const struct safetensors *file);

size_t safetensors_count(const struct safetensors *file);

/* An entry of the metadata of one file; NULL if there is none. It lives until safetensors_close. */
const char *safetensors_metadata(const struct safetensors *file, const char *key);

/* NULL if there is none of that name. The result lives until safetensors_close. */
const struct safetensors_tensor *safetensors_tensor(const struct safetensors *file,
                                                    const char *name);

#endif
