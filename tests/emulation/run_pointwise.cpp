#define PKG_ON_CUDA
#define PKG_FORMULAS_ALONE
#include "batches.h"
#include "cpu/d_sigmoid.cpp"
#include "cpu/mul.cpp"
#include "cpu/muladd.cpp"
#include "cuda/gemm/activation.cuh"
#include "cuda/pointwise/pointwise.cuh"
#include "program.h"

namespace pkg::emulation {
namespace {

cuda::ElementType element_type(const std::string& name) {
  static const std::map<std::string, cuda::ElementType> types = {
      {"bool", cuda::ElementType::boolean},
      {"uint8", cuda::ElementType::uint8},
      {"int8", cuda::ElementType::int8},
      {"int16", cuda::ElementType::int16},
      {"int32", cuda::ElementType::int32},
      {"int64", cuda::ElementType::int64},
      {"float16", cuda::ElementType::float16},
      {"bfloat16", cuda::ElementType::bfloat16},
      {"float32", cuda::ElementType::float32},
      {"float64", cuda::ElementType::float64},
  };
  return types.at(name);
}

template <class Element, class Function>
void run_dense(const Request& request, Function function) {
  const auto& single = request.integers("is_single");
  const cuda::DenseOperands<Element> operands = {
      .output = request.buffer<Element>("output"),
      .inputs = {request.buffer<Element>("a"), request.buffer<Element>("b")},
      .is_single = {single.at(0) != 0, single.at(1) != 0},
      .count = request.integer("count"),
  };
  launch_blocks(request, operands.count, cuda::kPointwiseThreads,
                cuda::pointwise_dense<Element, Function>, operands, function);
}

template <class Number, class Function>
void run_strided(const Request& request, Function function) {
  const cuda::StridedOperands operands = {
      .output = request.buffer<uint8_t>("output"),
      .inputs = {request.buffer<uint8_t>("a"), request.buffer<uint8_t>("b")},
      .output_type = element_type(request.text("output_type")),
      .input_types = {element_type(request.text("a_type")),
                      element_type(request.text("b_type"))},
      .common_type = element_type(request.text("common_type")),
      .shape = batch_sizes(request.integers("shape")),
      .output_strides = batch_strides(request.integers("output_strides")),
      .input_strides = {batch_strides(request.integers("a_strides")),
                        batch_strides(request.integers("b_strides"))},
      .count = count_of(request.integers("shape")),
  };
  launch_blocks(request, operands.count, cuda::kPointwiseThreads,
                cuda::pointwise_strided<Number, Function>, operands, function);
}

template <class Function>
void run(const Request& request, Function function) {
  const std::string& type = request.text("common_type");
  const bool is_float = type.find("float") != std::string::npos;
  if (request.text("kernel") == "pointwise_strided") {
    if (type == "float64") {
      run_strided<double>(request, function);
    } else if (is_float) {
      run_strided<float>(request, function);
    } else if constexpr (Function::kTakesIntegers) {
      run_strided<uint64_t>(request, function);
    }
  } else if (type == "float64") {
    run_dense<double>(request, function);
  } else if (type == "float32") {
    run_dense<float>(request, function);
  } else if (type == "float16") {
    run_dense<cuda::float16>(request, function);
  } else if (type == "bfloat16") {
    run_dense<cuda::bfloat16>(request, function);
  } else if constexpr (Function::kTakesIntegers) {
    if (type == "int64") {
      run_dense<uint64_t>(request, function);
    } else if (type == "int32") {
      run_dense<uint32_t>(request, function);
    } else if (type == "int16") {
      run_dense<uint16_t>(request, function);
    } else {
      run_dense<uint8_t>(request, function);
    }
  }
}

}  // namespace

bool run_pointwise(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel != "pointwise_dense" && kernel != "pointwise_strided") {
    return false;
  }
  const std::string& function = request.text("function");
  if (function == "mul") {
    run(request, BoundFormula<mul_formula, double>());
  } else if (function == "muladd") {
    run(request, BoundFormula<muladd_formula, double>{{request.real("c")}});
  } else if (function == "add") {
    run(request, cuda::Add());
  } else if (function == "d_sigmoid") {
    run(request, BoundFormula<d_sigmoid_formula, double>());
  } else if (function == "d_sigmoid_backward") {
    run(request, BoundFormula<d_sigmoid_backward_formula, double>());
  } else if (function == "relu_backward") {
    run(request, cuda::ActivationBackward<cuda::Relu>());
  } else if (function == "gelu_backward") {
    run(request, cuda::ActivationBackward<cuda::Gelu>());
  } else if (function == "gelu_tanh_backward") {
    run(request, cuda::ActivationBackward<cuda::GeluTanh>());
  } else if (function == "silu_backward") {
    run(request, cuda::ActivationBackward<cuda::Silu>());
  } else {
    fail("no pointwise function is called " + function);
  }
  return true;
}

}  // namespace pkg::emulation
