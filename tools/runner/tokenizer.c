/* SPDX-License-Identifier: MIT */
/* Byte-level BPE as GGUF files and Hugging Face folders describe it: text to token ids and back. */
#include "tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "file_map.h"
#include "gguf.h"
#include "pretokenizer.h"

#define NONE UINT32_MAX

enum token_kind {
    TOKEN_ABSENT,  /* an id that the vocabulary leaves out or declares unused */
    TOKEN_NORMAL,  /* what merging gives */
    TOKEN_ADDED,   /* found in every text before merging */
    TOKEN_SPECIAL, /* found in text only where the caller parses special tokens */
};

struct token {
    size_t offset; /* in tokenizer.bytes */
    uint32_t length;
    uint8_t kind;
    bool end;
};

struct added_token {
    const char *text;
    size_t length;
    int32_t id;
    bool special;
};

/* Sorted by text, so that all tokens with one beginning are neighbours. */
struct added_set {
    struct added_token *tokens;
    size_t count;
    bool first_bytes[256];
};

struct merge {
    int32_t left, right;
    uint32_t rank; /* NONE: an empty place of the table */
    int32_t result;
};

struct tokenizer {
    struct pretokenizer *pretokenizer;
    bool nfc, ignore_merges;
    struct token *tokens;
    size_t count, longest;
    char *bytes;
    uint32_t *index; /* open addressing: ids by text; NONE is empty */
    size_t index_mask;
    struct merge *merges; /* open addressing, by pair */
    size_t merges_mask;
    int32_t *results; /* by rank */
    int32_t byte_tokens[256];
    struct added_set added[2]; /* found before normalization, and after it */
    int32_t bos;
    bool wants_bos;
    char *chat_template;
};

/* A vocabulary as a file tells it; all text belongs to the file's reader. */
struct source_token {
    const char *text;
    size_t length;
    enum token_kind kind;
    bool normalized; /* an added token: found after normalization */
};

struct source_merge {
    const char *left, *right;
    size_t left_length, right_length;
};

struct source {
    const char *path;
    const char *tokens_field, *merges_field;
    struct source_token *tokens;
    size_t token_count;
    struct source_merge *merges;
    size_t merge_count;
    const char *unknown; /* the token for a byte that has none; NULL: it is left out */
    enum pretokenizer_kind pretokenizer;
    bool nfc, ignore_merges;
};

/* ---- Lists and tables ---- */

bool token_list_append(struct token_list *list, int32_t id, struct error *error)
{
    if (list->count == list->capacity) {
        size_t capacity = list->capacity == 0 ? 256 : list->capacity, bytes;
        int32_t *ids;

        if (__builtin_mul_overflow(capacity, 2, &capacity) ||
            __builtin_mul_overflow(capacity, sizeof *ids, &bytes) ||
            (ids = realloc(list->ids, bytes)) == NULL)
            return error_set(error, "tokenizer: out of memory for %zu token ids", list->count);
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->count++] = id;
    return true;
}

void token_list_free(struct token_list *list)
{
    free(list->ids);
    memset(list, 0, sizeof *list);
}

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

static const char *token_bytes(const struct tokenizer *tokenizer, int32_t id)
{
    return tokenizer->bytes + tokenizer->tokens[id].offset;
}

/* The place in the index that holds the text's id, or the empty one where it would be. */
static uint32_t *index_place(const struct tokenizer *tokenizer, const char *text, size_t length)
{
    size_t place = XXH3_64bits(text, length) & tokenizer->index_mask;

    for (;; place = (place + 1) & tokenizer->index_mask) {
        uint32_t id = tokenizer->index[place];

        if (id == NONE || (tokenizer->tokens[id].length == length &&
                           memcmp(token_bytes(tokenizer, (int32_t)id), text, length) == 0))
            return &tokenizer->index[place];
    }
}

static struct merge *merge_place(const struct tokenizer *tokenizer, int32_t left, int32_t right)
{
    const int32_t pair[2] = {left, right};
    size_t place = XXH3_64bits(pair, sizeof pair) & tokenizer->merges_mask;

    for (;; place = (place + 1) & tokenizer->merges_mask) {
        struct merge *merge = &tokenizer->merges[place];

        if (merge->rank == NONE || (merge->left == left && merge->right == right))
            return merge;
    }
}

/* ---- Added tokens ---- */

static int compare_added(const void *left_, const void *right_)
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

/* The first of [low, high), which agree in `depth` bytes, whose next byte is at least `byte`. */
static size_t added_bound(const struct added_set *set, size_t low, size_t high, size_t depth,
                          int byte)
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

/* The longest token of the set that `text` begins with, or NULL. */
static const struct added_token *added_match(const struct added_set *set, const char *text,
                                             size_t length)
{
    const struct added_token *longest = NULL;
    size_t low = 0, high = set->count;

    for (size_t depth = 0; depth < length; depth++) {
        int byte = (unsigned char)text[depth];

        low = added_bound(set, low, high, depth, byte);
        high = added_bound(set, low, high, depth, byte + 1);
        if (low == high)
            break;
        if (set->tokens[low].length == depth + 1)
            longest = &set->tokens[low];
    }
    return longest;
}

static const struct added_token *added_find(const struct added_set *set, const char *text,
                                            size_t length)
{
    const struct added_token *token = added_match(set, text, length);

    return token != NULL && token->length == length ? token : NULL;
}

/* ---- Building ---- */

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

