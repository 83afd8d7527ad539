/* SPDX-License-Identifier: MIT */
/* Model files: hyperparameters and mapped weights of Llama, Mistral, Qwen2 and Qwen3 transformers.
 */
#include "model.h"

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>

#include "gguf.h"
#include "json_text.h"
#include "safetensors.h"

/* Bounds of hyperparameters: far above any real model, low enough that no product of two
 * overflows. */
#define MAX_LAYERS   65536
#define MAX_HEADS    65536
#define MAX_WIDTH    (1 << 24)
#define MIN_HEAD_DIM 8
#define MAX_HEAD_DIM 512
#define MAX_CONTEXT  INT32_MAX

/* Real configurations have a few thousand. */
#define MAX_CONFIG_BYTES ((size_t)1 << 20)

/* Every layer has two norms and seven matrices. */
#define MIN_LAYER_TENSORS 9

static const char *const architecture_names[] = {
    [MODEL_LLAMA] = "llama",
    [MODEL_MISTRAL] = "mistral",
    [MODEL_QWEN2] = "qwen2",
    [MODEL_QWEN3] = "qwen3",
};

#define CONFIG_ARCHITECTURES "llama, mistral, qwen2, qwen3"

/* In GGUF Mistral's models are called llama, too: there is nothing that they do otherwise. */
#define GGUF_ARCHITECTURES "llama (which Mistral's files say as well), qwen2, qwen3"

struct model_files {
    struct gguf *gguf; /* this or the next is open, the other NULL */
    struct safetensors *safetensors;
    float *vectors; /* behind all norms and biases */
    void **copies;  /* [copy_count], of tensors that do not lie aligned in their file */
    size_t copy_count;
};

/* One place to read hyperparameters from: GGUF metadata or config.json. */
struct reader {
    const char *path;
    const struct gguf *gguf; /* NULL for a folder */
    const json_t *config;    /* NULL for GGUF */
    const char *prefix;      /* of the architecture's GGUF keys */
    struct error *error;
    char key[128]; /* the last one looked up, as messages show it */
};

/* A hyperparameter's two spellings; GGUF's follows the architecture and a dot. */
struct field {
    const char *gguf;
    const char *config;
};

static const struct field field_layers = {"block_count", "num_hidden_layers"};
static const struct field field_hidden = {"embedding_length", "hidden_size"};
static const struct field field_intermediate = {"feed_forward_length", "intermediate_size"};
static const struct field field_query_heads = {"attention.head_count", "num_attention_heads"};
static const struct field field_kv_heads = {"attention.head_count_kv", "num_key_value_heads"};
static const struct field field_head_dim = {"attention.key_length", "head_dim"};
static const struct field field_context = {"context_length", "max_position_embeddings"};
static const struct field field_epsilon = {"attention.layer_norm_rms_epsilon", "rms_norm_eps"};
static const struct field field_theta = {"rope.freq_base", "rope_theta"};

const char *model_architecture_name(enum model_architecture architecture)
{
    return architecture_names[architecture];
}

static bool find_architecture(const char *name, size_t size, enum model_architecture *architecture)
{
    for (size_t i = 0; i < sizeof architecture_names / sizeof architecture_names[0]; i++) {
        if (strlen(architecture_names[i]) == size &&
            memcmp(architecture_names[i], name, size) == 0) {
            *architecture = (enum model_architecture)i;
            return true;
        }
    }
    return false;
}

/* Looks the field up and notes its name; JSON's null counts as absent. */
static bool reader_has(struct reader *reader, struct field field)
{
    if (reader->gguf != NULL) {
        snprintf(reader->key, sizeof reader->key, "%s.%s", reader->prefix, field.gguf);
        return gguf_has(reader->gguf, reader->key);
    }
    snprintf(reader->key, sizeof reader->key, "%s", field.config);
    return !json_is_null(json_object_get(reader->config, field.config)) &&
           json_object_get(reader->config, field.config) != NULL;
}

/* A size between `least` and `most`, both included. */
static bool reader_size(struct reader *reader, struct field field, size_t least, size_t most,
                        size_t *size)
{
    uint64_t value;

    if (!reader_has(reader, field))
        return error_set(reader->error, "%s: %s: is missing", reader->path, reader->key);
    if (reader->gguf != NULL) {
        if (!gguf_get_uint(reader->gguf, reader->key, &value, reader->error))
            return false;
    } else {
        const json_t *number = json_object_get(reader->config, field.config);

        if (!json_is_integer(number) || json_integer_value(number) < 0)
            return error_set(reader->error, "%s: %s: is not an integer of 0 or more", reader->path,
                             reader->key);
        value = (uint64_t)json_integer_value(number);
    }
    if (value < least || value > most)
        return error_set(reader->error, "%s: %s: is %" PRIu64 ", expected %zu to %zu", reader->path,
                         reader->key, value, least, most);
    *size = (size_t)value;
    return true;
}

/* A finite number above 0. */
static bool reader_positive(struct reader *reader, struct field field, double *number)
{
    if (!reader_has(reader, field))
        return error_set(reader->error, "%s: %s: is missing", reader->path, reader->key);
    if (reader->gguf != NULL) {
        if (!gguf_get_float(reader->gguf, reader->key, number, reader->error))
            return false;
    } else {
        const json_t *value = json_object_get(reader->config, field.config);

        if (!json_is_number(value))
            return error_set(reader->error, "%s: %s: is not a number", reader->path, reader->key);
        *number = json_number_value(value);
    }
    if (!(*number > 0) || !isfinite(*number))
        return error_set(reader->error, "%s: %s: is %g, expected a number above 0", reader->path,
                         reader->key, *number);
    return true;
}

