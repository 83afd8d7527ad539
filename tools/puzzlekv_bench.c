/* SPDX-License-Identifier: MIT */
/* puzzlekv-bench: bytes and speed of policies for the KV cache, side by side. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "options.h"
#include "policies/pages.h"
#include "random_pages.h"
#include "shapes.h"

/* ---- Commands and their options -------------------------------------------------------------- */

enum {
    OPTION_SHAPE = OPTION_LONG_ONLY,
    OPTION_TOKENS,
    OPTION_BATCH,
    OPTION_PAGES,
    OPTION_SOLVER,
    OPTION_PROMPT_TOKENS,
    OPTION_PREDICT,
    OPTION_DEPTH,
    OPTION_REPEATS,
    OPTION_KV,
    OPTION_BACKEND,
    OPTION_DTYPE,
    OPTION_JSON,
    OPTION_CSV
};

/* clang-format off */
#define ROW_SHAPE  {OPTION_SHAPE, "shape", "NAME", "geometry of the model:\n" SHAPE_NAMES}
#define ROW_KVS    {OPTION_KV, "kv", "SPEC", \
                    "policy of the cache, repeatable (raw and puzzle);\nsee below"}
#define ROW_DTYPE  {OPTION_DTYPE, "dtype", "TYPE", \
                    "storage type of the cache: bf16, f16 or f32 (bf16)"}
#define ROW_BACKEND {OPTION_BACKEND, "backend", "NAME", \
                     "where it is measured: auto, cpu or cuda; auto is CUDA\n" \
                     "if there is a device that can do it (auto)"}
#define ROW_THREADS {'t', "threads", "N", "threads (one per core)"}
#define ROW_REPEATS(standard) \
    {OPTION_REPEATS, "repeats", "N", "rounds in which all are measured (" standard ")"}
#define ROWS_FORMAT \
    {OPTION_JSON, "json", NULL, "print one JSON document instead of a table"}, \
    {OPTION_CSV, "csv", NULL, "print comma-separated values instead of a table"}
/* clang-format on */

static const struct option_row storage_rows[] = {
    ROW_SHAPE,   {OPTION_TOKENS, "tokens", "N", "tokens of the sequence"},
    ROW_KVS,     ROW_DTYPE,
    ROWS_FORMAT, OPTION_ROWS_COMMON,
};

static const struct option_row attention_rows[] = {
    ROW_SHAPE,
    {OPTION_TOKENS, "tokens", "N", "tokens of each sequence"},
    {OPTION_BATCH, "batch", "N", "sequences that decode together (1)"},
    ROW_KVS,
    ROW_BACKEND,
    ROW_DTYPE,
    ROW_THREADS,
    ROW_REPEATS("11"),
    ROWS_FORMAT,
    OPTION_ROWS_COMMON,
};

static const struct option_row factorize_rows[] = {
    ROW_SHAPE,
    {OPTION_PAGES, "pages", "N",
     "pages, K or V of one head each, rounded up to whole\npages of all heads"},
    {OPTION_SOLVER, "solver", "NAME",
     "what makes the factors, repeatable (all; on a device\nbatched): " BENCH_SOLVER_NAMES},
    ROW_BACKEND,
    ROW_DTYPE,
    ROW_THREADS,
    ROW_REPEATS("11"),
    ROWS_FORMAT,
    OPTION_ROWS_COMMON,
};

static const struct option_row model_rows[] = {
    ROW_SHAPE,
    {OPTION_PROMPT_TOKENS, "prompt-tokens", "N", "tokens of the prompt, which are random"},
    {OPTION_PREDICT, "predict", "M", "tokens to generate"},
    {OPTION_DEPTH, "depth", "N", "random tokens in the caches before the prompt (0)"},
    ROW_KVS,
    ROW_BACKEND,
    ROW_DTYPE,
    ROW_THREADS,
    ROW_REPEATS("5"),
    ROWS_FORMAT,
    OPTION_ROWS_COMMON,
};

struct bench_command {
    size_t default_repeats;
    enum device_choice default_backend;
    bool (*run)(const struct bench_arguments *arguments, struct error *error);
};

static const struct bench_command storage_command = {1, DEVICE_CPU, bench_storage};
static const struct bench_command attention_command = {11, DEVICE_AUTO, bench_attention};
static const struct bench_command factorize_command = {11, DEVICE_AUTO, bench_factorize};
static const struct bench_command model_command = {5, DEVICE_AUTO, bench_model};

