// Tiles of a small product, as wide as its columns allow: four registers of
// columns go with six rows, which leaves few strips of a product of 64 rows.
#include "cpu/gemm/small_product.h"

#include <algorithm>

#include "cpu/runtime/workspace.h"
#include "cpu/simd/transpose.h"
#include "host/integer_math.h"

namespace pkg::cpu::detail {
namespace {

// Zen 4, one thread, n = 64, float32 / float64, share of the peak, A in place:
// 12 x 2 registers 0.960 / 0.942, 14 x 2 0.966 / 0.965, 8 x 2 0.980 / 0.976, 6
// x 4 0.982 / 0.979; 12 x 2 by gemm.h, a call for each micro-tile, 0.934 /
// 0.900. Registers that are not stored 0.966 / 0.955 (12 x 2), C fetched ahead
// 0.934 / 0.922 (2026-11-25).
constexpr int kMostVectors = 4;
template <int kVectors>
[[maybe_unused]] constexpr int kTallestStrip = kVectors == kMostVectors ? 6 : 8;

// Registers of columns of the next tile, of so many that are left: none is of
// one alone where there are others.
[[maybe_unused]] int next_vectors(int64_t left) {
  if (left == 5 || left == 6) {
    return 3;
  }
  return static_cast<int>(std::min<int64_t>(left, kMostVectors));
}

// The tile at (row, column), of whose last register `tail` elements exist.
template <int kRows, int kVectors, bool kIsWhole, class T>
[[gnu::noinline]] void multiply_tile(const Product<T, T>& product, int64_t row,
                                     int64_t column, int tail) {
  using V = Vector<T>;
  constexpr int kLanes = simd::kLanes<T>;
  constexpr int kAccumulators = std::max(8 / (kRows * kVectors), 1);
  const auto [left, right, rows, columns, inner, output, stride] = product;
  const T* a = left.at(row, 0);
  const T* b = right.at(0, column);
  V sums[kAccumulators][kRows][kVectors];
  clear_sums(sums);
  const auto multiply_next = [&](V(&to)[kRows][kVectors]) {
    V columns_of_b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      columns_of_b[v] = kIsWhole || v < kVectors - 1
                            ? simd::load(b + v * kLanes)
                            : simd::load_partial(b + v * kLanes, tail);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V value = simd::broadcast(a[r * left.row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        to[r][v] = Floating<T>::multiply_add(value, columns_of_b[v], to[r][v]);
      }
    }
    a += left.column_stride;
    b += right.row_stride;
  };
  sum_depth(inner, multiply_next, sums);
  T* to = output + row * stride + column;
  for_each_register<kRows, kVectors>([&](int r, int v) {
    T* at = to + r * stride + v * kLanes;
    if (kIsWhole || v < kVectors - 1) {
      simd::store(at, sums[0][r][v]);
    } else {
      simd::store_partial(at, sums[0][r][v], tail);
    }
  });
}

template <int kVectors, bool kIsWhole, class T>
void multiply_columns(const Product<T, T>& product, int64_t column, int tail) {
  constexpr int kTallest = kTallestStrip<kVectors>;
  for_each_strip<kTallest>(product.rows, [&](int64_t row, int height) {
    with_strip_height<kTallest>(height, [&](auto rows) {
      multiply_tile<rows(), kVectors, kIsWhole>(product, row, column, tail);
    });
  });
}

// Columns of B, each contiguous, become rows `stride` apart.
template <class T>
void turn_columns(const MatrixView<T>& right, int64_t columns, int64_t inner,
                  T* to, int64_t stride) {
  constexpr int64_t kLanes = simd::kLanes<T>;
  using V = Vector<T>;
  for_each_block(columns, kLanes, [&](int64_t column, int64_t lines) {
    for_each_block(inner, kLanes, [&](int64_t k, int64_t values) {
      V square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        const T* from = right.at(k, column + i);
        square[i] = i >= lines ? V{}
                    : values == kLanes
                        ? simd::load(from)
                        : simd::load_partial(from, static_cast<int>(values));
      }
      simd::transpose(square);
      T* row = to + k * stride + column;
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i, row += stride) {
        if (i < values) {
          simd::store(row, square[i]);
        }
      }
    });
  });
}

}  // namespace

template <class T>
void multiply_small_turned(const Product<T, T>& product) {
  constexpr int64_t kLanes = simd::kLanes<T>;
  const int64_t stride = round_up(product.columns, kLanes);
  T* turned =
      Workspace::of_this_thread<Slot::PackedRight>().template request<T>(
          product.inner * stride);
  turn_columns(product.right, product.columns, product.inner, turned, stride);
  Product<T, T> with_rows = product;
  with_rows.right = {turned, stride, 1};
  multiply_small(with_rows);
}

template <class T>
void multiply_small(const Product<T, T>& product) {
  constexpr int64_t kLanes = simd::kLanes<T>;
  for (int64_t column = 0; column < product.columns;) {
    const int64_t left = product.columns - column;
    const int vectors = next_vectors(ceil_div(left, kLanes));
    const int64_t width = vectors * kLanes;
    const int tail =
        static_cast<int>(kLanes - std::max(width - left, int64_t{0}));
    with_count<kMostVectors>(vectors, [&](auto count) {
      if (tail == kLanes) {
        multiply_columns<count(), true>(product, column, tail);
      } else {
        multiply_columns<count(), false>(product, column, tail);
      }
    });
    column += width;
  }
}

// kHasSmallProducts.
#if defined(__AVX512F__)
template void multiply_small(const Product<float, float>&);
template void multiply_small(const Product<double, double>&);
template void multiply_small_turned(const Product<float, float>&);
template void multiply_small_turned(const Product<double, double>&);
#endif

}  // namespace pkg::cpu::detail
