/* SPDX-License-Identifier: MIT */
/* What the files of the CUDA backend share. */
#ifndef PUZZLEKV_GPU_GPU_H
#define PUZZLEKV_GPU_GPU_H

/* Before what is in C below. */
#include "device.h"

#include <fenv.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include "backend.h"
#include "int4.h"
#include "numeric.h"
}

#include "order.h"

/* What is seen of the module. */
#define MODULE_EXPORT __attribute__((visibility("default")))

/* Threads of a block at most, where nothing else decides. */
#define BLOCK_THREADS 128

/* New tokens, counted from an item's first, that are attended like a page. */
#define BLOCK_TOKENS 32

/* Largest d and P of puzzlekv.h. */
#define MAX_HEAD_DIM    1024
#define MAX_PAGE_TOKENS 256

/* A layer as kernels see it; a parameter of theirs. Slots lie one after the other, in each of them
 * its KV heads: a dense page K [P, d], V [P, d]; a factor page its parts in the order of parts.h.
 * Of the order within them see order.h.
 */
struct layer_view {
    unsigned char *dense;
    unsigned char *factor;
    size_t dense_bytes; /* of one page and head */
    size_t factor_bytes;
    struct part_place parts[4]; /* from PART_K_LEFT on */
    unsigned length;            /* P */
    unsigned d;
    unsigned kv_heads;
    unsigned query_heads;
    unsigned rank_k, rank_v;
    pkv_dtype dtype;
    pkv_factors factors_k, factors_v;
    float softmax_scale;
    bool fragments; /* the order of dense pages and of parts */
};

/* The plan of a step, in the device's memory. */
struct device_item {
    uint64_t tokens;
    uint64_t new_tokens;
    uint64_t first_row;
    uint64_t first_page; /* in the tables */
};

struct device_job {
    uint64_t first_row; /* of the step's rows: the first of the new tokens */
    uint32_t from_slot;
    uint32_t to_slot;
    uint32_t cached_tokens;
    uint32_t new_tokens;
};

/* At the head of it, so that a captured launch finds that of the step that it serves. */
struct plan_view {
    const struct device_item *items;
    const struct page *tables;
    const struct device_job *dense_jobs;
    const struct device_job *factor_jobs;
    size_t n_items, n_dense, n_factor, rows;
};

/* The plan as kernels are given it, and for what step they were launched. */
struct launch_plan {
    const struct plan_view *on_device;
    size_t n_items, rows;
};

/* Where a layer was at fault first: see store.cu and factorize.cu. NO_FAULT: nowhere. */
#define NO_FAULT UINT64_MAX
struct layer_faults {
    unsigned long long value;
    unsigned long long factor;
};

/* What kernels report of a step. */
struct device_report {
    unsigned long long capped_pages;
    unsigned long long layers; /* that were stored, of as many rows as the step has */
};

/*
 * The open step; all of it is zero between steps. A launch is sized by `view`, but while the stream
 * is captured by what any step of as many items of one token has at most; kernels go by the plan on
 * the device.
 */
struct gpu_step {
    struct backend_plan plan;
    struct plan_view view;
    bool capturing;
    bool factorized; /* events were recorded */
};

/* What a step has in the host's memory, pinned, and what is left of it once it was submitted. */
struct flight {
    struct backend_plan plan;
    unsigned char *plan_host;
    size_t plan_bytes;
    struct layer_faults *faults; /* as in struct backend */
    cudaEvent_t done;
};

#define FLIGHTS (MAX_SUBMITTED + 1)

struct backend {
    const struct geometry *geometry;
    struct capacity capacity;
    struct memory *memory;
    struct message *message;
    int device;
    cudaStream_t stream;
    bool own_stream;
    char isa[16];

    unsigned char *dense; /* [layer][slot][KV head] */
    unsigned char *factor;
    size_t *factor_offset; /* [layers]: bytes from `factor` */
    size_t reserved_bytes;
    size_t held_bytes; /* these, and everything else */

    unsigned char *plan_device;
    size_t plan_bytes;
    bool captured; /* graphs know where the plan lies */

    struct layer_faults *faults; /* [layers], on the device; then struct device_report */

