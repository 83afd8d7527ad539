/* SPDX-License-Identifier: MIT */
/* tools/policies: what every policy owes, then each one against its equations. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calibration.h"
#include "numeric.h"
#include "options.h"
#include "policies/dense_attention.h"
#include "policies/low_rank.h"
#include "policies/policy.h"
#include "policies/rounding.h"
#include "rope.h"
#include "tests.h"

#define LAYERS      2
#define QUERY_HEADS 4
#define KV_HEADS    2
#define DIM         16
#define GROUP       (QUERY_HEADS / KV_HEADS)
#define MAX_TOKENS  400
#define WIDTH       (KV_HEADS * DIM)
#define HIDDEN      (2 * WIDTH)

/* Small pages and groups, so that few tokens go through every state. @ is the name of a
 * calibration, ^ of one with Fisher information. */
static const char *const specs[] = {
    "raw:page=8",
    "puzzle:page=8,rk=5,rv=3",
    "puzzle:page=8,rk=5,rv=3,rope=pre",
    "puzzle-int4:page=8,rk=5,rv=3",
    "puzzle-int4:page=8,rk=5,rv=3,rope=pre",
    "static",
    "int4:page=8",
    "int3:page=8,sink=2,window=0",
    "global-svd:page=8",
    "global-svd:page=8,ratio=0.3,sink=0,window=3",
    "xkv",
    "xkv:group=1,ratio=0.3",
    "h2o",
    "h2o:heavy=0.1,recent=0.8",
    "streaming",
    "streaming:sink=2,recent=9",
    "snapkv",
    "snapkv:window=4,kernel=3,pool=max,capacity=20",
    "kivi:group=8,residual=16",
    "kivi:bits=4,group=16,residual=32",
    "palu:calibration=@,ratio=1",
    "palu:calibration=@",
    "palu:calibration=^,ratio=0.4",
    "ojakv:calibration=@,ratio=0.4",
    "ojakv:calibration=@,ratio=0.3,sink=0,recent=5,update=7,rows=20,rate=3",
    "ojakv:calibration=@,ratio=0.4,sink=3,recent=0,update=1",
};
#define SPECS ((int)(sizeof specs / sizeof *specs))

/* ---- A sequence of random tokens, and a store that takes them -------------------------------- */

struct sequence {
    /* Of every token: [MAX_TOKENS, heads, DIM]. */
    float *plain_q[LAYERS], *plain_k[LAYERS], *q[LAYERS], *k[LAYERS], *v[LAYERS];
    float *hidden[LAYERS]; /* of which the model's projections make plain_k and v */
};

struct setup {
    struct model model;
    struct model_layer layers[LAYERS];
    float projections[2][WIDTH * HIDDEN]; /* of K and V */
    float frequencies[DIM / 2];
    char text[3 * TESTS_FOLDER_BYTES];
    struct kv_spec spec;
    struct kv_store *store;
    struct sequence sequence;
    float *out[LAYERS]; /* [MAX_TOKENS, QUERY_HEADS, DIM], of the tokens fed */
};

static void rotate_heads(const struct model *model, const float *from, float *to, size_t heads,
                         size_t position)
{
    float cosine[DIM / 2], sine[DIM / 2];

    rope_angles(model, position, cosine, sine);
    memcpy(to, from, heads * DIM * sizeof *to);
    for (size_t h = 0; h < heads; h++)
        rope_rotate(model, to + h * DIM, cosine, sine);
}

static float *random_rows(size_t width, float scale)
{
    float *rows = tests_allocate(MAX_TOKENS * width, sizeof *rows);

    for (size_t i = 0; i < MAX_TOKENS * width; i++)
        rows[i] = scale * tests_random_float();
    return rows;
}

static void turn_sequence(struct setup *s)
{
    struct sequence *q = &s->sequence;

    for (size_t l = 0; l < LAYERS; l++) {
        for (size_t t = 0; t < MAX_TOKENS; t++) {
            size_t query = t * QUERY_HEADS * DIM, kv = t * KV_HEADS * DIM;

            rotate_heads(&s->model, q->plain_q[l] + query, q->q[l] + query, QUERY_HEADS, t);
            rotate_heads(&s->model, q->plain_k[l] + kv, q->k[l] + kv, KV_HEADS, t);
        }
    }
}

static char folder[TESTS_FOLDER_BYTES];
static char calibrations[2][TESTS_FOLDER_BYTES + 32];

/* The element of a hidden state that the projection `part` (K, V) takes for element `i`. */
static size_t hidden_element(size_t part, size_t i)
{
    return (part * WIDTH + i) * 7 % HIDDEN;
}

static void make_hidden(struct setup *s)
{
    for (size_t l = 0; l < LAYERS; l++) {
        for (size_t t = 0; t < MAX_TOKENS; t++) {
            float *hidden = s->sequence.hidden[l] + t * HIDDEN;

            for (size_t i = 0; i < WIDTH; i++) {
                hidden[hidden_element(0, i)] = 2 * s->sequence.plain_k[l][t * WIDTH + i];
                hidden[hidden_element(1, i)] = 2 * s->sequence.v[l][t * WIDTH + i];
            }
        }
    }
}

static struct weight make_weight(const float *data)
{
    return (struct weight){.type = QUANT_F32,
                           .rows = WIDTH,
                           .columns = HIDDEN,
                           .row_bytes = HIDDEN * sizeof *data,
                           .data = data};
}

static void make_projections(struct setup *s)
{
    memset(s->projections, 0, sizeof s->projections);
    memset(s->layers, 0, sizeof s->layers);
    for (size_t i = 0; i < WIDTH; i++) {
        for (size_t part = 0; part < 2; part++)
            s->projections[part][i * HIDDEN + hidden_element(part, i)] = 0.5f;
    }
    for (size_t l = 0; l < LAYERS; l++) {
        s->layers[l].k = make_weight(s->projections[0]);
        s->layers[l].v = make_weight(s->projections[1]);
    }
    s->model.layers = s->layers;
}

/* Writes the spec with the calibrations' names. */
static void expand_spec(const char *spec, char *text, size_t size)
{
    const size_t at = strcspn(spec, "@^");

    if (spec[at] == '\0')
        snprintf(text, size, "%s", spec);
    else
        snprintf(text, size, "%.*s%s%s", (int)at, spec, calibrations[spec[at] == '^'],
                 spec + at + 1);
}

static void open_store(struct setup *s, const char *spec, pkv_dtype dtype, unsigned threads)
{
    const struct kv_store_options options = {
        .model = &s->model, .dtype = dtype, .max_tokens = MAX_TOKENS, .threads = threads};
    struct error error;

    expand_spec(spec, s->text, sizeof s->text);
    ck_assert_msg(kv_spec_parse(s->text, &s->spec, &error) &&
                      kv_spec_resolve(&s->spec, &s->model, &error) &&
                      kv_store_open(&s->spec, &options, &s->store, &error),
                  "%s: %s", spec, error.text);
}

/* The same sequence every time. */
static void open_sequence(struct setup *s)
{
    s->model = (struct model){.layer_count = LAYERS,
                              .hidden = HIDDEN,
                              .query_heads = QUERY_HEADS,
                              .kv_heads = KV_HEADS,
                              .head_dim = DIM,
                              .rope_magnitude = 1,
                              .rope_inverse_frequencies = s->frequencies};
    for (size_t i = 0; i < DIM / 2; i++)
        s->frequencies[i] = powf(100, -(float)i / (DIM / 2));
    tests_seed(7);
    for (size_t l = 0; l < LAYERS; l++) {
        s->sequence.plain_q[l] = random_rows(QUERY_HEADS * DIM, 3);
        s->sequence.plain_k[l] = random_rows(KV_HEADS * DIM, 2);
        s->sequence.v[l] = random_rows(KV_HEADS * DIM, 1);
        s->sequence.hidden[l] = tests_allocate(MAX_TOKENS * HIDDEN, sizeof(float));
        s->sequence.q[l] = tests_allocate(MAX_TOKENS * QUERY_HEADS * DIM, sizeof(float));
        s->sequence.k[l] = tests_allocate(MAX_TOKENS * KV_HEADS * DIM, sizeof(float));
        s->out[l] = tests_allocate(MAX_TOKENS * QUERY_HEADS * DIM, sizeof(float));
    }
    turn_sequence(s);
    make_projections(s);
    make_hidden(s);
}

static void open_setup(struct setup *s, const char *spec, pkv_dtype dtype, unsigned threads)
{
    open_sequence(s);
    open_store(s, spec, dtype, threads);
}

static void close_setup(struct setup *s)
{
    kv_store_close(s->store);
    for (size_t l = 0; l < LAYERS; l++) {
        free(s->sequence.plain_q[l]);
        free(s->sequence.plain_k[l]);
        free(s->sequence.q[l]);
        free(s->sequence.k[l]);
        free(s->sequence.v[l]);
        free(s->sequence.hidden[l]);
        free(s->out[l]);
    }
}

static struct kv_layer layer_of(struct setup *s, size_t layer, size_t count, bool attend)
{
    const struct sequence *q = &s->sequence;
    size_t t = kv_store_tokens(s->store), query = t * QUERY_HEADS * DIM, kv = t * KV_HEADS * DIM;

    return (struct kv_layer){.layer = layer,
                             .position = t,
                             .count = count,
                             .hidden = q->hidden[layer] + t * HIDDEN,
                             .q = q->q[layer] + query,
                             .plain_k = q->plain_k[layer] + kv,
                             .k = q->k[layer] + kv,
                             .v = q->v[layer] + kv,
                             .out = attend ? s->out[layer] + query : NULL};
}

static void open_step(struct setup *s, size_t layers, size_t count, bool attend)
{
    struct error error;

    ck_assert_msg(kv_store_begin(s->store, count, &error), "%s", error.text);
    for (size_t l = 0; l < layers; l++) {
        struct kv_layer io = layer_of(s, l, count, attend);

        ck_assert_msg(kv_store_layer(s->store, &io, &error), "%s", error.text);
    }
}

static void feed_as(struct setup *s, size_t count, bool attend)
{
    struct error error;

    open_step(s, LAYERS, count, attend);
    ck_assert_msg(kv_store_end(s->store, &error), "%s", error.text);
}

static void feed(struct setup *s, size_t count)
{
    feed_as(s, count, true);
}

