// The gradient of a mask that is added to the scores: that of the scores,
// summed over all that the mask was broadcast to. It is gathered by the pass
// that makes the other gradients, in buffers of the mask's shape: heads that
// share mask elements and are worked on at the same time have one each, and
// these are added up in order at the end, so that every sum runs in one order
// for a number of threads. The gradient of a mask that is not broadcast at all
// is written as it comes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/attention/blocking.h"
#include "cpu/attention/key_range.h"
#include "cpu/attention/prefetch.h"
#include "cpu/attention/rows.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

template <class Input>
class GradMaskSums {
 public:
  using Number = simd::Compute<Input>;

  // `grad_mask` is contiguous, of the mask's shape.
  GradMaskSums(const AttentionShape& shape, const Tensor& grad_mask,
               int64_t key_heads, int64_t threads)
      : shape_(shape),
        grad_mask_(grad_mask),
        layout_(attention_mask_operand(shape, grad_mask)),
        size_(product(sizes_of(grad_mask))) {
    const auto sizes = sizes_of(grad_mask);
    const int64_t rows = sizes.size() >= 2 ? sizes[sizes.size() - 2] : 1;
    const int64_t columns = sizes.empty() ? 1 : sizes.back();
    shares_ = size_ != shape.batch() * rows * columns;
    is_whole_ = size_ == shape.batch() * shape.rows * shape.columns;
    const int64_t most =
        std::max<int64_t>(key_heads, 1);  // also of an empty batch
    slices_ = !shares_ ? most
                       : std::clamp<int64_t>(
                             kExtraBytes / std::max<int64_t>(bytes(1), 1) + 1,
                             1, std::min(threads, most));
  }

  // The slices that so many key heads are cut into; one thread works on a
  // slice.
  int64_t slices(int64_t heads) const { return std::min(slices_, heads); }

  // Makes room; all keys of a head are in `splits` parts.
  void allocate(int64_t splits) {
    if (is_whole_) {
      return;
    }
    const bool sums_columns = layout_.column_stride == 0;
    by_slice_ = shares_ ? (sums_columns ? splits : 1) : 0;
    by_split_ = sums_columns ? 1 : 0;
    const int64_t buffers =
        (shares_ ? slices_ : 1) * (sums_columns ? splits : 1);
    buffers_ = buffers;
    memory_ = std::make_unique_for_overwrite<Number[]>(
        static_cast<size_t>(buffers * size_));
    parallel_for(buffers * size_, 1 << 16, [&](int64_t begin, int64_t end) {
      std::fill(memory_.get() + begin, memory_.get() + end, Number{0});
    });
  }

  // Adds the score gradients of `rows` x `count` keys, kScoreStride elements
  // from row to row, of which only those in the range `seen` are there.
  void add(int64_t slice, int64_t split, int64_t batch, int64_t row,
           int64_t column, int64_t rows, int64_t count, const KeyRange& seen,
           const Number* gradients) const {
    if (!is_whole_) {
      add(slice, split, batch, row, column + seen.begin, rows,
          seen.end - seen.begin, gradients + seen.begin);
    } else if (is_narrow()) {
      write(static_cast<Input*>(grad_mask_.mutable_data_ptr()), batch, row,
            column, rows, count, seen, gradients);
    } else {
      write(static_cast<Number*>(grad_mask_.mutable_data_ptr()), batch, row,
            column, rows, count, seen, gradients);
    }
  }

  // Elements that add() will touch, to be prefetched.
  PrefetchRows to_prefetch(int64_t slice, int64_t split, int64_t batch,
                           int64_t row, int64_t column) const {
    if (is_whole_ || layout_.column_stride == 0) {
      return {};
    }
    return {
        reinterpret_cast<const std::byte*>(
            memory_.get() + (slice * by_slice_ + split * by_split_) * size_ +
            layout_.offset(shape_, batch) + row * layout_.row_stride + column),
        layout_.row_stride * int64_t{sizeof(Number)}, sizeof(Number)};
  }

