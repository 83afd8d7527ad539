/* SPDX-License-Identifier: MIT */
/* Device memory, streams, events and graphs. One lock: calls of different threads take turns. */
#include "block.h"

#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#ifdef WITH_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)   ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

/* Address space for device memory; none of it is there but while a queue runs. */
#define ARENA_BYTES ((size_t)8 << 30)
#define ALIGNMENT   ((size_t)256)

#define MAX_SHARED_BYTES     ((size_t)227 << 10)
#define DEFAULT_SHARED_BYTES ((size_t)48 << 10)
#define MAX_PARAMETER_BYTES  ((size_t)4096)

enum operation_kind { KERNEL, COPY, RELEASE };

struct operation {
    std::function<void()> run;
    enum operation_kind kind;
};

struct cuda_host_graph {
    std::vector<struct operation> operations;
};

struct cuda_host_stream {
    int device;
    std::vector<struct operation> queue;
    struct cuda_host_graph *capture; /* not NULL: what is being captured */
    bool global;                     /* in global mode */
    bool invalidated;
};

struct cuda_host_event {
    double seconds;
    cudaStream_t stream; /* it was recorded on */
    size_t pending;
};

#define MAX_DEVICES 4

struct device {
    size_t kernels_left; /* before it fails */
    cudaError_t broken;
};

static std::mutex lock;
static unsigned char *arena;
static unsigned char *view;
static pid_t owner;
static size_t arena_end;                /* of what was ever in use */
static std::map<size_t, size_t> blocks; /* offset to bytes */
static size_t memory_bytes = (size_t)1 << 30;
static size_t memory_used;
static std::map<void *, size_t> pinned;
static std::map<const void *, size_t> allowed_shared;
static unsigned capturing;
static unsigned capturing_globally;
static uint64_t seed;
static bool seeded;
static int n_devices = 1;
static struct device devices[MAX_DEVICES] = {{SIZE_MAX, cudaSuccess},
                                             {SIZE_MAX, cudaSuccess},
                                             {SIZE_MAX, cudaSuccess},
                                             {SIZE_MAX, cudaSuccess}};
static thread_local int current_device;
static thread_local cudaError_t last_error;
static thread_local enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
static cudaError_t counting_error, kernel_error;

static cudaError_t failed(cudaError_t error)
{
    last_error = error;
    return error;
}

/* What every call of a device comes to. */
static cudaError_t state_of(int device)
{
    return devices[device].broken == cudaSuccess ? cudaSuccess : failed(devices[device].broken);
}

static cudaError_t state(void)
{
    return state_of(current_device);
}

/* ---- Memory ---- */

/* Kernels see device memory where it is of no use to anybody else; the runtime has another view of
 * it, as changing what pages allow takes long. */
static void open_arena(void)
{
    if (arena && mprotect(arena, arena_end, PROT_READ | PROT_WRITE) != 0)
        cuda_host_stop("mprotect failed");
}

static void close_arena(void)
{
    if (arena && arena_end > 0 && mprotect(arena, arena_end, PROT_NONE) != 0)
        cuda_host_stop("mprotect failed");
}

/* What is at an address of the arena, for the runtime. */
static void *own_view(const void *pointer)
{
    return view + ((const unsigned char *)pointer - arena);
}

static void *map_arena(int file, int protection)
{
    void *space = mmap(NULL, ARENA_BYTES, protection, MAP_SHARED | MAP_NORESERVE, file, 0);

    if (space == MAP_FAILED)
        cuda_host_stop("no address space for device memory");
    return space;
}

/* A process that has been forked gets memory of its own. */
static void reserve_arena(void)
{
    int file;

    if (arena && owner == getpid())
        return;
    if (arena) {
        munmap(arena, ARENA_BYTES);
        munmap(view, ARENA_BYTES);
    }
    file = memfd_create("cuda_host", 0);
    if (file < 0 || ftruncate(file, (off_t)ARENA_BYTES) != 0)
        cuda_host_stop("no file for device memory");
    arena = (unsigned char *)map_arena(file, PROT_NONE);
    view = (unsigned char *)map_arena(file, PROT_READ | PROT_WRITE);
    arena_end = 0;
    owner = getpid();
    close(file);
}

