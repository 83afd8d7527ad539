/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval tasks: answers test rows under each policy and scores the answers. */
#include "eval.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "jsonl.h"
#include "options.h"
#include "output_file.h"
#include "plot.h"
#include "runner/detokenizer.h"
#include "runner/sampler.h"
#include "task_log.h"
#include "task_prompt.h"
#include "task_score.h"

/* One --kv. */
struct contender {
    const char *text; /* as typed */
    struct eval_cache cache;
    /* Sums over the rows. */
    double score;
    uint64_t bytes, raw_bytes;
};

struct tasks {
    const struct eval_arguments *arguments;
    struct model *model;
    struct tokenizer *tokenizer;
    struct task_prompter prompter;
    struct transformer *transformer;
    struct sampler *sampler;
    struct detokenizer detokenizer;
    struct contender *contenders; /* [arguments->kv_count] */
    struct kv_store **shared;     /* [shared_count]: those whose prompt is attended exactly */
    size_t shared_count;
    float *prompt_logits, *logits; /* [vocabulary] */

    size_t row_count;
    uint64_t rows_digest; /* of the file */
    size_t longest;       /* prompt, in tokens */
    struct task_log log;  /* with --output */
    double began;         /* the first row that is computed; 0: none yet */
    size_t computed;
};

/* ---- Rows --------------------------------------------------------------------------------------
 */

/* Reads what a row is to have; checks no more than that. */
static bool read_row(const struct jsonl *rows, const char **input, const char **gen_prefix,
                     const json_t **outputs, struct error *error)
{
    return jsonl_string(rows, rows->row, "input", false, input, error) &&
           jsonl_string(rows, rows->row, "gen_prefix", true, gen_prefix, error) &&
           jsonl_array(rows, rows->row, "outputs", outputs, error);
}

static bool encode_row(const struct tasks *t, const struct jsonl *rows, struct token_list *tokens,
                       struct task_references *references, struct error *error)
{
    const size_t most = t->model->context_length, answer = t->arguments->max_new;
    const char *input, *gen_prefix;
    const json_t *outputs;
    struct error why;

    tokens->count = 0;
    if (!read_row(rows, &input, &gen_prefix, &outputs, error))
        return false;
    if (!task_references_open(outputs, references, &why))
        return jsonl_error(rows, error, "%s", why.text);
    if (!task_prompter_encode(&t->prompter, input, gen_prefix, tokens, &why) ||
        !model_check_ids(t->model, t->arguments->model, tokens->ids, tokens->count, &why)) {
        jsonl_error(rows, error, "%s", why.text);
    } else if (tokens->count == 0) {
        jsonl_error(rows, error, "the prompt is empty");
    } else if (tokens->count > most || answer - 1 > most - tokens->count) {
        /* The last token that is generated is never fed. */
        jsonl_error(rows, error,
                    "its %zu tokens and --max-new %zu are more than the model's context of %zu",
                    tokens->count, answer, most);
    } else {
        return true;
    }
    task_references_close(references);
    return false;
}

/* All rows are checked before the first is answered: a run may take hours. */
static bool check_rows(struct tasks *t, struct error *error)
{
    XXH3_state_t digest;
    struct token_list tokens = {NULL, 0, 0};
    struct jsonl rows;
    bool found = true, done = false;

    if (!jsonl_open(t->arguments->rows_file, &rows, error))
        return false;
    XXH3_64bits_reset(&digest);
    for (;;) {
        struct task_references references;

        if (interrupt_seen()) {
            error_set(error, "interrupted");
            goto out;
        }
        if (!jsonl_next(&rows, &found, error))
            goto out;
        if (!found)
            break;
        if (!encode_row(t, &rows, &tokens, &references, error))
            goto out;
        task_references_close(&references);
        XXH3_64bits_update(&digest, rows.text, rows.length);
        XXH3_64bits_update(&digest, "\n", 1);
        if (tokens.count > t->longest)
            t->longest = tokens.count;
        t->row_count++;
        progress_show("checked %zu rows", t->row_count);
    }
    t->rows_digest = XXH3_64bits_digest(&digest);
    done = t->row_count > 0 || error_set(error, "%s: has no rows", t->arguments->rows_file);
out:
    progress_clear();
    token_list_free(&tokens);
    jsonl_close(&rows);
    return done;
}

/* ---- Settings ----------------------------------------------------------------------------------
 */

