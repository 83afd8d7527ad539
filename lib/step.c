/* SPDX-License-Identifier: MIT */
/* Steps: plan, layer by layer, commit or abort. */
#include "cache.h"
#include "numeric.h"
#include "structs.h"

#include <string.h>

static void account(struct pkv_cache *cache, const struct step_report *report)
{
    cache->factorize_seconds += report->factorize_seconds;
    cache->capped_pages += report->capped_pages;
}

/* Frees what there is of a step. */
static void clear_step(struct pkv_step *step)
{
    struct pkv_cache *cache = step->cache;

    memory_release(&cache->memory, step->changes);
    memory_release(&cache->memory, step->sequences);
    memory_release(&cache->memory, step->items);
    *step = (struct pkv_step){.cache = cache};
}

/* ---- Steps under way ---- */

/* What a sequence had before the step is still there, but for a page that was incomplete then and
 * has become factors of good and bad tokens alike. */
static void mark_failed(const struct pkv_step *step, pkv_status status)
{
    const struct page_policy *policy = &step->cache->geometry.policy;

    for (size_t i = 0; i < step->plan.n_items; i++) {
        struct pkv_seq *seq = step->sequences[i];
        size_t tokens = step->items[i].tokens;
        size_t last = tokens / policy->page_tokens;

        if (seq->failed != PKV_OK)
            continue;
        if (tokens % policy->page_tokens != 0 && seq->table[last].kind == SLOT_FACTOR)
            tokens = last * policy->page_tokens;
        seq->failed = status;
        seq->good_tokens = tokens;
    }
}

pkv_status cache_settle(struct pkv_cache *cache, bool wait)
{
    pkv_status first = PKV_OK;
    struct message message = {""};

    while (cache->n_submitted > 0) {
        struct step_report report = {0};
        bool done = true;
        pkv_status status = cache->ops->step_settle(
            cache->backend, wait || first != PKV_OK || cache->n_submitted == MAX_SUBMITTED, &done,
            &report);

        if (!done)
            break;
        if (status == PKV_OK) {
            account(cache, &report);
        } else {
            mark_failed(&cache->submitted[0], status);
            if (first == PKV_OK) {
                first = status;
                message = cache->message;
            }
        }
        clear_step(&cache->submitted[0]);
        cache->n_submitted--;
        memmove(cache->submitted, cache->submitted + 1,
                cache->n_submitted * sizeof *cache->submitted);
    }
    if (first != PKV_OK)
        cache->message = message;
    return first;
}

pkv_status sequence_check(const struct pkv_seq *seq)
{
    if (seq->failed == PKV_OK)
        return PKV_OK;
    return fail(&seq->cache->message, seq->failed,
                "sequence: a step has failed; truncate it to %zu tokens or close it",
                seq->good_tokens);
}

pkv_status sequence_settle(struct pkv_seq *seq)
{
    pkv_status status = cache_settle(seq->cache, true);

    return status == PKV_OK ? sequence_check(seq) : status;
}

/* ---- Begin ---- */

static pkv_status check_item(struct pkv_cache *cache, size_t i, const pkv_step_item *item)
{
    struct message *message = &cache->message;

    if (item->seq == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "items[%zu].seq: NULL", i);
    if (item->seq->cache != cache)
        return fail(message, PKV_ERROR_ARGUMENT, "items[%zu].seq: it belongs to another cache", i);
    if (item->seq->in_step)
        return fail(message, PKV_ERROR_ARGUMENT, "items[%zu].seq: it is there twice", i);
    if (item->tokens == 0)
        return fail(message, PKV_ERROR_ARGUMENT, "items[%zu].tokens: 0; expected 1 or more", i);
    return sequence_check(item->seq);
}

