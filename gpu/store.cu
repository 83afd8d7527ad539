/* SPDX-License-Identifier: MIT */
/* Pools, the plan of a step on the device, and everything that moves K and V. */
#include "store.h"

#include <stdio.h>

/* Pages of factors begin on the memory's own lines. */
#define PAGE_ALIGNMENT 128

/* Of a plan's memory at first. */
#define DECLARED_PLAN_BYTES ((size_t)16 << 20)

static unsigned blocks_of(size_t n)
{
    return (unsigned)(n < MAX_BLOCKS ? n : MAX_BLOCKS);
}

/* ---- Pools ---- */

static size_t dense_page_bytes(const struct geometry *geometry)
{
    return 2 * geometry->policy.page_tokens * geometry->head_dim * geometry->element_bytes;
}

static struct part_form form_of(const struct geometry *geometry, size_t layer, enum page_part part)
{
    const bool is_key = part == PART_K_LEFT || part == PART_K_RIGHT;

    return parts_form(part, is_key ? geometry->factors_k : geometry->factors_v,
                      geometry->policy.page_tokens, geometry->head_dim,
                      is_key ? geometry->rank_k[layer] : geometry->rank_v[layer]);
}

/* What a tuned kernel reads must be aligned to, and more than an element: scales of an odd rank may
 * be in front of it. */
#define PART_ALIGNMENT 16

/* Whether pages of a layer are in the order of order.h for tensor cores: where decode.cu attends.
 */
static bool has_fragments(const struct geometry *geometry, size_t layer)
{
    return geometry->element_bytes == 2 && geometry->policy.page_tokens == 32 &&
           (geometry->head_dim == 64 || geometry->head_dim == 128) && gpu_group(geometry) <= 8 &&
           geometry->rank_k[layer] <= TILE && geometry->rank_v[layer] <= TILE;
}

/* Fills `parts`, where it is not NULL. Returns the bytes of a page of one head. */
static size_t divide_factor_page(const struct geometry *geometry, size_t layer,
                                 struct part_place *parts)
{
    const bool fragments = has_fragments(geometry, layer);
    size_t bytes = 0;

    for (int i = PART_K_LEFT; i <= PART_V_RIGHT; i++) {
        struct part_form form = form_of(geometry, layer, (enum page_part)i);
        struct part_place part;

        part.offset = (bytes + PART_ALIGNMENT - 1) / PART_ALIGNMENT * PART_ALIGNMENT;
        part.rows = (unsigned)form.rows;
        part.columns = (unsigned)form.columns;
        part.coded = form.coded;
        part.row_scales = form.row_scales;
        part.fragments = fragments;
        part.is_key = i == PART_K_LEFT || i == PART_K_RIGHT;
        part.is_left = i == PART_K_LEFT || i == PART_V_LEFT;
        part.bytes = form.coded ? part_room(&part) / 2 : part_room(&part) * geometry->element_bytes;
        part.scales = part.offset + part.bytes;
        if (form.coded)
            part.bytes += sizeof(uint16_t) * (form.row_scales ? form.rows : form.columns);
        if (parts)
            parts[i - PART_K_LEFT] = part;
        bytes = part.offset + part.bytes;
    }
    return (bytes + PAGE_ALIGNMENT - 1) / PAGE_ALIGNMENT * PAGE_ALIGNMENT;
}

/* *total += heads * slots * page_bytes; false when that wraps. */
static bool add_pages(size_t *total, size_t heads, size_t slots, size_t page_bytes)
{
    size_t bytes;

    return !__builtin_mul_overflow(heads, slots, &bytes) &&
           !__builtin_mul_overflow(bytes, page_bytes, &bytes) &&
           !__builtin_add_overflow(*total, bytes, total);
}

