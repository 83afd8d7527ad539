/* SPDX-License-Identifier: MIT */
/* Second moments of a model's hidden states, keys and values, and their file. */
#include "calibration.h"

#include <cblas.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runner/safetensors.h"

#define FORMAT "puzzlekv-calibration-1"

/* "layers.4294967295.hidden" */
#define NAME_BYTES 40

#define GEOMETRY_BYTES 160

static void name_tensor(char name[NAME_BYTES], size_t layer, const char *what)
{
    snprintf(name, NAME_BYTES, "layers.%zu.%s", layer, what);
}

static void describe_geometry(const struct model *m, char text[GEOMETRY_BYTES])
{
    snprintf(text, GEOMETRY_BYTES,
             "layers=%zu,hidden=%zu,query_heads=%zu,kv_heads=%zu,head_dim=%zu", m->layer_count,
             m->hidden, m->query_heads, m->kv_heads, m->head_dim);
}

/* Which element of a head, in the model's order, is element `i` in the file's. */
static size_t element_of(const struct model *m, enum calibration_part part, size_t i)
{
    const size_t pairs = m->head_dim / 2;

    if (part == CALIBRATION_V || !m->rope_interleaved)
        return i;
    return i < pairs ? 2 * i : 2 * (i - pairs) + 1;
}

/* ---- Measuring ------------------------------------------------------------------------------- */

/* Columns of a tile of a sum. Tiles are summed each by one thread, so the sums do not depend on how
 * many there are. */
#define TILE 128

struct probe {
    struct kv_store store;
    size_t fed;     /* tokens, in all sequences */
    double *hidden; /* [layers, hidden, hidden]; only tiles on and above the diagonal are there */
    double *heads;  /* [layers, 2, kv_heads, head_dim, head_dim], keys first */
    double *rows;   /* of one layer of a step: hidden, K and V */
};

static double *hidden_sum(const struct probe *p, size_t layer)
{
    const size_t hidden = p->store.options.model->hidden;

    return p->hidden + layer * hidden * hidden;
}

static double *head_sum(const struct probe *p, enum calibration_part part, size_t layer,
                        size_t kv_head)
{
    const struct model *m = p->store.options.model;

    return p->heads +
           ((layer * 2 + (size_t)part) * m->kv_heads + kv_head) * m->head_dim * m->head_dim;
}

/* sum [columns of a, columns of b] += a^T b, of matrices with `count` rows. */
static void add_product(const double *a, size_t a_columns, const double *b, size_t b_columns,
                        size_t stride, size_t count, double *sum, size_t sum_stride)
{
    cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (blasint)a_columns, (blasint)b_columns,
                (blasint)count, 1, a, (blasint)stride, b, (blasint)stride, 1, sum,
                (blasint)sum_stride);
}

static void add_hidden_tiles(const struct probe *p, size_t layer, size_t count)
{
    const size_t hidden = p->store.options.model->hidden, tiles = (hidden + TILE - 1) / TILE;
    double *sum = hidden_sum(p, layer);

#pragma omp parallel for schedule(dynamic, 1) num_threads(p->store.options.threads)
    for (size_t tile = 0; tile < tiles * tiles; tile++) {
        const size_t i = tile / tiles * TILE, j = tile % tiles * TILE;

        if (j >= i)
            add_product(p->rows + i, hidden - i < TILE ? hidden - i : TILE, p->rows + j,
                        hidden - j < TILE ? hidden - j : TILE, hidden, count, sum + i * hidden + j,
                        hidden);
    }
}

static bool look(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct probe *p = (struct probe *)store;
    const struct model *m = store->options.model;
    const size_t d = m->head_dim, width = m->kv_heads * d;
    double *k = p->rows + io->count * m->hidden, *v = k + io->count * width;

    (void)error;
    for (size_t i = 0; i < io->count * m->hidden; i++)
        p->rows[i] = io->hidden[i];
    for (size_t i = 0; i < io->count * width; i++) {
        k[i] = io->k[i];
        v[i] = io->v[i];
    }
    add_hidden_tiles(p, io->layer, io->count);
#pragma omp parallel for num_threads(store->options.threads)
    for (size_t i = 0; i < 2 * m->kv_heads; i++) {
        const size_t part = i / m->kv_heads, head = i % m->kv_heads;
        const double *x = (part == CALIBRATION_K ? k : v) + head * d;

        add_product(x, d, x, d, width, io->count,
                    head_sum(p, (enum calibration_part)part, io->layer, head), d);
    }
    return true;
}

