/* SPDX-License-Identifier: MIT */
/* The tokenizer of a GGUF file. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gguf.h"
#include "tokenizer_build.h"

static const char model_key[] = "tokenizer.ggml.model", pre_key[] = "tokenizer.ggml.pre",
                  scores_key[] = "tokenizer.ggml.scores", types_key[] = "tokenizer.ggml.token_type",
                  template_key[] = "tokenizer.chat_template",
                  add_bos_key[] = "tokenizer.ggml.add_bos_token",
                  space_key[] = "tokenizer.ggml.add_space_prefix",
                  remove_spaces_key[] = "tokenizer.ggml.remove_extra_whitespaces";

enum { BOS, EOS, EOT, EOM, UNKNOWN, N_IDS };

/* `usual`: what SentencePiece's vocabularies have where the file does not say. */
static const struct {
    const char *key;
    int32_t usual;
} special_ids[N_IDS] = {
    [BOS] = {"tokenizer.ggml.bos_token_id", 1},
    [EOS] = {"tokenizer.ggml.eos_token_id", 2},
    [EOT] = {"tokenizer.ggml.eot_token_id", TOKEN_NONE},
    [EOM] = {"tokenizer.ggml.eom_token_id", TOKEN_NONE},
    [UNKNOWN] = {"tokenizer.ggml.unknown_token_id", 0},
};

/* What is read from the file, beside its texts. */
struct gguf_vocabulary {
    struct gguf *gguf;
    const char *path;
    struct gguf_string *texts, *merges;
    int64_t *types; /* NULL: the file does not say */
    float *scores;  /* SentencePiece's only */
    int32_t ids[N_IDS];
    struct tokenizer_source source;
};

static int shown(struct gguf_string text)
{
    return text.size > 60 ? 60 : (int)text.size;
}

/* *value stays as it is if the file does not say. */
static bool optional_bool(const struct gguf *gguf, const char *key, bool *value,
                          struct error *error)
{
    return !gguf_has(gguf, key) || gguf_get_bool(gguf, key, value, error);
}

/* What kind of tokenizer it is, and what follows from that. */
static bool read_model(struct gguf_vocabulary *file, struct error *error)
{
    /* What a file without the name was made for, as others read it. */
    struct gguf_string model, pre = {"default", 7};
    struct tokenizer_source *source = &file->source;
    bool add_space = true, remove_spaces = false;

    if (!gguf_get_string(file->gguf, model_key, &model, error))
        return false;
    if (model.size == 5 && memcmp(model.data, "llama", 5) == 0) {
        if (!optional_bool(file->gguf, space_key, &add_space, error) ||
            !optional_bool(file->gguf, remove_spaces_key, &remove_spaces, error))
            return false;
        if (remove_spaces)
            return error_set(error, "%s: %s: true is not supported", file->path, remove_spaces_key);
        source->pretokenizer = PRETOKENIZER_NONE;
        source->prefix = add_space ? PREFIX_ALL : PREFIX_NONE;
        source->vocabulary.spelling = SPELLING_PIECES;
        source->vocabulary.scored = true;
        source->vocabulary.fuse_unknown = true;
        return true;
    }
    if (model.size != 4 || memcmp(model.data, "gpt2", 4) != 0)
        return error_set(error, "%s: %s: '%.*s' is not supported; expected 'gpt2' or 'llama'",
                         file->path, model_key, shown(model), model.data);
    if (gguf_has(file->gguf, pre_key) && !gguf_get_string(file->gguf, pre_key, &pre, error))
        return false;
    if (!pretokenizer_by_name(pre.data, pre.size, &source->pretokenizer))
        return error_set(error, "%s: %s: '%.*s' is not supported; expected one of %s", file->path,
                         pre_key, shown(pre), pre.data, PRETOKENIZER_NAMES);
    /* The file does not say these; the models behind the names do. */
    source->nfc = source->pretokenizer == PRETOKENIZER_QWEN2;
    source->vocabulary.ignore_merges =
        source->pretokenizer == PRETOKENIZER_LLAMA3 || source->pretokenizer == PRETOKENIZER_TEKKEN;
    source->vocabulary.unknown = TOKEN_NONE;
    return true;
}

/* "<architecture>.vocab_size", where the file has it, may count more rows than there are tokens,
 * but no fewer. */
