/* SPDX-License-Identifier: MIT */
/* puzzlekv-run: answers one prompt with a model whose KV cache PuzzleKV keeps. */
#define _GNU_SOURCE /* memmem */
#include <puzzlekv.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "kv_spec.h"
#include "options.h"
#include "runner/chat.h"
#include "runner/detokenizer.h"
#include "runner/file_map.h"
#include "runner/model.h"
#include "runner/sampler.h"
#include "runner/tokenizer.h"
#include "runner/transformer.h"

static const char program[] = "puzzlekv-run";

/* ---- The command line ------------------------------------------------------------------------ */

enum {
    OPTION_KV = OPTION_LONG_ONLY,
    OPTION_BACKEND,
    OPTION_DTYPE,
    OPTION_CTX,
    OPTION_EXACT,
    OPTION_TEMP,
    OPTION_TOP_K,
    OPTION_TOP_P,
    OPTION_MIN_P,
    OPTION_REPEAT_PENALTY,
    OPTION_SEED,
    OPTION_CHAT,
    OPTION_RAW_PROMPT,
    OPTION_SYSTEM,
    OPTION_STOP,
    OPTION_STATS,
    OPTION_JSON
};

static const struct option_row rows[] = {
    {'p', "prompt", "TEXT", "the prompt"},
    {'f', "file", "FILE", "read the prompt from FILE; - is standard input"},
    {'n', "predict", "N", "generate at most N tokens (256)"},
    {OPTION_KV, "kv", "SPEC", "what holds the KV cache (puzzle):\n" KV_SPEC_HELP},
    {OPTION_BACKEND, "backend", "NAME", "auto, cpu or cuda (auto)"},
    {'t', "threads", "N", "threads (one per core)"},
    {OPTION_DTYPE, "dtype", "TYPE", "storage type of the cache: bf16, f16 or f32 (bf16)"},
    {OPTION_CTX, "ctx", "N", "tokens that the cache has room for (what the prompt\nand -n need)"},
    {OPTION_EXACT, "exact", NULL, "keep activations in f32, as this version always does"},
    {OPTION_TEMP, "temp", "T", "temperature; 0 takes the likeliest token (0)"},
    {OPTION_TOP_K, "top-k", "N", "sample from the N likeliest tokens (0: all)"},
    {OPTION_TOP_P, "top-p", "P", "sample from the fewest tokens with share P (1)"},
    {OPTION_MIN_P, "min-p", "P", "drop tokens below P times the likeliest's share (0)"},
    {OPTION_REPEAT_PENALTY, "repeat-penalty", "X",
     "lower the logits of the last 64 tokens by X (1)"},
    {OPTION_SEED, "seed", "N", "seed of the sampler (42)"},
    {OPTION_CHAT, "chat", NULL,
     "put the prompt into the model's chat format\n(default if it has one)"},
    {OPTION_RAW_PROMPT, "raw-prompt", NULL, "take the prompt as it is"},
    {OPTION_SYSTEM, "system", "TEXT", "the system message of the chat"},
    {OPTION_STOP, "stop", "TEXT", "end before TEXT is generated; may be repeated"},
    {OPTION_STATS, "stats", NULL, "print statistics to standard error"},
    {OPTION_JSON, "json", NULL, "print one JSON document instead of the text"},
    OPTION_ROWS_COMMON,
};

static const struct option_table table = {
    "puzzlekv-run MODEL (-p TEXT | -f FILE) [OPTION]...",
    "Answers a prompt with MODEL, a GGUF file or a Hugging Face folder.", rows,
    sizeof rows / sizeof *rows};

enum prompt_format { FORMAT_OF_MODEL, FORMAT_CHAT, FORMAT_RAW };

struct arguments {
    const char *model;
    const char *prompt, *file; /* exactly one of them */
    size_t predict;
    const char *kv; /* as typed */
    struct kv_spec spec;
    bool cuda;
    unsigned threads;
    pkv_dtype dtype;
    size_t ctx; /* 0: what the prompt and -n need */
    struct sampler_options sampling;
    enum prompt_format format;
    const char *system;
    const char **stops; /* [stop_count], allocated */
    size_t stop_count;
    bool stats, json, help, version;
};

