// One block of keys of a head against all rows of all the query heads it
// serves, as key_block_gradients.h, by tile registers. A block of rows is two
// strips of 32, and dK and dV are summed transposed, in micro-tiles:
//
//   for each strip of rows
//     S, dO V^T                in memory (48 KiB)
//     P, dS as parts           tile_score_gradients.h, from the sums as they
//                              are; or masked, dropped, summed before
//     dQ += dS K
//   dV^T += dO^T P, dK^T += Q^T dS
//
// Intel Xeon (AMX), one core, float32, 1x8x1024x64: 20 us a strip of rows
// against 192 keys, of which the unit takes 8.5 for the products and vectors 4
// for P and dS (docs/tuning/tiles.md).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/attention/backward_problem.h"
#include "cpu/attention/blocking.h"
#include "cpu/attention/compensation.h"
#include "cpu/attention/forward_block.h"
#include "cpu/attention/grad_mask.h"
#include "cpu/attention/grad_query.h"
#include "cpu/attention/key_range.h"
#include "cpu/attention/probabilities.h"
#include "cpu/attention/rows.h"
#include "cpu/attention/score_gradients.h"
#include "cpu/attention/scratch.h"
#include "cpu/attention/tile_backward_operands.h"
#include "cpu/attention/tile_operands.h"
#include "cpu/attention/tile_products.h"
#include "cpu/attention/tile_score_gradients.h"
#include "cpu/attention/visible_keys.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/gemm/packing.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/pack_tiles.h"
#include "host/integer_math.h"
#include "scaled_dot_product_attention.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::attention {

template <class Input>
class TileKeyBlockGradients {
 public:
  // Of the vectors between the products.
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Packing = TilePackedHead<Input>;
  using Operands = typename Packing::Operands;
  using Weights = typename TileSchemes<Input>::Probabilities;  // P and dS
  using Pieces = typename TileScoreGradients<Input>::Pieces;
  static_assert(!kRoundsProbabilities<Arithmetic>);

  // `grad_mask_sums`, if the mask has a gradient, for `slice` and `split`.
  TileKeyBlockGradients(const BackwardProblem<Input>& problem,
                        const VisibleKeys<Input>& visible_keys,
                        const Packing& packing,
                        const GradMaskSums<Input>* grad_mask_sums,
                        int64_t slice, int64_t split)
      : problem_(problem),
        visible_keys_(visible_keys),
        packing_(packing),
        grad_mask_sums_(grad_mask_sums),
        slice_(slice),
        split_(split),
        sums_(problem.shape(), packing.key_stride),
        memory_(request()),
        keys_(bytes(packing.query_units).take(memory_)),
        values_(bytes(packing.grad_output_units).take(memory_)),
        key_columns_(columns(packing.key_stride).take(memory_)),
        probabilities_(strip().take(memory_)),
        grad_scores_(strip().take(memory_)),
        cap_slopes_(caps() ? strip().take(memory_) : nullptr),
        grad_score_rows_(bytes_of_strip().take(memory_)),
        packed_probabilities_(weights().take(memory_)),
        packed_grad_scores_(weights().take(memory_)),
        grad_key_sums_(sums(packing.key_stride).take(memory_)),
        grad_value_sums_(sums(packing.value_stride).take(memory_)),
        key_means_(key_means().take(memory_)),
        tiles_(tile_pairs().take(memory_)),
        products_(TileProducts::scratch().take(memory_)) {}

  // Runs the block of keys from `column`. `packed` holds the query heads that
  // the key head serves, one after the other, `finite` says of each of their
  // blocks of rows whether hidden keys may be left out, and `grad_query_sums`
  // are the sums of their dQ, of `grad_query_sums_size` each.
  void run(int64_t key_head, int64_t column, const std::byte* packed,
           const bool* finite, float* grad_query_sums,
           int64_t grad_query_sums_size, const GradientTarget<Input>& grad_key,
           const GradientTarget<Input>& grad_value) {
    const tiles::Registers registers;
    const AttentionShape& shape = problem_.shape();
    const int64_t batch = key_head * shape.group;
    if (!begin(batch, column)) {
      packing_.is_refused = true;
      return;
    }
    for (int64_t g = 0; g < shape.group; ++g) {
      mask_offset_ = problem_.forward.mask.offset(shape, batch + g);
      for (int64_t row = 0; row < shape.rows; row += Packing::kRows, ++finite) {
        run_rows(batch + g, row, *finite,
                 packed + g * packing_.size +
                     row / Packing::kRows * packing_.block_size,
                 grad_query_sums + g * grad_query_sums_size);
      }
    }
    store(grad_key_sums_, batch, shape.head_size, packing_.key_stride,
          static_cast<float>(shape.scale), grad_key);
    store(grad_value_sums_, batch, shape.value_size, packing_.value_stride,
          1.0F, grad_value);
  }

