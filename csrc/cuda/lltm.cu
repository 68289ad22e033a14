#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cuda/lltm/lltm_host.h"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

std::tuple<Tensor, Tensor> lltm(const Tensor& input, const Tensor& weights,
                                const Tensor& bias, const Tensor& old_h,
                                const Tensor& old_cell) {
  const LltmPlan plan = plan_lltm_cell(input, weights, bias, old_h, old_cell);
  const DeviceId device = device_of(input);
  const DeviceGuard guard(device.index);
  const Tensor hidden = allocate_lltm_rows(plan, plan.hidden, device);
  const Tensor cells = allocate_lltm_rows(plan, plan.hidden, device);
  run_lltm_forward(plan, input, weights, bias, old_h, old_cell, hidden, cells,
                   nullptr);
  return {hidden, cells};
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) { library.impl<&lltm>("lltm"); }

}  // namespace
}  // namespace pkg::cuda
