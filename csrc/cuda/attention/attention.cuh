// What the forward and backward kernels of attention share: the problem as the
// host describes it, and the score of a query against a key.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_key_limits.h"
#include "cuda/attention/mask_row.cuh"
#include "cuda/device/batch.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/fast_math.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/gemm/panel.cuh"
#include "cuda/gemm/tile.cuh"
#include "host/philox.h"

namespace pkg::cuda {

// The tile of queries by keys of which a block holds the scores: square, since
// the backward pass takes it from both sides. (AttentionGrid's may be wider.)
constexpr int kAttentionTile = 64;

// The scores that a block has in the kernels that multiply them without tensor
// cores and have registers for 8 x 8 of a thread: what it loads is multiplied
// more often than of 4 x 4, which float64 has, whose numbers take two
// registers. The scores are as wide as the tile of heads, so that a thread has
// 8 x 8 of each.
template <class Number, int kWidth = kAttentionTile>
struct AttentionGrid {
  static constexpr int kColumns = sizeof(Number) == 4 ? kWidth : kAttentionTile;
  using Thread = std::conditional_t<sizeof(Number) == 4,
                                    GridThread<8, kColumns / 8>, TileThread>;
  using Scores = Tile<Number, kAttentionTile, kColumns, Thread>;
};

// Steps of a panel. In float32 two panels of each operand and one tile of
// weights take 43 KiB of shared memory; float64 fits the 48 KiB that a block
// has without asking by taking a quarter of the steps.
template <class Element>
constexpr int kAttentionDepth = std::is_same_v<Element, double> ? 4 : 16;

// A batch of matrices, of any strides.
template <class Element>
struct MatrixBatch {
  const Element* data;
  BatchStrides batch_strides;
  int64_t row_stride;
  int64_t column_stride;

  // Its rows from `first_row` on as the operand of a product whose outer
  // dimension is the rows and whose summed dimension is the columns.
  __device__ __forceinline__ PanelSource<Element> by_row(
      const BatchSizes& batch, int64_t index, int64_t first_row, int64_t rows,
      int64_t columns) const {
    return {row(batch, index, first_row), rows, columns, row_stride,
            column_stride};
  }
  __device__ __forceinline__ PanelSource<Element> by_column(
      const BatchSizes& batch, int64_t index, int64_t first_row, int64_t rows,
      int64_t columns) const {
    return {row(batch, index, first_row), columns, rows, column_stride,
            row_stride};
  }
  __device__ __forceinline__ const Element* row(const BatchSizes& batch,
                                                int64_t index,
                                                int64_t row) const {
    return data + batch_offset(batch, batch_strides, index) + row * row_stride;
  }
};

// A batch of matrices that is written; the columns are neighbours.
template <class Element>
struct ResultBatch {
  Element* data;
  BatchStrides batch_strides;
  int64_t row_stride;

  __device__ __forceinline__ Element* row(const BatchSizes& batch,
                                          int64_t index, int64_t row) const {
    return data + batch_offset(batch, batch_strides, index) + row * row_stride;
  }
};

enum class MaskType : int32_t {
  none,
  boolean,  // a byte, not 0 where the key takes part
  element,  // of the queries' type, added to the scaled score
  single,   // float32, added likewise
};

struct AttentionMask {
  const void* data;
  MaskType type;
  BatchStrides batch_strides;
  int64_t row_stride;
  int64_t column_stride;

  bool has_numbers() const {
    return type == MaskType::element || type == MaskType::single;
  }
};

// ALiBi's slopes, one for each matrix of the batch.
struct AttentionSlopes {
  const void* data;  // null without
  bool is_single;    // float32, else of the queries' type
  BatchStrides batch_strides;
};

// What flash-attn has beyond PyTorch's attention.
struct AttentionVariant {
  AttentionSlopes slopes = {};
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0;  // 0 without
};

struct AttentionDropout {
  const int64_t* seed;  // null without dropout
  uint64_t keep_threshold;
  double keep_scale;  // 1 / (1 - p), or 0 where everything is dropped
};

inline AttentionDropout attention_dropout(const int64_t* seed,
                                          double probability) {
  return {probability > 0 ? seed : nullptr, dropout_keep_threshold(probability),
          probability < 1 ? 1 / (1 - probability) : 0};
}

// Where the sequences of a packed batch begin, and behind the last of them its
// end: int32 or int64, of any stride.
struct SequenceOffsets {
  const void* data;  // null where every matrix of the batch is of one length
  bool is_wide;
  int64_t stride;

