/* SPDX-License-Identifier: MIT */
/*
 * The CUDA backend on a device: gpu_check test | measure [small], JSON on stdout; see
 * tests/gpu-check.sh. With tests/cuda_host/device.h it runs without one, which tests itself.
 */
#include "gpu_check.h"

/* ---- Random rows ---- */

static uint64_t random_state;

static uint32_t random_number(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_float(void)
{
    return (float)(int32_t)random_number() * 0x3p-31f;
}

/* ---- Caches, and the rows of their steps in both memories ---- */

static uint64_t digest_of(pkv_cache *cache)
{
    uint64_t digest = 0;

    REQUIRE_OK(cache, pkv_cache_digest(cache, &digest));
    return digest;
}

/* On the device q, k, v and out are of a type of their own, and begin some elements behind where
 * memory does, so that what loads 16 bytes at once meets all that callers may have. */
struct rows {
    std::vector<float> q, k, v, out, lse; /* on the host */
    unsigned char *device[5];             /* the same */
    pkv_dtype dtype;
    size_t skipped;
    size_t heads; /* query heads */
    cudaStream_t stream;
};

static size_t element_bytes(pkv_dtype dtype)
{
    return dtype == PKV_F32 ? 4 : 2;
}

static uint16_t half_of(pkv_dtype dtype, float x)
{
    return dtype == PKV_F16 ? f16_from_f32(x) : bf16_from_f32(x);
}

static float float_of(pkv_dtype dtype, uint16_t bits)
{
    return dtype == PKV_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

static void open_rows(struct rows *rows, const struct shape &shape, size_t n, cudaStream_t stream)
{
    const std::vector<float> *const all[] = {&rows->q, &rows->k, &rows->v, &rows->out, &rows->lse};

    rows->dtype = PKV_F32;
    rows->skipped = 0;
    rows->heads = shape.query_heads;
    rows->stream = stream;
    rows->q.resize(n * shape.query_heads * shape.d);
    rows->out.resize(rows->q.size());
    rows->k.resize(n * shape.kv_heads * shape.d);
    rows->v.resize(rows->k.size());
    rows->lse.resize(n * shape.query_heads);
    for (int i = 0; i < 5; i++)
        REQUIRE_CUDA(cudaMalloc((void **)&rows->device[i], (all[i]->size() + 1) * sizeof(float)));
}

static void close_rows(struct rows *rows)
{
    for (unsigned char *device : rows->device)
        REQUIRE_CUDA(cudaFree(device));
}

static unsigned char *on_device(const struct rows *rows, int i)
{
    return rows->device[i] + rows->skipped * element_bytes(rows->dtype);
}

static void upload(struct rows *rows)
{
    const std::vector<float> *const from[] = {&rows->q, &rows->k, &rows->v};

    for (int i = 0; i < 3; i++) {
        std::vector<uint16_t> halves;
        const void *data = from[i]->data();

        if (rows->dtype != PKV_F32) {
            for (float x : *from[i])
                halves.push_back(half_of(rows->dtype, x));
            data = halves.data();
        }
        REQUIRE_CUDA(cudaMemcpyAsync(on_device(rows, i), data,
                                     from[i]->size() * element_bytes(rows->dtype),
                                     cudaMemcpyHostToDevice, rows->stream));
        REQUIRE_CUDA(cudaStreamSynchronize(rows->stream));
    }
}

/* Numbers that the rows' type has. */
static void fill_rows(struct rows *rows)
{
    for (std::vector<float> *all : {&rows->q, &rows->k, &rows->v}) {
        for (float &x : *all) {
            x = random_float();
            if (rows->dtype != PKV_F32)
                x = float_of(rows->dtype, half_of(rows->dtype, x));
        }
    }
    upload(rows);
}

static pkv_step_io io_of_host(struct rows *rows)
{
    pkv_step_io io = {};

    io.struct_size = sizeof io;
    io.q.data = rows->q.data();
    io.k.data = rows->k.data();
    io.v.data = rows->v.data();
    io.out.data = rows->out.data();
    io.lse = rows->lse.data();
    return io;
}

static pkv_step_io io_of_device(struct rows *rows)
{
    pkv_step_io io = {};

    io.struct_size = sizeof io;
    io.q = pkv_input{on_device(rows, 0), rows->dtype, 0, 0};
    io.k = pkv_input{on_device(rows, 1), rows->dtype, 0, 0};
    io.v = pkv_input{on_device(rows, 2), rows->dtype, 0, 0};
    io.out = pkv_output{on_device(rows, 3), rows->dtype, 0, 0};
    io.lse = (float *)(void *)rows->device[4];
    return io;
}

static pkv_step_io io_of(struct rows *rows, int j)
{
    return j == 1 ? io_of_device(rows) : io_of_host(rows);
}

static std::vector<float> fetch(const struct rows *rows, const unsigned char *from, size_t n,
                                pkv_dtype dtype)
{
    std::vector<uint16_t> halves(n);
    std::vector<float> values(n);
    void *to = dtype == PKV_F32 ? (void *)values.data() : (void *)halves.data();

    REQUIRE_CUDA(
        cudaMemcpyAsync(to, from, n * element_bytes(dtype), cudaMemcpyDeviceToHost, rows->stream));
    REQUIRE_CUDA(cudaStreamSynchronize(rows->stream));
    for (size_t i = 0; i < n && dtype != PKV_F32; i++)
        values[i] = float_of(dtype, halves[i]);
    return values;
}

/* Of the first n rows, max|CPU - device| / max|CPU| of the outputs; as much is asked of their
 * logarithms of sums. */
static double difference(struct rows *rows, size_t n, double bound)
{
    const size_t d = rows->out.size() / rows->lse.size();
    const std::vector<float> out =
        fetch(rows, on_device(rows, 3), n * rows->heads * d, rows->dtype);
    const std::vector<float> lse = fetch(rows, rows->device[4], n * rows->heads, PKV_F32);
    double most = 0.0, error = 0.0;

    for (size_t i = 0; i < out.size(); i++) {
        REQUIRE(std::isfinite(out[i]));
        most = fmax(most, fabs((double)rows->out[i]));
        error = fmax(error, fabs((double)rows->out[i] - (double)out[i]));
    }
    for (size_t i = 0; i < lse.size(); i++)
        REQUIRE(fabs((double)rows->lse[i] - (double)lse[i]) <= bound);
    REQUIRE(error <= bound * most);
    return error / most;
}

/* ---- Tests ---- */

#define MOST_ROWS 96

/* Of outputs, max|CPU - device| / max|CPU|: in f32, and of packed arithmetic. */
static double bound_of(pkv_dtype dtype, pkv_factors factors)
{
    return dtype == PKV_F32 ? 2e-5 : factors == PKV_FACTORS_INT4 ? 2e-2 : 1e-2;
}

/* The same steps, forks, cuts and aborts on both, on the device with a stream of the cache's own or
 * not: the same digest after each, and outputs within their bound. Returns the largest difference
 * of the outputs. */
static double walk(const struct shape &shape, pkv_dtype dtype, pkv_factors factors, size_t steps,
                   bool own_stream)
{
    const double bound = bound_of(dtype, factors);
    pkv_config config = config_of(shape, dtype, factors);
    pkv_cache *caches[2];
    pkv_seq *sequences[2][3];
    struct rows rows;
    cudaStream_t stream;
    double worst = 0.0;
    size_t n = 1;

    REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    open_rows(&rows, shape, MOST_ROWS, stream);
    config.max_sequences = 3;
    config.max_tokens = 3 * MOST_ROWS * (steps + 1);
    config.max_step_tokens = MOST_ROWS;
    for (int j = 0; j < 2; j++) {
        config.stream = j == 1 && !own_stream ? stream : NULL;
        caches[j] = open_cache(j == 0 ? &backend_cpu : &backend_cuda, config);
        REQUIRE_OK(caches[j], pkv_seq_open(caches[j], &sequences[j][0]));
    }
    for (size_t i = 0; i < steps; i++) {
        const bool aborted = random_number() % 8 == 0;
        const uint32_t choice = random_number() % 6;
        const size_t which = random_number() % n;
        const size_t tokens =
            random_number() % 3 ? 1 + random_number() % 3 : 1 + random_number() % (MOST_ROWS / 3);
        pkv_step *open[2];

        if (choice == 0 && n < 3) {
            for (int j = 0; j < 2; j++)
                REQUIRE_OK(caches[j], pkv_seq_fork(sequences[j][which], &sequences[j][n]));
            n++;
        } else if (choice == 1) {
            const size_t all = pkv_seq_tokens(sequences[0][which]);
            const size_t left = all - random_number() % (all + 1) / 4;

            for (int j = 0; j < 2; j++)
                REQUIRE_OK(caches[j], pkv_seq_truncate(sequences[j][which], left));
        }
        for (int j = 0; j < 2; j++) {
            pkv_step_item items[3];

            for (size_t k = 0; k < n; k++)
                items[k] = pkv_step_item{sequences[j][k], k == which ? tokens : 1};
            REQUIRE_OK(caches[j], pkv_step_begin(caches[j], items, n, &open[j]));
        }
        for (size_t layer = 0; layer < shape.layers; layer++) {
            rows.dtype = random_number() % 2 ? dtype : PKV_F32;
            rows.skipped = random_number() % 3 ? 0 : 1;
            fill_rows(&rows);
            for (int j = 0; j < 2; j++) {
                pkv_step_io io = io_of(&rows, j);

                REQUIRE_OK(caches[j], pkv_step_layer(open[j], layer, &io));
            }
            worst = fmax(worst, difference(&rows, tokens + n - 1, bound));
        }
        for (int j = 0; j < 2; j++) {
            if (aborted)
                pkv_step_abort(open[j]);
            else
                REQUIRE_OK(caches[j], pkv_step_end(open[j]));
        }
        REQUIRE(digest_of(caches[0]) == digest_of(caches[1]));
    }
    for (pkv_cache *cache : caches)
        pkv_cache_close(cache);
    close_rows(&rows);
    REQUIRE_CUDA(cudaStreamDestroy(stream));
    return worst;
}

/* One graph decodes; a bad value is told late, and changes nothing. Returns the largest difference
 * of the outputs. */
static double graph_and_faults(const struct shape &shape, size_t tokens)
{
    const double bound = bound_of(PKV_BF16, PKV_FACTORS_NATIVE);
    pkv_config config = config_of(shape, PKV_BF16, PKV_FACTORS_NATIVE);
    pkv_cache *caches[2];
    pkv_step_item items[2];
    struct rows rows;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable = NULL;
    uint64_t before, after;
    double worst = 0.0;
    pkv_step *step;

    REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    open_rows(&rows, shape, 1, stream);
    rows.dtype = PKV_BF16;
    config.max_tokens = tokens + 100;
    config.step_flags = PKV_STEP_ASYNC;
    for (int j = 0; j < 2; j++) {
        config.stream = j == 1 ? stream : NULL;
        caches[j] = open_cache(j == 0 ? &backend_cpu : &backend_cuda, config);
        items[j].tokens = 1;
        REQUIRE_OK(caches[j], pkv_seq_open(caches[j], &items[j].seq));
    }
    /* Operands stay where they are, so all layers get the same rows, and the last one's output is
     * seen. */
    for (size_t i = 0; i < tokens; i++) {
        fill_rows(&rows);
        for (int j = 0; j < 2; j++) {
            pkv_step_io io = io_of(&rows, j);

            REQUIRE_OK(caches[j], pkv_step_begin(caches[j], &items[j], 1, &step));
            if (j == 1 && executable)
                REQUIRE_OK(caches[j], pkv_step_replay(step));
            if (j == 1 && !executable)
                REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            for (size_t layer = 0; layer < shape.layers && !(j == 1 && executable); layer++)
                REQUIRE_OK(caches[j], pkv_step_layer(step, layer, &io));
            if (j == 1 && !executable) {
                REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
                REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
                REQUIRE_CUDA(cudaGraphDestroy(graph));
            }
            if (j == 1)
                REQUIRE_CUDA(cudaGraphLaunch(executable, stream));
            REQUIRE_OK(caches[j], pkv_step_end(step));
        }
        /* The next rows go to the same place. */
        worst = fmax(worst, difference(&rows, 1, bound));
    }
    before = digest_of(caches[0]);
    REQUIRE(digest_of(caches[1]) == before);

    rows.v[3] = NAN;
    upload(&rows);
    REQUIRE_OK(caches[1], pkv_step_begin(caches[1], &items[1], 1, &step));
    REQUIRE_OK(caches[1], pkv_step_replay(step));
    REQUIRE_CUDA(cudaGraphLaunch(executable, stream));
    REQUIRE_OK(caches[1], pkv_step_end(step));
    REQUIRE(pkv_seq_digest(items[1].seq, &after) == PKV_ERROR_VALUE);
    REQUIRE(strstr(pkv_cache_message(caches[1]), "V is not finite") != NULL);
    REQUIRE(pkv_seq_truncate(items[1].seq, tokens - 1) == PKV_ERROR_VALUE);
    REQUIRE_OK(caches[1], pkv_seq_truncate(items[1].seq, tokens));
    REQUIRE(digest_of(caches[1]) == before);
    for (pkv_cache *cache : caches)
        pkv_cache_close(cache);
    REQUIRE_CUDA(cudaGraphExecDestroy(executable));
    close_rows(&rows);
    REQUIRE_CUDA(cudaStreamDestroy(stream));
    return worst;
}

/* A pool that no card holds. */
static void pool_too_large(const struct shape &shape)
{
    pkv_config config = config_of(shape, PKV_BF16, PKV_FACTORS_NATIVE);
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;

    config.max_tokens = (size_t)1 << 30;
    config.kv_heads = config.query_heads = 64;
    REQUIRE(cache_open_with(&backend_cuda, &config, &cache, message) == PKV_ERROR_MEMORY);
    REQUIRE(strstr(message, "out of memory") != NULL);
}

static void run_tests(bool small)
{
    static const struct {
        const char *name;
        pkv_dtype dtype;
        pkv_factors factors;
    } kinds[] = {
        {"f32", PKV_F32, PKV_FACTORS_NATIVE},    {"f16", PKV_F16, PKV_FACTORS_NATIVE},
        {"bf16", PKV_BF16, PKV_FACTORS_NATIVE},  {"f32 int4", PKV_F32, PKV_FACTORS_INT4},
        {"f16 int4", PKV_F16, PKV_FACTORS_INT4}, {"bf16 int4", PKV_BF16, PKV_FACTORS_INT4},
    };
    const struct shape tuned = {2, 8, 2, small ? 64u : 128u, 32, 16, 14};
    const struct shape plain = {2, 6, 2, 24, 16, 6, 5};

    printf("  \"digests_equal\": {");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        random_state = i;

        const bool own_stream = i % 2 == 1;
        const double other =
            walk(plain, kinds[i].dtype, kinds[i].factors, small ? 8 : 60, own_stream);
        const double main =
            walk(tuned, kinds[i].dtype, kinds[i].factors, small ? 4 : 60, own_stream);

        printf("%s\n    \"%s\": {\"output_difference\": %.3g}", i > 0 ? "," : "", kinds[i].name,
               fmax(main, other));
        fflush(stdout);
    }
    const double other = graph_and_faults(plain, small ? 60 : 1000);
    const double main = graph_and_faults(tuned, small ? 60 : 1000);

    pool_too_large(plain);
    printf("\n  },\n  \"graph\": {\"tokens\": %d, \"output_difference\": %.3g},\n",
           small ? 60 : 1000, fmax(main, other));
#ifdef HAVE_MODELS
    test_models();
#else
    printf("  \"model\": null\n");
#endif
}

/* ---- Measurements ---- */

/* GB/s of a copy within the device, read and written. */
static double copy_bandwidth(cudaStream_t stream, size_t bytes)
{
    void *from, *to;
    double ms;

    REQUIRE_CUDA(cudaMalloc(&from, bytes));
    REQUIRE_CUDA(cudaMalloc(&to, bytes));
    REQUIRE_CUDA(cudaMemsetAsync(from, 0, bytes, stream));
    ms = median_ms(stream, 9, [&]() {
        REQUIRE_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
    });
    REQUIRE_CUDA(cudaFree(from));
    REQUIRE_CUDA(cudaFree(to));
    return 2e-6 * (double)bytes / ms;
}

/* What one policy's cache takes to decode a token of each sequence. */
struct contestant {
    pkv_cache *cache;
    std::vector<pkv_step_item> items;
    pkv_step *step;
    cudaGraphExec_t graphs[2]; /* of it, and without attention */
    double bytes;              /* that it reads, payload of the sequences */
    double reserved_bytes;
    double factorize_us;         /* a page of one layer and head */
    std::vector<double> step_us; /* all layers */
    std::vector<double> us;      /* what attention adds to the rest */
};

static void queue_layers(struct contestant *c, const struct shape &shape, struct rows *rows,
                         bool attends)
{
    for (size_t layer = 0; layer < shape.layers; layer++) {
        pkv_step_io io = io_of_device(rows);

        if (!attends) {
            io.out.data = NULL;
            io.lse = NULL;
        }
        REQUIRE_OK(c->cache, pkv_step_layer(c->step, layer, &io));
    }
}

static cudaGraphExec_t capture(struct contestant *c, const struct shape &shape, struct rows *rows,
                               bool attends)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;

    REQUIRE_OK(c->cache, pkv_step_begin(c->cache, c->items.data(), c->items.size(), &c->step));
    REQUIRE_CUDA(cudaStreamBeginCapture(rows->stream, cudaStreamCaptureModeThreadLocal));
    queue_layers(c, shape, rows, attends);
    REQUIRE_CUDA(cudaStreamEndCapture(rows->stream, &graph));
    REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    REQUIRE_CUDA(cudaGraphDestroy(graph));
    pkv_step_abort(c->step);
    return executable;
}

