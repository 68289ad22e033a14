// A product as a request describes it.
#pragma once

#include <cstdint>
#include <string>

#include "batches.h"
#include "cuda/gemm/large_product.cuh"
#include "cuda/gemm/matmul.cuh"
#include "cuda/gemm/wide_product.cuh"
#include "elements.h"
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
  const std::string& input = request.text("input_type");
  const std::string& output = request.text("output_type");
  if (input == "int8" && output == "int32") {
    return with_type<int8_t>(
        input, [&]<class Input>() { function(Input{}, int32_t{}); });
  }
  bool is_known = false;
  with_type<cuda::float16, cuda::bfloat16>(input, [&]<class Input>() {
    is_known = with_type<Input, float>(
        output, [&]<class Output>() { function(Input{}, Output{}); });
  });
  return is_known;
}

// Calls function.operator()<Product>() with the tiles that the request asks
// for.
template <class Input, class Function>
void with_tiles(const Request& request, Function&& function) {
  const std::string& tiles = request.text("tiles");
  if constexpr (cuda::kHasWideProduct<Input>) {
    if (tiles == "wide") {
      return function.template operator()<cuda::WideProduct<Input>>();
    }
  }
  if constexpr (cuda::kHasLargeProduct<Input>) {
    if (tiles == "large") {
      return function.template operator()<cuda::LargeProduct<Input>>();
    }
    if (tiles == "small") {
      return function.template operator()<cuda::SmallProduct<Input>>();
    }
  }
  function.template operator()<cuda::BlockProduct<Input>>();
}

}  // namespace pkg::emulation
