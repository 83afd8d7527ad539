/* SPDX-License-Identifier: MIT */
/* A conversation as text, and as token ids that continue what a cache holds of it. */
#ifndef PUZZLEKV_TOOLS_RUNNER_CONVERSATION_H
#define PUZZLEKV_TOOLS_RUNNER_CONVERSATION_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"
#include "chat.h"
#include "tokenizer.h"

struct conversation;

/* With `chat` the ids are what its template gives for the whole conversation; fails if that does
 * not take the system message. With NULL questions are raw text, each of which continues what is
 * there, and special tokens are parsed. `system` may be NULL. All three outlive the conversation.
 */
bool conversation_open(const struct tokenizer *tokenizer, const struct chat *chat,
                       const char *system, struct conversation **conversation, struct error *error);

/* Accepts NULL. */
void conversation_close(struct conversation *conversation);

/*
 * Adds a question. `tokens` are those of the conversation so far: what the last question left there
 * and the answer's ids as they were generated, without the id that ended it. They become the ids up
 * to where the next answer begins, of which the first *kept are as they were. That is all of them,
 * also where the answer was generated in other ids than its text is encoded in, or with a space
 * that the template does not put there. But where the template writes what has been said in another
 * way now, as Qwen3's leaves out earlier thoughts, or the text is not the answer's, as after a stop
 * text, only those up to the first difference are. On failure all is as before.
 */
bool conversation_ask(struct conversation *conversation, const char *text, size_t length,
                      struct token_list *tokens, size_t *kept, struct error *error);

/* Adds a question and its answer from another time; nothing without `chat`. On failure all is as
 * before. */
bool conversation_resume(struct conversation *conversation, const struct chat_turn turns[2],
                         struct error *error);

/* Adds the answer to the last question. */
bool conversation_answer(struct conversation *conversation, const char *text, size_t length,
                         struct error *error);

/* The questions and answers so far, by turns; none without `chat`. They last until the next call.
 */
const struct chat_turn *conversation_turns(const struct conversation *conversation, size_t *count);

/* Takes the last question, which has no answer, back; the caller cuts the tokens to *kept. */
void conversation_take_back(struct conversation *conversation);

/* Takes everything back. */
void conversation_clear(struct conversation *conversation);

#endif
