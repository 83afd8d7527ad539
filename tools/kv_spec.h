/* SPDX-License-Identifier: MIT */
/* `--kv SPEC`: which policy holds the KV cache, and its parameters. */
#ifndef PUZZLEKV_TOOLS_KV_SPEC_H
#define PUZZLEKV_TOOLS_KV_SPEC_H

#include <puzzlekv.h>

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

enum kv_policy {
    KV_PUZZLE, /* pages, old ones as low-rank factors */
    KV_RAW     /* the same pages, all dense */
};

/* The policies and their keys, for --help. */
#define KV_SPEC_HELP                                                                               \
    "puzzle or raw, with :key=value,... after it;\n"                                               \
    "puzzle takes page=32, rk=16, rv=14 (or ratio=R),\n"                                           \
    "sink=1, window=1, factors=native, rope=post;\n"                                               \
    "raw takes page=32"

struct kv_spec {
    enum kv_policy policy;
    size_t page_tokens; /* a multiple of 8, 8 .. 256 */
    /* KV_PUZZLE only, else 0. */
    size_t sink_pages;
    size_t window_pages;
    double ratio;          /* stored / dense bytes asked for, (0, 1]; 0 once ranks are known */
    size_t rank_k, rank_v; /* 0 while ratio stands for them */
};

/* Parses name[:key=value[,key=value...]]; keys left out have their defaults, whatever the model.
 * Pure: checks what the text alone shows to be wrong. The error quotes the text and names the key.
 */
bool kv_spec_parse(const char *text, struct kv_spec *spec, struct error *error);

/* Turns a ratio into ranks, for config->head_dim, and sets the fields of `config` that the policy
 * decides: pages, factors and ranks. With P = page_tokens and d = head_dim,
 *     r_K + r_V = round(ratio 2 P d / (P + d)),  r_K = round((r_K + r_V) 16 / 30).
 * Fails if a rank is not in 1 .. min(P, d); then `config` is unchanged. */
bool kv_spec_apply(struct kv_spec *spec, pkv_config *config, struct error *error);

/* Bytes that are enough for every canonical text. */
#define KV_SPEC_TEXT_BYTES 192

/* Writes every parameter in a fixed order, e.g.
 * "puzzle:page=32,rk=16,rv=14,sink=1,window=1,factors=native,rope=post". Parsing that gives the
 * same spec. `spec` has been applied, so it has ranks. */
void kv_spec_canonical(const struct kv_spec *spec, char text[KV_SPEC_TEXT_BYTES]);

#endif
