// The micro-kernel in float64.
#include "cpu/gemm/micro_kernels.h"

namespace pkg::cpu {

PKG_MICRO_KERNELS(Floating<double>, PackedStrips, double);
PKG_MICRO_KERNELS(Floating<double>, RowsInPlace, double);

}  // namespace pkg::cpu
