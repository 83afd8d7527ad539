/* SPDX-License-Identifier: MIT */
/*
 * The solver `batched`, written once with vectors of LANES floats. A file that includes this one
 * defines
 *     SOLVER           the name of its table, SOLVER_NAME its name as a string
 *     LANES            pages in a vector; divides SOLVER_PANEL
 *     TILE_ROWS        rows of a product that are kept in registers, SOLVER_PANEL columns each;
 *                      4, 8 or 16
 * after the types vector_f32 and vector_mask, and these operations on them:
 *     vector_set(x)            all lanes x
 *     vector_fma(a, b, c)      a * b + c, rounded once
 *     vector_sqrt(a)
 *     vector_less(a, b), vector_both(mask, mask), vector_select(mask, a, b)
 *     vector_abs(a), vector_with_sign(a, b)
 */
#include "interleave.h"
#include "solver.h"

#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define real                 vector_f32
#define real_mask            vector_mask
#define STEP                 INLINE
#define real_of(x)           vector_set(x)
#define real_fma(a, b, c)    vector_fma(a, b, c)
#define real_sqrt(a)         vector_sqrt(a)
#define real_less(a, b)      vector_less(a, b)
#define real_select(m, a, b) vector_select(m, a, b)
#define real_abs(a)          vector_abs(a)
#define real_with_sign(a, b) vector_with_sign(a, b)
#include "solver_steps.h"

/* Vectors in a row of a panel. */
#define VECTORS (SOLVER_PANEL / LANES)

/* Rows that are left over where P or d, multiples of 8, is none of TILE_ROWS. */
#define TILE_REST (TILE_ROWS < 8 ? TILE_ROWS : 8)

/* Panels of L that are reflected together. */
#define STRIPS (LANES / VECTORS > 4 ? 4 : LANES / VECTORS > 1 ? 2 : 1)

/* Pages whose rotations are applied together, while the log of a sweep is in the nearest cache. */
#define TURN 8

INLINE vector_f32 load(const float *p)
{
    vector_f32 v;

    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void save(float *p, vector_f32 v)
{
    memcpy(p, &v, sizeof v);
}

/* Where row i of a lower triangle begins. */
INLINE size_t triangle(size_t i)
{
    return i * (i + 1) / 2;
}

/* ---- Memory ---- */

/* The next `bytes` bytes of a batch's memory, or only their number. */
static void *take(char **at, size_t *total, size_t bytes)
{
    void *taken = *at;

    bytes = (bytes + 63) / 64 * 64;
    *total += bytes;
    if (*at)
        *at += bytes;
    return taken;
}

/* Sizes do not wrap: P is at most 256. */
static size_t divide(struct solver_batch *batch, size_t length, size_t rank_max, size_t pages,
                     void *memory)
{
    const size_t groups = (pages + LANES - 1) / LANES;
    const size_t lanes = groups * LANES;
    const size_t cap = solver_sweep_cap(length - 1);
    const size_t row = solver_padded(length) * length;
    size_t total = 0;
    char *at = memory;

    *batch = (struct solver_batch){
        .length = length, .rank_max = rank_max, .pages = pages, .groups = groups};
    batch->gram = take(&at, &total, triangle(length) * lanes * sizeof(float));
    batch->inverse = take(&at, &total, length * lanes * sizeof(float));
    batch->diagonal = take(&at, &total, length * lanes * sizeof(float));
    batch->off = take(&at, &total, length * lanes * sizeof(float));
    batch->order = take(&at, &total, length * lanes * sizeof(float));
    batch->row =
        take(&at, &total, (row > 2 * length * LANES ? row : 2 * length * LANES) * sizeof(float));
    batch->log = take(&at, &total, solver_rotations(length) * 2 * lanes * sizeof(float));
    batch->log_first = take(&at, &total, cap * sizeof *batch->log_first);
    batch->log_begin = take(&at, &total, (cap + 1) * lanes * sizeof *batch->log_begin);
    batch->log_end = take(&at, &total, (cap + 1) * lanes * sizeof *batch->log_end);
    batch->left = take(&at, &total, pages * length * solver_padded(rank_max) * sizeof(float));
    return total;
}

static size_t bytes(size_t length, size_t rank_max, size_t pages)
{
    struct solver_batch batch;

    return divide(&batch, length, rank_max, pages, NULL);
}

static void begin(struct solver_batch *batch, size_t length, size_t rank_max, size_t pages,
                  void *memory)
{
    divide(batch, length, rank_max, pages, memory);
}

/* ---- Transposing ---- */

/* In log2(LANES) rounds, each of which deals the second half of the rows in among the first. */
INLINE void transpose(vector_f32 rows[LANES])
{
#if LANES > 1
    UNROLL
    for (size_t round = 1; round < LANES; round *= 2) {
        vector_f32 dealt[LANES];

        UNROLL
        for (size_t i = 0; i < LANES / 2; i++) {
            dealt[2 * i] = INTERLEAVED(rows[i], rows[i + LANES / 2], 0);
            dealt[2 * i + 1] = INTERLEAVED(rows[i], rows[i + LANES / 2], LANES / 2);
        }
        memcpy(rows, dealt, sizeof dealt);
    }
#else
    (void)rows;
#endif
}

/* ---- Products ---- */

/* sum[i][j] = sum over p < k, ascending, of a[i * ai + p * ap] * b[p * ldb + j], i < rows, which is
 * a constant, j < SOLVER_PANEL. */
INLINE void tile(size_t rows, size_t k, const float *a, size_t ai, size_t ap, const float *b,
                 size_t ldb, vector_f32 sum[TILE_ROWS][VECTORS])
{
    vector_f32 s[TILE_ROWS][VECTORS];

    UNROLL
    for (size_t i = 0; i < rows; i++) {
        UNROLL
        for (size_t j = 0; j < VECTORS; j++)
            s[i][j] = vector_set(0.0f);
    }
    for (size_t p = 0; p < k; p++) {
        vector_f32 value[VECTORS];

        UNROLL
        for (size_t j = 0; j < VECTORS; j++)
            value[j] = load(b + p * ldb + j * LANES);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            vector_f32 x = vector_set(a[i * ai + p * ap]);

            UNROLL
            for (size_t j = 0; j < VECTORS; j++)
                s[i][j] = vector_fma(x, value[j], s[i][j]);
        }
    }
    memcpy(sum, s, rows * sizeof *s);
}