static const struct command commands[] = {
    {"storage",
     COMMAND_TABLE("puzzlekv-bench storage --shape NAME --tokens N [--kv SPEC]... [OPTION]...",
                   "Exact bytes of one sequence's cache; nothing is computed.", storage_rows),
     {OPTION_SHAPE, OPTION_TOKENS},
     &storage_command},
    {"attention",
     COMMAND_TABLE("puzzlekv-bench attention --shape NAME --tokens N [--kv SPEC]... [OPTION]...",
                   "Time of attention when a token is decoded, over the storage of all layers.",
                   attention_rows),
     {OPTION_SHAPE, OPTION_TOKENS},
     &attention_command},
    {"factorize",
     COMMAND_TABLE("puzzlekv-bench factorize --shape NAME --pages N [--solver NAME]... [OPTION]...",
                   "Time that solvers take to turn pages into factors.", factorize_rows),
     {OPTION_SHAPE, OPTION_PAGES},
     &factorize_command},
    {"model",
     COMMAND_TABLE(
         "puzzlekv-bench model (MODEL | --shape NAME) --prompt-tokens N --predict M "
         "[--kv SPEC]...\n                            [OPTION]...",
         "Time to the first token and per further one, of a model file or of random weights.",
         model_rows),
     {OPTION_PROMPT_TOKENS, OPTION_PREDICT},
     &model_command},
};

#define COMMAND_NAMES "storage, attention, factorize, model"

/* ---- The command line ------------------------------------------------------------------------ */

static bool add_kv(struct bench_arguments *a, const char *text, struct error *error)
{
    struct bench_kv *kv = &a->kv[a->kv_count++];

    kv->text = text;
    return kv_spec_parse(text, &kv->spec, error);
}

static bool add_solver(struct bench_arguments *a, const char *name, struct error *error)
{
    for (size_t i = 0; i < BENCH_SOLVER_COUNT; i++) {
        if (strcmp(bench_solvers[i].name, name) == 0) {
            a->solvers[a->solver_count++] = &bench_solvers[i];
            return true;
        }
    }
    return error_set(error, "--solver: \"%.40s\" is not one of %s", name, BENCH_SOLVER_NAMES);
}

static bool begin(const struct command *command, size_t words, void *arguments, struct error *error)
{
    const struct bench_command *own = command->own;
    struct bench_arguments *a = arguments;

    *a = (struct bench_arguments){.threads = machine_threads(),
                                  .batch = 1,
                                  .repeats = own->default_repeats,
                                  .backend = own->default_backend,
                                  .dtype = PKV_BF16};
    a->kv = calloc(words + 2, sizeof *a->kv);
    a->solvers = calloc(words + BENCH_SOLVER_COUNT, sizeof *a->solvers);
    return (a->kv != NULL && a->solvers != NULL) || error_set(error, "out of memory");
}

static bool set(void *arguments, int id, const char *value, struct error *error)
{
    struct bench_arguments *a = arguments;

    switch (id) {
    case 't':
        return option_threads(value, &a->threads, error);
    case OPTION_SHAPE:
        a->shape = value;
        return shape_find(value, &a->model) ||
               error_set(error, "--shape: \"%.40s\" is not one of %s", value, SHAPE_NAMES);
    case OPTION_TOKENS:
        return number_size("--tokens", value, 1, INT32_MAX, &a->tokens, error);
    case OPTION_BATCH:
        return number_size("--batch", value, 1, 4096, &a->batch, error);
    case OPTION_PAGES:
        return number_size("--pages", value, 1, INT32_MAX, &a->pages, error);
    case OPTION_SOLVER:
        return add_solver(a, value, error);
    case OPTION_PROMPT_TOKENS:
        return number_size("--prompt-tokens", value, 1, INT32_MAX, &a->prompt_tokens, error);
    case OPTION_PREDICT:
        return number_size("--predict", value, 1, INT32_MAX, &a->predict, error);
    case OPTION_DEPTH:
        return number_size("--depth", value, 0, INT32_MAX, &a->depth, error);
    case OPTION_REPEATS:
        return number_size("--repeats", value, 1, 100000, &a->repeats, error);
    case OPTION_KV:
        return add_kv(a, value, error);
    case OPTION_BACKEND:
        return device_parse(value, &a->backend, error);
    case OPTION_DTYPE:
        return option_dtype(value, &a->dtype, error);
    case OPTION_JSON:
        a->json = true;
        return true;
    case OPTION_CSV:
        a->csv = true;
        return true;
    }
    return false;
}