static bool build_tokens(struct tokenizer *tokenizer, const struct source *source,
                         const int16_t *alphabet, struct error *error)
{
    size_t total = 0, offset = 0, size;

    for (size_t i = 0; i < source->token_count; i++) {
        if (source->tokens[i].length > INT32_MAX ||
            __builtin_add_overflow(total, source->tokens[i].length, &total))
            return error_set(error, "%s: %s: the text of token %zu is too long", source->path,
                             source->tokens_field, i);
    }
    size = table_size(source->token_count);
    tokenizer->count = source->token_count;
    tokenizer->tokens =
        allocate_array(tokenizer->count, sizeof *tokenizer->tokens, source->path, error);
    tokenizer->bytes = allocate_array(total, 1, source->path, error);
    tokenizer->index = allocate_array(size, sizeof *tokenizer->index, source->path, error);
    if (tokenizer->tokens == NULL || tokenizer->bytes == NULL || tokenizer->index == NULL)
        return false;
    tokenizer->index_mask = size - 1;
    memset(tokenizer->index, 0xff, size * sizeof *tokenizer->index);

    for (size_t i = 0; i < tokenizer->count; i++) {
        const struct source_token *from = &source->tokens[i];
        struct token *token = &tokenizer->tokens[i];
        size_t length = 0;
        bool indexed = false;

        token->kind = (uint8_t)from->kind;
        token->offset = offset;
        if (from->length == 0)
            token->kind = TOKEN_ABSENT;
        if (token->kind == TOKEN_ABSENT)
            continue;
        if (from->kind == TOKEN_NORMAL)
            indexed = from_alphabet(alphabet, from->text, from->length, tokenizer->bytes + offset,
                                    &length);
        if (!indexed) {
            memcpy(tokenizer->bytes + offset, from->text, from->length);
            length = from->length;
        }
        token->length = (uint32_t)length;
        offset += length;
        if (length > tokenizer->longest)
            tokenizer->longest = length;
        if (indexed) {
            uint32_t *place = index_place(tokenizer, tokenizer->bytes + token->offset, length);

            if (*place != NONE)
                return error_set(error, "%s: %s: tokens %u and %zu have the same text",
                                 source->path, source->tokens_field, *place, i);
            *place = (uint32_t)i;
        }
    }
    return true;
}

static bool build_byte_tokens(struct tokenizer *tokenizer, const struct source *source,
                              struct error *error)
{
    int32_t unknown = TOKEN_NONE;

    if (source->unknown != NULL) {
        unknown = tokenizer_find(tokenizer, source->unknown, strlen(source->unknown));
        if (unknown == TOKEN_NONE)
            return error_set(error, "%s: model.unk_token: '%.60s' is not a token", source->path,
                             source->unknown);
    }
    for (int byte = 0; byte < 256; byte++) {
        char text = (char)byte;
        uint32_t id = *index_place(tokenizer, &text, 1);

        tokenizer->byte_tokens[byte] = id == NONE ? unknown : (int32_t)id;
    }
    return true;
}

static bool build_added(struct tokenizer *tokenizer, const struct source *source,
                        struct error *error)
{
    for (int normalized = 0; normalized < 2; normalized++) {
        struct added_set *set = &tokenizer->added[normalized];
        size_t count = 0;

        for (size_t i = 0; i < tokenizer->count; i++)
            count += tokenizer->tokens[i].kind > TOKEN_NORMAL &&
                     source->tokens[i].normalized == normalized;
        set->tokens = allocate_array(count, sizeof *set->tokens, source->path, error);
        if (set->tokens == NULL)
            return false;
        for (size_t i = 0; i < tokenizer->count; i++) {
            const struct token *token = &tokenizer->tokens[i];
            const char *text = tokenizer->bytes + token->offset;

            if (token->kind <= TOKEN_NORMAL || source->tokens[i].normalized != normalized)
                continue;
            set->tokens[set->count++] = (struct added_token){
                .text = text,
                .length = token->length,
                .id = (int32_t)i,
                .special = token->kind == TOKEN_SPECIAL,
            };
            set->first_bytes[(unsigned char)text[0]] = true;
        }
        qsort(set->tokens, set->count, sizeof *set->tokens, compare_added);
    }
    return true;
}

/* The id of a token as a merge names it: by its text in the alphabet. */
static int32_t find_merged(const struct tokenizer *tokenizer, const int16_t *alphabet,
                           const char *text, size_t length, char *scratch)
{
    size_t count;
    uint32_t id;

    if (length > 2 * tokenizer->longest || !from_alphabet(alphabet, text, length, scratch, &count))
        return TOKEN_NONE;
    id = *index_place(tokenizer, scratch, count);
    if (id != NONE)
        return (int32_t)id;
    /* An added token may be part of the vocabulary as well. */
    return tokenizer_find(tokenizer, scratch, count);
}

