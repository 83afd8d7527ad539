/* SPDX-License-Identifier: MIT */
/* puzzlekv-run --session: the cache and its tokens in a file from one run to the next. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "output_file.h"
#include "policies/pages.h"
#include "run.h"

/* Bytes of a token's id in the session. */
#define ID_BYTES 4

/* Bytes at each end of a matrix that tell it from others: to read all of a model takes too long. */
#define SAMPLE_BYTES 4096

static void hash_weight(XXH3_state_t *hash, const struct weight *weight)
{
    const size_t bytes = weight->rows * weight->row_bytes;
    const size_t sample = bytes < SAMPLE_BYTES ? bytes : SAMPLE_BYTES;

    XXH3_64bits_update(hash, weight->data, sample);
    XXH3_64bits_update(hash, (const char *)weight->data + bytes - sample, sample);
}

/* What computes keys and values: the model, and whether activations are rounded. */
static void name_model(const struct run *run, char id[PKV_MODEL_ID_BYTES])
{
    const struct model *m = run->model;
    XXH3_state_t hash;

    XXH3_64bits_reset(&hash);
    XXH3_64bits_update(&hash, &m->rms_epsilon, sizeof m->rms_epsilon);
    XXH3_64bits_update(&hash, &m->rope_magnitude, sizeof m->rope_magnitude);
    XXH3_64bits_update(&hash, m->rope_inverse_frequencies,
                       m->head_dim / 2 * sizeof *m->rope_inverse_frequencies);
    hash_weight(&hash, &m->token_embedding);
    for (size_t i = 0; i < m->layer_count; i++) {
        const struct model_layer *layer = &m->layers[i];

        XXH3_64bits_update(&hash, layer->attention_norm, m->hidden * sizeof(float));
        XXH3_64bits_update(&hash, layer->ffn_norm, m->hidden * sizeof(float));
        hash_weight(&hash, &layer->q);
        hash_weight(&hash, &layer->k);
        hash_weight(&hash, &layer->v);
        hash_weight(&hash, &layer->o);
        hash_weight(&hash, &layer->gate);
        hash_weight(&hash, &layer->up);
        hash_weight(&hash, &layer->down);
    }
    snprintf(id, PKV_MODEL_ID_BYTES, "%s%s %016llx", model_architecture_name(m->architecture),
             run->arguments->exact ? " exact" : "", (unsigned long long)XXH3_64bits_digest(&hash));
}

bool run_session_tokens(const struct run *run, size_t *tokens, struct error *error)
{
    const struct run_arguments *a = run->arguments;
    pkv_session_info info = {.struct_size = sizeof info};
    char message[PKV_MESSAGE_BYTES];

    *tokens = 0;
    if (!output_file_check(a->session, a->file, error))
        return false;
    if (access(a->session, F_OK) != 0 && errno == ENOENT)
        return true;
    if (pkv_session_info_of_file(a->session, &info, message) != PKV_OK)
        return error_set(error, "%s: %s", a->session, message);
    if (info.tokens > run->model->context_length)
        return error_set(error, "%s: tokens: its %zu are more than the model's context of %zu",
                         a->session, info.tokens, run->model->context_length);
    *tokens = info.tokens;
    return true;
}

/* How many of the prompt's first tokens the session begins with. */
static size_t common_tokens(const unsigned char *ids, size_t count, const struct token_list *prompt)
{
    size_t n = 0;

    for (; n < count && n < prompt->count; n++, ids += ID_BYTES) {
        uint32_t id = (uint32_t)ids[0] | (uint32_t)ids[1] << 8 | (uint32_t)ids[2] << 16 |
                      (uint32_t)ids[3] << 24;

        if (id != (uint32_t)prompt->ids[n])
            break;
    }
    return n;
}

bool run_session_load(struct run *run, const struct token_list *prompt, size_t tokens,
                      struct error *error)
{
    struct kv_store *store = run->generator.store;
    const char *path = run->arguments->session;
    char id[PKV_MODEL_ID_BYTES];
    pkv_session session = {
        .struct_size = sizeof session, .model_id = id, .user_bytes = tokens * ID_BYTES};
    size_t common;
    bool done = false;

    if (tokens == 0)
        return true;
    name_model(run, id);
    session.user = malloc(session.user_bytes);
    if (session.user == NULL)
        return error_set(error, "out of memory for the session");
    if (!pages_load(store, &session, path, error))
        goto out;
    if (kv_store_tokens(store) != tokens || session.user_bytes != tokens * ID_BYTES) {
        error_set(error, "%s: user data: it is not the ids of the tokens", path);
        goto out;
    }
    /* The last token of the prompt is fed whatever is there: its logits begin the answer. */
    common = common_tokens(session.user, tokens, prompt);
    if (common == prompt->count)
        common--;
    done = generator_rewind(&run->generator, common, error);
    run->reused_tokens = kv_store_tokens(store);
out:
    free(session.user);
    return done;
}

bool run_session_save(const struct run *run, struct error *error)
{
    const struct generator *generator = &run->generator;
    const size_t count = kv_store_tokens(generator->store);
    unsigned char *ids = malloc(count * ID_BYTES);
    char id[PKV_MODEL_ID_BYTES];
    const pkv_session session = {
        .struct_size = sizeof session, .model_id = id, .user = ids, .user_bytes = count * ID_BYTES};
    bool done;

    if (ids == NULL)
        return error_set(error, "out of memory for the session");
    name_model(run, id);
    for (size_t i = 0; i < count; i++) {
        for (int j = 0; j < ID_BYTES; j++)
            ids[i * ID_BYTES + j] = (unsigned char)((uint32_t)generator->tokens.ids[i] >> 8 * j);
    }
    done = pages_save(generator->store, &session, run->arguments->session, error);
    free(ids);
    return done;
}
