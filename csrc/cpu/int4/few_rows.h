// A few rows of activations times a 4-bit weight: integer dot products of the
// weight's four-bit values with the digits of the activations
// (cpu/int4/limbs.h), scaled by chunks of 128 columns.
//
// A chunk of a row of the weight is 64 bytes: with AVX-512 one register, of
// which the lower and the upper halves of all bytes are two operands of
// unsigned bytes. VPDPBUSD then makes 64 products, so that a register of 128
// weights costs 3 logical instructions, 2 dot products a digit and 6 others (to
// add the digits up, convert and scale the sum) for each row of activations.
// Tables of the values in a register, and multiply-adds in bfloat16 or float32,
// would take 12 or 24 instructions for the products alone. Without VNNI, pairs
// of products are added in 16 bits: 15 2^7 2 each, eight at the most, so that
// they do not overflow.
//
// Bytes: the weight once, K N / 2, and its scales. Bound by reading it for one
// row; more rows find a tile of it (8 K / 2 bytes) in the L1 cache.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/gemm/packing.h"
#include "cpu/int4/limbs.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/workspace.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"

namespace pkg::cpu {

namespace detail {

inline constexpr int kLanes32 = simd::kLanes<int32_t>;
// Registers that a chunk of a row takes.
inline constexpr int kChunkVectors = kChunkWords / kLanes32;

// How a chunk is scaled: by one number (groups of whole chunks), or by one for
// each word.
enum class ChunkScales { One, Words };

// The sums of unsigned by signed bytes in groups of four.
#if defined(__AVX512VNNI__)
struct ByteSums {
  static constexpr bool kStartsAnywhere = true;
  __m512i sums = _mm512_setzero_si512();

  void start(Vector<int32_t> value) { sums = std::bit_cast<__m512i>(value); }

  void add(Vector<uint32_t> values, const int8_t* digits) {
    sums = _mm512_dpbusd_epi32(sums, std::bit_cast<__m512i>(values),
                               _mm512_load_si512(digits));
  }
  Vector<int32_t> total() const { return std::bit_cast<Vector<int32_t>>(sums); }
};
#elif defined(__SSSE3__)
struct ByteSums {
#if defined(__AVX512BW__)
  using Register = __m512i;
  static Register multiply(Register values, Register digits) {
    return _mm512_maddubs_epi16(values, digits);
  }
  static Register add_pairs(Register sums) {
    return _mm512_madd_epi16(sums, _mm512_set1_epi16(1));
  }
#elif defined(__AVX2__)
  using Register = __m256i;
  static Register multiply(Register values, Register digits) {
    return _mm256_maddubs_epi16(values, digits);
  }
  static Register add_pairs(Register sums) {
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
  }
#else
  using Register = __m128i;
  static Register multiply(Register values, Register digits) {
    return _mm_maddubs_epi16(values, digits);
  }
  static Register add_pairs(Register sums) {
    return _mm_madd_epi16(sums, _mm_set1_epi16(1));
  }
#endif
  static constexpr bool kStartsAnywhere = false;
  Vector<int16_t> sums{};

  void start(Vector<int32_t>) {}

  void add(Vector<uint32_t> values, const int8_t* digits) {
    const auto signed_bytes = std::bit_cast<Register>(
        simd::load(reinterpret_cast<const uint32_t*>(digits)));
    sums += std::bit_cast<Vector<int16_t>>(
        multiply(std::bit_cast<Register>(values), signed_bytes));
  }
  Vector<int32_t> total() const {
    return std::bit_cast<Vector<int32_t>>(
        add_pairs(std::bit_cast<Register>(sums)));
  }
};
#else
struct ByteSums {
  static constexpr bool kStartsAnywhere = true;
  Vector<int32_t> sums{};

  void start(Vector<int32_t> value) { sums = value; }

