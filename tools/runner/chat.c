/* SPDX-License-Identifier: MIT */
/* Chat formats: a conversation as the token ids that the model's own template would give. */
#include "chat.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct chat {
    const struct tokenizer *tokenizer;
    enum chat_kind kind;
    int32_t bos; /* TOKEN_NONE: a conversation begins without one */
    /* ChatML: im_start, none, im_end; Llama-3: start_header_id, end_header_id, eot_id. */
    int32_t begin, header_end, end;
    const char *separator; /* between the role and the content */
    char *default_system;  /* with the separator; NULL: no system block unless one is asked for */
    char *dates;           /* Llama-3.1: what its system block begins with; NULL: nothing */
    char *answer;          /* ChatML: what follows "assistant" where an answer begins */
    bool reasoning;        /* Qwen3: the thoughts of earlier answers are left out */
};

struct slice {
    const char *text;
    size_t length;
};

static struct slice slice_of(const char *text)
{
    return (struct slice){text, strlen(text)};
}

/* ---- Reading templates ---- */

/* The quote of the Jinja string that `at`, inside `template`, lies in; '\0' if it is plain text. */
static char enclosing_quote(const char *template, const char *at)
{
    bool code = false;
    char quote = '\0';

    for (const char *c = template; c < at; c++) {
        if (quote != '\0') {
            if (*c == '\\')
                c++;
            else if (*c == quote)
                quote = '\0';
        } else if (code) {
            if (*c == '"' || *c == '\'')
                quote = *c;
            else if ((*c == '}' || *c == '%') && c[1] == '}')
                code = false;
        } else if (strncmp(c, "{#", 2) == 0) {
            c = strstr(c, "#}");
            if (c == NULL)
                break;
        } else if (strncmp(c, "{{", 2) == 0 || strncmp(c, "{%", 2) == 0) {
            code = true;
            c++;
        }
    }
    return quote;
}

/* Copies to `constant`, which needs the room of `text`, what the template writes from `text` on: to
 * `stop` or, if that is NULL, to the end of the string or of the plain text. False if the constant
 * ends before `stop`. */
static bool read_constant(const char *text, char quote, const char *stop, char *constant)
{
    for (;;) {
        if (stop != NULL && strncmp(text, stop, strlen(stop)) == 0)
            break;
        if (*text == '\0' || (quote == '\0' ? *text == '{' : *text == quote)) {
            if (stop != NULL)
                return false;
            break;
        }
        if (*text == '\\' && quote != '\0' && text[1] != '\0') {
            *constant++ = text[1] == 'n' ? '\n' : text[1] == 't' ? '\t' : text[1];
            text += 2;
        } else {
            *constant++ = *text++;
        }
    }
    *constant = '\0';
    return true;
}

/* Sets *constant to a copy of what the template writes between the first `begin` (looked for from
 * `from` on) that a constant follows and `stop`, or to NULL if there is none. Fails on memory. */
static bool find_constant(const char *template, const char *from, const char *begin,
                          const char *stop, char **constant, struct error *error)
{
    *constant = malloc(strlen(template) + 1);
    if (*constant == NULL)
        return error_set(error, "chat template: out of memory");
    for (const char *at = from; (at = strstr(at, begin)) != NULL; at++) {
        const char *text = at + strlen(begin);

        if (read_constant(text, enclosing_quote(template, text), stop, *constant))
            return true;
    }
    free(*constant);
    *constant = NULL;
    return true;
}

static int32_t find_special(const struct tokenizer *tokenizer, const char *text)
{
    int32_t id = tokenizer_find(tokenizer, text, strlen(text));

    return tokenizer_is_special(tokenizer, id) ? id : TOKEN_NONE;
}

static bool is_default_system_usable(const struct chat *chat)
{
    return chat->default_system == NULL ||
           strncmp(chat->default_system, chat->separator, strlen(chat->separator)) == 0;
}

/* Whether the template does no more than chat_format can: it knows no date, describes no tools
 * where there are none, leaves thoughts out only as Qwen3 does, and begins an answer in one way, or
 * in Qwen3's two, of which the plain one is the default. `prompt` is its last part, which begins
 * the answer. */
static bool is_plain_chatml(const struct chat *chat, const char *template, const char *prompt)
{
    if (strstr(template, "strftime_now") != NULL ||
        (strstr(template, " in tools") != NULL && strstr(template, "if tools") == NULL))
        return false;
    if (!chat->reasoning && strstr(template, "split('</think>')") != NULL)
        return false;
    return strstr(prompt, " if ") == NULL ||
           (chat->reasoning && strcmp(chat->answer, "\n") == 0 && strstr(prompt, "else") == NULL);
}

