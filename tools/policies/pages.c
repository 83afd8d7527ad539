/* SPDX-License-Identifier: MIT */
/*
 * The policies of libpuzzlekv: puzzle and puzzle-int4, with old pages as factors, and raw, with
 * none. puzzlekv.h has the method, its equations and its bytes.
 */
#include "pages.h"

#include <math.h>
#include <stdlib.h>

#include "../runner/cuda_device.h"

/* No model has more pages than this in its context; it keeps sums of pages far from overflow. */
#define MAX_PAGES 1000000

enum { PAGE, RK, RV, RATIO, SINK, WINDOW, FACTORS, ROPE };

/* puzzle-int4 is puzzle with one form of factors. */
#define PUZZLE_KEYS(preset_factors, all_factors)                                                   \
    [PAGE] = {.name = "page", .preset = "32", .least = 8, .most = 256, .multiple = 8},             \
    [RK] = {.name = "rk", .preset = "16", .least = 1, .most = 256},                                \
    [RV] = {.name = "rv", .preset = "14", .least = 1, .most = 256},                                \
    [RATIO] = {.name = "ratio", .kind = POLICY_REAL, .most = 1, .positive = true},                 \
    [SINK] = {.name = "sink", .preset = "1", .most = MAX_PAGES},                                   \
    [WINDOW] = {.name = "window", .preset = "1", .most = MAX_PAGES},                               \
    [FACTORS] = {.name = "factors",                                                                \
                 .kind = POLICY_CHOICE,                                                            \
                 .preset = preset_factors,                                                         \
                 .choices = all_factors},                                                          \
    [ROPE] = {.name = "rope", .kind = POLICY_CHOICE, .preset = "post", .choices = "post|pre"}

static const struct policy_key puzzle_keys[] = {PUZZLE_KEYS("native", "native|int4")};
static const struct policy_key puzzle_int4_keys[] = {PUZZLE_KEYS("int4", "int4")};

static const struct policy_key raw_keys[] = {
    [PAGE] = {.name = "page", .preset = "32", .least = 8, .most = 256, .multiple = 8},
};

static bool check_puzzle(struct kv_spec *spec, const char *text, struct error *error)
{
    const struct kv_value *v = spec->values;

    if (v[RATIO].there && (v[RK].typed || v[RV].typed))
        return error_set(error, "--kv %.80s: ratio stands for rk and rv; give one or the other",
                         text);
    if (!v[RATIO].there && (v[RK].number > v[PAGE].number || v[RV].number > v[PAGE].number))
        return error_set(error, "--kv %.80s: rk=%g, rv=%g: a rank is at most the page's %g tokens",
                         text, v[RK].number, v[RV].number, v[PAGE].number);
    return true;
}

/* With P = page and d = head_dim,
 *     r_K + r_V = round(ratio 2 P d / (P + d)),  r_K = round((r_K + r_V) 16 / 30). */
static bool resolve_puzzle(struct kv_spec *spec, const struct model *model, struct error *error)
{
    struct kv_value *v = spec->values;
    const double page = v[PAGE].number, dim = (double)model->head_dim, most = fmin(page, dim);
    double rank_k = v[RK].number, rank_v = v[RV].number;

    if (v[RATIO].there) {
        double total = round(v[RATIO].number * 2 * page * dim / (page + dim));

        rank_k = round(total * 16 / 30);
        rank_v = total - rank_k;
    }
    if (rank_k < 1 || rank_v < 1 || rank_k > most || rank_v > most) {
        if (v[RATIO].there)
            return error_set(error,
                             "--kv puzzle: ratio=%g means ranks (%g, %g); they must be 1 to %g "
                             "with %g tokens a page and head dimension %g",
                             v[RATIO].number, rank_k, rank_v, most, page, dim);
        return error_set(error,
                         "--kv puzzle: ranks (%g, %g) must be 1 to %g, the smaller of %g tokens a "
                         "page and head dimension %g",
                         rank_k, rank_v, most, page, dim);
    }
    v[RATIO].there = false;
    v[RK].number = rank_k;
    v[RV].number = rank_v;
    return true;
}

void pages_configure(const struct kv_spec *spec, const struct model *model, pkv_config *config)
{
    pkv_config_init(config, sizeof *config);
    config->layers = model->layer_count;
    config->query_heads = model->query_heads;
    config->kv_heads = model->kv_heads;
    config->head_dim = model->head_dim;
    config->page_tokens = kv_spec_count(spec, PAGE);
    if (spec->policy == &policy_raw) {
        config->factors_k = config->factors_v = PKV_FACTORS_NONE;
        return;
    }
    config->sink_pages = kv_spec_count(spec, SINK);
    config->window_pages = kv_spec_count(spec, WINDOW);
    config->rank_k = kv_spec_count(spec, RK);
    config->rank_v = kv_spec_count(spec, RV);
    if (spec->policy == &policy_puzzle_int4 || kv_spec_count(spec, FACTORS) == 1)
        config->factors_k = config->factors_v = PKV_FACTORS_INT4;
}

