/* SPDX-License-Identifier: MIT */
/*
 * Where the elements of a page lie in the device's memory: row by row or, where the kernels for
 * tensor cores run, as these take their matrix A: in tiles of 16 rows (m) and 16 columns (k), of
 * which lane 4 g + t of a warp has rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
 *
 * Of a dense page A is K [t, i] and V^T [i, t], a lane's 8 elements of a tile 16 bytes. Of a factor
 * page A is L_K [t, c], R_K [c, i], L_V^T [c, t] and R_V^T [i, c], so that c < r <= 16 is a row or
 * a column; where r < 16, lanes have half of a tile's elements or none, and what they lack takes no
 * room: first come the chunks of the lanes that have both halves, then those of the lanes that have
 * one. A chunk is a lane's part of one tile or, with codes, of up to 4, whose words are such that
 * code p and code p + 4 of each become a register of A. Where c is a column and r odd, there is
 * room for one more.
 */
#ifndef PUZZLEKV_GPU_ORDER_H
#define PUZZLEKV_GPU_ORDER_H

#include <stdbool.h>
#include <stddef.h>

extern "C" {
#include "numeric.h"
}

#define TILE 16

/* Lanes that have a chunk, and chunks of both halves and of one: along c, which are values of g
 * where c is a row (8 of them), of t where it is a column (4). */
struct chunk_lanes {
    unsigned full, some;
};

EVERYWHERE struct chunk_lanes chunk_lanes_of(unsigned rank, bool rank_is_row)
{
    const unsigned n = rank_is_row ? rank : (rank + 1) / 2; /* rows, or pairs of columns */
    const unsigned half = rank_is_row ? 8 : 4;
    struct chunk_lanes lanes;

    lanes.full = n > half ? n - half : 0;
    lanes.some = n < half ? n : half;
    return lanes;
}

/* Of a lane: elements before its chunk in a group of tiles, for chunks of 8 `tiles` elements, and
 * how many halves it has. */
struct chunk_place {
    unsigned at, halves;
};

EVERYWHERE struct chunk_place chunk_place_of(unsigned rank, bool rank_is_row, unsigned tiles,
                                             unsigned g, unsigned t)
{
    const struct chunk_lanes lanes = chunk_lanes_of(rank, rank_is_row);
    const unsigned mine = rank_is_row ? g : t;
    const bool whole = mine < lanes.full;
    const unsigned first = whole ? 0 : lanes.full; /* of the lanes that are counted with it */
    const unsigned n = whole ? lanes.full : lanes.some - lanes.full;
    struct chunk_place place;

    place.halves = (mine < lanes.some) + whole;
    place.at = 8 * (rank_is_row ? 4 : 8) * first +
               (whole ? 8 : 4) * (rank_is_row ? 4 * (g - first) + t : n * g + t - first);
    place.at *= tiles;
    return place;
}

/* Elements of a group of tiles, whatever the lane. */
EVERYWHERE unsigned chunk_group(unsigned rank, bool rank_is_row, unsigned tiles)
{
    return rank_is_row ? 16 * tiles * rank : 32 * tiles * ((rank + 1) / 2);
}

/* Tiles of a chunk of codes, with n of them in a part. */
EVERYWHERE unsigned chunk_tiles(bool coded, unsigned n)
{
    return !coded ? 1 : n < 4 ? n : 4;
}

/* Of one part of a factor page. */
struct part_place {
    size_t offset; /* in the page; the codes' scales are at `scales` */
    size_t scales;
    size_t bytes;
    unsigned rows, columns;
    bool coded, row_scales; /* as in parts.h */
    bool fragments;         /* in the order above */
    bool is_key, is_left;
};

EVERYWHERE bool part_rank_is_row(const struct part_place *part)
{
    return part->is_key != part->is_left;
}

EVERYWHERE unsigned part_rank(const struct part_place *part)
{
    return part->is_left ? part->columns : part->rows;
}

/* Its tiles, one after the other along what is not the rank. */
EVERYWHERE unsigned part_tiles(const struct part_place *part)
{
    return (part->is_left ? part->rows : part->columns) / TILE;
}

