// The micro-kernel in float64.
#include "cpu/gemm/micro_kernels.h"

namespace pkg::cpu {

PKG_MICRO_KERNELS(Floating<double>, PackedStrips, double);
PKG_MICRO_KERNELS(Floating<double>, RowsInPlace, double);
PKG_MICRO_KERNELS(Floating<double>, PackedStrips, Streamed<double>);
PKG_MICRO_KERNELS(Floating<double>, RowsInPlace, Streamed<double>);

}  // namespace pkg::cpu
