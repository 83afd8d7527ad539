/* SPDX-License-Identifier: MIT */
/* What happens to text before byte-pair encoding: UTF-8 checks, NFC, the split into pre-tokens. */
#include "pretokenizer.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

/* Unicode's White_Space, which is what \s means to Hugging Face tokenizers. PCRE2's own \s adds
 * U+180E. */
#define SPACE                                                                                      \
    "\\t-\\r\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}" \
    "\\x{3000}"

/* The reference knows Unicode 16; PCRE2 10.42 knows Unicode 14. These are the characters that came
 * between, so that ids do not depend on the PCRE2 that is installed. */
#define LETTER                                                                                     \
    "\\p{L}\\x{1c89}\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}"          \
    "\\x{10d4a}-\\x{10d65}\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}\\x{11240}"          \
    "\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}\\x{113d3}" \
    "\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}\\x{11f12}-\\x{11f33}\\x{1342f}"          \
    "\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}\\x{16d40}-\\x{16d6c}"         \
    "\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}\\x{1e030}-\\x{1e06d}\\x{1e4d0}-\\x{"      \
    "1e4eb}"                                                                                       \
    "\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}"
#define NUMBER                                                                                     \
    "\\p{N}\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11f50}-\\x{11f59}"   \
    "\\x{16130}-\\x{16139}\\x{16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}\\x{1d2c0}-\\x{1d2d3}"         \
    "\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}"

/* Letters and marks but for small letters, and but for capital ones. */
#define NOT_SMALL                                                                                  \
    "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}\\x{897}\\x{cf3}\\x{ece}\\x{1c89}\\x{a7cb}\\x{a7cc}"        \
    "\\x{a7da}\\x{a7dc}\\x{105c0}-\\x{105f3}\\x{10d4a}-\\x{10d65}\\x{10d69}-\\x{10d6d}"            \
    "\\x{10d6f}\\x{10ec2}-\\x{10ec4}\\x{10efc}-\\x{10eff}\\x{1123f}-\\x{11241}"                    \
    "\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}-\\x{113c0}"          \
    "\\x{113c2}\\x{113c5}\\x{113c7}-\\x{113ca}\\x{113cc}-\\x{113d3}\\x{113e1}\\x{113e2}"           \
    "\\x{11bc0}-\\x{11be0}\\x{11f00}-\\x{11f10}\\x{11f12}-\\x{11f3a}\\x{11f3e}-\\x{11f42}"         \
    "\\x{11f5a}\\x{1342f}\\x{13440}-\\x{13455}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1612f}"          \
    "\\x{16d40}-\\x{16d6c}\\x{18cff}\\x{1b132}\\x{1b155}\\x{1e030}-\\x{1e06d}\\x{1e08f}"           \
    "\\x{1e4d0}-\\x{1e4ef}\\x{1e5d0}-\\x{1e5f0}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}"                    \
    "\\x{31350}-\\x{323af}"
#define NOT_CAPITAL                                                                                \
    "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}\\x{897}\\x{cf3}\\x{ece}\\x{1c8a}\\x{a7cd}\\x{a7db}"               \
    "\\x{105c0}-\\x{105f3}\\x{10d4a}-\\x{10d4f}\\x{10d69}-\\x{10d6d}\\x{10d6f}-\\x{10d85}"         \
    "\\x{10ec2}-\\x{10ec4}\\x{10efc}-\\x{10eff}\\x{1123f}-\\x{11241}\\x{11380}-\\x{11389}"         \
    "\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}-\\x{113c0}\\x{113c2}\\x{113c5}"           \
    "\\x{113c7}-\\x{113ca}\\x{113cc}-\\x{113d3}\\x{113e1}\\x{113e2}\\x{11bc0}-\\x{11be0}"          \
    "\\x{11f00}-\\x{11f10}\\x{11f12}-\\x{11f3a}\\x{11f3e}-\\x{11f42}\\x{11f5a}\\x{1342f}"          \
    "\\x{13440}-\\x{13455}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1612f}\\x{16d40}-\\x{16d6c}"         \
    "\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}\\x{1e030}-\\x{1e06d}\\x{1e08f}"           \
    "\\x{1e4d0}-\\x{1e4ef}\\x{1e5d0}-\\x{1e5f0}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}"                    \
    "\\x{31350}-\\x{323af}"