/* Bytes of both pools; sets the factor layers' offsets. False when they wrap. */
static bool size_pools(struct backend *backend, size_t *dense, size_t *factor)
{
    const struct geometry *geometry = backend->geometry;
    bool fits = true;

    *dense = *factor = 0;
    for (size_t layer = 0; layer < geometry->layers; layer++) {
        backend->factor_offset[layer] = *factor;
        fits = fits && add_pages(dense, geometry->kv_heads, backend->capacity.dense_slots,
                                 dense_page_bytes(geometry));
        if (backend->capacity.factor_slots > 0)
            fits = fits && add_pages(factor, geometry->kv_heads, backend->capacity.factor_slots,
                                     divide_factor_page(geometry, layer, NULL));
    }
    return fits && *dense <= SIZE_MAX / 2 && *factor <= SIZE_MAX / 2;
}

static size_t largest_part_bytes(const struct geometry *geometry)
{
    size_t most = dense_page_bytes(geometry) / 2;

    for (size_t layer = 0; layer < geometry->layers; layer++) {
        struct part_place parts[4];

        divide_factor_page(geometry, layer, parts);
        for (int i = 0; i < 4; i++)
            most = parts[i].bytes > most ? parts[i].bytes : most;
    }
    return most;
}

static size_t faults_bytes(const struct geometry *geometry)
{
    return geometry->layers * sizeof(struct layer_faults) + sizeof(struct device_report);
}

/* ---- The plan ---- */

/* What of the plan lies where in its memory, behind its struct plan_view. */
struct plan_layout {
    size_t items, tables, dense_jobs, factor_jobs, bytes;
    size_t n_pages, n_dense, n_factor;
};

static size_t take(size_t *bytes, size_t n, size_t size)
{
    size_t at = *bytes;

    *bytes = size_add(*bytes, size_add(size_multiply(n, size), 15) / 16 * 16);
    return at;
}

/* Of the counts that are set in it. */
static void lay_out_plan(struct plan_layout *layout, size_t n_items)
{
    take(&layout->bytes, 1, sizeof(struct plan_view));
    layout->items = take(&layout->bytes, n_items, sizeof(struct device_item));
    layout->tables = take(&layout->bytes, layout->n_pages, sizeof(struct page));
    layout->dense_jobs = take(&layout->bytes, layout->n_dense, sizeof(struct device_job));
    layout->factor_jobs = take(&layout->bytes, layout->n_factor, sizeof(struct device_job));
}

static struct plan_layout layout_of_step(const struct backend *backend)
{
    const struct backend_plan *plan = &backend->step.plan;
    struct plan_layout layout = {};

    for (size_t i = 0; i < plan->n_items; i++) {
        layout.n_pages += pages_count(&backend->geometry->policy, plan->items[i].tokens);
        for (size_t j = 0; j < plan->items[i].n_changes; j++) {
            if (plan->items[i].changes[j].to.kind == SLOT_FACTOR)
                layout.n_factor++;
            else
                layout.n_dense++;
        }
    }
    lay_out_plan(&layout, plan->n_items);
    return layout;
}

/* What any step needs of the tokens that were declared, forks counted in full; within reason. */
static size_t declared_plan_bytes(const struct backend *backend)
{
    const struct capacity *capacity = &backend->capacity;
    const size_t length = backend->geometry->policy.page_tokens;
    const size_t sequences = capacity->max_sequences;
    struct plan_layout layout = {};

    layout.n_pages = size_add(capacity->max_tokens / length, sequences);
    layout.n_dense = layout.n_factor =
        size_add(capacity->max_step_tokens / length, size_multiply(sequences, 2));
    lay_out_plan(&layout, sequences);
    return min_size(layout.bytes, DECLARED_PLAN_BYTES);
}

