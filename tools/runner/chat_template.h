/* SPDX-License-Identifier: MIT */
/* What can be read off the text of a chat template (Jinja) without running it. */
#ifndef PUZZLEKV_TOOLS_RUNNER_CHAT_TEMPLATE_H
#define PUZZLEKV_TOOLS_RUNNER_CHAT_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"

/* Sets *constant to a copy of what the template writes between the first `begin` (looked for from
 * `from` on) that a constant follows and `stop` (NULL: the end of that constant), or to NULL if
 * there is none. Fails on memory only. */
bool template_constant(const char *template, const char *from, const char *begin, const char *stop,
                       char **constant, struct error *error);

/* Sets *code to the tags of the template in one spelling, one after the other: no comments, no
 * space outside of strings, strings in '...', a.b for a['b']. NULL if the template writes text
 * between its tags. Fails on memory only. */
bool template_code(const char *template, char **code, struct error *error);

/* A sum that a template writes, as "{{ '[INST] ' + message.content|trim }}". */
enum term_kind {
    TERM_TEXT,    /* a constant */
    TERM_BOS,     /* bos_token */
    TERM_EOS,     /* eos_token */
    TERM_SYSTEM,  /* system_message */
    TERM_CONTENT, /* content, message.content */
    TERM_TRIMMED, /* the same with .strip() or |trim */
    TERM_OTHER
};

#define MAX_TERMS     8
#define MAX_TERM_TEXT 32 /* of a longer constant there is the beginning, as a TERM_OTHER */

struct term {
    enum term_kind kind;
    char text[MAX_TERM_TEXT]; /* of a constant; else empty */
};

/* Reads the next sum that template_code's `*code` writes, and moves *code behind it. Returns the
 * number of terms (those after MAX_TERMS are not read); 0 at the end. */
size_t template_next_output(const char **code, struct term terms[MAX_TERMS]);

#endif
