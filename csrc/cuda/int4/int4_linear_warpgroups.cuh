// int4_linear of many rows in half precision, by products of warpgroups; for
// compute capability 9.0 alone.
//
// To write the weight out in half precision and multiply that would round it,
// which int4_linear does not: (q - 8) scale + zero has more bits than bfloat16,
// and than float16. So this multiplies what int4_linear_mma.cuh does, the whole
// numbers q - 8, exactly, and scales the sums of each group in float32. Nothing
// of the weight is written, and no memory is taken for it.
//
// Algorithm: that of cuda/int4/turned_product.cuh. The words of operand A are
// those of mma.m16n8k16's operand B twice, in which order the weight is packed:
// a lane loads its words from global memory as they are, a slice of 128 steps
// ahead, and makes operands of them by shifts.
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

#include <cstdint>
#include <optional>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/warpgroup_matmul.cuh"
#include "cuda/gemm/warpgroup_product.cuh"
#include "cuda/int4/int4_linear.cuh"
#include "cuda/int4/turned_product.cuh"

namespace pkg::cuda {

constexpr int kInt4Rows = 128;  // of a tile

// Where the sum of a row of a tile is stored: so that those of the columns that
// a thread has of the turned tile lie side by side.
__device__ __forceinline__ int place_of_row_sum(int row) {
  return row % 8 / 2 * (kInt4Rows / 4) + row / 8 * 2 + row % 2;
}

template <class Element>
struct Int4WarpgroupProblem {
  TensorMap input;
  Int4LinearProblem<Element> call;
  // Of the activations of each group, or of each 128 steps of a longer one:
  // matrices, groups, row tiles, 128; see place_of_row_sum().
  float* row_sums;
  int64_t matrix_stride;  // of the input
  int matrices;           // one may be that of every index of the batch
  TurnedTiles tiles;

  // The sums of a group of a tile's rows.
  __device__ __forceinline__ float* sums_of(int matrix, int group, int groups,
                                            int row_tile) const {
    return row_sums +
           ((int64_t{matrix} * groups + group) * tiles.row_tiles + row_tile) *
               kInt4Rows;
  }
};

// Shared out among so many multiprocessors.
template <class Element>
TurnedTiles plan_int4_warpgroups(const Int4LinearProblem<Element>& call,
                                 int64_t blocks) {
  return plan_turned(call.batch_count, call.rows, call.columns, call.depth,
                     kInt4Rows, 1024, blocks)
      .tiles;
}

// The problem for warpgroups, but for its map and the memory of its sums.
template <class Element>
Int4WarpgroupProblem<Element> int4_warpgroup_problem(
    const Int4LinearProblem<Element>& call, const BulkOperand<Element>& input,
    const TurnedTiles& tiles) {
  Int4WarpgroupProblem<Element> result = {};
  result.call = call;
  result.call.splits = tiles.splits;
  result.matrix_stride = input.tensor.matrix_stride;
  result.matrices = static_cast<int>(input.tensor.matrices);
  result.tiles = tiles;
  return result;
}

// The input of a call as the copy engine sees it, or nothing where warpgroups
// do not take the call.
template <class Element>
std::optional<BulkOperand<Element>> int4_bulk_input(
    const Int4LinearProblem<Element>& call) {
  const auto input = bulk_operand<Element>(
      {call.input, call.rows, call.depth, call.row_stride, call.depth_stride},
      call.batch_count, step_of_batch(call.batch, call.batch_strides));
  const bool is_taken = input && input->major == Major::depth &&
                        call.columns > 0 && call.columns <= kMostCounted &&
                        is_aligned(call.words, 4) &&
                        is_aligned(call.scales_and_zeros, 2);
  return is_taken ? input : std::nullopt;
}

// The sums of the activations: a block has a row, a thread 16 bytes at a time.
// Rows beyond the last have sums of 0.
struct Int4RowSums {
  static constexpr int kThreads = 128;

