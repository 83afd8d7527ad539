/* SPDX-License-Identifier: MIT */
/* What the programs share: command lines, text files, Ctrl-C, progress, JSON, the machine. */
#ifndef PUZZLEKV_TOOLS_OPTIONS_H
#define PUZZLEKV_TOOLS_OPTIONS_H

#include <jansson.h>
#include <puzzlekv.h>

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

enum exit_code {
    EXIT_DONE = 0,
    EXIT_FAILED = 1,
    EXIT_USAGE = 2, /* the command line alone shows that it cannot work */
    EXIT_INTERRUPTED = 130
};

/* Prints "PROGRAM: TEXT" to standard error. */
void error_print(const char *program, const struct error *error);

/* Prints "PROGRAM: PATH: warning: TEXT" to standard error, with --json too. */
void warning_print(const char *program, const char *path, const char *text);

/* ---- Command lines --------------------------------------------------------------------------- */

/* An option has the id of its letter, or one from OPTION_LONG_ONLY up if it has none. */
#define OPTION_LONG_ONLY 256

enum { OPTION_END = -1, OPTION_HELP = 'h', OPTION_VERSION = 'V' };

struct option_row {
    int id;
    const char *name;     /* without its dashes */
    const char *argument; /* as --help calls it; NULL: takes none */
    const char *help;     /* one or more lines */
};

/* The last rows of every table. */
#define OPTION_ROWS_COMMON                                                                         \
    {OPTION_HELP, "help", NULL, "print this help and exit"},                                       \
    {                                                                                              \
        OPTION_VERSION, "version", NULL,                                                           \
            "print version, instruction set, backends and\nBLAS, and exit"                         \
    }

/* At most this many rows. */
#define OPTIONS_MAX 48

/* A program, or one command of a program. */
struct option_table {
    const char *usage;   /* "puzzlekv-run MODEL ..." */
    const char *summary; /* a sentence */
    const struct option_row *rows;
    size_t count;
};

/* The next option of main's argc and argv in *id, its argument (or NULL) in *argument; OPTION_END
 * after the last. Fails on what is not in the table. A process reads one command line only. */
bool options_next(const struct option_table *table, int argc, char **argv, int *id,
                  const char **argument, struct error *error);

/* After OPTION_END: takes the `count` operands, be it none, that there must be, called `names` in
 * messages. */
bool options_operands(int argc, char **argv, const char *const *names, size_t count,
                      const char **operands, struct error *error);

/* Prints usage, summary and options to standard output. */
bool options_help(const struct option_table *table, struct error *error);

/* Prints what --version says to standard output. Fails if the library cannot be used. */
bool options_version(const char *program, struct error *error);

/* Checked numbers; `what` begins the error. The whole of `text` is a decimal number from `least` to
 * `most`. */
bool number_size(const char *what, const char *text, size_t least, size_t most, size_t *value,
                 struct error *error);
bool number_real(const char *what, const char *text, double least, double most, double *value,
                 struct error *error);

/* "bf16", "f16" or "f32". */
bool option_dtype(const char *text, pkv_dtype *dtype, struct error *error);
const char *dtype_name(pkv_dtype dtype);

/* -t: 1 .. 1024. */
bool option_threads(const char *text, unsigned *threads, struct error *error);

/* ---- Text files ------------------------------------------------------------------------------ */

struct text {
    const char *name; /* for messages: the path, or "standard input" */
    char *data;       /* terminated; bytes of value 0 may also be inside */
    size_t size;
};

/* Reads a regular file, or standard input if `path` is "-", of at most TEXT_MAX_BYTES. The caller
 * frees text->data; it is NULL on failure. */
#define TEXT_MAX_BYTES ((size_t)64 << 20)
bool text_read(const char *path, struct text *text, struct error *error);

/* Fails, naming the offset of the first wrong byte, if the text is not UTF-8. */
bool text_check_utf8(const char *what, const char *data, size_t size, struct error *error);

/* ---- Ctrl-C and progress --------------------------------------------------------------------- */

/* From now on the first Ctrl-C (or SIGTERM, or SIGHUP unless it is ignored) only makes
 * interrupt_seen() true; the second kills. */
void interrupt_catch(void);
bool interrupt_seen(void);

/* For a program that goes on after Ctrl-C: from now on no number of them kills, and of the system
 * calls that wait only the like of poll(2) end at one. */
void interrupt_outlive(void);

/* Forgets a Ctrl-C, so that interrupt_seen() is false again; true if it could, for the other
 * signals are not forgotten. */
bool interrupt_forget(void);

/* Replaces the progress line on standard error if that is a terminal. */
void progress_show(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Removes it; before anything else is printed. */
void progress_clear(void);

/* ---- JSON ------------------------------------------------------------------------------------ */

/* A real that is read back as it was; null if it is not finite. */
json_t *json_finite(double value);

/* A string of any bytes; what is not UTF-8 becomes U+FFFD. NULL without memory. */
json_t *json_bytes(const char *bytes, size_t size);

/* The same of a terminated text, such as a path or a --kv, which need not be UTF-8. */
json_t *json_text(const char *text);

/* Prints `document` and a newline to standard output and frees it; NULL (no memory when it was
 * built) fails. */
bool json_print(json_t *document, struct error *error);

/* Prints a field of a CSV file (RFC 4180) to standard output, quoted where it has to be. */
void csv_text(const char *text);

/* Flushes standard output; fails if anything printed to it was lost. */
bool output_flush(struct error *error);

/* ---- The machine ----------------------------------------------------------------------------- */

/* Keeps the numbers of standard input, output and error from going to files that are opened later,
 * where they are closed (>&-); what is printed would end up in those. First of all in main; ends
 * the process, with an error, where it cannot. */
void machine_hold_standard_files(const char *program);

/* Has OpenMP's threads sleep soon when they wait, unless the environment says how they wait; before
 * anything is read or computed, for it may start the program over. By default they spin for
 * milliseconds, so that on a busy machine each parallel region waits for a time slice of another
 * program. */
void machine_calm_threads(char **argv);

/* Takes BLAS's threads away from it, before anything is computed. Ends the process, with an error,
 * if the limit on its address space has no room for what BLAS has already started. */
void machine_start_blas(const char *program);

/* Cores (not their hardware threads) that this process may run on; >= 1. */
unsigned machine_threads(void);

/* The processor's name, or the architecture's where the system does not tell. */
void machine_cpu(char *name, size_t size);

/* Bytes that the system says it can give this process without swapping; SIZE_MAX if it does not
 * say. */
size_t machine_free_memory(void);

/* The instruction set that the library's CPU backend uses; a constant. Fails as opening a cache
 * would, e.g. if PUZZLEKV_ISA asks for one that is not there. */
bool machine_isa(const char **isa, struct error *error);

/* Seconds of a clock that only runs forward. */
double machine_seconds(void);

#endif
