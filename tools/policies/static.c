/* SPDX-License-Identifier: MIT */
/*
 * static: one contiguous buffer, no pages; what Hugging Face calls StaticCache.
 *
 * Bytes: layers kv_heads T 2 d b, all of it K and V as they are.
 */
#include "dense_rows.h"
#include "policy.h"

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
    stats->reserved_bytes = ((const struct dense_store *)store)->rows.bytes;
    return true;
}

static const struct kv_store_operations operations = {
    .close = dense_store_close,
    .layer = dense_store_layer,
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
    struct dense_store *s = dense_store_open(sizeof *s, &operations, options, error);

    (void)spec;
    if (s == NULL)
        return false;
    *store = &s->store;
    return true;
}

const struct policy policy_static = {
    .name = "static",
    .summary = "one contiguous buffer, no pages",
    .bytes = count_bytes,
    .open = open_static,
};
