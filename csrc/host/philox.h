// Counter-based random numbers, the same on the host and on a CUDA device.
//
// Philox4x32-7 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3" (SC 2011): a keyed bijection of a 128-bit counter. Any word
// of the stream is found from its coordinates alone, so a dropout mask needs no
// memory and no order of evaluation: forward and backward, tiles of any shape,
// any number of threads and either kind of device draw the same bits.
#pragma once

#include <cstdint>

#include "host/compiler.h"

namespace pkg {

struct PhiloxCounter {
  uint32_t words[4];
};

struct PhiloxKey {
  uint32_t words[2];
};

// The fewest with which the authors find no fault by TestU01's BigCrush; ten,
// their choice for all purposes, cost bfloat16 attention a twentieth more.
inline constexpr int kPhiloxRounds = 7;
inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9;  // the golden ratio
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85;  // sqrt(3) - 1

PKG_HOST_DEVICE PhiloxCounter philox_4x32_7(PhiloxCounter counter,
                                            PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product_0 = uint64_t{kPhiloxMultiplier0} * counter.words[0];
    const uint64_t product_1 = uint64_t{kPhiloxMultiplier1} * counter.words[2];
    counter = {{static_cast<uint32_t>(product_1 >> 32) ^ counter.words[1] ^
                    key.words[0],
                static_cast<uint32_t>(product_1),
                static_cast<uint32_t>(product_0 >> 32) ^ counter.words[3] ^
                    key.words[1],
                static_cast<uint32_t>(product_0)}};
    key.words[0] += kPhiloxWeyl0;
    key.words[1] += kPhiloxWeyl1;
  }
  return counter;
}

// The random words of the four columns 4 * column_quad ... 4 * column_quad + 3
// of one row of attention weights. Distinct elements have distinct counters as
// long as there are at most 2^32 rows and 2^34 columns.
PKG_HOST_DEVICE PhiloxCounter dropout_words(int64_t seed, int64_t batch,
                                            int64_t row, int64_t column_quad) {
  const uint64_t seed_bits = static_cast<uint64_t>(seed);
  const uint64_t batch_bits = static_cast<uint64_t>(batch);
  const PhiloxCounter counter = {{static_cast<uint32_t>(column_quad),
                                  static_cast<uint32_t>(row),
                                  static_cast<uint32_t>(batch_bits),
                                  static_cast<uint32_t>(batch_bits >> 32)}};
  const PhiloxKey key = {{static_cast<uint32_t>(seed_bits),
                          static_cast<uint32_t>(seed_bits >> 32)}};
  return philox_4x32_7(counter, key);
}

// A word below the threshold drops its element. 64 bits, because a probability
// of one drops every word and so needs 2^32.
PKG_HOST_DEVICE uint64_t dropout_keep_threshold(double dropout_probability) {
  return static_cast<uint64_t>(dropout_probability * 4294967296.0);
}

PKG_HOST_DEVICE bool dropout_keeps(uint32_t word, uint64_t keep_threshold) {
  return word >= keep_threshold;
}

// One element alone; four neighbours share the work of dropout_words.
PKG_HOST_DEVICE bool dropout_keeps(int64_t seed, int64_t batch, int64_t row,
                                   int64_t column, uint64_t keep_threshold) {
  return dropout_keeps(
      dropout_words(seed, batch, row, column / 4).words[column % 4],
      keep_threshold);
}

}  // namespace pkg
