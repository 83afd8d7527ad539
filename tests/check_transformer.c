/* SPDX-License-Identifier: MIT */
/* tools/runner/transformer.c and both forward passes on the tiny models, against logits of an
 * independent implementation. */
#include "config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf_writer.h"
#include "options.h"
#include "policies/pages.h"
#include "transformer.h"
#include "tests.h"

#define IDS    240
#define PROMPT 150

/* Reference and runner both compute in f32, in different orders. */
#define TOLERANCE 2e-3

static const char *const models[] = {"tiny-llama3", "tiny-qwen3"};

/* One for each way in which an architecture can differ. */
static const char *const variants[] = {"models/qwen2", "models/mistral", "models/llama-linear",
                                       "models/llama-yarn"};
#define VARIANTS (sizeof variants / sizeof variants[0])

/* Everything is on the device that is none, of tests/cuda_host. */
static bool on_device;

struct setup {
    struct device *device;
    struct model *model;
    struct transformer *transformer;
    struct kv_store *store;
    int32_t ids[IDS];
    size_t count; /* of ids */
    float *logits;
};

/* `path` NULL opens the folder's own model, else that file; the ids are the folder's. */
static void open_setup(struct setup *s, const char *folder, const char *path, const char *kv,
                       pkv_dtype dtype, const struct transformer_options *options)
{
    struct error error;
    struct transformer_options chosen = *options;
    struct kv_store_options store = {
        .dtype = dtype, .max_tokens = 2 * IDS, .threads = options->threads};
    struct kv_spec spec;
    json_t *expected = tests_json(tests_path("%s/expected.json", folder));
    json_t *ids = json_object_get(expected, "token_ids");
    s->count = json_array_size(ids);
    ck_assert_uint_ge(s->count, 100);
    ck_assert_uint_le(s->count, IDS);
    for (size_t i = 0; i < s->count; i++)
        s->ids[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    json_decref(expected);

    if (path == NULL)
        path = tests_path("%s", folder);
    ck_assert_msg(device_open(on_device ? DEVICE_CUDA : DEVICE_CPU, true, &s->device, &error), "%s",
                  error.text);
    ck_assert_msg(model_open(path, &s->model, &error), "%s", error.text);
    store.model = s->model;
    store.device = chosen.device = s->device;
    ck_assert_msg(kv_spec_parse(kv, &spec, &error) && kv_spec_resolve(&spec, s->model, &error) &&
                      kv_store_open(&spec, &store, &s->store, &error) &&
                      machine_isa(&chosen.isa, &error),
                  "%s", error.text);
    ck_assert_msg(transformer_open(s->model, &chosen, &s->transformer, &error), "%s", error.text);
    s->logits = malloc(s->model->vocabulary * sizeof *s->logits);
    ck_assert_ptr_nonnull(s->logits);
}

static void close_setup(struct setup *s)
{
    free(s->logits);
    kv_store_close(s->store);
    transformer_close(s->transformer);
    model_close(s->model);
    device_close(s->device);
}

static void feed(struct setup *s, const int32_t *ids, size_t count)
{
    struct error error;

    ck_assert_msg(transformer_step(s->transformer, s->store, ids, count, s->logits, &error), "%s",
                  error.text);
}

static void rewind_setup(struct setup *s)
{
    struct error error;

    ck_assert_msg(kv_store_rewind(s->store, 0, &error), "%s", error.text);
    ck_assert_uint_eq(kv_store_tokens(s->store), 0);
}

static double difference(const float *a, const float *b, size_t n)
{
    double largest = 0;

    for (size_t i = 0; i < n; i++)
        largest = fmax(largest, tests_difference(a[i], b[i]));
    return largest;
}

static void check_raw_logits(const char *folder, const char *path, const char *kv)
{
    const struct transformer_options options = {.threads = 2, .exact = true};
    struct setup s;

    open_setup(&s, folder, path, kv, PKV_F32, &options);
    size_t vocabulary = s.model->vocabulary;
    float *expected = tests_read_f32(tests_path("%s/logits_raw.f32", folder), s.count * vocabulary);

    for (size_t i = 0; i < s.count; i++) {
        feed(&s, s.ids + i, 1);
        ck_assert_double_le(difference(s.logits, expected + i * vocabulary, vocabulary), TOLERANCE);
    }
    /* The same in steps that cross pages. */
    for (size_t count = 1; count <= s.count; count += count / 3 + 1) {
        rewind_setup(&s);
        feed(&s, s.ids, count);
        ck_assert_double_le(difference(s.logits, expected + (count - 1) * vocabulary, vocabulary),
                            TOLERANCE);
    }
    free(expected);
    close_setup(&s);
}

START_TEST(test_raw_logits)
{
    check_raw_logits(models[_i], NULL, "raw");
    if (!on_device)
        check_raw_logits(models[_i], NULL, "static");
}
END_TEST

START_TEST(test_variant_logits)
{
    check_raw_logits(variants[_i], NULL, "raw");
}
END_TEST

/* In Q8_0, with scales that are powers of two, and so exact in f16. */
static void quantise_matrix(struct gguf_writer *writer, const char *name, const struct weight *w)
{
    float *row = tests_allocate(w->columns, sizeof *row);
    struct bytes blocks = {0};

    for (size_t j = 0; j < w->rows; j++) {
        quant_info(w->type)->dequantise((const char *)w->data + j * w->row_bytes, w->columns, row);
        for (const float *x = row; x < row + w->columns; x += 32) {
            float largest = 0;
            int exponent;

            for (size_t i = 0; i < 32; i++)
                largest = fmaxf(largest, fabsf(x[i]));
            frexpf(largest / 127, &exponent);
            exponent = exponent < -14 ? -14 : exponent;

            const uint16_t scale = (uint16_t)((exponent + 15) << 10);

            bytes_append(&blocks, &scale, sizeof scale);
            for (size_t i = 0; i < 32; i++) {
                const int8_t code = (int8_t)rintf(ldexpf(x[i], -exponent));

                bytes_append(&blocks, &code, sizeof code);
            }
        }
    }
    gguf_writer_tensor(writer, name, quant_info(QUANT_Q8_0)->gguf_type, w->columns, w->rows,
                       blocks.data);
    bytes_free(&blocks);
    free(row);
}

/* A matrix under its GGUF name, with rows from one pair's halves side by side if `head_dim` is not
 * 0: conversion writes Llama's q and k so. */
static void convert_matrix(struct gguf_writer *writer, const char *name, const struct weight *w,
                           size_t head_dim, bool quantise)
{
    struct weight converted = *w;
    unsigned char *rows = tests_allocate(w->rows, w->row_bytes);

    for (size_t row = 0; row < w->rows; row++) {
        size_t from = row;

        if (head_dim > 0) {
            size_t place = row % head_dim;

            from = row - place + place / 2 + place % 2 * (head_dim / 2);
        }
        memcpy(rows + row * w->row_bytes, (const char *)w->data + from * w->row_bytes,
               w->row_bytes);
    }
    converted.data = rows;
    if (quantise)
        quantise_matrix(writer, name, &converted);
    else
        gguf_writer_tensor(writer, name, quant_info(w->type)->gguf_type, w->columns, w->rows, rows);
    free(rows);
}

static void convert_layer(struct gguf_writer *writer, const struct model *m, size_t index,
                          bool quantise)
{
    const struct model_layer *layer = &m->layers[index];
    const size_t permuted = m->architecture == MODEL_LLAMA ? m->head_dim : 0;
    const size_t query = m->query_heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    const struct {
        const char *name;
        const float *values;
        size_t count;
    } vectors[] = {
        {"attn_norm.weight", layer->attention_norm, m->hidden},
        {"ffn_norm.weight", layer->ffn_norm, m->hidden},
        {"attn_q_norm.weight", layer->q_norm, m->head_dim},
        {"attn_k_norm.weight", layer->k_norm, m->head_dim},
        {"attn_q.bias", layer->q_bias, query},
        {"attn_k.bias", layer->k_bias, kv},
        {"attn_v.bias", layer->v_bias, kv},
    };
    const struct {
        const char *name;
        const struct weight *weight;
        size_t permuted;
    } matrices[] = {
        {"attn_q", &layer->q, permuted}, {"attn_k", &layer->k, permuted}, {"attn_v", &layer->v, 0},
        {"attn_output", &layer->o, 0},   {"ffn_gate", &layer->gate, 0},   {"ffn_up", &layer->up, 0},
        {"ffn_down", &layer->down, 0},
    };
    char name[64];

    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        if (vectors[i].values == NULL)
            continue;
        snprintf(name, sizeof name, "blk.%zu.%s", index, vectors[i].name);
        gguf_writer_tensor(writer, name, 0, vectors[i].count, 0, vectors[i].values);
    }
    for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++) {
        snprintf(name, sizeof name, "blk.%zu.%s.weight", index, matrices[i].name);
        convert_matrix(writer, name, matrices[i].weight, matrices[i].permuted, quantise);
    }
}