static bool count_bytes(const struct kv_spec *spec, const struct policy_size *size, size_t *bytes,
                        struct error *error)
{
    pkv_footprint footprint = {.struct_size = sizeof footprint};
    char message[PKV_MESSAGE_BYTES];
    pkv_config config;

    pages_configure(spec, size->model, &config);
    config.dtype = size->dtype;
    config.max_tokens = size->tokens;
    if (pkv_footprint_of(&config, size->tokens, &footprint, message) != PKV_OK)
        return error_set(error, "the cache: %s", message);
    *bytes = footprint.payload_bytes;
    return true;
}

/* ---- The store ------------------------------------------------------------------------------- */

struct pages {
    struct kv_store store;
    size_t page_tokens;
    pkv_cache *cache;
    pkv_seq *seq;
    pkv_step *step;
};

static struct pages *from_store(struct kv_store *store)
{
    return (struct pages *)store;
}

pkv_cache *pages_cache(struct kv_store *store)
{
    return from_store(store)->cache;
}

pkv_seq *pages_sequence(struct kv_store *store)
{
    return from_store(store)->seq;
}

bool pages_check(const pkv_cache *cache, pkv_status status, struct error *error)
{
    return status == PKV_OK ||
           error_set(error, "KV cache: %s: %s", pkv_strerror(status), pkv_cache_message(cache));
}

static void close_pages(struct kv_store *store)
{
    pkv_cache_close(from_store(store)->cache);
    free(store);
}

static bool begin(struct kv_store *store, size_t count, struct error *error)
{
    struct pages *pages = from_store(store);
    const pkv_step_item item = {pages->seq, count};

    return pages_check(pages->cache, pkv_step_begin(pages->cache, &item, 1, &pages->step), error);
}

static bool layer(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct pages *pages = from_store(store);
    const pkv_step_io on_host = {.struct_size = sizeof on_host,
                                 .q = {io->q, PKV_F32, 0, 0},
                                 .k = {io->k, PKV_F32, 0, 0},
                                 .v = {io->v, PKV_F32, 0, 0},
                                 .out = {io->out, PKV_F32, 0, 0}};
    const pkv_step_io *step = io->on_device != NULL ? io->on_device : &on_host;

    return pages_check(pages->cache, pkv_step_layer(pages->step, io->layer, step), error);
}

static bool replay(struct kv_store *store)
{
    return pkv_step_replay(from_store(store)->step) == PKV_OK;
}

static bool end(struct kv_store *store, struct error *error)
{
    struct pages *pages = from_store(store);

    if (!pages_check(pages->cache, pkv_step_end(pages->step), error))
        return false;
    pages->step = NULL;
    return true;
}

static void abort_step(struct kv_store *store)
{
    struct pages *pages = from_store(store);

    pkv_step_abort(pages->step);
    pages->step = NULL;
}

bool pages_cut(pkv_cache *cache, pkv_seq *seq, size_t page_tokens, size_t *tokens,
               struct error *error)
{
    pkv_page_info page = {.struct_size = sizeof page};

    if (!pages_check(cache, pkv_seq_page(seq, *tokens / page_tokens, &page), error))
        return false;
    if (page.state == PKV_PAGE_FACTORIZED)
        *tokens = page.first_token;
    return pages_check(cache, pkv_seq_truncate(seq, *tokens), error);
}

static bool rewind_to(struct kv_store *store, size_t *tokens, struct error *error)
{
    struct pages *pages = from_store(store);

    return pages_cut(pages->cache, pages->seq, pages->page_tokens, tokens, error);
}

bool pages_stats(pkv_cache *cache, struct kv_stats *stats, struct error *error)
{
    pkv_stats from = {.struct_size = sizeof from};

    if (!pages_check(cache, pkv_cache_stats(cache, &from), error))
        return false;
    stats->payload_bytes = from.payload_bytes;
    stats->reserved_bytes = from.reserved_bytes;
    stats->transient_peak_bytes = from.transient_peak_bytes;
    stats->factorize_seconds = from.factorize_seconds;
    stats->has_pages = true;
    for (int state = 0; state < PKV_PAGE_STATES; state++)
        stats->pages[state] = from.pages[state];
    return true;
}