static bool build_merges(struct tokenizer *tokenizer, const struct source *source,
                         const int16_t *alphabet, struct error *error)
{
    size_t size = table_size(source->merge_count);
    char *scratch = NULL;
    bool done = false;

    if (source->merge_count > INT32_MAX)
        return error_set(error, "%s: %s: too many merges", source->path, source->merges_field);
    tokenizer->merges = allocate_array(size, sizeof *tokenizer->merges, source->path, error);
    tokenizer->results =
        allocate_array(source->merge_count, sizeof *tokenizer->results, source->path, error);
    /* Two texts side by side, each at most twice as long as the longest token's bytes. */
    scratch = allocate_array(tokenizer->longest, 4, source->path, error);
    if (tokenizer->merges == NULL || tokenizer->results == NULL || scratch == NULL)
        goto out;
    tokenizer->merges_mask = size - 1;
    for (size_t i = 0; i < size; i++)
        tokenizer->merges[i].rank = NONE;

    for (size_t rank = 0; rank < source->merge_count; rank++) {
        const struct source_merge *from = &source->merges[rank];
        int32_t left, right, result;
        struct merge *merge;
        size_t length;

        left = find_merged(tokenizer, alphabet, from->left, from->left_length, scratch);
        right = find_merged(tokenizer, alphabet, from->right, from->right_length, scratch);
        if (left == TOKEN_NONE || right == TOKEN_NONE) {
            const char *name = left == TOKEN_NONE ? from->left : from->right;
            size_t name_length = left == TOKEN_NONE ? from->left_length : from->right_length;

            error_set(error, "%s: %s: merge %zu names '%.*s', which is not a token", source->path,
                      source->merges_field, rank, name_length > 60 ? 60 : (int)name_length, name);
            goto out;
        }
        length = tokenizer->tokens[left].length;
        memcpy(scratch, token_bytes(tokenizer, left), length);
        memcpy(scratch + length, token_bytes(tokenizer, right), tokenizer->tokens[right].length);
        length += tokenizer->tokens[right].length;
        result = *index_place(tokenizer, scratch, length) == NONE
                     ? tokenizer_find(tokenizer, scratch, length)
                     : (int32_t)*index_place(tokenizer, scratch, length);
        if (result == TOKEN_NONE) {
            error_set(error, "%s: %s: merge %zu, '%.*s' and '%.*s', makes no token", source->path,
                      source->merges_field, rank,
                      from->left_length > 60 ? 60 : (int)from->left_length, from->left,
                      from->right_length > 60 ? 60 : (int)from->right_length, from->right);
            goto out;
        }
        tokenizer->results[rank] = result;
        /* Of two equal merges the later one counts, as in the reference. */
        merge = merge_place(tokenizer, left, right);
        *merge = (struct merge){left, right, (uint32_t)rank, result};
    }
    done = true;
out:
    free(scratch);
    return done;
}

/* Special tokens at which every model that has them stops. */
static const char *const end_names[] = {
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>",
};

static bool build(struct tokenizer *tokenizer, const struct source *source, struct error *error)
{
    int16_t alphabet[ALPHABET_END];

    tokenizer->bos = TOKEN_NONE;
    tokenizer->nfc = source->nfc;
    tokenizer->ignore_merges = source->ignore_merges;
    make_alphabet(alphabet);
    if (!pretokenizer_open(source->pretokenizer, &tokenizer->pretokenizer, error) ||
        !build_tokens(tokenizer, source, alphabet, error) ||
        !build_added(tokenizer, source, error) || !build_byte_tokens(tokenizer, source, error) ||
        !build_merges(tokenizer, source, alphabet, error))
        return false;
    for (size_t i = 0; i < sizeof end_names / sizeof end_names[0]; i++) {
        int32_t id = tokenizer_find(tokenizer, end_names[i], strlen(end_names[i]));

        if (tokenizer_is_special(tokenizer, id))
            tokenizer->tokens[id].end = true;
    }
    return true;
}

/* Finds the one space of "left right". */
static bool split_merge(const char *text, size_t length, struct source_merge *merge)
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

static bool merge_text_error(const struct source *source, size_t merge, struct error *error)
{
    return error_set(error, "%s: %s: merge %zu is not two texts with a space between them",
                     source->path, source->merges_field, merge);
}

/* ---- GGUF ---- */

static bool gguf_kind(int64_t type, enum token_kind *kind)
{
    switch (type) {
    case 1: /* normal */
    case 6: /* byte */
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
    default:
        return false;
    }
}

/* An optional id; *id becomes TOKEN_NONE if the file does not say. */
static bool gguf_token_id(const struct gguf *gguf, const char *path, const char *key, size_t count,
                          int32_t *id, struct error *error)
{
    uint64_t value;

    *id = TOKEN_NONE;
    if (!gguf_has(gguf, key))
        return true;
    if (!gguf_get_uint(gguf, key, &value, error))
        return false;
    if (value >= count)
        return error_set(error, "%s: %s: %llu, but there are %zu tokens", path, key,
                         (unsigned long long)value, count);
    *id = (int32_t)value;
    return true;
}

static bool gguf_pretokenizer(const struct gguf *gguf, struct source *source, struct error *error)
{
    static const char model_key[] = "tokenizer.ggml.model", pre_key[] = "tokenizer.ggml.pre";
    struct gguf_string model, pre;

    if (!gguf_get_string(gguf, model_key, &model, error))
        return false;
    if (model.size != 4 || memcmp(model.data, "gpt2", 4) != 0)
        return error_set(error, "%s: %s: '%.*s' is not supported; expected 'gpt2'", source->path,
                         model_key, model.size > 60 ? 60 : (int)model.size, model.data);
    if (!gguf_get_string(gguf, pre_key, &pre, error))
        return false;
    if (!pretokenizer_by_name(pre.data, pre.size, &source->pretokenizer))
        return error_set(error, "%s: %s: '%.*s' is not supported; expected one of %s", source->path,
                         pre_key, pre.size > 60 ? 60 : (int)pre.size, pre.data, PRETOKENIZER_NAMES);
    /* The file does not say these; the models behind the names do. */
    source->nfc = source->pretokenizer == PRETOKENIZER_QWEN2;
    source->ignore_merges = source->pretokenizer == PRETOKENIZER_LLAMA3;
    return true;
}

