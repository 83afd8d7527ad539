/* SPDX-License-Identifier: MIT */
/* The tokenizer of a Hugging Face folder: tokenizer.json and what lies beside it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "file_map.h"
#include "json_text.h"
#include "tokenizer_build.h"

/* Vocabularies of a quarter of a million tokens take 40 MB. */
#define MAX_JSON_BYTES ((size_t)128 << 20)

static bool file_exists(const char *path)
{
    return access(path, F_OK) == 0 || errno != ENOENT;
}

/* The object in an optional file; true with *root NULL if it does not exist. */
static bool load_optional(const char *path, json_t **root, struct error *error)
{
    *root = NULL;
    if (!file_exists(path))
        return true;
    *root = json_text_read(path, MAX_JSON_BYTES, NULL, error);
    return *root != NULL;
}

static bool json_is(const json_t *value, const char *text)
{
    return json_is_string(value) && strcmp(json_string_value(value), text) == 0;
}

/* Null and an absent field say the same. */
static bool json_is_nothing(const json_t *value)
{
    return value == NULL || json_is_null(value);
}

static bool json_has(const json_t *object, const char *field, const char *text)
{
    return json_is(json_object_get(object, field), text);
}

/* ByteLevel's use_regex and Metaspace's split are true where the file does not say. */
static bool json_is_on(const json_t *value)
{
    return value == NULL || json_is_true(value);
}

#define METASPACE "\xe2\x96\x81"

/* Metaspace, in the spellings of its versions. */
static bool json_metaspace(const json_t *part, struct tokenizer_source *source)
{
    const json_t *scheme = json_object_get(part, "prepend_scheme");
    const bool space = json_is_on(json_object_get(part, "add_prefix_space"));

    if (!json_has(part, "replacement", METASPACE))
        return false;
    if (scheme == NULL)
        source->prefix = space ? PREFIX_MISSING : PREFIX_NONE;
    else if (json_is(scheme, "always"))
        source->prefix = PREFIX_MISSING;
    else if (json_is(scheme, "first"))
        source->prefix = PREFIX_FIRST;
    else if (json_is(scheme, "never"))
        source->prefix = PREFIX_NONE;
    else
        return false;
    source->vocabulary.spelling = SPELLING_PIECES;
    source->pretokenizer =
        json_is_on(json_object_get(part, "split")) ? PRETOKENIZER_METASPACE : PRETOKENIZER_NONE;
    return true;
}

/* ByteLevel alone, or after what it works on; `first` is NULL if it is alone. */
static bool json_byte_level(const json_t *first, const json_t *last,
                            struct tokenizer_source *source)
{
    const json_t *prefix = json_object_get(last, "add_prefix_space");
    const bool use_regex = json_is_on(json_object_get(last, "use_regex"));
    const char *regex =
        json_string_value(json_object_get(json_object_get(first, "pattern"), "Regex"));

    if (!json_has(last, "type", "ByteLevel") || (first != NULL && !json_is_false(prefix)))
        return false;
    if (first == NULL) {
        source->pretokenizer = PRETOKENIZER_GPT2;
        source->prefix = json_is_on(prefix) ? PREFIX_MISSING : PREFIX_NONE;
        return use_regex;
    }
    if (json_has(first, "type", "Digits")) {
        source->pretokenizer = PRETOKENIZER_SMOLLM;
        return use_regex && json_is_true(json_object_get(first, "individual_digits"));
    }
    return json_has(first, "type", "Split") && regex != NULL && !use_regex &&
           json_has(first, "behavior", "Isolated") &&
           json_is_false(json_object_get(first, "invert")) &&
           pretokenizer_by_regex(regex, &source->pretokenizer);
}

/* After json_normalizer, which says whether a part is needed. */
static bool json_pretokenizer(const json_t *root, struct tokenizer_source *source,
                              struct error *error)
{
    const json_t *part = json_object_get(root, "pre_tokenizer");
    const json_t *parts = json_object_get(part, "pretokenizers");
    bool known;

