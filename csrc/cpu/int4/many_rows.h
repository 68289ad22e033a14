// Many rows of activations times a 4-bit weight: blocks of the weight become
// the packed right operand of the product's core (cpu/gemm/gemm.h) and are
// multiplied while they are in the cache, so that a value is unpacked once for
// 960 rows. The operand holds the weights themselves, (q - 8) scale + zero, in
// float32 or float64. The summed dimension goes through both operands in the
// order of the weight's words: in each block of 32 columns, value 8 c + 2 j + h
// is column 8 j + 2 c + h.
//
// Operations: 2 M N K, and about one instruction for each value of the weight
// and 960 rows. Bound by the multiply-add units.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/gemm.h"
#include "cpu/int4/group_tiles.h"
#include "cpu/int4/products.h"
#include "host/integer_math.h"
#include "tensor_core_tiled_layout.h"

namespace pkg::cpu {
namespace detail {

// KC here, which is the accumulation length too. Shorter than gemm.h's, since
// the rounding error of a sum grows with its length.
inline constexpr int64_t kInt4Depth = 128;

// The words of micro-panel columns [first, first + count) for one lane of the
// tiled layout and block of columns; beyond count zero.
template <int kColumns>
void gather_words(const TiledWeight& weight, int64_t first, int count,
                  int64_t block, int64_t lane, uint32_t (&words)[kColumns]) {
  // A micro-panel is whole tiles of eight rows, or a part of one.
  constexpr int kTile = std::min(kColumns, static_cast<int>(kTiledRows));
  const uint32_t* from = weight.words + weight.layout.word(first, block, lane);
  for (int column = 0; column < count; column += kTile) {
    for (int row = 0; row < kTile; ++row) {
      words[column + row] = from[row * weight.layout.words_of_row()];
    }
    from += weight.layout.words_of_tile();
  }
}

// Scales and zeros of the groups of a block of K and columns, filled up with
// zeros to whole micro-panels.
template <class Number>
struct BlockScales {
  Number* scales;
  Number* zeros;
  int64_t stride;  // from group to group

  BlockScales(const TiledWeight& weight, int64_t first_group, int64_t groups,
              int64_t first_column, int64_t columns, int64_t padded,
              Number* memory)
      : scales(memory), zeros(memory + groups * padded), stride(padded) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t column = 0; column < padded; ++column) {
        const uint32_t pair =
            column < columns
                ? weight.pair(first_group + group, first_column + column)
                : 0;
        scales[group * stride + column] = scale_of_pair(pair);
        zeros[group * stride + column] = zero_of_pair(pair);
      }
    }
  }
};

// Micro-panels of the weights themselves.
template <class Number>
struct WeightPanels {
  using Arithmetic = Floating<Number>;

  static void unpack(const TiledWeight& weight, int64_t first, int count,
                     int64_t begin, int64_t end, const Number* scales,
                     const Number* zeros, int64_t stride, Number* panel) {
    constexpr int kColumns = kNR<Arithmetic>;
    constexpr int kLanes = simd::kLanes<Number>;
    using Words = typename simd::VectorOf<uint32_t, 4 * kLanes>::type;
    using Whole = typename simd::VectorOf<int32_t, 4 * kLanes>::type;
    uint32_t words[kColumns] = {};
    for (int64_t block = begin / kTiledBlock; block < end / kTiledBlock;
         ++block) {
      const int64_t offset = (block * kTiledBlock / weight.group_size -
                              begin / weight.group_size) *
                             stride;
      for (int64_t lane = 0; lane < 4; ++lane) {
        gather_words(weight, first, count, block, lane, words);
        Number* to =
            panel + (block * kTiledBlock - begin + 8 * lane) * kColumns;
        for (int v = 0; v < kNRVectors; ++v) {
          Words packed;
          std::memcpy(&packed, words + v * kLanes, sizeof(packed));
          const auto scale = simd::load(scales + offset + v * kLanes);
          const auto zero = simd::load(zeros + offset + v * kLanes);
          for (int value = 0; value < 8; ++value) {
            const int shift = value / 2 * 4 + value % 2 * 16;
            const Whole q = std::bit_cast<Whole>((packed >> shift) & 15U) - 8;
            simd::store(
                to + value * kColumns + v * kLanes,
                __builtin_convertvector(q, Vector<Number>) * scale + zero);
          }
        }
      }
    }
  }
};

// Rows in the order of the weight's words, from any strides.
template <class T>
void reorder_rows(const MatrixView<T>& input, int64_t rows, int64_t values,
                  T* to) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < values; k += kTiledBlock) {
      const T* from = input.at(row, k);
      const int64_t stride = input.column_stride;
      for (int64_t lane = 0; lane < 4; ++lane) {
        for (int64_t j = 0; j < 4; ++j) {
          for (int64_t h = 0; h < 2; ++h) {
            *to++ = from[(8 * j + 2 * lane + h) * stride];
          }
        }
      }
    }
  }
}

// One thread's rectangle: loops 5 to 3 of cpu/gemm/contract.h, with the weight
// unpacked where B would be packed. The sums of NC x kBufferedRows are kept in
// the accumulator's type, and stored when all of K is done.
template <class T>
class Rectangle {
 public:
  Rectangle(const MatrixView<T>& input, int64_t rows, const TiledWeight& weight,
            int64_t first_column, int64_t columns, const simd::Compute<T>* bias,
            T* output)
      : input_(input),
        weight_(weight),
        first_column_(first_column),
        bias_(bias),
        output_(output),
        rows_(rows),
        columns_(columns),
        nc_(std::min(columns, even_block(columns, kNC, kColumns))),
        padded_(round_up(nc_, kColumns)),
        kc_(std::min(kInt4Depth, weight.layout.columns)),
        buffered_rows_(std::min(rows, even_block(rows, kBufferedRows, kMR))),
        mc_(std::min(rows, even_block(rows, kMC, kMR))) {
    const int64_t depth = depth_of<Arithmetic>(kc_);
    const int64_t groups = ceil_div(kc_, weight.group_size);
    packed_left_ = request<KGroup, Slot::PackedLeft>(mc_ * depth);
    totals_ = request<Number, Slot::PartialSums>(buffered_rows_ * padded_);
    packed_right_ = request<KGroup, Slot::PackedRight>(padded_ * depth);
    reordered_ = request<T, Slot::ReorderedRows>(mc_ * kc_);
    numbers_ = request<Number, Slot::GroupNumbers>(groups * 2 * padded_);
  }

