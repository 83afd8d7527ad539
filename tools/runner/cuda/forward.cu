/* SPDX-License-Identifier: MIT */
/* The layers of a transformer on the device. */
#include "kernels.h"

#include <stdlib.h>

/* Rows that go through the feed-forward part at once: its inner rows are the widest. */
#define BLOCK_ROWS ((size_t)4096)

/* Expanded weights on their way to the device. */
#define STAGE_BYTES ((size_t)16 << 20)

/* Blocks of memory begin where 16-byte loads and cuBLAS's fastest kernels want matrices to. */
#define ALIGNMENT ((size_t)256)

struct layer_weights {
    void *block; /* all below */
    float *attention_norm, *ffn_norm;
    float *q_norm, *k_norm; /* NULL: there are none */
    float *bias;            /* of q, k, v; NULL: there is none */
    unsigned char *qkv;     /* [query + 2 kv, hidden] */
    unsigned char *o;       /* [hidden, query] */
    unsigned char *gate_up; /* [2 intermediate, hidden] */
    unsigned char *down;    /* [hidden, intermediate] */
};

struct forward {
    struct cuda_device *device;
    const struct model *model;
    pkv_dtype dtype;  /* of weights, and of activations but for the residual stream */
    size_t element;   /* bytes */
    size_t query, kv; /* elements of a row of q, and of k */
    uint64_t made_up; /* matrices so far */

    struct layer_weights *layers;
    void *outer; /* all of the model's below */
    unsigned char *embedding;
    unsigned char *output; /* NULL: the embedding */
    float *output_norm;
    float *inverse; /* frequencies */

    /* While weights are copied. */
    float *stage_host, *stage;

    /* For every token of a step: what the host writes, on both sides, and what the device makes. */
    size_t capacity;
    void *input_host, *input; /* uint64_t position, int32_t tokens[] */
    size_t input_bytes;
    void *rows;           /* all below */
    float *x;             /* [capacity, hidden] */
    unsigned char *heads; /* [capacity, query + 2 kv] */
    unsigned char *out;   /* [capacity, query] */
    float *cosine, *sine; /* [capacity, head_dim / 2] */

    /* For one block of rows. */
    size_t block_rows;
    unsigned char *normed;  /* [hidden] */
    unsigned char *gate_up; /* [2 intermediate] */
    unsigned char *inner;   /* [intermediate] */

    /* What follows the last row: the logits and behind them the token, on both sides, and where the
     * caller wants them. */
    float *logits, *logits_host;
    float *wanted_logits;
    int32_t *wanted_token;
    bool capturing;

    pkv_step_io io;
};

/* ---- Memory ---- */

/* A part of one block. */
struct piece {
    void **pointer;
    size_t bytes; /* 0: it stays NULL */
};