static bool read_chatml(struct chat *chat, const char *template, struct error *error)
{
    const char *prompt = NULL;

    chat->separator = "\n";
    chat->begin = find_special(chat->tokenizer, "<|im_start|>");
    chat->end = find_special(chat->tokenizer, "<|im_end|>");
    for (const char *at = template; (at = strstr(at, "add_generation_prompt")) != NULL; at++)
        prompt = at;
    if (chat->begin == TOKEN_NONE || chat->end == TOKEN_NONE || prompt == NULL)
        return true;
    if (!find_constant(template, template, "<|im_start|>system", "<|im_end|>",
                       &chat->default_system, error) ||
        !find_constant(template, prompt, "<|im_start|>assistant", NULL, &chat->answer, error))
        return false;
    chat->reasoning = strstr(template, "last_query_index") != NULL;
    if (chat->answer != NULL && is_default_system_usable(chat) &&
        is_plain_chatml(chat, template, prompt))
        chat->kind = CHAT_CHATML;
    return true;
}

/* Llama-3.1's system block tells the model two dates, whether or not there is a system text. Sets
 * chat->dates, or leaves it NULL if the template writes something else. Fails on memory only. */
static bool read_dates(struct chat *chat, const char *template, const char *date,
                       struct error *error)
{
    static const char format[] = "Cutting Knowledge Date: %s\nToday Date: %s\n\n";
    char *knowledge = NULL, *today = NULL;
    size_t size;
    bool done = false;

    if (!find_constant(template, template, "Cutting Knowledge Date: ", "\\n", &knowledge, error) ||
        !find_constant(template, template, "date_string = \"", NULL, &today, error))
        goto out;
    if (knowledge != NULL && today != NULL &&
        strstr(template, "\"Today Date: \" + date_string + \"\\n\\n\"") != NULL) {
        if (date == NULL)
            date = today;
        size = sizeof format + strlen(knowledge) + strlen(date);
        chat->dates = malloc(size);
        if (chat->dates == NULL) {
            error_set(error, "chat template: out of memory");
            goto out;
        }
        snprintf(chat->dates, size, format, knowledge, date);
    }
    done = true;
out:
    free(knowledge);
    free(today);
    return done;
}

static bool read_llama3(struct chat *chat, const char *template, const char *date,
                        struct error *error)
{
    bool has_dates = strstr(template, "Cutting Knowledge Date: ") != NULL;

    chat->separator = "\n\n";
    chat->begin = find_special(chat->tokenizer, "<|start_header_id|>");
    chat->header_end = find_special(chat->tokenizer, "<|end_header_id|>");
    chat->end = find_special(chat->tokenizer, "<|eot_id|>");
    if (chat->begin == TOKEN_NONE || chat->header_end == TOKEN_NONE || chat->end == TOKEN_NONE)
        return true;
    if (!find_constant(template, template, "<|start_header_id|>system<|end_header_id|>",
                       "<|eot_id|>", &chat->default_system, error) ||
        (has_dates && !read_dates(chat, template, date, error)))
        return false;
    /* Without the dates, a template that speaks of functions is one that always describes them. */
    if (is_default_system_usable(chat) &&
        (has_dates ? chat->dates != NULL : strstr(template, "functions") == NULL))
        chat->kind = CHAT_LLAMA3;
    return true;
}

static bool detect(struct chat *chat, const char *date, struct error *error)
{
    const char *template = tokenizer_chat_template(chat->tokenizer);

    if (template == NULL)
        return true;
    chat->kind = CHAT_UNKNOWN;
    if (strstr(template, "bos_token") != NULL || strstr(template, "<|begin_of_text|>") != NULL)
        chat->bos = tokenizer_bos(chat->tokenizer);
    if (strstr(template, "<|im_start|>") != NULL && strstr(template, "<|im_end|>") != NULL)
        return read_chatml(chat, template, error);
    if (strstr(template, "<|start_header_id|>") != NULL && strstr(template, "<|eot_id|>") != NULL)
        return read_llama3(chat, template, date, error);
    return true;
}

bool chat_open(const struct tokenizer *tokenizer, const char *date, struct chat **chat,
               struct error *error)
{
    struct chat *opened = calloc(1, sizeof *opened);

