// The engine of PyTorch's CPU generator (ATen/core/MT19937RNGEngine.h), a block
// of words at a time in the place of a word at a time.
//
// Algorithm: MT19937 (Matsumoto and Nishimura, "Mersenne Twister", 1998). A
// block follows from the one before: each word from three that lie 1, 397 and
// 624 words behind it, so that whole registers of them are made at a time.
#pragma once

#include <cstdint>

namespace pkg::cpu::accelerate {

class MersenneTwister {
 public:
  static constexpr int kWords = 624;  // of a block
  using Block = uint32_t[kWords];

  Block state;

  // The next block.
  void twist() {
    constexpr int kAhead = 397;
    constexpr int kBehind = kWords - kAhead;
    for (int i = 0; i < kBehind; ++i) {
      state[i] = state[i + kAhead] ^ mixed(state[i], state[i + 1]);
    }
    for (int i = kBehind; i < kWords - 1; ++i) {
      state[i] = state[i - kBehind] ^ mixed(state[i], state[i + 1]);
    }
    state[kWords - 1] = state[kAhead - 1] ^ mixed(state[kWords - 1], state[0]);
  }

  // What is drawn, of the block.
  void temper(uint32_t* words) const {
    for (int i = 0; i < kWords; ++i) {
      uint32_t word = state[i];
      word ^= word >> 11;
      word ^= (word << 7) & 0x9D2C5680U;
      word ^= (word << 15) & 0xEFC60000U;
      words[i] = word ^ (word >> 18);
    }
  }

 private:
  static uint32_t mixed(uint32_t high, uint32_t low) {
    constexpr uint32_t kLowBits = 0x7FFFFFFFU;
    const uint32_t both = (high & ~kLowBits) | (low & kLowBits);
    return (both >> 1) ^ ((0 - (low & 1)) & 0x9908B0DFU);
  }
};

}  // namespace pkg::cpu::accelerate
