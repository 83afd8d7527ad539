/* SPDX-License-Identifier: MIT */
/* Model files: the fixtures, made-up GGUF models, and models that must be refused. */
#define _GNU_SOURCE /* memmem */
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../tools/runner/model.h"
#include "gguf_writer.h"
#include "tests.h"

static char folder[TESTS_FOLDER_BYTES];
static char gguf_path[TESTS_FOLDER_BYTES + 32];
static char config_path[TESTS_FOLDER_BYTES + 32];
static char tensors_path[TESTS_FOLDER_BYTES + 32];
static char index_path[TESTS_FOLDER_BYTES + 32];
static struct gguf_writer writer;
static struct error error;

static void setup(void)
{
    tests_make_folder(folder);
    snprintf(gguf_path, sizeof gguf_path, "%s/model.gguf", folder);
    snprintf(config_path, sizeof config_path, "%s/config.json", folder);
    snprintf(tensors_path, sizeof tensors_path, "%s/model.safetensors", folder);
    snprintf(index_path, sizeof index_path, "%s/model.safetensors.index.json", folder);
    gguf_writer_start(&writer);
}

static void teardown(void)
{
    gguf_writer_free(&writer);
    tests_remove_folder(folder);
}

static struct model *open_good(const char *path)
{
    struct model *model;

    ck_assert_msg(model_open(path, &model, &error), "%s", error.text);
    return model;
}

/* Opening must fail, with and without weights, with a text that has both parts. */
static void expect_failure(const char *path, const char *file, const char *what)
{
    struct model *model = (struct model *)&error;

    for (int header_only = 0; header_only <= 1; header_only++) {
        error.text[0] = '\0';
        ck_assert_msg(!(header_only ? model_open_header : model_open)(path, &model, &error),
                      "opened although: %s", what);
        ck_assert_ptr_null(model);
        tests_check_error(error.text, path, file);
        tests_check_error(error.text, path, what);
    }
}

static void check_weight(const struct weight *weight, enum quant_type type, size_t rows,
                         size_t columns)
{
    size_t row_bytes;

    ck_assert_int_eq(weight->type, type);
    ck_assert_uint_eq(weight->rows, rows);
    ck_assert_uint_eq(weight->columns, columns);
    ck_assert(quant_row_bytes(type, columns, &row_bytes));
    ck_assert_uint_eq(weight->row_bytes, row_bytes);
    ck_assert_ptr_nonnull(weight->data);
}

static float bf16_at(const struct weight *weight, size_t row, size_t column)
{
    const uint16_t *elements = weight->data;

    return quant_bf16_f32(elements[row * weight->columns + column]);
}

/* Allows for the rounding of a reference that was computed in f32. */
static void check_frequency(const struct model *model, size_t i, double expected)
{
    const double got = (double)model->rope_inverse_frequencies[i];

    ck_assert_msg(fabs(got - expected) <= 1e-6 * expected, "%zu: %.9g, expected %.9g", i, got,
                  expected);
}

/* --- fixtures --------------------------------------------------------------------------------- */

START_TEST(opens_tiny_llama3)
{
    /* From the rotary embedding of Hugging Face transformers. */
    static const struct {
        size_t i;
        double frequency;
    } expected[] = {
        {0, 1},
        {4, 0.193922758},
        {8, 0.0273441337},
        {10, 0.00375802116},
        {12, 0.000911583134},
        {16, 0.000176776681},
        {24, 6.64786967e-06},
        {31, 3.7673226e-07},
    };
    struct model *model = open_good(tests_path("tiny-llama3"));

    ck_assert_int_eq(model->architecture, MODEL_LLAMA);
    ck_assert_str_eq(model_architecture_name(model->architecture), "llama");
    ck_assert_uint_eq(model->layer_count, 3);
    ck_assert_uint_eq(model->hidden, 192);
    ck_assert_uint_eq(model->intermediate, 384);
    ck_assert_uint_eq(model->query_heads, 6);
    ck_assert_uint_eq(model->kv_heads, 2);
    ck_assert_uint_eq(model->head_dim, 64);
    ck_assert_uint_eq(model->vocabulary, 320);
    ck_assert_uint_eq(model->context_length, 4096);
    ck_assert_float_eq(model->rms_epsilon, 1e-5f);
    ck_assert(!model->tied_output);
    ck_assert(model->has_weights);
    ck_assert_double_eq(model->rope_theta, 500000);
    ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_LLAMA3);
    ck_assert_double_eq(model->rope_factor, 8);
    ck_assert_double_eq(model->rope_low_frequency_factor, 1);
    ck_assert_double_eq(model->rope_high_frequency_factor, 4);
    ck_assert_double_eq(model->rope_original_context, 512);
    ck_assert(!model->rope_interleaved);
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        check_frequency(model, expected[i].i, expected[i].frequency);

    check_weight(&model->token_embedding, QUANT_BF16, 320, 192);
    check_weight(&model->output, QUANT_BF16, 320, 192);
    ck_assert_ptr_ne(model->output.data, model->token_embedding.data);
    ck_assert_float_eq(model->output_norm[0], 0.921875f);
    ck_assert_float_eq(model->output_norm[191], 0.8828125f);
    for (size_t i = 0; i < 3; i++) {
        const struct model_layer *layer = &model->layers[i];

        ck_assert_ptr_null(layer->q_norm);
        ck_assert_ptr_null(layer->k_norm);
        check_weight(&layer->q, QUANT_BF16, 384, 192);
        check_weight(&layer->k, QUANT_BF16, 128, 192);
        check_weight(&layer->v, QUANT_BF16, 128, 192);
        check_weight(&layer->o, QUANT_BF16, 192, 384);
        check_weight(&layer->gate, QUANT_BF16, 384, 192);
        check_weight(&layer->up, QUANT_BF16, 384, 192);
        check_weight(&layer->down, QUANT_BF16, 192, 384);
    }
    ck_assert_float_eq(model->layers[2].attention_norm[1], 1.2421875f);
    ck_assert_float_eq(model->layers[2].attention_norm[191], 0.9375f);
    ck_assert_float_eq(model->layers[2].ffn_norm[2], 1.078125f);
    ck_assert_float_eq(model->layers[2].ffn_norm[191], 1.1328125f);
    ck_assert_float_eq(bf16_at(&model->layers[1].down, 0, 1), -0.09228515625f);
    ck_assert_float_eq(bf16_at(&model->layers[1].down, 191, 383), 0.0673828125f);
    model_close(model);
}
END_TEST

START_TEST(opens_tiny_qwen3)
{
    struct model *model = open_good(tests_path("tiny-qwen3"));

    ck_assert_int_eq(model->architecture, MODEL_QWEN3);
    ck_assert_str_eq(model_architecture_name(model->architecture), "qwen3");
    ck_assert_uint_eq(model->hidden, 160);
    ck_assert_uint_eq(model->intermediate, 320);
    ck_assert_uint_eq(model->query_heads, 4);
    ck_assert_uint_eq(model->kv_heads, 2);
    ck_assert_uint_eq(model->head_dim, 128);
    ck_assert_float_eq(model->rms_epsilon, 1e-6f);
    ck_assert(model->tied_output);
    ck_assert_ptr_eq(model->output.data, model->token_embedding.data);
    check_weight(&model->output, QUANT_BF16, 320, 160);
    ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_PLAIN);
    ck_assert(!model->rope_interleaved);
    check_frequency(model, 0, 1);
    check_frequency(model, 4, 0.421696514);
    check_frequency(model, 63, 1.24093776e-06);
    check_weight(&model->layers[1].q, QUANT_BF16, 512, 160);
    check_weight(&model->layers[1].o, QUANT_BF16, 160, 512);
    ck_assert_float_eq(model->layers[1].q_norm[2], 1.2890625f);
    ck_assert_float_eq(model->layers[1].q_norm[127], 1.1953125f);
    ck_assert_float_eq(model->layers[1].k_norm[1], 1.125f);
    ck_assert_float_eq(model->layers[1].k_norm[127], 0.98828125f);
    ck_assert_float_eq(model->layers[2].attention_norm[0], 0.859375f);
    ck_assert_float_eq(model->layers[2].ffn_norm[159], 0.9765625f);
    model_close(model);
}
END_TEST

START_TEST(opens_several_files)
{
    struct model *model = open_good(tests_path("models/mistral"));

    ck_assert_int_eq(model->architecture, MODEL_MISTRAL);
    ck_assert_uint_eq(model->layer_count, 2);
    check_weight(&model->layers[0].q, QUANT_BF16, 128, 64);
    check_weight(&model->layers[1].down, QUANT_BF16, 64, 96);
    model_close(model);
}
END_TEST

