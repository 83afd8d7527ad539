/* SPDX-License-Identifier: MIT */
/* GGUF files (versions 2 and 3, little-endian), whole or split: metadata and tensors, read in
 * place. */
#include "gguf.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

enum value_type {
    TYPE_UINT8,
    TYPE_INT8,
    TYPE_UINT16,
    TYPE_INT16,
    TYPE_UINT32,
    TYPE_INT32,
    TYPE_FLOAT32,
    TYPE_BOOL,
    TYPE_STRING,
    TYPE_ARRAY,
    TYPE_UINT64,
    TYPE_INT64,
    TYPE_FLOAT64,
    VALUE_TYPES
};

/* Bytes of a value; 0 where they depend on the value. */
static const struct {
    const char *name;
    size_t bytes;
} value_types[VALUE_TYPES] = {
    [TYPE_UINT8] = {"UINT8", 1},     [TYPE_INT8] = {"INT8", 1},     [TYPE_UINT16] = {"UINT16", 2},
    [TYPE_INT16] = {"INT16", 2},     [TYPE_UINT32] = {"UINT32", 4}, [TYPE_INT32] = {"INT32", 4},
    [TYPE_FLOAT32] = {"FLOAT32", 4}, [TYPE_BOOL] = {"BOOL", 1},     [TYPE_STRING] = {"STRING", 0},
    [TYPE_ARRAY] = {"ARRAY", 0},     [TYPE_UINT64] = {"UINT64", 8}, [TYPE_INT64] = {"INT64", 8},
    [TYPE_FLOAT64] = {"FLOAT64", 8},
};

/* The least that an entry takes in the file: what a claimed count is checked against. */
#define MIN_FIELD_BYTES  (8 + 1 + 4 + 1)
#define MIN_TENSOR_BYTES (8 + 1 + 4 + 8 + 4 + 8)

#define MAX_NAME_BYTES    65535
#define DEFAULT_ALIGNMENT 32
#define MIN_ALIGNMENT     8

struct field {
    struct gguf_string key;
    enum value_type type;
    enum value_type element_type; /* of an array */
    size_t count;                 /* elements of an array, else 1 */
    const unsigned char *data;    /* the value, or an array's first element; unaligned */
};

struct tensor_entry {
    struct gguf_tensor tensor;
    uint64_t offset; /* from the start of the data section */
};

struct gguf {
    struct file_map file;
    struct field *fields; /* ascending by key */
    size_t field_count;
    struct tensor_entry *tensors; /* ascending by name; of all parts */
    size_t tensor_count;
    struct gguf **parts; /* of a split model, all but the first, which this is */
    size_t part_count;
};

bool gguf_string_is(struct gguf_string string, const char *text)
{
    return string.size == strlen(text) && memcmp(string.data, text, string.size) == 0;
}

/* Where parsing is, and what it is in, for messages. */
struct cursor {
    const struct file_map *file;
    size_t offset;
    struct error *error;
    const char *section;     /* "metadata entry", "tensor"; NULL in the header */
    size_t number;           /* of the entry, from 1 */
    struct gguf_string name; /* of the entry, once it is known */
};

/* What a message shows of a name that came out of the file. */
static int shown(struct gguf_string name)
{
    return name.size < 100 ? (int)name.size : 100;
}

__attribute__((format(printf, 2, 3))) static bool fail(const struct cursor *cursor,
                                                       const char *format, ...)
{
    char text[256];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (cursor->section == NULL)
        return error_set(cursor->error, "%s: %s", cursor->file->path, text);
    if (cursor->name.data == NULL)
        return error_set(cursor->error, "%s: %s %zu: %s", cursor->file->path, cursor->section,
                         cursor->number, text);
    return error_set(cursor->error, "%s: %s %.*s: %s", cursor->file->path, cursor->section,
                     shown(cursor->name), cursor->name.data, text);
}

