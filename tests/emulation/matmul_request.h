// A product as a request describes it.
#pragma once

#include <cstdint>

#include "batches.h"
#include "cuda/gemm/matmul.cuh"
#include "request.h"

namespace pkg::emulation {

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

// Calls function(input, output) with a value of each type that is asked for,
// of those that tensor cores multiply.
template <class Function>
bool with_tensor_core_types(const Request& request, Function&& function) {
  const std::string types =
      request.text("input_type") + " " + request.text("output_type");
  if (types == "float16 float16") {
    function(cuda::float16{}, cuda::float16{});
  } else if (types == "float16 float32") {
    function(cuda::float16{}, float{});
  } else if (types == "bfloat16 bfloat16") {
    function(cuda::bfloat16{}, cuda::bfloat16{});
  } else if (types == "bfloat16 float32") {
    function(cuda::bfloat16{}, float{});
  } else if (types == "int8 int32") {
    function(int8_t{}, int32_t{});
  } else {
    return false;
  }
  return true;
}

}  // namespace pkg::emulation
