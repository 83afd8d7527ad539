/* SPDX-License-Identifier: MIT */
/* The text of an answer, which grows, ends before a stop text and is printed as it comes. */
#ifndef PUZZLEKV_TOOLS_ANSWER_H
#define PUZZLEKV_TOOLS_ANSWER_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

/* All zero but the first three fields, which the caller sets, is an empty answer. */
struct answer {
    const char *const *stops; /* [stop_count], none of them empty */
    size_t stop_count;
    bool silent; /* prints nothing */

    char *text; /* [size], without the stop text that ended it */
    size_t size, capacity;
    size_t printed; /* bytes that are on standard output already */
};

/* Appends a piece of whole characters and prints what cannot be part of a stop text; *stopped tells
 * whether a stop text is there now, and the answer ends before it. */
bool answer_extend(struct answer *answer, const char *piece, size_t length, bool *stopped,
                   struct error *error);

/* Prints the rest, with a newline at its end. */
bool answer_finish(struct answer *answer, struct error *error);

/* Empties it for the next one. */
void answer_clear(struct answer *answer);

void answer_free(struct answer *answer);

#endif
