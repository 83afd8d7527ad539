/* SPDX-License-Identifier: MIT */
/* Sessions in files: written whole or not at all. */
#define _GNU_SOURCE /* mkostemp, realpath */
#include "cache.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A part of a page is a few KiB. */
#define BUFFER_BYTES 32768

struct session_file {
    int file;
    size_t used; /* reading: of `there` bytes */
    size_t there;
    int error; /* errno of the first failure */
    unsigned char buffer[BUFFER_BYTES];
};

static bool write_all(struct session_file *file, const unsigned char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(file->file, data, bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            file->error = n < 0 ? errno : EIO;
            return false;
        }
        data += n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool flush(struct session_file *file)
{
    size_t bytes = file->used;

    file->used = 0;
    return write_all(file, file->buffer, bytes);
}

static int write_some(void *opaque, const void *data, size_t bytes)
{
    struct session_file *file = opaque;

    if (bytes > sizeof file->buffer - file->used && !flush(file))
        return -1;
    if (bytes > sizeof file->buffer)
        return write_all(file, data, bytes) ? 0 : -1;
    memcpy(file->buffer + file->used, data, bytes);
    file->used += bytes;
    return 0;
}

static ptrdiff_t read_some(void *opaque, void *data, size_t bytes)
{
    struct session_file *file = opaque;

    while (file->used == file->there) {
        ssize_t n = read(file->file, file->buffer, sizeof file->buffer);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            file->error = errno;
        if (n <= 0)
            return n;
        file->used = 0;
        file->there = (size_t)n;
    }
    if (bytes > file->there - file->used)
        bytes = file->there - file->used;
    memcpy(data, file->buffer + file->used, bytes);
    file->used += bytes;
    return (ptrdiff_t)bytes;
}

static pkv_status fail_system(struct message *message, const char *what, int error)
{
    return fail(message, PKV_ERROR_IO, "%s: %s", what, strerror(error));
}

/* ---- Saving ---------------------------------------------------------------------------------- */

/* The entry itself has to reach the disk too, where a file system can tell. `path` is changed. */
static bool sync_folder(char *path)
{
    int folder = open(dirname(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool done = folder >= 0 && (fsync(folder) == 0 || errno == EINVAL);
    int error = errno;

    if (folder >= 0)
        close(folder);
    errno = error;
    return done;
}

/* Writes `temporary`, an open file, and makes it `path`. */
static pkv_status save_over(pkv_seq *seq, const pkv_session *session, struct session_file *file,
                            const char *temporary, const char *path, const struct stat *old)
{
    const pkv_writer writer = {write_some, file};
    struct message *message = &seq->cache->message;
    pkv_status status = pkv_seq_save(seq, session, &writer);

    if (status == PKV_OK && !flush(file))
        status = PKV_ERROR_IO;
    if (status == PKV_ERROR_IO)
        return fail_system(message, "write", file->error);
    if (status != PKV_OK)
        return status;
    if (old != NULL && fchmod(file->file, old->st_mode & 0777) != 0)
        return fail_system(message, "chmod", errno);
    if (fsync(file->file) != 0)
        return fail_system(message, "fsync", errno);
    if (rename(temporary, path) != 0)
        return fail_system(message, "rename", errno);
    return PKV_OK;
}

static pkv_status save_beside(pkv_seq *seq, const pkv_session *session, const char *path,
                              const struct stat *old)
{
    struct pkv_cache *cache = seq->cache;
    struct session_file file = {.used = 0};
    size_t bytes = strlen(path) + sizeof ".XXXXXX";
    char *temporary = memory_allocate(&cache->memory, bytes, 1);
    pkv_status status;

    if (temporary == NULL)
        return fail(&cache->message, PKV_ERROR_MEMORY, "path: out of memory");
    snprintf(temporary, bytes, "%s.XXXXXX", path);
    file.file = mkostemp(temporary, O_CLOEXEC);
    if (file.file < 0) {
        status = fail_system(&cache->message, "create", errno);
        goto out;
    }
    status = save_over(seq, session, &file, temporary, path, old);
    if (close(file.file) != 0 && status == PKV_OK)
        status = fail_system(&cache->message, "close", errno);
    if (status != PKV_OK)
        unlink(temporary);
    else if (!sync_folder(temporary))
        status = fail_system(&cache->message, "fsync of the folder", errno);
out:
    memory_release(&cache->memory, temporary);
    return status;
}

pkv_status pkv_seq_save_file(pkv_seq *seq, const pkv_session *session, const char *path)
{
    struct stat old;

    if (seq == NULL)
        return PKV_ERROR_ARGUMENT;

    struct message *message = &seq->cache->message;

    if (path == NULL || *path == '\0')
        return fail(message, PKV_ERROR_ARGUMENT, "path: none");
    if (stat(path, &old) != 0) {
        if (errno != ENOENT)
            return fail_system(message, "stat", errno);
        if (lstat(path, &old) == 0)
            return fail(message, PKV_ERROR_IO, "path: it is a link to nothing");
        return save_beside(seq, session, path, NULL);
    }
    if (!S_ISREG(old.st_mode))
        return fail(message, PKV_ERROR_IO, "path: it is not a regular file");

    struct memory *memory = &seq->cache->memory;
    char *real = memory_allocate(memory, PATH_MAX, 1);
    pkv_status status;

    if (real == NULL)
        return fail(message, PKV_ERROR_MEMORY, "path: out of memory");
    if (realpath(path, real) == NULL)
        status = fail_system(message, "realpath", errno);
    else
        status = save_beside(seq, session, real, &old);
    memory_release(memory, real);
    return status;
}

/* ---- Loading --------------------------------------------------------------------------------- */

static pkv_status open_file(struct session_file *file, const char *path, struct message *message)
{
    struct stat there;

    if (path == NULL || *path == '\0')
        return fail(message, PKV_ERROR_ARGUMENT, "path: none");
    /* A pipe would make it wait. */
    file->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->file < 0)
        return fail_system(message, "open", errno);
    if (fstat(file->file, &there) != 0 || !S_ISREG(there.st_mode)) {
        close(file->file);
        return fail(message, PKV_ERROR_IO, "path: it is not a regular file");
    }
    return PKV_OK;
}

pkv_status pkv_seq_load_file(pkv_cache *cache, pkv_session *session, const char *path,
                             pkv_seq **seq)
{
    struct session_file file = {.used = 0};
    const pkv_reader reader = {read_some, &file};
    unsigned char beyond;

    if (cache == NULL)
        return PKV_ERROR_ARGUMENT;
    if (seq == NULL)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "seq: NULL");
    *seq = NULL;

    pkv_status status = open_file(&file, path, &cache->message);

    if (status != PKV_OK)
        return status;
    status = pkv_seq_load(cache, session, &reader, seq);
    if (status == PKV_OK && read_some(&file, &beyond, 1) != 0) {
        pkv_seq_close(*seq);
        *seq = NULL;
        status = fail(&cache->message, PKV_ERROR_FORMAT, "end: the file goes on behind it");
    }
    if (status == PKV_ERROR_IO)
        fail_system(&cache->message, "read", file.error);
    close(file.file);
    return status;
}

pkv_status pkv_session_info_of_file(const char *path, pkv_session_info *info, char *message)
{
    struct session_file file = {.used = 0};
    const pkv_reader reader = {read_some, &file};
    struct message text = {""};
    pkv_status status = open_file(&file, path, &text);

    if (status != PKV_OK) {
        if (message != NULL)
            snprintf(message, PKV_MESSAGE_BYTES, "%s", text.text);
        return status;
    }
    status = pkv_session_info_of(&reader, info, message);
    if (status == PKV_ERROR_IO && message != NULL)
        snprintf(message, PKV_MESSAGE_BYTES, "read: %s", strerror(file.error));
    close(file.file);
    return status;
}
