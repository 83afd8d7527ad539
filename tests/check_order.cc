/* SPDX-License-Identifier: MIT */
/* gpu/order.h: where elements of pages lie. */
#include "order.h"

#include <check.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROOM_MAX ((size_t)32 * 128)

static struct part_place make_part(bool is_key, bool is_left, unsigned d, unsigned rank, bool coded)
{
    struct part_place part = {};

    part.rows = is_left ? 32 : rank;
    part.columns = is_left ? rank : d;
    part.coded = coded;
    part.row_scales = !is_key && is_left;
    part.fragments = true;
    part.is_key = is_key;
    part.is_left = is_left;
    return part;
}

/* Every element has a place of its own, which is where the lane that holds it finds it. What is
 * left over is at most one column of an odd rank. */
static void check_part(const struct part_place *part)
{
    const size_t n = (size_t)part->rows * part->columns;
    const size_t room = part_room(part);
    size_t found = 0, unused = 0;
    static bool seen[ROOM_MAX];

    memset(seen, 0, sizeof seen);
    ck_assert_uint_le(room, ROOM_MAX);
    for (unsigned i = 0; i < part_tiles(part) * 32 * 8; i++) {
        const unsigned tile = i / 256, lane = i / 8 % 32, h = i / 4 % 2, number = i % 4;
        const unsigned tiles = part_chunk_tiles(part);
        const struct chunk_place chunks = part_chunks(part, tiles, lane);
        const size_t at = half_index(part, chunks, tiles, tile, h) +
                          (part->coded ? number % 2 * 4 + tile % 2 * 2 + number / 2 : number);
        unsigned row, column;
        bool there;

        if (h >= chunks.halves)
            continue;
        there = part_element_of(part, lane, tile, h, number, &row, &column);
        if (at >= room || seen[at] || (there && part_index(part, row, column) != at))
            ck_abort_msg("[%u, %u] of [%u, %u], %d%d%d: at %zu of %zu", row, column, part->rows,
                         part->columns, part->is_key, part->is_left, part->coded, at, room);
        seen[at] = true;
        found += there;
        unused += !there;
    }
    ck_assert_uint_eq(found, n);
    ck_assert_uint_eq(unused, room - n);
    if (part_rank_is_row(part) || part_rank(part) % 2 == 0)
        ck_assert_uint_eq(unused, 0);
    else
        ck_assert_uint_eq(unused, part->is_left ? part->rows : part->columns);
}

static void check_scales(const struct part_place *part)
{
    const unsigned n = part->row_scales ? part->rows : part->columns;
    bool seen[128] = {};

    for (unsigned i = 0; i < n; i++) {
        const size_t at = scale_index(part, i);

        ck_assert_uint_lt(at, n);
        ck_assert(!seen[at]);
        seen[at] = true;
    }
}

START_TEST(parts)
{
    for (unsigned rank = 1; rank <= 16; rank++) {
        for (unsigned kind = 0; kind < 16; kind++) {
            const struct part_place part =
                make_part(kind & 1, kind & 2, kind & 4 ? 64 : 128, rank, kind & 8);

            check_part(&part);
            check_scales(&part);
        }
    }
}
END_TEST

/* The default page is as long as its rows would be. */
START_TEST(no_room_is_lost)
{
    size_t elements = 0;

    for (unsigned kind = 0; kind < 4; kind++) {
        const struct part_place part =
            make_part(kind & 1, kind & 2, 128, kind & 1 ? 16 : 14, false);

        elements += part_room(&part);
    }
    ck_assert_uint_eq(2 * elements, 9600);
}
END_TEST

START_TEST(dense_pages)
{
    for (unsigned d = 64; d <= 128; d *= 2) {
        static bool seen[2 * ROOM_MAX];

        memset(seen, 0, sizeof seen);
        for (unsigned n = 0; n < 2 * 32 * d; n++) {
            const bool is_key = n < 32 * d;
            const size_t at = dense_place(true, 32, d, is_key, n / d % 32, n % d);

            ck_assert_uint_lt(at, 2 * 32 * d);
            ck_assert(is_key == (at < 32 * d));
            ck_assert(!seen[at]);
            seen[at] = true;
            ck_assert_uint_eq(dense_place(false, 32, d, is_key, n / d % 32, n % d), n);
        }
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("order");
    TCase *test = tcase_create("order");
    SRunner *runner;
    int failed;

    tcase_add_test(test, parts);
    tcase_add_test(test, no_room_is_lost);
    tcase_add_test(test, dense_pages);
    suite_add_tcase(suite, test);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
