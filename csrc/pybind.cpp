// The module pkg._C: facts about the build and the processor, and every
// operator as a plain function on tensors that goes through PyTorch's
// dispatcher, so that autograd, autocast and the rest apply.
#include <torch/headeronly/version.h>

#include <array>
#include <filesystem>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "add_out.h"
#include "cpu_features.h"
#include "d_sigmoid.h"
#include "decode_attention.h"
#include "direct_call.h"
#include "dispatch.h"
#include "int4_linear.h"
#include "library.h"
#include "linear.h"
#include "lltm.h"
#include "matmul.h"
#include "mul.h"
#include "muladd.h"
#include "namespace.h"
#include "packed_linear.h"
#include "pybind_headers.h"
#include "quantize_rowwise.h"
#include "rowwise_scaled_linear.h"
#include "scaled_dot_product_attention.h"
#include "scaled_dot_product_attention_varlen.h"
#include "spatial_correlation_sample.h"
#include "tensor_caster.h"
#include "tensor_core_tiled_layout.h"

#ifndef PKG_VERSION
#define PKG_VERSION "unknown"
#endif
#ifndef PKG_COMPILE_FLAGS
#define PKG_COMPILE_FLAGS ""
#endif
#ifndef PKG_CUDA_TOOLKIT
#define PKG_CUDA_TOOLKIT ""
#endif
#ifndef PKG_BUILT_CPU_LEVELS
#define PKG_BUILT_CPU_LEVELS ""
#endif
#ifndef PKG_CUDA_ARCHITECTURES
#define PKG_CUDA_ARCHITECTURES ""
#endif

namespace py = pybind11;

