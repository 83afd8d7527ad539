/* SPDX-License-Identifier: MIT */
/* Changes JSON texts so that they stay JSON: bytes changed blindly hardly ever get past a parser.
 */
#ifndef PUZZLEKV_TESTS_FUZZ_MUTATE_H
#define PUZZLEKV_TESTS_FUZZ_MUTATE_H

#include <stddef.h>
#include <stdint.h>

/* libFuzzer's own change of bytes; and what it calls instead where a target has it. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed);

/* Changes the text in place, to at most `most` bytes; returns its new size. One that is not JSON,
 * and some that are, are changed by bytes. */
size_t mutate_json(uint8_t *text, size_t size, size_t most, unsigned seed);

#endif
