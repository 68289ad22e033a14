// A few rows against a range of keys: the loops of the decoding way. What it
// is, and what bounds it: decode.h.
//
//   for each block of keys, the softmax one block ahead of the values
//     for each strip of up to 4 rows     S = Q K^T
//     for each row                       mask; P = exp(S - m), l; dropout
//     for each strip of up to 4 rows     O = exp(m_old - m) O + P V
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/attention/blocking.h"
#include "cpu/attention/decode_blocks.h"
#include "cpu/attention/decode_elements.h"
#include "cpu/attention/decode_products.h"
#include "cpu/attention/scratch.h"
#include "cpu/attention/softmax_state.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu::attention {

namespace detail {

// Combines the lanes of a register, halves first.
template <class V, class Combine>
inline auto reduce(V value, const Combine& combine) {
  constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(value[0]));
  constexpr auto kSequence = std::make_index_sequence<kLanes>{};
  const auto fold = [&]<int kBit>(auto& self,
                                  std::integral_constant<int, kBit>) -> void {
    if constexpr (kBit < kLanes) {
      self(self, std::integral_constant<int, kBit * 2>{});
      value = combine(
          value,
          simd::detail::shuffle<simd::detail::Exchanged<kLanes, kBit, 1>>(
              value, value, kSequence));
    }
  };
  fold(fold, std::integral_constant<int, 1>{});
  return value[0];
}

}  // namespace detail

// Makes probabilities of `count` scores in place, a whole number of registers,
// and updates the row's state. Returns the factor for all that was accumulated
// before. A NaN among the scores may be lost to the maximum, never to the sum.
template <class Number>
Number softmax_row(Number* scores, int64_t count, SoftmaxState<Number>& state) {
  constexpr int kLanes = simd::kLanes<Number>;
  using V = Vector<Number>;
  V largest = simd::broadcast(state.maximum);
  for (int64_t i = 0; i < count; i += kLanes) {
    const V score = simd::load(scores + i);
    largest = score > largest ? score : largest;
  }
  const Number maximum =
      detail::reduce(largest, [](V a, V b) { return a > b ? a : b; });
  const Number origin = origin_of(maximum);
  V sum{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const V probability = simd::exp(simd::load(scores + i) - origin);
    sum += probability;
    simd::store(scores + i, probability);
  }
  const Number rescale =
      maximum == state.maximum
          ? Number{1}
          : simd::exp(simd::broadcast(state.maximum - origin))[0];
  state.maximum = maximum;
  state.sum =
      state.sum * rescale + detail::reduce(sum, [](V a, V b) { return a + b; });
  return rescale;
}

// The rows that share one key head, and what they have accumulated.
template <class Input>
class DecodeRows {
 public:
  using Number = simd::Compute<Input>;
  DecodeRows(int64_t rows, int64_t head_size, int64_t value_size, double scale)
      : rows_(rows),
        head_size_(head_size),
        value_size_(value_size),
        query_stride_(round_up(head_size, Chunk<Input>::kSize)),
        value_stride_(padded_values(value_size)),
        scale_(static_cast<Number>(scale)),
        keys_(keys_of_block(rows, head_size)) {
    const Scratch<Number> queries{rows_ * query_stride_};
    const Scratch<Number> output_sums{rows_ * value_stride_};
    const Scratch<Number> ordered{value_stride_};
    const Scratch<Number> probabilities{2 * rows_ * kDecodeKeys};
    const Scratch<Number> rescales{2 * rows_};
    const Scratch<SoftmaxState<Number>> states{rows_};
    const Scratch<KeyBlock<Input>> blocks{kKeyBlockRing};
    std::byte* memory =
        Workspace::of_this_thread<Slot::AttentionTask>().request<std::byte>(
            queries.size() + output_sums.size() + ordered.size() +
            probabilities.size() + rescales.size() + states.size() +
            blocks.size());
    queries_ = queries.take(memory);
    output_sums_ = output_sums.take(memory);
    ordered_ = ordered.take(memory);
    probabilities_ = probabilities.take(memory);
    rescales_ = rescales.take(memory);
    states_ = states.take(memory);
    blocks_ = blocks.take(memory);
    std::fill_n(output_sums_, rows_ * value_stride_, Number{0});
    std::fill_n(states_, rows_, SoftmaxState<Number>{});
  }

  static int64_t padded_values(int64_t value_size) {
    return round_up(value_size, Chunk<Input>::kSize);
  }

  void set_query(int64_t i, const Input* from, int64_t stride) {
    Number* to = queries_ + i * query_stride_;
    std::fill_n(to, query_stride_, Number{0});
    for (int64_t e = 0; e < head_size_; ++e) {
      to[Chunk<Input>::lane_of(e)] = static_cast<Number>(from[e * stride]);
    }
  }

