// The backward pass of scaled dot-product attention.
//
// Algorithm: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2). For each
// pair of a block of keys and a block of rows, with D = rowsum(dO O) and M the
// factors of dropout:
//
//   P = exp(S - log_sum_exp)           S = scale Q K^T + mask
//   dS = P (M (dO V^T) - D)
//   dV += (M P)^T dO,  dK += scale dS^T Q,  dQ += scale dS K
//
// In half precision O is the output and what rounding took off it together:
// dO V^T and D are often much larger than their differences. What rounding
// makes of the sum of a row's dS is taken off dQ at the end:
// cpu/attention/compensation.h.
//
// Five products, without atomic additions: a task owns blocks of keys and sums
// their dK and dV over all rows (and all the query heads of a group) in its own
// cache; dQ is summed by the task that owns all keys of a head, or, where the
// keys are split among threads, part by part, and the parts are added in order.
//
// Tiles: the micro-kernel's; 96 rows x 192 keys, so that P and dS (156 KiB), a
// block of keys, its sums and a block of rows, each packed two ways, take half
// of a 1 MiB L2 cache at a head size of 64. Queries and output gradients are
// packed once for all blocks of keys.
//
// Operations: 2 L S (3 E + 2 Ev) and L S exponentials for each head, half if
// causal. Extra memory 2 L (E + Ev) packed and 2 L E for each part of dQ: O(L),
// never L S. Bound by the multiply-add units.
#include <tuple>
#include <vector>

#include "cpu/attention/gradients.h"
#include "cpu/attention/repeated.h"
#include "cpu/attention/tiled_backward.h"
#include "host/namespace.h"

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
};

struct Gradients {
  Tensor query;
  Tensor key;
  Tensor value;
  Tensor mask;
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
void run_backward(const BackwardArguments& arguments,
                  const Gradients& gradients, bool needs_mask_grad) {
  using Number = simd::Compute<Input>;
  const AttentionShape& shape = arguments.shape;
  std::vector<RowStatistics<Number>> statistics(
      static_cast<size_t>(shape.batch() * shape.rows));
  BackwardProblem<Input> problem{
      make_problem<Input>(shape, arguments.query, arguments.key,
                          arguments.value, arguments.attn_mask,
                          arguments.dropout_seed, arguments.dropout_p,
                          arguments.is_causal),
      matrices<Input>(shape, arguments.grad_output),
      matrices<Input>(shape, arguments.output),
      has_elements(arguments.output_residual)
          ? matrices<Input>(shape, arguments.output_residual)
          : Matrices<Input>{},
      {static_cast<const Number*>(arguments.log_sum_exp.const_data_ptr()),
       log_sum_exp_operand(arguments.log_sum_exp)},
      statistics.data()};
  const RepeatedForward<Input> repeated(problem);
  compute_statistics(problem);

  OperandGradient<Input> query(shape, gradients.query, 1);
  OperandGradient<Input> key(shape, gradients.key, shape.group);
  OperandGradient<Input> value(shape, gradients.value, shape.group);
  std::optional<MaskSums<Input>> mask;
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

std::tuple<Tensor, Tensor, Tensor, Tensor>
scaled_dot_product_attention_backward(
    const TensorView& grad_output, const TensorView& query,
    const TensorView& key, const TensorView& value,
    const std::optional<TensorView>& attn_mask,
    const std::optional<TensorView>& dropout_seed, const TensorView& output,
    const TensorView& log_sum_exp, const TensorView& output_residual,
    double dropout_p, bool is_causal, std::optional<double> scale,
    bool enable_gqa, bool needs_mask_grad) {
  const AttentionShape shape = plan_attention(
      query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
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
  const BackwardArguments arguments{
      shape,       grad_output,     query,        key,
      value,       attn_mask,       dropout_seed, output,
      log_sum_exp, output_residual, dropout_p,    is_causal};
  switch (shape.type) {
    case ScalarType::Double:
      run_backward<double>(arguments, gradients, needs_mask_grad);
      break;
    case ScalarType::Float:
      run_backward<float>(arguments, gradients, needs_mask_grad);
      break;
    case ScalarType::Half:
      run_backward<Half>(arguments, gradients, needs_mask_grad);
      break;
    default:
      run_backward<BFloat16>(arguments, gradients, needs_mask_grad);
  }
  return {gradients.query, gradients.key, gradients.value, gradients.mask};
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&scaled_dot_product_attention_backward>(
      "scaled_dot_product_attention_backward");
}

}  // namespace
}  // namespace pkg::cpu
