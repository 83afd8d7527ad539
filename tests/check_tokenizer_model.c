/* SPDX-License-Identifier: MIT */
/* The tokenizer and the chat format of the real model, SmolLM2-135M-Instruct, against Hugging Face
 * tokenizers and the model's template. Skipped (77) where the model is not found. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runner/chat.h"
#include "runner/tokenizer.h"
#include "tests.h"

#define SKIPPED 77

static char model[4096];

/* $PUZZLEKV_MODEL, or where tools/fetch-model.sh puts the model. */
static bool find_model(void)
{
    const char *path = getenv("PUZZLEKV_MODEL"), *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");

    if (path != NULL && *path != '\0')
        snprintf(model, sizeof model, "%s", path);
    else if (cache != NULL && *cache != '\0')
        snprintf(model, sizeof model, "%s/puzzlekv/SmolLM2-135M-Instruct.Q4_1.gguf", cache);
    else
        snprintf(model, sizeof model, "%s/.cache/puzzlekv/SmolLM2-135M-Instruct.Q4_1.gguf",
                 home == NULL ? "" : home);
    return access(model, R_OK) == 0;
}

static struct tokenizer *open_model(void)
{
    struct tokenizer *tokenizer;
    struct error error;

    ck_assert_msg(tokenizer_open(model, &tokenizer, &error), "%s", error.text);
    return tokenizer;
}

static json_t *load_expected(void)
{
    return tests_json(tests_path("tokenizer/smollm2.json"));
}

START_TEST(expected_ids)
{
    struct tokenizer *tokenizer = open_model();
    json_t *root = load_expected(), *entry;
    struct token_list list = {0};
    struct error error;
    size_t i;

    json_array_foreach(json_object_get(root, "cases"), i, entry)
    {
        const json_t *text = json_object_get(entry, "text"), *ids = json_object_get(entry, "ids");
        const json_t *plain = json_object_get(entry, "plain_ids");
        const char *bytes = json_string_value(text);

        list.count = 0;
        ck_assert(
            tokenizer_encode(tokenizer, bytes, json_string_length(text), true, &list, &error));
        tests_compare_ids(list.ids, list.count, ids, bytes);
        list.count = 0;
        ck_assert(
            tokenizer_encode(tokenizer, bytes, json_string_length(text), false, &list, &error));
        tests_compare_ids(list.ids, list.count, plain != NULL ? plain : ids, bytes);
    }
    ck_assert_uint_gt(i, 30);
    token_list_free(&list);
    json_decref(root);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(known_sentence)
{
    static const int32_t expected[] = {504, 3575, 282, 4649, 314};
    static const char text[] = "The capital of France is";
    struct tokenizer *tokenizer = open_model();
    struct token_list list = {0};
    struct error error;

    ck_assert(tokenizer_encode(tokenizer, text, sizeof text - 1, true, &list, &error));
    ck_assert_uint_eq(list.count, 5);
    ck_assert_mem_eq(list.ids, expected, sizeof expected);
    token_list_free(&list);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(metadata)
{
    struct tokenizer *tokenizer = open_model();

    ck_assert_uint_eq(tokenizer_count(tokenizer), 49152);
    ck_assert_int_eq(tokenizer_bos(tokenizer), 1);
    ck_assert(!tokenizer_wants_bos(tokenizer));
    ck_assert(tokenizer_is_end(tokenizer, 0));
    ck_assert(!tokenizer_is_end(tokenizer, 1));
    ck_assert(tokenizer_is_end(tokenizer, 2));
    for (int32_t id = 0; id < 49152; id++)
        ck_assert_int_eq(tokenizer_is_special(tokenizer, id), id < 17);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(conversations)
{
    struct tokenizer *tokenizer = open_model();
    json_t *root = load_expected(), *entry;
    struct chat *chat;
    struct error error;
    size_t i;

    ck_assert_msg(chat_open(tokenizer, NULL, &chat, &error), "%s", error.text);
    ck_assert_int_eq(chat_kind(chat), CHAT_CHATML);
    ck_assert_int_eq(chat_end_of_turn(chat), 2);
    json_array_foreach(json_object_get(root, "chat"), i, entry)
    {
        const char *system = json_string_value(json_object_get(entry, "system"));
        json_t *turn;
        struct chat_turn turns[8];
        struct token_list list = {0};
        size_t count;

        json_array_foreach(json_object_get(entry, "turns"), count, turn)
        {
            const json_t *text = json_array_get(turn, 1);
            bool user = strcmp(json_string_value(json_array_get(turn, 0)), "user") == 0;

            ck_assert_uint_lt(count, 8);
            turns[count] = (struct chat_turn){user ? CHAT_USER : CHAT_ASSISTANT,
                                              json_string_value(text), json_string_length(text)};
        }
        ck_assert_msg(chat_format(chat, system, turns, count,
                                  json_is_true(json_object_get(entry, "answer"))
                                      ? CHAT_ANSWER_BEGINS
                                      : CHAT_ANSWER_NONE,
                                  &list, &error),
                      "%s", error.text);
        tests_compare_ids(list.ids, list.count, json_object_get(entry, "ids"), turns[0].text);
        token_list_free(&list);
    }
    ck_assert_uint_gt(i, 5);
    chat_close(chat);
    json_decref(root);
    tokenizer_close(tokenizer);
}
END_TEST

int main(void)
{
    Suite *suite;
    TCase *tests;

    if (!find_model()) {
        fprintf(stderr, "%s: not found: skipped (tools/fetch-model.sh fetches it)\n", model);
        return SKIPPED;
    }
    suite = suite_create("tokenizer of the model");
    tests = tcase_create("all");
    tcase_add_test(tests, expected_ids);
    tcase_add_test(tests, known_sentence);
    tcase_add_test(tests, metadata);
    tcase_add_test(tests, conversations);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
