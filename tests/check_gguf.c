/* SPDX-License-Identifier: MIT */
/* GGUF reader: good files, and every way in which a file can lie about its own structure. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../tools/runner/gguf.h"
#include "gguf_writer.h"
#include "tests.h"

static char folder[TESTS_FOLDER_BYTES];
static char path[TESTS_FOLDER_BYTES + 32];
static struct gguf_writer writer;
static struct error error;

static void setup(void)
{
    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/file.gguf", folder);
    gguf_writer_start(&writer);
}

static void teardown(void)
{
    gguf_writer_free(&writer);
    tests_remove_folder(folder);
}

/* Saves the writer's file and opens it. */
static struct gguf *open_good(void)
{
    struct gguf *gguf;

    gguf_writer_save(&writer, path);
    ck_assert_msg(gguf_open(path, &gguf, &error), "%s", error.text);
    return gguf;
}

/* Opening must fail with an error that names the file and says `what`. */
static void expect_failure(const char *what)
{
    struct gguf *gguf = (struct gguf *)&error;

    error.text[0] = '\0';
    ck_assert(!gguf_open(path, &gguf, &error));
    ck_assert_ptr_null(gguf);
    tests_check_error(error.text, path, what);
}

static void expect_bad(const char *what)
{
    gguf_writer_save(&writer, path);
    expect_failure(what);
}

/* The same with a fresh writer afterwards, for tables of bad files in one test. */
static void expect_bad_then_restart(const char *what)
{
    expect_bad(what);
    gguf_writer_free(&writer);
    gguf_writer_start(&writer);
}

static void expect_text(const char *what)
{
    tests_check_error(error.text, path, what);
    error.text[0] = '\0';
}

/* Something of every kind. */
static void write_sample(void)
{
    static const char *const words[] = {"", "one", "two\n"};
    static const int32_t ints[] = {-1, 0, 7};
    static const uint8_t bytes[] = {0, 255};
    static const float floats[] = {0.5f, -2};
    static const uint64_t big = UINT64_C(1) << 62;
    static const int8_t minus = -5;
    static const double pi = 3.25;

    gguf_writer_string(&writer, "text", "hello");
    gguf_writer_uint(&writer, "count", 4000000000u);
    gguf_writer_value(&writer, "big", GGUF_UINT64, &big, sizeof big);
    gguf_writer_value(&writer, "minus", GGUF_INT8, &minus, sizeof minus);
    gguf_writer_float(&writer, "half", 0.5f);
    gguf_writer_value(&writer, "pi", GGUF_FLOAT64, &pi, sizeof pi);
    gguf_writer_bool(&writer, "yes", 1);
    gguf_writer_bool(&writer, "no", 0);
    gguf_writer_strings(&writer, "words", words, 3);
    gguf_writer_array(&writer, "ints", GGUF_INT32, ints, 3, sizeof ints);
    gguf_writer_array(&writer, "bytes", GGUF_UINT8, bytes, 2, sizeof bytes);
    gguf_writer_array(&writer, "floats", GGUF_FLOAT32, floats, 2, sizeof floats);
    gguf_writer_array(&writer, "none", GGUF_FLOAT32, NULL, 0, 0);
    gguf_writer_tensor(&writer, "matrix", 3, 64, 3, NULL); /* Q4_1 */
    gguf_writer_tensor(&writer, "vector", 0, 5, 0, NULL);  /* F32 */
    gguf_writer_tensor(&writer, "half", 1, 3, 2, NULL);    /* F16 */
}

