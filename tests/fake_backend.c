/* SPDX-License-Identifier: MIT */
/* A backend that stores one number a token and checks every plan, and an allocator that counts and
 * fails on demand: they test the library without arithmetic. */
#include "fake_backend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *counting_allocate(void *opaque, size_t bytes)
{
    struct counting_allocator *counting = opaque;

    counting->calls++;
    if (counting->fail_at != 0 && (counting->calls == counting->fail_at ||
                                   (counting->fail_forever && counting->calls > counting->fail_at)))
        return NULL;

    void *block = malloc(bytes);

    if (block) {
        memset(block, 0xa5, bytes);
        counting->live++;
    }
    return block;
}

static void counting_release(void *opaque, void *pointer)
{
    struct counting_allocator *counting = opaque;

    counting->live--;
    free(pointer);
}

pkv_allocator counting_allocator(struct counting_allocator *counting)
{
    return (pkv_allocator){counting_allocate, counting_release, counting};
}

float fake_number(size_t id, size_t layer, size_t kv_head, bool value)
{
    return (float)(id * 128 + layer * 16 + kv_head * 2 + value);
}

uint32_t fake_mix(uint32_t sum, float number)
{
    return (uint32_t)(((uint64_t)sum * 131 + (uint64_t)number + 1) % 16777213);
}

static float *numbers(const struct backend *backend, struct page page, size_t layer, size_t head,
                      bool value)
{
    const struct geometry *geometry = backend->geometry;
    float *pool = page.kind == SLOT_FACTOR ? backend->factor : backend->dense;
    size_t row = ((page.slot * geometry->layers + layer) * geometry->kv_heads + head) * 2 + value;

    return pool + row * geometry->policy.page_tokens;
}

size_t fake_token(const struct backend *backend, struct page page, size_t t)
{
    size_t id = (size_t)numbers(backend, page, 0, 0, false)[t] / 128;

    for (size_t layer = 0; layer < backend->geometry->layers; layer++) {
        for (size_t head = 0; head < backend->geometry->kv_heads; head++) {
            for (int value = 0; value < 2; value++) {
                if (numbers(backend, page, layer, head, value)[t] !=
                    fake_number(id, layer, head, value))
                    return SIZE_MAX;
            }
        }
    }
    return id;
}

static void violate(struct backend *backend, const char *what, size_t item, size_t page)
{
    if (backend->violation[0] == '\0')
        snprintf(backend->violation, sizeof backend->violation, "item %zu, page %zu: %s", item,
                 page, what);
}

static void fake_close(struct backend *backend)
{
    memory_release(backend->memory, backend->dense);
    memory_release(backend->memory, backend->factor);
    memory_release(backend->memory, backend);
}

static size_t slot_floats(const struct geometry *geometry)
{
    return geometry->layers * geometry->kv_heads * 2 * geometry->policy.page_tokens;
}

static pkv_status fake_open(const struct geometry *geometry, const struct capacity *capacity,
                            const struct placement *placement, struct memory *memory,
                            struct message *message, struct backend **result)
{
    const size_t dense_slots = capacity->dense_slots;
    const size_t factor_slots = capacity->factor_slots;
    const char *isa = placement->isa;

    if (isa != NULL && strcmp(isa, "generic") != 0)
        return fail(message, PKV_ERROR_UNSUPPORTED, "isa: \"%.32s\" is not supported", isa);

    if ((geometry->factors_k == PKV_FACTORS_INT4 || geometry->factors_v == PKV_FACTORS_INT4) &&
        geometry->head_dim < geometry->policy.page_tokens)
        return fail(message, PKV_ERROR_UNSUPPORTED, "factors: as INT4 with too few columns");

    struct backend *backend = memory_allocate(memory, 1, sizeof *backend);

