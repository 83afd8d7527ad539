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
    CHAT_LLAMA3,  /* <|start_header_id|>role<|end_header_id|> NEWLINE NEWLINE text <|eot_id|> */
    CHAT_LLAMA2,  /* <s>[INST] <<SYS>> NEWLINE system NEWLINE <</SYS>> text [/INST] answer </s> */
    CHAT_MISTRAL  /* the same without <<SYS>>, in the spellings of several generations */
};

/* For error texts. */
#define CHAT_NAMES "ChatML, Llama-3, Llama-2, Mistral"

/* Immutable after chat_open. */
struct chat;

enum chat_role { CHAT_USER, CHAT_ASSISTANT };

struct chat_turn {
    enum chat_role role;
    const char *text;
    size_t length;
};

/* Recognises the format by the text of the tokenizer's chat template, and takes from there what
 * differs between models of one format: the default system prompt or the place of one, a BOS, the
 * beginning of an answer, Qwen3's thoughts, Llama-3.1's block of dates, spaces around [INST]. Fails
 * on memory only: see chat_kind for the outcome. `date` is the day that Llama-3.1 and its
 * successors are told ("26 Jul 2024"); NULL is the constant of their templates, so that one command
 * gives one prompt on any day. `tokenizer` must outlive the chat. */
bool chat_open(const struct tokenizer *tokenizer, const char *date, struct chat **chat,
               struct error *error);

/* Accepts NULL. */
void chat_close(struct chat *chat);

enum chat_kind chat_kind(const struct chat *chat);

/* What follows the turns. */
enum chat_answer {
    CHAT_ANSWER_NONE,
    CHAT_ANSWER_BEGINS, /* what the model's answer begins with */
    CHAT_ANSWER_DIRECT  /* the same, without thoughts, if the template knows that (Qwen3) */
};

/* Appends the ids of the conversation; an error if the format is not known. `system` NULL: the
 * model's default system prompt, if it has one; some of Mistral's templates take none, which is an
 * error. Special tokens are put in as ids; they are never parsed out of the texts. On failure
 * `list` is as before. */
bool chat_format(const struct chat *chat, const char *system, const struct chat_turn *turns,
                 size_t turn_count, enum chat_answer answer, struct token_list *list,
                 struct error *error);

/* The id that closes a turn, or TOKEN_NONE if the format is not known. A model may also stop at
 * others: see tokenizer_is_end. */
int32_t chat_end_of_turn(const struct chat *chat);

#endif
