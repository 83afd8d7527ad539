/* SPDX-License-Identifier: MIT */
/* What can be read off the text of a chat template (Jinja) without running it. */
#include "chat_template.h"

#include <stdlib.h>
#include <string.h>

/* ---- Constants ---- */

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

bool template_constant(const char *template, const char *from, const char *begin, const char *stop,
                       char **constant, struct error *error)
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

/* ---- Tags in one spelling ---- */

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

/* The length of the ['name'] or ["name"] at `text`; 0 if it is none. */
static size_t subscript(const char *text)
{
    size_t length = 2;

    if (text[0] != '[' || (text[1] != '\'' && text[1] != '"'))
        return 0;
    while (is_name(text[length]))
        length++;
    return length > 2 && text[length] == text[1] && text[length + 1] == ']' ? length + 2 : 0;
}

/* Copies the tag that begins at *text ("{{" or "{%") to *code; *text is then behind it. False if it
 * has no end. */
static bool copy_tag(const char **text, char **code)
{
    const char *in = *text;
    const char close = in[1] == '{' ? '}' : '%';
    char *out = *code;

    *out++ = *in++;
    *out++ = *in++;
    in += *in == '-';
    while (*in != '\0') {
        size_t length = subscript(in);

        if (length > 0) {
            *out++ = '.';
            memcpy(out, in + 2, length - 4);
            out += length - 4;
            in += length;
        } else if (*in == '\'' || *in == '"') {
            const char quote = *in++;

            *out++ = '\'';
            while (*in != '\0' && *in != quote) {
                if (*in == '\'')
                    *out++ = '\\';
                else if (*in == '\\' && in[1] != '\0')
                    *out++ = *in++;
                *out++ = *in++;
            }
            if (*in == '\0')
                return false;
            *out++ = '\'';
            in++;
        } else if (in[0] == close && in[1] == '}') {
            *out++ = *in++;
            *out++ = *in++;
            *text = in;
            *code = out;
            return true;
        } else if (strchr(" \t\r\n", *in) != NULL ||
                   (in[0] == '-' && in[1] == close && in[2] == '}')) {
            in++;
        } else {
            *out++ = *in++;
        }
    }
    return false;
}

/* Whether the text between two tags is written, by the rules that all users of chat templates set:
 * the newline after a block goes, and the spaces before one that begins a line. `end` is where the
 * next tag begins, or the end of the template; `begins_line`: the template begins with the text. */
static bool is_written(const char *text, const char *end, bool begins_line, bool after_block,
                       bool after_dash)
{
    const bool last = *end == '\0', before_block = !last && end[1] != '{';
    const bool dash = after_dash || (!last && end[2] == '-');

    if (after_block && text < end && *text == '\n') {
        text++;
        begins_line = true;
    }
    if (last && text < end && end[-1] == '\n')
        end--;
    if (before_block) {
        const char *line = end;

        while (line > text && (line[-1] == ' ' || line[-1] == '\t'))
            line--;
        if (line == text ? begins_line : line[-1] == '\n')
            end = line;
    }
    if (dash) {
        while (text < end && strchr(" \t\r\n", *text) != NULL)
            text++;
    }
    return text < end;
}

bool template_code(const char *template, char **code, struct error *error)
{
    const char *const begin = template;
    bool after_block = false, after_dash = false, plain = true;
    char *written;

    /* An apostrophe may have to be escaped. */
    *code = written = malloc(2 * strlen(template) + 1);
    if (written == NULL)
        return error_set(error, "chat template: out of memory");
    while (plain && *template != '\0') {
        const char *tag = template;

        while (*tag != '\0' && !(tag[0] == '{' && tag[1] != '\0' && strchr("{%#", tag[1]) != NULL))
            tag++;
        plain = !is_written(template, tag, template == begin, after_block, after_dash);
        template = tag;
        if (*tag == '\0')
            break;
        after_block = tag[1] != '{';
        if (tag[1] == '#') {
            template = strstr(tag, "#}");
            plain = plain && template != NULL;
            if (plain)
                template += 2;
        } else {
            plain = plain && copy_tag(&template, &written);
        }
        after_dash = plain && template[-3] == '-';
    }
    *written = '\0';
    if (!plain) {
        free(*code);
        *code = NULL;
    }
    return true;
}

/* ---- Sums ---- */

/* Reads the string constant at `text`, quotes and all; false if it is too long. */
static bool read_text(const char *text, size_t length, char *constant)
{
    size_t written = 0;

    for (size_t i = 1; i + 1 < length; i++) {
        if (written + 1 == MAX_TERM_TEXT)
            return false;
        if (text[i] == '\\') {
            i++;
            constant[written++] = text[i] == 'n' ? '\n' : text[i];
        } else {
            constant[written++] = text[i];
        }
    }
    constant[written] = '\0';
    return true;
}

static struct term read_term(const char *text, size_t length)
{
    static const struct {
        const char *text;
        enum term_kind kind;
    } known[] = {
        {"bos_token", TERM_BOS},
        {"eos_token", TERM_EOS},
        {"system_message", TERM_SYSTEM},
        {"content", TERM_CONTENT},
        {"message.content", TERM_CONTENT},
        {"content.strip()", TERM_TRIMMED},
        {"message.content.strip()", TERM_TRIMMED},
        {"content|trim", TERM_TRIMMED},
        {"message.content|trim", TERM_TRIMMED},
    };
    struct term term = {TERM_OTHER, ""};

    if (length >= 2 && text[0] == '\'' && memchr(text + 1, '\'', length - 1) == text + length - 1) {
        if (read_text(text, length, term.text))
            term.kind = TERM_TEXT;
        return term;
    }
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strlen(known[i].text) == length && memcmp(known[i].text, text, length) == 0)
            term.kind = known[i].kind;
    }
    return term;
}

size_t template_next_output(const char **code, struct term terms[MAX_TERMS])
{
    const char *begin = *code, *end;
    size_t count = 0;

    /* Strings are stepped over: they may hold what ends or begins a tag. */
    for (bool quoted = false; *begin != '\0' && (quoted || strncmp(begin, "{{", 2) != 0); begin++) {
        if (quoted && *begin == '\\' && begin[1] != '\0')
            begin++;
        else if (*begin == '\'')
            quoted = !quoted;
    }
    if (*begin == '\0') {
        *code = begin;
        return 0;
    }
    begin += 2;
    for (end = begin;; end++) {
        if (*end == '\'') {
            for (end++; *end != '\0' && *end != '\''; end++)
                end += *end == '\\' && end[1] != '\0';
        }
        if (*end == '\0') {
            *code = end;
            return 0;
        }
        if (*end == '+' || strncmp(end, "}}", 2) == 0) {
            if (count < MAX_TERMS)
                terms[count++] = read_term(begin, (size_t)(end - begin));
            begin = end + 1;
        }
        if (strncmp(end, "}}", 2) == 0)
            break;
    }
    *code = end + 2;
    return count;
}
