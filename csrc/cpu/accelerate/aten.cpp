// mm and bmm of PyTorch's own namespace on the CPU: ours where the table says
// so, and else PyTorch's kernels, by the entries of its C shim that call them
// without the dispatcher, which would come back here.
//
// The products with numbers among their arguments (addmm and its kin) cannot be
// registered by the stable ABI; pkg/accelerate.py does it.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "cpu/accelerate/addmm.h"
#include "cpu/accelerate/owned_handle.h"
#include "cpu/accelerate/routes.h"
#include "host/compiler.h"
#include "host/dispatch.h"

namespace pkg::cpu::accelerate {

namespace {

using Original = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle,
                                    AtenTensorHandle);

// What PyTorch's kernel writes its result to: of that size, or of one that it
// never gets to, since it refuses operands of other dimensions.
AtenTensorHandle empty_result(const OwnedHandle& a, const OwnedHandle& b,
                              size_t dims) {
  const auto a_sizes = sizes_of(a.get());
  const auto b_sizes = sizes_of(b.get());
  std::array<int64_t, 3> sizes{};
  size_t count = 1;
  if (a_sizes.size() == dims && b_sizes.size() == dims) {
    std::copy_n(a_sizes.begin(), dims - 1, sizes.begin());
    sizes[dims - 1] = b_sizes[dims - 1];
    count = dims;
  }
  std::array<int64_t, 3> strides{};
  int64_t stride = 1;
  for (size_t d = count; d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  int32_t dtype = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(a.get(), &dtype));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(count), sizes.data(), strides.data(), dtype,
      aoti_torch_device_type_cpu(), 0, &handle));
  return handle;
}

bool take(AtenOperator op, const OwnedHandle& a, const OwnedHandle& b,
          AddmmOutput& output) {
  const TensorView a_view(a.get());
  const TensorView b_view(b.get());
  return addmm({op, nullptr, &a_view, &b_view, 0, 1, Activation::None},
               output) == Answer::Taken;
}

// mm or bmm as the dispatcher calls it, and its form with `out`.
template <AtenOperator op, Original original>
void product(StableIValue* stack, uint64_t /*arguments*/,
             uint64_t /*results*/) {
  const OwnedHandle a(stack[0]);
  const OwnedHandle b(stack[1]);
  AddmmOutput output;
  if (is_on() && take(op, a, b, output)) {
    stack[0] = torch::stable::detail::from(*output.made);
    return;
  }
  OwnedHandle result(empty_result(a, b, op == AtenOperator::Mm ? 2 : 3));
  check_shim(original(result.get(), a.get(), b.get()));
  stack[0] = result.hand_over();
}

template <AtenOperator op, Original original>
void product_out(StableIValue* stack, uint64_t /*arguments*/,
                 uint64_t /*results*/) {
  const OwnedHandle a(stack[0]);
  const OwnedHandle b(stack[1]);
  OwnedHandle out(stack[2]);
  bool is_taken = false;
  if (is_on()) {
    const TensorView view(out.get());
    AddmmOutput output;
    output.view = &view;
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(out.get(), &output.data));
    is_taken = take(op, a, b, output);
  }
  if (!is_taken) {
    check_shim(original(out.get(), a.get(), b.get()));
  }
  stack[0] = out.hand_over();
}

}  // namespace

}  // namespace pkg::cpu::accelerate

// Once in the life of a process: PyTorch's dispatcher does not expect its
// tables to change while other threads use them. False where this PyTorch
// does not tell what its kernels refuse; Python registers these too then.
extern "C" PKG_EXPORT bool pkg_accelerate_register() {
  using namespace pkg::cpu::accelerate;
  using pkg::AtenOperator;
  if (pkg::detail::last_error_function() == nullptr) {
    return false;
  }
  try {
    auto* library = new torch::stable::detail::StableLibrary(
        torch::stable::detail::StableLibrary::Kind::IMPL, "aten", "CPU",
        __FILE__, __LINE__);
    library->impl("mm", &product<AtenOperator::Mm, &aoti_torch_cpu_mm_out>);
    library->impl("bmm", &product<AtenOperator::Bmm, &aoti_torch_cpu_bmm_out>);
    library->impl("mm.out",
                  &product_out<AtenOperator::Mm, &aoti_torch_cpu_mm_out>);
    library->impl("bmm.out",
                  &product_out<AtenOperator::Bmm, &aoti_torch_cpu_bmm_out>);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}
