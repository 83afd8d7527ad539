/* SPDX-License-Identifier: MIT */
/* A launch, run on the calling thread. */
#ifndef PUZZLEKV_TESTS_CUDA_HOST_BLOCK_H
#define PUZZLEKV_TESTS_CUDA_HOST_BLOCK_H

#include "device.h"

/* All blocks of a grid, in an order that `seed` shuffles, as their threads are. */
void cuda_host_run(const struct cuda_host_launch &launch, uint64_t seed);

/* Another operation of a stream, which runs in its turn, outside of fibers. */
void cuda_host_queue(cudaStream_t stream, std::function<void()> run);

/* Where such an operation finds device memory; ends the process if that is none. */
void *cuda_host_view(const void *pointer, size_t bytes);

/* Whose `to` is in the block's shared memory: from the running thread's wait on it has what is at
 * `from`, or zeros where that is NULL. */
struct cuda_host_copy {
    void *to;
    const void *from;
};
void cuda_host_copy_later(const struct cuda_host_copy &copy);

/* Ends the process. */
[[noreturn]] void cuda_host_stop(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
