// One block of keys of a head against all rows of all the query heads it
// serves: dK and dV of the block, and what it adds to dQ. The outline is in
// backward.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/attention/backward_operands.h"
#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocking.h"
#include "cpu/attention/compensation.h"
#include "cpu/attention/grad_mask.h"
#include "cpu/attention/grad_query.h"
#include "cpu/attention/key_range.h"
#include "cpu/attention/prefetch.h"
#include "cpu/attention/probabilities.h"
#include "cpu/attention/products.h"
#include "cpu/attention/score_block.h"
#include "cpu/attention/score_gradients.h"
#include "cpu/attention/scratch.h"
#include "cpu/attention/visible_keys.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tile_registers.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

template <class Input>
class KeyBlockGradients {
 public:
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using KGroup = KGroupOf<Arithmetic>;
  using Number = simd::Compute<Input>;

  // `grad_mask_sums`, if the mask has a gradient, for `slice` and `split`.
  KeyBlockGradients(const BackwardProblem<Input>& problem,
                    const VisibleKeys<Input>& visible_keys,
                    const PackedHead<Input>& packing,
                    const GradMaskSums<Input>* grad_mask_sums, int64_t slice,
                    int64_t split)
      : problem_(problem),
        visible_keys_(visible_keys),
        packing_(packing),
        grad_mask_sums_(grad_mask_sums),
        slice_(slice),
        split_(split),
        keys_(problem.shape()),
        sums_(problem.shape(), packing.key_stride),
        memory_(
            Workspace::of_this_thread<Slot::AttentionTask>().request<std::byte>(
                ScoreBlock<Arithmetic>::bytes() + key_operands().size() +
                key_columns().size() + key_means().size() +
                grad_key_sums().size() + grad_value_sums().size() +
                cap_slopes().size())),
        block_(memory_),
        key_operands_(key_operands().take(memory_)),
        key_columns_(key_columns().take(memory_)),
        key_means_(key_means().take(memory_)),
        grad_key_sums_(grad_key_sums().take(memory_)),
        grad_value_sums_(grad_value_sums().take(memory_)),
        cap_slopes_(caps() ? cap_slopes().take(memory_) : nullptr) {}

  // Runs the block of keys from `column`. `packed` holds the query heads that
  // the key head serves, one after the other, `finite` says it of each of their
  // blocks of rows, and `grad_query_sums` are the sums of their dQ, of
  // `grad_query_sums_size` each.
  void run(int64_t key_head, int64_t column, KGroup* packed, const bool* finite,
           Number* grad_query_sums, int64_t grad_query_sums_size,
           const GradientTarget<Input>& grad_key,
           const GradientTarget<Input>& grad_value) {
    const TileRegisters<Arithmetic> registers;
    const AttentionShape& shape = problem_.shape();
    const int64_t batch = key_head * shape.group;
    const bool finite_keys = begin(batch, column);
    for (int64_t g = 0; g < shape.group; ++g) {
      mask_offset_ = problem_.forward.mask.offset(shape, batch + g);
      for (int64_t row = 0; row < shape.rows; row += kRowBlock, ++finite) {
        run_rows(
            batch + g, row, finite_keys && *finite,
            packed + g * packing_.size + row / kRowBlock * packing_.block_size,
            grad_query_sums + g * grad_query_sums_size);
      }
    }
    for (int64_t i = 0; i < count_; ++i) {
      grad_key.store(shape, batch, column + i,
                     grad_key_sums_ + i * packing_.key_stride, shape.head_size,
                     static_cast<Number>(shape.scale));
      grad_value.store(shape, batch, column + i,
                       grad_value_sums_ + i * packing_.value_stride,
                       shape.value_size, Number{1});
    }
  }

 private:
  static constexpr int kDepth = Arithmetic::kKGroupSize;
  static constexpr int64_t kColumns = kNR<Arithmetic>;
  static constexpr int64_t kKGroupRows = kRowBlock / kDepth;

  Scratch<KGroup> key_operands() const { return {keys_.size()}; }
  Scratch<KGroup> key_columns() const {
    return {packing_.key_stride * depth_of<Arithmetic>(kKeyBlock)};
  }
  Scratch<Number> key_means() const {
    return {KeyPieces<Arithmetic>::kCount * packing_.key_stride};
  }
  Scratch<Number> grad_key_sums() const {
    return {kKeyBlock * packing_.key_stride};
  }
  Scratch<Number> grad_value_sums() const {
    return {kKeyBlock * packing_.value_stride};
  }

  bool caps() const { return problem_.forward.modifiers.caps(); }
  Scratch<Number> cap_slopes() const {
    return {caps() ? kStripRows * kScoreStride : 0};
  }

