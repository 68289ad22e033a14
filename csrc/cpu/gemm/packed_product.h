// Products with a right operand that was packed beforehand, for repeated use:
// the weight of a layer. It is packed in its own dtype, so that it takes no
// more memory than the original (but for filling the last panel); half
// precision is converted when it is loaded into a register.
//
// Layout: micro-panels of NR columns, as cpu/gemm/contract.h draws them, but
// over the whole inner dimension. For a few rows one is read from front to
// back, or some side by side; for many, in blocks of KC.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/empty_product.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/packed_rows.h"
#include "cpu/tiles/packed_product.h"
#include "host/integer_math.h"

namespace pkg::cpu {

namespace detail {

// K-groups that are only stored: kKGroupSize values of T, unconverted.
template <class T, bool kPairs>
struct StoredKGroup;
template <class T>
struct StoredKGroup<T, false> {
  using KGroup = T;
};
template <class T>
struct StoredKGroup<T, true> {
  using KGroup = uint32_t;
};

template <class T>
using PackedKGroup = Streamed<
    typename StoredKGroup<T, ProductArithmeticOf<T>::type::kKGroupSize == 2 &&
                                 sizeof(T) == 2>::KGroup>;

}  // namespace detail

// Elements of T that a packed right operand takes.
template <class T>
int64_t packed_right_elements(int64_t columns, int64_t inner) {
  using Arithmetic = typename ProductArithmeticOf<T>::type;
  constexpr int64_t kColumns = kNR<Arithmetic>;
  return round_up(columns, kColumns) * depth_of<Arithmetic>(inner) *
         Arithmetic::kKGroupSize;
}

namespace detail {

// A micro-panel of elements narrower than the k-groups that they are packed as:
// these are made a block at a time, then narrowed, which is exact.
template <class Arithmetic, class T>
void pack_narrow_panel(const MatrixView<T>& right, int64_t column,
                       int64_t count, int64_t inner, T* packed) {
  using KGroup = typename Arithmetic::KGroup;
  constexpr int kColumns = kNR<Arithmetic>;
  constexpr int64_t kValues = 64;
  static_assert(Arithmetic::kKGroupSize == 1);
  alignas(64) KGroup wide[kValues * kColumns];
  for_each_block(inner, kValues, [&](int64_t k, int64_t values) {
    pack_micro_panel<Arithmetic>(right.from(k, 0), column, count, values, wide);
    for (int64_t i = 0; i < values * kColumns; i += simd::kLanes<KGroup>) {
      simd::store(packed + k * kColumns + i, simd::load(wide + i));
    }
  });
}

}  // namespace detail

// `packed` is aligned to a cache line.
template <class T>
void pack_right_operand(const MatrixView<T>& right, int64_t columns,
                        int64_t inner, T* packed, int64_t threads) {
  using Arithmetic = typename ProductArithmeticOf<T>::type;
  using KGroup = typename Arithmetic::KGroup;
  constexpr int kColumns = kNR<Arithmetic>;
  constexpr int kKGroupSize = Arithmetic::kKGroupSize;
  const int64_t panels = ceil_div(columns, kColumns);
  const int64_t panel_elements =
      kColumns * depth_of<Arithmetic>(inner) * kKGroupSize;
  parallel_for(
      panels, threads > 1 ? 1 : panels, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
          const int64_t column = panel * kColumns;
          const int64_t count = std::min<int64_t>(kColumns, columns - column);
          T* to = packed + panel * panel_elements;
          if constexpr (sizeof(T) * kKGroupSize == sizeof(KGroup)) {
            pack_micro_panel<Arithmetic>(right, column, count, inner,
                                         reinterpret_cast<KGroup*>(to));
          } else {
            detail::pack_narrow_panel<Arithmetic>(right, column, count, inner,
                                                  to);
          }
        }
      });
}

namespace detail {

// One thread's rectangle. The packed operand stays where it is, so that loop 4
// is inside loops 5 and 3: sums of MC x NC over all of K.
template <class Arithmetic, class Input, class RightKGroup, class Output,
          class Epilogue>
class PackedProduct {
 public:
  PackedProduct(const Product<Input, Output>& product,
                const RightKGroup* packed, int64_t panel_stride)
      : product_(product),
        packed_(packed),
        panel_stride_(panel_stride),
        kc_(even_block(product.inner, kKC<Arithmetic>, kKCUnit<Arithmetic>)),
        mc_(std::min(product.rows,
                     even_block(product.rows, kRowsAtATime<Arithmetic>,
                                kMicroTileRows<Arithmetic>))),
        nc_(std::min(product.columns,
                     even_block(product.columns, kNC, kColumns))),
        left_(product.left, product.columns, product.inner, mc_, kc_),
        sums_stride_(round_up(nc_, kColumns)) {
    if (!std::is_same_v<Accumulator, Output> && kc_ < product.inner) {
      sums_ = Workspace::of_this_thread<Slot::PartialSums>()
                  .template request<Accumulator>(mc_ * sums_stride_);
    }
  }

