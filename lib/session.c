/* SPDX-License-Identifier: MIT */
/* Sessions: a sequence as bytes, and back; puzzlekv-session(5) has the format. */
#include "cache.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <stdio.h>
#include <string.h>

#include "numeric.h"
#include "structs.h"

#define VERSION 1

/* Not text, and changed by whatever changes line ends or drops high bits. */
static const unsigned char magic[8] = {0x89, 'P', 'K', 'V', '\r', '\n', 0x1a, '\n'};

/* The header's numbers, each of 64 bits. */
enum number {
    NUMBER_VERSION,
    NUMBER_LAYERS,
    NUMBER_QUERY_HEADS,
    NUMBER_KV_HEADS,
    NUMBER_HEAD_DIM,
    NUMBER_PAGE_TOKENS,
    NUMBER_SINK_PAGES,
    NUMBER_WINDOW_PAGES,
    NUMBER_FACTORS_K,
    NUMBER_FACTORS_V,
    NUMBER_DTYPE,
    NUMBER_SOFTMAX_SCALE, /* bits of an f32 */
    NUMBER_TOKENS,
    NUMBER_MODEL_ID_BYTES,
    NUMBER_USER_BYTES,
    NUMBERS
};

static const char *const setting_names[NUMBER_SOFTMAX_SCALE] = {
    [NUMBER_LAYERS] = "layers",
    [NUMBER_QUERY_HEADS] = "query_heads",
    [NUMBER_KV_HEADS] = "kv_heads",
    [NUMBER_HEAD_DIM] = "head_dim",
    [NUMBER_PAGE_TOKENS] = "page_tokens",
    [NUMBER_SINK_PAGES] = "sink_pages",
    [NUMBER_WINDOW_PAGES] = "window_pages",
    [NUMBER_FACTORS_K] = "factors_k",
    [NUMBER_FACTORS_V] = "factors_v",
    [NUMBER_DTYPE] = "dtype",
};

#define HEADER_BYTES (sizeof magic + NUMBERS * sizeof(uint64_t))

static void settings_of(const struct geometry *geometry, uint64_t numbers[NUMBERS])
{
    numbers[NUMBER_VERSION] = VERSION;
    numbers[NUMBER_LAYERS] = geometry->layers;
    numbers[NUMBER_QUERY_HEADS] = geometry->query_heads;
    numbers[NUMBER_KV_HEADS] = geometry->kv_heads;
    numbers[NUMBER_HEAD_DIM] = geometry->head_dim;
    numbers[NUMBER_PAGE_TOKENS] = geometry->policy.page_tokens;
    numbers[NUMBER_SINK_PAGES] = geometry->policy.sink_pages;
    numbers[NUMBER_WINDOW_PAGES] = geometry->policy.window_pages;
    numbers[NUMBER_FACTORS_K] = geometry->factors_k;
    numbers[NUMBER_FACTORS_V] = geometry->factors_v;
    numbers[NUMBER_DTYPE] = geometry->dtype;
    numbers[NUMBER_SOFTMAX_SCALE] = f32_bits(geometry->softmax_scale);
}

static void encode(uint64_t number, size_t size, unsigned char *bytes)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (unsigned char)(number >> 8 * i);
}

static uint64_t decode(size_t size, const unsigned char *bytes)
{
    uint64_t number = 0;

    for (size_t i = 0; i < size; i++)
        number |= (uint64_t)bytes[i] << 8 * i;
    return number;
}

static int first_part(struct page page)
{
    return page.kind == SLOT_FACTOR ? PART_K_LEFT : PART_K;
}

static int last_part(struct page page)
{
    return page.kind == SLOT_FACTOR ? PART_V_RIGHT : PART_V;
}

/* A copy of the caller's session, in which model_id is not NULL. */
static pkv_status read_session(struct message *message, const pkv_session *theirs,
                               pkv_session *session)
{
    if (theirs == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "session: NULL");

    pkv_status status = structs_read(&structs_session, theirs, session, message);

    if (status != PKV_OK)
        return status;
    if (session->model_id == NULL)
        session->model_id = "";
    if (strnlen(session->model_id, PKV_MODEL_ID_BYTES) == PKV_MODEL_ID_BYTES)
        return fail(message, PKV_ERROR_ARGUMENT, "model_id: it is longer than %d bytes",
                    PKV_MODEL_ID_BYTES - 1);
    return PKV_OK;
}

