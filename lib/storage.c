/* SPDX-License-Identifier: MIT */
/* Checked configurations, and the bytes and slots that follow from them. */
#include "storage.h"

#include "parts.h"

#include <math.h>
#include <stdio.h>

#include "numeric.h"
#include "structs.h"

/* OpenMP ends the process when it cannot start a thread; this many it can. */
#define MAX_THREADS 1024u

void pkv_config_init(pkv_config *config, size_t struct_size)
{
    static const pkv_config defaults = {.page_tokens = 32,
                                        .sink_pages = 1,
                                        .window_pages = 1,
                                        .factors_k = PKV_FACTORS_NATIVE,
                                        .factors_v = PKV_FACTORS_NATIVE,
                                        .rank_k = 16,
                                        .rank_v = 14,
                                        .solver = PKV_SOLVER_BATCHED,
                                        .dtype = PKV_BF16,
                                        .max_sequences = 1};

    config->struct_size = struct_size;
    structs_write(&structs_config, &defaults, config);
}

bool storage_dtype_valid(pkv_dtype dtype)
{
    return dtype == PKV_F32 || dtype == PKV_F16 || dtype == PKV_BF16;
}

struct page_policy storage_policy(const pkv_config *config)
{
    return (struct page_policy){.page_tokens = config->page_tokens,
                                .sink_pages = config->sink_pages,
                                .window_pages = config->window_pages,
                                .factorize = config->factors_k != PKV_FACTORS_NONE};
}

size_t storage_rank_k(const pkv_config *config, size_t layer)
{
    if (config->factors_k == PKV_FACTORS_NONE)
        return 0;
    return config->layer_rank_k ? config->layer_rank_k[layer] : config->rank_k;
}

size_t storage_rank_v(const pkv_config *config, size_t layer)
{
    if (config->factors_v == PKV_FACTORS_NONE)
        return 0;
    return config->layer_rank_v ? config->layer_rank_v[layer] : config->rank_v;
}

static pkv_status check_at_least_one(const char *field, size_t value, struct message *message)
{
    if (value == 0)
        return fail(message, PKV_ERROR_ARGUMENT, "%s: 0 is not allowed; expected 1 or more", field);
    return PKV_OK;
}

static pkv_status check_multiple_of_8(const char *field, size_t value, size_t most,
                                      struct message *message)
{
    if (value < 8 || value > most || value % 8 != 0)
        return fail(message, PKV_ERROR_ARGUMENT, "%s: %zu is not a multiple of 8 in 8 .. %zu",
                    field, value, most);
    return PKV_OK;
}

static pkv_status check_shape(const pkv_config *config, struct message *message)
{
    pkv_status status = check_at_least_one("layers", config->layers, message);

    if (status == PKV_OK)
        status = check_at_least_one("kv_heads", config->kv_heads, message);
    if (status == PKV_OK)
        status = check_at_least_one("max_sequences", config->max_sequences, message);
    if (status == PKV_OK)
        status = check_at_least_one("max_tokens", config->max_tokens, message);
    if (status != PKV_OK)
        return status;
    if (config->query_heads == 0 || config->query_heads % config->kv_heads != 0)
        return fail(message, PKV_ERROR_ARGUMENT,
                    "query_heads: %zu is not a positive multiple of kv_heads (%zu)",
                    config->query_heads, config->kv_heads);
    status = check_multiple_of_8("head_dim", config->head_dim, 1024, message);
    if (status == PKV_OK)
        status = check_multiple_of_8("page_tokens", config->page_tokens, 256, message);
    return status;
}

static pkv_status check_factors(const char *field, pkv_factors factors, struct message *message)
{
    if (factors != PKV_FACTORS_NONE && factors != PKV_FACTORS_NATIVE && factors != PKV_FACTORS_INT4)
        return fail(message, PKV_ERROR_ARGUMENT, "%s: %d is not a pkv_factors", field,
                    (int)factors);
    return PKV_OK;
}

static pkv_status check_ranks(const pkv_config *config, const char *field, size_t rank,
                              const size_t *layer_ranks, struct message *message)
{
    size_t most = min_size(config->page_tokens, config->head_dim);

    if (layer_ranks == NULL) {
        if (rank < 1 || rank > most)
            return fail(message, PKV_ERROR_ARGUMENT,
                        "%s: %zu is outside 1 .. %zu, the smaller of page_tokens and head_dim",
                        field, rank, most);
        return PKV_OK;
    }
    for (size_t layer = 0; layer < config->layers; layer++) {
        if (layer_ranks[layer] < 1 || layer_ranks[layer] > most)
            return fail(message, PKV_ERROR_ARGUMENT,
                        "layer_%s[%zu]: %zu is outside 1 .. %zu, the smaller of page_tokens and "
                        "head_dim",
                        field, layer, layer_ranks[layer], most);
    }
    return PKV_OK;
}

