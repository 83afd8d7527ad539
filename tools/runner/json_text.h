/* SPDX-License-Identifier: MIT */
/* JSON texts of model files: parsed by jansson, within bounds. */
#ifndef PUZZLEKV_TOOLS_RUNNER_JSON_TEXT_H
#define PUZZLEKV_TOOLS_RUNNER_JSON_TEXT_H

#include <stdbool.h>
#include <stddef.h>

#include <jansson.h>

#include "../error.h"

/* Whether parsing a text takes memory of at most about 30 times its size: one that is mostly
 * brackets, of which *brackets is the number, would take more. */
bool json_text_is_bounded(const char *text, size_t size, size_t *brackets);

/* Parses a text whose outermost value is an object without duplicate keys. One that
 * is not bounded is refused. NULL after a failure, which `error` tells as "PATH: WHAT...", where
 * `what` names the text and may be empty. */
json_t *json_text_parse(const void *text, size_t size, const char *path, const char *what,
                        struct error *error);

/* The same for a whole file of at most `most` bytes; its size goes to *size unless that is NULL. */
json_t *json_text_read(const char *path, size_t most, size_t *size, struct error *error);

#endif
