/* SPDX-License-Identifier: MIT */
/* The paper's ablations, against its tables. */
#include <stdio.h>

#include "ablation.h"
#include "tests.h"

static char texts[ABLATION_MOST][ABLATION_TEXT_BYTES];

START_TEST(test_ranks)
{
    /* Table 13's rows. */
    static const int ranks[][2] = {
        {12, 12}, {12, 14}, {14, 12}, {12, 16}, {14, 14}, {16, 12}, {12, 18}, {14, 16}, {16, 14},
        {18, 12}, {12, 20}, {14, 18}, {16, 16}, {18, 14}, {20, 12}, {14, 20}, {16, 18}, {18, 16},
        {20, 14}, {16, 20}, {18, 18}, {20, 16}, {18, 20}, {20, 18}, {20, 20}};
    const size_t rows = sizeof ranks / sizeof *ranks;

    ck_assert_uint_eq(ablation_policies("ranks", 128, texts), rows + 1);
    ck_assert_str_eq(texts[0], "raw");
    for (size_t i = 0; i < rows; i++) {
        char expected[ABLATION_TEXT_BYTES];

        snprintf(expected, sizeof expected, "puzzle:rk=%d,rv=%d", ranks[i][0], ranks[i][1]);
        ck_assert_str_eq(texts[i + 1], expected);
    }
}
END_TEST

START_TEST(test_pages)
{
    /* Appendix D.1's ranks. */
    ck_assert_uint_eq(ablation_policies("pages", 128, texts), 4);
    ck_assert_str_eq(texts[1], "puzzle:page=16,rk=9,rv=9");
    ck_assert_str_eq(texts[2], "puzzle:page=32,rk=16,rv=16");
    ck_assert_str_eq(texts[3], "puzzle:page=64,rk=27,rv=27");
    /* 16 (32 + 64) / (32 64) = 0.75 of a dense page: 9.6 and 24 */
    ck_assert_uint_eq(ablation_policies("pages", 64, texts), 4);
    ck_assert_str_eq(texts[1], "puzzle:page=16,rk=10,rv=10");
    ck_assert_str_eq(texts[2], "puzzle:page=32,rk=16,rv=16");
    ck_assert_str_eq(texts[3], "puzzle:page=64,rk=24,rv=24");
}
END_TEST

START_TEST(test_others)
{
    struct error error;

    ck_assert_uint_eq(ablation_policies("rope", 128, texts), 3);
    ck_assert_str_eq(texts[1], "puzzle:rk=16,rv=16,rope=pre");
    ck_assert_str_eq(texts[2], "puzzle:rk=16,rv=16,rope=post");
    ck_assert_uint_eq(ablation_policies("precision", 128, texts), 5);
    ck_assert_str_eq(texts[4], "puzzle-int4");
    ck_assert(ablation_check("precision", &error));
    ck_assert(!ablation_check("rank", &error));
    ck_assert_str_eq(error.text,
                     "--ablation: \"rank\" is not one of ranks, pages, rope, precision");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("ablation");
    TCase *tests = tcase_create("ablation");

    tcase_add_test(tests, test_ranks);
    tcase_add_test(tests, test_pages);
    tcase_add_test(tests, test_others);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
