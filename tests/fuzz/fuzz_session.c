/* SPDX-License-Identifier: MIT */
/*
 * A session. The input's first byte says what the cache is like, and whether checksums are made
 * right, as someone makes them who knows the format: puzzlekv-session(5).
 */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "samples.h"

#define HEADER_BYTES 128
#define USER_BYTES   64
#define SEALED       0x80u

/* What a cache shows of itself. */
struct view {
    pkv_stats stats;
    uint64_t digest;
};

/* A cache for each kind, opened when it is first asked for. It has a sequence of its own. */
static struct target {
    pkv_config config;
    pkv_cache *cache;
    struct view view;
} targets[SAMPLE_SESSIONS];

static struct view view_of(pkv_cache *cache)
{
    struct view view;

    memset(&view, 0, sizeof view);
    view.stats.struct_size = sizeof view.stats;
    fuzz_require(pkv_cache_stats(cache, &view.stats) == PKV_OK);
    fuzz_require(pkv_cache_digest(cache, &view.digest) == PKV_OK);
    /* What a session that came in was used for counts for ever. */
    view.stats.transient_peak_bytes = 0;
    view.stats.factorized_pages = 0;
    view.stats.factorize_seconds = 0;
    view.stats.capped_pages = 0;
    return view;
}

static struct target *open_target(size_t kind)
{
    struct target *target = &targets[kind];
    struct view view;

    if (target->cache == NULL) {
        sample_session_settings(kind, &target->config);
        fuzz_require(pkv_cache_open(&target->config, &target->cache, NULL) == PKV_OK);
        sample_session_sequence(target->cache);
        target->view = view_of(target->cache);
    }
    view = view_of(target->cache);
    fuzz_require(memcmp(&view, &target->view, sizeof view) == 0);
    return target;
}

/* ---- Checksums ------------------------------------------------------------------------------- */

static uint64_t number_at(const uint8_t *bytes)
{
    uint64_t number = 0;

    for (int i = 8; i-- > 0;)
        number = number << 8 | bytes[i];
    return number;
}

/* Makes the checksum of the section of so many bytes right and goes behind it; false where the
 * input ends before. */
static bool seal(uint8_t *data, size_t size, size_t *at, uint64_t bytes)
{
    uint64_t checksum;

    if (bytes > size || *at > size - bytes || size - *at - bytes < 8)
        return false;
    checksum = XXH3_64bits(data + *at, bytes);
    *at += bytes;
    for (int i = 0; i < 8; i++)
        data[(*at)++] = (uint8_t)(checksum >> 8 * i);
    return true;
}

static size_t side_bytes(const pkv_config *config, pkv_factors factors, size_t rank, bool key)
{
    const size_t length = config->page_tokens, d = config->head_dim;

    if (factors == PKV_FACTORS_INT4)
        return rank * (length + d) / 2 + 2 * ((key ? rank : length) + d);
    return rank * (length + d) * (config->dtype == PKV_F32 ? 4 : 2);
}

/* Of a page of one layer and KV head. */
static size_t page_bytes(const pkv_config *config, size_t layer, size_t tokens, bool factorized)
{
    if (!factorized)
        return tokens * 2 * config->head_dim * (config->dtype == PKV_F32 ? 4 : 2);
    return side_bytes(config, config->factors_k, config->layer_rank_k[layer], true) +
           side_bytes(config, config->factors_v, config->layer_rank_v[layer], false);
}

static void seal_all(const pkv_config *config, uint8_t *data, size_t size)
{
    const size_t length = config->page_tokens;
    uint64_t tokens, id_bytes, user_bytes;
    size_t at = 0, pages, states;

    if (!seal(data, size, &at, HEADER_BYTES))
        return;
    tokens = number_at(data + HEADER_BYTES - 24);
    id_bytes = number_at(data + HEADER_BYTES - 16);
    user_bytes = number_at(data + HEADER_BYTES - 8);
    if (tokens > size || id_bytes > size || user_bytes > size)
        return;
    pages = (tokens + length - 1) / length;
    if (!seal(data, size, &at, id_bytes + 8 * config->layers) || !seal(data, size, &at, user_bytes))
        return;
    states = at;
    if (!seal(data, size, &at, pages))
        return;
    for (size_t layer = 0; layer < config->layers; layer++) {
        size_t bytes = 0;

        for (size_t p = 0; p < pages; p++) {
            const size_t left = tokens - p * length;

            bytes += page_bytes(config, layer, left < length ? left : length,
                                data[states + p] == PKV_PAGE_FACTORIZED);
        }
        if (!seal(data, size, &at, config->kv_heads * bytes))
            return;
    }
}

