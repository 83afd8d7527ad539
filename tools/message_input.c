/* SPDX-License-Identifier: MIT */
/* Messages that a user types on standard input, or that a script sends there. */
#include <config.h>
#include "message_input.h"

#include <errno.h>
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#ifdef HAVE_LIBEDIT
#include <histedit.h>
#endif

#include "options.h"

#define FENCE "\"\"\""

struct message_input {
    bool terminal;
    const char *prompt;
    char *line; /* of getline */
    size_t line_capacity;
    char *text; /* the message [size], terminated */
    size_t size, capacity;
#ifdef HAVE_LIBEDIT
    EditLine *editor; /* NULL: lines are read as they come */
    History *history;
#endif
};

enum line { LINE_READ, LINE_END, LINE_INTERRUPTED, LINE_FAILED };

/* False if a signal came first. It ends this wait and no other call, see interrupt_outlive. */
static bool wait_for_input(void)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};

    return !interrupt_seen() && poll(&input, 1, -1) >= 0;
}

/* ---- Editing --------------------------------------------------------------------------------- */

#ifdef HAVE_LIBEDIT

#define HISTORY_LINES 500

/* What a terminal sends around pasted text once it was asked to, and how it is asked. */
#define PASTE_BEGIN "\033[200~"
#define PASTE_END   L"\033[201~"
#define PASTE_ON    "\033[?2004h"
#define PASTE_OFF   "\033[?2004l"

static char *get_prompt(EditLine *editor)
{
    struct message_input *input;

    el_get(editor, EL_CLIENTDATA, &input);
    return (char *)input->prompt;
}

/* In place of libedit's own, which does not give up at a signal. */
static int read_character(EditLine *editor, wchar_t *character)
{
    mbstate_t state = {0};

    for (;;) {
        char byte;
        ssize_t got;
        size_t used;

        if (!wait_for_input()) {
            if (interrupt_seen())
                return -1;
            /* Continued after Ctrl-Z: the shell has set the terminal's modes. */
            el_set(editor, EL_PREP_TERM, 0);
            el_set(editor, EL_PREP_TERM, 1);
            el_set(editor, EL_REFRESH);
            continue;
        }
        got = read(STDIN_FILENO, &byte, 1);
        if (got <= 0)
            return (int)got;
        used = mbrtowc(character, &byte, 1, &state);
        if (used == (size_t)-1)
            state = (mbstate_t){0};
        else if (used != (size_t)-2)
            return 1;
    }
}

/* Inserts what is pasted, newlines included, as one text to go on editing. */
static unsigned char insert_paste(EditLine *editor, int key)
{
    const size_t end = wcslen(PASTE_END);
    size_t length = 0, capacity = 0;
    wchar_t *text = NULL, last = L'\0';
    unsigned char result = CC_EOF;

    (void)key;
    while (length < end || wmemcmp(text + length - end, PASTE_END, end) != 0) {
        wchar_t character;

        if (length + 1 >= capacity) {
            wchar_t *more = realloc(text, (2 * capacity + 1024) * sizeof *text);

            if (more == NULL)
                goto out;
            text = more;
            capacity = 2 * capacity + 1024;
        }
        if (el_wgetc(editor, &character) != 1)
            goto out;
        /* Terminals send the key Enter for a newline. */
        if (character != L'\n' || last != L'\r')
            text[length++] = character == L'\r' ? L'\n' : character;
        last = character;
    }
    length -= end;
    while (length > 0 && text[length - 1] == L'\n')
        length--;
    text[length] = L'\0';
    result = length == 0 || el_winsertstr(editor, text) == 0 ? CC_REFRESH : CC_ERROR;
out:
    free(text);
    return result;
}

/* libedit takes text in the encoding of the locale; messages are UTF-8. */
static bool use_utf8(void)
{
    setlocale(LC_CTYPE, "");
    return strcmp(nl_langinfo(CODESET), "UTF-8") == 0 || setlocale(LC_CTYPE, "C.UTF-8") != NULL;
}

static void note_continued(int signal)
{
    (void)signal;
}

static void close_editor(struct message_input *input)
{
    if (input->editor != NULL)
        el_end(input->editor);
    if (input->history != NULL)
        history_end(input->history);
    input->editor = NULL;
    input->history = NULL;
}

static void open_editor(struct message_input *input, const char *program)
{
    const struct sigaction continued = {.sa_handler = note_continued, .sa_flags = SA_RESTART};
    const char *type = getenv("TERM");
    HistEvent event;

    if (type == NULL || strcmp(type, "dumb") == 0 || !use_utf8())
        return;
    input->history = history_init();
    input->editor = el_init(program, stdin, stderr, stderr);
    if (input->editor == NULL || input->history == NULL) {
        close_editor(input);
        return;
    }
    history(input->history, &event, H_SETSIZE, HISTORY_LINES);
    history(input->history, &event, H_SETUNIQUE, 1);
    el_set(input->editor, EL_CLIENTDATA, input);
    el_set(input->editor, EL_PROMPT, get_prompt);
    el_set(input->editor, EL_GETCFN, read_character);
    el_set(input->editor, EL_EDITOR, "emacs");
    el_set(input->editor, EL_HIST, history, input->history);
    /* el_set's copies of the names would never be freed. */
    el_wset(input->editor, EL_ADDFN, L"insert-paste", L"Insert pasted text", insert_paste);
    el_source(input->editor, NULL);
    el_set(input->editor, EL_BIND, PASTE_BEGIN, "insert-paste", NULL);
    sigaction(SIGCONT, &continued, NULL);
}

static enum line edit_line(struct message_input *input, const char **line, size_t *length)
{
    int count;

