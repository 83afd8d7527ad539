/* SPDX-License-Identifier: MIT */
#include "command.h"

#include <stdio.h>
#include <string.h>

#include "kv_spec.h"
#include "runner/file_map.h"

enum wish { WISH_RUN, WISH_HELP, WISH_VERSION };

static const struct command *find_command(const struct command_program *program, const char *name)
{
    for (size_t i = 0; i < program->count; i++) {
        if (strcmp(program->commands[i].name, name) == 0)
            return &program->commands[i];
    }
    return NULL;
}

static bool is_option(const char *word, const char *letter, const char *name)
{
    return strcmp(word, letter) == 0 || strcmp(word, name) == 0;
}

static bool is_required(const struct command *command, int id)
{
    for (size_t i = 0; command->required[i] != 0; i++) {
        if (command->required[i] == id)
            return true;
    }
    return false;
}

/* Reads the command line behind the command; everything that it alone shows to be wrong fails. */
static bool read_arguments(const struct command_program *program, const struct command *command,
                           int argc, char **argv, void *arguments, enum wish *wish,
                           struct error *error)
{
    bool seen[OPTIONS_MAX] = {false};
    const char *value;
    int id;

    if (!program->begin(command, (size_t)argc, arguments, error))
        return false;
    for (;;) {
        if (!options_next(&command->table, argc, argv, &id, &value, error))
            return false;
        if (id == OPTION_END)
            break;
        if (id == OPTION_HELP || id == OPTION_VERSION) {
            *wish = id == OPTION_HELP ? WISH_HELP : WISH_VERSION;
            return true;
        }
        if (!program->set(arguments, id, value, error))
            return false;
        for (size_t row = 0; row < command->table.count; row++)
            seen[row] = seen[row] || command->table.rows[row].id == id;
    }
    if (!program->operands(command, argc, argv, arguments, error))
        return false;
    for (size_t row = 0; row < command->table.count; row++) {
        const struct option_row *option = &command->table.rows[row];

        if (!seen[row] && is_required(command, option->id))
            return error_set(error, "--%s %s: is missing; --help shows the usage", option->name,
                             option->argument);
    }
    return program->check(command, arguments, error);
}

static bool takes_kv(const struct command *command)
{
    for (size_t i = 0; i < command->table.count; i++) {
        if (strcmp(command->table.rows[i].name, "kv") == 0)
            return true;
    }
    return false;
}

/* Of all commands if it is NULL. */
static bool print_help(const struct command_program *program, const struct command *command,
                       struct error *error)
{
    if (command != NULL)
        return options_help(&command->table, error) && (!takes_kv(command) || kv_spec_help(error));
    fputs(program->intro, stdout);
    for (size_t i = 0; i < program->count; i++) {
        putchar('\n');
        if (!options_help(&program->commands[i].table, error))
            return false;
    }
    return kv_spec_help(error);
}

static bool grant(const struct command_program *program, const struct command *command,
                  enum wish wish, char **argv, void *arguments, struct error *error)
{
    bool done;

    if (wish == WISH_HELP)
        return print_help(program, command, error);
    if (wish == WISH_VERSION)
        return options_version(program->name, error);
    machine_calm_threads(argv);
    interrupt_catch();
    file_map_guard(program->name);
    done = program->run(command, arguments, error);
    progress_clear();
    return done;
}

int command_main(const struct command_program *program, int argc, char **argv, void *arguments)
{
    const char *word = argc > 1 ? argv[1] : "";
    const struct command *command = find_command(program, word);
    enum wish wish = WISH_RUN;
    struct error error;
    int code = EXIT_DONE;

    machine_hold_standard_files(program->name);
    machine_start_blas(program->name);
    if (command != NULL) {
        if (!read_arguments(program, command, argc - 1, argv + 1, arguments, &wish, &error))
            code = EXIT_USAGE;
    } else if (is_option(word, "-h", "--help")) {
        wish = WISH_HELP;
    } else if (is_option(word, "-V", "--version")) {
        wish = WISH_VERSION;
    } else {
        if (argc > 1)
            error_set(&error, "%.40s: unknown command; there are: %s", word, program->names);
        else
            error_set(&error, "COMMAND: is missing; there are: %s", program->names);
        code = EXIT_USAGE;
    }
    if (code == EXIT_DONE && !grant(program, command, wish, argv, arguments, &error))
        code = interrupt_seen() ? EXIT_INTERRUPTED : EXIT_FAILED;
    if (code != EXIT_DONE)
        error_print(program->name, &error);
    return code;
}
