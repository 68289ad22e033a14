// The order in which the blocks of a launch walk the tiles of a product.
//
// Blocks that run together should share rows and columns, which then come from
// the L2 cache. 132 tiles of 128 x 256 halves in one row of tiles need 128 rows
// and 33792 columns, 4.1 MiB for every 64 steps; sixteen rows of tiles at a
// time, column after column, need 2048 rows and 2112 columns, 520 KiB.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/divisor.cuh"

namespace pkg::cuda {

// Rows of tiles that are walked together.
constexpr int kRowsTogether = 16;

template <class Index>
struct TilePosition {
  Index row;
  Index column;
};

// Where the `tile`-th of a matrix lies, counted in tiles.
__device__ __forceinline__ TilePosition<int> tile_position(int tile,
                                                           int row_tiles,
                                                           int column_tiles) {
  const int first = tile / (kRowsTogether * column_tiles) * kRowsTogether;
  const int within = tile - first * column_tiles;
  const int left = row_tiles - first;
  const int together = left < kRowsTogether ? left : kRowsTogether;
  return {first + within % together, within / together};
}

// The same for any number of tiles, and of matrices. Known to the launch and
// not computed by each thread, whose registers the sums take.
class TileOrder {
 public:
  struct Place {
    int64_t matrix;
    TilePosition<int64_t> position;
  };

  TileOrder() = default;
  TileOrder(int64_t row_tiles, int64_t column_tiles)
      : of_matrix_(row_tiles * column_tiles),
        of_group_(kRowsTogether * column_tiles),
        last_rows_(row_tiles % kRowsTogether),
        whole_groups_(row_tiles / kRowsTogether) {}

  __device__ __forceinline__ Place place(int64_t index) const {
    const auto [matrix, tile] = of_matrix_.divide(index);
    const auto [group, within] = of_group_.divide(tile);
    const auto [column, row] =
        group < whole_groups_
            ? Quotient<int64_t>{within / kRowsTogether, within % kRowsTogether}
            : last_rows_.divide(within);
    return {matrix, {group * kRowsTogether + row, column}};
  }

 private:
  WideDivisor of_matrix_{};
  WideDivisor of_group_{};
  WideDivisor last_rows_{};
  int64_t whole_groups_ = 0;
};

}  // namespace pkg::cuda
