/* SPDX-License-Identifier: MIT */
/* Pools, the layout of pages, rounding, and everything that moves K and V. */
#include "store.h"

#include "codec.h"
#include "elements.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

/* Below this many elements a parallel region costs more than it saves. */
#define PARALLEL_ELEMENTS 32768

/* Elements of a head that are rounded together, of each token of a block; even. */
#define ROUND_ELEMENTS 64

/* ---- Pools ---- */

static size_t dense_page_bytes(const struct geometry *geometry)
{
    return 2 * geometry->policy.page_tokens * geometry->head_dim * geometry->element_bytes;
}

/* Of K or V of a factor page, with what aligns the next one. */
static size_t factor_part_bytes(const struct backend *backend, size_t layer, bool is_key)
{
    const struct geometry *geometry = backend->geometry;
    const struct codec *codec = is_key ? backend->codec_k : backend->codec_v;
    size_t bytes =
        codec->bytes(geometry, is_key, is_key ? geometry->rank_k[layer] : geometry->rank_v[layer]);

    return (bytes + sizeof(float) - 1) / sizeof(float) * sizeof(float);
}

/* *total += layer_heads * slots * page_bytes; false when that wraps. */
static bool add_pages(size_t *total, size_t heads, size_t slots, size_t page_bytes)
{
    size_t bytes;

    return !__builtin_mul_overflow(heads, slots, &bytes) &&
           !__builtin_mul_overflow(bytes, page_bytes, &bytes) &&
           !__builtin_add_overflow(*total, bytes, total);
}

static pkv_status reserve(struct backend *backend, const char *kind, size_t slots, size_t bytes,
                          unsigned char **pool)
{
    size_t padded = bytes + KERNELS_PAD * sizeof(float);

    *pool = memory_allocate(backend->memory, padded, 1);
    if (!*pool)
        return fail(backend->message, PKV_ERROR_MEMORY,
                    "cannot allocate %zu bytes for %zu %s page slots", padded, slots, kind);
    backend->reserved_bytes += padded;
    return PKV_OK;
}

pkv_status store_open(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    size_t dense = 0;
    size_t factor = 0;
    bool fits = true;
    pkv_status status;

    backend->factors = memory_allocate(backend->memory, geometry->layers, sizeof *backend->factors);
    if (!backend->factors)
        return fail(backend->message, PKV_ERROR_MEMORY, "cannot allocate the table of %zu layers",
                    geometry->layers);
    for (size_t layer = 0; layer < geometry->layers; layer++) {
        struct factor_layout *layout = &backend->factors[layer];

        *layout = (struct factor_layout){.offset = factor};
        fits = fits && add_pages(&dense, geometry->kv_heads, backend->dense_slots,
                                 dense_page_bytes(geometry));
        if (backend->factor_slots == 0)
            continue;
        layout->k = factor_part_bytes(backend, layer, true);
        layout->page = layout->k + factor_part_bytes(backend, layer, false);
        fits = fits && add_pages(&factor, geometry->kv_heads, backend->factor_slots, layout->page);
    }
    /* Half the address space is left for the padding and for what else wraps. */
    if (!fits || dense > SIZE_MAX / 2 || factor > SIZE_MAX / 2)
        return fail(backend->message, PKV_ERROR_MEMORY,
                    "%zu dense and %zu factor page slots are more than memory can hold",
                    backend->dense_slots, backend->factor_slots);
    status = reserve(backend, "dense", backend->dense_slots, dense, &backend->dense);
    if (status == PKV_OK && backend->factor_slots > 0)
        status = reserve(backend, "factor", backend->factor_slots, factor, &backend->factor);
    return status;
}

void store_close(struct backend *backend)
{
    memory_release(backend->memory, backend->factor);
    memory_release(backend->memory, backend->dense);
    memory_release(backend->memory, backend->factors);
}