 private:
  static constexpr int64_t kStrip = tiles::kStrip;
  static constexpr int64_t kKeyStrips = kKeyBlock / kStrip;
  static constexpr int64_t kUnitBytes = Packing::kUnitBytes;
  static constexpr int kLanes = simd::kLanes<float>;
  static constexpr float kScale = TileSchemes<Input>::kProbabilityScale;
  static_assert(tiles::kUnitBytes<Weights> == kUnitBytes);

  // Which strips of the rows of a block, as units, see keys of a strip of keys.
  struct Units {
    int64_t begin;
    int64_t end;
  };

  Scratch<std::byte> bytes(int64_t units) const {
    return {kKeyStrips * units * kUnitBytes};
  }
  Scratch<std::byte> columns(int64_t stride) const {
    return {stride / kStrip * kKeyStrips * kUnitBytes};
  }
  static Scratch<float> strip() { return {kStrip * kScoreStride}; }
  static Scratch<std::byte> bytes_of_strip() {
    return {kKeyStrips * kUnitBytes};
  }
  static Scratch<std::byte> weights() {
    return {kKeyStrips * Packing::kUnits * kUnitBytes};
  }
  static Scratch<float> sums(int64_t stride) { return {kKeyBlock * stride}; }
  Scratch<float> key_means() const {
    return {Pieces::kCount * packing_.key_stride};
  }
  static Scratch<float> tile_pairs() {
    return {2 * kKeyStrips * tiles::kSumsCount};
  }
  bool caps() const { return problem_.forward.modifiers.caps(); }

  std::byte* request() const {
    return Workspace::of_this_thread<Slot::AttentionTask>().request<std::byte>(
        bytes(packing_.query_units).size() +
        bytes(packing_.grad_output_units).size() +
        columns(packing_.key_stride).size() +
        (caps() ? 3 : 2) * strip().size() + bytes_of_strip().size() +
        2 * weights().size() + sums(packing_.key_stride).size() +
        sums(packing_.value_stride).size() + key_means().size() +
        tile_pairs().size() + TileProducts::scratch().size());
  }

  int64_t padded_count() const { return round_up(count_, kLanes); }

  // Packs the block's keys and values and lets dK and dV begin from 0. Returns
  // whether keys and values are fit for it.
  bool begin(int64_t batch, int64_t column) {
    const AttentionShape& shape = problem_.shape();
    column_ = column;
    count_ = std::min(kKeyBlock, shape.columns - column);
    const auto key = problem_.forward.key.at(shape, batch).from(column, 0);
    const auto value = problem_.forward.value.at(shape, batch).from(column, 0);
    find_key_means(key);
    tiles::Range of_keys;
    tiles::Range of_values;
    tiles::pack_strips<Operands, tiles::Side::Right>(
        rows_of(key), count_, shape.head_size, keys_, of_keys);
    tiles::pack_strips<Operands, tiles::Side::Right>(
        rows_of(value), count_, shape.value_size, values_, of_values);
    tiles::pack_strips<Operands, tiles::Side::Right>(
        columns_of(key), shape.head_size, count_, key_columns_, of_keys,
        kKeyStrips);
    std::fill_n(grad_key_sums_, sums(packing_.key_stride).count, 0.0F);
    std::fill_n(grad_value_sums_, sums(packing_.value_stride).count, 0.0F);
    return is_fit_for_gradients<Input>(of_keys) &&
           is_fit_for_gradients<Input>(of_values) &&
           packing_.allows_values(of_values);
  }