static void check_sample(const struct gguf *gguf)
{
    struct gguf_string text, *words;
    const struct gguf_tensor *tensor;
    uint64_t integer;
    int64_t *ints;
    float *floats;
    double number;
    size_t count;
    bool flag;

    ck_assert(gguf_has(gguf, "text"));
    ck_assert(!gguf_has(gguf, "tex"));
    ck_assert(!gguf_has(gguf, "text "));
    ck_assert(gguf_get_string(gguf, "text", &text, &error));
    ck_assert_uint_eq(text.size, 5);
    ck_assert(memcmp(text.data, "hello", 5) == 0);
    ck_assert(gguf_get_uint(gguf, "count", &integer, &error));
    ck_assert_uint_eq(integer, 4000000000u);
    ck_assert(gguf_get_uint(gguf, "big", &integer, &error));
    ck_assert_uint_eq(integer, UINT64_C(1) << 62);
    ck_assert(gguf_get_float(gguf, "half", &number, &error));
    ck_assert_double_eq(number, 0.5);
    ck_assert(gguf_get_float(gguf, "pi", &number, &error));
    ck_assert_double_eq(number, 3.25);
    ck_assert(gguf_get_bool(gguf, "yes", &flag, &error) && flag);
    ck_assert(gguf_get_bool(gguf, "no", &flag, &error) && !flag);

    ck_assert(gguf_get_strings(gguf, "words", &words, &count, &error));
    ck_assert_uint_eq(count, 3);
    ck_assert_uint_eq(words[0].size, 0);
    ck_assert_uint_eq(words[1].size, 3);
    ck_assert(memcmp(words[2].data, "two\n", 4) == 0);
    free(words);
    ck_assert(gguf_get_ints(gguf, "ints", &ints, &count, &error));
    ck_assert_uint_eq(count, 3);
    ck_assert_int_eq(ints[0], -1);
    ck_assert_int_eq(ints[2], 7);
    free(ints);
    ck_assert(gguf_get_ints(gguf, "bytes", &ints, &count, &error));
    ck_assert_uint_eq(count, 2);
    ck_assert_int_eq(ints[1], 255);
    free(ints);
    ck_assert(gguf_get_floats(gguf, "floats", &floats, &count, &error));
    ck_assert_uint_eq(count, 2);
    ck_assert_float_eq(floats[1], -2);
    free(floats);
    ck_assert(gguf_get_floats(gguf, "none", &floats, &count, &error));
    ck_assert_uint_eq(count, 0);
    ck_assert_ptr_nonnull(floats);
    free(floats);

    ck_assert_uint_eq(gguf_tensor_count(gguf), 3);
    tensor = gguf_tensor(gguf, "matrix");
    ck_assert_ptr_nonnull(tensor);
    ck_assert(tensor->known);
    ck_assert_int_eq(tensor->type, QUANT_Q4_1);
    ck_assert_uint_eq(tensor->dimension_count, 2);
    ck_assert_uint_eq(tensor->dimensions[0], 64);
    ck_assert_uint_eq(tensor->dimensions[1], 3);
    ck_assert_uint_eq(tensor->dimensions[2], 1);
    ck_assert_uint_eq(tensor->dimensions[3], 1);
    ck_assert_uint_eq(tensor->size, 3 * 40);
    ck_assert_uint_eq((uintptr_t)tensor->data % 32, 0);
    ck_assert(memcmp(tensor->data, writer.data.data, tensor->size) == 0);
    tensor = gguf_tensor(gguf, "vector");
    ck_assert_ptr_nonnull(tensor);
    ck_assert_uint_eq(tensor->dimension_count, 1);
    ck_assert_uint_eq(tensor->size, 20);
    ck_assert(memcmp(tensor->data, writer.data.data + 128, tensor->size) == 0);
    ck_assert_ptr_null(gguf_tensor(gguf, "missing"));
    ck_assert_ptr_null(gguf_tensor(gguf, "matri"));
    ck_assert_str_eq(gguf_path(gguf), path);
}

START_TEST(reads_versions_2_and_3)
{
    write_sample();
    for (writer.version = 2; writer.version <= 3; writer.version++) {
        struct gguf *gguf = open_good();

        check_sample(gguf);
        gguf_close(gguf);
    }
}
END_TEST

START_TEST(reads_other_alignments)
{
    static const uint32_t alignments[] = {8, 64, 4096};

    for (size_t i = 0; i < 3; i++) {
        struct gguf *gguf;
        const struct gguf_tensor *second;

        writer.alignment = alignments[i];
        gguf_writer_uint(&writer, "general.alignment", alignments[i]);
        gguf_writer_tensor(&writer, "first", 0, 1, 0, NULL);
        gguf_writer_tensor(&writer, "second", 0, 3, 0, NULL);
        gguf = open_good();
        second = gguf_tensor(gguf, "second");
        ck_assert_ptr_nonnull(second);
        ck_assert_uint_eq((uintptr_t)second->data % alignments[i], 0);
        ck_assert(memcmp(second->data, writer.data.data + alignments[i], 12) == 0);
        gguf_close(gguf);
        gguf_writer_free(&writer);
        gguf_writer_start(&writer);
    }
}
END_TEST

START_TEST(reads_files_without_tensors)
{
    struct gguf *gguf = open_good();

    ck_assert_uint_eq(gguf_tensor_count(gguf), 0);
    ck_assert_ptr_null(gguf_tensor(gguf, "any"));
    ck_assert(!gguf_has(gguf, "any"));
    gguf_close(gguf);

    gguf_writer_string(&writer, "only", "metadata");
    gguf = open_good();
    ck_assert_uint_eq(gguf_tensor_count(gguf), 0);
    ck_assert(gguf_has(gguf, "only"));
    gguf_close(gguf);
    gguf_close(NULL);
}
END_TEST

