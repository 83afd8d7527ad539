/* SPDX-License-Identifier: MIT */
/* Which tokens policies with puzzle's sink, window and tail keep dense. */
#ifndef PUZZLEKV_TOOLS_POLICIES_DENSE_PAGES_H
#define PUZZLEKV_TOOLS_POLICIES_DENSE_PAGES_H

#include <stddef.h>

#include "policy.h"

/* The first keys of such a policy, in this order. */
enum { DENSE_PAGES_PAGE, DENSE_PAGES_SINK, DENSE_PAGES_WINDOW, DENSE_PAGES_KEYS };

/* No model has more pages than this in its context; it keeps sums of pages far from overflow. */
#define DENSE_PAGES_MOST 1000000

/* clang-format off */
#define DENSE_PAGES_ROWS                                                                           \
    {.name = "page", .preset = "32", .least = 8, .most = 256, .multiple = 8},                      \
    {.name = "sink", .preset = "1", .most = DENSE_PAGES_MOST},                                     \
    {.name = "window", .preset = "1", .most = DENSE_PAGES_MOST}
/* clang-format on */

struct dense_pages {
    size_t page_tokens, sink, window;
};

struct dense_pages dense_pages_of(const struct kv_spec *spec);

/* Of `tokens` tokens, those from *first to below the returned end may be compressed: whole pages,
 * behind the sink and before the window. The end is *first if there are none. */
size_t dense_pages_range(const struct dense_pages *pages, size_t tokens, size_t *first);

#endif
