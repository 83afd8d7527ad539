/* SPDX-License-Identifier: MIT */
/* Opening caches: checked configurations, bytes and slots, memory, names. */
#include "config.h"

#include "fake_backend.h"

#include "tests.h" /* after message.h: see there */

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A model's shape with everything else at its default. */
static pkv_config config_of(size_t layers, size_t query_heads, size_t kv_heads, size_t head_dim,
                            size_t max_tokens)
{
    pkv_config config;

    pkv_config_init(&config, sizeof config);
    config.layers = layers;
    config.query_heads = query_heads;
    config.kv_heads = kv_heads;
    config.head_dim = head_dim;
    config.max_tokens = max_tokens;
    return config;
}

static pkv_config llama(void)
{
    return config_of(32, 32, 8, 128, 16384);
}

/* ---- Names ---- */

START_TEST(names)
{
    const char *names[12], *states[PKV_PAGE_STATES];

    ck_assert_str_eq(pkv_version(), PKV_VERSION);
    ck_assert_str_eq(pkv_strerror(PKV_OK), "success");
    for (int i = 0; i < 12; i++) {
        names[i] = pkv_strerror((pkv_status)i);
        ck_assert_str_ne(names[i], pkv_strerror((pkv_status)99));
        for (int j = 0; j < i; j++)
            ck_assert_str_ne(names[i], names[j]);
    }
    ck_assert_str_eq(pkv_strerror((pkv_status)12), pkv_strerror((pkv_status)-1));
    for (int i = 0; i < PKV_PAGE_STATES; i++)
        states[i] = pkv_page_state_name((pkv_page_state)i);
    ck_assert_str_eq(states[PKV_PAGE_EMPTY], "empty");
    ck_assert_str_eq(states[PKV_PAGE_FILLING], "filling");
    ck_assert_str_eq(states[PKV_PAGE_SINK], "sink");
    ck_assert_str_eq(states[PKV_PAGE_WINDOW], "window");
    ck_assert_str_eq(states[PKV_PAGE_FACTORIZED], "factorized");
    ck_assert_ptr_nonnull(pkv_page_state_name((pkv_page_state)PKV_PAGE_STATES));
}
END_TEST

START_TEST(messages_are_cut)
{
    struct message message;
    char text[2 * PKV_MESSAGE_BYTES];

    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    /* Check has a macro of that name. */
    ck_assert_int_eq((fail)(&message, PKV_ERROR_VALUE, "%s", text), PKV_ERROR_VALUE);
    ck_assert_uint_eq(strlen(message.text), PKV_MESSAGE_BYTES - 1);
}
END_TEST

/* ---- Configurations ---- */

START_TEST(defaults)
{
    pkv_config config;

    memset(&config, 0xff, sizeof config);
    pkv_config_init(&config, sizeof config);
    ck_assert_uint_eq(config.struct_size, sizeof config);
    ck_assert_uint_eq(config.layers, 0);
    ck_assert_uint_eq(config.max_tokens, 0);
    ck_assert_uint_eq(config.page_tokens, 32);
    ck_assert_uint_eq(config.sink_pages, 1);
    ck_assert_uint_eq(config.window_pages, 1);
    ck_assert_int_eq(config.factors_k, PKV_FACTORS_NATIVE);
    ck_assert_int_eq(config.factors_v, PKV_FACTORS_NATIVE);
    ck_assert_uint_eq(config.rank_k, 16);
    ck_assert_uint_eq(config.rank_v, 14);
    ck_assert_ptr_null(config.layer_rank_k);
    ck_assert_ptr_null(config.layer_rank_v);
    ck_assert_int_eq(config.dtype, PKV_BF16);
    ck_assert_uint_eq(config.max_sequences, 1);
    ck_assert_uint_eq(config.max_step_tokens, 0);
    ck_assert_ptr_null(config.backend);
    ck_assert_ptr_null(config.isa);
    ck_assert_uint_eq(config.threads, 0);
    ck_assert(config.softmax_scale == 0);
}
END_TEST

