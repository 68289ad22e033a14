// rowwise_scaled_linear_s8s4 and _s4s4 for many rows, by products of
// warpgroups; for compute capability 9.0 alone.
//
// Algorithm: that of cuda/int4/turned_product.cuh. Of a column of the weight a
// slice is 64 packed bytes: each of the four lanes that share it loads 16 of
// them, a slice ahead, and they exchange what they have until each has of every
// 16 bytes, the steps of a product, the two and two whose values operand A has
// in it. Those become int8 by masks, 16 times themselves, and are put in their
// order by byte permutations, since the other operand, rows of int8 that the
// copy engine brings, has its own. Packed rows are written out as int8 before,
// 16 times themselves too, by a kernel of its own; the weight, of which there
// is more, is not. So sums are 16 or 256 times too large, as those of
// cuda/int4/rowwise.cuh, and are scaled as there: from the same sums come the
// same bits.
//
// Tiles: 128 columns of the weight by 256 rows of the input, six stages of 32
// KiB; or, where rows are few, by 128, eight of 16. A thread of the two
// warpgroups has 128 sums, or 64.
//
// Operations: 2 M N K. For a tile of 256 rows and a slice a multiprocessor of
// an H100 takes
// - tensor cores: 2 x 128 x 256 x 128 operations at 8192 a cycle: 1024 cycles;
// - shared memory and L1, at 128 bytes a cycle: 32 KiB that are copied and read
//   once by either warpgroup, 8 KiB of the weight: 832;
// - instructions of eight warps, four a cycle: 154 x 8 / 4 = 308.
// Half of that for 128 rows, but for the weight's part. Bytes: from the L2
// cache 40 KiB for a tile and a slice, 40 a cycle.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/element_type.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/warpgroup_matmul.cuh"
#include "cuda/int4/rowwise.cuh"
#include "cuda/int4/rowwise_scale.cuh"
#include "cuda/int4/rowwise_slice.cuh"
#include "cuda/int4/turned_product.cuh"

namespace pkg::cuda {

struct RowwiseWarpgroupProblem : RowwiseScaling {
  TensorMap input;
  const int8_t* weight;
  int64_t weight_column_stride;
  int bytes;  // of packed values in a column
  int shift;  // how far sums are from those of the values, in bits
  TurnedTiles tiles;
};

// Whether warpgroups take the problem, of which divide() is done, if its rows
// can be copied in bulk.
template <bool kPacked>
bool suits_warpgroups(const RowwiseScaledProblem<kPacked>& problem) {
  return problem.weight_is_dense && problem.bytes > 0 &&
         problem.bytes % 16 == 0 && problem.slices() <= kRowwiseMostSlices &&
         problem.rows > 0 && problem.rows <= kMostCounted &&
         problem.columns > 0 && problem.columns % 8 == 0 &&
         problem.columns <= kMostCounted;
}

// Rows of int8 as the copy engine sees them, or nothing where it cannot.
inline std::optional<BulkOperand<int8_t>> rowwise_bulk_rows(const int8_t* data,
                                                            int64_t rows,
                                                            int64_t inner,
                                                            int64_t row_stride,
                                                            int64_t stride) {
  return bulk_operand<int8_t>({data, rows, inner, row_stride, stride}, 1, 0);
}

inline std::optional<BulkOperand<int8_t>> rowwise_bulk_input(
    const RowwiseScaledProblem<false>& problem) {
  if (problem.rows_of.count > 1) {
    return std::nullopt;
  }
  return rowwise_bulk_rows(problem.input, problem.rows, 2 * problem.bytes,
                           problem.input_strides.strides[0],
                           problem.input_stride);
}

// Tiles of the rows that take the fewest cycles on so many multiprocessors.
inline TurnedTiles plan_rowwise_warpgroups(int64_t rows, int64_t columns,
                                           int64_t inner, int64_t blocks) {
  const TurnedPlan low = plan_turned(1, rows, columns, inner, 128, 512, blocks);
  const TurnedPlan high =
      plan_turned(1, rows, columns, inner, 256, 1024, blocks);
  return high.tiles.pieces == 0 || low.cycles < high.cycles ? low.tiles
                                                            : high.tiles;
}

// The problem for warpgroups, but for its map and the memory of its parts.
template <bool kPacked>
RowwiseWarpgroupProblem rowwise_warpgroup_problem(
    const RowwiseScaledProblem<kPacked>& problem, const TurnedTiles& tiles) {
  RowwiseWarpgroupProblem result = {};
  static_cast<RowwiseScaling&>(result) = problem;
  result.splits = tiles.splits;
  result.weight = problem.weight;
  result.weight_column_stride = problem.weight_column_stride;
  result.bytes = static_cast<int>(problem.bytes);
  result.shift = RowwiseScaledProblem<kPacked>::kShift;
  result.tiles = tiles;
  return result;
}

// Packed rows as int8, 16 times themselves: a block has a row, a thread eight
// bytes of it at a time, of which it writes sixteen.
constexpr int kWidenThreads = 128;

template <class Problem>
__global__ void __launch_bounds__(kWidenThreads)
    rowwise_widen_kernel(const __grid_constant__ Problem problem,
                         int8_t* widened) {
  let_next_kernel_begin();
  constexpr int kVector = 8;
  for (int64_t row = blockIdx.x; row < problem.rows; row += gridDim.x) {
    const int8_t* from = problem.row(row);
    int8_t* to = widened + row * 2 * problem.bytes;
    for (int64_t place = threadIdx.x * kVector; place < problem.bytes;
         place += kWidenThreads * kVector) {
      const auto packed =
          *reinterpret_cast<const Packet<uint32_t, 2>*>(from + place);
      Packet<uint32_t, 4> values;
      PKG_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t even = even_values(packed.values[i]);
        const uint32_t odd = odd_values(packed.values[i]);
        values.values[2 * i] = first_pairs(even, odd);
        values.values[2 * i + 1] = last_pairs(even, odd);
      }
      *reinterpret_cast<Packet<uint32_t, 4>*>(to + 2 * place) = values;
    }
  }
}

