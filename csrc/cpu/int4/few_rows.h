// A few rows of activations times a 4-bit weight: integer dot products of the
// weight's four-bit values with the activations' limbs, scaled chunk by chunk.
//
// Layout. Eight rows of the weight are a tile (TiledLayout); a row of a tile is
// words of 32 bits, of eight values each. Word (b, c) holds, of the block of 32
// columns from 32 b on, those that lane c of a tensor core's four has:
//
//   bits     28-31  24-27  20-23  16-19  12-15   8-11    4-7    0-3
//   column  2c+25  2c+17   2c+9   2c+1  2c+24  2c+16   2c+8   2c+0     + 32 b
//           \___ byte 3 __/\__ byte 2 __/\__ byte 1 __/\__ byte 0 __/
//
// A chunk is 128 columns of a row: 16 words, 64 bytes, one register of AVX-512.
// With inner_k_tiles 8 they are contiguous; with 4 or 2 they are two or four
// runs of 8 or 4 words (kRun), each a supertile of the eight rows further:
//
//   row 0  | w0 w1 ... w15 |
//   row 1  | w0 w1 ... w15 |   a chunk of a tile: 512 bytes
//    ...
//   row 7  | w0 w1 ... w15 |
//
// Each byte holds two values, low and high, l and h. The activations of
// the chunk lie in the same order (LimbChunk): for each limb i 64 bytes of the
// columns of the low halves, and 64 of those of the high ones:
//
//   words           | h63 l63 | ... | h1 l1 | h0 l0 |
//   & 0x0F..0F      |     l63 | ... |    l1 |    l0 |  times limbs[i][0]
//   >> 4 & 0x0F..0F |     h63 | ... |    h1 |    h0 |  times limbs[i][1]
//
// Four products of bytes are added in each element of 32 bits (ByteSums), so
// that an element has the eight values of a word, and those of another one for
// each further register that a chunk of a row takes.
//
// Arithmetic. A value q, 0 to 15, stands for the weight (q - 8) s + z, with s
// and z of its row and group of columns; an activation is x = X u, X = sum over
// i of 256^i L_i, with u of its chunk (cpu/int4/limbs.h). Over the columns k:
//
//   sum x w = sum over chunks  u s (sum X (q - 8)) + sum over groups  z (sum x)
//   sum X (q - 8) = sum over i  256^i (sum L_i q)  -  8 sum X
//                               \__ dot products __/  \_ compensation
//
// q is unsigned and L_i signed, as the instructions want bytes. All of the last
// line is exact: integers wrap modulo 2^32, and the result, in an element of a
// register, is of 8 values with AVX-512, 16 with AVX2 and 32 with SSE, each of
// at most 8 |X| < 2^26, and so below 2^31. It is then converted to float,
// scaled by u s, and added to the sums of the row. z (sum x) is a result's
// first term.
//
// Cost. A register of 128 weights takes 3 logical instructions, 2 dot products
// a limb and 6 others (to combine the limbs, convert and scale) for each row of
// activations. Tables of the values in a register, and multiply-adds in
// bfloat16 or float32, would take 12 or 24 instructions for the products alone.
//
// Bytes: the weight once, K N / 2, and its scales. Bound by reading it for one
// row; more rows find a tile of it (8 K / 2 bytes) in the L1 cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/operands.h"
#include "cpu/int4/byte_sums.h"
#include "cpu/int4/limb_rows.h"
#include "cpu/int4/limbs.h"
#include "cpu/runtime/cache.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu {

namespace detail {

inline constexpr int kLanes32 = simd::kLanes<int32_t>;
// Registers that a chunk of a row takes.
inline constexpr int kChunkVectors = kChunkWords / kLanes32;
// Rows of the weight side by side: what depends on a result that is not there
// yet is not next in line then, and does not fill the processor's queue.
inline constexpr int kRowsTogether = simd::kVectorRegisters < 32 ? 1 : 2;

// How a chunk is scaled: by one number (groups of whole chunks), or by one for
// each word.
enum class ChunkScales { One, Words };

// kLanes32 words of a chunk of a row, from word `first` on. The words of a
// supertile's row are contiguous, kRun of them; the next supertile's are
// `step` words further.
template <int kRun>
[[gnu::always_inline]] inline Vector<uint32_t> load_chunk(const uint32_t* row,
                                                          int64_t step,
                                                          int first) {
  if constexpr (kRun >= kLanes32) {
    return simd::load(row + first / kRun * step + first % kRun);
  } else {
    using Part = typename simd::VectorOf<uint32_t, 16>::type;
    union {
      Part parts[kLanes32 / 4];
      Vector<uint32_t> all;
    } words;
    for (int i = 0; i < kLanes32 / 4; ++i) {
      const int word = first + 4 * i;
      std::memcpy(&words.parts[i], row + word / kRun * step + word % kRun, 16);
    }
    return words.all;
  }
}

// The limbs' sums combined, as float.
template <int kLimbs>
[[gnu::always_inline]] inline Vector<float> combine_limbs(
    const ByteSums (&sums)[kLimbs], Vector<int32_t> compensation) {
  Vector<int32_t> total = sums[kLimbs - 1].total();
  for (int limb = kLimbs - 1; limb-- > 0;) {
    total = (total << 8) + sums[limb].total();
  }
  if constexpr (!ByteSums::kStartsAnywhere) {
    total += compensation;
  }
  return __builtin_convertvector(total, Vector<float>);
}

// One register of the words of kRowsTogether rows times all limbs.
template <int kLimbs, int kRun>
[[gnu::always_inline]] inline void multiply_words(
    const uint32_t* words, int v, const LimbChunk<kLimbs>& x,
    ByteSums (&sums)[kRowsTogether][kLimbs]) {
  // Words from one supertile's row to the next supertile's.
  constexpr int64_t kSupertile = kTiledRows * kRun;
  const Vector<uint32_t> mask = Vector<uint32_t>{} + 0x0F0F0F0FU;
  Vector<uint32_t> halves[2][kRowsTogether];
  for (int row = 0; row < kRowsTogether; ++row) {
    const Vector<uint32_t> pairs =
        load_chunk<kRun>(words + row * kRun, kSupertile, v * kLanes32);
    halves[0][row] = pairs & mask;
    halves[1][row] = (pairs >> 4) & mask;
  }
  for (int half = 0; half < 2; ++half) {
    for (int limb = 0; limb < kLimbs; ++limb) {
      for (int row = 0; row < kRowsTogether; ++row) {
        sums[row][limb].add(halves[half][row],
                            x.limbs[limb][half] + v * kLanes32 * 4);
      }
    }
  }
}

// Of one chunk: the compensation of each register of words, and of all.
struct ChunkCompensation {
  Vector<int32_t> of_vector[kChunkVectors];
  Vector<int32_t> total{};

