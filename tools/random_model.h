/* SPDX-License-Identifier: MIT */
/* A model with random weights, to time where there is no file. */
#ifndef PUZZLEKV_TOOLS_RANDOM_MODEL_H
#define PUZZLEKV_TOOLS_RANDOM_MODEL_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"
#include "runner/model.h"

/* What the weights of a shape of shapes.h take. */
size_t random_model_bytes(const struct model *shape);

/* Makes a model of the shape: matrices in Q8_0, the data of which is NULL, as for a device to make
 * up. Norms are 1. */
bool random_model_open(const struct model *shape, struct model *model, struct error *error);

/* Gives it the data: uniform, with a standard deviation within a factor of 1.5 of 1 /
 * sqrt(columns), the same on every machine. Fails with "interrupted" after Ctrl-C. */
bool random_model_fill(struct model *model, unsigned threads, struct error *error);

/* Accepts one that is all zero, and what a function that failed left. */
void random_model_close(struct model *model);

#endif