START_TEST(header_has_shapes_but_no_norms)
{
    struct model *model;

    ck_assert_msg(model_open_header(tests_path("tiny-qwen3"), &model, &error), "%s", error.text);
    ck_assert(model->has_weights);
    ck_assert_uint_eq(model->layer_count, 3);
    ck_assert_uint_eq(model->vocabulary, 320);
    check_weight(&model->layers[2].down, QUANT_BF16, 160, 320);
    ck_assert_ptr_null(model->output_norm);
    ck_assert_ptr_null(model->layers[0].attention_norm);
    ck_assert_ptr_null(model->layers[0].q_norm);
    model_close(model);
    model_close(NULL);
}
END_TEST

/* --- changed copies of the fixtures ----------------------------------------------------------- */

static json_t *load_config(const char *model)
{
    return tests_json(tests_path("%s/config.json", model));
}

/* Sets a key to JSON text, or deletes it if that is NULL. */
static void set(json_t *config, const char *key, const char *value)
{
    if (value == NULL)
        json_object_del(config, key);
    else
        ck_assert_int_eq(json_object_set_new(config, key, json_loads(value, JSON_DECODE_ANY, NULL)),
                         0);
}

/* Makes the folder: this configuration beside the fixture's tensors. */
static void write_folder(const char *model, const json_t *config)
{
    char *absolute = realpath(tests_path("%s/model.safetensors", model), NULL);

    ck_assert_ptr_nonnull(absolute);
    ck_assert(symlink(absolute, tensors_path) == 0 || errno == EEXIST);
    free(absolute);
    ck_assert_int_eq(json_dump_file(config, config_path, 0), 0);
}

static void expect_bad_config(const char *model, const char *key, const char *value,
                              const char *file, const char *what)
{
    json_t *config = load_config(model);

    set(config, key, value);
    unlink(tensors_path);
    write_folder(model, config);
    json_decref(config);
    expect_failure(folder, file, what);
}

START_TEST(reads_older_rope_spellings)
{
    static const char *const type_keys[] = {"rope_type", "type"};
    json_t *config = load_config("tiny-llama3");
    char scaling[256];
    struct model *expected, *model;

    expected = open_good(tests_path("tiny-llama3"));
    set(config, "rope_parameters", NULL);
    set(config, "rope_theta", "500000");
    for (size_t i = 0; i < 2; i++) {
        snprintf(scaling, sizeof scaling,
                 "{\"%s\":\"llama3\",\"factor\":8,\"low_freq_factor\":1.0,\"high_freq_factor\":4,"
                 "\"original_max_position_embeddings\":512}",
                 type_keys[i]);
        set(config, "rope_scaling", scaling);
        write_folder("tiny-llama3", config);
        model = open_good(folder);
        ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_LLAMA3);
        ck_assert(memcmp(model->rope_inverse_frequencies, expected->rope_inverse_frequencies,
                         32 * sizeof(float)) == 0);
        model_close(model);
    }
    set(config, "rope_scaling", "null");
    write_folder("tiny-llama3", config);
    model = open_good(folder);
    ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_PLAIN);
    check_frequency(model, 31, pow(500000, -62.0 / 64));
    model_close(model);

    set(config, "rope_theta", NULL);
    write_folder("tiny-llama3", config);
    model = open_good(folder);
    ck_assert_double_eq(model->rope_theta, 10000);
    model_close(model);
    model_close(expected);
    json_decref(config);
}
END_TEST

/* Against the initialisation of RoPE in Hugging Face transformers, on heads of 64. */
START_TEST(computes_yarn)
{
    static const struct {
        const char *scaling;
        double magnitude;
        float frequencies[8]; /* of every fourth pair */
        size_t context;
    } cases[] = {
        {"{\"rope_type\":\"yarn\",\"factor\":16,\"original_max_position_embeddings\":4096,"
         "\"rope_theta\":1e4,\"mscale\":0.707,\"mscale_all_dim\":1.0}",
         0.9363975061530204,
         {1, 0.3162277638912201f, 0.10000000149011612f, 0.02706180140376091f, 0.005673076957464218f,
          0.0008817889611236751f, 6.25000029685907e-05f, 1.9764236640185118e-05f},
         65536},
        {"{\"rope_type\":\"yarn\",\"factor\":8.0,\"original_max_position_embeddings\":32,"
         "\"rope_theta\":1e4,\"attention_factor\":1.25,\"beta_fast\":16,\"beta_slow\":2.0,"
         "\"truncate\":false}",
         1.25,
         {1, 0.03952847048640251f, 0.012500000186264515f, 0.0039528473280370235f,
          0.0012499999720603228f, 0.00039528473280370235f, 0.0001250000059371814f,
          3.9528473280370235e-05f},
         4096},
        {"{\"type\":\"yarn\",\"factor\":2.0,\"original_max_position_embeddings\":2048,"
         "\"rope_theta\":1e4,\"beta_fast\":2,\"beta_slow\":2.0,\"truncate\":false}",
         1.0693147180559945,
         {1, 0.3162277638912201f, 0.10000000149011612f, 0.03162277862429619f, 0.009999999776482582f,
          0.0015811389312148094f, 0.0005000000237487257f, 0.00015811389312148094f},
         4096},
        /* The factor is the context, 4096, over the original one. */
        {"{\"rope_type\":\"yarn\",\"factor\":null,\"original_max_position_embeddings\":512,"
         "\"rope_theta\":1e4,\"mscale\":null,\"beta_fast\":0}",
         1.2079441541679836,
         {0},
         4096},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *config = load_config("tiny-llama3");
        struct model *model;

        set(config, "rope_parameters", cases[i].scaling);
        write_folder("tiny-llama3", config);
        json_decref(config);
        model = open_good(folder);
        ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_YARN);
        ck_assert_float_eq(model->rope_magnitude, (float)cases[i].magnitude);
        ck_assert_uint_eq(model->context_length, cases[i].context);
        for (size_t j = 0; j < 8 && cases[i].frequencies[0] > 0; j++)
            check_frequency(model, 4 * j, (double)cases[i].frequencies[j]);
        model_close(model);
    }
}
END_TEST

/* As writers of 2022 left it: a header without the spaces that align what follows. */
START_TEST(copies_what_is_not_aligned)
{
    json_t *config = load_config("tiny-qwen3");
    struct model *expected = open_good(tests_path("tiny-qwen3"));
    struct model *model;
    struct bytes file = {0};
    struct stat status;
    unsigned char *old;
    uint64_t header;
    FILE *stream;

    ck_assert_int_eq(stat(tests_path("tiny-qwen3/model.safetensors"), &status), 0);
    old = tests_allocate((size_t)status.st_size, 1);
    stream = fopen(tests_path("tiny-qwen3/model.safetensors"), "rb");
    ck_assert_uint_eq(fread(old, (size_t)status.st_size, 1, stream), 1);
    fclose(stream);
    memcpy(&header, old, sizeof header);
    bytes_u64(&file, header + 1);
    bytes_append(&file, old + 8, header);
    bytes_append(&file, " ", 1);
    bytes_append(&file, old + 8 + header, (size_t)status.st_size - 8 - header);
    free(old);
    write_file(tensors_path, file.data, file.size);
    bytes_free(&file);
    ck_assert_int_eq(json_dump_file(config, config_path, 0), 0);
    json_decref(config);

    model = open_good(folder);
    for (size_t i = 0; i < model->layer_count; i++) {
        const struct weight *copy = &model->layers[i].down, *original = &expected->layers[i].down;

        ck_assert_uint_eq((uintptr_t)copy->data % sizeof(uint16_t), 0);
        ck_assert(memcmp(copy->data, original->data, copy->rows * copy->row_bytes) == 0);
        ck_assert(memcmp(model->layers[i].q_norm, expected->layers[i].q_norm,
                         model->head_dim * sizeof(float)) == 0);
    }
    ck_assert_ptr_eq(model->output.data, model->token_embedding.data);
    model_close(model);
    ck_assert_msg(model_open_header(folder, &model, &error), "%s", error.text);
    model_close(model);
    model_close(expected);
}
END_TEST

START_TEST(tolerates_inactive_features)
{
    json_t *config = load_config("tiny-qwen3");
    struct model *model;

    set(config, "layer_types", NULL);
    set(config, "use_sliding_window", "true");
    set(config, "sliding_window", "64");
    set(config, "max_window_layers", "3");
    set(config, "attention_bias", "null");
    set(config, "vocab_size", NULL);
    write_folder("tiny-qwen3", config);
    model = open_good(folder);
    model_close(model);
    set(config, "use_sliding_window", "false");
    set(config, "max_window_layers", "0");
    write_folder("tiny-qwen3", config);
    model = open_good(folder);
    model_close(model);
    json_decref(config);
}
END_TEST

