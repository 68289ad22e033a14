#include "cuda/correlation/correlation_host.h"
#include "cuda/correlation/gradient.cuh"
#include "cuda/host/launch.h"
#include "host/namespace.h"
#include "spatial_correlation_sample.h"

namespace pkg::cuda {
namespace {

CorrelationShape shape_of(const SpatialCorrelationPlan& plan) {
  const auto pair = [](const Pair& values) {
    return CorrelationPair{{values[0], values[1]}};
  };
  return {plan.batch,         plan.channels,       pair(plan.size),
          pair(plan.kernel),  pair(plan.patch),    pair(plan.stride),
          pair(plan.padding), pair(plan.dilation), pair(plan.dilation_patch),
          pair(plan.output)};
}

template <class Element>
CorrelationImages<Element> images_of(const Tensor& tensor) {
  CorrelationImages<Element> images = {};
  images.data = static_cast<const Element*>(tensor.const_data_ptr());
  std::ranges::copy(strides_of(tensor), images.strides);
  return images;
}

Tensor spatial_correlation_sample(const Tensor& input1, const Tensor& input2,
                                  std::vector<int64_t> kernel_size,
                                  std::vector<int64_t> patch_size,
                                  std::vector<int64_t> stride,
                                  std::vector<int64_t> padding,
                                  std::vector<int64_t> dilation,
                                  std::vector<int64_t> dilation_patch) {
  const SpatialCorrelationPlan plan = plan_spatial_correlation_sample(
      input1, input2,
      {kernel_size, patch_size, stride, padding, dilation, dilation_patch});
  const DeviceGuard guard(device_of(input1).index);
  const Tensor output = allocate_correlation(plan, input1);
  with_floating_type(plan.type, [&](auto example) {
    using Element = decltype(example);
    with_correlation_kernel<Element>([&](auto block, auto kernel) {
      using Block = typename decltype(block)::type;
      const Correlation<Element> call = correlation_of<Block>(
          shape_of(plan), images_of<Element>(input1),
          images_of<Element>(input2),
          static_cast<Element*>(output.mutable_data_ptr()));
      launch(kernel, call.piece_count, Block::launch_shape(call),
             current_stream(output), call);
    });
  });
  return output;
}

Tensor spatial_correlation_sample_backward(
    const Tensor& grad, const Tensor& other, bool of_input2,
    std::vector<int64_t> kernel_size, std::vector<int64_t> patch_size,
    std::vector<int64_t> stride, std::vector<int64_t> padding,
    std::vector<int64_t> dilation, std::vector<int64_t> dilation_patch) {
  const SpatialCorrelationPlan plan = plan_spatial_correlation_sample_backward(
      grad, other,
      {kernel_size, patch_size, stride, padding, dilation, dilation_patch});
  const DeviceGuard guard(device_of(other).index);
  const Tensor result = allocate_image_gradient(plan, other);
  with_floating_type(plan.type, [&](auto example) {
    using Element = decltype(example);
    int64_t grad_strides[5];
    std::ranges::copy(strides_of(grad), grad_strides);
    const CorrelationGradient<Element> call = correlation_gradient_of<Element>(
        shape_of(plan), static_cast<const Element*>(grad.const_data_ptr()),
        grad_strides, images_of<Element>(other), of_input2,
        static_cast<Element*>(result.mutable_data_ptr()));
    launch(spatial_correlation_gradient_kernel<Element>, call.piece_count,
           CorrelationGradientBlock<Element>::launch_shape(),
           current_stream(result), call);
  });
  return result;
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&spatial_correlation_sample>("spatial_correlation_sample");
  library.impl<&spatial_correlation_sample_backward>(
      "spatial_correlation_sample_backward");
}

}  // namespace
}  // namespace pkg::cuda