static bool in_arena(const void *pointer)
{
    return arena && (const unsigned char *)pointer >= arena &&
           (const unsigned char *)pointer < arena + ARENA_BYTES;
}

/* While something is captured the device may not be asked for anything at once. */
static bool refuse_capture(void)
{
    return capturing > 0;
}

/* Nor may events, by a thread to which somebody's capturing matters. */
static bool refuse_events(void)
{
    return capturing_globally > 0 && capture_mode == cudaStreamCaptureModeGlobal;
}

/* Under the lock. */
static cudaError_t allocate(void **pointer, size_t bytes)
{
    size_t at = 0;

    *pointer = NULL;
    if (bytes == 0 || state() != cudaSuccess)
        return state();
    if (bytes > memory_bytes - memory_used || memory_used > memory_bytes)
        return failed(cudaErrorMemoryAllocation);
    if (blocks.empty())
        reserve_arena();
    for (const auto &block : blocks) {
        if (at + bytes <= block.first)
            break;
        /* Blocks do not touch. */
        at = (block.first + block.second + ALIGNMENT) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
    }
    if (at + bytes + ALIGNMENT > ARENA_BYTES)
        return failed(cudaErrorMemoryAllocation);

    size_t end = (at + bytes + ALIGNMENT + 4095) / 4096 * 4096;

    blocks[at] = bytes;
    memory_used += bytes;
    if (end > arena_end) {
        ASAN_POISON_MEMORY_REGION(arena + arena_end, end - arena_end);
        arena_end = end;
    }
    ASAN_UNPOISON_MEMORY_REGION(arena + at, bytes);
    memset(view + at, 0xff, bytes);
    *pointer = arena + at;
    return cudaSuccess;
}

/* Under the lock. */
static void release(void *pointer)
{
    auto block =
        in_arena(pointer) ? blocks.find((size_t)((unsigned char *)pointer - arena)) : blocks.end();

    if (block == blocks.end())
        cuda_host_stop("cudaFree(%p): no such block", pointer);
    memset(own_view(pointer), 0xff, block->second);
    ASAN_POISON_MEMORY_REGION(pointer, block->second);
    memory_used -= block->second;
    blocks.erase(block);
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    std::lock_guard<std::mutex> guard(lock);

    return refuse_capture() ? failed(cudaErrorStreamCaptureUnsupported) : allocate(pointer, bytes);
}

cudaError_t cudaFree(void *pointer)
{
    std::lock_guard<std::mutex> guard(lock);

    if (pointer == NULL)
        return cudaSuccess;
    if (refuse_capture())
        return failed(cudaErrorStreamCaptureUnsupported);
    release(pointer);
    return state();
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    std::lock_guard<std::mutex> guard(lock);

    if (refuse_capture())
        return failed(cudaErrorStreamCaptureUnsupported);
    if (state() != cudaSuccess)
        return state();
    *pointer = malloc(bytes);
    if (*pointer == NULL)
        return failed(cudaErrorMemoryAllocation);
    memset(*pointer, 0xff, bytes);
    pinned[*pointer] = bytes;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer)
{
    std::lock_guard<std::mutex> guard(lock);

    if (pointer == NULL)
        return cudaSuccess;
    if (refuse_capture())
        return failed(cudaErrorStreamCaptureUnsupported);
    if (pinned.erase(pointer) == 0)
        cuda_host_stop("cudaFreeHost(%p): no such block", pointer);
    free(pointer);
    return state();
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *all)
{
    std::lock_guard<std::mutex> guard(lock);

    *all = memory_bytes;
    *available = memory_used < memory_bytes ? memory_bytes - memory_used : 0;
    return state();
}

/* Whether [pointer, pointer + bytes) lies in one block of device memory. */
static bool on_device(const void *pointer, size_t bytes)
{
    if (!in_arena(pointer))
        return false;

    size_t at = (size_t)((const unsigned char *)pointer - arena);
    auto block = blocks.upper_bound(at);

    if (block == blocks.begin())
        return false;
    --block;
    return at - block->first <= block->second && bytes <= block->second - (at - block->first);
}

