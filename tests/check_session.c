/* SPDX-License-Identifier: MIT */
/* Sessions: what is saved comes back bit for bit, and nothing else comes in. */
#define _GNU_SOURCE /* syscall */
#include "fake_backend.h"
#include "numeric.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tests.h" /* after message.h: see there */

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define LAYERS      2
#define QUERY_HEADS 4
#define KV_HEADS    2
#define DIM         16
#define LENGTH      8 /* tokens of a page */
#define MAX_TOKENS  160
#define TOKENS      83

/* The header: magic, 15 numbers, checksum. */
#define HEADER_BYTES 136

static const size_t ranks_k[LAYERS] = {5, 8};
static const size_t ranks_v[LAYERS] = {3, 6};

static pkv_config config_of(pkv_factors factors, pkv_dtype dtype)
{
    pkv_config config;

    pkv_config_init(&config, sizeof config);
    config.layers = LAYERS;
    config.query_heads = QUERY_HEADS;
    config.kv_heads = KV_HEADS;
    config.head_dim = DIM;
    config.page_tokens = LENGTH;
    config.window_pages = 2;
    config.factors_k = config.factors_v = factors;
    config.layer_rank_k = ranks_k;
    config.layer_rank_v = ranks_v;
    config.dtype = dtype;
    config.max_tokens = 2 * MAX_TOKENS;
    config.max_sequences = 3;
    config.threads = 1;
    return config;
}

/* A step of random tokens; `out` is NULL or [LAYERS, tokens, QUERY_HEADS, DIM]. */
static void step(pkv_seq *seq, pkv_cache *cache, size_t tokens, uint64_t seed, float *out)
{
    static float q[MAX_TOKENS * QUERY_HEADS * DIM], k[MAX_TOKENS * KV_HEADS * DIM],
        v[MAX_TOKENS * KV_HEADS * DIM];
    const pkv_step_item item = {seq, tokens};
    pkv_step *open;

    tests_seed(seed);
    ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &open), PKV_OK);
    for (size_t layer = 0; layer < LAYERS; layer++) {
        pkv_step_io io = {.struct_size = sizeof io,
                          .q = {q, PKV_F32, 0, 0},
                          .k = {k, PKV_F32, 0, 0},
                          .v = {v, PKV_F32, 0, 0}};

        for (size_t i = 0; i < tokens * QUERY_HEADS * DIM; i++)
            q[i] = tests_random_float();
        for (size_t i = 0; i < tokens * KV_HEADS * DIM; i++) {
            k[i] = tests_random_float();
            v[i] = tests_random_float();
        }
        if (out != NULL)
            io.out = (pkv_output){out + layer * tokens * QUERY_HEADS * DIM, PKV_F32, 0, 0};
        ck_assert_int_eq(tests_step_layer(open, layer, &io), PKV_OK);
    }
    ck_assert_int_eq(pkv_step_end(open), PKV_OK);
}

/* Shapes of page tables: as grown, and as truncation leaves them. */
enum shape { GROWN, EMPTY, SHORT, CUT_IN_PAGE, CUT_AT_PAGE, CUT_AND_GROWN, SHAPES };

static pkv_seq *open_sequence(pkv_cache *cache, enum shape shape)
{
    pkv_seq *seq;

    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);
    if (shape == EMPTY)
        return seq;
    step(seq, cache, shape == SHORT ? 3 : TOKENS, 1, NULL);
    if (shape == CUT_IN_PAGE)
        ck_assert_int_eq(pkv_seq_truncate(seq, 5 * LENGTH + 3), PKV_OK);
    if (shape == CUT_AT_PAGE || shape == CUT_AND_GROWN)
        ck_assert_int_eq(pkv_seq_truncate(seq, 5 * LENGTH), PKV_OK);
    if (shape == CUT_AND_GROWN)
        step(seq, cache, LENGTH + 1, 2, NULL);
    return seq;
}

static uint64_t digest_of(pkv_seq *seq)
{
    uint64_t digest;

    ck_assert_int_eq(pkv_seq_digest(seq, &digest), PKV_OK);
    return digest;
}

/* ---- Sessions in memory ---- */

static unsigned char user_data[5] = {1, 2, 3, 4, 5};

static pkv_session session_of(const char *model_id)
{
    return (pkv_session){sizeof(pkv_session), model_id, user_data, sizeof user_data};
}

struct memory_file {
    unsigned char *data;
    size_t size, capacity;
    size_t at;      /* of reading */
    size_t fail_at; /* the byte that cannot be read or written; SIZE_MAX: all can */
    size_t most;    /* of one read; 0: as many as asked for */
};

static int write_memory(void *opaque, const void *data, size_t bytes)
{
    struct memory_file *file = opaque;

    ck_assert_uint_gt(bytes, 0);
    if (file->fail_at - file->size < bytes)
        return 1;
    while (file->capacity < file->size + bytes) {
        file->capacity = 2 * file->capacity + 1024;
        file->data = realloc(file->data, file->capacity);
    }
    memcpy(file->data + file->size, data, bytes);
    file->size += bytes;
    return 0;
}

static ptrdiff_t read_memory(void *opaque, void *data, size_t bytes)
{
    struct memory_file *file = opaque;

    ck_assert_uint_gt(bytes, 0);
    if (file->most > 0 && bytes > file->most)
        bytes = file->most;
    if (bytes > file->size - file->at)
        bytes = file->size - file->at;
    if (file->fail_at - file->at < bytes)
        return -1;
    memcpy(data, file->data + file->at, bytes);
    file->at += bytes;
    return (ptrdiff_t)bytes;
}

static struct memory_file save(pkv_seq *seq, const char *model_id)
{
    struct memory_file file = {.fail_at = SIZE_MAX};
    const pkv_writer writer = {write_memory, &file};
    const pkv_session session = session_of(model_id);

    ck_assert_int_eq(pkv_seq_save(seq, &session, &writer), PKV_OK);
    return file;
}

static pkv_status load(pkv_cache *cache, const struct memory_file *file, const char *model_id,
                       pkv_seq **seq)
{
    struct memory_file from = *file;
    const pkv_reader reader = {read_memory, &from};
    unsigned char user[sizeof user_data] = {0};
    pkv_session session = {sizeof session, model_id, user, sizeof user};
    pkv_status status;

    from.at = 0;
    status = pkv_seq_load(cache, &session, &reader, seq);
    if (status == PKV_OK) {
        require(session.user_bytes == sizeof user);
        require(memcmp(user, user_data, sizeof user) == 0);
        require(from.at == from.size);
    } else {
        require(*seq == NULL);
    }
    return status;
}

/* All that is seen of a cache. */
struct view {
    uint64_t digest;
    pkv_stats stats;
    struct slots dense, factor;
    size_t bytes;
};

static struct view view_of(pkv_cache *cache)
{
    struct view view;

