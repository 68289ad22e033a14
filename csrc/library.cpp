// The schema of every operator, on one page.
#include "library.h"

#include <torch/csrc/stable/library.h>

#include <string_view>

#include "host/check.h"
#include "host/namespace.h"

namespace pkg {

namespace {

constexpr const char* kSchemas[] = {
    "muladd(Tensor a, Tensor b, float c) -> Tensor",
    "mul(Tensor a, Tensor b) -> Tensor",
    "add_out(Tensor a, Tensor b, Tensor(a!) out) -> ()",
    "d_sigmoid(Tensor z) -> Tensor",
    "d_sigmoid_backward(Tensor grad, Tensor z) -> Tensor",

    "matmul(Tensor a, Tensor b, *, ScalarType? out_dtype=None) -> Tensor",

    "linear(Tensor input, Tensor weight, Tensor? bias=None, str? "
    "activation=None) -> Tensor",
    "linear_forward(Tensor input, Tensor weight, Tensor? bias, str? "
    "activation) -> (Tensor output, Tensor pre_activation)",
    "linear_activation_backward(Tensor grad, Tensor saved, str activation) -> "
    "Tensor",
    "pack_linear_weight(Tensor weight) -> Tensor",
    "packed_linear(Tensor input, Tensor packed_weight, SymInt out_features, "
    "Tensor? bias=None, str? activation=None) -> Tensor",
    "rowwise_scaled_linear_s8s4(Tensor input, Tensor input_scale, Tensor "
    "weight, Tensor weight_scale, Tensor? bias=None, ScalarType? "
    "out_dtype=None) -> Tensor",
    "rowwise_scaled_linear_s4s4(Tensor input, Tensor input_scale, Tensor "
    "weight, Tensor weight_scale, Tensor? bias=None, ScalarType? "
    "out_dtype=None) -> Tensor",
    "quantize_rowwise(Tensor input, int bits=8) -> (Tensor values, Tensor "
    "scale)",

    "pack_tensor_core_tiled_layout(Tensor w, int inner_k_tiles) -> Tensor",
    "unpack_tensor_core_tiled_layout(Tensor packed_w, int inner_k_tiles) -> "
    "Tensor",
    "dequantize_tensor_core_tiled_layout(Tensor packed_w, Tensor "
    "scales_and_zeros, int group_size, int inner_k_tiles) -> Tensor",
    "int4_linear(Tensor input, Tensor packed_w, Tensor scales_and_zeros, int "
    "group_size, int inner_k_tiles, Tensor? bias=None) -> Tensor",

    "lltm(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor "
    "old_cell) -> (Tensor new_h, Tensor new_cell)",
    "lltm_sequence(Tensor input, Tensor weights, Tensor bias, Tensor old_h, "
    "Tensor old_cell) -> (Tensor hidden, Tensor cells)",
    "lltm_forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, "
    "Tensor old_cell) -> (Tensor hidden, Tensor cells, Tensor gates)",
    "lltm_backward(Tensor? grad_hidden, Tensor? grad_cells, Tensor? "
    "grad_gates, Tensor gates, Tensor hidden, Tensor cells, Tensor input, "
    "Tensor weights, Tensor old_h, bool needs_input, bool needs_weights, bool "
    "needs_old_h) -> (Tensor grad_input, Tensor grad_weights, Tensor "
    "grad_bias, Tensor grad_old_h, Tensor grad_old_cell)",

    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False, int window_left=-1, int "
    "window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None) -> Tensor",
    "scaled_dot_product_attention_forward(Tensor query, Tensor key, Tensor "
    "value, Tensor? attn_mask, Tensor? dropout_seed, float dropout_p, bool "
    "is_causal, float? scale, bool enable_gqa, bool keeps_residual, Tensor? "
    "alibi_slopes=None, int window_left=-1, int window_right=-1, float "
    "softcap=0.0) -> (Tensor output, Tensor log_sum_exp, Tensor "
    "output_residual)",
    "scaled_dot_product_attention_backward(Tensor grad_output, Tensor query, "
    "Tensor key, Tensor value, Tensor? attn_mask, Tensor? dropout_seed, Tensor "
    "output, Tensor log_sum_exp, Tensor output_residual, float dropout_p, bool "
    "is_causal, float? scale, bool enable_gqa, bool needs_mask_grad, Tensor? "
    "alibi_slopes=None, int window_left=-1, int window_right=-1, float "
    "softcap=0.0) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
    "Tensor grad_mask)",
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor cache_lengths, Tensor? block_table=None, float? scale=None, int "
    "window_left=-1, float softcap=0.0, Tensor? alibi_slopes=None) -> Tensor",
    "attention_dropout_mask(Tensor seed, int batch, int rows, int columns, "
    "float dropout_p) -> Tensor",

    "scaled_dot_product_attention_varlen(Tensor query, Tensor key, Tensor "
    "value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p=0.0, float? softmax_scale=None, bool "
    "causal=False, *, int window_left=-1, int window_right=-1, float "
    "softcap=0.0, Tensor? alibi_slopes=None) -> Tensor",
    "scaled_dot_product_attention_varlen_forward(Tensor query, Tensor key, "
    "Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? "
    "dropout_seed, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, "
    "float? softmax_scale, bool causal, bool keeps_residual, Tensor? "
    "alibi_slopes=None, int window_left=-1, int window_right=-1, float "
    "softcap=0.0) -> (Tensor output, Tensor log_sum_exp, Tensor "
    "output_residual)",
    "scaled_dot_product_attention_varlen_backward(Tensor grad_output, Tensor "
    "query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor "
    "cu_seqlens_k, Tensor? dropout_seed, Tensor output, Tensor log_sum_exp, "
    "Tensor output_residual, SymInt max_seqlen_q, SymInt max_seqlen_k, float "
    "dropout_p, float? softmax_scale, bool causal, Tensor? "
    "alibi_slopes=None, int window_left=-1, int window_right=-1, float "
    "softcap=0.0) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",

    "rotary_embedding(Tensor input, Tensor cos, Tensor sin, *, bool "
    "interleaved=False) -> Tensor",
    "rotary_embedding_backward(Tensor grad, Tensor cos, Tensor sin, bool "
    "interleaved) -> Tensor",

    "spatial_correlation_sample(Tensor input1, Tensor input2, SymInt[2] "
    "kernel_size=1, SymInt[2] patch_size=1, SymInt[2] stride=1, SymInt[2] "
    "padding=0, SymInt[2] dilation=1, SymInt[2] dilation_patch=1) -> Tensor",
    "spatial_correlation_sample_backward(Tensor grad, Tensor other, bool "
    "of_input2, SymInt[2] kernel_size, SymInt[2] patch_size, SymInt[2] stride, "
    "SymInt[2] padding, SymInt[2] dilation, SymInt[2] dilation_patch) -> "
    "Tensor",
};

bool defined = false;

}  // namespace

bool operators_are_defined() { return defined; }

std::vector<std::string> operator_names() {
  std::vector<std::string> names;
  for (const std::string_view schema : kSchemas) {
    names.emplace_back(schema.substr(0, schema.find('(')));
  }
  return names;
}

void define_operators() {
  if (defined) {
    return;
  }
  // Not STABLE_TORCH_LIBRARY: its static constructor cannot report an error.
  // The handle is kept for the life of the process, as the operators are.
  TorchLibraryHandle library = nullptr;
  PKG_CHECK(aoti_torch_library_init_def(PKG_NAMESPACE_TEXT, __FILE__, __LINE__,
                                        &library) == TORCH_SUCCESS,
            kNamespaceTaken);
  defined = true;
  for (const char* schema : kSchemas) {
    PKG_CHECK(aoti_torch_library_def(library, schema) == TORCH_SUCCESS,
              "PyTorch refused the operator schema '", schema,
              "': perhaps an operator of this name is already registered by "
              "another library");
  }
}

}  // namespace pkg
