/* SPDX-License-Identifier: MIT */
/* Fibers by assembly: what ucontext does, without its system calls. */
#include "fibers.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif

#ifdef WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define STACK_BYTES ((size_t)256 << 10)
#else
#define STACK_BYTES ((size_t)128 << 10)
#endif

#define GUARD_BYTES ((size_t)4096)

extern "C" void fiber_switch_stacks(void **save, void *load);
extern "C" void fiber_begin(void);

/* Registers that a called function keeps lie on the stack that is left; then come the return
 * address and, on a new stack, the entry. */
#if defined(__x86_64__)
#define SAVED_WORDS 6
asm(".text\n"
    ".p2align 4\n"
    ".globl fiber_switch_stacks\n"
    ".type fiber_switch_stacks, @function\n"
    "fiber_switch_stacks:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size fiber_switch_stacks, . - fiber_switch_stacks\n"
    ".globl fiber_begin\n"
    ".type fiber_begin, @function\n"
    "fiber_begin:\n" /* the entry is in rbx */
    "    xorl %ebp, %ebp\n"
    "    call *%rbx\n"
    "    ud2\n"
    ".size fiber_begin, . - fiber_begin\n"
    ".section .note.GNU-stack,\"\",@progbits\n"
    ".text\n");

static void *new_frame(unsigned char *top, void (*entry)(void))
{
    /* fiber_begin calls with the stack aligned to 16. */
    void **frame = (void **)(void *)top - SAVED_WORDS - 3;

    for (int i = 0; i < SAVED_WORDS + 3; i++)
        frame[i] = NULL;
    frame[4] = (void *)entry; /* rbx */
    frame[SAVED_WORDS] = (void *)fiber_begin;
    return frame;
}
#elif defined(__aarch64__)
#define SAVED_WORDS 20
asm(".text\n"
    ".p2align 4\n"
    ".globl fiber_switch_stacks\n"
    ".type fiber_switch_stacks, %function\n"
    "fiber_switch_stacks:\n"
    "    sub sp, sp, #160\n"
    "    stp x19, x20, [sp, #0]\n"
    "    stp x21, x22, [sp, #16]\n"
    "    stp x23, x24, [sp, #32]\n"
    "    stp x25, x26, [sp, #48]\n"
    "    stp x27, x28, [sp, #64]\n"
    "    stp x29, x30, [sp, #80]\n"
    "    stp d8, d9, [sp, #96]\n"
    "    stp d10, d11, [sp, #112]\n"
    "    stp d12, d13, [sp, #128]\n"
    "    stp d14, d15, [sp, #144]\n"
    "    mov x9, sp\n"
    "    str x9, [x0]\n"
    "    mov sp, x1\n"
    "    ldp x19, x20, [sp, #0]\n"
    "    ldp x21, x22, [sp, #16]\n"
    "    ldp x23, x24, [sp, #32]\n"
    "    ldp x25, x26, [sp, #48]\n"
    "    ldp x27, x28, [sp, #64]\n"
    "    ldp x29, x30, [sp, #80]\n"
    "    ldp d8, d9, [sp, #96]\n"
    "    ldp d10, d11, [sp, #112]\n"
    "    ldp d12, d13, [sp, #128]\n"
    "    ldp d14, d15, [sp, #144]\n"
    "    add sp, sp, #160\n"
    "    ret\n"
    ".size fiber_switch_stacks, . - fiber_switch_stacks\n"
    ".globl fiber_begin\n"
    ".type fiber_begin, %function\n"
    "fiber_begin:\n" /* the entry is in x19 */
    "    mov x29, xzr\n"
    "    blr x19\n"
    "    brk #0\n"
    ".size fiber_begin, . - fiber_begin\n"
    ".section .note.GNU-stack,\"\",%progbits\n"
    ".text\n");

static void *new_frame(unsigned char *top, void (*entry)(void))
{
    void **frame = (void **)(void *)top - SAVED_WORDS;

    for (int i = 0; i < SAVED_WORDS; i++)
        frame[i] = NULL;
    frame[0] = (void *)entry;        /* x19 */
    frame[11] = (void *)fiber_begin; /* x30 */
    return frame;
}
#else
#error "fibers.cc: no switch between stacks for this processor"
#endif

