/* SPDX-License-Identifier: MIT */
/* The backends by name: the CPU's is in the library, others are modules that are opened when they
 * are asked for. */
#ifndef PUZZLEKV_LIB_BACKENDS_H
#define PUZZLEKV_LIB_BACKENDS_H

#include "backend.h"

/*
 * `name` is "cpu", which NULL means too, or "cuda". A module is looked for in the folder that the
 * environment variable PUZZLEKV_MODULES names, else where it is installed. Errors:
 * PKV_ERROR_UNSUPPORTED with a message.
 */
pkv_status backends_find(const char *name, const struct backend_ops **ops, struct message *message);

#endif
