/* SPDX-License-Identifier: MIT */
/* Error texts: one line that a terminal shows and does not obey, whatever came out of a file. */
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "runner/pretokenizer.h"
#include "tests.h"

static struct error error;

START_TEST(replaces_control_characters)
{
    static const struct {
        const char *text, *cleaned;
    } cases[] = {
        {"", ""},
        {"plain text ~ 1", "plain text ~ 1"},
        {"a\nb\r\tc\x1b[2Jd\x7f", "a?b\?\?c?[2Jd?"},
        {"\x01\x1f\x1f", "\?\?\?"},
        /* U+0080, U+009B (which begins what ESC [ does), U+009F, and the first that is none. */
        {"a\xc2\x80z\xc2\x9b"
         "31m\xc2\x9f",
         "a?z?31m?"},
        {"\xc2\xa0\xc2\xad", "\xc2\xa0\xc2\xad"},
        {"\x9b"
         "31m\x80\x9f",
         "?31m\?\?"},
        /* The same bytes inside characters. */
        {"\xc3\x9b\xe2\x80\x9c\xf0\x9f\x98\x80", "\xc3\x9b\xe2\x80\x9c\xf0\x9f\x98\x80"},
        /* Not UTF-8: alone, too long for its value, a surrogate, above U+10FFFF, cut off. */
        {"caf\xe9", "caf?"},
        {"\xc0\x80\xed\xa0\x80\xf4\x90\x80\x80", "\?\?\?\?\?\?\?\?\?"},
        {"a\xe2\x80", "a\?\?"},
        {"\xc2", "?"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ck_assert(!error_set(&error, "%s", cases[i].text));
        ck_assert_str_eq(error.text, cases[i].cleaned);
    }
    ck_assert(!error_set(NULL, "%s", "nobody asks"));
}
END_TEST

START_TEST(keeps_to_its_size)
{
    const size_t room = sizeof error.text - 1;

    /* The last character does not fit as a whole. */
    ck_assert(!error_set(&error, "%*s\xe2\x82\xac", (int)room - 2, ""));
    ck_assert_uint_eq(strlen(error.text), room);
    ck_assert_str_eq(error.text + room - 3, " \?\?");
}
END_TEST

START_TEST(leaves_only_what_is_shown)
{
    char text[65];

    tests_seed(7);
    for (int round = 0; round < 100000; round++) {
        size_t length = tests_random() % sizeof text;

        for (size_t i = 0; i < length; i++)
            text[i] = (char)(tests_random() % 255 + 1);
        text[length] = '\0';
        error_clean(text);
        require(strlen(text) <= length);
        length = strlen(text);
        require(utf8_valid_prefix(text, length) == length);
        for (size_t i = 0; i < length; i++) {
            const unsigned char byte = (unsigned char)text[i];

            require(byte >= 0x20 && byte != 0x7f);
            require(byte != 0xc2 || (unsigned char)text[i + 1] >= 0xa0);
        }
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("error");
    TCase *test_case = tcase_create("error");

    tcase_add_test(test_case, replaces_control_characters);
    tcase_add_test(test_case, keeps_to_its_size);
    tcase_add_test(test_case, leaves_only_what_is_shown);
    suite_add_tcase(suite, test_case);
    return tests_run(suite);
}
