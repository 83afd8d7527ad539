/* SPDX-License-Identifier: MIT */
/* What the files of gpu_check share. */
#ifndef PUZZLEKV_TESTS_GPU_CHECK_GPU_CHECK_H
#define PUZZLEKV_TESTS_GPU_CHECK_GPU_CHECK_H

#include "device.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
#include "cache.h"
#include "numeric.h"
}

#define REQUIRE(condition)                                                                         \
    ((condition) ? (void)0                                                                         \
                 : stop(__FILE__, __LINE__, #condition, cudaGetErrorString(cudaGetLastError())))
#define REQUIRE_CUDA(call)      require_cuda(call, __FILE__, __LINE__, #call)
#define REQUIRE_OK(cache, call) require_ok(cache, call, __FILE__, __LINE__, #call)

[[noreturn]] static inline void stop(const char *file, int line, const char *what, const char *why)
{
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, why);
    exit(1);
}

static inline void require_cuda(cudaError_t error, const char *file, int line, const char *what)
{
    if (error != cudaSuccess)
        stop(file, line, what, cudaGetErrorString(error));
}

static inline void require_ok(const pkv_cache *cache, pkv_status status, const char *file, int line,
                              const char *what)
{
    if (status != PKV_OK)
        stop(file, line, what, pkv_cache_message(cache));
}

static inline double median(std::vector<double> x)
{
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

/* Milliseconds between two events of which one follows, on the stream, what is queued. */
template <typename F> static inline double queue_ms(cudaStream_t stream, F queue)
{
    cudaEvent_t begin, end;
    float ms;

    REQUIRE_CUDA(cudaEventCreate(&begin));
    REQUIRE_CUDA(cudaEventCreate(&end));
    REQUIRE_CUDA(cudaEventRecord(begin, stream));
    queue();
    REQUIRE_CUDA(cudaEventRecord(end, stream));
    REQUIRE_CUDA(cudaEventSynchronize(end));
    REQUIRE_CUDA(cudaEventElapsedTime(&ms, begin, end));
    REQUIRE_CUDA(cudaEventDestroy(begin));
    REQUIRE_CUDA(cudaEventDestroy(end));
    return (double)ms;
}

/* The median of several times, after one to warm up. */
template <typename F> static inline double median_ms(cudaStream_t stream, size_t times, F queue)
{
    std::vector<double> ms;

    queue();
    for (size_t i = 0; i < times; i++)
        ms.push_back(queue_ms(stream, queue));
    return median(ms);
}

struct shape {
    size_t layers, query_heads, kv_heads, d, page, rank_k, rank_v;
};

static inline pkv_config config_of(const struct shape &shape, pkv_dtype dtype, pkv_factors factors)
{
    pkv_config config;

    pkv_config_init(&config, sizeof config);
    config.layers = shape.layers;
    config.query_heads = shape.query_heads;
    config.kv_heads = shape.kv_heads;
    config.head_dim = shape.d;
    config.page_tokens = shape.page;
    config.rank_k = shape.rank_k;
    config.rank_v = shape.rank_v;
    config.factors_k = config.factors_v = factors;
    config.dtype = dtype;
    return config;
}

static inline pkv_cache *open_cache(const struct backend_ops *ops, const pkv_config &config)
{
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;

    if (cache_open_with(ops, &config, &cache, message) != PKV_OK)
        stop(__FILE__, __LINE__, "cannot open a cache", message);
    return cache;
}

/* ---- models.cu ---- */

/* Matrix products against sums in f64, and a small model whose tokens are the same by a graph and
 * without: the member "model" of the JSON. */
void test_models(void);

/* Prompts and decoding of a whole model with random weights: the members "memory" and "model".
 * `small` is for a device that is none. */
void measure_models(bool small);

#endif
