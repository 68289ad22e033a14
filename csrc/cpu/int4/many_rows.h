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
#include "cpu/int4/products.h"
#include "tensor_core_tiled_layout.h"

namespace pkg::cpu {
namespace detail {

// Lanes of the inner dimension of a pass over a block of columns; of pairs,
// whole groups. Shorter than kBlockDepth, since the rounding error of a chain
// of additions grows with its length: sums over 1024 were 2.1 times as far off
// as those of PyTorch with 512. Pairs are summed by groups in any case.
template <class Arithmetic>
inline constexpr int64_t kInt4Step = Arithmetic::kDepth == 2 ? 512 : 128;

// The words of panel columns [first, first + count) for one lane and block of
// columns; beyond count zero.
template <int kColumns>
void gather_words(const TiledWeight& weight, int64_t first, int count,
                  int64_t block, int64_t lane, uint32_t (&words)[kColumns]) {
  // A panel is whole tiles of eight rows, or a part of one.
  constexpr int kTile = std::min(kColumns, static_cast<int>(kTiledRows));
  const uint32_t* from = weight.words + weight.layout.word(first, block, lane);
  for (int column = 0; column < count; column += kTile) {
    for (int row = 0; row < kTile; ++row) {
      words[column + row] = from[row * weight.layout.words_of_row()];
    }
    from += weight.layout.words_of_tile();
  }
}

// Scales and zeros of the groups and columns of a pass, filled up with zeros to
// whole panels.
template <class Number>
struct PassScales {
  Number* scales;
  Number* zeros;
  int64_t stride;  // from group to group

