/* SPDX-License-Identifier: MIT */
/* A file that a command writes: whole, or not at all. */
#define _GNU_SOURCE /* mkostemp */
#include "output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runner/file_map.h"
#include "runner/read_files.h"

bool output_file_check(const char *path, struct error *error)
{
    const char *input = read_files_find(path);

    return input == NULL || error_set(error, "%s: is the input %s", path, input);
}

/* With the permissions of the file that it replaces, or those of any new one. */
static bool open_temporary(struct output_file *output, const struct stat *old, struct error *error)
{
    const size_t size = strlen(output->path) + sizeof ".XXXXXX";
    mode_t mode = 0666;
    int file;

    output->temporary = malloc(size);
    if (output->temporary == NULL)
        return error_set(error, "out of memory");
    snprintf(output->temporary, size, "%s.XXXXXX", output->path);
    file = mkostemp(output->temporary, O_CLOEXEC);
    if (file < 0) {
        error_set(error, "%s: %s", output->path, strerror(errno));
        free(output->temporary);
        output->temporary = NULL;
        return false;
    }
    file_map_guard_output(output->temporary);
    if (old != NULL) {
        mode = old->st_mode & 0777;
    } else {
        const mode_t mask = umask(0);

        umask(mask);
        mode &= ~mask;
    }
    output->file = fdopen(file, "wb");
    if (output->file == NULL)
        close(file);
    if (output->file == NULL || fchmod(file, mode) != 0)
        return error_set(error, "%s: %s", output->path, strerror(errno));
    return true;
}

bool output_file_open(struct output_file *output, const char *path, struct error *error)
{
    struct stat old;
    const bool exists = stat(path, &old) == 0;

    *output = (struct output_file){.name = path};
    if (!output_file_check(path, error))
        return false;
    if (exists && !S_ISREG(old.st_mode)) {
        output->file = fopen(path, "wbe");
        return output->file != NULL || error_set(error, "%s: %s", path, strerror(errno));
    }
    output->path = exists ? realpath(path, NULL) : strdup(path);
    if (output->path == NULL)
        return error_set(error, "%s: %s", path, strerror(errno));
    return open_temporary(output, exists ? &old : NULL, error);
}

bool output_file_try(const char *path, struct error *error)
{
    struct output_file output;
    struct stat status;
    bool opened;

    /* Opening a FIFO may wait, or end what reads it. */
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))
        return true;
    opened = output_file_open(&output, path, error);
    output_file_close(&output, false, NULL);
    return opened;
}

bool output_file_close(struct output_file *output, bool whole, struct error *error)
{
    if (output->file != NULL && fclose(output->file) != 0 && whole)
        whole = error_set(error, "%s: %s", output->name, strerror(errno));
    if (output->temporary != NULL) {
        if (whole && rename(output->temporary, output->path) != 0)
            whole = error_set(error, "%s: %s", output->name, strerror(errno));
        if (!whole)
            unlink(output->temporary);
        file_map_guard_output(NULL);
    }
    free(output->temporary);
    free(output->path);
    *output = (struct output_file){.name = output->name};
    return whole;
}
