/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval calibrate: what palu and ojakv have to know of a model. */
#include "eval.h"

#include <inttypes.h>

#include "calibration.h"
#include "options.h"
#include "output_file.h"
#include "task_text.h"

/* Where --length is not given. */
#define DEFAULT_LENGTH 1024

/* Feeds windows of the text to a dense cache, and lets the probe look. */
static bool measure(const struct eval_arguments *arguments, const struct model *model,
                    const struct token_list *list, size_t length, struct kv_store *probe,
                    struct error *error)
{
    const double began = machine_seconds();
    struct transformer *transformer = NULL;
    struct eval_cache cache = {.store = NULL};
    uint64_t random = arguments->seed;
    struct kv_spec spec;
    bool done = kv_spec_parse("static", &spec, error) &&
                eval_cache_open(arguments, model, &spec, length, length, &cache, error) &&
                eval_transformer_open(arguments, model, &transformer, error);

    for (size_t i = 0; i < arguments->sequences && done; i++) {
        const size_t first = random_below(&random, list->count - length + 1);
        const double left =
            i > 0 ? (machine_seconds() - began) / (double)i * (double)(arguments->sequences - i)
                  : 0;

        if (i == 0)
            progress_show("0 of %zu sequences", arguments->sequences);
        else
            progress_show("%zu of %zu sequences, %.0f s left", i, arguments->sequences, left);
        done = kv_store_rewind(cache.store, 0, error) && kv_store_rewind(probe, 0, error) &&
               transformer_step_shared(transformer, (struct kv_store *const[]){cache.store, probe},
                                       2, list->ids + first, length, NULL, error);
    }
    progress_clear();
    transformer_close(transformer);
    eval_cache_close(&cache);
    return done;
}

bool eval_calibrate(const struct eval_arguments *arguments, struct error *error)
{
    const size_t length = arguments->length > 0 ? arguments->length : DEFAULT_LENGTH;
    const struct calibration_source source = {arguments->sequences, length, arguments->seed};
    struct model *model = NULL;
    struct token_list list = {NULL, 0, 0};
    struct kv_store *probe = NULL;
    struct output_file output;
    bool done = false;

    if (!model_open(arguments->model, &model, error) ||
        !eval_read_text(arguments, model, &list, error))
        goto out;
    if (list.count < length) {
        error_set(error,
                  "%s: has %zu tokens, fewer than the %zu of a sequence; --length sets how "
                  "many",
                  arguments->file, list.count, length);
        goto out;
    }
    if (length > model->context_length) {
        error_set(error, "--length %zu: the model's context is %zu tokens", length,
                  model->context_length);
        goto out;
    }
    if (!calibration_probe_open(model, length, arguments->threads, &probe, error) ||
        !output_file_open(&output, arguments->output, error))
        goto out;
    done = output_file_close(
        &output,
        measure(arguments, model, &list, length, probe, error) &&
            calibration_write(probe, &source, output.file, arguments->output, error),
        error);
out:
    kv_store_close(probe);
    token_list_free(&list);
    model_close(model);
    return done;
}
