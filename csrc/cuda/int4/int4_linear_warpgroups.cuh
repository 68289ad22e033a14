// int4_linear of many rows in half precision, by products of warpgroups; for
// compute capability 9.0 alone.
//
// To write the weight out in half precision and multiply that would round it,
// which int4_linear does not: (q - 8) scale + zero has more bits than bfloat16,
// and than float16. So this multiplies what int4_linear_mma.cuh does, the whole
// numbers q - 8, exactly, and scales the sums of each group in float32. Nothing
// of the weight is written, and no memory is taken for it.
//
// Algorithm: that of cuda/gemm/warpgroup_product.cuh, with the result turned
// around: rows of a product are columns of the weight, for operand A of wgmma
// may lie in registers, and its words are those of mma.m16n8k16's operand B
// twice, in which order the weight is packed. So a lane loads its words from
// global memory as they are, a slice of 128 steps ahead, and makes operands of
// them by shifts; the activations come by the copy engine and are operand B.
// While products run, the words of the next 32 steps are made, and while a
// warpgroup scales the sums of a group, tensor cores work for the other one.
// The zeros are multiplied by sums of the activations, which a kernel of its
// own makes once for all columns.
//
// Tiles: 128 columns of the weight by 128 rows of the input: a thread of the
// two warpgroups has 64 sums of the group and 64 totals, and 128 more of either
// it could not have. Eight stages of 64 steps of the activations, 16 KiB each.
//
// Operations: 2 M N K. For a tile and a slice a multiprocessor of an H100 takes
// - tensor cores: 2 x 128^3 operations at 4096 a cycle: 1024 cycles;
// - shared memory, at 128 bytes a cycle: 32 KiB that are copied, and read once
//   by either warpgroup: 768;
// - instructions of eight warps, four a cycle: 96 that make words, and for each
//   group 128 multiply-adds: 224 x 8 / 4 = 448 with groups of 128 columns, 704
//   with 64, 1216 with 32, which are then the bound.
// Bytes: from the L2 cache 32 KiB of activations and 8 of the weight for a tile
// and a slice, 40 a cycle, where a product of halves (128 x 256) takes 48. The
// sums of the activations are 4 bytes for 256 that are read once more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cuda/device/device.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/warpgroup_matmul.cuh"
#include "cuda/gemm/warpgroup_product.cuh"
#include "cuda/int4/int4_linear.cuh"

namespace pkg::cuda {

constexpr int kInt4Tile = 128;  // rows, and columns
constexpr int kInt4Slice = 128;

// More rows than these are taken by warpgroups. A tile of theirs takes as long
// for one row as for 128. Single warps reached 247 TFLOP/s with 128 rows, 36 %
// of the 690 of warpgroups' products of halves (H100): if this comes near
// those, 46 rows are worth a whole tile; up to 64 the others compute no row too
// many, and no sums of the activations before.
constexpr int64_t kInt4ManyRows = 64;

// Where the sum of a row of a tile is stored: so that those of the columns that
// a thread has of the turned tile lie side by side.
__device__ __forceinline__ int place_of_row_sum(int row) {
  return row % 8 / 2 * (kInt4Tile / 4) + row / 8 * 2 + row % 2;
}

struct Int4WarpgroupPlace {
  int batch;
  int split;
  int row_begin;
  int column_begin;
  int begin;  // of the summed dimension, in slices
  int end;
};

template <class Element>
struct Int4WarpgroupProblem {
  TensorMap input;
  Int4LinearProblem<Element> call;
  // Of the activations of each group, or of each 128 steps of a longer one:
  // matrices, groups, row tiles, 128; see place_of_row_sum().
  float* row_sums;
  int64_t matrix_stride;  // of the input
  int matrices;           // one may be that of every index of the batch
  int slices;
  int slices_each;  // of a part
  int row_tiles;
  int column_tiles;
  int pieces;

