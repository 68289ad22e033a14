// mul: a * b. One multiplication, two loads and a store an element: memory
// bound. Half precision is multiplied in float32 and rounded once.
#include "../mul.h"

#include "../namespace.h"
#include "pointwise.h"

namespace pkg::cpu {
namespace {

Tensor mul(const TensorView& a, const TensorView& b) {
  check_mul(a, b);
  const ScalarType type = result_type(a, b);
  const PointwisePlan<3> plan = plan_binary("mul", a, b, type);
  with_element_type(type, [&](auto example) {
    using T = decltype(example);
    run_pointwise<T>(plan.loop, plan.output, std::array{&a, &b},
                     [](auto x, auto y) { return x * y; });
  });
  return plan.output;
}

PKG_IMPLEMENT(CPU, library) { library.impl<&mul>("mul"); }

}  // namespace
}  // namespace pkg::cpu
