/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval ppl: what a policy does to a model's predictions of a text. */
#include "eval.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "options.h"
#include "output_file.h"
#include "plot.h"

struct policy_run {
    const char *text; /* as typed; NULL: the reference that was not asked for */
    struct eval_cache cache;
    double nll, kl; /* sums over the predictions, in nats */
    size_t agreed;  /* predictions whose likeliest token is the reference's */
};

/* Natural logarithms of the softmax of `logits`, and the first of the largest. */
static bool log_softmax(const float *logits, size_t count, double *logs, size_t *largest,
                        struct error *error)
{
    double sum = 0, normalizer;

    *largest = 0;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(logits[i]))
            return error_set(error, "logits: that of token %zu is not finite", i);
        if (logits[i] > logits[*largest])
            *largest = i;
    }
    for (size_t i = 0; i < count; i++)
        sum += exp((double)logits[i] - logits[*largest]);
    normalizer = logits[*largest] + log(sum);
    for (size_t i = 0; i < count; i++)
        logs[i] = logits[i] - normalizer;
    return true;
}

/* KL(reference || other) = sum over tokens of p_reference ln(p_reference / p_other). */
static double divergence(const double *reference, const double *other, size_t count)
{
    double sum = 0;

    for (size_t i = 0; i < count; i++)
        sum += exp(reference[i]) * (reference[i] - other[i]);
    return sum;
}

/* The buffers of one prediction, [vocabulary] each. */
struct predictions {
    float *logits;
    double *reference; /* logarithms of the reference's probabilities */
    double *logs;      /* of another policy's */
    size_t reference_choice;
};

static bool predictions_open(struct predictions *p, size_t vocabulary, struct error *error)
{
    *p = (struct predictions){calloc(vocabulary, sizeof *p->logits),
                              calloc(vocabulary, sizeof *p->reference),
                              calloc(vocabulary, sizeof *p->logs), 0};
    return (p->logits != NULL && p->reference != NULL && p->logs != NULL) ||
           error_set(error, "out of memory for the logits");
}

static void predictions_close(struct predictions *p)
{
    free(p->logs);
    free(p->reference);
    free(p->logits);
}

/* Counts what p->logits, those of run `index`, say of the token that follows; 0 is the reference.
 */
static bool count_prediction(struct policy_run *runs, size_t index, struct predictions *p,
                             size_t vocabulary, int32_t next, struct error *error)
{
    double *into = index == 0 ? p->reference : p->logs;
    size_t choice;

    if (!log_softmax(p->logits, vocabulary, into, &choice, error))
        return false;
    if (index == 0)
        p->reference_choice = choice;
    else
        runs[index].kl += divergence(p->reference, p->logs, vocabulary);
    runs[index].nll -= into[next];
    runs[index].agreed += choice == p->reference_choice;
    return true;
}

static void show_progress(const struct eval_arguments *arguments, const struct policy_run *run,
                          size_t fed)
{
    progress_show("%zu of %zu tokens, %s", fed, arguments->tokens,
                  run->text != NULL ? run->text : "raw");
}

/* The first step. The policies that do not change it share the reference's, and so the prediction.
 */
static bool prefill(const struct eval_arguments *arguments, struct transformer *transformer,
                    struct policy_run *runs, size_t run_count, struct predictions *p,
                    size_t vocabulary, const int32_t *ids, struct error *error)
{
    struct kv_store **stores = calloc(run_count, sizeof *stores);
    int32_t next = ids[arguments->prefill];
    size_t count = 0;
    bool done;

    if (stores == NULL)
        return error_set(error, "out of memory for %zu policies", run_count);
    for (size_t i = 0; i < run_count; i++) {
        if (!runs[i].cache.spec.policy->own_prefill)
            stores[count++] = runs[i].cache.store;
    }
    show_progress(arguments, &runs[0], 0);
    done = transformer_step_shared(transformer, stores, count, ids, arguments->prefill, p->logits,
                                   error);
    for (size_t i = 0; i < run_count && done; i++) {
        if (!runs[i].cache.spec.policy->own_prefill)
            done = count_prediction(runs, i, p, vocabulary, next, error);
    }
    for (size_t i = 0; i < run_count && done; i++) {
        if (!runs[i].cache.spec.policy->own_prefill)
            continue;
        show_progress(arguments, &runs[i], 0);
        done = transformer_step(transformer, runs[i].cache.store, ids, arguments->prefill,
                                p->logits, error) &&
               count_prediction(runs, i, p, vocabulary, next, error);
    }
    free(stores);
    return done;
}

