/* SPDX-License-Identifier: MIT */
/* cpu/attention.c and cpu/store.c through the step API, against attention in f64 on what the cache
 * says it stores. */
#include "numeric.h"
#include "puzzlekv.h"
#include "tests.h"

#include <fenv.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define require_ok(cache, call)                                                                    \
    do {                                                                                           \
        if ((call) != PKV_OK)                                                                      \
            ck_abort_msg("%s: %s", #call, pkv_cache_message(cache));                               \
    } while (0)

static float *random_array(size_t n, float scale)
{
    float *x = tests_allocate(n, sizeof *x);

    for (size_t i = 0; i < n; i++)
        x[i] = scale * tests_random_float();
    return x;
}

static float rounded(pkv_dtype dtype, float x)
{
    return dtype == PKV_F32   ? x
           : dtype == PKV_F16 ? f16_to_f32(f16_from_f32(x))
                              : bf16_to_f32(bf16_from_f32(x));
}

/* ---- A cache and what it is fed ---- */

struct shape {
    size_t layers, query_heads, kv_heads, d;
    size_t page, sink, window, rank_k, rank_v; /* rank_k 0: without factors */
    int int4;                                  /* INT4_K, INT4_V or both; else native */
};

enum { INT4_K = 1, INT4_V = 2, FORMS = 4 };

static struct shape with_form(const struct shape *shape, int int4)
{
    struct shape changed = *shape;

    changed.int4 = int4;
    return changed;
}

static pkv_config make_config(const struct shape *shape, pkv_dtype dtype, size_t tokens)
{
    pkv_config config;

    pkv_config_init(&config, sizeof config);
    config.layers = shape->layers;
    config.query_heads = shape->query_heads;
    config.kv_heads = shape->kv_heads;
    config.head_dim = shape->d;
    config.page_tokens = shape->page;
    config.sink_pages = shape->sink;
    config.window_pages = shape->window;
    config.rank_k = shape->rank_k;
    config.rank_v = shape->rank_v;
    if (shape->int4 & INT4_K)
        config.factors_k = PKV_FACTORS_INT4;
    if (shape->int4 & INT4_V)
        config.factors_v = PKV_FACTORS_INT4;
    if (shape->rank_k == 0)
        config.factors_k = config.factors_v = PKV_FACTORS_NONE;
    config.dtype = dtype;
    config.max_tokens = tokens;
    config.threads = 2;
    return config;
}

/* A sequence's whole input and output, f32 and packed: [layers][tokens, heads, d]. */
struct stream {
    const struct shape *shape;
    size_t tokens;
    float *q, *k, *v, *out, *lse;
};

static struct stream make_stream(const struct shape *shape, size_t tokens, uint64_t seed)
{
    size_t q = shape->layers * tokens * shape->query_heads;
    size_t kv = shape->layers * tokens * shape->kv_heads * shape->d;
    struct stream stream = {shape, tokens, NULL, NULL, NULL, NULL, NULL};

    tests_seed(seed);
    /* Scores of a few units: neither uniform nor a single peak. */
    stream.q = random_array(q * shape->d, 6);
    stream.k = random_array(kv, 1);
    stream.v = random_array(kv, 1);
    stream.out = tests_allocate(q * shape->d, sizeof(float));
    stream.lse = tests_allocate(q, sizeof(float));
    return stream;
}

static void free_stream(struct stream *stream)
{
    free(stream->q);
    free(stream->k);
    free(stream->v);
    free(stream->out);
    free(stream->lse);
}

/* Tokens first .. of one layer. */
static pkv_step_io stream_io(const struct stream *stream, size_t layer, size_t first)
{
    const struct shape *shape = stream->shape;
    size_t row = layer * stream->tokens + first;
    size_t q = row * shape->query_heads * shape->d;
    size_t kv = row * shape->kv_heads * shape->d;

    return (pkv_step_io){
        .struct_size = sizeof(pkv_step_io),
        .q = {stream->q + q, PKV_F32, 0, 0},
        .k = {stream->k + kv, PKV_F32, 0, 0},
        .v = {stream->v + kv, PKV_F32, 0, 0},
        .out = {stream->out + q, PKV_F32, 0, 0},
        .lse = stream->lse + row * shape->query_heads,
    };
}

static void step(pkv_cache *cache, pkv_seq *seq, const struct stream *stream, size_t n)
{
    size_t first = pkv_seq_tokens(seq);
    pkv_step_item item = {seq, n};
    pkv_step *open;

    require_ok(cache, pkv_step_begin(cache, &item, 1, &open));
    for (size_t layer = 0; layer < stream->shape->layers; layer++) {
        pkv_step_io io = stream_io(stream, layer, first);

        require_ok(cache, tests_step_layer(open, layer, &io));
    }
    require_ok(cache, pkv_step_end(open));
}

static uint64_t digest(pkv_seq *seq)
{
    uint64_t value;

    ck_assert_int_eq(pkv_seq_digest(seq, &value), PKV_OK);
    return value;
}

/* ---- Attention in f64 ---- */

/* K and V that the next step attends: cached pages as stored, then new tokens as rounded.
 * [layers][kv_heads][tokens + n, d] each. */
struct context {
    size_t tokens; /* new ones included */
    float *k, *v;
};

static struct context read_context(pkv_seq *seq, const struct stream *stream, pkv_dtype dtype,
                                   size_t n)
{
    const struct shape *shape = stream->shape;
    size_t cached = pkv_seq_tokens(seq);
    struct context context = {.tokens = cached + n};
    size_t elements = shape->layers * shape->kv_heads * context.tokens * shape->d;

    context.k = tests_allocate(elements, sizeof(float));
    context.v = tests_allocate(elements, sizeof(float));
    for (size_t i = 0; i < shape->layers * shape->kv_heads; i++) {
        size_t layer = i / shape->kv_heads;
        size_t head = i % shape->kv_heads;
        float *k = context.k + i * context.tokens * shape->d;
        float *v = context.v + i * context.tokens * shape->d;

        for (size_t page = 0; page * shape->page < cached; page++) {
            size_t at = page * shape->page * shape->d;

            ck_assert_int_eq(pkv_seq_read_page(seq, layer, head, page, k + at, v + at), PKV_OK);
        }
        for (size_t t = cached; t < context.tokens; t++) {
            size_t row = ((layer * stream->tokens + t) * shape->kv_heads + head) * shape->d;

            for (size_t j = 0; j < shape->d; j++) {
                k[t * shape->d + j] = rounded(dtype, stream->k[row + j]);
                v[t * shape->d + j] = rounded(dtype, stream->v[row + j]);
            }
        }
    }
    return context;
}

static void free_context(struct context *context)
{
    free(context->k);
    free(context->v);
}

/* One query over the first `tokens` of K and V; returns m + ln(l). */
static double attend(const float *q, const float *k, const float *v, size_t tokens, size_t d,
                     double scale, double *out)
{
    double *score = tests_allocate(tokens, sizeof *score);
    double largest = -INFINITY;
    double sum = 0;

    for (size_t j = 0; j < d; j++)
        out[j] = 0;
    for (size_t t = 0; t < tokens; t++) {
        for (size_t j = 0; j < d; j++)
            score[t] += scale * q[j] * k[t * d + j];
        largest = fmax(largest, score[t]);
    }
    for (size_t t = 0; t < tokens; t++) {
        double p = exp(score[t] - largest);

        sum += p;
        for (size_t j = 0; j < d; j++)
            out[j] += p * v[t * d + j];
    }
    for (size_t j = 0; j < d; j++)
        out[j] /= sum;
    free(score);
    return largest + log(sum);
}

/* The stream's outputs of the last n tokens of the context: max |out - f64| / max |out|. */
static double output_error(const struct stream *stream, const struct context *context, size_t n,
                           double *lse_error)
{
    const struct shape *shape = stream->shape;
    const size_t d = shape->d;
    double *exact = tests_allocate(d, sizeof *exact);
    double error = 0;
    double largest = 0;

    *lse_error = 0;
    for (size_t layer = 0; layer < shape->layers; layer++) {
        for (size_t t = context->tokens - n; t < context->tokens; t++) {
            if (n > 64 && t % 5 != 0 && t != context->tokens - 1)
                continue; /* f64 takes its time */
            for (size_t h = 0; h < shape->query_heads; h++) {
                size_t row = (layer * stream->tokens + t) * shape->query_heads + h;
                size_t head = h / (shape->query_heads / shape->kv_heads);
                size_t at = (layer * shape->kv_heads + head) * context->tokens * d;
                double lse = attend(stream->q + row * d, context->k + at, context->v + at, t + 1, d,
                                    1 / sqrt((double)d), exact);

                *lse_error = fmax(*lse_error, tests_difference(lse, stream->lse[row]));
                for (size_t j = 0; j < d; j++) {
                    error = fmax(error, tests_difference(stream->out[row * d + j], exact[j]));
                    largest = fmax(largest, fabs(exact[j]));
                }
            }
        }
    }
    free(exact);
    return error / largest;
}

/* ---- Every kind of cache and step ---- */

static const struct shape shapes[] = {
    {1, 1, 1, 8, 8, 0, 0, 1, 1, 0},      {2, 3, 3, 16, 8, 1, 1, 8, 3, 0},
    {1, 9, 3, 64, 32, 1, 1, 16, 14, 0},  {2, 4, 2, 24, 16, 2, 0, 5, 16, 0},
    {1, 8, 1, 40, 24, 0, 2, 13, 7, 0},   {1, 5, 1, 128, 32, 1, 1, 32, 31, 0},
    {1, 7, 1, 256, 40, 1, 0, 17, 40, 0}, {1, 2, 2, 8, 64, 0, 0, 8, 8, 0},
    {1, 6, 1, 72, 256, 0, 0, 33, 1, 0},  {1, 12, 2, 64, 32, 2, 2, 0, 0, 0},
    {1, 4, 4, 32, 8, 0, 0, 0, 0, 0},     {1, 8, 2, 128, 32, 1, 1, 16, 13, 0},
};

#define SHAPES (sizeof shapes / sizeof *shapes)

/* Prefill, chunks around page and block ends, single tokens. */
static const size_t splits[][12] = {
    {300, 1, 1, 33, 1},
    {1, 31, 32, 33, 64, 7, 1, 96, 1, 70},
    {77, 1, 1, 1, 130, 2, 124},
};

#define SPLITS       (sizeof splits / sizeof *splits)
#define SPLIT_TOKENS 336

static void check_outputs(const struct shape *shape, pkv_dtype dtype, const char *isa,
                          const size_t *chunks)
{
    /* Where everything is computed in f32 the types differ in storage alone, and all are held to
     * f32's error: rounding of scores of up to 30 by the sums over d and over the tokens. */
    const bool packed = tests_on_cpu() ? dtype == PKV_BF16 && strcmp(isa, "avx512") == 0
                                       : dtype != PKV_F32; /* by tensor cores */
    const double most = packed ? 5e-3 : 1e-5;
    struct stream stream = make_stream(shape, SPLIT_TOKENS, 3);
    pkv_config config = make_config(shape, dtype, SPLIT_TOKENS);
    pkv_cache *cache;
    pkv_seq *seq;

    config.isa = isa;
    cache = tests_open_cache(&config);
    ck_assert_str_eq(pkv_cache_isa(cache), isa);
    require_ok(cache, pkv_seq_open(cache, &seq));
    for (size_t i = 0; i < 12 && chunks[i] > 0; i++) {
        struct context context = read_context(seq, &stream, dtype, chunks[i]);
        double lse_error;
        double error;

        step(cache, seq, &stream, chunks[i]);
        error = output_error(&stream, &context, chunks[i], &lse_error);
        if (!(error <= most) || !(lse_error <= (packed ? 4e-3 : 2e-5)))
            ck_abort_msg(
                "%s, type %d, %zu/%zu heads, d %zu, P %zu, ranks %zu %zu, INT4 %d, at %zu + "
                "%zu: error %g, of lse %g",
                isa, dtype, shape->query_heads, shape->kv_heads, shape->d, shape->page,
                shape->rank_k, shape->rank_v, shape->int4, pkv_seq_tokens(seq) - chunks[i],
                chunks[i], error, lse_error);
        free_context(&context);
    }
    ck_assert_uint_eq(pkv_seq_tokens(seq), SPLIT_TOKENS);
    pkv_cache_close(cache);
    free_stream(&stream);
}

static const char *isas[TESTS_ISAS];
static size_t n_isas;

/* Where a GPU is emulated each shape has one type: the types differ in how elements are loaded. */
static bool is_tested(size_t shape, int type)
{
    return tests_on_cpu() || (shape + (size_t)type) % 3 == 0;
}

START_TEST(outputs)
{
    for (size_t i = 0; i < SHAPES; i++)
        if (is_tested(i, _i))
            check_outputs(&shapes[i], (pkv_dtype)(_i % 3), isas[_i / 3],
                          splits[(i + (size_t)_i) % SPLITS]);
}
END_TEST

/* Every shape with factors, in both and in mixed forms. */
START_TEST(outputs_of_int4)
{
    for (size_t i = 0; i < SHAPES; i++) {
        struct shape shape = with_form(&shapes[i], 3 - (int)((i + (size_t)_i) % 3));

        if (shape.rank_k > 0 && is_tested(i, _i))
            check_outputs(&shape, (pkv_dtype)(_i % 3), isas[_i / 3],
                          splits[(i + 1 + (size_t)_i) % SPLITS]);
    }
}
END_TEST

/* ---- The fixture ---- */

enum { FIXTURE_TOKENS = 300, FIXTURE_HEADS = 3, FIXTURE_DIM = 64 };

static void check_states(pkv_seq *seq, const json_t *json)
{
    const char *name;
    json_t *pages;
    size_t listed = 0;

    json_object_foreach((json_t *)json, name, pages)
    {
        size_t i;
        json_t *number;

        json_array_foreach(pages, i, number)
        {
            pkv_page_info info = {.struct_size = sizeof info};

            ck_assert_int_eq(pkv_seq_page(seq, (size_t)json_integer_value(number), &info), PKV_OK);
            ck_assert_str_eq(pkv_page_state_name(info.state), name);
            listed++;
        }
    }
    ck_assert_uint_eq(listed, 10);
}

/* The first tokens in one step, the last alone, with all three queries. */
static void check_fixture(const json_t *json, const char *name, const struct shape *shape,
                          double tolerance, const char *isa)
{
    struct stream stream = make_stream(shape, FIXTURE_TOKENS, 1);
    pkv_config config = make_config(shape, PKV_F32, FIXTURE_TOKENS);
    const size_t q_elements = FIXTURE_HEADS * FIXTURE_DIM;
    const float *out = stream.out + (FIXTURE_TOKENS - 1) * q_elements;
    json_t *rows = json_object_get(json_object_get(json, "output"), name);
    pkv_cache *cache;
    pkv_seq *seq;

    free(stream.k);
    free(stream.v);
    stream.k = tests_read_f32(tests_path("attention/k.f32"), FIXTURE_TOKENS * FIXTURE_DIM);
    stream.v = tests_read_f32(tests_path("attention/v.f32"), FIXTURE_TOKENS * FIXTURE_DIM);

    float *q = tests_read_f32(tests_path("attention/q.f32"), q_elements);

    memcpy(stream.q + (FIXTURE_TOKENS - 1) * q_elements, q, q_elements * sizeof *q);
    free(q);
    config.isa = isa;
    cache = tests_open_cache(&config);
    require_ok(cache, pkv_seq_open(cache, &seq));
    step(cache, seq, &stream, FIXTURE_TOKENS - 1);
    if (shape->rank_k > 0)
        check_states(seq, json_object_get(json, "page_states"));
    step(cache, seq, &stream, 1);
    ck_assert_uint_eq(json_array_size(rows), FIXTURE_HEADS);
    for (size_t i = 0; i < q_elements; i++) {
        json_t *row = json_array_get(rows, i / FIXTURE_DIM);

        require(fabs(out[i] - json_real_value(json_array_get(row, i % FIXTURE_DIM))) <= tolerance);
    }
    pkv_cache_close(cache);
    free_stream(&stream);
}

START_TEST(fixture)
{
    const struct shape raw = {1, FIXTURE_HEADS, 1, FIXTURE_DIM, 32, 1, 1, 0, 0, 0};
    const struct shape puzzle = {1, FIXTURE_HEADS, 1, FIXTURE_DIM, 32, 1, 1, 16, 14, 0};
    const struct shape int4 = with_form(&puzzle, INT4_K | INT4_V);
    json_t *json = tests_json(tests_path("attention/expected.json"));

    check_fixture(json, "raw", &raw, 1e-4, isas[_i]);
    check_fixture(json, "puzzle_16_14", &puzzle, 1e-4, isas[_i]);
    check_fixture(json, "puzzle_16_14_int4", &int4, 1e-3, isas[_i]);
    json_decref(json);
}
END_TEST

/* ---- What must not change a bit ---- */

static const struct shape small = {2, 6, 2, 32, 8, 1, 1, 5, 4, 0};

/* Feeds a whole stream in chunks and returns the sequence's digest. */
static uint64_t run_stream(const struct shape *shape, pkv_dtype dtype, unsigned threads,
                           struct stream *stream, const size_t *chunks)
{
    pkv_config config = make_config(shape, dtype, stream->tokens);
    pkv_cache *cache;
    pkv_seq *seq;
    uint64_t value;

    config.threads = threads;
    cache = tests_open_cache(&config);
    require_ok(cache, pkv_seq_open(cache, &seq));
    for (size_t done = 0; done < stream->tokens; done += *chunks++)
        step(cache, seq, stream, *chunks);
    value = digest(seq);
    pkv_cache_close(cache);
    return value;
}

static void require_same_output(const struct stream *a, const struct stream *b)
{
    size_t rows = a->shape->layers * a->tokens * a->shape->query_heads;

    require(memcmp(a->out, b->out, rows * a->shape->d * sizeof(float)) == 0);
    require(memcmp(a->lse, b->lse, rows * sizeof(float)) == 0);
}

/* Long contexts, so that single tokens are split into runs, and many pages and blocks. */
START_TEST(threads_change_nothing)
{
    static const size_t chunks[] = {700, 1, 1, 40, 1, 1, 156};
    static const unsigned threads[] = {1, 2, 5};
    const struct shape wide = {1, 8, 2, 64, 32, 1, 1, 16, 14, 0};
    const struct shape small_int4 = with_form(&small, INT4_K | INT4_V);
    const struct shape wide_int4 = with_form(&wide, INT4_K | INT4_V);
    const struct shape *const all[] = {&small, &wide, &small_int4, &wide_int4};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct stream first = make_stream(all[i], 900, 5);
        uint64_t expected = run_stream(all[i], PKV_BF16, threads[0], &first, chunks);

        for (size_t j = 1; j < sizeof threads / sizeof *threads; j++) {
            struct stream stream = make_stream(all[i], 900, 5);

            ck_assert_uint_eq(run_stream(all[i], PKV_BF16, threads[j], &stream, chunks), expected);
            require_same_output(&first, &stream);
            free_stream(&stream);
        }
        free_stream(&first);
    }
}
END_TEST