START_TEST(keeps_tensors_of_unknown_types)
{
    static const uint64_t dimensions[] = {256, 4};
    struct gguf *gguf;
    const struct gguf_tensor *tensor;

    gguf_writer_entry(&writer, "odd", 16, 2, dimensions, 0); /* IQ2_XXS */
    gguf = open_good();
    tensor = gguf_tensor(gguf, "odd");
    ck_assert_ptr_nonnull(tensor);
    ck_assert(!tensor->known);
    ck_assert_uint_eq(tensor->gguf_type, 16);
    ck_assert_uint_eq(tensor->dimensions[1], 4);
    ck_assert_ptr_null(tensor->data);
    ck_assert_uint_eq(tensor->size, 0);
    gguf_close(gguf);
}
END_TEST

/* --- split models ----------------------------------------------------------------------------- */

static char part_paths[3][TESTS_FOLDER_BYTES + 32];

/* What a part says; a member of -1 is left out. */
struct part {
    int number, count, total;
};

static void write_part(const char *part_path, struct part part, const char *const *tensors)
{
    const uint16_t number = (uint16_t)part.number, count = (uint16_t)part.count;
    const int32_t total = part.total;

    gguf_writer_string(&writer, "part", part_path);
    if (part.number >= 0)
        gguf_writer_value(&writer, "split.no", GGUF_UINT16, &number, sizeof number);
    if (part.count >= 0)
        gguf_writer_value(&writer, "split.count", GGUF_UINT16, &count, sizeof count);
    if (part.total >= 0)
        gguf_writer_value(&writer, "split.tensors.count", GGUF_INT32, &total, sizeof total);
    for (; *tensors != NULL; tensors++)
        gguf_writer_tensor(&writer, *tensors, 0, 4, 0, NULL);
    gguf_writer_save(&writer, part_path);
    gguf_writer_free(&writer);
    gguf_writer_start(&writer);
}

/* Three parts with 0, 2 and 1 tensors; one of them says `odd`. */
static void write_parts(int odd_index, struct part odd)
{
    static const char *const none[] = {NULL}, *const two[] = {"b", "d", NULL},
                             *const one[] = {"a", NULL};
    const char *const *tensors[] = {none, two, one};

    for (int i = 0; i < 3; i++) {
        snprintf(part_paths[i], sizeof part_paths[i], "%s/m-0000%d-of-00003.gguf", folder, i + 1);
        write_part(part_paths[i], i == odd_index ? odd : (struct part){i, 3, 3}, tensors[i]);
    }
}

static void expect_bad_parts(int odd_index, struct part odd, int named, const char *what)
{
    struct gguf *gguf;

    write_parts(odd_index, odd);
    ck_assert(!gguf_open(part_paths[0], &gguf, &error));
    ck_assert_ptr_null(gguf);
    tests_check_error(error.text, part_paths[named], what);
}

START_TEST(reads_split_models)
{
    static const char *const names[] = {"a", "b", "d"};
    static const int places[] = {2, 1, 1};
    struct gguf_string string;
    struct gguf *gguf;

    write_parts(-1, (struct part){0});
    ck_assert_msg(gguf_open(part_paths[0], &gguf, &error), "%s", error.text);
    ck_assert_uint_eq(gguf_tensor_count(gguf), 3);
    ck_assert_str_eq(gguf_path(gguf), part_paths[0]);
    ck_assert(gguf_get_string(gguf, "part", &string, &error));
    ck_assert(gguf_string_is(string, part_paths[0]));
    for (size_t i = 0; i < 3; i++) {
        const struct gguf_tensor *tensor = gguf_tensor(gguf, names[i]);
        const float *values;

        ck_assert_ptr_nonnull(tensor);
        ck_assert_str_eq(tensor->file->path, part_paths[places[i]]);
        values = tensor->data;
        ck_assert(values[3] > 0.8f && values[3] < 1.2f);
    }
    ck_assert_ptr_null(gguf_tensor(gguf, "c"));
    gguf_prefetch(gguf);
    gguf_close(gguf);
}
END_TEST