static void digest_weight(XXH3_state_t *digest, const struct weight *weight)
{
    const size_t shape[] = {(size_t)weight->type, weight->rows, weight->columns};

    XXH3_64bits_update(digest, shape, sizeof shape);
    XXH3_64bits_update(digest, weight->data, weight->row_bytes);
}

/* Tells models apart by their shapes and the first row of each matrix. */
static uint64_t digest_model(const struct model *model)
{
    XXH3_state_t digest;

    XXH3_64bits_reset(&digest);
    digest_weight(&digest, &model->token_embedding);
    digest_weight(&digest, &model->output);
    for (size_t i = 0; i < model->layer_count; i++) {
        const struct model_layer *layer = &model->layers[i];
        const struct weight *const weights[] = {&layer->q,    &layer->k,  &layer->v,   &layer->o,
                                                &layer->gate, &layer->up, &layer->down};

        for (size_t j = 0; j < sizeof weights / sizeof *weights; j++)
            digest_weight(&digest, weights[j]);
    }
    return XXH3_64bits_digest(&digest);
}

static json_t *digest_text(uint64_t digest)
{
    char text[17];

    snprintf(text, sizeof text, "%016" PRIx64, digest);
    return json_string(text);
}

/* What the predictions depend on; NULL without memory. */
static json_t *make_settings(const struct tasks *t)
{
    const struct eval_arguments *a = t->arguments;
    json_t *policies = json_array();

    for (size_t i = 0; i < a->kv_count; i++) {
        char canonical[KV_SPEC_TEXT_BYTES];

        kv_spec_canonical(&t->contenders[i].cache.spec, canonical);
        if (json_array_append_new(policies, json_text(canonical)) != 0) {
            json_decref(policies);
            return NULL;
        }
    }
    return json_pack(
        "{s:s, s:o, s:o, s:o, s:o, s:I, s:o, s:s, s:s, s:I, s:b}", "puzzlekv", "tasks", "model",
        json_text(a->model), "model_digest", digest_text(digest_model(t->model)), "file",
        json_text(a->rows_file), "file_digest", digest_text(t->rows_digest), "rows",
        (json_int_t)t->row_count, "kv", policies, "dtype", dtype_name(a->dtype), "metric",
        task_metric_name(a->metric), "max_new", (json_int_t)a->max_new, "chat", a->chat);
}

static bool open_log(struct tasks *t, struct error *error)
{
    const struct eval_arguments *a = t->arguments;
    json_t *settings;
    bool done;

    if (a->output == NULL)
        return true;
    if (!output_file_check(a->output, error))
        return false;
    settings = make_settings(t);
    if (settings == NULL)
        return error_set(error, "out of memory for the settings");
    done = task_log_open(a->output, a->resume, settings, &t->log, error);
    json_decref(settings);
    return done;
}

/* ---- Answers -----------------------------------------------------------------------------------
 */

struct answer_text {
    char *text; /* [length] */
    size_t length, capacity;
    size_t tokens;
    double score;
};

static bool extend(struct answer_text *answer, const char *piece, size_t length,
                   struct error *error)
{
    if (answer->capacity - answer->length < length) {
        size_t capacity = 2 * (answer->length + length);
        char *text = realloc(answer->text, capacity);

        if (text == NULL)
            return error_set(error, "out of memory for an answer");
        answer->text = text;
        answer->capacity = capacity;
    }
    if (length > 0)
        memcpy(answer->text + answer->length, piece, length);
    answer->length += length;
    return true;
}

/* Continues the prompt, after which `logits` came, with one policy: up to --max-new tokens, the
 * model's end, or the last reference, after which the score stays as it is. */
static bool answer_row(struct tasks *t, struct contender *contender, const float *logits,
                       const struct task_references *references, struct answer_text *answer,
                       struct error *error)
{
    const struct eval_arguments *a = t->arguments;
    const char *piece;
    size_t length;
    bool ended = false;

    answer->length = answer->tokens = 0;
    answer->score = 0;
    detokenizer_continue(&t->detokenizer);
    while (!ended && answer->score < 1 && answer->tokens < a->max_new) {
        int32_t token;

        if (answer->tokens > 0)
            logits = t->logits;
        if (!sampler_choose(t->sampler, logits, NULL, 0, &token, error))
            return false;
        answer->tokens++;
        ended = tokenizer_is_end(t->tokenizer, token);
        if (ended)
            break;
        piece = detokenizer_push(&t->detokenizer, token, &length);
        if (!extend(answer, piece, length, error) ||
            (length > 0 && !task_score(references, a->metric, answer->text, answer->length,
                                       &answer->score, error)))
            return false;
        if (answer->score < 1 && answer->tokens < a->max_new &&
            !transformer_step(t->transformer, contender->cache.store, &token, 1, t->logits, error))
            return false;
    }
    piece = detokenizer_flush(&t->detokenizer, &length);
    return extend(answer, piece, length, error);
}

