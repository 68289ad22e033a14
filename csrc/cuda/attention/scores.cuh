// The score of a query against a key, made of their product: scale, cap, ALiBi,
// mask and what is not seen; and which weights dropout leaves.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/mask_row.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/tile_limits.cuh"
#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "host/philox.h"

namespace pkg::cuda {

// Turns products of queries and keys into scores and decides on dropout, for
// one matrix of the batch.
template <class Element>
class AttentionScores {
 public:
  static constexpr bool kScalesExponents = false;  // see ScaledExponents
  using Number = Accumulator<Element>;
  template <class Scores>
  using Mask = MaskRow<Element, Scores>;

  // What they take of the matrix, for who keeps it elsewhere than in registers.
  struct Matrix {
    int64_t rows;
    int64_t columns;
    int64_t first;  // KeyLimits
    int64_t last;
    int64_t batch;
    int64_t mask_offset;
    int64_t seed;
    Number slope;
  };

  __device__ __forceinline__
  AttentionScores(const AttentionProblem<Element>& problem, int64_t batch,
                  const AttentionExtent& extent)
      : problem_(problem),
        extent_(extent),
        batch_(batch),
        mask_offset_(
            batch_offset(problem.batch, problem.mask.batch_strides, batch)),
        seed_(problem.dropout.seed == nullptr ? 0 : *problem.dropout.seed),
        slope_(alibi_slope(problem, batch)),
        softcap_(static_cast<Number>(problem.variant.softcap)) {}

  __device__ __forceinline__ AttentionScores(
      const AttentionProblem<Element>& problem, const Matrix& matrix)
      : problem_(problem),
        extent_{
            matrix.rows, matrix.columns, 0, 0, {matrix.first, matrix.last}, 0},
        batch_(matrix.batch),
        mask_offset_(matrix.mask_offset),
        seed_(matrix.seed),
        slope_(matrix.slope),
        softcap_(static_cast<Number>(problem.variant.softcap)) {}

  __device__ __forceinline__ Matrix matrix() const {
    return {extent_.rows,
            extent_.columns,
            extent_.limits.first,
            extent_.limits.last,
            batch_,
            mask_offset_,
            seed_,
            slope_};
  }

  // Minus infinity where the key takes no part, which is not computed from the
  // product: keys that are masked out may hold NaN.
  __device__ __forceinline__ Number score(int64_t row, int64_t column,
                                          Number product) const {
    if (!sees(row, column)) {
      return -Number(INFINITY);
    }
    Number scaled = product * static_cast<Number>(problem_.scale);
    if (caps()) {
      scaled = softcap_ * capped_share(scaled);
    }
    if (problem_.variant.slopes.data != nullptr) {
      const int64_t distance = row + extent_.columns - extent_.rows - column;
      scaled -=
          slope_ * static_cast<Number>(distance < 0 ? -distance : distance);
    }
    const int64_t offset = mask_offset_ + row * problem_.mask.row_stride +
                           column * problem_.mask.column_stride;
    switch (problem_.mask.type) {
      case MaskType::none:
        break;
      case MaskType::boolean:
        return static_cast<const uint8_t*>(problem_.mask.data)[offset] != 0
                   ? scaled
                   : -Number(INFINITY);
      case MaskType::element:
        return scaled + convert<Number>(static_cast<const Element*>(
                            problem_.mask.data)[offset]);
      case MaskType::single:
        return scaled + convert<Number>(static_cast<const float*>(
                            problem_.mask.data)[offset]);
    }
    return scaled;
  }

  // Whether the scores of a tile are scaled products and nothing else.
  template <class Scores>
  __device__ __forceinline__ bool are_products(int64_t row_begin,
                                               int64_t column_begin) const {
    return problem_.mask.type == MaskType::none &&
           problem_.variant.slopes.data == nullptr && !caps() &&
           TileLimits(extent_, row_begin, column_begin)
               .see_whole(Scores::kTileRows, Scores::kTileColumns);
  }

  // Loads what score_row() needs of the mask, if there is one.
  template <class Scores>
  __device__ __forceinline__ void load_mask(MaskRow<Element, Scores>& mask,
                                            int i, int64_t row_begin,
                                            int64_t column_begin) const {
    with_mask_type([&]<class Value>(const Value* data) {
      mask.load(mask_corner(data, row_begin, column_begin), i);
    });
  }

