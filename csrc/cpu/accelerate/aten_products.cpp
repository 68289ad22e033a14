// mm, bmm and _int_mm of PyTorch's own namespace on the CPU.
//
// The products with numbers among their arguments (addmm and its kin) cannot be
// registered by the stable ABI; pkg/_accelerate_routes.py does it.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <array>
#include <exception>
#include <stdexcept>

#include "cpu/accelerate/addmm.h"
#include "cpu/accelerate/aten.h"
#include "cpu/accelerate/handles.h"
#include "cpu/accelerate/pytorch_kernels.h"
#include "cpu/accelerate/routes.h"
#include "host/last_error.h"

namespace pkg::cpu::accelerate {

namespace {

using Original = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle,
                                    AtenTensorHandle);

void call_original(Original original, AtenTensorHandle out,
                   const OwnedHandle& a, const OwnedHandle& b) {
  if (original(out, a.get(), b.get()) != TORCH_SUCCESS) {
    throw std::runtime_error(last_error_function()());
  }
}

// What PyTorch's kernel writes its result to: of that size, or of one that it
// never gets to, since it refuses operands of other dimensions.
Tensor empty_result(const OwnedHandle& a, const OwnedHandle& b, size_t dims) {
  const auto a_sizes = sizes_of(a.get());
  const auto b_sizes = sizes_of(b.get());
  std::array<int64_t, 3> sizes{};
  size_t count = 1;
  if (a_sizes.size() == dims && b_sizes.size() == dims) {
    std::copy_n(a_sizes.begin(), dims - 1, sizes.begin());
    sizes[dims - 1] = b_sizes[dims - 1];
    count = dims;
  }
  return empty_contiguous({sizes.data(), count}, dtype_of(a.get()),
                          {aoti_torch_device_type_cpu(), 0});
}

bool take(AtenOperator op, const OwnedHandle& a, const OwnedHandle& b,
          AddmmOutput& output) {
  const TensorView a_view(a.get());
  const TensorView b_view(b.get());
  try {
    return addmm({op, nullptr, &a_view, &b_view, 0, 1, Activation::None},
                 output) == Answer::Taken;
  } catch (const std::exception&) {
    output.made.reset();  // PyTorch's kernel makes its own
    return false;         // and says what is wrong, as of memory
  }
}

bool take_into(AtenOperator op, const OwnedHandle& a, const OwnedHandle& b,
               const OwnedHandle& out) {
  const TensorView view(out.get());
  if (op == AtenOperator::IntMm &&
      (view.sizes.size() != 2 || !is_contiguous(view))) {
    return false;  // PyTorch refuses it
  }
  AddmmOutput output;
  output.view = &view;
  TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(out.get(), &output.data));
  return take(op, a, b, output);
}

// A product as the dispatcher calls it, and its form with `out`. `original`
// returns, or writes, what PyTorch's kernel makes of the operands.
template <AtenOperator op, auto original>
void product(StableIValue* stack, uint64_t /*arguments*/,
             uint64_t /*results*/) {
  const OwnedHandle a(stack[0]);
  const OwnedHandle b(stack[1]);
  AddmmOutput output;
  stack[0] = is_on() && take(op, a, b, output)
                 ? torch::stable::detail::from(*output.made)
                 : original(a, b);
}

template <AtenOperator op, auto original>
void product_out(StableIValue* stack, uint64_t /*arguments*/,
                 uint64_t /*results*/) {
  const OwnedHandle a(stack[0]);
  const OwnedHandle b(stack[1]);
  OwnedHandle out(stack[2]);
  if (!is_on() || !take_into(op, a, b, out)) {
    original(out, a, b);
  }
  stack[0] = out.hand_over();
}

// By PyTorch's own function; by the C shim where this PyTorch does not have it,
// and the shim does: of an error it keeps the words alone.
template <auto function, size_t dims = 0, Original shim = nullptr>
StableIValue by_pytorch(const OwnedHandle& a, const OwnedHandle& b) {
  const auto own = PytorchKernels::instance().*function;
  if constexpr (shim != nullptr) {
    if (own == nullptr) {
      const Tensor result = empty_result(a, b, dims);
      call_original(shim, result.get(), a, b);
      return torch::stable::detail::from(result);
    }
  }
  return own(a.get(), b.get()).hand_over();
}

template <auto function, Original shim = nullptr>
void by_pytorch_into(const OwnedHandle& out, const OwnedHandle& a,
                     const OwnedHandle& b) {
  const auto own = PytorchKernels::instance().*function;
  if constexpr (shim != nullptr) {
    if (own == nullptr) {
      return call_original(shim, out.get(), a, b);
    }
  }
  own(out.get(), a.get(), b.get());
}

}  // namespace

std::span<const AtenKernel> product_kernels() {
  using enum AtenOperator;
  using Own = PytorchKernels;
  constexpr Original kMm = &aoti_torch_cpu_mm_out;
  constexpr Original kBmm = &aoti_torch_cpu_bmm_out;
  const auto& pytorch = PytorchKernels::instance();
  static const std::array kernels = {
      AtenKernel{"mm", &product<Mm, &by_pytorch<&Own::mm, 2, kMm>>, true, 1},
      AtenKernel{"mm.out",
                 &product_out<Mm, &by_pytorch_into<&Own::mm_out, kMm>>, true,
                 1},
      AtenKernel{"bmm", &product<Bmm, &by_pytorch<&Own::bmm, 3, kBmm>>, true,
                 1},
      AtenKernel{"bmm.out",
                 &product_out<Bmm, &by_pytorch_into<&Own::bmm_out, kBmm>>, true,
                 1},
      AtenKernel{"_int_mm", &product<IntMm, &by_pytorch<&Own::int_mm>>,
                 pytorch.int_mm != nullptr, 1},
      AtenKernel{"_int_mm.out",
                 &product_out<IntMm, &by_pytorch_into<&Own::int_mm_out>>,
                 pytorch.int_mm_out != nullptr, 1},
  };
  return kernels;
}

}  // namespace pkg::cpu::accelerate
