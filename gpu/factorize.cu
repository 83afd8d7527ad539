/* SPDX-License-Identifier: MIT */
/*
 * Pages to factors by the solver `batched`: the operations of lib/solver_steps.h in the order that
 * cpu/solver.h tells, so that factors have the bits of every other backend. This file is built
 * without contraction, approximation and flush-to-zero.
 *
 * A problem is K or V of one page and head. Where the layer's pages are in the order for tensor
 * cores, so P is 32, three kernels follow each other: a warp a problem makes it tridiagonal, a
 * thread a problem finds the eigenvalues and logs the rotations, and half a warp a problem, a lane
 * a column of L, makes the factors. Elsewhere a block works on one problem in global memory; any P,
 * d and rank do. In both, threads share what may be done in any order, and every sum is one
 * thread's.
 *
 * With the solver `cusolver` the plain kernel is cut in two, and cuSOLVER works in between.
 */
#include "factorize.h"

#include "cusolver.h"
#include "store.h"

typedef float real;
typedef bool real_mask;

#define STEP                 __device__ static inline
#define real_of(x)           (x)
#define real_fma(a, b, c)    __fmaf_rn(a, b, c)
#define real_sqrt(a)         __fsqrt_rn(a)
#define real_less(a, b)      ((a) < (b))
#define real_select(m, a, b) ((m) ? (a) : (b))
#define real_abs(a)          fabsf(a)
#define real_with_sign(a, b) copysignf(a, b)
extern "C" {
#include "solver_steps.h"
}

/* Scratch of all problems that are worked on at once, unless one takes more; and of a step that has
 * more of them, for the kernels of which one gives each problem a thread alone. */
#define SCRATCH_BYTES      ((size_t)8 << 20)
#define MANY_SCRATCH_BYTES ((size_t)128 << 20)

/* The same around cuSOLVER: 16,384 problems of 32 x 128. */
#define CUSOLVER_SCRATCH_BYTES ((size_t)512 << 20)

/* Of one problem, offsets in floats; a matrix is row-major. */
struct scratch_layout {
    size_t x;        /* [P, d], scaled */
    size_t gram;     /* lower triangle by rows, then the reflections */
    size_t inverse;  /* [P] of the reflections */
    size_t diagonal; /* [P] */
    size_t off;      /* [P] */
    size_t order;    /* [P]: how many eigenvalues come before this one */
    size_t product;  /* [P]: A v */
    size_t log;      /* c and s of each rotation */
    size_t rows;     /* [cap]: first and last row of each sweep */
    size_t left;     /* [P, r] */
    size_t right;    /* [r, d] */
    size_t norm;     /* [r], or the roots of INT4 */
    size_t floats;
};

EVERYWHERE size_t take_floats(size_t *floats, size_t n)
{
    size_t at = *floats;

    *floats += (n + 31) / 32 * 32;
    return at;
}

EVERYWHERE struct scratch_layout scratch_layout_of(size_t length, size_t d, size_t rank)
{
    struct scratch_layout layout;
    const size_t cap = solver_sweep_cap(length - 1) + 1;

    layout.floats = 0;
    layout.x = take_floats(&layout.floats, length * d);
    layout.gram = take_floats(&layout.floats, length * (length + 1) / 2);
    layout.inverse = take_floats(&layout.floats, length);
    layout.diagonal = take_floats(&layout.floats, length);
    layout.off = take_floats(&layout.floats, length);
    layout.order = take_floats(&layout.floats, length);
    layout.product = take_floats(&layout.floats, length);
    layout.log = take_floats(&layout.floats, 2 * solver_rotations(length));
    layout.rows = take_floats(&layout.floats, cap);
    layout.left = take_floats(&layout.floats, length * rank);
    layout.right = take_floats(&layout.floats, rank * d);
    layout.norm = take_floats(&layout.floats, rank);
    return layout;
}

static size_t largest_rank(const struct geometry *geometry)
{
    size_t rank = 1;

    for (size_t layer = 0; layer < geometry->layers; layer++) {
        rank = geometry->rank_k[layer] > rank ? geometry->rank_k[layer] : rank;
        rank = geometry->rank_v[layer] > rank ? geometry->rank_v[layer] : rank;
    }
    return rank;
}

/* One problem, as a block has it. */
struct problem {
    struct device_job job;
    unsigned head;
    bool is_key;
    unsigned rank;
    unsigned length;
    unsigned d;
    float *x, *gram, *inverse, *diagonal, *off, *product, *log, *left, *right, *norm;
    uint32_t *order, *rows;
};

/* T and what makes it diagonal, of one problem; elements lie `stride` apart, and so do pairs. */
struct tridiagonal {
    float *diagonal, *off; /* [P] */
    size_t stride;
    float *log;     /* c and s of each rotation */
    uint32_t *rows; /* of each sweep: first row << 16 | last row */
    size_t log_stride;
    unsigned length;
};

/* ---- The solver ---- */

__device__ static inline size_t triangle(size_t i)
{
    return i * (i + 1) / 2;
}

/* Element [t, i] of the page: the cached rows, then the caller's as rounded. */
__device__ static float page_element(const struct layer_view *layer, const struct problem *p,
                                     const pkv_input *input, unsigned t, unsigned i)
{
    if (t < p->job.cached_tokens)
        return load_element(layer->dtype, dense_page(layer, p->job.from_slot, p->head),
                            dense_index(layer, p->is_key, t, i));
    return rounded_element(
        layer->dtype,
        input_element(input, p->job.first_row + (t - p->job.cached_tokens), p->head, i));
}

/* Loads the page, scaled so that max|x| is in [1, 2). Returns the exponent. `shared` holds a number
 * for each thread. */
__device__ static int load_page(const struct layer_view *layer, const struct problem *p,
                                const pkv_input *input, float *shared)
{
    const unsigned n = p->length * p->d;
    float most = 0.0f;
    int exponent;

    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) {
        const float x = page_element(layer, p, input, i / p->d, i % p->d);

        p->x[i] = x;
        most = most < fabsf(x) ? fabsf(x) : most;
    }
    shared[threadIdx.x] = most;
    __syncthreads();
    for (unsigned i = 0; i < blockDim.x; i++)
        most = most < shared[i] ? shared[i] : most;
    exponent = solver_exponent(most);

    const float down = solver_scale_down(exponent);
    const float more = solver_scale_down_more(exponent);

    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) {
        if (exponent < -126)
            p->x[i] = p->x[i] * down * more;
        else if (exponent != 0)
            p->x[i] = p->x[i] * down;
    }
    __syncthreads();
    return exponent;
}

__device__ static void gram_matrix(const struct problem *p)
{
    for (unsigned n = threadIdx.x; n < p->length * p->length; n += blockDim.x) {
        const unsigned i = n / p->length;
        const unsigned j = n % p->length;
        float sum = 0.0f;

        if (j > i)
            continue;
        for (unsigned k = 0; k < p->d; k++)
            sum = __fmaf_rn(p->x[i * p->d + k], p->x[j * p->d + k], sum);
        p->gram[triangle(i) + j] = sum;
    }
    __syncthreads();
}

/* Sum over j < n of a[j] b[j] in four chains; every thread gets it. A barrier must come before the
 * next one. */
__device__ static float dot(unsigned n, const float *a, const float *b, float *shared)
{
    float sum = 0.0f;

    if (threadIdx.x < 4) {
        for (unsigned j = threadIdx.x; j < n; j += 4)
            sum = __fmaf_rn(a[j], b[j], sum);
        shared[threadIdx.x] = sum;
    }
    __syncthreads();
    return (shared[0] + shared[1]) + (shared[2] + shared[3]);
}

/* G = Q T Q^T, T by the first thread and for it alone. Row i of the triangle ends as v of the
 * reflection that made it. */
