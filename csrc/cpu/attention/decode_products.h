// The two products of the decoding way: Q K^T by dot products along the head,
// and P V by multiples of the values. Loops over registers are unrolled by
// pragmas, or else GCC keeps sums in memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention/decode_elements.h"
#include "cpu/attention/decode_prefetch.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu::attention {

// Products of kRows queries with kKeys keys; each sum is a SIMD accumulator,
// whose lanes are yet to be added up.
template <bool kScattered, int kRows, int kKeys, class Input, class Number>
[[gnu::always_inline]] inline void multiply_keys(
    const Number* queries, int64_t query_stride, const Input* const* keys,
    const Input* const* next_keys, int64_t head_size,
    Vector<Number> (&sums)[kRows][kKeys]) {
  using Elements = Chunk<Input>;
  constexpr int kLanes = simd::kLanes<Number>;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      sums[r][k] = Vector<Number>{};
    }
  }
  const Input* rows[kKeys];
  const Input* next[kKeys];
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
    rows[k] = keys[k];
    next[k] =
        (kPrefetchesNextBlock<kScattered, kRows, Input> ? next_keys : keys)[k];
  }
  const auto add = [&](int64_t e,
                       const auto& load) __attribute__((always_inline)) {
    Elements elements[kKeys];
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      prefetch_next<kScattered, kRows>(rows[k] + e, next[k] + e, e);
      elements[k] = load(rows[k] + e);
    }
#pragma GCC unroll 16
    for (int p = 0; p < Elements::kParts; ++p) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vector<Number> query =
            simd::load(queries + r * query_stride + e + p * kLanes);
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) {
          sums[r][k] = query * elements[k].parts[p] + sums[r][k];
        }
      }
    }
  };
  int64_t e = 0;
  for (; e + Elements::kSize <= head_size; e += Elements::kSize) {
    add(e, [](const Input* from) { return Elements::load(from); });
  }
  if (e < head_size) {
    const int rest = static_cast<int>(head_size - e);
    add(e, [rest](const Input* from) {
      return Elements::load_partial(from, rest);
    });
  }
}

// Scores of kRows rows, kDecodeKeys apart; written in whole registers.
template <bool kScattered, int kRows, class Input, class Number>
void score_keys(const Number* queries, int64_t query_stride,
                const KeyBlock<Input>& block, const KeyBlock<Input>& next,
                int64_t head_size, Number scale, Number* scores) {
  constexpr int kLanes = simd::kLanes<Number>;
  // One row is bound by memory: each key is read from its beginning to its end.
  // Several are bound by arithmetic, and keys share each load of a query.
  constexpr int kSums = simd::kVectorRegisters / 2;
  constexpr int kKeys = kRows == 1 && !kOneRowTakesSeveralKeys<Input>
                            ? 1
                            : std::min({kSums / kRows, 4, kLanes});
  constexpr int kGroups = kLanes / kKeys;
  static_assert(kDecodeKeys % kLanes == 0);
  for (int64_t key = 0; key < block.count; key += kLanes) {
    Vector<Number> partial[kRows][kGroups];
#pragma GCC unroll 1
    for (int g = 0; g < kGroups; ++g) {
      Vector<Number> sums[kRows][kKeys];
      const int64_t first = key + g * kKeys;
      multiply_keys<kScattered>(queries, query_stride, block.keys + first,
                                next.keys + first, head_size, sums);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kKeys == 1) {
          partial[r][g] = sums[r][0];
        } else {
          partial[r][g] = simd::sum_each(sums[r]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      Vector<Number> all;
      if constexpr (kGroups == 1) {
        all = partial[r][0];
      } else {
        all = simd::combine_each<kKeys>(partial[r],
                                        [](auto a, auto b) { return a + b; });
      }
      simd::store(scores + r * kDecodeKeys + key, all * scale);
    }
  }
}

// sums = sums * rescale + probabilities times values, kRows rows and kChunks
// chunks of columns.
template <bool kScattered, int kRows, int kChunks, class Input, class Number,
          class Load>
[[gnu::always_inline]] inline void add_chunks(
    const Number* probabilities, const Number* rescales,
    const KeyBlock<Input>& block, const KeyBlock<Input>& next_block,
    int64_t column, const Load& load, Number* sums, int64_t sum_stride) {
  using Elements = Chunk<Input>;
  constexpr int kLanes = simd::kLanes<Number>;
  constexpr int kVectors = kChunks * Elements::kParts;
  // From zero: the rounding error grows with the accumulation length.
  Vector<Number> total[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      total[r][v] = Vector<Number>{};
    }
  }
  for (int64_t key = 0; key < block.count; ++key) {
    const Input* row = block.values[key] + column;
    const Input* next = kPrefetchesNextBlock<kScattered, kRows, Input>
                            ? next_block.values[key] + column
                            : row;
    Elements elements[kChunks];
#pragma GCC unroll 16
    for (int c = 0; c < kChunks; ++c) {
      prefetch_next<kScattered, kRows>(row + c * Elements::kSize,
                                       next + c * Elements::kSize,
                                       c * Elements::kSize);
      elements[c] = load(row + c * Elements::kSize);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector<Number> probability =
          simd::broadcast(probabilities[r * kDecodeKeys + key]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        total[r][v] =
            probability *
                elements[v / Elements::kParts].parts[v % Elements::kParts] +
            total[r][v];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      Number* to = sums + r * sum_stride + column + v * kLanes;
      simd::store(to, simd::load(to) * rescales[r] + total[r][v]);
    }
  }
}

template <bool kScattered, int kRows, int kChunks, class Input, class Number>
void add_values(const Number* probabilities, const Number* rescales,
                const KeyBlock<Input>& block, const KeyBlock<Input>& next,
                int64_t value_size, int64_t column, Number* sums,
                int64_t sum_stride) {
  using Elements = Chunk<Input>;
  for (; column + kChunks * Elements::kSize <= value_size;
       column += kChunks * Elements::kSize) {
    add_chunks<kScattered, kRows, kChunks>(
        probabilities, rescales, block, next, column,
        [](const Input* from) { return Elements::load(from); }, sums,
        sum_stride);
  }
  if constexpr (kChunks > 1) {
    add_values<kScattered, kRows, kChunks / 2>(probabilities, rescales, block,
                                               next, value_size, column, sums,
                                               sum_stride);
  } else if (column < value_size) {
    const int rest = static_cast<int>(value_size - column);
    add_chunks<kScattered, kRows, 1>(
        probabilities, rescales, block, next, column,
        [rest](const Input* from) {
          return Elements::load_partial(from, rest);
        },
        sums, sum_stride);
  }
}

}  // namespace pkg::cpu::attention
