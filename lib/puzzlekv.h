/* SPDX-License-Identifier: MIT */
/*
 * libpuzzlekv: a transformer's key/value cache in pages, old pages as low-rank factors.
 *
 * A cache is one pool of page slots that many sequences share. A page is `page_tokens` (P)
 * consecutive tokens of one sequence, for all layers and KV heads. The first pages (sink), the most
 * recently completed pages (window) and the incomplete last page stay dense; every other page is
 * stored, per layer and KV head, as two factors (Eq. 2 of the paper)
 *
 *     K ~ L_K R_K,  V ~ L_V R_V,   L: P x r with orthonormal columns,  R = L^T X: r x d
 *
 * and is attended directly from them (Eq. 4 and 5); no page is rebuilt to be read.
 *
 *     pkv_step_begin(cache, items, n_items, &step);      which sequences take how many tokens
 *     for each layer, ascending:
 *         pkv_step_layer(step, layer, &io);              attend, then store this layer's K and V
 *     pkv_step_end(step);                                commit; or pkv_step_abort(step)
 *
 * Conventions that hold for every function:
 *   - A function that fails changes nothing, and pkv_cache_message() tells what was wrong where.
 *   - A cache, its sequences and its step belong to one thread at a time: the caller locks.
 *     Different caches are independent and may be used by different threads at once.
 *   - Pointers are not NULL unless it says so; a cache, sequence or step that is NULL is
 *     PKV_ERROR_ARGUMENT where a function returns a status.
 *   - Sizes and strides are counted in elements unless the name says bytes.
 *   - A struct that begins with `struct_size` may be that of an older header, from 0.1.0 on, or of
 *     a newer one. Where the library reads it, a field that the caller's header lacks counts as 0,
 *     which means what the library did before it had the field, and one that the library lacks must
 *     be 0. Where the library fills it, it writes as far as the caller's struct goes, and 0 into
 *     fields that it lacks itself. Other structs never change.
 *   - The library changes no process-wide state: neither thread counts nor floating-point modes.
 *     The caller's rounding and flush-to-zero modes do not reach what it computes.
 *   - The same input gives the same bits for any number of threads and any batch; but see
 *     PKV_SOLVER_LAPACK.
 *   - In the child of fork(2) GNU's OpenMP waits forever for the parent's threads: use caches with
 *     `threads` 1 alone there.
 */
#ifndef PUZZLEKV_H
#define PUZZLEKV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version this header belongs to; pkv_version() is the library's. */
#define PKV_VERSION "0.1.0"

const char *pkv_version(void);

/* ---- Errors ------------------------------------------------------------------------------- */

typedef enum pkv_status {
    PKV_OK = 0,
    PKV_ERROR_ARGUMENT = 1,    /* an argument or field is out of range; calls are out of order */
    PKV_ERROR_MEMORY = 2,      /* the allocator returned NULL */
    PKV_ERROR_CAPACITY = 3,    /* no free slot, or more sequences or tokens than declared */
    PKV_ERROR_BUSY = 4,        /* a step is open that uses the sequence, or any step at all */
    PKV_ERROR_VALUE = 5,       /* K or V is not finite, or overflows the form it is stored in */
    PKV_ERROR_UNSUPPORTED = 6, /* this machine or build lacks the backend or instruction set */
    PKV_ERROR_SOLVER = 7,      /* PKV_SOLVER_LAPACK or _CUSOLVER did not converge */
    PKV_ERROR_DEVICE = 8,      /* the device failed; with CUDA often for all of the process */
    PKV_ERROR_IO = 9,          /* a session could not be read or written */
    PKV_ERROR_FORMAT = 10,     /* a session is damaged, or what was read is none */
    PKV_ERROR_MISMATCH = 11    /* a session is of another model or of other settings */
} pkv_status;

/* A short English name of a status, for any value; a constant, never NULL. */
const char *pkv_strerror(pkv_status status);

/* Bytes that are enough for every message, terminating zero included. */
#define PKV_MESSAGE_BYTES 256

/* ---- Configuration ------------------------------------------------------------------------- */

/* Element types of storage, inputs and outputs. Conversions round to nearest even and keep
 * subnormals. */
