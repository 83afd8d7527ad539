/* SPDX-License-Identifier: MIT */
/* The safetensors file of a model: alone, and as a part that an index names. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "mutate.h"
#include "samples.h"

#define PARTS "parts/"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    fuzz_write_bytes("config.json", sample_config("qwen3", "null"));
    fuzz_make_folder("parts");
    fuzz_write_bytes(PARTS "config.json", sample_config("qwen3", "null"));
    fuzz_write_bytes(PARTS "model.safetensors.index.json",
                     sample_index("qwen3", "1.safetensors", "2.safetensors"));
    fuzz_write_bytes(PARTS "1.safetensors", sample_safetensors("qwen3", "BF16", SAMPLE_FIRST));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_write("model.safetensors", data, size);
    fuzz_model(fuzz_path(""));
    fuzz_write(PARTS "2.safetensors", data, size);
    fuzz_model(fuzz_path("parts"));
    return 0;
}

/* The header is changed as JSON, with its length, and sometimes anything. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    uint64_t header = 0;
    uint8_t *text;
    size_t changed, rest;

    if (size > sizeof header)
        memcpy(&header, data, sizeof header);
    if (seed % 4 == 0 || header == 0 || header > size - sizeof header)
        return LLVMFuzzerMutate(data, size, most);
    text = malloc(most);
    fuzz_require(text != NULL);
    memcpy(text, data + sizeof header, header);
    rest = size - sizeof header - header;
    changed = mutate_json(text, header, most - sizeof header - rest, seed / 4);
    memmove(data + sizeof header + changed, data + sizeof header + header, rest);
    memcpy(data + sizeof header, text, changed);
    header = changed;
    memcpy(data, &header, sizeof header);
    free(text);
    return sizeof header + changed + rest;
}
