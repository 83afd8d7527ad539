/* SPDX-License-Identifier: MIT */
/* Files of predictions: begun, continued, cut off anywhere, and refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gguf_writer.h"
#include "task_log.h"
#include "tests.h"

static char folder[TESTS_FOLDER_BYTES], path[TESTS_FOLDER_BYTES + 16];

static void make_folder(void)
{
    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/log.jsonl", folder);
}

static void remove_folder(void)
{
    tests_remove_folder(folder);
}

static json_t *settings(const char *model, int max_new)
{
    return json_pack("{s:s, s:s, s:i, s:[s, s]}", "puzzlekv", "tasks", "model", model, "max_new",
                     max_new, "kv", "raw", "puzzle");
}

static bool open_log(bool resume, json_t *with, struct task_log *log, struct error *error)
{
    bool done = task_log_open(path, resume, with, log, error);

    json_decref(with);
    return done;
}

static void must_open(bool resume, struct task_log *log)
{
    struct error error;

    ck_assert_msg(open_log(resume, settings("a", 5), log, &error), "%s", error.text);
}

/* Rows first .. end - 1 are not there and are written. */
static void write_rows(struct task_log *log, int first, int end)
{
    struct error error;

    for (int row = first; row < end; row++) {
        json_t *object = json_pack("{s:i, s:s}", "row", row, "text", "caf\xc3\xa9");
        const json_t *earlier;

        ck_assert_msg(task_log_read(log, (size_t)row, &earlier, &error), "%s", error.text);
        ck_assert_ptr_null(earlier);
        ck_assert_msg(task_log_write(log, object, &error), "%s", error.text);
        json_decref(object);
    }
}

static void read_rows(struct task_log *log, int end)
{
    struct error error;

    for (int row = 0; row < end; row++) {
        const json_t *earlier;

        ck_assert_msg(task_log_read(log, (size_t)row, &earlier, &error), "%s", error.text);
        ck_assert_ptr_nonnull(earlier);
        ck_assert_int_eq(json_integer_value(json_object_get(earlier, "row")), row);
    }
}

static char *read_file(size_t *size)
{
    FILE *file = fopen(path, "rb");
    char *data = tests_allocate(1, 1 << 16);

    ck_assert_ptr_nonnull(file);
    *size = fread(data, 1, 1 << 16, file);
    fclose(file);
    return data;
}

START_TEST(test_begin)
{
    struct task_log log;
    char *data;
    size_t size;

    must_open(false, &log);
    write_rows(&log, 0, 3);
    /* All that was written is there at once. */
    data = read_file(&size);
    task_log_close(&log);
    ck_assert_uint_eq(size, strlen(data));
    ck_assert_ptr_eq(strstr(data, "{\"puzzlekv\": \"tasks\", "), data);
    ck_assert_ptr_nonnull(strstr(data, "\n{\"row\": 2, "));
    ck_assert_int_eq(data[size - 1], '\n');
    free(data);
}
END_TEST

START_TEST(test_continue)
{
    struct task_log log;
    char *whole, *data;
    size_t size, new_size;

    must_open(true, &log);
    write_rows(&log, 0, 5);
    task_log_close(&log);
    whole = read_file(&size);

    /* Cut off at any byte, it becomes what it would have been. */
    for (size_t cut = 0; cut <= size; cut++) {
        int rows = 0;

        write_file(path, whole, cut);
        for (size_t i = 0; i < cut; i++)
            rows += whole[i] == '\n';
        must_open(true, &log);
        read_rows(&log, rows > 0 ? rows - 1 : 0);
        write_rows(&log, rows > 0 ? rows - 1 : 0, 5);
        task_log_close(&log);
        data = read_file(&new_size);
        ck_assert_uint_eq(new_size, size);
        ck_assert_mem_eq(data, whole, size);
        free(data);
    }
    free(whole);
}
END_TEST

static void refused(bool resume, json_t *with, const char *what)
{
    struct task_log log;
    struct error error;

    ck_assert_msg(!open_log(resume, with, &log, &error), "no \"%s\"", what);
    ck_assert_msg(strstr(error.text, what) != NULL, "\"%s\" is not in \"%s\"", what, error.text);
    ck_assert_ptr_null(log.file);
}

START_TEST(test_refusals)
{
    struct task_log log;
    const json_t *earlier;
    static const char *const foreign[] = {"{\"index\": 1}", "text", "{\"puzzlekv\": \"task\"}"};
    struct error error;
    char *before, *after;
    size_t size, new_size;

    must_open(false, &log);
    write_rows(&log, 0, 2);
    task_log_close(&log);
    before = read_file(&size);
    refused(false, settings("a", 5), "is there already; --resume continues it");
    refused(true, settings("a", 6), ": line 1: --resume: \"max_new\" was 5, and is 6 now");
    refused(true, json_pack("{s:s, s:b}", "puzzlekv", "tasks", "chat", 1),
            ": line 1: --resume: \"chat\" was missing, and is true now");
    after = read_file(&new_size);
    ck_assert_uint_eq(size, new_size);
    ck_assert_mem_eq(before, after, size);
    free(before);
    free(after);
    /* The name of the model alone may be another one. */
    ck_assert(open_log(true, settings("b", 5), &log, &error));
    read_rows(&log, 2);
    write_rows(&log, 2, 3);
    task_log_close(&log);

    /* Nothing is lost of a file that is something else, whether a newline ends it or not. */
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        write_file(path, foreign[i], strlen(foreign[i]));
        refused(true, settings("a", 5), ": line 1: is not what puzzlekv-eval tasks wrote");
        after = read_file(&new_size);
        ck_assert_uint_eq(new_size, strlen(foreign[i]));
        ck_assert_mem_eq(after, foreign[i], new_size);
        free(after);
    }
    before = tests_allocate(1, JSONL_MAX_LINE + 2);
    memset(before, ' ', JSONL_MAX_LINE + 2);
    write_file(path, before, JSONL_MAX_LINE + 2);
    free(before);
    refused(true, settings("a", 5), ": line 1: is longer than 16 MiB");

    write_file(path, "{\"index\": 1}\n", 13);
    refused(true, settings("a", 5), ": line 1: is not what puzzlekv-eval tasks wrote");
    write_file(path, "text\n", 5);
    refused(true, settings("a", 5), ": line 1: is not valid JSON");

    unlink(path);
    must_open(false, &log);
    write_rows(&log, 1, 2);
    task_log_close(&log);
    must_open(true, &log);
    ck_assert(!task_log_read(&log, 0, &earlier, &error));
    tests_check_error(error.text, path, ": line 2: \"row\" is 1, expected 0");
    task_log_close(&log);

    snprintf(path, sizeof path, "%s/none/log", folder);
    refused(false, settings("a", 5), "No such file");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("task_log");
    TCase *tests = tcase_create("task_log");

    tcase_add_checked_fixture(tests, make_folder, remove_folder);
    tcase_add_test(tests, test_begin);
    tcase_add_test(tests, test_continue);
    tcase_add_test(tests, test_refusals);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
