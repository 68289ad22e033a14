// When the gradients of attention cannot be made of the log-sum-exp alone, for
// every device.
#pragma once

#include "host/compiler.h"

namespace pkg {

// Whether a row's log-sum-exp is finite, and so large that its rounding changes
// probabilities, relative to themselves, by 2^-14 in float32. Where a mask adds
// -1e9 to all keys of a row, all of the sum's logarithm is lost, and as many
// probabilities of 1 as there are keys would be made of it.
template <class Number>
PKG_HOST_DEVICE bool is_large_log_sum_exp(Number value) {
  constexpr Number kLarge = 1024;
  const Number magnitude = value < 0 ? -value : value;
  return magnitude > kLarge && magnitude - magnitude == 0;
}

}  // namespace pkg