__device__ static void tridiagonalise(const struct problem *p, float *shared)
{
    for (unsigned i = p->length - 1; i > 0; i--) {
        float *v = p->gram + triangle(i);
        const float rest = dot(i - 1, v, v, shared);
        const float alpha = v[i - 1];
        float last, e, inverse, kappa;

        solver_reflection(rest, alpha, &last, &e, &inverse);
        __syncthreads();
        if (threadIdx.x == 0) {
            p->diagonal[i] = v[i];
            p->off[i - 1] = e;
            v[i - 1] = last;
            p->inverse[i] = inverse;
        }
        __syncthreads();
        for (unsigned j = threadIdx.x; j < i; j += blockDim.x) {
            float sum = 0.0f;

            for (unsigned k = 0; k < i; k++)
                sum = __fmaf_rn(p->gram[k <= j ? triangle(j) + k : triangle(k) + j], v[k], sum);
            p->product[j] = sum * inverse;
        }
        __syncthreads();
        kappa = -0.5f * (dot(i, v, p->product, shared) * inverse);
        for (unsigned j = threadIdx.x; j < i; j += blockDim.x)
            p->product[j] = __fmaf_rn(kappa, v[j], p->product[j]);
        __syncthreads();
        for (unsigned j = threadIdx.x; j < i; j += blockDim.x) {
            float *row = p->gram + triangle(j);

            for (unsigned k = 0; k <= j; k++)
                row[k] = __fmaf_rn(-v[j], p->product[k], __fmaf_rn(-p->product[j], v[k], row[k]));
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        p->diagonal[0] = p->gram[0];
        p->off[p->length - 1] = 0.0f;
    }
}

/* What an element of `off` counts as 0 up to. */
__device__ static float tolerance_of(const struct tridiagonal *t)
{
    float norm = 0.0f;
    float before = 0.0f;

    for (unsigned i = 0; i < t->length; i++) {
        const float after = fabsf(t->off[i * t->stride]);
        const float sum = fabsf(t->diagonal[i * t->stride]) + (before + after);

        norm = norm < sum ? sum : norm;
        before = after;
    }
    return norm * SOLVER_DEFLATION;
}

/* The first row from `row` on whose element of `off` counts as 0. */
__device__ static unsigned block_end(const struct tridiagonal *t, unsigned row, float tolerance)
{
    while (row + 1 < t->length && !(fabsf(t->off[row * t->stride]) <= tolerance))
        row++;
    return row;
}

/* One sweep over rows l .. m, whose first rotation is number `logged`. Returns the row that the
 * next one may end at. What a rotation takes is loaded before the one that comes first. */
__device__ static unsigned sweep_rows(const struct tridiagonal *t, unsigned l, unsigned m,
                                      float tolerance, unsigned logged)
{
    const size_t stride = t->stride;
    float *d = t->diagonal + m * stride; /* of row i + 1 */
    float *e = t->off + m * stride;
    float *log = t->log + 2 * logged * t->log_stride;
    float d_next = *d, d_here = *(d - stride), e_here = *(e - stride);
    struct solver_sweep sweep;
    unsigned small = m;

    solver_shift(t->diagonal[l * stride], t->diagonal[(l + 1) * stride], d_next, t->off[l * stride],
                 &sweep);
    for (unsigned i = m; i-- > l;) {
        const size_t below = i > l ? 2 * stride : stride;
        const float d_below = *(d - below), e_below = *(e - below);
        float e_next;

        solver_rotation(d_here, &d_next, e_here, &e_next, &sweep);
        *(uint2 *)(void *)log = {f32_bits(sweep.c), f32_bits(sweep.s)};
        *d = d_next;
        *e = e_next;
        if (i + 1 < m && !(tolerance < e_next))
            small = i + 1;
        d_next = d_here;
        d_here = d_below;
        e_here = e_below;
        d -= stride;
        e -= stride;
        log += 2 * t->log_stride;
    }
    *d = d_next - sweep.p;
    *e = sweep.g;
    t->off[m * stride] = 0.0f;
    return small;
}

/* T = Y D Y^T by one thread: D in `diagonal`, and the log of Y's rotations. Returns the number of
 * sweeps; *capped tells whether the page was left as it was at the cap. */
__device__ static unsigned diagonalise(const struct tridiagonal *t, unsigned *logged, bool *capped)
{
    const float tolerance = tolerance_of(t);
    unsigned sweeps = 0;
    unsigned l = 0;
    unsigned m = block_end(t, 0, tolerance);

    *logged = 0;
    *capped = false;
    for (;;) {
        if (l < m && fabsf(t->off[l * t->stride]) <= tolerance)
            l++;
        while (l == m && l < t->length) {
            l++;
            m = l < t->length ? block_end(t, l, tolerance) : l;
        }
        if (l >= t->length)
            return sweeps;
        if (sweeps == solver_sweep_cap(l)) {
            *capped = true;
            return sweeps;
        }
        t->rows[sweeps * t->log_stride] = l << 16 | m;
        *logged += m - l;
        m = sweep_rows(t, l, m, tolerance, *logged - (m - l));
        sweeps++;
    }
}

/* For each eigenvalue how many come before it: larger ones, or equal ones above it. */
__device__ static void sort(const struct problem *p)
{
    for (unsigned i = threadIdx.x; i < p->length; i += blockDim.x) {
        const float value = p->diagonal[i];
        uint32_t before = 0;

        for (unsigned j = 0; j < i; j++)
            before += !(p->diagonal[j] < value);
        for (unsigned j = i + 1; j < p->length; j++)
            before += value < p->diagonal[j];
        p->order[i] = before;
    }
    __syncthreads();
}

/* Column c of L = Q Y: the log backwards on SOLVER_UNIT times a unit vector, then the reflections;
 * in the end of length 1, its entry of largest magnitude positive. */
__device__ static void make_column(const struct problem *p, unsigned sweeps, unsigned logged,
                                   unsigned c)
{
    const unsigned ld = p->rank;
    float *left = p->left + c;
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float most = 0.0f;
    float square, factor;

    for (unsigned i = 0; i < p->length; i++)
        left[i * ld] = p->order[i] == c ? SOLVER_UNIT : 0.0f;
    for (unsigned t = sweeps; t-- > 0;) {
        const unsigned begin = p->rows[t] >> 16;
        const unsigned end = p->rows[t] & 0xffff;
        float upper = left[begin * ld];

        for (unsigned i = begin; i < end; i++) {
            const float cosine = p->log[2 * --logged];
            const float sine = p->log[2 * logged + 1];
            const float next = left[(i + 1) * ld];

            left[i * ld] = __fmaf_rn(cosine, upper, sine * next);
            upper = __fmaf_rn(-sine, upper, cosine * next);
        }
        left[end * ld] = upper;
    }
    for (unsigned k = 1; k < p->length; k++) {
        const float *v = p->gram + triangle(k);
        float w = 0.0f;

        for (unsigned i = 0; i < k; i++)
            w = __fmaf_rn(v[i], left[i * ld], w);
        w = -(w * p->inverse[k]);
        for (unsigned i = 0; i < k; i++)
            left[i * ld] = __fmaf_rn(v[i], w, left[i * ld]);
    }
    for (unsigned i = 0; i < p->length; i++) {
        const float value = left[i * ld];

        s[i % 4] = __fmaf_rn(value, value, s[i % 4]);
        most = fabsf(most) < fabsf(value) ? value : most;
    }
    square = (s[0] + s[1]) + (s[2] + s[3]);
    factor = 0.0f < square ? copysignf(1.0f / __fsqrt_rn(square), most) : 0.0f;
    /* 0 is added so that no element is -0. */
    for (unsigned i = 0; i < p->length; i++)
        left[i * ld] = left[i * ld] * factor + 0.0f;
}

/* R = L^T X, still scaled; then what is without energy becomes 0 and the scale is taken out. */
__device__ static void project(const struct problem *p, int exponent)
{
    const float up = solver_scale_up(exponent);
    float largest = 0.0f;

    for (unsigned n = threadIdx.x; n < p->rank * p->d; n += blockDim.x) {
        const unsigned c = n / p->d;
        const unsigned i = n % p->d;
        float sum = 0.0f;

        for (unsigned t = 0; t < p->length; t++)
            sum = __fmaf_rn(p->x[t * p->d + i], p->left[t * p->rank + c], sum);
        p->right[n] = sum;
    }
    __syncthreads();
    for (unsigned c = threadIdx.x; c < p->rank; c += blockDim.x) {
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};

        for (unsigned i = 0; i < p->d; i++)
            s[i % 4] = __fmaf_rn(p->right[c * p->d + i], p->right[c * p->d + i], s[i % 4]);
        p->norm[c] = (s[0] + s[1]) + (s[2] + s[3]);
    }
    __syncthreads();
    for (unsigned c = 0; c < p->rank; c++)
        largest = p->norm[c] > largest ? p->norm[c] : largest;
    for (unsigned n = threadIdx.x; n < p->rank * p->d; n += blockDim.x)
        p->right[n] = p->norm[n / p->d] <= SOLVER_NOISE * largest ? 0.0f : p->right[n] * up + 0.0f;
    __syncthreads();
}

/* ---- Into storage ---- */

/* Two elements as they are stored; false where one overflows. */
__device__ static inline bool pair_of(pkv_dtype dtype, float low, float high, unsigned *pair)
{
    const unsigned infinite = dtype == PKV_F16 ? 0x7c00 : 0x7f80;

    *pair = dtype == PKV_F16 ? pair_f16(low, high) : pair_bf16(low, high);
    return (*pair & infinite) != infinite && (*pair >> 16 & infinite) != infinite;
}

