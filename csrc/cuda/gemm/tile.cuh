// Tiles: the part of a product that a block of threads holds in registers.
//
// Which of the rows and columns are a thread's is said by a type. GridThread is
// for products by multiply-adds: TileThread of a block of 16 x 16 threads that
// owns a tile of 64 or 128 rows and columns, each thread fragments of 4 rows
// and 4 columns of every 64: 4 neighbours are one 128-bit read of shared
// memory. With 8 x 16 threads a fragment's rows are of every 32, with 8 across
// its columns too. MmaThread is for the tensor cores.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/mma_places.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/words.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

constexpr int kFragment = 4;

__host__ __device__ constexpr int64_t tiles_of(int64_t size, int tile) {
  return ceil_div(size, tile);
}

// A thread's place in the block's tile. By default it is computed_here: places
// that follow from it are the same for all tiles of a block, and the compiler
// would keep those of a tile's end in registers from before the first tile on,
// or spill them (nvcc 13.0, matmul and attention in half precision). A loop
// that has registers for them passes threadIdx.x.
//
// Of a block of several groups each has a tile of its own.
template <int kDown, int kAcross = 16, int kBlockGroups = 1>
struct GridThread {
  static constexpr int kThreadsDown = kDown;
  static constexpr int kThreadsAcross = kAcross;
  static constexpr int kNeighbours = kFragment;  // columns, side by side
  static constexpr int kThreads = kThreadsDown * kThreadsAcross;
  static constexpr int kGroups = kBlockGroups;
  int row_lane;
  int column_lane;

  // Of a warp, that share a row, so many lanes apart.
  static constexpr int kRowLanes = kThreadsAcross;
  static constexpr int kLaneStride = 1;
  static constexpr int own_rows(int rows) { return rows / kThreadsDown; }
  static constexpr int own_columns(int columns) {
    return columns / kThreadsAcross;
  }

  __device__ __forceinline__ GridThread()
      : GridThread(computed_here(static_cast<int>(threadIdx.x))) {}
  __device__ __forceinline__ explicit GridThread(int thread)
      : row_lane(of_group<kThreads, kGroups>(thread) / kThreadsAcross),
        column_lane(thread % kThreadsAcross) {}

  __device__ __forceinline__ bool is_first_of_row() const {
    return column_lane == 0;
  }
  // The place in the tile of this thread's i-th row, or j-th column.
  __device__ __forceinline__ int row(int i) const {
    return i / kFragment * (kThreadsDown * kFragment) + row_lane * kFragment +
           i % kFragment;
  }
  __device__ __forceinline__ int column(int j) const {
    return j / kFragment * (kThreadsAcross * kFragment) +
           column_lane * kFragment + j % kFragment;
  }
};
using TileThread = GridThread<16>;

// The same of threads whose warps are 4 down and 8 across, so that the lanes of
// a warp need fewest numbers of both operands.
template <int kDown, int kAcross>
struct WarpGridThread : GridThread<kDown, kAcross> {
  using Base = GridThread<kDown, kAcross>;
  static constexpr int kRowLanes = 8;
  static constexpr int kWarpsAcross = kAcross / kRowLanes;
  static_assert(kDown % 4 == 0 && kAcross % kRowLanes == 0);

  __device__ __forceinline__ WarpGridThread()
      : WarpGridThread(computed_here(static_cast<int>(threadIdx.x))) {}
  __device__ __forceinline__ explicit WarpGridThread(int thread)
      : Base(place(thread)) {}

 private:
  // The thread of GridThread that is there.
  __device__ __forceinline__ static int place(int thread) {
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int down = warp / kWarpsAcross * 4 + lane / kRowLanes;
    const int across = warp % kWarpsAcross * kRowLanes + lane % kRowLanes;
    return down * kAcross + across;
  }
};

// The same of threads of which a warp has whole rows, in whose order two rows
// alternate: two lanes side by side load the same of a column, and two that are
// two apart the same of a row, which shared memory gives to half a warp at once
// and not to a quarter.
template <int kDown, int kAcross, int kBlockGroups = 1>
struct PairedGridThread : GridThread<kDown, kAcross, kBlockGroups> {
  using Base = GridThread<kDown, kAcross, kBlockGroups>;
  static constexpr int kRowLanes = kAcross;
  static constexpr int kLaneStride = 2;
  static_assert(kAcross <= 16 && 32 % kAcross == 0 && kDown % 2 == 0);

  __device__ __forceinline__ PairedGridThread()
      : PairedGridThread(computed_here(static_cast<int>(threadIdx.x))) {}
  __device__ __forceinline__ explicit PairedGridThread(int thread)
      : Base(place(thread)) {}

 private:
  // The thread of GridThread that is there.
  __device__ __forceinline__ static int place(int of_block) {
    const int thread = of_group<Base::kThreads, kBlockGroups>(of_block);
    const int down = thread / (2 * kAcross) * 2 + thread % 2;
    return down * kAcross + thread / 2 % kAcross;
  }
};

