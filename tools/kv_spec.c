/* SPDX-License-Identifier: MIT */
/* `--kv SPEC`: which policy holds the KV cache, and its parameters. */
#include "kv_spec.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "options.h"

/* No model has more pages than this in its context; it keeps sums of pages far from overflow. */
#define MAX_PAGES 1000000

enum key { KEY_PAGE, KEY_RK, KEY_RV, KEY_RATIO, KEY_SINK, KEY_WINDOW, KEY_FACTORS, KEY_ROPE, KEYS };

static const char *const key_names[KEYS] = {"page", "rk",     "rv",      "ratio",
                                            "sink", "window", "factors", "rope"};

struct policy {
    const char *name;
    const char *key_help; /* for messages */
    unsigned keys;        /* bit k: takes key k */
    struct kv_spec defaults;
};

static const struct policy policies[] = {
    [KV_PUZZLE] = {"puzzle",
                   "page, rk, rv, ratio, sink, window, factors, rope",
                   (1u << KEYS) - 1,
                   {.policy = KV_PUZZLE,
                    .page_tokens = 32,
                    .sink_pages = 1,
                    .window_pages = 1,
                    .rank_k = 16,
                    .rank_v = 14}},
    [KV_RAW] = {"raw", "page", 1u << KEY_PAGE, {.policy = KV_RAW, .page_tokens = 32}},
};

#define POLICY_COUNT (sizeof policies / sizeof *policies)
#define POLICY_NAMES "puzzle, raw"

/* Names that are known elsewhere, so that the message can say that they are not misspelt. */
static const char *const absent_policies[] = {"puzzle-int4", "static",    "int4",   "int3",
                                              "global-svd",  "h2o",       "palu",   "ojakv",
                                              "xkv",         "streaming", "snapkv", "kivi"};

static const struct policy *find_policy(const char *text, size_t length, struct error *error)
{
    for (size_t i = 0; i < POLICY_COUNT; i++) {
        if (strlen(policies[i].name) == length && memcmp(policies[i].name, text, length) == 0)
            return &policies[i];
    }
    for (size_t i = 0; i < sizeof absent_policies / sizeof *absent_policies; i++) {
        if (strlen(absent_policies[i]) == length && memcmp(absent_policies[i], text, length) == 0) {
            error_set(error, "--kv %.80s: this version does not have the policy \"%s\"; it has: %s",
                      text, absent_policies[i], POLICY_NAMES);
            return NULL;
        }
    }
    error_set(error, "--kv %.80s: unknown policy; there are: %s", text, POLICY_NAMES);
    return NULL;
}

static bool set_key(struct kv_spec *spec, enum key key, const char *value, const char *what,
                    struct error *error)
{
    switch (key) {
    case KEY_PAGE:
        if (!number_size(what, value, 8, 256, &spec->page_tokens, error))
            return false;
        if (spec->page_tokens % 8 != 0)
            return error_set(error, "%s: %s tokens are not a multiple of 8", what, value);
        return true;
    case KEY_RK:
        return number_size(what, value, 1, 256, &spec->rank_k, error);
    case KEY_RV:
        return number_size(what, value, 1, 256, &spec->rank_v, error);
    case KEY_RATIO:
        if (!number_real(what, value, 0, 1, &spec->ratio, error))
            return false;
        if (spec->ratio == 0)
            return error_set(error, "%s: 0 leaves nothing to store", what);
        return true;
    case KEY_SINK:
        return number_size(what, value, 0, MAX_PAGES, &spec->sink_pages, error);
    case KEY_WINDOW:
        return number_size(what, value, 0, MAX_PAGES, &spec->window_pages, error);
    case KEY_FACTORS:
        if (strcmp(value, "native") != 0)
            return error_set(error, "%s: \"%s\" is not known; this version has: native", what,
                             value);
        return true;
    case KEY_ROPE:
        if (strcmp(value, "post") != 0)
            return error_set(error, "%s: \"%s\" is not known; this version has: post", what, value);
        return true;
    case KEYS:
        break;
    }
    return false;
}

