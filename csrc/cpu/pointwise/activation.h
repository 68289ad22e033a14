// The activations of linear, and their gradients, as operations of the loop in
// pointwise.h.
#pragma once

#include <cstddef>

#include "cpu/gemm/activation.h"
#include "cpu/pointwise/pointwise.h"

namespace pkg::cpu {

template <Activation kActivation>
struct Activate {
  static constexpr size_t kTogether = kActivatedTogether;

  template <class V, size_t kCount>
  Registers<V, kCount> operator()(Registers<V, kCount> x) const {
    activate<kActivation>(x.at);
    return x;
  }
};

// Of x, or of relu's result, and the gradient of the result.
template <Activation kActivation>
struct ActivationGradient {
  static constexpr size_t kTogether = kActivatedTogether;

  template <class V, size_t kCount>
  Registers<V, kCount> operator()(const Registers<V, kCount>& x,
                                  Registers<V, kCount> grad) const {
    activation_gradient<kActivation>(x.at, grad.at);
    return grad;
  }
};

}  // namespace pkg::cpu