/* Multiplies n elements by 2^-e, where the largest magnitude is below 2^(e + 1). Returns e. */
static int scale(size_t n, float *x)
{
    vector_f32 most[4] = {vector_set(0.0f), vector_set(0.0f), vector_set(0.0f), vector_set(0.0f)};
    float lane[4 * LANES];
    float largest = 0.0f;
    int exponent;

    for (size_t i = 0; i < n; i += 4 * LANES) {
        UNROLL
        for (size_t t = 0; t < 4; t++) {
            vector_f32 a = vector_abs(load(x + i + t * LANES));

            most[t] = vector_select(vector_less(most[t], a), a, most[t]);
        }
    }
    for (size_t t = 0; t < 4; t++)
        save(lane + t * LANES, most[t]);
    for (size_t i = 0; i < 4 * LANES; i++)
        largest = lane[i] > largest ? lane[i] : largest;
    exponent = solver_exponent(largest);

    const vector_f32 down = vector_set(solver_scale_down(exponent));
    const vector_f32 more = vector_set(solver_scale_down_more(exponent));

    if (exponent < -126) {
        for (size_t i = 0; i < n; i += LANES)
            save(x + i, load(x + i) * down * more);
    } else if (exponent != 0) {
        for (size_t i = 0; i < n; i += LANES)
            save(x + i, load(x + i) * down);
    }
    return exponent;
}

/* Rows i .. i + rows - 1 of a Gram matrix up to the diagonal, in whole panels. */
INLINE void gram_rows(size_t rows, const struct solver_batch *batch, size_t i, size_t d,
                      const float *transposed)
{
    const size_t length = batch->length;
    const size_t ld = solver_padded(length);
    vector_f32 sum[TILE_ROWS][VECTORS];

    for (size_t j = 0; j < i + rows; j += SOLVER_PANEL) {
        tile(rows, d, transposed + i, 1, length, transposed + j, length, sum);
        UNROLL
        for (size_t t = 0; t < rows; t++) {
            UNROLL
            for (size_t u = 0; u < VECTORS; u++)
                save(batch->row + (i + t) * ld + j + u * LANES, sum[t][u]);
        }
    }
}

