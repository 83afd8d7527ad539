/* SPDX-License-Identifier: MIT */
/* --kv SPEC: what is accepted must survive its canonical spelling. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "kv_spec.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    return 0;
}

static void resolve(const struct kv_spec *parsed, size_t head_dim)
{
    const struct model model = {
        .layer_count = 2, .hidden = 64, .query_heads = 4, .kv_heads = 2, .head_dim = head_dim};
    char canonical[KV_SPEC_TEXT_BYTES], again[KV_SPEC_TEXT_BYTES];
    struct kv_spec spec = *parsed, reparsed;
    struct error error;

    if (!kv_spec_resolve(&spec, &model, &error)) {
        fuzz_check_error(&error, "--kv ");
        return;
    }
    kv_spec_canonical(&spec, canonical);
    fuzz_require(strlen(canonical) < KV_SPEC_TEXT_BYTES - 1);
    fuzz_require(kv_spec_parse(canonical, &reparsed, &error));
    fuzz_require(kv_spec_resolve(&reparsed, &model, &error));
    kv_spec_canonical(&reparsed, again);
    fuzz_require(strcmp(canonical, again) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const size_t head_dims[] = {8, 64, 128, 512};
    char *text = malloc(size + 1);
    struct kv_spec spec;
    struct error error;

    fuzz_require(text != NULL);
    memcpy(text, data, size);
    text[size] = '\0';
    if (!kv_spec_parse(text, &spec, &error))
        fuzz_check_error(&error, "--kv ");
    else
        for (size_t i = 0; i < sizeof head_dims / sizeof head_dims[0]; i++)
            resolve(&spec, head_dims[i]);
    free(text);
    return 0;
}
