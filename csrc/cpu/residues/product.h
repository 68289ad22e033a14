// One thread's product of float64 by residues, in blocks that the caches hold.
//
//   for rows of A by MC:                  all planes packed, in memory
//     for columns of B by NC:
//       for the inner dimension by KC:    all planes packed, in memory
//         whether leading bits suffice, of each micro-tile
//         for moduli:                     B's plane is in L2
//           for strips of 32 rows:        A's is in L1
//             for strips of 32 columns:   the micro-kernel of bytes, and the
//                                         remainders of its sums
//       the numbers that have these remainders
//
// Operations: 2 M N K for each of 16 products of bytes. Sizes are from
// measurements on an Intel Xeon (docs/tuning/residues.md).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/gemm/grid.h"
#include "cpu/gemm/operands.h"
#include "cpu/residues/pack.h"
#include "cpu/residues/results.h"
#include "cpu/residues/scheme.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/lines.h"
#include "cpu/tiles/plain_kernel.h"
#include "host/integer_math.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::residues {

// MC, NC, and KC in units. B is packed anew for each block of rows, which takes
// as long as multiplying by 200 of them: so packed rows may take as much memory
// as the operands and the result do.
struct BlockSizes {
  int64_t rows;
  int64_t columns;
  int64_t units;
};
inline BlockSizes block_sizes(int64_t rows, int64_t columns, int64_t inner) {
  using cpu::detail::even_block;
  constexpr int64_t kLeftBytes = int64_t{48} << 20;
  constexpr int64_t kMostRows = 2048;
  constexpr int64_t kMostColumns = 512;
  const int64_t units = tiles::units_of<Bytes>(inner);
  const int64_t operands = int64_t{sizeof(double)} *
                           (rows * inner + inner * columns + rows * columns);
  const int64_t mc = std::clamp<int64_t>(
      std::max(kLeftBytes, operands) / (kPlanes * units * kValues), kStrip,
      kMostRows);
  return {even_block(rows, mc, kStrip),
          even_block(columns, kMostColumns, kStrip),
          even_block(units, kMostValues / kValues, 1)};
}

template <class Epilogue>
class ResidueProduct {
 public:
  ResidueProduct(const MatrixView<double>& left,
                 const MatrixView<double>& right, int64_t rows, int64_t columns,
                 int64_t inner, double* output, int64_t output_stride,
                 const Epilogue& epilogue)
      : left_(left),
        right_(right),
        rows_(rows),
        columns_(columns),
        inner_(inner),
        sizes_(block_sizes(rows, columns, inner)),
        blocks_(ceil_div(tiles::units_of<Bytes>(inner), sizes_.units)),
        output_(output),
        output_stride_(output_stride),
        epilogue_(epilogue) {
    request_memory();
  }

  // Whether the operands' values are numbers that have remainders, and leading
  // bits suffice for at least half of the first elements; if not the result is
  // not to be used.
  bool run() {
    if (!is_worth_while()) {
      return false;
    }
    for (int64_t row = 0; row < rows_; row += sizes_.rows) {
      const int64_t packed = row == 0 ? first_rows() : 0;
      if (!pack_left(row, packed, rows_of(row))) {
        return false;
      }
      for (int64_t column = 0; column < columns_; column += sizes_.columns) {
        if (!multiply_block(row, column)) {
          return false;
        }
      }
    }
    return true;
  }

