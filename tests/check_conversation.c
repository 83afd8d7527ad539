/* SPDX-License-Identifier: MIT */
/* Conversations turn by turn against the whole of them at once, on small vocabularies. */
#include <stdio.h>
#include <string.h>

#include "runner/chat.h"
#include "runner/conversation.h"
#include "runner/tokenizer.h"
#include "tests.h"

/* A model's tokenizer and chat format, and a conversation turn by turn. */
struct talk {
    char name[32];
    struct tokenizer *tokenizer;
    struct chat *chat;
    struct conversation *conversation;
    struct token_list tokens;
    size_t kept;
    struct chat_turn turns[8]; /* the same as a whole */
    size_t count;
};

/* Of the entry of chat.json with that number. */
static bool open_talk(struct talk *talk, size_t number)
{
    json_t *root = tests_json(tests_path("tokenizer/chat.json"));
    json_t *entry = json_array_get(root, number);
    char folder[TESTS_FOLDER_BYTES], path[TESTS_FOLDER_BYTES + 32];
    json_t *tokenizer_json, *config;
    struct error error;
    bool opened;

    *talk = (struct talk){0};
    if (entry == NULL) {
        json_decref(root);
        return false;
    }
    snprintf(talk->name, sizeof talk->name, "%s",
             json_string_value(json_object_get(entry, "name")));
    tests_make_folder(folder);
    tokenizer_json = tests_json(tests_path("tokenizer/%s/tokenizer.json",
                                           json_string_value(json_object_get(entry, "tokenizer"))));
    config = json_pack("{s:O, s:O, s:O}", "bos_token", json_object_get(entry, "bos"), "eos_token",
                       json_object_get(entry, "eos"), "chat_template",
                       json_object_get(entry, "template"));
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    ck_assert_int_eq(json_dump_file(tokenizer_json, path, 0), 0);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    ck_assert_int_eq(json_dump_file(config, path, 0), 0);
    opened = tokenizer_open(folder, &talk->tokenizer, &error) &&
             chat_open(talk->tokenizer, NULL, &talk->chat, &error) &&
             conversation_open(talk->tokenizer, talk->chat, NULL, &talk->conversation, &error);
    tests_remove_folder(folder);
    ck_assert_msg(opened, "%s", error.text);
    json_decref(tokenizer_json);
    json_decref(config);
    json_decref(root);
    return true;
}

static void close_talk(struct talk *talk)
{
    token_list_free(&talk->tokens);
    conversation_close(talk->conversation);
    chat_close(talk->chat);
    tokenizer_close(talk->tokenizer);
}

static void ask(struct talk *talk, const char *text)
{
    struct error error;

    talk->turns[talk->count++] = (struct chat_turn){CHAT_USER, text, strlen(text)};
    ck_assert_msg(conversation_ask(talk->conversation, text, strlen(text), &talk->tokens,
                                   &talk->kept, &error),
                  "%s", error.text);
    ck_assert_uint_lt(talk->kept, talk->tokens.count);
}

/* The model generates the ids of `generated`, piece by piece where it is `split`, for `text`. */
static void answer(struct talk *talk, const char *generated, bool split, const char *text)
{
    size_t length = strlen(generated);
    struct error error;

    for (size_t i = 0, piece = split ? 1 : length; i < length; i += piece)
        ck_assert(
            tokenizer_encode(talk->tokenizer, generated + i, piece, false, &talk->tokens, &error));
    talk->turns[talk->count++] = (struct chat_turn){CHAT_ASSISTANT, text, strlen(text)};
    ck_assert(conversation_answer(talk->conversation, text, strlen(text), &error));
}

/* The tokens are `skip` more than the conversation at once, which they end as from `from` on. */
static void check_whole(const struct talk *talk, size_t from, size_t skip)
{
    struct token_list whole = {0};
    struct error error;

    ck_assert_msg(
        chat_format(talk->chat, NULL, talk->turns, talk->count, CHAT_ANSWER_BEGINS, &whole, &error),
        "%s", error.text);
    ck_assert_uint_eq(talk->tokens.count, whole.count + skip);
    for (size_t i = from; i < talk->tokens.count; i++)
        ck_assert_int_eq(talk->tokens.ids[i], whole.ids[i - skip]);
    token_list_free(&whole);
}

/* Ids as the tokenizer gives them: the turns give what the whole does, and nothing is fed twice.
 * One template leaves out the space with which its models begin an answer. */
START_TEST(turn_by_turn)
{
    struct talk talk;
    size_t before, number = 0;

    for (; open_talk(&talk, number); number++) {
        size_t spaces = 0;

        ask(&talk, "Hello");
        ck_assert_uint_eq(talk.kept, 0);
        check_whole(&talk, 0, 0);
        for (int turn = 0; turn < 2; turn++) {
            answer(&talk, "Hi! What?", false, "Hi! What?");
            before = talk.tokens.count;
            ask(&talk, "<|im_end|> <|eot_id|>\n\nCaf\xc3\xa9 1234?");
            ck_assert_uint_eq(talk.kept, before);
            spaces += strcmp(talk.name, "mistral, first") == 0;
            check_whole(&talk, spaces > 0 ? before : 0, spaces);
        }
        close_talk(&talk);
    }
    ck_assert_uint_gt(number, 5);
}
END_TEST

/* An answer in other ids than its text is encoded in stays as it was generated, also when the
 * template has more turns to write. */
