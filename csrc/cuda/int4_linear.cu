#include <torch/csrc/stable/ops.h>

#include "cuda/host/launch.h"
#include "cuda/int4/int4_linear.cuh"
#include "host/namespace.h"
#include "int4_linear.h"

namespace pkg::cuda {
namespace {

template <class Element, int kInnerTiles>
void launch_int4(const Int4LinearProblem<Element>& problem,
                 cudaStream_t stream) {
  if constexpr (sizeof(Element) == 2) {
    launch(int4_linear_half_kernel<Element, kInnerTiles>, problem.pieces(),
           kInt4Threads, stream, problem);
  } else {
    launch(int4_linear_wide_kernel<Element, kInnerTiles>, problem.pieces(),
           kInt4Threads, stream, problem);
  }
}

Tensor int4_linear(const Tensor& input, const Tensor& packed_w,
                   const Tensor& scales_and_zeros, int64_t group_size,
                   int64_t inner_k_tiles, const std::optional<Tensor>& bias) {
  const Int4LinearPlan whole = plan_int4_linear(
      input, packed_w, scales_and_zeros, group_size, inner_k_tiles, bias);
  const LinearPlan& plan = whole.linear;
  check_batch_dims("int4_linear", static_cast<int64_t>(plan.batch_dims));
  const DeviceGuard guard(device_of(input).index);
  const Tensor output = allocate_linear_output(plan, input);
  const Tensor words = torch::stable::contiguous(packed_w);
  const Tensor pairs = torch::stable::contiguous(scales_and_zeros);
  with_floating_type(plan.type, [&](auto example) {
    using Element = decltype(example);
    Int4LinearProblem<Element> problem = {};
    problem.input = static_cast<const Element*>(input.const_data_ptr());
    problem.words = static_cast<const uint32_t*>(words.const_data_ptr());
    problem.scales_and_zeros =
        static_cast<const bfloat16*>(pairs.const_data_ptr());
    problem.bias =
        bias ? static_cast<const Element*>(bias->const_data_ptr()) : nullptr;
    problem.output = static_cast<Element*>(output.mutable_data_ptr());
    problem.rows = plan.rows;
    problem.columns = plan.columns;
    problem.depth = plan.inner;
    problem.group_size = group_size;
    problem.row_stride = plan.row_stride;
    problem.depth_stride = plan.inner_stride;
    problem.bias_stride = bias ? stride_of_bias(*bias) : 0;
    problem.batch_count = plan.batch();
    problem.batch.count = static_cast<int>(plan.batch_dims);
    for (size_t d = 0; d < plan.batch_dims; ++d) {
      problem.batch.sizes[d] = plan.batch_sizes[d];
      problem.batch_strides.strides[d] = plan.batch_strides[d];
    }
    const cudaStream_t stream = current_stream(output);
    switch (inner_k_tiles) {
      case 2:
        return launch_int4<Element, 2>(problem, stream);
      case 4:
        return launch_int4<Element, 4>(problem, stream);
      default:
        return launch_int4<Element, 8>(problem, stream);
    }
  });
  return output;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&int4_linear>("int4_linear");
}

}  // namespace
}  // namespace pkg::cuda
