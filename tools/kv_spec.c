/* SPDX-License-Identifier: MIT */
/* `--kv SPEC`: which policy holds the KV cache, and its parameters. */
#include "kv_spec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "policies/policy.h"

/* The longest "key=value". */
#define PAIR_BYTES (KV_SPEC_FILE_BYTES + 32)

/* ---- Names ----------------------------------------------------------------------------------- */

/* "one, two, three" */
struct list {
    char text[512];
    size_t length;
};

static void list_add(struct list *list, const char *name)
{
    int length = snprintf(list->text + list->length, sizeof list->text - list->length, "%s%s",
                          list->length > 0 ? ", " : "", name);

    if (length > 0 && (size_t)length < sizeof list->text - list->length)
        list->length += (size_t)length;
}

static const struct policy *find_policy(const char *text, size_t length, struct error *error)
{
    struct list names = {.length = 0};

    for (size_t i = 0; i < policy_count; i++) {
        if (strlen(policies[i]->name) == length && memcmp(policies[i]->name, text, length) == 0)
            return policies[i];
        list_add(&names, policies[i]->name);
    }
    error_set(error, "--kv %.80s: unknown policy; there are: %s", text, names.text);
    return NULL;
}

static size_t find_key(const struct policy *policy, const char *name)
{
    size_t key = 0;

    while (key < policy->key_count && strcmp(policy->keys[key].name, name) != 0)
        key++;
    return key;
}

/* ---- Values ---------------------------------------------------------------------------------- */

static bool choose(const struct policy_key *key, const char *value, const char *what,
                   double *number, struct error *error)
{
    const char *choice = key->choices;
    size_t length, index = 0;

    for (;; choice += length + 1, index++) {
        length = strcspn(choice, "|");
        if (strlen(value) == length && memcmp(choice, value, length) == 0) {
            *number = (double)index;
            return true;
        }
        if (choice[length] == '\0')
            return error_set(error, "%s: \"%.40s\" is not known; there is: %s", what, value,
                             key->choices);
    }
}

static bool set_value(const struct policy_key *key, const char *value, const char *what,
                      double *number, struct error *error)
{
    size_t count;

    switch (key->kind) {
    case POLICY_COUNT:
        if (!number_size(what, value, (size_t)key->least, (size_t)key->most, &count, error))
            return false;
        if (key->multiple > 1 && count % key->multiple != 0)
            return error_set(error, "%s: %zu is not a multiple of %zu", what, count, key->multiple);
        *number = (double)count;
        return true;
    case POLICY_REAL:
        if (!number_real(what, value, key->least, key->most, number, error))
            return false;
        return *number != 0 || !key->positive ||
               error_set(error, "%s: 0 leaves nothing to store", what);
    case POLICY_CHOICE:
        return choose(key, value, what, number, error);
    case POLICY_FILE:
        if (*value == '\0')
            return error_set(error, "%s: the name is empty", what);
        return strlen(value) < KV_SPEC_FILE_BYTES ||
               error_set(error, "%s: the name is too long", what);
    }
    return false;
}

static void set_defaults(struct kv_spec *spec, const struct policy *policy)
{
    *spec = (struct kv_spec){.policy = policy};
    for (size_t i = 0; i < policy->key_count; i++) {
        const struct policy_key *key = &policy->keys[i];

        spec->values[i].there = key->preset != NULL && set_value(key, key->preset, "default",
                                                                 &spec->values[i].number, NULL);
    }
}

/* One "key=value" at the beginning of `rest`; `text` is the whole spec. */
static bool parse_pair(struct kv_spec *spec, const char *text, const char *rest, size_t length,
                       struct error *error)
{
    const struct policy *policy = spec->policy;
    struct list names = {.length = 0};
    char pair[PAIR_BYTES];
    char what[128];
    struct kv_value *value;
    char *equals;
    size_t key;

    if (length >= sizeof pair)
        return error_set(error, "--kv %.80s: \"%.20s...\" is too long", text, rest);
    memcpy(pair, rest, length);
    pair[length] = '\0';
    equals = strchr(pair, '=');
    if (equals == NULL)
        return error_set(error, "--kv %.80s: \"%.80s\" is not key=value", text, pair);
    *equals = '\0';
    key = find_key(policy, pair);
    if (key == policy->key_count) {
        for (size_t i = 0; i < policy->key_count; i++)
            list_add(&names, policy->keys[i].name);
        return error_set(error, "--kv %.80s: unknown key \"%.80s\"; %s has: %s", text, pair,
                         policy->name, names.length > 0 ? names.text : "none");
    }
    value = &spec->values[key];
    if (value->typed)
        return error_set(error, "--kv %.80s: \"%s\" is given twice", text, pair);
    snprintf(what, sizeof what, "--kv %s: %s", policy->name, policy->keys[key].name);
    if (!set_value(&policy->keys[key], equals + 1, what, &value->number, error))
        return false;
    value->there = value->typed = true;
    value->file = rest + (equals + 1 - pair);
    value->file_length = strlen(equals + 1);
    return true;
}