    if (json_is_nothing(part) || (parts != NULL && json_array_size(parts) == 0)) {
        source->pretokenizer = PRETOKENIZER_NONE;
        known = source->vocabulary.spelling == SPELLING_PIECES;
    } else if (source->vocabulary.spelling == SPELLING_PIECES) {
        known = false;
    } else if (json_has(part, "type", "Metaspace")) {
        known = json_metaspace(part, source);
    } else if (json_has(part, "type", "Sequence")) {
        known = json_array_size(parts) == 2 &&
                json_byte_level(json_array_get(parts, 0), json_array_get(parts, 1), source);
    } else {
        known = json_byte_level(NULL, part, source);
    }
    if (known && source->vocabulary.spelling == SPELLING_ALPHABET &&
        json_is_true(json_object_get(json_object_get(root, "model"), "byte_fallback")))
        return error_set(error, "%s: model.byte_fallback: true is not supported with ByteLevel",
                         source->vocabulary.path);
    if (!known)
        return error_set(error,
                         "%s: pre_tokenizer: not supported; expected one of %s, or that of Llama-2",
                         source->vocabulary.path, PRETOKENIZER_NAMES);
    return true;
}

/* One normalizer that is no sequence; false if it is not known. */
static bool json_normalizer_part(const json_t *part, struct tokenizer_source *source)
{
    if (json_has(part, "type", "NFC")) {
        source->nfc = true;
        return true;
    }
    if (json_has(part, "type", "Prepend")) {
        source->prefix = PREFIX_ALL;
        return json_has(part, "prepend", METASPACE);
    }
    if (json_has(part, "type", "Replace")) {
        source->vocabulary.spelling = SPELLING_PIECES;
        return json_has(json_object_get(part, "pattern"), "String", " ") &&
               json_has(part, "content", METASPACE);
    }
    return false;
}

static bool json_normalizer(const json_t *normalizer, struct tokenizer_source *source,
                            struct error *error)
{
    json_t *parts = json_object_get(normalizer, "normalizers"), *part;
    bool known = true;
    size_t i;

    if (json_has(normalizer, "type", "Sequence")) {
        json_array_foreach(parts, i, part) known = known && json_normalizer_part(part, source);
    } else if (!json_is_nothing(normalizer)) {
        known = json_normalizer_part(normalizer, source);
    }
    if (!known || (source->prefix == PREFIX_ALL && source->vocabulary.spelling != SPELLING_PIECES))
        return error_set(error,
                         "%s: normalizer: not supported; expected NFC, that of Llama-2, or none",
                         source->vocabulary.path);
    return true;
}

/* The fields of the model that change how it merges. */
static bool json_model_options(const json_t *model, struct tokenizer_source *source,
                               struct error *error)
{
    static const char *const refused[] = {"dropout", "continuing_subword_prefix",
                                          "end_of_word_suffix"};
    static const char *const options[] = {"ignore_merges", "byte_fallback", "fuse_unk"};
    const char *path = source->vocabulary.path;
    const json_t *type = json_object_get(model, "type");

    if (!json_is_object(model) || (type != NULL && !json_is(type, "BPE")))
        return error_set(error, "%s: model.type: not supported; expected \"BPE\"", path);
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        const json_t *value = json_object_get(model, refused[i]);

        if (!json_is_nothing(value) && !json_is(value, "") &&
            !(json_is_number(value) && json_number_value(value) == 0))
            return error_set(error, "%s: model.%s: not supported; expected null", path, refused[i]);
    }
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        const json_t *value = json_object_get(model, options[i]);

        if (value != NULL && !json_is_boolean(value))
            return error_set(error, "%s: model.%s: expected true or false", path, options[i]);
    }
    source->vocabulary.ignore_merges = json_is_true(json_object_get(model, "ignore_merges"));
    source->vocabulary.fuse_unknown = json_is_true(json_object_get(model, "fuse_unk"));
    return true;
}

static bool json_token_id(const json_t *value, size_t limit, size_t *id)
{
    json_int_t number = json_integer_value(value);

    if (!json_is_integer(value) || number < 0 || number >= INT32_MAX || (size_t)number >= limit)
        return false;
    *id = (size_t)number;
    return true;
}