static bool set_option(struct arguments *a, int id, const char *value, struct error *error)
{
    double real;

    switch (id) {
    case 'p':
        a->prompt = value;
        return true;
    case 'f':
        a->file = value;
        return true;
    case 'n':
        return number_size("--predict", value, 1, INT32_MAX, &a->predict, error);
    case OPTION_KV:
        if (a->kv != NULL)
            return error_set(error, "--kv: given twice; one run has one cache");
        a->kv = value;
        return true;
    case OPTION_BACKEND:
        a->cuda = strcmp(value, "cuda") == 0;
        if (!a->cuda && strcmp(value, "cpu") != 0 && strcmp(value, "auto") != 0)
            return error_set(error, "--backend: \"%.40s\" is not one of auto, cpu, cuda", value);
        return true;
    case 't':
        return option_threads(value, &a->threads, error);
    case OPTION_DTYPE:
        return option_dtype(value, &a->dtype, error);
    case OPTION_CTX:
        return number_size("--ctx", value, 1, INT32_MAX, &a->ctx, error);
    case OPTION_EXACT:
        return true;
    case OPTION_TEMP:
        if (!number_real("--temp", value, 0, 1000, &real, error))
            return false;
        a->sampling.temperature = (float)real;
        return true;
    case OPTION_TOP_K:
        return number_size("--top-k", value, 0, INT32_MAX, &a->sampling.top_k, error);
    case OPTION_TOP_P:
        if (!number_real("--top-p", value, 1e-6, 1, &real, error))
            return false;
        a->sampling.top_p = (float)real;
        return true;
    case OPTION_MIN_P:
        if (!number_real("--min-p", value, 0, 0.999, &real, error))
            return false;
        a->sampling.min_p = (float)real;
        return true;
    case OPTION_REPEAT_PENALTY:
        if (!number_real("--repeat-penalty", value, 0.001, 1000, &real, error))
            return false;
        a->sampling.repeat_penalty = (float)real;
        return true;
    case OPTION_SEED: {
        size_t seed;

        if (!number_size("--seed", value, 0, SIZE_MAX, &seed, error))
            return false;
        a->sampling.seed = seed;
        return true;
    }
    case OPTION_CHAT:
    case OPTION_RAW_PROMPT: {
        enum prompt_format format = id == OPTION_CHAT ? FORMAT_CHAT : FORMAT_RAW;

        if (a->format != FORMAT_OF_MODEL && a->format != format)
            return error_set(error, "--chat, --raw-prompt: give one or the other");
        a->format = format;
        return true;
    }
    case OPTION_SYSTEM:
        a->system = value;
        return true;
    case OPTION_STOP:
        if (*value == '\0')
            return error_set(error, "--stop: the text is empty");
        a->stops[a->stop_count++] = value;
        return true;
    case OPTION_STATS:
        a->stats = true;
        return true;
    case OPTION_JSON:
        a->json = true;
        return true;
    case OPTION_HELP:
        a->help = true;
        return true;
    case OPTION_VERSION:
        a->version = true;
        return true;
    }
    return false;
}

