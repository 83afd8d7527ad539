/* SPDX-License-Identifier: MIT */
/* The table of policies, and what holds for every store. */
#include "policy.h"

#include <stdlib.h>

/* clang-format off */
const struct policy *const policies[] = {
    &policy_puzzle,
    &policy_puzzle_int4,
    &policy_raw,
    &policy_static,
    &policy_int4,
    &policy_int3,
    &policy_global_svd,
    &policy_xkv,
    &policy_h2o,
    &policy_streaming,
    &policy_snapkv,
    &policy_kivi,
    &policy_palu,
    &policy_ojakv,
};
/* clang-format on */

const size_t policy_count = sizeof policies / sizeof *policies;

size_t policy_element_bytes(pkv_dtype dtype)
{
    return dtype == PKV_F32 ? 4 : 2;
}

size_t policy_raw_bytes(const struct model *model, pkv_dtype dtype, size_t tokens)
{
    return model->layer_count * model->kv_heads * tokens * 2 * model->head_dim *
           policy_element_bytes(dtype);
}

bool kv_store_open(const struct kv_spec *spec, const struct kv_store_options *options,
                   struct kv_store **store, struct error *error)
{
    struct kv_store_options full = *options;

    *store = NULL;
    if (full.max_step_tokens == 0)
        full.max_step_tokens = full.max_tokens;
    if (!spec->policy->open(spec, &full, store, error))
        return false;
    (*store)->policy = spec->policy;
    (*store)->options = full;
    return true;
}

void kv_store_close(struct kv_store *store)
{
    if (store != NULL)
        store->operations->close(store);
}

bool kv_store_begin(struct kv_store *store, size_t count, struct error *error)
{
    const struct kv_store_options *options = &store->options;

    if (count > options->max_step_tokens)
        return error_set(error, "KV cache: a step of %zu tokens is longer than %zu", count,
                         options->max_step_tokens);
    if (count > options->max_tokens - store->tokens)
        return error_set(error, "KV cache: no room for %zu tokens behind %zu; it holds %zu", count,
                         store->tokens, options->max_tokens);
    if (store->operations->begin != NULL && !store->operations->begin(store, count, error))
        return false;
    store->step = count;
    return true;
}

bool kv_store_layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    return store->operations->layer(store, io, error);
}

bool kv_store_replay(struct kv_store *store)
{
    return store->operations->replay != NULL && store->operations->replay(store);
}

bool kv_store_end(struct kv_store *store, struct error *error)
{
    if (store->operations->end != NULL && !store->operations->end(store, error)) {
        kv_store_abort(store);
        return false;
    }
    store->tokens += store->step;
    store->step = 0;
    return true;
}

void kv_store_abort(struct kv_store *store)
{
    if (store->step > 0 && store->operations->abort != NULL)
        store->operations->abort(store);
    store->step = 0;
}

bool kv_store_rewind(struct kv_store *store, size_t tokens, struct error *error)
{
    if (tokens >= store->tokens)
        return true;
    if (!store->operations->rewind(store, &tokens, error))
        return false;
    store->tokens = tokens;
    return true;
}

size_t kv_store_tokens(const struct kv_store *store)
{
    return store->tokens;
}

bool kv_store_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    *stats = (struct kv_stats){
        .tokens = store->tokens,
        .raw_bytes = policy_raw_bytes(store->options.model, store->options.dtype, store->tokens)};
    return store->operations->stats(store, stats, error);
}

size_t kv_store_retained(const struct kv_store *store, size_t layer, size_t kv_head,
                         size_t *positions)
{
    if (store->operations->retained != NULL)
        return store->operations->retained(store, layer, kv_head, positions);
    for (size_t i = 0; i < store->tokens; i++)
        positions[i] = i;
    return store->tokens;
}
