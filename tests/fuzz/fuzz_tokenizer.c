/* SPDX-License-Identifier: MIT */
/* tokenizer.json. */
#include "fuzz.h"

#include "mutate.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_write("tokenizer.json", data, size);
    fuzz_tokenizer(fuzz_path(""));
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    return mutate_json(data, size, most, seed);
}
