/* SPDX-License-Identifier: MIT */
/* Random keys and values whose pages have the spectrum of real ones. */
#include "random_pages.h"

#include <math.h>
#include <stdlib.h>

#define PAGE RANDOM_PAGE_TOKENS

uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* In (0, 1]. */
static double random_real(uint64_t *state)
{
    return (double)((random_bits(state) >> 11) + 1) * 0x1p-53;
}

void random_normals(uint64_t *state, float *x, size_t count)
{
    for (size_t i = 0; i < count; i += 2) {
        double radius = sqrt(-2 * log(random_real(state)));
        double angle = 2 * M_PI * random_real(state);

        x[i] = (float)(radius * cos(angle));
        if (i + 1 < count)
            x[i + 1] = (float)(radius * sin(angle));
    }
}

/* Random rows[count][length] that are orthonormal; count <= length. */
static void random_basis(uint64_t *state, float *rows, size_t count, size_t length)
{
    random_normals(state, rows, count * length);
    for (size_t i = 0; i < count; i++) {
        float *row = rows + i * length;
        float square = 0;

        for (size_t j = 0; j < i; j++) {
            const float *other = rows + j * length;
            float dot = 0;

            for (size_t n = 0; n < length; n++)
                dot += row[n] * other[n];
            for (size_t n = 0; n < length; n++)
                row[n] -= dot * other[n];
        }
        for (size_t n = 0; n < length; n++)
            square += row[n] * row[n];
        for (size_t n = 0; n < length; n++)
            row[n] /= sqrtf(square);
    }
}

/* singular[count] of a block with mean square 1. */
static void spectrum(double first, double fall, size_t count, size_t dim, float *singular)
{
    double sum = 0;

    for (size_t i = 1; i < count; i++)
        sum += exp(-fall * (double)i);
    for (size_t i = 0; i < count; i++) {
        double share = i == 0 ? first : (1 - first) * exp(-fall * (double)i) / sum;

        singular[i] = (float)sqrt(share * (double)(PAGE * dim));
    }
}

static void random_block(uint64_t seed, const float *singular, size_t count, size_t dim,
                         size_t stride, float *left, float *right, float *x)
{
    random_basis(&seed, left, count, PAGE);
    random_basis(&seed, right, count, dim);
    for (size_t t = 0; t < PAGE; t++) {
        float *row = x + t * stride;

        for (size_t n = 0; n < dim; n++)
            row[n] = 0;
        for (size_t i = 0; i < count; i++) {
            float scale = left[i * PAGE + t] * singular[i];

            for (size_t n = 0; n < dim; n++)
                row[n] += scale * right[i * dim + n];
        }
    }
}

bool random_pages(uint64_t seed, size_t blocks, size_t heads, size_t dim, unsigned threads,
                  float *k, float *v, struct error *error)
{
    size_t count = dim < PAGE ? dim : PAGE;
    float singular_k[PAGE], singular_v[PAGE];
    bool failed = false;

    (void)threads; /* unused without OpenMP */
    spectrum(0.73, 0.19, count, dim, singular_k);
    spectrum(0.37, 0.16, count, dim, singular_v);
#pragma omp parallel num_threads(threads)
    {
        float *bases = malloc(count * (PAGE + dim) * sizeof *bases);

        if (bases == NULL) {
#pragma omp atomic write
            failed = true;
        }
#pragma omp for
        for (size_t i = 0; i < 2 * blocks * heads; i++) {
            size_t block = i / (2 * heads), head = i / 2 % heads;
            float *x = (i % 2 == 0 ? k : v) + (block * PAGE * heads + head) * dim;

            if (bases != NULL)
                random_block(seed + (i << 32), i % 2 == 0 ? singular_k : singular_v, count, dim,
                             heads * dim, bases, bases + count * PAGE, x);
        }
        free(bases);
    }
    return !failed || error_set(error, "out of memory for random pages");
}
