/* SPDX-License-Identifier: MIT */
/* The page state machine against a model that follows every token by itself. */
#include "pages.h"
#include "tests.h"

#include <string.h>

#define MAX_PAGES 64

/* What the state machine decides, said one page at a time: which pages have been factorized. */
struct model {
    struct page_policy policy;
    size_t tokens;
    bool factorized[MAX_PAGES];
};

/* Tokens t with from <= t < to that lie in the page; *first is the first of them. */
static size_t count_tokens(const struct model *model, size_t page, size_t from, size_t to,
                           size_t *first)
{
    size_t n = 0;

    for (size_t t = from; t < to; t++) {
        if (t / model->policy.page_tokens != page)
            continue;
        if (n++ == 0)
            *first = t;
    }
    return n;
}

static bool is_complete(const struct model *model, size_t page)
{
    size_t first;

    return count_tokens(model, page, 0, model->tokens, &first) == model->policy.page_tokens;
}

/* Whether the page is one of the `window_pages` most recently completed ones. */
static bool in_window(const struct model *model, size_t page)
{
    size_t later = 0;

    for (size_t p = page + 1; p < MAX_PAGES; p++)
        later += is_complete(model, p);
    return is_complete(model, page) && later < model->policy.window_pages;
}

static pkv_page_state model_state(const struct model *model, size_t page)
{
    size_t first;

    if (count_tokens(model, page, 0, model->tokens, &first) == 0)
        return PKV_PAGE_EMPTY;
    if (model->factorized[page])
        return PKV_PAGE_FACTORIZED;
    if (!is_complete(model, page))
        return PKV_PAGE_FILLING;
    if (page < model->policy.sink_pages)
        return PKV_PAGE_SINK;
    return PKV_PAGE_WINDOW;
}

static void model_step(struct model *model, size_t new_tokens)
{
    model->tokens += new_tokens;
    for (size_t p = 0; p < MAX_PAGES && model->policy.factorize; p++) {
        if (is_complete(model, p) && p >= model->policy.sink_pages && !in_window(model, p))
            model->factorized[p] = true;
    }
}

static void model_truncate(struct model *model, size_t tokens)
{
    model->tokens = tokens;
    for (size_t p = 0; p < MAX_PAGES; p++)
        model->factorized[p] = model->factorized[p] && is_complete(model, p);
}

/* The table as a sequence would hold it; every page has its own slot. */
static void fill_table(const struct model *model, struct page *table)
{
    for (size_t p = 0; p < MAX_PAGES; p++) {
        pkv_page_state state = model_state(model, p);

        table[p] = (struct page){(uint32_t)(100 + p), SLOT_DENSE};
        if (state == PKV_PAGE_EMPTY)
            table[p] = (struct page){0, SLOT_NONE};
        if (state == PKV_PAGE_FACTORIZED)
            table[p].kind = SLOT_FACTOR;
    }
}

static void check_states(const struct model *model, const struct page *table)
{
    size_t pages = 0;

    for (size_t p = 0; p < MAX_PAGES; p++) {
        size_t first;
        size_t tokens = count_tokens(model, p, 0, model->tokens, &first);

        pages += tokens > 0;
        require(pages_tokens(&model->policy, model->tokens, p) == tokens);
        require(pages_state(&model->policy, model->tokens, p, table[p].kind) ==
                model_state(model, p));
    }
    require(pages_count(&model->policy, model->tokens) == pages);
}

static void check_plan(const struct model *before, size_t new_tokens)
{
    struct model after = *before;
    struct page table[MAX_PAGES], table_after[MAX_PAGES];
    struct page_change changes[MAX_PAGES];
    size_t n, next = 0;

    fill_table(before, table);
    memset(changes, 0xff, sizeof changes);
    n = pages_plan(&before->policy, table, before->tokens, new_tokens, changes);
    require(n <= MAX_PAGES);
    require(pages_plan(&before->policy, table, before->tokens, new_tokens, NULL) == n);

    model_step(&after, new_tokens);
    memcpy(table_after, table, sizeof table);
    for (size_t p = 0; p < MAX_PAGES; p++) {
        size_t first_cached, first_new = before->tokens;
        size_t cached = count_tokens(before, p, 0, before->tokens, &first_cached);
        size_t fresh = count_tokens(before, p, before->tokens, after.tokens, &first_new);
        bool factorize = after.factorized[p] && !before->factorized[p];

        if (fresh == 0 && !factorize)
            continue;
        require(next < n);

        const struct page_change *change = &changes[next++];

        require(change->page == p);
        require(change->from.kind == table[p].kind);
        require(change->from.slot == table[p].slot);
        require(change->to.kind == (factorize ? SLOT_FACTOR : SLOT_DENSE));
        require(change->to.slot == (!factorize && table[p].kind == SLOT_DENSE ? table[p].slot : 0));
        require(change->cached_tokens == cached);
        require(change->new_tokens == fresh);
        require(change->first_new == first_new - before->tokens);
        table_after[p] = change->to;
    }
    require(next == n);
    check_states(&after, table_after);
}