/* Punctuation, with the symbols that GGUF's default cuts out like it. */
#define PUNCTUATION                                                                                \
    "\\p{P}$+<=>^~|\\x{1b4e}\\x{1b4f}\\x{1b7f}\\x{10d6e}\\x{113d4}\\x{113d5}\\x{113d7}"            \
    "\\x{113d8}\\x{11b00}-\\x{11b09}\\x{11be1}\\x{11f43}-\\x{11f4f}\\x{16d6d}-\\x{16d6f}"          \
    "\\x{1e5ff}"

/* SmolLM's numbers are not found by a regular expression there, but by a table of Unicode 17. */
#define SMOLLM_NUMBER NUMBER "\\x{11de0}-\\x{11de9}\\x{16ff4}-\\x{16ff6}"

/* Llama-3's and Qwen2's expressions differ in how many digits make one piece. */
#define SPLIT_PUBLISHED(repeat)                                                                    \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" repeat                     \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define SPLIT_PCRE2(repeat)                                                                        \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n" LETTER NUMBER "]?[" LETTER "]+|[" NUMBER "]" repeat    \
    "| ?[^" SPACE LETTER NUMBER "]+[\\r\\n]*|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE        \
    "])|[" SPACE "]+"

static const struct pretokenizer_definition {
    enum pretokenizer_kind kind;
    const char *names[4];
    const char *published; /* as tokenizer.json has it; NULL where it is not one expression */
    const char *pcre2;
} definitions[] = {
    {PRETOKENIZER_METASPACE, {NULL}, NULL, " [^ ]*|[^ ]+"},
    /* Four steps in one: punctuation and some symbols are cut out first; GPT-2's expression runs on
     * what lies between, so that for the lookahead they end the text; then numbers lose the space
     * before them, and every three ASCII digits are cut out of a number. */
    {PRETOKENIZER_DEFAULT,
     {"default"},
     NULL,
     "[" PUNCTUATION "]+| ?[" LETTER "]+|[0-9]{3}|[" NUMBER "](?:(?![0-9]{3})[" NUMBER "])*"
     "| ?[^" SPACE LETTER NUMBER PUNCTUATION "]+|[" SPACE "]+(?![^" SPACE PUNCTUATION "])|[" SPACE
     "]+"},
    {PRETOKENIZER_GPT2,
     {"gpt-2", "phi-2", "mellum"},
     NULL,
     "'(?:s|t|re|ve|m|ll|d)| ?[" LETTER "]+| ?[" NUMBER "]+| ?[^" SPACE LETTER NUMBER "]+|[" SPACE
     "]+(?![^" SPACE "])|[" SPACE "]+"},
    /* SmolLM cuts at every number first and runs GPT-2's expression on what lies between, which is
     * one expression in which a number ends the text for the lookahead. */
    {PRETOKENIZER_SMOLLM,
     {"smollm", "smollm2", "starcoder", "refact"},
     NULL,
     "[" SMOLLM_NUMBER "]|'(?:s|t|re|ve|m|ll|d)| ?[" LETTER "]+| ?[^" SPACE LETTER SMOLLM_NUMBER
     "]+|[" SPACE "]+(?![^" SPACE SMOLLM_NUMBER "])|[" SPACE "]+"},
    {PRETOKENIZER_LLAMA3,
     {"llama-bpe", "llama3", "llama-v3"},
     SPLIT_PUBLISHED("{1,3}"),
     SPLIT_PCRE2("{1,3}")},
    {PRETOKENIZER_QWEN2, {"qwen2", "deepseek-r1-qwen"}, SPLIT_PUBLISHED(""), SPLIT_PCRE2("")},
    {PRETOKENIZER_TEKKEN,
     {"tekken"},
     "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
     "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
     "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     "[^\\r\\n" LETTER NUMBER "]?[" NOT_SMALL "]*[" NOT_CAPITAL "]+|[^\\r\\n" LETTER NUMBER
     "]?[" NOT_SMALL "]+[" NOT_CAPITAL "]*|[" NUMBER "]| ?[^" SPACE LETTER NUMBER "]+[\\r\\n/]*"
     "|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"},
};

#define N_DEFINITIONS (sizeof definitions / sizeof definitions[0])
#define N_NAMES       (sizeof definitions[0].names / sizeof definitions[0].names[0])

struct pretokenizer {
    pcre2_code *code; /* NULL: nothing is split */
    pcre2_match_context *match_context;
};

int utf8_sequence(const char *text, size_t length)
{
    const unsigned char *bytes = (const unsigned char *)text;
    unsigned char first = bytes[0], low = 0x80, high = 0xbf;
    int size;

    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first <= 0xdf) {
        size = 2;
    } else if (first >= 0xe0 && first <= 0xef) {
        size = 3;
        if (first == 0xe0)
            low = 0xa0;
        if (first == 0xed)
            high = 0x9f;
    } else if (first >= 0xf0 && first <= 0xf4) {
        size = 4;
        if (first == 0xf0)
            low = 0x90;
        if (first == 0xf4)
            high = 0x8f;
    } else {
        return -1;
    }
    for (int i = 1; i < size; i++) {
        if ((size_t)i == length)
            return 0;
        if (bytes[i] < low || bytes[i] > high)
            return -i;
        low = 0x80;
        high = 0xbf;
    }
    return size;
}

