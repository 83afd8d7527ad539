/* SPDX-License-Identifier: MIT */
/* Slot pools against a plain array of reference counts, and the counted allocator below them. */
#include "fake_backend.h"

#include "tests.h" /* after message.h: see there */

#include <stdlib.h>
#include <string.h>

static struct memory counted_memory(struct counting_allocator *counting)
{
    pkv_allocator allocator = counting_allocator(counting);
    struct memory memory;

    memory_init(&memory, &allocator);
    return memory;
}

static const uint32_t counts[] = {0, 1, 2, 63, 64, 65, 127, 128, 4095, 4096, 4097, 300000};

START_TEST(ascending_until_full)
{
    struct counting_allocator counting = {0};
    struct memory memory = counted_memory(&counting);
    uint32_t count = counts[_i];
    struct slots slots;
    uint32_t slot;

    ck_assert_int_eq(slots_open(&slots, &memory, count), PKV_OK);
    for (uint32_t i = 0; i < count; i++) {
        require(slots.n_free == count - i);
        require(slots_acquire(&slots, &slot));
        require(slot == i);
        require(slots.references[slot] == 1);
    }
    require(slots.n_free == 0);
    require(!slots_acquire(&slots, &slot));

    /* Given back in any order, taken in ascending order. */
    for (uint32_t i = 0; i < count; i++)
        slots_release(&slots, (uint32_t)((uint64_t)i * 7919 % count));
    for (uint32_t i = 0; count % 7919 != 0 && i < count; i++) {
        require(slots_acquire(&slots, &slot));
        require(slot == i);
    }
    slots_close(&slots, &memory);
    ck_assert_uint_eq(memory.bytes, 0);
    ck_assert_uint_eq(counting.live, 0);
}
END_TEST

START_TEST(random_use_against_an_array)
{
    struct counting_allocator counting = {0};
    struct memory memory = counted_memory(&counting);
    uint32_t count = counts[_i] < 5000 ? counts[_i] : 5000;
    uint32_t *references = calloc(count + 1, sizeof *references);
    struct slots slots;

    ck_assert_int_eq(slots_open(&slots, &memory, count), PKV_OK);
    tests_seed(12345);
    for (int round = 0; round < 20000; round++) {
        uint32_t random = tests_random();
        uint32_t slot, lowest = 0, some = count ? (random >> 8) % count : 0;
        bool filling = round / 4000 % 2 == 0;

        if ((random >> 28) < (filling ? 11u : 5u)) {
            while (lowest < count && references[lowest] != 0)
                lowest++;
            require(slots_acquire(&slots, &slot) == (lowest < count));
            if (lowest < count) {
                require(slot == lowest);
                references[slot] = 1;
            }
        } else if (count > 0 && references[some] > 0) {
            if (random & 64) {
                slots_retain(&slots, some);
                references[some]++;
            } else {
                slots_release(&slots, some);
                references[some]--;
            }
        }
    }

    uint32_t n_free = 0;

    for (uint32_t i = 0; i < count; i++) {
        require(slots.references[i] == references[i]);
        n_free += references[i] == 0;
    }
    require(slots.n_free == n_free);
    free(references);
    slots_close(&slots, &memory);
}
END_TEST

START_TEST(open_without_memory)
{
    struct counting_allocator counting = {0};
    struct memory memory = counted_memory(&counting);
    struct slots slots;

    for (size_t at = 1; at <= 2; at++) {
        counting.calls = 0;
        counting.fail_at = at;
        ck_assert_int_eq(slots_open(&slots, &memory, 100), PKV_ERROR_MEMORY);
        ck_assert_uint_eq(counting.live, 0);
        ck_assert_uint_eq(memory.bytes, 0);
    }
    counting.calls = 0;
    counting.fail_at = 3;
    ck_assert_int_eq(slots_open(&slots, &memory, 100), PKV_OK);
    slots_close(&slots, &memory);
}
END_TEST

START_TEST(memory_is_counted_and_aligned)
{
    struct counting_allocator counting = {0};
    struct memory memory = counted_memory(&counting);
    void *blocks[50];
    size_t bytes = 0;

    for (size_t i = 0; i < 50; i++) {
        blocks[i] = memory_allocate(&memory, i, 3);
        ck_assert_ptr_nonnull(blocks[i]);
        ck_assert_uint_eq((uintptr_t)blocks[i] % 64, 0);
        memset(blocks[i], (int)i, i * 3);
        bytes += i == 0 ? 1 : i * 3;
        ck_assert_uint_eq(memory.bytes, bytes);
    }
    ck_assert_uint_eq(memory.peak_bytes, bytes);
    for (size_t i = 0; i < 50; i++) {
        for (size_t j = 0; j < i * 3; j++)
            ck_assert_uint_eq(((unsigned char *)blocks[i])[j], i);
        memory_release(&memory, blocks[i]);
    }
    memory_release(&memory, NULL);
    ck_assert_uint_eq(memory.bytes, 0);
    ck_assert_uint_eq(memory.peak_bytes, bytes);
    ck_assert_uint_eq(counting.live, 0);

    counting.calls = 0;
    ck_assert_ptr_null(memory_allocate(&memory, SIZE_MAX / 2, 3));
    ck_assert_ptr_null(memory_allocate(&memory, SIZE_MAX, 1));
    ck_assert_uint_eq(counting.calls, 0);
    counting.fail_at = 1;
    ck_assert_ptr_null(memory_allocate(&memory, 1, 1));
    ck_assert_uint_eq(memory.bytes, 0);
}
END_TEST

START_TEST(memory_defaults_to_malloc)
{
    pkv_allocator none = {0};
    struct memory memory;

    memory_init(&memory, &none);

    char *block = memory_allocate(&memory, 1000, 1);

    ck_assert_ptr_nonnull(block);
    memset(block, 1, 1000);
    memory_release(&memory, block);
    ck_assert_uint_eq(memory.bytes, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("slots");
    TCase *test = tcase_create("slots");
    int n = sizeof counts / sizeof *counts;

    tcase_add_loop_test(test, ascending_until_full, 0, n);
    tcase_add_loop_test(test, random_use_against_an_array, 0, n);
    tcase_add_test(test, open_without_memory);
    tcase_add_test(test, memory_is_counted_and_aligned);
    tcase_add_test(test, memory_defaults_to_malloc);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
