/* SPDX-License-Identifier: MIT */
/* tests/cuda_host: that kernels run as on a device, and that what is undefined there ends a test.
 */
#include "device.h"

#include <check.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#define BLOCK 96
#define FULL  0xffffffffu

static cudaStream_t stream;
static int *numbers; /* on the device */

static void setup(void)
{
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    ck_assert_int_eq(cudaMalloc((void **)&numbers, 1024 * sizeof *numbers), cudaSuccess);
}

static void teardown(void)
{
    cudaFree(numbers);
    cudaStreamDestroy(stream);
}

static void fetch(int *to, size_t n)
{
    cudaMemcpyAsync(to, numbers, n * sizeof *to, cudaMemcpyDeviceToHost, stream);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
}

/* ---- What is defined ---- */

static void reverse(int *out)
{
    PKV_SHARED(int, shared);

    shared[threadIdx.x] = (int)(threadIdx.x + blockIdx.x * 1000);
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

START_TEST(barriers)
{
    int got[3 * BLOCK];

    cuda_host_seed((uint64_t)_i);
    PKV_LAUNCH(reverse, 3, BLOCK, BLOCK * sizeof(int), stream, numbers);
    fetch(got, 3 * BLOCK);
    for (int i = 0; i < 3 * BLOCK; i++)
        ck_assert_int_eq(got[i], BLOCK - 1 - i % BLOCK + i / BLOCK * 1000);
}
END_TEST

static void many_barriers(int *out)
{
    PKV_SHARED(int, shared);

    shared[threadIdx.x] = (int)threadIdx.x;
    for (int i = 0; i < 1000; i++) {
        __syncthreads();
        int next = shared[(threadIdx.x + 1) % blockDim.x];

        __syncthreads();
        shared[threadIdx.x] = next;
    }
    out[threadIdx.x] = shared[threadIdx.x];
}

START_TEST(barriers_in_a_loop)
{
    int got[BLOCK];

    PKV_LAUNCH(many_barriers, 1, BLOCK, BLOCK * sizeof(int), stream, numbers);
    fetch(got, BLOCK);
    for (int i = 0; i < BLOCK; i++)
        ck_assert_int_eq(got[i], (i + 1000) % BLOCK);
}
END_TEST

/* Records who comes first: it must depend on the seed. */
static void order(int *out)
{
    out[(size_t)atomicAdd(&out[BLOCK], 1)] = (int)threadIdx.x;
}

START_TEST(seeds_shuffle)
{
    int first[BLOCK], got[BLOCK];

    for (uint64_t seed = 0; seed < 2; seed++) {
        cuda_host_seed(seed);
        cudaMemsetAsync(numbers, 0, (BLOCK + 1) * sizeof *numbers, stream);
        PKV_LAUNCH(order, 1, BLOCK, 0, stream, numbers);
        fetch(seed == 0 ? first : got, BLOCK);
    }
    ck_assert_int_ne(memcmp(first, got, sizeof got), 0);
    cuda_host_seed(0);
    cudaMemsetAsync(numbers, 0, (BLOCK + 1) * sizeof *numbers, stream);
    PKV_LAUNCH(order, 1, BLOCK, 0, stream, numbers);
    fetch(got, BLOCK);
    ck_assert_int_eq(memcmp(first, got, sizeof got), 0);
}
END_TEST

static void warps(int *out)
{
    const int lane = (int)threadIdx.x % 32;
    int sum = lane;
    int *mine = out + 8 * threadIdx.x;

    for (int i = 16; i > 0; i /= 2)
        sum += __shfl_xor_sync(FULL, sum, i);
    mine[0] = sum;
    mine[1] = __shfl_sync(FULL, lane * 2, 5);
    mine[2] = __shfl_down_sync(FULL, lane, 3);
    mine[3] = __shfl_up_sync(FULL, lane, 3);
    mine[4] = (int)__ballot_sync(FULL, lane % 3 == 0);
    mine[5] = __any_sync(FULL, lane == 31) + 2 * __all_sync(FULL, lane < 31);
    __syncwarp();
    /* Halves of a warp on their own. */
    if (lane < 16)
        mine[6] = __shfl_xor_sync(0x0000ffffu, lane, 1);
    else
        mine[6] = __shfl_xor_sync(0xffff0000u, lane, 2);
    mine[7] = __shfl_sync(FULL, lane, 9, 8);
}

START_TEST(warp_functions)
{
    int got[64 * 8];

    cuda_host_seed((uint64_t)_i);
    PKV_LAUNCH(warps, 1, 64, 0, stream, numbers);
    fetch(got, 64 * 8);
    for (int i = 0; i < 64; i++) {
        const int lane = i % 32;
        const int *mine = got + 8 * i;

        ck_assert_int_eq(mine[0], 496);
        ck_assert_int_eq(mine[1], 10);
        ck_assert_int_eq(mine[2], lane + 3 < 32 ? lane + 3 : lane);
        ck_assert_int_eq(mine[3], lane >= 3 ? lane - 3 : lane);
        ck_assert_uint_eq((unsigned)mine[4], 0x49249249u);
        ck_assert_int_eq(mine[5], 1);
        ck_assert_int_eq(mine[6], lane < 16 ? lane ^ 1 : lane ^ 2);
        ck_assert_int_eq(mine[7], lane / 8 * 8 + 1);
    }
}
END_TEST

START_TEST(copies_land_at_the_wait)
{
    int *host, got = 5;

    cudaMallocHost((void **)&host, sizeof *host);
    *host = 1;
    cudaMemcpyAsync(numbers, host, sizeof *host, cudaMemcpyHostToDevice, stream);
    cudaMemcpyAsync(&got, numbers, sizeof got, cudaMemcpyDeviceToHost, stream);
    ck_assert_int_eq(got, 5);
    *host = 2;
    cudaStreamSynchronize(stream);
    ck_assert_int_eq(got, 2);
    cudaFreeHost(host);
}
END_TEST

START_TEST(graphs_run_again)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    void *block;
    int got;

    cudaMemsetAsync(numbers, 0, 1024 * sizeof *numbers, stream);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaSuccess);
    ck_assert_int_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    PKV_LAUNCH(order, 1, 3, 0, stream, numbers);
    ck_assert_int_eq(cudaMalloc(&block, 8), cudaErrorStreamCaptureUnsupported);
    ck_assert_int_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ck_assert_int_eq(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
    for (int i = 0; i < 4; i++)
        cudaGraphLaunch(executable, stream);
    cudaMemcpyAsync(&got, numbers + BLOCK, sizeof got, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    ck_assert_int_eq(got, 12);
    cudaGraphExecDestroy(executable);

    /* Waiting spoils what is being captured. */
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    ck_assert_int_eq(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
    ck_assert_int_eq(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    ck_assert_int_eq(cudaMalloc(&block, 8), cudaSuccess);
    cudaFree(block);
}
END_TEST

START_TEST(memory_is_finite)
{
    void *a, *b;

    cuda_host_set_memory(cuda_host_memory() + 1000);
    ck_assert_int_eq(cudaMalloc(&a, 600), cudaSuccess);
    ck_assert_int_eq(cudaMalloc(&b, 600), cudaErrorMemoryAllocation);
    ck_assert_ptr_null(b);
    ck_assert_int_eq(cudaGetLastError(), cudaErrorMemoryAllocation);
    ck_assert_int_eq(cudaGetLastError(), cudaSuccess);
    cudaFree(a);
    ck_assert_int_eq(cudaMalloc(&b, 600), cudaSuccess);
    cudaFree(b);
}
END_TEST

/* ---- Matrices ---- */

/*
 * Fragments of m16n8k16 as the PTX ISA lists them, groupID = lane / 4, threadID_in_group = lane %
 * 4, i the number of an element in the registers: A: row = groupID for i = 0, 1, 4, 5, else groupID
 * + 8; column = threadID_in_group * 2 + (i & 1),
 *      + 8 for i >= 4
 *   B: row = threadID_in_group * 2 + (i & 1), + 8 for i >= 2; column = groupID
 *   C: row = groupID for i < 2, else groupID + 8; column = threadID_in_group * 2 + (i & 1)
 * Row 0 of each table here is lane 0's, as (row, column) of its elements.
 */
static const unsigned char a_of_lane_0[8][2] = {{0, 0}, {0, 1}, {8, 0}, {8, 1},
                                                {0, 8}, {0, 9}, {8, 8}, {8, 9}};
static const unsigned char b_of_lane_0[4][2] = {{0, 0}, {1, 0}, {8, 0}, {9, 0}};
static const unsigned char c_of_lane_0[4][2] = {{0, 0}, {0, 1}, {8, 0}, {8, 1}};

/* Small integers, which bf16 and f16 hold; written apart from tests/cuda_host. */
static unsigned short half_of(int value, bool is_bf16)
{
    const unsigned magnitude = (unsigned)abs(value);
    unsigned exponent = 0;

    if (magnitude == 0)
        return 0;
    while (magnitude >> (exponent + 1))
        exponent++;
    return (unsigned short)((value < 0 ? 0x8000u : 0) |
                            (is_bf16
                                 ? (127 + exponent) << 7 | ((magnitude << 7 >> exponent) & 127)
                                 : (15 + exponent) << 10 | ((magnitude << 10 >> exponent) & 1023)));
}

static int a_value(unsigned row, unsigned k)
{
    return (int)((row * 7 + k * 5) % 31) - 15;
}

static int b_value(unsigned k, unsigned column)
{
    return (int)((k * 11 + column * 3) % 29) - 14;
}

static void multiply(int *out, int is_bf16)
{
    const unsigned lane = threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned short a[8], b[4];
    unsigned a_registers[4], b_registers[2];
    float c[4];

    for (unsigned i = 0; i < 8; i++)
        a[i] = half_of(a_value(a_of_lane_0[i][0] + g, a_of_lane_0[i][1] + 2 * t), is_bf16);
    for (unsigned i = 0; i < 4; i++)
        b[i] = half_of(b_value(b_of_lane_0[i][0] + 2 * t, b_of_lane_0[i][1] + g), is_bf16);
    for (unsigned i = 0; i < 4; i++)
        c[i] = (float)(1000 * (c_of_lane_0[i][0] + g) + 10 * (c_of_lane_0[i][1] + 2 * t));
    memcpy(a_registers, a, sizeof a);
    memcpy(b_registers, b, sizeof b);
    if (is_bf16)
        warp_mma_bf16(c, a_registers, b_registers);
    else
        warp_mma_f16(c, a_registers, b_registers);
    for (unsigned i = 0; i < 4; i++)
        out[(c_of_lane_0[i][0] + g) * 8 + c_of_lane_0[i][1] + 2 * t] = (int)c[i];
}

START_TEST(matrices)
{
    int got[16 * 8];

    cuda_host_seed((uint64_t)_i);
    PKV_LAUNCH(multiply, 1, 32, 0, stream, numbers, _i % 2);
    fetch(got, 16 * 8);
    for (unsigned row = 0; row < 16; row++) {
        for (unsigned column = 0; column < 8; column++) {
            int sum = (int)(1000 * row + 10 * column);

            for (unsigned k = 0; k < 16; k++)
                sum += a_value(row, k) * b_value(k, column);
            ck_assert_int_eq(got[row * 8 + column], sum);
        }
    }
}
END_TEST

/* movmatrix: lane 4 r + j has elements 2 j and 2 j + 1 of row r, of 8 x 8. */
static void transpose(int *out)
{
    const unsigned row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;

    out[threadIdx.x] = (int)warp_transpose((10 * row + column) | (10 * row + column + 1) << 16);
    out[32 + threadIdx.x] = (int)__reduce_max_sync(FULL, threadIdx.x * 7 % 32 + 100);
}

START_TEST(transposed)
{
    int got[64];

    cuda_host_seed((uint64_t)_i);
    PKV_LAUNCH(transpose, 1, 32, 0, stream, numbers);
    fetch(got, 64);
    for (int i = 0; i < 32; i++) {
        const int row = i / 4, column = i % 4 * 2;

        ck_assert_int_eq(got[i], (10 * column + row) | (10 * (column + 1) + row) << 16);
        ck_assert_int_eq(got[32 + i], 131);
    }
}
END_TEST

/* ldmatrix: lane 4 r + j gets elements 2 j and 2 j + 1 of row r of four matrices of 8 x 8, whose
 * row i is where lane 8 n + i says; here rows of 8 elements follow each other from the last one on.
 */
static void load_matrices(int *out)
{
    PKV_SHARED(unsigned short, shared);
    const unsigned lane = threadIdx.x;
    unsigned a[4], b[4];

    for (unsigned i = 0; i < 8; i++)
        shared[8 * (31 - lane) + i] = (unsigned short)(100 * (lane / 8) + 10 * (lane % 8) + i);
    __syncwarp();
    warp_load(a, shared + 8 * (31 - lane));
    warp_load_transposed(b, shared + 8 * (31 - lane));
    for (unsigned n = 0; n < 4; n++) {
        out[8 * lane + n] = (int)a[n];
        out[8 * lane + 4 + n] = (int)b[n];
    }
}

START_TEST(matrices_loaded)
{
    int got[32 * 8];

    cuda_host_seed((uint64_t)_i);
    PKV_LAUNCH(load_matrices, 1, 32, 512, stream, numbers);
    fetch(got, 32 * 8);
    for (int i = 0; i < 32 * 4; i++) {
        const int n = i % 4, row = i / 16, column = i / 4 % 4 * 2;
        const int first = 100 * n + 10 * row + column;

        ck_assert_int_eq(got[i / 4 * 8 + n], first | (first + 1) << 16);
        ck_assert_int_eq(got[i / 4 * 8 + 4 + n],
                         (100 * n + 10 * column + row) | (100 * n + 10 * (column + 1) + row) << 16);
    }
}
END_TEST

static void copy_later(int *out)
{
    PKV_SHARED(int, shared);
    int *mine = shared + 4 * threadIdx.x;

    copy_16(mine, out + 4 * threadIdx.x, threadIdx.x != 3);
    out[4 * BLOCK + threadIdx.x] = mine[1]; /* what is on its way is NaN */
    wait_for_copies();
    __syncthreads();
    out[5 * BLOCK + threadIdx.x] = shared[(4 * threadIdx.x + 5) % (4 * BLOCK)];
}

START_TEST(copies_to_shared_memory)
{
    int *host, got[6 * BLOCK];

    cudaMallocHost((void **)&host, 4 * BLOCK * sizeof *host);
    for (int i = 0; i < 4 * BLOCK; i++)
        host[i] = i;
    cudaMemcpyAsync(numbers, host, 4 * BLOCK * sizeof *host, cudaMemcpyHostToDevice, stream);
    PKV_LAUNCH(copy_later, 1, BLOCK, 4 * BLOCK * sizeof(int), stream, numbers);
    fetch(got, 6 * BLOCK);
    for (int i = 0; i < BLOCK; i++) {
        const int next = (i + 1) % BLOCK;

        ck_assert_int_eq(got[4 * BLOCK + i], -1);
        ck_assert_int_eq(got[5 * BLOCK + i], next == 3 ? 0 : 4 * next + 1);
    }
    cudaFreeHost(host);
}
END_TEST

START_TEST(pairs)
{
    ck_assert_uint_eq(pair_bf16(1.0f, -2.5f), 0xc0203f80u);
    ck_assert_uint_eq(pair_f16(1.0f, -2.5f), 0xc1003c00u);
    ck_assert_uint_eq(pair_bf16(0x1.01p0f, 0x1.03p0f), 0x3f823f80u); /* ties to even */
    ck_assert_uint_eq(pair_f16(0x1.002p0f, 0x1.006p0f), 0x3c023c00u);
    ck_assert(low_f16(0xc1003c00u) == 1.0f && high_f16(0xc1003c00u) == -2.5f);
    ck_assert(low_f16(0x00000001u) == 0x1p-24f);
    ck_assert_uint_eq(add_bf16(0x43083f80u, 0xc3083f80u), 0x00004000u);
}
END_TEST

/* ---- What is not ---- */

static void half_a_barrier(int *out)
{
    if (threadIdx.x < 16)
        __syncthreads();
    out[threadIdx.x] = 1;
}

static void two_barriers(int *out)
{
    if (threadIdx.x < 16)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

static void half_a_warp(int *out)
{
    if (threadIdx.x < 16)
        out[0] = __shfl_sync(FULL, 1, 0);
}

static void two_masks(int *out)
{
    out[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? FULL : 0xffff0000u, 1, 16);
}

static void outside_of_the_mask(int *out)
{
    out[threadIdx.x] = __shfl_sync(0xffffu, 1, 0);
}

static void from_another_half(int *out)
{
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);
}

static void unaligned(int *out)
{
    out[100 + threadIdx.x] = (int)load_16(out + 1).x;
}

static void unaligned_copy(int *out)
{
    PKV_SHARED(int, shared);

    copy_16(shared, out + 1, true);
    wait_for_copies();
}

static void unfinished_copy(int *out)
{
    PKV_SHARED(int, shared);

    copy_16(shared, out, true);
}

static void half_a_matrix(int *out)
{
    if (threadIdx.x < 16)
        out[threadIdx.x] = (int)warp_transpose(1);
}

static void nothing(int *)
{
}

struct big {
    char bytes[5000];
};

static void with_parameters(struct big)
{
}

START_TEST(undefined)
{
    /* The message is expected. */
    freopen("/dev/null", "w", stderr);
    switch (_i) {
    case 0:
        PKV_LAUNCH(half_a_barrier, 1, 32, 0, stream, numbers);
        break;
    case 1:
        PKV_LAUNCH(two_barriers, 1, 32, 0, stream, numbers);
        break;
    case 2:
        PKV_LAUNCH(half_a_warp, 1, 32, 0, stream, numbers);
        break;
    case 3:
        PKV_LAUNCH(two_masks, 1, 32, 0, stream, numbers);
        break;
    case 4:
        PKV_LAUNCH(outside_of_the_mask, 1, 32, 0, stream, numbers);
        break;
    case 5:
        PKV_LAUNCH(nothing, 1, 1025, 0, stream, numbers);
        break;
    case 6:
        PKV_LAUNCH(nothing, dim3(1, 65536), 32, 0, stream, numbers);
        break;
    case 7:
        PKV_LAUNCH(nothing, 0, 32, 0, stream, numbers);
        break;
    case 8:
        PKV_LAUNCH(nothing, 1, 32, 48 * 1024 + 1, stream, numbers);
        break;
    case 9:
        PKV_LAUNCH(with_parameters, 1, 32, 0, stream, big{});
        break;
    case 10:
        PKV_LAUNCH(nothing, 1, 32, 0, NULL, numbers);
        break;
    case 11:
        cudaMemcpyAsync(numbers + 1000, numbers, 100, cudaMemcpyDeviceToDevice, stream);
        break;
    case 12:
        cudaMemcpyAsync(numbers, numbers, 4, cudaMemcpyHostToDevice, stream);
        break;
    case 13:
        cudaFree(numbers + 1);
        break;
    case 14:
        PKV_LAUNCH(from_another_half, 1, 32, 0, stream, numbers);
        break;
    case 15:
        PKV_LAUNCH(unaligned, 1, 32, 0, stream, numbers);
        break;
    case 16:
        PKV_LAUNCH(half_a_matrix, 1, 32, 0, stream, numbers);
        break;
    case 17:
        PKV_LAUNCH(unaligned_copy, 1, 1, 16, stream, numbers);
        break;
    case 18:
        PKV_LAUNCH(unfinished_copy, 1, 1, 16, stream, numbers);
        break;
    }
    cudaStreamSynchronize(stream);
}
END_TEST

START_TEST(host_reads_device_memory)
{
    PKV_LAUNCH(reverse, 1, 32, 128, stream, numbers);
    cudaStreamSynchronize(stream);
    freopen("/dev/null", "w", stderr);
    exit(*(volatile int *)numbers);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("cuda_host");
    TCase *test = tcase_create("cuda_host");
    SRunner *runner;
    int failed;

    tcase_add_checked_fixture(test, setup, teardown);
    tcase_add_loop_test(test, barriers, 0, 5);
    tcase_add_test(test, barriers_in_a_loop);
    tcase_add_test(test, seeds_shuffle);
    tcase_add_loop_test(test, warp_functions, 0, 5);
    tcase_add_loop_test(test, matrices, 0, 6);
    tcase_add_loop_test(test, transposed, 0, 3);
    tcase_add_loop_test(test, matrices_loaded, 0, 3);
    tcase_add_test(test, copies_to_shared_memory);
    tcase_add_test(test, pairs);
    tcase_add_test(test, copies_land_at_the_wait);
    tcase_add_test(test, graphs_run_again);
    tcase_add_test(test, memory_is_finite);
    tcase_add_loop_test_raise_signal(test, undefined, SIGABRT, 0, 19);
#if !defined(__SANITIZE_ADDRESS__) &&                                                              \
    !defined(__SANITIZE_THREAD__) /* which report it in their own way */
    tcase_add_test_raise_signal(test, host_reads_device_memory, SIGSEGV);
#endif
    suite_add_tcase(suite, test);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