/* A part, whose rows lie `stride` apart; in fragments a lane writes what a lane reads. False where
 * an element of the calling thread overflows. */
__device__ static bool put_native(const struct layer_view *layer, const struct part_place *part,
                                  const float *from, unsigned stride, unsigned char *page)
{
    const unsigned lane = threadIdx.x % 32;
    const struct chunk_place chunks = part_chunks(part, 1, lane);
    unsigned char *to = page + part->offset;
    bool good = true;

    if (!part->fragments) {
        for (unsigned n = threadIdx.x; n < part->rows * part->columns; n += blockDim.x)
            good = is_finite(store_element(layer->dtype, to, n,
                                           from[n / part->columns * stride + n % part->columns])) &&
                   good;
        return good;
    }
    for (unsigned tile = threadIdx.x / 32; tile < part_tiles(part); tile += blockDim.x / 32) {
        for (unsigned h = 0; h < chunks.halves; h++) {
            float x[4];
            uint2 half;

            UNROLL
            for (unsigned n = 0; n < 4; n++) {
                unsigned row, column;

                x[n] = 0.0f;
                if (part_element_of(part, lane, tile, h, n, &row, &column))
                    x[n] = from[row * stride + column];
            }
            good = pair_of(layer->dtype, x[0], x[1], &half.x) && good;
            good = pair_of(layer->dtype, x[2], x[3], &half.y) && good;
            *(uint2 *)(void *)(to + 2 * half_index(part, chunks, 1, tile, h)) = half;
        }
    }
    return good;
}

/* To L~ and R~. */
__device__ static void balance(const struct problem *p)
{
    for (unsigned c = threadIdx.x; c < p->rank; c += blockDim.x) {
        double squares = 0.0;

        for (unsigned i = 0; i < p->d; i++)
            squares += (double)p->right[c * p->d + i] * (double)p->right[c * p->d + i];
        p->norm[c] = int4_root(squares);
    }
    __syncthreads();
    for (unsigned n = threadIdx.x; n < p->length * p->rank; n += blockDim.x)
        p->left[n] *= p->norm[n % p->rank];
    for (unsigned n = threadIdx.x; n < p->rank * p->d; n += blockDim.x)
        p->right[n] = int4_balance_right(p->right[n], p->norm[n / p->d]);
    __syncthreads();
}

/* The code of element [row, column]. */
__device__ static inline unsigned code_at(const struct part_place *part, const float *from,
                                          unsigned stride, const uint16_t *scales, unsigned row,
                                          unsigned column)
{
    const uint16_t scale = scales[scale_index(part, part->row_scales ? row : column)];

    return (unsigned)int4_code(from[row * stride + column], f16_to_f32(scale)) & 15;
}

__device__ static bool put_codes(const struct part_place *part, const float *from, unsigned stride,
                                 unsigned char *page)
{
    const unsigned lane = threadIdx.x % 32;
    const unsigned tiles = part_chunk_tiles(part);
    const struct chunk_place chunks = part_chunks(part, tiles, lane);
    const unsigned n_scales = part->row_scales ? part->rows : part->columns;
    const unsigned n_along = part->row_scales ? part->columns : part->rows;
    const unsigned n_bytes = part->fragments ? 0 : part->rows * part->columns / 2;
    const unsigned n_tiles = part->fragments ? part_tiles(part) : 0;
    unsigned char *codes = page + part->offset;
    uint16_t *scales = (uint16_t *)(void *)(page + part->scales);
    bool good = true;

    for (unsigned i = threadIdx.x; i < n_scales; i += blockDim.x) {
        float largest = 0.0f;

        for (unsigned j = 0; j < n_along; j++) {
            const float magnitude =
                fabsf(part->row_scales ? from[i * stride + j] : from[j * stride + i]);

            largest = magnitude > largest ? magnitude : largest;
        }
        scales[scale_index(part, i)] = int4_scale(largest);
        good = is_finite(f16_to_f32(int4_scale(largest))) && good;
    }
    __syncthreads();
    for (unsigned n = threadIdx.x; n < n_bytes; n += blockDim.x) {
        unsigned code[2];

        for (unsigned k = 0; k < 2; k++)
            code[k] = code_at(part, from, stride, scales, (2 * n + k) / part->columns,
                              (2 * n + k) % part->columns);
        codes[n] = (unsigned char)(code[0] | code[1] << 4);
    }
    for (unsigned tile = threadIdx.x / 32 * 2; tile < n_tiles; tile += blockDim.x / 32 * 2) {
        for (unsigned h = 0; h < chunks.halves; h++) {
            unsigned word = 0;

            for (unsigned n = 0; n < 8; n++) {
                unsigned row, column;

                if (part_element_of(part, lane, tile + n / 2 % 2, h, n % 2 * 2 + n / 4, &row,
                                    &column))
                    word |= code_at(part, from, stride, scales, row, column) << 4 * n;
            }
            *(unsigned *)(void *)(codes + half_index(part, chunks, tiles, tile, h) / 2) = word;
        }
    }
    return good;
}

/* L and R, the rows of which lie so far apart; L~ and R~ where they become codes. */
__device__ static bool put_parts(const struct layer_view *layer, const struct problem *p,
                                 unsigned left_stride, unsigned right_stride)
{
    const struct part_place *parts = &layer->parts[p->is_key ? 0 : 2];
    unsigned char *page = factor_page(layer, p->job.to_slot, p->head);
    bool good;

    if (parts[0].coded) {
        good = put_codes(&parts[0], p->left, left_stride, page);
        good = put_codes(&parts[1], p->right, right_stride, page) && good;
    } else {
        good = put_native(layer, &parts[0], p->left, left_stride, page);
        good = put_native(layer, &parts[1], p->right, right_stride, page) && good;
    }
    return good;
}

__device__ static bool put_factors(const struct layer_view *layer, const struct problem *p)
{
    if (layer->parts[p->is_key ? 0 : 2].coded)
        balance(p);
    return put_parts(layer, p, p->rank, p->d);
}

enum fault_kind { FAULT_SOLVER, FAULT_FACTORS };

/* The first problem's is kept, of whatever kind. */
__device__ static void report_fault(struct layer_faults *faults, size_t number,
                                    enum fault_kind kind)
{
    atomicMin(&faults->factor, (unsigned long long)(2 * number + kind));
}

/* ---- All problems ---- */

/* Problem `number` of a layer, in the order in which faults are reported: item, page, head, K
 * before V; as yet without room. */
__device__ static inline struct problem problem_of(const struct layer_view *layer,
                                                   const struct plan_view *plan, size_t number)
{
    struct problem p = {};

    p.job = plan->factor_jobs[number / (2 * layer->kv_heads)];
    p.head = (unsigned)(number / 2 % layer->kv_heads);
    p.is_key = number % 2 == 0;
    p.rank = p.is_key ? layer->rank_k : layer->rank_v;
    p.length = layer->length;
    p.d = layer->d;
    return p;
}

/* The same with its room in scratch. */
__device__ static struct problem problem_at(const struct layer_view *layer,
                                            const struct plan_view *plan, size_t number,
                                            float *scratch, unsigned rank_max)
{
    const struct scratch_layout layout = scratch_layout_of(layer->length, layer->d, rank_max);
    struct problem p = problem_of(layer, plan, number);

    p.x = scratch + layout.x;
    p.gram = scratch + layout.gram;
    p.inverse = scratch + layout.inverse;
    p.diagonal = scratch + layout.diagonal;
    p.off = scratch + layout.off;
    p.order = (uint32_t *)(void *)(scratch + layout.order);
    p.product = scratch + layout.product;
    p.log = scratch + layout.log;
    p.rows = (uint32_t *)(void *)(scratch + layout.rows);
    p.left = scratch + layout.left;
    p.right = scratch + layout.right;
    p.norm = scratch + layout.norm;
    return p;
}

/* One block a problem, from `first_problem` on. */
__global__ static void factorize_problems(struct layer_view layer, struct launch_plan launch,
                                          pkv_input k, pkv_input v, size_t first_problem,
                                          float *scratch, size_t scratch_floats, unsigned rank_max,
                                          struct layer_faults *faults, struct device_report *report)
{
    PKV_SHARED(float, shared); /* a number for each thread, then two for the block */
    const struct plan_view *plan = plan_of(&launch);
    const size_t number = first_problem + blockIdx.x;

    if (!plan || number >= plan->n_factor * layer.kv_heads * 2)
        return;

