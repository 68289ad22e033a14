// The products that cpu/gemm/matrix_product.h lists.
#include "cpu/gemm/matrix_product.h"

namespace pkg::cpu {

PKG_MATRIX_PRODUCT(double, double);
PKG_MATRIX_PRODUCT(float, float);
PKG_MATRIX_PRODUCT(Half, Half);
PKG_MATRIX_PRODUCT(BFloat16, BFloat16);
PKG_MATRIX_PRODUCT(int8_t, int32_t);

}  // namespace pkg::cpu
