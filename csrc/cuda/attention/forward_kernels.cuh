// Which kernel a call of attention takes forward.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/forward_copied.cuh"
#include "cuda/attention/forward_mma.cuh"
#include "cuda/attention/forward_panels.cuh"
#include "cuda/attention/forward_warpgroups.cuh"
#include "cuda/attention/kernel_choice.h"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/tile_limits.cuh"
#include "host/integer_math.h"

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

// By the kernel of single warps for heads of that width and so many queries,
// where a block of it has memory for the call's; returns whether.
template <class Element, int kWidth, bool kPlain, int kRows, class Launch>
bool launch_attention_forward_mma_of(const AttentionForward<Element>& call,
                                     const AttentionDevice& device,
                                     Launch&& launch) {
  using Mma = AttentionMma<Element, kWidth, kPlain, kRows>;
  const int64_t head_size = call.problem.head_size;
  const LaunchShape shape = Mma::launch_shape(head_size);
  if (head_size > Mma::kMostHead ||
      shape.shared_bytes > device.most_shared_bytes) {
    return false;
  }
  launch(attention_forward_mma_kernel<Element, kWidth, kPlain, kRows>,
         call.template tile_count<kRows, kWidth>(), shape, call);
  return true;
}

// By single warps, where there is such a kernel for the call; returns whether.
// Of values half as wide as the tile for wider heads half of the products would
// be with zeros. Blocks of fewer queries come after those for which there is no
// memory.
template <class Element, class Launch>
bool launch_attention_forward_mma(const AttentionForward<Element>& call,
                                  const AttentionDevice& device,
                                  Launch&& launch) {
  const AttentionProblem<Element>& problem = call.problem;
  if (problem.rows >= kMostTiledLength || problem.columns >= kMostTiledLength) {
    return false;
  }
  const int64_t width = std::max(problem.head_size, problem.value_size);
  bool is_launched = false;
  const auto launch_of = [&]<int kWidth, bool kPlain, int kRows = kMmaLines>() {
    is_launched =
        is_launched ||
        launch_attention_forward_mma_of<Element, kWidth, kPlain, kRows>(
            call, device, launch);
  };
  const bool wastes_products = width > 128 && problem.value_size <= 128;
  if (problem.is_plain() && width <= kMostMmaHead && !wastes_products) {
    with_warpgroup_width(width, true, launch_of);
    if (width > 128) {
      launch_of.template operator()<256, true, kFewMmaLines>();
    }
  }
  with_attention_width<Element>(problem.value_size, [&]<int kWidth>() {
    launch_of.template operator()<kWidth, false>();
  });
  launch_of.template operator()<128, false, kFewMmaLines>();
  return is_launched;
}

// How long the busiest multiprocessor has, in some unit: `blocks` of so many
// warps are shared out, each `work` for a multiprocessor of eight warps, as
// many as there is room for. With fewer, whose waits others do not fill, an
// instruction is issued less often: alone in a multiprocessor two warps of
// forward_panels.cuh reached 0.35 of the rate of eight (H100, 1x8x1024x64 and
// 2x16x4096x64), and four, each of a scheduler's own, should reach twice that.
inline double time_of_busiest(int64_t blocks, int warps, double work,
                              int64_t multiprocessors) {
  constexpr int kMostWarps = 8;
  const int64_t own = ceil_div(blocks, multiprocessors);
  const int64_t at_once = kMostWarps / warps;
  const auto last = static_cast<double>(own % at_once);
  const double rate = std::min(1.0, 0.175 * warps * last);
  return work * (static_cast<double>(own / at_once * at_once) +
                 (last > 0 ? last / rate : 0));
}

