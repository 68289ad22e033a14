// Keys and values as the decoding way reads them: elements where they lie, and
// a block's addresses (which decode_blocks.h finds).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// The most keys of a block, which is also the accumulation length of P V: fewer
// where for want of a fused multiply-add each product is rounded.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr int64_t kDecodeKeys = 64;
#else
inline constexpr int64_t kDecodeKeys = 32;
#endif

// Contiguous elements as registers of numbers: one register, and two of
// bfloat16, the even elements and the odd ones, since a shift and a mask are
// all that it takes to convert a word of two.
template <class Input>
struct Chunk {
  using Number = simd::Compute<Input>;
  static constexpr bool kPairs = std::is_same_v<Input, BFloat16>;
  static constexpr int kParts = kPairs ? 2 : 1;
  static constexpr int kSize = kParts * simd::kLanes<Number>;

  Vector<Number> parts[kParts];

  static Chunk load(const Input* from) {
    if constexpr (kPairs) {
      Vector<uint32_t> words;
      std::memcpy(&words, from, sizeof(words));
      return of_words(words);
    } else {
      return {{simd::load(from)}};
    }
  }

  // The other elements are zero.
  static Chunk load_partial(const Input* from, int count) {
    if constexpr (kPairs) {
#if defined(__AVX512BW__)
      return of_words(std::bit_cast<Vector<uint32_t>>(_mm512_maskz_loadu_epi16(
          static_cast<__mmask32>((uint64_t{1} << count) - 1), from)));
#else
      uint16_t elements[kSize] = {};
      std::memcpy(elements, from, static_cast<size_t>(count) * sizeof(Input));
      Vector<uint32_t> words;
      std::memcpy(&words, elements, sizeof(words));
      return of_words(words);
#endif
    } else {
      return {{simd::load_partial(from, count)}};
    }
  }

  // The lane of the registers, counted through, that contiguous element i is
  // in.
  static int64_t lane_of(int64_t i) {
    if constexpr (kPairs) {
      const int64_t inside = i % kSize;
      return i - inside + inside / 2 + inside % 2 * simd::kLanes<Number>;
    } else {
      return i;
    }
  }

 private:
  static Chunk of_words(Vector<uint32_t> words) {
    if constexpr (kPairs) {
      return {{std::bit_cast<Vector<float>>(words << 16),
               std::bit_cast<Vector<float>>(words & 0xFFFF0000U)}};
    }
  }
};

// Where the keys and values of a block lie.
template <class Input>
struct KeyBlock {
  int64_t count = 0;
  const Input* keys[kDecodeKeys];
  const Input* values[kDecodeKeys];

  void fill_up(int64_t from, const Input* key, const Input* value) {
    std::fill(keys + from, keys + kDecodeKeys, key);
    std::fill(values + from, values + kDecodeKeys, value);
  }
};

}  // namespace pkg::cpu::attention