/* The next `size` bytes, or NULL and an error if the file ends before. */
static const unsigned char *take(struct cursor *cursor, uint64_t size, const char *what)
{
    const size_t left = cursor->file->size - cursor->offset;
    const unsigned char *data = cursor->file->data + cursor->offset;

    if (size > left) {
        fail(cursor, "truncated: %s takes %" PRIu64 " bytes at byte %zu, where %zu are left", what,
             size, cursor->offset, left);
        return NULL;
    }
    cursor->offset += (size_t)size;
    return data;
}

static bool take_u32(struct cursor *cursor, uint32_t *value, const char *what)
{
    const unsigned char *data = take(cursor, sizeof *value, what);

    if (data == NULL)
        return false;
    memcpy(value, data, sizeof *value);
    return true;
}

static bool take_u64(struct cursor *cursor, uint64_t *value, const char *what)
{
    const unsigned char *data = take(cursor, sizeof *value, what);

    if (data == NULL)
        return false;
    memcpy(value, data, sizeof *value);
    return true;
}

static bool take_string(struct cursor *cursor, struct gguf_string *string, const char *what)
{
    const unsigned char *data;
    uint64_t size;

    if (!take_u64(cursor, &size, what))
        return false;
    data = take(cursor, size, what);
    if (data == NULL)
        return false;
    *string = (struct gguf_string){(const char *)data, (size_t)size};
    return true;
}

static bool is_utf8(struct gguf_string string)
{
    const utf8proc_uint8_t *bytes = (const utf8proc_uint8_t *)string.data;
    utf8proc_int32_t character;

    for (size_t i = 0; i < string.size;) {
        const utf8proc_ssize_t length =
            utf8proc_iterate(bytes + i, (utf8proc_ssize_t)(string.size - i), &character);

        if (length <= 0)
            return false;
        i += (size_t)length;
    }
    return true;
}

/* A key or a tensor's name. */
static bool take_name(struct cursor *cursor, struct gguf_string *name, const char *what)
{
    if (!take_string(cursor, name, what))
        return false;
    if (name->size == 0 || name->size > MAX_NAME_BYTES)
        return fail(cursor, "%s has %zu bytes, expected 1 to %d", what, name->size, MAX_NAME_BYTES);
    if (!is_utf8(*name))
        return fail(cursor, "%s is not UTF-8", what);
    cursor->name = *name;
    return true;
}

static bool take_value_type(struct cursor *cursor, enum value_type *type, const char *what)
{
    uint32_t number;

    if (!take_u32(cursor, &number, what))
        return false;
    if (number >= VALUE_TYPES)
        return fail(cursor, "%s is %" PRIu32 ", expected 0 to %d", what, number, VALUE_TYPES - 1);
    *type = (enum value_type)number;
    return true;
}

static bool take_array(struct cursor *cursor, struct field *field)
{
    uint64_t count, bytes;

    if (!take_value_type(cursor, &field->element_type, "the array's element type") ||
        !take_u64(cursor, &count, "the array's length"))
        return false;
    if (field->element_type == TYPE_ARRAY)
        return fail(cursor, "is an array of arrays, which is not supported");
    field->data = cursor->file->data + cursor->offset;
    if (field->element_type == TYPE_STRING) {
        struct gguf_string string;

        if (count > (cursor->file->size - cursor->offset) / sizeof(uint64_t))
            return fail(cursor, "truncated: %" PRIu64 " strings do not fit in the %zu bytes left",
                        count, cursor->file->size - cursor->offset);
        for (uint64_t i = 0; i < count; i++) {
            if (!take_string(cursor, &string, "a string of the array"))
                return false;
        }
    } else {
        if (__builtin_mul_overflow(count, value_types[field->element_type].bytes, &bytes))
            return fail(cursor, "truncated: the array's length %" PRIu64 " is past the file's end",
                        count);
        if (take(cursor, bytes, "the array") == NULL)
            return false;
    }
    field->count = (size_t)count;
    return true;
}

