/* SPDX-License-Identifier: MIT */
/* Mapped files: what is refused, and what becomes of a file that is shortened while it is read. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "file_map.h"
#include "gguf_writer.h"
#include "tests.h"

#define FILE_BYTES 1000000

static char folder[TESTS_FOLDER_BYTES];
static char path[TESTS_FOLDER_BYTES + 32];
static char other_path[TESTS_FOLDER_BYTES + 32];
static struct error error;

static void write_bytes(const char *name, size_t size)
{
    unsigned char *bytes = tests_allocate(size, 1);

    for (size_t i = 0; i < size; i++)
        bytes[i] = (unsigned char)(i % 251);
    write_file(name, bytes, size);
    free(bytes);
}

static void setup(void)
{
    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/file\n\xc2\x9b", folder);
    snprintf(other_path, sizeof other_path, "%s/other", folder);
    write_bytes(path, FILE_BYTES);
    write_bytes(other_path, FILE_BYTES);
}

static void teardown(void)
{
    tests_remove_folder(folder);
}

static unsigned sum(const unsigned char *bytes, size_t size)
{
    const volatile unsigned char *read = bytes;
    unsigned total = 0;

    for (size_t i = 0; i < size; i++)
        total += read[i];
    return total;
}

START_TEST(maps_files)
{
    struct file_map first, second, third;

    ck_assert_msg(file_map_open(path, &first, &error), "%s", error.text);
    ck_assert_msg(file_map_open(other_path, &second, &error), "%s", error.text);
    ck_assert_msg(file_map_open(path, &third, &error), "%s", error.text);
    ck_assert_str_eq(first.path, path);
    ck_assert_uint_eq(first.size, FILE_BYTES);
    ck_assert_uint_eq(first.data[251 * 3 + 7], 7);
    file_map_prefetch(&first);
    /* In an order that is neither that of opening nor its reverse. */
    file_map_close(&second);
    ck_assert_ptr_null(second.data);
    ck_assert_uint_eq(sum(third.data, FILE_BYTES), sum(first.data, FILE_BYTES));
    file_map_close(&third);
    file_map_close(&first);
    file_map_close(&first);
}
END_TEST

static void expect_failure(const char *name, const char *what)
{
    struct file_map map;

    ck_assert(!file_map_open(name, &map, &error));
    ck_assert_ptr_null(map.data);
    ck_assert_ptr_null(map.path);
    file_map_close(&map);
    ck_assert_msg(strstr(error.text, what) != NULL, "%s", error.text);
}

START_TEST(refuses_what_is_not_a_file)
{
    expect_failure(folder, "is a directory, expected a regular file");
    expect_failure("/dev/null", "is not a regular file");
    unlink(path);
    expect_failure(path, "file\?\?: No such file");
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    expect_failure(path, "is not a regular file");
    unlink(path);
    ck_assert_int_eq(symlink(path, path), 0);
    expect_failure(path, "Too many levels");
    write_file(other_path, "", 0);
    expect_failure(other_path, "is empty");
}
END_TEST

/* --- in a process of its own ------------------------------------------------------------------ */

/* What a child process wrote to standard error and how it ended. */
struct outcome {
    char text[1024];
    int status;
};

static struct outcome run_child(void (*body)(void))
{
    struct outcome outcome = {.text = ""};
    size_t length = 0;
    ssize_t size;
    int ends[2];
    pid_t child;

    ck_assert_int_eq(pipe(ends), 0);
    child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        const struct rlimit none = {0, 0};

        setrlimit(RLIMIT_CORE, &none);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        body();
        _exit(0);
    }
    close(ends[1]);
    while ((size = read(ends[0], outcome.text + length, sizeof outcome.text - 1 - length)) > 0)
        length += (size_t)size;
    close(ends[0]);
    ck_assert_int_eq(waitpid(child, &outcome.status, 0), child);
    return outcome;
}

