/* SPDX-License-Identifier: MIT */
/* Small valid files of every kind: what the corpora begin with, and what lies beside an input. */
#include "samples.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runner/quant.h"

#define CONTEXT    256
#define VOCABULARY 24

/* The lengths of tensors' sides, and what they follow from. */
enum size { NONE, HIDDEN, INTERMEDIATE, Q_ROWS, KV_ROWS, HEAD_DIM, TOKENS, SIZES };

/* The geometry of all samples but those of types that come in blocks of 256, whose matrices have
 * only few such rows. */
static const size_t narrow[SIZES] = {[HIDDEN] = 32,  [INTERMEDIATE] = 32, [Q_ROWS] = 32,
                                     [KV_ROWS] = 16, [HEAD_DIM] = 16,     [TOKENS] = VOCABULARY};
static const size_t wide[SIZES] = {[HIDDEN] = 256, [INTERMEDIATE] = 8, [Q_ROWS] = 8,
                                   [KV_ROWS] = 8,  [HEAD_DIM] = 8,     [TOKENS] = VOCABULARY};

const char *const sample_architectures[SAMPLE_ARCHITECTURES] = {"llama", "mistral", "qwen2",
                                                                "qwen3"};

static void append_text(struct bytes *bytes, const char *text)
{
    bytes_append(bytes, text, strlen(text));
}

static void append_number(struct bytes *bytes, size_t number)
{
    char text[32];

    snprintf(text, sizeof text, "%zu", number);
    append_text(bytes, text);
}

/* --- tensors ---------------------------------------------------------------------------------- */

struct tensor {
    const char *gguf, *safetensors;
    enum size columns, rows; /* rows NONE: a vector */
    const char *only;        /* the architecture that has it; NULL: all */
    bool layer;              /* in SAMPLE_SECOND */
};

static const struct tensor tensors[] = {
    {"token_embd.weight", "model.embed_tokens.weight", HIDDEN, TOKENS, NULL, false},
    {"output_norm.weight", "model.norm.weight", HIDDEN, NONE, NULL, false},
    {"output.weight", "lm_head.weight", HIDDEN, TOKENS, "llama", false},
    {"blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", HIDDEN, NONE, NULL, true},
    {"blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", HIDDEN, Q_ROWS, NULL, true},
    {"blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", HIDDEN, KV_ROWS, NULL, true},
    {"blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", HIDDEN, KV_ROWS, NULL, true},
    {"blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias", Q_ROWS, NONE, "qwen2", true},
    {"blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias", KV_ROWS, NONE, "qwen2", true},
    {"blk.0.attn_v.bias", "model.layers.0.self_attn.v_proj.bias", KV_ROWS, NONE, "qwen2", true},
    {"blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight", HEAD_DIM, NONE, "qwen3",
     true},
    {"blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight", HEAD_DIM, NONE, "qwen3",
     true},
    {"blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", Q_ROWS, HIDDEN, NULL,
     true},
    {"blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", HIDDEN, NONE, NULL,
     true},
    {"blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", HIDDEN, INTERMEDIATE, NULL,
     true},
    {"blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", HIDDEN, INTERMEDIATE, NULL, true},
    {"blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", INTERMEDIATE, HIDDEN, NULL,
     true},
};

#define TENSORS (sizeof tensors / sizeof tensors[0])

static bool has_tensor(const char *architecture, enum sample_part part, const struct tensor *tensor)
{
    if (tensor->only != NULL && strcmp(tensor->only, architecture) != 0)
        return false;
    return part == SAMPLE_WHOLE || (part == SAMPLE_SECOND && tensor->layer) ||
           (part == SAMPLE_FIRST && !tensor->layer);
}

static size_t count_tensors(const char *architecture, enum sample_part part)
{
    size_t count = 0;

    for (size_t i = 0; i < TENSORS; i++)
        count += has_tensor(architecture, part, &tensors[i]);
    return count;
}

/* --- GGUF ------------------------------------------------------------------------------------- */

