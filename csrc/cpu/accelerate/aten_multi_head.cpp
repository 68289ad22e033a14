// _native_multi_head_attention of PyTorch's own namespace. Self-attention over
// sequences that may be long enough goes to a kernel in Python,
// pkg/_accelerate_multihead.py, which still may leave it; everything else goes
// on to PyTorch's from here.
#include <array>
#include <optional>

#include "cpu/accelerate/aten.h"
#include "cpu/accelerate/handles.h"
#include "cpu/accelerate/pytorch_kernels.h"
#include "cpu/accelerate/routes.h"
#include "host/compiler.h"
#include "host/dispatch.h"

namespace pkg::cpu::accelerate {

namespace {

using torch::stable::detail::to;

// From so many on the kernel in Python may take a sequence.
int64_t least_tokens = 0;

bool are_same(const OwnedHandle& a, const OwnedHandle& b) {
  return *reinterpret_cast<void**>(a.get()) ==
         *reinterpret_cast<void**>(b.get());
}

bool are_many(const OwnedHandle& tokens) {
  const auto sizes = sizes_of(tokens.get());
  return sizes.size() == 3 && sizes[1] >= least_tokens;
}

void multi_head_attention(StableIValue* stack, uint64_t /*arguments*/,
                          uint64_t /*results*/) {
  const OwnedHandle query(stack[0]);
  const OwnedHandle key(stack[1]);
  const OwnedHandle value(stack[2]);
  const auto width = to<int64_t>(stack[3]);
  const auto heads = to<int64_t>(stack[4]);
  const OwnedHandle qkv_weight(stack[5]);
  const OwnedHandle qkv_bias(stack[6]);
  const OwnedHandle proj_weight(stack[7]);
  const OwnedHandle proj_bias(stack[8]);
  const OptionalHandle mask(stack[9]);
  const bool needs_weights = to<bool>(stack[10]);
  const bool averages_weights = to<bool>(stack[11]);
  const auto mask_type = to<std::optional<int64_t>>(stack[12]);
  if (state().attention.load(std::memory_order_relaxed) ==
          AttentionMode::ByTable &&
      !needs_weights && are_same(query, key) && are_same(query, value) &&
      are_many(query)) {
    const auto result = dispatch<std::optional<Tensor>>(
        "pkg_accelerate::_native_multi_head_attention", "", query.tensor(),
        width, heads, qkv_weight.tensor(), qkv_bias.tensor(),
        proj_weight.tensor(), proj_bias.tensor(), mask.tensor(), mask_type);
    if (result) {
      stack[0] = torch::stable::detail::from(*result);
      stack[1] = undefined_tensor();
      return;
    }
  }
  hand_over(
      PytorchKernels::instance().multi_head_attention(
          query.get(), key.get(), value.get(), width, heads, qkv_weight.get(),
          qkv_bias.get(), proj_weight.get(), proj_bias.get(),
          OptionalTensor(mask), needs_weights, averages_weights, mask_type),
      stack);
}

}  // namespace

std::span<const AtenKernel> multi_head_kernels() {
  static const std::array kernels = {
      AtenKernel{"_native_multi_head_attention", &multi_head_attention,
                 PytorchKernels::instance().multi_head_attention != nullptr, 2},
  };
  return kernels;
}

}  // namespace pkg::cpu::accelerate

// Before it is registered.
extern "C" PKG_EXPORT void pkg_accelerate_least_tokens(int64_t tokens) {
  pkg::cpu::accelerate::least_tokens = tokens;
}
