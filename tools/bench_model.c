/* SPDX-License-Identifier: MIT */
/* puzzlekv-bench model: a model's time to the first token and per further one, side by side. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "policies/pages.h"
#include "random_model.h"
#include "random_pages.h"
#include "runner/forward.h"
#include "runner/transformer.h"

/* What warms a policy up: a prompt of so many tokens at most, and a further token. On a device,
 * which allocates and loads when something comes for the first time, the whole prompt, and two
 * tokens: the second is captured. */
#define WARM_TOKENS ((size_t)64)

enum {
    COLUMN_TTFT,
    COLUMN_TTFT_LOW,
    COLUMN_TTFT_HIGH,
    COLUMN_TPOT,
    COLUMN_TPOT_LOW,
    COLUMN_TPOT_HIGH,
    COLUMN_TTFT_RATIO,
    COLUMN_TPOT_RATIO,
    COLUMN_FACTORIZE,
    COLUMN_RATIO,
    COLUMNS
};

static const struct bench_column columns[COLUMNS] = {
    {"ttft_s", 4},    {"ttft_low", 4},   {"ttft_high", 4},  {"tpot_s", 5},      {"tpot_low", 5},
    {"tpot_high", 5}, {"ttft_ratio", 3}, {"tpot_ratio", 3}, {"factorize_s", 4}, {"kv_ratio", 4},
};

/* One policy's store. */
struct contestant {
    struct kv_spec spec;
    struct kv_store *store;
    int32_t next;                    /* the token that it has chosen */
    double *ttft, *tpot, *factorize; /* [repeats] */
};

struct race {
    const struct bench_arguments *arguments;
    const struct model *model;
    void *k, *v; /* what fills the caches; NULL: nothing does */
    struct transformer *transformer;
    int32_t *prompt; /* [prompt_tokens] */
    size_t count;
    struct contestant *contestants; /* [count] */
};

static bool go_on(void *opaque, size_t done, size_t layers)
{
    (void)opaque;
    (void)done;
    (void)layers;
    return !interrupt_seen();
}

/* Feeds tokens and chooses the likeliest next one; adds what that took to *seconds. */
static bool feed(struct race *race, struct contestant *c, const int32_t *tokens, size_t count,
                 double *seconds, struct error *error)
{
    double start = machine_seconds();

    if (!transformer_next(race->transformer, c->store, tokens, count, &c->next, error))
        return false;
    *seconds += machine_seconds() - start;
    return true;
}

static bool feed_next(struct race *race, struct contestant *c, double *seconds, struct error *error)
{
    const int32_t token = c->next;

    return feed(race, c, &token, 1, seconds, error);
}

/* Fills a store that has fewer tokens than are to be there before the prompt. */
static bool fill(struct race *race, struct contestant *c, struct error *error)
{
    const size_t depth = race->arguments->depth;
    const pkv_step_io operands = {.struct_size = sizeof operands,
                                  .k = {race->k, PKV_F32, 0, 0},
                                  .v = {race->v, PKV_F32, 0, 0}};
    struct kv_layer io = {.k = race->k, .v = race->v};

    io.on_device = race->arguments->device != NULL ? &operands : NULL;
    while ((io.position = kv_store_tokens(c->store)) < depth) {
        io.count = depth - io.position;
        io.count = io.count < BENCH_FILL_TOKENS ? io.count : BENCH_FILL_TOKENS;
        if (interrupt_seen())
            return error_set(error, "interrupted");
        if (!kv_store_begin(c->store, io.count, error))
            return false;
        for (io.layer = 0; io.layer < race->model->layer_count; io.layer++) {
            if (!kv_store_layer(c->store, &io, error)) {
                kv_store_abort(c->store);
                return false;
            }
        }
        if (!kv_store_end(c->store, error))
            return false;
    }
    return true;
}

static bool warm_up(struct race *race, struct error *error)
{
    const bool on_device = race->arguments->device != NULL;
    size_t prompt = race->arguments->prompt_tokens;
    double seconds = 0;

    if (!on_device && prompt > WARM_TOKENS)
        prompt = WARM_TOKENS;

    for (size_t i = 0; i < race->count; i++) {
        struct contestant *c = &race->contestants[i];

        progress_show("filling %s", race->arguments->kv[i].text);
        if (!fill(race, c, error) || !feed(race, c, race->prompt, prompt, &seconds, error))
            return false;
        for (size_t n = 1; n < race->arguments->predict && n <= (on_device ? 2 : 1); n++) {
            if (!feed_next(race, c, &seconds, error))
                return false;
        }
    }
    return true;
}