START_TEST(splits_change_no_contents)
{
    static const size_t more[][12] = {{336}, {8, 328}, {335, 1}, {5, 3, 8, 16, 24, 7, 1, 9, 263}};
    const struct shape shape = with_form(&small, _i);
    const size_t stride = tests_on_cpu() ? 1 : 3; /* some of it where a GPU is emulated */

    for (int type = _i % (int)stride; type < 3; type += (int)stride) {
        struct stream stream = make_stream(&shape, SPLIT_TOKENS, 9);
        uint64_t expected = run_stream(&shape, (pkv_dtype)type, 2, &stream, splits[0]);

        for (size_t i = stride; i < SPLITS; i += stride)
            ck_assert_uint_eq(run_stream(&shape, (pkv_dtype)type, 2, &stream, splits[i]), expected);
        for (size_t i = 0; i < sizeof more / sizeof *more; i += stride)
            ck_assert_uint_eq(run_stream(&shape, (pkv_dtype)type, 2, &stream, more[i]), expected);
        free_stream(&stream);
    }
}
END_TEST

/* Three sequences a step, each at its own place, against the same three alone. */
START_TEST(batches_change_nothing)
{
    enum { N = 3, STEPS = 5 };
    static const size_t chunks[N][STEPS + 1] = {
        {100, 1, 1, 37, 1}, {1, 1, 64, 1, 3}, {33, 200, 1, 1, 1}};
    static const size_t tokens[N] = {140, 70, 236};
    const struct shape form = with_form(&small, _i);
    const struct shape *shape = &form;
    pkv_config config = make_config(shape, PKV_F16, 446);
    struct stream batch[N];
    pkv_seq *seqs[N];
    pkv_cache *cache;

    config.max_sequences = N;
    cache = tests_open_cache(&config);
    for (size_t i = 0; i < N; i++) {
        batch[i] = make_stream(shape, tokens[i], 20 + i);
        require_ok(cache, pkv_seq_open(cache, &seqs[i]));
    }
    for (size_t s = 0; s < STEPS; s++) {
        pkv_step_item items[N];
        size_t rows = 0;
        pkv_step *open;

        for (size_t i = 0; i < N; i++) {
            items[i] = (pkv_step_item){seqs[i], chunks[i][s]};
            rows += chunks[i][s];
        }
        require_ok(cache, pkv_step_begin(cache, items, N, &open));
        for (size_t layer = 0; layer < shape->layers; layer++) {
            struct stream joined = make_stream(shape, rows, 1);
            size_t q_row = shape->query_heads * shape->d;
            size_t kv_row = shape->kv_heads * shape->d;
            size_t row = 0;

            for (size_t i = 0; i < N; i++) {
                pkv_step_io io = stream_io(&batch[i], layer, pkv_seq_tokens(seqs[i]));
                size_t n = chunks[i][s];

                memcpy(joined.q + row * q_row, io.q.data, n * q_row * sizeof(float));
                memcpy(joined.k + row * kv_row, io.k.data, n * kv_row * sizeof(float));
                memcpy(joined.v + row * kv_row, io.v.data, n * kv_row * sizeof(float));
                row += n;
            }

            pkv_step_io all = stream_io(&joined, 0, 0);

            require_ok(cache, tests_step_layer(open, layer, &all));
            row = 0;
            for (size_t i = 0; i < N; i++) {
                pkv_step_io io = stream_io(&batch[i], layer, pkv_seq_tokens(seqs[i]));
                size_t n = chunks[i][s];

                memcpy(io.out.data, joined.out + row * q_row, n * q_row * sizeof(float));
                memcpy(io.lse, joined.lse + row * shape->query_heads,
                       n * shape->query_heads * sizeof(float));
                row += n;
            }
            free_stream(&joined);
        }
        require_ok(cache, pkv_step_end(open));
    }
    for (size_t i = 0; i < N; i++) {
        struct stream alone = make_stream(shape, tokens[i], 20 + i);

        ck_assert_uint_eq(run_stream(shape, PKV_F16, 2, &alone, chunks[i]), digest(seqs[i]));
        require_same_output(&alone, &batch[i]);
        free_stream(&alone);
        free_stream(&batch[i]);
    }
    pkv_cache_close(cache);
}
END_TEST

