/* SPDX-License-Identifier: MIT */
/* What the fuzz targets share: a scratch folder, and walks over all that a file opens to. */
#ifndef PUZZLEKV_TESTS_FUZZ_FUZZ_H
#define PUZZLEKV_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#include "../gguf_writer.h"
#include "error.h"
#include "runner/tokenizer.h"

/* What libFuzzer calls: the first once, before the second. */
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the process as a crash does, so that the input is kept. */
#define fuzz_require(condition) ((condition) ? (void)0 : fuzz_fail(__FILE__, __LINE__, #condition))
_Noreturn void fuzz_fail(const char *file, int line, const char *condition);

/* The path of a file in this process's scratch folder, which is in $TMPDIR and stays there. It
 * lasts for eight more calls. "" is the folder itself. */
const char *fuzz_path(const char *name);

/* Makes a folder there. */
void fuzz_make_folder(const char *name);

/* Writes a file there. */
void fuzz_write(const char *name, const void *data, size_t size);
void fuzz_write_bytes(const char *name, struct bytes bytes); /* and frees them */
void fuzz_write_text(const char *name, const char *text);

/* A failure says why in one line, which begins with `start` and goes on. */
void fuzz_check_error(const struct error *error, const char *start);

/* Opens a model in both ways and reads and computes what there is; it may be refused. */
void fuzz_model(const char *path);

/* Opens a tokenizer and asks it for everything; it may be refused. */
void fuzz_tokenizer(const char *path);

/* Encodes a text and decodes the ids. */
void fuzz_text(const struct tokenizer *tokenizer, const char *text, size_t length);

#endif
