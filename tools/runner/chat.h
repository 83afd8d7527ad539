/* SPDX-License-Identifier: MIT */
/* Chat formats: a conversation as the token ids that the model's own template would give. */
#ifndef PUZZLEKV_TOOLS_RUNNER_CHAT_H
#define PUZZLEKV_TOOLS_RUNNER_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "tokenizer.h"

enum chat_kind {
    CHAT_NONE,    /* the model has no template */
    CHAT_UNKNOWN, /* its template is none of these */
    CHAT_CHATML,  /* <|im_start|>role NEWLINE text <|im_end|> NEWLINE */
    CHAT_LLAMA3   /* <|start_header_id|>role<|end_header_id|> NEWLINE NEWLINE text <|eot_id|> */
};

/* Immutable after chat_open. */
struct chat;

enum chat_role { CHAT_USER, CHAT_ASSISTANT };

struct chat_turn {
    enum chat_role role;
    const char *text;
    size_t length;
};

/* Recognises the format by the text of the tokenizer's chat template, and takes from there what
 * differs between models of one format: the default system prompt, a BOS, the beginning of an
 * answer, Llama-3.1's block of dates. Fails on memory only: see chat_kind for the outcome.
 * `date` is the day that Llama-3.1 and its successors are told ("26 Jul 2024"); NULL is the
 * constant of their templates, so that one command gives one prompt on any day. `tokenizer` must
 * outlive the chat. */
bool chat_open(const struct tokenizer *tokenizer, const char *date, struct chat **chat,
               struct error *error);

/* Accepts NULL. */
void chat_close(struct chat *chat);

enum chat_kind chat_kind(const struct chat *chat);

/* Appends the ids of the conversation, for CHAT_CHATML and CHAT_LLAMA3 only (else an error).
 * `system` NULL: the model's default system prompt, if it has one. Special tokens are put in as
 * ids; they are never parsed out of the texts. `answer`: the ids end where the model's answer
 * begins. On failure `list` is as before. */
bool chat_format(const struct chat *chat, const char *system, const struct chat_turn *turns,
                 size_t turn_count, bool answer, struct token_list *list, struct error *error);

/* The id that closes a turn, or TOKEN_NONE if the format is not known. A model may also stop at
 * others: see tokenizer_is_end. */
int32_t chat_end_of_turn(const struct chat *chat);

#endif
