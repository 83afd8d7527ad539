/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval generate-tasks: test rows in RULER's format, in the model's own tokens. */
#include "eval.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "options.h"
#include "output_file.h"
#include "task_prompt.h"
#include "task_rows.h"

struct counter {
    const struct task_prompter *prompter;
    struct token_list list; /* room that is used again */
};

static bool count_tokens(void *opaque, const char *input, const char *gen_prefix, size_t *tokens,
                         struct error *error)
{
    struct counter *counter = opaque;

    if (interrupt_seen())
        return error_set(error, "interrupted");
    counter->list.count = 0;
    if (!task_prompter_encode(counter->prompter, input, gen_prefix, &counter->list, error))
        return false;
    *tokens = counter->list.count;
    return true;
}

static bool write_row(const struct task_row *row, size_t index, size_t length, FILE *output)
{
    json_t *outputs = json_array();
    json_t *object;
    bool done;

    for (size_t i = 0; i < row->output_count; i++)
        json_array_append_new(outputs, json_string(row->outputs[i]));
    object =
        json_pack("{s:I, s:s, s:o, s:I, s:s}", "index", (json_int_t)index, "input", row->input,
                  "outputs", outputs, "length", (json_int_t)length, "gen_prefix", row->gen_prefix);
    done = json_object_size(object) == 5 && json_array_size(outputs) == row->output_count &&
           json_dumpf(object, output, 0) == 0 && putc('\n', output) != EOF;
    json_decref(object);
    return done;
}

bool eval_generate_tasks(const struct eval_arguments *arguments, struct error *error)
{
    struct tokenizer *tokenizer = NULL;
    struct task_prompter prompter = {NULL, NULL};
    struct counter opaque = {.prompter = &prompter};
    const struct task_counter counter = {count_tokens, &opaque};
    struct task_row row = {.input = NULL};
    struct output_file output;
    bool done = false;

    if (!eval_tokenizer_open(arguments, &tokenizer, error) ||
        !task_prompter_open(tokenizer, arguments->model, arguments->chat, &prompter, error))
        goto out;
    done = output_file_open(&output, arguments->output, error);
    for (size_t i = 0; done && i < arguments->rows; i++) {
        progress_show("%zu of %zu rows", i, arguments->rows);
        done = task_row_make(arguments->task, arguments->seed, i, arguments->length, &counter, &row,
                             error);
        if (done && !write_row(&row, i, arguments->length, output.file))
            done = error_set(error, "%s: cannot write: %s", arguments->output, strerror(errno));
        task_row_free(&row);
    }
    done = output_file_close(&output, done, error);
out:
    token_list_free(&opaque.list);
    task_prompter_close(&prompter);
    tokenizer_close(tokenizer);
    return done;
}
