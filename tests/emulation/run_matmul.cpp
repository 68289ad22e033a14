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
  launch_blocks(request, problem.count_tiles(),
                cuda::launch_shape<cuda::BlockProduct<Input>>(),
                cuda::matmul_kernel<Input, Output>, problem, cuda::KeepSums{});
}

}  // namespace

bool run_matmul(const Request& request) {
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
