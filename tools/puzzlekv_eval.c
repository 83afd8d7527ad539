/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval: measures what a policy for the KV cache does to a model. */
#include "eval.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "options.h"
#include "plot.h"
#include "policies/pages.h"
#include "runner/tokenizer.h"

/* ---- Commands and their options ----------------------------------------------------------------
 */

enum {
    OPTION_KV = OPTION_LONG_ONLY,
    OPTION_IDS,
    OPTION_TOKENS,
    OPTION_PREFILL,
    OPTION_BACKEND,
    OPTION_DTYPE,
    OPTION_TASK,
    OPTION_LENGTH,
    OPTION_ROWS,
    OPTION_SEQUENCES,
    OPTION_SEED,
    OPTION_CHAT,
    OPTION_METRIC,
    OPTION_MAX_NEW,
    OPTION_RESUME,
    OPTION_CSV,
    OPTION_PLOT,
    OPTION_ABLATION,
    OPTION_JSON
};

/* clang-format off */
#define ROW_KV      {OPTION_KV, "kv", "SPEC", "policy of the cache; see below"}
#define ROW_KVS     {OPTION_KV, "kv", "SPEC", \
                     "policy of the cache, repeatable (raw and puzzle);\nsee below"}
#define ROW_THREADS {'t', "threads", "N", "threads (one per core)"}
#define ROW_BACKEND {OPTION_BACKEND, "backend", "NAME", \
                     "where model and caches are: auto, cpu or cuda; auto is\n" \
                     "CUDA if there is a device that can have them (auto)"}
#define ROW_JSON    {OPTION_JSON, "json", NULL, "print one JSON document"}
#define ROW_CSV     {OPTION_CSV, "csv", NULL, "print CSV instead of the table"}
#define ROW_PLOT    {OPTION_PLOT, "plot", "FILE", "draw quality against ratio as SVG, with gnuplot"}
#define ROW_ABLATION {OPTION_ABLATION, "ablation", "NAME", \
                      "the policies of one of the paper's ablations, before\n" \
                      "those of --kv: " ABLATION_NAMES}
#define ROW_DTYPE_BF16 \
    {OPTION_DTYPE, "dtype", "TYPE", "storage type of the cache: bf16, f16 or f32 (bf16)"}
#define ROW_DTYPE_F32 \
    {OPTION_DTYPE, "dtype", "TYPE", "storage type of the cache: bf16, f16 or f32 (f32)"}
/* clang-format on */

static const struct option_row info_rows[] = {
    ROW_KVS,
    ROW_DTYPE_BF16,
    ROW_JSON,
    OPTION_ROWS_COMMON,
};

static const struct option_row tokenize_rows[] = {
    {'f', "file", "FILE", "the text; - is standard input"},
    {OPTION_JSON, "json", NULL, "the same: the array is JSON"},
    OPTION_ROWS_COMMON,
};

static const struct option_row logits_rows[] = {
    {OPTION_IDS, "tokens", "FILE", "token ids as a JSON array; - is standard input"},
    {OPTION_PREFILL, "prefill", "N", "tokens of the first step"},
    ROW_KV,
    ROW_BACKEND,
    ROW_DTYPE_F32,
    {'o', "output", "FILE", "where the logits go, f32 little-endian"},
    ROW_THREADS,
    ROW_JSON,
    OPTION_ROWS_COMMON,
};

static const struct option_row ppl_rows[] = {
    {'f', "file", "FILE", "the text; - is standard input"},
    {OPTION_TOKENS, "tokens", "N", "use the first N tokens of the text"},
    {OPTION_PREFILL, "prefill", "M", "tokens of the first step"},
    ROW_KVS,
    ROW_ABLATION,
    ROW_BACKEND,
    ROW_DTYPE_BF16,
    ROW_THREADS,
    ROW_PLOT,
    ROW_CSV,
    ROW_JSON,
    OPTION_ROWS_COMMON,
};

static const struct option_row tasks_rows[] = {
    ROW_KVS,
    ROW_ABLATION,
    {OPTION_METRIC, "metric", "NAME",
     "score: all, the share of the references that the answer\n"
     "contains, or part, whether it has any (all)"},
    {OPTION_MAX_NEW, "max-new", "N", "tokens of an answer, at most (128)"},
    {OPTION_CHAT, "chat", NULL, "put the prompts into the model's chat format"},
    ROW_BACKEND,
    ROW_DTYPE_BF16,
    ROW_THREADS,
    {'o', "output", "FILE", "write each row's predictions, as JSON Lines"},
    {OPTION_RESUME, "resume", NULL, "go on from what --output holds already"},
    ROW_PLOT,
    ROW_CSV,
    ROW_JSON,
    OPTION_ROWS_COMMON,
};