    const struct problem p =
        problem_at(&layer, plan, number, scratch + blockIdx.x * scratch_floats, rank_max);
    uint32_t *sweeps = (uint32_t *)(void *)(shared + blockDim.x); /* and rotations */
    const int exponent = load_page(&layer, &p, p.is_key ? &k : &v, shared);

    gram_matrix(&p);
    tridiagonalise(&p, shared);
    if (threadIdx.x == 0) {
        const struct tridiagonal t = {p.diagonal, p.off, 1, p.log, p.rows, 1, p.length};
        bool capped;

        sweeps[0] = diagonalise(&t, &sweeps[1], &capped);
        if (capped)
            atomicAdd(&report->capped_pages, 1ull);
    }
    __syncthreads();
    sort(&p);
    for (unsigned c = threadIdx.x; c < p.rank; c += blockDim.x)
        make_column(&p, sweeps[0], sweeps[1], c);
    __syncthreads();
    project(&p, exponent);
    if (!put_factors(&layer, &p))
        report_fault(faults, number, FAULT_FACTORS);
}

/* ---- By cuSOLVER ---- */

/* Scratch of n problems from `first` on, an array of each of these. */
struct eigen_batch {
    float *matrices; /* [n, P, P] */
    float *values;   /* [n, P] */
    int *info;       /* [n] */
    int *exponent;   /* [n], of the scaled page */
    float *x;        /* [n, P, d] */
    float *left;     /* [n, P, r]; r is the largest */
    float *right;    /* [n, r, d] */
    float *norm;     /* [n, r] */
    size_t first, n, rank;
};

EVERYWHERE size_t eigen_floats(size_t length, size_t d, size_t rank)
{
    return length * length + length + 2 + length * d + length * rank + rank * d + rank;
}

static struct eigen_batch divide_eigen_batch(float *scratch, size_t length, size_t d, size_t rank,
                                             size_t first, size_t n)
{
    struct eigen_batch batch;

    batch.matrices = scratch;
    batch.values = batch.matrices + n * length * length;
    batch.info = (int *)(void *)(batch.values + n * length);
    batch.exponent = batch.info + n;
    batch.x = (float *)(void *)(batch.exponent + n);
    batch.left = batch.x + n * length * d;
    batch.right = batch.left + n * length * rank;
    batch.norm = batch.right + n * rank * d;
    batch.first = first;
    batch.n = n;
    batch.rank = rank;
    return batch;
}

__device__ static struct problem eigen_problem(const struct layer_view *layer,
                                               const struct plan_view *plan,
                                               const struct eigen_batch *batch)
{
    const size_t i = blockIdx.x;
    struct problem p = problem_of(layer, plan, batch->first + i);

    p.x = batch->x + i * p.length * p.d;
    p.left = batch->left + i * p.length * batch->rank;
    p.right = batch->right + i * batch->rank * p.d;
    p.norm = batch->norm + i * batch->rank;
    return p;
}

/* One block a problem. */
__global__ static void make_gram_matrices(struct layer_view layer, struct launch_plan launch,
                                          pkv_input k, pkv_input v, struct eigen_batch batch)
{
    PKV_SHARED(float, shared); /* a number for each thread */
    const struct problem p = eigen_problem(&layer, launch.on_device, &batch);
    float *matrix = batch.matrices + (size_t)blockIdx.x * p.length * p.length;
    const int exponent = load_page(&layer, &p, p.is_key ? &k : &v, shared);

    if (threadIdx.x == 0)
        batch.exponent[blockIdx.x] = exponent;
    for (unsigned n = threadIdx.x; n < p.length * p.length; n += blockDim.x) {
        const unsigned i = n / p.length;
        const unsigned j = n % p.length;
        float sum = 0.0f;

        if (j > i)
            continue;
        for (unsigned e = 0; e < p.d; e++)
            sum = __fmaf_rn(p.x[i * p.d + e], p.x[j * p.d + e], sum);
        matrix[i * p.length + j] = matrix[j * p.length + i] = sum;
    }
}

/* One block a problem: the last eigenvectors, each with its entry of largest magnitude positive. */
__global__ static void take_eigenvectors(struct layer_view layer, struct launch_plan launch,
                                         struct eigen_batch batch, struct layer_faults *faults)
{
    const size_t number = batch.first + blockIdx.x;
    const struct problem p = eigen_problem(&layer, launch.on_device, &batch);
    const float *vectors = batch.matrices + (size_t)blockIdx.x * p.length * p.length;

    if (batch.info[blockIdx.x] != 0) {
        if (threadIdx.x == 0)
            report_fault(faults, number, FAULT_SOLVER);
        return;
    }
    for (unsigned c = threadIdx.x; c < p.rank; c += blockDim.x) {
        const float *vector = vectors + (size_t)(p.length - 1 - c) * p.length;
        float most = 0.0f;

        for (unsigned i = 0; i < p.length; i++)
            most = fabsf(most) < fabsf(vector[i]) ? vector[i] : most;
        for (unsigned i = 0; i < p.length; i++)
            p.left[i * p.rank + c] = vector[i] * copysignf(1.0f, most) + 0.0f;
    }
    __syncthreads();
    project(&p, batch.exponent[blockIdx.x]);
    if (!put_factors(&layer, &p))
        report_fault(faults, number, FAULT_FACTORS);
}

/* ---- Pages of 32 tokens ---- */

#define LENGTH       32
#define MOST_RANK    TILE
#define WARPS        4            /* of a block that makes problems tridiagonal */
#define GRAM_STRIDE  (LENGTH + 1) /* in shared memory */
#define STAGE_STRIDE (LENGTH + 4) /* of X^T there, STAGE elements of rows at once */
#define STAGE        32
#define GRAM_FLOATS  (LENGTH * (LENGTH + 1) / 2)
#define QL_THREADS   32                          /* few, so that all multiprocessors have blocks */
#define X_COLUMNS    16                          /* of X at once, for R */
#define SWEEPS       (18 + 2 * (LENGTH - 1) + 1) /* solver_sweep_cap(LENGTH - 1) + 1 */

/* Of rows in shared memory, such that a warp's lanes meet no bank twice; and of a problem, K's 16
 * banks from V's. */
#define X_STRIDE         (X_COLUMNS + 4)
#define LEFT_STRIDE      (MOST_RANK + 1)
#define RIGHT_STRIDE(d)  ((d) + 1)
#define X_FLOATS         (LENGTH * X_STRIDE + 16)
#define LEFT_FLOATS      (LENGTH * LEFT_STRIDE + 16)
#define ROTATIONS_FLOATS (2 * 16 + 16)

/* Scratch of the problems of a launch, `n` of them: numbers of a problem that one thread works on
 * lie n apart. */
struct batch {
    size_t first; /* problem */
    size_t n;
    float *diagonal, *off, *inverse; /* [32][n] */
    float *gram;                     /* [n][GRAM_FLOATS] */
    float *log;                      /* [rotation][n] pairs */
    uint32_t *rows;                  /* [sweep][n] */
    uint32_t *sweeps, *logged;       /* [n] */
    int *exponent;                   /* [n] */
};

EVERYWHERE size_t batch_floats(size_t n)
{
    return n * (3 * LENGTH + GRAM_FLOATS + 2 * solver_rotations(LENGTH) +
                solver_sweep_cap(LENGTH - 1) + 1 + 3);
}

static struct batch divide_batch(float *scratch, size_t first, size_t n)
{
    struct batch batch;

    batch.first = first;
    batch.n = n;
    batch.log = scratch; /* pairs first: they are aligned */
    batch.diagonal = batch.log + 2 * solver_rotations(LENGTH) * n;
    batch.off = batch.diagonal + LENGTH * n;
    batch.inverse = batch.off + LENGTH * n;
    batch.gram = batch.inverse + LENGTH * n;
    batch.rows = (uint32_t *)(void *)(batch.gram + GRAM_FLOATS * n);
    batch.sweeps = batch.rows + (solver_sweep_cap(LENGTH - 1) + 1) * n;
    batch.logged = batch.sweeps + n;
    batch.exponent = (int *)(void *)(batch.logged + n);
    return batch;
}

/* A graph's launch is for as many problems as there may be. */
__device__ static bool is_there(const struct layer_view *layer, const struct plan_view *plan,
                                const struct batch *batch, size_t at)
{
    return plan && at < batch->n && batch->first + at < plan->n_factor * layer->kv_heads * 2;
}

/* Which problem it is, without its scratch; the compiler knows its length. */
__device__ static struct problem warp_problem(const struct layer_view *layer,
                                              const struct plan_view *plan, size_t number)
{
    struct problem p = problem_of(layer, plan, number);

    p.length = LENGTH;
    return p;
}