/* One token after many equals the last row of all at once where nothing is factorized, but for the
 * order of sums and, on a device, for weights that are rounded where there are many. */
START_TEST(decode_continues_prefill)
{
    static const size_t at_once[] = {300};
    static const size_t last_alone[] = {299, 1};
    const struct shape shape = {1, 6, 2, 64, 32, 1, 1, 0, 0, 0};
    struct stream a = make_stream(&shape, 300, 31);
    struct stream b = make_stream(&shape, 300, 31);
    size_t q_row = shape.query_heads * shape.d;
    float limit = 1e-5f;

    run_stream(&shape, PKV_BF16, 2, &a, at_once);
    run_stream(&shape, PKV_BF16, 2, &b, last_alone);
    for (size_t i = 299 * q_row; i < 300 * q_row && !tests_on_cpu(); i++)
        limit = fmaxf(limit, 5e-3f * fabsf(a.out[i]));
    for (size_t i = 299 * q_row; i < 300 * q_row; i++)
        require(fabsf(a.out[i] - b.out[i]) <= limit);
    free_stream(&a);
    free_stream(&b);
}
END_TEST

/* ---- Types and strides ---- */

static size_t type_bytes(pkv_dtype dtype)
{
    return dtype == PKV_F32 ? 4 : 2;
}