/* `batch` sequences of `tokens` random tokens, fed in chunks without queries, then a step of
 * decoding, which stays open; every layer has pages of its own. */
static struct contestant open_contestant(const struct shape &shape, pkv_factors factors,
                                         size_t batch, size_t tokens, struct rows *rows)
{
    const size_t chunk = rows->k.size() / (shape.kv_heads * shape.d);
    pkv_config config = config_of(shape, PKV_BF16, factors);
    struct contestant c = {};
    pkv_stats stats = {};

    config.max_sequences = batch;
    config.max_tokens = batch * (tokens + 64);
    config.max_step_tokens = chunk;
    config.stream = rows->stream;
    c.cache = open_cache(&backend_cuda, config);
    c.items.resize(batch);
    for (pkv_step_item &item : c.items) {
        REQUIRE_OK(c.cache, pkv_seq_open(c.cache, &item.seq));
        for (size_t t = 0; t < tokens; t += item.tokens) {
            item.tokens = tokens - t < chunk ? tokens - t : chunk;
            REQUIRE_OK(c.cache, pkv_step_begin(c.cache, &item, 1, &c.step));
            queue_layers(&c, shape, rows, false);
            REQUIRE_OK(c.cache, pkv_step_end(c.step));
        }
        item.tokens = 1;
    }
    stats.struct_size = sizeof stats;
    REQUIRE_OK(c.cache, pkv_cache_stats(c.cache, &stats));
    c.bytes = (double)stats.payload_bytes;
    c.reserved_bytes = (double)stats.reserved_bytes;
    if (factors != PKV_FACTORS_NONE)
        c.factorize_us = 1e6 * stats.factorize_seconds /
                         (double)(stats.factorized_pages * shape.layers * shape.kv_heads);
    /* Once without a graph: what is loaded when it is first used is there then. */
    REQUIRE_OK(c.cache, pkv_step_begin(c.cache, c.items.data(), batch, &c.step));
    queue_layers(&c, shape, rows, true);
    pkv_step_abort(c.step);
    for (int i = 0; i < 2; i++)
        c.graphs[i] = capture(&c, shape, rows, i == 0);
    REQUIRE_OK(c.cache, pkv_step_begin(c.cache, c.items.data(), batch, &c.step));
    REQUIRE_OK(c.cache, pkv_step_replay(c.step));
    return c;
}

