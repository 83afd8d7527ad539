/* SPDX-License-Identifier: MIT */
/* Messages that a user types on standard input, or that a script sends there. */
#ifndef PUZZLEKV_TOOLS_MESSAGE_INPUT_H
#define PUZZLEKV_TOOLS_MESSAGE_INPUT_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

enum message_kind {
    MESSAGE_TEXT,       /* a line, lines pasted together, or a block between lines of """ */
    MESSAGE_COMMAND,    /* a line that begins with / */
    MESSAGE_END,        /* end of input */
    MESSAGE_INTERRUPTED /* Ctrl-C, SIGTERM or SIGHUP; what was typed is dropped */
};

struct message {
    enum message_kind kind;
    const char *text; /* [size], terminated; without the newline at its end */
    size_t size;
};

/* On a terminal, with prompts on standard error; lines can be edited and recalled where the build
 * has libedit and the terminal and the locale allow it. */
struct message_input;

/* One at a time. `program` is the name under which ~/.editrc knows it. */
bool message_input_open(const char *program, struct message_input **input, struct error *error);

/* Accepts NULL. */
void message_input_close(struct message_input *input);

/* Whether a user types: standard input and standard error are terminals. */
bool message_input_is_terminal(const struct message_input *input);

/* Waits for the next message that is not blank; message->text is valid until the next call. */
bool message_input_next(struct message_input *input, struct message *message, struct error *error);

#endif
