/* SPDX-License-Identifier: MIT */
/* The threads of a block as fibers, their barriers and what warps exchange. */
#include "block.h"
#include "fibers.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <numeric>
#include <set>
#include <vector>

enum thread_state { UNSTARTED, READY, AT_BARRIER, AT_MEETING, EXITED };

struct thread {
    struct fiber fiber;
    enum thread_state state;
    uint3 index;
    struct cuda_host_site site; /* where it waits */
    unsigned mask;
    void *brought;                             /* to a meeting */
    char *sync;                                /* what those who wait together have in common */
    bool fenced;                               /* since it last waited for others */
    void *came_to;                             /* with an atomic operation, since the last fence */
    std::vector<struct cuda_host_copy> copies; /* that may not have landed */
};

/* More than threads can be behind each other: taken in turn, each by those of one wait. */
#define SYNCS 4096

struct block {
    const struct cuda_host_launch *launch;
    uint64_t *random;
    std::vector<struct thread> threads;
    std::vector<unsigned> ready;
    std::vector<struct fiber> dead; /* stacks that were left */
    size_t at_barrier;
    size_t exited;
    unsigned current;
    struct fiber own; /* the calling thread */
    char *barrier;    /* the sync of the next one */
    char syncs[SYNCS];
    size_t n_syncs;
    char begin, end; /* of the block */
    /* Of blocks that tell each other something: to ThreadSanitizer threads of their own, without
     * what the threads of blocks before them knew. The last APART blocks have other fibers. */
    bool apart;
    std::deque<struct fiber> others;
    std::vector<void *> shared;
};

#define APART 8

/* Kernels that have been seen to use fences. */
static std::set<const void *> telling;

constinit thread_local struct cuda_host_place cuda_host_here = {};
static thread_local struct block *running;

