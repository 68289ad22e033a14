// rowwise_scaled_linear for up to 16 rows, as in decoding, where reading the
// weight is all that takes time.
//
// Algorithm: a block takes 32 columns, and its warps take turns of 128 values
// of the summed dimension. Nothing passes through shared memory on the way: a
// lane loads 16 packed bytes of each of four columns, and of the rows the
// values that meet them, and they are the words of operand A, the weight, and
// of operand B, the rows, of four products: the summed dimension in an order in
// which each lane's values are neighbours. While it multiplies those of one
// turn, the next are on their way. The warps' sums are added up in shared
// memory, in one order.
//
// 2 m n k operations; n k / 2 bytes of the weight, once, and for each 32
// columns the rows, m k (s4s4: m k / 2) bytes, from the caches. Eight warps
// have 32 KiB of the weight on their way at the most; 18 KiB of shared memory
// and 126 to 128 registers leave room for two blocks in a multiprocessor. A
// warp issues 258 instructions (s4s4: 271) for 4 KiB of the weight, 68 cycles
// of a multiprocessor, in which 2 TB/s are 0.9 KiB of an A100's, 4.8 TB/s 1.3
// KiB of an H200's.
//
// Dense operands of whole vectors only; other ones are the tiles'
// (cuda/int4/rowwise.cuh), as many rows are.
#pragma once

#include <cstdint>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/mma_places.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/int4/rowwise.cuh"
#include "cuda/int4/rowwise_scale.cuh"
#include "cuda/int4/rowwise_slice.cuh"

namespace pkg::cuda {

constexpr int kFewRows = 16;
constexpr int kFewColumns = 32;
constexpr int kFewThreads = 256;
constexpr int kFewWarps = kFewThreads / 32;
// Columns by which the sums of two rows lie apart: in different banks.
constexpr int kFewPitch = kFewColumns + 4;
// Pairs of a warp's turns, each a slice, that no sum overflows by.
constexpr int kFewMostPairs = kRowwiseMostSlices / 2;

// Whether the kernel of few rows takes the problem, of which divide() is done.
template <bool kPacked>
bool has_few_rows(const RowwiseScaledProblem<kPacked>& problem) {
  return problem.rows > 0 && problem.rows <= kFewRows &&
         problem.input_is_dense && problem.weight_is_dense &&
         problem.bytes % 16 == 0;
}

template <int kWords>
__device__ __forceinline__ void load_words(const int8_t* from, bool exists,
                                           uint32_t* words) {
  PKG_UNROLL
  for (int i = 0; i < kWords; i += 4) {
    Packet<uint32_t, 4> packet = {};
    if (exists) {
      packet = reinterpret_cast<const Packet<uint32_t, 4>*>(from)[i / 4];
    }
    PKG_UNROLL
    for (int j = 0; j < 4; ++j) {
      words[i + j] = packet.values[j];
    }
  }
}

// Lines of 8 columns or rows that a warp multiplies.
constexpr int kFewColumnParts = kFewColumns / 8;
constexpr int kFewRowParts = kFewRows / 8;

// A lane's values of a turn.
template <bool kPacked>
struct FewRowsTurn {
  static constexpr int kRowWords = kPacked ? 4 : 8;
  uint32_t columns[kFewColumnParts][4];
  uint32_t rows[kFewRowParts][kRowWords];

  // From byte `at` of a column on, zeros beyond its end.
  __device__ __forceinline__ void load(
      const int8_t* const (&from_columns)[kFewColumnParts],
      const int8_t* const (&from_rows)[kFewRowParts], int row_parts, int64_t at,
      int64_t bytes) {
    PKG_UNROLL
    for (int i = 0; i < kFewColumnParts; ++i) {
      load_words<4>(from_columns[i] + at, at < bytes, columns[i]);
    }
    PKG_UNROLL
    for (int i = 0; i < kFewRowParts; ++i) {
      load_words<kRowWords>(from_rows[i] + (kPacked ? at : 2 * at),
                            at < bytes && i < row_parts, rows[i]);
    }
  }

  // Operand B of the `step`-th of four products.
  __device__ __forceinline__ void operand(int part, int step,
                                          uint32_t (&b)[2]) const {
    if constexpr (kPacked) {
      b[0] = even_values(rows[part][step]);
      b[1] = odd_values(rows[part][step]);
    } else {
      b[0] = even_bytes(rows[part][2 * step], rows[part][2 * step + 1]);
      b[1] = odd_bytes(rows[part][2 * step], rows[part][2 * step + 1]);
    }
  }
};

// The warp's sums: columns are the rows of mma.
struct FewRowsSums {
  uint32_t values[kFewColumnParts / 2][kFewRowParts][4] = {};

