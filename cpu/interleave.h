/* SPDX-License-Identifier: MIT */
/* For vectors of LANES elements, which whoever includes this file has defined: 1, or 4, 8 or 16. */
#ifndef PUZZLEKV_CPU_INTERLEAVE_H
#define PUZZLEKV_CPU_INTERLEAVE_H

/* Elements of a and b in turns, from the first half of either or from the second. */
#if LANES == 4
#define INTERLEAVED(a, b, half) __builtin_shufflevector(a, b, half, 4 + half, 1 + half, 5 + half)
#elif LANES == 8
#define INTERLEAVED(a, b, half)                                                                    \
    __builtin_shufflevector(a, b, half, 8 + half, 1 + half, 9 + half, 2 + half, 10 + half,         \
                            3 + half, 11 + half)
#elif LANES == 16
#define INTERLEAVED(a, b, half)                                                                    \
    __builtin_shufflevector(a, b, half, 16 + half, 1 + half, 17 + half, 2 + half, 18 + half,       \
                            3 + half, 19 + half, 4 + half, 20 + half, 5 + half, 21 + half,         \
                            6 + half, 22 + half, 7 + half, 23 + half)
#endif

#endif
