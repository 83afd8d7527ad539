/* SPDX-License-Identifier: MIT */
/* The sampler against closed forms. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runner/sampler.h"
#include "tests.h"

#define DRAWS 40000

static const struct sampler_options greedy = {
    .temperature = 0, .top_p = 1, .repeat_penalty = 1, .repeat_last = 64, .seed = 42};

/* Unordered, so that ranks and ids differ; they sum to 1. */
static const double shares[6] = {0.05, 0.40, 0.10, 0.02, 0.25, 0.18};

static void share_logits(float logits[6], double temperature)
{
    for (int i = 0; i < 6; i++)
        logits[i] = (float)(temperature * log(shares[i]) - 3);
}

static struct sampler *open_sampler(const struct sampler_options *options, size_t vocabulary)
{
    struct sampler *sampler;
    struct error error;

    ck_assert_msg(sampler_open(options, vocabulary, &sampler, &error), "%s", error.text);
    return sampler;
}

static int32_t choose(struct sampler *sampler, const float *logits, const int32_t *history,
                      size_t count)
{
    struct error error;
    int32_t token;

    ck_assert_msg(sampler_choose(sampler, logits, history, count, &token, &error), "%s",
                  error.text);
    return token;
}

/* Draws often and compares each token's frequency with its probability, within five standard
 * deviations; a token of probability 0 must never come. */
static void check_frequencies(const struct sampler_options *options, const float *logits,
                              const double *expected)
{
    struct sampler *sampler = open_sampler(options, 6);
    int counts[6] = {0};

    for (int i = 0; i < DRAWS; i++)
        counts[choose(sampler, logits, NULL, 0)]++;
    for (int i = 0; i < 6; i++) {
        double deviation = sqrt(DRAWS * expected[i] * (1 - expected[i]));

        ck_assert_msg(fabs(counts[i] - DRAWS * expected[i]) <= 5 * deviation,
                      "token %d: drawn %d times, expected %g +- %g", i, counts[i],
                      DRAWS * expected[i], deviation);
    }
    sampler_close(sampler);
}

START_TEST(test_greedy_takes_the_largest_and_the_lowest_id_on_ties)
{
    const float logits[] = {-5, 2, 7, 7, 1, -INFINITY};
    struct sampler *sampler = open_sampler(&greedy, 6);

    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(choose(sampler, logits, NULL, 0), 2);
    sampler_close(sampler);
}
END_TEST

/* A penalty below 1 would make the first logit infinite, and every difference to it with it. */
START_TEST(test_a_penalty_keeps_logits_finite)
{
    const float logits[] = {3e38f, -3e38f, 1};
    const int32_t history[] = {0, 1};
    struct sampler_options options = greedy;

    options.repeat_penalty = 0.001f;
    for (int temperature = 0; temperature < 2; temperature++) {
        options.temperature = (float)temperature;
        struct sampler *sampler = open_sampler(&options, 3);

        ck_assert_int_eq(choose(sampler, logits, history, 2), 0);
        sampler_close(sampler);
    }
}
END_TEST

START_TEST(test_frequencies_follow_the_softmax)
{
    struct sampler_options options = greedy;
    float logits[6];

    share_logits(logits, 1);
    options.temperature = 1;
    check_frequencies(&options, logits, shares);

    /* Logits T ln p at temperature T have shares p. */
    share_logits(logits, 0.25);
    options.temperature = 0.25f;
    check_frequencies(&options, logits, shares);
}
END_TEST

START_TEST(test_top_k_keeps_the_likeliest)
{
    struct sampler_options options = greedy;
    const double kept = 0.40 + 0.25 + 0.18;
    const double expected[6] = {0, 0.40 / kept, 0, 0, 0.25 / kept, 0.18 / kept};
    float logits[6];

    share_logits(logits, 1);
    options.temperature = 1;
    options.top_k = 3;
    check_frequencies(&options, logits, expected);
    options.top_k = 600;
    check_frequencies(&options, logits, shares);
}
END_TEST