/* All prompts, one after the other; then all second tokens, all third ones, and so on. */
static bool run_round(struct race *race, size_t round, struct error *error)
{
    const struct bench_arguments *a = race->arguments;
    struct kv_stats before, after;

    for (size_t i = 0; i < race->count; i++) {
        struct contestant *c = &race->contestants[i];

        progress_show("round %zu of %zu, prompt of %s", round + 1, a->repeats, a->kv[i].text);
        if (!kv_store_rewind(c->store, a->depth, error) || !fill(race, c, error) ||
            !kv_store_stats(c->store, &before, error) ||
            !feed(race, c, race->prompt, a->prompt_tokens, &c->ttft[round], error) ||
            !kv_store_stats(c->store, &after, error))
            return false;
        c->factorize[round] = after.factorize_seconds - before.factorize_seconds;
    }
    for (size_t n = 1; n < a->predict; n++) {
        progress_show("round %zu of %zu, token %zu of %zu", round + 1, a->repeats, n + 1,
                      a->predict);
        for (size_t i = 0; i < race->count; i++) {
            struct contestant *c = &race->contestants[i];

            if (!feed_next(race, c, &c->tpot[round], error))
                return false;
        }
    }
    for (size_t i = 0; i < race->count; i++)
        race->contestants[i].tpot[round] /= (double)(a->predict - 1);
    return true;
}

static bool evaluate(const struct race *race, struct bench_row *rows, struct error *error)
{
    const struct bench_arguments *a = race->arguments;
    const struct contestant *first = &race->contestants[0];
    double *scratch = calloc(a->repeats, sizeof *scratch);
    bool done = true;

    if (scratch == NULL)
        return error_set(error, "out of memory");
    /* Ratios first: to summarise sorts. */
    for (size_t i = 0; i < race->count && done; i++) {
        const struct contestant *c = &race->contestants[i];
        double *values = rows[i].values;
        struct kv_stats stats;

        rows[i].name = a->kv[i].text;
        kv_spec_canonical(&c->spec, rows[i].canonical);
        values[COLUMN_TTFT_RATIO] = bench_median_ratio(c->ttft, first->ttft, a->repeats, scratch);
        values[COLUMN_TPOT_RATIO] = bench_median_ratio(c->tpot, first->tpot, a->repeats, scratch);
        done = kv_store_stats(c->store, &stats, error);
        if (done)
            values[COLUMN_RATIO] = (double)stats.payload_bytes / (double)stats.raw_bytes;
    }
    for (size_t i = 0; i < race->count && done; i++) {
        const struct contestant *c = &race->contestants[i];
        struct bench_summary ttft = bench_summarise(c->ttft, a->repeats);
        struct bench_summary tpot = bench_summarise(c->tpot, a->repeats);
        double *values = rows[i].values;

        values[COLUMN_TTFT] = ttft.median;
        values[COLUMN_TTFT_LOW] = ttft.low;
        values[COLUMN_TTFT_HIGH] = ttft.high;
        values[COLUMN_TPOT] = tpot.median;
        values[COLUMN_TPOT_LOW] = tpot.low;
        values[COLUMN_TPOT_HIGH] = tpot.high;
        values[COLUMN_FACTORIZE] = bench_summarise(c->factorize, a->repeats).median;
    }
    free(scratch);
    return done;
}

static size_t longest_step(const struct bench_arguments *a)
{
    const size_t filling = a->depth < BENCH_FILL_TOKENS ? a->depth : BENCH_FILL_TOKENS;

    return a->prompt_tokens > filling ? a->prompt_tokens : filling;
}

static bool open_contestant(const struct race *race, const struct model *model,
                            const struct bench_kv *kv, struct contestant *c, struct error *error)
{
    const struct bench_arguments *a = race->arguments;
    const struct kv_store_options options = {.model = model,
                                             .dtype = a->dtype,
                                             .max_tokens = a->depth + a->prompt_tokens + a->predict,
                                             .max_step_tokens = longest_step(a),
                                             .threads = a->threads,
                                             .device = a->device};

    c->spec = kv->spec;
    c->ttft = calloc(a->repeats, sizeof *c->ttft);
    c->tpot = calloc(a->repeats, sizeof *c->tpot);
    c->factorize = calloc(a->repeats, sizeof *c->factorize);
    if (c->ttft == NULL || c->tpot == NULL || c->factorize == NULL)
        return error_set(error, "out of memory");
    if (!kv_spec_resolve(&c->spec, model, error))
        return false;
    kv_spec_warn(&c->spec, BENCH_PROGRAM);
    return kv_store_open(&c->spec, &options, &c->store, error);
}

static void close_contestant(struct contestant *c)
{
    kv_store_close(c->store);
    free(c->ttft);
    free(c->tpot);
    free(c->factorize);
}