/* Everything that the command line alone can show to be wrong fails here. */
static bool read_arguments(int argc, char **argv, struct arguments *a, struct error *error)
{
    const char *value;
    int id;

    *a = (struct arguments){
        .predict = 256,
        .threads = machine_threads(),
        .dtype = PKV_BF16,
        .sampling = {
            .temperature = 0, .top_p = 1, .repeat_penalty = 1, .repeat_last = 64, .seed = 42}};
    a->stops = calloc((size_t)argc, sizeof *a->stops);
    if (a->stops == NULL)
        return error_set(error, "out of memory");
    for (;;) {
        if (!options_next(&table, argc, argv, &id, &value, error))
            return false;
        if (id == OPTION_END)
            break;
        if (!set_option(a, id, value, error))
            return false;
        if (a->help || a->version)
            return true;
    }
    if (!options_operand(argc, argv, "MODEL", &a->model, error))
        return false;
    if ((a->prompt == NULL) == (a->file == NULL))
        return error_set(error, a->prompt ? "-p, -f: give one or the other"
                                          : "-p TEXT or -f FILE: the prompt is missing");
    if (a->prompt != NULL && *a->prompt == '\0')
        return error_set(error, "-p: the prompt is empty");
    if (a->system != NULL && a->format == FORMAT_RAW)
        return error_set(error, "--system: a raw prompt has no system message");
    if (a->prompt != NULL && !text_check_utf8("-p", a->prompt, strlen(a->prompt), error))
        return false;
    if (a->system != NULL && !text_check_utf8("--system", a->system, strlen(a->system), error))
        return false;
    for (size_t i = 0; i < a->stop_count; i++) {
        if (!text_check_utf8("--stop", a->stops[i], strlen(a->stops[i]), error))
            return false;
    }
    if (a->kv == NULL)
        a->kv = "puzzle";
    return kv_spec_parse(a->kv, &a->spec, error);
}

/* ---- The answer as text ---------------------------------------------------------------------- */

struct answer {
    char *text; /* without the stop text that ended it */
    size_t size, capacity;
    size_t printed; /* bytes that are on standard output already */
};

/* How many bytes at the end may be the beginning of a stop text, and so must wait. */
static size_t held_back(const struct answer *answer, const struct arguments *a)
{
    size_t held = 0;

    for (size_t i = 0; i < a->stop_count; i++) {
        size_t length = strlen(a->stops[i]) - 1;

        if (length > answer->size)
            length = answer->size;
        while (length > held &&
               memcmp(answer->text + answer->size - length, a->stops[i], length) != 0)
            length--;
        if (length > held)
            held = length;
    }
    return held;
}

static bool print_answer(struct answer *answer, size_t size, struct error *error)
{
    if (size <= answer->printed)
        return true;
    fwrite(answer->text + answer->printed, 1, size - answer->printed, stdout);
    answer->printed = size;
    return output_flush(error);
}

/* Appends a piece of whole characters and prints what cannot be part of a stop text; *stopped tells
 * whether a stop text is there now, and the answer ends before it. */
static bool extend_answer(struct answer *answer, const char *piece, size_t length,
                          const struct arguments *a, bool *stopped, struct error *error)
{
    size_t old = answer->size;
    const char *first = NULL;

    *stopped = false;
    if (length == 0)
        return true;
    if (answer->capacity - answer->size < length) {
        size_t capacity = 2 * (answer->size + length);
        char *text = realloc(answer->text, capacity);

        if (text == NULL)
            return error_set(error, "out of memory for the answer");
        answer->text = text;
        answer->capacity = capacity;
    }
    memcpy(answer->text + answer->size, piece, length);
    answer->size += length;
    for (size_t i = 0; i < a->stop_count; i++) {
        size_t stop_length = strlen(a->stops[i]);
        size_t from = old >= stop_length ? old - stop_length + 1 : 0;
        const char *found =
            memmem(answer->text + from, answer->size - from, a->stops[i], stop_length);

        if (found != NULL && (first == NULL || found < first))
            first = found;
    }
    if (first != NULL) {
        answer->size = (size_t)(first - answer->text);
        *stopped = true;
    }
    return a->json ||
           print_answer(answer, *stopped ? answer->size : answer->size - held_back(answer, a),
                        error);
}

/* ---- A run ----------------------------------------------------------------------------------- */

enum finish { FINISH_NOT, FINISH_STOP, FINISH_LENGTH, FINISH_FULL, FINISH_INTERRUPTED };

/* For the JSON document, and in words. */
static const char *const finish_names[] = {"", "stop", "length", "length", "interrupted"};
static const char *const finish_words[] = {"", "the model or a stop text ended the answer",
                                           "as many tokens as asked for",
                                           "no more room in the context", "interrupted"};