START_TEST(test_top_p_keeps_the_smallest_set_that_reaches_it)
{
    struct sampler_options options = greedy;
    const double expected[6] = {0, 0.40 / 0.65, 0, 0, 0.25 / 0.65, 0};
    const double one[6] = {0, 1, 0, 0, 0, 0};
    float logits[6];

    share_logits(logits, 1);
    options.temperature = 1;
    options.top_p = 0.6f;
    check_frequencies(&options, logits, expected);
    options.top_p = 1e-6f;
    check_frequencies(&options, logits, one);
}
END_TEST

START_TEST(test_top_p_counts_the_shares_within_top_k)
{
    struct sampler_options options = greedy;
    const double two[6] = {0, 0.40 / 0.65, 0, 0, 0.25 / 0.65, 0};
    const double one[6] = {0, 1, 0, 0, 0, 0};
    float logits[6];

    share_logits(logits, 1);
    options.temperature = 1;
    options.top_k = 3;
    options.top_p = 0.6f; /* 0.40 < 0.6 * 0.83 = 0.498 */
    check_frequencies(&options, logits, two);
    options.top_p = 0.45f; /* 0.45 * 0.83 = 0.3735 < 0.40 < 0.45 */
    check_frequencies(&options, logits, one);
}
END_TEST

START_TEST(test_min_p_drops_what_is_far_below_the_likeliest)
{
    struct sampler_options options = greedy;
    const double kept = 0.40 + 0.25 + 0.18; /* 0.3 * 0.40 = 0.12 */
    const double expected[6] = {0, 0.40 / kept, 0, 0, 0.25 / kept, 0.18 / kept};
    float logits[6];

    share_logits(logits, 1);
    options.temperature = 1;
    options.min_p = 0.3f;
    check_frequencies(&options, logits, expected);
}
END_TEST

START_TEST(test_penalty_divides_positive_and_multiplies_negative_logits)
{
    struct sampler_options options = greedy;
    const float positive[] = {4, 3, 1, 0, 0, 0};
    const float negative[] = {-1, -1.5f, -9, -9, -9, -9};
    const int32_t twice[] = {0, 0};
    const int32_t history[] = {0, 5};
    struct sampler *sampler;

    options.repeat_penalty = 1.3f; /* 4 / 1.3 = 3.08 > 3, but 4 / 1.3 / 1.3 = 2.4 < 3 */
    sampler = open_sampler(&options, 6);
    ck_assert_int_eq(choose(sampler, positive, NULL, 0), 0);
    ck_assert_int_eq(choose(sampler, positive, twice, 2), 0);
    ck_assert_int_eq(choose(sampler, negative, twice, 2), 0);
    sampler_close(sampler);

    options.repeat_penalty = 1.6f;
    sampler = open_sampler(&options, 6);
    ck_assert_int_eq(choose(sampler, positive, twice, 1), 1);
    ck_assert_int_eq(choose(sampler, negative, twice, 1), 1);
    ck_assert_int_eq(choose(sampler, positive, NULL, 0), 0); /* nothing is left of the last call */
    sampler_close(sampler);

    options.repeat_last = 1;
    sampler = open_sampler(&options, 6);
    ck_assert_int_eq(choose(sampler, positive, history, 2), 0);
    ck_assert_int_eq(choose(sampler, positive, history, 1), 1);
    sampler_close(sampler);
}
END_TEST

START_TEST(test_the_seed_decides_the_draws)
{
    /* Of 1000 equal logits a draw u takes floor(1000 u); these come from an independent
     * implementation of xoshiro256** seeded by splitmix64 from 42. */
    const int32_t expected[] = {83, 378, 680, 924, 991, 769, 719, 850, 761, 583, 682, 290};
    struct sampler_options options = greedy;
    float logits[1000];
    struct sampler *sampler;
    int different = 0;

    for (int i = 0; i < 1000; i++)
        logits[i] = -1.25f;
    options.temperature = 0.7f;
    sampler = open_sampler(&options, 1000);
    for (int i = 0; i < 12; i++)
        ck_assert_int_eq(choose(sampler, logits, NULL, 0), expected[i]);
    sampler_close(sampler);

    options.seed = 43;
    sampler = open_sampler(&options, 1000);
    for (int i = 0; i < 12; i++)
        different += choose(sampler, logits, NULL, 0) != expected[i];
    sampler_close(sampler);
    ck_assert_int_gt(different, 6);
}
END_TEST