/* What both formats have. */
static bool read_geometry(struct reader *reader, struct model *model)
{
    double epsilon;

    if (!reader_size(reader, field_layers, 1, MAX_LAYERS, &model->layer_count) ||
        !reader_size(reader, field_hidden, 1, MAX_WIDTH, &model->hidden) ||
        !reader_size(reader, field_intermediate, 1, MAX_WIDTH, &model->intermediate) ||
        !reader_size(reader, field_query_heads, 1, MAX_HEADS, &model->query_heads) ||
        !reader_size(reader, field_context, 1, MAX_CONTEXT, &model->context_length))
        return false;

    model->kv_heads = model->query_heads;
    if (reader_has(reader, field_kv_heads) &&
        !reader_size(reader, field_kv_heads, 1, MAX_HEADS, &model->kv_heads))
        return false;
    if (model->query_heads % model->kv_heads != 0)
        return error_set(reader->error, "%s: %s: %zu query heads cannot share %zu KV heads evenly",
                         reader->path, reader->key, model->query_heads, model->kv_heads);

    if (reader_has(reader, field_head_dim)) {
        if (!reader_size(reader, field_head_dim, MIN_HEAD_DIM, MAX_HEAD_DIM, &model->head_dim))
            return false;
    } else if (model->hidden % model->query_heads != 0) {
        return error_set(reader->error,
                         "%s: %s: is missing, and the width %zu is not a multiple of %zu heads",
                         reader->path, reader->key, model->hidden, model->query_heads);
    } else {
        model->head_dim = model->hidden / model->query_heads;
    }
    if (model->head_dim % 2 != 0 || model->head_dim < MIN_HEAD_DIM ||
        model->head_dim > MAX_HEAD_DIM)
        return error_set(reader->error, "%s: %s: a head of %zu, expected an even number, %d to %d",
                         reader->path, reader->key, model->head_dim, MIN_HEAD_DIM, MAX_HEAD_DIM);

    if (!reader_positive(reader, field_epsilon, &epsilon))
        return false;
    if (epsilon < FLT_MIN || epsilon > 1)
        return error_set(reader->error, "%s: %s: is %g, expected %g to 1", reader->path,
                         reader->key, epsilon, FLT_MIN);
    model->rms_epsilon = (float)epsilon;
    return true;
}

/* Llama 3.1: wavelengths beyond the original context are stretched by `factor`, those well inside
 * it are kept, and those between are blended linearly in context / wavelength. */
static double llama3_frequency(const struct model *model, double plain)
{
    const double turns = model->rope_original_context * plain / (2 * M_PI);
    const double low = model->rope_low_frequency_factor;
    const double high = model->rope_high_frequency_factor;
    double keep;

    if (turns < low)
        return plain / model->rope_factor;
    if (turns > high)
        return plain;
    keep = (turns - low) / (high - low);
    return (1 - keep) * plain / model->rope_factor + keep * plain;
}

/* The pair, as a real number, whose plain frequency turns `turns` times over the original context,
 * times two. */
static double yarn_dimension(const struct model *model, double turns)
{
    return (double)model->head_dim * log(model->rope_original_context / (2 * M_PI * turns)) /
           (2 * log(model->rope_theta));
}

/* YaRN: pairs that turn more than beta_fast times over the original context are kept, those that
 * turn less than beta_slow times are stretched by `factor`, and those between are blended linearly
 * in the number of the pair. `truncate` widens that range to whole numbers. */
static double yarn_frequency(const struct model *model, bool truncate, double plain, size_t i)
{
    double low = yarn_dimension(model, model->rope_beta_fast);
    double high = yarn_dimension(model, model->rope_beta_slow);
    double stretch;

    if (truncate) {
        low = floor(low);
        high = ceil(high);
    }
    if (low < 0)
        low = 0;
    if (high > (double)(model->head_dim - 1))
        high = (double)(model->head_dim - 1);
    if (low == high)
        high += 0.001;
    stretch = ((double)i - low) / (high - low);
    stretch = stretch < 0 ? 0 : stretch > 1 ? 1 : stretch;
    return stretch * plain / model->rope_factor + (1 - stretch) * plain;
}

/* How much YaRN enlarges queries and keys for a context that is `factor` times as long. */
static double yarn_magnitude(double factor, double weight)
{
    return factor <= 1 ? 1 : 1 + 0.1 * weight * log(factor);
}

/* The scaling and all that belongs to it are set. `divisors` [head_dim / 2] may be NULL. */
static bool set_frequencies(struct model *model, const float *divisors, bool truncate,
                            struct reader *reader)
{
    const size_t count = model->head_dim / 2;
    double context;

    if (model->rope_scaling == MODEL_ROPE_YARN) {
        if (!(model->rope_theta > 1))
            return error_set(reader->error, "%s: RoPE's theta is %g, YaRN needs one above 1",
                             reader->path, model->rope_theta);
        context = model->rope_original_context * model->rope_factor;
        if (context > (double)model->context_length && context <= MAX_CONTEXT)
            model->context_length = (size_t)context;
    }
    model->rope_inverse_frequencies = calloc(count, sizeof *model->rope_inverse_frequencies);
    if (model->rope_inverse_frequencies == NULL)
        return error_set(reader->error, "%s: out of memory", reader->path);
    for (size_t i = 0; i < count; i++) {
        const double divisor = divisors != NULL ? divisors[i] : 1;
        double frequency = pow(model->rope_theta, -2.0 * (double)i / (double)model->head_dim);

        if (!(divisor > 0) || !isfinite(divisor))
            return error_set(reader->error,
                             "%s: tensor rope_freqs.weight: element %zu is %g, "
                             "expected a number above 0",
                             reader->path, i, divisor);
        frequency /= divisor;
        if (model->rope_scaling == MODEL_ROPE_LLAMA3)
            frequency = llama3_frequency(model, frequency);
        else if (model->rope_scaling == MODEL_ROPE_YARN)
            frequency = yarn_frequency(model, truncate, frequency, i);
        else if (model->rope_scaling == MODEL_ROPE_LINEAR)
            frequency /= model->rope_factor;
        /* Numbers that are each in order may still make up a frequency that is not. */
        if (!(frequency <= FLT_MAX))
            return error_set(reader->error,
                             "%s: RoPE: pair %zu turns by %g a position, out of range",
                             reader->path, i, frequency);
        model->rope_inverse_frequencies[i] = (float)frequency;
    }
    if (!isfinite(model->rope_magnitude))
        return error_set(reader->error, "%s: RoPE's attention factor is not finite", reader->path);
    return true;
}

/* --- tensors ---------------------------------------------------------------------------------- */

enum role {
    ROLE_ATTENTION_NORM,
    ROLE_Q,
    ROLE_K,
    ROLE_V,
    ROLE_O,
    ROLE_Q_NORM,
    ROLE_K_NORM,
    ROLE_FFN_NORM,
    ROLE_GATE,
    ROLE_UP,
    ROLE_DOWN,
    ROLE_TOKEN_EMBEDDING, /* from here on once in a model */
    ROLE_OUTPUT_NORM,
    ROLE_OUTPUT,
    ROLES
};