/* The caller's rounding mode changes no output, whichever calls it is set in, nor what is read. */
START_TEST(rounding_modes_change_nothing)
{
    enum { TOKENS = 90 };
    const struct shape shape = {1, 2, 1, 24, 8, 1, 1, 6, 5, _i}; /* 1 / sqrt(24) is not exact */
    const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    float *outputs[2] = {NULL}, *lse[2] = {NULL}, pages[2][2][8 * 24];

    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        const size_t to = i > 0;
        struct stream stream = make_stream(&shape, TOKENS, 5);
        pkv_config config = make_config(&shape, PKV_F32, TOKENS);
        pkv_cache *cache;
        pkv_seq *seq;

        fesetround(modes[i]);
        cache = tests_open_cache(&config);
        require_ok(cache, pkv_seq_open(cache, &seq));
        step(cache, seq, &stream, TOKENS - 1);
        step(cache, seq, &stream, 1);
        require_ok(cache, pkv_seq_read_page(seq, 0, 0, 3, pages[to][0], pages[to][1]));
        ck_assert_int_eq(fegetround(), modes[i]);
        fesetround(FE_TONEAREST);
        outputs[to] = stream.out;
        lse[to] = stream.lse;
        stream.out = stream.lse = NULL;
        if (to) {
            ck_assert_mem_eq(outputs[0], outputs[1], TOKENS * 2 * 24 * sizeof(float));
            ck_assert_mem_eq(lse[0], lse[1], TOKENS * 2 * sizeof(float));
            ck_assert_mem_eq(pages[0], pages[1], sizeof pages[0]);
            free(outputs[1]);
            free(lse[1]);
        }
        pkv_cache_close(cache);
        free_stream(&stream);
    }
    free(outputs[0]);
    free(lse[0]);
}
END_TEST

