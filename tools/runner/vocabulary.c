/* SPDX-License-Identifier: MIT */
/* The tokens and merges of a tokenizer: made from what a file says, checked, and looked up. */
#include "vocabulary.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "pretokenizer.h"

/* ---- Tables ---- */

/* A power of two that leaves at least half of the table empty. `entries` is at most INT32_MAX, so
 * size_t is exceeded only where it has 32 bits, and then no allocation of SIZE_MAX succeeds. */
static size_t table_size(size_t entries)
{
    size_t size = 16;

    while (size / 2 < entries) {
        if (__builtin_mul_overflow(size, 2, &size))
            return SIZE_MAX;
    }
    return size;
}

static void *allocate_array(size_t count, size_t size, const char *path, struct error *error)
{
    void *memory = calloc(count == 0 ? 1 : count, size);

    if (memory == NULL)
        error_set(error, "%s: out of memory for %zu entries of %zu bytes", path, count, size);
    return memory;
}

const char *vocabulary_text(const struct vocabulary *vocabulary, int32_t id)
{
    return vocabulary->bytes + vocabulary->tokens[id].offset;
}

/* The place in an index that holds the text's id, or the empty one where it would be. */
static uint32_t *index_place(const struct vocabulary *vocabulary, uint32_t *index, const char *text,
                             size_t length)
{
    size_t place = XXH3_64bits(text, length) & vocabulary->index_mask;

    for (;; place = (place + 1) & vocabulary->index_mask) {
        uint32_t id = index[place];

        if (id == NONE || (vocabulary->tokens[id].length == length &&
                           memcmp(vocabulary_text(vocabulary, (int32_t)id), text, length) == 0))
            return &index[place];
    }
}

static int32_t find(const struct vocabulary *vocabulary, uint32_t *index, const char *text,
                    size_t length)
{
    uint32_t id = *index_place(vocabulary, index, text, length);

    return id == NONE ? TOKEN_NONE : (int32_t)id;
}

int32_t vocabulary_find_normal(const struct vocabulary *vocabulary, const char *text, size_t length)
{
    return find(vocabulary, vocabulary->normal, text, length);
}

int32_t vocabulary_find_added(const struct vocabulary *vocabulary, const char *text, size_t length)
{
    return find(vocabulary, vocabulary->added, text, length);
}

static struct merge *merge_place(const struct vocabulary *vocabulary, int32_t left, int32_t right)
{
    const int32_t pair[2] = {left, right};
    size_t place = XXH3_64bits(pair, sizeof pair) & vocabulary->merges_mask;

    for (;; place = (place + 1) & vocabulary->merges_mask) {
        struct merge *merge = &vocabulary->merges[place];

        if (merge->rank == NONE || (merge->left == left && merge->right == right))
            return merge;
    }
}

uint32_t vocabulary_rank(const struct vocabulary *vocabulary, int32_t left, int32_t right)
{
    return merge_place(vocabulary, left, right)->rank;
}

/* ---- Spelling ---- */

/* GPT-2's alphabet: the printable characters of Latin-1 stand for their own bytes, and U+0100 and
 * what follows for the other bytes in order. */
#define ALPHABET_END 0x144

static void make_alphabet(int16_t bytes[ALPHABET_END])
{
    int next = 0x100;

    memset(bytes, -1, ALPHABET_END * sizeof *bytes);
    for (int byte = 0; byte < 256; byte++) {
        bool printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);

        bytes[printable ? byte : next++] = (int16_t)byte;
    }
}

/* Writes the bytes that a token's text stands for; false if a character is not of the alphabet.
 * `bytes` needs the room of the text. */
static bool from_alphabet(const int16_t alphabet[ALPHABET_END], const char *text, size_t length,
                          char *bytes, size_t *count)
{
    const unsigned char *in = (const unsigned char *)text;

    *count = 0;
    for (size_t i = 0; i < length; i++) {
        unsigned point = in[i];

        if (point >= 0x80) {
            if (utf8_sequence(text + i, length - i) != 2)
                return false;
            point = (point & 0x1fu) << 6 | (in[++i] & 0x3fu);
        }
        if (point >= ALPHABET_END || alphabet[point] < 0)
            return false;
        bytes[(*count)++] = (char)alphabet[point];
    }
    return true;
}

/* The same for SentencePiece's texts, which are UTF-8 and have no spaces. */
static bool from_piece(const char *text, size_t length, char *bytes, size_t *count)
{
    if (utf8_valid_prefix(text, length) < length || memchr(text, ' ', length) != NULL)
        return false;
    *count = metaspaces_to_spaces(text, length, bytes);
    return true;
}

