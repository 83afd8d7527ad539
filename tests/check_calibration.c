/* SPDX-License-Identifier: MIT */
/* tools/calibration.c on the tiny models: what it measures, and files that do not fit. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calibration.h"
#include "gguf_writer.h"
#include "options.h"
#include "tests.h"
#include "transformer.h"

#define SEQUENCES 3
#define LENGTH    37

static const char *const models[] = {"tiny-llama3", "tiny-qwen3"};

static char folder[TESTS_FOLDER_BYTES];
static char path[TESTS_FOLDER_BYTES + 32];
static struct error error;

static void setup(void)
{
    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/calibration.safetensors", folder);
}

static void teardown(void)
{
    tests_remove_folder(folder);
}

static struct model *open_model(const char *name)
{
    struct model *model;

    ck_assert_msg(model_open(tests_path("%s", name), &model, &error), "%s", error.text);
    return model;
}

static struct kv_value file_name(void)
{
    return (struct kv_value){
        .there = true, .typed = true, .file = path, .file_length = strlen(path)};
}

static struct calibration *open_file(const struct model *model)
{
    const struct kv_value name = file_name();
    struct calibration *calibration;

    ck_assert_msg(calibration_open(&name, model, &calibration, &error), "%s", error.text);
    return calibration;
}

static void expect_failure(const struct model *model, const char *what)
{
    const struct kv_value name = file_name();
    struct calibration *calibration = (struct calibration *)&error;

    error.text[0] = '\0';
    ck_assert(!calibration_open(&name, model, &calibration, &error));
    ck_assert_ptr_null(calibration);
    tests_check_error(error.text, path, what);
}

/* ---- Measuring ------------------------------------------------------------------------------- */

/* A store that sums up what it sees, one element after the other. */
struct witness {
    struct kv_store store;
    double *hidden, *k, *v; /* as in the file, but sums, in the model's order */
};

static void add_outer(const float *x, size_t n, double *sum)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < n; j++)
            sum[i * n + j] += (double)x[i] * x[j];
    }
}

static bool look(struct kv_store *store, const struct kv_layer *io, struct error *ignored)
{
    struct witness *w = (struct witness *)store;
    const struct model *m = store->options.model;
    const size_t d = m->head_dim;

    (void)ignored;
    for (size_t t = 0; t < io->count; t++) {
        add_outer(io->hidden + t * m->hidden, m->hidden,
                  w->hidden + io->layer * m->hidden * m->hidden);
        for (size_t h = 0; h < m->kv_heads; h++) {
            const size_t from = (t * m->kv_heads + h) * d;
            const size_t to = (io->layer * m->kv_heads + h) * d * d;

            add_outer(io->k + from, d, w->k + to);
            add_outer(io->v + from, d, w->v + to);
        }
    }
    return true;
}

static bool forget(struct kv_store *store, size_t *tokens, struct error *ignored)
{
    (void)store;
    (void)ignored;
    *tokens = 0;
    return true;
}

static const struct kv_store_operations witness_operations = {
    .reads_hidden = true, .layer = look, .rewind = forget};
static const struct policy witness_policy = {.name = "witness"};

