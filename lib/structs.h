/* SPDX-License-Identifier: MIT */
/* Public structs that begin with their size: callers have those of the header that they were
 * compiled against, older or newer than this library. */
#ifndef PUZZLEKV_LIB_STRUCTS_H
#define PUZZLEKV_LIB_STRUCTS_H

#include "message.h"

#include <stddef.h>

/* More than any version's struct has, so that a size never set is not taken for a newer one. */
#define STRUCT_BYTES_MOST 4096

struct public_struct {
    const char *name;
    size_t oldest_bytes; /* its size in 0.1.0 */
    size_t bytes;        /* its size in this version */
};

/* The entry of `type`, whose last field in 0.1.0 was `field`. */
#define PUBLIC_STRUCT(type, field)                                                                 \
    {                                                                                              \
        .name = #type, .oldest_bytes = offsetof(type, field) + sizeof(((type *)0)->field),         \
        .bytes = sizeof(type)                                                                      \
    }

extern const struct public_struct structs_config;
extern const struct public_struct structs_footprint;
extern const struct public_struct structs_step_io;
extern const struct public_struct structs_page_info;
extern const struct public_struct structs_stats;
extern const struct public_struct structs_session;
extern const struct public_struct structs_session_info;

/* Whether the size of a caller's struct, which is not NULL, is one that a version may have.
 * Errors: PKV_ERROR_ARGUMENT. */
pkv_status structs_check(const struct public_struct *type, const void *theirs,
                         struct message *message);

/*
 * Copies a caller's struct. Fields behind its end become 0; so must be what it has behind the end
 * of this version's. `ours` then says that it has this version's size.
 * Errors: PKV_ERROR_ARGUMENT.
 */
pkv_status structs_read(const struct public_struct *type, const void *theirs, void *ours,
                        struct message *message);

/* Fills a caller's struct, which has been checked, to its end: with `ours`, then with 0. Its size
 * stays. */
void structs_write(const struct public_struct *type, const void *ours, void *theirs);

#endif
