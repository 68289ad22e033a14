// The host side that all pointwise operators share: chooses between the two
// kernels of cuda/pointwise/pointwise.cuh and describes the operands to them.
#pragma once

#include <array>

#include "cuda/host/launch.h"
#include "cuda/pointwise/pointwise.cuh"
#include "host/integer_math.h"
#include "host/pointwise.h"

namespace pkg::cuda {

inline ElementType element_type(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return ElementType::boolean;
    case ScalarType::Byte:
      return ElementType::uint8;
    case ScalarType::Char:
      return ElementType::int8;
    case ScalarType::Short:
      return ElementType::int16;
    case ScalarType::Int:
      return ElementType::int32;
    case ScalarType::Long:
      return ElementType::int64;
    case ScalarType::Half:
      return ElementType::float16;
    case ScalarType::BFloat16:
      return ElementType::bfloat16;
    case ScalarType::Float:
      return ElementType::float32;
    case ScalarType::Double:
      return ElementType::float64;
    default:
      fail("no pointwise CUDA kernel takes ", dtype_name(type));
  }
}

// A call: operand 0 of the loop is the output; all is computed in `common`.
template <int kInputs>
struct PointwiseCall {
  PointwiseLoop<kInputs + 1> loop;
  ScalarType common;
  Tensor output;
  std::array<const TensorView*, kInputs> inputs;

  // True where every operand is one aligned run of elements of the common
  // dtype, or one element. A bool is not computed as a number: 1 + 1 is 1.
  bool is_dense() const {
    constexpr uintptr_t kAlignment = 16;
    const auto is_aligned = [](const void* data) {
      return reinterpret_cast<uintptr_t>(data) % kAlignment == 0;
    };
    bool dense = loop.dims <= 1 && common != ScalarType::Bool &&
                 dtype_of(output) == common &&
                 is_aligned(output.const_data_ptr()) &&
                 (loop.dims == 0 || loop.strides[0][0] == 1);
    for (int input = 0; dense && input < kInputs; ++input) {
      dense =
          dtype_of(*inputs[input]) == common &&
          (is_single(input) || (loop.strides[input + 1][0] == 1 &&
                                is_aligned(inputs[input]->const_data_ptr())));
    }
    return dense;
  }

  bool is_single(int input) const {
    return loop.dims == 0 || loop.strides[input + 1][0] == 0;
  }
};

template <class Element, class Function>
void launch_dense(const PointwiseCall<Function::kInputs>& call,
                  Function function, cudaStream_t stream) {
  DenseOperands<Element> operands = {};
  operands.output = static_cast<Element*>(call.output.mutable_data_ptr());
  operands.count = call.loop.numel();
  for (int input = 0; input < Function::kInputs; ++input) {
    operands.inputs[input] =
        static_cast<const Element*>(call.inputs[input]->const_data_ptr());
    operands.is_single[input] = call.is_single(input);
  }
  constexpr int64_t kPerBlock = kPointwiseThreads * (16 / sizeof(Element));
  launch(pointwise_dense<Element, Function>,
         ceil_div(operands.count, kPerBlock), kPointwiseThreads, stream,
         operands, function);
}

template <class Number, class Indices, class Function>
void launch_strided(const PointwiseCall<Function::kInputs>& call,
                    StridedOperands<Indices> operands, Function function,
                    cudaStream_t stream) {
  operands.output = call.output.mutable_data_ptr();
  operands.output_type = element_type(dtype_of(call.output));
  operands.common_type = element_type(call.common);
  for (int input = 0; input < Function::kInputs; ++input) {
    operands.inputs[input] = call.inputs[input]->const_data_ptr();
    operands.input_types[input] = element_type(dtype_of(*call.inputs[input]));
  }
  launch(pointwise_strided<Number, Indices, Function>,
         ceil_div(operands.count, kPointwiseThreads), kPointwiseThreads, stream,
         operands, function);
}

template <class Number, class Function>
void launch_strided(const char* op,
                    const PointwiseCall<Function::kInputs>& call,
                    Function function, cudaStream_t stream) {
  const auto& loop = call.loop;
  check_batch_dims(op, loop.dims);
  // The loop counts dimensions from the innermost one, the kernel from the
  // outermost.
  BatchSizes shape;
  shape.count = loop.dims;
  std::reverse_copy(loop.sizes.begin(), loop.sizes.begin() + loop.dims,
                    shape.sizes);
  BatchStrides strides[3];  // of an operand that is not there 0
  bool is_narrow = true;
  for (int operand = 0; operand <= Function::kInputs; ++operand) {
    std::reverse_copy(loop.strides[operand].begin(),
                      loop.strides[operand].begin() + loop.dims,
                      strides[operand].strides);
    is_narrow = is_narrow && has_narrow_indices(shape, strides[operand]);
  }
  const BatchStrides inputs[2] = {strides[1], strides[2]};
  if (is_narrow) {
    launch_strided<Number>(
        call, strided_operands<NarrowIndices>(shape, strides[0], inputs),
        function, stream);
  } else {
    launch_strided<Number>(
        call, strided_operands<WideIndices>(shape, strides[0], inputs),
        function, stream);
  }
}

// Each has a dense kernel of its own, and all of them share the strided one.
template <class Function>
void run_integers(const char* op, const PointwiseCall<Function::kInputs>& call,
                  Function function, cudaStream_t stream) {
  if (!call.is_dense()) {
    return launch_strided<int64_t>(op, call, function, stream);
  }
  switch (call.common) {
    case ScalarType::Byte:
      return launch_dense<uint8_t>(call, function, stream);
    case ScalarType::Char:
      return launch_dense<int8_t>(call, function, stream);
    case ScalarType::Short:
      return launch_dense<int16_t>(call, function, stream);
    case ScalarType::Int:
      return launch_dense<int32_t>(call, function, stream);
    default:
      return launch_dense<int64_t>(call, function, stream);
  }
}

// The caller holds a DeviceGuard.
template <class Function>
void run_pointwise(const char* op, const PointwiseCall<Function::kInputs>& call,
                   Function function) {
  const cudaStream_t stream = current_stream(call.output);
  if constexpr (Function::kTakesIntegers) {
    if (!is_floating(call.common)) {
      return run_integers(op, call, function, stream);
    }
  }
  with_floating_type(call.common, [&](auto example) {
    using Element = decltype(example);
    if (call.is_dense()) {
      launch_dense<Element>(call, function, stream);
    } else {
      launch_strided<Accumulator<Element>>(op, call, function, stream);
    }
  });
}

}  // namespace pkg::cuda