static bool json_vocabulary(const json_t *root, size_t file_size, bool byte_fallback,
                            struct vocabulary_source *source, struct error *error)
{
    /* A token takes at least `"a":0,` of the file; ids may have gaps, but memory follows the file.
     */
    const size_t limit = file_size / 4;
    json_t *vocabulary = json_object_get(json_object_get(root, "model"), "vocab");
    json_t *added = json_object_get(root, "added_tokens"), *value;
    const char *text;
    unsigned char byte;
    size_t id, i;

    if (json_object_size(vocabulary) == 0)
        return error_set(error, "%s: %s: expected an object with tokens", source->path,
                         source->tokens_field);
    if (added != NULL && !json_is_array(added))
        return error_set(error, "%s: added_tokens: expected an array", source->path);
    json_object_foreach(vocabulary, text, value)
    {
        if (!json_token_id(value, limit, &id))
            return error_set(error, "%s: %s: '%.60s' has no valid id", source->path,
                             source->tokens_field, text);
        if (id >= source->token_count)
            source->token_count = id + 1;
    }
    json_array_foreach(added, i, value)
    {
        if (!json_token_id(json_object_get(value, "id"), limit, &id))
            return error_set(error, "%s: added_tokens[%zu].id: not a valid id", source->path, i);
        if (id >= source->token_count)
            source->token_count = id + 1;
    }
    source->tokens = calloc(source->token_count, sizeof *source->tokens);
    if (source->tokens == NULL)
        return error_set(error, "%s: out of memory for %zu tokens", source->path,
                         source->token_count);

    json_object_foreach(vocabulary, text, value)
    {
        struct source_token *token = &source->tokens[json_integer_value(value)];

        if (token->text != NULL)
            return error_set(error, "%s: %s: '%.60s' and '%.60s' have the same id", source->path,
                             source->tokens_field, token->text, text);
        *token = (struct source_token){.text = text, .length = strlen(text), .kind = TOKEN_NORMAL};
        if (byte_fallback && parse_byte_name(text, token->length, &byte))
            token->kind = TOKEN_BYTE;
    }
    json_array_foreach(added, i, value)
    {
        struct source_token *token =
            &source->tokens[json_integer_value(json_object_get(value, "id"))];
        const json_t *content = json_object_get(value, "content");
        const json_t *listed;

        if (!json_is_string(content) || json_string_length(content) == 0)
            return error_set(error, "%s: added_tokens[%zu].content: expected a text", source->path,
                             i);
        text = json_string_value(content);
        listed = json_object_get(vocabulary, text);
        if ((token->text != NULL && strcmp(token->text, text) != 0) ||
            (listed != NULL && token->text == NULL))
            return error_set(error, "%s: added_tokens[%zu]: '%.60s' has another id in %s",
                             source->path, i, text, source->tokens_field);
        if (json_is_true(json_object_get(value, "single_word")) ||
            json_is_true(json_object_get(value, "lstrip")) ||
            json_is_true(json_object_get(value, "rstrip")))
            return error_set(error,
                             "%s: added_tokens[%zu]: '%.60s': single_word, lstrip and rstrip are "
                             "not supported",
                             source->path, i, text);
        *token = (struct source_token){
            .text = text,
            .length = json_string_length(content),
            .kind = json_is_true(json_object_get(value, "special")) ? TOKEN_SPECIAL : TOKEN_ADDED,
            .normalized = json_is_true(json_object_get(value, "normalized")),
        };
    }
    return true;
}