/* A lane's row of a page where it is the caller's and can be loaded 16 bytes at a time, else
 * NULL. */
__device__ static const uint16_t *row_of_lane(const struct layer_view *layer,
                                              const struct problem *p, const pkv_input *input)
{
    const unsigned lane = threadIdx.x % 32;

    if (lane < p->job.cached_tokens || input->dtype != layer->dtype || !input_aligned(input))
        return NULL;
    return (const uint16_t *)input->data +
           (p->job.first_row + (lane - p->job.cached_tokens)) * input->token_stride +
           p->head * input->head_stride;
}

/* Eight elements of any row, as they are stored. */
__device__ static uint4 page_piece(const struct layer_view *layer, const struct problem *p,
                                   const pkv_input *input, unsigned t, unsigned first)
{
    uint64_t low = 0, high = 0;

    for (unsigned i = 0; i < 8; i++) {
        const float x = page_element(layer, p, input, t, first + i);

        low = low >> 16 | high << 48;
        high = high >> 16 | (uint64_t)(layer->dtype == PKV_F16 ? f16_from_f32(x) : bf16_from_f32(x))
                                << 48;
    }
    return {(unsigned)low, (unsigned)(low >> 32), (unsigned)high, (unsigned)(high >> 32)};
}

/* 8 N elements of a lane's row, which is row_of_lane() or NULL. */
template <unsigned N>
__device__ static inline void load_row(const struct layer_view *layer, const struct problem *p,
                                       const pkv_input *input, const uint16_t *row, unsigned first,
                                       uint4 pieces[N])
{
    if (row) {
        UNROLL
        for (unsigned n = 0; n < N; n++)
            pieces[n] = load_16(row + first + 8 * n);
    } else {
        UNROLL
        for (unsigned n = 0; n < N; n++)
            pieces[n] = page_piece(layer, p, input, threadIdx.x % 32, first + 8 * n);
    }
}

/* What X is multiplied by, one after the other. */
struct scale {
    float down, more;
};

__device__ static inline struct scale scale_of(int exponent)
{
    return {solver_scale_down(exponent), solver_scale_down_more(exponent)};
}

/* Sum over j < n of a[j] b[j] in four chains, by each lane. */
__device__ static float dot_of_warp(unsigned n, const float *a, const float *b)
{
    float sum = 0.0f;

    for (unsigned j = threadIdx.x % 4; j < n; j += 4)
        sum = __fmaf_rn(a[j], b[j], sum);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum;
}

/* The largest of eight magnitudes, as they are stored, and `most`. */
__device__ static inline unsigned most_of(uint4 piece, unsigned most)
{
    const unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};

    UNROLL
    for (unsigned i = 0; i < 4; i++) {
        const unsigned low = words[i] & 0x7fff, high = words[i] >> 16 & 0x7fff;

        most = low > most ? low : most;
        most = high > most ? high : most;
    }
    return most;
}

/* Lower triangle of G = X X^T; a lane has 4 rows and 8 columns of G. Returns X's exponent. */
__device__ static int gram_of_warp(const struct layer_view *layer, const struct problem *p,
                                   const pkv_input *input, float *stage, float *gram)
{
    const unsigned lane = threadIdx.x % 32;
    const unsigned row = lane / 4 * 4, column = lane % 4 * 8;
    float sums[4][8] = {};
    const uint16_t *mine = row_of_lane(layer, p, input);
    uint4 pieces[STAGE / 8];
    unsigned most = 0;
    struct scale scale;
    int exponent;

    for (unsigned first = 0; first < p->d; first += STAGE) {
        load_row<STAGE / 8>(layer, p, input, mine, first, pieces);
        UNROLL
        for (unsigned n = 0; n < STAGE / 8; n++)
            most = most_of(pieces[n], most);
    }
    most = __reduce_max_sync(0xffffffffu, most);
    exponent = solver_exponent(load_element(layer->dtype, &most, 0));
    scale = scale_of(exponent);
    /* The next columns are on their way while these are worked on. */
    for (unsigned first = 0; first <= p->d; first += STAGE) {
        if (first < p->d)
            load_row<STAGE / 8>(layer, p, input, mine, first, pieces);
        for (unsigned k = 0; k < STAGE && first > 0; k++) {
            const float *x = stage + k * STAGE_STRIDE;

            UNROLL
            for (unsigned i = 0; i < 4; i++) {
                UNROLL
                for (unsigned j = 0; j < 8; j++)
                    sums[i][j] = __fmaf_rn(x[row + i], x[column + j], sums[i][j]);
            }
        }
        __syncwarp();
        UNROLL
        for (unsigned n = 0; n < STAGE / 8 && first < p->d; n++) {
            float x[8];

            unpack(layer->dtype, pieces[n], x);
            UNROLL
            for (unsigned i = 0; i < 8; i++)
                stage[(8 * n + i) * STAGE_STRIDE + lane] = x[i] * scale.down * scale.more;
        }
        __syncwarp();
    }
    UNROLL
    for (unsigned i = 0; i < 4; i++) {
        UNROLL
        for (unsigned j = 0; j < 8; j++)
            if (column + j <= row + i)
                gram[(row + i) * GRAM_STRIDE + column + j] = sums[i][j];
    }
    __syncwarp();
    return exponent;
}

/* The first n elements of a row of G less those of v w^T + w v^T; none of these is among them. */
__device__ static inline void update_row(unsigned n, float v_row, float w_row,
                                         const float *__restrict__ v, const float *__restrict__ w,
                                         float *__restrict__ row)
{
    for (unsigned i = 0; i < n; i++)
        row[i] = __fmaf_rn(-v_row, w[i], __fmaf_rn(-w_row, v[i], row[i]));
}

/* A warp a problem, a lane a row. */
__global__ static void __launch_bounds__(32 * WARPS)
    tridiagonalise_pages(struct layer_view layer, struct launch_plan launch, pkv_input k,
                         pkv_input v, struct batch batch)
{
    PKV_SHARED(float, shared);
    const struct plan_view *plan = plan_of(&launch);
    const unsigned lane = threadIdx.x % 32;
    const size_t at = blockIdx.x * WARPS + threadIdx.x / 32;
    float *stage = shared + threadIdx.x / 32 * (STAGE * STAGE_STRIDE + LENGTH * GRAM_STRIDE);
    float *gram = stage + STAGE * STAGE_STRIDE;
    float *product = stage; /* once X is not needed */
    struct problem p;
    pkv_input input;
    int exponent;

    if (!is_there(&layer, plan, &batch, at))
        return;
    p = warp_problem(&layer, plan, batch.first + at);
    input = p.is_key ? k : v;
    exponent = gram_of_warp(&layer, &p, &input, stage, gram);
    if (lane == 0)
        batch.exponent[at] = exponent;
    for (unsigned i = LENGTH - 1; i > 0; i--) {
        float *row = gram + i * GRAM_STRIDE; /* v of the reflection */
        float *mine = gram + lane * GRAM_STRIDE;
        const float rest = dot_of_warp(i - 1, row, row);
        float last, e, inverse, kappa, x, a = 0.0f;

        solver_reflection(rest, row[i - 1], &last, &e, &inverse);
        __syncwarp();
        if (lane == 0) {
            batch.diagonal[i * batch.n + at] = row[i];
            batch.off[(i - 1) * batch.n + at] = e;
            batch.inverse[i * batch.n + at] = inverse;
            row[i - 1] = last;
        }
        __syncwarp();
        x = row[lane < i ? lane : 0];
        for (unsigned n = 0; n < i; n++)
            a = __fmaf_rn(n <= lane ? mine[n] : gram[n * GRAM_STRIDE + lane], row[n], a);
        a *= inverse;
        product[lane] = a;
        __syncwarp();
        kappa = -0.5f * (dot_of_warp(i, row, product) * inverse);
        a = __fmaf_rn(kappa, x, a);
        __syncwarp();
        product[lane] = a;
        __syncwarp();
        update_row(lane < i ? lane + 1 : 0, x, a, row, product, mine);
        __syncwarp();
    }
    if (lane == 0) {
        batch.diagonal[at] = gram[0];
        batch.off[(LENGTH - 1) * batch.n + at] = 0.0f;
    }
    for (unsigned i = 1; i < LENGTH; i++)
        if (lane < i)
            batch.gram[at * GRAM_FLOATS + triangle(i) + lane] = gram[i * GRAM_STRIDE + lane];
}

