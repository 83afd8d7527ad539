/* SPDX-License-Identifier: MIT */
/* Safetensors reader: good files, and headers that lie. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../tools/runner/safetensors.h"
#include "gguf_writer.h"
#include "tests.h"

static char folder[TESTS_FOLDER_BYTES];
static char path[TESTS_FOLDER_BYTES + 32];
static struct error error;

static void setup(void)
{
    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
}

static void teardown(void)
{
    tests_remove_folder(folder);
}

/* A file with this header, spaces up to a multiple of 8 bytes, and data of bytes 0, 1, 2 .. */
static void write_tensors(const char *header, size_t data_size)
{
    struct bytes file = {0};
    const size_t length = (strlen(header) + 7) / 8 * 8;

    bytes_u64(&file, length);
    bytes_append(&file, header, strlen(header));
    while (file.size < length + 8)
        bytes_append(&file, " ", 1);
    for (size_t i = 0; i < data_size; i++) {
        const unsigned char byte = (unsigned char)i;

        bytes_append(&file, &byte, 1);
    }
    write_file(path, file.data, file.size);
    bytes_free(&file);
}

static void expect_failure(const char *what)
{
    struct safetensors *file = (struct safetensors *)&error;

    error.text[0] = '\0';
    ck_assert(!safetensors_open(path, &file, &error));
    ck_assert_ptr_null(file);
    tests_check_error(error.text, path, what);
}

static void expect_bad(const char *header, size_t data_size, const char *what)
{
    write_tensors(header, data_size);
    expect_failure(what);
}

static const char sample[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[8,20]},"
    "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
    "\"none\":{\"dtype\":\"F16\",\"shape\":[0,4],\"data_offsets\":[20,20]},"
    "\"scalar\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[20,22]},"
    "\"other\":{\"dtype\":\"F8_E4M3\",\"shape\":[1,2],\"data_offsets\":[22,24]}}";

START_TEST(reads_tensors)
{
    const struct safetensors_tensor *tensor;
    struct safetensors *file;

    write_tensors(sample, 24);
    ck_assert_msg(safetensors_open(path, &file, &error), "%s", error.text);
    ck_assert_uint_eq(safetensors_count(file), 5);
    ck_assert_str_eq(safetensors_path(file), path);

    tensor = safetensors_tensor(file, "a");
    ck_assert_ptr_nonnull(tensor);
    ck_assert(tensor->known);
    ck_assert_int_eq(tensor->type, QUANT_F32);
    ck_assert_uint_eq(tensor->dimension_count, 1);
    ck_assert_uint_eq(tensor->dimensions[0], 2);
    ck_assert_uint_eq(tensor->dimensions[1], 1);
    ck_assert(memcmp(tensor->data, "\0\1\2\3\4\5\6\7", 8) == 0);

    tensor = safetensors_tensor(file, "b");
    ck_assert_ptr_nonnull(tensor);
    ck_assert_int_eq(tensor->type, QUANT_BF16);
    ck_assert_uint_eq(tensor->dimensions[0], 2);
    ck_assert_uint_eq(tensor->dimensions[1], 3);
    ck_assert_uint_eq(*(const unsigned char *)tensor->data, 8);

    tensor = safetensors_tensor(file, "none");
    ck_assert_ptr_nonnull(tensor);
    ck_assert_uint_eq(tensor->dimensions[0], 0);
    tensor = safetensors_tensor(file, "scalar");
    ck_assert_ptr_nonnull(tensor);
    ck_assert_int_eq(tensor->type, QUANT_F16);
    ck_assert_uint_eq(tensor->dimension_count, 0);
    ck_assert_uint_eq(*(const unsigned char *)tensor->data, 20);

    tensor = safetensors_tensor(file, "other");
    ck_assert_ptr_nonnull(tensor);
    ck_assert(!tensor->known);
    ck_assert_str_eq(tensor->dtype, "F8_E4M3");
    ck_assert_ptr_null(tensor->data);
    ck_assert_ptr_null(safetensors_tensor(file, "c"));
    ck_assert_ptr_null(safetensors_tensor(file, "__metadata__"));
    safetensors_close(file);
    safetensors_close(NULL);
}
END_TEST

START_TEST(reads_an_empty_header)
{
    struct safetensors *file;

    write_tensors("{}", 0);
    ck_assert_msg(safetensors_open(path, &file, &error), "%s", error.text);
    ck_assert_uint_eq(safetensors_count(file), 0);
    ck_assert_ptr_null(safetensors_tensor(file, "a"));
    safetensors_close(file);
}
END_TEST

