// Matrix products by tile registers of values that are one part each (bfloat16,
// int8): as cpu/tiles/product.h, where the products take so little time that
// other work decides.
//
//   for columns of C by NC, rows by MC:     B packed, its sums beside it in L2
//     for the inner dimension by KC:
//       for strips of 32 rows:              in L1, in place or packed
//         for strips of 32 columns:         the micro-kernel
//
// KC is long, so that sums are seldom stored and loaded again: a strip of A
// takes two thirds of the L1 cache, and tiles of B go past it. Where C is in no
// cache it matters that its rows are written in order. Between two calls of the
// micro-kernel, where its products stand still, is as little as can be; a
// micro-tile of C is rounded and stored beside the next but one's products.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/operands.h"
#include "cpu/runtime/workspace.h"
#include "cpu/tiles/blocking.h"
#include "cpu/tiles/operand_blocks.h"
#include "cpu/tiles/plain_kernel.h"
#include "cpu/tiles/range.h"
#include "cpu/tiles/scheme.h"
#include "cpu/tiles/store_rows.h"
#include "cpu/tiles/transpose_tile.h"
#include "host/integer_math.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

// One thread's product. Left and Right: the blocks of A and B. Where it turns
// the result, C's transpose is what is stored, and what the epilogue is told
// of.
template <class Scheme, class Output, class Epilogue, class Right, class Left>
class PlainProduct {
  static_assert(Scheme::kParts == 1);

 public:
  using Input = typename Scheme::Input;
  using Accumulator = typename Scheme::Accumulator;

  PlainProduct(const typename Left::Source& left,
               const typename Right::Source& right, int64_t rows,
               int64_t columns, int64_t inner, Output* output,
               int64_t output_stride, const Epilogue& epilogue,
               bool turns_result = false)
      : turns_result_(turns_result),
        rows_(rows),
        columns_(columns),
        inner_(inner),
        units_(units_of<Scheme>(inner)),
        sizes_(plain_block_sizes<Scheme, Right>(rows, columns, inner,
                                                left.first.line_stride == 1)),
        store_rows_(output, output_stride, epilogue),
        left_(left, rows, inner, sizes_.rows, sizes_.units, sizes_.keeps_left),
        right_(right, columns, inner, sizes_.columns, sizes_.units,
               sizes_.keeps_right) {
    if (sizes_.units < units_) {
      sums_ = Workspace::of_this_thread<Slot::PartialSums>()
                  .template request<Accumulator>(sizes_.rows * sizes_.columns);
    }
  }

  // Whether the operands' values lie in the range that the scheme is right for;
  // if not the result is not to be used.
  bool run() {
    for (int64_t column = 0; column < columns_; column += sizes_.columns) {
      for (int64_t row = 0; row < rows_; row += sizes_.rows) {
        for (int64_t unit = 0; unit < units_; unit += sizes_.units) {
          multiply_block(row, column, unit);
        }
      }
    }
    finish();
    store_sums(in_registers_.sums);
    to_finish_ = in_registers_;
    finish();
    return !Scheme::kHasRange ||
           left_range_.allows_products_with(right_range_, inner_);
  }

 private:
  static constexpr int kFinishRows = 4;

  // A micro-tile's sums: where the registers are stored, and where the elements
  // belong; no rows: they are only stored.
  struct Sums {
    Accumulator* sums = nullptr;
    int64_t row = 0;
    int64_t column = 0;
    int rows = 0;
    int columns = 0;
  };

  void multiply_block(int64_t row, int64_t column, int64_t unit) {
    const int64_t rows = std::min(sizes_.rows, rows_ - row);
    const int64_t columns = std::min(sizes_.columns, columns_ - column);
    const int64_t units = std::min(sizes_.units, units_ - unit);
    left_.begin(row, rows, unit, units);
    right_.begin(column, columns, unit, units);
    pack_strips_of(right_, strips_of(columns), right_range_);
    for (int64_t i = 0; i < strips_of(rows); ++i) {
      pack_strips_of(left_, i + 1, left_range_);
      for (int64_t j = 0; j < strips_of(columns); ++j) {
        multiply_strips(row, column, unit, i, j);
      }
    }
  }

