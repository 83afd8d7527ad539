/* SPDX-License-Identifier: MIT */
/* Reads JSON Lines: one object a line, one line at a time. */
#include "jsonl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runner/json_text.h"
#include "runner/pretokenizer.h"
#include "runner/read_files.h"

#define FIRST_CAPACITY ((size_t)1 << 16)

bool jsonl_error(const struct jsonl *jsonl, struct error *error, const char *format, ...)
{
    va_list arguments;
    char text[512];

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return error_set(error, "%s: line %zu: %s", jsonl->path, jsonl->line, text);
}

bool jsonl_open(const char *path, struct jsonl *jsonl, struct error *error)
{
    /* Opening a FIFO must not wait for its writer. */
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct stat status;

    *jsonl = (struct jsonl){.path = path};
    if (file < 0 || fstat(file, &status) != 0) {
        error_set(error, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        error_set(error, "%s: not a regular file", path);
    } else if (read_files_add(&status, path, error)) {
        jsonl->file = fdopen(file, "rb");
        if (jsonl->file != NULL) {
            setvbuf(jsonl->file, NULL, _IONBF, 0);
            return true;
        }
        error_set(error, "%s: %s", path, strerror(errno));
    }
    if (file >= 0)
        close(file);
    return false;
}

void jsonl_close(struct jsonl *jsonl)
{
    json_decref(jsonl->row);
    if (jsonl->file != NULL)
        fclose(jsonl->file);
    free(jsonl->buffer);
    *jsonl = (struct jsonl){0};
}

/* Reads more behind what is there; *got 0 at the end of the file. */
static bool read_more(struct jsonl *jsonl, size_t *got, struct error *error)
{
    if (jsonl->begin > 0) {
        memmove(jsonl->buffer, jsonl->buffer + jsonl->begin, jsonl->end - jsonl->begin);
        jsonl->end -= jsonl->begin;
        jsonl->begin = 0;
    }
    if (jsonl->end == jsonl->capacity) {
        size_t capacity = jsonl->capacity > 0 ? 2 * jsonl->capacity : FIRST_CAPACITY;
        char *buffer = realloc(jsonl->buffer, capacity);

        if (buffer == NULL)
            return jsonl_error(jsonl, error, "out of memory for %zu bytes", capacity);
        jsonl->buffer = buffer;
        jsonl->capacity = capacity;
    }
    *got = fread(jsonl->buffer + jsonl->end, 1, jsonl->capacity - jsonl->end, jsonl->file);
    if (*got == 0 && ferror(jsonl->file))
        return jsonl_error(jsonl, error, "%s", strerror(errno));
    jsonl->end += *got;
    return true;
}

/* The next line, of white space or not; *found false at the end of the file. */
static bool read_line(struct jsonl *jsonl, bool *found, struct error *error)
{
    size_t searched = 0, got = 1;
    const char *newline = NULL;

    jsonl->line++;
    jsonl->offset = jsonl->next_offset;
    jsonl->whole = true; /* for all that is known if reading fails */
    for (;;) {
        size_t waiting = jsonl->end - jsonl->begin;

        if (waiting > searched)
            newline = memchr(jsonl->buffer + jsonl->begin + searched, '\n', waiting - searched);
        if (newline != NULL || got == 0)
            break;
        if (waiting > JSONL_MAX_LINE)
            break;
        searched = waiting;
        if (!read_more(jsonl, &got, error))
            return false;
    }
    jsonl->text = jsonl->buffer + jsonl->begin;
    jsonl->length = newline != NULL ? (size_t)(newline - jsonl->text) : jsonl->end - jsonl->begin;
    jsonl->whole = newline != NULL || got > 0;
    if (jsonl->length > JSONL_MAX_LINE)
        return jsonl_error(jsonl, error, "is longer than %zu MiB", JSONL_MAX_LINE >> 20);
    jsonl->begin += jsonl->length + jsonl->whole;
    jsonl->next_offset += jsonl->length + jsonl->whole;
    *found = jsonl->whole || jsonl->length > 0;
    return true;
}

static bool is_blank(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        if (text[i] != ' ' && text[i] != '\t' && text[i] != '\r')
            return false;
    }
    return true;
}

bool jsonl_next(struct jsonl *jsonl, bool *found, struct error *error)
{
    json_error_t parse_error;
    size_t valid, brackets;
    const char *zero;

    json_decref(jsonl->row);
    jsonl->row = NULL;
    do {
        if (!read_line(jsonl, found, error))
            return false;
        if (!*found)
            return true;
    } while (is_blank(jsonl->text, jsonl->length));

    zero = memchr(jsonl->text, '\0', jsonl->length);
    if (zero != NULL)
        return jsonl_error(jsonl, error, "has a byte of value 0 at offset %zu of the line",
                           (size_t)(zero - jsonl->text));
    valid = utf8_valid_prefix(jsonl->text, jsonl->length);
    if (valid < jsonl->length)
        return jsonl_error(jsonl, error, "is not valid UTF-8 at offset %zu of the line", valid);
    if (!json_text_is_bounded(jsonl->text, jsonl->length, &brackets))
        return jsonl_error(jsonl, error, "%zu arrays and objects in %zu bytes are too many",
                           brackets, jsonl->length);
    jsonl->row = json_loadb(jsonl->text, jsonl->length, JSON_REJECT_DUPLICATES, &parse_error);
    if (jsonl->row == NULL)
        return jsonl_error(jsonl, error, "is not valid JSON: %s", parse_error.text);
    if (!json_is_object(jsonl->row))
        return jsonl_error(jsonl, error, "is not a JSON object");
    return true;
}

/* ---- Members --------------------------------------------------------------------------------- */

/* Whether the member `key` is there and, as `is_type` tells, of the type that is called `type`. */
static bool check(const struct jsonl *jsonl, const json_t *object, const char *key, bool is_type,
                  const char *type, struct error *error)
{
    if (json_object_get(object, key) == NULL)
        return jsonl_error(jsonl, error, "\"%s\" is missing; expected %s", key, type);
    return is_type || jsonl_error(jsonl, error, "\"%s\" is not %s", key, type);
}

bool jsonl_string(const struct jsonl *jsonl, const json_t *object, const char *key, bool optional,
                  const char **string, struct error *error)
{
    const json_t *member = json_object_get(object, key);

    *string = NULL;
    if (member == NULL && optional)
        return true;
    if (!check(jsonl, object, key, json_is_string(member), "a string", error))
        return false;
    *string = json_string_value(member);
    return true;
}

bool jsonl_integer(const struct jsonl *jsonl, const json_t *object, const char *key,
                   int64_t *integer, struct error *error)
{
    const json_t *member = json_object_get(object, key);

    *integer = json_integer_value(member);
    return check(jsonl, object, key, json_is_integer(member), "a whole number", error);
}

bool jsonl_number(const struct jsonl *jsonl, const json_t *object, const char *key, double *number,
                  struct error *error)
{
    const json_t *member = json_object_get(object, key);

    *number = json_number_value(member);
    return check(jsonl, object, key, json_is_number(member), "a number", error);
}

bool jsonl_array(const struct jsonl *jsonl, const json_t *object, const char *key,
                 const json_t **array, struct error *error)
{
    *array = json_object_get(object, key);
    return check(jsonl, object, key, json_is_array(*array), "an array", error);
}