    struct flight flights[FLIGHTS]; /* a ring: those submitted, then the open step's */
    size_t first_flight;
    size_t n_submitted;

    /* Of the layer that is under way: states of attention, then problems of factorizing. Captured
     * launches know where it is. */
    float *scratch;
    size_t scratch_bytes;
    /* To factorize in what is too much for that, as long as steps do: NULL while one is open that
     * does not. */
    float *many_scratch;
    size_t many_scratch_bytes;
    struct cusolver *cusolver; /* NULL: another solver */
    float *eigen_scratch;      /* of its problems */
    size_t eigen_scratch_bytes;
    size_t decode_blocks; /* whose states it has room for, see decode.cu */
    unsigned *decode_arrivals;
    unsigned char *part_host; /* one part of a page, to be copied */

    cudaEvent_t *events; /* [layers][2]: begin and end of factorizing */

    struct gpu_step step;
};

/* ---- Calls of the runtime ---- */

/* PKV_OK, or the message of what failed. */
pkv_status gpu_check(struct backend *backend, cudaError_t error, const char *what);

/* Of the last launches. */
static inline pkv_status gpu_check_launch(struct backend *backend, const char *what)
{
    return gpu_check(backend, cudaGetLastError(), what);
}

/* Counted memory of the device and pinned memory of the host; `bytes` 0 counts as 1. On failure
 * NULL and the message. Memory in the stream is there for what is queued between the two. */
pkv_status gpu_allocate_in_stream(struct backend *backend, size_t bytes, const char *what,
                                  void **pointer);
void gpu_release_in_stream(struct backend *backend, size_t bytes, void *pointer);
pkv_status gpu_allocate(struct backend *backend, size_t bytes, const char *what, void **pointer);
void gpu_release(struct backend *backend, size_t bytes, void *pointer);
pkv_status gpu_allocate_pinned(struct backend *backend, size_t bytes, void **pointer);
void gpu_release_pinned(struct backend *backend, size_t bytes, void *pointer);

/* While the backend is opened: that its scratch has room for so much. */
static inline void gpu_need_scratch(struct backend *backend, size_t bytes)
{
    backend->scratch_bytes = bytes > backend->scratch_bytes ? bytes : backend->scratch_bytes;
}

/* That of the open step. */
static inline struct flight *gpu_flight(struct backend *backend)
{
    return &backend->flights[(backend->first_flight + backend->n_submitted) % FLIGHTS];
}

/* The plan on the device, for kernels that are launched for the open step. */
static inline struct launch_plan gpu_plan(const struct backend *backend)
{
    return {(const struct plan_view *)(const void *)backend->plan_device,
            backend->step.view.n_items, backend->step.view.rows};
}

static inline struct device_report *gpu_report(const struct backend *backend,
                                               struct layer_faults *faults)
{
    return (struct device_report *)(void *)(faults + backend->geometry->layers);
}

/* ---- The plan ---- */

/* What every kernel of a step asks first. NULL where the plan is of a step with other items than
 * those that the launch was for: the caller launched a graph that does not serve it. Its operands
 * are too small then or in part another step's, so that nothing is read and nothing written; the
 * layers that report->layers lacks tell. */
__device__ static inline const struct plan_view *plan_of(const struct launch_plan *launch)
{
    const struct plan_view *plan = launch->on_device;

    return plan->n_items == launch->n_items && plan->rows == launch->rows ? plan : NULL;
}

/* ---- Elements ---- */

__device__ static inline float load_element(pkv_dtype dtype, const void *data, size_t i)
{
    switch (dtype) {
    case PKV_F16:
        return f16_to_f32(((const uint16_t *)data)[i]);
    case PKV_BF16:
        return bf16_to_f32(((const uint16_t *)data)[i]);
    default:
        return ((const float *)data)[i];
    }
}

/* Returns the element as rounded. */
__device__ static inline float store_element(pkv_dtype dtype, void *data, size_t i, float x)
{
    uint16_t half;

    switch (dtype) {
    case PKV_F16:
        half = ((uint16_t *)data)[i] = f16_from_f32(x);
        return f16_to_f32(half);
    case PKV_BF16:
        half = ((uint16_t *)data)[i] = bf16_from_f32(x);
        return bf16_to_f32(half);
    default:
        return ((float *)data)[i] = x;
    }
}