static void write_plan(struct backend *backend, const struct plan_layout *layout, unsigned char *to)
{
    const struct backend_plan *plan = &backend->step.plan;
    struct device_item *items = (struct device_item *)(void *)(to + layout->items);
    struct page *tables = (struct page *)(void *)(to + layout->tables);
    struct device_job *dense = (struct device_job *)(void *)(to + layout->dense_jobs);
    struct device_job *factor = (struct device_job *)(void *)(to + layout->factor_jobs);
    struct plan_view *view = &backend->step.view;
    size_t first_page = 0;

    view->items = (const struct device_item *)(void *)(backend->plan_device + layout->items);
    view->tables = (const struct page *)(void *)(backend->plan_device + layout->tables);
    view->dense_jobs =
        (const struct device_job *)(void *)(backend->plan_device + layout->dense_jobs);
    view->factor_jobs =
        (const struct device_job *)(void *)(backend->plan_device + layout->factor_jobs);
    view->n_items = plan->n_items;
    view->n_dense = layout->n_dense;
    view->n_factor = layout->n_factor;
    view->rows = plan->rows;
    memcpy(to, view, sizeof *view);
    for (size_t i = 0; i < plan->n_items; i++) {
        const struct backend_item *item = &plan->items[i];
        const size_t pages = pages_count(&backend->geometry->policy, item->tokens);

        items[i].tokens = item->tokens;
        items[i].new_tokens = item->new_tokens;
        items[i].first_row = item->first_row;
        items[i].first_page = first_page;
        if (pages > 0)
            memcpy(tables + first_page, item->table, pages * sizeof *tables);
        first_page += pages;
        for (size_t j = 0; j < item->n_changes; j++) {
            const struct page_change *change = &item->changes[j];
            struct device_job *job = change->to.kind == SLOT_FACTOR ? factor++ : dense++;

            job->first_row = item->first_row + change->first_new;
            job->from_slot = change->from.slot;
            job->to_slot = change->to.slot;
            job->cached_tokens = (uint32_t)change->cached_tokens;
            job->new_tokens = (uint32_t)change->new_tokens;
        }
    }
}

/* On the device. Steps under way still need what is there; graphs do not know another place. */
static pkv_status reserve_plan(struct backend *backend, size_t bytes)
{
    pkv_status status;

    if (bytes <= backend->plan_bytes)
        return PKV_OK;
    status = gpu_check(backend, cudaStreamSynchronize(backend->stream), "cannot move the plan");
    if (status != PKV_OK)
        return status;
    gpu_release(backend, backend->plan_bytes, backend->plan_device);
    backend->captured = false;
    backend->plan_bytes = bytes;
    status = gpu_allocate(backend, bytes, "a step's plan", (void **)&backend->plan_device);
    if (status != PKV_OK)
        backend->plan_bytes = 0;
    return status;
}

/* On the host, of a flight that nothing is under way of. */
static pkv_status reserve_flight(struct backend *backend, struct flight *flight)
{
    pkv_status status = PKV_OK;

    if (!flight->done)
        status = gpu_check(backend, cudaEventCreateWithFlags(&flight->done, cudaEventDisableTiming),
                           "cannot create an event");
    if (status == PKV_OK && !flight->faults)
        status =
            gpu_allocate_pinned(backend, faults_bytes(backend->geometry), (void **)&flight->faults);
    if (status != PKV_OK || flight->plan_bytes == backend->plan_bytes)
        return status;
    gpu_release_pinned(backend, flight->plan_bytes, flight->plan_host);
    flight->plan_bytes = 0;
    status = gpu_allocate_pinned(backend, backend->plan_bytes, (void **)&flight->plan_host);
    if (status == PKV_OK)
        flight->plan_bytes = backend->plan_bytes;
    return status;
}