static bool take_field(struct cursor *cursor, struct field *field)
{
    struct gguf_string string;

    if (!take_name(cursor, &field->key, "the key"))
        return false;
    if (!take_value_type(cursor, &field->type, "the value's type"))
        return false;
    if (field->type == TYPE_ARRAY)
        return take_array(cursor, field);
    field->count = 1;
    field->data = cursor->file->data + cursor->offset;
    if (field->type == TYPE_STRING)
        return take_string(cursor, &string, "the string");
    return take(cursor, value_types[field->type].bytes, "the value") != NULL;
}

static bool take_tensor(struct cursor *cursor, struct tensor_entry *entry)
{
    struct gguf_tensor *tensor = &entry->tensor;
    uint32_t dimension_count;
    size_t elements = 1, row_bytes;

    if (!take_name(cursor, &tensor->name, "the name"))
        return false;
    if (!take_u32(cursor, &dimension_count, "the number of dimensions"))
        return false;
    if (dimension_count < 1 || dimension_count > GGUF_MAX_DIMENSIONS)
        return fail(cursor, "has %" PRIu32 " dimensions, expected 1 to %d", dimension_count,
                    GGUF_MAX_DIMENSIONS);
    tensor->dimension_count = dimension_count;
    for (size_t i = 0; i < GGUF_MAX_DIMENSIONS; i++) {
        uint64_t dimension = 1;

        if (i < dimension_count && !take_u64(cursor, &dimension, "a dimension"))
            return false;
        if (dimension == 0)
            return fail(cursor, "dimension %zu is 0", i);
        /* Also bounds every single dimension, since none is 0. */
        if (__builtin_mul_overflow(elements, dimension, &elements))
            return fail(cursor, "dimension %zu is %" PRIu64 ": the number of elements overflows", i,
                        dimension);
        tensor->dimensions[i] = (size_t)dimension;
    }
    if (!take_u32(cursor, &tensor->gguf_type, "the element type") ||
        !take_u64(cursor, &entry->offset, "the offset"))
        return false;
    tensor->known = quant_from_gguf(tensor->gguf_type, &tensor->type);
    if (!tensor->known)
        return true;
    if (!quant_row_bytes(tensor->type, tensor->dimensions[0], &row_bytes))
        return fail(cursor, "dimension 0 is %zu, expected a multiple of %s's block of %zu",
                    tensor->dimensions[0], quant_info(tensor->type)->name,
                    quant_info(tensor->type)->block_elements);
    if (__builtin_mul_overflow(elements / tensor->dimensions[0], row_bytes, &tensor->size))
        return fail(cursor, "its size in bytes overflows");
    return true;
}

