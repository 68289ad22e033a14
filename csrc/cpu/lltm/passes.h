// The passes of lltm on the CPU, which its operators share.
#pragma once

#include <optional>

#include "lltm.h"

namespace pkg::cpu {

struct LltmInputs {
  const TensorView& input;
  const TensorView& weights;
  const TensorView& bias;
  const TensorView& old_h;
  const TensorView& old_cell;
};

// Writes hidden and cells, and the gates before their activations where they
// are kept; all are contiguous.
void run_lltm_forward(const LltmPlan& plan, const LltmInputs& inputs,
                      const Tensor& hidden, const Tensor& cells,
                      const Tensor* gates);

}  // namespace pkg::cpu
