// Which kernel a call of attention takes forward.
#pragma once

#include <algorithm>

#include "cuda/attention/forward_mma.cuh"
#include "cuda/attention/forward_panels.cuh"
#include "cuda/attention/forward_warpgroups.cuh"

namespace pkg::cuda {

// The widest heads for which there is a kernel of warpgroups.
constexpr int64_t most_warpgroup_head(bool is_plain) {
  return is_plain ? 256 : 128;
}

// Calls function.operator()<width, plain>() with the width of heads, no more
// than that, as those kernels have it.
template <class Function>
void with_warpgroup_width(int64_t width, bool is_plain, Function&& function) {
  if (width > 128) {
    function.template operator()<256, true>();
  } else if (width > 64) {
    is_plain ? function.template operator()<128, true>()
             : function.template operator()<128, false>();
  } else {
    is_plain ? function.template operator()<64, true>()
             : function.template operator()<64, false>();
  }
}

// Whether it could: where the copy engine takes the operands.
template <class Element, class Launch>
bool launch_attention_forward_warpgroups(const AttentionForward<Element>& call,
                                         const AttentionDevice& device,
                                         Launch&& launch) {
  const AttentionProblem<Element>& problem = call.problem;
  const bool is_plain = problem.is_plain();
  if (!device.has_warpgroup_products ||
      !suits_warpgroups(problem, most_warpgroup_head(is_plain))) {
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
  with_warpgroup_width(
      std::max(problem.head_size, problem.value_size), is_plain,
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
  return true;
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
           LaunchShape(ForwardGrid<Element, kWidth>::Thread::kThreads), call);
  });
}

}  // namespace pkg::cuda
