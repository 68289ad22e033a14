#include "attention_request.h"
#include "cuda/attention/dropout.cuh"
#include "cuda/attention/forward_kernels.cuh"

namespace pkg::emulation {
namespace {

template <class Element>
void run_forward(const Request& request) {
  const cuda::AttentionForward<Element> call = {
      .problem = attention_problem<Element>(request),
      .output = result_batch<Element>(request, "output"),
      .output_residual = result_batch<Element>(request, "output_residual"),
      .log_sum_exp = request.buffer<cuda::Accumulator<Element>>("log_sum_exp"),
  };
  cuda::launch_attention_forward_kernel(
      call, static_cast<int>(request.integer("most_shared_bytes")),
      [&](auto kernel, int64_t tiles, cuda::LaunchShape shape,
          const auto& arguments) {
        launch_blocks(request, tiles, shape, kernel, arguments);
      });
}

}  // namespace

bool run_attention_forward(const Request& request) {
  if (request.text("kernel") != "attention_forward") {
    return false;
  }
  for_attention_type(
      request, request.integer("value_size"),
      [&]<class Element, int>() { run_forward<Element>(request); });
  return true;
}

bool run_attention_dropout_mask(const Request& request) {
  if (request.text("kernel") != "attention_dropout_mask") {
    return false;
  }

  const cuda::DropoutMask mask = {
      .kept = request.buffer<uint8_t>("kept"),
      .seed = request.buffer<int64_t>("seed"),
      .keep_threshold = dropout_keep_threshold(request.real("dropout")),
      .batch = request.integers("shape").at(0),
      .rows = request.integers("shape").at(1),
      .columns = request.integers("shape").at(2),
  };
  launch_blocks(request, mask.quad_count(), cuda::kDropoutThreads,
                cuda::attention_dropout_mask_kernel, mask);
  return true;
}

}  // namespace pkg::emulation