    memset(&view, 0, sizeof view);
    view.stats.struct_size = sizeof view.stats;
    ck_assert_int_eq(pkv_cache_digest(cache, &view.digest), PKV_OK);
    ck_assert_int_eq(pkv_cache_stats(cache, &view.stats), PKV_OK);
    view.dense.n_free = cache->dense.n_free;
    view.factor.n_free = cache->factor.n_free;
    view.bytes = cache->memory.bytes;
    return view;
}

/* A cache with a sequence of its own, in which what is refused must change nothing. */
struct target {
    pkv_cache *cache;
    struct view before;
};

static struct target open_target(const pkv_config *config)
{
    struct target target = {.cache = tests_open_cache(config)};

    open_sequence(target.cache, CUT_IN_PAGE);
    target.before = view_of(target.cache);
    return target;
}

static void refuse(const struct target *target, const struct memory_file *file,
                   const char *model_id, pkv_status expected, const char *text)
{
    pkv_seq *seq = (pkv_seq *)target->cache;
    pkv_status status = load(target->cache, file, model_id, &seq);
    struct view after = view_of(target->cache);
    const char *message = pkv_cache_message(target->cache);

    require_msg(expected == PKV_OK ? status == PKV_ERROR_FORMAT || status == PKV_ERROR_MISMATCH
                                   : status == expected,
                "%s: status %d, expected %d and '%s'", message, status, expected, text);
    require_msg(strstr(message, text) != NULL, "'%s' in '%s'", text, message);
    require_msg(strchr(message, ':') != NULL && strchr(message, '\n') == NULL, "%s", message);
    require_msg(memcmp(&after, &target->before, sizeof after) == 0, "changed by '%s'", message);
}

/* ---- Round trips ---- */

static void check_round_trip(pkv_factors factors, pkv_dtype dtype, enum shape shape)
{
    const pkv_config config = config_of(factors, dtype);
    pkv_cache *from = tests_open_cache(&config), *to = tests_open_cache(&config);
    pkv_seq *seq = open_sequence(from, shape), *other, *copy;
    struct memory_file file = save(seq, "m"), again;
    float out[2][LAYERS * 20 * QUERY_HEADS * DIM];
    uint64_t digests[2];

    /* Other slots than those it came from. */
    ck_assert_int_eq(pkv_seq_open(to, &other), PKV_OK);
    step(other, to, 30, 3, NULL);
    ck_assert_msg(load(to, &file, "m", &copy) == PKV_OK, "%s", pkv_cache_message(to));
    ck_assert_uint_eq(pkv_seq_tokens(copy), pkv_seq_tokens(seq));
    ck_assert_uint_eq(digest_of(copy), digest_of(seq));
    again = save(copy, "m");
    ck_assert_uint_eq(again.size, file.size);
    ck_assert_mem_eq(again.data, file.data, file.size);
    for (size_t i = 0; i < 3; i++) {
        step(seq, from, 1 + 9 * i, 4 + i, out[0]);
        step(copy, to, 1 + 9 * i, 4 + i, out[1]);
        ck_assert_mem_eq(out[0], out[1], LAYERS * (1 + 9 * i) * QUERY_HEADS * DIM * sizeof *out[0]);
        ck_assert_uint_eq(digest_of(copy), digest_of(seq));
    }
    ck_assert_int_eq(pkv_seq_close(other), PKV_OK);
    ck_assert_int_eq(pkv_cache_digest(from, &digests[0]), PKV_OK);
    ck_assert_int_eq(pkv_cache_digest(to, &digests[1]), PKV_OK);
    ck_assert_uint_eq(digests[0], digests[1]);
    free(file.data);
    free(again.data);
    pkv_cache_close(from);
    pkv_cache_close(to);
}

START_TEST(round_trips)
{
    for (int factors = PKV_FACTORS_NONE; factors <= PKV_FACTORS_INT4; factors++)
        for (int dtype = PKV_F32; dtype <= PKV_BF16; dtype++)
            for (int shape = 0; shape < SHAPES; shape++)
                check_round_trip((pkv_factors)factors, (pkv_dtype)dtype, (enum shape)shape);
}
END_TEST

START_TEST(mixed_factors)
{
    pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_BF16);
    pkv_cache *cache;
    pkv_seq *seq, *copy;
    struct memory_file file;

    config.factors_v = PKV_FACTORS_INT4;
    cache = tests_open_cache(&config);
    seq = open_sequence(cache, GROWN);
    file = save(seq, NULL);
    ck_assert_int_eq(load(cache, &file, "", &copy), PKV_OK);
    ck_assert_uint_eq(digest_of(copy), digest_of(seq));
    free(file.data);
    pkv_cache_close(cache);
}
END_TEST

START_TEST(instruction_sets_exchange_sessions)
{
    const char *isas[TESTS_ISAS];
    size_t n = tests_find_isas(isas);

    for (int factors = PKV_FACTORS_NONE; factors <= PKV_FACTORS_INT4; factors++) {
        for (int dtype = PKV_F32; dtype <= PKV_BF16; dtype++) {
            for (size_t i = 0; i < n * n; i++) {
                pkv_config config = config_of((pkv_factors)factors, (pkv_dtype)dtype);
                struct memory_file file, again;
                pkv_cache *from, *to;
                pkv_seq *seq, *copy;

                config.isa = isas[i / n];
                from = tests_open_cache(&config);
                config.isa = isas[i % n];
                to = tests_open_cache(&config);
                seq = open_sequence(from, CUT_IN_PAGE);
                file = save(seq, "m");
                ck_assert_int_eq(load(to, &file, "m", &copy), PKV_OK);
                ck_assert_uint_eq(digest_of(copy), digest_of(seq));
                again = save(copy, "m");
                ck_assert_uint_eq(again.size, file.size);
                ck_assert_mem_eq(again.data, file.data, file.size);
                free(file.data);
                free(again.data);
                pkv_cache_close(from);
                pkv_cache_close(to);
            }
        }
    }
}
END_TEST

/* Where sections lie: the byte behind each one's checksum. */
struct sections {
    size_t model, user, states, layer[LAYERS];
};

static uint64_t number_at(const unsigned char *bytes)
{
    uint64_t number = 0;

    for (int i = 8; i-- > 0;)
        number = number << 8 | bytes[i];
    return number;
}

static void put_number(unsigned char *bytes, uint64_t number)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(number >> 8 * i);
}

/* The number with this index behind the magic. */
static unsigned char *number_of(const struct memory_file *file, size_t i)
{
    return file->data + 8 + 8 * i;
}

enum { TOKENS_NUMBER = 12, MODEL_ID_NUMBER, USER_NUMBER };

static struct sections find_sections(const struct memory_file *file, const pkv_stats *stats)
{
    struct sections s;

    s.model = HEADER_BYTES + number_at(number_of(file, MODEL_ID_NUMBER)) + 8 * LAYERS + 8;
    s.user = s.model + number_at(number_of(file, USER_NUMBER)) + 8;
    s.states = s.user + (number_at(number_of(file, TOKENS_NUMBER)) + LENGTH - 1) / LENGTH + 8;
    s.layer[1] = file->size;
    /* Layers differ in ranks: the last has what is left. */
    ck_assert_uint_eq(file->size, s.states + stats->payload_bytes + 8 * LAYERS);
    s.layer[0] = 0;
    return s;
}

