/* SPDX-License-Identifier: MIT */
/* The CUDA backend's operations. */
#include "attention.h"
#include "decode.h"
#include "factorize.h"
#include "store.h"

#include <stdio.h>

/* ---- Calls of the runtime ---- */

pkv_status gpu_check(struct backend *backend, cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return PKV_OK;
    cudaGetLastError(); /* or it would be the next call's */
    return fail(backend->message,
                error == cudaErrorMemoryAllocation ? PKV_ERROR_MEMORY : PKV_ERROR_DEVICE,
                "CUDA device %d: %s: %s", backend->device, what, cudaGetErrorString(error));
}

static void hold(struct backend *backend, size_t bytes)
{
    backend->held_bytes += bytes;
    memory_hold(backend->memory, bytes);
}

static void drop(struct backend *backend, size_t bytes)
{
    backend->held_bytes -= bytes;
    memory_drop(backend->memory, bytes);
}

static pkv_status allocated(struct backend *backend, cudaError_t error, size_t bytes,
                            const char *what, void **pointer)
{
    size_t available = 0, all = 0;

    if (error == cudaSuccess) {
        hold(backend, bytes);
        return PKV_OK;
    }
    *pointer = NULL;
    if (error != cudaErrorMemoryAllocation)
        return gpu_check(backend, error, what);
    cudaGetLastError();
    cudaMemGetInfo(&available, &all);
    return fail(backend->message, PKV_ERROR_MEMORY,
                "CUDA device %d: out of memory: %s: %zu bytes; %zu of %zu are free",
                backend->device, what, bytes, available, all);
}

pkv_status gpu_allocate(struct backend *backend, size_t bytes, const char *what, void **pointer)
{
    return allocated(backend, cudaMalloc(pointer, bytes ? bytes : 1), bytes, what, pointer);
}

void gpu_release(struct backend *backend, size_t bytes, void *pointer)
{
    if (!pointer)
        return;
    cudaFree(pointer);
    drop(backend, bytes);
}

pkv_status gpu_allocate_in_stream(struct backend *backend, size_t bytes, const char *what,
                                  void **pointer)
{
    return allocated(backend, cudaMallocAsync(pointer, bytes ? bytes : 1, backend->stream), bytes,
                     what, pointer);
}

void gpu_release_in_stream(struct backend *backend, size_t bytes, void *pointer)
{
    if (!pointer)
        return;
    cudaFreeAsync(pointer, backend->stream);
    drop(backend, bytes);
}

pkv_status gpu_allocate_pinned(struct backend *backend, size_t bytes, void **pointer)
{
    pkv_status status = gpu_check(backend, cudaMallocHost(pointer, bytes ? bytes : 1),
                                  "cannot allocate pinned memory");

    if (status == PKV_OK)
        hold(backend, bytes);
    else
        *pointer = NULL;
    return status;
}

void gpu_release_pinned(struct backend *backend, size_t bytes, void *pointer)
{
    if (!pointer)
        return;
    cudaFreeHost(pointer);
    drop(backend, bytes);
}

/* Scratch and plans stay, but count while a step is open alone, whose they are. */
static void count_scratch(struct backend *backend, bool open)
{
    (open ? memory_hold : memory_drop)(backend->memory,
                                       backend->held_bytes - backend->reserved_bytes);
}

struct caller {
    int device;
    enum cudaStreamCaptureMode mode;
};

/* Every operation works on the cache's device and leaves the caller's current one as it was. What
 * has failed before, on another device perhaps, is no failure of its launches; nor is a graph that
 * another thread captures of anything else a reason why an event cannot be waited for. */
static struct caller enter(const struct backend *backend)
{
    struct caller caller = {0, cudaStreamCaptureModeRelaxed};

    cudaGetDevice(&caller.device);
    if (caller.device != backend->device)
        cudaSetDevice(backend->device);
    cudaThreadExchangeStreamCaptureMode(&caller.mode);
    cudaGetLastError();
    return caller;
}

static void leave(const struct backend *backend, struct caller caller)
{
    cudaThreadExchangeStreamCaptureMode(&caller.mode);
    if (caller.device != backend->device)
        cudaSetDevice(caller.device);
}

/* ---- Opening ---- */

static void close_here(struct backend *backend)
{
    if (backend->stream)
        cudaStreamSynchronize(backend->stream);
    gpu_release(backend, backend->scratch_bytes, backend->scratch);
    attention_close(backend);
    factorize_close(backend);
    store_close(backend);
    if (backend->own_stream)
        cudaStreamDestroy(backend->stream);
}

