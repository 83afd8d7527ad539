/* SPDX-License-Identifier: MIT */
/* What lies beside tokenizer.json: tokenizer_config.json, generation_config.json, and the chat
 * template, which is fuzzed with all that recognises its format. */
#include "fuzz.h"

#include <stdbool.h>
#include <string.h>

#include "mutate.h"
#include "samples.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    fuzz_make_folder("config");
    fuzz_make_folder("generation");
    fuzz_make_folder("template");
    fuzz_write_bytes("config/tokenizer.json", sample_tokenizer(1));
    fuzz_write_bytes("generation/tokenizer.json", sample_tokenizer(2));
    fuzz_write_bytes("template/tokenizer.json", sample_tokenizer(3));
    fuzz_write_text("template/tokenizer_config.json", sample_tokenizer_config);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* A template may begin with a brace, but then with two, or with one and a %. */
    const bool json = size > 1 && data[0] == '{' && strchr("{%#", data[1]) == NULL;

    if (json) {
        fuzz_write("config/tokenizer_config.json", data, size);
        fuzz_tokenizer(fuzz_path("config"));
        fuzz_write("generation/generation_config.json", data, size);
        fuzz_tokenizer(fuzz_path("generation"));
    } else {
        fuzz_write("template/chat_template.jinja", data, size);
        fuzz_tokenizer(fuzz_path("template"));
    }
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    return mutate_json(data, size, most, seed);
}