struct dense_page store_dense(const struct backend *backend, size_t layer, size_t kv_head,
                              uint32_t slot)
{
    const struct geometry *geometry = backend->geometry;
    size_t bytes = dense_page_bytes(geometry);
    size_t length = geometry->policy.page_tokens;
    unsigned char *page =
        backend->dense +
        ((layer * geometry->kv_heads + kv_head) * backend->dense_slots + slot) * bytes;

    return (struct dense_page){{page, geometry->head_dim, length},
                               {page + bytes / 2, length, geometry->head_dim}};
}

struct factor_page store_factors(const struct backend *backend, size_t layer, size_t kv_head,
                                 uint32_t slot)
{
    const struct factor_layout *layout = &backend->factors[layer];
    unsigned char *page =
        backend->factor + layout->offset + (kv_head * backend->factor_slots + slot) * layout->page;

    return (struct factor_page){page, page + layout->k};
}

/* Rows of one KV head's blocks: an item's last one may be odd, and then takes one row more. */
static size_t block_rows(const struct backend_plan *plan)
{
    return plan->rows + plan->n_items;
}

struct dense_page store_block(const struct backend *backend, const struct backend_item *item,
                              size_t kv_head, size_t block)
{
    const struct geometry *geometry = backend->geometry;
    const struct cpu_step *step = &backend->step;
    size_t row = kv_head * block_rows(&step->plan) + item->first_row +
                 (size_t)(item - step->plan.items) + block * BLOCK_TOKENS;
    size_t offset = row * geometry->head_dim * geometry->element_bytes;
    size_t tokens = cpu_block_tokens(item, block);

    return (struct dense_page){{step->new_k + offset, geometry->head_dim, tokens},
                               {step->new_v + offset, tokens, geometry->head_dim}};
}

/* ---- Steps ---- */

static size_t count_jobs(const struct backend_plan *plan, enum slot_kind kind)
{
    size_t n = 0;

    for (size_t i = 0; i < plan->n_items; i++)
        for (size_t j = 0; j < plan->items[i].n_changes; j++)
            n += plan->items[i].changes[j].to.kind == kind;
    return n;
}

static struct page_job *list_jobs(const struct backend_plan *plan, enum slot_kind kind,
                                  struct page_job *job)
{
    for (size_t i = 0; i < plan->n_items; i++)
        for (size_t j = 0; j < plan->items[i].n_changes; j++)
            if (plan->items[i].changes[j].to.kind == kind)
                *job++ = (struct page_job){&plan->items[i], &plan->items[i].changes[j]};
    return job;
}

pkv_status store_step_begin(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    struct cpu_step *step = &backend->step;
    size_t elements;

    step->n_dense = count_jobs(&step->plan, SLOT_DENSE);
    step->n_factor = count_jobs(&step->plan, SLOT_FACTOR);
    step->jobs =
        memory_allocate(backend->memory, step->n_dense + step->n_factor, sizeof *step->jobs);
    /* Four rows more make room for KERNELS_PAD floats: d is at least 8. */
    if (!__builtin_mul_overflow(block_rows(&step->plan), geometry->kv_heads, &elements) &&
        !__builtin_add_overflow(elements, 4, &elements) &&
        !__builtin_mul_overflow(elements, geometry->head_dim, &elements)) {
        step->new_k = memory_allocate(backend->memory, elements, geometry->element_bytes);
        step->new_v = memory_allocate(backend->memory, elements, geometry->element_bytes);
    }
    if (!step->jobs || !step->new_k || !step->new_v)
        return fail(backend->message, PKV_ERROR_MEMORY,
                    "cannot allocate one layer's K and V of %zu new tokens", step->plan.rows);
    list_jobs(&step->plan, SLOT_FACTOR, list_jobs(&step->plan, SLOT_DENSE, step->jobs));
    return PKV_OK;
}

