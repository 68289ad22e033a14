// _scaled_dot_product_flash_attention_for_cpu of PyTorch's own namespace,
// forward and backward.
#include <array>
#include <exception>
#include <optional>

#include "cpu/accelerate/aten.h"
#include "cpu/accelerate/attention.h"
#include "cpu/accelerate/handles.h"
#include "cpu/accelerate/pytorch_kernels.h"
#include "cpu/accelerate/routes.h"

namespace pkg::cpu::accelerate {

namespace {

using torch::stable::detail::to;

// What both passes have, from the place of `query` and of `dropout_p` in the
// stack on.
struct Operands {
  OwnedHandle query;
  OwnedHandle key;
  OwnedHandle value;
  double dropout;
  bool is_causal;
  OptionalHandle mask;
  std::optional<double> scale;

  Operands(const StableIValue* tensors, const StableIValue* options)
      : query(tensors[0]),
        key(tensors[1]),
        value(tensors[2]),
        dropout(to<double>(options[0])),
        is_causal(to<bool>(options[1])),
        mask(options[2]),
        scale(to<std::optional<double>>(options[3])) {}
};

// Of the forward pass, for the backward one.
struct ForwardResults {
  const OwnedHandle& grad_output;
  const OwnedHandle& output;
  const OwnedHandle& log_sum_exp;
};

bool may_take(const Operands& operands) {
  return operands.dropout == 0 &&
         state().attention.load(std::memory_order_relaxed) !=
             AttentionMode::Off;
}

bool take(AttentionCall& call, const Operands& operands, StableIValue* stack) {
  const TensorView query(operands.query.get());
  const TensorView key(operands.key.get());
  const TensorView value(operands.value.get());
  std::optional<TensorView> mask;
  if (operands.mask.is_given()) {
    mask.emplace(operands.mask.get());
  }
  call.query = &query;
  call.key = &key;
  call.value = &value;
  call.attn_mask = mask ? &*mask : nullptr;
  call.is_causal = operands.is_causal;
  call.scale = operands.scale;
  AttentionResults results;
  try {
    if (!attention(call, results)) {
      return false;
    }
  } catch (const std::exception&) {
    return false;  // PyTorch's kernel says what is wrong, as of memory
  }
  for (size_t i = 0; i < results.size() && results[i]; ++i) {
    stack[i] = torch::stable::detail::from(*results[i]);
  }
  return true;
}

bool take_backward(const Operands& operands, const ForwardResults& results,
                   StableIValue* stack) {
  const TensorView grad_output(results.grad_output.get());
  const TensorView output(results.output.get());
  const TensorView log_sum_exp(results.log_sum_exp.get());
  AttentionCall call{};
  call.grad_output = &grad_output;
  call.output = &output;
  call.log_sum_exp = &log_sum_exp;
  return take(call, operands, stack);
}

void forward(StableIValue* stack, uint64_t /*arguments*/,
             uint64_t /*results*/) {
  const Operands o(stack, stack + 3);
  AttentionCall call{};
  if (!may_take(o) || !take(call, o, stack)) {
    hand_over(PytorchKernels::instance().attention(
                  o.query.get(), o.key.get(), o.value.get(), o.dropout,
                  o.is_causal, OptionalTensor(o.mask), o.scale),
              stack);
  }
}

void backward(StableIValue* stack, uint64_t /*arguments*/,
              uint64_t /*results*/) {
  const OwnedHandle grad_output(stack[0]);
  const Operands o(stack + 1, stack + 6);
  const OwnedHandle output(stack[4]);
  const OwnedHandle log_sum_exp(stack[5]);
  if (!may_take(o) ||
      !take_backward(o, {grad_output, output, log_sum_exp}, stack)) {
    hand_over(PytorchKernels::instance().attention_backward(
                  grad_output.get(), o.query.get(), o.key.get(), o.value.get(),
                  output.get(), log_sum_exp.get(), o.dropout, o.is_causal,
                  OptionalTensor(o.mask), o.scale),
              stack);
  }
}

}  // namespace

std::span<const AtenKernel> attention_kernels() {
  const auto& pytorch = PytorchKernels::instance();
  static const std::array kernels = {
      AtenKernel{"_scaled_dot_product_flash_attention_for_cpu", &forward,
                 pytorch.attention != nullptr, 2},
      AtenKernel{"_scaled_dot_product_flash_attention_for_cpu_backward",
                 &backward, pytorch.attention_backward != nullptr, 3},
  };
  return kernels;
}

}  // namespace pkg::cpu::accelerate
