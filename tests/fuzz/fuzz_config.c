/* SPDX-License-Identifier: MIT */
/* config.json of a model. */
#define _GNU_SOURCE /* memmem */
#include "fuzz.h"

#include <stdio.h>
#include <string.h>

#include "mutate.h"
#include "samples.h"

static const char *in(const char *folder, const char *name)
{
    static char path[64];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    for (size_t i = 0; i < SAMPLE_ARCHITECTURES; i++) {
        const char *architecture = sample_architectures[i];

        fuzz_make_folder(architecture);
        fuzz_write_bytes(in(architecture, "model.safetensors"),
                         sample_safetensors(architecture, "BF16", SAMPLE_WHOLE));
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *architecture = sample_architectures[0];

    for (size_t i = 0; i < SAMPLE_ARCHITECTURES; i++) {
        if (memmem(data, size, sample_architectures[i], strlen(sample_architectures[i])) != NULL)
            architecture = sample_architectures[i];
    }
    fuzz_write(in(architecture, "config.json"), data, size);
    fuzz_model(fuzz_path(architecture));
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    return mutate_json(data, size, most, seed);
}