  [[gnu::always_inline]] inline explicit ChunkCompensation(
      const int32_t* words) {
    for (int v = 0; v < kChunkVectors; ++v) {
      of_vector[v] = simd::load(words + v * kLanes32);
      total += of_vector[v];
    }
  }
};

// A chunk of kRowsTogether rows of the weight: adds its scaled products to
// their sums. `scales` are those of the first of the rows.
template <int kLimbs, int kRun, ChunkScales kScales>
[[gnu::always_inline]] inline void multiply_chunk(
    const uint32_t* words, const LimbChunk<kLimbs>& x,
    const ChunkCompensation& compensation, const float* scales,
    Vector<float>* sums) {
  ByteSums of_limbs[kRowsTogether][kLimbs];
  for (int row = 0; row < kRowsTogether; ++row) {
    of_limbs[row][0].start(compensation.total);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kChunkVectors; ++v) {
    if constexpr (kScales == ChunkScales::Words) {
      for (int row = 0; row < kRowsTogether; ++row) {
        for (int limb = 0; limb < kLimbs; ++limb) {
          of_limbs[row][limb] = {};
        }
        of_limbs[row][0].start(compensation.of_vector[v]);
      }
    }
    multiply_words<kLimbs, kRun>(words, v, x, of_limbs);
    if constexpr (kScales == ChunkScales::Words) {
      for (int row = 0; row < kRowsTogether; ++row) {
        sums[row] += combine_limbs(of_limbs[row], compensation.of_vector[v]) *
                     simd::load(scales + row * kChunkWords + v * kLanes32);
      }
    }
  }
  if constexpr (kScales == ChunkScales::One) {
    for (int row = 0; row < kRowsTogether; ++row) {
      sums[row] +=
          combine_limbs(of_limbs[row], compensation.total) * scales[row];
    }
  }
}

// Adds what a row of activations gives for the eight rows of a tile.
template <int kLimbs, int kRun, ChunkScales kScales>
void multiply_row(const uint32_t* tile, const LimbChunk<kLimbs>* input,
                  int64_t chunks, const float* scales, float* results) {
  constexpr int kRows = static_cast<int>(kTiledRows);
  constexpr int64_t kChunk = kRows * kChunkWords;  // words of a tile
  constexpr int64_t kScalesOfRow =
      kScales == ChunkScales::One ? 1 : kChunkWords;
  // Words. One row of activations times 4096 x 4096 from memory, on a Zen 4:
  // 0.45 ms in bfloat16 with 8, 16 or 32 KiB ahead into the L2 cache, 0.65 with
  // 4 KiB ahead into the L1, 0.34 where the weight is in a cache.
  constexpr int64_t kAhead = 4096;
  Vector<float> sums[kRows] = {};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    // The instructions between two cache lines fill the processor's queue,
    // which so does not reach far ahead.
    prefetch_bytes<PrefetchTo::L2>(tile + chunk * kChunk + kAhead, 4 * kChunk);
    const LimbChunk<kLimbs>& x = input[chunk];
    const ChunkCompensation compensation(x.compensation);
#pragma GCC unroll 8
    for (int first = 0; first < kRows; first += kRowsTogether) {
      multiply_chunk<kLimbs, kRun, kScales>(
          tile + chunk * kChunk + first * kRun, x, compensation,
          scales + (chunk * kRows + first) * kScalesOfRow, sums + first);
    }
  }
  if constexpr (simd::kLanes<float> >= kRows) {
    Vector<float> padded[simd::kLanes<float>] = {};
    std::copy_n(sums, kRows, padded);
    const Vector<float> totals = simd::sum_each(padded);
    simd::store_partial(results, totals + simd::load_partial(results, kRows),
                        kRows);
  } else {
    for (int row = 0; row < kRows; ++row) {
      results[row] += simd::reduce_add(sums[row]);
    }
  }
}

// Eight elements: the rows of a tile.
using TileBits = simd::VectorOf<uint32_t, 4 * kTiledRows>::type;
using TileFloats = simd::VectorOf<float, 4 * kTiledRows>::type;

// The scales and the zeros of a tile's rows, of pairs of bfloat16.
[[gnu::always_inline]] inline void split_pairs(const TileBits& pairs,
                                               float* scales, float* zeros) {
  const TileBits of_scales = pairs << 16;
  const TileBits of_zeros = pairs & 0xFFFF0000U;
  std::memcpy(scales, &of_scales, sizeof(of_scales));
  std::memcpy(zeros, &of_zeros, sizeof(of_zeros));
}

// Scales and zeros of two tiles: by tile and group, eight of either. A group's
// are a cache line, far from that of the next group, often in the same set of
// the L1 cache, and where no prefetcher of the processor foresees it: it is
// read once, and the one that follows is prefetched, into the L2.
constexpr int64_t kScalesOfGroup = 2 * kTiledRows;

