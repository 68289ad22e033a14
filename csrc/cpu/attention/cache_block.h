// A few rows against many keys, as when a model generates text: the part that
// scaled_dot_product_attention and decode_attention share. Nothing is packed,
// since each key and value is used only a few times.
//
// Algorithm: block by block of keys: scores by dot products along the head; the
// online softmax (FlashAttention-2, arXiv 2307.08691, 3.1); weighted sums of
// the values. Up to four of the rows that share a key head go together, so that
// each register of keys and values is loaded and converted once for all four.
// The scores and weights of a block are computed before the values of the one
// before it: while a softmax waits for its own results, there is something to
// read.
//
// Operations: 2 S (E + Ev) for a row. Bytes: S (E + Ev) elements, once for all
// rows. Bound by memory up to about three rows, then by the multiply-add units.
//
// What bounded it, one row, 4096 keys x 64, Zen 4, one thread, 2026-11-21,
// where plain reading gives 30 GB/s (float32 / bfloat16 / float16, GB/s):
//   11 / 15 / 13  sums of 16 keys at a time, which GCC kept in memory
//   12 / 20 / 20  loops over registers unrolled; halves in cache: 29 to 46
//   14 / 25 / 25  one key at a time, from its beginning to its end
//   19 / 28 / 32  the softmax of a block before the values of the last one
//   25 / 34 / 34  blocks of a page, not of 64 keys: the processor fetches ahead
//                 in the keys while the values are read, and in turn
//   29 / - / -    float32 prefetches four lines ahead (ask)
// With one row, prefetching a block ahead, or only its beginning, lost
// throughout; with pages or several rows it doubles the speed. Heads of 128
// float32 reach 16 to 21 GB/s: the least block is two pages. bfloat16 dot
// products (VDPBF16PS) would save conversions that are not what it waits for,
// and flush denormal numbers.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/attention/online_softmax.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/products.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu::attention {

// The most keys of a block, over which weighted values are summed one after the
// other: fewer where for want of a fused multiply-add each product is rounded.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr int64_t kDecodeKeys = 64;
#else
inline constexpr int64_t kDecodeKeys = 32;
#endif

// Contiguous elements as registers of numbers: one register, and two of
// bfloat16, the even elements and the odd ones, since a shift and a mask are
// all that it takes to convert a word of two.
template <class Input>
struct Chunk {
  using Number = simd::Compute<Input>;
  static constexpr bool kPairs = std::is_same_v<Input, BFloat16>;
  static constexpr int kParts = kPairs ? 2 : 1;
  static constexpr int kSize = kParts * simd::kLanes<Number>;

  Vector<Number> parts[kParts];

  static Chunk load(const Input* from) {
    if constexpr (kPairs) {
      Vector<uint32_t> words;
      std::memcpy(&words, from, sizeof(words));
      return of_words(words);
    } else {
      return {{simd::load(from)}};
    }
  }

  // The other elements are zero.
  static Chunk load_partial(const Input* from, int count) {
    if constexpr (kPairs) {
#if defined(__AVX512BW__)
      return of_words(std::bit_cast<Vector<uint32_t>>(_mm512_maskz_loadu_epi16(
          static_cast<__mmask32>((uint64_t{1} << count) - 1), from)));
#else
      uint16_t elements[kSize] = {};
      std::memcpy(elements, from, static_cast<size_t>(count) * sizeof(Input));
      Vector<uint32_t> words;
      std::memcpy(&words, elements, sizeof(words));
      return of_words(words);
#endif
    } else {
      return {{simd::load_partial(from, count)}};
    }
  }

  // Where element i of contiguous ones lies among the registers' lanes.
  static int64_t place(int64_t i) {
    if constexpr (kPairs) {
      const int64_t inside = i % kSize;
      return i - inside + inside / 2 + inside % 2 * simd::kLanes<Number>;
    } else {
      return i;
    }
  }

 private:
  static Chunk of_words(Vector<uint32_t> words) {
    if constexpr (kPairs) {
      return {{std::bit_cast<Vector<float>>(words << 16),
               std::bit_cast<Vector<float>>(words & 0xFFFF0000U)}};
    }
  }
};

// Where the keys and values of a block lie; filled up with the last ones. And
// where those of the next block do, which may be asked for meanwhile.
template <class Input>
struct KeyBlock {
  int64_t count = 0;
  const Input* keys[kDecodeKeys];
  const Input* values[kDecodeKeys];
  const Input* next_keys[kDecodeKeys];
  const Input* next_values[kDecodeKeys];

