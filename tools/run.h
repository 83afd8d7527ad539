/* SPDX-License-Identifier: MIT */
/* puzzlekv-run: what its parts share. */
#ifndef PUZZLEKV_TOOLS_RUN_H
#define PUZZLEKV_TOOLS_RUN_H

#include <jansson.h>
#include <puzzlekv.h>

#include <stdbool.h>
#include <stddef.h>

#include "error.h"
#include "generate.h"
#include "kv_spec.h"
#include "options.h"
#include "runner/chat.h"
#include "runner/conversation.h"
#include "runner/model.h"
#include "runner/sampler.h"
#include "runner/tokenizer.h"

#define RUN_PROGRAM "puzzlekv-run"

enum prompt_format { FORMAT_OF_MODEL, FORMAT_CHAT, FORMAT_RAW };

/* The command line, checked. */
struct run_arguments {
    const char *model;
    const char *prompt, *file; /* at most one of them; exactly one unless interactive */
    bool interactive;
    size_t predict; /* SIZE_MAX: as many as there is room for */
    const char *kv; /* as typed */
    struct kv_spec spec;
    bool cuda;
    unsigned threads;
    pkv_dtype dtype;
    size_t ctx; /* 0: the default */
    bool exact;
    struct sampler_options sampling;
    enum prompt_format format;
    const char *system;
    const char *session; /* NULL: none */
    const char **stops;  /* [stop_count], allocated */
    size_t stop_count;
    bool stats, json, help, version;
};

struct run {
    const struct run_arguments *arguments;
    struct kv_spec spec; /* resolved for this model */
    struct model *model;
    struct tokenizer *tokenizer;
    struct chat *chat;
    bool raw; /* prompts are text that the model continues */
    struct conversation *conversation;
    struct text prompt; /* no data: there is none */
    struct generator generator;
    size_t reused_tokens; /* of the prompt, from the session */
};

/* Talks with the user, after the answer to the first question if there is one in the generator,
 * until one of them ends; *code is then EXIT_DONE or EXIT_INTERRUPTED. */
bool run_chat(struct run *run, enum exit_code *code, struct error *error);

/* ---- The session, arguments->session -------------------------------------------------------- */

/* How many tokens the session says it has; 0 where there is none yet. Fails if the file is being
 * read, or is none that can be loaded. */
bool run_session_tokens(const struct run *run, size_t *tokens, struct error *error);

/* Loads the session of that many tokens, if any, into the open generator, whose store is empty and
 * has room for them, and keeps what the prompt begins with, but for its last token. */
bool run_session_load(struct run *run, const struct token_list *prompt, size_t tokens,
                      struct error *error);

/* Saves what is in the cache. */
bool run_session_save(const struct run *run, struct error *error);

/* ---- Results --------------------------------------------------------------------------------- */

/* The last answer and the cache in numbers, on standard error. */
bool run_print_stats(const struct run *run, struct error *error);

/* The same and the answer as the JSON document. */
bool run_print_document(const struct run *run, struct error *error);

#endif