/* A thread a problem. */
__global__ static void __launch_bounds__(QL_THREADS)
    diagonalise_pages(struct layer_view layer, struct launch_plan launch, struct batch batch,
                      struct device_report *report)
{
    PKV_SHARED(float, shared);
    const struct plan_view *plan = plan_of(&launch);
    const size_t at = (size_t)blockIdx.x * QL_THREADS + threadIdx.x;
    struct tridiagonal t;
    unsigned logged;
    bool capped;

    if (!is_there(&layer, plan, &batch, at))
        return;
    t.diagonal = shared + threadIdx.x;
    t.off = t.diagonal + LENGTH * QL_THREADS;
    t.stride = QL_THREADS;
    t.log = batch.log + 2 * at;
    t.rows = batch.rows + at;
    t.log_stride = batch.n;
    t.length = LENGTH;
    for (unsigned i = 0; i < LENGTH; i++) {
        t.diagonal[i * QL_THREADS] = batch.diagonal[i * batch.n + at];
        t.off[i * QL_THREADS] = batch.off[i * batch.n + at];
    }
    batch.sweeps[at] = diagonalise(&t, &logged, &capped);
    batch.logged[at] = logged;
    for (unsigned i = 0; i < LENGTH; i++)
        batch.diagonal[i * batch.n + at] = t.diagonal[i * QL_THREADS];
    if (capped)
        atomicAdd(&report->capped_pages, 1ull);
}

/* What a block of one warp has in shared memory, in floats, of K's problem and then of V's: first
 * what columns of L are made of, then X and R. */
struct factor_places {
    unsigned columns;   /* [32][32 lanes]; then X, then L */
    unsigned gram;      /* [2][GRAM_FLOATS]: reflections */
    unsigned inverse;   /* [2][32] of them */
    unsigned rotations; /* [2][2][16] pairs: what a half of the warp works on, and then what next */
    unsigned rows;      /* [2][SWEEPS] */
    unsigned values;    /* [2][32], eigenvalues */
    unsigned order;     /* [2][32] */
    unsigned right;     /* [2][16 * RIGHT_STRIDE], where these were */
    unsigned floats;
};

EVERYWHERE struct factor_places factor_places_of(unsigned d)
{
    struct factor_places places;
    unsigned end;

    places.columns = 0;
    places.right = places.gram = places.columns + 2 * X_FLOATS;
    places.inverse = places.gram + 2 * GRAM_FLOATS;
    places.rotations = places.inverse + 2 * LENGTH;
    places.rows = places.rotations + 2 * 2 * ROTATIONS_FLOATS;
    places.values = places.rows + 2 * SWEEPS;
    places.order = places.values + 2 * LENGTH;
    end = places.order + 2 * LENGTH;
    places.floats = places.right + 2 * MOST_RANK * RIGHT_STRIDE(d);
    places.floats = places.floats > end ? places.floats : end;
    return places;
}

/* How many eigenvalues come before each. */
__device__ static void sort_of_warp(const float *values, uint32_t *order)
{
    const unsigned i = threadIdx.x;

    for (unsigned h = 0; h < 2; h++) {
        const float value = values[h * LENGTH + i];
        uint32_t before = 0;

        for (unsigned j = 0; j < LENGTH; j++) {
            const float other = values[h * LENGTH + j];

            before += j < i ? !(other < value) : j > i && value < other;
        }
        order[h * LENGTH + i] = before;
    }
}

/* c and s of one of the rotations that come after `done`, of which there are `logged`: a lane of
 * each half of the warp has its own. */
__device__ static inline uint2 fetch_rotation(const struct batch *batch, size_t at, unsigned logged,
                                              unsigned done)
{
    const unsigned n = done + threadIdx.x % 16;

    return n < logged ? load_8(batch->log + 2 * ((logged - 1 - n) * batch->n + at)) : uint2{0, 0};
}

/* The log backwards on the lane's column, whose elements lie 32 apart; `rows` of its sweeps. What
 * the next rotation takes is loaded before it is known whether that is of the same sweep: behind
 * the column and the pairs there is memory. */
__device__ static void rotate_column(const struct batch *batch, size_t at, const uint32_t *rows,
                                     float *rotations, float *column)
{
    const unsigned logged = batch->logged[at];
    const unsigned most = __reduce_max_sync(0xffffffffu, logged);
    const uint32_t *sweep = rows + batch->sweeps[at];
    float *row = column, *end = column;
    float upper = column[0], lower = 0.0f;
    uint2 mine = fetch_rotation(batch, at, logged, 0);

    for (unsigned done = 0; done < most; done += 16) {
        float *these = rotations + (done / 16 % 2 * 2 + threadIdx.x / 16) * ROTATIONS_FLOATS;
        uint2 next;

        *(uint2 *)(void *)(these + 2 * (threadIdx.x % 16)) = mine;
        __syncwarp();
        mine = fetch_rotation(batch, at, logged, done + 16);
        next = *(const uint2 *)(const void *)these;
        for (unsigned n = 0; n < 16 && done + n < logged; n++) {
            const float c = f32_from_bits(next.x), s = f32_from_bits(next.y);
            float further;

            next = *(const uint2 *)(const void *)(these + 2 * n + 2);
            if (row == end) {
                *end = upper;
                sweep--;
                row = column + (*sweep >> 16) * 32;
                end = column + (*sweep & 0xffff) * 32;
                upper = row[0];
                lower = row[32];
            }
            further = row[64];
            row[0] = __fmaf_rn(c, upper, s * lower);
            upper = __fmaf_rn(-s, upper, c * lower);
            lower = further;
            row += 32;
        }
    }
    *end = upper;
}

/* The reflections on a column. */
__device__ static void reflect_column(const float *gram, const float *inverse, float left[LENGTH])
{
    UNROLL
    for (unsigned k = 1; k < LENGTH; k++) {
        const float *v = gram + triangle(k);
        float w = 0.0f;

        UNROLL
        for (unsigned j = 0; j < k; j++)
            w = __fmaf_rn(v[j], left[j], w);
        w = -(w * inverse[k]);
        UNROLL
        for (unsigned j = 0; j < k; j++)
            left[j] = __fmaf_rn(v[j], w, left[j]);
    }
}

/* Of length 1, its entry of largest magnitude positive. */
__device__ static void finish_column(float left[LENGTH])
{
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float most = 0.0f;
    float square, factor;

    UNROLL
    for (unsigned i = 0; i < LENGTH; i++) {
        s[i % 4] = __fmaf_rn(left[i], left[i], s[i % 4]);
        most = fabsf(most) < fabsf(left[i]) ? left[i] : most;
    }
    square = (s[0] + s[1]) + (s[2] + s[3]);
    factor = 0.0f < square ? copysignf(1.0f / __fsqrt_rn(square), most) : 0.0f;
    UNROLL
    for (unsigned i = 0; i < LENGTH; i++)
        left[i] = left[i] * factor + 0.0f;
}

/* Eight elements of X, scaled, to shared memory. */
__device__ static inline void put_scaled(pkv_dtype dtype, uint4 piece, struct scale scale,
                                         float *to)
{
    float x[8];

    unpack(dtype, piece, x);
    UNROLL
    for (unsigned i = 0; i < 8; i++)
        x[i] = x[i] * scale.down * scale.more;
    UNROLL
    for (unsigned i = 0; i < 8; i += 4)
        *(uint4 *)(void *)(to + i) = {f32_bits(x[i]), f32_bits(x[i + 1]), f32_bits(x[i + 2]),
                                      f32_bits(x[i + 3])};
}

/* Four elements of the lane's row of R: sums over the rows of X. */
__device__ static inline void project_four(const float *x, const float left[LENGTH], float sums[4])
{
    UNROLL
    for (unsigned t = 0; t < LENGTH; t++) {
        const uint4 four = shared_16(x + t * X_STRIDE);

        sums[0] = __fmaf_rn(f32_from_bits(four.x), left[t], sums[0]);
        sums[1] = __fmaf_rn(f32_from_bits(four.y), left[t], sums[1]);
        sums[2] = __fmaf_rn(f32_from_bits(four.z), left[t], sums[2]);
        sums[3] = __fmaf_rn(f32_from_bits(four.w), left[t], sums[3]);
    }
}

/* balance() by a lane of its column of L and row of R. */
__device__ static void balance_column(unsigned d, float left[LENGTH], float *right)
{
    double squares = 0.0;
    float root;

    for (unsigned i = 0; i < d; i++)
        squares += (double)right[i] * (double)right[i];
    root = int4_root(squares);
    UNROLL
    for (unsigned i = 0; i < LENGTH; i++)
        left[i] *= root;
    for (unsigned i = 0; i < d; i++)
        right[i] = int4_balance_right(right[i], root);
}

