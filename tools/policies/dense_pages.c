/* SPDX-License-Identifier: MIT */
/* Which tokens policies with puzzle's sink, window and tail keep dense. */
#include "dense_pages.h"

struct dense_pages dense_pages_of(const struct kv_spec *spec)
{
    return (struct dense_pages){kv_spec_count(spec, DENSE_PAGES_PAGE),
                                kv_spec_count(spec, DENSE_PAGES_SINK),
                                kv_spec_count(spec, DENSE_PAGES_WINDOW)};
}

size_t dense_pages_range(const struct dense_pages *pages, size_t tokens, size_t *first)
{
    size_t complete = tokens / pages->page_tokens;

    *first = pages->sink * pages->page_tokens;
    if (complete <= pages->sink + pages->window)
        return *first;
    return (complete - pages->window) * pages->page_tokens;
}
