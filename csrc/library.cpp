// The schema of every operator, on one page.
#include "library.h"

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "namespace.h"
#include "scaled_dot_product_attention.h"

namespace pkg {

namespace {

constexpr const char* kSchemas[] = {
    "muladd(Tensor a, Tensor b, float c) -> Tensor",
    "mul(Tensor a, Tensor b) -> Tensor",
    "add_out(Tensor a, Tensor b, *, Tensor(a!) out) -> ()",
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

    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False) -> Tensor",
    "scaled_dot_product_attention_forward(Tensor query, Tensor key, Tensor "
    "value, Tensor? attn_mask, Tensor? dropout_seed, float dropout_p, bool "
    "is_causal, float? scale, bool enable_gqa) -> (Tensor output, Tensor "
    "log_sum_exp)",
    "scaled_dot_product_attention_backward(Tensor grad_output, Tensor query, "
    "Tensor key, Tensor value, Tensor? attn_mask, Tensor? dropout_seed, Tensor "
    "output, Tensor log_sum_exp, float dropout_p, bool is_causal, float? "
    "scale, bool enable_gqa, bool needs_mask_grad) -> (Tensor grad_query, "
    "Tensor grad_key, Tensor grad_value, Tensor grad_mask)",
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor cache_lengths, Tensor? block_table=None, float? scale=None) -> "
    "Tensor",
    "attention_dropout_mask(Tensor seed, int batch, int rows, int columns, "
    "float dropout_p) -> Tensor",

    "scaled_dot_product_attention_varlen(Tensor query, Tensor key, Tensor "
    "value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p=0.0, bool is_causal=False, float? "
    "scale=None) -> Tensor",
    "scaled_dot_product_attention_varlen_forward(Tensor query, Tensor key, "
    "Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? "
    "dropout_seed, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, "
    "bool is_causal, float? scale) -> (Tensor output, Tensor log_sum_exp)",
    "scaled_dot_product_attention_varlen_backward(Tensor grad_output, Tensor "
    "query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor "
    "cu_seqlens_k, Tensor? dropout_seed, Tensor output, Tensor log_sum_exp, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, bool "
    "is_causal, float? scale) -> (Tensor grad_query, Tensor grad_key, Tensor "
    "grad_value)",
};

bool defined = false;

}  // namespace

bool operators_are_defined() { return defined; }

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
              "PyTorch refused the operator schema '", schema, "'");
  }
  auto* composites = new torch::stable::detail::StableLibrary(
      torch::stable::detail::StableLibrary::Kind::IMPL, PKG_NAMESPACE_TEXT,
      "CompositeImplicitAutograd", __FILE__, __LINE__);
  composites->impl("scaled_dot_product_attention",
                   TORCH_BOX(&scaled_dot_product_attention));
}

}  // namespace pkg
