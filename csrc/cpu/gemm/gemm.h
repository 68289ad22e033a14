// Matrix multiplication: C = A B with any strides of A and B and contiguous
// columns of C. The loops are those of Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication" (doi 10.1145/1356052.1356053), in the
// arrangement of BLIS (doi 10.1145/2764454): blocks of B are packed for the L3
// cache, blocks of A for the L2 cache, and a register-tiled kernel runs over
// both.
//
// Threads each multiply a rectangle of the result on their own and pack what
// they need of A and B themselves: what two of them pack twice costs less than
// waiting for one another, since packing costs about 1/M + 1/N of the work.
// The division follows from the sizes and the number of threads alone, so that
// results are the same from run to run.
//
// Operations: 2 M N K. Bytes, at the least: A and B read once and C written
// once. Above a few hundred in each dimension it is bound by the multiply-add
// units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"

namespace pkg::cpu {

// kBlockRows packed rows of kBlockValues take 240 KiB of the L2 cache,
// kBlockColumns packed columns 2 MiB of a share of L3. A panel of columns, 64
// KiB with 64-byte vectors, comes from L2 once for each strip of rows. A
// half-precision result is summed in a buffer of kBufferedRows x kBlockColumns.
//
// Zen 4, one core at 118.2 GFLOP/s at most, float32, n = 512 / 1024 / 2048,
// 2026-11-20: depth 192: 103 / 102 / 99; 256: 106 / 105 / 102; 384: 106 / 106 /
// 104; 512: 109 / 108 / 106; 768 as 512; 1024: 108 / 109 / 109. A panel in L1
// matters less than rarely reading and writing the sums in between. float64 on
// an Intel Xeon, n = 1024: depth 256 is 1.07 times as fast as 512.
inline constexpr int64_t kBlockRows = 10 * kTileRows;
inline constexpr int64_t kBlockColumns = 1024;
inline constexpr int64_t kBufferedRows = 8 * kBlockRows;
// Multiply-adds under which another thread costs more than it brings.
inline constexpr int64_t kGemmGrain = 64 * 64 * 64;

// One product: operands, sizes, and where the result goes.
template <class Input, class Output>
struct Product {
  MatrixView<Input> left;
  MatrixView<Input> right;
  int64_t rows;
  int64_t columns;
  int64_t inner;
  Output* output;  // contiguous columns
  int64_t output_stride;

  Product part(int64_t row, int64_t part_rows, int64_t column,
               int64_t part_columns) const {
    return {left.from(row, 0),
            right.from(0, column),
            part_rows,
            part_columns,
            inner,
            output + row * output_stride + column,
            output_stride};
  }
};

namespace detail {

// `total` in equal blocks of at most `most`, each a multiple of `unit`.
inline int64_t even_block(int64_t total, int64_t most, int64_t unit) {
  const int64_t blocks = std::max<int64_t>((total + most - 1) / most, 1);
  const int64_t size = (total + blocks - 1) / blocks;
  return (size + unit - 1) / unit * unit;
}

// An epilogue that is told of the place in the whole result.
template <class Epilogue>
struct EpilogueFrom {
  const Epilogue& epilogue;
  int64_t first_row;
  int64_t first_column;

