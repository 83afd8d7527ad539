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

/* A stream; what is queued runs when it is waited for. */
void *cuda_host_open_stream(void);
void cuda_host_wait(void *stream);
void cuda_host_close_stream(void *stream);

#ifdef __cplusplus
}
#endif

#endif
