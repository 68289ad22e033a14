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
// ahead, and makes operands of them by shifts. While products run, the words of
// the next 32 steps are made, and while a warpgroup scales the sums of a group,
// tensor cores work for the other one.
//
// The zeros times the sums of the activations of each group are a product too,
// which the totals begin with. A kernel of its own makes these sums once for
// all columns, in float32, and writes them as three numbers of bfloat16 whose
// sum is exactly that: 24 bits are three times eight. So for 16 groups there
// are three products of 16 steps.
//
// Tiles: 128 columns of the weight by 128 rows of the input: a thread of the
// two warpgroups has 64 sums of the group and 64 totals, and 128 more of either
// it could not have. Eight stages of 64 steps of the activations, 16 KiB each.
//
// Operations: 2 M N K. For a tile and a slice a multiprocessor of an H100 takes
// - tensor cores: 2 x 128^3 operations at 4096 a cycle: 1024 cycles; and for
//   the zeros 24 for each group;
// - shared memory and L1, at 128 bytes a cycle: 32 KiB that are copied and read
//   once by either warpgroup, 8 KiB of the weight: 832;
// - instructions of eight warps, four a cycle: 290 with groups of 128 columns,
//   of which 96 make words and 64 are multiply-adds of the group, 360 with
//   groups of 64 and 552 with 32: 580, 720 and 1104 cycles.
// Bytes: from the L2 cache 32 KiB of activations and 8 of the weight for a tile
// and a slice, 40 a cycle, where a product of halves (128 x 256) takes 48. The
// activations are read once more for their sums, which are 8 bytes a group.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/device/dependent_launch.cuh"
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

// The sums of the activations as operand B: a panel is 16 groups, the three
// numbers of each 16 places apart, and 16 places that are not multiplied.
constexpr int kInt4SumGroups = 16;
constexpr int kInt4SumParts = 3;
constexpr int kInt4SumPanel = 64;

template <class Element>
struct Int4WarpgroupProblem {
  TensorMap input;
  TensorMap sums;
  Int4LinearProblem<Element> call;
  bfloat16* row_sums;     // of the activations: matrices, rows, panels, 64
  int64_t matrix_stride;  // of the input
  int matrices;           // one may be that of every index of the batch
  int sum_panels;
  TurnedTiles tiles;

