// Matrix products by tile registers: C = A B with any strides of A and B and
// contiguous columns of C, in blocks that the L2 cache holds.
//
//   for columns of C by NC, rows by MC:       its sums stay in L2
//     for the inner dimension by KC:          A and B packed, in L2
//       for strips of 32 columns:             B's strip is in L1
//         for strips of 32 rows:              the micro-kernel
//
// In the last block of the inner dimension, which writes C, rows are outermost
// and A's strip is in L1: C is then written a few rows at a time, where columns
// outermost would write to another page with each row.
//
// What comes next is packed beside the products, some rows of a tile at a time,
// and so are the sums of the micro-tile before the last added, rounded and
// stored (Work in cpu/tiles/micro_kernel.h).
//
// Operations: 2 M N K for each product of parts. Sizes are from measurements on
// an Intel Xeon (docs/tuning/tiles.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/gemm/operands.h"
#include "cpu/runtime/workspace.h"
#include "cpu/tiles/blocking.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/operand_blocks.h"
#include "cpu/tiles/range.h"
#include "cpu/tiles/scheme.h"
#include "cpu/tiles/store_rows.h"
#include "cpu/tiles/transpose_tile.h"
#include "host/integer_math.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

// What is to become of a micro-tile's sums once the registers are stored.
template <class Accumulator>
struct Pending {
  Accumulator* stored = nullptr;
  Accumulator* sums = nullptr;  // to add them to; null: none
  bool has_work = false;        // beyond having been stored
  bool last = false;
  int64_t row = 0;
  int64_t column = 0;
  int rows = 0;
  int columns = 0;
};

// One thread's product. Where it turns the result, C's transpose is what is
// stored, and what the epilogue is told of.
template <class Scheme, class Output, class Epilogue>
class SplitProduct {
  static_assert(Scheme::kParts > 1);

 public:
  using Input = typename Scheme::Input;
  using Accumulator = typename Scheme::Accumulator;

  SplitProduct(const Strips<Input>& left, const Strips<Input>& right,
               int64_t rows, int64_t columns, int64_t inner, Output* output,
               int64_t output_stride, const Epilogue& epilogue,
               bool turns_result = false)
      : turns_result_(turns_result),
        rows_(rows),
        columns_(columns),
        inner_(inner),
        units_(units_of<Scheme>(inner)),
        sizes_(block_sizes<Scheme>(rows, columns, inner)),
        kc_(sizes_.units),
        store_rows_(output, output_stride, epilogue),
        left_(left, rows, inner, sizes_.rows, kc_, sizes_.keeps_left),
        right_(right, columns, inner, sizes_.columns, kc_, sizes_.keeps_right) {
    if (kc_ < units_) {
      sums_ = Workspace::of_this_thread<Slot::PartialSums>()
                  .template request<Accumulator>(sizes_.rows * sizes_.columns);
    }
  }

  // Whether the operands' values lie in the range that the scheme is right for;
  // if not the result is not to be used.
  bool run() {
    Block block{};
    begin(block);
    while (pieces_left() > 0) {
      pack_piece();
    }
    for (bool more = true; more;) {
      if (!is_in_range()) {
        return false;
      }
      const Block current = block;
      const PackedBlock left = left_.packed();
      const PackedBlock right = right_.packed();
      more = advance(block);
      if (more) {
        begin(block);
      }
      multiply(current, left, right);
    }
    finish(stored_);
    store_sums(pending_.stored);
    finish(pending_);
    return true;
  }

 private:
  using Right = OperandBlocks<Scheme, Side::Right>;
  static constexpr int kLanes = simd::kLanes<Accumulator>;
  static constexpr int kFinishRows = 4;
  static constexpr int64_t kFinishPieces = kStrip / kFinishRows;
  static constexpr int kFetchedRows = 2;
  static constexpr int64_t kFetches = kStrip / kFetchedRows;

  struct Block {
    int64_t row;
    int64_t column;
    int64_t unit;
  };

