/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval logits: the logits of given tokens, for comparison with other implementations. */
#define _GNU_SOURCE /* mkostemp */
#include "eval.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "options.h"
#include "runner/file_map.h"

/* Rows are written as they lie in memory. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a little-endian machine");

static bool read_ids(const char *path, size_t vocabulary, int32_t **ids, size_t *count,
                     struct error *error)
{
    struct text text;
    json_error_t problem;
    json_t *array = NULL;
    bool done = false;

    *ids = NULL;
    if (!text_read(path, &text, error))
        return false;
    array = json_loadb(text.data, text.size, 0, &problem);
    if (array == NULL) {
        error_set(error, "%s: line %d: %s", text.name, problem.line, problem.text);
        goto out;
    }
    *count = json_array_size(array);
    if (!json_is_array(array) || *count < 2) {
        error_set(error, "%s: not a JSON array of at least two token ids", text.name);
        goto out;
    }
    *ids = calloc(*count, sizeof **ids);
    if (*ids == NULL) {
        error_set(error, "%s: out of memory", text.name);
        goto out;
    }
    for (size_t i = 0; i < *count; i++) {
        const json_t *element = json_array_get(array, i);
        json_int_t id = json_integer_value(element);

        if (!json_is_integer(element) || id < 0 || (uint64_t)id >= vocabulary) {
            error_set(error, "%s: element %zu is not a token id from 0 to %zu", text.name, i,
                      vocabulary - 1);
            goto out;
        }
        (*ids)[i] = (int32_t)id;
    }
    done = true;
out:
    if (!done) {
        free(*ids);
        *ids = NULL;
    }
    json_decref(array);
    free(text.data);
    return done;
}

/* One row for each prediction: after ids[0 .. prefill - 1] in one step, then after each further id
 * but the last. */
static bool write_rows(const struct eval_arguments *arguments, const struct model *model,
                       const struct eval_cache *cache, const int32_t *ids, size_t count,
                       FILE *output, struct error *error)
{
    struct transformer *transformer = NULL;
    float *logits = calloc(model->vocabulary, sizeof *logits);
    size_t fed = 0;
    bool done = false;

    if (logits == NULL) {
        error_set(error, "out of memory for the logits");
        goto out;
    }
    if (!eval_transformer_open(arguments, model, &transformer, error))
        goto out;
    while (fed + 1 < count) {
        size_t step = fed == 0 ? arguments->prefill : 1;

        progress_show("token %zu of %zu", fed + step, count - 1);
        if (!transformer_step(transformer, cache->store, ids + fed, step, logits, error))
            goto out;
        if (fwrite(logits, sizeof *logits, model->vocabulary, output) != model->vocabulary) {
            error_set(error, "%s: %s", arguments->output, strerror(errno));
            goto out;
        }
        fed += step;
    }
    progress_clear();
    done = true;
out:
    transformer_close(transformer);
    free(logits);
    return done;
}

static bool print_document(const struct eval_arguments *arguments, const struct model *model,
                           const struct eval_cache *cache, size_t count, struct error *error)
{
    char canonical[KV_SPEC_TEXT_BYTES];
    struct kv_stats stats;

    if (!kv_store_stats(cache->store, &stats, error))
        return false;
    kv_spec_canonical(&cache->spec, canonical);
    return eval_print_document(
        arguments,
        json_pack("{s:I, s:I, s:I, s:I, s:[{s:s, s:s, s:I, s:I, s:o}]}", "tokens",
                  (json_int_t)count, "prefill", (json_int_t)arguments->prefill, "rows",
                  (json_int_t)(count - arguments->prefill), "columns",
                  (json_int_t)model->vocabulary, "results", "kv", arguments->kv[0].text,
                  "kv_canonical", canonical, "kv_bytes", (json_int_t)stats.payload_bytes,
                  "kv_bytes_raw", (json_int_t)stats.raw_bytes, "kv_ratio",
                  json_finite((double)stats.payload_bytes / (double)stats.raw_bytes)),
        error);
}

/* -o while it is written. A regular file appears under its name only once it is whole: half a file
 * would look like a whole one. */
struct output {
    FILE *file;
    char *path;      /* where a regular file is to be; links followed */
    char *temporary; /* beside it; NULL: written in place, as devices are */
};

