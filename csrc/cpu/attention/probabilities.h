// The softmax probabilities P as the left operand of a product, and how exact
// they are. The forward pass does not normalise them: they are
// exp(score - maximum so far), and the output is divided by their sum at the
// end.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// Probabilities are held as the numbers that they are, in place of the scores,
// or as pairs of bfloat16 of the same row, the k-groups of the dot product
// instructions. Rounded ones are summed as such: the output of values that have
// a mean would not have it otherwise, nor D of the backward pass, where it is
// most of D.
template <class Arithmetic>
struct ProbabilityFormat {
  using Element = typename Arithmetic::Accumulator;
  // Returns the sum of what is stored and what is there.
  static Vector<Element> store(Element* to, Vector<Element> probabilities,
                               Vector<Element> sum = Vector<Element>{}) {
    simd::store(to, probabilities);
    return sum + probabilities;
  }
  // Of a row's registers, one or two of which follow one another.
  template <int kVectors>
  static Vector<Element> store_row(Element* to,
                                   const Vector<Element>* probabilities,
                                   Vector<Element> sum) {
    for (int v = 0; v < kVectors; ++v) {
      sum = store(to + v * simd::kLanes<Element>, probabilities[v], sum);
    }
    return sum;
  }
};
#if defined(PKG_HAS_BFLOAT16_DOT)
template <>
struct ProbabilityFormat<Bfloat16Dot> {
  using Element = uint16_t;
  static Vector<float> store(uint16_t* to, Vector<float> probabilities,
                             Vector<float> sum = Vector<float>{}) {
    const auto bits = simd::bfloat16_of_normals(probabilities);
    std::memcpy(to, &bits, sizeof(bits));
    constexpr uint32_t kOne = 0x3F80;  // and 0 in the other half
    return Bfloat16Dot::multiply_add(simd::detail::widen(bits),
                                     simd::broadcast(kOne), sum);
  }
  template <int kVectors>
  static Vector<float> store_row(uint16_t* to,
                                 const Vector<float>* probabilities,
                                 Vector<float> sum) {
    if constexpr (kVectors == 2) {
      const auto bits =
          simd::bfloat16_of_normals(probabilities[0], probabilities[1]);
      std::memcpy(to, &bits, sizeof(bits));
      constexpr uint32_t kOnes = 0x3F803F80;
      return Bfloat16Dot::multiply_add(bits, simd::broadcast(kOnes), sum);
    } else {
      static_assert(kVectors == 1);
      return store(to, probabilities[0], sum);
    }
  }
};
#endif
template <class Arithmetic>
using Probability = typename ProbabilityFormat<Arithmetic>::Element;

// Whether probabilities are computed to the last bit of their type: they are as
// exact as what they are rounded to.
template <class Input>
inline constexpr bool kPreciseProbabilities =
    std::is_same_v<Input, simd::Compute<Input>>;

// Whether probabilities and score gradients are rounded to be multiplied.
template <class Arithmetic>
inline constexpr bool kRoundsProbabilities =
    !std::is_same_v<Probability<Arithmetic>, typename Arithmetic::Accumulator>;

}  // namespace pkg::cpu::attention
