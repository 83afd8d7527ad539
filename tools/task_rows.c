/* SPDX-License-Identifier: MIT */
/* Makes test rows in RULER's format: a prompt of an exact length with something to be found in it.
 */
#define _GNU_SOURCE /* vasprintf */
#include "task_rows.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "task_text.h"

#define PAIRS       ((size_t)TASK_ADJECTIVES * TASK_NOUNS)
#define NEEDLES     5
#define CODED_WORDS 60

/* Sentences that padding may be taken from. */
#define CONTINUATION 64

/* Enough for a pair of an adjective and a noun, and for a UUID. */
#define NAME_BYTES  32
#define VALUE_BYTES 40

/* What is drawn once for a row, whatever its length. */
struct plan {
    enum task task;
    uint64_t text_seed; /* of the text around the needles */

    /* Sentences to be found, each at its share (of 2^32) of the text, in ascending order. */
    size_t needle_count;
    char *needles[NEEDLES];
    uint32_t places[NEEDLES];

    /* Names are pairs of an adjective and a noun, no pair twice: the i-th is first + i stride. */
    size_t first, stride;
    char *question;
    struct task_row row; /* but for the input */
};

static const char *const names[TASKS] = {
    [TASK_S1] = "s1",
    [TASK_MULTI_KEY] = "multi-key",
    [TASK_UUID] = "uuid",
    [TASK_MULTI_QUERY] = "multi-query",
    [TASK_MULTI_VALUE] = "multi-value",
    [TASK_VARIABLE_TRACKING] = "variable-tracking",
    [TASK_COMMON_WORDS] = "common-words",
    [TASK_FREQUENT_WORDS] = "frequent-words",
};

bool task_parse(const char *what, const char *name, enum task *task, struct error *error)
{
    for (int i = 0; i < TASKS; i++) {
        if (strcmp(names[i], name) == 0) {
            *task = (enum task)i;
            return true;
        }
    }
    return error_set(error,
                     "%s: \"%.40s\" is not one of s1, multi-key, uuid, multi-query, "
                     "multi-value, variable-tracking, common-words, frequent-words",
                     what, name);
}

void task_row_free(struct task_row *row)
{
    free(row->input);
    free(row->gen_prefix);
    for (size_t i = 0; i < row->output_count; i++)
        free(row->outputs[i]);
    *row = (struct task_row){0};
}

/* ---- What is asked -----------------------------------------------------------------------------
 */

/* NULL without memory, or if nothing was written. */
static char *finish(struct writing *writing)
{
    if (!writing->failed)
        return writing->text;
    free(writing->text);
    return NULL;
}

static char *print(const char *format, ...) __attribute__((format(printf, 1, 2)));

static char *print(const char *format, ...)
{
    va_list arguments;
    char *text;

    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) < 0)
        text = NULL;
    va_end(arguments);
    return text;
}

static void name_pair(const struct plan *plan, size_t i, char name[NAME_BYTES])
{
    size_t pair = (plan->first + i * plan->stride) % PAIRS;

    snprintf(name, NAME_BYTES, "%s-%s", task_adjectives[pair % TASK_ADJECTIVES],
             task_nouns[pair / TASK_ADJECTIVES]);
}

static unsigned long seven_digits(uint64_t *random)
{
    return 1000000ul + (unsigned long)random_below(random, 9000000);
}

static void draw_value(const struct plan *plan, uint64_t *random, char value[VALUE_BYTES])
{
    uint64_t high, low;

    if (plan->task != TASK_UUID) {
        snprintf(value, VALUE_BYTES, "%lu", seven_digits(random));
        return;
    }
    high = random_next(random);
    low = random_next(random);
    snprintf(value, VALUE_BYTES, "%08lx-%04lx-4%03lx-%04lx-%012llx", (unsigned long)(high >> 32),
             (unsigned long)(high >> 16 & 0xffff), (unsigned long)(high & 0xfff),
             (unsigned long)(0x8000 | (low >> 48 & 0x3fff)),
             (unsigned long long)(low & 0xffffffffffff));
}