  // The same as score() of the thread's i-th row of a tile, step by step.
  template <class Scores>
  __device__ __forceinline__ void score_row(
      Scores& tile, int i, int64_t row_begin, int64_t column_begin,
      const MaskRow<Element, Scores>& mask) const {
    tile.scale_row(i, scale());
    if (caps()) {
      PKG_UNROLL
      for (int j = 0; j < tile.kThreadColumns; ++j) {
        tile.values[i][j] = softcap_ * capped_share(tile.values[i][j]);
      }
    }
    if (problem_.variant.slopes.data != nullptr) {
      const typename Scores::Thread thread;
      const int64_t diagonal = row_begin + thread.row(i) + extent_.columns -
                               extent_.rows - column_begin;
      PKG_UNROLL
      for (int j = 0; j < tile.kThreadColumns; ++j) {
        const int64_t distance = diagonal - thread.column(j);
        tile.values[i][j] -=
            slope_ * static_cast<Number>(distance < 0 ? -distance : distance);
      }
    }
    with_mask_type([&]<class Value>(const Value*) {
      mask.template apply<Value>(tile, i, ApplyMask());
    });
    const TileLimits limits(extent_, row_begin, column_begin);
    if (!limits.see_whole(Scores::kTileRows, Scores::kTileColumns)) {
      limits.hide_unseen_of_row(tile, i);
    }
  }

  // The same of a tile, step by step, so that each is decided on once: what
  // score() does to each of a hundred values would be as much code a hundred
  // times.
  template <class Scores>
  __device__ __forceinline__ void score_tile(Scores& tile, int64_t row_begin,
                                             int64_t column_begin) const {
    tile.scale(static_cast<Number>(problem_.scale));
    if (caps()) {
      tile.transform([&](int, int, Number scaled) {
        return softcap_ * capped_share(scaled);
      });
    }
    const TileLimits limits(extent_, row_begin, column_begin);
    if (problem_.variant.slopes.data != nullptr) {
      tile.transform([&](int row, int column, Number score) {
        const int distance = limits.diagonal + row - column;
        return score - slope_ * static_cast<Number>(distance < 0 ? -distance
                                                                 : distance);
      });
    }
    if constexpr (requires { typename Scores::Thread; }) {
      mask_rows(tile, row_begin, column_begin);
    } else if (problem_.mask.type != MaskType::none) {
      mask_tile(tile, limits, row_begin, column_begin);
    }
    limits.hide_unseen(tile);
  }

  // Multiplies the weights of a tile by what dropout does to them. Two of four
  // neighbouring keys, for which the factors come together, are a thread's.
  template <class Weights>
  __device__ __forceinline__ void drop_tile(Weights& tile, int64_t row_begin,
                                            int64_t column_begin) const {
    if (problem_.dropout.seed == nullptr) {
      return;
    }
    const typename Weights::Thread thread;
    PKG_UNROLL
    for (int i = 0; i < tile.kThreadRows; ++i) {
      PKG_UNROLL
      for (int j = 0; j < tile.kThreadColumns; j += 2) {
        const int column = thread.column(j);
        Number factors[4];
        dropout_factors(row_begin + thread.row(i),
                        column_begin + column / 4 * 4, factors);
        const bool is_second = column % 4 != 0;
        tile.values[i][j] *= is_second ? factors[2] : factors[0];
        tile.values[i][j + 1] *= is_second ? factors[3] : factors[1];
      }
    }
  }

  // Which weights dropout leaves of a tile whose rows are keys and whose
  // columns are queries, a bit for each of the thread's. The words of four
  // neighbouring keys, which come together, belong to four lanes: each computes
  // those of one query in four, and they exchange them.
  template <class Weights>
  __device__ __forceinline__ uint32_t
  kept_of_transposed(int64_t row_begin, int64_t column_begin) const {
    static_assert(Weights::kThreadRows * Weights::kThreadColumns <= 32);
    if (problem_.dropout.seed == nullptr) {
      return ~uint32_t{0};
    }
    const typename Weights::Thread thread;
    const int own = thread.lane / 4 % 4;
    uint32_t kept = 0;
    PKG_UNROLL
    for (int i = 0; i < Weights::kThreadRows; ++i) {
      const int64_t column = column_begin + thread.row(i);
      PKG_UNROLL
      for (int j = 0; j < Weights::kThreadColumns; j += 4) {
        PhiloxCounter words = dropout_words(
            seed_, batch_, row_begin + thread.column(j + own), column / 4);
        transpose_quads<4>(words.words);
        PKG_UNROLL
        for (int k = 0; k < 4; ++k) {
          const bool keeps =
              dropout_keeps(words.words[k], problem_.dropout.keep_threshold);
          kept |= static_cast<uint32_t>(keeps)
                  << (i * Weights::kThreadColumns + j + k);
        }
      }
    }
    return kept;
  }

