/* SPDX-License-Identifier: MIT */
/* Byte-level BPE as GGUF files and Hugging Face folders describe it: text to token ids and back. */
#ifndef PUZZLEKV_TOOLS_RUNNER_TOKENIZER_H
#define PUZZLEKV_TOOLS_RUNNER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"

/* Immutable after tokenizer_open, so every function but tokenizer_close is thread-safe. */
struct tokenizer;

/* Where a function answers with a token id, this says that there is none. */
#define TOKEN_NONE (-1)

/* Token ids that grow at the end. All zero is an empty list. */
struct token_list {
    int32_t *ids;
    size_t count, capacity;
};

bool token_list_append(struct token_list *list, int32_t id, struct error *error);

/* Frees the ids and empties the list. */
void token_list_free(struct token_list *list);

/* Reads the tokenizer of `path`: a GGUF file (which may hold a vocabulary only) with
 * tokenizer.ggml.model = "gpt2" and a pre-tokenizer that pretokenizer.h knows, or a folder with
 * tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja and
 * generation_config.json. A vocabulary or a merge that contradicts itself is an error. On failure
 * *tokenizer is NULL and the error names the file and the field. */
bool tokenizer_open(const char *path, struct tokenizer **tokenizer, struct error *error);

/* Accepts NULL. */
void tokenizer_close(struct tokenizer *tokenizer);

/* Ids are 0 .. tokenizer_count - 1. A model's output matrix may have more rows than that. */
size_t tokenizer_count(const struct tokenizer *tokenizer);

/* Appends the ids of `text` as Hugging Face tokenizers gives them; no BOS is added. Special tokens
 * in the text become their ids if `parse_special`, else they are text like any other; added tokens
 * that are not special (as <think> of Qwen3) always become their ids, as in every template that
 * uses them. Where the model asks for it, text is normalized to NFC. Bytes that are not valid UTF-8
 * (see utf8_valid_prefix) are encoded byte by byte. A byte that the vocabulary has no token for is
 * left out, as the reference does: SmolLM2 lacks a few control characters. On failure `list` is as
 * before. */
bool tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                      bool parse_special, struct token_list *list, struct error *error);

/* The id of the token whose text (bytes, a special token's as it is written) is exactly `text`, or
 * TOKEN_NONE. */
int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text, size_t length);

/* The bytes of a token, not terminated, valid until tokenizer_close. An id that is out of range, or
 * that the vocabulary leaves out, has none. */
const char *tokenizer_text(const struct tokenizer *tokenizer, int32_t id, size_t *length);

/* Whether the id is of a special (control) token, which tells the model something and is no text.
 */
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id);

/* Whether a model that generates the id has ended its answer: the file's EOS, end-of-turn and
 * end-of-message ids, and the special tokens that mean one of these by their names. */
bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t id);

/* The id of the beginning-of-sequence token, or TOKEN_NONE. */
int32_t tokenizer_bos(const struct tokenizer *tokenizer);

/* Whether the model expects raw text to begin with the BOS token (which there is, then). */
bool tokenizer_wants_bos(const struct tokenizer *tokenizer);

/* The model's chat template (Jinja), terminated, valid until tokenizer_close; NULL if it has none.
 */
const char *tokenizer_chat_template(const struct tokenizer *tokenizer);

/* Turns token ids into text as they come. Only whole UTF-8 sequences are given out; what can never
 * become one is given out as U+FFFD, so that the pieces joined are what decoding all ids at once
 * gives. */
struct detokenizer {
    const struct tokenizer *tokenizer;
    bool show_special;
    char pending[4]; /* the beginning of a sequence */
    size_t pending_length;
    char *bytes, *text; /* room for the longest token */
};

/* `tokenizer` must outlive the detokenizer. If not `show_special`, special tokens give no text. */
bool detokenizer_open(struct detokenizer *detokenizer, const struct tokenizer *tokenizer,
                      bool show_special, struct error *error);

/* Accepts one that is all zero. */
void detokenizer_close(struct detokenizer *detokenizer);

/* The text that `id` completes, terminated, valid until the next call; *length may be NULL. */
const char *detokenizer_push(struct detokenizer *detokenizer, int32_t id, size_t *length);

/* The end: what is pending becomes U+FFFD. The detokenizer may then be used anew. */
const char *detokenizer_flush(struct detokenizer *detokenizer, size_t *length);

#endif