static bool end(struct kv_store *store, struct error *error)
{
    (void)error;
    ((struct probe *)store)->fed += store->step;
    return true;
}

static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    (void)store;
    (void)error;
    *tokens = 0;
    return true;
}

static void close_probe(struct kv_store *store)
{
    struct probe *p = (struct probe *)store;

    free(p->rows);
    free(p->heads);
    free(p->hidden);
    free(p);
}

static const struct kv_store_operations operations = {
    .reads_hidden = true,
    .close = close_probe,
    .layer = look,
    .end = end,
    .rewind = rewind_to,
};

static const struct policy probe_policy = {.name = "calibrate"};

bool calibration_probe_open(const struct model *model, size_t max_tokens, unsigned threads,
                            struct kv_store **probe, struct error *error)
{
    const size_t width = model->kv_heads * model->head_dim;
    struct probe *p = calloc(1, sizeof *p);

    *probe = NULL;
    if (p == NULL)
        return error_set(error, "out of memory for the calibration");
    p->store = (struct kv_store){.operations = &operations,
                                 .policy = &probe_policy,
                                 .options = {.model = model,
                                             .max_tokens = max_tokens,
                                             .max_step_tokens = max_tokens,
                                             .threads = threads}};
    p->hidden = calloc(model->layer_count * model->hidden, model->hidden * sizeof *p->hidden);
    p->heads = calloc(model->layer_count * 2 * width, model->head_dim * sizeof *p->heads);
    p->rows = calloc(max_tokens, (model->hidden + 2 * width) * sizeof *p->rows);
    if (p->hidden == NULL || p->heads == NULL || p->rows == NULL) {
        close_probe(&p->store);
        return error_set(error, "out of memory for the calibration");
    }
    *probe = &p->store;
    return true;
}

/* ---- Writing --------------------------------------------------------------------------------- */

/* Adds an F32 tensor to the header; *end is where it begins and then ends. */
static void list_tensor(json_t *header, const char *name, json_t *shape, size_t elements,
                        size_t *end)
{
    const size_t begin = *end;

    *end += elements * sizeof(float);
    json_object_set_new(header, name,
                        json_pack("{s:s, s:o, s:[I, I]}", "dtype", "F32", "shape", shape,
                                  "data_offsets", (json_int_t)begin, (json_int_t)*end));
}

static json_t *make_header(const struct model *m, const struct calibration_source *source)
{
    json_t *header = json_object();
    char geometry[GEOMETRY_BYTES], name[NAME_BYTES], sequences[24], length[24], seed[24];
    size_t end = 0;

    describe_geometry(m, geometry);
    snprintf(sequences, sizeof sequences, "%zu", source->sequences);
    snprintf(length, sizeof length, "%zu", source->length);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)source->seed);
    json_object_set_new(header, "__metadata__",
                        json_pack("{s:s, s:s, s:s, s:s, s:s}", "format", FORMAT, "geometry",
                                  geometry, "sequences", sequences, "length", length, "seed",
                                  seed));
    for (size_t l = 0; l < m->layer_count; l++) {
        name_tensor(name, l, "hidden");
        list_tensor(header, name, json_pack("[I, I]", (json_int_t)m->hidden, (json_int_t)m->hidden),
                    m->hidden * m->hidden, &end);
        for (int part = CALIBRATION_K; part <= CALIBRATION_V; part++) {
            name_tensor(name, l, part == CALIBRATION_K ? "k" : "v");
            list_tensor(header, name,
                        json_pack("[I, I, I]", (json_int_t)m->kv_heads, (json_int_t)m->head_dim,
                                  (json_int_t)m->head_dim),
                        m->kv_heads * m->head_dim * m->head_dim, &end);
        }
    }
    if (json_object_size(header) != 3 * m->layer_count + 1) {
        json_decref(header);
        return NULL;
    }
    return header;
}

/* The format wants the data at a multiple of 8 bytes, behind spaces. */
static bool write_header(json_t *header, FILE *file)
{
    char *text = header != NULL ? json_dumps(header, JSON_COMPACT) : NULL;
    bool done = text != NULL;

    if (done) {
        const size_t length = strlen(text), padded = (length + 7) / 8 * 8;
        unsigned char size[8];

        for (size_t i = 0; i < sizeof size; i++)
            size[i] = (unsigned char)((uint64_t)padded >> 8 * i);
        done = fwrite(size, sizeof size, 1, file) == 1 && fwrite(text, length, 1, file) == 1 &&
               fprintf(file, "%*s", (int)(padded - length), "") >= 0;
    }
    free(text);
    return done;
}

