// What the products of warpgroups share whose operand A is a packed weight; for
// compute capability 9.0 alone.
//
// Operand A of wgmma may lie in registers: so a lane makes it of packed words
// that it has loaded from global memory, and no weight is written out. That
// operand's rows are columns of the weight, and the result is turned around: a
// tile's rows are columns of the result, its columns rows of it. The other
// operand, the input, comes by the copy engine, in stages of 128 bytes of the
// summed dimension, as in cuda/gemm/warpgroup_product.cuh; a thread of a third
// warpgroup asks for them.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_order.cuh"
#include "cuda/gemm/warpgroup_matmul.cuh"
#include "cuda/gemm/warpgroup_product.cuh"
#include "host/integer_math.h"

namespace pkg::cuda {

// Of a tile, and of the summed dimension what a warp has loaded ahead.
constexpr int kTurnedColumns = 128;
constexpr int kTurnedSlice = 128;

// More rows than these are worth a tile of 128, which takes as long for one
// row. On an H100 single warps reached 247 TFLOP/s with 128 rows of
// int4_linear, 36 % of the 690 of warpgroups' products of halves, and 336 TOP/s
// with 128 rows of rowwise_scaled_linear_s8s4, 17 % of the 1979 that there are
// at the most: if these products come near such rates, a whole tile takes as
// long as single warps take for 46 rows, and for 22. Up to 64 rows int4_linear
// by single warps has a tile for them, and no sums to make before.
constexpr int64_t kTurnedManyRows = 64;

struct TurnedPlace {
  int batch;
  int split;
  int row_begin;
  int column_begin;
  int begin;  // of the summed dimension, in slices
  int end;
};

// How a product is shared out to blocks.
struct TurnedTiles {
  int tile_rows;
  int slices;
  int slices_each;  // of a part of the summed dimension
  int splits;
  int row_tiles;
  int column_tiles;
  int pieces;

  __device__ __forceinline__ TurnedPlace place(int index) const {
    const int tiles = row_tiles * column_tiles;
    const int part = index / tiles;
    const auto [row_tile, column_tile] =
        tile_position(index % tiles, row_tiles, column_tiles);
    const int begin = part % splits * slices_each;
    const int end = begin + slices_each;
    return {part / splits,
            part % splits,
            row_tile * tile_rows,
            column_tile * kTurnedColumns,
            begin,
            end < slices ? end : slices};
  }
};

// Tiles of so many rows, in parts of so many slices; all in one where `each` is
// 0. Counts have 32 bits: where those do not suffice there are no pieces.
inline TurnedTiles turned_tiles(int64_t batch_count, int64_t rows,
                                int64_t columns, int64_t depth, int tile_rows,
                                int64_t each) {
  const int64_t slices = tiles_of(depth, kTurnedSlice);
  each = each == 0 ? slices : each;
  const int64_t parts = ceil_div(slices, each);
  const int64_t row_tiles = tiles_of(rows, tile_rows);
  const int64_t column_tiles = tiles_of(columns, kTurnedColumns);
  const int64_t pieces = batch_count * row_tiles * column_tiles * parts;
  if (pieces > kMostCounted) {
    return {};
  }
  return {tile_rows,
          static_cast<int>(slices),
          static_cast<int>(each),
          static_cast<int>(parts),
          static_cast<int>(row_tiles),
          static_cast<int>(column_tiles),
          static_cast<int>(pieces)};
}

struct TurnedPlan {
  TurnedTiles tiles;
  int64_t cycles;
};

// Those, whole or in parts, that take the fewest cycles: each block has one
// multiprocessor, of which a slice of a tile takes `slice_cycles`.
inline TurnedPlan plan_turned(int64_t batch_count, int64_t rows,
                              int64_t columns, int64_t depth, int tile_rows,
                              int64_t slice_cycles, int64_t blocks) {
  const auto plan_of = [&](int64_t each) {
    const TurnedTiles tiles =
        turned_tiles(batch_count, rows, columns, depth, tile_rows, each);
    const int64_t rounds = ceil_div(tiles.pieces, blocks);
    return TurnedPlan{
        tiles, rounds * tiles.slices_each * slice_cycles +
                   cycles_of_parts(tiles.splits, batch_count * rows * columns)};
  };
  const TurnedPlan whole = plan_of(0);
  const TurnedPlan divided = plan_of(
      panels_of_split(whole.tiles.pieces, whole.tiles.slices, blocks, 4));
  return divided.cycles < whole.cycles ? divided : whole;
}

template <class Element, int kTileRows>
class TurnedProduct {
 public:
  static constexpr int kRows = kTileRows;
  static constexpr int kPanel = 128 / sizeof(Element);  // steps of a stage
  static constexpr int kStages = kRows == 256 ? 6 : 8;
  static constexpr int kStageElements = kRows * kPanel;
  static constexpr int kStageBytes = kRows * 128;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kConsumers = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumers + kWarpgroup;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  using Turn = StageTurn<kStages>;
  using Thread = MmaThread<kTurnedColumns, kRows, 16, kRows>;
  using Sums = Tile<Accumulator<Element>, kTurnedColumns, kRows, Thread>;
  using Words = uint32_t[2][4];  // of operand A, for two times 32 bytes
  static_assert(Thread::kThreads == kConsumers);

