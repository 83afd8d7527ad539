/* SPDX-License-Identifier: MIT */
/*
 * Digests: XXH3-64, seed 0, of this serialisation of a sequence. Numbers are unsigned 64-bit,
 * little-endian.
 *
 *     layers, kv_heads, head_dim, page_tokens, sink_pages, window_pages,
 *     factors_k, factors_v, dtype                        numbers; enumerators by value
 *     rank_k, rank_v                                     numbers, layer by layer; 0 without factors
 *     T                                                  a number
 *     state of every page that T reaches                 a byte each
 *     for each layer, KV head and page:
 *         dense:       K, V [tokens of the page, d]      in the canonical form of parts.h
 *         factorized:  L_K, R_K, L_V, R_V                the same
 *
 * A cache's serialisation is that of its sequences, one after the other in order of creation.
 */
#include "cache.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static void put_number(XXH3_state_t *state, uint64_t number)
{
    unsigned char bytes[8];

    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(number >> 8 * i);
    XXH3_64bits_update(state, bytes, sizeof bytes);
}

static void put_geometry(XXH3_state_t *state, const struct geometry *geometry)
{
    put_number(state, geometry->layers);
    put_number(state, geometry->kv_heads);
    put_number(state, geometry->head_dim);
    put_number(state, geometry->policy.page_tokens);
    put_number(state, geometry->policy.sink_pages);
    put_number(state, geometry->policy.window_pages);
    put_number(state, geometry->factors_k);
    put_number(state, geometry->factors_v);
    put_number(state, geometry->dtype);
    for (size_t layer = 0; layer < geometry->layers; layer++) {
        put_number(state, geometry->rank_k[layer]);
        put_number(state, geometry->rank_v[layer]);
    }
}

static pkv_status put_page(XXH3_state_t *state, struct pkv_cache *cache, struct page page,
                           size_t layer, size_t kv_head, size_t tokens)
{
    int first = page.kind == SLOT_FACTOR ? PART_K_LEFT : PART_K;
    int last = page.kind == SLOT_FACTOR ? PART_V_RIGHT : PART_V;

    for (int part = first; part <= last; part++) {
        struct part_form form = cache_part(cache, layer, tokens, (enum page_part)part);
        pkv_status status = cache->ops->read(cache->backend, page, layer, kv_head, tokens,
                                             (enum page_part)part, cache->page_scratch);

        if (status != PKV_OK)
            return status;
        XXH3_64bits_update(state, cache->page_scratch,
                           parts_bytes(&form, cache->geometry.element_bytes));
    }
    return PKV_OK;
}

static pkv_status put_sequence(XXH3_state_t *state, struct pkv_seq *seq)
{
    struct pkv_cache *cache = seq->cache;
    const struct geometry *geometry = &cache->geometry;
    const struct page_policy *policy = &geometry->policy;
    size_t pages = pages_count(policy, seq->tokens);

    put_geometry(state, geometry);
    put_number(state, seq->tokens);
    for (size_t p = 0; p < pages; p++) {
        unsigned char byte = (unsigned char)pages_state(policy, seq->tokens, p, seq->table[p].kind);

        XXH3_64bits_update(state, &byte, 1);
    }
    for (size_t layer = 0; layer < geometry->layers; layer++) {
        for (size_t head = 0; head < geometry->kv_heads; head++) {
            for (size_t p = 0; p < pages; p++) {
                pkv_status status = put_page(state, cache, seq->table[p], layer, head,
                                             pages_tokens(policy, seq->tokens, p));

                if (status != PKV_OK)
                    return status;
            }
        }
    }
    return PKV_OK;
}

pkv_status pkv_seq_digest(pkv_seq *seq, uint64_t *digest)
{
    XXH3_state_t state;

    if (seq == NULL)
        return PKV_ERROR_ARGUMENT;
    if (digest == NULL)
        return fail(&seq->cache->message, PKV_ERROR_ARGUMENT, "digest: NULL");
    XXH3_64bits_reset(&state);

    pkv_status status = sequence_settle(seq);

    if (status == PKV_OK)
        status = put_sequence(&state, seq);
    if (status == PKV_OK)
        *digest = XXH3_64bits_digest(&state);
    return status;
}

pkv_status pkv_cache_digest(pkv_cache *cache, uint64_t *digest)
{
    XXH3_state_t state;
    pkv_status status = PKV_OK;

    if (cache == NULL)
        return PKV_ERROR_ARGUMENT;
    if (digest == NULL)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "digest: NULL");
    XXH3_64bits_reset(&state);
    for (struct pkv_seq *seq = cache->first; seq && status == PKV_OK; seq = seq->next) {
        status = sequence_settle(seq);
        if (status == PKV_OK)
            status = put_sequence(&state, seq);
    }
    if (status == PKV_OK)
        *digest = XXH3_64bits_digest(&state);
    return status;
}
