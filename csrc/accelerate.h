// What pkg._C and the CPU library say to one another of PyTorch's own operators
// that pkg.accelerate() takes over (pkg/_accelerate_routes.py says how).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "host/tensor.h"
#include "linear.h"

namespace pkg {

// PyTorch's operators, in the order of _accelerate_routes.py's OPERATORS. The
// forms with `out` count as the operator.
enum class AtenOperator : int32_t {
  Mm,
  Bmm,
  Addmm,
  Baddbmm,
  AddmmActivation,
  IntMm,
  Attention,
  AttentionBackward,
  VarlenAttention,
  VarlenAttentionBackward,
  Convolution,
  ConvolutionBackward,
  Gelu,
  GeluBackward,
  Silu,
  SiluBackward,
};
inline constexpr int kAtenOperators = 16;

// What becomes of a call. Where it is not taken nothing was written.
enum class Answer : int32_t {
  Refused,  // PyTorch's own kernel alone knows what to do, or what is wrong
  Left,     // ours is off, or not the faster one; PyTorch's does not refuse it
  Taken,
};

// activation(beta * input + alpha * a @ b): two matrices, or two batches of as
// many. What the operator does not have is null, 1, or None.
struct AddmmCall {
  AtenOperator op;
  const TensorView* input;
  const TensorView* a;
  const TensorView* b;
  double beta;
  double alpha;
  Activation activation;
};

// Where the result goes: memory that the caller has, or a new tensor.
struct AddmmOutput {
  const TensorView* view = nullptr;
  void* data = nullptr;
  std::optional<Tensor> made;
  // The result's, of a call that is not refused.
  std::array<int64_t, 3> sizes{};
  size_t dims = 0;

  std::span<const int64_t> result_sizes() const {
    return std::span(sizes).first(dims);
  }
};

using AcceleratedAddmm = Answer (*)(const AddmmCall&, AddmmOutput&);

// _scaled_dot_product_flash_attention_for_cpu, and with `grad_output` its
// backward operator, which has the forward one's results too.
struct AttentionCall {
  const TensorView* query;
  const TensorView* key;
  const TensorView* value;
  const TensorView* attn_mask;  // null where there is none
  bool is_causal;
  std::optional<double> scale;
  const TensorView* grad_output = nullptr;
  const TensorView* output = nullptr;
  const TensorView* log_sum_exp = nullptr;
};

// Output and log-sum-exp, or the gradients of query, key and value.
using AttentionResults = std::array<std::optional<Tensor>, 3>;

// False, with nothing written, where PyTorch's own kernel is to be called: it
// is the faster one, or the call is one that ours does not take.
using AcceleratedAttention = bool (*)(const AttentionCall&, AttentionResults&);

}  // namespace pkg
