// Matrix multiplication: C = A B with any strides of A and B and contiguous
// columns of C. The loops are those of Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication" (doi 10.1145/1356052.1356053), in the
// arrangement of BLIS: blocks of kBlockColumns columns of B are packed once and
// shared by all threads, blocks of rows of A by the thread that multiplies
// them.
//
// Operations: 2 M N K. Bytes, at the least: A and B read once and C written
// once. Above a few hundred in each dimension it is bound by the multiply-add
// units, and packing costs about 1/M + 1/N of the time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "gemm_kernel.h"
#include "gemm_pack.h"
#include "parallel.h"
#include "workspace.h"

namespace pkg::cpu {

// A step of the inner dimension: a right panel of kBlockDepth lanes (32 KiB
// with 64-byte vectors, 16 KiB with 32) stays in the L1 cache. kBlockRows: the
// packed rows (240 KiB at most) take a share of the L2 cache. kBlockColumns x
// the inner dimension: the packed right operand should stay in a share of the
// L3 cache. Not tuned beyond these rules; measured on a Zen 4 core at n = 1024
// float32: depth 192 / 256 / 384 within 2 % of one another.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr int64_t kBlockDepth = 256;
#else
// Each step rounds twice, the product and the sum: shorter chains of additions
// keep the error that of a processor with fused multiply-adds.
inline constexpr int64_t kBlockDepth = 64;
#endif
inline constexpr int64_t kBlockRows = 20 * kTileRows;
inline constexpr int64_t kBlockColumns = 2048;
// Multiply-adds under which another thread costs more than it brings.
inline constexpr int64_t kGemmGrain = 64 * 64 * 64;

namespace detail {

// One thread's share: all of `inner` for a block of rows and a range of packed
// columns.
template <class Arithmetic, class Source, class Output>
void multiply_block(const MatrixView<Source>& left, int64_t rows,
                    int64_t columns, int64_t inner,
                    const typename Arithmetic::Lane* packed_right,
                    Output* output, int64_t output_stride) {
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int64_t kStep = kBlockDepth * Arithmetic::kDepth;
  constexpr bool kRounds = !std::is_same_v<Accumulator, Output>;
  auto* packed_left =
      Workspace::of_this_thread<0>()
          .template request<typename Arithmetic::Lane>(
              packed_rows_size<Arithmetic>(rows, std::min(inner, kStep)));
  // A narrower output is summed in a buffer, and rounded once at the end.
  const bool buffered = kRounds && inner > kStep;
  Accumulator* sums = nullptr;
  if (buffered) {
    sums = Workspace::of_this_thread<1>().template request<Accumulator>(
        rows * columns);
  }
  for (int64_t k = 0; k < inner; k += kStep) {
    const int64_t step = std::min(kStep, inner - k);
    const int64_t depth = depth_of<Arithmetic>(step);
    pack_rows<Arithmetic>(left.from(0, k), rows, step, packed_left);
    const auto* right =
        packed_right + packed_columns_size<Arithmetic>(columns, k);
    if (kRounds && !buffered) {
      multiply_panels<Arithmetic>(rows, columns, depth, packed_left, right,
                                  StoreTo<Output>{output, output_stride});
    } else if constexpr (kRounds) {
      multiply_panels<Arithmetic>(rows, columns, depth, packed_left, right,
                                  StoreTo<Accumulator>{sums, columns, k > 0});
    } else {
      multiply_panels<Arithmetic>(
          rows, columns, depth, packed_left, right,
          StoreTo<Output>{output, output_stride, k > 0});
    }
  }
  if constexpr (kRounds) {
    for (int64_t row = 0; buffered && row < rows; ++row) {
      const Accumulator* from = sums + row * columns;
      Output* to = output + row * output_stride;
      constexpr int kLanes = simd::kLanes<Accumulator>;
      int64_t column = 0;
      for (; column + kLanes <= columns; column += kLanes) {
        simd::store(to + column, simd::load(from + column));
      }
      if (column < columns) {
        const int rest = static_cast<int>(columns - column);
        simd::store_partial(to + column,
                            simd::load_partial(from + column, rest), rest);
      }
    }
  }
}

// Even shares of `total` in whole multiples of `unit`.
inline int64_t share(int64_t total, int64_t parts, int64_t unit) {
  const int64_t units = (total + unit - 1) / unit;
  return (units + parts - 1) / parts * unit;
}

}  // namespace detail

// C (rows x columns, contiguous columns, rows `output_stride` apart) = A B.
// inner may be 0; then C is zero.
template <class Arithmetic, class Source, class Output>
void multiply(const MatrixView<Source>& left, const MatrixView<Source>& right,
              int64_t rows, int64_t columns, int64_t inner, Output* output,
              int64_t output_stride, int64_t threads) {
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  constexpr int64_t kStep = kBlockDepth * Arithmetic::kDepth;
  if (inner == 0) {
    for (int64_t row = 0; row < rows; ++row) {
      std::fill_n(output + row * output_stride, columns, Output{});
    }
    return;
  }
  if (rows == 0 || columns == 0) {
    return;
  }
  // In floating point, since the product of three sizes may pass 2^63.
  const double work = static_cast<double>(rows) * static_cast<double>(columns) *
                      static_cast<double>(inner);
  const int64_t useful = static_cast<int64_t>(std::min(
      static_cast<double>(threads), work / static_cast<double>(kGemmGrain)));
  threads = std::max<int64_t>(useful, 1);

  for (int64_t first = 0; first < columns; first += kBlockColumns) {
    const int64_t width = std::min(kBlockColumns, columns - first);
    // Threads share the rows; where these are few, the columns too.
    const int64_t row_parts =
        std::max<int64_t>(std::min(threads, rows / (2 * kTileRows)), 1);
    const int64_t column_parts = std::min((threads + row_parts - 1) / row_parts,
                                          (width + kColumns - 1) / kColumns);
    const int64_t row_blocks =
        row_parts *
        ((rows + row_parts * kBlockRows - 1) / (row_parts * kBlockRows));
    const int64_t block_rows = detail::share(rows, row_blocks, kTileRows);
    const int64_t block_columns = detail::share(width, column_parts, kColumns);
    const int64_t used_rows = (rows + block_rows - 1) / block_rows;
    const int64_t used_columns = (width + block_columns - 1) / block_columns;

    // Column blocks lie one behind the other, each with all steps of `inner`.
    const int64_t block_size =
        packed_columns_size<Arithmetic>(block_columns, inner);
    auto* packed = Workspace::of_this_thread<2>()
                       .template request<typename Arithmetic::Lane>(
                           block_size * used_columns);
    const int64_t steps = (inner + kStep - 1) / kStep;
    const int64_t panels = (width + kColumns - 1) / kColumns;
    parallel_for(steps * panels, threads > 1 ? 1 : steps * panels,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t task = begin; task < end; ++task) {
                     const int64_t k = task / panels * kStep;
                     const int64_t column = task % panels * kColumns;
                     const int64_t block = column / block_columns;
                     const int64_t inside = column % block_columns;
                     const int64_t block_width =
                         std::min(block_columns, width - block * block_columns);
                     const int64_t step = std::min(kStep, inner - k);
                     pack_columns<Arithmetic>(
                         right.from(k, first + column),
                         std::min(kColumns, width - column), step,
                         packed + block * block_size +
                             packed_columns_size<Arithmetic>(block_width, k) +
                             inside * depth_of<Arithmetic>(step));
                   }
                 });
    const int64_t tasks = used_rows * used_columns;
    parallel_for(
        tasks, threads > 1 ? 1 : tasks, [&](int64_t begin, int64_t end) {
          for (int64_t task = begin; task < end; ++task) {
            const int64_t row = task / used_columns * block_rows;
            const int64_t block = task % used_columns;
            const int64_t column = block * block_columns;
            detail::multiply_block<Arithmetic>(
                left.from(row, 0), std::min(block_rows, rows - row),
                std::min(block_columns, width - column), inner,
                packed + block * block_size,
                output + row * output_stride + first + column, output_stride);
          }
        });
  }
  Workspace::of_this_thread<2>().release_excess();
}

}  // namespace pkg::cpu
