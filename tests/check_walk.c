/* SPDX-License-Identifier: MIT */
/*
 * Random walks over open, step, abort, fork, truncate and close. A naive model keeps, for every
 * sequence, the list of its tokens and of its pages; a page is an object with an identity, which
 * two sequences share or do not. After every operation everything that the library says is compared
 * with it, and so is everything that lies in the slots.
 */
#include "fake_backend.h"

#include "tests.h" /* after message.h: see there */

#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS    512
#define MAX_PAGES     (MAX_TOKENS / 8 + 1)
#define MAX_SEQUENCES 6
#define MAX_ROWS      MAX_TOKENS

#define require_walk(condition)                                                                    \
    require_msg(condition, "seed %u, operation %u: %s", walk->seed, walk->operation, #condition)

struct model_page {
    size_t identity;
    bool factorized;
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

struct walk {
    unsigned seed;
    unsigned operation;
    uint32_t random;
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

    uint64_t factorized; /* pages, by committed steps */
    size_t n_committed, n_aborted, n_refused, n_forks, n_cuts, n_rebuilt, n_copied;
};

static uint32_t below(struct walk *walk, uint32_t limit)
{
    walk->random = walk->random * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)(walk->random >> 4) * limit >> 28);
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
    require_walk(stats.factorized_pages == walk->factorized);
    require_walk((uint64_t)stats.factorize_seconds == walk->factorized);
    require_walk(stats.capped_pages == 3 * walk->factorized);
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
        for (size_t t = 0; t < info.tokens; t++)
            require_walk(fake_token(walk->cache->backend, entry, t) ==
                         sequence->tokens[p * length + t]);
    }
    require_walk(pkv_seq_page(sequence->seq, pages, &info) == PKV_OK);
    require_walk(info.state == PKV_PAGE_EMPTY && info.tokens == 0 && info.bytes == 0 &&
                 info.sharers == 0);
}

