/* SPDX-License-Identifier: MIT */
/* Scores of answers by what they contain, and intervals of their means. */
#include <math.h>
#include <string.h>

#include "task_score.h"
#include "tests.h"

static struct task_references open_references(const char *json)
{
    json_t *outputs = json_loads(json, 0, NULL);
    struct task_references references;
    struct error error;

    ck_assert_ptr_nonnull(outputs);
    ck_assert_msg(task_references_open(outputs, &references, &error), "%s", error.text);
    json_decref(outputs);
    return references;
}

static void check_score(const char *outputs, enum task_metric metric, const char *answer,
                        double expected)
{
    struct task_references references = open_references(outputs);
    struct error error;
    double score;

    ck_assert(task_score(&references, metric, answer, strlen(answer), &score, &error));
    ck_assert_msg(score == expected, "%s in \"%s\": %g", outputs, answer, score);
    task_references_close(&references);
}

START_TEST(test_scores)
{
    static const struct {
        const char *outputs, *answer;
        double all, part;
    } cases[] = {
        {"[\"12\"]", "It is 12.", 1, 1},
        {"[\"12\"]", "It is 1 2.", 0, 0},
        {"[\"12\"]", "", 0, 0},
        {"[\"a\", \"b\", \"c\", \"d\"]", "B+D", 0.5, 1},
        {"[\"one\", \"Two\"]", "tWO ONE", 1, 1},
        {"[\"same\", \"same\"]", "same", 1, 1},
        {"[\"\\u00c4PFEL\"]", "\xc3\xa4pfel", 1, 1},
        {"[\"\\u0416\"]", "x\xd0\xb6x", 1, 1},
        /* One of two bytes in upper case, of three in lower case. */
        {"[\"\\u023a\"]", "\xe2\xb1\xa5", 1, 1},
        {"[\"stra\\u00dfe\"]", "STRASSE", 0, 0},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_score(cases[i].outputs, TASK_METRIC_ALL, cases[i].answer, cases[i].all);
        check_score(cases[i].outputs, TASK_METRIC_PART, cases[i].answer, cases[i].part);
    }
}
END_TEST

/* Only the first `length` bytes count, also inside a character. */
START_TEST(test_length)
{
    struct task_references references = open_references("[\"ab\"]");
    struct error error;
    double score;

    ck_assert(task_score(&references, TASK_METRIC_ALL, "xab", 2, &score, &error));
    ck_assert(score == 0);
    ck_assert(task_score(&references, TASK_METRIC_ALL, "xab\xc3", 4, &score, &error));
    ck_assert(score == 1);
    task_references_close(&references);
}
END_TEST

START_TEST(test_references)
{
    static const char *const cases[][2] = {
        {"[]", "\"outputs\" is empty"},
        {"[\"a\", 1]", "\"outputs\": element 1 is not a string"},
        {"[\"\"]", "\"outputs\": element 0 is empty"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *outputs = json_loads(cases[i][0], 0, NULL);
        struct task_references references;
        struct error error;

        ck_assert(!task_references_open(outputs, &references, &error));
        ck_assert_str_eq(error.text, cases[i][1]);
        json_decref(outputs);
    }
}
END_TEST

static void check_interval(double mean, size_t count, double low, double high)
{
    double got_low, got_high;

    task_interval(mean, count, &got_low, &got_high);
    ck_assert_msg(fabs(got_low - low) < 5e-5 && fabs(got_high - high) < 5e-5,
                  "%g of %zu: %.5f, %.5f", mean, count, got_low, got_high);
}

/* Values from the closed form, computed elsewhere. */
START_TEST(test_intervals)
{
    check_interval(0, 10, 0, 0.27753);
    check_interval(1, 10, 0.72247, 1);
    check_interval(0.5, 20, 0.29930, 0.70070);
    check_interval(0.81, 263, 0.75826, 0.85282);
}
END_TEST

START_TEST(test_metrics)
{
    enum task_metric metric;
    struct error error;

    ck_assert(task_metric_parse("part", &metric, &error));
    ck_assert_str_eq(task_metric_name(metric), "part");
    ck_assert(task_metric_parse("all", &metric, &error));
    ck_assert_str_eq(task_metric_name(metric), "all");
    ck_assert(!task_metric_parse("any", &metric, &error));
    ck_assert_str_eq(error.text, "--metric: \"any\" is not one of all, part");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("task_score");
    TCase *tests = tcase_create("task_score");

    tcase_add_test(tests, test_scores);
    tcase_add_test(tests, test_length);
    tcase_add_test(tests, test_references);
    tcase_add_test(tests, test_intervals);
    tcase_add_test(tests, test_metrics);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
