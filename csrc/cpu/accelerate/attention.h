// PyTorch's attention on the CPU, forward and backward, by this package's.
#pragma once

#include "accelerate.h"

namespace pkg::cpu::accelerate {

// See AcceleratedAttention in accelerate.h.
bool attention(const AttentionCall& call, AttentionResults& results);

}  // namespace pkg::cpu::accelerate
