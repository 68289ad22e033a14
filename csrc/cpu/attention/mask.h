// The mask: which keys take part, or what is added to the scores.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cpu/attention/key_range.h"
#include "cpu/attention/mask_elements.h"
#include "cpu/attention/prefetch.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

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

  // The elements that a strip of rows needs, to be prefetched.
  PrefetchRows to_prefetch(int64_t offset, int64_t row, int64_t column) const {
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

}  // namespace pkg::cpu::attention