static void close_contestant(struct contestant *c)
{
    pkv_step_abort(c->step);
    for (cudaGraphExec_t graph : c->graphs)
        REQUIRE_CUDA(cudaGraphExecDestroy(graph));
    pkv_cache_close(c->cache);
}

/* Several launches, so that the first one's way to the device does not count. The same step again
 * and again: it changes nothing that it reads. */
static void time_contestant(struct contestant *c, cudaStream_t stream, bool counts)
{
    const size_t launches = 5;
    double us[2];

    for (int i = 0; i < 2; i++) {
        us[i] = 1e3 / (double)launches * queue_ms(stream, [&]() {
                    for (size_t n = 0; n < launches; n++)
                        REQUIRE_CUDA(cudaGraphLaunch(c->graphs[i], stream));
                });
    }
    if (counts) {
        c->step_us.push_back(us[0]);
        c->us.push_back(us[0] - us[1]);
    }
}

#define POLICIES 3

/* All policies in turn, round after round. */
static void measure_decode(const struct shape &shape, size_t batch, size_t tokens, size_t rounds,
                           double bandwidth, cudaStream_t stream)
{
    static const struct {
        const char *name;
        pkv_factors factors;
    } policies[POLICIES] = {{"raw", PKV_FACTORS_NONE},
                            {"puzzle", PKV_FACTORS_NATIVE},
                            {"puzzle-int4", PKV_FACTORS_INT4}};
    struct contestant contestants[POLICIES];
    struct rows rows;
    double raw_us = 0.0, raw_step_us = 0.0;

    open_rows(&rows, shape, tokens < 2048 ? tokens : 2048, stream);
    fill_rows(&rows);
    for (size_t i = 0; i < POLICIES; i++)
        contestants[i] = open_contestant(shape, policies[i].factors, batch, tokens, &rows);
    for (size_t round = 0; round <= rounds; round++)
        for (struct contestant &c : contestants)
            time_contestant(&c, stream, round > 0);
    for (size_t i = 0; i < POLICIES; i++) {
        const struct contestant &c = contestants[i];
        const double us = median(c.us), step_us = median(c.step_us);

        raw_us = i == 0 ? us : raw_us;
        raw_step_us = i == 0 ? step_us : raw_step_us;
        printf("%s\n    {\"kv\": \"%s\", \"batch\": %zu, \"layers\": %zu, \"us_per_step\": %.2f, "
               "\"step_speedup\": %.3f, \"attention_us\": %.2f, \"speedup\": %.3f, "
               "\"read_gb_per_s\": %.1f, \"share_of_copy\": %.3f, \"pool_ratio\": %.4f, "
               "\"factorize_us_per_page_head\": %.4f}",
               i > 0 ? "," : "", policies[i].name, batch, shape.layers, step_us,
               raw_step_us / step_us, us, raw_us / us, 1e-3 * c.bytes / us,
               1e-3 * c.bytes / us / bandwidth, c.reserved_bytes / contestants[0].reserved_bytes,
               c.factorize_us);
    }
    fflush(stdout);
    for (struct contestant &c : contestants)
        close_contestant(&c);
    close_rows(&rows);
}