struct run {
    const struct arguments *arguments;
    struct kv_spec spec; /* with the ranks for this model */
    struct model *model;
    struct tokenizer *tokenizer;
    struct detokenizer detokenizer;
    struct transformer *transformer;
    struct sampler *sampler;
    pkv_cache *cache;
    pkv_seq *seq;

    struct text prompt;
    struct token_list tokens; /* the prompt, then what was generated */
    size_t prompt_tokens;
    size_t context; /* tokens that the cache has room for */
    float *logits;
    struct answer answer;
    enum finish finish;
    /* Moments: the tokenised prompt is there, it is in the cache, the first and the last token are
     * chosen. 0: never came. */
    double began, prefilled, first, last;
};

static size_t generated(const struct run *run)
{
    return run->tokens.count - run->prompt_tokens;
}

static bool layer_done(void *opaque, size_t done, size_t layers)
{
    const struct run *run = opaque;

    if (run->prefilled == 0)
        progress_show("prompt: %zu tokens, layer %zu of %zu", run->prompt_tokens, done, layers);
    return !interrupt_seen();
}

/* Appends the ids of the prompt in the format asked for. */
static bool encode_prompt(struct run *run, struct error *error)
{
    const struct arguments *a = run->arguments;
    const struct chat_turn turn = {CHAT_USER, run->prompt.data, run->prompt.size};
    struct token_list *tokens = &run->tokens;
    struct chat *chat;
    enum chat_kind kind;
    bool done;

    if (!chat_open(run->tokenizer, NULL, &chat, error))
        return false;
    kind = chat_kind(chat);
    if (a->format != FORMAT_RAW && kind != CHAT_NONE && kind != CHAT_UNKNOWN) {
        done = chat_format(chat, a->system, &turn, 1, CHAT_ANSWER_BEGINS, tokens, error);
    } else if (a->format == FORMAT_CHAT || a->system != NULL) {
        done = error_set(error, "%s: %s, which %s needs", a->model,
                         kind == CHAT_NONE ? "has no chat template"
                                           : "its chat template is not of a format that is known",
                         a->format == FORMAT_CHAT ? "--chat" : "--system");
    } else {
        if (a->format == FORMAT_OF_MODEL && kind == CHAT_UNKNOWN)
            fprintf(stderr,
                    "%s: %s: warning: its chat template is not of a format that is known; the "
                    "prompt is taken as it is\n",
                    program, a->model);
        done = (!tokenizer_wants_bos(run->tokenizer) ||
                token_list_append(tokens, tokenizer_bos(run->tokenizer), error)) &&
               tokenizer_encode(run->tokenizer, run->prompt.data, run->prompt.size, true, tokens,
                                error);
        /* What is generated goes on from the prompt. */
        detokenizer_continue(&run->detokenizer);
    }
    chat_close(chat);
    run->prompt_tokens = tokens->count;
    if (done && run->prompt_tokens == 0)
        return error_set(error, "prompt: the vocabulary has no token for any of it");
    return done;
}

/* Reads the text before the model, so that a wrong file name does not cost a model's loading. */
static bool read_prompt(struct run *run, struct error *error)
{
    const struct arguments *a = run->arguments;

    if (a->file == NULL) {
        run->prompt = (struct text){"-p", strdup(a->prompt), strlen(a->prompt)};
        return run->prompt.data != NULL || error_set(error, "out of memory for the prompt");
    }
    if (!text_read(a->file, &run->prompt, error) ||
        !text_check_utf8(run->prompt.name, run->prompt.data, run->prompt.size, error))
        return false;
    return run->prompt.size > 0 || error_set(error, "%s: the prompt is empty", run->prompt.name);
}

