// What a warp of int4_linear's kernels by single warps multiplies in a slice of
// the summed dimension: all of its block's rows by 32 columns of the weight.
//
// The packed weight is laid out as operand B of mma.m16n8k16, 16 steps by 8
// columns of the result. Two such parts, side by side, are at the same time
// operand A: 16 columns of the result by 16 steps, whose four words they are,
// those of the one between those of the other. So a product can be turned
// around, with the activations as operand B, whose tiles have 8 rows in place
// of 16: for few rows half of the products, and half of the sums that are
// scaled (Int4TurnedProduct). The columns of the result are rows of its tile
// then.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/mma_product.cuh"
#include "cuda/gemm/operand_tile.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Of a block's columns, its warps', and those of a part of the layout.
constexpr int kInt4BlockColumns = 128;
constexpr int kInt4WarpColumns = 32;
constexpr int kInt4PartColumns = 8;
constexpr int kInt4Parts = kInt4WarpColumns / kInt4PartColumns;

// A column's scale and zero, as they are stored.
struct Int4Scale {
  float scale;
  float zero;

  __device__ __forceinline__ explicit Int4Scale(uint32_t pair)
      : scale(element_of_pair<bfloat16>(pair, 0)),
        zero(element_of_pair<bfloat16>(pair, 1)) {}

  // Adds the sum of a group's whole numbers, scaled, and its zeros.
  __device__ __forceinline__ void add(float& total, float sum,
                                      float row_sum) const {
    total += row_sum * zero;
    total += sum * scale;
  }
};

// Products with the whole numbers of a group, and sums of its activations.
template <class Sums, int kRowParts>
struct Int4GroupSums {
  Sums products = Sums(0);
  float rows[kRowParts][4] = {};
};

// 16 rows or more, which are rows of the tile: operand A.
template <class Element, int kRowParts>
class Int4Product {
 public:
  static constexpr int kRows = 16 * kRowParts;
  using Thread = MmaThread<kRows, kInt4BlockColumns, kRows, kInt4WarpColumns>;
  using Sums = Tile<float, kRows, kInt4BlockColumns, Thread>;
  static constexpr int kTeam = Thread::kThreads;
  using Activations = OperandTile<Element, kRows, kTeam, OperandLines::outer>;
  // Words of the activations for so many steps of 16 of the summed dimension.
  static constexpr int kStepsOfWords = 1;
  using Words = uint32_t[kRowParts][4];

  using GroupSums = Int4GroupSums<Sums, kRowParts>;

  __device__ __forceinline__ explicit Int4Product(
      const Activations& activations)
      : activations_(activations) {}

  // The activations of the `load`-th steps of a tile of them.
  __device__ __forceinline__ void load(const SharedSpan<Element>& tile,
                                       int load, Words& words) const {
    PKG_UNROLL
    for (int i = 0; i < kRowParts; ++i) {
      activations_.fragments(tile, i, load, words[i]);
    }
  }

  // sums += activations times the weight's values of 16 steps, which begin at
  // bit `shift` of the lane's words; and the sums of the activations, which are
  // column 0 of a product with ones.
  __device__ __forceinline__ static void add(
      GroupSums& sums, const Words& a, int,
      const uint32_t (&weight)[kInt4Parts], int shift) {
    const uint32_t ones[2] = {kOnes<Element>, kOnes<Element>};
    PKG_UNROLL
    for (int i = 0; i < kRowParts; ++i) {
      auto& rows = sums.rows[i];
      multiply_add<Element>(rows[0], rows[1], rows[2], rows[3], a[i], ones);
    }
    PKG_UNROLL
    for (int part = 0; part < kInt4Parts / 2; ++part) {
      uint32_t b[4];
      whole_pairs<Element>(weight[2 * part] >> shift, &b[0]);
      whole_pairs<Element>(weight[2 * part + 1] >> shift, &b[2]);
      multiply_columns<Element>(sums.products, a, b, part);
    }
  }

  // Adds the sums of a group to the totals, by the pairs of the block's
  // columns.
  __device__ __forceinline__ static void add_group(
      Sums& totals, const GroupSums& sums, const SharedSpan<Element>& pairs) {
    const Thread thread;
    PKG_UNROLL
    for (int part = 0; part < kInt4Parts; ++part) {
      const auto two =
          pairs.template load<Packet<uint32_t, 2>>(thread.column(2 * part) * 2);
      PKG_UNROLL
      for (int j = 0; j < 2; ++j) {
        const Int4Scale scale(two.values[j]);
        PKG_UNROLL
        for (int i = 0; i < Sums::kThreadRows; ++i) {
          scale.add(totals.values[i][2 * part + j],
                    sums.products.values[i][2 * part + j],
                    sums.rows[i / 2][i % 2 * 2]);
        }
      }
    }
  }

  // bias_of(column of the block) to each.
  template <class BiasOf>
  __device__ __forceinline__ static void add_bias(Sums& totals,
                                                  BiasOf&& bias_of) {
    totals.add_to_columns(bias_of);
  }

