// How a product is divided: equal blocks, and rectangles of the result for
// threads. The division follows from the sizes and the number of threads alone,
// so that results are the same from run to run.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/runtime/parallel.h"
#include "cpu/simd/tile_registers.h"
#include "host/integer_math.h"

namespace pkg::cpu::detail {

// `total` in equal blocks of up to `most`, each a multiple of `unit`.
inline int64_t even_block(int64_t total, int64_t most, int64_t unit) {
  const int64_t blocks = std::max<int64_t>(ceil_div(total, most), 1);
  const int64_t size = ceil_div(total, blocks);
  return round_up(size, unit);
}

// Rectangles of the result for threads: rows x columns of them.
struct Grid {
  int64_t rows;
  int64_t columns;
};

// The grid of at most `threads` rectangles whose largest takes the least time:
// its multiply-adds, and what packing its operands costs, in multiply-adds.
inline Grid choose_grid(int64_t row_units, int64_t column_units, int unit_rows,
                        int unit_columns, int64_t threads) {
  constexpr int64_t kPackingCost = 8;  // for each packed element
  Grid best{1, 1};
  int64_t least = INT64_MAX;
  for (int64_t parts = 1; parts <= std::min(threads, row_units); ++parts) {
    const int64_t column_parts = std::min(threads / parts, column_units);
    const int64_t rows = ceil_div(row_units, parts) * unit_rows;
    const int64_t columns = ceil_div(column_units, column_parts) * unit_columns;
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
  return std::max<int64_t>(static_cast<int64_t>(std::min(
                               static_cast<double>(threads),
                               work / static_cast<double>(kMultiplyAddGrain))),
                           1);
}

// Calls body(row, rows, column, columns) for each rectangle of a grid that
// divides a rows x columns result among threads, in units of unit_rows x
// unit_columns, a micro-tile or more. Tile registers are ready for products of
// Arithmetic there; void is for no such products.
template <class Arithmetic, class Body>
void for_each_rectangle(int64_t rows, int64_t columns, int unit_rows,
                        int unit_columns, int64_t threads, const Body& body) {
  const int64_t row_units = ceil_div(rows, unit_rows);
  const int64_t column_units = ceil_div(columns, unit_columns);
  const Grid grid =
      choose_grid(row_units, column_units, unit_rows, unit_columns, threads);
  parallel_for(grid.rows * grid.columns, 1, [&](int64_t begin, int64_t end) {
    const TileRegisters<Arithmetic> registers;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / grid.columns;
      const int64_t j = task % grid.columns;
      const int64_t row = i * row_units / grid.rows * unit_rows;
      const int64_t column = j * column_units / grid.columns * unit_columns;
      const int64_t row_end =
          std::min((i + 1) * row_units / grid.rows * unit_rows, rows);
      const int64_t column_end = std::min(
          (j + 1) * column_units / grid.columns * unit_columns, columns);
      body(row, row_end - row, column, column_end - column);
    }
  });
}

}  // namespace pkg::cpu::detail
