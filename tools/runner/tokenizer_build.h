/* SPDX-License-Identifier: MIT */
/* How the readers of files make a tokenizer. */
#ifndef PUZZLEKV_TOOLS_RUNNER_TOKENIZER_BUILD_H
#define PUZZLEKV_TOOLS_RUNNER_TOKENIZER_BUILD_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"
#include "added_tokens.h"
#include "pretokenizer.h"
#include "tokenizer.h"
#include "vocabulary.h"

/* Which parts of a text get a space before them; a part is what lies between the added and special
 * tokens that are found in the text. */
enum space_prefix {
    PREFIX_NONE,
    PREFIX_ALL,     /* every part */
    PREFIX_MISSING, /* every part that does not begin with a space */
    PREFIX_FIRST    /* of those, the one that begins the text */
};

struct tokenizer_source {
    struct vocabulary_source vocabulary;
    enum pretokenizer_kind pretokenizer;
    enum space_prefix prefix;
    bool nfc;
};

struct tokenizer {
    struct vocabulary vocabulary;
    struct pretokenizer *pretokenizer;
    enum space_prefix prefix;
    bool nfc;
    struct added_tokens added[2]; /* found before normalization, and after it */
    int32_t bos, eos;
    bool wants_bos;
    const char *doubt; /* NULL, or a text that lasts */
    char *chat_template;
};

/* Fills a tokenizer that is all zero; bos, eos, wants_bos, doubt, chat_template and further ends of
 * answers are the reader's to set. What was built before an error is freed by tokenizer_close. */
bool tokenizer_build(struct tokenizer *tokenizer, const struct tokenizer_source *source,
                     struct error *error);

/* Notes that a model which generates the id has ended its answer. Accepts TOKEN_NONE. */
void tokenizer_mark_end(struct tokenizer *tokenizer, int32_t id);

/* Finds the space of "left right", which are two texts without spaces. */
bool split_merge(const char *text, size_t length, struct source_merge *merge);

/* Both read all that tokenizer_open promises. */
bool tokenizer_read_gguf(struct tokenizer *tokenizer, const char *path, struct error *error);
bool tokenizer_read_folder(struct tokenizer *tokenizer, const char *folder, struct error *error);

#endif
