/* SPDX-License-Identifier: MIT */
/* The one way in which a tool's function says what went wrong. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "runner/pretokenizer.h"

bool error_set(struct error *error, const char *format, ...)
{
    va_list arguments;

    if (error == NULL)
        return false;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    error_clean(error->text);
    return false;
}

void error_clean(char *text)
{
    const size_t length = strlen(text);
    size_t cleaned = 0, size;

    for (size_t at = 0; at < length; at += size) {
        const char *character = text + at;
        const int sequence = utf8_sequence(character, length - at);
        const unsigned char first = (unsigned char)character[0];
        const bool control =
            first < 0x20 || first == 0x7f || (first == 0xc2 && (unsigned char)character[1] < 0xa0);

        size = sequence > 0 ? (size_t)sequence : 1;
        if (sequence <= 0 || control) {
            text[cleaned++] = '?';
        } else {
            memmove(text + cleaned, character, size);
            cleaned += size;
        }
    }
    text[cleaned] = '\0';
}