static void write_byte_level(struct gguf_writer *writer, const char *pre)
{
    static const char *const tokens[VOCABULARY] = {
        "a",
        "b",
        "H",
        "e",
        "l",
        "o",
        "\u0120",
        "\u010a",
        "1",
        "2",
        "ll",
        "llo",
        "\u0120a",
        "\u00c3",
        "\u00a9",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<think>",
        "</think>",
    };
    static const char *const merges[] = {"l l", "ll o", "\u0120 a"};
    int32_t types[VOCABULARY];

    for (size_t i = 0; i < VOCABULARY; i++)
        types[i] = tokens[i][0] != '<' ? 1 : strchr(tokens[i], '|') != NULL ? 3 : 4;
    gguf_writer_string(writer, "tokenizer.ggml.pre", pre);
    gguf_writer_strings(writer, "tokenizer.ggml.tokens", tokens, VOCABULARY);
    gguf_writer_array(writer, "tokenizer.ggml.token_type", GGUF_INT32, types, VOCABULARY,
                      sizeof types);
    gguf_writer_strings(writer, "tokenizer.ggml.merges", merges, sizeof merges / sizeof merges[0]);
    gguf_writer_uint(writer, "tokenizer.ggml.bos_token_id", 18);
    gguf_writer_uint(writer, "tokenizer.ggml.eos_token_id", 17);
    gguf_writer_uint(writer, "tokenizer.ggml.eot_token_id", 21);
    gguf_writer_bool(writer, "tokenizer.ggml.add_bos_token", 0);
    gguf_writer_string(writer, "tokenizer.chat_template", sample_templates[0]);
}

static void write_pieces(struct gguf_writer *writer)
{
    static const char *const tokens[VOCABULARY] = {
        "<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "\u2581",  "a", "b", "H", "e", "l",
        "o",     "1",   "2",    ",",      "ll",     "llo",    "\u2581a", "[", "]", "I", "N", "/",
    };
    float scores[VOCABULARY];
    int32_t types[VOCABULARY];

    for (size_t i = 0; i < VOCABULARY; i++) {
        scores[i] = -(float)i;
        types[i] = i == 0 ? 2 : i < 3 ? 3 : i < 6 ? 6 : 1;
    }
    gguf_writer_strings(writer, "tokenizer.ggml.tokens", tokens, VOCABULARY);
    gguf_writer_array(writer, "tokenizer.ggml.scores", GGUF_FLOAT32, scores, VOCABULARY,
                      sizeof scores);
    gguf_writer_array(writer, "tokenizer.ggml.token_type", GGUF_INT32, types, VOCABULARY,
                      sizeof types);
    gguf_writer_uint(writer, "tokenizer.ggml.bos_token_id", 1);
    gguf_writer_uint(writer, "tokenizer.ggml.eos_token_id", 2);
    gguf_writer_uint(writer, "tokenizer.ggml.unknown_token_id", 0);
    gguf_writer_bool(writer, "tokenizer.ggml.add_bos_token", 1);
    gguf_writer_bool(writer, "tokenizer.ggml.add_eos_token", 0);
    gguf_writer_bool(writer, "tokenizer.ggml.add_space_prefix", 1);
    gguf_writer_string(writer, "tokenizer.chat_template", sample_templates[3]);
}

static void write_key(struct gguf_writer *writer, const char *architecture, const char *key,
                      double value)
{
    char name[80];

    snprintf(name, sizeof name, "%s.%s", architecture, key);
    if (value == (double)(uint32_t)value)
        gguf_writer_uint(writer, name, (uint32_t)value);
    else
        gguf_writer_float(writer, name, (float)value);
}

static void write_metadata(struct gguf_writer *writer, const char *architecture,
                           const char *tokenizer, const char *pre, const size_t *sizes)
{
    const bool yarn = strcmp(architecture, "qwen2") == 0;
    char name[80];

    gguf_writer_string(writer, "general.architecture", architecture);
    gguf_writer_uint(writer, "general.alignment", 32);
    write_key(writer, architecture, "block_count", 1);
    write_key(writer, architecture, "context_length", CONTEXT);
    write_key(writer, architecture, "embedding_length", (double)sizes[HIDDEN]);
    write_key(writer, architecture, "feed_forward_length", (double)sizes[INTERMEDIATE]);
    write_key(writer, architecture, "attention.head_count",
              (double)(sizes[Q_ROWS] / sizes[HEAD_DIM]));
    write_key(writer, architecture, "attention.head_count_kv",
              (double)(sizes[KV_ROWS] / sizes[HEAD_DIM]));
    write_key(writer, architecture, "attention.key_length", (double)sizes[HEAD_DIM]);
    write_key(writer, architecture, "attention.value_length", (double)sizes[HEAD_DIM]);
    write_key(writer, architecture, "attention.layer_norm_rms_epsilon", 1e-5);
    write_key(writer, architecture, "rope.dimension_count", (double)sizes[HEAD_DIM]);
    write_key(writer, architecture, "rope.freq_base", 10000.5);
    snprintf(name, sizeof name, "%s.rope.scaling.type", architecture);
    gguf_writer_string(writer, name, yarn ? "yarn" : "linear");
    write_key(writer, architecture, "rope.scaling.factor", 2.5);
    if (yarn)
        write_key(writer, architecture, "rope.scaling.original_context_length", 64);
    gguf_writer_string(writer, "tokenizer.ggml.model", tokenizer);
    if (strcmp(tokenizer, "llama") == 0)
        write_pieces(writer);
    else
        write_byte_level(writer, pre);
}