static bool is_pinned(const void *pointer)
{
    auto block = pinned.upper_bound((void *)(uintptr_t)pointer);

    if (block == pinned.begin())
        return false;
    --block;
    return (const unsigned char *)pointer < (const unsigned char *)block->first + block->second;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    std::lock_guard<std::mutex> guard(lock);

    attributes->device = 0;
    attributes->type = cudaMemoryTypeUnregistered;
    if (on_device(pointer, 1))
        attributes->type = cudaMemoryTypeDevice;
    else if (is_pinned(pointer))
        attributes->type = cudaMemoryTypeHost;
    return cudaSuccess;
}

/* ---- Streams ---- */

/* Under the lock. */
static void enqueue(cudaStream_t stream, std::function<void()> run, enum operation_kind kind)
{
    if (stream == NULL)
        cuda_host_stop("the legacy default stream is used");
    (stream->capture ? stream->capture->operations : stream->queue).push_back(operation{run, kind});
}

/* Under the lock. */
static void run_queue(cudaStream_t stream)
{
    fenv_t modes;
    bool open = false;

    if (stream->queue.empty())
        return;
    /* A device has modes of its own. */
    fegetenv(&modes);
    fesetenv(FE_DFL_ENV);
    for (struct operation &operation : stream->queue) {
        struct device *device = &devices[stream->device];
        const bool kernel = operation.kind == KERNEL;

        if (kernel && device->kernels_left-- == 0)
            device->broken = cudaErrorIllegalAddress;
        if (device->broken != cudaSuccess && operation.kind != RELEASE)
            continue;
        if (kernel && !open)
            open_arena();
        open = open || kernel;
        operation.run();
    }
    stream->queue.clear();
    if (open)
        close_arena();
    fesetenv(&modes);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    if (flags != cudaStreamNonBlocking)
        cuda_host_stop("a stream that waits for the legacy default stream");
    *stream = NULL;
    if (state() != cudaSuccess)
        return state();
    *stream = new cuda_host_stream();
    (*stream)->device = current_device;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);

    run_queue(stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);

    if (stream->capture) {
        stream->invalidated = true;
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    run_queue(stream);
    return state_of(stream->device);
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    *device = stream->device;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);
    const bool to_device = kind != cudaMemcpyDeviceToHost;
    const bool from_device = kind != cudaMemcpyHostToDevice;

    if (bytes == 0)
        return cudaSuccess;
    if (to_device ? !on_device(to, bytes) : in_arena(to))
        cuda_host_stop("cudaMemcpyAsync of %zu bytes to %p, which is elsewhere", bytes, to);
    if (from_device ? !on_device(from, bytes) : in_arena(from))
        cuda_host_stop("cudaMemcpyAsync of %zu bytes from %p, which is elsewhere", bytes, from);
    if (state_of(stream->device) != cudaSuccess)
        return state_of(stream->device);
    if (!from_device && !is_pinned(from)) {
        /* Its owner may change it when the call has returned. */
        const std::vector<unsigned char> copy((const unsigned char *)from,
                                              (const unsigned char *)from + bytes);

        enqueue(
            stream, [=]() { memcpy(own_view(to), copy.data(), bytes); }, COPY);
        return cudaSuccess;
    }
    enqueue(
        stream,
        [=]() {
            memcpy(to_device ? own_view(to) : to, from_device ? own_view(from) : from, bytes);
        },
        COPY);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);

    if (bytes == 0)
        return cudaSuccess;
    if (!on_device(to, bytes))
        cuda_host_stop("cudaMemsetAsync of %zu bytes at %p, which is elsewhere", bytes, to);
    if (state_of(stream->device) != cudaSuccess)
        return state_of(stream->device);
    enqueue(
        stream, [=]() { memset(own_view(to), value, bytes); }, COPY);
    return cudaSuccess;
}