static bool read_stats(struct kv_store *store, struct kv_stats *stats, struct error *error)
{
    return pages_stats(from_store(store)->cache, stats, error);
}

static const struct kv_store_operations operations = {
    .close = close_pages,
    .begin = begin,
    .layer = layer,
    .replay = replay,
    .end = end,
    .abort = abort_step,
    .rewind = rewind_to,
    .stats = read_stats,
};

bool pages_open_cache(const struct kv_spec *spec, const struct kv_store_options *options,
                      pkv_cache **cache, pkv_seq **seq, struct error *error)
{
    char message[PKV_MESSAGE_BYTES];
    pkv_config config;
    pkv_status status;

    pages_configure(spec, options->model, &config);
    config.dtype = options->dtype;
    config.max_tokens = options->max_tokens;
    config.max_step_tokens = options->max_step_tokens;
    config.threads = options->threads;
    device_configure(options->device, &config);
    status = pkv_cache_open(&config, cache, message);
    if (status == PKV_ERROR_MEMORY)
        return error_set(error, "the cache of %zu tokens: %s", options->max_tokens, message);
    if (status != PKV_OK)
        return error_set(error, "the cache: %s", message);
    return pages_check(*cache, pkv_seq_open(*cache, seq), error);
}

static bool open_pages(const struct kv_spec *spec, const struct kv_store_options *options,
                       struct kv_store **store, struct error *error)
{
    struct pages *pages;

    if (spec->policy != &policy_raw && kv_spec_count(spec, ROPE) == 1)
        return puzzle_pre_open(spec, options, store, error);
    pages = calloc(1, sizeof *pages);
    if (pages == NULL)
        return error_set(error, "out of memory for the cache");
    pages->store.operations = &operations;
    pages->page_tokens = kv_spec_count(spec, PAGE);
    if (!pages_open_cache(spec, options, &pages->cache, &pages->seq, error)) {
        close_pages(&pages->store);
        return false;
    }
    *store = &pages->store;
    return true;
}

bool pages_serve(const struct kv_spec *spec)
{
    return spec->policy == &policy_raw ||
           ((spec->policy == &policy_puzzle || spec->policy == &policy_puzzle_int4) &&
            kv_spec_count(spec, ROPE) == 0);
}

bool pages_require(const struct kv_spec *spec, const char *option, const char *text,
                   struct error *error)
{
    return pages_serve(spec) ||
           error_set(error,
                     "%s, --kv %.80s: only raw, puzzle and puzzle-int4, and these with rope=post, "
                     "go with it",
                     option, text);
}

bool pages_save(struct kv_store *store, const pkv_session *session, const char *path,
                struct error *error)
{
    struct pages *pages = from_store(store);

    return pkv_seq_save_file(pages->seq, session, path) == PKV_OK ||
           error_set(error, "%s: %s", path, pkv_cache_message(pages->cache));
}

bool pages_load(struct kv_store *store, pkv_session *session, const char *path, struct error *error)
{
    struct pages *pages = from_store(store);
    pkv_seq *loaded;

    /* There is room for one sequence. */
    pkv_seq_close(pages->seq);
    pages->seq = NULL;
    if (pkv_seq_load_file(pages->cache, session, path, &loaded) != PKV_OK) {
        error_set(error, "%s: %s", path, pkv_cache_message(pages->cache));
        pkv_seq_open(pages->cache, &pages->seq);
        return false;
    }
    pages->seq = loaded;
    store->tokens = pkv_seq_tokens(loaded);
    return true;
}

const struct policy policy_puzzle = {
    .name = "puzzle",
    .summary = "pages, old ones as low-rank factors; ratio for rk and rv",
    .keys = puzzle_keys,
    .key_count = sizeof puzzle_keys / sizeof *puzzle_keys,
    .check = check_puzzle,
    .resolve = resolve_puzzle,
    .bytes = count_bytes,
    .open = open_pages,
};

const struct policy policy_puzzle_int4 = {
    .name = "puzzle-int4",
    .summary = "puzzle with factors in codes of 4 bits",
    .keys = puzzle_int4_keys,
    .key_count = sizeof puzzle_int4_keys / sizeof *puzzle_int4_keys,
    .check = check_puzzle,
    .resolve = resolve_puzzle,
    .bytes = count_bytes,
    .open = open_pages,
};

const struct policy policy_raw = {
    .name = "raw",
    .summary = "the same pages, all dense",
    .keys = raw_keys,
    .key_count = sizeof raw_keys / sizeof *raw_keys,
    .bytes = count_bytes,
    .open = open_pages,
};
