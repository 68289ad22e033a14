// A block of rows against a range of keys by tile registers: as
// forward_block.h, in strips of 32 rows. Where maxima are known, or those of
// the first keys will do, and no mask stands in the way that cannot be had in
// registers, scores are made a micro-tile at a time and their probabilities
// stored as the tiles of the next product; else those of a whole strip go
// through memory (26 KiB).
//
// docs/tuning/tiles.md has what was measured.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/attention/forward_block.h"
#include "cpu/attention/known_maxima.h"
#include "cpu/attention/online_softmax.h"
#include "cpu/attention/scratch.h"
#include "cpu/attention/softmax_tile.h"
#include "cpu/attention/tile_operands.h"
#include "cpu/attention/tile_probabilities.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/plain_kernel.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu::attention {

template <class Input>
class TileForwardBlock {
 public:
  // Of the vectors that make the softmax.
  using Arithmetic = typename ArithmeticOf<Input>::type;
  using Packing = TilePackedKeyValue<Input>;
  using Scores = typename Packing::Scores;
  using Values = typename Packing::Values;
  using Probabilities = typename TileProbabilitiesOf<Input>::type;

  TileForwardBlock(const Problem<Input>& problem,
                   const VisibleKeys<Input>& visible_keys,
                   const Packing& packing, int64_t block_rows)
      : problem_(problem), visible_keys_(visible_keys), packing_(packing) {
    const int64_t rows = round_up(block_rows, kRows);
    const Scratch<std::byte> query{
        tiles::packed_bytes<Scores>(rows, packing.key_units)};
    const Scratch<float> output_sums{rows * packing.value_stride};
    const Scratch<float> scores{kRows * kScoreStride};
    const Scratch<std::byte> probabilities = Probabilities::scratch();
    const Scratch<float> products{2 * tiles::kSumsCount};
    const Scratch<float> factors{kScoreStride + Dropout<float>::kSpare};
    const Scratch<float> maxima{rows};
    const Scratch<Vector<float>> sums{rows};
    std::byte* memory =
        Workspace::of_this_thread<Slot::AttentionTask>().request<std::byte>(
            query.size() + output_sums.size() + scores.size() +
            probabilities.size() + products.size() + factors.size() +
            maxima.size() + sums.size());
    query_ = query.take(memory);
    output_sums_ = output_sums.take(memory);
    scores_ = scores.take(memory);
    probabilities_ = Probabilities(probabilities.take(memory), scores_);
    products_ = products.take(memory);
    factors_ = factors.take(memory);
    states_.maxima = maxima.take(memory);
    states_.sums = sums.take(memory);
  }

