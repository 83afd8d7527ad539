/* SPDX-License-Identifier: MIT */
/*
 * CUDA without a GPU, for tests: what gpu/toolkit/device.h offers, by the host's C++ compiler
 * alone. The threads of a block are fibers of the calling thread, which go on in an order that
 * cuda_host_seed() shuffles; blocks run one after the other, shuffled too. Streams are queues that
 * run when they are waited for. Device memory cannot be touched but by kernels and copies. What
 * would be undefined on a device ends the process with a message:
 *   - a launch beyond a limit, more shared memory than 48 KiB without cudaFuncSetAttribute;
 *   - __syncthreads() that not every thread of the block reaches at the same line;
 *   - a warp function that not every lane of its mask reaches at the same line with the same mask;
 *   - a copy between memories of another kind than it says, or across the end of an allocation;
 *   - a thread that returns before its copies to shared memory have landed.
 * Fresh device memory and each block's shared memory are filled with 0xff, which is NaN.
 */
#ifndef PUZZLEKV_TESTS_CUDA_HOST_DEVICE_H
#define PUZZLEKV_TESTS_CUDA_HOST_DEVICE_H

#include "control.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

#ifndef BACKEND_NAME
#define BACKEND_NAME "cuda-host"
#endif

/* Few, so that blocks do go on. */
#define MAX_BLOCKS ((size_t)24)

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define UNROLL
#define __restrict__ __restrict

/* ---- Threads ---- */

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

/* What the running fiber sees. */
struct cuda_host_place {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
    unsigned char *shared;
};

extern constinit thread_local struct cuda_host_place cuda_host_here;

#define threadIdx (cuda_host_here.thread)
#define blockIdx  (cuda_host_here.block)
#define blockDim  (cuda_host_here.block_dim)
#define gridDim   (cuda_host_here.grid_dim)
#define warpSize  32

#define PKV_SHARED(type, name) type *const name = (type *)(void *)cuda_host_here.shared

/* ---- Barriers and warps ---- */

struct cuda_host_site {
    const char *file;
    int line;
    const char *what;
};

/*
 * The lanes of `mask` meet: when the last one has come, `all` is called once with what each of them
 * brought, NULL for lanes outside of the mask, and leaves its results there.
 */
void cuda_host_barrier(struct cuda_host_site site);
void cuda_host_meet(struct cuda_host_site site, unsigned mask, void *mine,
                    void (*all)(struct cuda_host_site site, void *const lanes[32]));
unsigned cuda_host_lane(void);

#define CUDA_HOST_SITE(what) (cuda_host_site{__FILE__, __LINE__, what})

#define __syncthreads() cuda_host_barrier(CUDA_HOST_SITE("__syncthreads"))

/* For what only meets. */
void cuda_host_nothing(struct cuda_host_site site, void *const lanes[32]);

static inline void cuda_host_sync_warp(struct cuda_host_site site, unsigned mask = 0xffffffffu)
{
    cuda_host_meet(site, mask, NULL, cuda_host_nothing);
}

/* Each lane's 8 bytes to the lane that asks for them. */
struct cuda_host_exchange {
    uint64_t value;
    uint64_t result;
    unsigned from;
};

void cuda_host_exchange_all(struct cuda_host_site site, void *const lanes[32]);

enum cuda_host_shuffle { SHUFFLE_INDEX, SHUFFLE_XOR, SHUFFLE_DOWN, SHUFFLE_UP };

template <typename T>
static inline T cuda_host_shuffled(struct cuda_host_site site, enum cuda_host_shuffle kind,
                                   unsigned mask, T value, unsigned operand, unsigned width = 32)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
    const unsigned lane = cuda_host_lane();
    const unsigned first = lane / width * width;
    struct cuda_host_exchange mine = {0, 0, lane};

    memcpy(&mine.value, &value, sizeof value);
    switch (kind) {
    case SHUFFLE_INDEX:
        mine.from = first + operand % width;
        break;
    case SHUFFLE_XOR:
        mine.from = (lane ^ operand) < first + width ? lane ^ operand : lane;
        break;
    case SHUFFLE_DOWN:
        mine.from = lane + operand < first + width ? lane + operand : lane;
        break;
    case SHUFFLE_UP:
        mine.from = lane >= first + operand ? lane - operand : lane;
        break;
    }
    cuda_host_meet(site, mask, &mine, cuda_host_exchange_all);
    memcpy(&value, &mine.result, sizeof value);
    return value;
}

