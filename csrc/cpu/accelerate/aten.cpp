// mm and bmm of PyTorch's own namespace on the CPU: ours where the table says
// so, and else PyTorch's kernels, by the entries of its C shim that call them
// without the dispatcher, which would come back here.
//
// The products with numbers among their arguments (addmm and its kin) cannot be
// registered by the stable ABI; pkg/accelerate.py does it.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>

#include "cpu/accelerate/addmm.h"
#include "cpu/accelerate/routes.h"
#include "host/compiler.h"
#include "host/dispatch.h"

namespace pkg::cpu::accelerate {

namespace {

using Original = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle,
                                    AtenTensorHandle);
void call_original(Original original, const Tensor& out, const Tensor& a,
                   const Tensor& b) {
  if (original(out.get(), a.get(), b.get()) != TORCH_SUCCESS) {
    throw std::runtime_error(pkg::detail::last_error_function()());
  }
}

// What PyTorch's kernel writes its result to: of that size, or of one that it
// never gets to, since it refuses operands of other dimensions.
Tensor empty_result(const Tensor& a, const Tensor& b, size_t dims) {
  const auto a_sizes = sizes_of(a);
  const auto b_sizes = sizes_of(b);
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
  return Tensor(handle);
}

bool take(AtenOperator op, const Tensor& a, const Tensor& b,
          AddmmOutput& output) {
  const TensorView a_view(a);
  const TensorView b_view(b);
  return addmm({op, nullptr, &a_view, &b_view, 0, 1, Activation::None}, output);
}

bool take(AtenOperator op, const Tensor& a, const Tensor& b,
          const Tensor& out) {
  const TensorView view(out);
  AddmmOutput output{&view, out.mutable_data_ptr(), std::nullopt};
  return take(op, a, b, output);
}

Tensor mm(const Tensor& a, const Tensor& b) {
  AddmmOutput output;
  if (is_on() && take(AtenOperator::Mm, a, b, output)) {
    return *std::move(output.made);
  }
  Tensor result = empty_result(a, b, 2);
  call_original(&aoti_torch_cpu_mm_out, result, a, b);
  return result;
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  AddmmOutput output;
  if (is_on() && take(AtenOperator::Bmm, a, b, output)) {
    return *std::move(output.made);
  }
  Tensor result = empty_result(a, b, 3);
  call_original(&aoti_torch_cpu_bmm_out, result, a, b);
  return result;
}

Tensor mm_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  if (!is_on() || !take(AtenOperator::Mm, a, b, out)) {
    call_original(&aoti_torch_cpu_mm_out, out, a, b);
  }
  return out;
}

Tensor bmm_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  if (!is_on() || !take(AtenOperator::Bmm, a, b, out)) {
    call_original(&aoti_torch_cpu_bmm_out, out, a, b);
  }
  return out;
}

}  // namespace

}  // namespace pkg::cpu::accelerate

// Once in the life of a process: PyTorch's dispatcher does not expect its
// tables to change while other threads use them. False where this PyTorch
// does not tell what its kernels refuse; Python registers these too then.
extern "C" PKG_EXPORT bool pkg_accelerate_register() {
  using namespace pkg::cpu::accelerate;
  if (pkg::detail::last_error_function() == nullptr) {
    return false;
  }
  try {
    auto* library = new torch::stable::detail::StableLibrary(
        torch::stable::detail::StableLibrary::Kind::IMPL, "aten", "CPU",
        __FILE__, __LINE__);
    library->impl("mm", TORCH_BOX(&mm));
    library->impl("bmm", TORCH_BOX(&bmm));
    library->impl("mm.out", TORCH_BOX(&mm_out));
    library->impl("bmm.out", TORCH_BOX(&bmm_out));
  } catch (const std::exception&) {
    return false;
  }
  return true;
}
