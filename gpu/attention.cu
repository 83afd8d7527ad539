/* SPDX-License-Identifier: MIT */
/*
 * Attention in f32 for any geometry. A unit is one new token and some query heads of one KV head;
 * it attends its item's cached pages and, in blocks of BLOCK_TOKENS, the new tokens up to its own.
 * RUN_PAGES of either make a run, whose state (m, l, o) of Eq. 4 begins anew; states of runs are
 * merged in order, as Eq. 5 does. So it does not matter to the bits whether one block walks through
 * all runs or each run has its own block and another kernel merges. Layers with fragments are left
 * to decode.cu and prefill.cu.
 */
#include "attention.h"

#include "decode.h"
#include "prefill.h"
#include "store.h"

#define RUN_PAGES 16

/* Shared memory of a block: as much as every device gives without being asked. */
#define SHARED_FLOATS (48u * 1024 / sizeof(float))

/* With fewer units than this runs are spread over blocks, if their states take no more than that.
 */
#define SPLIT_UNITS  1024
#define STATES_BYTES ((size_t)8 << 20)

/* Offsets into a block's shared memory, in floats; of `heads` query heads. */
struct shared_layout {
    unsigned q, scores, inner, scale;
    unsigned m, l, o;                      /* the run's */
    unsigned merged_m, merged_l, merged_o; /* of all runs so far */
    unsigned floats;
};

/* How a launch divides its work. */
struct division {
    unsigned heads; /* query heads of a unit at most */
    unsigned tiles; /* units of one KV head and token */
    unsigned score_stride;
    unsigned inner_stride;
    unsigned runs; /* states of a unit; 0: they are merged as they come */
    size_t units;
    struct shared_layout layout;
};

/* A unit, as its block sees it. */
struct unit {
    const struct device_item *item;
    const struct page *table;
    size_t row;
    size_t new_token; /* of its item's */
    unsigned kv_head;
    unsigned first_head; /* query head */
    unsigned heads;
    size_t cached_runs;
    size_t runs;
};

struct attention_views {
    struct layer_view layer;
    struct launch_plan plan;
    pkv_input q, k, v;
    pkv_output out;
    float *lse;
    struct division division;
    float *states;
};

static size_t divide_up(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/* ---- Units ---- */

__device__ static struct unit unit_at(const struct attention_views *a, const struct plan_view *plan,
                                      size_t number)
{
    const struct layer_view *layer = &a->layer;
    const unsigned group = layer->query_heads / layer->kv_heads;
    const unsigned tile = (unsigned)(number % a->division.tiles);
    const size_t pages_of_run = (size_t)RUN_PAGES * layer->length;
    struct unit unit;
    size_t low = 0;
    size_t high = plan->n_items;

    number /= a->division.tiles;
    unit.kv_head = (unsigned)(number % layer->kv_heads);
    unit.row = number / layer->kv_heads;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;

        if (plan->items[middle].first_row <= unit.row)
            low = middle;
        else
            high = middle;
    }
    unit.item = &plan->items[low];
    unit.table = plan->tables + unit.item->first_page;
    unit.new_token = unit.row - unit.item->first_row;
    unit.first_head = unit.kv_head * group + tile * a->division.heads;
    unit.heads = group - tile * a->division.heads;
    unit.heads = unit.heads < a->division.heads ? unit.heads : a->division.heads;
    unit.cached_runs = (unit.item->tokens + pages_of_run - 1) / pages_of_run;
    unit.runs = unit.cached_runs + unit.new_token / (RUN_PAGES * BLOCK_TOKENS) + 1;
    return unit;
}

__device__ static void load_queries(const struct attention_views *a, const struct unit *unit,
                                    float *shared)
{
    const unsigned d = a->layer.d;

    for (unsigned n = threadIdx.x; n < unit->heads * d; n += blockDim.x)
        shared[a->division.layout.q + n] =
            input_element(&a->q, unit->row, unit->first_head + n / d, n % d) *
            a->layer.softmax_scale;
}

/* ---- One page ---- */

/*
 * Where keys and values are: of a dense page, of a factor page, or the caller's. Element [t, i] of
 * a page is what the two functions return; for factors they take a row of L and a row of R.
 */