static const struct {
    const char *gguf;
    const char *safetensors;
} role_names[ROLES] = {
    [ROLE_ATTENTION_NORM] = {"attn_norm", "input_layernorm"},
    [ROLE_Q] = {"attn_q", "self_attn.q_proj"},
    [ROLE_K] = {"attn_k", "self_attn.k_proj"},
    [ROLE_V] = {"attn_v", "self_attn.v_proj"},
    [ROLE_O] = {"attn_output", "self_attn.o_proj"},
    [ROLE_Q_NORM] = {"attn_q_norm", "self_attn.q_norm"},
    [ROLE_K_NORM] = {"attn_k_norm", "self_attn.k_norm"},
    [ROLE_FFN_NORM] = {"ffn_norm", "post_attention_layernorm"},
    [ROLE_GATE] = {"ffn_gate", "mlp.gate_proj"},
    [ROLE_UP] = {"ffn_up", "mlp.up_proj"},
    [ROLE_DOWN] = {"ffn_down", "mlp.down_proj"},
    [ROLE_TOKEN_EMBEDDING] = {"token_embd", "model.embed_tokens"},
    [ROLE_OUTPUT_NORM] = {"output_norm", "model.norm"},
    [ROLE_OUTPUT] = {"output", "lm_head"},
};

/* A tensor of either format as a matrix; a vector is a matrix of one row. */
struct view {
    const char *type_name;
    bool known;
    enum quant_type type;
    size_t dimension_count;
    size_t outer; /* product of all dimensions but the two innermost */
    size_t rows;
    size_t columns;
    const void *data;
    bool aligned;     /* whether `data` is, to the type's widest field */
    const char *path; /* of the file that it is in */
};

struct loader {
    struct model_files *files;
    const char *path;
    struct error *error;
    bool biases;          /* whether q, k and v have them */
    float *vectors;       /* where the next vector goes; NULL while only checking */
    size_t vector_floats; /* floats that the vectors seen so far take */
    char name[128];       /* of the last tensor looked up */
};

static void name_tensor(struct loader *loader, enum role role, size_t layer, const char *suffix)
{
    const bool is_gguf = loader->files->gguf != NULL;
    const char *name = is_gguf ? role_names[role].gguf : role_names[role].safetensors;

    if (role >= ROLE_TOKEN_EMBEDDING)
        snprintf(loader->name, sizeof loader->name, "%s.%s", name, suffix);
    else
        snprintf(loader->name, sizeof loader->name, "%s.%zu.%s.%s",
                 is_gguf ? "blk" : "model.layers", layer, name, suffix);
}

/* Looks up the tensor that loader->name says. */
static bool find_tensor(const struct loader *loader, struct view *view)
{
    if (loader->files->gguf != NULL) {
        const struct gguf_tensor *tensor = gguf_tensor(loader->files->gguf, loader->name);

        if (tensor == NULL)
            return false;
        *view = (struct view){
            .type_name = quant_gguf_name(tensor->gguf_type),
            .known = tensor->known,
            .type = tensor->type,
            .dimension_count = tensor->dimension_count,
            .outer = tensor->dimensions[2] * tensor->dimensions[3],
            .rows = tensor->dimensions[1],
            .columns = tensor->dimensions[0],
            .data = tensor->data,
            .aligned = true,
            .path = tensor->file->path,
        };
    } else {
        const struct safetensors_tensor *tensor =
            safetensors_tensor(loader->files->safetensors, loader->name);
        size_t reversed[SAFETENSORS_MAX_DIMENSIONS] = {1, 1, 1, 1};

        if (tensor == NULL)
            return false;
        for (size_t i = 0; i < tensor->dimension_count; i++)
            reversed[tensor->dimension_count - 1 - i] = tensor->dimensions[i];
        *view = (struct view){
            .type_name = tensor->dtype,
            .known = tensor->known,
            .type = tensor->type,
            .dimension_count = tensor->dimension_count,
            .outer = reversed[2] * reversed[3],
            .rows = reversed[1],
            .columns = reversed[0],
            .data = tensor->data,
            .aligned = tensor->aligned,
            .path = tensor->file->path,
        };
    }
    return true;
}

static bool has_tensor(struct loader *loader, enum role role, size_t layer, const char *suffix)
{
    struct view view;

    name_tensor(loader, role, layer, suffix);
    return find_tensor(loader, &view);
}

/* Finds a tensor of the given shape; rows 0 takes any number of rows. */
static bool require_tensor(struct loader *loader, enum role role, size_t layer, const char *suffix,
                           size_t rows, size_t columns, struct view *view)
{
    name_tensor(loader, role, layer, suffix);
    if (!find_tensor(loader, view))
        return error_set(loader->error, "%s: tensor %s: is missing", loader->path, loader->name);
    if (view->outer != 1)
        return error_set(loader->error, "%s: tensor %s: has %zu dimensions, expected %d",
                         view->path, loader->name, view->dimension_count, rows == 1 ? 1 : 2);
    if (view->columns != columns || (rows != 0 && view->rows != rows) || view->rows == 0) {
        if (rows == 1)
            return error_set(loader->error, "%s: tensor %s: has %zu x %zu elements, expected %zu",
                             view->path, loader->name, view->rows, view->columns, columns);
        if (rows == 0)
            return error_set(loader->error,
                             "%s: tensor %s: is %zu x %zu (rows x columns), expected %zu columns",
                             view->path, loader->name, view->rows, view->columns, columns);
        return error_set(loader->error,
                         "%s: tensor %s: is %zu x %zu (rows x columns), expected %zu x %zu",
                         view->path, loader->name, view->rows, view->columns, rows, columns);
    }
    if (!view->known)
        return error_set(loader->error,
                         "%s: tensor %s: the element type %s is not supported; supported: %s",
                         view->path, loader->name, view->type_name,
                         loader->files->gguf != NULL ? QUANT_SUPPORTED : "F32, F16, BF16");
    return true;
}

/* Replaces data that do not lie aligned by a copy: older writers of safetensors did not pad their
 * headers. Nothing is read, and so nothing copied, while only checking. */