static void close_backend(struct backend *backend)
{
    struct caller caller = enter(backend);

    count_scratch(backend, true);
    close_here(backend);
    leave(backend, caller);
    memory_release(backend->memory, backend);
}

/* No device, no driver, or one that cannot be used: all but failures of what ran before. */
static bool is_absent(cudaError_t error)
{
    switch (error) {
    case cudaErrorInitializationError:
    case cudaErrorStubLibrary:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorUnknown:
        return true;
    default:
        return false;
    }
}

static pkv_status check_device(struct backend *backend)
{
    struct message *message = backend->message;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);

    if (error == cudaSuccess && count == 0)
        error = cudaErrorNoDevice;
    if (is_absent(error)) {
        cudaGetLastError();
        return fail(message, PKV_ERROR_UNSUPPORTED, "backend: no CUDA device: %s",
                    cudaGetErrorString(error));
    }
    if (error != cudaSuccess)
        return gpu_check(backend, error, "cannot count devices");
    if (backend->device < 0 || backend->device >= count)
        return fail(message, PKV_ERROR_ARGUMENT, "device: %d is not one of the %d CUDA devices",
                    backend->device, count);
    return PKV_OK;
}

static pkv_status open_stream(struct backend *backend, void *stream)
{
    cudaError_t error;
    int device;
    pkv_status status;

    if (stream == NULL) {
        backend->own_stream = true;
        status =
            gpu_check(backend, cudaStreamCreateWithFlags(&backend->stream, cudaStreamNonBlocking),
                      "cannot create a stream");
        backend->own_stream = status == PKV_OK;
        return status;
    }
    error = cudaStreamGetDevice((cudaStream_t)stream, &device);
    if (error == cudaErrorCallRequiresNewerDriver) { /* than 12.8's: it cannot be told */
        cudaGetLastError();
        device = backend->device;
        error = cudaSuccess;
    }
    status = gpu_check(backend, error, "stream");
    if (status == PKV_OK && device != backend->device)
        return fail(backend->message, PKV_ERROR_ARGUMENT,
                    "stream: it is of CUDA device %d, the cache of device %d", device,
                    backend->device);
    backend->stream = (cudaStream_t)stream;
    return status;
}

/* Older devices than the module was built for are found now, not by the first step. */
static pkv_status check_kernels(struct backend *backend)
{
    cudaError_t error = store_find_kernel();

    switch (error) {
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilationDisabled:
        cudaGetLastError();
        return fail(backend->message, PKV_ERROR_UNSUPPORTED,
                    "backend: CUDA device %d is of %s, for which the module was not built: %s",
                    backend->device, backend->isa, cudaGetErrorString(error));
    default:
        return gpu_check(backend, error, "no kernels");
    }
}

static pkv_status open_here(struct backend *backend, const struct placement *placement)
{
    struct cudaDeviceProp properties;
    pkv_status status =
        gpu_check(backend, cudaGetDeviceProperties(&properties, backend->device), "no properties");

    if (status == PKV_OK) {
        snprintf(backend->isa, sizeof backend->isa, "sm_%d%d", properties.major, properties.minor);
        if (placement->isa && strcmp(placement->isa, backend->isa) != 0)
            return fail(backend->message, PKV_ERROR_UNSUPPORTED,
                        "isa: \"%.32s\" is not that of CUDA device %d, \"%s\"", placement->isa,
                        backend->device, backend->isa);
        status = check_kernels(backend);
    }
    if (status == PKV_OK)
        status = open_stream(backend, placement->stream);
    if (status == PKV_OK)
        status = store_open(backend);
    if (status == PKV_OK)
        status = factorize_open(backend);
    if (status == PKV_OK)
        status = attention_open(backend);
    if (status == PKV_OK)
        status =
            gpu_allocate(backend, backend->scratch_bytes, "scratch", (void **)&backend->scratch);
    return status;
}

static pkv_status open_backend(const struct geometry *geometry, const struct capacity *capacity,
                               const struct placement *placement, struct memory *memory,
                               struct message *message, struct backend **opened)
{
    struct backend *backend;
    struct caller caller;
    pkv_status status;

    *opened = NULL;
    if (geometry->solver == PKV_SOLVER_LAPACK)
        return fail(message, PKV_ERROR_UNSUPPORTED,
                    "solver: the CUDA backend has no PKV_SOLVER_LAPACK");
    backend = (struct backend *)memory_allocate(memory, 1, sizeof *backend);
    if (!backend)
        return fail(message, PKV_ERROR_MEMORY, "cannot allocate the CUDA backend");
    memset(backend, 0, sizeof *backend);
    backend->geometry = geometry;
    backend->capacity = *capacity;
    backend->memory = memory;
    backend->message = message;
    backend->device = placement->device;
    status = check_device(backend);
    if (status == PKV_OK) {
        caller = enter(backend);
        status = open_here(backend, placement);
        if (status != PKV_OK)
            close_here(backend);
        leave(backend, caller);
    }
    if (status != PKV_OK) {
        memory_release(memory, backend);
        return status;
    }
    count_scratch(backend, false);
    *opened = backend;
    return PKV_OK;
}