static void write_split(struct gguf_writer *writer, const char *architecture, uint16_t number)
{
    const uint16_t count = 2;
    const int32_t total = (int32_t)count_tensors(architecture, SAMPLE_WHOLE);

    gguf_writer_value(writer, "split.no", GGUF_UINT16, &number, sizeof number);
    gguf_writer_value(writer, "split.count", GGUF_UINT16, &count, sizeof count);
    gguf_writer_value(writer, "split.tensors.count", GGUF_INT32, &total, sizeof total);
}

static enum quant_type quant_of(uint32_t type)
{
    enum quant_type quant;

    if (!quant_from_gguf(type, &quant))
        abort();
    return quant;
}

struct bytes sample_gguf(const char *architecture, const char *tokenizer, const char *pre,
                         uint32_t type, enum sample_part part)
{
    const size_t block = quant_info(quant_of(type))->block_elements;
    const size_t *sizes = block > 32 ? wide : narrow;
    struct gguf_writer writer;
    struct bytes image;

    gguf_writer_start(&writer);
    if (part != SAMPLE_SECOND)
        write_metadata(&writer, architecture, tokenizer, pre, sizes);
    if (part == SAMPLE_FIRST || part == SAMPLE_SECOND)
        write_split(&writer, architecture, part == SAMPLE_SECOND);
    for (size_t i = 0; i < TENSORS; i++) {
        const size_t columns = sizes[tensors[i].columns], rows = sizes[tensors[i].rows];
        const uint32_t f32 = quant_info(QUANT_F32)->gguf_type,
                       f16 = quant_info(QUANT_F16)->gguf_type;

        if (has_tensor(architecture, part, &tensors[i]))
            gguf_writer_tensor(&writer, tensors[i].gguf,
                               rows == 0              ? f32
                               : columns % block != 0 ? f16
                                                      : type,
                               columns, rows, NULL);
    }
    image = gguf_writer_image(&writer);
    gguf_writer_free(&writer);
    return image;
}

/* --- safetensors ------------------------------------------------------------------------------ */

struct bytes sample_safetensors(const char *architecture, const char *dtype, enum sample_part part)
{
    const size_t element = strcmp(dtype, "F32") == 0 ? 4 : 2;
    struct bytes header = {0}, file = {0};
    size_t offset = 0;

    append_text(&header, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < TENSORS; i++) {
        const struct tensor *tensor = &tensors[i];

        if (!has_tensor(architecture, part, tensor))
            continue;
        append_text(&header, ",\"");
        append_text(&header, tensor->safetensors);
        append_text(&header, "\":{\"dtype\":\"");
        append_text(&header, dtype);
        append_text(&header, "\",\"shape\":[");
        if (tensor->rows != NONE) {
            append_number(&header, narrow[tensor->rows]);
            append_text(&header, ",");
        }
        append_number(&header, narrow[tensor->columns]);
        append_text(&header, "],\"data_offsets\":[");
        append_number(&header, offset);
        offset +=
            (tensor->rows == NONE ? 1 : narrow[tensor->rows]) * narrow[tensor->columns] * element;
        append_text(&header, ",");
        append_number(&header, offset);
        append_text(&header, "]}");
    }
    append_text(&header, "}");
    while (header.size % 8 != 0)
        append_text(&header, " ");

    bytes_u64(&file, header.size);
    bytes_append(&file, header.data, header.size);
    bytes_free(&header);
    /* BF16 0x3c00 is 2^-7; the upper half of an F32 is the same. */
    for (size_t i = 0; i < offset; i += 2) {
        const uint16_t upper = (uint16_t)(0x3c00 | (i / element % 7 << 4) | (i / 64 % 2 << 15));
        const uint16_t bits = element == 4 && i % 4 == 0 ? 0 : upper;

        bytes_append(&file, &bits, sizeof bits);
    }
    return file;
}