/* Room for twice as much as is needed, so that growing stays rare. */
pkv_status store_step_begin(struct backend *backend)
{
    const struct plan_layout layout = layout_of_step(backend);
    struct flight *flight = gpu_flight(backend);
    pkv_status status = PKV_OK;

    if (layout.bytes > backend->plan_bytes)
        status = reserve_plan(backend, size_multiply(layout.bytes, 2));
    if (status == PKV_OK)
        status = reserve_flight(backend, flight);
    if (status != PKV_OK)
        return status;
    write_plan(backend, &layout, flight->plan_host);
    status = gpu_check(backend,
                       cudaMemcpyAsync(backend->plan_device, flight->plan_host, layout.bytes,
                                       cudaMemcpyHostToDevice, backend->stream),
                       "cannot upload the plan");
    if (status == PKV_OK)
        status = gpu_check(backend,
                           cudaMemsetAsync(backend->faults, 0xff,
                                           backend->geometry->layers * sizeof *backend->faults,
                                           backend->stream),
                           "cannot clear the report");
    if (status == PKV_OK)
        status = gpu_check(backend,
                           cudaMemsetAsync(gpu_report(backend, backend->faults), 0,
                                           sizeof(struct device_report), backend->stream),
                           "cannot clear the report");
    return status;
}

pkv_status store_fetch_report(struct backend *backend)
{
    return gpu_check(backend,
                     cudaMemcpyAsync(gpu_flight(backend)->faults, backend->faults,
                                     faults_bytes(backend->geometry), cudaMemcpyDeviceToHost,
                                     backend->stream),
                     "cannot fetch the report");
}

/* ---- Opening ---- */

pkv_status store_open(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    size_t dense, factor;
    pkv_status status;

    backend->factor_offset = (size_t *)memory_allocate(backend->memory, geometry->layers,
                                                       sizeof *backend->factor_offset);
    if (!backend->factor_offset)
        return fail(backend->message, PKV_ERROR_MEMORY, "cannot allocate the table of %zu layers",
                    geometry->layers);
    if (!size_pools(backend, &dense, &factor))
        return fail(backend->message, PKV_ERROR_MEMORY,
                    "%zu dense and %zu factor page slots are more than memory can hold",
                    backend->capacity.dense_slots, backend->capacity.factor_slots);
    status = gpu_allocate(backend, dense, "dense page slots", (void **)&backend->dense);
    if (status == PKV_OK && factor > 0)
        status = gpu_allocate(backend, factor, "factor page slots", (void **)&backend->factor);
    backend->reserved_bytes = dense + factor;
    if (status == PKV_OK)
        status = gpu_allocate(backend, faults_bytes(geometry), "a step's report",
                              (void **)&backend->faults);
    if (status == PKV_OK)
        status = gpu_allocate_pinned(backend, largest_part_bytes(geometry),
                                     (void **)&backend->part_host);
    return status == PKV_OK ? reserve_plan(backend, declared_plan_bytes(backend)) : status;
}

void store_close(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    size_t dense = 0, factor = 0;

    if (backend->factor_offset)
        size_pools(backend, &dense, &factor);
    gpu_release_pinned(backend, largest_part_bytes(geometry), backend->part_host);
    gpu_release(backend, faults_bytes(geometry), backend->faults);
    for (size_t i = 0; i < FLIGHTS; i++) {
        struct flight *flight = &backend->flights[i];

        gpu_release_pinned(backend, faults_bytes(geometry), flight->faults);
        gpu_release_pinned(backend, flight->plan_bytes, flight->plan_host);
        if (flight->done)
            cudaEventDestroy(flight->done);
    }
    gpu_release(backend, backend->plan_bytes, backend->plan_device);
    gpu_release(backend, factor, backend->factor);
    gpu_release(backend, dense, backend->dense);
    memory_release(backend->memory, backend->factor_offset);
}

struct layer_view store_layer(const struct backend *backend, size_t layer)
{
    const struct geometry *geometry = backend->geometry;
    struct layer_view view = {};

