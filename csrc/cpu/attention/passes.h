// The two passes of attention for callers that have memory for the results: the
// operators, and PyTorch's own (cpu/accelerate/attention.cpp). Compiled in
// scaled_dot_product_attention_forward.cpp and ..._backward.cpp.
#pragma once

#include <optional>

#include "host/tensor.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu::attention {

struct ForwardArguments {
  const AttentionShape& shape;
  const TensorView& query;
  const TensorView& key;
  const TensorView& value;
  const std::optional<TensorView>& attn_mask;
  const std::optional<TensorView>& dropout_seed;
  double dropout_p;
  bool is_causal;
  const AttentionExtras& extras;
};

// The output has contiguous columns, the log-sum-exp is contiguous. The
// residual may be empty, or is laid out as the output.
struct ForwardResults {
  Tensor output;
  Tensor log_sum_exp;
  Tensor output_residual;
  // A backward pass may follow, which makes the same scores again.
  bool has_backward = true;
};

void run_forward(const ForwardArguments& arguments,
                 const ForwardResults& results);

struct BackwardArguments {
  const AttentionShape& shape;
  const TensorView& grad_output;
  const TensorView& query;
  const TensorView& key;
  const TensorView& value;
  const std::optional<TensorView>& attn_mask;
  const std::optional<TensorView>& dropout_seed;
  const TensorView& output;
  const TensorView& log_sum_exp;
  const TensorView& output_residual;
  double dropout_p;
  bool is_causal;
  const AttentionExtras& extras;
};

// With contiguous columns; of an operand that is broadcast, contiguous. The
// mask's is written where it is asked for.
struct Gradients {
  Tensor query;
  Tensor key;
  Tensor value;
  Tensor mask;
};

void run_backward(const BackwardArguments& arguments,
                  const Gradients& gradients, bool needs_mask_grad);

}  // namespace pkg::cpu::attention
