/* SPDX-License-Identifier: MIT */
/* The kernels for x86-64 with AVX-512 F, BW, VL and DQ. */
#include "dispatch.h"

#include "kernels_avx512.h"

const struct kernels kernels_avx512 = {KERNELS_TABLE("avx512")};
