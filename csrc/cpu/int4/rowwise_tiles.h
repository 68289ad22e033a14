// Many rows of rowwise_scaled_linear by tile registers: the weight's columns
// become tiles of int8 a block at a time (cpu/tiles/int4_blocks.h), and the
// sums are scaled while the next ones are made.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/int4/rowwise_store.h"
#include "cpu/int4/split_row.h"
#include "cpu/runtime/workspace.h"
#include "cpu/tiles/int4_blocks.h"
#include "cpu/tiles/plain_product.h"
#include "cpu/tiles/rows_in_place.h"
#include "host/integer_math.h"
#include "rowwise_scaled_linear.h"

namespace pkg::cpu {

// Columns of contiguous bytes.
struct Int4Columns {
  const uint8_t* data;
  int64_t stride;
};

#if defined(PKG_HAS_TILES)

namespace detail {

// Scales and stores sums that are 2^kScaleBits times too large.
struct StoreScaled {
  static constexpr bool kStores = true;

  const ScaledOutput& output;
  int64_t first_row;
  int64_t first_column;

  void operator()(int64_t row, int64_t column, Vector<int32_t>* sums, int rows,
                  int vectors, int tail) const {
    constexpr int kLanes = simd::kLanes<int32_t>;
    for (int i = 0; i < rows * vectors; ++i) {
      sums[i] >>= tiles::Int4Blocks::kScaleBits;
    }
    output.store(output, {reinterpret_cast<const int32_t*>(sums),
                          int64_t{vectors} * kLanes, nullptr, first_row + row,
                          first_column + column, rows,
                          int64_t{vectors - 1} * kLanes + tail});
  }
};

// Rows in the order of the weight's tiles: of each 128 values the even ones,
// then the odd ones, the last filled up with zeros.
inline const int8_t* reorder_rows_for_tiles(const RowwiseScaledLinearPlan& plan,
                                            const TensorView& input,
                                            int64_t row, int64_t rows,
                                            int64_t padded) {
  constexpr int64_t kPairs = 64;
  int8_t* const to =
      Workspace::of_this_thread<Slot::ReorderedRows>().request<int8_t>(rows *
                                                                       padded);
  const auto* values = static_cast<const int8_t*>(input.const_data_ptr());
  const int64_t stride = input.strides[plan.leading_dims];
  const int64_t step = plan.values == RowValues::Int4 ? stride : 2 * stride;
  for (int64_t r = 0; r < rows; ++r) {
    const int8_t* from = values + row_offset(input, plan.leading_dims, row + r);
    int8_t* even = to + r * padded;
    for (int64_t pair = 0; pair < plan.inner / 2; pair += kPairs) {
      const int64_t pairs = std::min(kPairs, plan.inner / 2 - pair);
      split_row(from + pair * step, stride, plan.values, pairs, even,
                even + kPairs);
      std::fill(even + pairs, even + kPairs, int8_t{0});
      std::fill(even + kPairs + pairs, even + 2 * kPairs, int8_t{0});
      even += 2 * kPairs;
    }
  }
  return to;
}

}  // namespace detail

// One thread's rectangle; false: it is not the way for it, and nothing was
// done.
inline bool multiply_by_tiles(const RowwiseScaledLinearPlan& plan,
                              const TensorView& input,
                              const Int4Columns& weight,
                              const ScaledOutput& output, int64_t row,
                              int64_t rows, int64_t column, int64_t columns) {
  constexpr int64_t kLeastLines = 16;
  constexpr int64_t kUnits = 2 * tiles::Int8By1::kValues;
  constexpr int64_t kMostRows = 1024;  // that are reordered at a time
  // Sums of 2^7 2^3 each, times 2^kScaleBits, must fit in 32 bits.
  constexpr int64_t kMostInner =
      (int64_t{1} << (31 - 7 - 3 - tiles::Int4Blocks::kScaleBits)) - 1;
  if (rows < kLeastLines || columns < kLeastLines || plan.inner < kLeastLines ||
      plan.inner > kMostInner) {
    return false;
  }
  const int64_t padded = round_up(plan.inner, kUnits);
  const tiles::Registers registers;
  for (int64_t done = 0; done < rows; done += kMostRows) {
    const int64_t count = std::min(kMostRows, rows - done);
    const int8_t* left =
        detail::reorder_rows_for_tiles(plan, input, row + done, count, padded);
    const detail::StoreScaled store{output, row + done, column};
    tiles::PlainProduct<tiles::Int8By1, int32_t, detail::StoreScaled,
                        tiles::Int4Blocks,
                        tiles::PlainRowsInPlace<tiles::Int8By1>>(
        tiles::strips_of(left, padded, 1),
        {weight.data + column * weight.stride, weight.stride, plan.inner / 2},
        count, columns, padded, static_cast<int32_t*>(nullptr), 0, store)
        .run();
  }
  Workspace::of_this_thread<Slot::ReorderedRows>().release_excess();
  return true;
}

#else

inline bool multiply_by_tiles(const RowwiseScaledLinearPlan& /*plan*/,
                              const TensorView& /*input*/,
                              const Int4Columns& /*weight*/,
                              const ScaledOutput& /*output*/, int64_t /*row*/,
                              int64_t /*rows*/, int64_t /*column*/,
                              int64_t /*columns*/) {
  return false;
}

#endif

}  // namespace pkg::cpu
