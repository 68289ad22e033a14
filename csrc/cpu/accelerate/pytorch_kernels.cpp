#include "cpu/accelerate/pytorch_kernels.h"

#include <utility>

#include "host/symbol_lookup.h"

namespace pkg::cpu::accelerate {

namespace {

// std::string_view as the last type of a mangled name.
#define PKG_STRING_VIEW "St17basic_string_viewIcSt11char_traitsIcEE"

template <class Pointer>
void look_up(Pointer& pointer, const char* name) {
  pointer = find_torch_symbol<Pointer>(name);
}

PytorchKernels find() {
  PytorchKernels found{};
  look_up(found.mm, "_ZN2at3cpu2mmERKNS_6TensorES3_");
  look_up(found.mm_out, "_ZN2at3cpu6mm_outERNS_6TensorERKS1_S4_");
  look_up(found.bmm, "_ZN2at3cpu3bmmERKNS_6TensorES3_");
  look_up(found.bmm_out, "_ZN2at3cpu7bmm_outERNS_6TensorERKS1_S4_");
  look_up(found.int_mm, "_ZN2at3cpu7_int_mmERKNS_6TensorES3_");
  look_up(found.int_mm_out, "_ZN2at3cpu11_int_mm_outERNS_6TensorERKS1_S4_");
  look_up(found.attention,
          "_ZN2at3cpu43_scaled_dot_product_flash_attention_for_cpuERKNS_"
          "6TensorES3_S3_dbRKSt8optionalIS1_ES4_IdE");
  look_up(found.attention_backward,
          "_ZN2at3cpu52_scaled_dot_product_flash_attention_for_cpu_backward"
          "ERKNS_6TensorES3_S3_S3_S3_S3_dbRKSt8optionalIS1_ES4_IdE");
  look_up(found.multi_head_attention,
          "_ZN2at3cpu28_native_multi_head_attentionERKNS_6TensorES3_S3_llS3_S3_"
          "S3_S3_RKSt8optionalIS1_EbbS4_IlE");
  look_up(found.convolution,
          "_ZN2at25compositeexplicitautograd11convolutionERKNS_6TensorES3_"
          "RKSt8optionalIS1_EN3c108ArrayRefIlEESA_SA_bSA_l");
  look_up(found.convolution_backward,
          "_ZN2at25compositeexplicitautograd20convolution_backwardERKNS_"
          "6TensorES3_S3_N3c1016OptionalArrayRefIlEENS4_8ArrayRefIlEES8_S8_bS8_"
          "lSt5arrayIbLm3EE");
  look_up(found.gelu, "_ZN2at3cpu4geluERKNS_6TensorE" PKG_STRING_VIEW);
  look_up(found.gelu_out,
          "_ZN2at3cpu8gelu_outERNS_6TensorERKS1_" PKG_STRING_VIEW);
  look_up(found.gelu_in_place, "_ZN2at3cpu5gelu_ERNS_6TensorE" PKG_STRING_VIEW);
  look_up(found.silu, "_ZN2at3cpu4siluERKNS_6TensorE");
  look_up(found.silu_out, "_ZN2at3cpu8silu_outERNS_6TensorERKS1_");
  look_up(found.silu_in_place, "_ZN2at3cpu5silu_ERNS_6TensorE");
  look_up(found.gelu_backward,
          "_ZN2at3cpu13gelu_backwardERKNS_6TensorES3_" PKG_STRING_VIEW);
  look_up(found.gelu_backward_out,
          "_ZN2at3cpu17gelu_backward_outERNS_6TensorERKS1_S4_" PKG_STRING_VIEW);
  look_up(found.silu_backward, "_ZN2at3cpu13silu_backwardERKNS_6TensorES3_");
  look_up(found.silu_backward_out,
          "_ZN2at3cpu17silu_backward_outERNS_6TensorERKS1_S4_");
  return found;
}

}  // namespace

StableIValue MadeTensor::hand_over() && {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  *reinterpret_cast<void**>(handle) = std::exchange(implementation_, nullptr);
  return torch::stable::detail::from(handle);
}

void MadeTensor::release() noexcept {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_new_uninitialized_tensor(&handle) == TORCH_SUCCESS) {
    *reinterpret_cast<void**>(handle) = implementation_;
    aoti_torch_delete_tensor_object(handle);
  }
}

const PytorchKernels& PytorchKernels::instance() {
  static const PytorchKernels found = find();
  return found;
}

}  // namespace pkg::cpu::accelerate
