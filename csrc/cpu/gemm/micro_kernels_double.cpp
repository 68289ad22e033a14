// The micro-kernel in float64.
#include "cpu/gemm/micro_kernels.h"

namespace pkg::cpu {

PKG_MULTIPLY_TILES(Floating<double>, PackedStrips, double);
PKG_MULTIPLY_TILES(Floating<double>, RowsInPlace, double);

}  // namespace pkg::cpu
