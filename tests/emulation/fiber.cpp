#include "fiber.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>

// The address sanitizer's, where it is linked.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save,
                                                  const void* stack,
                                                  size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* save,
                                                   const void** stack,
                                                   size_t* bytes);
}

namespace pkg::emulation {

#if defined(__x86_64__) && !defined(PKG_EMULATION_UCONTEXT)

// A tenth of the time of swapcontext, which asks the kernel for the signal
// mask each time: the registers that a call must keep, and the stack pointer.
extern "C" [[gnu::visibility("hidden")]] void pkg_fiber_switch(void** save,
                                                               void* load);
asm(R"(
  .text
  .globl pkg_fiber_switch
  .hidden pkg_fiber_switch
  .type pkg_fiber_switch, @function
pkg_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size pkg_fiber_switch, . - pkg_fiber_switch
)");

struct Fiber::Context {
  void* stack_pointer = nullptr;

  void prepare(void* stack, size_t bytes, void (*entry)()) {
    // The first switch pops six registers and returns into entry(), which
    // finds the stack as a call would leave it: 8 bytes off a multiple of 16.
    auto* top = reinterpret_cast<uintptr_t*>(static_cast<char*>(stack) + bytes);
    *--top = 0;
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; ++i) {
      *--top = 0;
    }
    stack_pointer = top;
  }

  void switch_from(Context& from) {
    pkg_fiber_switch(&from.stack_pointer, stack_pointer);
  }
};

#else

struct Fiber::Context {
  ucontext_t state = {};

  void prepare(void* stack, size_t bytes, void (*entry)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = bytes;
    state.uc_link = nullptr;
    makecontext(&state, entry, 0);
  }

  void switch_from(Context& from) { swapcontext(&from.state, &state); }
};

#endif

namespace {

// The fiber that the running one was entered from, until it has been told
// where that one's stack is.
struct Origin {
  const void** stack;
  size_t* bytes;
};
Origin origin;

}  // namespace

Fiber::Fiber() : context_(new Context) {}

Fiber::Fiber(size_t stack_bytes)
    : context_(new Context), stack_bytes_(stack_bytes) {
  void* const stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) {
    std::abort();
  }
  // An overflow meets a page that may not be touched.
  constexpr size_t kGuardBytes = 4096;
  mprotect(stack, kGuardBytes, PROT_NONE);
  stack_ = stack;
}

void Fiber::prepare(void (*entry)()) {
  context_->prepare(const_cast<void*>(stack_), stack_bytes_, entry);
}

void Fiber::entered() {
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, origin.stack, origin.bytes);
  }
}

void Fiber::switch_from(Fiber& from) {
  origin = {&from.stack_, &from.stack_bytes_};
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&from.sanitizer_stack_, stack_,
                                   stack_bytes_);
  }
  context_->switch_from(*from.context_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(from.sanitizer_stack_, origin.stack,
                                    origin.bytes);
  }
}

}  // namespace pkg::emulation