/* With the permissions of the file that it replaces, or those of any new one. */
static bool open_temporary(struct output *output, const struct stat *old, struct error *error)
{
    const size_t size = strlen(output->path) + sizeof ".XXXXXX";
    mode_t mode = 0666;
    int file;

    output->temporary = malloc(size);
    if (output->temporary == NULL)
        return error_set(error, "out of memory");
    snprintf(output->temporary, size, "%s.XXXXXX", output->path);
    file = mkostemp(output->temporary, O_CLOEXEC);
    if (file < 0) {
        error_set(error, "%s: %s", output->path, strerror(errno));
        free(output->temporary);
        output->temporary = NULL;
        return false;
    }
    file_map_guard_output(output->temporary);
    if (old != NULL) {
        mode = old->st_mode & 0777;
    } else {
        const mode_t mask = umask(0);

        umask(mask);
        mode &= ~mask;
    }
    output->file = fdopen(file, "wb");
    if (output->file == NULL)
        close(file);
    if (output->file == NULL || fchmod(file, mode) != 0)
        return error_set(error, "%s: %s", output->path, strerror(errno));
    return true;
}

/* Not over a file that is read. */
static bool open_output(const struct eval_arguments *arguments, struct output *output,
                        struct error *error)
{
    const char *input = file_map_using(arguments->output);
    struct stat old, ids;
    const bool exists = stat(arguments->output, &old) == 0;

    if (input == NULL && exists && stat(arguments->ids_file, &ids) == 0 &&
        old.st_dev == ids.st_dev && old.st_ino == ids.st_ino)
        input = arguments->ids_file;
    if (input != NULL)
        return error_set(error, "--output %s: is the input %s", arguments->output, input);
    if (exists && !S_ISREG(old.st_mode)) {
        output->file = fopen(arguments->output, "wbe");
        return output->file != NULL ||
               error_set(error, "%s: %s", arguments->output, strerror(errno));
    }
    output->path = exists ? realpath(arguments->output, NULL) : strdup(arguments->output);
    if (output->path == NULL)
        return error_set(error, "%s: %s", arguments->output, strerror(errno));
    return open_temporary(output, exists ? &old : NULL, error);
}

/* Puts the file into its place if it is `whole`, else removes it. Returns `whole` or false with an
 * error. */
static bool close_output(const struct eval_arguments *arguments, struct output *output, bool whole,
                         struct error *error)
{
    if (output->file != NULL && fclose(output->file) != 0 && whole)
        whole = error_set(error, "%s: %s", arguments->output, strerror(errno));
    if (output->temporary != NULL) {
        if (whole && rename(output->temporary, output->path) != 0)
            whole = error_set(error, "%s: %s", arguments->output, strerror(errno));
        if (!whole)
            unlink(output->temporary);
        file_map_guard_output(NULL);
    }
    free(output->temporary);
    free(output->path);
    return whole;
}

bool eval_logits(const struct eval_arguments *arguments, struct error *error)
{
    struct model *model = NULL;
    struct eval_cache cache = {.store = NULL};
    int32_t *ids = NULL;
    struct output output = {.file = NULL};
    size_t count;
    bool done = false;

    if (!model_open(arguments->model, &model, error) ||
        !read_ids(arguments->ids_file, model->vocabulary, &ids, &count, error))
        goto out;
    if (arguments->prefill >= count) {
        error_set(error, "--prefill %zu: %s has %zu tokens, and the last is not fed",
                  arguments->prefill, arguments->ids_file, count);
        goto out;
    }
    if (count - 1 > model->context_length) {
        error_set(error, "%s: its %zu tokens are more than the model's context of %zu",
                  arguments->ids_file, count, model->context_length);
        goto out;
    }
    if (!eval_cache_open(arguments, model, &arguments->kv[0].spec, count - 1, arguments->prefill,
                         &cache, error))
        goto out;
    done = open_output(arguments, &output, error) &&
           write_rows(arguments, model, &cache, ids, count, output.file, error);
    done = close_output(arguments, &output, done, error);
    if (done && arguments->json)
        done = print_document(arguments, model, &cache, count, error);
out:
    eval_cache_close(&cache);
    free(ids);
    model_close(model);
    return done;
}