/* Calibrates on the sequence as it is, which the setup's store, if there is one, has not begun. */
static void calibrate(struct setup *s, const char *path)
{
    const struct calibration_source source = {1, MAX_TOKENS, 0};
    struct kv_store *store = s->store;
    struct error error;
    FILE *file;

    ck_assert(calibration_probe_open(&s->model, MAX_TOKENS, 1, &s->store, &error));
    feed_as(s, MAX_TOKENS, false);
    file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_msg(calibration_write(s->store, &source, file, path, &error), "%s", error.text);
    ck_assert_int_eq(fclose(file), 0);
    kv_store_close(s->store);
    s->store = store;
}

/* Token by token up to `tokens`. */
static void decode(struct setup *s, size_t tokens)
{
    while (kv_store_tokens(s->store) < tokens)
        feed(s, 1);
}

static size_t stored_bytes(struct setup *s)
{
    struct kv_stats stats;
    struct error error;

    ck_assert_msg(kv_store_stats(s->store, &stats, &error), "%s", error.text);
    ck_assert_uint_eq(stats.tokens, kv_store_tokens(s->store));
    ck_assert_uint_eq(stats.raw_bytes,
                      policy_raw_bytes(&s->model, s->store->options.dtype, stats.tokens));
    return stats.payload_bytes;
}

static size_t closed_form(const struct setup *s, pkv_dtype dtype, size_t prompt, size_t tokens)
{
    const struct policy_size size = {&s->model, dtype, prompt, tokens};
    struct error error;
    size_t bytes;

    ck_assert_msg(s->spec.policy->bytes(&s->spec, &size, &bytes, &error), "%s", error.text);
    return bytes;
}

/* ---- Naive attention ------------------------------------------------------------------------- */

/* The last `count` of `rows` rows are new; q, out [count, DIM] of one query head; mass may be NULL.
 */
static void attend_naively(const float *q, size_t q_stride, size_t count, const float *k,
                           const float *v, size_t rows, double *out, double *mass)
{
    double *p = tests_allocate(rows, sizeof *p);

    for (size_t i = 0; i < count; i++) {
        size_t seen = rows - (count - 1 - i);
        double sum = 0, largest = -INFINITY;

        for (size_t t = 0; t < seen; t++) {
            p[t] = 0;
            for (size_t c = 0; c < DIM; c++)
                p[t] += (double)q[i * q_stride + c] * k[t * DIM + c] / sqrt(DIM);
            largest = fmax(largest, p[t]);
        }
        for (size_t t = 0; t < seen; t++)
            sum += p[t] = exp(p[t] - largest);
        for (size_t c = 0; c < DIM; c++) {
            out[i * DIM + c] = 0;
            for (size_t t = 0; t < seen; t++)
                out[i * DIM + c] += p[t] / sum * v[t * DIM + c];
        }
        for (size_t t = 0; t < seen && mass != NULL; t++)
            mass[t] += p[t] / sum;
    }
    free(p);
}

/* K and V as a store should read them: [LAYERS][KV_HEADS][MAX_TOKENS, DIM]. */
struct expected {
    float k[LAYERS][KV_HEADS][MAX_TOKENS * DIM], v[LAYERS][KV_HEADS][MAX_TOKENS * DIM];
};

static float stored(pkv_dtype dtype, float x)
{
    return dtype == PKV_F32   ? x
           : dtype == PKV_F16 ? f16_to_f32(f16_from_f32(x))
                              : bf16_to_f32(bf16_from_f32(x));
}

static struct expected *expect_dense(const struct setup *s, pkv_dtype dtype)
{
    struct expected *e = tests_allocate(1, sizeof *e);

    for (size_t l = 0; l < LAYERS; l++) {
        for (size_t h = 0; h < KV_HEADS; h++) {
            for (size_t i = 0; i < MAX_TOKENS * DIM; i++) {
                size_t from = (i / DIM * KV_HEADS + h) * DIM + i % DIM;

                e->k[l][h][i] = stored(dtype, s->sequence.k[l][from]);
                e->v[l][h][i] = stored(dtype, s->sequence.v[l][from]);
            }
        }
    }
    return e;
}

/* The last `count` tokens' outputs, which attended rows 0 .. tokens - 1 of `e`. */
static double output_error(const struct setup *s, const struct expected *e, size_t tokens,
                           size_t count)
{
    double *out = tests_allocate(count * DIM, sizeof *out), largest = 0;

    for (size_t l = 0; l < LAYERS; l++) {
        for (size_t g = 0; g < QUERY_HEADS; g++) {
            size_t first = ((tokens - count) * QUERY_HEADS + g) * DIM;

            attend_naively(s->sequence.q[l] + first, QUERY_HEADS * DIM, count, e->k[l][g / GROUP],
                           e->v[l][g / GROUP], tokens, out, NULL);
            for (size_t i = 0; i < count; i++) {
                for (size_t c = 0; c < DIM; c++)
                    largest =
                        fmax(largest, tests_difference(s->out[l][first + i * QUERY_HEADS * DIM + c],
                                                       out[i * DIM + c]));
            }
        }
    }
    free(out);
    return largest;
}

#define TOLERANCE 2e-5

/* ---- Every policy ---------------------------------------------------------------------------- */

START_TEST(test_prompt_is_attended_exactly)
{
    struct setup s;

    open_setup(&s, specs[_i], PKV_F32, 2);
    struct expected *e = expect_dense(&s, PKV_F32);

    feed(&s, 203);
    /* Or, where that is what the policy is about, not exactly. */
    if (s.spec.policy->own_prefill && kv_spec_find(&s.spec, "ratio")->number < 1)
        ck_assert_double_ge(output_error(&s, e, 203, 203), 1e-2);
    else
        ck_assert_double_le(output_error(&s, e, 203, 203), TOLERANCE);
    free(e);
    close_setup(&s);
}
END_TEST

START_TEST(test_bytes_are_the_closed_form)
{
    static const pkv_dtype dtypes[] = {PKV_F32, PKV_F16, PKV_BF16};
    static const size_t prompts[] = {1, 7, 40, 131};

    for (size_t i = 0; i < 3; i++) {
        for (size_t j = 0; j < sizeof prompts / sizeof *prompts; j++) {
            struct setup s;

            open_setup(&s, specs[_i], dtypes[i], 1);
            ck_assert_uint_eq(stored_bytes(&s), 0);
            feed_as(&s, prompts[j], false);
            for (size_t tokens = prompts[j]; tokens < prompts[j] + 45; tokens++) {
                ck_assert_uint_eq(stored_bytes(&s), closed_form(&s, dtypes[i], prompts[j], tokens));
                decode(&s, tokens + 1);
            }
            close_setup(&s);
        }
    }
}
END_TEST

START_TEST(test_threads_change_nothing)
{
    struct setup one, three;

    open_setup(&one, specs[_i], PKV_BF16, 1);
    open_setup(&three, specs[_i], PKV_BF16, 3);
    feed(&one, 150);
    feed(&three, 150);
    decode(&one, 190);
    decode(&three, 190);
    for (size_t l = 0; l < LAYERS; l++)
        ck_assert_mem_eq(one.out[l], three.out[l], 190 * QUERY_HEADS * DIM * sizeof(float));
    close_setup(&one);
    close_setup(&three);
}
END_TEST

/* Neither an aborted step nor one that only stores leaves a trace. */
START_TEST(test_aborted_steps_leave_no_trace)
{
    struct setup plain, other;

    open_setup(&plain, specs[_i], PKV_BF16, 1);
    open_setup(&other, specs[_i], PKV_BF16, 1);
    for (size_t layers = 0; layers <= LAYERS; layers++) {
        open_step(&other, layers, 60, true);
        kv_store_abort(other.store);
        ck_assert_uint_eq(stored_bytes(&other), 0);
    }
    feed(&plain, 100);
    feed_as(&other, 100, false);
    for (size_t tokens = 100; tokens < 150; tokens++) {
        size_t bytes = stored_bytes(&other);

        open_step(&other, tokens % (LAYERS + 1), 20, true);
        kv_store_abort(other.store);
        ck_assert_uint_eq(stored_bytes(&other), bytes);
        feed(&plain, 1);
        feed(&other, 1);
    }
    for (size_t l = 0; l < LAYERS; l++)
        ck_assert_mem_eq(plain.out[l] + 100 * QUERY_HEADS * DIM,
                         other.out[l] + 100 * QUERY_HEADS * DIM,
                         50 * QUERY_HEADS * DIM * sizeof(float));
    close_setup(&plain);
    close_setup(&other);
}
END_TEST

/* After a rewind a store goes on from what it says it has kept; rewound to nothing it is new. */
START_TEST(test_rewind)
{
    struct setup fresh, s;
    struct error error;

    open_setup(&fresh, specs[_i], PKV_BF16, 1);
    open_setup(&s, specs[_i], PKV_BF16, 1);
    feed(&s, 90);
    decode(&s, 130);
    ck_assert(kv_store_rewind(s.store, 200, &error));
    ck_assert_uint_eq(kv_store_tokens(s.store), 130);
    for (size_t tokens = 125; tokens > 60; tokens -= 13) {
        ck_assert_msg(kv_store_rewind(s.store, tokens, &error), "%s", error.text);
        ck_assert_uint_le(kv_store_tokens(s.store), tokens);
        ck_assert_uint_le(stored_bytes(&s),
                          policy_raw_bytes(&s.model, PKV_BF16, kv_store_tokens(s.store)));
        feed(&s, tokens + 5 - kv_store_tokens(s.store));
        decode(&s, tokens + 10);
    }
    ck_assert(kv_store_rewind(s.store, 0, &error));
    ck_assert_uint_eq(kv_store_tokens(s.store), 0);
    ck_assert_uint_eq(stored_bytes(&s), 0);
    feed(&fresh, 77);
    feed(&s, 77);
    decode(&fresh, 120);
    decode(&s, 120);
    ck_assert_uint_eq(stored_bytes(&s), stored_bytes(&fresh));
    for (size_t l = 0; l < LAYERS; l++)
        ck_assert_mem_eq(fresh.out[l], s.out[l], 120 * QUERY_HEADS * DIM * sizeof(float));
    close_setup(&fresh);
    close_setup(&s);
}
END_TEST