/* ---- Saving ---------------------------------------------------------------------------------- */

struct output {
    const pkv_writer *writer;
    struct message *message;
    XXH3_state_t hash; /* of the section so far */
};

static pkv_status put(struct output *output, const void *data, size_t bytes)
{
    if (bytes > 0 && output->writer->write(output->writer->opaque, data, bytes) != 0)
        return fail(output->message, PKV_ERROR_IO, "session: the caller's write failed");
    XXH3_64bits_update(&output->hash, data, bytes);
    return PKV_OK;
}

static pkv_status end_section(struct output *output)
{
    unsigned char checksum[8];
    pkv_status status;

    encode(XXH3_64bits_digest(&output->hash), sizeof checksum, checksum);
    status = put(output, checksum, sizeof checksum);
    XXH3_64bits_reset(&output->hash);
    return status;
}

static pkv_status put_header(struct output *output, const struct pkv_seq *seq, size_t id_bytes,
                             size_t user_bytes)
{
    unsigned char header[HEADER_BYTES];
    uint64_t numbers[NUMBERS];
    pkv_status status;

    settings_of(&seq->cache->geometry, numbers);
    numbers[NUMBER_TOKENS] = seq->tokens;
    numbers[NUMBER_MODEL_ID_BYTES] = id_bytes;
    numbers[NUMBER_USER_BYTES] = user_bytes;
    memcpy(header, magic, sizeof magic);
    for (size_t i = 0; i < NUMBERS; i++)
        encode(numbers[i], 8, header + sizeof magic + 8 * i);
    status = put(output, header, sizeof header);
    return status == PKV_OK ? end_section(output) : status;
}

static pkv_status put_model(struct output *output, const struct geometry *geometry,
                            const char *model_id, size_t id_bytes)
{
    pkv_status status = put(output, model_id, id_bytes);

    for (size_t layer = 0; layer < geometry->layers && status == PKV_OK; layer++) {
        unsigned char ranks[8];

        encode(geometry->rank_k[layer], 4, ranks);
        encode(geometry->rank_v[layer], 4, ranks + 4);
        status = put(output, ranks, sizeof ranks);
    }
    return status == PKV_OK ? end_section(output) : status;
}

static pkv_status put_states(struct output *output, const struct pkv_seq *seq)
{
    const struct page_policy *policy = &seq->cache->geometry.policy;
    pkv_status status = PKV_OK;

    for (size_t p = 0; p < pages_count(policy, seq->tokens) && status == PKV_OK; p++) {
        unsigned char state =
            (unsigned char)pages_state(policy, seq->tokens, p, seq->table[p].kind);

        status = put(output, &state, 1);
    }
    return status == PKV_OK ? end_section(output) : status;
}

static pkv_status put_page(struct output *output, const struct pkv_seq *seq, size_t layer,
                           size_t kv_head, size_t p)
{
    struct pkv_cache *cache = seq->cache;
    const struct geometry *geometry = &cache->geometry;
    size_t tokens = pages_tokens(&geometry->policy, seq->tokens, p);
    pkv_status status = PKV_OK;

    for (int i = first_part(seq->table[p]); i <= last_part(seq->table[p]) && status == PKV_OK;
         i++) {
        enum page_part part = (enum page_part)i;
        struct part_form form = cache_part(cache, layer, tokens, part);

        status = cache->ops->read(cache->backend, seq->table[p], layer, kv_head, tokens, part,
                                  cache->page_scratch);
        if (status != PKV_OK)
            return status;
        parts_swap(&form, geometry->element_bytes, cache->page_scratch);
        status = put(output, cache->page_scratch, parts_bytes(&form, geometry->element_bytes));
    }
    return status;
}

static pkv_status put_layer(struct output *output, const struct pkv_seq *seq, size_t layer)
{
    const struct geometry *geometry = &seq->cache->geometry;
    pkv_status status = PKV_OK;

    for (size_t head = 0; head < geometry->kv_heads && status == PKV_OK; head++)
        for (size_t p = 0; p < pages_count(&geometry->policy, seq->tokens) && status == PKV_OK; p++)
            status = put_page(output, seq, layer, head, p);
    return status == PKV_OK ? end_section(output) : status;
}

