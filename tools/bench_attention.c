/* SPDX-License-Identifier: MIT */
/* puzzlekv-bench attention: the time of attention when a token is decoded, side by side. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>

#include "options.h"
#include "policies/pages.h"
#include "random_pages.h"
#include "read_bandwidth.h"

/* What one sample takes at least, by repeating the step. */
#define SAMPLE_SECONDS 0.02

enum {
    COLUMN_TIME,
    COLUMN_TIME_LOW,
    COLUMN_TIME_HIGH,
    COLUMN_BYTES,
    COLUMN_SHARE,
    COLUMN_SPEEDUP,
    COLUMN_RATIO,
    COLUMNS
};

static const struct bench_column columns[COLUMNS] = {
    {"ns_per_token_layer", 0},
    {"ns_low", 0},
    {"ns_high", 0},
    {"bytes_per_token_layer", BENCH_WHOLE},
    {"read_bandwidth_share", 3},
    {"speedup", 3},
    {"kv_ratio", 4},
};

/* One policy's cache. */
struct contestant {
    const char *name;
    pkv_config config;
    pkv_cache *cache;
    pkv_step_item *items; /* [batch], of one token each */
    void *graph;          /* on a device: of a step */
    size_t steps;         /* in one sample */
    double *seconds;      /* [repeats], of one step */
};

/* Copied to measure a device's memory. */
#define COPY_BYTES ((size_t)256 << 20)

/* What the steps take and give, from bench_operand(); all layers the same. */
struct operands {
    void *q, *out; /* [batch, query_heads, head_dim] */
    void *k, *v;   /* [longest_step(), kv_heads, head_dim] */
};

static bool cache_failed(const struct contestant *c, struct error *error)
{
    return error_set(error, "--kv %s: %s", c->name, pkv_cache_message(c->cache));
}

/* Every layer of a step that is open, and stays so: closing the cache aborts it. */
static bool run_layers(struct contestant *c, pkv_step *step, const struct operands *o, bool attend,
                       struct error *error)
{
    const pkv_step_io io = {.struct_size = sizeof io,
                            .q = {o->q, PKV_F32, 0, 0},
                            .k = {o->k, PKV_F32, 0, 0},
                            .v = {o->v, PKV_F32, 0, 0},
                            .out = {attend ? o->out : NULL, PKV_F32, 0, 0}};

    for (size_t layer = 0; layer < c->config.layers; layer++) {
        if (pkv_step_layer(step, layer, &io) != PKV_OK)
            return cache_failed(c, error);
    }
    return true;
}

static bool fill(const struct bench_arguments *arguments, struct contestant *c,
                 const struct operands *o, struct error *error)
{
    char message[PKV_MESSAGE_BYTES];

    if (pkv_cache_open(&c->config, &c->cache, message) != PKV_OK)
        return error_set(error, "--kv %s: %s", c->name, message);
    for (size_t i = 0; i < arguments->batch; i++) {
        pkv_step_item item;

        if (pkv_seq_open(c->cache, &item.seq) != PKV_OK)
            return cache_failed(c, error);
        c->items[i] = (pkv_step_item){item.seq, 1};
        for (size_t done = 0; done < arguments->tokens; done += item.tokens) {
            pkv_step *step;

            if (interrupt_seen())
                return error_set(error, "interrupted");
            progress_show("filling %s: sequence %zu of %zu, %zu of %zu tokens", c->name, i + 1,
                          arguments->batch, done, arguments->tokens);
            item.tokens = arguments->tokens - done;
            if (item.tokens > BENCH_FILL_TOKENS)
                item.tokens = BENCH_FILL_TOKENS;
            if (pkv_step_begin(c->cache, &item, 1, &step) != PKV_OK)
                return cache_failed(c, error);
            if (!run_layers(c, step, o, false, error))
                return false;
            if (pkv_step_end(step) != PKV_OK)
                return cache_failed(c, error);
        }
    }
    return true;
}

static bool decode_by_layers(const struct bench_arguments *arguments, struct contestant *c,
                             size_t steps, const struct operands *o, struct error *error)
{
    for (size_t i = 0; i < steps; i++) {
        pkv_step *step;

        if (interrupt_seen())
            return error_set(error, "interrupted");
        if (pkv_step_begin(c->cache, c->items, arguments->batch, &step) != PKV_OK)
            return cache_failed(c, error);
        if (!run_layers(c, step, o, true, error))
            return false;
        pkv_step_abort(step);
    }
    return true;
}

static bool capture(const struct bench_arguments *arguments, struct contestant *c, pkv_step *step,
                    const struct operands *o, struct error *error)
{
    struct device *device = arguments->device;

    if (!device->operations->capture_begin(device, error))
        return false;
    if (run_layers(c, step, o, true, error))
        return device->operations->capture_end(device, &c->graph, error);
    device->operations->capture_end(device, NULL, NULL);
    return false;
}

