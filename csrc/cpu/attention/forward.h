// The forward pass of attention, by the way that suits the problem: tiled, or
// as decoding. Compiled in scaled_dot_product_attention_forward.cpp, once for
// all operators, and so is its tiled way.
#pragma once

#include "cpu/attention/tiled_forward.h"

namespace pkg::cpu::attention {

template <class Input>
void attention_forward(const Problem<Input>& problem,
                       const ForwardOutputs<Input>& outputs);

#define PKG_ATTENTION_FORWARD_TILED(Input)                     \
  template void attention_forward_tiled(const Problem<Input>&, \
                                        const ForwardOutputs<Input>&)
extern PKG_ATTENTION_FORWARD_TILED(double);
extern PKG_ATTENTION_FORWARD_TILED(float);
extern PKG_ATTENTION_FORWARD_TILED(Half);
extern PKG_ATTENTION_FORWARD_TILED(BFloat16);

}  // namespace pkg::cpu::attention