  // The rows from `begin` to before `end` against the keys from `column` to
  // before `column_end`. `kScattered`: they lie in pages, or other heads' keys
  // lie between them.
  //   place  says where keys lie (decode_blocks.h)
  //   rules.mask(i, scores, column, count)  applies what holds for row i, and
  //       fills the scores up to a whole register with keys that take no part
  //   rules.drop(i, probabilities, column, count)
  template <bool kScattered, class Place, class Rules>
  void run(Place& place, const Rules& rules, int64_t column, int64_t column_end,
           int64_t begin, int64_t end) {
    if (column >= column_end) {
      return;
    }
    KeyBlocks<kScattered, Input, Place> blocks(
        blocks_, place, keys_, column, column_end,
        kPrefetchesNextBlock<kScattered, 1, Input> || end - begin > 1,
        head_size_, value_size_);
    softmax_block<kScattered>(begin, end, rules, blocks, 0);
    for (int64_t n = 0; n < blocks.count(); ++n) {
      if (n + 1 < blocks.count()) {
        softmax_block<kScattered>(begin, end, rules, blocks, n + 1);
      }
      for_strips(begin, end, [&]<int kRows>(int64_t i) {
        add_values<kScattered, kRows, chunks_at_once(kRows)>(
            probabilities(n, i), rescales(n) + i, blocks[n], blocks.next(n),
            value_size_, 0, output_sums_ + i * value_stride_, value_stride_);
      });
    }
  }

  int64_t rows() const { return rows_; }
  const SoftmaxState<Number>& state(int64_t i) const { return states_[i]; }

  // The sums of P V of row i in the order of the values' elements; valid until
  // the next call.
  const Number* output_sums(int64_t i) {
    const Number* from = output_sums_ + i * value_stride_;
    if constexpr (Chunk<Input>::kParts == 1) {
      return from;
    }
    for (int64_t e = 0; e < value_stride_; ++e) {
      ordered_[e] = from[Chunk<Input>::lane_of(e)];
    }
    return ordered_;
  }

 private:
  // As many keys as a page of memory holds: the hardware prefetcher works ahead
  // in the keys while the values are read, and the other way round. As two hold
  // where software does that too. Many rows are bound by arithmetic, of which
  // larger blocks need less.
  static int64_t keys_of_block(int64_t rows, int64_t head_size) {
    constexpr int64_t kPages = kOneRowTakesSeveralKeys<Input> ? 8192 : 4096;
    constexpr int64_t kLeast = 16;
    static_assert(kLeast % simd::kLanes<Number> == 0);
    const int64_t row_bytes =
        std::max<int64_t>(head_size, 1) * static_cast<int64_t>(sizeof(Input));
    return rows > 8 ? kDecodeKeys
                    : std::clamp(kPages / row_bytes / kLeast * kLeast, kLeast,
                                 kDecodeKeys);
  }

  static constexpr int chunks_at_once(int rows) {
    const int chunks = simd::kVectorRegisters / 2 / rows / Chunk<Input>::kParts;
    return chunks >= 8 ? 8 : chunks >= 4 ? 4 : chunks >= 2 ? 2 : 1;
  }

  // Calls body.operator()<rows>(first row) for strips of at most four rows.
  template <class Body>
  static void for_strips(int64_t i, int64_t end, const Body& body) {
    for (; i + 4 <= end; i += 4) {
      body.template operator()<4>(i);
    }
    switch (end - i) {
      case 3:
        return body.template operator()<3>(i);
      case 2:
        return body.template operator()<2>(i);
      case 1:
        return body.template operator()<1>(i);
    }
  }

  template <bool kScattered, class Rules, class Blocks>
  void softmax_block(int64_t begin, int64_t end, const Rules& rules,
                     Blocks& blocks, int64_t n) {
    const KeyBlock<Input>& block = blocks.ready(n);
    for_strips(begin, end, [&]<int kRows>(int64_t i) {
      score_keys<kScattered, kRows>(queries_ + i * query_stride_, query_stride_,
                                    block, blocks.next(n), head_size_, scale_,
                                    probabilities(n, i));
    });
    const int64_t padded = round_up(block.count, simd::kLanes<Number>);
    for (int64_t i = begin; i < end; ++i) {
      Number* scores = probabilities(n, i);
      rules.mask(i, scores, blocks.column(n), block.count);
      rescales(n)[i] = softmax_row(scores, padded, states_[i]);
      rules.drop(i, scores, blocks.column(n), padded);
    }
  }

  // Of block n: two are in use.
  Number* probabilities(int64_t n, int64_t i) const {
    return probabilities_ + (n % 2 * rows_ + i) * kDecodeKeys;
  }
  Number* rescales(int64_t n) const { return rescales_ + n % 2 * rows_; }

  int64_t rows_;
  int64_t head_size_;
  int64_t value_size_;
  int64_t query_stride_;
  int64_t value_stride_;
  Number scale_;
  int64_t keys_;
  Number* queries_;
  Number* output_sums_;
  Number* ordered_;
  Number* probabilities_;
  Number* rescales_;
  SoftmaxState<Number>* states_;
  KeyBlock<Input>* blocks_;
};

}  // namespace pkg::cpu::attention
