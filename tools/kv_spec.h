/* SPDX-License-Identifier: MIT */
/* `--kv SPEC`: which policy holds the KV cache, and its parameters. */
#ifndef PUZZLEKV_TOOLS_KV_SPEC_H
#define PUZZLEKV_TOOLS_KV_SPEC_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"
#include "runner/model.h"

struct policy;

/* A policy has at most this many keys. */
#define KV_SPEC_KEYS 12

/* The value of one key: its number, or for a choice the index of what was chosen. */
struct kv_value {
    bool there; /* typed, or the default */
    bool typed;
    double number;
    const char *file; /* [file_length], inside the text that was parsed */
    size_t file_length;
};

struct kv_spec {
    const struct policy *policy;
    struct kv_value values[KV_SPEC_KEYS]; /* in the order of policy->keys */
    const char *note;                     /* NULL, or of what kv_spec_warn() warns; a constant */
};

/* Parses name[:key=value[,key=value...]]; keys left out have their defaults, whatever the model.
 * Pure: checks what the text alone shows to be wrong. The error quotes the text and names the key.
 * The text outlives the spec. */
bool kv_spec_parse(const char *text, struct kv_spec *spec, struct error *error);

/* Fits the spec to a model, of which only the geometry is read; e.g. a ratio becomes ranks. Fails
 * with a geometry that the policy cannot serve. */
bool kv_spec_resolve(struct kv_spec *spec, const struct model *model, struct error *error);

/* Prints what resolving has found that the user should know, if anything, as a warning. */
void kv_spec_warn(const struct kv_spec *spec, const char *program);

/* The value of a key by its name; NULL if the policy has no such key, or it has no value. */
const struct kv_value *kv_spec_find(const struct kv_spec *spec, const char *key);

/* The whole number of a key that is there. */
size_t kv_spec_count(const struct kv_spec *spec, size_t key);

/* Bytes that are enough for every canonical text: file names are at most KV_SPEC_FILE_BYTES. */
#define KV_SPEC_FILE_BYTES 4096
#define KV_SPEC_TEXT_BYTES (KV_SPEC_FILE_BYTES + 512)

/* Writes every parameter that has a value in a fixed order, e.g.
 * "puzzle:page=32,rk=16,rv=14,sink=1,window=1,factors=native,rope=post". Parsing that gives the
 * same values. */
void kv_spec_canonical(const struct kv_spec *spec, char text[KV_SPEC_TEXT_BYTES]);

/* Prints the policies and their keys to standard output, for --help. */
bool kv_spec_help(struct error *error);

#endif