typedef enum pkv_dtype { PKV_F32 = 0, PKV_F16 = 1, PKV_BF16 = 2 } pkv_dtype;

/* How a page that has left the window is stored. */
typedef enum pkv_factors {
    PKV_FACTORS_NONE = 0,   /* as it is: an ordinary dense paged cache */
    PKV_FACTORS_NATIVE = 1, /* factors in the storage type */
    /*
     * Factors in codes of 4 bits with f16 scales, whatever the storage type. With s_i the norm of
     * row i of R, column i of L is multiplied and row i of R divided by sqrt(s_i); then a code is
     * x / scale to nearest even, -7 .. 7, and a scale max|x| / 7 of
     *     K   each column of L (r_K scales), each column of R (d)
     *     V   each row of L (P), each column of R (d)
     * A page whose scale overflows f16 is PKV_ERROR_VALUE. Attention reads the codes; the scales
     * go into q, into the probabilities and into the page's output.
     */
    PKV_FACTORS_INT4 = 2
} pkv_factors;

/* What computes the leading eigenvectors of a page's P x P Gram matrix. */
typedef enum pkv_solver {
    /*
     * Many pages at once in single precision and in a fixed order of operations: the same pages
     * give the same factors, bit for bit, on every instruction set, with any number of threads and
     * in whatever company. The squared error of a page is at most 1.0001 times the optimum, or
     * exceeds it by at most 10^-6 of the page's squared norm.
     */
    PKV_SOLVER_BATCHED = 1,
    /*
     * LAPACK's divide and conquer in double precision; the reference. OpenBLAS has a thread count
     * of its own, which the library leaves to the process. With another one, be it by
     * OPENBLAS_NUM_THREADS or because an OpenMP flavour of OpenBLAS is called inside a parallel
     * region, factors may differ in rounding, and directions without energy (those of a page whose
     * rank is lower than r) may be other ones, equally good.
     */
    PKV_SOLVER_LAPACK = 0,
    /*
     * NVIDIA's cuSOLVER in single precision, on the CUDA backend alone, to compare with; within the
     * same error, but directions without energy may keep some of rounding. It is opened by its
     * name, libcusolver.so.12 or .11, when a cache asks for it. Its steps cannot be captured.
     */
    PKV_SOLVER_CUSOLVER = 2
} pkv_solver;

/* How steps are done; bits of pkv_config.step_flags. */
typedef enum pkv_step_flags {
    /*
     * On a device, with a stream of the caller's: pkv_step_end() commits without waiting for what
     * was queued. What it would have failed with comes from the next call that finds the step done;
     * pkv_step_begin() looks, and waits for one of four steps under way, and every other call that
     * reads or changes sequences waits for all. That call does nothing else, but for
     * pkv_seq_close(), which closes. Then each sequence of the step accepts only
     * pkv_seq_truncate(), to exactly the tokens that it had before the step, or pkv_seq_close();
     * any other call on it returns the same status, and the message tells how many tokens these
     * are: fewer where the step has factorized the page that was incomplete before it, up to the
     * first token of that page. Elsewhere the flag means nothing.
     */
    PKV_STEP_ASYNC = 1
} pkv_step_flags;

/*
 * Where the library's memory comes from. Both functions or neither must be set; neither means
 * malloc and free. They are called by the thread that calls the library, never from a parallel
 * region, and must outlive the cache.
 */
typedef struct pkv_allocator {
    /* Returns at least `bytes` (> 0) bytes, aligned as malloc aligns, or NULL. */
    void *(*allocate)(void *opaque, size_t bytes);
    /* Takes back what `allocate` returned; never NULL. */
    void (*release)(void *opaque, void *pointer);
    void *opaque;
} pkv_allocator;

/*
 * Everything that is fixed when a cache is opened. Call pkv_config_init() first, then set at least
 * the fields marked "required". The struct and what it points to are copied by pkv_cache_open().
 */
