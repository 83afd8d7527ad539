/* SPDX-License-Identifier: MIT */
/* Threads: each with a cache of its own, and several with one cache and a lock. Whatever the others
 * do, a sequence comes to hold what it holds when it is alone. On every backend. */
#include "cache.h"

#include "tests.h" /* after message.h: see there */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS      2
#define QUERY_HEADS 4
#define KV_HEADS    2
#define DIM         16
#define LENGTH      8  /* tokens of a page */
#define MOST        20 /* tokens of a step */
#define ROUNDS      12
#define ALONE       8 /* threads with a cache each */
#define TOGETHER    6 /* threads with one cache */

struct worker {
    pkv_config config;
    pkv_cache *cache;
    pthread_mutex_t *lock; /* NULL: the cache is this thread's */
    uint64_t seed, random;
    uint64_t digest;   /* of the sequence at the end, and of all outputs */
    const char *wrong; /* what was not as expected; NULL: all was */
};

static pkv_config config_of(size_t threads)
{
    pkv_config config;

    pkv_config_init(&config, sizeof config);
    config.layers = LAYERS;
    config.query_heads = QUERY_HEADS;
    config.kv_heads = KV_HEADS;
    config.head_dim = DIM;
    config.page_tokens = LENGTH;
    config.rank_k = 5;
    config.rank_v = 3;
    /* A sequence, a fork and a loaded one for each. */
    config.max_sequences = 3 * threads;
    config.max_tokens = config.max_sequences * ROUNDS * MOST;
    config.max_step_tokens = MOST;
    return config;
}

static uint32_t next(struct worker *worker)
{
    worker->random = worker->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(worker->random >> 32);
}

/* Check's own assertions are for the main thread. */
#define expect(condition)                                                                          \
    do {                                                                                           \
        if (!(condition) && worker->wrong == NULL)                                                 \
            worker->wrong = #condition;                                                            \
    } while (0)

static void lock(const struct worker *worker)
{
    if (worker->lock != NULL)
        pthread_mutex_lock(worker->lock);
}

static void unlock(const struct worker *worker)
{
    if (worker->lock != NULL)
        pthread_mutex_unlock(worker->lock);
}

/* FNV-1a. */
static void mix(struct worker *worker, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        worker->digest = (worker->digest ^ ((const unsigned char *)data)[i]) * 1099511628211u;
}

static void step(struct worker *worker, pkv_seq *seq, size_t tokens)
{
    float q[MOST * QUERY_HEADS * DIM], out[MOST * QUERY_HEADS * DIM];
    float k[MOST * KV_HEADS * DIM], v[MOST * KV_HEADS * DIM];
    const pkv_step_io io = {.struct_size = sizeof io,
                            .q = {.data = q},
                            .k = {.data = k},
                            .v = {.data = v},
                            .out = {.data = out}};
    const pkv_step_item item = {seq, tokens};
    pkv_step *open;

    lock(worker);
    expect(pkv_step_begin(worker->cache, &item, 1, &open) == PKV_OK);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        for (size_t i = 0; i < tokens * QUERY_HEADS * DIM; i++)
            q[i] = (float)(int32_t)next(worker) * 0x1p-31f;
        for (size_t i = 0; i < tokens * KV_HEADS * DIM; i++) {
            k[i] = (float)(int32_t)next(worker) * 0x1p-31f;
            v[i] = (float)(int32_t)next(worker) * 0x1p-31f;
        }
        expect(tests_step_layer(open, layer, &io) == PKV_OK);
        mix(worker, out, tokens * QUERY_HEADS * DIM * sizeof *out);
    }
    expect(pkv_step_end(open) == PKV_OK);
    unlock(worker);
}

struct buffer {
    unsigned char data[1 << 19];
    size_t size, at;
};

static int write_memory(void *opaque, const void *data, size_t bytes)
{
    struct buffer *memory = opaque;

    if (bytes > sizeof memory->data - memory->size)
        return -1;
    memcpy(memory->data + memory->size, data, bytes);
    memory->size += bytes;
    return 0;
}

static ptrdiff_t read_memory(void *opaque, void *data, size_t bytes)
{
    struct buffer *memory = opaque;

    if (bytes > memory->size - memory->at)
        bytes = memory->size - memory->at;
    memcpy(data, memory->data + memory->at, bytes);
    memory->at += bytes;
    return (ptrdiff_t)bytes;
}

