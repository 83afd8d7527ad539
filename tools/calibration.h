/* SPDX-License-Identifier: MIT */
/* What policies have to know of a model beforehand: second moments, measured on a text, and the
 * file that they are kept in. */
#ifndef PUZZLEKV_TOOLS_CALIBRATION_H
#define PUZZLEKV_TOOLS_CALIBRATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "error.h"
#include "policies/policy.h"
#include "runner/model.h"

/*
 * A safetensors file, all in F32; means are over the tokens of all sequences:
 *     layers.N.hidden [hidden, hidden]            mean of h h^T, h: the input of the projections
 *     layers.N.k [kv_heads, head_dim, head_dim]   mean of k k^T, k: a head's key after RoPE
 *     layers.N.v [kv_heads, head_dim, head_dim]   mean of v v^T, v: a head's value
 *     fisher.k, fisher.v [layers]                 optional: see tools/fisher.py
 * with metadata `format`, `geometry` (of the model), `sequences`, `length` and `seed`. In a key,
 * elements i and i + head_dim / 2 are a pair of RoPE, whatever the model's own order, so that the
 * GGUF file of a model and its Hugging Face folder can share a calibration.
 */

/* ---- Measuring ------------------------------------------------------------------------------- */

/* A store that keeps nothing but sums up what it is fed; it cannot attend. Fed several sequences,
 * it is rewound to 0 before each. */
bool calibration_probe_open(const struct model *model, size_t max_tokens, unsigned threads,
                            struct kv_store **probe, struct error *error);

/* How the text was fed, for the metadata. */
struct calibration_source {
    size_t sequences, length;
    uint64_t seed;
};

/* Writes the file of a probe that was fed at least one token; `name` is for messages. */
bool calibration_write(const struct kv_store *probe, const struct calibration_source *source,
                       FILE *file, const char *name, struct error *error);

/* ---- Reading --------------------------------------------------------------------------------- */

struct calibration;

/* Fails, with the spec's text, if the key that names the file was not typed. */
bool calibration_check(const struct kv_value *name, const char *text, struct error *error);

/* Opens the file that a key of the policy names. Checks that it is a calibration of a model of this
 * geometry and that its tensors are there. */
bool calibration_open(const struct kv_value *name, const struct model *model,
                      struct calibration **calibration, struct error *error);

/* Accepts NULL. */
void calibration_close(struct calibration *calibration);

/* moment [hidden, hidden] of a layer. Fails if an element is not finite. */
bool calibration_hidden(const struct calibration *calibration, size_t layer, double *moment,
                        struct error *error);

enum calibration_part { CALIBRATION_K, CALIBRATION_V };

/* moment [head_dim, head_dim] of one head, in the model's own order of elements; likewise. */
bool calibration_head(const struct calibration *calibration, enum calibration_part part,
                      size_t layer, size_t kv_head, double *moment, struct error *error);

/* Whether it has Fisher information. */
bool calibration_has_fisher(const struct calibration *calibration);

/* values [layers] of it. Fails if one is not finite, or negative, or if all are 0. */
bool calibration_fisher(const struct calibration *calibration, enum calibration_part part,
                        double *values, struct error *error);

#endif