    if (backend == NULL)
        return fail(message, PKV_ERROR_MEMORY, "backend: out of memory");
    *backend = (struct backend){.geometry = geometry,
                                .memory = memory,
                                .message = message,
                                .dense_slots = dense_slots,
                                .factor_slots = factor_slots};
    backend->dense = memory_allocate(memory, dense_slots * slot_floats(geometry), sizeof(float));
    backend->factor = memory_allocate(memory, factor_slots * slot_floats(geometry), sizeof(float));
    if (backend->dense == NULL || backend->factor == NULL) {
        fake_close(backend);
        return fail(message, PKV_ERROR_MEMORY, "backend: out of memory");
    }
    memset(backend->dense, 0, dense_slots * slot_floats(geometry) * sizeof(float));
    memset(backend->factor, 0, factor_slots * slot_floats(geometry) * sizeof(float));
    *result = backend;
    return PKV_OK;
}

static const char *fake_isa(const struct backend *backend)
{
    (void)backend;
    return "generic";
}

static size_t fake_reserved_bytes(const struct backend *backend)
{
    return (backend->dense_slots + backend->factor_slots) * slot_floats(backend->geometry) *
           sizeof(float);
}

/* How often the tables of the step hold a page. */
static size_t count_in_tables(const struct backend_plan *plan, const struct page_policy *policy,
                              struct page page)
{
    size_t n = 0;

    for (size_t i = 0; i < plan->n_items; i++) {
        for (size_t p = 0; p < pages_count(policy, plan->items[i].tokens); p++)
            n += plan->items[i].table[p].kind == page.kind &&
                 plan->items[i].table[p].slot == page.slot;
    }
    return n;
}

static size_t count_in_changes(const struct backend_plan *plan, struct page page)
{
    size_t n = 0;

    for (size_t i = 0; i < plan->n_items; i++) {
        for (size_t j = 0; j < plan->items[i].n_changes; j++)
            n += plan->items[i].changes[j].to.kind == page.kind &&
                 plan->items[i].changes[j].to.slot == page.slot;
    }
    return n;
}

static void check_change(struct backend *backend, const struct backend_plan *plan, size_t i,
                         const struct page_change *change)
{
    const struct page_policy *policy = &backend->geometry->policy;
    const struct backend_item *item = &plan->items[i];
    size_t slots = change->to.kind == SLOT_FACTOR ? backend->factor_slots : backend->dense_slots;
    bool exists = change->page < pages_count(policy, item->tokens);
    bool in_place = change->to.kind == change->from.kind && change->to.slot == change->from.slot;

    if (change->to.kind != SLOT_DENSE && change->to.kind != SLOT_FACTOR)
        violate(backend, "to nothing", i, change->page);
    if (change->to.slot >= slots)
        violate(backend, "to a slot that is not there", i, change->page);
    if (exists ? change->from.kind != item->table[change->page].kind ||
                     change->from.slot != item->table[change->page].slot
               : change->from.kind != SLOT_NONE)
        violate(backend, "not from what the table holds", i, change->page);
    if (change->from.kind == SLOT_FACTOR)
        violate(backend, "from factors", i, change->page);
    if (change->cached_tokens != pages_tokens(policy, item->tokens, change->page))
        violate(backend, "wrong cached tokens", i, change->page);
    if (change->first_new + change->new_tokens > item->new_tokens)
        violate(backend, "more rows than there are", i, change->page);
    if (change->to.kind == SLOT_FACTOR &&
        change->cached_tokens + change->new_tokens != policy->page_tokens)
        violate(backend, "an incomplete page is factorized", i, change->page);
    if (count_in_changes(plan, change->to) != 1)
        violate(backend, "a slot is written twice", i, change->page);
    if (count_in_tables(plan, policy, change->to) != (in_place ? 1 : 0))
        violate(backend, "a slot in use is written", i, change->page);
}

static pkv_status fake_step_begin(struct backend *backend, const struct backend_plan *plan)
{
    size_t rows = 0;

    if (backend->plan != NULL)
        violate(backend, "the last step was not closed", 0, 0);
    for (size_t i = 0; i < plan->n_items; i++) {
        if (plan->items[i].first_row != rows || plan->items[i].new_tokens == 0)
            violate(backend, "wrong rows", i, 0);
        rows += plan->items[i].new_tokens;
        for (size_t j = 0; j < plan->items[i].n_changes; j++) {
            if (j > 0 && plan->items[i].changes[j].page <= plan->items[i].changes[j - 1].page)
                violate(backend, "changes do not ascend", i, plan->items[i].changes[j].page);
            check_change(backend, plan, i, &plan->items[i].changes[j]);
        }
    }
    if (rows != plan->rows)
        violate(backend, "wrong sum of rows", 0, 0);

    if (backend->fail_begin != PKV_OK)
        return fail(backend->message, backend->fail_begin, "backend: failed on demand");
    for (int i = 0; i < 2; i++) {
        backend->scratch[i] = memory_allocate(backend->memory, plan->rows, 64);
        if (backend->scratch[i] == NULL) {
            if (i == 1)
                memory_release(backend->memory, backend->scratch[0]);
            return fail(backend->message, PKV_ERROR_MEMORY, "backend: out of memory");
        }
    }
    backend->plan = plan;
    return PKV_OK;
}