START_TEST(refuses_what_is_not_a_file)
{
    expect_failure("No such file");
    ck_assert_int_eq(mkdir(path, 0700), 0);
    expect_failure("is a directory");
    rmdir(path);
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    expect_failure("is not a regular file");
    unlink(path);
    write_file(path, "", 0);
    expect_failure("is empty");
}
END_TEST

START_TEST(refuses_truncation_anywhere)
{
    const size_t size = 8 + (sizeof sample + 6) / 8 * 8 + 24;

    write_tensors(sample, 24);
    for (size_t length = size - 1; length > 0; length--) {
        ck_assert_int_eq(truncate(path, (off_t)length), 0);
        expect_failure(length < 8           ? "truncated"
                       : length < size - 24 ? "the header length is"
                                            : "tensor");
    }
}
END_TEST

START_TEST(refuses_bad_header_lengths)
{
    static const uint64_t lengths[] = {9, 1 << 20, INT64_MAX, UINT64_MAX - 7, UINT64_MAX};

    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        struct bytes file = {0};

        bytes_u64(&file, lengths[i]);
        bytes_append(&file, "{}      ", 8);
        write_file(path, file.data, file.size);
        bytes_free(&file);
        expect_failure("the header length is");
    }
}
END_TEST

START_TEST(refuses_bad_json)
{
    expect_bad("{\"a\":", 0, "the header: line 1: is not valid JSON");
    expect_bad("", 0, "the header: line 1: is not valid JSON");
    expect_bad("[]", 0, "the header: is not a JSON object");
    expect_bad("{\"a\":1}", 0, "tensor a: is not a JSON object");
    expect_bad("{\"\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
               "tensor 1: the name is empty");
    expect_bad("{\"\xff\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
               "the header: line 1: is not valid JSON: unable to decode byte");
    expect_bad("{\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
               "the header: line 1: is not valid JSON");
    expect_bad("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
               "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
               8, "duplicate");
}
END_TEST

#define TENSOR(dtype, shape, offsets)                                                              \
    "{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