static int compare_names(struct gguf_string a, struct gguf_string b)
{
    const size_t common = a.size < b.size ? a.size : b.size;
    const int order = memcmp(a.data, b.data, common);

    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

static int compare_fields(const void *a, const void *b)
{
    return compare_names(((const struct field *)a)->key, ((const struct field *)b)->key);
}

static int compare_tensors(const void *a, const void *b)
{
    return compare_names(((const struct tensor_entry *)a)->tensor.name,
                         ((const struct tensor_entry *)b)->tensor.name);
}

static int compare_places(const void *a, const void *b)
{
    const struct tensor_entry *left = a, *right = b;

    return (left->offset > right->offset) - (left->offset < right->offset);
}

static bool read_fields(struct gguf *gguf, struct cursor *cursor, uint64_t count)
{
    const size_t left = cursor->file->size - cursor->offset;

    if (count > left / MIN_FIELD_BYTES)
        return fail(cursor,
                    "the header claims %" PRIu64 " metadata entries, more than fit in the %zu "
                    "bytes after it",
                    count, left);
    if (count == 0)
        return true;
    gguf->fields = calloc((size_t)count, sizeof *gguf->fields);
    if (gguf->fields == NULL)
        return fail(cursor, "out of memory for %" PRIu64 " metadata entries", count);
    cursor->section = "metadata entry";
    for (uint64_t i = 0; i < count; i++) {
        cursor->number = (size_t)i + 1;
        cursor->name = (struct gguf_string){NULL, 0};
        if (!take_field(cursor, &gguf->fields[i]))
            return false;
    }
    gguf->field_count = (size_t)count;
    qsort(gguf->fields, gguf->field_count, sizeof *gguf->fields, compare_fields);
    for (size_t i = 1; i < gguf->field_count; i++) {
        if (compare_fields(&gguf->fields[i - 1], &gguf->fields[i]) == 0) {
            cursor->name = gguf->fields[i].key;
            return fail(cursor, "appears twice");
        }
    }
    cursor->section = NULL;
    return true;
}

static bool read_tensors(struct gguf *gguf, struct cursor *cursor, uint64_t count)
{
    const size_t left = cursor->file->size - cursor->offset;

    if (count > left / MIN_TENSOR_BYTES)
        return fail(cursor,
                    "the header claims %" PRIu64 " tensors, more than fit in the %zu bytes after "
                    "the metadata",
                    count, left);
    if (count == 0)
        return true;
    gguf->tensors = calloc((size_t)count, sizeof *gguf->tensors);
    if (gguf->tensors == NULL)
        return fail(cursor, "out of memory for %" PRIu64 " tensors", count);
    cursor->section = "tensor";
    for (uint64_t i = 0; i < count; i++) {
        cursor->number = (size_t)i + 1;
        cursor->name = (struct gguf_string){NULL, 0};
        if (!take_tensor(cursor, &gguf->tensors[i]))
            return false;
    }
    gguf->tensor_count = (size_t)count;
    cursor->section = NULL;
    return true;
}

static bool read_alignment(const struct gguf *gguf, size_t *alignment, struct error *error)
{
    uint64_t value = DEFAULT_ALIGNMENT;

    if (gguf_has(gguf, "general.alignment") &&
        !gguf_get_uint(gguf, "general.alignment", &value, error))
        return false;
    if (value < MIN_ALIGNMENT || value > UINT32_MAX || (value & (value - 1)) != 0)
        return error_set(error,
                         "%s: general.alignment: is %" PRIu64 ", expected a power of two of at "
                         "least %d",
                         gguf->file.path, value, MIN_ALIGNMENT);
    *alignment = (size_t)value;
    return true;
}

/* By name, of which there must not be two. */
static bool sort_tensors(struct gguf *gguf, struct error *error)
{
    if (gguf->tensor_count == 0)
        return true;
    qsort(gguf->tensors, gguf->tensor_count, sizeof *gguf->tensors, compare_tensors);
    for (size_t i = 1; i < gguf->tensor_count; i++) {
        const struct gguf_tensor *tensor = &gguf->tensors[i].tensor;

        if (compare_tensors(&gguf->tensors[i - 1], &gguf->tensors[i]) == 0)
            return error_set(error, "%s: tensor %.*s: appears twice", tensor->file->path,
                             shown(tensor->name), tensor->name.data);
    }
    return true;
}

/* Turns the tensors' offsets into pointers and sorts the tensors by name. The data section begins
 * at the first aligned byte after the last tensor entry. */
static bool place_tensors(struct gguf *gguf, struct cursor *cursor, size_t alignment)
{
    const size_t file_size = gguf->file.size;
    size_t start, data_size, end = 0;

    if (gguf->tensor_count == 0)
        return true;
    if (__builtin_add_overflow(cursor->offset, alignment - 1, &start))
        start = SIZE_MAX;
    start &= ~(alignment - 1);
    if (start > file_size)
        return fail(cursor,
                    "truncated: the tensor data begin at byte %zu and the file has %zu bytes",
                    start, file_size);
    data_size = file_size - start;
    cursor->section = "tensor";
    qsort(gguf->tensors, gguf->tensor_count, sizeof *gguf->tensors, compare_places);
    for (size_t i = 0; i < gguf->tensor_count; i++) {
        struct tensor_entry *entry = &gguf->tensors[i];

        cursor->name = entry->tensor.name;
        entry->tensor.file = &gguf->file;
        if (entry->offset % alignment != 0)
            return fail(cursor, "the offset %" PRIu64 " is not a multiple of the alignment, %zu",
                        entry->offset, alignment);
        if (entry->offset > data_size || entry->tensor.size > data_size - (size_t)entry->offset)
            return fail(cursor,
                        "%zu bytes at offset %" PRIu64 " do not fit in the %zu bytes of tensor "
                        "data (truncated file?)",
                        entry->tensor.size, entry->offset, data_size);
        if (!entry->tensor.known)
            continue;
        if (entry->offset < end)
            return fail(cursor, "the offset %" PRIu64 " lies inside another tensor", entry->offset);
        end = (size_t)entry->offset + entry->tensor.size;
        entry->tensor.data = gguf->file.data + start + (size_t)entry->offset;
    }
    return sort_tensors(gguf, cursor->error);
}

static bool read_file(struct gguf *gguf, struct error *error)
{
    struct cursor cursor = {.file = &gguf->file, .error = error};
    const unsigned char *magic;
    uint64_t tensor_count, field_count;
    uint32_t version;
    size_t alignment = 0;

    magic = take(&cursor, 4, "the magic");
    if (magic == NULL)
        return false;
    if (memcmp(magic, "GGUF", 4) != 0)
        return fail(&cursor, "is not a GGUF file: the magic is %02x %02x %02x %02x, not \"GGUF\"",
                    magic[0], magic[1], magic[2], magic[3]);
    if (!take_u32(&cursor, &version, "the version"))
        return false;
    if (version != 0 && (version & 0xffff) == 0)
        return fail(&cursor, "is a big-endian GGUF file, only little-endian ones are read");
    if (version != 2 && version != 3)
        return fail(&cursor, "the GGUF version is %" PRIu32 ", expected 2 or 3", version);
    return take_u64(&cursor, &tensor_count, "the number of tensors") &&
           take_u64(&cursor, &field_count, "the number of metadata entries") &&
           read_fields(gguf, &cursor, field_count) && read_alignment(gguf, &alignment, error) &&
           read_tensors(gguf, &cursor, tensor_count) && place_tensors(gguf, &cursor, alignment);
}

static bool open_file(const char *path, struct gguf **gguf, struct error *error)
{
    struct gguf *opened = calloc(1, sizeof *opened);

    *gguf = NULL;
    if (opened == NULL)
        return error_set(error, "%s: out of memory", path);
    if (!file_map_open(path, &opened->file, error) || !read_file(opened, error)) {
        gguf_close(opened);
        return false;
    }
    *gguf = opened;
    return true;
}

/* How the name of part `number`, from 1, ends. */
#define PART_SUFFIX "-%05zu-of-%05zu.gguf"
#define MAX_PARTS   99999

/* What a part says about itself is what its name says. */
static bool check_part(const struct gguf *part, size_t number, size_t count, struct error *error)
{
    uint64_t value;

    if (!gguf_get_uint(part, "split.count", &value, error))
        return false;
    if (value != count)
        return error_set(error, "%s: split.count: is %" PRIu64 ", but the first part has %zu",
                         part->file.path, value, count);
    if (!gguf_get_uint(part, "split.no", &value, error))
        return false;
    if (value != number - 1)
        return error_set(error, "%s: split.no: is %" PRIu64 ", expected %zu for this part of %zu%s",
                         part->file.path, value, number - 1, count,
                         number == 1 ? "; a split model is opened by its first part" : "");
    return true;
}

static bool check_total(const struct gguf *gguf, struct error *error)
{
    uint64_t total;

    if (!gguf_get_uint(gguf, "split.tensors.count", &total, error))
        return false;
    if (total != gguf->tensor_count)
        return error_set(error, "%s: split.tensors.count: is %" PRIu64 ", but the parts have %zu",
                         gguf->file.path, total, gguf->tensor_count);
    return true;
}

/* Opens the part and appends its tensors. */
static bool add_part(struct gguf *gguf, const char *path, size_t number, size_t count,
                     struct error *error)
{
    struct gguf **parts = realloc(gguf->parts, (gguf->part_count + 1) * sizeof(struct gguf *));
    struct tensor_entry *tensors;
    struct gguf *part;

    if (parts == NULL)
        return error_set(error, "%s: out of memory", path);
    gguf->parts = parts;
    if (!open_file(path, &part, error))
        return false;
    parts[gguf->part_count++] = part;
    if (!check_part(part, number, count, error))
        return false;
    if (part->tensor_count == 0)
        return true;
    tensors =
        realloc(gguf->tensors, (gguf->tensor_count + part->tensor_count) * sizeof *gguf->tensors);
    if (tensors == NULL)
        return error_set(error, "%s: out of memory", path);
    memcpy(tensors + gguf->tensor_count, part->tensors, part->tensor_count * sizeof *tensors);
    gguf->tensors = tensors;
    gguf->tensor_count += part->tensor_count;
    /* All that is needed of the part from here on is its mapping. */
    free(part->tensors);
    part->tensors = NULL;
    part->tensor_count = 0;
    return true;
}

/* Opens the other parts, whose names differ from the first one's in their number. */
static bool add_parts(struct gguf *gguf, size_t count, struct error *error)
{
    const char *path = gguf->file.path;
    const size_t length = strlen(path);
    char suffix[64];
    char *name;
    bool done = false;

    if (!check_part(gguf, 1, count, error))
        return false;
    snprintf(suffix, sizeof suffix, PART_SUFFIX, (size_t)1, count);
    if (length < strlen(suffix) || strcmp(path + length - strlen(suffix), suffix) != 0)
        return error_set(error, "%s: split.count: is %zu, but the name does not end in %s", path,
                         count, suffix);
    name = strdup(path);
    if (name == NULL)
        return error_set(error, "%s: out of memory", path);
    for (size_t number = 2; number <= count; number++) {
        snprintf(name + length - strlen(suffix), strlen(suffix) + 1, PART_SUFFIX, number, count);
        if (!add_part(gguf, name, number, count, error))
            goto out;
    }
    done = sort_tensors(gguf, error) && check_total(gguf, error);
out:
    free(name);
    return done;
}

bool gguf_open(const char *path, struct gguf **gguf, struct error *error)
{
    struct gguf *opened;
    uint64_t count = 1;

    *gguf = NULL;
    if (!open_file(path, &opened, error))
        return false;
    if (gguf_has(opened, "split.count") && !gguf_get_uint(opened, "split.count", &count, error))
        goto fail;
    if (count > MAX_PARTS) {
        error_set(error, "%s: split.count: is %" PRIu64 ", expected at most %d", path, count,
                  MAX_PARTS);
        goto fail;
    }
    if (count > 1 && !add_parts(opened, (size_t)count, error))
        goto fail;
    *gguf = opened;
    return true;
fail:
    gguf_close(opened);
    return false;
}

void gguf_close(struct gguf *gguf)
{
    if (gguf == NULL)
        return;
    for (size_t i = 0; i < gguf->part_count; i++)
        gguf_close(gguf->parts[i]);
    free(gguf->parts);
    file_map_close(&gguf->file);
    free(gguf->fields);
    free(gguf->tensors);
    free(gguf);
}

const char *gguf_path(const struct gguf *gguf)
{
    return gguf->file.path;
}

void gguf_prefetch(const struct gguf *gguf)
{
    file_map_prefetch(&gguf->file);
    for (size_t i = 0; i < gguf->part_count; i++)
        file_map_prefetch(&gguf->parts[i]->file);
}

static const struct field *find_field(const struct gguf *gguf, const char *key)
{
    const struct field wanted = {.key = {key, strlen(key)}};

    if (gguf->field_count == 0)
        return NULL;
    return bsearch(&wanted, gguf->fields, gguf->field_count, sizeof *gguf->fields, compare_fields);
}

bool gguf_has(const struct gguf *gguf, const char *key)
{
    return find_field(gguf, key) != NULL;
}

static bool is_integer(enum value_type type)
{
    return type != TYPE_FLOAT32 && type != TYPE_FLOAT64 && type != TYPE_BOOL &&
           type != TYPE_STRING && type != TYPE_ARRAY;
}

static bool wrong_type(const struct gguf *gguf, const struct field *field, const char *expected,
                       struct error *error)
{
    const bool array = field->type == TYPE_ARRAY;

    return error_set(error, "%s: %.*s: is %s%s, expected %s", gguf->file.path, shown(field->key),
                     field->key.data, array ? "an array of " : "",
                     value_types[array ? field->element_type : field->type].name, expected);
}

static const struct field *require_field(const struct gguf *gguf, const char *key,
                                         struct error *error)
{
    const struct field *field = find_field(gguf, key);

    if (field == NULL)
        error_set(error, "%s: %s: is missing from the metadata", gguf->file.path, key);
    return field;
}

/* The integer at `data`; false if it does not fit. */
static bool integer_at(enum value_type type, const unsigned char *data, int64_t *value)
{
    const size_t bytes = value_types[type].bytes;
    const bool is_signed =
        type == TYPE_INT8 || type == TYPE_INT16 || type == TYPE_INT32 || type == TYPE_INT64;
    uint64_t bits = 0;

    memcpy(&bits, data, bytes);
    if (is_signed && bytes < sizeof bits && (data[bytes - 1] & 0x80) != 0)
        bits |= ~UINT64_C(0) << (8 * bytes);
    memcpy(value, &bits, sizeof *value);
    return is_signed || *value >= 0;
}

bool gguf_get_uint(const struct gguf *gguf, const char *key, uint64_t *value, struct error *error)
{
    const struct field *field = require_field(gguf, key, error);
    int64_t integer;

    if (field == NULL)
        return false;
    if (!is_integer(field->type))
        return wrong_type(gguf, field, "an integer", error);
    if (!integer_at(field->type, field->data, &integer))
        return error_set(error, "%s: %s: is 2^63 or more", gguf->file.path, key);
    if (integer < 0)
        return error_set(error, "%s: %s: is %" PRId64 ", expected 0 or more", gguf->file.path, key,
                         integer);
    *value = (uint64_t)integer;
    return true;
}

bool gguf_get_float(const struct gguf *gguf, const char *key, double *value, struct error *error)
{
    const struct field *field = require_field(gguf, key, error);
    float single;

    if (field == NULL)
        return false;
    if (field->type == TYPE_FLOAT32) {
        memcpy(&single, field->data, sizeof single);
        *value = single;
    } else if (field->type == TYPE_FLOAT64) {
        memcpy(value, field->data, sizeof *value);
    } else {
        return wrong_type(gguf, field, "FLOAT32 or FLOAT64", error);
    }
    if (!isfinite(*value))
        return error_set(error, "%s: %s: is not finite", gguf->file.path, key);
    return true;
}

bool gguf_get_bool(const struct gguf *gguf, const char *key, bool *value, struct error *error)
{
    const struct field *field = require_field(gguf, key, error);

    if (field == NULL)
        return false;
    if (field->type != TYPE_BOOL)
        return wrong_type(gguf, field, "BOOL", error);
    if (*field->data > 1)
        return error_set(error, "%s: %s: is %u, expected 0 or 1", gguf->file.path, key,
                         *field->data);
    *value = *field->data != 0;
    return true;
}

/* Reads a string whose bounds were checked when the file was opened; returns what follows it. */
static const unsigned char *string_at(const unsigned char *data, struct gguf_string *string)
{
    uint64_t size;

    memcpy(&size, data, sizeof size);
    *string = (struct gguf_string){(const char *)data + sizeof size, (size_t)size};
    return data + sizeof size + (size_t)size;
}

bool gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *value,
                     struct error *error)
{
    const struct field *field = require_field(gguf, key, error);