/* A sequence of `tokens` tokens in steps of `rows`, of which K and V are both `data`. */
static pkv_status store_all(pkv_cache *cache, size_t layers, size_t tokens, size_t rows,
                            const void *data)
{
    pkv_step_item item = {NULL, rows};
    pkv_step_io io = {};
    pkv_status status = pkv_seq_open(cache, &item.seq);
    pkv_step *step;

    io.struct_size = sizeof io;
    io.k = io.v = pkv_input{data, PKV_BF16, 0, 0};
    for (size_t t = 0; t < tokens && status == PKV_OK; t += rows) {
        status = pkv_step_begin(cache, &item, 1, &step);
        for (size_t layer = 0; layer < layers && status == PKV_OK; layer++)
            status = pkv_step_layer(step, layer, &io);
        if (status == PKV_OK)
            status = pkv_step_end(step);
    }
    return status == PKV_OK ? pkv_seq_close(item.seq) : status;
}

/* Nanoseconds of a page of K or V of one head, everything included, with steps of `rows` tokens.
 * Negative, and said why, where cuSOLVER is not there or fails. */
static double measure_factorize(const struct shape &shape, pkv_solver solver, size_t tokens,
                                size_t rows, cudaStream_t stream)
{
    const size_t elements = rows * shape.kv_heads * shape.d;
    const size_t pages = tokens / shape.page * shape.kv_heads * 2 * shape.layers;
    pkv_config config = config_of(shape, PKV_BF16, PKV_FACTORS_NATIVE);
    std::vector<uint16_t> values(elements);
    char message[PKV_MESSAGE_BYTES];
    pkv_status status;
    pkv_cache *cache;
    void *data;
    double ms;

    config.sink_pages = config.window_pages = 0;
    config.solver = solver;
    config.max_tokens = tokens;
    config.max_step_tokens = rows;
    config.stream = stream;
    for (uint16_t &x : values) /* bf16 of magnitude 1 to 4 */
        x = (uint16_t)(0x3f80 + random_number() % 0x100 + (random_number() >> 31 << 15));
    REQUIRE_CUDA(cudaMalloc(&data, elements * sizeof values[0]));
    REQUIRE_CUDA(cudaMemcpyAsync(data, values.data(), elements * sizeof values[0],
                                 cudaMemcpyHostToDevice, stream));
    status = cache_open_with(&backend_cuda, &config, &cache, message);
    if (status == PKV_OK) {
        ms = median_ms(stream, 3, [&]() {
            if (status == PKV_OK)
                status = store_all(cache, shape.layers, tokens, rows, data);
        });
        snprintf(message, sizeof message, "%s", pkv_cache_message(cache));
        pkv_cache_close(cache);
    }
    REQUIRE_CUDA(cudaFree(data));
    if (status == PKV_OK)
        return 1e6 * ms / (double)pages;
    if (solver != PKV_SOLVER_CUSOLVER)
        stop(__FILE__, __LINE__, "factorize", message);
    fprintf(stderr, "cuSOLVER: %s\n", message);
    return -1.0;
}