static float row_number(const pkv_input *input, size_t row, size_t head)
{
    return ((const float *)input->data)[row * input->token_stride + head * input->head_stride];
}

static pkv_status check_rows(struct backend *backend, size_t layer, const pkv_input *input,
                             const char *name)
{
    const struct geometry *geometry = backend->geometry;
    const struct backend_plan *plan = backend->plan;

    for (size_t i = 0; i < plan->n_items; i++) {
        for (size_t t = 0; t < plan->items[i].new_tokens; t++) {
            for (size_t head = 0; head < geometry->kv_heads; head++) {
                size_t row = plan->items[i].first_row + t;
                size_t page = (plan->items[i].tokens + t) / geometry->policy.page_tokens;
                const float *data = (const float *)input->data + row * input->token_stride +
                                    head * input->head_stride;

                for (size_t j = 0; j < geometry->head_dim; j++) {
                    if (!isfinite(data[j]))
                        return fail(backend->message, PKV_ERROR_VALUE,
                                    "layer %zu, KV head %zu, page %zu: %s is not finite", layer,
                                    head, page, name);
                    if (data[j] != data[0])
                        violate(backend, "elements of a row differ", i, page);
                }
            }
        }
    }
    return PKV_OK;
}

static void attend(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct geometry *geometry = backend->geometry;
    const struct page_policy *policy = &geometry->policy;
    size_t group = geometry->query_heads / geometry->kv_heads;

    for (size_t i = 0; i < backend->plan->n_items; i++) {
        const struct backend_item *item = &backend->plan->items[i];

        for (size_t h = 0; h < geometry->query_heads; h++) {
            uint32_t sum = 0;

            for (size_t p = 0; p < pages_count(policy, item->tokens); p++) {
                for (size_t t = 0; t < pages_tokens(policy, item->tokens, p); t++) {
                    sum =
                        fake_mix(sum, numbers(backend, item->table[p], layer, h / group, false)[t]);
                    sum =
                        fake_mix(sum, numbers(backend, item->table[p], layer, h / group, true)[t]);
                }
            }
            for (size_t t = 0; t < item->new_tokens; t++) {
                size_t row = item->first_row + t;
                float *out =
                    (float *)io->out.data + row * io->out.token_stride + h * io->out.head_stride;

                sum = fake_mix(sum, row_number(&io->k, row, h / group));
                sum = fake_mix(sum, row_number(&io->v, row, h / group));
                for (size_t j = 0; j < geometry->head_dim; j++)
                    out[j] = (float)sum;
                if (io->lse)
                    io->lse[row * geometry->query_heads + h] = (float)(item->tokens + t + 1);
            }
        }
    }
}

static void store(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    for (size_t i = 0; i < backend->plan->n_items; i++) {
        const struct backend_item *item = &backend->plan->items[i];

        for (size_t j = 0; j < item->n_changes; j++) {
            const struct page_change *change = &item->changes[j];

            for (size_t head = 0; head < backend->geometry->kv_heads; head++) {
                for (int value = 0; value < 2; value++) {
                    float *to = numbers(backend, change->to, layer, head, value);

                    if (change->cached_tokens > 0)
                        memmove(to, numbers(backend, change->from, layer, head, value),
                                change->cached_tokens * sizeof *to);
                    for (size_t t = 0; t < change->new_tokens; t++)
                        to[change->cached_tokens + t] = row_number(
                            value ? &io->v : &io->k, item->first_row + change->first_new + t, head);
                }
            }
        }
    }
}