  template <class Turn>
  __device__ __forceinline__ void multiply(const Turn& turn, int row_parts) {
    PKG_UNROLL
    for (int step = 0; step < 4; ++step) {
      uint32_t b[kFewRowParts][2];
      PKG_UNROLL
      for (int part = 0; part < kFewRowParts; ++part) {
        turn.operand(part, step, b[part]);
      }
      PKG_UNROLL
      for (int i = 0; i < kFewColumnParts / 2; ++i) {
        const uint32_t upper = turn.columns[2 * i][step];
        const uint32_t lower = turn.columns[2 * i + 1][step];
        const uint32_t a[4] = {even_values(upper), even_values(lower),
                               odd_values(upper), odd_values(lower)};
        PKG_UNROLL
        for (int part = 0; part < kFewRowParts; ++part) {
          if (part < row_parts) {
            auto& sums = values[i][part];
            multiply_add<int8_t>(sums[0], sums[1], sums[2], sums[3], a,
                                 b[part]);
          }
        }
      }
    }
  }

  // To panel[row][column], shifted back, or added to what is there; then they
  // are zero.
  template <class Panel>
  __device__ __forceinline__ void move_to(Panel&& panel, int shift,
                                          bool is_first) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    PKG_UNROLL
    for (int i = 0; i < kFewColumnParts / 2; ++i) {
      PKG_UNROLL
      for (int part = 0; part < kFewRowParts; ++part) {
        PKG_UNROLL
        for (int sum = 0; sum < 4; ++sum) {
          const MatrixPlace at = MmaPlaces<1>::sum(lane, sum);
          auto&& to = panel[8 * part + at.column][16 * i + at.row];
          uint32_t& value = values[i][part][sum];
          const auto moved =
              static_cast<uint32_t>(static_cast<int32_t>(value) >> shift);
          to = is_first ? moved : to + moved;
          value = 0;
        }
      }
    }
  }
};

// The sums of a warp's turns, as panel[row][column].
template <bool kPacked, class Panel>
__device__ __forceinline__ void multiply_turns(
    const RowwiseScaledProblem<kPacked>& problem, int64_t column_begin,
    Panel&& panel) {
  constexpr int kSlice = kRowwiseDepth / 2;  // bytes
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row_parts = problem.rows > 8 ? 2 : 1;
  // Lines beyond the operands are the last ones: nothing more is read for them,
  // and their sums are dropped.
  const int8_t* columns[kFewColumnParts];
  const int8_t* rows[kFewRowParts];
  PKG_UNROLL
  for (int i = 0; i < kFewColumnParts; ++i) {
    const int64_t column = column_begin + 8 * i + lane / 4;
    columns[i] =
        problem.column(column < problem.columns ? column : problem.columns - 1);
  }
  PKG_UNROLL
  for (int i = 0; i < kFewRowParts; ++i) {
    const int64_t row = 8 * i + lane / 4;
    rows[i] = problem.row(row < problem.rows ? row : problem.rows - 1);
  }
  FewRowsSums sums;
  FewRowsTurn<kPacked> first;
  FewRowsTurn<kPacked> second;
  int64_t at = warp * kSlice + lane % 4 * 16;
  const auto load = [&](FewRowsTurn<kPacked>& turn) {
    turn.load(columns, rows, row_parts, at, problem.bytes);
    at += kFewWarps * kSlice;
  };
  load(first);
  const int pairs = static_cast<int>(tiles_of(problem.slices(), 2 * kFewWarps));
  int pair = 0;
  do {
    load(second);
    sums.multiply(first, row_parts);
    load(first);
    sums.multiply(second, row_parts);
    ++pair;
    if (pair % kFewMostPairs == 0 || pair >= pairs) {
      sums.move_to(panel, problem.kShift, pair <= kFewMostPairs);
    }
  } while (pair < pairs);
}

template <bool kPacked>
__global__ void __launch_bounds__(kFewThreads, 2) rowwise_few_rows_kernel(
    const __grid_constant__ RowwiseScaledProblem<kPacked> problem) {
  let_next_kernel_begin();
  PKG_SHARED(uint32_t, warp_sums, [kFewWarps][kFewRows][kFewPitch]);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int64_t index = blockIdx.x;
       index < tiles_of(problem.columns, kFewColumns); index += gridDim.x) {
    multiply_turns(problem, index * kFewColumns, warp_sums[warp]);
    __syncthreads();
    const int64_t column = index * kFewColumns + lane;
    for (int row = warp; row < problem.rows; row += kFewWarps) {
      uint32_t total = 0;
      PKG_UNROLL
      for (int each = 0; each < kFewWarps; ++each) {
        total += warp_sums[each][row][lane];
      }
      if (column < problem.columns) {
        const int64_t place = row * problem.columns + column;
        const auto sum = static_cast<int32_t>(total);
        if (problem.parts != nullptr) {
          problem.parts[place] = sum;
        } else {
          store_floating<float>(
              problem.output, problem.output_type, place,
              scaled_sum(sum, problem.template row_scale<float>(row),
                         problem.template column_scale<float>(column),
                         problem.template bias_of<float>(column)));
        }
      }
    }
    __syncthreads();  // all are done with the sums
  }
}

}  // namespace pkg::cuda
