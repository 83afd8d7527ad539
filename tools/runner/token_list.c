/* SPDX-License-Identifier: MIT */
/* Lists of token ids. */
#include "token_list.h"

#include <stdlib.h>
#include <string.h>

bool token_list_append(struct token_list *list, int32_t id, struct error *error)
{
    if (list->count == list->capacity) {
        size_t capacity = list->capacity == 0 ? 256 : list->capacity, bytes;
        int32_t *ids;

        if (__builtin_mul_overflow(capacity, 2, &capacity) ||
            __builtin_mul_overflow(capacity, sizeof *ids, &bytes) ||
            (ids = realloc(list->ids, bytes)) == NULL)
            return error_set(error, "tokenizer: out of memory for %zu token ids", list->count);
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->count++] = id;
    return true;
}

void token_list_free(struct token_list *list)
{
    free(list->ids);
    memset(list, 0, sizeof *list);
}