/* Puts the right checksum behind the section [begin, end - 8). */
static void seal(const struct memory_file *file, size_t begin, size_t end)
{
    put_number(file->data + end - 8, XXH3_64bits(file->data + begin, end - 8 - begin));
}

/* The manual page's layout, read without the library. */
START_TEST(format)
{
    static const uint64_t expected[] = {1,
                                        LAYERS,
                                        QUERY_HEADS,
                                        KV_HEADS,
                                        DIM,
                                        LENGTH,
                                        1,
                                        2,
                                        PKV_FACTORS_NATIVE,
                                        PKV_FACTORS_INT4,
                                        PKV_F32,
                                        0x3e800000 /* 1 / sqrt(16) */,
                                        TOKENS,
                                        3,
                                        sizeof user_data};
    pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_F32);
    pkv_stats stats = {.struct_size = sizeof stats};
    struct memory_file file;
    struct sections s;
    pkv_cache *cache;
    pkv_seq *seq;
    float k[LENGTH * DIM], v[LENGTH * DIM];
    size_t layer_0;

    config.factors_v = PKV_FACTORS_INT4;
    cache = tests_open_cache(&config);
    seq = open_sequence(cache, GROWN);
    file = save(seq, "a/b");
    ck_assert_int_eq(pkv_seq_stats(seq, &stats), PKV_OK);
    s = find_sections(&file, &stats);
    ck_assert_mem_eq(file.data, "\x89PKV\r\n\x1a\n", 8);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        ck_assert_msg(number_at(number_of(&file, i)) == expected[i], "number %zu", i);
    ck_assert_uint_eq(number_at(file.data + HEADER_BYTES - 8),
                      XXH3_64bits(file.data, HEADER_BYTES - 8));
    ck_assert_mem_eq(file.data + HEADER_BYTES, "a/b\5\0\0\0\3\0\0\0\10\0\0\0\6\0\0\0", 19);
    ck_assert_uint_eq(number_at(file.data + s.model - 8),
                      XXH3_64bits(file.data + HEADER_BYTES, 19));
    ck_assert_mem_eq(file.data + s.model, user_data, sizeof user_data);
    ck_assert_uint_eq(number_at(file.data + s.user - 8),
                      XXH3_64bits(file.data + s.model, sizeof user_data));
    ck_assert_mem_eq(file.data + s.user, "\2\4\4\4\4\4\4\4\3\3\1", 11);
    ck_assert_uint_eq(number_at(file.data + s.states - 8), XXH3_64bits(file.data + s.user, 11));

    /* Dense: sink, two pages and three tokens. Factors: K in f32; V's codes, then scales. */
    layer_0 = KV_HEADS * ((3 * LENGTH + 3) * 2 * DIM * 4 + 7 * (5 * (LENGTH + DIM) * 4) +
                          7 * (3 * (LENGTH + DIM) / 2 + 2 * (LENGTH + DIM)));
    ck_assert_uint_eq(number_at(file.data + s.states + layer_0),
                      XXH3_64bits(file.data + s.states, layer_0));
    ck_assert_uint_eq(
        number_at(file.data + file.size - 8),
        XXH3_64bits(file.data + s.states + layer_0 + 8, file.size - s.states - layer_0 - 16));
    ck_assert_int_eq(pkv_seq_read_page(seq, 0, 0, 0, k, v), PKV_OK);
    for (size_t i = 0; i < LENGTH * DIM; i++) {
        uint32_t bits = (uint32_t)number_at(file.data + s.states + 4 * i);

        ck_assert_uint_eq(bits, f32_bits(k[i]));
        bits = (uint32_t)number_at(file.data + s.states + 4 * (LENGTH * DIM + i));
        ck_assert_uint_eq(bits, f32_bits(v[i]));
    }
    free(file.data);
    pkv_cache_close(cache);
}
END_TEST

START_TEST(overhead)
{
    pkv_stats stats = {.struct_size = sizeof stats};
    pkv_config config;
    struct memory_file file;
    pkv_cache *cache;

    config = config_of(PKV_FACTORS_INT4, PKV_BF16);
    cache = tests_open_cache(&config);
    file = save(open_sequence(cache, GROWN), "m");
    ck_assert_int_eq(pkv_cache_stats(cache, &stats), PKV_OK);
    find_sections(&file, &stats);
    free(file.data);
    pkv_cache_close(cache);
}
END_TEST

/* ---- Damage ---- */

static void check_damage(pkv_factors factors, pkv_dtype dtype, size_t flips)
{
    const pkv_config config = config_of(factors, dtype);
    struct target target = open_target(&config);
    pkv_cache *from = tests_open_cache(&config);
    struct memory_file file = save(open_sequence(from, CUT_AND_GROWN), "m");

    tests_seed(7);
    for (size_t size = 0; size < file.size; size += size < 400 ? 1 : 1 + tests_random() % 61) {
        struct memory_file cut = file;

        cut.size = size;
        refuse(&target, &cut, "m", PKV_ERROR_FORMAT, "ends in it");
    }
    for (size_t i = 0; i < flips; i++) {
        size_t at = i < 400 ? i : tests_random() % file.size;
        unsigned char flip = (unsigned char)(1 + tests_random() % 255);

        file.data[at] ^= flip;
        refuse(&target, &file, "m", PKV_ERROR_FORMAT, "");
        file.data[at] ^= flip;
    }
    free(file.data);
    pkv_cache_close(from);
    pkv_cache_close(target.cache);
}

START_TEST(damage_is_refused)
{
    check_damage(PKV_FACTORS_NATIVE, PKV_BF16, 4000);
    check_damage(PKV_FACTORS_INT4, PKV_F16, 4000);
    check_damage(PKV_FACTORS_NONE, PKV_F32, 2000);
}
END_TEST

/* Files that only someone who knows the format makes: their checksums are right. */
START_TEST(hostile_states)
{
    static const struct {
        enum shape shape;
        size_t page;
        pkv_page_state state;
    } states[] = {{GROWN, 0, PKV_PAGE_FACTORIZED},  {GROWN, 0, PKV_PAGE_WINDOW},
                  {GROWN, 0, PKV_PAGE_EMPTY},       {GROWN, 1, PKV_PAGE_WINDOW},
                  {GROWN, 1, PKV_PAGE_SINK},        {GROWN, 7, PKV_PAGE_WINDOW},
                  {GROWN, 8, PKV_PAGE_FILLING},     {GROWN, 10, PKV_PAGE_FACTORIZED},
                  {GROWN, 10, PKV_PAGE_WINDOW},     {GROWN, 10, PKV_PAGE_EMPTY},
                  {GROWN, 9, (pkv_page_state)5},    {GROWN, 9, (pkv_page_state)255},
                  {SHORT, 0, PKV_PAGE_SINK},        {CUT_AT_PAGE, 2, PKV_PAGE_WINDOW},
                  {CUT_IN_PAGE, 5, PKV_PAGE_EMPTY}, {CUT_IN_PAGE, 5, PKV_PAGE_FACTORIZED}};
    const pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_F32);
    struct target target = open_target(&config);

    for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
        pkv_stats stats = {.struct_size = sizeof stats};
        pkv_cache *from = tests_open_cache(&config);
        pkv_seq *seq = open_sequence(from, states[i].shape);
        struct memory_file file = save(seq, "m");
        struct sections s;
        char text[40];

        ck_assert_int_eq(pkv_seq_stats(seq, &stats), PKV_OK);
        s = find_sections(&file, &stats);
        ck_assert_int_ne(file.data[s.user + states[i].page], states[i].state);
        file.data[s.user + states[i].page] = (unsigned char)states[i].state;
        seal(&file, s.user, s.states);
        snprintf(text, sizeof text, "page states: page %zu ", states[i].page);
        refuse(&target, &file, "m", PKV_ERROR_FORMAT, text);
        free(file.data);
        pkv_cache_close(from);
    }
    pkv_cache_close(target.cache);
}
END_TEST

