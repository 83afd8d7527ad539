/* SPDX-License-Identifier: MIT */
/* The policies that the paper's ablations compare, by name. */
#include "ablation.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum ablation { RANKS, PAGES, ROPE, PRECISION, ABLATIONS };

static const char *const names[ABLATIONS] = {"ranks", "pages", "rope", "precision"};

static int find(const char *name)
{
    int i = 0;

    while (i < ABLATIONS && strcmp(names[i], name) != 0)
        i++;
    return i;
}

bool ablation_check(const char *name, struct error *error)
{
    return find(name) < ABLATIONS ||
           error_set(error, "--ablation: \"%.40s\" is not one of " ABLATION_NAMES, name);
}

/* A list that grows. */
struct policies {
    char (*texts)[ABLATION_TEXT_BYTES];
    size_t count;
};

static void add(struct policies *policies, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void add(struct policies *policies, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(policies->texts[policies->count++], ABLATION_TEXT_BYTES, format, arguments);
    va_end(arguments);
}

static void add_ranks(struct policies *policies)
{
    enum { LEAST = 12, MOST = 20, STEP = 2 };

    for (int sum = 2 * LEAST; sum <= 2 * MOST; sum += STEP) {
        for (int rank = LEAST; rank <= MOST; rank += STEP) {
            if (sum - rank >= LEAST && sum - rank <= MOST)
                add(policies, "puzzle:rk=%d,rv=%d", rank, sum - rank);
        }
    }
}

static void add_pages(struct policies *policies, size_t d)
{
    /* r (P + d) / (P d) is to be what it is with P = 32 and r = 16; r is rounded. */
    for (size_t page = 16; page <= 64; page *= 2) {
        const size_t numerator = 16 * (32 + d) * page, denominator = 32 * (page + d);
        const size_t rank = (2 * numerator + denominator) / (2 * denominator);

        add(policies, "puzzle:page=%zu,rk=%zu,rv=%zu", page, rank, rank);
    }
}

size_t ablation_policies(const char *name, size_t head_dim,
                         char texts[ABLATION_MOST][ABLATION_TEXT_BYTES])
{
    struct policies policies = {texts, 0};

    add(&policies, "raw");
    switch ((enum ablation)find(name)) {
    case RANKS:
        add_ranks(&policies);
        break;
    case PAGES:
        add_pages(&policies, head_dim);
        break;
    case ROPE:
        add(&policies, "puzzle:rk=16,rv=16,rope=pre");
        add(&policies, "puzzle:rk=16,rv=16,rope=post");
        break;
    case PRECISION:
        add(&policies, "int4");
        add(&policies, "int3");
        add(&policies, "puzzle");
        add(&policies, "puzzle-int4");
        break;
    case ABLATIONS:
        break;
    }
    return policies.count;
}
