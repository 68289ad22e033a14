// Matrix multiplication: C = A B with any strides of A and B and contiguous
// columns of C, by the loops that cpu/gemm/contract.h draws.
//
// Threads each multiply a rectangle of the result on their own and pack what
// they need of A and B themselves: what two of them pack twice costs less than
// waiting for one another, since packing costs about 1/M + 1/N of the work.
//
// Operations: 2 M N K. Bytes, at the least: A and B read once and C written
// once. Above a few hundred in each dimension it is bound by the multiply-add
// units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/grid.h"
#include "cpu/gemm/in_place.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "host/integer_math.h"

namespace pkg::cpu {

// Rows of a result that needs a buffer for its sums, kBufferedRows x NC of
// them: one of half precision whose K is longer than KC.
inline constexpr int64_t kBufferedRows = 8 * kMC;

// One product: operands, sizes, and where the result goes.
template <class Input, class Output>
struct Product {
  MatrixView<Input> left;
  MatrixView<Input> right;
  int64_t rows;
  int64_t columns;
  int64_t inner;
  Output* output;  // contiguous columns
  int64_t output_stride;

  Product part(int64_t row, int64_t part_rows, int64_t column,
               int64_t part_columns) const {
    return {left.from(row, 0),
            right.from(0, column),
            part_rows,
            part_columns,
            inner,
            output + row * output_stride + column,
            output_stride};
  }
};

namespace detail {

// An epilogue that is told of the place in the whole result.
template <class Epilogue>
struct EpilogueFrom {
  const Epilogue& epilogue;
  int64_t first_row;
  int64_t first_column;

  template <class V>
  void operator()(int64_t row, int64_t column, V* sums, int rows, int vectors,
                  int tail) const {
    epilogue(first_row + row, first_column + column, sums, rows, vectors, tail);
  }
  void prefetch(int64_t row, int64_t column, int rows, int64_t columns) const {
    if constexpr (requires { epilogue.prefetch(row, column, rows, columns); }) {
      epilogue.prefetch(first_row + row, first_column + column, rows, columns);
    }
  }
};
template <>
struct EpilogueFrom<KeepSums> : KeepSums {
  EpilogueFrom(const KeepSums& /*epilogue*/, int64_t /*first_row*/,
               int64_t /*first_column*/) {}
};

// A, multiplied a block of rows and of K at a time: in place where that is
// better, or else packed, in this thread's memory.
template <class Arithmetic, class Input>
class LeftBlocks {
  using KGroup = typename Arithmetic::KGroup;
  using Accumulator = typename Arithmetic::Accumulator;

 public:
  // Blocks are of up to `rows` rows and `values` values of K, which are all
  // `inner` or a part of them, for so many columns of B.
  LeftBlocks(const MatrixView<Input>& left, int64_t columns, int64_t inner,
             int64_t rows, int64_t values)
      : left_(left),
        in_place_(reads_left_in_place<Arithmetic>(left, columns, inner)) {
    if (!in_place_) {
      packed_ =
          Workspace::of_this_thread<Slot::PackedLeft>()
              .template request<KGroup>(rows * depth_of<Arithmetic>(values));
    }
    if constexpr (Arithmetic::kCompensated) {
      compensation_ = Workspace::of_this_thread<Slot::Compensation>()
                          .template request<Accumulator>(rows);
    }
  }

  const Accumulator* compensation() const { return compensation_; }

  // Multiplies the block at (row, k).
  template <class RightKGroup, class Store>
  void multiply(int64_t row, int64_t rows, int64_t k, int64_t values,
                int64_t columns, const RightPanels<RightKGroup>& panels,
                const Store& store) const {
    const MatrixView<Input> block = left_.from(row, k);
    const int64_t depth = depth_of<Arithmetic>(values);
    if constexpr (sizeof(Input) * Arithmetic::kKGroupSize == sizeof(KGroup)) {
      if (in_place_) {
        if constexpr (Arithmetic::kCompensated) {
          compensate_rows<Arithmetic>(block, rows, values, compensation_);
        }
        return multiply_panels<Arithmetic>(rows, columns, depth,
                                           rows_in_place<Arithmetic>(block),
                                           panels, store);
      }
    }
    pack_rows<Arithmetic>(block, rows, values, packed_);
    if constexpr (Arithmetic::kCompensated) {
      compensate_packed_rows<Arithmetic, Input>(packed_, rows, depth,
                                                compensation_);
    }
    multiply_panels<Arithmetic>(rows, columns, depth,
                                packed_rows<Arithmetic>(packed_, depth), panels,
                                store);
  }

