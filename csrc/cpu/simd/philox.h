// Philox of host/philox.h, registers of counters at a time: counters in the low
// halves of 64-bit lanes, where the product of two of them has its place. A
// round is two products, two shifts and two three-operand exclusive ors, one
// after the other, so that several registers go side by side.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/simd/simd.h"
#include "cpu/simd/transpose.h"
#include "host/philox.h"

namespace pkg::simd {

namespace detail {

// The products of the low halves of 64-bit lanes.
inline Vector<uint64_t> multiply_low_halves(Vector<uint64_t> a,
                                            Vector<uint64_t> b) {
#if defined(__AVX512F__)
  return std::bit_cast<Vector<uint64_t>>(_mm512_maskz_mul_epu32(
      0xFF, std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return std::bit_cast<Vector<uint64_t>>(
      _mm256_mul_epu32(std::bit_cast<__m256i>(a), std::bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return std::bit_cast<Vector<uint64_t>>(
      _mm_mul_epu32(std::bit_cast<__m128i>(a), std::bit_cast<__m128i>(b)));
#elif defined(__aarch64__)
  return std::bit_cast<Vector<uint64_t>>(
      vmull_u32(vmovn_u64(std::bit_cast<uint64x2_t>(a)),
                vmovn_u64(std::bit_cast<uint64x2_t>(b))));
#else
  return (a & 0xFFFFFFFFU) * (b & 0xFFFFFFFFU);
#endif
}

}  // namespace detail

// The key of each round.
class PhiloxKeys {
 public:
  explicit PhiloxKeys(int64_t seed) {
    auto low = static_cast<uint32_t>(seed);
    auto high = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    for (auto& key : keys_) {
      key[0] = low;
      key[1] = high;
      low += kPhiloxWeyl0;
      high += kPhiloxWeyl1;
    }
  }
  uint64_t at(int round, int half) const { return keys_[round][half]; }

 private:
  uint64_t keys_[kPhiloxRounds][2];
};

// Quads of columns whose words a register of counters gives, which are two
// registers.
inline constexpr int kPhiloxQuads = kLanes<uint64_t>;

// The words of dropout_words() of the kCount * kPhiloxQuads quads from `quad`
// on, in the order of the columns.
template <int kCount>
inline void dropout_words(const PhiloxKeys& keys, int64_t batch, int64_t row,
                          int64_t quad, Vector<uint32_t> (&words)[kCount][2]) {
  using Wide = Vector<uint64_t>;
  const auto low = [](uint64_t value) {
    return Wide{} + static_cast<uint32_t>(value);
  };
  // Interleaving the words of a quad takes the even lanes of each 128 bits
  // first and then the odd ones; so are the counters laid out.
  Wide order{};
  for (int lane = 0; lane < kPhiloxQuads; ++lane) {
    order[lane] =
        static_cast<uint64_t>(lane / 2 + lane % 2 * (kPhiloxQuads / 2));
  }
  Wide counters[kCount][4];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    counters[i][0] = low(static_cast<uint64_t>(quad)) + order +
                     static_cast<uint64_t>(i * kPhiloxQuads);
    counters[i][1] = low(static_cast<uint64_t>(row));
    counters[i][2] = low(static_cast<uint64_t>(batch));
    counters[i][3] = low(static_cast<uint64_t>(batch) >> 32);
  }
#pragma GCC unroll 16
  for (int round = 0; round < kPhiloxRounds; ++round) {
    // What the high halves hold besides does not enter the next product.
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      Wide(&counter)[4] = counters[i];
      const Wide product_0 =
          detail::multiply_low_halves(counter[0], low(kPhiloxMultiplier0));
      const Wide product_1 =
          detail::multiply_low_halves(counter[2], low(kPhiloxMultiplier1));
      counter[0] = (product_1 >> 32) ^ counter[1] ^ low(keys.at(round, 0));
      counter[1] = product_1;
      counter[2] = (product_0 >> 32) ^ counter[3] ^ low(keys.at(round, 1));
      counter[3] = product_0;
    }
  }
  const auto pair = [](Wide first, Wide second) {
    return (first & 0xFFFFFFFFU) | (second << 32);
  };
  constexpr auto kSequence = std::make_index_sequence<kPhiloxQuads>{};
  using detail::Interleaved;
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    const Wide front = pair(counters[i][0], counters[i][1]);
    const Wide back = pair(counters[i][2], counters[i][3]);
    words[i][0] = std::bit_cast<Vector<uint32_t>>(
        detail::shuffle<Interleaved<kPhiloxQuads, 2, 1, 0>>(front, back,
                                                            kSequence));
    words[i][1] = std::bit_cast<Vector<uint32_t>>(
        detail::shuffle<Interleaved<kPhiloxQuads, 2, 1, 1>>(front, back,
                                                            kSequence));
  }
}

}  // namespace pkg::simd
