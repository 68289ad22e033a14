// Matrix products by tile registers: C = A B with any strides of A and B and
// contiguous columns of C, in blocks that the L2 cache holds.
//
//   for columns of C by NC, rows by MC:       its sums stay in L2
//     for the inner dimension by KC:          A and B packed, in L2
//       for pairs of strips of 32 columns:    B's strips are in L1
//         for strips of 32 rows, each strip:  the micro-kernel
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

#include "cpu/gemm/grid.h"
#include "cpu/gemm/operands.h"
#include "cpu/gemm/store_sums.h"
#include "cpu/runtime/workspace.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/packing.h"
#include "cpu/tiles/range.h"
#include "cpu/tiles/scheme.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::tiles {

// MC, NC and KC, the last in units, and whether all blocks of the inner
// dimension stay packed: of B while rows go by, of A while columns do.
struct BlockSizes {
  int64_t rows;
  int64_t columns;
  int64_t units;
  bool keeps_left;
  bool keeps_right;
};

// Right: the class of blocks of B.
template <class Scheme, class Right>
BlockSizes block_sizes(int64_t rows, int64_t columns, int64_t inner) {
  using cpu::detail::even_block;
  // Packed blocks that stay, beside the sums and what is packed meanwhile.
  constexpr int64_t kKeptBytes = int64_t{1} << 20;
  constexpr int64_t kMostBlocks = 32;
  constexpr int64_t kMost = 512;
  constexpr int64_t kMostRowsBesideKept = 64;
  const int64_t units = units_of<Scheme>(inner);
  const int64_t kc =
      even_block(units, block_units<Scheme>(inner), Right::kUnitsTogether);
  const int64_t blocks = (units + kc - 1) / kc;
  const auto fits = [&](int64_t lines) {
    return blocks > 1 && blocks <= kMostBlocks &&
           packed_bytes<Scheme>(lines, units) <= kKeptBytes;
  };
  const int64_t nc = even_block(columns, kMost, kStrip);
  const bool keeps_right =
      Right::kMayStay && rows > kMostRowsBesideKept && fits(nc);
  const int64_t mc =
      even_block(rows, keeps_right ? kMostRowsBesideKept : kMost, kStrip);
  const bool keeps_left = columns > nc && rows <= mc && fits(mc);
  return {mc, nc, kc, keeps_left, keeps_right};
}

// A packed block: strip after strip.
struct PackedBlock {
  const std::byte* data;
  int64_t strip_bytes;
};

// Packs blocks of one operand. All blocks of the inner dimension stay, each in
// a buffer of its own, or they take turns in two: either way the next block is
// packed while the one before is in use.
template <class Scheme, Side side>
class OperandBlocks {
 public:
  using Input = typename Scheme::Input;
  using Source = Strips<Input>;

  // Whether all blocks of the inner dimension may stay packed, and of how many
  // units a block is a multiple.
  static constexpr bool kMayStay = true;
  static constexpr int kUnitsTogether = 1;
  static constexpr bool kInPlace = false;

  // Of blocks of up to `lines` lines and `units` units.
  OperandBlocks(const Source& source, int64_t total_lines, int64_t inner,
                int64_t lines, int64_t units, bool keeps)
      : source_(source),
        total_lines_(total_lines),
        inner_(inner),
        most_units_(units),
        keeps_(keeps),
        buffer_bytes_(packed_bytes<Scheme>(lines, units)) {
    constexpr Slot kSlot =
        side == Side::Left ? Slot::PackedLeft : Slot::PackedRight;
    const int64_t count =
        keeps ? (units_of<Scheme>(inner) + units - 1) / units : 2;
    buffers_ = Workspace::of_this_thread<kSlot>().template request<std::byte>(
        count * buffer_bytes_);
  }

  // Begins a block that pack() is then called for; a block that is there
  // already stays.
  void begin(int64_t line, int64_t lines, int64_t unit, int64_t units) {
    const bool same_lines = line == line_;
    const bool is_there =
        same_lines && (keeps_ ? unit < next_unit_ : unit == unit_);
    if (!same_lines) {
      next_unit_ = 0;
    }
    line_ = line;
    unit_ = unit;
    units_ = units;
    if (keeps_) {
      buffer_ = unit / most_units_;
    }
    if (is_there) {
      return;
    }
    if (!keeps_) {
      buffer_ = 1 - buffer_;
    }
    next_unit_ = unit + units;
    count_ = (lines + kTileRows - 1) / kTileRows * units;
    done_ = 0;
    end_ = line + lines;
    strip_ = line;
    at_unit_ = 0;
    tile_ = 0;
    to_ = buffers_ + buffer_ * buffer_bytes_;
  }

  PackedBlock packed() const {
    return {buffers_ + buffer_ * buffer_bytes_, units_ * kUnitBytes<Scheme>};
  }

