// Software prefetch of memory that a strip will need next.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/runtime/cache.h"

namespace pkg::cpu::attention {

// Rows of memory that will be read, or written, next to the sums of a strip.
// The hardware prefetcher does not see short pieces of many rows coming.
struct PrefetchRows {
  const std::byte* data = nullptr;
  int64_t row_bytes = 0;
  int64_t column_bytes = 0;

  // Prefetches kRows of them, `columns` wide, if there are any.
  template <int kRows>
  [[gnu::always_inline]] void prefetch(int64_t row, int64_t column,
                                       int64_t columns) const {
    if (data == nullptr) {
      return;
    }
    for (int r = 0; r < kRows; ++r) {
      prefetch_bytes<PrefetchTo::L1>(
          data + (row + r) * row_bytes + column * column_bytes,
          columns * column_bytes);
    }
  }
};

}  // namespace pkg::cpu::attention
