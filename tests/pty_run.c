/* SPDX-License-Identifier: MIT */
/* Runs a command on a terminal of its own and types there, for the shell tests:
 *     pty_run TRANSCRIPT COMMAND [ARGUMENT]... < SCRIPT
 * What the terminal shows goes to TRANSCRIPT. Each line of SCRIPT is one of
 *     expect TEXT    waits until the terminal shows TEXT behind what was expected before
 *     send TEXT      types TEXT; \r is Enter, \e Escape, \c C the key C with Ctrl
 * Then it waits for the command's end, and exits as that does. */
#define _GNU_SOURCE /* posix_openpt, memmem */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_MS 120000

static int terminal;
static FILE *transcript;
static char shown[1 << 20]; /* what `transcript` has */
static size_t shown_length, expected_to;

static void give_up(const char *what, const char *text)
{
    fprintf(stderr, "pty_run: %s %s; the terminal shows:\n%.*s\n", what, text, (int)shown_length,
            shown);
    exit(99);
}

/* False at the end of the terminal. */
static int read_more(const char *waiting_for)
{
    struct pollfd ready = {.fd = terminal, .events = POLLIN};
    ssize_t got;

    if (poll(&ready, 1, PATIENCE_MS) <= 0)
        give_up("waited too long for", waiting_for);
    if (shown_length == sizeof shown)
        give_up("too much output before", waiting_for);
    got = read(terminal, shown + shown_length, sizeof shown - shown_length);
    if (got <= 0)
        return 0;
    fwrite(shown + shown_length, 1, (size_t)got, transcript);
    shown_length += (size_t)got;
    return 1;
}

static void expect(const char *text)
{
    const char *found;

    while ((found = memmem(shown + expected_to, shown_length - expected_to, text, strlen(text))) ==
           NULL) {
        if (!read_more(text))
            give_up("the command ended before", text);
    }
    expected_to = (size_t)(found - shown) + strlen(text);
}

static void type(const char *text)
{
    char keys[4096];
    size_t count = 0;

    for (const char *c = text; *c != '\0' && count < sizeof keys; c++) {
        if (c[0] != '\\')
            keys[count++] = *c;
        else if (*++c == 'r')
            keys[count++] = '\r';
        else if (*c == 'e')
            keys[count++] = '\033';
        else if (*c == 'c' && c[1] != '\0')
            keys[count++] = *++c & 0x1f;
        else
            give_up("cannot type", text);
    }
    if (write(terminal, keys, count) != (ssize_t)count)
        give_up("cannot type", text);
}

static void run_command(char **command)
{
    const struct winsize size = {.ws_row = 24, .ws_col = 80};
    const char *name = ptsname(terminal);
    int slave;

    setsid();
    slave = name != NULL ? open(name, O_RDWR) : -1;
    if (slave < 0 || ioctl(slave, TIOCSCTTY, 0) != 0 || ioctl(slave, TIOCSWINSZ, &size) != 0 ||
        dup2(slave, 0) < 0 || dup2(slave, 1) < 0 || dup2(slave, 2) < 0)
        _exit(98);
    close(slave);
    close(terminal);
    execvp(*command, command);
    _exit(97);
}

int main(int argc, char **argv)
{
    char line[4096];
    int status;
    pid_t child;

    if (argc < 3) {
        fputs("usage: pty_run TRANSCRIPT COMMAND [ARGUMENT]... < SCRIPT\n", stderr);
        return 2;
    }
    transcript = fopen(argv[1], "w");
    terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (transcript == NULL || terminal < 0 || grantpt(terminal) != 0 || unlockpt(terminal) != 0) {
        perror("pty_run");
        return 99;
    }
    setbuf(transcript, NULL);
    child = fork();
    if (child == 0)
        run_command(argv + 2);
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "expect ", 7) == 0)
            expect(line + 7);
        else if (strncmp(line, "send ", 5) == 0)
            type(line + 5);
        else if (*line != '\0')
            give_up("not a command:", line);
    }
    while (read_more("the end"))
        ;
    fclose(transcript);
    if (waitpid(child, &status, 0) != child)
        return 99;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
