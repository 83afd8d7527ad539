/* SPDX-License-Identifier: MIT */
/* Writes a GGUF file of a Llama of any shape with random weights and no tokenizer:
 *   write_gguf FILE TYPE LAYERS HIDDEN INTERMEDIATE QUERY_HEADS KV_HEADS VOCABULARY
 * TYPE is the element type of all matrices. Holds one tensor at a time. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../tools/runner/quant.h"
#include "gguf_writer.h"

struct shape {
    enum quant_type type;
    size_t layers, hidden, intermediate, query_heads, kv_heads, vocabulary;
};

struct output {
    FILE *file; /* NULL in the first pass, which only makes the header */
    struct gguf_writer writer;
    uint64_t offset; /* of the next tensor */
};

static void fail(const char *what)
{
    fprintf(stderr, "write_gguf: %s\n", what);
    exit(1);
}

static void flush(struct output *output)
{
    struct bytes *data = &output->writer.data;

    if (data->size > 0 && fwrite(data->data, data->size, 1, output->file) != 1)
        fail("cannot write the file");
    data->size = 0;
}

static void tensor(struct output *output, const char *name, enum quant_type type, size_t columns,
                   size_t rows)
{
    const uint64_t dimensions[] = {columns, rows};
    const size_t count = columns * (rows == 0 ? 1 : rows);
    const uint32_t number = quant_info(type)->gguf_type;
    size_t row_bytes;

    if (!quant_row_bytes(type, columns, &row_bytes))
        fail("a row is not a multiple of the type's block");
    if (output->file == NULL) {
        gguf_writer_entry(&output->writer, name, number, rows == 0 ? 1 : 2, dimensions,
                          output->offset);
    } else {
        gguf_writer_random(&output->writer, number, count, rows == 0);
        while (output->writer.data.size % output->writer.alignment != 0)
            bytes_append(&output->writer.data, "", 1);
        flush(output);
    }
    output->offset += row_bytes * (rows == 0 ? 1 : rows);
    output->offset += -output->offset % output->writer.alignment;
}

static void tensors(struct output *output, const struct shape *shape)
{
    const size_t hidden = shape->hidden, intermediate = shape->intermediate;
    const size_t kv_rows = hidden / shape->query_heads * shape->kv_heads;
    const struct {
        const char *name;
        size_t columns, rows;
    } layer[] = {
        {"attn_norm", hidden, 0},           {"attn_q", hidden, hidden},
        {"attn_k", hidden, kv_rows},        {"attn_v", hidden, kv_rows},
        {"attn_output", hidden, hidden},    {"ffn_norm", hidden, 0},
        {"ffn_gate", hidden, intermediate}, {"ffn_up", hidden, intermediate},
        {"ffn_down", intermediate, hidden},
    };

    tensor(output, "token_embd.weight", shape->type, hidden, shape->vocabulary);
    for (size_t l = 0; l < shape->layers; l++) {
        for (size_t i = 0; i < sizeof layer / sizeof layer[0]; i++) {
            char name[64];

            snprintf(name, sizeof name, "blk.%zu.%s.weight", l, layer[i].name);
            tensor(output, name, layer[i].rows == 0 ? QUANT_F32 : shape->type, layer[i].columns,
                   layer[i].rows);
        }
    }
    tensor(output, "output_norm.weight", QUANT_F32, hidden, 0);
    tensor(output, "output.weight", shape->type, hidden, shape->vocabulary);
}

static void metadata(struct gguf_writer *writer, const struct shape *shape)
{
    gguf_writer_string(writer, "general.architecture", "llama");
    gguf_writer_uint(writer, "llama.block_count", (uint32_t)shape->layers);
    gguf_writer_uint(writer, "llama.context_length", 131072);
    gguf_writer_uint(writer, "llama.embedding_length", (uint32_t)shape->hidden);
    gguf_writer_uint(writer, "llama.feed_forward_length", (uint32_t)shape->intermediate);
    gguf_writer_uint(writer, "llama.attention.head_count", (uint32_t)shape->query_heads);
    gguf_writer_uint(writer, "llama.attention.head_count_kv", (uint32_t)shape->kv_heads);
    gguf_writer_float(writer, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_writer_float(writer, "llama.rope.freq_base", 500000);
}

int main(int argc, char **argv)
{
    struct shape shape = {.type = QUANT_TYPES};
    size_t *const fields[] = {&shape.layers,      &shape.hidden,   &shape.intermediate,
                              &shape.query_heads, &shape.kv_heads, &shape.vocabulary};
    struct output output = {.file = NULL};
    struct bytes header;

    if (argc != 9)
        fail("expected FILE TYPE LAYERS HIDDEN INTERMEDIATE QUERY_HEADS KV_HEADS VOCABULARY");
    for (int i = 0; i < QUANT_TYPES; i++) {
        if (strcmp(quant_info((enum quant_type)i)->name, argv[2]) == 0)
            shape.type = (enum quant_type)i;
    }
    if (shape.type == QUANT_TYPES)
        fail("TYPE is not one of " QUANT_SUPPORTED);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        *fields[i] = strtoul(argv[3 + i], NULL, 10);
        if (*fields[i] == 0 || *fields[i] > UINT32_MAX)
            fail("a number of the shape is not at least 1, or too large");
    }

    gguf_writer_start(&output.writer);
    metadata(&output.writer, &shape);
    tensors(&output, &shape);
    header = gguf_writer_image(&output.writer);
    output.file = fopen(argv[1], "wb");
    if (output.file == NULL || fwrite(header.data, header.size, 1, output.file) != 1)
        fail("cannot write the file");
    tensors(&output, &shape);
    if (fclose(output.file) != 0)
        fail("cannot write the file");
    bytes_free(&header);
    gguf_writer_free(&output.writer);
    return 0;
}