START_TEST(hostile_sizes)
{
    static const struct {
        size_t number;
        uint64_t value;
        pkv_status status;
        const char *text;
    } sizes[] = {
        {TOKENS_NUMBER, UINT64_MAX, PKV_ERROR_CAPACITY, "tokens: "},
        {TOKENS_NUMBER, 2 * MAX_TOKENS - 42, PKV_ERROR_CAPACITY, "tokens: "},
        {TOKENS_NUMBER, TOKENS + LENGTH, PKV_ERROR_FORMAT, "page states: "},
        {TOKENS_NUMBER, TOKENS + 1, PKV_ERROR_FORMAT, "layer 0: "},
        {TOKENS_NUMBER, 0, PKV_ERROR_FORMAT, "page states: "},
        {MODEL_ID_NUMBER, UINT64_MAX, PKV_ERROR_FORMAT, "model_id: "},
        {MODEL_ID_NUMBER, 256, PKV_ERROR_FORMAT, "model_id: "},
        {MODEL_ID_NUMBER, 2, PKV_ERROR_FORMAT, "model: "},
        {USER_NUMBER, UINT64_MAX, PKV_ERROR_CAPACITY, "user_bytes: "},
        {USER_NUMBER, sizeof user_data + 1, PKV_ERROR_CAPACITY, "user_bytes: "},
        {USER_NUMBER, sizeof user_data - 1, PKV_ERROR_FORMAT, "user data: "},
    };
    const pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_F32);
    struct target target = open_target(&config);
    pkv_cache *from = tests_open_cache(&config);
    pkv_seq *seq = open_sequence(from, GROWN);

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct memory_file file = save(seq, "m");

        put_number(number_of(&file, sizes[i].number), sizes[i].value);
        seal(&file, 0, HEADER_BYTES);
        refuse(&target, &file, "m", sizes[i].status, sizes[i].text);
        free(file.data);
    }
    pkv_cache_close(from);
    pkv_cache_close(target.cache);
}
END_TEST

/* Every value of a type, in the first element of the sink's K. */
static void check_values(pkv_dtype dtype)
{
    const pkv_config config = config_of(PKV_FACTORS_NONE, dtype);
    struct target target = open_target(&config);
    pkv_cache *from = tests_open_cache(&config);
    pkv_stats stats = {.struct_size = sizeof stats};
    pkv_seq *seq = open_sequence(from, GROWN), *copy;
    struct memory_file file = save(seq, "m");
    struct sections s;
    size_t layer_bytes;

    ck_assert_int_eq(pkv_seq_stats(seq, &stats), PKV_OK);
    s = find_sections(&file, &stats);
    layer_bytes = (file.size - s.states) / LAYERS;
    for (uint32_t value = 0; value < 0x10000; value += 7) {
        size_t bytes = dtype == PKV_F32 ? 4 : 2;
        uint32_t bits = dtype == PKV_F32 ? value << 16 | 1 : value;
        float x = dtype == PKV_F32   ? f32_from_bits(bits)
                  : dtype == PKV_F16 ? f16_to_f32((uint16_t)bits)
                                     : bf16_to_f32((uint16_t)bits);

        for (size_t i = 0; i < bytes; i++)
            file.data[s.states + i] = (unsigned char)(bits >> 8 * i);
        seal(&file, s.states, s.states + layer_bytes);
        if (isfinite(x)) {
            require(load(target.cache, &file, "m", &copy) == PKV_OK);
            require(pkv_seq_close(copy) == PKV_OK);
        } else {
            refuse(&target, &file, "m", PKV_ERROR_FORMAT, "layer 0, KV head 0, page 0: K ");
        }
    }
    free(file.data);
    pkv_cache_close(from);
    pkv_cache_close(target.cache);
}

START_TEST(hostile_values)
{
    for (int dtype = PKV_F32; dtype <= PKV_BF16; dtype++)
        check_values((pkv_dtype)dtype);
}
END_TEST

START_TEST(hostile_codes)
{
    /* Of page 1 of KV head 0, behind the sink: R_V is last, codes [r, d] and d scales. */
    const size_t sink = 2 * LENGTH * DIM * 4;
    const size_t factors = (5 + 3) * (LENGTH + DIM) / 2 + 2 * (5 + DIM + LENGTH + DIM);
    const pkv_config config = config_of(PKV_FACTORS_INT4, PKV_F32);
    struct target target = open_target(&config);
    pkv_cache *from = tests_open_cache(&config);
    pkv_stats stats = {.struct_size = sizeof stats};
    pkv_seq *seq = open_sequence(from, GROWN);
    struct memory_file file = save(seq, "m");
    struct sections s = {0};
    const size_t layer_bytes = KV_HEADS * ((3 * LENGTH + 3) * 2 * DIM * 4 + 7 * factors) + 8;
    static const uint16_t scales[] = {0x7c00, 0x7e00, 0xfc00, 0x8000, 0xb800};

    ck_assert_int_eq(pkv_seq_stats(seq, &stats), PKV_OK);
    s = find_sections(&file, &stats);
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        unsigned char *scale = file.data + s.states + sink + factors - 2 * DIM;
        unsigned char old[2] = {scale[0], scale[1]};

        scale[0] = (unsigned char)scales[i];
        scale[1] = (unsigned char)(scales[i] >> 8);
        seal(&file, s.states, s.states + layer_bytes);
        refuse(&target, &file, "m", PKV_ERROR_FORMAT, "layer 0, KV head 0, page 1: R_V ");
        memcpy(scale, old, 2);
    }
    for (int nibble = 0; nibble < 2; nibble++) {
        unsigned char *code = file.data + s.states + sink;
        unsigned char old = *code;

        *code = nibble ? (unsigned char)((old & 0x0f) | 0x80) : (unsigned char)((old & 0xf0) | 8);
        seal(&file, s.states, s.states + layer_bytes);
        refuse(&target, &file, "m", PKV_ERROR_FORMAT, "layer 0, KV head 0, page 1: L_K ");
        *code = old;
    }
    seal(&file, s.states, s.states + layer_bytes);
    ck_assert_int_eq(load(target.cache, &file, "m", &seq), PKV_OK);
    free(file.data);
    pkv_cache_close(from);
    pkv_cache_close(target.cache);
}
END_TEST

