/* SPDX-License-Identifier: MIT */
/*
 * The parts of a page of one layer and KV head in canonical form: what backends hand out and
 * digests consist of, however a backend lays them out itself. P tokens a page, d elements a head,
 * r the layer's rank; matrices are row-major:
 *
 *     dense    K and V [tokens, d]
 *     native   L [P, r] and R [r, d] of K and of V
 *     INT4     codes of L~ [P, r] and R~ [r, d] of K and of V, each followed by its scales:
 *              of L~_K one a column (r), of L~_V one a row (P), of R~ one a column (d)
 *
 * Elements are of the storage type, scales f16. Codes are 4-bit two's complement, two in a byte,
 * that of the even index in the low four bits; rows follow each other without gaps. P and d are
 * even, so a matrix fills its bytes. Numbers of more than a byte have the machine's byte order.
 */
#ifndef PUZZLEKV_LIB_PARTS_H
#define PUZZLEKV_LIB_PARTS_H

#include "puzzlekv.h"

#include <stdbool.h>

/* In the order in which digests read them. */
enum page_part { PART_K = 0, PART_V, PART_K_LEFT, PART_K_RIGHT, PART_V_LEFT, PART_V_RIGHT };

struct part_form {
    bool coded; /* INT4; else elements of the storage type */
    size_t rows;
    size_t columns;
    bool row_scales; /* coded: one scale a row, else one a column */
};

/* `factors` is that of K or of V, whichever the part belongs to; it and `rank` do not matter for
 * dense parts, `tokens` is P for others. */
struct part_form parts_form(enum page_part part, pkv_factors factors, size_t tokens,
                            size_t head_dim, size_t rank);

size_t parts_bytes(const struct part_form *part, size_t element_bytes);

/* Element [row, column] of a part in f32; `dtype` is the storage type. */
float parts_element(const struct part_form *part, pkv_dtype dtype, const void *data, size_t row,
                    size_t column);

/* Whether the data is what rounding and factorizing make: elements and scales are finite, scales
 * not negative, codes -7 .. 7. */
bool parts_valid(const struct part_form *part, pkv_dtype dtype, const void *data);

/* From the machine's byte order to little-endian, and back. */
void parts_swap(const struct part_form *part, size_t element_bytes, void *data);

#endif