  // Pieces that run together share rows and columns, as those of
  // WarpgroupProblem do.
  __device__ __forceinline__ Int4WarpgroupPlace place(int index) const {
    constexpr int kTogether = 16;
    const int tiles = row_tiles * column_tiles;
    const int part = index / tiles;
    const int tile = index % tiles;
    const int first = tile / (kTogether * column_tiles) * kTogether;
    const int within = tile - first * column_tiles;
    const int left = row_tiles - first;
    const int together = left < kTogether ? left : kTogether;
    const int split = part % static_cast<int>(call.splits);
    const int begin = split * slices_each;
    return {part / static_cast<int>(call.splits),
            split,
            (first + within % together) * kInt4Tile,
            within / together * kInt4Tile,
            begin,
            begin + slices_each < slices ? begin + slices_each : slices};
  }

  // The sums of a group of a tile's rows.
  __device__ __forceinline__ float* sums_of(int matrix, int group, int groups,
                                            int row_tile) const {
    return row_sums +
           ((int64_t{matrix} * groups + group) * row_tiles + row_tile) *
               kInt4Tile;
  }
};

// Slices of each part of the summed dimension: those by which the product takes
// the fewest cycles, if a block has a multiprocessor.
inline int64_t plan_int4_slices(int64_t tiles, int64_t slices, int64_t blocks,
                                int64_t elements) {
  constexpr int64_t kCycles = 1024;
  const auto taken = [&](int64_t each) {
    const int64_t parts = (slices + each - 1) / each;
    return (tiles * parts + blocks - 1) / blocks * each * kCycles +
           cycles_of_parts(parts, elements);
  };
  const int64_t each = panels_of_split(tiles, slices, blocks, 4);
  return taken(each) < taken(slices) ? each : slices;
}

// The problem for warpgroups, but for its map and the memory of its sums, or
// nothing where they do not take it.
template <class Element>
std::optional<Int4WarpgroupProblem<Element>> int4_warpgroup_problem(
    const Int4LinearProblem<Element>& call, const BulkOperand<Element>& input) {
  const int64_t row_tiles = tiles_of(call.rows, kInt4Tile);
  const int64_t column_tiles = tiles_of(call.columns, kInt4Tile);
  const int64_t slices = tiles_of(call.depth, kInt4Slice);
  const int64_t pieces =
      call.batch_count * call.splits * row_tiles * column_tiles;
  if (input.major != Major::depth || pieces > kMostCounted ||
      call.batch_count > kMostCounted / row_tiles ||
      call.columns > kMostCounted || !is_aligned(call.words, 4) ||
      !is_aligned(call.scales_and_zeros, 2)) {
    return std::nullopt;
  }
  Int4WarpgroupProblem<Element> result = {};
  result.call = call;
  result.matrix_stride = input.tensor.matrix_stride;
  result.matrices = static_cast<int>(input.tensor.matrices);
  result.slices = static_cast<int>(slices);
  result.slices_each = static_cast<int>(
      call.splits > 1 ? call.split_depth / kInt4Slice : slices);
  result.row_tiles = static_cast<int>(row_tiles);
  result.column_tiles = static_cast<int>(column_tiles);
  result.pieces = static_cast<int>(pieces);
  return result;
}

// The input of a call as the copy engine sees it, or nothing where it cannot.
template <class Element>
std::optional<BulkOperand<Element>> int4_bulk_input(
    const Int4LinearProblem<Element>& call) {
  return bulk_operand<Element>(
      {call.input, call.rows, call.depth, call.row_stride, call.depth_stride},
      call.batch_count, step_of_batch(call.batch, call.batch_strides));
}

// The sums of the activations: a block has a row, a thread 16 bytes at a time.
// Rows beyond the last have sums of 0.
struct Int4RowSums {
  static constexpr int kThreads = 128;

