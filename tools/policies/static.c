/* SPDX-License-Identifier: MIT */
/*
 * static: one contiguous buffer, no pages; what Hugging Face calls StaticCache.
 *
 * Bytes: layers kv_heads T 2 d b, all of it K and V as they are.
 */
#include <stdlib.h>

#include "dense_rows.h"
#include "policy.h"

struct static_store {
    struct kv_store store;
    struct dense_rows rows;
};

static struct static_store *from_store(struct kv_store *store)
{
    return (struct static_store *)store;
}

static void close_static(struct kv_store *store)
{
    dense_rows_close(&from_store(store)->rows);
    free(store);
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct dense_rows *rows = &from_store(store)->rows;

    return dense_rows_append(rows, io, store->tokens, error) &&
           dense_rows_attend(rows, io, 0, store->tokens, error);
}

static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    (void)store;
    (void)tokens;
    (void)error;
    return true;
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    (void)error;
    stats->payload_bytes = stats->raw_bytes;
    stats->reserved_bytes = from_store(store)->rows.bytes;
    return true;
}

static const struct kv_store_operations operations = {
    .close = close_static,
    .layer = layer,
    .rewind = rewind_to,
    .stats = read_stats,
};

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    (void)spec;
    (void)error;
    *bytes = policy_raw_bytes(size->model, size->dtype, size->tokens);
    return true;
}

static bool open_static(const struct kv_spec *spec, const struct kv_store_options *options,
                        struct kv_store **store, struct error *error)
{
    struct static_store *s = calloc(1, sizeof *s);

    (void)spec;
    if (s == NULL)
        return error_set(error, "out of memory for the cache");
    s->store.operations = &operations;
    if (!dense_rows_open(&s->rows, options, error)) {
        free(s);
        return false;
    }
    *store = &s->store;
    return true;
}

const struct policy policy_static = {
    .name = "static",
    .summary = "one contiguous buffer, no pages",
    .bytes = count_bytes,
    .open = open_static,
};
