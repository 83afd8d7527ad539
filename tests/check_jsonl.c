/* SPDX-License-Identifier: MIT */
/* JSON Lines: rows, members, every refusal with its line, and how much memory they take. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gguf_writer.h"
#include "jsonl.h"
#include "tests.h"

static char folder[TESTS_FOLDER_BYTES], path[TESTS_FOLDER_BYTES + 16];

static void make_folder(void)
{
    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/rows.jsonl", folder);
}

static void remove_folder(void)
{
    tests_remove_folder(folder);
}

static void open_rows(struct jsonl *jsonl, const char *text, size_t size)
{
    struct error error;

    write_file(path, text, size);
    ck_assert_msg(jsonl_open(path, jsonl, &error), "%s", error.text);
}

static void next_row(struct jsonl *jsonl, size_t line)
{
    struct error error;
    bool found;

    ck_assert_msg(jsonl_next(jsonl, &found, &error), "%s", error.text);
    ck_assert(found);
    ck_assert_uint_eq(jsonl->line, line);
}

static void no_more_rows(struct jsonl *jsonl)
{
    struct error error;
    bool found;

    ck_assert_msg(jsonl_next(jsonl, &found, &error), "%s", error.text);
    ck_assert(!found);
    ck_assert_ptr_null(jsonl->row);
}

START_TEST(test_rows)
{
    static const char text[] = "{\"a\": \"caf\\u00e9\", \"n\": 7}\n"
                               "\n \t\r\n"
                               "{\"a\": \"\", \"n\": -1.5, \"list\": [1, 2]}\r\n"
                               "{\"n\": 9223372036854775807}";
    const json_t *array;
    const char *string;
    struct jsonl jsonl;
    struct error error;
    int64_t integer;
    double number;

    open_rows(&jsonl, text, sizeof text - 1);
    next_row(&jsonl, 1);
    ck_assert(jsonl_string(&jsonl, jsonl.row, "a", false, &string, &error));
    ck_assert_str_eq(string, "caf\xc3\xa9");
    ck_assert(jsonl_string(&jsonl, jsonl.row, "absent", true, &string, &error));
    ck_assert_ptr_null(string);
    ck_assert(jsonl_integer(&jsonl, jsonl.row, "n", &integer, &error));
    ck_assert_int_eq(integer, 7);
    ck_assert_uint_eq(jsonl.length, strchr(text, '\n') - text);
    ck_assert(jsonl.whole);

    next_row(&jsonl, 4);
    ck_assert_uint_eq(jsonl.offset, strstr(text, "{\"a\": \"\"") - text);
    ck_assert(jsonl_number(&jsonl, jsonl.row, "n", &number, &error));
    ck_assert(number == -1.5);
    ck_assert(jsonl_array(&jsonl, jsonl.row, "list", &array, &error));
    ck_assert_uint_eq(json_array_size(array), 2);

    next_row(&jsonl, 5);
    ck_assert(jsonl_integer(&jsonl, jsonl.row, "n", &integer, &error));
    ck_assert(integer == INT64_MAX);
    ck_assert(!jsonl.whole);
    ck_assert_uint_eq(jsonl.next_offset, sizeof text - 1);
    no_more_rows(&jsonl);
    no_more_rows(&jsonl);
    jsonl_close(&jsonl);
    ck_assert_ptr_null(jsonl.file);
}
END_TEST

START_TEST(test_no_rows)
{
    static const char *const texts[] = {"", "\n", "\r\n\n  "};

    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct jsonl jsonl;

        open_rows(&jsonl, texts[i], strlen(texts[i]));
        no_more_rows(&jsonl);
        jsonl_close(&jsonl);
    }
}
END_TEST

/* Two good rows, a blank line and a bad one: line 4. */
static void refused(const char *text, size_t size, const char *what)
{
    static const char good[] = "{\"a\": 1}\n{}\n\n";
    struct bytes bytes = {0};
    struct jsonl jsonl;
    struct error error;
    char expected[256];
    bool found;

    bytes_append(&bytes, good, sizeof good - 1);
    bytes_append(&bytes, text, size);
    open_rows(&jsonl, (const char *)bytes.data, bytes.size);
    bytes_free(&bytes);
    next_row(&jsonl, 1);
    next_row(&jsonl, 2);
    ck_assert_msg(!jsonl_next(&jsonl, &found, &error), "no \"%s\"", what);
    snprintf(expected, sizeof expected, ": line 4: %s", what);
    tests_check_error(error.text, path, expected);
    jsonl_close(&jsonl);
}

