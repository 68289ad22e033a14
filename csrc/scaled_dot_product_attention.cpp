// The composite part of attention: it draws the dropout's seed from PyTorch's
// generator, so that torch.manual_seed reproduces it, and calls the forward
// operator, which is the one that has kernels and a gradient.
#include "scaled_dot_product_attention.h"

#include <limits>
#include <tuple>
#include <vector>

#include "host/dispatch.h"
#include "host/namespace.h"

namespace pkg {
namespace {

Tensor draw_seed(const Tensor& like) {
  const std::optional<torch::stable::Device> device = like.device();
  return dispatch<Tensor>(
      "aten::randint", "", std::numeric_limits<int64_t>::max(),
      std::vector<int64_t>{1}, std::optional<ScalarType>(ScalarType::Long),
      std::nullopt, device, std::nullopt);
}

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key,
                                    const Tensor& value,
                                    const std::optional<Tensor>& attn_mask,
                                    double dropout_p, bool is_causal,
                                    std::optional<double> scale,
                                    bool enable_gqa, int64_t window_left,
                                    int64_t window_right, double softcap,
                                    const std::optional<Tensor>& alibi_slopes) {
  const std::optional<Tensor> seed =
      dropout_p > 0.0 ? std::optional(draw_seed(query)) : std::nullopt;
  return std::get<0>(explained_dispatch<std::tuple<Tensor, Tensor, Tensor>>(
      [&] {
        check_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa,
            {alibi_slopes, window_left, window_right, softcap});
      },
      PKG_NAMESPACE_TEXT "::scaled_dot_product_attention_forward", query, key,
      value, attn_mask, seed, dropout_p, is_causal, scale, enable_gqa, false,
      alibi_slopes, window_left, window_right, softcap));
}

}  // namespace pkg
