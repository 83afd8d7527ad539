/* SPDX-License-Identifier: MIT */
/* Chooses the next token from logits. */
#ifndef PUZZLEKV_TOOLS_RUNNER_SAMPLER_H
#define PUZZLEKV_TOOLS_RUNNER_SAMPLER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"

struct sampler_options {
    float temperature;    /* 0: the largest logit, lowest id on ties; the rest is then unused */
    size_t top_k;         /* 0: off */
    float top_p;          /* (0, 1]; 1: off */
    float min_p;          /* [0, 1); 0: off: drops tokens below min_p times the likeliest's share */
    float repeat_penalty; /* > 0; 1: off: divides positive and multiplies negative logits of the */
    size_t repeat_last;   /* last this many tokens; applies to temperature 0 too */
    uint64_t seed;
};

/* One thread at a time. The same options, logits and history give the same tokens everywhere. */
struct sampler;

bool sampler_open(const struct sampler_options *options, size_t vocabulary,
                  struct sampler **sampler, struct error *error);

/* Accepts NULL. */
void sampler_close(struct sampler *sampler);

/* Takes logits[vocabulary] (unchanged) and the tokens so far, prompt included. Order: penalty,
 * temperature, top-k, top-p, min-p. Fails, naming the token, if a logit is NaN. */
bool sampler_choose(struct sampler *sampler, const float *logits, const int32_t *history,
                    size_t history_count, int32_t *token, struct error *error);

#endif
