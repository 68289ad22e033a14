// Checks of mul, for every device.
#pragma once

#include "pointwise.h"

namespace pkg {

inline void check_mul(const Tensor& a, const Tensor& b) {
  check_binary("mul", a, b);
}

}  // namespace pkg
