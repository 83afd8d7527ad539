/* SPDX-License-Identifier: MIT */
/* Sequences: opening, closing, forking, truncating and looking into them. */
#include "cache.h"
#include "numeric.h"
#include "structs.h"

#include <string.h>

static pkv_status busy(struct pkv_cache *cache)
{
    return fail(&cache->message, PKV_ERROR_BUSY, "sequence: it is in the open step");
}

pkv_status pkv_seq_open(pkv_cache *cache, pkv_seq **result)
{
    if (cache == NULL)
        return PKV_ERROR_ARGUMENT;
    if (result == NULL)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "seq: NULL");
    *result = NULL;
    if (cache->n_sequences == cache->max_sequences)
        return fail(&cache->message, PKV_ERROR_CAPACITY,
                    "max_sequences: %zu sequences are open already", cache->max_sequences);

    struct pkv_seq *seq = memory_allocate(&cache->memory, 1, sizeof *seq);

    if (seq == NULL)
        return fail(&cache->message, PKV_ERROR_MEMORY, "sequence: out of memory");
    *seq = (struct pkv_seq){.cache = cache, .previous = cache->last};
    if (cache->last)
        cache->last->next = seq;
    else
        cache->first = seq;
    cache->last = seq;
    cache->n_sequences++;
    *result = seq;
    return PKV_OK;
}

pkv_status pkv_seq_close(pkv_seq *seq)
{
    if (seq == NULL)
        return PKV_OK;

    struct pkv_cache *cache = seq->cache;

    if (seq->in_step)
        return busy(cache);
    /* Steps under way know their sequences. What has become of them others will hear. */
    cache_settle(cache, true);
    for (size_t p = 0; p < pages_count(&cache->geometry.policy, seq->tokens); p++)
        cache_release_page(cache, seq->table[p]);
    if (seq->previous)
        seq->previous->next = seq->next;
    else
        cache->first = seq->next;
    if (seq->next)
        seq->next->previous = seq->previous;
    else
        cache->last = seq->previous;
    cache->n_sequences--;
    memory_release(&cache->memory, seq->table);
    memory_release(&cache->memory, seq);
    return PKV_OK;
}

pkv_status sequence_reserve(struct pkv_seq *seq, size_t pages)
{
    struct memory *memory = &seq->cache->memory;
    size_t capacity = seq->table_capacity ? seq->table_capacity : 8;

    if (pages <= seq->table_capacity)
        return PKV_OK;
    while (capacity < pages)
        capacity = size_multiply(capacity, 2);

    struct page *table = memory_allocate(memory, capacity, sizeof *table);

    if (table == NULL)
        return PKV_ERROR_MEMORY;
    if (seq->table)
        memcpy(table, seq->table, seq->table_capacity * sizeof *table);
    memset(table + seq->table_capacity, 0, (capacity - seq->table_capacity) * sizeof *table);
    memory_release(memory, seq->table);
    seq->table = table;
    seq->table_capacity = capacity;
    return PKV_OK;
}

pkv_status pkv_seq_fork(pkv_seq *seq, pkv_seq **result)
{
    if (seq == NULL)
        return PKV_ERROR_ARGUMENT;

    struct pkv_cache *cache = seq->cache;
    size_t pages = pages_count(&cache->geometry.policy, seq->tokens);
    struct pkv_seq *fork;

    if (result == NULL)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "fork: NULL");
    *result = NULL;
    if (seq->in_step)
        return busy(cache);

    pkv_status status = sequence_settle(seq);

    if (status == PKV_OK)
        status = pkv_seq_open(cache, &fork);
    if (status != PKV_OK)
        return status;
    if (sequence_reserve(fork, pages) != PKV_OK) {
        pkv_seq_close(fork);
        return fail(&cache->message, PKV_ERROR_MEMORY, "sequence: out of memory");
    }
    for (size_t p = 0; p < pages; p++) {
        fork->table[p] = seq->table[p];
        slots_retain(cache_pool(cache, seq->table[p].kind), seq->table[p].slot);
    }
    fork->tokens = seq->tokens;
    *result = fork;
    return PKV_OK;
}

/* Puts a factorized page into a dense slot. */
static pkv_status make_dense(struct pkv_seq *seq, size_t page)
{
    struct pkv_cache *cache = seq->cache;
    struct page dense = {.kind = SLOT_DENSE};

    if (!slots_acquire(&cache->dense, &dense.slot))
        return fail(&cache->message, PKV_ERROR_CAPACITY,
                    "page %zu: no free dense slot to rebuild it in", page);

    pkv_status status = cache->ops->rebuild(cache->backend, seq->table[page].slot, dense.slot);

    if (status != PKV_OK) {
        cache_release_page(cache, dense);
        return status;
    }
    cache_release_page(cache, seq->table[page]);
    seq->table[page] = dense;
    cache->stored_most = size_add(cache->stored_most, cache->geometry.policy.page_tokens);
    return PKV_OK;
}

pkv_status pkv_seq_truncate(pkv_seq *seq, size_t tokens)
{
    if (seq == NULL)
        return PKV_ERROR_ARGUMENT;

    struct pkv_cache *cache = seq->cache;
    const struct page_policy *policy = &cache->geometry.policy;
    size_t old_pages = pages_count(policy, seq->tokens);
    size_t pages = pages_count(policy, tokens);

    if (seq->in_step)
        return busy(cache);

    pkv_status status = cache_settle(cache, true);

    if (status == PKV_OK && tokens != seq->good_tokens)
        status = sequence_check(seq);
    if (status != PKV_OK)
        return status;
    if (tokens > seq->tokens)
        return fail(&cache->message, PKV_ERROR_ARGUMENT,
                    "tokens: %zu are more than the sequence has (%zu)", tokens, seq->tokens);
    /* Never so with T unchanged: the incomplete last page is dense. */
    if (tokens % policy->page_tokens != 0 && seq->table[pages - 1].kind == SLOT_FACTOR) {
        status = make_dense(seq, pages - 1);
        if (status != PKV_OK)
            return status;
    }
    for (size_t p = pages; p < old_pages; p++) {
        cache_release_page(cache, seq->table[p]);
        seq->table[p] = (struct page){0};
    }
    seq->tokens = tokens;
    seq->failed = PKV_OK;
    return PKV_OK;
}