  int64_t rows_of(const Block& block) const {
    return std::min(sizes_.rows, rows_ - block.row);
  }
  int64_t columns_of(const Block& block) const {
    return std::min(sizes_.columns, columns_ - block.column);
  }
  int64_t units_of_block(const Block& block) const {
    return std::min(kc_, units_ - block.unit);
  }

  void begin(const Block& block) {
    const int64_t units = units_of_block(block);
    left_.begin(block.row, rows_of(block), block.unit, units);
    right_.begin(block.column, columns_of(block), block.unit, units);
  }

  bool advance(Block& block) const {
    block.unit += kc_;
    if (block.unit < units_) {
      return true;
    }
    block.unit = 0;
    block.row += sizes_.rows;
    if (block.row < rows_) {
      return true;
    }
    block.row = 0;
    block.column += sizes_.columns;
    return block.column < columns_;
  }

  // Whether it is the last of the inner dimension.
  bool is_last(const Block& block) const { return block.unit + kc_ >= units_; }

  bool is_in_range() const {
    if constexpr (!Scheme::kHasRange) {
      return true;
    } else if constexpr (std::is_same_v<Input, Half>) {
      return left_range_.is_finite() && right_range_.is_finite();
    } else {
      return left_range_.allows_products_with(right_range_, inner_);
    }
  }

  int64_t pieces_left() const { return left_.left() + right_.left(); }
  void pack_piece() {
    if (right_.left() > 0) {
      right_.step(right_range_);
    } else {
      left_.step(left_range_);
    }
  }

  void multiply(const Block& block, const PackedBlock& left,
                const PackedBlock& right) {
    const int64_t rows = rows_of(block);
    const int64_t columns = columns_of(block);
    const int64_t units = units_of_block(block);
    // The last of a block begins what the next one needs packed.
    int64_t micro_tiles = strips_of(rows) * strips_of(columns);
    const auto multiply_one = [&]<Streamed streamed>(int64_t row,
                                                     int64_t column) {
      multiply_strips<streamed>(block, row, column, units,
                                left.strip(row / kStrip),
                                right.strip(column / kStrip), micro_tiles);
      --micro_tiles;
    };
    if (is_last(block)) {
      for (int64_t row = 0; row < rows; row += kStrip) {
        for (int64_t column = 0; column < columns; column += kStrip) {
          multiply_one.template operator()<Streamed::Right>(row, column);
        }
      }
    } else {
      for (int64_t column = 0; column < columns; column += kStrip) {
        for (int64_t row = 0; row < rows; row += kStrip) {
          multiply_one.template operator()<Streamed::Left>(row, column);
        }
      }
    }
    while (pieces_left() > 0) {
      pack_piece();
    }
  }

  // One of so many micro-tiles that are left.
  template <Streamed streamed>
  void multiply_strips(const Block& block, int64_t row, int64_t column,
                       int64_t units, const std::byte* left,
                       const std::byte* right, int64_t micro_tiles) {
    const Pending next = place(block, row, column);
    plan_steps(steps_of<Scheme>(units), micro_tiles);
    fetched_ = next;
    rows_to_fetch_ = next.last ? next.rows : 0;
    multiply_micro_tile<Scheme, streamed>(
        rows_of(block) - row > kTileRows ? 2 : 1,
        columns_of(block) - column > kTileRows ? 2 : 1, units,
        {left, right,
         pending_.stored != nullptr ? pending_.stored : scratch_[0],
         kSumsStride, Work{&SplitProduct::step, this}});
    stored_ = pending_;
    pending_ = next;
  }

  // Divides what is to be done beside a micro-tile among its steps: to bring
  // the stored sums where they belong, a share of the packing, and lines of C.
  void plan_steps(int64_t steps, int64_t micro_tiles) {
    finished_ = 0;
    finish_pieces_ = stored_.has_work ? kFinishPieces : 0;
    pack_pieces_ = ceil_div(pieces_left(), micro_tiles);
    pieces_a_step_ = ceil_div(finish_pieces_ + pack_pieces_, steps);
    fetches_a_step_ = ceil_div(kFetches, steps);
  }
  static void step(void* state) {
    auto& product = *static_cast<SplitProduct*>(state);
    product.fetch_result();
    for (int64_t i = 0; i < product.pieces_a_step_; ++i) {
      if (product.finished_ < product.finish_pieces_) {
        product.finish_piece(product.stored_, product.finished_++);
      } else if (product.pack_pieces_ > 0) {
        --product.pack_pieces_;
        product.pack_piece();
      }
    }
  }

