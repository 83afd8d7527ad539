/* SPDX-License-Identifier: MIT */
/* Which instruction set a cache uses. */
#include "config.h"

#include "dispatch.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined HAVE_AVX2_KERNELS || defined HAVE_AVX512_KERNELS
#include <cpuid.h>

/* The compilers' own CPU checks do not all know F16C. */
static bool has_avx2(void)
{
    unsigned a, b, c, d;

    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

#ifdef HAVE_AVX512_KERNELS
static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

#ifdef HAVE_AVX512_BF16_KERNELS
static bool has_avx512_bf16(void)
{
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif

size_t dispatch_available(const struct kernels *available[DISPATCH_MAX])
{
    size_t n = 0;

    available[n++] = &kernels_generic;
#ifdef HAVE_NEON_KERNELS
    available[n++] = &kernels_neon;
#endif
#ifdef HAVE_AVX2_KERNELS
    if (has_avx2())
        available[n++] = &kernels_avx2;
#endif
#ifdef HAVE_AVX512_KERNELS
    if (has_avx512())
        available[n++] = &kernels_avx512;
#endif
#ifdef HAVE_AVX512_BF16_KERNELS
    if (has_avx512() && has_avx512_bf16())
        available[n++] = &kernels_avx512_bf16;
#endif
    return n;
}

pkv_status dispatch_choose(const char *isa, const struct kernels **kernels, struct message *message)
{
    const struct kernels *available[DISPATCH_MAX];
    size_t n = dispatch_available(available);
    const char *environment = getenv("PUZZLEKV_ISA");
    const char *source = isa ? "isa" : "PUZZLEKV_ISA";
    char names[64] = "";
    size_t used = 0;

    if (!isa && environment && *environment != '\0')
        isa = environment;
    if (!isa) {
        *kernels = available[n - 1];
        return PKV_OK;
    }
    for (size_t i = n; i-- > 0;) {
        if (strcmp(available[i]->name, isa) == 0) {
            *kernels = available[i];
            return PKV_OK;
        }
    }
    for (size_t i = 0; i < n; i++)
        if (i == 0 || strcmp(available[i]->name, available[i - 1]->name) != 0)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "",
                                     available[i]->name);
    return fail(message, PKV_ERROR_UNSUPPORTED,
                "%s: instruction set \"%.32s\" is not available; this machine offers %s", source,
                isa, names);
}

const struct solver *dispatch_solver(const struct kernels *kernels)
{
#ifdef HAVE_NEON_KERNELS
    if (strcmp(kernels->name, solver_neon.name) == 0)
        return &solver_neon;
#endif
#ifdef HAVE_AVX2_KERNELS
    if (strcmp(kernels->name, solver_avx2.name) == 0)
        return &solver_avx2;
#endif
#ifdef HAVE_AVX512_KERNELS
    if (strcmp(kernels->name, solver_avx512.name) == 0)
        return &solver_avx512;
#endif
    return &solver_generic;
}
