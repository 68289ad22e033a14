// The operands as the micro-kernel reads them (cpu/gemm/contract.h): packed by
// cpu/gemm/packing.h, or in place; and the strips that rows are divided into.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/blocking.h"
#include "cpu/gemm/contract.h"
#include "host/integer_math.h"

namespace pkg::cpu {

template <class T>
struct MatrixView {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  const T* at(int64_t row, int64_t column) const {
    return data + row * row_stride + column * column_stride;
  }
  MatrixView from(int64_t row, int64_t column) const {
    return {at(row, column), row_stride, column_stride};
  }
  MatrixView transposed() const { return {data, column_stride, row_stride}; }
};

// The depth of `inner` values: the k-groups that they fill.
template <ProductArithmetic Arithmetic>
constexpr int64_t depth_of(int64_t inner) {
  return ceil_div(inner, Arithmetic::kKGroupSize);
}

// K-groups that a packed right operand takes.
template <ProductArithmetic Arithmetic>
constexpr int64_t packed_columns_size(int64_t columns, int64_t inner) {
  constexpr int64_t kColumns = kNR<Arithmetic>;
  return round_up(columns, kColumns) * depth_of<Arithmetic>(inner);
}

// Calls body(first, count) for each block of `size` of `total`.
template <class Body>
[[gnu::always_inline]] inline void for_each_block(int64_t total, int64_t size,
                                                  const Body& body) {
  for (int64_t first = 0; first < total; first += size) {
    body(first, std::min(size, total - first));
  }
}

// The height of the next strip of `rows` rows: the tallest where they are as
// many, else one each of 8, 4, 2 and 1 where they fit. Heights in between would
// be faster by little and are much code. 16 rows are two strips of 8: one of 4
// has too few sums to keep the multiply-add units busy.
template <int kTallest = kMR>
constexpr int strip_height(int64_t rows) {
  constexpr int kSecond = static_cast<int>(
      std::bit_floor(static_cast<unsigned>(std::max(kTallest - 1, 1))));
  if (rows >= kTallest) {
    const bool is_two_of_second = 2 * kSecond > kTallest &&
                                  rows >= 2 * kSecond &&
                                  rows < kTallest + kSecond;
    return is_two_of_second ? kSecond : kTallest;
  }
  return static_cast<int>(std::bit_floor(static_cast<uint64_t>(rows)));
}

// Calls body(row, height) for each strip of rows.
template <int kTallest = kMR, class Body>
[[gnu::always_inline]] inline void for_each_strip(int64_t rows,
                                                  const Body& body) {
  for (int64_t row = 0; row < rows;) {
    const int height = strip_height<kTallest>(rows - row);
    body(row, height);
    row += height;
  }
}

// Calls body(std::integral_constant<int, height>) for a strip's height.
template <int kTallest = kMR, class Body>
[[gnu::always_inline]] inline void with_strip_height(int height,
                                                     const Body& body) {
  if constexpr (kTallest == 1) {
    body(std::integral_constant<int, 1>{});
  } else if (height == kTallest) {
    body(std::integral_constant<int, kTallest>{});
  } else {
    with_strip_height<strip_height(kTallest - 1)>(height, body);
  }
}

// Calls body(std::integral_constant<int, count>) for a count of up to kMost.
template <int kMost, class Body>
[[gnu::always_inline]] inline void with_count(int count, const Body& body) {
  if constexpr (kMost == 1) {
    body(std::integral_constant<int, 1>{});
  } else if (count == kMost) {
    body(std::integral_constant<int, kMost>{});
  } else {
    with_count<kMost - 1>(count, body);
  }
}

// Packed micro-panels of A, strip after strip.
template <class KGroup>
struct PackedStrips {
  const KGroup* data;