static void show_progress(const struct tasks *t, size_t row, const char *what)
{
    const double left = t->computed > 0 ? (machine_seconds() - t->began) / (double)t->computed *
                                              (double)(t->row_count - row)
                                        : 0;
    const unsigned long seconds = (unsigned long)left;

    if (t->computed == 0)
        progress_show("row %zu of %zu, %s", row + 1, t->row_count, what);
    else
        progress_show("row %zu of %zu, %s; %lu:%02lu:%02lu left", row + 1, t->row_count, what,
                      seconds / 3600, seconds / 60 % 60, seconds % 60);
}

/* Adds a policy's result to `results` and to its sums. */
static bool add_result(struct contender *contender, const struct answer_text *answer,
                       json_t *results, struct error *error)
{
    struct kv_stats stats;

    if (!kv_store_stats(contender->cache.store, &stats, error))
        return false;
    contender->score += answer->score;
    contender->bytes += stats.payload_bytes;
    contender->raw_bytes += stats.raw_bytes;
    if (json_array_append_new(
            results, json_pack("{s:o, s:o, s:o, s:I, s:I, s:I}", "kv", json_text(contender->text),
                               "prediction", json_bytes(answer->text, answer->length), "score",
                               json_finite(answer->score), "tokens", (json_int_t)answer->tokens,
                               "kv_bytes", (json_int_t)stats.payload_bytes, "kv_bytes_raw",
                               (json_int_t)stats.raw_bytes)) != 0)
        return error_set(error, "out of memory for the results");
    return true;
}

/* Feeds the prompt once to all policies that attend it exactly, and to the others one by one. */
static bool run_row(struct tasks *t, size_t row, const struct token_list *tokens,
                    const struct task_references *references, json_t *results, struct error *error)
{
    struct answer_text answer = {0};
    bool done = false;

    show_progress(t, row, "prompt");
    for (size_t i = 0; i < t->arguments->kv_count; i++) {
        if (!kv_store_rewind(t->contenders[i].cache.store, 0, error))
            goto out;
    }
    if (t->shared_count > 0 &&
        !transformer_step_shared(t->transformer, t->shared, t->shared_count, tokens->ids,
                                 tokens->count, t->prompt_logits, error))
        goto out;
    for (size_t i = 0; i < t->arguments->kv_count; i++) {
        struct contender *contender = &t->contenders[i];
        const bool own = contender->cache.spec.policy->own_prefill;

        show_progress(t, row, contender->text);
        if (own && !transformer_step(t->transformer, contender->cache.store, tokens->ids,
                                     tokens->count, t->logits, error))
            goto out;
        if (!answer_row(t, contender, own ? t->logits : t->prompt_logits, references, &answer,
                        error) ||
            !add_result(contender, &answer, results, error))
            goto out;
    }
    done = true;
out:
    free(answer.text);
    return done;
}

static bool write_row(struct tasks *t, const struct jsonl *rows, size_t row, json_t *results,
                      struct error *error)
{
    json_t *object;
    bool done;

    if (t->log.file == NULL)
        return true;
    object = json_pack("{s:I, s:O*, s:O, s:O}", "row", (json_int_t)row, "index",
                       json_object_get(rows->row, "index"), "outputs",
                       json_object_get(rows->row, "outputs"), "results", results);
    if (object == NULL)
        return error_set(error, "out of memory for the results");
    done = task_log_write(&t->log, object, error);
    json_decref(object);
    return done;
}