  PassScales(const TiledWeight& weight, int64_t first_group, int64_t groups,
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

// The weights themselves.
template <class Number>
struct WeightPanels {
  using Arithmetic = Floating<Number>;
  static constexpr bool kScalesSums = false;

  static void unpack(const TiledWeight& weight, int64_t first, int count,
                     int64_t begin, int64_t end, const Number* scales,
                     const Number* zeros, int64_t stride, Number* panel) {
    constexpr int kColumns = kTileColumns<Arithmetic>;
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
        for (int v = 0; v < kTileVectors; ++v) {
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
// Pairs of q - 8.
struct PairPanels {
  using Arithmetic = Bfloat16Dot;
  static constexpr bool kScalesSums = true;

  static void unpack(const TiledWeight& weight, int64_t first, int count,
                     int64_t begin, int64_t end, const float* /*scales*/,
                     const float* /*zeros*/, int64_t /*stride*/,
                     uint32_t* panel) {
    constexpr int kColumns = kTileColumns<Arithmetic>;
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
        for (int v = 0; v < kTileVectors; ++v) {
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

// A packed left operand, from a later step on.
template <class Lane>
struct StripsFrom {
  const Lane* data;
  int64_t depth;  // that was packed
  int64_t step;

  static constexpr bool kPacked = true;

  template <int kRows>
  const Lane* strip(int64_t row, int64_t /*depth*/) const {
    return data + row * depth + step * kRows;
  }
  template <int kRows>
  Lane lane(const Lane* at, int row) const {
    return at[row];
  }
  template <int kRows>
  static constexpr int64_t kStep = kRows;
};

// What pack_rows made of a left operand of `depth` lanes, from `step` on.
template <class Arithmetic>
auto packed_rows_from(const typename Arithmetic::Lane* packed, int64_t depth,
                      int64_t step) {
  if constexpr (kUsesTiles<Arithmetic>) {
    return packed_rows<Arithmetic>(packed + step, depth);
  } else {
    return StripsFrom<typename Arithmetic::Lane>{packed, depth, step};
  }
}

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

// One thread's rectangle.
template <class Panels, class T>
void multiply_rectangle(const MatrixView<T>& input, int64_t rows,
                        const TiledWeight& weight, int64_t first_column,
                        int64_t all_columns, const simd::Compute<T>* bias,
                        T* output) {
  using Arithmetic = typename Panels::Arithmetic;
  using Lane = typename Arithmetic::Lane;
  using Number = typename Arithmetic::Accumulator;
  constexpr int kColumns = kTileColumns<Arithmetic>;
  const int64_t inner = weight.layout.columns;
  const int64_t width =
      std::min(all_columns, even_block(all_columns, kBlockColumns, kColumns));
  const int64_t padded = (width + kColumns - 1) / kColumns * kColumns;
  const int64_t step =
      std::min(kInt4Step<Arithmetic> * Arithmetic::kDepth, inner);
  const int64_t most_rows =
      std::min(rows, even_block(rows, kBufferedRows, kTileRows));
  const int64_t block = std::min(rows, even_block(rows, kBlockRows, kTileRows));
  const int64_t groups_of_step =
      (step + weight.group_size - 1) / weight.group_size;
  Lane* packed_left = Workspace::of_this_thread<0>().template request<Lane>(
      block * depth_of<Arithmetic>(step));
  Number* totals = Workspace::of_this_thread<1>().template request<Number>(
      most_rows * padded);
  Lane* packed_right = Workspace::of_this_thread<2>().template request<Lane>(
      padded * depth_of<Arithmetic>(step));
  T* reordered =
      Workspace::of_this_thread<3>().template request<T>(block * step);
  Number* numbers = Workspace::of_this_thread<4>().template request<Number>(
      groups_of_step * (2 * padded + block));
  Number* row_sums = numbers + groups_of_step * 2 * padded;
  for (int64_t column = 0; column < all_columns; column += width) {
    const int64_t columns = std::min(width, all_columns - column);
    for (int64_t top = 0; top < rows; top += most_rows) {
      const int64_t height = std::min(most_rows, rows - top);
      if (inner == 0) {
        std::fill_n(totals, height * padded, Number{});
      }
      for (int64_t k = 0; k < inner; k += step) {
        const int64_t values = std::min(step, inner - k);
        const int64_t depth = depth_of<Arithmetic>(values);
        const PassScales<Number> scales(
            weight, k / weight.group_size,
            (values + weight.group_size - 1) / weight.group_size,
            first_column + column, columns, padded, numbers);
        for (int64_t j = 0; j < columns; j += kColumns) {
          Panels::unpack(
              weight, first_column + column + j,
              static_cast<int>(std::min<int64_t>(kColumns, columns - j)), k,
              k + values, scales.scales + j, scales.zeros + j, scales.stride,
              packed_right + j * depth);
        }
        for (int64_t row = 0; row < height; row += block) {
          const int64_t block_rows = std::min(block, height - row);
          reorder_rows(input.from(top + row, k), block_rows, values, reordered);
          pack_rows<Arithmetic>(MatrixView<T>{reordered, values, 1}, block_rows,
                                values, packed_left);
          Number* of_block = totals + row * padded;
          if constexpr (Panels::kScalesSums) {
            sum_groups(reordered, block_rows, values, weight.group_size, block,
                       row_sums);
            const int64_t group_depth = depth_of<Arithmetic>(weight.group_size);
            for (int64_t j = 0; j < columns; j += kColumns) {
              const int count =
                  static_cast<int>(std::min<int64_t>(kColumns, columns - j));
              for_each_strip(block_rows, [&](int64_t r, int height) {
                with_strip_height(height, [&](auto strip) {
                  for (int64_t g = 0; g * group_depth < depth; ++g) {
                    multiply_tile<Arithmetic, strip(), kTileVectors>(
                        group_depth,
                        packed_rows_from<Arithmetic>(packed_left, depth,
                                                     g * group_depth),
                        packed_right + j * depth + g * group_depth * kColumns,
                        kColumns, r, j, count,
                        AddScaled{of_block, padded, k == 0 && g == 0,
                                  scales.scales + g * padded,
                                  scales.zeros + g * padded,
                                  row_sums + g * block});
                  }
                });
              });
            }
          } else {
            constexpr KeepSums kKeep;
            const StoreSums<Number, Number, KeepSums> store{
                of_block, padded, k == 0, k + values == inner,
                of_block, padded, kKeep};
            multiply_panels<Arithmetic>(
                block_rows, columns, depth,
                packed_rows<Arithmetic>(packed_left, depth),
                RightPanels<Lane>{packed_right, kColumns, kColumns * depth},
                store);
          }
        }
      }
      for (int64_t row = 0; row < height; ++row) {
        const Number* from = totals + row * padded;
        T* to =
            output + (top + row) * weight.layout.rows + first_column + column;
        constexpr int kLanes = simd::kLanes<Number>;
        for (int64_t j = 0; j < columns; j += kLanes) {
          Vector<Number> sum = simd::load(from + j);
          if (bias != nullptr) {
            sum += simd::load(bias + first_column + column + j);
          }
          if (columns - j >= kLanes) {
            simd::store(to + j, sum);
          } else {
            simd::store_partial(to + j, sum, static_cast<int>(columns - j));
          }
        }
      }
    }
  }
}

template <class Panels, class T>
void multiply_rectangles(const MatrixView<T>& input, int64_t rows,
                         const TiledWeight& weight,
                         const simd::Compute<T>* bias, T* output,
                         int64_t threads) {
  using Arithmetic = typename Panels::Arithmetic;
  for_each_rectangle<Arithmetic>(
      rows, weight.layout.rows, kTileRows, kTileColumns<Arithmetic>,
      useful_threads(rows, weight.layout.rows, weight.layout.columns, threads),
      [&](int64_t row, int64_t part_rows, int64_t column, int64_t columns) {
        multiply_rectangle<Panels>(input.from(row, 0), part_rows, weight,
                                   column, columns, bias,
                                   output + row * weight.layout.rows);
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
