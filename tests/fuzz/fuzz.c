/* SPDX-License-Identifier: MIT */
/* What the fuzz targets share: a scratch folder, and walks over all that a file opens to. */
#include "fuzz.h"

#include <puzzlekv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kv_spec.h"
#include "options.h"
#include "runner/chat.h"
#include "runner/detokenizer.h"
#include "runner/model.h"
#include "runner/transformer.h"

void fuzz_fail(const char *file, int line, const char *condition)
{
    fprintf(stderr, "%s:%d: not true: %s\n", file, line, condition);
    abort();
}

/* --- files ------------------------------------------------------------------------------------ */

static const char *scratch_folder(void)
{
    static char folder[1024];
    const char *parent = getenv("TMPDIR");

    if (*folder == '\0') {
        const int length = snprintf(folder, sizeof folder, "%s/puzzlekv-fuzz.XXXXXX",
                                    parent != NULL && *parent != '\0' ? parent : "/tmp");

        fuzz_require(length > 0 && (size_t)length < sizeof folder);
        fuzz_require(mkdtemp(folder) != NULL);
    }
    return folder;
}

const char *fuzz_path(const char *name)
{
    static char paths[8][1200];
    static size_t next;
    char *path = paths[next++ % 8];
    const int length =
        snprintf(path, sizeof paths[0], "%s%s%s", scratch_folder(), *name == '\0' ? "" : "/", name);

    fuzz_require(length > 0 && (size_t)length < sizeof paths[0]);
    return path;
}

void fuzz_make_folder(const char *name)
{
    fuzz_require(mkdir(fuzz_path(name), 0700) == 0);
}

void fuzz_write(const char *name, const void *data, size_t size)
{
    write_file(fuzz_path(name), data, size);
}

void fuzz_write_bytes(const char *name, struct bytes bytes)
{
    fuzz_write(name, bytes.data, bytes.size);
    bytes_free(&bytes);
}

void fuzz_write_text(const char *name, const char *text)
{
    fuzz_write(name, text, strlen(text));
}

/* --- errors ----------------------------------------------------------------------------------- */

void fuzz_check_error(const struct error *error, const char *start)
{
    const size_t length = strlen(start);
    char cleaned[sizeof error->text];

    fuzz_require(memchr(error->text, '\0', sizeof error->text) != NULL);
    fuzz_require(strncmp(error->text, start, length) == 0);
    fuzz_require(strlen(error->text) > length + 2);
    memcpy(cleaned, error->text, sizeof cleaned);
    error_clean(cleaned);
    fuzz_require(strcmp(error->text, cleaned) == 0);
}

/* --- models ----------------------------------------------------------------------------------- */

/* The sum is of no use; that every byte can be read is. */
static void read_all(const void *data, size_t size)
{
    const volatile unsigned char *bytes = data;
    unsigned sum = 0;

    for (size_t i = 0; i < size; i++)
        sum += bytes[i];
    (void)sum;
}

static void read_weight(const struct weight *weight)
{
    size_t row_bytes;

    fuzz_require(weight->rows > 0 && weight->columns > 0);
    fuzz_require(quant_row_bytes(weight->type, weight->columns, &row_bytes));
    fuzz_require(weight->row_bytes == row_bytes);
    read_all(weight->data, weight->rows * weight->row_bytes);
}

static void read_vector(const float *vector, size_t count)
{
    if (vector != NULL)
        read_all(vector, count * sizeof *vector);
}

static void read_model(const struct model *model)
{
    fuzz_require(model_architecture_name(model->architecture) != NULL);
    fuzz_require(model->layer_count > 0 && model->kv_heads > 0 && model->vocabulary > 0);
    fuzz_require(model->query_heads % model->kv_heads == 0);
    fuzz_require(model->head_dim >= 8 && model->head_dim <= 512 && model->head_dim % 2 == 0);
    read_vector(model->rope_inverse_frequencies, model->head_dim / 2);
    if (!model->has_weights)
        return;
    read_weight(&model->token_embedding);
    read_weight(&model->output);
    read_vector(model->output_norm, model->hidden);
    for (size_t i = 0; i < model->layer_count; i++) {
        const struct model_layer *layer = &model->layers[i];

        read_vector(layer->attention_norm, model->hidden);
        read_vector(layer->ffn_norm, model->hidden);
        read_vector(layer->q_norm, model->head_dim);
        read_vector(layer->k_norm, model->head_dim);
        read_weight(&layer->q);
        read_weight(&layer->k);
        read_weight(&layer->v);
        read_weight(&layer->o);
        read_weight(&layer->gate);
        read_weight(&layer->up);
        read_weight(&layer->down);
    }
}

/* A prompt that makes a page factorized, and a token after it. The weights may give numbers that
 * are refused. */
