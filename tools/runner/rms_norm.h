/* SPDX-License-Identifier: MIT */
/* Root mean square normalisation of one row. */
#ifndef PUZZLEKV_TOOLS_RUNNER_RMS_NORM_H
#define PUZZLEKV_TOOLS_RUNNER_RMS_NORM_H

#include <math.h>
#include <stddef.h>

/* out[n] = x / sqrt(mean of x^2 + epsilon) * weight; `out` may be x. The sum runs in 16 lanes, so
 * that it vectorises without being reordered. */
static inline void rms_norm(const float *x, const float *weight, size_t n, float epsilon,
                            float *out)
{
    float lanes[16] = {0}, sum = 0;
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        for (size_t lane = 0; lane < 16; lane++)
            lanes[lane] += x[i + lane] * x[i + lane];
    }
    for (; i < n; i++)
        sum += x[i] * x[i];
    for (size_t lane = 0; lane < 16; lane++)
        sum += lanes[lane];

    float scale = 1 / sqrtf(sum / (float)n + epsilon);

    for (i = 0; i < n; i++)
        out[i] = x[i] * scale * weight[i];
}

#endif
