// The gradient of a mask that is added to the scores: that of the scores,
// summed over all that the mask was broadcast to. A pass of its own (two
// products that the other gradients repeat), in which each task owns a tile of
// the mask, so that every sum runs in one order whatever the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "scaled_dot_product_attention_backward.h"

namespace pkg::cpu::attention {

template <class Input, class MaskElement>
class MaskGradient {
 public:
  using Number = simd::Compute<Input>;
  using Lane = typename PackedQueries<Input>::Lane;

  // `grad_mask` is contiguous, of the mask's shape.
  MaskGradient(const BackwardProblem<Input>& problem, const Tensor& grad_mask)
      : problem_(problem),
        to_(static_cast<MaskElement*>(grad_mask.mutable_data_ptr())),
        queries_(problem.shape()),
        keys_(problem.shape()) {
    const AttentionShape& shape = problem.shape();
    const auto sizes = sizes_of(grad_mask);
    rows_ = sizes.size() >= 2 ? sizes[sizes.size() - 2] : 1;
    columns_ = sizes.empty() ? 1 : sizes.back();
    const AttentionOperand layout = attention_mask_operand(shape, grad_mask);
    matrices_.resize(static_cast<size_t>(
        rows_ * columns_ > 0 ? product(sizes) / (rows_ * columns_) : 0));
    for (int64_t batch = 0; !matrices_.empty() && batch < shape.batch();
         ++batch) {
      const int64_t matrix = layout.offset(shape, batch) / (rows_ * columns_);
      matrices_[static_cast<size_t>(matrix)].push_back(batch);
    }
  }

  void run() {
    const int64_t row_tiles = (rows_ + kGradientRows - 1) / kGradientRows;
    const int64_t column_tiles = (columns_ + kKeyBlock - 1) / kKeyBlock;
    for_each_task(
        static_cast<int64_t>(matrices_.size()) * row_tiles * column_tiles,
        problem_.forward.threads, [&](int64_t task) {
          const int64_t column = task % column_tiles * kKeyBlock;
          task /= column_tiles;
          run_tile(task / row_tiles, task % row_tiles * kGradientRows, column);
        });
  }

 private:
  struct Scratch {
    Lane* queries;
    Lane* keys;
    Number* weights;
    Number* gradients;
    Number* sums;  // kGradientRows x kScoreStride
  };

  Scratch scratch() const {
    const Part<Lane> queries{queries_.size(kGradientRows)};
    const Part<Lane> keys{keys_.size()};
    const Part<Number> strip{kStripRows * kScoreStride};
    const Part<Number> sums{kGradientRows * kScoreStride};
    std::byte* memory = Workspace::of_this_thread<3>().request<std::byte>(
        queries.size() + keys.size() + 2 * strip.size() + sums.size());
    Scratch scratch{};
    scratch.queries = queries.take(memory);
    scratch.keys = keys.take(memory);
    scratch.weights = strip.take(memory);
    scratch.gradients = strip.take(memory);
    scratch.sums = sums.take(memory);
    return scratch;
  }

  // A dimension that the mask is broadcast in is summed over as a whole.
  void run_tile(int64_t matrix, int64_t row, int64_t column) const {
    const AttentionShape& shape = problem_.shape();
    const bool sums_rows = rows_ != shape.rows;
    const bool sums_columns = columns_ != shape.columns;
    const int64_t row_end =
        sums_rows ? shape.rows : std::min(row + kGradientRows, shape.rows);
    const int64_t column_end =
        sums_columns ? shape.columns : std::min(column + kKeyBlock, columns_);
    const Scratch memory = scratch();
    std::fill_n(memory.sums, kGradientRows * kScoreStride, Number{0});
    for (const int64_t batch : matrices_[static_cast<size_t>(matrix)]) {
      for (int64_t c = column; c < column_end; c += kKeyBlock) {
        const int64_t count = std::min(kKeyBlock, column_end - c);
        keys_.pack(problem_.forward, batch / shape.group * shape.group, c,
                   count, memory.keys);
        for (int64_t r = row; r < row_end; r += kGradientRows) {
          add_block(memory, batch, r, std::min(kGradientRows, row_end - r), c,
                    count, sums_rows, sums_columns);
        }
      }
    }
    for (int64_t i = 0; i < std::min(kGradientRows, rows_ - row); ++i) {
      store_row(memory.sums + i * kScoreStride,
                std::min(kKeyBlock, columns_ - column), Number{1},
                to_ + (matrix * rows_ + row + i) * columns_ + column);
    }
  }

  void add_block(const Scratch& memory, int64_t batch, int64_t row,
                 int64_t rows, int64_t column, int64_t count, bool sums_rows,
                 bool sums_columns) const {
    const int64_t mask_offset =
        problem_.forward.mask.offset(problem_.shape(), batch);
    queries_.pack(problem_, batch, row, rows, memory.queries);
    for_each_strip(rows, [&](int64_t strip, int used, auto height) {
      strip_gradients<Input, height()>(
          problem_, {batch, mask_offset, row + strip, used, column, count},
          queries_.queries(memory.queries) + strip * queries_.query_depth,
          queries_.gradients(memory.queries, rows) +
              strip * queries_.grad_depth,
          keys_, memory.keys, memory.weights, memory.gradients);
      for (int i = 0; i < used; ++i) {
        Number* sums = memory.sums + (sums_rows ? 0 : strip + i) * kScoreStride;
        const Number* from = memory.gradients + i * kScoreStride;
        for (int64_t j = 0; j < count; ++j) {
          sums[sums_columns ? 0 : j] += from[j];
        }
      }
    });
  }

  const BackwardProblem<Input>& problem_;
  MaskElement* to_;
  PackedQueries<Input> queries_;
  PackedKeys<Input> keys_;
  int64_t rows_;
  int64_t columns_;
  std::vector<std::vector<int64_t>> matrices_;  // of the batch, by the mask's
};

}  // namespace pkg::cpu::attention
