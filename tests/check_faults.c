/* SPDX-License-Identifier: MIT */
/* Every function that the library exports, with memory failing at every point of it. */
#include "fake_backend.h"

#include "tests.h" /* after message.h: see there */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LAYERS     2
#define HEADS      2
#define DIM        16
#define LENGTH     8 /* tokens of a page */
#define TOKENS     83
#define STEP       20 /* tokens of a step under test: factorizes pages, copies a shared one */
#define MAX_TOKENS 400

static char folder[TESTS_FOLDER_BYTES];

static const char *session_path(void)
{
    static char path[TESTS_FOLDER_BYTES + 8];

    snprintf(path, sizeof path, "%s/s", folder);
    return path;
}

/* A cache, and what the calls need. */
struct world {
    struct counting_allocator counting;
    pkv_config config;
    pkv_cache *cache;
    pkv_seq *seq, *fork; /* which share all pages */
    pkv_session session;
    unsigned char *saved; /* seq as a session */
    size_t saved_size, saved_at;
    /* What the call that is tested is to meet, and how many it then made. */
    size_t fail_at;
    bool fail_forever;
    size_t calls;
};

static void arm(struct world *world)
{
    world->counting.calls = 0;
    world->counting.fail_at = world->fail_at;
    world->counting.fail_forever = world->fail_forever;
}

static void disarm(struct world *world)
{
    world->calls = world->counting.calls;
    world->counting.fail_at = 0;
}

/* The value of a call that is tested. */
#define tested(world, type, call)                                                                  \
    (__extension__({                                                                               \
        arm(world);                                                                                \
        type value = call;                                                                         \
        disarm(world);                                                                             \
        value;                                                                                     \
    }))

static pkv_step_io operands(size_t layer)
{
    static float q[TOKENS * HEADS * DIM], k[TOKENS * HEADS * DIM], v[TOKENS * HEADS * DIM],
        out[TOKENS * HEADS * DIM];

    tests_seed(layer);
    for (size_t i = 0; i < TOKENS * HEADS * DIM; i++) {
        q[i] = tests_random_float();
        k[i] = tests_random_float();
        v[i] = tests_random_float();
    }
    return (pkv_step_io){.struct_size = sizeof(pkv_step_io),
                         .q = {q, PKV_F32, 0, 0},
                         .k = {k, PKV_F32, 0, 0},
                         .v = {v, PKV_F32, 0, 0},
                         .out = {out, PKV_F32, 0, 0}};
}

static void fill(struct world *world, pkv_seq *seq, size_t tokens)
{
    const pkv_step_item item = {seq, tokens};
    pkv_step *step;

    ck_assert_int_eq(pkv_step_begin(world->cache, &item, 1, &step), PKV_OK);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        const pkv_step_io io = operands(layer);

        ck_assert_int_eq(tests_step_layer(step, layer, &io), PKV_OK);
    }
    ck_assert_int_eq(pkv_step_end(step), PKV_OK);
}

static int write_saved(void *opaque, const void *data, size_t bytes)
{
    struct world *world = opaque;

    world->saved = realloc(world->saved, world->saved_size + bytes);
    memcpy(world->saved + world->saved_size, data, bytes);
    world->saved_size += bytes;
    return 0;
}

static ptrdiff_t read_saved(void *opaque, void *data, size_t bytes)
{
    struct world *world = opaque;

    if (bytes > world->saved_size - world->saved_at)
        bytes = world->saved_size - world->saved_at;
    memcpy(data, world->saved + world->saved_at, bytes);
    world->saved_at += bytes;
    return (ptrdiff_t)bytes;
}

static pkv_status save(struct world *world)
{
    const pkv_writer writer = {write_saved, world};

    world->saved_size = 0;
    return tested(world, pkv_status, pkv_seq_save(world->seq, &world->session, &writer));
}

static struct world *open_world(pkv_factors factors, pkv_solver solver)
{
    static unsigned char user[3];
    struct world *world = tests_allocate(1, sizeof *world);
    pkv_config *config = &world->config;