  void find_key_means(const MatrixView<Input>& key) {
    float* const columns = grad_key_sums_;  // before they begin
    pack_columns<Arithmetic>(key, problem_.shape().head_size, count_, columns);
    Pieces::find_common(columns, count_, packing_.key_stride, key_means_);
  }

  // A block of rows: P, dS, dQ and the mask's gradient strip by strip, then dK
  // and dV.
  void run_rows(int64_t batch, int64_t row, bool all_finite,
                const std::byte* packed, float* grad_query_sums) {
    const AttentionShape& shape = problem_.shape();
    const int64_t rows = std::min(Packing::kRows, shape.rows - row);
    const typename VisibleKeys<Input>::OfMatrix visible_keys(visible_keys_,
                                                             batch);
    std::fill_n(units_, kKeyStrips, Units{0, 0});
    for (int64_t strip = 0; strip < rows; strip += kStrip) {
      const int used = static_cast<int>(std::min(kStrip, rows - strip));
      const KeyRange seen =
          visible_keys.of_strip(row + strip, used, column_, count_, all_finite);
      if (seen.begin < seen.end) {
        run_strip({batch, mask_offset_, row + strip, used, column_ + seen.begin,
                   seen.end - seen.begin},
                  strip, packed, grad_query_sums);
      } else {
        add_to_mask(batch, row + strip, used, {0, 0});
        mark_units(strip / kStrip, {0, 0});
      }
    }
    add_to_grad_key_value(packed);
  }

  void add_to_mask(int64_t batch, int64_t row, int64_t rows,
                   const KeyRange& seen) {
    if (grad_mask_sums_ != nullptr) {
      grad_mask_sums_->add(slice_, split_, batch, row, column_, rows, count_,
                           seen, grad_scores_);
    }
  }

  void run_strip(const StripPlace& place, int64_t strip,
                 const std::byte* packed, float* grad_query_sums) {
    const KeyRange seen{place.column - column_,
                        place.column - column_ + place.count};
    const int64_t unit = strip / kStrip;
    score_gradients_.begin(
        problem_.statistics + place.batch * problem_.shape().rows + place.row,
        place.used, static_cast<float>(problem_.shape().scale));
    if (is_plain(place)) {
      make_in_registers(place, strip, seen, packed);
    } else {
      make_in_memory(place, strip, seen, packed, grad_query_sums);
      for (int64_t key = seen.begin; key < seen.end; key += kStrip) {
        score_gradients_.take(probabilities_ + key, grad_scores_ + key, key,
                              packed_scores(key, unit));
      }
    }
    add_to_grad_query(place, seen, sums_.row(grad_query_sums, place.row));
    if (!caps()) {
      score_gradients_.add_to_compensation(sums_, place.row, place.used,
                                           key_means_, grad_query_sums);
    }
    mark_units(unit, seen);
  }

  // Whether the strip is whole, nothing is to be known of P and dS but the
  // products with them, and nothing comes between S and P.
  bool is_plain(const StripPlace& place) const {
    const Problem<Input>& forward = problem_.forward;
    return place.used == kStrip && place.count % kStrip == 0 &&
           !forward.dropout && grad_mask_sums_ == nullptr &&
           !forward.masks_strip(place.row, place.used, place.column,
                                place.count);
  }

  PackedScores packed_scores(int64_t key, int64_t of_rows) const {
    const int64_t key_strip = key / kStrip;
    return {unit(packed_probabilities_, key_strip, of_rows),
            unit(packed_grad_scores_, key_strip, of_rows),
            grad_score_rows_ + key_strip * kUnitBytes};
  }

  // P and dS micro-tile by micro-tile.
  void make_in_registers(const StripPlace& place, int64_t strip,
                         const KeyRange& seen, const std::byte* packed) {
    const auto scores = [&](int64_t key) {
      return tiles_ + key / kStrip * tiles::kSumsCount;
    };
    const auto gradients = [&](int64_t key) { return scores(kKeyBlock + key); };
    for (int64_t key = seen.begin; key < seen.end; key += kStrip) {
      multiply(packing_.queries(packed, strip), keys_, packing_.query_units,
               place.used, key, seen.end, scores(key), tiles::kSumsStride);
    }
    for (int64_t key = seen.begin; key < seen.end; key += kStrip) {
      multiply(packing_.grad_outputs(packed, strip), values_,
               packing_.grad_output_units, place.used, key, seen.end,
               gradients(key), tiles::kSumsStride);
    }
    products_.finish();
    for (int64_t key = seen.begin; key < seen.end; key += kStrip) {
      score_gradients_.make(scores(key), gradients(key), key,
                            packed_scores(key, strip / kStrip));
    }
  }

