// Tall products of few columns whose left operand has contiguous columns, as
// the gradients of low-rank adapters are: as the transposed product, of which
// A's columns are the rows, that lie as the micro-kernel reads a right operand.
//
// A micro-panel of B serves all of A, and each element of A serves that
// micro-panel alone, so that packing A costs as much as multiplying it where a
// strip does not fill registers. As a right operand it is read once, in long
// runs, in place or, of halves, packed by whole registers; what is turned
// instead is the result. Zen 3, one thread, float32, before and so: 512
// x 16 x 1024 (rows, columns, inner) 493 us and 244, torch.mm 538; 768 x 16 x
// 2048 1690 and 1070; float64 gained nothing (docs/tuning/gemm.md).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"

namespace pkg::cpu {

namespace detail {

// With AVX2, whose strips of 6 rows are no whole registers.
template <class Arithmetic>
inline constexpr bool kTurnsTallProducts =
    kInstructionSet == InstructionSet::Avx2 &&
    std::is_same_v<typename Arithmetic::Accumulator, float>;
inline constexpr int64_t kMostTallColumns = 24;
inline constexpr int64_t kLeastTallRows = 64;
inline constexpr int64_t kLeastTallInner = 128;
// Runs of so many rows at a time: the sums of a block stay in L2 while all of
// A's rows go by.
inline constexpr int64_t kTallRuns = 8;

// Rows of the result are columns of `sums`, `stride` apart.
template <class Output>
void store_turned(const float* sums, int64_t stride, int64_t rows,
                  int64_t columns, Output* output, int64_t output_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      output[row * output_stride + column] =
          static_cast<Output>(sums[column * stride + row]);
    }
  }
}

}  // namespace detail

// Multiplies as cpu/gemm/matrix_product.h does; false: it is not the way for
// this product, and nothing was done.
template <class Input, class Output>
[[nodiscard]] bool multiply_tall(const Product<Input, Output>& product,
                                 int64_t threads) {
  using Arithmetic = typename ProductArithmeticOf<Input>::type;
  if constexpr (detail::kTurnsTallProducts<Arithmetic>) {
    if (product.left.row_stride != 1 ||
        product.columns > detail::kMostTallColumns ||
        product.rows < detail::kLeastTallRows ||
        product.inner < detail::kLeastTallInner) {
      return false;
    }
    // Threads and blocks share runs of rows, of which the last has those that
    // are left over: fewer than fill a register would be packed, and summed in
    // other blocks of K, and how a row is rounded must not follow from how many
    // threads there are.
    constexpr int64_t kRun = detail::kLeastTallRows;
    constexpr int64_t kStride = (detail::kTallRuns + 1) * kRun;
    const int64_t runs = product.rows / kRun;
    const auto multiply_runs = [&](int64_t run, int64_t count) {
      const int64_t row = run * kRun;
      const int64_t rows =
          (run + count == runs ? product.rows : row + count * kRun) - row;
      float* sums = Workspace::of_this_thread<Slot::PartialSums>()
                        .template request<float>(product.columns * kStride);
      multiply<Arithmetic>(
          Product<Input, float>{product.right.transposed(),
                                product.left.from(row, 0).transposed(),
                                product.columns, rows, product.inner, sums,
                                kStride},
          1);
      detail::store_turned(sums, kStride, rows, product.columns,
                           product.output + row * product.output_stride,
                           product.output_stride);
    };
    const int64_t grain = threads > 1
                              ? grain_of(kMultiplyAddGrain,
                                         kRun * product.columns * product.inner)
                              : runs;
    parallel_for(runs, grain, [&](int64_t begin, int64_t end) {
      for_each_block(end - begin, detail::kTallRuns,
                     [&](int64_t run, int64_t count) {
                       multiply_runs(begin + run, count);
                     });
    });
    return true;
  }
  return false;
}

}  // namespace pkg::cpu