START_TEST(hostile_model_id_is_printable)
{
    const pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_F32);
    struct target target = open_target(&config);
    pkv_cache *from = tests_open_cache(&config);
    char id[PKV_MODEL_ID_BYTES];
    struct memory_file file;

    memset(id, '\n', sizeof id - 1);
    id[sizeof id - 1] = '\0';
    file = save(open_sequence(from, GROWN), id);
    refuse(&target, &file, "own\x1b[1m", PKV_ERROR_MISMATCH, "\", not \"own?[1m\"");
    free(file.data);
    pkv_cache_close(from);
    pkv_cache_close(target.cache);
}
END_TEST

/* ---- Other settings ---- */

#define MISMATCH(assignment, text)                                                                 \
    do {                                                                                           \
        pkv_config c = config_of(PKV_FACTORS_NATIVE, PKV_BF16);                                    \
        pkv_cache *cache;                                                                          \
        pkv_seq *seq;                                                                              \
        assignment;                                                                                \
        cache = tests_open_cache(&c);                                                              \
        ck_assert_int_eq(load(cache, &file, "m", &seq), PKV_ERROR_MISMATCH);                       \
        ck_assert_str_eq(pkv_cache_message(cache), text);                                          \
        pkv_cache_close(cache);                                                                    \
    } while (0)

START_TEST(other_settings_are_named)
{
    static const size_t other_k[LAYERS] = {5, 7}, other_v[LAYERS] = {2, 6};
    const pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_BF16);
    struct target target = open_target(&config);
    pkv_cache *from = tests_open_cache(&config);
    struct memory_file file = save(open_sequence(from, GROWN), "m");

    MISMATCH(c.layers = 1, "layers: the session has 2, the cache 1");
    MISMATCH(c.query_heads = 2, "query_heads: the session has 4, the cache 2");
    MISMATCH(c.kv_heads = 4, "kv_heads: the session has 2, the cache 4");
    MISMATCH(c.head_dim = 24, "head_dim: the session has 16, the cache 24");
    MISMATCH(c.page_tokens = 16, "page_tokens: the session has 8, the cache 16");
    MISMATCH(c.sink_pages = 0, "sink_pages: the session has 1, the cache 0");
    MISMATCH(c.window_pages = 1, "window_pages: the session has 2, the cache 1");
    MISMATCH(c.factors_k = PKV_FACTORS_INT4, "factors_k: the session has 1, the cache 2");
    MISMATCH(c.factors_v = PKV_FACTORS_INT4, "factors_v: the session has 1, the cache 2");
    MISMATCH(c.dtype = PKV_F16, "dtype: the session has 2, the cache 1");
    MISMATCH(c.softmax_scale = 0.5f, "softmax_scale: the session has 0.25, the cache 0.5");
    MISMATCH(c.layer_rank_k = other_k,
             "ranks: in layer 1 the session has 8 of K and 6 of V, the cache 7 and 6");
    MISMATCH(c.layer_rank_v = other_v,
             "ranks: in layer 0 the session has 5 of K and 3 of V, the cache 5 and 2");
    refuse(&target, &file, "n", PKV_ERROR_MISMATCH, "model_id: the session has \"m\", not \"n\"");
    refuse(&target, &file, "mm", PKV_ERROR_MISMATCH, "model_id: ");
    refuse(&target, &file, NULL, PKV_ERROR_MISMATCH, "model_id: ");
    put_number(number_of(&file, 0), 2);
    refuse(&target, &file, "m", PKV_ERROR_FORMAT, "version: 2; this library reads 1");
    file.data[0] = 'x';
    refuse(&target, &file, "m", PKV_ERROR_FORMAT, "magic: ");
    free(file.data);
    pkv_cache_close(from);
    pkv_cache_close(target.cache);
}
END_TEST

/* ---- Failures ---- */

START_TEST(calls_in_error)
{
    const pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_F32);
    pkv_cache *cache = tests_open_cache(&config);
    pkv_seq *seq = open_sequence(cache, GROWN), *copy;
    struct memory_file file = save(seq, "m");
    const pkv_writer writer = {write_memory, &file}, no_writer = {NULL, NULL};
    const pkv_reader reader = {read_memory, &file}, no_reader = {NULL, NULL};
    pkv_session session = session_of("m"), other = session_of("m");
    pkv_session_info info = {.struct_size = sizeof info};
    char message[PKV_MESSAGE_BYTES], long_id[PKV_MODEL_ID_BYTES + 1];
    const pkv_step_item item = {seq, 1};
    size_t size = file.size;
    pkv_step *open;

    other.struct_size--;
    memset(long_id, 'x', sizeof long_id - 1);
    long_id[sizeof long_id - 1] = '\0';
    ck_assert_int_eq(pkv_seq_save(NULL, &session, &writer), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_save(seq, NULL, &writer), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_save(seq, &other, &writer), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_save(seq, &session, NULL), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_save(seq, &session, &no_writer), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load(NULL, &session, &reader, &copy), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load(cache, NULL, &reader, &copy), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load(cache, &other, &reader, &copy), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load(cache, &session, NULL, &copy), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load(cache, &session, &no_reader, &copy), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load(cache, &session, &reader, NULL), PKV_ERROR_ARGUMENT);
    other = session_of(long_id);
    ck_assert_int_eq(pkv_seq_save(seq, &other, &writer), PKV_ERROR_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(pkv_cache_message(cache), "model_id: "));
    ck_assert_int_eq(pkv_seq_load(cache, &other, &reader, &copy), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_save_file(NULL, &session, "x"), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, NULL), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, ""), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load_file(NULL, &session, "x", &copy), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load_file(cache, &session, NULL, &copy), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_seq_load_file(cache, &session, "x", NULL), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(pkv_session_info_of(NULL, &info, message), PKV_ERROR_ARGUMENT);
    ck_assert_str_eq(message, "reader: NULL");
    ck_assert_int_eq(pkv_session_info_of(&reader, NULL, NULL), PKV_ERROR_ARGUMENT);
    info.struct_size = 0;
    ck_assert_int_eq(pkv_session_info_of(&reader, &info, message), PKV_ERROR_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(message, "struct_size: "));
    ck_assert_int_eq(pkv_session_info_of_file(NULL, &info, NULL), PKV_ERROR_ARGUMENT);

    ck_assert_int_eq(pkv_step_begin(cache, &item, 1, &open), PKV_OK);
    ck_assert_int_eq(pkv_seq_save(seq, &session, &writer), PKV_ERROR_BUSY);
    /* Others come and go beside an open step. */
    ck_assert_int_eq(load(cache, &file, "m", &copy), PKV_OK);
    ck_assert_int_eq(pkv_seq_save(copy, &session, &writer), PKV_OK);
    pkv_step_abort(open);
    ck_assert_uint_eq(file.size, 2 * size);
    ck_assert_mem_eq(file.data, file.data + size, size);
    free(file.data);
    pkv_cache_close(cache);
}
END_TEST