inline void unpack_scales(const TiledWeight& weight, int64_t tile,
                          int64_t tiles, float* to) {
  for (int64_t group = 0; group < weight.groups(); ++group) {
    const std::byte* pairs = weight.pairs(group, tile * kTiledRows);
    prefetch_line<PrefetchTo::L2>(pairs + 2 * sizeof(TileBits));
    for (int64_t i = 0; i < tiles; ++i) {
      TileBits bits;
      std::memcpy(&bits, pairs + i * sizeof(bits), sizeof(bits));
      float* at = to + (i * weight.groups() + group) * kScalesOfGroup;
      split_pairs(bits, at, at + kTiledRows);
    }
  }
}

// Writes a tile's scales times the units of the activations' chunks: a number
// for each row, or for each row and word. Sets results to the zeros' part.
template <int kLimbs>
void scale_tile(const TiledWeight& weight, const float* unpacked,
                const LimbChunk<kLimbs>* input, const float* group_sums,
                ChunkScales kind, float* scales, float* results) {
  const int64_t blocks = weight.group_size / kTiledBlock;
  constexpr int64_t kBlocks = kChunkColumns / kTiledBlock;
  const TiledLayout chunk_layout{kTiledRows, kChunkColumns,
                                 weight.layout.inner_k_tiles};
  if (kind == ChunkScales::Words && weight.layout.columns % kChunkColumns > 0) {
    const int64_t last = weight.layout.columns / kChunkColumns;
    std::fill_n(scales + last * kTiledRows * kChunkWords,
                kTiledRows * kChunkWords, 0.0F);
  }
  TileFloats zeros{};
  for (int64_t group = 0; group < weight.groups(); ++group) {
    TileFloats scale;
    TileFloats zero;
    std::memcpy(&scale, unpacked + group * kScalesOfGroup, sizeof(scale));
    std::memcpy(&zero, unpacked + group * kScalesOfGroup + kTiledRows,
                sizeof(zero));
    zeros += zero * group_sums[group];
    if (kind == ChunkScales::One) {
      for (int64_t chunk = group * blocks / kBlocks;
           chunk < (group + 1) * blocks / kBlocks; ++chunk) {
        const TileFloats scaled = scale * input[chunk].unit;
        std::memcpy(scales + chunk * kTiledRows, &scaled, sizeof(scaled));
      }
      continue;
    }
    for (int64_t block = group * blocks; block < (group + 1) * blocks;
         ++block) {
      const int64_t chunk = block / kBlocks;
      const TileFloats scaled = scale * input[chunk].unit;
      for (int64_t lane = 0; lane < 4; ++lane) {
        const int64_t word =
            ChunkOrder::word_of(chunk_layout, block % kBlocks, lane);
        for (int64_t row = 0; row < kTiledRows; ++row) {
          scales[(chunk * kTiledRows + row) * kChunkWords + word] = scaled[row];
        }
      }
    }
  }
  std::memcpy(results, &zeros, sizeof(zeros));
}

template <int kLimbs>
using RowFunction = void (*)(const uint32_t*, const LimbChunk<kLimbs>*, int64_t,
                             const float*, float*);

template <int kLimbs>
RowFunction<kLimbs> row_function(int64_t inner_k_tiles, ChunkScales kind) {
  const auto of_kind = [&]<int kRun>(std::integral_constant<int, kRun>) {
    return kind == ChunkScales::One
               ? &multiply_row<kLimbs, kRun, ChunkScales::One>
               : &multiply_row<kLimbs, kRun, ChunkScales::Words>;
  };
  switch (inner_k_tiles) {
    case 2:
      return of_kind(std::integral_constant<int, 4>{});
    case 4:
      return of_kind(std::integral_constant<int, 8>{});
    default:
      return of_kind(std::integral_constant<int, 16>{});
  }
}

// The product of all rows with the whole weight. prepare(), then multiply() of
// each range of tiles.
template <int kLimbs, class T>
class FewRows {
 public:
  FewRows(const MatrixView<T>& input, int64_t rows, const TiledWeight& weight,
          const simd::Compute<T>* bias, T* output)
      : input_(input),
        weight_(weight),
        bias_(bias),
        output_(output),
        limbs_(rows, weight.layout.columns, weight.group_size),
        scales_(weight.group_size >= kChunkColumns ? ChunkScales::One
                                                   : ChunkScales::Words),
        multiply_row_(
            row_function<kLimbs>(weight.layout.inner_k_tiles, scales_)) {}

