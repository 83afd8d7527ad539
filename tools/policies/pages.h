/* SPDX-License-Identifier: MIT */
/* The policies of libpuzzlekv: puzzle and puzzle-int4, with old pages as factors, and raw. */
#ifndef PUZZLEKV_TOOLS_POLICIES_PAGES_H
#define PUZZLEKV_TOOLS_POLICIES_PAGES_H

#include <puzzlekv.h>

#include "policy.h"

/* Initialises `config` with what the model and the policy, one of this file's, decide. The spec
 * is resolved. */
void pages_configure(const struct kv_spec *spec, const struct model *model, pkv_config *config);

/* Opens libpuzzlekv's cache for it, with one sequence. */
bool pages_open_cache(const struct kv_spec *spec, const struct kv_store_options *options,
                      pkv_cache **cache, pkv_seq **seq, struct error *error);

/* False, with the library's words for it, unless the status is PKV_OK. */
bool pages_check(const pkv_cache *cache, pkv_status status, struct error *error);

/* The number of tokens, at most `tokens`, that the sequence can be cut to without changing them: to
 * keep a factorized page in part would. */
bool pages_cut(pkv_cache *cache, pkv_seq *seq, size_t page_tokens, size_t *tokens,
               struct error *error);

bool pages_stats(pkv_cache *cache, struct kv_stats *stats, struct error *error);

/* The cache of a store of these policies, and its one sequence; not with rope=pre. */
pkv_cache *pages_cache(struct kv_store *store);
pkv_seq *pages_sequence(struct kv_store *store);

/* Whether a store for the spec, which need not be resolved, is one of these, which alone can be on
 * a device and in sessions; and an error of `option`, which asks for that, if not. */
bool pages_serve(const struct kv_spec *spec);
bool pages_require(const struct kv_spec *spec, const char *option, const char *text,
                   struct error *error);

/* Between a store of these policies and a session's file. To be loaded, it has to be empty, and
 * stays so on failure. */
bool pages_save(struct kv_store *store, const pkv_session *session, const char *path,
                struct error *error);
bool pages_load(struct kv_store *store, pkv_session *session, const char *path,
                struct error *error);

/* puzzle_pre.c: as the policy's `open`, for puzzle:rope=pre. */
bool puzzle_pre_open(const struct kv_spec *spec, const struct kv_store_options *options,
                     struct kv_store **store, struct error *error);

#endif
