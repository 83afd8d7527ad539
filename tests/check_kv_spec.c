/* SPDX-License-Identifier: MIT */
/* --kv specs: keys, defaults, ratios, canonical texts, and every refusal. */
#include <stdio.h>
#include <string.h>

#include "kv_spec.h"
#include "policies/pages.h"
#include "tests.h"

static struct kv_spec parsed(const char *text)
{
    struct kv_spec spec;
    struct error error;

    ck_assert_msg(kv_spec_parse(text, &spec, &error), "%s: %s", text, error.text);
    return spec;
}

/* Every key that has a value, in order: "page=32 rk=16". */
static const char *values(const struct kv_spec *spec)
{
    static char text[512];
    size_t length = 0;

    text[0] = '\0';
    for (size_t i = 0; i < spec->policy->key_count; i++) {
        if (spec->values[i].there)
            length += (size_t)snprintf(text + length, sizeof text - length, "%s%s=%g",
                                       length > 0 ? " " : "", spec->policy->keys[i].name,
                                       spec->values[i].number);
    }
    return text;
}

static struct model model_of(size_t head_dim)
{
    return (struct model){.layer_count = 5, .query_heads = 6, .kv_heads = 2, .head_dim = head_dim};
}

START_TEST(test_defaults)
{
    struct kv_spec spec = parsed("puzzle");

    ck_assert_ptr_eq(spec.policy, &policy_puzzle);
    ck_assert_str_eq(values(&spec), "page=32 rk=16 rv=14 sink=1 window=1 factors=0 rope=0");
    spec = parsed("raw");
    ck_assert_ptr_eq(spec.policy, &policy_raw);
    ck_assert_str_eq(values(&spec), "page=32");
    spec = parsed("static");
    ck_assert_ptr_eq(spec.policy, &policy_static);
    ck_assert_str_eq(values(&spec), "");
}
END_TEST

START_TEST(test_every_key)
{
    struct kv_spec spec =
        parsed("puzzle:rope=post,rv=64,window=3,page=64,sink=0,factors=native,rk=40");

    ck_assert_str_eq(values(&spec), "page=64 rk=40 rv=64 sink=0 window=3 factors=0 rope=0");
    ck_assert_double_eq(kv_spec_find(&spec, "rv")->number, 64);
    ck_assert_ptr_null(kv_spec_find(&spec, "ratio"));
    ck_assert_ptr_null(kv_spec_find(&spec, "heavy"));
    spec = parsed("puzzle:rv=1");
    ck_assert_str_eq(values(&spec), "page=32 rk=16 rv=1 sink=1 window=1 factors=0 rope=0");
    spec = parsed("raw:page=256");
    ck_assert_str_eq(values(&spec), "page=256");
}
END_TEST

START_TEST(test_configuration_of_the_library)
{
    struct kv_spec puzzle = parsed("puzzle:page=64,rk=9,rv=8,sink=2,window=3");
    struct kv_spec int4[] = {parsed("puzzle:factors=int4,ratio=0.586"),
                             parsed("puzzle-int4:ratio=0.586"),
                             parsed("puzzle-int4:factors=int4,ratio=0.586")};
    struct kv_spec raw = parsed("raw:page=16");
    const struct model model = model_of(64);
    struct error error;
    pkv_config config;

    ck_assert(kv_spec_resolve(&puzzle, &model, &error));
    pages_configure(&puzzle, &model, &config);
    ck_assert_uint_eq(config.page_tokens, 64);
    ck_assert_uint_eq(config.sink_pages, 2);
    ck_assert_uint_eq(config.window_pages, 3);
    ck_assert_int_eq(config.factors_k, PKV_FACTORS_NATIVE);
    ck_assert_int_eq(config.factors_v, PKV_FACTORS_NATIVE);
    ck_assert_uint_eq(config.rank_k, 9);
    ck_assert_uint_eq(config.rank_v, 8);
    ck_assert_uint_eq(config.layers, 5);
    ck_assert_uint_eq(config.query_heads, 6);
    ck_assert_uint_eq(config.kv_heads, 2);
    ck_assert_uint_eq(config.head_dim, 64);

    for (size_t i = 0; i < sizeof int4 / sizeof *int4; i++) {
        ck_assert(kv_spec_resolve(&int4[i], &model, &error));
        pages_configure(&int4[i], &model, &config);
        ck_assert_int_eq(config.factors_k, PKV_FACTORS_INT4);
        ck_assert_int_eq(config.factors_v, PKV_FACTORS_INT4);
        ck_assert_uint_eq(config.rank_k, 13);
        ck_assert_uint_eq(config.rank_v, 12);
    }

    ck_assert(kv_spec_resolve(&raw, &model, &error));
    pages_configure(&raw, &model, &config);
    ck_assert_uint_eq(config.page_tokens, 16);
    ck_assert_int_eq(config.factors_k, PKV_FACTORS_NONE);
    ck_assert_int_eq(config.factors_v, PKV_FACTORS_NONE);
}
END_TEST

