/* SPDX-License-Identifier: MIT */
/* The index of a model that is split over several safetensors files. */
#include "fuzz.h"

#include "mutate.h"
#include "samples.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    fuzz_write_bytes("config.json", sample_config("qwen3", "null"));
    fuzz_write_bytes("1.safetensors", sample_safetensors("qwen3", "BF16", SAMPLE_FIRST));
    fuzz_write_bytes("2.safetensors", sample_safetensors("qwen3", "F32", SAMPLE_SECOND));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_write("model.safetensors.index.json", data, size);
    fuzz_model(fuzz_path(""));
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    return mutate_json(data, size, most, seed);
}
