/* SPDX-License-Identifier: MIT */
/* Lists of token ids. */
#ifndef PUZZLEKV_TOOLS_RUNNER_TOKEN_LIST_H
#define PUZZLEKV_TOOLS_RUNNER_TOKEN_LIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../error.h"

/* Where a function answers with a token id, this says that there is none. */
#define TOKEN_NONE (-1)

/* Token ids that grow at the end. All zero is an empty list. */
struct token_list {
    int32_t *ids;
    size_t count, capacity;
};

bool token_list_append(struct token_list *list, int32_t id, struct error *error);

/* Frees the ids and empties the list. */
void token_list_free(struct token_list *list);

#endif