START_TEST(refuses_bad_splits)
{
    static const char *const again[] = {"b", NULL};
    struct gguf *gguf;

    write_parts(-1, (struct part){0});
    ck_assert(!gguf_open(part_paths[1], &gguf, &error));
    tests_check_error(error.text, part_paths[1],
                      "split.no: is 1, expected 0 for this part of 3; a split model is opened by "
                      "its first part");
    ck_assert_int_eq(rename(part_paths[0], path), 0);
    expect_failure("split.count: is 3, but the name does not end in -00001-of-00003.gguf");

    expect_bad_parts(0, (struct part){-1, 3, 3}, 0, "split.no: is missing");
    expect_bad_parts(0, (struct part){0, 3, -1}, 0, "split.tensors.count: is missing");
    expect_bad_parts(0, (struct part){0, 3, 4}, 0,
                     "split.tensors.count: is 4, but the parts have 3");
    expect_bad_parts(0, (struct part){0, 65535, 3}, 0, "split.count: is 65535, but the name");
    expect_bad_parts(1, (struct part){2, 3, 3}, 1, "split.no: is 2, expected 1 for this part of 3");
    expect_bad_parts(2, (struct part){0, 3, 3}, 2, "split.no: is 0, expected 2 for this part of 3");
    expect_bad_parts(2, (struct part){2, 2, 3}, 2, "split.count: is 2, but the first part has 3");
    expect_bad_parts(2, (struct part){2, -1, 3}, 2, "split.count: is missing");

    write_part(part_paths[2], (struct part){2, 3, 3}, again);
    ck_assert(!gguf_open(part_paths[0], &gguf, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "tensor b: appears twice"));
    write_file(part_paths[2], "GGUF", 4);
    ck_assert(!gguf_open(part_paths[0], &gguf, &error));
    tests_check_error(error.text, part_paths[2], "truncated");
    unlink(part_paths[1]);
    ck_assert(!gguf_open(part_paths[0], &gguf, &error));
    tests_check_error(error.text, part_paths[1], "No such file");

    gguf_writer_uint(&writer, "split.count", 100000);
    expect_bad_then_restart("split.count: is 100000, expected at most 99999");
    gguf_writer_string(&writer, "split.count", "2");
    expect_bad_then_restart("split.count: is STRING, expected an integer");
}
END_TEST

START_TEST(getters_check_types)
{
    static const uint64_t huge = UINT64_C(1) << 63;
    static const uint64_t huge_list[] = {1, UINT64_MAX};
    static const float infinite = INFINITY;
    static const unsigned char two = 2;
    struct gguf_string string, *strings;
    struct gguf *gguf;
    uint64_t integer;
    int64_t *ints;
    float *floats;
    double number;
    size_t count;
    bool flag;

    write_sample();
    gguf_writer_value(&writer, "huge", GGUF_UINT64, &huge, sizeof huge);
    gguf_writer_array(&writer, "huge list", GGUF_UINT64, huge_list, 2, sizeof huge_list);
    gguf_writer_value(&writer, "infinite", GGUF_FLOAT32, &infinite, sizeof infinite);
    gguf_writer_value(&writer, "two", GGUF_BOOL, &two, sizeof two);
    gguf = open_good();

    ck_assert(!gguf_get_uint(gguf, "absent", &integer, &error));
    expect_text("absent: is missing");
    ck_assert(!gguf_get_float(gguf, "absent", &number, &error));
    expect_text("absent: is missing");
    ck_assert(!gguf_get_bool(gguf, "absent", &flag, &error));
    expect_text("absent: is missing");
    ck_assert(!gguf_get_string(gguf, "absent", &string, &error));
    expect_text("absent: is missing");
    ck_assert(!gguf_get_strings(gguf, "absent", &strings, &count, &error));
    expect_text("absent: is missing");
    ck_assert(!gguf_get_ints(gguf, "absent", &ints, &count, &error));
    expect_text("absent: is missing");
    ck_assert(!gguf_get_floats(gguf, "absent", &floats, &count, &error));
    expect_text("absent: is missing");

    ck_assert(!gguf_get_uint(gguf, "text", &integer, &error));
    expect_text("text: is STRING, expected an integer");
    ck_assert(!gguf_get_uint(gguf, "half", &integer, &error));
    expect_text("half: is FLOAT32, expected an integer");
    ck_assert(!gguf_get_uint(gguf, "yes", &integer, &error));
    expect_text("yes: is BOOL, expected an integer");
    ck_assert(!gguf_get_uint(gguf, "ints", &integer, &error));
    expect_text("ints: is an array of INT32, expected an integer");
    ck_assert(!gguf_get_uint(gguf, "minus", &integer, &error));
    expect_text("minus: is -5, expected 0 or more");
    ck_assert(!gguf_get_uint(gguf, "huge", &integer, &error));
    expect_text("huge: is 2^63 or more");
    ck_assert(!gguf_get_float(gguf, "count", &number, &error));
    expect_text("count: is UINT32, expected FLOAT32");
    ck_assert(!gguf_get_float(gguf, "infinite", &number, &error));
    expect_text("infinite: is not finite");
    ck_assert(!gguf_get_bool(gguf, "count", &flag, &error));
    expect_text("count: is UINT32, expected BOOL");
    ck_assert(!gguf_get_bool(gguf, "two", &flag, &error));
    expect_text("two: is 2, expected 0 or 1");
    ck_assert(!gguf_get_string(gguf, "words", &string, &error));
    expect_text("words: is an array of STRING, expected STRING");

    ck_assert(!gguf_get_strings(gguf, "text", &strings, &count, &error));
    expect_text("text: is STRING, expected an array of STRING");
    ck_assert_ptr_null(strings);
    ck_assert(!gguf_get_strings(gguf, "ints", &strings, &count, &error));
    expect_text("ints: is an array of INT32, expected an array of STRING");
    ck_assert(!gguf_get_ints(gguf, "floats", &ints, &count, &error));
    expect_text("floats: is an array of FLOAT32, expected an array of integers");
    ck_assert(!gguf_get_ints(gguf, "words", &ints, &count, &error));
    expect_text("words: is an array of STRING, expected an array of integers");
    ck_assert(!gguf_get_ints(gguf, "count", &ints, &count, &error));
    expect_text("count: is UINT32, expected an array of integers");
    ck_assert(!gguf_get_ints(gguf, "huge list", &ints, &count, &error));
    expect_text("huge list: element 1 is 2^63 or more");
    ck_assert_ptr_null(ints);
    ck_assert(!gguf_get_floats(gguf, "bytes", &floats, &count, &error));
    expect_text("bytes: is an array of UINT8, expected an array of FLOAT32");
    ck_assert(!gguf_get_floats(gguf, "ints", &floats, &count, &error));
    expect_text("ints: is an array of INT32, expected an array of FLOAT32");
    gguf_close(gguf);
}
END_TEST

