/* SPDX-License-Identifier: MIT */
/* Structs of programs that were compiled against another version of the header. */
#include "structs.h"

#include "tests.h"

#include <string.h>

/* A struct that has grown once, and what a program of 0.1.0 and of a later version have of it. */
struct grown {
    size_t struct_size;
    uint32_t first[2];
    void *pointer;
    uint64_t added;
};

struct old {
    size_t struct_size;
    uint32_t first[2];
    void *pointer;
};

struct newer {
    struct grown grown;
    uint64_t unknown[2];
};

static const struct public_struct type = PUBLIC_STRUCT(struct grown, pointer);

START_TEST(oldest_sizes)
{
    /* What 0.1.0 had, forever. */
    const struct {
        const struct public_struct *type;
        size_t bytes;
    } cases[] = {
        {&structs_config, 200},  {&structs_footprint, 40},    {&structs_page_info, 48},
        {&structs_session, 32},  {&structs_session_info, 24}, {&structs_stats, 160},
        {&structs_step_io, 144},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* Without padding at the end, which a field could be added to unnoticed. */
        ck_assert_uint_eq(cases[i].type->oldest_bytes % sizeof(size_t), 0);
        ck_assert_uint_le(cases[i].type->oldest_bytes, cases[i].type->bytes);
        if (sizeof(size_t) == 8 && sizeof(void *) == 8)
            ck_assert_msg(cases[i].type->oldest_bytes == cases[i].bytes, "%s: %zu, was %zu",
                          cases[i].type->name, cases[i].type->oldest_bytes, cases[i].bytes);
    }
}
END_TEST

START_TEST(reads_older)
{
    struct old old = {sizeof old, {1, 2}, &old};
    struct grown ours;
    struct message message;

    memset(&ours, 0xff, sizeof ours);
    ck_assert_int_eq(structs_read(&type, &old, &ours, &message), PKV_OK);
    ck_assert_uint_eq(ours.struct_size, sizeof ours);
    ck_assert_uint_eq(ours.first[0], 1);
    ck_assert_uint_eq(ours.first[1], 2);
    ck_assert_ptr_eq(ours.pointer, &old);
    ck_assert_uint_eq(ours.added, 0);
}
END_TEST

START_TEST(reads_same)
{
    struct grown theirs = {sizeof theirs, {1, 2}, &theirs, 3}, ours;
    struct message message;

    ck_assert_int_eq(structs_read(&type, &theirs, &ours, &message), PKV_OK);
    ck_assert_mem_eq(&ours, &theirs, sizeof ours);
}
END_TEST

START_TEST(reads_newer_without_what_is_unknown)
{
    struct newer theirs = {{sizeof theirs, {1, 2}, &theirs, 3}, {0, 0}};
    struct grown ours;
    struct message message;

    ck_assert_int_eq(structs_read(&type, &theirs, &ours, &message), PKV_OK);
    ck_assert_uint_eq(ours.struct_size, sizeof ours);
    ck_assert_mem_eq(&ours.first, &theirs.grown.first, sizeof ours - sizeof(size_t));
    for (size_t i = sizeof ours; i < sizeof theirs; i++) {
        ((unsigned char *)&theirs)[i] = 1;
        memset(&ours, 0x5a, sizeof ours);
        ck_assert_int_eq(structs_read(&type, &theirs, &ours, &message), PKV_ERROR_ARGUMENT);
        ck_assert_int_eq(strncmp(message.text, "struct_size: ", 13), 0);
        ck_assert_uint_eq(ours.first[0], 0x5a5a5a5a);
        ((unsigned char *)&theirs)[i] = 0;
    }
}
END_TEST

START_TEST(refuses_sizes_of_no_version)
{
    const size_t sizes[] = {STRUCT_BYTES_MOST + sizeof(size_t), SIZE_MAX, SIZE_MAX - 7};
    unsigned char room[STRUCT_BYTES_MOST] = {0};
    struct grown ours;
    struct message message;

    for (size_t bytes = 0; bytes <= sizeof room; bytes++) {
        bool expected = bytes >= sizeof(struct old) && bytes % sizeof(size_t) == 0;

        memcpy(room, &bytes, sizeof bytes);
        require(structs_check(&type, room, &message) == (expected ? PKV_OK : PKV_ERROR_ARGUMENT));
        require(structs_read(&type, room, &ours, &message) ==
                (expected ? PKV_OK : PKV_ERROR_ARGUMENT));
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        memcpy(room, &sizes[i], sizeof sizes[i]);
        ck_assert_int_eq(structs_read(&type, room, &ours, &message), PKV_ERROR_ARGUMENT);
        ck_assert_int_eq(strncmp(message.text, "struct_size: ", 13), 0);
    }
}
END_TEST