    view.dense_bytes = dense_page_bytes(geometry);
    view.dense = backend->dense +
                 layer * backend->capacity.dense_slots * geometry->kv_heads * view.dense_bytes;
    if (backend->factor) {
        view.factor_bytes = divide_factor_page(geometry, layer, view.parts);
        view.factor = backend->factor + backend->factor_offset[layer];
    }
    view.length = (unsigned)geometry->policy.page_tokens;
    view.d = (unsigned)geometry->head_dim;
    view.kv_heads = (unsigned)geometry->kv_heads;
    view.query_heads = (unsigned)geometry->query_heads;
    view.rank_k = (unsigned)geometry->rank_k[layer];
    view.rank_v = (unsigned)geometry->rank_v[layer];
    view.dtype = geometry->dtype;
    view.factors_k = geometry->factors_k;
    view.factors_v = geometry->factors_v;
    view.softmax_scale = geometry->softmax_scale;
    view.fragments = has_fragments(geometry, layer);
    return view;
}

/* ---- Rounding ---- */

/* The item that a row of the step belongs to. */
__device__ static const struct device_item *item_of(const struct plan_view *plan, size_t row)
{
    size_t low = 0;
    size_t high = plan->n_items;

    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;

        if (plan->items[middle].first_row <= row)
            low = middle;
        else
            high = middle;
    }
    return &plan->items[low];
}

/*
 * A fault as a number that is the smaller the earlier it is reported: in item, page, head, K before
 * V, token order. Rows of a page are counted from its first new one, which stands for item and
 * page.
 */
#define FAULT_TOKENS (2 * (unsigned long long)MAX_PAGE_TOKENS)

__device__ static unsigned long long fault_number(const struct plan_view *plan, unsigned length,
                                                  unsigned heads, size_t row, unsigned head,
                                                  bool is_key, bool overflows)
{
    const struct device_item *item = item_of(plan, row);
    const size_t since = row - item->first_row;
    const size_t in_page = (item->tokens + since) % length;
    const size_t t = in_page < since ? in_page : since;

    return (((row - t) * heads + head) * 2 + !is_key) * FAULT_TOKENS + 2 * t + overflows;
}

/* In f32, the bits of the least magnitude that the storage type rounds to infinity. */
__device__ static inline unsigned overflow_bits(pkv_dtype dtype)
{
    return dtype == PKV_F16 ? 0x477ff000u : dtype == PKV_BF16 ? 0x7f7f8000u : 0x7f800000u;
}

/* Eight elements that begin where input_aligned() tells of. */
__device__ static void load_eight(const pkv_input *input, size_t at, float x[8])
{
    if (input->dtype == PKV_F32) {
        UNROLL
        for (unsigned i = 0; i < 8; i += 4) {
            const uint4 four = load_16((const float *)input->data + at + i);

            x[i] = f32_from_bits(four.x);
            x[i + 1] = f32_from_bits(four.y);
            x[i + 2] = f32_from_bits(four.z);
            x[i + 3] = f32_from_bits(four.w);
        }
    } else {
        unpack(input->dtype, load_16((const uint16_t *)input->data + at), x);
    }
}

/* The bits of the largest magnitude of eight elements in f32. */
__device__ static unsigned most_of(const pkv_input *input, bool aligned, size_t at)
{
    unsigned most = 0;
    float x[8];

    if (aligned)
        load_eight(input, at, x);
    UNROLL
    for (unsigned i = 0; i < 8; i++) {
        const unsigned bits =
            f32_bits(aligned ? x[i] : load_element(input->dtype, input->data, at + i)) &
            0x7fffffffu;

        most = bits > most ? bits : most;
    }
    return most;
}

/* Rows of a block of check_rows(). */
#define CHECK_ROWS 4

/* A block some rows, a thread eight elements at once. */
__global__ static void check_rows(struct layer_view layer, struct launch_plan launch, pkv_input k,
                                  pkv_input v, struct layer_faults *faults,
                                  struct device_report *report)
{
    const struct plan_view *plan = plan_of(&launch);
    const size_t rows = plan ? plan->rows : 0;
    const unsigned pieces = layer.d / 8;
    const unsigned infinite = f32_bits(INFINITY);
    const unsigned overflow = overflow_bits(layer.dtype);

