/* SPDX-License-Identifier: MIT */
/* Safetensors files: tensors by name, read in place. */
#include "safetensors.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#define MAX_HEADER_BYTES 100000000 /* the format's own limit */

struct entry {
    struct safetensors_tensor tensor;
    size_t begin, end; /* in the data section */
};

struct safetensors {
    struct file_map file;
    json_t *header;        /* owns the names */
    struct entry *entries; /* ascending by name */
    size_t count;
    size_t data_offset; /* of the data section in the file */
};

static const enum quant_type element_types[] = {QUANT_F32, QUANT_F16, QUANT_BF16};

/* Names out of the file are shown up to this length. */
#define NAME "%.100s"

static bool get_size(const json_t *value, size_t *size)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    return !__builtin_add_overflow(json_integer_value(value), 0, size);
}

static bool read_entry(const struct safetensors *file, const char *name, const json_t *value,
                       struct entry *entry, struct error *error)
{
    const char *path = file->file.path;
    const json_t *shape = json_object_get(value, "shape");
    const json_t *offsets = json_object_get(value, "data_offsets");
    const size_t data_size = file->file.size - file->data_offset;
    struct safetensors_tensor *tensor = &entry->tensor;
    size_t elements = 1, element_bytes, bytes;

    tensor->name = name;
    tensor->dtype = json_string_value(json_object_get(value, "dtype"));
    if (tensor->dtype == NULL)
        return error_set(error, "%s: tensor " NAME ": dtype is not a string", path, name);
    if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_MAX_DIMENSIONS)
        return error_set(error, "%s: tensor " NAME ": shape is not an array of at most %d sizes",
                         path, name, SAFETENSORS_MAX_DIMENSIONS);
    tensor->dimension_count = json_array_size(shape);
    for (size_t i = 0; i < SAFETENSORS_MAX_DIMENSIONS; i++) {
        tensor->dimensions[i] = 1;
        if (i >= tensor->dimension_count)
            continue;
        if (!get_size(json_array_get(shape, i), &tensor->dimensions[i]))
            return error_set(error, "%s: tensor " NAME ": shape[%zu] is not a size", path, name, i);
        if (__builtin_mul_overflow(elements, tensor->dimensions[i], &elements))
            return error_set(error,
                             "%s: tensor " NAME ": shape[%zu] is %zu: the number of elements "
                             "overflows",
                             path, name, i, tensor->dimensions[i]);
    }
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !get_size(json_array_get(offsets, 0), &entry->begin) ||
        !get_size(json_array_get(offsets, 1), &entry->end) || entry->begin > entry->end)
        return error_set(error, "%s: tensor " NAME ": data_offsets is not [BEGIN, END]", path,
                         name);
    if (entry->end > data_size)
        return error_set(error,
                         "%s: tensor " NAME ": data_offsets end at %zu, past the %zu bytes of "
                         "tensor data (truncated file?)",
                         path, name, entry->end, data_size);
    for (size_t i = 0; i < sizeof element_types / sizeof element_types[0]; i++) {
        if (strcmp(tensor->dtype, quant_info(element_types[i])->name) == 0) {
            tensor->known = true;
            tensor->type = element_types[i];
        }
    }
    if (!tensor->known)
        return true;
    element_bytes = quant_info(tensor->type)->block_bytes;
    if (__builtin_mul_overflow(elements, element_bytes, &bytes) ||
        bytes != entry->end - entry->begin)
        return error_set(error,
                         "%s: tensor " NAME ": data_offsets span %zu bytes, which is not what "
                         "%zu elements of %s take",
                         path, name, entry->end - entry->begin, elements, tensor->dtype);
    if ((file->data_offset + entry->begin) % element_bytes != 0)
        return error_set(error,
                         "%s: tensor " NAME ": its data begin at byte %zu, which is not a "
                         "multiple of %zu",
                         path, name, file->data_offset + entry->begin, element_bytes);
    tensor->data = file->file.data + file->data_offset + entry->begin;
    return true;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct entry *)a)->tensor.name, ((const struct entry *)b)->tensor.name);
}

