/* SPDX-License-Identifier: MIT */
/* The text of the last failure of a cache. */
#include "message.h"

#include <stdarg.h>
#include <stdio.h>

pkv_status fail(struct message *message, pkv_status status, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message->text, sizeof message->text, format, arguments);
    va_end(arguments);
    return status;
}