static bool gguf_bos(struct tokenizer *tokenizer, const struct gguf *gguf,
                     const struct source *source, struct error *error)
{
    static const char key[] = "tokenizer.ggml.add_bos_token";

    tokenizer->wants_bos =
        source->pretokenizer == PRETOKENIZER_LLAMA3 && tokenizer->bos != TOKEN_NONE;
    if (!gguf_has(gguf, key))
        return true;
    if (!gguf_get_bool(gguf, key, &tokenizer->wants_bos, error))
        return false;
    if (tokenizer->wants_bos && tokenizer->bos == TOKEN_NONE)
        return error_set(error, "%s: %s: true, but there is no tokenizer.ggml.bos_token_id",
                         source->path, key);
    return true;
}

static bool read_gguf(struct tokenizer *tokenizer, const char *path, struct error *error)
{
    static const char *const id_keys[] = {
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    };
    static const char types_key[] = "tokenizer.ggml.token_type",
                      template_key[] = "tokenizer.chat_template";
    enum { N_ID_KEYS = sizeof id_keys / sizeof id_keys[0] };
    struct source source = {
        .path = path,
        .tokens_field = "tokenizer.ggml.tokens",
        .merges_field = "tokenizer.ggml.merges",
    };
    struct gguf *gguf = NULL;
    struct gguf_string *texts = NULL, *merges = NULL, chat_template;
    int64_t *types = NULL;
    int32_t ids[N_ID_KEYS];
    size_t type_count;
    bool done = false;

    if (!gguf_open(path, &gguf, error) || !gguf_pretokenizer(gguf, &source, error) ||
        !gguf_get_strings(gguf, source.tokens_field, &texts, &source.token_count, error) ||
        !gguf_get_strings(gguf, source.merges_field, &merges, &source.merge_count, error))
        goto out;
    if (source.token_count == 0 || source.token_count > INT32_MAX) {
        error_set(error, "%s: %s: %zu tokens; expected 1 to %d", path, source.tokens_field,
                  source.token_count, INT32_MAX);
        goto out;
    }
    if (gguf_has(gguf, types_key)) {
        if (!gguf_get_ints(gguf, types_key, &types, &type_count, error))
            goto out;
        if (type_count != source.token_count) {
            error_set(error, "%s: %s: %zu types, but there are %zu tokens", path, types_key,
                      type_count, source.token_count);
            goto out;
        }
    }
    source.tokens = allocate_array(source.token_count, sizeof *source.tokens, path, error);
    source.merges = allocate_array(source.merge_count, sizeof *source.merges, path, error);
    if (source.tokens == NULL || source.merges == NULL)
        goto out;
    for (size_t i = 0; i < source.token_count; i++) {
        struct source_token *token = &source.tokens[i];

        token->text = texts[i].data;
        token->length = texts[i].size;
        token->kind = TOKEN_NORMAL;
        if (types != NULL && !gguf_kind(types[i], &token->kind)) {
            error_set(error, "%s: %s: token %zu is of type %lld; expected 1 to 6", path, types_key,
                      i, (long long)types[i]);
            goto out;
        }
    }
    for (size_t i = 0; i < source.merge_count; i++) {
        if (!split_merge(merges[i].data, merges[i].size, &source.merges[i])) {
            merge_text_error(&source, i, error);
            goto out;
        }
    }
    for (size_t i = 0; i < N_ID_KEYS; i++) {
        if (!gguf_token_id(gguf, path, id_keys[i], source.token_count, &ids[i], error))
            goto out;
        /* Whatever the types say, these are no text. */
        if (ids[i] != TOKEN_NONE)
            source.tokens[ids[i]].kind = TOKEN_SPECIAL;
    }
    if (!build(tokenizer, &source, error))
        goto out;
    tokenizer->bos = ids[0];
    for (size_t i = 1; i < N_ID_KEYS; i++) {
        if (ids[i] != TOKEN_NONE)
            tokenizer->tokens[ids[i]].end = true;
    }
    if (!gguf_bos(tokenizer, gguf, &source, error))
        goto out;
    if (gguf_has(gguf, template_key)) {
        if (!gguf_get_string(gguf, template_key, &chat_template, error))
            goto out;
        tokenizer->chat_template = strndup(chat_template.data, chat_template.size);
        if (tokenizer->chat_template == NULL) {
            error_set(error, "%s: %s: out of memory", path, template_key);
            goto out;
        }
    }
    done = true;
out:
    free(source.tokens);
    free(source.merges);
    free(texts);
    free(merges);
    free(types);
    gguf_close(gguf);
    return done;
}

/* ---- Hugging Face folders ---- */

/* "folder/name", which the caller frees; NULL without memory. */
static char *join_path(const char *folder, const char *name, struct error *error)
{
    size_t size = strlen(folder) + 1 + strlen(name) + 1;
    char *path = malloc(size);

    if (path == NULL) {
        error_set(error, "%s: out of memory", folder);
        return NULL;
    }
    snprintf(path, size, "%s/%s", folder, name);
    return path;
}

/* Maps an optional file: true with map->data NULL if it does not exist. */
static bool map_optional(const char *path, struct file_map *map, struct error *error)
{
    memset(map, 0, sizeof *map);
    if (access(path, F_OK) != 0 && errno == ENOENT)
        return true;
    return file_map_open(path, map, error);
}

/* The root of a JSON file is an object. *root stays NULL if an optional file does not exist. */
static bool load_object(const char *path, bool optional, json_t **root, size_t *size,
                        struct error *error)
{
    struct file_map map = {0};
    json_error_t json_error;
    bool done = false;

