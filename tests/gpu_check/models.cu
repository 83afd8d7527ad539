/* SPDX-License-Identifier: MIT */
/* A transformer with random weights on the device, by the runner's module, whose programs need more
 * than nvcc to be built. */
#include "gpu_check.h"

#include "runner.h"

#include <ctime>

extern "C" {
#include "shapes.h"
}

#define POLICIES 3

static const struct {
    const char *name;
    pkv_factors factors;
} kinds[POLICIES] = {
    {"raw", PKV_FACTORS_NONE}, {"puzzle", PKV_FACTORS_NATIVE}, {"puzzle-int4", PKV_FACTORS_INT4}};

static struct error error;

#define REQUIRE_RUNNER(call) ((call) ? (void)0 : stop(__FILE__, __LINE__, #call, error.text))

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- The model ---- */

struct transformer {
    struct model model;
    std::vector<struct model_layer> layers;
    std::vector<float> ones, frequencies;
    struct device *device;
    struct forward *forward;
};

static struct weight matrix(size_t rows, size_t columns)
{
    struct weight weight = {};

    weight.rows = rows;
    weight.columns = columns;
    return weight;
}

/* Matrices without data are made up on the device. */
static void open_transformer(struct transformer *t, bool small)
{
    struct model *m = &t->model;
    struct device_model_options options = {};

    REQUIRE(shape_find("llama-3.1-8b", m));
    if (small) {
        m->layer_count = 2;
        m->hidden = 64;
        m->intermediate = 96;
        m->query_heads = 4;
        m->kv_heads = 2;
        m->head_dim = 64;
        m->vocabulary = 100;
    }

    const size_t query = m->query_heads * m->head_dim, kv = m->kv_heads * m->head_dim;

    t->ones.assign(m->hidden, 1.0f);
    t->layers.resize(m->layer_count);
    for (size_t i = 0; i < m->head_dim / 2; i++)
        t->frequencies.push_back((float)pow(m->rope_theta, -2.0 * (double)i / (double)m->head_dim));
    for (struct model_layer &layer : t->layers) {
        layer = {};
        layer.attention_norm = layer.ffn_norm = t->ones.data();
        layer.q = matrix(query, m->hidden);
        layer.k = layer.v = matrix(kv, m->hidden);
        layer.o = matrix(m->hidden, query);
        layer.gate = layer.up = matrix(m->intermediate, m->hidden);
        layer.down = matrix(m->hidden, m->intermediate);
    }
    m->layers = t->layers.data();
    m->rope_inverse_frequencies = t->frequencies.data();
    m->rope_magnitude = 1;
    m->output_norm = t->ones.data();
    m->token_embedding = m->output = matrix(m->vocabulary, m->hidden);
    m->has_weights = true;
    REQUIRE_RUNNER(runner_operations.open(0, &t->device, &error));
    REQUIRE_RUNNER(runner_operations.open_forward(t->device, m, &options, &t->forward, &error));
}

static void close_transformer(struct transformer *t)
{
    runner_forward.close(t->forward);
    runner_operations.close(t->device);
}

static cudaStream_t stream_of(const struct transformer *t)
{
    return (cudaStream_t)t->device->stream;
}

/* ---- Steps ---- */

struct sequence {
    pkv_cache *cache;
    pkv_seq *seq;
    void *graph;        /* of a token; NULL: there is none */
    double scratch_mib; /* what the cache has taken of the device beyond its pool */
};

static pkv_config config_of(const struct transformer *t, pkv_factors factors, size_t tokens,
                            size_t most_rows)
{
    const struct model *m = &t->model;
    const struct shape shape = {
        m->layer_count, m->query_heads, m->kv_heads, m->head_dim, 32, 16, 14};
    pkv_config config = config_of(shape, PKV_BF16, factors);

    config.max_tokens = tokens;
    config.max_step_tokens = most_rows;
    config.stream = t->device->stream;
    return config;
}

static pkv_stats stats_of(const struct sequence *s)
{
    pkv_stats stats = {};

    stats.struct_size = sizeof stats;
    REQUIRE_OK(s->cache, pkv_cache_stats(s->cache, &stats));
    return stats;
}

