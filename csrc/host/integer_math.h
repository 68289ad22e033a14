// Divisions that round up, of numbers that are not negative. The result has the
// type that the sum of both has.
#pragma once

#include "host/compiler.h"

namespace pkg {

template <class Number, class Divisor>
PKG_HOST_DEVICE constexpr auto ceil_div(Number number, Divisor divisor) {
  return (number + divisor - 1) / divisor;
}

// To the next multiple.
template <class Number, class Multiple>
PKG_HOST_DEVICE constexpr auto round_up(Number number, Multiple multiple) {
  return ceil_div(number, multiple) * multiple;
}

}  // namespace pkg
