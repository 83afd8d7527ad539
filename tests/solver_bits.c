/* SPDX-License-Identifier: MIT */
/*
 * Prints a digest of the bits of batched factors for each instruction set, and fails where it is
 * not the one that every machine and compiler must give. Needs neither BLAS nor a test library, so
 * that it is easily built for another machine: see tests/cross-aarch64.sh.
 */
#include "dispatch.h"
#include "numeric.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* Of what make_page() makes, in the order of main()'s loops. */
#define EXPECTED 0x21e4146b2ac4bf84u

#define PAGES 19 /* more than a batch of any instruction set but the widest */

enum kind { FLAT, DECAYING, DEFICIENT, DUPLICATE, CONSTANT, ONE_ROW, ZERO, KINDS };

static uint64_t state;

/* In -1 .. 1, in steps of 2^-15. */
static float random_float(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int)(state >> 48) - 32768) * 0x1p-15f;
}

/* X^T [d, length] by operations that are exact, so that every machine has the same. */
static void make_page(enum kind kind, size_t length, size_t d, float scale, float *transposed)
{
    for (size_t i = 0; i < d; i++) {
        float *x = transposed + i * length;
        float a = random_float();
        float b = random_float();

        for (size_t t = 0; t < length; t++)
            x[t] = random_float() * scale;
        for (size_t t = 0; t < length; t++) {
            if (kind == DECAYING)
                x[t] *= f32_from_bits((uint32_t)(127 - t % 20) << 23);
            if (kind == DEFICIENT)
                x[t] = t % 3 == 0 ? a * scale : t % 3 == 1 ? b * scale : -a * scale;
            if (kind == DUPLICATE && t % 2 == 1)
                x[t] = x[t - 1];
            if (kind == CONSTANT)
                x[t] = scale;
            if ((kind == ONE_ROW && t != length / 2) || kind == ZERO)
                x[t] = 0.0f;
        }
    }
}

/* FNV-1a of the first n columns of rows of ld elements. */
static uint64_t digest(uint64_t hash, size_t rows, size_t n, size_t ld, const float *x)
{
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < n; j++) {
            uint32_t bits = f32_bits(x[i * ld + j]);

            for (int shift = 0; shift < 32; shift += 8)
                hash = (hash ^ (bits >> shift & 0xffu)) * 0x100000001b3u;
        }
    }
    return hash;
}

/* Zeroed and aligned; ends the program when memory runs out. */
static void *allocate(size_t bytes)
{
    char *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);

    if (!memory)
        exit(1);
    memset(memory, 0, bytes);
    return memory;
}

static uint64_t factorize(const struct solver *solver, uint64_t hash, size_t length, size_t d,
                          size_t rank, float scale)
{
    const size_t most = 2 * solver->lanes;
    float *transposed = allocate((most * d * length + SOLVER_PANEL) * sizeof(float));
    float *right = allocate(d * solver_padded(rank) * sizeof(float));
    void *memory = allocate(solver->bytes(length, rank, most));

    for (size_t first = 0, n; first < PAGES; first += n) {
        struct solver_batch batch;

        n = PAGES - first < most ? PAGES - first : most;
        solver->begin(&batch, length, rank, n, memory);
        for (size_t i = 0; i < n; i++) {
            make_page((enum kind)((first + i) % KINDS), length, d, scale,
                      transposed + i * d * length);
            solver->add(&batch, i, rank - (first + i) % 2, d, transposed + i * d * length);
        }
        solver->solve(&batch);
        for (size_t i = 0; i < n; i++) {
            size_t r = rank - (first + i) % 2;

            solver->project(&batch, i, d, transposed + i * d * length, right);
            hash = digest(hash, length, r, solver_padded(r), solver_left(&batch, i));
            hash = digest(hash, d, r, solver_padded(r), right);
        }
    }
    free(memory);
    free(right);
    free(transposed);
    return hash;
}

int main(void)
{
    static const size_t shapes[][3] = {
        {8, 8, 8}, {8, 64, 5}, {32, 128, 16}, {24, 40, 20}, {72, 64, 33}};
    static const int exponents[] = {0, -100, 100, -140};
    const struct kernels *available[DISPATCH_MAX];
    size_t n = dispatch_available(available);
    bool same = true;

    for (size_t i = 0; i < n; i++) {
        uint64_t hash = 0xcbf29ce484222325u;

        state = 1;
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (size_t e = 0; e < sizeof exponents / sizeof *exponents; e++)
                hash = factorize(dispatch_solver(available[i]), hash, shapes[s][0], shapes[s][1],
                                 shapes[s][2], __builtin_ldexpf(1.0f, exponents[e]));
        printf("%-8s %016llx%s\n", available[i]->name, (unsigned long long)hash,
               hash == EXPECTED ? "" : ", not as it must be");
        same = same && hash == EXPECTED;
    }
    return same ? 0 : 1;
}
