// A row vector times a matrix, for matrices with contiguous rows or contiguous
// columns: nothing is packed, since each element of the matrix is used once.
//
// 2 K N operations on K N elements: bound by reading the matrix.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm_pack.h"
#include "parallel.h"
#include "simd.h"
#include "workspace.h"

namespace pkg::cpu {

// Elements of the matrix that a thread should have at the least.
inline constexpr int64_t kGemvGrain = 32768;

namespace detail {

// Contiguous rows: four rows at a time are scaled and added to a run of sums
// that stays in the L1 cache.
template <class T, class Output>
void add_scaled_rows(const simd::Compute<T>* vector,
                     const MatrixView<T>& matrix, int64_t begin, int64_t end,
                     int64_t inner, Output* output) {
  using C = simd::Compute<T>;
  constexpr int64_t kRun = 8192 / sizeof(C);
  constexpr int kLanes = simd::kLanes<C>;
  constexpr int kRows = 4;
  alignas(64) C sums[kRun];
  for (int64_t first = begin; first < end; first += kRun) {
    const int64_t count = std::min(kRun, end - first);
    std::fill_n(sums, count, C{});
    const auto add_rows = [&]<int kCount>(int64_t k,
                                          std::integral_constant<int, kCount>) {
      const T* rows[kCount];
      C scales[kCount];
      for (int r = 0; r < kCount; ++r) {
        rows[r] = matrix.at(k + r, first);
        scales[r] = vector[k + r];
      }
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) {
        auto sum = simd::load(sums + i);
        for (int r = 0; r < kCount; ++r) {
          sum = simd::load(rows[r] + i) * scales[r] + sum;
        }
        simd::store(sums + i, sum);
      }
      if (i < count) {
        const int rest = static_cast<int>(count - i);
        auto sum = simd::load_partial(sums + i, rest);
        for (int r = 0; r < kCount; ++r) {
          sum = simd::load_partial(rows[r] + i, rest) * scales[r] + sum;
        }
        simd::store_partial(sums + i, sum, rest);
      }
    };
    int64_t k = 0;
    for (; k + kRows <= inner; k += kRows) {
      add_rows(k, std::integral_constant<int, kRows>{});
    }
    for (; k < inner; ++k) {
      add_rows(k, std::integral_constant<int, 1>{});
    }
    for (int64_t i = 0; i < count; ++i) {
      output[first + i] = static_cast<Output>(sums[i]);
    }
  }
}

// Contiguous columns: dot products, four columns at a time.
template <class T, class Output>
void dot_columns(const simd::Compute<T>* vector, const MatrixView<T>& matrix,
                 int64_t begin, int64_t end, int64_t inner, Output* output) {
  using C = simd::Compute<T>;
  constexpr int kLanes = simd::kLanes<C>;
  const auto dot = [&]<int kCount>(int64_t column,
                                   std::integral_constant<int, kCount>) {
    const T* columns[kCount];
    Vector<C> sums[kCount][2] = {};
    for (int c = 0; c < kCount; ++c) {
      columns[c] = matrix.at(0, column + c);
    }
    int64_t k = 0;
    for (; k + 2 * kLanes <= inner; k += 2 * kLanes) {
      for (int half = 0; half < 2; ++half) {
        const auto x = simd::load(vector + k + half * kLanes);
        for (int c = 0; c < kCount; ++c) {
          sums[c][half] =
              simd::load(columns[c] + k + half * kLanes) * x + sums[c][half];
        }
      }
    }
    for (; k < inner; k += kLanes) {
      const int rest = static_cast<int>(std::min<int64_t>(kLanes, inner - k));
      const auto x = simd::load_partial(vector + k, rest);
      for (int c = 0; c < kCount; ++c) {
        sums[c][0] = simd::load_partial(columns[c] + k, rest) * x + sums[c][0];
      }
    }
    for (int c = 0; c < kCount; ++c) {
      output[column + c] =
          static_cast<Output>(simd::reduce_add(sums[c][0] + sums[c][1]));
    }
  };
  int64_t column = begin;
  for (; column + 4 <= end; column += 4) {
    dot(column, std::integral_constant<int, 4>{});
  }
  for (; column < end; ++column) {
    dot(column, std::integral_constant<int, 1>{});
  }
}

}  // namespace detail

template <class T>
bool gemv_reads_in_place(const MatrixView<T>& matrix, int64_t inner,
                         int64_t columns) {
  return matrix.column_stride == 1 || matrix.row_stride == 1 || inner == 1 ||
         columns == 1;
}

// output (columns) = vector (inner, `stride` apart) times matrix
// (inner x columns).
template <class T, class Output>
void multiply_vector(const T* vector, int64_t stride, MatrixView<T> matrix,
                     int64_t columns, int64_t inner, Output* output,
                     int64_t threads) {
  using C = simd::Compute<T>;
  C* x = Workspace::of_this_thread<0>().template request<C>(inner);
  for (int64_t k = 0; k < inner; ++k) {
    x[k] = static_cast<C>(vector[k * stride]);
  }
  // A stride along a dimension of one element is never used.
  if (columns == 1) {
    matrix.column_stride = 1;
  }
  if (inner == 1) {
    matrix.row_stride = 1;
  }
  const bool rows_contiguous =
      matrix.column_stride == 1 && (columns > 1 || matrix.row_stride != 1);
  const int64_t grain =
      threads > 1
          ? std::max<int64_t>(kGemvGrain / std::max<int64_t>(inner, 1), 4)
          : columns;
  parallel_for(columns, grain, [&](int64_t begin, int64_t end) {
    if (rows_contiguous) {
      detail::add_scaled_rows<T>(x, matrix, begin, end, inner, output);
    } else {
      detail::dot_columns<T>(x, matrix, begin, end, inner, output);
    }
  });
}

}  // namespace pkg::cpu