/* 262,144 pages of 32 x 128, of which a step of all tokens has 16,384 a layer. cuSOLVER may like
 * fewer at once. */
static void measure_solvers(bool small, cudaStream_t stream)
{
    const struct shape shape = {
        small ? 1u : 16u, small ? 2u : 8u, small ? 2u : 8u, small ? 64u : 128u, 32, 16, 14};
    const size_t tokens = small ? 128 : 32768;
    double batched = INFINITY, cusolver = INFINITY;

    for (size_t rows = tokens; rows >= tokens / (small ? 2 : 16); rows /= 2) {
        batched = fmin(batched, measure_factorize(shape, PKV_SOLVER_BATCHED, tokens, rows, stream));
        /* Where it failed it is not tried again. */
        if (cusolver >= 0)
            cusolver =
                fmin(cusolver, measure_factorize(shape, PKV_SOLVER_CUSOLVER, tokens, rows, stream));
    }
    printf("  \"factorize\": {\"pages\": %zu, \"batched_ns_per_page\": %.2f",
           tokens / shape.page * shape.kv_heads * 2 * shape.layers, batched);
    if (cusolver < 0)
        printf(", \"cusolver_ns_per_page\": null},\n");
    else
        printf(", \"cusolver_ns_per_page\": %.2f, \"speedup\": %.3f},\n", cusolver,
               cusolver / batched);
    fflush(stdout);
}