    world->session = (pkv_session){sizeof world->session, "m", user, sizeof user};
    pkv_config_init(config, sizeof *config);
    config->layers = LAYERS;
    config->query_heads = config->kv_heads = HEADS;
    config->head_dim = DIM;
    config->page_tokens = LENGTH;
    config->factors_k = config->factors_v = factors;
    config->rank_k = 5;
    config->rank_v = 3;
    config->solver = solver;
    config->max_tokens = MAX_TOKENS;
    config->max_sequences = 4;
    config->threads = 1;
    config->allocator = counting_allocator(&world->counting);
    world->cache = tests_open_cache(config);
    ck_assert_int_eq(pkv_seq_open(world->cache, &world->seq), PKV_OK);
    fill(world, world->seq, TOKENS);
    ck_assert_int_eq(pkv_seq_fork(world->seq, &world->fork), PKV_OK);
    ck_assert_int_eq(save(world), PKV_OK);
    ck_assert_int_eq(pkv_seq_save_file(world->seq, &world->session, session_path()), PKV_OK);
    return world;
}

static void close_world(struct world *world)
{
    pkv_cache_close(world->cache);
    ck_assert_uint_eq(world->counting.live, 0);
    free(world->saved);
    free(world);
}

/* All that is seen of a cache. */
struct view {
    uint64_t digest;
    pkv_stats stats;
    uint32_t dense, factor; /* free slots */
    bool in_step[2];
};

static struct view view_of(const struct world *world)
{
    struct view view;

    memset(&view, 0, sizeof view);
    view.stats.struct_size = sizeof view.stats;
    ck_assert_int_eq(pkv_cache_digest(world->cache, &view.digest), PKV_OK);
    ck_assert_int_eq(pkv_cache_stats(world->cache, &view.stats), PKV_OK);
    view.dense = world->cache->dense.n_free;
    view.factor = world->cache->factor.n_free;
    view.in_step[0] = world->seq != NULL && world->seq->in_step;
    view.in_step[1] = world->fork->in_step;
    return view;
}

/* ---- The calls: each makes the one that is tested, which is OK unless memory fails ---- */

static pkv_status call_version(struct world *world)
{
    return *tested(world, const char *, pkv_version()) ? PKV_OK : PKV_ERROR_VALUE;
}

static pkv_status call_strerror(struct world *world)
{
    return *tested(world, const char *, pkv_strerror(PKV_ERROR_IO)) ? PKV_OK : PKV_ERROR_VALUE;
}

static pkv_status call_page_state_name(struct world *world)
{
    return *tested(world, const char *, pkv_page_state_name(PKV_PAGE_SINK)) ? PKV_OK
                                                                            : PKV_ERROR_VALUE;
}

static pkv_status call_config_init(struct world *world)
{
    pkv_config config;

    arm(world);
    pkv_config_init(&config, sizeof config);
    disarm(world);
    return PKV_OK;
}

static pkv_status call_footprint_of(struct world *world)
{
    pkv_footprint footprint = {.struct_size = sizeof footprint};

    return tested(world, pkv_status, pkv_footprint_of(&world->config, TOKENS, &footprint, NULL));
}

static pkv_status call_cache_open(struct world *world)
{
    const size_t live = world->counting.live;
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;
    pkv_status status = tested(world, pkv_status, pkv_cache_open(&world->config, &cache, message));

    ck_assert_int_eq(status == PKV_OK, cache != NULL);
    ck_assert_int_eq(status == PKV_OK, *message == '\0');
    pkv_cache_close(cache);
    ck_assert_uint_eq(world->counting.live, live);
    return status;
}

/* With a step open, and sequences. */
static pkv_status call_cache_close(struct world *world)
{
    const size_t live = world->counting.live;
    pkv_cache *cache = tests_open_cache(&world->config);
    pkv_step_item item = {NULL, 1};
    pkv_step *step;

    ck_assert_int_eq(pkv_seq_open(cache, &item.seq), PKV_OK);
    ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &step), PKV_OK);
    arm(world);
    pkv_cache_close(cache);
    disarm(world);
    ck_assert_uint_eq(world->counting.live, live);
    return PKV_OK;
}

static pkv_status call_cache_message(struct world *world)
{
    return tested(world, const char *, pkv_cache_message(world->cache)) ? PKV_OK : PKV_ERROR_VALUE;
}

