#include <vector>

#include "batches.h"
#include "cuda/gemm/matmul.cuh"
#include "program.h"

namespace pkg::emulation {
namespace {

template <class Input, class Output>
void run(const Request& request) {
  cuda::MatmulProblem<Input, Output> problem = {
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
  launch_blocks(request, tiles, cuda::BlockProduct<Input>::kThreads,
                cuda::matmul_sum_kernel<Input, Output>,
                cuda::sum_of(problem, sums.data(), parts.splits),
                cuda::KeepSums{});
}

// How a product of so many tiles and panels is divided for so many blocks.
void run_panels_of_split(const Request& request) {
  const auto& sizes = request.integers("sizes");
  *request.buffer<int64_t>("panels") =
      cuda::panels_of_split(sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3));
}

}  // namespace

bool run_matmul(const Request& request) {
  if (request.text("kernel") == "panels_of_split") {
    run_panels_of_split(request);
    return true;
  }
  if (request.text("kernel") != "matmul") {
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
