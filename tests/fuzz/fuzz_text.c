/* SPDX-License-Identifier: MIT */
/* Any text, with a tokenizer of each kind. */
#include "fuzz.h"

#include "samples.h"

static struct tokenizer *tokenizers[SAMPLE_TOKENIZERS];

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    struct error error;

    (void)argc, (void)argv;
    for (size_t i = 0; i < SAMPLE_TOKENIZERS; i++) {
        fuzz_write_bytes("tokenizer.json", sample_tokenizer(i));
        fuzz_require(tokenizer_open(fuzz_path(""), &tokenizers[i], &error));
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < SAMPLE_TOKENIZERS; i++)
        fuzz_text(tokenizers[i], (const char *)data, size);
    return 0;
}
