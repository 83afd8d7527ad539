/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval info: a model's geometry, and what its KV cache takes under each policy. */
#include "eval.h"

#include <inttypes.h>
#include <stdio.h>

#include "options.h"

/* What a model stores in one element type, norms apart. */
struct type_total {
    size_t tensors;
    uint64_t elements, bytes;
};

static void add_weight(struct type_total totals[QUANT_TYPES], const struct weight *weight)
{
    struct type_total *total = &totals[weight->type];

    total->tensors++;
    total->elements += (uint64_t)weight->rows * weight->columns;
    total->bytes += (uint64_t)weight->rows * weight->row_bytes;
}

static void add_weights(const struct model *model, struct type_total totals[QUANT_TYPES])
{
    add_weight(totals, &model->token_embedding);
    if (!model->tied_output)
        add_weight(totals, &model->output);
    for (size_t i = 0; i < model->layer_count; i++) {
        const struct model_layer *layer = &model->layers[i];
        const struct weight *weights[] = {&layer->q,    &layer->k,  &layer->v,   &layer->o,
                                          &layer->gate, &layer->up, &layer->down};

        for (size_t j = 0; j < sizeof weights / sizeof *weights; j++)
            add_weight(totals, weights[j]);
    }
}

/* The lengths told of: powers of two from 1024 to below the context, and the context. */
#define MAX_LENGTHS 64

static size_t choose_lengths(size_t context, size_t lengths[MAX_LENGTHS])
{
    size_t count = 0;

    for (size_t length = 1024; length < context && count + 1 < MAX_LENGTHS; length *= 2)
        lengths[count++] = length;
    lengths[count++] = context;
    return count;
}

struct footprint {
    size_t bytes, raw_bytes;
};

/* Of a prompt of that many tokens. */
static bool footprint(const struct eval_arguments *arguments, const struct model *model,
                      const struct kv_spec *spec, size_t tokens, struct footprint *result,
                      struct error *error)
{
    const struct policy_size size = {
        .model = model, .dtype = arguments->dtype, .prompt = tokens, .tokens = tokens};

    result->raw_bytes = policy_raw_bytes(model, arguments->dtype, tokens);
    return spec->policy->bytes(spec, &size, &result->bytes, error);
}

static const char *const scaling_names[] = {
    [MODEL_ROPE_PLAIN] = "none", [MODEL_ROPE_LINEAR] = "linear",   [MODEL_ROPE_LLAMA3] = "llama3",
    [MODEL_ROPE_YARN] = "yarn",  [MODEL_ROPE_FACTORS] = "factors",
};

static bool print_table(const struct eval_arguments *arguments, const struct model *model,
                        const struct type_total totals[QUANT_TYPES], const size_t *lengths,
                        size_t length_count, struct error *error)
{
    int width = eval_kv_width(arguments);

    printf("%-14s %s\n", "model", arguments->model);
    printf("%-14s %s\n", "architecture", model_architecture_name(model->architecture));
    printf("%-14s %zu\n", "layers", model->layer_count);
    printf("%-14s %zu\n", "hidden", model->hidden);
    printf("%-14s %zu\n", "intermediate", model->intermediate);
    printf("%-14s %zu query, %zu KV, dimension %zu\n", "heads", model->query_heads, model->kv_heads,
           model->head_dim);
    printf("%-14s %zu%s\n", "vocabulary", model->vocabulary,
           model->tied_output ? ", output tied to the embedding" : "");
    printf("%-14s %zu\n", "context", model->context_length);
    printf("%-14s theta %g, scaling %s\n", "RoPE", model->rope_theta,
           scaling_names[model->rope_scaling]);
    for (int type = 0; type < QUANT_TYPES; type++) {
        if (totals[type].tensors > 0)
            printf("%-14s %s: %zu matrices, %" PRIu64 " elements, %" PRIu64 " bytes\n", "weights",
                   quant_info(type)->name, totals[type].tensors, totals[type].elements,
                   totals[type].bytes);
    }
    printf("\n%-*s %10s %15s %15s %8s\n", width, "kv", "tokens", "bytes", "raw", "ratio");
    for (size_t i = 0; i < arguments->kv_count; i++) {
        struct kv_spec spec = arguments->kv[i].spec;

        if (!kv_spec_resolve(&spec, model, error))
            return false;
        for (size_t j = 0; j < length_count; j++) {
            struct footprint bytes;

            if (!footprint(arguments, model, &spec, lengths[j], &bytes, error))
                return false;
            printf("%-*s %10zu %15zu %15zu %8.5f\n", width, arguments->kv[i].text, lengths[j],
                   bytes.bytes, bytes.raw_bytes, (double)bytes.bytes / (double)bytes.raw_bytes);
        }
    }
    return output_flush(error);
}

