/* SPDX-License-Identifier: MIT */
/* Conversations against what the models' templates give, on small vocabularies. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf_writer.h"
#include "runner/chat.h"
#include "runner/detokenizer.h"
#include "runner/tokenizer.h"
#include "tests.h"

/* One of the small vocabularies with a template (NULL: none), by way of a folder. `as_file`: the
 * template is a file of its own. */
static struct tokenizer *open_with_template(const char *kind, const char *bos, const char *eos,
                                            const char *template, bool as_file)
{
    json_t *tokenizer_json = tests_json(tests_path("tokenizer/%s/tokenizer.json", kind));
    json_t *config = json_object();
    char folder[TESTS_FOLDER_BYTES], path[TESTS_FOLDER_BYTES + 32];
    struct tokenizer *tokenizer;
    struct error error;
    bool opened;

    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    ck_assert_int_eq(json_dump_file(tokenizer_json, path, 0), 0);
    json_object_set_new(config, "bos_token", json_string(bos));
    json_object_set_new(config, "eos_token", json_string(eos));
    if (template != NULL && as_file) {
        snprintf(path, sizeof path, "%s/chat_template.jinja", folder);
        write_file(path, template, strlen(template));
    } else if (template != NULL) {
        json_object_set_new(config, "chat_template", json_string(template));
    }
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    ck_assert_int_eq(json_dump_file(config, path, 0), 0);

    opened = tokenizer_open(folder, &tokenizer, &error);
    tests_remove_folder(folder);
    ck_assert_msg(opened, "%s", error.text);
    json_decref(tokenizer_json);
    json_decref(config);
    return tokenizer;
}

static struct chat *open_chat(const struct tokenizer *tokenizer, const char *date)
{
    struct chat *chat;
    struct error error;

    ck_assert_msg(chat_open(tokenizer, date, &chat, &error), "%s", error.text);
    return chat;
}

#define MAX_TURNS 8

/* Formats a conversation of chat.json and compares the ids. */
static void check_case(const struct chat *chat, const char *name, size_t number,
                       const json_t *expected)
{
    const char *system = json_string_value(json_object_get(expected, "system"));
    const json_t *ids = json_object_get(expected, "ids");
    const json_t *answer = json_object_get(expected, "answer");
    json_t *turn;
    struct chat_turn turns[MAX_TURNS];
    struct token_list list = {0};
    struct error error;
    char what[100];
    size_t count;

    json_array_foreach(json_object_get(expected, "turns"), count, turn)
    {
        const json_t *text = json_array_get(turn, 1);
        bool user = strcmp(json_string_value(json_array_get(turn, 0)), "user") == 0;

        ck_assert_uint_lt(count, MAX_TURNS);
        turns[count] = (struct chat_turn){user ? CHAT_USER : CHAT_ASSISTANT,
                                          json_string_value(text), json_string_length(text)};
    }
    snprintf(what, sizeof what, "%s: conversation %zu", name, number);
    if (json_is_null(ids)) { /* the template refuses it */
        ck_assert_msg(!chat_format(chat, system, turns, count, CHAT_ANSWER_NONE, &list, &error),
                      "%s", what);
        ck_assert_msg(strstr(error.text, "template") != NULL, "%s: %s", what, error.text);
        ck_assert_uint_eq(list.count, 0);
        return;
    }
    ck_assert_msg(chat_format(chat, system, turns, count,
                              json_is_string(answer) ? CHAT_ANSWER_DIRECT
                              : json_is_true(answer) ? CHAT_ANSWER_BEGINS
                                                     : CHAT_ANSWER_NONE,
                              &list, &error),
                  "%s", error.text);
    tests_compare_ids(list.ids, list.count, ids, what);
    token_list_free(&list);
}

static enum chat_kind kind_by_name(const char *name)
{
    return strcmp(name, "chatml") == 0   ? CHAT_CHATML
           : strcmp(name, "llama3") == 0 ? CHAT_LLAMA3
           : strcmp(name, "llama2") == 0 ? CHAT_LLAMA2
                                         : CHAT_MISTRAL;
}