size_t pkv_seq_tokens(const pkv_seq *seq)
{
    return seq->tokens;
}

pkv_status pkv_seq_page(const pkv_seq *seq, size_t page, pkv_page_info *info)
{
    if (seq == NULL)
        return PKV_ERROR_ARGUMENT;

    struct pkv_cache *cache = seq->cache;
    const struct page_policy *policy = &cache->geometry.policy;
    struct page entry = {0};

    if (info == NULL)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "info: NULL");

    pkv_status status = structs_check(&structs_page_info, info, &cache->message);

    if (status != PKV_OK)
        return status;
    if (page > SIZE_MAX / policy->page_tokens)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "page: %zu is out of range", page);

    if (page < pages_count(policy, seq->tokens))
        entry = seq->table[page];

    pkv_page_info result = {.state = pages_state(policy, seq->tokens, page, entry.kind),
                            .first_token = page * policy->page_tokens,
                            .tokens = pages_tokens(policy, seq->tokens, page)};

    result.bytes = storage_page_bytes(&cache->storage, entry.kind, result.tokens);
    if (entry.kind != SLOT_NONE)
        result.sharers = cache_pool(cache, entry.kind)->references[entry.slot];
    structs_write(&structs_page_info, &result, info);
    return PKV_OK;
}

static pkv_status read_dense(struct pkv_seq *seq, size_t layer, size_t kv_head, size_t page,
                             enum page_part part, float *out)
{
    struct pkv_cache *cache = seq->cache;
    const struct geometry *geometry = &cache->geometry;
    size_t tokens = pages_tokens(&geometry->policy, seq->tokens, page);
    struct part_form form = cache_part(cache, layer, tokens, part);
    pkv_status status = cache->ops->read(cache->backend, seq->table[page], layer, kv_head, tokens,
                                         part, cache->page_scratch);

    if (status != PKV_OK)
        return status;
    for (size_t t = 0; t < tokens; t++)
        for (size_t i = 0; i < geometry->head_dim; i++)
            *out++ = parts_element(&form, geometry->dtype, cache->page_scratch, t, i);
    return PKV_OK;
}

static pkv_status read_product(struct pkv_seq *seq, size_t layer, size_t kv_head, size_t page,
                               enum page_part left_part, enum page_part right_part, float *out)
{
    struct pkv_cache *cache = seq->cache;
    const struct geometry *geometry = &cache->geometry;
    size_t length = geometry->policy.page_tokens;
    size_t dim = geometry->head_dim;
    struct part_form left_form = cache_part(cache, layer, length, left_part);
    struct part_form right_form = cache_part(cache, layer, length, right_part);
    void *left = cache->page_scratch;
    void *right = (char *)left + parts_bytes(&left_form, geometry->element_bytes);
    pkv_status status =
        cache->ops->read(cache->backend, seq->table[page], layer, kv_head, length, left_part, left);

    if (status == PKV_OK)
        status = cache->ops->read(cache->backend, seq->table[page], layer, kv_head, length,
                                  right_part, right);
    if (status != PKV_OK)
        return status;

    fenv_t modes;

    modes_set(&modes);
    for (size_t t = 0; t < length; t++) {
        float *row = out + t * dim;

        memset(row, 0, dim * sizeof *row);
        for (size_t k = 0; k < left_form.columns; k++) {
            float weight = parts_element(&left_form, geometry->dtype, left, t, k);

            for (size_t i = 0; i < dim; i++)
                row[i] += weight * parts_element(&right_form, geometry->dtype, right, k, i);
        }
    }
    modes_restore(&modes);
    return PKV_OK;
}

pkv_status pkv_seq_read_page(pkv_seq *seq, size_t layer, size_t kv_head, size_t page, float *k,
                             float *v)
{
    if (seq == NULL)
        return PKV_ERROR_ARGUMENT;

    struct pkv_cache *cache = seq->cache;
    const struct geometry *geometry = &cache->geometry;
    size_t pages = pages_count(&geometry->policy, seq->tokens);
    pkv_status status = sequence_settle(seq);

    if (status != PKV_OK)
        return status;
    if (layer >= geometry->layers)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "layer: %zu of %zu", layer,
                    geometry->layers);
    if (kv_head >= geometry->kv_heads)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "kv_head: %zu of %zu", kv_head,
                    geometry->kv_heads);
    if (page >= pages)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "page: %zu of %zu", page, pages);

    if (seq->table[page].kind == SLOT_DENSE) {
        if (k)
            status = read_dense(seq, layer, kv_head, page, PART_K, k);
        if (v && status == PKV_OK)
            status = read_dense(seq, layer, kv_head, page, PART_V, v);
        return status;
    }
    if (k)
        status = read_product(seq, layer, kv_head, page, PART_K_LEFT, PART_K_RIGHT, k);
    if (v && status == PKV_OK)
        status = read_product(seq, layer, kv_head, page, PART_V_LEFT, PART_V_RIGHT, v);
    return status;
}