  template <class Element>
  static int64_t pieces(const Int4WarpgroupProblem<Element>& problem) {
    return int64_t{problem.matrices} * problem.tiles.row_tiles * kInt4Rows;
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
  const int rows = problem.tiles.row_tiles * kInt4Rows;
  const int vectors = static_cast<int>(problem.call.depth / kVector);
  const int groups = static_cast<int>(problem.call.depth / kGroup);
  for (int64_t index = blockIdx.x; index < int64_t{problem.matrices} * rows;
       index += gridDim.x) {
    const int matrix = static_cast<int>(index / rows);
    const int row = static_cast<int>(index % rows);
    const bool has_row = row < problem.call.rows;
    const Element* from = problem.call.input + matrix * problem.matrix_stride +
                          row * problem.call.row_stride;
    float* const to = problem.sums_of(matrix, 0, groups, row / kInt4Rows) +
                      place_of_row_sum(row % kInt4Rows);
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
  using Product = TurnedProduct<Element, kInt4Rows>;
  using Turn = typename Product::Turn;
  using Thread = typename Product::Thread;
  using Sums = typename Product::Sums;
  using Words = typename Product::Words;

  __device__ __forceinline__ Int4Warpgroups(
      const Int4WarpgroupProblem<Element>& problem, const Product& product)
      : problem_(problem), call_(problem.call), product_(product) {}

  // By one thread: the panels of the part, the last ones as far as there are
  // any.
  __device__ __forceinline__ void copy(const TurnedPlace& at,
                                       Turn& turn) const {
    const int depth = static_cast<int>(call_.depth);
    const int end =
        at.end * kTurnedSlice < depth ? at.end * kTurnedSlice : depth;
    PKG_UNROLL_BY(1)
    for (int step = at.begin * kTurnedSlice; step < end;
         step += Product::kPanel) {
      product_.copy_panel(problem_.input, step, at.row_begin, matrix_of(at),
                          turn);
    }
  }

  __device__ __forceinline__ void compute(const TurnedPlace& at,
                                          Turn& turn) const {
    Sums totals(0);
    multiply(totals, at, turn);
    store(totals, at);
  }

 private:
  // Of the weight a word of a lane is of 32 steps, and so are the products that
  // are begun together.
  static constexpr int kWordSteps = 32;
  static constexpr int kUnits = kTurnedSlice / kWordSteps;
  static constexpr int kPanelUnits = Product::kPanel / kWordSteps;
  static_assert(kPanelUnits == 2);
  using Packed = uint32_t[2][kUnits];  // of two tiles of eight columns

  __device__ __forceinline__ static int lane() {
    return static_cast<int>(threadIdx.x) % kWarp;
  }
  __device__ __forceinline__ int matrix_of(const TurnedPlace& at) const {
    return problem_.matrices > 1 ? at.batch : 0;
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

  __device__ __forceinline__ Sources sources(const TurnedPlace& at) const {
    const int column =
        at.column_begin + static_cast<int>(threadIdx.x) / kWarp * 16;
    const int tiles = (static_cast<int>(call_.columns) - column) / 8;
    const int groups = static_cast<int>(call_.depth / kGroup);
    const int64_t depth = int64_t{at.begin} * kTurnedSlice;
    return {
        call_.words + column / 8 * call_.depth + depth,
        reinterpret_cast<const uint32_t*>(call_.scales_and_zeros) + column +
            lane() / 4,
        problem_.sums_of(matrix_of(at), 0, groups, at.row_begin / kInt4Rows) +
            lane() % 4 * (kInt4Rows / 4),
        tiles < 0 ? 0 : (tiles < 2 ? tiles : 2),
        static_cast<int>(call_.depth / kWordSteps) - at.begin * kUnits,
        at.begin * (kTurnedSlice / kGroup)};
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
  __device__ __forceinline__ void multiply(Sums& totals, const TurnedPlace& at,
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
      from.words += kTurnedSlice;
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
        product_.wait(turn);
      }
      product_.begin(sums, words[unit % 2], turn.stage, in_panel,
                     unit % kGroupUnits > 0);
      // The words of the unit before have been read, and its panel.
      wait_for_products<1>();
      if (in_panel == 0 && unit % kGroupUnits > 0) {
        product_.release(Product::before(turn));
      }
      if (unit + 1 < kUnits) {
        make_words(packed, unit + 1, words[(unit + 1) % 2]);
      } else {
        make_words(next, 0, words[0]);
      }
      const bool ends_slice = kGroup < kTurnedSlice && unit + 1 >= left;
      if ((unit + 1) % kGroupUnits == 0) {
        add_group(totals, sums, from);
        if (in_panel + 1 == kPanelUnits || ends_slice) {
          product_.release(turn.stage);
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
        from.sums + int64_t{from.group} * problem_.tiles.row_tiles * kInt4Rows;
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

  __device__ __forceinline__ void store(const Sums& totals,
                                        const TurnedPlace& at) const {
    const int64_t matrix = call_.rows * call_.columns;
    if (call_.splits > 1) {
      store_turned<Sums>(
          call_.parts + (at.batch * call_.splits + at.split) * matrix,
          call_.rows, call_.columns, at,
          [&](int i, int j) { return totals.values[i][j]; });
      return;
    }
    const Thread thread;
    const float biases[2] = {call_.bias_of(at.column_begin + thread.row(0)),
                             call_.bias_of(at.column_begin + thread.row(1))};
    store_turned<Sums>(
        call_.output + at.batch * matrix, call_.rows, call_.columns, at,
        [&](int i, int j) { return totals.values[i][j] + biases[i]; });
  }

  const Int4WarpgroupProblem<Element>& problem_;
  const Int4LinearProblem<Element>& call_;
  const Product& product_;
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
    using Product = typename Block::Product;
    PKG_MBARRIERS(full, Product::kStages);
    PKG_MBARRIERS(empty, Product::kStages);
    const Product product(problem.tiles, full, empty);
    const Block block(problem, product);
    product.run(
        [&](const TurnedPlace& at, auto& turn) { block.copy(at, turn); },
        [&](const TurnedPlace& at, auto& turn) { block.compute(at, turn); });
  } else {
    commit_products();  // which traps
  }
}

}  // namespace pkg::cuda
