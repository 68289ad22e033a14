// Many rows of int4_linear by tile registers.
//
//   for rows by MC:
//     for columns by NC:                  totals stay in L2
//       for the inner dimension by KC:    some groups; rows packed, in L2
//         for strips of 32 columns:       the weight as q - 8, in L1
//           for strips of 32 rows:        totals in L1
//             for groups:                 the micro-kernel
//
// q - 8 is exact in bfloat16, and activations are in as many parts as they
// need, so the sums of a group are those of fused multiply-adds. They are
// scaled, in float32, beside the products of the second group after them; the
// zeros are multiplied with the sums of the activations.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/gemm/gemm.h"
#include "cpu/int4/group_kernel.h"
#include "cpu/int4/weight_tiles.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/workspace.h"
#include "cpu/tiles/micro_kernel.h"
#include "cpu/tiles/pack_tiles.h"
#include "cpu/tiles/precision.h"
#include "host/integer_math.h"

#if defined(PKG_HAS_TILES)

namespace pkg::cpu {
namespace detail {

// How activations are packed.
template <class T>
struct LeftScheme;
template <>
struct LeftScheme<float> {
  using type = tiles::Float32By6;
};
template <>
struct LeftScheme<Half> {
  using type = tiles::Float16By4;
};
template <>
struct LeftScheme<BFloat16> {
  using type = tiles::Bfloat16By1;
};

// Software prefetch of the words of a strip of columns and a block of K, some
// lines at a time.
class NextWords {
 public:
  NextWords(const TiledWeight& weight, int64_t column, int64_t k,
            int64_t values, int64_t times) {
    const TiledLayout& layout = weight.layout;
    const int64_t left = layout.columns - k;
    if (left <= 0) {
      return;
    }
    at_ = reinterpret_cast<const std::byte*>(
        weight.words + layout.word(column, k / kTiledBlock, 0));
    step_ = layout.words_of_tile() * int64_t{sizeof(uint32_t)};
    bytes_ = std::min(values, left) * int64_t{sizeof(uint32_t)};
    const int64_t eights =
        std::min<int64_t>(tiles::kStrip, layout.rows - column) / kTiledRows;
    left_ = eights * bytes_ / kCacheLine;
    each_ = ceil_div(left_, times);
  }

  void prefetch_some() {
    for (int64_t i = 0; i < each_ && left_ > 0; ++i, --left_) {
      prefetch_line<PrefetchTo::L2>(at_ + done_);
      done_ += kCacheLine;
      if (done_ == bytes_) {
        at_ += step_;
        done_ = 0;
      }
    }
  }

 private:
  const std::byte* at_ = nullptr;
  int64_t step_ = 0;
  int64_t bytes_ = 0;
  int64_t left_ = 0;
  int64_t each_ = 0;
  int64_t done_ = 0;
};

// One thread's rectangle.
template <class Scheme>
class GroupTiles {
 public:
  using T = typename Scheme::Input;

  GroupTiles(const MatrixView<T>& input, int64_t rows,
             const TiledWeight& weight, int64_t first_column, int64_t columns,
             const float* bias, T* output)
      : input_(input),
        rows_(rows),
        weight_(weight),
        weight_tiles_(weight),
        first_column_(first_column),
        columns_(columns),
        bias_(bias),
        output_(output),
        inner_(weight.layout.columns),
        group_units_(weight.group_size / Scheme::kValues),
        mc_(even_block(rows, kMostRows, tiles::kStrip)),
        nc_(even_block(columns, kTotals / mc_ / tiles::kStrip * tiles::kStrip,
                       tiles::kStrip)),
        kc_(std::min(kMostInner, inner_)),
        keeps_left_(left_bytes(inner_) <= kKeptBytes) {
    packed_left_ = request<std::byte, Slot::PackedLeft>(
        left_bytes(keeps_left_ ? inner_ : kc_));
    packed_right_ = request<std::byte, Slot::PackedRight>(right_bytes());
    totals_ = request<float, Slot::PartialSums>(mc_ * nc_);
    const int64_t groups = inner_ / weight.group_size;
    const int64_t scales = kScaleBuffers * scale_stride();
    scales_ = request<float, Slot::GroupNumbers>(scales + groups * mc_);
    row_sums_ = scales_ + scales;
    if (input.column_stride != 1) {
      copied_ = request<T, Slot::ReorderedRows>(mc_ * kc_);
    }
    pending_ = stored_ = nothing();
    const auto kernel = [&]<int kRowTiles, int kRows>() {
      return group_kernel<Scheme::kParts, kRowTiles, kRows>(group_units_);
    };
    const bool is_low = rows <= tiles::kTileRows;
    kernel_ = kernel.template operator()<2, tiles::kStrip>();
    last_kernel_ = is_low ? kernel.template operator()<1, tiles::kTileRows>()
                          : kernel.template operator()<1, tiles::kStrip>();
  }