static const struct option_row ranks_rows[] = {
    {'f', "file", "FILE", "the text; - is standard input"},
    {OPTION_TOKENS, "tokens", "N", "use the first N tokens of the text (2048, or what it has)"},
    {OPTION_PLOT, "plot", "FILE", "draw the result as SVG, with gnuplot"},
    ROW_THREADS,
    ROW_CSV,
    ROW_JSON,
    OPTION_ROWS_COMMON,
};

static const struct option_row generate_tasks_rows[] = {
    {OPTION_TASK, "task", "NAME", "what is to be found:\n" TASK_NAMES},
    {OPTION_LENGTH, "length", "N", "tokens of each prompt, exactly"},
    {OPTION_ROWS, "rows", "N", "how many rows"},
    {OPTION_SEED, "seed", "N", "seed of the random choices (42)"},
    {OPTION_CHAT, "chat", NULL, "count the tokens of the model's chat format"},
    {'o', "output", "FILE", "where the rows go, as JSON Lines"},
    OPTION_ROWS_COMMON,
};

static const struct option_row calibrate_rows[] = {
    {'o', "output", "FILE", "where the calibration goes, as safetensors"},
    {OPTION_SEQUENCES, "sequences", "N", "how many sequences of the text are fed (256)"},
    {OPTION_LENGTH, "length", "N", "tokens of each (1024)"},
    {OPTION_SEED, "seed", "N", "seed of where they begin (42)"},
    ROW_THREADS,
    OPTION_ROWS_COMMON,
};

struct eval_command {
    const char *default_kv[2];
    pkv_dtype default_dtype;
    enum device_choice default_backend;
    bool (*run)(const struct eval_arguments *arguments, struct error *error);
};

static const struct eval_command info_command = {
    {"raw", "puzzle"}, PKV_BF16, DEVICE_CPU, eval_info};
static const struct eval_command tokenize_command = {{NULL}, PKV_BF16, DEVICE_CPU, eval_tokenize};
static const struct eval_command logits_command = {{NULL}, PKV_F32, DEVICE_AUTO, eval_logits};
static const struct eval_command ppl_command = {{"raw", "puzzle"}, PKV_BF16, DEVICE_AUTO, eval_ppl};
static const struct eval_command ranks_command = {{NULL}, PKV_F32, DEVICE_CPU, eval_ranks};
static const struct eval_command tasks_command = {
    {"raw", "puzzle"}, PKV_BF16, DEVICE_AUTO, eval_tasks};
static const struct eval_command generate_tasks_command = {
    {NULL}, PKV_BF16, DEVICE_CPU, eval_generate_tasks};
static const struct eval_command calibrate_command = {{NULL}, PKV_F32, DEVICE_CPU, eval_calibrate};