void cuda_host_vote_all(struct cuda_host_site site, void *const lanes[32]);

static inline unsigned cuda_host_ballot(struct cuda_host_site site, unsigned mask, int predicate)
{
    struct cuda_host_exchange mine = {predicate != 0, 0, 0};

    cuda_host_meet(site, mask, &mine, cuda_host_vote_all);
    return (unsigned)mine.result;
}

#define __syncwarp(...) cuda_host_sync_warp(CUDA_HOST_SITE("__syncwarp") __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...)                                                                           \
    cuda_host_shuffled(CUDA_HOST_SITE("__shfl_sync"), SHUFFLE_INDEX, __VA_ARGS__)
#define __shfl_xor_sync(...)                                                                       \
    cuda_host_shuffled(CUDA_HOST_SITE("__shfl_xor_sync"), SHUFFLE_XOR, __VA_ARGS__)
#define __shfl_down_sync(...)                                                                      \
    cuda_host_shuffled(CUDA_HOST_SITE("__shfl_down_sync"), SHUFFLE_DOWN, __VA_ARGS__)
#define __shfl_up_sync(...)                                                                        \
    cuda_host_shuffled(CUDA_HOST_SITE("__shfl_up_sync"), SHUFFLE_UP, __VA_ARGS__)
#define __ballot_sync(mask, predicate)                                                             \
    cuda_host_ballot(CUDA_HOST_SITE("__ballot_sync"), mask, predicate)
#define __any_sync(mask, predicate)                                                                \
    (cuda_host_ballot(CUDA_HOST_SITE("__any_sync"), mask, predicate) != 0)
#define __all_sync(mask, predicate)                                                                \
    (cuda_host_ballot(CUDA_HOST_SITE("__all_sync"), mask, predicate) == (mask))

struct cuda_host_reduction {
    unsigned value;
};

void cuda_host_reduce_max_all(struct cuda_host_site site, void *const lanes[32]);

static inline unsigned cuda_host_reduce_max(struct cuda_host_site site, unsigned mask,
                                            unsigned value)
{
    struct cuda_host_reduction mine = {value};

    cuda_host_meet(site, mask, &mine, cuda_host_reduce_max_all);
    return mine.value;
}

#define __reduce_max_sync(mask, value)                                                             \
    cuda_host_reduce_max(CUDA_HOST_SITE("__reduce_max_sync"), mask, value)

/* ---- As in gpu/toolkit/device.h ---- */

/* c += a b: products exact, sums in f64, rounded once. */
void cuda_host_mma_f16(struct cuda_host_site site, float c[4], const unsigned a[4],
                       const unsigned b[2]);
void cuda_host_mma_bf16(struct cuda_host_site site, float c[4], const unsigned a[4],
                        const unsigned b[2]);
unsigned cuda_host_transpose(struct cuda_host_site site, unsigned x);

#define warp_mma_f16(c, a, b)  cuda_host_mma_f16(CUDA_HOST_SITE("mma"), c, a, b)
#define warp_mma_bf16(c, a, b) cuda_host_mma_bf16(CUDA_HOST_SITE("mma"), c, a, b)
#define warp_transpose(x)      cuda_host_transpose(CUDA_HOST_SITE("movmatrix"), x)

void cuda_host_load_matrices(struct cuda_host_site site, unsigned a[4], const void *row,
                             bool transposed);

#define warp_load(a, row) cuda_host_load_matrices(CUDA_HOST_SITE("ldmatrix"), a, row, false)
#define warp_load_transposed(a, row)                                                               \
    cuda_host_load_matrices(CUDA_HOST_SITE("ldmatrix.trans"), a, row, true)

unsigned pair_f16(float low, float high);
unsigned pair_bf16(float low, float high);
float low_f16(unsigned pair);
float high_f16(unsigned pair);
unsigned add_bf16(unsigned a, unsigned b);

struct uint2 {
    unsigned x, y;
};

struct uint4 {
    unsigned x, y, z, w;
};

static inline unsigned made_anew(unsigned x)
{
    return x;
}

static inline void prefetch(const void *)
{
}

static inline float power_of_2(float x)
{
    return x < -126.0f ? 0.0f : __builtin_exp2f(x);
}

/* They stop where the address is not aligned. */
uint4 load_16(const void *p);
uint2 load_8(const void *p);
unsigned load_4(const void *p);
uint4 shared_16(const void *p);
void store_16(void *p, uint4 x);

