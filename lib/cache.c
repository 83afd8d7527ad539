/* SPDX-License-Identifier: MIT */
/* Opening and closing caches, and their statistics. */
#include "backends.h"
#include "cache.h"
#include "numeric.h"
#include "structs.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct part_form cache_part(const struct pkv_cache *cache, size_t layer, size_t tokens,
                            enum page_part part)
{
    const struct geometry *geometry = &cache->geometry;
    bool is_key = part == PART_K || part == PART_K_LEFT || part == PART_K_RIGHT;

    return parts_form(part, is_key ? geometry->factors_k : geometry->factors_v, tokens,
                      geometry->head_dim,
                      is_key ? geometry->rank_k[layer] : geometry->rank_v[layer]);
}

/* Bytes of the largest thing that is read from a page at once. */
static size_t page_scratch_bytes(const struct pkv_cache *cache)
{
    const struct geometry *geometry = &cache->geometry;
    size_t length = geometry->policy.page_tokens;
    size_t most = 0;

    for (size_t layer = 0; layer < geometry->layers; layer++) {
        size_t bytes[PART_V_RIGHT + 1];
        size_t left_and_right;

        for (int part = PART_K; part <= PART_V_RIGHT; part++) {
            struct part_form form = cache_part(cache, layer, length, (enum page_part)part);

            bytes[part] = parts_bytes(&form, geometry->element_bytes);
        }
        left_and_right = bytes[PART_K_LEFT] + bytes[PART_K_RIGHT];
        if (left_and_right < bytes[PART_V_LEFT] + bytes[PART_V_RIGHT])
            left_and_right = bytes[PART_V_LEFT] + bytes[PART_V_RIGHT];
        if (most < bytes[PART_K])
            most = bytes[PART_K];
        if (most < left_and_right)
            most = left_and_right;
    }
    return most;
}

/* The configured scale, or 1 / sqrt(d). */
static float softmax_scale(const pkv_config *config)
{
    fenv_t modes;
    float scale = config->softmax_scale;

    modes_set(&modes);
    if (scale == 0)
        scale = (float)(1 / sqrt((double)config->head_dim));
    modes_restore(&modes);
    return scale;
}

/* Everything but the backend. On failure the caller frees what there is. */
static pkv_status reserve(struct pkv_cache *cache, const pkv_config *config)
{
    struct geometry *geometry = &cache->geometry;
    struct memory *memory = &cache->memory;
    const struct storage *storage = &cache->storage;

    cache->ranks = memory_allocate(memory, size_multiply(config->layers, 2), sizeof *cache->ranks);
    if (cache->ranks == NULL)
        return PKV_ERROR_MEMORY;
    for (size_t layer = 0; layer < config->layers; layer++) {
        cache->ranks[layer] = storage_rank_k(config, layer);
        cache->ranks[config->layers + layer] = storage_rank_v(config, layer);
    }

    *geometry = (struct geometry){.layers = config->layers,
                                  .query_heads = config->query_heads,
                                  .kv_heads = config->kv_heads,
                                  .head_dim = config->head_dim,
                                  .policy = storage_policy(config),
                                  .rank_k = cache->ranks,
                                  .rank_v = cache->ranks + config->layers,
                                  .factors_k = config->factors_k,
                                  .factors_v = config->factors_v,
                                  .solver = config->solver,
                                  .dtype = config->dtype,
                                  .element_bytes = storage_element_bytes(config->dtype),
                                  .softmax_scale = softmax_scale(config)};

    cache->dense_tokens =
        memory_allocate(memory, storage->dense_slots, sizeof *cache->dense_tokens);
    cache->factor_tokens =
        memory_allocate(memory, storage->factor_slots, sizeof *cache->factor_tokens);
    cache->page_scratch = memory_allocate(memory, page_scratch_bytes(cache), 1);
    if (cache->dense_tokens == NULL || cache->factor_tokens == NULL || cache->page_scratch == NULL)
        return PKV_ERROR_MEMORY;
    memset(cache->dense_tokens, 0, storage->dense_slots * sizeof *cache->dense_tokens);
    memset(cache->factor_tokens, 0, storage->factor_slots * sizeof *cache->factor_tokens);

    pkv_status status = slots_open(&cache->dense, memory, (uint32_t)storage->dense_slots);

    if (status == PKV_OK)
        status = slots_open(&cache->factor, memory, (uint32_t)storage->factor_slots);
    return status;
}

static void free_cache(struct pkv_cache *cache)
{
    struct memory memory = cache->memory;

    if (cache->backend)
        cache->ops->close(cache->backend);
    slots_close(&cache->dense, &cache->memory);
    slots_close(&cache->factor, &cache->memory);
    memory_release(&cache->memory, cache->page_scratch);
    memory_release(&cache->memory, cache->factor_tokens);
    memory_release(&cache->memory, cache->dense_tokens);
    memory_release(&cache->memory, cache->ranks);
    memory_release(&memory, cache);
}