  // P and dS of the strip, and what is made of them as they are.
  void make_in_memory(const StripPlace& place, int64_t strip,
                      const KeyRange& seen, const std::byte* packed,
                      float* grad_query_sums) {
    for (int64_t key = seen.begin; key < seen.end; key += kStrip) {
      multiply(packing_.queries(packed, strip), keys_, packing_.query_units,
               place.used, key, seen.end, probabilities_ + key, kScoreStride);
      multiply(packing_.grad_outputs(packed, strip), values_,
               packing_.grad_output_units, place.used, key, seen.end,
               grad_scores_ + key, kScoreStride);
    }
    products_.finish();
    mask(place, seen.begin);
    differentiate_strip(problem_, place, probabilities_ + seen.begin,
                        grad_scores_ + seen.begin);
    add_to_mask(place.batch, place.row, place.used, seen);
    fill_strip(place.used, seen);
    if (caps()) {
      add_capped_to_row_compensation<Pieces>(
          sums_, place.row, place.used, probabilities_, grad_scores_,
          padded_count(), seen, cap_slopes_, key_means_, grad_query_sums);
      apply_cap_slopes(cap_slopes_, place.used, place.count,
                       grad_scores_ + seen.begin);
    }
  }

  // A micro-tile of the product of a strip and one of the keys' or values'.
  void multiply(const std::byte* left, const std::byte* right, int64_t units,
                int64_t rows, int64_t key, int64_t end, float* to,
                int64_t stride) {
    products_.template store<Operands>(
        {rows, end - key},
        {left, right + key / kStrip * units * kUnitBytes, units}, to, stride);
  }

  // Scales the scores and masks them, as the forward pass does.
  void mask(const StripPlace& place, int64_t first) {
    const Problem<Input>& forward = problem_.forward;
    const auto scale = static_cast<float>(problem_.shape().scale);
    float* const scores = probabilities_ + first;
    if (forward.masks_strip(place.row, place.used, place.column, place.count)) {
      forward.mask_strip(scores, kScoreStride, scale, place.batch,
                         place.mask_offset, place.row, place.used, place.column,
                         place.count, cap_slopes_);
      return;
    }
    // In a loop of its own: fused into the differences of
    // recompute_probabilities it would not be the product that the forward pass
    // rounded.
    for (int i = 0; i < place.used; ++i) {
      scale_row(scores + i * kScoreStride, place.count, scale);
    }
  }

  // Zeros for the keys outside of what a strip's rows see, and for rows that do
  // not exist.
  void fill_strip(int64_t rows, const KeyRange& seen) {
    const int64_t end = round_up(seen.end, kLanes);
    for (float* matrix : {probabilities_, grad_scores_}) {
      for (int64_t i = 0; i < rows; ++i) {
        float* row = matrix + i * kScoreStride;
        std::fill_n(row, seen.begin, 0.0F);
        std::fill(row + end, row + kKeyBlock, 0.0F);
      }
      std::fill(matrix + rows * kScoreStride, matrix + kStrip * kScoreStride,
                0.0F);
    }
  }

  std::byte* unit(std::byte* weights, int64_t key_strip, int64_t unit) const {
    return weights + (key_strip * Packing::kUnits + unit) * kUnitBytes;
  }

  // Notes which strips of keys the strip of rows sees; zeros stand between
  // others that do.
  void mark_units(int64_t of_rows, const KeyRange& seen) {
    for (int64_t key = 0; key < count_; key += kStrip) {
      Units& units = units_[key / kStrip];
      if (seen.begin <= key && key < seen.end) {
        units.begin = units.begin == units.end ? of_rows : units.begin;
        units.end = of_rows + 1;
      } else if (units.begin < units.end) {
        for (std::byte* weights :
             {packed_probabilities_, packed_grad_scores_}) {
          std::memset(unit(weights, key / kStrip, of_rows), 0, kUnitBytes);
        }
      }
    }
  }