void store_step_close(struct backend *backend)
{
    memory_release(backend->memory, backend->step.new_v);
    memory_release(backend->memory, backend->step.new_k);
    memory_release(backend->memory, backend->step.jobs);
}

/* ---- Rounding ---- */

static const void *input_row(const pkv_input *input, size_t row, size_t head)
{
    return (const char *)input->data + (row * input->token_stride + head * input->head_stride) *
                                           storage_element_bytes(input->dtype);
}

/* One row of K or V in the storage type. */
static void round_row(const struct backend *backend, const pkv_input *input, size_t row,
                      size_t head, void *out)
{
    const struct geometry *geometry = backend->geometry;
    const void *from = input_row(input, row, head);
    float x[MAX_HEAD_DIM];

    if (input->dtype == geometry->dtype) {
        memcpy(out, from, geometry->head_dim * geometry->element_bytes);
        return;
    }
    backend->kernels->to_f32[input->dtype](geometry->head_dim, from, x);
    backend->kernels->from_f32[geometry->dtype](geometry->head_dim, x, out);
}

/* Rows of f32. */
struct rows {
    const float *x;
    size_t stride;
};

/*
 * Elements at .. at + some - 1 of n rows of K or V, padded: the caller's own if kernels can take
 * them, or widened. Caller's rows are often a power of two apart, where few of them fit into the
 * nearest cache together, so that only what is read once is left there; and no hardware foresees
 * the next head's.
 */
static struct rows rows_in_f32(const struct backend *backend, const pkv_input *input, size_t first,
                               size_t n, size_t head, size_t at, size_t some, float *out)
{
    const struct geometry *geometry = backend->geometry;
    const size_t bytes = storage_element_bytes(input->dtype);
    const size_t ahead = head + 1 < geometry->kv_heads ? input->head_stride * bytes : 0;
    const bool as_they_are = input->dtype == PKV_F32 && geometry->dtype == PKV_BF16 &&
                             geometry->head_dim % KERNELS_PAD == 0;

    for (size_t t = 0; t < n; t++) {
        const char *row = (const char *)input_row(input, first + t, head) + at * bytes;

        for (size_t i = 0; i < some * bytes && ahead > 0; i += 64)
            __builtin_prefetch(row + ahead + i);
        if (!as_they_are)
            backend->kernels->to_f32[input->dtype](some, row, out + t * ROUND_ELEMENTS);
    }
    if (as_they_are)
        return (struct rows){(const float *)input_row(input, first, head) + at,
                             input->token_stride};
    return (struct rows){out, ROUND_ELEMENTS};
}

/* Rounds one block of one KV head; false where an element is not finite then. */
static bool round_block(const struct backend *backend, const struct attention_unit *unit,
                        size_t head, const pkv_step_io *io)
{
    const size_t d = backend->geometry->head_dim;
    const struct dense_page block = store_block(backend, unit->item, head, unit->block);
    const size_t first = unit->item->first_row + unit->block * BLOCK_TOKENS;
    const size_t n = unit->tokens;
    float widened[BLOCK_TOKENS * ROUND_ELEMENTS];
    bool good = true;

    for (size_t at = 0; at < d; at += ROUND_ELEMENTS) {
        size_t some = cpu_min(ROUND_ELEMENTS, d - at);
        struct rows rows = rows_in_f32(backend, &io->k, first, n, head, at, some, widened);

        good = elements_round_transposed(backend, (struct region){block.k, at, some, 0, n}, rows.x,
                                         rows.stride) &&
               good;
        rows = rows_in_f32(backend, &io->v, first, n, head, at, some, widened);
        good = elements_round(backend, (struct region){block.v, 0, n, at, some}, rows.x,
                              rows.stride) &&
               good;
    }
    return good;
}

static const char *type_name(pkv_dtype dtype)
{
    static const char *const names[] = {"f32", "f16", "bf16"};

    return names[dtype];
}

