// The micro-kernel in float32: of float32 and half-precision operands, the
// right one of which may be stored in half precision.
#include "cpu/gemm/micro_kernels.h"

namespace pkg::cpu {

PKG_MULTIPLY_TILES(Floating<float>, PackedStrips, float);
PKG_MULTIPLY_TILES(Floating<float>, RowsInPlace, float);
PKG_MULTIPLY_TILES(Floating<float>, PackedStrips, Half);
#if !defined(__AVX512BF16__)
PKG_MULTIPLY_TILES(Floating<float>, PackedStrips, BFloat16);
#endif

}  // namespace pkg::cpu
