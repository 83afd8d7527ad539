/* SPDX-License-Identifier: MIT */
/* The text of an answer, which grows, ends before a stop text and is printed as it comes. */
#define _GNU_SOURCE /* memmem */
#include "answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"

/* How many bytes at the end may be the beginning of a stop text, and so must wait. */
static size_t held_back(const struct answer *answer)
{
    size_t held = 0;

    for (size_t i = 0; i < answer->stop_count; i++) {
        size_t length = strlen(answer->stops[i]) - 1;

        if (length > answer->size)
            length = answer->size;
        while (length > held &&
               memcmp(answer->text + answer->size - length, answer->stops[i], length) != 0)
            length--;
        if (length > held)
            held = length;
    }
    return held;
}

static bool print_to(struct answer *answer, size_t size, struct error *error)
{
    if (answer->silent || size <= answer->printed)
        return true;
    fwrite(answer->text + answer->printed, 1, size - answer->printed, stdout);
    answer->printed = size;
    return output_flush(error);
}

bool answer_extend(struct answer *answer, const char *piece, size_t length, bool *stopped,
                   struct error *error)
{
    size_t old = answer->size;
    const char *first = NULL;

    *stopped = false;
    if (length == 0)
        return true;
    if (answer->capacity - answer->size < length) {
        size_t capacity = 2 * (answer->size + length);
        char *text = realloc(answer->text, capacity);

        if (text == NULL)
            return error_set(error, "out of memory for the answer");
        answer->text = text;
        answer->capacity = capacity;
    }
    memcpy(answer->text + answer->size, piece, length);
    answer->size += length;
    for (size_t i = 0; i < answer->stop_count; i++) {
        size_t stop_length = strlen(answer->stops[i]);
        size_t from = old >= stop_length ? old - stop_length + 1 : 0;
        const char *found =
            memmem(answer->text + from, answer->size - from, answer->stops[i], stop_length);

        if (found != NULL && (first == NULL || found < first))
            first = found;
    }
    if (first != NULL) {
        answer->size = (size_t)(first - answer->text);
        *stopped = true;
    }
    return print_to(answer, *stopped ? answer->size : answer->size - held_back(answer), error);
}

bool answer_finish(struct answer *answer, struct error *error)
{
    if (!print_to(answer, answer->size, error))
        return false;
    if (!answer->silent && answer->size > 0 && answer->text[answer->size - 1] != '\n')
        putchar('\n');
    return output_flush(error);
}

void answer_clear(struct answer *answer)
{
    answer->size = answer->printed = 0;
}

void answer_free(struct answer *answer)
{
    free(answer->text);
}