  // Some lines of C, of the micro-tile that is multiplied: its sums are brought
  // there two calls later. Operands from memory in turn as in
  // cpu/tiles/read_ahead.h: 1.07 times as fast as without where C alone is in
  // no cache, 1.03 where nothing is, 0.99 from L2. Fetched to be written: 1.04,
  // 1.02 and 0.96.
  void fetch_result() {
    for (int64_t i = 0; i < fetches_a_step_ && rows_to_fetch_ > 0; ++i) {
      store_rows_.template prefetch<kFetchedRows>(
          fetched_.row + fetched_.rows - rows_to_fetch_, fetched_.column);
      rows_to_fetch_ -= kFetchedRows;
    }
  }

  Pending<Accumulator> place(const Block& block, int64_t row, int64_t column) {
    const bool first = block.unit == 0;
    const bool last = is_last(block);
    Accumulator* const sums =
        sums_ == nullptr ? nullptr
                         : sums_ + (column / kStrip * (sizes_.rows / kStrip) +
                                    row / kStrip) *
                                       kSumsCount;
    turn_ = 1 - turn_;
    const bool in_place = first && !last;
    const auto present = [](int64_t left) {
      return static_cast<int>(std::min<int64_t>(kStrip, left));
    };
    Pending<Accumulator> tile{in_place ? sums : scratch_[turn_],
                              first ? nullptr : sums,
                              !in_place,
                              last,
                              block.row + row,
                              block.column + column,
                              present(rows_of(block) - row),
                              present(columns_of(block) - column)};
    if (last && turns_result_) {
      std::swap(tile.row, tile.column);
      std::swap(tile.rows, tile.columns);
    }
    return tile;
  }

  // Sums that are stored: added to those before, finished, brought to C. A
  // piece is some rows.
  void finish(const Pending<Accumulator>& tile) {
    for (int64_t piece = 0; tile.has_work && piece < kFinishPieces; ++piece) {
      finish_piece(tile, piece);
    }
  }

  void finish_piece(const Pending<Accumulator>& tile, int64_t piece) {
    const int64_t first = piece * kFinishRows;
    if (!tile.last) {
      Accumulator* const sums = tile.sums + first * kStrip;
      const Accumulator* const stored = tile.stored + first * kStrip;
#pragma GCC unroll 8
      for (int i = 0; i < kFinishRows * kStrip; i += kLanes) {
        simd::store(sums + i, simd::load(sums + i) + simd::load(stored + i));
      }
      return;
    }
    const Accumulator* added = tile.sums;
    if (turns_result_) {
      if (piece == 0) {
        turn_sums<Accumulator>(tile.stored, added, tile.columns, tile.rows);
      }
      added = nullptr;
    }
    store_rows_.template store<kFinishRows>(tile.stored, added, tile.row,
                                            tile.column, first, tile.rows,
                                            tile.columns);
  }

  bool turns_result_;
  int64_t rows_;
  int64_t columns_;
  int64_t inner_;
  int64_t units_;
  BlockSizes sizes_;
  int64_t kc_;
  StoreRows<Accumulator, Output, Epilogue> store_rows_;
  OperandBlocks<Scheme, Side::Left> left_;
  Right right_;
  Range left_range_;
  Range right_range_;
  Accumulator* sums_ = nullptr;
  Pending<Accumulator> pending_{};  // in the registers
  Pending<Accumulator> stored_{};
  Pending<Accumulator> fetched_{};
  int rows_to_fetch_ = 0;
  int64_t fetches_a_step_ = 0;
  int64_t finished_ = 0;
  int64_t finish_pieces_ = 0;
  int64_t pack_pieces_ = 0;
  int64_t pieces_a_step_ = 0;
  int turn_ = 0;
  alignas(64) Accumulator scratch_[2][kSumsCount];
};

}  // namespace pkg::cpu::tiles

#endif