/* A warp, which is a block, for K and V of a page and head. */
__global__ static void __launch_bounds__(32)
    make_factors(struct layer_view layer, struct launch_plan launch, pkv_input k, pkv_input v,
                 struct batch batch, struct layer_faults *faults)
{
    PKV_SHARED(float, shared);
    const struct plan_view *plan = plan_of(&launch);
    const struct factor_places places = factor_places_of(layer.d);
    const unsigned lane = threadIdx.x;
    const unsigned h = lane / 16, c = lane % 16;
    const size_t pair = 2 * (size_t)blockIdx.x;
    const unsigned rank = h == 0 ? layer.rank_k : layer.rank_v;
    const unsigned right_stride = RIGHT_STRIDE(layer.d);
    float *inverse = shared + places.inverse;
    float *values = shared + places.values;
    uint32_t *order = (uint32_t *)(void *)(shared + places.order);
    uint32_t *rows = (uint32_t *)(void *)(shared + places.rows) + h * SWEEPS;
    float *column = shared + places.columns + lane;
    float *x = shared + places.columns;
    float *right = shared + places.right + (h * MOST_RANK + c) * right_stride;
    float left[LENGTH], s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    struct problem p[2];
    const uint16_t *row[2];
    float norm, largest, up;

    if (!is_there(&layer, plan, &batch, pair))
        return;
    for (unsigned i = lane; i < 2 * GRAM_FLOATS / 4; i += 32)
        copy_16(shared + places.gram + 4 * i, batch.gram + pair * GRAM_FLOATS + 4 * i, true);
    for (unsigned n = 0; n < 2; n++) {
        inverse[n * LENGTH + lane] = batch.inverse[lane * batch.n + pair + n];
        values[n * LENGTH + lane] = batch.diagonal[lane * batch.n + pair + n];
    }
    for (unsigned i = c; i < batch.sweeps[pair + h]; i += 16)
        rows[i] = batch.rows[i * batch.n + pair + h];
    __syncthreads();
    sort_of_warp(values, order);
    __syncthreads();
    for (unsigned i = 0; i < LENGTH; i++)
        column[i * 32] = order[h * LENGTH + i] == c ? SOLVER_UNIT : 0.0f;
    rotate_column(&batch, pair + h, rows, shared + places.rotations, column);
    UNROLL
    for (unsigned i = 0; i < LENGTH; i++)
        left[i] = column[i * 32];
    wait_for_copies();
    __syncthreads();
    reflect_column(shared + places.gram + h * GRAM_FLOATS, inverse + h * LENGTH, left);
    finish_column(left);
    UNROLL
    for (unsigned n = 0; n < 2; n++) {
        p[n] = warp_problem(&layer, plan, batch.first + pair + n);
        p[n].is_key = n == 0; /* as the compiler does not know */
        row[n] = row_of_lane(&layer, &p[n], n == 0 ? &k : &v);
    }
    /* The next columns of X are on their way while these are worked on. */
    for (unsigned first = 0; first <= layer.d; first += X_COLUMNS) {
        uint4 pieces[2][X_COLUMNS / 8];

        UNROLL
        for (unsigned n = 0; n < 2 && first < layer.d; n++)
            load_row<X_COLUMNS / 8>(&layer, &p[n], n == 0 ? &k : &v, row[n], first, pieces[n]);
        for (unsigned i = 0; i < X_COLUMNS && first > 0; i += 4) {
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};

            project_four(x + h * X_FLOATS + i, left, sums);
            UNROLL
            for (unsigned n = 0; n < 4; n++) {
                s[n] = __fmaf_rn(sums[n], sums[n], s[n]);
                right[first - X_COLUMNS + i + n] = sums[n];
            }
        }
        __syncthreads();
        UNROLL
        for (unsigned n = 0; n < 2 && first < layer.d; n++) {
            const struct scale scale = scale_of(batch.exponent[pair + n]);

            UNROLL
            for (unsigned i = 0; i < X_COLUMNS / 8; i++)
                put_scaled(layer.dtype, pieces[n][i], scale,
                           x + n * X_FLOATS + lane * X_STRIDE + 8 * i);
        }
        __syncthreads();
    }
    norm = (s[0] + s[1]) + (s[2] + s[3]);
    largest = c < rank && norm > 0.0f ? norm : 0.0f;
    for (unsigned i = 1; i < 16; i *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, largest, i);

        largest = other > largest ? other : largest;
    }
    up = solver_scale_up(batch.exponent[pair + h]);
    for (unsigned i = 0; i < layer.d; i++)
        right[i] = norm <= SOLVER_NOISE * largest ? 0.0f : right[i] * up + 0.0f;
    if (layer.parts[2 * h].coded)
        balance_column(layer.d, left, right);
    UNROLL
    for (unsigned i = 0; i < LENGTH; i++)
        if (c < rank)
            shared[places.columns + h * LEFT_FLOATS + i * LEFT_STRIDE + c] = left[i];
    __syncthreads();
    UNROLL
    for (unsigned n = 0; n < 2; n++) {
        p[n].left = shared + places.columns + n * LEFT_FLOATS;
        p[n].right = shared + places.right + n * MOST_RANK * right_stride;
        if (!put_parts(&layer, &p[n], LEFT_STRIDE, right_stride))
            report_fault(faults, batch.first + pair + n, FAULT_FACTORS);
    }
}

/* ---- The host's side ---- */

static size_t problem_floats(const struct geometry *geometry)
{
    return scratch_layout_of(geometry->policy.page_tokens, geometry->head_dim,
                             largest_rank(geometry))
        .floats;
}

/* Of scratch for `problems` problems of either kind, within `most`. */
static size_t scratch_bytes(const struct backend *backend, bool batches, size_t problems,
                            size_t most)
{
    const size_t each =
        (batches ? batch_floats(1) : problem_floats(backend->geometry)) * sizeof(float);

    return min_size(problems, most > each ? most / each : 1) * each;
}

static size_t eigen_bytes(const struct geometry *geometry)
{
    return eigen_floats(geometry->policy.page_tokens, geometry->head_dim, largest_rank(geometry)) *
           sizeof(float);
}

/* For up to `problems` at once. */
static pkv_status open_cusolver(struct backend *backend, size_t problems)
{
    const size_t each = eigen_bytes(backend->geometry);
    const size_t room = CUSOLVER_SCRATCH_BYTES / each;
    const size_t n = min_size(min_size(problems, CUSOLVER_MATRICES), room > 1 ? room : 1);

    const pkv_status status = gpu_allocate(backend, n * each, "scratch to factorize in",
                                           (void **)&backend->eigen_scratch);

    if (status != PKV_OK)
        return status;
    backend->eigen_scratch_bytes = n * each;
    return cusolver_open(backend, backend->geometry->policy.page_tokens, n);
}

/* For as many problems as a step can have at most, if there is room: a sequence's n new tokens
 * complete up to n / P + 1 pages, and as many leave its window. */
pkv_status factorize_open(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    size_t pages = backend->capacity.max_step_tokens / geometry->policy.page_tokens;
    size_t problems;
    pkv_status status = PKV_OK;

    if (backend->capacity.factor_slots == 0)
        return PKV_OK;
    if (__builtin_add_overflow(pages, backend->capacity.max_sequences, &pages))
        pages = SIZE_MAX;
    if (__builtin_mul_overflow(pages, 2 * geometry->kv_heads, &problems))
        problems = SIZE_MAX;
    for (size_t layer = 0; layer < geometry->layers; layer++)
        gpu_need_scratch(backend, scratch_bytes(backend, store_layer(backend, layer).fragments,
                                                problems, SCRATCH_BYTES));
    if (geometry->solver == PKV_SOLVER_CUSOLVER) {
        status = open_cusolver(backend, problems);
        if (status != PKV_OK)
            return status;
    }
    backend->events = (cudaEvent_t *)memory_allocate(backend->memory, 2 * geometry->layers,
                                                     sizeof *backend->events);
    if (!backend->events)
        return fail(backend->message, PKV_ERROR_MEMORY, "cannot allocate the table of %zu layers",
                    geometry->layers);
    memset(backend->events, 0, 2 * geometry->layers * sizeof *backend->events);
    for (size_t i = 0; i < 2 * geometry->layers && status == PKV_OK; i++)
        status = gpu_check(backend, cudaEventCreate(&backend->events[i]), "cannot create an event");
    return status;
}

void factorize_close(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;

    if (backend->events)
        for (size_t i = 0; i < 2 * geometry->layers; i++)
            if (backend->events[i])
                cudaEventDestroy(backend->events[i]);
    memory_release(backend->memory, backend->events);
    gpu_release(backend, backend->many_scratch_bytes, backend->many_scratch);
    gpu_release(backend, backend->eigen_scratch_bytes, backend->eigen_scratch);
    cusolver_close(backend);
}