/* One random page as the caller reads it. */
static void compare_page(struct walk *walk, const struct model_sequence *sequence)
{
    float k[256 * 8], v[256 * 8];
    size_t pages = pages_of(walk, sequence->n_tokens);

    if (pages == 0)
        return;

    size_t page = below(walk, (uint32_t)pages);
    size_t layer = below(walk, (uint32_t)walk->config.layers);
    size_t head = below(walk, (uint32_t)walk->config.kv_heads);
    bool factorized = sequence->pages[page].factorized;

    require_walk(pkv_seq_read_page(sequence->seq, layer, head, page, k, v) == PKV_OK);
    for (size_t t = 0; t < model_tokens_in(walk, sequence, page); t++) {
        size_t id = sequence->tokens[page * walk->config.page_tokens + t];

        /* The fake backend cannot put its numbers into codes. */
        for (size_t i = 0; i < walk->config.head_dim; i++) {
            require_walk((factorized && walk->config.factors_k == PKV_FACTORS_INT4) ||
                         k[t * walk->config.head_dim + i] == fake_number(id, layer, head, false));
            require_walk((factorized && walk->config.factors_v == PKV_FACTORS_INT4) ||
                         v[t * walk->config.head_dim + i] == fake_number(id, layer, head, true));
        }
    }
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
    if (walk->cache->backend->violation[0])
        ck_abort_msg("seed %u, operation %u: %s", walk->seed, walk->operation,
                     walk->cache->backend->violation);
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

static void open_sequence(struct walk *walk)
{
    struct model_sequence *sequence = &walk->sequences[walk->n_sequences];
    pkv_seq *seq;
    pkv_status status = pkv_seq_open(walk->cache, &seq);

    if (walk->n_sequences == walk->config.max_sequences) {
        require_walk(status == PKV_ERROR_CAPACITY && seq == NULL);
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

    pkv_status status = pkv_seq_fork(sequence->seq, &fork);

    if (walk->n_sequences == walk->config.max_sequences) {
        require_walk(status == PKV_ERROR_CAPACITY && fork == NULL);
        return;
    }
    require_walk(status == PKV_OK);
    walk->sequences[walk->n_sequences] = *sequence;
    walk->sequences[walk->n_sequences].seq = fork;
    walk->n_sequences++;
    walk->n_forks++;
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
    bool fails = below(walk, 8) == 0;

    if (below(walk, 4) == 0)
        tokens -= tokens % length;

    size_t page = tokens / length;
    bool rebuilds =
        tokens % length != 0 && sequence->pages[page].factorized && tokens < sequence->n_tokens;

    require_walk(pkv_seq_truncate(sequence->seq, sequence->n_tokens + 1) == PKV_ERROR_ARGUMENT);
    walk->cache->backend->fail_rebuild = fails ? PKV_ERROR_DEVICE : PKV_OK;

    pkv_status status = pkv_seq_truncate(sequence->seq, tokens);

    walk->cache->backend->fail_rebuild = PKV_OK;
    if (rebuilds) {
        if (status == PKV_ERROR_CAPACITY) {
            require_walk(!fits);
            return;
        }
        if (fails) {
            require_walk(status == PKV_ERROR_DEVICE);
            return;
        }
        sequence->pages[page] = (struct model_page){walk->next_identity++, false};
        walk->n_rebuilt++;
    }
    require_walk(status == PKV_OK);
    walk->disturbed = walk->disturbed || tokens != sequence->n_tokens;
    sequence->n_tokens = tokens;
    walk->n_cuts++;
}

static void refuse_busy(struct walk *walk)
{
    struct model_sequence *sequence = pick(walk, true);
    pkv_seq *fork;
    pkv_step *step;
    pkv_step_item item = {walk->sequences[0].seq, 1};

    require_walk(pkv_seq_close(sequence->seq) == PKV_ERROR_BUSY);
    require_walk(pkv_seq_fork(sequence->seq, &fork) == PKV_ERROR_BUSY && fork == NULL);
    require_walk(pkv_seq_truncate(sequence->seq, 0) == PKV_ERROR_BUSY);
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

    bool fails = below(walk, 10) == 0;

    walk->cache->backend->fail_begin = fails ? PKV_ERROR_DEVICE : PKV_OK;

    pkv_status status = pkv_step_begin(walk->cache, items, walk->n_items, &walk->step);

    walk->cache->backend->fail_begin = PKV_OK;
    if (status != PKV_OK) {
        require_walk(walk->step == NULL);
        if (status == PKV_ERROR_CAPACITY)
            require_walk(total > walk->config.max_tokens);
        else
            require_walk(fails && status == PKV_ERROR_DEVICE);
        for (size_t i = 0; i < walk->n_items; i++)
            walk->items[i]->new_tokens = 0;
        walk->n_items = 0;
        walk->n_refused++;
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
    walk->n_aborted++;
}

static void check_attention(struct walk *walk, size_t layer, const float *out, const float *lse)
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

static void do_layer(struct walk *walk)
{
    static float k[MAX_ROWS * 2 * 8], v[MAX_ROWS * 2 * 8], q[1], out[MAX_ROWS * 4 * 8];
    static float lse[MAX_ROWS * 4];
    size_t heads = walk->config.kv_heads, dim = walk->config.head_dim;
    size_t layer = walk->done_layers;
    size_t row = 0;
    bool attends = below(walk, 4) > 0;
    bool fails = below(walk, 12) == 0;
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
    walk->cache->backend->fail_layer = fails ? PKV_ERROR_SOLVER : PKV_OK;
    walk->cache->backend->failing_layer = layer;

    pkv_status status = pkv_step_layer(walk->step, layer, &io);

    walk->cache->backend->fail_layer = PKV_OK;
    if (fails) {
        require_walk(status == PKV_ERROR_SOLVER);
        require_walk(pkv_step_layer(walk->step, layer, &io) == PKV_ERROR_ARGUMENT);
        require_walk(pkv_step_end(walk->step) == PKV_ERROR_ARGUMENT);
        abort_step(walk);
        return;
    }
    require_walk(status == PKV_OK);
    if (attends)
        check_attention(walk, layer, out, lse);
    walk->done_layers++;
}

static void end_step(struct walk *walk)
{
    size_t length = walk->config.page_tokens;

    if (walk->done_layers < walk->config.layers) {
        require_walk(pkv_step_end(walk->step) == PKV_ERROR_ARGUMENT);
        return;
    }
    require_walk(pkv_step_end(walk->step) == PKV_OK);
    for (size_t i = 0; i < walk->n_items; i++) {
        struct model_sequence *sequence = walk->items[i];
        size_t old_pages = pages_of(walk, sequence->n_tokens);
        size_t tail = sequence->n_tokens / length;

        sequence->n_tokens += sequence->new_tokens;
        for (size_t p = old_pages; p < pages_of(walk, sequence->n_tokens); p++)
            sequence->pages[p] = (struct model_page){walk->next_identity++, false};
        if (sequence->copies_tail) {
            sequence->pages[tail].identity = walk->next_identity++;
            walk->n_copied++;
        }
        for (size_t p = walk->config.sink_pages;
             walk->config.factors_k != PKV_FACTORS_NONE &&
             p + walk->config.window_pages < sequence->n_tokens / length;
             p++) {
            if (sequence->pages[p].factorized)
                continue;
            sequence->pages[p] = (struct model_page){walk->next_identity++, true};
            walk->factorized++;
        }
    }
    close_step_model(walk);
    walk->n_committed++;
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
        else if (choice < 95)
            close_sequence(walk);
        else
            open_sequence(walk);
        return;
    }
    if (choice < 55)
        begin_step(walk);
    else if (choice < 65)
        open_sequence(walk);
    else if (choice < 80)
        fork_sequence(walk);
    else if (choice < 93)
        truncate_sequence(walk);
    else
        close_sequence(walk);
}

static void walk_randomly(struct walk *walk, unsigned operations)
{
    char message[PKV_MESSAGE_BYTES];
    size_t pages;

    walk->random = walk->seed * 2654435761u + 99;
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
    walk->config.allocator = counting_allocator(&walk->counting);
    require_walk(cache_open_with(&backend_fake, &walk->config, &walk->cache, message) == PKV_OK);

    for (walk->operation = 0; walk->operation < operations; walk->operation++) {
        do_something(walk);
        compare(walk);
    }
    pkv_cache_close(walk->cache);
    require_walk(walk->counting.live == 0);
}

START_TEST(random_walks)
{
    struct walk *sum = calloc(1, sizeof *sum);
    struct walk *walk = calloc(1, sizeof *walk);

    for (unsigned seed = 0; seed < 400; seed++) {
        memset(walk, 0, sizeof *walk);
        walk->seed = (unsigned)_i * 400 + seed;
        walk_randomly(walk, 600);
        sum->n_committed += walk->n_committed;
        sum->n_aborted += walk->n_aborted;
        sum->n_refused += walk->n_refused;
        sum->n_forks += walk->n_forks;
        sum->n_cuts += walk->n_cuts;
        sum->n_rebuilt += walk->n_rebuilt;
        sum->n_copied += walk->n_copied;
        sum->factorized += walk->factorized;
    }
    /* The walks went everywhere. */
    ck_assert_uint_gt(sum->n_committed, 1000);
    ck_assert_uint_gt(sum->n_aborted, 100);
    ck_assert_uint_gt(sum->n_refused, 100);
    ck_assert_uint_gt(sum->n_forks, 500);
    ck_assert_uint_gt(sum->n_cuts, 1000);
    ck_assert_uint_gt(sum->n_rebuilt, 100);
    ck_assert_uint_gt(sum->n_copied, 100);
    ck_assert_uint_gt(sum->factorized, 500);
    free(walk);
    free(sum);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("walk");
    TCase *test = tcase_create("walk");

    tcase_add_loop_test(test, random_walks, 0, 5);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
