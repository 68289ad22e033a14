// The forward pass of attention, by the way that suits the problem.
#pragma once

#include "scaled_dot_product_attention_decode.h"
#include "scaled_dot_product_attention_forward.h"

namespace pkg::cpu::attention {

template <class Input>
void attention_forward(const Problem<Input>& problem,
                       const ForwardOutputs<Input>& outputs) {
  if (decodes(problem)) {
    attention_forward_decoding(problem, outputs);
  } else {
    attention_forward_tiled(problem, outputs);
  }
}

}  // namespace pkg::cpu::attention