static pkv_status open_backend(struct pkv_cache *cache, const pkv_config *config)
{
    const struct capacity capacity = {.max_sequences = cache->max_sequences,
                                      .max_tokens = cache->max_tokens,
                                      .max_step_tokens = cache->max_step_tokens,
                                      .dense_slots = cache->storage.dense_slots,
                                      .factor_slots = cache->storage.factor_slots};
    const struct placement placement = {.isa = config->isa,
                                        .threads = config->threads,
                                        .device = config->device,
                                        .stream = config->stream};

    return cache->ops->open(&cache->geometry, &capacity, &placement, &cache->memory,
                            &cache->message, &cache->backend);
}

static pkv_status open_cache(const struct backend_ops *ops, const pkv_config *config,
                             pkv_cache **result, struct message *message)
{
    struct storage storage;
    struct memory memory;
    pkv_status status = storage_of(config, &storage, message);

    if (status != PKV_OK)
        return status;
    if (config->backend != NULL && strcmp(config->backend, ops->name) != 0)
        return fail(message, PKV_ERROR_UNSUPPORTED, "backend: \"%.64s\" is not \"%s\"",
                    config->backend, ops->name);
    memory_init(&memory, &config->allocator);

    struct pkv_cache *cache = memory_allocate(&memory, 1, sizeof *cache);

    if (cache == NULL)
        return fail(message, PKV_ERROR_MEMORY, "cache: out of memory");
    *cache = (struct pkv_cache){.memory = memory,
                                .ops = ops,
                                .storage = storage,
                                .max_sequences = config->max_sequences,
                                .max_tokens = config->max_tokens,
                                .max_step_tokens = config->max_step_tokens ? config->max_step_tokens
                                                                           : config->max_tokens};
    cache->step.cache = cache;
    cache->submits = (config->step_flags & PKV_STEP_ASYNC) != 0 && config->stream != NULL &&
                     ops->step_submit != NULL;

    status = reserve(cache, config);
    if (status != PKV_OK)
        fail(&cache->message, status, "cache: out of memory");
    else
        status = open_backend(cache, config);
    if (status != PKV_OK) {
        *message = cache->message;
        cache->backend = NULL;
        free_cache(cache);
        return status;
    }
    *result = cache;
    return PKV_OK;
}

pkv_status cache_open_with(const struct backend_ops *ops, const pkv_config *theirs,
                           pkv_cache **cache, char *message)
{
    struct message text = {""};
    pkv_config config;
    pkv_status status = PKV_ERROR_ARGUMENT;

    if (cache == NULL) {
        fail(&text, status, "cache: NULL");
    } else {
        *cache = NULL;
        status = storage_read_config(theirs, &config, &text);
        if (status == PKV_OK)
            status = open_cache(ops, &config, cache, &text);
    }
    if (message)
        snprintf(message, PKV_MESSAGE_BYTES, "%s", text.text);
    return status;
}

/* Opens a cache on the backend of that name. */
static pkv_status open_named(const pkv_config *config, const char *name, pkv_cache **cache,
                             char *text)
{
    pkv_config named = *config;
    const struct backend_ops *ops;
    struct message message = {""};
    pkv_status status = backends_find(name, &ops, &message);

    named.backend = name;
    if (status == PKV_OK)
        return cache_open_with(ops, &named, cache, text);
    if (cache)
        *cache = NULL;
    if (text)
        snprintf(text, PKV_MESSAGE_BYTES, "%s", message.text);
    return status;
}

pkv_status pkv_cache_open(const pkv_config *theirs, pkv_cache **cache, char *message)
{
    struct message text;
    pkv_config config;
    pkv_status status;

    /* cache_open_with() says what is wrong with it. */
    if (storage_read_config(theirs, &config, &text) != PKV_OK)
        return cache_open_with(&backend_cpu, theirs, cache, message);
    if (config.backend == NULL || strcmp(config.backend, "auto") != 0)
        return open_named(&config, config.backend, cache, message);
    status = open_named(&config, "cuda", cache, message);
    return status == PKV_ERROR_UNSUPPORTED ? open_named(&config, "cpu", cache, message) : status;
}

const char *pkv_cache_backend(const pkv_cache *cache)
{
    return cache->ops->name;
}

void pkv_cache_close(pkv_cache *cache)
{
    if (cache == NULL)
        return;
    pkv_step_abort(&cache->step);
    cache_settle(cache, true);
    while (cache->first)
        pkv_seq_close(cache->first);
    free_cache(cache);
}

