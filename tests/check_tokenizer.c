/* SPDX-License-Identifier: MIT */
/* The tokenizer and what comes before it, on small vocabularies, against Hugging Face tokenizers.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gguf_writer.h"
#include "runner/detokenizer.h"
#include "runner/pretokenizer.h"
#include "runner/tokenizer.h"
#include "tests.h"

/* The small vocabularies; those in SentencePiece's spelling come last. */
static const char *const kinds[] = {"smollm", "llama3", "qwen2",  "gpt2",
                                    "tekken", "llama2", "mistral"};
static const char *const gguf_names[] = {"smollm", "llama-bpe", "qwen2", "gpt-2", "tekken"};

enum { LLAMA3 = 1, LLAMA2 = 5, MISTRAL, N_KINDS };

/* The pre-tokenizers of splits.json. */
static const struct {
    const char *kind, *gguf_name;
} split_kinds[] = {
    {"smollm", "smollm"}, {"llama3", "llama-bpe"}, {"qwen2", "qwen2"},
    {"gpt2", "gpt-2"},    {"tekken", "tekken"},    {"default", "default"},
};

enum { N_SPLITS = sizeof split_kinds / sizeof split_kinds[0] };

/* ---- Files ---- */

static json_t *load_kind(const char *kind, const char *name)
{
    return tests_json(tests_path("tokenizer/%s/%s", kind, name));
}

static char folder[TESTS_FOLDER_BYTES];

static const char *in_folder(const char *name)
{
    static char path[TESTS_FOLDER_BYTES + 64];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_text(const char *name, const char *text)
{
    write_file(in_folder(name), text, strlen(text));
}

static void write_json(const char *name, const json_t *value)
{
    ck_assert_int_eq(json_dump_file(value, in_folder(name), 0), 0);
}

static struct tokenizer *open_tokenizer(const char *path)
{
    struct tokenizer *tokenizer;
    struct error error;

    ck_assert_msg(tokenizer_open(path, &tokenizer, &error), "%s", error.text);
    return tokenizer;
}

static struct tokenizer *open_kind(const char *kind)
{
    return open_tokenizer(tests_path("tokenizer/%s", kind));
}

/* Asserts that opening fails and that the error has the file's name and `what` in it. */
static void check_refused(const char *path, const char *name, const char *what)
{
    struct tokenizer *tokenizer = NULL;
    struct error error = {""};

    ck_assert_msg(!tokenizer_open(path, &tokenizer, &error), "accepted; expected '%s'", what);
    ck_assert_ptr_null(tokenizer);
    ck_assert_msg(strstr(error.text, what) != NULL && strstr(error.text, name) != NULL,
                  "expected '%s' of %s in: %s", what, name, error.text);
}

/* ---- Text before the merges ---- */

START_TEST(sequences)
{
    static const struct {
        const char *text;
        size_t length;
        int expected;
    } cases[] = {
        {"a", 1, 1},
        {"\0", 1, 1},
        {"\x7f", 1, 1},
        {"\xc2\x80", 2, 2},
        {"\xdf\xbf", 2, 2},
        {"\xe0\xa0\x80", 3, 3},
        {"\xed\x9f\xbf", 3, 3},
        {"\xee\x80\x80", 3, 3},
        {"\xef\xbf\xbf", 3, 3},
        {"\xf0\x90\x80\x80", 4, 4},
        {"\xf4\x8f\xbf\xbf", 4, 4},
        {"\x80", 1, -1},
        {"\xbf", 1, -1},
        {"\xc0\x80", 2, -1},
        {"\xc1\xbf", 2, -1},
        {"\xf5\x80\x80\x80", 4, -1},
        {"\xff", 1, -1},
        {"\xc2"
         "a",
         2, -1},
        {"\xe0\x9f\xbf", 3, -1}, /* overlong */
        {"\xe0\xa0"
         "a",
         3, -2},
        {"\xed\xa0\x80", 3, -1}, /* a surrogate */
        {"\xf0\x8f\xbf\xbf", 4, -1},
        {"\xf0\x90\x80"
         "a",
         4, -3},
        {"\xf4\x90\x80\x80", 4, -1}, /* above U+10FFFF */
        {"\xc2", 1, 0},
        {"\xe0\xa0", 2, 0},
        {"\xf0\x9f\x91", 3, 0},
        {"\xf0", 1, 0},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        ck_assert_msg(utf8_sequence(cases[i].text, cases[i].length) == cases[i].expected,
                      "case %zu: %d, expected %d", i, utf8_sequence(cases[i].text, cases[i].length),
                      cases[i].expected);
}
END_TEST

START_TEST(valid_prefixes)
{
    ck_assert_uint_eq(utf8_valid_prefix("", 0), 0);
    ck_assert_uint_eq(utf8_valid_prefix("h\xc3\xa9\xe2\x82\xac\xf0\x9f\x91\x8d", 10), 10);
    ck_assert_uint_eq(utf8_valid_prefix("h\xc3\xa9\xe2\x82", 5), 3);
    ck_assert_uint_eq(utf8_valid_prefix("ab\xff"
                                        "cd",
                                        5),
                      2);
    ck_assert_uint_eq(utf8_valid_prefix("\xed\xa0\x80", 3), 0);
}
END_TEST

/* Normalizes `text` and compares with `expected`. */
static void check_nfc(const char *text, size_t length, const char *expected, size_t expected_length)
{
    char *result;
    size_t result_length;
    struct error error;

    ck_assert_msg(text_to_nfc(text, length, &result, &result_length, &error), "%s", error.text);
    if (result == NULL) {
        ck_assert_uint_eq(length, expected_length);
        ck_assert_mem_eq(text, expected, length);
    } else {
        ck_assert_uint_eq(result_length, expected_length);
        ck_assert_mem_eq(result, expected, expected_length);
    }
    free(result);
}

START_TEST(nfc)
{
    json_t *root = tests_json(tests_path("tokenizer/nfc.json")), *pair;
    size_t i;

    json_array_foreach(root, i, pair)
    {
        const json_t *text = json_array_get(pair, 0), *expected = json_array_get(pair, 1);

        check_nfc(json_string_value(text), json_string_length(text), json_string_value(expected),
                  json_string_length(expected));
    }
    ck_assert_uint_gt(i, 30);
    json_decref(root);
}
END_TEST

/* Invalid bytes stay, and what is around them is normalized. */
START_TEST(nfc_of_invalid)
{
    static const char text[] = "e\xcc\x81\xff"
                               "e\xcc\x81\xe2\x82"
                               "e\xcc\x81\xf0\x9f";
    static const char expected[] = "\xc3\xa9\xff\xc3\xa9\xe2\x82\xc3\xa9\xf0\x9f";

    check_nfc(text, sizeof text - 1, expected, sizeof expected - 1);
}
END_TEST

/* Marks of two classes in turn: in order, all of the lower class come first. A quadratic sort would
 * not end in the time that a test has. */
START_TEST(nfc_of_long_run)
{
    enum { PAIRS = 500000 };
    const size_t length = 1 + 4 * PAIRS;
    char *text = malloc(length), *expected = malloc(length);

    text[0] = expected[0] = 'x';
    for (size_t i = 0; i < PAIRS; i++) {
        memcpy(text + 1 + 4 * i, "\xcc\x81\xcc\x96", 4); /* class 230, class 220 */
        memcpy(expected + 1 + 2 * i, "\xcc\x96", 2);
        memcpy(expected + 1 + 2 * (PAIRS + i), "\xcc\x81", 2);
    }
    check_nfc(text, length, expected, length);
    free(text);
    free(expected);
}
END_TEST

struct expected_pieces {
    const char *text, *next;
    const json_t *pieces;
    size_t count;
};

static bool check_piece(void *context, const char *piece, size_t length, struct error *error)
{
    struct expected_pieces *expected = context;
    const json_t *value = json_array_get(expected->pieces, expected->count);

    (void)error;
    ck_assert_msg(piece == expected->next, "piece %zu of '%s' begins elsewhere", expected->count,
                  expected->text);
    ck_assert_msg(value != NULL && json_string_length(value) == length &&
                      memcmp(json_string_value(value), piece, length) == 0,
                  "piece %zu of '%s' is '%.*s'", expected->count, expected->text, (int)length,
                  piece);
    expected->next += length;
    expected->count++;
    return true;
}

START_TEST(splits)
{
    json_t *root = tests_json(tests_path("tokenizer/splits.json")), *text;
    const json_t *all = json_object_get(json_object_get(root, "splits"), split_kinds[_i].kind);
    struct pretokenizer *pretokenizer;
    enum pretokenizer_kind kind;
    struct error error;
    size_t i;

    ck_assert(
        pretokenizer_by_name(split_kinds[_i].gguf_name, strlen(split_kinds[_i].gguf_name), &kind));
    ck_assert_msg(pretokenizer_open(kind, &pretokenizer, &error), "%s", error.text);
    json_array_foreach(json_object_get(root, "texts"), i, text)
    {
        struct expected_pieces expected = {json_string_value(text), json_string_value(text),
                                           json_array_get(all, i), 0};

        ck_assert_msg(pretokenizer_split(pretokenizer, expected.text, json_string_length(text),
                                         check_piece, &expected, &error),
                      "%s", error.text);
        ck_assert_uint_eq(expected.count, json_array_size(expected.pieces));
    }
    ck_assert_uint_gt(i, 30);
    pretokenizer_close(pretokenizer);
    json_decref(root);
}
END_TEST

START_TEST(split_of_invalid)
{
    static const char text[] = "ab  \xff\xfe cd\xe2\x82 1\xf0\x9f";
    json_t *pieces = json_array();
    struct expected_pieces expected = {text, text, pieces, 0};
    struct pretokenizer *pretokenizer;
    struct error error;
    static const struct {
        const char *bytes;
        size_t length;
    } parts[] = {{"ab", 2},       {"  ", 2}, {"\xff", 1}, {"\xfe", 1},    {" cd", 3},
                 {"\xe2\x82", 2}, {" ", 1},  {"1", 1},    {"\xf0\x9f", 2}};

    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        json_array_append_new(pieces, json_stringn_nocheck(parts[i].bytes, parts[i].length));
    ck_assert(pretokenizer_open(PRETOKENIZER_SMOLLM, &pretokenizer, &error));
    ck_assert(
        pretokenizer_split(pretokenizer, text, sizeof text - 1, check_piece, &expected, &error));
    ck_assert_uint_eq(expected.count, sizeof parts / sizeof parts[0]);
    pretokenizer_close(pretokenizer);
    json_decref(pieces);
}
END_TEST

static bool count_piece(void *context, const char *piece, size_t length, struct error *error)
{
    (void)piece;
    (void)error;
    (*(size_t(*)[2])context)[0]++;
    (*(size_t(*)[2])context)[1] += length;
    return true;
}

/* Two million bytes that give the expressions the most to backtrack over. */
START_TEST(split_of_long_runs)
{
    static const char *const runs[] = {"a", "A", " ",        "\n ", "\t",          "1",
                                       "'", ".", "\xcc\x81", "aA",  "\xe0\xa4\x95"};
    struct pretokenizer *pretokenizer;
    struct error error;

    ck_assert(pretokenizer_open((enum pretokenizer_kind)_i, &pretokenizer, &error));
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        const size_t part = strlen(runs[i]), length = 2000000;
        char *text = malloc(length + 1);
        size_t found[2] = {0, 0};

        for (size_t j = 0; j < length; j++)
            text[j] = runs[i][j % part];
        text[length] = 'x';
        ck_assert_msg(
            pretokenizer_split(pretokenizer, text, length + 1, count_piece, found, &error), "%s",
            error.text);
        ck_assert_uint_eq(found[1], length + 1);
        ck_assert_uint_ge(found[0], 1);
        free(text);
    }
    pretokenizer_close(pretokenizer);
}
END_TEST

/* ---- Encoding and decoding ---- */

static int32_t find(const struct tokenizer *tokenizer, const char *text)
{
    return tokenizer_find(tokenizer, text, strlen(text));
}

/* Decodes one id at a time; every piece must be valid UTF-8, and joined they are as expected. */
static void check_decoded(const struct tokenizer *tokenizer, const struct token_list *list,
                          const json_t *expected)
{
    const char *text = json_string_value(expected);
    size_t offset = 0, left = json_string_length(expected), length;
    struct detokenizer detokenizer;
    struct error error;

    ck_assert(detokenizer_open(&detokenizer, tokenizer, true, &error));
    for (size_t i = 0; i <= list->count; i++) {
        const char *piece = i < list->count ? detokenizer_push(&detokenizer, list->ids[i], &length)
                                            : detokenizer_flush(&detokenizer, &length);

        ck_assert_uint_eq(utf8_valid_prefix(piece, length), length);
        ck_assert_uint_le(length, left);
        ck_assert_mem_eq(piece, text + offset, length);
        ck_assert_int_eq(piece[length], '\0');
        offset += length;
        left -= length;
    }
    ck_assert_uint_eq(left, 0);
    detokenizer_close(&detokenizer);
}

static void check_cases(const struct tokenizer *tokenizer, const json_t *cases)
{
    struct error error;
    json_t *entry;
    size_t i;

    json_array_foreach((json_t *)cases, i, entry)
    {
        const json_t *text = json_object_get(entry, "text");
        const json_t *ids = json_object_get(entry, "ids");
        const json_t *plain = json_object_get(entry, "plain_ids");
        struct token_list list = {0};

        ck_assert(tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text),
                                   true, &list, &error));
        tests_compare_ids(list.ids, list.count, ids, json_string_value(text));
        check_decoded(tokenizer, &list, json_object_get(entry, "decoded"));
        list.count = 0;
        ck_assert(tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text),
                                   false, &list, &error));
        tests_compare_ids(list.ids, list.count, plain != NULL ? plain : ids,
                          json_string_value(text));
        token_list_free(&list);
    }
    ck_assert_uint_gt(i, 30);
}