static bool json_merges(const json_t *model, struct vocabulary_source *source, struct error *error)
{
    json_t *merges = json_object_get(model, "merges"), *value;
    size_t i;

    if (!json_is_array(merges))
        return error_set(error, "%s: %s: expected an array", source->path, source->merges_field);
    source->merge_count = json_array_size(merges);
    source->merges = calloc(source->merge_count + 1, sizeof *source->merges);
    if (source->merges == NULL)
        return error_set(error, "%s: out of memory for %zu merges", source->path,
                         source->merge_count);
    json_array_foreach(merges, i, value)
    {
        const json_t *left = json_array_get(value, 0), *right = json_array_get(value, 1);

        if (json_is_string(value)) {
            if (!split_merge(json_string_value(value), json_string_length(value),
                             &source->merges[i]))
                return error_set(error,
                                 "%s: %s: merge %zu is not two texts with a space between them",
                                 source->path, source->merges_field, i);
        } else if (json_array_size(value) == 2 && json_is_string(left) && json_is_string(right)) {
            source->merges[i] = (struct source_merge){
                .left = json_string_value(left),
                .left_length = json_string_length(left),
                .right = json_string_value(right),
                .right_length = json_string_length(right),
            };
        } else {
            return error_set(error, "%s: %s: merge %zu is neither a text nor a pair of texts",
                             source->path, source->merges_field, i);
        }
    }
    return true;
}

/* The token for what the vocabulary does not know. */
static bool json_unknown(const json_t *model, struct vocabulary_source *source, struct error *error)
{
    const char *text = json_string_value(json_object_get(model, "unk_token"));

    source->unknown = TOKEN_NONE;
    for (size_t i = 0; text != NULL && i < source->token_count; i++) {
        if (source->tokens[i].text != NULL && strcmp(source->tokens[i].text, text) == 0)
            source->unknown = (int32_t)i;
    }
    if (text != NULL && source->unknown == TOKEN_NONE)
        return error_set(error, "%s: model.unk_token: '%.60s' is not a token", source->path, text);
    return true;
}

/* The text of the token that the post-processor puts before a text, or NULL: Llama-3's
 * tokenizer.json says in this way that it wants a BOS. */
static const char *json_template_start(const json_t *processor)
{
    json_t *parts = json_object_get(processor, "processors"), *part;
    const char *start;
    size_t i;

    if (json_is(json_object_get(processor, "type"), "TemplateProcessing")) {
        const json_t *first = json_array_get(json_object_get(processor, "single"), 0);

        return json_string_value(json_object_get(json_object_get(first, "SpecialToken"), "id"));
    }
    json_array_foreach(parts, i, part)
    {
        if (json_is(json_object_get(part, "type"), "TemplateProcessing") &&
            (start = json_template_start(part)) != NULL)
            return start;
    }
    return NULL;
}

/* A token of tokenizer_config.json: a text, or an object with the text; TOKEN_NONE if neither. */
static int32_t json_config_token(const struct tokenizer *tokenizer, const json_t *config,
                                 const char *field)
{
    const json_t *value = json_object_get(config, field);
    const json_t *text = json_is_object(value) ? json_object_get(value, "content") : value;

    if (!json_is_string(text))
        return TOKEN_NONE;
    return tokenizer_find(tokenizer, json_string_value(text), json_string_length(text));
}

static bool json_end_ids(struct tokenizer *tokenizer, const char *path, const json_t *config,
                         struct error *error)
{
    const json_t *field = json_object_get(config, "eos_token_id");
    size_t count = json_is_array(field) ? json_array_size(field) : !json_is_nothing(field);

    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_is_array(field) ? json_array_get(field, i) : field;
        size_t id;

        if (!json_token_id(value, tokenizer_count(tokenizer), &id))
            return error_set(error, "%s: eos_token_id: expected ids below the token count, %zu",
                             path, tokenizer_count(tokenizer));
        tokenizer_mark_end(tokenizer, (int32_t)id);
    }
    return true;
}

/* eos_token_id of an optional file: an id or an array of ids. */
static bool read_end_ids(struct tokenizer *tokenizer, const char *folder, const char *name,
                         struct error *error)
{
    char *path = path_join(folder, name, error);
    json_t *config = NULL;
    const bool done = path != NULL && load_optional(path, &config, error) &&
                      json_end_ids(tokenizer, path, config, error);

    json_decref(config);
    free(path);
    return done;
}

