// The softmax of a block relative to the rows' maxima so far: when it may be
// made so, and of which masks.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/attention/mask.h"
#include "cpu/attention/prefetch.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/softmax_state.h"
#include "cpu/attention/softmax_tile.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

// A strip of `height` rows, `used` of which exist, against some keys.
struct StripOfKeys {
  int64_t row;
  int used;
  int height;
  int64_t first;
  int64_t count;
};

// Calls softmax(mask_rows, to_prefetch), which returns whether it was right, if
// the maxima are known and what hides keys can be had tile by tile. Returns
// whether that is done.
template <class Input, class Softmax>
bool with_known_maxima(const Problem<Input>& problem, bool are_known,
                       const StripOfKeys& strip, int64_t mask_offset,
                       bool all_finite, const Softmax& softmax) {
  if (problem.dropout || problem.modifiers || !(problem.shape.scale > 0.0) ||
      problem.hides_keys_of(strip.row, strip.used, strip.first, strip.count) ||
      !are_known) {
    return false;
  }
  const auto& mask = problem.mask;
  if (!mask) {
    return softmax(NoMaskRows{}, PrefetchRows{});
  }
  if (strip.used < strip.height) {
    return false;  // the mask ends
  }
  const int64_t stride = mask.layout().row_stride;
  const PrefetchRows to_prefetch =
      mask.to_prefetch(mask_offset, strip.row, strip.first);
  // A NaN among hidden scores has to stay.
  if (const auto* hides =
          mask.template rows_of<bool>(mask_offset, strip.row, strip.first)) {
    return all_finite && softmax(MaskRows<bool>{hides, stride}, to_prefetch);
  }
  const auto* adds =
      mask.template rows_of<Input>(mask_offset, strip.row, strip.first);
  return adds != nullptr && softmax(MaskRows<Input>{adds, stride}, to_prefetch);
}

// Adds a block's sums of probabilities to those of the rows. Returns false, and
// has changed nothing, where one is too large or is not a number: then the
// block is to be done again with new maxima.
template <class Number, int kRows>
bool add_sums(const Vector<Number> (&sums)[kRows],
              const SoftmaxStates<Number>& states) {
  Vector<uint32_t> beyond{};
  for (const auto& sum : sums) {
    beyond |= std::bit_cast<Vector<uint32_t>>(
        ~(simd::abs(sum) <= static_cast<Number>(kLargestProbability)));
  }
  if (simd::any_bit(beyond)) {
    return false;
  }
  for (int i = 0; i < kRows; ++i) {
    states.sums[i] += sums[i];
  }
  return true;
}

}  // namespace pkg::cpu::attention