START_TEST(expected_ids)
{
    struct tokenizer *tokenizer = open_kind(kinds[_i]);
    json_t *cases = load_kind(kinds[_i], "expected.json");

    check_cases(tokenizer, cases);
    json_decref(cases);
    tokenizer_close(tokenizer);
}
END_TEST

/* merges as pairs where the file has texts, and the other way round */
START_TEST(other_spelling_of_merges)
{
    json_t *root = load_kind(kinds[_i], "tokenizer.json"), *cases, *value;
    json_t *model = json_object_get(root, "model"), *other = json_array();
    struct tokenizer *tokenizer;
    size_t i;

    json_array_foreach(json_object_get(model, "merges"), i, value)
    {
        if (json_is_string(value)) {
            const char *text = json_string_value(value), *space = strchr(text, ' ');

            json_array_append_new(other, json_pack("[s%s]", text, (int)(space - text), space + 1));
        } else {
            json_array_append_new(other,
                                  json_sprintf("%s %s", json_string_value(json_array_get(value, 0)),
                                               json_string_value(json_array_get(value, 1))));
        }
    }
    json_object_set_new(model, "merges", other);
    tests_make_folder(folder);
    write_json("tokenizer.json", root);
    tokenizer = open_tokenizer(folder);
    cases = load_kind(kinds[_i], "expected.json");
    check_cases(tokenizer, cases);
    tokenizer_close(tokenizer);
    tests_remove_folder(folder);
    json_decref(cases);
    json_decref(root);
}
END_TEST

START_TEST(long_run)
{
    struct tokenizer *tokenizer = open_kind(kinds[_i]);
    json_t *root = tests_json(tests_path("tokenizer/long_run.json")), *group;
    struct token_list list = {0};
    struct error error;
    char text[100003];
    size_t i, at = 0;

    memset(text, 'a', sizeof text);
    ck_assert(tokenizer_encode(tokenizer, text, sizeof text, true, &list, &error));
    json_array_foreach(json_object_get(root, kinds[_i]), i, group)
    {
        for (json_int_t j = json_integer_value(json_array_get(group, 1)); j > 0; j--) {
            ck_assert_uint_lt(at, list.count);
            ck_assert_int_eq(list.ids[at++], json_integer_value(json_array_get(group, 0)));
        }
    }
    ck_assert_uint_eq(at, list.count);
    token_list_free(&list);
    json_decref(root);
    tokenizer_close(tokenizer);
}
END_TEST

/* Any bytes encode, and where the vocabulary has all bytes the tokens' texts are the input. */
START_TEST(any_bytes)
{
    struct tokenizer *tokenizer = open_kind("llama3");
    struct token_list list = {0};
    struct error error;
    uint32_t state = 1;
    unsigned char text[4096];

    for (int round = 0; round < 50; round++) {
        size_t length = (size_t)round * 80, offset = 0;

        for (size_t i = 0; i < length; i++) {
            state = state * 1664525u + 1013904223u;
            text[i] = (unsigned char)(round % 2 == 0 ? state >> 24 : (state >> 24) | 0x80);
        }
        list.count = 0;
        ck_assert(tokenizer_encode(tokenizer, (char *)text, length, true, &list, &error));
        for (size_t i = 0; i < list.count; i++) {
            size_t part;
            const char *bytes = tokenizer_text(tokenizer, list.ids[i], &part);

            ck_assert_uint_le(offset + part, length);
            ck_assert_mem_eq(bytes, text + offset, part);
            offset += part;
        }
        ck_assert_uint_eq(offset, length);
    }
    token_list_free(&list);
    tokenizer_close(tokenizer);
}
END_TEST

/* The same for SentencePiece's spelling, which puts a space before. */
START_TEST(any_bytes_in_pieces)
{
    struct tokenizer *tokenizer = open_kind("llama2");
    struct token_list list = {0};
    struct error error;
    unsigned char text[4096];

    tests_seed(5);
    for (int round = 0; round < 50; round++) {
        size_t length = 1 + (size_t)round * 80, offset = 0;

        text[0] = ' ';
        for (size_t i = 1; i < length; i++)
            text[i] = (unsigned char)(round % 2 == 0 ? tests_random() : tests_random() | 0x80);
        list.count = 0;
        ck_assert(tokenizer_encode(tokenizer, (char *)text + 1, length - 1, true, &list, &error));
        for (size_t i = 0; i < list.count; i++) {
            size_t part;
            const char *bytes = tokenizer_text(tokenizer, list.ids[i], &part);

            ck_assert_uint_le(offset + part, length);
            ck_assert_mem_eq(bytes, text + offset, part);
            offset += part;
        }
        ck_assert_uint_eq(offset, length == 1 ? 0 : length);
    }
    token_list_free(&list);
    tokenizer_close(tokenizer);
}
END_TEST

