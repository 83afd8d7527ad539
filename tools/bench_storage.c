/* SPDX-License-Identifier: MIT */
/* puzzlekv-bench storage: exact bytes of a cache under each policy; nothing is computed. */
#include "bench.h"

#include <stdlib.h>

#include "options.h"
#include "policies/policy.h"

static const struct bench_column columns[] = {
    {"bytes", BENCH_WHOLE},
    {"bytes_raw", BENCH_WHOLE},
    {"kv_ratio", 5},
};

static bool measure(const struct bench_arguments *arguments, const struct bench_kv *kv,
                    struct bench_row *row, struct error *error)
{
    const struct policy_size size = {.model = &arguments->model,
                                     .dtype = arguments->dtype,
                                     .prompt = arguments->tokens,
                                     .tokens = arguments->tokens};
    size_t raw = policy_raw_bytes(size.model, size.dtype, size.tokens), bytes;

    if (!kv->spec.policy->bytes(&kv->spec, &size, &bytes, error))
        return false;
    kv_spec_warn(&kv->spec, BENCH_PROGRAM);
    row->name = kv->text;
    kv_spec_canonical(&kv->spec, row->canonical);
    row->values[0] = (double)bytes;
    row->values[1] = (double)raw;
    row->values[2] = (double)bytes / (double)raw;
    return true;
}

bool bench_storage(const struct bench_arguments *arguments, struct error *error)
{
    struct bench_row *rows = calloc(arguments->kv_count, sizeof *rows);
    const struct bench_results results = {"kv", columns, sizeof columns / sizeof *columns, rows,
                                          arguments->kv_count};
    bool done = rows != NULL || error_set(error, "out of memory");

    for (size_t i = 0; i < arguments->kv_count && done; i++)
        done = measure(arguments, &arguments->kv[i], &rows[i], error);
    if (done)
        done = bench_report(arguments,
                            json_pack("{s:s, s:s, s:I}", "dtype", dtype_name(arguments->dtype),
                                      "shape", arguments->shape, "tokens",
                                      (json_int_t)arguments->tokens),
                            &results, error);
    free(rows);
    return done;
}