/* Whether the declared capacity has room. Slots are counted later. */
static pkv_status check_tokens(struct pkv_cache *cache, size_t rows)
{
    if (rows > cache->max_step_tokens)
        return fail(&cache->message, PKV_ERROR_ARGUMENT,
                    "items: %zu new tokens are more than max_step_tokens (%zu)", rows,
                    cache->max_step_tokens);
    if (size_add(cache_tokens(cache), rows) <= cache->max_tokens)
        return PKV_OK;
    /* Tokens that forks share take room once. Counting them walks over all pages. */
    if (size_add(cache->stored_most, rows) > cache->max_tokens)
        cache->stored_most = cache_stored_tokens(cache);
    if (size_add(cache->stored_most, rows) > cache->max_tokens)
        return fail(&cache->message, PKV_ERROR_CAPACITY,
                    "items: %zu stored and %zu new tokens are more than max_tokens (%zu)",
                    cache->stored_most, rows, cache->max_tokens);
    return PKV_OK;
}

/* Marks the items' sequences as in the step, or none of them. */
static pkv_status check_items(struct pkv_cache *cache, const pkv_step_item *items, size_t n_items,
                              size_t *rows)
{
    pkv_status status = PKV_OK;
    size_t marked = 0;

    *rows = 0;
    while (marked < n_items && status == PKV_OK) {
        status = check_item(cache, marked, &items[marked]);
        if (status == PKV_OK) {
            items[marked].seq->in_step = true;
            *rows = size_add(*rows, items[marked].tokens);
            marked++;
        }
    }
    if (status == PKV_OK)
        status = check_tokens(cache, *rows);
    if (status != PKV_OK) {
        while (marked-- > 0)
            items[marked].seq->in_step = false;
    }
    return status;
}

static pkv_status build_plan(struct pkv_step *step, const pkv_step_item *items, size_t n_items,
                             size_t rows)
{
    struct pkv_cache *cache = step->cache;
    const struct page_policy *policy = &cache->geometry.policy;
    struct memory *memory = &cache->memory;
    size_t n_changes = 0, row = 0;

    for (size_t i = 0; i < n_items; i++) {
        const struct pkv_seq *seq = items[i].seq;

        if (sequence_reserve(items[i].seq, pages_count(policy, seq->tokens + items[i].tokens)) !=
            PKV_OK)
            return PKV_ERROR_MEMORY;
        n_changes += pages_plan(policy, seq->table, seq->tokens, items[i].tokens, NULL);
    }
    step->items = memory_allocate(memory, n_items, sizeof *step->items);
    step->sequences = memory_allocate(memory, n_items, sizeof *step->sequences);
    step->changes = memory_allocate(memory, n_changes, sizeof *step->changes);
    if (step->items == NULL || step->sequences == NULL || step->changes == NULL)
        return PKV_ERROR_MEMORY;

    n_changes = 0;
    for (size_t i = 0; i < n_items; i++) {
        struct pkv_seq *seq = items[i].seq;
        struct page_change *changes = step->changes + n_changes;
        size_t n = pages_plan(policy, seq->table, seq->tokens, items[i].tokens, changes);

        step->sequences[i] = seq;
        step->items[i] = (struct backend_item){.table = seq->table,
                                               .tokens = seq->tokens,
                                               .new_tokens = items[i].tokens,
                                               .first_row = row,
                                               .changes = changes,
                                               .n_changes = n};
        row += items[i].tokens;
        n_changes += n;
    }
    step->n_changes = n_changes;
    step->plan = (struct backend_plan){.items = step->items, .n_items = n_items, .rows = rows};
    return PKV_OK;
}

/* Whether the page is appended to where it is. A shared slot is copied on write. */
static bool stays_in_place(const struct pkv_cache *cache, const struct page_change *change)
{
    return change->from.kind == SLOT_DENSE && change->to.kind == SLOT_DENSE &&
           cache->dense.references[change->from.slot] == 1;
}