pkv_status pkv_seq_save(pkv_seq *seq, const pkv_session *theirs, const pkv_writer *writer)
{
    if (seq == NULL)
        return PKV_ERROR_ARGUMENT;

    const struct geometry *geometry = &seq->cache->geometry;
    struct message *message = &seq->cache->message;
    pkv_session session;
    pkv_status status = read_session(message, theirs, &session);

    if (status != PKV_OK)
        return status;
    if (writer == NULL || writer->write == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "writer: NULL");
    if (seq->in_step)
        return fail(message, PKV_ERROR_BUSY, "sequence: it is in the open step");
    status = sequence_settle(seq);
    if (status != PKV_OK)
        return status;

    struct output output = {.writer = writer, .message = message};
    size_t id_bytes = strlen(session.model_id);
    size_t user_bytes = session.user ? session.user_bytes : 0;

    XXH3_64bits_reset(&output.hash);
    status = put_header(&output, seq, id_bytes, user_bytes);
    if (status == PKV_OK)
        status = put_model(&output, geometry, session.model_id, id_bytes);
    if (status == PKV_OK)
        status = put(&output, session.user, user_bytes);
    if (status == PKV_OK)
        status = end_section(&output);
    if (status == PKV_OK)
        status = put_states(&output, seq);
    for (size_t layer = 0; layer < geometry->layers && status == PKV_OK; layer++)
        status = put_layer(&output, seq, layer);
    return status;
}

/* ---- Loading --------------------------------------------------------------------------------- */

struct input {
    const pkv_reader *reader;
    struct message *message;
    XXH3_state_t hash;
    char section[32]; /* its name */
};

static void begin_section(struct input *input, const char *name)
{
    snprintf(input->section, sizeof input->section, "%s", name);
    XXH3_64bits_reset(&input->hash);
}

static pkv_status get(struct input *input, void *data, size_t bytes)
{
    unsigned char *to = data;

    for (size_t done = 0; done < bytes;) {
        ptrdiff_t n = input->reader->read(input->reader->opaque, to + done, bytes - done);

        if (n < 0 || (size_t)n > bytes - done)
            return fail(input->message, PKV_ERROR_IO, "%s: the caller's read failed",
                        input->section);
        if (n == 0)
            return fail(input->message, PKV_ERROR_FORMAT, "%s: the session ends in it",
                        input->section);
        done += (size_t)n;
    }
    XXH3_64bits_update(&input->hash, data, bytes);
    return PKV_OK;
}

static pkv_status check_section(struct input *input)
{
    uint64_t expected = XXH3_64bits_digest(&input->hash);
    unsigned char checksum[8];
    pkv_status status = get(input, checksum, sizeof checksum);

    if (status == PKV_OK && decode(sizeof checksum, checksum) != expected)
        status =
            fail(input->message, PKV_ERROR_FORMAT, "%s: its checksum is wrong", input->section);
    return status;
}

static pkv_status get_header(struct input *input, uint64_t numbers[NUMBERS])
{
    unsigned char header[HEADER_BYTES];
    pkv_status status;

    begin_section(input, "header");
    status = get(input, header, sizeof magic + 8);
    if (status != PKV_OK)
        return status;
    if (memcmp(header, magic, sizeof magic) != 0)
        return fail(input->message, PKV_ERROR_FORMAT, "magic: this is not a session");
    numbers[NUMBER_VERSION] = decode(8, header + sizeof magic);
    if (numbers[NUMBER_VERSION] != VERSION)
        return fail(input->message, PKV_ERROR_FORMAT, "version: %llu; this library reads %d",
                    (unsigned long long)numbers[NUMBER_VERSION], VERSION);
    status = get(input, header + sizeof magic + 8, sizeof header - sizeof magic - 8);
    if (status == PKV_OK)
        status = check_section(input);
    for (size_t i = 1; i < NUMBERS; i++)
        numbers[i] = decode(8, header + sizeof magic + 8 * i);
    return status;
}

