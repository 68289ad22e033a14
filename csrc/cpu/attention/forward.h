// The forward pass of attention, by the way that suits the problem: blocked, or
// as decoding. Compiled in scaled_dot_product_attention_forward.cpp, once for
// all operators, and so is the blocked way.
#pragma once

#include "cpu/attention/blocked_forward.h"
#include "cpu/attention/forward_outputs.h"
#include "cpu/attention/problem.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/simd/simd.h"

namespace pkg::cpu::attention {

template <class Input>
void attention_forward(const Problem<Input>& problem,
                       const ForwardOutputs<Input>& outputs);

#define PKG_ATTENTION_FORWARD_BLOCKED(kind, Input)                            \
  kind template void attention_forward_blocked(const Problem<Input>&,         \
                                               const ForwardOutputs<Input>&); \
  kind template void attention_forward_by_vectors(                            \
      const Problem<Input>&, const ForwardOutputs<Input>&)
PKG_ATTENTION_FORWARD_BLOCKED(extern, double);
PKG_ATTENTION_FORWARD_BLOCKED(extern, float);
PKG_ATTENTION_FORWARD_BLOCKED(extern, Half);
PKG_ATTENTION_FORWARD_BLOCKED(extern, BFloat16);

}  // namespace pkg::cpu::attention