  void fill_up() {
    std::fill(keys + count, keys + kDecodeKeys, keys[count - 1]);
    std::fill(values + count, values + kDecodeKeys, values[count - 1]);
  }

  // `left` keys come after this block; find(count, keys, values) says where the
  // first of them lie.
  template <class Find>
  void find_next(int64_t left, const Find& find) {
    std::fill_n(next_keys, kDecodeKeys, keys[0]);
    std::fill_n(next_values, kDecodeKeys, values[0]);
    if (left > 0) {
      find(std::min(count, left), next_keys, next_values);
    }
  }
};

// Asks for what is read after `now`.
//
// One row and a contiguous cache: four lines ahead in single precision, which
// asks for memory faster than the processor fetches ahead by itself (24 GB/s
// without, 29 with; eight lines are too many). Half precision needs none. So it
// is on Zen 4. The Intel processors that have tile registers want more: GB/s
// with none, 4, 16 and 32 lines ahead, heads of 64, float32 11.5, 12.4, 12.9,
// 12.1; bfloat16, from the L3 cache, 12.7, 14.6, 18.9, 19.9; of 128, from
// memory, 8.7, 10.4, 11.6, 12.7.
//
// Pages end before the processor has seen them coming, and several rows read
// several keys side by side: the same place in the next block, into the L2
// cache. GB/s before and with that, one row, pages of 16 keys: float32 x 64 8.9
// and 17, x 128 10 and 18; bfloat16 6.9 and 17, 8.7 and 18; pages of 64 keys 9
// to 15 and 17 to 20; into the L1 cache 9 to 11. One row and a contiguous cache
// lose by it (21 to 17, 28 to 24): more instructions a key, so fewer keys are
// under way. Several rows, contiguous: 32 heads on 8 x 128 8.8 and 20, in
// bfloat16 9.5 and 15; 4 rows x 64 15 and 19, 14 and 15.
#if defined(PKG_HAS_TILES)
template <class Input>
inline constexpr int64_t kBytesAhead = 64 * (sizeof(Input) >= 4 ? 16 : 32);
#else
template <class Input>
inline constexpr int64_t kBytesAhead = 64 * (sizeof(Input) >= 4 ? 4 : 0);
#endif
template <bool kInPages, int kRows>
inline constexpr bool kAsksForNextBlock = kInPages || kRows > 1;
template <bool kInPages, int kRows, class Input>
[[gnu::always_inline]] inline void ask(const Input* now, const Input* next) {
  constexpr int kToL2 = 2;
  if constexpr (kAsksForNextBlock<kInPages, kRows>) {
    __builtin_prefetch(next, 0, kToL2);
  } else if constexpr (kBytesAhead<Input> > 0) {
    __builtin_prefetch(reinterpret_cast<const char*>(now) + kBytesAhead<Input>);
  }
}

