#define PKG_ON_CUDA
#define PKG_FORMULAS_ALONE
#include "batches.h"
#include "cpu/d_sigmoid.cpp"
#include "cpu/mul.cpp"
#include "cpu/muladd.cpp"
#include "cuda/gemm/activation.cuh"
#include "cuda/pointwise/pointwise.cuh"
#include "elements.h"
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

template <class Number, class Indices, class Function>
void run_strided_by(const Request& request, Function function) {
  const auto shape = batch_sizes(request.integers("shape"));
  auto operands = cuda::strided_operands<Indices>(
      shape, batch_strides(request.integers("output_strides")),
      {batch_strides(request.integers("a_strides")),
       batch_strides(request.integers("b_strides"))});
  operands.output = request.buffer<uint8_t>("output");
  operands.inputs[0] = request.buffer<uint8_t>("a");
  operands.inputs[1] = request.buffer<uint8_t>("b");
  operands.output_type = element_type(request.text("output_type"));
  operands.input_types[0] = element_type(request.text("a_type"));
  operands.input_types[1] = element_type(request.text("b_type"));
  operands.common_type = element_type(request.text("common_type"));
  launch_blocks(request, operands.count, cuda::kPointwiseThreads,
                cuda::pointwise_strided<Number, Indices, Function>, operands,
                function);
}

template <class Number, class Function>
void run_strided(const Request& request, Function function) {
  if (request.text("indices") == "wide") {
    run_strided_by<Number, cuda::WideIndices>(request, function);
  } else {
    run_strided_by<Number, cuda::NarrowIndices>(request, function);
  }
}

// Divides the numbers of each row by the row's divisor.
template <class Indices>
void run_division(const Request& request) {
  const int64_t count = request.integer("count");
  const auto* numbers = request.buffer<int64_t>("numbers");
  auto* results = request.buffer<int64_t>("results");
  for (const int64_t by : request.integers("divisors")) {
    const typename Indices::Divisor divisor(by);
    for (int64_t i = 0; i < count; ++i) {
      const auto divided =
          divisor.divide(static_cast<typename Indices::Index>(*numbers++));
      *results++ = divided.quotient;
      *results++ = divided.remainder;
    }
  }
}

template <class Function>
void run(const Request& request, Function function) {
  const std::string& type = request.text("common_type");
  if (request.text("kernel") == "pointwise_strided") {
    const bool is_half = type == "float16" || type == "bfloat16";
    if (with_type<double, float>(
            is_half ? "float32" : type,
            [&]<class Number>() { run_strided<Number>(request, function); })) {
      return;
    }
    if constexpr (Function::kTakesIntegers) {
      run_strided<int64_t>(request, function);
    }
  } else if (with_type<double, float, cuda::float16, cuda::bfloat16>(
                 type, [&]<class Element>() {
                   run_dense<Element>(request, function);
                 })) {
    return;
  } else if constexpr (Function::kTakesIntegers) {
    if (type == "int64") {
      run_dense<int64_t>(request, function);
    } else if (type == "int32") {
      run_dense<int32_t>(request, function);
    } else if (type == "int16") {
      run_dense<int16_t>(request, function);
    } else if (type == "int8") {
      run_dense<int8_t>(request, function);
    } else {
      run_dense<uint8_t>(request, function);
    }
  }
}

}  // namespace

bool run_pointwise(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "division") {
    if (request.text("indices") == "wide") {
      run_division<cuda::WideIndices>(request);
    } else {
      run_division<cuda::NarrowIndices>(request);
    }
    return true;
  }
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