static const struct command commands[] = {
    {"info",
     COMMAND_TABLE(
         "puzzlekv-eval info MODEL [OPTION]...",
         "Tells a model's geometry and its KV bytes at several lengths; reads no weights.",
         info_rows),
     {0},
     &info_command},
    {"tokenize",
     COMMAND_TABLE(
         "puzzlekv-eval tokenize MODEL -f FILE [OPTION]...",
         "Prints the token ids of a text as a JSON array; special tokens are parsed, no BOS is\n"
         "added. MODEL may be a GGUF file with a vocabulary only.",
         tokenize_rows),
     {'f'},
     &tokenize_command},
    {"logits",
     COMMAND_TABLE(
         "puzzlekv-eval logits MODEL --tokens FILE --prefill N --kv SPEC -o FILE [OPTION]...",
         "Writes the logits after the first N tokens and after each further token fed alone.",
         logits_rows),
     {OPTION_IDS, OPTION_PREFILL, OPTION_KV, 'o'},
     &logits_command},
    {"ppl",
     COMMAND_TABLE(
         "puzzlekv-eval ppl MODEL -f FILE --tokens N --prefill M [OPTION]...",
         "Predicts the last N - M of the text's first N tokens under each policy, and compares\n"
         "with the dense cache.",
         ppl_rows),
     {'f', OPTION_TOKENS, OPTION_PREFILL},
     &ppl_command},
    {"ranks",
     COMMAND_TABLE(
         "puzzlekv-eval ranks MODEL -f FILE [OPTION]...",
         "Tells how much of the keys and values of a page few directions hold, on a text.",
         ranks_rows),
     {'f'},
     &ranks_command},
    {"tasks",
     COMMAND_TABLE("puzzlekv-eval tasks MODEL FILE [OPTION]...",
                   "Answers the rows of FILE, JSON Lines in RULER's format, under each policy.",
                   tasks_rows),
     {0},
     &tasks_command},
    {"generate-tasks",
     COMMAND_TABLE(
         "puzzlekv-eval generate-tasks MODEL --task NAME --length N --rows N -o FILE [OPTION]...",
         "Writes test rows in RULER's format, of an exact length in the model's tokens.",
         generate_tasks_rows),
     {OPTION_TASK, OPTION_LENGTH, OPTION_ROWS, 'o'},
     &generate_tasks_command},
    {"calibrate",
     COMMAND_TABLE(
         "puzzlekv-eval calibrate MODEL TEXT -o FILE [OPTION]...",
         "Measures on TEXT, a file, what the policies palu and ojakv have to know of the model.",
         calibrate_rows),
     {'o'},
     &calibrate_command},
};

#define COMMAND_NAMES "info, tokenize, logits, ppl, ranks, tasks, generate-tasks, calibrate"

/* ---- The command line ------------------------------------------------------------------------ */

static bool add_kv(struct eval_arguments *a, const char *text, struct error *error)
{
    struct eval_kv *kv = &a->kv[a->kv_count++];

    kv->text = text;
    return kv_spec_parse(text, &kv->spec, error);
}

static bool option_seed(const char *value, uint64_t *seed, struct error *error)
{
    size_t number;

    if (!number_size("--seed", value, 0, SIZE_MAX, &number, error))
        return false;
    *seed = number;
    return true;
}

static bool begin(const struct command *command, size_t words, void *arguments, struct error *error)
{
    const struct eval_command *own = command->own;
    struct eval_arguments *a = arguments;

    *a = (struct eval_arguments){.threads = machine_threads(),
                                 .dtype = own->default_dtype,
                                 .backend = own->default_backend,
                                 .seed = 42,
                                 .sequences = 256,
                                 .max_new = 128};
    a->kv = calloc(words + ABLATION_MOST + 2, sizeof *a->kv);
    return a->kv != NULL || error_set(error, "out of memory");
}

static bool set(void *arguments, int id, const char *value, struct error *error)
{
    struct eval_arguments *a = arguments;

    switch (id) {
    case 'f':
        a->file = value;
        return true;
    case 'o':
        a->output = value;
        return true;
    case 't':
        return option_threads(value, &a->threads, error);
    case OPTION_IDS:
        a->ids_file = value;
        return true;
    case OPTION_TOKENS:
        return number_size("--tokens", value, 2, INT32_MAX, &a->tokens, error);
    case OPTION_PREFILL:
        return number_size("--prefill", value, 1, INT32_MAX, &a->prefill, error);
    case OPTION_KV:
        return add_kv(a, value, error);
    case OPTION_BACKEND:
        return device_parse(value, &a->backend, error);
    case OPTION_DTYPE:
        return option_dtype(value, &a->dtype, error);
    case OPTION_TASK:
        return task_parse("--task", value, &a->task, error);
    case OPTION_LENGTH:
        return number_size("--length", value, 1, INT32_MAX, &a->length, error);
    case OPTION_ROWS:
        return number_size("--rows", value, 1, INT32_MAX, &a->rows, error);
    case OPTION_SEQUENCES:
        return number_size("--sequences", value, 1, INT32_MAX, &a->sequences, error);
    case OPTION_SEED:
        return option_seed(value, &a->seed, error);
    case OPTION_CHAT:
        a->chat = true;
        return true;
    case OPTION_METRIC:
        return task_metric_parse(value, &a->metric, error);
    case OPTION_MAX_NEW:
        return number_size("--max-new", value, 1, INT32_MAX, &a->max_new, error);
    case OPTION_RESUME:
        a->resume = true;
        return true;
    case OPTION_ABLATION:
        a->ablation = value;
        return ablation_check(value, error);
    case OPTION_PLOT:
        a->plot = value;
        return true;
    case OPTION_CSV:
        a->csv = true;
        return true;
    case OPTION_JSON:
        a->json = true;
        return true;
    }
    return false;
}

