// Fibers: stacks between which the one thread of execution switches.
#pragma once

#include <cstddef>

namespace pkg::emulation {

// The address sanitizer is told of every switch. Fibers live until the process
// ends.
class Fiber {
 public:
  // The stack that is running already.
  Fiber();
  explicit Fiber(size_t stack_bytes);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the first switch to this fiber call entry(), which must begin with
  // entered() and never return.
  void prepare(void (*entry)());
  static void entered();

  // Leaves `from`, the running fiber, for this one; returns when another
  // fiber switches back to `from`.
  void switch_from(Fiber& from);

 private:
  struct Context;
  Context* context_;
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* sanitizer_stack_ = nullptr;
};

}  // namespace pkg::emulation
