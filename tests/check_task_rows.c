/* SPDX-License-Identifier: MIT */
/* Test rows: what each task hides and asks for, exact lengths, and that a seed makes them anew. */
#include <stdlib.h>
#include <string.h>

#include "task_rows.h"
#include "task_text.h"
#include "tests.h"

/* Words, each with the space before it; marks count for themselves. */
static bool count_words(void *opaque, const char *input, const char *gen_prefix, size_t *tokens,
                        struct error *error)
{
    const char *const texts[] = {input, gen_prefix};

    (void)error;
    *tokens = 0;
    for (size_t i = 0; i < 2; i++) {
        bool word = false;

        for (const char *c = texts[i]; *c != '\0'; c++) {
            bool letter =
                (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9');

            *tokens += (letter && !word) || (!letter && *c != ' ');
            word = letter;
        }
    }
    ++*(size_t *)opaque;
    return true;
}

/* Bytes, so that a word is many tokens. */
static bool count_bytes(void *opaque, const char *input, const char *gen_prefix, size_t *tokens,
                        struct error *error)
{
    (void)opaque, (void)error;
    *tokens = strlen(input) + strlen(gen_prefix);
    return true;
}

/* Pairs of bytes: no text has an odd number of tokens. */
static bool count_evenly(void *opaque, const char *input, const char *gen_prefix, size_t *tokens,
                         struct error *error)
{
    (void)opaque, (void)error;
    *tokens = (strlen(input) + strlen(gen_prefix)) / 2 * 2;
    return true;
}

static size_t calls;
static const struct task_counter words = {count_words, &calls};

static struct task_row make(enum task task, uint64_t seed, size_t index, size_t length)
{
    struct task_row row;
    struct error error;
    size_t tokens;