struct bytes sample_index(const char *architecture, const char *first, const char *second)
{
    struct bytes index = {0};
    bool comma = false;

    append_text(&index, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    for (size_t i = 0; i < TENSORS; i++) {
        if (!has_tensor(architecture, SAMPLE_WHOLE, &tensors[i]))
            continue;
        append_text(&index, comma ? ",\"" : "\"");
        append_text(&index, tensors[i].safetensors);
        append_text(&index, "\":\"");
        append_text(&index, tensors[i].layer ? second : first);
        append_text(&index, "\"");
        comma = true;
    }
    append_text(&index, "}}");
    return index;
}

/* --- configurations --------------------------------------------------------------------------- */

const char *const sample_ropes[SAMPLE_ROPES] = {
    "null",
    "{\"type\":\"linear\",\"factor\":2.0}",
    "{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
    "\"original_max_position_embeddings\":64}",
    "{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":64,"
    "\"beta_fast\":32,\"beta_slow\":1,\"attention_factor\":1.1,\"mscale\":1,\"mscale_all_dim\":0.5,"
    "\"truncate\":false}",
};

struct bytes sample_config(const char *architecture, const char *rope)
{
    char text[1024];
    struct bytes config = {0};

    snprintf(text, sizeof text,
             "{\"model_type\":\"%s\",\"hidden_size\":%zu,\"intermediate_size\":%zu,"
             "\"num_hidden_layers\":1,\"num_attention_heads\":%zu,\"num_key_value_heads\":%zu,"
             "\"head_dim\":%zu,\"max_position_embeddings\":%d,\"rms_norm_eps\":1e-05,"
             "\"rope_theta\":10000.0,\"rope_scaling\":%s,\"vocab_size\":%d,"
             "\"tie_word_embeddings\":%s,\"attention_bias\":false,\"hidden_act\":\"silu\","
             "\"use_sliding_window\":false,\"sliding_window\":null,"
             "\"bos_token_id\":1,\"eos_token_id\":[2,3]}",
             architecture, narrow[HIDDEN], narrow[INTERMEDIATE], narrow[Q_ROWS] / narrow[HEAD_DIM],
             narrow[KV_ROWS] / narrow[HEAD_DIM], narrow[HEAD_DIM], CONTEXT, rope, VOCABULARY,
             strcmp(architecture, "llama") == 0 ? "false" : "true");
    append_text(&config, text);
    return config;
}

const char sample_generation_config[] = "{\"bos_token_id\":1,\"eos_token_id\":[2,5],"
                                        "\"do_sample\":true,\"temperature\":0.6}";

const char sample_tokenizer_config[] =
    "{\"add_bos_token\":false,\"add_prefix_space\":false,\"bos_token\":\"<|begin_of_text|>\","
    "\"eos_token\":{\"content\":\"<|im_end|>\",\"special\":true},\"unk_token\":null,"
    "\"added_tokens_decoder\":{\"20\":{\"content\":\"<|endoftext|>\",\"special\":true}},"
    "\"chat_template\":\"{{ '<|im_start|>' + message['role'] }}<|im_end|>\","
    "\"tokenizer_class\":\"GPT2Tokenizer\"}";

/* --- tokenizers ------------------------------------------------------------------------------- */

#define BYTE_LEVEL(regex)                                                                          \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,"                    \
    "\"use_regex\":" regex "}"
#define LETTERS "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|"
#define SPACES                                                                                     \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define SPLIT(numbers)                                                                             \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"        \
    "\"" LETTERS numbers SPACES                                                                    \
    "\"},\"behavior\":\"Isolated\",\"invert\":false}," BYTE_LEVEL("false") "]}"
#define START(token)                                                                               \
    "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"" token              \
    "\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}]}"

#define BYTE_LEVEL_MODEL                                                                           \
    "\"vocab\":{\"a\":0,\"b\":1,\"H\":2,\"e\":3,\"l\":4,\"o\":5,\"\u0120\":6,\"\u010a\":7,"        \
    "\"1\":8,\"2\":9,\"ll\":10,\"llo\":11,\"\u0120a\":12,\"\u00c3\":13,\"\u00a9\":14},"            \
    "\"merges\":[\"l l\",[\"ll\",\"o\"],\"\u0120 a\"]"