static void convert_number(struct gguf_writer *writer, const struct model *m, const char *key,
                           size_t value)
{
    char name[64];

    snprintf(name, sizeof name, "%s.%s", model_architecture_name(m->architecture), key);
    gguf_writer_uint(writer, name, (uint32_t)value);
}

static void convert_real(struct gguf_writer *writer, const struct model *m, const char *key,
                         double value)
{
    char name[64];

    snprintf(name, sizeof name, "%s.%s", model_architecture_name(m->architecture), key);
    gguf_writer_float(writer, name, (float)value);
}

/* What the usual conversion makes of a folder's model, in its own element type or in Q8_0. */
static void convert_model(const char *folder, const char *path, bool quantise)
{
    struct gguf_writer writer;
    struct model *m;
    struct error error;

    ck_assert_msg(model_open(tests_path("%s", folder), &m, &error), "%s", error.text);
    gguf_writer_start(&writer);
    gguf_writer_string(&writer, "general.architecture", model_architecture_name(m->architecture));
    convert_number(&writer, m, "block_count", m->layer_count);
    convert_number(&writer, m, "context_length", m->context_length);
    convert_number(&writer, m, "embedding_length", m->hidden);
    convert_number(&writer, m, "feed_forward_length", m->intermediate);
    convert_number(&writer, m, "attention.head_count", m->query_heads);
    convert_number(&writer, m, "attention.head_count_kv", m->kv_heads);
    convert_number(&writer, m, "attention.key_length", m->head_dim);
    convert_real(&writer, m, "attention.layer_norm_rms_epsilon", (double)m->rms_epsilon);
    convert_real(&writer, m, "rope.freq_base", m->rope_theta);
    if (m->rope_scaling == MODEL_ROPE_LINEAR) {
        gguf_writer_string(&writer, "llama.rope.scaling.type", "linear");
        convert_real(&writer, m, "rope.scaling.factor", m->rope_factor);
    } else if (m->rope_scaling == MODEL_ROPE_LLAMA3) {
        float *factors = tests_allocate(m->head_dim / 2, sizeof *factors);

        for (size_t i = 0; i < m->head_dim / 2; i++)
            factors[i] = (float)(pow(m->rope_theta, -2.0 * (double)i / (double)m->head_dim) /
                                 (double)m->rope_inverse_frequencies[i]);
        gguf_writer_tensor(&writer, "rope_freqs.weight", 0, m->head_dim / 2, 0, factors);
        free(factors);
    }
    convert_matrix(&writer, "token_embd.weight", &m->token_embedding, 0, quantise);
    for (size_t i = 0; i < m->layer_count; i++)
        convert_layer(&writer, m, i, quantise);
    gguf_writer_tensor(&writer, "output_norm.weight", 0, m->hidden, 0, m->output_norm);
    if (!m->tied_output)
        convert_matrix(&writer, "output.weight", &m->output, 0, quantise);
    gguf_writer_save(&writer, path);
    gguf_writer_free(&writer);
    model_close(m);
}