static bool from_spelling(enum spelling spelling, const int16_t alphabet[ALPHABET_END],
                          const char *text, size_t length, char *bytes, size_t *count)
{
    return spelling == SPELLING_ALPHABET ? from_alphabet(alphabet, text, length, bytes, count)
                                         : from_piece(text, length, bytes, count);
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool parse_byte_name(const char *text, size_t length, unsigned char *byte)
{
    if (length != 6 || memcmp(text, "<0x", 3) != 0 || hex_digit(text[3]) < 0 ||
        hex_digit(text[4]) < 0 || text[5] != '>')
        return false;
    *byte = (unsigned char)(hex_digit(text[3]) << 4 | hex_digit(text[4]));
    return true;
}

/* ---- Tokens ---- */

static bool allocate_tokens(struct vocabulary *vocabulary, const struct vocabulary_source *source,
                            struct error *error)
{
    size_t total = 0, size = table_size(source->token_count);

    for (size_t i = 0; i < source->token_count; i++) {
        if (source->tokens[i].length > INT32_MAX ||
            __builtin_add_overflow(total, source->tokens[i].length, &total))
            return error_set(error, "%s: %s: the text of token %zu is too long", source->path,
                             source->tokens_field, i);
    }
    vocabulary->count = source->token_count;
    vocabulary->tokens =
        allocate_array(vocabulary->count, sizeof *vocabulary->tokens, source->path, error);
    vocabulary->bytes = allocate_array(total, 1, source->path, error);
    vocabulary->normal = allocate_array(size, sizeof *vocabulary->normal, source->path, error);
    vocabulary->added = allocate_array(size, sizeof *vocabulary->added, source->path, error);
    if (vocabulary->tokens == NULL || vocabulary->bytes == NULL || vocabulary->normal == NULL ||
        vocabulary->added == NULL)
        return false;
    vocabulary->index_mask = size - 1;
    memset(vocabulary->normal, 0xff, size * sizeof *vocabulary->normal);
    memset(vocabulary->added, 0xff, size * sizeof *vocabulary->added);
    return true;
}

static bool add_to_index(struct vocabulary *vocabulary, uint32_t *index, size_t id,
                         const struct vocabulary_source *source, struct error *error)
{
    const struct token *token = &vocabulary->tokens[id];
    uint32_t *place =
        index_place(vocabulary, index, vocabulary->bytes + token->offset, token->length);

    if (*place != NONE)
        return error_set(error, "%s: %s: tokens %u and %zu have the same text", source->path,
                         source->tokens_field, *place, id);
    *place = (uint32_t)id;
    return true;
}

static bool build_tokens(struct vocabulary *vocabulary, const struct vocabulary_source *source,
                         const int16_t *alphabet, struct error *error)
{
    size_t offset = 0;

    if (!allocate_tokens(vocabulary, source, error))
        return false;
    for (size_t i = 0; i < vocabulary->count; i++) {
        const struct source_token *from = &source->tokens[i];
        struct token *token = &vocabulary->tokens[i];
        char *bytes = vocabulary->bytes + offset;
        size_t length = from->length;
        uint32_t *index = NULL;
        unsigned char byte;

        token->kind = (uint8_t)(length == 0 ? TOKEN_ABSENT : from->kind);
        token->offset = offset;
        if (token->kind == TOKEN_ABSENT)
            continue;
        if (token->kind == TOKEN_BYTE) {
            if (!parse_byte_name(from->text, length, &byte))
                return error_set(error,
                                 "%s: %s: token %zu is a byte; expected '<0x00>' to '<0xFF>'",
                                 source->path, source->tokens_field, i);
            if (vocabulary->byte_tokens[byte] != TOKEN_NONE)
                return error_set(error, "%s: %s: tokens %d and %zu have the same text",
                                 source->path, source->tokens_field, vocabulary->byte_tokens[byte],
                                 i);
            vocabulary->byte_tokens[byte] = (int32_t)i;
            bytes[0] = (char)byte;
            length = 1;
        } else if (token->kind == TOKEN_NORMAL &&
                   from_spelling(source->spelling, alphabet, from->text, length, bytes, &length)) {
            index = vocabulary->normal;
        } else {
            /* A normal token in another spelling is shown, but no text becomes one. */
            length = from->length;
            memcpy(bytes, from->text, length);
            if (token->kind > TOKEN_BYTE)
                index = vocabulary->added;
        }
        token->length = (uint32_t)length;
        offset += length;
        if (length > vocabulary->longest)
            vocabulary->longest = length;
        if (index != NULL && !add_to_index(vocabulary, index, i, source, error))
            return false;
    }
    return true;
}

/* Where the tokens are spelled in bytes, those of one byte are the bytes. */
static void find_byte_tokens(struct vocabulary *vocabulary)
{
    for (int byte = 0; byte < 256; byte++) {
        char text = (char)byte;

        vocabulary->byte_tokens[byte] = vocabulary_find_normal(vocabulary, &text, 1);
    }
}

/* ---- Merges ---- */

static bool allocate_merges(struct vocabulary *vocabulary, const char *path, size_t merges,
                            size_t ranks, struct error *error)
{
    size_t size = table_size(merges);

    vocabulary->merges = allocate_array(size, sizeof *vocabulary->merges, path, error);
    vocabulary->results = allocate_array(ranks, sizeof *vocabulary->results, path, error);
    if (vocabulary->merges == NULL || vocabulary->results == NULL)
        return false;
    vocabulary->merges_mask = size - 1;
    for (size_t i = 0; i < size; i++)
        vocabulary->merges[i].rank = NONE;
    return true;
}

/* A token that merges make; an added token may be part of the vocabulary as well. */
static int32_t find_merged(const struct vocabulary *vocabulary, const char *text, size_t length)
{
    int32_t id = vocabulary_find_normal(vocabulary, text, length);

    return id == TOKEN_NONE ? vocabulary_find_added(vocabulary, text, length) : id;
}

/* How many bytes of a file's text become one byte of a token, at most. */
#define SPELLED_PER_BYTE 3

/* The id of a token as a merge names it, in the file's spelling. */
static int32_t find_spelled(const struct vocabulary *vocabulary, const int16_t *alphabet,
                            const char *text, size_t length, char *scratch)
{
    size_t count;

    if (length > SPELLED_PER_BYTE * vocabulary->longest ||
        !from_spelling(vocabulary->spelling, alphabet, text, length, scratch, &count))
        return TOKEN_NONE;
    return find_merged(vocabulary, scratch, count);
}

static int shown(size_t length)
{
    return length > 60 ? 60 : (int)length;
}

static bool build_listed_merges(struct vocabulary *vocabulary,
                                const struct vocabulary_source *source, const int16_t *alphabet,
                                struct error *error)
{
    char *scratch = NULL;
    bool done = false;

    if (source->merge_count > INT32_MAX)
        return error_set(error, "%s: %s: too many merges", source->path, source->merges_field);
    if (!allocate_merges(vocabulary, source->path, source->merge_count, source->merge_count, error))
        return false;
    /* One text as the file has it, or two texts side by side. */
    scratch = allocate_array(vocabulary->longest, SPELLED_PER_BYTE, source->path, error);
    if (scratch == NULL)
        return false;
    for (size_t rank = 0; rank < source->merge_count; rank++) {
        const struct source_merge *from = &source->merges[rank];
        int32_t left, right, result;
        size_t length;

        left = find_spelled(vocabulary, alphabet, from->left, from->left_length, scratch);
        right = find_spelled(vocabulary, alphabet, from->right, from->right_length, scratch);
        if (left == TOKEN_NONE || right == TOKEN_NONE) {
            const char *name = left == TOKEN_NONE ? from->left : from->right;
            size_t name_length = left == TOKEN_NONE ? from->left_length : from->right_length;

            error_set(error, "%s: %s: merge %zu names '%.*s', which is not a token", source->path,
                      source->merges_field, rank, shown(name_length), name);
            goto out;
        }
        length = vocabulary->tokens[left].length;
        memcpy(scratch, vocabulary_text(vocabulary, left), length);
        memcpy(scratch + length, vocabulary_text(vocabulary, right),
               vocabulary->tokens[right].length);
        length += vocabulary->tokens[right].length;
        result = find_merged(vocabulary, scratch, length);
        if (result == TOKEN_NONE) {
            error_set(error, "%s: %s: merge %zu, '%.*s' and '%.*s', makes no token", source->path,
                      source->merges_field, rank, shown(from->left_length), from->left,
                      shown(from->right_length), from->right);
            goto out;
        }
        vocabulary->results[rank] = result;
        /* Of two equal merges the later one counts, as in the reference. */
        *merge_place(vocabulary, left, right) = (struct merge){left, right, (uint32_t)rank};
    }
    done = true;
out:
    free(scratch);
    return done;
}

struct scored_token {
    float score;
    int32_t id;
};

static int compare_scored(const void *left_, const void *right_)
{
    const struct scored_token *left = left_, *right = right_;

    if (left->score != right->score)
        return left->score > right->score ? -1 : 1;
    return left->id < right->id ? -1 : left->id > right->id;
}

/* A longer token would take time quadratic in its length; no vocabulary has one. */
#define LONGEST_SCORED 1024

/* Every way to cut the token in two tokens: counts them, and notes them as merges of `rank` if the
 * table is there. */
static size_t add_cuts(struct vocabulary *vocabulary, int32_t id, uint32_t rank)
{
    const char *text = vocabulary_text(vocabulary, id);
    size_t length = vocabulary->tokens[id].length, count = 0;

    for (size_t cut = (size_t)utf8_sequence(text, length); cut < length;
         cut += (size_t)utf8_sequence(text + cut, length - cut)) {
        int32_t left = vocabulary_find_normal(vocabulary, text, cut), right;

        if (left == TOKEN_NONE)
            continue;
        right = vocabulary_find_normal(vocabulary, text + cut, length - cut);
        if (right == TOKEN_NONE)
            continue;
        count++;
        if (vocabulary->merges != NULL)
            *merge_place(vocabulary, left, right) = (struct merge){left, right, rank};
    }
    return count;
}

/* The merges that make one token have one rank, so that of them the leftmost is merged first. */
static bool build_scored_merges(struct vocabulary *vocabulary,
                                const struct vocabulary_source *source, struct error *error)
{
    struct scored_token *order =
        allocate_array(vocabulary->count, sizeof *order, source->path, error);
    size_t ranks = 0, merges = 0;
    bool done = false;

    if (order == NULL)
        return false;
    for (size_t i = 0; i < vocabulary->count; i++) {
        if (vocabulary->tokens[i].kind != TOKEN_NORMAL ||
            vocabulary_find_normal(vocabulary, vocabulary_text(vocabulary, (int32_t)i),
                                   vocabulary->tokens[i].length) != (int32_t)i)
            continue;
        if (vocabulary->tokens[i].length > LONGEST_SCORED) {
            error_set(error, "%s: %s: token %zu has %u bytes; expected at most %d", source->path,
                      source->tokens_field, i, vocabulary->tokens[i].length, LONGEST_SCORED);
            goto out;
        }
        order[ranks++] = (struct scored_token){source->tokens[i].score, (int32_t)i};
        merges += add_cuts(vocabulary, (int32_t)i, 0);
    }
    if (merges > INT32_MAX) {
        error_set(error, "%s: %s: too many merges", source->path, source->tokens_field);
        goto out;
    }
    qsort(order, ranks, sizeof *order, compare_scored);
    if (!allocate_merges(vocabulary, source->path, merges, ranks, error))
        goto out;
    for (size_t rank = 0; rank < ranks; rank++) {
        vocabulary->results[rank] = order[rank].id;
        add_cuts(vocabulary, order[rank].id, (uint32_t)rank);
    }
    done = true;
out:
    free(order);
    return done;
}

/* ---- All of it ---- */

bool vocabulary_build(struct vocabulary *vocabulary, const struct vocabulary_source *source,
                      struct error *error)
{
    int16_t alphabet[ALPHABET_END];

    vocabulary->spelling = source->spelling;
    vocabulary->fuse_unknown = source->fuse_unknown;
    vocabulary->ignore_merges = source->ignore_merges;
    vocabulary->unknown = source->unknown;
    for (int byte = 0; byte < 256; byte++)
        vocabulary->byte_tokens[byte] = TOKEN_NONE;
    make_alphabet(alphabet);
    if (!build_tokens(vocabulary, source, alphabet, error))
        return false;
    if (source->spelling == SPELLING_ALPHABET)
        find_byte_tokens(vocabulary);
    return source->scored ? build_scored_merges(vocabulary, source, error)
                          : build_listed_merges(vocabulary, source, alphabet, error);
}

void vocabulary_free(struct vocabulary *vocabulary)
{
    free(vocabulary->tokens);
    free(vocabulary->bytes);
    free(vocabulary->normal);
    free(vocabulary->added);
    free(vocabulary->merges);
    free(vocabulary->results);
    memset(vocabulary, 0, sizeof *vocabulary);
}