  int64_t padded_count() const {
    return round_up(count_, simd::kLanes<Number>);
  }

  // Packs the block's keys and values and lets dK and dV begin from 0. Returns
  // whether keys and values are finite, where keys are hidden.
  bool begin(int64_t batch, int64_t column) {
    const AttentionShape& shape = problem_.shape();
    column_ = column;
    count_ = std::min(kKeyBlock, shape.columns - column);
    keys_.pack(problem_.forward, batch, column, count_, key_operands_);
    pack_columns<Arithmetic>(
        problem_.forward.key.at(shape, batch).from(column, 0), shape.head_size,
        count_, key_columns_);
    if constexpr (!kRoundsProbabilities<Arithmetic>) {
      KeyPieces<Arithmetic>::find_common(key_columns_, count_,
                                         packing_.key_stride, key_means_);
    }
    const bool finite =
        problem_.forward.hides_keys() && keys_.finite(key_operands_, count_);
    const int64_t padded = round_up(count_, kStripRows);
    std::fill_n(grad_key_sums_, padded * packing_.key_stride, Number{0});
    std::fill_n(grad_value_sums_, padded * packing_.value_stride, Number{0});
    return finite;
  }

  // A block of rows: P, dS, dQ and the mask's gradient strip by strip, then dK
  // and dV. Strips above the first that sees a key are left out, and keys
  // outside of what any strip sees.
  void run_rows(int64_t batch, int64_t row, bool all_finite, KGroup* packed,
                Number* grad_query_sums) {
    const AttentionShape& shape = problem_.shape();
    const int64_t rows = std::min(kRowBlock, shape.rows - row);
    const typename VisibleKeys<Input>::OfMatrix visible_keys(visible_keys_,
                                                             batch);
    int64_t first_active = rows;
    KeyRange active{count_, 0};
    for_each_strip(rows, [&](int64_t strip, int used, auto height) {
      const KeyRange seen =
          visible_keys.of_strip(row + strip, used, column_, count_, all_finite);
      if (seen.begin < seen.end) {
        first_active = std::min(first_active, strip);
        active = {std::min(active.begin, seen.begin),
                  std::max(active.end, seen.end)};
        run_strip<height()>({batch, mask_offset_, row + strip, used,
                             column_ + seen.begin, seen.end - seen.begin},
                            strip, rows, packed, grad_query_sums);
        return;
      }
      add_to_mask(batch, row + strip, used, strip, {0, 0});
      if (first_active < rows) {
        fill_strip<height()>(strip, {0, 0});
        block_.finish_strip(strip, height(), padded_count());
      }
    });
    if (first_active < rows) {
      add_to_grad_key_value(first_active, rows, active, packed);
    }
  }

  void add_to_mask(int64_t batch, int64_t row, int64_t rows, int64_t strip,
                   const KeyRange& seen) {
    if (grad_mask_sums_ != nullptr) {
      grad_mask_sums_->add(slice_, split_, batch, row, column_, rows, count_,
                           seen, block_.strip_grad_scores(strip));
    }
  }

  // Zeros for the keys outside of what a strip's rows see.
  template <int kRows>
  void fill_strip(int64_t strip, const KeyRange& seen) {
    const int64_t end = round_up(seen.end, simd::kLanes<Number>);
    for (Number* matrix :
         {block_.strip_probabilities(strip), block_.strip_grad_scores(strip)}) {
      for (int i = 0; i < kRows; ++i) {
        Number* row = matrix + i * kScoreStride;
        std::fill_n(row, seen.begin, Number{0});
        std::fill(row + end, row + padded_count(), Number{0});
      }
    }
  }

  template <int kRows>
  void run_strip(const StripPlace& place, int64_t strip, int64_t rows,
                 KGroup* packed, Number* grad_query_sums) {
    const int64_t first = place.column - column_;
    const KeyRange seen{first, first + place.count};
    const StripOperands<KGroup> operands{
        packing_.queries(packed) + strip * packing_.left.query_depth,
        packing_.grad_outputs(packed, rows) +
            strip * packing_.left.grad_output_depth,
        keys_.keys(key_operands_) + first * keys_.key_depth,
        keys_.values(key_operands_) + first * keys_.value_depth,
        keys_.key_depth,
        keys_.value_depth};
    compute_score_gradients<Input, kRows>(
        problem_, place, operands, block_.strip_probabilities(strip) + first,
        block_.strip_grad_scores(strip) + first, cap_slopes_,
        grad_mask_sums_ == nullptr
            ? PrefetchRows{}
            : grad_mask_sums_->to_prefetch(slice_, split_, place.batch,
                                           place.row, place.column));
    add_to_mask(place.batch, place.row, place.used, strip, seen);
    fill_strip<kRows>(strip, seen);
    if (caps()) {
      add_capped_to_compensation(place, strip, seen, grad_query_sums);
      apply_cap_slopes(cap_slopes_, place.used, place.count,
                       block_.strip_grad_scores(strip) + first);
    }
    block_.finish_strip(strip, kRows, padded_count());
    if (!caps()) {
      add_to_compensation<kRows>(place, strip, first, grad_query_sums);
    }
    multiply_strip<Arithmetic, kRows>(  // dQ += dS K
        LeftByRows<KGroup, kScoreStride / kDepth>{
            block_.grad_scores_by_rows(strip) + first / kDepth},
        packed_panels<Arithmetic>(key_columns_, depth_of<Arithmetic>(count_),
                                  first / kDepth),
        depth_of<Arithmetic>(place.count), problem_.shape().head_size,
        add_to(sums_.row(grad_query_sums, place.row), sums_.stride));
  }

