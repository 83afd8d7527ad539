/* SPDX-License-Identifier: MIT */
/* Shapes of known models, for measurements that need no weights. */
#ifndef PUZZLEKV_TOOLS_SHAPES_H
#define PUZZLEKV_TOOLS_SHAPES_H

#include <puzzlekv.h>

#include <stddef.h>

struct shape {
    const char *name;
    size_t layers, query_heads, kv_heads, head_dim;
};

/* For --help and messages. */
#define SHAPE_NAMES "llama-3.1-8b, qwen3-8b, smollm2-135m"

/* NULL: there is none of that name. */
const struct shape *shape_find(const char *name);

/* Sets the fields of `config` that the shape decides: layers, heads, head_dim. */
void shape_describe(const struct shape *shape, pkv_config *config);

#endif