/* Takes the sums of a row from what an earlier run wrote. */
static bool take_row(struct tasks *t, const json_t *object, struct error *error)
{
    const struct jsonl *earlier = &t->log.earlier;
    const json_t *results;

    if (!jsonl_array(earlier, object, "results", &results, error))
        return false;
    if (json_array_size(results) != t->arguments->kv_count)
        return jsonl_error(earlier, error, "\"results\" has %zu elements, expected %zu",
                           json_array_size(results), t->arguments->kv_count);
    for (size_t i = 0; i < t->arguments->kv_count; i++) {
        const json_t *result = json_array_get(results, i);
        int64_t bytes, raw_bytes;
        double score;

        if (!jsonl_number(earlier, result, "score", &score, error) ||
            !jsonl_integer(earlier, result, "kv_bytes", &bytes, error) ||
            !jsonl_integer(earlier, result, "kv_bytes_raw", &raw_bytes, error))
            return false;
        if (!(score >= 0 && score <= 1) || bytes < 0 || raw_bytes < 0)
            return jsonl_error(earlier, error, "result %zu is out of range", i);
        t->contenders[i].score += score;
        t->contenders[i].bytes += (uint64_t)bytes;
        t->contenders[i].raw_bytes += (uint64_t)raw_bytes;
    }
    return true;
}

static bool run_rows(struct tasks *t, struct error *error)
{
    struct token_list tokens = {NULL, 0, 0};
    struct task_references references = {NULL, 0};
    json_t *results = NULL;
    struct jsonl rows;
    size_t row = 0;
    bool done = false;

    if (!jsonl_open(t->arguments->rows_file, &rows, error))
        return false;
    for (; row < t->row_count; row++) {
        const json_t *earlier;
        bool found;

        if (!jsonl_next(&rows, &found, error))
            goto out;
        if (!found) {
            error_set(error, "%s: has been changed since it was checked", rows.path);
            goto out;
        }
        if (t->log.file != NULL) {
            if (!task_log_read(&t->log, row, &earlier, error))
                goto out;
            if (earlier != NULL) {
                if (!take_row(t, earlier, error))
                    goto out;
                continue;
            }
        }
        if (t->computed == 0)
            t->began = machine_seconds();
        results = json_array();
        if (!encode_row(t, &rows, &tokens, &references, error) ||
            !run_row(t, row, &tokens, &references, results, error) ||
            !write_row(t, &rows, row, results, error))
            goto out;
        task_references_close(&references);
        json_decref(results);
        results = NULL;
        t->computed++;
    }
    done = true;
out:
    progress_clear();
    if (!done && interrupt_seen())
        error_set(error, "interrupted: %zu of %zu rows are done%s", row, t->row_count,
                  t->log.file != NULL ? ", which --resume goes on from" : "");
    json_decref(results);
    task_references_close(&references);
    token_list_free(&tokens);
    jsonl_close(&rows);
    return done;
}

/* ---- Results -----------------------------------------------------------------------------------
 */

static double kv_ratio(const struct contender *contender)
{
    return (double)contender->bytes / (double)contender->raw_bytes;
}

static void print_table(const struct tasks *t)
{
    const int width = eval_kv_width(t->arguments);
    const bool csv = t->arguments->csv;

    if (csv)
        puts("kv,score,score_low,score_high,n,kv_ratio");
    else
        printf("%-*s %7s %15s %6s %8s\n", width, "kv", "score", "95 % interval", "n", "kv_ratio");
    for (size_t i = 0; i < t->arguments->kv_count; i++) {
        const struct contender *contender = &t->contenders[i];
        const double mean = contender->score / (double)t->row_count;
        double low, high;

        task_interval(mean, t->row_count, &low, &high);
        if (csv) {
            csv_text(contender->text);
            printf(",%.17g,%.17g,%.17g,%zu,%.17g\n", 100 * mean, 100 * low, 100 * high,
                   t->row_count, kv_ratio(contender));
        } else {
            printf("%-*s %7.2f %6.2f - %6.2f %6zu %8.5f\n", width, contender->text, 100 * mean,
                   100 * low, 100 * high, t->row_count, kv_ratio(contender));
        }
    }
}

static bool print_json(const struct tasks *t, struct error *error)
{
    const struct eval_arguments *a = t->arguments;
    json_t *results = json_array();

    for (size_t i = 0; i < a->kv_count; i++) {
        const struct contender *contender = &t->contenders[i];
        const double mean = contender->score / (double)t->row_count;
        char canonical[KV_SPEC_TEXT_BYTES];
        double low, high;

        task_interval(mean, t->row_count, &low, &high);
        kv_spec_canonical(&contender->cache.spec, canonical);
        if (json_array_append_new(results,
                                  json_pack("{s:o, s:o, s:o, s:o, s:o, s:I, s:o}", "kv",
                                            json_text(contender->text), "kv_canonical",
                                            json_text(canonical), "score", json_finite(100 * mean),
                                            "score_low", json_finite(100 * low), "score_high",
                                            json_finite(100 * high), "n", (json_int_t)t->row_count,
                                            "kv_ratio", json_finite(kv_ratio(contender)))) != 0) {
            json_decref(results);
            return error_set(error, "out of memory for the JSON document");
        }
    }
    return eval_print_document(
        a,
        json_pack("{s:o, s:s, s:I, s:b, s:I, s:o}", "file", json_text(a->rows_file), "metric",
                  task_metric_name(a->metric), "max_new", (json_int_t)a->max_new, "chat", a->chat,
                  "tokens", (json_int_t)t->longest, "results", results),
        error);
}