static pkv_status call_cache_backend(struct world *world)
{
    return *tested(world, const char *, pkv_cache_backend(world->cache)) ? PKV_OK : PKV_ERROR_VALUE;
}

static pkv_status call_cache_isa(struct world *world)
{
    return *tested(world, const char *, pkv_cache_isa(world->cache)) ? PKV_OK : PKV_ERROR_VALUE;
}

static pkv_status call_cache_stats(struct world *world)
{
    pkv_stats stats = {.struct_size = sizeof stats};

    return tested(world, pkv_status, pkv_cache_stats(world->cache, &stats));
}

static pkv_status call_cache_digest(struct world *world)
{
    uint64_t digest;

    return tested(world, pkv_status, pkv_cache_digest(world->cache, &digest));
}

/* A new sequence, or none. */
static pkv_status check_new(pkv_status status, pkv_seq *seq)
{
    ck_assert_int_eq(status == PKV_OK, seq != NULL);
    return status;
}

static pkv_status call_seq_open(struct world *world)
{
    pkv_seq *seq;
    pkv_status status = tested(world, pkv_status, pkv_seq_open(world->cache, &seq));

    return check_new(status, seq);
}

static pkv_status call_seq_close(struct world *world)
{
    pkv_status status = tested(world, pkv_status, pkv_seq_close(world->seq));

    world->seq = NULL;
    return status;
}

static pkv_status call_seq_fork(struct world *world)
{
    pkv_seq *fork;
    pkv_status status = tested(world, pkv_status, pkv_seq_fork(world->seq, &fork));

    return check_new(status, fork);
}

/* Into a factorized page, which is rebuilt. */
static pkv_status call_seq_truncate(struct world *world)
{
    return tested(world, pkv_status, pkv_seq_truncate(world->seq, 3 * LENGTH + 1));
}

static pkv_status call_seq_tokens(struct world *world)
{
    return tested(world, size_t, pkv_seq_tokens(world->seq)) == TOKENS ? PKV_OK : PKV_ERROR_VALUE;
}

static pkv_status call_seq_page(struct world *world)
{
    pkv_page_info info = {.struct_size = sizeof info};

    return tested(world, pkv_status, pkv_seq_page(world->seq, 2, &info));
}

static pkv_status call_seq_read_page(struct world *world)
{
    float k[LENGTH * DIM], v[LENGTH * DIM];

    return tested(world, pkv_status, pkv_seq_read_page(world->seq, 1, 1, 2, k, v));
}

static pkv_status call_seq_stats(struct world *world)
{
    pkv_stats stats = {.struct_size = sizeof stats};

    return tested(world, pkv_status, pkv_seq_stats(world->seq, &stats));
}

static pkv_status call_seq_digest(struct world *world)
{
    uint64_t digest;

    return tested(world, pkv_status, pkv_seq_digest(world->seq, &digest));
}

static pkv_status call_seq_load(struct world *world)
{
    const pkv_reader reader = {read_saved, world};
    pkv_session session = world->session;
    pkv_status status;
    pkv_seq *seq;

    world->saved_at = 0;
    status = tested(world, pkv_status, pkv_seq_load(world->cache, &session, &reader, &seq));
    return check_new(status, seq);
}

static pkv_status call_seq_load_file(struct world *world)
{
    pkv_session session = world->session;
    pkv_seq *seq;
    pkv_status status =
        tested(world, pkv_status, pkv_seq_load_file(world->cache, &session, session_path(), &seq));

    return check_new(status, seq);
}

/* A failure leaves the old file. */
static pkv_status call_seq_save_file(struct world *world)
{
    static const char old[] = "old";
    char now[sizeof old] = "";
    pkv_status status;
    FILE *file = fopen(session_path(), "wb");

    ck_assert_uint_eq(fwrite(old, 1, sizeof old, file), sizeof old);
    fclose(file);
    status =
        tested(world, pkv_status, pkv_seq_save_file(world->fork, &world->session, session_path()));
    file = fopen(session_path(), "rb");
    ck_assert_uint_eq(fread(now, 1, sizeof now, file), sizeof now);
    fclose(file);
    ck_assert_int_eq(status == PKV_OK, memcmp(now, old, sizeof old) != 0);
    return status;
}

