/* SPDX-License-Identifier: MIT */
/* Tokens that are found in text as they are written, before merging. */
#include "added_tokens.h"

#include <stdlib.h>
#include <string.h>

static int compare_texts(const void *left_, const void *right_)
{
    const struct added_token *left = left_, *right = right_;
    size_t common = left->length < right->length ? left->length : right->length;
    int order = memcmp(left->text, right->text, common);

    if (order != 0)
        return order;
    if (left->length != right->length)
        return left->length < right->length ? -1 : 1;
    return left->id < right->id ? -1 : left->id > right->id;
}

void added_tokens_sort(struct added_tokens *set)
{
    for (size_t i = 0; i < set->count; i++)
        set->first_bytes[(unsigned char)set->tokens[i].text[0]] = true;
    if (set->count > 0)
        qsort(set->tokens, set->count, sizeof *set->tokens, compare_texts);
}

void added_tokens_free(struct added_tokens *set)
{
    for (size_t i = 0; i < set->count; i++)
        free(set->tokens[i].text);
    free(set->tokens);
    memset(set, 0, sizeof *set);
}

/* The first of [low, high), which agree in `depth` bytes, whose next byte is at least `byte`. */
static size_t bound(const struct added_tokens *set, size_t low, size_t high, size_t depth, int byte)
{
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const struct added_token *token = &set->tokens[middle];
        int next = token->length == depth ? -1 : (unsigned char)token->text[depth];

        if (next < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const struct added_token *added_tokens_match(const struct added_tokens *set, const char *text,
                                             size_t length)
{
    const struct added_token *longest = NULL;
    size_t low = 0, high = set->count;

    if (length == 0 || !set->first_bytes[(unsigned char)text[0]])
        return NULL;
    for (size_t depth = 0; depth < length; depth++) {
        int byte = (unsigned char)text[depth];

        low = bound(set, low, high, depth, byte);
        high = bound(set, low, high, depth, byte + 1);
        if (low == high)
            break;
        if (set->tokens[low].length == depth + 1)
            longest = &set->tokens[low];
    }
    return longest;
}