/* Where a page's triangle waits until all are there: what follows it may be written past its end.
 */
static float *waiting(const struct solver_batch *batch, size_t page)
{
    return batch->log + page * (triangle(batch->length) + SOLVER_PANEL);
}

static void add(struct solver_batch *batch, size_t page, size_t rank, size_t d, float *transposed)
{
    const size_t length = batch->length;
    const size_t ld = solver_padded(length);
    float *to = waiting(batch, page);
    size_t i = 0;

    batch->rank[page] = rank;
    batch->exponent[page] = scale(d * length, transposed);
    for (; i + TILE_ROWS <= length; i += TILE_ROWS)
        gram_rows(TILE_ROWS, batch, i, d, transposed);
    if (i < length)
        gram_rows(TILE_REST, batch, i, d, transposed);
    for (i = 0; i < length; i++)
        for (size_t j = 0; j <= i; j += LANES)
            save(to + triangle(i) + j, load(batch->row + i * ld + j));
}

/* The triangles of a group's pages side by side; lanes without a page are pages of zeros. */
static void gather(const struct solver_batch *batch, size_t group)
{
    const size_t n = triangle(batch->length);
    const size_t first = group * LANES;
    const size_t pages = batch->pages - first < LANES ? batch->pages - first : LANES;
    const float *from = waiting(batch, first);
    float *to = batch->gram + first * n;
    vector_f32 rows[LANES];

    for (size_t at = 0; at < n; at += LANES) {
        for (size_t t = 0; t < LANES; t++)
            rows[t] = t < pages ? load(from + t * (n + SOLVER_PANEL) + at) : vector_set(0.0f);
        transpose(rows);
        for (size_t t = 0; t < LANES && at + t < n; t++)
            save(to + (at + t) * LANES, rows[t]);
    }
}

/* ---- Householder ---- */

INLINE vector_f32 sum_of(const vector_f32 s[4])
{
    return (s[0] + s[1]) + (s[2] + s[3]);
}

/* p = A v for the leading k x k part of a lower triangle; each sum ascends. */
static void multiply(size_t k, const float *a, const float *v, float *p)
{
    size_t j = 0;

    for (; j + 4 <= k; j += 4) {
        const float *row[4];
        vector_f32 sum[4];
        vector_f32 x[4];

        UNROLL
        for (size_t t = 0; t < 4; t++) {
            row[t] = a + triangle(j + t) * LANES;
            x[t] = load(v + (j + t) * LANES);
            sum[t] = vector_set(0.0f);
        }
        for (size_t i = 0; i < j; i++) {
            vector_f32 y = load(p + i * LANES);
            vector_f32 w = load(v + i * LANES);

            UNROLL
            for (size_t t = 0; t < 4; t++) {
                vector_f32 value = load(row[t] + i * LANES);

                sum[t] = vector_fma(value, w, sum[t]);
                y = vector_fma(value, x[t], y);
            }
            save(p + i * LANES, y);
        }
        UNROLL
        for (size_t t = 0; t < 4; t++) {
            UNROLL
            for (size_t i = 0; i <= t; i++) {
                vector_f32 value = load(row[t] + (j + i) * LANES);

                sum[t] = vector_fma(value, x[i], sum[t]);
                if (i < t)
                    sum[i] = vector_fma(value, x[t], sum[i]);
            }
        }
        UNROLL
        for (size_t t = 0; t < 4; t++)
            save(p + (j + t) * LANES, sum[t]);
    }
    for (; j < k; j++) {
        const float *row = a + triangle(j) * LANES;
        vector_f32 x = load(v + j * LANES);
        vector_f32 sum = vector_set(0.0f);

        for (size_t i = 0; i < j; i++) {
            vector_f32 value = load(row + i * LANES);

            sum = vector_fma(value, load(v + i * LANES), sum);
            save(p + i * LANES, vector_fma(value, x, load(p + i * LANES)));
        }
        save(p + j * LANES, vector_fma(load(row + j * LANES), x, sum));
    }
}