  int64_t sum_rows() const { return matrices * call.rows; }
  int64_t sum_elements() const {
    return sum_rows() * sum_panels * kInt4SumPanel;
  }
  MappedTensor<bfloat16> mapped_sums() const {
    const int64_t line = int64_t{sum_panels} * kInt4SumPanel;
    return {row_sums, line, call.rows, matrices, line, call.rows * line, 64};
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

// The problem for warpgroups, but for its maps and the memory of its sums.
template <class Element>
Int4WarpgroupProblem<Element> int4_warpgroup_problem(
    const Int4LinearProblem<Element>& call, const BulkOperand<Element>& input,
    const TurnedTiles& tiles) {
  Int4WarpgroupProblem<Element> result = {};
  result.call = call;
  result.call.splits = tiles.splits;
  result.matrix_stride = input.tensor.matrix_stride;
  result.matrices = static_cast<int>(input.tensor.matrices);
  result.sum_panels = static_cast<int>(
      tiles_of(call.depth >> call.group_shift, kInt4SumGroups));
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

// The first eight significant bits of a number.
__device__ __forceinline__ float first_bits(float value) {
  return float_of_bits(bits_of_float(value) & 0xFFFF0000U);
}

// The sums of the activations: a block has a row, a thread 16 bytes at a time.
// Groups beyond the last have sums of 0.
constexpr int kInt4RowThreads = 128;

template <class Element>
__global__ void __launch_bounds__(kInt4RowThreads) int4_row_sums_kernel(
    const __grid_constant__ Int4WarpgroupProblem<Element> problem) {
  let_next_kernel_begin();
  constexpr int kVector = 8;
  using Vector = Packet<Element, kVector>;
  const int shift = problem.call.group_shift - 3;  // of vectors
  const int vectors = static_cast<int>(problem.call.depth / kVector);
  const int end = problem.sum_panels * kInt4SumGroups << shift;
  const int64_t line = int64_t{problem.sum_panels} * kInt4SumPanel;
  for (int64_t index = blockIdx.x; index < problem.matrices * problem.call.rows;
       index += gridDim.x) {
    const int64_t matrix = index / problem.call.rows;
    const Element* from =
        problem.call.input + matrix * problem.matrix_stride +
        (index - matrix * problem.call.rows) * problem.call.row_stride;
    PKG_UNROLL_BY(1)
    for (int first = 0; first < end; first += kInt4RowThreads) {
      const int vector = first + static_cast<int>(threadIdx.x);
      float sum = 0;
      if (vector < vectors) {
        const Vector values =
            *reinterpret_cast<const Vector*>(from + int64_t{vector} * kVector);
        PKG_UNROLL
        for (int i = 0; i < kVector; ++i) {
          sum += convert<float>(values.values[i]);
        }
      }
      PKG_UNROLL
      for (int lanes = 1; lanes < kWarp; lanes *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, sum, lanes);
        sum += lanes < 1 << shift ? other : 0.0f;
      }
      if (vector < end && vector % (1 << shift) == 0) {
        const int group = vector >> shift;
        bfloat16* to = problem.row_sums + index * line +
                       group / kInt4SumGroups * kInt4SumPanel +
                       group % kInt4SumGroups;
        PKG_UNROLL
        for (int part = 0; part < kInt4SumParts; ++part) {
          // Infinity less itself would be NaN.
          const bool is_finite = sum - sum == 0.0f;
          const float bits = is_finite ? first_bits(sum) : sum;
          to[part * kInt4SumGroups] = convert<bfloat16>(bits);
          sum = is_finite ? sum - bits : 0.0f;
        }
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

  // By one thread: the sums, for the first part, and the panels of the part,
  // the last ones as far as there are any.
  __device__ __forceinline__ void copy(const TurnedPlace& at,
                                       Turn& turn) const {
    const int panels = sum_panels(at);
    PKG_UNROLL_BY(1)
    for (int panel = 0; panel < panels; ++panel) {
      product_.copy_panel(problem_.sums, panel * kInt4SumPanel, at.row_begin,
                          matrix_of(at), turn);
    }
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
    Sources from = sources(at);
    Packed packed;
    load(from, packed);
    multiply_zeros(totals, from, sum_panels(at), turn);
    multiply(totals, at, from, packed, turn);
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

  __device__ __forceinline__ int sum_panels(const TurnedPlace& at) const {
    return at.split == 0 ? problem_.sum_panels : 0;
  }

  // What a thread reads of a tile's weight, scales and zeros.
  struct Sources {
    const uint32_t* words;  // the lane's of the warp's first eight columns
    const uint32_t* pairs;  // of the group, and the first of its two columns
    int tiles;              // of eight columns that there are: 0, 1 or 2
    int left;               // words of the summed dimension
    int step;               // of the summed dimension
  };

  __device__ __forceinline__ Sources sources(const TurnedPlace& at) const {
    const int column =
        at.column_begin + static_cast<int>(threadIdx.x) / kWarp * 16;
    const int tiles = (static_cast<int>(call_.columns) - column) / 8;
    const int64_t depth = int64_t{at.begin} * kTurnedSlice;
    const int64_t group = depth >> call_.group_shift;
    return {call_.words + column / 8 * call_.depth + depth,
            reinterpret_cast<const uint32_t*>(call_.scales_and_zeros) +
                group * call_.columns + column + lane() / 4,
            tiles < 0 ? 0 : (tiles < 2 ? tiles : 2),
            static_cast<int>(call_.depth / kWordSteps) - at.begin * kUnits,
            at.begin * kTurnedSlice};
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

  // The scale and the zero of a group from there on, of the thread's i-th
  // column.
  __device__ __forceinline__ uint32_t pair(const Sources& from, int64_t group,
                                           int i) const {
    return i < from.tiles ? from.pairs[group * call_.columns + 8 * i] : 0;
  }

  // Of two groups beside each other, as a word of operand A.
  __device__ __forceinline__ uint32_t zeros(const Sources& from, int group,
                                            int i) const {
    const int groups = static_cast<int>(call_.depth >> call_.group_shift);
    const uint32_t first = group < groups ? pair(from, group, i) : 0;
    const uint32_t second = group + 1 < groups ? pair(from, group + 1, i) : 0;
    return first >> 16 | (second & 0xFFFF0000U);
  }

  // totals += the zeros times the sums of the activations.
  __device__ __forceinline__ void multiply_zeros(Sums& totals,
                                                 const Sources& from,
                                                 int panels, Turn& turn) const {
    PKG_UNROLL_BY(1)
    for (int panel = 0; panel < panels; ++panel) {
      uint32_t words[1][4];
      PKG_UNROLL
      for (int word = 0; word < 4; ++word) {
        words[0][word] =
            zeros(from, panel * kInt4SumGroups + word / 2 * 8 + lane() % 4 * 2,
                  word % 2);
      }
      product_.wait(turn);
      const WarpgroupOperand sums = product_.rows(turn.stage);
      hold_sums(totals.values);
      hold_words(words);
      order_registers();
      PKG_UNROLL
      for (int part = 0; part < kInt4SumParts; ++part) {
        begin_product<bfloat16, Major::depth>(totals.values, words[0],
                                              sums.at(part * 32));
      }
      commit_products();
      wait_for_products<0>();
      hold_sums(totals.values);
      product_.release(turn.stage);
      turn.advance();
    }
  }

  // totals += the part of the summed dimension, of whose first slice the words
  // are loaded.
  __device__ __forceinline__ void multiply(Sums& totals, const TurnedPlace& at,
                                           Sources& from, Packed& packed,
                                           Turn& turn) const {
    Words words[2];
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
      const bool ends_group = (unit + 1) % kGroupUnits == 0;
      const bool ends_slice =
          kGroup < kTurnedSlice && ends_group && unit + 1 >= left;
      if (ends_group) {
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

  // Waits for the sums of a group and adds them, scaled.
  __device__ __forceinline__ void add_group(Sums& totals, Sums& sums,
                                            Sources& from) const {
    float scales[2];
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      scales[i] = element_of_pair<bfloat16>(pair(from, 0, i), 0);
    }
    from.step += kGroup;
    if (kGroup < kTurnedSlice ||
        (from.step & ((1 << call_.group_shift) - 1)) == 0) {
      from.pairs += call_.columns;
    }
    wait_for_products<0>();
    hold_sums(sums.values);
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      PKG_UNROLL
      for (int j = 0; j < Sums::kThreadColumns; ++j) {
        totals.values[i][j] += sums.values[i][j] * scales[i];
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
  wait_for_kernel_before();
  let_next_kernel_begin();
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