// Products of kRows queries with kKeys keys, lane by lane.
template <bool kInPages, int kRows, int kKeys, class Input, class Number>
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
    next[k] = (kAsksForNextBlock<kInPages, kRows> ? next_keys : keys)[k];
  }
  const auto add = [&](int64_t e,
                       const auto& load) __attribute__((always_inline)) {
    Elements elements[kKeys];
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      ask<kInPages, kRows>(rows[k] + e, next[k] + e);
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
template <bool kInPages, int kRows, class Input, class Number>
void score_keys(const Number* queries, int64_t query_stride,
                const KeyBlock<Input>& block, int64_t head_size, Number scale,
                Number* scores) {
  constexpr int kLanes = simd::kLanes<Number>;
  // One row is bound by memory: each key is read from its beginning to its end.
  // Several are bound by arithmetic, and keys share each load of a query.
  constexpr int kSums = simd::kVectorRegisters / 2;
  constexpr int kKeys = kRows == 1 ? 1 : std::min({kSums / kRows, 4, kLanes});
  constexpr int kGroups = kLanes / kKeys;
  static_assert(kDecodeKeys % kLanes == 0);
  for (int64_t key = 0; key < block.count; key += kLanes) {
    Vector<Number> partial[kRows][kGroups];
#pragma GCC unroll 1
    for (int g = 0; g < kGroups; ++g) {
      Vector<Number> sums[kRows][kKeys];
      const int64_t first = key + g * kKeys;
      multiply_keys<kInPages>(queries, query_stride, block.keys + first,
                              block.next_keys + first, head_size, sums);
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

// sums = sums * correction + weights times values, kRows rows and kChunks
// chunks of columns.
template <bool kInPages, int kRows, int kChunks, class Input, class Number,
          class Load>
[[gnu::always_inline]] inline void add_chunks(const Number* weights,
                                              const Number* corrections,
                                              const KeyBlock<Input>& block,
                                              int64_t column, const Load& load,
                                              Number* sums,
                                              int64_t sum_stride) {
  using Elements = Chunk<Input>;
  constexpr int kLanes = simd::kLanes<Number>;
  constexpr int kVectors = kChunks * Elements::kParts;
  // From zero: the rounding error of a chain of additions grows with its
  // length.
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
    const Input* next = kAsksForNextBlock<kInPages, kRows>
                            ? block.next_values[key] + column
                            : row;
    Elements elements[kChunks];
#pragma GCC unroll 16
    for (int c = 0; c < kChunks; ++c) {
      ask<kInPages, kRows>(row + c * Elements::kSize,
                           next + c * Elements::kSize);
      elements[c] = load(row + c * Elements::kSize);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector<Number> weight =
          simd::broadcast(weights[r * kDecodeKeys + key]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        total[r][v] =
            weight *
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
      simd::store(to, simd::load(to) * corrections[r] + total[r][v]);
    }
  }
}

template <bool kInPages, int kRows, int kChunks, class Input, class Number>
void add_values(const Number* weights, const Number* corrections,
                const KeyBlock<Input>& block, int64_t value_size,
                int64_t column, Number* sums, int64_t sum_stride) {
  using Elements = Chunk<Input>;
  for (; column + kChunks * Elements::kSize <= value_size;
       column += kChunks * Elements::kSize) {
    add_chunks<kInPages, kRows, kChunks>(
        weights, corrections, block, column,
        [](const Input* from) { return Elements::load(from); }, sums,
        sum_stride);
  }
  if constexpr (kChunks > 1) {
    add_values<kInPages, kRows, kChunks / 2>(
        weights, corrections, block, value_size, column, sums, sum_stride);
  } else if (column < value_size) {
    const int rest = static_cast<int>(value_size - column);
    add_chunks<kInPages, kRows, 1>(
        weights, corrections, block, column,
        [rest](const Input* from) {
          return Elements::load_partial(from, rest);
        },
        sums, sum_stride);
  }
}

namespace detail {

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

// Makes weights of `count` scores in place, a whole number of registers, and
// updates the row's state. Returns the factor for all that was accumulated
// before. A NaN among the scores may be lost to the maximum, never to the sum.
template <class Number>
Number weigh(Number* scores, int64_t count, SoftmaxState<Number>& state) {
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
    const V weight = simd::exp(simd::load(scores + i) - origin);
    sum += weight;
    simd::store(scores + i, weight);
  }
  const Number correction =
      maximum == state.maximum
          ? Number{1}
          : simd::exp(simd::broadcast(state.maximum - origin))[0];
  state.maximum = maximum;
  state.sum = state.sum * correction +
              detail::reduce(sum, [](V a, V b) { return a + b; });
  return correction;
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
    const Part<Number> queries{rows_ * query_stride_};
    const Part<Number> values{rows_ * value_stride_};
    const Part<Number> ordered{value_stride_};
    const Part<Number> weights{2 * rows_ * kDecodeKeys};
    const Part<Number> corrections{2 * rows_};
    const Part<SoftmaxState<Number>> states{rows_};
    const Part<KeyBlock<Input>> blocks{2};
    std::byte* memory = Workspace::of_this_thread<3>().request<std::byte>(
        queries.size() + values.size() + ordered.size() + weights.size() +
        corrections.size() + states.size() + blocks.size());
    queries_ = queries.take(memory);
    values_ = values.take(memory);
    ordered_ = ordered.take(memory);
    weights_ = weights.take(memory);
    corrections_ = corrections.take(memory);
    states_ = states.take(memory);
    blocks_ = blocks.take(memory);
    std::fill_n(values_, rows_ * value_stride_, Number{0});
    std::fill_n(states_, rows_, SoftmaxState<Number>{});
  }

  static int64_t padded_values(int64_t value_size) {
    return round_up(value_size, Chunk<Input>::kSize);
  }

  void set_query(int64_t i, const Input* from, int64_t stride) {
    Number* to = queries_ + i * query_stride_;
    std::fill_n(to, query_stride_, Number{0});
    for (int64_t e = 0; e < head_size_; ++e) {
      to[Chunk<Input>::place(e)] = static_cast<Number>(from[e * stride]);
    }
  }

  // The rows from `begin` to before `end` against the keys from `column` to
  // before `column_end`.
  //   place(column, block)  sets block.keys and block.values of block.count;
  //       and the next ones, where kInPages or there are several rows
  //   rules.mask(i, scores, column, count)  applies what holds for row i, and
  //       fills the scores up to a whole register with keys that take no part
  //   rules.drop(i, weights, column, count)
  template <bool kInPages, class Place, class Rules>
  void run(Place& place, const Rules& rules, int64_t column, int64_t column_end,
           int64_t begin, int64_t end) {
    if (column >= column_end) {
      return;
    }
    int current = 0;
    prepare(place, column, column_end, current);
    weigh_block<kInPages>(begin, end, rules, column, current);
    for (; column < column_end; column += keys_, current = 1 - current) {
      const KeyBlock<Input>& block = blocks_[current];
      if (column + keys_ < column_end) {
        prepare(place, column + keys_, column_end, 1 - current);
        weigh_block<kInPages>(begin, end, rules, column + keys_, 1 - current);
      }
      for_strips(begin, end, [&]<int kRows>(int64_t i) {
        add_values<kInPages, kRows, chunks_at_once(kRows)>(
            weights(current, i), corrections(current) + i, block, value_size_,
            0, values_ + i * value_stride_, value_stride_);
      });
    }
  }

  int64_t rows() const { return rows_; }
  const SoftmaxState<Number>& state(int64_t i) const { return states_[i]; }

  // The weighted sums of row i, value_stride() of them; valid until the next.
  const Number* values(int64_t i) {
    const Number* from = values_ + i * value_stride_;
    if constexpr (Chunk<Input>::kParts == 1) {
      return from;
    }
    for (int64_t e = 0; e < value_stride_; ++e) {
      ordered_[e] = from[Chunk<Input>::place(e)];
    }
    return ordered_;
  }

 private:
  // A page of keys: the processor fetches ahead in the keys while the values
  // are read, and the other way round. Many rows are bound by arithmetic, of
  // which larger blocks need less.
  static int64_t keys_of_block(int64_t rows, int64_t head_size) {
    constexpr int64_t kPage = 4096;
    constexpr int64_t kLeast = 16;
    static_assert(kLeast % simd::kLanes<Number> == 0);
    const int64_t row_bytes =
        std::max<int64_t>(head_size, 1) * static_cast<int64_t>(sizeof(Input));
    return rows > 8 ? kDecodeKeys
                    : std::clamp(kPage / row_bytes / kLeast * kLeast, kLeast,
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

  template <class Place>
  void prepare(Place& place, int64_t column, int64_t column_end, int which) {
    KeyBlock<Input>& block = blocks_[which];
    block.count = std::min(keys_, column_end - column);
    place(column, block);
    block.fill_up();
  }

  template <bool kInPages, class Rules>
  void weigh_block(int64_t begin, int64_t end, const Rules& rules,
                   int64_t column, int which) {
    const KeyBlock<Input>& block = blocks_[which];
    for_strips(begin, end, [&]<int kRows>(int64_t i) {
      score_keys<kInPages, kRows>(queries_ + i * query_stride_, query_stride_,
                                  block, head_size_, scale_, weights(which, i));
    });
    const int64_t padded = round_up(block.count, simd::kLanes<Number>);
    for (int64_t i = begin; i < end; ++i) {
      Number* scores = weights(which, i);
      rules.mask(i, scores, column, block.count);
      corrections(which)[i] = weigh(scores, padded, states_[i]);
      rules.drop(i, scores, column, padded);
    }
  }

  Number* weights(int which, int64_t i) const {
    return weights_ + (which * rows_ + i) * kDecodeKeys;
  }
  Number* corrections(int which) const { return corrections_ + which * rows_; }

  int64_t rows_;
  int64_t head_size_;
  int64_t value_size_;
  int64_t query_stride_;
  int64_t value_stride_;
  Number scale_;
  int64_t keys_;
  Number* queries_;
  Number* values_;
  Number* ordered_;
  Number* weights_;
  Number* corrections_;
  SoftmaxState<Number>* states_;
  KeyBlock<Input>* blocks_;
};

// How the heads' keys are split among tasks, so that also one row of one head
// keeps all threads busy (Dao and others, "Flash-Decoding", 2023). It does not
// depend on the number of threads, and parts are merged in the order of the
// keys, so that results do not either.
//   splits  of head h are the tasks first[h] to before first[h + 1]
class DecodePlan {
 public:
  // As many tasks as make unequal ones even, where each has enough to do.
  static constexpr int64_t kTasks = 256;
  static constexpr int64_t kLeastKeys = 256;

  // `columns(head)` is how many keys the head has.
  template <class Columns>
  DecodePlan(int64_t heads, int64_t* first, const Columns& columns)
      : heads_(heads), first_(first) {
    int64_t all = 0;
    for (int64_t head = 0; head < heads; ++head) {
      all += columns(head);
    }
    keys_ = std::max(kLeastKeys,
                     round_up((all + kTasks - 1) / kTasks, kDecodeKeys));
    first_[0] = 0;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t splits = (columns(head) + keys_ - 1) / keys_;
      first_[head + 1] = first_[head] + std::max<int64_t>(splits, 1);
    }
  }

  int64_t tasks() const { return first_[heads_]; }
  int64_t head_of(int64_t task) const {
    return std::upper_bound(first_, first_ + heads_ + 1, task) - first_ - 1;
  }
  int64_t splits(int64_t head) const { return first_[head + 1] - first_[head]; }
  int64_t first_task(int64_t head) const { return first_[head]; }
  int64_t column(int64_t task, int64_t head) const {
    return (task - first_[head]) * keys_;
  }
  int64_t keys() const { return keys_; }

 private:
  int64_t heads_;
  int64_t* first_;
  int64_t keys_;
};

// Runs `work` over all its heads:
//   heads(), rows(), head_size(), value_size(), scale(), threads()
//   columns(head)                     how many keys there are
//   load(head, decode_rows)           sets the queries
//   run(head, decode_rows, column, column_end)
//   finish(head, row, state, values)  stores a result
// The task that is the last of its head merges the parts.
template <class Input, class Work>
void decode(const Work& work) {
  using Number = simd::Compute<Input>;
  const int64_t heads = work.heads();
  const DecodePlan plan(
      heads, Workspace::of_this_thread<4>().request<int64_t>(heads + 1),
      [&](int64_t head) { return work.columns(head); });
  const int64_t row_count = work.rows();
  SoftmaxParts<Number> parts{
      nullptr, DecodeRows<Input>::padded_values(work.value_size())};
  std::vector<std::atomic<int64_t>> done;
  if (plan.tasks() > heads) {
    parts.data = Workspace::of_this_thread<5>().request<Number>(
        plan.tasks() * row_count * parts.size());
    done = std::vector<std::atomic<int64_t>>(static_cast<size_t>(heads));
  }
  for_each_task(plan.tasks(), work.threads(), [&](int64_t task) {
    const int64_t head = plan.head_of(task);
    const int64_t splits = plan.splits(head);
    const int64_t column = plan.column(task, head);
    DecodeRows<Input> rows(row_count, work.head_size(), work.value_size(),
                           work.scale());
    work.load(head, rows);
    work.run(head, rows, column,
             std::min(column + plan.keys(), work.columns(head)));
    for (int64_t i = 0; i < row_count; ++i) {
      if (splits > 1) {
        parts.put(task * row_count + i, rows.state(i), rows.values(i));
      } else {
        work.finish(head, i, rows.state(i), rows.values(i));
      }
    }
    // Acquires what the others have put, and releases this part.
    if (splits > 1 && done[static_cast<size_t>(head)].fetch_add(
                          1, std::memory_order_acq_rel) == splits - 1) {
      for (int64_t i = 0; i < row_count; ++i) {
        const int64_t first = plan.first_task(head) * row_count + i;
        const auto state = parts.merge(first, splits, row_count);
        work.finish(head, i, state, parts.values(first));
      }
    }
  });
  Workspace::of_this_thread<5>().release_excess();
}

}  // namespace pkg::cpu::attention