bool kv_spec_parse(const char *text, struct kv_spec *spec, struct error *error)
{
    size_t name_length = strcspn(text, ":");
    const struct policy *policy = find_policy(text, name_length, error);
    const char *rest = text + name_length;
    unsigned seen = 0;

    if (policy == NULL)
        return false;
    *spec = policy->defaults;
    while (*rest != '\0') {
        size_t length = strcspn(++rest, ",");
        char pair[64];
        char what[128];
        char *value;
        enum key key = 0;

        if (length >= sizeof pair)
            return error_set(error, "--kv %.80s: \"%.20s...\" is too long", text, rest);
        memcpy(pair, rest, length);
        pair[length] = '\0';
        rest += length;
        value = strchr(pair, '=');
        if (value == NULL)
            return error_set(error, "--kv %.80s: \"%s\" is not key=value", text, pair);
        *value++ = '\0';

        while (key < KEYS && strcmp(key_names[key], pair) != 0)
            key++;
        if (key == KEYS || !(policy->keys & 1u << key))
            return error_set(error, "--kv %.80s: unknown key \"%s\"; %s has: %s", text, pair,
                             policy->name, policy->key_help);
        if (seen & 1u << key)
            return error_set(error, "--kv %.80s: \"%s\" is given twice", text, pair);
        seen |= 1u << key;
        snprintf(what, sizeof what, "--kv %s: %s", policy->name, pair);
        if (!set_key(spec, key, value, what, error))
            return false;
    }

    if (seen & 1u << KEY_RATIO) {
        if (seen & (1u << KEY_RK | 1u << KEY_RV))
            return error_set(error, "--kv %.80s: ratio stands for rk and rv; give one or the other",
                             text);
        spec->rank_k = spec->rank_v = 0;
    }
    if (spec->rank_k > spec->page_tokens || spec->rank_v > spec->page_tokens)
        return error_set(error,
                         "--kv %.80s: rk=%zu, rv=%zu: a rank is at most the page's %zu tokens",
                         text, spec->rank_k, spec->rank_v, spec->page_tokens);
    return true;
}

bool kv_spec_apply(struct kv_spec *spec, pkv_config *config, struct error *error)
{
    size_t page = spec->page_tokens;
    size_t dim = config->head_dim;
    size_t most = page < dim ? page : dim;

    if (spec->policy == KV_RAW) {
        config->page_tokens = page;
        config->factors_k = config->factors_v = PKV_FACTORS_NONE;
        return true;
    }

    size_t rank_k = spec->rank_k;
    size_t rank_v = spec->rank_v;

    if (spec->ratio > 0) {
        double total = round(spec->ratio * 2 * (double)page * (double)dim / (double)(page + dim));

        rank_k = (size_t)round(total * 16 / 30);
        rank_v = (size_t)total - rank_k;
    }
    if (rank_k < 1 || rank_v < 1 || rank_k > most || rank_v > most) {
        if (spec->ratio > 0)
            return error_set(error,
                             "--kv puzzle: ratio=%g means ranks (%zu, %zu); they must be 1 to %zu "
                             "with %zu tokens a page and head dimension %zu",
                             spec->ratio, rank_k, rank_v, most, page, dim);
        return error_set(error,
                         "--kv puzzle: ranks (%zu, %zu) must be 1 to %zu, the smaller of %zu "
                         "tokens a page and head dimension %zu",
                         rank_k, rank_v, most, page, dim);
    }
    spec->ratio = 0;
    spec->rank_k = rank_k;
    spec->rank_v = rank_v;
    config->page_tokens = page;
    config->sink_pages = spec->sink_pages;
    config->window_pages = spec->window_pages;
    config->factors_k = config->factors_v = PKV_FACTORS_NATIVE;
    config->rank_k = rank_k;
    config->rank_v = rank_v;
    return true;
}

void kv_spec_canonical(const struct kv_spec *spec, char text[KV_SPEC_TEXT_BYTES])
{
    if (spec->policy == KV_RAW)
        snprintf(text, KV_SPEC_TEXT_BYTES, "raw:page=%zu", spec->page_tokens);
    else
        snprintf(text, KV_SPEC_TEXT_BYTES,
                 "puzzle:page=%zu,rk=%zu,rv=%zu,sink=%zu,window=%zu,factors=native,rope=post",
                 spec->page_tokens, spec->rank_k, spec->rank_v, spec->sink_pages,
                 spec->window_pages);
}
