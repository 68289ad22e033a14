// Which keys a query of attention sees by its place: causality and windows, for
// every device.
#pragma once

#include <cstdint>

#include "host/compiler.h"

namespace pkg {

// Query i sees the keys from i + first to i + last.
struct KeyLimits {
  static constexpr int64_t kUnlimited = int64_t{1} << 60;
  int64_t first = -kUnlimited;
  int64_t last = kUnlimited;

  PKG_HOST_DEVICE bool hide_keys() const {
    return first > -kUnlimited || last < kUnlimited;
  }
};

// Of `rows` queries and `columns` keys: if causal, query i sees none after key
// i; of a window, those from i + columns - rows - left to
// i + columns - rows + right, aligned to the last query and the last key; -1 is
// unlimited. A side of the window that hides no key is unlimited too, so that
// no sum here overflows.
PKG_HOST_DEVICE KeyLimits attention_key_limits(int64_t rows, int64_t columns,
                                               bool is_causal, int64_t left,
                                               int64_t right) {
  KeyLimits limits;
  if (is_causal) {
    limits.last = 0;
  }
  if (left >= 0 && left < columns - 1) {
    limits.first = columns - rows - left;
  }
  if (right >= 0 && right < rows - 1 && columns - rows + right < limits.last) {
    limits.last = columns - rows + right;
  }
  return limits;
}

}  // namespace pkg
