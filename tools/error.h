/* SPDX-License-Identifier: MIT */
/* The one way in which a tool's function says what went wrong. */
#ifndef PUZZLEKV_TOOLS_ERROR_H
#define PUZZLEKV_TOOLS_ERROR_H

#include <stdbool.h>

/* One line without a newline: "WHAT: WHY", e.g. "model.gguf: general.alignment: 0 is not a power
 * of two". What a terminal might obey and not show has been replaced: see error_clean. The longest
 * path that the system takes leaves room for the reason behind it. */
struct error {
    char text[4096 + 512];
};

/* Fills `error` (which may be NULL) and returns false, so that a function can end with
 * `return error_set(error, ...)`. */
bool error_set(struct error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts '?' for each control character (C0, DEL and C1) of a text, and for each byte that is not of
 * valid UTF-8. Safe in a signal handler. */
void error_clean(char *text);

#endif