static struct sequence open_sequence(const struct transformer *t, pkv_factors factors,
                                     size_t tokens, size_t most_rows)
{
    struct sequence s = {};
    size_t before, after, all;

    REQUIRE_CUDA(cudaMemGetInfo(&before, &all));
    s.cache = open_cache(&backend_cuda, config_of(t, factors, tokens, most_rows));
    REQUIRE_CUDA(cudaMemGetInfo(&after, &all));
    s.scratch_mib = ((double)before - (double)after - (double)stats_of(&s).reserved_bytes) / 0x1p20;
    REQUIRE_OK(s.cache, pkv_seq_open(s.cache, &s.seq));
    return s;
}

static void close_sequence(const struct transformer *t, struct sequence *s)
{
    if (s->graph)
        runner_forward.queue->free_graph(t->forward, s->graph);
    pkv_cache_close(s->cache);
}

/* The same, with what a step took for itself. */
static double scratch_of(const struct sequence *s)
{
    return fmax(s->scratch_mib, (double)stats_of(s).transient_peak_bytes / 0x1p20);
}

static void queue_layers(const struct transformer *t, const struct sequence *s, pkv_step *step,
                         struct kv_layer *io)
{
    for (io->layer = 0; io->layer < t->model.layer_count; io->layer++) {
        REQUIRE_RUNNER(runner_forward.before(t->forward, io, &error));
        REQUIRE_OK(s->cache, pkv_step_layer(step, io->layer, io->on_device));
        REQUIRE_RUNNER(runner_forward.after(t->forward, io, &error));
    }
}

/* Takes tokens as the programs do: returns the one that follows. `by_graph`: of one token; it is
 * captured where there is none. */
static int32_t take(const struct transformer *t, struct sequence *s, const int32_t *tokens,
                    size_t n, bool by_graph)
{
    const struct forward_queue *queue = runner_forward.queue;
    const pkv_step_item item = {s->seq, n};
    struct kv_layer io = {};
    int32_t next = -1;
    pkv_step *step;

    io.position = pkv_seq_tokens(s->seq);
    io.count = n;
    REQUIRE_OK(s->cache, pkv_step_begin(s->cache, &item, 1, &step));
    REQUIRE_RUNNER(runner_forward.begin(t->forward, tokens, false, false, &io, &error));
    if (s->graph) {
        REQUIRE_OK(s->cache, pkv_step_replay(step));
    } else {
        if (by_graph)
            REQUIRE_RUNNER(queue->capture_begin(t->forward, &error));
        queue_layers(t, s, step, &io);
        REQUIRE_RUNNER(runner_forward.predict(t->forward, &io, NULL, &next, &error));
        if (by_graph)
            REQUIRE_RUNNER(queue->capture_end(t->forward, &s->graph, &error));
    }
    if (by_graph)
        REQUIRE_RUNNER(queue->launch(t->forward, s->graph, &error));
    REQUIRE_RUNNER(queue->fetch(t->forward, NULL, &next, &error));
    REQUIRE_OK(s->cache, pkv_step_end(step));
    REQUIRE_RUNNER(queue->wait(t->forward, &error));
    REQUIRE(next >= 0);
    return next;
}

/* Fills slots with `tokens` random tokens, `rows` at a time, of which nothing is computed. */
static void fill(const struct transformer *t, const struct sequence *s, size_t tokens, size_t rows)
{
    const size_t kv = t->model.kv_heads * t->model.head_dim;
    std::vector<uint16_t> values(rows * kv);
    uint64_t state = 1;
    void *data;

    for (uint16_t &x : values) { /* of magnitude 1 to 4 */
        state = state * 6364136223846793005u + 1442695040888963407u;
        x = (uint16_t)(0x3f80 + (state >> 40) % 0x100 + (state >> 63 << 15));
    }
    REQUIRE_CUDA(cudaMalloc(&data, values.size() * sizeof values[0]));
    REQUIRE_CUDA(cudaMemcpyAsync(data, values.data(), values.size() * sizeof values[0],
                                 cudaMemcpyHostToDevice, stream_of(t)));
    for (size_t done = 0, n; done < tokens; done += n) {
        n = tokens - done < rows ? tokens - done : rows;

        const pkv_step_item item = {s->seq, n};
        pkv_step_io io = {};
        pkv_step *step;

        io.struct_size = sizeof io;
        io.k = io.v = pkv_input{data, PKV_BF16, 0, 0};
        REQUIRE_OK(s->cache, pkv_step_begin(s->cache, &item, 1, &step));
        for (size_t layer = 0; layer < t->model.layer_count; layer++)
            REQUIRE_OK(s->cache, pkv_step_layer(step, layer, &io));
        REQUIRE_OK(s->cache, pkv_step_end(step));
    }
    REQUIRE_CUDA(cudaStreamSynchronize(stream_of(t)));
    REQUIRE_CUDA(cudaFree(data));
}