static const char *isa_name(const struct backend *backend)
{
    return backend->isa;
}

static size_t reserved_bytes(const struct backend *backend)
{
    return backend->reserved_bytes;
}

/* ---- Steps ---- */

/* What is queued while the stream is captured comes with every launch of the graph: only layers
 * may be. */
static pkv_status check_capture(struct backend *backend, bool *capturing)
{
    enum cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
    pkv_status status =
        gpu_check(backend, cudaStreamIsCapturing(backend->stream, &state), "the stream failed");

    *capturing = state != cudaStreamCaptureStatusNone;
    return status;
}

static pkv_status refuse_capture(struct backend *backend)
{
    bool capturing;
    pkv_status status = check_capture(backend, &capturing);

    if (status == PKV_OK && capturing)
        status = fail(backend->message, PKV_ERROR_ARGUMENT,
                      "stream: it is being captured; only layers can be");
    return status;
}

/* What is queued goes on. */
static void forget_step(struct backend *backend)
{
    count_scratch(backend, false);
    memset(&backend->step, 0, sizeof backend->step);
}

static pkv_status step_begin(struct backend *backend, const struct backend_plan *plan)
{
    struct caller caller = enter(backend);
    pkv_status status = refuse_capture(backend);

    backend->step.plan = *plan;
    count_scratch(backend, true);
    if (status == PKV_OK)
        status = store_step_begin(backend);
    if (status == PKV_OK)
        status = factorize_step_begin(backend);
    if (status != PKV_OK)
        forget_step(backend);
    leave(backend, caller);
    return status;
}

/* The first fault of `n` layers from `first` on in a report. */
static pkv_status check_faults(struct backend *backend, const struct backend_plan *plan,
                               const struct layer_faults *faults, size_t first, size_t n)
{
    pkv_status status = PKV_OK;

    for (size_t layer = first; layer < first + n && status == PKV_OK; layer++) {
        if (faults[layer].value != NO_FAULT)
            status = store_fault(backend, plan, layer, faults[layer].value);
        else if (faults[layer].factor != NO_FAULT)
            status = factorize_fault(backend, plan, layer, faults[layer].factor);
    }
    return status;
}

/* Of all layers; and that there were all of them. */
static pkv_status check_report(struct backend *backend, const struct flight *flight,
                               const struct backend_plan *plan, struct step_report *report)
{
    const size_t layers = backend->geometry->layers;
    const struct device_report *device = gpu_report(backend, flight->faults);
    pkv_status status = check_faults(backend, plan, flight->faults, 0, layers);

    if (status == PKV_OK && device->layers != layers)
        status = fail(backend->message, PKV_ERROR_ARGUMENT,
                      "step: %llu of %zu layers were computed; a graph of %zu items was to do it",
                      device->layers, layers, plan->n_items);
    report->capped_pages = device->capped_pages;
    return status;
}

static pkv_status wait_for_report(struct backend *backend)
{
    pkv_status status = store_fetch_report(backend);

    if (status == PKV_OK)
        status = gpu_check(backend, cudaStreamSynchronize(backend->stream), "the step failed");
    return status;
}

static pkv_status layer_here(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    struct gpu_step *step = &backend->step;
    pkv_status status = check_capture(backend, &step->capturing);

    if (status == PKV_OK && step->capturing && step->plan.rows != step->plan.n_items)
        status = fail(backend->message, PKV_ERROR_ARGUMENT,
                      "stream: it is being captured; only steps of one token an item can be");
    if (status == PKV_OK && io->out.data)
        status = attention_run(backend, layer, io);
    if (status == PKV_OK)
        status = store_run(backend, layer, io);
    if (status == PKV_OK)
        status = factorize_run(backend, layer, io);
    if (status == PKV_OK && step->capturing)
        backend->captured = true;
    /* Nobody but the cache can wait for a stream of its own. */
    if (status == PKV_OK && backend->own_stream)
        status = wait_for_report(backend);
    if (status == PKV_OK && backend->own_stream)
        status = check_faults(backend, &step->plan, gpu_flight(backend)->faults, layer, 1);
    return status;
}

static pkv_status step_layer(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    struct caller caller = enter(backend);
    pkv_status status = layer_here(backend, layer, io);

    leave(backend, caller);
    return status;
}