  template <class Result>
  __device__ __forceinline__ static void store(const Sums& totals, Result* to,
                                               int64_t rows, int64_t columns,
                                               int64_t row_begin,
                                               int64_t column_begin) {
    store_tile(totals, to, rows, columns, columns, row_begin, column_begin);
  }

 private:
  const Activations& activations_;
};

// 8 or 16 rows, which are columns of the tile: operand B.
template <class Element, int kRowParts>
class Int4TurnedProduct {
 public:
  static constexpr int kRows = 8 * kRowParts;
  using Thread = MmaThread<kInt4BlockColumns, kRows, kInt4WarpColumns, kRows>;
  using Sums = Tile<float, kInt4BlockColumns, kRows, Thread>;
  static constexpr int kTeam = Thread::kThreads;
  // 16 lines, of which there may be 8.
  using Activations = OperandTile<Element, 16, kTeam, OperandLines::outer>;
  // One load brings four words: those of 16 rows, or of 8 for two steps.
  static constexpr int kStepsOfWords = 2 / kRowParts;
  using Words = uint32_t[4];

  using GroupSums = Int4GroupSums<Sums, kRowParts>;

  __device__ __forceinline__ explicit Int4TurnedProduct(const Activations&) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int line = kRowParts == 1 ? 0 : lane / 16 * 8;
    const int vector = kRowParts == 1 ? lane / 8 : lane / 8 % 2;
    lane_index_ = Activations::index(line + lane % 8, vector * kVector);
  }

  __device__ __forceinline__ void load(const SharedSpan<Element>& tile,
                                       int load, Words& words) const {
    tile.load_matrices(lane_index_ ^ load * kStepsOfWords * Activations::kStep,
                       false, words);
  }

  __device__ __forceinline__ static void add(
      GroupSums& sums, const Words& b, int step,
      const uint32_t (&weight)[kInt4Parts], int shift) {
    const uint32_t ones[4] = {kOnes<Element>, kOnes<Element>, kOnes<Element>,
                              kOnes<Element>};
    PKG_UNROLL
    for (int j = 0; j < kRowParts; ++j) {
      auto& rows = sums.rows[j];
      multiply_add<Element>(rows[0], rows[1], rows[2], rows[3], ones,
                            &b[2 * (step + j)]);
    }
    PKG_UNROLL
    for (int part = 0; part < kInt4Parts / 2; ++part) {
      uint32_t upper[2];
      uint32_t lower[2];
      whole_pairs<Element>(weight[2 * part] >> shift, upper);
      whole_pairs<Element>(weight[2 * part + 1] >> shift, lower);
      const uint32_t a[4] = {upper[0], lower[0], upper[1], lower[1]};
      auto& top = sums.products.values[2 * part];
      auto& bottom = sums.products.values[2 * part + 1];
      PKG_UNROLL
      for (int j = 0; j < kRowParts; ++j) {
        multiply_add<Element>(top[2 * j], top[2 * j + 1], bottom[2 * j],
                              bottom[2 * j + 1], a, &b[2 * (step + j)]);
      }
    }
  }

  __device__ __forceinline__ static void add_group(
      Sums& totals, const GroupSums& sums, const SharedSpan<Element>& pairs) {
    const Thread thread = thread_of_team();
    PKG_UNROLL
    for (int i = 0; i < Sums::kThreadRows; ++i) {
      const Int4Scale scale(pairs.template load<uint32_t>(thread.row(i) * 2));
      PKG_UNROLL
      for (int j = 0; j < Sums::kThreadColumns; ++j) {
        scale.add(totals.values[i][j], sums.products.values[i][j],
                  sums.rows[j / 2][j % 2]);
      }
    }
  }

  template <class BiasOf>
  __device__ __forceinline__ static void add_bias(Sums& totals,
                                                  BiasOf&& bias_of) {
    totals.transform(
        [&](int column, int, float total) { return total + bias_of(column); });
  }

  // Eight lanes write neighbours of a row.
  template <class Result>
  __device__ __forceinline__ static void store(const Sums& totals, Result* to,
                                               int64_t rows, int64_t columns,
                                               int64_t row_begin,
                                               int64_t column_begin) {
    const Thread thread;
    PKG_UNROLL
    for (int j = 0; j < Sums::kThreadColumns; ++j) {
      const int64_t row = row_begin + thread.column(j);
      PKG_UNROLL
      for (int i = 0; i < Sums::kThreadRows; ++i) {
        const int64_t column = column_begin + thread.row(i);
        if (row < rows && column < columns) {
          to[row * columns + column] = convert<Result>(totals.values[i][j]);
        }
      }
    }
  }

 private:
  static constexpr int kVector = 16 / sizeof(Element);

  __device__ __forceinline__ static Thread thread_of_team() {
    return Thread(computed_here(static_cast<int>(threadIdx.x) % kTeam));
  }

  int lane_index_;
};

}  // namespace pkg::cuda