static void run_model(const struct model *model)
{
    enum { TOKENS = 9 };
    struct transformer_options options = {.threads = 1};
    struct transformer *transformer = NULL;
    int32_t tokens[TOKENS];
    const struct kv_store_options cache = {
        .model = model, .dtype = PKV_BF16, .max_tokens = 2 * TOKENS, .threads = 1};
    struct kv_store *store = NULL;
    struct kv_spec spec;
    struct error error;
    float *logits;

    fuzz_require(kv_spec_parse("puzzle:page=8,rk=2,rv=3,sink=0,window=0", &spec, &error));
    fuzz_require(kv_spec_resolve(&spec, model, &error));
    if (!kv_store_open(&spec, &cache, &store, &error))
        return;
    fuzz_require(machine_isa(&options.isa, &error));
    logits = malloc(model->vocabulary * sizeof *logits);
    fuzz_require(logits != NULL);
    for (size_t i = 0; i < TOKENS; i++)
        tokens[i] = (int32_t)((model->vocabulary - 1) * i / (TOKENS - 1));
    if (transformer_open(model, &options, &transformer, &error) &&
        transformer_step(transformer, store, tokens, TOKENS, logits, &error))
        (void)transformer_step(transformer, store, tokens, 1, logits, &error);
    free(logits);
    kv_store_close(store);
    transformer_close(transformer);
}

void fuzz_model(const char *path)
{
    struct model *model;
    struct error error;
    bool header;

    header = model_open_header(path, &model, &error);
    if (header)
        read_model(model);
    else
        fuzz_check_error(&error, scratch_folder());
    model_close(model);
    if (!model_open(path, &model, &error)) {
        fuzz_check_error(&error, scratch_folder());
        return;
    }
    fuzz_require(header && model->has_weights);
    read_model(model);
    run_model(model);
    model_close(model);
}

/* --- tokenizers ------------------------------------------------------------------------------- */

static void decode(const struct tokenizer *tokenizer, const struct token_list *list, bool special)
{
    struct detokenizer detokenizer = {0};
    struct error error;
    size_t length;

    fuzz_require(detokenizer_open(&detokenizer, tokenizer, special, &error));
    if (special)
        detokenizer_continue(&detokenizer);
    for (size_t i = 0; i < list->count; i++)
        read_all(detokenizer_push(&detokenizer, list->ids[i], &length), 1);
    (void)detokenizer_push(&detokenizer, TOKEN_NONE, &length);
    (void)detokenizer_push(&detokenizer, INT32_MAX, &length);
    read_all(detokenizer_flush(&detokenizer, &length), 1);
    detokenizer_close(&detokenizer);
}

void fuzz_text(const struct tokenizer *tokenizer, const char *text, size_t length)
{
    struct token_list list = {0};
    struct error error;

    for (int special = 0; special < 2; special++) {
        list.count = 0;
        fuzz_require(tokenizer_encode(tokenizer, text, length, special != 0, &list, &error));
        for (size_t i = 0; i < list.count; i++)
            fuzz_require(list.ids[i] >= 0 && (size_t)list.ids[i] < tokenizer_count(tokenizer));
        decode(tokenizer, &list, special != 0);
    }
    token_list_free(&list);
}

static void converse(const struct tokenizer *tokenizer)
{
    static const struct chat_turn turns[] = {
        {CHAT_USER, "Hello <|im_end|>", 16}, {CHAT_ASSISTANT, " hi ", 4}, {CHAT_USER, "a\n1", 3}};
    struct token_list list = {0};
    struct error error;
    struct chat *chat;

    fuzz_require(chat_open(tokenizer, NULL, &chat, &error));
    for (int system = 0; system < 2; system++) {
        for (size_t count = 1; count <= 3; count += 2) {
            list.count = 0;
            if (!chat_format(chat, system != 0 ? "Be brief." : NULL, turns, count, count == 1,
                             &list, &error))
                fuzz_require(error.text[0] != '\0' && list.count == 0);
            decode(tokenizer, &list, true);
        }
    }
    fuzz_require(chat_end_of_turn(chat) < (int64_t)tokenizer_count(tokenizer));
    token_list_free(&list);
    chat_close(chat);
}

void fuzz_tokenizer(const char *path)
{
    static const char text[] = "<s>Hello  world, it's 12345\r\n\n\t<|im_start|>\xc3\xa9"
                               "e\xcc\x81 \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x98\x80 \xff\xe6\x97 ";
    struct tokenizer *tokenizer;
    struct token_list all = {0};
    struct error error;
    size_t length;

    if (!tokenizer_open(path, &tokenizer, &error)) {
        fuzz_check_error(&error, scratch_folder());
        fuzz_require(tokenizer == NULL);
        return;
    }
    for (size_t i = 0; i < tokenizer_count(tokenizer); i++) {
        const char *bytes = tokenizer_text(tokenizer, (int32_t)i, &length);
        const int32_t found = tokenizer_find(tokenizer, bytes, length);

        fuzz_require(found >= TOKEN_NONE && found < (int64_t)tokenizer_count(tokenizer));
        (void)tokenizer_is_special(tokenizer, (int32_t)i);
        (void)tokenizer_is_end(tokenizer, (int32_t)i);
        fuzz_require(token_list_append(&all, (int32_t)i, &error));
    }
    decode(tokenizer, &all, true);
    token_list_free(&all);
    fuzz_require(!tokenizer_wants_bos(tokenizer) || tokenizer_bos(tokenizer) != TOKEN_NONE);
    fuzz_text(tokenizer, text, sizeof text - 1);
    fuzz_text(tokenizer, text, 0);
    converse(tokenizer);
    tokenizer_close(tokenizer);
}