static bool align_view(struct loader *loader, struct view *view, size_t row_bytes)
{
    struct model_files *files = loader->files;
    const size_t size = view->rows * row_bytes; /* it lies inside the file */
    void **copies;
    void *copy;

    if (view->aligned || loader->vectors == NULL)
        return true;
    copies = realloc(files->copies, (files->copy_count + 1) * sizeof *copies);
    if (copies != NULL)
        files->copies = copies;
    copy = copies != NULL ? malloc(size) : NULL;
    if (copy == NULL)
        return error_set(loader->error, "%s: tensor %s: out of memory for %zu bytes", view->path,
                         loader->name, size);
    memcpy(copy, view->data, size);
    files->copies[files->copy_count++] = copy;
    view->data = copy;
    return true;
}

static bool load_matrix(struct loader *loader, enum role role, size_t layer, size_t rows,
                        size_t columns, struct weight *weight)
{
    struct view view;
    size_t row_bytes;

    if (!require_tensor(loader, role, layer, "weight", rows, columns, &view))
        return false;
    if (!quant_row_bytes(view.type, columns, &row_bytes))
        return error_set(loader->error, "%s: tensor %s: %zu columns are not whole %s blocks",
                         view.path, loader->name, columns, view.type_name);
    if (!align_view(loader, &view, row_bytes))
        return false;
    *weight = (struct weight){.type = view.type,
                              .rows = view.rows,
                              .columns = columns,
                              .row_bytes = row_bytes,
                              .data = view.data};
    if (loader->biases && (role == ROLE_Q || role == ROLE_K || role == ROLE_V))
        return true;
    if (has_tensor(loader, role, layer, "bias"))
        return error_set(loader->error, "%s: tensor %s: a bias here is not supported", view.path,
                         loader->name);
    return true;
}

static bool load_vector(struct loader *loader, enum role role, size_t layer, const char *suffix,
                        size_t count, const float **vector)
{
    struct view view;

    if (!require_tensor(loader, role, layer, suffix, 1, count, &view))
        return false;
    if (quant_info(view.type)->block_elements != 1)
        return error_set(loader->error,
                         "%s: tensor %s: is %s, expected F32, F16 or BF16 for a vector", view.path,
                         loader->name, view.type_name);
    if (__builtin_add_overflow(loader->vector_floats, count, &loader->vector_floats))
        return error_set(loader->error, "%s: tensor %s: is too large", view.path, loader->name);
    if (loader->vectors != NULL) {
        if (!align_view(loader, &view, count * quant_info(view.type)->block_bytes))
            return false;
        quant_info(view.type)->dequantise(view.data, count, loader->vectors);
        *vector = loader->vectors;
        loader->vectors += count;
    }
    return true;
}

static bool load_layer(struct loader *loader, const struct model *model, size_t index,
                       struct model_layer *layer)
{
    const size_t hidden = model->hidden, intermediate = model->intermediate;
    const size_t q_rows = model->query_heads * model->head_dim;
    const size_t kv_rows = model->kv_heads * model->head_dim;

    if (model->architecture == MODEL_QWEN3 &&
        (!load_vector(loader, ROLE_Q_NORM, index, "weight", model->head_dim, &layer->q_norm) ||
         !load_vector(loader, ROLE_K_NORM, index, "weight", model->head_dim, &layer->k_norm)))
        return false;
    if (loader->biases && (!load_vector(loader, ROLE_Q, index, "bias", q_rows, &layer->q_bias) ||
                           !load_vector(loader, ROLE_K, index, "bias", kv_rows, &layer->k_bias) ||
                           !load_vector(loader, ROLE_V, index, "bias", kv_rows, &layer->v_bias)))
        return false;
    return load_vector(loader, ROLE_ATTENTION_NORM, index, "weight", hidden,
                       &layer->attention_norm) &&
           load_matrix(loader, ROLE_Q, index, q_rows, hidden, &layer->q) &&
           load_matrix(loader, ROLE_K, index, kv_rows, hidden, &layer->k) &&
           load_matrix(loader, ROLE_V, index, kv_rows, hidden, &layer->v) &&
           load_matrix(loader, ROLE_O, index, hidden, q_rows, &layer->o) &&
           load_vector(loader, ROLE_FFN_NORM, index, "weight", hidden, &layer->ffn_norm) &&
           load_matrix(loader, ROLE_GATE, index, intermediate, hidden, &layer->gate) &&
           load_matrix(loader, ROLE_UP, index, intermediate, hidden, &layer->up) &&
           load_matrix(loader, ROLE_DOWN, index, hidden, intermediate, &layer->down);
}

/* Checks and maps everything; with loader->vectors set it also expands norms and biases there. */
static bool load_tensors(struct loader *loader, struct model *model)
{
    if (!load_matrix(loader, ROLE_TOKEN_EMBEDDING, 0, 0, model->hidden, &model->token_embedding))
        return false;
    model->vocabulary = model->token_embedding.rows;
    if (model->vocabulary > INT32_MAX)
        return error_set(loader->error, "%s: tensor %s: %zu rows are more than token ids",
                         loader->path, loader->name, model->vocabulary);
    if (!load_vector(loader, ROLE_OUTPUT_NORM, 0, "weight", model->hidden, &model->output_norm))
        return false;
    if (model->tied_output)
        model->output = model->token_embedding;
    else if (!load_matrix(loader, ROLE_OUTPUT, 0, model->vocabulary, model->hidden, &model->output))
        return false;
    for (size_t i = 0; i < model->layer_count; i++) {
        if (!load_layer(loader, model, i, &model->layers[i]))
            return false;
    }
    if (has_tensor(loader, ROLE_ATTENTION_NORM, model->layer_count, "weight"))
        return error_set(loader->error,
                         "%s: tensor %s: the file has more than the %zu layers "
                         "that the hyperparameters say",
                         loader->path, loader->name, model->layer_count);
    return true;
}

/* `tensor_count` of the file bounds what is allocated for layers, and the vectors' own tensors,
 * which do not overlap, bound what is allocated for vectors. */
static bool load_weights(struct model *model, const char *path, size_t tensor_count,
                         bool header_only, struct error *error)
{
    struct loader loader = {.files = model->files,
                            .path = path,
                            .error = error,
                            .biases = model->architecture == MODEL_QWEN2};

    if (model->layer_count > tensor_count / MIN_LAYER_TENSORS)
        return error_set(error, "%s: %zu tensors cannot make up %zu layers", path, tensor_count,
                         model->layer_count);
    model->layers = calloc(model->layer_count, sizeof *model->layers);
    if (model->layers == NULL)
        return error_set(error, "%s: out of memory", path);
    if (!load_tensors(&loader, model))
        return false;
    model->has_weights = true;
    if (header_only)
        return true;
    model->files->vectors = calloc(loader.vector_floats, sizeof *model->files->vectors);
    if (model->files->vectors == NULL)
        return error_set(error, "%s: out of memory", path);
    loader.vectors = model->files->vectors;
    return load_tensors(&loader, model);
}

