// Which kernels a call of attention takes backward.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention/grad_key_value_mma.cuh"
#include "cuda/attention/grad_key_value_panels.cuh"
#include "cuda/attention/grad_key_value_warpgroups.cuh"
#include "cuda/attention/grad_query_mma.cuh"
#include "cuda/attention/grad_query_panels.cuh"
#include "cuda/attention/grad_query_warpgroups.cuh"
#include "cuda/attention/joint_gradients_copied.cuh"
#include "cuda/attention/joint_gradients_mma.cuh"
#include "cuda/attention/joint_gradients_panels.cuh"
#include "cuda/attention/joint_gradients_warpgroups.cuh"
#include "cuda/attention/kernel_choice.h"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/tile_limits.cuh"

namespace pkg::cuda {

// Whether the kernels of warpgroups for gradients take a problem, if the copy
// engine takes its operands.
template <class Element>
bool suits_gradient_warpgroups(const AttentionProblem<Element>& problem,
                               const AttentionDevice& device) {
  const int64_t most_head = problem.is_plain() ? 256 : 128;
  return sizeof(Element) == 2 && device.has_warpgroup_products &&
         !problem.is_packed() && suits_warpgroups(problem, most_head);
}

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

// Calls launch(operands) with maps of the operands for the copy engine, where
// kernels of warpgroups take the call: false where they do not. Queries and the
// gradient of the output have boxes of so many lines.
template <class Call, class Launch>
bool launch_gradient_warpgroups(const Call& call, const AttentionDevice& device,
                                int query_lines, Launch&& launch) {
  const auto& backward = call.backward;
  const auto& problem = backward.problem;
  if (!suits_gradient_warpgroups(problem, device)) {
    return false;
  }
  BoxedOperand query = boxed_queries(problem, problem.query, problem.head_size);
  BoxedOperand grad_output =
      boxed_queries(problem, backward.grad_output, problem.value_size);
  const BoxedOperand key = boxed_keys(problem, problem.key, problem.head_size);
  const BoxedOperand value =
      boxed_keys(problem, problem.value, problem.value_size);
  if (!query.has_map || !grad_output.has_map || !key.has_map ||
      !value.has_map) {
    return false;
  }
  query.tensor.box_lines = query_lines;
  grad_output.tensor.box_lines = query_lines;
  MappedGradients<Call> mapped;
  mapped.queries[0] = mapped_operand(query);
  mapped.queries[1] = mapped_operand(grad_output);
  mapped.keys[0] = mapped_operand(key);
  mapped.keys[1] = mapped_operand(value);
  mapped.call = call;
  launch(mapped);
  return true;
}

// How many blocks share so many tiles. One that stays copies for its next tile
// while it stores this; where some have less to do than others, the device
// hands them out.
template <class Element>
int64_t gradient_blocks(const AttentionProblem<Element>& problem, int64_t tiles,
                        const AttentionDevice& device) {
  return problem.has_equal_tiles()
             ? std::min<int64_t>(tiles, device.multiprocessors)
             : tiles;
}

// Calls function.operator()<width, plain>() with the width of heads as kernels
// have it whose blocks take whole heads, and whether scores are plain.
template <class Element, class Function>
void with_gradient_width(const AttentionProblem<Element>& problem,
                         Function&& function) {
  const bool is_plain = problem.is_plain();
  if (std::max(problem.head_size, problem.value_size) > 64) {
    is_plain ? function.template operator()<128, true>()
             : function.template operator()<128, false>();
  } else {
    is_plain ? function.template operator()<64, true>()
             : function.template operator()<64, false>();
  }
}

// The same for kernels of warpgroups, which have wider heads too.
template <class Element, class Function>
void with_warpgroup_gradient_width(const AttentionProblem<Element>& problem,
                                   Function&& function) {
  if (std::max(problem.head_size, problem.value_size) > 128) {
    function.template operator()<256, true>();
  } else {
    with_gradient_width(problem, function);
  }
}

template <class Element, class Launch>
bool launch_grad_query_warpgroups(const AttentionGradQuery<Element>& call,
                                  const AttentionDevice& device,
                                  Launch&& launch) {
  const auto run = [&](const MappedGradQuery<Element>& mapped) {
    const auto& problem = call.backward.problem;
    with_warpgroup_gradient_width(problem, [&]<int kWidth, bool kPlain>() {
      using Block = GradQueryWarpgroups<Element, kWidth, kPlain>;
      launch(attention_grad_query_warpgroups_kernel<Element, kWidth, kPlain>,
             gradient_blocks(problem, Block::tile_count(call), device),
             launch_shape<Block>(), mapped);
    });
  };
  return launch_gradient_warpgroups(call, device, kBoxLines, run);
}

// Only where both gradients have the same matrices: key and value are then the
// same for all of a block's queries.
template <class Element, class Launch>
bool launch_grad_key_value_warpgroups(
    const AttentionGradKeyValue<Element>& call, const AttentionDevice& device,
    Launch&& launch) {
  if (call.grad_key.data == nullptr || call.grad_value.data == nullptr) {
    return false;
  }
  const auto run = [&](const MappedGradKeyValue<Element>& mapped) {
    const auto& problem = call.backward.problem;
    with_warpgroup_gradient_width(problem, [&]<int kWidth, bool kPlain>() {
      using Block = GradKeyValueWarpgroups<Element, kWidth, kPlain>;
      launch(
          attention_grad_key_value_warpgroups_kernel<Element, kWidth, kPlain>,
          gradient_blocks(problem, Block::tile_count(call), device),
          launch_shape<Block>(), mapped);
    });
  };
  return launch_gradient_warpgroups(call, device, kQueryBoxLines, run);
}

template <class Element, int kWidth, bool kPlain>
using JointGradientsMma =
    GradKeyValueMma<Element, kWidth, kJointKeys<Element>,
                    JointGradQuery<Element, kWidth, kPlain>>;

// Whether there is a kernel for all gradients: not of float64.
template <class Element>
constexpr bool kHasJointGradients = sizeof(Element) <= sizeof(float);

// Whether one kernel can make all gradients: both heads fit a block, key and
// value have the same matrices, and each query is of one matrix of the batch:
// blocks of several would wait for one another to add to it. That of warpgroups
// is for plain attention alone; else two of them are faster than single warps.
template <class Element>
bool suits_joint_gradients(const AttentionGradQuery<Element>& query,
                           const AttentionGradKeyValue<Element>& key_value,
                           const AttentionDevice& device) {
  constexpr int64_t kMostHead = 128;
  const AttentionProblem<Element>& problem = query.backward.problem;
  const AttentionJointGradients<Element> call = {key_value, {}};
  const int64_t tiles = call.tile_count();
  return device.joins_gradients && problem.head_size <= kMostHead &&
         problem.value_size <= kMostHead &&
         (problem.is_plain() || !suits_gradient_warpgroups(problem, device)) &&
         query.partition.shared_count == 1 &&
         key_value.grad_key.data != nullptr &&
         key_value.grad_value.data != nullptr && tiles > 0 &&
         tiles < kMostTiledLength;
}

// The tiles of keys of the longest matrices that see the 64 queries from `row`
// on.
template <class Element>
int64_t tiles_that_see(const AttentionProblem<Element>& problem, int64_t row) {
  const KeyLimits limits = problem.longest_limits();
  const int64_t end = std::min(problem.columns, row + kJointRows + limits.last);
  const int64_t begin = std::max<int64_t>(0, row + limits.first);
  return end > begin
             ? tiles_of(end, kJointKeys<Element>) - begin / kJointKeys<Element>
             : 0;
}

// Whether the kernel for all gradients would be that of copied panels.
template <class Element>
bool copies_joint_gradients(const AttentionProblem<Element>& problem,
                            const AttentionDevice& device) {
  bool copies = false;
  if constexpr (std::is_same_v<Element, float>) {
    with_attention_width<Element>(
        std::max(problem.head_size, problem.value_size), [&]<int kWidth>() {
          copies = device.copies_panels &&
                   JointGradientsCopied<Element, kWidth>::suits(device);
        });
  }
  return copies;
}

// Blocks of the longest matrices that begin with the same queries at once: of
// warpgroups with the last, and as many as there are for a head; else all that
// see the first.
template <class Element>
int64_t blocks_that_begin_together(const AttentionJointGradients<Element>& call,
                                   const AttentionDevice& device) {
  const auto& problem = call.backward.problem;
  if (!suits_gradient_warpgroups(problem, device)) {
    return tiles_that_see(problem, 0);
  }
  const int64_t last = (call.row_tiles() - 1) * kJointRows;
  const int64_t heads = call.owned_together(device.multiprocessors);
  return std::min(tiles_that_see(problem, last),
                  tiles_of(device.multiprocessors, static_cast<int>(heads)));
}

// Whether it is worth it: twice as many rounds of blocks as make up, by the
// counts in cuda/attention/joint_gradients_mma.cuh and
// joint_gradients_warpgroups.cuh, for the wait of the first.
// Fewer blocks than a round would besides leave multiprocessors idle that the
// query's own kernel keeps busy; and where more blocks begin together than
// there are tiles of queries, they wait for longer than they save.
// With copied panels half of the multiprocessors are enough: where they have
// one block each, one of the key's own kernel takes for four products what this
// one should take for six, and the query's, of two warps, comes on top (an H200
// took 275 and 492 us for 1x8x1024x64).
template <class Element>
bool joint_gradients_pay(const AttentionGradKeyValue<Element>& key_value,
                         const AttentionDevice& device) {
  const int64_t rounds =
      suits_gradient_warpgroups(key_value.backward.problem, device) ? 3 : 4;
  const AttentionJointGradients<Element> call = {key_value, {}};
  const int64_t least = copies_joint_gradients(call.backward.problem, device)
                            ? device.multiprocessors / 2
                            : rounds * device.multiprocessors;
  return call.tile_count() >= least &&
         blocks_that_begin_together(call, device) <= call.row_tiles();
}

// The same by warpgroups, where kernels of them take the call's lengths: false
// where the copy engine does not take its operands.
template <class Element, class MakeMemory, class Launch>
bool launch_joint_gradient_warpgroups(
    const AttentionJointGradients<Element>& given,
    const AttentionDevice& device, MakeMemory&& make_memory, Launch&& launch) {
  const auto run = [&]<int kWidth>(MappedJointGradients<Element>& mapped) {
    AttentionJointGradients<Element>& call = mapped.call;
    make_memory(call, call.sum_count(kWidth), call.turn_count());
    const auto blocks =
        std::min<int64_t>(call.tile_count(), device.multiprocessors);
    call.together = static_cast<uint32_t>(call.owned_together(blocks));
    launch(attention_joint_gradients_warpgroups_kernel<Element, kWidth>, blocks,
           launch_shape<JointGradientsWarpgroups<Element, kWidth>>(), mapped);
  };
  return launch_gradient_warpgroups(
      given, device, kQueryBoxLines, [&](auto& mapped) {
        const auto& problem = given.backward.problem;
        if (std::max(problem.head_size, problem.value_size) > 64) {
          run.template operator()<128>(mapped);
        } else {
          run.template operator()<64>(mapped);
        }
      });
}

// Calls launch(kernel, blocks, shape, call) with the kernel for all gradients,
// for a call that suits it, once make_memory(sums, zeros) has given it
// memory for so many numbers and so many zeros: false where a block has too
// little shared memory, or the copy engine does not take the operands.
template <class Element, class MakeMemory, class Launch>
bool launch_joint_gradients_kernel(
    const AttentionGradQuery<Element>& query,
    const AttentionGradKeyValue<Element>& key_value,
    const AttentionDevice& device, MakeMemory&& make_memory, Launch&& launch) {
  AttentionJointGradients<Element> call = {key_value, query.grad_query};
  const AttentionProblem<Element>& problem = query.backward.problem;
  // Blocks take tiles by tickets: none waits for one that has no room yet.
  const auto run = [&](auto kernel, int width, LaunchShape shape, int blocks) {
    make_memory(call, call.sum_count(width), call.turn_count());
    launch(
        kernel,
        std::min(call.tile_count(), int64_t{blocks} * device.multiprocessors),
        shape, call);
  };
  if constexpr (sizeof(Element) != 2) {
    with_attention_width<Element>(
        std::max(problem.head_size, problem.value_size), [&]<int kWidth>() {
          if constexpr (std::is_same_v<Element, float>) {
            using Copied = JointGradientsCopied<Element, kWidth>;
            if (device.copies_panels && Copied::suits(device)) {
              return run(
                  attention_joint_gradients_copied_kernel<Element, kWidth>,
                  kWidth, launch_shape<Copied>(), Copied::kBlocks);
            }
          }
          using Panels = JointGradientsPanels<Element, kWidth>;
          run(attention_joint_gradients_panels_kernel<Element, kWidth>, kWidth,
              launch_shape<Panels>(), Panels::kBlocks);
        });
    return true;
  } else if (suits_gradient_warpgroups(problem, device)) {
    return launch_joint_gradient_warpgroups(call, device, make_memory, launch);
  } else {
    bool is_launched = false;
    with_gradient_width(problem, [&]<int kWidth, bool kPlain>() {
      is_launched =
          launch_gradient_mma<JointGradientsMma<Element, kWidth, kPlain>>(
              call, device.most_shared_bytes, [&](LaunchShape shape) {
                run(attention_joint_gradients_mma_kernel<Element, kWidth,
                                                         kPlain>,
                    kWidth, shape, 1);
              });
    });
    return is_launched;
  }
}

// By single warps with so many queries a block, or keys: false where a block
// has too little shared memory.
template <int kWidth, int kRows, class Element, class Launch>
bool launch_grad_query_mma(AttentionGradQuery<Element>& call,
                           const AttentionDevice& device, Launch&& launch) {
  return launch_gradient_mma<GradQueryMma<Element, kWidth, kRows>>(
      call, device.most_shared_bytes, [&](LaunchShape shape) {
        launch(attention_grad_query_mma_kernel<Element, kWidth, kRows>,
               call.template tile_count<kRows, kWidth>(), shape, call);
      });
}

template <int kWidth, int kKeys, class Element, class Launch>
bool launch_grad_key_value_mma(AttentionGradKeyValue<Element>& call,
                               const AttentionDevice& device, Launch&& launch) {
  return launch_gradient_mma<GradKeyValueMma<Element, kWidth, kKeys>>(
      call, device.most_shared_bytes, [&](LaunchShape shape) {
        launch(attention_grad_key_value_mma_kernel<Element, kWidth, kKeys>,
               call.template tile_count<kKeys, kWidth>(), shape, call);
      });
}

// Calls launch(kernel, blocks, shape, call) with the kernel for the call.
template <class Element, class Launch>
void launch_attention_grad_query_kernel(AttentionGradQuery<Element> call,
                                        const AttentionDevice& device,
                                        Launch&& launch) {
  if constexpr (sizeof(Element) == 2) {
    if (launch_grad_query_warpgroups(call, device, launch)) {
      return;
    }
  }
  const int64_t head_size = call.backward.problem.head_size;
  with_attention_width<Element>(head_size, [&]<int kWidth>() {
    if constexpr (sizeof(Element) == 2) {
      if (launch_grad_query_mma<kWidth, kMmaLines>(call, device, launch) ||
          launch_grad_query_mma<128, kFewMmaLines>(call, device, launch)) {
        return;
      }
    }
    launch(attention_grad_query_panels_kernel<Element, kWidth>,
           call.template tile_count<kAttentionTile, kWidth>(),
           LaunchShape(GradQueryGrid<Element, kWidth>::Thread::kThreads), call);
  });
}

template <class Element, class Launch>
void launch_attention_grad_key_value_kernel(AttentionGradKeyValue<Element> call,
                                            const AttentionDevice& device,
                                            Launch&& launch) {
  if constexpr (sizeof(Element) == 2) {
    if (launch_grad_key_value_warpgroups(call, device, launch)) {
      return;
    }
  }
  const auto& problem = call.backward.problem;
  const int64_t head_size = problem.head_size > problem.value_size
                                ? problem.head_size
                                : problem.value_size;
  with_attention_width<Element>(head_size, [&]<int kWidth>() {
    if constexpr (sizeof(Element) == 2) {
      if (launch_grad_key_value_mma<kWidth, kMmaLines>(call, device, launch) ||
          launch_grad_key_value_mma<128, kFewMmaLines>(call, device, launch)) {
        return;
      }
    }
    launch(attention_grad_key_value_panels_kernel<Element, kWidth>,
           call.template tile_count<kAttentionTile, kWidth>(),
           launch_shape<GradKeyValuePanels<Element, kWidth>>(), call);
  });
}

}  // namespace pkg::cuda
