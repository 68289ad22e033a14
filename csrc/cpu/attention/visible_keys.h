// Which keys a strip of rows has to be multiplied with: without those that
// causality, the window or the mask hides from all of its rows at either end of
// a block.
//
// To find them is to read the mask, and one that many heads share would be read
// by each of them: with a window of 128 keys of 4096 that takes longer than all
// else. So the ranges of a shared mask are found once, by all threads, for each
// kShortStripRows rows and kKeyBlock keys: two bytes for as many elements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/attention/blocking.h"
#include "cpu/attention/key_range.h"
#include "cpu/attention/problem.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/runtime/parallel.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

template <class Input>
class VisibleKeys {
  // A KeyRange of a block.
  struct ShortRange {
    uint8_t begin;
    uint8_t end;
  };
  static_assert(kKeyBlock <= std::numeric_limits<uint8_t>::max());

 public:
  explicit VisibleKeys(const Problem<Input>& problem)
      : problem_(problem), tables_(problem.mask.layout()) {
    const AttentionShape& shape = problem.shape;
    if (!problem.mask || shape.columns == 0) {
      return;
    }
    int64_t tables = 1;  // one for each matrix of the mask that differs
    for (size_t d = shape.lead_dims; d-- > 0;) {
      if (tables_.lead_strides[d] != 0) {
        tables_.lead_strides[d] = tables;
        tables *= shape.lead_sizes[d];
      }
    }
    if (tables < shape.batch()) {
      find(tables);
    }
  }

  // Those of one matrix of the batch.
  class OfMatrix {
   public:
    OfMatrix(const VisibleKeys& all, int64_t batch)
        : all_(all),
          mask_offset_(all.problem_.mask.offset(all.problem_.shape, batch)),
          ranges_(all.ranges_.empty() ? nullptr
                                      : all.ranges_of(all.tables_.offset(
                                            all.problem_.shape, batch))) {}

    // Of `count` keys from `column` on, where a block begins, those that any of
    // the rows of a strip sees; the range begins at a multiple of NR. What is
    // left out has a probability of 0, and nothing is unless all that this
    // would be multiplied with is finite.
    KeyRange of_strip(int64_t row, int64_t rows, int64_t column, int64_t count,
                      bool all_finite) const {
      if (!all_finite) {
        return {0, count};
      }
      constexpr int64_t kUnit = kNR<typename ArithmeticOf<Input>::type>;
      KeyRange seen = all_.problem_.keys_of_rows(row, rows, column, count);
      seen.begin = seen.begin / kUnit * kUnit;
      if (all_.problem_.mask && seen.begin < seen.end) {
        const KeyRange masked = of_mask(row, rows, column, count);
        seen = {std::max(seen.begin, masked.begin),
                std::min(seen.end, masked.end)};
      }
      return seen;
    }

   private:
    KeyRange of_mask(int64_t row, int64_t rows, int64_t column,
                     int64_t count) const {
      if (ranges_ == nullptr) {
        return all_.in_mask(mask_offset_, row, rows, column, count);
      }
      KeyRange seen{count, 0};
      const ShortRange* of_block = ranges_ + column / kKeyBlock;
      const int64_t end = all_.group_of(row + rows - 1);
      for (int64_t group = all_.group_of(row); group <= end; ++group) {
        const ShortRange& range = of_block[group * all_.key_blocks_];
        if (range.begin < range.end) {
          seen = {std::min<int64_t>(seen.begin, range.begin),
                  std::max<int64_t>(seen.end, range.end)};
        }
      }
      return seen;
    }

    const VisibleKeys& all_;
    int64_t mask_offset_;
    const ShortRange* ranges_;
  };

 private:
  KeyRange in_mask(int64_t mask_offset, int64_t row, int64_t rows,
                   int64_t column, int64_t count) const {
    using Arithmetic = typename ArithmeticOf<Input>::type;
    return problem_.mask.range(mask_offset, row, rows, column, count,
                               kNR<Arithmetic>);
  }

  void find(int64_t tables) {
    const AttentionShape& shape = problem_.shape;
    // Rows that share their elements are one.
    const int64_t rows = tables_.row_stride == 0 ? 1 : shape.rows;
    row_groups_ = ceil_div(rows, kShortStripRows);
    key_blocks_ = ceil_div(shape.columns, kKeyBlock);
    ranges_.resize(static_cast<size_t>(tables * row_groups_ * key_blocks_));
    std::vector<int64_t> mask_offsets(static_cast<size_t>(tables));
    for (int64_t batch = 0; batch < shape.batch(); ++batch) {
      mask_offsets[static_cast<size_t>(tables_.offset(shape, batch))] =
          problem_.mask.offset(shape, batch);
    }
    for_each_task(tables * row_groups_, problem_.threads, [&](int64_t task) {
      const int64_t row = task % row_groups_ * kShortStripRows;
      for (int64_t block = 0; block < key_blocks_; ++block) {
        const int64_t column = block * kKeyBlock;
        const KeyRange range =
            in_mask(mask_offsets[static_cast<size_t>(task / row_groups_)], row,
                    std::min<int64_t>(kShortStripRows, rows - row), column,
                    std::min(kKeyBlock, shape.columns - column));
        ranges_[static_cast<size_t>(task * key_blocks_ + block)] = {
            static_cast<uint8_t>(range.begin), static_cast<uint8_t>(range.end)};
      }
    });
  }

  int64_t group_of(int64_t row) const {
    return row_groups_ == 1 ? 0 : row / kShortStripRows;
  }
  // Of a table: row group by row group, block by block.
  const ShortRange* ranges_of(int64_t table) const {
    return ranges_.data() + table * row_groups_ * key_blocks_;
  }

  const Problem<Input>& problem_;
  AttentionOperand tables_;  // as the mask's layout, of tables
  int64_t row_groups_ = 0;
  int64_t key_blocks_ = 0;
  std::vector<ShortRange> ranges_;
};

}  // namespace pkg::cpu::attention
