/* SPDX-License-Identifier: MIT */
/* puzzlekv-run: the last answer and the cache in numbers, and the JSON document. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "run.h"

/* For the JSON document, and in words. */
static const char *const finish_names[] = {"", "stop", "stop", "length", "length", "interrupted"};
static const char *const finish_words[] = {"-",
                                           "the model ended the answer",
                                           "a stop text ended the answer",
                                           "as many tokens as asked for",
                                           "no more room in the context",
                                           "interrupted"};

struct results {
    struct kv_stats stats;
    const char *isa;
    double ttft, tpot, prefill_rate, decode_rate; /* NAN: there is none */
    double ratio;
};

static bool read_results(const struct run *run, struct results *r, struct error *error)
{
    const struct generation *g = &run->generator.generation;
    size_t count = g->generated_tokens;

    if (!kv_store_stats(run->generator.store, &r->stats, error) ||
        !device_isa(run->device, &r->isa, error))
        return false;
    r->ttft = count > 0 ? g->first - g->began : NAN;
    r->tpot = count > 1 ? (g->last - g->first) / (double)(count - 1) : NAN;
    r->prefill_rate = g->prefilled > 0 ? (double)g->prompt_tokens / (g->prefilled - g->began) : NAN;
    r->decode_rate = 1 / r->tpot;
    r->ratio = (double)r->stats.payload_bytes / (double)r->stats.raw_bytes;
    return true;
}

static void print_measure(const char *name, double value, int digits, const char *unit)
{
    if (isfinite(value))
        fprintf(stderr, "  %-20s %.*f%s\n", name, digits, value, unit);
    else
        fprintf(stderr, "  %-20s -\n", name);
}

static void print_pages(const struct kv_stats *stats)
{
    const char *separator = "";

    fprintf(stderr, "  %-20s ", "pages");
    for (int state = PKV_PAGE_FILLING; state < PKV_PAGE_STATES; state++) {
        fprintf(stderr, "%s%zu %s", separator, stats->pages[state], pkv_page_state_name(state));
        separator = ", ";
    }
    fputc('\n', stderr);
}

bool run_print_stats(const struct run *run, struct error *error)
{
    const struct generation *g = &run->generator.generation;
    char canonical[KV_SPEC_TEXT_BYTES];
    struct results r;

    if (!read_results(run, &r, error))
        return false;
    kv_spec_canonical(&run->spec, canonical);
    fprintf(stderr, "  %-20s %s, %s\n", "backend", device_name(run->device), r.isa);
    fprintf(stderr, "  %-20s %s\n", "KV cache", canonical);
    fprintf(stderr, "  %-20s %zu\n", "prompt tokens", g->prompt_tokens + run->reused_tokens);
    if (run->arguments->session != NULL)
        fprintf(stderr, "  %-20s %zu\n", "reused tokens", run->reused_tokens);
    fprintf(stderr, "  %-20s %zu\n", "generated tokens", g->generated_tokens);
    fprintf(stderr, "  %-20s %s\n", "end", finish_words[g->finish]);
    print_measure("TTFT", r.ttft, 3, " s");
    print_measure("TPOT", 1000 * r.tpot, 2, " ms");
    print_measure("prefill", r.prefill_rate, 1, " tokens/s");
    print_measure("decode", r.decode_rate, 1, " tokens/s");
    fprintf(stderr, "  %-20s %zu of %zu\n", "cached tokens", r.stats.tokens,
            run->generator.context);
    fprintf(stderr, "  %-20s %zu\n", "KV bytes raw", r.stats.raw_bytes);
    fprintf(stderr, "  %-20s %zu\n", "KV bytes stored", r.stats.payload_bytes);
    fprintf(stderr, "  %-20s %zu\n", "KV bytes reserved", r.stats.reserved_bytes);
    print_measure("ratio", r.ratio, 4, "");
    print_measure("factorize time", r.stats.factorize_seconds, 3, " s");
    if (r.stats.has_pages)
        print_pages(&r.stats);
    return true;
}

static json_t *value_or_null(const struct run *run, const char *key)
{
    const struct kv_value *value = kv_spec_find(&run->spec, key);

    return value != NULL ? json_integer((json_int_t)value->number) : json_null();
}

bool run_print_document(const struct run *run, struct error *error)
{
    const struct run_arguments *a = run->arguments;
    const struct generator *generator = &run->generator;
    const struct generation *g = &generator->generation;
    const struct token_list *tokens = &generator->tokens;
    char canonical[KV_SPEC_TEXT_BYTES];
    json_t *ids = json_array();
    struct rusage usage;
    struct results r;

    if (!read_results(run, &r, error))
        return false;
    kv_spec_canonical(&run->spec, canonical);
    getrusage(RUSAGE_SELF, &usage);
    for (size_t i = tokens->count - g->generated_tokens; i < tokens->count; i++) {
        if (json_array_append_new(ids, json_integer(tokens->ids[i])) != 0) {
            json_decref(ids);
            ids = NULL;
        }
    }
    return json_print(
        json_pack("{s:o, s:s, s:s, s:i, s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:I, s:o, s:o, s:s, "
                  "s:o, s:o, s:o, "
                  "s:o, s:I, s:I, s:o, s:I, s:I, s:o, s:I}",
                  "model", json_text(a->model), "backend", device_name(run->device), "isa", r.isa,
                  "threads", (int)a->threads, "kv", json_text(a->kv), "kv_canonical",
                  json_text(canonical), "page_tokens", value_or_null(run, "page"), "rank_k",
                  value_or_null(run, "rk"), "rank_v", value_or_null(run, "rv"), "prompt_tokens",
                  (json_int_t)(g->prompt_tokens + run->reused_tokens), "reused_tokens",
                  (json_int_t)run->reused_tokens, "generated_tokens",
                  (json_int_t)g->generated_tokens, "text",
                  json_bytes(generator->answer.text, generator->answer.size), "token_ids", ids,
                  "finish_reason", finish_names[g->finish], "ttft_s", json_finite(r.ttft), "tpot_s",
                  json_finite(r.tpot), "prefill_tokens_per_s", json_finite(r.prefill_rate),
                  "decode_tokens_per_s", json_finite(r.decode_rate), "kv_bytes",
                  (json_int_t)r.stats.payload_bytes, "kv_bytes_raw", (json_int_t)r.stats.raw_bytes,
                  "kv_ratio", json_finite(r.ratio), "kv_reserved_bytes",
                  (json_int_t)r.stats.reserved_bytes, "kv_peak_bytes",
                  (json_int_t)(r.stats.reserved_bytes + r.stats.transient_peak_bytes),
                  "factorize_s", json_finite(r.stats.factorize_seconds), "peak_rss_bytes",
                  (json_int_t)usage.ru_maxrss * 1024),
        error);
}