// The same where each warp owns kWarpRows x kWarpColumns of the tile and adds
// to 8 x 8 of them, or 16 x 8, by an instruction.
template <int kTileRows, int kTileColumns, int kWarpRows, int kWarpColumns>
struct MmaThread {
  using Places = MmaPlaces<2>;  // sums lie alike for every element
  static constexpr int kNeighbours = 2;
  static constexpr int kWarpsAcross = kTileColumns / kWarpColumns;
  static constexpr int kThreads =
      32 * (kTileRows / kWarpRows) * (kTileColumns / kWarpColumns);
  static constexpr int kGroups = 1;
  int lane;
  int warp_row;
  int warp_column;

  static constexpr int kRowLanes = 4;
  static constexpr int kLaneStride = 1;
  static constexpr int own_rows(int) { return kWarpRows / 8; }
  static constexpr int own_columns(int) { return kWarpColumns / 4; }

  __device__ __forceinline__ MmaThread()
      : MmaThread(computed_here(static_cast<int>(threadIdx.x))) {}
  __device__ __forceinline__ explicit MmaThread(int thread)
      : lane(thread % 32),
        warp_row(thread / 32 / kWarpsAcross * kWarpRows),
        warp_column(thread / 32 % kWarpsAcross * kWarpColumns) {}

  __device__ __forceinline__ bool is_first_of_row() const {
    return lane % kRowLanes == 0;
  }
  __device__ __forceinline__ int row(int i) const {
    return warp_row + i / 2 * Places::kRows + Places::sum(lane, i % 2 * 2).row;
  }
  __device__ __forceinline__ int column(int j) const {
    return warp_column + j / 2 * Places::kColumns +
           Places::sum(lane, j % 2).column;
  }
};