static void give_many_back(struct backend *backend)
{
    gpu_release_in_stream(backend, backend->many_scratch_bytes, backend->many_scratch);
    backend->many_scratch = NULL;
    backend->many_scratch_bytes = 0;
}

/* A prompt in pieces need not ask for each of them. */
pkv_status factorize_step_begin(struct backend *backend)
{
    const struct backend_plan *plan = &backend->step.plan;
    const size_t bytes =
        scratch_bytes(backend, true, backend->step.view.n_factor * backend->geometry->kv_heads * 2,
                      MANY_SCRATCH_BYTES);
    bool batches = false;
    pkv_status status;

    for (size_t layer = 0; layer < backend->geometry->layers && !batches; layer++)
        batches = store_layer(backend, layer).fragments;
    if (backend->cusolver || !batches || bytes <= backend->scratch_bytes ||
        plan->rows == plan->n_items) {
        give_many_back(backend);
        return PKV_OK;
    }
    if (bytes <= backend->many_scratch_bytes)
        return PKV_OK;
    give_many_back(backend);
    status = gpu_allocate_in_stream(backend, bytes, "scratch to factorize in",
                                    (void **)&backend->many_scratch);
    if (status == PKV_OK)
        backend->many_scratch_bytes = bytes;
    return status;
}

/* Problems `first` .. of a layer; as many as scratch has room for, and no more than `n`. Returns
 * how many. */
static size_t launch_problems(struct backend *backend, const struct layer_view *view,
                              const pkv_step_io *io, size_t first, size_t n,
                              struct layer_faults *faults)
{
    const struct geometry *geometry = backend->geometry;
    const unsigned threads = gpu_threads(geometry->policy.page_tokens);
    const size_t room = backend->scratch_bytes / (problem_floats(geometry) * sizeof(float));

    n = min_size(n, room);
    PKV_LAUNCH(factorize_problems, (unsigned)n, threads, (threads + 2) * sizeof(float),
               backend->stream, *view, gpu_plan(backend), io->k, io->v, first, backend->scratch,
               problem_floats(geometry), (unsigned)largest_rank(geometry), faults,
               gpu_report(backend, backend->faults));
    return n;
}

/* The same for pages of 32 tokens, always K and V of a page; no launch has much less to do than
 * others. */
static size_t launch_batch(struct backend *backend, const struct layer_view *view,
                           const pkv_step_io *io, size_t first, size_t n,
                           struct layer_faults *faults)
{
    const struct launch_plan plan = gpu_plan(backend);
    const bool many = backend->many_scratch != NULL;
    const size_t bytes = many ? backend->many_scratch_bytes : backend->scratch_bytes;
    const size_t room = bytes / (2 * batch_floats(1) * sizeof(float)); /* pairs */
    const size_t pairs = n / 2;
    const size_t launches = (pairs + room - 1) / room;
    struct batch batch;

    n = (pairs + launches - 1) / launches * 2;
    batch = divide_batch(many ? backend->many_scratch : backend->scratch, first, n);
    PKV_LAUNCH(tridiagonalise_pages, (unsigned)((n + WARPS - 1) / WARPS), 32 * WARPS,
               WARPS * (STAGE * STAGE_STRIDE + LENGTH * GRAM_STRIDE) * sizeof(float),
               backend->stream, *view, plan, io->k, io->v, batch);
    PKV_LAUNCH(diagonalise_pages, (unsigned)((n + QL_THREADS - 1) / QL_THREADS), QL_THREADS,
               2 * LENGTH * QL_THREADS * sizeof(float), backend->stream, *view, plan, batch,
               gpu_report(backend, backend->faults));
    PKV_LAUNCH(make_factors, (unsigned)(n / 2), 32,
               factor_places_of(view->d).floats * sizeof(float), backend->stream, *view, plan,
               io->k, io->v, batch, faults);
    return n;
}

/* All problems of a layer, of which there are `total`. */
static pkv_status run_cusolver(struct backend *backend, const struct layer_view *view,
                               const pkv_step_io *io, size_t total, struct layer_faults *faults)
{
    const struct geometry *geometry = backend->geometry;
    const unsigned threads = gpu_threads(view->length);
    const size_t room = backend->eigen_scratch_bytes / eigen_bytes(geometry);
    pkv_status status = PKV_OK;

    for (size_t first = 0, n; first < total && status == PKV_OK; first += n) {
        struct eigen_batch batch;

        n = min_size(total - first, room);
        batch = divide_eigen_batch(backend->eigen_scratch, view->length, view->d,
                                   largest_rank(geometry), first, n);
        PKV_LAUNCH(make_gram_matrices, (unsigned)n, threads, threads * sizeof(float),
                   backend->stream, *view, gpu_plan(backend), io->k, io->v, batch);
        status = cusolver_run(backend, batch.matrices, batch.values, batch.info, n);
        if (status == PKV_OK)
            PKV_LAUNCH(take_eigenvectors, (unsigned)n, threads, 0, backend->stream, *view,
                       gpu_plan(backend), batch, faults);
    }
    return status;
}

pkv_status factorize_run(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct geometry *geometry = backend->geometry;
    const struct layer_view view = store_layer(backend, layer);
    /* A token fills one page at most, and as many leave the window. */
    const size_t jobs =
        backend->step.capturing ? backend->step.view.n_items : backend->step.view.n_factor;
    const size_t total = backend->events ? jobs * geometry->kv_heads * 2 : 0;
    pkv_status status = PKV_OK;

    if (total == 0)
        return PKV_OK;
    if (backend->cusolver && backend->step.capturing)
        return fail(backend->message, PKV_ERROR_UNSUPPORTED,
                    "stream: it is being captured, which PKV_SOLVER_CUSOLVER cannot be");
    backend->step.factorized = !backend->step.capturing;
    if (backend->step.factorized)
        status = gpu_check(backend, cudaEventRecord(backend->events[2 * layer], backend->stream),
                           "cannot factorize pages");
    if (status != PKV_OK)
        return status;
    if (backend->cusolver)
        status = run_cusolver(backend, &view, io, total, backend->faults + layer);
    for (size_t first = 0; first < total && !backend->cusolver;)
        first += (view.fragments ? launch_batch : launch_problems)(
            backend, &view, io, first, total - first, backend->faults + layer);
    if (status == PKV_OK)
        status = gpu_check_launch(backend, "cannot factorize pages");
    if (status == PKV_OK && backend->step.factorized)
        status =
            gpu_check(backend, cudaEventRecord(backend->events[2 * layer + 1], backend->stream),
                      "cannot factorize pages");
    return status;
}

double factorize_seconds(const struct backend *backend)
{
    double seconds = 0.0;

    if (!backend->step.factorized)
        return 0.0;
    for (size_t layer = 0; layer < backend->geometry->layers; layer++) {
        float milliseconds = 0.0f;

        if (cudaEventElapsedTime(&milliseconds, backend->events[2 * layer],
                                 backend->events[2 * layer + 1]) == cudaSuccess)
            seconds += 1e-3 * milliseconds;
    }
    return seconds;
}

pkv_status factorize_fault(struct backend *backend, const struct backend_plan *plan, size_t layer,
                           unsigned long long fault)
{
    const struct geometry *geometry = backend->geometry;
    const unsigned long long problem = fault / 2;
    const bool is_key = problem % 2 == 0;
    const size_t head = (size_t)(problem / 2 % geometry->kv_heads);
    size_t job = (size_t)(problem / 2 / geometry->kv_heads);
    const bool coded = (is_key ? geometry->factors_k : geometry->factors_v) == PKV_FACTORS_INT4;
    size_t page = 0;

    for (size_t i = 0; i < plan->n_items; i++)
        for (size_t j = 0; j < plan->items[i].n_changes; j++)
            if (plan->items[i].changes[j].to.kind == SLOT_FACTOR && job-- == 0)
                page = plan->items[i].changes[j].page;
    if (fault % 2 == FAULT_SOLVER)
        return fail(backend->message, PKV_ERROR_SOLVER,
                    "layer %zu, KV head %zu, page %zu: %s: cuSOLVER did not converge", layer, head,
                    page, is_key ? "K" : "V");
    return fail(backend->message, PKV_ERROR_VALUE, "layer %zu, KV head %zu, page %zu: %s: %s",
                layer, head, page, is_key ? "K" : "V",
                coded ? "its INT4 scales overflow f16" : "its factors overflow the storage type");
}