/* What the session has and the cache does not. */
static pkv_status check_settings(const struct pkv_cache *cache, struct message *message,
                                 const uint64_t numbers[NUMBERS])
{
    uint64_t own[NUMBERS];

    settings_of(&cache->geometry, own);
    for (size_t i = NUMBER_LAYERS; i < NUMBER_SOFTMAX_SCALE; i++) {
        if (numbers[i] != own[i])
            return fail(message, PKV_ERROR_MISMATCH, "%s: the session has %llu, the cache %llu",
                        setting_names[i], (unsigned long long)numbers[i],
                        (unsigned long long)own[i]);
    }
    if (numbers[NUMBER_SOFTMAX_SCALE] != own[NUMBER_SOFTMAX_SCALE])
        return fail(message, PKV_ERROR_MISMATCH,
                    "softmax_scale: the session has %.9g, the cache %.9g",
                    (double)f32_from_bits((uint32_t)numbers[NUMBER_SOFTMAX_SCALE]),
                    (double)cache->geometry.softmax_scale);
    if (numbers[NUMBER_MODEL_ID_BYTES] >= PKV_MODEL_ID_BYTES)
        return fail(message, PKV_ERROR_FORMAT, "model_id: its %llu bytes are more than %d",
                    (unsigned long long)numbers[NUMBER_MODEL_ID_BYTES], PKV_MODEL_ID_BYTES - 1);
    return PKV_OK;
}

static pkv_status check_sizes(struct pkv_cache *cache, const pkv_session *session,
                              const uint64_t numbers[NUMBERS])
{
    uint64_t tokens = numbers[NUMBER_TOKENS];
    size_t room = session->user ? session->user_bytes : SIZE_MAX;
    bool fits = tokens <= cache->max_tokens;

    if (fits && size_add(cache_tokens(cache), (size_t)tokens) > cache->max_tokens) {
        cache->stored_most = cache_stored_tokens(cache);
        fits = size_add(cache->stored_most, (size_t)tokens) <= cache->max_tokens;
    }
    if (!fits)
        return fail(&cache->message, PKV_ERROR_CAPACITY,
                    "tokens: the session's %llu and those stored are more than max_tokens (%zu)",
                    (unsigned long long)tokens, cache->max_tokens);
    if (numbers[NUMBER_USER_BYTES] > room)
        return fail(&cache->message, PKV_ERROR_CAPACITY,
                    "user_bytes: the session has %llu, there is room for %zu",
                    (unsigned long long)numbers[NUMBER_USER_BYTES], room);
    return PKV_OK;
}

/* A text of the session's in a message of one line. */
static void make_printable(char *text)
{
    for (; *text; text++) {
        if (*text < ' ' || *text > '~')
            *text = '?';
    }
}

/* Mismatches are such only if the checksum is right. */
static pkv_status get_model(struct input *input, const struct geometry *geometry,
                            const char *model_id, size_t id_bytes)
{
    char id[PKV_MODEL_ID_BYTES] = "";
    size_t differing = geometry->layers, rank_k = 0, rank_v = 0;
    pkv_status status;

    begin_section(input, "model");
    status = get(input, id, id_bytes);
    for (size_t layer = 0; layer < geometry->layers && status == PKV_OK; layer++) {
        unsigned char ranks[8];

        status = get(input, ranks, sizeof ranks);
        if (status != PKV_OK || differing < layer)
            continue;
        rank_k = (size_t)decode(4, ranks);
        rank_v = (size_t)decode(4, ranks + 4);
        if (rank_k != geometry->rank_k[layer] || rank_v != geometry->rank_v[layer])
            differing = layer;
    }
    if (status == PKV_OK)
        status = check_section(input);
    if (status != PKV_OK)
        return status;
    if (strlen(model_id) != id_bytes || memcmp(id, model_id, id_bytes) != 0) {
        char own[PKV_MODEL_ID_BYTES];

        snprintf(own, sizeof own, "%s", model_id);
        make_printable(own);
        make_printable(id);
        return fail(input->message, PKV_ERROR_MISMATCH,
                    "model_id: the session has \"%.80s\", not \"%.80s\"", id, own);
    }
    if (differing < geometry->layers)
        return fail(input->message, PKV_ERROR_MISMATCH,
                    "ranks: in layer %zu the session has %zu of K and %zu of V, the cache %zu and "
                    "%zu",
                    differing, rank_k, rank_v, geometry->rank_k[differing],
                    geometry->rank_v[differing]);
    return PKV_OK;
}

