/* SPDX-License-Identifier: MIT */
/* Chat formats: a conversation as the token ids that the model's own template would give. */
#include "chat.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat_template.h"

/* Where a system prompt goes in the formats of Llama-2 and Mistral. */
enum system_place {
    SYSTEM_REFUSED,
    SYSTEM_BLOCK,      /* before the turns */
    SYSTEM_FIRST_USER, /* before the text of the first turn, if it is the user's */
    SYSTEM_LAST_USER   /* before the text of the last turn, if it is the user's */
};

/* The texts around the contents in those formats. */
struct brackets {
    char user_begin[MAX_TERM_TEXT], user_end[MAX_TERM_TEXT];
    char answer_begin[MAX_TERM_TEXT], answer_end[MAX_TERM_TEXT]; /* before the EOS */
    char after_answer[MAX_TERM_TEXT];                            /* after it */
    char system_begin[MAX_TERM_TEXT], system_end[MAX_TERM_TEXT];
    bool user_bos;  /* a BOS before every turn of the user */
    bool alternate; /* any other order of turns is refused */
    bool user_trimmed, answer_trimmed;
    enum system_place system;
};

struct chat {
    const struct tokenizer *tokenizer;
    enum chat_kind kind;
    bool bos;    /* a conversation begins with one */
    int32_t end; /* closes a turn */
    /* ChatML and Llama-3 */
    const char *separator; /* between the role and the content */
    char *default_system;  /* with the separator; NULL: no system block unless one is asked for */
    char *dates;           /* Llama-3.1: what its system block begins with; NULL: nothing */
    char *answer;          /* ChatML: what follows "assistant" where an answer begins */
    bool reasoning;        /* Qwen3: the thoughts of earlier answers are left out */
    bool direct;           /* Qwen3: an answer may begin with empty thoughts */
    /* Llama-2 and Mistral */
    struct brackets brackets;
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
 * where there are none, leaves out thoughts only as Qwen3 does, and begins an answer in one way, or
 * in Qwen3's two, of which the plain one is the default. `prompt` is its last part, which begins
 * the answer. */
static bool is_plain_chatml(const struct chat *chat, const char *template, const char *prompt)
{
    if (strstr(template, "strftime_now") != NULL ||
        (strstr(template, " in tools") != NULL && strstr(template, "if tools") == NULL))
        return false;
    if (chat->reasoning
            ? strstr(template, "'\\n<think>\\n' + reasoning_content.strip('\\n') + "
                               "'\\n</think>\\n\\n' + content.lstrip('\\n')") == NULL ||
                  strstr(template, "loop.last or (not loop.last and reasoning_content)") == NULL
            : strstr(template, "</think>") != NULL)
        return false;
    return strstr(prompt, " if ") == NULL ||
           (chat->reasoning && strcmp(chat->answer, "\n") == 0 && strstr(prompt, "else") == NULL);
}

static bool read_chatml(struct chat *chat, const char *template, struct error *error)
{
    const char *prompt = NULL;

    chat->separator = "\n";
    chat->end = find_special(chat->tokenizer, "<|im_end|>");
    for (const char *at = template; (at = strstr(at, "add_generation_prompt")) != NULL; at++)
        prompt = at;
    if (find_special(chat->tokenizer, "<|im_start|>") == TOKEN_NONE || chat->end == TOKEN_NONE ||
        prompt == NULL)
        return true;
    if (!template_constant(template, template, "<|im_start|>system", "<|im_end|>",
                           &chat->default_system, error) ||
        !template_constant(template, prompt, "<|im_start|>assistant", NULL, &chat->answer, error))
        return false;
    chat->reasoning = strstr(template, "last_query_index") != NULL;
    chat->direct = strstr(prompt, "enable_thinking is false") != NULL;
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

    if (!template_constant(template, template, "Cutting Knowledge Date: ", "\\n", &knowledge,
                           error) ||
        !template_constant(template, template, "date_string = \"", NULL, &today, error))
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
    chat->end = find_special(chat->tokenizer, "<|eot_id|>");
    if (find_special(chat->tokenizer, "<|start_header_id|>") == TOKEN_NONE ||
        find_special(chat->tokenizer, "<|end_header_id|>") == TOKEN_NONE || chat->end == TOKEN_NONE)
        return true;
    if (!template_constant(template, template, "<|start_header_id|>system<|end_header_id|>",
                           "<|eot_id|>", &chat->default_system, error) ||
        (has_dates && !read_dates(chat, template, date, error)))
        return false;
    /* Without the dates, a template that speaks of functions is one that always describes them. */
    if (is_default_system_usable(chat) &&
        (has_dates ? chat->dates != NULL : strstr(template, "functions") == NULL))
        chat->kind = CHAT_LLAMA3;
    return true;
}

/* ---- Llama-2 and Mistral ---- */

/* Whether a format that is known already is the same; an unknown one becomes it. */
static bool agree(char *known, const char *text, bool first)
{
    if (first)
        strcpy(known, text);
    return strcmp(known, text) == 0;
}

static bool is_content(struct term term)
{
    return term.kind == TERM_CONTENT || term.kind == TERM_TRIMMED;
}

/* [bos] '[INST] ' [system '\n\n'] content ' [/INST]' */
static bool read_user(struct brackets *brackets, const struct term *terms, size_t count, bool first)
{
    const bool bos = terms[0].kind == TERM_BOS;
    size_t at = bos;

    if (count < at + 3 || terms[at].kind != TERM_TEXT ||
        !agree(brackets->user_begin, terms[at].text, first))
        return false;
    at++;
    if (terms[at].kind == TERM_SYSTEM) {
        if (count < at + 4 || terms[at + 1].kind != TERM_TEXT)
            return false;
        strcpy(brackets->system_end, terms[at + 1].text);
        at += 2;
    }
    if (count != at + 2 || !is_content(terms[at]) || terms[at + 1].kind != TERM_TEXT ||
        strstr(terms[at + 1].text, "[/INST]") == NULL ||
        !agree(brackets->user_end, terms[at + 1].text, first) ||
        (!first &&
         (bos != brackets->user_bos || (terms[at].kind == TERM_TRIMMED) != brackets->user_trimmed)))
        return false;
    brackets->user_bos = bos;
    brackets->user_trimmed = terms[at].kind == TERM_TRIMMED;
    return true;
}

/* [' '] content [' '] eos [' '] */
static bool read_answer(struct brackets *brackets, const struct term *terms, size_t count,
                        bool first)
{
    const char *begin = "", *end = "", *after = "";
    bool trimmed;
    size_t at = 0;

    if (terms[at].kind == TERM_TEXT)
        begin = terms[at++].text;
    if (at >= count || !is_content(terms[at]))
        return false;
    trimmed = terms[at++].kind == TERM_TRIMMED;
    if (at < count && terms[at].kind == TERM_TEXT)
        end = terms[at++].text;
    if (at >= count || terms[at++].kind != TERM_EOS)
        return false;
    if (at < count && terms[at].kind == TERM_TEXT)
        after = terms[at++].text;
    if (at != count || !agree(brackets->answer_begin, begin, first) ||
        !agree(brackets->answer_end, end, first) || !agree(brackets->after_answer, after, first) ||
        (!first && trimmed != brackets->answer_trimmed))
        return false;
    brackets->answer_trimmed = trimmed;
    return true;
}

/* '[SYSTEM_PROMPT] ' content '[/SYSTEM_PROMPT]' */
static bool read_system(struct brackets *brackets, const struct term *terms, size_t count)
{
    if (count != 3 || terms[0].kind != TERM_TEXT || terms[1].kind != TERM_CONTENT ||
        terms[2].kind != TERM_TEXT)
        return false;
    strcpy(brackets->system_begin, terms[0].text);
    strcpy(brackets->system_end, terms[2].text);
    brackets->system = SYSTEM_BLOCK;
    return true;
}

static bool has_text(const struct term *terms, size_t count, const char *text)
{
    for (size_t i = 0; i < count; i++) {
        if (strstr(terms[i].text, text) != NULL)
            return true;
    }
    return false;
}

static bool has_eos(const struct term *terms, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (terms[i].kind == TERM_EOS)
            return true;
    }
    return false;
}

