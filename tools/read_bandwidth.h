/* SPDX-License-Identifier: MIT */
/* How fast this machine's threads read memory. */
#ifndef PUZZLEKV_TOOLS_READ_BANDWIDTH_H
#define PUZZLEKV_TOOLS_READ_BANDWIDTH_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

/* More than the caches of a processor hold. */
#define READ_BANDWIDTH_BYTES ((size_t)256 << 20)

struct read_bandwidth;

/* A buffer of READ_BANDWIDTH_BYTES, on huge pages where the system allows it. */
bool read_bandwidth_open(unsigned threads, struct read_bandwidth **bandwidth, struct error *error);

/* Accepts NULL. */
void read_bandwidth_close(struct read_bandwidth *bandwidth);

/* Sums the buffer up once, each thread its own contiguous part; 10^9 bytes a second. */
double read_bandwidth_measure(struct read_bandwidth *bandwidth);

#endif
