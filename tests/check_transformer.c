/* SPDX-License-Identifier: MIT */
/* tools/runner/transformer.c on the tiny models, against logits of an independent implementation.
 */
#include <math.h>
#include <stdlib.h>

#include "transformer.h"
#include "tests.h"

#define IDS    240
#define PROMPT 150

/* Reference and runner both compute in f32, in different orders. */
#define TOLERANCE 2e-3

static const char *const models[] = {"tiny-llama3", "tiny-qwen3"};

struct setup {
    struct model *model;
    struct transformer *transformer;
    pkv_cache *cache;
    pkv_seq *seq;
    int32_t ids[IDS];
    float *logits;
};

static void open_setup(struct setup *s, const char *folder, pkv_factors factors, pkv_dtype dtype,
                       const struct transformer_options *options)
{
    struct error error;
    struct transformer_options chosen = *options;
    pkv_config config;
    json_t *expected = tests_json(tests_path("%s/expected.json", folder));
    json_t *ids = json_object_get(expected, "token_ids");
    ck_assert_uint_eq(json_array_size(ids), IDS);
    for (size_t i = 0; i < IDS; i++)
        s->ids[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    json_decref(expected);

    ck_assert_msg(model_open(tests_path("%s", folder), &s->model, &error), "%s", error.text);
    pkv_config_init(&config);
    transformer_describe(s->model, &config);
    config.factors_k = config.factors_v = factors;
    config.dtype = dtype;
    config.max_tokens = 2 * IDS;
    config.threads = options->threads;
    s->cache = tests_open_cache(&config);
    ck_assert_int_eq(pkv_seq_open(s->cache, &s->seq), PKV_OK);
    chosen.isa = pkv_cache_isa(s->cache);
    ck_assert_msg(transformer_open(s->model, &chosen, &s->transformer, &error), "%s", error.text);
    s->logits = malloc(s->model->vocabulary * sizeof *s->logits);
    ck_assert_ptr_nonnull(s->logits);
}

static void close_setup(struct setup *s)
{
    free(s->logits);
    pkv_cache_close(s->cache);
    transformer_close(s->transformer);
    model_close(s->model);
}

static void feed(struct setup *s, const int32_t *ids, size_t count)
{
    struct error error;

    ck_assert_msg(transformer_step(s->transformer, s->cache, s->seq, ids, count, s->logits, &error),
                  "%s", error.text);
}

static double difference(const float *a, const float *b, size_t n)
{
    double largest = 0;

    for (size_t i = 0; i < n; i++)
        largest = fmax(largest, fabs((double)a[i] - b[i]));
    return largest;
}

START_TEST(test_raw_logits)
{
    const char *folder = models[_i];
    const struct transformer_options options = {.threads = 2};
    struct setup s;

    open_setup(&s, folder, PKV_FACTORS_NONE, PKV_F32, &options);
    size_t vocabulary = s.model->vocabulary;
    float *expected = tests_read_f32(tests_path("%s/logits_raw.f32", folder), IDS * vocabulary);

    for (size_t i = 0; i < IDS; i++) {
        feed(&s, s.ids + i, 1);
        ck_assert_double_le(difference(s.logits, expected + i * vocabulary, vocabulary), TOLERANCE);
    }
    /* The same in steps that cross pages. */
    for (size_t count = 1; count <= IDS; count += count / 3 + 1) {
        ck_assert_int_eq(pkv_seq_truncate(s.seq, 0), PKV_OK);
        feed(&s, s.ids, count);
        ck_assert_double_le(difference(s.logits, expected + (count - 1) * vocabulary, vocabulary),
                            TOLERANCE);
    }
    free(expected);
    close_setup(&s);
}
END_TEST

START_TEST(test_puzzle_logits)
{
    const char *folder = models[_i];
    const struct transformer_options options = {.threads = 2};
    struct setup s;

    open_setup(&s, folder, PKV_FACTORS_NATIVE, PKV_F32, &options);
    size_t vocabulary = s.model->vocabulary;
    float *expected = tests_read_f32(tests_path("%s/logits_puzzle_16_14.f32", folder),
                                     (IDS - PROMPT) * vocabulary);
    float *raw = tests_read_f32(tests_path("%s/logits_raw.f32", folder), IDS * vocabulary);
    double from_raw = 0;

    feed(&s, s.ids, PROMPT);
    for (size_t i = 0; i < IDS - PROMPT; i++) {
        if (i > 0)
            feed(&s, s.ids + PROMPT + i - 1, 1);
        ck_assert_double_le(difference(s.logits, expected + i * vocabulary, vocabulary), TOLERANCE);
        from_raw =
            fmax(from_raw, difference(s.logits, raw + (PROMPT - 1 + i) * vocabulary, vocabulary));
    }
    /* Random weights have flat spectra: nothing factorized would show here. */
    ck_assert_double_ge(from_raw, 1);
    free(raw);
    free(expected);
    close_setup(&s);
}
END_TEST

/* Steps longer than a block of matrix rows, at positions that are no multiple of it. */
START_TEST(test_blocks)
{
    const struct transformer_options options = {.threads = 1};
    struct setup s;
    int32_t ids[2 * IDS];

    open_setup(&s, models[_i], PKV_FACTORS_NONE, PKV_F32, &options);
    size_t vocabulary = s.model->vocabulary;
    float *expected = malloc(vocabulary * sizeof *expected);

    ck_assert_ptr_nonnull(expected);
    for (size_t i = 0; i < 2 * IDS; i++)
        ids[i] = s.ids[i % IDS];
    for (size_t i = 0; i < 2 * IDS; i++)
        feed(&s, ids + i, 1);
    for (size_t i = 0; i < vocabulary; i++)
        expected[i] = s.logits[i];
    for (size_t first = 1; first < 2 * IDS; first += 97) {
        ck_assert_int_eq(pkv_seq_truncate(s.seq, 0), PKV_OK);
        feed(&s, ids, first);
        feed(&s, ids + first, 2 * IDS - first);
        ck_assert_double_le(difference(s.logits, expected, vocabulary), TOLERANCE);
    }
    free(expected);
    close_setup(&s);
}
END_TEST

START_TEST(test_threads)
{
    static const unsigned threads[] = {1, 2, 5};
    uint64_t digest, first_digest = 0;
    float *first = NULL;

    for (size_t t = 0; t < 3; t++) {
        const struct transformer_options options = {.threads = threads[t]};
        struct setup s;

        open_setup(&s, models[_i], PKV_FACTORS_NATIVE, PKV_BF16, &options);
        feed(&s, s.ids, PROMPT);
        for (size_t i = PROMPT; i < IDS; i++)
            feed(&s, s.ids + i, 1);
        ck_assert_int_eq(pkv_seq_digest(s.seq, &digest), PKV_OK);
        if (first == NULL) {
            first = s.logits;
            first_digest = digest;
            s.logits = NULL;
        } else {
            ck_assert_mem_eq(s.logits, first, s.model->vocabulary * sizeof *first);
            ck_assert_uint_eq(digest, first_digest);
        }
        close_setup(&s);
    }
    free(first);
}
END_TEST

static bool stop_after_two(void *opaque, size_t done, size_t layers)
{
    *(size_t *)opaque = layers;
    return done < 2;
}

START_TEST(test_interrupt)
{
    size_t layers = 0;
    const struct transformer_options options = {
        .threads = 1, .layer_done = stop_after_two, .opaque = &layers};
    struct setup s;
    struct error error;
    uint64_t before, after;

    open_setup(&s, models[_i], PKV_FACTORS_NATIVE, PKV_F32, &options);
    ck_assert_int_eq(pkv_seq_digest(s.seq, &before), PKV_OK);
    ck_assert(!transformer_step(s.transformer, s.cache, s.seq, s.ids, 40, NULL, &error));
    ck_assert_str_eq(error.text, "interrupted");
    ck_assert_uint_eq(layers, s.model->layer_count);
    ck_assert_uint_eq(pkv_seq_tokens(s.seq), 0);
    ck_assert_int_eq(pkv_seq_digest(s.seq, &after), PKV_OK);
    ck_assert_uint_eq(before, after);
    close_setup(&s);
}
END_TEST

START_TEST(test_bad_tokens)
{
    const struct transformer_options options = {.threads = 1};
    struct setup s;
    struct error error;

    open_setup(&s, models[_i], PKV_FACTORS_NATIVE, PKV_F32, &options);
    s.ids[3] = (int32_t)s.model->vocabulary;
    ck_assert(!transformer_step(s.transformer, s.cache, s.seq, s.ids, 5, NULL, &error));
    ck_assert_str_eq(error.text, "token 3: id 320 is not in the vocabulary of 320");
    s.ids[0] = -1;
    ck_assert(!transformer_step(s.transformer, s.cache, s.seq, s.ids, 1, NULL, &error));
    ck_assert_str_eq(error.text, "token 0: id -1 is not in the vocabulary of 320");
    ck_assert_uint_eq(pkv_seq_tokens(s.seq), 0);
    /* More than the cache was opened for: the library's own words come through. */
    int32_t *many = calloc(2 * IDS + 1, sizeof *many);
    ck_assert_ptr_nonnull(many);
    ck_assert(!transformer_step(s.transformer, s.cache, s.seq, many, 2 * IDS + 1, NULL, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "KV cache: "));
    free(many);
    close_setup(&s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transformer");
    TCase *tests = tcase_create("transformer");

    tcase_add_loop_test(tests, test_raw_logits, 0, 2);
    tcase_add_loop_test(tests, test_puzzle_logits, 0, 2);
    tcase_add_loop_test(tests, test_blocks, 0, 2);
    tcase_add_loop_test(tests, test_threads, 0, 2);
    tcase_add_loop_test(tests, test_interrupt, 0, 2);
    tcase_add_loop_test(tests, test_bad_tokens, 0, 2);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