/* Fibers not in use; below each stack lies a page that nothing may touch. */
static thread_local std::vector<struct fiber> free_fibers;

#ifdef WITH_ASAN
/* Of the thread's own stack, learnt when a fiber is first entered. */
static thread_local const void *own_stack;
static thread_local size_t own_stack_bytes;

static void begin_switch(struct fiber *from, const struct fiber *to, bool dies)
{
    __sanitizer_start_switch_fiber(dies ? NULL : &from->fake_stack,
                                   to->stack ? to->stack : own_stack,
                                   to->stack ? STACK_BYTES : own_stack_bytes);
}

static void end_switch(void *fake_stack)
{
    const void *bottom;
    size_t bytes;

    __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
    if (own_stack == NULL) {
        own_stack = bottom;
        own_stack_bytes = bytes;
    }
}
#else
static void begin_switch(struct fiber *, const struct fiber *, bool)
{
}
static void end_switch(void *)
{
}
#endif

/* ThreadSanitizer, where it is there. These files themselves are not built with it. */
#define NO_SYNC 1u
extern "C" void *__tsan_get_current_fiber(void) __attribute__((weak));
extern "C" void *__tsan_create_fiber(unsigned flags) __attribute__((weak));
extern "C" void __tsan_switch_to_fiber(void *fiber, unsigned flags) __attribute__((weak));
extern "C" void __tsan_acquire(void *address) __attribute__((weak));
extern "C" void __tsan_release(void *address) __attribute__((weak));
extern "C" void __tsan_read_range(void *address, unsigned long size) __attribute__((weak));
extern "C" void __tsan_write_range(void *address, unsigned long size) __attribute__((weak));
extern "C" void AnnotateIgnoreReadsBegin(const char *file, int line) __attribute__((weak));
extern "C" void AnnotateIgnoreReadsEnd(const char *file, int line) __attribute__((weak));
extern "C" void AnnotateIgnoreWritesBegin(const char *file, int line) __attribute__((weak));
extern "C" void AnnotateIgnoreWritesEnd(const char *file, int line) __attribute__((weak));

bool fiber_threads(void)
{
    return __tsan_create_fiber != NULL;
}

void fiber_release(void *sync)
{
    if (fiber_threads())
        __tsan_release(sync);
}

void fiber_acquire(void *sync)
{
    if (fiber_threads())
        __tsan_acquire(sync);
}

void fiber_reads(const void *p, size_t bytes)
{
    if (fiber_threads())
        __tsan_read_range(const_cast<void *>(p), bytes);
}

void fiber_writes(void *p, size_t bytes)
{
    if (fiber_threads())
        __tsan_write_range(p, bytes);
}

void fiber_ignore(bool begin)
{
    if (!fiber_threads())
        return;
    if (begin) {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    } else {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
}

static thread_local void (*first_entry)(void);

static void begin(void)
{
    end_switch(NULL);
    first_entry();
    abort();
}

void fiber_create(struct fiber *fiber, void (*entry)(void))
{
    if (free_fibers.empty()) {
        void *block = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (block == MAP_FAILED || mprotect(block, GUARD_BYTES, PROT_NONE) != 0) {
            perror("cuda_host: no memory for a stack");
            abort();
        }
        fiber->stack = (unsigned char *)block + GUARD_BYTES;
        fiber->shadow = fiber_threads() ? __tsan_create_fiber(0) : NULL;
    } else {
        *fiber = free_fibers.back();
        free_fibers.pop_back();
    }
#ifdef WITH_ASAN
    __asan_unpoison_memory_region(fiber->stack, STACK_BYTES);
#endif
    first_entry = entry;
    fiber->fake_stack = NULL;
    fiber->stack_pointer = new_frame(fiber->stack + STACK_BYTES, begin);
}

void fiber_destroy(struct fiber *fiber)
{
    free_fibers.push_back(*fiber);
    fiber->stack = NULL;
}

void fiber_switch(struct fiber *from, struct fiber *to, bool dies)
{
    if (fiber_threads()) {
        from->shadow = __tsan_get_current_fiber();
        __tsan_switch_to_fiber(to->shadow, NO_SYNC);
    }
    begin_switch(from, to, dies);
    fiber_switch_stacks(&from->stack_pointer, to->stack_pointer);
    end_switch(from->fake_stack);
}
