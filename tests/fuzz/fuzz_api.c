/* SPDX-License-Identifier: MIT */
/* Calls of the library, and what they are to do: the input is what a walk draws its numbers from.
 */
#include "../walk.h"
#include "fuzz.h"

struct draws {
    const uint8_t *data;
    size_t size;
};

/* A byte, or two; 0 at the end. */
static uint32_t below(void *opaque, uint32_t limit)
{
    struct draws *draws = opaque;
    uint32_t number = 0;

    for (uint32_t most = limit - 1; most > 0 && draws->size > 0; most >>= 8) {
        number = number << 8 | *draws->data++;
        draws->size--;
    }
    return number % limit;
}

static void stop(void *opaque, const char *file, int line, const char *what)
{
    (void)opaque;
    fuzz_fail(file, line, what);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct draws draws = {data, size};
    const struct walk_host host = {below, stop, &draws};
    struct walk_counts counts = {0};
    struct walk *walk = walk_open(&host);

    while (draws.size > 0)
        walk_on(walk);
    walk_close(walk, &counts);
    return 0;
}
