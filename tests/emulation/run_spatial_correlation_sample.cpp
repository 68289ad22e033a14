#include <algorithm>
#include <string>

#include "cuda/correlation/correlation_host.h"
#include "cuda/correlation/gradient.cuh"
#include "elements.h"
#include "program.h"

namespace pkg::emulation {
namespace {

cuda::CorrelationPair pair_of(const Request& request, const std::string& name) {
  const auto& values = request.integers(name);
  return {{values.at(0), values.at(1)}};
}

cuda::CorrelationShape shape_of(const Request& request) {
  return {
      .batch = request.integer("batch"),
      .channels = request.integer("channels"),
      .size = pair_of(request, "size"),
      .kernel = pair_of(request, "kernel_size"),
      .patch = pair_of(request, "patch_size"),
      .stride = pair_of(request, "stride"),
      .padding = pair_of(request, "padding"),
      .dilation = pair_of(request, "dilation"),
      .dilation_patch = pair_of(request, "dilation_patch"),
      .output = pair_of(request, "output_size"),
  };
}

template <class Element>
cuda::CorrelationImages<Element> images_of(const Request& request,
                                           const std::string& name) {
  cuda::CorrelationImages<Element> images = {};
  images.data = request.buffer<Element>(name);
  std::ranges::copy(request.integers(name + "_strides"), images.strides);
  return images;
}

template <class Element>
void run_forward(const Request& request) {
  cuda::with_correlation_kernel<Element>([&](auto block, auto kernel) {
    using Block = typename decltype(block)::type;
    const cuda::Correlation<Element> call = cuda::correlation_of<Block>(
        shape_of(request), images_of<Element>(request, "input1"),
        images_of<Element>(request, "input2"),
        request.buffer<Element>("output"));
    launch_blocks(request, call.piece_count, Block::launch_shape(call), kernel,
                  call);
  });
}

template <class Element>
void run_gradient(const Request& request) {
  int64_t grad_strides[5];
  std::ranges::copy(request.integers("grad_strides"), grad_strides);
  const cuda::CorrelationGradient<Element> call =
      cuda::correlation_gradient_of<Element>(
          shape_of(request), request.buffer<Element>("grad"), grad_strides,
          images_of<Element>(request, "other"),
          request.integer("of_input2") != 0, request.buffer<Element>("output"));
  launch_blocks(request, call.piece_count,
                cuda::CorrelationGradientBlock<Element>::launch_shape(),
                cuda::spatial_correlation_gradient_kernel<Element>, call);
}

template <class Element>
void run(const Request& request) {
  if (request.text("kernel") == "spatial_correlation") {
    run_forward<Element>(request);
  } else {
    run_gradient<Element>(request);
  }
}

}  // namespace

bool run_spatial_correlation_sample(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel != "spatial_correlation" &&
      kernel != "spatial_correlation_gradient") {
    return false;
  }
  const std::string& type = request.text("type");
  if (!with_type<double, float, cuda::float16, cuda::bfloat16>(
          type, [&]<class Element>() { run<Element>(request); })) {
    fail(kernel + " has no kernel for " + type);
  }
  return true;
}

}  // namespace pkg::emulation