  // Where gradients are rounded to be multiplied, that is the larger error, and
  // this is left out.
  void add_capped_to_compensation(const StripPlace& place, int64_t strip,
                                  const KeyRange& seen,
                                  Number* grad_query_sums) {
    if constexpr (!kRoundsProbabilities<Arithmetic>) {
      add_capped_to_row_compensation<KeyPieces<Arithmetic>>(
          sums_, place.row, place.used, block_.strip_probabilities(strip),
          block_.strip_grad_scores(strip), padded_count(), seen, cap_slopes_,
          key_means_, grad_query_sums);
    }
  }

  template <int kRows>
  void add_to_compensation(const StripPlace& place, int64_t strip,
                           int64_t first, Number* grad_query_sums) {
    if constexpr (kRoundsProbabilities<Arithmetic>) {
      for (int i = 0; i < kRows; i += 2) {
        sums_.pair_compensation(grad_query_sums, place.row + i)
            .add(block_.probabilities_transposed(strip + i, first),
                 block_.grad_scores_transposed(strip + i, first), place.column,
                 round_up(place.count, simd::kLanes<Number>));
      }
    } else {
      add_to_row_compensation<KeyPieces<Arithmetic>>(
          sums_, place.row, place.used, block_.strip_probabilities(strip),
          block_.strip_grad_scores(strip), padded_count(), key_means_,
          grad_query_sums);
    }
  }

  // dV += P^T dO and dK += dS^T Q, of the keys that any of the rows sees, over
  // the rows from the first that sees one. A strip is one of keys here.
  void add_to_grad_key_value(int64_t first_row, int64_t rows,
                             const KeyRange& active, KGroup* packed) {
    const AttentionShape& shape = problem_.shape();
    const int64_t depth = depth_of<Arithmetic>(rows);
    const int64_t skipped = first_row / kDepth;
    for_each_strip(active.end - active.begin, [&](int64_t i, int, auto height) {
      const int64_t key = active.begin + i;
      alignas(64) KGroup memory[height() * kKGroupRows];
      const auto transposed = [&](const KGroup* rows) {
        return transposed_left<Arithmetic, height(), kScoreStride, kKGroupRows>(
            rows, depth - skipped, memory);
      };
      multiply_strip<Arithmetic, height()>(
          transposed(block_.probabilities_transposed(first_row, key)),
          packed_panels<Arithmetic>(packing_.grad_output_columns(packed), depth,
                                    skipped),
          depth - skipped, shape.value_size,
          add_to(grad_value_sums_ + key * packing_.value_stride,
                 packing_.value_stride));
      multiply_strip<Arithmetic, height()>(
          transposed(block_.grad_scores_transposed(first_row, key)),
          packed_panels<Arithmetic>(packing_.query_columns(packed), depth,
                                    skipped),
          depth - skipped, shape.head_size,
          add_to(grad_key_sums_ + key * packing_.key_stride,
                 packing_.key_stride));
    });
  }

  const BackwardProblem<Input>& problem_;
  const VisibleKeys<Input>& visible_keys_;
  const PackedHead<Input>& packing_;
  const GradMaskSums<Input>* grad_mask_sums_;
  int64_t slice_;
  int64_t split_;
  PackedKeys<Input> keys_;
  GradQuerySums<Input> sums_;
  std::byte* memory_;
  ScoreBlock<Arithmetic> block_;  // P and dS
  KGroup* key_operands_;          // K^T and V^T
  KGroup* key_columns_;           // K
  Number* key_means_;             // of KeyPieces
  Number* grad_key_sums_;
  Number* grad_value_sums_;
  Number* cap_slopes_;  // of a strip, or null
  int64_t column_ = 0;
  int64_t count_ = 0;
  int64_t mask_offset_ = 0;
};

}  // namespace pkg::cpu::attention