/* Random tokens; writes the probe's file, and what the witness has seen if it is not NULL. */
static void measure(const struct model *model, unsigned threads, struct witness *witness)
{
    const struct transformer_options options = {.threads = threads, .isa = "generic"};
    const struct kv_store_options cache = {
        .model = model, .dtype = PKV_F32, .max_tokens = LENGTH, .threads = threads};
    const struct calibration_source source = {SEQUENCES, LENGTH, 42};
    struct transformer *transformer;
    struct kv_store *stores[3];
    struct kv_spec spec;
    int32_t ids[LENGTH];
    FILE *file;

    tests_seed(3);
    ck_assert(transformer_open(model, &options, &transformer, &error));
    ck_assert(kv_spec_parse("static", &spec, &error));
    ck_assert(kv_store_open(&spec, &cache, &stores[0], &error));
    ck_assert(calibration_probe_open(model, LENGTH, threads, &stores[1], &error));
    if (witness != NULL) {
        const size_t d = model->head_dim, heads = model->layer_count * model->kv_heads;

        *witness = (struct witness){
            .store = {.operations = &witness_operations, .policy = &witness_policy},
            .hidden = tests_allocate(model->layer_count * model->hidden * model->hidden,
                                     sizeof *witness->hidden),
            .k = tests_allocate(heads * d * d, sizeof *witness->k),
            .v = tests_allocate(heads * d * d, sizeof *witness->v)};
        witness->store.options = cache;
        witness->store.options.max_step_tokens = LENGTH;
        stores[2] = &witness->store;
    }
    for (size_t i = 0; i < SEQUENCES; i++) {
        for (size_t t = 0; t < LENGTH; t++)
            ids[t] = (int32_t)(tests_random() % model->vocabulary);
        for (size_t s = 0; s < 2 + (witness != NULL); s++)
            ck_assert(kv_store_rewind(stores[s], 0, &error));
        ck_assert_msg(transformer_step_shared(transformer, stores, 2 + (witness != NULL), ids,
                                              LENGTH, NULL, &error),
                      "%s", error.text);
    }
    file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_msg(calibration_write(stores[1], &source, file, path, &error), "%s", error.text);
    ck_assert_int_eq(fclose(file), 0);
    kv_store_close(stores[1]);
    kv_store_close(stores[0]);
    transformer_close(transformer);
}

static void compare(const double *moment, const double *sum, size_t n)
{
    double largest = 0;

    for (size_t i = 0; i < n * n; i++)
        largest = fmax(largest, fabs(sum[i]) / (SEQUENCES * LENGTH));
    for (size_t i = 0; i < n * n; i++)
        require_msg(fabs(moment[i] - sum[i] / (SEQUENCES * LENGTH)) <= 1e-6 * largest,
                    "element %zu: %g", i, moment[i]);
}

START_TEST(test_moments)
{
    struct model *model = open_model(models[_i]);
    const size_t d = model->head_dim;
    double *moment = tests_allocate(model->hidden * model->hidden + d * d, sizeof *moment);
    struct calibration *calibration;
    struct witness witness;

    measure(model, 2, &witness);
    calibration = open_file(model);
    ck_assert(!calibration_has_fisher(calibration));
    for (size_t l = 0; l < model->layer_count; l++) {
        ck_assert(calibration_hidden(calibration, l, moment, &error));
        compare(moment, witness.hidden + l * model->hidden * model->hidden, model->hidden);
        for (size_t h = 0; h < model->kv_heads; h++) {
            const size_t at = (l * model->kv_heads + h) * d * d;

            ck_assert(calibration_head(calibration, CALIBRATION_K, l, h, moment, &error));
            compare(moment, witness.k + at, d);
            ck_assert(calibration_head(calibration, CALIBRATION_V, l, h, moment, &error));
            compare(moment, witness.v + at, d);
        }
    }
    calibration_close(calibration);
    free(witness.hidden);
    free(witness.k);
    free(witness.v);
    free(moment);
    model_close(model);
}
END_TEST

static char *read_file(size_t *size)
{
    FILE *file = fopen(path, "rb");
    char *data;

    ck_assert_ptr_nonnull(file);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    data = tests_allocate(*size, 1);
    ck_assert_uint_eq(fread(data, 1, *size, file), *size);
    fclose(file);
    return data;
}

START_TEST(test_threads_change_nothing)
{
    struct model *model = open_model(models[0]);
    size_t sizes[2];
    char *files[2];

    for (unsigned i = 0; i < 2; i++) {
        measure(model, 1 + 2 * i, NULL);
        files[i] = read_file(&sizes[i]);
    }
    ck_assert_uint_eq(sizes[0], sizes[1]);
    ck_assert_mem_eq(files[0], files[1], sizes[0]);
    free(files[0]);
    free(files[1]);
    model_close(model);
}
END_TEST

/* A model whose pairs lie side by side, as GGUF's Llamas have them, measures the same file, and
 * reads it in its own order. */
