/* SPDX-License-Identifier: MIT */
/* Chooses the next token from logits. */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct candidate {
    double weight; /* exp((logit - largest logit) / temperature), > 0 */
    float logit;   /* after the penalty */
    int32_t id;
};

struct sampler {
    struct sampler_options options;
    size_t vocabulary;
    uint64_t state[4];
    float *logits;      /* [vocabulary], after the penalty */
    uint8_t *penalised; /* [vocabulary], all 0 between calls */
    /* A heap, the likeliest at the root, of the first `waiting` elements; the others have left it,
     * the likeliest last. */
    struct candidate *candidates; /* [vocabulary] */
    size_t count, waiting;
};

/* ---- Random numbers: xoshiro256**, seeded by splitmix64 (Blackman and Vigna) ------------------
 */

static uint64_t splitmix64(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t rotate_left(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

static uint64_t xoshiro256(uint64_t s[4])
{
    uint64_t result = rotate_left(s[1] * 5, 7) * 9;
    uint64_t shifted = s[1] << 17;

    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = rotate_left(s[3], 45);
    return result;
}

/* Uniform in [0, 1): the upper 53 bits. */
static double uniform(uint64_t state[4])
{
    return (double)(xoshiro256(state) >> 11) * 0x1p-53;
}

/* exp(x) for x <= 0. The C library's differs in the last bit from one machine to the next, which
 * could turn a draw; this one has additions and multiplications alone. */
static double exp_everywhere(double x)
{
    double n, r, sum = 1;

    if (x < -700)
        return 0;
    n = floor(x * 1.4426950408889634 + 0.5);
    r = x - n * 0x1.62e42feep-1 - n * 0x1.a39ef35793c76p-33; /* ln 2 in two parts, |r| < 0.35 */
    for (int k = 14; k > 0; k--)
        sum = 1 + sum * r / k;
    return ldexp(sum, (int)n);
}

/* ---- The likeliest first ----------------------------------------------------------------------
 */

static bool before(const struct candidate *a, const struct candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

static void sift_down(struct candidate *heap, size_t count, size_t at)
{
    struct candidate moved = heap[at];

    for (;;) {
        size_t child = 2 * at + 1;

        if (child >= count)
            break;
        if (child + 1 < count && before(&heap[child + 1], &heap[child]))
            child++;
        if (!before(&heap[child], &moved))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* The candidate of rank `rank` (0: the likeliest). Only as many as are asked for are sorted: of a
 * large vocabulary few matter. */
static const struct candidate *ranked(struct sampler *s, size_t rank)
{
    while (s->count - s->waiting <= rank) {
        struct candidate top = s->candidates[0];

        s->waiting--;
        s->candidates[0] = s->candidates[s->waiting];
        s->candidates[s->waiting] = top;
        if (s->waiting > 0)
            sift_down(s->candidates, s->waiting, 0);
    }
    return &s->candidates[s->count - 1 - rank];
}

/* ---- Sampling ----------------------------------------------------------------------------------
 */

bool sampler_open(const struct sampler_options *options, size_t vocabulary,
                  struct sampler **sampler, struct error *error)
{
    struct sampler *s = NULL;
    uint64_t seed = options->seed;

    *sampler = NULL;
    if (vocabulary < 1 || vocabulary > INT32_MAX)
        return error_set(error, "sampler: a vocabulary of %zu tokens", vocabulary);
    if (!(options->temperature >= 0) || !isfinite(options->temperature))
        return error_set(error, "temperature: %g is not 0 or more", options->temperature);
    if (!(options->top_p > 0 && options->top_p <= 1))
        return error_set(error, "top-p: %g is not in (0, 1]", options->top_p);
    if (!(options->min_p >= 0 && options->min_p < 1))
        return error_set(error, "min-p: %g is not in [0, 1)", options->min_p);
    if (!(options->repeat_penalty > 0) || !isfinite(options->repeat_penalty))
        return error_set(error, "repeat penalty: %g is not above 0", options->repeat_penalty);

    s = calloc(1, sizeof *s);
    if (s == NULL)
        return error_set(error, "out of memory for the sampler");
    s->options = *options;
    s->vocabulary = vocabulary;
    for (int i = 0; i < 4; i++)
        s->state[i] = splitmix64(&seed);
    s->logits = calloc(vocabulary, sizeof *s->logits);
    s->penalised = calloc(vocabulary, sizeof *s->penalised);
    s->candidates = calloc(vocabulary, sizeof *s->candidates);
    if (s->logits == NULL || s->penalised == NULL || s->candidates == NULL) {
        sampler_close(s);
        return error_set(error, "out of memory for the sampler");
    }
    *sampler = s;
    return true;
}

void sampler_close(struct sampler *sampler)
{
    if (sampler == NULL)
        return;
    free(sampler->logits);
    free(sampler->penalised);
    free(sampler->candidates);
    free(sampler);
}

/* A token is penalised once, however often it occurred. */
static bool penalise(struct sampler *s, const int32_t *history, size_t count, struct error *error)
{
    size_t first = count > s->options.repeat_last ? count - s->options.repeat_last : 0;
    float penalty = s->options.repeat_penalty;
    size_t end;

    for (end = first; end < count; end++) {
        int32_t id = history[end];

        if (id < 0 || (size_t)id >= s->vocabulary)
            break;
        if (s->penalised[id])
            continue;
        s->penalised[id] = 1;
        s->logits[id] = s->logits[id] > 0 ? s->logits[id] / penalty : s->logits[id] * penalty;
        /* An infinite logit would have no difference to itself. */
        if (s->logits[id] > FLT_MAX)
            s->logits[id] = FLT_MAX;
    }
    for (size_t i = first; i < end; i++)
        s->penalised[history[i]] = 0;
    if (end < count)
        return error_set(error, "token %zu of the history: %d is not in the vocabulary of %zu", end,
                         (int)history[end], s->vocabulary);
    return true;
}

/* How many of the likeliest candidates may be drawn, and the sum of their weights. */
static size_t choose_pool(struct sampler *s, double *mass)
{
    const struct sampler_options *o = &s->options;
    size_t pool = s->count;

    *mass = 0;
    if (o->top_k > 0 && o->top_k < pool) {
        pool = o->top_k;
        for (size_t i = 0; i < pool; i++)
            *mass += ranked(s, i)->weight;
    } else {
        for (size_t i = 0; i < pool; i++)
            *mass += s->candidates[i].weight;
    }
    if (o->top_p < 1) {
        double least = o->top_p * *mass;
        size_t limit = pool;

        *mass = 0;
        for (pool = 0; pool < limit && *mass < least; pool++)
            *mass += ranked(s, pool)->weight;
    }
    if (o->min_p > 0) {
        double least = o->min_p * ranked(s, 0)->weight;
        size_t limit = pool;

        *mass = 0;
        for (pool = 0; pool < limit && ranked(s, pool)->weight >= least; pool++)
            *mass += ranked(s, pool)->weight;
    }
    return pool;
}

static int32_t draw(struct sampler *s, float largest)
{
    double mass, target, sum = 0;
    size_t pool;

    s->count = 0;
    for (size_t i = 0; i < s->vocabulary; i++) {
        double below = ((double)s->logits[i] - largest) / s->options.temperature;
        double weight = exp_everywhere(below);

        if (weight > 0)
            s->candidates[s->count++] = (struct candidate){weight, s->logits[i], (int32_t)i};
    }
    s->waiting = s->count;
    for (size_t i = s->count / 2; i-- > 0;)
        sift_down(s->candidates, s->count, i);

    pool = choose_pool(s, &mass);
    target = uniform(s->state) * mass;
    for (size_t i = 0; i + 1 < pool; i++) {
        sum += ranked(s, i)->weight;
        if (target < sum)
            return ranked(s, i)->id;
    }
    return ranked(s, pool - 1)->id;
}

bool sampler_choose(struct sampler *sampler, const float *logits, const int32_t *history,
                    size_t history_count, int32_t *token, struct error *error)
{
    size_t largest = 0;

    for (size_t i = 0; i < sampler->vocabulary; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return error_set(error, "logits: that of token %zu is %s", i,
                             isnan(logits[i]) ? "not a number" : "infinite");
    }
    memcpy(sampler->logits, logits, sampler->vocabulary * sizeof *logits);
    if (sampler->options.repeat_penalty != 1 && !penalise(sampler, history, history_count, error))
        return false;
    for (size_t i = 1; i < sampler->vocabulary; i++) {
        if (sampler->logits[i] > sampler->logits[largest])
            largest = i;
    }
    if (sampler->logits[largest] == -INFINITY)
        return error_set(error, "logits: all are minus infinity");
    *token = sampler->options.temperature == 0 ? (int32_t)largest
                                               : draw(sampler, sampler->logits[largest]);
    return true;
}