static void measure(bool small)
{
    /* llama-3.1-8b; with many sequences a few layers are many times what caches hold. */
    struct shape shape = {
        small ? 2u : 32u, small ? 4u : 32u, small ? 2u : 8u, small ? 64u : 128u, 32, 16, 14};
    const size_t batches[] = {1, small ? 2u : 16u};
    const size_t tokens = small ? 160 : 32768;
    cudaStream_t stream;
    double bandwidth;

    REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    measure_solvers(small, stream);
    bandwidth = copy_bandwidth(stream, small ? 1 << 16 : (size_t)4 << 30);
    printf("  \"copy_gb_per_s\": %.1f,\n  \"tokens\": %zu,\n  \"decode\": [", bandwidth, tokens);
    for (size_t b = 0; b < 2; b++) {
        shape.layers = small ? 2 : batches[b] == 1 ? 32 : 4;
        printf("%s", b > 0 ? "," : "");
        measure_decode(shape, batches[b], tokens, small ? 2 : 15, bandwidth, stream);
    }
    printf("\n  ],\n");
    REQUIRE_CUDA(cudaStreamDestroy(stream));
#ifdef HAVE_MODELS
    measure_models(small);
#else
    printf("  \"model\": null\n");
#endif
}

int main(int argc, char **argv)
{
    const bool small = argc == 3 && strcmp(argv[2], "small") == 0;
    struct cudaDeviceProp properties;

    if (argc < 2 || (strcmp(argv[1], "test") != 0 && strcmp(argv[1], "measure") != 0)) {
        fprintf(stderr, "usage: gpu_check test|measure [small]\n");
        return 2;
    }
    REQUIRE_CUDA(cudaGetDeviceProperties(&properties, 0));
    printf("{\n  \"device\": \"%s\",\n  \"arch\": \"sm_%d%d\",\n  \"backend\": \"%s\",\n",
           properties.name, properties.major, properties.minor, BACKEND_NAME);
    if (strcmp(argv[1], "test") == 0)
        run_tests(small);
    else
        measure(small);
    printf("}\n");
    return 0;
}
