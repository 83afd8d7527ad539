/* SPDX-License-Identifier: MIT */
/* Byte-pair encoding as GGUF files and Hugging Face folders describe it: text to token ids. */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bpe.h"
#include "tokenizer_build.h"

/* ---- Normalization ---- */

/* What a part of a text becomes before merging. *result is NULL if it stays as it is; otherwise the
 * caller frees it. */
static bool normalize(const struct tokenizer *tokenizer, const char *text, size_t length,
                      char **result, size_t *result_length, struct error *error)
{
    const bool pieces = tokenizer->vocabulary.spelling == SPELLING_PIECES;
    const bool prefix = tokenizer->prefix == PREFIX_ALL && length > 0;
    char *normal = NULL, *spaced;

    *result = NULL;
    if (tokenizer->nfc) {
        if (!text_to_nfc(text, length, &normal, result_length, error))
            return false;
        if (normal != NULL) {
            text = normal;
            length = *result_length;
        }
    }
    if (pieces) {
        spaced = malloc(length + 1);
        if (spaced == NULL) {
            free(normal);
            return error_set(error, "text: out of memory while normalizing %zu bytes", length);
        }
        spaced[0] = ' ';
        *result_length = prefix + metaspaces_to_spaces(text, length, spaced + prefix);
        free(normal);
        normal = spaced;
    }
    *result = normal;
    return true;
}

/* ---- Building ---- */

static bool build_added(struct tokenizer *tokenizer, const struct vocabulary_source *source,
                        struct error *error)
{
    for (size_t i = 0; i < source->token_count; i++)
        tokenizer->added[source->tokens[i].normalized].count +=
            tokenizer->vocabulary.tokens[i].kind >= TOKEN_ADDED;
    for (int normalized = 0; normalized < 2; normalized++) {
        struct added_tokens *set = &tokenizer->added[normalized];

        set->tokens = calloc(set->count + 1, sizeof *set->tokens);
        set->count = 0;
        if (set->tokens == NULL)
            return error_set(error, "%s: out of memory for the added tokens", source->path);
    }
    for (size_t i = 0; i < source->token_count; i++) {
        const struct token *token = &tokenizer->vocabulary.tokens[i];
        const char *text = vocabulary_text(&tokenizer->vocabulary, (int32_t)i);
        struct added_tokens *set = &tokenizer->added[source->tokens[i].normalized];
        struct added_token added = {
            .length = token->length,
            .id = (int32_t)i,
            .special = token->kind == TOKEN_SPECIAL,
        };

        if (token->kind < TOKEN_ADDED)
            continue;
        if (source->tokens[i].normalized &&
            !normalize(tokenizer, text, token->length, &added.text, &added.length, error))
            return false;
        if (added.text == NULL) {
            added.length = token->length;
            added.text = malloc(added.length);
            if (added.text == NULL)
                return error_set(error, "%s: out of memory for the added tokens", source->path);
            memcpy(added.text, text, added.length);
        }
        set->tokens[set->count++] = added;
    }
    added_tokens_sort(&tokenizer->added[0]);
    added_tokens_sort(&tokenizer->added[1]);
    return true;
}

/* Special tokens at which every model that has them stops. */
static const char *const end_names[] = {
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>",
};

bool tokenizer_build(struct tokenizer *tokenizer, const struct tokenizer_source *source,
                     struct error *error)
{
    tokenizer->bos = tokenizer->eos = TOKEN_NONE;
    tokenizer->nfc = source->nfc;
    tokenizer->prefix = source->prefix;
    if (!pretokenizer_open(source->pretokenizer, &tokenizer->pretokenizer, error) ||
        !vocabulary_build(&tokenizer->vocabulary, &source->vocabulary, error) ||
        !build_added(tokenizer, &source->vocabulary, error))
        return false;
    for (size_t i = 0; i < sizeof end_names / sizeof end_names[0]; i++) {
        int32_t id =
            vocabulary_find_added(&tokenizer->vocabulary, end_names[i], strlen(end_names[i]));

        if (tokenizer_is_special(tokenizer, id))
            tokenizer_mark_end(tokenizer, id);
    }
    return true;
}

void tokenizer_mark_end(struct tokenizer *tokenizer, int32_t id)
{
    if (id != TOKEN_NONE)
        tokenizer->vocabulary.tokens[id].end = true;
}

