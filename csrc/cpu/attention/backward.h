// The backward pass of attention: the gradients of query, key, value and mask.
//
// Algorithm: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2).
//
// Derivation, with * element by element and M dropout's factors, 0 or
// 1 / (1 - p). The forward pass computes, row by row,
//
//   S = scale Q K^T + mask,   P = exp(S - LSE),   O = (M * P) V
//
// and keeps LSE, the log-sum-exp of the row, but neither S nor P. With dO, the
// gradient of O:
//
//   dV    = (M * P)^T dO
//   dP    = M * (dO V^T)
//   dS    = P * (dP - D)    with D = rowsum(P * dP), since a row of P sums to 1
//   dQ    = scale dS K
//   dK    = scale dS^T Q
//   dmask = dS, summed over all that the mask was broadcast to
//
// Where scores are capped, S = c tanh(scale Q K^T / c) + mask, and dQ and dK
// are made of dS * (1 - tanh^2).
//
// D is also rowsum(dO * O), of which no dP has to be known:
// sum_j P_j M_j (dO . V_j) = dO . (sum_j M_j P_j V_j) = dO . O.
//
// dP and D are often much larger than their difference, so they are made alike:
// O in D is the output and its rounding residual together (residual.h), D is
// added up in the order of dO V^T (row_statistics.h), and where a few rows were
// decoded, the forward pass is repeated in the order of this one
// (recomputed_forward.h). What rounding still makes of a row's sum of dS, which
// should be 0, is taken off dQ at the end: compensation.h says why and how.
//
// Order, with the file that has the step; || is parallel:
//
//   || rows: D                                            row_statistics.h
//   for a few key heads at a time (heads_at_once())       this file
//     || query heads x row blocks: pack Q, dO             backward_operands.h
//     || key heads x splits of their keys: a task         this file
//       for each key block j of the task                  key_block_gradients.h
//         pack K_j, V_j;  dK_j = dV_j = 0
//         for each query head of the group, row block i
//           for each strip of rows that sees keys
//             S, dO V^T;  P, dS                           score_gradients.h
//             dmask += dS                                 grad_mask.h
//             sums for the compensation of dQ_i           compensation.h
//             dQ_i += dS K_j
//           for each strip of keys that are seen
//             dV_j += (M * P)^T dO_i;  dK_j += dS^T Q_i
//         store scale dK_j, dV_j
//     || rows: dQ of the splits added, compensated, stored    grad_query.h
//
//                       K, V in blocks of 192 keys
//                     j = 0     j = 1     j = 2     j = 3
//                   +---------+---------+---------+---------+
//   Q, dO     i = 0 | P, dS   | P, dS   | P, dS   | P, dS   |  dQ_0
//   in blocks     1 |   |     |   |     |   |     |   |     |  dQ_1
//   of 96 rows    2 |   v     |   v     |   v     |   v     |  dQ_2
//                   +---------+---------+---------+---------+
//                    dK_0 dV_0 dK_1 dV_1 dK_2 dV_2 dK_3 dV_3
//                    `--- split 0 -----' `--- split 1 -----'
//
// A task goes down all rows of one block of keys after the other, so dK_j and
// dV_j stay in its cache, and nobody else adds to them: there are no atomic
// additions. dQ is added to once for each block of keys, by each split in a sum
// of its own; there are several splits only where heads are fewer than threads,
// and their sums are added in the order of the keys. So a result depends on the
// number of threads, but never on their timing.
//
// Blocks: 96 rows x 192 keys of the micro-kernel's MR x NR tiles, so that P and
// dS (156 KiB), a block of keys, its sums and a block of rows, each packed two
// ways, take half of a 1 MiB L2 cache at a head size of 64.
//
// float32 and float16 go by tile registers where these are the faster way, and
// then the forward pass does too: tile_backward_operands.h has the products, in
// blocks of 64 rows, tile_key_block_gradients.h the loops and
// tile_score_gradients.h what is between the products.
//
// Operations: 2 L S (3 E + 2 Ev) in five products and L S exponentials for each
// head, half if causal. Bytes, at the least: 2 (L + S)(E + Ev) elements,
// operands and gradients once. Each block of keys has the packed rows,
// 2 L (E + Ev), and dQ, 2 L E, come through the L2 cache: where E = Ev, 160
// multiply-adds for each such element. Extra memory 2 L (E + Ev) packed and L E
// for each split: O(L), never L S. Bound by the multiply-add units.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention/backward_operands.h"
#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocking.h"
#include "cpu/attention/grad_mask.h"
#include "cpu/attention/grad_query.h"
#include "cpu/attention/key_block_gradients.h"
#include "cpu/attention/recomputed_forward.h"
#include "cpu/attention/row_statistics.h"
#include "cpu/attention/tile_backward_operands.h"
#include "cpu/attention/tile_key_block_gradients.h"
#include "cpu/attention/tile_operands.h"
#include "cpu/attention/visible_keys.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// How the work is cut: a task is a slice of key heads (one head, unless
// GradMaskSums wants more), or a split of their keys where there are too few
// heads for the threads. Heads are packed a few at a time.
struct BackwardPlan {
  int64_t heads_at_once;
  int64_t splits;
  int64_t key_blocks;