/* Until the wait NaNs are there; a thread that returns has waited. */
void copy_16(void *to, const void *from, bool there);
void wait_for_copies(void);

/* ---- Atomics and arithmetic ---- */

/* Before an atomic operation, and a fence: whoever comes to `p` with the first one behind a fence
 * tells of all that it knew there, and whoever has a fence behind it learns of that. */
void cuda_host_come_to(void *p);
void cuda_host_fence(struct cuda_host_site site);

/* Atomic to ThreadSanitizer too; threads take turns anyway. */
template <typename T, typename F> static inline T cuda_host_atomic(T *p, F change)
{
    T old, now;

    cuda_host_come_to(p);
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do
        now = change(old);
    while (!__atomic_compare_exchange(p, &old, &now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

template <typename T> static inline T atomicAdd(T *p, T value)
{
    return cuda_host_atomic(p, [value](T old) { return (T)(old + value); });
}

static inline unsigned atomicInc(unsigned *p, unsigned most)
{
    return cuda_host_atomic(p, [most](unsigned old) { return old < most ? old + 1 : 0; });
}

template <typename T> static inline T atomicMin(T *p, T value)
{
    return cuda_host_atomic(p, [value](T old) { return value < old ? value : old; });
}

template <typename T> static inline T atomicMax(T *p, T value)
{
    return cuda_host_atomic(p, [value](T old) { return value > old ? value : old; });
}

#define __threadfence() cuda_host_fence(CUDA_HOST_SITE("__threadfence"))

/* Built with -ffp-contract=off. */
static inline float __fmaf_rn(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

static inline float __fmul_rn(float a, float b)
{
    return a * b;
}

static inline float __fadd_rn(float a, float b)
{
    return a + b;
}

static inline float __fsqrt_rn(float a)
{
    return __builtin_sqrtf(a);
}

/* ---- Runtime ---- */

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorStubLibrary = 34,
    cudaErrorInsufficientDriver = 35,
    cudaErrorCallRequiresNewerDriver = 36,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorJitCompilerNotFound = 221,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorJitCompilationDisabled = 223,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorSystemNotReady = 802,
    cudaErrorSystemDriverMismatch = 803,
    cudaErrorCompatNotSupportedOnDevice = 804,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorUnknown = 999
} cudaError_t;

typedef struct cuda_host_stream *cudaStream_t;
typedef struct cuda_host_event *cudaEvent_t;
typedef struct cuda_host_graph *cudaGraph_t;
typedef struct cuda_host_graph *cudaGraphExec_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice
};
enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};

struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
};

struct cudaDeviceProp {
    char name[256];
    int major, minor;
    int multiProcessorCount;
};

#define cudaStreamNonBlocking  1u
#define cudaEventDisableTiming 2u

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);

cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream);
cudaError_t cudaMallocHost(void **pointer, size_t bytes);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaMemGetInfo(size_t *available, size_t *all);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);

cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end);

cudaError_t cuda_host_allow_shared(const void *kernel, size_t bytes);

struct cudaFuncAttributes {
    size_t sharedSizeBytes;
};

cudaError_t cuda_host_find_kernel(void);

template <typename... P>
static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *, void (*)(P...))
{
    return cuda_host_find_kernel();
}

template <typename... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), enum cudaFuncAttribute,
                                               int value)
{
    return cuda_host_allow_shared((const void *)kernel, (size_t)value);
}

/* ---- Launches ---- */

struct cuda_host_launch {
    const char *name;
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    size_t parameter_bytes;
    std::function<void()> thread; /* runs one thread */
};

void cuda_host_enqueue(struct cuda_host_launch launch, cudaStream_t stream);

/* Arguments are converted and copied at the launch, as parameters of a kernel are. */
template <typename... P, typename... A>
static inline void cuda_host_launch_kernel(const char *name, void (*kernel)(P...), dim3 grid,
                                           dim3 block, size_t shared_bytes, cudaStream_t stream,
                                           A &&...arguments)
{
    std::tuple<typename std::remove_cv<P>::type...> parameters(arguments...);

    cuda_host_enqueue(cuda_host_launch{name, (const void *)kernel, grid, block, shared_bytes,
                                       (size_t{0} + ... + sizeof(P)),
                                       [kernel, parameters]() { std::apply(kernel, parameters); }},
                      stream);
}

#define PKV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                 \
    cuda_host_launch_kernel(#kernel, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

#endif
