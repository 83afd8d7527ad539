/* SPDX-License-Identifier: MIT */
/* Generates answers: feeds tokens to a model, chooses the next ones and turns them into text. */
#ifndef PUZZLEKV_TOOLS_GENERATE_H
#define PUZZLEKV_TOOLS_GENERATE_H

#include <stdbool.h>
#include <stddef.h>

#include "answer.h"
#include "error.h"
#include "policies/policy.h"
#include "runner/detokenizer.h"
#include "runner/model.h"
#include "runner/sampler.h"
#include "runner/tokenizer.h"
#include "runner/transformer.h"

enum finish {
    FINISH_NOT,
    FINISH_END,  /* the last token is one with which the model ends its answer */
    FINISH_STOP, /* at a stop text */
    FINISH_LENGTH,
    FINISH_FULL,
    FINISH_INTERRUPTED
};

/* How one answer came about. */
struct generation {
    size_t prompt_tokens;    /* fed in the first step */
    size_t generated_tokens; /* the last of them is not fed */
    enum finish finish;
    /* Moments: the tokens are there, they are in the cache, the first and the last token are
     * chosen. 0: never came. */
    double began, prefilled, first, last;
};

struct generator_options {
    const struct model *model;
    const struct tokenizer *tokenizer;
    struct kv_spec spec; /* resolved for the model */
    struct kv_store_options cache;
    struct sampler_options sampling;
    struct device *device; /* see struct transformer_options, as `exact` */
    bool exact;
    bool continues;       /* an answer goes on from the text before it */
    struct answer answer; /* empty */
};

/* One sequence and what continues it. All zero is a closed one; one that is open stays where it is
 * in memory. */
struct generator {
    struct generator_options options;
    size_t context; /* tokens that the cache has room for */
    struct kv_store *store;
    struct transformer *transformer;
    struct sampler *sampler;
    struct detokenizer detokenizer;
    float *logits;

    /* Those in the cache, which come first, and those to be fed: the caller appends them. */
    struct token_list tokens;
    struct answer answer; /* the last one */
    struct generation generation;
};

/* The model and the tokenizer outlive the generator. On failure it is closed as well. */
bool generator_open(struct generator *generator, const struct generator_options *options,
                    struct error *error);

void generator_close(struct generator *generator);

/* Feeds the tokens that are not in the cache, of which there is at least one and for which there is
 * room, in one step, then chooses and feeds tokens until there is a reason to end; at most `most`.
 * The answer, streamed to standard output, and generation say what came of it. An interruption is
 * no failure. */
bool generator_answer(struct generator *generator, size_t most, struct error *error);

/* Makes the cache forget what comes after the first `tokens` tokens. What it cannot keep without
 * changing it is forgotten too, and those tokens will be fed again. */
bool generator_rewind(struct generator *generator, size_t tokens, struct error *error);

/* Forgets everything: what comes then is what would come from a new generator. */
bool generator_restart(struct generator *generator, struct error *error);

#endif