  // `most_heads`: key heads that may be packed at a time.
  template <class Input>
  BackwardPlan(const AttentionShape& shape, int64_t most_heads,
               int64_t key_heads, int64_t threads,
               const GradMaskSums<Input>* grad_mask_sums) {
    heads_at_once =
        std::clamp<int64_t>(most_heads, 1, std::max<int64_t>(key_heads, 1));
    const int64_t slices = grad_mask_sums == nullptr
                               ? heads_at_once
                               : grad_mask_sums->slices(heads_at_once);
    // Two tasks a thread even out unequal ones, as few blocks make them: then
    // each is a task.
    key_blocks = ceil_div(shape.columns, kKeyBlock);
    const int64_t wanted = threads == 1                ? 1
                           : key_blocks <= 4 * threads ? key_blocks
                                                       : 2 * threads;
    splits = std::clamp<int64_t>(ceil_div(wanted, slices), 1,
                                 std::max<int64_t>(key_blocks, 1));
  }

  // The first key of a split.
  int64_t column(int64_t split) const {
    return key_blocks * split / splits * kKeyBlock;
  }
};

// What makes the products, and what it wants packed, of how many key heads at a
// time.
template <class Input>
struct BackwardByVectors {
  using Packing = PackedHead<Input>;
  using Element = typename Packing::KGroup;
  using Block = KeyBlockGradients<Input>;
  static constexpr int64_t kRows = kRowBlock;
  static int64_t heads_at_once(int64_t head_bytes, int64_t threads) {
    return attention::heads_at_once(head_bytes, threads);
  }
  static bool is_refused(const Packing& /*packing*/) { return false; }
};
#if defined(PKG_HAS_TILES)
template <class Input>
struct BackwardByTiles {
  using Packing = TilePackedHead<Input>;
  using Element = std::byte;
  using Block = TileKeyBlockGradients<Input>;
  static constexpr int64_t kRows = Packing::kRows;
  static int64_t heads_at_once(int64_t head_bytes, int64_t threads) {
    return tile_heads_at_once(head_bytes, threads);
  }
  static bool is_refused(const Packing& packing) { return packing.is_refused; }
};
#endif

template <class Input, class Way>
class BackwardPass {
 public:
  BackwardPass(const BackwardProblem<Input>& problem,
               GradMaskSums<Input>* grad_mask_sums)
      : problem_(problem),
        grad_mask_sums_(grad_mask_sums),
        visible_keys_(problem.forward),
        packing_(problem.shape()),
        plan_(problem.shape(),
              Way::heads_at_once(problem.shape().group * packing_.size *
                                     int64_t{sizeof(Element)},
                                 problem.forward.threads),
              problem.forward.key_heads(), problem.forward.threads,
              grad_mask_sums),
        sums_(problem.shape(), packing_.key_stride),
        row_blocks_(ceil_div(problem.shape().rows, Way::kRows)) {
    if (grad_mask_sums != nullptr) {
      grad_mask_sums->allocate(plan_.splits);
    }
    const int64_t heads = plan_.heads_at_once * shape().group;
    packed_ =
        Workspace::of_this_thread<Slot::AttentionHeads>().request<Element>(
            heads * packing_.size);
    grad_query_sums_ =
        Workspace::of_this_thread<Slot::AttentionParts>().request<Number>(
            heads * plan_.splits * sums_.size);
    finite_ = Workspace::of_this_thread<Slot::AttentionFlags>().request<bool>(
        heads * row_blocks_);
  }

  // Whether it was done: the way is right for the operands. Else the gradients
  // are yet to be written.
  bool run(const GradientTarget<Input>& grad_query,
           const GradientTarget<Input>& grad_key,
           const GradientTarget<Input>& grad_value) {
    const int64_t key_heads = problem_.forward.key_heads();
    for (int64_t first = 0; first < key_heads; first += plan_.heads_at_once) {
      const int64_t heads = std::min(plan_.heads_at_once, key_heads - first);
      pack_rows(first, heads);
      if (!Way::is_refused(packing_)) {
        run_key_blocks(first, heads, grad_key, grad_value);
      }
      if (Way::is_refused(packing_)) {
        return false;
      }
      store_grad_query(problem_, sums_, first * shape().group,
                       heads * shape().group, plan_.splits, grad_query_sums_,
                       grad_query);
    }
    Workspace::of_this_thread<Slot::AttentionHeads>().release_excess();
    Workspace::of_this_thread<Slot::AttentionParts>().release_excess();
    return true;
  }