/* Elements that a part has room for. */
EVERYWHERE size_t part_room(const struct part_place *part)
{
    if (!part->fragments)
        return (size_t)part->rows * part->columns;
    return (size_t)part_tiles(part) * chunk_group(part_rank(part), part_rank_is_row(part), 1);
}

/* Tiles of one of its chunks. */
EVERYWHERE unsigned part_chunk_tiles(const struct part_place *part)
{
    return chunk_tiles(part->coded, part_tiles(part));
}

/* A lane's chunks of a part, each of so many tiles. */
EVERYWHERE struct chunk_place part_chunks(const struct part_place *part, unsigned tiles,
                                          unsigned lane)
{
    return chunk_place_of(part_rank(part), part_rank_is_row(part), tiles, lane / 4, lane % 4);
}

/* Where half `h` of such a chunk has its elements of a tile; with codes the word of these and of
 * the next tile's, where this one's number is even. */
EVERYWHERE size_t half_index(const struct part_place *part, struct chunk_place chunks,
                             unsigned tiles, unsigned tile, unsigned h)
{
    const size_t group = chunk_group(part_rank(part), part_rank_is_row(part), tiles);

    return tile / tiles * group + chunks.at + 4 * tiles * h + tile % tiles / 2 * 8;
}

/* Where element [row, column] of a part lies in it. */
EVERYWHERE size_t part_index(const struct part_place *part, unsigned row, unsigned column)
{
    const bool rank_is_row = part_rank_is_row(part);
    const unsigned m = part->is_key ? row : column;
    const unsigned k = part->is_key ? column : row;
    const unsigned tile = (rank_is_row ? k : m) / TILE;
    const unsigned h = (rank_is_row ? m : k) % 16 / 8;
    const unsigned j = (rank_is_row ? k : m) % 16 / 8;
    unsigned tiles;
    size_t at;

    if (!part->fragments)
        return (size_t)row * part->columns + column;
    tiles = part_chunk_tiles(part);
    at = half_index(part, part_chunks(part, tiles, m % 8 * 4 + k % 8 / 2), tiles, tile, h);
    return at + (part->coded ? k % 2 * 4 + tile % 2 * 2 + j : 2 * j + k % 2);
}

/* The inverse, for element `number` of the four that a half of a lane's chunk has of a tile. False
 * where nothing lies, which is to be 0. */
EVERYWHERE bool part_element_of(const struct part_place *part, unsigned lane, unsigned tile,
                                unsigned h, unsigned number, unsigned *row, unsigned *column)
{
    const bool rank_is_row = part_rank_is_row(part);
    const unsigned j = number / 2;
    const unsigned m = lane / 4 + (rank_is_row ? 8 * h : TILE * tile + 8 * j);
    const unsigned k = lane % 4 * 2 + number % 2 + (rank_is_row ? TILE * tile + 8 * j : 8 * h);

    *row = part->is_key ? m : k;
    *column = part->is_key ? k : m;
    return *row < part->rows && *column < part->columns;
}

/* Where the scale of a row or column of a part of codes lies among them: for fragments in the order
 * in which a lane takes them, t by t for R_K, g by g for V. */
EVERYWHERE size_t scale_index(const struct part_place *part, unsigned i)
{
    if (!part->fragments || (part->is_key && part->is_left))
        return i;
    if (part->is_key)
        return i % 8 / 2 * (part->columns / 4) + i / 16 * 4 + i % 16 / 8 * 2 + i % 2;
    return i % 8 * ((part->row_scales ? part->rows : part->columns) / 8) + i / 8;
}

/* Where element [t, i] of K or V of a dense page of P tokens lies in it. */
EVERYWHERE size_t dense_place(bool fragments, unsigned length, unsigned d, bool is_key, unsigned t,
                              unsigned i)
{
    const unsigned m = is_key ? t : i;
    const unsigned k = is_key ? i : t;
    const unsigned tile = i / TILE * (length / TILE) + t / TILE;
    const size_t at = is_key ? 0 : (size_t)length * d;

    if (!fragments)
        return at + (size_t)t * d + i;
    return at + (size_t)tile * TILE * TILE + (4 * (m % 8) + k % 8 / 2) * 8 + k % 16 / 8 * 4 +
           m % 16 / 8 * 2 + k % 2;
}

#endif