static pkv_status call_session_info_of(struct world *world)
{
    const pkv_reader reader = {read_saved, world};
    pkv_session_info info = {.struct_size = sizeof info};

    world->saved_at = 0;
    return tested(world, pkv_status, pkv_session_info_of(&reader, &info, NULL));
}

static pkv_status call_session_info_of_file(struct world *world)
{
    pkv_session_info info = {.struct_size = sizeof info};

    return tested(world, pkv_status, pkv_session_info_of_file(session_path(), &info, NULL));
}

/* Of a step of both sequences, the function of this number, which a layer's is. */
enum { BEGIN, LAYER_0, LAYER_1, END, ABORT };

static pkv_status call_in_step(struct world *world, int which)
{
    const pkv_step_item items[] = {{world->seq, STEP}, {world->fork, STEP / 2}};
    pkv_step *step;
    pkv_status status;

    if (which == BEGIN) {
        status = tested(world, pkv_status, pkv_step_begin(world->cache, items, 2, &step));
        ck_assert_int_eq(status == PKV_OK, step != NULL);
    } else {
        status = pkv_step_begin(world->cache, items, 2, &step);
    }
    for (size_t layer = 0; layer < LAYERS && status == PKV_OK; layer++) {
        const pkv_step_io io = operands(layer);

        if (which == LAYER_0 + (int)layer)
            status = tested(world, pkv_status, tests_step_layer(step, layer, &io));
        else
            status = tests_step_layer(step, layer, &io);
    }
    if (status == PKV_OK && which == END)
        return tested(world, pkv_status, pkv_step_end(step));
    if (which == ABORT)
        arm(world);
    pkv_step_abort(step);
    if (which == ABORT)
        disarm(world);
    return status;
}

static pkv_status call_step_begin(struct world *world)
{
    return call_in_step(world, BEGIN);
}

static pkv_status call_step_layer(struct world *world)
{
    pkv_status status = call_in_step(world, LAYER_0);

    return status == PKV_OK ? call_in_step(world, LAYER_1) : status;
}

static pkv_status call_step_end(struct world *world)
{
    return call_in_step(world, END);
}

static pkv_status call_step_abort(struct world *world)
{
    return call_in_step(world, ABORT);
}

/* There is no graph, and the step goes on. */
static pkv_status call_step_replay(struct world *world)
{
    const pkv_step_item item = {world->seq, 1};
    pkv_step *step;
    pkv_status status;

    ck_assert_int_eq(pkv_step_begin(world->cache, &item, 1, &step), PKV_OK);
    status = tested(world, pkv_status, pkv_step_replay(step));
    pkv_step_abort(step);
    return status == (tests_on_cpu() ? PKV_ERROR_UNSUPPORTED : PKV_ERROR_ARGUMENT)
               ? PKV_OK
               : PKV_ERROR_VALUE;
}

/* ---- The table ---- */

static const struct fault {
    const char *function;
    pkv_status (*call)(struct world *world);
    bool allocates;
} faults[] = {
    {"pkv_cache_backend", call_cache_backend, false},
    {"pkv_cache_close", call_cache_close, false},
    {"pkv_cache_digest", call_cache_digest, false},
    {"pkv_cache_isa", call_cache_isa, false},
    {"pkv_cache_message", call_cache_message, false},
    {"pkv_cache_open", call_cache_open, true},
    {"pkv_cache_stats", call_cache_stats, false},
    {"pkv_config_init", call_config_init, false},
    {"pkv_footprint_of", call_footprint_of, false},
    {"pkv_page_state_name", call_page_state_name, false},
    {"pkv_seq_close", call_seq_close, false},
    {"pkv_seq_digest", call_seq_digest, false},
    {"pkv_seq_fork", call_seq_fork, true},
    {"pkv_seq_load", call_seq_load, true},
    {"pkv_seq_load_file", call_seq_load_file, true},
    {"pkv_seq_open", call_seq_open, true},
    {"pkv_seq_page", call_seq_page, false},
    {"pkv_seq_read_page", call_seq_read_page, false},
    {"pkv_seq_save", save, false},
    {"pkv_seq_save_file", call_seq_save_file, true},
    {"pkv_seq_stats", call_seq_stats, false},
    {"pkv_seq_tokens", call_seq_tokens, false},
    {"pkv_seq_truncate", call_seq_truncate, false},
    {"pkv_session_info_of", call_session_info_of, false},
    {"pkv_session_info_of_file", call_session_info_of_file, false},
    {"pkv_step_abort", call_step_abort, false},
    {"pkv_step_begin", call_step_begin, true},
    {"pkv_step_end", call_step_end, false},
    {"pkv_step_layer", call_step_layer, false},
    {"pkv_step_replay", call_step_replay, false},
    {"pkv_strerror", call_strerror, false},
    {"pkv_version", call_version, false},
};

