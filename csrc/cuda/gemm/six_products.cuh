// Products of float32 by six products of bfloat16 for one, whose operands are
// sums of three parts (cuda/gemm/bfloat16_parts.cuh). Of the nine products of
// parts the three smallest are below what float32 holds of the result.
//
// Tensor cores cut off what their sums have no room for, where multiply-adds
// round. Over 64 steps that is less than rounding takes; so a panel's products
// are made in registers of their own, the smallest first, and then added to the
// sums, rounded. (An H100, tensor cores summing over all of 4096 steps: errors
// 15 times those of cuBLAS's float32; over 64: 0.56 of them, RMS, for numbers
// about 0, and 1.6 times for numbers from 0 to 1, where cuBLAS divides the
// dimension.)
//
// What it takes: a panel of 64 steps, 128 rows and 128 columns are three stages
// of warpgroup_product.cuh, one for each part, 96 KiB; their products take
// 6 x 2 x 4 x 64 = 3072 cycles of the tensor cores. Shared memory gives them
// 6 x 2 x 4 x (2 + 4) KiB and takes 96 KiB from the copies: 3072 cycles too.
// From the L2 cache a multiprocessor reads 32 bytes a cycle. At the rate that
// products of bfloat16 have, an H100 or H200 makes 165 TFLOP/s, where its
// multiply-adds make 67.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/gemm/bfloat16_parts.cuh"
#include "cuda/gemm/warpgroup_matmul.cuh"
#include "cuda/gemm/warpgroup_product.cuh"

namespace pkg::cuda {

class SixProducts : public WarpgroupProduct<bfloat16, 128> {
  using Base = WarpgroupProduct<bfloat16, 128>;

 public:
  static constexpr int kParts = 3;

  using Base::Base;

  // Copies panels as WarpgroupProduct does, each in three stages.
  __device__ __forceinline__ void copy(const BoxSource& a, const BoxSource& b,
                                       int depth_begin, int panels,
                                       Turn& turn) const {
    PKG_UNROLL_BY(1)
    for (int panel = 0; panel < panels; ++panel) {
      const int depth = depth_begin + panel * kDepth;
      copy_stage(a, b, depth, kLargest, turn);
      copy_stage(a, b, depth, kSmallest, turn);
      copy_stage(a, b, depth, kMiddle, turn);
    }
  }

  // sums = A B over so many panels. By all consumers. While a warpgroup adds
  // its panel up, the other's products are on their way.
  template <Major kMajorA, Major kMajorB>
  __device__ __forceinline__ void multiply(Sums& sums, int panels,
                                           Turn& turn) const {
    const auto begin = [this](Sums& products, int a_stage, int b_stage,
                              bool add = true) {
      begin_products<kMajorA, kMajorB>(products, a_stage, b_stage, add);
    };
    Sums products(0);
    PKG_UNROLL_BY(1)
    for (int panel = 0; panel < panels; ++panel) {
      hold_sums(products.values);
      const int large = next_stage(turn);
      const int small = next_stage(turn);
      begin(products, large, small, false);
      begin(products, small, large);
      commit_products();
      const int middle = next_stage(turn);
      begin(products, large, middle);
      begin(products, middle, large);
      begin(products, middle, middle);
      commit_products();
      wait_for_products<1>();
      release(small);
      begin(products, large, large);
      commit_products();
      wait_for_products<1>();
      release(middle);
      wait_for_products<0>();
      release(large);
      hold_sums(products.values);
      sums.add(products);
    }
  }

 private:
  // Of the parts, in the order in which they lie.
  static constexpr int kLargest = 0;
  static constexpr int kMiddle = 1;
  static constexpr int kSmallest = 2;
};

// Of operands that were split, nothing where something was left of a number.
template <class Epilogue = KeepSums>
__global__ void __launch_bounds__(SixProducts::kThreads, 1)
    matmul_six_products_kernel(
        const __grid_constant__ WarpgroupProblem<bfloat16, float> problem,
        const int32_t* inexact, const __grid_constant__ Epilogue epilogue) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  if constexpr (kCompilesWarpgroups) {
    if (*inexact == 0) {
      multiply_by_warpgroups<bfloat16, SixProducts>(problem, epilogue);
    }
  } else {
    commit_products();  // which traps
  }
}