START_TEST(test_gguf_logits)
{
    static const char *const folders[] = {"tiny-llama3", "tiny-qwen3", "models/qwen2",
                                          "models/llama-linear"};
    char folder[TESTS_FOLDER_BYTES], path[TESTS_FOLDER_BYTES + 16];

    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/model.gguf", folder);
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        convert_model(folders[i], path, false);
        check_raw_logits(folders[i], path, "raw");
    }
    tests_remove_folder(folder);
}
END_TEST

START_TEST(test_puzzle_logits)
{
    const char *folder = models[_i];
    const struct transformer_options options = {.threads = 2, .exact = true};
    struct setup s;

    open_setup(&s, folder, NULL, "puzzle", PKV_F32, &options);
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

/* A rounding flip of a code moves single logits by up to 0.05: so the whole is compared. */
START_TEST(test_int4_logits)
{
    const char *folder = models[_i];
    const struct transformer_options options = {.threads = 2, .exact = true};
    struct setup s;

    open_setup(&s, folder, NULL, "puzzle-int4", PKV_F32, &options);
    size_t vocabulary = s.model->vocabulary;
    size_t count = (IDS - PROMPT) * vocabulary;
    float *expected = tests_read_f32(tests_path("%s/logits_puzzle_16_14_int4.f32", folder), count);
    double squares = 0;

    feed(&s, s.ids, PROMPT);
    for (size_t i = 0; i < count; i++) {
        if (i > 0 && i % vocabulary == 0)
            feed(&s, s.ids + PROMPT + i / vocabulary - 1, 1);
        squares += pow((double)s.logits[i % vocabulary] - expected[i], 2);
    }
    ck_assert_double_le(sqrt(squares / (double)count), 0.02);
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

    open_setup(&s, models[_i], NULL, "raw", PKV_F32, &options);
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
        rewind_setup(&s);
        feed(&s, ids, first);
        feed(&s, ids + first, 2 * IDS - first);
        ck_assert_double_le(difference(s.logits, expected, vocabulary), TOLERANCE);
    }
    free(expected);
    close_setup(&s);
}
END_TEST