/* Special tokens count in one part and not in the next; no token reaches over the border. */
START_TEST(parts)
{
    static const struct text_part parts[] = {
        {"<s>", 3, true}, {"the <s>", 7, false}, {"", 0, true}, {"<s> <", 5, true}, {"s>", 2, true},
    };
    static const char whole[] = "<s>the <s><s> <s>";
    struct tokenizer *tokenizer = open_kind("mistral");
    struct token_list list = {0};
    struct error error;
    size_t offset = 0, length;

    ck_assert(tokenizer_encode_parts(tokenizer, parts, 5, &list, &error));
    for (size_t i = 0; i < list.count; i++) {
        const char *text = tokenizer_text(tokenizer, list.ids[i], &length);

        ck_assert_uint_le(offset + length, sizeof whole - 1);
        ck_assert_mem_eq(text, whole + offset, length);
        ck_assert_int_eq(tokenizer_is_special(tokenizer, list.ids[i]), offset == 0 || offset == 10);
        offset += length;
    }
    ck_assert_uint_eq(offset, sizeof whole - 1);
    list.count = 0;
    ck_assert(tokenizer_encode_parts(tokenizer, parts, 0, &list, &error));
    ck_assert_uint_eq(list.count, 0);
    token_list_free(&list);
    tokenizer_close(tokenizer);
}
END_TEST