  // False where block floating point will not do for the activations.
  bool prepare() {
    return limbs_.write(input_, ChunkOrder(weight_.layout.inner_k_tiles));
  }

  // Tiles from `begin` to `end`; scales are unpacked for two at a time.
  void multiply(int64_t begin, int64_t end) const {
    float* scales =
        Workspace::of_this_thread<Slot::TileScales>().template request<float>(
            limbs_.chunks() * scales_of_chunk());
    float* unpacked =
        Workspace::of_this_thread<Slot::UnpackedScales>()
            .template request<float>(2 * limbs_.groups() * kScalesOfGroup);
    for (int64_t tile = begin; tile < end; ++tile) {
      if (tile == begin || tile % 2 == 0) {
        unpack_scales(weight_, tile, tile % 2 == 0 && tile + 1 < end ? 2 : 1,
                      unpacked);
      }
      const bool is_second = tile % 2 == 1 && tile > begin;
      for (int64_t row = 0; row < limbs_.rows(); ++row) {
        multiply_tile(
            tile, row,
            unpacked + (is_second ? limbs_.groups() * kScalesOfGroup : 0),
            scales);
      }
    }
  }

 private:
  // Scales of a tile's rows.
  int64_t scales_of_chunk() const {
    return kTiledRows * (scales_ == ChunkScales::One ? 1 : kChunkWords);
  }

  // One row of activations times a tile.
  void multiply_tile(int64_t tile, int64_t row, const float* unpacked,
                     float* scales) const {
    const TiledLayout& layout = weight_.layout;
    const LimbChunk<kLimbs>* of_row = &limbs_.at(row, 0);
    float results[kTiledRows];
    scale_tile(weight_, unpacked, of_row, limbs_.group_sums(row), scales_,
               scales, results);
    const uint32_t* words = weight_.words + tile * layout.words_of_tile();
    const int64_t whole = layout.columns / kChunkColumns;
    multiply_row_(words, of_row, whole, scales, results);
    if (whole < limbs_.chunks()) {
      // The last chunk of a weight whose columns do not fill it.
      uint32_t last[kTiledRows * kChunkWords] = {};
      std::copy_n(words + whole * kTiledRows * kChunkWords,
                  layout.columns % kChunkColumns, last);
      multiply_row_(last, of_row + whole, 1, scales + whole * scales_of_chunk(),
                    results);
    }
    T* to = output_ + row * layout.rows + tile * kTiledRows;
    for (int64_t i = 0; i < kTiledRows; ++i) {
      const float added = bias_ ? bias_[tile * kTiledRows + i] : 0;
      to[i] = static_cast<T>(results[i] + added);
    }
  }

  MatrixView<T> input_;
  const TiledWeight& weight_;
  const simd::Compute<T>* bias_;
  T* output_;
  LimbRows<kLimbs> limbs_;
  ChunkScales scales_;
  RowFunction<kLimbs> multiply_row_;
};

}  // namespace detail

// As multiply_many_rows; false, with nothing written, where block floating
// point will not do for the activations.
template <int kLimbs, class T>
bool multiply_few_rows(const MatrixView<T>& input, int64_t rows,
                       const TiledWeight& weight, const simd::Compute<T>* bias,
                       T* output, int64_t threads) {
  detail::FewRows<kLimbs, T> product(input, rows, weight, bias, output);
  if (!product.prepare()) {
    return false;
  }
  const int64_t tiles = weight.layout.rows / kTiledRows;
  const int64_t tile_bytes = 4 * weight.layout.columns;
  parallel_for(
      tiles, threads > 1 ? grain_of(kElementGrain, tile_bytes) : tiles,
      [&](int64_t begin, int64_t end) { product.multiply(begin, end); });
  return true;
}

}  // namespace pkg::cpu
