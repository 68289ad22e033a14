// The forward pass of attention, by the way that suits the problem.
#pragma once

#include "scaled_dot_product_attention_decode.h"
#include "scaled_dot_product_attention_forward.h"

namespace pkg::cpu::attention {

// Under causality the few rows see few keys, unless they are the last ones.
template <class Input>
bool decodes_forward(const Problem<Input>& problem) {
  return !problem.is_causal && decodes(problem);
}

template <class Input>
void attention_forward(const Problem<Input>& problem,
                       const ForwardOutputs<Input>& outputs) {
  if (decodes_forward(problem)) {
    attention_forward_decoding(problem, outputs);
  } else {
    attention_forward_tiled(problem, outputs);
  }
}

}  // namespace pkg::cpu::attention