/* The loop's number: even, the template is in tokenizer_config.json; odd, in a file. */
START_TEST(expected_ids)
{
    json_t *root = tests_json(tests_path("tokenizer/chat.json")), *entry, *expected;
    size_t i, j;

    json_array_foreach(root, i, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "name"));
        const char *kind = json_string_value(json_object_get(entry, "kind"));
        const char *eos = json_string_value(json_object_get(entry, "eos"));
        struct tokenizer *tokenizer =
            open_with_template(json_string_value(json_object_get(entry, "tokenizer")),
                               json_string_value(json_object_get(entry, "bos")), eos,
                               json_string_value(json_object_get(entry, "template")), _i != 0);
        struct chat *chat = open_chat(tokenizer, NULL);

        ck_assert_msg(chat_kind(chat) == kind_by_name(kind), "%s is of kind %d", name,
                      (int)chat_kind(chat));
        ck_assert_int_eq(chat_end_of_turn(chat), tokenizer_find(tokenizer, eos, strlen(eos)));
        json_array_foreach(json_object_get(entry, "cases"), j, expected)
            check_case(chat, name, j, expected);
        ck_assert_uint_gt(j, 5);
        chat_close(chat);
        tokenizer_close(tokenizer);
    }
    ck_assert_uint_gt(i, 5);
    json_decref(root);
}
END_TEST

static const char *template_of(const json_t *root, const char *wanted)
{
    json_t *entry;
    size_t i;

    json_array_foreach((json_t *)root, i, entry)
    {
        if (strcmp(json_string_value(json_object_get(entry, "name")), wanted) == 0)
            return json_string_value(json_object_get(entry, "template"));
    }
    ck_abort_msg("no template named %s", wanted);
}

/* The text that a conversation of one "Hello" becomes, all tokens shown. */
static void check_shown(const struct tokenizer *tokenizer, const struct chat *chat,
                        const char *expected)
{
    const struct chat_turn hello = {CHAT_USER, "Hello", 5};
    struct token_list list = {0};
    struct detokenizer detokenizer;
    struct error error;
    char text[4096] = "";

    ck_assert_msg(chat_format(chat, NULL, &hello, 1, CHAT_ANSWER_BEGINS, &list, &error), "%s",
                  error.text);
    ck_assert(detokenizer_open(&detokenizer, tokenizer, true, &error));
    for (size_t i = 0; i < list.count; i++)
        strcat(text, detokenizer_push(&detokenizer, list.ids[i], NULL));
    ck_assert_str_eq(text, expected);
    detokenizer_close(&detokenizer);
    token_list_free(&list);
}

START_TEST(date)
{
    json_t *root = tests_json(tests_path("tokenizer/chat.json"));
    struct tokenizer *tokenizer = open_with_template("llama3", "<|begin_of_text|>", "<|eot_id|>",
                                                     template_of(root, "llama-3.1"), true);
    struct chat *chat = open_chat(tokenizer, "01 Feb 2026");

    check_shown(tokenizer, chat,
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
                "Cutting Knowledge Date: December 2023\nToday Date: 01 Feb 2026\n\n<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n");
    chat_close(chat);
    tokenizer_close(tokenizer);
    json_decref(root);
}
END_TEST

/* The template's words for the beginning of an answer count. */
START_TEST(beginning_of_answer)
{
    struct tokenizer *tokenizer = open_with_template(
        "qwen2", "<|endoftext|>", "<|im_end|>",
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content +"
        " '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ \"<|im_start|>assistant"
        "\\n<think>\\n\" }}{% endif %}",
        true);
    struct chat *chat = open_chat(tokenizer, NULL);

    ck_assert_int_eq(chat_kind(chat), CHAT_CHATML);
    check_shown(tokenizer, chat,
                "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n");
    chat_close(chat);
    tokenizer_close(tokenizer);
}
END_TEST