/* Copies [tokens, heads, d] into rows of a wider buffer. */
static void spread(const float *from, size_t tokens, size_t heads, size_t d, pkv_dtype dtype,
                   char *to, size_t token_stride, size_t head_stride)
{
    for (size_t t = 0; t < tokens; t++) {
        for (size_t h = 0; h < heads; h++) {
            for (size_t j = 0; j < d; j++) {
                float x = from[(t * heads + h) * d + j];
                size_t at = t * token_stride + h * head_stride + j;

                if (dtype == PKV_F32)
                    ((float *)(void *)to)[at] = x;
                else
                    ((uint16_t *)(void *)to)[at] =
                        dtype == PKV_F16 ? f16_from_f32(x) : bf16_from_f32(x);
            }
        }
    }
}

/* A fused QKV buffer of each type into an output of each type with gaps, against packed f32 of the
 * same values. */
START_TEST(types_and_strides)
{
    enum { TOKENS = 45, GAP = 3 };
    const struct shape shape = {1, 6, 2, 40, 8, 1, 1, 5, 4, 0};
    const pkv_dtype type = (pkv_dtype)(_i % 3);
    const pkv_dtype out_type = (pkv_dtype)(_i / 3);
    const size_t d = shape.d;
    const size_t head_stride = d + GAP;
    const size_t token_stride = (shape.query_heads + 2 * shape.kv_heads) * head_stride + 5;
    const size_t out_head_stride = d + GAP;
    const size_t out_token_stride = shape.query_heads * out_head_stride + 1;
    struct stream packed = make_stream(&shape, TOKENS, 41);
    size_t q_elements = TOKENS * shape.query_heads * d;
    size_t kv_elements = TOKENS * shape.kv_heads * d;
    char *fused = tests_allocate(TOKENS * token_stride, type_bytes(type));
    char *out = tests_allocate(TOKENS * out_token_stride, type_bytes(out_type));
    char *untouched = tests_allocate(TOKENS * out_token_stride, type_bytes(out_type));
    static const size_t chunks[] = {TOKENS};
    pkv_config config = make_config(&shape, PKV_BF16, TOKENS);
    pkv_cache *cache = tests_open_cache(&config);
    size_t k_at = shape.query_heads * head_stride;
    size_t v_at = k_at + shape.kv_heads * head_stride;
    pkv_step_io io = {
        .struct_size = sizeof io,
        .q = {fused, type, token_stride, head_stride},
        .k = {fused + k_at * type_bytes(type), type, token_stride, head_stride},
        .v = {fused + v_at * type_bytes(type), type, token_stride, head_stride},
        .out = {out, out_type, out_token_stride, out_head_stride},
    };
    pkv_step_item item = {.tokens = TOKENS};
    pkv_step *open;

    for (size_t i = 0; i < q_elements; i++)
        packed.q[i] = rounded(type, packed.q[i]);
    for (size_t i = 0; i < kv_elements; i++) {
        packed.k[i] = rounded(type, packed.k[i]);
        packed.v[i] = rounded(type, packed.v[i]);
    }
    spread(packed.q, TOKENS, shape.query_heads, d, type, fused, token_stride, head_stride);
    spread(packed.k, TOKENS, shape.kv_heads, d, type, fused + k_at * type_bytes(type), token_stride,
           head_stride);
    spread(packed.v, TOKENS, shape.kv_heads, d, type, fused + v_at * type_bytes(type), token_stride,
           head_stride);

    uint64_t expected = run_stream(&shape, PKV_BF16, 2, &packed, chunks);

    memset(out, 0x5a, TOKENS * out_token_stride * type_bytes(out_type));
    memset(untouched, 0x5a, TOKENS * out_token_stride * type_bytes(out_type));
    require_ok(cache, pkv_seq_open(cache, &item.seq));
    require_ok(cache, pkv_step_begin(cache, &item, 1, &open));
    require_ok(cache, tests_step_layer(open, 0, &io));
    require_ok(cache, pkv_step_end(open));
    ck_assert_uint_eq(digest(item.seq), expected);
    /* Every byte: the rows as expected, the gaps as before. */
    spread(packed.out, TOKENS, shape.query_heads, d, out_type, untouched, out_token_stride,
           out_head_stride);
    require(memcmp(out, untouched, TOKENS * out_token_stride * type_bytes(out_type)) == 0);
    pkv_cache_close(cache);
    free(fused);
    free(out);
    free(untouched);
    free_stream(&packed);
}
END_TEST