START_TEST(test_what_does_not_fit_is_refused)
{
    struct setup s;
    struct error error;

    open_setup(&s, specs[_i], PKV_F16, 1);
    ck_assert(!kv_store_begin(s.store, MAX_TOKENS + 1, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "KV cache: a step of 401 tokens"));
    feed_as(&s, 60, false);
    ck_assert(!kv_store_begin(s.store, MAX_TOKENS - 59, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "KV cache: no room"));

    static const float bad[] = {NAN, INFINITY, -INFINITY, 1e6f};
    size_t bytes = stored_bytes(&s);

    for (size_t i = 0; i < 4; i++) {
        float *v = &s.sequence.v[1][(61 * KV_HEADS + 1) * DIM + 3], before = *v;

        *v = bad[i];
        make_hidden(&s);
        open_step(&s, 1, 3, true);
        struct kv_layer io = layer_of(&s, 1, 3, true);

        ck_assert(!kv_store_layer(s.store, &io, &error));
        ck_assert_ptr_nonnull(strstr(error.text, "KV cache: "));
        ck_assert_ptr_nonnull(strstr(error.text, "layer 1"));
        kv_store_abort(s.store);
        ck_assert_uint_eq(stored_bytes(&s), bytes);
        *v = before;
    }
    make_hidden(&s);
    feed(&s, 3);
    close_setup(&s);
}
END_TEST

/* ---- One by one ------------------------------------------------------------------------------ */

/* Bytes, in bf16, as the head comments have them, with numbers. Geometry: 2 layers, 2 KV heads. */
START_TEST(test_bytes_by_hand)
{
    const size_t heads = LAYERS * KV_HEADS, token = 2 * DIM * 2;
    const struct {
        const char *spec;
        size_t prompt, tokens, bytes; /* of one head */
    } cases[] = {
        {"static", 50, 60, 60 * token},
        /* 101 tokens: 12 pages; 10 of them quantised. */
        {"int4:page=8", 101, 101, 10 * (2 * 8 * DIM / 2 + 4 * (DIM + 8)) + 21 * token},
        {"int3:page=8", 101, 101, 10 * (2 * 8 * DIM * 3 / 8 + 4 * (DIM + 8)) + 21 * token},
        {"int4:page=8,sink=3,window=2", 40, 40, 40 * token},
        {"int4:page=8,sink=3,window=2", 40, 48, (8 * DIM + 4 * (DIM + 8)) + 40 * token},
        /* 101 tokens: rank 0.6 101 16 / 117 = 8.28; the region is 80 tokens. */
        {"global-svd:page=8", 101, 120, 2 * 8 * (80 + DIM) * 2 + 40 * token},
        /* No region; a region of 8 tokens that has no more than rank 8. */
        {"global-svd:page=8,ratio=1", 23, 60, 60 * token},
        {"global-svd:page=8,ratio=1", 31, 31, 2 * 8 * (8 + DIM) * 2 + 23 * token},
        /* 101 tokens, of one layer 32 channels: 0.6 2 101 32 / 133 = 29.2, for two heads. */
        {"xkv:group=1", 101, 120, 29 * (101 + 32) * 2 / 2 + 19 * token},
        /* 96 tokens, of both layers 64 channels: 46.08, for four heads. */
        {"xkv", 96, 100, 46 * (96 + 64) * 2 / 4 + 4 * token},
        /* One token, ranks of at least 1; 4 tokens, 2 4 64 / 68 = 7.5, of which V has all of 4. */
        {"xkv:group=1", 1, 2, 2 * (1 + 32) * 2 / 2 + token},
        {"xkv:group=2,ratio=1", 4, 4, 7 * (4 + 64) * 2 / 4},
        /* 0.3 101 = 30.3. */
        {"h2o", 101, 140, 60 * (token + 4)},
        {"h2o:heavy=0,recent=0.01", 20, 30, token + 4},
        {"h2o:heavy=1,recent=0.5", 20, 29, 29 * (token + 4)},
        {"h2o:heavy=1,recent=0.5", 20, 50, 30 * (token + 4)},
        {"streaming", 101, 140, 61 * token},
        {"streaming:sink=3,recent=20", 10, 15, 15 * token},
        {"streaming:sink=3,recent=20", 10, 90, 23 * token},
        {"snapkv", 101, 140, (61 + 39) * token},
        /* Room for one token beside the window, and a prompt that has no more. */
        {"snapkv", 40, 50, (33 + 10) * token},
        {"snapkv", 33, 50, 50 * token},
        {"snapkv:window=4,capacity=20", 101, 103, 22 * token},
        /* 101 tokens: 96 keys, 85 values. */
        {"kivi:group=8,residual=16", 101, 101,
         (96 + 85) * DIM / 4 + 4 * (DIM * 96 / 8 + DIM / 8 * 85) + (5 + 16) * DIM * 2},
        {"kivi:bits=4,group=8,residual=16", 1, 16, 16 * DIM / 2 + 4 * DIM * 2 + 16 * DIM * 2},
        /* 0.6 of 4 projections of 32 is 76.8; no more than each has. */
        {"palu:calibration=@", 100, 140, 140 * 77 * 2 / 4},
        {"palu:calibration=^", 100, 140, 140 * 77 * 2 / 4},
        /* 30.5, 15.25, 7.6 and 7.6 by Fisher information; and at least 1 or `align` each. */
        {"palu:calibration=^,ratio=0.48,align=8", 10, 10, 10 * (32 + 16 + 8 + 8) * 2 / 4},
        {"palu:calibration=^,align=24,ratio=0.25", 10, 10, 10 * 96 * 2 / 4},
        {"palu:calibration=@,ratio=0.001", 10, 10, 10 * 4 * 2 / 4},
        {"palu:calibration=^,ratio=0.1", 4, 4, 4 * 13 * 2 / 4},
        {"palu:calibration=^,ratio=1", 40, 40, 40 * token},
        /* 0.6 of 16 is 9.6. */
        {"ojakv:calibration=@", 100, 100, 36 * 2 * 10 * 2 + 64 * token + 2 * DIM * 10 * 4},
        {"ojakv:calibration=@", 100, 140, 68 * 2 * 10 * 2 + 72 * token + 2 * DIM * 10 * 4},
        {"ojakv:calibration=@", 20, 95, 95 * token},
        {"ojakv:calibration=@", 20, 96, 32 * 2 * 10 * 2 + 64 * token + 2 * DIM * 10 * 4},
        {"ojakv:calibration=@,ratio=0.01,sink=0,recent=0,update=100", 50, 149,
         50 * 2 * 2 + 99 * token + 2 * DIM * 4},
        {"puzzle:page=8,rk=5,rv=3,rope=pre", 101, 101, 10 * (8 * (8 + DIM) * 2) + 21 * token},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct setup s;

        open_setup(&s, cases[i].spec, PKV_BF16, 1);
        feed_as(&s, cases[i].prompt, false);
        decode(&s, cases[i].tokens);
        ck_assert_msg(stored_bytes(&s) == heads * cases[i].bytes, "%s, %zu tokens: %zu, not %zu",
                      cases[i].spec, cases[i].tokens, stored_bytes(&s) / heads, cases[i].bytes);
        close_setup(&s);
    }
}
END_TEST