bool split_merge(const char *text, size_t length, struct source_merge *merge)
{
    const char *space = memchr(text, ' ', length);

    if (space == NULL || memchr(space + 1, ' ', length - (size_t)(space + 1 - text)) != NULL)
        return false;
    *merge = (struct source_merge){
        .left = text,
        .left_length = (size_t)(space - text),
        .right = space + 1,
        .right_length = length - (size_t)(space + 1 - text),
    };
    return true;
}

/* ---- Opening and asking ---- */

bool tokenizer_open(const char *path, struct tokenizer **tokenizer, struct error *error)
{
    struct tokenizer *opened = calloc(1, sizeof *opened);
    struct stat status;
    bool folder;

    *tokenizer = NULL;
    if (opened == NULL)
        return error_set(error, "%s: out of memory", path);
    folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
    if (folder ? !tokenizer_read_folder(opened, path, error)
               : !tokenizer_read_gguf(opened, path, error)) {
        tokenizer_close(opened);
        return false;
    }
    *tokenizer = opened;
    return true;
}

void tokenizer_close(struct tokenizer *tokenizer)
{
    if (tokenizer == NULL)
        return;
    pretokenizer_close(tokenizer->pretokenizer);
    vocabulary_free(&tokenizer->vocabulary);
    added_tokens_free(&tokenizer->added[0]);
    added_tokens_free(&tokenizer->added[1]);
    free(tokenizer->chat_template);
    free(tokenizer);
}

size_t tokenizer_count(const struct tokenizer *tokenizer)
{
    return tokenizer->vocabulary.count;
}

size_t tokenizer_longest(const struct tokenizer *tokenizer)
{
    return tokenizer->vocabulary.longest;
}

int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text, size_t length)
{
    int32_t id = vocabulary_find_added(&tokenizer->vocabulary, text, length);

    return id == TOKEN_NONE ? vocabulary_find_normal(&tokenizer->vocabulary, text, length) : id;
}

static const struct token *find_token(const struct tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && (size_t)id < tokenizer->vocabulary.count ? &tokenizer->vocabulary.tokens[id]
                                                               : NULL;
}

const char *tokenizer_text(const struct tokenizer *tokenizer, int32_t id, size_t *length)
{
    const struct token *token = find_token(tokenizer, id);

    *length = token == NULL ? 0 : token->length;
    return token == NULL ? "" : vocabulary_text(&tokenizer->vocabulary, id);
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id)
{
    const struct token *token = find_token(tokenizer, id);

    return token != NULL && token->kind == TOKEN_SPECIAL;
}

bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t id)
{
    const struct token *token = find_token(tokenizer, id);

    return token != NULL && token->end;
}

int32_t tokenizer_bos(const struct tokenizer *tokenizer)
{
    return tokenizer->bos;
}

int32_t tokenizer_eos(const struct tokenizer *tokenizer)
{
    return tokenizer->eos;
}

bool tokenizer_wants_bos(const struct tokenizer *tokenizer)
{
    return tokenizer->wants_bos;
}

bool tokenizer_adds_space(const struct tokenizer *tokenizer)
{
    return tokenizer->vocabulary.spelling == SPELLING_PIECES && tokenizer->prefix != PREFIX_NONE;
}

const char *tokenizer_doubt(const struct tokenizer *tokenizer)
{
    return tokenizer->doubt;
}

const char *tokenizer_chat_template(const struct tokenizer *tokenizer)
{
    return tokenizer->chat_template;
}

/* ---- Encoding ---- */

struct encoder {
    const struct tokenizer *tokenizer;
    const struct text_part *parts; /* of the text as it is given */
    size_t part_count;
    struct token_list *list;
    struct bpe bpe;
};

static bool encode_piece(void *context, const char *piece, size_t length, struct error *error)
{
    struct encoder *encoder = context;

    return bpe_encode(&encoder->bpe, piece, length, encoder->list, error);
}

/* A part without added tokens; `first`: it begins the text. */
static bool encode_part(struct encoder *encoder, bool first, const char *text, size_t length,
                        struct error *error)
{
    const struct tokenizer *tokenizer = encoder->tokenizer;
    const enum space_prefix prefix = tokenizer->prefix;
    char *spaced;
    bool done;

