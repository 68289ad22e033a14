// PyTorch's bernoulli_ of one probability, to the last element: the same draws
// of the same generator (pkg/_accelerate_dropout.py).
//
// An element takes two words: of the 64 bits the lowest 53, as a fraction of 1,
// are compared with the probability. PyTorch makes element after element, with
// one thread. Here the states of the generator that chunks of elements begin
// with are found first, with one thread, so that the generator is moved on
// before the chunks are made, by all threads: blocks are made twice.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/accelerate/mersenne_twister.h"
#include "cpu/runtime/parallel.h"
#include "host/compiler.h"
#include "host/integer_math.h"

namespace pkg::cpu::accelerate {

namespace {

constexpr int kWords = MersenneTwister::kWords;
constexpr int kChunkBlocks = 64;
constexpr int kWordsOfElement = 2;

// What Generator.get_state() of a CPU generator begins with
// (CPUGeneratorImplStateLegacy of ATen/CPUGeneratorImpl.cpp).
struct SavedGenerator {
  uint64_t seed;
  int32_t left;  // words of the block that are not drawn yet, and one
  int32_t seeded;
  uint64_t next;  // the word of the block that is drawn next
  uint64_t state[kWords];
};

// Where the elements of a draw lie in blocks of words, of which the first is
// the generator's when it begins.
struct Draw {
  int64_t begin;  // the first word, of the first block: kWords where all of it
                  // has been drawn before
  int64_t count;  // of elements

  // The first element that begins in a block or behind.
  int64_t first_element(int64_t block) const {
    const int64_t words = block * kWords - begin;
    return words <= 0 ? 0 : std::min(count, ceil_div(words, kWordsOfElement));
  }
  int64_t chunks() const {
    return ceil_div(begin + count * kWordsOfElement,
                    int64_t{kChunkBlocks} * kWords);
  }
};

Draw draw_of(int32_t left, int64_t count) { return {kWords + 1 - left, count}; }

// Elements of the pairs of words: `one` where a pair is below the threshold.
template <class Element>
void compare(const uint32_t* words, int64_t threshold, uint64_t one,
             Element* elements, int64_t count) {
  constexpr uint64_t kHighBits = (uint64_t{1} << 21) - 1;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t pair;
    std::memcpy(&pair, words + kWordsOfElement * i, sizeof(pair));
    // The word that was drawn first is the higher one.
    const auto drawn =
        static_cast<int64_t>(((pair & kHighBits) << 32) | (pair >> 32));
    elements[i] = static_cast<Element>(drawn < threshold ? one : 0);
  }
}

template <class Element>
void fill_chunk(const Draw& draw, const uint32_t* state, int64_t chunk,
                int64_t threshold, uint64_t one, Element* elements) {
  const int64_t block = chunk * kChunkBlocks;
  const int64_t end = draw.first_element(block + kChunkBlocks);
  int64_t element = draw.first_element(block);
  int64_t skipped = draw.begin + element * kWordsOfElement - block * kWords;
  MersenneTwister twister;
  std::copy_n(state, kWords, twister.state);
  // A word of the block before, where an element begins with it, and a block.
  uint32_t words[1 + kWords];
  bool has_word_before = false;
  while (element < end) {
    twister.temper(words + 1);
    const int64_t from = has_word_before ? 0 : 1 + skipped;
    const int64_t available = 1 + kWords - from;
    const int64_t made = std::min(available / kWordsOfElement, end - element);
    compare(words + from, threshold, one, elements + element, made);
    element += made;
    has_word_before = available % kWordsOfElement != 0;
    skipped = 0;
    words[0] = words[kWords];
    twister.twist();
  }
}

template <class Element>
void fill(const Draw& draw, const uint32_t* states, int64_t threshold,
          uint64_t one, void* elements) {
  parallel_for(draw.chunks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      fill_chunk(draw, states + chunk * kWords, chunk, threshold, one,
                 static_cast<Element*>(elements));
    }
  });
}

}  // namespace

}  // namespace pkg::cpu::accelerate

// The bytes of the states that a draw of so many elements is made from, by a
// generator whose get_state() is `saved`.
extern "C" PKG_EXPORT int64_t pkg_accelerate_draw_bytes(const void* saved,
                                                        int64_t count) {
  using namespace pkg::cpu::accelerate;
  SavedGenerator generator;
  std::memcpy(&generator, saved, sizeof(generator));
  return draw_of(generator.left, count).chunks() *
         static_cast<int64_t>(sizeof(MersenneTwister));
}

// Those states; `saved` becomes the generator's state after the draw. Returns
// its `left` of before, for pkg_accelerate_bernoulli.
extern "C" PKG_EXPORT int32_t pkg_accelerate_draw(void* saved, int64_t count,
                                                  uint32_t* states) {
  using namespace pkg::cpu::accelerate;
  SavedGenerator generator;
  std::memcpy(&generator, saved, sizeof(generator));
  const int32_t left = generator.left;
  const Draw draw = draw_of(left, count);
  const int64_t last_word = draw.begin + count * kWordsOfElement - 1;
  const int64_t last_block = last_word / kWords;
  MersenneTwister twister;
  std::copy_n(generator.state, kWords, twister.state);
  for (int64_t block = 0;; ++block) {
    if (block % kChunkBlocks == 0) {
      std::copy_n(twister.state, kWords,
                  states + block / kChunkBlocks * kWords);
    }
    if (block == last_block) {
      break;
    }
    twister.twist();
  }
  std::copy_n(twister.state, kWords, generator.state);
  generator.next = static_cast<uint64_t>(last_word % kWords + 1);
  generator.left = kWords + 1 - static_cast<int32_t>(generator.next);
  std::memcpy(saved, &generator, sizeof(generator));
  return left;
}

// Elements of 1, 2, 4 or 8 bytes from states that pkg_accelerate_draw made:
// `one` where an element's 53 bits are below the threshold, else zeros.
extern "C" PKG_EXPORT void pkg_accelerate_bernoulli(int32_t left, int64_t count,
                                                    const uint32_t* states,
                                                    int64_t threshold,
                                                    uint64_t one, int size,
                                                    void* elements) {
  using namespace pkg::cpu::accelerate;
  const Draw draw = draw_of(left, count);
  switch (size) {
    case 1:
      return fill<uint8_t>(draw, states, threshold, one, elements);
    case 2:
      return fill<uint16_t>(draw, states, threshold, one, elements);
    case 4:
      return fill<uint32_t>(draw, states, threshold, one, elements);
    case 8:
      return fill<uint64_t>(draw, states, threshold, one, elements);
  }
}