/* Ids come after those that are in the list. */
START_TEST(encoding_appends)
{
    struct tokenizer *tokenizer = open_kind("qwen2");
    struct token_list list = {0};
    struct error error;

    ck_assert(token_list_append(&list, 7, &error));
    ck_assert(tokenizer_encode(tokenizer, "<think>", 7, false, &list, &error));
    ck_assert_uint_eq(list.count, 2);
    ck_assert_int_eq(list.ids[0], 7);
    ck_assert_int_eq(list.ids[1], tokenizer_find(tokenizer, "<think>", 7));
    token_list_free(&list);
    ck_assert_uint_eq(list.count, 0);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(streaming)
{
    static const char thumb[] = "\xf0\x9f\x91\x8d";
    struct tokenizer *tokenizer = open_kind("llama3");
    int32_t first = find(tokenizer, "\xf0"), end = find(tokenizer, "<|eot_id|>");
    struct detokenizer detokenizer;
    struct error error;
    size_t length;

    ck_assert_int_ne(first, TOKEN_NONE);
    ck_assert(detokenizer_open(&detokenizer, tokenizer, false, &error));
    /* A character of four tokens comes out with the last of them, special tokens or not. */
    for (int i = 0; i < 4; i++) {
        int32_t id = tokenizer_find(tokenizer, thumb + i, 1);
        const char *text;

        ck_assert_int_ne(id, TOKEN_NONE);
        ck_assert_str_eq(detokenizer_push(&detokenizer, end, &length), "");
        text = detokenizer_push(&detokenizer, id, &length);
        ck_assert_str_eq(text, i < 3 ? "" : thumb);
        ck_assert_uint_eq(length, i < 3 ? 0 : 4);
    }
    ck_assert_str_eq(detokenizer_flush(&detokenizer, NULL), "");
    /* A beginning without its rest, before text and at the end. */
    ck_assert_str_eq(detokenizer_push(&detokenizer, first, NULL), "");
    ck_assert_str_eq(detokenizer_push(&detokenizer, find(tokenizer, "a"), NULL), "\xef\xbf\xbd"
                                                                                 "a");
    ck_assert_str_eq(detokenizer_push(&detokenizer, first, NULL), "");
    ck_assert_str_eq(detokenizer_push(&detokenizer, find(tokenizer, "\x9f"), NULL), "");
    ck_assert_str_eq(detokenizer_flush(&detokenizer, NULL), "\xef\xbf\xbd");
    ck_assert_str_eq(detokenizer_flush(&detokenizer, NULL), "");
    /* A byte that begins nothing; ids without text. */
    ck_assert_str_eq(detokenizer_push(&detokenizer, find(tokenizer, "\x9f"), NULL), "\xef\xbf\xbd");
    ck_assert_str_eq(detokenizer_push(&detokenizer, -1, NULL), "");
    ck_assert_str_eq(detokenizer_push(&detokenizer, INT32_MAX, NULL), "");
    detokenizer_close(&detokenizer);

    ck_assert(detokenizer_open(&detokenizer, tokenizer, true, &error));
    ck_assert_str_eq(detokenizer_push(&detokenizer, end, NULL), "<|eot_id|>");
    detokenizer_close(&detokenizer);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(streaming_of_pieces)
{
    static const char thumb[] = "\xf0\x9f\x91\x8d";
    struct tokenizer *tokenizer = open_kind("llama2");
    int32_t the = find(tokenizer, " the");
    struct detokenizer detokenizer;
    struct error error;

    ck_assert_int_ne(the, TOKEN_NONE);
    ck_assert(detokenizer_open(&detokenizer, tokenizer, false, &error));
    for (int round = 0; round < 2; round++) {
        /* The space before the text goes, whatever gives no text before it. */
        ck_assert_str_eq(detokenizer_push(&detokenizer, 1, NULL), "");
        ck_assert_str_eq(detokenizer_push(&detokenizer, the, NULL), "the");
        ck_assert_str_eq(detokenizer_push(&detokenizer, the, NULL), " the");
        /* A character in bytes. */
        for (int i = 0; i < 4; i++)
            ck_assert_str_eq(detokenizer_push(&detokenizer, 3 + (unsigned char)thumb[i], NULL),
                             i < 3 ? "" : thumb);
        ck_assert_str_eq(detokenizer_push(&detokenizer, 3 + '\n', NULL), "\n");
        ck_assert_str_eq(detokenizer_push(&detokenizer, 3 + 0xf0, NULL), "");
        ck_assert_str_eq(detokenizer_push(&detokenizer, the, NULL), "\xef\xbf\xbd the");
        ck_assert_str_eq(detokenizer_push(&detokenizer, 3 + 0xe2, NULL), "");
        ck_assert_str_eq(detokenizer_flush(&detokenizer, NULL), "\xef\xbf\xbd");
    }
    detokenizer_continue(&detokenizer);
    ck_assert_str_eq(detokenizer_push(&detokenizer, the, NULL), " the");
    detokenizer_close(&detokenizer);

    ck_assert(detokenizer_open(&detokenizer, tokenizer, true, &error));
    ck_assert_str_eq(detokenizer_push(&detokenizer, 1, NULL), "<s>");
    ck_assert_str_eq(detokenizer_push(&detokenizer, the, NULL), " the");
    detokenizer_close(&detokenizer);
    tokenizer_close(tokenizer);
}
END_TEST

static void check_text(const struct tokenizer *tokenizer, int32_t id, const char *expected)
{
    size_t length;
    const char *text = tokenizer_text(tokenizer, id, &length);

    ck_assert_uint_eq(length, strlen(expected));
    ck_assert_mem_eq(text, expected, length);
}

START_TEST(questions)
{
    struct tokenizer *tokenizer = open_kind("qwen2");
    int32_t the = find(tokenizer, " the");

    ck_assert_uint_eq(tokenizer_count(tokenizer), 610);
    ck_assert_int_eq(find(tokenizer, "<|im_end|>"), 602);
    ck_assert_int_eq(find(tokenizer, "<think>"), 607);
    ck_assert_int_eq(find(tokenizer, "<|im_end|"), TOKEN_NONE);
    ck_assert_int_eq(find(tokenizer, ""), TOKEN_NONE);
    ck_assert_int_ne(the, TOKEN_NONE);
    check_text(tokenizer, 602, "<|im_end|>");
    check_text(tokenizer, 607, "<think>");
    check_text(tokenizer, the, " the");
    check_text(tokenizer, 610, "");
    check_text(tokenizer, -1, "");
    ck_assert(tokenizer_is_special(tokenizer, 602));
    ck_assert(!tokenizer_is_special(tokenizer, 607));
    ck_assert(!tokenizer_is_special(tokenizer, the));
    ck_assert(!tokenizer_is_special(tokenizer, -1));
    ck_assert(!tokenizer_is_special(tokenizer, 610));
    ck_assert(tokenizer_is_end(tokenizer, 602));
    ck_assert(tokenizer_is_end(tokenizer, find(tokenizer, "<|endoftext|>")));
    ck_assert(!tokenizer_is_end(tokenizer, find(tokenizer, "<|im_start|>")));
    ck_assert(!tokenizer_is_end(tokenizer, -1));
    ck_assert(!tokenizer_is_end(tokenizer, 610));
    ck_assert_int_eq(tokenizer_bos(tokenizer), TOKEN_NONE);
    ck_assert(!tokenizer_wants_bos(tokenizer));
    ck_assert_ptr_null(tokenizer_chat_template(tokenizer));
    tokenizer_close(tokenizer);
}
END_TEST

/* ---- Folders ---- */

/* A folder with the tokenizer.json of `kind`; tests_remove_folder takes it away. */
static void copy_kind(const char *kind)
{
    json_t *root = load_kind(kind, "tokenizer.json");

    tests_make_folder(folder);
    write_json("tokenizer.json", root);
    json_decref(root);
}

START_TEST(template_says_bos)
{
    struct tokenizer *tokenizer = open_kind("llama3");

    ck_assert_int_eq(tokenizer_bos(tokenizer), find(tokenizer, "<|begin_of_text|>"));
    ck_assert(tokenizer_wants_bos(tokenizer));
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(configuration)
{
    struct tokenizer *tokenizer;

    copy_kind("smollm");
    write_text("tokenizer_config.json",
               "{\"add_bos_token\": true, \"bos_token\": {\"content\": \"<|im_start|>\"},"
               " \"eos_token\": \"<|begin_of_text|>\", \"chat_template\": \"one\"}");
    write_text("config.json", "{\"eos_token_id\": [30, 31]}");
    write_text("generation_config.json", "{\"eos_token_id\": [20, 30]}");
    tokenizer = open_tokenizer(folder);
    ck_assert_int_eq(tokenizer_bos(tokenizer), 1);
    ck_assert(tokenizer_wants_bos(tokenizer));
    ck_assert(tokenizer_is_end(tokenizer, 3));
    ck_assert(tokenizer_is_end(tokenizer, 20));
    ck_assert(tokenizer_is_end(tokenizer, 30));
    ck_assert(tokenizer_is_end(tokenizer, 31));
    ck_assert(!tokenizer_is_end(tokenizer, 21));
    ck_assert_str_eq(tokenizer_chat_template(tokenizer), "one");
    tokenizer_close(tokenizer);

    write_text("tokenizer_config.json",
               "{\"add_bos_token\": false, \"bos_token\": \"<|im_start|>\", \"eos_token\": null,"
               " \"chat_template\": [{\"name\": \"tool_use\", \"template\": \"x\"},"
               " {\"name\": \"default\", \"template\": \"two\"}]}");
    write_text("generation_config.json", "{\"eos_token_id\": 40}");
    tokenizer = open_tokenizer(folder);
    ck_assert_int_eq(tokenizer_bos(tokenizer), 1);
    ck_assert(!tokenizer_wants_bos(tokenizer));
    ck_assert(!tokenizer_is_end(tokenizer, 3));
    ck_assert(tokenizer_is_end(tokenizer, 40));
    ck_assert_str_eq(tokenizer_chat_template(tokenizer), "two");
    tokenizer_close(tokenizer);

    write_text("chat_template.jinja", "three");
    tokenizer = open_tokenizer(folder);
    ck_assert_str_eq(tokenizer_chat_template(tokenizer), "three");
    tokenizer_close(tokenizer);
    tests_remove_folder(folder);
}
END_TEST

/* A byte without a token is left out, unless the vocabulary has a token for what it does not know.
 */
START_TEST(unknown_bytes)
{
    json_t *root = load_kind("smollm", "tokenizer.json");
    struct tokenizer *tokenizer = open_kind("smollm");
    struct token_list list = {0};
    struct error error;
    int32_t a = find(tokenizer, "a");

    ck_assert(tokenizer_encode(tokenizer,
                               "\x04"
                               "a\x04\x04\xff",
                               5, true, &list, &error));
    ck_assert_uint_eq(list.count, 1);
    ck_assert_int_eq(list.ids[0], a);
    tokenizer_close(tokenizer);

    json_object_set_new(json_object_get(root, "model"), "unk_token", json_string("<|endoftext|>"));
    tests_make_folder(folder);
    write_json("tokenizer.json", root);
    tokenizer = open_tokenizer(folder);
    list.count = 0;
    ck_assert(tokenizer_encode(tokenizer,
                               "\x04"
                               "a\x04\x04\xff",
                               5, true, &list, &error));
    ck_assert_uint_eq(list.count, 5);
    for (size_t i = 0; i < 5; i++)
        ck_assert_int_eq(list.ids[i], i == 1 ? a : 0);
    tokenizer_close(tokenizer);
    tests_remove_folder(folder);
    token_list_free(&list);
    json_decref(root);
}
END_TEST

/* A character of which a byte has no token is unknown; a run of those is one token, or one each. */
START_TEST(unknown_characters)
{
    json_t *root = load_kind("llama2", "tokenizer.json");
    json_t *model = json_object_get(root, "model");
    struct token_list list = {0};
    struct error error;

    json_object_del(json_object_get(model, "vocab"), "<0x88>");
    tests_make_folder(folder);
    for (int fused = 0; fused < 2; fused++) {
        struct tokenizer *tokenizer;
        size_t at = 0;

        json_object_set_new(model, "fuse_unk", json_boolean(fused));
        write_json("tokenizer.json", root);
        tokenizer = open_tokenizer(folder);
        list.count = 0;
        ck_assert(tokenizer_encode(tokenizer, "\xe1\x88\x80\xe1\x88\x81\xe1\x89\x80\x88", 10, true,
                                   &list, &error));
        ck_assert_uint_eq(list.count, fused ? 6 : 7);
        ck_assert_int_eq(list.ids[at++], find(tokenizer, " "));
        ck_assert_int_eq(list.ids[at++], 0);
        if (!fused)
            ck_assert_int_eq(list.ids[at++], 0);
        ck_assert_int_eq(list.ids[at++], 3 + 0xe1);
        ck_assert_int_eq(list.ids[at++], 3 + 0x89);
        ck_assert_int_eq(list.ids[at++], 3 + 0x80);
        ck_assert_int_eq(list.ids[at++], 0);
        tokenizer_close(tokenizer);
    }
    tests_remove_folder(folder);
    token_list_free(&list);
    json_decref(root);
}
END_TEST

/* Who puts a space before text, and which. */
START_TEST(spaces)
{
    json_t *all = tests_json(tests_path("tokenizer/spaces.json")), *rule, *text;
    size_t i, j;

    tests_make_folder(folder);
    json_array_foreach(json_object_get(all, "rules"), i, rule)
    {
        json_t *root =
            load_kind(json_string_value(json_object_get(rule, "kind")), "tokenizer.json");
        bool normalized = json_is_true(json_object_get(rule, "normalized"));
        struct tokenizer *tokenizer;
        char what[100];

        json_object_set(root, "normalizer", json_object_get(rule, "normalizer"));
        json_object_set(root, "pre_tokenizer", json_object_get(rule, "pre_tokenizer"));
        json_array_foreach(json_object_get(root, "added_tokens"), j, text) json_object_set_new(
            text, "normalized",
            json_boolean(normalized &&
                         strcmp(json_string_value(json_object_get(text, "content")), "<s>") == 0));
        write_json("tokenizer.json", root);
        tokenizer = open_tokenizer(folder);
        json_array_foreach(json_object_get(all, "texts"), j, text)
        {
            struct token_list list = {0};
            struct error error;

            ck_assert(tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text),
                                       true, &list, &error));
            snprintf(what, sizeof what, "rule %zu, text %zu", i, j);
            tests_compare_ids(list.ids, list.count, json_array_get(json_object_get(rule, "ids"), j),
                              what);
            token_list_free(&list);
        }
        tokenizer_close(tokenizer);
        json_decref(root);
    }
    ck_assert_uint_gt(i, 5);
    tests_remove_folder(folder);
    json_decref(all);
}
END_TEST

/* Merges that seem to go in circles: each makes a longer token, so they end. */
START_TEST(merge_loop)
{
    static const char model[] =
        "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2, \"ba\": 3,"
        " \"aba\": 4, \"bab\": 5}, \"merges\": [\"a b\", \"b a\", \"ab a\", \"a ba\", \"b ab\","
        " \"a b\"]}, \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}}";
    static const int32_t expected[] = {4, 3, 3};
    struct token_list list = {0};
    struct tokenizer *tokenizer;
    struct error error;

    tests_make_folder(folder);
    write_text("tokenizer.json", model);
    tokenizer = open_tokenizer(folder);
    ck_assert(tokenizer_encode(tokenizer, "abababa", 7, true, &list, &error));
    /* Of the two merges of a and b the later counts, so that b and a come first. */
    ck_assert_uint_eq(list.count, 3);
    ck_assert_mem_eq(list.ids, expected, sizeof expected);
    tokenizer_close(tokenizer);
    token_list_free(&list);
    tests_remove_folder(folder);
}
END_TEST

/* One change of a good tokenizer.json each: the field, by its path, and its value (NULL: taken
 * away), and what the error has to say. */
static const struct bad_field {
    const char *object, *field, *value, *error;
} bad_fields[] = {
    {NULL, "model", NULL, "model.type"},
    {NULL, "model", "[]", "model.type"},
    {"model", "type", "\"Unigram\"", "model.type"},
    {"model", "byte_fallback", "true", "model.byte_fallback"},
    {"model", "dropout", "0.1", "model.dropout"},
    {"model", "end_of_word_suffix", "\"</w>\"", "model.end_of_word_suffix"},
    {"model", "continuing_subword_prefix", "\"##\"", "model.continuing_subword_prefix"},
    {"model", "ignore_merges", "3", "model.ignore_merges"},
    {"model", "fuse_unk", "\"no\"", "model.fuse_unk"},
    {"model", "unk_token", "\"<none>\"", "model.unk_token"},
    {"model", "vocab", NULL, "model.vocab"},
    {"model", "vocab", "{}", "model.vocab"},
    {"model", "vocab", "{\"a\": \"b\"}", "'a' has no valid id"},
    {"model", "vocab", "{\"a\": -1}", "'a' has no valid id"},
    {"model", "vocab", "{\"a\": 2147483647}", "'a' has no valid id"},
    {"model", "vocab", "{\"a\": 1000000}", "'a' has no valid id"},
    {"model", "vocab", "{\"a\": 9223372036854775807}", "'a' has no valid id"},
    {"model", "vocab", "{\"a\": 5, \"b\": 5}", "'a' and 'b' have the same id"},
    {"model", "vocab", "{\"a\": 601, \"b\": 1}", "has another id in model.vocab"},
    {"model", "merges", NULL, "model.merges"},
    {"model", "merges", "{}", "model.merges"},
    {"model", "merges", "[3]", "merge 0 is neither"},
    {"model", "merges", "[[\"a\"]]", "merge 0 is neither"},
    {"model", "merges", "[[\"a\", 1]]", "merge 0 is neither"},
    {"model", "merges", "[\"ab\"]", "merge 0 is not two texts"},
    {"model", "merges", "[\"a b c\"]", "merge 0 is not two texts"},
    {"model", "merges", "[[\"e\", \"\\u20ac\"]]", "merge 0 names '\xe2\x82\xac'"},
    {"model", "merges", "[[\"qqq\", \"a\"]]", "merge 0 names 'qqq'"},
    {"model", "merges", "[\"e n\", \"a \"]", "merge 1 names ''"},
    {"model", "merges", "[[\"z\", \"q\"]]", "merge 0, 'z' and 'q', makes no token"},
    {NULL, "pre_tokenizer", NULL, "pre_tokenizer"},
    {NULL, "pre_tokenizer", "{\"type\": \"Whitespace\"}", "pre_tokenizer"},
    {NULL, "pre_tokenizer", "{\"type\": \"Metaspace\", \"replacement\": \"_\"}", "pre_tokenizer"},
    {NULL, "pre_tokenizer",
     "{\"type\": \"Metaspace\", \"replacement\": \"\\u2581\", \"prepend_scheme\": \"last\"}",
     "pre_tokenizer"},
    {NULL, "pre_tokenizer", "{\"type\": \"ByteLevel\", \"use_regex\": false}", "pre_tokenizer"},
    {NULL, "normalizer", "{\"type\": \"Lowercase\"}", "normalizer"},
    {NULL, "normalizer", "{\"type\": \"Prepend\", \"prepend\": \"\\u2581\"}", "normalizer"},
    {NULL, "normalizer",
     "{\"type\": \"Replace\", \"pattern\": {\"String\": \"a\"}, \"content\": \"\\u2581\"}",
     "normalizer"},
    {NULL, "normalizer",
     "{\"type\": \"Replace\", \"pattern\": {\"String\": \" \"}, \"content\": \"\\u2581\"}",
     "pre_tokenizer"},
    {NULL, "normalizer", "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFKC\"}]}",
     "normalizer"},
    {NULL, "added_tokens", "{}", "added_tokens"},
    {NULL, "added_tokens", "[{\"content\": \"x\"}]", "added_tokens[0].id"},
    {NULL, "added_tokens", "[{\"id\": 605}]", "added_tokens[0].content"},
    {NULL, "added_tokens", "[{\"id\": 605, \"content\": \"\"}]", "added_tokens[0].content"},
    {NULL, "added_tokens", "[{\"id\": 605, \"content\": \"a\"}]", "'a' has another id"},
    {NULL, "added_tokens", "[{\"id\": 10, \"content\": \"new\"}]", "'new' has another id"},
    {NULL, "added_tokens", "[{\"id\": 605, \"content\": \"new\", \"lstrip\": true}]", "lstrip"},
    {NULL, "added_tokens", "[{\"id\": 4294967295, \"content\": \"new\"}]", "added_tokens[0].id"},
    {NULL, "added_tokens",
     "[{\"id\": 605, \"content\": \"new\"}, {\"id\": 606, \"content\": \"new\"}]",
     "tokens 605 and 606 have the same text"},
};

START_TEST(bad_field)
{
    const struct bad_field *bad = &bad_fields[_i];
    json_t *root = load_kind("llama3", "tokenizer.json");
    json_t *object = bad->object == NULL ? root : json_object_get(root, bad->object);

    tests_make_folder(folder);
    if (bad->value == NULL)
        json_object_del(object, bad->field);
    else
        json_object_set_new(object, bad->field, json_loads(bad->value, JSON_DECODE_ANY, NULL));
    write_json("tokenizer.json", root);
    check_refused(folder, "/tokenizer.json", bad->error);
    tests_remove_folder(folder);
    json_decref(root);
}
END_TEST

START_TEST(good_normalizers)
{
    static const char *const good[] = {
        "null",
        "{\"type\": \"NFC\"}",
        "{\"type\": \"Sequence\", \"normalizers\": []}",
        "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}]}",
    };
    json_t *root = load_kind("llama3", "tokenizer.json");

    tests_make_folder(folder);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct tokenizer *tokenizer;
        struct token_list list = {0};
        struct error error;

        json_object_set_new(root, "normalizer", json_loads(good[i], JSON_DECODE_ANY, NULL));
        write_json("tokenizer.json", root);
        tokenizer = open_tokenizer(folder);
        ck_assert(tokenizer_encode(tokenizer, "e\xcc\x81", 3, true, &list, &error));
        ck_assert_int_eq(list.ids[0] == find(tokenizer, "e"), i % 2 == 0);
        token_list_free(&list);
        tokenizer_close(tokenizer);
    }
    tests_remove_folder(folder);
    json_decref(root);
}
END_TEST