  void run(int64_t first_row, int64_t first_column,
           const Epilogue& epilogue) const {
    for_each_block(product_.rows, mc_, [&](int64_t row, int64_t rows) {
      for_each_block(product_.columns, nc_, [&](int64_t column, int64_t count) {
        multiply_block(row, rows, column, count,
                       EpilogueFrom<Epilogue>{epilogue, first_row + row,
                                              first_column + column});
      });
    });
  }

 private:
  using Accumulator = typename Arithmetic::Accumulator;
  static constexpr int kColumns = kNR<Arithmetic>;

  void multiply_block(int64_t row, int64_t rows, int64_t column,
                      int64_t columns,
                      const EpilogueFrom<Epilogue>& place) const {
    Output* output = product_.output + row * product_.output_stride + column;
    for_each_block(product_.inner, kc_, [&](int64_t k, int64_t values) {
      StoreSums<Accumulator, Output, EpilogueFrom<Epilogue>> store{
          sums_,  sums_stride_,           k == 0, k + values == product_.inner,
          output, product_.output_stride, place};
      if constexpr (std::is_same_v<Accumulator, Output>) {
        store.partial = output;
        store.partial_stride = product_.output_stride;
      }
      left_.multiply(
          row, rows, k, values, columns,
          RightPanels<RightKGroup>{packed_ + column / kColumns * panel_stride_ +
                                       k / Arithmetic::kKGroupSize * kColumns,
                                   kColumns, panel_stride_},
          store);
    });
  }

  const Product<Input, Output>& product_;
  const RightKGroup* packed_;
  int64_t panel_stride_;
  int64_t kc_;
  int64_t mc_;
  int64_t nc_;
  LeftBlocks<Arithmetic, Input> left_;
  Accumulator* sums_ = nullptr;
  int64_t sums_stride_;
};

}  // namespace detail

// As matrix_product (cpu/gemm/matrix_product.h), with what pack_right_operand
// made of the right operand.
template <class Input, class Output, class Epilogue = KeepSums>
void multiply_packed(const MatrixView<Input>& left, const Input* packed,
                     int64_t rows, int64_t columns, int64_t inner,
                     Output* output, int64_t output_stride, int64_t threads,
                     const Epilogue& epilogue = {}) {
  using Arithmetic = typename ProductArithmeticOf<Input>::type;
  using RightKGroup = detail::PackedKGroup<Input>;
  constexpr int kColumns = kNR<Arithmetic>;
  static_assert(!Arithmetic::kCompensated);
  if (rows == 0 || columns == 0) {
    return;
  }
  const auto* panels = reinterpret_cast<const RightKGroup*>(packed);
  const int64_t panel_stride = kColumns * depth_of<Arithmetic>(inner);
  const Product<Input, Output> product{
      left,         MatrixView<Input>{nullptr, 0, 0},
      rows,         columns,
      inner,        output,
      output_stride};
  if (inner == 0) {
    return multiply_nothing(product, epilogue);
  }
  const auto multiply_part = [&](const Product<Input, Output>& part,
                                 int64_t row, int64_t column) {
    if constexpr (detail::kMostRowsOfPanels > 0) {
      if (rows <= detail::kMostRowsOfPanels) {
        return detail::multiply_packed_rows<Arithmetic>(
            part, panels + column / kColumns * panel_stride, panel_stride, row,
            column, epilogue);
      }
    }
    detail::PackedProduct<Arithmetic, Input, RightKGroup, Output, Epilogue>(
        part, panels + column / kColumns * panel_stride, panel_stride)
        .run(row, column, epilogue);
  };
  if (tiles::multiply_packed(product, packed,
                             packed_right_elements<Input>(kColumns, inner),
                             threads, epilogue, multiply_part)) {
    return;
  }
  // One row is bound by reading the operand: a grain as for a vector.
  threads = rows == 1 ? std::clamp<int64_t>(columns * inner / kElementGrain, 1,
                                            threads)
                      : detail::useful_threads(rows, columns, inner, threads);
  detail::for_each_rectangle<Arithmetic>(
      rows, columns, kMicroTileRows<Arithmetic>, kColumns, threads,
      [&](int64_t row, int64_t part_rows, int64_t column,
          int64_t part_columns) {
        multiply_part(product.part(row, part_rows, column, part_columns), row,
                      column);
      });
}

}  // namespace pkg::cpu
