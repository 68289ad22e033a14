// The backward pass of scaled dot-product attention. The kernel, its
// derivation, what it costs and what bounds it: cpu/attention/backward.h. Here
// are the operands: where gradients go, and the sums over what was broadcast.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/attention/backward.h"
#include "cpu/attention/backward_problem.h"
#include "cpu/attention/grad_mask.h"
#include "cpu/attention/passes.h"
#include "cpu/attention/problem.h"
#include "cpu/attention/rows.h"
#include "cpu/gemm/arithmetic.h"
#include "cpu/runtime/element_types.h"
#include "cpu/runtime/parallel.h"
#include "cpu/simd/simd.h"
#include "host/namespace.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu {

namespace attention {

PKG_ATTENTION_BACKWARD(, double);
PKG_ATTENTION_BACKWARD(, float);
PKG_ATTENTION_BACKWARD(, Half);
PKG_ATTENTION_BACKWARD(, BFloat16);

}  // namespace attention

namespace {

using namespace attention;

// The gradient of one operand: written straight to the result, or, where the
// operand was broadcast, summed over the batch at the end.
template <class Input>
class OperandGradient {
 public:
  using Number = simd::Compute<Input>;

  OperandGradient(const AttentionShape& shape, const Tensor& result,
                  int64_t group)
      : shape_(shape), result_(result), group_(group) {
    const auto sizes = sizes_of(result);
    matrix_size_ = product(sizes.last(2));
    matrices_ = product(sizes.first(sizes.size() - 2));
    if (matrices_ != shape.batch() / group) {
      wide_.resize(static_cast<size_t>(shape.batch() / group * matrix_size_));
    }
  }

  GradientTarget<Input> target() {
    if (matrices_ == shape_.batch() / group_) {
      return {static_cast<Input*>(result_.mutable_data_ptr()), nullptr,
              attention_operand(shape_, result_, group_)};
    }
    const auto sizes = sizes_of(result_);
    return {nullptr, wide_.data(),
            contiguous_operand(shape_, group_, sizes[sizes.size() - 2],
                               sizes.back())};
  }

  void finish() const {
    if (matrices_ == shape_.batch() / group_ || matrix_size_ == 0) {
      return;
    }
    const AttentionOperand layout = attention_operand(shape_, result_, group_);
    auto* to = static_cast<Input*>(result_.mutable_data_ptr());
    parallel_for(matrices_, 1, [&](int64_t begin, int64_t end) {
      std::vector<Number> sums(static_cast<size_t>(matrix_size_));
      for (int64_t matrix = begin; matrix < end; ++matrix) {
        std::fill(sums.begin(), sums.end(), Number{0});
        for (int64_t b = 0; b < shape_.batch(); b += group_) {
          if (layout.offset(shape_, b) != matrix * matrix_size_) {
            continue;
          }
          const Number* from = wide_.data() + b / group_ * matrix_size_;
          for (int64_t i = 0; i < matrix_size_; ++i) {
            sums[static_cast<size_t>(i)] += from[i];
          }
        }
        store_row(sums.data(), matrix_size_, Number{1},
                  to + matrix * matrix_size_);
      }
    });
  }

 private:
  const AttentionShape& shape_;
  const Tensor& result_;
  int64_t group_;
  int64_t matrix_size_;
  int64_t matrices_;
  std::vector<Number> wide_;
};

// The log-sum-exp (..., L) as matrices of one column.
AttentionOperand log_sum_exp_operand(const TensorView& log_sum_exp) {
  AttentionOperand operand{};
  const auto strides = strides_of(log_sum_exp);
  operand.row_stride = strides.back();
  operand.group = 1;
  std::copy(strides.begin(), strides.end() - 1, operand.lead_strides.begin());
  return operand;
}

template <class Input>
void backward_of(const BackwardArguments& arguments, const Gradients& gradients,
                 bool needs_mask_grad) {
  using Number = simd::Compute<Input>;
  const AttentionShape& shape = arguments.shape;
  std::vector<RowStatistics<Number>> statistics(
      static_cast<size_t>(shape.batch() * shape.rows));
  BackwardProblem<Input> problem{
      make_problem<Input>(shape, arguments.query, arguments.key,
                          arguments.value, arguments.attn_mask,
                          arguments.dropout_seed, arguments.dropout_p,
                          arguments.is_causal, arguments.extras.alibi_slopes),
      matrices<Input>(shape, arguments.grad_output),
      matrices<Input>(shape, arguments.output),
      has_elements(arguments.output_residual)
          ? matrices<Input>(shape, arguments.output_residual)
          : Matrices<Input>{},
      {static_cast<const Number*>(arguments.log_sum_exp.const_data_ptr()),
       log_sum_exp_operand(arguments.log_sum_exp)},
      statistics.data()};

  OperandGradient<Input> query(shape, gradients.query, 1);
  OperandGradient<Input> key(shape, gradients.key, shape.group);
  OperandGradient<Input> value(shape, gradients.value, shape.group);
  std::optional<GradMaskSums<Input>> mask;
  if (needs_mask_grad) {
    mask.emplace(shape, gradients.mask, problem.forward.key_heads(),
                 problem.forward.threads);
  }
  attention_gradients(problem, query.target(), key.target(), value.target(),
                      mask ? &*mask : nullptr);
  query.finish();
  key.finish();
  value.finish();
  if (mask) {
    mask->finish();
  }
}

}  // namespace

namespace attention {

void run_backward(const BackwardArguments& arguments,
                  const Gradients& gradients, bool needs_mask_grad) {
  with_floating_type(arguments.shape.type, [&](auto example) {
    backward_of<decltype(example)>(arguments, gradients, needs_mask_grad);
  });
}

}  // namespace attention

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor>
scaled_dot_product_attention_backward(
    const TensorView& grad_output, const TensorView& query,
    const TensorView& key, const TensorView& value,
    const std::optional<TensorView>& attn_mask,
    const std::optional<TensorView>& dropout_seed, const TensorView& output,
    const TensorView& log_sum_exp, const TensorView& output_residual,
    double dropout_p, bool is_causal, std::optional<double> scale,
    bool enable_gqa, bool needs_mask_grad,
    const std::optional<TensorView>& alibi_slopes, int64_t window_left,
    int64_t window_right, double softcap) {
  const AttentionExtras extras{alibi_slopes, window_left, window_right,
                               softcap};
  const AttentionShape shape =
      plan_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                     enable_gqa, extras);
  check_dropout_seed(query, dropout_seed, dropout_p);
  check_attention_backward(shape, query, grad_output, output, log_sum_exp,
                           output_residual, attn_mask, needs_mask_grad);
  const auto like = [](const TensorView& tensor) {
    return empty_contiguous(sizes_of(tensor), dtype_of(tensor),
                            device_of(tensor));
  };
  const Gradients gradients{
      like(query), like(key), like(value),
      needs_mask_grad ? like(*attn_mask)
                      : empty_contiguous(std::array<int64_t, 1>{0}, shape.type,
                                         device_of(query))};
  run_backward(
      {shape, grad_output, query, key, value, attn_mask, dropout_seed, output,
       log_sum_exp, output_residual, dropout_p, is_causal, extras},
      gradients, needs_mask_grad);
  return {gradients.query, gradients.key, gradients.value, gradients.mask};
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&scaled_dot_product_attention_backward>(
      "scaled_dot_product_attention_backward");
}

}  // namespace
}  // namespace pkg::cpu