typedef struct pkv_config {
    size_t struct_size; /* set by pkv_config_init() */

    size_t layers;      /* required, >= 1 */
    size_t query_heads; /* required, a multiple of kv_heads */
    size_t kv_heads;    /* required, >= 1; query head h reads KV head h / (query_heads/kv_heads) */
    size_t head_dim;    /* required: d, 8 .. 1024, a multiple of 8 */

    size_t page_tokens;  /* P, a multiple of 8, 8 .. 256; 32 */
    size_t sink_pages;   /* first pages, dense forever; 1 */
    size_t window_pages; /* most recently completed pages, dense; 1 */

    /* How K and V of old pages are stored; each its own, but both NONE or neither. NATIVE. */
    pkv_factors factors_k;
    pkv_factors factors_v;
    size_t rank_k; /* r_K, 1 .. min(P, d); 16. Ignored with PKV_FACTORS_NONE */
    size_t rank_v; /* r_V, 1 .. min(P, d); 14. Ignored with PKV_FACTORS_NONE */
    /* NULL, or `layers` ranks that replace rank_k, rank_v layer by layer. */
    const size_t *layer_rank_k;
    const size_t *layer_rank_v;
    pkv_solver solver; /* PKV_SOLVER_BATCHED */

    pkv_dtype dtype;     /* storage type of pages and factors; PKV_BF16 */
    float softmax_scale; /* scores are softmax_scale * q.k; 0 means 1/sqrt(d); 0 */

    /* Capacity. A step never fails for want of a slot while the tokens of all sequences, forks
     * counted in full, sum to at most max_tokens. What forks share is stored once, so they may go
     * beyond that sum as long as what is stored and what is new stay within max_tokens and slots
     * are free. pkv_footprint_of() gives the slot counts. */
    size_t max_sequences;   /* 1 */
    size_t max_tokens;      /* required: of all sequences together, and so of each */
    size_t max_step_tokens; /* new tokens of all items of one step; 0 means max_tokens; 0 */

    /* "cpu", "cuda", or "auto": CUDA where module and device are there, else the CPU; see
     * pkv_cache_backend(). NULL means "cpu"; NULL */
    const char *backend;
    /* Instruction set: "generic", or what the machine offers of "avx2", "avx512", "neon". NULL
     * means the environment variable PUZZLEKV_ISA if set, else the widest; NULL. The same input
     * gives the same bits with one instruction set; "avx512" is another one on processors that
     * have its BF16 and VNNI instructions, which it uses. */
    const char *isa;
    unsigned threads; /* OpenMP threads of one call, at most 1024; 0 means OpenMP's default; 0 */

    /* CUDA: the device's ordinal, and the cudaStream_t that everything is queued on. NULL is a
     * stream of the cache's own, and then every call waits for what it queued, and fails where it
     * fails on the CPU. 0; NULL */
    int device;
    void *stream;

    pkv_allocator allocator; /* all zero */

    size_t step_flags; /* of pkv_step_flags; 0 */
} pkv_config;

/* Sets every field to the default named above and the required ones to 0. `struct_size` is
 * sizeof(pkv_config), which the library cannot know of its caller. */
void pkv_config_init(pkv_config *config, size_t struct_size);

/* ---- Storage, computed without a cache ------------------------------------------------------ */

/*
 * What a sequence of `tokens` tokens stores. With b bytes an element, per layer and KV head:
 *     dense page pair   2 P d b            (token-exact where the page is incomplete)
 *     native factors    r (P + d) b of K and of V                               (Eq. 3)
 *     INT4 factors      r (P + d) / 2 of K and of V, and scales: 2 (r_K + d) of K, 2 (P + d) of V
 */
typedef struct pkv_footprint {
    size_t struct_size;   /* set by the caller: sizeof(pkv_footprint) */
    size_t payload_bytes; /* of the sequence, all layers and heads */
    size_t raw_bytes;     /* of the same tokens, all dense: layers * kv_heads * tokens * 2 d b */
    /* Slots that pkv_cache_open() reserves. With S = max_sequences, N = max_step_tokens,
     * w = window_pages, s = sink_pages and all = max_tokens / P + S + S / 2:
     *     with factors   dense = min(all, S (s + w + 1) + min(S (w + 1), N / 2)) + 1
     *                    factor = max(0, max_tokens / P - s)
     *     without        dense = all, factor = 0
     * One dense slot is spare for pkv_seq_truncate(). Divisions round down. */
    size_t dense_slots;
    size_t factor_slots;
} pkv_footprint;