// What one thread holds of a tile of the block.
template <class Number, int kRows, int kColumns, class Owner = TileThread>
struct Tile {
  using Thread = Owner;
  using Value = Number;
  static constexpr int kTileRows = kRows;
  static constexpr int kTileColumns = kColumns;
  static constexpr int kThreadRows = Thread::own_rows(kRows);
  static constexpr int kThreadColumns = Thread::own_columns(kColumns);
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
    const Thread thread;
    PKG_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) {
        values[i][j] = function(thread.row(i), thread.column(j), values[i][j]);
      }
    }
  }

  // Replaces each value by function(value). The compiler computes a long
  // function of all of a thread's values side by side, and spills (nvcc 13.0,
  // an error function of 64 values); so there is a loop in which sixteen
  // columns at a time change places.
  template <class Function>
  __device__ __forceinline__ void transform_values(Function&& function) {
    constexpr int kPart = kThreadColumns < 16 ? kThreadColumns : 16;
    static_assert(kThreadColumns % kPart == 0);
    PKG_UNROLL_BY(1)
    for (int part = 0; part < kThreadColumns / kPart; ++part) {
      PKG_UNROLL
      for (int i = 0; i < kThreadRows; ++i) {
        Number results[kPart];
        PKG_UNROLL
        for (int j = 0; j < kPart; ++j) {
          results[j] = function(values[i][j]);
        }
        PKG_UNROLL
        for (int j = 0; j < kThreadColumns; ++j) {
          values[i][j] = j + kPart < kThreadColumns
                             ? values[i][j + kPart]
                             : results[j + kPart - kThreadColumns];
        }
      }
    }
  }

  // Adds function(column in the tile) to each value of that column.
  template <class Function>
  __device__ __forceinline__ void add_to_columns(Function&& function) {
    const Thread thread;
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

// A tile whose rows are columns to who looks at it.
template <class TileType>
struct TransposedTile {
  using Value = typename TileType::Value;
  static constexpr int kTileRows = TileType::kTileColumns;
  static constexpr int kTileColumns = TileType::kTileRows;
  TileType& tile;

  template <class Function>
  __device__ __forceinline__ void transform(Function&& function) {
    tile.transform([&](int row, int column, Value value) {
      return function(column, row, value);
    });
  }
  __device__ __forceinline__ void scale(Value factor) { tile.scale(factor); }
};

// kPart columns of the tile, from `first` on, as a panel for a further product:
// element (row, first + column) goes to panel[column][row].
template <int kPart, class Number, int kRows, int kColumns, class Thread,
          class Panel>
__device__ __forceinline__ void store_transposed(
    const Tile<Number, kRows, kColumns, Thread>& tile, int first,
    Panel&& panel) {
  using TileType = Tile<Number, kRows, kColumns, Thread>;
  constexpr int kOwn = Thread::own_columns(kPart);
  static_assert(kOwn % kFragment == 0);  // threads have whole fragments
  const Thread thread;
  PKG_UNROLL
  for (int j = 0; j < kOwn; ++j) {
    PKG_UNROLL
    for (int i = 0; i < TileType::kThreadRows; ++i) {
      panel[thread.column(j)][thread.row(i)] =
          tile.values[i][first / kPart * kOwn + j];
    }
  }
}

// Stores a tile to a matrix, for a whole warp where elements have two bytes and
// a thread two columns of every eight: four lanes exchange theirs, so that each
// writes eight neighbours of a row, and together a line of 64 bytes.
template <class Number, int kRows, int kColumns, class Thread, class Element>
__device__ __forceinline__ void store_eights(
    const Tile<Number, kRows, kColumns, Thread>& tile, Element* matrix,
    int64_t row_count, int64_t column_count, int64_t row_stride,
    int64_t row_begin, int64_t column_begin) {
  using TileType = Tile<Number, kRows, kColumns, Thread>;
  const Thread thread;
  PKG_UNROLL
  for (int i = 0; i < TileType::kThreadRows; ++i) {
    const int64_t row = row_begin + thread.row(i);
    PKG_UNROLL
    for (int j = 0; j < TileType::kThreadColumns; j += 8) {
      uint32_t eight[4];
      PKG_UNROLL
      for (int pair = 0; pair < 4; ++pair) {
        eight[pair] = pair_of<Element>(tile.values[i][j + 2 * pair],
                                       tile.values[i][j + 2 * pair + 1]);
      }
      transpose_quads(eight);
      const int64_t column =
          column_begin + thread.warp_column + 4 * j + 8 * (thread.lane % 4);
      if (row < row_count && column < column_count) {
        store_words(matrix + row * row_stride + column, eight);
      }
    }
  }
}

// Writes the part of the tile that lies in a matrix of neighbouring columns,
// all that are a thread's side by side at once where their address allows it.
template <class Number, int kRows, int kColumns, class Thread, class Element>
__device__ __forceinline__ void store_tile(
    const Tile<Number, kRows, kColumns, Thread>& tile, Element* matrix,
    int64_t row_count, int64_t column_count, int64_t row_stride,
    int64_t row_begin, int64_t column_begin) {
  using TileType = Tile<Number, kRows, kColumns, Thread>;
  constexpr int kWidest = 16 / sizeof(Element);
  constexpr int kPacket =
      Thread::kNeighbours < kWidest ? Thread::kNeighbours : kWidest;
  if constexpr (sizeof(Element) == 2 && Thread::kNeighbours == 2) {
    static_assert(TileType::kThreadColumns % 8 == 0);
    if (row_stride % 8 == 0 && column_count % 8 == 0 && is_aligned(matrix, 8)) {
      store_eights(tile, matrix, row_count, column_count, row_stride, row_begin,
                   column_begin);
      return;
    }
  }
  const Thread thread;
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

// Adds what store_tile has written into a matrix of whole rows of numbers.
template <class Number, int kRows, int kColumns, class Thread>
__device__ __forceinline__ void add_stored(
    Tile<Number, kRows, kColumns, Thread>& tile, const Number* matrix,
    int64_t row_count, int64_t column_count, int64_t row_begin,
    int64_t column_begin) {
  constexpr int kWidest = 16 / sizeof(Number);
  constexpr int kPacket =
      Thread::kNeighbours < kWidest ? Thread::kNeighbours : kWidest;
  const Thread thread;
  const bool vectorised =
      column_count % kPacket == 0 && is_aligned(matrix, kPacket);
  PKG_UNROLL
  for (int i = 0; i < tile.kThreadRows; ++i) {
    const int64_t row = row_begin + thread.row(i);
    PKG_UNROLL
    for (int j = 0; j < tile.kThreadColumns; j += kPacket) {
      const int64_t column = column_begin + thread.column(j);
      const Number* from = matrix + row * column_count + column;
      Packet<Number, kPacket> packet = {};
      if (vectorised && row < row_count && column < column_count) {
        packet = *reinterpret_cast<const Packet<Number, kPacket>*>(from);
      } else {
        PKG_UNROLL
        for (int k = 0; k < kPacket; ++k) {
          if (row < row_count && column + k < column_count) {
            packet.values[k] = from[k];
          }
        }
      }
      PKG_UNROLL
      for (int k = 0; k < kPacket; ++k) {
        tile.values[i][j + k] += packet.values[k];
      }
    }
  }
}

// The sum, or the largest, of the values of the threads that share the tile's
// rows, where all of them belong to one warp.
template <class Thread, class Number>
__device__ __forceinline__ Number row_sum(Number value) {
  return lanes_sum<Thread::kRowLanes, Thread::kLaneStride>(value);
}

template <class Thread, class Number>
__device__ __forceinline__ Number row_maximum(Number value) {
  return lanes_maximum<Thread::kRowLanes, Thread::kLaneStride>(value);
}

}  // namespace pkg::cuda
