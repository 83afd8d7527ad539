/* SPDX-License-Identifier: MIT */
/* Public structs that begin with their size. */
#include "structs.h"

#include <string.h>

#include "numeric.h"

const struct public_struct structs_config = PUBLIC_STRUCT(pkv_config, allocator);
const struct public_struct structs_footprint = PUBLIC_STRUCT(pkv_footprint, factor_slots);
const struct public_struct structs_step_io = PUBLIC_STRUCT(pkv_step_io, lse);
const struct public_struct structs_page_info = PUBLIC_STRUCT(pkv_page_info, sharers);
const struct public_struct structs_stats = PUBLIC_STRUCT(pkv_stats, capped_pages);
const struct public_struct structs_session = PUBLIC_STRUCT(pkv_session, user_bytes);
const struct public_struct structs_session_info = PUBLIC_STRUCT(pkv_session_info, user_bytes);

static size_t bytes_of(const void *theirs)
{
    size_t bytes;

    memcpy(&bytes, theirs, sizeof bytes);
    return bytes;
}

pkv_status structs_check(const struct public_struct *type, const void *theirs,
                         struct message *message)
{
    size_t bytes = bytes_of(theirs);

    /* A compiler rounds up to the alignment, so other sizes are of no struct. */
    if (bytes < type->oldest_bytes || bytes > STRUCT_BYTES_MOST || bytes % sizeof bytes != 0)
        return fail(message, PKV_ERROR_ARGUMENT,
                    "struct_size: %zu is the size of no version's %s; it is %zu in this one", bytes,
                    type->name, type->bytes);
    return PKV_OK;
}

pkv_status structs_read(const struct public_struct *type, const void *theirs, void *ours,
                        struct message *message)
{
    pkv_status status = structs_check(type, theirs, message);

    if (status != PKV_OK)
        return status;

    size_t bytes = bytes_of(theirs);

    for (size_t i = type->bytes; i < bytes; i++) {
        if (((const unsigned char *)theirs)[i] != 0)
            return fail(message, PKV_ERROR_ARGUMENT,
                        "struct_size: %zu; in this version %s has %zu bytes, and a field behind "
                        "them is set (byte %zu)",
                        bytes, type->name, type->bytes, i);
    }
    memset(ours, 0, type->bytes);
    memcpy(ours, theirs, min_size(bytes, type->bytes));
    memcpy(ours, &type->bytes, sizeof type->bytes);
    return PKV_OK;
}

void structs_write(const struct public_struct *type, const void *ours, void *theirs)
{
    size_t bytes = bytes_of(theirs);

    memset(theirs, 0, bytes);
    memcpy(theirs, ours, min_size(bytes, type->bytes));
    memcpy(theirs, &bytes, sizeof bytes);
}
