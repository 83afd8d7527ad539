/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval tokenize: the token ids of a text. */
#include "eval.h"

#include <stdlib.h>

#include "options.h"

bool eval_tokenize(const struct eval_arguments *arguments, struct error *error)
{
    struct tokenizer *tokenizer = NULL;
    struct token_list list = {NULL, 0, 0};
    struct text text = {.data = NULL};
    bool done = false;

    if (!text_read(arguments->file, &text, error) ||
        !text_check_utf8(text.name, text.data, text.size, error) ||
        !eval_tokenizer_open(arguments, &tokenizer, error) ||
        !tokenizer_encode(tokenizer, text.data, text.size, true, &list, error))
        goto out;
    putchar('[');
    for (size_t i = 0; i < list.count; i++)
        printf("%s%d", i > 0 ? ", " : "", (int)list.ids[i]);
    puts("]");
    done = output_flush(error);
out:
    token_list_free(&list);
    tokenizer_close(tokenizer);
    free(text.data);
    return done;
}
