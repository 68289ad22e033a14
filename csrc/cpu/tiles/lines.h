// Lines of an operand: rows of the left one, columns of the right.
#pragma once

#include <cstdint>

#include "cpu/tiles/scheme.h"

namespace pkg::cpu::tiles {

// Lines of an operand, with any strides.
template <class T>
struct Lines {
  const T* data;
  int64_t line_stride;
  int64_t value_stride;
};

// Of whole strips, that are `stride` apart: of a matrix 32 lines, or panels.
template <class T>
struct Strips {
  Lines<T> first;
  int64_t stride;
};
template <class T>
Strips<T> strips_of(const T* data, int64_t line_stride, int64_t value_stride) {
  return {{data, line_stride, value_stride}, kStrip * line_stride};
}

}  // namespace pkg::cpu::tiles
