// Compensation where score gradients are multiplied as they are: what is summed
// of each row beside dQ. compensation.h says why.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/attention/blocking.h"
#include "cpu/attention/number.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// Pieces of a block of keys, and what the keys of each have in common: of the
// means of every third key the middle one, if the three are about the same, and
// else nothing. So keys without a mean have none by chance either, and one key
// of another order of magnitude, whose probability may be 0, does not make one.
template <class Arithmetic, int64_t kPieceKeys = 48>
struct KeyPieces {
  using Number = typename Arithmetic::Accumulator;
  static constexpr int64_t kKeys = kPieceKeys;
  static constexpr int64_t kCount = kKeyBlock / kKeys;
  static_assert(kKeyBlock % kKeys == 0 && kKeys % simd::kLanes<Number> == 0);
  static constexpr int64_t kColumns = kNR<Arithmetic>;

  // Of `count` keys that are packed as columns of dS K, of which `stride` are
  // whole tiles.
  static void find_common(const Number* packed, int64_t count, int64_t stride,
                          Number* means) {
    for (int64_t e = 0; e < stride; e += simd::kLanes<Number>) {
      const Number* column =
          packed + e / kColumns * count * kColumns + e % kColumns;
      for (int64_t piece = 0; piece < kCount; ++piece) {
        const int64_t first = std::min(piece * kKeys, count);
        const int64_t last = std::min(first + kKeys, count);
        simd::store(means + piece * stride + e,
                    common(mean_of_third(column, first, last),
                           mean_of_third(column, first + 1, last),
                           mean_of_third(column, first + 2, last)));
      }
    }
  }

 private:
  static Vector<Number> mean_of_third(const Number* column, int64_t first,
                                      int64_t last) {
    Vector<Number> sum{};
    for (int64_t key = first; key < last; key += 3) {
      sum += simd::load(column + key * kColumns);
    }
    return sum /
           static_cast<Number>(std::max<int64_t>((last - first + 2) / 3, 1));
  }
  static Vector<Number> common(Vector<Number> a, Vector<Number> b,
                               Vector<Number> c) {
    const Vector<Number> higher = larger(a, b);
    const Vector<Number> lower = a > b ? b : a;
    const Vector<Number> most = larger(higher, c);
    const Vector<Number> least = c > lower ? lower : c;
    const Vector<Number> middle = larger(lower, c > higher ? higher : c);
    return ((2 * least > most) | (2 * most < least)) ? middle
                                                     : Vector<Number>{};
  }
};

// Of one row, as numbers that begin as zeros and are added where keys are
// split.
template <class Arithmetic>
struct RowCompensation {
  using Number = typename Arithmetic::Accumulator;
  static constexpr int kLanes = simd::kLanes<Number>;
  Number* sums;  // of the score gradients: a SIMD accumulator
  Number* mean;  // of the keys, weighted by their probabilities

  // `count` keys of a whole block, a whole number of registers.
  template <class Pieces>
  void add(const Number* probabilities, const Number* gradients, int64_t count,
           const Number* means, int64_t stride) const {
    Number of_pieces[Pieces::kCount];
    Vector<Number> sum = simd::load(sums);
    for (int64_t piece = 0; piece < Pieces::kCount; ++piece) {
      const int64_t last = std::min((piece + 1) * Pieces::kKeys, count);
      Vector<Number> probability{};
      for (int64_t i = piece * Pieces::kKeys; i < last; i += kLanes) {
        probability += simd::load(probabilities + i);
        sum += simd::load(gradients + i);
      }
      of_pieces[piece] = simd::reduce_add(probability);
    }
    simd::store(sums, sum);
    add_means(of_pieces, means, stride);
  }

  // Adds what the keys of some pieces have in common, times the probabilities
  // of these.
  template <size_t kPieces>
  void add_means(const Number (&probabilities)[kPieces], const Number* means,
                 int64_t stride) const {
    for (int64_t e = 0; e < stride; e += kLanes) {
      Vector<Number> total = simd::load(mean + e);
#pragma GCC unroll 4
      for (size_t piece = 0; piece < kPieces; ++piece) {
        total += simd::load(means + static_cast<int64_t>(piece) * stride + e) *
                 probabilities[piece];
      }
      simd::store(mean + e, total);
    }
  }

  // Adds that of other keys of the row.
  void merge(const RowCompensation& other, int64_t stride) const {
    simd::store(sums, simd::load(sums) + simd::load(other.sums));
    for (int64_t e = 0; e < stride; e += kLanes) {
      simd::store(mean + e, simd::load(mean + e) + simd::load(other.mean + e));
    }
  }

  void compensate(int64_t stride, Number* grad_query) const {
    const Number sum = simd::reduce_add(simd::load(sums));
    for (int64_t e = 0; e < stride; e += kLanes) {
      const Vector<Number> taken = sum * simd::load(mean + e);
      // The mean of keys that are finite need not be so.
      simd::store(grad_query + e,
                  simd::load(grad_query + e) -
                      (taken - taken == Number{0} ? taken : Vector<Number>{}));
    }
  }
};

}  // namespace pkg::cpu::attention