  // Packs on until so many strips of a block are there.
  template <class Blocks>
  static void pack_strips_of(Blocks& blocks, int64_t strips, Range& range) {
    while (blocks.strips() < strips) {
      blocks.step(range);
    }
  }

  // The micro-tile of the block's strips i of A and j of B.
  void multiply_strips(int64_t row, int64_t column, int64_t unit, int64_t i,
                       int64_t j) {
    const int64_t units = std::min(sizes_.units, units_ - unit);
    const bool first = unit == 0;
    const bool last = unit + units == units_;
    const auto present = [](int64_t all, int64_t block, int64_t most,
                            int64_t strip) {
      return static_cast<int>(std::min<int64_t>(
          kStrip, std::min(most, all - block) - strip * kStrip));
    };
    const int rows = present(rows_, row, sizes_.rows, i);
    const int columns = present(columns_, column, sizes_.columns, j);
    Accumulator* const sums =
        sums_ == nullptr
            ? nullptr
            : sums_ + (i * strips_of(sizes_.columns) + j) * kSumsCount;
    const Sums next =
        last ? place(row + i * kStrip, column + j * kStrip, rows, columns)
             : Sums{sums, 0, 0, 0, 0};
    const auto left = left_.packed();
    multiply_plain_tile<Scheme>(rows > kTileRows ? 2 : 1,
                                columns > kTileRows ? 2 : 1, units,
                                {
                                    left.strip(i),
                                    left.layout_of(i),
                                    right_.packed().strip(j),
                                    first ? nullptr : sums,
                                    in_registers_.sums,
                                    kSumsStride,
                                    Work{&PlainProduct::finish_some, this},
                                    ceil_div(to_finish_.rows, kFinishRows),
                                });
    finish();
    to_finish_ = in_registers_;
    in_registers_ = next;
    turn_ = last ? 1 - turn_ : turn_;
  }

  // Where a finished micro-tile of the product goes.
  Sums place(int64_t row, int64_t column, int rows, int columns) {
    Accumulator* const sums = scratch_[turn_];
    return turns_result_ ? Sums{sums, column, row, columns, rows}
                         : Sums{sums, row, column, rows, columns};
  }

  // Finishes some rows of the micro-tile that has been stored, and brings lines
  // of C that the next one takes the place of: bfloat16, 512 x 768 x 3072, 1.15
  // times as fast where C alone is in no cache, 1.02 where nothing is; squares
  // of 256 and 512 that are in L2 0.97. Past the caches it would go as fast,
  // but not be read again as soon.
  static void finish_some(void* state) {
    auto& product = *static_cast<PlainProduct*>(state);
    const Sums& tile = product.to_finish_;
    const Sums& next = product.in_registers_;
    if (product.finished_rows_ < next.rows) {
      product.store_rows_.template prefetch<kFinishRows>(
          next.row + product.finished_rows_, next.column);
    }
    if (product.turns_result_ && product.finished_rows_ == 0) {
      turn_sums<Accumulator>(tile.sums, nullptr, tile.columns, tile.rows);
    }
    product.store_rows_.template store<kFinishRows>(
        tile.sums, nullptr, tile.row, tile.column, product.finished_rows_,
        tile.rows, tile.columns);
    product.finished_rows_ += kFinishRows;
  }
  // Its other rows.
  void finish() {
    while (finished_rows_ < to_finish_.rows) {
      finish_some(this);
    }
    finished_rows_ = 0;
  }

  bool turns_result_;
  int64_t rows_;
  int64_t columns_;
  int64_t inner_;
  int64_t units_;
  BlockSizes sizes_;
  StoreRows<Accumulator, Output, Epilogue> store_rows_;
  Left left_;
  Right right_;
  Range left_range_;
  Range right_range_;
  Accumulator* sums_ = nullptr;
  // Micro-tiles whose sums the registers hold, and of which is stored.
  Sums in_registers_{scratch_[0]};
  Sums to_finish_{};
  int64_t finished_rows_ = 0;
  int64_t turn_ = 0;
  alignas(64) Accumulator scratch_[2][kSumsCount];
};

}  // namespace pkg::cpu::tiles

#endif
