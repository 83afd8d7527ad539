/* SPDX-License-Identifier: MIT */
/* What tests say to the device that is none, and ask it. */
#ifndef PUZZLEKV_TESTS_CUDA_HOST_CONTROL_H
#define PUZZLEKV_TESTS_CUDA_HOST_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Another order of threads and blocks; of the calling process. The environment variable
 * PUZZLEKV_TEST_SEED sets the first one. */
void cuda_host_seed(uint64_t seed);

/* Bytes of device memory that there are, 1 GiB to begin with, and that are in use. */
void cuda_host_set_memory(size_t bytes);
size_t cuda_host_memory(void);

/* How many devices there are, 1 to begin with and 4 at most. Their memory is one. */
void cuda_host_set_devices(int count);

/* What counting devices comes to, of CUDA's errors, and asking for a kernel; 0 to begin with. */
void cuda_host_set_errors(int counting, int kernels);

/* The calling thread's current device, which nobody else changes for good. */
void cuda_host_use_device(int device);
int cuda_host_device(void);
/* Nor whether its calls heed what others capture: 0, they do. */
int cuda_host_capture_mode(void);

/* The kernel of a device that runs after so many others of it fails, and so does every call of that
 * device from then on, for good. */
void cuda_host_break(int device, size_t kernels);

/* Whether cuSOLVER is there, to begin with it is, and which matrix of each of its calls it finds no
 * eigenvectors of, to begin with -1: none. */
void cuda_host_set_solver(int is_there, int64_t matrix);

/* A stream; what is queued runs when it is waited for. */
void *cuda_host_open_stream(int device);
void cuda_host_wait(void *stream);
void cuda_host_close_stream(void *stream);

/* A graph of what is queued on a stream between the first two, captured in global mode. */
void cuda_host_begin_capture(void *stream);
void *cuda_host_end_capture(void *stream);
void cuda_host_launch_graph(void *graph, void *stream);
void cuda_host_close_graph(void *graph);

#ifdef __cplusplus
}
#endif

#endif