static pkv_status get_user(struct input *input, void *user, uint64_t bytes)
{
    unsigned char dropped[256];
    pkv_status status = PKV_OK;

    begin_section(input, "user data");
    if (user != NULL) {
        status = get(input, user, (size_t)bytes);
    } else {
        for (uint64_t n; bytes > 0 && status == PKV_OK; bytes -= n) {
            n = bytes < sizeof dropped ? bytes : sizeof dropped;
            status = get(input, dropped, (size_t)n);
        }
    }
    return status == PKV_OK ? check_section(input) : status;
}

/* Sets the kinds of the table. */
static pkv_status get_states(struct input *input, struct pkv_seq *seq, size_t tokens)
{
    const struct page_policy *policy = &seq->cache->geometry.policy;
    pkv_status status = PKV_OK;

    begin_section(input, "page states");
    for (size_t p = 0; p < pages_count(policy, tokens) && status == PKV_OK; p++) {
        unsigned char state = 0;

        status = get(input, &state, 1);
        if (status == PKV_OK && !pages_state_possible(policy, tokens, p, (pkv_page_state)state))
            status = fail(input->message, PKV_ERROR_FORMAT,
                          "page states: page %zu of %zu tokens cannot be in state %u (%s)", p,
                          tokens, state, pkv_page_state_name((pkv_page_state)state));
        seq->table[p].kind = state == PKV_PAGE_FACTORIZED ? SLOT_FACTOR : SLOT_DENSE;
    }
    return status == PKV_OK ? check_section(input) : status;
}

static pkv_status acquire_slots(struct pkv_seq *seq, size_t pages)
{
    struct pkv_cache *cache = seq->cache;
    size_t factor = 0;

    for (size_t p = 0; p < pages; p++)
        factor += seq->table[p].kind == SLOT_FACTOR;
    if (pages - factor > cache->dense.n_free || factor > cache->factor.n_free)
        return fail(&cache->message, PKV_ERROR_CAPACITY,
                    "page states: %zu dense and %zu factor slots are needed, %lu and %lu are free",
                    pages - factor, factor, (unsigned long)cache->dense.n_free,
                    (unsigned long)cache->factor.n_free);
    for (size_t p = 0; p < pages; p++)
        slots_acquire(cache_pool(cache, seq->table[p].kind), &seq->table[p].slot);
    return PKV_OK;
}

static pkv_status get_page(struct input *input, const struct pkv_seq *seq, size_t tokens,
                           size_t layer, size_t kv_head, size_t p)
{
    static const char *const part_names[] = {"K", "V", "L_K", "R_K", "L_V", "R_V"};
    struct pkv_cache *cache = seq->cache;
    const struct geometry *geometry = &cache->geometry;
    size_t in_page = pages_tokens(&geometry->policy, tokens, p);
    pkv_status status = PKV_OK;

    for (int i = first_part(seq->table[p]); i <= last_part(seq->table[p]) && status == PKV_OK;
         i++) {
        enum page_part part = (enum page_part)i;
        struct part_form form = cache_part(cache, layer, in_page, part);

        status = get(input, cache->page_scratch, parts_bytes(&form, geometry->element_bytes));
        if (status != PKV_OK)
            return status;
        parts_swap(&form, geometry->element_bytes, cache->page_scratch);
        if (!parts_valid(&form, geometry->dtype, cache->page_scratch))
            return fail(input->message, PKV_ERROR_FORMAT,
                        "layer %zu, KV head %zu, page %zu: %s has a value that no page has", layer,
                        kv_head, p, part_names[part]);
        status = cache->ops->write(cache->backend, seq->table[p], layer, kv_head, in_page, part,
                                   cache->page_scratch);
    }
    return status;
}

static pkv_status get_layer(struct input *input, const struct pkv_seq *seq, size_t tokens,
                            size_t layer)
{
    const struct geometry *geometry = &seq->cache->geometry;
    size_t pages = pages_count(&geometry->policy, tokens);
    pkv_status status = PKV_OK;

    begin_section(input, "");
    snprintf(input->section, sizeof input->section, "layer %zu", layer);
    for (size_t head = 0; head < geometry->kv_heads && status == PKV_OK; head++)
        for (size_t p = 0; p < pages && status == PKV_OK; p++)
            status = get_page(input, seq, tokens, layer, head, p);
    return status == PKV_OK ? check_section(input) : status;
}

