/* SPDX-License-Identifier: MIT */
/* The text of the last failure of a cache. */
#ifndef PUZZLEKV_LIB_MESSAGE_H
#define PUZZLEKV_LIB_MESSAGE_H

#include "puzzlekv.h"

struct message {
    char text[PKV_MESSAGE_BYTES];
};

/* Sets the text and returns `status`, so that a function can end with `return fail(...)`. */
pkv_status fail(struct message *message, pkv_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
