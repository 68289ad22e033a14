// The elements of a mask, of one dtype: applied to scores, and looked at for
// keys that take part.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/attention/number.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

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

// A register of booleans, one for each lane of a register of scores.
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
        simd::store(row + i, score + simd::load_up_to(from + i, lanes));
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

}  // namespace pkg::cpu::attention
