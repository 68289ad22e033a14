// The product of rowwise_scaled_linear_s8s4 and _s4s4, in int32.
//
// Left rows are copied once, their even columns first and then the odd ones, as
// the low and the high halves of the packed bytes are: a half is then unpacked
// by two or three bit operations, without a shuffle. Values are multiplied as
// cpu/int4/arithmetic.h says, which leaves both operators the same kernels: dot
// products of some rows with some columns, along the inner dimension. The
// weight is unpacked in registers, as it is read; nothing else is written than
// 64 columns of sums, which are then scaled (cpu/int4/rowwise_store.h).
//
// Operations: 2 M N K, and unpacking, 4 for each register of the weight, which
// 4 rows share, as 4 columns do a register of the left operand: with 4 x 4 sums
// 8 loads and 16 bit operations beside 32 multiplications. Bytes: N K / 2, from
// memory once for some hundred rows, which lie in the L2 cache. One row is
// bound by reading them, from some 8 rows on the multiply-add units are.
//
// From 16 rows on tile registers, where there are any, multiply instead
// (cpu/int4/rowwise_tiles.h). Intel Xeon, one core, 4096 x 4096: 128 rows 10.2
// ms by dot products, 2.5 to 2.9 by tiles; 16 rows 1.4 and 1.1.
//
// Zen 4, one core, 473 GOP/s of peak, 4096 x 4096: 1 row 0.31 to 0.35 ms, 0.64
// without software prefetch; 24 rows 433 GOP/s, 64 rows 415. Where the inner
// dimension is short, adding up lanes for each result costs more than many rows
// pay for unpacking (cpu/int4/rowwise_panels.h).
#include "cpu/int4/rowwise.h"

#include <cstring>

#include "cpu/gemm/gemm.h"
#include "cpu/int4/arithmetic.h"
#include "cpu/int4/rowwise_panels.h"
#include "cpu/int4/rowwise_store.h"
#include "cpu/int4/rowwise_tiles.h"
#include "cpu/int4/split_row.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/transpose.h"
#include "host/integer_math.h"