  // Pieces that are to be packed.
  int64_t left() const {
    return (count_ - done_) * TilePacker<Scheme, side>::pieces(source_.first) -
           (is_packing_ ? packer_.done() : 0);
  }
  // Packs the next piece.
  void step(Range& range) {
    if (!is_packing_) {
      begin_tile();
      is_packing_ = true;
    }
    if (packer_.step(range)) {
      advance_tile();
      is_packing_ = false;
    }
  }

 private:
  // Two tiles of a strip's unit, then the next unit's.
  void begin_tile() {
    const int64_t line = strip_ + tile_;
    const int64_t value = (unit_ + at_unit_) * Scheme::kValues;
    const Lines<Input>& lines = source_.first;
    packer_.begin({lines.data + strip_ / kStrip * source_.stride +
                       tile_ * lines.line_stride + value * lines.value_stride,
                   lines.line_stride, lines.value_stride},
                  std::min<int64_t>(kTileRows, total_lines_ - line),
                  std::min<int64_t>(Scheme::kValues, inner_ - value),
                  to_ + tile_ / kTileRows * kTileStep<side>);
  }
  void advance_tile() {
    ++done_;
    tile_ += kTileRows;
    if (tile_ < kStrip && strip_ + tile_ < end_) {
      return;
    }
    tile_ = 0;
    to_ += kUnitBytes<Scheme>;
    if (++at_unit_ == units_) {
      at_unit_ = 0;
      strip_ += kStrip;
    }
  }

  Source source_;
  int64_t total_lines_;
  int64_t inner_;
  int64_t most_units_;
  bool keeps_;
  int64_t buffer_bytes_;
  std::byte* buffers_;
  int64_t buffer_ = 0;
  int64_t line_ = -1;
  int64_t unit_ = -1;
  int64_t units_ = 0;
  int64_t next_unit_ = 0;  // of the first block that is not there
  // Tiles of the block, and those that are packed; then where the next one is:
  // its strip's first line and how far it is from there, its unit in the block.
  int64_t count_ = 0;
  int64_t done_ = 0;
  int64_t end_ = 0;
  int64_t strip_ = 0;
  int64_t tile_ = 0;
  int64_t at_unit_ = 0;
  std::byte* to_ = nullptr;
  TilePacker<Scheme, side> packer_;
  bool is_packing_ = false;
};

// What is to become of a micro-tile's sums once the registers are stored.
template <class Accumulator>
struct Pending {
  Accumulator* stored = nullptr;
  Accumulator* sums = nullptr;   // to add them to; null: none
  Accumulator* begin = nullptr;  // that the registers began with
  bool has_work = false;         // beyond having been stored
  bool last = false;
  int64_t row = 0;
  int64_t column = 0;
  int rows = 0;
  int columns = 0;
};

// One thread's product. Right: the blocks of B, packed here or otherwise. An
// epilogue that has kStores has stored the sums itself.
template <class Scheme, class Output, class Epilogue,
          class Right = OperandBlocks<Scheme, Side::Right>>
class Product {
 public:
  using Input = typename Scheme::Input;
  using Accumulator = typename Scheme::Accumulator;