START_TEST(refuses_bad_configs)
{
    static const struct {
        const char *model, *key, *value, *what;
    } cases[] = {
        {"tiny-llama3", "model_type", "\"gemma3\"", "gemma3 is not supported; supported: llama, m"},
        {"tiny-llama3", "model_type", NULL, "model_type: is not a string"},
        {"tiny-llama3", "hidden_size", NULL, "hidden_size: is missing"},
        {"tiny-llama3", "hidden_size", "null", "hidden_size: is missing"},
        {"tiny-llama3", "hidden_size", "\"192\"", "hidden_size: is not an integer"},
        {"tiny-llama3", "hidden_size", "192.0", "hidden_size: is not an integer"},
        {"tiny-llama3", "hidden_size", "-192", "hidden_size: is not an integer of 0 or more"},
        {"tiny-llama3", "hidden_size", "0", "hidden_size: is 0, expected 1 to"},
        {"tiny-llama3", "hidden_size", "9223372036854775807",
         "hidden_size: is 9223372036854775807"},
        {"tiny-llama3", "num_hidden_layers", "0", "num_hidden_layers: is 0"},
        {"tiny-llama3", "num_hidden_layers", "65537", "num_hidden_layers: is 65537"},
        {"tiny-llama3", "num_hidden_layers", "4294967295", "num_hidden_layers: is 4294967295"},
        {"tiny-llama3", "num_hidden_layers", "[3]", "num_hidden_layers: is not an integer"},
        {"tiny-llama3", "max_position_embeddings", "2147483648",
         "max_position_embeddings: is 2147483648, expected 1 to 2147483647"},
        {"tiny-llama3", "max_position_embeddings", "0", "max_position_embeddings: is 0"},
        {"tiny-llama3", "num_attention_heads", "5", "num_key_value_heads: 5 query heads cannot"},
        {"tiny-llama3", "rms_norm_eps", "-1", "rms_norm_eps: is -1, expected a number above 0"},
        {"tiny-llama3", "intermediate_size", "0", "intermediate_size: is 0"},
        {"tiny-llama3", "num_attention_heads", "0", "num_attention_heads: is 0"},
        {"tiny-llama3", "num_key_value_heads", "4", "num_key_value_heads: 6 query heads cannot"},
        {"tiny-llama3", "num_key_value_heads", "0", "num_key_value_heads: is 0"},
        {"tiny-llama3", "head_dim", "7", "head_dim: is 7, expected 8 to 512"},
        {"tiny-llama3", "head_dim", "514", "head_dim: is 514, expected 8 to 512"},
        {"tiny-llama3", "head_dim", "63", "head_dim: a head of 63, expected an even number"},
        {"tiny-llama3", "max_position_embeddings", NULL, "max_position_embeddings: is missing"},
        {"tiny-llama3", "rms_norm_eps", "0", "rms_norm_eps: is 0, expected a number above 0"},
        {"tiny-llama3", "rms_norm_eps", "1e-300",
         "rms_norm_eps: is 1e-300, expected 1.17549e-38 to 1"},
        {"tiny-llama3", "rms_norm_eps", "1e300", "rms_norm_eps: is 1e+300, expected"},
        {"tiny-llama3", "rope_parameters", "{\"rope_theta\":1e-300}", "RoPE: pair 5 turns by"},
        {"tiny-llama3", "rms_norm_eps", "\"x\"", "rms_norm_eps: is not a number"},
        {"tiny-llama3", "attention_bias", "true", "attention_bias: these biases are not supported"},
        {"tiny-llama3", "mlp_bias", "true", "mlp_bias: these biases are not supported"},
        {"tiny-llama3", "mlp_bias", "1", "mlp_bias: is not true or false"},
        {"tiny-llama3", "hidden_act", "\"gelu\"", "hidden_act: gelu is not supported"},
        {"tiny-llama3", "rope_parameters", "3", "rope_parameters: is not an object"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"longrope\"}",
         "rope_parameters.rope_type: longrope is not supported; supported: default, linear, "
         "llama3,"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"dynamic\",\"factor\":2}",
         "rope_parameters.rope_type: dynamic is not supported"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"linear\"}",
         "rope_parameters.factor: is missing"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"linear\",\"factor\":0}",
         "rope_parameters.factor: is something else, expected a number above 0"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"yarn\",\"factor\":\"4\"}",
         "rope_parameters.factor: is something else"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"yarn\",\"factor\":4,\"beta_fast\":-1}",
         "rope_parameters.beta_fast: is something else"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"yarn\",\"factor\":4,\"truncate\":1}",
         "rope_parameters.truncate: is not true or false"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"yarn\",\"factor\":4,\"rope_theta\":1}",
         "theta is 1, YaRN needs"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"linear\",\"factor\":1e-300}",
         "RoPE: pair 0 turns by 1e+300 a position, out of range"},
        {"tiny-llama3", "rope_parameters",
         "{\"rope_type\":\"yarn\",\"factor\":4,\"attention_factor\":1e300}",
         "RoPE's attention factor is not finite"},
        {"tiny-llama3", "rope_parameters", "{\"full_attention\":{\"rope_type\":\"default\"}}",
         "rope_parameters.full_attention: RoPE that differs by layer"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":1}", "rope_type: is not a string"},
        {"tiny-llama3", "rope_parameters", "{\"rope_type\":\"llama3\"}",
         "rope_parameters.factor: is missing"},
        {"tiny-llama3", "rope_parameters", "{\"rope_theta\":-1}", "rope_parameters.rope_theta: is"},
        {"tiny-llama3", "rope_parameters", "{\"partial_rotary_factor\":0.5}",
         "partial_rotary_factor: RoPE over a part"},
        {"tiny-llama3", "rope_parameters",
         "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4,"
         "\"original_max_position_embeddings\":512}",
         "rope_parameters.high_freq_factor: is 4, expected more than low_freq_factor"},
        {"tiny-qwen3", "layer_types", "[\"full_attention\",\"sliding_attention\"]",
         "layer_types: layer 1 is sliding_attention; only full_attention"},
        {"tiny-qwen3", "layer_types", "[1]", "layer_types: layer 0 is not a string"},
        {"tiny-llama3", "tie_word_embeddings", "\"no\"", "tie_word_embeddings: is not true"},
        {"tiny-llama3", "vocab_size", "321", "vocab_size: is 321, but the embedding has 320 rows"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_bad_config(cases[i].model, cases[i].key, cases[i].value,
                          "/config.json: ", cases[i].what);
}
END_TEST

START_TEST(refuses_an_active_sliding_window)
{
    json_t *config = load_config("tiny-qwen3");

    set(config, "layer_types", NULL);
    set(config, "use_sliding_window", "true");
    set(config, "sliding_window", "64");
    set(config, "max_window_layers", "2");
    write_folder("tiny-qwen3", config);
    json_decref(config);
    expect_failure(folder, "/config.json: ",
                   "sliding_window: is 64, less than the context of 4096; sliding-window");
}
END_TEST

/* Without layers listed one by one, Mistral's models have a window unless they say null. */
START_TEST(knows_windows_of_mistral)
{
    static const struct {
        const char *window; /* NULL: absent */
        const char *what;   /* NULL: is opened */
    } cases[] = {
        {"null", NULL},
        {"4096", NULL},
        {"4095", "sliding_window: is 4095, less than the context of 4096; sliding-window"},
        {"\"no\"", "sliding_window: is not an integer"},
        {NULL, NULL},
    };
    json_t *config = load_config("tiny-llama3");
    struct model *model;

    set(config, "model_type", "\"mistral\"");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        set(config, "sliding_window", cases[i].window);
        write_folder("tiny-llama3", config);
        if (cases[i].what != NULL) {
            expect_failure(folder, "/config.json: ", cases[i].what);
            continue;
        }
        model = open_good(folder);
        ck_assert_int_eq(model->architecture, MODEL_MISTRAL);
        ck_assert_str_eq(model_architecture_name(model->architecture), "mistral");
        model_close(model);
    }
    set(config, "max_position_embeddings", "32768");
    write_folder("tiny-llama3", config);
    expect_failure(folder,
                   "/config.json: ", "sliding_window: is 4096, less than the context of 32");
    json_decref(config);
}
END_TEST

START_TEST(refuses_other_architectures)
{
    static const char *const names[] = {"mixtral", "gemma2",    "gemma3", "qwen2_moe",
                                        "phi3",    "qwen3_moe", "llama4", "LLAMA"};
    char value[32], what[64];

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(value, sizeof value, "\"%s\"", names[i]);
        snprintf(what, sizeof what, "model_type: %s is not supported; supported: llama, ",
                 names[i]);
        expect_bad_config("tiny-llama3", "model_type", value, "/config.json: ", what);
    }
}
END_TEST