    if (plan && blockIdx.x == 0 && threadIdx.x == 0)
        atomicAdd(&report->layers, 1ull);

    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        for (unsigned n = threadIdx.x; n < 2 * layer.kv_heads * pieces; n += blockDim.x) {
            const bool is_key = n < layer.kv_heads * pieces;
            const pkv_input input = is_key ? k : v;
            const unsigned head = n / pieces % layer.kv_heads;
            const unsigned most =
                most_of(&input, input_aligned(&input),
                        row * input.token_stride + head * input.head_stride + n % pieces * 8);

            if (most >= overflow)
                atomicMin(&faults->value, fault_number(plan, layer.length, layer.kv_heads, row,
                                                       head, is_key, most < infinite));
        }
    }
}

static const char *type_name(pkv_dtype dtype)
{
    static const char *const names[] = {"f32", "f16", "bf16"};

    return names[dtype];
}

/* The kernel tells of an element alone; a row that has a value that is not finite and another that
 * overflows is told by its first. */
pkv_status store_fault(struct backend *backend, const struct backend_plan *plan, size_t layer,
                       unsigned long long fault)
{
    const struct geometry *geometry = backend->geometry;
    const bool overflows = fault % 2;
    const size_t t = (size_t)(fault % FAULT_TOKENS / 2);
    const bool is_key = fault / FAULT_TOKENS % 2 == 0;
    const size_t head = (size_t)(fault / FAULT_TOKENS / 2 % geometry->kv_heads);
    const size_t row = (size_t)(fault / FAULT_TOKENS / 2 / geometry->kv_heads) + t;
    char which[48] = "";
    char what[32] = "is not finite";
    size_t i = 0;
    size_t token;

    while (i + 1 < plan->n_items && plan->items[i + 1].first_row <= row)
        i++;
    token = plan->items[i].tokens + row - plan->items[i].first_row;
    if (overflows)
        snprintf(what, sizeof what, "overflows %s", type_name(geometry->dtype));
    if (plan->n_items > 1)
        snprintf(which, sizeof which, "item %zu, ", i);
    return fail(backend->message, PKV_ERROR_VALUE,
                "%slayer %zu, KV head %zu, page %zu (token %zu): %s %s", which, layer, head,
                token / geometry->policy.page_tokens, token, is_key ? "K" : "V", what);
}

/* ---- Dense pages ---- */

/* One block a job and head: the cached rows, where the page is copied, then the new ones. */
__global__ static void append_rows(struct layer_view layer, struct launch_plan launch, pkv_input k,
                                   pkv_input v)
{
    const struct plan_view *plan = plan_of(&launch);
    const size_t n = plan ? plan->n_dense * layer.kv_heads : 0;

    for (size_t number = blockIdx.x; number < n; number += gridDim.x) {
        const struct device_job *job = &plan->dense_jobs[number / layer.kv_heads];
        const unsigned head = (unsigned)(number % layer.kv_heads);
        unsigned char *to = dense_page(&layer, job->to_slot, head);

        for (int part = 0; part < 2; part++) {
            const bool is_key = part == 0;

            if (job->cached_tokens > 0 && job->from_slot != job->to_slot) {
                const unsigned char *from = dense_page(&layer, job->from_slot, head);

                for (unsigned i = threadIdx.x; i < job->cached_tokens * layer.d; i += blockDim.x) {
                    const size_t at = dense_index(&layer, is_key, i / layer.d, i % layer.d);

                    store_element(layer.dtype, to, at, load_element(layer.dtype, from, at));
                }
            }
            for (unsigned i = threadIdx.x; i < job->new_tokens * layer.d; i += blockDim.x)
                store_element(
                    layer.dtype, to,
                    dense_index(&layer, is_key, job->cached_tokens + i / layer.d, i % layer.d),
                    input_element(is_key ? &k : &v, job->first_row + i / layer.d, head,
                                  i % layer.d));
        }
    }
}