/* Of `weights` bytes, of a step, and of caches that are as large as all tokens dense; of the
 * machine's own memory. */
static bool check_memory(const struct bench_arguments *a, const struct model *model, size_t weights,
                         struct error *error)
{
    size_t dense = policy_raw_bytes(model, a->dtype, a->depth + a->prompt_tokens + a->predict);
    const char *isa;
    size_t need;

    if (a->device != NULL)
        return true;
    if (!machine_isa(&isa, error))
        return false;
    if (__builtin_mul_overflow(dense, a->kv_count, &need) ||
        __builtin_add_overflow(need, weights, &need) ||
        __builtin_add_overflow(need, forward_cpu_bytes(model, isa, longest_step(a)), &need))
        need = SIZE_MAX;
    return bench_check_memory(NULL, 0, need, error);
}

static bool check_context(const struct bench_arguments *a, const struct model *model,
                          struct error *error)
{
    return a->depth + a->prompt_tokens + a->predict <= model->context_length ||
           error_set(error,
                     "--depth %zu, --prompt-tokens %zu, --predict %zu: the model's context is %zu",
                     a->depth, a->prompt_tokens, a->predict, model->context_length);
}

static bool run(struct race *race, const struct model *model, struct bench_row *rows,
                struct error *error)
{
    const struct bench_arguments *a = race->arguments;
    struct transformer_options options = {
        .threads = a->threads, .device = a->device, .layer_done = go_on};
    uint64_t seed = 42;

    race->model = model;
    if (a->depth > 0 &&
        !bench_fill_operands(a, model, BENCH_FILL_TOKENS, &race->k, &race->v, error))
        return false;
    race->prompt = calloc(a->prompt_tokens, sizeof *race->prompt);
    if (race->prompt == NULL)
        return error_set(error, "out of memory");
    for (size_t i = 0; i < a->prompt_tokens; i++)
        race->prompt[i] = (int32_t)(random_bits(&seed) % model->vocabulary);
    for (size_t i = 0; i < race->count; i++) {
        if (!open_contestant(race, model, &a->kv[i], &race->contestants[i], error))
            return false;
    }
    if (!machine_isa(&options.isa, error) ||
        !transformer_open(model, &options, &race->transformer, error) || !warm_up(race, error))
        return false;
    for (size_t round = 0; round < a->repeats; round++) {
        if (!run_round(race, round, error))
            return false;
    }
    return evaluate(race, rows, error);
}

bool bench_model(const struct bench_arguments *arguments, struct error *error)
{
    size_t count = arguments->kv_count;
    struct race race = {.arguments = arguments, .count = count};
    struct bench_row *rows = calloc(count, sizeof *rows);
    const struct bench_results results = {"kv", columns, COLUMNS, rows, count};
    struct model *model = NULL, random = {.layers = NULL};
    bool done = false;

    race.contestants = calloc(count, sizeof *race.contestants);
    if (rows == NULL || race.contestants == NULL) {
        error_set(error, "out of memory");
        goto out;
    }
    if (arguments->file != NULL) {
        /* Its weights are mapped. */
        if (!model_open(arguments->file, &model, error) ||
            !check_context(arguments, model, error) || !check_memory(arguments, model, 0, error))
            goto out;
    } else if (!check_context(arguments, &arguments->model, error) ||
               !random_model_open(&arguments->model, &random, error) ||
               !check_memory(arguments, &random, random_model_bytes(&random), error) ||
               (arguments->device == NULL &&
                !random_model_fill(&random, arguments->threads, error))) {
        goto out;
    }
    if (!run(&race, model != NULL ? model : &random, rows, error))
        goto out;
    progress_clear();
    done = bench_report(
        arguments,
        json_pack("{s:s, s:o, s:I, s:I, s:I, s:I}", "dtype", dtype_name(arguments->dtype),
                  arguments->file != NULL ? "model" : "shape",
                  arguments->file != NULL ? json_text(arguments->file)
                                          : json_string(arguments->shape),
                  "depth", (json_int_t)arguments->depth, "prompt_tokens",
                  (json_int_t)arguments->prompt_tokens, "predict", (json_int_t)arguments->predict,
                  "repeats", (json_int_t)arguments->repeats),
        &results, error);
out:
    for (size_t i = 0; race.contestants != NULL && i < count; i++)
        close_contestant(&race.contestants[i]);
    transformer_close(race.transformer);
    bench_operand_free(arguments, race.k);
    bench_operand_free(arguments, race.v);
    free(race.contestants);
    free(race.prompt);
    free(rows);
    random_model_close(&random);
    model_close(model);
    return done;
}
