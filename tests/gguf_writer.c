/* SPDX-License-Identifier: MIT */
/* Builds GGUF files for tests, well-formed or deliberately broken. */
#include "gguf_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../tools/runner/quant.h"

void bytes_append(struct bytes *bytes, const void *data, size_t size)
{
    if (size > bytes->capacity - bytes->size) {
        bytes->capacity = 2 * bytes->capacity + size;
        bytes->data = realloc(bytes->data, bytes->capacity);
        if (bytes->data == NULL)
            abort();
    }
    if (size > 0)
        memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
}

void bytes_u32(struct bytes *bytes, uint32_t value)
{
    bytes_append(bytes, &value, sizeof value);
}

void bytes_u64(struct bytes *bytes, uint64_t value)
{
    bytes_append(bytes, &value, sizeof value);
}

void bytes_string(struct bytes *bytes, const char *string)
{
    bytes_u64(bytes, strlen(string));
    bytes_append(bytes, string, strlen(string));
}

void bytes_free(struct bytes *bytes)
{
    free(bytes->data);
    *bytes = (struct bytes){0};
}

void write_file(const char *path, const void *data, size_t size)
{
    FILE *file = fopen(path, "wb");

    if (file == NULL || (size > 0 && fwrite(data, size, 1, file) != 1) || fclose(file) != 0) {
        perror(path);
        abort();
    }
}

void gguf_writer_start(struct gguf_writer *writer)
{
    *writer = (struct gguf_writer){
        .magic = "GGUF", .version = 3, .alignment = 32, .random = 0x9e3779b97f4a7c15};
}

void gguf_writer_free(struct gguf_writer *writer)
{
    bytes_free(&writer->metadata);
    bytes_free(&writer->tensors);
    bytes_free(&writer->data);
}

void gguf_writer_key(struct gguf_writer *writer, const char *key, uint32_t type)
{
    writer->metadata_count++;
    bytes_string(&writer->metadata, key);
    bytes_u32(&writer->metadata, type);
}

void gguf_writer_value(struct gguf_writer *writer, const char *key, uint32_t type,
                       const void *value, size_t size)
{
    gguf_writer_key(writer, key, type);
    bytes_append(&writer->metadata, value, size);
}

void gguf_writer_uint(struct gguf_writer *writer, const char *key, uint32_t value)
{
    gguf_writer_value(writer, key, GGUF_UINT32, &value, sizeof value);
}

void gguf_writer_float(struct gguf_writer *writer, const char *key, float value)
{
    gguf_writer_value(writer, key, GGUF_FLOAT32, &value, sizeof value);
}

void gguf_writer_bool(struct gguf_writer *writer, const char *key, int value)
{
    const unsigned char byte = (unsigned char)value;

    gguf_writer_value(writer, key, GGUF_BOOL, &byte, sizeof byte);
}

void gguf_writer_string(struct gguf_writer *writer, const char *key, const char *value)
{
    gguf_writer_key(writer, key, GGUF_STRING);
    bytes_string(&writer->metadata, value);
}

void gguf_writer_strings(struct gguf_writer *writer, const char *key, const char *const *values,
                         size_t count)
{
    gguf_writer_key(writer, key, GGUF_ARRAY);
    bytes_u32(&writer->metadata, GGUF_STRING);
    bytes_u64(&writer->metadata, count);
    for (size_t i = 0; i < count; i++)
        bytes_string(&writer->metadata, values[i]);
}

void gguf_writer_array(struct gguf_writer *writer, const char *key, uint32_t element_type,
                       const void *values, size_t count, size_t size)
{
    gguf_writer_key(writer, key, GGUF_ARRAY);
    bytes_u32(&writer->metadata, element_type);
    bytes_u64(&writer->metadata, count);
    bytes_append(&writer->metadata, values, size);
}

void gguf_writer_entry(struct gguf_writer *writer, const char *name, uint32_t type,
                       uint32_t dimension_count, const uint64_t *dimensions, uint64_t offset)
{
    writer->tensor_count++;
    bytes_string(&writer->tensors, name);
    bytes_u32(&writer->tensors, dimension_count);
    for (uint32_t i = 0; i < dimension_count; i++)
        bytes_u64(&writer->tensors, dimensions[i]);
    bytes_u32(&writer->tensors, type);
    bytes_u64(&writer->tensors, offset);
}

static uint64_t random_bits(struct gguf_writer *writer)
{
    writer->random ^= writer->random << 13;
    writer->random ^= writer->random >> 7;
    writer->random ^= writer->random << 17;
    return writer->random;
}

