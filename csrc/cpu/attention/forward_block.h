// A block of rows against a range of keys: the inner loops of the forward pass.
//
//   for each block of keys
//     for each strip of rows           KeyRange of the keys that it sees
//       S = Q K^T, P = exp(S - m), l   one of
//         softmax_with_known_maxima      in registers, tile by tile
//         softmax_with_new_maxima        S written; m found; O and l rescaled
//       O += P V
//
// Scores and probabilities of a strip (10 KiB) never leave the L1 cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/blocking.h"
#include "cpu/attention/dropout.h"
#include "cpu/attention/finiteness.h"
#include "cpu/attention/forward_operands.h"
#include "cpu/attention/key_range.h"
#include "cpu/attention/known_maxima.h"
#include "cpu/attention/mask.h"
#include "cpu/attention/online_softmax.h"
#include "cpu/attention/packing.h"
#include "cpu/attention/prefetch.h"
#include "cpu/attention/probabilities.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/products.h"
#include "cpu/attention/rows.h"
#include "cpu/attention/scratch.h"
#include "cpu/attention/softmax_state.h"
#include "cpu/attention/softmax_tile.h"
#include "cpu/attention/visible_keys.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

// A block of rows against a range of keys.
struct ForwardTask {
  int64_t batch;
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t column_end;
};

// Masks the scores of a strip, rows kScoreStride apart, where something hides
// or changes them. Returns what they are yet to be multiplied by: a positive
// scale is left to the softmax, which has it for nothing.
template <class Input>
simd::Compute<Input> mask_scores(const Problem<Input>& problem, int64_t batch,
                                 int64_t mask_offset, int64_t row, int used,
                                 int64_t first, int64_t count,
                                 simd::Compute<Input> scale,
                                 simd::Compute<Input>* scores) {
  using Number = simd::Compute<Input>;
  if (scale > Number{0} && !problem.masks_strip(row, used, first, count)) {
    return scale;
  }
  problem.mask_strip(scores, kScoreStride, scale, batch, mask_offset, row, used,
                     first, count);
  return Number{1};
}

// Makes probabilities of a strip's masked scores, relative to new maxima;
// `output_sums`, which were summed relative to the old ones, are rescaled.
// `factors` is scratch for those of dropout.
template <class Input, int kRows, int64_t kProbabilityStride = kScoreStride>
void update_softmax(
    const Problem<Input>& problem, int64_t batch, int64_t row, int used,
    int64_t first, int64_t count, simd::Compute<Input> scale,
    simd::Compute<Input>* scores,
    const SoftmaxStates<simd::Compute<Input>>& states,
    simd::Compute<Input>* factors,
    Probability<typename ArithmeticOf<Input>::type>* probabilities,
    simd::Compute<Input>* output_sums, int64_t sums_stride) {
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Number = simd::Compute<Input>;
  const int64_t padded = round_up(count, simd::kLanes<Number>);
  const auto factors_of = [&](int i) -> const Number* {
    if (!problem.dropout) {
      return nullptr;
    }
    problem.dropout_factors(factors, batch, row + i, first, padded);
    return factors;
  };
  Number rescales[kRows];
  const bool any_rescale =
      softmax_strip<Arithmetic, kPreciseProbabilities<Input>, kRows,
                    kScoreStride, kProbabilityStride>(
          scores, padded, scale, states, factors_of, probabilities, rescales);
  for (int i = 0; any_rescale && i < used; ++i) {
    if (rescales[i] != Number{1}) {
      scale_row(output_sums + i * sums_stride, sums_stride, rescales[i]);
    }
  }
}

template <class Input>
class ForwardBlock {
 public:
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using KGroup = KGroupOf<Arithmetic>;
  using Number = simd::Compute<Input>;

