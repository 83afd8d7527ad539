/* SPDX-License-Identifier: MIT */
/* puzzlekv-run: answers prompts with a model whose KV cache PuzzleKV keeps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policies/pages.h"
#include "run.h"
#include "runner/file_map.h"

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
    OPTION_SESSION,
    OPTION_STATS,
    OPTION_JSON
};

static const struct option_row rows[] = {
    {'p', "prompt", "TEXT", "the prompt"},
    {'f', "file", "FILE", "read the prompt from FILE; - is standard input"},
    {'i', "interactive", NULL, "chat on standard input; -p or -f is then the first\nmessage"},
    {'n', "predict", "N", "generate at most N tokens (256; with -i as many as\nthere is room for)"},
    {OPTION_KV, "kv", "SPEC", "what holds the KV cache (puzzle); see below"},
    {OPTION_BACKEND, "backend", "NAME",
     "where model and cache are: auto, cpu or cuda; auto is\nCUDA if there is a device that can "
     "have them (auto)"},
    {'t', "threads", "N", "threads (one per core)"},
    {OPTION_DTYPE, "dtype", "TYPE", "storage type of the cache: bf16, f16 or f32 (bf16)"},
    {OPTION_CTX, "ctx", "N",
     "tokens that the cache has room for (what the prompt\nand -n need; with -i the model's "
     "context)"},
    {OPTION_EXACT, "exact", NULL,
     "keep activations in f32 instead of rounding them to\nbytes where they meet quantised "
     "weights"},
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
    {OPTION_SESSION, "session", "FILE",
     "keep tokens and cache in FILE, and begin with what\nthe prompt has in common with it"},
    {OPTION_STATS, "stats", NULL, "print statistics to standard error"},
    {OPTION_JSON, "json", NULL, "print one JSON document instead of the text"},
    OPTION_ROWS_COMMON,
};

static const struct option_table table = {
    "puzzlekv-run MODEL (-p TEXT | -f FILE | -i) [OPTION]...",
    "Answers a prompt, or chats, with MODEL, a GGUF file or a Hugging Face folder.", rows,
    sizeof rows / sizeof *rows};

static bool set_option(struct run_arguments *a, int id, const char *value, struct error *error)
{
    double real;

    switch (id) {
    case 'p':
        a->prompt = value;
        return true;
    case 'f':
        a->file = value;
        return true;
    case 'i':
        a->interactive = true;
        return true;
    case 'n':
        return number_size("--predict", value, 1, INT32_MAX, &a->predict, error);
    case OPTION_KV:
        if (a->kv != NULL)
            return error_set(error, "--kv: given twice; one run has one cache");
        a->kv = value;
        return true;
    case OPTION_BACKEND:
        return device_parse(value, &a->backend, error);
    case 't':
        return option_threads(value, &a->threads, error);
    case OPTION_DTYPE:
        return option_dtype(value, &a->dtype, error);
    case OPTION_CTX:
        return number_size("--ctx", value, 1, INT32_MAX, &a->ctx, error);
    case OPTION_EXACT:
        a->exact = true;
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
    case OPTION_SESSION:
        if (*value == '\0')
            return error_set(error, "--session: the name is empty");
        a->session = value;
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
static bool read_arguments(int argc, char **argv, struct run_arguments *a, struct error *error)
{
    const char *value;
    int id;

    *a = (struct run_arguments){
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
    if (!options_operands(argc, argv, (const char *const[]){"MODEL"}, 1, &a->model, error))
        return false;
    if (a->prompt != NULL && a->file != NULL)
        return error_set(error, "-p, -f: give one or the other");
    if (a->prompt == NULL && a->file == NULL && !a->interactive)
        return error_set(error, "-p TEXT, -f FILE or -i: the prompt is missing");
    if (a->interactive && a->json)
        return error_set(error, "-i, --json: a chat is not one JSON document");
    if (a->interactive && a->file != NULL && strcmp(a->file, "-") == 0)
        return error_set(error, "-i, -f -: both would read standard input");
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
    if (a->predict == 0)
        a->predict = a->interactive ? SIZE_MAX : 256;
    if (!kv_spec_parse(a->kv, &a->spec, error))
        return false;
    if (a->backend == DEVICE_CUDA && !pages_require(&a->spec, "--backend cuda", a->kv, error))
        return false;
    return a->session == NULL || pages_require(&a->spec, "--session", a->kv, error);
}

/* ---- A run ----------------------------------------------------------------------------------- */

