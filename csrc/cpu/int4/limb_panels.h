// Rows of activations times a 4-bit weight: dot products of bytes as for a few
// rows (cpu/int4/few_rows.h), by the micro-kernel of matrix products, with
// micro-panels of the weight that are unpacked once for all rows.
//
// Of a chunk of 128 columns a micro-panel of NR rows of the weight is 32
// k-groups, a word's lower halves and its upper ones in turn: unsigned bytes q,
// 0 to 15, four in a lane. 4 KiB with AVX-512, which stay in the L1 cache while
// all rows go by. Words of as many rows as a register has lanes are transposed:
// 64 shuffles of 16 registers, then 3 logical instructions and 2 stores for
// each of 128 weights.
//
// The left operand is strips of the activations' limbs, each limb a row of its
// own: of two limbs 6 rows in a strip of 12, of three 4.
//
// Arithmetic. As for a few rows, but that a lane sums over the chunk, or over a
// group where that is shorter, and each limb has its own compensation:
//
//   sum X (q - 8) = sum over i  256^i (sum L_i q - 8 sum L_i)
//
// A limb's sum is at most 128 x 128 x 8 = 2^17. Two are combined in integers;
// of three the upper two, and then with the lowest in float.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "cpu/gemm/micro_kernel.h"
#include "cpu/gemm/operands.h"
#include "cpu/int4/arithmetic.h"
#include "cpu/int4/few_rows.h"
#include "cpu/int4/limb_rows.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/transpose.h"
#include "host/integer_math.h"

namespace pkg::cpu {
namespace detail {

// Limbs times values of 0 to 15.
struct LimbQuads : Int4Quads {
  using Right = LimbQuads;
  static constexpr bool kCompensated = true;

  static Vector<int32_t> compensate(Vector<int32_t> sum,
                                    Vector<uint32_t> k_groups) {
    return sum - multiply_add(k_groups,
                              Vector<uint32_t>{} + 0x01010101U * kOffset,
                              Vector<int32_t>{});
  }
};

inline constexpr int64_t kPanelRows = kNR<LimbQuads>;
inline constexpr int64_t kPanelTiles = kPanelRows / kTiledRows;
static_assert(kPanelRows % kTiledRows == 0);
inline constexpr int64_t kChunkDepth = kChunkColumns / LimbQuads::kKGroupSize;
// Rows of activations in a strip.
template <int kLimbs>
inline constexpr int kLimbStrip = kMR / kLimbs;

// Words of a chunk in the order of its blocks, which ChunkOrder has of
// inner_k_tiles 2, whatever the weight's own order is.
inline constexpr int64_t kBlockOrder = 2;

// Where each word of a row's chunk comes in that order.
inline std::array<int, kChunkWords> places_in_block_order(
    int64_t inner_k_tiles) {
  std::array<int, kChunkWords> places{};
  const TiledLayout own{kTiledRows, kChunkColumns, inner_k_tiles};
  const TiledLayout by_block{kTiledRows, kChunkColumns, kBlockOrder};
  for (int64_t block = 0; block < own.blocks(); ++block) {
    for (int64_t lane = 0; lane < 4; ++lane) {
      places[ChunkOrder::word_of(own, block, lane)] =
          static_cast<int>(ChunkOrder::word_of(by_block, block, lane));
    }
  }
  return places;
}

// A chunk of a micro-panel.
struct alignas(64) PanelChunk {
  uint32_t k_groups[kChunkWords][2][kPanelRows];
};

// Of the tiles whose words begin at `tiles`; one that is null is zeros.
template <int kRun>
void unpack_panel_chunk(const uint32_t* const (&tiles)[kPanelTiles],
                        const std::array<int, kChunkWords>& places,
                        PanelChunk& to) {
  constexpr int64_t kSupertile = kTiledRows * kRun;
  const Vector<uint32_t> mask = Vector<uint32_t>{} + 0x0F0F0F0FU;
  for (int64_t first = 0; first < kPanelRows; first += kLanes32) {
    for (int word = 0; word < kChunkWords; word += kLanes32) {
      Vector<uint32_t> words[kLanes32];
#pragma GCC unroll 16
      for (int row = 0; row < kLanes32; ++row) {
        const uint32_t* tile = tiles[(first + row) / kTiledRows];
        words[row] =
            tile != nullptr
                ? load_chunk<kRun>(tile + (first + row) % kTiledRows * kRun,
                                   kSupertile, word)
                : Vector<uint32_t>{};
      }
      simd::transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes32; ++i) {
        auto& halves = to.k_groups[places[word + i]];
        simd::store(halves[0] + first, words[i] & mask);
        simd::store(halves[1] + first, (words[i] >> 4) & mask);
      }
    }
  }
}

// What becomes of the sums of a chunk, or of a group in it: scaled, they are
// added to totals, rows of kPanelRows.
template <int kLimbs>
struct AddLimbs {
  static constexpr bool kInOrder = false;

