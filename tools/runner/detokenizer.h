/* SPDX-License-Identifier: MIT */
/* Token ids to text as they come. */
#ifndef PUZZLEKV_TOOLS_RUNNER_DETOKENIZER_H
#define PUZZLEKV_TOOLS_RUNNER_DETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "tokenizer.h"

/* Only whole UTF-8 sequences are given out; what can never become one is given out as U+FFFD, so
 * that the pieces joined are what decoding all ids at once gives. Where the tokenizer puts a space
 * before a text, a space that the ids begin with is left out. */
struct detokenizer {
    const struct tokenizer *tokenizer;
    bool show_special;
    bool drop_space; /* the next byte, if it is a space */
    char pending[4]; /* the beginning of a sequence */
    size_t pending_length;
    char *bytes, *text; /* room for the longest token */
};

/* `tokenizer` must outlive the detokenizer. If not `show_special`, special tokens give no text. */
bool detokenizer_open(struct detokenizer *detokenizer, const struct tokenizer *tokenizer,
                      bool show_special, struct error *error);

/* Accepts one that is all zero. */
void detokenizer_close(struct detokenizer *detokenizer);

/* To be called before the first id: the ids go on from a text, so a space belongs to them. */
void detokenizer_continue(struct detokenizer *detokenizer);

/* The text that `id` completes, terminated, valid until the next call; *length may be NULL. */
const char *detokenizer_push(struct detokenizer *detokenizer, int32_t id, size_t *length);

/* The end: what is pending becomes U+FFFD. The detokenizer may then be used anew. */
const char *detokenizer_flush(struct detokenizer *detokenizer, size_t *length);

#endif