/* A -= v q^T + q v^T in the leading k x k part of a lower triangle. */
static void update(size_t k, float *a, const float *v, const float *q)
{
    for (size_t j = 0; j < k; j++) {
        float *row = a + triangle(j) * LANES;
        vector_f32 minus_v = -load(v + j * LANES);
        vector_f32 minus_q = -load(q + j * LANES);

        for (size_t i = 0; i <= j; i++) {
            vector_f32 value = load(row + i * LANES);

            value = vector_fma(minus_q, load(v + i * LANES), value);
            value = vector_fma(minus_v, load(q + i * LANES), value);
            save(row + i * LANES, value);
        }
    }
}

/* G = Q T Q^T of one group. Row i of the triangle ends as v of the reflection that made it. */
static void tridiagonalise(struct solver_batch *batch, size_t group)
{
    const size_t length = batch->length;
    const size_t stride = batch->groups * LANES;
    float *a = batch->gram + group * triangle(length) * LANES;
    float *inverses = batch->inverse + group * length * LANES;
    float *diagonal = batch->diagonal + group * LANES;
    float *off = batch->off + group * LANES;
    float *p = batch->row;

    for (size_t i = length - 1; i > 0; i--) {
        float *v = a + triangle(i) * LANES;
        vector_f32 s[4] = {vector_set(0.0f), vector_set(0.0f), vector_set(0.0f), vector_set(0.0f)};
        vector_f32 last, e, inverse, kappa;

        for (size_t j = 0; j + 1 < i; j++)
            s[j % 4] = vector_fma(load(v + j * LANES), load(v + j * LANES), s[j % 4]);
        solver_reflection(sum_of(s), load(v + (i - 1) * LANES), &last, &e, &inverse);
        save(diagonal + i * stride, load(v + i * LANES));
        save(off + (i - 1) * stride, e);
        save(v + (i - 1) * LANES, last);
        save(inverses + i * LANES, inverse);

        multiply(i, a, v, p);
        for (size_t j = 0; j < 4; j++)
            s[j] = vector_set(0.0f);
        for (size_t j = 0; j < i; j++) {
            vector_f32 value = load(p + j * LANES) * inverse;

            save(p + j * LANES, value);
            s[j % 4] = vector_fma(load(v + j * LANES), value, s[j % 4]);
        }
        kappa = vector_set(-0.5f) * (sum_of(s) * inverse);
        for (size_t j = 0; j < i; j++)
            save(p + j * LANES, vector_fma(kappa, load(v + j * LANES), load(p + j * LANES)));
        update(i, a, v, p);
    }
    save(diagonal, load(a));
    save(off + (length - 1) * stride, vector_set(0.0f));
}

/* ---- QL ---- */

/* What a lane is at: rows l .. m of the matrix, l < m, or l = P once it is done. */
struct place {
    float l[2 * LANES];
    float m[2 * LANES];
    float small[2 * LANES]; /* the first row from l + 1 on whose element of `off` counts as 0 */
    float tolerance[2 * LANES];
    float d[2 * LANES], d_next[2 * LANES], d_end[2 * LANES], e[2 * LANES]; /* for the shift */
    float g[2 * LANES], p[2 * LANES];
};

static void set_tolerance(const struct solver_batch *batch, struct place *place)
{
    const size_t lanes = batch->groups * LANES;

    for (size_t u = 0; u < lanes; u += LANES) {
        vector_f32 norm = vector_set(0.0f);
        vector_f32 before = vector_set(0.0f);

        for (size_t i = 0; i < batch->length; i++) {
            vector_f32 after = vector_abs(load(batch->off + i * lanes + u));
            vector_f32 sum = vector_abs(load(batch->diagonal + i * lanes + u)) + (before + after);

            norm = vector_select(vector_less(norm, sum), sum, norm);
            before = after;
        }
        save(place->tolerance + u, norm * vector_set(SOLVER_DEFLATION));
    }
}

