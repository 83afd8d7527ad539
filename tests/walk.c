/* SPDX-License-Identifier: MIT */
/* Walks over the library's calls beside a naive model of it. */
#include "walk.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fake_backend.h"

#define MAX_TOKENS    512
#define MAX_PAGES     (MAX_TOKENS / 8 + 1)
#define MAX_SEQUENCES 6
#define MAX_ROWS      MAX_TOKENS

#define require_walk(condition)                                                                    \
    ((condition) ? (void)0 : walk->host->fail(walk->host->opaque, __FILE__, __LINE__, #condition))

struct model_page {
    size_t identity;
    bool factorized;
    bool rounded; /* the tokens have been in factors */
};

struct model_sequence {
    pkv_seq *seq;
    size_t tokens[MAX_TOKENS]; /* ids */
    size_t n_tokens;
    struct model_page pages[MAX_PAGES];
    /* The open step. */
    size_t new_tokens; /* 0: not in it */
    bool copies_tail;
};

/* A session, and what it holds. */
struct saved {
    unsigned char *data;
    size_t size, capacity;
    size_t at;      /* of reading */
    size_t fail_at; /* the byte that cannot be read or written */
    struct model_sequence sequence;
    uint64_t digest;
};

struct walk {
    const struct walk_host *host;
    pkv_config config;
    pkv_cache *cache;
    struct counting_allocator counting;
    struct model_sequence sequences[MAX_SEQUENCES]; /* in order of creation */
    size_t n_sequences;
    size_t next_token;
    size_t next_identity;

    pkv_step *step;
    struct model_sequence *items[MAX_SEQUENCES];
    size_t n_items;
    size_t rows;
    size_t done_layers;
    uint64_t digest; /* at begin */
    bool disturbed;  /* another sequence has changed since */

    struct saved saved;
    struct walk_counts counts;
};

static uint32_t below(struct walk *walk, uint32_t limit)
{
    return walk->host->below(walk->host->opaque, limit);
}

/* NULL on the CPU. */
static struct backend *fake(struct walk *walk)
{
    return walk->cache->ops == &backend_fake ? walk->cache->backend : NULL;
}

static size_t pages_of(const struct walk *walk, size_t tokens)
{
    return (tokens + walk->config.page_tokens - 1) / walk->config.page_tokens;
}

static size_t total_tokens(const struct walk *walk)
{
    size_t total = 0;

    for (size_t i = 0; i < walk->n_sequences; i++)
        total += walk->sequences[i].n_tokens + walk->sequences[i].new_tokens;
    return total;
}

static size_t count_sharers(const struct walk *walk, size_t identity)
{
    size_t n = 0;

    for (size_t i = 0; i < walk->n_sequences; i++) {
        for (size_t p = 0; p < pages_of(walk, walk->sequences[i].n_tokens); p++)
            n += walk->sequences[i].pages[p].identity == identity;
    }
    return n;
}

static pkv_page_state model_state(const struct walk *walk, const struct model_sequence *sequence,
                                  size_t page)
{
    size_t length = walk->config.page_tokens;

    if (page * length >= sequence->n_tokens)
        return PKV_PAGE_EMPTY;
    if (sequence->pages[page].factorized)
        return PKV_PAGE_FACTORIZED;
    if ((page + 1) * length > sequence->n_tokens)
        return PKV_PAGE_FILLING;
    return page < walk->config.sink_pages ? PKV_PAGE_SINK : PKV_PAGE_WINDOW;
}

/* ---- Comparison ---- */

static size_t model_tokens_in(const struct walk *walk, const struct model_sequence *sequence,
                              size_t page)
{
    size_t length = walk->config.page_tokens;
    size_t left = sequence->n_tokens - page * length;

    return left < length ? left : length;
}

/* Of K or V of one KV head. */
static size_t model_factor_bytes(const struct walk *walk, bool is_key)
{
    size_t length = walk->config.page_tokens, d = walk->config.head_dim;
    size_t rank = is_key ? walk->config.rank_k : walk->config.rank_v;

    if ((is_key ? walk->config.factors_k : walk->config.factors_v) == PKV_FACTORS_NATIVE)
        return rank * (length + d) * sizeof(float);
    return rank * (length + d) / 2 + 2 * ((is_key ? rank : length) + d);
}

static void add_model_page(const struct walk *walk, pkv_stats *stats, pkv_page_state state,
                           size_t tokens)
{
    size_t heads = walk->config.layers * walk->config.kv_heads;
    size_t token_bytes = heads * 2 * walk->config.head_dim * sizeof(float);
    size_t bytes = tokens * token_bytes;

    if (state == PKV_PAGE_FACTORIZED)
        bytes = heads * (model_factor_bytes(walk, true) + model_factor_bytes(walk, false));
    stats->pages[state]++;
    stats->bytes[state] += bytes;
    stats->payload_bytes += bytes;
    stats->raw_bytes += tokens * token_bytes;
}

/* Whether no other sequence has more of the page, nor an earlier one as much. */
static bool counts_here(const struct walk *walk, size_t i, size_t page)
{
    const struct model_sequence *here = &walk->sequences[i];

    for (size_t j = 0; j < walk->n_sequences; j++) {
        const struct model_sequence *there = &walk->sequences[j];

        if (j == i || page >= pages_of(walk, there->n_tokens) ||
            there->pages[page].identity != here->pages[page].identity)
            continue;
        if (model_tokens_in(walk, there, page) > model_tokens_in(walk, here, page) ||
            (j < i && model_tokens_in(walk, there, page) == model_tokens_in(walk, here, page)))
            return false;
    }
    return true;
}

static void compare_stats(struct walk *walk)
{
    pkv_stats cache_model = {0}, stats = {.struct_size = sizeof stats};

    for (size_t i = 0; i < walk->n_sequences; i++) {
        const struct model_sequence *sequence = &walk->sequences[i];
        pkv_stats model = {0};

        for (size_t p = 0; p < pages_of(walk, sequence->n_tokens); p++) {
            pkv_page_state state = model_state(walk, sequence, p);
            size_t tokens = model_tokens_in(walk, sequence, p);

            add_model_page(walk, &model, state, tokens);
            if (counts_here(walk, i, p))
                add_model_page(walk, &cache_model, state, tokens);
        }
        require_walk(pkv_seq_stats(sequence->seq, &stats) == PKV_OK);
        require_walk(stats.sequences == 1);
        require_walk(stats.tokens == sequence->n_tokens);
        require_walk(memcmp(stats.pages, model.pages, sizeof model.pages) == 0);
        require_walk(memcmp(stats.bytes, model.bytes, sizeof model.bytes) == 0);
        require_walk(stats.payload_bytes == model.payload_bytes);
        require_walk(stats.raw_bytes == model.raw_bytes);
        require_walk(stats.factorized_pages == model.pages[PKV_PAGE_FACTORIZED]);
        cache_model.tokens += sequence->n_tokens;
    }
    require_walk(pkv_cache_stats(walk->cache, &stats) == PKV_OK);
    require_walk(stats.sequences == walk->n_sequences);
    require_walk(stats.tokens == cache_model.tokens);
    require_walk(memcmp(stats.pages, cache_model.pages, sizeof stats.pages) == 0);
    require_walk(memcmp(stats.bytes, cache_model.bytes, sizeof stats.bytes) == 0);
    require_walk(stats.payload_bytes == cache_model.payload_bytes);
    require_walk(stats.raw_bytes == cache_model.raw_bytes);
    require_walk(stats.factorized_pages == walk->counts.factorized);
    if (fake(walk) != NULL && !walk->cache->submits) {
        require_walk((uint64_t)stats.factorize_seconds == walk->counts.factorized);
        require_walk(stats.capped_pages == 3 * walk->counts.factorized);
    }
}

static void compare_sequence(struct walk *walk, const struct model_sequence *sequence)
{
    pkv_page_info info = {.struct_size = sizeof info};
    size_t length = walk->config.page_tokens;
    size_t pages = pages_of(walk, sequence->n_tokens);

    require_walk(pkv_seq_tokens(sequence->seq) == sequence->n_tokens);
    for (size_t p = 0; p < pages; p++) {
        struct page entry = sequence->seq->table[p];
        pkv_page_state state = model_state(walk, sequence, p);

        require_walk(entry.kind == (state == PKV_PAGE_FACTORIZED ? SLOT_FACTOR : SLOT_DENSE));
        require_walk(pkv_seq_page(sequence->seq, p, &info) == PKV_OK);
        require_walk(info.state == state);
        require_walk(info.first_token == p * length);
        require_walk(info.tokens == model_tokens_in(walk, sequence, p));
        require_walk(info.sharers == count_sharers(walk, sequence->pages[p].identity));
        for (size_t t = 0; t < info.tokens && fake(walk) != NULL; t++)
            require_walk(fake_token(fake(walk), entry, t) == sequence->tokens[p * length + t]);
    }
    require_walk(pkv_seq_page(sequence->seq, pages, &info) == PKV_OK);
    require_walk(info.state == PKV_PAGE_EMPTY && info.tokens == 0 && info.bytes == 0 &&
                 info.sharers == 0);
}

/* One side of a page as the caller reads it. */
static void compare_rows(struct walk *walk, const struct model_sequence *sequence, size_t page,
                         size_t layer, size_t head, bool value, const float *rows)
{
    size_t tokens = model_tokens_in(walk, sequence, page), dim = walk->config.head_dim;
    const size_t *ids = sequence->tokens + page * walk->config.page_tokens;
    pkv_factors factors = value ? walk->config.factors_v : walk->config.factors_k;
    double error = 0, norm = 0;

    /* The fake backend cannot put its numbers into codes. */
    if (fake(walk) != NULL && factors == PKV_FACTORS_INT4 && sequence->pages[page].factorized)
        return;
    for (size_t t = 0; t < tokens; t++) {
        float number = fake_number(ids[t], layer, head, value);

        for (size_t i = 0; i < dim; i++) {
            double difference = (double)rows[t * dim + i] - (double)number;

            error += difference * difference;
            norm += (double)number * (double)number;
        }
    }
    if (fake(walk) != NULL || !sequence->pages[page].rounded)
        require_walk(error == 0);
    else if (factors == PKV_FACTORS_NATIVE)
        /* All columns of a page are equal, so one direction holds all. A solver may leave 10^-6 of
         * the squared norm, and pages may be cut and factorized again and again. */
        require_walk(error <= 1e-4 * norm);
    else
        require_walk(isfinite(error));
}

/* One random page. */
static void compare_page(struct walk *walk, const struct model_sequence *sequence)
{
    float k[8 * 8], v[8 * 8];
    size_t pages = pages_of(walk, sequence->n_tokens);

    require_walk(pkv_seq_read_page(sequence->seq, 0, 0, pages, k, v) == PKV_ERROR_ARGUMENT);
    if (pages == 0)
        return;

    size_t page = below(walk, (uint32_t)pages);
    size_t layer = below(walk, (uint32_t)walk->config.layers);
    size_t head = below(walk, (uint32_t)walk->config.kv_heads);

    require_walk(pkv_seq_read_page(sequence->seq, layer, head, page, k, v) == PKV_OK);
    compare_rows(walk, sequence, page, layer, head, false, k);
    compare_rows(walk, sequence, page, layer, head, true, v);
}

/* Every slot is used by exactly the pages that have one identity, or by the open step, or free. */
static void compare_slots(struct walk *walk, uint32_t kind)
{
    struct slots *slots = cache_pool(walk->cache, kind);
    size_t *identity = calloc(slots->count + 1, sizeof *identity);
    uint32_t *references = calloc(slots->count + 1, sizeof *references);
    size_t n_free = 0;

    for (size_t i = 0; i < walk->n_sequences; i++) {
        const struct model_sequence *sequence = &walk->sequences[i];

        for (size_t p = 0; p < pages_of(walk, sequence->n_tokens); p++) {
            struct page entry = sequence->seq->table[p];

            if (entry.kind != kind)
                continue;
            require_walk(entry.slot < slots->count);
            require_walk(references[entry.slot] == 0 ||
                         identity[entry.slot] == sequence->pages[p].identity);
            identity[entry.slot] = sequence->pages[p].identity;
            references[entry.slot]++;
        }
    }
    for (size_t i = 0; walk->step && i < walk->step->n_changes; i++) {
        const struct page_change *change = &walk->step->changes[i];

        if (change->to.kind != kind ||
            (change->from.kind == kind && change->from.slot == change->to.slot))
            continue;
        require_walk(references[change->to.slot] == 0);
        references[change->to.slot]++;
    }
    for (uint32_t slot = 0; slot < slots->count; slot++) {
        bool marked = slots->levels[0][slot / 64] >> slot % 64 & 1;

        require_walk(slots->references[slot] == references[slot]);
        require_walk(marked == (references[slot] == 0));
        n_free += marked;
    }
    require_walk(slots->n_free == n_free);
    free(identity);
    free(references);
}

static void compare(struct walk *walk)
{
    if (fake(walk) != NULL && fake(walk)->violation[0])
        walk->host->fail(walk->host->opaque, __FILE__, __LINE__, fake(walk)->violation);
    compare_stats(walk);
    for (size_t i = 0; i < walk->n_sequences; i++)
        compare_sequence(walk, &walk->sequences[i]);
    if (walk->n_sequences > 0)
        compare_page(walk, &walk->sequences[below(walk, (uint32_t)walk->n_sequences)]);
    compare_slots(walk, SLOT_DENSE);
    compare_slots(walk, SLOT_FACTOR);

    /* In the order of creation. */
    const struct pkv_seq *seq = walk->cache->first;

    for (size_t i = 0; i < walk->n_sequences; i++, seq = seq->next)
        require_walk(seq == walk->sequences[i].seq);
    require_walk(seq == NULL);
}

/* ---- Operations ---- */

static struct model_sequence *pick(struct walk *walk, bool in_step)
{
    struct model_sequence *candidates[MAX_SEQUENCES];
    uint32_t n = 0;

    for (size_t i = 0; i < walk->n_sequences; i++) {
        if ((walk->sequences[i].new_tokens > 0) == in_step)
            candidates[n++] = &walk->sequences[i];
    }
    return n > 0 ? candidates[below(walk, n)] : NULL;
}

/* Now and then an allocation of the next call fails. */
static void begin_call(struct walk *walk)
{
    walk->counting.calls = 0;
    walk->counting.fail_at = below(walk, 8) == 0 ? 1 + below(walk, 6) : 0;
    walk->counting.fail_forever = walk->counting.fail_at % 2 == 0;
}

/* Whether one has failed, which the call says. */
static bool starved(struct walk *walk, pkv_status status)
{
    bool failed = walk->counting.fail_at > 0 && walk->counting.calls >= walk->counting.fail_at;

    walk->counting.fail_at = 0;
    require_walk(failed == (status == PKV_ERROR_MEMORY));
    walk->counts.starved += failed;
    if (status != PKV_OK) {
        const char *message = pkv_cache_message(walk->cache);

        require_walk(*message != '\0' && strchr(message, '\n') == NULL);
    }
    return failed;
}

static void open_sequence(struct walk *walk)
{
    struct model_sequence *sequence = &walk->sequences[walk->n_sequences];
    pkv_status status;
    pkv_seq *seq;

    begin_call(walk);
    status = pkv_seq_open(walk->cache, &seq);
    require_walk((status == PKV_OK) == (seq != NULL));
    if (starved(walk, status))
        return;
    if (walk->n_sequences == walk->config.max_sequences) {
        require_walk(status == PKV_ERROR_CAPACITY);
        return;
    }
    require_walk(status == PKV_OK);
    *sequence = (struct model_sequence){.seq = seq};
    walk->n_sequences++;
    walk->disturbed = true;
}

static void close_sequence(struct walk *walk)
{
    struct model_sequence *sequence = pick(walk, false);

    if (sequence == NULL)
        return;
    require_walk(pkv_seq_close(sequence->seq) == PKV_OK);
    walk->disturbed = true;

    size_t i = (size_t)(sequence - walk->sequences);

    walk->n_sequences--;
    memmove(sequence, sequence + 1, (walk->n_sequences - i) * sizeof *sequence);
    for (size_t j = 0; j < walk->n_items; j++)
        walk->items[j] -= walk->items[j] > sequence;
}

static void fork_sequence(struct walk *walk)
{
    struct model_sequence *sequence = pick(walk, false);
    pkv_seq *fork;

    if (sequence == NULL)
        return;

    begin_call(walk);

    pkv_status status = pkv_seq_fork(sequence->seq, &fork);

    require_walk((status == PKV_OK) == (fork != NULL));
    if (starved(walk, status))
        return;
    if (walk->n_sequences == walk->config.max_sequences) {
        require_walk(status == PKV_ERROR_CAPACITY);
        return;
    }
    require_walk(status == PKV_OK);
    walk->sequences[walk->n_sequences] = *sequence;
    walk->sequences[walk->n_sequences].seq = fork;
    walk->n_sequences++;
    walk->counts.forks++;
    walk->disturbed = true;
}

static void truncate_sequence(struct walk *walk)
{
    struct model_sequence *sequence = pick(walk, false);

    if (sequence == NULL)
        return;

    size_t length = walk->config.page_tokens;
    size_t tokens = below(walk, (uint32_t)sequence->n_tokens + 1);
    bool fits = total_tokens(walk) <= walk->config.max_tokens;
    bool fails = fake(walk) != NULL && below(walk, 8) == 0;

    if (below(walk, 4) == 0)
        tokens -= tokens % length;

    size_t page = tokens / length;
    bool rebuilds =
        tokens % length != 0 && sequence->pages[page].factorized && tokens < sequence->n_tokens;

    require_walk(pkv_seq_truncate(sequence->seq, sequence->n_tokens + 1) == PKV_ERROR_ARGUMENT);
    if (fails)
        fake(walk)->fail_rebuild = PKV_ERROR_DEVICE;
    begin_call(walk);

    pkv_status status = pkv_seq_truncate(sequence->seq, tokens);

    if (fails)
        fake(walk)->fail_rebuild = PKV_OK;
    if (starved(walk, status))
        return;
    if (rebuilds) {
        if (status == PKV_ERROR_CAPACITY) {
            require_walk(!fits);
            return;
        }
        if (fails) {
            require_walk(status == PKV_ERROR_DEVICE);
            return;
        }
        sequence->pages[page] = (struct model_page){walk->next_identity++, false, true};
        walk->counts.rebuilt++;
    }
    require_walk(status == PKV_OK);
    walk->disturbed = walk->disturbed || tokens != sequence->n_tokens;
    sequence->n_tokens = tokens;
    walk->counts.cuts++;
}

/* ---- Sessions ---- */

static int write_saved(void *opaque, const void *data, size_t bytes)
{
    struct saved *saved = opaque;

    if (bytes > saved->fail_at - saved->size)
        return 1;
    if (bytes > saved->capacity - saved->size) {
        saved->capacity = 2 * (saved->size + bytes);
        saved->data = realloc(saved->data, saved->capacity);
        if (saved->data == NULL)
            abort();
    }
    memcpy(saved->data + saved->size, data, bytes);
    saved->size += bytes;
    return 0;
}

static ptrdiff_t read_saved(void *opaque, void *data, size_t bytes)
{
    struct saved *saved = opaque;

    if (bytes > saved->size - saved->at)
        bytes = saved->size - saved->at;
    if (bytes > saved->fail_at - saved->at)
        return -1;
    memcpy(data, saved->data + saved->at, bytes);
    saved->at += bytes;
    return (ptrdiff_t)bytes;
}

static void save_sequence(struct walk *walk)
{
    struct model_sequence *sequence = pick(walk, false);
    const pkv_writer writer = {write_saved, &walk->saved};
    const pkv_session session = {sizeof session, "walk", &walk->config, below(walk, 9)};

    if (sequence == NULL)
        return;
    walk->saved.size = 0;
    walk->saved.fail_at = below(walk, 8) == 0 ? below(walk, 4096) : SIZE_MAX;
    begin_call(walk);

    pkv_status status = pkv_seq_save(sequence->seq, &session, &writer);

    require_walk(!starved(walk, status));
    if (status != PKV_OK) {
        require_walk(status == PKV_ERROR_IO && walk->saved.fail_at != SIZE_MAX);
        walk->saved.size = 0;
        return;
    }
    walk->saved.sequence = *sequence;
    require_walk(pkv_seq_digest(sequence->seq, &walk->saved.digest) == PKV_OK);
    walk->counts.saved++;
}

/* A new sequence with pages of its own. */
static void add_loaded(struct walk *walk, pkv_seq *seq)
{
    struct model_sequence *sequence = &walk->sequences[walk->n_sequences++];
    uint64_t digest;

    *sequence = walk->saved.sequence;
    sequence->seq = seq;
    sequence->new_tokens = 0;
    for (size_t p = 0; p < pages_of(walk, sequence->n_tokens); p++)
        sequence->pages[p].identity = walk->next_identity++;
    require_walk(pkv_seq_digest(seq, &digest) == PKV_OK);
    require_walk(digest == walk->saved.digest);
    walk->counts.loaded++;
    walk->disturbed = true;
}

static void load_sequence(struct walk *walk)
{
    struct saved *saved = &walk->saved;
    const pkv_reader reader = {read_saved, saved};
    pkv_session session = {sizeof session, "walk", NULL, 0};
    pkv_status expected = PKV_OK;
    unsigned char flip = 0;
    size_t size = saved->size, at = 0;
    bool fits = walk->n_sequences < walk->config.max_sequences &&
                total_tokens(walk) + saved->sequence.n_tokens <= walk->config.max_tokens;
    pkv_seq *seq;

    if (size == 0)
        return;
    saved->at = 0;
    saved->fail_at = SIZE_MAX;
    switch (below(walk, 8)) {
    case 0:
        at = below(walk, (uint32_t)size);
        flip = (unsigned char)(1 + below(walk, 255));
        expected = PKV_ERROR_FORMAT;
        break;
    case 1:
        saved->size = below(walk, (uint32_t)size);
        expected = PKV_ERROR_FORMAT;
        break;
    case 2:
        saved->fail_at = below(walk, (uint32_t)size);
        expected = PKV_ERROR_IO;
        break;
    case 3:
        session.model_id = "walks";
        expected = PKV_ERROR_MISMATCH;
        break;
    }
    saved->data[at] ^= flip;
    begin_call(walk);

    pkv_status status = pkv_seq_load(walk->cache, &session, &reader, &seq);

    saved->data[at] ^= flip;
    saved->size = size;
    require_walk((status == PKV_OK) == (seq != NULL));
    if (starved(walk, status))
        return;
    walk->counts.damaged += status != PKV_OK && status == expected;
    if (status == PKV_ERROR_CAPACITY)
        require_walk(!fits);
    else
        require_walk(status == expected);
    if (status == PKV_OK) {
        require_walk(walk->n_sequences < walk->config.max_sequences);
        add_loaded(walk, seq);
    }
}

static void refuse_busy(struct walk *walk)
{
    struct model_sequence *sequence = pick(walk, true);
    pkv_seq *fork;
    pkv_step *step;
    pkv_step_item item = {walk->sequences[0].seq, 1};
    const pkv_session session = {sizeof session, NULL, NULL, 0};
    const pkv_writer writer = {write_saved, &walk->saved};

    require_walk(pkv_seq_close(sequence->seq) == PKV_ERROR_BUSY);
    require_walk(pkv_seq_fork(sequence->seq, &fork) == PKV_ERROR_BUSY && fork == NULL);
    require_walk(pkv_seq_truncate(sequence->seq, 0) == PKV_ERROR_BUSY);
    require_walk(pkv_seq_save(sequence->seq, &session, &writer) == PKV_ERROR_BUSY);
    require_walk(pkv_step_begin(walk->cache, &item, 1, &step) == PKV_ERROR_BUSY && step == NULL);
}

static void begin_step(struct walk *walk)
{
    pkv_step_item items[MAX_SEQUENCES];
    size_t most = walk->config.max_step_tokens;
    size_t total = total_tokens(walk);
    uint32_t greed = below(walk, 8);
    bool skips = below(walk, 2) == 0;

    walk->n_items = 0;
    walk->rows = 0;
    for (size_t i = 0; i < walk->n_sequences && walk->rows < most; i++) {
        struct model_sequence *sequence = &walk->sequences[i];
        size_t limit = most - walk->rows;

        if (skips && below(walk, 3) > 0)
            continue;
        if (limit > walk->config.max_tokens - sequence->n_tokens)
            limit = walk->config.max_tokens - sequence->n_tokens;
        /* Mostly within the promise, and now and then beyond it. */
        if (greed > 0 && limit > walk->config.max_tokens - total &&
            walk->config.max_tokens >= total)
            limit = walk->config.max_tokens - total;
        if (limit > 3 && below(walk, 3) > 0)
            limit = 1 + below(walk, 3);
        else if (limit > 20 && below(walk, 3) > 0)
            limit = 20;
        if (limit == 0)
            continue;
        sequence->new_tokens = 1 + below(walk, (uint32_t)limit);
        walk->items[walk->n_items] = sequence;
        items[walk->n_items++] = (pkv_step_item){sequence->seq, sequence->new_tokens};
        walk->rows += sequence->new_tokens;
        total += sequence->new_tokens;
    }
    if (walk->n_items == 0)
        return;

    /* Items in any order. */
    size_t a = below(walk, (uint32_t)walk->n_items);
    pkv_step_item item = items[0];
    struct model_sequence *sequence = walk->items[0];

    items[0] = items[a];
    items[a] = item;
    walk->items[0] = walk->items[a];
    walk->items[a] = sequence;

    require_walk(pkv_cache_digest(walk->cache, &walk->digest) == PKV_OK);
    walk->disturbed = false;
    for (size_t i = 0; i < walk->n_items; i++) {
        struct model_page *tail =
            &walk->items[i]->pages[walk->items[i]->n_tokens / walk->config.page_tokens];

        walk->items[i]->copies_tail = walk->items[i]->n_tokens % walk->config.page_tokens != 0 &&
                                      count_sharers(walk, tail->identity) > 1;
    }

    bool fails = fake(walk) != NULL && below(walk, 10) == 0;

    if (fails)
        fake(walk)->fail_begin = PKV_ERROR_DEVICE;
    begin_call(walk);

    pkv_status status = pkv_step_begin(walk->cache, items, walk->n_items, &walk->step);

    if (fails)
        fake(walk)->fail_begin = PKV_OK;
    if (!starved(walk, status) && status != PKV_OK) {
        if (status == PKV_ERROR_CAPACITY)
            require_walk(total > walk->config.max_tokens);
        else
            require_walk(fails && status == PKV_ERROR_DEVICE);
    }
    if (status != PKV_OK) {
        require_walk(walk->step == NULL);
        for (size_t i = 0; i < walk->n_items; i++)
            walk->items[i]->new_tokens = 0;
        walk->n_items = 0;
        walk->counts.refused++;
        return;
    }
    require_walk(!fails);
    walk->done_layers = 0;
    for (size_t i = 0; i < walk->n_items; i++) {
        sequence = walk->items[i];
        for (size_t t = 0; t < sequence->new_tokens; t++)
            sequence->tokens[sequence->n_tokens + t] = walk->next_token++;
    }
}

static void close_step_model(struct walk *walk)
{
    for (size_t i = 0; i < walk->n_items; i++)
        walk->items[i]->new_tokens = 0;
    walk->n_items = 0;
    walk->step = NULL;
}

static void abort_step(struct walk *walk)
{
    uint64_t digest;

    pkv_step_abort(walk->step);
    close_step_model(walk);
    if (!walk->disturbed) {
        require_walk(pkv_cache_digest(walk->cache, &digest) == PKV_OK);
        require_walk(digest == walk->digest);
    }
    walk->counts.aborted++;
}

/* What the fake backend's queries read. */
static void check_order(struct walk *walk, size_t layer, const float *out, const float *lse)
{
    size_t dim = walk->config.head_dim;
    size_t query_heads = walk->config.query_heads;
    size_t group = query_heads / walk->config.kv_heads;
    size_t first_row = 0;

    for (size_t i = 0; i < walk->n_items; i++) {
        const struct model_sequence *sequence = walk->items[i];

        for (size_t h = 0; h < query_heads; h++) {
            uint32_t sum = 0;

            for (size_t t = 0; t < sequence->n_tokens + sequence->new_tokens; t++) {
                sum = fake_mix(sum, fake_number(sequence->tokens[t], layer, h / group, false));
                sum = fake_mix(sum, fake_number(sequence->tokens[t], layer, h / group, true));
                if (t < sequence->n_tokens)
                    continue;

                size_t row = first_row + t - sequence->n_tokens;

                for (size_t j = 0; j < dim; j++)
                    require_walk(out[(row * query_heads + h) * dim + j] == (float)sum);
                require_walk(lse[row * query_heads + h] == (float)(t + 1));
            }
        }
        first_row += sequence->new_tokens;
    }
}

/* Queries that are 0 attend to all tokens alike. */
static void check_means(struct walk *walk, size_t layer, const float *out, const float *lse)
{
    size_t dim = walk->config.head_dim;
    size_t query_heads = walk->config.query_heads;
    size_t group = query_heads / walk->config.kv_heads;
    size_t first_row = 0;

    for (size_t i = 0; i < walk->n_items; i++) {
        const struct model_sequence *sequence = walk->items[i];

        for (size_t h = 0; h < query_heads; h++) {
            double sum = 0, most = 0;

            for (size_t t = 0; t < sequence->n_tokens + sequence->new_tokens; t++) {
                double number = (double)fake_number(sequence->tokens[t], layer, h / group, true);

                sum += number;
                most = fmax(most, number);
                if (t < sequence->n_tokens)
                    continue;

                size_t row = first_row + t - sequence->n_tokens;

                /* Tokens that are in factors are near what they were: see compare_rows(). */
                for (size_t j = 0; j < dim; j++)
                    require_walk(fabs((double)out[(row * query_heads + h) * dim + j] -
                                      sum / (double)(t + 1)) <= 0.02 * most);
                require_walk(fabs((double)lse[row * query_heads + h] - log((double)(t + 1))) <=
                             1e-4);
            }
        }
        first_row += sequence->new_tokens;
    }
}

static void do_layer(struct walk *walk)
{
    static float k[MAX_ROWS * 2 * 8], v[MAX_ROWS * 2 * 8], q[MAX_ROWS * 4 * 8];
    static float out[MAX_ROWS * 4 * 8];
    static float lse[MAX_ROWS * 4];
    size_t heads = walk->config.kv_heads, dim = walk->config.head_dim;
    size_t layer = walk->done_layers;
    size_t row = 0;
    bool attends = below(walk, 4) > 0;
    bool fails = fake(walk) != NULL && below(walk, 12) == 0;
    pkv_step_io io = {.struct_size = sizeof io,
                      .q = {.data = q},
                      .k = {.data = k},
                      .v = {.data = v},
                      .out = {.data = attends ? out : NULL},
                      .lse = attends ? lse : NULL};

    for (size_t i = 0; i < walk->n_items; i++) {
        const struct model_sequence *sequence = walk->items[i];

        for (size_t t = 0; t < sequence->new_tokens; t++, row++) {
            for (size_t j = 0; j < heads * dim; j++) {
                size_t id = sequence->tokens[sequence->n_tokens + t];

                k[row * heads * dim + j] = fake_number(id, layer, j / dim, false);
                v[row * heads * dim + j] = fake_number(id, layer, j / dim, true);
            }
        }
    }
    pkv_status expected = PKV_OK;

    if (fails) {
        expected = fake(walk)->fail_layer = PKV_ERROR_SOLVER;
        fake(walk)->failing_layer = layer;
    } else if (below(walk, 16) == 0) {
        expected = PKV_ERROR_VALUE;
        k[below(walk, (uint32_t)(row * heads * dim))] = below(walk, 2) == 0 ? INFINITY : NAN;
    }
    begin_call(walk);

    pkv_status status = pkv_step_layer(walk->step, layer, &io);

    /* It allocates nothing. */
    require_walk(!starved(walk, status));
    if (fails)
        fake(walk)->fail_layer = PKV_OK;
    if (expected != PKV_OK) {
        require_walk(status == expected);
        require_walk(pkv_step_layer(walk->step, layer, &io) == PKV_ERROR_ARGUMENT);
        require_walk(pkv_step_end(walk->step) == PKV_ERROR_ARGUMENT);
        abort_step(walk);
        return;
    }
    require_walk(status == PKV_OK);
    if (attends)
        (fake(walk) != NULL ? check_order : check_means)(walk, layer, out, lse);
    walk->done_layers++;
}

/* A call that finds the failure of a step that nobody has waited for; a sequence may be closed by
 * it. */
static void report_failure(struct walk *walk, pkv_seq *seq)
{
    float k[8 * 8];
    uint64_t digest;
    pkv_seq *fork;
    pkv_status status;

    switch (below(walk, 5)) {
    case 0:
        status = pkv_cache_digest(walk->cache, &digest);
        break;
    case 1:
        status = pkv_seq_digest(seq, &digest);
        break;
    case 2:
        status = pkv_seq_fork(seq, &fork);
        require_walk(fork == NULL);
        break;
    case 3:
        status = pkv_seq_truncate(seq, 0);
        break;
    default:
        status = pkv_seq_read_page(seq, 0, 0, 0, k, NULL);
        break;
    }
    require_walk(status == PKV_ERROR_DEVICE);
    require_walk(strstr(pkv_cache_message(walk->cache), "on demand") != NULL);
}

/* The sequences of the step, which had `tokens`, take nothing but a cut to that. */
static void repair(struct walk *walk, struct model_sequence *const *items, const size_t *tokens,
                   size_t n)
{
    size_t length = walk->config.page_tokens;
    pkv_step_item item = {.tokens = 1};
    pkv_step *step;

    report_failure(walk, walk->sequences[below(walk, (uint32_t)walk->n_sequences)].seq);
    for (size_t i = 0; i < n; i++) {
        struct model_sequence *sequence = items[i];
        size_t page = tokens[i] / length;
        size_t good =
            tokens[i] % length != 0 && sequence->pages[page].factorized ? page * length : tokens[i];
        size_t other = below(walk, (uint32_t)sequence->n_tokens + 1);
        uint64_t digest;

        item.seq = sequence->seq;
        require_walk(pkv_seq_digest(sequence->seq, &digest) == PKV_ERROR_DEVICE);
        require_walk(strstr(pkv_cache_message(walk->cache), "truncate it to ") != NULL);
        require_walk(pkv_step_begin(walk->cache, &item, 1, &step) == PKV_ERROR_DEVICE);
        if (other != good)
            require_walk(pkv_seq_truncate(sequence->seq, other) == PKV_ERROR_DEVICE);
        require_walk(pkv_seq_truncate(sequence->seq, good) == PKV_OK);
        sequence->n_tokens = good;
    }
    walk->counts.late++;
}

static void end_step(struct walk *walk)
{
    size_t length = walk->config.page_tokens;
    bool fails = walk->cache->submits && below(walk, 4) == 0;
    struct model_sequence *items[MAX_SEQUENCES];
    size_t tokens[MAX_SEQUENCES];
    size_t n_items = walk->n_items;

    if (walk->done_layers < walk->config.layers) {
        require_walk(pkv_step_end(walk->step) == PKV_ERROR_ARGUMENT);
        return;
    }
    if (walk->cache->submits) {
        fake(walk)->fail_submitted = fails ? PKV_ERROR_DEVICE : PKV_OK;
        fake(walk)->slow = below(walk, 2) == 0;
    }
    require_walk(pkv_step_end(walk->step) == PKV_OK);
    for (size_t i = 0; i < walk->n_items; i++) {
        struct model_sequence *sequence = walk->items[i];
        size_t old_pages = pages_of(walk, sequence->n_tokens);
        size_t tail = sequence->n_tokens / length;

        items[i] = sequence;
        tokens[i] = sequence->n_tokens;
        sequence->n_tokens += sequence->new_tokens;
        for (size_t p = old_pages; p < pages_of(walk, sequence->n_tokens); p++)
            sequence->pages[p] = (struct model_page){walk->next_identity++, false, false};
        if (sequence->copies_tail) {
            sequence->pages[tail].identity = walk->next_identity++;
            walk->counts.copied++;
        }
        for (size_t p = walk->config.sink_pages;
             walk->config.factors_k != PKV_FACTORS_NONE &&
             p + walk->config.window_pages < sequence->n_tokens / length;
             p++) {
            if (sequence->pages[p].factorized)
                continue;
            sequence->pages[p] = (struct model_page){walk->next_identity++, true, true};
            walk->counts.factorized++;
        }
    }
    close_step_model(walk);
    walk->counts.committed++;
    if (fails)
        repair(walk, items, tokens, n_items);
}

static void do_something(struct walk *walk)
{
    uint32_t choice = below(walk, 100);

    if (walk->step != NULL) {
        if (choice < 55)
            walk->done_layers < walk->config.layers ? do_layer(walk) : end_step(walk);
        else if (choice < 60)
            abort_step(walk);
        else if (choice < 65)
            end_step(walk);
        else if (choice < 70)
            refuse_busy(walk);
        else if (choice < 78)
            fork_sequence(walk);
        else if (choice < 90)
            truncate_sequence(walk);
        else if (choice < 94)
            close_sequence(walk);
        else if (choice < 96)
            save_sequence(walk);
        else if (choice < 98)
            load_sequence(walk);
        else
            open_sequence(walk);
        return;
    }
    if (choice < 50)
        begin_step(walk);
    else if (choice < 59)
        open_sequence(walk);
    else if (choice < 72)
        fork_sequence(walk);
    else if (choice < 84)
        truncate_sequence(walk);
    else if (choice < 89)
        save_sequence(walk);
    else if (choice < 94)
        load_sequence(walk);
    else
        close_sequence(walk);
}

/* ---- Walks ---- */

static void choose_settings(struct walk *walk)
{
    size_t pages;

    pkv_config_init(&walk->config, sizeof walk->config);
    walk->config.layers = 1 + below(walk, 2);
    walk->config.kv_heads = 1 + below(walk, 2);
    walk->config.query_heads = walk->config.kv_heads * (1 + below(walk, 2));
    walk->config.head_dim = 8;
    walk->config.page_tokens = 8;
    walk->config.sink_pages = below(walk, 3);
    walk->config.window_pages = below(walk, 4);
    walk->config.rank_k = 1 + below(walk, 8);
    walk->config.rank_v = 1 + below(walk, 8);
    if (below(walk, 3) == 0)
        walk->config.factors_k = PKV_FACTORS_INT4;
    if (below(walk, 3) == 0)
        walk->config.factors_v = PKV_FACTORS_INT4;
    if (below(walk, 5) == 0) {
        walk->config.factors_k = PKV_FACTORS_NONE;
        walk->config.factors_v = PKV_FACTORS_NONE;
    }
    walk->config.dtype = PKV_F32;
    walk->config.max_sequences = 1 + below(walk, MAX_SEQUENCES);
    pages = 1 + below(walk, 20);
    walk->config.max_tokens = pages * 8 + below(walk, 8);
    walk->config.max_step_tokens = 1 + below(walk, (uint32_t)walk->config.max_tokens);
    /* Few tokens a step, or few at all, are where the slots are tightest. */
    if (below(walk, 2) == 0)
        walk->config.max_step_tokens = 1 + below(walk, 4);
    if (below(walk, 4) == 0)
        walk->config.max_tokens = walk->config.max_sequences * (1 + below(walk, 10));
    walk->config.threads = 1;
    /* Some stream: it means something to the fake backend alone. */
    walk->config.step_flags = below(walk, 3) == 0 ? PKV_STEP_ASYNC : 0;
    walk->config.stream = walk;
}

struct walk *walk_open(const struct walk_host *host)
{
    struct walk *walk = calloc(1, sizeof *walk);
    bool cpu;

    if (walk == NULL)
        abort();
    walk->host = host;
    choose_settings(walk);
    walk->config.allocator = counting_allocator(&walk->counting);
    cpu = below(walk, 4) == 0;
    require_walk(cache_open_with(cpu ? &backend_cpu : &backend_fake, &walk->config, &walk->cache,
                                 NULL) == PKV_OK);
    return walk;
}

void walk_on(struct walk *walk)
{
    do_something(walk);
    compare(walk);
}

void walk_close(struct walk *walk, struct walk_counts *counts)
{
    pkv_cache_close(walk->cache);
    require_walk(walk->counting.live == 0);
    counts->factorized += walk->counts.factorized;
    counts->committed += walk->counts.committed;
    counts->aborted += walk->counts.aborted;
    counts->refused += walk->counts.refused;
    counts->forks += walk->counts.forks;
    counts->cuts += walk->counts.cuts;
    counts->rebuilt += walk->counts.rebuilt;
    counts->copied += walk->counts.copied;
    counts->saved += walk->counts.saved;
    counts->loaded += walk->counts.loaded;
    counts->damaged += walk->counts.damaged;
    counts->starved += walk->counts.starved;
    counts->late += walk->counts.late;
    free(walk->saved.data);
    free(walk);
}
