// Many rows of activations times a 4-bit weight: blocks of the weight become
// the packed right operand of the product's core (cpu/gemm/gemm.h) and are
// multiplied while they are in the cache, so that a value is unpacked once for
// 960 rows. The summed dimension goes through both operands in the order of the
// weight's words: in each block of 32 columns, value 8 c + 2 j + h is column 8
// j + 2 c + h.
//
// Two arithmetics. In float32 and float64 the operand holds the weights
// themselves, (q - 8) scale + zero. Pairs of bfloat16 hold the whole numbers
// q - 8, which are exact, and the sums of each group are scaled, in float32,
// when its steps are done; the zeros are multiplied with the sums of the
// activations. Nothing of the weight is rounded to bfloat16 then, and making a
// pair of values is a shift, a mask and a look-up. It costs 3 loads or stores
// for each register of sums and group, 3 % by count for groups of 128.
//
// Operations: 2 M N K, and about one instruction for each value of the weight
// and 960 rows. Bound by the multiply-add units.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/gemm/gemm.h"
#include "cpu/int4/group_tiles.h"
#include "cpu/int4/products.h"
#include "tensor_core_tiled_layout.h"

namespace pkg::cpu {
namespace detail {

// KC here, in k-groups, which is the accumulation length too; of pairs, whole
// groups. Shorter than gemm.h's, since the rounding error of a sum grows with
// its length: sums over 1024 were 2.1 times as far off as those of PyTorch with
// 512. Pairs are summed by groups in any case.
template <class Arithmetic>
inline constexpr int64_t kInt4Depth = Arithmetic::kKGroupSize == 2 ? 512 : 128;

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
  static constexpr bool kScalesSums = false;

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

#if defined(__AVX512BF16__)
// Micro-panels of pairs of q - 8.
struct PairPanels {
  using Arithmetic = Bfloat16Dot;
  static constexpr bool kScalesSums = true;

  static void unpack(const TiledWeight& weight, int64_t first, int count,
                     int64_t begin, int64_t end, const float* /*scales*/,
                     const float* /*zeros*/, int64_t /*stride*/,
                     uint32_t* panel) {
    constexpr int kColumns = kNR<Arithmetic>;
    constexpr int kLanes = simd::kLanes<uint32_t>;
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 32; ++i) {
      table[i] = static_cast<uint16_t>(
          std::bit_cast<uint32_t>(static_cast<float>(i % 16 - 8)) >> 16);
    }
    const __m512i values = _mm512_load_si512(table);
    uint32_t words[kColumns] = {};
    for (int64_t block = begin / kTiledBlock; block < end / kTiledBlock;
         ++block) {
      for (int64_t lane = 0; lane < 4; ++lane) {
        gather_words(weight, first, count, block, lane, words);
        uint32_t* to =
            panel + (block * kTiledBlock - begin + 8 * lane) / 2 * kColumns;
        for (int v = 0; v < kNRVectors; ++v) {
          const Vector<uint32_t> packed = simd::load(words + v * kLanes);
          for (int j = 0; j < 4; ++j) {
            const auto places =
                std::bit_cast<__m512i>((packed >> (4 * j)) & 0x000F000FU);
            simd::store(to + j * kColumns + v * kLanes,
                        std::bit_cast<Vector<uint32_t>>(
                            _mm512_permutexvar_epi16(places, values)));
          }
        }
      }
    }
  }
};

#endif

// Adds the sums of a group to the totals, scaled, with the zeros' part.
struct AddScaled {
  float* totals;
  int64_t stride;
  bool first;
  const float* scales;  // of the group, by column
  const float* zeros;
  const float* row_sums;  // of the group's activations, by row

