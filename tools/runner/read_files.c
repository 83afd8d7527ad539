/* SPDX-License-Identifier: MIT */
#include "read_files.h"

#include <stdlib.h>
#include <string.h>

struct read_file {
    struct read_file *next;
    dev_t device;
    ino_t inode;
    char path[];
};

/* What a process has read is a matter of the process: it outlives whoever reads. */
static struct read_file *read_files;

static const struct read_file *find(const struct stat *status)
{
    const struct read_file *file = read_files;

    while (file != NULL && (file->device != status->st_dev || file->inode != status->st_ino))
        file = file->next;
    return file;
}

bool read_files_add(const struct stat *status, const char *path, struct error *error)
{
    const size_t size = strlen(path) + 1;
    struct read_file *file;

    if (find(status) != NULL)
        return true;
    file = malloc(sizeof *file + size);
    if (file == NULL)
        return error_set(error, "%s: out of memory", path);
    file->next = read_files;
    file->device = status->st_dev;
    file->inode = status->st_ino;
    memcpy(file->path, path, size);
    read_files = file;
    return true;
}

const char *read_files_find(const char *path)
{
    const struct read_file *file;
    struct stat status;

    if (stat(path, &status) != 0)
        return NULL;
    file = find(&status);
    return file != NULL ? file->path : NULL;
}