  // False: there are values that this is not right for, and the result is not
  // to be used.
  bool run() {
    bool is_right = true;
    for_each_block(rows_, mc_, [&](int64_t row, int64_t rows) {
      for_each_block(columns_, nc_, [&](int64_t column, int64_t columns) {
        for_each_block(inner_, kc_, [&](int64_t k, int64_t values) {
          is_right =
              is_right && multiply(row, rows, column, columns, k, values);
        });
        if (is_right) {
          drain();
          store(row, rows, column, columns);
        }
      });
    });
    return is_right;
  }

 private:
  static constexpr int64_t kRightUnitBytes = 2 * tiles::kTileBytes;
  // MC, of whose rows a block of KC takes half a MiB, KC, whose strip of the
  // weight takes 32 KiB, and MC NC. 512 rows of bfloat16, 4096 x 4096, take
  // 17.5 to 18.5 ms; with a KC of 256 or MC NC halved 21, with MC halved
  // too 21.
  static constexpr int64_t kMostRows =
      512 / Scheme::kParts / tiles::kStrip * tiles::kStrip;
  static constexpr int64_t kMostInner = 512;  // whole groups
  static constexpr int64_t kTotals = int64_t{1} << 18;
  // Up to which rows stay packed while columns go by, from the L3 cache where
  // L2 has no room: 16.5 to 17.2 ms where packing them again takes 19.8
  // to 20.2.
  static constexpr int64_t kKeptBytes = int64_t{1} << 23;
  // Scales of four strips: the one that is prepared, and those whose sums may
  // not be scaled yet.
  static constexpr int64_t kScaleBuffers = 4;

  template <class Element, Slot kSlot>
  static Element* request(int64_t count) {
    return Workspace::of_this_thread<kSlot>().template request<Element>(count);
  }
  int64_t left_bytes(int64_t inner) const {
    return tiles::packed_bytes<Scheme>(mc_, inner / Scheme::kValues);
  }
  int64_t right_bytes() const {
    return kc_ / Scheme::kValues * kRightUnitBytes;
  }
  int64_t scale_stride() const {
    return kc_ / weight_.group_size * 2 * tiles::kStrip;
  }

  // Adds the product of a block of K to a block's totals.
  bool multiply(int64_t row, int64_t rows, int64_t column, int64_t columns,
                int64_t k, int64_t values) {
    const int64_t units = values / Scheme::kValues;
    std::byte* const left =
        packed_left_ + (keeps_left_ ? left_bytes(k) : int64_t{0});
    if (column == 0 || !keeps_left_) {
      if (!pack_left(row, rows, column == 0, k, values, left)) {
        return false;
      }
    }
    const int64_t strip_bytes = units * tiles::kUnitBytes<Scheme>;
    for (int64_t j = 0; j < columns; j += tiles::kStrip) {
      const int64_t width = std::min<int64_t>(tiles::kStrip, columns - j);
      scale_buffer_ = (scale_buffer_ + 1) % kScaleBuffers;
      float* const scales = scales_ + scale_buffer_ * scale_stride();
      if (!prepare_right(column + j, width, k, values, scales)) {
        return false;
      }
      const bool last_strip = j + tiles::kStrip >= columns;
      NextWords next(
          weight_,
          first_column_ + column + (last_strip ? 0 : j + tiles::kStrip),
          last_strip ? k + values : k, values, ceil_div(rows, tiles::kStrip));
      for (int64_t i = 0; i < rows; i += tiles::kStrip) {
        next.prefetch_some();
        const int64_t height = std::min<int64_t>(tiles::kStrip, rows - i);
        float* const totals =
            totals_ +
            (j / tiles::kStrip * (mc_ / tiles::kStrip) + i / tiles::kStrip) *
                tiles::kSumsCount;
        multiply_groups(left + i / tiles::kStrip * strip_bytes, k, values, i,
                        height, totals, scales);
      }
    }
    return true;
  }