  ForwardBlock(const Problem<Input>& problem,
               const VisibleKeys<Input>& visible_keys,
               const PackedKeyValue<Input>& packing, int64_t block_rows)
      : problem_(problem), visible_keys_(visible_keys), packing_(packing) {
    const int64_t rows = padded_rows(block_rows);
    const Scratch<KGroup> query{rows * packing.key_depth};
    const Scratch<Number> output_sums{rows * packing.value_stride};
    const Scratch<Number> scores{kStripRows * kScoreStride};
    const Scratch<Probability<Arithmetic>> probabilities{kStripRows *
                                                         kScoreStride};
    const Scratch<Number> factors{kScoreStride + Dropout<Number>::kSpare};
    const Scratch<Number> maxima{rows};
    const Scratch<Vector<Number>> sums{rows};
    std::byte* memory =
        Workspace::of_this_thread<Slot::AttentionTask>().request<std::byte>(
            query.size() + output_sums.size() + scores.size() +
            probabilities.size() + factors.size() + maxima.size() +
            sums.size());
    query_ = query.take(memory);
    output_sums_ = output_sums.take(memory);
    scores_ = scores.take(memory);
    probabilities_ = probabilities.take(memory);
    factors_ = factors.take(memory);
    states_.maxima = maxima.take(memory);
    states_.sums = sums.take(memory);
    if constexpr (std::is_same_v<Probability<Arithmetic>, Number>) {
      probabilities_ = scores_;
    }
  }