void cuda_host_stop(const char *format, ...)
{
    va_list arguments;

    fprintf(stderr, "cuda_host: ");
    if (running)
        fprintf(stderr, "%s, block (%u, %u, %u), thread %u: ", running->launch->name, blockIdx.x,
                blockIdx.y, blockIdx.z, running->current);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static unsigned below(uint64_t *state, size_t n)
{
    return (unsigned)((next_random(state) >> 32) * n >> 32);
}

static bool same_site(const struct cuda_host_site &a, const struct cuda_host_site &b)
{
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

/* Nobody can go on. */
[[noreturn]] static void report_deadlock(const struct block *block)
{
    for (size_t i = 0; i < block->threads.size(); i++) {
        const struct thread *thread = &block->threads[i];

        if (thread->state == EXITED)
            fprintf(stderr, "cuda_host: thread %zu has returned\n", i);
        else
            fprintf(stderr, "cuda_host: thread %zu waits at %s:%d: %s (mask %08x)\n", i,
                    thread->site.file, thread->site.line, thread->site.what, thread->mask);
    }
    cuda_host_stop("no thread of the block can go on");
}

static void release_barrier(struct block *block)
{
    for (size_t i = 0; i < block->threads.size(); i++) {
        block->threads[i].state = READY;
        block->ready.push_back((unsigned)i);
    }
    block->at_barrier = 0;
}

/* Takes the next thread, or NULL when all have returned. */
static struct thread *pick(struct block *block)
{
    if (block->ready.empty()) {
        if (block->exited == block->threads.size())
            return NULL;
        if (block->at_barrier != block->threads.size())
            report_deadlock(block);
        release_barrier(block);
    }

    unsigned at = below(block->random, block->ready.size());
    unsigned number = block->ready[at];

    block->ready[at] = block->ready.back();
    block->ready.pop_back();
    block->current = number;
    cuda_host_here.thread = block->threads[number].index;
    return &block->threads[number];
}

/* A fiber's life: it runs threads until one has waited, and so keeps the stack. */
static void run_threads(void)
{
    struct block *block = running;

    for (;;) {
        fiber_acquire(&block->begin);
        block->launch->thread();
        fiber_release(&block->end);

        struct thread *self = &block->threads[block->current];
        struct thread *next;

        if (!self->copies.empty())
            cuda_host_stop("the thread returns before its copies have landed");
        self->state = EXITED;
        block->exited++;
        next = pick(block);
        if (next && next->state == UNSTARTED) {
            next->fiber = self->fiber;
            next->state = READY;
            continue;
        }
        if (!fiber_threads())
            block->dead.push_back(self->fiber);
        fiber_switch(&self->fiber, next ? &next->fiber : &block->own, true);
    }
}

static void start(struct thread *thread)
{
    if (thread->state != UNSTARTED)
        return;
    fiber_create(&thread->fiber, run_threads);
    thread->state = READY;
}

/* Lets others run until the current thread is picked again. */
static void wait(struct block *block)
{
    struct thread *self = &block->threads[block->current];
    struct thread *next = pick(block);

    if (next == self)
        return;
    start(next);
    fiber_switch(&self->fiber, &next->fiber, false);
}

static char *next_sync(struct block *block)
{
    return &block->syncs[block->n_syncs++ % SYNCS];
}

/* Whether a test wants to know what becomes of the kernels without this one: FILE:LINE. */
static const char *const which = getenv("PUZZLEKV_TEST_LEAVE_OUT");

static bool left_out(const struct cuda_host_site &site)
{
    const char *file = strrchr(site.file, '/');
    char here[100];

    if (which == NULL)
        return false;
    snprintf(here, sizeof here, "%s:%d", file ? file + 1 : site.file, site.line);
    return strcmp(here, which) == 0;
}

void cuda_host_barrier(struct cuda_host_site site)
{
    struct block *block = running;
    struct thread *self = &block->threads[block->current];

    if (left_out(site))
        return;
    if (block->exited > 0)
        cuda_host_stop("%s:%d: %s, but other threads have returned", site.file, site.line,
                       site.what);
    if (block->at_barrier > 0) {
        for (const struct thread &other : block->threads)
            if (other.state == AT_BARRIER && !same_site(other.site, site))
                cuda_host_stop("%s:%d: %s, but others wait at %s:%d", site.file, site.line,
                               site.what, other.site.file, other.site.line);
            else if (other.state == AT_BARRIER)
                break;
    }
    self->state = AT_BARRIER;
    self->site = site;
    self->mask = 0xffffffffu;
    if (block->at_barrier == 0)
        block->barrier = next_sync(block);
    self->sync = block->barrier;
    self->fenced = false;
    block->at_barrier++;
    fiber_release(self->sync);
    wait(block);
    fiber_acquire(self->sync);
}

void cuda_host_fence(struct cuda_host_site site)
{
    struct thread *self = &running->threads[running->current];

    if (left_out(site))
        return;
    self->fenced = true;
    if (self->came_to)
        fiber_acquire(self->came_to);
    self->came_to = NULL;
    if (fiber_threads())
        telling.insert(running->launch->kernel);
}

/* The fence was before what others have told since. */
void cuda_host_come_to(void *p)
{
    struct thread *self = &running->threads[running->current];

    if (self->fenced)
        fiber_release(p);
    self->came_to = p;
}

unsigned cuda_host_lane(void)
{
    return running->current % 32;
}

void cuda_host_meet(struct cuda_host_site site, unsigned mask, void *mine,
                    void (*all)(struct cuda_host_site site, void *const lanes[32]))
{
    struct block *block = running;
    const unsigned lane = block->current % 32;
    const unsigned first = block->current - lane;
    struct thread *warp = &block->threads[first];
    struct thread *self = &warp[lane];
    const bool orders = all == cuda_host_nothing; /* memory; others do not */
    void *lanes[32];

    if (orders && left_out(site))
        return;
    if ((mask >> lane & 1) == 0)
        cuda_host_stop("%s:%d: %s: the mask %08x leaves out lane %u, which calls it", site.file,
                       site.line, site.what, mask, lane);
    self->state = AT_MEETING;
    self->site = site;
    self->mask = mask;
    self->brought = mine;
    self->sync = NULL;
    if (orders) {
        for (unsigned i = 0; i < 32 && first + i < block->threads.size(); i++)
            if (i != lane && (mask >> i & 1) && warp[i].state == AT_MEETING &&
                warp[i].mask == mask && same_site(warp[i].site, site))
                self->sync = warp[i].sync;
        if (self->sync == NULL)
            self->sync = next_sync(block);
        self->fenced = false;
        fiber_release(self->sync);
    }
    for (unsigned i = 0; i < 32; i++) {
        if ((mask >> i & 1) == 0)
            continue;
        if (first + i >= block->threads.size() || warp[i].state == EXITED)
            cuda_host_stop("%s:%d: %s: lane %u of the mask %08x is not there", site.file, site.line,
                           site.what, i, mask);
        if (warp[i].state != AT_MEETING || warp[i].mask != mask || !same_site(warp[i].site, site)) {
            wait(block);
            if (orders)
                fiber_acquire(self->sync);
            return;
        }
    }
    if (orders)
        fiber_acquire(self->sync);
    for (unsigned i = 0; i < 32; i++)
        lanes[i] = mask >> i & 1 ? warp[i].brought : NULL;
    fiber_ignore(true);
    all(site, lanes);
    fiber_ignore(false);
    for (unsigned i = 0; i < 32; i++) {
        if ((mask >> i & 1) == 0)
            continue;
        warp[i].state = READY;
        if (i != lane)
            block->ready.push_back(first + i);
    }
}

void cuda_host_copy_later(const struct cuda_host_copy &copy)
{
    running->threads[running->current].copies.push_back(copy);
    fiber_writes(copy.to, 16);
    memset(copy.to, 0xff, 16);
}

void wait_for_copies(void)
{
    std::vector<struct cuda_host_copy> *copies = &running->threads[running->current].copies;

    for (const struct cuda_host_copy &copy : *copies) {
        fiber_writes(copy.to, 16);
        if (copy.from) {
            fiber_reads(copy.from, 16);
            memcpy(copy.to, copy.from, 16);
        } else {
            memset(copy.to, 0, 16);
        }
    }
    copies->clear();
}

void cuda_host_nothing(struct cuda_host_site, void *const *)
{
}

void cuda_host_exchange_all(struct cuda_host_site site, void *const lanes[32])
{
    for (unsigned i = 0; i < 32; i++) {
        struct cuda_host_exchange *mine = (struct cuda_host_exchange *)lanes[i];

        if (mine == NULL)
            continue;
        if (lanes[mine->from] == NULL)
            cuda_host_stop("%s:%d: %s: lane %u reads lane %u, which is not in the mask", site.file,
                           site.line, site.what, i, mine->from);
        mine->result = ((const struct cuda_host_exchange *)lanes[mine->from])->value;
    }
}

void cuda_host_vote_all(struct cuda_host_site, void *const lanes[32])
{
    uint64_t votes = 0;

    for (unsigned i = 0; i < 32; i++)
        if (lanes[i])
            votes |= ((const struct cuda_host_exchange *)lanes[i])->value << i;
    for (unsigned i = 0; i < 32; i++)
        if (lanes[i])
            ((struct cuda_host_exchange *)lanes[i])->result = votes;
}

static void run_block(struct block *block)
{
    const dim3 dim = block->launch->block;
    const unsigned n = dim.x * dim.y * dim.z;
    struct thread *first;

    block->threads.resize(n);
    for (unsigned i = 0; i < n; i++) {
        block->threads[i] = {};
        block->threads[i].state = UNSTARTED;
        block->threads[i].index = uint3{i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
    }
    block->ready.resize(n);
    std::iota(block->ready.begin(), block->ready.end(), 0u);
    block->at_barrier = block->exited = 0;
    /* To ThreadSanitizer a thread comes after what its creator has done: so none creates another,
     * and each has a stack of its own. */
    for (unsigned i = 0; i < n && fiber_threads(); i++)
        start(&block->threads[i]);
    first = pick(block);
    start(first);
    fiber_release(&block->begin);
    fiber_switch(&block->own, &first->fiber, false);
    if (!block->apart)
        fiber_acquire(&block->end);
    for (unsigned i = 0; i < n && fiber_threads(); i++)
        block->others.push_back(block->threads[i].fiber);
    while (block->others.size() > (block->apart ? APART * n : 0)) {
        fiber_destroy(&block->others.front());
        block->others.pop_front();
    }
    for (struct fiber &fiber : block->dead)
        fiber_destroy(&fiber);
    block->dead.clear();
}

/* In the heap on its own: AddressSanitizer knows where it ends. */
static void *shared_memory(struct block *block)
{
    const size_t bytes = block->launch->shared_bytes;
    void *shared;

    if (block->shared.empty() || block->apart) {
        if (posix_memalign(&shared, 128, bytes) != 0)
            cuda_host_stop("no memory for %zu bytes of shared memory", bytes);
        block->shared.push_back(shared);
    }
    return memset(block->shared.back(), 0xff, bytes);
}

void cuda_host_run(const struct cuda_host_launch &launch, uint64_t seed)
{
    const size_t n = (size_t)launch.grid.x * launch.grid.y * launch.grid.z;
    uint64_t random = seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
    std::vector<unsigned> order(n);
    struct block block = {};

    block.launch = &launch;
    block.random = &random;
    block.apart = fiber_threads() && telling.count(launch.kernel) > 0;
    running = &block;
    std::iota(order.begin(), order.end(), 0u);
    cuda_host_here = cuda_host_place{};
    cuda_host_here.block_dim = launch.block;
    cuda_host_here.grid_dim = launch.grid;
    for (size_t i = n; i-- > 0;) {
        unsigned at = below(&random, i + 1);
        unsigned number = order[at];

        order[at] = order[i];
        cuda_host_here.block = uint3{number % launch.grid.x, number / launch.grid.x % launch.grid.y,
                                     number / launch.grid.x / launch.grid.y};
        cuda_host_here.shared = (unsigned char *)shared_memory(&block);
        run_block(&block);
    }
    fiber_acquire(&block.end);
    running = NULL;
    for (struct fiber &fiber : block.others)
        fiber_destroy(&fiber);
    for (void *shared : block.shared)
        free(shared);
}