    if (field == NULL)
        return false;
    if (field->type != TYPE_STRING)
        return wrong_type(gguf, field, "STRING", error);
    string_at(field->data, value);
    return true;
}

/* Room for an array's elements, at least one byte. The count is at most the file's length. */
static void *allocate_array(const struct gguf *gguf, const struct field *field, size_t size,
                            struct error *error)
{
    void *values = calloc(field->count > 0 ? field->count : 1, size);

    if (values == NULL)
        error_set(error, "%s: %.*s: out of memory for %zu elements", gguf->file.path,
                  shown(field->key), field->key.data, field->count);
    return values;
}

bool gguf_get_strings(const struct gguf *gguf, const char *key, struct gguf_string **values,
                      size_t *count, struct error *error)
{
    const struct field *field = require_field(gguf, key, error);
    const unsigned char *data;

    *values = NULL;
    if (field == NULL)
        return false;
    if (field->type != TYPE_ARRAY || field->element_type != TYPE_STRING)
        return wrong_type(gguf, field, "an array of STRING", error);
    *values = allocate_array(gguf, field, sizeof **values, error);
    if (*values == NULL)
        return false;
    data = field->data;
    for (size_t i = 0; i < field->count; i++)
        data = string_at(data, &(*values)[i]);
    *count = field->count;
    return true;
}