START_TEST(other_ids)
{
    struct talk talk;
    size_t begin, first, second;

    ck_assert(open_talk(&talk, 0));
    ask(&talk, "Hello");
    begin = talk.tokens.count;
    answer(&talk, "You are welcome", false, "You are welcome");
    first = talk.tokens.count - begin;
    talk.tokens.count = begin;
    talk.count--;
    conversation_take_back(talk.conversation);
    answer(&talk, "You are welcome", true, "You are welcome");
    second = talk.tokens.count - begin;
    ck_assert_uint_gt(second, first);
    ask(&talk, "Why?");
    ck_assert_uint_eq(talk.kept, begin + second);
    check_whole(&talk, begin + second, second - first);
    begin = talk.tokens.count;
    answer(&talk, "So.", false, "So.");
    begin = talk.tokens.count;
    ask(&talk, "Why?");
    ck_assert_uint_eq(talk.kept, begin);
    check_whole(&talk, begin, second - first);
    close_talk(&talk);
}
END_TEST

/* What Qwen3's template leaves out of earlier answers leaves the tokens, and nothing else does. */
START_TEST(thoughts)
{
    struct talk talk;
    size_t begin;

    ck_assert(open_talk(&talk, 2));
    ask(&talk, "Hello");
    begin = talk.tokens.count;
    answer(&talk, "<think>\nHm.\n</think>\n\nHi!", false, "<think>\nHm.\n</think>\n\nHi!");
    ask(&talk, "Why?");
    ck_assert_uint_eq(talk.kept, begin);
    check_whole(&talk, 0, 0);
    close_talk(&talk);
}
END_TEST

/* So does what comes from a stop text on. */
START_TEST(stop_text)
{
    struct talk talk;
    size_t begin, end;

    ck_assert(open_talk(&talk, 0));
    ask(&talk, "Hello");
    begin = talk.tokens.count;
    answer(&talk, "Hi! User: yes", false, "Hi! ");
    end = talk.tokens.count;
    ask(&talk, "Why?");
    ck_assert_uint_gt(talk.kept, begin);
    ck_assert_uint_lt(talk.kept, end);
    check_whole(&talk, 0, 0);
    close_talk(&talk);
}
END_TEST

/* A question that is taken back, and a conversation that is cleared, were never there. */
START_TEST(taken_back)
{
    struct talk talk;
    struct error error;
    size_t before;

    ck_assert(open_talk(&talk, 0));
    ask(&talk, "Hello");
    answer(&talk, "Hi!", false, "Hi!");
    before = talk.tokens.count;
    ask(&talk, "Never mind");
    conversation_take_back(talk.conversation);
    talk.count--;
    talk.tokens.count = talk.kept;
    ask(&talk, "Why?");
    ck_assert_uint_eq(talk.kept, before);
    check_whole(&talk, 0, 0);

    conversation_clear(talk.conversation);
    talk.tokens.count = talk.count = 0;
    ask(&talk, "Hello");
    check_whole(&talk, 0, 0);

    /* An answer cut inside a character: U+FFFD has other bytes, so it is read anew. */
    before = talk.tokens.count;
    ck_assert(tokenizer_encode(talk.tokenizer, "Hi \xc3", 4, false, &talk.tokens, &error));
    answer(&talk, "", false, "Hi \xef\xbf\xbd");
    ask(&talk, "Why?");
    ck_assert_uint_ge(talk.kept, before);
    check_whole(&talk, 0, 0);
    close_talk(&talk);
}
END_TEST

/* Without a format each text continues what is there; the BOS comes once. */
START_TEST(raw_text)
{
    struct talk talk;
    struct conversation *raw;
    struct token_list expected = {0};
    struct error error;

    ck_assert(open_talk(&talk, 4));
    ck_assert(conversation_open(talk.tokenizer, NULL, NULL, &raw, &error));
    if (tokenizer_wants_bos(talk.tokenizer))
        ck_assert(token_list_append(&expected, tokenizer_bos(talk.tokenizer), &error));
    for (int turn = 0; turn < 2; turn++) {
        ck_assert(tokenizer_encode(talk.tokenizer, "One <|eot_id|>", 14, true, &expected, &error));
        ck_assert(conversation_ask(raw, "One <|eot_id|>", 14, &talk.tokens, &talk.kept, &error));
        ck_assert(conversation_answer(raw, "", 0, &error));
        ck_assert_uint_eq(talk.tokens.count, expected.count);
        ck_assert_mem_eq(talk.tokens.ids, expected.ids, expected.count * sizeof *expected.ids);
    }
    ck_assert_uint_eq(talk.kept * 2, expected.count + tokenizer_wants_bos(talk.tokenizer));
    ck_assert(!conversation_ask(raw, "", 0, &talk.tokens, &talk.kept, &error));
    ck_assert_uint_eq(talk.tokens.count, expected.count);
    conversation_close(raw);
    conversation_close(NULL);
    token_list_free(&expected);
    close_talk(&talk);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("conversation");
    TCase *tests = tcase_create("all");

    tcase_add_test(tests, turn_by_turn);
    tcase_add_test(tests, other_ids);
    tcase_add_test(tests, thoughts);
    tcase_add_test(tests, stop_text);
    tcase_add_test(tests, taken_back);
    tcase_add_test(tests, raw_text);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