/* Reads the text before the model, so that a wrong file name does not cost a model's loading. */
static bool read_prompt(struct run *run, struct error *error)
{
    const struct run_arguments *a = run->arguments;

    if (a->prompt != NULL) {
        run->prompt = (struct text){"-p", strdup(a->prompt), strlen(a->prompt)};
        return run->prompt.data != NULL || error_set(error, "out of memory for the prompt");
    }
    if (a->file == NULL)
        return true;
    if (!text_read(a->file, &run->prompt, error) ||
        !text_check_utf8(run->prompt.name, run->prompt.data, run->prompt.size, error))
        return false;
    return run->prompt.size > 0 || error_set(error, "%s: the prompt is empty", run->prompt.name);
}

/* In the format asked for. */
static bool open_conversation(struct run *run, struct error *error)
{
    const struct run_arguments *a = run->arguments;
    bool known;
    enum chat_kind kind;

    if (!chat_open(run->tokenizer, NULL, &run->chat, error))
        return false;
    kind = chat_kind(run->chat);
    known = kind != CHAT_NONE && kind != CHAT_UNKNOWN;
    if (!known && (a->format == FORMAT_CHAT || a->system != NULL))
        return error_set(error, "%s: %s, which %s needs", a->model,
                         kind == CHAT_NONE ? "has no chat template"
                                           : "its chat template is not of a format that is known",
                         a->format == FORMAT_CHAT ? "--chat" : "--system");
    if (a->format == FORMAT_OF_MODEL && kind == CHAT_UNKNOWN)
        warning_print(RUN_PROGRAM, a->model,
                      "its chat template is not of a format that is known; the prompt is taken as "
                      "it is");
    if (a->format == FORMAT_OF_MODEL && kind == CHAT_NONE && a->interactive)
        warning_print(RUN_PROGRAM, a->model,
                      "it has no chat template; it continues the text that it is given");
    run->raw = !known || a->format == FORMAT_RAW;
    return conversation_open(run->tokenizer, run->raw ? NULL : run->chat, a->system,
                             &run->conversation, error);
}

/* The tokens that the cache is to have room for; `prompt` is the first prompt's. */
static bool choose_context(const struct run *run, size_t prompt, size_t *context,
                           struct error *error)
{
    const struct run_arguments *a = run->arguments;
    size_t most = run->model->context_length;

    if (a->ctx > most)
        return error_set(error, "--ctx %zu: the model's context is %zu tokens", a->ctx, most);
    if (a->ctx > 0 && prompt > a->ctx)
        return error_set(error, "prompt: its %zu tokens are more than --ctx %zu", prompt, a->ctx);
    if (prompt > most)
        return error_set(error, "prompt: its %zu tokens are more than the model's context of %zu",
                         prompt, most);
    if (a->ctx > 0)
        *context = a->ctx;
    /* The last token that is generated is never fed. */
    else if (a->interactive || a->predict - 1 > most - prompt)
        *context = most;
    else
        *context = prompt + a->predict - 1;
    return true;
}

static bool open_generator(struct run *run, size_t prompt, struct error *error)
{
    const struct run_arguments *a = run->arguments;
    struct generator_options options = {
        .model = run->model,
        .tokenizer = run->tokenizer,
        .sampling = a->sampling,
        .device = run->device,
        .exact = a->exact,
        .continues = run->raw,
        .answer = {.stops = a->stops, .stop_count = a->stop_count, .silent = a->json}};
    struct kv_store_options *cache = &options.cache;
    size_t context = 0;

    cache->model = run->model;
    cache->dtype = a->dtype;
    cache->threads = a->threads;
    cache->device = run->device;
    if (!choose_context(run, prompt, &context, error) ||
        !kv_spec_resolve(&run->spec, run->model, error) ||
        (a->session != NULL && !run_session_open(run, error)))
        return false;
    cache->max_tokens = context > run->session.tokens ? context : run->session.tokens;
    kv_spec_warn(&run->spec, RUN_PROGRAM);
    cache->max_step_tokens = a->interactive ? cache->max_tokens : prompt;
    options.spec = run->spec;
    if (!generator_open(&run->generator, &options, error))
        return false;
    run->generator.context = context;
    return run_session_load(run, error);
}

