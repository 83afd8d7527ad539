/* SPDX-License-Identifier: MIT */
/* A GGUF file: as a model and as a tokenizer, whole and as either part of a split one. */
#define _GNU_SOURCE /* memmem */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "runner/gguf.h"
#include "samples.h"

static const char first[] = "model-00001-of-00002.gguf", second[] = "model-00002-of-00002.gguf";
static const char other_first[] = "other-00001-of-00002.gguf";
static const char other_second[] = "other-00002-of-00002.gguf";

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    fuzz_write_bytes(second, sample_gguf("llama", "gpt2", "llama-bpe", 2, SAMPLE_SECOND));
    fuzz_write_bytes(other_first, sample_gguf("llama", "gpt2", "llama-bpe", 2, SAMPLE_FIRST));
    return 0;
}

/* Every kind of question about a key, of whatever type it is. */
static void ask(const struct gguf *gguf, const char *key)
{
    struct gguf_string string, *strings;
    struct error error;
    int64_t *integers;
    uint64_t integer;
    float *floats;
    size_t count;
    double real;
    bool flag;

    (void)gguf_has(gguf, key);
    (void)gguf_get_uint(gguf, key, &integer, &error);
    (void)gguf_get_float(gguf, key, &real, &error);
    (void)gguf_get_bool(gguf, key, &flag, &error);
    (void)gguf_get_string(gguf, key, &string, &error);
    if (gguf_get_strings(gguf, key, &strings, &count, &error))
        free(strings);
    if (gguf_get_ints(gguf, key, &integers, &count, &error))
        free(integers);
    if (gguf_get_floats(gguf, key, &floats, &count, &error))
        free(floats);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const keys[] = {"general.architecture", "tokenizer.ggml.tokens",
                                       "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "k"};
    const char *path = fuzz_path(first);
    struct error error;
    struct gguf *gguf;

    fuzz_write(first, data, size);
    if (gguf_open(path, &gguf, &error)) {
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            ask(gguf, keys[i]);
        gguf_close(gguf);
    } else {
        fuzz_check_error(&error, fuzz_path("model-"));
    }
    fuzz_model(path);
    fuzz_tokenizer(path);
    if (memmem(data, size, "split.no", 8) != NULL) {
        fuzz_write(other_second, data, size);
        fuzz_model(fuzz_path(other_first));
    }
    return 0;
}
