/* SPDX-License-Identifier: MIT */
/* puzzlekv-run --session: the cache, its tokens and the conversation in a file from one run to the
 * next. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "output_file.h"
#include "policies/pages.h"
#include "run.h"

/* Of a token's id, and of a text's length. */
#define NUMBER_BYTES 4

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

bool run_session_open(struct run *run, struct error *error)
{
    const struct run_arguments *a = run->arguments;
    pkv_session_info info = {.struct_size = sizeof info};
    char message[PKV_MESSAGE_BYTES];
    struct stat file;

    if (!output_file_check(a->session, error))
        return false;
    if (stat(a->session, &file) != 0 && errno == ENOENT)
        return true;
    if (pkv_session_info_of_file(a->session, &info, message) != PKV_OK)
        return error_set(error, "%s: %s", a->session, message);
    if (info.tokens > run->model->context_length)
        return error_set(error, "%s: tokens: its %zu are more than the model's context of %zu",
                         a->session, info.tokens, run->model->context_length);
    if (info.user_bytes > (uintmax_t)file.st_size)
        return error_set(error, "%s: user data: the session ends in it", a->session);
    run->session = info;
    return true;
}

/* ---- What goes with the cache: see puzzlekv-session(5) --------------------------------------- */

static uint32_t get_number(const unsigned char *bytes)
{
    uint32_t number = 0;

    for (int i = 0; i < NUMBER_BYTES; i++)
        number |= (uint32_t)bytes[i] << 8 * i;
    return number;
}

static unsigned char *put_number(unsigned char *bytes, uint32_t number)
{
    for (int i = 0; i < NUMBER_BYTES; i++)
        *bytes++ = (unsigned char)(number >> 8 * i);
    return bytes;
}

/* Takes a turn's text from the `left` bytes there. */
static bool get_turn(const unsigned char **bytes, size_t *left, struct chat_turn *turn)
{
    if (*left < NUMBER_BYTES)
        return false;
    turn->length = get_number(*bytes);
    if (turn->length > *left - NUMBER_BYTES)
        return false;
    turn->text = (const char *)*bytes + NUMBER_BYTES;
    *bytes += NUMBER_BYTES + turn->length;
    *left -= NUMBER_BYTES + turn->length;
    return true;
}

static bool get_user_data(struct run *run, const unsigned char *bytes, size_t size,
                          struct error *error)
{
    struct token_list *tokens = &run->generator.tokens;
    const char *path = run->arguments->session;

    if (size / NUMBER_BYTES < run->session.tokens)
        return error_set(error, "%s: user data: it is not the ids of the tokens", path);
    for (; tokens->count < run->session.tokens; bytes += NUMBER_BYTES, size -= NUMBER_BYTES) {
        if (!token_list_append(tokens, (int32_t)get_number(bytes), error))
            return false;
    }
    if (!model_check_ids(run->model, path, tokens->ids, tokens->count, error))
        return false;
    while (size > 0) {
        struct chat_turn turns[2];

        if (!get_turn(&bytes, &size, &turns[0]) || !get_turn(&bytes, &size, &turns[1]))
            return error_set(error, "%s: user data: the conversation ends in a turn", path);
        if (run->arguments->interactive && !conversation_resume(run->conversation, turns, error))
            return false;
    }
    return true;
}

bool run_session_load(struct run *run, struct error *error)
{
    const pkv_session_info *info = &run->session;
    const char *path = run->arguments->session;
    char id[PKV_MODEL_ID_BYTES];
    pkv_session session = {
        .struct_size = sizeof session, .model_id = id, .user_bytes = info->user_bytes};
    bool done;

    if (info->struct_size == 0)
        return true;
    name_model(run, id);
    session.user = malloc(info->user_bytes + 1);
    if (session.user == NULL)
        return error_set(error, "out of memory for the session");
    done = pages_load(run->generator.store, &session, path, error);
    /* It may have been replaced since it was opened. */
    if (done && (kv_store_tokens(run->generator.store) != info->tokens ||
                 session.user_bytes != info->user_bytes))
        done = error_set(error, "%s: another one has taken its place", path);
    done = done && get_user_data(run, session.user, info->user_bytes, error);
    free(session.user);
    return done;
}

bool run_session_keep(struct run *run, const struct token_list *prompt, struct error *error)
{
    const struct token_list *tokens = &run->generator.tokens;
    size_t common = 0;

    while (common < tokens->count && common < prompt->count &&
           tokens->ids[common] == prompt->ids[common])
        common++;
    /* The last token of the prompt is fed whatever is there: its logits begin the answer. */
    if (common == prompt->count)
        common--;
    if (!generator_rewind(&run->generator, common, error))
        return false;
    run->reused_tokens = kv_store_tokens(run->generator.store);
    return true;
}

bool run_session_save(const struct run *run, struct error *error)
{
    const struct generator *generator = &run->generator;
    const size_t count = kv_store_tokens(generator->store);
    size_t turn_count, bytes = count * NUMBER_BYTES;
    const struct chat_turn *turns = conversation_turns(run->conversation, &turn_count);
    char id[PKV_MODEL_ID_BYTES];
    pkv_session session = {.struct_size = sizeof session, .model_id = id};
    unsigned char *to;
    bool done;

    for (size_t i = 0; i < turn_count; i++)
        bytes += NUMBER_BYTES + turns[i].length;
    session.user_bytes = bytes;
    session.user = to = malloc(bytes + 1);
    if (to == NULL)
        return error_set(error, "out of memory for the session");
    for (size_t i = 0; i < count; i++)
        to = put_number(to, (uint32_t)generator->tokens.ids[i]);
    for (size_t i = 0; i < turn_count; i++) {
        to = put_number(to, (uint32_t)turns[i].length);
        memcpy(to, turns[i].text, turns[i].length);
        to += turns[i].length;
    }
    name_model(run, id);
    done = pages_save(generator->store, &session, run->arguments->session, error);
    free(session.user);
    return done;
}