#define PIECES_MODEL                                                                               \
    "\"unk_token\":\"<unk>\",\"fuse_unk\":true,\"byte_fallback\":true,"                            \
    "\"vocab\":{\"<unk>\":0,\"<s>\":1,\"</s>\":2,\"<0x0A>\":3,\"<0xC3>\":4,\"<0xA9>\":5,"          \
    "\"\u2581\":6,\"a\":7,\"l\":8,\"o\":9,\"ll\":10,\"\u2581a\":11},"                              \
    "\"merges\":[\"l l\",\"\u2581 a\"]"

static const struct {
    const char *added, *normalizer, *pre_tokenizer, *post_processor, *model;
} tokenizers[SAMPLE_TOKENIZERS] = {
    {"", "null",
     "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":true}"
     "," BYTE_LEVEL("true") "]}",
     "null", BYTE_LEVEL_MODEL},
    {"", "{\"type\":\"NFC\"}", SPLIT("\\\\p{N}"), "null", BYTE_LEVEL_MODEL},
    {"", "null", SPLIT("\\\\p{N}{1,3}"), START("<|begin_of_text|>"),
     "\"ignore_merges\":true," BYTE_LEVEL_MODEL},
    {"{\"id\":1,\"content\":\"<s>\",\"special\":true},{\"id\":2,\"content\":\"</"
     "s>\",\"special\":true},",
     "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"\u2581\"},"
     "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\u2581\"}]}",
     "null", START("<s>"), PIECES_MODEL},
};

struct bytes sample_tokenizer(size_t kind)
{
    static const char *const added[] = {"<|endoftext|>",
                                        "<|im_start|>",
                                        "<|im_end|>",
                                        "<|begin_of_text|>",
                                        "<|start_header_id|>",
                                        "<|end_header_id|>",
                                        "<|eot_id|>",
                                        "<think>",
                                        "</think>",
                                        "caf\u00e9"};
    struct bytes json = {0};

    append_text(&json, "{\"version\":\"1.0\",\"added_tokens\":[");
    append_text(&json, tokenizers[kind].added);
    for (size_t i = 0; i < sizeof added / sizeof added[0]; i++) {
        append_text(&json, i == 0 ? "{\"id\":" : ",{\"id\":");
        append_number(&json, 20 + i);
        append_text(&json, ",\"content\":\"");
        append_text(&json, added[i]);
        append_text(&json, "\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,");
        append_text(&json, added[i][0] == '<' ? "\"normalized\":false," : "\"normalized\":true,");
        append_text(&json, added[i][1] == '|' ? "\"special\":true}" : "\"special\":false}");
    }
    append_text(&json, "],\"normalizer\":");
    append_text(&json, tokenizers[kind].normalizer);
    append_text(&json, ",\"pre_tokenizer\":");
    append_text(&json, tokenizers[kind].pre_tokenizer);
    append_text(&json, ",\"post_processor\":");
    append_text(&json, tokenizers[kind].post_processor);
    append_text(&json, ",\"decoder\":null,\"model\":{\"type\":\"BPE\",\"dropout\":null,");
    append_text(&json, tokenizers[kind].model);
    append_text(&json, "}}");
    return json;
}

/* --- chat templates --------------------------------------------------------------------------- */

