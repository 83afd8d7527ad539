/* SPDX-License-Identifier: MIT */
/* make_seeds FOLDER: writes the files that the corpora begin with to FOLDER/TARGET/. */
#define _GNU_SOURCE /* asprintf */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runner/quant.h"
#include "samples.h"

static const char *root;

/* Numbers the files of a target. */
static void seed(const char *target, struct bytes bytes)
{
    static const char *current = "";
    static unsigned number;
    char *path;

    if (strcmp(current, target) != 0) {
        current = target;
        number = 0;
        if (asprintf(&path, "%s/%s", root, target) < 0)
            abort();
        (void)mkdir(path, 0777);
        free(path);
    }
    if (asprintf(&path, "%s/%s/seed-%02u", root, target, number++) < 0)
        abort();
    write_file(path, bytes.data, bytes.size);
    free(path);
    bytes_free(&bytes);
}

static void seed_text(const char *target, const char *text)
{
    struct bytes bytes = {0};

    bytes_append(&bytes, text, strlen(text));
    seed(target, bytes);
}

static void seed_gguf(void)
{
    static const char *const pres[] = {"llama-bpe", "smollm", "gpt-2", "default", "tekken"};

    for (int type = 0; type < QUANT_TYPES; type++) {
        const struct quant_info *info = quant_info((enum quant_type)type);

        seed("gguf", sample_gguf("llama", "gpt2", "smollm", info->gguf_type, SAMPLE_WHOLE));
    }
    seed("gguf", sample_gguf("llama", "llama", NULL, 2, SAMPLE_WHOLE));
    seed("gguf", sample_gguf("qwen2", "gpt2", "qwen2", 2, SAMPLE_WHOLE));
    seed("gguf", sample_gguf("qwen3", "gpt2", "qwen2", 8, SAMPLE_WHOLE));
    seed("gguf", sample_gguf("llama", "gpt2", "llama-bpe", 2, SAMPLE_FIRST));
    seed("gguf", sample_gguf("llama", "gpt2", "llama-bpe", 2, SAMPLE_SECOND));
    seed("gguf", sample_gguf("llama", "llama", NULL, 2, SAMPLE_VOCABULARY));
    for (size_t i = 0; i < sizeof pres / sizeof pres[0]; i++)
        seed("gguf", sample_gguf("llama", "gpt2", pres[i], 2, SAMPLE_VOCABULARY));
}

static void seed_folders(void)
{
    seed("safetensors", sample_safetensors("qwen3", "F32", SAMPLE_WHOLE));
    seed("safetensors", sample_safetensors("qwen3", "BF16", SAMPLE_WHOLE));
    seed("safetensors", sample_safetensors("qwen3", "F16", SAMPLE_WHOLE));
    seed("safetensors", sample_safetensors("qwen3", "BF16", SAMPLE_SECOND));
    seed("index", sample_index("qwen3", "1.safetensors", "2.safetensors"));
    for (size_t i = 0; i < SAMPLE_ARCHITECTURES; i++)
        for (size_t j = 0; j < SAMPLE_ROPES; j++)
            seed("config", sample_config(sample_architectures[i], sample_ropes[j]));
}

static void seed_tokenizers(void)
{
    static const char *const texts[] = {
        "Hello  world, it's 12345\r\n\n\t<|im_start|>user", "caf\xc3\xa9 cafe\xcc\x81 \xea\xb0\x80",
        "\xff\xfe\xe6\x97 \xf0\x9f\x98\x80\xf0\x9f", "<s>[INST] a [/INST] b</s>",
        "\xe1\x84\x80\xe1\x85\xa1\xcc\x81\xcc\xa7 \xe2\x96\x81"};

    for (size_t i = 0; i < SAMPLE_TOKENIZERS; i++)
        seed("tokenizer", sample_tokenizer(i));
    for (size_t i = 0; i < SAMPLE_TEMPLATES; i++)
        seed_text("chat", sample_templates[i]);
    seed_text("chat", sample_tokenizer_config);
    seed_text("chat", sample_generation_config);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        seed_text("text", texts[i]);
}

static void seed_kv_specs(void)
{
    static const char *const specs[] = {"puzzle",
                                        "raw:page=64",
                                        "puzzle:page=32,rk=16,rv=14,sink=1,window=1",
                                        "puzzle:ratio=0.586,factors=native,rope=post",
                                        "h2o:heavy=0.3,recent=0.3",
                                        "global-svd:page=64,ratio=0.7",
                                        "streaming:sink=4,recent=100",
                                        "kivi:bits=4,residual=64"};

    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++)
        seed_text("kv_spec", specs[i]);
}

static void seed_rows(void)
{
    seed_text("jsonl",
              "{\"index\": 0, \"input\": \"Where is it?\", \"outputs\": [\"here\", \"there\"], "
              "\"length\": 12, \"gen_prefix\": \"It is\"}\r\n\n"
              "{\"index\": 1, \"input\": \"caf\\u00e9\", \"outputs\": [], \"score\": 0.5}\n");
    seed_text("jsonl", "{\"outputs\": {\"a\": [1, 2.5e3, true, null]}}\n{\"index\"");
}

/* A byte before the session says what it is of: see fuzz_session.c. */
static void seed_sessions(void)
{
    static const size_t lengths[] = {SAMPLE_SESSION_TOKENS, 20, 3, 0};

    for (size_t i = 0; i < SAMPLE_SESSIONS * sizeof lengths / sizeof lengths[0]; i++) {
        const unsigned char first = (unsigned char)(i % SAMPLE_SESSIONS | (i % 2 ? 0x80 : 0));
        struct bytes session = sample_session(i % SAMPLE_SESSIONS, lengths[i / SAMPLE_SESSIONS]);
        struct bytes bytes = {0};

        bytes_append(&bytes, &first, 1);
        bytes_append(&bytes, session.data, session.size);
        bytes_free(&session);
        seed("session", bytes);
    }
}

/* Any bytes are calls. */
static void seed_calls(void)
{
    uint32_t random = 1;

    for (size_t size = 64; size <= 1024; size += 64) {
        struct bytes bytes = {0};

        for (size_t i = 0; i < size; i++) {
            random = random * 1664525u + 1013904223u;
            bytes_append(&bytes, &(unsigned char){(unsigned char)(random >> 24)}, 1);
        }
        seed("api", bytes);
    }
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: make_seeds FOLDER\n");
        return 2;
    }
    root = argv[1];
    seed_gguf();
    seed_folders();
    seed_tokenizers();
    seed_kv_specs();
    seed_rows();
    seed_sessions();
    seed_calls();
    return 0;
}
