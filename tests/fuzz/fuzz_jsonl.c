/* SPDX-License-Identifier: MIT */
/* Files of JSON Lines. */
#include "fuzz.h"

#include <stdio.h>
#include <string.h>

#include "jsonl.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    return 0;
}

static void read_members(const struct jsonl *jsonl)
{
    const char *path = fuzz_path("rows.jsonl");
    const json_t *array;
    const char *string;
    struct error error;
    int64_t integer;
    double number;

    if (jsonl_string(jsonl, jsonl->row, "input", false, &string, &error))
        fuzz_require(strlen(string) <= jsonl->length);
    else
        fuzz_check_error(&error, path);
    if (jsonl_string(jsonl, jsonl->row, "gen_prefix", true, &string, &error))
        fuzz_require(string == NULL || strlen(string) <= jsonl->length);
    else
        fuzz_check_error(&error, path);
    if (!jsonl_integer(jsonl, jsonl->row, "index", &integer, &error))
        fuzz_check_error(&error, path);
    if (!jsonl_number(jsonl, jsonl->row, "score", &number, &error))
        fuzz_check_error(&error, path);
    if (jsonl_array(jsonl, jsonl->row, "outputs", &array, &error))
        fuzz_require(json_array_size(array) <= jsonl->length);
    else
        fuzz_check_error(&error, path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct error error;
    struct jsonl jsonl;
    bool found = true, done = true;
    size_t rows = 0;

    fuzz_write("rows.jsonl", data, size);
    fuzz_require(jsonl_open(fuzz_path("rows.jsonl"), &jsonl, &error));
    while (found && done) {
        const size_t line = jsonl.line;

        done = jsonl_next(&jsonl, &found, &error);
        fuzz_require(jsonl.line > line && jsonl.line <= size + 1);
        if (done && found) {
            fuzz_require(json_is_object(jsonl.row));
            fuzz_require(jsonl.offset + jsonl.length <= size);
            fuzz_require(memcmp(data + jsonl.offset, jsonl.text, jsonl.length) == 0);
            read_members(&jsonl);
            rows++;
        }
    }
    if (!done)
        fuzz_check_error(&error, fuzz_path("rows.jsonl"));
    fuzz_require(rows <= size / 2);
    jsonl_close(&jsonl);
    return 0;
}