START_TEST(refuses_bad_entries)
{
    expect_bad(TENSOR("3", "[1]", "[0,4]"), 4, "tensor a: dtype is not a string");
    expect_bad("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
               "tensor a: dtype is not a string");
    expect_bad(TENSOR("\"F32\"", "1", "[0,4]"), 4, "tensor a: shape is not an array");
    expect_bad(TENSOR("\"F32\"", "[1,1,1,1,1]", "[0,4]"), 4, "tensor a: shape is not an array");
    expect_bad(TENSOR("\"F32\"", "[1,-1]", "[0,4]"), 4, "tensor a: shape[1] is not a size");
    expect_bad(TENSOR("\"F32\"", "[1.0]", "[0,4]"), 4, "tensor a: shape[0] is not a size");
    expect_bad(TENSOR("\"F32\"", "[18446744073709551617]", "[0,4]"), 4, "not valid JSON");
    expect_bad(TENSOR("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0,
               "tensor a: shape[1] is 4294967296: the number of elements overflows");
    expect_bad(TENSOR("\"F32\"", "[4611686018427387904]", "[0,0]"), 0,
               "tensor a: data_offsets span 0 bytes");
    expect_bad(TENSOR("\"F32\"", "[1]", "4"), 4, "tensor a: data_offsets is not [BEGIN, END]");
    expect_bad(TENSOR("\"F32\"", "[1]", "[0]"), 4, "tensor a: data_offsets is not [BEGIN, END]");
    expect_bad(TENSOR("\"F32\"", "[1]", "[0,4,8]"), 4, "data_offsets is not [BEGIN, END]");
    expect_bad(TENSOR("\"F32\"", "[1]", "[-4,0]"), 4, "data_offsets is not [BEGIN, END]");
    expect_bad(TENSOR("\"F32\"", "[1]", "[4,0]"), 4, "data_offsets is not [BEGIN, END]");
    expect_bad(TENSOR("\"F32\"", "[1]", "[0,8]"), 4, "tensor a: data_offsets end at 8, past the 4");
    expect_bad(TENSOR("\"F32\"", "[1]", "[0,9223372036854775807]"), 4,
               "tensor a: data_offsets end at 9223372036854775807");
    expect_bad(TENSOR("\"F32\"", "[1]", "[0,2]"), 4, "tensor a: data_offsets span 2 bytes");
    expect_bad(TENSOR("\"BF16\"", "[2,2]", "[0,4]"), 4, "tensor a: data_offsets span 4 bytes");
    expect_bad(TENSOR("\"F32\"", "[0]", "[0,4]"), 4, "tensor a: data_offsets span 4 bytes");
    expect_bad(TENSOR("\"I8\"", "[1]", "[0,9]"), 4, "tensor a: data_offsets end at 9");
}
END_TEST

/* `count` times `unit` after `before`, and then `after`. */
static char *repeat(const char *before, const char *unit, size_t count, const char *after)
{
    struct bytes text = {0};

    bytes_append(&text, before, strlen(before));
    for (size_t i = 0; i < count; i++)
        bytes_append(&text, unit, strlen(unit));
    bytes_append(&text, after, strlen(after) + 1);
    return (char *)text.data;
}

static void expect_bad_flood(const char *before, const char *unit, size_t count, const char *after,
                             const char *what)
{
    char *header = repeat(before, unit, count, after);

    expect_bad(header, 4, what);
    free(header);
}

START_TEST(refuses_floods)
{
    static const char quoted[] =
        "{\"__metadata__\":{\"json\":\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["
        "[[[[[[[[[["
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{{\\\"[[[[[\"}}";
    struct safetensors *file;

    expect_bad_flood("{\"a\":{\"dtype\":\"F32\",\"shape\":[", "1,", 1000000,
                     "1],\"data_offsets\":[0,4]}}", "tensor a: shape is not an array of at most 4");
    expect_bad_flood("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[", "0,", 1000000,
                     "4]}}", "tensor a: data_offsets is not [BEGIN, END]");
    expect_bad_flood("{\"a\":[", "[],", 1000000, "1]}",
                     "the header: 1000002 arrays and objects in 30000");
    expect_bad_flood("{\"a\":[", "{},", 1000000, "1]}", "arrays and objects in");
    expect_bad_flood("{\"a\":", "[", 1000000, "", "arrays and objects in");
    expect_bad_flood("{\"a\":", "                [", 10000, "",
                     "is not valid JSON: maximum parsing depth reached");
    expect_bad_flood("{\"a\":\"", "xxxxxxxx", 3000000, "\"}",
                     "the header length is 24000008, the file has 24000020 bytes");
    write_tensors(quoted, 0);
    ck_assert_msg(safetensors_open(path, &file, &error), "%s", error.text);
    safetensors_close(file);
}
END_TEST

START_TEST(refuses_holes_and_overlaps)
{
    expect_bad(TENSOR("\"F32\"", "[1]", "[4,8]"), 8,
               "tensor a: data_offsets begin at 4, expected 0");
    expect_bad(TENSOR("\"F32\"", "[1]", "[0,4]"), 8, "the tensors take 4 of the 8 bytes");
    expect_bad("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
               "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
               12, "tensor b: data_offsets begin at 4, expected 8");
}
END_TEST

START_TEST(reads_what_is_not_aligned)
{
    const struct safetensors_tensor *tensor;
    struct safetensors *file;

    write_tensors("{\"a\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,2]},"
                  "\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[2,5]},"
                  "\"c\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[5,7]}}",
                  7);
    ck_assert_msg(safetensors_open(path, &file, &error), "%s", error.text);
    ck_assert(safetensors_tensor(file, "a")->aligned);
    tensor = safetensors_tensor(file, "c");
    ck_assert(!tensor->aligned);
    ck_assert(memcmp(tensor->data, "\5\6", 2) == 0);
    safetensors_close(file);
}
END_TEST

/* --- several files and their index ------------------------------------------------------------ */

static char index_path[TESTS_FOLDER_BYTES + 32];

static void write_index(const char *text)
{
    snprintf(index_path, sizeof index_path, "%s/index.json", folder);
    write_file(index_path, text, strlen(text));
}

static void expect_bad_index(const char *text, const char *what)
{
    struct safetensors *files = (struct safetensors *)&error;

    write_index(text);
    ck_assert(!safetensors_open_index(index_path, &files, &error));
    ck_assert_ptr_null(files);
    tests_check_error(error.text, folder, what);
}

/* a and b in model.safetensors, c and another b in other.safetensors. */
static void write_two(void)
{
    char first[sizeof path];

    write_tensors("{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                  "\"c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5]}}",
                  5);
    memcpy(first, path, sizeof path);
    snprintf(path, sizeof path, "%s/other.safetensors", folder);
    ck_assert_int_eq(rename(first, path), 0);
    memcpy(path, first, sizeof path);
    write_tensors("{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]},"
                  "\"b\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[4,6]}}",
                  6);
}

START_TEST(reads_an_index)
{
    struct safetensors *files;

    write_two();
    write_index("{\"metadata\":{\"total_size\":10},\"weight_map\":{\"c\":\"other.safetensors\","
                "\"b\":\"model.safetensors\",\"a\":\"model.safetensors\"}}");
    ck_assert_msg(safetensors_open_index(index_path, &files, &error), "%s", error.text);
    ck_assert_uint_eq(safetensors_count(files), 3);
    ck_assert_str_eq(safetensors_path(files), index_path);
    ck_assert_str_eq(safetensors_tensor(files, "a")->file->path, path);
    ck_assert_str_eq(safetensors_tensor(files, "b")->dtype, "F16");
    ck_assert_str_ne(safetensors_tensor(files, "c")->file->path, path);
    ck_assert(!safetensors_tensor(files, "c")->aligned);
    ck_assert_ptr_null(safetensors_tensor(files, "d"));
    safetensors_prefetch(files);
    safetensors_close(files);
}
END_TEST

START_TEST(refuses_bad_indices)
{
    char name[300], text[400];

    write_two();
    expect_bad_index("", "index.json: is empty");
    expect_bad_index("{", "index.json: line 1: is not valid JSON");
    expect_bad_index("[]", "index.json: is not a JSON object");
    expect_bad_index("{}", "index.json: weight_map: is not an object that names tensors");
    expect_bad_index("{\"weight_map\":[]}", "weight_map: is not an object");
    expect_bad_index("{\"weight_map\":{}}", "weight_map: is not an object");
    expect_bad_index("{\"weight_map\":{\"a\":1}}", "tensor a: is not the name of a file");
    expect_bad_index("{\"weight_map\":{\"a\":\"\"}}", "weight_map:  is not the name of a file");
    expect_bad_index("{\"weight_map\":{\"a\":\"../x\"}}", "weight_map: ../x is not the name of a");
    expect_bad_index("{\"weight_map\":{\"a\":\"/dev/zero\"}}", "/dev/zero is not the name of a");
    expect_bad_index("{\"weight_map\":{\"a\":\"..\"}}", "..: is a directory");
    expect_bad_index("{\"weight_map\":{\"a\":\"none\"}}", "/none: No such file");
    expect_bad_index("{\"weight_map\":{\"a\":\"index.json\"}}", "index.json: the header length");
    expect_bad_index("{\"weight_map\":{\"a\":\"model.safetensors\",\"d\":\"model.safetensors\"}}",
                     "weight_map: tensor d is not in model.safetensors");
    expect_bad_index("{\"weight_map\":{\"a\":\"other.safetensors\"}}",
                     "weight_map: tensor a is not in other.safetensors");
    expect_bad_index("{\"weight_map\":{\"a\":\"model.safetensors\",\"a\":\"other.safetensors\"}}",
                     "duplicate");
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    snprintf(text, sizeof text, "{\"weight_map\":{\"a\":\"%s\"}}", name);
    expect_bad_index(text, "File name too long");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("safetensors");
    TCase *test_case = tcase_create("safetensors");

    tcase_add_checked_fixture(test_case, setup, teardown);
    tcase_add_test(test_case, reads_tensors);
    tcase_add_test(test_case, reads_an_empty_header);
    tcase_add_test(test_case, refuses_what_is_not_a_file);
    tcase_add_test(test_case, refuses_truncation_anywhere);
    tcase_add_test(test_case, refuses_bad_header_lengths);
    tcase_add_test(test_case, refuses_bad_json);
    tcase_add_test(test_case, refuses_bad_entries);
    tcase_add_test(test_case, refuses_floods);
    tcase_add_test(test_case, refuses_holes_and_overlaps);
    tcase_add_test(test_case, reads_what_is_not_aligned);
    tcase_add_test(test_case, reads_an_index);
    tcase_add_test(test_case, refuses_bad_indices);
    suite_add_tcase(suite, test_case);
    return tests_run(suite);
}
