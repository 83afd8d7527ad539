/* SPDX-License-Identifier: MIT */
/* Small valid files of every kind: what the corpora begin with, and what lies beside an input. */
#ifndef PUZZLEKV_TESTS_FUZZ_SAMPLES_H
#define PUZZLEKV_TESTS_FUZZ_SAMPLES_H

#include <puzzlekv.h>
#include <stdint.h>

#include "../gguf_writer.h"

/* The architectures, which are also the `model_type` of config.json. */
#define SAMPLE_ARCHITECTURES 4
extern const char *const sample_architectures[SAMPLE_ARCHITECTURES];

/* What a GGUF file holds of a model. */
enum sample_part {
    SAMPLE_WHOLE,
    SAMPLE_FIRST,     /* of two: metadata, embedding and norm */
    SAMPLE_SECOND,    /* of two: the layer */
    SAMPLE_VOCABULARY /* no tensors */
};

/* A GGUF file with one layer. `tokenizer`, "gpt2" or "llama", and `pre` are what its keys say;
 * matrices are of the element type with that number, as far as their rows are whole blocks of it,
 * else F16. At most 40 KiB. The caller frees what these return with
 * bytes_free. */
struct bytes sample_gguf(const char *architecture, const char *tokenizer, const char *pre,
                         uint32_t type, enum sample_part part);

/* The same model's tensors as F32 or BF16; of parts only the first three. */
struct bytes sample_safetensors(const char *architecture, const char *dtype, enum sample_part part);

/* model.safetensors.index.json that puts SAMPLE_FIRST and SAMPLE_SECOND into these files. */
struct bytes sample_index(const char *architecture, const char *first, const char *second);

/* config.json of the same model; `rope` is the value of "rope_scaling". */
struct bytes sample_config(const char *architecture, const char *rope);

#define SAMPLE_ROPES 4
extern const char *const sample_ropes[SAMPLE_ROPES];

extern const char sample_generation_config[];
extern const char sample_tokenizer_config[];

/* tokenizer.json with each kind of pre-tokenizer; all of them have the special tokens of every
 * chat format. */
#define SAMPLE_TOKENIZERS 4
struct bytes sample_tokenizer(size_t kind);

/* Chat templates (Jinja), one of each format. */
#define SAMPLE_TEMPLATES 5
extern const char *const sample_templates[SAMPLE_TEMPLATES];

/* Kinds of caches for sessions: each form of factors in each type. */
#define SAMPLE_SESSIONS      12
#define SAMPLE_SESSION_MODEL "sample"
#define SAMPLE_PAGE_ELEMENTS 64
void sample_session_settings(size_t kind, pkv_config *config);

/* A step of one sequence; aborted where it fails. */
pkv_status sample_session_step(pkv_cache *cache, pkv_seq *seq, size_t tokens);

/* A new sequence with pages in every state. */
pkv_seq *sample_session_sequence(pkv_cache *cache);

/* It as a session, cut to `tokens` tokens; at most 8 KiB. */
struct bytes sample_session(size_t kind, size_t tokens);
#define SAMPLE_SESSION_TOKENS 43

#endif