START_TEST(test_ratio_becomes_ranks)
{
    const struct {
        const char *text;
        size_t head_dim, rank_k, rank_v;
    } cases[] = {
        {"puzzle:ratio=0.586", 128, 16, 14},          /* 51.2 x 0.586 = 30.0 */
        {"puzzle:ratio=0.586", 64, 13, 12},           /* 42.67 x 0.586 = 25.0; 13.3 */
        {"puzzle:ratio=0.5", 128, 14, 12},            /* 25.6 -> 26; 13.87 */
        {"puzzle:ratio=1", 128, 27, 24},              /* 51.2 -> 51; 27.2 */
        {"puzzle:page=16,ratio=0.586", 128, 9, 8},    /* 28.44 x 0.586 = 16.7; 9.07 */
        {"puzzle:page=8,ratio=1", 128, 8, 7},         /* 15.06 -> 15; 8: the page's all */
        {"puzzle:ratio=5.86e-1,page=64", 128, 27, 23} /* 85.33 x 0.586 = 50.0; 26.67 */
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kv_spec spec = parsed(cases[i].text);
        const struct model model = model_of(cases[i].head_dim);
        struct error error;

        ck_assert_ptr_nonnull(kv_spec_find(&spec, "ratio"));
        ck_assert_msg(kv_spec_resolve(&spec, &model, &error), "%s", error.text);
        ck_assert_double_eq(kv_spec_find(&spec, "rk")->number, (double)cases[i].rank_k);
        ck_assert_double_eq(kv_spec_find(&spec, "rv")->number, (double)cases[i].rank_v);
        ck_assert_ptr_null(kv_spec_find(&spec, "ratio"));
    }
}
END_TEST

START_TEST(test_the_default_ranks_do_not_depend_on_the_model)
{
    for (size_t dim = 16; dim <= 256; dim *= 2) {
        struct kv_spec spec = parsed("puzzle");
        const struct model model = model_of(dim);
        struct error error;

        ck_assert(kv_spec_resolve(&spec, &model, &error));
        ck_assert_double_eq(kv_spec_find(&spec, "rk")->number, 16);
        ck_assert_double_eq(kv_spec_find(&spec, "rv")->number, 14);
    }
}
END_TEST

START_TEST(test_ranks_that_the_model_cannot_have)
{
    const struct {
        const char *text;
        size_t head_dim;
    } cases[] = {
        {"puzzle", 8},              /* 16 > d */
        {"puzzle:rk=17,rv=1", 16},  /* r_K > d */
        {"puzzle:rk=1,rv=17", 16},  /* r_V > d */
        {"puzzle:ratio=0.01", 128}, /* 0.5 -> 1; r_K = 1, r_V = 0 */
        {"puzzle:ratio=0.001", 64}, /* 0 */
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kv_spec spec = parsed(cases[i].text);
        const struct model model = model_of(cases[i].head_dim);
        struct error error;

        ck_assert_msg(!kv_spec_resolve(&spec, &model, &error), "%s", cases[i].text);
        ck_assert_ptr_nonnull(strstr(error.text, " 1 to "));
    }
}
END_TEST

