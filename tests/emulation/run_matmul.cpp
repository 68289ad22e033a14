#include <vector>

#include "batches.h"
#include "cuda/gemm/matmul.cuh"
#include "program.h"
#include "warpgroups.h"

namespace pkg::emulation {
namespace {

template <class Input, class Output>
cuda::MatmulProblem<Input, Output> problem_of(const Request& request) {
  return {
      .a = request.buffer<Input>("a"),
      .b = request.buffer<Input>("b"),
      .c = request.buffer<Output>("c"),
      .rows = request.integer("rows"),
      .columns = request.integer("columns"),
      .depth = request.integer("depth"),
      .a_row_stride = request.integers("a_strides").at(0),
      .a_depth_stride = request.integers("a_strides").at(1),
      .b_depth_stride = request.integers("b_strides").at(0),
      .b_column_stride = request.integers("b_strides").at(1),
      .batch_count = count_of(request.integers("batch")),
      .batch = batch_sizes(request.integers("batch")),
      .a_batch_strides = batch_strides(request.integers("a_batch_strides")),
      .b_batch_strides = batch_strides(request.integers("b_batch_strides")),
  };
}

// The parts of a product that is divided, into `sums`.
template <class Input, class Output, class Sum>
void run_parts(const Request& request,
               const cuda::MatmulProblem<Input, Output>& problem,
               int64_t split_depth, Sum* sums) {
  if constexpr (cuda::kHasWarpgroupProduct<Input>) {
    if (request.integer("tile_columns") != 0) {
      constexpr int kDepth = cuda::WarpgroupProduct<Input, 128>::kDepth;
      launch_warpgroups(request, problem, split_depth / kDepth, sums,
                        cuda::KeepSums{});
      return;
    }
  }
  auto parts = cuda::divided<Input, Output, Sum>(problem, split_depth, sums);
  const int64_t pieces = parts.count_tiles();
  launch_blocks(request, pieces,
                cuda::launch_shape<cuda::BlockProduct<Input>>(),
                cuda::matmul_kernel<Input, Sum>, parts, cuda::KeepSums{});
}

template <class Input, class Output>
void run(const Request& request) {
  auto problem = problem_of<Input, Output>(request);
  const int64_t tiles = problem.count_tiles();
  const int64_t split_depth = request.integer("split_depth");
  if (split_depth > 0) {
    using Sum = cuda::StoredSum<Input>;
    const int64_t splits = (problem.depth + split_depth - 1) / split_depth;
    std::vector<Sum> sums(static_cast<size_t>(problem.batch_count * splits *
                                              problem.rows * problem.columns));
    run_parts(request, problem, split_depth, sums.data());
    launch_blocks(request, tiles, cuda::BlockProduct<Input>::kThreads,
                  cuda::matmul_sum_kernel<Input, Output>,
                  cuda::sum_of(problem, sums.data(), splits), cuda::KeepSums{});
    return;
  }
  if constexpr (cuda::kHasWarpgroupProduct<Input>) {
    if (request.integer("tile_columns") != 0) {
      constexpr int kDepth = cuda::WarpgroupProduct<Input, 128>::kDepth;
      launch_warpgroups(request, problem, cuda::tiles_of(problem.depth, kDepth),
                        problem.c, cuda::KeepSums{});
      return;
    }
  }
  launch_blocks(request, tiles, cuda::launch_shape<cuda::BlockProduct<Input>>(),
                cuda::matmul_kernel<Input, Output>, problem, cuda::KeepSums{});
}

// How a product of so many tiles and panels is divided for so many blocks.
void run_panels_of_split(const Request& request) {
  const auto& sizes = request.integers("sizes");
  *request.buffer<int64_t>("panels") =
      cuda::panels_of_split(sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3));
}

// How a product of such sizes is shared out among the warpgroups of so many
// blocks.
void run_plan_of_warpgroups(const Request& request) {
  const auto& sizes = request.integers("sizes");
  const cuda::WarpgroupPlan plan = cuda::plan_warpgroups(
      sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), sizes.at(4));
  int64_t* const found = request.buffer<int64_t>("plan");
  found[0] = plan.tile_columns;
  found[1] = plan.panels_each;
}

// What the copy engine takes: 1 for an operand whose lines are rows or columns,
// 2 for one whose lines are steps, 0 for none; and its matrices.
void run_bulk_operands(const Request& request) {
  const auto operands =
      cuda::bulk_operands(problem_of<cuda::bfloat16, float>(request));
  int64_t* const found = request.buffer<int64_t>("found");
  if (operands) {
    found[0] = operands->a.major == cuda::Major::outer ? 2 : 1;
    found[1] = operands->b.major == cuda::Major::outer ? 2 : 1;
    found[2] = operands->a.tensor.matrices;
    found[3] = operands->b.tensor.matrices;
  }
}

}  // namespace

bool run_matmul(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "panels_of_split") {
    run_panels_of_split(request);
    return true;
  }
  if (kernel == "plan_of_warpgroups") {
    run_plan_of_warpgroups(request);
    return true;
  }
  if (kernel == "bulk_operands") {
    run_bulk_operands(request);
    return true;
  }
  if (kernel != "matmul") {
    return false;
  }
  const std::string types =
      request.text("input_type") + " " + request.text("output_type");
  if (types == "float64 float64") {
    run<double, double>(request);
  } else if (types == "float32 float32") {
    run<float, float>(request);
  } else if (types == "float16 float16") {
    run<cuda::float16, cuda::float16>(request);
  } else if (types == "float16 float32") {
    run<cuda::float16, float>(request);
  } else if (types == "bfloat16 bfloat16") {
    run<cuda::bfloat16, cuda::bfloat16>(request);
  } else if (types == "bfloat16 float32") {
    run<cuda::bfloat16, float>(request);
  } else if (types == "int8 int32") {
    run<int8_t, int32_t>(request);
  } else {
    fail("matmul has no kernel for " + types);
  }
  return true;
}

}  // namespace pkg::emulation
