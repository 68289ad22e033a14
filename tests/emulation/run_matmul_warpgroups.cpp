#include <vector>

#include "matmul_request.h"
#include "program.h"
#include "warpgroups.h"

namespace pkg::emulation {
namespace {

template <class Input, class Output>
void run(const Request& request) {
  auto problem = problem_of<Input, Output>(request);
  constexpr int kDepth = cuda::WarpgroupProduct<Input, 128>::kDepth;
  const int64_t split_depth = request.integer("split_depth");
  if (split_depth == 0) {
    launch_warpgroups(request, problem, cuda::tiles_of(problem.depth, kDepth),
                      problem.c, cuda::KeepSums{});
    return;
  }
  using Sum = cuda::StoredSum<Input>;
  const int64_t splits =
      cuda::tiles_of(problem.depth, static_cast<int>(split_depth));
  std::vector<Sum> sums(static_cast<size_t>(problem.batch_count * splits *
                                            problem.rows * problem.columns));
  launch_warpgroups(request, problem, split_depth / kDepth, sums.data(),
                    cuda::KeepSums{});
  const auto sum = cuda::sum_of(problem, sums.data(), splits);
  launch_blocks(request, sum.tiles, cuda::SumThread::kThreads,
                cuda::matmul_sum_kernel<Input, Output>, sum, cuda::KeepSums{});
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

bool run_matmul_warpgroups(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "plan_of_warpgroups") {
    run_plan_of_warpgroups(request);
  } else if (kernel == "bulk_operands") {
    run_bulk_operands(request);
  } else if (kernel != "matmul_warpgroups") {
    return false;
  } else if (!with_tensor_core_types(request, [&](auto input, auto output) {
               run<decltype(input), decltype(output)>(request);
             })) {
    fail("warpgroups do not multiply these types");
  }
  return true;
}

}  // namespace pkg::emulation
