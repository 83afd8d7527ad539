/* SPDX-License-Identifier: MIT */
/* Builds GGUF files for tests, well-formed or deliberately broken. */
#ifndef PUZZLEKV_TESTS_GGUF_WRITER_H
#define PUZZLEKV_TESTS_GGUF_WRITER_H

#include <stddef.h>
#include <stdint.h>

/* Grows as it is written to; ends the process when memory runs out. */
struct bytes {
    unsigned char *data;
    size_t size;
    size_t capacity;
};

void bytes_append(struct bytes *bytes, const void *data, size_t size);
void bytes_u32(struct bytes *bytes, uint32_t value);
void bytes_u64(struct bytes *bytes, uint64_t value);

/* A length and the characters, as GGUF stores strings. */
void bytes_string(struct bytes *bytes, const char *string);
void bytes_free(struct bytes *bytes);

/* Writes a whole file; ends the process when that fails. */
void write_file(const char *path, const void *data, size_t size);

/* Entries appear in the file in the order of the calls. The first five fields may be changed at any
 * time before gguf_writer_image. */
struct gguf_writer {
    const char *magic; /* 4 bytes */
    uint32_t version;
    uint64_t alignment;        /* how the data are laid out; says nothing in the metadata */
    uint64_t claimed_tensors;  /* added to what the header says */
    uint64_t claimed_metadata; /* likewise */

    uint64_t tensor_count;
    uint64_t metadata_count;
    uint64_t random;
    struct bytes metadata; /* all entries */
    struct bytes tensors;  /* all entries */
    struct bytes data;     /* all tensors' contents */
};

/* GGUF's numbers of metadata types. */
enum {
    GGUF_UINT8,
    GGUF_INT8,
    GGUF_UINT16,
    GGUF_INT16,
    GGUF_UINT32,
    GGUF_INT32,
    GGUF_FLOAT32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_UINT64,
    GGUF_INT64,
    GGUF_FLOAT64,
};

void gguf_writer_start(struct gguf_writer *writer);
void gguf_writer_free(struct gguf_writer *writer);

/* Counts an entry and writes its key and type number; the caller appends the value to
 * writer->metadata. */
void gguf_writer_key(struct gguf_writer *writer, const char *key, uint32_t type);

/* A value given as its bytes. */
void gguf_writer_value(struct gguf_writer *writer, const char *key, uint32_t type,
                       const void *value, size_t size);
void gguf_writer_uint(struct gguf_writer *writer, const char *key, uint32_t value); /* UINT32 */
void gguf_writer_float(struct gguf_writer *writer, const char *key, float value);   /* FLOAT32 */
void gguf_writer_bool(struct gguf_writer *writer, const char *key, int value);
void gguf_writer_string(struct gguf_writer *writer, const char *key, const char *value);
void gguf_writer_strings(struct gguf_writer *writer, const char *key, const char *const *values,
                         size_t count);

/* An array of numbers, given as its `size` bytes. */
void gguf_writer_array(struct gguf_writer *writer, const char *key, uint32_t element_type,
                       const void *values, size_t count, size_t size);

/* A tensor entry alone, with any numbers. */
void gguf_writer_entry(struct gguf_writer *writer, const char *name, uint32_t type,
                       uint32_t dimension_count, const uint64_t *dimensions, uint64_t offset);

/* A tensor of one of the types in tools/runner/quant.h with {columns, rows} elements; rows 0 makes
 * a vector. Contents are `data` or, if that is NULL, small random numbers, near 1 for a vector. */
void gguf_writer_tensor(struct gguf_writer *writer, const char *name, uint32_t type, size_t columns,
                        size_t rows, const void *data);

/* Appends random contents as above: `count` elements, near 1 for a vector. */
void gguf_writer_random(struct gguf_writer *writer, uint32_t type, size_t count, int is_vector);

/* The whole file; the caller frees it with bytes_free. */
struct bytes gguf_writer_image(const struct gguf_writer *writer);

void gguf_writer_save(const struct gguf_writer *writer, const char *path);

#endif
