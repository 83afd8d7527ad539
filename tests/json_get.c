/* SPDX-License-Identifier: MIT */
/* Reads one JSON document, for the shell tests:
 *     json_get FILE            checks that it is valid and alone in the file
 *     json_get FILE PATH       prints the value at PATH, e.g. results.0.kv; strings without quotes
 *     json_get --keys FILE     prints the keys of the outermost object, one a line
 */
#include <jansson.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const json_t *find(const json_t *value, char *path)
{
    for (char *key = strtok(path, "."); key != NULL; key = strtok(NULL, ".")) {
        if (json_is_array(value))
            value = json_array_get(value, strtoul(key, NULL, 10));
        else
            value = json_object_get(value, key);
    }
    return value;
}

int main(int argc, char **argv)
{
    int keys = argc == 3 && strcmp(argv[1], "--keys") == 0;
    const char *file = argv[keys ? 2 : 1];
    const json_t *value;
    const char *key;
    json_t *document, *member;
    json_error_t error;

    if (argc < 2 || argc > 3) {
        fputs("usage: json_get FILE [PATH] | --keys FILE\n", stderr);
        return 2;
    }
    document = json_load_file(file, 0, &error);
    if (document == NULL) {
        fprintf(stderr, "json_get: %s: line %d: %s\n", file, error.line, error.text);
        return 1;
    }
    if (keys) {
        json_object_foreach(document, key, member) puts(key);
    } else if (argc == 3) {
        value = find(document, argv[2]);
        if (value == NULL) {
            fprintf(stderr, "json_get: %s: nothing at the path\n", file);
            json_decref(document);
            return 1;
        }
        if (json_is_string(value)) {
            fwrite(json_string_value(value), 1, json_string_length(value), stdout);
            putchar('\n');
        } else {
            json_dumpf(value, stdout, JSON_ENCODE_ANY | JSON_COMPACT);
            putchar('\n');
        }
    }
    json_decref(document);
    return 0;
}