static bool open_cache(struct run *run, struct error *error)
{
    const struct arguments *a = run->arguments;
    size_t most = run->model->context_length;
    char message[PKV_MESSAGE_BYTES];
    pkv_config config;

    if (a->ctx > most)
        return error_set(error, "--ctx %zu: the model's context is %zu tokens", a->ctx, most);
    if (a->ctx > 0 && run->prompt_tokens > a->ctx)
        return error_set(error, "prompt: its %zu tokens are more than --ctx %zu",
                         run->prompt_tokens, a->ctx);
    if (run->prompt_tokens > most)
        return error_set(error, "prompt: its %zu tokens are more than the model's context of %zu",
                         run->prompt_tokens, most);
    /* The last token that is generated is never fed. */
    run->context = a->ctx > 0 ? a->ctx : run->prompt_tokens + a->predict - 1;
    if (run->context > most)
        run->context = most;

    pkv_config_init(&config);
    transformer_describe(run->model, &config);
    if (!kv_spec_apply(&run->spec, &config, error))
        return false;
    config.dtype = a->dtype;
    config.max_tokens = run->context;
    config.max_step_tokens = run->prompt_tokens;
    config.threads = a->threads;
    if (pkv_cache_open(&config, &run->cache, message) != PKV_OK)
        return error_set(error, "the cache: %s", message);
    if (pkv_seq_open(run->cache, &run->seq) != PKV_OK)
        return error_set(error, "the cache: %s", pkv_cache_message(run->cache));
    return true;
}

static bool open_run(struct run *run, struct error *error)
{
    const struct arguments *a = run->arguments;
    struct transformer_options options = {
        .threads = a->threads, .layer_done = layer_done, .opaque = run};

    if (a->cuda)
        return error_set(error, "--backend cuda: this build has no CUDA backend; it has: cpu");
    if (!read_prompt(run, error) || !model_open(a->model, &run->model, error) ||
        !tokenizer_open(a->model, &run->tokenizer, error) ||
        !detokenizer_open(&run->detokenizer, run->tokenizer, false, error) ||
        !encode_prompt(run, error) ||
        !model_check_ids(run->model, a->model, run->tokens.ids, run->tokens.count, error) ||
        !open_cache(run, error))
        return false;
    options.isa = pkv_cache_isa(run->cache);
    if (!transformer_open(run->model, &options, &run->transformer, error) ||
        !sampler_open(&a->sampling, run->model->vocabulary, &run->sampler, error))
        return false;
    run->logits = calloc(run->model->vocabulary, sizeof *run->logits);
    if (run->logits == NULL)
        return error_set(error, "out of memory for the logits");
    return true;
}

static void close_run(struct run *run)
{
    free(run->answer.text);
    free(run->logits);
    token_list_free(&run->tokens);
    free(run->prompt.data);
    sampler_close(run->sampler);
    transformer_close(run->transformer);
    pkv_cache_close(run->cache);
    detokenizer_close(&run->detokenizer);
    tokenizer_close(run->tokenizer);
    model_close(run->model);
}

static bool is_end(const struct run *run, int32_t token)
{
    for (size_t i = 0; i < run->model->end_token_count; i++) {
        if (run->model->end_tokens[i] == token)
            return true;
    }
    return tokenizer_is_end(run->tokenizer, token);
}

