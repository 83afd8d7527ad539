/* SPDX-License-Identifier: MIT */
/* Model files: hyperparameters and mapped weights of Llama, Mistral, Qwen2 and Qwen3 transformers.
 */
#ifndef PUZZLEKV_TOOLS_RUNNER_MODEL_H
#define PUZZLEKV_TOOLS_RUNNER_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"
#include "quant.h"

enum model_architecture { MODEL_LLAMA, MODEL_MISTRAL, MODEL_QWEN2, MODEL_QWEN3 };

enum model_rope_scaling {
    MODEL_ROPE_PLAIN,
    MODEL_ROPE_LINEAR,  /* all frequencies divided by one factor */
    MODEL_ROPE_LLAMA3,  /* frequencies changed by wavelength, as Llama 3.1 does */
    MODEL_ROPE_YARN,    /* frequencies changed by pair, and attention sharpened */
    MODEL_ROPE_FACTORS, /* each frequency divided by a factor that the file lists */
};

/* A matrix as it lies in the file, row-major: y[rows] = weight x[columns]. */
struct weight {
    enum quant_type type;
    size_t rows;
    size_t columns;   /* a multiple of the type's block */
    size_t row_bytes; /* from one row to the next; rows * row_bytes lie inside the file */
    const void *data; /* aligned to the type's widest field, but for model_open_header */
};

/* Norms and biases are expanded to f32 and owned by the model. */
struct model_layer {
    const float *attention_norm; /* [hidden] */
    const float *q_norm;         /* [head_dim], for each head before RoPE; NULL but for Qwen3 */
    const float *k_norm;         /* [head_dim], likewise */
    const float *q_bias;         /* [query_heads * head_dim]; NULL but for Qwen2 */
    const float *k_bias;         /* [kv_heads * head_dim], likewise */
    const float *v_bias;         /* [kv_heads * head_dim], likewise */
    const float *ffn_norm;       /* [hidden] */
    struct weight q;             /* [query_heads * head_dim, hidden] */
    struct weight k;             /* [kv_heads * head_dim, hidden] */
    struct weight v;             /* [kv_heads * head_dim, hidden] */
    struct weight o;             /* [hidden, query_heads * head_dim] */
    struct weight gate;          /* [intermediate, hidden] */
    struct weight up;            /* [intermediate, hidden] */
    struct weight down;          /* [hidden, intermediate] */
};

/* Immutable once open, so threads may share it. */
struct model {
    enum model_architecture architecture;
    size_t layer_count;
    size_t hidden;
    size_t intermediate;
    size_t query_heads; /* a multiple of kv_heads */
    size_t kv_heads;
    size_t head_dim;       /* even, 8 .. 512; query_heads * head_dim need not be hidden */
    size_t vocabulary;     /* rows of the output matrix and of the embedding */
    size_t context_length; /* positions the model was made for, or YaRN stretches it to */
    float rms_epsilon;
    bool tied_output; /* output is the token embedding */

    double rope_theta;
    enum model_rope_scaling rope_scaling;
    double rope_factor; /* of LINEAR, LLAMA3 and YARN, else 0 */
    double rope_low_frequency_factor, rope_high_frequency_factor; /* of LLAMA3, else 0 */
    double rope_original_context;                                 /* of LLAMA3 and YARN, else 0 */
    double rope_beta_fast, rope_beta_slow;                        /* of YARN, else 0 */
    float rope_magnitude; /* what cosines and sines are multiplied by; 1 but for YaRN */
    /* Which elements of a head form pair i, turned by position * rope_inverse_frequencies[i]:
     * 2i and 2i + 1 if interleaved (Llama in GGUF, whose q and k rows are permuted for it), else i
     * and i + head_dim / 2. */
    bool rope_interleaved;
    float *rope_inverse_frequencies; /* [head_dim / 2] */

    /* False only from model_open_header on a vocabulary-only GGUF: then there are no layers below
     * and `vocabulary` counts the tokens listed. */
    bool has_weights;
    struct weight token_embedding; /* [vocabulary, hidden] */
    const float *output_norm;      /* [hidden] */
    struct weight output;          /* [vocabulary, hidden]; a copy of token_embedding if tied */
    struct model_layer *layers;    /* [layer_count] */

    struct model_files *files; /* the mapped files and the memory behind the norms; model.c's own */
};

/* Opens a GGUF file (of a split model the first part) or a Hugging Face folder (config.json,
 * model.safetensors or model.safetensors.index.json with the files that it names). Checks every
 * hyperparameter and the shape and type of every tensor used; an error names the file and the field
 * or tensor, and *model is NULL. What would compute something else than asked is refused by name:
 * other architectures, an active sliding window, mixtures of experts, other biases, other RoPE
 * scalings. Weights stay mapped and are not read, but for those of safetensors files that are not
 * aligned, which are copied. */
bool model_open(const char *path, struct model **model, struct error *error);

/* The same checks without reading any tensor's contents: norms and biases are NULL. */
bool model_open_header(const char *path, struct model **model, struct error *error);

/* Accepts NULL. */
void model_close(struct model *model);

/* Fails, naming the model by `path`, if a tokenizer's ids are not all in the model's vocabulary. */
bool model_check_ids(const struct model *model, const char *path, const int32_t *ids, size_t count,
                     struct error *error);

/* "llama", "mistral", "qwen2" or "qwen3". */
const char *model_architecture_name(enum model_architecture architecture);

#endif