static void read_shortened(void)
{
    struct file_map map, other;

    file_map_guard("puzzlekv-check");
    if (!file_map_open(path, &map, &error) || !file_map_open(other_path, &other, &error) ||
        truncate(path, 70000) != 0)
        _exit(3);
    sum(other.data, other.size);
    sum(map.data, 65536);
    sum(map.data, map.size);
}

START_TEST(reports_a_shortened_file)
{
    const struct outcome outcome = run_child(read_shortened);
    char expected[512];

    ck_assert(WIFEXITED(outcome.status));
    ck_assert_int_eq(WEXITSTATUS(outcome.status), 1);
    snprintf(
        expected, sizeof expected,
        "puzzlekv-check: %s/file\?\?: was shortened while in use, or cannot be read any more\n",
        folder);
    ck_assert_str_eq(outcome.text, expected);
}
END_TEST

/* A mapping that is none of file_map's, beside one that is. */
static void read_other_mapping(void)
{
    struct file_map map;
    FILE *file = fopen(other_path, "rb");
    unsigned char *bytes;

    file_map_guard("puzzlekv-check");
    bytes = mmap(NULL, FILE_BYTES, PROT_READ, MAP_PRIVATE, fileno(file), 0);
    if (!file_map_open(path, &map, &error) || bytes == MAP_FAILED || truncate(other_path, 1) != 0)
        _exit(3);
    sum(bytes, FILE_BYTES);
}

static void read_closed_file(void)
{
    struct file_map map;
    unsigned char *bytes;

    file_map_guard("puzzlekv-check");
    if (!file_map_open(path, &map, &error))
        _exit(3);
    bytes = (unsigned char *)map.data;
    file_map_close(&map);
    /* Another mapping where the closed one was. */
    if (truncate(other_path, 1) != 0 || mmap(bytes, FILE_BYTES, PROT_READ, MAP_PRIVATE | MAP_FIXED,
                                             fileno(fopen(other_path, "rb")), 0) != bytes)
        _exit(3);
    sum(bytes, FILE_BYTES);
}

static void send_signal(void)
{
    struct file_map map;

    file_map_guard("puzzlekv-check");
    if (!file_map_open(path, &map, &error))
        _exit(3);
    raise(SIGBUS);
}

START_TEST(leaves_other_causes_alone)
{
    void (*const bodies[])(void) = {read_other_mapping, read_closed_file, send_signal};

    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        const struct outcome outcome = run_child(bodies[i]);

        ck_assert_msg(WIFSIGNALED(outcome.status), "%zu: %d %s", i, outcome.status, outcome.text);
        ck_assert_int_eq(WTERMSIG(outcome.status), SIGBUS);
        ck_assert_str_eq(outcome.text, "");
    }
}
END_TEST

/* As somebody who may not read it. For root no file is unreadable, unless it is a root that may not
 * become another user either. */
static void open_unreadable(void)
{
    struct file_map map;

    if (geteuid() == 0 && chmod(folder, 0711) == 0 && seteuid(65534) != 0 && errno != EPERM)
        _exit(3);
    if (file_map_open(path, &map, &error) || strstr(error.text, ": Permission denied") == NULL)
        _exit(4);
}

START_TEST(refuses_what_it_may_not_read)
{
    struct outcome outcome;

    ck_assert_int_eq(chmod(path, 0), 0);
    outcome = run_child(open_unreadable);
    ck_assert(WIFEXITED(outcome.status));
    ck_assert_int_eq(WEXITSTATUS(outcome.status), 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("file_map");
    TCase *test_case = tcase_create("file_map");

    tcase_add_checked_fixture(test_case, setup, teardown);
    tcase_add_test(test_case, maps_files);
    tcase_add_test(test_case, refuses_what_is_not_a_file);
    tcase_add_test(test_case, reports_a_shortened_file);
    tcase_add_test(test_case, leaves_other_causes_alone);
    tcase_add_test(test_case, refuses_what_it_may_not_read);
    suite_add_tcase(suite, test_case);
    return tests_run(suite);
}