START_TEST(bad_files)
{
    static const char *const ids[] = {"608", "-1", "1.5", "[1.5]", "[[1]]", "true", "{}"};
    json_t *root = load_kind("llama3", "tokenizer.json");
    char nested[100000], config[64];

    tests_make_folder(folder);
    check_refused(folder, "/tokenizer.json", "");
    write_text("tokenizer.json", "{\"model\": {\"type\": \"BPE\"");
    check_refused(folder, "/tokenizer.json", "line 1");
    write_text("tokenizer.json", "[]");
    check_refused(folder, "/tokenizer.json", "object");
    write_text("tokenizer.json", "{\"model\": {}, \"model\": {}}");
    check_refused(folder, "/tokenizer.json", "duplicate");
    write_text("tokenizer.json", "{\"model\": \"\xff\"}");
    check_refused(folder, "/tokenizer.json", "line 1");
    write_text("tokenizer.json", "{\"model\": {\"vocab\": {\"a\": 0, \"a\": 1}}}");
    check_refused(folder, "/tokenizer.json", "duplicate");
    memset(nested, '[', sizeof nested - 1);
    memcpy(nested, "{\"model\":", 9);
    nested[sizeof nested - 1] = '\0';
    write_text("tokenizer.json", nested);
    check_refused(folder, "/tokenizer.json", "arrays and objects");
    memset(nested + 5000, ' ', sizeof nested - 1 - 5000);
    write_text("tokenizer.json", nested);
    check_refused(folder, "/tokenizer.json", "depth");
    write_json("tokenizer.json", root);
    write_text("tokenizer_config.json", "{");
    check_refused(folder, "/tokenizer_config.json", "line 1");
    write_text("tokenizer_config.json", "{}");
    write_text("generation_config.json", "{\"eos_token_id\": [1, 608]}");
    check_refused(folder, "/generation_config.json", "eos_token_id");
    write_text("generation_config.json", "{\"eos_token_id\": \"</s>\"}");
    check_refused(folder, "/generation_config.json", "eos_token_id");
    write_text("generation_config.json", "{\"eos_token_id\": 18446744073709551615}");
    check_refused(folder, "/generation_config.json", "too big");
    write_text("generation_config.json", "{");
    check_refused(folder, "/generation_config.json", "line 1");
    write_text("generation_config.json", "{\"eos_token_id\": null}");
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
        snprintf(config, sizeof config, "{\"eos_token_id\": %s}", ids[i]);
        write_text("config.json", config);
        check_refused(folder, "/config.json", "eos_token_id: expected ids below the token count");
    }
    write_text("config.json", "{\"eos_token_id\": []}");
    tokenizer_close(open_tokenizer(folder));
    check_refused(in_folder("none.gguf"), "none.gguf", "");
    tests_remove_folder(folder);
    json_decref(root);
}
END_TEST

/* ---- GGUF ---- */

/* What a vocabulary-only GGUF is made of; a test changes a field before it writes the file. */
struct vocabulary {
    const char *texts[1000], *merges[1000];
    int32_t types[1000];
    float scores[1000];
    size_t token_count, type_count, merge_count, score_count;
    const char *model, *pre;
    int32_t bos, eos, eot, unknown;                         /* -1: not written */
    int add_bos, add_space, remove_spaces, vocabulary_size; /* -1: not written */
    uint32_t score_type;
    bool nested_tokens;
    const char *text_key, *number_key; /* written with such a value; NULL: none */
    json_t *root;
};

/* Takes the vocabulary of a kind's tokenizer.json. */
static void load_vocabulary(struct vocabulary *vocabulary, int kind)
{
    json_t *model, *value;
    const char *text;
    size_t i;

    memset(vocabulary, 0, sizeof *vocabulary);
    vocabulary->root = load_kind(kinds[kind], "tokenizer.json");
    model = json_object_get(vocabulary->root, "model");
    json_object_foreach(json_object_get(model, "vocab"), text, value)
    {
        vocabulary->texts[json_integer_value(value)] = text;
        vocabulary->types[json_integer_value(value)] = strncmp(text, "<0x", 3) == 0 ? 6 : 1;
        vocabulary->scores[json_integer_value(value)] = -(float)json_integer_value(value);
        vocabulary->token_count++;
    }
    json_array_foreach(json_object_get(vocabulary->root, "added_tokens"), i, value)
    {
        json_int_t id = json_integer_value(json_object_get(value, "id"));

        vocabulary->token_count += vocabulary->texts[id] == NULL;
        vocabulary->texts[id] = json_string_value(json_object_get(value, "content"));
        vocabulary->types[id] = json_is_true(json_object_get(value, "special")) ? 3 : 4;
    }
    vocabulary->type_count = vocabulary->token_count;
    json_array_foreach(json_object_get(model, "merges"), i, value)
    {
        if (json_is_array(value)) {
            value = json_sprintf("%s %s", json_string_value(json_array_get(value, 0)),
                                 json_string_value(json_array_get(value, 1)));
            json_array_set_new(json_object_get(model, "merges"), i, value);
        }
        vocabulary->merges[vocabulary->merge_count++] = json_string_value(value);
    }
    vocabulary->model = "gpt2";
    vocabulary->bos = vocabulary->eos = vocabulary->eot = vocabulary->unknown = -1;
    vocabulary->add_bos = vocabulary->add_space = -1;
    vocabulary->remove_spaces = vocabulary->vocabulary_size = -1;
    vocabulary->score_type = GGUF_FLOAT32;
    if (kind < LLAMA2) {
        vocabulary->pre = gguf_names[kind];
    } else {
        vocabulary->model = "llama";
        vocabulary->merge_count = 0;
        vocabulary->score_count = vocabulary->token_count;
    }
}

