/* SPDX-License-Identifier: MIT */
/* JSON texts of model files: parsed by jansson, within bounds. */
#ifndef PUZZLEKV_TOOLS_RUNNER_JSON_TEXT_H
#define PUZZLEKV_TOOLS_RUNNER_JSON_TEXT_H

#include <stddef.h>

#include <jansson.h>

#include "../error.h"

/* Parses a text whose outermost value is an object without duplicate keys. What it takes in memory
 * is at most about 30 times its size: a text that is mostly brackets, which would take more, is
 * refused. NULL after a failure, which `error` tells as "PATH: WHAT...", where `what` names the
 * text and may be empty. */
json_t *json_text_parse(const void *text, size_t size, const char *path, const char *what,
                        struct error *error);

/* The same for a whole file of at most `most` bytes; its size goes to *size unless that is NULL. */
json_t *json_text_read(const char *path, size_t most, size_t *size, struct error *error);

#endif