    *chat = NULL;
    if (opened == NULL)
        return error_set(error, "chat template: out of memory");
    opened->tokenizer = tokenizer;
    opened->kind = CHAT_NONE;
    opened->bos = TOKEN_NONE;
    if (!detect(opened, date, error)) {
        chat_close(opened);
        return false;
    }
    *chat = opened;
    return true;
}

void chat_close(struct chat *chat)
{
    if (chat == NULL)
        return;
    free(chat->default_system);
    free(chat->dates);
    free(chat->answer);
    free(chat);
}

enum chat_kind chat_kind(const struct chat *chat)
{
    return chat->kind;
}

int32_t chat_end_of_turn(const struct chat *chat)
{
    return chat->kind == CHAT_CHATML || chat->kind == CHAT_LLAMA3 ? chat->end : TOKEN_NONE;
}

/* ---- Writing conversations ---- */

/* What Jinja's trim takes away: the white space of Python's str.strip. */
static bool is_space(uint32_t point)
{
    return (point >= 0x09 && point <= 0x0d) || (point >= 0x1c && point <= 0x20) || point == 0x85 ||
           point == 0xa0 || point == 0x1680 || (point >= 0x2000 && point <= 0x200a) ||
           point == 0x2028 || point == 0x2029 || point == 0x202f || point == 0x205f ||
           point == 0x3000;
}

/* The white space at `text`, in bytes: 0 if there is none. Every such character has at most 3. */
static size_t space_at(const char *text, size_t length)
{
    const unsigned char *bytes = (const unsigned char *)text;

    if (length >= 1 && bytes[0] < 0x80)
        return is_space(bytes[0]);
    if (length >= 2 && bytes[0] == 0xc2)
        return is_space(bytes[1]) ? 2 : 0;
    if (length >= 3 && (bytes[0] & 0xf0) == 0xe0 &&
        is_space((bytes[0] & 0xfu) << 12 | (bytes[1] & 0x3fu) << 6 | (bytes[2] & 0x3fu)))
        return 3;
    return 0;
}

static struct slice trim(struct slice slice)
{
    size_t size;

    while ((size = space_at(slice.text, slice.length)) > 0) {
        slice.text += size;
        slice.length -= size;
    }
    for (size = 1; size <= 3 && size <= slice.length; size++) {
        if (space_at(slice.text + slice.length - size, size) == size) {
            slice.length -= size;
            size = 0;
        }
    }
    return slice;
}

static struct slice skip_newlines(struct slice slice)
{
    while (slice.length > 0 && slice.text[0] == '\n') {
        slice.text++;
        slice.length--;
    }
    return slice;
}

static struct slice drop_newlines(struct slice slice)
{
    while (slice.length > 0 && slice.text[slice.length - 1] == '\n')
        slice.length--;
    return slice;
}

/* The first or last place of `what` in the slice, or NULL. */
static const char *find_in(struct slice slice, const char *what, bool last)
{
    const size_t length = strlen(what);
    const char *found = NULL;

    for (size_t i = 0; i + length <= slice.length; i++) {
        if (memcmp(slice.text + i, what, length) == 0) {
            found = slice.text + i;
            if (!last)
                break;
        }
    }
    return found;
}

/* Cuts an answer into its thoughts and what it said, as Qwen3's template does. */
static void split_reasoning(struct slice *content, struct slice *thoughts)
{
    static const char begin[] = "<think>", end[] = "</think>";
    const char *end_of_text = content->text + content->length;
    const char *first = find_in(*content, end, false), *last = find_in(*content, end, true);
    const char *inside;

    *thoughts = (struct slice){"", 0};
    if (first == NULL)
        return;
    *thoughts = drop_newlines((struct slice){content->text, (size_t)(first - content->text)});
    inside = find_in(*thoughts, begin, true);
    if (inside != NULL) {
        inside += strlen(begin);
        thoughts->length -= (size_t)(inside - thoughts->text);
        thoughts->text = inside;
    }
    *thoughts = drop_newlines(skip_newlines(*thoughts));
    last += strlen(end);
    *content = skip_newlines((struct slice){last, (size_t)(end_of_text - last)});
}

/* Encodes the parts as the one text that they make, for a token may reach over their borders. */
static bool append_text(const struct chat *chat, const struct slice *parts, size_t count,
                        struct token_list *list, struct error *error)
{
    size_t length = 0, written = 0;
    char *text;
    bool done;