/* What is to be answered, unless it comes by and by. */
static bool ask_once(struct run *run, struct error *error)
{
    struct token_list prompt = {0};
    size_t kept;

    if (!conversation_ask(run->conversation, run->prompt.data, run->prompt.size, &prompt, &kept,
                          error) ||
        !model_check_ids(run->model, run->arguments->model, prompt.ids, prompt.count, error) ||
        !open_generator(run, prompt.count, error) || !run_session_keep(run, &prompt, error)) {
        token_list_free(&prompt);
        return false;
    }
    token_list_free(&run->generator.tokens);
    run->generator.tokens = prompt;
    return true;
}

static bool open_run(struct run *run, struct error *error)
{
    const struct run_arguments *a = run->arguments;

    if (!device_open(a->backend, pages_serve(&a->spec), &run->device, error) ||
        !read_prompt(run, error) || !model_open(a->model, &run->model, error) ||
        !tokenizer_open(a->model, &run->tokenizer, error))
        return false;
    if (tokenizer_doubt(run->tokenizer) != NULL)
        warning_print(RUN_PROGRAM, a->model, tokenizer_doubt(run->tokenizer));
    if (!open_conversation(run, error))
        return false;
    return a->interactive ? open_generator(run, 0, error) : ask_once(run, error);
}

static void close_run(struct run *run)
{
    generator_close(&run->generator);
    free(run->prompt.data);
    conversation_close(run->conversation);
    chat_close(run->chat);
    tokenizer_close(run->tokenizer);
    model_close(run->model);
    device_close(run->device);
}

/* Answers the prompt. */
static bool run_once(struct run *run, enum exit_code *code, struct error *error)
{
    const struct run_arguments *a = run->arguments;
    struct generator *generator = &run->generator;
    const struct generation *generation = &generator->generation;
    bool interrupted;

    if (!generator_answer(generator, a->predict, error))
        return false;
    interrupted = generation->finish == FINISH_INTERRUPTED;
    *code = interrupted ? EXIT_INTERRUPTED : EXIT_DONE;
    if (generation->finish == FINISH_FULL && !a->json)
        fprintf(stderr, "%s: the answer ends early: the context of %zu tokens is full\n",
                RUN_PROGRAM, generator->context);
    if (interrupted && generation->prefilled == 0)
        fprintf(stderr, "%s: interrupted while reading the prompt\n", RUN_PROGRAM);
    else if ((a->stats || (interrupted && !a->json)) && !run_print_stats(run, error))
        return false;
    if (a->json && !run_print_document(run, error))
        return false;
    if (a->session == NULL || generation->prefilled == 0)
        return true;
    return conversation_answer(run->conversation, generator->answer.text, generator->answer.size,
                               error) &&
           run_session_save(run, error);
}

int main(int argc, char **argv)
{
    struct run_arguments arguments;
    struct run run = {.arguments = &arguments};
    struct error error;
    enum exit_code code = EXIT_FAILED;
    bool done;

    machine_hold_standard_files(RUN_PROGRAM);
    machine_start_blas(RUN_PROGRAM);
    if (!read_arguments(argc, argv, &arguments, &error)) {
        error_print(RUN_PROGRAM, &error);
        code = EXIT_USAGE;
        goto out;
    }
    if (arguments.help || arguments.version) {
        done = arguments.help ? options_help(&table, &error) && kv_spec_help(&error)
                              : options_version(RUN_PROGRAM, &error);
        code = done ? EXIT_DONE : EXIT_FAILED;
    } else {
        machine_calm_threads(argv);
        interrupt_catch();
        file_map_guard(RUN_PROGRAM);
        run.spec = arguments.spec;
        done = open_run(&run, &error) &&
               (arguments.interactive ? run_chat : run_once)(&run, &code, &error);
        if (!done)
            code = interrupt_seen() ? EXIT_INTERRUPTED : EXIT_FAILED;
    }
    if (!done)
        error_print(RUN_PROGRAM, &error);
out:
    close_run(&run);
    free(arguments.stops);
    return code;
}