// An operand and its parts, which lie as it does: along the summed dimension,
// or along the other where only that is dense. `parts` is set later.
struct SplitPlan {
  SplitOperand operand;
  Major major;

  BulkOperand<bfloat16> mapped() const {
    const int64_t pitch = operand.pitch();
    const int64_t lines = operand.lines;
    return {{.data = operand.parts,
             .width = operand.width,
             .lines = lines,
             .matrices = operand.matrices,
             .line_stride = pitch,
             .matrix_stride = lines * pitch,
             .box_lines = SixProducts::kBoxLines,
             .groups = SixProducts::kParts,
             .group_stride = operand.elements_of_part()},
            major};
  }
};

// Nothing where there is no one step from matrix to matrix, or sizes are none
// that the copy engine takes.
inline std::optional<SplitPlan> plan_split(const PanelSource<float>& operand,
                                           int64_t batch_count,
                                           std::optional<int64_t> batch_step) {
  const int64_t outer = operand.outer_size;
  const int64_t depth = operand.depth_size;
  if (!batch_step || std::min({outer, depth, batch_count}) == 0 ||
      std::max({outer, depth, batch_count}) > kMostCounted) {
    return std::nullopt;
  }
  const bool along_depth =
      operand.depth_stride == 1 || operand.outer_stride != 1;
  SplitPlan plan = {};
  plan.major = along_depth ? Major::depth : Major::outer;
  SplitOperand& split = plan.operand;
  split.data = operand.data;
  split.width = along_depth ? depth : outer;
  split.width_stride = along_depth ? operand.depth_stride : 1;
  split.line_stride = along_depth ? operand.outer_stride : operand.depth_stride;
  split.matrix_stride = *batch_step;
  split.matrices = *batch_step == 0 ? 1 : batch_count;
  split.lines = along_depth ? outer : depth;
  split.vectors = tiles_of(split.width, kSplitNeighbours);
  return plan;
}

struct SplitPlans {
  SplitPlan a;
  SplitPlan b;

  int64_t elements() const {
    return a.operand.elements_of_part() + b.operand.elements_of_part();
  }
};

inline std::optional<SplitPlans> plan_splits(
    const MatmulProblem<float, float>& problem) {
  const auto both = both_operands(problem, plan_split);
  if (!both) {
    return std::nullopt;
  }
  return SplitPlans{both->first, both->second};
}

// A panel takes 3072 cycles of the tensor cores, and what they do not reach of
// their rate.
inline WarpgroupPlan plan_six_products(int64_t batch_count, int64_t rows,
                                       int64_t columns, int64_t panels,
                                       int64_t blocks) {
  static_assert(SixProducts::kRows == 128);
  return plan_warpgroups(batch_count, rows, columns, panels, blocks,
                         {{SixProducts::kColumns, 3500}});
}

// What splitting so many elements takes: the bytes, and three more kernels, of
// which one makes the product by multiply-adds where something was left.
inline int64_t cycles_of_splitting(int64_t elements) {
  constexpr int64_t kLaunches = 15000;
  return kLaunches + 10 * elements / kMemoryBytesOfCycle;
}

// What multiply-adds take at three quarters of their rate.
inline int64_t cycles_of_multiply_adds(int64_t batch_count, int64_t rows,
                                       int64_t columns, int64_t depth,
                                       int64_t multiprocessors) {
  constexpr int64_t kACycle = 128 * 3 / 4;
  return batch_count * rows * columns / multiprocessors * depth / kACycle;
}

}  // namespace pkg::cuda