/* --- GGUF ------------------------------------------------------------------------------------- */

/* Refuses what is not computed here, where the file asks for it. */
static bool check_gguf_features(struct reader *reader, const struct model *model)
{
    static const struct field value_length = {"attention.value_length", NULL};
    static const struct field rotated = {"rope.dimension_count", NULL};
    static const struct field experts = {"expert_count", NULL};
    static const struct field window = {"attention.sliding_window", NULL};
    /* Multipliers with which some conversions change the computation. */
    static const struct field scales[] = {
        {"attention.scale", NULL},
        {"logit_scale", NULL},
        {"embedding_scale", NULL},
        {"residual_scale", NULL},
        {"attention.temperature_scale", NULL},
    };
    size_t size;
    double number;

    if (reader_has(reader, value_length)) {
        if (!reader_size(reader, value_length, 0, SIZE_MAX, &size))
            return false;
        if (size != model->head_dim)
            return error_set(reader->error,
                             "%s: %s: is %zu, but the keys have %zu; only equal "
                             "sizes are supported",
                             reader->path, reader->key, size, model->head_dim);
    }
    if (reader_has(reader, rotated)) {
        if (!reader_size(reader, rotated, 0, SIZE_MAX, &size))
            return false;
        if (size != model->head_dim)
            return error_set(reader->error,
                             "%s: %s: is %zu of a head of %zu; RoPE over a part of "
                             "the head is not supported",
                             reader->path, reader->key, size, model->head_dim);
    }
    if (reader_has(reader, experts)) {
        if (!reader_size(reader, experts, 0, SIZE_MAX, &size))
            return false;
        if (size > 0)
            return error_set(reader->error, "%s: %s: is %zu; mixtures of experts are not supported",
                             reader->path, reader->key, size);
    }
    if (reader_has(reader, window)) {
        if (!reader_size(reader, window, 0, SIZE_MAX, &size))
            return false;
        if (size > 0 && size < model->context_length)
            return error_set(reader->error,
                             "%s: %s: is %zu; sliding-window attention is not "
                             "supported",
                             reader->path, reader->key, size);
    }
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        if (!reader_has(reader, scales[i]))
            continue;
        if (!gguf_get_float(reader->gguf, reader->key, &number, reader->error))
            return false;
        if (number != 0)
            return error_set(reader->error, "%s: %s: is not supported", reader->path, reader->key);
    }
    return true;
}

/* A number above 0 where the file has one; 0 in the file says that there is none. */
static bool read_gguf_option(struct reader *reader, struct field field, double *number)
{
    double value;

    if (!reader_has(reader, field))
        return true;
    if (!gguf_get_float(reader->gguf, reader->key, &value, reader->error))
        return false;
    if (value < 0)
        return error_set(reader->error, "%s: %s: is %g, expected 0 or a number above it",
                         reader->path, reader->key, value);
    if (value > 0)
        *number = value;
    return true;
}

static bool read_gguf_yarn(struct reader *reader, struct model *model)
{
    static const struct field original = {"rope.scaling.original_context_length", NULL};
    static const struct field multiplier = {"rope.scaling.yarn_log_multiplier", NULL};
    static const struct field magnitude = {"rope.scaling.yarn_attn_factor", NULL};
    static const struct field beta_fast = {"rope.scaling.yarn_beta_fast", NULL};
    static const struct field beta_slow = {"rope.scaling.yarn_beta_slow", NULL};
    static const struct field blend = {"rope.scaling.yarn_ext_factor", NULL};
    double weight = 0, value, share = 1;
    size_t context = model->context_length;

    if (reader_has(reader, original) && !reader_size(reader, original, 1, MAX_CONTEXT, &context))
        return false;
    model->rope_original_context = (double)context;
    model->rope_beta_fast = 32;
    model->rope_beta_slow = 1;
    if (!read_gguf_option(reader, beta_fast, &model->rope_beta_fast) ||
        !read_gguf_option(reader, beta_slow, &model->rope_beta_slow) ||
        !read_gguf_option(reader, multiplier, &weight))
        return false;
    if (reader_has(reader, blend)) {
        if (!gguf_get_float(reader->gguf, reader->key, &share, reader->error))
            return false;
        if (share >= 0 && share != 1) /* a negative one says that none is set */
            return error_set(reader->error, "%s: %s: is %g; only 1 is supported", reader->path,
                             reader->key, share);
    }
    value = yarn_magnitude(model->rope_factor, 1);
    if (weight > 0)
        value /= yarn_magnitude(model->rope_factor, weight);
    if (!read_gguf_option(reader, magnitude, &value))
        return false;
    model->rope_magnitude = (float)value;
    return true;
}

