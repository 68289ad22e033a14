// muladd: a * b + c in one pass. Two operations, two loads and a store an
// element: memory bound. Computed in float32 for half precision and rounded
// once, with a fused multiply-add where the processor has one.
#include "../muladd.h"

#include "../namespace.h"
#include "pointwise.h"

namespace pkg::cpu {
namespace {

Tensor muladd(const TensorView& a, const TensorView& b, double c) {
  check_muladd(a, b);
  const ScalarType type = muladd_result_type(a, b);
  const PointwisePlan<3> plan =
      plan_binary("muladd", a, b, type, Steps::kThenNumber);
  with_floating_type(type, [&](auto example) {
    using T = decltype(example);
    const auto addend = static_cast<simd::Compute<T>>(c);
    run_pointwise<T>(plan.loop, plan.output, std::array{&a, &b},
                     [addend](auto x, auto y) { return x * y + addend; });
  });
  return plan.output;
}

PKG_IMPLEMENT(CPU, library) { library.impl<&muladd>("muladd"); }

}  // namespace
}  // namespace pkg::cpu