/* ---- Prompts ---- */

/* TFLOP/s of a prompt's attention in one layer: what it takes beyond storing the prompt. */
static double attention_tflops(const struct transformer *t, struct sequence *s,
                               const std::vector<int32_t> &prompt)
{
    const struct model *m = &t->model;
    const double n = (double)prompt.size();
    const pkv_step_item item = {s->seq, prompt.size()};
    double ms[2];

    for (int attends = 0; attends < 2; attends++) {
        ms[attends] = INFINITY;
        /* The first time warms up. */
        for (int i = 0; i < 4; i++) {
            struct kv_layer layer = {};
            cudaEvent_t begin, end;
            pkv_step *step;
            pkv_step_io io;
            float now;

            REQUIRE_CUDA(cudaEventCreate(&begin));
            REQUIRE_CUDA(cudaEventCreate(&end));
            layer.count = prompt.size();
            REQUIRE_OK(s->cache, pkv_step_begin(s->cache, &item, 1, &step));
            REQUIRE_RUNNER(
                runner_forward.begin(t->forward, prompt.data(), false, false, &layer, &error));
            REQUIRE_RUNNER(runner_forward.before(t->forward, &layer, &error));
            io = *layer.on_device;
            if (!attends)
                io.out.data = NULL;
            REQUIRE_CUDA(cudaEventRecord(begin, stream_of(t)));
            REQUIRE_OK(s->cache, pkv_step_layer(step, 0, &io));
            REQUIRE_CUDA(cudaEventRecord(end, stream_of(t)));
            REQUIRE_CUDA(cudaEventSynchronize(end));
            REQUIRE_CUDA(cudaEventElapsedTime(&now, begin, end));
            pkv_step_abort(step);
            if (i > 0 && (double)now < ms[attends])
                ms[attends] = (double)now;
            REQUIRE_CUDA(cudaEventDestroy(begin));
            REQUIRE_CUDA(cudaEventDestroy(end));
        }
    }
    return 2e-9 * (double)(m->query_heads * m->head_dim) * n * (n + 1) / (ms[1] - ms[0]);
}

/* Raw and puzzle in turn. */
static void measure_prompts(const struct transformer *t, size_t tokens, size_t rounds)
{
    std::vector<double> times[2], ratios;
    std::vector<int32_t> prompt(tokens);
    double tflops = 0.0;
    double scratch_mib = 0.0;

    for (size_t i = 0; i < tokens; i++)
        prompt[i] = (int32_t)(i * 7919 % t->model.vocabulary);
    for (size_t round = 0; round <= rounds; round++) {
        for (size_t i = 0; i < 2; i++) {
            struct sequence s = open_sequence(t, kinds[i].factors, tokens, tokens);
            const double begin = seconds();

            take(t, &s, prompt.data(), tokens, false);
            if (round > 0)
                times[i].push_back(seconds() - begin);
            if (i == 1)
                scratch_mib = scratch_of(&s);
            close_sequence(t, &s);
        }
        if (round > 0)
            ratios.push_back(times[1].back() / times[0].back());
    }
    struct sequence s = open_sequence(t, PKV_FACTORS_NONE, tokens, tokens);

    tflops = attention_tflops(t, &s, prompt);
    close_sequence(t, &s);
    printf("    \"prompt_tokens\": %zu,\n    \"ttft_s\": {\"raw\": %.4f, \"puzzle\": %.4f},\n"
           "    \"ttft_ratio\": %.4f,\n    \"raw_attention_tflops\": %.1f,\n"
           "    \"prefill_scratch_mib\": %.2f",
           tokens, median(times[0]), median(times[1]), median(ratios), tflops, scratch_mib);
    fflush(stdout);
}