    *root = NULL;
    if (optional ? !map_optional(path, &map, error) : !file_map_open(path, &map, error))
        return false;
    if (map.data == NULL)
        return true;
    if (size != NULL)
        *size = map.size;
    *root = json_loadb((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, &json_error);
    if (*root == NULL)
        error_set(error, "%s: line %d: %s", path, json_error.line, json_error.text);
    else if (!json_is_object(*root))
        error_set(error, "%s: expected a JSON object", path);
    else
        done = true;
    file_map_close(&map);
    return done;
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

static bool json_pretokenizer(const json_t *root, struct source *source, struct error *error)
{
    const json_t *sequence = json_object_get(root, "pre_tokenizer");
    const json_t *parts = json_object_get(sequence, "pretokenizers");
    const json_t *first = json_array_get(parts, 0), *last = json_array_get(parts, 1);
    const json_t *use_regex = json_object_get(last, "use_regex");

    if (json_is(json_object_get(sequence, "type"), "Sequence") && json_array_size(parts) == 2 &&
        json_is(json_object_get(last, "type"), "ByteLevel") &&
        json_is_false(json_object_get(last, "add_prefix_space"))) {
        const char *regex =
            json_string_value(json_object_get(json_object_get(first, "pattern"), "Regex"));

        if (json_is(json_object_get(first, "type"), "Digits") &&
            json_is_true(json_object_get(first, "individual_digits")) &&
            (use_regex == NULL || json_is_true(use_regex))) {
            source->pretokenizer = PRETOKENIZER_SMOLLM;
            return true;
        }
        if (json_is(json_object_get(first, "type"), "Split") && regex != NULL &&
            json_is(json_object_get(first, "behavior"), "Isolated") &&
            json_is_false(json_object_get(first, "invert")) && json_is_false(use_regex) &&
            pretokenizer_by_regex(regex, &source->pretokenizer))
            return true;
    }
    return error_set(error, "%s: pre_tokenizer: not supported; expected one of %s", source->path,
                     PRETOKENIZER_NAMES);
}

static bool json_normalizer(const json_t *normalizer, struct source *source, struct error *error)
{
    const json_t *type = json_object_get(normalizer, "type");

    if (json_is_nothing(normalizer))
        return true;
    if (json_is(type, "NFC")) {
        source->nfc = true;
        return true;
    }
    if (json_is(type, "Sequence")) {
        json_t *parts = json_object_get(normalizer, "normalizers"), *part;
        size_t i;

        json_array_foreach(parts, i, part)
        {
            if (!json_is(json_object_get(part, "type"), "NFC"))
                break;
            source->nfc = true;
        }
        if (i == json_array_size(parts))
            return true;
    }
    return error_set(error, "%s: normalizer: not supported; expected NFC or none", source->path);
}

/* The fields of the model that change how it merges. */
static bool json_model_options(const json_t *model, struct source *source, struct error *error)
{
    static const char *const refused[] = {"dropout", "continuing_subword_prefix",
                                          "end_of_word_suffix"};
    const json_t *type = json_object_get(model, "type");
    const json_t *ignore_merges = json_object_get(model, "ignore_merges");

    if (!json_is_object(model) || (type != NULL && !json_is(type, "BPE")))
        return error_set(error, "%s: model.type: not supported; expected \"BPE\"", source->path);
    if (json_is_true(json_object_get(model, "byte_fallback")))
        return error_set(error, "%s: model.byte_fallback: true is not supported", source->path);
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        const json_t *value = json_object_get(model, refused[i]);

        if (!json_is_nothing(value) && !json_is(value, "") &&
            !(json_is_number(value) && json_number_value(value) == 0))
            return error_set(error, "%s: model.%s: not supported; expected null", source->path,
                             refused[i]);
    }
    if (ignore_merges != NULL && !json_is_boolean(ignore_merges))
        return error_set(error, "%s: model.ignore_merges: expected true or false", source->path);
    source->ignore_merges = json_is_true(ignore_merges);
    source->unknown = json_string_value(json_object_get(model, "unk_token"));
    if (source->unknown != NULL && json_is_true(json_object_get(model, "fuse_unk")))
        return error_set(error, "%s: model.fuse_unk: true is not supported", source->path);
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

static bool json_vocabulary(const json_t *root, size_t file_size, struct source *source,
                            struct error *error)
{
    /* A token takes at least `"a":0,` of the file; ids may have gaps, but memory follows the file.
     */
    const size_t limit = file_size / 4;
    json_t *vocabulary = json_object_get(json_object_get(root, "model"), "vocab");
    json_t *added = json_object_get(root, "added_tokens"), *value;
    const char *text;
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
    source->tokens =
        allocate_array(source->token_count, sizeof *source->tokens, source->path, error);
    if (source->tokens == NULL)
        return false;

    json_object_foreach(vocabulary, text, value)
    {
        struct source_token *token = &source->tokens[json_integer_value(value)];

        if (token->text != NULL)
            return error_set(error, "%s: %s: '%.60s' and '%.60s' have the same id", source->path,
                             source->tokens_field, token->text, text);
        *token = (struct source_token){.text = text, .length = strlen(text), .kind = TOKEN_NORMAL};
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

static bool json_merges(const json_t *model, struct source *source, struct error *error)
{
    json_t *merges = json_object_get(model, "merges"), *value;
    size_t i;

    if (!json_is_array(merges))
        return error_set(error, "%s: %s: expected an array", source->path, source->merges_field);
    source->merge_count = json_array_size(merges);
    source->merges =
        allocate_array(source->merge_count, sizeof *source->merges, source->path, error);
    if (source->merges == NULL)
        return false;
    json_array_foreach(merges, i, value)
    {
        const json_t *left = json_array_get(value, 0), *right = json_array_get(value, 1);

        if (json_is_string(value)) {
            if (!split_merge(json_string_value(value), json_string_length(value),
                             &source->merges[i]))
                return merge_text_error(source, i, error);
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

static void mark_end(struct tokenizer *tokenizer, int32_t id)
{
    if (id != TOKEN_NONE)
        tokenizer->tokens[id].end = true;
}

/* eos_token_id: an id or an array of ids. */
static bool json_end_ids(struct tokenizer *tokenizer, const char *path, const json_t *config,
                         struct error *error)
{
    const json_t *field = json_object_get(config, "eos_token_id");
    size_t count = json_is_array(field) ? json_array_size(field) : !json_is_nothing(field);

    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_is_array(field) ? json_array_get(field, i) : field;
        size_t id;

        if (!json_token_id(value, tokenizer->count, &id))
            return error_set(error, "%s: eos_token_id: expected ids below the token count, %zu",
                             path, tokenizer->count);
        mark_end(tokenizer, (int32_t)id);
    }
    return true;
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
    char *path = join_path(folder, "chat_template.jinja", error);
    const char *text = json_chat_template(config);
    struct file_map map = {0};
    bool done = false;

    if (path == NULL || !map_optional(path, &map, error))
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
    struct source source = {
        .path = path,
        .tokens_field = "model.vocab",
        .merges_field = "model.merges",
    };
    json_t *root = NULL;
    const json_t *model;
    const char *start;
    size_t size = 0;
    bool done = false;

    if (!load_object(path, false, &root, &size, error))
        goto out;
    model = json_object_get(root, "model");
    if (!json_model_options(model, &source, error) || !json_pretokenizer(root, &source, error) ||
        !json_normalizer(json_object_get(root, "normalizer"), &source, error) ||
        !json_vocabulary(root, size, &source, error) || !json_merges(model, &source, error) ||
        !build(tokenizer, &source, error))
        goto out;
    start = json_template_start(json_object_get(root, "post_processor"));
    if (start != NULL) {
        tokenizer->bos = tokenizer_find(tokenizer, start, strlen(start));
        tokenizer->wants_bos = tokenizer->bos != TOKEN_NONE;
    }
    done = true;
out:
    free(source.tokens);
    free(source.merges);
    json_decref(root);
    return done;
}

static bool read_folder(struct tokenizer *tokenizer, const char *folder, struct error *error)
{
    char *tokenizer_path = join_path(folder, "tokenizer.json", error);
    char *config_path = join_path(folder, "tokenizer_config.json", error);
    char *generation_path = join_path(folder, "generation_config.json", error);
    json_t *config = NULL, *generation = NULL;
    const json_t *add_bos;
    int32_t bos;
    bool done = false;

    if (tokenizer_path == NULL || config_path == NULL || generation_path == NULL ||
        !read_tokenizer_json(tokenizer, tokenizer_path, error) ||
        !load_object(config_path, true, &config, NULL, error) ||
        !load_object(generation_path, true, &generation, NULL, error) ||
        !read_chat_template(tokenizer, folder, config, error) ||
        !json_end_ids(tokenizer, generation_path, generation, error))
        goto out;
    mark_end(tokenizer, json_config_token(tokenizer, config, "eos_token"));
    bos = json_config_token(tokenizer, config, "bos_token");
    if (bos != TOKEN_NONE)
        tokenizer->bos = bos;
    add_bos = json_object_get(config, "add_bos_token");
    if (json_is_boolean(add_bos))
        tokenizer->wants_bos = json_is_true(add_bos) && tokenizer->bos != TOKEN_NONE;
    done = true;
out:
    json_decref(config);
    json_decref(generation);
    free(tokenizer_path);
    free(config_path);
    free(generation_path);
    return done;
}

/* ---- Opening and asking ---- */

bool tokenizer_open(const char *path, struct tokenizer **tokenizer, struct error *error)
{
    struct tokenizer *opened = allocate_array(1, sizeof *opened, path, error);
    struct stat status;
    bool folder;

    *tokenizer = NULL;
    if (opened == NULL)
        return false;
    folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
    if (folder ? !read_folder(opened, path, error) : !read_gguf(opened, path, error)) {
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
    free(tokenizer->tokens);
    free(tokenizer->bytes);
    free(tokenizer->index);
    free(tokenizer->merges);
    free(tokenizer->results);
    free(tokenizer->added[0].tokens);
    free(tokenizer->added[1].tokens);
    free(tokenizer->chat_template);
    free(tokenizer);
}

size_t tokenizer_count(const struct tokenizer *tokenizer)
{
    return tokenizer->count;
}

int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text, size_t length)
{
    uint32_t id;

    for (int i = 0; i < 2; i++) {
        const struct added_token *token = added_find(&tokenizer->added[i], text, length);

        if (token != NULL)
            return token->id;
    }
    id = *index_place(tokenizer, text, length);
    return id == NONE ? TOKEN_NONE : (int32_t)id;
}

const char *tokenizer_text(const struct tokenizer *tokenizer, int32_t id, size_t *length)
{
    if (id < 0 || (size_t)id >= tokenizer->count) {
        *length = 0;
        return "";
    }
    *length = tokenizer->tokens[id].length;
    return token_bytes(tokenizer, id);
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && (size_t)id < tokenizer->count && tokenizer->tokens[id].kind == TOKEN_SPECIAL;
}

bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && (size_t)id < tokenizer->count && tokenizer->tokens[id].end;
}

int32_t tokenizer_bos(const struct tokenizer *tokenizer)
{
    return tokenizer->bos;
}

bool tokenizer_wants_bos(const struct tokenizer *tokenizer)
{
    return tokenizer->wants_bos;
}

const char *tokenizer_chat_template(const struct tokenizer *tokenizer)
{
    return tokenizer->chat_template;
}

/* ---- Encoding ---- */

/* A token of the pre-token that is being merged, in a list. */
struct symbol {
    int32_t id;
    uint32_t previous, next;
    uint32_t
        rank; /* of the merge with the next symbol; NONE if there is none, or if this one is gone */
};

struct encoder {
    const struct tokenizer *tokenizer;
    bool parse_special;
    struct token_list *list;
    struct symbol *symbols; /* room for `capacity` */
    uint64_t *heap;         /* room for twice that: rank << 32 | symbol, the least on top */
    size_t capacity, heap_count;
};

static void heap_sift_down(struct encoder *encoder, size_t hole)
{
    uint64_t *heap = encoder->heap, value = heap[hole];

    for (;;) {
        size_t child = 2 * hole + 1;

        if (child + 1 < encoder->heap_count && heap[child + 1] < heap[child])
            child++;
        if (child >= encoder->heap_count || heap[child] >= value)
            break;
        heap[hole] = heap[child];
        hole = child;
    }
    heap[hole] = value;
}

static void heap_push(struct encoder *encoder, uint64_t value)
{
    uint64_t *heap = encoder->heap;
    size_t hole = encoder->heap_count++;

    while (hole > 0 && heap[(hole - 1) / 2] > value) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = value;
}

static uint64_t heap_pop(struct encoder *encoder)
{
    uint64_t top = encoder->heap[0];

    encoder->heap[0] = encoder->heap[--encoder->heap_count];
    if (encoder->heap_count > 0)
        heap_sift_down(encoder, 0);
    return top;
}

static void find_rank(const struct encoder *encoder, uint32_t at)
{
    struct symbol *symbol = &encoder->symbols[at];

    symbol->rank = NONE;
    if (symbol->next != NONE)
        symbol->rank =
            merge_place(encoder->tokenizer, symbol->id, encoder->symbols[symbol->next].id)->rank;
}

static void push_pair(struct encoder *encoder, uint32_t at)
{
    find_rank(encoder, at);
    if (encoder->symbols[at].rank != NONE)
        heap_push(encoder, (uint64_t)encoder->symbols[at].rank << 32 | at);
}

static bool reserve_symbols(struct encoder *encoder, size_t length, struct error *error)
{
    size_t capacity = length < 256 ? 256 : length, symbol_bytes, heap_bytes;
    struct symbol *symbols;
    uint64_t *heap;

    if (length <= encoder->capacity)
        return true;
    if (length >= NONE || __builtin_mul_overflow(capacity, sizeof *symbols, &symbol_bytes) ||
        __builtin_mul_overflow(capacity, 2 * sizeof *heap, &heap_bytes))
        return error_set(error, "text: %zu bytes without a place to cut are too many", length);
    symbols = realloc(encoder->symbols, symbol_bytes);
    if (symbols != NULL)
        encoder->symbols = symbols;
    heap = realloc(encoder->heap, heap_bytes);
    if (heap != NULL)
        encoder->heap = heap;
    if (symbols == NULL || heap == NULL)
        return error_set(error, "tokenizer: out of memory for a word of %zu bytes", length);
    encoder->capacity = capacity;
    return true;
}

/* Merges the bytes of one pre-token: always the pair of lowest rank, the leftmost of equals. */
static bool encode_piece(void *context, const char *piece, size_t length, struct error *error)
{
    struct encoder *encoder = context;
    const struct tokenizer *tokenizer = encoder->tokenizer;
    struct symbol *symbols;
    size_t count = 0;

    if (tokenizer->ignore_merges) {
        uint32_t id = *index_place(tokenizer, piece, length);

        if (id != NONE)
            return token_list_append(encoder->list, (int32_t)id, error);
    }
    if (!reserve_symbols(encoder, length, error))
        return false;
    symbols = encoder->symbols;
    for (size_t i = 0; i < length; i++) {
        int32_t id = tokenizer->byte_tokens[(unsigned char)piece[i]];

        if (id == TOKEN_NONE)
            continue;
        symbols[count] = (struct symbol){id, (uint32_t)count - 1, (uint32_t)count + 1, NONE};
        count++;
    }
    if (count == 0)
        return true;
    symbols[count - 1].next = NONE;

    encoder->heap_count = 0;
    for (uint32_t at = 0; at < count; at++) {
        find_rank(encoder, at);
        if (symbols[at].rank != NONE)
            encoder->heap[encoder->heap_count++] = (uint64_t)symbols[at].rank << 32 | at;
    }
    for (size_t i = encoder->heap_count / 2; i-- > 0;)
        heap_sift_down(encoder, i);
    /* A merge takes one entry and adds at most two, so the heap never outgrows 2 * count. */
    while (encoder->heap_count > 0) {
        uint64_t top = heap_pop(encoder);
        uint32_t rank = (uint32_t)(top >> 32), at = (uint32_t)top, gone;

        if (symbols[at].rank != rank)
            continue; /* the pair has changed since */
        gone = symbols[at].next;
        symbols[at].id = tokenizer->results[rank];
        symbols[at].next = symbols[gone].next;
        symbols[gone].rank = NONE;
        if (symbols[at].next != NONE)
            symbols[symbols[at].next].previous = at;
        push_pair(encoder, at);
        if (symbols[at].previous != NONE)
            push_pair(encoder, symbols[at].previous);
    }
    for (uint32_t at = 0; at != NONE; at = symbols[at].next) {
        if (!token_list_append(encoder->list, symbols[at].id, error))
            return false;
    }
    return true;
}

static bool encode_text(struct encoder *encoder, int stage, const char *text, size_t length,
                        struct error *error);

/* Cuts the text at the added tokens of one set and takes the parts between them to the next
 * stage. */
static bool encode_added(struct encoder *encoder, int stage, const char *text, size_t length,
                         struct error *error)
{
    const struct added_set *set = &encoder->tokenizer->added[stage];
    size_t begin = 0, offset = 0;

    while (offset < length && set->count > 0) {
        const struct added_token *token = NULL;

        if (set->first_bytes[(unsigned char)text[offset]])
            token = added_match(set, text + offset, length - offset);
        if (token == NULL) {
            offset++;
            continue;
        }
        /* A special token that is text hides tokens that begin inside it, as in the reference. */
        if (!token->special || encoder->parse_special) {
            if (!encode_text(encoder, stage + 1, text + begin, offset - begin, error) ||
                !token_list_append(encoder->list, token->id, error))
                return false;
            begin = offset + token->length;
        }
        offset += token->length;
    }
    return encode_text(encoder, stage + 1, text + begin, length - begin, error);
}

/* Stage 0: added tokens of the text as it is; 1: of normalized text; 2: what remains. */
static bool encode_text(struct encoder *encoder, int stage, const char *text, size_t length,
                        struct error *error)
{
    char *normal = NULL;
    size_t normal_length;
    bool done;

    if (length == 0)
        return true;
    if (stage == 2)
        return pretokenizer_split(encoder->tokenizer->pretokenizer, text, length, encode_piece,
                                  encoder, error);
    if (stage == 1 && encoder->tokenizer->nfc) {
        if (!text_to_nfc(text, length, &normal, &normal_length, error))
            return false;
        if (normal != NULL) {
            text = normal;
            length = normal_length;
        }
    }
    done = encode_added(encoder, stage, text, length, error);
    free(normal);
    return done;
}

bool tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t length,
                      bool parse_special, struct token_list *list, struct error *error)
{
    struct encoder encoder = {
        .tokenizer = tokenizer,
        .parse_special = parse_special,
        .list = list,
    };
    size_t before = list->count;
    bool done = encode_text(&encoder, 0, text, length, error);

    if (!done)
        list->count = before;
    free(encoder.symbols);
    free(encoder.heap);
    return done;
}

/* ---- Decoding ---- */

#define REPLACEMENT "\xef\xbf\xbd"

bool detokenizer_open(struct detokenizer *detokenizer, const struct tokenizer *tokenizer,
                      bool show_special, struct error *error)
{
    size_t room = tokenizer->longest + sizeof detokenizer->pending;

    *detokenizer = (struct detokenizer){.tokenizer = tokenizer, .show_special = show_special};
    detokenizer->bytes = malloc(room);
    /* Each byte may become a U+FFFD. */
    detokenizer->text = malloc((sizeof REPLACEMENT - 1) * room + 1);
    if (detokenizer->bytes == NULL || detokenizer->text == NULL) {
        detokenizer_close(detokenizer);
        return error_set(error, "tokenizer: out of memory for a token of %zu bytes",
                         tokenizer->longest);
    }
    return true;
}

void detokenizer_close(struct detokenizer *detokenizer)
{
    free(detokenizer->bytes);
    free(detokenizer->text);
    memset(detokenizer, 0, sizeof *detokenizer);
}

static const char *end_text(struct detokenizer *detokenizer, size_t written, size_t *length)
{
    detokenizer->text[written] = '\0';
    if (length != NULL)
        *length = written;
    return detokenizer->text;
}

const char *detokenizer_push(struct detokenizer *detokenizer, int32_t id, size_t *length)
{
    const char *token;
    size_t token_length, count = detokenizer->pending_length, written = 0, offset = 0;

    if (!detokenizer->show_special && tokenizer_is_special(detokenizer->tokenizer, id))
        return end_text(detokenizer, 0, length);
    token = tokenizer_text(detokenizer->tokenizer, id, &token_length);
    memcpy(detokenizer->bytes, detokenizer->pending, count);
    memcpy(detokenizer->bytes + count, token, token_length);
    count += token_length;
    detokenizer->pending_length = 0;
    while (offset < count) {
        const char *sequence = detokenizer->bytes + offset;
        int size = utf8_sequence(sequence, count - offset);

        if (size == 0) {
            detokenizer->pending_length = count - offset;
            memcpy(detokenizer->pending, sequence, count - offset);
            break;
        }
        if (size > 0) {
            memcpy(detokenizer->text + written, sequence, (size_t)size);
            written += (size_t)size;
            offset += (size_t)size;
        } else {
            memcpy(detokenizer->text + written, REPLACEMENT, sizeof REPLACEMENT - 1);
            written += sizeof REPLACEMENT - 1;
            offset += (size_t)-size;
        }
    }
    return end_text(detokenizer, written, length);
}

const char *detokenizer_flush(struct detokenizer *detokenizer, size_t *length)
{
    size_t written = 0;

    if (detokenizer->pending_length > 0) {
        memcpy(detokenizer->text, REPLACEMENT, sizeof REPLACEMENT - 1);
        written = sizeof REPLACEMENT - 1;
    }
    detokenizer->pending_length = 0;
    return end_text(detokenizer, written, length);
}