START_TEST(integers_keep_their_sign)
{
    static const uint8_t bits[] = {0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    static const struct {
        uint32_t type;
        size_t bytes;
        int64_t expected;
    } cases[] = {
        {GGUF_UINT8, 1, 254}, {GGUF_INT8, 1, -2},  {GGUF_UINT16, 2, 65534},
        {GGUF_INT16, 2, -2},  {GGUF_INT32, 4, -2}, {GGUF_UINT32, 4, 4294967294},
        {GGUF_INT64, 8, -2},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct gguf *gguf;
        int64_t *ints;
        size_t count;

        gguf_writer_array(&writer, "list", cases[i].type, bits, 1, cases[i].bytes);
        gguf = open_good();
        ck_assert(gguf_get_ints(gguf, "list", &ints, &count, &error));
        ck_assert_uint_eq(count, 1);
        ck_assert_int_eq(ints[0], cases[i].expected);
        free(ints);
        gguf_close(gguf);
        gguf_writer_free(&writer);
        gguf_writer_start(&writer);
    }
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

START_TEST(refuses_other_formats)
{
    writer.magic = "GGML";
    expect_bad("is not a GGUF file: the magic is 47 47 4d 4c");
    writer.magic = "GGUF";
    writer.version = 1;
    expect_bad("version is 1, expected 2 or 3");
    writer.version = 4;
    expect_bad("version is 4, expected 2 or 3");
    writer.version = 99;
    expect_bad("version is 99, expected 2 or 3");
    writer.version = 0x02000000;
    expect_bad("big-endian");
    writer.version = 0;
    expect_bad("version is 0, expected 2 or 3");
    writer.version = 0x03000000;
    expect_bad("big-endian");
}
END_TEST

/* All lengths shorter than the file's, so every section is cut at every byte. */
START_TEST(refuses_truncation_anywhere)
{
    struct bytes image;

    write_sample();
    image = gguf_writer_image(&writer);
    for (size_t size = 1; size < image.size; size++) {
        write_file(path, image.data, size);
        expect_failure(size >= 24 ? "" : "truncated");
    }
    bytes_free(&image);
}
END_TEST

START_TEST(refuses_counts_that_do_not_fit)
{
    static const uint64_t counts[] = {1, 1000, UINT64_C(1) << 32, INT64_MAX, UINT64_C(1) << 63,
                                      UINT64_MAX / 14 + 2,
                                      /* With the entries that there are: */
                                      UINT64_MAX - 13};

    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        write_sample();
        writer.claimed_metadata = counts[i];
        expect_bad_then_restart(i < 1 ? "" : "metadata entries, more than fit");
        write_sample();
        writer.claimed_tensors = counts[i];
        expect_bad_then_restart(i < 1 ? "" : "tensors, more than fit");
    }
    writer.claimed_tensors = UINT64_MAX;
    expect_bad("claims 18446744073709551615 tensors");
}
END_TEST

/* Lengths that would wrap when they are added to an offset or multiplied by a size. */
static const uint64_t long_lengths[] = {
    100000,          UINT64_C(1) << 61, UINT64_C(1) << 62, INT64_MAX, UINT64_C(1) << 63,
    UINT64_MAX - 30, UINT64_MAX,
};
#define LONG_LENGTHS (sizeof long_lengths / sizeof long_lengths[0])

START_TEST(refuses_long_strings_and_arrays)
{
    static const uint32_t element_types[] = {GGUF_UINT8,  GGUF_BOOL,  GGUF_FLOAT32,
                                             GGUF_STRING, GGUF_INT64, GGUF_FLOAT64};

    for (size_t i = 0; i < LONG_LENGTHS; i++) {
        gguf_writer_string(&writer, "before", "x");
        writer.metadata_count++;
        bytes_u64(&writer.metadata, long_lengths[i]);
        bytes_append(&writer.metadata, "keykeykey", 9);
        expect_bad_then_restart("metadata entry 2: truncated: the key");

        gguf_writer_key(&writer, "long", GGUF_STRING);
        bytes_u64(&writer.metadata, long_lengths[i]);
        bytes_append(&writer.metadata, "value", 5);
        expect_bad_then_restart("metadata entry long: truncated: the string");

        for (size_t j = 0; j < sizeof element_types / sizeof element_types[0]; j++) {
            gguf_writer_array(&writer, "list", element_types[j], "12345678", long_lengths[i], 8);
            expect_bad_then_restart("metadata entry list: truncated: ");
        }

        gguf_writer_key(&writer, "words", GGUF_ARRAY);
        bytes_u32(&writer.metadata, GGUF_STRING);
        bytes_u64(&writer.metadata, 2);
        bytes_string(&writer.metadata, "good");
        bytes_u64(&writer.metadata, long_lengths[i]);
        expect_bad_then_restart("metadata entry words: truncated: a string of the array");

        writer.tensor_count = 1;
        bytes_u64(&writer.tensors, long_lengths[i]);
        for (int j = 0; j < 4; j++)
            bytes_u64(&writer.tensors, 0);
        expect_bad_then_restart("tensor 1: truncated: the name");
    }
}
END_TEST

START_TEST(refuses_bad_metadata_types)
{
    gguf_writer_key(&writer, "odd", 13);
    bytes_u64(&writer.metadata, 0);
    expect_bad_then_restart("metadata entry odd: the value's type is 13");
    gguf_writer_key(&writer, "odd", UINT32_MAX);
    bytes_u64(&writer.metadata, 0);
    expect_bad_then_restart("metadata entry odd: the value's type is 4294967295");
    gguf_writer_array(&writer, "list", 99, NULL, 0, 0);
    expect_bad_then_restart("metadata entry list: the array's element type is 99");
    gguf_writer_array(&writer, "list", GGUF_ARRAY, NULL, 0, 0);
    expect_bad_then_restart("metadata entry list: is an array of arrays");
    gguf_writer_array(&writer, "list", GGUF_ARRAY, NULL, UINT64_MAX, 0);
    expect_bad_then_restart("metadata entry list: is an array of arrays");
}
END_TEST

START_TEST(refuses_bad_names)
{
    /* A lone continuation, a sequence cut short, an overlong slash, a surrogate, beyond Unicode. */
    static const char *const bad[] = {"\x80", "ke\xc3", "\xc0\xaf", "\xed\xa0\x80",
                                      "\xf4\x90\x80\x80"};
    struct gguf *gguf;

    gguf_writer_uint(&writer, "good", 1);
    gguf_writer_uint(&writer, "", 1);
    expect_bad_then_restart("metadata entry 2: the key has 0 bytes");
    writer.metadata_count++;
    bytes_u64(&writer.metadata, 65536);
    for (int i = 0; i < 70000; i++)
        bytes_append(&writer.metadata, "x", 1);
    expect_bad_then_restart("metadata entry 1: the key has 65536 bytes, expected 1 to 65535");
    gguf_writer_tensor(&writer, "good", 0, 4, 0, NULL);
    gguf_writer_tensor(&writer, "", 0, 4, 0, NULL);
    expect_bad_then_restart("tensor 2: the name has 0 bytes");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        gguf_writer_uint(&writer, bad[i], 1);
        expect_bad_then_restart("metadata entry 1: the key is not UTF-8");
        gguf_writer_tensor(&writer, bad[i], 0, 4, 0, NULL);
        expect_bad_then_restart("tensor 1: the name is not UTF-8");
    }
    gguf_writer_uint(&writer, "\xe2\x82\xac", 1);
    gguf_writer_string(&writer, "bytes", "\xff");
    gguf = open_good();
    ck_assert(gguf_has(gguf, "\xe2\x82\xac"));
    gguf_close(gguf);
}
END_TEST