    ck_assert_msg(task_row_make(task, seed, index, length, &words, &row, &error), "%s", error.text);
    count_words(&calls, row.input, row.gen_prefix, &tokens, &error);
    ck_assert_uint_eq(tokens, length);
    return row;
}

static size_t count_texts(const char *text, const char *part)
{
    size_t count = 0;

    for (const char *at = text; (at = strstr(at, part)) != NULL; at += strlen(part))
        count++;
    return count;
}

/* The `n`-th word after `before`, up to a space or one of ".,?". */
static void word_after(const char *text, const char *before, char word[64])
{
    const char *at = strstr(text, before);
    size_t length;

    ck_assert_msg(at != NULL, "no \"%s\" in %s", before, text);
    at += strlen(before);
    length = strcspn(at, " .,?");
    ck_assert_uint_lt(length, 64);
    memcpy(word, at, length);
    word[length] = '\0';
}

START_TEST(test_single)
{
    static const enum task tasks[] = {TASK_S1, TASK_MULTI_KEY, TASK_UUID};
    static const char *const whats[] = {"number", "number", "identifier"};

    for (size_t i = 0; i < 3; i++) {
        for (size_t index = 0; index < 20; index++) {
            struct task_row row = make(tasks[i], 42, index, 700 + 13 * index);
            char before[64], name[64], needle[160], question[160];

            snprintf(before, sizeof before, "What is the secret %s for ", whats[i]);
            word_after(row.input, before, name);
            ck_assert_uint_eq(row.output_count, 1);
            snprintf(needle, sizeof needle, "The secret %s for %s is: %s.", whats[i], name,
                     row.outputs[0]);
            ck_assert_uint_eq(count_texts(row.input, needle), 1);
            /* Nothing else is said of the name, and the question is the end. */
            ck_assert_uint_eq(count_texts(row.input, name), 2);
            snprintf(question, sizeof question,
                     "\nWhat is the secret %s for %s that is written in the note?", whats[i], name);
            ck_assert_str_eq(strstr(row.input, question), question + 0);
            ck_assert_uint_eq(strlen(row.outputs[0]), tasks[i] == TASK_UUID ? 36 : 7);
            ck_assert_uint_eq(count_texts(row.gen_prefix, name), 1);
            ck_assert_int_ne(row.gen_prefix[strlen(row.gen_prefix) - 1], ' ');
            if (tasks[i] == TASK_MULTI_KEY)
                ck_assert_uint_gt(count_texts(row.input, "The secret number for "), 30);
            else
                ck_assert_uint_eq(count_texts(row.input, "The secret "), 1);
            task_row_free(&row);
        }
    }
}
END_TEST

START_TEST(test_several)
{
    for (size_t index = 0; index < 20; index++) {
        struct task_row query = make(TASK_MULTI_QUERY, 42, index, 900);
        struct task_row value = make(TASK_MULTI_VALUE, 42, index, 900);
        char name[64], text[160];

        ck_assert_uint_eq(query.output_count, 4);
        ck_assert_uint_eq(value.output_count, 4);
        ck_assert_uint_eq(count_texts(query.input, "A secret number for "), 4);
        word_after(value.input, "What are all the secret numbers for ", name);
        snprintf(text, sizeof text, "A secret number for %s is: ", name);
        ck_assert_uint_eq(count_texts(value.input, text), 4);
        for (size_t i = 0; i < 4; i++) {
            snprintf(text, sizeof text, " is: %s.", query.outputs[i]);
            ck_assert_uint_eq(count_texts(query.input, text), 1);
            snprintf(text, sizeof text, "A secret number for %s is: %s.", name, value.outputs[i]);
            ck_assert_uint_eq(count_texts(value.input, text), 1);
        }
        /* Each name is asked for, in the order of the answers. */
        for (const char *at = query.input; (at = strstr(at, "A secret number for ")) != NULL;
             at++) {
            word_after(at, "A secret number for ", name);
            ck_assert_uint_eq(count_texts(query.input, name), 2);
            ck_assert_uint_eq(count_texts(query.gen_prefix, name), 1);
        }
        task_row_free(&query);
        task_row_free(&value);
    }
}
END_TEST

START_TEST(test_tracking)
{
    for (size_t index = 0; index < 20; index++) {
        struct task_row row = make(TASK_VARIABLE_TRACKING, 42, index, 800);
        const char *last = row.input;
        char number[64], text[160];

        ck_assert_uint_eq(row.output_count, 5);
        word_after(row.input, "Which five drawers hold the number ", number);
        for (size_t i = 0; i < 5; i++) {
            const char *at;

            if (i == 0)
                snprintf(text, sizeof text, "Drawer %s holds the number %s.", row.outputs[0],
                         number);
            else
                snprintf(text, sizeof text, "Drawer %s holds the same number as drawer %s.",
                         row.outputs[i], row.outputs[i - 1]);
            ck_assert_uint_eq(count_texts(row.input, text), 1);
            /* Each is said after what it refers to. */
            at = strstr(row.input, text);
            ck_assert(at > last);
            last = at;
        }
        ck_assert_uint_eq(count_texts(row.input, number), 2);
        task_row_free(&row);
    }
}
END_TEST

static size_t count_words_of(const char *text, const char *word)
{
    size_t count = 0, length = strlen(word);

    for (const char *at = text; (at = strstr(at, word)) != NULL; at += length)
        count += (at == text || at[-1] == ' ' || at[-1] == '\n') &&
                 (at[length] == ' ' || at[length] == '\n');
    return count;
}

/* Every word of the list occurs less often than the least frequent answer; how much less is
 * `factor`. */
static void check_frequencies(const struct task_row *row, size_t factor)
{
    char *list = strdup(strchr(row->input, '\n') + 1), *end = strchr(list, '\n');
    size_t least = SIZE_MAX, words_seen = 0;

    ck_assert_ptr_nonnull(end);
    end[1] = '\0';
    for (size_t i = 0; i < row->output_count; i++) {
        size_t count = count_words_of(list, row->outputs[i]);

        ck_assert_uint_gt(count, 0);
        least = count < least ? count : least;
        for (size_t other = 0; other < i; other++)
            ck_assert_ptr_null(strstr(row->outputs[i], row->outputs[other]));
    }
    if (strchr(list, '(') != NULL)
        strchr(list, '(')[0] = '\0';
    for (char *word = strtok(list, " \n"); word != NULL; word = strtok(NULL, " \n")) {
        const char *text = strchr(row->input, '\n') + 1;
        bool answer = word[0] >= '0' && word[0] <= '9';

        for (size_t i = 0; i < row->output_count; i++)
            answer |= strcmp(word, row->outputs[i]) == 0;
        if (!answer)
            ck_assert_uint_le(factor * count_words_of(text, word), least);
        words_seen += !answer;
    }
    ck_assert_uint_gt(words_seen, 3);
    free(list);
}

START_TEST(test_frequencies)
{
    for (size_t index = 0; index < 8; index++) {
        struct task_row common = make(TASK_COMMON_WORDS, 42, index, 450 + 211 * index);
        struct task_row frequent = make(TASK_FREQUENT_WORDS, 42, index, 120 + 211 * index);

        ck_assert_uint_eq(common.output_count, 10);
        ck_assert_uint_eq(frequent.output_count, 3);
        check_frequencies(&common, 4);
        check_frequencies(&frequent, 1);
        for (size_t i = 1; i < 3; i++)
            ck_assert_uint_lt(count_texts(frequent.input, frequent.outputs[i]),
                              count_texts(frequent.input, frequent.outputs[i - 1]));
        task_row_free(&common);
        task_row_free(&frequent);
    }
}
END_TEST

START_TEST(test_lengths)
{
    static const struct task_counter bytes = {count_bytes, NULL};

    for (int task = 0; task < TASKS; task++) {
        for (size_t length = 700; length < 760; length++) {
            struct task_row row = make((enum task)task, 7, length, length);

            task_row_free(&row);
        }
        for (size_t length = 5000; length < 5030; length++) {
            struct task_row row;
            struct error error;

            ck_assert_msg(task_row_make((enum task)task, 7, 0, length, &bytes, &row, &error), "%s",
                          error.text);
            ck_assert_uint_eq(strlen(row.input) + strlen(row.gen_prefix), length);
            task_row_free(&row);
        }
    }
}
END_TEST

/* A long row takes some dozens of texts, not one for each of its sentences. */
START_TEST(test_search)
{
    for (int task = 0; task < TASKS; task++) {
        struct task_row row;

        calls = 0;
        row = make((enum task)task, 42, 0, 50000);
        ck_assert_uint_le(calls, 100);
        task_row_free(&row);
    }
}
END_TEST

static void same_rows(const struct task_row *a, const struct task_row *b, bool same)
{
    ck_assert_int_eq(strcmp(a->input, b->input) == 0, same);
    ck_assert_int_eq(strcmp(a->outputs[0], b->outputs[0]) == 0, same);
}

START_TEST(test_seeds)
{
    for (int task = 0; task < TASKS; task++) {
        struct task_row row = make((enum task)task, 42, 3, 900);
        struct task_row again = make((enum task)task, 42, 3, 900);
        struct task_row next = make((enum task)task, 42, 4, 900);
        struct task_row other = make((enum task)task, 43, 3, 900);

        same_rows(&row, &again, true);
        same_rows(&row, &next, false);
        same_rows(&row, &other, false);
        task_row_free(&row);
        task_row_free(&again);
        task_row_free(&next);
        task_row_free(&other);
    }
}
END_TEST

/* What is hidden is everywhere in the text: in each fifth of it in some of 100 rows. */
START_TEST(test_places)
{
    size_t fifths[5] = {0};

    for (size_t index = 0; index < 100; index++) {
        struct task_row row = make(TASK_S1, 42, index, 600);
        const char *start = strchr(row.input, '\n') + 1;
        size_t at = (size_t)(strstr(row.input, "The secret number") - start);
        size_t length = (size_t)(strstr(row.input, "\nWhat is") - start);

        fifths[5 * at / length]++;
        task_row_free(&row);
    }
    for (size_t i = 0; i < 5; i++)
        ck_assert_uint_ge(fifths[i], 8);
}
END_TEST

/* The numbers of the algorithm's published test. */
START_TEST(test_random)
{
    uint64_t state = 1234567;

    ck_assert(random_next(&state) == 6457827717110365317u);
    ck_assert(random_next(&state) == 3203168211198807973u);
    ck_assert(random_next(&state) == 9817491932198370423u);
}
END_TEST

START_TEST(test_words)
{
    for (size_t i = 0; i < TASK_NOUNS; i++) {
        for (size_t j = 0; j < TASK_NOUNS; j++)
            require(i == j || strstr(task_nouns[i], task_nouns[j]) == NULL);
    }
    for (size_t i = 0; i < TASK_ADJECTIVES; i++) {
        for (size_t j = 0; j < i; j++)
            require(strcmp(task_adjectives[i], task_adjectives[j]) != 0);
    }
}
END_TEST

START_TEST(test_refusals)
{
    static const struct task_counter even = {count_evenly, NULL};
    struct task_row row;
    struct error error;
    enum task task;

    ck_assert(!task_row_make(TASK_S1, 42, 0, 20, &words, &row, &error));
    ck_assert_msg(strstr(error.text, "--length 20: the task s1 needs at least ") == error.text,
                  "%s", error.text);
    ck_assert_ptr_null(row.input);
    ck_assert(!task_row_make(TASK_S1, 42, 0, 2001, &even, &row, &error));
    ck_assert_msg(strstr(error.text, "--length 2001: no text of exactly that length") == error.text,
                  "%s", error.text);
    ck_assert(!task_row_make(TASK_MULTI_KEY, 42, 0, 400000, &words, &row, &error));
    ck_assert_msg(strstr(error.text, "--length 400000: the task multi-key has at most ") ==
                      error.text,
                  "%s", error.text);
    ck_assert(!task_parse("--task", "s2", &task, &error));
    ck_assert_msg(strstr(error.text, "--task: \"s2\" is not one of s1, ") == error.text, "%s",
                  error.text);
    ck_assert(task_parse("--task", "frequent-words", &task, &error));
    ck_assert_int_eq(task, TASK_FREQUENT_WORDS);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("task_rows");
    TCase *tests = tcase_create("task_rows");

    tcase_add_test(tests, test_single);
    tcase_add_test(tests, test_several);
    tcase_add_test(tests, test_tracking);
    tcase_add_test(tests, test_frequencies);
    tcase_add_test(tests, test_lengths);
    tcase_add_test(tests, test_search);
    tcase_add_test(tests, test_seeds);
    tcase_add_test(tests, test_places);
    tcase_add_test(tests, test_random);
    tcase_add_test(tests, test_words);
    tcase_add_test(tests, test_refusals);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