START_TEST(refuses_configs_that_the_tensors_contradict)
{
    static const struct {
        const char *model, *key, *value, *what;
    } cases[] = {
        {"tiny-llama3", "hidden_size", "200", "tensor model.embed_tokens.weight: is 320 x 192"},
        {"tiny-llama3", "intermediate_size", "383",
         "tensor model.layers.0.mlp.gate_proj.weight: is 384 x 192 (rows x columns), expected 383 "
         "x"},
        {"tiny-llama3", "num_attention_heads", "8",
         "tensor model.layers.0.self_attn.q_proj.weight: is 384 x 192 (rows x columns), expected "
         "512"},
        {"tiny-llama3", "num_key_value_heads", "1",
         "tensor model.layers.0.self_attn.k_proj.weight: is 128 x 192"},
        {"tiny-llama3", "head_dim", "32", "tensor model.layers.0.self_attn.q_proj.weight: is"},
        {"tiny-llama3", "num_hidden_layers", "2",
         "model.layers.2.input_layernorm.weight: the file"},
        {"tiny-llama3", "num_hidden_layers", "4", "30 tensors cannot make up 4 layers"},
        {"tiny-llama3", "num_hidden_layers", "60000", "30 tensors cannot make up 60000 layers"},
        {"tiny-llama3", "model_type", "\"qwen3\"",
         "tensor model.layers.0.self_attn.q_norm.weight: is missing"},
        {"tiny-qwen3", "tie_word_embeddings", "false", "tensor lm_head.weight: is missing"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_bad_config(cases[i].model, cases[i].key, cases[i].value,
                          "/model.safetensors: ", cases[i].what);
}
END_TEST

/* Opens the fixture with `from` replaced by `to`, of the same length, in the header. */
static void expect_bad_header(const char *from, const char *to, const char *what)
{
    json_t *config = load_config("tiny-llama3");
    struct stat status;
    unsigned char *file, *place;
    FILE *stream;

    ck_assert_uint_eq(strlen(from), strlen(to));
    ck_assert_int_eq(stat(tests_path("tiny-llama3/model.safetensors"), &status), 0);
    file = tests_allocate((size_t)status.st_size, 1);
    stream = fopen(tests_path("tiny-llama3/model.safetensors"), "rb");
    ck_assert_uint_eq(fread(file, (size_t)status.st_size, 1, stream), 1);
    fclose(stream);
    place = memmem(file, 8000, from, strlen(from));
    ck_assert_ptr_nonnull(place);
    memcpy(place, to, strlen(to));
    write_file(tensors_path, file, (size_t)status.st_size);
    free(file);
    ck_assert_int_eq(json_dump_file(config, config_path, 0), 0);
    json_decref(config);
    expect_failure(folder, "/model.safetensors: ", what);
}

START_TEST(refuses_tensors_of_wrong_shapes_and_types)
{
    expect_bad_header("\"model.norm.weight\":{\"dtype\":\"BF16\"",
                      "\"model.norm.weight\":{\"dtype\":\"I16\" ",
                      "tensor model.norm.weight: the element type I16 is not supported; supported: "
                      "F32, F16, BF16");
    expect_bad_header("\"model.norm.weight\":{\"dtype\":\"BF16\"",
                      "\"model.norm.weight\":{\"dtype\":\"F32\" ",
                      "tensor model.norm.weight: data_offsets span 384 bytes");
    expect_bad_header("\"model.norm.weight\"", "\"model.worm.weight\"",
                      "tensor model.norm.weight: is missing");
    expect_bad_header("\"shape\":[192]", "\"shape\":[191]", "data_offsets span 384 bytes");
    expect_bad_header("\"shape\":[320,192]", "\"shape\":[192,320]",
                      "is 192 x 320 (rows x columns), expected ");
    expect_bad_header("\"shape\":[320,192]", "\"shape\":[0  ,192]",
                      "data_offsets span 122880 bytes");
}
END_TEST

START_TEST(refuses_broken_folders)
{
    json_t *config = load_config("tiny-llama3");

    expect_failure(folder, "/config.json: ", "No such file");
    write_file(config_path, "", 0);
    expect_failure(folder, "/config.json: ", "is empty");
    write_file(config_path, "{\n\"model_type\":\n", 15);
    expect_failure(folder, "/config.json: ", "line 2: is not valid JSON");
    write_file(config_path, "[]", 2);
    expect_failure(folder, "/config.json: ", "is not a JSON object");
    ck_assert_int_eq(json_dump_file(config, config_path, 0), 0);
    expect_failure(folder, "/model.safetensors: ", "No such file");
    write_file(index_path, "{}", 2);
    expect_failure(folder, "/model.safetensors.index.json: ", "weight_map: is not an object");
    write_file(tensors_path, "12345", 5);
    expect_failure(folder, "/model.safetensors: ", "truncated");
    json_decref(config);

    expect_failure(tests_path("tiny-llama3/model.safetensors"),
                   "model.safetensors: ", "is not a GGUF file");
}
END_TEST

/* --- GGUF models ------------------------------------------------------------------------------ */

/* A small model; what is 0 or NULL takes the value beside it. */
struct recipe {
    const char *architecture; /* llama */
    uint32_t type;            /* of matrices; F32 */
    uint32_t layers;          /* 2 */
    uint32_t hidden;          /* 64 */
    uint32_t intermediate;    /* 96 */
    uint32_t query_heads;     /* 4 */
    uint32_t kv_heads;        /* 2 */
    uint32_t head_dim;        /* 16 */
    uint32_t layers_written;  /* layers */
    bool tied;
    const char *omit;    /* a key (without the architecture) or a tensor */
    const char *enlarge; /* a tensor that gets a row more; a vector, 32 elements */
    const char *retype;  /* a tensor that gets `other_type` */
    uint32_t other_type;
};

static bool is(const char *name, const char *other)
{
    return other != NULL && strcmp(name, other) == 0;
}

static void write_key(const struct recipe *recipe, const char *architecture, const char *key,
                      uint32_t value)
{
    char name[128];

    snprintf(name, sizeof name, "%s.%s", architecture, key);
    if (!is(key, recipe->omit))
        gguf_writer_uint(&writer, name, value);
}

static void write_tensor(const struct recipe *recipe, const char *name, size_t columns, size_t rows)
{
    uint32_t type = rows == 0 ? 0 : recipe->type;

    if (is(name, recipe->omit))
        return;
    if (is(name, recipe->retype))
        type = recipe->other_type;
    if (is(name, recipe->enlarge)) {
        columns += rows == 0 ? 32 : 0;
        rows += rows == 0 ? 0 : 1;
    }
    gguf_writer_tensor(&writer, name, type, columns, rows, NULL);
}

#define VOCABULARY 40

static uint32_t or_default(uint32_t value, uint32_t otherwise)
{
    return value != 0 ? value : otherwise;
}

static void write_metadata(const struct recipe *recipe)
{
    const char *architecture = recipe->architecture != NULL ? recipe->architecture : "llama";
    char epsilon[128];

    if (!is("general.architecture", recipe->omit))
        gguf_writer_string(&writer, "general.architecture", architecture);
    write_key(recipe, architecture, "block_count", or_default(recipe->layers, 2));
    write_key(recipe, architecture, "context_length", 256);
    write_key(recipe, architecture, "embedding_length", or_default(recipe->hidden, 64));
    write_key(recipe, architecture, "feed_forward_length", or_default(recipe->intermediate, 96));
    write_key(recipe, architecture, "attention.head_count", or_default(recipe->query_heads, 4));
    write_key(recipe, architecture, "attention.head_count_kv", or_default(recipe->kv_heads, 2));
    write_key(recipe, architecture, "attention.key_length", or_default(recipe->head_dim, 16));
    snprintf(epsilon, sizeof epsilon, "%s.attention.layer_norm_rms_epsilon", architecture);
    if (!is("attention.layer_norm_rms_epsilon", recipe->omit))
        gguf_writer_float(&writer, epsilon, 1e-5f);
}

static void write_model(const struct recipe *recipe)
{
    const size_t hidden = or_default(recipe->hidden, 64);
    const size_t intermediate = or_default(recipe->intermediate, 96);
    const size_t head_dim = or_default(recipe->head_dim, 16);
    const size_t q_rows = or_default(recipe->query_heads, 4) * head_dim;
    const size_t kv_rows = or_default(recipe->kv_heads, 2) * head_dim;
    const uint32_t layers = or_default(recipe->layers_written, or_default(recipe->layers, 2));
    const struct {
        const char *name;
        size_t columns, rows;
        const char *architecture; /* NULL: all have it */
    } tensors[] = {
        {"attn_norm.weight", hidden, 0, NULL},
        {"attn_q.weight", hidden, q_rows, NULL},
        {"attn_k.weight", hidden, kv_rows, NULL},
        {"attn_v.weight", hidden, kv_rows, NULL},
        {"attn_output.weight", q_rows, hidden, NULL},
        {"ffn_norm.weight", hidden, 0, NULL},
        {"ffn_gate.weight", hidden, intermediate, NULL},
        {"ffn_up.weight", hidden, intermediate, NULL},
        {"ffn_down.weight", intermediate, hidden, NULL},
        {"attn_q_norm.weight", head_dim, 0, "qwen3"},
        {"attn_k_norm.weight", head_dim, 0, "qwen3"},
        {"attn_q.bias", q_rows, 0, "qwen2"},
        {"attn_k.bias", kv_rows, 0, "qwen2"},
        {"attn_v.bias", kv_rows, 0, "qwen2"},
    };
    char name[64];

    write_metadata(recipe);
    write_tensor(recipe, "token_embd.weight", hidden, VOCABULARY);
    for (uint32_t i = 0; i < layers; i++) {
        for (size_t j = 0; j < sizeof tensors / sizeof tensors[0]; j++) {
            if (tensors[j].architecture != NULL &&
                !is(tensors[j].architecture, recipe->architecture))
                continue;
            snprintf(name, sizeof name, "blk.%u.%s", (unsigned)i, tensors[j].name);
            write_tensor(recipe, name, tensors[j].columns, tensors[j].rows);
        }
    }
    write_tensor(recipe, "output_norm.weight", hidden, 0);
    if (!recipe->tied)
        write_tensor(recipe, "output.weight", hidden, VOCABULARY);
}

static struct model *open_writer(void)
{
    gguf_writer_save(&writer, gguf_path);
    return open_good(gguf_path);
}

static void restart(void)
{
    gguf_writer_free(&writer);
    gguf_writer_start(&writer);
}

static void expect_bad_gguf(const char *what)
{
    gguf_writer_save(&writer, gguf_path);
    expect_failure(gguf_path, gguf_path, what);
    restart();
}

static void expect_bad_recipe(struct recipe recipe, const char *what)
{
    write_model(&recipe);
    expect_bad_gguf(what);
}

/* One entry added to a good model. */
static void expect_bad_uint(const char *key, uint32_t value, const char *what)
{
    gguf_writer_uint(&writer, key, value);
    expect_bad_recipe((struct recipe){0}, what);
}

static void expect_bad_float(const char *key, float value, const char *what)
{
    gguf_writer_float(&writer, key, value);
    expect_bad_recipe((struct recipe){0}, what);
}

static void expect_bad_string(const char *key, const char *value, const char *what)
{
    gguf_writer_string(&writer, key, value);
    expect_bad_recipe((struct recipe){0}, what);
}

/* What may be a number, but is not: for every key. */
START_TEST(refuses_gguf_values_of_other_types)
{
    static const char *const sizes[] = {
        "block_count",          "context_length",       "embedding_length",
        "feed_forward_length",  "attention.head_count", "attention.head_count_kv",
        "attention.key_length",
    };
    static const uint64_t two63 = UINT64_C(1) << 63;
    static const uint32_t list[] = {2, 2};
    static const int32_t minus = -2;
    char key[64], what[128];

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const struct recipe recipe = {.omit = sizes[i]};

        snprintf(key, sizeof key, "llama.%s", sizes[i]);
        gguf_writer_string(&writer, key, "2");
        snprintf(what, sizeof what, "%s: is STRING, expected an integer", key);
        expect_bad_recipe(recipe, what);
        gguf_writer_float(&writer, key, 2);
        snprintf(what, sizeof what, "%s: is FLOAT32, expected an integer", key);
        expect_bad_recipe(recipe, what);
        gguf_writer_array(&writer, key, GGUF_UINT32, list, 2, sizeof list);
        snprintf(what, sizeof what, "%s: is an array of UINT32, expected an integer", key);
        expect_bad_recipe(recipe, what);
        gguf_writer_value(&writer, key, GGUF_INT32, &minus, sizeof minus);
        snprintf(what, sizeof what, "%s: is -2, expected 0 or more", key);
        expect_bad_recipe(recipe, what);
        gguf_writer_value(&writer, key, GGUF_UINT64, &two63, sizeof two63);
        snprintf(what, sizeof what, "%s: is 2^63 or more", key);
        expect_bad_recipe(recipe, what);
        gguf_writer_uint(&writer, key, 0);
        snprintf(what, sizeof what, "%s: is 0, expected %s to", key,
                 is("attention.key_length", sizes[i]) ? "8" : "1");
        expect_bad_recipe(recipe, what);
        gguf_writer_uint(&writer, key, UINT32_MAX);
        snprintf(what, sizeof what, "%s: is 4294967295, expected", key);
        expect_bad_recipe(recipe, what);
    }
    gguf_writer_uint(&writer, "llama.attention.layer_norm_rms_epsilon", 1);
    expect_bad_recipe((struct recipe){.omit = "attention.layer_norm_rms_epsilon"},
                      "layer_norm_rms_epsilon: is UINT32, expected FLOAT32 or FLOAT64");
    gguf_writer_uint(&writer, "general.architecture", 1);
    expect_bad_recipe((struct recipe){.omit = "general.architecture"},
                      "general.architecture: is UINT32, expected STRING");
}
END_TEST

START_TEST(refuses_gguf_vocabularies_that_disagree)
{
    static const char *const words[VOCABULARY + 1] = {"a", "b"};
    const char *tokens[VOCABULARY + 1];
    static const uint8_t bytes[VOCABULARY];
    struct model *model;

    for (size_t i = 0; i <= VOCABULARY; i++)
        tokens[i] = words[i] != NULL ? words[i] : "c";
    for (size_t count = VOCABULARY - 1; count <= VOCABULARY + 1; count += 2) {
        gguf_writer_strings(&writer, "tokenizer.ggml.tokens", tokens, count);
        expect_bad_recipe((struct recipe){0},
                          count < VOCABULARY
                              ? "tokenizer.ggml.tokens: lists 39 tokens, but the embedding has 40"
                              : "tokenizer.ggml.tokens: lists 41 tokens, but the embedding has 40");
    }
    gguf_writer_array(&writer, "tokenizer.ggml.tokens", GGUF_UINT8, bytes, VOCABULARY, VOCABULARY);
    expect_bad_recipe((struct recipe){0}, "tokens: is an array of UINT8, expected an array of STR");
    expect_bad_uint("llama.vocab_size", VOCABULARY - 1,
                    "vocab_size: is 39, but the vocabulary has");
    expect_bad_uint("llama.vocab_size", UINT32_MAX,
                    "vocab_size: is 4294967295, but the vocabulary");

    gguf_writer_strings(&writer, "tokenizer.ggml.tokens", tokens, VOCABULARY);
    gguf_writer_uint(&writer, "llama.vocab_size", VOCABULARY);
    write_model(&(struct recipe){0});
    model = open_writer();
    ck_assert_uint_eq(model->vocabulary, VOCABULARY);
    model_close(model);
}
END_TEST

START_TEST(opens_gguf_of_every_type)
{
    for (int i = 0; i < QUANT_TYPES; i++) {
        const struct recipe recipe = {
            .type = quant_info((enum quant_type)i)->gguf_type,
            .hidden = 256, /* a block of the types with the largest ones */
            .intermediate = 512,
            .head_dim = 64,
        };
        const enum quant_type type = (enum quant_type)i;
        const float *norm;
        struct model *model;

        write_model(&recipe);
        model = open_writer();
        ck_assert_uint_eq(model->layer_count, 2);
        ck_assert_uint_eq(model->hidden, 256);
        ck_assert_uint_eq(model->intermediate, 512);
        ck_assert_uint_eq(model->query_heads, 4);
        ck_assert_uint_eq(model->kv_heads, 2);
        ck_assert_uint_eq(model->head_dim, 64);
        ck_assert_uint_eq(model->vocabulary, VOCABULARY);
        ck_assert_uint_eq(model->context_length, 256);
        ck_assert_float_eq(model->rms_epsilon, 1e-5f);
        ck_assert_double_eq(model->rope_theta, 10000);
        ck_assert(model->rope_interleaved);
        ck_assert(!model->tied_output);
        for (size_t j = 0; j < 32; j++)
            check_frequency(model, j, pow(10000, -(double)j / 32));
        check_weight(&model->token_embedding, type, VOCABULARY, 256);
        check_weight(&model->output, type, VOCABULARY, 256);
        check_weight(&model->layers[1].q, type, 256, 256);
        check_weight(&model->layers[1].k, type, 128, 256);
        check_weight(&model->layers[1].v, type, 128, 256);
        check_weight(&model->layers[1].o, type, 256, 256);
        check_weight(&model->layers[1].gate, type, 512, 256);
        check_weight(&model->layers[1].up, type, 512, 256);
        check_weight(&model->layers[1].down, type, 256, 512);
        ck_assert(memcmp(model->token_embedding.data, writer.data.data,
                         VOCABULARY * model->token_embedding.row_bytes) == 0);
        norm = model->layers[1].ffn_norm;
        for (size_t j = 0; j < 256; j++)
            ck_assert(norm[j] > 0.8f && norm[j] < 1.2f);
        model_close(model);
        restart();
    }
}
END_TEST

START_TEST(opens_gguf_qwen3)
{
    const struct recipe recipe = {.architecture = "qwen3", .type = 8, .head_dim = 32, .tied = true};
    struct model *model;

    write_model(&recipe);
    gguf_writer_float(&writer, "qwen3.rope.freq_base", 1e6f);
    model = open_writer();
    ck_assert_int_eq(model->architecture, MODEL_QWEN3);
    ck_assert(!model->rope_interleaved);
    ck_assert(model->tied_output);
    ck_assert_ptr_eq(model->output.data, model->token_embedding.data);
    ck_assert_double_eq(model->rope_theta, 1e6);
    check_frequency(model, 1, pow(1e6, -1.0 / 16));
    check_weight(&model->layers[0].q, QUANT_Q8_0, 128, 64);
    check_weight(&model->layers[0].o, QUANT_Q8_0, 64, 128);
    for (size_t i = 0; i < 32; i++) {
        ck_assert(model->layers[1].q_norm[i] > 0.8f && model->layers[1].q_norm[i] < 1.2f);
        ck_assert(model->layers[1].k_norm[i] > 0.8f && model->layers[1].k_norm[i] < 1.2f);
    }
    model_close(model);
}
END_TEST

START_TEST(opens_gguf_qwen2)
{
    static const char *const biases[] = {"blk.0.attn_q.bias", "blk.1.attn_k.bias",
                                         "blk.1.attn_v.bias"};
    const struct recipe recipe = {.architecture = "qwen2", .type = 2};
    struct model *model;
    char what[64];

    write_model(&recipe);
    model = open_writer();
    ck_assert_int_eq(model->architecture, MODEL_QWEN2);
    ck_assert(!model->rope_interleaved);
    ck_assert_ptr_null(model->layers[0].q_norm);
    for (size_t i = 0; i < 64; i++)
        ck_assert(model->layers[1].q_bias[i] > 0.8f && model->layers[1].q_bias[i] < 1.2f);
    for (size_t i = 0; i < 32; i++) {
        ck_assert(model->layers[0].k_bias[i] > 0.8f && model->layers[0].k_bias[i] < 1.2f);
        ck_assert(model->layers[1].v_bias[i] > 0.8f && model->layers[1].v_bias[i] < 1.2f);
    }
    model_close(model);
    restart();
    for (size_t i = 0; i < sizeof biases / sizeof biases[0]; i++) {
        snprintf(what, sizeof what, "tensor %s: is missing", biases[i]);
        expect_bad_recipe((struct recipe){.architecture = "qwen2", .omit = biases[i]}, what);
        snprintf(what, sizeof what, "tensor %s: has 1 x ", biases[i]);
        expect_bad_recipe((struct recipe){.architecture = "qwen2", .enlarge = biases[i]}, what);
        snprintf(what, sizeof what, "tensor %s: is Q8_0, expected F32", biases[i]);
        expect_bad_recipe(
            (struct recipe){.architecture = "qwen2", .retype = biases[i], .other_type = 8}, what);
    }
    gguf_writer_tensor(&writer, "blk.1.attn_output.bias", 0, 64, 0, NULL);
    expect_bad_recipe((struct recipe){.architecture = "qwen2"},
                      "tensor blk.1.attn_output.bias: a bias here is not supported");
}
END_TEST

START_TEST(scales_gguf_rope)
{
    const struct recipe recipe = {.head_dim = 64};
    struct model *model;

    write_model(&recipe);
    gguf_writer_float(&writer, "llama.rope.scale_linear", 4);
    model = open_writer();
    ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_LINEAR);
    ck_assert_double_eq(model->rope_factor, 4);
    ck_assert_float_eq(model->rope_magnitude, 1);
    for (size_t i = 0; i < 32; i++)
        check_frequency(model, i, pow(10000, -(double)i / 32) / 4);
    model_close(model);
    restart();

    /* As computes_yarn's first case. */
    write_model(&recipe);
    gguf_writer_string(&writer, "llama.rope.scaling.type", "yarn");
    gguf_writer_float(&writer, "llama.rope.scaling.factor", 16);
    gguf_writer_uint(&writer, "llama.rope.scaling.original_context_length", 4096);
    model = open_writer();
    ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_YARN);
    ck_assert_uint_eq(model->context_length, 65536);
    ck_assert_float_eq_tol(model->rope_magnitude, 1 + 0.1f * logf(16), 1e-6f);
    check_frequency(model, 8, 0.1);
    check_frequency(model, 12, 0.02706180140376091);
    check_frequency(model, 16, 0.005673076957464218);
    check_frequency(model, 28, 1.9764236640185118e-05);
    model_close(model);
    restart();

    write_model(&recipe);
    gguf_writer_string(&writer, "llama.rope.scaling.type", "yarn");
    gguf_writer_float(&writer, "llama.rope.scaling.factor", 16);
    gguf_writer_float(&writer, "llama.rope.scaling.yarn_log_multiplier", 0.5f);
    gguf_writer_float(&writer, "llama.rope.scaling.yarn_ext_factor", 1);
    gguf_writer_float(&writer, "llama.rope.scaling.yarn_beta_fast", 16);
    gguf_writer_float(&writer, "llama.rope.scaling.yarn_beta_slow", 2);
    model = open_writer();
    ck_assert_double_eq(model->rope_original_context, 256);
    ck_assert_double_eq(model->rope_beta_fast, 16);
    ck_assert_double_eq(model->rope_beta_slow, 2);
    ck_assert_float_eq_tol(model->rope_magnitude, (1 + 0.1f * logf(16)) / (1 + 0.05f * logf(16)),
                           1e-6f);
    model_close(model);
    restart();

    write_model(&recipe);
    gguf_writer_string(&writer, "llama.rope.scaling.type", "yarn");
    gguf_writer_float(&writer, "llama.rope.scaling.factor", 16);
    gguf_writer_float(&writer, "llama.rope.scaling.yarn_attn_factor", 1.5f);
    gguf_writer_float(&writer, "llama.rope.scaling.attn_factor", 0.5f);
    gguf_writer_float(&writer, "llama.rope.scaling.yarn_ext_factor", -1);
    model = open_writer();
    ck_assert_float_eq(model->rope_magnitude, 0.75f);
    model_close(model);
}
END_TEST