static pkv_status fake_step_layer(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    pkv_status status = check_rows(backend, layer, &io->k, "K");

    if (status == PKV_OK)
        status = check_rows(backend, layer, &io->v, "V");
    if (status != PKV_OK)
        return status;
    if (io->out.data)
        attend(backend, layer, io);
    store(backend, layer, io);
    if (backend->fail_layer != PKV_OK && layer == backend->failing_layer)
        return fail(backend->message, backend->fail_layer, "backend: failed on demand");
    return PKV_OK;
}

static void fake_step_close(struct backend *backend)
{
    if (backend->plan == NULL)
        violate(backend, "closed without a step", 0, 0);
    backend->plan = NULL;
    for (int i = 0; i < 2; i++)
        memory_release(backend->memory, backend->scratch[i]);
}

/* Any numbers that follow from the plan. */
static pkv_status fake_step_end(struct backend *backend, struct step_report *report)
{
    if (backend->fail_end != PKV_OK)
        return fail(backend->message, backend->fail_end, "backend: failed on demand");
    for (size_t i = 0; i < backend->plan->n_items; i++)
        for (size_t j = 0; j < backend->plan->items[i].n_changes; j++)
            report->factorize_seconds += backend->plan->items[i].changes[j].to.kind == SLOT_FACTOR;
    report->capped_pages = 3 * (uint64_t)report->factorize_seconds;
    return PKV_OK;
}

static pkv_status fake_step_replay(struct backend *backend)
{
    return fail(backend->message, PKV_ERROR_ARGUMENT, "backend: there is no graph");
}

static pkv_status fake_step_submit(struct backend *backend)
{
    if (backend->n_submitted == MAX_SUBMITTED)
        violate(backend, "too many steps are submitted", 0, 0);
    if (backend->fail_end != PKV_OK)
        return fail(backend->message, backend->fail_end, "backend: failed on demand");
    backend->submitted[backend->n_submitted++] = backend->fail_submitted;
    backend->fail_submitted = PKV_OK;
    fake_step_close(backend);
    return PKV_OK;
}

static pkv_status fake_step_settle(struct backend *backend, bool wait, bool *done,
                                   struct step_report *report)
{
    pkv_status status = backend->submitted[0];

    if (backend->n_submitted == 0)
        violate(backend, "nothing to settle", 0, 0);
    *done = wait || !backend->slow;
    if (!*done)
        return PKV_OK;
    backend->n_submitted--;
    memmove(backend->submitted, backend->submitted + 1, backend->n_submitted * sizeof status);
    if (status != PKV_OK)
        return fail(backend->message, status, "backend: failed on demand");
    report->capped_pages = 1;
    return PKV_OK;
}

static pkv_status fake_rebuild(struct backend *backend, uint32_t factor_slot, uint32_t dense_slot)
{
    size_t n = slot_floats(backend->geometry);

    if (factor_slot >= backend->factor_slots || dense_slot >= backend->dense_slots)
        violate(backend, "a slot that is not there is rebuilt", 0, 0);
    if (backend->fail_rebuild != PKV_OK)
        return fail(backend->message, backend->fail_rebuild, "backend: failed on demand");
    memcpy(backend->dense + dense_slot * n, backend->factor + factor_slot * n, n * sizeof(float));
    return PKV_OK;
}

/* Factors as codes: a token's id is in L's first code of its row, the upper bits, and in R's scale
 * of its column. */
#define SCALE_BITS 14

/* Where scale i lies in the part. */
static size_t scale_at(const struct part_form *form, size_t i)
{
    return form->rows * form->columns / 2 + i * sizeof(uint16_t);
}

static void read_codes(const struct part_form *form, bool left, size_t tokens, const float *from,
                       unsigned char *part)
{
    memset(part, 0, parts_bytes(form, sizeof *from));
    for (size_t t = 0; t < tokens; t++) {
        size_t id = (size_t)from[t] / 128, element = t * form->columns;
        uint16_t scale = (uint16_t)(id & (((size_t)1 << SCALE_BITS) - 1));

        if (left)
            part[element / 2] |= (unsigned char)(id >> SCALE_BITS << 4 * (element % 2));
        else
            memcpy(part + scale_at(form, t), &scale, sizeof scale);
    }
}