/* A text, or an array of named templates of which "default" is meant; NULL if there is none. */
static const char *json_chat_template(const json_t *config)
{
    json_t *field = json_object_get(config, "chat_template"), *value;
    size_t i;

    if (json_is_string(field))
        return json_string_value(field);
    json_array_foreach(field, i, value)
    {
        if (json_is(json_object_get(value, "name"), "default"))
            return json_string_value(json_object_get(value, "template"));
    }
    return NULL;
}

static bool read_chat_template(struct tokenizer *tokenizer, const char *folder,
                               const json_t *config, struct error *error)
{
    char *path = path_join(folder, "chat_template.jinja", error);
    const char *text = json_chat_template(config);
    struct file_map map = {0};
    bool done = false;

    if (path == NULL || (file_exists(path) && !file_map_open(path, &map, error)))
        goto out;
    if (map.data != NULL)
        tokenizer->chat_template = strndup((const char *)map.data, map.size);
    else if (text != NULL)
        tokenizer->chat_template = strdup(text);
    if (tokenizer->chat_template == NULL && (map.data != NULL || text != NULL)) {
        error_set(error, "%s: out of memory", path);
        goto out;
    }
    done = true;
out:
    file_map_close(&map);
    free(path);
    return done;
}

static bool read_tokenizer_json(struct tokenizer *tokenizer, const char *path, struct error *error)
{
    struct tokenizer_source source = {
        .vocabulary =
            {
                .path = path,
                .tokens_field = "model.vocab",
                .merges_field = "model.merges",
            },
    };
    json_t *root = NULL;
    const json_t *model;
    const char *start;
    size_t size = 0;
    bool done = false;

    root = json_text_read(path, MAX_JSON_BYTES, &size, error);
    if (root == NULL)
        goto out;
    model = json_object_get(root, "model");
    if (!json_model_options(model, &source, error) ||
        !json_normalizer(json_object_get(root, "normalizer"), &source, error) ||
        !json_pretokenizer(root, &source, error) ||
        !json_vocabulary(root, size, json_is_true(json_object_get(model, "byte_fallback")),
                         &source.vocabulary, error) ||
        !json_unknown(model, &source.vocabulary, error) ||
        !json_merges(model, &source.vocabulary, error) ||
        !tokenizer_build(tokenizer, &source, error))
        goto out;
    start = json_template_start(json_object_get(root, "post_processor"));
    if (start != NULL) {
        tokenizer->bos = tokenizer_find(tokenizer, start, strlen(start));
        tokenizer->wants_bos = tokenizer->bos != TOKEN_NONE;
    }
    done = true;
out:
    free(source.vocabulary.tokens);
    free(source.vocabulary.merges);
    json_decref(root);
    return done;
}

bool tokenizer_read_folder(struct tokenizer *tokenizer, const char *folder, struct error *error)
{
    char *tokenizer_path = path_join(folder, "tokenizer.json", error);
    char *config_path = path_join(folder, "tokenizer_config.json", error);
    json_t *config = NULL;
    const json_t *add_bos;
    int32_t bos;
    bool done = false;

    if (tokenizer_path == NULL || config_path == NULL ||
        !read_tokenizer_json(tokenizer, tokenizer_path, error) ||
        !load_optional(config_path, &config, error) ||
        !read_chat_template(tokenizer, folder, config, error) ||
        !read_end_ids(tokenizer, folder, "config.json", error) ||
        !read_end_ids(tokenizer, folder, "generation_config.json", error))
        goto out;
    tokenizer->eos = json_config_token(tokenizer, config, "eos_token");
    tokenizer_mark_end(tokenizer, tokenizer->eos);
    bos = json_config_token(tokenizer, config, "bos_token");
    if (bos != TOKEN_NONE)
        tokenizer->bos = bos;
    add_bos = json_object_get(config, "add_bos_token");
    if (json_is_boolean(add_bos))
        tokenizer->wants_bos = json_is_true(add_bos) && tokenizer->bos != TOKEN_NONE;
    done = true;
out:
    json_decref(config);
    free(tokenizer_path);
    free(config_path);
    return done;
}
