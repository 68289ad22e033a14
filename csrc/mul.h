// Checks of mul, for every device.
#pragma once

#include "pointwise.h"

namespace pkg {

inline void check_mul(const TensorView& a, const TensorView& b) {
  check_binary("mul", a, b);
}

}  // namespace pkg