struct source {
    const unsigned char *page;
    size_t first_row; /* the caller's, where page is NULL */
    unsigned head;
    unsigned tokens;
};

__device__ static float source_element(const struct attention_views *a, const struct source *source,
                                       bool is_key, unsigned t, unsigned i)
{
    if (source->page)
        return load_element(a->layer.dtype, source->page, dense_index(&a->layer, is_key, t, i));
    return rounded_element(a->layer.dtype, input_element(is_key ? &a->k : &a->v,
                                                         source->first_row + t, source->head, i));
}

/* scores[h][t] of the run's queries; a barrier must follow. */
__device__ static void score_dense(const struct attention_views *a, const struct unit *unit,
                                   const struct source *source, float *shared)
{
    const struct shared_layout *layout = &a->division.layout;
    const unsigned d = a->layer.d;

    for (unsigned n = threadIdx.x; n < unit->heads * source->tokens; n += blockDim.x) {
        const unsigned h = n / source->tokens;
        const unsigned t = n % source->tokens;
        const float *q = shared + layout->q + h * d;
        float sum = 0.0f;

        for (unsigned i = 0; i < d; i++)
            sum = __fmaf_rn(q[i], source_element(a, source, true, t, i), sum);
        shared[layout->scores + h * a->division.score_stride + t] = sum;
    }
}

__device__ static void score_factors(const struct attention_views *a, const struct unit *unit,
                                     const unsigned char *page, float *shared)
{
    const struct shared_layout *layout = &a->division.layout;
    const struct part_place *left = &a->layer.parts[0];
    const unsigned d = a->layer.d;
    const unsigned rank = left->columns;

    for (unsigned n = threadIdx.x; n < unit->heads * rank; n += blockDim.x) {
        const float *q = shared + layout->q + n / rank * d;
        float sum = 0.0f;

        for (unsigned i = 0; i < d; i++)
            sum = __fmaf_rn(q[i], part_element(&a->layer, left + 1, page, n % rank, i), sum);
        shared[layout->inner + n / rank * a->division.inner_stride + n % rank] = sum;
    }
    __syncthreads();
    for (unsigned n = threadIdx.x; n < unit->heads * left->rows; n += blockDim.x) {
        const unsigned h = n / left->rows;
        const unsigned t = n % left->rows;
        const float *inner = shared + layout->inner + h * a->division.inner_stride;
        float sum = 0.0f;

        for (unsigned c = 0; c < rank; c++)
            sum = __fmaf_rn(inner[c], part_element(&a->layer, left, page, t, c), sum);
        shared[layout->scores + h * a->division.score_stride + t] = sum;
    }
}