static pkv_status check_choices(const pkv_config *config, struct message *message)
{
    pkv_status status = check_factors("factors_k", config->factors_k, message);

    if (status == PKV_OK)
        status = check_factors("factors_v", config->factors_v, message);
    if (status != PKV_OK)
        return status;
    if ((config->factors_k == PKV_FACTORS_NONE) != (config->factors_v == PKV_FACTORS_NONE))
        return fail(message, PKV_ERROR_ARGUMENT,
                    "factors_v: both factors_k and factors_v must be PKV_FACTORS_NONE, or neither");
    if (config->solver != PKV_SOLVER_LAPACK && config->solver != PKV_SOLVER_BATCHED &&
        config->solver != PKV_SOLVER_CUSOLVER)
        return fail(message, PKV_ERROR_ARGUMENT, "solver: %d is not a pkv_solver",
                    (int)config->solver);
    if (!storage_dtype_valid(config->dtype))
        return fail(message, PKV_ERROR_ARGUMENT, "dtype: %d is not a pkv_dtype",
                    (int)config->dtype);
    if ((config->step_flags & ~(size_t)PKV_STEP_ASYNC) != 0)
        return fail(message, PKV_ERROR_ARGUMENT, "step_flags: %zu is not made of pkv_step_flags",
                    config->step_flags);
    if (config->threads > MAX_THREADS)
        return fail(message, PKV_ERROR_ARGUMENT, "threads: %u are more than %u", config->threads,
                    MAX_THREADS);
    if (!isfinite(config->softmax_scale) || config->softmax_scale < 0)
        return fail(message, PKV_ERROR_ARGUMENT,
                    "softmax_scale: %g is not a finite number of 0 or more",
                    (double)config->softmax_scale);
    if ((config->allocator.allocate == NULL) != (config->allocator.release == NULL))
        return fail(message, PKV_ERROR_ARGUMENT,
                    "allocator: both allocate and release must be set, or neither");
    return PKV_OK;
}

/* Of one KV head of a factorized page of one layer. */
static size_t layer_factor_bytes(const pkv_config *config, size_t layer)
{
    size_t bytes = 0;

    for (int part = PART_K_LEFT; part <= PART_V_RIGHT; part++) {
        bool is_key = part == PART_K_LEFT || part == PART_K_RIGHT;
        struct part_form form =
            parts_form((enum page_part)part, is_key ? config->factors_k : config->factors_v,
                       config->page_tokens, config->head_dim,
                       is_key ? storage_rank_k(config, layer) : storage_rank_v(config, layer));

        bytes += parts_bytes(&form, storage_element_bytes(config->dtype));
    }
    return bytes;
}

/* The same of all layers. */
static size_t factor_bytes(const pkv_config *config)
{
    size_t bytes = 0;

    if (config->layer_rank_k == NULL && config->layer_rank_v == NULL)
        return size_multiply(config->layers, layer_factor_bytes(config, 0));
    for (size_t layer = 0; layer < config->layers; layer++)
        bytes = size_add(bytes, layer_factor_bytes(config, layer));
    return bytes;
}

/* The slots' formulas of pkv_footprint. */
static void count_slots(const pkv_config *config, size_t *dense, size_t *factor)
{
    size_t sequences = config->max_sequences;
    size_t pages = config->max_tokens / config->page_tokens;
    size_t step = config->max_step_tokens ? config->max_step_tokens : config->max_tokens;
    size_t window = size_multiply(sequences, size_add(config->window_pages, 1));
    size_t all = size_add(size_add(pages, sequences), sequences / 2);

    *factor = 0;
    *dense = all;
    if (config->factors_k == PKV_FACTORS_NONE)
        return;
    *factor = pages > config->sink_pages ? pages - config->sink_pages : 0;
    *dense = size_add(size_multiply(sequences, config->sink_pages),
                      size_add(window, min_size(window, step / 2)));
    *dense = size_add(min_size(all, *dense), 1);
}

