// Which kernel a call of attention takes forward.
#pragma once

#include "cuda/attention/forward_mma.cuh"
#include "cuda/attention/forward_panels.cuh"

namespace pkg::cuda {

// Calls launch(kernel, tiles, shape, call) with the kernel for the call, of
// which a block may use so much shared memory.
template <class Element, class Launch>
void launch_attention_forward_kernel(const AttentionForward<Element>& call,
                                     int most_shared_bytes, Launch&& launch) {
  const AttentionProblem<Element>& problem = call.problem;
  with_attention_width<Element>(problem.value_size, [&]<int kWidth>() {
    if constexpr (sizeof(Element) == 2) {
      using Mma = AttentionMma<Element, kWidth>;
      const LaunchShape shape = Mma::launch_shape(problem.head_size);
      if (problem.head_size <= Mma::kMostHead &&
          problem.rows < kMostTiledLength &&
          problem.columns < kMostTiledLength &&
          shape.shared_bytes <= most_shared_bytes) {
        return launch(attention_forward_mma_kernel<Element, kWidth>,
                      call.template tile_count<Mma::kRows, kWidth>(), shape,
                      call);
      }
    }
    launch(attention_forward_panels_kernel<Element, kWidth>,
           call.template tile_count<kAttentionTile, kWidth>(),
           LaunchShape(kTileThreads), call);
  });
}

}  // namespace pkg::cuda