static pkv_status step_replay(struct backend *backend)
{
    if (backend->step.plan.rows != backend->step.plan.n_items)
        return fail(backend->message, PKV_ERROR_ARGUMENT,
                    "step: a graph takes one token an item; there are %zu of %zu items",
                    backend->step.plan.rows, backend->step.plan.n_items);
    if (!backend->captured)
        return fail(backend->message, PKV_ERROR_ARGUMENT,
                    "step: no graph was captured since the plan has its place");
    if (!decode_fits(backend))
        return fail(backend->message, PKV_ERROR_ARGUMENT,
                    "step: its items share pages and have too many together for a graph");
    return PKV_OK;
}

static pkv_status step_end(struct backend *backend, struct step_report *report)
{
    struct caller caller = enter(backend);
    pkv_status status = refuse_capture(backend);

    if (status == PKV_OK)
        status = wait_for_report(backend);
    if (status == PKV_OK)
        status = check_report(backend, gpu_flight(backend), &backend->step.plan, report);
    if (status == PKV_OK)
        report->factorize_seconds = factorize_seconds(backend);
    leave(backend, caller);
    return status;
}

/* After an abort the queue may still read the caller's rows and the plan. */
static void step_close(struct backend *backend)
{
    struct caller caller = enter(backend);

    forget_step(backend);
    cudaStreamSynchronize(backend->stream);
    leave(backend, caller);
}

static pkv_status step_submit(struct backend *backend)
{
    struct caller caller = enter(backend);
    struct flight *flight = gpu_flight(backend);
    pkv_status status = refuse_capture(backend);

    if (status == PKV_OK)
        status = store_fetch_report(backend);
    if (status == PKV_OK)
        status = gpu_check(backend, cudaEventRecord(flight->done, backend->stream),
                           "cannot record an event");
    if (status == PKV_OK) {
        flight->plan = backend->step.plan;
        backend->n_submitted++;
        forget_step(backend);
    }
    leave(backend, caller);
    return status;
}

static pkv_status settle_here(struct backend *backend, bool wait, bool *done,
                              struct step_report *report)
{
    struct flight *flight = &backend->flights[backend->first_flight];
    cudaError_t error = wait ? cudaEventSynchronize(flight->done) : cudaEventQuery(flight->done);
    pkv_status status;

    *done = error != cudaErrorNotReady;
    if (!*done)
        return PKV_OK;
    status = gpu_check(backend, error, "a step failed");
    if (status == PKV_OK)
        status = check_report(backend, flight, &flight->plan, report);
    backend->first_flight = (backend->first_flight + 1) % FLIGHTS;
    backend->n_submitted--;
    return status;
}

static pkv_status step_settle(struct backend *backend, bool wait, bool *done,
                              struct step_report *report)
{
    struct caller caller = enter(backend);
    pkv_status status = settle_here(backend, wait, done, report);

    leave(backend, caller);
    return status;
}

/* ---- Pages ---- */

static pkv_status rebuild(struct backend *backend, uint32_t factor_slot, uint32_t dense_slot)
{
    struct caller caller = enter(backend);
    pkv_status status = store_rebuild(backend, factor_slot, dense_slot);

    leave(backend, caller);
    return status;
}

static pkv_status read_part(struct backend *backend, struct page page, size_t layer, size_t kv_head,
                            size_t tokens, enum page_part part, void *out)
{
    struct caller caller = enter(backend);
    pkv_status status = store_read(backend, page, layer, kv_head, tokens, part, out);

    leave(backend, caller);
    return status;
}

static pkv_status write_part(struct backend *backend, struct page page, size_t layer,
                             size_t kv_head, size_t tokens, enum page_part part, const void *in)
{
    struct caller caller = enter(backend);
    pkv_status status = store_write(backend, page, layer, kv_head, tokens, part, in);

    leave(backend, caller);
    return status;
}

extern "C" const struct backend_ops backend_cuda = {
    .name = BACKEND_NAME,
    .open = open_backend,
    .close = close_backend,
    .isa = isa_name,
    .reserved_bytes = reserved_bytes,
    .step_begin = step_begin,
    .step_layer = step_layer,
    .step_end = step_end,
    .step_close = step_close,
    .step_replay = step_replay,
    .step_submit = step_submit,
    .step_settle = step_settle,
    .rebuild = rebuild,
    .read = read_part,
    .write = write_part,
};

/* Declared first, or C++ would keep it to itself. */
extern "C" MODULE_EXPORT const struct backend_module puzzlekv_module;
extern "C" const struct backend_module puzzlekv_module = {.version = PKV_VERSION,
                                                          .ops = &backend_cuda};
