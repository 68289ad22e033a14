#include "cpu/accelerate/attention.h"

#include <algorithm>
#include <array>
#include <limits>

#include "cpu/accelerate/routes.h"
#include "cpu/attention/decoding_forward.h"
#include "cpu/attention/passes.h"
#include "host/compiler.h"

namespace pkg::cpu::accelerate {

namespace {

using cpu::attention::Gradients;
namespace passes = cpu::attention;

// PyTorch's operands are of four dimensions: batch, heads, length, head size.
enum Dimension { kBatch, kHeads, kLength, kHeadSize, kDimensions };

bool is_operand(const TensorView& tensor, const TensorView& query) {
  return is_plain(tensor) && tensor.sizes.size() == kDimensions &&
         tensor.dtype == query.dtype && product(tensor.sizes) > 0 &&
         tensor.sizes[kBatch] == query.sizes[kBatch] &&
         tensor.sizes[kHeadSize] == query.sizes[kHeadSize];
}

bool is_mask(const AttentionCall& call) {
  const TensorView& mask = *call.attn_mask;
  const std::array<int64_t, kDimensions> scores = {
      call.query->sizes[kBatch], call.query->sizes[kHeads],
      call.query->sizes[kLength], call.key->sizes[kLength]};
  const size_t dims = mask.sizes.size();
  if (!is_plain(mask) ||
      (mask.dtype != ScalarType::Bool && mask.dtype != call.query->dtype &&
       mask.dtype != ScalarType::Float) ||
      (mask.dtype == ScalarType::Float &&
       call.query->dtype == ScalarType::Double) ||
      (dims != 2 && dims != kDimensions)) {
    return false;
  }
  for (size_t d = 0; d < dims; ++d) {
    const int64_t size = mask.sizes[d];
    if (size != 1 && size != scores[kDimensions - dims + d]) {
      return false;
    }
  }
  return true;
}

// False for what PyTorch's own operator refuses, or ours does not take.
bool is_taken(const AttentionCall& call) {
  const TensorView& query = *call.query;
  if (type_index(query.dtype) < 0 || query.dtype == ScalarType::Char ||
      query.sizes.size() != kDimensions || !is_operand(query, query) ||
      !is_operand(*call.key, query) || !is_operand(*call.value, query)) {
    return false;
  }
  const int64_t heads = query.sizes[kHeads];
  const int64_t key_heads = call.key->sizes[kHeads];
  return std::ranges::equal(call.key->sizes, call.value->sizes) &&
         heads % key_heads == 0 &&
         (call.attn_mask == nullptr || (!call.is_causal && is_mask(call)));
}

// What the forward operator returned, and the gradient of its output.
bool has_forward_results(const AttentionCall& call) {
  const TensorView& query = *call.query;
  const TensorView& sums = *call.log_sum_exp;
  const ScalarType type = query.dtype == ScalarType::Double ? ScalarType::Double
                                                            : ScalarType::Float;
  const auto is_like_query = [&](const TensorView& tensor) {
    return is_operand(tensor, query) &&
           std::ranges::equal(tensor.sizes, query.sizes);
  };
  return is_like_query(*call.grad_output) && is_like_query(*call.output) &&
         is_plain(sums) && sums.dtype == type &&
         std::ranges::equal(sums.sizes, query.sizes.first(kHeadSize));
}

Hidden hidden_of(const AttentionCall& call) {
  return call.is_causal              ? Hidden::Causal
         : call.attn_mask != nullptr ? Hidden::Mask
                                     : Hidden::Nothing;
}

std::optional<TensorView> mask_of(const AttentionCall& call) {
  return call.attn_mask != nullptr ? std::optional(*call.attn_mask)
                                   : std::nullopt;
}

AttentionShape plan(const AttentionCall& call, const AttentionExtras& extras) {
  return plan_attention(
      *call.query, *call.key, *call.value, mask_of(call), 0.0, call.is_causal,
      call.scale, call.query->sizes[kHeads] != call.key->sizes[kHeads], extras);
}

// Memory of (batch, length, heads, ...) seen as (batch, heads, length, ...), as
// PyTorch allocates gradients and log-sum-exp.
Tensor empty_with_heads_inside(std::span<const int64_t> sizes,
                               ScalarType type) {
  std::array<int64_t, kDimensions> strides{};
  const bool has_columns = sizes.size() == kDimensions;
  const int64_t columns = has_columns ? sizes[kHeadSize] : 1;
  strides[kHeadSize] = 1;
  strides[kHeads] = columns;
  strides[kLength] = columns * sizes[kHeads];
  strides[kBatch] = strides[kLength] * sizes[kLength];
  return empty_strided(sizes, std::span(strides).first(sizes.size()), type,
                       {aoti_torch_device_type_cpu(), -1});
}

// The order in memory of the query's dimensions, which its output has too
// (torch.empty_like).
enum class Order { Contiguous, HeadsInside, Other };

Order order_of(const TensorView& query) {
  const auto has_order = [&](std::array<size_t, kDimensions> dims) {
    int64_t outer = INT64_MAX;
    for (const size_t d : dims) {
      if (query.sizes[d] == 1) {
        continue;
      }
      if (query.strides[d] <= 0 || query.strides[d] >= outer) {
        return false;
      }
      outer = query.strides[d];
    }
    return true;
  };
  return has_order({kBatch, kHeads, kLength, kHeadSize})   ? Order::Contiguous
         : has_order({kBatch, kLength, kHeads, kHeadSize}) ? Order::HeadsInside
                                                           : Order::Other;
}

Tensor empty_output(const TensorView& query) {
  return order_of(query) == Order::HeadsInside
             ? empty_with_heads_inside(query.sizes, query.dtype)
             : empty_contiguous(query.sizes, query.dtype, query.device);
}

// PyTorch keeps the log-sum-exp with the heads inside, and that of a query
// without any key as 0.
template <class Number>
void store_log_sum_exp(const Tensor& contiguous, const Tensor& to) {
  const auto sizes = sizes_of(to);
  const auto strides = strides_of(to);
  const auto* from = static_cast<const Number*>(contiguous.const_data_ptr());
  auto* data = static_cast<Number*>(to.mutable_data_ptr());
  for (int64_t b = 0; b < sizes[kBatch]; ++b) {
    for (int64_t h = 0; h < sizes[kHeads]; ++h) {
      Number* row = data + b * strides[kBatch] + h * strides[kHeads];
      for (int64_t i = 0; i < sizes[kLength]; ++i, ++from) {
        row[i * strides[kLength]] =
            *from == -std::numeric_limits<Number>::infinity() ? Number{0}
                                                              : *from;
      }
    }
  }
}

Tensor nothing(ScalarType type) {
  return empty_contiguous(std::array<int64_t, 1>{0}, type,
                          {aoti_torch_device_type_cpu(), -1});
}

void run_forward(const AttentionCall& call, AttentionResults& results) {
  const TensorView& query = *call.query;
  const AttentionExtras extras;
  const AttentionShape shape = plan(call, extras);
  const auto mask = mask_of(call);
  const std::optional<TensorView> seed;
  // Few rows go the fastest way whatever follows: gradients are PyTorch's there
  // as a rule, which makes its own scores.
  const bool has_backward = shape.rows > cpu::attention::kDecodeRows &&
                            aoti_torch_grad_mode_is_enabled();
  const passes::ForwardResults made{empty_output(query),
                                    allocate_log_sum_exp(shape, query),
                                    nothing(query.dtype), has_backward};
  passes::run_forward({shape, query, *call.key, *call.value, mask, seed, 0.0,
                       call.is_causal, extras},
                      made);
  const ScalarType type = attention_accumulate_type(shape);
  const Tensor sums =
      empty_with_heads_inside(query.sizes.first(kHeadSize), type);
  type == ScalarType::Double ? store_log_sum_exp<double>(made.log_sum_exp, sums)
                             : store_log_sum_exp<float>(made.log_sum_exp, sums);
  results = {made.output, sums, std::nullopt};
}

void run_backward(const AttentionCall& call, AttentionResults& results) {
  const AttentionExtras extras;
  const AttentionShape shape = plan(call, extras);
  const auto mask = mask_of(call);
  const std::optional<TensorView> seed;
  const Tensor residual = nothing(call.query->dtype);
  const auto like = [](const TensorView& tensor) {
    return empty_with_heads_inside(tensor.sizes, tensor.dtype);
  };
  const Gradients made{like(*call.query), like(*call.key), like(*call.value),
                       residual};
  passes::run_backward(
      {shape, *call.grad_output, *call.query, *call.key, *call.value, mask,
       seed, *call.output, *call.log_sum_exp, residual, 0.0, call.is_causal,
       extras},
      made, false);
  results = {made.query, made.key, made.value};
}

// The table's ratio where the call is to be taken over, else 0.
float gain_of(const AttentionCall& call, AttentionMode mode) {
  const bool is_backward = call.grad_output != nullptr;
  if (!is_taken(call) ||
      (is_backward ? !has_forward_results(call)
                   : order_of(*call.query) == Order::Other)) {
    return 0;
  }
  const Table& measured = table();
  const Ratio found =
      ratio(measured, is_backward ? Pass::Backward : Pass::Forward,
            type_index(call.query->dtype), hidden_of(call),
            call.query->sizes[kLength], call.key->sizes[kLength]);
  if (mode == AttentionMode::Always) {
    return found.expected > 0 ? found.expected : 1;  // 1: not measured
  }
  return if_enough(measured, found);
}

}  // namespace

bool attention(const AttentionCall& call, AttentionResults& results) {
  const auto mode = state().attention.load(std::memory_order_relaxed);
  if (mode == AttentionMode::Off) {
    return false;
  }
  const bool is_backward = call.grad_output != nullptr;
  const AtenOperator op =
      is_backward ? AtenOperator::AttentionBackward : AtenOperator::Attention;
  const float gain = gain_of(call, mode);
  if (gain == 0) {
    count_left(op, call.query->dtype);
    return false;
  }
  const TakenCall taken(op, type_index(call.query->dtype), gain);
  is_backward ? run_backward(call, results) : run_forward(call, results);
  return true;
}

}  // namespace pkg::cpu::accelerate

// For pkg._C.
extern "C" PKG_EXPORT bool pkg_accelerated_attention(
    const pkg::AttentionCall& call, pkg::AttentionResults& results) {
  return pkg::cpu::accelerate::attention(call, results);
}