/* GGUF names no type for Llama 3's scaling: it lists the factors that result. */
static bool read_gguf_rope(struct reader *reader, struct model *model)
{
    static const struct field scaling_type = {"rope.scaling.type", NULL};
    static const struct field scaling_factor = {"rope.scaling.factor", NULL};
    static const struct field older_factor = {"rope.scale_linear", NULL};
    static const struct field magnitude = {"rope.scaling.attn_factor", NULL};
    const struct gguf_tensor *factors = gguf_tensor(reader->gguf, "rope_freqs.weight");
    struct gguf_string type = {"linear", 6};
    const float *divisors = NULL;
    double factor = 1, value = 1;

    model->rope_theta = 10000;
    model->rope_magnitude = 1;
    if (reader_has(reader, field_theta) &&
        !reader_positive(reader, field_theta, &model->rope_theta))
        return false;
    if (!read_gguf_option(
            reader, reader_has(reader, scaling_factor) ? scaling_factor : older_factor, &factor))
        return false;
    if (reader_has(reader, scaling_type) &&
        !gguf_get_string(reader->gguf, reader->key, &type, reader->error))
        return false;
    if (gguf_string_is(type, "yarn")) {
        model->rope_scaling = MODEL_ROPE_YARN;
        model->rope_factor = factor;
        if (!read_gguf_yarn(reader, model))
            return false;
    } else if (gguf_string_is(type, "linear")) {
        model->rope_scaling = factor != 1 ? MODEL_ROPE_LINEAR : MODEL_ROPE_PLAIN;
        model->rope_factor = factor != 1 ? factor : 0;
    } else if (!gguf_string_is(type, "none")) {
        return error_set(
            reader->error, "%s: %s: %.*s is not supported; supported: none, linear, yarn",
            reader->path, reader->key, type.size < 40 ? (int)type.size : 40, type.data);
    }
    if (!read_gguf_option(reader, magnitude, &value))
        return false;
    model->rope_magnitude *= (float)value;

    if (factors != NULL) {
        if (!factors->known || factors->type != QUANT_F32 ||
            factors->size != model->head_dim / 2 * sizeof(float))
            return error_set(reader->error,
                             "%s: tensor rope_freqs.weight: is not F32 of %zu elements",
                             reader->path, model->head_dim / 2);
        divisors = factors->data;
        if (model->rope_scaling == MODEL_ROPE_PLAIN)
            model->rope_scaling = MODEL_ROPE_FACTORS;
    }
    /* Conversion to GGUF permutes the rows of Llama's q and k, and not those of Qwen's. */
    model->rope_interleaved = model->architecture == MODEL_LLAMA;
    return set_frequencies(model, divisors, true, reader);
}

/* The embedding's rows, or without tensors the tokens listed, are the vocabulary; what else speaks
 * of its size has to agree. */
static bool check_gguf_vocabulary(struct reader *reader, struct model *model)
{
    static const char list_key[] = "tokenizer.ggml.tokens";
    static const struct field vocabulary = {"vocab_size", NULL};
    struct gguf_string *tokens;
    size_t count;

    if (!model->has_weights || gguf_has(reader->gguf, list_key)) {
        if (!gguf_get_strings(reader->gguf, list_key, &tokens, &count, reader->error))
            return false;
        free(tokens);
        if (!model->has_weights)
            model->vocabulary = count;
        if (count != model->vocabulary)
            return error_set(reader->error,
                             "%s: %s: lists %zu tokens, but the embedding has %zu rows",
                             reader->path, list_key, count, model->vocabulary);
    }
    if (!reader_has(reader, vocabulary))
        return true;
    if (!reader_size(reader, vocabulary, 0, SIZE_MAX, &count))
        return false;
    if (count != model->vocabulary)
        return error_set(reader->error, "%s: %s: is %zu, but the vocabulary has %zu tokens",
                         reader->path, reader->key, count, model->vocabulary);
    return true;
}

static bool open_gguf(const char *path, bool header_only, struct model *model, struct error *error)
{
    struct reader reader = {.path = path, .error = error};
    struct gguf_string name;

    if (!gguf_open(path, &model->files->gguf, error))
        return false;
    reader.gguf = model->files->gguf;
    if (!gguf_get_string(reader.gguf, "general.architecture", &name, error))
        return false;
    if (!find_architecture(name.data, name.size, &model->architecture) ||
        model->architecture == MODEL_MISTRAL)
        return error_set(error, "%s: general.architecture: %.*s is not supported; supported: %s",
                         path, name.size < 60 ? (int)name.size : 60, name.data, GGUF_ARCHITECTURES);
    reader.prefix = architecture_names[model->architecture];
    if (!read_geometry(&reader, model) || !read_gguf_rope(&reader, model) ||
        !check_gguf_features(&reader, model))
        return false;
    model->tied_output = gguf_tensor(reader.gguf, "output.weight") == NULL;
    if (gguf_tensor_count(reader.gguf) > 0) {
        if (!load_weights(model, path, gguf_tensor_count(reader.gguf), header_only, error))
            return false;
    } else if (!header_only) {
        return error_set(error, "%s: holds no tensors, only a vocabulary", path);
    }
    if (!check_gguf_vocabulary(&reader, model))
        return false;
    if (!header_only)
        gguf_prefetch(reader.gguf);
    return true;
}

/* --- Hugging Face folders --------------------------------------------------------------------- */

/* A flag of config.json; absent and null are false. */
static bool read_flag(struct reader *reader, const char *key, bool *flag)
{
    const json_t *value = json_object_get(reader->config, key);

    *flag = json_is_true(value);
    if (value != NULL && !json_is_null(value) && !json_is_boolean(value))
        return error_set(reader->error, "%s: %s: is not true or false", reader->path, key);
    return true;
}

/* Where layers are not listed one by one, a Mistral model has one window for all layers, 4096 if it
 * names none, and a Qwen model has one for the layers from the max_window_layers-th on, if it says
 * so. A window that the context does not exceed changes nothing. */
static bool check_sliding_window(struct reader *reader, const struct model *model)
{
    static const struct field first_layer = {NULL, "max_window_layers"};
    static const struct field window = {NULL, "sliding_window"};
    const bool mistral = model->architecture == MODEL_MISTRAL;
    const json_t *types = json_object_get(reader->config, "layer_types");
    size_t first = mistral ? 0 : 28, size = 4096, i;
    const json_t *type;
    bool enabled;

    if (types != NULL && !json_is_null(types)) {
        if (!json_is_array(types))
            return error_set(reader->error, "%s: layer_types: is not an array", reader->path);
        json_array_foreach(types, i, type)
        {
            if (!json_is_string(type) || strcmp(json_string_value(type), "full_attention") != 0)
                return error_set(reader->error,
                                 "%s: layer_types: layer %zu is %.40s; only "
                                 "full_attention is supported",
                                 reader->path, i,
                                 json_is_string(type) ? json_string_value(type) : "not a string");
        }
        return true;
    }
    if (!read_flag(reader, "use_sliding_window", &enabled))
        return false;
    if (!(mistral
              ? json_object_get(reader->config, window.config) == NULL || reader_has(reader, window)
              : enabled && reader_has(reader, window)))
        return true;
    if (reader_has(reader, window) && !reader_size(reader, window, 0, SIZE_MAX, &size))
        return false;
    if (!mistral && reader_has(reader, first_layer) &&
        !reader_size(reader, first_layer, 0, SIZE_MAX, &first))
        return false;
    if (first < model->layer_count && size < model->context_length)
        return error_set(reader->error,
                         "%s: sliding_window: is %zu, less than the context of %zu; "
                         "sliding-window attention is not supported",
                         reader->path, size, model->context_length);
    return true;
}