  const int32_t* compensation;  // of each row and limb
  const float* units;           // of the chunk, by row
  const float* scales;          // of the micro-panel's rows
  float* totals;

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void prefetch(int64_t /*row*/,
                                       int64_t /*column*/) const {}

  template <int kRows, int kVectors>
  [[gnu::always_inline]] void operator()(
      int64_t /*row*/, int64_t /*column*/,
      Vector<int32_t> (&sums)[kRows][kVectors], int /*tail*/) const {
    Vector<float> scale[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = simd::load(scales + v * kLanes32);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows / kLimbs; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int upper = (r + 1) * kLimbs - 1;
        Vector<float> sum = __builtin_convertvector(
            (sums[upper][v] << 8) + sums[upper - 1][v], Vector<float>);
        if constexpr (kLimbs == 3) {
          sum = sum * 256.0F +
                __builtin_convertvector(sums[upper - 2][v], Vector<float>);
        }
        float* to = totals + r * kPanelRows + v * kLanes32;
        simd::store(to, sum * units[r] * scale[v] + simd::load(to));
      }
    }
  }
};

// The product of some rows with the whole weight. prepare(), then multiply() of
// each range of micro-panels.
template <int kLimbs, class T>
class LimbPanels {
 public:
  LimbPanels(const MatrixView<T>& input, int64_t rows,
             const TiledWeight& weight, const simd::Compute<T>* bias, T* output)
      : input_(input),
        weight_(weight),
        bias_(bias),
        output_(output),
        limbs_(rows, weight.layout.columns, weight.group_size),
        places_(places_in_block_order(weight.layout.inner_k_tiles)),
        part_columns_(std::min(weight.group_size, kChunkColumns)) {}

  // False where block floating point will not do for the activations.
  bool prepare() {
    if (!limbs_.write(input_, ChunkOrder(kBlockOrder))) {
      return false;
    }
    const int64_t count = limbs_.chunks() * limbs_.rows();
    strips_ = Workspace::of_this_thread<Slot::LimbStrips>()
                  .template request<uint32_t>(count * kLimbs *
                                              (kChunkDepth + kParts));
    compensation_ =
        reinterpret_cast<int32_t*>(strips_ + count * kLimbs * kChunkDepth);
    units_ =
        Workspace::of_this_thread<Slot::LimbUnits>().template request<float>(
            count);
    for (int64_t chunk = 0; chunk < limbs_.chunks(); ++chunk) {
      for_each_block(limbs_.rows(), kLimbStrip<kLimbs>,
                     [&](int64_t first, int64_t height) {
                       for (int64_t row = 0; row < height; ++row) {
                         pack_row(chunk, first, height, row);
                       }
                     });
    }
    return true;
  }

  int64_t panels() const { return ceil_div(weight_.layout.rows, kPanelRows); }

  // Micro-panels from `begin` to `end`.
  void multiply(int64_t begin, int64_t end) const {
    float* totals =
        Workspace::of_this_thread<Slot::TileScales>().template request<float>(
            limbs_.rows() * kPanelRows);
    // Scales by group, then zeros.
    float* scales =
        Workspace::of_this_thread<Slot::UnpackedScales>()
            .template request<float>(2 * limbs_.groups() * kPanelRows);
    PanelChunk unpacked;
    for (int64_t panel = begin; panel < end; ++panel) {
      unpack_panel_scales(panel, scales);
      start_totals(scales + limbs_.groups() * kPanelRows, totals);
      for (int64_t chunk = 0; chunk < limbs_.chunks(); ++chunk) {
        unpack(panel, chunk, unpacked);
        multiply_chunk(chunk, unpacked, scales, totals);
      }
      store(panel, totals);
    }
  }

 private:
  static constexpr int64_t kParts = kChunkColumns / kTiledBlock;  // at most

  int64_t part_depth() const { return part_columns_ / LimbQuads::kKGroupSize; }

