/* SPDX-License-Identifier: MIT */
/* The policies of libpuzzlekv: puzzle, with old pages as factors, and raw, with none. */
#ifndef PUZZLEKV_TOOLS_POLICIES_PAGES_H
#define PUZZLEKV_TOOLS_POLICIES_PAGES_H

#include <puzzlekv.h>

#include "policy.h"

/* Initialises `config` with what the model and the policy, which is puzzle or raw, decide. The spec
 * is resolved. */
void pages_configure(const struct kv_spec *spec, const struct model *model, pkv_config *config);

/* The cache of such a store, and its one sequence. */
pkv_cache *pages_cache(struct kv_store *store);
pkv_seq *pages_sequence(struct kv_store *store);

#endif
