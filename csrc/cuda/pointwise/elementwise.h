// CUDA's side of host/elementwise.h.
#pragma once

#include <algorithm>
#include <array>

#include "cuda/pointwise/pointwise_host.h"
#include "host/formula.h"

namespace pkg::cuda {

// output = Formula(tensors..., numbers...), computed in a dtype.
template <class Formula, size_t kTensors, size_t kNumbers>
void run_formula(ScalarType type,
                 const PointwiseLoop<static_cast<int>(kTensors) + 1>& loop,
                 const Tensor& output,
                 const std::array<const TensorView*, kTensors>& tensors,
                 const std::array<double, kNumbers>& numbers) {
  const DeviceGuard guard(device_of(*tensors[0]).index);
  BoundFormula<Formula, double> bound;
  std::copy(numbers.begin(), numbers.end(), bound.numbers);
  run_pointwise(Formula::kName,
                PointwiseCall<kTensors>{loop, type, output, tensors}, bound);
}

}  // namespace pkg::cuda