/* A model is a file or a shape. */
static bool operands(const struct command *command, int argc, char **argv, void *arguments,
                     struct error *error)
{
    const char *const operand = "MODEL";
    struct bench_arguments *a = arguments;

    return options_operands(argc, argv, &operand, command->own == &model_command && !a->shape,
                            &a->file, error);
}

static bool check(const struct command *command, void *arguments, struct error *error)
{
    struct bench_arguments *a = arguments;
    const bool any_solver = a->solver_count > 0;

    if (a->json && a->csv)
        return error_set(error, "--json, --csv: give one or the other");
    if (a->kv_count == 0 && (!add_kv(a, "raw", error) || !add_kv(a, "puzzle", error)))
        return false;
    for (size_t i = 0; i < a->solver_count; i++) {
        if (a->backend == DEVICE_CUDA && !a->solvers[i]->on_device)
            return error_set(error, "--backend cuda, --solver %s: a device has none",
                             a->solvers[i]->name);
        if (a->backend != DEVICE_CUDA && !a->solvers[i]->on_cpu)
            return error_set(error, "--solver %s: takes --backend cuda", a->solvers[i]->name);
    }
    /* cuSOLVER, which may not be there, only for those who ask for it. */
    for (size_t i = 0; i < BENCH_SOLVER_COUNT && !any_solver; i++)
        if (a->backend == DEVICE_CUDA ? i == 0 : bench_solvers[i].on_cpu)
            a->solvers[a->solver_count++] = &bench_solvers[i];
    for (size_t i = 0; i < a->kv_count && a->shape != NULL; i++) {
        if (!kv_spec_resolve(&a->kv[i].spec, &a->model, error))
            return false;
        if (command->own == &attention_command && !pages_serve(&a->kv[i].spec))
            return error_set(error,
                             "--kv %.80s: attention takes the library's own: raw, and puzzle and "
                             "puzzle-int4 with rope=post",
                             a->kv[i].text);
    }
    for (size_t i = 0; i < a->kv_count; i++) {
        const struct bench_kv *kv = &a->kv[i];

        if ((a->backend == DEVICE_CUDA &&
             !pages_require(&kv->spec, "--backend cuda", kv->text, error)) ||
            (a->depth > 0 && !pages_require(&kv->spec, "--depth", kv->text, error)))
            return false;
    }
    return true;
}

static bool run(const struct command *command, void *arguments, struct error *error)
{
    const struct bench_command *own = command->own;
    struct bench_arguments *a = arguments;
    bool able = true, done;

    for (size_t i = 0; i < a->kv_count; i++)
        able = able && pages_serve(&a->kv[i].spec);
    for (size_t i = 0; own == &factorize_command && i < a->solver_count; i++)
        able = able && a->solvers[i] == &bench_solvers[0];
    done = device_open(a->backend, able, &a->device, error) && own->run(a, error);
    device_close(a->device);
    return done;
}

/* ---- Shared by the commands ------------------------------------------------------------------ */

/* What pkv_cache_open() reserves: a factorized page is what a page costs without sink and window.
 */
static bool pool_bytes(const pkv_config *config, size_t *bytes, struct error *error)
{
    pkv_footprint pool = {.struct_size = sizeof pool}, page = {.struct_size = sizeof page};
    char message[PKV_MESSAGE_BYTES];
    pkv_config bare = *config;
    size_t dense, factors;

    bare.sink_pages = bare.window_pages = 0;
    bare.max_tokens = config->page_tokens;
    if (pkv_footprint_of(config, 0, &pool, message) != PKV_OK ||
        pkv_footprint_of(&bare, bare.page_tokens, &page, message) != PKV_OK)
        return error_set(error, "the cache: %s", message);
    if (__builtin_mul_overflow(pool.dense_slots, page.raw_bytes, &dense) ||
        __builtin_mul_overflow(pool.factor_slots, page.payload_bytes, &factors) ||
        __builtin_add_overflow(dense, factors, bytes))
        return error_set(error, "the cache: its size overflows");
    return true;
}

