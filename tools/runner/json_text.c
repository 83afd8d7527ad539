/* SPDX-License-Identifier: MIT */
/* JSON texts of model files: parsed by jansson, within bounds. */
#include "json_text.h"

#include "file_map.h"

/* An array or object takes jansson some 200 bytes, even if it is two characters. What model files
 * say takes more characters for each than these; the second number is for tiny texts. */
#define BYTES_PER_BRACKET 16
#define FREE_BRACKETS     64

bool json_text_is_bounded(const char *text, size_t size, size_t *brackets)
{
    size_t count = 0;
    bool quoted = false;

    for (size_t i = 0; i < size; i++) {
        if (quoted && text[i] == '\\')
            i++;
        else if (text[i] == '"')
            quoted = !quoted;
        else if (!quoted && (text[i] == '[' || text[i] == '{'))
            count++;
    }
    *brackets = count;
    return count <= size / BYTES_PER_BRACKET + FREE_BRACKETS;
}

json_t *json_text_parse(const void *text, size_t size, const char *path, const char *what,
                        struct error *error)
{
    json_error_t parse_error;
    size_t brackets;
    json_t *root;

    if (!json_text_is_bounded(text, size, &brackets)) {
        error_set(error,
                  "%s: %s%zu arrays and objects in %zu bytes are not what a model's file has", path,
                  what, brackets, size);
        return NULL;
    }
    root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &parse_error);
    if (root == NULL) {
        error_set(error, "%s: %sline %d: is not valid JSON: %s", path, what, parse_error.line,
                  parse_error.text);
    } else if (!json_is_object(root)) {
        error_set(error, "%s: %sis not a JSON object", path, what);
        json_decref(root);
        root = NULL;
    }
    return root;
}

json_t *json_text_read(const char *path, size_t most, size_t *size, struct error *error)
{
    struct file_map map;
    json_t *root = NULL;

    if (!file_map_open(path, &map, error))
        return NULL;
    if (map.size > most)
        error_set(error, "%s: is %zu bytes, expected at most %zu", path, map.size, most);
    else
        root = json_text_parse(map.data, map.size, path, "", error);
    if (size != NULL)
        *size = map.size;
    file_map_close(&map);
    return root;
}
