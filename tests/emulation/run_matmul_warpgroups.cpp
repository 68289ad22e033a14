#include <vector>

#include "cuda/gemm/six_products.cuh"
#include "cuda/gemm/tf32_products.cuh"
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

// A product of float32 by six of bfloat16, where nothing is left of a number.
void run_six_products(const Request& request) {
  using Product = cuda::SixProducts;
  const auto problem = problem_of<float, float>(request);
  auto plans = cuda::plan_splits(problem);
  if (!plans) {
    fail("these operands are not split");
  }
  // As the allocator does, at a multiple of 16 bytes.
  std::vector<cuda::Packet<cuda::bfloat16, 8>> memory(
      static_cast<size_t>(Product::kParts * plans->elements() / 8));
  auto* const parts = memory.data()->values;
  plans->a.operand.parts = parts;
  plans->b.operand.parts =
      parts + Product::kParts * plans->a.operand.elements_of_part();
  auto* const inexact = request.buffer<int32_t>("inexact");
  const cuda::SplitProblem split = {plans->a.operand, plans->b.operand,
                                    inexact};
  launch_blocks(request, plans->elements() / cuda::kSplitNeighbours,
                cuda::kSplitThreads,
                cuda::split_into_bfloat16_kernel<Product::kParts>, split);
  const cuda::BulkOperands<cuda::bfloat16> operands = {plans->a.mapped(),
                                                       plans->b.mapped()};
  const auto a = encode_tensor_map(operands.a.tensor);
  const auto b = encode_tensor_map(operands.b.tensor);
  const int64_t split_depth = request.integer("split_depth");
  const int64_t panels = cuda::tiles_of(problem.depth, Product::kDepth);
  const int64_t each =
      split_depth == 0 ? panels : split_depth / Product::kDepth;
  const int64_t splits = (panels + each - 1) / each;
  std::vector<float> sums(static_cast<size_t>(problem.batch_count * splits *
                                              problem.rows * problem.columns));
  const auto shared_out = cuda::warpgroup_problem<Product>(
      problem, operands, a, b, each, splits == 1 ? problem.c : sums.data());
  launch_blocks(request, shared_out.tiles, cuda::launch_shape<Product>(),
                cuda::matmul_six_products_kernel<>, shared_out,
                static_cast<const int32_t*>(inexact), cuda::KeepSums{});
  if (splits > 1 && *inexact == 0) {
    const auto sum = cuda::sum_of(problem, sums.data(), splits);
    launch_blocks(request, sum.tiles, cuda::SumThread::kThreads,
                  cuda::matmul_sum_kernel<float, float>, sum, cuda::KeepSums{});
  }
}

// A product of float32 in TF32, whose operands are transposed where they have
// to be.
template <int kTileColumns>
void run_tf32(const Request& request) {
  using Product = cuda::WarpgroupProduct<cuda::Tf32, kTileColumns>;
  const auto problem = problem_of<cuda::Tf32, float>(request);
  auto operands = cuda::tf32_operands(problem);
  if (!operands) {
    fail("these operands can neither be copied in bulk nor transposed");
  }
  // As the allocator does, at a multiple of 16 bytes.
  using Vector = cuda::Packet<cuda::Tf32, cuda::kTf32OfVector>;
  std::vector<Vector> memory(static_cast<size_t>(
      operands->transposed_elements() / cuda::kTf32OfVector));
  operands->transpose_into(
      memory.empty() ? nullptr : memory.data()->values,
      [&](const cuda::TransposeProblem<uint32_t>& transpose) {
        launch_blocks(request, transpose.tile_count(), cuda::kTransposeThreads,
                      cuda::transpose_kernel<uint32_t>, transpose);
      });
  const cuda::BulkOperands<cuda::Tf32> bulk = {operands->a.bulk(),
                                               operands->b.bulk()};
  const auto whole = cuda::warpgroup_problem<Product>(
      problem, bulk, encode_tensor_map(bulk.a.tensor),
      encode_tensor_map(bulk.b.tensor),
      cuda::tiles_of(problem.depth, Product::kDepth), problem.c);
  launch_blocks(request, whole.tiles, cuda::launch_shape<Product>(),
                cuda::matmul_warpgroup_kernel<cuda::Tf32, float, kTileColumns>,
                whole, cuda::KeepSums{});
}

// The panels of each part of a product by six, and the cycles that it takes.
void run_plan_of_six_products(const Request& request) {
  const auto& sizes = request.integers("sizes");
  const cuda::WarpgroupPlan plan = cuda::plan_six_products(
      sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), sizes.at(4));
  int64_t* const found = request.buffer<int64_t>("plan");
  found[0] = plan.panels_each;
  found[1] = plan.cycles;
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
  } else if (kernel == "matmul_six_products") {
    run_six_products(request);
  } else if (kernel == "matmul_tf32") {
    request.integer("tile_columns") == 256 ? run_tf32<256>(request)
                                           : run_tf32<128>(request);
  } else if (kernel == "plan_of_six_products") {
    run_plan_of_six_products(request);
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