START_TEST(fills_as_far_as_it_goes)
{
    char type_name[] = "grown";
    const struct grown ours = {0, {1, 2}, &type_name, 3};
    union {
        struct newer newer;
        struct grown grown;
        struct old old;
        unsigned char bytes[sizeof(struct newer) + 8];
    } theirs;

    for (size_t bytes = sizeof theirs.old; bytes <= sizeof theirs.newer; bytes += sizeof(size_t)) {
        memset(&theirs, 0xa5, sizeof theirs);
        theirs.old.struct_size = bytes;
        structs_write(&type, &ours, &theirs);
        ck_assert_uint_eq(theirs.old.struct_size, bytes);
        ck_assert_uint_eq(theirs.old.first[0], 1);
        ck_assert_uint_eq(theirs.old.first[1], 2);
        ck_assert_ptr_eq(theirs.old.pointer, ours.pointer);
        if (bytes >= sizeof theirs.grown)
            ck_assert_uint_eq(theirs.grown.added, 3);
        for (size_t i = sizeof theirs.grown; i < bytes; i++)
            ck_assert_uint_eq(theirs.bytes[i], 0);
        for (size_t i = bytes; i < sizeof theirs; i++)
            ck_assert_uint_eq(theirs.bytes[i], 0xa5);
    }
}
END_TEST

/* ---- Through the library's functions ---- */

/* A struct of a newer header, and something behind it that is nobody's business. */
#define NEWER(type)                                                                                \
    struct {                                                                                       \
        type known;                                                                                \
        uint64_t unknown[2];                                                                       \
        uint64_t behind;                                                                           \
    }
#define NEWER_BYTES(newer) (sizeof(newer) - sizeof(newer).behind)

#define BEHIND UINT64_C(0xa5a5a5a5a5a5a5a5)

#define CHECK_FILLED(newer)                                                                        \
    do {                                                                                           \
        ck_assert_uint_eq((newer).known.struct_size, NEWER_BYTES(newer));                          \
        ck_assert_uint_eq((newer).unknown[0], 0);                                                  \
        ck_assert_uint_eq((newer).unknown[1], 0);                                                  \
        ck_assert_uint_eq((newer).behind, BEHIND);                                                 \
    } while (0)

enum { TOKENS = 100, D = 32 };

static int write_bytes(void *opaque, const void *data, size_t bytes)
{
    return fwrite(data, 1, bytes, opaque) != bytes;
}

static ptrdiff_t read_bytes(void *opaque, void *data, size_t bytes)
{
    return (ptrdiff_t)fread(data, 1, bytes, opaque);
}

