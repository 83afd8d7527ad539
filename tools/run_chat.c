/* SPDX-License-Identifier: MIT */
/* puzzlekv-run -i: a conversation with the user, with one cache for all of it. */
#include <stdio.h>
#include <string.h>

#include "message_input.h"
#include "run.h"

struct session {
    struct run *run;
    struct message_input *input;
    bool terminal;
    bool resumed; /* what is in the cache is from the session */
    bool unsaved; /* the last answer is not in the session */
    bool done;
    enum exit_code code; /* once done */
};

static void say(const char *text)
{
    fprintf(stderr, "%s: %s\n", RUN_PROGRAM, text);
}

/* ---- Answers --------------------------------------------------------------------------------- */

/* What the user should know of how an answer ended. */
static bool report(const struct session *session, struct error *error)
{
    const struct run *run = session->run;
    const struct generator *generator = &run->generator;

    if (generator->generation.finish == FINISH_LENGTH)
        fprintf(stderr, "%s: the answer ends early: it has the %zu tokens of -n\n", RUN_PROGRAM,
                run->arguments->predict);
    if (generator->generation.finish == FINISH_FULL)
        fprintf(stderr,
                "%s: the answer ends early: the context of %zu tokens is full; /reset begins a "
                "new conversation\n",
                RUN_PROGRAM, generator->context);
    return !run->arguments->stats || run_print_stats(run, error);
}

/* The conversation goes on where it cannot be kept. */
static void save(struct session *session)
{
    struct error error;

    if (session->run->arguments->session == NULL)
        return;
    session->unsaved = !run_session_save(session->run, &error);
    if (session->unsaved)
        say(error.text);
}

/* Answers the question whose ids are there; the first `kept` of them go back if it comes to no
 * answer. */
static bool answer(struct session *session, size_t kept, struct error *error)
{
    struct run *run = session->run;
    struct generator *generator = &run->generator;
    const struct generation *generation = &generator->generation;

    if (!generator_answer(generator, run->arguments->predict, error))
        return false;
    if (generation->finish == FINISH_INTERRUPTED && !(session->terminal && interrupt_forget())) {
        session->done = true;
        session->code = EXIT_INTERRUPTED;
    }
    if (generation->generated_tokens == 0) {
        say("interrupted while reading the message, which is taken back");
        conversation_take_back(run->conversation);
        generator->tokens.count = kept;
        return true;
    }
    /* The template has its own end of an answer. */
    if (generation->finish == FINISH_END)
        generator->tokens.count--;
    if (!report(session, error) || !conversation_answer(run->conversation, generator->answer.text,
                                                        generator->answer.size, error))
        return false;
    save(session);
    return true;
}

static bool ask(struct session *session, const char *text, size_t length, struct error *error)
{
    struct run *run = session->run;
    struct generator *generator = &run->generator;
    size_t kept;

    if (!text_check_utf8("message", text, length, error) ||
        !conversation_ask(run->conversation, text, length, &generator->tokens, &kept, error)) {
        say(error->text);
        return true;
    }
    if (!model_check_ids(run->model, run->arguments->model, generator->tokens.ids + kept,
                         generator->tokens.count - kept, error) ||
        !generator_rewind(generator, kept, error))
        return false;
    run->reused_tokens = session->resumed ? kv_store_tokens(generator->store) : 0;
    session->resumed = false;
    if (generator->tokens.count > generator->context) {
        fprintf(stderr,
                "%s: the message does not fit: with it the conversation has %zu tokens, and the "
                "context %zu; /reset begins a new one\n",
                RUN_PROGRAM, generator->tokens.count, generator->context);
        conversation_take_back(run->conversation);
        generator->tokens.count = kept;
        return true;
    }
    return answer(session, kept, error);
}

/* ---- Commands -------------------------------------------------------------------------------- */

static bool command_reset(struct session *session, struct error *error)
{
    session->resumed = false;
    conversation_clear(session->run->conversation);
    if (!generator_restart(&session->run->generator, error))
        return false;
    say("the conversation is forgotten");
    return true;
}