const char *const sample_templates[SAMPLE_TEMPLATES] = {
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",

    "{%- for message in messages %}\n    {%- if message.role == \"user\" %}\n        {{- "
    "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "    {%- elif message.role == \"assistant\" %}\n        {%- if '</think>' in message.content "
    "%}\n"
    "            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
    "        {%- endif %}\n        {{- '<|im_start|>' + message.role + '\\n' + content }}\n"
    "        {{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}\n",

    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- set date_string = "
    "\"26 Jul 2024\" %}\n{%- endif %}\n{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" "
    "}}\n"
    "{{- \"Cutting Knowledge Date: December 2023\\n\" }}\n{{- \"Today Date: \" + date_string + "
    "\"\\n\\n\" }}\n{{- system_message }}\n{{- \"<|eot_id|>\" }}\n{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ "
    "message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- "
    "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' "
    "}}\n{%- endif %}\n",

    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set "
    "system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + "
    "system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = "
    "message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
    "content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + "
    "content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",

    "{#- The turns. #}\n{{- bos_token }}\n{%- for message in loop_messages %}\n"
    "    {%- if message[\"role\"] == \"user\" %}\n        {%- if loop.last and system_message is "
    "defined %}\n            {{- \"[INST]\" + system_message + \"\\n\\n\" + message[\"content\"] + "
    "\"[/INST]\" }}\n        {%- else %}\n            {{- \"[INST]\" + message[\"content\"] + "
    "\"[/INST]\" }}\n        {%- endif %}\n    {%- elif message[\"role\"] == \"assistant\" %}\n"
    "        {{- message[\"content\"] + eos_token}}\n    {%- endif %}\n{%- endfor %}\n",
};

/* --- sessions --------------------------------------------------------------------------------- */

enum { SESSION_LAYERS = 2, SESSION_HEADS = 2, SESSION_DIM = 8, SESSION_ROWS = 64 };

void sample_session_settings(size_t kind, pkv_config *config)
{
    static const size_t ranks_k[SESSION_LAYERS] = {2, 3}, ranks_v[SESSION_LAYERS] = {1, 4};
    static const struct {
        pkv_factors k, v;
    } factors[] = {{PKV_FACTORS_NATIVE, PKV_FACTORS_NATIVE},
                   {PKV_FACTORS_INT4, PKV_FACTORS_INT4},
                   {PKV_FACTORS_NATIVE, PKV_FACTORS_INT4},
                   {PKV_FACTORS_NONE, PKV_FACTORS_NONE}};
    static const pkv_dtype dtypes[] = {PKV_BF16, PKV_F16, PKV_F32};

    pkv_config_init(config, sizeof *config);
    config->layers = SESSION_LAYERS;
    config->query_heads = SESSION_HEADS;
    config->kv_heads = 1;
    config->head_dim = SESSION_DIM;
    config->page_tokens = SAMPLE_PAGE_ELEMENTS / SESSION_DIM;
    config->factors_k = factors[kind % 4].k;
    config->factors_v = factors[kind % 4].v;
    config->layer_rank_k = ranks_k;
    config->layer_rank_v = ranks_v;
    config->dtype = dtypes[kind / 4];
    config->max_sequences = 2;
    config->max_tokens = 2 * SAMPLE_SESSION_TOKENS + 10;
    config->threads = 1;
}

pkv_status sample_session_step(pkv_cache *cache, pkv_seq *seq, size_t tokens)
{
    float q[SESSION_ROWS * SESSION_HEADS * SESSION_DIM], out[sizeof q / sizeof *q];
    float k[SESSION_ROWS * SESSION_DIM], v[SESSION_ROWS * SESSION_DIM];
    const pkv_step_io io = {.struct_size = sizeof io,
                            .q = {.data = q},
                            .k = {.data = k},
                            .v = {.data = v},
                            .out = {.data = out}};
    const pkv_step_item item = {seq, tokens};
    uint32_t random = 1;
    pkv_step *step;
    pkv_status status;

    for (size_t i = 0; i < sizeof q / sizeof *q; i++)
        q[i] = (float)(i % 7) - 3;
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        random = random * 1664525u + 1013904223u;
        k[i] = (float)(random >> 24) / 128 - 1;
        v[i] = (float)(random >> 16 & 255) / 128 - 1;
    }
    status = pkv_step_begin(cache, &item, 1, &step);
    for (size_t layer = 0; layer < SESSION_LAYERS && status == PKV_OK; layer++)
        status = pkv_step_layer(step, layer, &io);
    if (status == PKV_OK)
        status = pkv_step_end(step);
    else
        pkv_step_abort(step);
    return status;
}

pkv_seq *sample_session_sequence(pkv_cache *cache)
{
    pkv_seq *seq;

    if (pkv_seq_open(cache, &seq) != PKV_OK ||
        sample_session_step(cache, seq, SAMPLE_SESSION_TOKENS) != PKV_OK)
        abort();
    return seq;
}

static int append_session(void *opaque, const void *data, size_t size)
{
    bytes_append(opaque, data, size);
    return 0;
}

struct bytes sample_session(size_t kind, size_t tokens)
{
    static char user[] = "user data";
    const pkv_session session = {sizeof session, SAMPLE_SESSION_MODEL, user, sizeof user};
    struct bytes bytes = {0};
    const pkv_writer writer = {append_session, &bytes};
    pkv_config config;
    pkv_cache *cache;
    pkv_seq *seq;

    sample_session_settings(kind, &config);
    if (pkv_cache_open(&config, &cache, NULL) != PKV_OK)
        abort();
    seq = sample_session_sequence(cache);
    if (pkv_seq_truncate(seq, tokens) != PKV_OK || pkv_seq_save(seq, &session, &writer) != PKV_OK)
        abort();
    pkv_cache_close(cache);
    return bytes;
}