START_TEST(every_step_from_every_state)
{
    for (size_t length = 1; length <= 4; length++) {
        for (size_t choice = 0; choice < 4 * 4 * 2; choice++) {
            struct page_policy policy = {length, choice % 4, choice / 4 % 4, choice / 16};

            for (size_t first = 0; first <= 6 * length; first++) {
                for (size_t kept = 0; kept <= first; kept++) {
                    struct model model = {.policy = policy};
                    struct page table[MAX_PAGES];

                    if (first > 0)
                        model_step(&model, first);
                    model_truncate(&model, kept);
                    fill_table(&model, table);
                    check_states(&model, table);
                    /* Behind a cut, what the window reaches may be factorized; one length of step
                     * for each place in the page is enough there. */
                    for (size_t n = 1; n <= (kept == first ? 4 * length : length + 1); n++)
                        check_plan(&model, n);
                }
            }
        }
    }
}
END_TEST

START_TEST(step_sizes_do_not_matter)
{
    for (size_t seed = 0; seed < 2000; seed++) {
        struct model split = {.policy = {1 + seed % 5, seed % 3, seed / 3 % 4, seed % 7 != 0}};
        struct model whole = split;
        uint32_t random = (uint32_t)seed * 2654435761u + 1;

        while (split.tokens < 50) {
            random = random * 1664525u + 1013904223u;
            model_step(&split, 1 + (random >> 16) % (seed % 11 + 1));
        }
        model_step(&whole, split.tokens);
        for (size_t p = 0; p < MAX_PAGES; p++)
            ck_assert_int_eq(model_state(&split, p), model_state(&whole, p));
    }
}
END_TEST

START_TEST(real_page_length)
{
    const struct page_policy policy = {32, 1, 1, true};
    struct page_change changes[6];
    struct page table[1] = {{7, SLOT_DENSE}};

    /* 20 tokens, then 150 more: 5 complete pages and 10 tokens. */
    ck_assert_uint_eq(pages_plan(&policy, table, 20, 150, changes), 6);
    ck_assert_uint_eq(changes[0].to.kind, SLOT_DENSE);
    ck_assert_uint_eq(changes[0].to.slot, 7);
    ck_assert_uint_eq(changes[0].new_tokens, 12);
    for (size_t p = 1; p < 4; p++) {
        ck_assert_uint_eq(changes[p].from.kind, SLOT_NONE);
        ck_assert_uint_eq(changes[p].to.kind, SLOT_FACTOR);
        ck_assert_uint_eq(changes[p].first_new, 12 + 32 * (p - 1));
        ck_assert_uint_eq(changes[p].new_tokens, 32);
    }
    ck_assert_uint_eq(changes[4].to.kind, SLOT_DENSE);
    ck_assert_uint_eq(changes[5].to.kind, SLOT_DENSE);
    ck_assert_uint_eq(changes[5].new_tokens, 10);
    ck_assert_int_eq(pages_state(&policy, 170, 0, SLOT_DENSE), PKV_PAGE_SINK);
    ck_assert_int_eq(pages_state(&policy, 170, 3, SLOT_FACTOR), PKV_PAGE_FACTORIZED);
    ck_assert_int_eq(pages_state(&policy, 170, 4, SLOT_DENSE), PKV_PAGE_WINDOW);
    ck_assert_int_eq(pages_state(&policy, 170, 5, SLOT_DENSE), PKV_PAGE_FILLING);
    ck_assert_int_eq(pages_state(&policy, 170, 6, SLOT_NONE), PKV_PAGE_EMPTY);
}
END_TEST

START_TEST(endless_sink_and_window)
{
    const struct page_policy policies[] = {{8, SIZE_MAX, 0, true}, {8, 0, SIZE_MAX, true}};

    for (size_t i = 0; i < 2; i++) {
        struct page_change changes[8];

        ck_assert_uint_eq(pages_plan(&policies[i], NULL, 0, 64, changes), 8);
        for (size_t p = 0; p < 8; p++)
            ck_assert_uint_eq(changes[p].to.kind, SLOT_DENSE);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("pages");
    TCase *test = tcase_create("pages");

    tcase_add_test(test, every_step_from_every_state);
    tcase_add_test(test, step_sizes_do_not_matter);
    tcase_add_test(test, real_page_length);
    tcase_add_test(test, endless_sink_and_window);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