  // Runs the task; the rows' states and sums of P V stay here until the
  // next one. All keys and values are finite, or else refused.
  void run(const ForwardTask& task, std::byte* packed, const bool* /*finite*/) {
    const tiles::Registers registers;
    const AttentionShape& shape = problem_.shape;
    const auto query = problem_.query.at(shape, task.batch).from(task.row, 0);
    tiles::Range range;
    tiles::pack_strips<Scores, tiles::Side::Left>(
        rows_of(query), task.rows, shape.head_size, query_, range);
    if (!is_fit_for_scores<Input>(range, problem_.hides_keys())) {
      packing_.is_refused = true;
      return;
    }
    const int64_t rows = round_up(task.rows, kRows);
    std::fill_n(output_sums_, rows * packing_.value_stride, 0.0F);
    states_.reset(rows);
    mask_offset_ = problem_.mask.offset(shape, task.batch);
    const typename VisibleKeys<Input>::OfMatrix visible_keys(visible_keys_,
                                                             task.batch);
    for (int64_t column = task.column; column < task.column_end;
         column += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, task.column_end - column);
      const bool all_finite = problem_.hides_keys();  // or refused
      for (int64_t row = 0; row < task.rows; row += kRows) {
        const int used =
            static_cast<int>(std::min<int64_t>(kRows, task.rows - row));
        const KeyRange seen = visible_keys.of_strip(task.row + row, used,
                                                    column, count, all_finite);
        if (seen.begin < seen.end) {
          used > tiles::kTileRows
              ? run_strip<kRows>(task, packed, row, used, column, seen)
              : run_strip<tiles::kTileRows>(task, packed, row, used, column,
                                            seen);
        }
      }
    }
    unscale(task.rows);
  }

  SoftmaxState<float> state(int64_t row) const { return states_.at(row); }
  const float* output_sums(int64_t row) const {
    return output_sums_ + row * packing_.value_stride;
  }

 private:
  static constexpr int kRows = tiles::kStrip;
  static constexpr int kLanes = simd::kLanes<float>;
  static constexpr bool kPrecise = kPreciseProbabilities<Input>;

  // The keys that are seen of the block from `column`.
  template <int kUsed>
  void run_strip(const ForwardTask& task, std::byte* packed, int64_t row,
                 int used, int64_t column, const KeyRange& seen) {
    const int64_t first = column + seen.begin;
    const int64_t count = seen.end - seen.begin;
    const std::byte* const keys = packing_.keys(packed, first);
    if (!softmax_with_known_maxima<kUsed>(task, row, used, keys, first,
                                          count)) {
      const float scale = write_scores(task, row, used, keys, first, count);
      update_softmax<Input, kUsed, Probabilities::kStride>(
          problem_, task.batch, task.row + row, used, first, count, scale,
          scores_, states_.from(row), factors_, probabilities_.elements(),
          output_sums_ + row * packing_.value_stride, packing_.value_stride);
      probabilities_.pack(kUsed, count);
    }
    add_values(row, kUsed, count,
               packing_.values(packed, column) +
                   seen.begin / Values::kValues * tiles::kUnitBytes<Values>);
  }

  // As ForwardBlock does. Rows that have seen no keys begin with the maxima of
  // a few, which are seldom much below those of all.
  template <int kUsed>
  bool softmax_with_known_maxima(const ForwardTask& task, int64_t row, int used,
                                 const std::byte* keys, int64_t first,
                                 int64_t count) {
    const auto states = states_.from(row);
    const bool guesses =
        !states.is_any_known(kUsed) &&
        !problem_.masks_strip(task.row + row, used, first, count);
    return with_known_maxima(
        problem_, guesses || states.are_known(kUsed),
        {task.row + row, used, kUsed, first, count}, mask_offset_, true,
        [&](const auto& mask_rows, const PrefetchRows& to_prefetch) {
          return softmax_of_micro_tiles<kUsed>(row, keys, count, guesses,
                                               mask_rows, to_prefetch);
        });
  }

  // The same with a mask of one kind: a micro-tile at a time, each after the
  // products of the next, which store its scores. Returns whether sums of
  // probabilities are numbers and not too large.
  template <int kUsed, class Mask>
  bool softmax_of_micro_tiles(int64_t row, const std::byte* keys, int64_t count,
                              bool guesses, const Mask& mask,
                              const PrefetchRows& to_prefetch) {
    const auto states = states_.from(row);
    float scaled_maxima[kUsed];
    Vector<float> sums[kUsed] = {};
    const MicroTileSoftmax<Mask> softmax{
        probabilities_,
        static_cast<float>(problem_.shape.scale),
        in_exp_units<kPrecise>(states.maxima, scaled_maxima),
        sums,
        mask,
        to_prefetch};
    const auto guess = [&](const float* scores, int64_t of) {
      const bool done = guess_maxima<kUsed>(scores, of, states);
      in_exp_units<kPrecise>(states.maxima, scaled_maxima);
      return done;
    };
    float* previous = products_;
    for (int64_t key = 0; key < count; key += tiles::kStrip) {
      softmax.template prefetch<kUsed, 2>(0, key);
      multiply<Scores>(tiles_of(kUsed), tiles_of(count - key),
                       packing_.key_units,
                       {queries(row), {}, keys, previous, tiles::kSumsStride});
      keys += packing_.key_strip_size();
      if (key == tiles::kStrip && guesses && !guess(previous, key)) {
        return false;
      }
      if (key > 0) {
        soften<kUsed, 2>(previous, key - tiles::kStrip, softmax);
      }
      previous = scores_ + key / tiles::kStrip % 2 * tiles::kSumsCount;
    }
    tiles::store_sums(previous);
    if (count <= tiles::kStrip && guesses && !guess(previous, count)) {
      return false;
    }
    const int64_t last = (count - 1) / tiles::kStrip * tiles::kStrip;
    count - last > kLanes ? soften<kUsed, 2>(previous, last, softmax)
                          : soften<kUsed, 1>(previous, last, softmax);
    return add_sums(sums, states);
  }

  // Makes maxima of the scores of a micro-tile. Returns whether they may be
  // compared with; else there are none.
  template <int kUsed>
  bool guess_maxima(const float* scores, int64_t count,
                    const SoftmaxStates<float>& states) const {
    store_maxima<kUsed, tiles::kSumsStride>(
        scores, count, static_cast<float>(problem_.shape.scale), states.maxima);
    if (states.are_known(kUsed)) {
      return true;
    }
    std::fill_n(states.maxima, kUsed, -kInfinity<float>);
    return false;
  }

  template <class Mask>
  using MicroTileSoftmax = SoftmaxTile<kPrecise, Probabilities, float, Mask>;

  // Of a micro-tile's scores, kVectors registers of each row, those of the keys
  // from `key` on.
  template <int kUsed, int kVectors, class Mask>
  static void soften(const float* scores, int64_t key,
                     const MicroTileSoftmax<Mask>& softmax) {
    constexpr int kRowsAtOnce = 2;
    for (int r = 0; r < kUsed; r += kRowsAtOnce) {
      Vector<float> registers[kRowsAtOnce][kVectors];
      for (int i = 0; i < kRowsAtOnce; ++i) {
        for (int v = 0; v < kVectors; ++v) {
          registers[i][v] =
              simd::load(scores + (r + i) * tiles::kSumsStride + v * kLanes);
        }
      }
      softmax(r, key, registers, 0);
    }
  }

  // Writes a strip's scores, masked. Returns what they are yet to be multiplied
  // by.
  float write_scores(const ForwardTask& task, int64_t row, int used,
                     const std::byte* keys, int64_t first, int64_t count) {
    float* previous = products_;
    int64_t previous_stride = tiles::kSumsStride;
    for (int64_t key = 0; key < count; key += tiles::kStrip) {
      multiply<Scores>(tiles_of(used), tiles_of(count - key),
                       packing_.key_units,
                       {queries(row), {}, keys, previous, previous_stride});
      keys += packing_.key_strip_size();
      previous = scores_ + key;
      previous_stride = kScoreStride;
    }
    tiles::store_sums(previous, previous_stride);
    return mask_scores(problem_, task.batch, mask_offset_, task.row + row, used,
                       first, count, static_cast<float>(problem_.shape.scale),
                       scores_);
  }

  // O += P V. Each addition to the sums of all keys rounds off more than one to
  // those of a block: one a block.
  void add_values(int64_t row, int rows, int64_t count,
                  const std::byte* values) {
    const int64_t columns = problem_.shape.value_size;
    const int64_t units = tiles::units_of<Values>(count);
    float* previous = products_;
    int turn = 0;
    for (int64_t column = 0; column < columns; column += tiles::kStrip) {
      turn = 1 - turn;
      multiply<typename Probabilities::Scheme>(
          tiles_of(rows), tiles_of(columns - column), units,
          {probabilities_.packed(), Probabilities::kLayout, values, previous,
           tiles::kSumsStride});
      values += Packing::kBlockUnits * tiles::kUnitBytes<Values>;
      if (column > 0) {
        add_products(row, rows, column - tiles::kStrip, previous);
      }
      previous = products_ + turn * tiles::kSumsCount;
    }
    tiles::store_sums(previous);
    add_products(row, rows, (columns - 1) / tiles::kStrip * tiles::kStrip,
                 previous);
  }

  void add_products(int64_t row, int rows, int64_t column,
                    const float* products) {
    float* to = output_sums_ + row * packing_.value_stride + column;
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r, to += packing_.value_stride) {
      for (int v = 0; v < tiles::kStrip; v += kLanes) {
        simd::store(to + v,
                    simd::load(to + v) +
                        simd::load(products + r * tiles::kSumsStride + v));
      }
    }
  }

  void unscale(int64_t rows) {
    constexpr float kScale = Packing::Schemes::kProbabilityScale;
    if constexpr (kScale != 1) {
      for (int64_t i = 0; i < rows * packing_.value_stride; i += kLanes) {
        simd::store(output_sums_ + i,
                    simd::load(output_sums_ + i) * (1 / kScale));
      }
    }
  }

  const std::byte* queries(int64_t row) const {
    return query_ + row / kRows * packing_.key_strip_size();
  }

  // Products of a strip's rows and a strip of keys' or values' columns; what
  // the registers hold from the call before is stored.
  struct Operands {
    const std::byte* left;
    tiles::LeftLayout left_layout;
    const std::byte* right;
    float* previous;
    int64_t previous_stride;
  };
  template <class Scheme>
  static void multiply(int row_tiles, int column_tiles, int64_t units,
                       const Operands& operands) {
    if constexpr (Scheme::kParts == 1) {
      tiles::multiply_plain_tile<tiles::Bfloat16By1>(
          row_tiles, column_tiles, units,
          {operands.left, operands.left_layout, operands.right, nullptr,
           operands.previous, operands.previous_stride, tiles::kNoWork, 0});
    } else {
      tiles::multiply_micro_tile<Scheme, tiles::Streamed::Right>(
          row_tiles, column_tiles, units,
          {operands.left, operands.right, operands.previous,
           operands.previous_stride, tiles::kNoWork});
    }
  }

  static int tiles_of(int64_t lines) {
    return lines > tiles::kTileRows ? 2 : 1;
  }

  const Problem<Input>& problem_;
  const VisibleKeys<Input>& visible_keys_;
  const Packing& packing_;
  int64_t mask_offset_ = 0;
  std::byte* query_;    // packed
  float* output_sums_;  // P V, scaled
  float* scores_;       // of a strip
  Probabilities probabilities_{nullptr, nullptr};
  float* products_;  // of two micro-tiles
  float* factors_;   // of dropout
  SoftmaxStates<float> states_;
};

}  // namespace pkg::cpu::attention

#endif