/* Both ways to check a configuration say the same, and begin with the field. */
static void refuse(const pkv_config *config, const char *field)
{
    pkv_footprint footprint = {.struct_size = sizeof footprint};
    char message[PKV_MESSAGE_BYTES], again[PKV_MESSAGE_BYTES];
    pkv_cache *cache = (pkv_cache *)&footprint;

    memset(message, 'x', sizeof message);
    ck_assert_int_eq(pkv_cache_open(config, &cache, message), PKV_ERROR_ARGUMENT);
    ck_assert_ptr_null(cache);
    ck_assert_msg(strncmp(message, field, strlen(field)) == 0, "\"%s\" does not begin with %s",
                  message, field);
    ck_assert_ptr_null(strchr(message, '\n'));
    ck_assert_int_eq(pkv_footprint_of(config, 1, &footprint, again), PKV_ERROR_ARGUMENT);
    ck_assert_str_eq(message, again);
    ck_assert_int_eq(pkv_cache_open(config, &cache, NULL), PKV_ERROR_ARGUMENT);
}

static void *allocate_nothing(void *opaque, size_t bytes)
{
    (void)opaque;
    (void)bytes;
    return NULL;
}

static void release_nothing(void *opaque, void *pointer)
{
    (void)opaque;
    (void)pointer;
}

#define REFUSE(assignment, field)                                                                  \
    do {                                                                                           \
        pkv_config c = llama();                                                                    \
        assignment;                                                                                \
        refuse(&c, field);                                                                         \
    } while (0)

START_TEST(every_bad_field)
{
    size_t ranks[32];

    for (size_t i = 0; i < 32; i++)
        ranks[i] = 16;
    ranks[31] = 33;

    refuse(NULL, "config:");
    REFUSE(c.struct_size = 0, "struct_size:");
    REFUSE(c.struct_size++, "struct_size:");
    REFUSE(c.layers = 0, "layers:");
    REFUSE(c.kv_heads = 0, "kv_heads:");
    REFUSE(c.query_heads = 0, "query_heads:");
    REFUSE(c.query_heads = 12, "query_heads:");
    REFUSE(c.head_dim = 0, "head_dim:");
    REFUSE(c.head_dim = 4, "head_dim:");
    REFUSE(c.head_dim = 100, "head_dim:");
    REFUSE(c.head_dim = 1032, "head_dim:");
    REFUSE(c.page_tokens = 0, "page_tokens:");
    REFUSE(c.page_tokens = 4, "page_tokens:");
    REFUSE(c.page_tokens = 33, "page_tokens:");
    REFUSE(c.page_tokens = 264, "page_tokens:");
    REFUSE(c.factors_k = (pkv_factors)9, "factors_k:");
    REFUSE(c.factors_v = (pkv_factors)(PKV_FACTORS_INT4 + 1), "factors_v:");
    REFUSE(c.factors_v = (pkv_factors)9, "factors_v:");
    REFUSE(c.factors_k = PKV_FACTORS_NONE, "factors_v:");
    REFUSE(c.factors_v = PKV_FACTORS_NONE, "factors_v:");
    REFUSE(c.rank_k = 0, "rank_k:");
    REFUSE(c.rank_k = 33, "rank_k:");
    REFUSE(c.rank_v = 0, "rank_v:");
    REFUSE(c.rank_v = 33, "rank_v:");
    REFUSE((c.page_tokens = 64, c.head_dim = 24, c.rank_k = 25), "rank_k:");
    REFUSE(c.layer_rank_k = ranks, "layer_rank_k[31]:");
    REFUSE(c.layer_rank_v = ranks, "layer_rank_v[31]:");
    REFUSE(c.solver = (pkv_solver)7, "solver:");
    REFUSE(c.dtype = (pkv_dtype)3, "dtype:");
    REFUSE(c.threads = 1025, "threads:");
    REFUSE(c.threads = UINT_MAX, "threads:");
    REFUSE(c.softmax_scale = -1, "softmax_scale:");
    REFUSE(c.softmax_scale = NAN, "softmax_scale:");
    REFUSE(c.softmax_scale = INFINITY, "softmax_scale:");
    REFUSE(c.max_sequences = 0, "max_sequences:");
    REFUSE(c.max_tokens = 0, "max_tokens:");
    REFUSE(c.allocator.allocate = allocate_nothing, "allocator:");
    REFUSE(c.allocator.release = release_nothing, "allocator:");
}
END_TEST