/* All tensors in the second part, as some tools write it. */
START_TEST(opens_split_gguf)
{
    static const uint16_t numbers[] = {0, 1, 2};
    const struct recipe recipe = {.type = 8};
    char first[sizeof gguf_path + 16], second[sizeof gguf_path + 16];
    const int32_t total = 21;
    struct model *model;

    snprintf(first, sizeof first, "%s/m-00001-of-00002.gguf", folder);
    snprintf(second, sizeof second, "%s/m-00002-of-00002.gguf", folder);
    write_metadata(&recipe);
    gguf_writer_value(&writer, "split.no", GGUF_UINT16, &numbers[0], 2);
    gguf_writer_value(&writer, "split.count", GGUF_UINT16, &numbers[2], 2);
    gguf_writer_value(&writer, "split.tensors.count", GGUF_INT32, &total, 4);
    gguf_writer_save(&writer, first);
    restart();
    write_model(&recipe);
    gguf_writer_value(&writer, "split.no", GGUF_UINT16, &numbers[1], 2);
    gguf_writer_value(&writer, "split.count", GGUF_UINT16, &numbers[2], 2);
    gguf_writer_save(&writer, second);
    model = open_good(first);
    check_weight(&model->layers[1].down, QUANT_Q8_0, 64, 96);
    ck_assert_float_gt(model->layers[1].ffn_norm[63], 0.8f);
    model_close(model);
    restart();

    write_model(&(struct recipe){.type = 8, .enlarge = "blk.1.ffn_up.weight"});
    gguf_writer_value(&writer, "split.no", GGUF_UINT16, &numbers[1], 2);
    gguf_writer_value(&writer, "split.count", GGUF_UINT16, &numbers[2], 2);
    gguf_writer_save(&writer, second);
    ck_assert(!model_open(first, &model, &error));
    tests_check_error(error.text, second, "tensor blk.1.ffn_up.weight: is 97 x 64");
}
END_TEST

