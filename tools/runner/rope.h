/* SPDX-License-Identifier: MIT */
/* Rotary position embedding of one head. */
#ifndef PUZZLEKV_TOOLS_RUNNER_ROPE_H
#define PUZZLEKV_TOOLS_RUNNER_ROPE_H

#include <stddef.h>

#include "model.h"

/* Cosines and sines [head_dim / 2] of a position, times the model's rope_magnitude. */
void rope_angles(const struct model *model, size_t position, float *cosine, float *sine);

/* Turns a head [head_dim] in place by such angles. */
void rope_rotate(const struct model *model, float *head, const float *cosine, const float *sine);

#endif