static pkv_status acquire_slots(struct pkv_step *step)
{
    struct pkv_cache *cache = step->cache;
    size_t dense = 0, factor = 0;

    for (size_t i = 0; i < step->n_changes; i++) {
        if (step->changes[i].to.kind == SLOT_FACTOR)
            factor++;
        else if (!stays_in_place(cache, &step->changes[i]))
            dense++;
    }
    if (dense > cache->dense.n_free || factor > cache->factor.n_free)
        return fail(&cache->message, PKV_ERROR_CAPACITY,
                    "items: %zu dense and %zu factor slots are needed, %lu and %lu are free", dense,
                    factor, (unsigned long)cache->dense.n_free,
                    (unsigned long)cache->factor.n_free);
    for (size_t i = 0; i < step->n_changes; i++) {
        struct page_change *change = &step->changes[i];

        if (!stays_in_place(cache, change))
            slots_acquire(cache_pool(cache, change->to.kind), &change->to.slot);
    }
    return PKV_OK;
}

static bool same_page(struct page a, struct page b)
{
    return a.kind == b.kind && a.slot == b.slot;
}

/* Drops the slot that a change takes its page from, or the one that it was to put it into. */
static void release_slots(struct pkv_step *step, bool from)
{
    for (size_t i = 0; i < step->n_changes; i++) {
        const struct page_change *change = &step->changes[i];

        if (!same_page(change->from, change->to))
            cache_release_page(step->cache, from ? change->from : change->to);
    }
}

pkv_status pkv_step_begin(pkv_cache *cache, const pkv_step_item *items, size_t n_items,
                          pkv_step **result)
{
    size_t rows;

    if (cache == NULL)
        return PKV_ERROR_ARGUMENT;

    struct pkv_step *step = &cache->step;

    if (result == NULL)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "step: NULL");
    *result = NULL;
    if (step->open)
        return fail(&cache->message, PKV_ERROR_BUSY, "step: one is open already");
    if (items == NULL || n_items == 0)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "items: none");

    pkv_status status = cache_settle(cache, false);

    if (status == PKV_OK)
        status = check_items(cache, items, n_items, &rows);
    if (status != PKV_OK)
        return status;
    step->bytes_before = cache->memory.bytes;
    cache->memory.peak_bytes = cache->memory.bytes;

    status = build_plan(step, items, n_items, rows);
    if (status != PKV_OK) {
        fail(&cache->message, status, "items: out of memory for the plan of the step");
        goto undo;
    }
    status = acquire_slots(step);
    if (status != PKV_OK)
        goto undo;
    status = cache->ops->step_begin(cache->backend, &step->plan);
    if (status != PKV_OK) {
        release_slots(step, false);
        goto undo;
    }
    step->open = true;
    *result = step;
    return PKV_OK;

undo:
    for (size_t i = 0; i < n_items; i++)
        items[i].seq->in_step = false;
    clear_step(step);
    return status;
}

/* ---- Layers ---- */

/* Resolves strides of 0, and checks that no element of [rows, heads, d] lies where another does. */
static pkv_status check_operand(struct message *message, const char *name, const void *data,
                                pkv_dtype dtype, size_t rows, size_t heads, size_t dim,
                                size_t *token_stride, size_t *head_stride)
{
    if (data == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "%s.data: NULL", name);
    if (!storage_dtype_valid(dtype))
        return fail(message, PKV_ERROR_ARGUMENT, "%s.dtype: %d is not a pkv_dtype", name,
                    (int)dtype);
    if ((uintptr_t)data % storage_element_bytes(dtype) != 0)
        return fail(message, PKV_ERROR_ARGUMENT, "%s.data: %p is not aligned to its elements", name,
                    data);
    if (*head_stride == 0)
        *head_stride = dim;
    if (*token_stride == 0)
        *token_stride = heads * dim;

    size_t head_span = size_add(size_multiply(heads - 1, *head_stride), dim);
    size_t row_span = size_add(size_multiply(rows - 1, *token_stride), dim);
    size_t bytes = size_multiply(size_add(head_span, row_span), storage_element_bytes(dtype));

    if (bytes > PTRDIFF_MAX)
        return fail(message, PKV_ERROR_ARGUMENT, "%s: strides %zu and %zu are too large", name,
                    *token_stride, *head_stride);
    /* Heads within a row of the token stride, or rows within one head's plane. */
    if (heads > 1 && (*head_stride < dim || (rows > 1 && *token_stride < dim)))
        return fail(message, PKV_ERROR_ARGUMENT,
                    "%s: strides %zu and %zu; both must be at least head_dim (%zu)", name,
                    *token_stride, *head_stride, dim);
    if (rows > 1 && *token_stride < head_span && (heads == 1 || *head_stride < row_span))
        return fail(message, PKV_ERROR_ARGUMENT,
                    "%s: rows overlap with token_stride %zu and head_stride %zu", name,
                    *token_stride, *head_stride);
    return PKV_OK;
}