/* The f16 numbers in a block of each type: where they lie, and the bits of their exponent that may
 * be set, so that all elements are small numbers. Codes take any bits. */
static const struct {
    size_t offset[2];
    unsigned exponent[2];
    int count;
} halves[QUANT_TYPES] = {
    [QUANT_F16] = {{0}, {7}, 1},          [QUANT_Q4_0] = {{0}, {7}, 1},
    [QUANT_Q4_1] = {{0, 2}, {7, 7}, 2},   [QUANT_Q5_0] = {{0}, {7}, 1},
    [QUANT_Q5_1] = {{0, 2}, {7, 7}, 2},   [QUANT_Q8_0] = {{0}, {3}, 1},
    [QUANT_Q2_K] = {{80, 82}, {3, 3}, 2}, [QUANT_Q3_K] = {{108}, {3}, 1},
    [QUANT_Q4_K] = {{0, 2}, {1, 3}, 2},   [QUANT_Q5_K] = {{0, 2}, {0, 3}, 2},
    [QUANT_Q6_K] = {{208}, {0}, 1},       [QUANT_IQ4_NL] = {{0}, {3}, 1},
    [QUANT_IQ4_XS] = {{0}, {0}, 1},
};

static void random_block(struct gguf_writer *writer, enum quant_type type, int centre,
                         unsigned char *block)
{
    const struct quant_info *info = quant_info(type);
    const float value = (float)centre + (float)(int32_t)random_bits(writer) * 0x1p-34f; /* 1/8 */
    uint64_t bits;

    if (type == QUANT_F32 || type == QUANT_BF16) {
        memcpy(block, (const char *)&value + sizeof value - info->block_bytes, info->block_bytes);
        return;
    }
    for (size_t i = 0; i < info->block_bytes; i += sizeof bits) {
        size_t rest = info->block_bytes - i;

        bits = random_bits(writer);
        memcpy(block + i, &bits, rest < sizeof bits ? rest : sizeof bits);
    }
    for (int i = 0; i < halves[type].count; i++) {
        uint16_t half;

        memcpy(&half, block + halves[type].offset[i], sizeof half);
        if (centre != 0)
            half = (uint16_t)(0x3c00 | (half & 0xff)); /* 1 .. 1.25 */
        else
            half &= (uint16_t)(0x83ff | halves[type].exponent[i] << 10);
        memcpy(block + halves[type].offset[i], &half, sizeof half);
    }
}

void gguf_writer_random(struct gguf_writer *writer, uint32_t type, size_t count, int is_vector)
{
    unsigned char block[256];
    enum quant_type quant;

    if (!quant_from_gguf(type, &quant) || quant_info(quant)->block_bytes > sizeof block)
        abort();
    for (size_t i = 0; i < count; i += quant_info(quant)->block_elements) {
        random_block(writer, quant, is_vector, block);
        bytes_append(&writer->data, block, quant_info(quant)->block_bytes);
    }
}

void gguf_writer_tensor(struct gguf_writer *writer, const char *name, uint32_t type, size_t columns,
                        size_t rows, const void *data)
{
    const uint64_t dimensions[] = {columns, rows};
    enum quant_type quant;
    size_t row_bytes;

    if (!quant_from_gguf(type, &quant) || !quant_row_bytes(quant, columns, &row_bytes))
        abort();
    while (writer->data.size % writer->alignment != 0)
        bytes_append(&writer->data, "", 1);
    gguf_writer_entry(writer, name, type, rows == 0 ? 1 : 2, dimensions, writer->data.size);
    if (data != NULL)
        bytes_append(&writer->data, data, row_bytes * (rows == 0 ? 1 : rows));
    else
        gguf_writer_random(writer, type, columns * (rows == 0 ? 1 : rows), rows == 0);
}

struct bytes gguf_writer_image(const struct gguf_writer *writer)
{
    struct bytes image = {0};

    bytes_append(&image, writer->magic, 4);
    bytes_u32(&image, writer->version);
    bytes_u64(&image, writer->tensor_count + writer->claimed_tensors);
    bytes_u64(&image, writer->metadata_count + writer->claimed_metadata);
    bytes_append(&image, writer->metadata.data, writer->metadata.size);
    bytes_append(&image, writer->tensors.data, writer->tensors.size);
    if (writer->tensor_count > 0) {
        while (image.size % writer->alignment != 0)
            bytes_append(&image, "", 1);
    }
    bytes_append(&image, writer->data.data, writer->data.size);
    return image;
}

void gguf_writer_save(const struct gguf_writer *writer, const char *path)
{
    struct bytes image = gguf_writer_image(writer);

    write_file(path, image.data, image.size);
    bytes_free(&image);
}
