#include <vector>

#include "cuda/gemm/large_product.cuh"
#include "matmul_request.h"
#include "program.h"

namespace pkg::emulation {
namespace {

template <class Input, class Output>
void run(const Request& request) {
  auto problem = problem_of<Input, Output>(request);
  if constexpr (cuda::kHasLargeProduct<Input>) {
    if (request.integer("large_tiles") != 0) {
      using Product = cuda::LargeProduct<Input>;
      launch_blocks(request, problem.template count_tiles<Product>(),
                    cuda::launch_shape<Product>(),
                    cuda::matmul_kernel<Input, Output, cuda::KeepSums, Product>,
                    problem, cuda::KeepSums{});
      return;
    }
  }
  const int64_t tiles = problem.count_tiles();
  const auto shape = cuda::launch_shape<cuda::BlockProduct<Input>>();
  const int64_t split_depth = request.integer("split_depth");
  if (split_depth == 0) {
    launch_blocks(request, tiles, shape, cuda::matmul_kernel<Input, Output>,
                  problem, cuda::KeepSums{});
    return;
  }
  using Sum = cuda::StoredSum<Input>;
  auto parts = cuda::divided<Input, Output, Sum>(problem, split_depth, nullptr);
  const int64_t pieces = parts.count_tiles();
  std::vector<Sum> sums(
      static_cast<size_t>(parts.batch_count * parts.rows * parts.columns));
  parts.c = sums.data();
  launch_blocks(request, pieces, shape, cuda::matmul_kernel<Input, Sum>, parts,
                cuda::KeepSums{});
  const auto sum = cuda::sum_of(problem, sums.data(), parts.splits);
  launch_blocks(request, sum.tiles, cuda::SumThread::kThreads,
                cuda::matmul_sum_kernel<Input, Output>, sum, cuda::KeepSums{});
}

// How a product of so many tiles and panels is divided for so many blocks.
void run_panels_of_split(const Request& request) {
  const auto& sizes = request.integers("sizes");
  *request.buffer<int64_t>("panels") =
      cuda::panels_of_split(sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3));
}

// Whether large tiles take less time for batch, rows, columns of so many
// multiprocessors.
void run_pays_large_product(const Request& request) {
  const auto& sizes = request.integers("sizes");
  const auto pays = [&]<class Element>() {
    return cuda::pays_large_product<Element>(sizes.at(0), sizes.at(1),
                                             sizes.at(2), sizes.at(3));
  };
  *request.buffer<int64_t>("pays") = request.text("type") == "float64"
                                         ? pays.operator()<double>()
                                         : pays.operator()<float>();
}

}  // namespace

bool run_matmul(const Request& request) {
  if (request.text("kernel") == "pays_large_product") {
    run_pays_large_product(request);
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