namespace pkg::cpu {
namespace {

using simd::Vector;
using Words = Vector<uint32_t>;
using detail::load_words;

constexpr int kWordLanes = simd::kLanes<uint32_t>;
// Rows and columns whose sums are made together, in half of the registers.
constexpr int kSideRows = 4;
constexpr int kSideColumns = simd::kVectorRegisters >= 32 ? 4 : 2;
constexpr int kLoneColumns = 4;  // beside one row
// Columns ahead of those multiplied that are prefetched.
constexpr int kAhead = 8;
// Columns of which the sums are scaled together.
constexpr int64_t kBlockOfColumns = 64;
// Rows that stay in the L2 cache, and the memory that their values take.
constexpr int64_t kMostRows = 128;
constexpr int64_t kMostLeftBytes = int64_t{512} << 10;

struct Int4Problem {
  const RowwiseScaledLinearPlan& plan;
  const TensorView& input;
  RightColumns weight;
  ScaledOutput output;
};

// Bytes that the even or the odd columns of a row take.
int64_t padded_half(int64_t pairs) { return round_up(pairs, kCacheLine); }

// Bytes from one row of LeftRows to the next; rows that are read side by side
// must not share sets of the cache.
int64_t left_stride(int64_t pairs) {
  const int64_t half = padded_half(pairs);
  return rows_share_two_sets(2 * half) ? 2 * half + kCacheLine : 2 * half;
}

LeftRows prepare_left(const Int4Problem& problem, int64_t row, int64_t rows) {
  const TensorView& input = problem.input;
  const RowwiseScaledLinearPlan& plan = problem.plan;
  const int64_t pairs = plan.inner / 2;
  const int64_t half = padded_half(pairs);
  const int64_t stride = left_stride(pairs);
  int8_t* data =
      Workspace::of_this_thread<Slot::SplitRows>().template request<int8_t>(
          rows * stride);
  int32_t* totals =
      Workspace::of_this_thread<Slot::RowTotals>().template request<int32_t>(
          rows);
  const auto* from = static_cast<const int8_t*>(input.const_data_ptr());
  for (int64_t r = 0; r < rows; ++r) {
    int8_t* even = data + r * stride;
    int8_t* odd = even + half;
    split_row(from + row_offset(input, plan.leading_dims, row + r),
              input.strides[plan.leading_dims], plan.values, pairs, even, odd);
    std::fill(even + pairs, even + half, int8_t{0});
    std::fill(odd + pairs, odd + half, int8_t{0});
    Vector<int32_t> total{};
    const Words ones = Words{} + 0x01010101U;
    for (int64_t i = 0; i < 2 * half; i += simd::kVectorBytes) {
      total = Int4Quads::multiply_add(load_words(even + i), ones, total);
    }
    totals[r] = simd::reduce_add(total);
  }
  return {data, stride, half, totals};
}

// The sum of the elements of each total, a register of sums at a time.
template <int kRows, int kColumns>
[[gnu::always_inline]] inline void store_totals(
    const Vector<int32_t> (&totals)[kRows][kColumns], int32_t* sums,
    int64_t stride) {
  constexpr int kCount = kRows * kColumns;
  constexpr int kGroups = ceil_div(kCount, kWordLanes);
  alignas(64) int32_t all[kGroups * kWordLanes];
  for (int first = 0; first < kCount; first += kWordLanes) {
    Vector<int32_t> group[kWordLanes] = {};
    for (int i = 0; i < kWordLanes && first + i < kCount; ++i) {
      group[i] = totals[(first + i) / kColumns][(first + i) % kColumns];
    }
    simd::store(all + first, simd::sum_each(group));
  }
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(sums + r * stride, all + r * kColumns,
                kColumns * sizeof(int32_t));
  }
}

// Dot products of kRows rows with kColumns columns.
template <int kRows, int kColumns>
void dot(const LeftRows& left, int64_t row, const RightColumns& right,
         int64_t column, int32_t* sums, int64_t sums_stride) {
  Vector<int32_t> totals[kRows][kColumns] = {};
  const int8_t* rows = left.data + row * left.stride;
  const uint8_t* columns = right.column(column);
  const auto add = [&](const uint8_t* from, int64_t stride, int64_t at) {
    Words even[kRows];
    Words odd[kRows];
    for (int r = 0; r < kRows; ++r) {
      even[r] = load_words(rows + r * left.stride + at);
      odd[r] = load_words(rows + r * left.stride + left.odd + at);
    }
    for (int c = 0; c < kColumns; ++c) {
      const Words bytes = load_words(from + c * stride);
      const Words low = Int4Quads::low(bytes);
      const Words high = Int4Quads::high(bytes);
      for (int r = 0; r < kRows; ++r) {
        totals[r][c] =
            Int4Quads::multiply_add(even[r], low, odd[r], high, totals[r][c]);
      }
    }
  };
  int64_t at = 0;
  for (; at + simd::kVectorBytes <= right.bytes; at += simd::kVectorBytes) {
    // What comes next, by the time the last of these columns are multiplied:
    // columns are too short for the processor to see where each one goes on.
    for (int c = 0; c < kColumns; ++c) {
      prefetch_line<PrefetchTo::L2>(columns + (kAhead + c) * right.stride + at);
    }
    add(columns + at, right.stride, at);
  }
  if (at < right.bytes) {
    // The row is filled up with zeros, so what lies beyond counts nothing.
    uint8_t rest[kColumns][simd::kVectorBytes] = {};
    for (int c = 0; c < kColumns; ++c) {
      std::memcpy(rest[c], columns + c * right.stride + at,
                  static_cast<size_t>(right.bytes - at));
    }
    add(rest[0], simd::kVectorBytes, at);
  }
  store_totals<kRows, kColumns>(totals, sums, sums_stride);
}

void multiply_rows(const Int4Problem& problem, const LeftRows& left,
                   int64_t row, int64_t rows, int64_t column, int64_t columns) {
  if (multiplies_by_quad_panels(rows, problem.plan.inner)) {
    return multiply_by_quad_panels(left, problem.weight, problem.output, row,
                                   rows, column, columns);
  }
  int32_t* sums =
      Workspace::of_this_thread<Slot::IntegerSums>().template request<int32_t>(
          rows * kBlockOfColumns);
  const RightColumns& right = problem.weight;
  for (int64_t done = 0; done < columns; done += kBlockOfColumns) {
    const int64_t count = std::min(kBlockOfColumns, columns - done);
    const int64_t first = column + done;
    const auto dot_all = [&]<int kColumns>(
                             std::integral_constant<int, kColumns>,
                             int64_t begin) {
      for_each_strip<kSideRows>(rows, [&](int64_t r, int height) {
        with_strip_height<kSideRows>(height, [&](auto strip) {
          dot<strip(), kColumns>(left, r, right, first + begin,
                                 sums + r * kBlockOfColumns + begin,
                                 kBlockOfColumns);
        });
      });
    };
    int64_t begin = 0;
    if (rows == 1) {
      for (; begin + kLoneColumns <= count; begin += kLoneColumns) {
        dot<1, kLoneColumns>(left, 0, right, first + begin, sums + begin,
                             kBlockOfColumns);
      }
    }
    for (; begin + kSideColumns <= count; begin += kSideColumns) {
      dot_all(std::integral_constant<int, kSideColumns>{}, begin);
    }
    for (; begin < count; ++begin) {
      dot_all(std::integral_constant<int, 1>{}, begin);
    }
    problem.output.store(problem.output, {sums, kBlockOfColumns, left.totals,
                                          row, first, rows, count});
  }
}

// One thread's rectangle of the result.
void multiply_rectangle(const Int4Problem& problem, int64_t row, int64_t rows,
                        int64_t column, int64_t columns) {
  if (multiply_by_tiles(problem.plan, problem.input,
                        {problem.weight.data, problem.weight.stride},
                        problem.output, row, rows, column, columns)) {
    return;
  }
  const int64_t most =
      std::clamp(kMostLeftBytes /
                     std::max<int64_t>(left_stride(problem.plan.inner / 2), 1),
                 int64_t{kSideRows}, kMostRows);
  const int64_t block = detail::even_block(rows, most, kSideRows);
  for (int64_t done = 0; done < rows; done += block) {
    const int64_t count = std::min(block, rows - done);
    multiply_rows(problem, prepare_left(problem, row + done, count), row + done,
                  count, column, columns);
  }
  Workspace::of_this_thread<Slot::SplitRows>().release_excess();
}

// The weight, or a copy with contiguous columns of bytes.
RightColumns readable_weight(const TensorView& weight) {
  const auto* data = static_cast<const uint8_t*>(weight.const_data_ptr());
  const int64_t columns = weight.sizes[0];
  const int64_t bytes = weight.sizes[1];
  if (weight.strides[1] == 1 || bytes <= 1) {
    return {data, weight.strides[0], bytes};
  }
  uint8_t* copy = Workspace::of_this_thread<Slot::ContiguousWeight>()
                      .template request<uint8_t>(columns * bytes);
  parallel_for(columns, grain_of(2 * kElementGrain, bytes),
               [&](int64_t begin, int64_t end) {
                 for (int64_t column = begin; column < end; ++column) {
                   const uint8_t* from = data + column * weight.strides[0];
                   for (int64_t i = 0; i < bytes; ++i) {
                     copy[column * bytes + i] = from[i * weight.strides[1]];
                   }
                 }
               });
  return {copy, bytes, bytes};
}

}  // namespace