size_t utf8_valid_prefix(const char *text, size_t length)
{
    size_t offset = 0;

    while (offset < length) {
        int size = utf8_sequence(text + offset, length - offset);

        if (size <= 0)
            break;
        offset += (size_t)size;
    }
    return offset;
}

/* The bytes at `text`, which does not begin with a valid sequence, that belong together. */
static size_t invalid_length(const char *text, size_t length)
{
    int size = utf8_sequence(text, length);

    return size == 0 ? length : (size_t)-size;
}

static int combining_class(utf8proc_int32_t code_point)
{
    return utf8proc_get_property(code_point)->combining_class;
}

/* Sorts the run of combining marks by their class, stably. Counting, because a run may be as long
 * as the text. */
static void sort_marks(utf8proc_int32_t *marks, size_t count, utf8proc_int32_t *scratch)
{
    size_t starts[257] = {0};
    bool sorted = true;

    for (size_t i = 1; i < count && sorted; i++)
        sorted = combining_class(marks[i - 1]) <= combining_class(marks[i]);
    if (sorted)
        return;
    for (size_t i = 0; i < count; i++)
        starts[(combining_class(marks[i]) & 0xff) + 1]++;
    for (size_t i = 1; i < 257; i++)
        starts[i] += starts[i - 1];
    for (size_t i = 0; i < count; i++)
        scratch[starts[combining_class(marks[i]) & 0xff]++] = marks[i];
    memcpy(marks, scratch, count * sizeof *marks);
}

/* No canonical decomposition has more code points for a byte of UTF-8 than that of U+01D5: 2 bytes,
 * 3 code points. */
#define DECOMPOSED_PER_BYTE 2

/* Appends the NFC of valid UTF-8 to `result`, which has room for it. utf8proc's own decomposition
 * orders marks in quadratic time, so only its tables and its composition are used. */
