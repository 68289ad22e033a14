// Functions of numbers and of registers of them.
#pragma once

#include <limits>

#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

}  // namespace pkg::cpu::attention