/* Weights in Q8_0, with activations as they are and rounded. */
START_TEST(test_threads)
{
    static const unsigned threads[] = {1, 2, 5};
    char folder[TESTS_FOLDER_BYTES], path[TESTS_FOLDER_BYTES + 16];
    uint64_t digest, first_digest = 0;
    float *first = NULL;

    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/model.gguf", folder);
    convert_model(models[_i % 2], path, true);
    for (size_t t = 0; t < 3; t++) {
        const struct transformer_options options = {.threads = threads[t], .exact = _i < 2};
        struct setup s;

        open_setup(&s, models[_i % 2], path, "puzzle", PKV_BF16, &options);
        feed(&s, s.ids, PROMPT);
        for (size_t i = PROMPT; i < IDS; i++)
            feed(&s, s.ids + i, 1);
        ck_assert_int_eq(pkv_seq_digest(pages_sequence(s.store), &digest), PKV_OK);
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
    tests_remove_folder(folder);
}
END_TEST

/* The likeliest token is that of the logits, be it of a prompt, of the first tokens behind it or,
 * on a device, of those that a graph decodes. */
START_TEST(test_next)
{
    const struct transformer_options options = {.threads = 2};
    struct setup a, b;
    struct error error;
    int32_t next;

    open_setup(&a, models[_i], NULL, "puzzle", PKV_BF16, &options);
    open_setup(&b, models[_i], NULL, "puzzle", PKV_BF16, &options);
    for (size_t i = 0; i < IDS; i += i == 0 ? PROMPT : 1) {
        const size_t count = i == 0 ? PROMPT : 1;
        size_t best = 0;

        feed(&a, a.ids + i, count);
        for (size_t j = 1; j < a.model->vocabulary; j++)
            best = a.logits[j] > a.logits[best] ? j : best;
        ck_assert_msg(transformer_next(b.transformer, b.store, b.ids + i, count, &next, &error),
                      "%s", error.text);
        ck_assert_int_eq(next, (int32_t)best);
    }
    close_setup(&a);
    close_setup(&b);
}
END_TEST

/* Unless told not to, activations are rounded, and that moves logits a little. */
START_TEST(test_rounded_logits)
{
    const struct transformer_options exact = {.threads = 2, .exact = true},
                                     rounded = {.threads = 2};
    char folder[TESTS_FOLDER_BYTES], path[TESTS_FOLDER_BYTES + 16];
    struct setup a, b;

    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/model.gguf", folder);
    convert_model(models[_i], path, true);
    open_setup(&a, models[_i], path, "raw", PKV_F32, &exact);
    open_setup(&b, models[_i], path, "raw", PKV_F32, &rounded);
    for (size_t i = 0; i < IDS; i += i == 0 ? PROMPT : 1) {
        const size_t count = i == 0 ? PROMPT : 1;
        double largest = 0, moved;

        feed(&a, a.ids + i, count);
        feed(&b, b.ids + i, count);
        for (size_t j = 0; j < a.model->vocabulary; j++)
            largest = fmax(largest, fabs((double)a.logits[j]));
        moved = difference(a.logits, b.logits, a.model->vocabulary);
        ck_assert_double_gt(moved, 0);
        ck_assert_double_le(moved, 0.2 * largest);
    }
    close_setup(&a);
    close_setup(&b);
    tests_remove_folder(folder);
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

    open_setup(&s, models[_i], NULL, "puzzle", PKV_F32, &options);
    ck_assert_int_eq(pkv_seq_digest(pages_sequence(s.store), &before), PKV_OK);
    ck_assert(!transformer_step(s.transformer, s.store, s.ids, 40, NULL, &error));
    ck_assert_str_eq(error.text, "interrupted");
    ck_assert_uint_eq(layers, s.model->layer_count);
    ck_assert_uint_eq(kv_store_tokens(s.store), 0);
    ck_assert_int_eq(pkv_seq_digest(pages_sequence(s.store), &after), PKV_OK);
    ck_assert_uint_eq(before, after);
    close_setup(&s);
}
END_TEST

START_TEST(test_bad_tokens)
{
    const struct transformer_options options = {.threads = 1};
    struct setup s;
    struct error error;

    open_setup(&s, models[_i], NULL, "puzzle", PKV_F32, &options);
    s.ids[3] = (int32_t)s.model->vocabulary;
    ck_assert(!transformer_step(s.transformer, s.store, s.ids, 5, NULL, &error));
    ck_assert_str_eq(error.text, "token 3: id 320 is not in the vocabulary of 320");
    s.ids[0] = -1;
    ck_assert(!transformer_step(s.transformer, s.store, s.ids, 1, NULL, &error));
    ck_assert_str_eq(error.text, "token 0: id -1 is not in the vocabulary of 320");
    ck_assert_uint_eq(kv_store_tokens(s.store), 0);
    /* More than the store was opened for. */
    int32_t *many = calloc(2 * IDS + 1, sizeof *many);
    ck_assert_ptr_nonnull(many);
    ck_assert(!transformer_step(s.transformer, s.store, many, 2 * IDS + 1, NULL, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "KV cache: "));
    free(many);
    close_setup(&s);
}
END_TEST

/* Stores that share a first step hold, and predict, what each would alone. */
START_TEST(test_shared_step)
{
    static const char *const specs[] = {"raw", "puzzle", "puzzle:rk=3,rv=5", "static"};
    enum { STORES = sizeof specs / sizeof specs[0] };
    const struct transformer_options options = {.threads = 2};
    struct setup alone[STORES], beside[STORES];
    struct kv_store *stores[STORES];
    struct error error;

    for (size_t i = 0; i < STORES; i++) {
        open_setup(&alone[i], models[_i], NULL, specs[i], PKV_BF16, &options);
        open_setup(&beside[i], models[_i], NULL, specs[i], PKV_BF16, &options);
        stores[i] = beside[i].store;
        feed(&alone[i], alone[i].ids, PROMPT);
    }
    size_t bytes = alone[0].model->vocabulary * sizeof *alone[0].logits;

    ck_assert_msg(transformer_step_shared(beside[0].transformer, stores, STORES, beside[0].ids,
                                          PROMPT, beside[0].logits, &error),
                  "%s", error.text);
    ck_assert_mem_eq(beside[0].logits, alone[0].logits, bytes);
    for (size_t i = 0; i < STORES; i++) {
        ck_assert_uint_eq(kv_store_tokens(stores[i]), PROMPT);
        feed(&alone[i], alone[i].ids + PROMPT, 1);
        feed(&beside[i], beside[i].ids + PROMPT, 1);
        /* The exact attention of static has other last bits than the library's. */
        if (strcmp(specs[i], "static") != 0)
            ck_assert_mem_eq(beside[i].logits, alone[i].logits, bytes);
        else
            ck_assert_double_le(
                difference(beside[i].logits, alone[i].logits, alone[i].model->vocabulary), 0.1);
    }
    for (size_t i = 0; i < STORES; i++) {
        close_setup(&alone[i]);
        close_setup(&beside[i]);
    }
}
END_TEST

/* An error in one store leaves all of them as they were. */
START_TEST(test_shared_step_fails)
{
    size_t layers = 0;
    const struct transformer_options options = {
        .threads = 1, .layer_done = stop_after_two, .opaque = &layers};
    struct setup a, b;
    struct error error;

    open_setup(&a, models[_i], NULL, "puzzle", PKV_F32, &options);
    open_setup(&b, models[_i], NULL, "static", PKV_F32, &options);
    struct kv_store *stores[] = {a.store, b.store};

    ck_assert(!transformer_step_shared(a.transformer, stores, 2, a.ids, 40, NULL, &error));
    ck_assert_str_eq(error.text, "interrupted");
    for (size_t i = 0; i < 2; i++) {
        ck_assert_uint_eq(kv_store_tokens(stores[i]), 0);
        ck_assert(kv_store_begin(stores[i], 1, &error));
        kv_store_abort(stores[i]);
    }
    close_setup(&a);
    close_setup(&b);
}
END_TEST

static TCase *case_on_cpu(void)
{
    TCase *tests = tcase_create("cpu");

    tcase_add_loop_test(tests, test_raw_logits, 0, 2);
    tcase_add_loop_test(tests, test_variant_logits, 0, (int)VARIANTS);
    tcase_add_test(tests, test_gguf_logits);
    tcase_add_loop_test(tests, test_puzzle_logits, 0, 2);
    tcase_add_loop_test(tests, test_int4_logits, 0, 2);
    tcase_add_loop_test(tests, test_blocks, 0, 2);
    tcase_add_loop_test(tests, test_threads, 0, 4);
    tcase_add_loop_test(tests, test_next, 0, 2);
    tcase_add_loop_test(tests, test_rounded_logits, 0, 2);
    tcase_add_loop_test(tests, test_interrupt, 0, 2);
    tcase_add_loop_test(tests, test_bad_tokens, 0, 2);
    tcase_add_loop_test(tests, test_shared_step, 0, 2);
    tcase_add_loop_test(tests, test_shared_step_fails, 0, 2);
    return tests;
}

#ifdef HAVE_CUDA_HOST
/* On a device weights and activations are in bf16 unless told not to, which moves each by up to
 * 1/256: that must show, but little. */
START_TEST(test_bf16_logits)
{
    const struct transformer_options exact = {.threads = 2, .exact = true},
                                     rounded = {.threads = 2};
    struct setup a, b;

    open_setup(&a, models[_i], NULL, "raw", PKV_F32, &exact);
    open_setup(&b, models[_i], NULL, "raw", PKV_F32, &rounded);
    for (size_t i = 0; i < IDS; i += i == 0 ? PROMPT : 10) {
        const size_t count = i == 0 ? PROMPT : 10;
        double squares = 0, moved = 0;

        feed(&a, a.ids + i, count);
        feed(&b, b.ids + i, count);
        for (size_t j = 0; j < a.model->vocabulary; j++) {
            squares += (double)a.logits[j] * a.logits[j];
            moved += pow((double)a.logits[j] - b.logits[j], 2);
        }
        ck_assert_double_gt(moved, 0);
        ck_assert_double_le(sqrt(moved / squares), 0.05);
    }
    close_setup(&a);
    close_setup(&b);
}
END_TEST

/* Of stores that are all on one device: as test_shared_step. */
START_TEST(test_shared_step_on_device)
{
    const struct transformer_options options = {.threads = 2};
    struct setup s;
    struct error error;
    struct kv_spec spec;
    struct kv_store *stores[2];

    open_setup(&s, models[_i], NULL, "puzzle", PKV_BF16, &options);
    const struct kv_store_options store = {.model = s.model,
                                           .dtype = PKV_BF16,
                                           .max_tokens = 2 * IDS,
                                           .threads = 2,
                                           .device = s.device};
    uint64_t digest[2];

    stores[0] = s.store;
    ck_assert_msg(
        kv_spec_parse("puzzle", &spec, &error) && kv_spec_resolve(&spec, s.model, &error) &&
            kv_store_open(&spec, &store, &stores[1], &error) &&
            transformer_step_shared(s.transformer, stores, 2, s.ids, PROMPT, s.logits, &error),
        "%s", error.text);
    for (size_t i = 0; i < 2; i++)
        ck_assert_int_eq(pkv_seq_digest(pages_sequence(stores[i]), &digest[i]), PKV_OK);
    ck_assert_uint_eq(digest[0], digest[1]);
    kv_store_close(stores[1]);
    close_setup(&s);
}
END_TEST

static void go_on_device(void)
{
    on_device = true;
}

static TCase *case_on_device(void)
{
    TCase *tests = tcase_create("device");

    tcase_add_checked_fixture(tests, go_on_device, NULL);
    tcase_add_loop_test(tests, test_raw_logits, 0, 2);
    tcase_add_loop_test(tests, test_variant_logits, 0, (int)VARIANTS);
    tcase_add_test(tests, test_gguf_logits);
    tcase_add_loop_test(tests, test_puzzle_logits, 0, 2);
    tcase_add_loop_test(tests, test_int4_logits, 0, 2);
    tcase_add_loop_test(tests, test_next, 0, 2);
    tcase_add_loop_test(tests, test_bf16_logits, 0, 2);
    tcase_add_loop_test(tests, test_interrupt, 0, 2);
    tcase_add_loop_test(tests, test_bad_tokens, 0, 2);
    tcase_add_loop_test(tests, test_shared_step_on_device, 0, 2);
    return tests;
}
#endif

int main(void)
{
    Suite *suite = suite_create("transformer");

    machine_start_blas("check_transformer");
    suite_add_tcase(suite, case_on_cpu());
#ifdef HAVE_CUDA_HOST
    char folder[4096];

    snprintf(folder, sizeof folder, "%s/tests/cuda_host/modules", getenv("PUZZLEKV_BUILD"));
    setenv("PUZZLEKV_MODULES", folder, 1);
    suite_add_tcase(suite, case_on_device());
#endif
    return tests_run(suite);
}