bool bench_check_memory(const pkv_config *configs, size_t count, size_t more, struct error *error)
{
    size_t free_memory = machine_free_memory();
    size_t need = more, bytes;

    for (size_t i = 0; i < count; i++) {
        if (!pool_bytes(&configs[i], &bytes, error))
            return false;
        if (__builtin_add_overflow(need, bytes, &need))
            need = SIZE_MAX;
    }
    return need <= free_memory || error_set(error, "memory: this takes %.1f GiB; %.1f GiB are free",
                                            (double)need * 0x1p-30, (double)free_memory * 0x1p-30);
}

bool bench_operand(const struct bench_arguments *arguments, const void *data, size_t bytes,
                   void **operand, struct error *error)
{
    struct device *device = arguments->device;

    if (device != NULL)
        return device->operations->upload(device, data, bytes, operand, error);
    *operand = malloc(bytes);
    if (*operand == NULL)
        return error_set(error, "out of memory");
    if (data != NULL)
        memcpy(*operand, data, bytes);
    return true;
}

bool bench_fill_operands(const struct bench_arguments *arguments, const struct model *model,
                         size_t tokens, void **k, void **v, struct error *error)
{
    const size_t blocks = (tokens + RANDOM_PAGE_TOKENS - 1) / RANDOM_PAGE_TOKENS;
    const size_t count = blocks * RANDOM_PAGE_TOKENS * model->kv_heads * model->head_dim;
    float *keys = malloc(count * sizeof *keys);
    float *values = malloc(count * sizeof *values);
    bool done = (keys != NULL && values != NULL) || error_set(error, "out of memory");

    done = done &&
           random_pages(42, blocks, model->kv_heads, model->head_dim, arguments->threads, keys,
                        values, error) &&
           bench_operand(arguments, keys, count * sizeof *keys, k, error) &&
           bench_operand(arguments, values, count * sizeof *values, v, error);
    free(keys);
    free(values);
    return done;
}

void bench_operand_free(const struct bench_arguments *arguments, void *operand)
{
    if (arguments->device != NULL)
        arguments->device->operations->release(arguments->device, operand);
    else
        free(operand);
}

/* ---- Samples --------------------------------------------------------------------------------- */