/* The mean of a symmetric sum, of which the upper triangle counts; `order` is the part's. */
static bool write_mean(const struct probe *p, const double *sum, size_t n, const size_t *order,
                       float *row, FILE *file)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < n; j++) {
            const size_t a = order != NULL ? order[i] : i, b = order != NULL ? order[j] : j;

            row[j] = (float)(sum[a < b ? a * n + b : b * n + a] / (double)p->fed);
        }
        if (fwrite(row, sizeof *row, n, file) != n)
            return false;
    }
    return true;
}

static bool write_tensors(const struct probe *p, size_t *order, float *row, FILE *file)
{
    const struct model *m = p->store.options.model;

    for (size_t l = 0; l < m->layer_count; l++) {
        if (!write_mean(p, hidden_sum(p, l), m->hidden, NULL, row, file))
            return false;
        for (size_t i = 0; i < 2 * m->kv_heads; i++) {
            const enum calibration_part part = (enum calibration_part)(i / m->kv_heads);

            for (size_t c = 0; c < m->head_dim; c++)
                order[c] = element_of(m, part, c);
            if (!write_mean(p, head_sum(p, part, l, i % m->kv_heads), m->head_dim, order, row,
                            file))
                return false;
        }
    }
    return true;
}

bool calibration_write(const struct kv_store *probe, const struct calibration_source *source,
                       FILE *file, const char *name, struct error *error)
{
    const struct probe *p = (const struct probe *)probe;
    const struct model *m = probe->options.model;
    json_t *header = make_header(m, source);
    size_t *order = calloc(m->head_dim, sizeof *order);
    float *row = calloc(m->hidden + m->head_dim, sizeof *row);
    bool done = false;

    errno = 0;
    if (header == NULL || order == NULL || row == NULL)
        error_set(error, "%s: out of memory", name);
    else if (!write_header(header, file) || !write_tensors(p, order, row, file))
        error_set(error, "%s: cannot write: %s", name, strerror(errno));
    else
        done = true;
    free(row);
    free(order);
    json_decref(header);
    return done;
}

/* ---- Reading --------------------------------------------------------------------------------- */

struct calibration {
    const struct model *model;
    struct safetensors *file;
};

/* The tensor of that name and shape. */
static const struct safetensors_tensor *find_tensor(const struct calibration *c, const char *name,
                                                    size_t dimension_count,
                                                    const size_t *dimensions, struct error *error)
{
    const char *path = safetensors_path(c->file);
    const struct safetensors_tensor *tensor = safetensors_tensor(c->file, name);
    char shape[SAFETENSORS_MAX_DIMENSIONS * 24];
    size_t length = 0;
    bool same;

    if (tensor == NULL) {
        error_set(error, "%s: tensor %s: is missing", path, name);
        return NULL;
    }
    if (!tensor->known || tensor->type != QUANT_F32) {
        error_set(error, "%s: tensor %s: is of type %.20s, expected F32", path, name,
                  tensor->dtype);
        return NULL;
    }
    same = tensor->dimension_count == dimension_count;
    for (size_t i = 0; i < dimension_count; i++) {
        same = same && tensor->dimensions[i] == dimensions[i];
        length += (size_t)snprintf(shape + length, sizeof shape - length, "%s%zu",
                                   i > 0 ? ", " : "", dimensions[i]);
    }
    if (!same) {
        error_set(error, "%s: tensor %s: does not have the shape [%s]", path, name, shape);
        return NULL;
    }
    return tensor;
}

static const struct safetensors_tensor *find_hidden(const struct calibration *c, size_t layer,
                                                    struct error *error)
{
    const size_t dimensions[] = {c->model->hidden, c->model->hidden};
    char name[NAME_BYTES];

    name_tensor(name, layer, "hidden");
    return find_tensor(c, name, 2, dimensions, error);
}

static const struct safetensors_tensor *find_heads(const struct calibration *c,
                                                   enum calibration_part part, size_t layer,
                                                   struct error *error)
{
    const size_t dimensions[] = {c->model->kv_heads, c->model->head_dim, c->model->head_dim};
    char name[NAME_BYTES];

    name_tensor(name, layer, part == CALIBRATION_K ? "k" : "v");
    return find_tensor(c, name, 3, dimensions, error);
}

static const char *fisher_name(enum calibration_part part)
{
    return part == CALIBRATION_K ? "fisher.k" : "fisher.v";
}

