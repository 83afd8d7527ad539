/* SPDX-License-Identifier: MIT */
/* How fast this machine's threads read memory. */
#define _GNU_SOURCE /* MADV_HUGEPAGE */
#include "read_bandwidth.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "options.h"

/* As far ahead memory is asked for: processors that wait for their own prefetching, which stops at
 * the ends of pages, read at no more than half of what they can. Of the second-level cache, which
 * takes more requests at a time than the first. */
#define AHEAD ((size_t)4 << 10)

/* What one addition takes; the compiler splits it into the vectors that it has. */
typedef uint64_t block __attribute__((vector_size(64)));

struct read_bandwidth {
    unsigned threads;
    block *buffer; /* [READ_BANDWIDTH_BYTES / sizeof(block)] */
};

bool read_bandwidth_open(unsigned threads, struct read_bandwidth **bandwidth, struct error *error)
{
    struct read_bandwidth *b = calloc(1, sizeof *b);
    void *buffer;

    *bandwidth = NULL;
    if (b == NULL)
        return error_set(error, "out of memory");
    buffer = mmap(NULL, READ_BANDWIDTH_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                  -1, 0);
    if (buffer == MAP_FAILED) {
        free(b);
        return error_set(error, "memory to read from: %s", strerror(errno));
    }
    madvise(buffer, READ_BANDWIDTH_BYTES, MADV_HUGEPAGE);
    /* Pages that nobody has written to would all be one page of zeros. */
    memset(buffer, 1, READ_BANDWIDTH_BYTES);
    *b = (struct read_bandwidth){threads, buffer};
    *bandwidth = b;
    return true;
}

void read_bandwidth_close(struct read_bandwidth *bandwidth)
{
    if (bandwidth == NULL)
        return;
    munmap(bandwidth->buffer, READ_BANDWIDTH_BYTES);
    free(bandwidth);
}

/* Two sums, so that no addition waits for the one before it. */
static void sum_up(const block *from, size_t count)
{
    block even = {0}, odd = {0};

    for (size_t i = 0; i + 2 <= count; i += 2) {
        __builtin_prefetch((const char *)(from + i) + AHEAD, 0, 2);
        __builtin_prefetch((const char *)(from + i + 1) + AHEAD, 0, 2);
        even += from[i];
        odd += from[i + 1];
    }
    even += odd;
    /* What nobody uses would not be computed. */
    __asm__ volatile("" : : "m"(even));
}

double read_bandwidth_measure(struct read_bandwidth *bandwidth)
{
    size_t blocks = READ_BANDWIDTH_BYTES / sizeof(block);
    double start = machine_seconds();

#pragma omp parallel for schedule(static) num_threads(bandwidth->threads)
    for (size_t part = 0; part < bandwidth->threads; part++) {
        size_t first = blocks * part / bandwidth->threads;

        sum_up(bandwidth->buffer + first, blocks * (part + 1) / bandwidth->threads - first);
    }
    return (double)READ_BANDWIDTH_BYTES / (machine_seconds() - start) * 1e-9;
}
