/* SPDX-License-Identifier: MIT */
/* Read-only memory mapping of a whole regular file. */
#include "file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "read_files.h"

#if defined __has_feature
#if __has_feature(address_sanitizer)
#define UNDER_ASAN
#endif
#elif defined __SANITIZE_ADDRESS__
#define UNDER_ASAN
#endif
#ifdef UNDER_ASAN
#include <sanitizer/asan_interface.h>
#endif

/* What the signal handler looks at: a handler has no other way to get at anything. */
static struct file_map *_Atomic open_maps;
static const char *guarded_program;
static const char *_Atomic guarded_output;
static atomic_flag is_reported = ATOMIC_FLAG_INIT;
static bool clears_line; /* standard error is a terminal and may have a progress line */

static void add_to_list(struct file_map *map)
{
    map->next = atomic_load(&open_maps);
    atomic_store(&open_maps, map);
}

static void remove_from_list(const struct file_map *map)
{
    struct file_map *other = atomic_load(&open_maps);

    if (other == map) {
        atomic_store(&open_maps, map->next);
        return;
    }
    while (other->next != map)
        other = other->next;
    other->next = map->next;
}

/* Appends what fits. Safe in a signal handler. */
static size_t append(char *line, size_t length, size_t size, const char *text)
{
    for (; *text != '\0' && length < size; text++)
        line[length++] = *text;
    return length;
}

static void report_lost_file(int number, siginfo_t *info, void *context)
{
    static const char clear[] = "\r\033[K";
    const uintptr_t address = (uintptr_t)info->si_addr;
    const struct file_map *map = info->si_code > 0 ? atomic_load(&open_maps) : NULL;
    char line[4096 + 512]; /* room for the longest path */
    const char *output;
    size_t start = 0, length;

    (void)context;
    while (map != NULL && address - (uintptr_t)map->data >= map->size)
        map = map->next;
    if (map == NULL) {
        /* The instruction that raised it does so again; one that was sent is sent again. */
        signal(number, SIG_DFL);
        if (info->si_code <= 0)
            raise(number);
        return;
    }
    /* Threads may meet the lost file at the same time: one of them speaks and ends the process. */
    while (atomic_flag_test_and_set(&is_reported))
        pause();
    if (clears_line) {
        memcpy(line, clear, sizeof clear - 1);
        start = sizeof clear - 1;
    }
    length = append(line, start, sizeof line - 80, guarded_program);
    length = append(line, length, sizeof line - 80, ": ");
    length = append(line, length, sizeof line - 80, map->path);
    length = append(line, length, sizeof line - 1,
                    ": was shortened while in use, or cannot be read any more");
    line[length] = '\0';
    error_clean(line + start);
    length = start + strlen(line + start);
    line[length++] = '\n';
    output = atomic_load(&guarded_output);
    if (output != NULL)
        unlink(output);
    while (write(STDERR_FILENO, line, length) < 0 && errno == EINTR)
        ;
    _exit(EXIT_FAILURE);
}

void file_map_guard(const char *program)
{
    struct sigaction action = {.sa_sigaction = report_lost_file, .sa_flags = SA_SIGINFO};

    guarded_program = program;
    clears_line = isatty(STDERR_FILENO);
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

void file_map_guard_output(const char *path)
{
    atomic_store(&guarded_output, path);
}

/* AddressSanitizer knows where memory that was allocated ends, but not that a file ends within its
 * last page. */
static void guard_end(const struct file_map *map, bool guarded)
{
#ifdef UNDER_ASAN
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t rest = (page - map->size % page) % page;

    (guarded ? __asan_poison_memory_region : __asan_unpoison_memory_region)(map->data + map->size,
                                                                            rest);
#else
    (void)map, (void)guarded;
#endif
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
    if (!read_files_add(&status, path, error))
        goto out;
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
    guard_end(map, true);
    add_to_list(map);
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

void file_map_close(struct file_map *map)
{
    if (map->data != NULL) {
        remove_from_list(map);
        guard_end(map, false);
        munmap((void *)map->data, map->size);
    }
    free(map->path);
    *map = (struct file_map){0};
}

char *path_join(const char *folder, const char *name, struct error *error)
{
    const size_t size = strlen(folder) + strlen(name) + 2;
    const bool slash = folder[0] != '\0' && folder[strlen(folder) - 1] == '/';
    char *path = malloc(size);

    if (path == NULL)
        error_set(error, "%s: out of memory", folder);
    else
        snprintf(path, size, "%s%s%s", folder, slash ? "" : "/", name);
    return path;
}
