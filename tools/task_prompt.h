/* SPDX-License-Identifier: MIT */
/* A test row's prompt as the token ids that a model is fed. */
#ifndef PUZZLEKV_TOOLS_TASK_PROMPT_H
#define PUZZLEKV_TOOLS_TASK_PROMPT_H

#include <stdbool.h>

#include "error.h"
#include "runner/chat.h"
#include "runner/token_list.h"
#include "runner/tokenizer.h"

struct task_prompter {
    const struct tokenizer *tokenizer;
    struct chat *chat; /* NULL: raw prompts */
};

/* With `chat` the model, called `name` in messages, must have a chat template that is known. The
 * tokenizer outlives the prompter. On failure nothing is left open. */
bool task_prompter_open(const struct tokenizer *tokenizer, const char *name, bool chat,
                        struct task_prompter *prompter, struct error *error);

/* Accepts one that is all zero. */
void task_prompter_close(struct task_prompter *prompter);

/*
 * Appends a row's ids. Raw: a BOS where the model asks for one, then the input, one space and the
 * prefix (NULL or empty: the input alone) as one text, in which special tokens are parsed. Chat:
 * the input as the user's message, and the prefix as what the answer begins with; nothing is
 * parsed.
 */
bool task_prompter_encode(const struct task_prompter *prompter, const char *input,
                          const char *gen_prefix, struct token_list *list, struct error *error);

#endif
