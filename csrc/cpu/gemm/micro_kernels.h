// What cpu/gemm/micro_kernels_*.cpp compile: the micro-kernel for every height
// and width of a micro-tile. One source for each arithmetic, so that they are
// compiled side by side.
#pragma once

#include "cpu/gemm/micro_kernel.h"

namespace pkg::cpu {

template <ProductArithmetic Arithmetic,
          LeftMicroPanels<typename Arithmetic::KGroup> Left, class RightKGroup>
void any_micro_kernel(
    int height, int vectors, int64_t depth, const Left& left,
    const RightKGroup* right, int64_t step_stride, int64_t row,
    const MicroTileSums<typename Arithmetic::Accumulator>& sums) {
  constexpr int kLanes = simd::kLanes<typename Arithmetic::Accumulator>;
  const auto multiply = [&]<int kRows, int kVectors>() {
    detail::micro_kernel<Arithmetic, kRows, kVectors>(
        depth, left, right, step_stride, row, 0, kVectors * kLanes, sums);
  };
  with_strip_height<kMicroTileRows<Arithmetic>>(height, [&](auto rows) {
    if (vectors == kMicroTileVectors<Arithmetic>) {
      multiply.template operator()<rows(), kMicroTileVectors<Arithmetic>>();
    } else if (kMicroTileVectors<Arithmetic> > 2 && vectors == 2) {
      multiply.template operator()<rows(), 2>();
    } else {
      multiply.template operator()<rows(), 1>();
    }
  });
}

// A left operand, packed or in place, with a right operand of RightKGroup.
#define PKG_MICRO_KERNELS(Arithmetic, Left, RightKGroup)                      \
  template void                                                               \
  any_micro_kernel<Arithmetic, Left<Arithmetic::KGroup>, RightKGroup>(        \
      int, int, int64_t, const Left<Arithmetic::KGroup>&, const RightKGroup*, \
      int64_t, int64_t, const MicroTileSums<Arithmetic::Accumulator>&)

}  // namespace pkg::cpu
