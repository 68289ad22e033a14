#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <tuple>

#include "cuda/gemm/matrix_product.h"
#include "cuda/lltm/lltm_host.h"
#include "cuda/lltm/step.cuh"
#include "host/namespace.h"

namespace pkg::cuda {
namespace {

// The sums that the input gives to the gates of all steps.
template <class Element>
Tensor multiply_inputs(const LltmPlan& plan, const Tensor& input,
                       const Tensor& weights) {
  using Number = Accumulator<Element>;
  const std::array sizes{plan.rows(), plan.gates()};
  const Tensor sums =
      empty_contiguous(sizes, number_type<Number>(), device_of(input));
  MatrixOf<Element> of_input = matrix_of<Element>(weights);
  of_input.data += plan.hidden * of_input.column_stride;
  LltmProduct<Element, Number> product = {};
  product.a[0] = rows_as_panels(all_rows_of<Element>(plan, input), plan.rows(),
                                plan.features);
  product.b[0] = rows_as_panels(of_input, plan.gates(), plan.features);
  product.c = static_cast<Number*>(sums.mutable_data_ptr());
  product.c_row_stride = plan.gates();
  launch_product(product, false, sums);
  return sums;
}

// A first step, without what becomes of it.
template <class Element>
LltmStep<Element> first_step(const LltmPlan& plan, const Tensor& input,
                             const Tensor& weights, const Tensor& bias,
                             const Tensor& old_h, const Tensor& old_cell) {
  LltmStep<Element> step = {};
  step.operands = {plan.batch,
                   plan.hidden,
                   {plan.hidden, plan.features},
                   {matrix_of<Element>(old_h), matrix_of<Element>(input)},
                   matrix_of<Element>(weights)};
  step.bias = static_cast<const Element*>(bias.const_data_ptr());
  step.bias_stride = strides_of(bias).back();
  step.old_cell = matrix_of<Element>(old_cell);
  return step;
}

// Says how steps like this one are divided; returns the memory for their parts'
// sums where they are.
template <class Element>
std::optional<Tensor> divide(LltmStep<Element>& step, DeviceId device) {
  using Number = Accumulator<Element>;
  using Product = GateProduct<Element>;
  const int64_t panels = step.panel_count();
  const int64_t each = panels_of_block<Product>(step.tile_count(), panels,
                                                Product::kLeastPanels);
  step.divide(each);
  if (each >= panels) {
    return std::nullopt;
  }
  const std::array sizes{step.splits, step.operands.batch,
                         kGates * step.operands.units};
  const Tensor parts = empty_contiguous(sizes, number_type<Number>(), device);
  step.parts = static_cast<Number*>(parts.mutable_data_ptr());
  return parts;
}

template <class Element>
void launch_finish(const LltmStep<Element>& step, cudaStream_t stream) {
  const int64_t states = step.operands.batch * step.operands.units;
  with_finish_kernel(step, [&](auto kernel, const auto& units) {
    launch(kernel, tiles_of(states, kTileThreads),
           LaunchShape(kTileThreads).that_waits(), stream, step, units);
  });
}

template <class Element>
void launch_step(const LltmStep<Element>& step, bool follows,
                 cudaStream_t stream) {
  launch(lltm_step_kernel<Element>, step.pieces,
         launch_shape<GateProduct<Element>>().that_waits(follows), stream,
         step);
  if (step.parts != nullptr) {
    launch_finish(step, stream);
  }
}

// A single step whose product is large: by the kernels of matmul, of [h, x] as
// one matrix, into memory. That writes and reads B 3H numbers and B (H + F)
// elements besides: 100 MB of 2048 x 1024 to 2048 in half precision, where an
// H100 took 366 us by a kernel of 211 TFLOP/s and has matmuls of 690.
template <class Element>
void run_large(LltmStep<Element>& step, const LltmPlan& plan,
               const Tensor& input, const Tensor& weights,
               const Tensor& old_h) {
  using Number = Accumulator<Element>;
  const Tensor rows = join_rows(plan, old_h, nullptr, input);
  const Tensor sums = empty_contiguous(std::array{plan.batch, plan.gates()},
                                       number_type<Number>(), device_of(input));
  multiply_matrices(rows, torch::stable::transpose(weights, 0, 1), sums);
  step.parts = static_cast<Number*>(sums.mutable_data_ptr());
  launch_finish(step, current_stream(input));
}

template <class Element>
void run(const LltmPlan& plan, const Tensor& input, const Tensor& weights,
         const Tensor& bias, const Tensor& old_h, const Tensor& old_cell,
         const Tensor& hidden, const Tensor& cells, const Tensor* gates) {
  using Number = Accumulator<Element>;
  LltmStep<Element> step =
      first_step<Element>(plan, input, weights, bias, old_h, old_cell);
  step.new_h = static_cast<Element*>(hidden.mutable_data_ptr());
  step.new_cell = static_cast<Element*>(cells.mutable_data_ptr());
  step.gates = gates != nullptr
                   ? static_cast<Element*>(gates->mutable_data_ptr())
                   : nullptr;
  if (plan.steps == 1 &&
      is_large_product(plan.type, plan.batch, plan.gates())) {
    run_large(step, plan, input, weights, old_h);
    return;
  }
  std::optional<Tensor> input_sums;
  if (plan.steps > 1 && plan.features > 0) {
    input_sums =
        multiply_inputs<Element>(plan, with_uniform_rows(plan, input), weights);
    step.operands.depths[1] = 0;
    step.input_sums = static_cast<const Number*>(input_sums->const_data_ptr());
  }
  const int64_t states = plan.batch * plan.hidden;
  if (states == 0) {
    return;
  }
  const auto parts = divide(step, device_of(hidden));
  for (int64_t t = 0; t < plan.steps; ++t) {
    launch_step(step, t > 0 || input_sums, current_stream(hidden));
    step.operands.rows[0] = {step.new_h, plan.hidden, 1};
    step.old_cell = {step.new_cell, plan.hidden, 1};
    step.new_h += states;
    step.new_cell += states;
    if (step.gates != nullptr) {
      step.gates += kGates * states;
    }
    if (step.input_sums != nullptr) {
      step.input_sums += kGates * states;
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> lltm_forward(const Tensor& input,
                                                const Tensor& weights,
                                                const Tensor& bias,
                                                const Tensor& old_h,
                                                const Tensor& old_cell) {
  const LltmPlan plan =
      plan_lltm_forward(input, weights, bias, old_h, old_cell);
  const DeviceId device = device_of(input);
  const DeviceGuard guard(device.index);
  const Tensor hidden = allocate_lltm_rows(plan, plan.hidden, device);
  const Tensor cells = allocate_lltm_rows(plan, plan.hidden, device);
  const Tensor gates = allocate_lltm_rows(plan, plan.gates(), device);
  run_lltm_forward(plan, input, weights, bias, old_h, old_cell, hidden, cells,
                   &gates);
  return {hidden, cells, gates};
}

PKG_IMPLEMENT(PKG_CUDA_DISPATCH_KEY, library) {
  library.impl<&lltm_forward>("lltm_forward");
}

}  // namespace

void run_lltm_forward(const LltmPlan& plan, const Tensor& input,
                      const Tensor& weights, const Tensor& bias,
                      const Tensor& old_h, const Tensor& old_cell,
                      const Tensor& hidden, const Tensor& cells,
                      const Tensor* gates) {
  with_floating_type(plan.type, [&](auto example) {
    run<decltype(example)>(plan, input, weights, bias, old_h, old_cell, hidden,
                           cells, gates);
  });
}

}  // namespace pkg::cuda
