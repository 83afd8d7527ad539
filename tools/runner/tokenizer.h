/* SPDX-License-Identifier: MIT */
/* Byte-pair encoding as GGUF files and Hugging Face folders describe it: text to token ids. */
#ifndef PUZZLEKV_TOOLS_RUNNER_TOKENIZER_H
#define PUZZLEKV_TOOLS_RUNNER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "token_list.h"

/* Immutable after tokenizer_open, so every function but tokenizer_close is thread-safe. */
struct tokenizer;

/* Reads the tokenizer of `path`: a GGUF file (which may hold a vocabulary only) with
 * tokenizer.ggml.model = "gpt2" and a pre-tokenizer that pretokenizer.h knows, or "llama"
 * (SentencePiece's BPE with byte fallback), or a folder with tokenizer.json and, where present,
 * tokenizer_config.json, chat_template.jinja, config.json and generation_config.json (whose
 * eos_token_id counts). A vocabulary or a merge
 * that contradicts itself is an error. On failure *tokenizer is NULL and the error names the file
 * and the field. */
bool tokenizer_open(const char *path, struct tokenizer **tokenizer, struct error *error);

/* Accepts NULL. */
void tokenizer_close(struct tokenizer *tokenizer);

/* Ids are 0 .. tokenizer_count - 1. A model's output matrix may have more rows than that. */
size_t tokenizer_count(const struct tokenizer *tokenizer);

/* Appends the ids of `text` as Hugging Face tokenizers gives them; no BOS is added. Special tokens
 * in the text become their ids if `parse_special`, else they are text like any other; added tokens
 * that are not special (as <think> of Qwen3) always become their ids, as in every template that
 * uses them. Where the model asks for it, text is normalized to NFC, by utf8proc's Unicode: theirs
 * is older and leaves some marks of later versions (U+1ABF and others) as they come. Bytes that are
 * not valid UTF-8 (see utf8_valid_prefix) are encoded byte by byte. A byte that the vocabulary has
 * no token for, nor one for what it does not know, is left out, as the reference does: SmolLM2
 * lacks a few control characters. SentencePiece's vocabularies put a space before the text, or
 * before each part of it between added and special tokens, where the file asks for it. On failure
 * `list` is as before. */
bool tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                      bool parse_special, struct token_list *list, struct error *error);

/* Text of which some is the program's and some the user's. */
struct text_part {
    const char *text;
    size_t length;
    bool parse_special;
};

/* Encodes the parts as the one text that they make, except that no added or special token reaches
 * over the border of two parts. */
bool tokenizer_encode_parts(const struct tokenizer *tokenizer, const struct text_part *parts,
                            size_t count, struct token_list *list, struct error *error);

/* The id of the token whose text (bytes, a special token's as it is written) is exactly `text`, or
 * TOKEN_NONE. */
int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text, size_t length);

/* The bytes of a token, not terminated, valid until tokenizer_close. An id that is out of range, or
 * that the vocabulary leaves out, has none. */
const char *tokenizer_text(const struct tokenizer *tokenizer, int32_t id, size_t *length);

/* How many bytes the longest token has. */
size_t tokenizer_longest(const struct tokenizer *tokenizer);

/* Whether the id is of a special (control) token, which tells the model something and is no text.
 */
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id);

/* Whether a model that generates the id has ended its answer: the file's EOS, end-of-turn and
 * end-of-message ids, and the special tokens that mean one of these by their names. */
bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t id);

/* The id of the beginning-of-sequence token, or TOKEN_NONE. */
int32_t tokenizer_bos(const struct tokenizer *tokenizer);

/* The id of the end-of-sequence token, or TOKEN_NONE. A model may stop at others. */
int32_t tokenizer_eos(const struct tokenizer *tokenizer);

/* Whether the model expects raw text to begin with the BOS token (which there is, then). */
bool tokenizer_wants_bos(const struct tokenizer *tokenizer);

/* Whether a space is put before text, which is then none of it when ids are turned back. */
bool tokenizer_adds_space(const struct tokenizer *tokenizer);

/* What may make the ids differ from those that the model was taught with, as text for a warning;
 * NULL if nothing does. */
const char *tokenizer_doubt(const struct tokenizer *tokenizer);

/* The model's chat template (Jinja), terminated, valid until tokenizer_close; NULL if it has none.
 */
const char *tokenizer_chat_template(const struct tokenizer *tokenizer);

#endif