START_TEST(refuses_duplicates)
{
    gguf_writer_uint(&writer, "same", 1);
    gguf_writer_uint(&writer, "other", 1);
    gguf_writer_string(&writer, "same", "x");
    expect_bad_then_restart("metadata entry same: appears twice");
    gguf_writer_tensor(&writer, "same", 0, 4, 0, NULL);
    gguf_writer_tensor(&writer, "other", 0, 4, 0, NULL);
    gguf_writer_tensor(&writer, "same", 0, 4, 0, NULL);
    expect_bad_then_restart("tensor same: appears twice");
}
END_TEST

START_TEST(refuses_bad_alignments)
{
    static const uint32_t bad[] = {0, 1, 4, 12, 33, UINT32_MAX};
    static const uint64_t huge[] = {UINT64_C(1) << 33, UINT64_C(1) << 62};

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        gguf_writer_uint(&writer, "general.alignment", bad[i]);
        gguf_writer_tensor(&writer, "first", 0, 4, 0, NULL);
        expect_bad_then_restart("general.alignment: is ");
    }
    for (size_t i = 0; i < 2; i++) {
        gguf_writer_value(&writer, "general.alignment", GGUF_UINT64, &huge[i], sizeof huge[i]);
        gguf_writer_tensor(&writer, "first", 0, 4, 0, NULL);
        expect_bad_then_restart("general.alignment: is ");
    }
    gguf_writer_string(&writer, "general.alignment", "32");
    expect_bad_then_restart("general.alignment: is STRING, expected an integer");
    gguf_writer_uint(&writer, "general.alignment", 1u << 31);
    gguf_writer_tensor(&writer, "first", 0, 4, 0, NULL);
    expect_bad_then_restart("the tensor data begin at byte 2147483648");
}
END_TEST

