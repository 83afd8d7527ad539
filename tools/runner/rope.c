/* SPDX-License-Identifier: MIT */
/* Rotary position embedding of one head. */
#include "rope.h"

#include <math.h>

void rope_angles(const struct model *model, size_t position, float *cosine, float *sine)
{
    for (size_t i = 0; i < model->head_dim / 2; i++) {
        double angle = (double)position * model->rope_inverse_frequencies[i];

        cosine[i] = (float)cos(angle) * model->rope_magnitude;
        sine[i] = (float)sin(angle) * model->rope_magnitude;
    }
}

void rope_rotate(const struct model *model, float *head, const float *cosine, const float *sine)
{
    size_t pairs = model->head_dim / 2;

    for (size_t i = 0; i < pairs; i++) {
        float *a = model->rope_interleaved ? &head[2 * i] : &head[i];
        float *b = model->rope_interleaved ? &head[2 * i + 1] : &head[i + pairs];
        float u = *a, w = *b;

        *a = u * cosine[i] - w * sine[i];
        *b = w * cosine[i] + u * sine[i];
    }
}
