// Which keys of a tile of scores its queries see.
#pragma once

#include <cstdint>

#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"

namespace pkg::cuda {

// Which keys of a tile the rows see, counted from the tile's corner in 32 bits.
// Lengths must be below kMostTiledLength.
struct TileLimits {
  int rows;
  int columns;
  int first;     // column >= row + first
  int last;      // column <= row + last
  int diagonal;  // the distance of the corner's row from its column

  __device__ __forceinline__ TileLimits(const AttentionExtent& extent,
                                        int64_t row_begin, int64_t column_begin)
      : rows(near(extent.rows - row_begin)),
        columns(near(extent.columns - column_begin)),
        first(near(extent.limits.first + row_begin - column_begin)),
        last(near(extent.limits.last + row_begin - column_begin)),
        diagonal(static_cast<int>(row_begin + extent.columns - extent.rows -
                                  column_begin)) {}

  // Where nothing depends on the distance.
  __device__ __forceinline__ TileLimits(int tile_rows, int tile_columns,
                                        int tile_first, int tile_last)
      : rows(tile_rows),
        columns(tile_columns),
        first(tile_first),
        last(tile_last),
        diagonal(0) {}

  __device__ __forceinline__ bool sees(int row, int column) const {
    return row < rows && column < columns && column >= row + first &&
           column <= row + last;
  }

  // Whether every row of a tile sees all of its columns.
  __device__ __forceinline__ bool see_whole(int tile_rows,
                                            int tile_columns) const {
    return sees(tile_rows - 1, 0) && sees(0, tile_columns - 1) &&
           tile_rows <= rows && tile_columns <= columns;
  }

  // Makes minus infinity of the scores of what is not seen. A row sees so many
  // columns from one on: one comparison a score. Of sees(), four of them, the
  // compiler kept the answers of a tile in as many bits as it has scores, and
  // spilled up to 14 words of a thread in the kernels of warpgroups
  // (nvcc 13.0).
  template <class Scores>
  __device__ __forceinline__ void hide_unseen(Scores& tile) const {
    using Number = typename Scores::Value;
    if (!see_whole(Scores::kTileRows, Scores::kTileColumns)) {
      tile.transform([&](int row, int column, Number score) {
        const int begin = row + first > 0 ? row + first : 0;
        const int behind = row + last < columns ? row + last + 1 : columns;
        const int count = row < rows && behind > begin ? behind - begin : 0;
        return static_cast<uint32_t>(column - begin) <
                       static_cast<uint32_t>(count)
                   ? score
                   : -Number(INFINITY);
      });
    }
  }

  // The same of the thread's i-th row.
  template <class Scores>
  __device__ __forceinline__ void hide_unseen_of_row(Scores& tile,
                                                     int i) const {
    using Number = typename Scores::Value;
    const typename Scores::Thread thread;
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; ++j) {
      if (!sees(thread.row(i), thread.column(j))) {
        tile.values[i][j] = -Number(INFINITY);
      }
    }
  }

 private:
  // What lies further than any tile is as good as its edge.
  __device__ __forceinline__ static int near(int64_t distance) {
    constexpr int64_t kFar = 1 << 20;
    return static_cast<int>(distance < -kFar  ? -kFar
                            : distance > kFar ? kFar
                                              : distance);
  }
};

constexpr int64_t kMostTiledLength = int64_t{1} << 30;

}  // namespace pkg::cuda
