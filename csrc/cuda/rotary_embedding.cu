#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/rotary_embedding.cuh"
#include "host/namespace.h"
#include "rotary_embedding.h"

namespace pkg::cuda {
namespace {

// The loop counts dimensions from the innermost one, the kernel from the
// outermost.
RotaryShape rotary_shape(const char* op, const RotaryEmbeddingPlan& plan) {
  const auto& loop = plan.rows;
  check_batch_dims(op, loop.dims);
  RotaryShape shape = {};
  shape.rows_of.count = loop.dims;
  std::reverse_copy(loop.sizes.begin(), loop.sizes.begin() + loop.dims,
                    shape.rows_of.sizes);
  for (int operand = 0; operand < kRotaryOperands; ++operand) {
    const auto& strides = loop.strides[operand];
    std::reverse_copy(strides.begin(), strides.begin() + loop.dims,
                      shape.row_strides[operand].strides);
    shape.steps[operand] = plan.steps[operand];
  }
  shape.inner = plan.inner;
  shape.half = plan.half;
  shape.has_neighbours = plan.pairs == RotaryPairs::kNeighbours;
  shape.turns_back = plan.way == RotaryWay::kBack;
  return shape;
}

template <class Divisor, int kPacket, class Element, class Table>
void launch_rotary(const RotaryOperands<Element, Table>& operands,
                   const RotaryShape& shape, cudaStream_t stream) {
  const RotaryProblem<Element, Table, Divisor> problem(operands, shape,
                                                       kPacket);
  launch(rotary_embedding_kernel<Element, Table, Divisor, kPacket>,
         problem.block_count(), kRotaryThreads, stream, problem);
}

template <class Element, class Table>
void run_rotary(const RotaryShape& shape, const RotaryEmbeddingPlan& plan,
                const TensorView& input, const TensorView& cos,
                const TensorView& sin, cudaStream_t stream) {
  const RotaryOperands<Element, Table> operands = {
      static_cast<Element*>(plan.output.mutable_data_ptr()),
      static_cast<const Element*>(input.const_data_ptr()),
      static_cast<const Table*>(cos.const_data_ptr()),
      static_cast<const Table*>(sin.const_data_ptr())};
  if (shape.row_count() > INT32_MAX) {
    launch_rotary<WideDivisor, 1>(operands, shape, stream);
  } else if (takes_packets(operands, shape)) {
    launch_rotary<FastDivisor, kRotaryPacket<Element>>(operands, shape, stream);
  } else {
    launch_rotary<FastDivisor, 1>(operands, shape, stream);
  }
}

Tensor run(const char* op, const char* name, const Tensor& tensor,
           const Tensor& cos_tensor, const Tensor& sin_tensor, bool interleaved,
           RotaryWay way) {
  const TensorView input(tensor);
  const TensorView cos(cos_tensor);
  const TensorView sin(sin_tensor);
  const RotaryEmbeddingPlan plan =
      plan_rotary_embedding(op, name, input, cos, sin, interleaved, way);
  const DeviceGuard guard(input.device.index);
  const RotaryShape shape = rotary_shape(op, plan);
  const cudaStream_t stream = current_stream(tensor);
  with_floating_type(plan.type, [&](auto example) {
    using Element = decltype(example);
    if (plan.table_type == plan.type) {
      run_rotary<Element, Element>(shape, plan, input, cos, sin, stream);
    } else {
      run_rotary<Element, float>(shape, plan, input, cos, sin, stream);
    }
  });
  return plan.output;
}

Tensor rotary_embedding(const Tensor& input, const Tensor& cos,
                        const Tensor& sin, bool interleaved) {
  return run("rotary_embedding", "input", input, cos, sin, interleaved,
             RotaryWay::kForward);
}

Tensor rotary_embedding_backward(const Tensor& grad, const Tensor& cos,
                                 const Tensor& sin, bool interleaved) {
  return run("rotary_embedding_backward", "grad", grad, cos, sin, interleaved,
             RotaryWay::kBack);
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&rotary_embedding>("rotary_embedding");
  library.impl<&rotary_embedding_backward>("rotary_embedding_backward");
}

}  // namespace
}  // namespace pkg::cuda