  // Rows of the weight that a micro-panel has.
  int64_t rows_of(int64_t panel) const {
    return std::min(kPanelRows, weight_.layout.rows - panel * kPanelRows);
  }

  uint32_t* strip(int64_t chunk, int64_t first) const {
    return strips_ + (chunk * limbs_.rows() + first) * kLimbs * kChunkDepth;
  }
  int32_t* compensation(int64_t chunk, int64_t part, int64_t row) const {
    return compensation_ +
           ((chunk * kParts + part) * limbs_.rows() + row) * kLimbs;
  }

  // A chunk of a row, whose limbs lie in memory as its k-groups do, but for the
  // halves.
  void pack_row(int64_t chunk, int64_t first, int64_t height, int64_t row) {
    const LimbChunk<kLimbs>& from = limbs_.at(first + row, chunk);
    units_[chunk * limbs_.rows() + first + row] = from.unit;
    for (int limb = 0; limb < kLimbs; ++limb) {
      uint32_t* to = strip(chunk, first) + row * kLimbs + limb;
      const int64_t step = height * kLimbs;
      uint32_t words[2][kChunkWords];
      std::memcpy(words, from.limbs[limb], sizeof(words));
      for (int word = 0; word < kChunkWords; ++word) {
        to[2 * word * step] = words[0][word];
        to[(2 * word + 1) * step] = words[1][word];
      }
      const int64_t part_words = part_depth() / 2;
      for (int64_t part = 0; part * part_words < kChunkWords; ++part) {
        compensation(chunk, part, first + row)[limb] =
            -8 * sum_bytes(from.limbs[limb], part * part_words, part_words);
      }
    }
  }

  static int32_t sum_bytes(const int8_t (&halves)[2][64], int64_t word,
                           int64_t words) {
    int32_t sum = 0;
    for (const auto& half : halves) {
      for (int64_t i = 4 * word; i < 4 * (word + words); ++i) {
        sum += half[i];
      }
    }
    return sum;
  }

  void unpack_panel_scales(int64_t panel, float* scales) const {
    const int64_t tiles = rows_of(panel) / kTiledRows;
    for (int64_t group = 0; group < limbs_.groups(); ++group) {
      const std::byte* pairs = weight_.pairs(group, panel * kPanelRows);
      prefetch_bytes<PrefetchTo::L2>(pairs + 4 * kPanelRows, 4 * kPanelRows);
      float* of_scales = scales + group * kPanelRows;
      float* of_zeros = of_scales + limbs_.groups() * kPanelRows;
      for (int64_t tile = 0; tile < kPanelTiles; ++tile) {
        TileBits bits{};
        if (tile < tiles) {
          std::memcpy(&bits, pairs + tile * sizeof(bits), sizeof(bits));
        }
        split_pairs(bits, of_scales + tile * kTiledRows,
                    of_zeros + tile * kTiledRows);
      }
    }
  }

  // The totals' first term: what the zeros add.
  void start_totals(const float* zeros, float* totals) const {
    for (int64_t row = 0; row < limbs_.rows(); ++row) {
      const float* sums = limbs_.group_sums(row);
      Vector<float> total[kNRVectors] = {};
      for (int64_t group = 0; group < limbs_.groups(); ++group) {
        for (int v = 0; v < kNRVectors; ++v) {
          total[v] += simd::load(zeros + group * kPanelRows + v * kLanes32) *
                      sums[group];
        }
      }
      for (int v = 0; v < kNRVectors; ++v) {
        simd::store(totals + row * kPanelRows + v * kLanes32, total[v]);
      }
    }
  }

  void multiply_chunk(int64_t chunk, const PanelChunk& unpacked,
                      const float* scales, float* totals) const {
    const int64_t columns =
        std::min(kChunkColumns, weight_.layout.columns - chunk * kChunkColumns);
    for_each_block(
        limbs_.rows(), kLimbStrip<kLimbs>, [&](int64_t first, int64_t height) {
          for (int64_t part = 0; part * part_columns_ < columns; ++part) {
            const int64_t group =
                (chunk * kChunkColumns + part * part_columns_) /
                weight_.group_size;
            multiply_part<kLimbStrip<kLimbs>>(
                height, strip(chunk, first), unpacked, part,
                {compensation(chunk, part, first),
                 units_ + chunk * limbs_.rows() + first,
                 scales + group * kPanelRows, totals + first * kPanelRows});
          }
        });
  }