  template <class Element>
  static int64_t pieces(const Int4WarpgroupProblem<Element>& problem) {
    return int64_t{problem.matrices} * problem.row_tiles * kInt4Tile;
  }
  template <class Element>
  static size_t count(const Int4WarpgroupProblem<Element>& problem, int group) {
    return static_cast<size_t>(pieces(problem) * (problem.call.depth / group));
  }
};

template <class Element, int kGroup>
__global__ void __launch_bounds__(Int4RowSums::kThreads) int4_row_sums_kernel(
    const __grid_constant__ Int4WarpgroupProblem<Element> problem) {
  constexpr int kVector = 8;
  using Vector = Packet<Element, kVector>;
  const int rows = problem.row_tiles * kInt4Tile;
  const int vectors = static_cast<int>(problem.call.depth / kVector);
  const int groups = static_cast<int>(problem.call.depth / kGroup);
  for (int64_t index = blockIdx.x; index < int64_t{problem.matrices} * rows;
       index += gridDim.x) {
    const int matrix = static_cast<int>(index / rows);
    const int row = static_cast<int>(index % rows);
    const bool has_row = row < problem.call.rows;
    const Element* from = problem.call.input + matrix * problem.matrix_stride +
                          row * problem.call.row_stride;
    float* const to = problem.sums_of(matrix, 0, groups, row / kInt4Tile) +
                      place_of_row_sum(row % kInt4Tile);
    PKG_UNROLL_BY(1)
    for (int first = 0; first < vectors; first += Int4RowSums::kThreads) {
      const int vector = first + static_cast<int>(threadIdx.x);
      float sum = 0;
      if (has_row && vector < vectors) {
        const Vector values =
            *reinterpret_cast<const Vector*>(from + int64_t{vector} * kVector);
        PKG_UNROLL
        for (int i = 0; i < kVector; ++i) {
          sum += convert<float>(values.values[i]);
        }
      }
      sum = lanes_sum<kGroup / kVector>(sum);
      if (vector < vectors && vector % (kGroup / kVector) == 0) {
        to[int64_t{vector / (kGroup / kVector)} * rows] = sum;
      }
    }
  }
}

// `kGroup`: the steps of the summed dimension that have one scale, of a slice
// at the most; a longer group is gone on with as another.
template <class Element, int kGroup>
class Int4Warpgroups {
 public:
  static constexpr int kStages = 8;
  static constexpr int kConsumers = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumers + kWarpgroup;
  static constexpr int kBoxLines = 64;
  static constexpr int kPanel = 128 / sizeof(Element);  // steps of a stage
  static constexpr int kStageElements = kInt4Tile * kPanel;
  static constexpr int kStageBytes = kStageElements * sizeof(Element);
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  // Rows of the tile are columns of the result.
  using Thread = MmaThread<kInt4Tile, kInt4Tile, 16, kInt4Tile>;
  using Sums = Tile<float, kInt4Tile, kInt4Tile, Thread>;
  static_assert(Thread::kThreads == kConsumers);

  __device__ __forceinline__
  Int4Warpgroups(const Int4WarpgroupProblem<Element>& problem,
                 const Mbarriers& full, const Mbarriers& empty)
      : problem_(problem),
        call_(problem.call),
        memory_(dynamic_shared<Element>()),
        full_(full),
        empty_(empty) {}