/* Every sum that the template writes with an [INST], a [SYSTEM_PROMPT] or an EOS has to be as one
 * of the above, but for those that are about tools. */
static bool read_brackets(struct chat *chat, const char *code)
{
    struct brackets *brackets = &chat->brackets;
    struct term terms[MAX_TERMS];
    size_t count, users = 0, answers = 0;

    while ((count = template_next_output(&code, terms)) > 0) {
        bool known = true;

        if (has_text(terms, count, "INST]"))
            known = read_user(brackets, terms, count, users++ == 0);
        else if (has_text(terms, count, "SYSTEM_PROMPT]"))
            known = read_system(brackets, terms, count);
        else if (count == 1 && terms[0].kind == TERM_BOS)
            chat->bos = true;
        else if (has_eos(terms, count))
            known = (count == 2 && strcmp(terms[0].text, "]") == 0) ||
                    read_answer(brackets, terms, count, answers++ == 0);
        if (!known)
            return false;
    }
    return users > 0 && answers > 0;
}

/* Where the code puts a system prompt; false if it has one of its own, or puts it elsewhere. */
static bool read_system_place(struct brackets *brackets, const char *code)
{
    static const char llama2[] =
        "{%ifloop.index0==0andsystem_message!=false%}{%setcontent='<<SYS>>\\n'+system_message+"
        "'\\n<</SYS>>\\n\\n'+message.content%}{%else%}{%setcontent=message.content%}{%endif%}";

    if (strstr(code, "true==true") != NULL)
        return false;
    if (strstr(code, llama2) != NULL) {
        strcpy(brackets->system_begin, "<<SYS>>\n");
        strcpy(brackets->system_end, "\n<</SYS>>\n\n");
        brackets->system = SYSTEM_FIRST_USER;
    } else if (brackets->system == SYSTEM_BLOCK) {
        return true;
    } else if (strstr(code, "loop.lastandsystem_messageisdefined") != NULL) {
        brackets->system = SYSTEM_LAST_USER;
    } else if (strstr(code, "loop.firstandsystem_messageisdefined") != NULL) {
        brackets->system = SYSTEM_FIRST_USER;
    } else {
        return strstr(code, "system_message") == NULL;
    }
    return true;
}

