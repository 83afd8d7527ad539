/* SPDX-License-Identifier: MIT */
/* Generates answers: feeds tokens to a model, chooses the next ones and turns them into text. */
#include "generate.h"

#include <stdlib.h>

#include "options.h"

static bool layer_done(void *opaque, size_t done, size_t layers)
{
    const struct generation *generation = opaque;

    if (generation->prefilled == 0)
        progress_show("prompt: %zu tokens, layer %zu of %zu", generation->prompt_tokens, done,
                      layers);
    return !interrupt_seen();
}

bool generator_open(struct generator *generator, const struct generator_options *options,
                    struct error *error)
{
    struct transformer_options transformer = {.threads = options->cache.threads,
                                              .exact = options->exact,
                                              .device = options->device,
                                              .layer_done = layer_done,
                                              .opaque = &generator->generation};

    *generator = (struct generator){
        .options = *options, .context = options->cache.max_tokens, .answer = options->answer};
    if (!kv_store_open(&options->spec, &options->cache, &generator->store, error) ||
        !machine_isa(&transformer.isa, error) ||
        !transformer_open(options->model, &transformer, &generator->transformer, error) ||
        !sampler_open(&options->sampling, options->model->vocabulary, &generator->sampler, error) ||
        !detokenizer_open(&generator->detokenizer, options->tokenizer, false, error))
        goto fail;
    generator->logits = calloc(options->model->vocabulary, sizeof *generator->logits);
    if (generator->logits == NULL) {
        error_set(error, "out of memory for the logits");
        goto fail;
    }
    return true;
fail:
    generator_close(generator);
    return false;
}

void generator_close(struct generator *generator)
{
    answer_free(&generator->answer);
    token_list_free(&generator->tokens);
    free(generator->logits);
    detokenizer_close(&generator->detokenizer);
    sampler_close(generator->sampler);
    transformer_close(generator->transformer);
    kv_store_close(generator->store);
    *generator = (struct generator){0};
}

/* Where the likeliest token is wanted, a device need not give all logits away. */
static bool is_greedy(const struct sampler_options *sampling)
{
    return sampling->temperature == 0 && sampling->repeat_penalty == 1;
}

/* Feeds what is not in the cache and chooses one token. */
static bool choose_next(struct generator *generator, int32_t *token, struct error *error)
{
    struct generation *generation = &generator->generation;
    struct token_list *tokens = &generator->tokens;
    const bool greedy = is_greedy(&generator->options.sampling);
    const size_t fed = kv_store_tokens(generator->store);
    const int32_t *ids = tokens->ids + fed;
    const size_t count = tokens->count - fed;

    if (greedy
            ? !transformer_next(generator->transformer, generator->store, ids, count, token, error)
            : !transformer_step(generator->transformer, generator->store, ids, count,
                                generator->logits, error)) {
        generation->finish = FINISH_INTERRUPTED;
        return interrupt_seen();
    }
    if (generation->prefilled == 0) {
        generation->prefilled = machine_seconds();
        progress_clear();
    }
    if ((!greedy && !sampler_choose(generator->sampler, generator->logits, tokens->ids,
                                    tokens->count, token, error)) ||
        !token_list_append(tokens, *token, error))
        return false;
    generation->generated_tokens++;
    generation->last = machine_seconds();
    if (generation->first == 0)
        generation->first = generation->last;
    return true;
}

/* Where progress is shown and not the answer, which may be on the same line. */
static void clear_progress(const struct generator *generator)
{
    if (generator->answer.silent || generator->generation.prefilled == 0)
        progress_clear();
}

bool generator_answer(struct generator *generator, size_t most, struct error *error)
{
    struct generation *generation = &generator->generation;
    const char *piece;
    size_t length;
    int32_t token;
    bool stopped;

    *generation = (struct generation){.prompt_tokens = generator->tokens.count -
                                                       kv_store_tokens(generator->store),
                                      .began = machine_seconds()};
    answer_clear(&generator->answer);
    if (generator->options.continues)
        detokenizer_continue(&generator->detokenizer);
    while (generation->finish == FINISH_NOT) {
        if (!choose_next(generator, &token, error)) {
            clear_progress(generator);
            return false;
        }
        if (generation->finish == FINISH_INTERRUPTED)
            break;
        if (generator->answer.silent)
            progress_show("answer: %zu tokens", generation->generated_tokens);
        if (tokenizer_is_end(generator->options.tokenizer, token)) {
            generation->finish = FINISH_END;
            break;
        }
        piece = detokenizer_push(&generator->detokenizer, token, &length);
        if (!answer_extend(&generator->answer, piece, length, &stopped, error))
            return false;
        if (stopped)
            generation->finish = FINISH_STOP;
        else if (generation->generated_tokens == most)
            generation->finish = FINISH_LENGTH;
        else if (kv_store_tokens(generator->store) == generator->context)
            generation->finish = FINISH_FULL;
    }
    clear_progress(generator);
    piece = detokenizer_flush(&generator->detokenizer, &length);
    if (generation->finish != FINISH_STOP &&
        !answer_extend(&generator->answer, piece, length, &stopped, error))
        return false;
    return answer_finish(&generator->answer, error);
}

bool generator_rewind(struct generator *generator, size_t tokens, struct error *error)
{
    return kv_store_rewind(generator->store, tokens, error);
}

bool generator_restart(struct generator *generator, struct error *error)
{
    const struct generator_options *options = &generator->options;

    sampler_close(generator->sampler);
    generator->sampler = NULL;
    generator->generation = (struct generation){0};
    answer_clear(&generator->answer);
    generator->tokens.count = 0;
    return generator_rewind(generator, 0, error) &&
           sampler_open(&options->sampling, options->model->vocabulary, &generator->sampler, error);
}
