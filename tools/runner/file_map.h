/* SPDX-License-Identifier: MIT */
/* Read-only memory mapping of a whole regular file. */
#ifndef PUZZLEKV_TOOLS_RUNNER_FILE_MAP_H
#define PUZZLEKV_TOOLS_RUNNER_FILE_MAP_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"

/* The bytes stay valid and unchanged until file_map_close, as long as nobody truncates or rewrites
 * the file meanwhile. All readers of one map may run in parallel. */
struct file_map {
    const unsigned char *data; /* page aligned, never NULL in an open map */
    size_t size;               /* bytes, at least 1 */
    char *path;                /* as given to file_map_open; what error texts call the file */
};

/* Maps `path`. Directories, FIFOs, devices and empty files are errors. On failure `map` is all
 * zero, which file_map_close accepts. */
bool file_map_open(const char *path, struct file_map *map, struct error *error);

/* Tells the kernel that the whole file is about to be read. */
void file_map_prefetch(const struct file_map *map);

/* Unmaps; `map` may be all zero, and is all zero afterwards. */
void file_map_close(struct file_map *map);

#endif