/*
 * Checks `config` as pkv_cache_open() does (but for backend and instruction set) and fills
 * `footprint` for one sequence of `tokens` tokens (at most config->max_tokens).
 * `message` is NULL or has PKV_MESSAGE_BYTES; it is set on failure, else to "".
 * Errors: PKV_ERROR_ARGUMENT.
 */
pkv_status pkv_footprint_of(const pkv_config *config, size_t tokens, pkv_footprint *footprint,
                            char *message);

/* ---- Caches ---------------------------------------------------------------------------------- */

typedef struct pkv_cache pkv_cache;
typedef struct pkv_seq pkv_seq;
typedef struct pkv_step pkv_step;

/*
 * Opens a cache and reserves its pool. On failure *cache is NULL and `message` (NULL or
 * PKV_MESSAGE_BYTES bytes) names the offending field; on success it is "".
 * Errors: PKV_ERROR_ARGUMENT, PKV_ERROR_MEMORY, PKV_ERROR_UNSUPPORTED, PKV_ERROR_DEVICE.
 */
pkv_status pkv_cache_open(const pkv_config *config, pkv_cache **cache, char *message);

/* Aborts an open step, closes the cache's sequences, frees everything. NULL is allowed. */
void pkv_cache_close(pkv_cache *cache);

/* What the last failed call on this cache, its sequences or its step said: one line that names the
 * field, layer, head or page. "" before any failure. Owned by the cache; valid until the next call
 * on it. */
const char *pkv_cache_message(const pkv_cache *cache);

/* The backend in use, "cpu" or "cuda"; a constant. Operands of its steps are in its memory. */
const char *pkv_cache_backend(const pkv_cache *cache);

/* The instruction set in use, "generic" for instance, or the device's, as "sm_90"; valid as long as
 * the cache. */
const char *pkv_cache_isa(const pkv_cache *cache);

/* ---- Sequences ------------------------------------------------------------------------------- */

/* An empty sequence. Owned by the cache until pkv_seq_close() or pkv_cache_close().
 * Errors: PKV_ERROR_CAPACITY (max_sequences are open), PKV_ERROR_MEMORY. */
pkv_status pkv_seq_open(pkv_cache *cache, pkv_seq **seq);

/* Gives the sequence's slots back. NULL is allowed. Errors: PKV_ERROR_BUSY (in the open step). */
pkv_status pkv_seq_close(pkv_seq *seq);

/* A second sequence with the same tokens. Pages are shared and copied only when one of the two
 * writes into a shared incomplete page; neither ever sees the other's later tokens.
 * Errors: PKV_ERROR_BUSY, PKV_ERROR_CAPACITY, PKV_ERROR_MEMORY. */
pkv_status pkv_seq_fork(pkv_seq *seq, pkv_seq **fork);

/*
 * Keeps the first `tokens` tokens. Whole pages are dropped. A cut inside a dense page makes it the
 * incomplete last page; a cut inside a factorized page rebuilds that one page into a dense slot
 * (X = L R, rounded to the storage type), and it is factorized again when it leaves the window.
 * Errors: PKV_ERROR_ARGUMENT (more tokens than there are), PKV_ERROR_BUSY, PKV_ERROR_CAPACITY (no
 * free dense slot), PKV_ERROR_DEVICE.
 */
pkv_status pkv_seq_truncate(pkv_seq *seq, size_t tokens);

/* T, the committed tokens of the sequence. */
size_t pkv_seq_tokens(const pkv_seq *seq);

/* ---- Steps ----------------------------------------------------------------------------------- */

typedef struct pkv_step_item {
    pkv_seq *seq;
    size_t tokens; /* new tokens, >= 1 */
} pkv_step_item;

/*
 * Rows of heads of d contiguous elements: element i of head h of row t is
 * data[t * token_stride + h * head_stride + i]. A stride of 0 stands for the packed one:
 * head_stride d, token_stride heads * d. Rows of all items follow each other in item order. `data`
 * is aligned to its elements.
 */
typedef struct pkv_input {
    const void *data;
    pkv_dtype dtype;
    size_t token_stride;
    size_t head_stride;
} pkv_input;

typedef struct pkv_output {
    void *data;
    pkv_dtype dtype;
    size_t token_stride;
    size_t head_stride;
} pkv_output;

