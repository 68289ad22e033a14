// One call of attention as the CPU kernels see it: typed operands, and the
// rules between a product of query and key and its weight: mask, causality,
// dropout.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include "cpu/attention/products.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/philox.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

// The matrices of one operand.
template <class T>
struct Matrices {
  const T* data;
  AttentionOperand layout;

  MatrixView<T> at(const AttentionShape& shape, int64_t batch) const {
    return {data + layout.offset(shape, batch), layout.row_stride,
            layout.column_stride};
  }
};

template <class T>
Matrices<T> matrices(const AttentionShape& shape, const TensorView& tensor,
                     int64_t group = 1) {
  return {static_cast<const T*>(tensor.const_data_ptr()),
          attention_operand(shape, tensor, group)};
}

namespace detail {

// Whether a key of this mask element takes part.
template <class Element>
bool takes_part(Element element) {
  if constexpr (std::is_same_v<Element, bool>) {
    return element;
  } else {
    return !(static_cast<simd::Compute<Element>>(element) ==
             -kInfinity<simd::Compute<Element>>);
  }
}

template <class Score, class Element>
Score masked(Score score, Element element) {
  if constexpr (std::is_same_v<Element, bool>) {
    return score + (element ? Score{0} : -kInfinity<Score>);
  } else {
    return score + static_cast<Score>(element);
  }
}

// A register of booleans, one a lane of Score.
template <class Score>
auto widen_booleans(
    const typename simd::VectorOf<uint8_t, simd::kLanes<Score>>::type& bytes) {
  if constexpr (sizeof(Score) == 4) {
    return cpu::detail::widen<uint8_t>(&bytes);
  } else {
    return __builtin_convertvector(bytes, Vector<uint64_t>);
  }
}
template <class Score>
auto load_booleans(const bool* from) {
  typename simd::VectorOf<uint8_t, simd::kLanes<Score>>::type bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return widen_booleans<Score>(bytes);
}
template <class Score>
auto load_booleans(const bool* from, int count) {
  typename simd::VectorOf<uint8_t, simd::kLanes<Score>>::type bytes{};
  std::memcpy(&bytes, from, static_cast<size_t>(count));
  return widen_booleans<Score>(bytes);
}

// Multiplies the scores of rows x count keys by `scale` and applies a mask;
// writes whole registers. -inf is added where a key takes no part, as PyTorch's
// math backend does it, and a score that is NaN stays.
template <class Score, class Element>
void mask_strip(Score* scores, int64_t score_stride, Score scale,
                const void* mask, int64_t row_stride, int64_t stride,
                int64_t rows, int64_t count) {
  constexpr int kLanes = simd::kLanes<Score>;
  const auto* elements = static_cast<const Element*>(mask);
  const bool scattered = stride != 0 && stride != 1;
  for (int64_t r = 0; r < rows; ++r) {
    const Element* from = elements + r * row_stride;
    Score* row = scores + r * score_stride;
    for (int64_t i = 0; i < count; i += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
      const Vector<Score> score = simd::load(row + i) * scale;
      if (scattered) {
        simd::store(row + i, score);
      } else if (stride == 0) {
        simd::store(row + i, score + masked(Score{0}, from[0]));
      } else if constexpr (std::is_same_v<Element, bool>) {
        simd::store(row + i,
                    score + ((lanes == kLanes
                                  ? load_booleans<Score>(from + i)
                                  : load_booleans<Score>(from + i, lanes)) != 0
                                 ? Vector<Score>{}
                                 : Vector<Score>{} - kInfinity<Score>));
      } else {
        simd::store(row + i, score + (lanes == kLanes ? simd::load(from + i)
                                                      : simd::load_partial(
                                                            from + i, lanes)));
      }
    }
  }
  // Along the rows, which may lie side by side.
  for (int64_t i = 0; scattered && i < count; ++i) {
    for (int64_t r = 0; r < rows; ++r) {
      Score& score = scores[r * score_stride + i];
      score = masked(score, elements[r * row_stride + i * stride]);
    }
  }
}

// Whether any of `count` contiguous mask elements lets a key take part, with a
// look at all of whole registers.
template <class Element>
bool any_of_row_takes_part(const Element* row, int64_t count) {
  int64_t i = 0;
  if constexpr (std::is_same_v<Element, bool>) {
    using Word = Vector<uint64_t>;
    Word any{};
    for (; i + simd::kVectorBytes <= count; i += simd::kVectorBytes) {
      Word word;
      std::memcpy(&word, row + i, sizeof(word));
      any |= word;
    }
    if (simd::any_bit(any)) {
      return true;
    }
  } else {
    constexpr int kLanes = simd::kLanes<simd::Compute<Element>>;
    for (; i + kLanes <= count; i += kLanes) {
      const auto element = simd::load(row + i);
      const auto all = element == -kInfinity<simd::Compute<Element>>;
      if (simd::any_bit(~all)) {
        return true;
      }
    }
  }
  for (; i < count; ++i) {
    if (takes_part(row[i])) {
      return true;
    }
  }
  return false;
}

// Whether any of rows x count keys takes part.
template <class Element>
bool any_takes_part(const void* mask, int64_t row_stride, int64_t stride,
                    int64_t rows, int64_t count) {
  const auto* from = static_cast<const Element*>(mask);
  for (int64_t r = 0; r < (row_stride == 0 ? 1 : rows); ++r) {
    const Element* row = from + r * row_stride;
    if (stride == 1) {
      if (any_of_row_takes_part(row, count)) {
        return true;
      }
      continue;
    }
    for (int64_t i = 0; i < (stride == 0 ? 1 : count); ++i) {
      if (takes_part(row[i * stride])) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace detail

// Of some keys, those from `begin` until `end`.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// A mask of any dtype: booleans say which keys take part, numbers are added.
template <class Score>
class ScoreMask {
 public:
  ScoreMask(const AttentionShape& shape,
            const std::optional<TensorView>& mask) {
    if (!mask) {
      return;
    }
    data_ = static_cast<const std::byte*>(mask->const_data_ptr());
    layout_ = attention_mask_operand(shape, *mask);
    switch (dtype_of(*mask)) {
      case ScalarType::Bool:
        set<bool>();
        break;
      case ScalarType::Double:
        set<double>();
        break;
      case ScalarType::Float:
        set<float>();
        break;
      case ScalarType::Half:
        set<Half>();
        break;
      default:
        set<BFloat16>();
    }
  }

  explicit operator bool() const { return data_ != nullptr; }

  int64_t offset(const AttentionShape& shape, int64_t batch) const {
    return data_ == nullptr ? 0 : layout_.offset(shape, batch);
  }

  // `offset` is that of the batch index.
  void apply(Score* scores, int64_t score_stride, Score scale, int64_t offset,
             int64_t row, int64_t column, int64_t rows, int64_t count) const {
    apply_(scores, score_stride, scale, at(offset, row, column),
           layout_.row_stride, layout_.column_stride, rows, count);
  }

  // The elements that a strip of rows needs, to be fetched beforehand.
  FetchedRows fetched(int64_t offset, int64_t row, int64_t column) const {
    if (data_ == nullptr || layout_.column_stride != 1) {
      return {};
    }
    return {at(offset, row, column), layout_.row_stride * element_size_,
            element_size_};
  }

  // The layout of its matrices, in elements.
  const AttentionOperand& layout() const { return layout_; }

  // The elements from a place on, those of a row side by side, if that is what
  // they are and lie like; else null.
  template <class Element>
  const Element* rows_of(int64_t offset, int64_t row, int64_t column) const {
    return apply_ == &detail::mask_strip<Score, Element> &&
                   layout_.column_stride == 1
               ? reinterpret_cast<const Element*>(at(offset, row, column))
               : nullptr;
  }

  // Of `count` keys from `column`, all that take part in any of `rows` rows lie
  // in the range; it begins at a multiple of `unit`. Dense masks are seen to be
  // such at the first and last element.
  KeyRange range(int64_t offset, int64_t row, int64_t rows, int64_t column,
                 int64_t count, int64_t unit) const {
    const auto none = [&](int64_t from, int64_t until) {
      return !any_(at(offset, row, column + from), layout_.row_stride,
                   layout_.column_stride, rows, until - from);
    };
    KeyRange range{0, none(0, count) ? 0 : count};
    while (range.begin < range.end &&
           none(range.begin, std::min(range.begin + unit, count))) {
      range.begin += unit;
    }
    while (range.begin < range.end &&
           none((range.end - 1) / unit * unit, range.end)) {
      range.end = (range.end - 1) / unit * unit;
    }
    return range;
  }

 private:
  template <class Element>
  void set() {
    if constexpr (std::is_same_v<Element, bool> ||
                  std::is_same_v<simd::Compute<Element>, Score>) {
      element_size_ = sizeof(Element);
      apply_ = &detail::mask_strip<Score, Element>;
      any_ = &detail::any_takes_part<Element>;
    }
  }

  const std::byte* at(int64_t offset, int64_t row, int64_t column) const {
    return data_ + (offset + row * layout_.row_stride +
                    column * layout_.column_stride) *
                       element_size_;
  }

  const std::byte* data_ = nullptr;
  AttentionOperand layout_{};
  int64_t element_size_ = 0;
  void (*apply_)(Score*, int64_t, Score, const void*, int64_t, int64_t, int64_t,
                 int64_t) = nullptr;
  bool (*any_)(const void*, int64_t, int64_t, int64_t, int64_t) = nullptr;
};

// Multiplies weights by 0 where dropout drops them and by 1 / (1 - p) else.
template <class Score>
class Dropout {
 public:
  Dropout(const std::optional<TensorView>& seed, double probability)
      : active_(seed && probability > 0.0),
        keys_(active_ ? *static_cast<const int64_t*>(seed->const_data_ptr())
                      : 0),
        threshold_(static_cast<uint32_t>(std::min<uint64_t>(
            dropout_keep_threshold(probability), ~uint32_t{0}))),
        scale_(probability < 1.0 ? static_cast<Score>(1.0 / (1.0 - probability))
                                 : Score{0}) {}

  explicit operator bool() const { return active_; }

  // The factors of `count` keys from `column`, a multiple of 4. Writes up to
  // kSpare more than `count`.
  void factors(Score* to, int64_t batch, int64_t row, int64_t column,
               int64_t count) const {
    for (int64_t i = 0; i < count; i += kColumns) {
      Vector<uint32_t> words[kRegisters][2];
      simd::dropout_words(keys_, batch, row, (column + i) / 4, words);
      for (int r = 0; r < 2 * kRegisters; ++r) {
        store_factors(to + i + r * simd::kLanes<uint32_t>, words[r / 2][r % 2]);
      }
    }
  }

 private:
  static constexpr int kRegisters = 3;  // of counters, side by side
  static constexpr int kColumns = kRegisters * 4 * simd::kPhiloxQuads;

  void store_factors(Score* to, Vector<uint32_t> words) const {
    const auto keeps = words >= threshold_;
    if constexpr (std::is_same_v<Score, float>) {
      simd::store(to, keeps ? Vector<float>{} + scale_ : Vector<float>{});
    } else {
      for (int i = 0; i < simd::kLanes<uint32_t>; ++i) {
        to[i] = keeps[i] ? scale_ : Score{0};
      }
    }
  }

  bool active_;
  simd::PhiloxKeys keys_;
  uint32_t threshold_;  // of a probability of 1 too, whose scale is 0
  Score scale_;

 public:
  static constexpr int kSpare = kColumns;
};

// Lanes of a score, or of another product over a head, that are summed one
// after the other. Where a head is too large for one such sum, parts a sixth as
// long cost up to 5 % and halve the gradients' error, which oneMKL's sums, lane
// by lane, had been twice as good as.
template <class Input>
int64_t longest_sum_of(const AttentionShape& shape) {
  constexpr bool kNotices = std::is_same_v<Input, simd::Compute<Input>>;
  return kNotices && std::max(shape.head_size, shape.value_size) > kLongestSum
             ? std::min<int64_t>(kLongestSum, 32)
             : kLongestSum;
}

// A call, but for the operands that only one direction has.
template <class Input>
struct Problem {
  using Number = simd::Compute<Input>;

  AttentionShape shape;
  Matrices<Input> query;
  Matrices<Input> key;
  Matrices<Input> value;
  ScoreMask<Number> mask;
  Dropout<Number> dropout;
  bool is_causal;
  int64_t threads;
  int64_t causal_shift = 0;  // row i sees keys 0 ... i + causal_shift
  int64_t first_batch = 0;   // of dropout's counters
  int64_t longest_sum = longest_sum_of<Input>(shape);

  // Matrices of the batch that one key head serves follow one another.
  int64_t key_heads() const { return shape.batch() / shape.group; }

  // Keys that the rows before `row_end` see, of those from `column` on.
  int64_t columns_seen(int64_t row_end, int64_t column, int64_t count) const {
    return is_causal
               ? std::clamp<int64_t>(row_end + causal_shift - column, 0, count)
               : count;
  }

  bool hides_keys() const { return is_causal || mask; }

  // Multiplies the scores of a strip of rows, `stride` elements apart, by
  // `scale`, applies the mask and causality, and fills the rows up to a whole
  // register with keys that do not exist.
  void mask_strip(Number* scores, int64_t stride, Number scale,
                  int64_t mask_offset, int64_t row, int64_t rows,
                  int64_t column, int64_t count) const {
    const int64_t end = (count + simd::kLanes<Number> - 1) /
                        simd::kLanes<Number> * simd::kLanes<Number>;
    if (mask) {
      mask.apply(scores, stride, scale, mask_offset, row, column, rows, count);
    }
    for (int64_t r = 0; r < rows; ++r) {
      Number* of_row = scores + r * stride;
      for (int64_t i = 0; !mask && i < count; i += simd::kLanes<Number>) {
        simd::store(of_row + i, simd::load(of_row + i) * scale);
      }
      for (int64_t i = columns_seen(row + r + 1, column, count); i < count;
           ++i) {
        of_row[i] -= kInfinity<Number>;
      }
      std::fill(of_row + count, of_row + end, -kInfinity<Number>);
    }
  }

  // The same of one row that is scaled already.
  void mask_scores(Number* scores, int64_t mask_offset, int64_t row,
                   int64_t column, int64_t count) const {
    mask_strip(scores, 0, Number{1}, mask_offset, row, 1, column, count);
  }

  // Whether mask_strip hides the last of the keys, be it with no mask.
  bool hides_last_keys(int64_t row, int64_t column, int64_t count) const {
    return count % simd::kLanes<Number> != 0 ||
           columns_seen(row + 1, column, count) < count;
  }

  // Whether mask_strip does more than to multiply.
  bool masks_strip(int64_t row, int64_t column, int64_t count) const {
    return mask || hides_last_keys(row, column, count);
  }

  void dropout_factors(Number* to, int64_t batch, int64_t row, int64_t column,
                       int64_t count) const {
    dropout.factors(to, first_batch + batch, row, column, count);
  }
};

// One, where another would cost more than it brings.
inline int64_t useful_threads(const AttentionShape& shape) {
  constexpr int64_t kGrain = 64 * 64 * 64;  // multiply-adds
  const int64_t scores = shape.batch() * shape.rows * shape.columns;
  return scores * (shape.head_size + shape.value_size) < kGrain ? 1
                                                                : num_threads();
}

template <class Input>
Problem<Input> make_problem(const AttentionShape& shape,
                            const TensorView& query, const TensorView& key,
                            const TensorView& value,
                            const std::optional<TensorView>& attn_mask,
                            const std::optional<TensorView>& dropout_seed,
                            double dropout_p, bool is_causal) {
  using Number = simd::Compute<Input>;
  return {shape,
          matrices<Input>(shape, query),
          matrices<Input>(shape, key, shape.group),
          matrices<Input>(shape, value, shape.group),
          ScoreMask<Number>(shape, attn_mask),
          Dropout<Number>(dropout_seed, dropout_p),
          is_causal,
          useful_threads(shape)};
}

// Whether lanes are all finite.
template <class Arithmetic>
bool all_finite(const typename Arithmetic::Lane* packed, int64_t count) {
  using Lane = typename Arithmetic::Lane;
  Vector<uint32_t> bad{};
  for (int64_t i = 0; i < count; i += simd::kLanes<Lane>) {
    const int rest = static_cast<int>(count - i);
    const Vector<Lane> lanes = rest >= simd::kLanes<Lane>
                                   ? simd::load(packed + i)
                                   : simd::load_partial(packed + i, rest);
    if constexpr (std::is_floating_point_v<Lane>) {
      const Vector<Lane> zero = lanes * Lane{0};
      bad |= std::bit_cast<Vector<uint32_t>>(zero != zero);
    } else {
      static_assert(Arithmetic::kDepth == 2, "pairs of bfloat16");
      bad |= std::bit_cast<Vector<uint32_t>>(
          ((lanes & 0x7F80U) == 0x7F80U) |
          ((lanes & 0x7F800000U) == 0x7F800000U));
    }
  }
  return !simd::any_bit(bad);
}

}  // namespace pkg::cpu::attention