/* Gives the sequence up for what it was saved as. */
static pkv_seq *reload(struct worker *worker, pkv_seq *seq)
{
    struct buffer *memory = calloc(1, sizeof *memory);
    const pkv_writer writer = {write_memory, memory};
    const pkv_reader reader = {read_memory, memory};
    pkv_session session = {sizeof session, "m", NULL, 0};
    pkv_seq *loaded;

    lock(worker);
    expect(memory != NULL && pkv_seq_save(seq, &session, &writer) == PKV_OK);
    unlock(worker);
    lock(worker);
    expect(pkv_seq_load(worker->cache, &session, &reader, &loaded) == PKV_OK);
    unlock(worker);
    lock(worker);
    expect(pkv_seq_close(seq) == PKV_OK);
    unlock(worker);
    free(memory);
    return loaded;
}

/* Grows a sequence, and cuts, forks and reloads it on the way. */
static void *work(void *opaque)
{
    struct worker *worker = opaque;
    bool own = worker->cache == NULL;
    pkv_seq *seq, *fork;
    uint64_t digest;

    worker->random = worker->seed;
    if (own)
        expect(cache_open_with(tests_backend, &worker->config, &worker->cache, NULL) == PKV_OK);
    lock(worker);
    expect(pkv_seq_open(worker->cache, &seq) == PKV_OK);
    unlock(worker);
    for (int round = 0; round < ROUNDS; round++) {
        step(worker, seq, 1 + next(worker) % MOST);
        lock(worker);
        expect(pkv_seq_truncate(seq, pkv_seq_tokens(seq) -
                                         next(worker) % 3 % pkv_seq_tokens(seq)) == PKV_OK);
        expect(pkv_seq_fork(seq, &fork) == PKV_OK);
        unlock(worker);
        /* The fork's tail is the sequence's until one of them writes. */
        step(worker, seq, 1 + next(worker) % 3);
        step(worker, fork, 2);
        lock(worker);
        expect(pkv_seq_close(fork) == PKV_OK);
        unlock(worker);
        if (round % 4 == 3)
            seq = reload(worker, seq);
    }
    lock(worker);
    expect(pkv_seq_digest(seq, &digest) == PKV_OK);
    expect(pkv_seq_close(seq) == PKV_OK);
    unlock(worker);
    mix(worker, &digest, sizeof digest);
    if (own)
        pkv_cache_close(worker->cache);
    return NULL;
}

/* What each seed gives without other threads. */
static void work_alone(const pkv_config *config, struct worker *workers, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        workers[i] = (struct worker){.config = *config, .seed = i};
        work(&workers[i]);
        ck_assert_msg(workers[i].wrong == NULL, "%zu: %s", i, workers[i].wrong);
        for (size_t j = 0; j < i; j++)
            ck_assert_uint_ne(workers[i].digest, workers[j].digest);
    }
}

static void work_at_once(struct worker *workers, const struct worker *expected, size_t n)
{
    pthread_t *threads = tests_allocate(n, sizeof *threads);

    for (size_t i = 0; i < n; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    for (size_t i = 0; i < n; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    for (size_t i = 0; i < n; i++) {
        ck_assert_msg(workers[i].wrong == NULL, "thread %zu: %s", i, workers[i].wrong);
        ck_assert_uint_eq(workers[i].digest, expected[i].digest);
    }
    free(threads);
}

/* Caches with threads of their own, too. */
START_TEST(a_cache_each)
{
    struct worker expected[ALONE], workers[ALONE];
    pkv_config config = config_of(1);

    config.threads = (unsigned)_i;
    work_alone(&config, expected, ALONE);
    for (size_t i = 0; i < ALONE; i++)
        workers[i] = (struct worker){.config = config, .seed = i};
    work_at_once(workers, expected, ALONE);
}
END_TEST

START_TEST(one_cache)
{
    struct worker expected[TOGETHER], workers[TOGETHER];
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pkv_config config = config_of(TOGETHER);
    pkv_stats stats = {.struct_size = sizeof stats};
    pkv_cache *cache;

    config.threads = (unsigned)_i;
    work_alone(&config, expected, TOGETHER);
    cache = tests_open_cache(&config);
    for (size_t i = 0; i < TOGETHER; i++)
        workers[i] = (struct worker){.cache = cache, .lock = &lock, .seed = i};
    work_at_once(workers, expected, TOGETHER);
    ck_assert_int_eq(pkv_cache_stats(cache, &stats), PKV_OK);
    ck_assert_uint_eq(stats.sequences, 0);
    ck_assert_uint_eq(stats.payload_bytes, 0);
    pkv_cache_close(cache);
}
END_TEST

static Suite *make_suite(void)
{
    Suite *suite = suite_create("threads");
    TCase *test = tcase_create("threads");

    tcase_add_loop_test(test, a_cache_each, 1, 3);
    tcase_add_loop_test(test, one_cache, 1, 3);
    suite_add_tcase(suite, test);
    return suite;
}

int main(void)
{
    return tests_run_on_backends(make_suite);
}