/* There at once; taken back when the queue has come so far. */
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);

    if (stream->capture)
        cuda_host_stop("memory that belongs to a graph");
    return allocate(pointer, bytes);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);

    if (stream->capture)
        cuda_host_stop("memory that belongs to a graph");
    enqueue(
        stream, [=]() { release(pointer); }, RELEASE);
    return state_of(stream->device);
}

void cuda_host_queue(cudaStream_t stream, std::function<void()> run)
{
    std::lock_guard<std::mutex> guard(lock);

    enqueue(stream, run, COPY);
}

void *cuda_host_view(const void *pointer, size_t bytes)
{
    std::lock_guard<std::mutex> guard(lock);

    if (!on_device(pointer, bytes))
        cuda_host_stop("%zu bytes at %p are not on the device", bytes, pointer);
    return own_view(pointer);
}

/* ---- Launches ---- */

cudaError_t cuda_host_allow_shared(const void *kernel, size_t bytes)
{
    std::lock_guard<std::mutex> guard(lock);

    if (bytes > MAX_SHARED_BYTES)
        return failed(cudaErrorInvalidValue);
    allowed_shared[kernel] = bytes;
    return cudaSuccess;
}

static void check_launch(const struct cuda_host_launch &launch)
{
    const dim3 grid = launch.grid, block = launch.block;
    const size_t threads = (size_t)block.x * block.y * block.z;
    auto allowed = allowed_shared.find(launch.kernel);
    size_t shared = allowed == allowed_shared.end() ? DEFAULT_SHARED_BYTES : allowed->second;

    if (threads == 0 || threads > 1024 || block.z > 64)
        cuda_host_stop("%s: %u x %u x %u threads", launch.name, block.x, block.y, block.z);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
        grid.z > 65535)
        cuda_host_stop("%s: %u x %u x %u blocks", launch.name, grid.x, grid.y, grid.z);
    if (launch.shared_bytes > shared)
        cuda_host_stop("%s: %zu bytes of shared memory, %zu are allowed", launch.name,
                       launch.shared_bytes, shared);
    if (launch.parameter_bytes > MAX_PARAMETER_BYTES)
        cuda_host_stop("%s: %zu bytes of parameters", launch.name, launch.parameter_bytes);
}

void cuda_host_enqueue(struct cuda_host_launch launch, cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);

    check_launch(launch);
    if (stream != NULL && state_of(stream->device) != cudaSuccess)
        return;
    enqueue(
        stream,
        [launch]() {
            if (!seeded) {
                const char *value = getenv("PUZZLEKV_TEST_SEED");

                seed = value ? strtoull(value, NULL, 10) : 0;
                seeded = true;
            }
            cuda_host_run(launch, seed++);
        },
        KERNEL);
}

/* ---- Graphs ---- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    std::lock_guard<std::mutex> guard(lock);

    *status = !stream->capture      ? cudaStreamCaptureStatusNone
              : stream->invalidated ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    return state_of(stream->device);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    std::swap(capture_mode, *mode);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    std::lock_guard<std::mutex> guard(lock);

    if (stream->capture)
        return failed(cudaErrorInvalidValue);
    stream->capture = new cuda_host_graph();
    stream->invalidated = false;
    stream->global = mode == cudaStreamCaptureModeGlobal;
    capturing++;
    capturing_globally += stream->global;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    std::lock_guard<std::mutex> guard(lock);

    *graph = stream->capture;
    if (stream->capture == NULL)
        return failed(cudaErrorInvalidValue);
    stream->capture = NULL;
    capturing--;
    capturing_globally -= stream->global;
    if (stream->invalidated) {
        delete *graph;
        *graph = NULL;
        return failed(cudaErrorStreamCaptureInvalidated);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long)
{
    *executable = new cuda_host_graph(*graph);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);

    if (state_of(stream->device) != cudaSuccess)
        return state_of(stream->device);
    for (const struct operation &operation : executable->operations)
        enqueue(stream, operation.run, operation.kind);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    delete executable;
    return cudaSuccess;
}

/* ---- Events ---- */

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = NULL;
    if (state() != cudaSuccess)
        return state();
    *event = new cuda_host_event();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    return cudaEventCreate(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return state();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    std::lock_guard<std::mutex> guard(lock);
    const bool captured = stream->capture != NULL;

    if (state_of(stream->device) != cudaSuccess)
        return state_of(stream->device);
    if (!captured) {
        event->stream = stream;
        event->pending++;
    }
    enqueue(
        stream,
        [event, captured]() {
            struct timespec now;

            clock_gettime(CLOCK_MONOTONIC, &now);
            event->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
            event->pending -= !captured;
        },
        COPY);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    std::lock_guard<std::mutex> guard(lock);

    if (refuse_events())
        return failed(cudaErrorStreamCaptureUnsupported);
    if (event->stream && state_of(event->stream->device) != cudaSuccess)
        return state_of(event->stream->device);
    return event->pending > 0 ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    std::lock_guard<std::mutex> guard(lock);

    if (refuse_events())
        return failed(cudaErrorStreamCaptureUnsupported);
    if (event->stream == NULL)
        return cudaSuccess;
    if (event->pending > 0 && event->stream->capture)
        return failed(cudaErrorStreamCaptureUnsupported);
    if (event->pending > 0)
        run_queue(event->stream);
    return state_of(event->stream->device);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    *milliseconds = (float)(1e3 * (end->seconds - begin->seconds));
    return cudaSuccess;
}

