// All gradients of attention by one kernel with multiply-adds, of float32 and
// heads of up to 128: those of key and value as grad_key_value_panels.cuh makes
// them and, from the gradients of the scores that are there, that of the query
// too. 5 products in place of the 7 of two kernels, in the order and by the
// turns of joint_gradients_mma.cuh, whose reasons are those here.
//
// A block of 64 keys makes its part of the gradient of 64 queries before it
// asks for its turn: then it only loads the sums so far, adds and stores, and
// those that begin with the same queries wait for no more than that. Of the
// query's product either group of threads makes the sums over 32 keys, 8 x 8 of
// a thread, from the gradients of scores as the key's product has them; then
// each adds up those of 32 queries.
//
// By count, for 64 queries, 64 keys and heads of 128, a multiprocessor takes
//                  multiply-adds, cycles      L2
//                    A100       H200
//   two kernels     57344      28672       288 KiB
//   this one        40960      20480       256 KiB
// L2, as far as panels come from there: 6 bytes a cycle of an A100 and 13 of an
// H200, of 47 that an A100's share has; 64 KiB are sums, loaded and stored, for
// the keys and values that the query's own kernel would load. Shared memory
// takes no more cycles than an H200's multiply-adds, of either way. A turn
// takes two ways to L2 and back, some 1200 cycles in which the block multiplies
// nothing: 0.74 of the time of two kernels on an A100, 0.76 on an H200 (heads
// of 64: 0.76, 0.80). No register spills (nvcc 13.0). (Nothing of this was
// measured.)
//
// float64 has no such kernel: its numbers take two registers, of which a third
// gradient's sums would be 64 more. Heads above 128 have tiles of the gradients
// that repeat the scores, in whichever kernel.
#pragma once

#include <cstdint>

#include "cuda/attention/grad_key_value_panels.cuh"
#include "cuda/attention/joint_gradients.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/turns.cuh"
#include "cuda/gemm/shared_panels.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/tile_product.cuh"

namespace pkg::cuda {

// Of one tile of keys and one of queries, the part of the query's gradient,
// which is added to those of other keys in turn. By a whole block.
template <class Element, class Sums>
__device__ __forceinline__ void add_in_turn(
    const AttentionJointGradients<Element>& call, int64_t batch,
    int64_t row_begin, int column_tile, Sums& sums) {
  const AttentionProblem<Element>& problem = call.backward.problem;
  const AttentionExtent extent = problem.extent(batch);
  const JointTurn turn =
      joint_turn<kJointKeys<Element>>(extent, row_begin, column_tile);
  const TurnCounter counter(call.turns + 1 + batch * call.row_tiles() +
                            row_begin / kJointRows);
  float* const memory = call.sums + call.sum_tile(batch, extent, row_begin) *
                                        kJointRows * Sums::kTileColumns;
  if (turn.index > 0) {
    if (threadIdx.x == 0) {
      counter.wait(turn.index);
    }
    __syncthreads();
    Sums before(0);
    load_sums(before, memory);
    sums.add(before);
  }
  if (turn.is_last) {
    sums.scale(static_cast<float>(problem.scale));
    store_tile(sums,
               call.grad_query.row(problem.batch, batch, extent.first_row),
               extent.rows, problem.head_size, call.grad_query.row_stride,
               row_begin, 0);
    return;
  }
  store_sums(sums, memory);
  __syncthreads();
  if (threadIdx.x == 0) {
    counter.pass_to(turn.index + 1);
  }
}

template <class Element, int kWidth>
class JointGradientsPanels {
 public:
  using Keys = GradKeyValuePanels<Element, kWidth>;
  static constexpr int kTile = kAttentionTile;
  static constexpr int kThreads = Keys::kThreads;
  static constexpr int kSharedBytes = Keys::kSharedBytes;
  // Of a multiprocessor, as far as registers and shared memory go: four warps
  // of heads of 64 wait for their turn while four others multiply.
  static constexpr int kBlocks = kWidth <= 64 ? 2 : 1;
  // Of the whole block.
  using Sums =
      Tile<float, kTile, kWidth, GridThread<16, Keys::kGroupThreads / 8>>;
  static_assert(Sums::Thread::kThreads == kThreads);
  static_assert(kJointKeys<Element> == kTile && kJointRows == kTile);

  __device__ __forceinline__ explicit JointGradientsPanels(
      const AttentionJointGradients<Element>& call)
      : call_(call), keys_(call) {}

  // The gradients of a tile of keys, and what it adds to those of queries.
  __device__ __forceinline__ void make(int64_t owned, int column_tile) const {
    keys_.make(owned, int64_t{column_tile} * kTile, 0,
               [&](int64_t batch, int64_t row_begin) {
                 add_query(batch, row_begin, column_tile);
               });
  }

 private:
  static constexpr int kHalf = kTile / 2;

  __device__ __forceinline__ void add_query(int64_t batch, int64_t row_begin,
                                            int column_tile) const {
    const AttentionProblem<Element>& problem = call_.backward.problem;
    const AttentionExtent extent = problem.extent(batch);
    const int first = Keys::group() * kHalf;
    typename Keys::Sums half(0);
    multiply_shared<Keys::kDepth, kHalf>(
        half, SharedColumns(keys_.grad_scores(), first),
        problem.key.by_column(problem.batch, batch, extent.first_column,
                              extent.columns, problem.head_size),
        0, int64_t{column_tile} * kTile + first, keys_.wide_panels());
    Sums sums = add_halves(half);
    add_in_turn(call_, batch, row_begin, column_tile, sums);
  }

  // Either group has the sums over 32 keys, of which it gives those of 32
  // queries to the other and gets the others', from the thread that has the
  // same places.
  __device__ __forceinline__ Sums
  add_halves(const typename Keys::Sums& half) const {
    constexpr int kRows = Sums::kThreadRows;
    constexpr int kColumns = Sums::kThreadColumns;
    static_assert(2 * kRows == Keys::Sums::kThreadRows &&
                  kColumns == Keys::Sums::kThreadColumns);
    const SharedSpan<float> memory = keys_.weights_memory();
    const int thread = computed_here(static_cast<int>(threadIdx.x));
    const bool is_first = thread < Keys::kGroupThreads;
    const auto place = [](int i, int j, int of_thread) {
      return (i * kColumns + j) * kThreads + of_thread * kFragment;
    };
    const int other =
        is_first ? thread + Keys::kGroupThreads : thread - Keys::kGroupThreads;
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        memory[place(i, j / kFragment * kFragment, other) + j % kFragment] =
            chosen(is_first, half.values[i + kRows][j], half.values[i][j]);
      }
    }
    __syncthreads();
    Sums sums(0);
    PKG_UNROLL
    for (int i = 0; i < kRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const float own =
            chosen(is_first, half.values[i][j], half.values[i + kRows][j]);
        sums.values[i][j] =
            own +
            memory[place(i, j / kFragment * kFragment, thread) + j % kFragment];
      }
    }
    __syncthreads();
    return sums;
  }

  const AttentionJointGradients<Element>& call_;
  Keys keys_;
};

template <class Element, int kWidth>
__global__ void __launch_bounds__(
    JointGradientsPanels<Element, kWidth>::kThreads)
    attention_joint_gradients_panels_kernel(
        const __grid_constant__ AttentionJointGradients<Element> call) {
  using Panels = JointGradientsPanels<Element, kWidth>;
  for_joint_tiles(call, [&](int64_t owned, int column_tile) {
    Panels(call).make(owned, column_tile);
  });
  zero_unseen_queries<typename Panels::Sums>(call);
}

}  // namespace pkg::cuda