START_TEST(derives_absent_gguf_values)
{
    struct recipe recipe = {.omit = "attention.key_length"};
    struct model *model;

    write_model(&recipe);
    model = open_writer();
    ck_assert_uint_eq(model->head_dim, 16);
    model_close(model);
    restart();

    recipe = (struct recipe){.omit = "attention.head_count_kv", .kv_heads = 4};
    write_model(&recipe);
    model = open_writer();
    ck_assert_uint_eq(model->kv_heads, 4);
    model_close(model);
}
END_TEST

START_TEST(applies_gguf_rope_factors)
{
    static const float factors[] = {1, 1, 1.5f, 2, 4, 8, 8, 8};
    const struct recipe recipe = {0};
    struct model *model;

    write_model(&recipe);
    gguf_writer_tensor(&writer, "rope_freqs.weight", 0, 8, 0, factors);
    model = open_writer();
    ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_FACTORS);
    for (size_t i = 0; i < 8; i++)
        check_frequency(model, i, pow(10000, -(double)i / 8) / (double)factors[i]);
    model_close(model);
}
END_TEST

START_TEST(tolerates_inactive_gguf_features)
{
    const struct recipe recipe = {0};
    struct model *model;

    write_model(&recipe);
    gguf_writer_uint(&writer, "llama.expert_count", 0);
    gguf_writer_uint(&writer, "llama.attention.sliding_window", 256);
    gguf_writer_uint(&writer, "llama.attention.value_length", 16);
    gguf_writer_uint(&writer, "llama.rope.dimension_count", 16);
    gguf_writer_string(&writer, "llama.rope.scaling.type", "linear");
    gguf_writer_float(&writer, "llama.rope.scaling.factor", 1);
    gguf_writer_uint(&writer, "split.count", 1);
    model = open_writer();
    ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_PLAIN);
    model_close(model);
    restart();

    write_model(&recipe);
    gguf_writer_string(&writer, "llama.rope.scaling.type", "none");
    gguf_writer_float(&writer, "llama.rope.scaling.factor", 4);
    model = open_writer();
    ck_assert_int_eq(model->rope_scaling, MODEL_ROPE_PLAIN);
    model_close(model);
}
END_TEST