/* The paper's geometry, where the design's shares are known. */
START_TEST(test_shares_of_the_paper)
{
    const struct model model = {
        .layer_count = 32, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
    const struct {
        const char *spec;
        double share;
    } cases[] = {{"puzzle", 0.58755}, {"puzzle:rope=pre", 0.58755},
                 {"int4", 0.2918},    {"int3", 0.2296},
                 {"static", 1},       {"xkv", 0.59998},
                 {"h2o", 0.60466},    {"snapkv", 0.59998}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct policy_size size = {&model, PKV_BF16, 16384, 16384};
        struct kv_spec spec;
        struct error error;
        size_t bytes;

        ck_assert(kv_spec_parse(cases[i].spec, &spec, &error));
        ck_assert(kv_spec_resolve(&spec, &model, &error));
        ck_assert(spec.policy->bytes(&spec, &size, &bytes, &error));
        ck_assert_double_eq_tol((double)bytes / (double)policy_raw_bytes(&model, PKV_BF16, 16384),
                                cases[i].share, 5e-5);
    }
}
END_TEST

START_TEST(test_static_is_exact_for_ever)
{
    static const pkv_dtype dtypes[] = {PKV_F32, PKV_F16, PKV_BF16};
    struct setup s;

    open_setup(&s, "static", dtypes[_i], 1);
    struct expected *e = expect_dense(&s, dtypes[_i]);

    feed(&s, 70);
    ck_assert_double_le(output_error(&s, e, 70, 70), TOLERANCE);
    feed(&s, 80);
    ck_assert_double_le(output_error(&s, e, 150, 80), TOLERANCE);
    decode(&s, 160);
    for (size_t t = 151; t <= 160; t++)
        ck_assert_double_le(output_error(&s, e, t, 1), TOLERANCE);
    free(e);
    close_setup(&s);
}
END_TEST

/* From the definition, with the library's conversions. */
static void quantise_naively(float *x, size_t count, size_t stride, int bits)
{
    float least = INFINITY, largest = -INFINITY;
    int most = (1 << bits) - 1;

    for (size_t i = 0; i < count; i++) {
        least = fminf(least, x[i * stride]);
        largest = fmaxf(largest, x[i * stride]);
    }
    float zero = f16_to_f32(f16_from_f32(least));
    float scale = f16_to_f32(f16_from_f32((largest - least) / (float)most));

    for (size_t i = 0; i < count; i++) {
        int code = scale > 0 ? (int)lrintf((x[i * stride] - zero) / scale) : 0;

        code = code < 0 ? 0 : code > most ? most : code;
        x[i * stride] = (float)code * scale + zero;
    }
}

/* Pages of 8 tokens, sink and window 1: of `tokens` tokens the next page, if it is due. */
static void expect_page(struct expected *e, size_t page, int bits)
{
    for (size_t i = 0; i < LAYERS * KV_HEADS; i++) {
        float *k = e->k[i / KV_HEADS][i % KV_HEADS] + page * 8 * DIM;
        float *v = e->v[i / KV_HEADS][i % KV_HEADS] + page * 8 * DIM;

        for (size_t c = 0; c < DIM; c++)
            quantise_naively(k + c, 8, DIM, bits);
        for (size_t t = 0; t < 8; t++)
            quantise_naively(v + t * DIM, DIM, 1, bits);
    }
}

START_TEST(test_direct_quantisation)
{
    static const char *const names[] = {"int4:page=8", "int3:page=8"};
    struct setup s;
    size_t pages = 1;

    open_setup(&s, names[_i], PKV_F32, 1);
    struct expected *e = expect_dense(&s, PKV_F32);

    feed(&s, 61);
    for (size_t tokens = 61; tokens < 90; tokens++) {
        for (; (pages + 2) * 8 <= tokens; pages++)
            expect_page(e, pages, 4 - _i);
        decode(&s, tokens + 1);
        ck_assert_double_le(output_error(&s, e, tokens + 1, 1), TOLERANCE);
    }
    ck_assert_uint_eq(pages, 10);

    /* Page 9 is cut: it goes, and comes again. */
    struct error error;

    ck_assert(kv_store_rewind(s.store, 77, &error));
    ck_assert_uint_eq(kv_store_tokens(s.store), 72);
    free(e);
    e = expect_dense(&s, PKV_F32);
    for (pages = 1; pages < 9; pages++)
        expect_page(e, pages, 4 - _i);
    for (size_t tokens = 72; tokens < 110; tokens++) {
        for (; (pages + 2) * 8 <= tokens; pages++)
            expect_page(e, pages, 4 - _i);
        decode(&s, tokens + 1);
        ck_assert_double_le(output_error(&s, e, tokens + 1, 1), TOLERANCE);
    }
    free(e);
    close_setup(&s);
}
END_TEST

START_TEST(test_kivi)
{
    struct setup s;
    size_t keys = 0, values = 0;

    open_setup(&s, "kivi:group=8,residual=16", PKV_BF16, 1);
    struct expected *e = expect_dense(&s, PKV_BF16);

    feed(&s, 61);
    for (size_t tokens = 61; tokens < 110; tokens++) {
        for (size_t i = 0; i < LAYERS * KV_HEADS; i++) {
            float *k = e->k[i / KV_HEADS][i % KV_HEADS], *v = e->v[i / KV_HEADS][i % KV_HEADS];

            for (size_t t = keys; t < tokens - tokens % 16; t += 8) {
                for (size_t c = 0; c < DIM; c++)
                    quantise_naively(k + t * DIM + c, 8, DIM, 2);
            }
            for (size_t t = values; t < tokens - 16; t++) {
                quantise_naively(v + t * DIM, 8, 1, 2);
                quantise_naively(v + t * DIM + 8, 8, 1, 2);
            }
        }
        keys = tokens - tokens % 16;
        values = tokens - 16;
        decode(&s, tokens + 1);
        ck_assert_double_le(output_error(&s, e, tokens + 1, 1), TOLERANCE);
    }
    free(e);
    close_setup(&s);
}
END_TEST

START_TEST(test_kivi_geometry)
{
    const struct model model = {.head_dim = 80};
    struct kv_spec spec;
    struct error error;

    ck_assert(kv_spec_parse("kivi", &spec, &error));
    ck_assert(!kv_spec_resolve(&spec, &model, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "group=32 channels, of which the head dimension, 80"));
    ck_assert(kv_spec_parse("kivi:group=16", &spec, &error));
    ck_assert(kv_spec_resolve(&spec, &model, &error));
    ck_assert(!kv_spec_parse("kivi:group=48", &spec, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "residual=128 is not a multiple of group=48"));
}
END_TEST

/* Makes one layer's keys and values from token `first` on combinations of `rank` rows. */
static void lower_rank(float *rows, size_t first, size_t count, size_t rank)
{
    for (size_t h = 0; h < KV_HEADS; h++) {
        for (size_t t = first + rank; t < first + count; t++) {
            float *to = rows + (t * KV_HEADS + h) * DIM;

            memset(to, 0, DIM * sizeof *to);
            for (size_t r = 0; r < rank; r++) {
                float weight = tests_random_float();

                for (size_t c = 0; c < DIM; c++)
                    to[c] += weight * rows[((first + r) * KV_HEADS + h) * DIM + c];
            }
        }
    }
}

/* K and V of rank 8 in the region lose nothing at rank 8 and something at rank 7; the sink, the
 * window and what comes later lose nothing anyway. */
START_TEST(test_global_svd)
{
    static const char *const exact = "global-svd:page=8,ratio=0.6";
    static const char *const lossy = "global-svd:page=8,ratio=0.55";

    for (int i = 0; i < 2; i++) {
        struct setup s;
        struct error error;

        open_setup(&s, i == 0 ? exact : lossy, PKV_F32, 2);
        for (size_t l = 0; l < LAYERS; l++) {
            lower_rank(s.sequence.k[l], 8, 80, 8);
            lower_rank(s.sequence.v[l], 8, 80, 8);
        }
        struct expected *e = expect_dense(&s, PKV_F32);
        double worst = 0;

        feed(&s, 101);
        decode(&s, 130);
        for (size_t tokens = 102; tokens <= 130; tokens++)
            worst = fmax(worst, output_error(&s, e, tokens, 1));
        if (i == 0)
            ck_assert_double_le(worst, TOLERANCE);
        else
            ck_assert_double_ge(worst, 1e-3);
        /* The region is 80 tokens behind a sink of 8. */
        ck_assert(kv_store_rewind(s.store, 88, &error));
        ck_assert_uint_eq(kv_store_tokens(s.store), 88);
        ck_assert(kv_store_rewind(s.store, 87, &error));
        ck_assert_uint_eq(kv_store_tokens(s.store), 0);
        free(e);
        close_setup(&s);
    }
}
END_TEST

/* Makes a prompt's rows combinations of the first `rank` in all layers and heads together. */
static void lower_rank_together(float *const rows[LAYERS], size_t count, size_t rank)
{
    for (size_t t = rank; t < count; t++) {
        for (size_t l = 0; l < LAYERS; l++)
            memset(rows[l] + t * KV_HEADS * DIM, 0, KV_HEADS * DIM * sizeof *rows[l]);
        for (size_t r = 0; r < rank; r++) {
            float weight = tests_random_float() / sqrtf((float)rank);

            for (size_t l = 0; l < LAYERS; l++) {
                for (size_t c = 0; c < KV_HEADS * DIM; c++)
                    rows[l][t * KV_HEADS * DIM + c] += weight * rows[l][r * KV_HEADS * DIM + c];
            }
        }
    }
}

/* Keys before RoPE, and values, of the ranks that 0.6 gives lose nothing when both layers share
 * their factors, with more tokens than channels or fewer; with one rank more they do, and with
 * factors for each layer, whose ranks are lower. Later tokens lose nothing. */
START_TEST(test_xkv)
{
    static const struct {
        const char *spec;
        size_t prompt, rank_k, rank_v;
        bool exact;
    } cases[] = {
        {"xkv:group=2", 101, 19, 28, true},   {"xkv:group=2", 101, 20, 28, false},
        {"xkv:group=2", 101, 19, 29, false},  {"xkv:group=1", 101, 19, 28, false},
        {"xkv:group=2", 40, 12, 17, true},    {"xkv:group=2", 40, 13, 17, false},
        {"xkv:group=1000", 40, 12, 17, true}, {"xkv:group=1", 40, 12, 17, false},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct setup s;
        double worst = 0;

        open_setup(&s, cases[i].spec, PKV_F32, 2);
        lower_rank_together(s.sequence.plain_k, cases[i].prompt, cases[i].rank_k);
        lower_rank_together(s.sequence.v, cases[i].prompt, cases[i].rank_v);
        turn_sequence(&s);
        struct expected *e = expect_dense(&s, PKV_F32);

        feed(&s, cases[i].prompt);
        ck_assert_double_le(output_error(&s, e, cases[i].prompt, cases[i].prompt), TOLERANCE);
        decode(&s, 130);
        for (size_t tokens = cases[i].prompt + 1; tokens <= 130; tokens++)
            worst = fmax(worst, output_error(&s, e, tokens, 1));
        if (cases[i].exact)
            ck_assert_double_le(worst, 1e-4);
        else
            ck_assert_double_ge(worst, 1e-3);
        free(e);
        close_setup(&s);
    }
}
END_TEST

/* 30 layers: seven groups of 4, with ranks 0.6 2 1024 768 / 1792 = 526.6, and one of 2, with
 * 335.1. */
START_TEST(test_xkv_geometry)
{
    struct model model = {.layer_count = 30, .query_heads = 9, .kv_heads = 3, .head_dim = 64};
    const struct policy_size size = {&model, PKV_F16, 1024, 1034};
    struct kv_spec spec;
    struct error error;
    size_t bytes;

    ck_assert(kv_spec_parse("xkv", &spec, &error));
    ck_assert(kv_spec_resolve(&spec, &model, &error));
    ck_assert(spec.policy->bytes(&spec, &size, &bytes, &error));
    ck_assert_uint_eq(bytes,
                      (7 * 526 * (1024 + 768) + 335 * (1024 + 384)) * 2 + 10 * 2 * 30 * 3 * 64 * 2);
    model = (struct model){.layer_count = 64, .query_heads = 8, .kv_heads = 8, .head_dim = 128};
    ck_assert(kv_spec_resolve(&spec, &model, &error));
    ck_assert(kv_spec_parse("xkv:group=32", &spec, &error));
    ck_assert(!kv_spec_resolve(&spec, &model, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "32 layers of 8 KV heads with head dimension 128 have "
                                             "32768 channels, more than the 32766"));
}
END_TEST

/* Rows are multiples of unit vectors, so the basis is known. */
START_TEST(test_low_rank_basis)
{
    enum { ROWS = 700, COLUMNS = 9, RANK = 4 };
    static const size_t order[COLUMNS] = {5, 2, 8, 0, 1, 7, 3, 6, 4};
    float *x = tests_allocate(ROWS * COLUMNS, sizeof *x);
    double basis[RANK * COLUMNS];

    for (size_t i = 0; i < ROWS; i++)
        x[i * COLUMNS + order[i % COLUMNS]] = (float)(COLUMNS - i % COLUMNS);
    ck_assert(low_rank_basis(x, ROWS, COLUMNS, RANK, basis));
    for (size_t r = 0; r < RANK; r++) {
        for (size_t c = 0; c < COLUMNS; c++)
            ck_assert_double_eq_tol(fabs(basis[r * COLUMNS + c]), c == order[r] ? 1 : 0, 1e-9);
    }
    free(x);
}
END_TEST

/* Pages whose keys have a low rank before RoPE, which they have no longer after it. */
START_TEST(test_rope_pre)
{
    static const char *const names[] = {"puzzle:page=8,rk=2,rv=3,rope=pre",
                                        "puzzle:page=8,rk=2,rv=3"};

    for (int i = 0; i < 2; i++) {
        struct setup s;
        double worst = 0;

        open_setup(&s, names[i], PKV_F32, 2);
        for (size_t l = 0; l < LAYERS; l++) {
            for (size_t page = 0; page < MAX_TOKENS / 8; page++) {
                lower_rank(s.sequence.plain_k[l], 8 * page, 8, 2);
                lower_rank(s.sequence.v[l], 8 * page, 8, 3);
            }
        }
        turn_sequence(&s);
        struct expected *e = expect_dense(&s, PKV_F32);

        feed(&s, 101);
        decode(&s, 150);
        for (size_t tokens = 102; tokens <= 150; tokens++)
            worst = fmax(worst, output_error(&s, e, tokens, 1));
        if (i == 0)
            ck_assert_double_le(worst, 1e-4);
        else
            ck_assert_double_ge(worst, 1e-2);
        free(e);
        close_setup(&s);
    }
}
END_TEST

/* Makes rows, of all heads together, combinations of the first `rank` ones. */
static void lower_projection(float *rows, size_t rank)
{
    for (size_t t = rank; t < MAX_TOKENS; t++) {
        memset(rows + t * WIDTH, 0, WIDTH * sizeof *rows);
        for (size_t r = 0; r < rank; r++) {
            const float weight = tests_random_float();

            for (size_t i = 0; i < WIDTH; i++)
                rows[t * WIDTH + i] += weight * rows[r * WIDTH + i];
        }
    }
}

/* What projections make of the text has ranks 32, 16, 8 and 8: Fisher information of such
 * proportions shares the total so that nothing is lost; equal ranks, and one less, do not. It is
 * the whitening that finds them, for the projections themselves have full rank. */
START_TEST(test_palu_ranks)
{
    static const float k[] = {4, 1}, v[] = {2, 1};
    static const char *const kept[] = {"ratio=0.5", "ratio=0.5,ranks=uniform", "ratio=0.492"};
    struct error error;

    for (int i = 0; i < 3; i++) {
        char path[TESTS_FOLDER_BYTES + 32], text[2 * TESTS_FOLDER_BYTES];
        struct setup s;

        open_setup(&s, "static", PKV_F32, 1);
        kv_store_close(s.store);
        s.store = NULL;
        lower_projection(s.sequence.v[0], 16);
        lower_projection(s.sequence.plain_k[1], 8);
        lower_projection(s.sequence.v[1], 8);
        turn_sequence(&s);
        make_hidden(&s);
        snprintf(path, sizeof path, "%s/ranks", folder);
        calibrate(&s, path);
        tests_add_fisher(path, k, v, LAYERS);
        snprintf(text, sizeof text, "palu:calibration=%s,%s", path, kept[i]);
        open_store(&s, text, PKV_F32, 2);
        struct expected *e = expect_dense(&s, PKV_F32);

        feed(&s, 90);
        decode(&s, 130);
        const double worst = output_error(&s, e, 130, 130);

        if (i == 0)
            ck_assert_double_le(worst, 1e-4);
        else
            ck_assert_double_ge(worst, 1e-3);
        ck_assert(kv_store_rewind(s.store, 0, &error));
        free(e);
        close_setup(&s);
    }
}
END_TEST

/* Six KV heads, of which the last two are a group, with all that a model can do behind the
 * projections: at full rank the outputs are those of the dense cache. */
START_TEST(test_palu_groups)
{
    enum { HEADS = 6, D = 8, INPUT = 40, TOKENS = 70 };
    static float weights[2][HEADS * D * INPUT], biases[2][HEADS * D], norm[D], frequencies[D / 2];
    static float hidden[TOKENS * INPUT], q[TOKENS * HEADS * D], k[TOKENS * HEADS * D];
    static float v[TOKENS * HEADS * D], out[2][TOKENS * HEADS * D];
    struct model_layer layer = {.k_bias = biases[0], .v_bias = biases[1], .k_norm = norm};
    const struct model model = {.layer_count = 1,
                                .hidden = INPUT,
                                .query_heads = HEADS,
                                .kv_heads = HEADS,
                                .head_dim = D,
                                .rms_epsilon = 1e-5f,
                                .rope_magnitude = 1,
                                .rope_interleaved = true,
                                .rope_inverse_frequencies = frequencies,
                                .layers = &layer};
    const struct calibration_source source = {1, TOKENS, 0};
    char path[TESTS_FOLDER_BYTES + 32], text[2 * TESTS_FOLDER_BYTES];
    struct kv_store *probe;
    struct error error;
    FILE *file;

    tests_seed(5);
    for (size_t i = 0; i < D / 2; i++)
        frequencies[i] = powf(50, -(float)i / (D / 2));
    for (size_t i = 0; i < D; i++)
        norm[i] = 1 + 0.5f * tests_random_float();
    for (size_t part = 0; part < 2; part++) {
        for (size_t i = 0; i < HEADS * D * INPUT; i++)
            weights[part][i] = tests_random_float();
        for (size_t i = 0; i < HEADS * D; i++)
            biases[part][i] = tests_random_float();
    }
    for (size_t i = 0; i < TOKENS * INPUT; i++)
        hidden[i] = tests_random_float();
    for (size_t i = 0; i < TOKENS * HEADS * D; i++)
        q[i] = 2 * tests_random_float();
    layer.k = (struct weight){QUANT_F32, HEADS * D, INPUT, INPUT * sizeof(float), weights[0]};
    layer.v = (struct weight){QUANT_F32, HEADS * D, INPUT, INPUT * sizeof(float), weights[1]};
    for (size_t t = 0; t < TOKENS; t++) {
        float cosine[D / 2], sine[D / 2];

        rope_angles(&model, t, cosine, sine);
        for (size_t h = 0; h < HEADS; h++) {
            float *key = k + (t * HEADS + h) * D;
            double square = 0;

            for (size_t c = 0; c < D; c++) {
                double sums[2] = {biases[0][h * D + c], biases[1][h * D + c]};

                for (size_t i = 0; i < INPUT; i++) {
                    sums[0] += (double)weights[0][(h * D + c) * INPUT + i] * hidden[t * INPUT + i];
                    sums[1] += (double)weights[1][(h * D + c) * INPUT + i] * hidden[t * INPUT + i];
                }
                key[c] = (float)sums[0];
                v[(t * HEADS + h) * D + c] = (float)sums[1];
                square += sums[0] * sums[0];
            }
            for (size_t c = 0; c < D; c++)
                key[c] = (float)(key[c] / sqrt(square / D + 1e-5) * norm[c]);
            rope_rotate(&model, key, cosine, sine);
        }
    }
    const struct kv_layer io = {.count = TOKENS, .hidden = hidden, .q = q, .k = k, .v = v};

    ck_assert(calibration_probe_open(&model, TOKENS, 1, &probe, &error));
    ck_assert(kv_store_begin(probe, TOKENS, &error) && kv_store_layer(probe, &io, &error) &&
              kv_store_end(probe, &error));
    snprintf(path, sizeof path, "%s/groups", folder);
    file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert(calibration_write(probe, &source, file, path, &error));
    fclose(file);
    kv_store_close(probe);

    for (size_t i = 0; i < 2; i++) {
        const struct kv_store_options options = {
            .model = &model, .dtype = PKV_F32, .max_tokens = TOKENS, .threads = 2};
        struct kv_layer own = io;
        struct kv_store *store;
        struct kv_spec spec;

        snprintf(text, sizeof text, "palu:calibration=%s,ratio=1", path);
        ck_assert(kv_spec_parse(i == 0 ? "static" : text, &spec, &error));
        ck_assert(kv_spec_resolve(&spec, &model, &error));
        ck_assert_msg(kv_store_open(&spec, &options, &store, &error), "%s", error.text);
        own.out = out[i];
        ck_assert(kv_store_begin(store, TOKENS, &error));
        ck_assert_msg(kv_store_layer(store, &own, &error), "%s", error.text);
        ck_assert(kv_store_end(store, &error));
        kv_store_close(store);
    }
    for (size_t i = 0; i < TOKENS * HEADS * D; i++)
        ck_assert_double_eq_tol(out[1][i], out[0][i], 1e-4);
}
END_TEST

/* One head's tokens as OjaKV keeps them, in f32: `basis` [rank, DIM] moves by the `added` tokens
 * behind those that are compressed, and all go through it. */
static void expect_oja(float *x, size_t compressed, size_t added, double *basis, size_t rank,
                       size_t rows, double rate)
{
    double change[DIM * DIM] = {0}, energy = 0;

    rows = rows < added ? rows : added;
    for (size_t i = 0; i < rows; i++) {
        const float *row = x + (compressed + i * added / rows) * DIM;

        for (size_t r = 0; r < rank; r++) {
            double image = 0;

            for (size_t c = 0; c < DIM; c++)
                image += basis[r * DIM + c] * row[c];
            for (size_t c = 0; c < DIM; c++)
                change[r * DIM + c] += image * row[c];
        }
        for (size_t c = 0; c < DIM; c++)
            energy += (double)row[c] * row[c];
    }
    for (size_t r = 0; r < rank; r++) {
        double norm = 0;

        for (size_t c = 0; c < DIM; c++)
            basis[r * DIM + c] += rate * change[r * DIM + c] / energy;
        for (size_t other = 0; other < r; other++) {
            double product = 0;

            for (size_t c = 0; c < DIM; c++)
                product += basis[r * DIM + c] * basis[other * DIM + c];
            for (size_t c = 0; c < DIM; c++)
                basis[r * DIM + c] -= product * basis[other * DIM + c];
        }
        for (size_t c = 0; c < DIM; c++)
            norm += basis[r * DIM + c] * basis[r * DIM + c];
        for (size_t c = 0; c < DIM; c++)
            basis[r * DIM + c] /= sqrt(norm);
    }
    for (size_t t = 0; t < compressed + added; t++) {
        double back[DIM] = {0};

        for (size_t r = 0; r < rank; r++) {
            double latent = 0;

            for (size_t c = 0; c < DIM; c++)
                latent += basis[r * DIM + c] * x[t * DIM + c];
            for (size_t c = 0; c < DIM; c++)
                back[c] += latent * basis[r * DIM + c];
        }
        for (size_t c = 0; c < DIM; c++)
            x[t * DIM + c] = (float)back[c];
    }
}

/* Of 60 tokens 3 .. 54, then 10 at a time. */
START_TEST(test_ojakv)
{
    enum { SINK = 3, RECENT = 5, RANK = 6, EVERY = 10, SAMPLED = 25 };
    static double bases[LAYERS][KV_HEADS][2][RANK * DIM];
    const double rate = 4;
    char text[3 * TESTS_FOLDER_BYTES];
    struct calibration *calibration;
    size_t compressed = 0;
    struct error error;
    struct setup s;

    snprintf(text, sizeof text,
             "ojakv:calibration=@,ratio=0.375,sink=%d,recent=%d,update=%d,"
             "rows=%d,rate=%g",
             SINK, RECENT, EVERY, SAMPLED, rate);
    open_setup(&s, text, PKV_F32, 2);
    struct expected *e = expect_dense(&s, PKV_F32);

    ck_assert_msg(
        calibration_open(kv_spec_find(&s.spec, "calibration"), &s.model, &calibration, &error),
        "%s", error.text);
    for (size_t i = 0; i < LAYERS * KV_HEADS * 2; i++) {
        double moment[DIM * DIM];

        ck_assert(calibration_head(calibration, (enum calibration_part)(i % 2), i / 2 / KV_HEADS,
                                   i / 2 % KV_HEADS, moment, &error));
        ck_assert(low_rank_eigenvectors(moment, DIM, RANK,
                                        bases[i / 2 / KV_HEADS][i / 2 % KV_HEADS][i % 2]));
    }
    calibration_close(calibration);
    feed(&s, 60);
    ck_assert_double_le(output_error(&s, e, 60, 60), TOLERANCE);
    for (size_t tokens = 60; tokens < 140; tokens++) {
        const size_t added = compressed == 0                                ? 60 - SINK - RECENT
                             : tokens - SINK - RECENT == compressed + EVERY ? EVERY
                                                                            : 0;

        for (size_t i = 0; i < LAYERS * KV_HEADS && added > 0; i++) {
            const size_t l = i / KV_HEADS, h = i % KV_HEADS;

            expect_oja(e->k[l][h] + SINK * DIM, compressed, added, bases[l][h][0], RANK, SAMPLED,
                       rate);
            expect_oja(e->v[l][h] + SINK * DIM, compressed, added, bases[l][h][1], RANK, SAMPLED,
                       rate);
        }
        compressed += added;
        decode(&s, tokens + 1);
        ck_assert_double_le(output_error(&s, e, tokens + 1, 1), 1e-4);
    }
    ck_assert_uint_eq(compressed, 52 + 70);
    free(e);
    close_setup(&s);
}
END_TEST

/* At full rank nothing is lost, whatever the basis does. */
START_TEST(test_ojakv_at_full_rank)
{
    struct setup s;

    open_setup(&s, "ojakv:calibration=@,ratio=1,sink=2,recent=3,update=4,rate=50", PKV_F32, 2);
    struct expected *e = expect_dense(&s, PKV_F32);

    feed(&s, 80);
    for (size_t tokens = 80; tokens < 150; tokens++) {
        decode(&s, tokens + 1);
        ck_assert_double_le(output_error(&s, e, tokens + 1, 1), 1e-4);
    }
    free(e);
    close_setup(&s);
}
END_TEST

/* Elements that f16 has, of a vector longer than it reaches. */
START_TEST(test_ojakv_lengths)
{
    struct error error;
    struct setup s;

    open_setup(&s, "ojakv:calibration=@", PKV_F16, 1);
    for (size_t c = 0; c < DIM; c++)
        s.sequence.v[1][(2 * KV_HEADS + 1) * DIM + c] = 40000;
    open_step(&s, 1, 3, false);
    struct kv_layer io = layer_of(&s, 1, 3, false);

    ck_assert(!kv_store_layer(s.store, &io, &error));
    ck_assert_str_eq(error.text, "KV cache: layer 1, KV head 1, token 2: V is too long for latents "
                                 "in the storage type");
    kv_store_abort(s.store);
    close_setup(&s);
}
END_TEST

/* What a spec that needs a calibration says: without one, of what it does with it, and of one that
 * does not serve. */
START_TEST(test_calibration_spec)
{
    char text[2 * TESTS_FOLDER_BYTES], canonical[KV_SPEC_TEXT_BYTES];
    struct kv_spec spec;
    struct error error;
    struct setup s;

    open_sequence(&s);
    s.store = NULL;
    ck_assert(!kv_spec_parse("palu:ratio=0.5", &spec, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "--kv palu:ratio=0.5: calibration=FILE is missing"));
    ck_assert(!kv_spec_parse("ojakv", &spec, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "--kv ojakv: calibration=FILE is missing"));

    snprintf(text, sizeof text, "palu:calibration=%s", calibrations[0]);
    ck_assert(kv_spec_parse(text, &spec, &error) && kv_spec_resolve(&spec, &s.model, &error));
    ck_assert_ptr_nonnull(strstr(spec.note, "no Fisher information"));
    kv_spec_canonical(&spec, canonical);
    ck_assert_ptr_nonnull(strstr(canonical, ",ratio=0.6,ranks=uniform,align=1"));
    s.model.head_dim = 2 * DIM;
    ck_assert(!kv_spec_resolve(&spec, &s.model, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "is the calibration of another model"));
    snprintf(text, sizeof text, "ojakv:calibration=%s", calibrations[0]);
    ck_assert(kv_spec_parse(text, &spec, &error));
    ck_assert(!kv_spec_resolve(&spec, &s.model, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "is the calibration of another model"));
    s.model.head_dim = DIM;

    snprintf(text, sizeof text, "palu:calibration=%s,ranks=fisher", calibrations[0]);
    ck_assert(kv_spec_parse(text, &spec, &error));
    ck_assert(!kv_spec_resolve(&spec, &s.model, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "has no Fisher information"));

    snprintf(text, sizeof text, "palu:calibration=%s", calibrations[1]);
    ck_assert(kv_spec_parse(text, &spec, &error) && kv_spec_resolve(&spec, &s.model, &error));
    ck_assert_ptr_null(spec.note);
    kv_spec_canonical(&spec, canonical);
    ck_assert_ptr_nonnull(strstr(canonical, ",ratio=0.6,ranks=fisher,align=1"));

    snprintf(text, sizeof text, "palu:calibration=%s/none", folder);
    ck_assert(kv_spec_parse(text, &spec, &error));
    ck_assert(!kv_spec_resolve(&spec, &s.model, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "/none: No such file"));
    close_setup(&s);
}
END_TEST

/* Puts a NaN at the beginning (layers.0.hidden) or the end (layers.1.v) of a calibration's data. */
static void spoil(const char *path, bool beginning)
{
    const float nan_value = NAN;
    FILE *file = fopen(path, "r+b");
    uint64_t length;

    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fread(&length, sizeof length, 1, file), 1);
    if (beginning)
        fseek(file, (long)(sizeof length + length), SEEK_SET);
    else
        fseek(file, -(long)sizeof nan_value, SEEK_END);
    ck_assert_uint_eq(fwrite(&nan_value, sizeof nan_value, 1, file), 1);
    ck_assert_int_eq(fclose(file), 0);
}