START_TEST(storing_without_attending)
{
    enum { TOKENS = 75 };
    struct stream stream = make_stream(&small, TOKENS, 51);
    static const size_t chunks[] = {TOKENS};
    uint64_t expected = run_stream(&small, PKV_F32, 2, &stream, chunks);
    pkv_config config = make_config(&small, PKV_F32, TOKENS);
    pkv_cache *cache = tests_open_cache(&config);
    pkv_step_item item = {.tokens = TOKENS};
    pkv_step *open;

    require_ok(cache, pkv_seq_open(cache, &item.seq));
    require_ok(cache, pkv_step_begin(cache, &item, 1, &open));
    for (size_t layer = 0; layer < small.layers; layer++) {
        pkv_step_io io = stream_io(&stream, layer, 0);

        io.q = (pkv_input){0};
        io.out = (pkv_output){0};
        io.lse = NULL;
        require_ok(cache, tests_step_layer(open, layer, &io));
    }
    require_ok(cache, pkv_step_end(open));
    ck_assert_uint_eq(digest(item.seq), expected);
    pkv_cache_close(cache);
    free_stream(&stream);
}
END_TEST

/* ---- What is stored ---- */

/* Dense pages read back as rounded; a page rebuilt by a truncation is L R as it read before. */
START_TEST(contents)
{
    enum { TOKENS = 60 };
    const pkv_dtype type = (pkv_dtype)(_i % 3);
    const struct shape form = with_form(&small, _i / 3);
    const struct shape *shape = &form; /* P 8: pages 0 sink, 1 .. 5 factorized, 6 window */
    struct stream stream = make_stream(shape, TOKENS, 61);
    pkv_config config = make_config(shape, type, TOKENS);
    pkv_cache *cache = tests_open_cache(&config);
    float k[2][8 * 32], v[2][8 * 32];
    pkv_seq *seq;

    require_ok(cache, pkv_seq_open(cache, &seq));
    step(cache, seq, &stream, 51);
    step(cache, seq, &stream, 9);
    for (size_t page = 0; page < 8; page = page == 0 ? 6 : page + 1) {
        size_t n = page == 7 ? 4 : 8;

        require_ok(cache, pkv_seq_read_page(seq, 1, 1, page, k[0], v[0]));
        for (size_t i = 0; i < n * shape->d; i++) {
            size_t token = TOKENS + page * 8 + i / shape->d; /* of layer 1 */
            size_t at = (token * shape->kv_heads + 1) * shape->d + i % shape->d;

            require(k[0][i] == rounded(type, stream.k[at]));
            require(v[0][i] == rounded(type, stream.v[at]));
        }
    }
    require_ok(cache, pkv_seq_read_page(seq, 1, 1, 3, k[0], v[0]));
    require_ok(cache, pkv_seq_truncate(seq, 29));
    require_ok(cache, pkv_seq_read_page(seq, 1, 1, 3, k[1], v[1]));
    for (size_t i = 0; i < 5 * shape->d; i++) {
        /* One unit of the last place of the storage type, where f32 sums may differ. */
        float unit = type == PKV_F32 ? 0x1p-22f : type == PKV_F16 ? 0x1p-10f : 0x1p-7f;

        require(fabsf(k[1][i] - rounded(type, k[0][i])) <= unit * fabsf(k[0][i]) + 1e-6f);
        require(fabsf(v[1][i] - rounded(type, v[0][i])) <= unit * fabsf(v[0][i]) + 1e-6f);
        require(k[1][i] == rounded(type, k[1][i]));
    }
    pkv_cache_close(cache);
    free_stream(&stream);
}
END_TEST

