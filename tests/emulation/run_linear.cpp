#include "batches.h"
#include "cuda/gemm/linear.cuh"
#include "cuda/gemm/pack_weight.cuh"
#include "elements.h"
#include "few_rows.h"
#include "matmul_request.h"
#include "program.h"
#include "warpgroups.h"

namespace pkg::emulation {
namespace {

// Input: as what the elements are multiplied.
template <class Input, class Activation>
void run(const Request& request) {
  using Element = StoredElement<Input>;
  cuda::MatmulProblem<Input, Element> problem = {};
  problem.a = request.buffer<Input>("input");
  problem.b = request.buffer<Input>("weight");
  problem.c = request.buffer<Element>("output");
  problem.rows = request.integer("rows");
  problem.columns = request.integer("columns");
  problem.depth = request.integer("inner");
  problem.a_row_stride = request.integers("input_strides").at(0);
  problem.a_depth_stride = request.integers("input_strides").at(1);
  problem.b_column_stride = request.integers("weight_strides").at(0);
  problem.b_depth_stride = request.integers("weight_strides").at(1);
  problem.batch_count = count_of(request.integers("batch"));
  problem.batch = batch_sizes(request.integers("batch"));
  problem.a_batch_strides = batch_strides(request.integers("batch_strides"));
  const cuda::LinearEpilogue<Element, Activation> epilogue = {
      request.buffer<Element>("bias"), request.integer("bias_stride"),
      request.buffer<Element>("pre_activation")};
  problem.count_tiles();
  if constexpr (std::is_same_v<Input, Element>) {
    if (request.text("layout") != "tiles") {
      launch_few_rows(request, problem, epilogue.of_any_kind());
      return;
    }
  }
  if constexpr (cuda::kHasWarpgroupProduct<Element>) {
    if (request.integer("tile_columns") != 0) {
      constexpr int kDepth = cuda::WarpgroupProduct<Element, 128>::kDepth;
      launch_warpgroups(request, problem, cuda::tiles_of(problem.depth, kDepth),
                        problem.c, epilogue);
      return;
    }
  }
  using Epilogue = cuda::LinearEpilogue<Element, Activation>;
  with_tiles<Input>(request, [&]<class Product>() {
    launch_blocks(request, problem.template count_tiles<Product>(),
                  cuda::launch_shape<Product>(),
                  cuda::matmul_kernel<Input, Element, Epilogue, Product>,
                  problem, epilogue);
  });
}

// Every activation in float32, one in each other type.
void run(const Request& request) {
  const std::string& type = request.text("type");
  const std::string& activation = request.text("activation");
  if (type == "float32" && activation == "none") {
    run<float, cuda::NoActivation>(request);
  } else if (type == "float32" && activation == "relu") {
    run<float, cuda::Relu>(request);
  } else if (type == "float32" && activation == "gelu") {
    run<float, cuda::Gelu>(request);
  } else if (type == "float32" && activation == "gelu_tanh") {
    run<float, cuda::GeluTanh>(request);
  } else if (type == "float32" && activation == "silu") {
    run<float, cuda::Silu>(request);
  } else if (type == "float64" && activation == "gelu") {
    run<double, cuda::Gelu>(request);
  } else if (type == "tf32" && activation == "gelu") {
    run<cuda::Tf32, cuda::Gelu>(request);
  } else if (type == "float16" && activation == "gelu") {
    run<cuda::float16, cuda::Gelu>(request);
  } else if (type == "bfloat16" && activation == "gelu") {
    run<cuda::bfloat16, cuda::Gelu>(request);
  } else {
    fail("linear has no kernel here for " + type + " and " + activation);
  }
}

template <class Word>
void run_pack(const Request& request) {
  const auto& strides = request.integers("strides");
  const auto problem = cuda::pack_problem<Word>(
      request.buffer<Word>("weight"), request.buffer<Word>("packed"),
      request.integer("out_features"), request.integer("in_features"),
      strides.at(0), strides.at(1));
  launch_blocks(request, problem.tile_count(), cuda::kTransposeThreads,
                cuda::transpose_kernel<Word>, problem);
}

}  // namespace

bool run_linear(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "linear") {
    run(request);
    return true;
  }
  if (kernel != "pack_linear_weight") {
    return false;
  }
  const int64_t size = request.integer("element_size");
  if (size == 8) {
    run_pack<uint64_t>(request);
  } else if (size == 4) {
    run_pack<uint32_t>(request);
  } else {
    run_pack<uint16_t>(request);
  }
  return true;
}

}  // namespace pkg::emulation
