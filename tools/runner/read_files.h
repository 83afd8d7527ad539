/* SPDX-License-Identifier: MIT */
/* Which files the process has read, so that it writes over none of them. */
#ifndef PUZZLEKV_TOOLS_RUNNER_READ_FILES_H
#define PUZZLEKV_TOOLS_RUNNER_READ_FILES_H

#include <stdbool.h>
#include <sys/stat.h>

#include "../error.h"

/* Remembers the file of `status`, which messages call `path`, until the process ends. For one
 * thread at a time. */
bool read_files_add(const struct stat *status, const char *path, struct error *error);

/* What the file at `path`, by whatever name, was called when it was read; NULL: it was not. */
const char *read_files_find(const char *path);

#endif