/* Where an element of a row overflows, or is not finite to begin with: the message, else PKV_OK. */
static pkv_status check_row(struct backend *backend, size_t layer, size_t head, size_t item_index,
                            size_t token, const pkv_input *input, size_t row, const char *name)
{
    const struct geometry *geometry = backend->geometry;
    const struct backend_item *item = &backend->step.plan.items[item_index];
    uint32_t rounded[MAX_HEAD_DIM];
    char which[48] = "";
    char fault[32] = "is not finite";

    round_row(backend, input, row, head, rounded);
    if (elements_finite(geometry->dtype, geometry->head_dim, rounded))
        return PKV_OK;
    if (elements_finite(input->dtype, geometry->head_dim, input_row(input, row, head)))
        snprintf(fault, sizeof fault, "overflows %s", type_name(geometry->dtype));
    if (backend->step.plan.n_items > 1)
        snprintf(which, sizeof which, "item %zu, ", item_index);
    return fail(backend->message, PKV_ERROR_VALUE,
                "%slayer %zu, KV head %zu, page %zu (token %zu): %s %s", which, layer, head,
                (item->tokens + token) / geometry->policy.page_tokens, item->tokens + token, name,
                fault);
}

/* The message of the first fault in item, page, head, K before V, token order. */
static pkv_status find_fault(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct geometry *geometry = backend->geometry;
    const struct backend_plan *plan = &backend->step.plan;
    const size_t length = geometry->policy.page_tokens;

    for (size_t i = 0; i < plan->n_items; i++) {
        const struct backend_item *item = &plan->items[i];
        size_t end;

        for (size_t begin = 0; begin < item->new_tokens; begin = end) {
            end = cpu_min(item->new_tokens, begin + length - (item->tokens + begin) % length);
            for (size_t j = 0; j < 2 * geometry->kv_heads; j++) {
                for (size_t t = begin; t < end; t++) {
                    pkv_status status =
                        check_row(backend, layer, j / 2, i, t, j % 2 ? &io->v : &io->k,
                                  item->first_row + t, j % 2 ? "V" : "K");

                    if (status != PKV_OK)
                        return status;
                }
            }
        }
    }
    return PKV_OK;
}

pkv_status store_round(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct geometry *geometry = backend->geometry;
    const struct cpu_step *step = &backend->step;
    const size_t n = step->n_units * geometry->kv_heads;
    pkv_status status = PKV_OK;
    int bad = 0;

#pragma omp parallel num_threads(step->threads) reduction(+ : bad) \
    if (n * geometry->head_dim > PARALLEL_ELEMENTS / BLOCK_TOKENS)
    {
        fenv_t modes;

        modes_set(&modes);
#pragma omp for
        for (size_t i = 0; i < n; i++)
            bad += !round_block(backend, &step->units[i / geometry->kv_heads],
                                i % geometry->kv_heads, io);
        modes_restore(&modes);
    }
    if (bad) {
        fenv_t modes;

        modes_set(&modes);
        status = find_fault(backend, layer, io);
        modes_restore(&modes);
    }
    return status;
}

/* ---- Dense pages ---- */

/* Where the next stretch of a job's new tokens lies: they may begin and end within blocks. */
struct stretch {
    struct dense_page block;
    size_t first; /* in the block */
    size_t tokens;
};

static struct stretch stretch_at(const struct backend *backend, const struct page_job *job,
                                 size_t head, size_t done)
{
    size_t token = job->change->first_new + done;
    size_t block = token / BLOCK_TOKENS;
    struct stretch stretch;

    stretch.block = store_block(backend, job->item, head, block);
    stretch.first = token % BLOCK_TOKENS;
    stretch.tokens =
        cpu_min(job->change->new_tokens - done, cpu_block_tokens(job->item, block) - stretch.first);
    return stretch;
}

