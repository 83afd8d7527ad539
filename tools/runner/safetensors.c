/* SPDX-License-Identifier: MIT */
/* Safetensors files, alone or several with an index: tensors by name, read in place. */
#include "safetensors.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "json_text.h"

/* Some hundred thousand tensors. The format itself allows 100 MB, which nothing comes near. */
#define MAX_HEADER_BYTES ((size_t)16 << 20)
#define MAX_INDEX_BYTES  ((size_t)16 << 20)

struct entry {
    struct safetensors_tensor tensor;
    size_t begin, end; /* in the data section */
};

/* Either one file, or an index and its files. */
struct safetensors {
    char *path;
    struct entry *entries; /* ascending by name */
    size_t count;

    struct file_map file;
    json_t *header;     /* owns the entries' names */
    size_t data_offset; /* of the data section in the file */

    struct safetensors **parts; /* their entries' names are also these entries' */
    size_t part_count;
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
    const char *path = file->path;
    const json_t *shape = json_object_get(value, "shape");
    const json_t *offsets = json_object_get(value, "data_offsets");
    const size_t data_size = file->file.size - file->data_offset;
    struct safetensors_tensor *tensor = &entry->tensor;
    size_t elements = 1, element_bytes, bytes;

    tensor->name = name;
    tensor->file = &file->file;
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
    tensor->aligned = (file->data_offset + entry->begin) % element_bytes == 0;
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
                             file->path, file->entries[i].tensor.name, file->entries[i].begin, end);
        end = file->entries[i].end;
    }
    if (end != data_size)
        return error_set(error, "%s: the tensors take %zu of the %zu bytes of tensor data",
                         file->path, end, data_size);
    return true;
}

