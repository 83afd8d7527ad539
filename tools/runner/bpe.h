/* SPDX-License-Identifier: MIT */
/* Byte-pair encoding: one piece of text to token ids, by the merges of a vocabulary. */
#ifndef PUZZLEKV_TOOLS_RUNNER_BPE_H
#define PUZZLEKV_TOOLS_RUNNER_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "token_list.h"
#include "vocabulary.h"

struct bpe_symbol;

/* Working memory, kept from piece to piece. All zero but the vocabulary to begin with. */
struct bpe {
    const struct vocabulary *vocabulary;
    struct bpe_symbol *symbols; /* room for `capacity` */
    uint64_t *heap;             /* room for twice that */
    size_t capacity, heap_count;
};

void bpe_free(struct bpe *bpe);

/* Appends the ids of the piece: its characters (or bytes, by the vocabulary's spelling), of which
 * always the pair of lowest rank is merged, the leftmost of equals. O(n log n). */
bool bpe_encode(struct bpe *bpe, const char *piece, size_t length, struct token_list *list,
                struct error *error);

#endif
