// Products with a right operand that was packed beforehand, for repeated use:
// the weight of a layer. It is packed in its own dtype, so that it takes no
// more memory than the original (but for filling the last panel); half
// precision is converted when it is loaded into a register.
//
// Layout: panels of kTileColumns columns; each holds every step of the inner
// dimension, a step's lanes side by side. For one row it is read from front to
// back; for many, in blocks of kBlockDepth steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/matrix_product.h"

namespace pkg::cpu {

namespace detail {

// Lanes that are only stored: kDepth values of T, unconverted.
template <class T, bool kPairs>
struct StoredLanes;
template <class T>
struct StoredLanes<T, false> {
  using Lane = T;
};
template <class T>
struct StoredLanes<T, true> {
  using Lane = uint32_t;
};

template <class T>
using PackedLane = typename StoredLanes<T, ArithmeticOf<T>::type::kDepth == 2 &&
                                               sizeof(T) == 2>::Lane;

}  // namespace detail

// Elements of T that a packed right operand takes.
template <class T>
int64_t packed_right_elements(int64_t columns, int64_t inner) {
  using Arithmetic = typename ArithmeticOf<T>::type;
  constexpr int64_t kColumns = kTileColumns<Arithmetic>;
  return (columns + kColumns - 1) / kColumns * kColumns *
         depth_of<Arithmetic>(inner) * Arithmetic::kDepth;
}

// `packed` is aligned to a cache line.
template <class T>
void pack_right_operand(const MatrixView<T>& right, int64_t columns,
                        int64_t inner, T* packed, int64_t threads) {
  using Arithmetic = typename ArithmeticOf<T>::type;
  using Lane = typename Arithmetic::Lane;
  constexpr int kColumns = kTileColumns<Arithmetic>;
  constexpr int kDepth = Arithmetic::kDepth;
  const int64_t panels = (columns + kColumns - 1) / kColumns;
  const int64_t panel_elements =
      kColumns * depth_of<Arithmetic>(inner) * kDepth;
  parallel_for(
      panels, threads > 1 ? 1 : panels, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
          const int64_t column = panel * kColumns;
          const int count =
              static_cast<int>(std::min<int64_t>(kColumns, columns - column));
          T* to = packed + panel * panel_elements;
          if constexpr (sizeof(T) * kDepth == sizeof(Lane)) {
            pack_lines<Arithmetic>(right.at(0, column), right.column_stride,
                                   right.row_stride, count, kColumns, inner,
                                   reinterpret_cast<Lane*>(to));
          } else {
            // Lanes are wider: they are packed a block at a time, then
            // narrowed, which is exact.
            constexpr int kLanes = simd::kLanes<Lane>;
            constexpr int64_t kSteps = 64;
            alignas(64) Lane wide[kSteps * kColumns];
            for (int64_t k = 0; k < inner; k += kSteps) {
              const int64_t steps = std::min(kSteps, inner - k);
              pack_lines<Arithmetic>(right.at(k, column), right.column_stride,
                                     right.row_stride, count, kColumns, steps,
                                     wide);
              for (int64_t i = 0; i < steps * kColumns; i += kLanes) {
                simd::store(to + k * kColumns + i, simd::load(wide + i));
              }
            }
          }
        }
      });
}