  __device__ __forceinline__ void run() const {
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
        for_pieces(
            [&](const Int4WarpgroupPlace& at, Turn& turn) { copy(at, turn); });
      }
      return;
    }
    take_registers<kConsumerRegisters>();
    for_pieces([&](const Int4WarpgroupPlace& at, Turn& turn) {
      Sums totals(0);
      multiply(totals, at, turn);
      store(totals, at);
    });
  }

 private:
  using Turn = StageTurn<kStages>;
  // Of the weight a word of a lane is of 32 steps, and so are the products that
  // are begun together.
  static constexpr int kWordSteps = 32;
  static constexpr int kUnits = kInt4Slice / kWordSteps;
  static constexpr int kPanelUnits = kPanel / kWordSteps;
  using Packed = uint32_t[2][kUnits];  // of two tiles of eight columns
  using Words = uint32_t[2][4];        // of operand A, for 16 steps each

  template <class Function>
  __device__ __forceinline__ void for_pieces(Function&& function) const {
    Turn turn;
    PKG_UNROLL_BY(1)
    for (int index = static_cast<int>(blockIdx.x); index < problem_.pieces;
         index += static_cast<int>(gridDim.x)) {
      function(problem_.place(index), turn);
    }
  }

  __device__ __forceinline__ static int lane() {
    return static_cast<int>(threadIdx.x) % kWarp;
  }
  __device__ __forceinline__ int matrix_of(const Int4WarpgroupPlace& at) const {
    return problem_.matrices > 1 ? at.batch : 0;
  }

  // By one thread: the panels of the part, the last ones as far as there are
  // any.
  __device__ __forceinline__ void copy(const Int4WarpgroupPlace& at,
                                       Turn& turn) const {
    const int depth = static_cast<int>(call_.depth);
    const int end = at.end * kInt4Slice < depth ? at.end * kInt4Slice : depth;
    PKG_UNROLL_BY(1)
    for (int step = at.begin * kInt4Slice; step < end; step += kPanel) {
      empty_.wait(turn.stage, turn.parity ^ 1);
      full_.arrive_and_expect(turn.stage, kStageBytes);
      PKG_UNROLL
      for (int line = 0; line < kInt4Tile; line += kBoxLines) {
        copy_box(memory_, turn.stage * kStageElements + line * kPanel,
                 problem_.input, step, at.row_begin + line, matrix_of(at),
                 full_, turn.stage);
      }
      turn.advance();
    }
  }

  // What a thread reads of a tile's weight, scales, zeros and sums.
  struct Sources {
    const uint32_t* words;  // the lane's of the warp's first eight columns
    const uint32_t* pairs;  // of the first of its two columns
    const float* sums;      // of its rows
    int tiles;              // of eight columns that there are: 0, 1 or 2
    int left;               // words of the summed dimension
    int group;              // that comes next
  };

  __device__ __forceinline__ Sources
  sources(const Int4WarpgroupPlace& at) const {
    const int column =
        at.column_begin + static_cast<int>(threadIdx.x) / kWarp * 16;
    const int tiles = (static_cast<int>(call_.columns) - column) / 8;
    const int groups = static_cast<int>(call_.depth / kGroup);
    const int64_t depth = int64_t{at.begin} * kInt4Slice;
    return {
        call_.words + column / 8 * call_.depth + depth,
        reinterpret_cast<const uint32_t*>(call_.scales_and_zeros) + column +
            lane() / 4,
        problem_.sums_of(matrix_of(at), 0, groups, at.row_begin / kInt4Tile) +
            lane() % 4 * (kInt4Tile / 4),
        tiles < 0 ? 0 : (tiles < 2 ? tiles : 2),
        static_cast<int>(call_.depth / kWordSteps) - at.begin * kUnits,
        at.begin * (kInt4Slice / kGroup)};
  }

  // The lane's words of the next slice; zeros beyond the weight.
  template <int kAtATime>
  __device__ __forceinline__ void load(const Sources& from,
                                       Packed& packed) const {
    PKG_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      PKG_UNROLL
      for (int first = 0; first < kUnits; first += kAtATime) {
        Packet<uint32_t, kAtATime> some = {};
        if (tile < from.tiles && first < from.left) {
          some = *reinterpret_cast<const Packet<uint32_t, kAtATime>*>(
              from.words + tile * call_.depth + first * kWarp +
              lane() * kAtATime);
        }
        PKG_UNROLL
        for (int i = 0; i < kAtATime; ++i) {
          packed[tile][first + i] = some.values[i];
        }
      }
    }
  }
  __device__ __forceinline__ void load(const Sources& from,
                                       Packed& packed) const {
    switch (call_.word_shift) {
      case 0:
        return load<1>(from, packed);
      case 1:
        return load<2>(from, packed);
      default:
        return load<4>(from, packed);
    }
  }

  // Operand A of 32 steps: rows of the first eight columns, and of the second.
  __device__ __forceinline__ static void make_words(const Packed& packed,
                                                    int unit, Words& words) {
    PKG_UNROLL
    for (int step = 0; step < 2; ++step) {
      PKG_UNROLL
      for (int tile = 0; tile < 2; ++tile) {
        uint32_t pairs[2];
        whole_pairs<Element>(packed[tile][unit] >> (8 * step), pairs);
        words[step][tile] = pairs[0];
        words[step][tile + 2] = pairs[1];
      }
    }
  }

  // totals += the part of the summed dimension.
  __device__ __forceinline__ void multiply(Sums& totals,
                                           const Int4WarpgroupPlace& at,
                                           Turn& turn) const {
    Sources from = sources(at);
    Packed packed;
    Words words[2];
    load(from, packed);
    make_words(packed, 0, words[0]);
    Sums sums(0);
    PKG_UNROLL_BY(1)
    for (int slice = at.begin; slice < at.end; ++slice) {
      const int left = from.left;
      Packed next;
      from.words += kInt4Slice;
      from.left = slice + 1 < at.end ? left - kUnits : 0;
      load(from, next);
      multiply_slice(totals, sums, words, packed, next, left, from, turn);
      PKG_UNROLL
      for (int i = 0; i < 2 * kUnits; ++i) {
        packed[i / kUnits][i % kUnits] = next[i / kUnits][i % kUnits];
      }
    }
  }

  // Of a slice of which `left` words are there; those of the first are made.
  // Only groups shorter than it leave it incomplete.
  __device__ __forceinline__ void multiply_slice(
      Sums& totals, Sums& sums, Words (&words)[2], const Packed& packed,
      const Packed& next, int left, Sources& from, Turn& turn) const {
    constexpr int kGroupUnits = kGroup / kWordSteps;
    PKG_UNROLL
    for (int unit = 0; unit < kUnits; ++unit) {
      const int in_panel = unit % kPanelUnits;
      if (in_panel == 0) {
        full_.wait(turn.stage, turn.parity);
      }
      begin_unit(sums, words[unit % 2], turn.stage, in_panel,
                 unit % kGroupUnits > 0);
      // The words of the unit before have been read, and its panel.
      wait_for_products<1>();
      if (in_panel == 0 && unit % kGroupUnits > 0) {
        release(turn.stage == 0 ? kStages - 1 : turn.stage - 1);
      }
      if (unit + 1 < kUnits) {
        make_words(packed, unit + 1, words[(unit + 1) % 2]);
      } else {
        make_words(next, 0, words[0]);
      }
      const bool ends_slice = kGroup < kInt4Slice && unit + 1 >= left;
      if ((unit + 1) % kGroupUnits == 0) {
        add_group(totals, sums, from);
        if (in_panel + 1 == kPanelUnits || ends_slice) {
          release(turn.stage);
        }
      }
      if (in_panel + 1 == kPanelUnits || ends_slice) {
        turn.advance();
      }
      if (ends_slice) {
        break;
      }
    }
  }

  // Begins sums = A B, or +=, over the steps of a unit.
  __device__ __forceinline__ void begin_unit(Sums& sums, Words& words,
                                             int stage, int in_panel,
                                             bool add) const {
    const WarpgroupOperand rows(memory_, stage * kStageElements);
    hold_sums(sums.values);
    hold_words(words);
    order_registers();
    PKG_UNROLL
    for (int step = 0; step < 2; ++step) {
      begin_product<Element, Major::depth>(sums.values, words[step],
                                           rows.at((in_panel * 2 + step) * 32),
                                           add || step > 0);
    }
    commit_products();
  }

  // Waits for the sums of a group and adds them, scaled, and the zeros.
  __device__ __forceinline__ void add_group(Sums& totals, Sums& sums,
                                            Sources& from) const {
    constexpr int kFours = Sums::kThreadColumns / 4;
    const int64_t group = (int64_t{from.group} * kGroup) >> call_.group_shift;
    uint32_t pairs[2] = {};
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (i < from.tiles) {
        pairs[i] = from.pairs[group * call_.columns + 8 * i];
      }
    }
    Packet<float, 4> rows[kFours];
    const float* of_rows =
        from.sums + int64_t{from.group} * problem_.row_tiles * kInt4Tile;
    PKG_UNROLL
    for (int i = 0; i < kFours; ++i) {
      rows[i] = *reinterpret_cast<const Packet<float, 4>*>(of_rows + 4 * i);
    }
    ++from.group;
    wait_for_products<0>();
    hold_sums(sums.values);
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float scale = element_of_pair<bfloat16>(pairs[i], 0);
      const float zero = element_of_pair<bfloat16>(pairs[i], 1);
      PKG_UNROLL
      for (int j = 0; j < Sums::kThreadColumns; ++j) {
        float& total = totals.values[i][j];
        total += rows[j / 4].values[j % 4] * zero;
        total += sums.values[i][j] * scale;
      }
    }
    hold_sums(totals.values);
  }

  __device__ __forceinline__ void release(int stage) const {
    if (lane() == 0) {
      empty_.arrive(stage);
    }
  }

  __device__ __forceinline__ void store(Sums& totals,
                                        const Int4WarpgroupPlace& at) const {
    const int64_t matrix = call_.rows * call_.columns;
    if (call_.splits > 1) {
      store_part(totals,
                 call_.parts + (at.batch * call_.splits + at.split) * matrix,
                 at);
      return;
    }
    const Thread thread;
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float bias = call_.bias_of(at.column_begin + thread.row(i));
      PKG_UNROLL
      for (int j = 0; j < Sums::kThreadColumns; ++j) {
        totals.values[i][j] += bias;
      }
    }
    store_result(totals, call_.output + at.batch * matrix, at);
  }

  // Of the turned tile a thread has neighbours in a row of the result nowhere:
  // 32 bytes are the eight lanes'.
  __device__ __forceinline__ void store_part(
      const Sums& totals, float* part, const Int4WarpgroupPlace& at) const {
    const Thread thread;
    PKG_UNROLL
    for (int j = 0; j < Sums::kThreadColumns; ++j) {
      const int64_t row = at.row_begin + thread.column(j);
      PKG_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int64_t column = at.column_begin + thread.row(i);
        if (row < call_.rows && column < call_.columns) {
          part[row * call_.columns + column] = totals.values[i][j];
        }
      }
    }
  }

  // Lanes exchange what they have until each has eight neighbours of a row of
  // the result: with the next of the eight that share rows, of which one keeps
  // even rows and the other odd ones, and then four of these with each other.
  __device__ __forceinline__ void store_result(
      const Sums& totals, Element* output, const Int4WarpgroupPlace& at) const {
    const Thread thread;
    const bool is_odd = thread.lane / 4 % 2 != 0;
    const int64_t row = at.row_begin + thread.lane / 8 * 8 + thread.column(0) +
                        (is_odd ? 1 : 0);
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int64_t column = at.column_begin + thread.warp_row + 8 * i;
      PKG_UNROLL
      for (int four = 0; four < Sums::kThreadColumns / 8; ++four) {
        uint32_t words[4];
        PKG_UNROLL
        for (int word = 0; word < 4; ++word) {
          const float even = totals.values[i][8 * four + 2 * word];
          const float odd = totals.values[i][8 * four + 2 * word + 1];
          const float other =
              __shfl_xor_sync(0xffffffffu, is_odd ? even : odd, 4);
          words[word] =
              pair_of<Element>(is_odd ? other : even, is_odd ? odd : other);
        }
        transpose_quads<8>(words);
        const int64_t own_row = row + 32 * four;
        if (own_row < call_.rows && column < call_.columns) {
          store_words(output + own_row * call_.columns + column, words);
        }
      }
    }
  }

  const Int4WarpgroupProblem<Element>& problem_;
  const Int4LinearProblem<Element>& call_;
  SharedSpan<Element> memory_;
  const Mbarriers& full_;
  const Mbarriers& empty_;
};

// Calls function.operator()<kGroup>() with that of the problem.
template <class Element, class Function>
void with_int4_group(const Int4LinearProblem<Element>& problem,
                     const Function& function) {
  switch (problem.group_shift) {
    case 5:
      return function.template operator()<32>();
    case 6:
      return function.template operator()<64>();
    default:
      return function.template operator()<128>();
  }
}

template <class Element, int kGroup>
__global__ void __launch_bounds__(384, 1) int4_linear_warpgroups_kernel(
    const __grid_constant__ Int4WarpgroupProblem<Element> problem) {
  if constexpr (kCompilesWarpgroups) {
    using Block = Int4Warpgroups<Element, kGroup>;
    PKG_MBARRIERS(full, Block::kStages);
    PKG_MBARRIERS(empty, Block::kStages);
    Block(problem, full, empty).run();
  } else {
    commit_products();  // which traps
  }
}

}  // namespace pkg::cuda
