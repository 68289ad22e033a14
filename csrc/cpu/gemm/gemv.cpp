// The sums of a row vector times a matrix, with contiguous rows or columns.
#include "cpu/gemm/gemv.h"

#include "cpu/simd/reduce.h"

namespace pkg::cpu::detail {

// Eight rows at a time are scaled and added to sums that stay in the L1 cache;
// the rows first to one another, which makes the accumulation length of
// each sum, and its rounding error, smaller. Of half precision from memory the
// next eight rows are prefetched.
template <class T>
void add_scaled_rows(const simd::Compute<T>* vector,
                     const MatrixView<T>& matrix, int64_t begin, int64_t end,
                     int64_t inner, bool prefetches, simd::Compute<T>* sums) {
  using C = simd::Compute<T>;
  constexpr int kLanes = simd::kLanes<C>;
  constexpr int kRows = 8;
  const int64_t count = end - begin;
  std::fill_n(sums, count, C{});
  const auto add_rows = [&]<int kCount, bool kPrefetches>(int64_t k) {
    const T* rows[kCount];
    C scales[kCount];
    for (int r = 0; r < kCount; ++r) {
      rows[r] = matrix.at(k + r, begin);
      scales[r] = vector[k + r];
    }
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      if constexpr (kPrefetches) {
        if (i * int64_t{sizeof(T)} % kCacheLine == 0) {
          prefetch_registers<PrefetchTo::L2, 1>(
              rows[0] + kCount * matrix.row_stride + i, matrix.row_stride,
              kCount);
        }
      }
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
  if (kPrefetchesVectors && sizeof(T) < sizeof(float) && prefetches) {
    for (; k + 2 * kRows <= inner; k += kRows) {
      add_rows.template operator()<kRows, true>(k);
    }
  }
  for (; k + kRows <= inner; k += kRows) {
    add_rows.template operator()<kRows, false>(k);
  }
  for (; k < inner; ++k) {
    add_rows.template operator()<1, false>(k);
  }
}

namespace {

constexpr bool kHasDotRegisters = simd::kVectorRegisters >= 32;
// Chains of additions of each of kCount columns. The same of one column as of
// eight, and lanes are added in the same order: threads share columns, and how
// one is rounded must not follow from where a thread's begin.
template <int kCount>
constexpr int kChains = kHasDotRegisters && kCount <= kColumnsAtOnce ? 2 : 1;
// Of one that is multiplied alone, or beside a few: as many as the processor
// has additions under way.
constexpr int kChainsAlone = 8;

// The products of kCount columns from `column` on.
template <int kCount, int kAccumulators, class T, class VectorElement>
[[gnu::always_inline]] inline void dot_some(const VectorElement* vector,
                                            const MatrixView<T>& matrix,
                                            int64_t column, int64_t inner,
                                            bool prefetches,
                                            simd::Compute<T>* sums) {
  using C = simd::Compute<T>;
  constexpr int kLanes = simd::kLanes<C>;
  const T* columns[kCount];
  Vector<C> sums_of[kCount][kAccumulators] = {};
  for (int c = 0; c < kCount; ++c) {
    columns[c] = matrix.at(0, column + c);
  }
  int64_t k = 0;
  for (; k + kAccumulators * kLanes <= inner; k += kAccumulators * kLanes) {
    if (kCount == kColumnsAtOnce && prefetches) {
      prefetch_columns<kCount, kAccumulators * kLanes>(matrix, k,
                                                       column + kCount);
    }
    for (int i = 0; i < kAccumulators; ++i) {
      const auto x = simd::load(vector + k + i * kLanes);
      for (int c = 0; c < kCount; ++c) {
        sums_of[c][i] =
            simd::load(columns[c] + k + i * kLanes) * x + sums_of[c][i];
      }
    }
  }
  for (; k + kLanes <= inner; k += kLanes) {
    const auto x = simd::load(vector + k);
    for (int c = 0; c < kCount; ++c) {
      sums_of[c][0] = simd::load(columns[c] + k) * x + sums_of[c][0];
    }
  }
  if (k < inner) {
    const int rest = static_cast<int>(inner - k);
    const auto x = simd::load_partial(vector + k, rest);
    for (int c = 0; c < kCount; ++c) {
      sums_of[c][0] += simd::load_partial(columns[c] + k, rest) * x;
    }
  }
  // How many there are says in which order their lanes are added.
  constexpr int kTotals = std::max<int>(kCount, kColumnsAtOnce);
  Vector<C> sum_of[kTotals] = {};
  for (int c = 0; c < kCount; ++c) {
    sum_of[c] = sums_of[c][0];
    for (int i = 1; i < kAccumulators; ++i) {
      sum_of[c] += sums_of[c][i];
    }
  }
  C totals[kTotals];
  simd::reduce_add_each(sum_of, totals);
  std::copy_n(totals, kCount, sums);
}

}  // namespace

// Dot products, eight columns at a time. Zen 4, one thread, 2026-11-20: half
// precision is read at 26 GB/s, with four columns at 20. The columns after
// these are prefetched (prefetches_columns). Of columns that fill few
// registers, where adding up lanes is most of the work, as many as a register
// has lanes.
template <class T, class VectorElement>
void dot_columns(const VectorElement* vector, const MatrixView<T>& matrix,
                 int64_t begin, int64_t end, int64_t inner, bool prefetches,
                 simd::Compute<T>* sums) {
  constexpr int kLanes = simd::kLanes<simd::Compute<T>>;
  int64_t column = begin;
  const auto dot = [&]<int kCount>() {
    dot_some<kCount, kChains<kCount>>(vector, matrix, column, inner, prefetches,
                                      sums + (column - begin));
    column += kCount;
  };
  if constexpr (kHasDotRegisters && kLanes > kColumnsAtOnce) {
    if (inner <= 4 * kLanes) {
      while (column + kLanes <= end) {
        dot.template operator()<kLanes>();
      }
    }
  }
  while (column + kColumnsAtOnce <= end) {
    dot.template operator()<kColumnsAtOnce>();
  }
  while (column + kColumnsAtOnce / 2 <= end) {
    dot.template operator()<kColumnsAtOnce / 2>();
  }
  while (column < end) {
    dot.template operator()<1>();
  }
}

template <class T, class VectorElement>
void dot_few_columns(const VectorElement* vector, const MatrixView<T>& matrix,
                     int64_t columns, int64_t inner, simd::Compute<T>* sums) {
  int64_t column = 0;
  const auto dot = [&]<int kCount, int kAccumulators>() {
    for (; column + kCount <= columns; column += kCount) {
      dot_some<kCount, kAccumulators>(vector, matrix, column, inner, false,
                                      sums + column);
    }
  };
  dot.template operator()<kColumnsAtOnce, kChains<kColumnsAtOnce>>();
  // So that the vector is read once for them: of long sums half of all bytes.
  dot.template operator()<4, kChainsAlone / 4>();
  dot.template operator()<2, kChainsAlone / 2>();
  dot.template operator()<1, kChainsAlone>();
}

#define PKG_DOT_COLUMNS(T, VectorElement)                                   \
  template void dot_columns(const VectorElement*, const MatrixView<T>&,     \
                            int64_t, int64_t, int64_t, bool,                \
                            simd::Compute<T>*);                             \
  template void dot_few_columns(const VectorElement*, const MatrixView<T>&, \
                                int64_t, int64_t, simd::Compute<T>*)
#define PKG_MULTIPLY_VECTOR(T)                                                 \
  template void add_scaled_rows(const simd::Compute<T>*, const MatrixView<T>&, \
                                int64_t, int64_t, int64_t, bool,               \
                                simd::Compute<T>*);                            \
  PKG_DOT_COLUMNS(T, simd::Compute<T>)
PKG_MULTIPLY_VECTOR(Half);
PKG_MULTIPLY_VECTOR(BFloat16);
PKG_MULTIPLY_VECTOR(float);
PKG_MULTIPLY_VECTOR(double);
PKG_DOT_COLUMNS(Half, Half);
PKG_DOT_COLUMNS(BFloat16, BFloat16);

}  // namespace pkg::cpu::detail
