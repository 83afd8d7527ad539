/* SPDX-License-Identifier: MIT */
/* Attention of a step's new tokens over mixed pages and, causally, over each other. */
#include "attention.h"

#include "codec.h"
#include "store.h"

#include <math.h>

#define RUN_PAGES 16

/* Below this many multiplications a parallel region costs more than it saves. */
#define PARALLEL_MULTIPLIES 200000.0

/* Runs are spread over threads when there are fewer tasks than this for each, and the states of
 * them take no more than this. */
#define TASKS_PER_THREAD        4
#define STATE_FLOATS_PER_THREAD (1 << 18)

/* A row takes less than 64 KiB of scratch. */
#define MAX_ROWS (SIZE_MAX >> 32)

/* ---- Plan ---- */

static size_t cached_runs(const struct backend *backend, const struct backend_item *item)
{
    return (pages_count(&backend->geometry->policy, item->tokens) + RUN_PAGES - 1) / RUN_PAGES;
}

/* A state of `rows` rows: m, l, then o with padded rows. */
static size_t state_floats(const struct backend *backend, size_t rows)
{
    return 2 * kernels_padded(rows) + rows * kernels_padded(backend->geometry->head_dim);
}

/* Blocks of one item come with the longest first, so that the last tasks are short. */
static void list_units(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    struct cpu_step *step = &backend->step;
    size_t i = 0;

    for (size_t n = 0; n < step->plan.n_items; n++) {
        const struct backend_item *item = &step->plan.items[n];
        size_t block = (item->new_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;

        while (block-- > 0) {
            struct attention_unit *unit = &step->units[i++];

            unit->item = item;
            unit->block = block;
            unit->tokens = cpu_block_tokens(item, block);
            unit->runs = cached_runs(backend, item) + block / RUN_PAGES + 1;
            unit->first_state = step->n_states;
            step->n_states += unit->runs;
            step->multiplies += 2.0 * (double)(unit->tokens * geometry->query_heads) *
                                (double)(item->tokens + (block + 1) * BLOCK_TOKENS) *
                                (double)geometry->head_dim;
        }
    }
}

static size_t take(size_t *floats, size_t n)
{
    size_t at = *floats;

    *floats += kernels_padded(n);
    return at;
}

static void lay_out(struct backend *backend, size_t rows)
{
    const struct geometry *geometry = backend->geometry;
    struct attention_layout *layout = &backend->step.layout;
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    size_t columns = cpu_max(length, BLOCK_TOKENS);
    size_t rank = 0;
    size_t *floats = &layout->floats;

    for (size_t layer = 0; layer < geometry->layers; layer++)
        rank = cpu_max(rank, cpu_max(geometry->rank_k[layer], geometry->rank_v[layer]));
    *floats = 0;
    layout->q = take(floats, rows * d);
    layout->q_left = take(floats, rows * d);
    layout->wide = take(floats, rows * kernels_padded(d));
    layout->scores = take(floats, rows * kernels_padded(columns));
    layout->inner = take(floats, rows * kernels_padded(rank));
    layout->scale = take(floats, rows);
    layout->valid = take(floats, rows);
    layout->run = take(floats, state_floats(backend, rows));
    layout->merged = take(floats, state_floats(backend, rows));
}

pkv_status attention_step_begin(struct backend *backend)
{
    struct cpu_step *step = &backend->step;
    const struct backend_plan *plan = &step->plan;
    const size_t heads = backend->geometry->kv_heads;
    size_t most = 0;

    for (size_t i = 0; i < plan->n_items; i++) {
        step->n_units += (plan->items[i].new_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        most = cpu_max(most, cpu_min(plan->items[i].new_tokens, BLOCK_TOKENS));
    }
    step->units = memory_allocate(backend->memory, step->n_units, sizeof *step->units);
    if (!step->units)
        return fail(backend->message, PKV_ERROR_MEMORY, "cannot allocate a plan of %zu blocks",
                    step->n_units);
    list_units(backend);
    if (__builtin_mul_overflow(most, cpu_group(backend->geometry), &most) || most > MAX_ROWS)
        return fail(backend->message, PKV_ERROR_MEMORY,
                    "%zu query heads a KV head need more scratch than memory can hold",
                    cpu_group(backend->geometry));
    lay_out(backend, most);
    step->state_floats = state_floats(backend, most);
    if (step->threads > 1 && step->n_units * heads < TASKS_PER_THREAD * (size_t)step->threads) {
        size_t floats;

        if (!__builtin_mul_overflow(step->n_states * heads, step->state_floats, &floats) &&
            floats / STATE_FLOATS_PER_THREAD < step->threads) {
            step->states = memory_allocate(backend->memory, floats, sizeof *step->states);
            if (!step->states)
                return fail(backend->message, PKV_ERROR_MEMORY,
                            "cannot allocate %zu bytes of attention states",
                            floats * sizeof *step->states);
        }
    }
    return PKV_OK;
}

void attention_step_close(struct backend *backend)
{
    memory_release(backend->memory, backend->step.states);
    memory_release(backend->memory, backend->step.units);
}

/* ---- One page ---- */

struct state {
    float *m;
    float *l;
    float *o; /* [rows], kernels_padded(d) elements each */
};

/* A thread at work on one unit and KV head. */
struct worker {
    const struct backend *backend;
    const struct attention_unit *unit;
    size_t layer;
    size_t kv_head;
    struct codec_queries queries; /* its output_stride is that of states */
    float *scratch;
    float *scale;     /* [rows] */
    uint32_t *valid;  /* [rows]: keys that a row sees in its own block */
    bool whole_pages; /* whether kernels for whole pages serve the unit */
    struct state run;
    struct state merged;
};

static struct state state_at(float *floats, size_t rows)
{
    return (struct state){floats, floats + kernels_padded(rows), floats + 2 * kernels_padded(rows)};
}

static struct worker worker_init(const struct backend *backend, size_t layer)
{
    const struct geometry *geometry = backend->geometry;
    const struct attention_layout *layout = &backend->step.layout;
    float *scratch =
        (float *)(void *)(backend->step.scratch + cpu_thread() * backend->step.scratch_bytes);
    size_t rank = cpu_max(geometry->rank_k[layer], geometry->rank_v[layer]);
    struct worker worker = {
        .backend = backend,
        .layer = layer,
        .queries =
            {
                .backend = backend,
                .arithmetic = &backend->kernels->arithmetic[geometry->dtype],
                .q = scratch + layout->q,
                .q_left = scratch + layout->q_left,
                .wide = scratch + layout->wide,
                .scores = scratch + layout->scores,
                .inner = scratch + layout->inner,
                .score_stride = kernels_padded(cpu_max(geometry->policy.page_tokens, BLOCK_TOKENS)),
                .inner_stride = kernels_padded(rank),
                .output_stride = kernels_padded(geometry->head_dim),
            },
        .scratch = scratch,
        .scale = scratch + layout->scale,
        .valid = (uint32_t *)(void *)(scratch + layout->valid),
    };

    return worker;
}

static void score_dense(const struct worker *worker, struct matrix k, size_t tokens)
{
    const struct codec_queries *queries = &worker->queries;

    queries->arithmetic->score(queries->rows, k.rows, tokens, queries->q_left, k.rows, k, NULL,
                               queries->scores, queries->score_stride);
}

static void accumulate_dense(const struct worker *worker, struct matrix v, size_t tokens,
                             const float *scale, float *o)
{
    const struct codec_queries *queries = &worker->queries;

    queries->arithmetic->accumulate(queries->rows, tokens, v.columns, queries->scores,
                                    queries->score_stride, v, scale, o, queries->output_stride);
}

static void softmax(const struct worker *worker, bool left_operands, size_t tokens,
                    const uint32_t *valid, const struct state *state)
{
    const struct codec_queries *queries = &worker->queries;
    kernel_softmax *kernel =
        left_operands ? queries->arithmetic->softmax : worker->backend->kernels->softmax;

    kernel(queries->rows, tokens, valid, queries->scores, queries->score_stride, state->m, state->l,
           worker->scale);
}

/* Of the unit that was taken up. */
static bool fit_whole_pages(const struct worker *worker)
{
    const struct geometry *geometry = worker->backend->geometry;
    const struct whole_pages *kernels = &worker->queries.arithmetic->whole_pages;

    return worker->queries.rows <= kernels->rows &&
           kernels->fit(geometry->policy.page_tokens, geometry->head_dim,
                        cpu_max(geometry->rank_k[worker->layer], geometry->rank_v[worker->layer]));
}

static void attend_factors(const struct worker *worker, uint32_t slot, const float *scale,
                           const struct state *state)
{
    const struct backend *backend = worker->backend;
    const struct codec_queries *queries = &worker->queries;
    struct factor_page page = store_factors(backend, worker->layer, worker->kv_head, slot);

    backend->codec_k->score(queries, backend->geometry->rank_k[worker->layer], page.k);
    softmax(worker, backend->codec_v->left_operands, backend->geometry->policy.page_tokens, NULL,
            state);
    backend->codec_v->accumulate(queries, backend->geometry->rank_v[worker->layer], page.v, scale,
                                 state->o);
}

/* The end of the pages that this thread turns to after those of a run, which ends at `end`. */
static size_t end_ahead(const struct worker *worker, size_t end)
{
    const struct backend *backend = worker->backend;

    return backend->step.states
               ? end
               : pages_count(&backend->geometry->policy, worker->unit->item->tokens);
}

/*
 * Cached pages [first, end) up to the first that is not factorized, if kernels for whole pages
 * serve them, all at once; returns how many they are. What they fetch ahead is what this thread
 * turns to next.
 */
static size_t attend_whole_factors(const struct worker *worker, size_t first, size_t end,
                                   const struct state *state)
{
    const struct backend *backend = worker->backend;
    const struct backend_item *item = worker->unit->item;
    const size_t ahead = end_ahead(worker, end);
    struct factor_page pages[RUN_PAGES + KERNELS_AHEAD];
    size_t n = 0;
    size_t more;

    if (!worker->whole_pages || backend->codec_k != backend->codec_v)
        return 0;
    for (; first + n < end && item->table[first + n].kind == SLOT_FACTOR; n++)
        pages[n] =
            store_factors(backend, worker->layer, worker->kv_head, item->table[first + n].slot);
    if (n == 0)
        return 0;
    for (more = n; more < n + KERNELS_AHEAD; more++)
        pages[more] = first + more < ahead && item->table[first + more].kind == SLOT_FACTOR
                          ? store_factors(backend, worker->layer, worker->kv_head,
                                          item->table[first + more].slot)
                          : pages[more - 1];
    backend->codec_k->attend(&worker->queries, backend->geometry->rank_k[worker->layer],
                             backend->geometry->rank_v[worker->layer], n, pages, state->m, state->l,
                             state->o);
    return n;
}

/* Cached page `number` of the unit's item into `state`; `scale` is NULL for a run's first, and
 * `end` is where the run ends. */
static void attend_page(const struct worker *worker, size_t number, size_t end, const float *scale,
                        const struct state *state)
{
    const struct backend *backend = worker->backend;
    const struct codec_queries *queries = &worker->queries;
    const struct backend_item *item = worker->unit->item;
    const struct page *page = &item->table[number];
    size_t tokens = pages_tokens(&backend->geometry->policy, item->tokens, number);
    struct dense_page dense;

    if (page->kind == SLOT_FACTOR) {
        attend_factors(worker, page->slot, scale, state);
        return;
    }
    dense = store_dense(backend, worker->layer, worker->kv_head, page->slot);
    if (worker->whole_pages && tokens == backend->geometry->policy.page_tokens) {
        ptrdiff_t next = 0;

        if (number + 1 < end_ahead(worker, end) && item->table[number + 1].kind == SLOT_DENSE)
            next =
                store_dense(backend, worker->layer, worker->kv_head, item->table[number + 1].slot)
                    .k.data -
                dense.k.data;
        queries->arithmetic->whole_pages.attend_dense(queries->rows, queries->q_left, dense.k,
                                                      dense.v, next, state->m, state->l, state->o,
                                                      queries->output_stride);
        return;
    }
    score_dense(worker, dense.k, tokens);
    softmax(worker, true, tokens, NULL, state);
    accumulate_dense(worker, dense.v, tokens, scale, state->o);
}

/* Block `number` of the item's new tokens; causal in the unit's own. */
static void attend_block(const struct worker *worker, size_t number, const float *scale,
                         const struct state *state)
{
    struct dense_page block =
        store_block(worker->backend, worker->unit->item, worker->kv_head, number);
    size_t tokens = cpu_block_tokens(worker->unit->item, number);

    score_dense(worker, block.k, tokens);
    softmax(worker, true, tokens, number == worker->unit->block ? worker->valid : NULL, state);
    accumulate_dense(worker, block.v, tokens, scale, state->o);
}

/* ---- One run, one unit ---- */

static void attend_run(const struct worker *worker, size_t run, const struct state *state)
{
    const struct backend *backend = worker->backend;
    const struct backend_item *item = worker->unit->item;
    const size_t cached = cached_runs(backend, item);
    const float *scale = NULL;
    size_t first = run * RUN_PAGES;
    size_t end;

    for (size_t i = 0; i < worker->queries.rows; i++) {
        state->m[i] = -INFINITY;
        state->l[i] = 0.0f;
        if (worker->whole_pages)
            memset(state->o + i * worker->queries.output_stride, 0,
                   worker->queries.output_stride * sizeof *state->o);
    }
    if (run < cached) {
        end = cpu_min(first + RUN_PAGES, pages_count(&backend->geometry->policy, item->tokens));
        for (size_t page = first, n; page < end; page += n, scale = worker->scale) {
            n = attend_whole_factors(worker, page, end, state);
            if (n == 0) {
                attend_page(worker, page, end, scale, state);
                n = 1;
            }
        }
    } else {
        first = (run - cached) * RUN_PAGES;
        end = cpu_min(first + RUN_PAGES, worker->unit->block + 1);
        for (size_t block = first; block < end; block++, scale = worker->scale)
            attend_block(worker, block, scale, state);
    }
}

static void merge(const struct worker *worker, const struct state *into, const struct state *from)
{
    worker->backend->kernels->merge(worker->queries.rows, worker->backend->geometry->head_dim,
                                    into->m, into->l, into->o, from->m, from->l, from->o,
                                    worker->queries.output_stride);
}

/* Takes up a unit: its rows are its tokens, for each the query heads of the KV head. */
static void take_unit(struct worker *worker, const struct attention_unit *unit, size_t kv_head)
{
    const struct attention_layout *layout = &worker->backend->step.layout;

    worker->unit = unit;
    worker->kv_head = kv_head;
    worker->queries.rows = unit->tokens * cpu_group(worker->backend->geometry);
    worker->whole_pages = fit_whole_pages(worker);
    worker->run = state_at(worker->scratch + layout->run, worker->queries.rows);
    worker->merged = state_at(worker->scratch + layout->merged, worker->queries.rows);
}

static void load_queries(struct worker *worker, const pkv_input *input)
{
    struct codec_queries *queries = &worker->queries;
    const struct geometry *geometry = worker->backend->geometry;
    const struct attention_unit *unit = worker->unit;
    const size_t group = cpu_group(geometry);
    const size_t first = unit->item->first_row + unit->block * BLOCK_TOKENS;
    kernel_to_f32 *to_f32 = worker->backend->kernels->to_f32[input->dtype];

    for (size_t i = 0; i < queries->rows; i++) {
        size_t at = (first + i / group) * input->token_stride +
                    (worker->kv_head * group + i % group) * input->head_stride;
        float *q = queries->q + i * geometry->head_dim;

        to_f32(geometry->head_dim,
               (const char *)input->data + at * storage_element_bytes(input->dtype), q);
        for (size_t j = 0; j < geometry->head_dim; j++)
            q[j] *= geometry->softmax_scale;
        worker->valid[i] = (uint32_t)(i / group + 1);
    }
    if (queries->arithmetic->split) {
        memcpy(queries->q_left, queries->q,
               queries->rows * geometry->head_dim * sizeof *queries->q);
        queries->arithmetic->split(queries->rows, geometry->head_dim, queries->q_left,
                                   geometry->head_dim);
    } else {
        queries->q_left = queries->q;
    }
}

static void store_outputs(const struct worker *worker, const pkv_step_io *io,
                          const struct state *state)
{
    const struct geometry *geometry = worker->backend->geometry;
    const struct attention_unit *unit = worker->unit;
    const pkv_output *out = &io->out;
    const size_t group = cpu_group(geometry);
    const size_t first = unit->item->first_row + unit->block * BLOCK_TOKENS;
    kernel_from_f32 *from_f32 = worker->backend->kernels->from_f32[out->dtype];

    for (size_t i = 0; i < worker->queries.rows; i++) {
        size_t row = first + i / group;
        size_t head = worker->kv_head * group + i % group;
        size_t at = row * out->token_stride + head * out->head_stride;
        float *o = state->o + i * worker->queries.output_stride;
        float inverse = 1.0f / state->l[i];

        for (size_t j = 0; j < geometry->head_dim; j++)
            o[j] *= inverse;
        from_f32(geometry->head_dim, o, (char *)out->data + at * storage_element_bytes(out->dtype));
        if (io->lse)
            io->lse[row * geometry->query_heads + head] = state->m[i] + logf(state->l[i]);
    }
}

/* ---- All units ---- */

/* The state of a run in a split step. */
static struct state split_state(const struct worker *worker, size_t run)
{
    const struct cpu_step *step = &worker->backend->step;
    size_t number = worker->kv_head * step->n_states + worker->unit->first_state + run;

    return state_at(step->states + number * step->state_floats, worker->queries.rows);
}

/* Units are few then: a search is cheap. */
static const struct attention_unit *unit_of_state(const struct cpu_step *step, size_t number)
{
    const struct attention_unit *unit = step->units;

    while (number - unit->first_state >= unit->runs)
        unit++;
    return unit;
}

/* One run of a split step into its state. */
static void attend_split_run(struct worker *worker, size_t number, const pkv_step_io *io)
{
    const struct cpu_step *step = &worker->backend->step;
    const struct attention_unit *unit = unit_of_state(step, number % step->n_states);
    size_t run = number % step->n_states - unit->first_state;
    struct state state;

    take_unit(worker, unit, number / step->n_states);
    load_queries(worker, &io->q);
    state = split_state(worker, run);
    attend_run(worker, run, &state);
}

/* One unit's outputs: from the states of a split step, else from the beginning. */
static void attend_unit(struct worker *worker, const struct attention_unit *unit, size_t kv_head,
                        const pkv_step_io *io)
{
    const bool split = worker->backend->step.states != NULL;
    struct state merged, state;

    take_unit(worker, unit, kv_head);
    merged = split ? split_state(worker, 0) : worker->merged;
    if (!split) {
        load_queries(worker, &io->q);
        attend_run(worker, 0, &merged);
    }
    for (size_t run = 1; run < unit->runs; run++) {
        state = split ? split_state(worker, run) : worker->run;
        if (!split)
            attend_run(worker, run, &state);
        merge(worker, &merged, &state);
    }
    store_outputs(worker, io, &merged);
}

void attention_run(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct cpu_step *step = &backend->step;
    const size_t heads = backend->geometry->kv_heads;

#pragma omp parallel num_threads(step->threads) if (step->multiplies > PARALLEL_MULTIPLIES)
    {
        struct worker worker = worker_init(backend, layer);
        fenv_t modes;

        modes_set(&modes);
        if (step->states) {
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < step->n_states * heads; i++)
                attend_split_run(&worker, i, io);
        }
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < step->n_units * heads; i++)
            attend_unit(&worker, &step->units[i / heads], i % heads, io);
        modes_restore(&modes);
    }
}
