/* SPDX-License-Identifier: MIT */
/* Byte-pair encoding: one piece of text to token ids, by the merges of a vocabulary. */
#include "bpe.h"

#include <stdlib.h>
#include <string.h>

#include "pretokenizer.h"

/* A token of the piece that is being merged, in a list. */
struct bpe_symbol {
    int32_t id;
    uint32_t previous, next;
    /* Of the merge with the next symbol; NONE if there is none, or if this one is gone. */
    uint32_t rank;
};

void bpe_free(struct bpe *bpe)
{
    free(bpe->symbols);
    free(bpe->heap);
    memset(bpe, 0, sizeof *bpe);
}

/* ---- The pairs that merge, the least on top: rank << 32 | place of the left symbol ---- */

static void heap_sift_down(struct bpe *bpe, size_t hole)
{
    uint64_t *heap = bpe->heap, value = heap[hole];

    for (;;) {
        size_t child = 2 * hole + 1;

        if (child + 1 < bpe->heap_count && heap[child + 1] < heap[child])
            child++;
        if (child >= bpe->heap_count || heap[child] >= value)
            break;
        heap[hole] = heap[child];
        hole = child;
    }
    heap[hole] = value;
}

static void heap_push(struct bpe *bpe, uint64_t value)
{
    uint64_t *heap = bpe->heap;
    size_t hole = bpe->heap_count++;

    while (hole > 0 && heap[(hole - 1) / 2] > value) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = value;
}

static uint64_t heap_pop(struct bpe *bpe)
{
    uint64_t top = bpe->heap[0];

    bpe->heap[0] = bpe->heap[--bpe->heap_count];
    if (bpe->heap_count > 0)
        heap_sift_down(bpe, 0);
    return top;
}

static void find_rank(const struct bpe *bpe, uint32_t at)
{
    struct bpe_symbol *symbol = &bpe->symbols[at];

    symbol->rank = NONE;
    if (symbol->next != NONE)
        symbol->rank = vocabulary_rank(bpe->vocabulary, symbol->id, bpe->symbols[symbol->next].id);
}

static void push_pair(struct bpe *bpe, uint32_t at)
{
    find_rank(bpe, at);
    if (bpe->symbols[at].rank != NONE)
        heap_push(bpe, (uint64_t)bpe->symbols[at].rank << 32 | at);
}

/* ---- What a piece begins as ---- */

static bool reserve_symbols(struct bpe *bpe, size_t length, struct error *error)
{
    size_t capacity = length < 256 ? 256 : length, symbol_bytes, heap_bytes;
    struct bpe_symbol *symbols;
    uint64_t *heap;

    if (length <= bpe->capacity)
        return true;
    if (length >= NONE || __builtin_mul_overflow(capacity, sizeof *symbols, &symbol_bytes) ||
        __builtin_mul_overflow(capacity, 2 * sizeof *heap, &heap_bytes))
        return error_set(error, "text: %zu bytes without a place to cut are too many", length);
    symbols = realloc(bpe->symbols, symbol_bytes);
    if (symbols != NULL)
        bpe->symbols = symbols;
    heap = realloc(bpe->heap, heap_bytes);
    if (heap != NULL)
        bpe->heap = heap;
    if (symbols == NULL || heap == NULL)
        return error_set(error, "tokenizer: out of memory for a word of %zu bytes", length);
    bpe->capacity = capacity;
    return true;
}

/* The bytes of the character become symbols if each has a token. */
static bool add_bytes(struct bpe *bpe, const char *text, size_t length, size_t *count)
{
    const int32_t *tokens = bpe->vocabulary->byte_tokens;

    for (size_t i = 0; i < length; i++) {
        if (tokens[(unsigned char)text[i]] == TOKEN_NONE)
            return false;
    }
    for (size_t i = 0; i < length; i++)
        bpe->symbols[(*count)++].id = tokens[(unsigned char)text[i]];
    return true;
}

/* Sets the ids of the first symbols and returns how many there are: at most one a byte. */
static size_t first_symbols(struct bpe *bpe, const char *piece, size_t length)
{
    const struct vocabulary *vocabulary = bpe->vocabulary;
    bool after_unknown = false;
    size_t count = 0;
    int size;

    for (size_t offset = 0; offset < length; offset += (size_t)size) {
        const char *text = piece + offset;
        int32_t id = TOKEN_NONE;
        bool known;

        size = 1;
        if (vocabulary->spelling == SPELLING_PIECES) {
            size = utf8_sequence(text, length - offset);
            if (size > 0)
                id = vocabulary_find_normal(vocabulary, text, (size_t)size);
            else
                size = 1; /* invalid bytes are taken one by one */
        }
        if (id != TOKEN_NONE)
            bpe->symbols[count++].id = id;
        known = id != TOKEN_NONE || add_bytes(bpe, text, (size_t)size, &count);
        if (!known && vocabulary->unknown != TOKEN_NONE &&
            !(after_unknown && vocabulary->fuse_unknown))
            bpe->symbols[count++].id = vocabulary->unknown;
        after_unknown = !known;
    }
    return count;
}

bool bpe_encode(struct bpe *bpe, const char *piece, size_t length, struct token_list *list,
                struct error *error)
{
    const struct vocabulary *vocabulary = bpe->vocabulary;
    struct bpe_symbol *symbols;
    size_t count;

    if (vocabulary->ignore_merges) {
        int32_t id = vocabulary_find_normal(vocabulary, piece, length);

        if (id != TOKEN_NONE)
            return token_list_append(list, id, error);
    }
    if (!reserve_symbols(bpe, length, error))
        return false;
    symbols = bpe->symbols;
    count = first_symbols(bpe, piece, length);
    if (count == 0)
        return true;
    for (uint32_t at = 0; at < count; at++) {
        symbols[at].previous = at - 1; /* NONE for the first */
        symbols[at].next = at + 1 < count ? at + 1 : NONE;
    }

    bpe->heap_count = 0;
    for (uint32_t at = 0; at < count; at++) {
        find_rank(bpe, at);
        if (symbols[at].rank != NONE)
            bpe->heap[bpe->heap_count++] = (uint64_t)symbols[at].rank << 32 | at;
    }
    for (size_t i = bpe->heap_count / 2; i-- > 0;)
        heap_sift_down(bpe, i);
    /* A merge takes one entry and adds at most two, so the heap never outgrows 2 * count. */
    while (bpe->heap_count > 0) {
        uint64_t top = heap_pop(bpe);
        uint32_t rank = (uint32_t)(top >> 32), at = (uint32_t)top, gone;

        if (symbols[at].rank != rank)
            continue; /* the pair has changed since */
        gone = symbols[at].next;
        symbols[at].id = vocabulary->results[rank];
        symbols[at].next = symbols[gone].next;
        symbols[gone].rank = NONE;
        if (symbols[at].next != NONE)
            symbols[symbols[at].next].previous = at;
        push_pair(bpe, at);
        if (symbols[at].previous != NONE)
            push_pair(bpe, symbols[at].previous);
    }
    for (uint32_t at = 0; at != NONE; at = symbols[at].next) {
        if (!token_list_append(list, symbols[at].id, error))
            return false;
    }
    return true;
}
