/* SPDX-License-Identifier: MIT */
/* How well an answer does: which references it contains, and what a mean over rows is worth. */
#include "task_score.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

bool task_metric_parse(const char *text, enum task_metric *metric, struct error *error)
{
    if (strcmp(text, "all") == 0)
        *metric = TASK_METRIC_ALL;
    else if (strcmp(text, "part") == 0)
        *metric = TASK_METRIC_PART;
    else
        return error_set(error, "--metric: \"%.40s\" is not one of all, part", text);
    return true;
}

const char *task_metric_name(enum task_metric metric)
{
    return metric == TASK_METRIC_ALL ? "all" : "part";
}

/* A terminated copy in lower case; NULL without memory. */
static char *lower(const char *text, size_t length)
{
    /* No character of n bytes becomes one of more than 4. */
    char *copy = malloc(4 * length + 1);
    size_t filled = 0;

    if (copy == NULL)
        return NULL;
    for (size_t at = 0; at < length;) {
        utf8proc_int32_t character;
        utf8proc_ssize_t used = utf8proc_iterate((const utf8proc_uint8_t *)text + at,
                                                 (utf8proc_ssize_t)(length - at), &character);

        if (used <= 0) {
            copy[filled++] = text[at++];
            continue;
        }
        filled += (size_t)utf8proc_encode_char(utf8proc_tolower(character),
                                               (utf8proc_uint8_t *)copy + filled);
        at += (size_t)used;
    }
    copy[filled] = '\0';
    return copy;
}

bool task_references_open(const json_t *outputs, struct task_references *references,
                          struct error *error)
{
    size_t count = json_array_size(outputs);

    *references = (struct task_references){calloc(count > 0 ? count : 1, sizeof(char *)), count};
    if (count == 0) {
        error_set(error, "\"outputs\" is empty");
        goto fail;
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *output = json_array_get(outputs, i);

        if (!json_is_string(output) || json_string_length(output) == 0) {
            error_set(error, "\"outputs\": element %zu is %s", i,
                      json_is_string(output) ? "empty" : "not a string");
            goto fail;
        }
        if (references->texts == NULL ||
            (references->texts[i] = lower(json_string_value(output), json_string_length(output))) ==
                NULL) {
            error_set(error, "out of memory for the references");
            goto fail;
        }
    }
    return true;
fail:
    task_references_close(references);
    return false;
}

void task_references_close(struct task_references *references)
{
    for (size_t i = 0; references->texts != NULL && i < references->count; i++)
        free(references->texts[i]);
    free(references->texts);
    *references = (struct task_references){NULL, 0};
}

bool task_score(const struct task_references *references, enum task_metric metric,
                const char *answer, size_t length, double *score, struct error *error)
{
    char *text = lower(answer, length);
    size_t found = 0;

    if (text == NULL)
        return error_set(error, "out of memory for an answer");
    for (size_t i = 0; i < references->count; i++)
        found += strstr(text, references->texts[i]) != NULL;
    free(text);
    if (metric == TASK_METRIC_PART)
        *score = found > 0 ? 1 : 0;
    else
        *score = (double)found / (double)references->count;
    return true;
}

void task_interval(double mean, size_t count, double *low, double *high)
{
    const double z = 1.959963984540054, n = (double)count;
    const double scale = 1 / (1 + z * z / n);
    const double center = scale * (mean + z * z / (2 * n));
    const double half = scale * z * sqrt(mean * (1 - mean) / n + z * z / (4 * n * n));

    /* At the ends it is exact, whatever rounding says. */
    *low = mean > 0 ? fmax(0, center - half) : 0;
    *high = mean < 1 ? fmin(1, center + half) : 1;
}