  // By what a weight grows that dropout leaves.
  __device__ __forceinline__ Number keep_scale() const {
    return problem_.dropout.seed == nullptr
               ? Number(1)
               : static_cast<Number>(problem_.dropout.keep_scale);
  }

  __device__ __forceinline__ Number scale() const {
    return static_cast<Number>(problem_.scale);
  }

  __device__ __forceinline__ bool caps() const { return softcap_ > Number(0); }

  // The derivative of a score by the scaled product: 1 unless it is capped.
  __device__ __forceinline__ Number cap_slope(Number product) const {
    if (caps()) {
      const Number share =
          capped_share(product * static_cast<Number>(problem_.scale));
      return (1 - share) * (1 + share);
    }
    return 1;
  }

  // What dropout does to the weights of four neighbouring keys, from a multiple
  // of four on: 0 drops one, the others grow to keep the sum's expectation.
  __device__ __forceinline__ void dropout_factors(int64_t row, int64_t column,
                                                  Number (&factors)[4]) const {
    if (problem_.dropout.seed == nullptr) {
      factors[0] = factors[1] = factors[2] = factors[3] = 1;
      return;
    }
    const Number keep_scale = static_cast<Number>(problem_.dropout.keep_scale);
    const PhiloxCounter words = dropout_words(seed_, batch_, row, column / 4);
    PKG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const bool keeps =
          dropout_keeps(words.words[i], problem_.dropout.keep_threshold);
      factors[i] = keeps ? keep_scale : Number(0);
    }
  }

 private:
  // Calls function(data of the mask), if there is one.
  template <class Function>
  __device__ __forceinline__ void with_mask_type(Function&& function) const {
    const AttentionMask& mask = problem_.mask;
    if (mask.type == MaskType::boolean) {
      function(static_cast<const uint8_t*>(mask.data));
    } else if (mask.type == MaskType::element) {
      function(static_cast<const Element*>(mask.data));
    } else if constexpr (!std::is_same_v<Element, float>) {
      if (mask.type == MaskType::single) {
        function(static_cast<const float*>(mask.data));
      }
    }
  }

  // What a value of the mask makes of a score.
  struct ApplyMask {
    template <class Value>
    __device__ __forceinline__ Number operator()(Value value,
                                                 Number score) const {
      if constexpr (std::is_same_v<Value, uint8_t>) {
        return value != 0 ? score : -Number(INFINITY);
      } else {
        return score + convert<Number>(value);
      }
    }
  };

  template <class Value>
  __device__ __forceinline__ MaskCorner<Value> mask_corner(
      const Value* data, int64_t row_begin, int64_t column_begin) const {
    const TileLimits limits(extent_, row_begin, column_begin);
    const AttentionMask& of = problem_.mask;
    return {data + mask_offset_ + row_begin * of.row_stride +
                column_begin * of.column_stride,
            of.row_stride, of.column_stride, limits.rows, limits.columns};
  }

  // What lies beyond the matrix is hidden afterwards. Eight columns at a time,
  // so that kernels without registers to spare have them.
  template <class Scores>
  __device__ __forceinline__ void mask_rows(Scores& tile, int64_t row_begin,
                                            int64_t column_begin) const {
    with_mask_type([&]<class Value>(const Value* data) {
      const auto corner = mask_corner(data, row_begin, column_begin);
      constexpr int kPart =
          Scores::kThreadColumns < 8 ? Scores::kThreadColumns : 8;
      static_assert(Scores::kThreadColumns % kPart == 0);
      MaskRow<Element, Scores, kPart> mask;
      PKG_UNROLL
      for (int i = 0; i < Scores::kThreadRows; ++i) {
        PKG_UNROLL
        for (int first = 0; first < Scores::kThreadColumns; first += kPart) {
          mask.load(corner, i, first);
          mask.template apply<Value>(tile, i, ApplyMask(), first);
        }
      }
    });
  }

  __device__ __forceinline__ bool sees(int64_t row, int64_t column) const {
    return row < extent_.rows && column < extent_.columns &&
           column >= row + extent_.limits.first &&
           column <= row + extent_.limits.last;
  }

