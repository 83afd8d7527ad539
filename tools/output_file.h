/* SPDX-License-Identifier: MIT */
/* A file that a command writes: whole, or not at all. */
#ifndef PUZZLEKV_TOOLS_OUTPUT_FILE_H
#define PUZZLEKV_TOOLS_OUTPUT_FILE_H

#include <stdbool.h>
#include <stdio.h>

#include "error.h"

/* A regular file appears under its name only once it is whole: half a file would look like a whole
 * one. */
struct output_file {
    FILE *file;
    const char *name; /* as asked for */
    char *path;       /* where a regular file is to be; links followed */
    char *temporary;  /* beside it; NULL: written in place, as devices are */
};

/* Fails if `path` is a file that the process has read. */
bool output_file_check(const char *path, struct error *error);

/* Opens what is to be `path`, which outlives it, after that check; closed in any case. */
bool output_file_open(struct output_file *output, const char *path, struct error *error);

/* Fails where output_file_open() would, and leaves nothing there; so that a long run need not end
 * with that. */
bool output_file_try(const char *path, struct error *error);

/* Closes the file. Puts it into its place if it is `whole`, else removes it. Returns `whole`, or
 * false with an error. */
bool output_file_close(struct output_file *output, bool whole, struct error *error);

#endif
