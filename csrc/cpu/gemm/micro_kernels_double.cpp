// The micro-kernel in float64.
#include "cpu/gemm/micro_kernels.h"

namespace pkg::cpu {

PKG_MICRO_KERNELS(Floating<double>, PackedStrips, double);
PKG_MICRO_KERNELS(Floating<double>, RowsInPlace, double);
PKG_MICRO_KERNELS(Floating<double>, PackedStrips, Streamed<double>);
PKG_MICRO_KERNELS(Floating<double>, RowsInPlace, Streamed<double>);
#if defined(PKG_HAS_TILES)
PKG_MICRO_KERNELS(WideDouble, PackedStrips, double);
PKG_MICRO_KERNELS(WideDouble, RowsInPlace, double);
PKG_MICRO_KERNELS(WideDouble, PackedStrips, Streamed<double>);
PKG_MICRO_KERNELS(WideDouble, RowsInPlace, Streamed<double>);
#endif

}  // namespace pkg::cpu
