// Arrays that lie one after the other in a thread's scratch memory: sized
// first, then requested in one piece, then taken.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/attention/blocking.h"

namespace pkg::cpu::attention {

// One array of it; each begins at a cache line.
template <class T>
struct Scratch {
  int64_t count;
  T* take(std::byte*& memory) const {
    T* part = reinterpret_cast<T*>(memory);
    memory += size();
    return part;
  }
  int64_t size() const {
    return round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  }
};

}  // namespace pkg::cpu::attention