static bool check_config_features(struct reader *reader, const struct model *model)
{
    static const char *const biases[] = {"attention_bias", "mlp_bias"};
    const json_t *activation = json_object_get(reader->config, "hidden_act");
    bool biased;

    for (size_t i = 0; i < sizeof biases / sizeof biases[0]; i++) {
        if (!read_flag(reader, biases[i], &biased))
            return false;
        if (biased)
            return error_set(reader->error, "%s: %s: these biases are not supported", reader->path,
                             biases[i]);
    }
    if (activation != NULL &&
        (!json_is_string(activation) || strcmp(json_string_value(activation), "silu") != 0))
        return error_set(reader->error, "%s: hidden_act: %.40s is not supported; supported: silu",
                         reader->path,
                         json_is_string(activation) ? json_string_value(activation) : "its value");
    return check_sliding_window(reader, model);
}

/* The object in config.json that tells of RoPE, and what it is called there. */
struct rope_object {
    const char *name;
    const json_t *json; /* NULL: there is none */
};

/* A finite number above 0. */
static bool read_rope_number(struct reader *reader, struct rope_object object, const char *key,
                             double *number)
{
    const json_t *value = json_object_get(object.json, key);

    if (!json_is_number(value) || !(json_number_value(value) > 0) ||
        !isfinite(json_number_value(value)))
        return error_set(reader->error, "%s: %s.%s: is %s, expected a number above 0", reader->path,
                         object.name, key, value == NULL ? "missing" : "something else");
    *number = json_number_value(value);
    return true;
}

/* The same, but absent, null and 0 leave *number as it is. */
static bool read_rope_option(struct reader *reader, struct rope_object object, const char *key,
                             double *number)
{
    const json_t *value = json_object_get(object.json, key);

    if (value == NULL || json_is_null(value) ||
        (json_is_number(value) && json_number_value(value) == 0))
        return true;
    return read_rope_number(reader, object, key, number);
}

/* The context before it was stretched, which some files have beside the object. */
static bool read_rope_context(struct reader *reader, struct rope_object object, struct model *model)
{
    static const struct field original = {NULL, "original_max_position_embeddings"};
    size_t context = model->context_length;

    if (reader_has(reader, original) && !reader_size(reader, original, 1, MAX_CONTEXT, &context))
        return false;
    model->rope_original_context = (double)context;
    return reader_has(reader, original) ||
           read_rope_option(reader, object, original.config, &model->rope_original_context);
}

static bool read_config_llama3(struct reader *reader, struct rope_object object,
                               struct model *model)
{
    if (!read_rope_number(reader, object, "factor", &model->rope_factor) ||
        !read_rope_number(reader, object, "low_freq_factor", &model->rope_low_frequency_factor) ||
        !read_rope_number(reader, object, "high_freq_factor", &model->rope_high_frequency_factor) ||
        !read_rope_context(reader, object, model))
        return false;
    if (model->rope_high_frequency_factor <= model->rope_low_frequency_factor)
        return error_set(reader->error,
                         "%s: %s.high_freq_factor: is %g, expected more than "
                         "low_freq_factor, %g",
                         reader->path, object.name, model->rope_high_frequency_factor,
                         model->rope_low_frequency_factor);
    return true;
}

static bool read_config_yarn(struct reader *reader, struct rope_object object, struct model *model,
                             bool *truncate)
{
    const json_t *flag = json_object_get(object.json, "truncate");
    double weight = 0, all_weight = 0, magnitude;

    if (!read_rope_context(reader, object, model))
        return false;
    model->rope_factor = (double)model->context_length / model->rope_original_context;
    model->rope_beta_fast = 32;
    model->rope_beta_slow = 1;
    if (!read_rope_option(reader, object, "factor", &model->rope_factor) ||
        !read_rope_option(reader, object, "beta_fast", &model->rope_beta_fast) ||
        !read_rope_option(reader, object, "beta_slow", &model->rope_beta_slow) ||
        !read_rope_option(reader, object, "mscale", &weight) ||
        !read_rope_option(reader, object, "mscale_all_dim", &all_weight))
        return false;
    if (weight > 0 && all_weight > 0)
        magnitude = yarn_magnitude(model->rope_factor, weight) /
                    yarn_magnitude(model->rope_factor, all_weight);
    else
        magnitude = yarn_magnitude(model->rope_factor, 1);
    if (!read_rope_option(reader, object, "attention_factor", &magnitude))
        return false;
    model->rope_magnitude = (float)magnitude;
    if (flag != NULL && !json_is_boolean(flag))
        return error_set(reader->error, "%s: %s.truncate: is not true or false", reader->path,
                         object.name);
    *truncate = !json_is_false(flag);
    return true;
}

/* Current configurations have one object, `rope_parameters`; older ones have `rope_theta` beside an
 * object `rope_scaling`, in which the type may be called `type`. */
static bool find_config_rope(struct reader *reader, struct rope_object *object,
                             const char **type_name)
{
    const json_t *part = json_object_get(reader->config, "partial_rotary_factor");
    const json_t *type, *value;
    const char *key;

    *object = (struct rope_object){"rope_parameters", NULL};
    *type_name = "default";
    object->json = json_object_get(reader->config, object->name);
    if (object->json == NULL || json_is_null(object->json)) {
        object->name = "rope_scaling";
        object->json = json_object_get(reader->config, object->name);
    }
    if (object->json != NULL && !json_is_null(object->json) && !json_is_object(object->json))
        return error_set(reader->error, "%s: %s: is not an object", reader->path, object->name);
    json_object_foreach((json_t *)object->json, key, value)
    {
        if (json_is_object(value))
            return error_set(reader->error,
                             "%s: %s.%.40s: RoPE that differs by layer is not supported",
                             reader->path, object->name, key);
    }

    type = json_object_get(object->json, "rope_type");
    if (type == NULL)
        type = json_object_get(object->json, "type");
    if (type != NULL && !json_is_string(type))
        return error_set(reader->error, "%s: %s.rope_type: is not a string", reader->path,
                         object->name);
    if (type != NULL)
        *type_name = json_string_value(type);
    else if (json_object_size(object->json) > 0 && strcmp(object->name, "rope_scaling") == 0)
        return error_set(reader->error, "%s: %s.rope_type: is missing", reader->path, object->name);

    if (json_object_get(object->json, "partial_rotary_factor") != NULL)
        part = json_object_get(object->json, "partial_rotary_factor");
    if (part != NULL && !json_is_null(part) && json_number_value(part) != 1)
        return error_set(reader->error,
                         "%s: partial_rotary_factor: RoPE over a part of the head "
                         "is not supported",
                         reader->path);
    return true;
}