  static constexpr bool kInOrder = false;

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t /*row*/,
                                       int64_t /*column*/) const {}

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(int64_t row, int64_t column,
                                         Vector<float> (&sums)[kRows][kVectors],
                                         int /*tail*/) const {
    constexpr int kLanes = simd::kLanes<float>;
    Vector<float> scale[kVectors];
    Vector<float> zero[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = simd::load(scales + column + v * kLanes);
      zero[v] = simd::load(zeros + column + v * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float row_sum = row_sums[row + r];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        float* to = totals + (row + r) * stride + column + v * kLanes;
        Vector<float> total = zero[v] * row_sum;
        if (!first) {
          total += simd::load(to);
        }
        simd::store(to, sums[r][v] * scale[v] + total);
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

// The sums of groups of activations, by group and then row.
template <class T, class Number>
void sum_groups(const T* reordered, int64_t rows, int64_t values,
                int64_t group_size, int64_t stride, Number* sums) {
  constexpr int kLanes = simd::kLanes<Number>;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < values; k += group_size) {
      Vector<Number> sum{};
      for (int64_t i = 0; i < group_size; i += kLanes) {
        sum += simd::load(reordered + row * values + k + i);
      }
      sums[k / group_size * stride + row] = simd::reduce_add(sum);
    }
  }
}

// One thread's rectangle: loops 5 to 3 of cpu/gemm/contract.h, with the weight
// unpacked where B would be packed. The sums of NC x kBufferedRows are kept in
// the accumulator's type, and stored when all of K is done.
template <class Panels, class T>
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
        padded_((nc_ + kColumns - 1) / kColumns * kColumns),
        kc_(std::min(kInt4Depth<Arithmetic> * Arithmetic::kKGroupSize,
                     weight.layout.columns)),
        buffered_rows_(std::min(rows, even_block(rows, kBufferedRows, kMR))),
        mc_(std::min(rows, even_block(rows, kMC, kMR))) {
    const int64_t depth = depth_of<Arithmetic>(kc_);
    const int64_t groups = (kc_ + weight.group_size - 1) / weight.group_size;
    packed_left_ = request<KGroup, Slot::PackedLeft>(mc_ * depth);
    totals_ = request<Number, Slot::PartialSums>(buffered_rows_ * padded_);
    packed_right_ = request<KGroup, Slot::PackedRight>(padded_ * depth);
    reordered_ = request<T, Slot::ReorderedRows>(mc_ * kc_);
    numbers_ =
        request<Number, Slot::GroupNumbers>(groups * (2 * padded_ + mc_));
    row_sums_ = numbers_ + groups * 2 * padded_;
  }

  void run() const {
    const int64_t inner = weight_.layout.columns;
    for_each_block(columns_, nc_, [&](int64_t column, int64_t columns) {
      for_each_block(rows_, buffered_rows_, [&](int64_t top, int64_t height) {
        if (inner == 0) {
          std::fill_n(totals_, height * padded_, Number{});
        }
        for_each_block(inner, kc_, [&](int64_t k, int64_t values) {
          const BlockScales<Number> scales = unpack(column, columns, k, values);
          for_each_block(height, mc_, [&](int64_t row, int64_t rows) {
            multiply_rows(top + row, rows, columns, k, values, scales,
                          totals_ + row * padded_);
          });
        });
        store(top, height, column, columns);
      });
    });
  }

 private:
  using Arithmetic = typename Panels::Arithmetic;
  using KGroup = typename Arithmetic::KGroup;
  using Number = typename Arithmetic::Accumulator;
  static constexpr int kColumns = kNR<Arithmetic>;

  template <class Element, Slot kSlot>
  static Element* request(int64_t count) {
    return Workspace::of_this_thread<kSlot>().template request<Element>(count);
  }

  // B: the micro-panels of a block of K, and the scales of its groups.
  BlockScales<Number> unpack(int64_t column, int64_t columns, int64_t k,
                             int64_t values) const {
    const int64_t depth = depth_of<Arithmetic>(values);
    const BlockScales<Number> scales(
        weight_, k / weight_.group_size,
        (values + weight_.group_size - 1) / weight_.group_size,
        first_column_ + column, columns, padded_, numbers_);
    for_each_block(columns, kColumns, [&](int64_t j, int64_t count) {
      Panels::unpack(weight_, first_column_ + column + j,
                     static_cast<int>(count), k, k + values, scales.scales + j,
                     scales.zeros + j, scales.stride,
                     packed_right_ + j * depth);
    });
    return scales;
  }

  // Loop 3's body: the block of A at (row, k), packed and multiplied.
  void multiply_rows(int64_t row, int64_t rows, int64_t columns, int64_t k,
                     int64_t values, const BlockScales<Number>& scales,
                     Number* totals) const {
    const int64_t depth = depth_of<Arithmetic>(values);
    reorder_rows(input_.from(row, k), rows, values, reordered_);
    pack_rows<Arithmetic>(MatrixView<T>{reordered_, values, 1}, rows, values,
                          packed_left_);
    if constexpr (Panels::kScalesSums) {
      sum_groups(reordered_, rows, values, weight_.group_size, mc_, row_sums_);
      multiply_groups(rows, columns, depth, k == 0, scales, totals);
    } else {
      constexpr KeepSums kKeep;
      const StoreSums<Number, Number, KeepSums> store{
          totals, padded_, k == 0, k + values == weight_.layout.columns,
          totals, padded_, kKeep};
      multiply_panels<Arithmetic>(
          rows, columns, depth, packed_rows<Arithmetic>(packed_left_, depth),
          RightPanels<KGroup>{packed_right_, kColumns, kColumns * depth},
          store);
    }
  }

  // Loops 2 and 1, and around the micro-kernel one over the groups, whose sums
  // are scaled each on its own.
  void multiply_groups(int64_t rows, int64_t columns, int64_t depth, bool first,
                       const BlockScales<Number>& scales,
                       Number* totals) const {
    const int64_t group_depth = depth_of<Arithmetic>(weight_.group_size);
    for_each_block(columns, kColumns, [&](int64_t j, int64_t count) {
      for_each_strip(rows, [&](int64_t row, int height) {
        with_strip_height(height, [&](auto strip) {
          for (int64_t g = 0; g * group_depth < depth; ++g) {
            micro_kernel<Arithmetic, strip(), kNRVectors>(
                group_depth,
                packed_rows_from<Arithmetic>(packed_left_, depth,
                                             g * group_depth),
                packed_right_ + j * depth + g * group_depth * kColumns,
                kColumns, row, j, static_cast<int>(count),
                AddScaled{totals, padded_, first && g == 0,
                          scales.scales + g * padded_,
                          scales.zeros + g * padded_, row_sums_ + g * mc_});
          }
        });
      });
    });
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
  Number* numbers_;   // scales and zeros by group
  Number* row_sums_;  // of the groups of A's rows
};

template <class Panels, class T>
void multiply_rectangles(const MatrixView<T>& input, int64_t rows,
                         const TiledWeight& weight,
                         const simd::Compute<T>* bias, T* output,
                         int64_t threads) {
  using Arithmetic = typename Panels::Arithmetic;
  for_each_rectangle<Arithmetic>(
      rows, weight.layout.rows, kMR, kNR<Arithmetic>,
      useful_threads(rows, weight.layout.rows, weight.layout.columns, threads),
      [&](int64_t row, int64_t part_rows, int64_t column, int64_t columns) {
        Rectangle<Panels, T>(input.from(row, 0), part_rows, weight, column,
                             columns, bias, output + row * weight.layout.rows)
            .run();
      });
}

#if defined(__AVX512BF16__)
// Whether products with whole numbers and sums of groups stay in the range of
// float, so that the result is that of the weights themselves.
inline bool is_tame(const MatrixView<BFloat16>& input, int64_t rows,
                    int64_t columns) {
  constexpr uint16_t kLargest = 0x7080;  // 2^98
  for (int64_t row = 0; row < rows; ++row) {
    uint16_t most = 0;
    for (int64_t column = 0; column < columns; ++column) {
      const uint16_t magnitude = input.at(row, column)->x & 0x7FFFU;
      most = std::max(most, magnitude);
    }
    if (most > kLargest) {
      return false;
    }
  }
  return true;
}
#endif

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
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (detail::is_tame(input, rows, weight.layout.columns)) {
      return detail::multiply_rectangles<detail::PairPanels>(
          input, rows, weight, bias, output, threads);
    }
  }
#endif
  detail::multiply_rectangles<detail::WeightPanels<simd::Compute<T>>>(
      input, rows, weight, bias, output, threads);
}

}  // namespace pkg::cpu
