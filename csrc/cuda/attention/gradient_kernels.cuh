// Which kernels a call of attention takes backward.
#pragma once

#include "cuda/attention/grad_key_value_mma.cuh"
#include "cuda/attention/grad_key_value_panels.cuh"
#include "cuda/attention/grad_query_mma.cuh"
#include "cuda/attention/grad_query_panels.cuh"

namespace pkg::cuda {

// Calls launch(shape) with that of a kernel by tensor cores, after saying in
// the call how many places the operands have that follow one another, the most
// for which a block has the memory: false where it has too little even for one.
template <class Mma, class Call, class Launch>
bool launch_gradient_mma(Call& call, int most_shared_bytes, Launch&& launch) {
  const auto& problem = call.backward.problem;
  constexpr int64_t kMostHead = 256;
  if (problem.head_size > kMostHead || problem.value_size > kMostHead ||
      problem.rows >= kMostTiledLength || problem.columns >= kMostTiledLength) {
    return false;
  }
  for (call.places = 2; call.places > 0; --call.places) {
    const LaunchShape shape = Mma::launch_shape(problem, call.places);
    if (shape.shared_bytes <= most_shared_bytes) {
      launch(shape);
      return true;
    }
  }
  return false;
}

// Calls launch(kernel, tiles, shape, call) with the kernel for the call, of
// which a block may use so much shared memory.
template <class Element, class Launch>
void launch_attention_grad_query_kernel(AttentionGradQuery<Element> call,
                                        int most_shared_bytes,
                                        Launch&& launch) {
  const int64_t head_size = call.backward.problem.head_size;
  with_attention_width<Element>(head_size, [&]<int kWidth>() {
    if constexpr (sizeof(Element) == 2) {
      using Mma = GradQueryMma<Element, kWidth>;
      const auto run = [&](LaunchShape shape) {
        launch(attention_grad_query_mma_kernel<Element, kWidth>,
               call.template tile_count<Mma::kRows, kWidth>(), shape, call);
      };
      if (launch_gradient_mma<Mma>(call, most_shared_bytes, run)) {
        return;
      }
    }
    launch(attention_grad_query_panels_kernel<Element, kWidth>,
           call.template tile_count<kAttentionTile, kWidth>(),
           LaunchShape(kTileThreads), call);
  });
}

template <class Element, class Launch>
void launch_attention_grad_key_value_kernel(AttentionGradKeyValue<Element> call,
                                            int most_shared_bytes,
                                            Launch&& launch) {
  const auto& problem = call.backward.problem;
  const int64_t head_size = problem.head_size > problem.value_size
                                ? problem.head_size
                                : problem.value_size;
  with_attention_width<Element>(head_size, [&]<int kWidth>() {
    if constexpr (sizeof(Element) == 2) {
      using Mma = GradKeyValueMma<Element, kWidth>;
      const auto run = [&](LaunchShape shape) {
        launch(attention_grad_key_value_mma_kernel<Element, kWidth>,
               call.template tile_count<Mma::kKeys, kWidth>(), shape, call);
      };
      if (launch_gradient_mma<Mma>(call, most_shared_bytes, run)) {
        return;
      }
    }
    launch(problem.variant.softcap > 0
               ? attention_grad_key_value_panels_kernel<Element, kWidth, true>
               : attention_grad_key_value_panels_kernel<Element, kWidth, false>,
           call.template tile_count<kAttentionTile, kWidth>(),
           LaunchShape(kTileThreads), call);
  });
}

}  // namespace pkg::cuda