static bool check_size(const struct gguf_vocabulary *file, struct error *error)
{
    static const char suffix[] = ".vocab_size";
    const size_t count = file->source.vocabulary.token_count;
    struct gguf_string architecture;
    char key[100];
    uint64_t size;

    if (count == 0 || count > INT32_MAX)
        return error_set(error, "%s: %s: %zu tokens; expected 1 to %d", file->path,
                         file->source.vocabulary.tokens_field, count, INT32_MAX);
    if (!gguf_has(file->gguf, "general.architecture"))
        return true;
    if (!gguf_get_string(file->gguf, "general.architecture", &architecture, error))
        return false;
    if (architecture.size + sizeof suffix > sizeof key)
        return true; /* no architecture that is known */
    memcpy(key, architecture.data, architecture.size);
    memcpy(key + architecture.size, suffix, sizeof suffix);
    if (!gguf_has(file->gguf, key))
        return true;
    if (!gguf_get_uint(file->gguf, key, &size, error))
        return false;
    if (size < count)
        return error_set(error, "%s: %s: %llu, but there are %zu tokens", file->path, key,
                         (unsigned long long)size, count);
    return true;
}

/* Arrays that must have an element for each token. */
static bool check_count(const struct gguf_vocabulary *file, const char *key, size_t count,
                        struct error *error)
{
    if (count != file->source.vocabulary.token_count)
        return error_set(error, "%s: %s: %zu elements, but there are %zu tokens", file->path, key,
                         count, file->source.vocabulary.token_count);
    return true;
}

static bool read_arrays(struct gguf_vocabulary *file, struct error *error)
{
    struct vocabulary_source *source = &file->source.vocabulary;
    size_t count;

    if (!gguf_get_strings(file->gguf, source->tokens_field, &file->texts, &source->token_count,
                          error) ||
        !check_size(file, error))
        return false;
    if (gguf_has(file->gguf, types_key) &&
        (!gguf_get_ints(file->gguf, types_key, &file->types, &count, error) ||
         !check_count(file, types_key, count, error)))
        return false;
    if (source->scored)
        return gguf_get_floats(file->gguf, scores_key, &file->scores, &count, error) &&
               check_count(file, scores_key, count, error);
    return gguf_get_strings(file->gguf, source->merges_field, &file->merges, &source->merge_count,
                            error);
}

/* Without types, bytes are told by their names. */
static bool token_kind(const struct gguf_vocabulary *file, size_t token, enum token_kind *kind,
                       struct error *error)
{
    const bool pieces = file->source.vocabulary.spelling == SPELLING_PIECES;
    const struct gguf_string text = file->texts[token];
    unsigned char byte;

    if (file->types == NULL) {
        *kind = pieces && parse_byte_name(text.data, text.size, &byte) ? TOKEN_BYTE : TOKEN_NORMAL;
        return true;
    }
    switch (file->types[token]) {
    case 1: /* normal */
        *kind = TOKEN_NORMAL;
        return true;
    case 2: /* unknown */
    case 3: /* control */
        *kind = TOKEN_SPECIAL;
        return true;
    case 4: /* user-defined */
        *kind = TOKEN_ADDED;
        return true;
    case 5: /* unused */
        *kind = TOKEN_ABSENT;
        return true;
    case 6: /* byte */
        *kind = pieces ? TOKEN_BYTE : TOKEN_NORMAL;
        return true;
    default:
        return error_set(error, "%s: %s: token %zu is of type %lld; expected 1 to 6", file->path,
                         types_key, token, (long long)file->types[token]);
    }
}

static bool make_tokens(struct gguf_vocabulary *file, struct error *error)
{
    struct vocabulary_source *source = &file->source.vocabulary;

    source->tokens = calloc(source->token_count, sizeof *source->tokens);
    if (source->tokens == NULL)
        return error_set(error, "%s: out of memory for %zu tokens", file->path,
                         source->token_count);
    for (size_t i = 0; i < source->token_count; i++) {
        struct source_token *token = &source->tokens[i];

        token->text = file->texts[i].data;
        token->length = file->texts[i].size;
        if (!token_kind(file, i, &token->kind, error))
            return false;
        if (file->scores == NULL)
            continue;
        if (!isfinite(file->scores[i]))
            return error_set(error, "%s: %s: that of token %zu is not a finite number", file->path,
                             scores_key, i);
        token->score = file->scores[i];
    }
    return true;
}