/* One layer's operands, after RoPE, in the backend's memory. Outputs must not overlap inputs. */
typedef struct pkv_step_io {
    size_t struct_size; /* set by the caller: sizeof(pkv_step_io) */
    pkv_input q;        /* [rows, query_heads, d]; may be empty when out is; finiteness unchecked */
    pkv_input k;        /* [rows, kv_heads, d]; finite */
    pkv_input v;        /* [rows, kv_heads, d]; finite */
    pkv_output out;     /* [rows, query_heads, d]; data NULL: store K and V, do not attend */
    float *lse;         /* NULL or [rows, query_heads]: m + ln(l) of Eq. 4-5; needs out */
} pkv_step_io;

/*
 * Plans a step in which every item's sequence takes `tokens` new tokens: slots are reserved, and
 * pages that will have left the window when the step ends are marked to be factorized in it. The
 * items array is copied. *step is owned by the cache and valid until end or abort.
 * Errors: PKV_ERROR_BUSY (a step is open), PKV_ERROR_ARGUMENT (no items, tokens 0, a sequence
 * twice or of another cache, more than max_step_tokens), PKV_ERROR_CAPACITY, PKV_ERROR_MEMORY.
 */
pkv_status pkv_step_begin(pkv_cache *cache, const pkv_step_item *items, size_t n_items,
                          pkv_step **step);

/*
 * Layer `layer` of the step; layers come in ascending order, each once. K and V are rounded to the
 * storage type; new tokens attend causally to each other as rounded, and to the cached pages as
 * stored at begin:
 *     s_p = scale (q R_K^T) L_K^T,  m_p = max s_p,  l_p = sum exp(s_p - m_p),
 *     o_p = (exp(s_p - m_p) L_V) R_V                                            (Eq. 4)
 *     out = sum exp(m_p - m) o_p / sum exp(m_p - m) l_p,  m = max m_p           (Eq. 5)
 * merged in ascending page order, in f32: where a score or an unnormalised sum exceeds its range,
 * or q is not finite, that row of that head comes out infinite or NaN, and no other. Then K and V
 * are stored, and the pages due are factorized.
 * After a failure only pkv_step_abort() is valid, and out is undefined.
 * Errors: PKV_ERROR_ARGUMENT (order, NULL data, strides), PKV_ERROR_VALUE (the message names layer,
 * head and page), PKV_ERROR_SOLVER, PKV_ERROR_MEMORY, PKV_ERROR_DEVICE.
 */
pkv_status pkv_step_layer(pkv_step *step, size_t layer, const pkv_step_io *io);

/*
 * In place of all calls of pkv_step_layer(), on CUDA with a stream of the caller's: a graph that
 * the caller launches on that stream before pkv_step_end(). It was captured from an earlier step of
 * this cache, the layers of which, one token for each of as many items as this step has, were taken
 * while the stream was being captured. Between pkv_step_begin() and the first layer capturing
 * begins, and it ends before pkv_step_end(); nothing has been computed then, so that the graph is
 * to be launched for that step too. It has the operands of that step, and serves sequences of any
 * length. pkv_step_end() tells whether it has been launched.
 * After a failure the layers can be taken one by one.
 * Errors: PKV_ERROR_ARGUMENT (layers were taken, items of several tokens, nothing was captured, or
 * what was is of no use since forks have made the page tables longer than max_tokens: capture
 * again), PKV_ERROR_UNSUPPORTED (the CPU).
 */
pkv_status pkv_step_replay(pkv_step *step);

/*
 * Commits: the new tokens count from now on and due pages are factorized. On the CPU it cannot fail
 * once every layer has succeeded. On a device layers are only queued: this function waits for them
 * and returns what a layer should have; but see PKV_STEP_ASYNC. The step stays open for abort after
 * any failure.
 * Errors: PKV_ERROR_ARGUMENT (a layer is missing or failed, a graph was not launched),
 * PKV_ERROR_VALUE, PKV_ERROR_DEVICE.
 */
pkv_status pkv_step_end(pkv_step *step);

/* Leaves every sequence, its contents and the pool as before begin. NULL is allowed. */
void pkv_step_abort(pkv_step *step);

/* ---- Inspection ------------------------------------------------------------------------------ */

