/* SPDX-License-Identifier: MIT */
/*
 * The scalar recurrences of the solver `batched`: what happens to one page, step by step. A file
 * that includes this one first defines, for one page or for a vector of them:
 *     real                      an f32, or a vector of f32 in which each lane is a page
 *     real_mask                 the result of a comparison
 *     STEP                      what stands before a function
 *     real_of(float)            a constant
 *     real_fma(a, b, c)         a * b + c, rounded once
 *     real_sqrt(a)              as IEEE 754 rounds it
 *     real_less(a, b)           a < b; false with a NaN
 *     real_select(mask, a, b)   mask ? a : b
 *     real_abs(a)
 *     real_with_sign(a, b)      the magnitude of a with the sign of b
 * so that every backend rounds alike. The operators + - * / are those of IEEE 754, and nothing is
 * contracted but where real_fma says so.
 */
#ifndef PUZZLEKV_LIB_SOLVER_STEPS_H
#define PUZZLEKV_LIB_SOLVER_STEPS_H

#include "numeric.h"

#include <stddef.h>

/* An off-diagonal element up to this part of the norm of the tridiagonal matrix counts as 0. */
#define SOLVER_DEFLATION 0x1p-24f

/* A row of R whose squared norm, the eigenvalue, is at most this part of the largest is 0. */
#define SOLVER_NOISE 0x1p-24f

/* Squares below this one would lose bits; X is scaled so that the largest eigenvalue is 1 or more.
 * What is smaller counts as 0. */
#define SOLVER_TINY 0x1p-80f

/*
 * What unit vectors have instead of 1 until the columns of L get their length: a power of two
 * changes no bit of them, but products of many small rotations stay above 2^-126, below which some
 * processors take a hundred times as long. Squares of it do not overflow.
 */
#define SOLVER_UNIT 0x1p60f

/*
 * A page that is still at row l of its tridiagonal matrix after this many sweeps of QL is left as
 * it is. Pages of random numbers take less than 2 sweeps a row. That the cap grows with l bounds
 * the rotations of any pages that are swept together: see solver_rotations().
 */
EVERYWHERE size_t solver_sweep_cap(size_t l)
{
    return 18 + 2 * l;
}

/* Most rotations of pages of P tokens that are swept together: sweep k is of rows l .. P - 1 for an
 * l whose cap is above k. */
EVERYWHERE size_t solver_rotations(size_t length)
{
    size_t rotations = 0;

    for (size_t l = 0; l + 1 < length; l++)
        rotations += (l == 0 ? solver_sweep_cap(0) : 2) * (length - 1 - l);
    return rotations;
}

/*
 * e such that the largest magnitude of a page, times 2^-e, is in [1, 2); 0 for a page of zeros. X
 * is multiplied by solver_scale_down(e) and, where e is below -126, then by
 * solver_scale_down_more(e); R by solver_scale_up(e) in the end.
 */
EVERYWHERE int solver_exponent(float largest)
{
    uint32_t bits = f32_bits(largest) & 0x7fffffffu;
    int e = (int)(bits >> 23) - 127;

    if (bits == 0)
        return 0;
    if (e == -127)
        for (e = -126; (bits & 0x800000u) == 0; e--)
            bits <<= 1;
    return e > 127 ? 127 : e;
}

/* 2^e for -149 <= e <= 127. */
EVERYWHERE float solver_power(int e)
{
    return f32_from_bits(e < -126 ? 1u << (e + 149) : (uint32_t)(e + 127) << 23);
}

EVERYWHERE float solver_scale_down(int e)
{
    return solver_power(e < -126 ? 126 : -e);
}

EVERYWHERE float solver_scale_down_more(int e)
{
    return solver_power(e < -126 ? -126 - e : 0);
}

EVERYWHERE float solver_scale_up(int e)
{
    return solver_power(e);
}

/*
 * The reflection that turns a row (x_0 .. x_(k-1), alpha) into (0 .. 0, off): I - v v^T inverse
 * with v = (x_0 .. x_(k-1), last), given rest = sum of the x_j^2. A row that is (0 .. 0, alpha)
 * already stays: inverse is 0 then.
 */
STEP void solver_reflection(real rest, real alpha, real *last, real *off, real *inverse)
{
    real_mask none = real_less(rest, real_of(SOLVER_TINY));
    real square = real_fma(alpha, alpha, rest);
    real norm = real_sqrt(square);
    real half = real_fma(real_abs(alpha), norm, square); /* v^T v / 2 */

    *last = real_select(none, alpha, alpha + real_with_sign(norm, alpha));
    *off = real_select(none, alpha, -real_with_sign(norm, alpha));
    *inverse = real_select(none, real_of(0), real_of(1) / real_select(none, real_of(1), half));
}

/* One QL sweep over rows l .. m of the tridiagonal matrix with diagonal d and off-diagonal e. */
struct solver_sweep {
    real c, s, p, g;
};

/* Begins it with Wilkinson's shift, given d[l], d[l + 1], d[m] and e[l] != 0. */
STEP void solver_shift(real d, real d_next, real d_end, real e, struct solver_sweep *sweep)
{
    real g = (d_next - d) / (e + e);
    real r = real_sqrt(real_fma(g, g, real_of(1)));

    sweep->c = real_of(1);
    sweep->s = real_of(1);
    sweep->p = real_of(0);
    sweep->g = (d_end - d) + e / (g + real_with_sign(r, g));
}

/*
 * Its rotation of rows i and i + 1, from i = m - 1 down to l, given d[i], d[i + 1] and e[i]: the
 * new d[i + 1] and e[i + 1]; c and s are then the sweep's. After the last one d[l] loses p, e[l]
 * is g and e[m] is 0. Eigenvectors: (y_i, y_(i+1)) becomes (c y_i + s y_(i+1), c y_(i+1) - s y_i),
 * last rotation first.
 */
STEP void solver_rotation(real d, real *d_next, real e, real *e_next, struct solver_sweep *sweep)
{
    real f = sweep->s * e;
    real b = sweep->c * e;
    real square = real_fma(f, f, sweep->g * sweep->g);
    real_mask none = real_less(square, real_of(SOLVER_TINY));
    real norm = real_sqrt(square);
    real divisor = real_select(none, real_of(1), norm);
    real c = real_select(none, real_of(1), sweep->g / divisor);
    real s = real_select(none, real_of(0), f / divisor);
    real g = *d_next - sweep->p;
    real twice = c * b;
    real t = real_fma(d - g, s, twice + twice);
    real p = s * t;

    *e_next = real_select(none, real_of(0), norm);
    *d_next = g + p;
    sweep->c = c;
    sweep->s = s;
    sweep->p = p;
    sweep->g = real_fma(c, t, -b);
}

#endif