START_TEST(numbers_that_do_not_fit)
{
    REFUSE(c.layers = SIZE_MAX, "layers,");
    REFUSE(c.layers = SIZE_MAX / 4096, "layers,");
    REFUSE((c.kv_heads = SIZE_MAX / 128, c.query_heads = c.kv_heads), "layers,");
    REFUSE((c.query_heads = SIZE_MAX - 7, c.kv_heads = 8), "layers,");
    REFUSE(c.max_tokens = SIZE_MAX, "max_tokens");
    REFUSE(c.max_tokens = SIZE_MAX / 1000000, "max_tokens");
    REFUSE((c.max_tokens = SIZE_MAX / 2000000, c.page_tokens = 256), "max_tokens");
    REFUSE(c.max_sequences = SIZE_MAX, "max_tokens, max_sequences:");
    REFUSE(c.max_sequences = (size_t)UINT32_MAX + 1, "max_tokens, max_sequences:");

    /* Of these the rest takes care. */
    pkv_config c = llama();
    pkv_footprint footprint = {.struct_size = sizeof footprint};

    c.max_tokens = 1000;
    c.window_pages = SIZE_MAX;
    c.sink_pages = SIZE_MAX;
    c.max_step_tokens = SIZE_MAX;
    ck_assert_int_eq(pkv_footprint_of(&c, 1000, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.payload_bytes, footprint.raw_bytes);
    ck_assert_uint_eq(footprint.factor_slots, 0);
    ck_assert_uint_eq(footprint.dense_slots, 1000 / 32 + 1 + 1);
}
END_TEST

/* The module of this build, if there is one: it opens, with or without a device. */
START_TEST(cuda_module)
{
    const char *build = getenv("PUZZLEKV_BUILD");
    pkv_config config = config_of(1, 1, 1, 32, 8);
    char message[PKV_MESSAGE_BYTES];
    char path[4096];
    pkv_cache *cache;
    pkv_status status;

    snprintf(path, sizeof path, "%s/gpu/puzzlekv-cuda.so", build ? build : ".");
    if (access(path, R_OK) != 0)
        return; /* tests/cuda_module.sh says so */
    *strrchr(path, '/') = '\0';
    ck_assert_int_eq(setenv("PUZZLEKV_MODULES", path, 1), 0);
    config.backend = "cuda";
    status = pkv_cache_open(&config, &cache, message);
    if (status == PKV_OK) {
        ck_assert_str_eq(pkv_cache_backend(cache), "cuda");
        pkv_cache_close(cache);
    } else {
        ck_assert_int_eq(status, PKV_ERROR_UNSUPPORTED);
        ck_assert_ptr_null(cache);
        ck_assert_msg(strstr(message, "backend: no CUDA device: ") == message, "%s", message);
    }
    config.backend = "auto";
    ck_assert_int_eq(pkv_cache_open(&config, &cache, message), PKV_OK);
    ck_assert_str_eq(pkv_cache_backend(cache), status == PKV_OK ? "cuda" : "cpu");
    pkv_cache_close(cache);
}
END_TEST

START_TEST(unknown_backends)
{
    pkv_config config = config_of(1, 1, 1, 32, 8);
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;

    config.backend = "abacus";
    ck_assert_int_eq(pkv_cache_open(&config, &cache, message), PKV_ERROR_UNSUPPORTED);
    ck_assert_ptr_null(cache);
    ck_assert_int_eq(strncmp(message, "backend: \"abacus\"", 17), 0);
    /* No module in that folder. */
    ck_assert_int_eq(setenv("PUZZLEKV_MODULES", "/nowhere", 1), 0);
    config.backend = "cuda";
    ck_assert_int_eq(pkv_cache_open(&config, &cache, message), PKV_ERROR_UNSUPPORTED);
    ck_assert_ptr_null(cache);
    ck_assert_msg(strstr(message, "backend: \"cuda\": there is no /nowhere/puzzlekv-cuda.so") ==
                      message,
                  "%s", message);
    config.backend = "auto";
    ck_assert_int_eq(pkv_cache_open(&config, &cache, message), PKV_OK);
    ck_assert_str_eq(message, "");
    ck_assert_str_eq(pkv_cache_backend(cache), "cpu");
    pkv_cache_close(cache);
    config.backend = "cpu";
    config.isa = "abacus";
    ck_assert_int_eq(pkv_cache_open(&config, &cache, message), PKV_ERROR_UNSUPPORTED);
    ck_assert_ptr_null(cache);
    ck_assert_int_eq(strncmp(message, "isa:", 4), 0);
    config.isa = "generic";
    ck_assert_int_eq(pkv_cache_open(&config, &cache, message), PKV_OK);
    ck_assert_str_eq(message, "");
    ck_assert_str_eq(pkv_cache_message(cache), "");
    ck_assert_str_eq(pkv_cache_isa(cache), "generic");
    pkv_cache_close(cache);
    ck_assert_int_eq(pkv_cache_open(&config, NULL, message), PKV_ERROR_ARGUMENT);
    pkv_cache_close(NULL);
}
END_TEST

/* ---- Bytes and slots ---- */

START_TEST(footprint_of_a_sequence)
{
    pkv_config config = llama();
    pkv_footprint footprint = {.struct_size = sizeof footprint};
    size_t heads = 32 * 8;

    ck_assert_int_eq(pkv_footprint_of(&config, 16384, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.raw_bytes, heads * 16384 * 2 * 128 * 2);
    ck_assert_uint_eq(footprint.payload_bytes,
                      heads * 2 * (510 * 30 * (32 + 128) + 2 * 2 * 32 * 128));
    ck_assert_double_eq_tol((double)footprint.payload_bytes / (double)footprint.raw_bytes, 0.58755,
                            5e-6);
    ck_assert_uint_eq(footprint.dense_slots, 3 + 2 + 1);
    ck_assert_uint_eq(footprint.factor_slots, 511);

    /* An incomplete page counts its tokens; nothing is factorized before the window is left. */
    ck_assert_int_eq(pkv_footprint_of(&config, 95, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.payload_bytes, footprint.raw_bytes);
    ck_assert_int_eq(pkv_footprint_of(&config, 97, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.payload_bytes,
                      heads * 2 * (30 * (32 + 128) + (2 * 32 + 1) * 2 * 128));
    ck_assert_int_eq(pkv_footprint_of(&config, 0, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.payload_bytes, 0);

    /* INT4: half a byte a code and two a scale, for K and for V, in any storage type. */
    config.dtype = PKV_F32;
    config.factors_v = PKV_FACTORS_INT4;
    ck_assert_int_eq(pkv_footprint_of(&config, 97, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.payload_bytes,
                      heads * (4 * 16 * (32 + 128) + 14 * (32 + 128) / 2 + 2 * (32 + 128) +
                               4 * (2 * 32 + 1) * 2 * 128));
    config.factors_k = PKV_FACTORS_INT4;
    ck_assert_int_eq(pkv_footprint_of(&config, 97, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(
        footprint.payload_bytes,
        heads * (30 * (32 + 128) / 2 + 2 * (16 + 128 + 32 + 128) + 4 * (2 * 32 + 1) * 2 * 128));
    config.dtype = PKV_BF16;
    ck_assert_int_eq(pkv_footprint_of(&config, 16384, &footprint, NULL), PKV_OK);
    ck_assert_double_eq_tol((double)footprint.payload_bytes / (double)footprint.raw_bytes, 0.18678,
                            5e-6);

    config.factors_k = PKV_FACTORS_NONE;
    config.factors_v = PKV_FACTORS_NONE;
    config.rank_k = 0;
    ck_assert_int_eq(pkv_footprint_of(&config, 16384, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.payload_bytes, footprint.raw_bytes);
    ck_assert_uint_eq(footprint.dense_slots, 512 + 1);
    ck_assert_uint_eq(footprint.factor_slots, 0);
}
END_TEST

START_TEST(footprint_with_layer_ranks)
{
    const size_t rank_k[3] = {8, 16, 32}, rank_v[3] = {1, 2, 3};
    pkv_config config = config_of(3, 2, 2, 64, 1024);
    pkv_footprint footprint = {.struct_size = sizeof footprint};

    config.layer_rank_k = rank_k;
    config.rank_k = 0;
    config.dtype = PKV_F32;
    ck_assert_int_eq(pkv_footprint_of(&config, 96, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.payload_bytes,
                      2 * 4 * ((56 + 3 * 14) * (32 + 64) + 3 * 64 * 2 * 64));
    config.layer_rank_v = rank_v;
    config.rank_v = 1000;
    ck_assert_int_eq(pkv_footprint_of(&config, 96, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.payload_bytes, 2 * 4 * ((56 + 6) * (32 + 64) + 3 * 64 * 2 * 64));
}
END_TEST

START_TEST(slots_of_many_sequences)
{
    pkv_config config = config_of(1, 1, 1, 32, 4096);
    pkv_footprint footprint = {.struct_size = sizeof footprint};

    config.max_sequences = 5;
    config.sink_pages = 2;
    config.window_pages = 3;
    ck_assert_int_eq(pkv_footprint_of(&config, 0, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.dense_slots, 5 * 6 + 5 * 4 + 1);
    ck_assert_uint_eq(footprint.factor_slots, 126);
    config.max_step_tokens = 7;
    ck_assert_int_eq(pkv_footprint_of(&config, 0, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.dense_slots, 5 * 6 + 3 + 1);
    config.max_tokens = 100;
    ck_assert_int_eq(pkv_footprint_of(&config, 0, &footprint, NULL), PKV_OK);
    ck_assert_uint_eq(footprint.dense_slots, 3 + 5 + 2 + 1);
    ck_assert_uint_eq(footprint.factor_slots, 1);
}
END_TEST

START_TEST(footprint_arguments)
{
    pkv_config config = config_of(1, 1, 1, 32, 100);
    pkv_footprint footprint = {.struct_size = sizeof footprint};
    char message[PKV_MESSAGE_BYTES] = "x";

    ck_assert_int_eq(pkv_footprint_of(&config, 100, NULL, message), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(strncmp(message, "footprint:", 10), 0);
    ck_assert_int_eq(pkv_footprint_of(&config, 101, &footprint, message), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(strncmp(message, "tokens:", 7), 0);
    footprint.struct_size = 8;
    ck_assert_int_eq(pkv_footprint_of(&config, 100, &footprint, message), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(strncmp(message, "struct_size:", 12), 0);
    footprint.struct_size = sizeof footprint;
    config.backend = "abacus"; /* not looked at */
    ck_assert_int_eq(pkv_footprint_of(&config, 100, &footprint, message), PKV_OK);
    ck_assert_str_eq(message, "");
}
END_TEST

/* ---- Opening ---- */

START_TEST(geometry_as_configured)
{
    const size_t rank_k[2] = {3, 4};
    pkv_config config = config_of(2, 6, 2, 16, 100);
    pkv_cache *cache;

    config.page_tokens = 8;
    config.rank_v = 5;
    config.layer_rank_k = rank_k;
    config.dtype = PKV_F32;
    ck_assert_int_eq(cache_open_with(&backend_fake, &config, &cache, NULL), PKV_OK);

    const struct geometry *geometry = cache->backend->geometry;

    ck_assert_uint_eq(geometry->layers, 2);
    ck_assert_uint_eq(geometry->query_heads, 6);
    ck_assert_uint_eq(geometry->kv_heads, 2);
    ck_assert_uint_eq(geometry->head_dim, 16);
    ck_assert_uint_eq(geometry->rank_k[0], 3);
    ck_assert_uint_eq(geometry->rank_k[1], 4);
    ck_assert_uint_eq(geometry->rank_v[0], 5);
    ck_assert_uint_eq(geometry->rank_v[1], 5);
    ck_assert_ptr_ne(geometry->rank_k, rank_k);
    ck_assert(geometry->softmax_scale == 0.25f);
    ck_assert(geometry->policy.factorize);
    pkv_cache_close(cache);

    config.factors_k = config.factors_v = PKV_FACTORS_NONE;
    config.softmax_scale = 2;
    ck_assert_int_eq(cache_open_with(&backend_fake, &config, &cache, NULL), PKV_OK);
    geometry = cache->backend->geometry;
    ck_assert_uint_eq(geometry->rank_k[0] + geometry->rank_k[1], 0);
    ck_assert_uint_eq(geometry->rank_v[0] + geometry->rank_v[1], 0);
    ck_assert(geometry->softmax_scale == 2);
    ck_assert(!geometry->policy.factorize);
    pkv_cache_close(cache);
}
END_TEST

static const struct backend_ops *const backends[] = {
    &backend_fake,
    &backend_cpu,
#ifdef HAVE_CUDA_HOST
    &backend_cuda,
#endif
};

START_TEST(open_without_memory)
{
    struct counting_allocator counting = {0};
    pkv_config config = config_of(2, 2, 2, 8, 200);
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;
    size_t failures = 0;
    pkv_status status;

    config.page_tokens = 8;
    config.rank_k = config.rank_v = 8;
    config.dtype = PKV_F32;
    config.allocator = counting_allocator(&counting);
    do {
        counting.calls = 0;
        counting.fail_at = failures + 1;
        status = cache_open_with(backends[_i], &config, &cache, message);
        if (status != PKV_OK) {
            ck_assert_int_eq(status, PKV_ERROR_MEMORY);
            ck_assert_ptr_null(cache);
            ck_assert_str_ne(message, "");
            ck_assert_uint_eq(counting.live, 0);
            failures++;
        }
    } while (status != PKV_OK);
    ck_assert_uint_ge(failures, 9);

    /* Sequences, too. */
    pkv_seq *seq, *fork;

    counting.calls = 0;
    counting.fail_at = 1;
    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_ERROR_MEMORY);
    ck_assert_ptr_null(seq);
    ck_assert_str_ne(pkv_cache_message(cache), "");
    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    counting.calls = 0;
    ck_assert_int_eq(pkv_seq_fork(seq, &fork), PKV_ERROR_CAPACITY);
    ck_assert_uint_eq(counting.calls, 0);
    pkv_cache_close(cache);
    ck_assert_uint_eq(counting.live, 0);
}
END_TEST

START_TEST(structs_of_another_version)
{
    pkv_config config = config_of(1, 1, 1, 32, 200);
    pkv_page_info info = {.struct_size = 1};
    pkv_stats stats = {.struct_size = 1};
    pkv_cache *cache;
    pkv_seq *seq;

    config.dtype = PKV_F32;
    ck_assert_int_eq(cache_open_with(&backend_fake, &config, &cache, NULL), PKV_OK);
    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    ck_assert_int_eq(pkv_cache_stats(cache, &stats), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(strncmp(pkv_cache_message(cache), "struct_size:", 12), 0);
    ck_assert_int_eq(pkv_seq_stats(seq, &stats), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_page(seq, 0, &info), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_cache_stats(cache, NULL), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_page(seq, 0, NULL), PKV_ERROR_ARGUMENT);
    pkv_cache_close(cache);
}
END_TEST

START_TEST(null_handles)
{
    pkv_page_info info = {.struct_size = sizeof info};
    pkv_stats stats = {.struct_size = sizeof stats};
    pkv_step_io io = {.struct_size = sizeof io};
    pkv_step_item item = {NULL, 1};
    pkv_step *step;
    pkv_seq *seq;
    uint64_t digest;

    ck_assert_int_eq(pkv_cache_open(NULL, NULL, NULL), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_open(NULL, &seq), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_fork(NULL, &seq), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_truncate(NULL, 0), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_step_begin(NULL, &item, 1, &step), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(tests_step_layer(NULL, 0, &io), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_step_end(NULL), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_page(NULL, 0, &info), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_read_page(NULL, 0, 0, 0, NULL, NULL), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_cache_stats(NULL, &stats), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_stats(NULL, &stats), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_digest(NULL, &digest), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_cache_digest(NULL, &digest), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_close(NULL), PKV_OK);
    pkv_step_abort(NULL);
    pkv_cache_close(NULL);
}
END_TEST

/* ---- Real appends ---- */

static float *random_rows(size_t elements)
{
    float *rows = tests_allocate(elements, sizeof *rows);

    tests_seed(1);
    for (size_t i = 0; i < elements; i++)
        rows[i] = tests_random_float();
    return rows;
}

static pkv_stats stats_of(pkv_cache *cache)
{
    pkv_stats stats = {.struct_size = sizeof stats};

    ck_assert_int_eq(pkv_cache_stats(cache, &stats), PKV_OK);
    return stats;
}

/* However a sequence came to its tokens, it stores what pkv_footprint_of() says. */
START_TEST(footprint_is_what_is_stored)
{
    const size_t rank_k[3] = {8, 1, 5};

    for (size_t choice = 0; choice < 3 * 3 * 3; choice++) {
        pkv_config config = config_of(3, 2, 2, 8, 120);
        float rows[7 * 2 * 8] = {0};
        pkv_step_io io = {.struct_size = sizeof io, .k = {.data = rows}, .v = {.data = rows}};
        pkv_cache *cache;
        pkv_seq *seq;
        pkv_step *step;

        config.page_tokens = 8;
        config.sink_pages = choice % 3;
        config.window_pages = choice / 3 % 3;
        config.layer_rank_k = rank_k;
        config.rank_v = 3;
        config.dtype = PKV_F32;
        config.factors_k = config.factors_v = (pkv_factors)(choice / 9);
        ck_assert_int_eq(cache_open_with(&backend_fake, &config, &cache, NULL), PKV_OK);
        ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
        for (size_t tokens = 0; tokens < 119; tokens += 7) {
            pkv_footprint footprint = {.struct_size = sizeof footprint};
            pkv_step_item item = {seq, 7};
            pkv_stats stats = stats_of(cache);

            ck_assert_int_eq(pkv_footprint_of(&config, tokens, &footprint, NULL), PKV_OK);
            ck_assert_uint_eq(stats.payload_bytes, footprint.payload_bytes);
            ck_assert_uint_eq(stats.raw_bytes, footprint.raw_bytes);
            ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &step), PKV_OK);
            for (size_t layer = 0; layer < config.layers; layer++)
                ck_assert_int_eq(tests_step_layer(step, layer, &io), PKV_OK);
            ck_assert_int_eq(pkv_step_end(step), PKV_OK);
        }
        pkv_cache_close(cache);
    }
}
END_TEST

/* A prompt in one step needs less than K and V of two layers beside the pool. */
START_TEST(transient_bytes_of_a_prompt)
{
    pkv_config config = config_of(2, 9, 3, 64, 4096);
    float *rows = random_rows(4096 * 3 * 64);
    pkv_step_io io = {.struct_size = sizeof io, .k = {.data = rows}, .v = {.data = rows}};
    pkv_cache *cache;
    pkv_seq *seq;
    pkv_step *step;

    ck_assert_int_eq(pkv_cache_open(&config, &cache, NULL), PKV_OK);
    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    ck_assert_int_eq(pkv_step_begin(cache, &(pkv_step_item){seq, 4096}, 1, &step), PKV_OK);
    for (size_t layer = 0; layer < config.layers; layer++)
        ck_assert_int_eq(tests_step_layer(step, layer, &io), PKV_OK);
    ck_assert_uint_eq(stats_of(cache).transient_peak_bytes, 0);
    ck_assert_int_eq(pkv_step_end(step), PKV_OK);
    ck_assert_uint_gt(stats_of(cache).transient_peak_bytes, 0);
    ck_assert_uint_lt(stats_of(cache).transient_peak_bytes, 2 * (2 * 4096 * 3 * 64 * 2));
    pkv_cache_close(cache);
    free(rows);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("cache");
    TCase *test = tcase_create("cache");

    tcase_add_test(test, names);
    tcase_add_test(test, messages_are_cut);
    tcase_add_test(test, defaults);
    tcase_add_test(test, every_bad_field);
    tcase_add_test(test, numbers_that_do_not_fit);
    tcase_add_test(test, unknown_backends);
    tcase_add_test(test, cuda_module);
    tcase_add_test(test, footprint_of_a_sequence);
    tcase_add_test(test, footprint_with_layer_ranks);
    tcase_add_test(test, slots_of_many_sequences);
    tcase_add_test(test, footprint_arguments);
    tcase_add_test(test, geometry_as_configured);
    tcase_add_loop_test(test, open_without_memory, 0, (int)(sizeof backends / sizeof *backends));
    tcase_add_test(test, structs_of_another_version);
    tcase_add_test(test, null_handles);
    tcase_add_test(test, footprint_is_what_is_stored);
    tcase_add_test(test, transient_bytes_of_a_prompt);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
