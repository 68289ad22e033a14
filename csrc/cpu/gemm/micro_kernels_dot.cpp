// The micro-kernel by dot products of int8 and, where the processor has them,
// of bfloat16.
#include "cpu/gemm/micro_kernels.h"

namespace pkg::cpu {

PKG_MICRO_KERNELS(Int8Dot, RowsInPlace, uint32_t);
#if defined(PKG_HAS_BFLOAT16_DOT)
PKG_MICRO_KERNELS(Bfloat16Dot, RowsInPlace, uint32_t);
PKG_MICRO_KERNELS(Bfloat16Dot, RowsInPlace, Streamed<uint32_t>);
#endif
#if !defined(PKG_HAS_TILES)
PKG_MICRO_KERNELS(Int8Dot, PackedStrips, uint32_t);
#if defined(PKG_HAS_BFLOAT16_DOT)
PKG_MICRO_KERNELS(Bfloat16Dot, PackedStrips, uint32_t);
PKG_MICRO_KERNELS(Bfloat16Dot, PackedStrips, Streamed<uint32_t>);
#endif
#endif

}  // namespace pkg::cpu