/* The rows of a lane's next sweep, when those of the last one are known. */
static void find_rows(struct solver_batch *batch, struct place *place, size_t lane)
{
    const size_t length = batch->length;
    const size_t lanes = batch->groups * LANES;
    const float *e = batch->off + lane;
    const float *d = batch->diagonal + lane;
    size_t l = (size_t)place->l[lane];
    size_t m = (size_t)place->small[lane];

    if (l < m && __builtin_fabsf(e[l * lanes]) <= place->tolerance[lane])
        l++;
    while (l == m && l < length) {
        m = ++l;
        while (m + 1 < length && !(__builtin_fabsf(e[m * lanes]) <= place->tolerance[lane]))
            m++;
    }
    if (l < length && batch->sweeps[lane] == solver_sweep_cap(l)) {
        batch->capped++;
        l = m = length;
    }
    place->l[lane] = (float)l;
    place->m[lane] = place->small[lane] = (float)m;
    if (l < length) {
        batch->sweeps[lane]++;
        place->d[lane] = d[l * lanes];
        place->d_next[lane] = d[(l + 1) * lanes];
        place->d_end[lane] = d[m * lanes];
        place->e[lane] = e[l * lanes];
    }
}

/* One sweep of all lanes: rotations of rows last - 1 .. first, each for the lanes it concerns. */
INLINE void sweep(const struct solver_batch *batch, struct place *place, size_t groups,
                  size_t first, size_t last, float *log)
{
    const size_t lanes = groups * LANES;
    vector_f32 l[2], m[2], small[2], tolerance[2];
    struct solver_sweep state[2];

    UNROLL
    for (size_t u = 0; u < groups; u++) {
        l[u] = load(place->l + u * LANES);
        m[u] = load(place->m + u * LANES);
        small[u] = m[u];
        tolerance[u] = load(place->tolerance + u * LANES);
        solver_shift(load(place->d + u * LANES), load(place->d_next + u * LANES),
                     load(place->d_end + u * LANES), load(place->e + u * LANES), &state[u]);
    }
    for (size_t i = last; i-- > first;) {
        float *d = batch->diagonal + i * lanes;
        float *e = batch->off + i * lanes;
        float *cs = log + (i - first) * 2 * lanes;
        const vector_f32 here = vector_set((float)i);
        const vector_f32 next = vector_set((float)(i + 1));

        UNROLL
        for (size_t u = 0; u < groups; u++) {
            vector_mask active = vector_both(vector_less(l[u], next), vector_less(here, m[u]));
            struct solver_sweep after = state[u];
            vector_f32 d_next = load(d + lanes + u * LANES);
            vector_f32 d_old = d_next;
            vector_f32 e_next;

            solver_rotation(load(d + u * LANES), &d_next, load(e + u * LANES), &e_next, &after);
            save(cs + u * LANES, after.c);
            save(cs + lanes + u * LANES, after.s);
            save(d + lanes + u * LANES, vector_select(active, d_next, d_old));
            save(e + lanes + u * LANES, vector_select(active, e_next, load(e + lanes + u * LANES)));
            /* At row m the element is overwritten with 0 in the end. */
            small[u] = vector_select(
                vector_both(active, vector_less(next, m[u])),
                vector_select(vector_less(tolerance[u], e_next), small[u], next), small[u]);
            state[u].c = vector_select(active, after.c, state[u].c);
            state[u].s = vector_select(active, after.s, state[u].s);
            state[u].p = vector_select(active, after.p, state[u].p);
            state[u].g = vector_select(active, after.g, state[u].g);
        }
    }
    UNROLL
    for (size_t u = 0; u < groups; u++) {
        save(place->small + u * LANES, small[u]);
        save(place->g + u * LANES, state[u].g);
        save(place->p + u * LANES, state[u].p);
    }
}

