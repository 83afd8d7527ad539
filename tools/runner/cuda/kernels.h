/* SPDX-License-Identifier: MIT */
/* The kernels between a transformer's matrix products. Rows are tokens; `dtype` is PKV_F32 or
 * PKV_BF16. They are queued on the stream; runner_check_launch() tells of all before. */
#ifndef PUZZLEKV_TOOLS_RUNNER_CUDA_KERNELS_H
#define PUZZLEKV_TOOLS_RUNNER_CUDA_KERNELS_H

#include "runner.h"

/* x[rows, columns] = rows `tokens` of the table. */
void kernels_embed(cudaStream_t stream, pkv_dtype dtype, const void *table, size_t columns,
                   const int32_t *tokens, size_t rows, float *x);

/* cosine, sine [rows, pairs] of (*position + row) * inverse[pair], times magnitude. */
void kernels_angles(cudaStream_t stream, const uint64_t *position, const float *inverse,
                    float magnitude, size_t pairs, size_t rows, float *cosine, float *sine);

/* out = x / sqrt(mean of x^2 + epsilon) * weight, row by row. */
void kernels_rms_norm(cudaStream_t stream, const float *x, const float *weight, float epsilon,
                      size_t columns, size_t rows, pkv_dtype dtype, void *out);

/* What becomes of the products with W_q, W_k and W_v, in place. */
struct kernels_heads {
    void *data; /* [rows, query_heads + 2 kv_heads, head_dim]: q, k, v */
    pkv_dtype dtype;
    unsigned query_heads, kv_heads, head_dim;
    const float *bias;            /* [query_heads + 2 kv_heads, head_dim] or NULL */
    const float *q_norm, *k_norm; /* [head_dim], both or neither */
    float epsilon;
    bool interleaved;           /* see struct model */
    const float *cosine, *sine; /* [rows, head_dim / 2] */
};

/* Biases, then QK-norm, then RoPE of q and k. */
void kernels_finish_heads(cudaStream_t stream, const struct kernels_heads *heads, size_t rows);

/* out[rows, columns] = up * silu(gate) of gate_up [rows, 2, columns]; rows <= 65,535. */
void kernels_swiglu(cudaStream_t stream, pkv_dtype dtype, const void *gate_up, size_t columns,
                    size_t rows, void *out);

/* *token = the index of the largest logit, the lowest on ties; -1 if one is NaN. */
void kernels_likeliest(cudaStream_t stream, const float *logits, size_t count, int32_t *token);

/* to[count] = from, rounded to nearest even. */
void kernels_convert(cudaStream_t stream, const float *from, size_t count, pkv_dtype dtype,
                     void *to);

/* Elements of a uniform distribution with variance 1 / columns, which `seed` chooses. */
void kernels_make_up(cudaStream_t stream, uint64_t seed, size_t columns, size_t count,
                     pkv_dtype dtype, void *to);

#endif
