/* SPDX-License-Identifier: MIT */
/* puzzlekv-bench: what its commands share. */
#ifndef PUZZLEKV_TOOLS_BENCH_H
#define PUZZLEKV_TOOLS_BENCH_H

#include <jansson.h>
#include <puzzlekv.h>

#include <stdbool.h>
#include <stddef.h>

#include "bench_peers.h"
#include "error.h"
#include "kv_spec.h"
#include "runner/cuda_device.h"
#include "runner/model.h"

#define BENCH_PROGRAM "puzzlekv-bench"

struct bench_kv {
    const char *text; /* as typed */
    struct kv_spec spec;
};

/* One of the library's solvers, or a peer to compare them with. */
struct bench_solver {
    const char *name;
    bool is_peer;
    enum peer_kind peer;
    pkv_solver library;
    bool on_device, on_cpu; /* where it is */
};

#define BENCH_SOLVER_COUNT 5
extern const struct bench_solver bench_solvers[BENCH_SOLVER_COUNT];

/* Their names, for --help and messages. */
#define BENCH_SOLVER_NAMES "batched, lapack, ssyevd, ssyevr, cusolver"

/* The command line, checked; a command reads what its table of options offers. */
struct bench_arguments {
    const char *file;   /* of a model; NULL: it is a shape */
    const char *shape;  /* as typed; NULL: there is none */
    struct model model; /* the shape's, without weights */
    size_t tokens, batch;
    size_t prompt_tokens, predict;
    size_t depth;        /* tokens before the prompt */
    size_t repeats;      /* >= 1 */
    struct bench_kv *kv; /* [kv_count], in the order typed; resolved if there is a shape */
    size_t kv_count;
    size_t pages;                        /* K or V of one page of tokens and one head is one */
    const struct bench_solver **solvers; /* [solver_count], in the order typed */
    size_t solver_count;
    pkv_dtype dtype;
    unsigned threads;
    enum device_choice backend;
    struct device *device; /* what it chose; NULL: the CPU */
    bool json, csv;
};

/* The commands. Each prints its result and fails with "interrupted" after Ctrl-C. */
bool bench_storage(const struct bench_arguments *arguments, struct error *error);

bool bench_attention(const struct bench_arguments *arguments, struct error *error);

bool bench_factorize(const struct bench_arguments *arguments, struct error *error);
bool bench_model(const struct bench_arguments *arguments, struct error *error);

/* Fails unless the caches that these configurations would open fit into free memory together with
 * `more` bytes. */
bool bench_check_memory(const pkv_config *configs, size_t count, size_t more, struct error *error);

/* A copy of `bytes` bytes, or unfilled memory with `data` NULL, where the steps take their operands
 * from: on the device, or in the host's memory. */
bool bench_operand(const struct bench_arguments *arguments, const void *data, size_t bytes,
                   void **operand, struct error *error);

/* Keys and values that caches are filled with, all layers and steps alike: operands
 * [tokens, kv_heads, head_dim] in f32, for BENCH_FILL_TOKENS `tokens` or more. */
#define BENCH_FILL_TOKENS ((size_t)2048)
bool bench_fill_operands(const struct bench_arguments *arguments, const struct model *model,
                         size_t tokens, void **k, void **v, struct error *error);

/* Accepts NULL. */
void bench_operand_free(const struct bench_arguments *arguments, void *operand);

/* ---- Samples --------------------------------------------------------------------------------- */

/* The median and the quartiles, between samples where they fall there. */
struct bench_summary {
    double median, low, high;
};

/* Sorts the samples; count >= 1. */
struct bench_summary bench_summarise(double *samples, size_t count);

/* The median of above[i] / below[i]: what was measured in one round saw the same machine. `scratch`
 * has room for `count`. */
double bench_median_ratio(const double *above, const double *below, size_t count, double *scratch);

/* ---- Results --------------------------------------------------------------------------------- */

struct bench_column {
    const char *name; /* the key in the JSON document, the heading elsewhere */
    int digits;       /* behind the point in the table; BENCH_WHOLE: a whole number everywhere */
};

#define BENCH_WHOLE    (-1)
#define BENCH_EXPONENT (-2) /* two digits and an exponent */
#define BENCH_COLUMNS  12

struct bench_row {
    const char *name;                   /* the --kv or --solver as typed */
    char canonical[KV_SPEC_TEXT_BYTES]; /* of a --kv; "": of none */
    double values[BENCH_COLUMNS];       /* NAN: there is none */
};

struct bench_results {
    const char *what; /* "kv" or "solver" */
    const struct bench_column *columns;
    size_t column_count;
    const struct bench_row *rows; /* in the order typed */
    size_t row_count;
};

/* Prints a table, CSV or the JSON document, as asked for. All begin with instruction set,
 * processor, threads and the scalars of `members`, which is freed; NULL (no memory when it was
 * built) fails.
 */
bool bench_report(const struct bench_arguments *arguments, json_t *members,
                  const struct bench_results *results, struct error *error);

#endif