bool calibration_has_fisher(const struct calibration *c)
{
    return safetensors_tensor(c->file, fisher_name(CALIBRATION_K)) != NULL ||
           safetensors_tensor(c->file, fisher_name(CALIBRATION_V)) != NULL;
}

/* Elements `first` .. first + count - 1. */
static bool read_elements(const struct calibration *c, const struct safetensors_tensor *tensor,
                          size_t first, size_t count, double *to, struct error *error)
{
    for (size_t i = 0; i < count; i++) {
        float element;

        memcpy(&element, (const char *)tensor->data + (first + i) * sizeof element, sizeof element);
        if (!isfinite(element))
            return error_set(error, "%s: tensor %s: element %zu is not finite",
                             safetensors_path(c->file), tensor->name, first + i);
        to[i] = element;
    }
    return true;
}

static bool check_file(const struct calibration *c, struct error *error)
{
    const char *path = safetensors_path(c->file);
    const char *format = safetensors_metadata(c->file, "format");
    const char *geometry = safetensors_metadata(c->file, "geometry");
    char expected[GEOMETRY_BYTES];

    if (format == NULL || strcmp(format, FORMAT) != 0)
        return error_set(error, "%s: is not a calibration that puzzlekv-eval calibrate has written",
                         path);
    describe_geometry(c->model, expected);
    if (geometry == NULL || strcmp(geometry, expected) != 0)
        return error_set(error,
                         "%s: is the calibration of another model: it has %.160s, this one "
                         "%s",
                         path, geometry != NULL ? geometry : "no geometry", expected);
    for (size_t l = 0; l < c->model->layer_count; l++) {
        if (find_hidden(c, l, error) == NULL || find_heads(c, CALIBRATION_K, l, error) == NULL ||
            find_heads(c, CALIBRATION_V, l, error) == NULL)
            return false;
    }
    return true;
}

bool calibration_check(const struct kv_value *name, const char *text, struct error *error)
{
    return name->there || error_set(error,
                                    "--kv %.80s: calibration=FILE is missing; puzzlekv-eval "
                                    "calibrate writes one",
                                    text);
}

bool calibration_open(const struct kv_value *name, const struct model *model,
                      struct calibration **calibration, struct error *error)
{
    struct calibration *c = calloc(1, sizeof *c);
    char path[KV_SPEC_FILE_BYTES];

    *calibration = NULL;
    snprintf(path, sizeof path, "%.*s", (int)name->file_length, name->file);
    if (c == NULL)
        return error_set(error, "%s: out of memory", path);
    c->model = model;
    if (!safetensors_open(path, &c->file, error) || !check_file(c, error)) {
        calibration_close(c);
        return false;
    }
    *calibration = c;
    return true;
}

void calibration_close(struct calibration *calibration)
{
    if (calibration == NULL)
        return;
    safetensors_close(calibration->file);
    free(calibration);
}

bool calibration_hidden(const struct calibration *c, size_t layer, double *moment,
                        struct error *error)
{
    const struct safetensors_tensor *tensor = find_hidden(c, layer, error);

    return tensor != NULL &&
           read_elements(c, tensor, 0, c->model->hidden * c->model->hidden, moment, error);
}

bool calibration_head(const struct calibration *c, enum calibration_part part, size_t layer,
                      size_t kv_head, double *moment, struct error *error)
{
    const struct safetensors_tensor *tensor = find_heads(c, part, layer, error);
    const size_t d = c->model->head_dim;

    if (tensor == NULL)
        return false;
    for (size_t i = 0; i < d * d; i++) {
        const size_t row = element_of(c->model, part, i / d);
        const size_t column = element_of(c->model, part, i % d);

        if (!read_elements(c, tensor, kv_head * d * d + i, 1, &moment[row * d + column], error))
            return false;
    }
    return true;
}

bool calibration_fisher(const struct calibration *c, enum calibration_part part, double *values,
                        struct error *error)
{
    const size_t layers = c->model->layer_count;
    const struct safetensors_tensor *tensor = find_tensor(c, fisher_name(part), 1, &layers, error);
    double sum = 0;

    if (tensor == NULL || !read_elements(c, tensor, 0, layers, values, error))
        return false;
    for (size_t l = 0; l < layers; l++) {
        if (values[l] < 0)
            return error_set(error, "%s: tensor %s: element %zu is negative",
                             safetensors_path(c->file), tensor->name, l);
        sum += values[l];
    }
    return sum > 0 ||
           error_set(error, "%s: tensor %s: is all 0", safetensors_path(c->file), tensor->name);
}