namespace pkg::python {
namespace {

Tensor call_muladd(const Tensor& a, const Tensor& b, double c) {
  return checked_dispatch<Tensor>([&] { check_muladd(a, b); },
                                  PKG_NAMESPACE_TEXT "::muladd", a, b, c);
}

Tensor call_mul(const Tensor& a, const Tensor& b) {
  return checked_dispatch<Tensor>([&] { check_mul(a, b); },
                                  PKG_NAMESPACE_TEXT "::mul", a, b);
}

void call_add_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  checked_dispatch<void>([&] { check_add_out(a, b, out); },
                         PKG_NAMESPACE_TEXT "::add_out", a, b, out);
}

Tensor call_d_sigmoid(const Tensor& z) {
  return checked_dispatch<Tensor>([&] { check_d_sigmoid(z); },
                                  PKG_NAMESPACE_TEXT "::d_sigmoid", z);
}

Tensor call_matmul(const Tensor& a, const Tensor& b,
                   std::optional<ScalarType> out_dtype) {
  PKG_CHECK(out_dtype != ScalarType::Undefined,
            "matmul: out_dtype is a dtype that pkg does not compute with; "
            "supported are None, the inputs' dtype, torch.float32 for half "
            "precision and torch.int32 for int8");
  return checked_dispatch<Tensor>([&] { check_matmul(a, b, out_dtype); },
                                  PKG_NAMESPACE_TEXT "::matmul", a, b,
                                  out_dtype);
}

// Calls an operator by way of Python: PyTorch below 2.15 loses the memory of a
// string that C++ gives to its dispatcher.
template <class... Arguments>
Tensor call_from_python(const char* name, const Arguments&... arguments) {
  const py::gil_scoped_acquire gil;
  const py::object operators =
      py::module_::import("torch").attr("ops").attr(PKG_NAMESPACE_TEXT);
  return operators.attr(name)
      .attr("default")(arguments...)
      .template cast<Tensor>();
}

Tensor call_linear(const Tensor& input, const Tensor& weight,
                   const std::optional<Tensor>& bias,
                   const std::optional<std::string>& activation) {
  if (activation) {
    return call_from_python("linear", input, weight, bias, activation);
  }
  return checked_dispatch<Tensor>(
      [&] { check_linear(input, weight, bias, std::nullopt); },
      PKG_NAMESPACE_TEXT "::linear", input, weight, bias,
      std::optional<Text>());
}

Tensor call_pack_linear_weight(const Tensor& weight) {
  return checked_dispatch<Tensor>([&] { check_pack_linear_weight(weight); },
                                  PKG_NAMESPACE_TEXT "::pack_linear_weight",
                                  weight);
}

Tensor call_packed_linear(const Tensor& input, const Tensor& packed_weight,
                          int64_t out_features,
                          const std::optional<Tensor>& bias,
                          const std::optional<std::string>& activation) {
  if (activation) {
    return call_from_python("packed_linear", input, packed_weight, out_features,
                            bias, activation);
  }
  return checked_dispatch<Tensor>(
      [&] {
        check_packed_linear(input, packed_weight, out_features, bias,
                            std::nullopt);
      },
      PKG_NAMESPACE_TEXT "::packed_linear", input, packed_weight, out_features,
      bias, std::optional<Text>());
}

template <RowValues values>
Tensor call_rowwise_scaled_linear(const Tensor& input,
                                  const Tensor& input_scale,
                                  const Tensor& weight,
                                  const Tensor& weight_scale,
                                  const std::optional<Tensor>& bias,
                                  std::optional<ScalarType> out_dtype) {
  constexpr const char* kName = values == RowValues::Int8 ? PKG_NAMESPACE_TEXT
                                    "::rowwise_scaled_linear_s8s4"
                                                          : PKG_NAMESPACE_TEXT
                                    "::rowwise_scaled_linear_s4s4";
  constexpr const char* kOp =
      kName + std::string_view(PKG_NAMESPACE_TEXT).size() + 2;
  PKG_CHECK(out_dtype != ScalarType::Undefined, kOp,
            ": out_dtype is a dtype that pkg does not compute with; supported "
            "are None, torch.float16, bfloat16, float32 and float64");
  return checked_dispatch<Tensor>(
      [&] {
        check_rowwise_scaled_linear(kOp, values, input, input_scale, weight,
                                    weight_scale, bias, out_dtype);
      },
      kName, input, input_scale, weight, weight_scale, bias, out_dtype);
}

std::tuple<Tensor, Tensor> call_quantize_rowwise(const Tensor& input,
                                                 int64_t bits) {
  return checked_dispatch<std::tuple<Tensor, Tensor>>(
      [&] { plan_quantize_rowwise(input, bits); },
      PKG_NAMESPACE_TEXT "::quantize_rowwise", input, bits);
}

Tensor call_pack_tensor_core_tiled_layout(const Tensor& w,
                                          int64_t inner_k_tiles) {
  return checked_dispatch<Tensor>(
      [&] { plan_pack_tensor_core_tiled_layout(w, inner_k_tiles); },
      PKG_NAMESPACE_TEXT "::pack_tensor_core_tiled_layout", w, inner_k_tiles);
}

Tensor call_unpack_tensor_core_tiled_layout(const Tensor& packed_w,
                                            int64_t inner_k_tiles) {
  return checked_dispatch<Tensor>(
      [&] { plan_unpack_tensor_core_tiled_layout(packed_w, inner_k_tiles); },
      PKG_NAMESPACE_TEXT "::unpack_tensor_core_tiled_layout", packed_w,
      inner_k_tiles);
}

Tensor call_dequantize_tensor_core_tiled_layout(const Tensor& packed_w,
                                                const Tensor& scales_and_zeros,
                                                int64_t group_size,
                                                int64_t inner_k_tiles) {
  return checked_dispatch<Tensor>(
      [&] {
        plan_dequantize_tensor_core_tiled_layout(packed_w, scales_and_zeros,
                                                 group_size, inner_k_tiles);
      },
      PKG_NAMESPACE_TEXT "::dequantize_tensor_core_tiled_layout", packed_w,
      scales_and_zeros, group_size, inner_k_tiles);
}

Tensor call_int4_linear(const Tensor& input, const Tensor& packed_w,
                        const Tensor& scales_and_zeros, int64_t group_size,
                        int64_t inner_k_tiles,
                        const std::optional<Tensor>& bias) {
  return checked_dispatch<Tensor>(
      [&] {
        check_int4_linear(input, packed_w, scales_and_zeros, group_size,
                          inner_k_tiles, bias);
      },
      PKG_NAMESPACE_TEXT "::int4_linear", input, packed_w, scales_and_zeros,
      group_size, inner_k_tiles, bias);
}

Tensor call_scaled_dot_product_attention(const Tensor& query, const Tensor& key,
                                         const Tensor& value,
                                         const std::optional<Tensor>& attn_mask,
                                         double dropout_p, bool is_causal,
                                         std::optional<double> scale,
                                         bool enable_gqa) {
  return checked_dispatch<Tensor>(
      [&] {
        check_scaled_dot_product_attention(query, key, value, attn_mask,
                                           dropout_p, is_causal, enable_gqa);
      },
      PKG_NAMESPACE_TEXT "::scaled_dot_product_attention", query, key, value,
      attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

Tensor call_scaled_dot_product_attention_varlen(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, double dropout_p,
    std::optional<double> softmax_scale, bool causal) {
  return checked_dispatch<Tensor>(
      [&] {
        check_scaled_dot_product_attention_varlen(
            query, key, value, cu_seqlens_q, cu_seqlens_k,
            {max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal});
      },
      PKG_NAMESPACE_TEXT "::scaled_dot_product_attention_varlen", query, key,
      value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
      softmax_scale, causal);
}

Tensor call_decode_attention(const Tensor& query, const Tensor& key_cache,
                             const Tensor& value_cache,
                             const Tensor& cache_lengths,
                             const std::optional<Tensor>& block_table,
                             std::optional<double> scale) {
  return checked_dispatch<Tensor>(
      [&] {
        check_decode_attention(query, key_cache, value_cache, cache_lengths,
                               block_table);
      },
      PKG_NAMESPACE_TEXT "::decode_attention", query, key_cache, value_cache,
      cache_lengths, block_table, scale);
}

// A number for height and width, or one for each.
using IntOrPair = std::variant<int64_t, std::array<int64_t, 2>>;

std::vector<int64_t> pair_of(const IntOrPair& given) {
  if (const auto* number = std::get_if<int64_t>(&given)) {
    return {*number, *number};
  }
  const auto& pair = std::get<1>(given);
  return {pair.begin(), pair.end()};
}

Tensor call_spatial_correlation_sample(
    const Tensor& input1, const Tensor& input2, const IntOrPair& kernel_size,
    const IntOrPair& patch_size, const IntOrPair& stride,
    const IntOrPair& padding, const IntOrPair& dilation,
    const IntOrPair& dilation_patch) {
  const std::vector<int64_t> options[] = {
      pair_of(kernel_size), pair_of(patch_size), pair_of(stride),
      pair_of(padding),     pair_of(dilation),   pair_of(dilation_patch)};
  return checked_dispatch<Tensor>(
      [&] {
        check_spatial_correlation_sample(input1, input2,
                                         {options[0], options[1], options[2],
                                          options[3], options[4], options[5]});
      },
      PKG_NAMESPACE_TEXT "::spatial_correlation_sample", input1, input2,
      options[0], options[1], options[2], options[3], options[4], options[5]);
}

std::tuple<Tensor, Tensor> call_lltm(const Tensor& input, const Tensor& weights,
                                     const Tensor& bias, const Tensor& old_h,
                                     const Tensor& old_cell) {
  return checked_dispatch<std::tuple<Tensor, Tensor>>(
      [&] { plan_lltm_cell(input, weights, bias, old_h, old_cell); },
      PKG_NAMESPACE_TEXT "::lltm", input, weights, bias, old_h, old_cell);
}

std::tuple<Tensor, Tensor> call_lltm_sequence(const Tensor& input,
                                              const Tensor& weights,
                                              const Tensor& bias,
                                              const Tensor& old_h,
                                              const Tensor& old_cell) {
  return checked_dispatch<std::tuple<Tensor, Tensor>>(
      [&] { plan_lltm_sequence(input, weights, bias, old_h, old_cell); },
      PKG_NAMESPACE_TEXT "::lltm_sequence", input, weights, bias, old_h,
      old_cell);
}

// PyTorch's own refusal would come with a backtrace on stderr.
void refuse_taken_namespace() {
  const auto schemas =
      py::module_::import("torch._C")
          .attr("_jit_get_schemas_for_operator")(PKG_NAMESPACE_TEXT "::muladd");
  if (py::len(schemas) > 0 && !operators_are_defined()) {
    throw py::import_error(kNamespaceTaken);
  }
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::string version_text(uint64_t version) {
  return std::to_string((version >> 56) & 0xFF) + "." +
         std::to_string((version >> 48) & 0xFF);
}

// The package's libraries that lie beside this one.
std::vector<std::string> libraries_beside(const py::handle& module) {
  std::set<std::string> names;
  const std::filesystem::path file(module.attr("__file__").cast<std::string>());
  for (const auto& entry :
       std::filesystem::directory_iterator(file.parent_path())) {
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    if (name.starts_with('_') && (extension == ".so" || extension == ".pyd")) {
      names.insert(name.substr(0, name.find('.')));
    }
  }
  return {names.begin(), names.end()};
}

py::dict build_info(const py::handle& module) {
  py::dict info;
  info["version"] = PKG_VERSION;
  info["namespace"] = PKG_NAMESPACE_TEXT;
  info["compiler"] = compiler();
  info["flags"] = PKG_COMPILE_FLAGS;
  info["stable_abi_target"] = version_text(TORCH_TARGET_VERSION);
  info["built_with_torch"] = version_text(TORCH_ABI_VERSION);
  info["cuda_toolkit"] =
      *PKG_CUDA_TOOLKIT ? py::cast(PKG_CUDA_TOOLKIT) : py::none();
  info["cpu_levels"] = py::str(PKG_BUILT_CPU_LEVELS).attr("split")();
  info["cuda_architectures"] = PKG_CUDA_ARCHITECTURES;
  info["libraries"] = libraries_beside(module);
  return info;
}

// The level of the CPU library in use, which the loader tells.
std::string& cpu_capability_in_use() {
  static std::string capability;
  return capability;
}

std::optional<std::string> cpu_capability() {
  if (!cpu_capability_in_use().empty()) {
    return cpu_capability_in_use();
  }
  const auto best = best_capability(detect_cpu_features());
  return best ? std::optional<std::string>(capability_name(*best))
              : std::nullopt;
}

std::vector<std::string> cpu_capabilities() {
  std::vector<std::string> names;
  const auto best = best_capability(detect_cpu_features());
  for (const CpuCapability capability : kCpuCapabilities) {
    if (best && capability <= *best) {
      names.emplace_back(capability_name(capability));
    }
  }
  return names;
}

}  // namespace
}  // namespace pkg::python

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace pkg::python;
  using release_gil = py::call_guard<py::gil_scoped_release>;

  module.doc() = "Compiled part of pkg: build facts and operators on tensors.";
  TensorBridge::instance();
  refuse_taken_namespace();
  pkg::define_operators();

  module.def(
      "build_info", [self = module.ptr()] { return build_info(self); },
      "Version, compiler, flags, stable-ABI target, CPU levels and CUDA "
      "toolkit that this "
      "build was made with, and the libraries that are present.");
  module.def("cpu_capability", &cpu_capability,
             "The instruction set of the CPU library in use; before one is "
             "loaded the best that this processor and its operating system "
             "run, or None below the baseline.");
  module.def(
      "_set_cpu_capability",
      [](std::string capability) {
        cpu_capability_in_use() = std::move(capability);
      },
      py::arg("capability"), "Called by the loader.");
  module.def("cpu_capabilities", &cpu_capabilities,
             "All instruction sets that can run here, the least first.");

  define_direct_calls(module);

  module.def("muladd", &call_muladd, py::arg("a"), py::arg("b"), py::arg("c"),
             release_gil(), "a * b + c. See pkg.ops.muladd.");
  module.def("mul", &call_mul, py::arg("a"), py::arg("b"), release_gil(),
             "a * b. See pkg.ops.mul.");
  module.def("add_out", &call_add_out, py::arg("a"), py::arg("b"),
             py::arg("out"), release_gil(),
             "Writes a + b into out. See pkg.ops.add_out.");
  module.def("d_sigmoid", &call_d_sigmoid, py::arg("z"), release_gil(),
             "Derivative of the sigmoid function. See pkg.ops.d_sigmoid.");
  module.def("matmul", &call_matmul, py::arg("a"), py::arg("b"), py::kw_only(),
             py::arg("out_dtype") = py::none(), release_gil(),
             "Matrix product. See pkg.ops.matmul.");
  module.def("linear", &call_linear, py::arg("input"), py::arg("weight"),
             py::arg("bias") = py::none(), py::arg("activation") = py::none(),
             release_gil(),
             "input times the transpose of weight, plus bias, through an "
             "activation. See pkg.ops.linear.");
  module.def("pack_linear_weight", &call_pack_linear_weight, py::arg("weight"),
             release_gil(), "See pkg.ops.pack_linear_weight.");
  module.def("packed_linear", &call_packed_linear, py::arg("input"),
             py::arg("packed_weight"), py::arg("out_features"),
             py::arg("bias") = py::none(), py::arg("activation") = py::none(),
             release_gil(), "See pkg.ops.packed_linear.");
  const auto define_rowwise_scaled_linear = [&](const char* name,
                                                auto function) {
    module.def(name, function, py::arg("input"), py::arg("input_scale"),
               py::arg("weight"), py::arg("weight_scale"),
               py::arg("bias") = py::none(), py::arg("out_dtype") = py::none(),
               release_gil(), "See the function of that name in pkg.ops.");
  };
  define_rowwise_scaled_linear(
      "rowwise_scaled_linear_s8s4",
      &call_rowwise_scaled_linear<pkg::RowValues::Int8>);
  define_rowwise_scaled_linear(
      "rowwise_scaled_linear_s4s4",
      &call_rowwise_scaled_linear<pkg::RowValues::Int4>);
  module.def("quantize_rowwise", &call_quantize_rowwise, py::arg("input"),
             py::arg("bits") = 8, release_gil(),
             "See pkg.ops.quantize_rowwise.");
  module.def("pack_tensor_core_tiled_layout",
             &call_pack_tensor_core_tiled_layout, py::arg("w"),
             py::arg("inner_k_tiles"), release_gil(),
             "See pkg.ops.pack_tensor_core_tiled_layout.");
  module.def("unpack_tensor_core_tiled_layout",
             &call_unpack_tensor_core_tiled_layout, py::arg("packed_w"),
             py::arg("inner_k_tiles"), release_gil(),
             "See pkg.ops.unpack_tensor_core_tiled_layout.");
  module.def("dequantize_tensor_core_tiled_layout",
             &call_dequantize_tensor_core_tiled_layout, py::arg("packed_w"),
             py::arg("scales_and_zeros"), py::arg("group_size"),
             py::arg("inner_k_tiles"), release_gil(),
             "See pkg.ops.dequantize_tensor_core_tiled_layout.");
  module.def("int4_linear", &call_int4_linear, py::arg("input"),
             py::arg("packed_w"), py::arg("scales_and_zeros"),
             py::arg("group_size"), py::arg("inner_k_tiles"),
             py::arg("bias") = py::none(), release_gil(),
             "linear with a weight of 4-bit values. See pkg.ops.int4_linear.");
  module.def("lltm", &call_lltm, py::arg("input"), py::arg("weights"),
             py::arg("bias"), py::arg("old_h"), py::arg("old_cell"),
             release_gil(), "A recurrent cell. See pkg.ops.lltm.");
  module.def("lltm_sequence", &call_lltm_sequence, py::arg("input"),
             py::arg("weights"), py::arg("bias"), py::arg("old_h"),
             py::arg("old_cell"), release_gil(), "See pkg.ops.lltm_sequence.");
  module.def("decode_attention", &call_decode_attention, py::arg("query"),
             py::arg("key_cache"), py::arg("value_cache"),
             py::arg("cache_lengths"), py::arg("block_table") = py::none(),
             py::arg("scale") = py::none(), release_gil(),
             "See pkg.ops.decode_attention.");
  module.def("scaled_dot_product_attention", &call_scaled_dot_product_attention,
             py::arg("query"), py::arg("key"), py::arg("value"),
             py::arg("attn_mask") = py::none(), py::arg("dropout_p") = 0.0,
             py::arg("is_causal") = false, py::kw_only(),
             py::arg("scale") = py::none(), py::arg("enable_gqa") = false,
             release_gil(), "See pkg.ops.scaled_dot_product_attention.");
  module.def("scaled_dot_product_attention_varlen",
             &call_scaled_dot_product_attention_varlen, py::arg("query"),
             py::arg("key"), py::arg("value"), py::arg("cu_seqlens_q"),
             py::arg("cu_seqlens_k"), py::arg("max_seqlen_q"),
             py::arg("max_seqlen_k"), py::arg("dropout_p") = 0.0,
             py::arg("softmax_scale") = py::none(), py::arg("causal") = false,
             release_gil(), "See pkg.ops.scaled_dot_product_attention_varlen.");
  module.def("spatial_correlation_sample", &call_spatial_correlation_sample,
             py::arg("input1"), py::arg("input2"), py::arg("kernel_size") = 1,
             py::arg("patch_size") = 1, py::arg("stride") = 1,
             py::arg("padding") = 0, py::arg("dilation") = 1,
             py::arg("dilation_patch") = 1, release_gil(),
             "See pkg.ops.spatial_correlation_sample.");
}