  // Calls body(row, rows, column, columns) for each part of the result that is
  // not made.
  template <class Body>
  void for_each_rest(const Body& body) const {
    const int64_t rows = tiles::strips_of(rows_);
    const int64_t columns = tiles::strips_of(columns_);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        if (!lacks(i, j)) {
          continue;
        }
        // As many columns as lack something, then as many rows of them.
        int64_t j_end = j;
        while (j_end < columns && lacks(i, j_end)) {
          ++j_end;
        }
        int64_t i_end = i;
        while (i_end < rows && all_lack(i_end, j, j_end)) {
          std::fill_n(&lacks(i_end, j), j_end - j, uint8_t{0});
          ++i_end;
        }
        body(i * kStrip, std::min(i_end * kStrip, rows_) - i * kStrip,
             j * kStrip, std::min(j_end * kStrip, columns_) - j * kStrip);
      }
    }
  }

 private:
  static constexpr int kLanes = simd::kLanes<double>;
  static constexpr int kVectors = kStrip / kLanes;
  static constexpr int64_t kPlanePadding = 5 * kCacheLine;

  // A block of the result and of the inner dimension; of so many rows.
  struct Block {
    int64_t row;
    int64_t rows;
    int64_t column;
    int64_t inner;
  };

  void request_memory() {
    const int64_t rows = sizes_.rows / kStrip;
    const int64_t columns = sizes_.columns / kStrip;
    const int64_t unit_bytes = kPlanes * kUnitBytes;
    std::byte* memory = Workspace::of_this_thread<Slot::PackedLeft>()
                            .template request<std::byte>(
                                rows * (int64_t{sizeof(Scales)} +
                                        blocks_ * sizes_.units * unit_bytes) +
                                blocks_ * kPlanes * kPlanePadding);
    left_scales_ = reinterpret_cast<Scales*>(memory);
    packed_left_ = memory + rows * int64_t{sizeof(Scales)};
    memory =
        Workspace::of_this_thread<Slot::PackedRight>()
            .template request<std::byte>(columns * (int64_t{sizeof(Scales)} +
                                                    sizes_.units * unit_bytes) +
                                         kPlanes * kPlanePadding);
    right_scales_ = reinterpret_cast<Scales*>(memory);
    packed_right_ = memory + columns * int64_t{sizeof(Scales)};
    remainders_ =
        Workspace::of_this_thread<Slot::PartialSums>().template request<int8_t>(
            kModuli * remainder_plane());
    const int64_t micro_tiles =
        tiles::strips_of(rows_) * tiles::strips_of(columns_);
    lacks_ = Workspace::of_this_thread<Slot::MicroTileFlags>()
                 .template request<uint8_t>(micro_tiles);
    std::fill_n(lacks_, micro_tiles, uint8_t{1});
  }

  int64_t rows_of(int64_t row) const {
    return std::min(sizes_.rows, rows_ - row);
  }
  int64_t columns_of(int64_t column) const {
    return std::min(sizes_.columns, columns_ - column);
  }
  int64_t values_of(int64_t block) const {
    return std::min(sizes_.units * kValues,
                    inner_ - block * sizes_.units * kValues);
  }

  // Of a micro-tile of the whole result: 1 as long as it is not known that its
  // elements' leading bits suffice.
  uint8_t& lacks(int64_t i, int64_t j) const {
    return lacks_[i * tiles::strips_of(columns_) + j];
  }
  // Of a micro-tile of a block.
  uint8_t& lacks(const Block& block, int64_t i, int64_t j) const {
    return lacks(block.row / kStrip + i, block.column / kStrip + j);
  }
  bool all_lack(int64_t i, int64_t j, int64_t j_end) const {
    return std::all_of(&lacks(i, j), &lacks(i, j) + (j_end - j),
                       [](uint8_t each) { return each != 0; });
  }

  static Lines<double> lines_of(const MatrixView<double>& lines) {
    return {lines.data, lines.row_stride, lines.column_stride};
  }

  int64_t strip_bytes(int64_t block) const {
    return tiles::units_of<Bytes>(values_of(block)) * kUnitBytes;
  }
  // From a plane of so many lines of a block to the next: rows of all are
  // written in turn, and shall not meet in the same sets of the caches.
  int64_t plane_bytes(int64_t lines, int64_t block) const {
    return tiles::strips_of(lines) * strip_bytes(block) + kPlanePadding;
  }
  std::byte* left_block(int64_t block) const {
    return packed_left_ +
           block * kPlanes *
               (sizes_.rows / kStrip * sizes_.units * kUnitBytes +
                kPlanePadding);
  }

  // Lines whose scales are found and that are packed then, while they are in
  // L2: those that lie side by side have to be read together.
  static int64_t lines_together(const MatrixView<double>& lines) {
    return lines.row_stride == 1 ? kLinesTogether : kStrip;
  }

  // Packs rows of a block from `first` on, the first of a strip, to `end`.
  bool pack_left(int64_t row, int64_t first, int64_t end) {
    const int64_t together = lines_together(left_);
    for (int64_t line = first; line < end; line += together) {
      const MatrixView<double> lines = left_.from(row + line, 0);
      const int64_t count = std::min(together, end - line);
      const int64_t strip = line / kStrip;
      if (!find_scales(lines_of(lines), count, inner_, left_scales_ + strip)) {
        return false;
      }
      for (int64_t block = 0; block < blocks_; ++block) {
        pack_lines<Side::Left>(
            lines_of(lines.from(0, block * sizes_.units * kValues)), count,
            values_of(block), left_scales_ + strip,
            left_block(block) + strip * strip_bytes(block),
            plane_bytes(rows_of(row), block));
      }
    }
    return true;
  }

  // Finds the scales of a block of columns, and packs the first block of the
  // inner dimension.
  bool begin_right(int64_t column) {
    const int64_t columns = columns_of(column);
    const int64_t together = lines_together(right_.transposed());
    for (int64_t line = 0; line < columns; line += together) {
      const int64_t count = std::min(together, columns - line);
      if (!find_scales(lines_of(right_.from(0, column + line).transposed()),
                       count, inner_, right_scales_ + line / kStrip)) {
        return false;
      }
      pack_right(column, line, count, 0);
    }
    return true;
  }
  // Packs columns of a block from `line` on.
  void pack_right(int64_t column, int64_t line, int64_t count, int64_t block) {
    pack_lines<Side::Right>(
        lines_of(right_.from(block * sizes_.units * kValues, column + line)
                     .transposed()),
        count, values_of(block), right_scales_ + line / kStrip,
        packed_right_ + line / kStrip * strip_bytes(block),
        plane_bytes(columns_of(column), block));
  }

  // Of the first rows and the first block of columns, before the others are
  // packed: what does not suffice there will not elsewhere, as a rule.
  int64_t first_rows() const {
    constexpr int64_t kFirstRows = 64;
    return std::min(kFirstRows, rows_of(0));
  }
  bool is_worth_while() {
    if (!pack_left(0, 0, first_rows()) || !begin_right(0)) {
      return false;
    }
    const Block first{0, first_rows(), 0, 0};
    prove(first);
    int64_t all = 0;
    int64_t lacking = 0;
    for_each_micro_tile(first, [&](int64_t i, int64_t j) {
      ++all;
      lacking += lacks(first, i, j);
    });
    return 2 * lacking <= all;
  }

  bool multiply_block(int64_t row, int64_t column) {
    const bool is_first = row + column == 0;
    if (!is_first && !begin_right(column)) {
      return false;
    }
    Block place{row, rows_of(row), column, 0};
    for (int64_t block = 0; block < blocks_; ++block) {
      place.inner = block;
      if (block > 0) {
        pack_right(column, 0, columns_of(column), block);
      }
      prove(place);
      for (int plane = 0; plane < kModuli; ++plane) {
        multiply_plane(
            place, plane, 0, tiles::units_of<Bytes>(values_of(block)),
            [&](int64_t i, int64_t j) {
              return blocks_ > 1 || lacks(place, i, j) == 0;
            },
            [&](int64_t i, int64_t j, const int32_t* sums, int64_t piece) {
              store_remainders(sums, plane, block > 0, piece,
                               remainders_of(i, j) + plane * remainder_plane());
            });
      }
    }
    for_each_micro_tile(place, [&](int64_t i, int64_t j) {
      if (lacks(place, i, j) == 0) {
        finish(row, column, i, j);
      }
    });
    return true;
  }

  template <class Body>
  void for_each_micro_tile(const Block& block, const Body& body) const {
    const int64_t rows = tiles::strips_of(block.rows);
    const int64_t columns = tiles::strips_of(columns_of(block.column));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        body(i, j);
      }
    }
  }

  int8_t* remainders_of(int64_t i, int64_t j) const {
    return remainders_ + (i * (sizes_.columns / kStrip) + j) * kTileElements;
  }
  // From those of a modulus to the next one's.
  int64_t remainder_plane() const {
    return sizes_.rows * sizes_.columns + kPlanePadding;
  }

  // What goes on beside a micro-tile's products: the strip of A that is next
  // comes into L2, where the processor's prefetchers are too late, and the sums
  // of the micro-tile before are handled, a piece at a time.
  template <class Handle>
  struct Beside {
    const std::byte* ahead;
    int64_t lines_a_step;
    const Handle& handle;
    int64_t pieces_a_step;
    const int32_t* sums;  // of the call before
    int64_t i = 0;
    int64_t j = 0;
    int64_t piece = kPieces;

    static void step(void* state) {
      auto& beside = *static_cast<Beside*>(state);
      prefetch_bytes<PrefetchTo::L2>(beside.ahead,
                                     beside.lines_a_step * kCacheLine);
      beside.ahead += beside.lines_a_step * kCacheLine;
      beside.handle_pieces(beside.pieces_a_step);
    }
    void handle_pieces(int64_t count) {
      const int64_t end = std::min(piece + count, kPieces);
      for (; piece < end; ++piece) {
        handle(i, j, sums, piece);
      }
    }
  };

  // A plane's product over some units: handle(i, j, sums, piece) for the pieces
  // of each micro-tile that is wanted(i, j).
  template <class Wanted, class Handle>
  void multiply_plane(const Block& block, int plane, int64_t unit,
                      int64_t units, const Wanted& wanted,
                      const Handle& handle) {
    const int64_t strip_bytes = this->strip_bytes(block.inner);
    const std::byte* const left =
        left_block(block.inner) +
        plane * plane_bytes(rows_of(block.row), block.inner) +
        unit * kUnitBytes;
    const std::byte* const right =
        packed_right_ +
        plane * plane_bytes(columns_of(block.column), block.inner) +
        unit * kUnitBytes;
    const int64_t steps = std::max<int64_t>(units - 1, 1);
    const int64_t calls = tiles::strips_of(columns_of(block.column));
    const int64_t lines = units * kUnitBytes / kCacheLine;
    const int64_t lines_a_step = (lines + steps * calls - 1) / (steps * calls);
    alignas(64) int32_t sums[kTileElements];
    Beside<Handle> beside{nullptr, lines_a_step, handle,
                          ceil_div(kPieces, steps), sums};
    for_each_micro_tile(block, [&](int64_t i, int64_t j) {
      if (!wanted(i, j)) {
        return;
      }
      beside.ahead =
          left + (i + 1) * strip_bytes + j * steps * lines_a_step * kCacheLine;
      // The first step comes after the sums of the call before are stored.
      tiles::multiply_plain_tile<Bytes>(2, 2, units,
                                        {left + i * strip_bytes,
                                         {},
                                         right + j * strip_bytes,
                                         nullptr,
                                         sums,
                                         kStrip,
                                         {&Beside<Handle>::step, &beside},
                                         steps});
      beside.handle_pieces(kPieces);
      beside.i = i;
      beside.j = j;
      beside.piece = 0;
    });
    tiles::store_sums(sums);
    beside.handle_pieces(kPieces);
  }

  // Looks whether the elements' leading bits suffice, first over some of the
  // block, then over the rest.
  void prove(const Block& block) {
    constexpr int64_t kSomeUnits = 6;
    const int64_t units = tiles::units_of<Bytes>(values_of(block.inner));
    const int64_t some = std::min(kSomeUnits, units);
    prove(block, 0, some);
    if (some < units) {
      prove(block, some, units - some);
    }
  }
  void prove(const Block& block, int64_t unit, int64_t units) {
    multiply_plane(
        block, kModuli, unit, units,
        [&](int64_t i, int64_t j) { return lacks(block, i, j) != 0; },
        [&](int64_t i, int64_t j, const int32_t* sums, int64_t piece) {
          if (piece == 0) {
            lacks(block, i, j) =
                suffice(sums, left_scales_[i], right_scales_[j]) ? 0 : 1;
          }
        });
  }

  static bool suffice(const int32_t* sums, const Scales& left,
                      const Scales& right) {
    using Floats = simd::Vector<float>;
    constexpr int kWords = simd::kLanes<float>;
    simd::Vector<int32_t> lack{};
    for (int r = 0; r < kStrip; ++r) {
      for (int c = 0; c < kStrip; c += kWords) {
        const Floats needed = left.need[r] * simd::load(right.unit + c) +
                              left.unit[r] * simd::load(right.need + c);
        const auto sum = __builtin_convertvector(
            simd::load(sums + int64_t{r} * kStrip + c), Floats);
        lack |= sum < needed;
      }
    }
    int32_t any = 0;
    for (int i = 0; i < kWords; ++i) {
      any |= lack[i];
    }
    return any == 0;
  }

  // The numbers of a micro-tile's remainders, brought to the result.
  void finish(int64_t first_row, int64_t first_column, int64_t i, int64_t j) {
    const int64_t row = first_row + i * kStrip;
    const int64_t column = first_column + j * kStrip;
    const int64_t rows = std::min<int64_t>(kStrip, rows_ - row);
    const int64_t columns = std::min<int64_t>(kStrip, columns_ - column);
    const int vectors = static_cast<int>(ceil_div(columns, kLanes));
    const int tail = static_cast<int>(columns - (vectors - 1) * kLanes);
    const int8_t* bytes = remainders_of(i, j);
    double* to = output_ + row * output_stride_ + column;
    for (int64_t r = 0; r < rows; ++r) {
      simd::Vector<double> values[kVectors];
      numbers_of(bytes + r * kStrip, remainder_plane(), values);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        values[v] = values[v] * left_scales_[i].from_integer[r] *
                    simd::load(right_scales_[j].from_integer + v * kLanes);
      }
      epilogue_(row + r, column, values, 1, vectors, tail);
      for (int v = 0; v < vectors; ++v) {
        simd::store_up_to(to + r * output_stride_ + v * kLanes, values[v],
                          columns - v * kLanes);
      }
    }
  }

  MatrixView<double> left_;
  MatrixView<double> right_;
  int64_t rows_;
  int64_t columns_;
  int64_t inner_;
  BlockSizes sizes_;
  int64_t blocks_;  // of the inner dimension
  double* output_;
  int64_t output_stride_;
  const Epilogue& epilogue_;
  Scales* left_scales_ = nullptr;
  std::byte* packed_left_ = nullptr;
  Scales* right_scales_ = nullptr;
  std::byte* packed_right_ = nullptr;
  int8_t* remainders_ = nullptr;
  uint8_t* lacks_ = nullptr;
};

}  // namespace pkg::cpu::residues

#endif