static int compare_places(const void *a, const void *b)
{
    const struct entry *left = a, *right = b;

    if (left->begin != right->begin)
        return left->begin < right->begin ? -1 : 1;
    return (left->end > right->end) - (left->end < right->end);
}

/* The format wants tensors side by side and nothing else in the data section. */
static bool check_places(struct safetensors *file, struct error *error)
{
    const size_t data_size = file->file.size - file->data_offset;
    size_t end = 0;

    qsort(file->entries, file->count, sizeof *file->entries, compare_places);
    for (size_t i = 0; i < file->count; i++) {
        if (file->entries[i].begin != end)
            return error_set(error,
                             "%s: tensor " NAME ": data_offsets begin at %zu, expected %zu, where "
                             "the tensor before it ends",
                             file->file.path, file->entries[i].tensor.name, file->entries[i].begin,
                             end);
        end = file->entries[i].end;
    }
    if (end != data_size)
        return error_set(error, "%s: the tensors take %zu of the %zu bytes of tensor data",
                         file->file.path, end, data_size);
    return true;
}

static bool read_file(struct safetensors *file, struct error *error)
{
    const char *path = file->file.path;
    const char *name;
    uint64_t header_size;
    json_error_t parse_error;
    json_t *value;

    if (file->file.size < sizeof header_size)
        return error_set(error, "%s: truncated: %zu bytes hold no header length", path,
                         file->file.size);
    memcpy(&header_size, file->file.data, sizeof header_size);
    if (header_size > file->file.size - sizeof header_size || header_size > MAX_HEADER_BYTES)
        return error_set(error,
                         "%s: the header length is %" PRIu64 ", the file has %zu bytes (not a "
                         "safetensors file, or truncated)",
                         path, header_size, file->file.size);
    file->data_offset = sizeof header_size + (size_t)header_size;
    file->header = json_loadb((const char *)file->file.data + sizeof header_size,
                              (size_t)header_size, JSON_REJECT_DUPLICATES, &parse_error);
    if (file->header == NULL)
        return error_set(error, "%s: the header is not valid JSON: %s", path, parse_error.text);
    if (!json_is_object(file->header))
        return error_set(error, "%s: the header is not a JSON object", path);
    file->entries = calloc(json_object_size(file->header) + 1, sizeof *file->entries);
    if (file->entries == NULL)
        return error_set(error, "%s: out of memory", path);
    json_object_foreach(file->header, name, value)
    {
        if (strcmp(name, "__metadata__") == 0)
            continue;
        if (!json_is_object(value))
            return error_set(error, "%s: tensor " NAME ": is not a JSON object", path, name);
        if (!read_entry(file, name, value, &file->entries[file->count], error))
            return false;
        file->count++;
    }
    if (!check_places(file, error))
        return false;
    qsort(file->entries, file->count, sizeof *file->entries, compare_names);
    return true;
}

bool safetensors_open(const char *path, struct safetensors **file, struct error *error)
{
    struct safetensors *opened = calloc(1, sizeof *opened);

    *file = NULL;
    if (opened == NULL)
        return error_set(error, "%s: out of memory", path);
    if (!file_map_open(path, &opened->file, error) || !read_file(opened, error)) {
        safetensors_close(opened);
        return false;
    }
    *file = opened;
    return true;
}

void safetensors_close(struct safetensors *file)
{
    if (file == NULL)
        return;
    free(file->entries);
    json_decref(file->header);
    file_map_close(&file->file);
    free(file);
}

const struct file_map *safetensors_file(const struct safetensors *file)
{
    return &file->file;
}

size_t safetensors_count(const struct safetensors *file)
{
    return file->count;
}

const struct safetensors_tensor *safetensors_tensor(const struct safetensors *file,
                                                    const char *name)
{
    const struct entry wanted = {.tensor.name = name};
    const struct entry *found =
        bsearch(&wanted, file->entries, file->count, sizeof *file->entries, compare_names);

    return found != NULL ? &found->tensor : NULL;
}
