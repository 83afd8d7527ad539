/* SPDX-License-Identifier: MIT */
/* What a whole warp does at once, and pairs of 16-bit numbers. */
#include "block.h"
#include "fibers.h"

extern "C" {
#include "numeric.h"
}

void cuda_host_reduce_max_all(struct cuda_host_site, void *const lanes[32])
{
    unsigned most = 0;

    for (unsigned i = 0; i < 32; i++)
        if (lanes[i] && most < ((const struct cuda_host_reduction *)lanes[i])->value)
            most = ((const struct cuda_host_reduction *)lanes[i])->value;
    for (unsigned i = 0; i < 32; i++)
        if (lanes[i])
            ((struct cuda_host_reduction *)lanes[i])->value = most;
}

/* ---- Matrices ---- */

struct fragments {
    float *c;
    const unsigned *a, *b;
    bool is_bf16;
};

static float element(const struct fragments *lane, unsigned pair, unsigned which)
{
    const uint16_t half = (uint16_t)(which ? pair >> 16 : pair);

    return lane->is_bf16 ? bf16_to_f32(half) : f16_to_f32(half);
}

/* Row g or g + 8 and columns 2 t, 2 t + 1 (+ 8) of A are lane 4 g + t's, rows 2 t, 2 t + 1 (+ 8)
 * and column g of B, rows g and g + 8 and columns 2 t, 2 t + 1 of C. */
static void mma_all(struct cuda_host_site, void *const lanes[32])
{
    float a[16][16], b[16][8];

    for (unsigned i = 0; i < 32; i++) {
        const struct fragments *lane = (const struct fragments *)lanes[i];
        const unsigned g = i / 4, t = i % 4;

        for (unsigned n = 0; n < 8; n++)
            a[g + n / 2 % 2 * 8][2 * t + n % 2 + n / 4 * 8] = element(lane, lane->a[n / 2], n % 2);
        for (unsigned n = 0; n < 4; n++)
            b[2 * t + n % 2 + n / 2 * 8][g] = element(lane, lane->b[n / 2], n % 2);
    }
    for (unsigned i = 0; i < 32; i++) {
        const struct fragments *lane = (const struct fragments *)lanes[i];

        for (unsigned n = 0; n < 4; n++) {
            const unsigned row = i / 4 + n / 2 * 8, column = i % 4 * 2 + n % 2;
            double sum = lane->c[n];

            for (unsigned k = 0; k < 16; k++)
                sum += (double)a[row][k] * (double)b[k][column];
            lane->c[n] = (float)sum;
        }
    }
}

void cuda_host_mma_f16(struct cuda_host_site site, float c[4], const unsigned a[4],
                       const unsigned b[2])
{
    struct fragments mine = {c, a, b, false};

    cuda_host_meet(site, 0xffffffffu, &mine, mma_all);
}

void cuda_host_mma_bf16(struct cuda_host_site site, float c[4], const unsigned a[4],
                        const unsigned b[2])
{
    struct fragments mine = {c, a, b, true};

    cuda_host_meet(site, 0xffffffffu, &mine, mma_all);
}

static void transpose_all(struct cuda_host_site, void *const lanes[32])
{
    uint16_t matrix[8][8];

    for (unsigned i = 0; i < 32; i++)
        memcpy(&matrix[i / 4][i % 4 * 2], lanes[i], sizeof(unsigned));
    for (unsigned i = 0; i < 32; i++)
        *(unsigned *)lanes[i] = matrix[i % 4 * 2][i / 4] | (unsigned)matrix[i % 4 * 2 + 1][i / 4]
                                                               << 16;
}

unsigned cuda_host_transpose(struct cuda_host_site site, unsigned x)
{
    cuda_host_meet(site, 0xffffffffu, &x, transpose_all);
    return x;
}

struct rows_of_matrices {
    unsigned *a;
    const void *row;
    bool transposed;
};

static void load_matrices_all(struct cuda_host_site, void *const lanes[32])
{
    for (unsigned n = 0; n < 4; n++) {
        uint16_t matrix[8][8];

        for (unsigned i = 0; i < 8; i++)
            memcpy(matrix[i], ((const struct rows_of_matrices *)lanes[8 * n + i])->row, 16);
        for (unsigned i = 0; i < 32; i++) {
            const struct rows_of_matrices *lane = (const struct rows_of_matrices *)lanes[i];
            const unsigned g = i / 4, t = i % 4 * 2;

            lane->a[n] = lane->transposed ? matrix[t][g] | (unsigned)matrix[t + 1][g] << 16
                                          : matrix[g][t] | (unsigned)matrix[g][t + 1] << 16;
        }
    }
}

/* A lane's own row is read before they meet, so that ThreadSanitizer sees by whom. */
void cuda_host_load_matrices(struct cuda_host_site site, unsigned a[4], const void *row,
                             bool transposed)
{
    const uint4 mine = load_16(row);
    struct rows_of_matrices rows = {a, &mine, transposed};

    cuda_host_meet(site, 0xffffffffu, &rows, load_matrices_all);
}

/* ---- Pairs ---- */

unsigned pair_f16(float low, float high)
{
    return f16_from_f32(low) | (unsigned)f16_from_f32(high) << 16;
}

unsigned pair_bf16(float low, float high)
{
    return bf16_from_f32(low) | (unsigned)bf16_from_f32(high) << 16;
}

float low_f16(unsigned pair)
{
    return f16_to_f32((uint16_t)pair);
}

float high_f16(unsigned pair)
{
    return f16_to_f32((uint16_t)(pair >> 16));
}

unsigned add_bf16(unsigned a, unsigned b)
{
    return pair_bf16(bf16_to_f32((uint16_t)a) + bf16_to_f32((uint16_t)b),
                     bf16_to_f32((uint16_t)(a >> 16)) + bf16_to_f32((uint16_t)(b >> 16)));
}

/* ---- Loads and stores ---- */

template <typename T> static T load(const void *p)
{
    T value;

    if ((uintptr_t)p % sizeof value != 0)
        cuda_host_stop("a load of %zu bytes from %p, which is not aligned", sizeof value, p);
    fiber_reads(p, sizeof value);
    memcpy(&value, p, sizeof value);
    return value;
}

uint4 load_16(const void *p)
{
    return load<uint4>(p);
}

uint2 load_8(const void *p)
{
    return load<uint2>(p);
}

unsigned load_4(const void *p)
{
    return load<unsigned>(p);
}

uint4 shared_16(const void *p)
{
    return load<uint4>(p);
}

void store_16(void *p, uint4 x)
{
    if ((uintptr_t)p % 16 != 0)
        cuda_host_stop("a store of 16 bytes to %p, which is not aligned", p);
    fiber_writes(p, 16);
    memcpy(p, &x, sizeof x);
}

void copy_16(void *to, const void *from, bool there)
{
    if ((uintptr_t)to % 16 != 0 || (uintptr_t)from % 16 != 0)
        cuda_host_stop("a copy of 16 bytes from %p to %p, which are not both aligned", from, to);
    cuda_host_copy_later(cuda_host_copy{to, there ? from : NULL});
}