  void run() const {
    const int64_t inner = weight_.layout.columns;
    for_each_block(columns_, nc_, [&](int64_t column, int64_t columns) {
      for_each_block(rows_, buffered_rows_, [&](int64_t top, int64_t height) {
        if (inner == 0) {
          std::fill_n(totals_, height * padded_, Number{});
        }
        for_each_block(inner, kc_, [&](int64_t k, int64_t values) {
          unpack(column, columns, k, values);
          for_each_block(height, mc_, [&](int64_t row, int64_t rows) {
            multiply_rows(top + row, rows, columns, k, values,
                          totals_ + row * padded_);
          });
        });
        store(top, height, column, columns);
      });
    });
  }

 private:
  using Number = simd::Compute<T>;
  using Panels = WeightPanels<Number>;
  using Arithmetic = typename Panels::Arithmetic;
  using KGroup = typename Arithmetic::KGroup;
  static constexpr int kColumns = kNR<Arithmetic>;

  template <class Element, Slot kSlot>
  static Element* request(int64_t count) {
    return Workspace::of_this_thread<kSlot>().template request<Element>(count);
  }

  // B: the micro-panels of a block of K.
  void unpack(int64_t column, int64_t columns, int64_t k,
              int64_t values) const {
    const int64_t depth = depth_of<Arithmetic>(values);
    const BlockScales<Number> scales(
        weight_, k / weight_.group_size, ceil_div(values, weight_.group_size),
        first_column_ + column, columns, padded_, numbers_);
    for_each_block(columns, kColumns, [&](int64_t j, int64_t count) {
      Panels::unpack(weight_, first_column_ + column + j,
                     static_cast<int>(count), k, k + values, scales.scales + j,
                     scales.zeros + j, scales.stride,
                     packed_right_ + j * depth);
    });
  }

  // Loop 3's body: the block of A at (row, k), packed and multiplied.
  void multiply_rows(int64_t row, int64_t rows, int64_t columns, int64_t k,
                     int64_t values, Number* totals) const {
    const int64_t depth = depth_of<Arithmetic>(values);
    reorder_rows(input_.from(row, k), rows, values, reordered_);
    pack_rows<Arithmetic>(MatrixView<T>{reordered_, values, 1}, rows, values,
                          packed_left_);
    constexpr KeepSums kKeep;
    const StoreSums<Number, Number, KeepSums> store{
        totals, padded_, k == 0, k + values == weight_.layout.columns,
        totals, padded_, kKeep};
    multiply_panels<Arithmetic>(
        rows, columns, depth, packed_rows<Arithmetic>(packed_left_, depth),
        RightPanels<KGroup>{packed_right_, kColumns, kColumns * depth}, store);
  }

  void store(int64_t top, int64_t height, int64_t column,
             int64_t columns) const {
    constexpr int kLanes = simd::kLanes<Number>;
    for (int64_t row = 0; row < height; ++row) {
      const Number* from = totals_ + row * padded_;
      T* to =
          output_ + (top + row) * weight_.layout.rows + first_column_ + column;
      for (int64_t j = 0; j < columns; j += kLanes) {
        Vector<Number> sum = simd::load(from + j);
        if (bias_ != nullptr) {
          sum += simd::load(bias_ + first_column_ + column + j);
        }
        if (columns - j >= kLanes) {
          simd::store(to + j, sum);
        } else {
          simd::store_partial(to + j, sum, static_cast<int>(columns - j));
        }
      }
    }
  }

  MatrixView<T> input_;
  const TiledWeight& weight_;
  int64_t first_column_;
  const simd::Compute<T>* bias_;
  T* output_;
  int64_t rows_;
  int64_t columns_;
  int64_t nc_;
  int64_t padded_;  // columns of the sums: whole micro-panels
  int64_t kc_;
  int64_t buffered_rows_;
  int64_t mc_;
  KGroup* packed_left_;
  KGroup* packed_right_;
  Number* totals_;
  T* reordered_;
  Number* numbers_;  // scales and zeros by group
};

}  // namespace detail

template <class T>
void multiply_many_rows(const MatrixView<T>& input, int64_t rows,
                        const TiledWeight& weight, const simd::Compute<T>* bias,
                        T* output, int64_t threads) {
#if defined(PKG_HAS_TILES)
  if constexpr (!std::is_same_v<T, double>) {
    if (multiply_by_group_tiles(input, rows, weight, bias, output, threads)) {
      return;
    }
  }
#endif
  using Arithmetic = Floating<simd::Compute<T>>;
  detail::for_each_rectangle<Arithmetic>(
      rows, weight.layout.rows, kMR, kNR<Arithmetic>,
      detail::useful_threads(rows, weight.layout.rows, weight.layout.columns,
                             threads),
      [&](int64_t row, int64_t part_rows, int64_t column, int64_t columns) {
        detail::Rectangle<T>(input.from(row, 0), part_rows, weight, column,
                             columns, bias, output + row * weight.layout.rows)
            .run();
      });
}

}  // namespace pkg::cpu
