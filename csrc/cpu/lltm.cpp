#include <tuple>

#include "cpu/lltm/passes.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

std::tuple<Tensor, Tensor> lltm(const TensorView& input,
                                const TensorView& weights,
                                const TensorView& bias, const TensorView& old_h,
                                const TensorView& old_cell) {
  const LltmPlan plan = plan_lltm_cell(input, weights, bias, old_h, old_cell);
  const DeviceId device = device_of(input);
  const Tensor hidden = allocate_lltm_rows(plan, plan.hidden, device);
  const Tensor cells = allocate_lltm_rows(plan, plan.hidden, device);
  run_lltm_forward(plan, {input, weights, bias, old_h, old_cell}, hidden, cells,
                   nullptr);
  return {hidden, cells};
}

PKG_IMPLEMENT(CPU, library) { library.impl<&lltm>("lltm"); }

}  // namespace
}  // namespace pkg::cpu
