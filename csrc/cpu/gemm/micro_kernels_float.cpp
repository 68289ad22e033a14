// The micro-kernel in float32: of float32 and half-precision operands, the
// right one of which may be stored in half precision.
#include "cpu/gemm/micro_kernels.h"

namespace pkg::cpu {

PKG_MICRO_KERNELS(Floating<float>, PackedStrips, float);
PKG_MICRO_KERNELS(Floating<float>, RowsInPlace, float);
PKG_MICRO_KERNELS(Floating<float>, PackedStrips, Streamed<float>);
PKG_MICRO_KERNELS(Floating<float>, RowsInPlace, Streamed<float>);
PKG_MICRO_KERNELS(Floating<float>, PackedStrips, Streamed<Half>);
#if !defined(PKG_HAS_BFLOAT16_DOT)
PKG_MICRO_KERNELS(Floating<float>, PackedStrips, Streamed<BFloat16>);
#endif

}  // namespace pkg::cpu