  // Runs the task; the rows' states and sums of P V stay here until the
  // next one. `finite` says it of each block of keys.
  void run(const ForwardTask& task, const KGroup* packed, const bool* finite) {
    const TileRegisters<Arithmetic> registers;
    const AttentionShape& shape = problem_.shape;
    pack_strips<Arithmetic>(
        problem_.query.at(shape, task.batch).from(task.row, 0), task.rows,
        shape.head_size, query_);
    std::fill_n(output_sums_, padded_rows(task.rows) * packing_.value_stride,
                Number{0});
    states_.reset(padded_rows(task.rows));
    mask_offset_ = problem_.mask.offset(shape, task.batch);
    const typename VisibleKeys<Input>::OfMatrix visible_keys(visible_keys_,
                                                             task.batch);

    const bool finite_rows =
        problem_.hides_keys() &&
        all_finite<Arithmetic>(query_,
                               padded_rows(task.rows) * packing_.key_depth);
    for (int64_t column = task.column; column < task.column_end;
         column += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, task.column_end - column);
      const bool all_finite = finite_rows && finite[column / kKeyBlock];
      for_each_strip(task.rows, [&](int64_t row, int used, auto height) {
        const KeyRange seen = visible_keys.of_strip(task.row + row, used,
                                                    column, count, all_finite);
        if (seen.begin < seen.end) {
          run_strip<height()>(task, packed, row, used, column, seen,
                              all_finite);
        }
      });
    }
  }

  SoftmaxState<Number> state(int64_t row) const { return states_.at(row); }
  const Number* output_sums(int64_t row) const {
    return output_sums_ + row * packing_.value_stride;
  }

 private:
  // The keys that are seen of the block from `column`.
  template <int kRows>
  void run_strip(const ForwardTask& task, const KGroup* packed, int64_t row,
                 int used, int64_t column, const KeyRange& seen,
                 bool all_finite) {
    const AttentionShape& shape = problem_.shape;
    constexpr int kDepth = Arithmetic::kKGroupSize;
    const int64_t first = column + seen.begin;
    const int64_t count = seen.end - seen.begin;
    const auto keys = packing_.keys(packed, first);
    if (!softmax_with_known_maxima<kRows>(task.row + row, row, used, keys,
                                          first, count, all_finite)) {
      softmax_with_new_maxima<kRows>(task, row, used, keys, first, count);
    }
    // Each addition to the sums of all keys rounds off more than one to those
    // of a block: one a block.
    multiply_strip<Arithmetic, kRows>(
        LeftByRows<KGroup, kScoreStride / kDepth>{
            reinterpret_cast<const KGroup*>(probabilities_)},
        packing_.values(problem_, task.batch, packed, column, seen.begin),
        depth_of<Arithmetic>(count), shape.value_size,
        add_to(output_sums_ + row * packing_.value_stride,
               packing_.value_stride),
        kKeyBlock);
  }

  auto queries(int64_t row) const {
    return packed_rows<Arithmetic>(query_ + row * packing_.key_depth,
                                   packing_.key_depth);
  }

  // Makes probabilities of a strip's scores relative to the maxima so far, if
  // these are known and what hides keys can be had tile by tile. Returns
  // whether that is done.
  template <int kRows>
  bool softmax_with_known_maxima(int64_t row_of_all, int64_t row, int used,
                                 const RightPanels<KGroup>& keys, int64_t first,
                                 int64_t count, bool all_finite) {
    return packing_.key_depth <= problem_.accumulation_length &&
           with_known_maxima(
               problem_, states_.from(row).are_known(kRows),
               {row_of_all, used, kRows, first, count}, mask_offset_,
               all_finite,
               [&](const auto& mask_rows, const PrefetchRows& to_prefetch) {
                 return softmax_in_registers<kRows>(row, keys, count, mask_rows,
                                                    to_prefetch);
               });
  }

  // The same with a mask of one kind. Returns false, and has changed neither
  // sums nor maxima, where a sum of probabilities comes out too large or is not
  // a number.
  template <int kRows, class Mask>
  bool softmax_in_registers(int64_t row, const RightPanels<KGroup>& keys,
                            int64_t count, const Mask& mask,
                            const PrefetchRows& to_prefetch) {
    constexpr bool kPrecise = kPreciseProbabilities<Input>;
    const auto states = states_.from(row);
    Number scaled_maxima[kRows];
    Vector<Number> sums[kRows] = {};
    multiply_tiles<Arithmetic, kRows>(
        queries(row), keys, packing_.key_depth, count,
        SoftmaxTile<kPrecise, ProbabilityRows<Arithmetic, kScoreStride>, Number,
                    Mask>{{probabilities_},
                          static_cast<Number>(problem_.shape.scale),
                          in_exp_units<kPrecise>(states.maxima, scaled_maxima),
                          sums,
                          mask,
                          to_prefetch});
    return add_sums(sums, states);
  }

  // The same relative to new maxima; what was summed relative to the old ones
  // is rescaled.
  template <int kRows>
  void softmax_with_new_maxima(const ForwardTask& task, int64_t row, int used,
                               const RightPanels<KGroup>& keys, int64_t first,
                               int64_t count) {
    const Number scale =
        write_scores<kRows>(task, row, used, keys, first, count);
    update_softmax<Input, kRows>(
        problem_, task.batch, task.row + row, used, first, count, scale,
        scores_, states_.from(row), factors_, probabilities_,
        output_sums_ + row * packing_.value_stride, packing_.value_stride);
  }

  // Writes a strip's scores, masked. Returns what they are yet to be multiplied
  // by; sums that are made of parts are scaled before, since the backward pass
  // scales each part.
  template <int kRows>
  Number write_scores(const ForwardTask& task, int64_t row, int used,
                      const RightPanels<KGroup>& keys, int64_t first,
                      int64_t count) {
    const int64_t row_of_all = task.row + row;
    const bool in_parts = packing_.key_depth > problem_.accumulation_length;
    const Number scale = static_cast<Number>(problem_.shape.scale);
    multiply_strip<Arithmetic, kRows>(
        queries(row), keys, packing_.key_depth, count,
        store_scaled(
            scores_, kScoreStride, in_parts ? scale : Number{1},
            problem_.mask.to_prefetch(mask_offset_, row_of_all, first)),
        problem_.accumulation_length);
    return mask_scores(problem_, task.batch, mask_offset_, row_of_all, used,
                       first, count, in_parts ? Number{1} : scale, scores_);
  }

  const Problem<Input>& problem_;
  const VisibleKeys<Input>& visible_keys_;
  const PackedKeyValue<Input>& packing_;
  int64_t mask_offset_ = 0;
  KGroup* query_;                           // packed
  Number* output_sums_;                     // P V
  Number* scores_;                          // of a strip
  Probability<Arithmetic>* probabilities_;  // the same, if they are numbers
  Number* factors_;                         // of dropout
  SoftmaxStates<Number> states_;
};

}  // namespace pkg::cpu::attention