/* As a graph, or the host's part of a short step would count. The same step again and again changes
 * nothing that it reads. */
static bool decode_by_graph(const struct bench_arguments *arguments, struct contestant *c,
                            size_t steps, const struct operands *o, struct error *error)
{
    struct device *device = arguments->device;
    pkv_step *step;
    bool done;

    if (interrupt_seen())
        return error_set(error, "interrupted");
    if (pkv_step_begin(c->cache, c->items, arguments->batch, &step) != PKV_OK)
        return cache_failed(c, error);
    if (c->graph != NULL)
        done = pkv_step_replay(step) == PKV_OK || cache_failed(c, error);
    else
        done = capture(arguments, c, step, o, error);
    for (size_t i = 0; i < steps && done; i++)
        done = device->operations->launch(device, c->graph, error);
    done = done && device->operations->wait(device, error);
    pkv_step_abort(step);
    return done;
}

/* Attends `steps` times with one more token of each sequence, which none of them keeps. */
static bool decode(const struct bench_arguments *arguments, struct contestant *c, size_t steps,
                   bool by_graph, const struct operands *o, double *seconds, struct error *error)
{
    double start = machine_seconds();

    if (!(by_graph ? decode_by_graph : decode_by_layers)(arguments, c, steps, o, error))
        return false;
    *seconds = (machine_seconds() - start) / (double)steps;
    return true;
}

/* GB/s: of reading the host's memory, or of copying on the device. `memory` is NULL there. */
static bool measure_memory(const struct bench_arguments *arguments, struct read_bandwidth *memory,
                           double *bandwidth, struct error *error)
{
    struct device *device = arguments->device;

    if (device == NULL) {
        *bandwidth = read_bandwidth_measure(memory);
        return true;
    }
    if (!device->operations->copy_speed(device, COPY_BYTES, bandwidth, error))
        return false;
    *bandwidth *= 1e-9;
    return true;
}

static bool measure(const struct bench_arguments *arguments, struct contestant *contestants,
                    const struct operands *o, struct read_bandwidth *memory, double *bandwidth,
                    struct error *error)
{
    const bool on_device = arguments->device != NULL;
    double seconds;

    /* The first step warms up, not yet as a graph: what a device loads when it is first used it may
     * not load while one is captured. The next tells how many make a sample. */
    for (size_t i = 0; i < arguments->kv_count; i++) {
        struct contestant *c = &contestants[i];

        if (!decode(arguments, c, 1, false, o, &seconds, error) ||
            !decode(arguments, c, 1, on_device, o, &seconds, error))
            return false;
        c->steps = (size_t)fmin(1e6, ceil(SAMPLE_SECONDS / seconds));
    }
    if (!measure_memory(arguments, memory, bandwidth, error))
        return false;
    for (size_t round = 0; round < arguments->repeats; round++) {
        progress_show("round %zu of %zu", round + 1, arguments->repeats);
        if (!measure_memory(arguments, memory, &bandwidth[round], error))
            return false;
        for (size_t i = 0; i < arguments->kv_count; i++) {
            struct contestant *c = &contestants[i];

            if (!decode(arguments, c, c->steps, on_device, o, &c->seconds[round], error))
                return false;
        }
    }
    return true;
}

static bool evaluate(const struct bench_arguments *arguments, const struct contestant *contestants,
                     const double *bandwidth, double *scratch, struct bench_row *rows,
                     struct error *error)
{
    size_t repeats = arguments->repeats;

    for (size_t i = 0; i < arguments->kv_count; i++) {
        const struct contestant *c = &contestants[i];
        double parts = (double)(arguments->batch * c->config.layers);
        pkv_stats stats = {.struct_size = sizeof stats};
        double *values = rows[i].values;
        struct bench_summary time;

        if (pkv_cache_stats(c->cache, &stats) != PKV_OK)
            return cache_failed(c, error);
        rows[i].name = c->name;
        kv_spec_canonical(&arguments->kv[i].spec, rows[i].canonical);
        values[COLUMN_BYTES] = (double)stats.payload_bytes / parts;
        values[COLUMN_RATIO] = (double)stats.payload_bytes / (double)stats.raw_bytes;
        values[COLUMN_SPEEDUP] =
            bench_median_ratio(contestants[0].seconds, c->seconds, repeats, scratch);
        for (size_t j = 0; j < repeats; j++)
            scratch[j] = (double)stats.payload_bytes / c->seconds[j] / (bandwidth[j] * 1e9);
        values[COLUMN_SHARE] = bench_summarise(scratch, repeats).median;
        for (size_t j = 0; j < repeats; j++)
            scratch[j] = c->seconds[j] / parts * 1e9;
        time = bench_summarise(scratch, repeats);
        values[COLUMN_TIME] = time.median;
        values[COLUMN_TIME_LOW] = time.low;
        values[COLUMN_TIME_HIGH] = time.high;
    }
    return true;
}