/* Into numbers that are the token's of the other part. */
static void write_codes(const struct part_form *form, bool left, size_t tokens, size_t layer,
                        size_t kv_head, bool value, const unsigned char *part, float *to)
{
    for (size_t t = 0; t < tokens; t++) {
        size_t id = (size_t)to[t] / 128, element = t * form->columns;
        size_t low = id & (((size_t)1 << SCALE_BITS) - 1), high = id >> SCALE_BITS;
        uint16_t scale;

        if (left) {
            high = part[element / 2] >> 4 * (element % 2) & 15;
        } else {
            memcpy(&scale, part + scale_at(form, t), sizeof scale);
            low = scale;
        }
        to[t] = fake_number(high << SCALE_BITS | low, layer, kv_head, value);
    }
}

static pkv_status fake_read(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                            size_t tokens, enum page_part part, void *out)
{
    const struct geometry *geometry = backend->geometry;
    bool value = part == PART_V || part == PART_V_LEFT || part == PART_V_RIGHT;
    pkv_factors factors = value ? geometry->factors_v : geometry->factors_k;
    const float *from = numbers(backend, page, layer, kv_head, value);
    size_t dim = geometry->head_dim;
    size_t rank = value ? geometry->rank_v[layer] : geometry->rank_k[layer];
    float *to = out;

    if ((page.kind == SLOT_FACTOR) != (part != PART_K && part != PART_V))
        violate(backend, "a part is read that is not there", 0, 0);
    if (factors == PKV_FACTORS_INT4 && part != PART_K && part != PART_V) {
        struct part_form form = parts_form(part, factors, tokens, dim, rank);

        read_codes(&form, part == PART_K_LEFT || part == PART_V_LEFT, tokens, from, out);
    } else if (part == PART_K || part == PART_V) {
        for (size_t i = 0; i < tokens * dim; i++)
            to[i] = from[i / dim];
    } else if (part == PART_K_LEFT || part == PART_V_LEFT) {
        for (size_t i = 0; i < tokens * rank; i++)
            to[i] = i % rank == 0 ? from[i / rank] : 0;
    } else {
        for (size_t i = 0; i < rank * dim; i++)
            to[i] = i < dim ? 1 : 0;
    }
    return PKV_OK;
}

/* Keeps of factors what fake_read() makes them of. */
static pkv_status fake_write(struct backend *backend, struct page page, size_t layer,
                             size_t kv_head, size_t tokens, enum page_part part, const void *in)
{
    const struct geometry *geometry = backend->geometry;
    bool value = part == PART_V || part == PART_V_LEFT || part == PART_V_RIGHT;
    bool dense = part == PART_K || part == PART_V;
    bool left = part == PART_K_LEFT || part == PART_V_LEFT;
    pkv_factors factors = value ? geometry->factors_v : geometry->factors_k;
    size_t rank = value ? geometry->rank_v[layer] : geometry->rank_k[layer];
    struct part_form form = parts_form(part, factors, tokens, geometry->head_dim, rank);
    float *to = numbers(backend, page, layer, kv_head, value);

    if ((page.kind == SLOT_FACTOR) == dense)
        violate(backend, "a part is written that is not there", 0, 0);
    if (page.slot >= (dense ? backend->dense_slots : backend->factor_slots))
        violate(backend, "a slot that is not there is written", 0, 0);
    if (form.coded)
        write_codes(&form, left, tokens, layer, kv_head, value, in, to);
    else if (dense || left)
        for (size_t t = 0; t < tokens; t++)
            to[t] = ((const float *)in)[t * form.columns];
    return PKV_OK;
}

const struct backend_ops backend_fake = {
    .name = "fake",
    .open = fake_open,
    .close = fake_close,
    .isa = fake_isa,
    .reserved_bytes = fake_reserved_bytes,
    .step_begin = fake_step_begin,
    .step_layer = fake_step_layer,
    .step_end = fake_step_end,
    .step_close = fake_step_close,
    .step_replay = fake_step_replay,
    .step_submit = fake_step_submit,
    .step_settle = fake_step_settle,
    .rebuild = fake_rebuild,
    .read = fake_read,
    .write = fake_write,
};