static pkv_status check_io(struct pkv_step *step, pkv_step_io *io)
{
    const struct geometry *geometry = &step->cache->geometry;
    struct message *message = &step->cache->message;
    size_t rows = step->plan.rows;
    size_t dim = geometry->head_dim;
    pkv_status status;

    if (io->lse != NULL && io->out.data == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "lse: it needs out");
    if ((uintptr_t)io->lse % sizeof *io->lse != 0)
        return fail(message, PKV_ERROR_ARGUMENT, "lse: %p is not aligned to its elements",
                    (void *)io->lse);
    status = check_operand(message, "k", io->k.data, io->k.dtype, rows, geometry->kv_heads, dim,
                           &io->k.token_stride, &io->k.head_stride);
    if (status == PKV_OK)
        status = check_operand(message, "v", io->v.data, io->v.dtype, rows, geometry->kv_heads, dim,
                               &io->v.token_stride, &io->v.head_stride);
    if (status != PKV_OK || io->out.data == NULL)
        return status;
    status = check_operand(message, "q", io->q.data, io->q.dtype, rows, geometry->query_heads, dim,
                           &io->q.token_stride, &io->q.head_stride);
    if (status == PKV_OK)
        status =
            check_operand(message, "out", io->out.data, io->out.dtype, rows, geometry->query_heads,
                          dim, &io->out.token_stride, &io->out.head_stride);
    return status;
}

static pkv_status check_layer(struct pkv_step *step, size_t layer, const pkv_step_io *io,
                              pkv_step_io *known)
{
    struct message *message = &step->cache->message;

    if (step->failed)
        return fail(message, PKV_ERROR_ARGUMENT, "step: it failed; only abort is valid");
    if (layer != step->next_layer || layer >= step->cache->geometry.layers)
        return fail(message, PKV_ERROR_ARGUMENT,
                    "layer: %zu; layers come in ascending order, %zu of %zu are done", layer,
                    step->next_layer, step->cache->geometry.layers);
    if (io == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "io: NULL");
    return structs_read(&structs_step_io, io, known, message);
}

pkv_status pkv_step_layer(pkv_step *step, size_t layer, const pkv_step_io *io)
{
    if (step == NULL)
        return PKV_ERROR_ARGUMENT;

    struct pkv_cache *cache = step->cache;

    if (!step->open)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "step: none is open");

    pkv_step_io resolved;
    pkv_status status = check_layer(step, layer, io, &resolved);

    if (status == PKV_OK)
        status = check_io(step, &resolved);
    if (status == PKV_OK)
        status = cache->ops->step_layer(cache->backend, layer, &resolved);
    if (status != PKV_OK)
        step->failed = true;
    else
        step->next_layer++;
    return status;
}