START_TEST(test_calibration_that_is_not_finite)
{
    static const char *const names[] = {"palu", "ojakv"};
    static const char *const texts[] = {"tensor layers.0.hidden: element 0 is not finite",
                                        "tensor layers.1.v: element 511 is not finite"};
    struct setup s;

    open_sequence(&s);
    s.store = NULL;
    for (int i = 0; i < 2; i++) {
        const struct kv_store_options options = {
            .model = &s.model, .dtype = PKV_F32, .max_tokens = 10, .threads = 2};
        char path[TESTS_FOLDER_BYTES + 32], text[2 * TESTS_FOLDER_BYTES];
        struct kv_store *store = (struct kv_store *)&s;
        struct kv_spec spec;
        struct error error;

        snprintf(path, sizeof path, "%s/spoilt", folder);
        calibrate(&s, path);
        spoil(path, i == 0);
        snprintf(text, sizeof text, "%s:calibration=%s", names[i], path);
        ck_assert(kv_spec_parse(text, &spec, &error) && kv_spec_resolve(&spec, &s.model, &error));
        ck_assert(!kv_store_open(&spec, &options, &store, &error));
        ck_assert_ptr_null(store);
        tests_check_error(error.text, path, texts[i]);
    }
    close_setup(&s);
}
END_TEST