/* Writes one tensor with these numbers before 4096 bytes of data, and expects the error. */
static void expect_bad_tensor(uint32_t type, uint32_t dimension_count, const uint64_t *dimensions,
                              uint64_t offset, const char *what)
{
    static const unsigned char data[4096];

    gguf_writer_entry(&writer, "bad", type, dimension_count, dimensions, offset);
    bytes_append(&writer.data, data, sizeof data);
    expect_bad("tensor bad: ");
    expect_failure(what);
    gguf_writer_free(&writer);
    gguf_writer_start(&writer);
}

#define DIMENSIONS(...) ((const uint64_t[]){__VA_ARGS__})

START_TEST(refuses_bad_shapes)
{
    const uint64_t two32 = UINT64_C(1) << 32, two62 = UINT64_C(1) << 62;

    expect_bad_tensor(0, 0, NULL, 0, "has 0 dimensions");
    expect_bad_tensor(0, 5, DIMENSIONS(1, 1, 1, 1, 1), 0, "has 5 dimensions");
    for (size_t i = 0; i < 3; i++) {
        static const uint32_t counts[] = {4000000, 1u << 31, UINT32_MAX};
        char what[64];

        writer.tensor_count = 1;
        bytes_string(&writer.tensors, "bad");
        bytes_u32(&writer.tensors, counts[i]);
        for (int j = 0; j < 1000; j++)
            bytes_u64(&writer.tensors, 1);
        snprintf(what, sizeof what, "tensor bad: has %u dimensions, expected 1 to 4", counts[i]);
        expect_bad_then_restart(what);
    }
    expect_bad_tensor(0, 1, DIMENSIONS(0), 0, "dimension 0 is 0");
    expect_bad_tensor(0, 2, DIMENSIONS(4, 0), 0, "dimension 1 is 0");
    expect_bad_tensor(2, 4, DIMENSIONS(32, 1, 0, UINT64_MAX), 0, "dimension 2 is 0");
    expect_bad_tensor(0, 2, DIMENSIONS(two32, two32), 0, "dimension 1 is 4294967296: the number");
    expect_bad_tensor(0, 3, DIMENSIONS(4, two62, 4), 0, "the number of elements overflows");
    expect_bad_tensor(0, 4, DIMENSIONS(two32, 2, 4, two32), 0, "the number of elements overflows");
    expect_bad_tensor(0, 2, DIMENSIONS(UINT64_MAX, 2), 0, "the number of elements overflows");
    expect_bad_tensor(0, 1, DIMENSIONS(two62), 0, "dimension 0 is 4611686018427387904");
    expect_bad_tensor(0, 2, DIMENSIONS(4, two62 / 4), 0, "its size in bytes overflows");
    expect_bad_tensor(8, 2, DIMENSIONS(32, two62 / 32), 0, "do not fit");
    expect_bad_tensor(3, 2, DIMENSIONS(48, 2), 0, "expected a multiple of Q4_1's block of 32");
    expect_bad_tensor(12, 2, DIMENSIONS(128, 2), 0, "expected a multiple of Q4_K's block of 256");
    expect_bad_tensor(2, 1, DIMENSIONS(16), 0, "expected a multiple of Q4_0's block of 32");
    expect_bad_tensor(0, 1, DIMENSIONS(1025), 0, "4100 bytes at offset 0 do not fit in the 4096");
}
END_TEST