#define REFUSED(text, what) refused(text, sizeof(text) - 1, what)

START_TEST(test_broken_rows)
{
    REFUSED("{\"a\": 1\n{}\n", "is not valid JSON: ");
    REFUSED("{\"a\": 1", "is not valid JSON: ");
    REFUSED("{\"a\": 1} {}\n", "is not valid JSON: ");
    REFUSED("{\"a\": 1, \"a\": 2}\n", "is not valid JSON: duplicate");
    REFUSED("{\"a\": NaN}\n", "is not valid JSON: ");
    REFUSED("{\"a\": \"\\u0000\"}\n", "is not valid JSON: ");
    REFUSED("[1]\n", "is not a JSON object");
    REFUSED("1\n", "is not ");
    REFUSED("{\"a\": \"\0\"}\n", "has a byte of value 0 at offset 7 of the line");
    REFUSED("\0\n", "has a byte of value 0 at offset 0 of the line");
    REFUSED("{\"a\": \"caf\xe9\"}\n", "is not valid UTF-8 at offset 10 of the line");
    REFUSED("{\"a\": \"\xed\xa0\x80\"}\n", "is not valid UTF-8 at offset 7 of the line");
    REFUSED("{\"a\": \"\xc3", "is not valid UTF-8 at offset 7 of the line");
}
END_TEST

START_TEST(test_brackets)
{
    enum { BRACKETS = 10000 };
    char *text = tests_allocate(1, 2 * BRACKETS);

    memset(text, '[', BRACKETS);
    memset(text + BRACKETS, ']', BRACKETS);
    refused(text, 2 * BRACKETS, "10000 arrays and objects in 20000 bytes are too many");
    free(text);
}
END_TEST

static void write_long_row(size_t length)
{
    char *text = tests_allocate(1, length + 1);

    memset(text, 'a', length);
    memcpy(text, "{\"a\": \"", 7);
    memcpy(text + length - 2, "\"}", 2);
    text[length] = '\n';
    write_file(path, text, length + 1);
    free(text);
}

START_TEST(test_long_rows)
{
    const char *string;
    struct jsonl jsonl;
    struct error error;
    bool found;

    write_long_row(JSONL_MAX_LINE);
    ck_assert(jsonl_open(path, &jsonl, &error));
    next_row(&jsonl, 1);
    ck_assert(jsonl_string(&jsonl, jsonl.row, "a", false, &string, &error));
    ck_assert_uint_eq(strlen(string), JSONL_MAX_LINE - 9);
    no_more_rows(&jsonl);
    jsonl_close(&jsonl);

    write_long_row(JSONL_MAX_LINE + 1);
    ck_assert(jsonl_open(path, &jsonl, &error));
    ck_assert(!jsonl_next(&jsonl, &found, &error));
    tests_check_error(error.text, path, ": line 1: is longer than 16 MiB");
    jsonl_close(&jsonl);

    /* However long it is, no more than a multiple of the limit is read. */
    write_file(path, "", 0);
    ck_assert_int_eq(truncate(path, (off_t)1 << 33), 0);
    ck_assert(jsonl_open(path, &jsonl, &error));
    ck_assert(!jsonl_next(&jsonl, &found, &error));
    tests_check_error(error.text, path, ": line 1: is longer than 16 MiB");
    ck_assert_uint_le(jsonl.capacity, 4 * JSONL_MAX_LINE);
    jsonl_close(&jsonl);
}
END_TEST