bool kv_spec_parse(const char *text, struct kv_spec *spec, struct error *error)
{
    size_t name_length = strcspn(text, ":");
    const struct policy *policy = find_policy(text, name_length, error);
    const char *rest = text + name_length;

    if (policy == NULL)
        return false;
    set_defaults(spec, policy);
    while (*rest != '\0') {
        size_t length = strcspn(++rest, ",");

        if (!parse_pair(spec, text, rest, length, error))
            return false;
        rest += length;
    }
    return policy->check == NULL || policy->check(spec, text, error);
}

bool kv_spec_resolve(struct kv_spec *spec, const struct model *model, struct error *error)
{
    return spec->policy->resolve == NULL || spec->policy->resolve(spec, model, error);
}

void kv_spec_warn(const struct kv_spec *spec, const char *program)
{
    char what[64];

    if (spec->note == NULL)
        return;
    snprintf(what, sizeof what, "--kv %s", spec->policy->name);
    warning_print(program, what, spec->note);
}

const struct kv_value *kv_spec_find(const struct kv_spec *spec, const char *key)
{
    size_t i = find_key(spec->policy, key);

    return i < spec->policy->key_count && spec->values[i].there ? &spec->values[i] : NULL;
}

size_t kv_spec_count(const struct kv_spec *spec, size_t key)
{
    return (size_t)spec->values[key].number;
}

/* ---- Texts ----------------------------------------------------------------------------------- */

/* As few digits as give the number back. */
static void print_number(double number, char *text, size_t size)
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, size, "%.*g", digits, number);
        if (strtod(text, NULL) == number)
            return;
    }
}

static void print_value(const struct policy_key *key, const struct kv_value *value, char *text,
                        size_t size)
{
    const char *choice = key->choices;

    switch (key->kind) {
    case POLICY_COUNT:
        snprintf(text, size, "%zu", (size_t)value->number);
        return;
    case POLICY_REAL:
        print_number(value->number, text, size);
        return;
    case POLICY_CHOICE:
        for (size_t i = 0; i < (size_t)value->number; i++)
            choice += strcspn(choice, "|") + 1;
        snprintf(text, size, "%.*s", (int)strcspn(choice, "|"), choice);
        return;
    case POLICY_FILE:
        snprintf(text, size, "%.*s", (int)value->file_length, value->file);
        return;
    }
}

void kv_spec_canonical(const struct kv_spec *spec, char text[KV_SPEC_TEXT_BYTES])
{
    size_t length = (size_t)snprintf(text, KV_SPEC_TEXT_BYTES, "%s", spec->policy->name);
    char separator = ':';

    for (size_t i = 0; i < spec->policy->key_count; i++) {
        const struct policy_key *key = &spec->policy->keys[i];
        char value[KV_SPEC_FILE_BYTES];

        if (!spec->values[i].there || length >= KV_SPEC_TEXT_BYTES)
            continue;
        print_value(key, &spec->values[i], value, sizeof value);
        length += (size_t)snprintf(text + length, KV_SPEC_TEXT_BYTES - length, "%c%s=%s", separator,
                                   key->name, value);
        separator = ',';
    }
}

/* Keys a line of --help. */
#define HELP_KEYS 5

bool kv_spec_help(struct error *error)
{
    puts("\nPolicies of the cache, for --kv NAME[:KEY=VALUE,...], with the defaults of their keys\n"
         "(of alternatives the first):");
    for (size_t i = 0; i < policy_count; i++) {
        const struct policy *policy = policies[i];

        printf("  %-26s %s\n", policy->name, policy->summary);
        for (size_t j = 0; j < policy->key_count; j++) {
            const struct policy_key *key = &policy->keys[j];
            const char *preset = key->kind == POLICY_CHOICE ? key->choices
                                 : key->preset != NULL      ? key->preset
                                 : key->kind == POLICY_FILE ? "FILE"
                                                            : "X";

            printf("%s%s=%s%s", j % HELP_KEYS == 0 ? "                             " : "",
                   key->name, preset,
                   j + 1 == policy->key_count ? "\n"
                   : (j + 1) % HELP_KEYS == 0 ? ",\n"
                                              : ", ");
        }
    }
    return output_flush(error);
}