  // What the mask makes of a tile whose rows are keys: its neighbours are
  // queries.
  template <class Scores>
  __device__ __forceinline__ void mask_tile(Scores& tile,
                                            const TileLimits& limits,
                                            int64_t row_begin,
                                            int64_t column_begin) const {
    const AttentionMask& mask = problem_.mask;
    // Calls function(offset, score) where there is a mask to be read.
    const auto with_offset = [&](auto&& function) {
      const int64_t row_stride = computed_here(mask.row_stride);
      const int64_t column_stride = computed_here(mask.column_stride);
      int64_t offset =
          mask_offset_ + row_begin * row_stride + column_begin * column_stride;
      // Each from the one before, so that one at a time is in registers: of
      // sums of products, many at a time, the kernels of tensor cores spilled
      // up to 80 bytes of a thread more (nvcc 13.0).
      int last_row = 0;
      int last_column = 0;
      tile.transform([&](int row, int column, Number score) {
        offset = computed_here(offset + (row - last_row) * row_stride +
                               (column - last_column) * column_stride);
        last_row = row;
        last_column = column;
        return row < limits.rows && column < limits.columns
                   ? function(offset, score)
                   : score;
      });
    };
    switch (mask.type) {
      case MaskType::none:
        return;
      case MaskType::boolean:
        return with_offset([&](int64_t offset, Number score) {
          return static_cast<const uint8_t*>(mask.data)[offset] != 0
                     ? score
                     : -Number(INFINITY);
        });
      case MaskType::element:
        return with_offset([&](int64_t offset, Number score) {
          return score + convert<Number>(
                             static_cast<const Element*>(mask.data)[offset]);
        });
      case MaskType::single:
        return with_offset([&](int64_t offset, Number score) {
          return score +
                 convert<Number>(static_cast<const float*>(mask.data)[offset]);
        });
    }
  }

  __device__ __forceinline__ static Number alibi_slope(
      const AttentionProblem<Element>& problem, int64_t batch) {
    const AttentionSlopes& slopes = problem.variant.slopes;
    if (slopes.data == nullptr) {
      return 0;
    }
    const int64_t at = batch_offset(problem.batch, slopes.batch_strides, batch);
    return slopes.is_single
               ? convert<Number>(static_cast<const float*>(slopes.data)[at])
               : convert<Number>(static_cast<const Element*>(slopes.data)[at]);
  }

  // A scaled score as a share of the cap.
  __device__ __forceinline__ Number capped_share(Number scaled) const {
    return tanh(scaled / softcap_);
  }

  const AttentionProblem<Element>& problem_;
  AttentionExtent extent_;
  int64_t batch_;
  int64_t mask_offset_;
  int64_t seed_;
  Number slope_;
  Number softcap_;  // 0 without
};

// The same of tiles, for kernels without registers to spare: what belongs to
// the matrix is in shared memory, and read for each tile. From the next barrier
// of the block on; the scores of another matrix come after one more.
template <class Element>
class SharedAttentionScores {
 public:
  static constexpr bool kScalesExponents = false;

  __device__ __forceinline__
  SharedAttentionScores(const AttentionProblem<Element>& problem, int64_t batch,
                        const AttentionExtent& extent)
      : problem_(problem) {
    if (threadIdx.x == 0) {
      place()[0] = Scores(problem, batch, extent).matrix();
    }
  }

  template <class Tile>
  __device__ __forceinline__ void score_tile(Tile& tile, int64_t row_begin,
                                             int64_t column_begin) const {
    scores().score_tile(tile, row_begin, column_begin);
  }
  template <class Weights>
  __device__ __forceinline__ uint32_t
  kept_of_transposed(int64_t row_begin, int64_t column_begin) const {
    return scores().template kept_of_transposed<Weights>(row_begin,
                                                         column_begin);
  }
  __device__ __forceinline__ float keep_scale() const {
    return scores().keep_scale();
  }
  __device__ __forceinline__ bool caps() const { return scores().caps(); }
  __device__ __forceinline__ float cap_slope(float product) const {
    return scores().cap_slope(product);
  }

 private:
  using Scores = AttentionScores<Element>;

  __device__ __forceinline__ static auto place() {
    PKG_SHARED(typename Scores::Matrix, scored_matrix, [1]);
    return scored_matrix;
  }
  __device__ __forceinline__ Scores scores() const {
    return Scores(problem_, place()[0]);
  }

  const AttentionProblem<Element>& problem_;
};

}  // namespace pkg::cuda
