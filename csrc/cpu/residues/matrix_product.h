// Which products of float64 are made by residues, and what becomes of elements
// that they are not exact enough for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/in_place.h"
#include "cpu/residues/choice.h"
#include "cpu/residues/product.h"
#include "cpu/tiles/micro_kernel.h"

namespace pkg::cpu::residues {

#if defined(PKG_HAS_TILES)

namespace detail {

// Whether it is the faster way for each thread's part: remainders are made of
// each value of an operand and numbers of each element of the result, which
// takes as long as a value's or element's first 300 multiply-adds. Intel Xeon,
// one thread, against fused multiply-adds: squares of 448, 512, 640 and 1024
// rows 0.93, 1.05, 1.16, 1.3; 1024 x 384 x 1024 1.13, 512 x 2048 x 512 1.10,
// 256 x 2048 x 2048 0.99, 3000 x 300 x 3000 0.80.
inline bool is_large_enough(int64_t rows, int64_t columns, int64_t inner,
                            int64_t threads) {
  constexpr int64_t kLeastLines = 320;
  constexpr int64_t kLeastInner = 352;
  constexpr double kMostOverhead = 3.0 / 500;
  if (std::min(rows, columns) < kLeastLines || inner < kLeastInner) {
    return false;
  }
  const auto grid = cpu::detail::choose_grid(tiles::strips_of(rows),
                                             tiles::strips_of(columns), kStrip,
                                             kStrip, threads);
  const auto share = [](int64_t parts, int64_t size) {
    return static_cast<double>(parts) / static_cast<double>(size);
  };
  return share(grid.rows, rows) + share(grid.columns, columns) +
             share(1, inner) <=
         kMostOverhead;
}

}  // namespace detail

// Multiplies as cpu/gemm/matrix_product.h does; false: it is not the way for
// these operands, and nothing was done.
template <class Epilogue>
[[nodiscard]] bool multiply(const Product<double, double>& product,
                            int64_t threads, const Epilogue& epilogue) {
  using Arithmetic = typename ProductArithmeticOf<double>::type;
  threads = cpu::detail::useful_threads(product.rows, product.columns,
                                        product.inner, threads);
  if (!detail::is_large_enough(product.rows, product.columns, product.inner,
                               threads) ||
      !are_chosen().load(std::memory_order_relaxed)) {
    return false;
  }
  const auto multiply_part = [&](int64_t row, int64_t rows, int64_t column,
                                 int64_t columns) {
    const auto otherwise = [&](int64_t first_row, int64_t some_rows,
                               int64_t first_column, int64_t some_columns) {
      cpu::detail::multiply_alone<Arithmetic>(
          product.part(row + first_row, some_rows, column + first_column,
                       some_columns),
          row + first_row, column + first_column, epilogue,
          cpu::detail::reads_right_in_place<Arithmetic>(product));
    };
    const auto part = product.part(row, rows, column, columns);
    const cpu::detail::EpilogueFrom<Epilogue> place{epilogue, row, column};
    const tiles::Registers registers;
    ResidueProduct by_residues(part.left, part.right, rows, columns, part.inner,
                               part.output, part.output_stride, place);
    if (!by_residues.run()) {
      return otherwise(0, rows, 0, columns);
    }
    by_residues.for_each_rest(otherwise);
  };
  cpu::detail::for_each_rectangle<void>(product.rows, product.columns, kStrip,
                                        kStrip, threads, multiply_part);
  return true;
}

#else

template <class Epilogue>
[[nodiscard]] bool multiply(const Product<double, double>& /*product*/,
                            int64_t /*threads*/, const Epilogue& /*epilogue*/) {
  return false;
}

#endif

}  // namespace pkg::cpu::residues
