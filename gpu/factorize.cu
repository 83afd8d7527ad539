/* SPDX-License-Identifier: MIT */
/*
 * Pages to factors by the solver `batched`: the operations of lib/solver_steps.h in the order that
 * cpu/solver.h tells, so that factors have the bits of every other backend. This file is built
 * without contraction, approximation and flush-to-zero.
 *
 * A block works on one problem: K or V of one page and head. Its threads share what may be done in
 * any order, and every sum is one thread's. Everything lies in global memory; any P, d and rank do.
 */
#include "factorize.h"

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

/* Scratch of all problems that are worked on at once, unless one takes more. */
#define SCRATCH_BYTES ((size_t)8 << 20)

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
    size_t begin;    /* [cap]: rows of a sweep, and its first rotation */
    size_t end;
    size_t first;
    size_t left;  /* [P, r] */
    size_t right; /* [r, d] */
    size_t norm;  /* [r], or the roots of INT4 */
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
    layout.begin = take_floats(&layout.floats, cap);
    layout.end = take_floats(&layout.floats, cap);
    layout.first = take_floats(&layout.floats, cap);
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
    uint32_t *order, *begin, *end, *first;
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

/* Sum over j < n of a[j] b[j] in four chains; every thread gets it. */
__device__ static float dot(unsigned n, const float *a, const float *b, float *shared)
{
    float sum = 0.0f;

    if (threadIdx.x < 4) {
        for (unsigned j = threadIdx.x; j < n; j += 4)
            sum = __fmaf_rn(a[j], b[j], sum);
        shared[threadIdx.x] = sum;
    }
    __syncthreads();
    sum = (shared[0] + shared[1]) + (shared[2] + shared[3]);
    __syncthreads();
    return sum;
}

/* G = Q T Q^T. Row i of the triangle ends as v of the reflection that made it. */
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
    __syncthreads();
}

/* What an element of `off` counts as 0 up to. */
__device__ static float tolerance_of(const struct problem *p)
{
    float norm = 0.0f;
    float before = 0.0f;

    for (unsigned i = 0; i < p->length; i++) {
        const float after = fabsf(p->off[i]);
        const float sum = fabsf(p->diagonal[i]) + (before + after);

        norm = norm < sum ? sum : norm;
        before = after;
    }
    return norm * SOLVER_DEFLATION;
}

/* The first row from `row` on whose element of `off` counts as 0. */
__device__ static unsigned block_end(const struct problem *p, unsigned row, float tolerance)
{
    while (row + 1 < p->length && !(fabsf(p->off[row]) <= tolerance))
        row++;
    return row;
}

/* One sweep over rows l .. m. Returns the row that the next one may end at. */
__device__ static unsigned sweep_rows(const struct problem *p, unsigned l, unsigned m,
                                      float tolerance, float *log)
{
    float *d = p->diagonal;
    float *e = p->off;
    struct solver_sweep sweep;
    unsigned small = m;

    solver_shift(d[l], d[l + 1], d[m], e[l], &sweep);
    for (unsigned i = m; i-- > l;) {
        float e_next;

        solver_rotation(d[i], &d[i + 1], e[i], &e_next, &sweep);
        log[2 * (i - l)] = sweep.c;
        log[2 * (i - l) + 1] = sweep.s;
        e[i + 1] = e_next;
        if (i + 1 < m && !(tolerance < e_next))
            small = i + 1;
    }
    d[l] -= sweep.p;
    e[l] = sweep.g;
    e[m] = 0.0f;
    return small;
}

/* T = Y D Y^T by one thread: D in `diagonal`, and the log of Y's rotations. Returns the number of
 * sweeps; *capped tells whether the page was left as it was at the cap. */
