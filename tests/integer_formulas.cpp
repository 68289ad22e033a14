// Operators of formulas that do to integers what those of the package do not:
// for tests/integer_formulas.py.
#include "host/elementwise.h"

namespace pkg {

PKG_ELEMENTWISE(larger_of, Takes::kNumbers, Tensor a, Tensor b) {
  return a > b ? a : b;
}

PKG_ELEMENTWISE(clipped_difference, Takes::kNumbers, Tensor a, Tensor b) {
  return a - b <= 0 ? 0 : a - b;
}

PKG_ELEMENTWISE(quotient_of, Takes::kNumbers, Tensor a, Tensor b) {
  return a / b;
}

PKG_ELEMENTWISE(polynomial_of, Takes::kNumbers, Tensor a) {
  return 1 - a * (-a + 3);
}

#define PKG_DEFINE_IN(name, library) \
  STABLE_TORCH_LIBRARY_FRAGMENT(name, library)
PKG_DEFINE_IN(PKG_NAMESPACE, library) {
  library.def("larger_of(Tensor a, Tensor b) -> Tensor");
  library.def("clipped_difference(Tensor a, Tensor b) -> Tensor");
  library.def("quotient_of(Tensor a, Tensor b) -> Tensor");
  library.def("polynomial_of(Tensor a) -> Tensor");
}

}  // namespace pkg