#define FAULTS (sizeof faults / sizeof *faults)

static void starve(const struct fault *fault, pkv_factors factors, pkv_solver solver, bool forever)
{
    struct world *world = open_world(factors, solver);
    const struct view before = view_of(world);
    pkv_status status;
    size_t failures = 0;

    world->fail_forever = forever;
    do {
        world->fail_at = failures + 1;
        status = fault->call(world);
        if (status != PKV_OK) {
            const struct view after = view_of(world);

            ck_assert_msg(status == PKV_ERROR_MEMORY, "%s: status %d: %s", fault->function, status,
                          pkv_cache_message(world->cache));
            ck_assert_msg(memcmp(&after, &before, sizeof after) == 0, "%s: changed by failure %zu",
                          fault->function, failures + 1);
            ck_assert_str_ne(pkv_strerror(status), "");
            failures++;
        }
        ck_assert_msg(world->calls >= failures, "%s: failed of itself", fault->function);
    } while (status != PKV_OK);
    /* Every allocation has been the one that fails. */
    ck_assert_msg(world->calls == failures, "%s: %zu allocations, %zu failures", fault->function,
                  world->calls, failures);
    ck_assert_msg((failures > 0) == fault->allocates, "%s: %zu allocations", fault->function,
                  failures);
    ck_assert_uint_eq(tests_count_files(folder), 1);
    close_world(world);
}

START_TEST(memory_fails)
{
    for (int factors = PKV_FACTORS_NONE; factors <= PKV_FACTORS_INT4; factors++)
        for (int forever = 0; forever < 2; forever++)
            starve(&faults[_i], (pkv_factors)factors, PKV_SOLVER_BATCHED, forever != 0);
    if (tests_on_cpu())
        starve(&faults[_i], PKV_FACTORS_NATIVE, PKV_SOLVER_LAPACK, false);
}
END_TEST

/* The version script, which a test holds to the header, lists what is tested. */
START_TEST(every_function_is_tested)
{
    const char *source = getenv("PUZZLEKV_SOURCE");
    char path[4096], line[200];
    size_t n = 0;
    FILE *map;

    ck_assert_ptr_nonnull(source);
    snprintf(path, sizeof path, "%s/lib/puzzlekv.map", source);
    map = fopen(path, "r");
    ck_assert_ptr_nonnull(map);
    while (fgets(line, sizeof line, map) != NULL) {
        char name[200];
        size_t i = 0;

        if (sscanf(line, " pkv_%190[a-z0-9_]", name) != 1)
            continue;
        while (i < FAULTS && strcmp(faults[i].function + strlen("pkv_"), name) != 0)
            i++;
        ck_assert_msg(i < FAULTS, "no fault test of pkv_%s", name);
        n++;
    }
    fclose(map);
    ck_assert_uint_eq(n, FAULTS);
}
END_TEST

static void make_folder(void)
{
    tests_make_folder(folder);
}

static void remove_folder(void)
{
    tests_remove_folder(folder);
}

static Suite *make_suite(void)
{
    Suite *suite = suite_create("faults");
    TCase *table = tcase_create("table"), *memory = tcase_create("memory");

    tcase_add_test(table, every_function_is_tested);
    suite_add_tcase(suite, table);
    tcase_add_checked_fixture(memory, make_folder, remove_folder);
    tcase_add_loop_test(memory, memory_fails, 0, (int)FAULTS);
    suite_add_tcase(suite, memory);
    return suite;
}

int main(void)
{
    return tests_run_on_backends(make_suite);
}