/* The buffer stays as small as the rows are, however many there are. */
START_TEST(test_many_rows)
{
    enum { ROWS = 100000 };
    struct bytes bytes = {0};
    struct jsonl jsonl;
    struct error error;
    int64_t index;
    char row[256];

    for (int i = 0; i < ROWS; i++) {
        int length =
            snprintf(row, sizeof row, "{\"index\": %d, \"input\": \"%0*d\"}\n", i, 1 + i % 100, 0);

        bytes_append(&bytes, row, (size_t)length);
    }
    open_rows(&jsonl, (const char *)bytes.data, bytes.size);
    for (int i = 0; i < ROWS; i++) {
        bool found;

        require_msg(jsonl_next(&jsonl, &found, &error) && found, "row %d", i);
        require(jsonl.line == (size_t)i + 1);
        require(jsonl_integer(&jsonl, jsonl.row, "index", &index, &error) && index == i);
        require(memcmp(bytes.data + jsonl.offset, jsonl.text, jsonl.length) == 0);
    }
    no_more_rows(&jsonl);
    ck_assert_uint_le(jsonl.capacity, 1 << 17);
    ck_assert_uint_eq(jsonl.next_offset, bytes.size);
    bytes_free(&bytes);
    jsonl_close(&jsonl);
}
END_TEST

START_TEST(test_members)
{
    static const char text[] = "\n{\"s\": \"x\", \"n\": 1.5, \"o\": {}, \"null\": null}\n";
    const json_t *array;
    const char *string;
    struct jsonl jsonl;
    struct error error;
    int64_t integer;
    double number;

    open_rows(&jsonl, text, sizeof text - 1);
    next_row(&jsonl, 2);
    ck_assert(!jsonl_string(&jsonl, jsonl.row, "input", false, &string, &error));
    tests_check_error(error.text, path, ": line 2: \"input\" is missing; expected a string");
    ck_assert(!jsonl_string(&jsonl, jsonl.row, "n", false, &string, &error));
    tests_check_error(error.text, path, ": line 2: \"n\" is not a string");
    ck_assert(!jsonl_string(&jsonl, jsonl.row, "null", true, &string, &error));
    tests_check_error(error.text, path, ": line 2: \"null\" is not a string");
    ck_assert(!jsonl_integer(&jsonl, jsonl.row, "n", &integer, &error));
    tests_check_error(error.text, path, ": line 2: \"n\" is not a whole number");
    ck_assert(!jsonl_number(&jsonl, jsonl.row, "s", &number, &error));
    tests_check_error(error.text, path, ": line 2: \"s\" is not a number");
    ck_assert(!jsonl_array(&jsonl, jsonl.row, "o", &array, &error));
    tests_check_error(error.text, path, ": line 2: \"o\" is not an array");
    ck_assert(!jsonl_array(&jsonl, jsonl.row, "outputs", &array, &error));
    tests_check_error(error.text, path, ": line 2: \"outputs\" is missing; expected an array");
    jsonl_close(&jsonl);
}
END_TEST

START_TEST(test_files)
{
    struct jsonl jsonl;
    struct error error;

    ck_assert(!jsonl_open(path, &jsonl, &error));
    tests_check_error(error.text, path, ": No such file");
    ck_assert_ptr_null(jsonl.file);
    ck_assert(!jsonl_open(folder, &jsonl, &error));
    tests_check_error(error.text, folder, ": not a regular file");
    jsonl_close(&jsonl);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("jsonl");
    TCase *tests = tcase_create("jsonl");

    tcase_add_checked_fixture(tests, make_folder, remove_folder);
    tcase_add_test(tests, test_rows);
    tcase_add_test(tests, test_no_rows);
    tcase_add_test(tests, test_broken_rows);
    tcase_add_test(tests, test_brackets);
    tcase_add_test(tests, test_long_rows);
    tcase_add_test(tests, test_many_rows);
    tcase_add_test(tests, test_members);
    tcase_add_test(tests, test_files);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