  __device__ __forceinline__ int64_t operator[](int64_t index) const {
    return is_wide ? static_cast<const int64_t*>(data)[index * stride]
                   : static_cast<const int32_t*>(data)[index * stride];
  }
};

struct SequenceRange {
  int64_t begin;
  int64_t count;
};

// Part `index` of `total` tokens, of at most `most` tokens; whatever the
// offsets are, it lies within them.
__device__ __forceinline__ SequenceRange
sequence_range(const SequenceOffsets& offsets, int64_t index, int64_t total,
               int64_t most) {
  const auto within = [](int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
  };
  const int64_t begin = within(offsets[index], 0, total);
  const int64_t end = within(offsets[index + 1], begin, total);
  return {begin, end - begin < most ? end - begin : most};
}

// A batch whose first dimension are sequences that follow one another in the
// rows of every operand.
struct PackedSequences {
  SequenceOffsets rows;
  SequenceOffsets columns;
  int64_t heads;  // matrices of the batch for each sequence
  int64_t total_rows;
  int64_t total_columns;
};

// How long the matrices of one index of the batch are, and where they begin.
struct AttentionExtent {
  int64_t rows;
  int64_t columns;
  int64_t first_row;
  int64_t first_column;
  KeyLimits limits;
  int64_t statistics;  // of what is kept for each row, the first one's place
};

// Lengths and operands of one call. Matrices of the batch are counted in row
// order over `batch`; grouped queries are a batch dimension along which key and
// value have stride 0.
template <class Element>
struct AttentionProblem {
  BatchSizes batch;
  int64_t batch_count;
  int64_t rows;       // queries; of packed sequences the most
  int64_t columns;    // keys, likewise
  int64_t head_size;  // of query and key
  int64_t value_size;
  MatrixBatch<Element> query;
  MatrixBatch<Element> key;
  MatrixBatch<Element> value;
  AttentionMask mask;
  AttentionDropout dropout;
  double scale;
  bool is_causal;  // of packed sequences aligned to the last key
  PackedSequences packed;
  AttentionVariant variant;

  __host__ __device__ bool is_packed() const {
    return packed.rows.data != nullptr;
  }

  // Of a scale below it there is no normal number of float32 in other units.
  static constexpr double kLeastPlainScale = 1e-30;

  // Whether a score is a product and a positive scale, where a key is seen, and
  // a weight nothing but the softmax of scores.
  __host__ __device__ bool is_plain() const {
    return scale >= kLeastPlainScale && mask.type == MaskType::none &&
           dropout.seed == nullptr && variant.slopes.data == nullptr &&
           variant.softcap == 0;
  }

  // Whether all tiles of queries, or of keys, are as much work.
  bool has_equal_tiles() const {
    return !is_packed() && !is_causal && variant.window_left < 0 &&
           variant.window_right < 0;
  }

  // Where the matrices are of one length, without the code for others.
  __device__ __forceinline__ AttentionExtent
  extent_of_one_length(int64_t index) const {
    return {rows, columns, 0, 0, limits_of_one_length(), index * rows};
  }

  __device__ __forceinline__ AttentionExtent extent(int64_t index) const {
    if (!is_packed()) {
      return extent_of_one_length(index);
    }
    const int64_t sequence = index / packed.heads;
    const SequenceRange row =
        sequence_range(packed.rows, sequence, packed.total_rows, rows);
    const SequenceRange column =
        sequence_range(packed.columns, sequence, packed.total_columns, columns);
    return {row.count,
            column.count,
            row.begin,
            column.begin,
            limits_of_sequence(row.count, column.count),
            index % packed.heads * packed.total_rows + row.begin};
  }

  // Of the longest matrices.
  KeyLimits longest_limits() const {
    return is_packed() ? limits_of_sequence(rows, columns)
                       : limits_of_one_length();
  }

  // Behind the last key that a row before `row_end` sees.
  __device__ __forceinline__ int64_t column_end(const AttentionExtent& extent,
                                                int64_t row_end) const {
    const int64_t seen = row_end + extent.limits.last;
    return seen < extent.columns ? seen : extent.columns;
  }

