/* SPDX-License-Identifier: MIT */
/* Tokens that are found in text as they are written, before merging. */
#ifndef PUZZLEKV_TOOLS_RUNNER_ADDED_TOKENS_H
#define PUZZLEKV_TOOLS_RUNNER_ADDED_TOKENS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct added_token {
    char *text; /* not empty */
    size_t length;
    int32_t id;
    bool special;
};

/* Sorted by text, so that all tokens with one beginning are neighbours. All zero is an empty set.
 */
struct added_tokens {
    struct added_token *tokens;
    size_t count;
    bool first_bytes[256]; /* with which a token begins */
};

/* To be called once all tokens are there. */
void added_tokens_sort(struct added_tokens *set);

/* Frees the texts too. */
void added_tokens_free(struct added_tokens *set);

/* The longest token of the set that `text` begins with, or NULL. */
const struct added_token *added_tokens_match(const struct added_tokens *set, const char *text,
                                             size_t length);

#endif
