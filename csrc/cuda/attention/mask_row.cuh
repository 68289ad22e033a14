// A mask of attention as a thread reads it that has rows of scores: what it
// needs for one of them, all its loads one after the other; the kernels by
// multiply-adds load a row ahead.
//
// Threads have fragments of four neighbouring keys, or pairs of them in the
// kernels of tensor cores, which one load brings where the mask's rows are of
// neighbours, from an address on that allows it. What is beyond a matrix is
// read at its edge, and hidden by who knows the limits: so no load is behind a
// branch of its own. (As AttentionScores::score() reads it, each of
// 64 loads a tile was behind branches, with multiplications of 64 bits for its
// address, and a thread waited for it before the next: an H100 took 698 us for
// 1x8x1024x64 with booleans and 257 without them, which is 850 cycles a load.
// Now, with divided keys, it takes 110 and 86. An H200 took 71 us for the same
// of bfloat16 by tensor cores, when these read the mask as it did, and has not
// run them since.)
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/words.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

// Where the mask of a tile is: its element of the tile's corner, and how many
// rows and columns it has from there on, one at least.
template <class Value>
struct MaskCorner {
  const Value* data;
  int64_t row_stride;
  int64_t column_stride;
  int rows;
  int columns;
};

// Raw: its type is known where it is loaded and where it is applied.
// `kPart`: how many of the thread's columns it has at a time.
template <class Element, class Scores, int kPart = Scores::kThreadColumns>
class MaskRow {
 public:
  // Whether all columns that a fragment has at once may be loaded so.
  template <class Value>
  __device__ __forceinline__ static bool has_vectors(
      const MaskCorner<Value>& corner) {
    constexpr int kCount = kPacket<Value>;
    return corner.column_stride == 1 && corner.row_stride % kCount == 0 &&
           (corner.columns % kCount == 0 ||
            corner.columns >= Scores::kTileColumns) &&
           is_aligned(corner.data, kCount);
  }

  // Of the thread's i-th row, from its `first` column on; row 0 first, which
  // finds out how.
  template <class Value>
  __device__ __forceinline__ void load(const MaskCorner<Value>& corner, int i,
                                       int first = 0) {
    const typename Scores::Thread thread;
    if (i == 0) {
      is_packed_ = has_vectors(corner);
    }
    const Value* const row =
        corner.data +
        at_most(thread.row(i), corner.rows - 1) * corner.row_stride;
    if (is_packed_) {
      constexpr int kCount = kPacket<Value>;
      PKG_UNROLL
      for (int j = 0; j < kColumns; j += kCount) {
        const int column =
            at_most(thread.column(first + j), corner.columns - kCount);
        load_words<kCount>(j / kCount, row + column);
      }
    } else {
      PKG_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const int column =
            at_most(thread.column(first + j), corner.columns - 1);
        load_words<1>(j, row + column * corner.column_stride);
      }
    }
  }

  // Replaces each score by function(value of the mask, score).
  template <class Value, class Function>
  __device__ __forceinline__ void apply(Scores& tile, int i,
                                        Function&& function,
                                        int first = 0) const {
    PKG_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      constexpr int kCount = kPacket<Value>;
      auto& score = tile.values[i][first + j];
      score =
          is_packed_
              ? function(value_of<Value, kCount>(j / kCount, j % kCount), score)
              : function(value_of<Value, 1>(j, 0), score);
    }
  }

 private:
  static constexpr int kColumns = kPart;
  static constexpr int kWordsOfColumn = sizeof(Element) > sizeof(uint32_t) ? 2
                                                                           : 1;
  static constexpr int kNeighbours = Scores::Thread::kNeighbours;
  template <class Value>
  static constexpr int kPacket =
      16 / sizeof(Value) < kNeighbours ? 16 / sizeof(Value) : kNeighbours;

  // Words that so many values take, the last of them perhaps in part.
  template <class Value, int kCount>
  static constexpr int kWords = (sizeof(Value) * kCount + 3) / 4;

  // By one instruction, whose result nothing waits for: of bytes that are
  // copied (memcpy) the compiler makes as many loads, and puts them together.
  template <int kCount, class Value>
  __device__ __forceinline__ void load_words(int index, const Value* from) {
    constexpr int kLoaded = kWords<Value, kCount>;
    using Loaded = std::conditional_t<
        sizeof(Value) * kCount == 1, uint8_t,
        std::conditional_t<sizeof(Value) * kCount == 2, uint16_t,
                           Packet<uint32_t, kLoaded>>>;
#ifdef __CUDACC__
    const Loaded loaded = *reinterpret_cast<const Loaded*>(from);
#else
    const auto packet = *reinterpret_cast<const Packet<Value, kCount>*>(from);
    Loaded loaded;
    memcpy(&loaded, &packet, sizeof(loaded));
#endif
    if constexpr (std::is_integral_v<Loaded>) {
      words_[index] = loaded;
    } else {
      PKG_UNROLL
      for (int k = 0; k < kLoaded; ++k) {
        words_[index * kLoaded + k] = loaded.values[k];
      }
    }
  }

  // One of the values that were loaded together.
  template <class Value, int kCount>
  __device__ __forceinline__ Value value_of(int index, int place) const {
    constexpr int kLoaded = kWords<Value, kCount>;
    const int first =
        index * kLoaded + place * static_cast<int>(sizeof(Value)) / 4;
    if constexpr (sizeof(Value) == 1) {
      return static_cast<Value>(words_[first] >> (8 * (place % 4)) & 0xFFU);
    } else if constexpr (sizeof(Value) == 2) {
      return element_of_word<Value>(words_[first], place % 2);
    } else if constexpr (sizeof(Value) == 4) {
      return float_of_bits(words_[first]);
    } else {
      const uint32_t words[] = {words_[first], words_[first + 1]};
      Value value;
      memcpy(&value, words, sizeof(value));
      return value;
    }
  }

  __device__ __forceinline__ static int at_most(int place, int last) {
    return place < last ? place : last;
  }

  uint32_t words_[kColumns * kWordsOfColumn];
  bool is_packed_ = false;
};

}  // namespace pkg::cuda