static int compare_places(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

static void draw_places(struct plan *plan, size_t count, uint64_t *random)
{
    plan->needle_count = count;
    for (size_t i = 0; i < count; i++)
        plan->places[i] = (uint32_t)(random_next(random) >> 32);
    qsort(plan->places, count, sizeof *plan->places, compare_places);
}

static void add_output(struct plan *plan, const char *output)
{
    plan->row.outputs[plan->row.output_count++] = strdup(output);
}

/* One value of one name. */
static void plan_single(struct plan *plan, uint64_t *random)
{
    const char *what = plan->task == TASK_UUID ? "identifier" : "number";
    char name[NAME_BYTES], value[VALUE_BYTES];

    name_pair(plan, 0, name);
    draw_value(plan, random, value);
    draw_places(plan, 1, random);
    plan->needles[0] = print("The secret %s for %s is: %s.", what, name, value);
    plan->question = print("What is the secret %s for %s that is written in the note?", what, name);
    plan->row.gen_prefix = print("The secret %s for %s that is written in the note is", what, name);
    add_output(plan, value);
}

/* Four values, of four names or of one. */
static void plan_several(struct plan *plan, uint64_t *random)
{
    enum { COUNT = 4 };
    char list[COUNT * (NAME_BYTES + 5)];
    size_t length = 0;

    draw_places(plan, COUNT, random);
    for (size_t i = 0; i < COUNT; i++) {
        const bool one_name = plan->task == TASK_MULTI_VALUE;
        char name[NAME_BYTES], value[VALUE_BYTES];

        name_pair(plan, one_name ? 0 : i, name);
        draw_value(plan, random, value);
        plan->needles[i] = print("A secret number for %s is: %s.", name, value);
        if (i == 0 || !one_name)
            length += (size_t)snprintf(list + length, sizeof list - length, "%s%s",
                                       i == 0          ? ""
                                       : i + 1 < COUNT ? ", "
                                                       : " and ",
                                       name);
        add_output(plan, value);
    }
    plan->question =
        print("What are all the secret numbers for %s that are written in the note?", list);
    plan->row.gen_prefix =
        print("The secret numbers for %s that are written in the note are", list);
}

/* Five names with one number. */
static void plan_tracking(struct plan *plan, uint64_t *random)
{
    unsigned long value = 10000ul + (unsigned long)random_below(random, 90000);
    char drawers[NEEDLES][6];

    draw_places(plan, NEEDLES, random);
    for (size_t i = 0; i < NEEDLES; i++) {
        bool taken = true;

        while (taken) {
            for (size_t letter = 0; letter < 5; letter++)
                drawers[i][letter] = (char)('A' + random_below(random, 26));
            drawers[i][5] = '\0';
            taken = false;
            for (size_t other = 0; other < i; other++)
                taken |= strcmp(drawers[other], drawers[i]) == 0;
        }
        if (i == 0)
            plan->needles[i] = print("Drawer %s holds the number %lu.", drawers[i], value);
        else
            plan->needles[i] =
                print("Drawer %s holds the same number as drawer %s.", drawers[i], drawers[i - 1]);
        add_output(plan, drawers[i]);
    }
    plan->question = print("Which five drawers hold the number %lu?", value);
    plan->row.gen_prefix = print("The five drawers that hold the number %lu are", value);
}

/* Three syllables of a consonant and a vowel. The first CODED_WORDS differ from each other. */
static void coded_word(size_t i, uint64_t seed, char word[7])
{
    static const char consonants[] = "bdfgklmnprstvz", vowels[] = "aeiou";
    enum {
        SYLLABLES = (sizeof consonants - 1) * (sizeof vowels - 1),
        WORDS = SYLLABLES * SYLLABLES * SYLLABLES
    };
    /* A step through all words: a prime that does not divide their number. */
    size_t number = (size_t)(seed % WORDS + i * 104729) % WORDS;

    for (size_t place = 0; place < 3; place++, number /= SYLLABLES) {
        word[2 * place] = consonants[number % SYLLABLES / (sizeof vowels - 1)];
        word[2 * place + 1] = vowels[number % (sizeof vowels - 1)];
    }
    word[6] = '\0';
}

static void plan_words(struct plan *plan)
{
    if (plan->task == TASK_COMMON_WORDS) {
        for (size_t i = 0; i < 10; i++)
            add_output(plan, task_nouns[(plan->first + i * plan->stride) % TASK_NOUNS]);
        plan->question = strdup("Which ten words occur most often in the list?");
        plan->row.gen_prefix = strdup("The ten words that occur most often in the list are: 1.");
        return;
    }
    for (size_t i = 0; i < 3; i++) {
        char word[7];

        coded_word(i, plan->text_seed, word);
        add_output(plan, word);
    }
    plan->question = strdup("Which three words occur most often in the message?");
    plan->row.gen_prefix = strdup("The three words that occur most often in the message are");
}

/* Whether memory sufficed for all of it. */
static bool is_complete(const struct plan *plan)
{
    bool complete = plan->question != NULL && plan->row.gen_prefix != NULL;

    for (size_t i = 0; i < plan->needle_count; i++)
        complete &= plan->needles[i] != NULL;
    for (size_t i = 0; i < plan->row.output_count; i++)
        complete &= plan->row.outputs[i] != NULL;
    return complete;
}

static bool make_plan(enum task task, uint64_t seed, size_t index, struct plan *plan,
                      struct error *error)
{
    /* Seeds that are close give rows that have nothing in common. */
    uint64_t random = random_next(&seed) ^ (uint64_t)task << 56;

    random = random_next(&random) + index;
    random = random_next(&random);
    *plan = (struct plan){.task = task, .text_seed = random_next(&random)};
    plan->first = random_below(&random, PAIRS);
    plan->stride = 6 * random_below(&random, PAIRS / 6) + 1;
    switch (task) {
    case TASK_S1:
    case TASK_MULTI_KEY:
    case TASK_UUID:
        plan_single(plan, &random);
        break;
    case TASK_MULTI_QUERY:
    case TASK_MULTI_VALUE:
        plan_several(plan, &random);
        break;
    case TASK_VARIABLE_TRACKING:
        plan_tracking(plan, &random);
        break;
    case TASK_COMMON_WORDS:
    case TASK_FREQUENT_WORDS:
    case TASKS:
        plan_words(plan);
        break;
    }
    return is_complete(plan) || error_set(error, "out of memory for a row");
}

static void free_plan(struct plan *plan)
{
    for (size_t i = 0; i < NEEDLES; i++)
        free(plan->needles[i]);
    free(plan->question);
    task_row_free(&plan->row);
}

/* ---- The text ----------------------------------------------------------------------------------
 */

/* The fewest and the most pieces that the text of a task is made of. */
static size_t fewest_pieces(enum task task)
{
    /* Enough for the ranks of words to be strict. */
    return task == TASK_COMMON_WORDS ? 100 : task == TASK_FREQUENT_WORDS ? 60 : 1;
}

static size_t most_pieces(enum task task)
{
    /* Each piece has a name of its own. */
    return task == TASK_MULTI_KEY ? PAIRS - 1 : (size_t)1 << 24;
}

/* One sentence around the needles. `random` runs from one to the next. */
static void add_sentence(const struct plan *plan, struct writing *writing, size_t i,
                         uint64_t *random)
{
    char name[NAME_BYTES];

    switch (plan->task) {
    case TASK_S1:
    case TASK_VARIABLE_TRACKING:
        writing_add(writing, "%s", task_refrain[i % TASK_REFRAIN]);
        break;
    case TASK_MULTI_KEY:
        name_pair(plan, i + 1, name);
        writing_add(writing, "The secret number for %s is: %lu.", name, seven_digits(random));
        break;
    default:
        task_prose(writing, random);
    }
}

static const char *introduction(enum task task)
{
    switch (task) {
    case TASK_S1:
    case TASK_MULTI_KEY:
        return "A long note follows. Somewhere in it a secret number is written down. Remember it: "
               "there will be a question about it at the end.\n";
    case TASK_UUID:
        return "A long note follows. Somewhere in it a secret identifier is written down. Remember "
               "it: there will be a question about it at the end.\n";
    case TASK_MULTI_QUERY:
    case TASK_MULTI_VALUE:
        return "A long note follows. Here and there secret numbers are written down in it. "
               "Remember them: there will be a question about them at the end.\n";
    case TASK_VARIABLE_TRACKING:
        return "A long note follows. Here and there it says what number a drawer holds. Keep track "
               "of the drawers: there will be a question about them at the end.\n";
    case TASK_COMMON_WORDS:
        return "A numbered list of words follows. Some of them occur much more often than the "
               "others. Count them: there will be a question about them at the end.\n";
    case TASK_FREQUENT_WORDS:
    case TASKS:
        break;
    }
    return "A message in made-up words follows. Count how often each word occurs: there will be a "
           "question about it at the end.\n";
}

static void add_sentences(const struct plan *plan, size_t count, struct writing *writing)
{
    uint64_t random = plan->text_seed;
    const char *gap = "";

    for (size_t i = 0, needle = 0; i <= count; i++) {
        while (needle < plan->needle_count &&
               (uint64_t)plan->places[needle] * (count + 1) >> 32 <= i) {
            writing_add(writing, "%s%s", gap, plan->needles[needle++]);
            gap = " ";
        }
        if (i == count)
            break;
        writing_add(writing, "%s", gap);
        add_sentence(plan, writing, i, &random);
        gap = " ";
    }
}

/* How often the word of rank k (from 0) occurs among `count`. */
static size_t occurrences(enum task task, size_t k, size_t count)
{
    size_t sum = 0;

    if (task == TASK_COMMON_WORDS) {
        size_t common = count / 25, other = common / 4;
        size_t before = k < 10 ? 0 : 10 * common + (k - 10) * other;

        if (k < 10)
            return common;
        return before >= count ? 0 : count - before < other ? count - before : other;
    }
    for (size_t i = 1; i <= CODED_WORDS; i++)
        sum += 1000000 / (i * i);
    return count * (1000000 / ((k + 1) * (k + 1))) / sum;
}

static const char *word_of_rank(const struct plan *plan, size_t k, char coded[7])
{
    if (plan->task == TASK_COMMON_WORDS)
        return task_nouns[(plan->first + k * plan->stride) % TASK_NOUNS];
    coded_word(k, plan->text_seed, coded);
    return coded;
}

static void add_words(const struct plan *plan, size_t count, struct writing *writing)
{
    size_t ranks = plan->task == TASK_COMMON_WORDS ? TASK_NOUNS : CODED_WORDS;
    uint64_t random = plan->text_seed;
    size_t *list = calloc(count, sizeof *list);
    size_t filled = 0;
    char coded[7];

    if (list == NULL) {
        writing->failed = true;
        return;
    }
    for (size_t k = 0; k < ranks; k++) {
        for (size_t n = occurrences(plan->task, k, count); n > 0; n--)
            list[filled++] = k;
    }
    /* What rounding left over is the first word, which list holds already. */
    for (size_t i = count; i > 1; i--) {
        size_t other = random_below(&random, i), rank = list[other];

        list[other] = list[i - 1];
        list[i - 1] = rank;
    }
    for (size_t i = 0; i < count; i++) {
        const char *word = word_of_rank(plan, list[i], coded);

        if (plan->task == TASK_COMMON_WORDS)
            writing_add(writing, "%s%zu. %s", i > 0 ? " " : "", i + 1, word);
        else
            writing_add(writing, "%s%s", i > 0 ? " " : "", word);
    }
    free(list);
}

/* The input with `count` pieces of text and `padding` behind them; NULL without memory. */
static char *build(const struct plan *plan, size_t count, const char *padding)
{
    bool words = plan->task == TASK_COMMON_WORDS || plan->task == TASK_FREQUENT_WORDS;
    struct writing writing = {0};

    writing_add(&writing, "%s", introduction(plan->task));
    if (words)
        add_words(plan, count, &writing);
    else
        add_sentences(plan, count, &writing);
    writing_add(&writing, "%s\n%s", padding, plan->question);
    return finish(&writing);
}

/* ---- Length ------------------------------------------------------------------------------------
 */

struct search {
    const struct plan *plan;
    const struct task_counter *counter;
    size_t length; /* wanted */
};

static bool count_tokens(const struct search *search, size_t pieces, const char *padding,
                         size_t *tokens, struct error *error)
{
    char *input = build(search->plan, pieces, padding);
    bool done;

    if (input == NULL)
        return error_set(error, "out of memory for a row");
    done = search->counter->count(search->counter->opaque, input, search->plan->row.gen_prefix,
                                  tokens, error);
    free(input);
    return done;
}

/* The most pieces that fit, or a few less where tokens do not grow with every piece. */
static bool find_pieces(const struct search *search, size_t *pieces, size_t *tokens,
                        struct error *error)
{
    enum task task = search->plan->task;
    size_t fits = fewest_pieces(task), beyond = most_pieces(task) + 1;
    size_t least, most = 0;

    if (!count_tokens(search, fits, "", &least, error))
        return false;
    if (least > search->length)
        return error_set(error, "--length %zu: the task %s needs at least %zu tokens",
                         search->length, names[task], least);
    *tokens = least;
    for (unsigned tries = 1; beyond - fits > 1; tries++) {
        uint64_t span = beyond - fits, guess = fits + span / 2;
        size_t count;

        /* Tokens grow almost evenly: mostly where the wanted length is on the line between the
         * ends, now and then in the middle, which cannot be slow. */
        if (most == 0)
            guess = 2 * fits + 16;
        else if (tries % 4 != 0)
            guess = fits + (search->length - *tokens) * span / (most - *tokens);
        if (guess <= fits)
            guess = fits + 1;
        if (guess >= beyond)
            guess = beyond - 1;
        if (!count_tokens(search, (size_t)guess, "", &count, error))
            return false;
        if (count <= search->length) {
            fits = (size_t)guess;
            *tokens = count;
        } else {
            beyond = (size_t)guess;
            most = count;
        }
    }
    if (most == 0)
        return error_set(error, "--length %zu: the task %s has at most %zu tokens", search->length,
                         names[task], *tokens);
    *pieces = fits;
    return true;
}

/* What follows the last piece, to be cut off anywhere: the next pieces or, behind a list, words
 * that are not part of it. */
static char *continuation(const struct plan *plan, size_t pieces)
{
    struct writing writing = {0};
    uint64_t random = plan->text_seed;

    if (plan->task == TASK_COMMON_WORDS || plan->task == TASK_FREQUENT_WORDS) {
        writing_add(&writing, " (this is the end");
        for (int i = 0; i < CONTINUATION; i++)
            writing_add(&writing, " and there is no more of it");
        return finish(&writing);
    }
    for (size_t i = 0; i < CONTINUATION; i++) {
        writing_add(&writing, " ");
        if (plan->task == TASK_MULTI_KEY)
            task_prose(&writing, &random);
        else
            add_sentence(plan, &writing, pieces + i, &random);
    }
    return finish(&writing);
}

/* Appends a word to the padding if the text grows by it and does not become too long. */
static bool try_word(const struct search *search, size_t pieces, const char *word, size_t length,
                     struct writing *padding, size_t *tokens, bool *taken, struct error *error)
{
    const size_t before = padding->length;
    size_t count;

    writing_add(padding, "%.*s", (int)length, word);
    if (padding->failed)
        return error_set(error, "out of memory for a row");
    if (!count_tokens(search, pieces, padding->text, &count, error))
        return false;
    *taken = count > *tokens && count <= search->length;
    if (*taken) {
        *tokens = count;
    } else {
        padding->length = before;
        padding->text[before] = '\0';
    }
    return true;
}

/* Makes the length exact: with words of what would follow and, once one of them is too long, with
 * some of which most are one token in most vocabularies. */
static bool find_padding(const struct search *search, size_t pieces, size_t tokens,
                         struct writing *padding, struct error *error)
{
    static const char *const fillers[] = {" and", " the", " of", " on", " so", " we", " it", " to",
                                          " in",  " is",  " a",  ".",   ",",   " I",  "!",   "1"};
    char *next = continuation(search->plan, pieces);
    bool taken = true, done = false;

    writing_add(padding, "%s", "");
    if (next == NULL) {
        error_set(error, "out of memory for a row");
        goto out;
    }
    for (size_t at = 0, word; tokens < search->length && taken && next[at] != '\0'; at += word) {
        word = 1 + strcspn(next + at + 1, " ");
        if (!try_word(search, pieces, next + at, word, padding, &tokens, &taken, error))
            goto out;
    }
    for (size_t i = 0; tokens < search->length && i < sizeof fillers / sizeof *fillers;
         i = taken ? 0 : i + 1) {
        if (!try_word(search, pieces, fillers[i], strlen(fillers[i]), padding, &tokens, &taken,
                      error))
            goto out;
    }
    done =
        tokens == search->length ||
        error_set(error,
                  "--length %zu: no text of exactly that length was found, but one of %zu tokens",
                  search->length, tokens);
out:
    free(next);
    return done;
}

bool task_row_make(enum task task, uint64_t seed, size_t index, size_t length,
                   const struct task_counter *counter, struct task_row *row, struct error *error)
{
    struct plan plan;
    const struct search search = {&plan, counter, length};
    struct writing padding = {0};
    size_t pieces = 0, tokens = 0;
    bool done = false;

    *row = (struct task_row){0};
    if (!make_plan(task, seed, index, &plan, error) ||
        !find_pieces(&search, &pieces, &tokens, error) ||
        !find_padding(&search, pieces, tokens, &padding, error))
        goto out;
    plan.row.input = build(&plan, pieces, padding.text);
    if (plan.row.input == NULL) {
        error_set(error, "out of memory for a row");
        goto out;
    }
    *row = plan.row;
    plan.row = (struct task_row){0};
    done = true;
out:
    free(padding.text);
    free_plan(&plan);
    return done;
}
