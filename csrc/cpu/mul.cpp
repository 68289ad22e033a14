// mul: a * b. One multiplication, two loads and a store an element: memory
// bound. Half precision is multiplied in float32 and rounded once.
#include "host/elementwise.h"

namespace pkg {

PKG_ELEMENTWISE(mul, Takes::kNumbers, Tensor a, Tensor b) { return a * b; }

}  // namespace pkg