static size_t append_nfc(const char *text, size_t length, utf8proc_int32_t *points,
                         utf8proc_int32_t *scratch, char *result)
{
    const utf8proc_option_t options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    size_t count = 0, written = 0;
    utf8proc_ssize_t composed;

    for (size_t offset = 0; offset < length;) {
        utf8proc_int32_t point, decomposed[8];
        utf8proc_ssize_t size, parts;
        int boundary = 0;

        size = utf8proc_iterate((const utf8proc_uint8_t *)text + offset,
                                (utf8proc_ssize_t)(length - offset), &point);
        parts = utf8proc_decompose_char(point, decomposed, 8, options, &boundary);
        memcpy(points + count, decomposed, (size_t)parts * sizeof *points);
        count += (size_t)parts;
        offset += (size_t)size;
    }
    for (size_t begin = 0; begin < count;) {
        size_t end = begin;

        while (end < count && combining_class(points[end]) != 0)
            end++;
        sort_marks(points + begin, end - begin, scratch);
        begin = end + 1;
    }
    composed = utf8proc_normalize_utf32(points, (utf8proc_ssize_t)count, options);
    for (utf8proc_ssize_t i = 0; i < composed; i++)
        written += (size_t)utf8proc_encode_char(points[i], (utf8proc_uint8_t *)result + written);
    return written;
}

bool text_to_nfc(const char *text, size_t length, char **result, size_t *result_length,
                 struct error *error)
{
    utf8proc_int32_t *points = NULL, *scratch = NULL;
    char *normal = NULL;
    size_t most, bytes, offset = 0, written = 0;
    bool plain = true, done = false;

    *result = NULL;
    *result_length = 0;
    /* Bytes from 0xcc on begin U+0300 and what follows; nothing below that composes. */
    for (size_t i = 0; i < length && plain; i++)
        plain = (unsigned char)text[i] < 0xcc;
    if (plain)
        return true;

    if (__builtin_mul_overflow(length, DECOMPOSED_PER_BYTE, &most) ||
        __builtin_mul_overflow(most, sizeof *points, &bytes) || bytes > PTRDIFF_MAX) {
        error_set(error, "text: %zu bytes are too many to normalize", length);
        goto out;
    }
    points = malloc(bytes);
    scratch = malloc(bytes);
    normal = malloc(bytes);
    if (points == NULL || scratch == NULL || normal == NULL) {
        error_set(error, "text: out of memory while normalizing %zu bytes", length);
        goto out;
    }
    while (offset < length) {
        size_t valid = utf8_valid_prefix(text + offset, length - offset);

        written += append_nfc(text + offset, valid, points, scratch, normal + written);
        offset += valid;
        if (offset < length) {
            size_t invalid = invalid_length(text + offset, length - offset);

            memcpy(normal + written, text + offset, invalid);
            written += invalid;
            offset += invalid;
        }
    }
    *result = normal;
    *result_length = written;
    normal = NULL;
    done = true;
out:
    free(points);
    free(scratch);
    free(normal);
    return done;
}

size_t metaspaces_to_spaces(const char *text, size_t length, char *result)
{
    size_t written = 0;

    for (size_t i = 0; i < length; i++) {
        if (length - i >= 3 && memcmp(text + i, "\xe2\x96\x81", 3) == 0) {
            result[written++] = ' ';
            i += 2;
        } else {
            result[written++] = text[i];
        }
    }
    return written;
}

bool pretokenizer_by_name(const char *name, size_t length, enum pretokenizer_kind *kind)
{
    for (size_t i = 0; i < N_DEFINITIONS; i++) {
        for (size_t j = 0; j < N_NAMES && definitions[i].names[j] != NULL; j++) {
            if (strlen(definitions[i].names[j]) == length &&
                memcmp(definitions[i].names[j], name, length) == 0) {
                *kind = definitions[i].kind;
                return true;
            }
        }
    }
    return false;
}

bool pretokenizer_by_regex(const char *regex, enum pretokenizer_kind *kind)
{
    for (size_t i = 0; i < N_DEFINITIONS; i++) {
        if (definitions[i].published != NULL && strcmp(definitions[i].published, regex) == 0) {
            *kind = definitions[i].kind;
            return true;
        }
    }
    return false;
}