__device__ static unsigned diagonalise(const struct problem *p, bool *capped)
{
    const float tolerance = tolerance_of(p);
    unsigned sweeps = 0;
    unsigned logged = 0;
    unsigned l = 0;
    unsigned m = block_end(p, 0, tolerance);

    *capped = false;
    for (;;) {
        if (l < m && fabsf(p->off[l]) <= tolerance)
            l++;
        while (l == m && l < p->length) {
            l++;
            m = l < p->length ? block_end(p, l, tolerance) : l;
        }
        if (l >= p->length)
            return sweeps;
        if (sweeps == solver_sweep_cap(l)) {
            *capped = true;
            return sweeps;
        }
        p->begin[sweeps] = l;
        p->end[sweeps] = m;
        p->first[sweeps] = logged;
        logged += m - l;
        m = sweep_rows(p, l, m, tolerance, p->log + 2 * p->first[sweeps]);
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

/* Column c of L = Q Y: the log backwards on a unit vector, then the reflections; of length 1, its
 * entry of largest magnitude positive. */
__device__ static void make_column(const struct problem *p, unsigned sweeps, unsigned c)
{
    const unsigned ld = p->rank;
    float *left = p->left + c;
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float most = 0.0f;
    float square, factor;

    for (unsigned i = 0; i < p->length; i++)
        left[i * ld] = p->order[i] == c ? 1.0f : 0.0f;
    for (unsigned t = sweeps; t-- > 0;) {
        const unsigned begin = p->begin[t];
        const float *log = p->log + 2 * p->first[t];
        float upper = left[begin * ld];

        for (unsigned i = begin; i < p->end[t]; i++) {
            const float cosine = log[2 * (i - begin)];
            const float sine = log[2 * (i - begin) + 1];
            const float next = left[(i + 1) * ld];

            left[i * ld] = __fmaf_rn(cosine, upper, sine * next);
            upper = __fmaf_rn(-sine, upper, cosine * next);
        }
        left[p->end[t] * ld] = upper;
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

/* False where an element of the calling thread overflows. */
__device__ static bool put_native(const struct layer_view *layer, const struct part_place *part,
                                  const float *from, unsigned char *page)
{
    bool good = true;

    for (size_t n = threadIdx.x; n < part_room(part); n += blockDim.x) {
        unsigned row, column;
        const bool there = part_element_at(part, n, &row, &column);

        good = is_finite(store_element(layer->dtype, page + part->offset, n,
                                       there ? from[row * part->columns + column] : 0.0f)) &&
               good;
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

__device__ static bool put_codes(const struct part_place *part, const float *from,
                                 unsigned char *page)
{
    const unsigned n_scales = part->row_scales ? part->rows : part->columns;
    const unsigned n_along = part->row_scales ? part->columns : part->rows;
    unsigned char *codes = page + part->offset;
    uint16_t *scales = (uint16_t *)(void *)(page + part->scales);
    bool good = true;

    for (unsigned i = threadIdx.x; i < n_scales; i += blockDim.x) {
        float largest = 0.0f;

        for (unsigned j = 0; j < n_along; j++) {
            const float magnitude =
                fabsf(part->row_scales ? from[i * part->columns + j] : from[j * part->columns + i]);

            largest = magnitude > largest ? magnitude : largest;
        }
        scales[scale_index(part, i)] = int4_scale(largest);
        good = is_finite(f16_to_f32(int4_scale(largest))) && good;
    }
    __syncthreads();
    for (size_t n = 2 * threadIdx.x; n < part_room(part); n += 2 * blockDim.x) {
        int code[2] = {0, 0};

        for (unsigned k = 0; k < 2; k++) {
            unsigned row, column;

            if (part_element_at(part, n + k, &row, &column))
                code[k] = int4_code(
                    from[row * part->columns + column],
                    f16_to_f32(scales[scale_index(part, part->row_scales ? row : column)]));
        }
        codes[n / 2] = int4_pack(code[0], code[1]);
    }
    return good;
}

__device__ static bool put_factors(const struct layer_view *layer, const struct problem *p)
{
    const struct part_place *parts = &layer->parts[p->is_key ? 0 : 2];
    unsigned char *page = factor_page(layer, p->job.to_slot, p->head);
    bool good;

    if (parts[0].coded) {
        balance(p);
        good = put_codes(&parts[0], p->left, page);
        good = put_codes(&parts[1], p->right, page) && good;
    } else {
        good = put_native(layer, &parts[0], p->left, page);
        good = put_native(layer, &parts[1], p->right, page) && good;
    }
    return good;
}

/* ---- All problems ---- */

/* Problem `number` of a layer, in the order in which faults are reported: item, page, head, K
 * before V. */
__device__ static struct problem problem_at(const struct layer_view *layer,
                                            const struct plan_view *plan, size_t number,
                                            float *scratch, unsigned rank_max)
{
    const struct scratch_layout layout = scratch_layout_of(layer->length, layer->d, rank_max);
    struct problem p;

    p.job = plan->factor_jobs[number / (2 * layer->kv_heads)];
    p.head = (unsigned)(number / 2 % layer->kv_heads);
    p.is_key = number % 2 == 0;
    p.rank = p.is_key ? layer->rank_k : layer->rank_v;
    p.length = layer->length;
    p.d = layer->d;
    p.x = scratch + layout.x;
    p.gram = scratch + layout.gram;
    p.inverse = scratch + layout.inverse;
    p.diagonal = scratch + layout.diagonal;
    p.off = scratch + layout.off;
    p.order = (uint32_t *)(void *)(scratch + layout.order);
    p.product = scratch + layout.product;
    p.log = scratch + layout.log;
    p.begin = (uint32_t *)(void *)(scratch + layout.begin);
    p.end = (uint32_t *)(void *)(scratch + layout.end);
    p.first = (uint32_t *)(void *)(scratch + layout.first);
    p.left = scratch + layout.left;
    p.right = scratch + layout.right;
    p.norm = scratch + layout.norm;
    return p;
}

/* One block a problem, from `first_problem` on. */
__global__ static void factorize_problems(struct layer_view layer, const struct plan_view *plan,
                                          pkv_input k, pkv_input v, size_t first_problem,
                                          float *scratch, size_t scratch_floats, unsigned rank_max,
                                          struct layer_faults *faults, struct device_report *report)
{
    PKV_SHARED(float, shared); /* a number for each thread, then one for the block */
    const size_t number = first_problem + blockIdx.x;

    if (number >= plan->n_factor * layer.kv_heads * 2)
        return;

    const struct problem p =
        problem_at(&layer, plan, number, scratch + blockIdx.x * scratch_floats, rank_max);
    uint32_t *sweeps = (uint32_t *)(void *)(shared + blockDim.x);
    const int exponent = load_page(&layer, &p, p.is_key ? &k : &v, shared);

    gram_matrix(&p);
    tridiagonalise(&p, shared);
    if (threadIdx.x == 0) {
        bool capped;

        *sweeps = diagonalise(&p, &capped);
        if (capped)
            atomicAdd(&report->capped_pages, 1ull);
    }
    __syncthreads();
    sort(&p);
    for (unsigned c = threadIdx.x; c < p.rank; c += blockDim.x)
        make_column(&p, *sweeps, c);
    __syncthreads();
    project(&p, exponent);
    if (!put_factors(&layer, &p))
        atomicMin(&faults->factor, (unsigned long long)number);
}

/* ---- The host's side ---- */

static size_t problem_floats(const struct geometry *geometry)
{
    return scratch_layout_of(geometry->policy.page_tokens, geometry->head_dim,
                             largest_rank(geometry))
        .floats;
}

/* As many problems as a step can have at most, and no more than SCRATCH_BYTES hold: a sequence's n
 * new tokens complete up to n / P + 1 pages, and as many leave its window. */
pkv_status factorize_open(struct backend *backend)
{
    const struct geometry *geometry = backend->geometry;
    const size_t bytes = problem_floats(geometry) * sizeof(float);
    const size_t most = SCRATCH_BYTES / bytes > 1 ? SCRATCH_BYTES / bytes : 1;
    size_t pages = backend->capacity.max_step_tokens / geometry->policy.page_tokens;
    size_t problems;
    pkv_status status;

    if (backend->capacity.factor_slots == 0)
        return PKV_OK;
    if (__builtin_add_overflow(pages, backend->capacity.max_sequences, &pages))
        pages = SIZE_MAX;
    if (__builtin_mul_overflow(pages, 2 * geometry->kv_heads, &problems) || problems > most)
        problems = most;
    status = gpu_allocate(backend, problems * bytes, "scratch to factorize in",
                          (void **)&backend->factorize_scratch);
    if (status != PKV_OK)
        return status;
    backend->factorize_problems = problems;
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
    gpu_release(backend, backend->factorize_problems * problem_floats(geometry) * sizeof(float),
                backend->factorize_scratch);
}

pkv_status factorize_run(struct backend *backend, size_t layer, const pkv_step_io *io)
{
    const struct geometry *geometry = backend->geometry;
    const struct layer_view view = store_layer(backend, layer);
    /* A token fills one page at most, and as many leave the window. */
    const size_t jobs =
        backend->step.capturing ? backend->step.view.n_items : backend->step.view.n_factor;
    const size_t total = backend->factorize_scratch ? jobs * geometry->kv_heads * 2 : 0;
    const unsigned threads = gpu_threads(geometry->policy.page_tokens);
    pkv_status status = PKV_OK;

    if (total == 0)
        return PKV_OK;
    backend->step.factorized = !backend->step.capturing;
    if (backend->step.factorized)
        status = gpu_check(backend, cudaEventRecord(backend->events[2 * layer], backend->stream),
                           "cannot factorize pages");
    if (status != PKV_OK)
        return status;
    for (size_t first = 0; first < total; first += backend->factorize_problems) {
        size_t n = total - first;

        n = n < backend->factorize_problems ? n : backend->factorize_problems;
        PKV_LAUNCH(factorize_problems, (unsigned)n, threads, (threads + 1) * sizeof(float),
                   backend->stream, view, gpu_plan(backend), io->k, io->v, first,
                   backend->factorize_scratch, problem_floats(geometry),
                   (unsigned)largest_rank(geometry), backend->faults + layer,
                   gpu_report(backend, backend->faults));
    }
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
    const bool is_key = fault % 2 == 0;
    const size_t head = (size_t)(fault / 2 % geometry->kv_heads);
    size_t job = (size_t)(fault / 2 / geometry->kv_heads);
    const bool coded = (is_key ? geometry->factors_k : geometry->factors_v) == PKV_FACTORS_INT4;
    size_t page = 0;

    for (size_t i = 0; i < plan->n_items; i++)
        for (size_t j = 0; j < plan->items[i].n_changes; j++)
            if (plan->items[i].changes[j].to.kind == SLOT_FACTOR && job-- == 0)
                page = plan->items[i].changes[j].page;
    return fail(backend->message, PKV_ERROR_VALUE, "layer %zu, KV head %zu, page %zu: %s: %s",
                layer, head, page, is_key ? "K" : "V",
                coded ? "its INT4 scales overflow f16" : "its factors overflow the storage type");
}