/* ---- Decoding ---- */

/* Milliseconds a token at one depth, of all policies in turn, with `tokens` of each in a round. */
static void measure_decoding(const struct transformer *t, size_t depth, size_t rows, size_t rounds,
                             size_t tokens)
{
    struct sequence s[POLICIES];
    std::vector<double> times[POLICIES], ratios[POLICIES];
    int32_t next[POLICIES] = {};

    for (size_t i = 0; i < POLICIES; i++) {
        s[i] = open_sequence(t, kinds[i].factors, depth + 2 + (rounds + 1) * tokens, rows);
        fill(t, &s[i], depth, rows);
        /* The first has everything loaded, so that the next can be captured. */
        next[i] = take(t, &s[i], &next[i], 1, false);
        next[i] = take(t, &s[i], &next[i], 1, true);
    }
    for (size_t round = 0; round <= rounds; round++) {
        for (size_t i = 0; i < POLICIES; i++) {
            const double begin = seconds();

            for (size_t n = 0; n < tokens; n++)
                next[i] = take(t, &s[i], &next[i], 1, true);
            if (round > 0)
                times[i].push_back(1e3 * (seconds() - begin) / (double)tokens);
        }
        for (size_t i = 0; i < POLICIES && round > 0; i++)
            ratios[i].push_back(times[i].back() / times[0].back());
    }
    printf("\n      {\"depth\": %zu", depth);
    for (size_t i = 0; i < POLICIES; i++) {
        printf(", \"%s\": {\"tpot_ms\": %.4f, \"ratio\": %.4f}", kinds[i].name, median(times[i]),
               median(ratios[i]));
        close_sequence(t, &s[i]);
    }
    printf("}");
    fflush(stdout);
}

/* What converting a page takes while decoding: the slot that it goes to, in the pool, and scratch
 * of a cache whose steps have one token. */
static void measure_memory(const struct transformer *t, size_t tokens)
{
    struct sequence s = open_sequence(t, PKV_FACTORS_NATIVE, tokens, 1);
    struct sequence more = open_sequence(t, PKV_FACTORS_NATIVE, tokens + 32, 1);
    pkv_stats stats;

    fill(t, &s, 100, 1);
    stats = stats_of(&s);
    REQUIRE(stats.factorized_pages > 0);
    printf("  \"memory\": {\"slot_mib\": %.3f, \"decode_scratch_mib\": %.3f},\n",
           (double)(stats_of(&more).reserved_bytes - stats.reserved_bytes) / 0x1p20,
           scratch_of(&s));
    close_sequence(t, &s);
    close_sequence(t, &more);
}

/* ---- Tests ---- */

/* Rows of a type on the device, from floats that it represents. */
static void *upload(const struct transformer *t, const std::vector<float> &from, pkv_dtype dtype)
{
    std::vector<uint16_t> halves;
    const void *source = from.data();
    size_t bytes = from.size() * sizeof(float);
    void *copy;

    if (dtype == PKV_BF16) {
        for (float x : from)
            halves.push_back(bf16_from_f32(x));
        source = halves.data();
        bytes = halves.size() * sizeof(uint16_t);
    }
    REQUIRE_RUNNER(runner_operations.upload(t->device, source, bytes, &copy, &error));
    return copy;
}

static std::vector<float> download(const struct transformer *t, const void *from, size_t count,
                                   pkv_dtype dtype)
{
    std::vector<float> values(count);
    std::vector<uint16_t> halves(count);
    void *to = dtype == PKV_BF16 ? (void *)halves.data() : (void *)values.data();

    REQUIRE_CUDA(cudaMemcpyAsync(to, from, count * (dtype == PKV_BF16 ? 2 : 4),
                                 cudaMemcpyDeviceToHost, stream_of(t)));
    REQUIRE_CUDA(cudaStreamSynchronize(stream_of(t)));
    for (size_t i = 0; i < count && dtype == PKV_BF16; i++)
        values[i] = bf16_to_f32(halves[i]);
    return values;
}

/* The largest |device - f64| / sum of |products| of one product, which is one of sums in f32 and of
 * rounding the result. */