namespace detail {

// One thread's rectangle. The packed operand stays where it is, so that a strip
// of rows may be as deep as the inner dimension where that fits the L2 cache.
template <class Arithmetic, class Input, class RightLane, class Output,
          class Epilogue>
void multiply_packed_alone(const Product<Input, Output>& product,
                           const RightLane* packed, int64_t panel_stride,
                           int64_t first_row, int64_t first_column,
                           const Epilogue& epilogue) {
  using Lane = typename Arithmetic::Lane;
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int kColumns = kTileColumns<Arithmetic>;
  const MatrixView<Input>& left = product.left;
  const int64_t step = even_block(product.inner, kBlockValues<Arithmetic>,
                                  kBlockUnit<Arithmetic>);
  const int64_t block =
      std::min(product.rows, even_block(product.rows, kBlockRows, kTileRows));
  const int64_t width = std::min(
      product.columns, even_block(product.columns, kBlockColumns, kColumns));
  const bool in_place = reads_left_in_place<Arithmetic>(left, product.inner);
  Lane* packed_left = nullptr;
  if (!in_place) {
    packed_left = Workspace::of_this_thread<0>().template request<Lane>(
        block * depth_of<Arithmetic>(step));
  }
  Accumulator* sums = nullptr;
  const int64_t sums_stride = (width + kColumns - 1) / kColumns * kColumns;
  if (!std::is_same_v<Accumulator, Output> && step < product.inner) {
    sums = Workspace::of_this_thread<1>().template request<Accumulator>(
        block * sums_stride);
  }
  for (int64_t row = 0; row < product.rows; row += block) {
    const int64_t rows = std::min(block, product.rows - row);
    for (int64_t column = 0; column < product.columns; column += width) {
      const int64_t columns = std::min(width, product.columns - column);
      const EpilogueFrom<Epilogue> place{epilogue, first_row + row,
                                         first_column + column};
      Output* output = product.output + row * product.output_stride + column;
      for (int64_t k = 0; k < product.inner; k += step) {
        const int64_t values = std::min(step, product.inner - k);
        StoreSums<Accumulator, Output, EpilogueFrom<Epilogue>> store{
            sums,   sums_stride,           k == 0, k + values == product.inner,
            output, product.output_stride, place};
        if constexpr (std::is_same_v<Accumulator, Output>) {
          store.partial = output;
          store.partial_stride = product.output_stride;
        }
        const RightPanels<RightLane> panels{
            packed + column / kColumns * panel_stride +
                k / Arithmetic::kDepth * kColumns,
            kColumns, panel_stride};
        const int64_t depth = depth_of<Arithmetic>(values);
        if (in_place) {
          if constexpr (std::is_same_v<RightLane, Lane>) {
            multiply_panels<Arithmetic>(
                rows, columns, depth,
                RowsInPlace<Lane>{
                    reinterpret_cast<const std::byte*>(left.at(row, k)),
                    left.row_stride * static_cast<int64_t>(sizeof(Input))},
                panels, store);
          }
        } else {
          pack_rows<Arithmetic>(left.from(row, k), rows, values, packed_left);
          multiply_panels<Arithmetic>(
              rows, columns, depth, packed_rows<Arithmetic>(packed_left, depth),
              panels, store);
        }
      }
    }
  }
}

}  // namespace detail

// As matrix_product (cpu/gemm/matrix_product.h), with what pack_right_operand
// made of the right operand.
template <class Input, class Output, class Epilogue = KeepSums>
void multiply_packed(const MatrixView<Input>& left, const Input* packed,
                     int64_t rows, int64_t columns, int64_t inner,
                     Output* output, int64_t output_stride, int64_t threads,
                     const Epilogue& epilogue = {}) {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using RightLane = detail::PackedLane<Input>;
  constexpr int kColumns = kTileColumns<Arithmetic>;
  static_assert(!Arithmetic::kCorrected);
  if (rows == 0 || columns == 0) {
    return;
  }
  if (inner == 0) {
    return matrix_product(left, MatrixView<Input>{packed, 0, 0}, rows, columns,
                          inner, output, output_stride, threads, epilogue);
  }
  const auto* lanes = reinterpret_cast<const RightLane*>(packed);
  const int64_t panel_stride = kColumns * depth_of<Arithmetic>(inner);
  // One row is bound by reading the operand: a grain as for a vector.
  threads = rows == 1
                ? std::clamp<int64_t>(columns * inner / kGemvGrain, 1, threads)
                : detail::useful_threads(rows, columns, inner, threads);
  detail::for_each_rectangle<Arithmetic>(
      rows, columns, kTileRows, kColumns, threads,
      [&](int64_t row, int64_t part_rows, int64_t column,
          int64_t part_columns) {
        const Product<Input, Output> part{left.from(row, 0),
                                          MatrixView<Input>{nullptr, 0, 0},
                                          part_rows,
                                          part_columns,
                                          inner,
                                          output + row * output_stride + column,
                                          output_stride};
        detail::multiply_packed_alone<Arithmetic>(
            part, lanes + column / kColumns * panel_stride, panel_stride, row,
            column, epilogue);
      });
}

}  // namespace pkg::cpu
