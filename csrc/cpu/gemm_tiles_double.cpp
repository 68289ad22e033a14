// The micro-kernel in float64.
#include "gemm_tiles.h"

namespace pkg::cpu {

PKG_MULTIPLY_TILES(Floating<double>, PackedStrips, double);
PKG_MULTIPLY_TILES(Floating<double>, RowsInPlace, double);

}  // namespace pkg::cpu