START_TEST(test_order_of_keys)
{
    struct model *model = open_model(models[0]);
    const size_t d = model->head_dim, width = model->kv_heads * d;
    struct model turned = *model;
    float *k = tests_allocate(LENGTH * width, sizeof *k), *v = tests_allocate(width, sizeof *v);
    float *hidden = tests_allocate(LENGTH * model->hidden, sizeof *hidden);
    double *moment = tests_allocate(d * d, sizeof *moment);
    double *other = tests_allocate(d * d, sizeof *other);
    const struct calibration_source source = {1, 1, 0};
    struct calibration *calibration;
    struct kv_store *probe;
    FILE *file;

    turned.rope_interleaved = true;
    for (size_t i = 0; i < width; i++) {
        k[i] = tests_random_float();
        v[i] = tests_random_float();
    }
    ck_assert(calibration_probe_open(&turned, 1, 1, &probe, &error));
    ck_assert(kv_store_begin(probe, 1, &error));
    for (size_t l = 0; l < model->layer_count; l++) {
        const struct kv_layer io = {.layer = l, .count = 1, .hidden = hidden, .k = k, .v = v};

        ck_assert(kv_store_layer(probe, &io, &error));
    }
    ck_assert(kv_store_end(probe, &error));
    file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert(calibration_write(probe, &source, file, path, &error));
    fclose(file);
    kv_store_close(probe);

    calibration = open_file(model);
    ck_assert(calibration_head(calibration, CALIBRATION_K, 1, 1, moment, &error));
    for (size_t i = 0; i < d; i++) {
        const size_t from = i < d / 2 ? 2 * i : 2 * (i - d / 2) + 1;

        ck_assert_double_eq_tol(moment[i * d + 3], (double)k[d + from] * k[d + 6], 1e-6);
    }
    ck_assert(calibration_head(calibration, CALIBRATION_V, 1, 1, moment, &error));
    for (size_t i = 0; i < d; i++)
        ck_assert_double_eq_tol(moment[i * d + 3], (double)v[d + i] * v[d + 3], 1e-6);
    calibration_close(calibration);

    calibration = open_file(&turned);
    ck_assert(calibration_head(calibration, CALIBRATION_K, 1, 1, other, &error));
    for (size_t i = 0; i < d; i++)
        ck_assert_double_eq_tol(other[i * d + 3], (double)k[d + i] * k[d + 3], 1e-6);
    calibration_close(calibration);
    free(other);
    free(moment);
    free(hidden);
    free(v);
    free(k);
    model_close(model);
}
END_TEST

/* ---- Files that do not fit ------------------------------------------------------------------- */

/* Replaces the first `from` in the file by as many characters. */
static void patch(const char *from, const char *to)
{
    size_t size, at = 0;
    char *data = read_file(&size);

    ck_assert_uint_eq(strlen(from), strlen(to));
    while (at + strlen(from) <= size && memcmp(data + at, from, strlen(from)) != 0)
        at++;
    ck_assert_msg(at + strlen(from) <= size, "there is no %s", from);
    memcpy(data + at, to, strlen(to));
    write_file(path, data, size);
    free(data);
}

START_TEST(test_bad_files)
{
    static const char *const patches[][3] = {
        {"puzzlekv-calibration-1", "puzzlekv-calibration-2", "is not a calibration"},
        {"kv_heads=2", "kv_heads=3",
         "is the calibration of another model: it has layers=3,hidden=192,query_heads=6,kv_heads=3,"
         "head_dim=64, this one layers=3,hidden=192,query_heads=6,kv_heads=2,head_dim=64"},
        {"\"geometry\"", "\"geometrx\"", "it has no geometry"},
        {"layers.1.hidden", "layers.7.hidden", "tensor layers.1.hidden: is missing"},
        {"layers.2.k", "layers.9.k", "tensor layers.2.k: is missing"},
        {"layers.0.v", "layers.0.w", "tensor layers.0.v: is missing"},
        {"[2,64,64]", "[64,2,64]", "tensor layers.0.k: does not have the shape [2, 64, 64]"},
        {"[192,192]", "[36864,1]", "tensor layers.0.hidden: does not have the shape [192, 192]"},
        {"F32", "I32", "tensor layers.0.hidden: is of type I32, expected F32"},
    };
    struct model *model = open_model(models[0]), *other = open_model(models[1]);
    size_t size;
    char *good;

    measure(model, 1, NULL);
    good = read_file(&size);
    for (size_t i = 0; i < sizeof patches / sizeof *patches; i++) {
        patch(patches[i][0], patches[i][1]);
        expect_failure(model, patches[i][2]);
        write_file(path, good, size);
    }
    expect_failure(other, "is the calibration of another model");
    write_file(path, good, size - 1);
    expect_failure(model, "truncated");
    write_file(path, "", 0);
    expect_failure(model, "is empty");
    remove(path);
    expect_failure(model, "No such file");
    free(good);
    model_close(other);
    model_close(model);
}
END_TEST