static bool command_stats(struct session *session, struct error *error)
{
    return run_print_stats(session->run, error);
}

static bool command_quit(struct session *session, struct error *error)
{
    (void)error;
    session->done = true;
    return true;
}

static bool command_help(struct session *session, struct error *error);

static const struct command {
    const char *name, *help;
    bool (*run)(struct session *session, struct error *error);
} commands[] = {
    {"/reset", "forget the conversation", command_reset},
    {"/stats", "show the last answer and the cache in numbers", command_stats},
    {"/help", "show this", command_help},
    {"/quit", "end, as the end of input (Ctrl-D) does", command_quit},
};

#define COMMANDS (sizeof commands / sizeof *commands)

static bool command_help(struct session *session, struct error *error)
{
    (void)session;
    (void)error;
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(stderr, "  %-8s %s\n", commands[i].name, commands[i].help);
    fputs("A line is a message. A line of \"\"\" begins one of several lines, or one that begins\n"
          "with /, and another such line ends it. Ctrl-C interrupts an answer.\n",
          stderr);
    return true;
}

static bool obey(struct session *session, const struct message *message, struct error *error)
{
    size_t length = strcspn(message->text, " \t");

    for (size_t i = 0; i < COMMANDS; i++) {
        if (strlen(commands[i].name) == length &&
            memcmp(commands[i].name, message->text, length) == 0 &&
            message->text[length + strspn(message->text + length, " \t")] == '\0')
            return commands[i].run(session, error);
    }
    error_set(error, "%.40s: no such command; /help lists them", message->text);
    say(error->text);
    return true;
}

/* ---- The conversation ------------------------------------------------------------------------ */

/* At a prompt one Ctrl-C drops what was typed, and the second ends the program. */
static bool interrupted(struct session *session, bool again)
{
    if (session->terminal && !again && interrupt_forget()) {
        say("Ctrl-C again, Ctrl-D or /quit ends");
        return true;
    }
    session->done = true;
    session->code = EXIT_INTERRUPTED;
    return true;
}

static void greet(const struct session *session)
{
    size_t turns;

    if (session->run->prompt.size == 0)
        say("/help lists the commands");
    if (!session->resumed)
        return;
    (void)conversation_turns(session->run->conversation, &turns);
    if (turns > 0)
        fprintf(stderr, "%s: a conversation of %zu turns goes on; /reset begins a new one\n",
                RUN_PROGRAM, turns);
    else if (!session->run->raw)
        say("there is no conversation in the session; a new one begins");
}

static bool converse(struct session *session, struct error *error)
{
    const struct text *prompt = &session->run->prompt;
    struct message message = {.kind = MESSAGE_TEXT};
    bool going = true;

    if (session->terminal)
        greet(session);
    if (prompt->size > 0)
        going = ask(session, prompt->data, prompt->size, error);
    while (going && !session->done) {
        enum message_kind previous = message.kind;

        if (!message_input_next(session->input, &message, error))
            return false;
        switch (message.kind) {
        case MESSAGE_TEXT:
            going = ask(session, message.text, message.size, error);
            break;
        case MESSAGE_COMMAND:
            going = obey(session, &message, error);
            break;
        case MESSAGE_END:
            session->done = true;
            break;
        case MESSAGE_INTERRUPTED:
            going = interrupted(session, previous == MESSAGE_INTERRUPTED);
            break;
        }
    }
    return going;
}

bool run_chat(struct run *run, enum exit_code *code, struct error *error)
{
    struct session session = {.run = run, .resumed = run->generator.tokens.count > 0};
    bool done;

    if (!message_input_open(RUN_PROGRAM, &session.input, error))
        return false;
    session.terminal = message_input_is_terminal(session.input);
    if (session.terminal)
        interrupt_outlive();
    done = converse(&session, error);
    message_input_close(session.input);
    *code = session.unsaved && session.code == EXIT_DONE ? EXIT_FAILED : session.code;
    return done;
}