bool gguf_get_ints(const struct gguf *gguf, const char *key, int64_t **values, size_t *count,
                   struct error *error)
{
    const struct field *field = require_field(gguf, key, error);
    int64_t *integers;
    size_t bytes;

    *values = NULL;
    if (field == NULL)
        return false;
    if (field->type != TYPE_ARRAY || !is_integer(field->element_type))
        return wrong_type(gguf, field, "an array of integers", error);
    integers = allocate_array(gguf, field, sizeof *integers, error);
    if (integers == NULL)
        return false;
    bytes = value_types[field->element_type].bytes;
    for (size_t i = 0; i < field->count; i++) {
        if (!integer_at(field->element_type, field->data + i * bytes, &integers[i])) {
            free(integers);
            return error_set(error, "%s: %s: element %zu is 2^63 or more", gguf->file.path, key, i);
        }
    }
    *values = integers;
    *count = field->count;
    return true;
}

bool gguf_get_floats(const struct gguf *gguf, const char *key, float **values, size_t *count,
                     struct error *error)
{
    const struct field *field = require_field(gguf, key, error);

    *values = NULL;
    if (field == NULL)
        return false;
    if (field->type != TYPE_ARRAY || field->element_type != TYPE_FLOAT32)
        return wrong_type(gguf, field, "an array of FLOAT32", error);
    *values = allocate_array(gguf, field, sizeof **values, error);
    if (*values == NULL)
        return false;
    if (field->count > 0)
        memcpy(*values, field->data, field->count * sizeof **values);
    *count = field->count;
    return true;
}

size_t gguf_tensor_count(const struct gguf *gguf)
{
    return gguf->tensor_count;
}

const struct gguf_tensor *gguf_tensor(const struct gguf *gguf, const char *name)
{
    const struct tensor_entry wanted = {.tensor.name = {name, strlen(name)}};
    const struct tensor_entry *found;

    if (gguf->tensor_count == 0)
        return NULL;
    found =
        bsearch(&wanted, gguf->tensors, gguf->tensor_count, sizeof *gguf->tensors, compare_tensors);
    return found != NULL ? &found->tensor : NULL;
}