static bool read_inst(struct chat *chat, const char *template, struct error *error)
{
    char *code;

    if (!template_code(template, &code, error))
        return false;
    chat->bos = false;
    chat->end = tokenizer_eos(chat->tokenizer);
    if (code != NULL)
        chat->brackets.alternate = strstr(code, "!=(loop.index0%2==0)") != NULL ||
                                   strstr(code, "!=(ns.index%2==0)") != NULL;
    if (code != NULL && chat->end != TOKEN_NONE && tokenizer_bos(chat->tokenizer) != TOKEN_NONE &&
        strstr(code, "strftime_now") == NULL && strstr(code, "add_generation_prompt") == NULL &&
        read_brackets(chat, code) && read_system_place(&chat->brackets, code))
        chat->kind = strstr(code, "<<SYS>>") != NULL ? CHAT_LLAMA2 : CHAT_MISTRAL;
    free(code);
    return true;
}

static bool detect(struct chat *chat, const char *date, struct error *error)
{
    const char *template = tokenizer_chat_template(chat->tokenizer);

    if (template == NULL)
        return true;
    chat->kind = CHAT_UNKNOWN;
    chat->bos =
        tokenizer_bos(chat->tokenizer) != TOKEN_NONE &&
        (strstr(template, "bos_token") != NULL || strstr(template, "<|begin_of_text|>") != NULL);
    if (strstr(template, "<|im_start|>") != NULL && strstr(template, "<|im_end|>") != NULL)
        return read_chatml(chat, template, error);
    if (strstr(template, "<|start_header_id|>") != NULL && strstr(template, "<|eot_id|>") != NULL)
        return read_llama3(chat, template, date, error);
    if (strstr(template, "[INST]") != NULL)
        return read_inst(chat, template, error);
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
    return chat->kind > CHAT_UNKNOWN ? chat->end : TOKEN_NONE;
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

static struct slice trim_end(struct slice slice)
{
    for (size_t size = 1; size <= 3 && size <= slice.length; size++) {
        if (space_at(slice.text + slice.length - size, size) == size) {
            slice.length -= size;
            size = 0;
        }
    }
    return slice;
}

static struct slice trim(struct slice slice)
{
    size_t size;

    while ((size = space_at(slice.text, slice.length)) > 0) {
        slice.text += size;
        slice.length -= size;
    }
    return trim_end(slice);
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

/* A conversation as it is written: parts of the template, in which special tokens count, and
 * contents, in which they do not. */
struct writer {
    struct text_part *parts;
    size_t count, capacity;
    bool failed; /* out of memory */
};

static void put(struct writer *writer, struct slice slice, bool parse_special)
{
    if (writer->count == writer->capacity) {
        size_t capacity = writer->capacity == 0 ? 64 : writer->capacity, bytes;
        struct text_part *parts = NULL;

        if (!__builtin_mul_overflow(capacity, 2, &capacity) &&
            !__builtin_mul_overflow(capacity, sizeof *parts, &bytes))
            parts = realloc(writer->parts, bytes);
        if (parts == NULL) {
            writer->failed = true;
            return;
        }
        writer->parts = parts;
        writer->capacity = capacity;
    }
    writer->parts[writer->count++] = (struct text_part){slice.text, slice.length, parse_special};
}

static void put_content(struct writer *writer, struct slice slice)
{
    put(writer, slice, false);
}

static void put_template(struct writer *writer, const char *text)
{
    put(writer, slice_of(text), true);
}

static void put_token(struct writer *writer, const struct tokenizer *tokenizer, int32_t id)
{
    size_t length;
    const char *text = tokenizer_text(tokenizer, id, &length);

    put(writer, (struct slice){text, length}, true);
}

/* ---- ChatML and Llama-3: blocks with a role ---- */

static void begin_block(const struct chat *chat, const char *role, struct writer *writer)
{
    put_template(writer, chat->kind == CHAT_CHATML ? "<|im_start|>" : "<|start_header_id|>");
    put_template(writer, role);
    if (chat->kind == CHAT_LLAMA3)
        put_template(writer, "<|end_header_id|>");
}

static void end_block(const struct chat *chat, struct writer *writer)
{
    put_template(writer, chat->kind == CHAT_CHATML ? "<|im_end|>\n" : "<|eot_id|>");
}

static void put_block(const struct chat *chat, const char *role, struct slice content,
                      struct writer *writer)
{
    begin_block(chat, role, writer);
    put_template(writer, chat->separator);
    put_content(writer, content);
    end_block(chat, writer);
}

static void put_system(const struct chat *chat, const char *system, struct writer *writer)
{
    struct slice content = {"", 0};

    if (chat->dates == NULL && system == NULL && chat->default_system == NULL)
        return;
    if (system != NULL)
        content = slice_of(system);
    else if (chat->default_system != NULL)
        content = slice_of(chat->default_system + strlen(chat->separator));
    if (chat->kind == CHAT_LLAMA3)
        content = trim(content);
    begin_block(chat, "system", writer);
    put_template(writer, chat->separator);
    if (chat->dates != NULL)
        put_template(writer, chat->dates);
    put_content(writer, content);
    end_block(chat, writer);
}

/* `past`: the user has spoken since; `last`: nothing follows. */
static void put_turn(const struct chat *chat, const struct chat_turn *turn, bool past, bool last,
                     struct writer *writer)
{
    struct slice content = {turn->text, turn->length}, thoughts;

    if (chat->kind == CHAT_LLAMA3)
        content = trim(content);
    if (turn->role == CHAT_USER) {
        put_block(chat, "user", content, writer);
        return;
    }
    if (chat->reasoning) {
        split_reasoning(&content, &thoughts);
        if (!past && (last || thoughts.length > 0)) {
            begin_block(chat, "assistant", writer);
            put_template(writer, chat->separator);
            put_template(writer, "<think>\n");
            put_content(writer, thoughts);
            put_template(writer, "\n</think>\n\n");
            put_content(writer, skip_newlines(content));
            end_block(chat, writer);
            return;
        }
    }
    put_block(chat, "assistant", content, writer);
}

static void put_blocks(const struct chat *chat, const char *system, const struct chat_turn *turns,
                       size_t turn_count, enum chat_answer answer, struct writer *writer)
{
    size_t last_user = turn_count;

    for (size_t i = 0; i < turn_count; i++) {
        if (turns[i].role == CHAT_USER)
            last_user = i;
    }
    if (chat->bos)
        put_token(writer, chat->tokenizer, tokenizer_bos(chat->tokenizer));
    put_system(chat, system, writer);
    for (size_t i = 0; i < turn_count; i++)
        put_turn(chat, &turns[i], i < last_user, i + 1 == turn_count, writer);
    if (answer == CHAT_ANSWER_NONE)
        return;
    begin_block(chat, "assistant", writer);
    put_template(writer, chat->kind == CHAT_CHATML ? chat->answer : chat->separator);
    if (answer == CHAT_ANSWER_DIRECT && chat->direct)
        put_template(writer, "<think>\n\n</think>\n\n");
}

/* ---- Llama-2 and Mistral: the user's turns in [INST] ---- */

static void put_user(const struct chat *chat, const char *system, const struct chat_turn *turn,
                     struct writer *writer)
{
    const struct brackets *brackets = &chat->brackets;
    struct slice content = {turn->text, turn->length}, system_end = slice_of(brackets->system_end);

    if (brackets->user_bos)
        put_token(writer, chat->tokenizer, tokenizer_bos(chat->tokenizer));
    put_template(writer, brackets->user_begin);
    if (system != NULL) {
        /* It is trimmed as one text, whose end is reached where there is no content. */
        if (brackets->user_trimmed) {
            content = trim_end(content);
            if (content.length == 0)
                system_end = trim_end(system_end);
        }
        put_template(writer, brackets->system_begin);
        put_content(writer, slice_of(system));
        put(writer, system_end, true);
    } else if (brackets->user_trimmed) {
        content = trim(content);
    }
    put_content(writer, content);
    put_template(writer, brackets->user_end);
}

static bool put_inst(const struct chat *chat, const char *system, const struct chat_turn *turns,
                     size_t turn_count, struct writer *writer, struct error *error)
{
    const struct brackets *brackets = &chat->brackets;

    if (system != NULL && brackets->system == SYSTEM_REFUSED)
        return error_set(error, "chat: the model's template takes no system prompt");
    if (chat->bos)
        put_token(writer, chat->tokenizer, tokenizer_bos(chat->tokenizer));
    if (system != NULL && brackets->system == SYSTEM_BLOCK) {
        put_template(writer, brackets->system_begin);
        put_content(writer, slice_of(system));
        put_template(writer, brackets->system_end);
    }
    for (size_t i = 0; i < turn_count; i++) {
        const bool placed = (brackets->system == SYSTEM_FIRST_USER && i == 0) ||
                            (brackets->system == SYSTEM_LAST_USER && i + 1 == turn_count);
        struct slice content = {turns[i].text, turns[i].length};

        if (brackets->alternate && (turns[i].role == CHAT_USER) != (i % 2 == 0))
            return error_set(error, "chat: the model's template wants the user and the assistant "
                                    "to speak in turn, the user first");
        if (turns[i].role == CHAT_USER) {
            put_user(chat, placed ? system : NULL, &turns[i], writer);
            continue;
        }
        put_template(writer, brackets->answer_begin);
        put_content(writer, brackets->answer_trimmed ? trim(content) : content);
        put_template(writer, brackets->answer_end);
        put_token(writer, chat->tokenizer, chat->end);
        put_template(writer, brackets->after_answer);
    }
    return true;
}

bool chat_format(const struct chat *chat, const char *system, const struct chat_turn *turns,
                 size_t turn_count, enum chat_answer answer, struct token_list *list,
                 struct error *error)
{
    struct writer writer = {0};
    bool done = false;

    if (chat->kind <= CHAT_UNKNOWN)
        return error_set(error, "chat template: missing, or none of %s", CHAT_NAMES);
    if (chat->kind == CHAT_CHATML || chat->kind == CHAT_LLAMA3)
        put_blocks(chat, system, turns, turn_count, answer, &writer);
    else if (!put_inst(chat, system, turns, turn_count, &writer, error))
        goto out;
    if (writer.failed)
        error_set(error, "chat: out of memory");
    else
        done = tokenizer_encode_parts(chat->tokenizer, writer.parts, writer.count, list, error);
out:
    free(writer.parts);
    return done;
}
