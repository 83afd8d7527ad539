/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval logits: the logits of given tokens, for comparison with other implementations. */
#include "eval.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "output_file.h"
#include "runner/json_text.h"

/* Rows are written as they lie in memory. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a little-endian machine");

static bool read_ids(const char *path, size_t vocabulary, int32_t **ids, size_t *count,
                     struct error *error)
{
    struct text text;
    json_error_t problem;
    json_t *array = NULL;
    size_t brackets;
    bool done = false;

    *ids = NULL;
    if (!text_read(path, &text, error))
        return false;
    if (!json_text_is_bounded(text.data, text.size, &brackets)) {
        error_set(error, "%s: %zu arrays and objects in %zu bytes are too many; expected one array",
                  text.name, brackets, text.size);
        goto out;
    }
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
        json_pack("{s:I, s:I, s:I, s:I, s:[{s:o, s:o, s:I, s:I, s:o}]}", "tokens",
                  (json_int_t)count, "prefill", (json_int_t)arguments->prefill, "rows",
                  (json_int_t)(count - arguments->prefill), "columns",
                  (json_int_t)model->vocabulary, "results", "kv", json_text(arguments->kv[0].text),
                  "kv_canonical", json_text(canonical), "kv_bytes", (json_int_t)stats.payload_bytes,
                  "kv_bytes_raw", (json_int_t)stats.raw_bytes, "kv_ratio",
                  json_finite((double)stats.payload_bytes / (double)stats.raw_bytes)),
        error);
}

bool eval_logits(const struct eval_arguments *arguments, struct error *error)
{
    struct model *model = NULL;
    struct eval_cache cache = {.store = NULL};
    int32_t *ids = NULL;
    struct output_file output;
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
    done = output_file_open(&output, arguments->output, error) &&
           write_rows(arguments, model, &cache, ids, count, output.file, error);
    done = output_file_close(&output, done, error);
    if (done && arguments->json)
        done = print_document(arguments, model, &cache, count, error);
out:
    eval_cache_close(&cache);
    free(ids);
    model_close(model);
    return done;
}