    if (text[0] == ' ' || !(prefix == PREFIX_MISSING || (prefix == PREFIX_FIRST && first)))
        return pretokenizer_split(tokenizer->pretokenizer, text, length, encode_piece, encoder,
                                  error);
    spaced = malloc(length + 1);
    if (spaced == NULL)
        return error_set(error, "text: out of memory for %zu bytes", length);
    spaced[0] = ' ';
    memcpy(spaced + 1, text, length);
    done = pretokenizer_split(tokenizer->pretokenizer, spaced, length + 1, encode_piece, encoder,
                              error);
    free(spaced);
    return done;
}

static bool encode_stage(struct encoder *encoder, int stage, bool first, const char *text,
                         size_t length, struct error *error);

/* The part of the text given that begins at `offset` of it, and where it ends; normalized text is
 * one part. */
static bool next_part(const struct encoder *encoder, int stage, size_t length, size_t *part,
                      size_t *end)
{
    bool parse_special = true;

    if (stage == 0) {
        while (encoder->parts[*part].length == 0)
            ++*part;
        *end += encoder->parts[*part].length;
        return encoder->parts[(*part)++].parse_special;
    }
    for (size_t i = 0; i < encoder->part_count; i++)
        parse_special = parse_special && encoder->parts[i].parse_special;
    *end = length;
    return parse_special;
}

/* Cuts the text at the added tokens of one set and takes what lies between them to the next stage.
 */
static bool encode_added(struct encoder *encoder, int stage, bool first, const char *text,
                         size_t length, struct error *error)
{
    const struct added_tokens *set = &encoder->tokenizer->added[stage];
    size_t begin = 0, offset = 0, end = 0, part = 0;
    bool parse_special = false;

    while (offset < length && set->count > 0) {
        const struct added_token *token;

        if (offset == end)
            parse_special = next_part(encoder, stage, length, &part, &end);
        token = added_tokens_match(set, text + offset, end - offset);
        if (token == NULL) {
            offset++;
            continue;
        }
        /* A special token that is text hides tokens that begin inside it, as in the reference. */
        if (!token->special || parse_special) {
            if (!encode_stage(encoder, stage + 1, first && begin == 0, text + begin, offset - begin,
                              error) ||
                !token_list_append(encoder->list, token->id, error))
                return false;
            begin = offset + token->length;
        }
        offset += token->length;
    }
    return encode_stage(encoder, stage + 1, first && begin == 0, text + begin, length - begin,
                        error);
}

/* Stage 0: added tokens of the text as it is; 1: of normalized text; 2: what remains. */
static bool encode_stage(struct encoder *encoder, int stage, bool first, const char *text,
                         size_t length, struct error *error)
{
    char *normal = NULL;
    size_t normal_length;
    bool done;

    if (length == 0)
        return true;
    if (stage == 2)
        return encode_part(encoder, first, text, length, error);
    if (stage == 1) {
        if (!normalize(encoder->tokenizer, text, length, &normal, &normal_length, error))
            return false;
        if (normal != NULL) {
            text = normal;
            length = normal_length;
        }
    }
    done = encode_added(encoder, stage, first, text, length, error);
    free(normal);
    return done;
}

bool tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                      bool parse_special, struct token_list *list, struct error *error)
{
    const struct text_part part = {text, length, parse_special};

    return tokenizer_encode_parts(tokenizer, &part, 1, list, error);
}

bool tokenizer_encode_parts(const struct tokenizer *tokenizer, const struct text_part *parts,
                            size_t count, struct token_list *list, struct error *error)
{
    struct encoder encoder = {
        .tokenizer = tokenizer,
        .parts = parts,
        .part_count = count,
        .list = list,
        .bpe = {.vocabulary = &tokenizer->vocabulary},
    };
    const char *text = count == 1 ? parts[0].text : NULL;
    size_t before = list->count, length = 0, written = 0;
    char *joined = NULL;
    bool done;

    for (size_t i = 0; i < count; i++) {
        if (__builtin_add_overflow(length, parts[i].length, &length))
            return error_set(error, "text: too long");
    }
    if (count > 1) {
        joined = malloc(length == 0 ? 1 : length);
        if (joined == NULL)
            return error_set(error, "text: out of memory for %zu bytes", length);
        for (size_t i = 0; i < count; i++) {
            memcpy(joined + written, parts[i].text, parts[i].length);
            written += parts[i].length;
        }
        text = joined;
    }
    done = encode_stage(&encoder, 0, true, text, length, error);
    if (!done)
        list->count = before;
    bpe_free(&encoder.bpe);
    free(joined);
    return done;
}