 private:
  MatrixView<Input> left_;
  bool in_place_;
  KGroup* packed_ = nullptr;
  Accumulator* compensation_ = nullptr;
};

// One thread's product of up to NC columns, and up to kBufferedRows rows where
// the sums need a buffer: loops 4 and 3.
template <class Arithmetic, class Input, class Output, class Epilogue>
class ColumnsProduct {
 public:
  ColumnsProduct(const Product<Input, Output>& product, int64_t first_row,
                 int64_t first_column, const Epilogue& epilogue,
                 bool right_in_place)
      : product_(product),
        first_row_(first_row),
        first_column_(first_column),
        epilogue_(epilogue),
        kc_(even_block(product.inner,
                       right_in_place ? most_values_in_place<Arithmetic>(
                                            product.right, product.inner)
                                      : kKC<Arithmetic>,
                       kKCUnit<Arithmetic>)),
        mc_(std::min(product.rows,
                     even_block(product.rows, kRowsAtATime<Arithmetic>,
                                kMicroTileRows<Arithmetic>))),
        left_(product.left, product.columns, product.inner, mc_, kc_),
        partial_stride_(product.output_stride) {
    if (!right_in_place) {
      packed_right_ =
          Workspace::of_this_thread<Slot::PackedRight>()
              .template request<KGroup>(
                  packed_columns_size<Arithmetic>(product.columns, kc_));
    }
    if constexpr (std::is_same_v<Accumulator, Output>) {
      partial_ = product.output;
    } else if (kc_ < product.inner) {
      partial_stride_ = round_up(product.columns, kColumns);
      partial_ =
          Workspace::of_this_thread<Slot::PartialSums>()
              .template request<Accumulator>(product.rows * partial_stride_);
    }
  }

  void run() const {
    for_each_block(product_.inner, kc_, [&](int64_t k, int64_t values) {
      const auto multiply = [&](const auto& panels) {
        for_each_block(product_.rows, mc_, [&](int64_t row, int64_t rows) {
          multiply_rows(row, rows, k, values, panels);
        });
      };
      if constexpr (kCanBeInPlace<Arithmetic, Input>) {
        if (packed_right_ == nullptr) {
          return multiply(panels_in_place(k));
        }
      }
      multiply(packed_panels(k, values));
    });
  }

 private:
  using KGroup = typename Arithmetic::KGroup;
  using Accumulator = typename Arithmetic::Accumulator;
  using InPlace = InPlaceKGroup<Arithmetic, Input>;
  static constexpr int kColumns = kNR<Arithmetic>;
  // Slot::Compensation and Slot::PartialSums are the same memory.
  static_assert(!Arithmetic::kCompensated ||
                std::is_same_v<Accumulator, Output>);

  // B's micro-panels of a block of K: in place, or packed now.
  RightPanels<InPlace> panels_in_place(int64_t k) const {
    const MatrixView<Input>& right = product_.right;
    return {reinterpret_cast<const InPlace*>(right.at(k, 0)), right.row_stride,
            kColumns};
  }
  RightPanels<KGroup> packed_panels(int64_t k, int64_t values) const {
    pack_columns<Arithmetic>(product_.right.from(k, 0), product_.columns,
                             values, packed_right_);
    return {packed_right_, kColumns, kColumns * depth_of<Arithmetic>(values)};
  }

  template <class RightKGroup>
  void multiply_rows(int64_t row, int64_t rows, int64_t k, int64_t values,
                     const RightPanels<RightKGroup>& panels) const {
    const EpilogueFrom<Epilogue> place{epilogue_, first_row_ + row,
                                       first_column_};
    const StoreSums<Accumulator, Output, EpilogueFrom<Epilogue>> store{
        partial_ + row * partial_stride_,
        partial_stride_,
        k == 0,
        k + values == product_.inner,
        product_.output + row * product_.output_stride,
        product_.output_stride,
        place,
        left_.compensation(),
        is_distant()};
    left_.multiply(row, rows, k, values, product_.columns, panels, store);
  }

