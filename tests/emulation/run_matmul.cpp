#include <vector>

#include "cuda/gemm/large_product.cuh"
#include "matmul_request.h"
#include "program.h"

namespace pkg::emulation {
namespace {

template <class Product, class Input, class Output>
void run_by_tiles(const Request& request,
                  cuda::MatmulProblem<Input, Output> problem) {
  const int64_t tiles = problem.template count_tiles<Product>();
  const auto shape = cuda::launch_shape<Product>();
  const int64_t split_depth = request.integer("split_depth");
  if (split_depth == 0) {
    launch_blocks(request, tiles, shape,
                  cuda::matmul_kernel<Input, Output, cuda::KeepSums, Product>,
                  problem, cuda::KeepSums{});
    return;
  }
  using Sum = cuda::StoredSum<Input>;
  auto parts = cuda::divided<Input, Output, Sum>(problem, split_depth, nullptr);
  const int64_t pieces = parts.template count_tiles<Product>();
  std::vector<Sum> sums(
      static_cast<size_t>(parts.batch_count * parts.rows * parts.columns));
  parts.c = sums.data();
  launch_blocks(request, pieces, shape,
                cuda::matmul_kernel<Input, Sum, cuda::KeepSums, Product>, parts,
                cuda::KeepSums{});
  const auto sum = cuda::sum_of(problem, sums.data(), parts.splits);
  launch_blocks(request, sum.tiles, cuda::SumThread::kThreads,
                cuda::matmul_sum_kernel<Input, Output>, sum, cuda::KeepSums{});
}

template <class Input, class Output>
void run(const Request& request) {
  const auto problem = problem_of<Input, Output>(request);
  with_tiles<Input>(request, [&]<class Product>() {
    run_by_tiles<Product>(request, problem);
  });
}

// How a product of so many tiles and panels is divided for so many blocks.
void run_panels_of_split(const Request& request) {
  const auto& sizes = request.integers("sizes");
  *request.buffer<int64_t>("panels") =
      cuda::panels_of_split(sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3));
}

// The tiles and parts that a product of batch, rows, columns and depth takes on
// so many multiprocessors, whose blocks may have so many bytes.
void run_plan_panels(const Request& request) {
  const auto& sizes = request.integers("sizes");
  const auto plan = [&]<class Element>() {
    return cuda::plan_panels<Element>(sizes.at(0), sizes.at(1), sizes.at(2),
                                      sizes.at(3), sizes.at(4),
                                      static_cast<int>(sizes.at(5)));
  };
  const cuda::PanelPlan best = request.text("type") == "float64"
                                   ? plan.operator()<double>()
                                   : plan.operator()<float>();
  auto* const numbers = request.buffer<int64_t>("plan");
  numbers[0] = static_cast<int64_t>(best.tiles);
  numbers[1] = best.panels_each;
}

}  // namespace

bool run_matmul(const Request& request) {
  if (request.text("kernel") == "plan_panels") {
    run_plan_panels(request);
    return true;
  }
  if (request.text("kernel") == "panels_of_split") {
    run_panels_of_split(request);
    return true;
  }
  if (request.text("kernel") != "matmul") {
    return false;
  }
  const std::string& input = request.text("input_type");
  const std::string& output = request.text("output_type");
  const bool is_known =
      (input == output &&
       with_type<double, float>(
           input, [&]<class Element>() { run<Element, Element>(request); })) ||
      (output == "float32" &&
       with_type<cuda::Tf32>(
           input, [&]<class Input>() { run<Input, float>(request); })) ||
      with_tensor_core_types(request, [&](auto input, auto output) {
        run<decltype(input), decltype(output)>(request);
      });
  if (!is_known) {
    fail("matmul has no kernel for " + input + " and " + output);
  }
  return true;
}

}  // namespace pkg::emulation