static bool is(const char *key, const char *other)
{
    return key != NULL && strcmp(key, other) == 0;
}

/* Writes model.gguf into the folder and returns its path. */
static const char *write_vocabulary(const struct vocabulary *vocabulary)
{
    struct gguf_writer writer;

    gguf_writer_start(&writer);
    gguf_writer_string(&writer, "general.architecture", "llama");
    if (vocabulary->model != NULL)
        gguf_writer_string(&writer, "tokenizer.ggml.model", vocabulary->model);
    if (vocabulary->pre != NULL)
        gguf_writer_string(&writer, "tokenizer.ggml.pre", vocabulary->pre);
    if (vocabulary->vocabulary_size >= 0)
        gguf_writer_uint(&writer, "llama.vocab_size", (uint32_t)vocabulary->vocabulary_size);
    if (!vocabulary->nested_tokens) {
        gguf_writer_strings(&writer, "tokenizer.ggml.tokens", vocabulary->texts,
                            vocabulary->token_count);
    } else { /* an array of one empty array of texts */
        gguf_writer_key(&writer, "tokenizer.ggml.tokens", GGUF_ARRAY);
        bytes_u32(&writer.metadata, GGUF_ARRAY);
        bytes_u64(&writer.metadata, 1);
        bytes_u32(&writer.metadata, GGUF_STRING);
        bytes_u64(&writer.metadata, 0);
    }
    if (vocabulary->type_count > 0)
        gguf_writer_array(&writer, "tokenizer.ggml.token_type", GGUF_INT32, vocabulary->types,
                          vocabulary->type_count, vocabulary->type_count * sizeof(int32_t));
    if (vocabulary->merge_count > 0)
        gguf_writer_strings(&writer, "tokenizer.ggml.merges", vocabulary->merges,
                            vocabulary->merge_count);
    if (vocabulary->score_count > 0)
        gguf_writer_array(&writer, "tokenizer.ggml.scores", vocabulary->score_type,
                          vocabulary->scores, vocabulary->score_count,
                          vocabulary->score_count *
                              (vocabulary->score_type == GGUF_FLOAT32 ? sizeof(float) : 1));
    if (vocabulary->remove_spaces >= 0)
        gguf_writer_bool(&writer, "tokenizer.ggml.remove_extra_whitespaces",
                         vocabulary->remove_spaces);
    if (vocabulary->unknown >= 0)
        gguf_writer_uint(&writer, "tokenizer.ggml.unknown_token_id", (uint32_t)vocabulary->unknown);
    if (vocabulary->add_space >= 0)
        gguf_writer_bool(&writer, "tokenizer.ggml.add_space_prefix", vocabulary->add_space);
    if (vocabulary->bos >= 0)
        gguf_writer_uint(&writer, "tokenizer.ggml.bos_token_id", (uint32_t)vocabulary->bos);
    if (vocabulary->eos >= 0)
        gguf_writer_uint(&writer, "tokenizer.ggml.eos_token_id", (uint32_t)vocabulary->eos);
    if (vocabulary->eot >= 0)
        gguf_writer_uint(&writer, "tokenizer.ggml.eot_token_id", (uint32_t)vocabulary->eot);
    if (vocabulary->add_bos >= 0)
        gguf_writer_bool(&writer, "tokenizer.ggml.add_bos_token", vocabulary->add_bos);
    if (vocabulary->text_key != NULL)
        gguf_writer_string(&writer, vocabulary->text_key, "2");
    if (vocabulary->number_key != NULL)
        gguf_writer_uint(&writer, vocabulary->number_key, 608);
    if (!is(vocabulary->number_key, "tokenizer.chat_template"))
        gguf_writer_string(&writer, "tokenizer.chat_template", "{{ template }}");
    gguf_writer_save(&writer, in_folder("model.gguf"));
    gguf_writer_free(&writer);
    return in_folder("model.gguf");
}

/* The same vocabulary from a GGUF gives the same ids. A GGUF cannot say that an added token is
 * found in normalized text, so that one is made an ordinary one. */
START_TEST(gguf_ids)
{
    json_t *cases = load_kind(kinds[_i], "expected.json"), *entry;
    struct token_list list = {0}, expected = {0};
    struct vocabulary vocabulary;
    struct tokenizer *tokenizer, *other;
    struct error error;
    size_t i;

    load_vocabulary(&vocabulary, _i);
    tests_make_folder(folder);
    json_array_foreach(json_object_get(vocabulary.root, "added_tokens"), i, entry)
        json_object_set_new(entry, "normalized", json_false());
    write_json("tokenizer.json", vocabulary.root);
    other = open_tokenizer(folder);
    if (_i < LLAMA2) {
        vocabulary.bos = find(other, "<|begin_of_text|>");
        vocabulary.eos = find(other, "<|start_header_id|>");
        vocabulary.eot = find(other, "<|end_header_id|>");
    } else {
        vocabulary.bos = find(other, "<s>");
        vocabulary.eos = find(other, "</s>");
        vocabulary.eot = find(other, "<unk>");
    }
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));

    json_array_foreach(cases, i, entry)
    {
        const json_t *text = json_object_get(entry, "text");

        for (int parse_special = 0; parse_special < 2; parse_special++) {
            list.count = expected.count = 0;
            ck_assert(tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text),
                                       parse_special, &list, &error));
            ck_assert(tokenizer_encode(other, json_string_value(text), json_string_length(text),
                                       parse_special, &expected, &error));
            ck_assert_uint_eq(list.count, expected.count);
            if (list.count > 0)
                ck_assert_mem_eq(list.ids, expected.ids, list.count * sizeof *list.ids);
        }
    }
    ck_assert_uint_eq(tokenizer_count(tokenizer), tokenizer_count(other));
    ck_assert_int_eq(tokenizer_bos(tokenizer), vocabulary.bos);
    ck_assert_int_eq(tokenizer_eos(tokenizer), vocabulary.eos);
    ck_assert_int_eq(tokenizer_adds_space(tokenizer), _i >= LLAMA2);
    ck_assert_int_eq(tokenizer_wants_bos(tokenizer), strcmp(kinds[_i], "smollm") != 0 &&
                                                         strcmp(kinds[_i], "qwen2") != 0 &&
                                                         strcmp(kinds[_i], "gpt2") != 0);
    ck_assert(tokenizer_is_end(tokenizer, vocabulary.eos));
    ck_assert(tokenizer_is_end(tokenizer, vocabulary.eot));
    ck_assert(!tokenizer_is_end(other, vocabulary.eot));
    ck_assert(!tokenizer_is_end(tokenizer, vocabulary.bos));
    ck_assert_str_eq(tokenizer_chat_template(tokenizer), "{{ template }}");
    tokenizer_close(tokenizer);
    tokenizer_close(other);
    token_list_free(&list);
    token_list_free(&expected);
    tests_remove_folder(folder);
    json_decref(cases);
    json_decref(vocabulary.root);
}
END_TEST

START_TEST(gguf_options)
{
    struct vocabulary vocabulary;
    struct tokenizer *tokenizer;
    struct token_list list = {0};
    struct error error;

    load_vocabulary(&vocabulary, 1);
    tests_make_folder(folder);
    /* No BOS, and so none is asked for. */
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    ck_assert_int_eq(tokenizer_bos(tokenizer), TOKEN_NONE);
    ck_assert(!tokenizer_wants_bos(tokenizer));
    tokenizer_close(tokenizer);

    vocabulary.bos = 604;
    vocabulary.add_bos = 0;
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    ck_assert_int_eq(tokenizer_bos(tokenizer), 604);
    ck_assert(!tokenizer_wants_bos(tokenizer));
    tokenizer_close(tokenizer);

    vocabulary.pre = "qwen2";
    vocabulary.add_bos = 1;
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    ck_assert(tokenizer_wants_bos(tokenizer));
    tokenizer_close(tokenizer);

    /* Without types, what the file calls BOS and EOS is special, and no other token. */
    vocabulary.type_count = 0;
    vocabulary.eos = 603;
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    ck_assert(tokenizer_is_special(tokenizer, 603));
    ck_assert(tokenizer_is_special(tokenizer, 604));
    ck_assert(!tokenizer_is_special(tokenizer, 605));
    tokenizer_close(tokenizer);

    /* An unused token has no text and is not made. */
    vocabulary.type_count = vocabulary.token_count;
    vocabulary.types[607] = 5;
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    check_text(tokenizer, 607, "");
    ck_assert(tokenizer_encode(tokenizer, "<|eot_id|>", 10, true, &list, &error));
    ck_assert_uint_gt(list.count, 1);
    token_list_free(&list);
    tokenizer_close(tokenizer);
    tests_remove_folder(folder);
    json_decref(vocabulary.root);
}
END_TEST

