// Which kernel a call of attention takes forward.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/forward_copied.cuh"
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

// Whether blocks of 128 queries take less time than those of 64: by the tiles
// of the busiest multiprocessor, whose blocks share it, and by the
// multiply-adds among a tile's instructions, as forward_copied.cuh counts them.
template <int kWidth>
bool copied_forward_pays(const AttentionForward<float>& call,
                         int64_t multiprocessors) {
  const auto time = [&](int64_t tiles, int64_t rows, int64_t percent) {
    return (tiles + multiprocessors - 1) / multiprocessors * rows * 100 /
           percent;
  };
  constexpr int kRows = AttentionCopied<float, kWidth>::kRows;
  return time(call.template tile_count<kRows, kWidth>(), kRows, 70) <
         time(call.template tile_count<kAttentionTile, kWidth>(),
              kAttentionTile, 63);
}

// Whether it could: where a block has memory for its queries' whole heads.
template <class Launch>
bool launch_attention_forward_copied(const AttentionForward<float>& call,
                                     const AttentionDevice& device,
                                     bool only_if_it_pays, Launch&& launch) {
  const AttentionProblem<float>& problem = call.problem;
  bool is_launched = false;
  with_attention_width<float>(problem.value_size, [&]<int kWidth>() {
    using Block = AttentionCopied<float, kWidth>;
    if (!Block::suits(problem, device.most_shared_bytes) ||
        (only_if_it_pays &&
         !copied_forward_pays<kWidth>(call, device.multiprocessors))) {
      return;
    }
    launch(attention_forward_copied_kernel<float, kWidth>,
           call.template tile_count<Block::kRows, kWidth>(),
           Block::launch_shape(problem.head_size), call);
    is_launched = true;
  });
  return is_launched;
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
  if constexpr (std::is_same_v<Element, float>) {
    if (device.copies_panels &&
        launch_attention_forward_copied(call, device, true, launch)) {
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