static void append(const struct backend *backend, size_t layer, size_t head,
                   const struct page_job *job)
{
    const struct page_change *change = job->change;
    struct dense_page to = store_dense(backend, layer, head, change->to.slot);
    size_t at = change->cached_tokens;
    struct stretch s;

    if (at > 0 && change->from.slot != change->to.slot)
        memcpy(to.k.data, store_dense(backend, layer, head, change->from.slot).k.data,
               dense_page_bytes(backend->geometry));
    for (size_t done = 0; done < change->new_tokens; done += s.tokens) {
        s = stretch_at(backend, job, head, done);
        for (size_t t = s.first; t < s.first + s.tokens; t++, at++) {
            uint32_t row[MAX_HEAD_DIM];

            elements_get_column(backend, s.block.k, t, row);
            elements_put_column(backend, to.k, at, row);
            elements_get_row(backend, s.block.v, t, row);
            elements_put_row(backend, to.v, at, row);
        }
    }
    elements_end_rows(backend, to.v, at);
}

void store_append(struct backend *backend, size_t layer)
{
    const struct geometry *geometry = backend->geometry;
    const struct cpu_step *step = &backend->step;
    const size_t n = step->n_dense * geometry->kv_heads;

#pragma omp parallel for schedule(dynamic)                                                         \
    num_threads(step->threads) if (n * dense_page_bytes(geometry) > 4 * PARALLEL_ELEMENTS)
    for (size_t i = 0; i < n; i++)
        append(backend, layer, i % geometry->kv_heads, &step->jobs[i / geometry->kv_heads]);
}

/* ---- Factors ---- */

void store_gather(const struct backend *backend, size_t layer, size_t kv_head,
                  const struct page_job *job, bool is_key, float *transposed)
{
    const struct geometry *geometry = backend->geometry;
    const struct page_change *change = job->change;
    const size_t length = geometry->policy.page_tokens;
    const size_t d = geometry->head_dim;
    struct stretch s = {.tokens = change->cached_tokens};

    if (s.tokens > 0)
        s.block = store_dense(backend, layer, kv_head, change->from.slot);
    for (size_t at = 0;;) {
        if (s.tokens > 0 && is_key)
            elements_widen(backend, (struct region){s.block.k, 0, d, s.first, s.tokens},
                           transposed + at, length);
        if (s.tokens > 0 && !is_key)
            elements_widen_transposed(backend, (struct region){s.block.v, s.first, s.tokens, 0, d},
                                      transposed + at, length);
        at += s.tokens;
        if (at == length)
            return;
        s = stretch_at(backend, job, kv_head, at - change->cached_tokens);
    }
}

bool store_put_factors(const struct backend *backend, size_t layer, size_t kv_head, uint32_t slot,
                       bool is_key, float *left, float *right, size_t ld)
{
    const struct geometry *geometry = backend->geometry;
    const struct factor_page page = store_factors(backend, layer, kv_head, slot);

    if (is_key)
        return backend->codec_k->put(backend, true, geometry->rank_k[layer], left, right, ld,
                                     page.k);
    return backend->codec_v->put(backend, false, geometry->rank_v[layer], left, right, ld, page.v);
}

/* ---- Reading back, and in ---- */

/* The largest finite value that the storage type holds. */
static float largest(pkv_dtype dtype)
{
    return dtype == PKV_F16 ? 65504.0f : dtype == PKV_BF16 ? 0x1.fep+127f : FLT_MAX;
}

/*
 * The product of the parts a [rows, k] and b [k, n] of `page` in f32, sums ascending; rounded.
 * Where the approximation exceeds what the storage type holds it stays at the largest value, as the
 * page itself was in range.
 */