START_TEST(test_logits_far_apart)
{
    struct sampler_options options = greedy;
    const float logits[] = {-1e30f, 88, 1e30f, -INFINITY, 3e38f, -3e38f};
    struct sampler *sampler;

    options.temperature = 1e-3f;
    sampler = open_sampler(&options, 6);
    for (int i = 0; i < 100; i++)
        ck_assert_int_eq(choose(sampler, logits, NULL, 0), 4);
    sampler_close(sampler);
}
END_TEST

START_TEST(test_a_logit_that_is_no_number_is_named)
{
    float logits[] = {1, 2, NAN, 4, 5, 6};
    const int32_t outside[] = {1, 6};
    struct sampler_options options = greedy;
    struct sampler *sampler = open_sampler(&greedy, 6);
    struct error error;
    int32_t token;

    ck_assert(!sampler_choose(sampler, logits, NULL, 0, &token, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "token 2"));
    logits[2] = 3;
    logits[5] = INFINITY;
    ck_assert(!sampler_choose(sampler, logits, NULL, 0, &token, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "token 5"));
    for (int i = 0; i < 6; i++)
        logits[i] = -INFINITY;
    ck_assert(!sampler_choose(sampler, logits, NULL, 0, &token, &error));
    sampler_close(sampler);

    options.repeat_penalty = 1.1f;
    sampler = open_sampler(&options, 6);
    share_logits(logits, 1);
    ck_assert(!sampler_choose(sampler, logits, outside, 2, &token, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "6 is not in the vocabulary"));
    sampler_close(sampler);
}
END_TEST

START_TEST(test_options_out_of_range_are_refused)
{
    const struct {
        const char *name;
        struct sampler_options options;
    } wrong[] = {
        {"temperature", {.temperature = -1, .top_p = 1, .repeat_penalty = 1}},
        {"temperature", {.temperature = NAN, .top_p = 1, .repeat_penalty = 1}},
        {"top-p", {.top_p = 0, .repeat_penalty = 1}},
        {"top-p", {.top_p = 1.5f, .repeat_penalty = 1}},
        {"min-p", {.top_p = 1, .min_p = 1, .repeat_penalty = 1}},
        {"min-p", {.top_p = 1, .min_p = -0.1f, .repeat_penalty = 1}},
        {"repeat penalty", {.top_p = 1, .repeat_penalty = 0}},
    };
    struct sampler *sampler;
    struct error error;

    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ck_assert(!sampler_open(&wrong[i].options, 6, &sampler, &error));
        ck_assert_ptr_null(sampler);
        ck_assert_msg(strncmp(error.text, wrong[i].name, strlen(wrong[i].name)) == 0, "%s",
                      error.text);
    }
    ck_assert(!sampler_open(&greedy, 0, &sampler, &error));
    sampler_close(NULL);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("sampler");
    TCase *tests = tcase_create("all");

    tcase_add_test(tests, test_greedy_takes_the_largest_and_the_lowest_id_on_ties);
    tcase_add_test(tests, test_a_penalty_keeps_logits_finite);
    tcase_add_test(tests, test_frequencies_follow_the_softmax);
    tcase_add_test(tests, test_top_k_keeps_the_likeliest);
    tcase_add_test(tests, test_top_p_keeps_the_smallest_set_that_reaches_it);
    tcase_add_test(tests, test_top_p_counts_the_shares_within_top_k);
    tcase_add_test(tests, test_min_p_drops_what_is_far_below_the_likeliest);
    tcase_add_test(tests, test_penalty_divides_positive_and_multiplies_negative_logits);
    tcase_add_test(tests, test_the_seed_decides_the_draws);
    tcase_add_test(tests, test_logits_far_apart);
    tcase_add_test(tests, test_a_logit_that_is_no_number_is_named);
    tcase_add_test(tests, test_options_out_of_range_are_refused);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
