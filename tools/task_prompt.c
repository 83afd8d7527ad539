/* SPDX-License-Identifier: MIT */
/* A test row's prompt as the token ids that a model is fed. */
#include "task_prompt.h"

#include <string.h>

bool task_prompter_open(const struct tokenizer *tokenizer, const char *name, bool chat,
                        struct task_prompter *prompter, struct error *error)
{
    enum chat_kind kind;

    *prompter = (struct task_prompter){tokenizer, NULL};
    if (!chat)
        return true;
    if (!chat_open(tokenizer, NULL, &prompter->chat, error))
        return false;
    kind = chat_kind(prompter->chat);
    if (kind != CHAT_NONE && kind != CHAT_UNKNOWN)
        return true;
    task_prompter_close(prompter);
    return error_set(error, "%s: %s, which --chat needs", name,
                     kind == CHAT_NONE ? "has no chat template"
                                       : "its chat template is not of a format that is known");
}

void task_prompter_close(struct task_prompter *prompter)
{
    chat_close(prompter->chat);
    *prompter = (struct task_prompter){NULL, NULL};
}

bool task_prompter_encode(const struct task_prompter *prompter, const char *input,
                          const char *gen_prefix, struct token_list *list, struct error *error)
{
    const struct tokenizer *tokenizer = prompter->tokenizer;
    const size_t prefix_length = gen_prefix != NULL ? strlen(gen_prefix) : 0;
    const struct chat_turn turn = {CHAT_USER, input, strlen(input)};
    const struct text_part parts[] = {
        {input, strlen(input), true}, {" ", 1, true}, {gen_prefix, prefix_length, true}};
    const size_t before = list->count;

    if (prompter->chat != NULL) {
        if (!chat_format(prompter->chat, NULL, &turn, 1, CHAT_ANSWER_DIRECT, list, error))
            return false;
        if (prefix_length == 0 ||
            tokenizer_encode(tokenizer, gen_prefix, prefix_length, false, list, error))
            return true;
    } else if ((!tokenizer_wants_bos(tokenizer) ||
                token_list_append(list, tokenizer_bos(tokenizer), error)) &&
               tokenizer_encode_parts(tokenizer, parts, prefix_length > 0 ? 3 : 1, list, error)) {
        return true;
    }
    list->count = before;
    return false;
}