__device__ static inline float rounded_element(pkv_dtype dtype, float x)
{
    return dtype == PKV_F16    ? f16_to_f32(f16_from_f32(x))
           : dtype == PKV_BF16 ? bf16_to_f32(bf16_from_f32(x))
                               : x;
}

__device__ static inline bool is_finite(float x)
{
    return (f32_bits(x) & 0x7f800000u) != 0x7f800000u;
}

/* Element i of a head of one of the step's rows, as it is. */
__device__ static inline float input_element(const pkv_input *input, size_t row, unsigned head,
                                             unsigned i)
{
    return load_element(input->dtype, input->data,
                        row * input->token_stride + head * input->head_stride + i);
}

/* Whether each eighth element of a head begins where 16 bytes are moved at once. */
EVERYWHERE bool heads_aligned(pkv_dtype dtype, const void *data, size_t token_stride,
                              size_t head_stride)
{
    const size_t mask = dtype == PKV_F32 ? 3 : 7;

    return (uintptr_t)data % 16 == 0 && (token_stride & mask) == 0 && (head_stride & mask) == 0;
}

EVERYWHERE bool input_aligned(const pkv_input *input)
{
    return heads_aligned(input->dtype, input->data, input->token_stride, input->head_stride);
}

/* The eight elements of 16 bits in 16 bytes. */
__device__ static inline void unpack(pkv_dtype dtype, uint4 piece, float x[8])
{
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};

    UNROLL
    for (unsigned i = 0; i < 4; i++) {
        x[2 * i] = dtype == PKV_F16 ? low_f16(words[i]) : f32_from_bits(words[i] << 16);
        x[2 * i + 1] =
            dtype == PKV_F16 ? high_f16(words[i]) : f32_from_bits(words[i] & 0xffff0000u);
    }
}

/* ---- Pages ---- */

__device__ static inline unsigned char *dense_page(const struct layer_view *layer, uint32_t slot,
                                                   unsigned head)
{
    return layer->dense + ((size_t)slot * layer->kv_heads + head) * layer->dense_bytes;
}

__device__ static inline unsigned char *factor_page(const struct layer_view *layer, uint32_t slot,
                                                    unsigned head)
{
    return layer->factor + ((size_t)slot * layer->kv_heads + head) * layer->factor_bytes;
}

/* Where element [t, i] of K or V of a dense page lies in it. */
EVERYWHERE size_t dense_index(const struct layer_view *layer, bool is_key, unsigned t, unsigned i)
{
    return dense_place(layer->fragments, layer->length, layer->d, is_key, t, i);
}

/* Element [row, column] of a part in f32: a code times its scale is exact. */
__device__ static inline float part_element(const struct layer_view *layer,
                                            const struct part_place *part,
                                            const unsigned char *page, unsigned row,
                                            unsigned column)
{
    const unsigned char *data = page + part->offset;
    const size_t i = part_index(part, row, column);

    if (part->coded) {
        const uint16_t *scales = (const uint16_t *)(const void *)(page + part->scales);

        return (float)int4_unpack(data[i / 2], i % 2) *
               f16_to_f32(scales[scale_index(part, part->row_scales ? row : column)]);
    }
    return load_element(layer->dtype, data, i);
}

/* The largest finite value that the storage type holds. */
__device__ static inline float largest_element(pkv_dtype dtype)
{
    return dtype == PKV_F16 ? 65504.0f : dtype == PKV_BF16 ? 0x1.fep+127f : 0x1.fffffep+127f;
}

/* Threads of a block that has n elements to work on at once: whole warps. */
static inline unsigned gpu_threads(size_t n)
{
    return (unsigned)(n < BLOCK_THREADS ? (n + 31) / 32 * 32 : BLOCK_THREADS);
}

static inline size_t gpu_group(const struct geometry *geometry)
{
    return geometry->query_heads / geometry->kv_heads;
}

#endif
