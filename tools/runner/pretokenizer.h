/* SPDX-License-Identifier: MIT */
/* What happens to text before byte-pair encoding: UTF-8 checks, NFC, the split into pre-tokens. */
#ifndef PUZZLEKV_TOOLS_RUNNER_PRETOKENIZER_H
#define PUZZLEKV_TOOLS_RUNNER_PRETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"

/* Classifies the bytes at `text` (length >= 1): n > 0: a valid sequence of n bytes; -n < 0:
 * invalid, and the first n bytes (1 .. 3) are what one U+FFFD replaces; 0: all `length` bytes begin
 * a valid sequence that goes on after them. */
int utf8_sequence(const char *text, size_t length);

/* The offset of the first byte that is not part of a valid sequence; `length` if all is valid. */
size_t utf8_valid_prefix(const char *text, size_t length);

/* Normalization form C of `text` in O(length); invalid bytes are kept as they are. Where the text
 * is seen at once to be in NFC already, *result is NULL: use `text`. Otherwise the caller frees
 * *result, which has *result_length bytes. Fails on memory only. */
bool text_to_nfc(const char *text, size_t length, char **result, size_t *result_length,
                 struct error *error);

/* SentencePiece writes U+2581 for a space. Writes the text with spaces for it to `result`, which
 * needs the room of the text and may be the text, and returns its length. */
size_t metaspaces_to_spaces(const char *text, size_t length, char *result);

enum pretokenizer_kind {
    PRETOKENIZER_NONE,      /* the whole text is one pre-token, invalid bytes and all */
    PRETOKENIZER_METASPACE, /* a space begins a pre-token */
    PRETOKENIZER_DEFAULT,   /* GGUF's, of files that do not know their own */
    PRETOKENIZER_GPT2,
    PRETOKENIZER_SMOLLM, /* every number alone, then GPT-2's expression */
    PRETOKENIZER_LLAMA3,
    PRETOKENIZER_QWEN2,
    PRETOKENIZER_TEKKEN
};

/* The names of the kinds that have one, for error texts. */
#define PRETOKENIZER_NAMES "default, gpt-2, smollm, llama-bpe, qwen2, tekken"

/* Finds the kind by a GGUF's name for it (tokenizer.ggml.pre); false if there is none. */
bool pretokenizer_by_name(const char *name, size_t length, enum pretokenizer_kind *kind);

/* Finds the kind by the regular expression of a tokenizer.json's Split; false if there is none. */
bool pretokenizer_by_regex(const char *regex, enum pretokenizer_kind *kind);

/* A compiled expression; immutable, so one may be used by many threads at once. */
struct pretokenizer;

bool pretokenizer_open(enum pretokenizer_kind kind, struct pretokenizer **pretokenizer,
                       struct error *error);

/* Accepts NULL. */
void pretokenizer_close(struct pretokenizer *pretokenizer);

/* Receives one pre-token, a part of the text; returns false to stop with an error that it set. */
typedef bool pretokenizer_visit(void *context, const char *piece, size_t length,
                                struct error *error);

/* Calls `visit` for each pre-token of `text` in order; joined they are the text. Bytes that are not
 * valid UTF-8 form pre-tokens of their own, and the text between them is split as if alone, except
 * that PRETOKENIZER_NONE splits nothing. */
bool pretokenizer_split(const struct pretokenizer *pretokenizer, const char *text, size_t length,
                        pretokenizer_visit *visit, void *context, struct error *error);

#endif