static void rebuild_matrix(const struct backend *backend, const struct codec *codec, size_t rows,
                           size_t k, size_t n, enum page_part a, enum page_part b,
                           const unsigned char *page, struct matrix c)
{
    const struct geometry *geometry = backend->geometry;
    const float limit = largest(geometry->dtype);
    float x[MAX_PAGE_TOKENS];
    float y[MAX_HEAD_DIM];
    float sum[MAX_HEAD_DIM];
    uint32_t row[MAX_HEAD_DIM];

    for (size_t i = 0; i < rows; i++) {
        codec->row(backend, a, k, page, i, x);
        for (size_t j = 0; j < n; j++)
            sum[j] = 0.0f;
        for (size_t p = 0; p < k; p++) {
            codec->row(backend, b, k, page, p, y);
            for (size_t j = 0; j < n; j++)
                sum[j] += x[p] * y[j];
        }
        for (size_t j = 0; j < n; j++)
            sum[j] = fminf(fmaxf(sum[j], -limit), limit);
        backend->kernels->from_f32[geometry->dtype](n, sum, row);
        elements_put_row(backend, c, i, row);
    }
}

void store_rebuild(const struct backend *backend, uint32_t factor_slot, uint32_t dense_slot)
{
    const struct geometry *geometry = backend->geometry;
    const size_t d = geometry->head_dim;
    const size_t length = geometry->policy.page_tokens;
    fenv_t modes;

    modes_set(&modes);
    for (size_t layer = 0; layer < geometry->layers; layer++) {
        for (size_t head = 0; head < geometry->kv_heads; head++) {
            struct factor_page from = store_factors(backend, layer, head, factor_slot);
            struct dense_page to = store_dense(backend, layer, head, dense_slot);

            rebuild_matrix(backend, backend->codec_k, d, geometry->rank_k[layer], length,
                           PART_K_RIGHT, PART_K_LEFT, from.k, to.k);
            rebuild_matrix(backend, backend->codec_v, length, geometry->rank_v[layer], d,
                           PART_V_LEFT, PART_V_RIGHT, from.v, to.v);
        }
    }
    modes_restore(&modes);
}

void store_read(const struct backend *backend, struct page page, size_t layer, size_t kv_head,
                size_t tokens, enum page_part part, void *out)
{
    const struct geometry *geometry = backend->geometry;
    const size_t row_bytes = geometry->head_dim * geometry->element_bytes;
    struct factor_page factors;

    if (page.kind == SLOT_DENSE) {
        struct dense_page dense = store_dense(backend, layer, kv_head, page.slot);
        char *to = out;

        for (size_t t = 0; t < tokens; t++, to += row_bytes) {
            if (part == PART_K)
                elements_get_column(backend, dense.k, t, to);
            else
                elements_get_row(backend, dense.v, t, to);
        }
        return;
    }
    factors = store_factors(backend, layer, kv_head, page.slot);
    if (part == PART_K_LEFT || part == PART_K_RIGHT)
        backend->codec_k->read(backend, part, geometry->rank_k[layer], factors.k, out);
    else
        backend->codec_v->read(backend, part, geometry->rank_v[layer], factors.v, out);
}

void store_write(const struct backend *backend, struct page page, size_t layer, size_t kv_head,
                 size_t tokens, enum page_part part, const void *in)
{
    const struct geometry *geometry = backend->geometry;
    const size_t row_bytes = geometry->head_dim * geometry->element_bytes;
    struct factor_page factors;

    if (page.kind == SLOT_DENSE) {
        struct dense_page dense = store_dense(backend, layer, kv_head, page.slot);
        const char *from = in;

        for (size_t t = 0; t < tokens; t++, from += row_bytes) {
            if (part == PART_K)
                elements_put_column(backend, dense.k, t, from);
            else
                elements_put_row(backend, dense.v, t, from);
        }
        if (part == PART_V)
            elements_end_rows(backend, dense.v, tokens);
        return;
    }
    factors = store_factors(backend, layer, kv_head, page.slot);
    if (part == PART_K_LEFT || part == PART_K_RIGHT)
        backend->codec_k->write(backend, part, geometry->rank_k[layer], in, factors.k);
    else
        backend->codec_v->write(backend, part, geometry->rank_v[layer], in, factors.v);
}
