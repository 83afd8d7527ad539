/* SPDX-License-Identifier: MIT */
/* The page state machine: pure functions, no allocation, no I/O, no backend. */
#include "pages.h"

#include "numeric.h"

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* The first page that is in the window or behind it when `complete` pages are complete. */
static size_t window_start(const struct page_policy *policy, size_t complete)
{
    return complete > policy->window_pages ? complete - policy->window_pages : 0;
}

size_t pages_count(const struct page_policy *policy, size_t tokens)
{
    return tokens / policy->page_tokens + (tokens % policy->page_tokens != 0);
}

pkv_page_state pages_state(const struct page_policy *policy, size_t tokens, size_t page,
                           enum slot_kind kind)
{
    size_t complete = tokens / policy->page_tokens;

    if (kind == SLOT_NONE || page >= pages_count(policy, tokens))
        return PKV_PAGE_EMPTY;
    if (kind == SLOT_FACTOR)
        return PKV_PAGE_FACTORIZED;
    if (page == complete)
        return PKV_PAGE_FILLING;
    return page < policy->sink_pages ? PKV_PAGE_SINK : PKV_PAGE_WINDOW;
}

bool pages_state_possible(const struct page_policy *policy, size_t tokens, size_t page,
                          pkv_page_state state)
{
    size_t complete = tokens / policy->page_tokens;

    /* Truncation leaves factors anywhere outside the sink, but in no incomplete page. */
    if (state == PKV_PAGE_FACTORIZED)
        return policy->factorize && page >= policy->sink_pages && page < complete;
    return state == pages_state(policy, tokens, page, SLOT_DENSE) &&
           (state != PKV_PAGE_WINDOW || !policy->factorize ||
            page >= window_start(policy, complete));
}

size_t pages_tokens(const struct page_policy *policy, size_t tokens, size_t page)
{
    if (page >= pages_count(policy, tokens))
        return 0;
    return min_size(policy->page_tokens, tokens - page * policy->page_tokens);
}

size_t pages_plan(const struct page_policy *policy, const struct page *table, size_t tokens,
                  size_t new_tokens, struct page_change *changes)
{
    size_t length = policy->page_tokens;
    size_t complete_before = tokens / length;
    size_t count_before = pages_count(policy, tokens);
    size_t after = tokens + new_tokens;
    size_t complete = after / length;
    /* Complete pages from the sink up to here leave the window, or never enter it. */
    size_t due_end = policy->factorize ? window_start(policy, complete) : 0;
    size_t n = 0;

    /* Behind the old window every page but the sink has factors already. */
    for (size_t p = max_size(policy->sink_pages, window_start(policy, complete_before));
         p < min_size(due_end, complete_before); p++) {
        if (table[p].kind != SLOT_DENSE)
            continue;
        if (changes)
            changes[n] = (struct page_change){
                .page = p, .from = table[p], .to = {.kind = SLOT_FACTOR}, .cached_tokens = length};
        n++;
    }

    for (size_t p = complete_before; p < pages_count(policy, after); p++, n++) {
        if (changes == NULL)
            continue;

        size_t start = p * length;
        size_t first = max_size(start, tokens);
        bool due = p >= policy->sink_pages && p < due_end;
        struct page from = {.kind = SLOT_NONE};
        struct page to = {.kind = due ? SLOT_FACTOR : SLOT_DENSE};

        if (p < count_before)
            from = table[p];
        if (from.kind == SLOT_DENSE && to.kind == SLOT_DENSE)
            to.slot = from.slot;
        changes[n] =
            (struct page_change){.page = p,
                                 .from = from,
                                 .to = to,
                                 .cached_tokens = first - start,
                                 .first_new = first - tokens,
                                 .new_tokens = min_size(length, after - start) - (first - start)};
    }
    return n;
}
