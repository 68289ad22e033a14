// Which kernel a call of attention takes forward.
#pragma once

#include <algorithm>

#include "cuda/attention/forward_mma.cuh"
#include "cuda/attention/forward_panels.cuh"
#include "cuda/attention/forward_warpgroups.cuh"

namespace pkg::cuda {

// Calls function.operator()<width, plain>() with the width of heads as the
// kernels of warpgroups have it; false where no kernel has such.
template <class Function>
bool with_warpgroup_width(int64_t width, bool is_plain, Function&& function) {
  if (width > (is_plain ? 256 : 128)) {
    return false;
  }
  if (width > 128) {
    function.template operator()<256, true>();
  } else if (width > 64) {
    is_plain ? function.template operator()<128, true>()
             : function.template operator()<128, false>();
  } else {
    is_plain ? function.template operator()<64, true>()
             : function.template operator()<64, false>();
  }
  return true;
}

// Whether it could: where the copy engine takes the operands.
template <class Element, class Launch>
bool launch_attention_forward_warpgroups(const AttentionForward<Element>& call,
                                         const AttentionDevice& device,
                                         Launch&& launch) {
  const AttentionProblem<Element>& problem = call.problem;
  if (!device.has_warpgroup_products || problem.rows >= kMostTiledLength ||
      problem.columns >= kMostTiledLength) {
    return false;
  }
  const BoxedOperand query =
      boxed_queries(problem, problem.query, problem.head_size);
  const BoxedOperand key = boxed_keys(problem, problem.key, problem.head_size);
  const BoxedOperand value =
      boxed_keys(problem, problem.value, problem.value_size);
  if (!query.has_map || !key.has_map || !value.has_map) {
    return false;
  }
  return with_warpgroup_width(
      std::max(problem.head_size, problem.value_size), problem.is_plain(),
      [&]<int kWidth, bool kPlain>() {
        using Block = AttentionWarpgroups<Element, kWidth, kPlain>;
        const int64_t tiles = call.template tile_count<Block::kRows, kWidth>();
        // A block that stays copies for its next queries while it stores these.
        // Where some see fewer keys than others, the device hands them out.
        const int64_t blocks =
            problem.has_equal_tiles()
                ? std::min<int64_t>(tiles, device.multiprocessors)
                : tiles;
        launch(attention_forward_warpgroups_kernel<Element, kWidth, kPlain>,
               blocks, launch_shape<Block>(),
               MappedAttentionForward<Element>{mapped_operand(query),
                                               mapped_operand(key),
                                               mapped_operand(value), call});
      });
}

// Calls launch(kernel, blocks, shape, call) with the kernel for the call.
template <class Element, class Launch>
void launch_attention_forward_kernel(const AttentionForward<Element>& call,
                                     const AttentionDevice& device,
                                     Launch&& launch) {
  const AttentionProblem<Element>& problem = call.problem;
  if constexpr (sizeof(Element) == 2) {
    if (launch_attention_forward_warpgroups(call, device, launch)) {
      return;
    }
  }
  with_attention_width<Element>(problem.value_size, [&]<int kWidth>() {
    if constexpr (sizeof(Element) == 2) {
      using Mma = AttentionMma<Element, kWidth>;
      const LaunchShape shape = Mma::launch_shape(problem.head_size);
      if (problem.head_size <= Mma::kMostHead &&
          problem.rows < kMostTiledLength &&
          problem.columns < kMostTiledLength &&
          shape.shared_bytes <= device.most_shared_bytes) {
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