/* Bytes of [rows, columns], saturated: no device has as many. */
static size_t bytes_of(size_t rows, size_t columns, size_t element)
{
    size_t bytes;

    if (__builtin_mul_overflow(rows, columns, &bytes) ||
        __builtin_mul_overflow(bytes, element, &bytes) || bytes > SIZE_MAX / 64)
        return SIZE_MAX / 64;
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static bool allocate_pieces(struct forward *f, const struct piece *pieces, size_t count,
                            const char *what, void **block, struct error *error)
{
    size_t total = 0;
    unsigned char *at;

    for (size_t i = 0; i < count; i++)
        total += pieces[i].bytes;
    if (!runner_allocate(f->device, total, what, block, error))
        return false;
    at = (unsigned char *)*block;
    for (size_t i = 0; i < count; i++) {
        *pieces[i].pointer = pieces[i].bytes > 0 ? at : NULL;
        at += pieces[i].bytes;
    }
    return true;
}

/* ---- Weights ---- */

/* Leaves `values` in use until the device has been waited for. */
static bool copy_floats(struct forward *f, float *to, const float *values, size_t count,
                        struct error *error)
{
    return values == NULL ||
           runner_check(f->device,
                        cudaMemcpyAsync(to, values, count * sizeof *to, cudaMemcpyHostToDevice,
                                        f->device->stream),
                        "cannot copy weights", error);
}

static bool copy_matrix(struct forward *f, const struct device_model_options *options,
                        unsigned char *to, const struct weight *weight, struct error *error)
{
    const size_t columns = weight->columns;
    const size_t most = STAGE_BYTES / sizeof(float) / columns;
    const size_t step = most > 0 ? most : 1;

    if (weight->data == NULL) {
        kernels_make_up(f->device->stream, ++f->made_up << 32, columns, weight->rows * columns,
                        f->dtype, to);
        return runner_check_launch(f->device, "cannot make weights up", error);
    }
    for (size_t first = 0; first < weight->rows; first += step) {
        const size_t rows = weight->rows - first < step ? weight->rows - first : step;
        const size_t count = rows * columns;

        options->expand(options->opaque, weight, first, rows, f->stage_host);
        if (!copy_floats(f, f->stage, f->stage_host, count, error))
            return false;
        kernels_convert(f->device->stream, f->stage, count, f->dtype,
                        to + first * columns * f->element);
        if (!runner_check_launch(f->device, "cannot convert weights", error) ||
            !runner_wait(f->device, "cannot copy weights", error))
            return false;
    }
    return true;
}

static bool open_layer(struct forward *f, const struct device_model_options *options, size_t index,
                       struct error *error)
{
    const struct model *m = f->model;
    const struct model_layer *from = &m->layers[index];
    struct layer_weights *to = &f->layers[index];
    const size_t query = f->query, kv = f->kv, all = query + 2 * kv;
    const struct piece pieces[] = {
        {(void **)&to->attention_norm, bytes_of(1, m->hidden, sizeof(float))},
        {(void **)&to->ffn_norm, bytes_of(1, m->hidden, sizeof(float))},
        {(void **)&to->q_norm, from->q_norm ? bytes_of(1, m->head_dim, sizeof(float)) : 0},
        {(void **)&to->k_norm, from->k_norm ? bytes_of(1, m->head_dim, sizeof(float)) : 0},
        {(void **)&to->bias, from->q_bias ? bytes_of(1, all, sizeof(float)) : 0},
        {(void **)&to->qkv, bytes_of(all, m->hidden, f->element)},
        {(void **)&to->o, bytes_of(m->hidden, query, f->element)},
        {(void **)&to->gate_up, bytes_of(2 * m->intermediate, m->hidden, f->element)},
        {(void **)&to->down, bytes_of(m->hidden, m->intermediate, f->element)},
    };

    return allocate_pieces(f, pieces, sizeof pieces / sizeof *pieces, "the weights of a layer",
                           &to->block, error) &&
           copy_floats(f, to->attention_norm, from->attention_norm, m->hidden, error) &&
           copy_floats(f, to->ffn_norm, from->ffn_norm, m->hidden, error) &&
           copy_floats(f, to->q_norm, from->q_norm, m->head_dim, error) &&
           copy_floats(f, to->k_norm, from->k_norm, m->head_dim, error) &&
           (to->bias == NULL || (copy_floats(f, to->bias, from->q_bias, query, error) &&
                                 copy_floats(f, to->bias + query, from->k_bias, kv, error) &&
                                 copy_floats(f, to->bias + query + kv, from->v_bias, kv, error))) &&
           copy_matrix(f, options, to->qkv, &from->q, error) &&
           copy_matrix(f, options, to->qkv + query * m->hidden * f->element, &from->k, error) &&
           copy_matrix(f, options, to->qkv + (query + kv) * m->hidden * f->element, &from->v,
                       error) &&
           copy_matrix(f, options, to->o, &from->o, error) &&
           copy_matrix(f, options, to->gate_up, &from->gate, error) &&
           copy_matrix(f, options, to->gate_up + m->intermediate * m->hidden * f->element,
                       &from->up, error) &&
           copy_matrix(f, options, to->down, &from->down, error);
}

static bool open_weights(struct forward *f, const struct device_model_options *options,
                         struct error *error)
{
    const struct model *m = f->model;
    const size_t pairs = m->head_dim / 2;
    size_t longest = m->hidden > m->intermediate ? m->hidden : m->intermediate;
    const struct piece pieces[] = {
        {(void **)&f->embedding, bytes_of(m->vocabulary, m->hidden, f->element)},
        {(void **)&f->output, m->tied_output ? 0 : bytes_of(m->vocabulary, m->hidden, f->element)},
        {(void **)&f->output_norm, bytes_of(1, m->hidden, sizeof(float))},
        {(void **)&f->inverse, bytes_of(1, pairs, sizeof(float))},
        {(void **)&f->logits, bytes_of(1, m->vocabulary + 1, sizeof(float))},
    };

    longest = longest > f->query ? longest : f->query;
    longest *= sizeof(float);
    longest = longest > STAGE_BYTES ? longest : STAGE_BYTES;
    f->layers = (struct layer_weights *)calloc(m->layer_count, sizeof *f->layers);
    if (f->layers == NULL)
        return runner_fail(error, "out of memory for %zu layers", m->layer_count);
    if (!runner_allocate_pinned(f->device, longest, (void **)&f->stage_host, error) ||
        !runner_allocate(f->device, longest, "weights on their way", (void **)&f->stage, error) ||
        !runner_allocate_pinned(f->device, (m->vocabulary + 1) * sizeof(float),
                                (void **)&f->logits_host, error) ||
        !allocate_pieces(f, pieces, sizeof pieces / sizeof *pieces, "embedding and output",
                         &f->outer, error) ||
        !copy_matrix(f, options, f->embedding, &m->token_embedding, error) ||
        (!m->tied_output && !copy_matrix(f, options, f->output, &m->output, error)) ||
        !copy_floats(f, f->output_norm, m->output_norm, m->hidden, error) ||
        !copy_floats(f, f->inverse, m->rope_inverse_frequencies, pairs, error))
        return false;
    for (size_t i = 0; i < m->layer_count; i++) {
        if (!open_layer(f, options, i, error))
            return false;
    }
    if (!runner_wait(f->device, "cannot copy weights", error))
        return false;
    cudaFreeHost(f->stage_host);
    cudaFree(f->stage);
    f->stage_host = f->stage = NULL;
    return true;
}

static void close_forward(struct forward *f)
{
    cudaSetDevice(f->device->base.ordinal);
    cudaStreamSynchronize(f->device->stream);
    for (size_t i = 0; f->layers != NULL && i < f->model->layer_count; i++)
        cudaFree(f->layers[i].block);
    free(f->layers);
    cudaFree(f->outer);
    cudaFree(f->stage);
    cudaFree(f->input);
    cudaFree(f->rows);
    cudaFreeHost(f->stage_host);
    cudaFreeHost(f->input_host);
    cudaFreeHost(f->logits_host);
    free(f);
}

bool runner_open_forward(struct device *device, const struct model *model,
                         const struct device_model_options *options, struct forward **forward,
                         struct error *error)
{
    struct forward *f = (struct forward *)calloc(1, sizeof *f);

    *forward = NULL;
    if (f == NULL)
        return runner_fail(error, "out of memory for the transformer");
    f->device = (struct cuda_device *)device;
    f->model = model;
    f->dtype = options->exact ? PKV_F32 : PKV_BF16;
    f->element = options->exact ? 4 : 2;
    f->query = model->query_heads * model->head_dim;
    f->kv = model->kv_heads * model->head_dim;
    if (!runner_enter(f->device, error) || !open_weights(f, options, error)) {
        close_forward(f);
        return false;
    }
    *forward = f;
    return true;
}

/* ---- A step ---- */

static bool reserve(struct forward *f, size_t tokens, struct error *error)
{
    const struct model *m = f->model;
    const size_t block = tokens < BLOCK_ROWS ? tokens : BLOCK_ROWS;
    const struct piece pieces[] = {
        {(void **)&f->x, bytes_of(tokens, m->hidden, sizeof(float))},
        {(void **)&f->heads, bytes_of(tokens, f->query + 2 * f->kv, f->element)},
        {(void **)&f->out, bytes_of(tokens, f->query, f->element)},
        {(void **)&f->cosine, bytes_of(tokens, m->head_dim / 2, sizeof(float))},
        {(void **)&f->sine, bytes_of(tokens, m->head_dim / 2, sizeof(float))},
        {(void **)&f->normed, bytes_of(block, m->hidden, f->element)},
        {(void **)&f->gate_up, bytes_of(block, 2 * m->intermediate, f->element)},
        {(void **)&f->inner, bytes_of(block, m->intermediate, f->element)},
    };

    if (tokens <= f->capacity)
        return true;
    cudaFree(f->rows);
    cudaFree(f->input);
    cudaFreeHost(f->input_host);
    f->rows = f->input = f->input_host = NULL;
    f->capacity = 0;
    f->input_bytes = sizeof(uint64_t) + tokens * sizeof(int32_t);
    if (!runner_allocate_pinned(f->device, f->input_bytes, &f->input_host, error) ||
        !runner_allocate(f->device, f->input_bytes, "tokens", &f->input, error) ||
        !allocate_pieces(f, pieces, sizeof pieces / sizeof *pieces, "the rows of a step", &f->rows,
                         error))
        return false;
    f->block_rows = block;
    f->capacity = tokens;
    return true;
}

static bool begin(struct forward *f, const int32_t *tokens, bool, bool, struct kv_layer *io,
                  struct error *error)
{
    const struct model *m = f->model;
    const cudaStream_t stream = f->device->stream;
    const size_t d = m->head_dim, all = f->query + 2 * f->kv;
    const uint64_t position = io->position;

    if (!runner_enter(f->device, error) || !reserve(f, io->count, error))
        return false;
    memcpy(f->input_host, &position, sizeof position);
    memcpy((unsigned char *)f->input_host + sizeof position, tokens, io->count * sizeof *tokens);
    if (!runner_check(f->device,
                      cudaMemcpyAsync(f->input, f->input_host,
                                      sizeof position + io->count * sizeof *tokens,
                                      cudaMemcpyHostToDevice, stream),
                      "cannot copy tokens", error))
        return false;
    f->io = pkv_step_io{};
    f->io.struct_size = sizeof f->io;
    f->io.q = pkv_input{f->heads, f->dtype, all, d};
    f->io.k = pkv_input{f->heads + f->query * f->element, f->dtype, all, d};
    f->io.v = pkv_input{f->heads + (f->query + f->kv) * f->element, f->dtype, all, d};
    f->io.out = pkv_output{f->out, f->dtype, f->query, d};
    io->on_device = &f->io;
    return true;
}

/* Tokens and position are read on the device, so that a graph goes on with others. */
static void embed(struct forward *f, size_t rows)
{
    const struct model *m = f->model;
    const uint64_t *position = (const uint64_t *)f->input;

    kernels_embed(f->device->stream, f->dtype, f->embedding, m->hidden,
                  (const int32_t *)(const void *)(position + 1), rows, f->x);
    kernels_angles(f->device->stream, position, f->inverse, m->rope_magnitude, m->head_dim / 2,
                   rows, f->cosine, f->sine);
}

static void norm(struct forward *f, size_t first, size_t rows, const float *weight)
{
    const size_t hidden = f->model->hidden;

    kernels_rms_norm(f->device->stream, f->x + first * hidden, weight, f->model->rms_epsilon,
                     hidden, rows, f->dtype, f->normed);
}

static bool multiply(struct forward *f, const unsigned char *weight, size_t n, size_t k,
                     const unsigned char *x, size_t rows, void *y, struct error *error)
{
    const struct matrix_product product = {f->dtype, weight, x, rows, n, k, y, f->dtype, false};

    return runner_multiply(f->device, &product, error);
}

/* The same, added to rows of the residual stream from `first` on. */
static bool add_product(struct forward *f, const unsigned char *weight, size_t k,
                        const unsigned char *x, size_t first, size_t rows, struct error *error)
{
    const size_t hidden = f->model->hidden;
    const struct matrix_product product = {
        f->dtype, weight, x, rows, hidden, k, f->x + first * hidden, PKV_F32, true};

    return runner_multiply(f->device, &product, error);
}

static size_t rows_from(const struct forward *f, size_t first, size_t count)
{
    return count - first < f->block_rows ? count - first : f->block_rows;
}

static bool before(struct forward *f, const struct kv_layer *io, struct error *error)
{
    const struct model *m = f->model;
    const struct layer_weights *layer = &f->layers[io->layer];
    const size_t all = f->query + 2 * f->kv;
    const struct kernels_heads heads = {.data = f->heads,
                                        .dtype = f->dtype,
                                        .query_heads = (unsigned)m->query_heads,
                                        .kv_heads = (unsigned)m->kv_heads,
                                        .head_dim = (unsigned)m->head_dim,
                                        .bias = layer->bias,
                                        .q_norm = layer->q_norm,
                                        .k_norm = layer->k_norm,
                                        .epsilon = m->rms_epsilon,
                                        .interleaved = m->rope_interleaved,
                                        .cosine = f->cosine,
                                        .sine = f->sine};

    if (io->layer == 0)
        embed(f, io->count);
    for (size_t first = 0, rows; first < io->count; first += rows) {
        rows = rows_from(f, first, io->count);
        norm(f, first, rows, layer->attention_norm);
        if (!multiply(f, layer->qkv, all, m->hidden, f->normed, rows,
                      f->heads + first * all * f->element, error))
            return false;
    }
    kernels_finish_heads(f->device->stream, &heads, io->count);
    return runner_check_launch(f->device, "cannot project", error);
}

static bool after(struct forward *f, const struct kv_layer *io, struct error *error)
{
    const struct model *m = f->model;
    const struct layer_weights *layer = &f->layers[io->layer];
    const size_t wide = m->intermediate;
    /* Behind the last layer's attention only the last row matters. */
    size_t first = io->layer + 1 < m->layer_count ? 0 : io->count - 1;

    for (size_t rows; first < io->count; first += rows) {
        rows = rows_from(f, first, io->count);
        if (!add_product(f, layer->o, f->query, f->out + first * f->query * f->element, first, rows,
                         error))
            return false;
        norm(f, first, rows, layer->ffn_norm);
        if (!multiply(f, layer->gate_up, 2 * wide, m->hidden, f->normed, rows, f->gate_up, error))
            return false;
        kernels_swiglu(f->device->stream, f->dtype, f->gate_up, wide, rows, f->inner);
        if (!add_product(f, layer->down, wide, f->inner, first, rows, error))
            return false;
    }
    return runner_check_launch(f->device, "cannot feed forward", error);
}

static bool predict(struct forward *f, const struct kv_layer *io, float *logits, int32_t *token,
                    struct error *error)
{
    const struct model *m = f->model;
    const struct matrix_product product = {.dtype = f->dtype,
                                           .weight = f->output ? f->output : f->embedding,
                                           .x = f->normed,
                                           .rows = 1,
                                           .n = m->vocabulary,
                                           .k = m->hidden,
                                           .y = f->logits,
                                           .y_dtype = PKV_F32,
                                           .add = false};

    if (logits == NULL && token == NULL && !f->capturing)
        return true;
    norm(f, io->count - 1, 1, f->output_norm);
    if (!runner_multiply(f->device, &product, error))
        return false;
    if (token != NULL || f->capturing)
        kernels_likeliest(f->device->stream, f->logits, m->vocabulary,
                          (int32_t *)(void *)(f->logits + m->vocabulary));
    return runner_check_launch(f->device, "cannot predict", error);
}

/* ---- The queue ---- */

static bool copy_out(struct forward *f, size_t first, size_t count, struct error *error)
{
    return runner_check(f->device,
                        cudaMemcpyAsync(f->logits_host + first, f->logits + first,
                                        count * sizeof *f->logits, cudaMemcpyDeviceToHost,
                                        f->device->stream),
                        "cannot fetch logits", error);
}

static bool fetch(struct forward *f, float *logits, int32_t *token, struct error *error)
{
    const size_t count = f->model->vocabulary;

    f->wanted_logits = logits;
    f->wanted_token = token;
    return (logits == NULL || copy_out(f, 0, count, error)) &&
           (token == NULL || copy_out(f, count, 1, error));
}

static bool wait_for_step(struct forward *f, struct error *error)
{
    const size_t count = f->model->vocabulary;

    if (!runner_wait(f->device, "the step failed", error))
        return false;
    if (f->wanted_logits != NULL)
        memcpy(f->wanted_logits, f->logits_host, count * sizeof *f->logits_host);
    if (f->wanted_token != NULL)
        memcpy(f->wanted_token, f->logits_host + count, sizeof *f->wanted_token);
    return true;
}

static bool capture_begin(struct forward *f, struct error *error)
{
    f->capturing = runner_capture_begin(&f->device->base, error);
    return f->capturing;
}

static bool capture_end(struct forward *f, void **graph, struct error *error)
{
    f->capturing = false;
    return runner_capture_end(&f->device->base, graph, error);
}

static bool launch(struct forward *f, void *graph, struct error *error)
{
    return runner_launch(&f->device->base, graph, error);
}

static void free_graph(struct forward *f, void *graph)
{
    runner_free_graph(&f->device->base, graph);
}

static const struct forward_queue queue = {
    .fetch = fetch,
    .wait = wait_for_step,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .launch = launch,
    .free_graph = free_graph,
};

const struct forward_operations runner_forward = {
    .close = close_forward,
    .begin = begin,
    .before = before,
    .after = after,
    .predict = predict,
    .queue = &queue,
};
