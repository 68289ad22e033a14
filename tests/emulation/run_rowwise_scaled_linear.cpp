#include "batches.h"
#include "cuda/int4/quantize_rowwise.cuh"
#include "cuda/int4/rowwise.cuh"
#include "program.h"

namespace pkg::emulation {
namespace {

cuda::ElementType type_of(const std::string& name) {
  return name == "float64"    ? cuda::ElementType::float64
         : name == "float16"  ? cuda::ElementType::float16
         : name == "bfloat16" ? cuda::ElementType::bfloat16
                              : cuda::ElementType::float32;
}

template <bool kPacked>
void run_linear(const Request& request) {
  const cuda::ElementType type = type_of(request.text("type"));
  cuda::RowwiseScaledProblem<kPacked> problem = {};
  problem.input = request.buffer<int8_t>("input");
  problem.input_stride = request.integer("input_stride");
  problem.rows_of = batch_sizes(request.integers("rows_of"));
  problem.input_strides = batch_strides(request.integers("input_strides"));
  problem.scale_strides = batch_strides(request.integers("scale_strides"));
  problem.input_scale = {request.buffer<void>("input_scale"), type};
  problem.weight = request.buffer<int8_t>("weight");
  problem.weight_column_stride = request.integers("weight_strides").at(0);
  problem.weight_stride = request.integers("weight_strides").at(1);
  problem.weight_scale = {request.buffer<void>("weight_scale"), type};
  problem.weight_scale_stride = request.integer("weight_scale_stride");
  problem.bias = {request.buffer<void>("bias"), type};
  problem.bias_stride = request.integer("bias_stride");
  problem.output = request.buffer<void>("output");
  problem.output_type = type_of(request.text("out_type"));
  problem.in_double = problem.output_type == cuda::ElementType::float64 ||
                      type == cuda::ElementType::float64;
  problem.rows = count_of(request.integers("rows_of"));
  problem.columns = request.integer("columns");
  problem.bytes = request.integer("bytes");
  launch_blocks(request, problem.tile_count(), cuda::kRowwiseThreads,
                cuda::rowwise_scaled_linear_kernel<kPacked>, problem);
}

template <class Element>
void run_quantize(const Request& request) {
  const cuda::QuantizeProblem<Element> problem = {
      .input = request.buffer<Element>("input"),
      .stride = request.integer("stride"),
      .rows_of = batch_sizes(request.integers("rows_of")),
      .row_strides = batch_strides(request.integers("row_strides")),
      .values = request.buffer<int8_t>("values"),
      .scales = request.buffer<Element>("scales"),
      .rows = count_of(request.integers("rows_of")),
      .inner = request.integer("inner"),
      .bits = static_cast<int>(request.integer("bits")),
  };
  launch_blocks(request, problem.block_count(), cuda::kQuantizeThreads,
                cuda::quantize_rowwise_kernel<Element>, problem);
}

void run_quantize(const Request& request) {
  switch (type_of(request.text("type"))) {
    case cuda::ElementType::float64:
      return run_quantize<double>(request);
    case cuda::ElementType::float16:
      return run_quantize<cuda::float16>(request);
    case cuda::ElementType::bfloat16:
      return run_quantize<cuda::bfloat16>(request);
    default:
      return run_quantize<float>(request);
  }
}

}  // namespace

bool run_rowwise_scaled_linear(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "rowwise_scaled_linear_s8s4") {
    run_linear<false>(request);
  } else if (kernel == "rowwise_scaled_linear_s4s4") {
    run_linear<true>(request);
  } else if (kernel == "quantize_rowwise") {
    run_quantize(request);
  } else {
    return false;
  }
  return true;
}

}  // namespace pkg::emulation