pkv_status store_run(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct layer_view view = store_layer(backend, layer);
    const struct plan_view *plan = &backend->step.view;
    const size_t n_dense = backend->step.capturing ? plan->n_items : plan->n_dense;

    PKV_LAUNCH(check_rows, blocks_of((plan->rows + CHECK_ROWS - 1) / CHECK_ROWS),
               gpu_threads(2 * view.kv_heads * view.d / 8), 0, backend->stream, view,
               gpu_plan(backend), io->k, io->v, backend->faults + layer,
               gpu_report(backend, backend->faults));
    if (n_dense > 0)
        PKV_LAUNCH(append_rows, blocks_of(n_dense * view.kv_heads), BLOCK_THREADS, 0,
                   backend->stream, view, gpu_plan(backend), io->k, io->v);
    return gpu_check_launch(backend, "cannot store K and V");
}

/* ---- Reading back, and in ---- */

/* The product of two parts in f32, each sum ascending in steps that are rounded one by one, as the
 * CPU does; then rounded, and kept in range, as the page itself was. One block a head. */
__global__ static void rebuild_page(struct layer_view layer, uint32_t factor_slot,
                                    uint32_t dense_slot)
{
    const unsigned head = blockIdx.x;
    const unsigned char *from = factor_page(&layer, factor_slot, head);
    unsigned char *to = dense_page(&layer, dense_slot, head);
    const float limit = largest_element(layer.dtype);

    for (unsigned i = threadIdx.x; i < 2 * layer.length * layer.d; i += blockDim.x) {
        const bool is_key = i < layer.length * layer.d;
        const unsigned t = i / layer.d % layer.length;
        const struct part_place *left = &layer.parts[is_key ? 0 : 2];
        float sum = 0.0f;

        for (unsigned p = 0; p < left->columns; p++)
            sum = __fadd_rn(sum, __fmul_rn(part_element(&layer, left, from, t, p),
                                           part_element(&layer, left + 1, from, p, i % layer.d)));
        sum = sum < -limit ? -limit : sum > limit ? limit : sum;
        store_element(layer.dtype, to, dense_index(&layer, is_key, t, i % layer.d), sum);
    }
}

static pkv_status wait(struct backend *backend, const char *what)
{
    return gpu_check(backend, cudaStreamSynchronize(backend->stream), what);
}

cudaError_t store_find_kernel(void)
{
    struct cudaFuncAttributes attributes;

    return cudaFuncGetAttributes(&attributes, rebuild_page);
}

pkv_status store_rebuild(struct backend *backend, uint32_t factor_slot, uint32_t dense_slot)
{
    pkv_status status;

    for (size_t layer = 0; layer < backend->geometry->layers; layer++)
        PKV_LAUNCH(rebuild_page, (unsigned)backend->geometry->kv_heads, BLOCK_THREADS, 0,
                   backend->stream, store_layer(backend, layer), factor_slot, dense_slot);
    status = gpu_check_launch(backend, "cannot rebuild a page");
    return status == PKV_OK ? wait(backend, "cannot rebuild a page") : status;
}

/* A part as it lies in the device's memory. */
struct part_view {
    struct layer_view layer;
    unsigned char *data;
    size_t bytes;
    const struct part_place *place; /* NULL: of a dense page */
    bool is_key;
    size_t tokens; /* of a dense page */
    size_t element_bytes;
};