  // A micro-tile's products for the groups of a block of K.
  void multiply_groups(const std::byte* left, int64_t k, int64_t values,
                       int64_t row, int64_t height, float* totals,
                       const float* scales) {
    const GroupKernelFunction kernel =
        height > tiles::kTileRows ? kernel_ : last_kernel_;
    const std::byte* right = packed_right_;
    const int64_t group = k / weight_.group_size;
    const int64_t groups = values / weight_.group_size;
    for (int64_t g = 0; g < groups; ++g) {
      turn_ = 1 - turn_;
      const GroupSums next{scratch_[turn_], totals, group + g == 0,
                           scales + g * 2 * tiles::kStrip,
                           row_sums_ + (group + g) * mc_ + row};
      kernel({left, right, scratch_[1 - turn_]}, stored_);
      stored_ = pending_;
      pending_ = next;
      left += group_units_ * tiles::kUnitBytes<Scheme>;
      right += group_units_ * kRightUnitBytes;
    }
  }

  // What is left of the last two micro-tiles: two more, of no groups.
  void drain() {
    for (int i = 0; i < 2; ++i) {
      turn_ = 1 - turn_;
      kernel_({packed_left_, packed_right_, scratch_[1 - turn_]}, stored_);
      stored_ = pending_;
      pending_ = nothing();
    }
  }
  // Sums that are not used.
  GroupSums nothing() {
    return {scratch_[turn_], scratch_[2], true, scales_, row_sums_};
  }

  // Packs rows of a block of K; false where values are out of range.
  bool pack_left(int64_t row, int64_t rows, bool sums, int64_t k,
                 int64_t values, std::byte* to) {
    MatrixView<T> from = input_.from(row, k);
    if (from.column_stride != 1) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t value = 0; value < values; ++value) {
          copied_[r * values + value] = *from.at(r, value);
        }
      }
      from = {copied_, values, 1};
    }
    if (sums && !sum_rows(from, rows, k, values)) {
      return false;
    }
    tiles::pack_strips<Scheme, tiles::Side::Left>(
        {from.data, from.row_stride, 1}, rows, values, to, range_);
    // Parts must not be denormal; what is large, or no number, sum_rows has
    // seen.
    return !std::is_same_v<T, float> ||
           range_.lies_within(-kMostExponent, kMostExponent);
  }

  // The sums of groups of activations, by group and then row. False where one
  // is so large that sums might leave float's range, or no number.
  bool sum_rows(const MatrixView<T>& from, int64_t rows, int64_t k,
                int64_t values) {
    constexpr int kLanes = simd::kLanes<float>;
    const int64_t size = weight_.group_size;
    float* const sums = row_sums_ + k / size * mc_;
    Vector<uint32_t> most{};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t first = 0; first < values; first += size) {
        const T* at = from.at(r, first);
        Vector<float> sum{};
        for (int64_t i = 0; i < size; i += kLanes) {
          const Vector<float> x = simd::load(at + i);
          const auto magnitude =
              std::bit_cast<Vector<uint32_t>>(x) & 0x7FFFFFFFU;
          most = most > magnitude ? most : magnitude;
          sum += x;
        }
        sums[first / size * mc_ + r] = simd::reduce_add(sum);
      }
    }
    // Of rows that only fill up a strip: what memory holds may be denormal
    // numbers, which are slow.
    for (int64_t group = 0; group < values / size; ++group) {
      std::fill(sums + group * mc_ + rows, sums + (group + 1) * mc_, 0.0F);
    }
    return lies_below(most, kMostExponent);
  }

  // The weight's tiles of a strip and block of K, and its scales.
  bool prepare_right(int64_t column, int64_t columns, int64_t k, int64_t values,
                     float* scales) const {
    using Tiles = WeightTiles<Scheme>;
    const int64_t blocks = values / kTiledBlock;
    for (int64_t half = 0; half < columns; half += Tiles::kColumns) {
      std::byte* to = packed_right_ + half / tiles::kTileRows *
                                          tiles::kTileStep<tiles::Side::Right>;
      for_each_block(blocks, Tiles::kBlocks, [&](int64_t block, int64_t count) {
        weight_tiles_.unpack(first_column_ + column + half,
                             std::min(Tiles::kColumns, columns - half),
                             k / kTiledBlock + block, count,
                             to + block * kRightUnitBytes);
      });
    }
    return prepare_scales(column, columns, k, values, scales);
  }

  bool prepare_scales(int64_t column, int64_t columns, int64_t k,
                      int64_t values, float* to) const {
    constexpr int kLanes = simd::kLanes<float>;
    using Bits = Vector<uint32_t>;
    Bits most{};
    const int64_t first = k / weight_.group_size;
    for (int64_t g = 0; g < values / weight_.group_size;
         ++g, to += 2 * tiles::kStrip) {
      const std::byte* from = weight_.pairs(first + g, first_column_ + column);
      for (int v = 0; v < tiles::kStrip; v += kLanes) {
        const int64_t left = std::clamp<int64_t>(columns - v, 0, kLanes);
        const auto pairs = std::bit_cast<Bits>(_mm512_maskz_loadu_epi32(
            static_cast<__mmask16>((1U << left) - 1), from + 4 * v));
        const Bits scale = pairs << 16;
        const Bits zero = pairs & 0xFFFF0000U;
        simd::store(to + v, std::bit_cast<Vector<float>>(scale));
        simd::store(to + tiles::kStrip + v, std::bit_cast<Vector<float>>(zero));
        const Bits larger = (scale & 0x7FFFFFFFU) > (zero & 0x7FFFFFFFU)
                                ? scale & 0x7FFFFFFFU
                                : zero & 0x7FFFFFFFU;
        most = most > larger ? most : larger;
      }
    }
    return lies_below(most, kMostScaleExponent);
  }

  // Whether magnitudes, as bits, are all below 2^exponent.
  static bool lies_below(Vector<uint32_t> magnitudes, int exponent) {
    const uint32_t limit = static_cast<uint32_t>(exponent + 127) << 23;
    const Vector<uint32_t> beyond =
        std::bit_cast<Vector<uint32_t>>(magnitudes >= limit);
    return _mm512_test_epi32_mask(std::bit_cast<__m512i>(beyond),
                                  std::bit_cast<__m512i>(beyond)) == 0;
  }

  // Of the totals, whole micro-tiles, what exists.
  void store(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    constexpr int kLanes = simd::kLanes<float>;
    for (int64_t r = 0; r < rows; ++r) {
      T* to =
          output_ + (row + r) * weight_.layout.rows + first_column_ + column;
      for (int64_t j = 0; j < columns; j += kLanes) {
        const float* from =
            totals_ +
            (j / tiles::kStrip * (mc_ / tiles::kStrip) + r / tiles::kStrip) *
                tiles::kSumsCount +
            r % tiles::kStrip * tiles::kStrip + j % tiles::kStrip;
        Vector<float> sum = simd::load(from);
        if (bias_ != nullptr) {
          sum += simd::load(bias_ + first_column_ + column + j);
        }
        simd::store_up_to(to + j, sum, columns - j);
      }
    }
  }

  // Of activations, and of scales and zeros: terms stay below 2^(98 + 3 + 16).
  static constexpr int kMostExponent = 98;
  static constexpr int kMostScaleExponent = 16;

  MatrixView<T> input_;
  int64_t rows_;
  const TiledWeight& weight_;
  WeightTiles<Scheme> weight_tiles_;
  int64_t first_column_;
  int64_t columns_;
  const float* bias_;
  T* output_;
  int64_t inner_;
  int64_t group_units_;
  int64_t mc_;
  int64_t nc_;
  int64_t kc_;
  bool keeps_left_;
  std::byte* packed_left_;
  std::byte* packed_right_;
  float* totals_;
  float* scales_;
  float* row_sums_;
  T* copied_ = nullptr;
  tiles::Range range_;
  GroupKernelFunction kernel_;
  GroupKernelFunction last_kernel_;  // of one row of tiles
  GroupSums pending_;                // in the registers
  GroupSums stored_;
  int64_t scale_buffer_ = 0;
  int turn_ = 0;
  alignas(64) float scratch_[3][tiles::kSumsCount];
};

}  // namespace detail

