/* SPDX-License-Identifier: MIT */
/* Programs that have commands, each with options of its own. */
#ifndef PUZZLEKV_TOOLS_COMMAND_H
#define PUZZLEKV_TOOLS_COMMAND_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"
#include "options.h"

struct command {
    const char *name;
    struct option_table table;
    int required[5]; /* ids of options, 0 after the last */
    const void *own; /* what the program knows of it */
};

/* The functions are called in their order; each that fails ends the program. All but run() see the
 * command line alone. */
struct command_program {
    const char *name;
    const char *intro; /* of --help */
    const char *names; /* of the commands, for messages */
    const struct command *commands;
    size_t count;

    /* Sets what holds without any option; there will be fewer options and operands than `words`. */
    bool (*begin)(const struct command *command, size_t words, void *arguments,
                  struct error *error);
    bool (*set)(void *arguments, int id, const char *value, struct error *error);
    bool (*operands)(const struct command *command, int argc, char **argv, void *arguments,
                     struct error *error);
    /* What options must and must not do together; those that are required were given. */
    bool (*check)(const struct command *command, void *arguments, struct error *error);
    bool (*run)(const struct command *command, void *arguments, struct error *error);
};

#define COMMAND_TABLE(usage, summary, rows)                                                        \
    {                                                                                              \
        usage, summary, rows, sizeof(rows) / sizeof *(rows)                                        \
    }

/* What main() does and returns. `arguments` are the program's own. */
int command_main(const struct command_program *program, int argc, char **argv, void *arguments);

#endif