static bool read_config_rope(struct reader *reader, struct model *model)
{
    struct rope_object object;
    const char *type;
    bool truncate = true;

    if (!find_config_rope(reader, &object, &type))
        return false;
    model->rope_theta = 10000;
    model->rope_magnitude = 1;
    if (json_object_get(object.json, "rope_theta") != NULL) {
        if (!read_rope_number(reader, object, "rope_theta", &model->rope_theta))
            return false;
    } else if (reader_has(reader, field_theta) &&
               !reader_positive(reader, field_theta, &model->rope_theta)) {
        return false;
    }
    if (strcmp(type, "linear") == 0) {
        model->rope_scaling = MODEL_ROPE_LINEAR;
        if (!read_rope_number(reader, object, "factor", &model->rope_factor))
            return false;
    } else if (strcmp(type, "llama3") == 0) {
        model->rope_scaling = MODEL_ROPE_LLAMA3;
        if (!read_config_llama3(reader, object, model))
            return false;
    } else if (strcmp(type, "yarn") == 0) {
        model->rope_scaling = MODEL_ROPE_YARN;
        if (!read_config_yarn(reader, object, model, &truncate))
            return false;
    } else if (strcmp(type, "default") != 0) {
        return error_set(reader->error,
                         "%s: %s.rope_type: %.40s is not supported; supported: "
                         "default, linear, llama3, yarn",
                         reader->path, object.name, type);
    }
    return set_frequencies(model, NULL, truncate, reader);
}

static bool open_safetensors(const char *folder, struct model *model, struct error *error)
{
    char *path = path_join(folder, "model.safetensors", error);
    char *index = path_join(folder, "model.safetensors.index.json", error);
    struct stat status;
    bool done = false;

    if (path == NULL || index == NULL)
        goto out;
    if (stat(path, &status) != 0 && errno == ENOENT && stat(index, &status) == 0) {
        done = safetensors_open_index(index, &model->files->safetensors, error);
        goto out;
    }
    done = safetensors_open(path, &model->files->safetensors, error);
out:
    free(index);
    free(path);
    return done;
}

static bool open_folder(const char *folder, bool header_only, struct model *model,
                        struct error *error)
{
    static const struct field vocabulary = {NULL, "vocab_size"};
    char *config_path = path_join(folder, "config.json", error);
    struct reader reader = {.path = config_path, .error = error};
    const struct safetensors *file;
    const char *name;
    json_t *config = NULL;
    size_t vocab_size;
    bool done = false;

    if (config_path == NULL)
        return false;
    config = json_text_read(config_path, MAX_CONFIG_BYTES, NULL, error);
    if (config == NULL)
        goto out;
    reader.config = config;
    name = json_string_value(json_object_get(config, "model_type"));
    if (name == NULL) {
        error_set(error, "%s: model_type: is not a string", config_path);
        goto out;
    }
    if (!find_architecture(name, strlen(name), &model->architecture)) {
        error_set(error, "%s: model_type: %.60s is not supported; supported: %s", config_path, name,
                  CONFIG_ARCHITECTURES);
        goto out;
    }
    if (!read_geometry(&reader, model) || !read_config_rope(&reader, model) ||
        !check_config_features(&reader, model) ||
        !read_flag(&reader, "tie_word_embeddings", &model->tied_output) ||
        !open_safetensors(folder, model, error))
        goto out;
    file = model->files->safetensors;
    if (!load_weights(model, safetensors_path(file), safetensors_count(file), header_only, error))
        goto out;
    if (reader_has(&reader, vocabulary)) {
        if (!reader_size(&reader, vocabulary, 0, SIZE_MAX, &vocab_size))
            goto out;
        if (vocab_size != model->vocabulary) {
            error_set(error, "%s: vocab_size: is %zu, but the embedding has %zu rows", config_path,
                      vocab_size, model->vocabulary);
            goto out;
        }
    }
    if (!header_only)
        safetensors_prefetch(file);
    done = true;
out:
    json_decref(config);
    free(config_path);
    return done;
}

/* ---------------------------------------------------------------------------------------------- */

static bool open_model(const char *path, bool header_only, struct model **model,
                       struct error *error)
{
    struct model *opened;
    struct stat status;
    bool done = false;

    *model = NULL;
    if (stat(path, &status) != 0)
        return error_set(error, "%s: %s", path, strerror(errno));
    opened = calloc(1, sizeof *opened);
    if (opened == NULL)
        return error_set(error, "%s: out of memory", path);
    opened->files = calloc(1, sizeof *opened->files);
    if (opened->files == NULL)
        error_set(error, "%s: out of memory", path);
    else if (S_ISDIR(status.st_mode))
        done = open_folder(path, header_only, opened, error);
    else
        done = open_gguf(path, header_only, opened, error);
    if (!done) {
        model_close(opened);
        return false;
    }
    *model = opened;
    return true;
}

bool model_check_ids(const struct model *model, const char *path, const int32_t *ids, size_t count,
                     struct error *error)
{
    for (size_t i = 0; i < count; i++) {
        if (ids[i] < 0 || (size_t)ids[i] >= model->vocabulary)
            return error_set(error,
                             "%s: token id %d of the text is not in the model's vocabulary of %zu",
                             path, (int)ids[i], model->vocabulary);
    }
    return true;
}

bool model_open(const char *path, struct model **model, struct error *error)
{
    return open_model(path, false, model, error);
}

bool model_open_header(const char *path, struct model **model, struct error *error)
{
    return open_model(path, true, model, error);
}

void model_close(struct model *model)
{
    if (model == NULL)
        return;
    if (model->files != NULL) {
        gguf_close(model->files->gguf);
        safetensors_close(model->files->safetensors);
        for (size_t i = 0; i < model->files->copy_count; i++)
            free(model->files->copies[i]);
        free(model->files->copies);
        free(model->files->vectors);
        free(model->files);
    }
    free(model->layers);
    free(model->rope_inverse_frequencies);
    free(model);
}