// Multiplies as multiply_many_rows does; false: it is not the way for these
// operands, and nothing of the output is to be used.
template <class T>
bool multiply_by_group_tiles(const MatrixView<T>& input, int64_t rows,
                             const TiledWeight& weight, const float* bias,
                             T* output, int64_t threads) {
  using Scheme = typename detail::LeftScheme<T>::type;
  const int64_t columns = weight.layout.rows;
  const int64_t inner = weight.layout.columns;
  const bool by_vectors =
      std::is_same_v<T, float> &&
      tiles::float32_products() == tiles::Float32Products::None;
  if (inner == 0 || by_vectors) {
    return false;
  }
  std::atomic<bool> is_right = true;
  detail::for_each_rectangle<void>(
      rows, columns, tiles::kStrip, tiles::kStrip,
      detail::useful_threads(rows, columns, inner, threads),
      [&](int64_t row, int64_t part_rows, int64_t column,
          int64_t part_columns) {
        const tiles::Registers registers;
        detail::GroupTiles<Scheme> part(input.from(row, 0), part_rows, weight,
                                        column, part_columns, bias,
                                        output + row * columns);
        if (!part.run()) {
          is_right.store(false, std::memory_order_relaxed);
        }
      });
  return is_right.load(std::memory_order_relaxed);
}

}  // namespace pkg::cpu

#endif
