// The CPU's side of host/elementwise.h.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/pointwise/pointwise.h"
#include "host/formula.h"

namespace pkg::cpu {

// output = Formula(tensors..., numbers...), computed in a dtype.
template <class Formula, size_t kTensors, size_t kNumbers>
void run_formula(ScalarType type,
                 const PointwiseLoop<static_cast<int>(kTensors) + 1>& loop,
                 const Tensor& output,
                 const std::array<const TensorView*, kTensors>& tensors,
                 const std::array<double, kNumbers>& numbers) {
  const auto run = [&](auto example) {
    using T = decltype(example);
    BoundFormula<Formula, simd::Compute<T>> bound;
    std::copy(numbers.begin(), numbers.end(), bound.numbers);
    run_pointwise<T>(loop, destination_of(output), tensors, bound);
  };
  if constexpr (FormulaTraits<Formula>::kTakesIntegers) {
    with_element_type(type, run);
  } else {
    with_floating_type(type, run);
  }
}

}  // namespace pkg::cpu
