// PyTorch's products of two operands, mm, bmm, addmm, baddbmm,
// _addmm_activation and _int_mm, by this package's GEMM.
//
// 2 M N K operations; the addend is read, and the activation applied, while
// finished sums are still in registers, where PyTorch copies the addend to the
// result first or takes another pass over the result.
#pragma once

#include "accelerate.h"

namespace pkg::cpu::accelerate {

// See AcceleratedAddmm in accelerate.h.
Answer addmm(const AddmmCall& call, AddmmOutput& output);

}  // namespace pkg::cpu::accelerate