/* With T tokens and c = T / P: a page that was factorized stays so; else p < sink_pages is SINK,
 * c - window_pages <= p < c is WINDOW, the incomplete last page is FILLING (sink or not). Without
 * factors, complete pages behind the window are WINDOW too. */
typedef enum pkv_page_state {
    PKV_PAGE_EMPTY = 0,
    PKV_PAGE_FILLING = 1,
    PKV_PAGE_SINK = 2,
    PKV_PAGE_WINDOW = 3,
    PKV_PAGE_FACTORIZED = 4
} pkv_page_state;

#define PKV_PAGE_STATES 5

/* "empty", "filling", "sink", "window", "factorized"; a constant, never NULL. */
const char *pkv_page_state_name(pkv_page_state state);

typedef struct pkv_page_info {
    size_t struct_size; /* set by the caller: sizeof(pkv_page_info) */
    pkv_page_state state;
    size_t first_token; /* page * P */
    size_t tokens;      /* committed tokens in the page, 0 .. P */
    size_t bytes;       /* payload of the page, all layers and KV heads */
    size_t sharers;     /* sequences that share its slot, this one included; 0 when empty */
} pkv_page_info;

/* Describes page `page`; one that the sequence does not reach is EMPTY.
 * Errors: PKV_ERROR_ARGUMENT. */
pkv_status pkv_seq_page(const pkv_seq *seq, size_t page, pkv_page_info *info);

/*
 * K and V of one page of one layer and KV head as f32, [tokens of the page, d] each, row-major; a
 * factorized page as L R of its stored factors. `k` or `v` may be NULL.
 * Errors: PKV_ERROR_ARGUMENT (a layer, head or page that is not there), PKV_ERROR_DEVICE.
 */
pkv_status pkv_seq_read_page(pkv_seq *seq, size_t layer, size_t kv_head, size_t page, float *k,
                             float *v);

typedef struct pkv_stats {
    size_t struct_size;            /* set by the caller: sizeof(pkv_stats) */
    size_t sequences;              /* open sequences */
    size_t tokens;                 /* committed tokens, forks counted in full */
    size_t pages[PKV_PAGE_STATES]; /* pages by state; a shared slot counts once in a cache */
    size_t bytes[PKV_PAGE_STATES]; /* their payload, token-exact */
    size_t payload_bytes;          /* the sum of bytes[] */
    size_t raw_bytes;              /* the same pages all dense, token-exact */
    size_t reserved_bytes;         /* the pool as allocated; 0 in a sequence's statistics */
    /* Most bytes that a committed step held beyond the pool, library scratch and plan included;
     * 0 in a sequence's statistics. */
    size_t transient_peak_bytes;
    uint64_t factorized_pages; /* pages factorized by committed steps since open */
    /* Wall time of it, all layers, without steps that a graph computed or that were not waited for;
     * 0 in a sequence's statistics. */
    double factorize_seconds;
    /* Of these how often a page's K or V of one layer and head was left at PKV_SOLVER_BATCHED's
     * iteration limit, with a larger error than need be; 0 in a sequence's statistics. */
    uint64_t capped_pages;
} pkv_stats;

/* Fills `stats` for the whole cache (a slot that several sequences share counts once, with the
 * state it has in the sequence that uses most of it). Errors: PKV_ERROR_ARGUMENT. */
pkv_status pkv_cache_stats(pkv_cache *cache, pkv_stats *stats);

/* The same for one sequence; factorized_pages is then the number of its factorized pages. */
pkv_status pkv_seq_stats(const pkv_seq *seq, pkv_stats *stats);

/*
 * XXH3-64 (seed 0) of what a sequence holds: geometry, T, page states, then row-major contents of
 * the valid tokens, layer by layer, head by head, page by page, K before V, L before R. Slot
 * numbers, threads and step boundaries do not enter. A cache's digest covers its sequences in the
 * order of their creation. Errors: PKV_ERROR_MEMORY, PKV_ERROR_DEVICE.
 */
pkv_status pkv_seq_digest(pkv_seq *seq, uint64_t *digest);
pkv_status pkv_cache_digest(pkv_cache *cache, uint64_t *digest);

/* ---- Sessions -------------------------------------------------------------------------------- */

