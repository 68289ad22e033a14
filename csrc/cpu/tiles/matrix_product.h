// Which products of matrices tile registers make, by which scheme, and what
// becomes of operands that they are not right for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/in_place.h"
#include "cpu/tiles/plain_product.h"
#include "cpu/tiles/precision.h"
#include "cpu/tiles/product.h"
#include "cpu/tiles/rows_in_place.h"
#include "host/integer_math.h"

namespace pkg::cpu::tiles {

#if defined(PKG_HAS_TILES)

namespace detail {

// Rows, columns and terms from which it may be.
inline constexpr int64_t kLeastLines = 16;

// Whether it is the faster way: below this, packing and shaping the registers
// cost more than they save. Squares of so many rows take as long by vectors:
// float32 80, others 32 to 36. Splitting pays where a value is used often, by
// many rows or columns: 64 x 64 x 256 takes 16.2 us by tiles and 13.8 by
// vectors, 64 x 256 x 64 13.9 and 16.2. Nor are values that are split to be
// filled up to much more than their number: 17 x 512 x 64 takes 14.6 us by
// tiles and 10.1 by vectors, 100 x 100 x 64 11.1 and 13.2.
template <class Input>
bool is_large_enough(int64_t rows, int64_t columns, int64_t inner,
                     int64_t least_rows = kLeastLines) {
  constexpr bool kSingle = std::is_same_v<Input, float>;
  constexpr int64_t kLeastUses = kSingle ? 160 : 0;  // of two values
  constexpr double kLeastWork = kSingle ? 55.0 * 55 * 55 : 36.0 * 36 * 36;
  constexpr double kMostFilledUp = kSingle ? 1.8 : 2;
  constexpr bool kSplits = kSingle || std::is_same_v<Input, Half>;
  const auto volume = [](int64_t a, int64_t b, int64_t c) {
    return static_cast<double>(a) * static_cast<double>(b) *
           static_cast<double>(c);
  };
  const auto filled_up = [](int64_t size) { return round_up(size, kStrip); };
  const double work = volume(rows, columns, inner);
  if (rows < least_rows || std::min(columns, inner) < kLeastLines ||
      rows + columns < kLeastUses || work < kLeastWork) {
    return false;
  }
  return !kSplits ||
         kMostFilledUp * work >
             volume(filled_up(rows), filled_up(columns), filled_up(inner));
}

// Whether fused multiply-adds on operands in place are faster than six products
// of parts: with few rows or columns each value that is split is used too
// rarely, whatever the other sizes.
template <class Output>
bool is_better_in_place(const Product<float, Output>& product) {
  using Arithmetic = typename ArithmeticOf<float>::type;
  constexpr int64_t kMostColumns = 32;
  if (float32_products() != Float32Products::Six) {
    return false;
  }
  return (product.rows <= cpu::detail::kFewRows &&
          cpu::detail::has_rows_of_registers<Arithmetic>(product.right,
                                                         product.columns)) ||
         (product.columns <= kMostColumns &&
          k_groups_are_contiguous<Arithmetic>(product.left));
}
template <class Input, class Output>
bool is_better_in_place(const Product<Input, Output>& /*product*/) {
  return false;
}

// Calls multiply(Scheme{}) with the scheme for products of Input; false where
// there is none.
template <class Input, class Multiply>
bool with_scheme(const Multiply& multiply) {
  if constexpr (std::is_same_v<Input, float>) {
    switch (float32_products()) {
      case Float32Products::Six:
        multiply(Float32By6{});
        return true;
      case Float32Products::Three:
        multiply(Float32By3{});
        return true;
      case Float32Products::One:
        multiply(Float32By1{});
        return true;
      case Float32Products::None:
        return false;
    }
    return false;
  } else if constexpr (std::is_same_v<Input, Half>) {
    multiply(Float16By4{});
    return true;
  } else if constexpr (std::is_same_v<Input, BFloat16>) {
    multiply(Bfloat16By1{});
    return true;
  } else if constexpr (std::is_same_v<Input, int8_t>) {
    multiply(Int8By1{});
    return true;
  } else {
    return false;
  }
}

// Whether C^T = B^T A^T is the faster way. Where B's columns are contiguous, as
// in the weight of a linear layer, they are left lines then, whose tiles are
// rows as they lie, and A's lines are transposed in their place: that pays
// where they are few. Lines of both that lie side by side need not be
// transposed at all then; those of bytes are better packed the other way. C is
// stored a column of micro-tiles after the other, each of its rows in another
// page, which many rows suffer from, and sooner where C is in no cache; and if
// A were packed anew for each block of columns nothing would be won
// (docs/tuning/tiles.md).
template <class Scheme, class Output>
bool is_better_turned(const Product<typename Scheme::Input, Output>& product) {
  constexpr bool kBytes = Scheme::kValues == 64;
  constexpr int64_t kMostRows = kBytes ? 128 : 256;
  constexpr int64_t kMostRowsOfLarge = 64;
  constexpr int64_t kLeastColumnsByRows = 3;
  constexpr int64_t kPackedBytes = kLargeL2Bytes / 2;
  const auto [left, right, rows, columns, inner, output, stride] = product;
  if (right.row_stride != 1 || right.column_stride == 1) {
    return false;
  }
  if (!kBytes && left.row_stride == 1 && rows <= std::max(kMostRows, columns)) {
    return true;
  }
  const bool is_large =
      rows * columns * int64_t{sizeof(Output)} > kLargeL2Bytes;
  return rows <= (is_large ? kMostRowsOfLarge : kMostRows) &&
         kLeastColumnsByRows * rows <= columns &&
         (Scheme::kParts == 1 ||
          packed_bytes<Scheme>(rows, units_of<Scheme>(inner)) <= kPackedBytes);
}

// Rows from which it may be the way: values of one part are read as they lie
// where it is better turned, at the rate of memory whatever the rows.
template <class Input, class Output>
int64_t least_rows(const Product<Input, Output>& product) {
  bool is_read_as_it_lies = false;
  if constexpr (std::is_same_v<Input, BFloat16>) {
    is_read_as_it_lies = is_better_turned<Bfloat16By1>(product);
  } else if constexpr (std::is_same_v<Input, int8_t>) {
    is_read_as_it_lies = is_better_turned<Int8By1>(product);
  }
  return is_read_as_it_lies ? 2 : kLeastLines;
}

// One thread's product, or its transpose; whether its operands were in the
// scheme's range.
template <class Scheme, class Right, class Output, class Epilogue>
bool multiply_alone(const MatrixView<typename Scheme::Input>& left,
                    const typename Right::Source& right, int64_t rows,
                    int64_t columns, int64_t inner, Output* output,
                    int64_t output_stride, const Epilogue& epilogue,
                    bool turns_result = false) {
  const auto run = [&]<class Way>(std::type_identity<Way>) {
    const Registers registers;
    return Way(strips_of(left.data, left.row_stride, left.column_stride), right,
               rows, columns, inner, output, output_stride, epilogue,
               turns_result)
        .run();
  };
  using Packed = OperandBlocks<Scheme, Side::Left>;
  if constexpr (Scheme::kParts > 1) {
    return run(std::type_identity<SplitProduct<Scheme, Output, Epilogue>>{});
  } else if (PlainRowsInPlace<Scheme>::suits(left, inner, columns)) {
    return run(std::type_identity<PlainProduct<Scheme, Output, Epilogue, Right,
                                               PlainRowsInPlace<Scheme>>>{});
  } else {
    return run(std::type_identity<
               PlainProduct<Scheme, Output, Epilogue, Right, Packed>>{});
  }
}

// Divides a product among threads. alone(part, column, epilogue) makes a part
// by multiply_alone; otherwise(part, row, column) one whose values are not in
// the scheme's range.
template <class Scheme, class Input, class Output, class Epilogue, class Alone,
          class Otherwise>
void multiply_parts(const Product<Input, Output>& product, int64_t threads,
                    const Epilogue& epilogue, const Alone& alone,
                    const Otherwise& otherwise) {
  const auto multiply_part = [&](int64_t row, int64_t rows, int64_t column,
                                 int64_t columns) {
    const auto part = product.part(row, rows, column, columns);
    const cpu::detail::EpilogueFrom<Epilogue> place{epilogue, row, column};
    const bool is_right = alone(part, column, place);
    if constexpr (Scheme::kHasRange) {
      if (!is_right) {
        otherwise(part, row, column);
      }
    }
  };
  threads = cpu::detail::useful_threads(product.rows, product.columns,
                                        product.inner, threads);
  if (threads == 1) {
    return multiply_part(0, product.rows, 0, product.columns);
  }
  cpu::detail::for_each_rectangle<void>(product.rows, product.columns, kStrip,
                                        kStrip, threads, multiply_part);
}

}  // namespace detail

// Whether multiply is the way for operands of such sizes.
template <class Input>
bool multiplies(int64_t rows, int64_t columns, int64_t inner) {
  return detail::is_large_enough<Input>(rows, columns, inner) &&
         detail::with_scheme<Input>([](auto) {});
}

// Multiplies as cpu/gemm/matrix_product.h does; false: it is not the way for
// these operands, and nothing was done.
template <class Input, class Output, class Epilogue>
[[nodiscard]] bool multiply(const Product<Input, Output>& product,
                            int64_t threads, const Epilogue& epilogue) {
  if (!detail::is_large_enough<Input>(product.rows, product.columns,
                                      product.inner,
                                      detail::least_rows(product)) ||
      detail::is_better_in_place(product)) {
    return false;
  }
  return detail::with_scheme<Input>([&]<class Scheme>(Scheme) {
    using Arithmetic = typename ArithmeticOf<Input>::type;
    const bool turns = detail::is_better_turned<Scheme>(product);
    detail::multiply_parts<Scheme>(
        product, threads, epilogue,
        [&](const auto& part, int64_t /*column*/, const auto& place) {
          const auto as = [&](const MatrixView<Input>& left,
                              const MatrixView<Input>& right, int64_t rows,
                              int64_t columns) {
            return detail::multiply_alone<Scheme,
                                          OperandBlocks<Scheme, Side::Right>>(
                left,
                strips_of(right.data, right.column_stride, right.row_stride),
                rows, columns, part.inner, part.output, part.output_stride,
                place, turns);
          };
          return turns ? as(part.right.transposed(), part.left.transposed(),
                            part.columns, part.rows)
                       : as(part.left, part.right, part.rows, part.columns);
        },
        [&](const auto& part, int64_t row, int64_t column) {
          cpu::detail::multiply_alone<Arithmetic>(
              part, row, column, epilogue,
              cpu::detail::reads_right_in_place<Arithmetic>(product));
        });
  });
}

#else

template <class Input>
bool multiplies(int64_t /*rows*/, int64_t /*columns*/, int64_t /*inner*/) {
  return false;
}

template <class Input, class Output, class Epilogue>
[[nodiscard]] bool multiply(const Product<Input, Output>& /*product*/,
                            int64_t /*threads*/, const Epilogue& /*epilogue*/) {
  return false;
}

#endif

}  // namespace pkg::cpu::tiles
