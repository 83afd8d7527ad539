/* SPDX-License-Identifier: MIT */
/* cpu/solver.h: how many sweeps pages take, and who shares a batch with whom. Accuracy is
 * check_factorize.c's, the bits are solver_bits.c's. */
#include "dispatch.h"

#include "tests.h" /* after message.h: see there */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH = 32, DIM = 64, RANK = 14, MOST = SOLVER_PAGES };

/* Pages through one solver in one batch. */
struct batch {
    const struct solver *solver;
    struct solver_batch state;
    size_t pages;
    float *x; /* X^T [pages][DIM, LENGTH], scaled once it is solved */
    float *right;
    void *memory;
};

static void open_batch(struct batch *batch, const struct solver *solver)
{
    size_t bytes = (solver->bytes(LENGTH, RANK, MOST) + 63) / 64 * 64;

    *batch = (struct batch){.solver = solver};
    batch->x = tests_allocate(MOST * DIM * LENGTH + SOLVER_PANEL, sizeof *batch->x);
    batch->right = tests_allocate(MOST * DIM * SOLVER_PANEL, sizeof *batch->right);
    batch->memory = aligned_alloc(64, bytes);
    ck_assert_ptr_nonnull(batch->memory);
}

static void close_batch(struct batch *batch)
{
    free(batch->memory);
    free(batch->right);
    free(batch->x);
}

static void solve(struct batch *batch, size_t pages)
{
    const struct solver *solver = batch->solver;

    solver->begin(&batch->state, LENGTH, RANK, pages, batch->memory);
    for (size_t i = 0; i < pages; i++)
        solver->add(&batch->state, i, RANK, DIM, batch->x + i * DIM * LENGTH);
    solver->solve(&batch->state);
    for (size_t i = 0; i < pages; i++)
        solver->project(&batch->state, i, DIM, batch->x + i * DIM * LENGTH,
                        batch->right + i * DIM * SOLVER_PANEL);
}

static void make_pages(float *x, size_t pages)
{
    for (size_t i = 0; i < pages * DIM * LENGTH; i++)
        x[i] = tests_random_float();
}

/* Random pages, of a flat spectrum and with tokens that lose weight, stay far below the cap. */
START_TEST(sweeps)
{
    const struct kernels *available[DISPATCH_MAX];
    size_t n = dispatch_available(available);
    struct batch batch;

    open_batch(&batch, dispatch_solver(available[n - 1]));
    tests_seed(3);
    for (int round = 0; round < 64; round++) {
        size_t pages = 2 * batch.solver->lanes;

        make_pages(batch.x, pages);
        for (size_t i = 0; i < pages * DIM * LENGTH && round % 2; i++)
            batch.x[i] = ldexpf(batch.x[i], -(int)(i % LENGTH) / 2);
        solve(&batch, pages);
        ck_assert_uint_eq(batch.state.capped, 0);
        for (size_t i = 0; i < pages; i++)
            require(batch.state.sweeps[i] > 0 && batch.state.sweeps[i] < 2 * LENGTH);
    }
    close_batch(&batch);
}
END_TEST

/* A page of NaN stops at the cap, and the others are as without it. */
START_TEST(page_of_nan)
{
    const struct kernels *available[DISPATCH_MAX];
    size_t n = dispatch_available(available);

    for (size_t k = 0; k < n; k++) {
        const struct solver *solver = dispatch_solver(available[k]);
        const size_t pages = 2 * solver->lanes;
        const size_t bad = solver->lanes / 2;
        struct batch with, without;

        open_batch(&with, solver);
        open_batch(&without, solver);
        tests_seed(4);
        make_pages(with.x, pages);
        memcpy(without.x, with.x, pages * DIM * LENGTH * sizeof *with.x);
        with.x[bad * DIM * LENGTH + 7 * LENGTH + 3] = NAN;
        solve(&with, pages);
        solve(&without, pages);
        ck_assert_uint_eq(with.state.capped, 1);
        ck_assert_uint_eq(with.state.sweeps[bad], 18);
        ck_assert_uint_eq(without.state.capped, 0);
        for (size_t i = 0; i < pages; i++) {
            size_t at = i * DIM * SOLVER_PANEL;

            if (i == bad)
                continue;
            require(with.state.sweeps[i] == without.state.sweeps[i]);
            require(memcmp(solver_left(&with.state, i), solver_left(&without.state, i),
                           LENGTH * SOLVER_PANEL * sizeof(float)) == 0);
            require(memcmp(with.right + at, without.right + at,
                           DIM * SOLVER_PANEL * sizeof(float)) == 0);
        }
        close_batch(&without);
        close_batch(&with);
    }
}
END_TEST

/* A page alone and the same page in each lane of a full batch. */
START_TEST(lanes)
{
    const struct kernels *available[DISPATCH_MAX];
    size_t n = dispatch_available(available);

    for (size_t k = 0; k < n; k++) {
        const struct solver *solver = dispatch_solver(available[k]);
        struct batch alone, full;

        open_batch(&alone, solver);
        open_batch(&full, solver);
        for (size_t i = 0; i < 2 * solver->lanes; i++) {
            tests_seed(6);
            make_pages(alone.x, 1);
            make_pages(full.x, 2 * solver->lanes);
            memcpy(full.x + i * DIM * LENGTH, alone.x, DIM * LENGTH * sizeof *full.x);
            solve(&alone, 1);
            solve(&full, 2 * solver->lanes);
            require(memcmp(solver_left(&alone.state, 0), solver_left(&full.state, i),
                           LENGTH * SOLVER_PANEL * sizeof(float)) == 0);
            require(memcmp(alone.right, full.right + i * DIM * SOLVER_PANEL,
                           DIM * SOLVER_PANEL * sizeof(float)) == 0);
        }
        close_batch(&full);
        close_batch(&alone);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("solver");
    TCase *test = tcase_create("solver");

    tcase_add_test(test, sweeps);
    tcase_add_test(test, page_of_nan);
    tcase_add_test(test, lanes);
    suite_add_tcase(suite, test);
    return tests_run(suite);
}