  // The first of the tiles of keys that the rows from `row` on see.
  __device__ __forceinline__ int64_t first_column(const AttentionExtent& extent,
                                                  int64_t row) const {
    const int64_t column = row + extent.limits.first;
    return column > 0 ? column / kAttentionTile * kAttentionTile : 0;
  }

  // The first of the tiles of rows that see a key from `column` on.
  __device__ __forceinline__ int64_t first_row(const AttentionExtent& extent,
                                               int64_t column) const {
    const int64_t row = column - extent.limits.last;
    return row > 0 ? row / kAttentionTile * kAttentionTile : 0;
  }

  // Behind the last row that sees a key before `column_end`.
  __device__ __forceinline__ int64_t row_end(const AttentionExtent& extent,
                                             int64_t column_end) const {
    const int64_t end = column_end - extent.limits.first;
    return end < extent.rows ? end : extent.rows;
  }

 private:
  __host__ __device__ KeyLimits limits_of_one_length() const {
    return attention_key_limits(rows, columns, is_causal, variant.window_left,
                                variant.window_right);
  }
  __host__ __device__ KeyLimits limits_of_sequence(int64_t own_rows,
                                                   int64_t own_columns) const {
    return attention_key_limits(own_rows, own_columns, false,
                                variant.window_left,
                                is_causal ? 0 : variant.window_right);
  }
};

// Which keys of a tile the rows see, counted from the tile's corner in 32 bits.
// Lengths must be below kMostTiledLength.
struct TileLimits {
  int rows;
  int columns;
  int first;     // column >= row + first
  int last;      // column <= row + last
  int diagonal;  // the distance of the corner's row from its column

  __device__ __forceinline__ TileLimits(const AttentionExtent& extent,
                                        int64_t row_begin, int64_t column_begin)
      : rows(near(extent.rows - row_begin)),
        columns(near(extent.columns - column_begin)),
        first(near(extent.limits.first + row_begin - column_begin)),
        last(near(extent.limits.last + row_begin - column_begin)),
        diagonal(static_cast<int>(row_begin + extent.columns - extent.rows -
                                  column_begin)) {}

  // Where nothing depends on the distance.
  __device__ __forceinline__ TileLimits(int tile_rows, int tile_columns,
                                        int tile_first, int tile_last)
      : rows(tile_rows),
        columns(tile_columns),
        first(tile_first),
        last(tile_last),
        diagonal(0) {}

  __device__ __forceinline__ bool sees(int row, int column) const {
    return row < rows && column < columns && column >= row + first &&
           column <= row + last;
  }

  // Whether every row of a tile sees all of its columns.
  __device__ __forceinline__ bool see_whole(int tile_rows,
                                            int tile_columns) const {
    return sees(tile_rows - 1, 0) && sees(0, tile_columns - 1) &&
           tile_rows <= rows && tile_columns <= columns;
  }

  // Makes minus infinity of the scores of what is not seen. A row sees so many
  // columns from one on: one comparison a score. Of sees(), four of them, the
  // compiler kept the answers of a tile in as many bits as it has scores, and
  // spilled up to 14 words of a thread in the kernels of warpgroups
  // (nvcc 13.0).
  template <class Scores>
  __device__ __forceinline__ void hide_unseen(Scores& tile) const {
    using Number = typename Scores::Value;
    if (!see_whole(Scores::kTileRows, Scores::kTileColumns)) {
      tile.transform([&](int row, int column, Number score) {
        const int begin = row + first > 0 ? row + first : 0;
        const int behind = row + last < columns ? row + last + 1 : columns;
        const int count = row < rows && behind > begin ? behind - begin : 0;
        return static_cast<uint32_t>(column - begin) <
                       static_cast<uint32_t>(count)
                   ? score
                   : -Number(INFINITY);
      });
    }
  }

  // The same of the thread's i-th row.
  template <class Scores>
  __device__ __forceinline__ void hide_unseen_of_row(Scores& tile,
                                                     int i) const {
    using Number = typename Scores::Value;
    const typename Scores::Thread thread;
    PKG_UNROLL
    for (int j = 0; j < Scores::kThreadColumns; ++j) {
      if (!sees(thread.row(i), thread.column(j))) {
        tile.values[i][j] = -Number(INFINITY);
      }
    }
  }