START_TEST(refuses_bad_offsets)
{
    const uint64_t *four = DIMENSIONS(4);

    expect_bad_tensor(0, 1, four, 16, "the offset 16 is not a multiple of the alignment, 32");
    expect_bad_tensor(0, 1, four, 4096, "16 bytes at offset 4096 do not fit");
    expect_bad_tensor(0, 1, DIMENSIONS(1024), 32, "4096 bytes at offset 32 do not fit");
    expect_bad_tensor(0, 1, four, UINT64_C(1) << 63, "do not fit");
    expect_bad_tensor(0, 1, four, UINT64_MAX - 31, "do not fit");
    expect_bad_tensor(16, 1, DIMENSIONS(256), UINT64_MAX - 31, "do not fit");

    gguf_writer_entry(&writer, "over", 0, 1, DIMENSIONS(16), 0);
    gguf_writer_entry(&writer, "lap", 0, 1, DIMENSIONS(16), 32);
    for (int i = 0; i < 12; i++)
        bytes_u64(&writer.data, 0);
    expect_bad_then_restart("tensor lap: the offset 32 lies inside another tensor");
    gguf_writer_entry(&writer, "one", 0, 1, DIMENSIONS(16), 0);
    gguf_writer_entry(&writer, "same", 0, 1, DIMENSIONS(16), 0);
    for (int i = 0; i < 12; i++)
        bytes_u64(&writer.data, 0);
    expect_bad_then_restart("the offset 0 lies inside another tensor");
}
END_TEST

/* Random damage: opening may succeed or fail, but neither it nor the getters may go astray. */
START_TEST(survives_random_damage)
{
    static const char *const keys[] = {"text", "count", "words", "ints", "floats", "yes", "half"};
    struct bytes image;
    uint32_t state = 1;

    write_sample();
    image = gguf_writer_image(&writer);
    for (int round = 0; round < 4000; round++) {
        unsigned char *copy = malloc(image.size);
        struct gguf *gguf;

        memcpy(copy, image.data, image.size);
        for (int i = 0; i <= round % 3; i++) {
            state = state * 1664525 + 1013904223;
            copy[(state >> 8) % (image.size - 200)] = (unsigned char)(state >> 3);
        }
        write_file(path, copy, image.size);
        free(copy);
        if (!gguf_open(path, &gguf, &error)) {
            ck_assert(strncmp(error.text, path, strlen(path)) == 0);
            continue;
        }
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
            struct gguf_string *strings;
            uint64_t integer;
            int64_t *ints;
            float *floats;
            size_t count;

            gguf_get_uint(gguf, keys[i], &integer, &error);
            if (gguf_get_strings(gguf, keys[i], &strings, &count, &error)) {
                size_t total = 0;

                for (size_t j = 0; j < count; j++)
                    total += strings[j].size + 8;
                ck_assert_uint_le(total, image.size);
            }
            free(strings);
            if (gguf_get_ints(gguf, keys[i], &ints, &count, &error))
                ck_assert_uint_le(count, image.size);
            free(ints);
            if (gguf_get_floats(gguf, keys[i], &floats, &count, &error))
                ck_assert_uint_le(count * 4, image.size);
            free(floats);
        }
        gguf_close(gguf);
    }
    bytes_free(&image);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("gguf");
    TCase *test_case = tcase_create("gguf");

    tcase_add_checked_fixture(test_case, setup, teardown);
    tcase_add_test(test_case, reads_versions_2_and_3);
    tcase_add_test(test_case, reads_other_alignments);
    tcase_add_test(test_case, reads_files_without_tensors);
    tcase_add_test(test_case, keeps_tensors_of_unknown_types);
    tcase_add_test(test_case, reads_split_models);
    tcase_add_test(test_case, refuses_bad_splits);
    tcase_add_test(test_case, getters_check_types);
    tcase_add_test(test_case, integers_keep_their_sign);
    tcase_add_test(test_case, refuses_what_is_not_a_file);
    tcase_add_test(test_case, refuses_other_formats);
    tcase_add_test(test_case, refuses_truncation_anywhere);
    tcase_add_test(test_case, refuses_counts_that_do_not_fit);
    tcase_add_test(test_case, refuses_long_strings_and_arrays);
    tcase_add_test(test_case, refuses_bad_metadata_types);
    tcase_add_test(test_case, refuses_bad_names);
    tcase_add_test(test_case, refuses_duplicates);
    tcase_add_test(test_case, refuses_bad_alignments);
    tcase_add_test(test_case, refuses_bad_shapes);
    tcase_add_test(test_case, refuses_bad_offsets);
    tcase_add_test(test_case, survives_random_damage);
    suite_add_tcase(suite, test_case);
    return tests_run(suite);
}
