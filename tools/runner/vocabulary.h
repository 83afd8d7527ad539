/* SPDX-License-Identifier: MIT */
/* The tokens and merges of a tokenizer: made from what a file says, checked, and looked up. */
#ifndef PUZZLEKV_TOOLS_RUNNER_VOCABULARY_H
#define PUZZLEKV_TOOLS_RUNNER_VOCABULARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "token_list.h"

enum token_kind {
    TOKEN_ABSENT,  /* an id that the vocabulary leaves out or declares unused */
    TOKEN_NORMAL,  /* what merging gives */
    TOKEN_BYTE,    /* "<0xHH>": a byte of a character that has no token */
    TOKEN_ADDED,   /* found in every text before merging */
    TOKEN_SPECIAL, /* found in text only where the caller parses special tokens */
};

/* How a file writes the texts of normal tokens. */
enum spelling {
    SPELLING_ALPHABET, /* GPT-2's: every byte is one of 256 printable characters */
    SPELLING_PIECES    /* SentencePiece's: UTF-8 with U+2581 for a space */
};

/* ---- What a file says; all text belongs to the file's reader ---- */

struct source_token {
    const char *text;
    size_t length;
    enum token_kind kind;
    bool normalized; /* an added token: found after normalization */
    float score;     /* where merges follow from scores: the highest is merged first */
};

struct source_merge {
    const char *left, *right;
    size_t left_length, right_length;
};

struct vocabulary_source {
    const char *path;
    const char *tokens_field, *merges_field;
    enum spelling spelling;
    struct source_token *tokens;
    size_t token_count;
    struct source_merge *merges; /* the first is merged first */
    size_t merge_count;
    bool scored;        /* no merges are listed: two tokens merge wherever that makes a token */
    int32_t unknown;    /* stands for what has no token; TOKEN_NONE: that is left out */
    bool fuse_unknown;  /* once for a run of it, not once each */
    bool ignore_merges; /* a whole pre-token that is a token is not merged */
};

/* Reads "<0xHH>" as SentencePiece names bytes. */
bool parse_byte_name(const char *text, size_t length, unsigned char *byte);

/* ---- What the tokenizer works with ---- */

/* "No such entry" of the tables below. */
#define NONE UINT32_MAX

struct token {
    size_t offset; /* in vocabulary.bytes */
    uint32_t length;
    uint8_t kind;
    bool end; /* a model that generates it has ended its answer */
};

struct merge {
    int32_t left, right;
    uint32_t rank; /* NONE: an empty place of the table */
};

/* Immutable once it is built. All zero is one that can be freed. */
struct vocabulary {
    enum spelling spelling;
    bool fuse_unknown, ignore_merges;
    struct token *tokens;
    size_t count, longest;
    char *bytes;
    /* Open addressing: ids by text, of normal tokens and of added and special ones; NONE is empty.
     */
    uint32_t *normal, *added;
    size_t index_mask;
    struct merge *merges; /* open addressing, by pair */
    size_t merges_mask;
    int32_t *results; /* by rank */
    int32_t byte_tokens[256];
    int32_t unknown;
};

/* Fails if the source contradicts itself: the error names the field and the token. What was built
 * until then is freed by the caller. */
bool vocabulary_build(struct vocabulary *vocabulary, const struct vocabulary_source *source,
                      struct error *error);
void vocabulary_free(struct vocabulary *vocabulary);

/* The bytes that the token stands for, not terminated. */
const char *vocabulary_text(const struct vocabulary *vocabulary, int32_t id);

/* The normal token, or the added or special one, of exactly these bytes, or TOKEN_NONE. */
int32_t vocabulary_find_normal(const struct vocabulary *vocabulary, const char *text,
                               size_t length);
int32_t vocabulary_find_added(const struct vocabulary *vocabulary, const char *text, size_t length);

/* The rank of the merge of two tokens, which vocabulary.results turns into what it makes; NONE if
 * they do not merge. */
uint32_t vocabulary_rank(const struct vocabulary *vocabulary, int32_t left, int32_t right);

#endif