static bool operands(const struct command *command, int argc, char **argv, void *arguments,
                     struct error *error)
{
    const bool calibrates = command->own == &calibrate_command;
    const char *const names[2] = {"MODEL", calibrates ? "TEXT" : "FILE"};
    const char *words[2] = {NULL, NULL};
    struct eval_arguments *a = arguments;

    if (!options_operands(argc, argv, names, calibrates || command->own == &tasks_command ? 2 : 1,
                          words, error))
        return false;
    a->model = words[0];
    *(calibrates ? &a->file : &a->rows_file) = words[1];
    return true;
}

static bool check(const struct command *command, void *arguments, struct error *error)
{
    const struct eval_command *own = command->own;
    struct eval_arguments *a = arguments;
    const bool none = a->kv_count == 0 && a->ablation == NULL;

    for (size_t i = 0; none && i < 2 && own->default_kv[i] != NULL; i++) {
        if (!add_kv(a, own->default_kv[i], error))
            return false;
    }
    if (own == &logits_command && a->kv_count > 1)
        return error_set(error, "--kv: given %zu times; logits takes one", a->kv_count);
    if (a->resume && a->output == NULL)
        return error_set(error, "--resume: continues an --output, which is missing");
    if (a->output != NULL && a->plot != NULL && strcmp(a->output, a->plot) == 0)
        return error_set(error, "--plot %s: is the --output as well", a->plot);
    if (a->csv && a->json)
        return error_set(error, "--csv, --json: give one or the other");
    if (a->tokens > 0 && a->prefill >= a->tokens)
        return error_set(error, "--prefill %zu: is not below --tokens %zu", a->prefill, a->tokens);
    for (size_t i = 0; a->backend == DEVICE_CUDA && i < a->kv_count; i++) {
        if (!pages_require(&a->kv[i].spec, "--backend cuda", a->kv[i].text, error))
            return false;
    }
    return true;
}

/* Puts the policies of --ablation, which may depend on the model, before the others. */
static bool expand_ablation(struct eval_arguments *a, struct error *error)
{
    const size_t typed = a->kv_count;
    struct model *model;
    size_t count;

    if (a->ablation == NULL)
        return true;
    if (!model_open_header(a->model, &model, error))
        return false;
    count = ablation_policies(a->ablation, model->head_dim, a->ablation_texts);
    model_close(model);
    memmove(a->kv + count, a->kv, typed * sizeof *a->kv);
    a->kv_count = 0;
    for (size_t i = 0; i < count; i++) {
        if (!add_kv(a, a->ablation_texts[i], error))
            return false;
    }
    a->kv_count += typed;
    return true;
}

static bool open_device(struct eval_arguments *a, struct error *error)
{
    bool able = true;

    for (size_t i = 0; i < a->kv_count; i++) {
        able = able && pages_serve(&a->kv[i].spec);
        /* Those of --ablation were not typed. */
        if (a->backend == DEVICE_CUDA &&
            !pages_require(&a->kv[i].spec, "--backend cuda", a->kv[i].text, error))
            return false;
    }
    return device_open(a->backend, able, &a->device, error);
}

static bool run(const struct command *command, void *arguments, struct error *error)
{
    const struct eval_command *own = command->own;
    struct eval_arguments *a = arguments;
    bool done = (a->plot == NULL || plot_check(error)) && expand_ablation(a, error) &&
                open_device(a, error) && own->run(a, error);

    device_close(a->device);
    return done;
}

/* ---- Shared by the commands -------------------------------------------------------------------
 */

static bool go_on(void *opaque, size_t done, size_t layers)
{
    (void)opaque;
    (void)done;
    (void)layers;
    return !interrupt_seen();
}

bool eval_tokenizer_open(const struct eval_arguments *arguments, struct tokenizer **tokenizer,
                         struct error *error)
{
    if (!tokenizer_open(arguments->model, tokenizer, error))
        return false;
    if (tokenizer_doubt(*tokenizer) != NULL)
        warning_print(EVAL_PROGRAM, arguments->model, tokenizer_doubt(*tokenizer));
    return true;
}