  // Whether the result is too large for L2.
  bool is_distant() const {
    return product_.rows * product_.output_stride * int64_t{sizeof(Output)} >
           kL2Bytes;
  }

  const Product<Input, Output>& product_;
  int64_t first_row_;
  int64_t first_column_;
  const Epilogue& epilogue_;
  int64_t kc_;
  int64_t mc_;
  LeftBlocks<Arithmetic, Input> left_;
  KGroup* packed_right_ = nullptr;
  Accumulator* partial_ = nullptr;
  int64_t partial_stride_;
};

// The same, with B in place where it is better read there.
template <class Arithmetic, class Input, class Output, class Epilogue>
void multiply_columns(const Product<Input, Output>& product, int64_t first_row,
                      int64_t first_column, const Epilogue& epilogue,
                      bool right_in_place) {
  const auto multiply = [&](int64_t column, int64_t count) {
    const Product part = product.part(0, product.rows, column, count);
    ColumnsProduct<Arithmetic, Input, Output, Epilogue>(
        part, first_row, first_column + column, epilogue, right_in_place)
        .run();
  };
  const int64_t columns = product.columns;
  if (!right_in_place) {
    return multiply(0, columns);
  }
  const InPlaceColumns ranges = columns_in_place<Arithmetic>(columns);
  multiply(0, ranges.first_count);
  if (ranges.second < columns) {
    multiply(ranges.second, columns - ranges.second);
  }
}

// Whether B is read in place: told by all of a product, not by a thread's part
// of it, since rounding follows from it.
template <class Arithmetic, class Input, class Output>
bool reads_right_in_place(const Product<Input, Output>& product) {
  return reads_right_in_place<Arithmetic>(product.right, product.rows,
                                          product.columns, product.inner);
}

// One thread's product: loop 5.
template <class Arithmetic, class Input, class Output, class Epilogue>
void multiply_alone(const Product<Input, Output>& product, int64_t first_row,
                    int64_t first_column, const Epilogue& epilogue,
                    bool right_in_place) {
  constexpr bool kBuffered =
      !std::is_same_v<typename Arithmetic::Accumulator, Output>;
  const int64_t most_rows = kBuffered ? kBufferedRows : product.rows;
  const int64_t block =
      even_block(product.rows, most_rows, kMicroTileRows<Arithmetic>);
  const int64_t nc = even_block(
      product.columns,
      right_in_place ? columns_at_a_time_in_place<Arithmetic>(product.rows)
                     : kNC,
      kNR<Arithmetic>);
  for_each_block(product.columns, nc, [&](int64_t column, int64_t columns) {
    for_each_block(product.rows, block, [&](int64_t row, int64_t rows) {
      multiply_columns<Arithmetic>(
          product.part(row, rows, column, columns), first_row + row,
          first_column + column, epilogue,
          right_in_place && columns >= kRegisterColumns<Arithmetic>);
    });
  });
}

}  // namespace detail

// Any sizes but an inner dimension of 0.
template <ProductArithmetic Arithmetic, class Input, class Output,
          class Epilogue = KeepSums>
  requires ProductEpilogue<Epilogue, typename Arithmetic::Accumulator>
void multiply(const Product<Input, Output>& product, int64_t threads,
              const Epilogue& epilogue = {}) {
  if (product.rows == 0 || product.columns == 0) {
    return;
  }
  threads = detail::useful_threads(product.rows, product.columns, product.inner,
                                   threads);
  const bool in_place = detail::reads_right_in_place<Arithmetic>(product);
  if (threads == 1) {
    const TileRegisters<Arithmetic> registers;
    detail::multiply_alone<Arithmetic>(product, 0, 0, epilogue, in_place);
    return;
  }
  detail::for_each_rectangle<Arithmetic>(
      product.rows, product.columns, kMicroTileRows<Arithmetic>,
      kNR<Arithmetic>, threads,
      [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
        detail::multiply_alone<Arithmetic>(
            product.part(row, rows, column, columns), row, column, epilogue,
            in_place);
      });
}

}  // namespace pkg::cpu