/* ---- Sessions -------------------------------------------------------------------------------- */

struct stream {
    const uint8_t *data;
    size_t size, at;
};

static ptrdiff_t read_some(void *opaque, void *data, size_t bytes)
{
    struct stream *stream = opaque;

    /* As short as a pipe's reads may be. */
    if (bytes > 100)
        bytes = 100;
    if (bytes > stream->size - stream->at)
        bytes = stream->size - stream->at;
    memcpy(data, stream->data + stream->at, bytes);
    stream->at += bytes;
    return (ptrdiff_t)bytes;
}

/* What is saved again is what was loaded. */
static int compare_some(void *opaque, const void *data, size_t bytes)
{
    struct stream *stream = opaque;

    fuzz_require(bytes <= stream->size - stream->at);
    fuzz_require(memcmp(stream->data + stream->at, data, bytes) == 0);
    stream->at += bytes;
    return 0;
}

static void read_pages(const struct target *target, pkv_seq *seq)
{
    const pkv_config *config = &target->config;
    float k[SAMPLE_PAGE_ELEMENTS], v[SAMPLE_PAGE_ELEMENTS];
    const size_t tokens = pkv_seq_tokens(seq);

    for (size_t p = 0; p * config->page_tokens < tokens; p++)
        for (size_t layer = 0; layer < config->layers; layer++)
            fuzz_require(pkv_seq_read_page(seq, layer, 0, p, k, v) == PKV_OK);
}

/* Values that factors cannot have may be refused, and then nothing has changed. */
static void use(const struct target *target, pkv_seq *seq)
{
    const size_t tokens = pkv_seq_tokens(seq);
    uint64_t before, after;
    pkv_status status;

    fuzz_require(pkv_seq_digest(seq, &before) == PKV_OK);
    status = sample_session_step(target->cache, seq, target->config.page_tokens + 1);
    if (status != PKV_OK) {
        fuzz_require(status == PKV_ERROR_VALUE || status == PKV_ERROR_CAPACITY);
        fuzz_require(pkv_seq_digest(seq, &after) == PKV_OK);
        fuzz_require(before == after && pkv_seq_tokens(seq) == tokens);
    }
    read_pages(target, seq);
    fuzz_require(pkv_seq_truncate(seq, tokens / 2) == PKV_OK);
    read_pages(target, seq);
}

static void load(const struct target *target, const uint8_t *data, size_t size)
{
    char user[USER_BYTES];
    pkv_session session = {sizeof session, SAMPLE_SESSION_MODEL, user, sizeof user};
    pkv_session_info info = {.struct_size = sizeof info};
    struct stream stream = {data, size, 0};
    const pkv_reader reader = {read_some, &stream};
    const pkv_writer writer = {compare_some, &stream};
    char message[PKV_MESSAGE_BYTES];
    const char *text = pkv_cache_message(target->cache);
    pkv_status status, info_status;
    pkv_seq *seq;

    info_status = pkv_session_info_of(&reader, &info, message);
    fuzz_require((info_status == PKV_OK) == (*message == '\0'));
    stream.at = 0;
    status = pkv_seq_load(target->cache, &session, &reader, &seq);
    if (status != PKV_OK) {
        fuzz_require(seq == NULL);
        fuzz_require(status == PKV_ERROR_FORMAT || status == PKV_ERROR_MISMATCH ||
                     status == PKV_ERROR_CAPACITY);
        fuzz_require(strchr(text, ':') != NULL && strchr(text, '\n') == NULL);
        return;
    }
    fuzz_require(info_status == PKV_OK);
    fuzz_require(info.tokens == pkv_seq_tokens(seq) && info.user_bytes == session.user_bytes);
    stream.size = stream.at;
    stream.at = 0;
    fuzz_require(pkv_seq_save(seq, &session, &writer) == PKV_OK);
    fuzz_require(stream.at == stream.size);
    use(target, seq);
    fuzz_require(pkv_seq_close(seq) == PKV_OK);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct target *target;
    uint8_t *copy;
    size_t kind;

    if (size < 2)
        return 0;
    kind = (*data & ~SEALED) % SAMPLE_SESSIONS;
    target = open_target(kind);
    copy = malloc(size - 1);
    fuzz_require(copy != NULL);
    memcpy(copy, data + 1, size - 1);
    if (*data & SEALED)
        seal_all(&target->config, copy, size - 1);
    load(target, copy, size - 1);
    free(copy);
    (void)open_target(kind);
    return 0;
}