/* T = Y D Y^T: D in `diagonal`, and the log of Y's rotations. Returns the number of sweeps. */
static size_t diagonalise(struct solver_batch *batch)
{
    const size_t length = batch->length;
    const size_t lanes = batch->groups * LANES;
    struct place place;
    size_t logged = 0;
    size_t sweeps = 0;

    set_tolerance(batch, &place);
    for (size_t lane = 0; lane < lanes; lane++) {
        batch->sweeps[lane] = 0;
        place.l[lane] = 0.0f;
        place.small[lane] = 0.0f;
        for (size_t m = 0; m < length; m++) {
            if (m + 1 == length ||
                __builtin_fabsf(batch->off[m * lanes + lane]) <= place.tolerance[lane]) {
                place.small[lane] = (float)m;
                break;
            }
        }
        place.d[lane] = place.d_next[lane] = place.d_end[lane] = place.e[lane] = 1.0f;
    }
    for (;; sweeps++) {
        unsigned short *log_begin = batch->log_begin + sweeps * lanes;
        unsigned short *log_end = batch->log_end + sweeps * lanes;
        size_t first = length;
        size_t last = 0;

        for (size_t lane = 0; lane < lanes; lane++) {
            find_rows(batch, &place, lane);
            log_begin[lane] = (unsigned short)place.l[lane];
            log_end[lane] = (unsigned short)place.m[lane];
            if (log_begin[lane] < length) {
                first = log_begin[lane] < first ? log_begin[lane] : first;
                last = log_end[lane] > last ? log_end[lane] : last;
            }
        }
        if (first == length)
            return sweeps;
        batch->log_first[sweeps] = logged - first;
        if (batch->groups == 2)
            sweep(batch, &place, 2, first, last, batch->log + logged * 2 * lanes);
        else
            sweep(batch, &place, 1, first, last, batch->log + logged * 2 * lanes);
        logged += last - first;
        for (size_t lane = 0; lane < lanes; lane++) {
            size_t l = log_begin[lane];
            size_t m = log_end[lane];

            if (l == length)
                continue;
            batch->diagonal[l * lanes + lane] -= place.p[lane];
            batch->off[l * lanes + lane] = place.g[lane];
            batch->off[m * lanes + lane] = 0.0f;
        }
    }
}

/* ---- Eigenvectors ---- */

/* For each eigenvalue how many come before it: larger ones, or equal ones above it. */
static void sort(const struct solver_batch *batch)
{
    const size_t length = batch->length;
    const size_t lanes = batch->groups * LANES;
    const vector_f32 one = vector_set(1.0f);

    for (size_t u = 0; u < lanes; u += LANES) {
        for (size_t i = 0; i < length; i++) {
            vector_f32 value = load(batch->diagonal + i * lanes + u);
            vector_f32 before = vector_set(0.0f);

            for (size_t j = 0; j < i; j++)
                before = vector_select(vector_less(load(batch->diagonal + j * lanes + u), value),
                                       before, before + one);
            for (size_t j = i + 1; j < length; j++)
                before = vector_select(vector_less(value, load(batch->diagonal + j * lanes + u)),
                                       before + one, before);
            save(batch->order + i * lanes + u, before);
        }
    }
}

/* Applies one sweep's rotations, rows begin .. end, to a panel of L with rows of ld elements. */
static void rotate(size_t begin, size_t end, const float *log, size_t lanes, size_t ld, float *left)
{
    vector_f32 upper[VECTORS];

    UNROLL
    for (size_t j = 0; j < VECTORS; j++)
        upper[j] = load(left + begin * ld + j * LANES);
    for (size_t i = begin; i < end; i++) {
        const vector_f32 c = vector_set(log[(i - begin) * 2 * lanes]);
        const vector_f32 s = vector_set(log[(i - begin) * 2 * lanes + lanes]);

        UNROLL
        for (size_t j = 0; j < VECTORS; j++) {
            vector_f32 next = load(left + (i + 1) * ld + j * LANES);

            save(left + i * ld + j * LANES, vector_fma(c, upper[j], s * next));
            upper[j] = vector_fma(-s, upper[j], c * next);
        }
    }
    UNROLL
    for (size_t j = 0; j < VECTORS; j++)
        save(left + end * ld + j * LANES, upper[j]);
}

/* Columns of Y times SOLVER_UNIT: the log backwards, on unit vectors. */
static void apply_log(const struct solver_batch *batch, size_t sweeps)
{
    const size_t length = batch->length;
    const size_t lanes = batch->groups * LANES;

    for (size_t page = 0; page < batch->pages; page++) {
        const size_t ld = solver_padded(batch->rank[page]);
        float *left = solver_left(batch, page);

        memset(left, 0, length * ld * sizeof *left);
        for (size_t i = 0; i < length; i++) {
            float column = batch->order[i * lanes + page];

            if (column < (float)batch->rank[page])
                left[i * ld + (size_t)column] = SOLVER_UNIT;
        }
    }
    for (size_t page = 0; page < batch->pages; page += TURN) {
        for (size_t t = sweeps; t-- > 0;) {
            for (size_t i = page; i < page + TURN && i < batch->pages; i++) {
                size_t begin = batch->log_begin[t * lanes + i];
                size_t end = batch->log_end[t * lanes + i];
                size_t ld = solver_padded(batch->rank[i]);
                size_t at = begin < end ? batch->log_first[t] + begin : 0;

                for (size_t j = 0; begin < end && j < ld; j += SOLVER_PANEL)
                    rotate(begin, end, batch->log + at * 2 * lanes + i, lanes, ld,
                           solver_left(batch, i) + j);
            }
        }
    }
}

