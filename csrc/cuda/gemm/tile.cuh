// Tiles: the part of a product that a block of threads holds in registers.
//
// A block of 16 x 16 threads owns a tile of 64 or 128 rows and columns. Each
// thread owns fragments of 4 rows and 4 columns of every 64: 4 neighbours are
// one 128-bit read of shared memory, and the 16 threads of a tile row read 64
// neighbouring columns, which no two of them fetch from the same bank at once.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"

namespace pkg::cuda {

constexpr int kFragment = 4;
constexpr int kFragmentStride = 16 * kFragment;

__host__ __device__ constexpr int64_t tiles_of(int64_t size, int tile) {
  return (size + tile - 1) / tile;
}

// A thread's place in the block's tile.
struct TileThread {
  int row_lane;
  int column_lane;

  __device__ __forceinline__ TileThread()
      : row_lane(static_cast<int>(threadIdx.x) / 16),
        column_lane(static_cast<int>(threadIdx.x) % 16) {}

  // The place in the tile of this thread's i-th row, or j-th column.
  __device__ __forceinline__ int row(int i) const {
    return i / kFragment * kFragmentStride + row_lane * kFragment +
           i % kFragment;
  }
  __device__ __forceinline__ int column(int j) const {
    return j / kFragment * kFragmentStride + column_lane * kFragment +
           j % kFragment;
  }
};

// What one thread holds of a tile of the block.
template <class Number, int kRows, int kColumns>
struct Tile {
  static constexpr int kThreadRows = kRows / 16;
  static constexpr int kThreadColumns = kColumns / 16;
  Number values[kThreadRows][kThreadColumns];

  __device__ __forceinline__ explicit Tile(Number value) {
    PKG_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) {
        values[i][j] = value;
      }
    }
  }

  // Replaces each value by function(row in the tile, column in the tile,
  // value).
  template <class Function>
  __device__ __forceinline__ void transform(Function&& function) {
    const TileThread thread;
    PKG_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) {
        values[i][j] = function(thread.row(i), thread.column(j), values[i][j]);
      }
    }
  }

  // Adds function(column in the tile) to each value of that column.
  template <class Function>
  __device__ __forceinline__ void add_to_columns(Function&& function) {
    const TileThread thread;
    PKG_UNROLL
    for (int j = 0; j < kThreadColumns; ++j) {
      const Number value = function(thread.column(j));
      PKG_UNROLL
      for (int i = 0; i < kThreadRows; ++i) {
        values[i][j] += value;
      }
    }
  }

  __device__ __forceinline__ void add(const Tile& other) {
    PKG_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) {
        values[i][j] += other.values[i][j];
      }
    }
  }

  __device__ __forceinline__ void scale_row(int i, Number factor) {
    PKG_UNROLL
    for (int j = 0; j < kThreadColumns; ++j) {
      values[i][j] *= factor;
    }
  }

  __device__ __forceinline__ void scale(Number factor) {
    PKG_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      scale_row(i, factor);
    }
  }
};

// The tile as a panel for a further product: element (row, column) goes to
// panel[column][row].
template <class Number, int kRows, int kColumns, class Panel>
__device__ __forceinline__ void store_transposed(
    const Tile<Number, kRows, kColumns>& tile, Panel&& panel) {
  using TileType = Tile<Number, kRows, kColumns>;
  const TileThread thread;
  PKG_UNROLL
  for (int j = 0; j < TileType::kThreadColumns; ++j) {
    PKG_UNROLL
    for (int i = 0; i < TileType::kThreadRows; ++i) {
      panel[thread.column(j)][thread.row(i)] = tile.values[i][j];
    }
  }
}

// Writes the part of the tile that lies in a matrix of neighbouring columns,
// four of them at once where their address allows it.
template <class Number, int kRows, int kColumns, class Element>
__device__ __forceinline__ void store_tile(
    const Tile<Number, kRows, kColumns>& tile, Element* matrix,
    int64_t row_count, int64_t column_count, int64_t row_stride,
    int64_t row_begin, int64_t column_begin) {
  using TileType = Tile<Number, kRows, kColumns>;
  constexpr int kWidest = 16 / sizeof(Element);
  constexpr int kPacket = kFragment < kWidest ? kFragment : kWidest;
  const TileThread thread;
  const bool vectorised =
      row_stride % kPacket == 0 && is_aligned(matrix, kPacket);
  PKG_UNROLL
  for (int i = 0; i < TileType::kThreadRows; ++i) {
    const int64_t row = row_begin + thread.row(i);
    if (row >= row_count) {
      continue;
    }
    PKG_UNROLL
    for (int j = 0; j < TileType::kThreadColumns; j += kPacket) {
      const int64_t column = column_begin + thread.column(j);
      const int64_t first = row * row_stride + column;
      Packet<Element, kPacket> packet;
      PKG_UNROLL
      for (int k = 0; k < kPacket; ++k) {
        packet.values[k] = convert<Element>(tile.values[i][j + k]);
      }
      if (vectorised && column + kPacket <= column_count) {
        *reinterpret_cast<Packet<Element, kPacket>*>(matrix + first) = packet;
      } else {
        PKG_UNROLL
        for (int k = 0; k < kPacket; ++k) {
          if (column + k < column_count) {
            matrix[first + k] = packet.values[k];
          }
        }
      }
    }
  }
}

// The sum, or the largest, of the values of the 16 threads that share the
// tile's rows; they are a half of a warp.
template <class Number>
__device__ __forceinline__ Number row_sum(Number value) {
  return lanes_sum<16>(value);
}

template <class Number>
__device__ __forceinline__ Number row_maximum(Number value) {
  return lanes_maximum<16>(value);
}

}  // namespace pkg::cuda