START_TEST(test_canonical_text)
{
    const struct {
        const char *text, *canonical;
    } cases[] = {
        {"puzzle", "puzzle:page=32,rk=16,rv=14,sink=1,window=1,factors=native,rope=post"},
        {"puzzle:window=2,rk=3",
         "puzzle:page=32,rk=3,rv=14,sink=1,window=2,factors=native,rope=post"},
        {"puzzle:ratio=0.586",
         "puzzle:page=32,rk=13,rv=12,sink=1,window=1,factors=native,rope=post"},
        {"puzzle:factors=int4",
         "puzzle:page=32,rk=16,rv=14,sink=1,window=1,factors=int4,rope=post"},
        {"puzzle-int4:rk=3",
         "puzzle-int4:page=32,rk=3,rv=14,sink=1,window=1,factors=int4,rope=post"},
        {"puzzle:sink=1000000,window=1000000,page=256,rk=64,rv=64",
         "puzzle:page=256,rk=64,rv=64,sink=1000000,window=1000000,factors=native,rope=post"},
        {"raw", "raw:page=32"},
        {"raw:page=8", "raw:page=8"},
        {"static", "static"},
        {"puzzle:rope=pre", "puzzle:page=32,rk=16,rv=14,sink=1,window=1,factors=native,rope=pre"},
        {"int4", "int4:page=32,sink=1,window=1"},
        {"int3:window=0", "int3:page=32,sink=1,window=0"},
        {"global-svd", "global-svd:page=32,sink=1,window=1,ratio=0.6"},
        {"global-svd:ratio=0.123456789012345678",
         "global-svd:page=32,sink=1,window=1,ratio=0.12345678901234568"},
        {"xkv", "xkv:group=4,ratio=0.6"},
        {"h2o", "h2o:heavy=0.3,recent=0.3"},
        {"h2o:recent=0.25,heavy=0", "h2o:heavy=0,recent=0.25"},
        {"streaming", "streaming:sink=4,ratio=0.6"},
        {"streaming:recent=100", "streaming:sink=4,recent=100"},
        {"snapkv", "snapkv:window=32,kernel=5,pool=avg,ratio=0.6"},
        {"snapkv:pool=max,capacity=1024", "snapkv:window=32,kernel=5,pool=max,capacity=1024"},
        {"kivi:bits=4", "kivi:bits=4,group=32,residual=128"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct kv_spec spec = parsed(cases[i].text);
        struct kv_spec again;
        const struct model model = model_of(64);
        char text[KV_SPEC_TEXT_BYTES];

        ck_assert(kv_spec_resolve(&spec, &model, NULL));
        kv_spec_canonical(&spec, text);
        ck_assert_str_eq(text, cases[i].canonical);
        again = parsed(text);
        ck_assert_ptr_eq(again.policy, spec.policy);
        kv_spec_canonical(&again, text);
        ck_assert_str_eq(text, cases[i].canonical);
    }
}
END_TEST

START_TEST(test_refusals)
{
    const struct {
        const char *text, *says; /* a part of the error that says why */
    } cases[] = {
        {"", "unknown policy; there are: puzzle, puzzle-int4, raw, static"},
        {":", "unknown policy"},
        {"puzzl", "unknown policy"},
        {"puzzles", "unknown policy"},
        {"Puzzle", "unknown policy"},
        {"puzzle,rk=3", "unknown policy"},
        {"static:page=8", "unknown key \"page\"; static has: none"},
        {"puzzle:foo=1", "unknown key \"foo\"; puzzle has: page, rk"},
        {"puzzle:RK=1", "unknown key \"RK\""},
        {"puzzle:=1", "unknown key \"\""},
        {"raw:rk=1", "unknown key \"rk\"; raw has: page"},
        {"raw:sink=1", "unknown key \"sink\""},
        {"puzzle:rk", "\"rk\" is not key=value"},
        {"puzzle:rk=4,", "\"\" is not key=value"},
        {"puzzle:,rk=4", "\"\" is not key=value"},
        {"puzzle:", "\"\" is not key=value"},
        {"puzzle::", "\":\" is not key=value"},
        {"puzzle:rk=4,rk=4", "\"rk\" is given twice"},
        {"puzzle:page=32,rk=4,page=64", "\"page\" is given twice"},
        {"puzzle:rk=", "rk: \"\" is not a whole number"},
        {"puzzle:rk=0", "rk: \"0\" is not a whole number from 1"},
        {"puzzle:rk=-1", "is not a whole number"},
        {"puzzle:rk=+1", "is not a whole number"},
        {"puzzle:rk= 1", "is not a whole number"},
        {"puzzle:rk=1.0", "is not a whole number"},
        {"puzzle:rk=0x10", "is not a whole number"},
        {"puzzle:rk=18446744073709551632", "is not a whole number"}, /* 2^64 + 16 */
        {"puzzle:rk=1=2", "is not a whole number"},
        {"puzzle:page=33", "33 is not a multiple of 8"},
        {"raw:page=33", "not a multiple of 8"},
        {"puzzle:page=12", "not a multiple of 8"},
        {"puzzle:page=0", "page: \"0\" is not a whole number from 8 to 256"},
        {"puzzle:page=264", "from 8 to 256"},
        {"puzzle:rk=33", "a rank is at most the page's 32 tokens"},
        {"puzzle:rv=33", "a rank is at most the page's 32 tokens"},
        {"puzzle:page=8", "a rank is at most the page's 8 tokens"},
        {"puzzle:ratio=0.5,rk=4", "ratio stands for rk and rv"},
        {"puzzle:rv=4,ratio=0.5", "ratio stands for rk and rv"},
        {"puzzle:ratio=0", "leaves nothing"},
        {"puzzle:ratio=1.01", "is not a number from 0 to 1"},
        {"puzzle:ratio=-0.5", "is not a number"},
        {"puzzle:ratio=nan", "is not a number"},
        {"puzzle:ratio=inf", "is not a number"},
        {"puzzle:ratio=0x1p-1", "is not a number"},
        {"puzzle:ratio=0.5x", "is not a number"},
        {"puzzle:ratio=.", "is not a number"},
        {"puzzle:ratio=", "is not a number"},
        {"puzzle:sink=1000001", "is not a whole number from 0 to 1000000"},
        {"puzzle:window=-1", "is not a whole number"},
        {"puzzle:factors=int3", "\"int3\" is not known; there is: native|int4"},
        {"puzzle-int4:factors=native", "\"native\" is not known; there is: int4"},
        {"puzzle-int", "unknown policy"},
        {"puzzle:rope=mid", "\"mid\" is not known; there is: post|pre"},
        {"global-svd:ratio=0", "leaves nothing"},
        {"xkv:group=0", "is not a whole number from 1"},
        {"xkv:ratio=0", "leaves nothing"},
        {"h2o:recent=0", "leaves nothing"},
        {"h2o:heavy=1.5", "is not a number from 0 to 1"},
        {"streaming:recent=5,ratio=0.5", "recent and ratio both set the budget"},
        {"streaming:recent=0", "is not a whole number from 1"},
        {"snapkv:capacity=99,ratio=0.5", "capacity and ratio both set the budget"},
        {"snapkv:capacity=32", "capacity=32 has no room beside the window's 32 tokens"},
        {"snapkv:kernel=4", "kernel=4 is not odd"},
        {"kivi:bits=3", "\"3\" is not known; there is: 2|4"},
        {"kivi:group=24", "residual=128 is not a multiple of group=24"},
        {"int4:rk=3", "unknown key \"rk\"; int4 has: page, sink, window"},
    };
    char deep[3 * KV_SPEC_FILE_BYTES] = "puzzle:";
    struct kv_spec spec;
    struct error error;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        error.text[0] = '\0';
        ck_assert_msg(!kv_spec_parse(cases[i].text, &spec, &error), "%s", cases[i].text);
        ck_assert_msg(strncmp(error.text, "--kv ", 5) == 0 && strstr(error.text, cases[i].says),
                      "%s: %s", cases[i].text, error.text);
    }

    memset(deep + 7, 'x', sizeof deep - 8);
    deep[sizeof deep - 1] = '\0';
    ck_assert(!kv_spec_parse(deep, &spec, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "is too long"));
    memset(deep, 'x', sizeof deep - 1);
    ck_assert(!kv_spec_parse(deep, &spec, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "unknown policy"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("kv_spec");
    TCase *tests = tcase_create("all");

    tcase_add_test(tests, test_defaults);
    tcase_add_test(tests, test_every_key);
    tcase_add_test(tests, test_configuration_of_the_library);
    tcase_add_test(tests, test_ratio_becomes_ranks);
    tcase_add_test(tests, test_the_default_ranks_do_not_depend_on_the_model);
    tcase_add_test(tests, test_ranks_that_the_model_cannot_have);
    tcase_add_test(tests, test_canonical_text);
    tcase_add_test(tests, test_refusals);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