static double product_difference(const struct transformer *t, size_t rows, pkv_dtype dtype,
                                 pkv_dtype y_dtype, bool add)
{
    const size_t n = 96, k = 64;
    const double bound = y_dtype == PKV_F32 ? 1e-5 : 0x1p-8;
    std::vector<float> x(rows * k), w(n * k), y(rows * n);
    struct matrix_product product = {};
    uint64_t state = rows;
    double worst = 0.0;
    void *on_device[3];

    for (std::vector<float> *all : {&x, &w, &y}) {
        for (float &value : *all) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            value = bf16_to_f32(bf16_from_f32((float)(int32_t)(state >> 32) * 0x3p-31f));
        }
    }
    on_device[0] = upload(t, x, dtype);
    on_device[1] = upload(t, w, dtype);
    on_device[2] = upload(t, y, y_dtype);
    product.dtype = dtype;
    product.x = on_device[0];
    product.weight = on_device[1];
    product.rows = rows;
    product.n = n;
    product.k = k;
    product.y = on_device[2];
    product.y_dtype = y_dtype;
    product.add = add;
    REQUIRE_RUNNER(runner_multiply((struct cuda_device *)t->device, &product, &error));

    const std::vector<float> got = download(t, on_device[2], rows * n, y_dtype);

    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < n; j++) {
            double sum = add ? (double)y[i * n + j] : 0.0, all = fabs(sum);

            for (size_t c = 0; c < k; c++) {
                const double term = (double)x[i * k + c] * (double)w[j * k + c];

                sum += term;
                all += fabs(term);
            }
            REQUIRE(std::isfinite(got[i * n + j]));
            worst = fmax(worst, fabs((double)got[i * n + j] - sum) / all);
        }
    }
    REQUIRE(worst <= bound);
    for (void *pointer : on_device)
        runner_operations.release(t->device, pointer);
    return worst;
}

/* The same tokens by a graph and without. */
static void compare_decoding(const struct transformer *t, pkv_factors factors, size_t tokens)
{
    struct sequence s[2];
    int32_t next[2] = {1, 1};

    for (struct sequence &one : s)
        one = open_sequence(t, factors, tokens + 100, 100);
    for (int i = 0; i < 2; i++) {
        fill(t, &s[i], 90, 90);
        next[i] = take(t, &s[i], &next[i], 1, false);
    }
    for (size_t n = 0; n < tokens; n++) {
        for (int i = 0; i < 2; i++)
            next[i] = take(t, &s[i], &next[i], 1, i == 1);
        REQUIRE(next[0] == next[1]);
    }
    for (struct sequence &one : s)
        close_sequence(t, &one);
}

void test_models(void)
{
    struct transformer t = {};
    double worst = 0.0;

    open_transformer(&t, true);
    for (size_t rows = 1; rows <= 5; rows += 4) {
        worst = fmax(worst, product_difference(&t, rows, PKV_F32, PKV_F32, false));
        worst = fmax(worst, product_difference(&t, rows, PKV_F32, PKV_F32, true));
        worst = fmax(worst, product_difference(&t, rows, PKV_BF16, PKV_F32, true));
        product_difference(&t, rows, PKV_BF16, PKV_BF16, false);
    }
    for (size_t i = 0; i < POLICIES; i++)
        compare_decoding(&t, kinds[i].factors, 40);
    printf("  \"model\": {\"graph_tokens\": 40, \"product_difference\": %.3g}\n", worst);
    close_transformer(&t);
}

/* ---- The measurements ---- */

void measure_models(bool small)
{
    struct transformer t = {};

    open_transformer(&t, small);
    measure_memory(&t, small ? 256 : 32768);
    printf("  \"model\": {\n    \"shape\": \"%s\",\n", small ? "small" : "llama-3.1-8b");
    measure_prompts(&t, small ? 70 : 32768, small ? 1 : 3);
    printf(",\n    \"decode\": [");
    measure_decoding(&t, small ? 100 : 16384, small ? 50 : 4096, small ? 1 : 5, small ? 3 : 32);
    printf(",");
    measure_decoding(&t, small ? 200 : 131072, small ? 50 : 4096, small ? 1 : 5, small ? 3 : 32);
    printf("\n    ]\n  }\n");
    close_transformer(&t);
}
