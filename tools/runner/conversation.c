/* SPDX-License-Identifier: MIT */
/* A conversation as text, and as token ids that continue what a cache holds of it. */
#include "conversation.h"

#include <stdlib.h>
#include <string.h>

struct conversation {
    const struct tokenizer *tokenizer;
    const struct chat *chat;
    const char *system;
    struct chat_turn *turns; /* each owns its text; none without `chat` */
    size_t count, capacity;
};

bool conversation_open(const struct tokenizer *tokenizer, const struct chat *chat,
                       const char *system, struct conversation **conversation, struct error *error)
{
    const struct chat_turn turn = {CHAT_USER, "", 0};
    struct token_list list = {0};
    bool done =
        chat == NULL || chat_format(chat, system, &turn, 1, CHAT_ANSWER_BEGINS, &list, error);

    *conversation = NULL;
    token_list_free(&list);
    if (!done)
        return false;
    *conversation = calloc(1, sizeof **conversation);
    if (*conversation == NULL)
        return error_set(error, "out of memory for the conversation");
    **conversation = (struct conversation){.tokenizer = tokenizer, .chat = chat, .system = system};
    return true;
}

void conversation_close(struct conversation *conversation)
{
    if (conversation == NULL)
        return;
    conversation_clear(conversation);
    free(conversation->turns);
    free(conversation);
}

static bool append_turn(struct conversation *conversation, enum chat_role role, const char *text,
                        size_t length, struct error *error)
{
    char *copy = malloc(length + 1);

    if (copy == NULL)
        goto fail;
    if (conversation->count == conversation->capacity) {
        size_t capacity = 2 * conversation->capacity + 2;
        struct chat_turn *turns = realloc(conversation->turns, capacity * sizeof *turns);

        if (turns == NULL)
            goto fail;
        conversation->turns = turns;
        conversation->capacity = capacity;
    }
    if (length > 0)
        memcpy(copy, text, length);
    conversation->turns[conversation->count++] = (struct chat_turn){role, copy, length};
    return true;
fail:
    free(copy);
    return error_set(error, "out of memory for the conversation");
}

static void remove_last(struct conversation *conversation)
{
    free((char *)conversation->turns[--conversation->count].text);
}

static bool ask_raw(const struct conversation *conversation, const char *text, size_t length,
                    struct token_list *tokens, struct error *error)
{
    const struct tokenizer *tokenizer = conversation->tokenizer;
    size_t before = tokens->count;

    if (before == 0 && tokenizer_wants_bos(tokenizer) &&
        !token_list_append(tokens, tokenizer_bos(tokenizer), error))
        return false;
    if (!tokenizer_encode(tokenizer, text, length, true, tokens, error)) {
        tokens->count = before;
        return false;
    }
    return tokens->count > before ||
           error_set(error, "prompt: the vocabulary has no token for any of it");
}

/* How many of the `count` ids at `ids` have the text of all of `tokens`; 0 if it differs or ends
 * inside a token. A space with which a token begins may be missing: decoding leaves out that before
 * an answer, and templates that around it. */
static size_t find_end(const struct tokenizer *tokenizer, const int32_t *tokens, size_t token_count,
                       const int32_t *ids, size_t count)
{
    const char *text = NULL, *other = NULL;
    size_t length = 0, other_length = 0, token = 0, used = 0;
    bool at_begin = false; /* of a token's text */

    while (length > 0 || token < token_count) {
        if (length == 0) {
            text = tokenizer_text(tokenizer, tokens[token++], &length);
            at_begin = true;
        } else if (other_length == 0) {
            if (used == count)
                return 0;
            other = tokenizer_text(tokenizer, ids[used++], &other_length);
        } else if (at_begin && *text == ' ' && *other != ' ') {
            text++;
            length--;
            at_begin = false;
        } else {
            size_t both = length < other_length ? length : other_length;

            if (memcmp(text, other, both) != 0)
                return 0;
            text += both;
            length -= both;
            other += both;
            other_length -= both;
            at_begin = false;
        }
    }
    return other_length == 0 ? used : 0;
}

/* Makes `tokens` the conversation `whole`, or the same in other ids where that keeps all of them.
 * `whole` is used up. */
static bool continue_tokens(const struct tokenizer *tokenizer, struct token_list *whole,
                            struct token_list *tokens, size_t *kept, struct error *error)
{
    const struct token_list old = *tokens;
    size_t same = 0, next;

    while (same < old.count && same < whole->count && old.ids[same] == whole->ids[same])
        same++;
    next = same + find_end(tokenizer, old.ids + same, old.count - same, whole->ids + same,
                           whole->count - same);
    if (same < old.count && next == same) {
        *kept = same;
        *tokens = *whole;
        *whole = old;
        return true;
    }
    *kept = old.count;
    for (; next < whole->count; next++) {
        if (!token_list_append(tokens, whole->ids[next], error)) {
            tokens->count = old.count;
            return false;
        }
    }
    return true;
}

bool conversation_ask(struct conversation *conversation, const char *text, size_t length,
                      struct token_list *tokens, size_t *kept, struct error *error)
{
    struct token_list whole = {0};
    bool done;

    *kept = tokens->count;
    if (conversation->chat == NULL)
        return ask_raw(conversation, text, length, tokens, error);
    if (!append_turn(conversation, CHAT_USER, text, length, error))
        return false;
    done = chat_format(conversation->chat, conversation->system, conversation->turns,
                       conversation->count, CHAT_ANSWER_BEGINS, &whole, error) &&
           continue_tokens(conversation->tokenizer, &whole, tokens, kept, error);
    token_list_free(&whole);
    if (!done)
        remove_last(conversation);
    return done;
}

bool conversation_answer(struct conversation *conversation, const char *text, size_t length,
                         struct error *error)
{
    return conversation->chat == NULL ||
           append_turn(conversation, CHAT_ASSISTANT, text, length, error);
}

bool conversation_resume(struct conversation *conversation, const struct chat_turn turns[2],
                         struct error *error)
{
    if (conversation->chat == NULL)
        return true;
    if (!append_turn(conversation, CHAT_USER, turns[0].text, turns[0].length, error))
        return false;
    if (append_turn(conversation, CHAT_ASSISTANT, turns[1].text, turns[1].length, error))
        return true;
    remove_last(conversation);
    return false;
}

const struct chat_turn *conversation_turns(const struct conversation *conversation, size_t *count)
{
    *count = conversation->count;
    return conversation->turns;
}

void conversation_take_back(struct conversation *conversation)
{
    if (conversation->chat != NULL)
        remove_last(conversation);
}

void conversation_clear(struct conversation *conversation)
{
    while (conversation->count > 0)
        remove_last(conversation);
}