START_TEST(streams)
{
    const pkv_config config = config_of(PKV_FACTORS_INT4, PKV_BF16);
    struct target target = open_target(&config);
    pkv_cache *from = tests_open_cache(&config);
    pkv_seq *seq = open_sequence(from, GROWN), *copy;
    struct memory_file file = save(seq, "m");
    struct memory_file two = {.fail_at = SIZE_MAX};
    const pkv_writer writer = {write_memory, &two};
    const pkv_reader reader = {read_memory, &two};
    pkv_session session = session_of("m");
    pkv_session_info info = {.struct_size = sizeof info};
    uint64_t digest = digest_of(seq);
    char message[PKV_MESSAGE_BYTES] = "x";

    /* A reader that gives a byte at a time; one without the user's data. */
    file.most = 1;
    ck_assert_int_eq(load(target.cache, &file, "m", &copy), PKV_OK);
    ck_assert_uint_eq(digest_of(copy), digest);
    ck_assert_int_eq(pkv_seq_close(copy), PKV_OK);

    /* Two sessions one behind the other. */
    session.user_bytes = 0;
    ck_assert_int_eq(pkv_seq_save(seq, &session, &writer), PKV_OK);
    step(seq, from, 1, 9, NULL);
    session = session_of("m");
    ck_assert_int_eq(pkv_seq_save(seq, &session, &writer), PKV_OK);
    ck_assert_int_eq(pkv_session_info_of(&reader, &info, message), PKV_OK);
    ck_assert_str_eq(message, "");
    ck_assert_uint_eq(info.tokens, TOKENS);
    ck_assert_uint_eq(info.user_bytes, 0);
    two.at = 0;
    ck_assert_int_eq(pkv_seq_load(target.cache, &session, &reader, &copy), PKV_OK);
    ck_assert_uint_eq(session.user_bytes, 0);
    ck_assert_uint_eq(digest_of(copy), digest);
    session.user = NULL;
    ck_assert_int_eq(pkv_seq_load(target.cache, &session, &reader, &copy), PKV_OK);
    ck_assert_uint_eq(session.user_bytes, sizeof user_data);
    ck_assert_uint_eq(digest_of(copy), digest_of(seq));
    ck_assert_uint_eq(two.at, two.size);
    ck_assert_int_eq(pkv_session_info_of(&reader, &info, message), PKV_ERROR_FORMAT);
    ck_assert_str_eq(message, "header: the session ends in it");
    free(two.data);
    free(file.data);
    pkv_cache_close(from);
    pkv_cache_close(target.cache);
}
END_TEST

START_TEST(streams_that_fail)
{
    const pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_BF16);
    struct target target = open_target(&config);
    pkv_cache *from = tests_open_cache(&config);
    pkv_seq *seq = open_sequence(from, GROWN);
    struct memory_file file = save(seq, "m");
    const pkv_session session = session_of("m");
    struct view before = view_of(from);

    for (size_t at = 0; at < file.size; at += at < 300 ? 1 : 17) {
        struct memory_file partial = {.fail_at = at};
        const pkv_writer writer = {write_memory, &partial};
        struct view after;

        require(pkv_seq_save(seq, &session, &writer) == PKV_ERROR_IO);
        after = view_of(from);
        require(memcmp(&before, &after, sizeof after) == 0);
        require(partial.size <= at);
        require(partial.size == 0 || memcmp(partial.data, file.data, partial.size) == 0);
        free(partial.data);

        partial = file;
        partial.fail_at = at;
        refuse(&target, &partial, "m", PKV_ERROR_IO, "read failed");
    }
    free(file.data);
    pkv_cache_close(from);
    pkv_cache_close(target.cache);
}
END_TEST

START_TEST(capacity)
{
    pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_F32);
    pkv_cache *from = tests_open_cache(&config);
    pkv_seq *seq = open_sequence(from, GROWN), *copies[3];
    struct memory_file file = save(seq, "m");
    struct target target;

    /* Sequences and tokens. */
    config.max_tokens = 2 * TOKENS + 5 * LENGTH + 3;
    target = open_target(&config);
    ck_assert_int_eq(load(target.cache, &file, "m", &copies[0]), PKV_OK);
    ck_assert_int_eq(load(target.cache, &file, "m", &copies[1]), PKV_OK);
    target.before = view_of(target.cache);
    refuse(&target, &file, "m", PKV_ERROR_CAPACITY, "tokens: ");
    ck_assert_int_eq(pkv_seq_truncate(copies[0], 0), PKV_OK);
    target.before = view_of(target.cache);
    refuse(&target, &file, "m", PKV_ERROR_CAPACITY, "max_sequences: ");
    ck_assert_int_eq(pkv_seq_close(copies[0]), PKV_OK);
    ck_assert_int_eq(load(target.cache, &file, "m", &copies[2]), PKV_OK);
    ck_assert_uint_eq(digest_of(copies[2]), digest_of(seq));
    pkv_cache_close(target.cache);

    /* What forks share counts once. */
    config.max_tokens = 2 * TOKENS + 1;
    target.cache = tests_open_cache(&config);
    ck_assert_int_eq(load(target.cache, &file, "m", &copies[0]), PKV_OK);
    ck_assert_int_eq(pkv_seq_fork(copies[0], &copies[1]), PKV_OK);
    ck_assert_int_eq(load(target.cache, &file, "m", &copies[2]), PKV_OK);
    step(copies[2], target.cache, 1, 5, NULL);
    pkv_cache_close(target.cache);

    config.max_tokens = TOKENS - 1;
    target.cache = tests_open_cache(&config);
    target.before = view_of(target.cache);
    refuse(&target, &file, "m", PKV_ERROR_CAPACITY, "tokens: ");
    pkv_cache_close(target.cache);
    free(file.data);
    pkv_cache_close(from);
}
END_TEST

START_TEST(every_allocation_fails)
{
    struct counting_allocator counting = {0};
    pkv_config config = config_of(PKV_FACTORS_INT4, PKV_F16);
    pkv_cache *from = tests_open_cache(&config), *cache;
    struct memory_file file = save(open_sequence(from, GROWN), "m");
    const pkv_session session = session_of("m");
    char folder[TESTS_FOLDER_BYTES], path[TESTS_FOLDER_BYTES + 8];
    pkv_status status = PKV_ERROR_MEMORY;
    struct target target;
    pkv_seq *seq;
    size_t failed = 0;

    config.allocator = counting_allocator(&counting);
    cache = tests_open_cache(&config);
    target = (struct target){cache, view_of(cache)};
    for (size_t at = 1; status != PKV_OK; at++) {
        counting.calls = 0;
        counting.fail_at = at;
        status = load(cache, &file, "m", &seq);
        counting.fail_at = 0;
        if (status != PKV_OK) {
            struct view after = view_of(cache);

            ck_assert_int_eq(status, PKV_ERROR_MEMORY);
            ck_assert_mem_eq(&after, &target.before, sizeof after);
            failed++;
        }
    }
    ck_assert_uint_eq(failed, 2);

    tests_make_folder(folder);
    snprintf(path, sizeof path, "%s/s", folder);
    counting.calls = 0;
    counting.fail_at = 1;
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path), PKV_ERROR_MEMORY);
    ck_assert_int_eq(access(path, F_OK), -1);
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path), PKV_OK);
    ck_assert_uint_eq(counting.calls, 2);
    tests_remove_folder(folder);
    free(file.data);
    pkv_cache_close(from);
    pkv_cache_close(cache);
    ck_assert_uint_eq(counting.live, 0);
}
END_TEST

