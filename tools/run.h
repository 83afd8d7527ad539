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
#include "runner/cuda_device.h"
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
    enum device_choice backend;
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
    struct kv_spec spec;   /* resolved for this model */
    struct device *device; /* NULL: the CPU */
    struct model *model;
    struct tokenizer *tokenizer;
    struct chat *chat;
    bool raw; /* prompts are text that the model continues */
    struct conversation *conversation;
    struct text prompt; /* no data: there is none */
    struct generator generator;
    pkv_session_info session; /* what it says of itself; all 0: there is none yet */
    size_t reused_tokens;     /* of the prompt, from the session */
};

/* Talks with the user, after the answer to the first question if there is one in the generator,
 * until one of them ends; *code is then EXIT_DONE or EXIT_INTERRUPTED. */
bool run_chat(struct run *run, enum exit_code *code, struct error *error);

/* ---- The session, arguments->session -------------------------------------------------------- */

/* Reads what the session says of itself, if it is there. Fails if the file is being read, or is
 * none that can be loaded. */
bool run_session_open(struct run *run, struct error *error);

/* Loads the session, if it is there, into the open generator, whose store is empty and has room for
 * it. A chat's conversation, which is empty, becomes the one that is in the session. */
bool run_session_load(struct run *run, struct error *error);

/* Keeps what the prompt begins with, but for its last token. */
bool run_session_keep(struct run *run, const struct token_list *prompt, struct error *error);

/* Saves what is in the cache, and the conversation. */
bool run_session_save(const struct run *run, struct error *error);

/* ---- Results --------------------------------------------------------------------------------- */

/* The last answer and the cache in numbers, on standard error. */
bool run_print_stats(const struct run *run, struct error *error);

/* The same and the answer as the JSON document. */
bool run_print_document(const struct run *run, struct error *error);

#endif