    /* The window may have changed its size. Keys pressed from the prompt on are libedit's, which
     * by itself sets the terminal up after it. */
    el_resize(input->editor);
    el_set(input->editor, EL_PREP_TERM, 1);
    fputs(PASTE_ON, stderr);
    *line = el_gets(input->editor, &count);
    fputs(PASTE_OFF, stderr);
    if (*line == NULL || count <= 0)
        return interrupt_seen() ? LINE_INTERRUPTED : LINE_END;
    *length = (size_t)count;
    return LINE_READ;
}

static void remember(struct message_input *input)
{
    HistEvent event;

    if (input->editor != NULL)
        history(input->history, &event, H_ENTER, input->text);
}

#else

static void open_editor(struct message_input *input, const char *program)
{
    (void)input;
    (void)program;
}

static void close_editor(struct message_input *input)
{
    (void)input;
}

static void remember(struct message_input *input)
{
    (void)input;
}

#endif

/* ---- Lines ----------------------------------------------------------------------------------- */

static enum line plain_line(struct message_input *input, const char **line, size_t *length,
                            struct error *error)
{
    ssize_t got;

    if (input->terminal) {
        fputs(input->prompt, stderr);
        fflush(stderr);
        while (!wait_for_input()) {
            if (interrupt_seen())
                return LINE_INTERRUPTED;
        }
    }
    got = getline(&input->line, &input->line_capacity, stdin);
    if (got < 0) {
        if (interrupt_seen())
            return LINE_INTERRUPTED;
        if (feof(stdin))
            return LINE_END;
        error_set(error, "standard input: %s", strerror(errno));
        return LINE_FAILED;
    }
    *line = input->line;
    *length = (size_t)got;
    return LINE_READ;
}

/* A line without its newline, valid until the next one. */
static enum line next_line(struct message_input *input, const char *prompt, const char **line,
                           size_t *length, struct error *error)
{
    enum line result;

    input->prompt = prompt;
#ifdef HAVE_LIBEDIT
    if (input->editor != NULL)
        result = edit_line(input, line, length);
    else
#endif
        result = plain_line(input, line, length, error);
    if (result == LINE_READ && *length > 0 && (*line)[*length - 1] == '\n')
        --*length;
    if (result == LINE_READ && *length > 0 && (*line)[*length - 1] == '\r')
        --*length;
    if (input->terminal && (result == LINE_END || result == LINE_INTERRUPTED))
        fputc('\n', stderr);
    return result;
}

/* ---- Messages -------------------------------------------------------------------------------- */

bool message_input_open(const char *program, struct message_input **input, struct error *error)
{
    *input = calloc(1, sizeof **input);
    if (*input == NULL)
        return error_set(error, "out of memory for standard input");
    (*input)->terminal = isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    if ((*input)->terminal)
        open_editor(*input, program);
    return true;
}

void message_input_close(struct message_input *input)
{
    if (input == NULL)
        return;
    close_editor(input);
    free(input->line);
    free(input->text);
    free(input);
}

bool message_input_is_terminal(const struct message_input *input)
{
    return input->terminal;
}

static bool append(struct message_input *input, const char *text, size_t length,
                   struct error *error)
{
    if (length >= TEXT_MAX_BYTES || input->size >= TEXT_MAX_BYTES - length)
        return error_set(error, "standard input: a message is longer than %zu MiB",
                         TEXT_MAX_BYTES >> 20);
    if (input->capacity - input->size <= length) {
        size_t capacity = 2 * (input->size + length) + 1;
        char *more = realloc(input->text, capacity);

        if (more == NULL)
            return error_set(error, "standard input: out of memory");
        input->text = more;
        input->capacity = capacity;
    }
    memcpy(input->text + input->size, text, length);
    input->size += length;
    input->text[input->size] = '\0';
    return true;
}

static bool is_fence(const char *line, size_t length)
{
    return length == strlen(FENCE) && memcmp(line, FENCE, length) == 0;
}

/* The lines up to the next fence or the end of input. */
static enum line read_block(struct message_input *input, struct error *error)
{
    const char *line;
    size_t length;
    enum line result;
    bool first = true;

    input->size = 0;
    for (;;) {
        result = next_line(input, "... ", &line, &length, error);
        if (result == LINE_END || (result == LINE_READ && is_fence(line, length)))
            return first ? result : LINE_READ;
        if (result != LINE_READ)
            return result;
        if ((!first && !append(input, "\n", 1, error)) || !append(input, line, length, error))
            return LINE_FAILED;
        first = false;
    }
}

static bool is_blank(const struct message_input *input)
{
    return strspn(input->text, " \t\n") == input->size;
}

bool message_input_next(struct message_input *input, struct message *message, struct error *error)
{
    const char *line;
    size_t length;
    enum line result;

    do {
        input->size = 0;
        if (!append(input, "", 0, error))
            return false;
        result = next_line(input, "> ", &line, &length, error);
        message->kind = MESSAGE_TEXT;
        if (result == LINE_READ && is_fence(line, length)) {
            result = read_block(input, error);
        } else if (result == LINE_READ) {
            if (!append(input, line, length, error))
                return false;
            if (length > 0 && *line == '/' && memchr(line, '\n', length) == NULL)
                message->kind = MESSAGE_COMMAND;
        }
    } while (result == LINE_READ && is_blank(input));

    if (result == LINE_READ)
        remember(input);
    else
        message->kind = result == LINE_END ? MESSAGE_END : MESSAGE_INTERRUPTED;
    message->text = input->text;
    message->size = input->size;
    return result != LINE_FAILED;
}