START_TEST(program_of_a_newer_header)
{
    static float x[TOKENS * D];
    NEWER(pkv_config) config;
    NEWER(pkv_footprint) footprint;
    NEWER(pkv_step_io) io = {.behind = BEHIND};
    NEWER(pkv_page_info) page;
    NEWER(pkv_stats) stats;
    NEWER(pkv_session) session = {.behind = BEHIND};
    NEWER(pkv_session_info) info;
    FILE *file = tmpfile();
    const pkv_writer writer = {write_bytes, file};
    const pkv_reader reader = {read_bytes, file};
    char user[] = "user", message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;
    pkv_seq *seq, *copy;
    pkv_step *step;

    memset(&config, 0xa5, sizeof config);
    memset(&footprint, 0xa5, sizeof footprint);
    memset(&page, 0xa5, sizeof page);
    memset(&stats, 0xa5, sizeof stats);
    memset(&info, 0xa5, sizeof info);
    for (size_t i = 0; i < TOKENS * D; i++)
        x[i] = (float)(i % 7) - (float)(i % 3);

    pkv_config_init(&config.known, NEWER_BYTES(config));
    CHECK_FILLED(config);
    ck_assert_uint_eq(config.known.page_tokens, 32);
    config.known.layers = config.known.query_heads = config.known.kv_heads = 1;
    config.known.head_dim = D;
    config.known.max_tokens = 2 * TOKENS;
    config.known.max_sequences = 2;

    config.unknown[1] = 1;
    ck_assert_int_eq(pkv_cache_open(&config.known, &cache, message), PKV_ERROR_ARGUMENT);
    ck_assert_ptr_null(cache);
    ck_assert_int_eq(strncmp(message, "struct_size: ", 13), 0);
    footprint.known.struct_size = NEWER_BYTES(footprint);
    ck_assert_int_eq(pkv_footprint_of(&config.known, TOKENS, &footprint.known, message),
                     PKV_ERROR_ARGUMENT);
    ck_assert_uint_eq(footprint.unknown[0], BEHIND);
    config.unknown[1] = 0;
    ck_assert_int_eq(pkv_footprint_of(&config.known, TOKENS, &footprint.known, message), PKV_OK);
    CHECK_FILLED(footprint);
    ck_assert_uint_eq(footprint.known.raw_bytes, TOKENS * D * 2 * 2);
    ck_assert_int_eq(pkv_cache_open(&config.known, &cache, message), PKV_OK);
    ck_assert_int_eq(pkv_seq_open(cache, &seq), PKV_OK);

    io.known = (pkv_step_io){.struct_size = NEWER_BYTES(io), .k = {.data = x}, .v = {.data = x}};
    io.unknown[0] = UINT64_C(1) << 63;
    ck_assert_int_eq(pkv_step_begin(cache, &(pkv_step_item){seq, TOKENS}, 1, &step), PKV_OK);
    ck_assert_int_eq(pkv_step_layer(step, 0, &io.known), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(strncmp(pkv_cache_message(cache), "struct_size: ", 13), 0);
    pkv_step_abort(step);
    io.unknown[0] = 0;
    ck_assert_int_eq(pkv_step_begin(cache, &(pkv_step_item){seq, TOKENS}, 1, &step), PKV_OK);
    ck_assert_int_eq(pkv_step_layer(step, 0, &io.known), PKV_OK);
    ck_assert_int_eq(pkv_step_end(step), PKV_OK);

    page.known.struct_size = NEWER_BYTES(page);
    ck_assert_int_eq(pkv_seq_page(seq, 1, &page.known), PKV_OK);
    CHECK_FILLED(page);
    ck_assert_int_eq(page.known.state, PKV_PAGE_FACTORIZED);
    stats.known.struct_size = NEWER_BYTES(stats);
    ck_assert_int_eq(pkv_cache_stats(cache, &stats.known), PKV_OK);
    CHECK_FILLED(stats);
    ck_assert_uint_eq(stats.known.tokens, TOKENS);
    memset(&stats, 0xa5, sizeof stats);
    stats.known.struct_size = NEWER_BYTES(stats);
    ck_assert_int_eq(pkv_seq_stats(seq, &stats.known), PKV_OK);
    CHECK_FILLED(stats);
    ck_assert_uint_eq(stats.known.payload_bytes, footprint.known.payload_bytes);

    session.known =
        (pkv_session){.struct_size = NEWER_BYTES(session), .user = user, .user_bytes = sizeof user};
    session.unknown[0] = 1;
    ck_assert_int_eq(pkv_seq_save(seq, &session.known, &writer), PKV_ERROR_ARGUMENT);
    ck_assert_int_eq(ftell(file), 0);
    session.unknown[0] = 0;
    ck_assert_int_eq(pkv_seq_save(seq, &session.known, &writer), PKV_OK);
    rewind(file);
    info.known.struct_size = NEWER_BYTES(info);
    ck_assert_int_eq(pkv_session_info_of(&reader, &info.known, message), PKV_OK);
    CHECK_FILLED(info);
    ck_assert_uint_eq(info.known.tokens, TOKENS);
    rewind(file);
    session.unknown[1] = 1;
    ck_assert_int_eq(pkv_seq_load(cache, &session.known, &reader, &copy), PKV_ERROR_ARGUMENT);
    session.unknown[1] = 0;
    ck_assert_int_eq(pkv_seq_load(cache, &session.known, &reader, &copy), PKV_OK);
    CHECK_FILLED(session);
    ck_assert_uint_eq(session.known.user_bytes, sizeof user);
    ck_assert_uint_eq(pkv_seq_tokens(copy), TOKENS);

    pkv_cache_close(cache);
    fclose(file);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("structs");
    TCase *rules = tcase_create("rules"), *library = tcase_create("library");

    tcase_add_test(rules, oldest_sizes);
    tcase_add_test(rules, reads_older);
    tcase_add_test(rules, reads_same);
    tcase_add_test(rules, reads_newer_without_what_is_unknown);
    tcase_add_test(rules, refuses_sizes_of_no_version);
    tcase_add_test(rules, fills_as_far_as_it_goes);
    suite_add_tcase(suite, rules);
    tcase_add_test(library, program_of_a_newer_header);
    suite_add_tcase(suite, library);
    return tests_run(suite);
}
