/* SPDX-License-Identifier: MIT */
/* The CUDA toolkit, and what the sources of gpu/ say in other words than its own. There is another
 * file of this name, tests/cuda_host/device.h, with which the same sources run without a GPU. */
#ifndef PUZZLEKV_GPU_TOOLKIT_DEVICE_H
#define PUZZLEKV_GPU_TOOLKIT_DEVICE_H

#include <cuda_runtime.h>

#define BACKEND_NAME "cuda"

/* Before a loop that is to have no counter. */
#define UNROLL _Pragma("unroll")

/* Blocks of a launch at most where each goes on until nothing is left. */
#define MAX_BLOCKS ((size_t)1 << 20)

/* The only way to launch a kernel. */
#define PKV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                 \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)

/* The only shared memory there is: what the launch asked for, aligned to 16 bytes. */
#define PKV_SHARED(type, name)                                                                     \
    extern __shared__ __align__(16) unsigned char device_shared[];                                 \
    type *const name = (type *)(void *)device_shared

/* ---- Whole warps; fragments as in the PTX ISA ---- */

/* c += a b of m16n8k16. */
#define WARP_MMA(type)                                                                             \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                             \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

__device__ static __forceinline__ void warp_mma_f16(float c[4], const unsigned a[4],
                                                    const unsigned b[2])
{
    WARP_MMA("f16");
}

__device__ static __forceinline__ void warp_mma_bf16(float c[4], const unsigned a[4],
                                                     const unsigned b[2])
{
    WARP_MMA("bf16");
}

/* movmatrix: an 8 x 8 matrix of 16 bits an element, transposed. */
__device__ static __forceinline__ unsigned warp_transpose(unsigned x)
{
    unsigned result;

    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(x));
    return result;
}

/* ldmatrix: four 8 x 8 matrices of 16 bits an element in shared memory, of which lane 8 n + i has
 * the address of row i of matrix n; element [g, 2 t] of each, and the next one, go to lane 4 g + t,
 * or of each transposed. */
#define WARP_LOAD(kind)                                                                            \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];"        \
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])                                  \
                 : "r"((unsigned)__cvta_generic_to_shared(row))                                    \
                 : "memory")

__device__ static __forceinline__ void warp_load(unsigned a[4], const void *row)
{
    WARP_LOAD("");
}

__device__ static __forceinline__ void warp_load_transposed(unsigned a[4], const void *row)
{
    WARP_LOAD(".trans");
}

/* ---- Pairs of 16-bit numbers; the first one is in the low half ---- */

__device__ static __forceinline__ unsigned pair_f16(float low, float high)
{
    unsigned pair;

    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ static __forceinline__ unsigned pair_bf16(float low, float high)
{
    unsigned pair;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ static __forceinline__ float low_f16(unsigned pair)
{
    float x;

    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(pair));
    return x;
}

__device__ static __forceinline__ float high_f16(unsigned pair)
{
    float x;

    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(pair));
    return x;
}

__device__ static __forceinline__ unsigned add_bf16(unsigned a, unsigned b)
{
    unsigned sum;

    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return sum;
}

/* x, but the compiler does not know: what is made of it is not kept in registers. */
__device__ static __forceinline__ unsigned made_anew(unsigned x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* 2^x, 0 where that is less than 2^-126; to within 2 units in the last place. */
__device__ static __forceinline__ float power_of_2(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The line of p on its way to the second-level cache. */
__device__ static __forceinline__ void prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" : : "l"(__cvta_generic_to_global(p)));
}

/* ---- Aligned loads of what no kernel under way writes, and of shared memory; stores ---- */

__device__ static __forceinline__ uint4 load_16(const void *p)
{
    return __ldg((const uint4 *)p);
}

__device__ static __forceinline__ uint2 load_8(const void *p)
{
    return __ldg((const uint2 *)p);
}

__device__ static __forceinline__ unsigned load_4(const void *p)
{
    return __ldg((const unsigned *)p);
}

__device__ static __forceinline__ uint4 shared_16(const void *p)
{
    return *(const uint4 *)p;
}

__device__ static __forceinline__ void store_16(void *p, uint4 x)
{
    *(uint4 *)p = x;
}

/* ---- Aligned copies of 16 bytes to shared memory ---- */

/* cp.async: is there when wait_for_copies() returns to the thread; zeros unless `there`. */
__device__ static __forceinline__ void copy_16(void *to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ static __forceinline__ void wait_for_copies(void)
{
    asm volatile("cp.async.wait_all;" : : : "memory");
}

#endif