pkv_status pkv_step_replay(pkv_step *step)
{
    if (step == NULL)
        return PKV_ERROR_ARGUMENT;

    struct pkv_cache *cache = step->cache;

    if (!step->open)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "step: none is open");
    if (step->failed || step->next_layer > 0)
        return fail(&cache->message, PKV_ERROR_ARGUMENT,
                    "step: a graph takes the place of all layers; some were there before");
    if (cache->ops->step_replay == NULL)
        return fail(&cache->message, PKV_ERROR_UNSUPPORTED,
                    "step: the backend \"%s\" has no graphs", cache->ops->name);

    pkv_status status = cache->ops->step_replay(cache->backend);

    if (status == PKV_OK)
        step->next_layer = cache->geometry.layers;
    return status;
}

/* ---- End ---- */

/* Whether all is there to commit. */
static pkv_status check_end(struct pkv_step *step)
{
    struct pkv_cache *cache = step->cache;
    pkv_status status = PKV_OK;

    if (!step->open)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "step: none is open");
    if (step->failed)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "step: it failed; only abort is valid");
    if (step->next_layer != cache->geometry.layers)
        return fail(&cache->message, PKV_ERROR_ARGUMENT, "step: layer %zu of %zu is missing",
                    step->next_layer, cache->geometry.layers);
    /* An earlier step may have failed since this one began. */
    for (size_t i = 0; i < step->plan.n_items && status == PKV_OK; i++)
        status = sequence_check(step->sequences[i]);
    step->failed = status != PKV_OK;
    return status;
}

/* Waits, or leaves it to cache_settle(). */
static pkv_status finish(struct pkv_step *step)
{
    struct pkv_cache *cache = step->cache;
    struct step_report report = {0};
    pkv_status status;

    if (cache->submits)
        return cache->ops->step_submit(cache->backend);
    status = cache->ops->step_end(cache->backend, &report);
    if (status != PKV_OK)
        return status;
    account(cache, &report);
    cache->ops->step_close(cache->backend);
    return PKV_OK;
}

static void commit_item(struct pkv_cache *cache, struct pkv_seq *seq,
                        const struct backend_item *item)
{
    for (size_t i = 0; i < item->n_changes; i++) {
        const struct page_change *change = &item->changes[i];

        seq->table[change->page] = change->to;
        if (change->to.kind == SLOT_FACTOR)
            cache->factorized_pages++;
        /* What a new slot takes over may stay in the old one for others. */
        cache->stored_most = size_add(cache->stored_most, change->new_tokens);
        if (change->from.kind == SLOT_DENSE && !same_page(change->from, change->to) &&
            cache->dense.references[change->from.slot] > 1)
            cache->stored_most = size_add(cache->stored_most, change->cached_tokens);
    }
    seq->tokens += item->new_tokens;
    seq->in_step = false;
}

pkv_status pkv_step_end(pkv_step *step)
{
    if (step == NULL)
        return PKV_ERROR_ARGUMENT;

    struct pkv_cache *cache = step->cache;
    pkv_status status = check_end(step);
    size_t transient;

    if (status != PKV_OK)
        return status;
    status = finish(step);
    if (status != PKV_OK) {
        step->failed = true;
        return status;
    }
    transient = cache->memory.peak_bytes - step->bytes_before;
    if (cache->transient_peak_bytes < transient)
        cache->transient_peak_bytes = transient;
    for (size_t i = 0; i < step->plan.n_items; i++)
        commit_item(cache, step->sequences[i], &step->items[i]);
    release_slots(step, true);
    if (cache->submits) {
        cache->submitted[cache->n_submitted++] = *step;
        *step = (struct pkv_step){.cache = cache};
    } else {
        clear_step(step);
    }
    return PKV_OK;
}

void pkv_step_abort(pkv_step *step)
{
    if (step == NULL || !step->open)
        return;
    step->cache->ops->step_close(step->cache->backend);
    release_slots(step, false);
    for (size_t i = 0; i < step->plan.n_items; i++)
        step->sequences[i]->in_step = false;
    clear_step(step);
}