/* ---- The device ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = counting_error == cudaSuccess ? n_devices : 0;
    return counting_error == cudaSuccess ? cudaSuccess : failed(counting_error);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= n_devices)
        return failed(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    if (device < 0 || device >= n_devices)
        return failed(cudaErrorInvalidDevice);
    *properties = cudaDeviceProp{"the host", 9, 0, 4};
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;

    last_error = cudaSuccess;
    return state() != cudaSuccess ? devices[current_device].broken : error;
}

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorIllegalAddress:
        return "an illegal memory access was encountered";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    default:
        return "another error";
    }
}

/* ---- For tests ---- */

void cuda_host_seed(uint64_t first)
{
    std::lock_guard<std::mutex> guard(lock);

    seed = first;
    seeded = true;
}

void cuda_host_set_memory(size_t bytes)
{
    std::lock_guard<std::mutex> guard(lock);

    memory_bytes = bytes;
}

size_t cuda_host_memory(void)
{
    std::lock_guard<std::mutex> guard(lock);

    return memory_used;
}

void cuda_host_set_devices(int count)
{
    if (count < 1 || count > MAX_DEVICES)
        cuda_host_stop("%d devices", count);
    n_devices = count;
}

void cuda_host_set_errors(int counting, int kernels)
{
    counting_error = (cudaError_t)counting;
    kernel_error = (cudaError_t)kernels;
}

cudaError_t cuda_host_find_kernel(void)
{
    return kernel_error == cudaSuccess ? state() : failed(kernel_error);
}

void cuda_host_use_device(int device)
{
    current_device = device;
}

int cuda_host_capture_mode(void)
{
    return capture_mode;
}

int cuda_host_device(void)
{
    return current_device;
}

void cuda_host_break(int device, size_t kernels)
{
    devices[device].kernels_left = kernels;
}

void *cuda_host_open_stream(int device)
{
    const int current = current_device;
    cudaStream_t stream;

    current_device = device;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    current_device = current;
    return stream;
}

void cuda_host_wait(void *stream)
{
    cudaStreamSynchronize((cudaStream_t)stream);
}

void cuda_host_close_stream(void *stream)
{
    cudaStreamDestroy((cudaStream_t)stream);
}

void cuda_host_begin_capture(void *stream)
{
    if (cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeGlobal) !=
        cudaSuccess)
        cuda_host_stop("the stream is being captured already");
}

void *cuda_host_end_capture(void *stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;

    if (cudaStreamEndCapture((cudaStream_t)stream, &graph) != cudaSuccess)
        cuda_host_stop("capturing failed");
    cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    return executable;
}

void cuda_host_launch_graph(void *graph, void *stream)
{
    cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream);
}

void cuda_host_close_graph(void *graph)
{
    cudaGraphExecDestroy((cudaGraphExec_t)graph);
}