static bool read_file(struct safetensors *file, struct error *error)
{
    const char *path = file->path;
    const char *name;
    uint64_t header_size;
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
    file->header = json_text_parse(file->file.data + sizeof header_size, (size_t)header_size, path,
                                   "the header: ", error);
    if (file->header == NULL)
        return false;
    file->entries = calloc(json_object_size(file->header) + 1, sizeof *file->entries);
    if (file->entries == NULL)
        return error_set(error, "%s: out of memory", path);
    json_object_foreach(file->header, name, value)
    {
        if (strcmp(name, "__metadata__") == 0)
            continue;
        if (*name == '\0')
            return error_set(error, "%s: tensor %zu: the name is empty", path, file->count + 1);
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

static struct safetensors *allocate(const char *path, struct error *error)
{
    struct safetensors *file = calloc(1, sizeof *file);

    if (file != NULL)
        file->path = strdup(path);
    if (file == NULL || file->path == NULL) {
        error_set(error, "%s: out of memory", path);
        free(file);
        return NULL;
    }
    return file;
}

bool safetensors_open(const char *path, struct safetensors **file, struct error *error)
{
    struct safetensors *opened = allocate(path, error);

    *file = NULL;
    if (opened == NULL)
        return false;
    if (!file_map_open(path, &opened->file, error) || !read_file(opened, error)) {
        safetensors_close(opened);
        return false;
    }
    *file = opened;
    return true;
}

/* A tensor in the index and the name of its file. */
struct assignment {
    const char *tensor;
    const char *file;
};

static int compare_files(const void *a, const void *b)
{
    return strcmp(((const struct assignment *)a)->file, ((const struct assignment *)b)->file);
}

/* Opens one more part, a file beside the index. */
static bool open_part(struct safetensors *index, const char *name, struct error *error)
{
    const char *slash = strrchr(index->path, '/');
    const size_t folder_size = slash != NULL ? (size_t)(slash - index->path) + 1 : 0;
    struct safetensors **parts;
    char *path;
    bool done;

    /* A name with a slash could lead anywhere. */
    if (*name == '\0' || strchr(name, '/') != NULL)
        return error_set(error, "%s: weight_map: " NAME " is not the name of a file beside it",
                         index->path, name);
    parts = realloc(index->parts, (index->part_count + 1) * sizeof(struct safetensors *));
    if (parts == NULL)
        return error_set(error, "%s: out of memory", index->path);
    index->parts = parts;
    path = malloc(folder_size + strlen(name) + 1);
    if (path == NULL)
        return error_set(error, "%s: out of memory", index->path);
    memcpy(path, index->path, folder_size);
    memcpy(path + folder_size, name, strlen(name) + 1);
    done = safetensors_open(path, &parts[index->part_count], error);
    if (done)
        index->part_count++;
    free(path);
    return done;
}

static bool open_parts(struct safetensors *index, struct assignment *list, size_t count,
                       struct error *error)
{
    qsort(list, count, sizeof *list, compare_files);
    for (size_t i = 0; i < count; i++) {
        const struct safetensors_tensor *tensor;

        if ((i == 0 || strcmp(list[i].file, list[i - 1].file) != 0) &&
            !open_part(index, list[i].file, error))
            return false;
        tensor = safetensors_tensor(index->parts[index->part_count - 1], list[i].tensor);
        if (tensor == NULL)
            return error_set(error, "%s: weight_map: tensor " NAME " is not in " NAME, index->path,
                             list[i].tensor, list[i].file);
        index->entries[i].tensor = *tensor;
    }
    index->count = count;
    qsort(index->entries, count, sizeof *index->entries, compare_names);
    return true;
}

bool safetensors_open_index(const char *path, struct safetensors **files, struct error *error)
{
    struct safetensors *opened = allocate(path, error);
    struct assignment *list = NULL;
    json_t *root = NULL, *map, *file;
    const char *tensor;
    size_t count = 0;
    bool done = false;

    *files = NULL;
    if (opened == NULL)
        return false;
    root = json_text_read(path, MAX_INDEX_BYTES, NULL, error);
    if (root == NULL)
        goto out;
    map = json_object_get(root, "weight_map");
    if (!json_is_object(map) || json_object_size(map) == 0) {
        error_set(error, "%s: weight_map: is not an object that names tensors", path);
        goto out;
    }
    list = calloc(json_object_size(map), sizeof *list);
    opened->entries = calloc(json_object_size(map), sizeof *opened->entries);
    if (list == NULL || opened->entries == NULL) {
        error_set(error, "%s: out of memory", path);
        goto out;
    }
    json_object_foreach(map, tensor, file)
    {
        if (!json_is_string(file)) {
            error_set(error, "%s: weight_map: tensor " NAME ": is not the name of a file", path,
                      tensor);
            goto out;
        }
        list[count++] = (struct assignment){tensor, json_string_value(file)};
    }
    done = open_parts(opened, list, count, error);
out:
    free(list);
    json_decref(root);
    if (!done) {
        safetensors_close(opened);
        return false;
    }
    *files = opened;
    return true;
}

void safetensors_close(struct safetensors *file)
{
    if (file == NULL)
        return;
    for (size_t i = 0; i < file->part_count; i++)
        safetensors_close(file->parts[i]);
    free(file->parts);
    free(file->entries);
    json_decref(file->header);
    file_map_close(&file->file);
    free(file->path);
    free(file);
}

const char *safetensors_path(const struct safetensors *file)
{
    return file->path;
}

void safetensors_prefetch(const struct safetensors *file)
{
    if (file->file.data != NULL)
        file_map_prefetch(&file->file);
    for (size_t i = 0; i < file->part_count; i++)
        safetensors_prefetch(file->parts[i]);
}

size_t safetensors_count(const struct safetensors *file)
{
    return file->count;
}

const char *safetensors_metadata(const struct safetensors *file, const char *key)
{
    return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}

const struct safetensors_tensor *safetensors_tensor(const struct safetensors *file,
                                                    const char *name)
{
    const struct entry wanted = {.tensor.name = name};
    const struct entry *found =
        bsearch(&wanted, file->entries, file->count, sizeof *file->entries, compare_names);

    return found != NULL ? &found->tensor : NULL;
}