START_TEST(header_of_a_vocabulary_only_gguf)
{
    static const char *const tokens[] = {"a", "b", "c"};
    const struct recipe recipe = {0};
    struct model *model;

    write_metadata(&recipe);
    gguf_writer_strings(&writer, "tokenizer.ggml.tokens", tokens, 3);
    gguf_writer_save(&writer, gguf_path);
    ck_assert_msg(model_open_header(gguf_path, &model, &error), "%s", error.text);
    ck_assert(!model->has_weights);
    ck_assert_ptr_null(model->layers);
    ck_assert_uint_eq(model->layer_count, 2);
    ck_assert_uint_eq(model->vocabulary, 3);
    model_close(model);
    ck_assert(!model_open(gguf_path, &model, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "holds no tensors"));
    restart();

    write_metadata(&recipe);
    gguf_writer_save(&writer, gguf_path);
    ck_assert(!model_open_header(gguf_path, &model, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "tokenizer.ggml.tokens: is missing"));
}
END_TEST

START_TEST(refuses_missing_files)
{
    expect_failure(gguf_path, "", "No such file");
    ck_assert_int_eq(mkfifo(gguf_path, 0600), 0);
    expect_failure(gguf_path, "", "is not a regular file");
}
END_TEST

START_TEST(refuses_gguf_with_missing_parts)
{
    static const char *const keys[] = {
        "block_count",         "context_length",       "embedding_length",
        "feed_forward_length", "attention.head_count", "attention.layer_norm_rms_epsilon",
    };
    static const char *const tensors[] = {
        "token_embd.weight",        "output_norm.weight",       "blk.0.attn_norm.weight",
        "blk.1.attn_q.weight",      "blk.1.attn_k.weight",      "blk.1.attn_v.weight",
        "blk.1.attn_output.weight", "blk.1.attn_norm.weight",   "blk.1.ffn_norm.weight",
        "blk.1.ffn_gate.weight",    "blk.1.ffn_up.weight",      "blk.1.ffn_down.weight",
        "blk.1.attn_q_norm.weight", "blk.0.attn_k_norm.weight",
    };
    char what[128];

    expect_bad_recipe((struct recipe){.omit = "general.architecture"},
                      "general.architecture: is missing");
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        snprintf(what, sizeof what, "llama.%s: is missing", keys[i]);
        expect_bad_recipe((struct recipe){.omit = keys[i]}, what);
    }
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        snprintf(what, sizeof what, "tensor %s: is missing", tensors[i]);
        expect_bad_recipe((struct recipe){.architecture = "qwen3", .omit = tensors[i]}, what);
    }
}
END_TEST

START_TEST(refuses_gguf_of_wrong_shapes)
{
    static const char *const tensors[] = {
        "output_norm.weight",       "blk.0.attn_norm.weight", "blk.1.attn_q.weight",
        "blk.1.attn_k.weight",      "blk.1.attn_v.weight",    "blk.1.attn_output.weight",
        "blk.1.ffn_norm.weight",    "blk.1.ffn_gate.weight",  "blk.1.ffn_up.weight",
        "blk.1.ffn_down.weight",    "output.weight",          "blk.1.attn_q_norm.weight",
        "blk.0.attn_k_norm.weight",
    };
    static const uint64_t cube[] = {64, 2, 2};
    char what[128];

    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        snprintf(what, sizeof what, "tensor %s: ", tensors[i]);
        write_model(&(struct recipe){.architecture = "qwen3", .enlarge = tensors[i]});
        gguf_writer_save(&writer, gguf_path);
        expect_failure(gguf_path, what, "expected");
        restart();
    }
    gguf_writer_entry(&writer, "blk.0.attn_norm.weight", 0, 3, cube, 0);
    for (int i = 0; i < 256; i++)
        bytes_u32(&writer.data, 0);
    expect_bad_recipe((struct recipe){.omit = "blk.0.attn_norm.weight"},
                      "tensor blk.0.attn_norm.weight: has 3 dimensions, expected 1");
}
END_TEST

START_TEST(refuses_gguf_of_unsupported_types)
{
    static const uint64_t shape[] = {256, 64};

    expect_bad_recipe((struct recipe){.retype = "output_norm.weight", .other_type = 8},
                      "tensor output_norm.weight: is Q8_0, expected F32, F16 or BF16 for a vector");
    gguf_writer_entry(&writer, "token_embd.weight", 16, 2, shape, 0);
    expect_bad_recipe((struct recipe){.hidden = 256, .omit = "token_embd.weight"},
                      "tensor token_embd.weight: the element type IQ2_XXS is not supported; "
                      "supported: " QUANT_SUPPORTED);
}
END_TEST

START_TEST(refuses_bad_gguf_geometry)
{
    expect_bad_recipe((struct recipe){.architecture = "mamba"},
                      "general.architecture: mamba is not supported; supported: llama (which ");
    expect_bad_recipe((struct recipe){.architecture = "llama4"}, "llama4 is not supported");
    expect_bad_recipe((struct recipe){.architecture = "qwen3moe"}, "qwen3moe is not supported");
    expect_bad_recipe((struct recipe){.query_heads = 3},
                      "llama.attention.head_count_kv: 3 query heads cannot share 2 KV heads");
    expect_bad_recipe(
        (struct recipe){.query_heads = 3, .kv_heads = 3, .omit = "attention.key_length"},
        "llama.attention.key_length: is missing, and the width 64 is not a multiple");
    expect_bad_recipe(
        (struct recipe){.query_heads = 16, .kv_heads = 16, .omit = "attention.key_length"},
        "llama.attention.key_length: a head of 4, expected an even number");
    expect_bad_recipe((struct recipe){.head_dim = 17}, "a head of 17");
    expect_bad_recipe((struct recipe){.head_dim = 520}, "llama.attention.key_length: is 520");
    expect_bad_recipe((struct recipe){.layers = 3, .layers_written = 2}, "cannot make up 3 layers");
    expect_bad_recipe((struct recipe){.layers = 65536, .layers_written = 2},
                      "21 tensors cannot make up 65536 layers");
    expect_bad_recipe((struct recipe){.layers = UINT32_MAX, .layers_written = 2},
                      "llama.block_count: is 4294967295, expected 1 to 65536");
    expect_bad_recipe((struct recipe){.layers = 1, .layers_written = 2},
                      "tensor blk.1.attn_norm.weight: the file has more than the 1 layers");
}
END_TEST