static json_t *policy_object(const struct eval_arguments *arguments, const struct model *model,
                             const struct eval_kv *kv, const size_t *lengths, size_t length_count,
                             struct error *error)
{
    struct kv_spec spec = kv->spec;
    json_t *bytes = json_array();
    json_t *raw = json_array();
    json_t *ratio = json_array();
    json_t *object;
    char canonical[KV_SPEC_TEXT_BYTES];
    bool done = kv_spec_resolve(&spec, model, error);

    for (size_t i = 0; i < length_count && done; i++) {
        struct footprint result;

        done = footprint(arguments, model, &spec, lengths[i], &result, error);
        if (done && (json_array_append_new(bytes, json_integer((json_int_t)result.bytes)) ||
                     json_array_append_new(raw, json_integer((json_int_t)result.raw_bytes)) ||
                     json_array_append_new(
                         ratio, json_finite((double)result.bytes / (double)result.raw_bytes))))
            done = error_set(error, "out of memory for the JSON document");
    }
    if (!done) {
        json_decref(bytes);
        json_decref(raw);
        json_decref(ratio);
        return NULL;
    }
    kv_spec_canonical(&spec, canonical);
    object = json_pack("{s:o, s:o, s:o, s:o, s:o}", "kv", json_text(kv->text), "kv_canonical",
                       json_text(canonical), "bytes", bytes, "bytes_raw", raw, "kv_ratio", ratio);
    if (object == NULL)
        error_set(error, "out of memory for the JSON document");
    return object;
}

static json_t *types_object(const struct type_total totals[QUANT_TYPES])
{
    json_t *types = json_object();

    for (int type = 0; type < QUANT_TYPES; type++) {
        if (totals[type].tensors > 0 &&
            json_object_set_new(types, quant_info(type)->name,
                                json_pack("{s:I, s:I, s:I}", "matrices",
                                          (json_int_t)totals[type].tensors, "elements",
                                          (json_int_t)totals[type].elements, "bytes",
                                          (json_int_t)totals[type].bytes)) != 0) {
            json_decref(types);
            return NULL;
        }
    }
    return types;
}

static bool print_document(const struct eval_arguments *arguments, const struct model *model,
                           const struct type_total totals[QUANT_TYPES], const size_t *lengths,
                           size_t length_count, struct error *error)
{
    json_t *tokens = json_array();
    json_t *results = json_array();

    for (size_t i = 0; i < length_count; i++)
        json_array_append_new(tokens, json_integer((json_int_t)lengths[i]));
    for (size_t i = 0; i < arguments->kv_count; i++) {
        json_t *result =
            policy_object(arguments, model, &arguments->kv[i], lengths, length_count, error);

        if (result == NULL) {
            json_decref(tokens);
            json_decref(results);
            return false;
        }
        json_array_append_new(results, result);
    }
    return eval_print_document(
        arguments,
        json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:f, s:s, s:o, s:o, s:o}",
                  "architecture", model_architecture_name(model->architecture), "layers",
                  (json_int_t)model->layer_count, "hidden", (json_int_t)model->hidden,
                  "intermediate", (json_int_t)model->intermediate, "query_heads",
                  (json_int_t)model->query_heads, "kv_heads", (json_int_t)model->kv_heads,
                  "head_dim", (json_int_t)model->head_dim, "vocabulary",
                  (json_int_t)model->vocabulary, "context", (json_int_t)model->context_length,
                  "tied_output", model->tied_output, "rope_theta", model->rope_theta,
                  "rope_scaling", scaling_names[model->rope_scaling], "types", types_object(totals),
                  "tokens", tokens, "results", results),
        error);
}

bool eval_info(const struct eval_arguments *arguments, struct error *error)
{
    struct type_total totals[QUANT_TYPES] = {{0, 0, 0}};
    size_t lengths[MAX_LENGTHS];
    struct footprint bytes;
    struct model *model;
    size_t length_count;
    bool done = true;

    if (!model_open_header(arguments->model, &model, error))
        return false;
    if (!model->has_weights) {
        model_close(model);
        return error_set(error, "%s: has a vocabulary but no layers", arguments->model);
    }
    add_weights(model, totals);
    length_count = choose_lengths(model->context_length, lengths);
    /* A policy that does not fit the model shows before anything is printed. */
    for (size_t i = 0; i < arguments->kv_count && done; i++) {
        struct kv_spec spec = arguments->kv[i].spec;

        done = kv_spec_resolve(&spec, model, error);
        if (done)
            kv_spec_warn(&spec, EVAL_PROGRAM);
        done = done && footprint(arguments, model, &spec, model->context_length, &bytes, error);
    }
    if (done)
        done = (arguments->json ? print_document : print_table)(arguments, model, totals, lengths,
                                                                length_count, error);
    model_close(model);
    return done;
}