/* Scores to exp(s - m'), and what the state so far is scaled by. A warp a head. */
__device__ static void softmax(const struct attention_views *a, const struct unit *unit,
                               unsigned tokens, float *shared)
{
    const struct shared_layout *layout = &a->division.layout;
    const unsigned lane = threadIdx.x % 32;

    for (unsigned h = threadIdx.x / 32; h < unit->heads; h += blockDim.x / 32) {
        float *scores = shared + layout->scores + h * a->division.score_stride;
        const float before = shared[layout->m + h];
        float most = before;
        float sum = 0.0f;

        for (unsigned t = lane; t < tokens; t += 32)
            most = fmaxf(most, scores[t]);
        for (unsigned i = 16; i > 0; i /= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
        for (unsigned t = lane; t < tokens; t += 32) {
            scores[t] = expf(scores[t] - most);
            sum += scores[t];
        }
        for (unsigned i = 16; i > 0; i /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, i);
        __syncwarp(); /* all have read m */
        if (lane == 0) {
            const float scale = before == -INFINITY ? 0.0f : expf(before - most);

            shared[layout->scale + h] = scale;
            shared[layout->m + h] = most;
            shared[layout->l + h] = scale * shared[layout->l + h] + sum;
        }
    }
    __syncthreads();
}

__device__ static void accumulate_dense(const struct attention_views *a, const struct unit *unit,
                                        const struct source *source, float *shared)
{
    const struct shared_layout *layout = &a->division.layout;
    const unsigned d = a->layer.d;

    for (unsigned n = threadIdx.x; n < unit->heads * d; n += blockDim.x) {
        const unsigned h = n / d;
        const float *scores = shared + layout->scores + h * a->division.score_stride;
        float *o = shared + layout->o + n;
        float sum = *o * shared[layout->scale + h];

        for (unsigned t = 0; t < source->tokens; t++)
            sum = __fmaf_rn(scores[t], source_element(a, source, false, t, n % d), sum);
        *o = sum;
    }
}

__device__ static void accumulate_factors(const struct attention_views *a, const struct unit *unit,
                                          const unsigned char *page, float *shared)
{
    const struct shared_layout *layout = &a->division.layout;
    const struct part_place *left = &a->layer.parts[2];
    const unsigned d = a->layer.d;
    const unsigned rank = left->columns;

    for (unsigned n = threadIdx.x; n < unit->heads * rank; n += blockDim.x) {
        const float *scores = shared + layout->scores + n / rank * a->division.score_stride;
        float sum = 0.0f;

        for (unsigned t = 0; t < left->rows; t++)
            sum = __fmaf_rn(scores[t], part_element(&a->layer, left, page, t, n % rank), sum);
        shared[layout->inner + n / rank * a->division.inner_stride + n % rank] = sum;
    }
    __syncthreads();
    for (unsigned n = threadIdx.x; n < unit->heads * d; n += blockDim.x) {
        const unsigned h = n / d;
        const float *inner = shared + layout->inner + h * a->division.inner_stride;
        float *o = shared + layout->o + n;
        float sum = *o * shared[layout->scale + h];

        for (unsigned c = 0; c < rank; c++)
            sum = __fmaf_rn(inner[c], part_element(&a->layer, left + 1, page, c, n % d), sum);
        *o = sum;
    }
}

__device__ static void attend_dense(const struct attention_views *a, const struct unit *unit,
                                    const struct source *source, float *shared)
{
    score_dense(a, unit, source, shared);
    __syncthreads();
    softmax(a, unit, source->tokens, shared);
    accumulate_dense(a, unit, source, shared);
    __syncthreads();
}

__device__ static void attend_factors(const struct attention_views *a, const struct unit *unit,
                                      const unsigned char *page, float *shared)
{
    score_factors(a, unit, page, shared);
    __syncthreads();
    softmax(a, unit, a->layer.length, shared);
    accumulate_factors(a, unit, page, shared);
    __syncthreads();
}

/* ---- One run ---- */

__device__ static void clear_state(const struct attention_views *a, const struct unit *unit,
                                   unsigned m, unsigned l, unsigned o, float *shared)
{
    for (unsigned n = threadIdx.x; n < unit->heads * a->layer.d; n += blockDim.x)
        shared[o + n] = 0.0f;
    for (unsigned h = threadIdx.x; h < unit->heads; h += blockDim.x) {
        shared[m + h] = -INFINITY;
        shared[l + h] = 0.0f;
    }
    __syncthreads();
}

__device__ static void attend_cached(const struct attention_views *a, const struct unit *unit,
                                     size_t number, float *shared)
{
    const struct page page = unit->table[number];
    const size_t first = number * a->layer.length;
    const size_t left = unit->item->tokens - first;
    struct source source = {};

    if (page.kind == SLOT_FACTOR) {
        attend_factors(a, unit, factor_page(&a->layer, page.slot, unit->kv_head), shared);
        return;
    }
    source.page = dense_page(&a->layer, page.slot, unit->kv_head);
    source.tokens = (unsigned)(left < a->layer.length ? left : a->layer.length);
    attend_dense(a, unit, &source, shared);
}

/* A block of new tokens, up to the unit's own. */
__device__ static void attend_new(const struct attention_views *a, const struct unit *unit,
                                  size_t number, float *shared)
{
    const size_t first = number * BLOCK_TOKENS;
    const size_t left = unit->new_token + 1 - first;
    struct source source = {};

    source.first_row = unit->item->first_row + first;
    source.head = unit->kv_head;
    source.tokens = (unsigned)(left < BLOCK_TOKENS ? left : BLOCK_TOKENS);
    attend_dense(a, unit, &source, shared);
}

__device__ static void attend_run(const struct attention_views *a, const struct unit *unit,
                                  size_t run, float *shared)
{
    const struct shared_layout *layout = &a->division.layout;
    size_t first, end, last;

    clear_state(a, unit, layout->m, layout->l, layout->o, shared);
    if (run < unit->cached_runs) {
        first = run * RUN_PAGES;
        last = (unit->item->tokens + a->layer.length - 1) / a->layer.length;
        end = first + RUN_PAGES < last ? first + RUN_PAGES : last;
        for (size_t page = first; page < end; page++)
            attend_cached(a, unit, page, shared);
    } else {
        first = (run - unit->cached_runs) * RUN_PAGES;
        last = unit->new_token / BLOCK_TOKENS + 1;
        end = first + RUN_PAGES < last ? first + RUN_PAGES : last;
        for (size_t block = first; block < end; block++)
            attend_new(a, unit, block, shared);
    }
}

/* ---- Merging ---- */

/* What both sides of a merge are scaled by; of nothing yet by 0. */
__device__ static void merge_scales(float m, float m2, float *most, float *scale, float *scale2)
{
    *most = fmaxf(m, m2);
    *scale = m == -INFINITY ? 0.0f : expf(m - *most);
    *scale2 = m2 == -INFINITY && *most != -INFINITY ? 0.0f : expf(m2 - *most);
}

/* The state at (m2, l2, o2) into the merged one. */
__device__ static void merge_state(const struct attention_views *a, const struct unit *unit,
                                   const float *m2, const float *l2, const float *o2, float *shared)
{
    const struct shared_layout *layout = &a->division.layout;
    const unsigned d = a->layer.d;
    float most, scale, scale2;

    for (unsigned n = threadIdx.x; n < unit->heads * d; n += blockDim.x) {
        float *o = shared + layout->merged_o + n;

        merge_scales(shared[layout->merged_m + n / d], m2[n / d], &most, &scale, &scale2);
        *o = __fmaf_rn(o2[n], scale2, *o * scale);
    }
    __syncthreads();
    for (unsigned h = threadIdx.x; h < unit->heads; h += blockDim.x) {
        merge_scales(shared[layout->merged_m + h], m2[h], &most, &scale, &scale2);
        shared[layout->merged_m + h] = most;
        shared[layout->merged_l + h] =
            __fmaf_rn(l2[h], scale2, shared[layout->merged_l + h] * scale);
    }
    __syncthreads();
}

__device__ static void write_outputs(const struct attention_views *a, const struct unit *unit,
                                     const float *shared)
{
    const struct shared_layout *layout = &a->division.layout;
    const unsigned d = a->layer.d;

    for (unsigned n = threadIdx.x; n < unit->heads * d; n += blockDim.x) {
        const size_t at = unit->row * a->out.token_stride +
                          (unit->first_head + n / d) * a->out.head_stride + n % d;

        store_element(a->out.dtype, a->out.data, at,
                      shared[layout->merged_o + n] * (1.0f / shared[layout->merged_l + n / d]));
    }
    for (unsigned h = threadIdx.x; h < unit->heads && a->lse; h += blockDim.x)
        a->lse[unit->row * a->layer.query_heads + unit->first_head + h] =
            shared[layout->merged_m + h] + logf(shared[layout->merged_l + h]);
}

/* A split unit's state of a run: m and l of its heads, then o. */
__device__ static float *state_at(const struct attention_views *a, size_t unit, size_t run)
{
    return a->states + (unit * a->division.runs + run) * a->division.heads * (a->layer.d + 2);
}

/* ---- Kernels ---- */

/* One block a unit. */
__global__ static void attend_units(struct attention_views a)
{
    PKV_SHARED(float, shared);
    const struct shared_layout *layout = &a.division.layout;
    const struct plan_view *plan = plan_of(&a.plan);
    const size_t units = plan ? a.division.units : 0;

    for (size_t number = blockIdx.x; number < units; number += gridDim.x) {
        const struct unit unit = unit_at(&a, plan, number);

        load_queries(&a, &unit, shared);
        clear_state(&a, &unit, layout->merged_m, layout->merged_l, layout->merged_o, shared);
        for (size_t run = 0; run < unit.runs; run++) {
            attend_run(&a, &unit, run, shared);
            merge_state(&a, &unit, shared + layout->m, shared + layout->l, shared + layout->o,
                        shared);
        }
        write_outputs(&a, &unit, shared);
        __syncthreads();
    }
}

/* One block a unit and run. */
__global__ static void attend_split_units(struct attention_views a)
{
    PKV_SHARED(float, shared);
    const struct shared_layout *layout = &a.division.layout;
    const struct plan_view *plan = plan_of(&a.plan);
    const size_t number = blockIdx.x;
    const size_t run = blockIdx.y;
    float *state = state_at(&a, number, run);
    struct unit unit;

    if (!plan)
        return;
    unit = unit_at(&a, plan, number);
    if (run >= unit.runs)
        return;
    load_queries(&a, &unit, shared);
    attend_run(&a, &unit, run, shared);
    for (unsigned h = threadIdx.x; h < unit.heads; h += blockDim.x) {
        state[h] = shared[layout->m + h];
        state[a.division.heads + h] = shared[layout->l + h];
    }
    for (unsigned n = threadIdx.x; n < unit.heads * a.layer.d; n += blockDim.x)
        state[2 * a.division.heads + n] = shared[layout->o + n];
}

__global__ static void merge_split_units(struct attention_views a)
{
    PKV_SHARED(float, shared);
    const struct shared_layout *layout = &a.division.layout;
    const struct plan_view *plan = plan_of(&a.plan);
    struct unit unit;

    if (!plan)
        return;
    unit = unit_at(&a, plan, blockIdx.x);
    clear_state(&a, &unit, layout->merged_m, layout->merged_l, layout->merged_o, shared);
    for (size_t run = 0; run < unit.runs; run++) {
        const float *state = state_at(&a, blockIdx.x, run);

        merge_state(&a, &unit, state, state + a.division.heads, state + 2 * a.division.heads,
                    shared);
    }
    write_outputs(&a, &unit, shared);
}

/* ---- The host's side ---- */

static unsigned take(unsigned *floats, size_t n)
{
    unsigned at = *floats;

    *floats += (unsigned)((n + 31) / 32 * 32);
    return at;
}

static struct shared_layout lay_out(const struct division *division, size_t d)
{
    const size_t heads = division->heads;
    struct shared_layout layout = {};

    layout.q = take(&layout.floats, heads * d);
    layout.scores = take(&layout.floats, heads * division->score_stride);
    layout.inner = take(&layout.floats, heads * division->inner_stride);
    layout.scale = take(&layout.floats, heads);
    layout.m = take(&layout.floats, heads);
    layout.l = take(&layout.floats, heads);
    layout.o = take(&layout.floats, heads * d);
    layout.merged_m = take(&layout.floats, heads);
    layout.merged_l = take(&layout.floats, heads);
    layout.merged_o = take(&layout.floats, heads * d);
    return layout;
}

static size_t rank_of(const struct geometry *geometry, size_t layer)
{
    const size_t k = geometry->rank_k[layer];
    const size_t v = geometry->rank_v[layer];

    return k > v ? k : v;
}

/* As many heads of a group as shared memory has room for: at least one, whatever the geometry. */
static struct division divide(const struct backend *backend, size_t layer)
{
    const struct geometry *geometry = backend->geometry;
    const size_t group = gpu_group(geometry);
    const size_t length = geometry->policy.page_tokens;
    struct division division = {};
    unsigned heads = 1;

    division.score_stride = (unsigned)(length > BLOCK_TOKENS ? length : BLOCK_TOKENS);
    division.inner_stride = (unsigned)rank_of(geometry, layer);
    do {
        division.heads = heads;
        division.layout = lay_out(&division, geometry->head_dim);
        heads++;
        division.heads = heads;
    } while (heads <= group && lay_out(&division, geometry->head_dim).floats <= SHARED_FLOATS);
    division.heads = heads - 1;
    division.tiles = (unsigned)divide_up(group, division.heads);
    division.units = backend->step.view.rows * geometry->kv_heads * division.tiles;
    return division;
}

/* Runs of the step's longest item; while capturing of the longest one that there can be. */
static size_t most_runs(const struct backend *backend)
{
    const struct backend_plan *plan = &backend->step.plan;
    const size_t length = backend->geometry->policy.page_tokens;
    size_t most = 0;

    if (backend->step.capturing)
        return divide_up(backend->capacity.max_tokens, RUN_PAGES * length) + 1;
    for (size_t i = 0; i < plan->n_items; i++) {
        size_t runs = divide_up(plan->items[i].tokens, RUN_PAGES * length) +
                      divide_up(plan->items[i].new_tokens, RUN_PAGES * BLOCK_TOKENS);

        most = runs > most ? runs : most;
    }
    return most;
}

static size_t states_bytes_of(size_t units, size_t runs, size_t heads, size_t d)
{
    size_t bytes;

    if (__builtin_mul_overflow(units, runs, &bytes) ||
        __builtin_mul_overflow(bytes, heads * (d + 2) * sizeof(float), &bytes))
        return SIZE_MAX;
    return bytes;
}

/* Room for the states of any step of the declared capacity, up to STATES_BYTES. */
pkv_status attention_open(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    const size_t runs = divide_up(backend->capacity.max_tokens,
                                  RUN_PAGES * (geometry->policy.page_tokens < BLOCK_TOKENS
                                                   ? geometry->policy.page_tokens
                                                   : BLOCK_TOKENS)) +
                        2;
    const size_t rows = backend->capacity.max_step_tokens;
    size_t heads, bytes;

    if (__builtin_mul_overflow(geometry->query_heads, rows < SPLIT_UNITS ? rows : SPLIT_UNITS,
                               &heads))
        heads = SIZE_MAX;
    bytes = states_bytes_of(runs, heads, 1, geometry->head_dim);
    gpu_need_scratch(backend, min_size(bytes, STATES_BYTES));
    return decode_open(backend);
}

void attention_close(struct backend *backend)
{
    decode_close(backend);
}

static void attend_plainly(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const size_t runs = most_runs(backend);
    struct attention_views a = {};
    size_t shared_bytes;
    unsigned threads;

    a.layer = store_layer(backend, layer);
    a.plan = gpu_plan(backend);
    a.q = io->q;
    a.k = io->k;
    a.v = io->v;
    a.out = io->out;
    a.lse = io->lse;
    a.division = divide(backend, layer);
    a.states = backend->scratch;
    shared_bytes = a.division.layout.floats * sizeof(float);
    threads = gpu_threads((size_t)a.division.heads * a.layer.d);
    if (a.division.units < SPLIT_UNITS && runs > 1 && runs <= 65535 &&
        states_bytes_of(a.division.units, runs, a.division.heads, a.layer.d) <=
            backend->scratch_bytes) {
        a.division.runs = (unsigned)runs;
        PKV_LAUNCH(attend_split_units, dim3((unsigned)a.division.units, (unsigned)runs), threads,
                   shared_bytes, backend->stream, a);
        PKV_LAUNCH(merge_split_units, (unsigned)a.division.units, threads, shared_bytes,
                   backend->stream, a);
    } else {
        const size_t blocks = a.division.units < MAX_BLOCKS ? a.division.units : MAX_BLOCKS;

        PKV_LAUNCH(attend_units, (unsigned)blocks, threads, shared_bytes, backend->stream, a);
    }
}

pkv_status attention_run(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct backend_plan *plan = &backend->step.plan;
    size_t decoding = 0;
    pkv_status status = PKV_OK;

    if (!store_layer(backend, layer).fragments) {
        attend_plainly(backend, layer, io);
        return gpu_check_launch(backend, "cannot attend");
    }
    for (size_t i = 0; i < plan->n_items; i++)
        decoding += plan->items[i].new_tokens == 1;
    if (decoding > 0)
        status = decode_run(backend, layer, io);
    if (status == PKV_OK && decoding < plan->n_items)
        status = prefill_run(backend, layer, io);
    return status;
}
