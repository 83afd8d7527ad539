/* SPDX-License-Identifier: MIT */
/*
 * INT4 factors, as every backend computes them, bit for bit. With L and R in f32,
 *
 *     s_i = |row i of R|,  L~ = column i of L times sqrt(s_i),  R~ = row i of R over sqrt(s_i)
 *
 * (0 where s_i = 0), so that both carry the energy of a direction alike. A scale is
 * f16(max|x| / 7) of the row or column that it stands for, a code x / scale to nearest even,
 * -7 .. 7; all in f32 in the default floating-point modes, but for the sum of squares: f64, where
 * squares of f32 are exact, ascending.
 */
#ifndef PUZZLEKV_LIB_INT4_H
#define PUZZLEKV_LIB_INT4_H

#include "numeric.h"

#include <math.h>
#include <stdbool.h>

/* sqrt(s_i) from the sum of squares of row i of R; infinite where s_i exceeds f32. */
EVERYWHERE float int4_root(double squares)
{
    return sqrtf((float)sqrt(squares));
}

/* An element of R~. */
EVERYWHERE float int4_balance_right(float x, float root)
{
    return root == 0.0f ? 0.0f : x / root;
}

/* The scale of values of which `largest` is the largest magnitude; infinite where it overflows. */
EVERYWHERE uint16_t int4_scale(float largest)
{
    return f16_from_f32(largest / 7.0f);
}

/* The code of x; `scale` is that of int4_scale(), finite. */
EVERYWHERE int int4_code(float x, float scale)
{
    float code = scale == 0.0f ? 0.0f : rintf(x / scale);

    return code > 7.0f ? 7 : code < -7.0f ? -7 : (int)code;
}

EVERYWHERE uint8_t int4_pack(int even, int odd)
{
    return (uint8_t)((even & 15) | (odd & 15) << 4);
}

EVERYWHERE int int4_unpack(uint8_t codes, bool odd)
{
    return (int)((odd ? codes >> 4 : codes & 15) ^ 8) - 8;
}

#endif
