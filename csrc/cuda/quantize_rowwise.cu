#include <tuple>

#include "cuda/host/launch.h"
#include "cuda/host/rows.h"
#include "cuda/int4/quantize_held_rows.cuh"
#include "cuda/int4/quantize_rowwise.cuh"
#include "host/integer_math.h"
#include "host/namespace.h"
#include "quantize_rowwise.h"

namespace pkg::cuda {
namespace {

template <class Element>
void launch_quantize(const QuantizeProblem<Element>& problem,
                     cudaStream_t stream) {
  const bool is_held = with_held_group(problem, [&]<int kGroup>() {
    using Rows = HeldRows<Element, kGroup>;
    launch(quantize_held_rows_kernel<Element, kGroup>,
           ceil_div(problem.rows, Rows::kRows), launch_shape<Rows>(), stream,
           problem);
  });
  if (!is_held) {
    launch(quantize_rowwise_kernel<Element>, problem.block_count(),
           kQuantizeThreads, stream, problem);
  }
}

std::tuple<Tensor, Tensor> quantize_rowwise(const Tensor& tensor,
                                            int64_t bits) {
  const TensorView input(tensor);
  const QuantizeRowwisePlan plan = plan_quantize_rowwise(input, bits);
  const DeviceGuard guard(device_of(tensor).index);
  auto [values, scales] = allocate_quantized(plan, input);
  auto* to = static_cast<int8_t*>(values.mutable_data_ptr());
  void* scales_to = scales.mutable_data_ptr();
  const cudaStream_t stream = current_stream(tensor);
  with_floating_type(plan.type, [&](auto example) {
    using Element = decltype(example);
    QuantizeProblem<Element> problem = {};
    problem.input = static_cast<const Element*>(input.const_data_ptr());
    problem.stride = input.strides[plan.leading_dims];
    BatchStrides same = {};
    merge_rows("quantize_rowwise", plan.leading_dims, input, input,
               problem.rows_of, problem.row_strides, same);
    problem.values = to;
    problem.scales = static_cast<Element*>(scales_to);
    problem.rows = plan.rows;
    problem.inner = plan.inner;
    problem.bits = plan.bits;
    launch_quantize(problem, stream);
  });
  return {values, scales};
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&quantize_rowwise>("quantize_rowwise");
}

}  // namespace
}  // namespace pkg::cuda