  void finish() const {
    if (is_whole_) {
      return;
    }
    if (is_narrow()) {
      store(static_cast<Input*>(grad_mask_.mutable_data_ptr()));
    } else {
      store(static_cast<Number*>(grad_mask_.mutable_data_ptr()));
    }
  }

 private:
  // Besides the first buffer, for threads that share a mask.
  static constexpr int64_t kExtraBytes = int64_t{64} << 20;

  bool is_narrow() const { return dtype_of(grad_mask_) == shape_.type; }

  template <class Element>
  void write(Element* to, int64_t batch, int64_t row, int64_t column,
             int64_t rows, int64_t count, const KeyRange& seen,
             const Number* gradients) const {
    to += layout_.offset(shape_, batch) + column;
    for (int64_t r = 0; r < rows; ++r) {
      Element* of_row = to + (row + r) * layout_.row_stride;
      std::fill_n(of_row, seen.begin, Element{0});
      store_row(gradients + r * kScoreStride + seen.begin,
                seen.end - seen.begin, Number{1}, of_row + seen.begin);
      std::fill(of_row + seen.end, of_row + count, Element{0});
    }
  }

  void add(int64_t slice, int64_t split, int64_t batch, int64_t row,
           int64_t column, int64_t rows, int64_t count,
           const Number* gradients) const {
    constexpr int kLanes = simd::kLanes<Number>;
    Number* to = memory_.get() +
                 (slice * by_slice_ + split * by_split_) * size_ +
                 layout_.offset(shape_, batch) + row * layout_.row_stride +
                 column * layout_.column_stride;
    // Of rows that share their elements the sum, so that fewer small numbers
    // are added to a large one.
    alignas(64) Number totals[kScoreStride];
    if (layout_.row_stride == 0 && rows > 1) {
      for (int64_t i = 0; i < count; i += kLanes) {
        Vector<Number> total = simd::load(gradients + i);
        for (int64_t r = 1; r < rows; ++r) {
          total += simd::load(gradients + r * kScoreStride + i);
        }
        simd::store(totals + i, total);
      }
      gradients = totals;
      rows = 1;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const Number* from = gradients + r * kScoreStride;
      Number* sums = to + r * layout_.row_stride;
      if (layout_.column_stride == 0) {
        Vector<Number> sum{};
        for (int64_t i = 0; i < count; i += kLanes) {
          const auto rest =
              static_cast<int>(std::min<int64_t>(kLanes, count - i));
          sum += simd::load_partial(from + i, rest);
        }
        *sums += simd::reduce_add(sum);
        continue;
      }
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) {
        simd::store(sums + i, simd::load(sums + i) + simd::load(from + i));
      }
      if (i < count) {
        const int rest = static_cast<int>(count - i);
        simd::store_partial(sums + i,
                            simd::load_partial(sums + i, rest) +
                                simd::load_partial(from + i, rest),
                            rest);
      }
    }
  }

  int64_t bytes(int64_t buffers) const {
    return buffers * size_ * static_cast<int64_t>(sizeof(Number));
  }

  template <class Element>
  void store(Element* to) const {
    constexpr int64_t kGrain = 1 << 14;
    parallel_for(size_, kGrain, [&](int64_t begin, int64_t end) {
      Number* sums = memory_.get();
      for (int64_t b = 1; b < buffers_; ++b) {
        const Number* part = memory_.get() + b * size_;
        for (int64_t i = begin; i < end; ++i) {
          sums[i] += part[i];
        }
      }
      store_row(sums + begin, end - begin, Number{1}, to + begin);
    });
  }

  const AttentionShape& shape_;
  const Tensor& grad_mask_;
  AttentionOperand layout_;
  int64_t size_;   // elements of the mask
  bool shares_;    // whether matrices of the batch share mask elements
  bool is_whole_;  // whether nothing is broadcast
  int64_t slices_;
  int64_t by_slice_ = 0;  // buffers from one slice to the next
  int64_t by_split_ = 0;  // and from one part of the keys to the next
  int64_t buffers_ = 0;
  std::unique_ptr<Number[]> memory_;
};

}  // namespace pkg::cpu::attention