static const char *const unknown_templates[] = {
    "",
    "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
    "<|im_start|>",
    "<|im_start|>x<|im_end|>",                              /* no generation prompt */
    "<|im_start|><|im_end|>{% if add_generation_prompt %}", /* that begins nothing */
    "{{ '<|im_start|>system\\nIt is ' + strftime_now('%d') + '<|im_end|>' }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ '<|im_start|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "<|im_start|><|im_end|>{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if thinking %}{{ '<think>' }}{% endif %}{% endif %}",
    "<|im_start|><|im_end|>{% for tool in tools %}{{ tool }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ '<|start_header_id|>x<|eot_id|>Cutting Knowledge Date: ' + date }}",
    "{{ '<|start_header_id|>x<|eot_id|>' }}{{ functions }}",
    "{# <|im_start|> '",
    /* Thoughts that are shown in another way than Qwen3's. */
    "<|im_start|><|im_end|>{{ last_query_index }}{{ c.split('</think>')[-1] }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
#define MISTRAL(user, answer)                                                                      \
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ " user       \
    " }}{% else %}{{ " answer " }}{% endif %}{% endfor %}"
#define USER   "'[INST] ' + message['content'] + ' [/INST]'"
#define ANSWER "message['content'] + eos_token"
    MISTRAL("'[INST] ' + text + ' [/INST]'", ANSWER),
    MISTRAL("message['content'] + ' [/INST]'", ANSWER),
    MISTRAL("'[INST]' }}{{ message['content'] }}{{ '[/INST]'", ANSWER),
    MISTRAL(USER, "message['content']"),
    MISTRAL(USER, "'>' + eos_token + message['content']"),
    MISTRAL(USER, ANSWER " }} x {{ 'y'"),
    MISTRAL(USER " }}{{ '[INST]' + message['content'] + ' [/INST]'", ANSWER),
    MISTRAL(USER " }}{{ bos_token + " USER, ANSWER),
    MISTRAL(USER, ANSWER) "{% if add_generation_prompt %}{{ ' ' }}{% endif %}",
    MISTRAL(USER, ANSWER) "{{ strftime_now('%d') }}",
    MISTRAL(USER, ANSWER) "{% set system_message = 'Be good.' %}",
    MISTRAL(USER, ANSWER) "{{ 'x",
    MISTRAL(USER, ANSWER) "{# [INST]",
    MISTRAL("'[INST] a constant that is longer than those of any template' + message['content'] + "
            "' [/INST]'",
            ANSWER),
#undef MISTRAL
#undef USER
#undef ANSWER
};

START_TEST(unknown_template)
{
    const struct chat_turn hello = {CHAT_USER, "Hello", 5};
    struct tokenizer *tokenizer = open_with_template("llama3", "<|begin_of_text|>", "<|eot_id|>",
                                                     unknown_templates[_i], false);
    struct chat *chat = open_chat(tokenizer, NULL);
    struct token_list list = {0};
    struct error error = {""};

    ck_assert_int_eq(chat_kind(chat), CHAT_UNKNOWN);
    ck_assert_int_eq(chat_end_of_turn(chat), TOKEN_NONE);
    ck_assert(!chat_format(chat, NULL, &hello, 1, CHAT_ANSWER_BEGINS, &list, &error));
    ck_assert_uint_eq(list.count, 0);
    ck_assert_str_ne(error.text, "");
    chat_close(chat);
    tokenizer_close(tokenizer);
}
END_TEST

START_TEST(no_template)
{
    struct tokenizer *tokenizer =
        open_with_template("smollm", "<|im_start|>", "<|im_end|>", NULL, false);
    struct chat *chat = open_chat(tokenizer, NULL);

    ck_assert_int_eq(chat_kind(chat), CHAT_NONE);
    chat_close(chat);
    tokenizer_close(tokenizer);
    chat_close(NULL);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("chat");
    TCase *tests = tcase_create("all");

    tcase_add_loop_test(tests, expected_ids, 0, 2);
    tcase_add_test(tests, date);
    tcase_add_test(tests, beginning_of_answer);
    tcase_add_loop_test(tests, unknown_template, 0,
                        sizeof unknown_templates / sizeof unknown_templates[0]);
    tcase_add_test(tests, no_template);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