/* Tokens of the longest step: of those that fill the caches, or of one that decodes. */
static size_t longest_step(const struct bench_arguments *arguments)
{
    return arguments->batch > BENCH_FILL_TOKENS ? arguments->batch : BENCH_FILL_TOKENS;
}

static bool configure(const struct bench_arguments *arguments, const struct bench_kv *kv,
                      pkv_config *config, struct error *error)
{
    size_t most = longest_step(arguments);
    size_t tokens;

    if (__builtin_mul_overflow(arguments->tokens + 1, arguments->batch, &tokens))
        return error_set(error, "--batch %zu: too many sequences", arguments->batch);
    pages_configure(&kv->spec, &arguments->model, config);
    config->dtype = arguments->dtype;
    config->threads = arguments->threads;
    device_configure(arguments->device, config);
    config->max_tokens = tokens;
    config->max_sequences = arguments->batch;
    config->max_step_tokens = most < tokens ? most : tokens;
    return true;
}

static bool open_operands(const struct bench_arguments *arguments, struct operands *o,
                          struct error *error)
{
    const struct model *model = &arguments->model;
    const size_t count = arguments->batch * model->query_heads * model->head_dim;
    float *q = malloc(count * sizeof *q);
    uint64_t seed = 42;
    bool done = q != NULL || error_set(error, "out of memory");

    if (done)
        random_normals(&seed, q, count);
    done = done && bench_operand(arguments, q, count * sizeof *q, &o->q, error) &&
           bench_operand(arguments, NULL, count * sizeof *q, &o->out, error) &&
           bench_fill_operands(arguments, model, longest_step(arguments), &o->k, &o->v, error);
    free(q);
    return done;
}

bool bench_attention(const struct bench_arguments *arguments, struct error *error)
{
    size_t count = arguments->kv_count, repeats = arguments->repeats;
    struct contestant *contestants = calloc(count, sizeof *contestants);
    struct bench_row *rows = calloc(count, sizeof *rows);
    const struct bench_results results = {"kv", columns, COLUMNS, rows, count};
    pkv_config *configs = calloc(count, sizeof *configs);
    double *bandwidth = calloc(repeats, sizeof *bandwidth);
    double *scratch = calloc(repeats, sizeof *scratch);
    struct operands o = {.q = NULL};
    struct read_bandwidth *memory = NULL;
    bool done = false;

    if (contestants == NULL || rows == NULL || configs == NULL || bandwidth == NULL ||
        scratch == NULL) {
        error_set(error, "out of memory");
        goto out;
    }
    for (size_t i = 0; i < count; i++) {
        if (!configure(arguments, &arguments->kv[i], &configs[i], error))
            goto out;
    }
    if (arguments->device == NULL &&
        !bench_check_memory(configs, count, READ_BANDWIDTH_BYTES, error))
        goto out;
    if (!open_operands(arguments, &o, error))
        goto out;
    for (size_t i = 0; i < count; i++) {
        struct contestant *c = &contestants[i];

        c->name = arguments->kv[i].text;
        c->config = configs[i];
        c->items = calloc(arguments->batch, sizeof *c->items);
        c->seconds = calloc(repeats, sizeof *c->seconds);
        if (c->items == NULL || c->seconds == NULL) {
            error_set(error, "out of memory");
            goto out;
        }
        if (!fill(arguments, c, &o, error))
            goto out;
    }
    if ((arguments->device == NULL && !read_bandwidth_open(arguments->threads, &memory, error)) ||
        !measure(arguments, contestants, &o, memory, bandwidth, error) ||
        !evaluate(arguments, contestants, bandwidth, scratch, rows, error))
        goto out;
    progress_clear();
    done = bench_report(
        arguments,
        json_pack("{s:s, s:s, s:I, s:I, s:I, s:o}", "dtype", dtype_name(arguments->dtype), "shape",
                  arguments->shape, "tokens", (json_int_t)arguments->tokens, "batch",
                  (json_int_t)arguments->batch, "repeats", (json_int_t)repeats, "read_gb_per_s",
                  json_finite(bench_summarise(bandwidth, repeats).median)),
        &results, error);
out:
    for (size_t i = 0; contestants != NULL && i < count; i++) {
        if (contestants[i].graph != NULL)
            arguments->device->operations->free_graph(arguments->device, contestants[i].graph);
        pkv_cache_close(contestants[i].cache);
        free(contestants[i].items);
        free(contestants[i].seconds);
    }
    read_bandwidth_close(memory);
    free(contestants);
    free(rows);
    free(configs);
    free(bandwidth);
    free(scratch);
    bench_operand_free(arguments, o.q);
    bench_operand_free(arguments, o.out);
    bench_operand_free(arguments, o.k);
    bench_operand_free(arguments, o.v);
    return done;
}