    for (size_t i = 0; i < count; i++) {
        if (__builtin_add_overflow(length, parts[i].length, &length))
            return error_set(error, "chat: the text is too long");
    }
    text = malloc(length + 1);
    if (text == NULL)
        return error_set(error, "chat: out of memory for %zu bytes of text", length);
    for (size_t i = 0; i < count; i++) {
        memcpy(text + written, parts[i].text, parts[i].length);
        written += parts[i].length;
    }
    done = tokenizer_encode(chat->tokenizer, text, length, false, list, error);
    free(text);
    return done;
}

#define MAX_CONTENT 4

/* One block: the role, the content in at most MAX_CONTENT parts, the end of the turn. */
static bool append_block(const struct chat *chat, const char *role, const struct slice *content,
                         size_t count, struct token_list *list, struct error *error)
{
    struct slice parts[2 + MAX_CONTENT] = {slice_of(role), slice_of(chat->separator)};
    const struct slice newline = slice_of("\n");

    memcpy(parts + 2, content, count * sizeof *content);
    if (!token_list_append(list, chat->begin, error))
        return false;
    if (chat->kind == CHAT_CHATML)
        return append_text(chat, parts, count + 2, list, error) &&
               token_list_append(list, chat->end, error) &&
               append_text(chat, &newline, 1, list, error);
    return append_text(chat, parts, 1, list, error) &&
           token_list_append(list, chat->header_end, error) &&
           append_text(chat, parts + 1, count + 1, list, error) &&
           token_list_append(list, chat->end, error);
}

static bool append_system(const struct chat *chat, const char *system, struct token_list *list,
                          struct error *error)
{
    struct slice content[2] = {{"", 0}, {"", 0}};

    if (chat->dates != NULL)
        content[0] = slice_of(chat->dates);
    else if (system == NULL && chat->default_system == NULL)
        return true;
    if (system != NULL)
        content[1] = slice_of(system);
    else if (chat->default_system != NULL)
        content[1] = slice_of(chat->default_system + strlen(chat->separator));
    if (chat->kind == CHAT_LLAMA3)
        content[1] = trim(content[1]);
    return append_block(chat, "system", content, 2, list, error);
}

/* `past`: the user has spoken since; `last`: nothing follows. */
static bool append_turn(const struct chat *chat, const struct chat_turn *turn, bool past, bool last,
                        struct token_list *list, struct error *error)
{
    struct slice content = {turn->text, turn->length}, thoughts;

    if (chat->kind == CHAT_LLAMA3)
        content = trim(content);
    if (turn->role == CHAT_USER)
        return append_block(chat, "user", &content, 1, list, error);
    if (chat->reasoning) {
        split_reasoning(&content, &thoughts);
        if (!past && (last || thoughts.length > 0)) {
            const struct slice parts[] = {slice_of("<think>\n"), thoughts,
                                          slice_of("\n</think>\n\n"), skip_newlines(content)};

            return append_block(chat, "assistant", parts, 4, list, error);
        }
    }
    return append_block(chat, "assistant", &content, 1, list, error);
}

static bool append_answer(const struct chat *chat, struct token_list *list, struct error *error)
{
    const struct slice parts[] = {
        slice_of("assistant"),
        slice_of(chat->kind == CHAT_CHATML ? chat->answer : chat->separator),
    };

    if (!token_list_append(list, chat->begin, error))
        return false;
    if (chat->kind == CHAT_CHATML)
        return append_text(chat, parts, 2, list, error);
    return append_text(chat, parts, 1, list, error) &&
           token_list_append(list, chat->header_end, error) &&
           append_text(chat, parts + 1, 1, list, error);
}

bool chat_format(const struct chat *chat, const char *system, const struct chat_turn *turns,
                 size_t turn_count, bool answer, struct token_list *list, struct error *error)
{
    const size_t before = list->count;
    size_t last_user = turn_count;
    bool done = false;

    if (chat->kind != CHAT_CHATML && chat->kind != CHAT_LLAMA3)
        return error_set(error, "chat template: missing, or neither ChatML nor Llama-3");
    for (size_t i = 0; i < turn_count; i++) {
        if (turns[i].role == CHAT_USER)
            last_user = i;
    }
    if ((chat->bos != TOKEN_NONE && !token_list_append(list, chat->bos, error)) ||
        !append_system(chat, system, list, error))
        goto out;
    for (size_t i = 0; i < turn_count; i++) {
        if (!append_turn(chat, &turns[i], i < last_user, i + 1 == turn_count, list, error))
            goto out;
    }
    done = !answer || append_answer(chat, list, error);
out:
    if (!done)
        list->count = before;
    return done;
}