/* ---- Files ---- */

static char folder[TESTS_FOLDER_BYTES];

static const char *path_of(const char *name)
{
    static char path[TESTS_FOLDER_BYTES + 32];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *path, const void *data, size_t bytes, const char *mode)
{
    FILE *file = fopen(path, mode);

    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(data, 1, bytes, file), bytes);
    ck_assert_int_eq(fclose(file), 0);
}

static mode_t mode_of(const char *path)
{
    struct stat status;

    ck_assert_int_eq(lstat(path, &status), 0);
    return status.st_mode;
}

START_TEST(files)
{
    const pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_BF16);
    pkv_cache *cache = tests_open_cache(&config);
    pkv_seq *seq = open_sequence(cache, GROWN), *copy;
    const pkv_session session = session_of("m");
    pkv_session loaded = session_of("m");
    pkv_session_info info = {.struct_size = sizeof info};
    struct memory_file file = save(seq, "m");
    char message[PKV_MESSAGE_BYTES] = "x";
    unsigned char *back = malloc(file.size + 1);
    FILE *stream;

    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("s")), PKV_OK);
    stream = fopen(path_of("s"), "rb");
    ck_assert_uint_eq(fread(back, 1, file.size + 1, stream), file.size);
    fclose(stream);
    ck_assert_mem_eq(back, file.data, file.size);
    ck_assert_uint_eq(mode_of(path_of("s")), S_IFREG | 0600);
    ck_assert_int_eq(pkv_session_info_of_file(path_of("s"), &info, message), PKV_OK);
    ck_assert_str_eq(message, "");
    ck_assert_uint_eq(info.tokens, TOKENS);
    ck_assert_uint_eq(info.user_bytes, sizeof user_data);
    ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("s"), &copy), PKV_OK);
    ck_assert_uint_eq(digest_of(copy), digest_of(seq));
    ck_assert_int_eq(pkv_seq_close(copy), PKV_OK);

    /* Replaced through a link, with its mode. */
    ck_assert_int_eq(chmod(path_of("s"), 0640), 0);
    ck_assert_int_eq(symlink("s", path_of("link")), 0);
    ck_assert_int_eq(pkv_seq_truncate(seq, 50), PKV_OK);
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("link")), PKV_OK);
    ck_assert_uint_eq(mode_of(path_of("link")) & S_IFMT, S_IFLNK);
    ck_assert_uint_eq(mode_of(path_of("s")), S_IFREG | 0640);
    ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("s"), &copy), PKV_OK);
    ck_assert_uint_eq(digest_of(copy), digest_of(seq));
    ck_assert_int_eq(pkv_seq_close(copy), PKV_OK);
    ck_assert_uint_eq(tests_count_files(folder), 2);

    /* A byte too many, and what is no file. */
    write_file(path_of("s"), "", 1, "ab");
    ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("s"), &copy), PKV_ERROR_FORMAT);
    ck_assert_ptr_null(copy);
    ck_assert_str_eq(pkv_cache_message(cache), "end: the file goes on behind it");
    ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, folder, &copy), PKV_ERROR_IO);
    ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("none"), &copy), PKV_ERROR_IO);
    ck_assert_str_eq(pkv_cache_message(cache), "open: No such file or directory");
    ck_assert_int_eq(pkv_session_info_of_file(path_of("none"), &info, message), PKV_ERROR_IO);
    ck_assert_str_eq(message, "open: No such file or directory");
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, folder), PKV_ERROR_IO);
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("none/s")), PKV_ERROR_IO);
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, "/dev/full"), PKV_ERROR_IO);
    ck_assert_int_eq(unlink(path_of("link")), 0);
    ck_assert_int_eq(symlink("none", path_of("link")), 0);
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("link")), PKV_ERROR_IO);
    ck_assert_str_eq(pkv_cache_message(cache), "path: it is a link to nothing");
    ck_assert_uint_eq(mode_of(path_of("link")) & S_IFMT, S_IFLNK);
    ck_assert_int_eq(mkfifo(path_of("pipe"), 0600), 0);
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("pipe")), PKV_ERROR_IO);
    ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("pipe"), &copy), PKV_ERROR_IO);
    ck_assert_uint_eq(tests_count_files(folder), 3);
    free(back);
    free(file.data);
    pkv_cache_close(cache);
}
END_TEST

/* ---- What the system does ---- */

/* In this program these are the system's calls, but for what a test wants of one of them. */
enum system_call { NO_CALL, WRITE, READ, FSYNC, RENAME, FCHMOD };

static struct {
    enum system_call call;
    int at;      /* the call that fails, from 1; 0: none does */
    int error;   /* with which errno */
    size_t most; /* bytes of one read or write; 0: as many as asked for */
    int calls;
} wanted;

static bool fails(enum system_call call)
{
    if (wanted.call != call || ++wanted.calls != wanted.at)
        return false;
    errno = wanted.error;
    return true;
}

static size_t at_most(enum system_call call, size_t bytes)
{
    return wanted.call == call && wanted.most > 0 && bytes > wanted.most ? wanted.most : bytes;
}

ssize_t write(int file, const void *data, size_t bytes)
{
    return fails(WRITE) ? -1 : syscall(SYS_write, file, data, at_most(WRITE, bytes));
}

ssize_t read(int file, void *data, size_t bytes)
{
    return fails(READ) ? -1 : syscall(SYS_read, file, data, at_most(READ, bytes));
}

int fsync(int file)
{
    return fails(FSYNC) ? -1 : (int)syscall(SYS_fsync, file);
}

