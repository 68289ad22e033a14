#include <limits>
#include <memory>
#include <vector>

#include "attention_request.h"
#include "cuda/attention/grad_mask.cuh"
#include "cuda/attention/gradient_kernels.cuh"
#include "cuda/attention/normalized_grad_output.cuh"

namespace pkg::emulation {
namespace {

// The dimensions of the batch that the tensor has: a list of 0 and 1.
cuda::BatchPartition partition(const Request& request,
                               const std::string& name) {
  bool is_owned[cuda::kMaxBatchDims] = {};
  const auto& owned = request.integers(name + "_owned");
  std::copy(owned.begin(), owned.end(), is_owned);
  return cuda::partition_batch(batch_sizes(request.integers("batch")),
                               is_owned);
}

template <class Element>
cuda::AttentionBackward<Element> backward_of(const Request& request) {
  return {
      .problem = attention_problem<Element>(request),
      .grad_output = matrix_batch<Element>(request, "grad_output"),
      .output = matrix_batch<Element>(request, "output"),
      .output_residual =
          request.buffer<Element>("output_residual") == nullptr
              ? cuda::MatrixBatch<Element>{}
              : matrix_batch<Element>(request, "output_residual"),
      .log_sum_exp = request.buffer<cuda::Accumulator<Element>>("log_sum_exp"),
      .delta = request.buffer<cuda::Accumulator<Element>>("delta"),
  };
}

template <class Element>
void run_normalized_grad_output(const Request& request) {
  const cuda::AttentionNormalizedGradOutput<Element> call = {
      .backward = backward_of<Element>(request),
      .normalized = result_batch<Element>(request, "normalized"),
  };
  launch_blocks(request, call.tile_count(),
                cuda::NormalizedScores<Element>::Thread::kThreads,
                cuda::attention_normalized_grad_output_kernel<Element>, call);
}

template <class Element>
void run_delta(const Request& request) {
  const auto call = backward_of<Element>(request);
  launch_blocks(request, call.delta_tiles(), cuda::kTileThreads,
                cuda::attention_delta_kernel<Element>, call);
}

// Launches the kernel that is chosen for the device.
auto launcher(const Request& request) {
  return [&](auto kernel, int64_t tiles, cuda::LaunchShape shape,
             const auto& arguments) {
    launch_blocks(request, tiles, shape, kernel, arguments);
  };
}

template <class Element>
cuda::AttentionGradQuery<Element> grad_query_of(const Request& request) {
  return {
      .backward = backward_of<Element>(request),
      .partition = partition(request, "query"),
      .grad_query = result_batch<Element>(request, "grad_query"),
  };
}

template <class Element>
cuda::AttentionGradKeyValue<Element> grad_key_value_of(const Request& request) {
  return {
      .backward = backward_of<Element>(request),
      .partition = partition(request, "key"),
      .grad_key = result_batch<Element>(request, "grad_key"),
      .grad_value = result_batch<Element>(request, "grad_value"),
  };
}

template <class Element>
void run_grad_query(const Request& request) {
  cuda::launch_attention_grad_query_kernel(
      grad_query_of<Element>(request), device_of(request), launcher(request));
}

template <class Element>
void run_grad_key_value(const Request& request) {
  cuda::launch_attention_grad_key_value_kernel(
      grad_key_value_of<Element>(request), device_of(request),
      launcher(request));
}

// Where the call suits one kernel for all gradients: else nothing is written.
template <class Element>
void run_joint_gradients(const Request& request) {
  if constexpr (cuda::kHasJointGradients<Element>) {
    const auto query = grad_query_of<Element>(request);
    const auto key_value = grad_key_value_of<Element>(request);
    cuda::AttentionDevice device = device_of(request);
    device.joins_gradients = true;
    device.copies_panels = request.integer("copied_panels") != 0;
    if (!cuda::suits_joint_gradients(query, key_value, device)) {
      return;
    }
    std::unique_ptr<float[]> sums;
    std::unique_ptr<int[]> turns;
    cuda::launch_joint_gradients_kernel(
        query, key_value, device,
        [&](auto& call, int64_t numbers, int64_t zeros) {
          // To the byte, so that the sanitizer sees what is beyond them.
          sums = std::make_unique<float[]>(static_cast<size_t>(numbers));
          turns = std::make_unique<int[]>(static_cast<size_t>(zeros));
          call.sums = sums.get();
          call.turns = turns.get();
        },
        launcher(request));
  }
}

template <class Element, class MaskElement>
void run_grad_mask(const Request& request) {
  cuda::AttentionGradMask<Element, MaskElement> call = {
      .backward = backward_of<Element>(request),
      .partition = partition(request, "mask"),
      .grad_mask = request.buffer<MaskElement>("grad_mask"),
      .rows = request.integers("mask_shape").at(0),
      .columns = request.integers("mask_shape").at(1),
  };
  using Number = cuda::Accumulator<Element>;
  call.splits = call.suitable_splits();
  std::vector<Number> parts(
      call.splits > 1 ? call.splits * call.element_count() : 0,
      std::numeric_limits<Number>::quiet_NaN());
  call.parts = parts.data();
  launch_blocks(request, call.piece_count(),
                cuda::GradMaskTile<Number>::Thread::kThreads,
                cuda::attention_grad_mask_kernel<Element, MaskElement>, call);
  if (call.splits > 1) {
    launch_blocks(request, cuda::tiles_of(call.element_count(), cuda::kWarp),
                  cuda::kPartWarps * cuda::kWarp,
                  cuda::attention_grad_mask_sum_kernel<Element, MaskElement>,
                  call);
  }
  if (auto* const pieces = request.buffer<int64_t>("pieces")) {
    *pieces = call.piece_count();
  }
}

}  // namespace

bool run_attention_backward(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "attention_normalized_grad_output") {
    for_attention_type(request, [&]<class Element>() {
      run_normalized_grad_output<Element>(request);
    });
  } else if (kernel == "attention_delta") {
    for_attention_type(request,
                       [&]<class Element>() { run_delta<Element>(request); });
  } else if (kernel == "attention_grad_query") {
    for_attention_type(
        request, [&]<class Element>() { run_grad_query<Element>(request); });
  } else if (kernel == "attention_grad_key_value") {
    for_attention_type(request, [&]<class Element>() {
      run_grad_key_value<Element>(request);
    });
  } else if (kernel == "attention_joint_gradients") {
    for_attention_type(request, [&]<class Element>() {
      run_joint_gradients<Element>(request);
    });
  } else if (kernel == "attention_grad_mask") {
    for_attention_type(request, [&]<class Element>() {
      if (request.text("mask_type") == request.text("type")) {
        run_grad_mask<Element, Element>(request);
      } else {
        run_grad_mask<Element, float>(request);
      }
    });
  } else {
    return false;
  }
  return true;
}

}  // namespace pkg::emulation