// Into how many parts the keys are divided among blocks of 128 queries, or 0
// where blocks of 64 and all keys take less time: by the multiply-adds among a
// tile's instructions, as forward_copied.cuh counts them. A part costs as much
// as a tile of keys beside its own: queries are loaded anew, and sums written,
// read and added up.
template <int kWidth>
int64_t copied_forward_parts(const AttentionForward<float>& call,
                             int64_t multiprocessors) {
  using Block = AttentionCopied<float, kWidth>;
  constexpr int kSmallWarps = ForwardGrid<float, kWidth>::Thread::kThreads / 32;
  constexpr int64_t kMostBlocks = 4;  // of parts, of a multiprocessor
  const int64_t tiles = call.template tile_count<Block::kRows, kWidth>();
  const int64_t key_tiles = tiles_of(call.problem.columns, Block::kKeys);
  if (tiles == 0) {
    return 0;
  }
  const int64_t most =
      call.problem.is_packed()
          ? 1
          : std::min(kMostBlocks * multiprocessors / tiles, key_tiles);
  double least = time_of_busiest(
      call.template tile_count<kAttentionTile, kWidth>(), kSmallWarps,
      static_cast<double>(kAttentionTile * (key_tiles + 1)) / 0.63,
      multiprocessors);
  int64_t best = 0;
  for (int64_t parts = 1; parts <= std::max<int64_t>(most, 1); ++parts) {
    const int64_t each = ceil_div(key_tiles, parts);
    const double time = time_of_busiest(
        tiles * parts, Block::kThreads / 32,
        static_cast<double>(Block::kRows * (each + 1)) / 0.70, multiprocessors);
    if (time < least) {
      least = time;
      best = parts;
    }
  }
  return best;
}

// Whether it could: where a block has memory for its queries' whole heads.
// Where no number of parts is asked for, if it pays. allocate(count) has memory
// for numbers until the kernels have run.
template <class Launch, class Allocate>
bool launch_attention_forward_copied(AttentionForward<float> call,
                                     const AttentionDevice& device,
                                     int64_t asked_parts, Launch&& launch,
                                     Allocate&& allocate) {
  bool is_launched = false;
  with_attention_width<float>(call.problem.value_size, [&]<int kWidth>() {
    using Block = AttentionCopied<float, kWidth>;
    if (!Block::suits(call.problem, device.most_shared_bytes)) {
      return;
    }
    const int64_t parts = asked_parts > 0 ? asked_parts
                                          : copied_forward_parts<kWidth>(
                                                call, device.multiprocessors);
    if (parts == 0) {
      return;
    }
    if (parts > 1) {
      call.divide_keys(parts, allocate);
    }
    launch(attention_forward_copied_kernel<float, kWidth>,
           call.template tile_count<Block::kRows, kWidth>() * parts,
           Block::launch_shape(call.problem.head_size), call);
    if (parts > 1) {
      using Combination = AttentionCombination<float>;
      launch(
          attention_forward_combine_kernel<float>,
          call.template tile_count<Combination::kRows, Combination::kWidth>(),
          LaunchShape(Combination::kThreads).that_waits(), call);
    }
    is_launched = true;
  });
  return is_launched;
}

// Calls launch(kernel, blocks, shape, call) with the kernels for the call.
template <class Element, class Launch, class Allocate>
void launch_attention_forward_kernel(const AttentionForward<Element>& call,
                                     const AttentionDevice& device,
                                     Launch&& launch, Allocate&& allocate) {
  const AttentionProblem<Element>& problem = call.problem;
  if constexpr (sizeof(Element) == 2) {
    if (launch_attention_forward_warpgroups(call, device, launch)) {
      return;
    }
  }
  if constexpr (std::is_same_v<Element, float>) {
    if (device.copies_panels &&
        launch_attention_forward_copied(call, device, 0, launch, allocate)) {
      return;
    }
  }
  if constexpr (sizeof(Element) == 2) {
    if (launch_attention_forward_mma(call, device, launch)) {
      return;
    }
  }
  with_attention_width<Element>(problem.value_size, [&]<int kWidth>() {
    launch(attention_forward_panels_kernel<Element, kWidth>,
           call.template tile_count<kAttentionTile, kWidth>(),
           LaunchShape(ForwardGrid<Element, kWidth>::Thread::kThreads), call);
  });
}

}  // namespace pkg::cuda