int rename(const char *from, const char *to)
{
    return fails(RENAME) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int fchmod(int file, mode_t mode)
{
    return fails(FCHMOD) ? -1 : (int)syscall(SYS_fchmod, file, mode);
}

START_TEST(system_calls_fail)
{
    static const struct {
        enum system_call call;
        int at, error;
        const char *message;
        bool replaced;
    } failures[] = {{WRITE, 1, ENOSPC, "write: No space left on device", false},
                    {WRITE, 2, EIO, "write: Input/output error", false},
                    {FCHMOD, 1, EPERM, "chmod: Operation not permitted", false},
                    {FSYNC, 1, EIO, "fsync: Input/output error", false},
                    {RENAME, 1, EACCES, "rename: Permission denied", false},
                    {FSYNC, 2, EIO, "fsync of the folder: Input/output error", true}};
    pkv_config config = config_of(PKV_FACTORS_NONE, PKV_F32);
    pkv_cache *cache = tests_open_cache(&config);
    pkv_seq *old = open_sequence(cache, SHORT), *seq = open_sequence(cache, GROWN), *copy;
    const pkv_session session = session_of("m");
    pkv_session loaded = session_of("m");

    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++) {
        ck_assert_int_eq(pkv_seq_save_file(old, &session, path_of("s")), PKV_OK);
        wanted.call = failures[i].call;
        wanted.at = failures[i].at;
        wanted.error = failures[i].error;
        wanted.calls = 0;
        ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("s")), PKV_ERROR_IO);
        wanted.call = NO_CALL;
        ck_assert_str_eq(pkv_cache_message(cache), failures[i].message);
        ck_assert_uint_eq(tests_count_files(folder), 1);
        ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("s"), &copy), PKV_OK);
        ck_assert_uint_eq(digest_of(copy), digest_of(failures[i].replaced ? seq : old));
        ck_assert_int_eq(pkv_seq_close(copy), PKV_OK);
    }

    /* A read that fails, and calls that are interrupted or do less than they are asked for. */
    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("s")), PKV_OK);
    for (int at = 1; at < 4; at++) {
        wanted.call = READ;
        wanted.at = at;
        wanted.error = at == 3 ? EINTR : EIO;
        wanted.calls = 0;
        ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("s"), &copy),
                         at == 3 ? PKV_OK : PKV_ERROR_IO);
        wanted.call = NO_CALL;
        if (at < 3)
            ck_assert_str_eq(pkv_cache_message(cache), "read: Input/output error");
    }
    ck_assert_int_eq(pkv_seq_close(copy), PKV_OK);
    wanted.at = 2;
    wanted.error = EINTR;
    wanted.most = 1000;
    for (enum system_call call = WRITE; call <= READ; call++) {
        wanted.call = call;
        wanted.calls = 0;
        ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("s")), PKV_OK);
        ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("s"), &copy), PKV_OK);
        wanted.call = NO_CALL;
        ck_assert_int_gt(wanted.calls, 10);
        ck_assert_uint_eq(digest_of(copy), digest_of(seq));
        ck_assert_int_eq(pkv_seq_close(copy), PKV_OK);
    }
    pkv_cache_close(cache);
}
END_TEST

/* A full disk, as a limit of a process of its own: the old file stays, and it alone. */
START_TEST(full_disk)
{
    const pkv_config config = config_of(PKV_FACTORS_NATIVE, PKV_BF16);
    pkv_cache *cache = tests_open_cache(&config);
    pkv_seq *seq = open_sequence(cache, GROWN), *copy;
    const pkv_session session = session_of("m");
    pkv_session loaded = session_of("m");
    struct memory_file file = save(seq, "m");
    uint64_t digest = digest_of(seq);

    ck_assert_int_eq(pkv_seq_save_file(seq, &session, path_of("s")), PKV_OK);
    step(seq, cache, 2, 5, NULL);
    for (size_t bytes = 0; bytes < file.size; bytes += file.size / 5) {
        pid_t child = fork();
        int status;

        if (child == 0) {
            const struct rlimit limit = {bytes, bytes};
            bool right;

            signal(SIGXFSZ, SIG_IGN);
            setrlimit(RLIMIT_FSIZE, &limit);
            right = pkv_seq_save_file(seq, &session, path_of("s")) == PKV_ERROR_IO &&
                    strcmp(pkv_cache_message(cache), "write: File too large") == 0;
            _exit(right ? 0 : 1);
        }
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert_int_eq(status, 0);
        ck_assert_uint_eq(tests_count_files(folder), 1);
        ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("s"), &copy), PKV_OK);
        ck_assert_uint_eq(digest_of(copy), digest);
        ck_assert_int_eq(pkv_seq_close(copy), PKV_OK);
    }
    free(file.data);
    pkv_cache_close(cache);
}
END_TEST

/* Killed at any moment of a save, a process leaves the old file or the new one. */
START_TEST(killed_while_saving)
{
    const pkv_config config = config_of(PKV_FACTORS_INT4, PKV_BF16);
    pkv_cache *cache = tests_open_cache(&config);
    pkv_seq *seqs[2] = {open_sequence(cache, GROWN), open_sequence(cache, CUT_IN_PAGE)}, *copy;
    const pkv_session session = session_of("m");
    pkv_session loaded = session_of("m");
    size_t files;

    ck_assert_int_eq(pkv_seq_save_file(seqs[0], &session, path_of("s")), PKV_OK);
    files = tests_count_files(folder);
    tests_seed(11);
    for (int i = 0; i < 100; i++) {
        pid_t child = fork();
        uint64_t digest;

        if (child == 0) {
            for (int j = 0;; j++)
                pkv_seq_save_file(seqs[j % 2], &session, path_of("s"));
        }
        ck_assert_int_gt(child, 0);
        usleep(tests_random() % 3000);
        ck_assert_int_eq(kill(child, SIGKILL), 0);
        ck_assert_int_eq(waitpid(child, NULL, 0), child);
        ck_assert_int_eq(pkv_seq_load_file(cache, &loaded, path_of("s"), &copy), PKV_OK);
        digest = digest_of(copy);
        ck_assert(digest == digest_of(seqs[0]) || digest == digest_of(seqs[1]));
        ck_assert_int_eq(pkv_seq_close(copy), PKV_OK);
        /* The temporary file of the save that was cut short, if that. */
        ck_assert_uint_le(tests_count_files(folder), files + 1);
        files = tests_count_files(folder);
    }
    pkv_cache_close(cache);
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
    Suite *suite = suite_create("session");
    TCase *memory = tcase_create("memory"), *disk = tcase_create("disk");

    tcase_add_test(memory, round_trips);
    tcase_add_test(memory, mixed_factors);
    tcase_add_test(memory, instruction_sets_exchange_sessions);
    tcase_add_test(memory, format);
    tcase_add_test(memory, overhead);
    tcase_add_test(memory, damage_is_refused);
    tcase_add_test(memory, hostile_states);
    tcase_add_test(memory, hostile_sizes);
    tcase_add_test(memory, hostile_values);
    tcase_add_test(memory, hostile_codes);
    tcase_add_test(memory, hostile_model_id_is_printable);
    tcase_add_test(memory, other_settings_are_named);
    tcase_add_test(memory, calls_in_error);
    tcase_add_test(memory, streams);
    tcase_add_test(memory, streams_that_fail);
    tcase_add_test(memory, capacity);
    tcase_add_test(memory, every_allocation_fails);
    suite_add_tcase(suite, memory);
    tcase_add_checked_fixture(disk, make_folder, remove_folder);
    tcase_add_test(disk, files);
    tcase_add_test(disk, system_calls_fail);
    tcase_add_test(disk, full_disk);
    tcase_add_test(disk, killed_while_saving);
    suite_add_tcase(suite, disk);
    return suite;
}

int main(void)
{
    return tests_run_on_backends(make_suite);
}