bool pretokenizer_open(enum pretokenizer_kind kind, struct pretokenizer **pretokenizer,
                       struct error *error)
{
    struct pretokenizer *opened = NULL;
    PCRE2_SIZE where;
    int code;

    *pretokenizer = NULL;
    opened = calloc(1, sizeof *opened);
    if (opened == NULL) {
        error_set(error, "pre-tokenizer: out of memory");
        goto failed;
    }
    if (kind == PRETOKENIZER_NONE) {
        *pretokenizer = opened;
        return true;
    }
    for (size_t i = 0; i < N_DEFINITIONS; i++) {
        if (definitions[i].kind != kind)
            continue;
        opened->code = pcre2_compile((PCRE2_SPTR)definitions[i].pcre2, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &where, NULL);
    }
    opened->match_context = pcre2_match_context_create(NULL);
    if (opened->code == NULL || opened->match_context == NULL) {
        error_set(error, "pre-tokenizer: PCRE2 does not compile the expression (built without "
                         "Unicode, or out of memory)");
        goto failed;
    }
    /* The expressions backtrack at most once over a run of white space, so the work is linear in
     * the text; the default limits are below what a text of many megabytes needs. */
    pcre2_set_match_limit(opened->match_context, UINT32_MAX);
    pcre2_set_heap_limit(opened->match_context, UINT32_MAX);
    /* Without a JIT the interpreter gives the same matches. */
    (void)pcre2_jit_compile(opened->code, PCRE2_JIT_COMPLETE);
    *pretokenizer = opened;
    return true;
failed:
    pretokenizer_close(opened);
    return false;
}

void pretokenizer_close(struct pretokenizer *pretokenizer)
{
    if (pretokenizer == NULL)
        return;
    pcre2_match_context_free(pretokenizer->match_context);
    pcre2_code_free(pretokenizer->code);
    free(pretokenizer);
}

static bool split_valid(const struct pretokenizer *pretokenizer, pcre2_match_data *match,
                        const char *text, size_t length, pretokenizer_visit *visit, void *context,
                        struct error *error)
{
    for (size_t offset = 0; offset < length;) {
        /* The text was checked once; checking again at every match would be quadratic. */
        int code = pcre2_match(pretokenizer->code, (PCRE2_SPTR)text, length, offset,
                               PCRE2_NO_UTF_CHECK, match, pretokenizer->match_context);
        size_t end;

        if (code < 0) {
            PCRE2_UCHAR message[128] = "";

            pcre2_get_error_message(code, message, sizeof message);
            return error_set(error, "pre-tokenizer: byte %zu of the text: %s", offset,
                             (const char *)message);
        }
        end = pcre2_get_ovector_pointer(match)[1];
        if (!visit(context, text + offset, end - offset, error))
            return false;
        offset = end;
    }
    return true;
}

bool pretokenizer_split(const struct pretokenizer *pretokenizer, const char *text, size_t length,
                        pretokenizer_visit *visit, void *context, struct error *error)
{
    pcre2_match_data *match;
    size_t offset = 0;
    bool done = false;

    if (pretokenizer->code == NULL)
        return length == 0 || visit(context, text, length, error);
    match = pcre2_match_data_create(1, NULL);
    if (match == NULL) {
        error_set(error, "pre-tokenizer: out of memory");
        goto out;
    }
    while (offset < length) {
        size_t valid = utf8_valid_prefix(text + offset, length - offset);

        if (!split_valid(pretokenizer, match, text + offset, valid, visit, context, error))
            goto out;
        offset += valid;
        if (offset < length) {
            size_t invalid = invalid_length(text + offset, length - offset);

            if (!visit(context, text + offset, invalid, error))
                goto out;
            offset += invalid;
        }
    }
    done = true;
out:
    pcre2_match_data_free(match);
    return done;
}