START_TEST(gguf_pretokenizer_names)
{
    static const struct {
        const char *name;
        enum pretokenizer_kind kind;
    } names[] = {
        {"smollm", PRETOKENIZER_SMOLLM},    {"smollm2", PRETOKENIZER_SMOLLM},
        {"llama-bpe", PRETOKENIZER_LLAMA3}, {"llama3", PRETOKENIZER_LLAMA3},
        {"llama-v3", PRETOKENIZER_LLAMA3},  {"qwen2", PRETOKENIZER_QWEN2},
        {"gpt-2", PRETOKENIZER_GPT2},       {"default", PRETOKENIZER_DEFAULT},
        {"tekken", PRETOKENIZER_TEKKEN},    {"deepseek-r1-qwen", PRETOKENIZER_QWEN2},
        {"starcoder", PRETOKENIZER_SMOLLM},
    };
    enum pretokenizer_kind kind;

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        ck_assert(pretokenizer_by_name(names[i].name, strlen(names[i].name), &kind));
        ck_assert_int_eq(kind, names[i].kind);
    }
    ck_assert(!pretokenizer_by_name("smoll", 5, &kind));
    ck_assert(!pretokenizer_by_name("llama-bpe2", 10, &kind));
    ck_assert(!pretokenizer_by_name("", 0, &kind));
}
END_TEST

/* The vocabularies of SentencePiece in GGUF. */
START_TEST(gguf_pieces)
{
    struct vocabulary vocabulary;
    struct tokenizer *tokenizer, *other;
    struct token_list list = {0}, expected = {0};
    struct error error;

    load_vocabulary(&vocabulary, LLAMA2);
    tests_make_folder(folder);
    /* What the file does not say is as in Llama-2. */
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    ck_assert_int_eq(tokenizer_bos(tokenizer), 1);
    ck_assert_int_eq(tokenizer_eos(tokenizer), 2);
    ck_assert(tokenizer_wants_bos(tokenizer));
    ck_assert(tokenizer_adds_space(tokenizer));
    tokenizer_close(tokenizer);

    vocabulary.add_space = vocabulary.add_bos = vocabulary.remove_spaces = 0;
    vocabulary.vocabulary_size = 1000;
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    ck_assert(!tokenizer_wants_bos(tokenizer));
    ck_assert(!tokenizer_adds_space(tokenizer));
    ck_assert(tokenizer_encode(tokenizer, "the<s>the", 9, true, &list, &error));
    ck_assert_uint_eq(list.count, 3);
    ck_assert_int_eq(list.ids[0], find(tokenizer, "the"));
    ck_assert_int_eq(list.ids[1], 1);
    ck_assert_int_eq(list.ids[2], list.ids[0]);
    tokenizer_close(tokenizer);

    /* Without types, bytes are known by their names. */
    vocabulary.type_count = 0;
    other = open_tokenizer(write_vocabulary(&vocabulary));
    ck_assert(tokenizer_is_special(other, 0));
    ck_assert(tokenizer_is_special(other, 2));
    ck_assert(!tokenizer_is_special(other, 3));
    list.count = 0;
    ck_assert(tokenizer_encode(other, "\xe1\x88\x80", 3, true, &list, &error));
    ck_assert_uint_eq(list.count, 3);
    ck_assert_int_eq(list.ids[0], 3 + 0xe1);
    ck_assert_int_eq(list.ids[1], 3 + 0x88);
    ck_assert_int_eq(list.ids[2], 3 + 0x80);
    tokenizer_close(other);

    /* Text that is not UTF-8 makes a token that is shown and never made; so does a space. */
    vocabulary.type_count = vocabulary.token_count;
    vocabulary.texts[300] = "\xff\xfe";
    vocabulary.texts[301] = "a b";
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    check_text(tokenizer, 300, "\xff\xfe");
    check_text(tokenizer, 301, "a b");
    list.count = 0;
    ck_assert(tokenizer_encode(tokenizer,
                               "\xff\xfe"
                               "a b",
                               5, true, &list, &error));
    ck_assert_int_eq(list.ids[0], 3 + 0xff);
    ck_assert_int_eq(list.ids[1], 3 + 0xfe);
    for (size_t i = 0; i < list.count; i++)
        ck_assert(list.ids[i] != 300 && list.ids[i] != 301);
    tokenizer_close(tokenizer);
    json_decref(vocabulary.root);

    /* Where all scores are equal, ids say which token is made first. */
    load_vocabulary(&vocabulary, LLAMA2);
    tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
    for (size_t i = 0; i < vocabulary.score_count; i++)
        vocabulary.scores[i] = -1000;
    other = open_tokenizer(write_vocabulary(&vocabulary));
    list.count = 0;
    ck_assert(tokenizer_encode(tokenizer, "redistribute the program", 24, true, &list, &error));
    ck_assert(tokenizer_encode(other, "redistribute the program", 24, true, &expected, &error));
    ck_assert_uint_eq(list.count, expected.count);
    ck_assert_mem_eq(list.ids, expected.ids, list.count * sizeof *list.ids);
    tokenizer_close(tokenizer);
    tokenizer_close(other);
    token_list_free(&list);
    token_list_free(&expected);
    tests_remove_folder(folder);
    json_decref(vocabulary.root);
}
END_TEST

/* A file that does not name its pre-tokenizer is read as "default". */
START_TEST(gguf_without_pretokenizer)
{
    struct vocabulary vocabulary;
    struct token_list list[2] = {{0}};
    struct error error;

    load_vocabulary(&vocabulary, LLAMA3);
    tests_make_folder(folder);
    for (int i = 0; i < 2; i++) {
        struct tokenizer *tokenizer;

        vocabulary.pre = i == 0 ? NULL : "default";
        tokenizer = open_tokenizer(write_vocabulary(&vocabulary));
        ck_assert_int_eq(tokenizer_doubt(tokenizer) != NULL, i == 0);
        ck_assert(tokenizer_encode(tokenizer, "don't (1234567)", 15, true, &list[i], &error));
        tokenizer_close(tokenizer);
    }
    ck_assert_uint_eq(list[0].count, list[1].count);
    ck_assert_mem_eq(list[0].ids, list[1].ids, list[0].count * sizeof(int32_t));
    token_list_free(&list[0]);
    token_list_free(&list[1]);
    tests_remove_folder(folder);
    json_decref(vocabulary.root);
}
END_TEST