  // dQ += dS K, in parts that the L1 cache holds.
  void add_to_grad_query(const StripPlace& place, const KeyRange& seen,
                         float* to) {
    constexpr int64_t kMostUnits = 3;
    const int64_t size = problem_.shape().head_size;
    const int64_t end = ceil_div(seen.end, kStrip);
    for (int64_t key = seen.begin / kStrip; key < end; key += kMostUnits) {
      for (int64_t column = 0; column < size; column += kStrip) {
        products_.template add<Weights>(
            {place.used, size - column},
            {grad_score_rows_ + key * kUnitBytes,
             key_columns_ + (column / kStrip * kKeyStrips + key) * kUnitBytes,
             std::min(kMostUnits, end - key)},
            to + column, sums_.stride, 1 / kScale);
      }
    }
  }

  // dV^T += dO^T P and dK^T += Q^T dS.
  void add_to_grad_key_value(const std::byte* packed) {
    const AttentionShape& shape = problem_.shape();
    add_to_columns(packing_.grad_output_columns(packed), shape.value_size,
                   packed_probabilities_, grad_value_sums_);
    add_to_columns(packing_.query_columns(packed), shape.head_size,
                   packed_grad_scores_, grad_key_sums_);
    products_.finish();
  }
  void add_to_columns(const std::byte* left, int64_t size, std::byte* weights,
                      float* to) {
    for (int64_t column = 0; column < size; column += kStrip) {
      for (int64_t key = 0; key < count_; key += kStrip) {
        const Units& units = units_[key / kStrip];
        if (units.begin < units.end) {
          products_.template add<Weights>(
              {size - column, count_ - key},
              {left + (column / kStrip * Packing::kUnits + units.begin) *
                          kUnitBytes,
               unit(weights, key / kStrip, units.begin),
               units.end - units.begin},
              to + (column / kStrip * kKeyStrips + key / kStrip) *
                       tiles::kSumsCount,
              tiles::kSumsStride, 1 / kScale);
        }
      }
    }
  }

  // Stores dK or dV of the block, whose columns are rows of micro-tiles.
  void store(const float* sums, int64_t batch, int64_t size, int64_t stride,
             float factor, const GradientTarget<Input>& target) {
    float* const rows = probabilities_;
    static_assert(kLanes * kMostTrainedSize <= kStrip * kScoreStride);
    for (int64_t key = 0; key < count_; key += kLanes) {
      for (int64_t column = 0; column < size; column += kLanes) {
        const float* from =
            sums +
            (column / kStrip * kKeyStrips + key / kStrip) * tiles::kSumsCount +
            column % kStrip * tiles::kSumsStride + key % kStrip;
        simd::Vector<float> square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          square[i] = simd::load(from + i * tiles::kSumsStride);
        }
        simd::transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          simd::store(rows + i * stride + column, square[i]);
        }
      }
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, count_ - key); ++i) {
        target.store(problem_.shape(), batch, column_ + key + i,
                     rows + i * stride, size, factor);
      }
    }
  }

  const BackwardProblem<Input>& problem_;
  const VisibleKeys<Input>& visible_keys_;
  const Packing& packing_;
  const GradMaskSums<Input>* grad_mask_sums_;
  int64_t slice_;
  int64_t split_;
  GradQuerySums<Input> sums_;
  std::byte* memory_;
  std::byte* keys_;
  std::byte* values_;
  std::byte* key_columns_;
  float* probabilities_;  // of a strip, first its scores
  float* grad_scores_;
  float* cap_slopes_;                // of a strip, or null
  std::byte* grad_score_rows_;       // of a strip
  std::byte* packed_probabilities_;  // of a block of rows
  std::byte* packed_grad_scores_;
  float* grad_key_sums_;
  float* grad_value_sums_;
  float* key_means_;  // of Pieces
  float* tiles_;      // S and dO V^T of a strip, in micro-tiles
  TileScoreGradients<Input> score_gradients_;
  TileProducts products_;
  Units units_[kKeyStrips] = {};
  int64_t column_ = 0;
  int64_t count_ = 0;
  int64_t mask_offset_ = 0;
};

}  // namespace pkg::cpu::attention

#endif