  template <int kRows>
  const KGroup* strip(int64_t row, int64_t depth) const {
    return data + row * depth;
  }
  template <int kRows>
  KGroup k_group(const KGroup* at, int row) const {
    return at[row];
  }
  // Of that row and those behind it.
  const KGroup* k_groups(const KGroup* at, int row) const { return at + row; }
  template <int kRows>
  static constexpr int64_t kStep = kRows;
};

// A that is read in place: each row's k-groups are contiguous, though they may
// not be aligned.
template <class KGroup>
struct RowsInPlace {
  const std::byte* data;
  int64_t row_bytes;

  template <int kRows>
  const std::byte* strip(int64_t row, int64_t /*depth*/) const {
    return data + row * row_bytes;
  }
  template <int kRows>
  KGroup k_group(const std::byte* at, int row) const {
    KGroup value;
    std::memcpy(&value, at + row * row_bytes, sizeof(value));
    return value;
  }
  template <int kRows>
  static constexpr int64_t kStep = sizeof(KGroup);
};

// Whether each row of A is whole k-groups as it lies in memory.
template <ProductArithmetic Arithmetic, class Input>
bool k_groups_are_contiguous(const MatrixView<Input>& left) {
  return sizeof(Input) * Arithmetic::kKGroupSize ==
             sizeof(typename Arithmetic::KGroup) &&
         left.column_stride == 1;
}

template <ProductArithmetic Arithmetic, class Input>
RowsInPlace<typename Arithmetic::KGroup> rows_in_place(
    const MatrixView<Input>& left) {
  return {reinterpret_cast<const std::byte*>(left.data),
          left.row_stride * static_cast<int64_t>(sizeof(Input))};
}

// What pack_rows (cpu/gemm/packing.h) made of A, of that depth.
template <ProductArithmetic Arithmetic>
auto packed_rows(const typename Arithmetic::KGroup* packed, int64_t depth) {
  using KGroup = typename Arithmetic::KGroup;
  if constexpr (kUsesTileRegisters<Arithmetic>) {
    return RowsInPlace<KGroup>{reinterpret_cast<const std::byte*>(packed),
                               depth * int64_t{sizeof(KGroup)}};
  } else {
    return PackedStrips<KGroup>{packed};
  }
}

// Of an operand that was packed beforehand and so is read from memory, from
// front to back: prefetched by strips of four rows and more, and of halves that
// are converted by all.
//
// Between two of its lines such a strip has so much to do that the processor
// does not reach far ahead. Zen 4, one thread, 4096 x 4096 in huge pages,
// milliseconds without and with it: bfloat16 8 / 16 rows 2.01 / 3.19 and 1.73
// / 2.92, float16 3.48 / 6.29 and 2.88 / 5.79, float32 3.59 / 5.92 and 3.38
// / 5.75; float16 2 rows 1.42 and 1.20, 1 row the same, and with AVX2 bfloat16
// 1 / 2 rows 1.84 / 2.20 and 1.37 / 1.52. Of operands in the caches it takes 1
// to 3 % of a product, and so is for this one alone.
template <class KGroup>
struct Streamed {
  KGroup k_group;
};
inline constexpr int64_t kStreamingBytes = 4096;  // ahead

template <class RightKGroup>
inline constexpr bool kIsStreamed = false;
template <class KGroup>
inline constexpr bool kIsStreamed<Streamed<KGroup>> = true;

template <class RightKGroup, int kRows>
inline constexpr bool kPrefetchesStream =
    kIsStreamed<RightKGroup> && (kRows >= 4 || sizeof(RightKGroup) == 2);

template <class KGroup>
const KGroup* k_groups_of(const KGroup* right) {
  return right;
}
template <class KGroup>
const KGroup* k_groups_of(const Streamed<KGroup>* right) {
  return &right->k_group;
}

// B, of which a k-group's elements are contiguous over the columns of a
// micro-panel: the matrix itself, or micro-panels that are packed. A packed
// operand may hold a narrower type than the arithmetic's k-groups, which is
// converted when it is loaded.
template <class RightKGroup>
struct RightPanels {
  const RightKGroup* data;
  int64_t step_stride;   // from one k-group to the next
  int64_t panel_stride;  // from one micro-panel to the next
};

}  // namespace pkg::cpu