static bool make_merges(struct gguf_vocabulary *file, struct error *error)
{
    struct vocabulary_source *source = &file->source.vocabulary;

    if (source->scored)
        return true;
    source->merges = calloc(source->merge_count + 1, sizeof *source->merges);
    if (source->merges == NULL)
        return error_set(error, "%s: out of memory for %zu merges", file->path,
                         source->merge_count);
    for (size_t i = 0; i < source->merge_count; i++) {
        if (!split_merge(file->merges[i].data, file->merges[i].size, &source->merges[i]))
            return error_set(error, "%s: %s: merge %zu is not two texts with a space between them",
                             file->path, source->merges_field, i);
    }
    return true;
}

/* TOKEN_NONE for those that the model does not have. */
static bool read_ids(struct gguf_vocabulary *file, struct error *error)
{
    struct vocabulary_source *source = &file->source.vocabulary;

    for (size_t i = 0; i < N_IDS; i++) {
        const int32_t usual = special_ids[i].usual;
        uint64_t value;

        file->ids[i] = TOKEN_NONE;
        if (!gguf_has(file->gguf, special_ids[i].key)) {
            if (source->spelling != SPELLING_PIECES || usual == TOKEN_NONE ||
                (size_t)usual >= source->token_count ||
                (file->types != NULL && source->tokens[usual].kind != TOKEN_SPECIAL))
                continue;
            value = (uint64_t)usual;
        } else if (!gguf_get_uint(file->gguf, special_ids[i].key, &value, error)) {
            return false;
        }
        if (value >= source->token_count)
            return error_set(error, "%s: %s: %llu, but there are %zu tokens", file->path,
                             special_ids[i].key, (unsigned long long)value, source->token_count);
        file->ids[i] = (int32_t)value;
        /* Whatever the types say, these are no text. */
        if (i != UNKNOWN || source->spelling == SPELLING_PIECES)
            source->tokens[value].kind = TOKEN_SPECIAL;
    }
    if (source->spelling == SPELLING_PIECES)
        source->unknown = file->ids[UNKNOWN];
    return true;
}

static bool read_rest(struct tokenizer *tokenizer, const struct gguf_vocabulary *file,
                      struct error *error)
{
    const enum pretokenizer_kind kind = file->source.pretokenizer;
    struct gguf_string chat_template;

    tokenizer->bos = file->ids[BOS];
    tokenizer->eos = file->ids[EOS];
    tokenizer_mark_end(tokenizer, file->ids[EOS]);
    tokenizer_mark_end(tokenizer, file->ids[EOT]);
    tokenizer_mark_end(tokenizer, file->ids[EOM]);
    tokenizer->wants_bos =
        tokenizer->bos != TOKEN_NONE &&
        (kind == PRETOKENIZER_LLAMA3 || kind == PRETOKENIZER_TEKKEN || kind == PRETOKENIZER_NONE);
    if (kind != PRETOKENIZER_NONE && !gguf_has(file->gguf, pre_key))
        tokenizer->doubt =
            "tokenizer.ggml.pre is missing: text is split in the way called default, "
            "which may not be the model's";
    if (!optional_bool(file->gguf, add_bos_key, &tokenizer->wants_bos, error))
        return false;
    if (tokenizer->wants_bos && tokenizer->bos == TOKEN_NONE)
        return error_set(error, "%s: %s: true, but there is no %s", file->path, add_bos_key,
                         special_ids[BOS].key);
    if (!gguf_has(file->gguf, template_key))
        return true;
    if (!gguf_get_string(file->gguf, template_key, &chat_template, error))
        return false;
    tokenizer->chat_template = strndup(chat_template.data, chat_template.size);
    if (tokenizer->chat_template == NULL)
        return error_set(error, "%s: %s: out of memory", file->path, template_key);
    return true;
}

bool tokenizer_read_gguf(struct tokenizer *tokenizer, const char *path, struct error *error)
{
    struct gguf_vocabulary file = {
        .path = path,
        .source.vocabulary =
            {
                .path = path,
                .tokens_field = "tokenizer.ggml.tokens",
                .merges_field = "tokenizer.ggml.merges",
            },
    };
    bool done = gguf_open(path, &file.gguf, error) && read_model(&file, error) &&
                read_arrays(&file, error) && make_tokens(&file, error) &&
                make_merges(&file, error) && read_ids(&file, error) &&
                tokenizer_build(tokenizer, &file.source, error) &&
                read_rest(tokenizer, &file, error);

    free(file.source.vocabulary.tokens);
    free(file.source.vocabulary.merges);
    free(file.texts);
    free(file.merges);
    free(file.types);
    free(file.scores);
    gguf_close(file.gguf);
    return done;
}