/*
 * A session is a sequence as bytes, in the format of puzzlekv-session(5): the same bytes whatever
 * the backend, the instruction set and the machine's byte order, so that caches of the same
 * settings exchange them. Settings that must be equal: layers, query_heads, kv_heads, head_dim,
 * page_tokens, sink_pages, window_pages, factors_k, factors_v, all ranks, dtype, softmax_scale and
 * the model's id.
 */

/* Bytes that are enough for every model id, terminating zero included. */
#define PKV_MODEL_ID_BYTES 256

/* What goes with a session beside the sequence. */
typedef struct pkv_session {
    size_t struct_size;   /* set by the caller: sizeof(pkv_session) */
    const char *model_id; /* what computed K and V, in the caller's words; NULL means "" */
    /* Data of the caller's own, the tokens for instance; NULL: none, and pkv_seq_load() drops what
     * there is. user_bytes is its size; pkv_seq_load() takes it as the room there is, and sets it
     * to what is there. */
    void *user;
    size_t user_bytes;
} pkv_session;

/* Where a session goes. */
typedef struct pkv_writer {
    /* Takes all `bytes` (> 0) bytes and returns 0, or anything else where it cannot. */
    int (*write)(void *opaque, const void *data, size_t bytes);
    void *opaque;
} pkv_writer;

/* Where a session comes from. */
typedef struct pkv_reader {
    /* Puts the next 1 to `bytes` (> 0) bytes into `data` and returns how many; 0 at the end, less
     * on failure. */
    ptrdiff_t (*read)(void *opaque, void *data, size_t bytes);
    void *opaque;
} pkv_reader;

/*
 * Writes the sequence, which stays as it is. Callbacks must not use the cache.
 * Errors: PKV_ERROR_ARGUMENT (a model id that is too long), PKV_ERROR_BUSY, PKV_ERROR_IO,
 * PKV_ERROR_DEVICE.
 */
pkv_status pkv_seq_save(pkv_seq *seq, const pkv_session *session, const pkv_writer *writer);

/*
 * A new sequence from a session, of which not a byte more than its own is read. The sequence is
 * there once everything has been read and checked, values too; on failure *seq is NULL, the cache
 * is as before, and what session->user points to is undefined.
 * Errors: PKV_ERROR_ARGUMENT, PKV_ERROR_MEMORY, PKV_ERROR_CAPACITY (of sequences, tokens, slots or
 * session->user_bytes), PKV_ERROR_IO, PKV_ERROR_FORMAT, PKV_ERROR_MISMATCH, PKV_ERROR_DEVICE.
 */
pkv_status pkv_seq_load(pkv_cache *cache, pkv_session *session, const pkv_reader *reader,
                        pkv_seq **seq);

/*
 * The same with a file. It is written whole or not at all: a temporary file beside it, PATH.XXXXXX,
 * replaces it once it is on the disk. Links are followed; a file that is not a regular one is
 * PKV_ERROR_IO, and so is a link to nothing. The new file has the mode of the one that it replaces,
 * else only its owner may read it. A file with bytes behind the session is PKV_ERROR_FORMAT. Saving
 * may be PKV_ERROR_MEMORY. Messages do not repeat the path.
 */
pkv_status pkv_seq_save_file(pkv_seq *seq, const pkv_session *session, const char *path);
pkv_status pkv_seq_load_file(pkv_cache *cache, pkv_session *session, const char *path,
                             pkv_seq **seq);

/* What a session says of itself at its beginning; nothing after that has been read or checked. */
typedef struct pkv_session_info {
    size_t struct_size; /* set by the caller: sizeof(pkv_session_info) */
    size_t tokens;      /* T */
    size_t user_bytes;
} pkv_session_info;

/* Reads it, without a cache. `message` is NULL or has PKV_MESSAGE_BYTES; it is set on failure, else
 * to "". Errors: PKV_ERROR_ARGUMENT, PKV_ERROR_IO, PKV_ERROR_FORMAT. */
pkv_status pkv_session_info_of(const pkv_reader *reader, pkv_session_info *info, char *message);
pkv_status pkv_session_info_of_file(const char *path, pkv_session_info *info, char *message);

#ifdef __cplusplus
}
#endif

#endif
