/* SPDX-License-Identifier: MIT */
/* The CPU backend's operations. */
#include "attention.h"
#include "codec.h"
#include "dispatch.h"
#include "factorize.h"
#include "store.h"

static const struct codec *const codecs[] = {
    [PKV_FACTORS_NONE] = NULL,
    [PKV_FACTORS_NATIVE] = &codec_native,
    [PKV_FACTORS_INT4] = &codec_int4,
};

static void close_backend(struct backend *backend)
{
    store_close(backend);
    memory_release(backend->memory, backend);
}

static pkv_status open_backend(const struct geometry *geometry, const struct capacity *capacity,
                               const struct placement *placement, struct memory *memory,
                               struct message *message, struct backend **opened)
{
    const struct kernels *kernels;
    struct backend *backend;
    pkv_status status = dispatch_choose(placement->isa, &kernels, message);

    *opened = NULL;
    if (status != PKV_OK)
        return status;
    if (geometry->solver == PKV_SOLVER_CUSOLVER)
        return fail(message, PKV_ERROR_UNSUPPORTED,
                    "solver: the CPU backend has no PKV_SOLVER_CUSOLVER");
    backend = memory_allocate(memory, 1, sizeof *backend);
    if (!backend)
        return fail(message, PKV_ERROR_MEMORY, "cannot allocate the CPU backend");
    *backend = (struct backend){
        .geometry = geometry,
        .memory = memory,
        .message = message,
        .kernels = kernels,
        .solver = dispatch_solver(kernels),
        .codec_k = codecs[geometry->factors_k],
        .codec_v = codecs[geometry->factors_v],
        .threads = placement->threads,
        .dense_slots = capacity->dense_slots,
        .factor_slots = capacity->factor_slots,
    };
    status = store_open(backend);
    if (status != PKV_OK) {
        close_backend(backend);
        return status;
    }
    *opened = backend;
    return PKV_OK;
}

static const char *isa_name(const struct backend *backend)
{
    return backend->kernels->name;
}

static size_t reserved_bytes(const struct backend *backend)
{
    return backend->reserved_bytes;
}

static void step_close(struct backend *backend)
{
    memory_release(backend->memory, backend->step.scratch);
    factorize_step_close(backend);
    attention_step_close(backend);
    store_step_close(backend);
    backend->step = (struct cpu_step){0};
}

/* Each thread's part of it is on its own cache lines. */
static pkv_status allocate_scratch(struct backend *backend)
{
    struct cpu_step *step = &backend->step;
    size_t bytes;

    step->scratch_bytes = (step->layout.floats * sizeof(float) + 63) / 64 * 64;
    bytes = cpu_max(step->threads * step->scratch_bytes,
                    step->factorize_threads * step->factorize_bytes);
    step->scratch = memory_allocate(backend->memory, bytes, 1);
    if (!step->scratch)
        return fail(backend->message, PKV_ERROR_MEMORY,
                    "cannot allocate %zu bytes of scratch for %u threads", bytes, step->threads);
    return PKV_OK;
}

static pkv_status step_begin(struct backend *backend, const struct backend_plan *plan)
{
    pkv_status status;

    backend->step = (struct cpu_step){.plan = *plan, .threads = cpu_threads(backend->threads)};
    status = store_step_begin(backend);
    if (status == PKV_OK)
        status = attention_step_begin(backend);
    if (status == PKV_OK)
        status = factorize_step_begin(backend);
    if (status == PKV_OK)
        status = allocate_scratch(backend);
    if (status != PKV_OK)
        step_close(backend);
    return status;
}

/* Attention comes before anything is stored, though it would not read what is. */
static pkv_status step_layer(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    pkv_status status = store_round(backend, layer, io);

    if (status != PKV_OK)
        return status;
    if (io->out.data)
        attention_run(backend, layer, io);
    store_append(backend, layer);
    return factorize_run(backend, layer);
}

static pkv_status step_end(struct backend *backend, struct step_report *report)
{
    report->factorize_seconds = backend->step.factorize_seconds;
    report->capped_pages = backend->step.capped_pages;
    return PKV_OK;
}

static pkv_status rebuild(struct backend *backend, uint32_t factor_slot, uint32_t dense_slot)
{
    store_rebuild(backend, factor_slot, dense_slot);
    return PKV_OK;
}

static pkv_status read_part(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                            size_t tokens, enum page_part part, void *out)
{
    store_read(backend, page, layer, kv_head, tokens, part, out);
    return PKV_OK;
}

static pkv_status write_part(struct backend *backend, struct page page, size_t layer,
                             size_t kv_head, size_t tokens, enum page_part part, const void *in)
{
    store_write(backend, page, layer, kv_head, tokens, part, in);
    return PKV_OK;
}

const struct backend_ops backend_cpu = {
    .name = "cpu",
    .open = open_backend,
    .close = close_backend,
    .isa = isa_name,
    .reserved_bytes = reserved_bytes,
    .step_begin = step_begin,
    .step_layer = step_layer,
    .step_end = step_end,
    .step_close = step_close,
    .rebuild = rebuild,
    .read = read_part,
    .write = write_part,
};
