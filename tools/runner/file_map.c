/* SPDX-License-Identifier: MIT */
/* Read-only memory mapping of a whole regular file. */
#include "file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct file_map *open_maps;

static void remove_from_list(const struct file_map *map)
{
    struct file_map **link = &open_maps;

    while (*link != map)
        link = &(*link)->next;
    *link = map->next;
}

bool file_map_open(const char *path, struct file_map *map, struct error *error)
{
    struct stat status;
    void *data;
    bool done = false;
    int file;

    *map = (struct file_map){0};
    /* O_NONBLOCK: opening a FIFO that nobody writes to must fail below, not wait here. */
    file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0)
        return error_set(error, "%s: %s", path, strerror(errno));
    if (fstat(file, &status) != 0) {
        error_set(error, "%s: %s", path, strerror(errno));
        goto out;
    }
    if (S_ISDIR(status.st_mode)) {
        error_set(error, "%s: is a directory, expected a regular file", path);
        goto out;
    }
    if (!S_ISREG(status.st_mode)) {
        error_set(error, "%s: is not a regular file", path);
        goto out;
    }
    if (status.st_size <= 0) {
        error_set(error, "%s: is empty", path);
        goto out;
    }
    if ((uintmax_t)status.st_size > SIZE_MAX / 2) {
        error_set(error, "%s: %jd bytes do not fit the address space", path,
                  (intmax_t)status.st_size);
        goto out;
    }
    map->path = strdup(path);
    if (map->path == NULL) {
        error_set(error, "%s: out of memory", path);
        goto out;
    }
    data = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (data == MAP_FAILED) {
        error_set(error, "%s: cannot be mapped: %s", path, strerror(errno));
        free(map->path);
        map->path = NULL;
        goto out;
    }
    map->data = data;
    map->size = (size_t)status.st_size;
    map->device = status.st_dev;
    map->inode = status.st_ino;
    map->next = open_maps;
    open_maps = map;
    done = true;
out:
    close(file);
    return done;
}

void file_map_prefetch(const struct file_map *map)
{
    /* Only advice: without it the pages come in one fault at a time. */
    (void)posix_madvise((void *)map->data, map->size, POSIX_MADV_WILLNEED);
}

const char *file_map_using(const char *path)
{
    const struct file_map *map = open_maps;
    struct stat status;

    if (stat(path, &status) != 0)
        return NULL;
    while (map != NULL && (map->device != status.st_dev || map->inode != status.st_ino))
        map = map->next;
    return map != NULL ? map->path : NULL;
}

void file_map_close(struct file_map *map)
{
    if (map->data != NULL) {
        remove_from_list(map);
        munmap((void *)map->data, map->size);
    }
    free(map->path);
    *map = (struct file_map){0};
}