  Product(const MatrixView<Input>& left, const typename Right::Source& right,
          int64_t rows, int64_t columns, int64_t inner, Output* output,
          int64_t output_stride, const Epilogue& epilogue)
      : rows_(rows),
        columns_(columns),
        inner_(inner),
        units_(units_of<Scheme>(inner)),
        sizes_(block_sizes<Scheme, Right>(rows, columns, inner)),
        kc_(sizes_.units),
        output_(output),
        output_stride_(output_stride),
        epilogue_(epilogue),
        left_(strips_of(left.data, left.row_stride, left.column_stride), rows,
              inner, sizes_.rows, kc_, sizes_.keeps_left),
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
  static constexpr int kLanes = simd::kLanes<Accumulator>;
  static constexpr int kFinishRows = 4;
  static constexpr int64_t kFinishPieces = kStrip / kFinishRows;

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
    // A strip of rows is multiplied by several of columns while it is in L1.
    // Not where those of columns were not just packed: bfloat16, 512 rows, 7 %
    // slower.
    constexpr int64_t kGroup =
        (Right::kInPlace ? 1 : Scheme::kGroupedStrips) * int64_t{kStrip};
    for (int64_t group = 0; group < columns; group += kGroup) {
      const int64_t group_end = std::min(columns, group + kGroup);
      for (int64_t row = 0; row < rows; row += kStrip) {
        for (int64_t column = group; column < group_end; column += kStrip) {
          multiply_strips(block, row, column, units,
                          left.data + row / kStrip * left.strip_bytes,
                          right.data + column / kStrip * right.strip_bytes,
                          micro_tiles);
          --micro_tiles;
        }
      }
    }
    while (pieces_left() > 0) {
      pack_piece();
    }
  }

  // One of so many micro-tiles that are left.
  void multiply_strips(const Block& block, int64_t row, int64_t column,
                       int64_t units, const std::byte* left,
                       const std::byte* right, int64_t micro_tiles) {
    const Pending next = place(block, row, column);
    plan_steps(Scheme::kWorksBeside ? steps_of<Scheme>(units) : 1, micro_tiles);
    multiply_micro_tile<Scheme>(
        next.rows > kTileRows ? 2 : 1, next.columns > kTileRows ? 2 : 1, units,
        {left, right, next.begin,
         pending_.stored != nullptr ? pending_.stored : scratch_[0],
         kSumsStride, Work{&Product::step, this}});
    if (!Scheme::kWorksBeside) {
      step(this);
    }
    stored_ = pending_;
    pending_ = next;
  }

  // Divides what is to be done beside a micro-tile among its steps: to bring
  // the stored sums where they belong, and a share of the packing.
  void plan_steps(int64_t steps, int64_t micro_tiles) {
    finished_ = 0;
    finish_pieces_ = stored_.has_work ? kFinishPieces : 0;
    pack_pieces_ = (pieces_left() + micro_tiles - 1) / micro_tiles;
    pieces_a_step_ = (finish_pieces_ + pack_pieces_ + steps - 1) / steps;
  }
  static void step(void* state) {
    auto& product = *static_cast<Product*>(state);
    for (int64_t i = 0; i < product.pieces_a_step_; ++i) {
      if (product.finished_ < product.finish_pieces_) {
        product.finish_piece(product.stored_, product.finished_++);
      } else if (product.pack_pieces_ > 0) {
        --product.pack_pieces_;
        product.pack_piece();
      }
    }
  }

  Pending<Accumulator> place(const Block& block, int64_t row, int64_t column) {
    const bool first = block.unit == 0;
    const bool last = block.unit + kc_ >= units_;
    Accumulator* const sums =
        sums_ == nullptr ? nullptr
                         : sums_ + (column / kStrip * (sizes_.rows / kStrip) +
                                    row / kStrip) *
                                       kSumsCount;
    turn_ = 1 - turn_;
    const bool in_place = !last && (first || Scheme::kAddsByTiles);
    return {in_place ? sums : scratch_[turn_],
            first || Scheme::kAddsByTiles ? nullptr : sums,
            first || !Scheme::kAddsByTiles ? nullptr : sums,
            !in_place,
            last,
            block.row + row,
            block.column + column,
            static_cast<int>(std::min<int64_t>(kStrip, rows_of(block) - row)),
            static_cast<int>(
                std::min<int64_t>(kStrip, columns_of(block) - column))};
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
    const int rows =
        static_cast<int>(std::min<int64_t>(kFinishRows, tile.rows - first));
    if (rows == kFinishRows && tile.columns == kStrip) {
      write<2>(tile, first, kFinishRows, kLanes);
    } else if (rows > 0 && tile.columns > kLanes) {
      write<2>(tile, first, rows, tile.columns - kLanes);
    } else if (rows > 0) {
      write<1>(tile, first, rows, tile.columns);
    }
  }

  template <int kVectors>
  [[gnu::always_inline]] void write(const Pending<Accumulator>& tile,
                                    int64_t first, int rows, int tail) {
    simd::Vector<Accumulator> values[kFinishRows * kVectors];
    const Accumulator* const sums =
        tile.sums == nullptr ? nullptr : tile.sums + first * kStrip;
    const Accumulator* const stored = tile.stored + first * kStrip;
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = r * kStrip + v * kLanes;
        auto value = simd::load(stored + at);
        if (sums != nullptr) {
          value += simd::load(sums + at);
        }
        values[r * kVectors + v] = value;
      }
    }
    epilogue_(tile.row + first, tile.column, values, rows, kVectors, tail);
    if constexpr (requires { Epilogue::kStores; }) {
      return;
    }
    Output* to = output_ + (tile.row + first) * output_stride_ + tile.column;
    for (int r = 0; r < rows; ++r, to += output_stride_) {
      for (int v = 0; v < kVectors; ++v) {
        if (v < kVectors - 1 || tail == kLanes) {
          simd::store(to + v * kLanes, values[r * kVectors + v]);
        } else {
          simd::store_partial(to + v * kLanes, values[r * kVectors + v], tail);
        }
      }
    }
  }

  int64_t rows_;
  int64_t columns_;
  int64_t inner_;
  int64_t units_;
  BlockSizes sizes_;
  int64_t kc_;
  Output* output_;
  int64_t output_stride_;
  const Epilogue& epilogue_;
  OperandBlocks<Scheme, Side::Left> left_;
  Right right_;
  Range left_range_;
  Range right_range_;
  Accumulator* sums_ = nullptr;
  Pending<Accumulator> pending_{};  // in the registers
  Pending<Accumulator> stored_{};
  int64_t finished_ = 0;
  int64_t finish_pieces_ = 0;
  int64_t pack_pieces_ = 0;
  int64_t pieces_a_step_ = 0;
  int turn_ = 0;
  alignas(64) Accumulator scratch_[2][kSumsCount];
};

}  // namespace pkg::cpu::tiles

#endif