/* The positions that a head of a store retains: "0-3 7 9". */
static const char *retained_by(const struct setup *s, size_t layer, size_t kv_head)
{
    static char text[256];
    size_t positions[MAX_TOKENS], length = 0;
    size_t count = kv_store_retained(s->store, layer, kv_head, positions);

    text[0] = '\0';
    for (size_t i = 0, last; i < count; i = last + 1) {
        for (last = i; last + 1 < count && positions[last + 1] == positions[last] + 1; last++) {
        }
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%zu",
                                   length > 0 ? " " : "", positions[i]);
        if (last > i)
            length +=
                (size_t)snprintf(text + length, sizeof text - length, "-%zu", positions[last]);
    }
    return text;
}

/* The same, where all heads retain the same. */
static const char *retained(const struct setup *s)
{
    size_t positions[MAX_TOKENS], other[MAX_TOKENS];
    size_t count = kv_store_retained(s->store, 0, 0, positions);

    for (size_t l = 0; l < LAYERS; l++) {
        for (size_t h = 0; h < KV_HEADS; h++) {
            ck_assert_uint_eq(kv_store_retained(s->store, l, h, other), count);
            ck_assert_mem_eq(other, positions, count * sizeof *other);
        }
    }
    return retained_by(s, 0, 0);
}

START_TEST(test_streaming_retains)
{
    struct setup s;
    struct error error;

    open_setup(&s, "streaming:sink=2,recent=5", PKV_BF16, 1);
    ck_assert_str_eq(retained(&s), "");
    feed(&s, 1);
    ck_assert_str_eq(retained(&s), "0");
    decode(&s, 7);
    ck_assert_str_eq(retained(&s), "0-6");
    decode(&s, 8);
    ck_assert_str_eq(retained(&s), "0-1 3-7");
    decode(&s, 20);
    ck_assert_str_eq(retained(&s), "0-1 15-19");
    feed(&s, 30);
    ck_assert_str_eq(retained(&s), "0-1 45-49");
    ck_assert(kv_store_rewind(s.store, 49, &error));
    ck_assert_str_eq(retained(&s), "");
    close_setup(&s);

    open_setup(&s, "streaming", PKV_BF16, 1);
    feed(&s, 25); /* 15 of 25 */
    ck_assert_str_eq(retained(&s), "0-3 14-24");
    decode(&s, 100);
    ck_assert_str_eq(retained(&s), "0-3 89-99");
    close_setup(&s);

    open_setup(&s, "streaming:sink=0,ratio=0.5", PKV_BF16, 1);
    feed(&s, 10);
    ck_assert_str_eq(retained(&s), "5-9");
    close_setup(&s);
}
END_TEST