template <int kTileRows>
class RowwiseWarpgroups {
 public:
  using Product = TurnedProduct<int8_t, kTileRows>;
  using Turn = typename Product::Turn;
  using Thread = typename Product::Thread;
  using Sums = typename Product::Sums;
  using Words = typename Product::Words;

  __device__ __forceinline__ RowwiseWarpgroups(
      const RowwiseWarpgroupProblem& problem, const Product& product)
      : problem_(problem), product_(product) {}

  // By one thread.
  __device__ __forceinline__ void copy(const TurnedPlace& at,
                                       Turn& turn) const {
    PKG_UNROLL_BY(1)
    for (int slice = at.begin; slice < at.end; ++slice) {
      product_.copy_panel(problem_.input, slice * kTurnedSlice, at.row_begin, 0,
                          turn);
    }
  }

  __device__ __forceinline__ void compute(const TurnedPlace& at,
                                          Turn& turn) const {
    Sums sums(0);
    multiply(sums, at, turn);
    store(sums, at);
  }

 private:
  static constexpr int kSliceBytes = kTurnedSlice / 2;  // packed
  static_assert(Product::kPanel == kTurnedSlice);
  // Of both columns of a lane: first what it has loaded of the slice, then what
  // it needs for each of four products.
  using Packed = uint32_t[2][4];

  __device__ __forceinline__ static int lane() {
    return static_cast<int>(threadIdx.x) % kWarp;
  }

  struct Source {
    const int8_t* bytes;  // of the lane, in the first of its columns
    int tiles;            // of eight columns that there are: 0, 1 or 2
    int left;             // bytes from there on
  };

  __device__ __forceinline__ Source source(const TurnedPlace& at) const {
    const int column =
        at.column_begin + static_cast<int>(threadIdx.x) / kWarp * 16;
    const int tiles = (static_cast<int>(problem_.columns) - column) / 8;
    const int place = at.begin * kSliceBytes + lane() % 4 * 16;
    return {problem_.weight +
                (column + lane() / 4) * problem_.weight_column_stride + place,
            tiles < 0 ? 0 : (tiles < 2 ? tiles : 2), problem_.bytes - place};
  }