bool eval_read_text(const struct eval_arguments *arguments, const struct model *model,
                    struct token_list *list, struct error *error)
{
    const size_t wanted = arguments->tokens;
    struct tokenizer *tokenizer = NULL;
    struct text text = {.data = NULL};
    bool done = false;

    if (!text_read(arguments->file, &text, error) ||
        !text_check_utf8(text.name, text.data, text.size, error) ||
        !eval_tokenizer_open(arguments, &tokenizer, error))
        goto out;
    if (tokenizer_wants_bos(tokenizer) && !token_list_append(list, tokenizer_bos(tokenizer), error))
        goto out;
    if (!tokenizer_encode(tokenizer, text.data, text.size, true, list, error))
        goto out;
    if (list->count < wanted)
        error_set(error, "%s: has %zu tokens; --tokens asks for %zu", text.name, list->count,
                  wanted);
    else if (wanted > model->context_length)
        error_set(error, "--tokens %zu: the model's context is %zu tokens", wanted,
                  model->context_length);
    else
        done = model_check_ids(model, arguments->model, list->ids,
                               wanted > 0 ? wanted : list->count, error);
out:
    tokenizer_close(tokenizer);
    free(text.data);
    return done;
}

bool eval_transformer_open(const struct eval_arguments *arguments, const struct model *model,
                           struct transformer **transformer, struct error *error)
{
    struct transformer_options options = {.threads = arguments->threads,
                                          .exact = true,
                                          .device = arguments->device,
                                          .layer_done = go_on};

    return machine_isa(&options.isa, error) &&
           transformer_open(model, &options, transformer, error);
}

bool eval_cache_open(const struct eval_arguments *arguments, const struct model *model,
                     const struct kv_spec *spec, size_t tokens, size_t step_tokens,
                     struct eval_cache *cache, struct error *error)
{
    const struct kv_store_options options = {.model = model,
                                             .dtype = arguments->dtype,
                                             .max_tokens = tokens,
                                             .max_step_tokens = step_tokens,
                                             .threads = arguments->threads,
                                             .device = arguments->device};

    *cache = (struct eval_cache){.spec = *spec};
    if (!kv_spec_resolve(&cache->spec, model, error))
        return false;
    kv_spec_warn(&cache->spec, EVAL_PROGRAM);
    return kv_store_open(&cache->spec, &options, &cache->store, error);
}

void eval_cache_close(struct eval_cache *cache)
{
    kv_store_close(cache->store);
    *cache = (struct eval_cache){.store = NULL};
}

bool eval_print_document(const struct eval_arguments *arguments, json_t *members,
                         struct error *error)
{
    json_t *document;
    char cpu[256];
    const char *isa;

    if (!device_isa(arguments->device, &isa, error)) {
        json_decref(members);
        return false;
    }
    machine_cpu(cpu, sizeof cpu);
    document = json_pack("{s:o, s:s, s:o, s:i, s:s}", "model", json_text(arguments->model), "isa",
                         isa, "cpu", json_text(cpu), "threads", (int)arguments->threads, "dtype",
                         dtype_name(arguments->dtype));
    if (json_object_update(document, members) != 0) {
        json_decref(document);
        document = NULL;
    }
    json_decref(members);
    return json_print(document, error);
}

int eval_kv_width(const struct eval_arguments *arguments)
{
    size_t width = 2;

    for (size_t i = 0; i < arguments->kv_count; i++) {
        if (strlen(arguments->kv[i].text) > width)
            width = strlen(arguments->kv[i].text);
    }
    return (int)width;
}

int main(int argc, char **argv)
{
    static const struct command_program program = {
        .name = EVAL_PROGRAM,
        .intro = "Usage: puzzlekv-eval COMMAND MODEL [OPTION]...\n"
                 "Measures what a policy for the KV cache does to MODEL, a GGUF file or a Hugging "
                 "Face\n"
                 "folder. Commands: " COMMAND_NAMES ".\n",
        .names = COMMAND_NAMES,
        .commands = commands,
        .count = sizeof commands / sizeof *commands,
        .begin = begin,
        .set = set,
        .operands = operands,
        .check = check,
        .run = run,
    };
    struct eval_arguments arguments = {.kv = NULL};
    int code = command_main(&program, argc, argv, &arguments);

    free(arguments.kv);
    return code;
}
