// add_out: writes a + b into out. One addition, two loads and a store an
// element: memory bound.
#include "add_out.h"

#include "cpu/pointwise/pointwise.h"
#include "host/namespace.h"
#include "host/wrapping_integer.h"

namespace pkg::cpu {
namespace {

void add_out(const TensorView& a, const TensorView& b,
             const WritableView& out) {
  const Shape shape = check_add_out(a, b, out);
  const ScalarType type = result_type(a, b);
  const auto loop = plan_pointwise_into<3>(shape, {&out, &a, &b});
  with_element_type(type, [&](auto example) {
    using T = decltype(example);
    run_pointwise<T>(loop, destination_of(out), std::array{&a, &b},
                     []<class V>(V x, V y) {
                       return static_cast<V>(Computed<V>(x) + Computed<V>(y));
                     });
  });
}

PKG_IMPLEMENT(CPU, library) { library.impl<&add_out>("add_out"); }

}  // namespace
}  // namespace pkg::cpu
