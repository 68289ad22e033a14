// Right tiles of the whole numbers q - 8 from the words of a 4-bit weight
// (tensor_core_tiled_layout.h), for products by tile registers.
//
// 64 bytes of each of 16 columns of the product, rows of the weight, hold 128
// values of the inner dimension: four blocks, which become a tile each. They
// are transposed as words. Then each word has four pairs of values, every pair
// a word of some row of a tile: a shift and a look-up, which takes no notice of
// bits above the pair's.
//
// Tiles of values that are split into parts (cpu/tiles/pack_tiles.cpp) have
// values 16 apart in a word, and those of bfloat16 neighbours, which is the
// weight's own order. Exchanging bytes before the transposition makes one of
// the other.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/int4/tiled_weight.h"
#include "cpu/simd/transpose.h"
#include "cpu/tiles/pack_tiles.h"

#if defined(PKG_HAS_TILES)

#include <immintrin.h>

namespace pkg::cpu {

template <class Scheme>
class WeightTiles {
 public:
  // Columns and blocks that are made together.
  static constexpr int64_t kColumns = tiles::kTileRows;
  static constexpr int64_t kBlocks = 4;

  explicit WeightTiles(const TiledWeight& weight) : weight_(weight) {
    alignas(64) uint16_t values[32];
    for (int i = 0; i < 32; ++i) {
      values[i] = static_cast<uint16_t>(
          std::bit_cast<uint32_t>(static_cast<float>(i % 16 - 8)) >> 16);
    }
    values_ = _mm512_load_si512(values);
    alignas(64) uint8_t order[64];
    for (int i = 0; i < 64; ++i) {
      order[i] = static_cast<uint8_t>(i / 4 * 4 + i % 2 * 2 + i % 4 / 2);
    }
    exchanged_ = _mm512_load_si512(order);
  }

  // Columns of which up to kColumns exist, blocks of which up to kBlocks do, as
  // tiles of successive units.
  void unpack(int64_t column, int64_t columns, int64_t block, int64_t blocks,
              std::byte* to) const {
    switch (weight_.layout.words_of_lane()) {
      case 1:
        return unpack_words<1>(column, columns, block, blocks, to);
      case 2:
        return unpack_words<2>(column, columns, block, blocks, to);
      default:
        return unpack_words<4>(column, columns, block, blocks, to);
    }
  }

 private:
  using Words = simd::Vector<uint32_t>;
  static constexpr bool kSplits =
      !std::is_same_v<typename Scheme::Input, simd::BFloat16>;

  // A row's words of four blocks, those of `supertiles` that exist.
  template <int kWordsOfLane>
  [[gnu::always_inline]] Words load_row(const uint32_t* from,
                                        int64_t supertiles) const {
    constexpr int kWords = 4 * kWordsOfLane;  // of a supertile
    __m512i words = _mm512_maskz_loadu_epi32(
        static_cast<__mmask16>((1U << kWords) - 1), from);
#pragma GCC unroll 4
    for (int i = 1; i < kBlocks / kWordsOfLane; ++i) {
      // Each beside those before it.
      const uint32_t lanes =
          i < supertiles ? ((1U << kWords) - 1) << (i * kWords) : 0;
      words = _mm512_mask_loadu_epi32(words, static_cast<__mmask16>(lanes),
                                      from + i * (kTiledRows - 1) * kWords);
    }
    if constexpr (kSplits) {
      words = _mm512_shuffle_epi8(words, exchanged_);
    }
    return std::bit_cast<Words>(words);
  }

  template <int kWordsOfLane>
  void unpack_words(int64_t column, int64_t columns, int64_t block,
                    int64_t blocks, std::byte* to) const {
    constexpr int kWords = 16;
    const TiledLayout& layout = weight_.layout;
    const int64_t supertiles = blocks / kWordsOfLane;
    const uint32_t* from = weight_.words + layout.word(column, block, 0);
    Words square[kWords];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      const int64_t offset = c / kTiledRows * layout.words_of_tile() +
                             c % kTiledRows * 4 * kWordsOfLane;
      square[c] = c < kTiledRows || c < columns
                      ? load_row<kWordsOfLane>(from + offset, supertiles)
                      : Words{};
    }
    simd::transpose(square);
#pragma GCC unroll 16
    for (int word = 0; word < kWords; ++word) {
      constexpr int kOfSupertile = 4 * kWordsOfLane;
      const int at = word / kOfSupertile * kWordsOfLane + word % kWordsOfLane;
      if (at < blocks) {
        spread(square[word], word % kOfSupertile / kWordsOfLane,
               to + at * int64_t{2} * tiles::kTileBytes);
      }
    }
  }

  // The four pairs of a lane's words.
  [[gnu::always_inline]] void spread(Words words, int lane,
                                     std::byte* tile) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int row = kSplits ? j % 2 * 8 + 2 * lane + j / 2 : 4 * j + lane;
      const __m512i pairs = _mm512_permutexvar_epi16(
          std::bit_cast<__m512i>(words >> (4 * j)), values_);
      _mm512_store_si512(tile + row * tiles::kTileRowStep<tiles::Side::Right>,
                         pairs);
    }
  }

  const TiledWeight& weight_;
  __m512i values_;     // of four bits
  __m512i exchanged_;  // bytes 1 and 2 of every word
};

}  // namespace pkg::cpu

#endif
