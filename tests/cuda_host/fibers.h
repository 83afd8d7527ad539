/* SPDX-License-Identifier: MIT */
/* Fibers: stacks that one thread switches between, by a few instructions of assembly. */
#ifndef PUZZLEKV_TESTS_CUDA_HOST_FIBERS_H
#define PUZZLEKV_TESTS_CUDA_HOST_FIBERS_H

#include <cstddef>

/* A fiber, or, with stack NULL, the thread's own stack. */
struct fiber {
    void *stack_pointer; /* while it does not run */
    unsigned char *stack;
    void *fake_stack; /* AddressSanitizer's */
    void *shadow;     /* ThreadSanitizer's; created with the stack */
};

/* A stack for a fiber that, when first switched to, calls `entry`, which never returns. Stacks are
 * kept and used again. */
void fiber_create(struct fiber *fiber, void (*entry)(void));
/* Not of the running fiber. */
void fiber_destroy(struct fiber *fiber);

/* Suspends `from`, the running one, until it is switched to; `dies`: it never will be. */
void fiber_switch(struct fiber *from, struct fiber *to, bool dies);

/*
 * To ThreadSanitizer, where the program was linked with it, each fiber is a thread, and switching
 * orders nothing: what comes before a release comes before what follows an acquire of the same
 * address, and accesses between the two calls of fiber_ignore() race with none. Of what these files
 * do for a kernel's thread, which are not built with it, fiber_reads() and fiber_writes() tell.
 */
bool fiber_threads(void);
void fiber_release(void *sync);
void fiber_acquire(void *sync);
void fiber_ignore(bool begin);
void fiber_reads(const void *p, size_t bytes);
void fiber_writes(void *p, size_t bytes);

#endif
