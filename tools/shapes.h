/* SPDX-License-Identifier: MIT */
/* Shapes of known models, for measurements that need no weights. */
#ifndef PUZZLEKV_TOOLS_SHAPES_H
#define PUZZLEKV_TOOLS_SHAPES_H

#include <stdbool.h>

#include "runner/model.h"

/* For --help and messages. */
#define SHAPE_NAMES "llama-3.1-8b, qwen3-8b, smollm2-135m"

/* Fills `model` with a known model's hyperparameters, without RoPE's scaling and without
 * weights: there is nothing to close. False: there is none of that name. */
bool shape_find(const char *name, struct model *model);

#endif