/* Outputs are those of the kept tokens at positions 0, 1, 2 ..., with the query behind them. */
START_TEST(test_streaming_positions)
{
    enum { KEPT = 11 };
    struct setup s;

    open_setup(&s, "streaming:sink=4,recent=7", PKV_F32, 1);
    feed(&s, 30);
    for (size_t token = 30; token < 60; token++) {
        decode(&s, token + 1);
        for (size_t l = 0; l < LAYERS; l++) {
            for (size_t g = 0; g < QUERY_HEADS; g++) {
                const struct sequence *q = &s.sequence;
                float query[DIM], k[(KEPT + 1) * DIM], v[(KEPT + 1) * DIM];
                double out[DIM];

                rotate_heads(&s.model, q->plain_q[l] + (token * QUERY_HEADS + g) * DIM, query, 1,
                             KEPT);
                for (size_t j = 0; j <= KEPT; j++) {
                    size_t t = j < 4 ? j : token - KEPT + j;
                    size_t from = (t * KV_HEADS + g / GROUP) * DIM;

                    rotate_heads(&s.model, q->plain_k[l] + from, k + j * DIM, 1, j);
                    memcpy(v + j * DIM, q->v[l] + from, DIM * sizeof *v);
                }
                attend_naively(query, DIM, 1, k, v, KEPT + 1, out, NULL);
                for (size_t c = 0; c < DIM; c++)
                    ck_assert_double_eq_tol(s.out[l][(token * QUERY_HEADS + g) * DIM + c], out[c],
                                            TOLERANCE);
            }
        }
    }
    close_setup(&s);
}
END_TEST

/* Attention that can be told by hand: token t has the key e_t, and the query of query head g at
 * position t is a large multiple of e_target: all of its attention goes to that token. Layer 1 has
 * the KV heads of layer 0 the other way round. */
#define TARGETS DIM /* tokens */
static void set_targets(struct setup *s, const unsigned char targets[QUERY_HEADS][TARGETS])
{
    for (size_t l = 0; l < LAYERS; l++) {
        float *q = s->sequence.q[l], *k = s->sequence.k[l];

        memset(q, 0, TARGETS * QUERY_HEADS * DIM * sizeof *q);
        memset(k, 0, TARGETS * KV_HEADS * DIM * sizeof *k);
        for (size_t t = 0; t < TARGETS; t++) {
            for (size_t h = 0; h < KV_HEADS; h++)
                k[(t * KV_HEADS + h) * DIM + t] = 1;
            for (size_t g = 0; g < QUERY_HEADS; g++) {
                size_t from = (g + l * GROUP) % QUERY_HEADS;

                q[(t * QUERY_HEADS + g) * DIM + targets[from][t]] = 1000;
            }
        }
    }
}

static void check_retained(const struct setup *s, const char *first, const char *second)
{
    for (size_t l = 0; l < LAYERS; l++) {
        for (size_t h = 0; h < KV_HEADS; h++)
            ck_assert_str_eq(retained_by(s, l, h), h == l ? first : second);
    }
}

/* Masses after the prompt of 10 tokens, of which 3 and 3 are kept:
 * first KV head: 0: 2, 1: 4, 2: 4, 4: 5, 6: 2, 8: 2, 9: 1; second: 0: 11, others: 1.
 * Of the query heads of the first alone, one would keep 0, 1 and 4, the other 0, 2 and 6. */
START_TEST(test_h2o_retains)
{
    static const unsigned char targets[QUERY_HEADS][TARGETS] = {
        {0, 1, 1, 1, 4, 4, 4, 4, 8, 4, 8, 9, 9, 10, 11, 11},
        {0, 1, 2, 2, 2, 2, 6, 6, 8, 9, 9, 9, 1, 10, 11, 11},
        {0},
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    };
    struct setup s;
    struct error error;

    open_setup(&s, "h2o", PKV_BF16, 1);
    set_targets(&s, targets);
    feed(&s, 10);
    check_retained(&s, "1-2 4 7-9", "0 5-9");
    decode(&s, 11); /* 7 has 0 */
    check_retained(&s, "1-2 4 8-10", "0 6-10");
    open_step(&s, LAYERS, 1, true);
    kv_store_abort(s.store);
    decode(&s, 12); /* 8 has 3 */
    check_retained(&s, "1-2 4 9-11", "0 7-11");
    decode(&s, 13); /* 1, 4 and 9 have 5, 2 has 4 */
    check_retained(&s, "1 4 9-12", "0 8-12");
    decode(&s, 14); /* 10 has 2 */
    check_retained(&s, "1 4 9 11-13", "0 9-13");
    feed(&s, 2); /* 11 has 4, 12 has 0 */
    check_retained(&s, "1 4 9 13-15", "0 11-15");
    ck_assert(kv_store_rewind(s.store, 15, &error));
    check_retained(&s, "", "");
    close_setup(&s);
}
END_TEST

/* Attended are what is retained and the new tokens. */
static void check_kept_attended(struct setup *s, const struct expected *e, size_t tokens)
{
    size_t positions[LAYERS][KV_HEADS][MAX_TOKENS], counts[LAYERS][KV_HEADS];

    for (size_t token = kv_store_tokens(s->store); token < tokens; token++) {
        for (size_t i = 0; i < LAYERS * KV_HEADS; i++)
            counts[i / KV_HEADS][i % KV_HEADS] = kv_store_retained(
                s->store, i / KV_HEADS, i % KV_HEADS, positions[i / KV_HEADS][i % KV_HEADS]);
        decode(s, token + 1);
        for (size_t i = 0; i < LAYERS * QUERY_HEADS; i++) {
            size_t l = i / QUERY_HEADS, g = i % QUERY_HEADS, h = g / GROUP;
            size_t rows = counts[l][h] + 1, first = (token * QUERY_HEADS + g) * DIM;
            float k[MAX_TOKENS * DIM], v[MAX_TOKENS * DIM];
            double out[DIM];

            positions[l][h][rows - 1] = token;
            for (size_t j = 0; j < rows; j++) {
                memcpy(k + j * DIM, e->k[l][h] + positions[l][h][j] * DIM, DIM * sizeof *k);
                memcpy(v + j * DIM, e->v[l][h] + positions[l][h][j] * DIM, DIM * sizeof *v);
            }
            attend_naively(s->sequence.q[l] + first, QUERY_HEADS * DIM, 1, k, v, rows, out, NULL);
            for (size_t c = 0; c < DIM; c++)
                ck_assert_double_eq_tol(s->out[l][first + c], out[c], TOLERANCE);
        }
    }
}

START_TEST(test_kept_tokens_are_attended)
{
    static const char *const names[] = {"h2o:heavy=0.2", "snapkv:window=7,ratio=0.3"};
    struct setup s;

    open_setup(&s, names[_i], PKV_BF16, 2);
    struct expected *e = expect_dense(&s, PKV_BF16);

    feed_as(&s, 90, _i % 2 == 0);
    check_kept_attended(&s, e, 130);
    free(e);
    close_setup(&s);
}
END_TEST

/* H2O on one head, from its definition: what is kept of `positions` and how heavy it is. */
static size_t evict_naively(size_t *positions, double *masses, size_t count, size_t budget,
                            size_t recent)
{
    for (; count > budget; count--) {
        size_t lightest = 0;

        for (size_t i = 1; i + recent < count; i++)
            lightest = masses[i] < masses[lightest] ? i : lightest;
        memmove(positions + lightest, positions + lightest + 1,
                (count - lightest - 1) * sizeof *positions);
        memmove(masses + lightest, masses + lightest + 1, (count - lightest - 1) * sizeof *masses);
    }
    return count;
}

/* A prompt of 70 tokens, then single ones, with random attention: 14 heavy and 7 recent. */
START_TEST(test_h2o_follows_its_definition)
{
    struct setup s;

    open_setup(&s, "h2o:heavy=0.2,recent=0.1", PKV_F32, 3);
    struct expected *e = expect_dense(&s, PKV_F32);
    size_t positions[LAYERS * KV_HEADS][MAX_TOKENS], counts[LAYERS * KV_HEADS] = {0};
    double masses[LAYERS * KV_HEADS][MAX_TOKENS] = {{0}};

    for (size_t tokens = 70, count = 70; tokens <= 120; tokens++, count = 1) {
        feed(&s, count);
        for (size_t i = 0; i < LAYERS * KV_HEADS; i++) {
            size_t l = i / KV_HEADS, h = i % KV_HEADS, found[MAX_TOKENS];
            float k[MAX_TOKENS * DIM];
            double out[MAX_TOKENS * DIM];

            for (size_t t = tokens - count; t < tokens; t++, counts[i]++) {
                positions[i][counts[i]] = t;
                masses[i][counts[i]] = 0;
            }
            for (size_t j = 0; j < counts[i]; j++)
                memcpy(k + j * DIM, e->k[l][h] + positions[i][j] * DIM, DIM * sizeof *k);
            for (size_t g = h * GROUP; g < (h + 1) * GROUP; g++)
                attend_naively(s.sequence.q[l] + ((tokens - count) * QUERY_HEADS + g) * DIM,
                               QUERY_HEADS * DIM, count, k, k, counts[i], out, masses[i]);
            counts[i] = evict_naively(positions[i], masses[i], counts[i], 21, 7);
            ck_assert_uint_eq(kv_store_retained(s.store, l, h, found), counts[i]);
            ck_assert_mem_eq(found, positions[i], counts[i] * sizeof *found);
        }
    }
    free(e);
    close_setup(&s);
}
END_TEST

/* Votes of the window, tokens 10 and 11, for tokens 0 to 9: of the first KV head 2 for 4, 2 for 6;
 * of the second 3 for 5 and 1 for 0. What earlier queries attend to has no vote. */