/* Feeds the same tokens to all policies, side by side; runs[0] is the reference. */
static bool predict(const struct eval_arguments *arguments, const struct model *model,
                    struct policy_run *runs, size_t run_count, const int32_t *ids,
                    struct error *error)
{
    struct transformer *transformer = NULL;
    struct predictions p;
    bool done = false;

    if (!predictions_open(&p, model->vocabulary, error) ||
        !eval_transformer_open(arguments, model, &transformer, error) ||
        !prefill(arguments, transformer, runs, run_count, &p, model->vocabulary, ids, error))
        goto out;
    for (size_t fed = arguments->prefill; fed + 1 < arguments->tokens; fed++) {
        for (size_t i = 0; i < run_count; i++) {
            show_progress(arguments, &runs[i], fed);
            if (!transformer_step(transformer, runs[i].cache.store, ids + fed, 1, p.logits,
                                  error) ||
                !count_prediction(runs, i, &p, model->vocabulary, ids[fed + 1], error))
                goto out;
        }
    }
    progress_clear();
    done = true;
out:
    transformer_close(transformer);
    predictions_close(&p);
    return done;
}

/* The figures of one policy. */
struct result {
    const char *kv; /* as typed */
    char canonical[KV_SPEC_TEXT_BYTES];
    double ppl, nll, kl, top1, kv_ratio;
};

static bool get_result(const struct eval_arguments *arguments, const struct policy_run *run,
                       struct result *result, struct error *error)
{
    const double predictions = (double)(arguments->tokens - arguments->prefill);
    struct kv_stats stats;

    if (!kv_store_stats(run->cache.store, &stats, error))
        return false;
    result->kv = run->text;
    kv_spec_canonical(&run->cache.spec, result->canonical);
    result->nll = run->nll / predictions;
    result->ppl = exp(result->nll);
    result->kl = run->kl / predictions;
    result->top1 = (double)run->agreed / predictions;
    result->kv_ratio = (double)stats.payload_bytes / (double)stats.raw_bytes;
    return true;
}

static void print_table(const struct eval_arguments *arguments, const struct result *results)
{
    const int width = eval_kv_width(arguments);

    printf("%-*s %10s %8s %10s %7s %8s\n", width, "kv", "ppl", "nll", "kl", "top1", "kv_ratio");
    for (size_t i = 0; i < arguments->kv_count; i++)
        printf("%-*s %10.4f %8.5f %10.3e %7.4f %8.5f\n", width, results[i].kv, results[i].ppl,
               results[i].nll, results[i].kl, results[i].top1, results[i].kv_ratio);
}

static void print_csv(const struct eval_arguments *arguments, const struct result *results)
{
    puts("kv,ppl,nll,kl,top1,kv_ratio");
    for (size_t i = 0; i < arguments->kv_count; i++) {
        csv_text(results[i].kv);
        printf(",%.17g,%.17g,%.17g,%.17g,%.17g\n", results[i].ppl, results[i].nll, results[i].kl,
               results[i].top1, results[i].kv_ratio);
    }
}

static bool print_json(const struct eval_arguments *arguments, const struct result *results,
                       struct error *error)
{
    json_t *list = json_array();

    for (size_t i = 0; i < arguments->kv_count; i++) {
        const struct result *result = &results[i];

        if (json_array_append_new(
                list, json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "kv", json_text(result->kv),
                                "kv_canonical", json_text(result->canonical), "ppl",
                                json_finite(result->ppl), "nll", json_finite(result->nll), "kl",
                                json_finite(result->kl), "top1", json_finite(result->top1),
                                "kv_ratio", json_finite(result->kv_ratio))) != 0) {
            json_decref(list);
            return error_set(error, "out of memory for the JSON document");
        }
    }
    return eval_print_document(arguments,
                               json_pack("{s:I, s:I, s:o}", "tokens", (json_int_t)arguments->tokens,
                                         "prefill", (json_int_t)arguments->prefill, "results",
                                         list),
                               error);
}

