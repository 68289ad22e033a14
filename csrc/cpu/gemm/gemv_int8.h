// A row vector of int8 times a matrix of int8 with contiguous rows or columns,
// summed in int32. The k-groups are those of the matrix product's arithmetic
// (cpu/gemm/arithmetic.h), made from the matrix as it is read; nothing is
// packed.
//
// 2 K N operations on K N bytes: bound by reading the matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/gemm/gemv.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/reduce.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"

namespace pkg::cpu {

namespace detail {

using Int8Arithmetic = ArithmeticOf<int8_t>::type;
using Int8KGroup = Int8Arithmetic::KGroup;

// Contiguous columns: dot products, eight columns at a time.
inline void dot_int8_columns(const int8_t* vector, int32_t start,
                             const MatrixView<int8_t>& matrix, int64_t begin,
                             int64_t end, int64_t inner, bool prefetches,
                             int32_t* output) {
  constexpr int64_t kRun =
      simd::kLanes<Int8KGroup> * int64_t{Int8Arithmetic::kKGroupSize};
  const auto dot = [&]<int kCount>(int64_t column,
                                   std::integral_constant<int, kCount>) {
    Vector<int32_t> sums[kCount] = {};
    for (int64_t k = 0; k < inner; k += kRun) {
      const auto x = Int8Arithmetic::load_k_groups(vector + k);
      if (kCount > 1 && prefetches) {
        prefetch_columns<kCount, kRun>(matrix, k, column + kCount);
      }
      for (int c = 0; c < kCount; ++c) {
        sums[c] = Int8Arithmetic::multiply_add(
            x,
            load_line<Int8Arithmetic::Right>(matrix.at(k, column + c),
                                             inner - k),
            sums[c]);
      }
    }
    simd::reduce_add_each(sums, output + column);
    for (int c = 0; c < kCount; ++c) {
      output[column + c] += start;
    }
  };
  int64_t column = begin;
  for (; column + 8 <= end; column += 8) {
    dot(column, std::integral_constant<int, 8>{});
  }
  for (; column < end; ++column) {
    dot(column, std::integral_constant<int, 1>{});
  }
}

// Contiguous rows: a k-group's rows at a time are scaled and added to a run of
// sums that stays in the L1 cache.
inline void add_scaled_int8_rows(const int8_t* vector, int32_t start,
                                 const MatrixView<int8_t>& matrix,
                                 int64_t begin, int64_t end, int64_t inner,
                                 bool prefetches, int32_t* output) {
  constexpr int64_t kRun = 2048;
  constexpr int kLanes = simd::kLanes<int32_t>;
  alignas(64) int32_t sums[kRun];
  for (int64_t first = begin; first < end; first += kRun) {
    const int64_t count = std::min(kRun, end - first);
    std::fill_n(sums, kRun, start);
    for (int64_t k = 0; k < inner; k += Int8Arithmetic::kKGroupSize) {
      // All columns are multiplied by the same values of the vector.
      int8_t values[Int8Arithmetic::kKGroupSize][kLanes];
      const int8_t* lines[Int8Arithmetic::kKGroupSize];
      for (int d = 0; d < Int8Arithmetic::kKGroupSize; ++d) {
        std::memset(values[d], vector[k + d], kLanes);
        lines[d] = values[d];
      }
      const auto x = Int8Arithmetic::interleave(lines);
      for (int64_t i = 0; i < count; i += kLanes) {
        if (prefetches && i % kCacheLine == 0) {
          for (int d = 0; d < Int8Arithmetic::kKGroupSize; ++d) {
            prefetch_line<PrefetchTo::L2>(
                matrix.at(k + Int8Arithmetic::kKGroupSize + d, first + i));
          }
        }
        const int columns =
            static_cast<int>(std::min<int64_t>(kLanes, count - i));
        const auto sum = Int8Arithmetic::multiply_add(
            x,
            load_step<Int8Arithmetic::Right>(
                matrix.at(k, first + i), matrix.row_stride, columns, inner - k),
            simd::load(sums + i));
        simd::store(sums + i, sum);
      }
    }
    std::copy_n(sums, count, output + first);
  }
}

}  // namespace detail

// output (columns) = vector (inner, `stride` apart) times matrix (inner x
// columns), where gemv_reads_in_place.
inline void multiply_vector(const int8_t* vector, int64_t stride,
                            MatrixView<int8_t> matrix, int64_t columns,
                            int64_t inner, int32_t* output, int64_t threads) {
  using Arithmetic = detail::Int8Arithmetic;
  constexpr int64_t kRun =
      simd::kLanes<detail::Int8KGroup> * int64_t{Arithmetic::kKGroupSize};
  const int64_t padded = round_up(inner, kRun);
  int8_t* x =
      Workspace::of_this_thread<Slot::PackedLeft>().request<int8_t>(padded);
  for (int64_t k = 0; k < inner; ++k) {
    x[k] = vector[k * stride];
  }
  std::fill_n(x + inner, padded - inner, int8_t{0});
  int32_t start = 0;
  if constexpr (Arithmetic::kCompensated) {
    const MatrixView<int8_t> row{x, padded, 1};
    compensate_rows<Arithmetic>(row, 1, padded, &start);
  }
  const bool contiguous_rows = choose_contiguous_rows(matrix, inner, columns);
  const bool prefetches = detail::prefetches_columns<int8_t>(inner, columns);
  parallel_for(columns, gemv_grain(columns, inner, threads),
               [&](int64_t begin, int64_t end) {
                 if (contiguous_rows) {
                   detail::add_scaled_int8_rows(x, start, matrix, begin, end,
                                                inner, prefetches, output);
                 } else {
                   detail::dot_int8_columns(x, start, matrix, begin, end, inner,
                                            prefetches, output);
                 }
               });
  Workspace::of_this_thread<Slot::PackedLeft>().release_excess();
}

}  // namespace pkg::cpu