  // Zeros beyond the weight.
  __device__ __forceinline__ void load(const Source& from,
                                       Packed& packed) const {
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      Packet<uint32_t, 4> vector = {};
      if (i < from.tiles && from.left > 0) {
        vector = *reinterpret_cast<const Packet<uint32_t, 4>*>(
            from.bytes + i * 8 * problem_.weight_column_stride);
      }
      PKG_UNROLL
      for (int word = 0; word < 4; ++word) {
        packed[i][word] = vector.values[word];
      }
    }
  }

  // Of 16 bytes the lane c of four needs bytes 2 c and 2 c + 1, and those that
  // are eight further on.
  __device__ __forceinline__ static void exchange(Packed& packed) {
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t words[4];
      PKG_UNROLL
      for (int word = 0; word < 4; word += 2) {
        words[word] = low_halves(packed[i][word / 2], packed[i][2 + word / 2]);
        words[word + 1] =
            high_halves(packed[i][word / 2], packed[i][2 + word / 2]);
      }
      transpose_quads(words);
      PKG_UNROLL
      for (int word = 0; word < 4; ++word) {
        packed[i][word] = words[word];
      }
    }
  }

  // Operand A of half a slice.
  __device__ __forceinline__ static void make_words(const Packed& packed,
                                                    int half, Words& words) {
    PKG_UNROLL
    for (int step = 0; step < 2; ++step) {
      PKG_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t both = packed[i][2 * half + step];
        const uint32_t even = even_values(both);
        const uint32_t odd = odd_values(both);
        words[step][i] = first_pairs(even, odd);
        words[step][i + 2] = last_pairs(even, odd);
      }
    }
  }

  // sums = the part of the summed dimension.
  __device__ __forceinline__ void multiply(Sums& sums, const TurnedPlace& at,
                                           Turn& turn) const {
    Source from = source(at);
    Packed packed;
    Words words[2];
    load(from, packed);
    exchange(packed);
    make_words(packed, 0, words[0]);
    PKG_UNROLL_BY(1)
    for (int slice = at.begin; slice < at.end; ++slice) {
      Packed next;
      from.bytes += kSliceBytes;
      from.left = slice + 1 < at.end ? from.left - kSliceBytes : 0;
      load(from, next);
      product_.wait(turn);
      product_.begin(sums, words[0], turn.stage, 0, slice > at.begin);
      wait_for_products<1>();
      if (slice > at.begin) {
        product_.release(Product::before(turn));
      }
      make_words(packed, 1, words[1]);
      product_.begin(sums, words[1], turn.stage, 1, true);
      wait_for_products<1>();
      exchange(next);
      make_words(next, 0, words[0]);
      PKG_UNROLL
      for (int i = 0; i < 8; ++i) {
        packed[i / 4][i % 4] = next[i / 4][i % 4];
      }
      turn.advance();
    }
    wait_for_products<0>();
    hold_sums(sums.values);
    product_.release(Product::before(turn));
  }

  __device__ __forceinline__ int32_t sum_of(const Sums& sums, int i,
                                            int j) const {
    return static_cast<int32_t>(sums.values[i][j]) >> problem_.shift;
  }

  __device__ __forceinline__ void store(const Sums& sums,
                                        const TurnedPlace& at) const {
    if (problem_.parts != nullptr) {
      store_turned<Sums>(
          problem_.parts + at.split * problem_.rows * problem_.columns,
          problem_.rows, problem_.columns, at,
          [&](int i, int j) { return sum_of(sums, i, j); });
      return;
    }
    switch (problem_.output_type) {
      case ElementType::float16:
        return store_scaled(sums, static_cast<float16*>(problem_.output), at);
      case ElementType::bfloat16:
        return store_scaled(sums, static_cast<bfloat16*>(problem_.output), at);
      default:
        return store_scaled(sums, static_cast<float*>(problem_.output), at);
    }
  }

  // The scales of the tile's rows are loaded once, by one lane of each warp.
  template <class Element>
  __device__ __forceinline__ void store_scaled(const Sums& sums,
                                               Element* output,
                                               const TurnedPlace& at) const {
    const Thread thread;
    float of_rows[kTileRows / kWarp];
    PKG_UNROLL
    for (int i = 0; i < kTileRows / kWarp; ++i) {
      const int64_t row = at.row_begin + i * kWarp + thread.lane;
      of_rows[i] =
          row < problem_.rows ? problem_.template row_scale<float>(row) : 0.0f;
    }
    float of_columns[2];
    float biases[2];
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int64_t column = at.column_begin + thread.row(i);
      const bool exists = column < problem_.columns;
      of_columns[i] =
          exists ? problem_.template column_scale<float>(column) : 0.0f;
      biases[i] = exists ? problem_.template bias_of<float>(column) : 0.0f;
    }
    store_turned<Sums>(
        output, problem_.rows, problem_.columns, at, [&](int i, int j) {
          const float row_scale =
              __shfl_sync(0xffffffffu, of_rows[j / 8],
                          j / 2 % 4 * 8 + thread.lane % 4 * 2 + j % 2);
          return scaled_sum(sum_of(sums, i, j), row_scale, of_columns[i],
                            biases[i]);
        });
  }

  const RowwiseWarpgroupProblem& problem_;
  const Product& product_;
};

template <int kTileRows>
__global__ void __launch_bounds__(384, 1) rowwise_warpgroups_kernel(
    const __grid_constant__ RowwiseWarpgroupProblem problem) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  if constexpr (kCompilesWarpgroups) {
    using Block = RowwiseWarpgroups<kTileRows>;
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