 private:
  // What lies further than any tile is as good as its edge.
  __device__ __forceinline__ static int near(int64_t distance) {
    constexpr int64_t kFar = 1 << 20;
    return static_cast<int>(distance < -kFar  ? -kFar
                            : distance > kFar ? kFar
                                              : distance);
  }
};

constexpr int64_t kMostTiledLength = int64_t{1} << 30;

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

// The scores of a problem that is_plain(), whose limits take one register each.
// Lengths must be below kMostTiledLength.
template <class Element>
class PlainScores {
 public:
  __device__ __forceinline__
  PlainScores(const AttentionProblem<Element>& problem, int64_t,
              const AttentionExtent& extent)
      : scale_(static_cast<Accumulator<Element>>(problem.scale)),
        rows_(static_cast<int>(extent.rows)),
        columns_(static_cast<int>(extent.columns)),
        first_(near(extent.limits.first)),
        last_(near(extent.limits.last)) {}

  static constexpr bool kScalesExponents = false;  // see ScaledExponents

  template <class Scores>
  __device__ __forceinline__ void score_tile(Scores& tile, int64_t row_begin,
                                             int64_t column_begin) const {
    tile.scale(scale_);
    hide_unseen(tile, row_begin, column_begin);
  }

  // Minus infinity in place of what takes no part.
  template <class Scores>
  __device__ __forceinline__ void hide_unseen(Scores& tile, int64_t row_begin,
                                              int64_t column_begin) const {
    const int row = static_cast<int>(row_begin);
    const int column = static_cast<int>(column_begin);
    TileLimits(rows_ - row, columns_ - column, first_ + row - column,
               last_ + row - column)
        .hide_unseen(tile);
  }

  template <class Weights>
  __device__ __forceinline__ void drop_tile(Weights&, int64_t, int64_t) const {}
  template <class Weights>
  __device__ __forceinline__ uint32_t kept_of_transposed(int64_t,
                                                         int64_t) const {
    return ~uint32_t{0};
  }
  __device__ __forceinline__ float keep_scale() const { return 1.0f; }
  __device__ __forceinline__ bool caps() const { return false; }
  __device__ __forceinline__ float cap_slope(float) const { return 1.0f; }

  __device__ __forceinline__ Accumulator<Element> scale() const {
    return scale_;
  }

 private:
  // What lies further than any key is as good as no limit.
  __device__ __forceinline__ static int near(int64_t distance) {
    return static_cast<int>(distance < -kMostTiledLength  ? -kMostTiledLength
                            : distance > kMostTiledLength ? kMostTiledLength
                                                          : distance);
  }

  Accumulator<Element> scale_;
  int rows_;
  int columns_;
  int first_;
  int last_;
};

// The same for kernels that leave products as they are: the multiply-add that
// takes a maximum, or a log-sum-exp, off an exponent scales too. Where the
// scale is positive, as is_plain() says, the largest score is that of the
// largest product.
template <class Element>
class ScaledExponents : public PlainScores<Element> {
 public:
  static constexpr bool kScalesExponents = true;
  using PlainScores<Element>::PlainScores;

  template <class Scores>
  __device__ __forceinline__ void score_tile(Scores& tile, int64_t row_begin,
                                             int64_t column_begin) const {
    this->hide_unseen(tile, row_begin, column_begin);
  }

  // In units of log(2).
  __device__ __forceinline__ float scale_of_exponents() const {
    return this->scale() * FastExponential::kLog2OfE;
  }
};

// What the choice of a kernel depends on beside the call.
struct AttentionDevice {
  int most_shared_bytes;  // of a block
  int multiprocessors;
  bool has_warpgroup_products;
  bool joins_gradients = false;  // of query, key and value, in one kernel
  bool copies_panels = false;    // of float32, asynchronously, for large tiles
};

// Calls function.operator()<width>() with the width of the tiles for heads of
// that size: 128 columns where 64 would have several blocks repeat the scores,
// if the registers of a thread hold so many.
template <class Element, class Function>
void with_attention_width(int64_t head_size, Function&& function) {
  if constexpr (sizeof(Element) <= sizeof(float)) {
    if (head_size > 64) {
      return function.template operator()<128>();
    }
  }
  function.template operator()<64>();
}

}  // namespace pkg::cuda