static void view_part(const struct backend *backend, struct page page, size_t layer, size_t kv_head,
                      size_t tokens, enum page_part part, struct part_view *view)
{
    const struct geometry *geometry = backend->geometry;
    const size_t number = (size_t)page.slot * geometry->kv_heads + kv_head;

    *view = {};
    view->layer = store_layer(backend, layer);
    view->element_bytes = geometry->element_bytes;
    if (page.kind == SLOT_DENSE) {
        view->is_key = part == PART_K;
        view->tokens = tokens;
        view->bytes = view->layer.fragments ? view->layer.dense_bytes / 2
                                            : tokens * geometry->head_dim * geometry->element_bytes;
        view->data = view->layer.dense + number * view->layer.dense_bytes +
                     (part == PART_K ? 0 : view->layer.dense_bytes / 2);
    } else {
        view->place = &view->layer.parts[part - PART_K_LEFT];
        view->bytes = view->place->bytes;
        view->data = view->layer.factor + number * view->layer.factor_bytes + view->place->offset;
    }
}

/* Between the canonical form and the device's order, on the host. */
static void copy_element(size_t bytes, const unsigned char *from, size_t from_index,
                         unsigned char *to, size_t to_index)
{
    memcpy(to + to_index * bytes, from + from_index * bytes, bytes);
}

static void copy_code(const unsigned char *from, size_t from_index, unsigned char *to,
                      size_t to_index)
{
    const unsigned code = from[from_index / 2] >> from_index % 2 * 4 & 15;
    unsigned char *byte = to + to_index / 2;

    *byte = (unsigned char)(to_index % 2 ? (*byte & 15) | code << 4 : (*byte & 0xf0) | code);
}

/* `to_device`: from the canonical form; else to it. */
static void reorder(const struct part_view *view, bool to_device, const unsigned char *from,
                    unsigned char *to)
{
    const struct part_place *place = view->place;
    const size_t rows = place ? place->rows : view->tokens;
    const size_t columns = place ? place->columns : view->layer.d;
    const size_t scales_here = place ? place->scales - place->offset : 0;
    const size_t scales = rows * columns / 2; /* canonical */

    for (unsigned row = 0; row < rows; row++) {
        for (unsigned column = 0; column < columns; column++) {
            const size_t at =
                place ? part_index(place, row, column)
                      : dense_place(view->layer.fragments, view->layer.length, view->layer.d,
                                    view->is_key, row, column) -
                            (view->is_key ? 0 : (size_t)view->layer.length * view->layer.d);
            const size_t canonical = row * columns + column;

            if (place && place->coded)
                copy_code(from, to_device ? canonical : at, to, to_device ? at : canonical);
            else
                copy_element(view->element_bytes, from, to_device ? canonical : at, to,
                             to_device ? at : canonical);
        }
    }
    for (unsigned i = 0; place && place->coded && i < (place->row_scales ? rows : columns); i++)
        copy_element(sizeof(uint16_t), from + (to_device ? scales : scales_here),
                     to_device ? i : scale_index(place, i), to + (to_device ? scales_here : scales),
                     to_device ? scale_index(place, i) : i);
}

pkv_status store_read(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                      size_t tokens, enum page_part part, void *out)
{
    struct part_view view;
    pkv_status status;

    view_part(backend, page, layer, kv_head, tokens, part, &view);
    status = gpu_check(backend,
                       cudaMemcpyAsync(backend->part_host, view.data, view.bytes,
                                       cudaMemcpyDeviceToHost, backend->stream),
                       "cannot read a page");
    if (status == PKV_OK)
        status = wait(backend, "cannot read a page");
    if (status == PKV_OK)
        reorder(&view, false, backend->part_host, (unsigned char *)out);
    return status;
}

pkv_status store_write(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                       size_t tokens, enum page_part part, const void *in)
{
    struct part_view view;
    pkv_status status;

    view_part(backend, page, layer, kv_head, tokens, part, &view);
    memset(backend->part_host, 0, view.bytes);
    reorder(&view, true, (const unsigned char *)in, backend->part_host);
    status = gpu_check(backend,
                       cudaMemcpyAsync(view.data, backend->part_host, view.bytes,
                                       cudaMemcpyHostToDevice, backend->stream),
                       "cannot write a page");
    return status == PKV_OK ? wait(backend, "cannot write a page") : status;
}