/* K near the end of f16's range: where L R exceeds it, the rebuilt page stays at the end. */
START_TEST(rebuilt_pages_stay_finite)
{
    enum { HEADS = 64, LENGTH = 8, DIM = 8, PAGE = LENGTH * DIM };
    const struct shape shape = {1, HEADS, HEADS, DIM, LENGTH, 0, 0, DIM, DIM, 0};
    struct stream stream = make_stream(&shape, LENGTH, 91);
    pkv_config config = make_config(&shape, PKV_F16, LENGTH);
    size_t saturated = 0;
    static float before[HEADS][PAGE], v[PAGE], after[PAGE];

    for (size_t i = 0; i < HEADS * PAGE; i++) {
        stream.k[i] *= 2000; /* so that L mixes all rows */
        if (i % DIM == i / (HEADS * DIM))
            stream.k[i] = 65504;
    }

    pkv_cache *cache = tests_open_cache(&config);
    pkv_seq *seq;

    require_ok(cache, pkv_seq_open(cache, &seq));
    step(cache, seq, &stream, LENGTH);
    for (size_t head = 0; head < HEADS; head++)
        require_ok(cache, pkv_seq_read_page(seq, 0, head, 0, before[head], v));
    require_ok(cache, pkv_seq_truncate(seq, LENGTH - 1));
    for (size_t head = 0; head < HEADS; head++) {
        require_ok(cache, pkv_seq_read_page(seq, 0, head, 0, after, v));
        for (size_t i = 0; i < (LENGTH - 1) * DIM; i++) {
            saturated += fabsf(before[head][i]) >= 65520;
            require(fabsf(before[head][i]) < 65519 || fabsf(after[i]) == 65504);
        }
    }
    ck_assert_uint_gt(saturated, 0);
    pkv_cache_close(cache);
    free_stream(&stream);
}
END_TEST

/* A fork that goes on in a shared page, and one whose window page becomes factors twice. */
START_TEST(shared_pages)
{
    static const size_t a_chunks[] = {27, 30};
    static const size_t b_chunks[] = {27, 1, 29};
    const struct shape form = with_form(&small, _i);
    const struct shape *shape = &form;
    struct stream a = make_stream(shape, 57, 71);
    struct stream b = make_stream(shape, 57, 72);
    pkv_config config = make_config(shape, PKV_BF16, 114);
    pkv_seq *seq, *fork;
    pkv_cache *cache;

    for (size_t layer = 0; layer < shape->layers; layer++) {
        size_t at = layer * 57 * shape->kv_heads * shape->d;
        size_t bytes = 27 * shape->kv_heads * shape->d * sizeof(float);

        memcpy(b.k + at, a.k + at, bytes);
        memcpy(b.v + at, a.v + at, bytes);
    }
    config.max_sequences = 2;
    cache = tests_open_cache(&config);
    require_ok(cache, pkv_seq_open(cache, &seq));
    step(cache, seq, &a, 27);
    require_ok(cache, pkv_seq_fork(seq, &fork));
    step(cache, fork, &b, 1);
    step(cache, seq, &a, 30);
    step(cache, fork, &b, 29);

    uint64_t digest_a = digest(seq);
    uint64_t digest_b = digest(fork);

    ck_assert_uint_eq(run_stream(shape, PKV_BF16, 1, &a, a_chunks), digest_a);
    ck_assert_uint_eq(run_stream(shape, PKV_BF16, 1, &b, b_chunks), digest_b);
    pkv_cache_close(cache);
    free_stream(&a);
    free_stream(&b);
}
END_TEST

/* ---- Faults ---- */

struct fault {
    size_t layer, token, head, element;
    bool in_v;
    float value;
};

/* Both faults in one step of 20 tokens after 11; the message must be the first's. */
static void check_fault(const struct shape *shape, pkv_dtype dtype, const struct fault *faults,
                        size_t n, const char *expected)
{
    struct stream stream = make_stream(shape, 31, 81);
    pkv_config config = make_config(shape, dtype, 31);
    pkv_cache *cache = tests_open_cache(&config);
    pkv_status status = PKV_OK;
    pkv_step_item item = {.tokens = 20};
    uint64_t before;
    pkv_step *open;

    require_ok(cache, pkv_seq_open(cache, &item.seq));
    step(cache, item.seq, &stream, 11);
    before = digest(item.seq);

    float *clean_k = tests_allocate(shape->layers * 31 * shape->kv_heads * shape->d, sizeof(float));
    float *clean_v = tests_allocate(shape->layers * 31 * shape->kv_heads * shape->d, sizeof(float));
    size_t bytes = shape->layers * 31 * shape->kv_heads * shape->d * sizeof(float);

    memcpy(clean_k, stream.k, bytes);
    memcpy(clean_v, stream.v, bytes);
    for (size_t i = 0; i < n; i++) {
        size_t row = (faults[i].layer * 31 + faults[i].token) * shape->kv_heads + faults[i].head;

        (faults[i].in_v ? stream.v : stream.k)[row * shape->d + faults[i].element] =
            faults[i].value;
    }
    require_ok(cache, pkv_step_begin(cache, &item, 1, &open));
    for (size_t layer = 0; layer < shape->layers && status == PKV_OK; layer++) {
        pkv_step_io io = stream_io(&stream, layer, 11);

        status = tests_step_layer(open, layer, &io);
    }
    ck_assert_int_eq(status, PKV_ERROR_VALUE);
    ck_assert_str_eq(pkv_cache_message(cache), expected);
    pkv_step_abort(open);
    ck_assert_uint_eq(digest(item.seq), before);

    /* And nothing lingers: the step without the faults holds what it holds without the attempt. */
    static const size_t chunks[] = {11, 20};

    memcpy(stream.k, clean_k, bytes);
    memcpy(stream.v, clean_v, bytes);
    step(cache, item.seq, &stream, 20);
    ck_assert_uint_eq(digest(item.seq), run_stream(shape, dtype, 2, &stream, chunks));
    free(clean_k);
    free(clean_v);
    pkv_cache_close(cache);
    free_stream(&stream);
}

