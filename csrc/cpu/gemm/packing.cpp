// The packing of lines, for the pairs of types that cpu/gemm/packing.h lists.
#include "cpu/gemm/packing.h"

namespace pkg::cpu {

PKG_PACK_LINES(Floating<double>, double);
#if defined(PKG_HAS_TILES)
PKG_PACK_LINES(WideDouble, double);
#endif
PKG_PACK_LINES(Floating<float>, float);
PKG_PACK_LINES(Floating<float>, Half);
PKG_PACK_LINES(Floating<float>, BFloat16);
PKG_PACK_LINES(Int8Dot, int8_t);
#if defined(PKG_HAS_VPDPBUSD)
PKG_PACK_LINES(Int8Dot::Right, int8_t);
#endif
#if defined(PKG_HAS_BFLOAT16_DOT)
PKG_PACK_LINES(Bfloat16Dot, BFloat16);
#endif

}  // namespace pkg::cpu
