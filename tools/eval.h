/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval: what its commands share. */
#ifndef PUZZLEKV_TOOLS_EVAL_H
#define PUZZLEKV_TOOLS_EVAL_H

#include <jansson.h>
#include <puzzlekv.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ablation.h"
#include "error.h"
#include "kv_spec.h"
#include "policies/policy.h"
#include "runner/model.h"
#include "runner/token_list.h"
#include "runner/tokenizer.h"
#include "runner/cuda_device.h"
#include "runner/transformer.h"
#include "task_rows.h"
#include "task_score.h"

#define EVAL_PROGRAM "puzzlekv-eval"

struct eval_kv {
    const char *text; /* as typed */
    struct kv_spec spec;
};

/* The command line, checked; a command reads what its table of options offers. */
struct eval_arguments {
    const char *model;
    const char *file;     /* -f, or the second operand of calibrate: text */
    const char *ids_file; /* --tokens FILE */
    const char *output;   /* -o */
    size_t tokens;        /* --tokens N */
    size_t prefill;       /* >= 1, < tokens */
    struct eval_kv *kv;   /* [kv_count], in the order typed */
    size_t kv_count;
    const char *ablation;
    char ablation_texts[ABLATION_MOST][ABLATION_TEXT_BYTES]; /* the first --kv, once typed for us */
    enum task task;                                          /* --task */
    size_t length;                                           /* --length */
    size_t rows;                                             /* --rows */
    size_t sequences;                                        /* --sequences */
    uint64_t seed;                                           /* --seed */
    bool chat;                                               /* --chat */
    pkv_dtype dtype;
    unsigned threads;
    enum device_choice backend;
    struct device *device;   /* what it chose; NULL: the CPU */
    const char *rows_file;   /* the second operand of tasks */
    enum task_metric metric; /* --metric */
    size_t max_new;          /* --max-new */
    const char *plot;        /* --plot */
    bool resume;
    bool csv;
    bool json;
};

/* The commands. Each prints its result and fails with "interrupted" after Ctrl-C. */
bool eval_info(const struct eval_arguments *arguments, struct error *error);
bool eval_tokenize(const struct eval_arguments *arguments, struct error *error);
bool eval_logits(const struct eval_arguments *arguments, struct error *error);
bool eval_ppl(const struct eval_arguments *arguments, struct error *error);
bool eval_ranks(const struct eval_arguments *arguments, struct error *error);
bool eval_tasks(const struct eval_arguments *arguments, struct error *error);
bool eval_generate_tasks(const struct eval_arguments *arguments, struct error *error);
bool eval_calibrate(const struct eval_arguments *arguments, struct error *error);

/* The model's tokenizer; warns if there is doubt about it. */
bool eval_tokenizer_open(const struct eval_arguments *arguments, struct tokenizer **tokenizer,
                         struct error *error);

/* Appends the ids of the text, behind a BOS if the model asks for one, to `list`: at least --tokens
 * of them, where that is given, which is at most the model's context. */
bool eval_read_text(const struct eval_arguments *arguments, const struct model *model,
                    struct token_list *list, struct error *error);

/* A transformer that stops at Ctrl-C. */
bool eval_transformer_open(const struct eval_arguments *arguments, const struct model *model,
                           struct transformer **transformer, struct error *error);

/* One policy's cache. */
struct eval_cache {
    struct kv_spec spec; /* resolved for the model */
    struct kv_store *store;
};

/* `tokens` in all, at most `step_tokens` in one step. On failure nothing is left open. */
bool eval_cache_open(const struct eval_arguments *arguments, const struct model *model,
                     const struct kv_spec *spec, size_t tokens, size_t step_tokens,
                     struct eval_cache *cache, struct error *error);

/* Accepts one that is all zero. */
void eval_cache_close(struct eval_cache *cache);

/* Prints the command's document: {"model", "isa", "cpu", "threads", "dtype"}, then the members of
 * `members`, which is freed; NULL (no memory when it was built) fails. */
bool eval_print_document(const struct eval_arguments *arguments, json_t *members,
                         struct error *error);

/* Columns that the longest --kv takes in a table; at least the heading's two. */
int eval_kv_width(const struct eval_arguments *arguments);

#endif