START_TEST(values_that_cannot_be_stored)
{
    const struct fault one[] = {{1, 30, 1, 31, false, NAN}};
    const struct fault ordered[] = {{0, 17, 0, 0, false, INFINITY},  /* page 2 */
                                    {0, 12, 1, 5, false, -INFINITY}, /* page 1, head 1 */
                                    {0, 15, 0, 5, true, NAN},        /* page 1, head 0: this */
                                    {1, 11, 0, 0, false, NAN}};
    const struct fault overflow[] = {{1, 20, 1, 3, true, 65520}};
    const struct fault both[] = {{0, 24, 0, 7, false, 3.4e38f}, {0, 24, 0, 7, true, NAN}};
    const struct fault fits[] = {{0, 24, 0, 7, false, 3.3e38f}, {0, 25, 0, 7, false, NAN}};
    /* In a page that is factorized, after one that is not; L and R share the energy, so that a
     * scale overflows where s_i is some (7 65504)^2. */
    const struct fault coded[] = {{1, 26, 0, 9, true, 3e12f}, {1, 14, 1, 9, true, 3e12f}};
    const struct shape form = with_form(&small, _i);
    const struct shape *shape = &form;

    for (int type = 0; type < 3; type++) {
        check_fault(shape, (pkv_dtype)type, one, 1,
                    "layer 1, KV head 1, page 3 (token 30): K is not finite");
        check_fault(shape, (pkv_dtype)type, ordered, 4,
                    "layer 0, KV head 0, page 1 (token 15): V is not finite");
    }
    check_fault(shape, PKV_F16, overflow, 1,
                "layer 1, KV head 1, page 2 (token 20): V overflows f16");
    check_fault(shape, PKV_BF16, both, 2,
                "layer 0, KV head 0, page 3 (token 24): K overflows bf16");
    check_fault(shape, PKV_F32, both, 2, "layer 0, KV head 0, page 3 (token 24): V is not finite");
    check_fault(shape, PKV_BF16, fits, 2, "layer 0, KV head 0, page 3 (token 25): K is not finite");
    if (_i & INT4_V)
        check_fault(shape, PKV_BF16, coded, 2,
                    "layer 1, KV head 1, page 1: V: its INT4 scales overflow f16");
}
END_TEST

/* ---- Memory ---- */

/* A prompt of 4,096 tokens at SmolLM2's shape: what the step holds beyond the pool stays under two
 * layers' dense K and V. Of a device see the case `memory` of check_cuda. */
START_TEST(transient_memory)
{
    enum { TOKENS = 4096 };
    const struct shape shape = {2, 9, 3, 64, 32, 1, 1, 16, 14, 0};
    const size_t two_layers = 2 * (size_t)TOKENS * 3 * 64 * 2 * 2;
    pkv_config config = make_config(&shape, PKV_BF16, TOKENS);
    float *x = random_array((size_t)TOKENS * 3 * 64, 1);
    pkv_stats stats = {.struct_size = sizeof stats};
    pkv_step_item item = {.tokens = TOKENS};
    pkv_cache *cache;
    pkv_step *open;

    config.threads = 8;
    cache = tests_open_cache(&config);
    require_ok(cache, pkv_seq_open(cache, &item.seq));
    require_ok(cache, pkv_step_begin(cache, &item, 1, &open));
    for (size_t layer = 0; layer < shape.layers; layer++) {
        pkv_step_io io = {
            .struct_size = sizeof io, .k = {x, PKV_F32, 0, 0}, .v = {x, PKV_F32, 0, 0}};

        require_ok(cache, tests_step_layer(open, layer, &io));
    }
    require_ok(cache, pkv_step_end(open));
    require_ok(cache, pkv_cache_stats(cache, &stats));
    if (tests_on_cpu()) { /* which rounds them all first */
        ck_assert_uint_gt(stats.transient_peak_bytes, two_layers / 2);
        ck_assert_uint_lt(stats.transient_peak_bytes, two_layers);
    }
    ck_assert_uint_gt(stats.transient_peak_bytes, 0); /* it counts at all */
    pkv_cache_close(cache);
    free(x);
}
END_TEST

static Suite *make_suite(void)
{
    Suite *suite = suite_create("attention");
    TCase *test = tcase_create("attention");

    n_isas = tests_find_isas(isas);
    tcase_add_loop_test(test, outputs, 0, 3 * (int)n_isas);
    tcase_add_loop_test(test, outputs_of_int4, 0, 3 * (int)n_isas);
    tcase_add_loop_test(test, fixture, 0, (int)n_isas);
    if (tests_on_cpu())
        tcase_add_test(test, threads_change_nothing);
    tcase_add_loop_test(test, splits_change_no_contents, 0, FORMS);
    tcase_add_loop_test(test, batches_change_nothing, 0, FORMS);
    tcase_add_test(test, decode_continues_prefill);
    tcase_add_loop_test(test, rounding_modes_change_nothing, 0, FORMS);
    tcase_add_loop_test(test, types_and_strides, 0, 9);
    tcase_add_test(test, storing_without_attending);
    tcase_add_loop_test(test, contents, 0, 3 * FORMS);
    tcase_add_test(test, rebuilt_pages_stay_finite);
    tcase_add_loop_test(test, shared_pages, 0, FORMS);
    tcase_add_loop_test(test, values_that_cannot_be_stored, 0, FORMS);
    tcase_add_test(test, transient_memory);
    suite_add_tcase(suite, test);
    return suite;
}

int main(void)
{
    return tests_run_on_backends(make_suite);
}