pkv_status storage_of(const pkv_config *config, struct storage *storage, struct message *message)
{
    pkv_status status = check_shape(config, message);

    if (status == PKV_OK)
        status = check_choices(config, message);
    if (status != PKV_OK)
        return status;

    /* Before the ranks: an absurd number of layers must not make a loop long. */
    size_t element = storage_element_bytes(config->dtype);
    size_t heads = size_multiply(config->layers, config->kv_heads);

    storage->token_bytes = size_multiply(heads, 2 * config->head_dim * element);
    if (storage->token_bytes > PTRDIFF_MAX ||
        size_multiply(config->query_heads, config->head_dim * sizeof(float)) > PTRDIFF_MAX)
        return fail(message, PKV_ERROR_ARGUMENT,
                    "layers, query_heads, kv_heads: %zu, %zu, %zu are more than memory can hold",
                    config->layers, config->query_heads, config->kv_heads);

    storage->factor_bytes = 0;
    if (config->factors_k != PKV_FACTORS_NONE) {
        status = check_ranks(config, "rank_k", config->rank_k, config->layer_rank_k, message);
        if (status == PKV_OK)
            status = check_ranks(config, "rank_v", config->rank_v, config->layer_rank_v, message);
        if (status != PKV_OK)
            return status;
        storage->factor_bytes = size_multiply(config->kv_heads, factor_bytes(config));
    }

    count_slots(config, &storage->dense_slots, &storage->factor_slots);
    if (storage->dense_slots > UINT32_MAX || storage->factor_slots > UINT32_MAX)
        return fail(message, PKV_ERROR_ARGUMENT,
                    "max_tokens, max_sequences: %zu tokens and %zu sequences need more than %lu "
                    "slots",
                    config->max_tokens, config->max_sequences, (unsigned long)UINT32_MAX);

    size_t dense_bytes = size_multiply(size_multiply(storage->dense_slots, config->page_tokens),
                                       storage->token_bytes);
    size_t factor_bytes = size_multiply(storage->factor_slots, storage->factor_bytes);

    if (size_add(dense_bytes, factor_bytes) > PTRDIFF_MAX ||
        size_multiply(config->max_tokens, storage->token_bytes) > PTRDIFF_MAX)
        return fail(message, PKV_ERROR_ARGUMENT,
                    "max_tokens: %zu tokens of %zu bytes are more than memory can hold",
                    config->max_tokens, storage->token_bytes);
    return PKV_OK;
}

pkv_status storage_read_config(const pkv_config *theirs, pkv_config *config,
                               struct message *message)
{
    if (theirs == NULL)
        return fail(message, PKV_ERROR_ARGUMENT, "config: NULL");
    return structs_read(&structs_config, theirs, config, message);
}

size_t storage_page_bytes(const struct storage *storage, enum slot_kind kind, size_t tokens)
{
    return kind == SLOT_FACTOR ? storage->factor_bytes : tokens * storage->token_bytes;
}

pkv_status pkv_footprint_of(const pkv_config *theirs, size_t tokens, pkv_footprint *footprint,
                            char *message)
{
    struct message text = {""};
    struct storage storage;
    pkv_config config;
    pkv_status status = storage_read_config(theirs, &config, &text);

    if (status == PKV_OK)
        status = storage_of(&config, &storage, &text);
    if (status == PKV_OK && footprint == NULL)
        status = fail(&text, PKV_ERROR_ARGUMENT, "footprint: NULL");
    if (status == PKV_OK)
        status = structs_check(&structs_footprint, footprint, &text);
    if (status == PKV_OK && tokens > config.max_tokens)
        status = fail(&text, PKV_ERROR_ARGUMENT, "tokens: %zu are more than max_tokens (%zu)",
                      tokens, config.max_tokens);
    if (message)
        snprintf(message, PKV_MESSAGE_BYTES, "%s", text.text);
    if (status != PKV_OK)
        return status;

    size_t factorized = 0;

    if (config.factors_k != PKV_FACTORS_NONE) {
        factorized = tokens / config.page_tokens;
        factorized -= min_size(factorized, config.window_pages);
        factorized -= min_size(factorized, config.sink_pages);
    }

    size_t dense_tokens = tokens - factorized * config.page_tokens;
    const pkv_footprint result = {.payload_bytes =
                                      storage_page_bytes(&storage, SLOT_DENSE, dense_tokens) +
                                      factorized * storage.factor_bytes,
                                  .raw_bytes = tokens * storage.token_bytes,
                                  .dense_slots = storage.dense_slots,
                                  .factor_slots = storage.factor_slots};

    structs_write(&structs_footprint, &result, footprint);
    return PKV_OK;
}