 private:
  using Number = simd::Compute<Input>;
  using Element = typename Way::Element;

  const AttentionShape& shape() const { return problem_.shape(); }

  void pack_rows(int64_t first, int64_t heads) {
    const int64_t group = shape().group;
    for_each_task(
        heads * group * row_blocks_, problem_.forward.threads,
        [&](int64_t task) {
          const int64_t head = task / row_blocks_;
          const int64_t block = task % row_blocks_;
          finite_[task] = packing_.pack(
              problem_, first * group + head, block * Way::kRows,
              packed_ + head * packing_.size + block * packing_.block_size);
        });
  }

  void run_key_blocks(int64_t first, int64_t heads,
                      const GradientTarget<Input>& grad_key,
                      const GradientTarget<Input>& grad_value) {
    const int64_t slices =
        grad_mask_sums_ == nullptr ? heads : grad_mask_sums_->slices(heads);
    for_each_task(
        slices * plan_.splits, problem_.forward.threads, [&](int64_t task) {
          const int64_t slice = task / plan_.splits;
          const int64_t split = task % plan_.splits;
          typename Way::Block block(problem_, visible_keys_, packing_,
                                    grad_mask_sums_, slice, split);
          for (int64_t head = slice * heads / slices;
               head < (slice + 1) * heads / slices; ++head) {
            run_split(block, first, head, split, grad_key, grad_value);
          }
        });
  }

  // The blocks of keys of one split of a head, which is the one `head` after
  // the `first` of those that are packed.
  void run_split(typename Way::Block& block, int64_t first, int64_t head,
                 int64_t split, const GradientTarget<Input>& grad_key,
                 const GradientTarget<Input>& grad_value) {
    const int64_t group = shape().group;
    // Of each query head the splits lie side by side.
    const int64_t sums_size = plan_.splits * sums_.size;
    Number* sums =
        grad_query_sums_ + head * group * sums_size + split * sums_.size;
    for (int64_t g = 0; g < group; ++g) {
      sums_.reset(sums + g * sums_size);
    }
    const int64_t end = std::min(plan_.column(split + 1), shape().columns);
    for (int64_t column = plan_.column(split); column < end;
         column += kKeyBlock) {
      block.run(first + head, column, packed_ + head * group * packing_.size,
                finite_ + head * group * row_blocks_, sums, sums_size, grad_key,
                grad_value);
    }
  }

  const BackwardProblem<Input>& problem_;
  GradMaskSums<Input>* grad_mask_sums_;
  VisibleKeys<Input> visible_keys_;
  typename Way::Packing packing_;
  BackwardPlan plan_;
  GradQuerySums<Input> sums_;
  int64_t row_blocks_;
  Element* packed_;          // Q and dO
  Number* grad_query_sums_;  // dQ of each split
  bool* finite_;             // of each block of rows that is packed
};

// The way that suits the problem, which the forward pass has gone too; other
// operands, and what the forward pass left of them, are multiplied by vectors.
// `grad_mask_sums`, where the mask has a gradient, gathers it.
template <class Input>
void attention_gradients(BackwardProblem<Input>& problem,
                         const GradientTarget<Input>& grad_query,
                         const GradientTarget<Input>& grad_key,
                         const GradientTarget<Input>& grad_value,
                         GradMaskSums<Input>* grad_mask_sums = nullptr) {
  bool by_tiles = false;
  const bool is_large = has_large_log_sum_exp(problem);
#if defined(PKG_HAS_TILES)
  if constexpr (kTrainsByTiles<Input>) {
    by_tiles = goes_by_tiles<Input>(problem.shape(), true);
    if (by_tiles && !is_large &&
        BackwardPass<Input, BackwardByTiles<Input>>(problem, grad_mask_sums)
            .run(grad_query, grad_key, grad_value)) {
      return;
    }
  }
#endif
  const RecomputedForward<Input> recomputed(problem, by_tiles, is_large);
  compute_row_statistics(problem);
  BackwardPass<Input, BackwardByVectors<Input>>(problem, grad_mask_sums)
      .run(grad_query, grad_key, grad_value);
}

// Compiled in scaled_dot_product_attention_backward.cpp, once for all
// operators.
#define PKG_ATTENTION_BACKWARD(kind, Input)                       \
  kind template void attention_gradients(                         \
      BackwardProblem<Input>&, const GradientTarget<Input>&,      \
      const GradientTarget<Input>&, const GradientTarget<Input>&, \
      GradMaskSums<Input>*)
PKG_ATTENTION_BACKWARD(extern, double);
PKG_ATTENTION_BACKWARD(extern, float);
PKG_ATTENTION_BACKWARD(extern, Half);
PKG_ATTENTION_BACKWARD(extern, BFloat16);

}  // namespace pkg::cpu::attention