static int compare_samples(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double quantile(const double *sorted, size_t count, double share)
{
    double at = share * (double)(count - 1);
    size_t below = (size_t)at;
    size_t above = below + 1 < count ? below + 1 : below;

    return sorted[below] + (at - (double)below) * (sorted[above] - sorted[below]);
}

struct bench_summary bench_summarise(double *samples, size_t count)
{
    qsort(samples, count, sizeof *samples, compare_samples);
    return (struct bench_summary){quantile(samples, count, 0.5), quantile(samples, count, 0.25),
                                  quantile(samples, count, 0.75)};
}

double bench_median_ratio(const double *above, const double *below, size_t count, double *scratch)
{
    for (size_t i = 0; i < count; i++)
        scratch[i] = above[i] / below[i];
    return bench_summarise(scratch, count).median;
}

/* ---- Results --------------------------------------------------------------------------------- */

static json_t *number_object(const struct bench_column *column, double value)
{
    if (column->digits == BENCH_WHOLE && isfinite(value))
        return json_integer((json_int_t)value);
    return json_finite(value);
}

/* NULL without memory. */
static json_t *row_object(const struct bench_results *results, const struct bench_row *row)
{
    json_t *object = json_pack("{s:o}", results->what, json_text(row->name));
    bool failed = object == NULL;

    if (row->canonical[0] != '\0')
        failed |= json_object_set_new(object, "kv_canonical", json_text(row->canonical)) != 0;
    for (size_t j = 0; j < results->column_count; j++)
        failed |= json_object_set_new(object, results->columns[j].name,
                                      number_object(&results->columns[j], row->values[j])) != 0;
    if (failed) {
        json_decref(object);
        return NULL;
    }
    return object;
}

static bool print_json(json_t *members, const struct bench_results *results, struct error *error)
{
    json_t *list = json_array();
    bool failed = false;

    for (size_t i = 0; i < results->row_count; i++)
        failed |= json_array_append_new(list, row_object(results, &results->rows[i])) != 0;
    if (json_object_set_new(members, "results", list) != 0 || failed) {
        json_decref(members);
        return error_set(error, "out of memory for the JSON document");
    }
    return json_print(members, error);
}

static void print_scalar(json_t *value, bool csv, int digits)
{
    if (json_is_string(value) && csv)
        csv_text(json_string_value(value));
    else if (json_is_string(value))
        fputs(json_string_value(value), stdout);
    else if (json_is_integer(value))
        printf("%" JSON_INTEGER_FORMAT, json_integer_value(value));
    else if (json_is_real(value))
        printf("%.*g", digits, json_real_value(value));
}

/* One line per result that says everything, so that the lines of several runs make one table. */
static bool print_csv(json_t *members, const struct bench_results *results, struct error *error)
{
    const char *name;
    json_t *member;

    json_object_foreach(members, name, member) printf("%s,", name);
    fputs(results->what, stdout);
    for (size_t j = 0; j < results->column_count; j++)
        printf(",%s", results->columns[j].name);
    putchar('\n');
    for (size_t i = 0; i < results->row_count; i++) {
        const struct bench_row *row = &results->rows[i];

        json_object_foreach(members, name, member)
        {
            print_scalar(member, true, 17);
            putchar(',');
        }
        csv_text(row->name);
        for (size_t j = 0; j < results->column_count; j++) {
            json_t *value = number_object(&results->columns[j], row->values[j]);

            putchar(',');
            print_scalar(value, true, 17);
            json_decref(value);
        }
        putchar('\n');
    }
    json_decref(members);
    return output_flush(error);
}

static int column_width(const struct bench_column *column)
{
    size_t length = strlen(column->name);

    return length > 10 ? (int)length : 10;
}

static bool print_table(json_t *members, const struct bench_results *results, struct error *error)
{
    size_t names = strlen(results->what);
    const char *name;
    json_t *member;

    json_object_foreach(members, name, member)
    {
        printf("%-14s ", name);
        print_scalar(member, false, 4);
        putchar('\n');
    }
    for (size_t i = 0; i < results->row_count; i++) {
        if (strlen(results->rows[i].name) > names)
            names = strlen(results->rows[i].name);
    }
    printf("\n%-*s", (int)names, results->what);
    for (size_t j = 0; j < results->column_count; j++)
        printf(" %*s", column_width(&results->columns[j]), results->columns[j].name);
    putchar('\n');
    for (size_t i = 0; i < results->row_count; i++) {
        printf("%-*s", (int)names, results->rows[i].name);
        for (size_t j = 0; j < results->column_count; j++) {
            const struct bench_column *column = &results->columns[j];
            double value = results->rows[i].values[j];
            int width = column_width(column);

            if (!isfinite(value))
                printf(" %*s", width, "-");
            else if (column->digits == BENCH_EXPONENT)
                printf(" %*.1e", width, value);
            else
                printf(" %*.*f", width, column->digits == BENCH_WHOLE ? 0 : column->digits, value);
        }
        putchar('\n');
    }
    json_decref(members);
    return output_flush(error);
}

bool bench_report(const struct bench_arguments *arguments, json_t *members,
                  const struct bench_results *results, struct error *error)
{
    json_t *document;
    char cpu[256];
    const char *isa;

    if (!device_isa(arguments->device, &isa, error)) {
        json_decref(members);
        return false;
    }
    machine_cpu(cpu, sizeof cpu);
    document = json_pack("{s:s, s:o, s:i}", "isa", isa, "cpu", json_text(cpu), "threads",
                         (int)arguments->threads);
    if (json_object_update(document, members) != 0) {
        json_decref(document);
        document = NULL;
    }
    json_decref(members);
    if (document == NULL)
        return error_set(error, "out of memory for the results");
    return (arguments->json  ? print_json
            : arguments->csv ? print_csv
                             : print_table)(document, results, error);
}

int main(int argc, char **argv)
{
    static const struct command_program program = {
        .name = BENCH_PROGRAM,
        .intro = "Usage: puzzlekv-bench COMMAND [OPTION]...\n"
                 "Measures bytes and speed of policies for the KV cache, side by side.\n"
                 "Commands: " COMMAND_NAMES ".\n",
        .names = COMMAND_NAMES,
        .commands = commands,
        .count = sizeof commands / sizeof *commands,
        .begin = begin,
        .set = set,
        .operands = operands,
        .check = check,
        .run = run,
    };
    struct bench_arguments arguments = {.kv = NULL};
    int code = command_main(&program, argc, argv, &arguments);

    free(arguments.kv);
    free(arguments.solvers);
    return code;
}