  __device__ __forceinline__ TurnedProduct(const TurnedTiles& tiles,
                                           const Mbarriers& full,
                                           const Mbarriers& empty)
      : tiles_(tiles),
        memory_(dynamic_shared<Element>()),
        full_(full),
        empty_(empty) {}

  // Calls copy(place, turn) for each piece of the block by one thread of the
  // producer, and multiply(place, turn) by all consumers.
  template <class Copy, class Multiply>
  __device__ __forceinline__ void run(Copy&& copy, Multiply&& multiply) const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        full_.init(stage, 1);
        empty_.init(stage, kConsumers / kWarp);
      }
      publish_mbarriers();
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      give_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) {
        for_pieces(copy);
      }
      return;
    }
    take_registers<kConsumerRegisters>();
    for_pieces(multiply);
  }

  // By the producer: the rows from `row` on, steps from `step` on.
  __device__ __forceinline__ void copy_panel(const TensorMap& map, int step,
                                             int row, int matrix,
                                             Turn& turn) const {
    constexpr int kBoxLines = 64;
    empty_.wait(turn.stage, turn.parity ^ 1);
    full_.arrive_and_expect(turn.stage, kStageBytes);
    PKG_UNROLL
    for (int line = 0; line < kRows; line += kBoxLines) {
      copy_box(memory_, turn.stage * kStageElements + line * kPanel, map, step,
               row + line, matrix, full_, turn.stage);
    }
    turn.advance();
  }

  __device__ __forceinline__ void wait(Turn turn) const {
    full_.wait(turn.stage, turn.parity);
  }
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % kWarp == 0) {
      empty_.arrive(stage);
    }
  }
  // The one before, whose products are over when at most a later group is on
  // its way.
  __device__ __forceinline__ static int before(Turn turn) {
    return turn.stage == 0 ? kStages - 1 : turn.stage - 1;
  }

  // A stage as operand B.
  __device__ __forceinline__ WarpgroupOperand rows(int stage) const {
    return WarpgroupOperand(memory_, stage * kStageElements);
  }

  // Begins sums = A B, or +=, over half of a stage.
  __device__ __forceinline__ void begin(Sums& sums, Words& words, int stage,
                                        int half, bool add) const {
    hold_sums(sums.values);
    hold_words(words);
    order_registers();
    PKG_UNROLL
    for (int step = 0; step < 2; ++step) {
      begin_product<Element, Major::depth>(
          sums.values, words[step], rows(stage).at((half * 2 + step) * 32),
          add || step > 0);
    }
    commit_products();
  }

 private:
  template <class Function>
  __device__ __forceinline__ void for_pieces(Function&& function) const {
    Turn turn;
    PKG_UNROLL_BY(1)
    for (int index = static_cast<int>(blockIdx.x); index < tiles_.pieces;
         index += static_cast<int>(gridDim.x)) {
      function(tiles_.place(index), turn);
    }
  }

  const TurnedTiles& tiles_;
  SharedSpan<Element> memory_;
  const Mbarriers& full_;
  const Mbarriers& empty_;
};

// Writes value(i, j), a thread's i-th column and j-th row of the result, where
// it lies in a contiguous matrix of a multiple of eight columns. Halves that
// lie at a multiple of 16 bytes: lanes exchange what they have until each has
// eight neighbours of a row, first with the next of the eight that share rows,
// of which one keeps the first eight columns and the other the second, then
// four of these with each other; a store writes 32 bytes of each row. Of four
// bytes so many are those of eight lanes.
template <class Sums, class Element, class Value>
__device__ __forceinline__ void store_turned(Element* matrix, int64_t rows,
                                             int64_t columns,
                                             const TurnedPlace& at,
                                             Value&& value) {
  const typename Sums::Thread thread;
  if constexpr (sizeof(Element) == 2) {
    const bool is_odd = thread.lane / 4 % 2 != 0;
    const int64_t column = at.column_begin + thread.warp_row + (is_odd ? 8 : 0);
    const int64_t first = at.row_begin + thread.lane / 8 * 8 + thread.column(0);
    PKG_UNROLL
    for (int j = 0; j < Sums::kThreadColumns; j += 8) {
      PKG_UNROLL
      for (int next = 0; next < 2; ++next) {
        uint32_t words[4];
        PKG_UNROLL
        for (int word = 0; word < 4; ++word) {
          const float low = value(0, j + 2 * word + next);
          const float high = value(1, j + 2 * word + next);
          const float other =
              __shfl_xor_sync(0xffffffffu, is_odd ? low : high, 4);
          words[word] =
              pair_of<Element>(is_odd ? other : low, is_odd ? high : other);
        }
        transpose_quads<8>(words);
        const int64_t row = first + 4 * j + next;
        if (row < rows && column < columns) {
          store_words(matrix + row * columns + column, words);
        }
      }
    }
  } else {
    PKG_UNROLL
    for (int j = 0; j < Sums::kThreadColumns; ++j) {
      const int64_t row = at.row_begin + thread.column(j);
      PKG_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int64_t column = at.column_begin + thread.row(i);
        const Element result = value(i, j);
        if (row < rows && column < columns) {
          matrix[row * columns + column] = result;
        }
      }
    }
  }
}

}  // namespace pkg::cuda
