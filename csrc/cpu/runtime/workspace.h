// Scratch memory of a thread, kept for the next call so that the hot path
// allocates nothing, and given back where it is large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace pkg::cpu {

class Workspace {
 public:
  // A thread's scratch memory. `slot` tells the buffers apart that a kernel
  // needs at the same time.
  template <int slot>
  static Workspace& of_this_thread() {
    thread_local Workspace workspace;
    return workspace;
  }

  // At least `count` elements, aligned to a cache line, with any content. Valid
  // until the next request of this slot.
  template <class T>
  T* request(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(
          ::operator new(bytes, std::align_val_t{kAlignment})));
      size_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

  // Keeps at most kKept bytes for later calls.
  void release_excess() {
    if (size_ > kKept) {
      memory_.reset();
      size_ = 0;
    }
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kKept = size_t{64} << 20;

  struct Delete {
    void operator()(std::byte* memory) const {
      ::operator delete(memory, std::align_val_t{kAlignment});
    }
  };

  std::unique_ptr<std::byte, Delete> memory_;
  size_t size_ = 0;
};

}  // namespace pkg::cpu