  void add(Vector<uint32_t> values, const int8_t* digits) {
    const auto all = std::bit_cast<Vector<uint32_t>>(
        simd::load(reinterpret_cast<const uint32_t*>(digits)));
    for (int byte = 0; byte < 4; ++byte) {
      const auto value =
          std::bit_cast<Vector<int32_t>>(values >> (8 * byte) & 0xFFU);
      sums += value *
              (std::bit_cast<Vector<int32_t>>(all << (24 - 8 * byte)) >> 24);
    }
  }
  Vector<int32_t> total() const { return sums; }
};
#endif

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

// Adds what a row of activations gives for eight rows of the weight.
template <int kDigits, int kRun, ChunkScales kScales>
void multiply_row(const uint32_t* tile, const DigitChunk<kDigits>* input,
                  int64_t chunks, const float* scales, float* results) {
  constexpr int kRows = static_cast<int>(kTiledRows);
  // Rows side by side: what waits for a result is not next in line then, and
  // does not fill the processor's queue.
  constexpr int kTogether = simd::kVectorRegisters < 32 ? 1 : 2;
  // Words from one row of a chunk to the next, and from chunk to chunk.
  constexpr int64_t kSupertile = kRows * kRun;
  constexpr int64_t kStride = kRows * kChunkWords;
  // Words. One row of activations times 4096 x 4096 from memory, on a Zen 4:
  // 0.45 ms in bfloat16 with 8, 16 or 32 KiB ahead into the L2 cache, 0.65 with
  // 4 KiB ahead into the L1, 0.34 where the weight is in a cache.
  constexpr int64_t kAhead = 4096;
  const Vector<uint32_t> mask = Vector<uint32_t>{} + 0x0F0F0F0FU;
  Vector<float> sums[kRows] = {};
  const auto add_up = [&](const ByteSums(&of_digits)[kDigits],
                          Vector<int32_t> correction) {
    Vector<int32_t> total = of_digits[kDigits - 1].total();
    for (int digit = kDigits - 1; digit-- > 0;) {
      total = (total << 8) + of_digits[digit].total();
    }
    if constexpr (!ByteSums::kStartsAnywhere) {
      total += correction;
    }
    return __builtin_convertvector(total, Vector<float>);
  };
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const DigitChunk<kDigits>& x = input[chunk];
    // The instructions between two cache lines fill the processor's queue,
    // which so does not reach far ahead.
    for (int64_t word = 0; word < kStride; word += 16) {
      __builtin_prefetch(tile + chunk * kStride + kAhead + word, 0, 2);
    }
    Vector<int32_t> corrections[kChunkVectors];
    Vector<int32_t> correction{};
    for (int v = 0; v < kChunkVectors; ++v) {
      corrections[v] = simd::load(x.corrections + v * kLanes32);
      correction += corrections[v];
    }
#pragma GCC unroll 8
    for (int first = 0; first < kRows; first += kTogether) {
      const uint32_t* words = tile + chunk * kStride + first * kRun;
      ByteSums of_digits[kTogether][kDigits];
      for (int row = 0; row < kTogether; ++row) {
        of_digits[row][0].start(correction);
      }
#pragma GCC unroll 4
      for (int v = 0; v < kChunkVectors; ++v) {
        if constexpr (kScales == ChunkScales::Words) {
          for (int row = 0; row < kTogether; ++row) {
            for (int digit = 0; digit < kDigits; ++digit) {
              of_digits[row][digit] = {};
            }
            of_digits[row][0].start(corrections[v]);
          }
        }
        Vector<uint32_t> halves[2][kTogether];
        for (int row = 0; row < kTogether; ++row) {
          const Vector<uint32_t> pairs =
              load_chunk<kRun>(words + row * kRun, kSupertile, v * kLanes32);
          halves[0][row] = pairs & mask;
          halves[1][row] = (pairs >> 4) & mask;
        }
        for (int half = 0; half < 2; ++half) {
          for (int digit = 0; digit < kDigits; ++digit) {
            for (int row = 0; row < kTogether; ++row) {
              of_digits[row][digit].add(
                  halves[half][row], x.digits[digit][half] + v * kLanes32 * 4);
            }
          }
        }
        if constexpr (kScales == ChunkScales::Words) {
          for (int row = 0; row < kTogether; ++row) {
            sums[first + row] +=
                add_up(of_digits[row], corrections[v]) *
                simd::load(scales +
                           (chunk * kRows + first + row) * kChunkWords +
                           v * kLanes32);
          }
        }
      }
      if constexpr (kScales == ChunkScales::One) {
        for (int row = 0; row < kTogether; ++row) {
          sums[first + row] += add_up(of_digits[row], correction) *
                               scales[chunk * kRows + first + row];
        }
      }
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

// Eight lanes: the rows of a tile.
using TileBits = simd::VectorOf<uint32_t, 4 * kTiledRows>::type;
using TileFloats = simd::VectorOf<float, 4 * kTiledRows>::type;

// Scales and zeros of two tiles: by tile and group, eight of either. A group's
// are a cache line, far from that of the next group, often in the same set of
// the L1 cache, and where no prefetcher of the processor foresees it: it is
// read once, and the one that follows is asked for, into the L2.
constexpr int64_t kScalesOfGroup = 2 * kTiledRows;

inline void unpack_scales(const TiledWeight& weight, int64_t tile,
                          int64_t tiles, float* to) {
  for (int64_t group = 0; group < weight.groups(); ++group) {
    const std::byte* pairs = weight.pairs(group, tile * kTiledRows);
    __builtin_prefetch(pairs + 2 * sizeof(TileBits), 0, 2);
    for (int64_t i = 0; i < tiles; ++i) {
      TileBits bits;
      std::memcpy(&bits, pairs + i * sizeof(bits), sizeof(bits));
      float* at = to + (i * weight.groups() + group) * kScalesOfGroup;
      const TileBits of_scales = bits << 16;
      const TileBits of_zeros = bits & 0xFFFF0000U;
      std::memcpy(at, &of_scales, sizeof(bits));
      std::memcpy(at + kTiledRows, &of_zeros, sizeof(bits));
    }
  }
}

// Writes a tile's scales times the units of the activations' chunks: a number
// for each row, or for each row and word. Sets results to the zeros' part.
template <int kDigits>
void scale_tile(const TiledWeight& weight, const float* unpacked,
                const DigitChunk<kDigits>* input, const float* group_sums,
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

template <int kDigits>
using RowFunction = void (*)(const uint32_t*, const DigitChunk<kDigits>*,
                             int64_t, const float*, float*);

template <int kDigits>
RowFunction<kDigits> row_function(int64_t inner_k_tiles, ChunkScales kind) {
  const auto of_kind = [&]<int kRun>(std::integral_constant<int, kRun>) {
    return kind == ChunkScales::One
               ? &multiply_row<kDigits, kRun, ChunkScales::One>
               : &multiply_row<kDigits, kRun, ChunkScales::Words>;
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

}  // namespace detail

// As multiply_many_rows; false, with nothing written, where fixed point will
// not do for the activations.
template <int kDigits, class T>
bool multiply_few_rows(const MatrixView<T>& input, int64_t rows,
                       const TiledWeight& weight, const simd::Compute<T>* bias,
                       T* output, int64_t threads) {
  using Chunk = DigitChunk<kDigits>;
  constexpr int64_t kBlocks = kChunkColumns / kTiledBlock;
  const TiledLayout& layout = weight.layout;
  const int64_t chunks = (layout.columns + kChunkColumns - 1) / kChunkColumns;
  const int64_t whole = layout.columns / kChunkColumns;
  const int64_t groups = weight.groups();
  Chunk* digits =
      Workspace::of_this_thread<0>().template request<Chunk>(rows * chunks);
  float* block_sums = Workspace::of_this_thread<1>().template request<float>(
      rows * chunks * kBlocks + rows * groups);
  float* group_sums = block_sums + rows * chunks * kBlocks;
  const ChunkOrder order(layout.inner_k_tiles);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t column = chunk * kChunkColumns;
      const int64_t at = row * chunks + chunk;
      if (!write_digits(input.at(row, column), input.column_stride,
                        std::min(kChunkColumns, layout.columns - column), order,
                        digits[at], block_sums + at * kBlocks)) {
        return false;
      }
    }
    const int64_t blocks = weight.group_size / kTiledBlock;
    for (int64_t group = 0; group < groups; ++group) {
      float sum = 0;
      for (int64_t block = 0; block < blocks; ++block) {
        sum += block_sums[row * chunks * kBlocks + group * blocks + block];
      }
      group_sums[row * groups + group] = sum;
    }
  }
  const auto kind = weight.group_size >= kChunkColumns
                        ? detail::ChunkScales::One
                        : detail::ChunkScales::Words;
  const auto function =
      detail::row_function<kDigits>(layout.inner_k_tiles, kind);
  const int64_t tiles = layout.rows / kTiledRows;
  const int64_t per_chunk =
      kTiledRows * (kind == detail::ChunkScales::One ? 1 : kChunkWords);
  // Bytes of the weight that a thread should have at the least.
  constexpr int64_t kGrain = 32768;
  parallel_for(
      tiles,
      threads > 1 ? std::max<int64_t>(
                        kGrain / std::max<int64_t>(4 * layout.columns, 1), 1)
                  : tiles,
      [&](int64_t begin, int64_t end) {
        float* scales = Workspace::of_this_thread<2>().template request<float>(
            chunks * per_chunk);
        float* unpacked =
            Workspace::of_this_thread<3>().template request<float>(
                2 * groups * detail::kScalesOfGroup);
        for (int64_t tile = begin; tile < end; ++tile) {
          if (tile == begin || tile % 2 == 0) {
            detail::unpack_scales(weight, tile,
                                  tile % 2 == 0 && tile + 1 < end ? 2 : 1,
                                  unpacked);
          }
          const float* of_tile =
              unpacked + (tile % 2 == 1 && tile > begin
                              ? groups * detail::kScalesOfGroup
                              : 0);
          for (int64_t row = 0; row < rows; ++row) {
            const Chunk* of_row = digits + row * chunks;
            float results[kTiledRows];
            detail::scale_tile(weight, of_tile, of_row,
                               group_sums + row * groups, kind, scales,
                               results);
            const uint32_t* words =
                weight.words + tile * layout.words_of_tile();
            function(words, of_row, whole, scales, results);
            if (whole < chunks) {
              // The last chunk of a weight whose columns do not fill it.
              uint32_t last[kTiledRows * kChunkWords] = {};
              std::copy_n(words + whole * kTiledRows * kChunkWords,
                          layout.columns % kChunkColumns, last);
              function(last, of_row + whole, 1, scales + whole * per_chunk,
                       results);
            }
            T* to = output + row * layout.rows + tile * kTiledRows;
            for (int64_t i = 0; i < kTiledRows; ++i) {
              const float added = bias ? bias[tile * kTiledRows + i] : 0;
              to[i] = static_cast<T>(results[i] + added);
            }
          }
        }
      });
  return true;
}

}  // namespace pkg::cpu
