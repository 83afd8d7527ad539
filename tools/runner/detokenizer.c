/* SPDX-License-Identifier: MIT */
/* Token ids to text as they come. */
#include "detokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "pretokenizer.h"

#define REPLACEMENT "\xef\xbf\xbd"

bool detokenizer_open(struct detokenizer *detokenizer, const struct tokenizer *tokenizer,
                      bool show_special, struct error *error)
{
    size_t longest = tokenizer_longest(tokenizer), room = longest + sizeof detokenizer->pending;

    *detokenizer = (struct detokenizer){
        .tokenizer = tokenizer,
        .show_special = show_special,
        .drop_space = tokenizer_adds_space(tokenizer),
    };
    detokenizer->bytes = malloc(room);
    /* Each byte may become a U+FFFD. */
    detokenizer->text = malloc((sizeof REPLACEMENT - 1) * room + 1);
    if (detokenizer->bytes == NULL || detokenizer->text == NULL) {
        detokenizer_close(detokenizer);
        return error_set(error, "tokenizer: out of memory for a token of %zu bytes", longest);
    }
    return true;
}

void detokenizer_close(struct detokenizer *detokenizer)
{
    free(detokenizer->bytes);
    free(detokenizer->text);
    memset(detokenizer, 0, sizeof *detokenizer);
}

void detokenizer_continue(struct detokenizer *detokenizer)
{
    detokenizer->drop_space = false;
}

static const char *end_text(struct detokenizer *detokenizer, size_t written, size_t *length)
{
    detokenizer->text[written] = '\0';
    if (length != NULL)
        *length = written;
    return detokenizer->text;
}

const char *detokenizer_push(struct detokenizer *detokenizer, int32_t id, size_t *length)
{
    const char *token;
    size_t token_length, count = detokenizer->pending_length, written = 0, offset = 0;

    if (!detokenizer->show_special && tokenizer_is_special(detokenizer->tokenizer, id))
        return end_text(detokenizer, 0, length);
    token = tokenizer_text(detokenizer->tokenizer, id, &token_length);
    memcpy(detokenizer->bytes, detokenizer->pending, count);
    memcpy(detokenizer->bytes + count, token, token_length);
    count += token_length;
    detokenizer->pending_length = 0;
    if (count > 0 && detokenizer->drop_space) {
        offset = detokenizer->bytes[0] == ' ';
        detokenizer->drop_space = false;
    }
    while (offset < count) {
        const char *sequence = detokenizer->bytes + offset;
        int size = utf8_sequence(sequence, count - offset);

        if (size == 0) {
            detokenizer->pending_length = count - offset;
            memcpy(detokenizer->pending, sequence, count - offset);
            break;
        }
        if (size > 0) {
            memcpy(detokenizer->text + written, sequence, (size_t)size);
            written += (size_t)size;
            offset += (size_t)size;
        } else {
            memcpy(detokenizer->text + written, REPLACEMENT, sizeof REPLACEMENT - 1);
            written += sizeof REPLACEMENT - 1;
            offset += (size_t)-size;
        }
    }
    return end_text(detokenizer, written, length);
}

const char *detokenizer_flush(struct detokenizer *detokenizer, size_t *length)
{
    size_t written = 0;

    if (detokenizer->pending_length > 0) {
        memcpy(detokenizer->text, REPLACEMENT, sizeof REPLACEMENT - 1);
        written = sizeof REPLACEMENT - 1;
    }
    detokenizer->pending_length = 0;
    detokenizer->drop_space = tokenizer_adds_space(detokenizer->tokenizer);
    return end_text(detokenizer, written, length);
}