/* Perplexity and divergence, side by side. */
static bool draw_plot(const struct eval_arguments *arguments, const struct result *results,
                      struct error *error)
{
    const size_t count = arguments->kv_count;
    struct plot_panel panels[] = {
        {.title = plot_file_title(arguments->file), .y_label = "perplexity"},
        {.title = plot_file_title(arguments->file),
         .y_label = "KL divergence from raw, nats a token"}};
    struct plot_quality *points = calloc(count, sizeof *points);
    bool done = points != NULL || error_set(error, "out of memory for the plot");

    for (size_t panel = 0; panel < 2 && done; panel++) {
        for (size_t i = 0; i < count; i++)
            points[i] = (struct plot_quality){results[i].kv, results[i].kv_ratio,
                                              panel == 0 ? results[i].ppl : results[i].kl, 0, 0};
        done = plot_quality(points, count, false, &panels[panel], error);
    }
    done = done && plot_write(arguments->plot, panels, 2, error);
    for (size_t panel = 0; panel < 2; panel++)
        plot_quality_free(&panels[panel]);
    free(points);
    return done;
}

/* In the order of the command line; `order[i]` is the run of the i-th --kv. */
static bool report(const struct eval_arguments *arguments, const struct policy_run *runs,
                   const size_t *order, struct error *error)
{
    struct result *results = calloc(arguments->kv_count, sizeof *results);
    bool done = results != NULL || error_set(error, "out of memory for the results");

    for (size_t i = 0; i < arguments->kv_count && done; i++)
        done = get_result(arguments, &runs[order[i]], &results[i], error);
    if (done && arguments->json) {
        done = print_json(arguments, results, error);
    } else if (done) {
        (arguments->csv ? print_csv : print_table)(arguments, results);
        done = output_flush(error);
    }
    if (done && arguments->plot != NULL)
        done = draw_plot(arguments, results, error);
    free(results);
    return done;
}

bool eval_ppl(const struct eval_arguments *arguments, struct error *error)
{
    struct model *model = NULL;
    struct token_list list = {NULL, 0, 0};
    struct policy_run *runs = calloc(arguments->kv_count + 1, sizeof *runs);
    size_t *order = calloc(arguments->kv_count, sizeof *order);
    size_t run_count = 1;
    struct kv_spec raw;
    bool done = false;

    if (runs == NULL || order == NULL) {
        error_set(error, "out of memory for %zu policies", arguments->kv_count);
        goto out;
    }
    if (!model_open(arguments->model, &model, error) ||
        !eval_read_text(arguments, model, &list, error))
        goto out;

    /* The first raw on the command line is the reference, or one that nobody asked for. */
    if (!kv_spec_parse("raw", &raw, error))
        goto out;
    for (size_t i = 0; i < arguments->kv_count; i++) {
        const struct eval_kv *kv = &arguments->kv[i];

        order[i] = kv->spec.policy == &policy_raw && runs[0].text == NULL ? 0 : run_count++;
        runs[order[i]].text = kv->text;
        if (order[i] == 0)
            raw = kv->spec;
        else if (!eval_cache_open(arguments, model, &kv->spec, arguments->tokens - 1,
                                  arguments->prefill, &runs[order[i]].cache, error))
            goto out;
    }
    if (!eval_cache_open(arguments, model, &raw, arguments->tokens - 1, arguments->prefill,
                         &runs[0].cache, error) ||
        (arguments->plot != NULL && !output_file_try(arguments->plot, error)) ||
        !predict(arguments, model, runs, run_count, list.ids, error))
        goto out;
    done = report(arguments, runs, order, error);
out:
    for (size_t i = 0; runs != NULL && i < arguments->kv_count + 1; i++)
        eval_cache_close(&runs[i].cache);
    free(order);
    free(runs);
    token_list_free(&list);
    model_close(model);
    return done;
}
