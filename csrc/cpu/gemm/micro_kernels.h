// What gemm_tiles_*.cpp compile: the micro-kernel of cpu/gemm/micro_kernel.h
// for every height and width of a tile. One source for each arithmetic, so that
// they are compiled side by side.
#pragma once

#include "cpu/gemm/micro_kernel.h"

namespace pkg::cpu {

template <class Arithmetic, class Left, class RightLane>
void multiply_any_tile(int height, int vectors, int64_t depth, const Left& left,
                       const RightLane* right, int64_t step_stride, int64_t row,
                       const TileSums<typename Arithmetic::Accumulator>& sums) {
  constexpr int kLanes = simd::kLanes<typename Arithmetic::Accumulator>;
  with_strip_height(height, [&](auto rows) {
    if (vectors == kTileVectors) {
      detail::multiply_tile<Arithmetic, rows(), kTileVectors>(
          depth, left, right, step_stride, row, 0, kTileVectors * kLanes, sums);
    } else {
      detail::multiply_tile<Arithmetic, rows(), 1>(
          depth, left, right, step_stride, row, 0, kLanes, sums);
    }
  });
}

// A left operand, packed or in place, with a right operand of RightLane.
#define PKG_MULTIPLY_TILES(Arithmetic, Left, RightLane)                   \
  template void                                                           \
  multiply_any_tile<Arithmetic, Left<Arithmetic::Lane>, RightLane>(       \
      int, int, int64_t, const Left<Arithmetic::Lane>&, const RightLane*, \
      int64_t, int64_t, const TileSums<Arithmetic::Accumulator>&)

}  // namespace pkg::cpu
