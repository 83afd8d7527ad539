/* SPDX-License-Identifier: MIT */
/* Changes JSON texts so that they stay JSON: bytes changed blindly hardly ever get past a parser.
 */
#include "mutate.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

/* Where a value is. */
struct place {
    json_t *parent;
    const char *key; /* NULL: of an array */
    size_t index;
    json_t *value;
};

#define MAX_PLACES 4096

struct mutation {
    struct place places[MAX_PLACES];
    size_t count;
    uint64_t random;
};

static size_t below(struct mutation *mutation, size_t limit)
{
    mutation->random ^= mutation->random << 13;
    mutation->random ^= mutation->random >> 7;
    mutation->random ^= mutation->random << 17;
    return (size_t)(mutation->random >> 20) % limit;
}

static void note(struct mutation *mutation, struct place place)
{
    if (mutation->count < MAX_PLACES)
        mutation->places[mutation->count++] = place;
}

/* All values but the outermost, breadth first. */
static void find_places(struct mutation *mutation, json_t *root)
{
    json_t *parent = root, *value;
    const char *key;
    size_t next = 0, i;

    for (;;) {
        if (json_is_object(parent)) {
            json_object_foreach(parent, key, value)
                note(mutation, (struct place){parent, key, 0, value});
        } else {
            json_array_foreach(parent, i, value)
                note(mutation, (struct place){parent, NULL, i, value});
        }
        if (next == mutation->count)
            return;
        parent = mutation->places[next++].value;
    }
}

static json_t *hostile_value(struct mutation *mutation)
{
    static const char *const values[] = {"null",
                                         "true",
                                         "false",
                                         "0",
                                         "1",
                                         "-1",
                                         "2",
                                         "3",
                                         "23",
                                         "24",
                                         "255",
                                         "65536",
                                         "2147483647",
                                         "2147483648",
                                         "4294967295",
                                         "4294967296",
                                         "9223372036854775807",
                                         "-9223372036854775808",
                                         "0.0",
                                         "0.5",
                                         "-0.0",
                                         "1e-320",
                                         "1e-30",
                                         "1e30",
                                         "1e308",
                                         "\"\"",
                                         "\" \"",
                                         "\"a\"",
                                         "[]",
                                         "{}",
                                         "[0]",
                                         "[1,1]",
                                         "[\"a\",\"l\"]",
                                         "[[]]",
                                         "{\"type\":\"Sequence\"}"};

    return json_loads(values[below(mutation, sizeof values / sizeof values[0])], JSON_DECODE_ANY,
                      NULL);
}

/* Strings and integers change a little, other values become others. */
static json_t *changed_value(struct mutation *mutation, const json_t *value)
{
    uint8_t text[256];
    size_t size = json_string_length(value);

    if (json_is_integer(value) && below(mutation, 2) == 0)
        return json_integer(
            (json_int_t)((uint64_t)json_integer_value(value) + (uint64_t)below(mutation, 17) - 8));
    if (json_is_real(value) && below(mutation, 2) == 0)
        return json_real(json_real_value(value) * (double)below(mutation, 100) / 10);
    if (json_is_string(value) && size <= sizeof text / 2 && below(mutation, 2) == 0) {
        memcpy(text, json_string_value(value), size);
        size = LLVMFuzzerMutate(text, size, sizeof text);
        return json_stringn((const char *)text, size);
    }
    if (below(mutation, 2) == 0)
        return json_deep_copy(mutation->places[below(mutation, mutation->count)].value);
    return hostile_value(mutation);
}

static void change(struct mutation *mutation)
{
    const struct place place = mutation->places[below(mutation, mutation->count)];
    const struct place other = mutation->places[below(mutation, mutation->count)];
    json_t *value;

    switch (below(mutation, 6)) {
    case 0:
        if (place.key != NULL)
            json_object_del(place.parent, place.key);
        else
            json_array_remove(place.parent, place.index);
        break;
    case 1: /* under another's key, or once more */
        value = json_deep_copy(place.value);
        if (place.key == NULL)
            json_array_insert_new(place.parent, place.index, value);
        else if (other.key != NULL)
            json_object_set_new(place.parent, other.key, value);
        else
            json_decref(value);
        break;
    default:
        value = changed_value(mutation, place.value);
        if (value == NULL)
            break;
        if (place.key != NULL)
            json_object_set_new(place.parent, place.key, value);
        else
            json_array_set_new(place.parent, place.index, value);
    }
}

size_t mutate_json(uint8_t *text, size_t size, size_t most, unsigned seed)
{
    struct mutation *mutation;
    json_t *root = NULL;
    size_t written = 0;

    if (seed % 8 != 0)
        root = json_loadb((const char *)text, size, 0, NULL);
    if (root == NULL)
        return LLVMFuzzerMutate(text, size, most);
    mutation = malloc(sizeof *mutation);
    fuzz_require(mutation != NULL);
    mutation->random = UINT64_C(0x9e3779b97f4a7c15) ^ seed;
    for (size_t rounds = 1 + below(mutation, 3); rounds > 0; rounds--) {
        mutation->count = 0;
        find_places(mutation, root);
        if (mutation->count > 0)
            change(mutation);
    }
    written = json_dumpb(root, (char *)text, most, JSON_COMPACT);
    json_decref(root);
    free(mutation);
    /* A text that is too long was cut off. */
    return written > most ? LLVMFuzzerMutate(text, most, most)
           : written == 0 ? LLVMFuzzerMutate(text, size, most)
                          : written;
}