Tensor rowwise_scaled_linear(const char* op, RowValues values,
                             const TensorView& input,
                             const TensorView& input_scale,
                             const TensorView& weight,
                             const TensorView& weight_scale,
                             const std::optional<TensorView>& bias,
                             std::optional<ScalarType> out_dtype) {
  const RowwiseScaledLinearPlan plan = plan_rowwise_scaled_linear(
      op, values, input, input_scale, weight, weight_scale, bias, out_dtype);
  const Tensor output = allocate_rowwise_scaled_output(plan, input);
  if (plan.rows == 0 || plan.columns == 0) {
    return output;
  }
  const Int4Problem problem = {
      plan, input, readable_weight(weight),
      prepare_scaled_output(plan, input_scale, weight_scale, bias, output)};
  // One row is bound by reading the weight, of which a thread should have so
  // many bytes at the least.
  const int64_t threads = std::max(
      std::clamp<int64_t>(plan.columns * plan.inner / (2 * kElementGrain), 1,
                          num_threads()),
      detail::useful_threads(plan.rows, plan.columns, plan.inner,
                             num_threads()));
  detail::for_each_rectangle<void>(
      plan.rows, plan.columns, kSideRows, kSideColumns, threads,
      [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
        multiply_rectangle(problem, row, rows, column, columns);
      });
  Workspace::of_this_thread<Slot::Bias>().release_excess();
  Workspace::of_this_thread<Slot::ContiguousWeight>().release_excess();
  return output;
}

}  // namespace pkg::cpu