/* Chooses tokens and feeds them until run->finish says why no more. */
static bool generate(struct run *run, struct error *error)
{
    const struct arguments *a = run->arguments;
    const char *piece;
    size_t length;
    bool stopped;

    run->began = machine_seconds();
    while (run->finish == FINISH_NOT) {
        size_t fed = pkv_seq_tokens(run->seq);
        int32_t token;

        if (!transformer_step(run->transformer, run->cache, run->seq, run->tokens.ids + fed,
                              run->tokens.count - fed, run->logits, error)) {
            progress_clear();
            if (!interrupt_seen())
                return false;
            run->finish = FINISH_INTERRUPTED;
            break;
        }
        if (run->prefilled == 0) {
            run->prefilled = machine_seconds();
            progress_clear();
        }
        if (!sampler_choose(run->sampler, run->logits, run->tokens.ids, run->tokens.count, &token,
                            error) ||
            !token_list_append(&run->tokens, token, error))
            return false;
        run->last = machine_seconds();
        if (a->json)
            progress_show("answer: %zu tokens", generated(run));
        if (run->first == 0)
            run->first = run->last;

        if (is_end(run, token)) {
            run->finish = FINISH_STOP;
            break;
        }
        piece = detokenizer_push(&run->detokenizer, token, &length);
        if (!extend_answer(&run->answer, piece, length, a, &stopped, error))
            return false;
        if (stopped)
            run->finish = FINISH_STOP;
        else if (generated(run) == a->predict)
            run->finish = FINISH_LENGTH;
        else if (pkv_seq_tokens(run->seq) == run->context)
            run->finish = FINISH_FULL;
    }

    progress_clear();
    piece = detokenizer_flush(&run->detokenizer, &length);
    if (!extend_answer(&run->answer, piece, length, a, &stopped, error))
        return false;
    if (!a->json) {
        if (!print_answer(&run->answer, run->answer.size, error))
            return false;
        if (run->answer.size > 0 && run->answer.text[run->answer.size - 1] != '\n')
            putchar('\n');
    }
    return output_flush(error);
}

/* ---- Results --------------------------------------------------------------------------------- */

struct results {
    pkv_stats stats;
    double ttft, tpot, prefill_rate, decode_rate; /* NAN: there is none */
    double ratio;
};

