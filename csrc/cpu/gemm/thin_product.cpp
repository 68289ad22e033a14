#include "cpu/gemm/thin_product.h"

#include "cpu/runtime/workspace.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu::detail {

namespace {

// Up to kMostThinSize vectors of `inner` elements, `inner_stride` apart.
template <class T>
struct ThinOperand {
  const T* data;
  int64_t vectors;
  int64_t vector_stride;
  int64_t inner_stride;
  int64_t inner;
};

// Copies vectors whose first elements are neighbours, from `first` on.
template <class T>
void turn_neighbours(const ThinOperand<T>& from, int64_t first, int64_t count,
                     simd::Compute<T>* to, int64_t to_stride) {
  using C = simd::Compute<T>;
  constexpr int kLanes = simd::kLanes<C>;
  const int64_t stride = from.inner_stride;
  // Where whole registers may be read, if the last of them has another
  // element's neighbours too.
  const int64_t readable = (from.inner - 1) * stride + from.vectors - kLanes;
  for (int64_t vector = 0; vector < from.vectors; vector += kLanes) {
    const int width =
        static_cast<int>(std::min<int64_t>(kLanes, from.vectors - vector));
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) {
      const int64_t place = (first + k) * stride + vector;
      Vector<C> block[kLanes];
      if (place + (kLanes - 1) * stride <= readable) {
        for (int i = 0; i < kLanes; ++i) {
          block[i] = simd::load(from.data + place + i * stride);
        }
      } else {
        for (int i = 0; i < kLanes; ++i) {
          block[i] = simd::load_partial(from.data + place + i * stride, width);
        }
      }
      simd::transpose(block);
      for (int i = 0; i < width; ++i) {
        simd::store(to + (vector + i) * to_stride + k, block[i]);
      }
    }
    for (; k < count; ++k) {
      for (int i = 0; i < width; ++i) {
        to[(vector + i) * to_stride + k] =
            static_cast<C>(from.data[(first + k) * stride + vector + i]);
      }
    }
  }
}

// The vectors' elements from `first` on as they are multiplied, each vector's
// side by side: where they lie, or copied to `to`.
template <class T>
MatrixView<simd::Compute<T>> side_by_side(const ThinOperand<T>& from,
                                          int64_t first, int64_t count,
                                          simd::Compute<T>* to) {
  using C = simd::Compute<T>;
  if constexpr (std::is_same_v<T, C>) {
    if (from.inner_stride == 1) {
      return {from.data + first, from.vector_stride, 1};
    }
  }
  if (from.inner_stride != 1 && from.vector_stride == 1) {
    turn_neighbours(from, first, count, to, count);
    return {to, count, 1};
  }
  for (int64_t vector = 0; vector < from.vectors; ++vector) {
    copy_numbers(
        from.data + vector * from.vector_stride + first * from.inner_stride,
        from.inner_stride, count, to + vector * count);
  }
  return {to, count, 1};
}

}  // namespace

template <class T>
void add_thin_product(const MatrixView<T>& left, int64_t rows,
                      const MatrixView<T>& right, int64_t columns,
                      int64_t inner, simd::Compute<T>* sums) {
  using C = simd::Compute<T>;
  // Both operands' parts in the L1 cache, a whole number of registers each.
  constexpr int64_t kBytes = 24 << 10;
  constexpr int64_t kStep = 64;
  const int64_t part = std::max(kBytes / static_cast<int64_t>(sizeof(C)) /
                                    (rows + columns) / kStep * kStep,
                                kStep);
  C* const memory =
      Workspace::of_this_thread<Slot::PackedLeft>().template request<C>(
          (rows + columns) * part);
  const ThinOperand<T> of_left{left.data, rows, left.row_stride,
                               left.column_stride, inner};
  const ThinOperand<T> of_right{right.data, columns, right.column_stride,
                                right.row_stride, inner};
  for (int64_t first = 0; first < inner; first += part) {
    const int64_t count = std::min(part, inner - first);
    const auto a = side_by_side(of_left, first, count, memory);
    const auto b = side_by_side(of_right, first, count, memory + rows * part);
    for (int64_t row = 0; row < rows; ++row) {
      C of_row[kMostThinSize];
      dot_few_columns(a.at(row, 0), MatrixView<C>{b.data, 1, b.row_stride},
                      columns, count, of_row);
      for (int64_t column = 0; column < columns; ++column) {
        sums[row * columns + column] += of_row[column];
      }
    }
  }
}

#define PKG_THIN_PRODUCT(T)                                              \
  template void add_thin_product(const MatrixView<T>&, int64_t,          \
                                 const MatrixView<T>&, int64_t, int64_t, \
                                 simd::Compute<T>*)
PKG_THIN_PRODUCT(Half);
PKG_THIN_PRODUCT(BFloat16);
PKG_THIN_PRODUCT(float);
PKG_THIN_PRODUCT(double);

}  // namespace pkg::cpu::detail