const char *pkv_cache_message(const pkv_cache *cache)
{
    return cache->message.text;
}

const char *pkv_cache_isa(const pkv_cache *cache)
{
    return cache->ops->isa(cache->backend);
}

struct slots *cache_pool(struct pkv_cache *cache, uint32_t kind)
{
    return kind == SLOT_FACTOR ? &cache->factor : &cache->dense;
}

void cache_release_page(struct pkv_cache *cache, struct page page)
{
    if (page.kind != SLOT_NONE)
        slots_release(cache_pool(cache, page.kind), page.slot);
}

size_t cache_tokens(const struct pkv_cache *cache)
{
    size_t tokens = 0;

    for (const struct pkv_seq *seq = cache->first; seq; seq = seq->next)
        tokens = size_add(tokens, seq->tokens);
    return tokens;
}

static uint16_t *tokens_of_slot(struct pkv_cache *cache, struct page page)
{
    return page.kind == SLOT_FACTOR ? &cache->factor_tokens[page.slot]
                                    : &cache->dense_tokens[page.slot];
}

static void add_page(pkv_stats *stats, const struct pkv_cache *cache, struct page page,
                     pkv_page_state state, size_t tokens)
{
    size_t bytes = storage_page_bytes(&cache->storage, page.kind, tokens);

    stats->pages[state]++;
    stats->bytes[state] += bytes;
    stats->payload_bytes += bytes;
    stats->raw_bytes += tokens * cache->storage.token_bytes;
}

/* Adds every slot in use once, as the sequence that uses most of it sees it. */
static void add_slots(pkv_stats *stats, struct pkv_cache *cache)
{
    const struct page_policy *policy = &cache->geometry.policy;

    for (const struct pkv_seq *seq = cache->first; seq; seq = seq->next) {
        for (size_t p = 0; p < pages_count(policy, seq->tokens); p++) {
            uint16_t *most = tokens_of_slot(cache, seq->table[p]);
            size_t tokens = pages_tokens(policy, seq->tokens, p);

            if (*most < tokens)
                *most = (uint16_t)tokens;
        }
    }
    for (const struct pkv_seq *seq = cache->first; seq; seq = seq->next) {
        for (size_t p = 0; p < pages_count(policy, seq->tokens); p++) {
            uint16_t *most = tokens_of_slot(cache, seq->table[p]);
            size_t tokens = pages_tokens(policy, seq->tokens, p);

            if (*most != tokens)
                continue;
            *most = 0;
            add_page(stats, cache, seq->table[p],
                     pages_state(policy, seq->tokens, p, seq->table[p].kind), tokens);
        }
    }
}

size_t cache_stored_tokens(struct pkv_cache *cache)
{
    pkv_stats stats = {0};

    add_slots(&stats, cache);
    return stats.raw_bytes / cache->storage.token_bytes;
}

static pkv_status check_stats(struct pkv_cache *cache, const pkv_stats *stats)
{
    if (stats == NULL)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "stats: NULL");
    return structs_check(&structs_stats, stats, &cache->message);
}

pkv_status pkv_cache_stats(pkv_cache *cache, pkv_stats *stats)
{
    if (cache == NULL)
        return PKV_ERROR_ARGUMENT;

    pkv_status status = check_stats(cache, stats);

    if (status != PKV_OK)
        return status;

    pkv_stats result = {.sequences = cache->n_sequences,
                        .tokens = cache_tokens(cache),
                        .reserved_bytes = cache->ops->reserved_bytes(cache->backend),
                        .transient_peak_bytes = cache->transient_peak_bytes,
                        .factorized_pages = cache->factorized_pages,
                        .factorize_seconds = cache->factorize_seconds,
                        .capped_pages = cache->capped_pages};

    add_slots(&result, cache);
    structs_write(&structs_stats, &result, stats);
    return PKV_OK;
}

pkv_status pkv_seq_stats(const pkv_seq *seq, pkv_stats *stats)
{
    if (seq == NULL)
        return PKV_ERROR_ARGUMENT;

    const struct page_policy *policy = &seq->cache->geometry.policy;
    pkv_status status = check_stats(seq->cache, stats);

    if (status != PKV_OK)
        return status;

    pkv_stats result = {.sequences = 1, .tokens = seq->tokens};

    for (size_t p = 0; p < pages_count(policy, seq->tokens); p++)
        add_page(&result, seq->cache, seq->table[p],
                 pages_state(policy, seq->tokens, p, seq->table[p].kind),
                 pages_tokens(policy, seq->tokens, p));
    result.factorized_pages = result.pages[PKV_PAGE_FACTORIZED];
    structs_write(&structs_stats, &result, stats);
    return PKV_OK;
}