/* Fills an empty sequence, or leaves it empty. */
static pkv_status get_sequence(struct input *input, struct pkv_seq *seq, size_t tokens)
{
    struct pkv_cache *cache = seq->cache;
    const struct geometry *geometry = &cache->geometry;
    size_t pages = pages_count(&geometry->policy, tokens);
    pkv_status status;

    if (sequence_reserve(seq, pages) != PKV_OK)
        return fail(&cache->message, PKV_ERROR_MEMORY, "sequence: out of memory");
    status = get_states(input, seq, tokens);
    if (status == PKV_OK)
        status = acquire_slots(seq, pages);
    if (status != PKV_OK)
        return status;
    for (size_t layer = 0; layer < geometry->layers && status == PKV_OK; layer++)
        status = get_layer(input, seq, tokens, layer);
    if (status != PKV_OK) {
        for (size_t p = 0; p < pages; p++)
            cache_release_page(cache, seq->table[p]);
        return status;
    }
    seq->tokens = tokens;
    cache->stored_most = size_add(cache->stored_most, tokens);
    return PKV_OK;
}

pkv_status pkv_seq_load(pkv_cache *cache, pkv_session *theirs, const pkv_reader *reader,
                        pkv_seq **result)
{
    if (cache == NULL)
        return PKV_ERROR_ARGUMENT;

    struct message *message = &cache->message;
    pkv_session session;

    if (result == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "seq: NULL");
    *result = NULL;

    pkv_status status = read_session(message, theirs, &session);

    if (status != PKV_OK)
        return status;
    if (reader == NULL || reader->read == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "reader: NULL");
    status = cache_settle(cache, true);
    if (status != PKV_OK)
        return status;

    struct input input = {.reader = reader, .message = message};
    uint64_t numbers[NUMBERS];
    struct pkv_seq *seq;

    status = get_header(&input, numbers);
    if (status == PKV_OK)
        status = check_settings(cache, message, numbers);
    if (status == PKV_OK)
        status = get_model(&input, &cache->geometry, session.model_id,
                           (size_t)numbers[NUMBER_MODEL_ID_BYTES]);
    if (status == PKV_OK)
        status = check_sizes(cache, &session, numbers);
    if (status == PKV_OK)
        status = get_user(&input, session.user, numbers[NUMBER_USER_BYTES]);
    if (status == PKV_OK)
        status = pkv_seq_open(cache, &seq);
    if (status != PKV_OK)
        return status;
    status = get_sequence(&input, seq, (size_t)numbers[NUMBER_TOKENS]);
    if (status != PKV_OK) {
        pkv_seq_close(seq);
        return status;
    }
    theirs->user_bytes = (size_t)numbers[NUMBER_USER_BYTES];
    *result = seq;
    return PKV_OK;
}

pkv_status pkv_session_info_of(const pkv_reader *reader, pkv_session_info *info, char *message)
{
    struct message text = {""};
    struct input input = {.reader = reader, .message = &text};
    uint64_t numbers[NUMBERS];
    pkv_status status = PKV_OK;

    if (reader == NULL || reader->read == NULL)
        status = fail(&text, PKV_ERROR_ARGUMENT, "reader: NULL");
    else if (info == NULL)
        status = fail(&text, PKV_ERROR_ARGUMENT, "info: NULL");
    else
        status = structs_check(&structs_session_info, info, &text);
    if (status == PKV_OK)
        status = get_header(&input, numbers);
    if (status == PKV_OK &&
        (numbers[NUMBER_TOKENS] > SIZE_MAX || numbers[NUMBER_USER_BYTES] > SIZE_MAX))
        status = fail(&text, PKV_ERROR_FORMAT, "tokens, user_bytes: more than memory can hold");
    if (status == PKV_OK) {
        const pkv_session_info result = {.tokens = (size_t)numbers[NUMBER_TOKENS],
                                         .user_bytes = (size_t)numbers[NUMBER_USER_BYTES]};

        structs_write(&structs_session_info, &result, info);
    }
    if (message != NULL)
        snprintf(message, PKV_MESSAGE_BYTES, "%s", text.text);
    return status;
}