START_TEST(test_elements_that_are_not_finite)
{
    struct model *model = open_model(models[0]);
    double *moment = tests_allocate(model->hidden * model->hidden, sizeof *moment);
    const float nan_value = NAN;
    struct calibration *calibration;
    size_t size;
    char *data;

    measure(model, 1, NULL);
    data = read_file(&size);
    /* The last tensor is layers.2.v. */
    memcpy(data + size - sizeof nan_value, &nan_value, sizeof nan_value);
    write_file(path, data, size);
    calibration = open_file(model);
    ck_assert(calibration_head(calibration, CALIBRATION_V, 2, 0, moment, &error));
    ck_assert(!calibration_head(calibration, CALIBRATION_V, 2, 1, moment, &error));
    tests_check_error(error.text, path, "tensor layers.2.v: element 8191 is not finite");
    ck_assert(calibration_hidden(calibration, 0, moment, &error));
    calibration_close(calibration);
    free(data);
    free(moment);
    model_close(model);
}
END_TEST

START_TEST(test_fisher)
{
    static const float k[] = {1, 2, 3}, v[] = {0, 5, 0};
    static const float bad[][3] = {{1, -1, 0}, {0, 0, 0}, {1, NAN, 2}};
    static const char *const texts[] = {"tensor fisher.v: element 1 is negative",
                                        "tensor fisher.v: is all 0",
                                        "tensor fisher.v: element 1 is not finite"};
    struct model *model = open_model(models[0]);
    struct calibration *calibration;
    double values[3];

    measure(model, 1, NULL);
    tests_add_fisher(path, k, v, 3);
    calibration = open_file(model);
    ck_assert(calibration_has_fisher(calibration));
    ck_assert(calibration_fisher(calibration, CALIBRATION_K, values, &error));
    ck_assert(values[0] == 1 && values[1] == 2 && values[2] == 3);
    ck_assert(calibration_fisher(calibration, CALIBRATION_V, values, &error));
    ck_assert(values[0] == 0 && values[1] == 5 && values[2] == 0);
    calibration_close(calibration);
    for (size_t i = 0; i < 3; i++) {
        measure(model, 1, NULL);
        tests_add_fisher(path, k, bad[i], 3);
        calibration = open_file(model);
        ck_assert(!calibration_fisher(calibration, CALIBRATION_V, values, &error));
        tests_check_error(error.text, path, texts[i]);
        calibration_close(calibration);
    }
    measure(model, 1, NULL);
    tests_add_fisher(path, k, v, 2);
    calibration = open_file(model);
    ck_assert(!calibration_fisher(calibration, CALIBRATION_K, values, &error));
    tests_check_error(error.text, path, "tensor fisher.k: does not have the shape [3]");
    calibration_close(calibration);
    model_close(model);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("calibration");
    TCase *tests = tcase_create("calibration");

    machine_start_blas("check_calibration");
    tcase_add_checked_fixture(tests, setup, teardown);
    tcase_add_loop_test(tests, test_moments, 0, 2);
    tcase_add_test(tests, test_threads_change_nothing);
    tcase_add_test(tests, test_order_of_keys);
    tcase_add_test(tests, test_bad_files);
    tcase_add_test(tests, test_elements_that_are_not_finite);
    tcase_add_test(tests, test_fisher);
    suite_add_tcase(suite, tests);
    return tests_run(suite);
}