START_TEST(refuses_unsupported_gguf_features)
{
    static const float factors[9] = {1, 1, 1, 1, -1, 1, 1, 1, 1};

    expect_bad_uint("llama.expert_count", 8, "expert_count: is 8; mixtures of experts");
    expect_bad_uint("llama.attention.sliding_window", 255,
                    "sliding_window: is 255; sliding-window attention is not supported");
    expect_bad_uint("llama.attention.value_length", 32,
                    "value_length: is 32, but the keys have 16");
    expect_bad_uint("llama.rope.dimension_count", 8, "dimension_count: is 8 of a head of 16");
    expect_bad_uint("split.count", 2, "split.no: is missing");
    expect_bad_string("llama.expert_count", "8", "llama.expert_count: is STRING, expected an int");
    expect_bad_string(
        "llama.rope.scaling.type", "longrope",
        "llama.rope.scaling.type: longrope is not supported; supported: none, linear,");
    expect_bad_float("llama.rope.scaling.factor", -2, "rope.scaling.factor: is -2, expected 0 or");
    expect_bad_float("llama.rope.scale_linear", INFINITY, "rope.scale_linear: is not finite");
    gguf_writer_string(&writer, "llama.rope.scaling.type", "yarn");
    expect_bad_uint("llama.rope.scaling.original_context_length", 0,
                    "original_context_length: is 0, expected 1 to");
    gguf_writer_string(&writer, "llama.rope.scaling.type", "yarn");
    expect_bad_float("llama.rope.scaling.yarn_ext_factor", 0.5f,
                     "yarn_ext_factor: is 0.5; only 1 is supported");
    gguf_writer_string(&writer, "llama.rope.scaling.type", "yarn");
    expect_bad_string("llama.rope.scaling.yarn_beta_fast", "32",
                      "yarn_beta_fast: is STRING, expected FLOAT32 or FLOAT64");
    expect_bad_float("llama.rope.freq_base", 0,
                     "llama.rope.freq_base: is 0, expected a number abo");
    expect_bad_float("llama.rope.freq_base", NAN, "llama.rope.freq_base: is not finite");
    expect_bad_float("llama.attention.scale", 0.5f, "llama.attention.scale: is not supported");
    expect_bad_float("llama.logit_scale", 0.5f, "llama.logit_scale: is not supported");

    gguf_writer_tensor(&writer, "blk.1.attn_q.bias", 0, 64, 0, NULL);
    expect_bad_recipe((struct recipe){0}, "tensor blk.1.attn_q.bias: a bias here is not supported");
    gguf_writer_tensor(&writer, "rope_freqs.weight", 0, 8, 0, factors);
    expect_bad_recipe((struct recipe){0}, "tensor rope_freqs.weight: element 4 is -1");
    gguf_writer_tensor(&writer, "rope_freqs.weight", 0, 9, 0, factors);
    expect_bad_recipe((struct recipe){0}, "tensor rope_freqs.weight: is not F32 of 8 elements");
    gguf_writer_tensor(&writer, "rope_freqs.weight", 1, 16, 0, NULL);
    expect_bad_recipe((struct recipe){0}, "tensor rope_freqs.weight: is not F32 of 8 elements");
}
END_TEST

START_TEST(refuses_truncated_gguf)
{
    const struct recipe recipe = {.type = 3};
    struct bytes image;

    write_model(&recipe);
    image = gguf_writer_image(&writer);
    for (size_t size = 1; size < image.size; size += 97) {
        write_file(gguf_path, image.data, size);
        expect_failure(gguf_path, gguf_path, "");
    }
    bytes_free(&image);
}
END_TEST

/* --- memory ----------------------------------------------------------------------------------- */

static bool open_for_memory(const char *path)
{
    struct model *model;

    return model_open(path, &model, &error);
}

static void check_memory(const char *path, size_t file_size, const char *what)
{
    tests_check_memory(open_for_memory, path, file_size, what);
}

static void check_gguf_memory(const char *what)
{
    struct bytes image = gguf_writer_image(&writer);

    write_file(gguf_path, image.data, image.size);
    check_memory(gguf_path, image.size, what);
    bytes_free(&image);
    restart();
}

static void check_header_memory(const char *before, const char *unit, const char *after)
{
    struct bytes file = {0}, header = {0};
    char text[64];

    bytes_append(&header, before, strlen(before));
    for (int i = 0; header.size < 4000000; i++) {
        const int length = snprintf(text, sizeof text, unit, i);

        bytes_append(&header, text, (size_t)length);
    }
    bytes_append(&header, after, strlen(after));
    bytes_u64(&file, header.size);
    bytes_append(&file, header.data, header.size);
    write_file(tensors_path, file.data, file.size);
    check_memory(folder, file.size, unit);
    bytes_free(&file);
    bytes_free(&header);
}

/* What is claimed costs nothing, and what is there a small multiple of its size. */
START_TEST(bounds_memory)
{
    static const uint64_t dimensions[] = {1};
    static const uint8_t bytes[1 << 20];
    json_t *config = load_config("tiny-llama3");
    char name[32];

    write_model(&(struct recipe){0});
    writer.claimed_tensors = UINT32_MAX;
    check_gguf_memory("claimed tensors");
    write_model(&(struct recipe){0});
    writer.claimed_metadata = UINT32_MAX;
    check_gguf_memory("claimed metadata");
    write_model(&(struct recipe){0});
    gguf_writer_array(&writer, "list", GGUF_STRING, NULL, UINT32_MAX, 0);
    check_gguf_memory("claimed strings");
    for (int i = 0; i < 100000; i++) {
        snprintf(name, sizeof name, "%x", (unsigned)i);
        gguf_writer_bool(&writer, name, 1);
    }
    check_gguf_memory("metadata");
    for (int i = 0; i < 100000; i++) {
        snprintf(name, sizeof name, "%x", (unsigned)i);
        gguf_writer_entry(&writer, name, 39, 1, dimensions, 0);
    }
    check_gguf_memory("tensors");
    write_model(&(struct recipe){0});
    gguf_writer_array(&writer, "tokenizer.ggml.tokens", GGUF_STRING, bytes, sizeof bytes / 8,
                      sizeof bytes);
    check_gguf_memory("strings");

    ck_assert_int_eq(json_dump_file(config, config_path, 0), 0);
    check_header_memory("{\"__metadata__\":[", "%d,", "1]}");
    check_header_memory("{\"__metadata__\":[", "[],", "1]}");
    check_header_memory("{\"__metadata__\":[", "{},", "1]}");
    check_header_memory("{\"__metadata__\":[", "\"\",", "1]}");
    check_header_memory("{", "\"%x\":1,", "\"\":1}");
    check_header_memory("{", "\"%x\":{\"dtype\":\"X\",\"shape\":[0],\"data_offsets\":[0,0]},",
                        "\"\":1}");
    write_file(index_path, bytes, sizeof bytes);
    unlink(tensors_path);
    check_memory(folder, sizeof bytes, "index");
    write_file(config_path, bytes, sizeof bytes);
    check_memory(folder, sizeof bytes, "config");
    json_decref(config);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *test_case = tcase_create("model");

    tcase_add_checked_fixture(test_case, setup, teardown);
    tcase_add_test(test_case, opens_tiny_llama3);
    tcase_add_test(test_case, opens_tiny_qwen3);
    tcase_add_test(test_case, opens_several_files);
    tcase_add_test(test_case, header_has_shapes_but_no_norms);
    tcase_add_test(test_case, reads_older_rope_spellings);
    tcase_add_test(test_case, computes_yarn);
    tcase_add_test(test_case, copies_what_is_not_aligned);
    tcase_add_test(test_case, tolerates_inactive_features);
    tcase_add_test(test_case, refuses_bad_configs);
    tcase_add_test(test_case, refuses_an_active_sliding_window);
    tcase_add_test(test_case, knows_windows_of_mistral);
    tcase_add_test(test_case, refuses_other_architectures);
    tcase_add_test(test_case, refuses_configs_that_the_tensors_contradict);
    tcase_add_test(test_case, refuses_tensors_of_wrong_shapes_and_types);
    tcase_add_test(test_case, refuses_broken_folders);
    tcase_add_test(test_case, opens_gguf_of_every_type);
    tcase_add_test(test_case, opens_gguf_qwen3);
    tcase_add_test(test_case, opens_gguf_qwen2);
    tcase_add_test(test_case, scales_gguf_rope);
    tcase_add_test(test_case, opens_split_gguf);
    tcase_add_test(test_case, derives_absent_gguf_values);
    tcase_add_test(test_case, applies_gguf_rope_factors);
    tcase_add_test(test_case, tolerates_inactive_gguf_features);
    tcase_add_test(test_case, header_of_a_vocabulary_only_gguf);
    tcase_add_test(test_case, refuses_missing_files);
    tcase_add_test(test_case, refuses_gguf_with_missing_parts);
    tcase_add_test(test_case, refuses_gguf_of_wrong_shapes);
    tcase_add_test(test_case, refuses_gguf_of_unsupported_types);
    tcase_add_test(test_case, refuses_bad_gguf_geometry);
    tcase_add_test(test_case, refuses_gguf_values_of_other_types);
    tcase_add_test(test_case, refuses_gguf_vocabularies_that_disagree);
    tcase_add_test(test_case, refuses_unsupported_gguf_features);
    tcase_add_test(test_case, refuses_truncated_gguf);
    tcase_add_test(test_case, bounds_memory);
    suite_add_tcase(suite, test_case);
    return tests_run(suite);
}