START_TEST(bad_gguf)
{
    struct vocabulary vocabulary;
    char long_text[1100];
    int kind = LLAMA3;

    tests_make_folder(folder);
#define REFUSED(change, what)                                                                      \
    do {                                                                                           \
        load_vocabulary(&vocabulary, kind);                                                        \
        vocabulary.change;                                                                         \
        check_refused(write_vocabulary(&vocabulary), "model.gguf", what);                          \
        json_decref(vocabulary.root);                                                              \
    } while (0)
    REFUSED(model = NULL, "tokenizer.ggml.model");
    REFUSED(model = "bert", "tokenizer.ggml.model: 'bert'");
    REFUSED(model = "llama", "tokenizer.ggml.scores");
    REFUSED(pre = "gpt-4o", "tokenizer.ggml.pre: 'gpt-4o'");
    REFUSED(token_count = 0, "tokenizer.ggml.tokens");
    REFUSED(token_count -= 1, "tokenizer.ggml.token_type");
    REFUSED(type_count -= 1, "tokenizer.ggml.token_type");
    REFUSED(types[5] = 7, "token 5 is of type 7");
    REFUSED(types[5] = -1, "token 5 is of type -1");
    REFUSED(merge_count = 0, "tokenizer.ggml.merges");
    REFUSED(merges[3] = "ab", "merge 3 is not two texts");
    REFUSED(merges[3] = "a b c", "merge 3 is not two texts");
    REFUSED(merges[3] = "a qqqq", "merge 3 names 'qqqq'");
    REFUSED(merges[3] = " a", "merge 3 names ''");
    REFUSED(merges[3] = "z q", "makes no token");
    REFUSED(texts[70] = "A", "have the same text");
    REFUSED(bos = 608, "tokenizer.ggml.bos_token_id: 608");
    REFUSED(eos = INT32_MAX, "tokenizer.ggml.eos_token_id");
    REFUSED(eot = 608, "tokenizer.ggml.eot_token_id");
    REFUSED(add_bos = 1, "tokenizer.ggml.add_bos_token");
    REFUSED(texts[606] = "<|eot_id|>", "have the same text");
    REFUSED(vocabulary_size = 600, "llama.vocab_size: 600, but there are 608 tokens");
    REFUSED(nested_tokens = true, "tokenizer.ggml.tokens");

    kind = LLAMA2;
    memset(long_text, 'a', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    REFUSED(score_count = 0, "tokenizer.ggml.scores");
    REFUSED(score_count -= 1, "tokenizer.ggml.scores");
    REFUSED(score_type = GGUF_INT8, "tokenizer.ggml.scores");
    REFUSED(score_type = GGUF_UINT8, "tokenizer.ggml.scores");
    REFUSED(scores[300] = NAN, "tokenizer.ggml.scores: that of token 300");
    REFUSED(scores[300] = -INFINITY, "tokenizer.ggml.scores: that of token 300");
    REFUSED(type_count += 1, "tokenizer.ggml.token_type");
    REFUSED(types[300] = 6, "token 300 is a byte; expected '<0x00>' to '<0xFF>'");
    REFUSED(texts[13] = "<0x0a>", "token 13 is a byte");
    REFUSED(texts[13] = "<0x0B>", "tokens 13 and 14 have the same text");
    REFUSED(texts[300] = vocabulary.texts[301], "tokens 300 and 301 have the same text");
    REFUSED(texts[300] = long_text, "token 300 has 1099 bytes");
    REFUSED(unknown = 5000, "tokenizer.ggml.unknown_token_id: 5000");
    REFUSED(bos = 5000, "tokenizer.ggml.bos_token_id: 5000");
    REFUSED(remove_spaces = 1, "tokenizer.ggml.remove_extra_whitespaces");
#undef REFUSED
    tests_remove_folder(folder);
}
END_TEST

/* Every key with a value of another type than it has to be of. */
START_TEST(gguf_values_of_other_types)
{
    static const struct {
        int kind;
        const char *key;
        bool text;
        const char *error;
    } cases[] = {
        {LLAMA3, "model", false, "is UINT32, expected STRING"},
        {LLAMA3, "pre", false, "is UINT32, expected STRING"},
        {LLAMA3, "merges", false, "is UINT32, expected an array of STRING"},
        {LLAMA3, "merges", true, "is STRING, expected an array of STRING"},
        {LLAMA3, "token_type", true, "is STRING, expected an array of integers"},
        {LLAMA3, "token_type", false, "is UINT32, expected an array of integers"},
        {LLAMA3, "bos_token_id", true, "is STRING, expected an integer"},
        {LLAMA3, "eos_token_id", true, "is STRING, expected an integer"},
        {LLAMA3, "eot_token_id", true, "is STRING, expected an integer"},
        {LLAMA3, "eom_token_id", true, "is STRING, expected an integer"},
        {LLAMA3, "eom_token_id", false, "608, but there are 608 tokens"},
        {LLAMA3, "add_bos_token", true, "is STRING, expected BOOL"},
        {LLAMA3, "add_bos_token", false, "is UINT32, expected BOOL"},
        {LLAMA2, "unknown_token_id", true, "is STRING, expected an integer"},
        {LLAMA2, "scores", true, "is STRING, expected an array of FLOAT32"},
        {LLAMA2, "add_space_prefix", true, "is STRING, expected BOOL"},
        {LLAMA2, "remove_extra_whitespaces", false, "is UINT32, expected BOOL"},
    };

    tests_make_folder(folder);
    for (size_t i = 0; i <= sizeof cases / sizeof cases[0]; i++) {
        const bool last = i == sizeof cases / sizeof cases[0];
        struct vocabulary vocabulary;
        char key[64], what[160];

        load_vocabulary(&vocabulary, last ? LLAMA3 : cases[i].kind);
        snprintf(key, sizeof key, "tokenizer.%s%s", last ? "" : "ggml.",
                 last ? "chat_template" : cases[i].key);
        snprintf(what, sizeof what, "%s: %s", key,
                 last ? "is UINT32, expected STRING" : cases[i].error);
        if (is(key, "tokenizer.ggml.model"))
            vocabulary.model = NULL;
        if (is(key, "tokenizer.ggml.pre"))
            vocabulary.pre = NULL;
        if (is(key, "tokenizer.ggml.merges"))
            vocabulary.merge_count = 0;
        if (is(key, "tokenizer.ggml.token_type"))
            vocabulary.type_count = 0;
        if (is(key, "tokenizer.ggml.scores"))
            vocabulary.score_count = 0;
        if (!last && cases[i].text)
            vocabulary.text_key = key;
        else
            vocabulary.number_key = key;
        check_refused(write_vocabulary(&vocabulary), "model.gguf", what);
        json_decref(vocabulary.root);
    }
    tests_remove_folder(folder);
}
END_TEST

/* --- memory ----------------------------------------------------------------------------------- */

static bool open_for_memory(const char *path)
{
    struct tokenizer *tokenizer;
    struct error error;

    return tokenizer_open(path, &tokenizer, &error);
}

static void check_gguf_memory(struct gguf_writer *writer, const char *what)
{
    struct bytes image = gguf_writer_image(writer);

    write_file(in_folder("model.gguf"), image.data, image.size);
    tests_check_memory(open_for_memory, in_folder("model.gguf"), image.size, what);
    bytes_free(&image);
    gguf_writer_free(writer);
    gguf_writer_start(writer);
    gguf_writer_string(writer, "tokenizer.ggml.model", "gpt2");
}

/* `before`, then `unit` with a number in it until there are 2 MB, then `after`. */
static void check_json_memory(const char *before, const char *unit, const char *after)
{
    struct bytes file = {0};
    char text[64];

    bytes_append(&file, before, strlen(before));
    for (int i = 0; file.size < 2000000; i++)
        bytes_append(&file, text, (size_t)snprintf(text, sizeof text, unit, i));
    bytes_append(&file, after, strlen(after));
    write_file(in_folder("tokenizer.json"), file.data, file.size);
    tests_check_memory(open_for_memory, folder, file.size, unit);
    bytes_free(&file);
}

/* What is claimed costs nothing, and what is there a small multiple of its size. */
START_TEST(bounds_memory)
{
    static const char tokens_key[] = "tokenizer.ggml.tokens",
                      merges_key[] = "tokenizer.ggml.merges";
    static const char bpe[] = "{\"model\":{\"type\":\"BPE\",";
    const size_t count = 100000;
    const char **texts = tests_allocate(count, sizeof *texts);
    char(*names)[8] = tests_allocate(count, sizeof *names);
    struct gguf_writer writer;
    char start[128];

    tests_make_folder(folder);
    gguf_writer_start(&writer);
    gguf_writer_string(&writer, "tokenizer.ggml.model", "gpt2");
    gguf_writer_array(&writer, tokens_key, GGUF_STRING, NULL, UINT32_MAX, 0);
    check_gguf_memory(&writer, "claimed tokens");
    for (size_t i = 0; i < count; i++) {
        snprintf(names[i], sizeof names[i], "%zx", i);
        texts[i] = names[i];
    }
    gguf_writer_strings(&writer, tokens_key, texts, count);
    gguf_writer_array(&writer, merges_key, GGUF_STRING, NULL, UINT32_MAX, 0);
    check_gguf_memory(&writer, "claimed merges");
    gguf_writer_strings(&writer, tokens_key, texts, count);
    gguf_writer_strings(&writer, merges_key, texts, count);
    check_gguf_memory(&writer, "tokens");
    for (size_t i = 0; i < count; i++)
        texts[i] = i == 0 ? "a" : i == 1 ? "aa" : i + 1 < count ? "a a" : "a b";
    gguf_writer_strings(&writer, tokens_key, texts, 2);
    gguf_writer_strings(&writer, merges_key, texts + 2, count - 2);
    check_gguf_memory(&writer, "merges");

    check_json_memory("{\"model\":[", "%d,", "1]}");
    check_json_memory("{\"model\":[", "[],", "1]}");
    check_json_memory("{\"model\":[", "\"\",", "1]}");
    snprintf(start, sizeof start, "%s\"vocab\":{", bpe);
    check_json_memory(start, "\"%x\":0,", "\"\":1}}}");
    snprintf(start, sizeof start, "%s\"vocab\":{\"a\":0},\"merges\":[", bpe);
    check_json_memory(start, "\"a a\",", "1]}}");
    snprintf(start, sizeof start, "%s\"vocab\":{\"a\":0},\"merges\":[]},\"added_tokens\":[", bpe);
    check_json_memory(start, "{\"id\":1,\"content\":\"%d\"},", "1]}");
    gguf_writer_free(&writer);
    tests_remove_folder(folder);
    free(names);
    free(texts);
}
END_TEST

static Suite *tokenizer_suite(void)
{
    Suite *suite = suite_create("tokenizer");
    TCase *before = tcase_create("before the merges"), *ids = tcase_create("ids");
    TCase *folders = tcase_create("folders"), *gguf = tcase_create("gguf");

    tcase_add_test(before, sequences);
    tcase_add_test(before, valid_prefixes);
    tcase_add_test(before, nfc);
    tcase_add_test(before, nfc_of_invalid);
    tcase_add_test(before, nfc_of_long_run);
    tcase_add_loop_test(before, splits, 0, N_SPLITS);
    tcase_add_test(before, split_of_invalid);
    tcase_add_loop_test(before, split_of_long_runs, PRETOKENIZER_NONE, PRETOKENIZER_TEKKEN + 1);
    suite_add_tcase(suite, before);

    tcase_add_loop_test(ids, expected_ids, 0, N_KINDS);
    tcase_add_loop_test(ids, other_spelling_of_merges, 0, N_KINDS);
    tcase_add_loop_test(ids, long_run, 0, N_KINDS);
    tcase_add_test(ids, any_bytes);
    tcase_add_test(ids, any_bytes_in_pieces);
    tcase_add_test(ids, parts);
    tcase_add_test(ids, encoding_appends);
    tcase_add_test(ids, streaming);
    tcase_add_test(ids, streaming_of_pieces);
    tcase_add_test(ids, questions);
    suite_add_tcase(suite, ids);

    tcase_add_test(folders, template_says_bos);
    tcase_add_test(folders, configuration);
    tcase_add_test(folders, unknown_bytes);
    tcase_add_test(folders, unknown_characters);
    tcase_add_test(folders, spaces);
    tcase_add_test(folders, merge_loop);
    tcase_add_loop_test(folders, bad_field, 0, sizeof bad_fields / sizeof bad_fields[0]);
    tcase_add_test(folders, good_normalizers);
    tcase_add_test(folders, bad_files);
    suite_add_tcase(suite, folders);

    tcase_add_loop_test(gguf, gguf_ids, 0, MISTRAL);
    tcase_add_test(gguf, gguf_values_of_other_types);
    tcase_add_test(gguf, bounds_memory);
    tcase_add_test(gguf, gguf_options);
    tcase_add_test(gguf, gguf_pieces);
    tcase_add_test(gguf, gguf_without_pretokenizer);
    tcase_add_test(gguf, gguf_pretokenizer_names);
    tcase_add_test(gguf, bad_gguf);
    suite_add_tcase(suite, gguf);
    return suite;
}

int main(void)
{
    return tests_run(tokenizer_suite());
}