START_TEST(test_snapkv_retains)
{
    static const unsigned char targets[QUERY_HEADS][TARGETS] = {
        {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 6, 12, 13, 14, 15},
        {0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 4, 6, 12, 13, 14, 15},
        {0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 5, 12, 13, 14, 15},
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 5, 0, 12, 13, 14, 15},
    };
    static const struct {
        const char *spec, *first, *second;
    } cases[] = {
        /* Means: 5: 4/3, 3, 4, 6 and 7: 2/3; 4, 5 and 6: 1, 0 and 1: 1/3. */
        {"snapkv:window=2,kernel=3,capacity=3", "5 10-11", "6 10-11"},
        {"snapkv:window=2,kernel=3,capacity=5", "5-7 10-11", "4-6 10-11"},
        {"snapkv:window=2,kernel=3,capacity=6", "4-7 10-11", "1 4-6 10-11"},
        {"snapkv:window=2,kernel=3,capacity=7", "3-7 10-11", "0-1 4-6 10-11"},
        /* Maxima: 3 to 7: 2; 4, 5 and 6: 3, 0 and 1: 1. */
        {"snapkv:window=2,kernel=3,pool=max,capacity=3", "7 10-11", "6 10-11"},
        {"snapkv:window=2,kernel=3,pool=max,capacity=6", "4-7 10-11", "1 4-6 10-11"},
        /* The votes themselves; a token without any only after all others, and the last first. */
        {"snapkv:window=2,kernel=1,capacity=3", "6 10-11", "5 10-11"},
        {"snapkv:window=2,kernel=1,capacity=4", "4 6 10-11", "0 5 10-11"},
        {"snapkv:window=2,kernel=1,capacity=6", "4 6 8-11", "0 5 8-11"},
        /* round(0.4 12) = 5; round(0.2 12) = 2, which would be the window alone. */
        {"snapkv:window=2,kernel=3,ratio=0.4", "5-7 10-11", "4-6 10-11"},
        {"snapkv:window=2,kernel=3,ratio=0.2", "5 10-11", "6 10-11"},
        {"snapkv:window=2,kernel=3,capacity=12", "0-11", "0-11"},
        {"snapkv:window=50,ratio=0.1", "0-11", "0-11"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct setup s;
        struct error error;
        bool evicts = strcmp(cases[i].first, "0-11") != 0;
        char first[64], second[64];

        open_setup(&s, cases[i].spec, PKV_BF16, 1);
        set_targets(&s, targets);
        feed_as(&s, 12, i % 2 == 0);
        check_retained(&s, cases[i].first, cases[i].second);
        decode(&s, 14);
        feed(&s, 2);
        snprintf(first, sizeof first, "%.*s15", (int)strlen(cases[i].first) - 2, cases[i].first);
        snprintf(second, sizeof second, "%.*s15", (int)strlen(cases[i].second) - 2,
                 cases[i].second);
        check_retained(&s, first, second);
        ck_assert(kv_store_rewind(s.store, 12, &error));
        check_retained(&s, cases[i].first, cases[i].second);
        ck_assert(kv_store_rewind(s.store, 11, &error));
        check_retained(&s, evicts ? "" : "0-10", evicts ? "" : "0-10");
        close_setup(&s);
    }
}
END_TEST

/* With random attention, from the definition; kernel=3. */
START_TEST(test_snapkv_follows_its_definition)
{
    enum { PROMPT = 101, WINDOW = 6, BEFORE = PROMPT - WINDOW, KEPT = 61 };
    struct setup s;

    open_setup(&s, "snapkv:window=6,kernel=3", PKV_F32, 3);
    struct expected *e = expect_dense(&s, PKV_F32);

    feed(&s, PROMPT);
    for (size_t i = 0; i < LAYERS * KV_HEADS; i++) {
        size_t l = i / KV_HEADS, h = i % KV_HEADS, found[MAX_TOKENS], kept = 0;
        double votes[MAX_TOKENS] = {0}, scores[BEFORE], out[MAX_TOKENS * DIM];

        for (size_t g = h * GROUP; g < (h + 1) * GROUP; g++)
            attend_naively(s.sequence.q[l] + (BEFORE * QUERY_HEADS + g) * DIM, QUERY_HEADS * DIM,
                           WINDOW, e->k[l][h], e->v[l][h], PROMPT, out, votes);
        for (size_t t = 0; t < BEFORE; t++)
            scores[t] = votes[t] + (t > 0 ? votes[t - 1] : 0) + (t + 1 < BEFORE ? votes[t + 1] : 0);
        ck_assert_uint_eq(kv_store_retained(s.store, l, h, found), KEPT);
        for (size_t t = 0; t < PROMPT; t++) {
            size_t better = 0;

            for (size_t j = 0; j < BEFORE && t < BEFORE; j++)
                better += scores[j] > scores[t];
            if (better < KEPT - WINDOW)
                ck_assert_uint_eq(found[kept++], t);
        }
        ck_assert_uint_eq(kept, KEPT);
    }
    free(e);
    close_setup(&s);
}
END_TEST

/* ---- What policies share --------------------------------------------------------------------- */

START_TEST(test_dense_attention)
{
    static const size_t counts[] = {1, 2, 63, 64, 65, 150};
    struct setup s;

    open_setup(&s, "static", PKV_F32, 1);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        size_t count = counts[i], rows[KV_HEADS] = {count + 17, count};
        float *out = tests_allocate(count * QUERY_HEADS * DIM, sizeof *out);
        float *mass[KV_HEADS], *k[KV_HEADS], *v[KV_HEADS];
        const size_t from = count / 2;

        for (size_t h = 0; h < KV_HEADS; h++) {
            k[h] = random_rows(DIM, 1);
            v[h] = random_rows(DIM, 1);
            mass[h] = tests_allocate(rows[h], sizeof *mass[h]);
            for (size_t t = 0; t < rows[h]; t++)
                mass[h][t] = 5;
        }
        const struct dense_attention attention = {.model = &s.model,
                                                  .threads = 3,
                                                  .count = count,
                                                  .q = s.sequence.q[0],
                                                  .k = (const float *const *)k,
                                                  .v = (const float *const *)v,
                                                  .rows = rows,
                                                  .out = out,
                                                  .mass = mass,
                                                  .mass_from = from};
        struct dense_attention only_mass = attention;
        struct error error;

        ck_assert(dense_attention(&attention, &error));
        only_mass.out = NULL;
        ck_assert(dense_attention(&only_mass, &error));
        for (size_t h = 0; h < KV_HEADS; h++) {
            double *sums = tests_allocate(rows[h], sizeof *sums);
            double *expected = tests_allocate(count * DIM, sizeof *expected);

            for (size_t g = h * GROUP; g < (h + 1) * GROUP; g++) {
                const float *q = s.sequence.q[0] + g * DIM;

                attend_naively(q, QUERY_HEADS * DIM, count, k[h], v[h], rows[h], expected, NULL);
                for (size_t j = 0; j < count * DIM; j++)
                    ck_assert_double_eq_tol(out[(j / DIM * QUERY_HEADS + g) * DIM + j % DIM],
                                            expected[j], TOLERANCE);
                attend_naively(q + from * QUERY_HEADS * DIM, QUERY_HEADS * DIM, count - from, k[h],
                               v[h], rows[h], expected, sums);
            }
            for (size_t t = 0; t < rows[h]; t++)
                ck_assert_double_eq_tol(mass[h][t], 5 + 2 * sums[t], 1e-3);
            free(expected);
            free(sums);
            free(mass[h]);
            free(k[h]);
            free(v[h]);
        }
        free(out);
    }
    close_setup(&s);
}
END_TEST

/* As the library rounds. */
START_TEST(test_rounding)
{
    for (uint64_t bits = 0; bits < UINT64_C(1) << 32; bits += 9973) {
        float x = f32_from_bits((uint32_t)bits);

        if (isnan(x)) {
            require(isnan(rounding_to(PKV_F16, x)) && isnan(rounding_to(PKV_BF16, x)));
            continue;
        }
        require_msg(f32_bits(rounding_to(PKV_F16, x)) == f32_bits(stored(PKV_F16, x)), "%a",
                    (double)x);
        require_msg(f32_bits(rounding_to(PKV_BF16, x)) == f32_bits(stored(PKV_BF16, x)), "%a",
                    (double)x);
        require(rounding_to(PKV_F32, x) == x);
    }
}
END_TEST

/* Before the tests of a case: the calibrations that specs name. */
static void write_calibrations(void)
{
    static const float k[] = {4, 1}, v[] = {2, 1};
    struct setup s;

    tests_make_folder(folder);
    open_sequence(&s);
    s.store = NULL;
    for (int i = 0; i < 2; i++) {
        snprintf(calibrations[i], sizeof calibrations[i], "%s/calibration%d", folder, i);
        calibrate(&s, calibrations[i]);
    }
    tests_add_fisher(calibrations[1], k, v, LAYERS);
    close_setup(&s);
}

static void remove_calibrations(void)
{
    tests_remove_folder(folder);
}

int main(void)
{
    Suite *suite = suite_create("policies");
    TCase *every = tcase_create("every policy");
    TCase *tests = tcase_create("one by one");

    tcase_add_unchecked_fixture(every, write_calibrations, remove_calibrations);
    tcase_add_unchecked_fixture(tests, write_calibrations, remove_calibrations);
    tcase_add_loop_test(every, test_prompt_is_attended_exactly, 0, SPECS);
    tcase_add_loop_test(every, test_bytes_are_the_closed_form, 0, SPECS);
    tcase_add_loop_test(every, test_threads_change_nothing, 0, SPECS);
    tcase_add_loop_test(every, test_aborted_steps_leave_no_trace, 0, SPECS);
    tcase_add_loop_test(every, test_rewind, 0, SPECS);
    tcase_add_loop_test(every, test_what_does_not_fit_is_refused, 0, SPECS);
    suite_add_tcase(suite, every);
    tcase_add_test(tests, test_bytes_by_hand);
    tcase_add_test(tests, test_shares_of_the_paper);
    tcase_add_loop_test(tests, test_static_is_exact_for_ever, 0, 3);
    tcase_add_loop_test(tests, test_direct_quantisation, 0, 2);
    tcase_add_test(tests, test_kivi);
    tcase_add_test(tests, test_kivi_geometry);
    tcase_add_test(tests, test_global_svd);
    tcase_add_test(tests, test_xkv);
    tcase_add_test(tests, test_xkv_geometry);
    tcase_add_test(tests, test_low_rank_basis);
    tcase_add_test(tests, test_rope_pre);
    tcase_add_test(tests, test_palu_ranks);
    tcase_add_test(tests, test_palu_groups);
    tcase_add_test(tests, test_ojakv);
    tcase_add_test(tests, test_ojakv_at_full_rank);
    tcase_add_test(tests, test_ojakv_lengths);
    tcase_add_test(tests, test_calibration_spec);
    tcase_add_test(tests, test_calibration_that_is_not_finite);
    tcase_add_test(tests, test_streaming_retains);
    tcase_add_test(tests, test_streaming_positions);
    tcase_add_test(tests, test_h2o_retains);
    tcase_add_test(tests, test_h2o_follows_its_definition);
    tcase_add_test(tests, test_snapkv_retains);
    tcase_add_test(tests, test_snapkv_follows_its_definition);
    tcase_add_loop_test(tests, test_kept_tokens_are_attended, 0, 2);
    tcase_add_test(tests, test_dense_attention);
    tcase_add_test(tests, test_rounding);
    suite_add_tcase(suite, tests);
    machine_start_blas("check_policies");
    return tests_run(suite);
}
