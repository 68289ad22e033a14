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

// Finished sums of the columns from `first` on.
template <class C, class Output, class Epilogue>
void store_finished(const C* sums, int64_t first, int64_t count, Output* output,
                    const Epilogue& epilogue) {
  constexpr int kLanes = simd::kLanes<C>;
  constexpr int kVectors = 8;
  for (int64_t i = 0; i < count; i += kVectors * kLanes) {
    Vector<C> block[kVectors];
    const int lanes =
        static_cast<int>(std::min<int64_t>(kVectors * kLanes, count - i));
    const int vectors = (lanes + kLanes - 1) / kLanes;
    const int tail = lanes - (vectors - 1) * kLanes;
    for (int v = 0; v < vectors; ++v) {
      const C* from = sums + i + v * kLanes;
      block[v] =
          v < vectors - 1 ? simd::load(from) : simd::load_partial(from, tail);
    }
    epilogue(0, first + i, block, 1, vectors, tail);
    for (int v = 0; v < vectors; ++v) {
      Output* to = output + first + i + v * kLanes;
      v < vectors - 1 ? simd::store(to, block[v])
                      : simd::store_partial(to, block[v], tail);
    }
  }
}

// Contiguous rows: eight rows at a time are scaled and added to a run of sums
// that stays in the L1 cache; the four first to one another, which makes the
// chain of additions to each sum, and its rounding error, shorter.
template <class T, class Output, class Epilogue>
void add_scaled_rows(const simd::Compute<T>* vector,
                     const MatrixView<T>& matrix, int64_t begin, int64_t end,
                     int64_t inner, Output* output, const Epilogue& epilogue) {
  using C = simd::Compute<T>;
  constexpr int64_t kRun = 8192 / sizeof(C);
  constexpr int kLanes = simd::kLanes<C>;
  constexpr int kRows = 8;
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
        auto sum = simd::load(rows[0] + i) * scales[0];
        for (int r = 1; r < kCount; ++r) {
          sum = simd::load(rows[r] + i) * scales[r] + sum;
        }
        simd::store(sums + i, simd::load(sums + i) + sum);
      }
      if (i < count) {
        const int rest = static_cast<int>(count - i);
        auto sum = simd::load_partial(rows[0] + i, rest) * scales[0];
        for (int r = 1; r < kCount; ++r) {
          sum = simd::load_partial(rows[r] + i, rest) * scales[r] + sum;
        }
        simd::store_partial(sums + i, simd::load_partial(sums + i, rest) + sum,
                            rest);
      }
    };
    int64_t k = 0;
    for (; k + kRows <= inner; k += kRows) {
      add_rows(k, std::integral_constant<int, kRows>{});
    }
    for (; k < inner; ++k) {
      add_rows(k, std::integral_constant<int, 1>{});
    }
    store_finished(sums, first, count, output, epilogue);
  }
}

// Contiguous columns: dot products, eight columns at a time. Zen 4, one thread,
// 2026-11-20: half precision is read at 26 GB/s, with four columns at 20;
// prefetching by instruction only lost.
template <class T, class Output, class Epilogue>
void dot_columns(const simd::Compute<T>* vector, const MatrixView<T>& matrix,
                 int64_t begin, int64_t end, int64_t inner, Output* output,
                 const Epilogue& epilogue) {
  using C = simd::Compute<T>;
  constexpr int kLanes = simd::kLanes<C>;
  constexpr int kColumns = 8;
  constexpr int kChains = simd::kVectorRegisters >= 32 ? 2 : 1;
  constexpr int64_t kRun = 64;
  static_assert(kRun % kLanes == 0 && kRun % kColumns == 0);
  C sums_of_run[kRun];
  const auto dot = [&]<int kCount>(int64_t column,
                                   std::integral_constant<int, kCount>) {
    const T* columns[kCount];
    Vector<C> sums[kCount][kChains] = {};
    for (int c = 0; c < kCount; ++c) {
      columns[c] = matrix.at(0, column + c);
    }
    int64_t k = 0;
    for (; k + kChains * kLanes <= inner; k += kChains * kLanes) {
      for (int chain = 0; chain < kChains; ++chain) {
        const auto x = simd::load(vector + k + chain * kLanes);
        for (int c = 0; c < kCount; ++c) {
          sums[c][chain] =
              simd::load(columns[c] + k + chain * kLanes) * x + sums[c][chain];
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
      for (int chain = 1; chain < kChains; ++chain) {
        sums[c][0] += sums[c][chain];
      }
      sums_of_run[(column - begin) % kRun + c] = simd::reduce_add(sums[c][0]);
    }
  };
  for (int64_t first = begin; first < end; first += kRun) {
    const int64_t last = std::min(first + kRun, end);
    int64_t column = first;
    for (; column + kColumns <= last; column += kColumns) {
      dot(column, std::integral_constant<int, kColumns>{});
    }
    for (; column < last; ++column) {
      dot(column, std::integral_constant<int, 1>{});
    }
    store_finished(sums_of_run, first, last - first, output, epilogue);
  }
}

}  // namespace detail

template <class T>
bool gemv_reads_in_place(const MatrixView<T>& matrix, int64_t inner,
                         int64_t columns) {
  return matrix.column_stride == 1 || matrix.row_stride == 1 || inner == 1 ||
         columns == 1;
}

// Whether the rows are contiguous, else the columns are. Sets strides that are
// never used, along a dimension of one element, to 1.
template <class T>
bool choose_contiguous_rows(MatrixView<T>& matrix, int64_t inner,
                            int64_t columns) {
  if (columns == 1) {
    matrix.column_stride = 1;
  }
  if (inner == 1) {
    matrix.row_stride = 1;
  }
  return matrix.column_stride == 1 && (columns > 1 || matrix.row_stride != 1);
}

// Columns that a thread should have at the least.
inline int64_t gemv_grain(int64_t columns, int64_t inner, int64_t threads) {
  return threads > 1
             ? std::max<int64_t>(kGemvGrain / std::max<int64_t>(inner, 1), 4)
             : columns;
}

// output (columns) = vector (inner, `stride` apart) times matrix
// (inner x columns).
template <class T, class Output, class Epilogue = KeepSums>
void multiply_vector(const T* vector, int64_t stride, MatrixView<T> matrix,
                     int64_t columns, int64_t inner, Output* output,
                     int64_t threads, const Epilogue& epilogue = {}) {
  using C = simd::Compute<T>;
  C* x = Workspace::of_this_thread<0>().template request<C>(inner);
  for (int64_t k = 0; k < inner; ++k) {
    x[k] = static_cast<C>(vector[k * stride]);
  }
  const bool contiguous_rows = choose_contiguous_rows(matrix, inner, columns);
  parallel_for(columns, gemv_grain(columns, inner, threads),
               [&](int64_t begin, int64_t end) {
                 if (contiguous_rows) {
                   detail::add_scaled_rows<T>(x, matrix, begin, end, inner,
                                              output, epilogue);
                 } else {
                   detail::dot_columns<T>(x, matrix, begin, end, inner, output,
                                          epilogue);
                 }
               });
  Workspace::of_this_thread<0>().release_excess();
}

}  // namespace pkg::cpu