/* One panel of one page's L, and the page's reflections. */
struct strip {
    float *left;
    size_t ld;
    const float *v;       /* the lower triangle */
    const float *inverse; /* [P] */
};

/*
 * Q Y of `count` panels, a constant. Each reflection takes w = -(v^T L) inverse first, which is one
 * chain: panels hide each other's latency, and the next reflection's w begins while this one's
 * product is at hand.
 */
INLINE void reflect(size_t count, size_t length, const struct strip *from)
{
    vector_f32 w[STRIPS][VECTORS], next[STRIPS][VECTORS];
    struct strip strips[STRIPS]; /* which no store can change */

    UNROLL
    for (size_t t = 0; t < count; t++) {
        strips[t] = from[t];
        UNROLL
        for (size_t j = 0; j < VECTORS; j++)
            next[t][j] = vector_fma(vector_set(strips[t].v[triangle(1) * LANES]),
                                    load(strips[t].left + j * LANES), vector_set(0.0f));
    }
    for (size_t k = 1; k < length; k++) {
        const size_t at = triangle(k) * LANES;
        /* After the last reflection what comes out is not used. */
        const size_t after = k + 1 < length ? triangle(k + 1) * LANES : at;

        UNROLL
        for (size_t t = 0; t < count; t++) {
            UNROLL
            for (size_t j = 0; j < VECTORS; j++) {
                w[t][j] = -(next[t][j] * vector_set(strips[t].inverse[k * LANES]));
                next[t][j] = vector_set(0.0f);
            }
        }
        for (size_t i = 0; i < k; i++) {
            UNROLL
            for (size_t t = 0; t < count; t++) {
                const vector_f32 v = vector_set(strips[t].v[at + i * LANES]);
                const vector_f32 v_next = vector_set(strips[t].v[after + i * LANES]);
                float *left = strips[t].left + i * strips[t].ld;

                UNROLL
                for (size_t j = 0; j < VECTORS; j++) {
                    vector_f32 value = vector_fma(v, w[t][j], load(left + j * LANES));

                    save(left + j * LANES, value);
                    next[t][j] = vector_fma(v_next, value, next[t][j]);
                }
            }
        }
        UNROLL
        for (size_t t = 0; t < count; t++) {
            UNROLL
            for (size_t j = 0; j < VECTORS; j++)
                next[t][j] =
                    vector_fma(vector_set(strips[t].v[after + k * LANES]),
                               load(strips[t].left + k * strips[t].ld + j * LANES), next[t][j]);
        }
    }
}

/* Columns of L of length 1, their entries of largest magnitude positive. */
static void normalise(const struct solver_batch *batch, size_t ld, float *left)
{
    vector_f32 squares[VECTORS][4];
    vector_f32 most[VECTORS];

    UNROLL
    for (size_t j = 0; j < VECTORS; j++) {
        most[j] = vector_set(0.0f);
        UNROLL
        for (size_t t = 0; t < 4; t++)
            squares[j][t] = vector_set(0.0f);
    }
    for (size_t i = 0; i < batch->length; i += 4) {
        UNROLL
        for (size_t t = 0; t < 4; t++) {
            UNROLL
            for (size_t j = 0; j < VECTORS; j++) {
                vector_f32 value = load(left + (i + t) * ld + j * LANES);

                squares[j][t] = vector_fma(value, value, squares[j][t]);
                most[j] = vector_select(vector_less(vector_abs(most[j]), vector_abs(value)), value,
                                        most[j]);
            }
        }
    }
    UNROLL
    for (size_t j = 0; j < VECTORS; j++) {
        vector_f32 square = sum_of(squares[j]);
        vector_f32 factor = vector_with_sign(vector_set(1.0f) / vector_sqrt(square), most[j]);

        /* Columns past the rank are 0. */
        most[j] = vector_select(vector_less(vector_set(0.0f), square), factor, vector_set(0.0f));
    }
    /* 0 is added so that no element is -0. */
    for (size_t i = 0; i < batch->length; i++) {
        UNROLL
        for (size_t j = 0; j < VECTORS; j++)
            save(left + i * ld + j * LANES,
                 load(left + i * ld + j * LANES) * most[j] + vector_set(0.0f));
    }
}