static bool draw_plot(const struct tasks *t, struct error *error)
{
    const struct eval_arguments *a = t->arguments;
    struct plot_panel panel = {.title = plot_file_title(a->rows_file), .y_label = "score, %"};
    struct plot_quality *results = calloc(a->kv_count, sizeof *results);
    bool done;

    if (results == NULL)
        return error_set(error, "out of memory for the plot");
    for (size_t i = 0; i < a->kv_count; i++) {
        struct plot_quality *result = &results[i];
        const double mean = t->contenders[i].score / (double)t->row_count;

        task_interval(mean, t->row_count, &result->low, &result->high);
        *result = (struct plot_quality){t->contenders[i].text, kv_ratio(&t->contenders[i]),
                                        100 * mean, 100 * result->low, 100 * result->high};
    }
    done = plot_quality(results, a->kv_count, true, &panel, error) &&
           plot_write(a->plot, &panel, 1, error);
    plot_quality_free(&panel);
    free(results);
    return done;
}

/* ---- The command -------------------------------------------------------------------------------
 */

static bool open_tasks(struct tasks *t, struct error *error)
{
    const struct eval_arguments *a = t->arguments;
    const struct sampler_options greedy = {.temperature = 0, .top_p = 1, .repeat_penalty = 1};

    t->contenders = calloc(a->kv_count, sizeof *t->contenders);
    t->shared = calloc(a->kv_count, sizeof *t->shared);
    if (t->contenders == NULL || t->shared == NULL)
        return error_set(error, "out of memory for %zu policies", a->kv_count);
    if (!model_open(a->model, &t->model, error) || !eval_tokenizer_open(a, &t->tokenizer, error) ||
        !task_prompter_open(t->tokenizer, a->model, a->chat, &t->prompter, error) ||
        !check_rows(t, error))
        return false;
    for (size_t i = 0; i < a->kv_count; i++) {
        struct contender *contender = &t->contenders[i];

        contender->text = a->kv[i].text;
        if (!eval_cache_open(a, t->model, &a->kv[i].spec, t->longest + a->max_new - 1, t->longest,
                             &contender->cache, error))
            return false;
        if (!contender->cache.spec.policy->own_prefill)
            t->shared[t->shared_count++] = contender->cache.store;
    }
    t->prompt_logits = calloc(t->model->vocabulary, sizeof *t->prompt_logits);
    t->logits = calloc(t->model->vocabulary, sizeof *t->logits);
    if (t->prompt_logits == NULL || t->logits == NULL)
        return error_set(error, "out of memory for the logits");
    return eval_transformer_open(a, t->model, &t->transformer, error) &&
           sampler_open(&greedy, t->model->vocabulary, &t->sampler, error) &&
           detokenizer_open(&t->detokenizer, t->tokenizer, false, error) &&
           (a->plot == NULL || output_file_try(a->plot, error)) && open_log(t, error);
}

static void close_tasks(struct tasks *t)
{
    task_log_close(&t->log);
    free(t->logits);
    free(t->prompt_logits);
    detokenizer_close(&t->detokenizer);
    sampler_close(t->sampler);
    transformer_close(t->transformer);
    for (size_t i = 0; t->contenders != NULL && i < t->arguments->kv_count; i++)
        eval_cache_close(&t->contenders[i].cache);
    free(t->shared);
    free(t->contenders);
    task_prompter_close(&t->prompter);
    tokenizer_close(t->tokenizer);
    model_close(t->model);
}

bool eval_tasks(const struct eval_arguments *arguments, struct error *error)
{
    struct tasks t = {.arguments = arguments};
    bool done = open_tasks(&t, error) && run_rows(&t, error);

    if (done && arguments->json) {
        done = print_json(&t, error);
    } else if (done) {
        print_table(&t);
        done = output_flush(error);
    }
    if (done && arguments->plot != NULL)
        done = draw_plot(&t, error);
    close_tasks(&t);
    return done;
}