  template <class V>
  void operator()(int64_t row, int64_t column, V* sums, int rows, int vectors,
                  int tail) const {
    epilogue(first_row + row, first_column + column, sums, rows, vectors, tail);
  }
};
template <>
struct EpilogueFrom<KeepSums> : KeepSums {
  EpilogueFrom(const KeepSums& /*epilogue*/, int64_t /*first_row*/,
               int64_t /*first_column*/) {}
};

// Where the left operand's rows are better read in place: their lanes are
// contiguous, need no conversion, lie in different sets of the cache, and are
// few enough that the tile's rows are no burden to the prefetcher (measured on
// Zen 4, float32: in place is 25 % faster at n = 64, 2 % at 384, and 4 % slower
// at 1024).
template <class Arithmetic, class Input>
bool reads_left_in_place(const MatrixView<Input>& left, int64_t inner) {
  using Lane = typename Arithmetic::Lane;
  return sizeof(Input) * Arithmetic::kDepth == sizeof(Lane) &&
         left.column_stride == 1 && inner % Arithmetic::kDepth == 0 &&
         inner <= kBlockValues<Arithmetic> &&
         !rows_collide(left.row_stride * static_cast<int64_t>(sizeof(Input)));
}

// How many of the right operand's columns are better read in place: whole
// registers, where it needs no conversion, and is used for one strip of rows,
// or is small and its rows do not straddle cache lines (a register that does
// costs two accesses: n = 100 then runs at 75 GFLOP/s on Zen 4, packed at 85).
template <class Arithmetic, class Input>
int64_t columns_in_place(const MatrixView<Input>& right, int64_t rows,
                         int64_t columns, int64_t inner) {
  constexpr int64_t kSmall = 65536;
  constexpr int64_t kLine = 64;
  constexpr int64_t kBytes = sizeof(Input);
  if (!std::is_same_v<Input, typename Arithmetic::Lane> ||
      right.column_stride != 1) {
    return 0;
  }
  const bool aligned = reinterpret_cast<uintptr_t>(right.data) % kLine == 0 &&
                       right.row_stride * kBytes % kLine == 0;
  if (rows <= kTileRows || (aligned && (rows <= 2 * kTileRows ||
                                        inner * columns * kBytes <= kSmall))) {
    return columns / simd::kLanes<Input> * simd::kLanes<Input>;
  }
  return 0;
}

// One thread's product of at most kBlockColumns columns, and at most
// kBufferedRows rows where the sums need a buffer.
template <class Arithmetic, class Input, class Output, class Epilogue>
void multiply_columns(const Product<Input, Output>& product, int64_t first_row,
                      int64_t first_column, const Epilogue& epilogue) {
  using Lane = typename Arithmetic::Lane;
  using Accumulator = typename Arithmetic::Accumulator;
  constexpr int kColumns = kTileColumns<Arithmetic>;
  const MatrixView<Input>& left = product.left;
  const MatrixView<Input>& right = product.right;
  const int64_t rows = product.rows;
  const int64_t columns = product.columns;
  const int64_t step = even_block(product.inner, kBlockValues<Arithmetic>,
                                  kBlockUnit<Arithmetic>);
  const int64_t block = std::min(rows, even_block(rows, kBlockRows, kTileRows));
  const bool left_in_place =
      reads_left_in_place<Arithmetic>(left, product.inner);
  const int64_t in_place =
      left_in_place
          ? columns_in_place<Arithmetic>(right, rows, columns, product.inner)
          : 0;
  if (in_place > 0 && in_place < columns) {
    multiply_columns<Arithmetic>(product.part(0, rows, 0, in_place), first_row,
                                 first_column, epilogue);
    return multiply_columns<Arithmetic>(
        product.part(0, rows, in_place, columns - in_place), first_row,
        first_column + in_place, epilogue);
  }
  const bool right_in_place = in_place > 0;
  Lane* packed_left = nullptr;
  Lane* packed_right = nullptr;
  if (!left_in_place) {
    packed_left = Workspace::of_this_thread<0>().template request<Lane>(
        block * depth_of<Arithmetic>(step));
  }
  if (!right_in_place) {
    packed_right = Workspace::of_this_thread<2>().template request<Lane>(
        packed_columns_size<Arithmetic>(columns, step));
  }
  Accumulator* corrections = nullptr;
  if constexpr (Arithmetic::kCorrected) {
    corrections =
        Workspace::of_this_thread<1>().template request<Accumulator>(block);
  }
  Accumulator* partial = nullptr;
  int64_t partial_stride = product.output_stride;
  if constexpr (std::is_same_v<Accumulator, Output>) {
    partial = product.output;
  } else if (step < product.inner) {
    partial_stride = (columns + kColumns - 1) / kColumns * kColumns;
    partial = Workspace::of_this_thread<1>().template request<Accumulator>(
        rows * partial_stride);
  }
  for (int64_t k = 0; k < product.inner; k += step) {
    const int64_t values = std::min(step, product.inner - k);
    RightPanels<Lane> panels{packed_right, kColumns,
                             kColumns * depth_of<Arithmetic>(values)};
    if constexpr (std::is_same_v<Input, Lane>) {
      if (right_in_place) {
        panels = {right.at(k, 0), right.row_stride, kColumns};
      }
    }
    if (!right_in_place) {
      pack_columns<Arithmetic>(right.from(k, 0), columns, values, packed_right);
    }
    for (int64_t row = 0; row < rows; row += block) {
      const int64_t block_rows = std::min(block, rows - row);
      const EpilogueFrom<Epilogue> place{epilogue, first_row + row,
                                         first_column};
      const StoreSums<Accumulator, Output, EpilogueFrom<Epilogue>> store{
          partial + row * partial_stride,
          partial_stride,
          k == 0,
          k + values == product.inner,
          product.output + row * product.output_stride,
          product.output_stride,
          place,
          corrections};
      const int64_t depth = depth_of<Arithmetic>(values);
      if (left_in_place) {
        if constexpr (Arithmetic::kCorrected) {
          correct_rows<Arithmetic>(left.from(row, k), block_rows, values,
                                   corrections);
        }
        multiply_panels<Arithmetic>(
            block_rows, columns, depth,
            RowsInPlace<Lane>{
                reinterpret_cast<const std::byte*>(left.at(row, k)),
                left.row_stride * static_cast<int64_t>(sizeof(Input))},
            panels, store);
      } else {
        pack_rows<Arithmetic>(left.from(row, k), block_rows, values,
                              packed_left);
        if constexpr (Arithmetic::kCorrected) {
          correct_packed_rows<Arithmetic, Input>(packed_left, block_rows, depth,
                                                 corrections);
        }
        multiply_panels<Arithmetic>(block_rows, columns, depth,
                                    packed_rows<Arithmetic>(packed_left, depth),
                                    panels, store);
      }
    }
  }
}

// One thread's product.
template <class Arithmetic, class Input, class Output, class Epilogue>
void multiply_alone(const Product<Input, Output>& product, int64_t first_row,
                    int64_t first_column, const Epilogue& epilogue) {
  constexpr bool kBuffered =
      !std::is_same_v<typename Arithmetic::Accumulator, Output>;
  const int64_t most_rows = kBuffered ? kBufferedRows : product.rows;
  const int64_t block = even_block(product.rows, most_rows, kTileRows);
  const int64_t width =
      even_block(product.columns, kBlockColumns, kTileColumns<Arithmetic>);
  for (int64_t column = 0; column < product.columns; column += width) {
    for (int64_t row = 0; row < product.rows; row += block) {
      multiply_columns<Arithmetic>(
          product.part(row, std::min(block, product.rows - row), column,
                       std::min(width, product.columns - column)),
          first_row + row, first_column + column, epilogue);
    }
  }
}

// Rectangles of the result for threads: rows x columns of them.
struct Grid {
  int64_t rows;
  int64_t columns;
};

// The grid of at most `threads` rectangles whose largest takes the least time:
// its multiply-adds, and what packing its operands costs, in multiply-adds.
inline Grid choose_grid(int64_t row_tiles, int64_t column_tiles, int tile_rows,
                        int tile_columns, int64_t threads) {
  constexpr int64_t kPackingCost = 8;  // for each packed element
  Grid best{1, 1};
  int64_t least = INT64_MAX;
  for (int64_t parts = 1; parts <= std::min(threads, row_tiles); ++parts) {
    const int64_t column_parts = std::min(threads / parts, column_tiles);
    const int64_t rows = (row_tiles + parts - 1) / parts * tile_rows;
    const int64_t columns =
        (column_tiles + column_parts - 1) / column_parts * tile_columns;
    const int64_t cost = rows * columns + kPackingCost * (rows + columns);
    if (cost < least) {
      least = cost;
      best = {parts, column_parts};
    }
  }
  return best;
}

inline int64_t useful_threads(int64_t rows, int64_t columns, int64_t inner,
                              int64_t threads) {
  // In floating point, since the product of three sizes may pass 2^63.
  const double work = static_cast<double>(rows) * static_cast<double>(columns) *
                      static_cast<double>(inner);
  return std::max<int64_t>(
      static_cast<int64_t>(std::min(static_cast<double>(threads),
                                    work / static_cast<double>(kGemmGrain))),
      1);
}

// Calls body(row, rows, column, columns) for each rectangle of a grid that
// divides the tiles of a rows x columns result among threads. Tile registers
// are ready for products of Arithmetic there; void is for no such products.
template <class Arithmetic, class Body>
void for_each_rectangle(int64_t rows, int64_t columns, int tile_rows,
                        int tile_columns, int64_t threads, const Body& body) {
  const int64_t row_tiles = (rows + tile_rows - 1) / tile_rows;
  const int64_t column_tiles = (columns + tile_columns - 1) / tile_columns;
  const Grid grid =
      choose_grid(row_tiles, column_tiles, tile_rows, tile_columns, threads);
  parallel_for(grid.rows * grid.columns, 1, [&](int64_t begin, int64_t end) {
    const TileRegisters<Arithmetic> registers;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / grid.columns;
      const int64_t j = task % grid.columns;
      const int64_t row = i * row_tiles / grid.rows * tile_rows;
      const int64_t column = j * column_tiles / grid.columns * tile_columns;
      const int64_t row_end =
          std::min((i + 1) * row_tiles / grid.rows * tile_rows, rows);
      const int64_t column_end = std::min(
          (j + 1) * column_tiles / grid.columns * tile_columns, columns);
      body(row, row_end - row, column, column_end - column);
    }
  });
}

}  // namespace detail

// Any sizes but an inner dimension of 0.
template <class Arithmetic, class Input, class Output,
          class Epilogue = KeepSums>
void multiply(const Product<Input, Output>& product, int64_t threads,
              const Epilogue& epilogue = {}) {
  if (product.rows == 0 || product.columns == 0) {
    return;
  }
  threads = detail::useful_threads(product.rows, product.columns, product.inner,
                                   threads);
  if (threads == 1) {
    const TileRegisters<Arithmetic> registers;
    detail::multiply_alone<Arithmetic>(product, 0, 0, epilogue);
    return;
  }
  detail::for_each_rectangle<Arithmetic>(
      product.rows, product.columns, kTileRows, kTileColumns<Arithmetic>,
      threads, [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
        detail::multiply_alone<Arithmetic>(
            product.part(row, rows, column, columns), row, column, epilogue);
      });
}

}  // namespace pkg::cpu