static void solve(struct solver_batch *batch)
{
    const size_t length = batch->length;
    struct strip strips[STRIPS];
    size_t count = 0;
    size_t sweeps;

    for (size_t group = 0; group < batch->groups; group++) {
        gather(batch, group);
        tridiagonalise(batch, group);
    }
    sweeps = diagonalise(batch);
    sort(batch);
    apply_log(batch, sweeps);
    for (size_t page = 0; page < batch->pages; page++) {
        const size_t ld = solver_padded(batch->rank[page]);
        const size_t group = page / LANES;

        for (size_t j = 0; j < ld; j += SOLVER_PANEL) {
            strips[count++] =
                (struct strip){solver_left(batch, page) + j, ld,
                               batch->gram + group * triangle(length) * LANES + page % LANES,
                               batch->inverse + group * length * LANES + page % LANES};
            if (count == STRIPS) {
                reflect(STRIPS, length, strips);
                count = 0;
            }
        }
    }
    while (count > 0)
        reflect(1, length, &strips[--count]);
    for (size_t page = 0; page < batch->pages; page++) {
        const size_t ld = solver_padded(batch->rank[page]);

        for (size_t j = 0; j < ld; j += SOLVER_PANEL)
            normalise(batch, ld, solver_left(batch, page) + j);
    }
}

/* ---- Projection ---- */

/* Columns of R^T without energy become 0. */
static void drop_noise(size_t rank, size_t d, size_t ld, const float *norm, float *right)
{
    float largest = 0.0f;

    for (size_t c = 0; c < rank; c++)
        largest = norm[c] > largest ? norm[c] : largest;
    for (size_t c = 0; c < rank; c++)
        if (norm[c] <= SOLVER_NOISE * largest)
            for (size_t i = 0; i < d; i++)
                right[i * ld + c] = 0.0f;
}

/* Rows i .. i + rows - 1 of a panel of R^T, and their squares into the chains of their columns. */
INLINE void project_rows(size_t rows, size_t length, const float *transposed, const float *left,
                         size_t ld, vector_f32 up, float *right, vector_f32 squares[VECTORS][4])
{
    vector_f32 sum[TILE_ROWS][VECTORS];

    tile(rows, length, transposed, length, 1, left, ld, sum);
    UNROLL
    for (size_t t = 0; t < rows; t++) {
        UNROLL
        for (size_t u = 0; u < VECTORS; u++) {
            squares[u][t % 4] = vector_fma(sum[t][u], sum[t][u], squares[u][t % 4]);
            save(right + t * ld + u * LANES, sum[t][u] * up + vector_set(0.0f));
        }
    }
}

static void project(const struct solver_batch *batch, size_t page, size_t d,
                    const float *transposed, float *right)
{
    const size_t length = batch->length;
    const size_t rank = batch->rank[page];
    const size_t ld = solver_padded(rank);
    const float *left = solver_left(batch, page);
    const vector_f32 up = vector_set(solver_scale_up(batch->exponent[page]));
    float norm[256];

    for (size_t j = 0; j < ld; j += SOLVER_PANEL) {
        vector_f32 squares[VECTORS][4];
        size_t i = 0;

        for (size_t u = 0; u < VECTORS; u++)
            for (size_t t = 0; t < 4; t++)
                squares[u][t] = vector_set(0.0f);
        for (; i + TILE_ROWS <= d; i += TILE_ROWS)
            project_rows(TILE_ROWS, length, transposed + i * length, left + j, ld, up,
                         right + i * ld + j, squares);
        if (i < d)
            project_rows(TILE_REST, length, transposed + i * length, left + j, ld, up,
                         right + i * ld + j, squares);
        for (size_t u = 0; u < VECTORS; u++)
            save(norm + j + u * LANES, sum_of(squares[u]));
    }
    drop_noise(rank, d, ld, norm, right);
}

const struct solver SOLVER = {
    .name = SOLVER_NAME,
    .lanes = LANES,
    .bytes = bytes,
    .begin = begin,
    .add = add,
    .solve = solve,
    .project = project,
};
