// A row vector times a matrix. One with contiguous rows or contiguous columns
// is read in place, since each of its elements is used once; of another a few
// columns at a time are gathered.
//
// 2 K N operations on K N elements: bound by reading the matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/gemm/packing.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"

namespace pkg::cpu {

namespace detail {

// Finished sums of the columns from `first` on.
template <class C, class Output, class Epilogue>
void store_finished(const C* sums, int64_t first, int64_t count, Output* output,
                    const Epilogue& epilogue) {
  constexpr int kLanes = simd::kLanes<C>;
  constexpr int kVectors = 8;
  for (int64_t i = 0; i < count; i += kVectors * kLanes) {
    Vector<C> block[kVectors];
    const int elements =
        static_cast<int>(std::min<int64_t>(kVectors * kLanes, count - i));
    const int vectors = ceil_div(elements, kLanes);
    const int tail = elements - (vectors - 1) * kLanes;
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

// The columns that dot_columns multiplies side by side, and so the columns that
// are gathered at a time.
inline constexpr int64_t kColumnsAtOnce = 8;

// Copies columns `first` to `last` to where each is contiguous.
template <class T>
MatrixView<T> gather_columns(const MatrixView<T>& matrix, int64_t first,
                             int64_t last, int64_t inner, T* to) {
  for (int64_t column = first; column < last; ++column) {
    T* at = to + (column - first) * inner;
    for (int64_t k = 0; k < inner; ++k) {
      at[k] = *matrix.at(k, column);
    }
  }
  return {to, 1, inner};
}

// Whether columns are prefetched while those before them are multiplied: most
// begin a run that the processor's own prefetchers do not foresee, many in a
// page of their own. Not of a matrix that a cache may hold: L2, and of wide
// elements, which are multiplied as fast as L3 delivers them, that too.
//
// Zen 4, one thread, 2026-11-24, against none. From memory: int8 4096 x 4096
// 1.1 times as fast, 768 x 3072 1.7; half precision 1.0 and 1.6, float32 1.2
// and 1.3. From L3, 768 x 3072: int8 and half precision 1.0, float32 0.85.
template <class T>
bool prefetches_columns(int64_t inner, int64_t columns) {
  constexpr int64_t kLeast = sizeof(T) < sizeof(float) ? 1 : 16;
  return inner * columns * int64_t{sizeof(T)} > kLeast * kL2Bytes;
}

// Whether one vector times floating-point numbers asks for those that follow.
// With AVX2 no: a Zen 3 reads eight rows or columns side by side, from memory,
// at 16 to 17 GB/s by itself and 12 to 14 so.
inline constexpr bool kPrefetchesVectors =
    kInstructionSet != InstructionSet::Avx2;

// Whether one vector times columns prefetches them so. Intel's processors with
// tile registers follow eight columns of wide elements by themselves: 4096 x
// 4096 from memory, PyTorch's time over ours with it and without float64 0.91
// and 0.99, float32 0.99 and 1.02, bfloat16 1.23 and 1.12, float16 2.0 and 1.8.
template <class T>
inline constexpr bool kPrefetchesDots =
    kInstructionSet == InstructionSet::Amx ? sizeof(T) < sizeof(float)
                                           : kPrefetchesVectors;

// Brings kValues values of each of the kCount columns from `column` on into L2.
template <int kCount, int64_t kValues, class T>
[[gnu::always_inline]] inline void prefetch_columns(const MatrixView<T>& matrix,
                                                    int64_t k, int64_t column) {
  constexpr int64_t kBytes = kValues * int64_t{sizeof(T)};
  if (kBytes % kCacheLine == 0 || k * int64_t{sizeof(T)} % kCacheLine == 0) {
    for (int c = 0; c < kCount; ++c) {
      prefetch_bytes<PrefetchTo::L2>(matrix.at(k, column + c), kBytes);
    }
  }
}

// The sums of columns `begin` to `end` go to `sums`: of a matrix with
// contiguous rows, in runs of kRowsRun columns, whose sums leave room in L1, or
// kLongRowsRun from memory, which is read the faster the longer its runs are;
// with contiguous columns, of kColumnsRun. Both in cpu/gemm/gemv.cpp.
//
// Intel Xeon with AMX, one thread, 2026-11-27, 4096 x 4096 from memory,
// PyTorch's time over ours with kRowsRun and kLongRowsRun: float64 0.91
// and 1.02, float32 0.94 and 1.02, bfloat16 2.3 and 2.47; with the next eight
// rows prefetched 2.8, but float64 0.96, float32 1.00.
template <class C>
inline constexpr int64_t kRowsRun = 8192 / sizeof(C);
template <class C>
inline constexpr int64_t kLongRowsRun = 32768 / sizeof(C);
inline constexpr int64_t kColumnsRun = 64;
template <class T>
void add_scaled_rows(const simd::Compute<T>* vector,
                     const MatrixView<T>& matrix, int64_t begin, int64_t end,
                     int64_t inner, bool prefetches, simd::Compute<T>* sums);
template <class T, class VectorElement>
void dot_columns(const VectorElement* vector, const MatrixView<T>& matrix,
                 int64_t begin, int64_t end, int64_t inner, bool prefetches,
                 simd::Compute<T>* sums);
// The same of up to kColumnsAtOnce columns, all that there are of a matrix or a
// part that does not follow from the number of threads: those that fill no
// group are summed in more chains of additions.
template <class T, class VectorElement>
void dot_few_columns(const VectorElement* vector, const MatrixView<T>& matrix,
                     int64_t columns, int64_t inner, simd::Compute<T>* sums);

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
  return threads > 1 ? std::max<int64_t>(grain_of(kElementGrain, inner), 4)
                     : columns;
}

namespace detail {

// Elements that lie `stride` apart, side by side: where they lie, or else in
// the slot's memory.
template <Slot slot, class T>
const T* neighbours_of(const T* from, int64_t stride, int64_t count) {
  if (stride == 1) {
    return from;
  }
  T* const to = Workspace::of_this_thread<slot>().template request<T>(count);
  for (int64_t i = 0; i < count; ++i) {
    to[i] = from[i * stride];
  }
  return to;
}

// Copies elements that lie `stride` apart, in the type that is computed in.
template <class T>
void copy_numbers(const T* from, int64_t stride, int64_t count,
                  simd::Compute<T>* to) {
  using C = simd::Compute<T>;
  constexpr int kLanes = simd::kLanes<C>;
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kLanes <= count; i += kLanes) {
      simd::store(to + i, simd::load(from + i));
    }
  }
  for (; i < count; ++i) {
    to[i] = static_cast<C>(from[i * stride]);
  }
}

// neighbours_of() in the type that is computed in.
template <Slot slot, class T>
const simd::Compute<T>* numbers_of(const T* from, int64_t stride,
                                   int64_t count) {
  using C = simd::Compute<T>;
  if constexpr (std::is_same_v<T, C>) {
    return neighbours_of<slot>(from, stride, count);
  } else {
    C* const to = Workspace::of_this_thread<slot>().template request<C>(count);
    copy_numbers(from, stride, count, to);
    return to;
  }
}

// The product of two vectors, in parts of so many elements, whose sums are
// added in float64 and in their order, whatever the number of threads: of 2^28
// ones in one part, float32 would stop counting at half of them.
//
// Zen 3, one thread, 2026-11-29, PyTorch's time over ours from 2^14 to 2^24
// elements: float32 0.9 to 1.3, float64 1.0 to 1.4; with one chain of additions
// and a copy of the left vector 0.25 to 0.6 and 0.2 to 0.5.
inline constexpr int64_t kDotPart = 4096;

template <class T>
simd::Compute<T> dot(const T* a, int64_t a_stride, const T* b, int64_t b_stride,
                     int64_t inner, int64_t threads) {
  using C = simd::Compute<T>;
  const int64_t parts = ceil_div(inner, kDotPart);
  std::vector<C> sums(static_cast<size_t>(parts));
  const int64_t grain = threads > 1 ? kElementGrain / kDotPart : parts;
  parallel_for(parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = part * kDotPart;
      const int64_t count = std::min(kDotPart, inner - first);
      const T* x = neighbours_of<Slot::PackedLeft>(a + first * a_stride,
                                                   a_stride, count);
      const T* y = neighbours_of<Slot::GatheredColumns>(b + first * b_stride,
                                                        b_stride, count);
      dot_few_columns(x, MatrixView<T>{y, 1, count}, 1, count,
                      &sums[static_cast<size_t>(part)]);
    }
  });
  double total = 0;
  for (const C sum : sums) {
    total += sum;
  }
  return static_cast<C>(total);
}

}  // namespace detail

