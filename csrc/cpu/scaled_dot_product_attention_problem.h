// One call of attention as the CPU kernels see it: typed operands, and the
// rules between a product of query and key and its weight: mask, causality,
// dropout.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "../philox.h"
#include "../scaled_dot_product_attention.h"
#include "gemm_pack.h"
#include "parallel.h"
#include "simd.h"

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

// Applies a mask to the scores of `count` keys of one row.
template <class Score, class Element>
void mask_row(Score* scores, const void* mask, int64_t stride, int64_t count) {
  const auto* from = static_cast<const Element*>(mask);
  const auto apply = [](Score score, Element element) {
    if constexpr (std::is_same_v<Element, bool>) {
      return element ? score : -kInfinity<Score>;
    } else {
      return score + static_cast<Score>(element);
    }
  };
  if (stride == 1) {
    // Two loops, so that the compiler can vectorise the usual one.
    for (int64_t i = 0; i < count; ++i) {
      scores[i] = apply(scores[i], from[i]);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      scores[i] = apply(scores[i], from[i * stride]);
    }
  }
}

}  // namespace detail

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
  void apply(Score* scores, int64_t offset, int64_t row, int64_t column,
             int64_t count) const {
    const int64_t element =
        offset + row * layout_.row_stride + column * layout_.column_stride;
    apply_(scores, data_ + element * element_size_, layout_.column_stride,
           count);
  }

 private:
  template <class Element>
  void set() {
    element_size_ = sizeof(Element);
    apply_ = &detail::mask_row<Score, Element>;
  }

  const std::byte* data_ = nullptr;
  AttentionOperand layout_{};
  int64_t element_size_ = 0;
  void (*apply_)(Score*, const void*, int64_t, int64_t) = nullptr;
};

// Multiplies weights by 0 where dropout drops them and by 1 / (1 - p) else.
template <class Score>
class Dropout {
 public:
  Dropout(const std::optional<TensorView>& seed, double probability)
      : active_(seed && probability > 0.0),
        seed_(active_ ? *static_cast<const int64_t*>(seed->const_data_ptr())
                      : 0),
        threshold_(dropout_keep_threshold(probability)),
        scale_(probability < 1.0 ? static_cast<Score>(1.0 / (1.0 - probability))
                                 : Score{0}) {}

  explicit operator bool() const { return active_; }

  // The factors of `count` keys from `column`, a multiple of 4. Writes up to
  // kQuads * 4 more than `count`.
  void factors(Score* to, int64_t batch, int64_t row, int64_t column,
               int64_t count) const {
    for (int64_t i = 0; i < count; i += 4 * kQuads) {
      factors_of_quads(to + i, batch, row, (column + i) / 4);
    }
  }

  static constexpr int kQuads = 4;

 private:
  // Several counters side by side: Philox is a chain of dependent products,
  // and the compiler makes vectors of independent ones.
  void factors_of_quads(Score* to, int64_t batch, int64_t row,
                        int64_t quad) const {
    for (int q = 0; q < kQuads; ++q) {
      const PhiloxCounter words = dropout_words(seed_, batch, row, quad + q);
      for (int i = 0; i < 4; ++i) {
        to[4 * q + i] = dropout_keeps(words.words[i], threshold_) ? scale_ : 0;
      }
    }
  }

  bool active_;
  int64_t seed_;
  uint64_t threshold_;
  Score scale_;
};

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

  // Matrices of the batch that one key head serves follow one another.
  int64_t key_heads() const { return shape.batch() / shape.group; }

  // Keys that the rows before `row_end` see, of those from `column` on.
  int64_t columns_seen(int64_t row_end, int64_t column, int64_t count) const {
    return is_causal ? std::clamp<int64_t>(row_end - column, 0, count) : count;
  }

  // Applies the mask and causality to a row's scores, and fills them up to a
  // whole register with keys that take no part.
  void mask_scores(Number* scores, int64_t mask_offset, int64_t row,
                   int64_t column, int64_t count) const {
    const int64_t end = (count + simd::kLanes<Number> - 1) /
                        simd::kLanes<Number> * simd::kLanes<Number>;
    if (is_causal) {
      count = std::clamp<int64_t>(row + 1 - column, 0, count);
    }
    if (mask) {
      mask.apply(scores, mask_offset, row, column, count);
    }
    std::fill(scores + count, scores + end, -kInfinity<Number>);
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

// Calls body(task) for each task; a thread that is done takes the next one, so
// that unequal tasks (causal ones) keep all busy. Which thread runs a task must
// not matter to its result.
template <class Body>
void for_each_task(int64_t tasks, int64_t threads, const Body& body) {
  const int64_t workers = std::min(tasks, threads);
  if (workers <= 1) {
    for (int64_t task = 0; task < tasks; ++task) {
      body(task);
    }
    return;
  }
  std::atomic<int64_t> next{0};
  parallel_for(workers, 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < tasks; task = next++) {
      body(task);
    }
  });
}

}  // namespace pkg::cpu::attention
