/* SPDX-License-Identifier: MIT */
/* The file of predictions that `puzzlekv-eval tasks` writes row by row, and continues. */
#include "task_log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool failed(const struct task_log *log, struct error *error)
{
    return error_set(error, "%s: %s", log->path, strerror(errno));
}

/* Whether all of the next line is there; *end is where the file is to be cut off if not. */
static bool next(struct task_log *log, bool *there, uint64_t *end, struct error *error)
{
    if (!jsonl_next(&log->earlier, there, error)) {
        if (log->earlier.whole)
            return false;
        *there = false;
    }
    *there &= log->earlier.whole;
    *end = log->earlier.offset;
    return true;
}

/* A first line without its end is cut off only where it can be the beginning of settings: any other
 * file is not to be lost. */
static bool check_beginning(const struct task_log *log, struct error *error)
{
    static const char beginning[] = "{\"puzzlekv\": \"tasks\"";
    const size_t length = log->earlier.length;
    const size_t most = sizeof beginning - 1;

    return memcmp(log->earlier.text, beginning, length < most ? length : most) == 0 ||
           jsonl_error(&log->earlier, error, "is not what puzzlekv-eval tasks wrote");
}

/* Rows are written from `end` on. */
static bool begin_writing(struct task_log *log, uint64_t end, struct error *error)
{
    jsonl_close(&log->earlier);
    log->reading = false;
    if (ftruncate(fileno(log->file), (off_t)end) != 0 ||
        fseeko(log->file, (off_t)end, SEEK_SET) != 0)
        return failed(log, error);
    return true;
}

/* Compares what the results depend on; what they do not, the names of files, may differ. */
static bool check_settings(const struct task_log *log, json_t *settings, struct error *error)
{
    const char *key;
    json_t *value;

    if (!json_equal(json_object_get(log->earlier.row, "puzzlekv"),
                    json_object_get(settings, "puzzlekv")))
        return jsonl_error(&log->earlier, error, "is not what puzzlekv-eval tasks wrote");
    json_object_foreach(settings, key, value)
    {
        const json_t *was = json_object_get(log->earlier.row, key);
        char *old, *now;

        if (strcmp(key, "model") == 0 || strcmp(key, "file") == 0 || json_equal(was, value))
            continue;
        old = json_dumps(was, JSON_ENCODE_ANY);
        now = json_dumps(value, JSON_ENCODE_ANY);
        jsonl_error(
            &log->earlier, error,
            "--resume: \"%s\" was %.180s, and is %.180s now: give the same, or another --output",
            key, old != NULL ? old : "missing", now != NULL ? now : "unknown");
        free(old);
        free(now);
        return false;
    }
    return true;
}

bool task_log_open(const char *path, bool resume, json_t *settings, struct task_log *log,
                   struct error *error)
{
    struct stat status;
    const bool exists = stat(path, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0;
    uint64_t end = 0;
    bool there = false;

    *log = (struct task_log){.path = path};
    if (exists && !resume)
        return error_set(error, "--output %s: is there already; --resume continues it", path);
    log->file = fopen(path, exists ? "r+be" : "wbe");
    if (log->file == NULL)
        return failed(log, error);
    if (exists) {
        if (!jsonl_open(path, &log->earlier, error))
            goto fail;
        log->reading = true;
        if (!next(log, &there, &end, error) ||
            !(there ? check_settings(log, settings, error) : check_beginning(log, error)))
            goto fail;
    }
    if (!there &&
        ((exists && !begin_writing(log, end, error)) || !task_log_write(log, settings, error)))
        goto fail;
    return true;
fail:
    task_log_close(log);
    return false;
}

void task_log_close(struct task_log *log)
{
    if (log->reading)
        jsonl_close(&log->earlier);
    if (log->file != NULL)
        fclose(log->file);
    *log = (struct task_log){0};
}

bool task_log_read(struct task_log *log, size_t row, const json_t **object, struct error *error)
{
    uint64_t end;
    int64_t number;
    bool there;

    *object = NULL;
    if (!log->reading)
        return true;
    if (!next(log, &there, &end, error))
        return false;
    if (!there)
        return begin_writing(log, end, error);
    if (!jsonl_integer(&log->earlier, log->earlier.row, "row", &number, error))
        return false;
    if (number < 0 || (uint64_t)number != row)
        return jsonl_error(&log->earlier, error, "\"row\" is %lld, expected %zu", (long long)number,
                           row);
    *object = log->earlier.row;
    return true;
}

bool task_log_write(struct task_log *log, const json_t *object, struct error *error)
{
    if (json_dumpf(object, log->file, 0) != 0 || putc('\n', log->file) == EOF ||
        fflush(log->file) != 0)
        return failed(log, error);
    return true;
}