static bool read_results(const struct run *run, struct results *r, struct error *error)
{
    size_t count = generated(run);

    r->stats = (pkv_stats){.struct_size = sizeof r->stats};
    if (pkv_cache_stats(run->cache, &r->stats) != PKV_OK)
        return error_set(error, "the cache: %s", pkv_cache_message(run->cache));
    r->ttft = count > 0 ? run->first - run->began : NAN;
    r->tpot = count > 1 ? (run->last - run->first) / (double)(count - 1) : NAN;
    r->prefill_rate =
        run->prefilled > 0 ? (double)run->prompt_tokens / (run->prefilled - run->began) : NAN;
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

static void print_stats(const struct run *run, const struct results *r)
{
    char canonical[KV_SPEC_TEXT_BYTES];
    const char *separator = "";

    kv_spec_canonical(&run->spec, canonical);
    fprintf(stderr, "  %-20s %s\n", "KV cache", canonical);
    fprintf(stderr, "  %-20s %zu\n", "prompt tokens", run->prompt_tokens);
    fprintf(stderr, "  %-20s %zu\n", "generated tokens", generated(run));
    fprintf(stderr, "  %-20s %s\n", "end", finish_words[run->finish]);
    print_measure("TTFT", r->ttft, 3, " s");
    print_measure("TPOT", 1000 * r->tpot, 2, " ms");
    print_measure("prefill", r->prefill_rate, 1, " tokens/s");
    print_measure("decode", r->decode_rate, 1, " tokens/s");
    fprintf(stderr, "  %-20s %zu\n", "KV bytes raw", r->stats.raw_bytes);
    fprintf(stderr, "  %-20s %zu\n", "KV bytes stored", r->stats.payload_bytes);
    fprintf(stderr, "  %-20s %zu\n", "KV bytes reserved", r->stats.reserved_bytes);
    print_measure("ratio", r->ratio, 4, "");
    print_measure("factorize time", r->stats.factorize_seconds, 3, " s");
    fprintf(stderr, "  %-20s ", "pages");
    for (int state = PKV_PAGE_FILLING; state < PKV_PAGE_STATES; state++) {
        fprintf(stderr, "%s%zu %s", separator, r->stats.pages[state], pkv_page_state_name(state));
        separator = ", ";
    }
    fputc('\n', stderr);
}

static json_t *rank_or_null(const struct run *run, size_t rank)
{
    return run->spec.policy == KV_PUZZLE ? json_integer((json_int_t)rank) : json_null();
}

static json_t *results_document(const struct run *run, const struct results *r)
{
    const struct arguments *a = run->arguments;
    json_t *ids = json_array();
    char canonical[KV_SPEC_TEXT_BYTES];
    struct rusage usage;

    kv_spec_canonical(&run->spec, canonical);
    getrusage(RUSAGE_SELF, &usage);
    for (size_t i = run->prompt_tokens; i < run->tokens.count; i++) {
        if (json_array_append_new(ids, json_integer(run->tokens.ids[i])) != 0) {
            json_decref(ids);
            ids = NULL;
        }
    }
    return json_pack(
        "{s:o, s:s, s:s, s:i, s:s, s:s, s:I, s:o, s:o, s:I, s:I, s:o, s:o, s:s, s:o, s:o, s:o, "
        "s:o, s:I, s:I, s:o, s:I, s:I, s:o, s:I}",
        "model", json_bytes(a->model, strlen(a->model)), "backend", "cpu", "isa",
        pkv_cache_isa(run->cache), "threads", (int)a->threads, "kv", a->kv, "kv_canonical",
        canonical, "page_tokens", (json_int_t)run->spec.page_tokens, "rank_k",
        rank_or_null(run, run->spec.rank_k), "rank_v", rank_or_null(run, run->spec.rank_v),
        "prompt_tokens", (json_int_t)run->prompt_tokens, "generated_tokens",
        (json_int_t)generated(run), "text", json_bytes(run->answer.text, run->answer.size),
        "token_ids", ids, "finish_reason", finish_names[run->finish], "ttft_s",
        json_finite(r->ttft), "tpot_s", json_finite(r->tpot), "prefill_tokens_per_s",
        json_finite(r->prefill_rate), "decode_tokens_per_s", json_finite(r->decode_rate),
        "kv_bytes", (json_int_t)r->stats.payload_bytes, "kv_bytes_raw",
        (json_int_t)r->stats.raw_bytes, "kv_ratio", json_finite(r->ratio), "kv_reserved_bytes",
        (json_int_t)r->stats.reserved_bytes, "kv_peak_bytes",
        (json_int_t)(r->stats.reserved_bytes + r->stats.transient_peak_bytes), "factorize_s",
        json_finite(r->stats.factorize_seconds), "peak_rss_bytes",
        (json_int_t)usage.ru_maxrss * 1024);
}

int main(int argc, char **argv)
{
    struct arguments arguments;
    struct run run = {.arguments = &arguments};
    struct results results;
    struct error error;
    int code = EXIT_FAILED;

    machine_calm_threads(argv);
    machine_start_blas(program);
    if (!read_arguments(argc, argv, &arguments, &error)) {
        error_print(program, &error);
        code = EXIT_USAGE;
        goto out;
    }
    if (arguments.help) {
        if (options_help(&table, &error))
            code = EXIT_DONE;
        else
            error_print(program, &error);
        goto out;
    }
    if (arguments.version) {
        if (options_version(program, &error))
            code = EXIT_DONE;
        else
            error_print(program, &error);
        goto out;
    }

    interrupt_catch();
    file_map_guard(program);
    run.spec = arguments.spec;
    if (!open_run(&run, &error) || !generate(&run, &error) ||
        !read_results(&run, &results, &error)) {
        error_print(program, &error);
        if (interrupt_seen())
            code = EXIT_INTERRUPTED;
        goto out;
    }
    code = run.finish == FINISH_INTERRUPTED ? EXIT_INTERRUPTED : EXIT_DONE;
    if (run.finish == FINISH_FULL && !arguments.json)
        fprintf(stderr, "%s: the answer ends early: the context of %zu tokens is full\n", program,
                run.context);
    if (code == EXIT_INTERRUPTED && run.prefilled == 0)
        fprintf(stderr, "%s: interrupted while reading the prompt\n", program);
    else if (arguments.stats || (code == EXIT_INTERRUPTED && !arguments.json))
        print_stats(&run, &results);
    if (arguments.json && !json_print(results_document(&run, &results), &error)) {
        error_print(program, &error);
        code = EXIT_FAILED;
    }
out:
    close_run(&run);
    free(arguments.stops);
    return code;
}
