/* SPDX-License-Identifier: MIT */
/* Random walks over the library's calls: see walk.h. */
#include "walk.h"

#include "tests.h"

struct walker {
    unsigned seed;
    unsigned operation;
    uint32_t random;
};

static uint32_t below(void *opaque, uint32_t limit)
{
    struct walker *walker = opaque;

    walker->random = walker->random * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)(walker->random >> 4) * limit >> 28);
}

static void stop(void *opaque, const char *file, int line, const char *what)
{
    const struct walker *walker = opaque;

    ck_abort_msg("seed %u, operation %u, %s:%d: %s", walker->seed, walker->operation, file, line,
                 what);
}

static void walk_randomly(unsigned seed, unsigned operations, struct walk_counts *counts)
{
    struct walker walker = {.seed = seed, .random = seed * 2654435761u + 99};
    const struct walk_host host = {below, stop, &walker};
    struct walk *walk = walk_open(&host);

    for (; walker.operation < operations; walker.operation++)
        walk_on(walk);
    walk_close(walk, counts);
}

START_TEST(random_walks)
{
    struct walk_counts counts = {0};

    for (unsigned seed = 0; seed < 400; seed++)
        walk_randomly((unsigned)_i * 400 + seed, 600, &counts);
    /* The walks went everywhere. */
    ck_assert_uint_gt(counts.committed, 1000);
    ck_assert_uint_gt(counts.aborted, 100);
    ck_assert_uint_gt(counts.refused, 100);
    ck_assert_uint_gt(counts.forks, 500);
    ck_assert_uint_gt(counts.cuts, 1000);
    ck_assert_uint_gt(counts.rebuilt, 100);
    ck_assert_uint_gt(counts.copied, 100);
    ck_assert_uint_gt(counts.factorized, 500);
    ck_assert_uint_gt(counts.saved, 1000);
    ck_assert_uint_gt(counts.loaded, 500);
    ck_assert_uint_gt(counts.damaged, 500);
    ck_assert_uint_gt(counts.starved, 500);
    ck_assert_uint_gt(counts.late, 100);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("walk");
    TCase *test = tcase_create("walk");

    tcase_add_loop_test(test, random_walks, 0, 5);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
