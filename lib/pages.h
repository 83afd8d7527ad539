/* SPDX-License-Identifier: MIT */
/* The page state machine: pure functions, no allocation, no I/O, no backend. */
#ifndef PUZZLEKV_LIB_PAGES_H
#define PUZZLEKV_LIB_PAGES_H

#include "puzzlekv.h"

#include <stdbool.h>

/* What decides a page's state beside T. */
struct page_policy {
    size_t page_tokens; /* P */
    size_t sink_pages;
    size_t window_pages;
    bool factorize; /* false: PKV_FACTORS_NONE */
};

enum slot_kind { SLOT_NONE = 0, SLOT_DENSE, SLOT_FACTOR };

/* One entry of a sequence's page table. */
struct page {
    uint32_t slot; /* within its kind's pool; meaningless for SLOT_NONE */
    uint32_t kind; /* enum slot_kind */
};

/* What one step does to one page. Pages that a step does not touch have no change. */
struct page_change {
    size_t page;
    struct page from;     /* as at begin; SLOT_NONE where the page was empty */
    struct page to;       /* kind as planned; the slot is the caller's to choose */
    size_t cached_tokens; /* tokens of the page that `from` holds */
    size_t first_new;     /* first of the item's new tokens that falls into the page */
    size_t new_tokens;    /* how many of them do; 0 for a page that only leaves the window */
};

/* Pages that `tokens` tokens reach: ceil(tokens / P). */
size_t pages_count(const struct page_policy *policy, size_t tokens);

/* The state of page `page` of a sequence of `tokens` tokens, whose slot is of `kind`. */
pkv_page_state pages_state(const struct page_policy *policy, size_t tokens, size_t page,
                           enum slot_kind kind);

/* Whether a page that `tokens` tokens reach can be in `state` after some steps and truncations. */
bool pages_state_possible(const struct page_policy *policy, size_t tokens, size_t page,
                          pkv_page_state state);

/* Committed tokens in page `page`, 0 .. P. */
size_t pages_tokens(const struct page_policy *policy, size_t tokens, size_t page);

/*
 * The changes that a step of `new_tokens` (>= 1) makes to a sequence of `tokens` tokens with page
 * table `table` (pages_count() entries), in ascending page order. Returns their number; fills
 * `changes` unless it is NULL. to.slot is from.slot where a dense page stays dense, else 0.
 */
size_t pages_plan(const struct page_policy *policy, const struct page *table, size_t tokens,
                  size_t new_tokens, struct page_change *changes);

#endif