// output (columns) = vector (inner, `stride` apart) times matrix
// (inner x columns).
template <class T, class Output, class Epilogue = KeepSums>
void multiply_vector(const T* vector, int64_t stride, MatrixView<T> matrix,
                     int64_t columns, int64_t inner, Output* output,
                     int64_t threads, const Epilogue& epilogue = {}) {
  using C = simd::Compute<T>;
  if (columns == 1) {
    const C sum = detail::dot(vector, stride, matrix.at(0, 0),
                              matrix.row_stride, inner, threads);
    return detail::store_finished(&sum, 0, 1, output, epilogue);
  }
  const C* x = detail::numbers_of<Slot::PackedLeft>(vector, stride, inner);
  const bool gathers = !gemv_reads_in_place(matrix, inner, columns);
  const bool contiguous_rows = choose_contiguous_rows(matrix, inner, columns);
  const bool prefetches =
      !gathers && detail::prefetches_columns<T>(inner, columns);
  parallel_for(
      columns, gemv_grain(columns, inner, threads),
      [&](int64_t begin, int64_t end) {
        alignas(64) C sums[detail::kLongRowsRun<C>];
        const int64_t run = gathers            ? detail::kColumnsAtOnce
                            : !contiguous_rows ? detail::kColumnsRun
                            : prefetches       ? detail::kLongRowsRun<C>
                                               : detail::kRowsRun<C>;
        T* gathered = gathers
                          ? Workspace::of_this_thread<Slot::GatheredColumns>()
                                .template request<T>(run * inner)
                          : nullptr;
        for (int64_t first = begin; first < end; first += run) {
          const int64_t last = std::min(first + run, end);
          if (contiguous_rows) {
            detail::add_scaled_rows(x, matrix, first, last, inner, prefetches,
                                    sums);
          } else {
            const MatrixView<T> dotted =
                gathers ? detail::gather_columns(matrix, first, last, inner,
                                                 gathered)
                        : matrix.from(0, first);
            if (columns < detail::kColumnsAtOnce) {
              detail::dot_few_columns(x, dotted, last - first, inner, sums);
            } else {
              detail::dot_columns(x, dotted, 0, last - first, inner,
                                  prefetches && detail::kPrefetchesDots<T>,
                                  sums);
            }
          }
          detail::store_finished(sums, first, last - first, output, epilogue);
        }
        if (gathers) {
          Workspace::of_this_thread<Slot::GatheredColumns>().release_excess();
        }
      });
  Workspace::of_this_thread<Slot::PackedLeft>().release_excess();
}

}  // namespace pkg::cpu