  // A strip of `height` rows, at most kHeight.
  template <int kHeight>
  void multiply_part(int64_t height, const uint32_t* limbs,
                     const PanelChunk& unpacked, int64_t part,
                     const AddLimbs<kLimbs>& store) const {
    if constexpr (kHeight > 1) {
      if (height < kHeight) {
        return multiply_part<kHeight - 1>(height, limbs, unpacked, part, store);
      }
    }
    const int64_t first = part * part_depth();
    micro_kernel<LimbQuads, kHeight * kLimbs, kNRVectors>(
        part_depth(), PackedStrips<uint32_t>{limbs + first * kHeight * kLimbs},
        unpacked.k_groups[0][0] + first * kPanelRows, kPanelRows, 0, 0,
        static_cast<int>(kPanelRows), store);
  }

  void unpack(int64_t panel, int64_t chunk, PanelChunk& to) const {
    constexpr int64_t kChunk = kTiledRows * kChunkWords;  // words of a tile
    constexpr int64_t kAhead = 8;                         // chunks
    const TiledLayout& layout = weight_.layout;
    const int64_t tiles = rows_of(panel) / kTiledRows;
    const bool is_whole = (chunk + 1) * kChunkColumns <= layout.columns;
    uint32_t last[kPanelTiles][kChunk];
    const uint32_t* words[kPanelTiles] = {};
    // A tile's chunks lie side by side, and then those of the next tile, which
    // this micro-panel has too.
    const int64_t ahead =
        kAhead * kChunk + (chunk + kAhead < limbs_.chunks()
                               ? 0
                               : (kPanelTiles - 1) * layout.words_of_tile());
    for (int64_t tile = 0; tile < tiles; ++tile) {
      words[tile] = weight_.words +
                    (panel * kPanelTiles + tile) * layout.words_of_tile() +
                    chunk * kChunk;
      prefetch_bytes<PrefetchTo::L2>(words[tile] + ahead, 4 * kChunk);
      if (!is_whole) {
        std::fill_n(last[tile], kChunk, 0);
        std::copy_n(words[tile], layout.columns % kChunkColumns, last[tile]);
        words[tile] = last[tile];
      }
    }
    switch (layout.inner_k_tiles) {
      case 2:
        return unpack_panel_chunk<4>(words, places_, to);
      case 4:
        return unpack_panel_chunk<8>(words, places_, to);
      default:
        return unpack_panel_chunk<16>(words, places_, to);
    }
  }

  void store(int64_t panel, const float* totals) const {
    const int64_t column = panel * kPanelRows;
    const int64_t columns = rows_of(panel);
    for (int64_t row = 0; row < limbs_.rows(); ++row) {
      T* to = output_ + row * weight_.layout.rows + column;
      for (int64_t j = 0; j < columns; j += kLanes32) {
        const int count =
            static_cast<int>(std::min<int64_t>(kLanes32, columns - j));
        Vector<float> sum = simd::load(totals + row * kPanelRows + j);
        if (bias_ != nullptr) {
          sum += simd::load_partial(bias_ + column + j, count);
        }
        simd::store_partial(to + j, sum, count);
      }
    }
  }

  MatrixView<T> input_;
  const TiledWeight& weight_;
  const simd::Compute<T>* bias_;
  T* output_;
  LimbRows<kLimbs> limbs_;
  std::array<int, kChunkWords> places_;
  int64_t part_columns_;  // that share a scale
  uint32_t* strips_ = nullptr;
  int32_t* compensation_ = nullptr;  // by chunk, part, row and limb
  float* units_ = nullptr;           // by chunk and row
};

}  // namespace detail

// As multiply_many_rows; false, with nothing written, where block floating
// point will not do for the activations.
template <int kLimbs, class T>
bool multiply_by_limb_panels(const MatrixView<T>& input, int64_t rows,
                             const TiledWeight& weight,
                             const simd::Compute<T>* bias, T* output,
                             int64_t threads) {
  detail::LimbPanels<kLimbs, T> product(input, rows, weight, bias, output);
  if (!product.prepare()) {
    return false;
  }
  const int64_t panels = product.panels();
  const int64_t panel_bytes = detail::kPanelRows / 2 * weight.layout.columns;
  parallel_for(
      panels, threads > 1 ? grain_of(kElementGrain, panel_bytes) : panels,
      [&](int64_t begin, int64_t end) { product.multiply(begin, end); });
  return true;
}

}  // namespace pkg::cpu
