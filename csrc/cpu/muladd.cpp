// muladd: a * b + c in one pass. Two operations, two loads and a store an
// element: memory bound. Computed in float32 for half precision and rounded
// once, with a fused multiply-add where the processor has one.
#include "host/elementwise.h"

namespace pkg {

PKG_ELEMENTWISE(muladd, Takes::kNumbersAsFloating, Tensor a, Tensor b,
                Float c) {
  return a * b + c;
}

}  // namespace pkg
