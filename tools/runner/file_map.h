/* SPDX-License-Identifier: MIT */
/* Read-only memory mapping of a whole regular file. */
#ifndef PUZZLEKV_TOOLS_RUNNER_FILE_MAP_H
#define PUZZLEKV_TOOLS_RUNNER_FILE_MAP_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"

/* The bytes stay valid and unchanged until file_map_close, as long as nobody truncates or rewrites
 * the file meanwhile. All readers of one map may run in parallel. An open map stays where it is in
 * memory. */
struct file_map {
    const unsigned char *data; /* page aligned, never NULL in an open map */
    size_t size;               /* bytes, at least 1 */
    char *path;                /* as given to file_map_open; what error texts call the file */
    struct file_map *next;     /* of all open maps */
};

/*
 * Reading a mapped file beyond an end that it no longer has raises SIGBUS, and so does a disk that
 * fails. From this call on that ends the process with the one line
 *
 *     PROGRAM: FILE: was shortened while in use, or cannot be read any more
 *
 * on standard error and exit status 1. Any other SIGBUS has its usual effect. For main(): the
 * handler belongs to the process. `program` lasts as long as that.
 */
void file_map_guard(const char *program);

/* Has that end remove the file at `path`, a result that is not whole yet. The text lasts until the
 * next call; NULL: there is none any more. */
void file_map_guard_output(const char *path);

/* Maps `path`. Directories, FIFOs, devices and empty files are errors. On failure `map` is all
 * zero, which file_map_close accepts. Maps are opened and closed by one thread at a time, while no
 * other one reads a map. */
bool file_map_open(const char *path, struct file_map *map, struct error *error);

/* Tells the kernel that the whole file is about to be read. */
void file_map_prefetch(const struct file_map *map);

/* Unmaps; `map` may be all zero, and is all zero afterwards. */
void file_map_close(struct file_map *map);

/* "folder/name", which the caller frees; NULL without memory. */
char *path_join(const char *folder, const char *name, struct error *error);

#endif
